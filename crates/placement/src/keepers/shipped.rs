//! Placement `remote`: a log whose writes go to a journal server, and to its own place where there is none (`crate::remote`).

use super::stored::finish_on_storage;
use crate::keeper::{
    BlockContent, Finished, Keeper, LogBlock, LogRead, LogVerdict, OddVerdict, Side, Step, Steps, SuperblockBlock,
    SuperblockWritten, Task,
};
use crate::log::Log;
use crate::remote::{Outcome, RemoteLog, RemoteReport};
use block_route::{RequestKind, segments};
use guest_memory::MemorySlice;
use jbd2::Superblock;
use journal_area::JournalArea;
use std::io;
use std::sync::Arc;

#[derive(Debug)]
pub(crate) struct Shipped {
    remote: RemoteLog,
    /// Its copy of the log is in this one's budget.
    area: Arc<JournalArea>,
}

impl Shipped {
    pub fn new(remote: RemoteLog, area: Arc<JournalArea>) -> Self {
        Shipped { remote, area }
    }
}

impl Keeper for Shipped {
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
                Ok((SuperblockWritten::GoesOn, false))
            }
            Ok(superblock) if !superblock.is_empty() => {
                self.remote.open(&superblock, block)?;
                Ok((SuperblockWritten::Opened, false))
            }
            other => {
                let was_open = log.is_open();
                if was_open {
                    // What was written home is durable before the superblock says that no log is needed any more.
                    log.home.file.sync_data()?;
                    self.remote.close(block)?;
                    log.home.set_dirty();
                    log.journal.set_dirty();
                }
                let what = if other.is_err() { SuperblockWritten::NoLog } else { SuperblockWritten::Closed };
                Ok((what, !was_open))
            }
        }
    }

    fn log_write(&self, log: &Log, block: LogBlock<'_>) -> LogVerdict {
        if !log.is_open() {
            return LogVerdict::Store;
        }
        let content = match block.content {
            BlockContent::Guest(slices) => segments::gather(slices),
            BlockContent::Bytes(bytes) => bytes,
        };
        match self.remote.write(block.position, content.into(), block.request) {
            Outcome::Done => LogVerdict::Kept,
            Outcome::Held => LogVerdict::Held,
            Outcome::Fail => LogVerdict::Fail,
            Outcome::Store => LogVerdict::StoreFor(Task::Shipped),
        }
    }

    fn odd_log_write(&self, log: &Log, kind: RequestKind, _slices: &[MemorySlice]) -> OddVerdict {
        match (log.is_open(), kind) {
            (false, _) => OddVerdict::Store,
            (true, RequestKind::Discard) => OddVerdict::Ignore,
            (true, _) => OddVerdict::Refuse,
        }
    }

    fn end_of_pass(&self, _log: &Log, _steps: &mut Steps) {
        self.remote.end_of_pass();
    }

    fn shows_log(&self, log: &Log) -> bool {
        log.is_open()
    }

    /// What is live is here, the rest is as storage has it.
    fn log_read(&self, _log: &Log, position: u32, buffer: &mut [u8]) -> io::Result<LogRead> {
        let Some(block) = self.remote.read(position) else { return Ok(LogRead::Stored) };
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
        // Storage has the whole log then, for the guest's next kernel or for us.
        self.remote.settle()?;
        finish_on_storage(log, is_vm_gone)
    }

    fn pause(&self, is_paused: bool) -> bool {
        self.remote.pause(is_paused);
        true
    }

    fn forget(&self, log: &Log, _steps: &mut Steps) {
        self.area.release(log.place.log_bytes());
    }

    fn remote_report(&self) -> Option<RemoteReport> {
        Some(self.remote.report())
    }
}
