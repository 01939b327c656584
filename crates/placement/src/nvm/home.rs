//! The guest's own writes to homes, and its reads of them.
//!
//! A block whose latest version is in the region is not written where the guest writes that very version home: it is
//! absorbed. Where the guest writes something else, past its own journal (ext4 does so with its superblock), that goes
//! through, and the version stays for as long as the guest's log would bring it back.

use super::captured::Captured;
use super::errand::Errand;
use super::inflight::Writer;
use super::notes::Note;
use super::report::NvmCounters;
use super::versions::{Held, HomeState, Written};
use super::work::Work;
use crate::keeper::{HomeChange, HomePart, HomeRead, HomeVerdict, Steps};
use block_route::segments;
use block_route::{RequestId, RequestKind, Status};
use std::io;
use std::ops::Range;

/// What becomes of one block of a home write.
enum Decision {
    /// Acknowledged, not written.
    Absorb,
    /// The same, of a version that counts once the transaction is durable which the guest was told of.
    AbsorbAhead,
    /// Written as the guest gave it; whether that is the latest version.
    Through(bool),
    /// A part of a block whose rest is in the region only: written whole, put together.
    Whole(Vec<u8>),
}

/// The part of a block that a write covers.
struct Covered<'a> {
    block: u64,
    /// Bytes of the block.
    bytes: Range<usize>,
    /// What is written there; nothing when that is zeros.
    given: Option<&'a [u8]>,
    is_watched: bool,
}

impl Work {
    /// A write, discard or zeroing inside the home of an open log.
    pub(super) fn home_write(
        &mut self,
        captured: &mut Captured,
        change: &HomeChange<'_>,
        steps: &mut Steps,
    ) -> io::Result<HomeVerdict> {
        let block_bytes = captured.block_bytes();
        let (start, end) = (change.range.start, change.range.end);
        if self.in_flight.overlaps(&change.blocks, Some(Writer::Host)) {
            return Ok(self.wait());
        }
        if change.kind == RequestKind::Discard {
            if self.has_acknowledged() {
                return Ok(self.behind_acknowledged().map_err(io::Error::other)?.unwrap_or_else(|| self.wait()));
            }
            return self.discard(captured, change, steps);
        }
        let mut decisions = Vec::with_capacity((change.blocks.end - change.blocks.start) as usize);
        for block in change.blocks.clone() {
            let first = (block * block_bytes).max(start);
            let last = ((block + 1) * block_bytes).min(end);
            let given = (change.kind == RequestKind::Write)
                .then(|| segments::gather(&segments::part(change.slices, first - start, last - first)));
            let bytes = (first - block * block_bytes) as usize..(last - block * block_bytes) as usize;
            let covered = Covered { block, bytes, given: given.as_deref(), is_watched: change.is_watched };
            match self.decide(captured, &covered, steps).map_err(io::Error::other)? {
                Some(decision) => decisions.push(decision),
                // A commit is in the way, or the region is full: when that is over it is asked again.
                None => return Ok(self.wait()),
            }
        }
        Ok(HomeVerdict::Parts(self.decided(captured, change, decisions, steps)))
    }

    fn wait(&mut self) -> HomeVerdict {
        self.is_waited_for = true;
        HomeVerdict::Wait
    }

    /// What becomes of one block. Nothing when it has to wait.
    fn decide(
        &mut self,
        captured: &mut Captured,
        covered: &Covered<'_>,
        steps: &mut Steps,
    ) -> Result<Option<Decision>, nvm_journal::Error> {
        let block = covered.block;
        if self.is_acknowledged(block) {
            let is_absorbed = !covered.is_watched && self.nvm.options.delayed_checkpoint;
            if is_absorbed && self.is_acknowledged_content(block, covered.given) {
                return Ok(Some(Decision::AbsorbAhead));
            }
            return self.behind_acknowledged();
        }
        match self.decide_alone(captured, covered, steps)? {
            Some(Decision::Through(false) | Decision::Whole(_)) if !self.may_overwrite(captured, block) => {
                self.behind_acknowledged()
            }
            None => self.behind_acknowledged(),
            decision => Ok(decision),
        }
    }

    /// The same, as if no transaction were acknowledged that is not durable.
    fn decide_alone(
        &mut self,
        captured: &mut Captured,
        covered: &Covered<'_>,
        steps: &mut Steps,
    ) -> Result<Option<Decision>, nvm_journal::Error> {
        let block = covered.block;
        let block_bytes = captured.block_bytes() as usize;
        let is_whole = covered.bytes.len() == block_bytes;
        let whole = covered.given.filter(|_| is_whole);
        let same = if covered.is_watched || !self.nvm.options.delayed_checkpoint {
            Decision::Through(true)
        } else {
            Decision::Absorb
        };
        if let Some((held, latest)) = captured.homes.get(&block).zip(captured.journal.latest(block)) {
            if whole == Some(latest) {
                return Ok(Some(same));
            }
            if held.home != HomeState::Same || is_whole {
                return Ok(Some(Decision::Through(false)));
            }
            let mut content = latest.to_vec();
            match covered.given {
                Some(given) => content[covered.bytes.clone()].copy_from_slice(given),
                None => content[covered.bytes.clone()].fill(0),
            }
            return Ok(Some(Decision::Whole(content)));
        }
        let Some(known) = captured.at_home.get(&block).copied() else { return Ok(Some(Decision::Through(false))) };
        let is_known = |whole: &[u8]| match known.digest {
            Some(digest) => self.nvm.digest(whole) == digest,
            None => {
                let mut content = vec![0; block_bytes];
                captured.read_home(&self.home.file, block, &mut content).is_ok() && content == whole
            }
        };
        if !self.in_flight.touches(block)
            && let Some(whole) = whole.filter(|whole| is_known(whole))
        {
            if let Some(known) = captured.at_home.get_mut(&block) {
                // It need not be read again.
                known.digest = Some(self.nvm.digest(whole));
            }
            return Ok(Some(same));
        }
        if !self.stays_in_region() {
            // That log will not be there to bring it back.
            captured.at_home.remove(&block);
            captured.notes.note(&Note::NotAtHome(block..block + 1));
            return Ok(Some(Decision::Through(false)));
        }
        // The guest's log still holds what is at home now, and would bring it back: so it has to be held again.
        // (Not beside a transaction, though it may not have begun to be stored: for a moment the region has the next number.)
        if captured.journal.has_pending() || self.commit.is_some() {
            return Ok(None);
        }
        if captured.journal.room() == 0 {
            captured.journal.collect()?;
        }
        if captured.journal.room() == 0 {
            // A log that goes to its own place takes it along from where it is: until then it stays.
            if self.is_distrusted || self.checkpoints.now.is_some() || self.begin_checkpoint(captured, steps) {
                self.drive_checkpoint(captured, steps);
                return Ok(None);
            }
            log::warn!("disk {}: block {block} is overwritten, and the NVM region has no room for it", self.name());
            captured.at_home.remove(&block);
            captured.notes.note(&Note::NotAtHome(block..block + 1));
            return Ok(Some(Decision::Through(false)));
        }
        let mut content = vec![0; block_bytes];
        captured.read_home(&self.home.file, block, &mut content).map_err(|source| nvm_journal::Error::Failed {
            what: format!("reading block {block}, which is about to be overwritten"),
            source,
        })?;
        captured.notes.note(&Note::Restored(block, known.sequence));
        captured.journal.restore(block, &content).inspect_err(|_| captured.has_failed = true)?;
        captured.at_home.remove(&block);
        captured.homes.insert(
            block,
            Held {
                sequence: known.sequence,
                home: HomeState::Other,
                noted: HomeState::Other,
                overwrites: 0,
                overwritten: Some(0),
                last_overwritten: None,
            },
        );
        NvmCounters::add(&self.nvm.counters.blocks_restored, 1);
        Ok(Some(Decision::Through(false)))
    }

    /// What goes to storage of a write whose blocks are decided about.
    fn decided(
        &mut self,
        captured: &mut Captured,
        change: &HomeChange<'_>,
        decisions: Vec<Decision>,
        steps: &mut Steps,
    ) -> Vec<HomePart> {
        let mut parts = Vec::new();
        let mut run: Option<Range<u64>> = None;
        let mut same = Vec::new();
        let mut absorbed = Vec::new();
        for (block, decision) in (change.blocks.start..).zip(decisions) {
            if let Decision::AbsorbAhead = decision {
                // What is held of it is an earlier version, of which this says nothing.
                self.absorb_ahead(captured, block);
            } else if let Some(held) = captured.homes.get_mut(&block) {
                held.home = match decision {
                    Decision::Absorb | Decision::AbsorbAhead | Decision::Through(true) => {
                        absorbed.push(block);
                        HomeState::Same
                    }
                    Decision::Through(false) | Decision::Whole(_) => {
                        held.overwrites = held.overwrites.wrapping_add(1);
                        held.overwritten = None;
                        HomeState::Other
                    }
                };
            }
            captured.allocation.changed(block, None);
            if let Decision::Through(is_same) = decision {
                // Of two writes of the guest's that are under way together nobody knows which comes last.
                if is_same && !self.in_flight.touches(block) {
                    same.extend(captured.written(block));
                }
                run = Some(run.map_or(block..block + 1, |run| run.start..block + 1));
                continue;
            }
            if let Some(run) = run.take() {
                parts.push(self.run(captured, change, run, std::mem::take(&mut same), steps));
            }
            match decision {
                Decision::Whole(content) => parts.push(self.whole(captured, change, block, content, steps)),
                _ => {
                    NvmCounters::add(&self.nvm.counters.writes_absorbed, 1);
                    NvmCounters::add(&self.nvm.counters.bytes_absorbed, captured.block_bytes());
                }
            }
        }
        parts.extend(run.map(|run| self.run(captured, change, run, same, steps)));
        // What goes on to storage is noted when it is there.
        captured.note_homes(absorbed.into_iter());
        parts
    }

    /// A run of blocks goes on as the guest gave it.
    fn run(
        &mut self,
        captured: &Captured,
        change: &HomeChange<'_>,
        blocks: Range<u64>,
        same: Vec<Written>,
        steps: &mut Steps,
    ) -> HomePart {
        let block_bytes = captured.block_bytes();
        let from = (blocks.start * block_bytes).max(change.range.start);
        let to = (blocks.end * block_bytes).min(change.range.end);
        let is_held = blocks.clone().any(|block| captured.homes.contains_key(&block));
        blocks.clone().for_each(|block| self.early.take_back(block));
        if let Some(commit) = &mut self.commit {
            commit.guest_writes(&blocks);
        }
        let errand = Errand::Through { request: change.request, blocks: blocks.clone(), same, is_held };
        let operation = self.begin(errand, (blocks, Writer::Guest), is_held.then_some(change.request), steps);
        HomePart { range: from..to, content: None, operation }
    }

    /// A block that was put together.
    fn whole(
        &mut self,
        captured: &Captured,
        change: &HomeChange<'_>,
        block: u64,
        content: Vec<u8>,
        steps: &mut Steps,
    ) -> HomePart {
        let blocks = block..block + 1;
        let errand =
            Errand::Through { request: change.request, blocks: blocks.clone(), same: Vec::new(), is_held: true };
        let operation = self.begin(errand, (blocks, Writer::Host), Some(change.request), steps);
        let from = block * captured.block_bytes();
        HomePart { range: from..from + content.len() as u64, content: Some(content), operation }
    }

    fn begin(
        &mut self,
        errand: Errand,
        (blocks, writer): (Range<u64>, Writer),
        held: Option<RequestId>,
        steps: &mut Steps,
    ) -> usize {
        let number = self.number(errand);
        self.in_flight.begin(number, blocks, writer);
        if let Some(request) = held {
            steps.hold(request);
        }
        number as usize
    }

    /// The guest no longer cares for what it discards. A part of a block stays as it is: a discard is advice, and what is known of that
    /// block's home goes on to be true.
    fn discard(
        &mut self,
        captured: &mut Captured,
        change: &HomeChange<'_>,
        steps: &mut Steps,
    ) -> io::Result<HomeVerdict> {
        let whole = &change.whole;
        if whole.is_empty() {
            return Ok(HomeVerdict::Parts(Vec::new()));
        }
        let gone: Vec<u64> = captured.homes.keys().copied().filter(|block| whole.contains(block)).collect();
        NvmCounters::add(&self.nvm.counters.blocks_dropped, gone.len() as u64);
        captured.at_home.retain(|block, _| !whole.contains(block));
        captured.notes.note(&Note::NotAtHome(whole.clone()));
        captured.allocation.forget();
        captured.release(&gone).map_err(io::Error::other)?;
        let part = self.run(captured, change, whole.clone(), Vec::new(), steps);
        Ok(HomeVerdict::Parts(vec![part]))
    }

    /// A write to homes has ended. What it has overwritten and the guest's log has left is let go, once that is durable.
    pub(super) fn through_done(
        &mut self,
        captured: &mut Captured,
        (request, blocks, is_held): (RequestId, Range<u64>, bool),
        same: Vec<Written>,
        is_ok: bool,
        steps: &mut Steps,
    ) {
        if is_ok {
            self.settled.extend(same);
        }
        // One that has failed is over as well: its guest was told so, and no flush makes it better.
        let ended = self.coverage.write_ended();
        for block in blocks.clone() {
            if let Some(held) = captured.homes.get_mut(&block) {
                held.last_overwritten = Some(ended);
                if !self.in_flight.touches(block) {
                    held.overwritten = Some(ended);
                }
            }
        }
        // A whole block that was put together of a part is asked for again if that is still on its way.
        let is_other = |block: &u64| {
            captured.homes.get(block).is_some_and(|held| held.home == HomeState::Other)
                && !self.in_flight.overlaps(&(*block..*block + 1), Some(Writer::Host))
        };
        let others: Vec<u64> = blocks.clone().filter(is_other).collect();
        captured.note_homes(others.into_iter());
        if !is_held {
            return;
        }
        let is_late = |block: &u64| {
            captured
                .homes
                .get(block)
                .is_some_and(|held| held.home == HomeState::Other && captured.is_past(held.sequence))
                && !self.in_flight.overlaps(&(*block..*block + 1), Some(Writer::Host))
        };
        let late: Vec<u64> = if is_ok { blocks.filter(is_late).collect() } else { Vec::new() };
        if late.is_empty() {
            steps.release(request, Status::Ok);
            return;
        }
        match self.begin_old_mark(captured) {
            Ok(mark) => self.flush_for(Errand::LateFlush { request, late, mark }, steps),
            Err(error) => {
                // They stay in the region, which may bring them home over what the guest wrote.
                log::error!("disk {}: writing the mark of the NVM region anew failed: {error}", self.name());
                steps.release(request, Status::IoError);
            }
        }
    }

    /// What overwrote these blocks is durable.
    pub(super) fn late_flushed(
        &mut self,
        captured: &mut Captured,
        request: RequestId,
        (late, mark): (Vec<u64>, u64),
        is_ok: bool,
        steps: &mut Steps,
    ) {
        let is_late = |block: &u64| {
            captured
                .homes
                .get(block)
                .is_some_and(|held| held.home == HomeState::Other && captured.is_past(held.sequence))
        };
        let (doubtful, gone): (Vec<u64>, Vec<u64>) =
            late.into_iter().filter(is_late).partition(|block| captured.is_doubtful(*block));
        // A flush has failed since: the region keeps what it has, and may bring it home over what the guest wrote. Nobody is told that
        // this was written.
        let is_ok =
            is_ok && self.end_mark(captured, mark).is_ok() && captured.release(&gone).is_ok() && doubtful.is_empty();
        NvmCounters::add(&self.nvm.counters.blocks_dropped, gone.len() as u64);
        steps.release(request, if is_ok { Status::Ok } else { Status::IoError });
    }

    /// A read inside the home of an open log: from the region what is there, the rest from storage.
    pub(super) fn home_read(
        &mut self,
        captured: &Captured,
        range: Range<u64>,
        answer: &mut dyn FnMut(Range<u64>, &[u8]),
    ) -> HomeRead {
        let block_bytes = captured.block_bytes();
        let blocks = range.start / block_bytes..range.end.div_ceil(block_bytes);
        if blocks.clone().any(|block| {
            self.visible(captured, block).is_none() && self.in_flight.overlaps(&(block..block + 1), Some(Writer::Host))
        }) {
            self.is_waited_for = true;
            return HomeRead::Wait;
        }
        let mut stored: Vec<Range<u64>> = Vec::new();
        for block in blocks {
            let start = block * block_bytes;
            let part = start.max(range.start)..(start + block_bytes).min(range.end);
            match self.visible(captured, block) {
                Some(content) => {
                    NvmCounters::add(&self.nvm.counters.reads_answered, 1);
                    let inside = (part.start - start) as usize..(part.end - start) as usize;
                    answer(part, &content[inside]);
                }
                None => match stored.last_mut() {
                    Some(last) if last.end == part.start => last.end = part.end,
                    _ => stored.push(part),
                },
            }
        }
        HomeRead::Stored(stored)
    }
}
