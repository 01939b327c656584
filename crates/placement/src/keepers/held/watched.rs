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

/// A file system as of some transaction.
struct AsOf<'a> {
    log: &'a Log,
    blocks: &'a Blocks,
}

impl ReadAt for AsOf<'_> {
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        let block_bytes = u64::from(self.log.place.block_bytes);
        let mut done = 0;
        while done < buffer.len() {
            let at = offset + done as u64;
            let into = (at % block_bytes) as usize;
            let count = (buffer.len() - done).min(block_bytes as usize - into);
            let part = &mut buffer[done..done + count];
            match self.blocks.get(&(at / block_bytes)) {
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
    /// A log that owes this already: each block with its newest version.
    pub fn owing(log: &Log, owed: Vec<(u64, Version, Arc<[u8]>)>) -> io::Result<Self> {
        // Descriptors among them say where bitmaps are.
        let newest = owed.iter().map(|(block, _, content)| (*block, Arc::clone(content))).collect();
        let mut watched = Watched { newest, ..Watched::default() };
        let mut newest = Blocks::new();
        for (block, version, content) in owed {
            match watched.freed.is_watched(&AsOf { log, blocks: &watched.newest }, block)? {
                Some(true) => {
                    newest.insert(block, Arc::clone(&content));
                    watched.pending.insert(version, (block, content));
                }
                Some(false) => {}
                None => watched.is_lost = true,
            }
        }
        watched.newest = newest;
        Ok(watched)
    }

    /// A transaction was committed. Gives what it frees. `content` gives a version as it belongs home; nothing where it is not known
    /// any more.
    pub fn committed(
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
            match self.freed.is_watched(&AsOf { log, blocks: &self.newest }, *block)? {
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
        let freed = self.freed.of(&AsOf { log, blocks: &self.newest }, &contents)?;
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
        !self.is_lost && self.allocation.is_free(&AsOf { log, blocks: &self.durable }, block).unwrap_or(false)
    }

    pub fn is_lost(&self) -> bool {
        self.is_lost
    }
}
