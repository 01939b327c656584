//! Home writes that are absorbed under durability by age, as far as a keeper has to do with them (crate `journal-area`, `absorbed`, has
//! what they are).
//!
//! ext4 writes home what earlier transactions committed before each fsync of the same file (`file_write_and_wait_range`). Such a
//! write carries a version that is newer than what is durable, so it would wait for a compound, and the fsync with it: an age would cost
//! what no age costs. So it is answered at once where it carries just what is held, and the host writes the block home when the
//! compound is durable. The machine is told of that write only, as of any other of the host's.
//!
//! * Absorbed is what would wait for a compound and for nothing else ([`durability::Durability::waits_for_compound`]); never with
//!   no age, and never where a change of the layout has to be seen on storage.
//! * What else the guest changes there waits until the block is home: it is *wanted*, and its compound is made at once.
//! * What went home as an append is there, durably, when its guest writes it home, too: that is answered and not sent, and what is
//!   absorbed of it counts as home. It is settled only for as long as nothing else was written there and no newer version is known
//!   ([`durability::Durability::settled`]). A write of some blocks that are settled and others that are not is cut between them. One that
//!   had to wait for the compound that made them so is looked at once more when it may go ([`durability::Durability::settled_but_for`]).
//! * A superblock of the guest that gives up absorbed versions is held before the machine hears of it (a host's write of what the
//!   guest's log does not have any more would wait for an empty log, rule (e)), and from when it is held nothing older is absorbed.
//! * When no durability is in force, for whatever reason, all of them go home; so do they when a worker goes on with a log in
//!   which another has absorbed some.
//! * A guest that flushes with no age waits until none is left: what an age allowed may not be durable yet.
//! * What waits is remembered with the last transaction that was committed when it came: it carries nothing newer, so it does not count as
//!   the home write of what is committed meanwhile.
//!
//! What it must never do: let the log be taken elsewhere, closed or moved on while the guest counts on a home block that storage does not
//! have.
//!
//! Failure story: where the host's write fails, the block stays absorbed and owed, reads are answered as before, and it is tried
//! again every second. When that has failed for ten seconds, who waits for absorbed blocks is told of an error, and the disk has a
//! fault, until one succeeds. Where durability ends and the error mark cannot be written, superblocks and flushes that wait here fail, too.
//!
//! Lock order: its own lock comes last, and nothing is called under it.

use super::holder::{HOST_WRITES_MAX, Held};
use super::waiting::{AskedFor, Bar};
use crate::keeper::{HomeChange, HomeRead, HomeVerdict, Side, Step, Steps, SuperblockBlock};
use crate::log::Log;
use block_route::{RequestId, RequestKind, Status};
use jbd2::{Superblock, sequence};
use journal_area::Source;
use std::io;
use std::ops::Range;
use std::time::Duration;

/// At most this part of the log is absorbed: all of it has to go home some time, and a tail waits for that.
const ABSORBED_PART: u32 = 4;

/// With none in force nobody else wakes a log whose absorbed blocks could not be written home.
const RETRIED_AFTER: Duration = Duration::from_secs(1);

/// What is said of a superblock by the guest that writes it.
fn bar_of(content: &[u8]) -> Bar {
    match Superblock::decode(content) {
        Ok(said) if !said.is_empty() => Bar::Before(said.sequence),
        _ => Bar::All,
    }
}

impl Held {
    /// Whether the guest counts on home blocks that storage does not have.
    pub(super) fn has_absorbed(&self) -> bool {
        self.area.absorbed(self.id) > 0
    }

    /// A change of homes begins: absorbed, or held back until what is absorbed there is home; nothing where it is as any other.
    pub(super) fn absorbs(
        &self,
        log: &Log,
        change: &HomeChange<'_>,
        steps: &mut Steps,
    ) -> Option<io::Result<HomeVerdict>> {
        // While durability ends nothing goes home, and what is asked for tries to end it.
        if !log.is_open() || self.aged_is_ending() {
            return None;
        }
        let is_whole = change.blocks == change.whole && !change.blocks.is_empty();
        // What was an append is home already: its guest's own write of it has nothing to add.
        if change.kind == RequestKind::Write
            && is_whole
            && !change.is_watched
            && let Some(at_home) = self.aged_settled(&change.blocks)
            && self.area.is_home_already(self.id, &change.blocks, change.payload, &at_home)
        {
            return Some(Ok(HomeVerdict::Parts(Vec::new())));
        }
        if change.kind == RequestKind::Write
            && is_whole
            && !change.is_watched
            && self.aged_waits_for_compound(log, &change.blocks, steps)
        {
            let tail = match self.absorbing().bar {
                Bar::None => Some(None),
                Bar::Before(tail) => Some(Some(tail)),
                Bar::All => None,
            };
            let most = (log.place.log_blocks / ABSORBED_PART) as usize;
            if tail.is_some_and(|tail| self.area.absorb(self.id, &change.blocks, change.payload, tail, most)) {
                return Some(Ok(HomeVerdict::Parts(Vec::new())));
            }
        }
        if !self.area.has_absorbed(self.id, &change.blocks) {
            return None;
        }
        if self.absorbing().is_broken(log) {
            return Some(Err(io::Error::other("what is absorbed there cannot be written home")));
        }
        self.absorbing().wanted.push(change.blocks.clone());
        self.drive_absorbed(log, steps);
        Some(Ok(HomeVerdict::Wait))
    }

    /// Where a change of homes that begins is cut, so that what storage has already need not be sent with what it has not. One that
    /// waits is asked about again as it is.
    pub(super) fn cut_of(&self, log: &Log, change: &HomeChange<'_>) -> u64 {
        let key = (change.request, change.range.start);
        let is_plain = change.kind == RequestKind::Write && !change.is_watched && change.blocks == change.whole;
        if !is_plain || !log.is_open() || change.blocks.is_empty() || self.first_asked(key).is_some() {
            return change.blocks.end;
        }
        self.aged_cut(key, &change.blocks)
    }

    /// What went home as an append after its guest was answered is home.
    fn let_settled_go(&self) {
        let versions = self.aged_settled_of(self.area.absorbed_versions(self.id));
        if !versions.is_empty() {
            self.area.absorbed_are_home(self.id, &versions);
        }
    }

    /// A change of homes waits, for whatever reason, or does not any more.
    pub(super) fn note_asked(&self, change: &HomeChange<'_>, waits: bool) {
        let key = (change.request, change.range.start);
        if !waits {
            self.absorbing().asked.remove(&key);
        } else if self.first_asked(key).is_none()
            && let Some(next) = self.area.next_sequence(self.id)
        {
            let (first, blocks) = (next.wrapping_sub(1), change.blocks.clone());
            self.absorbing().asked.insert(key, AskedFor { first, blocks, is_again: change.is_again });
            // Who goes on without this process is asked again, and has to know that it is newer than what there is now.
            if !change.is_again {
                self.area.home_write_asked(self.id, &change.blocks, &change.whole);
            }
        }
    }

    /// Whether a version of these blocks was committed after this transaction.
    pub(super) fn is_overtaken(&self, blocks: &Range<u64>, first_asked: u32) -> bool {
        let newest = self.area.newest_versions(self.id, blocks);
        newest.into_iter().any(|(_, transaction, ..)| sequence::is_after(transaction, first_asked))
    }

    /// Whether a change of homes waits that may be older than what was committed there since: it has to land before that is brought home and let go
    /// of, as by a hand-over.
    pub(super) fn has_overtaken(&self) -> bool {
        let Some(next) = self.area.next_sequence(self.id) else { return false };
        let is_of_now = |asked: &&AskedFor| !asked.is_again && asked.first == next.wrapping_sub(1);
        let asked: Vec<AskedFor> = self.absorbing().asked.values().filter(|asked| !is_of_now(asked)).cloned().collect();
        asked.iter().any(|asked| asked.is_again || self.is_overtaken(&asked.blocks, asked.first))
    }

    /// A write of the host's has ended.
    pub(super) fn note_host_write(&self, log: &Log, is_good: bool) {
        let mut absorbing = self.absorbing();
        absorbing.fails_since = if is_good { None } else { absorbing.fails_since.or(Some(log.home.now())) };
    }

    /// The guest writes the superblock of an open log. Says whether it is held until what it gives up is home.
    pub(super) fn holds_superblock(&self, log: &Log, block: &SuperblockBlock<'_>, steps: &mut Steps) -> bool {
        if !log.is_open() || self.aged_is_ending() || self.aged_is_ready(block.request) {
            return false;
        }
        let bar = bar_of(block.content);
        {
            let mut absorbing = self.absorbing();
            absorbing.bar = match (absorbing.bar, bar) {
                (Bar::Before(earlier), Bar::Before(tail)) => Bar::Before(sequence::latest(earlier, tail)),
                (Bar::All, _) => Bar::All,
                (_, bar) => bar,
            };
        }
        if !self.gives_up_absorbed(bar) {
            return false;
        }
        self.absorbing().superblocks.push_back((block.request, block.content.to_vec()));
        steps.push(Side::Journal, Step::Hold(block.request));
        self.drive_absorbed(log, steps);
        true
    }

    fn gives_up_absorbed(&self, bar: Bar) -> bool {
        if !self.has_absorbed() {
            return false;
        }
        match bar {
            Bar::None => false,
            Bar::All => true,
            Bar::Before(tail) => {
                let (Some(first), Some(next)) = (self.area.tail(self.id), self.area.next_sequence(self.id)) else {
                    return true;
                };
                // One that is none of this log's, or leaves numbers out as a kernel does that has replayed, gives all up.
                let is_own = !sequence::is_after(first.sequence, tail) && !sequence::is_after(tail, next);
                !is_own || self.area.has_absorbed_before(self.id, tail)
            }
        }
    }

    /// The guest flushes the disk with the file system.
    pub(super) fn holds_flush(&self, log: &Log, request: RequestId, steps: &mut Steps) {
        let is_absorbed = || self.aged_durable() == Some(None) && self.has_absorbed();
        if log.is_open() && (self.aged_owes() || is_absorbed()) {
            self.absorbing().flushes.push(request);
            steps.hold(request);
            self.drive_absorbed(log, steps);
        }
    }

    /// Writes home what is durable of what is absorbed, and what somebody waits for; lets go of who waits for nothing any more.
    pub(super) fn drive_absorbed(&self, log: &Log, steps: &mut Steps) {
        if self.has_absorbed() {
            self.let_settled_go();
        }
        self.let_waiting_go(steps);
        if !self.has_absorbed() {
            return;
        }
        let is_broken = {
            let mut absorbing = self.absorbing();
            absorbing.due = log.home.now() + RETRIED_AFTER;
            absorbing.is_broken(log)
        };
        if is_broken {
            log.home.note_fault(
                "blocks that its guest was told are home cannot be written there (they are kept, and tried again)",
            );
            self.fail_absorbing(steps);
        }
        if !self.may_write_home() {
            return;
        }
        let room = {
            let inner = self.inner();
            if inner.host_failed { 0 } else { HOST_WRITES_MAX.saturating_sub(inner.host_in_flight) }
        };
        if room == 0 {
            // Who changes something there asks again when one has ended.
            self.absorbing().wanted.clear();
            return;
        }
        let durable = self.aged_durable().flatten();
        let (wanted, bars) = {
            let mut absorbing = self.absorbing();
            let bars: Vec<Bar> = absorbing.superblocks.iter().map(|(_, content)| bar_of(content)).collect();
            (std::mem::take(&mut absorbing.wanted), bars)
        };
        let under_way = self.aged_under_way();
        let is_wanted = |block: u64, transaction: u32| {
            if under_way.touches(&(block..block + 1)) {
                return false;
            }
            durable.is_none_or(|durable| !sequence::is_after(transaction, durable))
                || wanted.iter().any(|blocks| blocks.contains(&block))
                || bars.iter().any(|bar| match bar {
                    Bar::Before(tail) => sequence::is_after(*tail, transaction),
                    Bar::All => true,
                    Bar::None => false,
                })
        };
        let writes = self.area.absorbed_writes(self.id, room, &is_wanted);
        self.inner().host_in_flight += writes.len();
        self.aged_host_writes(log, writes, steps);
    }

    /// Lets go of who waits for nothing any more.
    pub(super) fn let_waiting_go(&self, steps: &mut Steps) {
        loop {
            let front = self.absorbing().superblocks.front().map(|(_, content)| bar_of(content));
            if front.is_none_or(|bar| self.gives_up_absorbed(bar)) {
                break;
            }
            if let Some((request, content)) = self.absorbing().superblocks.pop_front() {
                steps.push(Side::Journal, Step::Superblock(request, content));
            }
        }
        if self.absorbing().flushes.is_empty() {
            return;
        }
        // With an age no flush says anything of commits, also one that was asked for before.
        let has_age = matches!(self.aged_durable(), Some(Some(_)));
        if has_age || !(self.has_absorbed() || self.aged_owes()) {
            for request in std::mem::take(&mut self.absorbing().flushes) {
                steps.release(request, Status::Ok);
            }
        }
    }

    /// Whether the log may be taken elsewhere as far as this is concerned.
    pub(super) fn is_absorbing_over(&self, log: &Log) -> bool {
        let is_waited_for = {
            let absorbing = self.absorbing();
            !absorbing.superblocks.is_empty() || !absorbing.flushes.is_empty()
        };
        let is_over = !self.has_absorbed() && !is_waited_for;
        if !is_over {
            log.home.wake.wake();
        }
        is_over
    }

    /// When somebody has to look after what is absorbed.
    pub(super) fn absorbed_due_in(&self, log: &Log) -> Option<Duration> {
        self.has_absorbed().then(|| self.absorbing().due.saturating_sub(log.home.now()))
    }

    /// The guest reads homes.
    pub(super) fn absorbed_read(
        &self,
        log: &Log,
        range: Range<u64>,
        answer: &mut dyn FnMut(Range<u64>, &[u8]),
    ) -> HomeRead {
        let block_bytes = u64::from(log.place.block_bytes);
        let mut content = vec![0; block_bytes as usize];
        let mut stored: Vec<Range<u64>> = Vec::new();
        for block in range.start / block_bytes..range.end.div_ceil(block_bytes) {
            let start = block * block_bytes;
            let part = start.max(range.start)..(start + block_bytes).min(range.end);
            if self.area.read_absorbed(self.id, block, &mut content) {
                let inside = (part.start - start) as usize..(part.end - start) as usize;
                answer(part, &content[inside]);
                continue;
            }
            match stored.last_mut() {
                Some(last) if last.end == part.start => last.end = part.end,
                _ => stored.push(part),
            }
        }
        HomeRead::Stored(stored)
    }

    /// The file system was replaced while its log was open: what the guest wrote there has to be there all the same, as far as it has
    /// not been written over. (That waits for what is absorbed.) Who waits has nothing to wait for any more.
    pub(super) fn bring_absorbed_now(&self, log: &Log, steps: &mut Steps) -> io::Result<()> {
        if !self.has_absorbed() {
            self.fail_absorbing(steps);
            return Ok(());
        }
        let mut result = Ok(());
        for (operation, write) in self.area.absorbed_writes(self.id, usize::MAX, &|_, _| true) {
            let mut content = vec![0; log.place.block_bytes as usize];
            match &write.source {
                Source::Held(slice) => slice.copy_out(0, &mut content),
                Source::Bytes(bytes) => content.copy_from_slice(bytes),
                Source::Given => unreachable!("the host has nothing given"),
            }
            let written = log.home.file.write_all_at(&content, log.home_offset(write.block));
            self.area.home_write_ended(self.id, operation, written.is_ok());
            result = result.and(written);
        }
        log.home.set_dirty();
        self.fail_absorbing(steps);
        result
    }
}
