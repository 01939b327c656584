//! The mark on storage of a log that is open and held here, or dropped: written when it opens, counted on while it is used.

use crate::disk::DiskCounters;
use crate::log::{Log, Marked};
use crate::mark::{self, MarkKind};
use jbd2::{Superblock, sequence};
use journal_area::{JournalArea, Opening};
use std::io;
use std::sync::atomic::Ordering;

/// Puts the error mark on storage: an empty log that an error happened to, and which opening of it this is. On return that is
/// durable.
///
/// # Errors
/// When that fails: the log cannot be held.
pub(crate) fn write_mark(log: &Log, area: &JournalArea, kind: MarkKind, block: &[u8]) -> io::Result<()> {
    let write = || {
        let mut current = log.state.mark.lock().expect("no panic under this lock");
        *current = None;
        let opening = Opening { number: remote_journal::random(), count: 0 };
        let failed = log.journal.file.failed_flushes();
        let marked = write_opening(log, area, (block, None), kind, opening)?;
        DiskCounters::add(&log.journal.counters.journal_bytes_to_storage, marked.bytes.len() as u64);
        log.journal.file.sync_since(failed)?;
        area.note_marked(log.id);
        *current = Some(Marked { is_durable: true, ..marked });
        Ok(())
    };
    write().map_err(|error: io::Error| {
        let sentence = format!("marking the journal on storage failed, so it cannot be held: {error}");
        io::Error::new(error.kind(), sentence)
    })
}

/// The area says it first, then storage: a kill between the two leaves an area that knows both.
fn write_opening(
    log: &Log,
    area: &JournalArea,
    (block, numbered): (&[u8], Option<u32>),
    kind: MarkKind,
    opening: Opening,
) -> io::Result<Marked> {
    let written = written_home(log);
    let bytes = mark::marked_behind(block, kind, &opening, numbered)?;
    area.note_opening(log.id, &opening, false);
    write_superblock_bytes(log, &bytes)?;
    area.note_opening(log.id, &opening, true);
    Ok(Marked { opening, kind, bytes, written, is_durable: false })
}

/// Says on storage that the log is empty there and good by itself, and which opening of the held one it stands beside. On return that is
/// durable. Nobody counts on in it here: who makes the log durable writes its superblock.
///
/// What an earlier opening left at the log's first block may have the number that the log begins with: it goes first.
///
/// # Errors
/// When that fails.
pub(crate) fn write_aged(log: &Log, area: &JournalArea, block: &[u8], tail: (u32, u32)) -> io::Result<Opening> {
    let opening = Opening { number: remote_journal::random(), count: 0 };
    let bytes = mark::aged(block, &opening, tail)?;
    log.take_mark();
    let failed = log.journal.file.failed_flushes();
    log.journal.file.write_all_at(&vec![0; log.place.block_bytes as usize], log.place_of(tail.0)?)?;
    log.journal.file.sync_since(failed)?;
    area.note_opening(log.id, &opening, false);
    write_superblock_bytes(log, &bytes)?;
    log.journal.file.sync_since(failed)?;
    area.note_opening(log.id, &opening, true);
    area.note_marked(log.id);
    DiskCounters::add(&log.journal.counters.journal_bytes_to_storage, bytes.len() as u64);
    Ok(opening)
}

/// Puts the error mark in the place of a log that was made durable by age, beside the same opening: its guest's superblock, and the first
/// number that no compound has. On return that is durable.
///
/// # Errors
/// When that fails.
pub(crate) fn mark_again(
    log: &Log,
    area: &JournalArea,
    (block, numbered): (&[u8], u32),
    opening: Opening,
) -> io::Result<()> {
    // From the mark on no replay brings home what compounds have. What the guest has written there itself, and counts on since (with no
    // age its flushes are spared for that), must not come to storage behind the mark: both are lost then if the power goes between.
    if let Err(error) = log.home.file.sync_data() {
        // The mark is needed all the more. Nothing begins again under this mount, and the guest's next flush fails.
        log::error!("disk {}: flushing what its guest has written failed: {error}", log.home.options.name);
    }
    let mut current = log.state.mark.lock().expect("no panic under this lock");
    // From here on: the mark is needed where the flush above has failed, too.
    let failed = log.journal.file.failed_flushes();
    let marked = write_opening(log, area, (block, Some(numbered)), MarkKind::Held, opening)?;
    log.journal.file.sync_since(failed)?;
    DiskCounters::add(&log.journal.counters.journal_bytes_to_storage, marked.bytes.len() as u64);
    *current = Some(Marked { is_durable: true, ..marked });
    Ok(())
}

/// A compound is about to be written into the place of a log that is held, beside the error mark: that says, durably on return, that no
/// compound has the number `numbered` or a later one. Gives the opening that it carries. Nobody counts on in it from here on. Nothing where it
/// is not known.
///
/// # Errors
/// When that fails: it is as it was.
pub(crate) fn mark_behind(log: &Log, area: &JournalArea, numbered: u32) -> io::Result<Option<Opening>> {
    let mut current = log.state.mark.lock().expect("no panic under this lock");
    let Some(marked) = &*current else { return Ok(None) };
    let next = Opening { count: marked.opening.count + 1, ..marked.opening };
    let failed = log.journal.file.failed_flushes();
    let marked = write_opening(log, area, (&marked.bytes, Some(numbered)), marked.kind, next)?;
    DiskCounters::add(&log.journal.counters.journal_bytes_to_storage, marked.bytes.len() as u64);
    let opening = marked.opening;
    *current = Some(marked);
    log.journal.file.sync_since(failed)?;
    *current = None;
    Ok(Some(opening))
}

/// Transactions that a mark is ahead of the guest's when it has to say a later number: so many cost a flush once.
const AHEAD: u32 = 1024;

/// A block of the guest's own log, of transaction `number`, is about to go to its place on storage: the mark says, durably on
/// return, a number that is later. Kernels that find the log lost give theirs from the mark's on, and would come to that one.
///
/// # Errors
/// When that fails: nothing of that number may go there, and it is tried again with the next.
pub(crate) fn mark_ahead(log: &Log, area: &JournalArea, number: u32) -> io::Result<()> {
    let mut current = log.state.mark.lock().expect("no panic under this lock");
    let Some(marked) = &*current else { return Ok(()) };
    let said = Superblock::decode(&marked.bytes).map_err(io::Error::other)?;
    // One that was written and not flushed may be lost without another word: a page whose flush has failed is clean.
    let says_it = marked.is_durable && sequence::is_after(said.sequence, number);
    if says_it || !is_alone_in_its_page(log) {
        return Ok(());
    }
    let opening = Opening { count: marked.opening.count + 1, ..marked.opening };
    let ahead = Some(number.wrapping_add(AHEAD));
    let failed = log.journal.file.failed_flushes();
    let marked = write_opening(log, area, (&marked.bytes, ahead), marked.kind, opening)?;
    DiskCounters::add(&log.journal.counters.journal_bytes_to_storage, marked.bytes.len() as u64);
    *current = Some(marked.clone());
    log.journal.file.sync_since(failed)?;
    *current = Some(Marked { is_durable: true, ..marked });
    Ok(())
}

pub(crate) fn written_home(log: &Log) -> u64 {
    log.home.counters.home_bytes_to_storage.load(Ordering::Acquire)
}

/// Counts on in the mark of a log whose disk was written to since the last time, so that an older copy of an image is told from
/// the image: what goes home is not held any more.
pub(crate) fn count_on(log: &Log, area: &JournalArea) {
    let mut current = log.state.mark.lock().expect("no panic under this lock");
    // Under the lock: whoever closes the log, hands it over or recovers it takes the mark away first.
    let Some(marked) = &*current else { return };
    let is_quiet = !log.is_held_open() || marked.written == written_home(log);
    if is_quiet || !is_alone_in_its_page(log) {
        return;
    }
    let next = Opening { count: marked.opening.count + 1, ..marked.opening };
    let outcome = is_on_storage_still(log, marked).and_then(|is_there| match is_there {
        // The same number, which is as durable as it was.
        true => write_opening(log, area, (&marked.bytes, None), marked.kind, next)
            .map(|next| Some(Marked { is_durable: marked.is_durable, ..next })),
        false => Ok(None),
    });
    match outcome {
        Ok(next) => {
            let bytes = next.as_ref().map_or(0, |next| next.bytes.len() as u64);
            DiskCounters::add(&log.journal.counters.mark_bytes_to_storage, bytes);
            *current = next;
        }
        // What could not be written is tried again the next time: the area knows both.
        Err(error) => log::debug!("counting on in a mark: {error}"),
    }
}

/// Whether a log's superblock shares no page of the host's cache with anything else: a write to it from here would bring along
/// what the page held of its neighbours, and those are written past the cache. So it is where it can be written past the cache, too.
pub(crate) fn is_alone_in_its_page(log: &Log) -> bool {
    const PAGE: u64 = 4096;
    let Some(offset) = log.offset_of(0) else { return false };
    let is_whole = u64::from(log.place.block_bytes) >= PAGE && offset.is_multiple_of(PAGE);
    is_whole || log.journal.file.goes_past_cache(offset, crate::numbers::SECTOR_BYTES)
}

fn is_on_storage_still(log: &Log, marked: &Marked) -> io::Result<bool> {
    let Some(offset) = log.offset_of(0) else { return Ok(false) };
    let mut raw = [0; jbd2::SUPERBLOCK_BYTES];
    log.journal.file.read_exact_at(&mut raw, offset)?;
    Ok(raw[..] == marked.bytes[..])
}

/// Writes a mark to storage, and flushes.
pub(crate) fn write_mark_bytes(log: &Log, mark: &[u8]) -> io::Result<()> {
    let failed = log.journal.file.failed_flushes();
    write_mark_unflushed(log, mark)?;
    log.journal.file.sync_since(failed)
}

/// The same; the next flush makes it durable.
pub(crate) fn write_mark_unflushed(log: &Log, mark: &[u8]) -> io::Result<()> {
    write_superblock_bytes(log, mark)?;
    DiskCounters::add(&log.journal.counters.journal_bytes_to_storage, mark.len() as u64);
    Ok(())
}

fn write_superblock_bytes(log: &Log, mark: &[u8]) -> io::Result<()> {
    // Only the superblock itself: the rest of its block is not ours to change.
    log.journal.file.write_all_at(mark, log.place_of(0)?)
}

impl Log {
    /// The guest is about to close the log, or to write something else in its place: nobody writes the mark any more, and what
    /// the guest wrote home is durable on return, since the superblock that goes to storage now says that no log is needed.
    pub(crate) fn close_durably(&self) -> io::Result<()> {
        self.take_mark();
        if self.set_closed() {
            self.home.file.sync_data()?;
            self.home.set_dirty();
            self.journal.set_dirty();
        }
        Ok(())
    }
}
