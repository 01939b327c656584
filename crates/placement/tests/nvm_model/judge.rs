//! The judge: what recovery would leave, and what it does leave, against jbd2's replay of the complete journal.

use super::{BLOCK, Guest};
use jbd2::{Content, Format, LogRead, Plan as Replay, Superblock};
use nvm_journal::Found;
use nvm_journal::medium::SimulatedMedium;
use placement::{NvmDisk, NvmOptions};
use recovery::Access;
use std::collections::{BTreeMap, HashMap};
use std::convert::Infallible;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;

/// A log as it was written, but for a transaction that may not be committed yet.
struct CompleteLog<'a> {
    blocks: &'a HashMap<u32, Vec<u8>>,
    hidden: u32,
}

impl LogRead for CompleteLog<'_> {
    type Error = Infallible;

    fn read(&mut self, position: u32, buffer: &mut [u8]) -> Result<Content, Infallible> {
        match self.blocks.get(&position) {
            Some(block) if jbd2::peek(block).is_none_or(|header| header.sequence != self.hidden) => {
                buffer.copy_from_slice(block);
            }
            _ => buffer.fill(0),
        }
        Ok(Content::Present)
    }
}

impl Guest {
    /// What recovery would leave now.
    pub(super) fn check(&mut self) {
        self.nvm.check().expect("the books are right");
        let region = self.nvm.look_at_region(|medium| medium.bytes().to_vec()).expect("it has not failed");
        self.judge(&region);
    }

    fn replayed(&self, superblock: &[u8], last: u32) -> BTreeMap<u64, Vec<u8>> {
        let (superblock, format): (Superblock, Format) = Superblock::parse(superblock).expect("a superblock");
        let mut log = CompleteLog { blocks: &self.log, hidden: last.wrapping_add(1) };
        let plan = Replay::new(&mut log, &superblock, &format, &|_| true).expect("a good log");
        let mut replayed = BTreeMap::new();
        for block in plan.blocks() {
            let copy = block.newest();
            let mut data = vec![0; BLOCK];
            let Ok(_) = log.read(copy.position, &mut data);
            assert!(copy.restore(plan.format(), &mut data));
            replayed.insert(block.home(), data);
        }
        replayed
    }

    /// Whether a block may hold this: in one of the readings, the block being in use.
    fn is_allowed(&self, block: u64, content: &[u8], readings: &[BTreeMap<u64, Vec<u8>>]) -> bool {
        let (byte, bit) = ((block - 1) as usize / 8, (block - 1) % 8);
        readings.iter().any(|replayed| match replayed.get(&block) {
            Some(replayed) => replayed[..] == *content,
            None => self.ideal.possible(block).iter().any(|possible| possible[..] == *content),
        }) || readings.iter().any(|replayed| match replayed.get(&self.bitmap) {
            Some(bitmap) => bitmap[byte] >> bit & 1 == 0,
            None => self.ideal.possible(self.bitmap).iter().any(|bitmap| bitmap[byte] >> bit & 1 == 0),
        })
    }

    fn readings(&self, found: &Found) -> Vec<BTreeMap<u64, Vec<u8>>> {
        assert!(
            !jbd2::sequence::is_after(self.committed, found.sequence),
            "the guest was told that {} is committed, and the region ends with {}",
            self.committed,
            found.sequence
        );
        // A transaction that failed is none, though the region has its number for a moment while it holds a block again.
        let last = if self.committing.is_none() { self.committed } else { found.sequence };
        self.superblocks.iter().map(|superblock| self.replayed(superblock, last)).collect()
    }

    pub(super) fn judge(&self, region: &[u8]) {
        let Some(found) = Found::read(region).expect("a region").filter(|found| found.owner.is_some()) else {
            assert!(self.next_request <= 1, "the region has no owner");
            return;
        };
        found.verify(region).expect("a good region");
        let readings = self.readings(&found);
        for block in self.metadata.iter().chain(&self.dynamic).copied() {
            let in_region = found.latest.get(&block).map(|header| found.content(region, header).to_vec());
            let (place, possible) = match in_region {
                Some(content) => ("in the region", vec![Arc::from(content)]),
                None => ("at home", self.ours.possible(block)),
            };
            for content in possible {
                assert!(
                    self.is_allowed(block, &content, &readings),
                    "block {block} {place} is not what a complete journal would leave there (transaction {})",
                    found.sequence
                );
            }
        }
        let known = |block: &u64| self.metadata.contains(block) || self.dynamic.contains(block);
        assert!(found.latest.keys().all(known), "the region holds what the guest never wrote");
    }

    /// The power fails, and what is left is really recovered, in copies.
    pub fn recover(&mut self) {
        let region = self.nvm.look_at_region(|medium| medium.bytes().to_vec()).expect("it has not failed");
        let found = Found::read(&region).expect("a region").expect("a region");
        let path: PathBuf = self.directory.path().join("recovered");
        std::fs::copy(self.directory.path().join("image"), &path).expect("copied");
        let copy = std::fs::OpenOptions::new().read(true).write(true).open(&path).expect("the copy");
        for block in self.ours.written().collect::<Vec<_>>() {
            let possible = self.ours.possible(block);
            let content = &possible[self.random.below(possible.len() as u64) as usize];
            copy.write_all_at(content, block * BLOCK as u64).expect("written");
        }
        let medium = SimulatedMedium::from_image(region);
        let nvm = NvmDisk::with_medium(NvmOptions::new("left"), 0, Box::new(medium)).expect("a good region");
        let image = recovery::Disk::open(&path, Access::Write).expect("the copy");
        nvm.finish_earlier(&image).expect("recovered");
        let readings = self.readings(&found);
        for block in self.metadata.iter().chain(&self.dynamic).copied() {
            let mut content = vec![0; BLOCK];
            copy.read_exact_at(&mut content, block * BLOCK as u64).expect("read");
            assert!(self.is_allowed(block, &content, &readings), "block {block} is not as a complete journal has it");
        }
        std::fs::remove_file(&path).expect("removed");
    }
}
