//! A log whose books were proven wrong while its guest runs ([`crate::watch`] says what proves it, [`crate::distrust`] what is right then):
//! something lies between the file system and this disk, so that nobody here knows where its homes are.
//!
//! Nothing more is written home by us but what the guest has written to just that block itself, and nothing more is committed. When
//! what is on its way has ended, the log goes to its own place as its guest has it: each live transaction where it lies in the guest's
//! log, with the blocks of which it has the latest version, as long as it was (blocks that revoke nothing fill it up), and the
//! blocks that are of no complete transaction as they are. When all of that is durable, the region says so ([`nvm_journal::Owner::is_left`]), and
//! has the superblock that storage is to have: the log begins where its guest says, and was not what it seemed. That goes to storage last;
//! then the region is given back. From there on everything of the guest's goes to storage as it is, and nobody here replays that log.
//!
//! It must never: write home what the guest has not written there; say on storage that the log is there before all of it is.
//!
//! Failure story: a kill before the region says that the log is in its own place leaves it on NVM, and who finds it begins with trust. One
//! after that leaves a region from which nothing is brought home: who finds it writes the superblock, if that is missing
//! ([`super::books::RegionBooks::judge`]). Where storage fails, the guest's journal is given up; when the VM has ended it is tried again,
//! from what is in the log's own place, if all is.

use super::State;
use super::captured::Captured;
use super::inflight::Writer;
use super::leaving_state::Leaving;
use super::log_stream::Tail;
use super::report::NvmCounters;
use super::versions::HomeState;
use super::work::Work;
use crate::disk::DiskCounters;
use crate::keeper::{Side, Step, Steps};
use crate::left_to_guest;
use crate::log::Log;
use crate::mark;
use block_route::Status;
use jbd2::{Compound, CompoundBlock, Part, Superblock, SuperblockEdit, build};
use nvm_journal::ATTACHMENT_BYTES;
use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use write_log::LoggedFile;

impl Work {
    /// The journal is not what it seems: it goes to its own place as soon as it may.
    pub(super) fn distrust(&mut self, state: &mut State, log: &Log, why: Option<String>, steps: &mut Steps) {
        let Some(mut why) = why else { return };
        let counters = &self.nvm.counters;
        let bytes = [&counters.append_bytes_written_home, &counters.checkpoint_bytes];
        let by_host: u64 = bytes.iter().map(|bytes| bytes.load(Ordering::Relaxed)).sum();
        if by_host > 0 {
            why.push_str(&format!(
                "; {} blocks were written home by amberlog before, perhaps to wrong places: run e2fsck",
                by_host / u64::from(log.place.block_bytes)
            ));
        }
        left_to_guest::say(&self.area, log, &why);
        // One that ends owes nothing, and its next opening is on storage.
        self.is_distrusted = matches!(state, State::Held(_)) && self.closing.is_none();
        if let Some(checkpoint) = self.checkpoints.now.as_mut().filter(|_| self.is_distrusted) {
            // Before it sends any more.
            checkpoint.end_soon();
        }
        self.drive(state, steps);
    }

    /// Brings a distrusted log to its own place, if nothing is in the way.
    pub(super) fn drive_distrusted(&mut self, state: &mut State, steps: &mut Steps) {
        if !self.is_distrusted || self.closing.is_some() {
            return;
        }
        let State::Held(captured) = state else { return };
        if matches!(self.departure.phase, Some(Leaving::Gathering | Leaving::Draining)) {
            self.departure.phase = None;
        }
        if let Some(checkpoint) = &mut self.checkpoints.now {
            checkpoint.end_soon();
        }
        if self.departure.phase.is_some()
            || self.commit.is_some() && !self.has_lost()
            || self.checkpoints.now.is_some()
            || self.early.is_writing()
            || self.in_flight.has_any_of(Writer::Host)
            || self.is_tail_on_its_way()
            || captured.log.has_own_writes()
        {
            return;
        }
        self.is_distrusted = false;
        // The guest was told of what its last transaction has.
        if let Err(error) = self.make_lost_durable(captured).and_then(|()| self.leave_as_it_is(captured)) {
            log::error!(
                "disk {}: writing a journal to its own place that is not what it seemed failed: {error}; it is given up",
                self.name()
            );
            captured.has_failed = true;
            // Who waits hears of it.
            return self.advance(state, steps);
        }
        let State::Held(captured) = std::mem::replace(state, State::Failed) else { return };
        steps.push(Side::Home, Step::OnStorage { from: captured.stream.tail().sequence });
        captured.log.end_emptying(None);
        // Flushes that come now have to cover it, and what the guest wrote before.
        self.home.set_dirty();
        self.early.forget();
        self.settled.clear();
        self.watch.forget();
        self.give_back(*captured, state);
        self.held.drain(..).for_each(|request| steps.release(request, Status::Ok));
        self.ask_again(steps);
    }

    /// The guest is gone: its log goes to its own place, for its next kernel.
    pub(super) fn leave_to_guest(&mut self, state: &mut State) -> io::Result<()> {
        let State::Held(captured) = state else { return Ok(()) };
        self.make_acknowledged_durable(captured)?;
        // What was not committed was not told to anybody.
        captured.journal.abandon();
        self.leave_as_it_is(captured)?;
        if let State::Held(captured) = std::mem::replace(state, State::Failed) {
            self.give_back(*captured, state);
        }
        Ok(())
    }

    /// The same of a log with which nothing is wrong: whichever kernel comes has it there, and it is held again when it is next opened.
    pub(super) fn leave_in_place(&mut self, state: &mut State) -> io::Result<()> {
        let State::Held(captured) = state else { return Ok(()) };
        let (log, mut superblock) = (Arc::clone(&captured.log), captured.owner.attachment);
        let tail = captured.stream.tail();
        SuperblockEdit::new(&mut superblock)
            .map_err(io::Error::other)?
            .start(tail.position)
            .sequence(tail.sequence)
            .seal();
        self.leave_to_guest(state)?;
        // A kill before that leaves it said to be not what it seemed, which costs its place in the region, and nothing else.
        let failed_flushes = log.journal.file.failed_flushes();
        log.journal.file.write_all_at(&superblock, log.place_of(0)?)?;
        log.journal.file.sync_since(failed_flushes)
    }

    /// Writes a log to its own place as its guest has it: durable on return.
    fn leave_as_it_is(&mut self, captured: &mut Captured) -> io::Result<()> {
        let log = Arc::clone(&captured.log);
        let failed_flushes = log.journal.file.failed_flushes();
        self.bring_seen_home(captured)?;
        let mut mark = None;
        if !captured.owner.is_left {
            self.put_live_in_place(captured)?;
            // A copy of the disk that was made before has nothing of that: it is to be told from this one.
            mark = Some(self.begin_mark(captured)?);
        }
        if let Err(error) = log.journal.file.sync_since(failed_flushes) {
            self.flush_failed(captured);
            return Err(error);
        }
        if let Some(mark) = mark {
            self.end_mark(captured, mark)?;
            // From here on the region has nothing to bring home, and who finds it has this superblock to write.
            captured.owner.attachment = left_superblock(&captured.owner.attachment, captured.stream.tail())?;
            captured.owner.is_left = true;
            captured.journal.set_owner(&captured.owner)?;
        }
        let block = &captured.owner.attachment;
        let said = log.journal.file.write_all_at(block, log.place_of(0)?);
        let said = said.and_then(|()| log.journal.file.sync_since(failed_flushes));
        if let Err(error) = said {
            // Whether storage says that the log is there is not known.
            self.restore_mark(captured);
            return Err(error);
        }
        NvmCounters::add(&self.nvm.counters.blocks_dropped, captured.journal.len() as u64);
        Ok(())
    }

    /// Writes each block of the live log to its place.
    pub(super) fn put_live_in_place(&self, captured: &Captured) -> io::Result<()> {
        let log = &captured.log;
        let mut bytes = 0;
        let mut write = |position: u32, block: &[u8]| {
            bytes += block.len() as u64;
            log.journal.file.write_all_at(block, log.place_of(position)?)
        };
        captured.each_live_block(&self.home.file, &mut write)?;
        for (position, block) in captured.stream.copies() {
            write(position, block)?;
        }
        DiskCounters::add(&log.journal.counters.journal_bytes_to_storage, bytes);
        Ok(())
    }
}

/// The superblock of a log in its own place that nobody but its guest's kernel may replay.
fn left_superblock(block: &[u8], tail: Tail) -> io::Result<[u8; ATTACHMENT_BYTES]> {
    let mut bytes = mark::distrusted(block)?;
    SuperblockEdit::new(&mut bytes).map_err(io::Error::other)?.start(tail.position).sequence(tail.sequence).seal();
    bytes.first_chunk().copied().ok_or_else(|| io::Error::other("the journal superblock is cut short"))
}

impl Captured {
    /// The guest's superblock says something new, beside where its log begins.
    pub(super) fn superblock_is(&mut self, block: &[u8]) -> io::Result<()> {
        let known = Superblock::decode(&self.owner.attachment).map_err(io::Error::other)?;
        self.owner.attachment = if self.owner.is_left {
            // What is in the log's own place begins where it did.
            left_superblock(block, Tail { position: known.start, sequence: known.sequence })?
        } else {
            *block.first_chunk().ok_or_else(|| io::Error::other("the journal superblock is cut short"))?
        };
        self.journal.set_owner(&self.owner).map_err(io::Error::other)
    }

    /// Gives every log block of the live transactions to `write`, as whoever replays them has to find it.
    fn each_live_block(
        &self,
        home: &LoggedFile,
        write: &mut dyn FnMut(u32, &[u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        let mut blocks: HashMap<u32, Vec<u64>> = HashMap::new();
        let held = self.homes.iter().filter(|(_, held)| held.home != HomeState::Same);
        let held = held.map(|(block, held)| (*block, held.sequence));
        for (block, sequence) in held.chain(self.at_home.iter().map(|(block, known)| (*block, known.sequence))) {
            blocks.entry(sequence).or_default().push(block);
        }
        for (begin, end) in self.stream.live() {
            let mut blocks = blocks.remove(&begin.sequence).unwrap_or_default();
            blocks.sort_unstable();
            self.write_transaction((begin, end), &blocks, home, write)?;
        }
        Ok(())
    }

    /// The same of one transaction, of which these blocks are the latest.
    fn write_transaction(
        &self,
        (begin, end): (Tail, u32),
        blocks: &[u64],
        home: &LoggedFile,
        write: &mut dyn FnMut(u32, &[u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        let format = *self.stream.format();
        let length = format.distance(begin.position, end);
        let of = |block: &u64| -> io::Result<CompoundBlock> {
            let (escaped, data) = build::escape(&self.content_of(home, *block)?);
            Ok(CompoundBlock { home: *block, escaped, checksum: jbd2::tag_checksum(&format, begin.sequence, &data) })
        };
        let blocks = blocks.iter().map(of).collect::<io::Result<Vec<_>>>()?;
        let time = self.stream.committed_at();
        let compound = Compound::ending_at(format, (end, length), begin.sequence, blocks, Vec::new(), time)
            .map_err(io::Error::other)?;
        for order in 0..length {
            let position = format.advance(begin.position, order);
            let block = match compound.part(position) {
                None => build::revoke(&format, begin.sequence, &[]),
                Some(Part::Control(control)) => control,
                Some(Part::Data(index)) => build::escape(&self.content_of(home, compound.blocks()[index].home)?).1,
            };
            write(position, &block)?;
        }
        Ok(())
    }

    pub(super) fn content_of(&self, home: &LoggedFile, block: u64) -> io::Result<Vec<u8>> {
        if let Some(content) = self.journal.latest(block) {
            return Ok(content.to_vec());
        }
        let mut content = vec![0; self.block_bytes() as usize];
        self.read_home(home, block, &mut content)?;
        Ok(content)
    }
}
