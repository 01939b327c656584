//! A journal that is left to its guest: what is said of it, and what storage is to say ([`crate::distrust`]).

use crate::disk::PlacementKind;
use crate::durability_report::DurabilityReport;
use crate::finish::{LEFT_TO_THE_GUEST, number_behind};
use crate::keeper::Finished;
use crate::log::{Log, Marked};
use crate::mark::{self, marked_behind};
use crate::opening::write_mark_bytes;
use crate::scan::FoundLogPlace;
use jbd2::SUPERBLOCK_BYTES;
use journal_area::{JournalArea, Taking};
use recovery::{Report, Status};
use std::io;
use write_log::LoggedFile;

/// Writing a log to its own place has failed, at any step: it goes on being held, and storage says so, whatever arrived there. The number is behind
/// all that may lie there. Gives the mark.
pub(crate) fn held_again(log: &Log, taking: &Taking<'_>, marked: Marked) -> Marked {
    let held = &taking.log();
    // Without the note a log that is live on storage is refused.
    held.note_hand_over(None);
    let behind = number_behind(held, &log.place);
    let bytes = match marked_behind(&marked.bytes, marked.kind, &marked.opening, behind) {
        Ok(bytes) => bytes,
        Err(_) => return marked,
    };
    let written = write_mark_bytes(log, &bytes);
    if let Err(error) = &written {
        log::error!("disk {}: marking the journal as held again failed: {error}", log.journal.options.name);
    }
    Marked { bytes, is_durable: written.is_ok(), ..marked }
}

/// Says that a log is distrusted, and why; it stays on storage from now on.
pub(crate) fn say(area: &JournalArea, log: &Log, why: &str) {
    say_beside(area, log, None, why);
}

/// The same of one whose keeper may have made it durable by age, with what that has to say.
pub(crate) fn say_beside(area: &JournalArea, log: &Log, by_age: Option<&DurabilityReport>, why: &str) {
    if !log.distrust() {
        return;
    }
    log.want(PlacementKind::Storage);
    let by_host = area.counters(log.id).written_home_by_host + written_home_by_age(log, by_age);
    let mut sentence = format!(
        "the journal of the file system at byte {} is not what it seemed: {why}. Something lies between that file system and \
         this disk (device mapper, md, a cache), or its kernel does what amberlog does not know: the journal goes to \
         storage as it is and is left to the guest; give the disk placement=storage",
        log.place.home_start
    );
    if by_host > 0 {
        sentence.push_str(&format!(
            ". {by_host} blocks were written home by amberlog before, perhaps to wrong places: run e2fsck"
        ));
    }
    let disk = &log.home;
    log::error!("disk {}: {sentence}", disk.options.name);
    disk.note_fault(&sentence);
}

/// Blocks that were written home as the log was made durable by age, which the area does not count: appends, and copies that made room.
fn written_home_by_age(log: &Log, by_age: Option<&DurabilityReport>) -> u64 {
    let bytes = by_age.map_or(0, |by_age| by_age.append_bytes_home + by_age.bytes_brought_home);
    bytes / u64::from(log.place.block_bytes)
}

/// The VM is gone, or has been reset: a log that is left to the guest is on storage, as it is.
pub(crate) fn left_to_guest(log: &Log, is_vm_gone: bool) -> Finished {
    log.set_closed();
    if !is_vm_gone {
        return Finished::Nothing;
    }
    remember_or_complain(log);
    Finished::Left(Report::of(Status::Materialised).with_note(LEFT_TO_THE_GUEST))
}

/// The next run, too, has to leave the journal to its guest.
pub(crate) fn remember_or_complain(log: &Log) {
    if let Err(error) = remember(&log.place, &log.journal.file) {
        log::error!(
            "disk {}: writing down that the journal is not what it seemed failed: {error}; give the disk placement=storage",
            log.home.options.name
        );
    }
}

/// Has the journal superblock on storage say that its journal was not what it seemed, and nothing else.
pub(crate) fn remember(place: &FoundLogPlace, journal: &LoggedFile) -> io::Result<()> {
    let offset =
        place.offset_of(0).ok_or_else(|| io::Error::other("the journal's superblock has no place on its disk"))?;
    let mut raw = [0; SUPERBLOCK_BYTES];
    let failed_flushes = journal.failed_flushes();
    journal.read_exact_at(&mut raw, offset)?;
    // Where the guest has put something else, there is no such journal any more.
    if let Ok(distrusted) = mark::distrusted(&raw)
        && distrusted != raw
    {
        journal.write_all_at(&distrusted, offset)?;
        journal.sync_since(failed_flushes)?;
    }
    Ok(())
}
