//! A log in its own place on storage: everything passes, and the guest's own kernel replays it there, as without amberlog.
//!
//! It must never: write home what is in the log. Nothing of it is anywhere else, so nobody loses anything if it stays as it is; but
//! where its homes are is known for sure to nobody here. A file system on a device-mapper table can look as if it were on the disk
//! itself, and a replay would then write to other blocks and empty the log.
//!
//! Failure story: a log that is damaged is left as it is, too, and the report says so.

use crate::finish::{finish_stored, leave_stored};
use crate::keeper::{Finished, Keeper, LogBlock, LogVerdict, OddVerdict, Steps, SuperblockBlock, SuperblockWritten};
use crate::left_to_guest::left_to_guest;
use crate::log::Log;
use block_route::RequestKind;
use guest_memory::MemorySlice;
use jbd2::Superblock;
use recovery::{Report, Status};
use std::io;

#[derive(Debug)]
pub(crate) struct Stored;

impl Keeper for Stored {
    fn watches_log(&self) -> bool {
        false
    }

    fn leaves_nothing_here(&self) -> bool {
        true
    }

    fn superblock(
        &self,
        log: &Log,
        block: SuperblockBlock<'_>,
        _steps: &mut Steps,
    ) -> io::Result<(SuperblockWritten, bool)> {
        Ok(stored_superblock(log, block.content))
    }

    fn log_write(&self, _log: &Log, _block: LogBlock<'_>) -> LogVerdict {
        LogVerdict::Store
    }

    fn odd_log_write(&self, _log: &Log, _kind: RequestKind, _slices: &[MemorySlice]) -> OddVerdict {
        OddVerdict::Store
    }

    fn finish(&self, log: &Log, is_vm_gone: bool) -> io::Result<Finished> {
        finish_on_storage(log, is_vm_gone)
    }
}

/// The superblock of a log that is on storage. After a hand-over the guest's own says for a while that the log begins earlier. (That of an image
/// which is copied over the disk may say so, too, and counts.)
pub(super) fn stored_superblock(log: &Log, block: &[u8]) -> (SuperblockWritten, bool) {
    match Superblock::decode(block).ok().filter(|superblock| !superblock.is_empty()) {
        Some(open) => {
            let what = if log.is_open() { SuperblockWritten::GoesOn } else { SuperblockWritten::Opened };
            (what, !is_kept_from_storage(log, &open))
        }
        None => (SuperblockWritten::Closed, true),
    }
}

fn is_kept_from_storage(log: &Log, open: &Superblock) -> bool {
    let Some(from) = log.storage_from.filter(|_| !log.is_past_hand_over()) else { return false };
    if !jbd2::sequence::is_after(from, open.sequence) {
        log.set_past_hand_over(true);
        return false;
    }
    log.stored().is_ok_and(|stored| stored.superblock.is_some_and(|stored| stored.uuid == open.uuid))
}

/// The guest of a log on storage is gone. Its next kernel replays the log.
pub(crate) fn finish_on_storage(log: &Log, is_vm_gone: bool) -> io::Result<Finished> {
    finish_by(log, is_vm_gone, |log| leave(log).map(Finished::Left))
}

/// The same for a log that was brought to storage at this moment: until then it was elsewhere, and for a VM that is gone it is ours to
/// bring home.
pub(super) fn finish_brought(log: &Log, is_vm_gone: bool) -> io::Result<Finished> {
    finish_by(log, is_vm_gone, replay)
}

fn finish_by(log: &Log, is_vm_gone: bool, end: impl FnOnce(&Log) -> io::Result<Finished>) -> io::Result<Finished> {
    if log.is_distrusted() {
        return Ok(left_to_guest(log, is_vm_gone));
    }
    if !log.is_open() {
        return finish_closed(log, is_vm_gone);
    }
    let finished = if is_vm_gone { end(log)? } else { Finished::Nothing };
    log.set_closed();
    Ok(finished)
}

/// Leaves a log where it is. Gives what is to be said of it.
///
/// # Errors
/// When it cannot be read.
pub(crate) fn leave(log: &Log) -> io::Result<Report> {
    let report = leave_stored(&log.place, &log.journal.file).map_err(|error| {
        let (name, at) = (&log.home.options.name, log.place.home_start);
        io::Error::other(format!(
            "disk {name}: the journal of the file system at byte {at} is in its own place on storage, and cannot be read there: {error}"
        ))
    })?;
    let (name, at) = (&log.home.options.name, log.place.home_start);
    if report.status == Status::Damaged {
        log::warn!(
            "disk {name}: the journal of the file system at byte {at} is damaged in its own place on storage: {}",
            report.notes.join("; ")
        );
    } else {
        log::info!(
            "disk {name}: the journal of the file system at byte {at} is in its own place on storage, with {} transactions, and is left \
             to the guest's own kernel",
            report.transactions
        );
    }
    Ok(report)
}

/// The same for a log that is closed, wherever it would be if it were not.
pub(super) fn finish_closed(log: &Log, is_vm_gone: bool) -> io::Result<Finished> {
    // Another device may be the one that its guest has mounted it with.
    if log.place.is_external && !log.was_opened() {
        return Ok(Finished::Nothing);
    }
    // Mounted, and died before its first commit: nothing to replay, but the flag says so.
    if is_vm_gone && is_mounted_with_empty_log(log)? { replay(log) } else { Ok(Finished::Nothing) }
}

fn replay(log: &Log) -> io::Result<Finished> {
    let report = finish_stored(&log.place, &log.home.file, &log.journal.file);
    Ok(Finished::Recovered(vec![report.map_err(io::Error::other)?]))
}

/// Whether a file system says that it needs recovery while its journal on storage is empty and without an error.
fn is_mounted_with_empty_log(log: &Log) -> io::Result<bool> {
    let mut raw = [0; extfs::SUPERBLOCK_BYTES];
    log.home.file.read_exact_at(&mut raw, log.place.home_start + extfs::SUPERBLOCK_OFFSET)?;
    if !extfs::Superblock::parse(&raw).is_ok_and(|superblock| superblock.needs_recovery()) {
        return Ok(false);
    }
    Ok(matches!(log.stored()?.live_from(), Ok(None)))
}
