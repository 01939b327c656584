//! Placement `remote`: a log whose writes go to a journal server, and to its own place where there is none (`crate::remote`).
//!
//! Where its guest proves that the journal is not what it seems ([`crate::watch`]), it goes to its own place and stays there, and is
//! left to the guest ([`crate::distrust`]).

use super::stored::finish_brought;
use crate::disk::PlacementKind;
use crate::foreign::{is_another_ones, is_live_there, is_something};
use crate::keeper::{
    BlockContent, Finished, HomeChange, HomeVerdict, Keeper, LogBlock, LogRead, LogVerdict, OddVerdict, Side, Step,
    Steps, SuperblockBlock, SuperblockWritten, Task,
};
use crate::left_to_guest;
use crate::log::Log;
use crate::remote::{Outcome, RemoteLog, RemoteReport};
use crate::watch::Watch;
use block_route::{RequestKind, segments};
use guest_memory::MemorySlice;
use jbd2::Superblock;
use journal_area::JournalArea;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tracing_mutex::stdsync::{Mutex, MutexGuard};

/// Blocks of a log that was taken up which the watch gets before it looks at them.
const WATCHED_AT_ONCE: usize = 1024;

#[derive(Debug)]
pub(crate) struct Shipped {
    remote: RemoteLog,
    watch: Mutex<Watch>,
    /// What was seen of a log that was taken up, before anything may be done about it.
    seen: Mutex<Option<String>>,
    /// Something was written into the log while it was closed.
    is_foreign: AtomicBool,
    /// Its copy of the log is in this one's budget.
    area: Arc<JournalArea>,
    /// So many bytes of it.
    reserved: u64,
    /// Where that copy is.
    copy_name: String,
}

impl Shipped {
    /// With a copy of the log in a file of this name, which takes so many bytes of the area's budget.
    pub fn new(remote: RemoteLog, (area, reserved): (Arc<JournalArea>, u64), copy_name: String) -> Self {
        let (watch, seen, is_foreign) = (Mutex::default(), Mutex::default(), AtomicBool::new(false));
        Shipped { reserved, remote, watch, seen, is_foreign, area, copy_name }
    }

    fn watch(&self) -> MutexGuard<'_, Watch> {
        self.watch.lock().expect("no panic under this lock")
    }

    /// A block of a closed log, not its superblock, is written; with zeros mke2fs does so, too.
    fn note_foreign(&self, slices: &[MemorySlice]) {
        if !self.is_foreign.load(Ordering::Relaxed) && is_something(slices) {
            self.is_foreign.store(true, Ordering::Relaxed);
        }
    }

    /// What is live of a log that was taken up is watched again, from its begin on.
    fn watch_again(&self, log: &Log) {
        let mut watch = self.watch();
        let Some(superblock) = self.remote.superblock_now() else { return };
        watch.opened(&log.place, &superblock);
        let mut why = None;
        let mut count = 0;
        self.remote.for_each_live(&superblock, |position, content| {
            watch.log_write(position, &content);
            count += 1;
            if count % WATCHED_AT_ONCE == 0 {
                why = why.take().or_else(|| watch.settle(&log.place));
            }
        });
        *self.seen.lock().expect("no panic under this lock") = why.or_else(|| watch.settle(&log.place));
        watch.is_taken_up();
    }

    /// The journal is not what it seemed: nobody here replays it.
    fn distrust(&self, log: &Log, why: Option<String>) {
        if let Some(why) = why {
            left_to_guest::say(&self.area, log, &why);
            if let Err(error) = self.remote.distrust() {
                log::error!(
                    "disk {}: writing down that the journal is not what it seemed failed: {error}; give the disk placement=storage",
                    log.home.options.name
                );
            }
        }
    }
}

impl Keeper for Shipped {
    fn lives_elsewhere(&self, log: &Log) -> Option<&'static str> {
        let is_on_storage = log.placement == PlacementKind::Storage || self.is_paused().unwrap_or(false);
        (log.is_open() && !is_on_storage).then_some("is on its server")
    }

    fn doubt(&self, log: &Log, why: String, _steps: &mut Steps) {
        self.distrust(log, Some(why));
    }

    fn doubt_at_the_end(&self, log: &Log, why: String) {
        self.distrust(log, Some(why));
    }

    fn watches_home(&self, log: &Log) -> bool {
        log.is_open() && self.watch().is_on()
    }

    fn home_begins(&self, _log: &Log, change: &HomeChange<'_>, _steps: &mut Steps) -> io::Result<HomeVerdict> {
        self.watch().home_change(change);
        Ok(HomeVerdict::Go { operation: usize::MAX, replaced: Vec::new() })
    }

    fn superblock(
        &self,
        log: &Log,
        block: SuperblockBlock<'_>,
        _steps: &mut Steps,
    ) -> io::Result<(SuperblockWritten, bool)> {
        let block = block.content;
        match Superblock::decode(block) {
            Ok(superblock) if !superblock.is_empty() && log.is_open() => {
                self.remote.superblock(&superblock, block)?;
                let why = self.watch().tail_moves(&superblock);
                self.distrust(log, why);
                Ok((SuperblockWritten::GoesOn, false))
            }
            Ok(superblock) if !superblock.is_empty() => {
                // What is in its own place would be missing in the server's log, which is the one that counts.
                if is_another_ones(log)? {
                    return Ok((SuperblockWritten::Brought, true));
                }
                let is_foreign = self.is_foreign.load(Ordering::Relaxed);
                if log.is_brought() || is_foreign || is_live_there(log, &superblock) {
                    if !log.is_brought() {
                        log::info!(
                            "disk {}: the journal of the file system at byte {} has something in it that did not come through here; it \
                             stays on storage until it is next empty",
                            log.home.options.name,
                            log.place.home_start
                        );
                    }
                    return Ok((SuperblockWritten::Brought, true));
                }
                self.remote.open(&superblock, block)?;
                if !log.is_distrusted() {
                    self.watch().opened(&log.place, &superblock);
                }
                Ok((SuperblockWritten::Opened, false))
            }
            other => {
                let was_open = log.is_open();
                self.is_foreign.store(false, Ordering::Relaxed);
                if was_open {
                    // What was written home is durable before the superblock says that no log is needed any more.
                    log.home.file.sync_data()?;
                    self.remote.close(block)?;
                    log.home.set_dirty();
                    log.journal.set_dirty();
                    let why = other.as_ref().ok().and_then(|superblock| self.watch().tail_moves(superblock));
                    self.distrust(log, why);
                    self.watch().forget();
                }
                let is_merged = !was_open && other.is_ok() && self.remote.superblock_of_closed(block)?;
                if is_merged {
                    log.journal.set_dirty();
                }
                let what = if other.is_err() { SuperblockWritten::NoLog } else { SuperblockWritten::Closed };
                Ok((what, !was_open && !is_merged))
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
        let content = match block.content {
            BlockContent::Guest(slices) => segments::gather(slices),
            BlockContent::Bytes(bytes) => bytes,
        };
        let content: Arc<[u8]> = content.into();
        self.watch().log_write(block.position, &content);
        match self.remote.write(block.position, content, block.request) {
            Outcome::Done => LogVerdict::Kept,
            Outcome::Held => LogVerdict::Held,
            Outcome::Fail => LogVerdict::Fail,
            Outcome::Store => LogVerdict::StoreFor(Task::Shipped),
        }
    }

    fn odd_log_write(&self, log: &Log, kind: RequestKind, slices: &[MemorySlice]) -> OddVerdict {
        if !log.is_open() {
            self.note_foreign(slices);
        }
        match (log.is_open(), kind) {
            (false, _) => OddVerdict::Store,
            (true, RequestKind::Discard) => OddVerdict::Ignore,
            (true, _) => OddVerdict::Refuse,
        }
    }

    /// Before the guest's superblock, too: its tail may have passed what came just before.
    fn settle_pass(&self, log: &Log, _steps: &mut Steps) {
        let why = self.watch().settle(&log.place);
        self.distrust(log, why);
    }

    fn end_of_pass(&self, log: &Log, steps: &mut Steps) {
        self.settle_pass(log, steps);
        self.remote.end_of_pass();
    }

    fn shows_log(&self, log: &Log) -> bool {
        log.is_open()
    }

    /// What is live is here, the rest is as storage has it.
    fn log_read(&self, _log: &Log, position: u32, buffer: &mut [u8]) -> io::Result<LogRead> {
        let Some(block) = self.remote.read(position)? else { return Ok(LogRead::Stored) };
        buffer.copy_from_slice(&block);
        Ok(LogRead::Copied)
    }

    fn done(&self, log: &Log, _task: Task, _error: Option<&io::Error>, _steps: &mut Steps) {
        log.journal.set_dirty();
        self.remote.stored();
    }

    fn woken(&self, _log: &Log, side: Side, steps: &mut Steps) {
        if side == Side::Journal {
            for (request, status) in self.remote.take_done() {
                steps.push(Side::Journal, Step::Release(request, status));
            }
        }
    }

    fn finish(&self, log: &Log, is_vm_gone: bool) -> io::Result<Finished> {
        self.watch().forget();
        // Storage has the whole log then, for the guest's next kernel or for us.
        self.remote.settle()?;
        finish_brought(log, is_vm_gone)
    }

    fn pause(&self, is_paused: bool) -> bool {
        self.remote.pause(is_paused);
        true
    }

    fn is_paused(&self) -> io::Result<bool> {
        self.remote.is_paused()
    }

    fn leave(&self) {
        self.area.release(self.reserved);
    }

    fn forget(&self, _log: &Log, _steps: &mut Steps) -> bool {
        self.area.release(self.reserved);
        true
    }

    fn was_taken_up(&self, log: &Log) -> bool {
        if !self.remote.was_taken_up() {
            return false;
        }
        if self.remote.is_distrusted() {
            log.distrust();
            log.want(PlacementKind::Storage);
        } else {
            self.watch_again(log);
        }
        true
    }

    fn go_on(&self, log: &Log) -> io::Result<()> {
        self.remote.go_on()?;
        let why = self.seen.lock().expect("no panic under this lock").take();
        self.distrust(log, why);
        Ok(())
    }

    fn copy_name(&self) -> Option<&str> {
        Some(&self.copy_name)
    }

    fn remote_report(&self) -> Option<RemoteReport> {
        Some(self.remote.report())
    }
}
