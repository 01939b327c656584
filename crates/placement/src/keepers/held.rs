//! Placements `retain` and `copy`: an open log is held in memory by the journal area (crate `journal-area`), retained in the guest's
//! own pages or copied.
//!
//! The log writes of a pass are one batch: protect first, then read, then complete. A home write lets go of what it brings home, and
//! of nothing before it has ended. The host's own home writes keep the guest's to the same blocks waiting.
//!
//! With a durability by age in force (`durable-within`, module `aging`), what is held becomes durable on storage beside that, and some
//! home writes are answered before they are done (module `absorbing`).
//!
//! Lock order: `state`, then `inner`, `absorbing` or the area's locks; `inner` and `absorbing` are taken for a moment, with nothing taken
//! under them; the area's locks are the area's own affair.

mod absorbing;
mod aging;
mod holder;
mod storing;
mod waiting;
mod watched;

pub(crate) use self::holder::Held;

use self::aging::state::AgedSuperblock;
use self::holder::HOST_WRITES_MAX;
use super::stored::finish_closed;
use crate::aged::finish_aged;
use crate::durability_report::DurabilityReport;
use crate::finish::say_why_check;
use crate::keeper::{
    BlockContent, Finished, HomeChange, HomeRead, HomeVerdict, Keeper, LogBlock, LogRead, LogVerdict, OddVerdict, Side,
    Step, Steps, SuperblockBlock, SuperblockWritten, Task,
};
use crate::left_to_guest;
use crate::log::Log;
use crate::mark::MarkKind;
use crate::opening::write_mark;
use crate::stored::Says;
use block_route::{Buffer, RequestId, RequestKind, segments};
use guest_memory::MemorySlice;
use journal_area::{Content, Doubt, LogWrite, NotHome, Opening, Outside, Pressure, SuperblockEffect};
use recovery::Status;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long recovery waits for home writes that another device has in flight.
const HOME_WRITES_PATIENCE: Duration = Duration::from_secs(30);

impl Held {
    /// The device with the log may start anew while another with its home still works; what it has on its way has to
    /// land before recovery writes to the same blocks (rule 3 of ARCHITECTURE.md).
    fn check_own_has_ended(&self, log: &Log) -> io::Result<()> {
        if !self.has_operations() {
            return Ok(());
        }
        Err(io::Error::other(format!(
            "disk {}: what makes its journal durable has not ended; recovery cannot begin before it has",
            log.home.options.name
        )))
    }

    fn wait_for_home_writes(&self, log: &Log) -> io::Result<()> {
        let deadline = Instant::now() + HOME_WRITES_PATIENCE;
        while self.area.has_home_writes_in_flight(self.id) {
            if Instant::now() > deadline {
                return Err(io::Error::new(
                    io::ErrorKind::TimedOut,
                    format!(
                        "home writes of disk {} have not ended in {} s; recovery cannot begin before they have",
                        log.home.options.name,
                        HOME_WRITES_PATIENCE.as_secs()
                    ),
                ));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }
}

/// Blocks that are not held.
struct OnDisks<'a>(&'a Log);

impl Outside for OnDisks<'_> {
    fn home(&mut self, block: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.0.read_home(block, buffer)
    }

    fn stored(&mut self, position: u32, buffer: &mut [u8]) -> io::Result<()> {
        self.0.read_stored(position, buffer)
    }
}

impl Keeper for Held {
    fn watches_home(&self, log: &Log) -> bool {
        // What the host writes home of a log that has closed meanwhile must not land on what the guest writes now.
        log.is_open() || self.inner().host_in_flight > 0
    }

    fn counts_transactions(&self, log: &Log) -> bool {
        log.is_open()
    }

    fn needs_no_flushes(&self) -> bool {
        true
    }

    fn superblock(
        &self,
        log: &Log,
        block: SuperblockBlock<'_>,
        steps: &mut Steps,
    ) -> io::Result<(SuperblockWritten, bool)> {
        if self.is_gone() {
            // It waited until now. It is a block of the disk as any other.
            return Ok((SuperblockWritten::GoesOn, true));
        }
        if self.holds_superblock(log, &block, steps) {
            return Ok((SuperblockWritten::GoesOn, false));
        }
        let AgedSuperblock::Taken { is_on_storage } = self.aged_superblock(log, &block, steps) else {
            return Ok((SuperblockWritten::GoesOn, false));
        };
        if self.clears_later(log, &block, steps) {
            return Ok((SuperblockWritten::GoesOn, false));
        }
        let block = block.content;
        if !log.is_open() && self.is_foreign_log(log, block)? {
            return Ok((SuperblockWritten::Brought, true));
        }
        self.clear_numbers(log, block)?;
        let is_open = log.is_open();
        let effect = match self.held_superblock_written(log, block) {
            Err(error) if !is_open && error.kind() == io::ErrorKind::OutOfMemory => {
                // Nothing is held of it yet. As with a log that was brought: it is in its own place, all of it, until it is next empty.
                self.area.close(self.id);
                log::warn!(
                    "there is no room in tmpfs for the journal of disk {}: it stays on storage until it is next empty",
                    log.home.options.name
                );
                return Ok((SuperblockWritten::Brought, true));
            }
            effect => effect?,
        };
        match effect {
            SuperblockEffect::Opened => {
                let marked = self.begin_aging(log, block).and_then(|is_aged| match is_aged {
                    true => Ok(()),
                    false => {
                        write_mark(log, &self.area, MarkKind::Held, block)?;
                        self.aged_is_held_only();
                        Ok(())
                    }
                });
                if let Err(error) = marked {
                    // Nothing is owed yet: the log is as if it had not been opened.
                    self.area.close(self.id);
                    return Err(error);
                }
                self.inner().host_failed = false;
                Ok((SuperblockWritten::Opened, false))
            }
            SuperblockEffect::GoesOn => Ok((SuperblockWritten::GoesOn, false)),
            SuperblockEffect::Closed | SuperblockEffect::Foreign => {
                self.aged_has_no_log(log, steps);
                log.close_durably()?;
                Ok((SuperblockWritten::Closed, !is_on_storage))
            }
            SuperblockEffect::NotALog => {
                self.aged_has_no_log(log, steps);
                log.close_durably()?;
                Ok((SuperblockWritten::NoLog, true))
            }
        }
    }

    fn log_write(&self, log: &Log, block: LogBlock<'_>) -> LogVerdict {
        if !log.is_open() {
            if let BlockContent::Guest(slices) = block.content {
                self.note_foreign(slices);
            }
            return LogVerdict::Store;
        }
        let block_bytes = log.place.block_bytes as usize;
        let content = match block.content {
            BlockContent::Guest([slice]) if slice.is_whole_page() && slice.len() == block_bytes => {
                Content::Page(*slice)
            }
            BlockContent::Guest(slices) => Content::Bytes(segments::gather(slices)),
            BlockContent::Bytes(bytes) => Content::Bytes(bytes),
        };
        self.inner().batch.push((LogWrite { position: block.position, content }, block.request));
        LogVerdict::Kept
    }

    fn odd_log_write(&self, log: &Log, kind: RequestKind, slices: &[MemorySlice]) -> OddVerdict {
        if !log.is_open() {
            self.note_foreign(slices);
            return OddVerdict::Store;
        }
        if kind == RequestKind::Discard { OddVerdict::Ignore } else { OddVerdict::Patch }
    }

    fn patched(&self, log: &Log, position: u32, part: Range<usize>, slices: &[MemorySlice]) -> io::Result<Vec<u8>> {
        self.patched_block(log, position, part, slices)
    }

    /// Gives the log writes of this pass to the area, all at once.
    fn settle_pass(&self, log: &Log, steps: &mut Steps) {
        let batch = std::mem::take(&mut self.inner().batch);
        if batch.is_empty() {
            return;
        }
        let (writes, requests): (Vec<LogWrite>, Vec<RequestId>) = batch.into_iter().unzip();
        let outcome = self.area.hold(self.id, &writes);
        for failed in outcome.no_memory {
            let write = &writes[failed];
            let buffer = match &write.content {
                Content::Page(slice) => Buffer::Slice(*slice),
                Content::Bytes(bytes) => Buffer::Bytes(Arc::from(bytes.as_slice())),
            };
            // Its place is not its own while compounds are there.
            if let Some(buffer) = self.aged_stored(log, (write.position, requests[failed], buffer), steps) {
                self.store(log, write.position, requests[failed], buffer, steps);
            }
        }
        if !outcome.no_room.is_empty() {
            log::error!(
                "there is no room in tmpfs for the table of disk {}'s journal: {} writes to it fail, and its guest ends its journal",
                log.home.options.name,
                outcome.no_room.len()
            );
            outcome.no_room.iter().for_each(|index| steps.fail(requests[*index]));
        }
        if !outcome.accepted.is_empty() {
            self.aged_committed(log, outcome.accepted, &requests, steps);
        }
        if !outcome.repeated.is_empty() {
            let repeated = outcome.repeated.iter().map(|index| requests[*index]).collect();
            self.aged_repeated(log, repeated, steps);
        }
        // A newer version may be what somebody waited for.
        self.let_waiting_go(steps);
    }

    fn shows_log(&self, log: &Log) -> bool {
        log.is_open()
    }

    /// Whoever reads it may be a kernel about to mount, with blocks of the file system in its cache already: it has to replay
    /// the log itself.
    fn log_read(&self, log: &Log, position: u32, buffer: &mut [u8]) -> io::Result<LogRead> {
        let is_shown = self.area.show(self.id, position, buffer, &mut OnDisks(log))?;
        Ok(if is_shown { LogRead::Copied } else { LogRead::Stored })
    }

    fn shows_homes(&self, log: &Log) -> bool {
        log.is_open() && self.has_absorbed()
    }

    fn home_read(&self, log: &Log, range: Range<u64>, answer: &mut dyn FnMut(Range<u64>, &[u8])) -> HomeRead {
        self.absorbed_read(log, range, answer)
    }

    fn flush_asked(&self, log: &Log, request: RequestId, steps: &mut Steps) {
        self.holds_flush(log, request, steps);
    }

    fn home_cut(&self, log: &Log, change: &HomeChange<'_>) -> u64 {
        self.cut_of(log, change)
    }

    fn home_begins(&self, log: &Log, change: &HomeChange<'_>, steps: &mut Steps) -> io::Result<HomeVerdict> {
        let verdict = match self.absorbs(log, change, steps) {
            Some(verdict) => verdict,
            None => self.aged_home_begins(log, change, steps),
        };
        self.note_asked(change, matches!(verdict, Ok(HomeVerdict::Wait)));
        verdict
    }

    fn home_ended(&self, log: &Log, operation: usize, is_ok: bool, steps: &mut Steps) -> bool {
        let changed = self.area.home_write_ended(self.id, operation, is_ok);
        let is_covered = self.aged_home_ended(log, operation, (is_ok, &changed), steps);
        if log.is_emptying() || std::mem::take(&mut self.inner().is_host_barred) {
            // What was in the way of a host write may have been this.
            self.drive(log, steps);
        }
        // It may have been taken away since this write began.
        is_covered && log.is_open() && !log.is_distrusted() && !self.inner().is_over
    }

    fn done(&self, log: &Log, task: Task, error: Option<&io::Error>, steps: &mut Steps) {
        match task {
            Task::HostWrite(operation) => {
                self.inner().host_in_flight -= 1;
                let changed = self.area.home_write_ended(self.id, operation, error.is_none());
                self.note_host_write(log, error.is_none());
                if let Some(error) = error {
                    log::error!("writing owed blocks home failed: {error}; they stay owed");
                    self.inner().host_failed = true;
                    if log.is_emptying() {
                        log.end_emptying(Some(false));
                    }
                }
                self.aged_home_ended(log, operation, (error.is_none(), &changed), steps);
                if !log.is_open() && !self.area.has_host_writes_in_flight(self.id) {
                    // Where it was wished elsewhere, that has waited for this.
                    steps.push(Side::Home, Step::Closed);
                }
                steps.push(Side::Home, Step::Retry);
            }
            Task::Stored(position) => {
                self.inner().stored_in_flight -= 1;
                if error.is_none() {
                    // Nobody wants to hear of what that commits: nothing is made durable by age beside stored blocks.
                    self.area.stored(self.id, position);
                }
                self.try_engage(log, steps);
            }
            Task::Own(number) => {
                self.aged_done(log, number, error, steps);
                // What has become durable may go home.
                self.drive_absorbed(log, steps);
            }
            Task::Shipped => {}
        }
    }

    /// Writes owed blocks home where memory is short or somebody waits until all is home.
    fn drive(&self, log: &Log, steps: &mut Steps) {
        self.drive_absorbed(log, steps);
        let (host_in_flight, host_failed) = {
            let inner = self.inner();
            (inner.host_in_flight, inner.host_failed)
        };
        if !log.is_open() || host_failed || !self.may_write_home() || self.is_coming_to_rest() {
            return;
        }
        let is_emptying = log.is_emptying();
        let pressure = self.area.pressure_on(self.id);
        if !is_emptying && pressure.is_none() {
            return;
        }
        if is_emptying && self.area.owed(self.id).writable == 0 {
            log.end_emptying(Some(true));
            return;
        }
        let room = HOST_WRITES_MAX.saturating_sub(host_in_flight);
        let copied_only = !is_emptying && pressure == Some(Pressure::Copies);
        let under_way = self.aged_under_way();
        self.inner().is_host_barred = !under_way.is_empty();
        let may_be = |block: u64| !under_way.touches(&(block..block + 1));
        let writes = self.area.host_writes_where(self.id, room, copied_only, &may_be);
        if writes.is_empty() && under_way.is_empty() && host_in_flight == 0 && pressure == Some(Pressure::Pages) {
            self.store_starved(log, steps);
        }
        self.inner().host_in_flight += writes.len();
        self.aged_host_writes(log, writes, steps);
    }

    fn woken(&self, log: &Log, side: Side, steps: &mut Steps) {
        if side == Side::Home {
            self.inner().host_failed = false;
            self.aged_woken(log, steps);
            self.drive(log, steps);
        }
    }

    fn due_in(&self, log: &Log) -> Option<Duration> {
        [self.aged_due_in(log), self.absorbed_due_in(log)].into_iter().flatten().min()
    }

    fn has_stored_in_flight(&self) -> bool {
        // In the midst of a pass nothing is taken away either.
        let is_in_flight = {
            let inner = self.inner();
            inner.stored_in_flight > 0 || !inner.batch.is_empty()
        };
        is_in_flight || self.has_own_in_flight()
    }

    fn has_own_in_flight(&self) -> bool {
        self.has_operations()
    }

    fn comes_to_rest(&self, log: &Log) -> bool {
        self.aged_comes_to_rest(log)
    }

    fn may_be_taken(&self, log: &Log) -> bool {
        // Both have to hear of it.
        let is_over = self.aged_may_be_taken(log);
        self.is_absorbing_over(log) && is_over
    }

    fn stay(&self, log: &Log, _steps: &mut Steps) {
        self.aged_stays(log);
    }

    fn numbers_from(&self, sequence: u32) {
        self.aged_numbers_from(sequence);
    }

    fn awaits_mark(&self, is_unmarked: bool) {
        self.aged_awaits_mark(is_unmarked);
    }

    fn goes_on_held_only(&self) {
        self.aged_is_held_only();
    }

    fn goes_on_doubted(&self, log: &Log, doubt: Doubt) {
        self.aged_goes_on_doubted(log, doubt);
    }

    fn follows(&self, log: &Log, opening: Opening, raw: &[u8], numbered: Option<u32>) -> Result<bool, String> {
        self.aged_follows(log, opening, raw, numbered)
    }

    fn go_on(&self, log: &Log) -> io::Result<()> {
        self.aged_go_on(log);
        Ok(())
    }

    fn durability(&self, log: &Log) -> Option<DurabilityReport> {
        Some(self.aged_report(log))
    }

    fn blocks_owed(&self, log: &Log) -> Option<u64> {
        log.is_open().then(|| self.area.owed(self.id).blocks)
    }

    fn why_not_home(&self, _log: &Log) -> Option<NotHome> {
        self.area.why_not_home(self.id)
    }

    fn finish(&self, log: &Log, is_vm_gone: bool) -> io::Result<Finished> {
        if !log.is_open() {
            return finish_closed(log, is_vm_gone);
        }
        self.check_own_has_ended(log)?;
        self.forget_aging_for_recovery();
        self.wait_for_home_writes(log)?;
        if let Some(why) = self.area.contradiction(self.id) {
            left_to_guest::say_beside(&self.area, log, self.durability(log).as_ref(), &why);
        }
        let owed = self.area.owed(self.id);
        let (home, journal) = (&log.home.file, &log.journal.file);
        let taking = self.area.take_for_recovery(self.id).ok_or_else(|| {
            io::Error::other(format!(
                "disk {}: its journal is being written elsewhere, or something still writes to its file system",
                log.home.options.name
            ))
        })?;
        let mut report = finish_aged(&taking.log(), &log.place, home, journal).map_err(io::Error::other)?;
        if let Some(why) = say_why_check(&taking.log(), &log.place, &mut report) {
            log::error!("disk {}: {why}", log.home.options.name);
            log.home.note_fault(&why);
        }
        taking.end(|| {});
        self.aged_awaits_mark(false);
        if !owed.materialise && report.blocks_written != owed.blocks + owed.stored_blocks {
            // The pair to what was counted when the blocks were retained. What was written is what the log itself says, which
            // recovery trusts more than the books; one of the two is wrong all the same.
            let sentence = format!(
                "recovery wrote {} blocks of the file system at byte {} where {} were owed: run e2fsck -f",
                report.blocks_written,
                log.place.home_start,
                owed.blocks + owed.stored_blocks
            );
            log::error!("disk {}: {sentence}", log.home.options.name);
            log.home.note_fault(&sentence);
            report.status = Status::Damaged;
            report.notes.push(sentence);
        }
        log.set_closed();
        Ok(Finished::Recovered(vec![report]))
    }

    fn doubt(&self, log: &Log, why: String, _steps: &mut Steps) {
        self.area.contradict(self.id, why);
        // The thread of its disk takes it away.
        log.journal.wake.wake();
    }

    fn doubt_at_the_end(&self, _log: &Log, why: String) {
        self.area.contradict(self.id, why);
    }

    fn awaits_home_writes(&self, log: &Log) -> bool {
        log.is_open() && self.area.has_home_writes_in_flight(self.id)
    }

    fn is_written_past(&self, log: &Log) -> io::Result<bool> {
        // Beside what is durable by age storage has to be good by itself throughout.
        let is_aged = || matches!(log.stored().map(|stored| stored.says), Ok(Says::Aged(..)));
        if !log.is_open() || log.is_distrusted() || !self.area.is_written_past(self.id) || is_aged() {
            return Ok(false);
        }
        self.check_own_has_ended(log)?;
        self.wait_for_home_writes(log)?;
        // Its guest, if it goes on, takes that for written.
        self.bring_absorbed_now(log, &mut Steps::default())?;
        self.forget_aging();
        Ok(true)
    }

    fn leave(&self) {
        self.leave_aging();
        self.inner().is_over = true;
    }

    /// The file system was replaced while its log was open. What makes it durable must not land behind what somebody else has written there.
    /// Whoever waits here is told what became of it, and whatever waits to go home is asked about once more: nobody hears of this log again.
    fn forget(&self, log: &Log, steps: &mut Steps) -> bool {
        let Some(waited) = self.aged_is_gone() else { return false };
        let brought = self.bring_absorbed_now(log, steps);
        self.forget_absorbing();
        // Behind whatever is said here.
        let go = |is_there, steps: &mut Steps| {
            waited.go(is_there, steps);
            steps.push(Side::Home, Step::Retry);
            true
        };
        if !log.is_open() {
            return go(false, steps);
        }
        if let Err(error) = brought {
            log::error!("writing home what the guest was told is there failed: {error}; it is lost");
        }
        log::warn!(
            "disk {}: the file system at byte {} was replaced while its journal owed {} blocks",
            log.home.options.name,
            log.place.home_start,
            self.area.owed(self.id).blocks
        );
        let spilt = self.spill(log, |_, _| true);
        if let Err(error) = &spilt {
            log::error!("writing where a journal was failed: {error}; what the guest wrote there is lost");
        }
        go(spilt.is_ok(), steps)
    }
}
