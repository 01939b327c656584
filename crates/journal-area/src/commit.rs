//! `LOG_OP_MPROTECT`: protect a set of buffers, record their tuples, all or nothing (the paper's section 4.1), as the
//! guest's log writes show it: blocks are held when they are written, and count when their commit block is accepted.

use crate::batch::{Accepted, Content, LogWrite, Outcome};
use crate::jcb::{Holding, Partial, Transaction, VmJcb};
use crate::location::Location;
use crate::lone::{Candidate, take_lone};
use crate::pages::{HotPages, Pages};
use crate::table::Tail;
use guest_memory::PageId;
use jbd2::{Checksum, Commit, Descriptor, Kind, Revoke, Tag};
use std::collections::HashSet;

impl VmJcb {
    /// Holds a batch of log writes, then accepts what is complete. Every page is protected on return. `copies_left` bytes may be copied for
    /// nothing but speed.
    pub(crate) fn hold(&mut self, pages: &Pages, writes: &[LogWrite], copies_left: u64) -> Outcome {
        let block_bytes = self.shape.block_bytes as usize;
        self.table.set_read(false);
        let rule = pages.rule();
        let repeated = self.written_over(pages, writes);
        let may_retain = self.holding == Holding::Retain && !self.table.is_materialise() && pages.can_protect();
        let mut outcome = Outcome::default();
        let mut block = vec![0; block_bytes];
        let mut retained: Vec<Candidate> = Vec::new();
        let mut copied: Vec<usize> = Vec::new();
        let mut control: Vec<usize> = Vec::new();
        // What cannot be held, since nothing could name it.
        let mut wordless: HashSet<usize> = HashSet::new();
        let mut seen_pages = HashSet::new();
        for (index, write) in writes.iter().enumerate().filter(|(index, _)| !repeated.contains(index)) {
            if !self.table.make_room(write.position) {
                if !self.table.can_say_stored(write.position) {
                    outcome.no_room.push(index);
                    continue;
                }
                wordless.insert(index);
            }
            if write.content.is_control() {
                control.push(index);
                if may_retain
                    && rule == HotPages::Lone
                    && let Some(format) = self.format
                {
                    write.content.copy_out(0, &mut block);
                    self.ahead.see(&format, write.position, &block);
                }
                continue;
            }
            match &write.content {
                Content::Page(slice)
                    if may_retain
                        && !wordless.contains(&index)
                        && slice.is_whole_page()
                        && slice.len() == block_bytes
                        && pages.should_retain(slice, rule)
                        && seen_pages.insert(slice.page()) =>
                {
                    let home_block = self.ahead.home_block(self.format.as_ref(), write.position);
                    retained.push(Candidate { index, page: slice.page(), home_block });
                }
                _ => copied.push(index),
            }
        }
        let lone = if rule == HotPages::Lone { take_lone(&mut retained, copies_left) } else { Vec::new() };
        for candidate in lone {
            let index = candidate.index;
            writes[index].content.copy_out(0, &mut block);
            if jbd2::peek(&block).is_some() {
                control.push(index);
            } else if let Some(slot) = self.pool.insert_block(&block) {
                self.set_location(pages, writes[index].position, Location::Block(slot));
                self.counters.pages_copied += 1;
            } else {
                // It need not be copied, and where it is takes no memory.
                retained.push(candidate);
            }
        }
        // Protect first: from here on the guest cannot change what is about to count.
        let list: Vec<PageId> = retained.iter().map(|candidate| candidate.page).collect();
        let claimed = pages.retain(&list);
        self.counters.pages_protected += (list.len() - claimed.refused.len()) as u64;
        self.counters.protect_calls += claimed.calls;
        for Candidate { index, page, .. } in retained {
            // Another log has it by now, say: a guest may bring one page into two journals at once.
            if claimed.refused.contains(&page) {
                copied.push(index);
                continue;
            }
            self.set_location(pages, writes[index].position, Location::Guest(page));
            // It has become one before it was protected.
            if writes[index].content.is_control() {
                self.rewind_if_read(writes[index].position);
            }
        }
        for index in copied {
            writes[index].content.copy_out(0, &mut block);
            // It has become one since.
            if jbd2::peek(&block).is_some() {
                control.push(index);
                continue;
            }
            let slot = if wordless.contains(&index) { None } else { self.pool.insert_block(&block) };
            match slot {
                Some(slot) => {
                    self.set_location(pages, writes[index].position, Location::Block(slot));
                    self.counters.pages_copied += 1;
                }
                None => {
                    // Whatever was at this place before is not what the guest wrote now.
                    self.clear_position(pages, writes[index].position);
                    self.table.promise(writes[index].position);
                    outcome.no_memory.push(index);
                }
            }
        }
        // Control blocks last, so that a table cut off here never shows a commit block before what it commits.
        for index in control {
            writes[index].content.copy_out(0, &mut block);
            let position = writes[index].position;
            self.rewind_if_read(position);
            let location = if wordless.contains(&index) { None } else { self.insert_control(&block) };
            match location {
                Some(location) => self.set_location(pages, position, location),
                None => {
                    self.clear_position(pages, position);
                    self.table.promise(position);
                    outcome.no_memory.push(index);
                }
            }
        }
        outcome.committed = self.accept_most(pages, 1);
        outcome.accepted = std::mem::take(&mut self.accepted);
        outcome.repeated = repeated.into_iter().collect();
        self.give_back_sparse();
        self.note_memory();
        outcome
    }

    /// A guest never writes over a transaction that its log still begins before; whoever does is about to put something
    /// else in the log's place, or repeats a request. Writes that change nothing are named, so that they are left out;
    /// from the first transaction on that is changed, none counts any more.
    fn written_over(&mut self, pages: &Pages, writes: &[LogWrite]) -> HashSet<usize> {
        let mut repeated = HashSet::new();
        let mut changed: Option<usize> = None;
        let (mut held, mut given) = (Vec::new(), Vec::new());
        for (index, write) in writes.iter().enumerate() {
            let Some(transaction) = self.live_index(write.position) else { continue };
            held.resize(self.shape.block_bytes as usize, 0);
            given.resize(self.shape.block_bytes as usize, 0);
            write.content.copy_out(0, &mut given);
            if self.read_held(pages, write.position, &mut held) && held == given {
                repeated.insert(index);
            } else {
                changed = Some(changed.map_or(transaction, |first| first.min(transaction)));
            }
        }
        if let Some(first) = changed {
            log::warn!(
                "the guest writes over its live journal: {} transactions of it do not count any more",
                self.transactions.len() - first
            );
            self.rewind(first);
        }
        repeated
    }

    fn insert_control(&mut self, block: &[u8]) -> Option<Location> {
        if let Some(slot) = self.pool.insert_small(block) {
            return Some(Location::Small(slot));
        }
        self.pool.insert_block(block).map(Location::Block)
    }

    /// A control block that has been read already is written anew: read the transaction again from its beginning.
    fn rewind_if_read(&mut self, position: u32) {
        if self.partial.position != 0
            && self.distance(self.cursor.position, position)
                < self.distance(self.cursor.position, self.partial.position)
        {
            self.partial = Partial::default();
        }
    }

    /// A log block could not be held and was written to its own place on storage.
    pub(crate) fn stored(&mut self, pages: &Pages, position: u32) -> u32 {
        self.table.keep_promise(position);
        // Not where the log was closed meanwhile, and nobody counts on the block.
        if self.table.make_room(position) || self.table.can_say_stored(position) {
            self.set_location(pages, position, Location::Storage);
        }
        self.accept(pages)
    }

    /// Reads on from the cursor and accepts every transaction that is complete. Returns how many.
    pub(crate) fn accept(&mut self, pages: &Pages) -> u32 {
        self.accept_most(pages, u32::MAX)
    }

    /// The same where no more than `most` can be complete: a kernel begins a transaction when it was told that the one before is there. What
    /// completes more of them was written by somebody else, in another order, and nothing of it may be let go of.
    fn accept_most(&mut self, pages: &Pages, most: u32) -> u32 {
        let Some(format) = self.format else { return 0 };
        if self.table.is_materialise() || !self.is_open() {
            return 0;
        }
        let mut accepted = 0;
        let mut block = vec![0; self.shape.block_bytes as usize];
        // A transaction is shorter than the log, so that a log full of descriptors cannot keep us here.
        let mut budget = u64::from(self.shape.log_blocks) * 2;
        loop {
            let position = match self.partial.position {
                0 => self.cursor.position,
                position => position,
            };
            // A log that runs into its own beginning is not a log. The order of its blocks, which the books are kept by,
            // would mean nothing.
            if self.live_blocks() + self.partial.blocks + 1 >= u64::from(format.log_blocks()) {
                self.partial = Partial::default();
                return accepted;
            }
            if budget == 0 || !self.read_held(pages, position, &mut block) {
                return accepted;
            }
            budget -= 1;
            let sequence = self.cursor.sequence;
            match jbd2::peek(&block) {
                Some(header) if header.sequence == sequence => match header.kind {
                    Kind::Descriptor => {
                        let descriptor = Descriptor::new(&format, &block);
                        if !descriptor.checksum_ok() {
                            return accepted;
                        }
                        let count = descriptor.tags().count() as u64;
                        let mut next = position;
                        (0..=count).for_each(|_| next = format.next(next));
                        budget = budget.saturating_sub(count);
                        self.partial.position = next;
                        self.partial.blocks += 1 + count;
                    }
                    Kind::Revoke => {
                        let revoke = Revoke::new(&format, &block);
                        if revoke.records().is_err() || !revoke.checksum_ok() {
                            return accepted;
                        }
                        self.partial.position = format.next(position);
                        self.partial.blocks += 1;
                    }
                    Kind::Commit => {
                        if !self.is_complete(pages, &block) {
                            return accepted;
                        }
                        if accepted == most {
                            self.distrust(format!(
                                "transactions {} and {sequence} were complete at the same moment, as no kernel writes them",
                                sequence.wrapping_sub(1)
                            ));
                            return accepted;
                        }
                        self.commit(pages, position, format.next(position));
                        accepted += 1;
                        if self.contradiction.is_some() {
                            return accepted;
                        }
                    }
                    _ => return accepted,
                },
                _ => return accepted,
            }
        }
    }

    /// Log blocks of the transactions that are live.
    fn live_blocks(&self) -> u64 {
        let tail = self.transactions.front().map_or(self.cursor.position, |oldest| oldest.first_position);
        u64::from(self.distance(tail, self.cursor.position))
    }

    /// Reads the tags of the transaction that is being read, as far as it was, out of its descriptors, in their order: log block and tag.
    /// Stops where `see` says so. False then, and where the log does not read any more as it did: its control blocks end where they did, too.
    pub(crate) fn pending_tags(&self, pages: &Pages, see: &mut dyn FnMut(u32, &Tag) -> bool) -> bool {
        let mut block = vec![0; self.shape.block_bytes as usize];
        let (mut position, mut blocks) = (self.cursor.position, 0);
        while blocks < self.partial.blocks {
            let Some((next, count)) = self.control_block(pages, position, &mut block, see) else { return false };
            position = next;
            blocks += count;
        }
        blocks == self.partial.blocks
    }

    /// One step of this: the control block at a position. Gives the next one's, and how many log blocks that is further.
    fn control_block(
        &self,
        pages: &Pages,
        position: u32,
        block: &mut [u8],
        see: &mut dyn FnMut(u32, &Tag) -> bool,
    ) -> Option<(u32, u64)> {
        let format = self.format?;
        let is_read = self.read_held(pages, position, block);
        let header = jbd2::peek(block).filter(|header| is_read && header.sequence == self.cursor.sequence)?;
        let mut next = format.next(position);
        let mut count = 1;
        match header.kind {
            Kind::Descriptor => {
                for tag in Descriptor::new(&format, block).tags() {
                    if !see(next, &tag) {
                        return None;
                    }
                    next = format.next(next);
                    count += 1;
                }
                Some((next, count))
            }
            Kind::Revoke => Some((next, count)),
            _ => None,
        }
    }

    /// Whether every block of the partial transaction is there and its commit block is right.
    fn is_complete(&mut self, pages: &Pages, commit: &[u8]) -> bool {
        let Some(format) = self.format else { return false };
        let is_missing = |location| match location {
            Location::None => true,
            // Of the version that counts, or of what was there before the guest wrote it.
            Location::Home | Location::Gone => !self.is_rebuilding,
            Location::Guest(_) | Location::Block(_) | Location::Small(_) | Location::Storage => false,
        };
        if !self.pending_tags(pages, &mut |position, _| !is_missing(self.location(position))) {
            return false;
        }
        if format.checksum == Checksum::V1 {
            return self.transaction_checksum_ok(pages, commit);
        }
        Commit::new(&format, commit).checksum_ok()
    }

    /// The checksum of jbd2's first kind runs over descriptors and data, so it is computed from what is held.
    fn transaction_checksum_ok(&mut self, pages: &Pages, commit: &[u8]) -> bool {
        let Some(format) = self.format else { return false };
        let mut block = vec![0; self.shape.block_bytes as usize];
        let mut sum = !0;
        let mut position = self.cursor.position;
        let end = self.partial.position.max(1);
        let mut budget = self.shape.log_blocks;
        let mut data = HashSet::new();
        self.pending_tags(pages, &mut |position, _| data.insert(position));
        while position != end && budget > 0 {
            budget -= 1;
            if !self.read_held(pages, position, &mut block) {
                // On storage for want of memory: its checksum is left to the replay.
                return true;
            }
            let is_revoke =
                !data.contains(&position) && jbd2::peek(&block).is_some_and(|header| header.kind == Kind::Revoke);
            if !is_revoke {
                sum = jbd2::crc32_be(sum, &block);
            }
            position = format.next(position);
        }
        Commit::new(&format, commit).transaction_checksum_ok(sum)
    }

    /// Accepts the partial transaction: its blocks are the newest versions from here on.
    fn commit(&mut self, pages: &Pages, commit_position: u32, next: u32) {
        let partial = std::mem::take(&mut self.partial);
        let sequence = self.cursor.sequence;
        let first_position = self.cursor.position;
        let mut tags = Vec::new();
        let mut found: Vec<(u32, Tag)> = Vec::new();
        // What it revokes counts after what it writes, wherever in it that is said.
        let mut revoke_positions = Vec::new();
        let (mut block, mut data) =
            (vec![0; self.shape.block_bytes as usize], vec![0; self.shape.block_bytes as usize]);
        self.transactions.push_back(Transaction { sequence, first_position });
        let (mut position, mut blocks) = (first_position, 0);
        while blocks < partial.blocks {
            found.clear();
            let mut see = |position, tag: &Tag| {
                found.push((position, *tag));
                true
            };
            let Some((next, count)) = self.control_block(pages, position, &mut block, &mut see) else { break };
            if jbd2::peek(&block).is_some_and(|header| header.kind == Kind::Revoke) {
                revoke_positions.push(position);
            }
            for (position, tag) in &found {
                self.commit_tag(pages, sequence, (*position, tag), &mut data, &mut tags);
            }
            position = next;
            blocks += count;
        }
        // It was complete a moment ago, and nothing was written since: if a guest can change what is kept all the same, it is its own
        // journal that nobody here replays, and no reason to end everybody's worker.
        if blocks != partial.blocks {
            self.distrust(format!("transaction {sequence} reads otherwise than when it was found complete"));
        }
        self.cursor = Tail { position: next, sequence: sequence.wrapping_add(1) };
        let mut revokes = Vec::new();
        for position in revoke_positions {
            let is_read = self.read_held(pages, position, &mut block);
            let Some(format) = self.format.filter(|_| is_read) else { continue };
            // It had good records when it was found.
            for block in Revoke::new(&format, &block).records().into_iter().flatten() {
                if let Some(position) = self.newest(block) {
                    self.drop_version(pages, (block, position));
                    self.counters.released_revoked += 1;
                }
                if self.tells_accepted {
                    revokes.push(block);
                }
            }
        }
        self.counters.transactions += 1;
        self.has_nothing_to_write = false;
        if self.tells_accepted {
            self.accepted.push(Accepted { sequence, first_position, commit_position, tags, revokes });
        }
    }

    /// Accepts one version. It has its place in `tags`, if anybody wants to know, unless replay would skip it.
    fn commit_tag(
        &mut self,
        pages: &Pages,
        sequence: u32,
        (position, tag): (u32, &Tag),
        data: &mut [u8],
        tags: &mut Vec<(u32, u64)>,
    ) {
        let home = tag.block;
        if !self.is_home(home) {
            self.contradicts_tag(sequence, home);
            return;
        }
        // What replay would skip is no version of anything: an older one stays the newest. It stays held, so that
        // replay finds it as it was and skips it too.
        if !self.data_checksum_ok(pages, sequence, position, tag, data) {
            log::warn!(
                "transaction {sequence}: log block {position} is not a good version of block {home}; it is ignored"
            );
            return;
        }
        self.commit_version(pages, position, home, tag.escaped);
        self.note_committed(pages, position, home, data);
        if self.tells_accepted {
            tags.push((position, home));
        }
    }

    fn data_checksum_ok(&self, pages: &Pages, sequence: u32, position: u32, tag: &Tag, block: &mut [u8]) -> bool {
        let Some(format) = &self.format else { return false };
        if !format.has_block_checksums() || !self.read_held(pages, position, block) {
            return true;
        }
        jbd2::data_checksum_ok(format, sequence, tag.checksum, block)
    }
}

#[cfg(test)]
mod tests;
