//! Placement `discard`: an open log is nowhere. The upper bound of every figure, and no crash safety.

use super::stored::finish_closed;
use crate::foreign::is_another_ones;
use crate::keeper::{Finished, Keeper, LogBlock, LogVerdict, OddVerdict, Steps, SuperblockBlock, SuperblockWritten};
use crate::log::Log;
use crate::mark::MarkKind;
use crate::opening::write_mark;
use block_route::RequestKind;
use guest_memory::MemorySlice;
use jbd2::Superblock;
use journal_area::JournalArea;
use recovery::{Report, Status};
use std::io;
use std::sync::Arc;

#[derive(Debug)]
pub(crate) struct Dropped {
    area: Arc<JournalArea>,
}

impl Dropped {
    pub fn new(area: Arc<JournalArea>) -> Self {
        Dropped { area }
    }
}

impl Keeper for Dropped {
    fn superblock(
        &self,
        log: &Log,
        block: SuperblockBlock<'_>,
        _steps: &mut Steps,
    ) -> io::Result<(SuperblockWritten, bool)> {
        let block = block.content;
        match Superblock::decode(block) {
            Ok(superblock) if superblock.is_empty() => {
                log.close_durably()?;
                Ok((SuperblockWritten::Closed, true))
            }
            Ok(_) if log.is_open() => Ok((SuperblockWritten::GoesOn, false)),
            Ok(_) if is_another_ones(log)? => Ok((SuperblockWritten::Brought, true)),
            Ok(_) => {
                // Never silent: a file system whose log was dropped is checked in full before it is used.
                write_mark(log, &self.area, MarkKind::Dropped, block)?;
                Ok((SuperblockWritten::Opened, false))
            }
            Err(_) => {
                log.close_durably()?;
                Ok((SuperblockWritten::NoLog, true))
            }
        }
    }

    fn lives_elsewhere(&self, log: &Log) -> Option<&'static str> {
        log.is_open().then_some("is dropped as it is written")
    }

    fn log_write(&self, log: &Log, _block: LogBlock<'_>) -> LogVerdict {
        if log.is_open() { LogVerdict::Kept } else { LogVerdict::Store }
    }

    fn odd_log_write(&self, log: &Log, kind: RequestKind, _slices: &[MemorySlice]) -> OddVerdict {
        match (log.is_open(), kind) {
            (false, _) => OddVerdict::Store,
            (true, RequestKind::Discard) => OddVerdict::Ignore,
            (true, _) => OddVerdict::Refuse,
        }
    }

    fn finish(&self, log: &Log, is_vm_gone: bool) -> io::Result<Finished> {
        if !log.is_open() {
            return finish_closed(log, is_vm_gone);
        }
        log.set_closed();
        // The mark on storage stays as well, until e2fsck has looked.
        let note = "the journal was dropped (placement discard), and the file system was in use: run e2fsck";
        log::warn!("disk {}: {note}", log.home.options.name);
        Ok(Finished::Left(Report::of(Status::Damaged).with_note(note)))
    }
}
