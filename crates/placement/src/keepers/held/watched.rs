//! The file system's bitmaps as of two moments, of which the disk has neither for certain: after the last transaction that was committed,
//! and after the last that is durable. From the first it is told what a transaction frees, from the second what is free.
//!
//! Only blocks that matter for that are kept: block bitmaps, group descriptors, the superblock; and only until home has, durably, what is
//! durable. So they are no more than the logs have, the guest's and storage's, whatever the disk's size. What is not kept is as it is
//! at home. What is not understood is never free, and frees everything.

use crate::log::Log;
use durability::{Freed, Version};
use extfs::{Allocation, FreedBlocks, ReadAt};
use jbd2::sequence;
use std::collections::HashMap;
use std::io;
use std::sync::Arc;

type Blocks = HashMap<u64, Arc<[u8]>>;

/// The file system as home has it.
pub(super) trait Homes {
    fn disk_name(&self) -> &str;
    /// Where it begins on the disk.
    fn start(&self) -> u64;
    fn blocks(&self) -> u64;
    fn block_bytes(&self) -> u32;
    /// `offset` counts from its start.
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()>;
}

impl Homes for Log {
    fn disk_name(&self) -> &str {
        &self.home.options.name
    }

    fn start(&self) -> u64 {
        self.place.home_start
    }

    fn blocks(&self) -> u64 {
        self.place.home_blocks
    }

    fn block_bytes(&self) -> u32 {
        self.place.block_bytes
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.home.file.read_exact_at(buffer, self.place.home_start + offset)
    }
}

/// Versions that are not durable yet: of each block the newest, and the one that is being made durable.
#[derive(Debug, Default)]
struct Pending(HashMap<u64, Vec<Known>>);

/// A version and its content.
type Known = (Version, Arc<[u8]>);

impl Pending {
    /// What is being made durable ends with transaction `making`.
    fn put(&mut self, block: u64, version: Version, content: Arc<[u8]>, making: Option<u32>) {
        let versions = self.0.entry(block).or_default();
        // What this supersedes becomes durable only where that has begun.
        versions.retain(|(version, _)| making.is_some_and(|last| !sequence::is_after(parts(*version).0, last)));
        versions.push((version, content));
    }

    fn get(&self, block: u64, version: Version) -> Option<Arc<[u8]>> {
        let versions = self.0.get(&block)?;
        versions.iter().find(|(one, _)| *one == version).map(|(_, content)| Arc::clone(content))
    }

    /// Transactions until `through` are durable.
    fn made_durable(&mut self, through: u32) {
        self.0.retain(|_, versions| {
            versions.retain(|(version, _)| sequence::is_after(parts(*version).0, through));
            !versions.is_empty()
        });
    }
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Watched {
    freed: FreedBlocks,
    allocation: Allocation,
    newest: Blocks,
    durable: Blocks,
    pending: Pending,
    /// Where bitmaps are, or what is in one, is not known any more: nothing can be told until the log is opened anew.
    is_lost: bool,
}

/// Names a version by its transaction and its log block.
pub(super) fn version(sequence: u32, position: u32) -> Version {
    Version(u64::from(sequence) << 32 | u64::from(position))
}

/// Transaction and log block of a version.
pub(super) fn parts(version: Version) -> (u32, u32) {
    ((version.0 >> 32) as u32, version.0 as u32)
}

/// A file system as of some transaction: what a block has that was journaled since the log is made durable.
struct AsOf<'a, Find: Fn(u64) -> Option<Arc<[u8]>>> {
    homes: &'a dyn Homes,
    find: Find,
}

fn as_of<'a>(homes: &'a dyn Homes, blocks: &'a Blocks) -> AsOf<'a, impl Fn(u64) -> Option<Arc<[u8]>>> {
    AsOf { homes, find: |block| blocks.get(&block).cloned() }
}

impl<Find: Fn(u64) -> Option<Arc<[u8]>>> ReadAt for AsOf<'_, Find> {
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        let block_bytes = u64::from(self.homes.block_bytes());
        let mut done = 0;
        while done < buffer.len() {
            let at = offset + done as u64;
            let into = (at % block_bytes) as usize;
            let count = (buffer.len() - done).min(block_bytes as usize - into);
            let part = &mut buffer[done..done + count];
            match (self.find)(at / block_bytes) {
                Some(content) => part.copy_from_slice(&content[into..into + count]),
                None => self.homes.read_at(at, part)?,
            }
            done += count;
        }
        Ok(())
    }

    fn size(&self) -> u64 {
        self.homes.blocks() * u64::from(self.homes.block_bytes())
    }
}

impl Watched {
    /// A log that owes this already: each block with its newest version, of which `content` gives the bytes. They may be as many as the
    /// log has, so that only those are kept that matter here; but all have been read when this returns.
    pub fn owing(
        homes: &dyn Homes,
        owed: &HashMap<u64, Version>,
        content: &dyn Fn(Version) -> Option<Arc<[u8]>>,
    ) -> io::Result<Self> {
        let mut watched = Watched::default();
        // Descriptors among them say where bitmaps are.
        let newest = AsOf { homes, find: |block| owed.get(&block).and_then(|version| content(*version)) };
        for (block, version) in owed {
            let content = content(*version).ok_or_else(|| io::Error::other("a version that it owes cannot be read"))?;
            match watched.freed.is_watched(&newest, *block)? {
                Some(true) => {
                    watched.newest.insert(*block, Arc::clone(&content));
                    watched.pending.put(*block, *version, content, None);
                }
                Some(false) => {}
                None => watched.is_lost = true,
            }
        }
        Ok(watched)
    }

    /// A transaction was committed. Gives what it frees. What is being made durable ends with transaction `making`. `content` gives a
    /// version as it belongs home; nothing where it is not known any more.
    ///
    /// # Errors
    /// When a bitmap cannot be read. What the transaction has changed is not known then, nor what later ones do: not for this one alone.
    pub fn committed(
        &mut self,
        homes: &dyn Homes,
        blocks: &[(u64, Version)],
        making: Option<u32>,
        content: &mut dyn FnMut(Version) -> Option<Arc<[u8]>>,
    ) -> io::Result<Freed> {
        let freed = self.judge(homes, blocks, making, content);
        self.is_lost |= freed.is_err();
        freed
    }

    fn judge(
        &mut self,
        homes: &dyn Homes,
        blocks: &[(u64, Version)],
        making: Option<u32>,
        content: &mut dyn FnMut(Version) -> Option<Arc<[u8]>>,
    ) -> io::Result<Freed> {
        if self.is_lost {
            return Ok(Freed::Unknown);
        }
        let mut changed: Vec<(u64, Version, Arc<[u8]>)> = Vec::new();
        for (block, version) in blocks {
            match self.freed.is_watched(&as_of(homes, &self.newest), *block)? {
                Some(false) => {}
                Some(true) => match content(*version) {
                    Some(content) => changed.push((*block, *version, content)),
                    // A later one of the same block came with it.
                    None => self.is_lost = true,
                },
                None => self.is_lost = true,
            }
        }
        let contents: Vec<(u64, &[u8])> = changed.iter().map(|(block, _, content)| (*block, &content[..])).collect();
        let freed = self.freed.of(&as_of(homes, &self.newest), &contents)?;
        // Bitmaps are elsewhere from now on: a file system that grows. Where, is in blocks that were not watched.
        self.is_lost |= !self.freed.is_known();
        if self.is_lost {
            log::warn!(
                "disk {}: the bitmaps of the file system at byte {} do not tell what a transaction frees; until it is next mounted, \
                 every commit is durable before its guest is told of it (as with durable-within=0), and nothing is an append",
                homes.disk_name(),
                homes.start()
            );
            return Ok(Freed::Unknown);
        }
        for (block, version, content) in changed {
            self.newest.insert(block, Arc::clone(&content));
            self.pending.put(block, version, content, making);
        }
        Ok(freed.map_or(Freed::Unknown, Freed::Blocks))
    }

    /// Transactions until `through` are durable, with these newest versions.
    pub fn made_durable(&mut self, homes: &dyn Homes, through: u32, blocks: &[(u64, Version)]) {
        for (block, version) in blocks {
            if let Some(content) = self.pending.get(*block, *version) {
                self.allocation.changed(*block, Some(&content));
                self.durable.insert(*block, content);
            } else if !self.is_lost
                && let Err(error) = self.keep_again(homes, *block)
            {
                self.is_lost = true;
                log::error!(
                    "disk {}: reading block {block} of the file system at byte {} failed: {error}; until it is next mounted, \
                     every commit is durable before its guest is told of it (as with durable-within=0), and nothing is an append",
                    homes.disk_name(),
                    homes.start()
                );
            }
        }
        // What was superseded before it became durable.
        self.pending.made_durable(through);
    }

    /// A version is durable once more because something older is to be written over it at home, where it still is: rule (h).
    fn keep_again(&mut self, homes: &dyn Homes, block: u64) -> io::Result<()> {
        if self.durable.contains_key(&block) {
            return Ok(());
        }
        match self.freed.is_watched(&as_of(homes, &self.newest), block)? {
            Some(true) => {}
            Some(false) => return Ok(()),
            None => {
                self.is_lost = true;
                return Ok(());
            }
        }
        let mut content = vec![0; homes.block_bytes() as usize];
        homes.read_at(block * u64::from(homes.block_bytes()), &mut content)?;
        let content: Arc<[u8]> = Arc::from(content);
        self.allocation.changed(block, Some(&content));
        self.newest.entry(block).or_insert_with(|| Arc::clone(&content));
        self.durable.insert(block, content);
        Ok(())
    }

    /// Home has, durably, what is durable of these blocks.
    pub fn at_home(&mut self, blocks: &[u64]) {
        for block in blocks {
            let Some(durable) = self.durable.remove(block) else { continue };
            if self.newest.get(block).is_some_and(|newest| Arc::ptr_eq(newest, &durable)) {
                self.newest.remove(block);
            }
        }
    }

    /// Whether the durable bitmap calls a block free.
    pub fn is_free(&mut self, homes: &dyn Homes, block: u64) -> bool {
        !self.is_lost && self.allocation.is_free(&as_of(homes, &self.durable), block).unwrap_or(false)
    }

    pub fn is_lost(&self) -> bool {
        self.is_lost
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    const BLOCK: usize = 4096;

    struct Image(Vec<u8>);

    impl Homes for Image {
        fn disk_name(&self) -> &str {
            "disk"
        }

        fn start(&self) -> u64 {
            0
        }

        fn blocks(&self) -> u64 {
            (self.0.len() / BLOCK) as u64
        }

        fn block_bytes(&self) -> u32 {
            BLOCK as u32
        }

        fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
            buffer.copy_from_slice(&self.0[offset as usize..][..buffer.len()]);
            Ok(())
        }
    }

    impl Image {
        fn new() -> Self {
            let image = tempfile::NamedTempFile::new().expect("made");
            image.as_file().set_len(32 << 20).expect("a length");
            let made = Command::new("mke2fs").args(["-q", "-F", "-t", "ext4", "-b", "4096"]).arg(image.path()).output();
            assert!(made.expect("e2fsprogs are installed").status.success());
            Image(std::fs::read(image.path()).expect("read"))
        }

        fn content(&self, block: u64) -> Arc<[u8]> {
            Arc::from(&self.0[block as usize * BLOCK..][..BLOCK])
        }

        fn put(&mut self, block: u64, content: &[u8]) {
            self.0[block as usize * BLOCK..][..BLOCK].copy_from_slice(content);
        }

        /// The bitmap of the first group, and a block that it calls free.
        fn bitmap(&self) -> (u64, u64) {
            let superblock = extfs::Superblock::parse(&self.0[1024..][..1024]).expect("a file system");
            let descriptor = &self.0[BLOCK..][..superblock.descriptor_size.into()];
            let bitmap = u64::from(u32::from_le_bytes(descriptor[..4].try_into().expect("four bytes")));
            let free = (0..self.blocks()).rev().find(|block| !is_set(&self.content(bitmap), *block));
            (bitmap, free.expect("one is free"))
        }
    }

    fn is_set(bitmap: &[u8], block: u64) -> bool {
        bitmap[block as usize / 8] & 1 << (block % 8) != 0
    }

    fn with(bitmap: &[u8], block: u64, is_used: bool) -> Arc<[u8]> {
        let mut bitmap = bitmap.to_vec();
        let bit = 1 << (block % 8);
        let byte = &mut bitmap[block as usize / 8];
        *byte = if is_used { *byte | bit } else { *byte & !bit };
        Arc::from(bitmap)
    }

    struct Rig {
        image: Image,
        watched: Watched,
        bitmap: u64,
        free: u64,
        sequence: u32,
    }

    impl Rig {
        fn new() -> Self {
            let image = Image::new();
            let (bitmap, free) = image.bitmap();
            Rig { image, watched: Watched::default(), bitmap, free, sequence: 10 }
        }

        /// The bitmap with the block used or not.
        fn content(&self, is_used: bool) -> Arc<[u8]> {
            with(&self.image.content(self.bitmap), self.free, is_used)
        }

        fn commit(&mut self, is_used: bool, making: Option<u32>) -> (Version, Freed) {
            self.sequence += 1;
            let (version, content) = (version(self.sequence, 1), self.content(is_used));
            let blocks = [(self.bitmap, version)];
            let freed = self.watched.committed(&self.image, &blocks, making, &mut |_| Some(Arc::clone(&content)));
            (version, freed.expect("readable"))
        }

        fn made_durable(&mut self, version: Version) {
            self.watched.made_durable(&self.image, parts(version).0, &[(self.bitmap, version)]);
        }

        fn is_free(&mut self) -> bool {
            self.watched.is_free(&self.image, self.free)
        }

        fn kept(&self) -> [usize; 3] {
            [self.watched.newest.len(), self.watched.durable.len(), self.watched.pending.0.values().map(Vec::len).sum()]
        }
    }

    #[test]
    fn of_a_bitmap_no_more_is_kept_than_matters() {
        let mut rig = Rig::new();
        let mut making = None;
        for round in 0..1000 {
            let (version, _) = rig.commit(round % 2 == 0, making.map(|version| parts(version).0));
            match making.take() {
                Some(made) if round % 10 == 9 => rig.made_durable(made),
                made => making = made.or((round % 10 == 5).then_some(version)),
            }
            assert!(rig.kept()[2] <= 2, "{:?}", rig.kept());
        }
    }

    #[test]
    fn the_version_that_is_being_made_durable_stays() {
        let mut rig = Rig::new();
        let (made, _) = rig.commit(true, None);
        assert!(rig.is_free(), "it is not durable");
        for is_used in [false, true, false] {
            rig.commit(is_used, Some(parts(made).0));
        }
        rig.made_durable(made);
        assert!(!rig.is_free(), "it was in use as of then");
        let (last, freed) = rig.commit(false, None);
        assert_eq!(freed, Freed::Blocks(Vec::new()), "the one before freed it");
        rig.made_durable(last);
        assert!(rig.is_free());
    }

    /// What home has is not kept beside it.
    #[test]
    fn what_home_tells_is_not_kept() {
        let mut rig = Rig::new();
        let (version, _) = rig.commit(true, None);
        rig.made_durable(version);
        let content = rig.content(true);
        rig.image.put(rig.bitmap, &content);
        rig.watched.at_home(&[rig.bitmap]);
        assert_eq!(rig.kept(), [0, 0, 0]);
        assert!(!rig.is_free());
        // A newer one counts for what is freed, and not yet for what is free.
        let (version, freed) = rig.commit(false, None);
        assert_eq!(freed, Freed::Blocks(std::iter::once(rig.free..rig.free + 1).collect()));
        assert!(!rig.is_free());
        rig.made_durable(version);
        assert!(rig.is_free());
    }

    #[test]
    fn a_newer_version_stays_when_home_has_the_durable_one() {
        let mut rig = Rig::new();
        let (version, _) = rig.commit(true, None);
        rig.made_durable(version);
        let content = rig.content(true);
        rig.commit(false, None);
        rig.image.put(rig.bitmap, &content);
        rig.watched.at_home(&[rig.bitmap]);
        let (_, freed) = rig.commit(false, None);
        assert_eq!(freed, Freed::Blocks(Vec::new()), "the one before freed it");
    }

    /// Rule (h): something older is about to be written over what home alone has.
    #[test]
    fn what_is_made_durable_once_more_is_kept_again() {
        let mut rig = Rig::new();
        let (version, _) = rig.commit(true, None);
        rig.made_durable(version);
        let (older, newer) = (rig.content(false), rig.content(true));
        rig.image.put(rig.bitmap, &newer);
        rig.watched.at_home(&[rig.bitmap]);
        rig.made_durable(version);
        rig.image.put(rig.bitmap, &older);
        assert!(!rig.is_free(), "the log on storage has it in use");
        let (_, freed) = rig.commit(false, None);
        assert_eq!(freed, Freed::Blocks(std::iter::once(rig.free..rig.free + 1).collect()));
    }
}
