//! Home writes that were answered and not sent to storage.
//!
//! Under durability by age a home write of a version that is not durable would have to wait until it is. Where it carries just what is
//! held as the newest version of its blocks, the guest may as well be told at once that it is done: a death of guest, VMM or worker
//! brings that version home as ever, because it goes on being owed. What the guest counts on from then on is kept here:
//!
//! * *Its home block is this version.* Whoever reads it gets the version ([`VmJcb::read_absorbed`]).
//! * *Nothing else goes there before it does*: a part of a block would land beside what was there before. Every other change of the
//!   block waits ([`crate::HomeWrite::Wait`]) until the host has written the version home. That covers the order, too.
//! * *The log does not give it up.* Whoever moves the tail asks before ([`VmJcb::has_absorbed_before`]); nobody takes the log
//!   elsewhere meanwhile.
//! * *A worker that follows knows.* The table says so before the guest is told. It cannot be guessed: of the other owed
//!   versions some may have been written over at home, past the journal (ext4 does that with its superblock), and must not go there.
//!
//! A newer committed version, a revoke and a discard end it: then the guest has to write the newer one home itself, or nobody reads the
//! block. Until it has, a read past the guest's cache finds what was there before; no kernel reads so what its journal has newer.
//!
//! Failure story: an absorbed version that cannot be written home stays one, and stays owed. Where somebody writes over the live log,
//! which no kernel does, the versions in it that do not count any more are lost here as they are in the log.

use crate::home::HostWrite;
use crate::inflight::Candidate;
use crate::jcb::VmJcb;
use crate::location::Location;
use crate::pages::Pages;
use guest_memory::MemorySlice;
use jbd2::sequence;
use std::ops::Range;

impl VmJcb {
    /// A guest's write to `blocks`, with the content of each: takes it in, if each is the newest version, held, of a transaction not
    /// before `tail`, and no other write to them is on its way. At most `most` are absorbed at a time.
    pub(crate) fn absorb(
        &mut self,
        pages: &Pages,
        blocks: &Range<u64>,
        payload: &[Option<MemorySlice>],
        tail: Option<u32>,
        most: usize,
    ) -> bool {
        let is_as_usual =
            self.contradiction.is_none() && !self.is_torn && !self.is_taken && !self.table.is_materialise();
        let count = (blocks.end - blocks.start) as usize;
        if !is_as_usual
            || payload.len() != count
            || self.absorbed.len() + count > most
            || self.in_flight.overlaps(blocks, None)
        {
            return false;
        }
        let block_bytes = self.shape.block_bytes as usize;
        let (mut held, mut given) = (vec![0; block_bytes], vec![0; block_bytes]);
        let mut positions = Vec::with_capacity(count);
        for (block, content) in blocks.clone().zip(payload) {
            let (Some(position), Some(content)) = (self.newest(block), content) else { return false };
            let location = self.location(position);
            let is_behind = |sequence| tail.is_none_or(|tail| !sequence::is_after(tail, sequence));
            if !matches!(location, Location::Guest(_) | Location::Block(_))
                || !self.sequence_of(position).is_some_and(is_behind)
                || !self.read_version(pages, position, &mut held)
            {
                return false;
            }
            content.copy_out(0, &mut given);
            if held != given {
                return false;
            }
            positions.push((block, position));
        }
        // A page is copied: the guest has done with it, and uses it again.
        let mut copies = Vec::new();
        for (_, position) in &positions {
            if matches!(self.location(*position), Location::Block(_)) {
                continue;
            }
            let is_read = self.read_held(pages, *position, &mut held);
            let Some(slot) = self.pool.insert_block(&held).filter(|_| is_read) else {
                copies.into_iter().for_each(|(_, slot)| self.pool.give_block(slot));
                return false;
            };
            copies.push((*position, slot));
        }
        for (position, slot) in copies {
            self.set_location(pages, position, Location::Block(slot));
        }
        for (block, position) in positions {
            let Location::Block(slot) = self.location(position) else { continue };
            self.overwritten.remove(position);
            self.table.store_absorbed(position, slot);
            self.absorbed.insert(position, block);
        }
        self.note_memory();
        true
    }

    /// A guest's write to `blocks`, with the content of each, that storage has already: of each the version of this transaction at this
    /// log block. Lets go of them where each is the newest version and just that, and no other write to them is on its way.
    pub(crate) fn is_home_already(
        &mut self,
        pages: &Pages,
        blocks: &Range<u64>,
        payload: &[Option<MemorySlice>],
        at_home: &[(u32, u32)],
    ) -> bool {
        let is_as_usual =
            self.contradiction.is_none() && !self.is_torn && !self.is_taken && !self.table.is_materialise();
        let count = (blocks.end - blocks.start) as usize;
        if !is_as_usual || payload.len() != count || at_home.len() != count || self.in_flight.overlaps(blocks, None) {
            return false;
        }
        let block_bytes = self.shape.block_bytes as usize;
        let (mut held, mut given) = (vec![0; block_bytes], vec![0; block_bytes]);
        let mut positions = Vec::with_capacity(count);
        for ((block, content), (sequence, position)) in blocks.clone().zip(payload).zip(at_home) {
            let Some(content) = content else { return false };
            if self.newest(block) != Some(*position)
                || self.sequence_of(*position) != Some(*sequence)
                || !matches!(self.location(*position), Location::Guest(_) | Location::Block(_))
                || self.overwritten.contains(*position)
                || self.absorbed.contains_key(position)
                || !self.read_version(pages, *position, &mut held)
            {
                return false;
            }
            content.copy_out(0, &mut given);
            let is_the_same = held == given;
            if !is_the_same {
                return false;
            }
            positions.push(*position);
        }
        for position in positions {
            self.set_location(pages, position, Location::Home);
        }
        self.counters.released_home += count as u64;
        self.give_back_sparse();
        true
    }

    /// Whether a block of these is absorbed.
    pub(crate) fn has_absorbed(&self, blocks: &Range<u64>) -> bool {
        if self.absorbed.len() as u64 <= blocks.end - blocks.start {
            self.absorbed.values().any(|block| blocks.contains(block))
        } else {
            blocks.clone().any(|block| self.newest(block).is_some_and(|position| self.absorbed.contains_key(&position)))
        }
    }

    /// Absorbed versions, by home block, transaction and log block.
    pub(crate) fn absorbed_versions(&self) -> Vec<(u64, u32, u32)> {
        self.absorbed
            .iter()
            .filter_map(|(position, block)| Some((*block, self.sequence_of(*position)?, *position)))
            .collect()
    }

    /// Lets go of these absorbed versions, which storage has at home, durably: where each is the newest, and no write to its home is on
    /// its way. Returns of how many.
    pub(crate) fn absorbed_are_home(&mut self, pages: &Pages, versions: &[(u64, u32, u32)]) -> u64 {
        let is_as_usual =
            self.contradiction.is_none() && !self.is_torn && !self.is_taken && !self.table.is_materialise();
        let mut released = 0;
        for (block, sequence, position) in versions {
            if is_as_usual
                && self.absorbed.contains_key(position)
                && self.newest(*block) == Some(*position)
                && self.sequence_of(*position) == Some(*sequence)
                && !self.in_flight.overlaps(&(*block..*block + 1), None)
            {
                self.set_location(pages, *position, Location::Home);
                released += 1;
            }
        }
        self.counters.released_home += released;
        self.give_back_sparse();
        released
    }

    /// What is absorbed, the oldest first.
    fn absorbed_by_age(&self) -> impl Iterator<Item = (u64, u32)> {
        let tail = self.transactions.front().map_or(0, |oldest| oldest.first_position);
        self.absorbed.range(tail..).chain(self.absorbed.range(..tail)).map(|(position, block)| (*block, *position))
    }

    /// Whether a log that begins with transaction `tail` would give an absorbed version up.
    pub(crate) fn has_absorbed_before(&self, tail: u32) -> bool {
        self.absorbed_by_age().next().is_some_and(|(_, oldest)| {
            self.sequence_of(oldest).is_none_or(|sequence| sequence::is_after(tail, sequence))
        })
    }

    /// Copies an absorbed version out; false where the block is not absorbed.
    pub(crate) fn read_absorbed(&self, pages: &Pages, block: u64, buffer: &mut [u8]) -> bool {
        self.newest(block)
            .is_some_and(|position| self.absorbed.contains_key(&position) && self.read_version(pages, position, buffer))
    }

    /// Picks up to `count` of the oldest absorbed versions that are wanted, by home block and transaction, for the host to write home, and says that
    /// they are in flight.
    pub(crate) fn absorbed_writes(
        &mut self,
        pages: &Pages,
        count: usize,
        is_wanted: &dyn Fn(u64, u32) -> bool,
    ) -> Vec<(usize, HostWrite)> {
        let mut writes = Vec::new();
        if self.is_taken {
            return writes;
        }
        let may_go = |(block, position): &(u64, u32)| {
            let is_free = !self.in_flight.overlaps(&(*block..*block + 1), None);
            is_free && self.sequence_of(*position).is_some_and(|sequence| is_wanted(*block, sequence))
        };
        let chosen: Vec<(u64, u32)> = self.absorbed_by_age().filter(may_go).take(count).collect();
        let mut buffer = vec![0; self.shape.block_bytes as usize];
        for (block, position) in chosen {
            writes.extend(self.host_write_begins(pages, position, block, &mut buffer));
        }
        writes.sort_by_key(|(_, write)| write.block);
        writes
    }

    /// An absorbed version of a log that is not trusted any more is where the guest wrote it; it stays held.
    pub(crate) fn is_where_guest_wrote_it(&mut self, candidate: &Candidate) {
        if let Location::Block(_) = self.location(candidate.position)
            && self.location(candidate.position) == candidate.location
            && self.absorbed.remove(&candidate.position).is_some()
        {
            self.table.store(candidate.position, candidate.location);
        }
    }
}
