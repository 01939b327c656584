//! Home writes: what of the log they make unneeded, and the host's own.
//!
//! A version is let go ("released") when the same content has reached its home block: never before the write is done,
//! never when another write to the block was in flight at the same time, never when the content may have changed under
//! the write. What was copied is written home from the copy, so that what lands is the committed version by construction.

use crate::inflight::{Candidate, HomeOperation, Writer};
use crate::jcb::VmJcb;
use crate::location::{Location, Past};
use crate::pages::Pages;
use crate::shown::KnownHomes;
use guest_memory::{MemorySlice, PageId};
use jbd2::sequence;
use std::ops::Range;
use std::sync::Arc;

/// One block of a home write: where to take its content from.
#[derive(Clone, Debug)]
pub enum Source {
    /// As the guest gave it.
    Given,
    /// From here instead, where the same content cannot change: memory that stays valid until the write has ended.
    Held(MemorySlice),
    /// These bytes instead.
    Bytes(Arc<[u8]>),
}

/// What a guest's home write may do.
#[derive(Debug)]
pub enum HomeWrite {
    /// Go ahead; tell [`crate::JournalArea::home_write_ended`] with this number. For each block that does not go out as
    /// it was given: its index within the write, and its source.
    Go {
        /// Number of the operation.
        operation: usize,
        /// Blocks to take from elsewhere.
        replaced: Vec<(usize, Source)>,
        /// Blocks to which it is seen to bring the newest committed version.
        carried: Vec<u64>,
    },
    /// The host is writing one of these blocks home, or the log elsewhere, or has to write one home before anybody else does
    /// ([`crate::JournalArea::absorb`]): wait until something has ended, then ask again.
    Wait,
    /// These blocks' committed versions are only in their home blocks, and the write may carry something else: read them
    /// and call [`crate::JournalArea::restore`] first, then ask again.
    Restore(Vec<u64>),
}

/// Over which committed versions a home write of the guest goes: those that were there when the guest asked for it. Where it carries
/// something else than such a version, that is newer.
#[derive(Clone, Debug)]
pub enum Over<'a> {
    /// Nobody knows: it was asked of another process, which may have taken in versions after that.
    Unknown,
    /// Over those of these home blocks. A version of another one that was committed after transaction `durable` is not durable, and is not
    /// let go of, though the write carries the same: it was asked for before there was that version.
    Blocks {
        /// Home blocks, in order.
        blocks: &'a [u64],
        /// The last transaction that is durable, if that matters.
        durable: Option<u32>,
        /// It had to wait, or was asked before of another process: it was asked before now.
        has_waited: bool,
    },
    /// Over all that it covers whole, as of a transaction: the last one that was committed when it was asked first. Nothing where that is
    /// now.
    AsOf {
        /// What it covers whole.
        whole: Range<u64>,
        /// The transaction.
        first_asked: Option<u32>,
        /// It had to wait, or was asked before of another process.
        has_waited: bool,
    },
}

impl Over<'_> {
    /// Whether it had to wait, or was asked before of another process. A kernel lets its tail pass a version of a file that was deleted while a write of it is still under way: what there
    /// was for it to bring when it was asked is not known now.
    fn has_waited(&self) -> bool {
        match self {
            Over::Unknown => true,
            Over::Blocks { has_waited, .. } => *has_waited,
            Over::AsOf { has_waited, .. } => *has_waited,
        }
    }

    /// Whether it was asked for when there was this version already, so that it is newer where it is not the same.
    fn is_over(&self, block: u64, sequence: u32) -> bool {
        match self {
            Over::Unknown => false,
            Over::Blocks { blocks, .. } => blocks.contains(&block),
            Over::AsOf { whole, first_asked, .. } => {
                whole.contains(&block) && !first_asked.is_some_and(|asked| sequence::is_after(sequence, asked))
            }
        }
    }

    /// Whether a version of a transaction may be forgotten where its home has just that.
    fn is_durable(&self, block: u64, sequence: u32) -> bool {
        match self {
            Over::Blocks { blocks, durable: Some(durable), .. } => {
                !sequence::is_after(sequence, *durable) || blocks.contains(&block)
            }
            _ => true,
        }
    }
}

/// A block that the host is to write home.
#[derive(Debug)]
pub struct HostWrite {
    /// Home block.
    pub block: u64,
    /// Its content.
    pub source: Source,
}

impl VmJcb {
    /// A guest's write to `blocks`. `payload` has the content of each block that the write covers whole, in order.
    pub(crate) fn home_write_begins(
        &mut self,
        pages: &Pages,
        blocks: Range<u64>,
        payload: &[Option<MemorySlice>],
        over: &Over<'_>,
    ) -> HomeWrite {
        if self.is_taken || self.in_flight.overlaps(&blocks, Some(Writer::Host)) {
            return HomeWrite::Wait;
        }
        // What the guest was told is there comes before what it writes next.
        if self.has_absorbed(&blocks) {
            return HomeWrite::Wait;
        }
        // Of two that are on their way at a time either may land last, and whoever reads it counts on that.
        let is_alone = !self.in_flight.overlaps(&blocks, None);
        let mut candidates = Vec::new();
        let mut replaced = Vec::new();
        let mut pinned = Vec::new();
        let mut restore = Vec::new();
        let mut held = Vec::new();
        let mut given = Vec::new();
        for block in blocks.clone() {
            let index = (block - blocks.start) as usize;
            let Some(position) = self.newest(block) else {
                if let Some(content) = payload.get(index).copied().flatten().filter(|_| !over.has_waited()) {
                    self.note_stray(block, &content, None);
                }
                continue;
            };
            let location = self.location(position);
            if location == Location::Home {
                restore.push(block);
                continue;
            }
            // Until it is seen that this very version goes home.
            self.overwritten.insert(position);
            let (true, Some(slice)) = (location.is_held(), payload.get(index).copied().flatten()) else { continue };
            let Some(sequence) = self.sequence_of(position) else { continue };
            if !over.is_durable(block, sequence) {
                continue;
            }
            let candidate = Candidate { block, position, sequence, location };
            if location == Location::Guest(slice.page())
                && slice.is_whole_page()
                && self.held_slice(pages, position).is_some()
            {
                if is_alone {
                    self.overwritten.remove(position);
                }
                candidates.push(candidate);
                self.strays.placed();
                continue;
            }
            held.resize(self.shape.block_bytes as usize, 0);
            given.resize(self.shape.block_bytes as usize, 0);
            slice.copy_out(0, &mut given);
            let is_read = self.read_version(pages, position, &mut held);
            if !is_read || held != given {
                if !over.has_waited() {
                    self.note_stray(block, &slice, is_read.then_some(held.as_slice()));
                }
                continue;
            }
            self.strays.placed();
            if is_alone {
                self.overwritten.remove(position);
            }
            if slice.page() != PageId::NONE {
                pages.cool(slice.page());
            }
            let source = match (location, self.held_slice(pages, position)) {
                (Location::Block(_), Some(slice)) => Source::Held(slice),
                // Another page has the same content, and is the guest's to change once it was copied out: what lands has
                // to be what the guest asked for even then, since it forgets the block afterwards.
                _ => Source::Bytes(Arc::from(held.as_slice())),
            };
            if let Location::Block(slot) = location {
                self.pin(slot);
                pinned.push(slot);
            }
            replaced.push((index, source));
            candidates.push(candidate);
        }
        if !restore.is_empty() {
            for slot in pinned {
                self.unpin(slot);
            }
            return HomeWrite::Restore(restore);
        }
        let carried: Vec<u64> = candidates.iter().map(|candidate| candidate.block).collect();
        let past = self.past_begins(&blocks, &carried, over);
        let operation = self.in_flight.begin(HomeOperation {
            blocks,
            writer: Writer::Guest,
            tainted: false,
            candidates,
            pinned,
            past,
        });
        HomeWrite::Go { operation, replaced, carried }
    }

    /// A write of the guest is about to change these homes. Before it does, the table says over which versions it goes past the guest's
    /// journal, and does not say any more that something else is there. Gives the former.
    fn past_begins(&mut self, blocks: &Range<u64>, carried: &[u64], over: &Over<'_>) -> Vec<(u64, u32, u32)> {
        let mut past = Vec::new();
        for (block, position) in self.versions_in(blocks) {
            let Some(sequence) = self.sequence_of(position) else { continue };
            let is_over = over.is_over(block, sequence);
            let is_carried = carried.binary_search(&block).is_ok();
            // Whatever was there: from now on nobody knows.
            let is_begun = self.table.past(position).is_some() || is_over && !is_carried;
            // Nor of what an earlier worker was asked for and has not noted: it may be newer than the version, or older.
            let is_unknown = matches!(over, Over::Unknown) && !is_carried;
            self.say_past(position, (is_begun || is_unknown).then_some(Past::Begun));
            if is_begun && !is_carried {
                past.push((block, position, sequence));
            }
        }
        past
    }

    /// The guest has asked just now to write `blocks`, over the versions of those that it covers whole, and waits.
    pub(crate) fn past_asked(&mut self, blocks: &Range<u64>, whole: &Range<u64>) {
        let over = Over::AsOf { whole: whole.clone(), first_asked: None, has_waited: false };
        for (block, position) in self.versions_in(blocks) {
            let Some(sequence) = self.sequence_of(position) else { continue };
            if self.table.past(position).is_none() && over.is_over(block, sequence) {
                self.say_past(position, Some(Past::Begun));
            }
        }
    }

    /// A write past the guest's journal is there.
    fn past_ended(&mut self, past: &[(u64, u32, u32)]) {
        for (block, position, sequence) in past {
            if self.newest(*block) == Some(*position)
                && self.sequence_of(*position) == Some(*sequence)
                && self.table.past(*position) == Some(Past::Begun)
                && !self.in_flight.overlaps(&(*block..*block + 1), None)
            {
                self.say_past(*position, Some(Past::Written));
            }
        }
    }

    /// A home write, the guest's or the host's, has ended; with `ok` it has reached storage. Returns blocks to which it may have brought
    /// something else than the version it was to bring: that was in a page which is the guest's to change again since it began.
    pub(crate) fn home_write_ended(&mut self, pages: &Pages, operation: usize, ok: bool) -> Vec<u64> {
        let Some(mut operation) = self.in_flight.end(operation) else { return Vec::new() };
        self.has_nothing_to_write = false;
        let is_let_go = |candidate: &&Candidate| {
            let Candidate { position, sequence, location, .. } = **candidate;
            let is_as_it_was = self.location(position) == location && self.sequence_of(position) == Some(sequence);
            matches!(location, Location::Guest(_)) && !is_as_it_was
        };
        let changed: Vec<u64> =
            operation.candidates.iter().filter(is_let_go).map(|candidate| candidate.block).collect();
        if self.contradiction.is_some() {
            // Where home is, is in doubt; but not where the guest itself has written.
            if !operation.tainted && ok {
                operation.candidates.iter().for_each(|candidate| self.is_where_guest_wrote_it(candidate));
            }
            operation.candidates.clear();
        }
        let mut released = 0;
        if ok && !operation.tainted {
            for candidate in &operation.candidates {
                let unchanged = self.newest(candidate.block) == Some(candidate.position)
                    && self.location(candidate.position) == candidate.location
                    && self.sequence_of(candidate.position) == Some(candidate.sequence);
                if unchanged {
                    self.set_location(pages, candidate.position, Location::Home);
                    released += 1;
                }
            }
        }
        if ok {
            self.past_ended(&operation.past);
        }
        if operation.writer == Writer::Guest && !self.transactions.is_empty() {
            for (_, position) in self.versions_in(&operation.blocks) {
                if self.location(position).is_held() {
                    self.written_over.insert(position);
                }
            }
        }
        for slot in operation.pinned {
            self.unpin(slot);
        }
        match operation.writer {
            Writer::Guest => self.counters.released_home += released,
            Writer::Host => self.counters.written_home_by_host += released,
        }
        self.give_back_sparse();
        changed
    }

    /// The committed version of `block`, which was only at home, is about to be overwritten there: hold it again.
    pub(crate) fn restore(&mut self, pages: &Pages, block: u64, content: &[u8]) -> bool {
        let Some(position) = self.newest(block) else { return true };
        if self.location(position) != Location::Home {
            return true;
        }
        if !self.table.make_room_for_one(position) {
            return false;
        }
        let slot = if self.is_escaped(position) {
            // Held as it was in the log, so that its checksum there still fits.
            let mut logged = content.to_vec();
            logged[..4].fill(0);
            self.pool.insert_block(&logged)
        } else {
            self.pool.insert_block(content)
        };
        let Some(slot) = slot else { return false };
        self.set_location(pages, position, Location::Block(slot));
        true
    }

    /// Where the log has the committed version of `block` that is only at home, for who brings it there because there is no memory for
    /// it: its log block and its transaction. It is in `content` as it belongs home, and after that as the log has it.
    pub(crate) fn place_of_version(&self, block: u64, content: &mut [u8]) -> Option<(u32, u32)> {
        let position = self.newest(block).filter(|position| self.location(*position) == Location::Home)?;
        let sequence = self.sequence_of(position)?;
        if self.is_escaped(position) {
            content[..4].fill(0);
        }
        Some((position, sequence))
    }

    /// It is there, if it is the same still.
    pub(crate) fn restored_in_place(&mut self, pages: &Pages, block: u64, (position, sequence): (u32, u32)) {
        if self.newest(block) == Some(position)
            && self.location(position) == Location::Home
            && self.sequence_of(position) == Some(sequence)
        {
            self.set_location(pages, position, Location::Storage);
        }
    }

    /// The guest no longer cares for what is in `blocks`.
    pub(crate) fn discarded(&mut self, pages: &Pages, blocks: Range<u64>) {
        // Of a log that is taken elsewhere the guest asks again.
        if self.contradiction.is_some() || self.is_taken {
            return;
        }
        // Whichever is shorter: the range, or what is known.
        for (block, position) in self.versions_in(&blocks) {
            if self.location(position).is_held() {
                self.counters.released_discarded += 1;
            }
            self.drop_version(pages, (block, position));
        }
    }

    /// The newest committed versions that are not at home: transaction, home block, log block; by transaction, the oldest first.
    pub(crate) fn versions_owed(&self) -> Vec<(u32, u64, u32)> {
        self.versions_where(|location| location.is_held() || location == Location::Storage)
    }

    /// Of what is owed, the home blocks that the guest has written past its journal since, or may have; nothing where no more is known.
    pub(crate) fn written_past(&self) -> Vec<(u64, Option<Past>)> {
        let found = self.versions_held(|position| self.overwritten.contains(position));
        found.into_iter().map(|(block, position)| (block, self.table.past(position))).collect()
    }

    /// Of what is owed, that over which the guest may have written something else, and of which it is not known that it has: home block and log
    /// block, by home block.
    pub(crate) fn versions_unknown(&self) -> Vec<(u64, u32)> {
        let is_unknown =
            |position: u32| self.overwritten.contains(position) && self.table.past(position) != Some(Past::Written);
        let mut unknown = self.versions_held(is_unknown);
        unknown.sort_unstable();
        unknown
    }

    /// Newest versions that are held, and wanted, in no order: home block and log block. One pass over all, and none where none is wanted.
    fn versions_held(&self, is_wanted: impl Fn(u32) -> bool) -> Vec<(u64, u32)> {
        if self.overwritten.is_empty() {
            return Vec::new();
        }
        let is_held = |position: u32| is_wanted(position) && self.location(position).is_held();
        self.blocks_and_positions().filter(|(_, position)| is_held(*position)).collect()
    }

    /// Those that are at home, likewise.
    pub(crate) fn versions_at_home(&self) -> Vec<(u32, u64, u32)> {
        self.versions_where(|location| location == Location::Home)
    }

    fn versions_where(&self, is_wanted: impl Fn(Location) -> bool) -> Vec<(u32, u64, u32)> {
        let mut versions = Vec::new();
        let Some(format) = self.format.filter(|_| self.contradiction.is_none()) else { return versions };
        let Some(tail) = self.transactions.front().map(|transaction| transaction.first_position) else {
            return versions;
        };
        let found = self.blocks_and_positions().filter(|(_, position)| is_wanted(self.location(*position)));
        versions.extend(found.filter_map(|(block, position)| Some((self.sequence_of(position)?, block, position))));
        versions.sort_unstable_by_key(|(_, _, position)| format.distance(tail, *position));
        versions
    }

    /// Picks up to `count` of the oldest owed blocks, for the host to write home, and says that they are in flight.
    /// `copied_only` leaves out what takes no host memory. Blocks with a write in flight are left for later, and those that `may_be` does
    /// not let be written.
    pub(crate) fn host_writes(
        &mut self,
        pages: &Pages,
        count: usize,
        copied_only: bool,
        may_be: &dyn Fn(u64) -> bool,
    ) -> Vec<(usize, HostWrite)> {
        if self.format.is_none() || self.contradiction.is_some() || self.is_torn || self.is_taken {
            return Vec::new();
        }
        let mut writes = Vec::new();
        let Some(tail) = self.transactions.front().map(|transaction| transaction.first_position) else {
            return writes;
        };
        let mut known = KnownHomes::default();
        let mut chosen = Vec::new();
        // Rule 3 of ARCHITECTURE.md: of what was superseded nothing is known here, so that no older version can be found.
        // What the guest wrote over itself is newer, for the guest: only a replay would bring the version back.
        let kept = &self.overwritten;
        for here in self.owed.iter_from(tail, kept) {
            if chosen.len() >= count {
                break;
            }
            let wanted = match self.location(here) {
                Location::Guest(_) => !copied_only,
                Location::Block(_) => true,
                _ => false,
            };
            let Some(block) = Some(here).filter(|_| wanted).and_then(|_| self.home_in_order(pages, here, &mut known))
            else {
                continue;
            };
            if self.in_flight.overlaps(&(block..block + 1), None) || !may_be(block) {
                continue;
            }
            chosen.push((here, block));
        }
        let mut buffer = vec![0; self.shape.block_bytes as usize];
        for (here, block) in chosen {
            writes.extend(self.host_write_begins(pages, here, block, &mut buffer));
        }
        // With writes under way there may be more when they have ended.
        self.has_nothing_to_write = count > 0 && writes.is_empty() && !self.in_flight.has_host_writes();
        writes.sort_by_key(|(_, write)| write.block);
        writes
    }

    /// The host is about to write a held version home; nothing where its content is in memory that has gone.
    pub(crate) fn host_write_begins(
        &mut self,
        pages: &Pages,
        position: u32,
        block: u64,
        buffer: &mut [u8],
    ) -> Option<(usize, HostWrite)> {
        let sequence = self.sequence_of(position)?;
        let location = self.location(position);
        let source = match self.held_slice(pages, position) {
            Some(slice) => Source::Held(slice),
            None if self.read_version(pages, position, buffer) => Source::Bytes(Arc::from(&*buffer)),
            None => return None,
        };
        let mut pinned = Vec::new();
        if let Location::Block(slot) = location {
            self.pin(slot);
            pinned.push(slot);
        }
        let operation = self.in_flight.begin(HomeOperation {
            blocks: block..block + 1,
            writer: Writer::Host,
            tainted: false,
            candidates: vec![Candidate { block, position, sequence, location }],
            pinned,
            past: Vec::new(),
        });
        Some((operation, HostWrite { block, source }))
    }
}
