//! The file system's bitmaps as of two moments, of which the disk has neither for certain: after the last transaction that was committed,
//! and after the last that is durable. From the first it is told what a transaction frees, from the second what is free.
//!
//! Only blocks that matter for that are kept: bitmaps, group descriptors, the superblock. What was not journaled since the log is made
//! durable is as it is at home. What is not understood is never free, and frees everything.

use crate::log::Log;
use durability::{Freed, Version};
use extfs::{Allocation, FreedBlocks, ReadAt};
use jbd2::sequence;
use std::collections::HashMap;
use std::io;
use std::sync::Arc;

type Blocks = HashMap<u64, Arc<[u8]>>;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Watched {
    freed: FreedBlocks,
    allocation: Allocation,
    newest: Blocks,
    durable: Blocks,
    /// Not durable yet.
    pending: HashMap<Version, (u64, Arc<[u8]>)>,
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
    log: &'a Log,
    find: Find,
}

fn as_of<'a>(log: &'a Log, blocks: &'a Blocks) -> AsOf<'a, impl Fn(u64) -> Option<Arc<[u8]>>> {
    AsOf { log, find: |block| blocks.get(&block).cloned() }
}

impl<Find: Fn(u64) -> Option<Arc<[u8]>>> ReadAt for AsOf<'_, Find> {
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        let block_bytes = u64::from(self.log.place.block_bytes);
        let mut done = 0;
        while done < buffer.len() {
            let at = offset + done as u64;
            let into = (at % block_bytes) as usize;
            let count = (buffer.len() - done).min(block_bytes as usize - into);
            let part = &mut buffer[done..done + count];
            match (self.find)(at / block_bytes) {
                Some(content) => part.copy_from_slice(&content[into..into + count]),
                None => self.log.home.file.read_exact_at(part, self.log.place.home_start + at)?,
            }
            done += count;
        }
        Ok(())
    }

    fn size(&self) -> u64 {
        self.log.place.home_blocks * u64::from(self.log.place.block_bytes)
    }
}

impl Watched {
    /// A log that owes this already: each block with its newest version, of which `content` gives the bytes. They may be as many as the
    /// log has, so that only those are kept that matter here; but all have been read when this returns.
    pub fn owing(
        log: &Log,
        owed: &HashMap<u64, Version>,
        content: &dyn Fn(Version) -> Option<Arc<[u8]>>,
    ) -> io::Result<Self> {
        let mut watched = Watched::default();
        // Descriptors among them say where bitmaps are.
        let newest = AsOf { log, find: |block| owed.get(&block).and_then(|version| content(*version)) };
        for (block, version) in owed {
            let content = content(*version).ok_or_else(|| io::Error::other("a version that it owes cannot be read"))?;
            match watched.freed.is_watched(&newest, *block)? {
                Some(true) => {
                    watched.newest.insert(*block, Arc::clone(&content));
                    watched.pending.insert(*version, (*block, content));
                }
                Some(false) => {}
                None => watched.is_lost = true,
            }
        }
        Ok(watched)
    }

    /// A transaction was committed. Gives what it frees. `content` gives a version as it belongs home; nothing where it is not known
    /// any more.
    ///
    /// # Errors
    /// When a bitmap cannot be read. What the transaction has changed is not known then, nor what later ones do: not for this one alone.
    pub fn committed(
        &mut self,
        log: &Log,
        blocks: &[(u64, Version)],
        content: &mut dyn FnMut(Version) -> Option<Arc<[u8]>>,
    ) -> io::Result<Freed> {
        let freed = self.judge(log, blocks, content);
        self.is_lost |= freed.is_err();
        freed
    }

    fn judge(
        &mut self,
        log: &Log,
        blocks: &[(u64, Version)],
        content: &mut dyn FnMut(Version) -> Option<Arc<[u8]>>,
    ) -> io::Result<Freed> {
        if self.is_lost {
            return Ok(Freed::Unknown);
        }
        let mut changed: Vec<(u64, Version, Arc<[u8]>)> = Vec::new();
        for (block, version) in blocks {
            match self.freed.is_watched(&as_of(log, &self.newest), *block)? {
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
        let freed = self.freed.of(&as_of(log, &self.newest), &contents)?;
        // Bitmaps are elsewhere from now on: a file system that grows. Where, is in blocks that were not watched.
        self.is_lost |= !self.freed.is_known();
        if self.is_lost {
            log::warn!(
                "disk {}: the bitmaps of the file system at byte {} do not tell what a transaction frees; until it is next mounted, \
                 every commit is durable before its guest is told of it (as with durable-within=0), and nothing is an append",
                log.home.options.name,
                log.place.home_start
            );
            return Ok(Freed::Unknown);
        }
        for (block, version, content) in changed {
            self.newest.insert(block, Arc::clone(&content));
            self.pending.insert(version, (block, content));
        }
        Ok(freed.map_or(Freed::Unknown, Freed::Blocks))
    }

    /// Transactions until `through` are durable, with these newest versions.
    pub fn made_durable(&mut self, through: u32, blocks: &[(u64, Version)]) {
        for (block, version) in blocks {
            if let Some((_, content)) = self.pending.remove(version) {
                self.allocation.changed(*block, Some(&content));
                self.durable.insert(*block, content);
            }
        }
        // What was superseded before it became durable.
        self.pending.retain(|version, _| sequence::is_after(parts(*version).0, through));
    }

    /// Whether the durable bitmap calls a block free.
    pub fn is_free(&mut self, log: &Log, block: u64) -> bool {
        !self.is_lost && self.allocation.is_free(&as_of(log, &self.durable), block).unwrap_or(false)
    }

    pub fn is_lost(&self) -> bool {
        self.is_lost
    }
}
