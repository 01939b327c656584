//! Finishing a held log: replay it onto its home, or put it block for block where the guest's own kernel finds it.

use crate::mark::{MarkKind, marked_behind};
use crate::numbers;
use crate::scan::FoundLogPlace;
use crate::scan::offset_of;
use crate::stored::{Says, Stored};
use extfs::ReadAt;
use jbd2::{Content, Format, HEADER_BYTES, LogRead, Plan, SUPERBLOCK_BYTES, Superblock, sequence};
use journal_area::{HeldLog, Location, Past};
use recovery::{Error, HomeBounds, HomeWriter, JournalDisk, JournalPlace, LogBounds, Report, Status};
use std::io;
use std::time::Instant;
use write_log::LoggedFile;

/// What a report says of a log that nobody here replays.
pub(crate) const LEFT_TO_THE_GUEST: &str = "the journal was not what it seemed, so it was not replayed: the guest's own kernel \
                                            does that at the next mount; run e2fsck there";

/// A part of an image. Once a flush of the image has failed, whoever asked for that, and of whatever part, no flush of this one ends well.
pub(crate) struct ImagePart<'a> {
    file: &'a LoggedFile,
    start: u64,
    len: u64,
    /// How many flushes had failed before anything was written here.
    failed_flushes: u64,
}

impl<'a> ImagePart<'a> {
    /// The `len` bytes of an image from `start` on.
    pub(crate) fn new(file: &'a LoggedFile, start: u64, len: u64) -> Self {
        ImagePart { file, start, len, failed_flushes: file.failed_flushes() }
    }

    fn check(&self, offset: u64, len: usize) -> io::Result<u64> {
        if offset.checked_add(len as u64).is_none_or(|end| end > self.len) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("{len} bytes at byte {offset} are outside the file system"),
            ));
        }
        Ok(self.start + offset)
    }
}

impl ReadAt for ImagePart<'_> {
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(buffer, self.check(offset, buffer.len())?)
    }

    fn size(&self) -> u64 {
        self.len
    }
}

impl HomeWriter for ImagePart<'_> {
    fn write_at(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.file.write_all_at(data, self.check(offset, data.len())?)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.sync_since(self.failed_flushes)
    }
}

/// A held log with the few blocks that are at their own place because there was no memory for them.
pub(crate) struct LogReader<'l, 'a> {
    pub held: &'l HeldLog<'a>,
    pub place: &'l FoundLogPlace,
    pub journal: &'l LoggedFile,
}

impl LogRead for LogReader<'_, '_> {
    type Error = io::Error;

    fn read(&mut self, position: u32, buffer: &mut [u8]) -> io::Result<Content> {
        if self.held.location(position) != Location::Storage {
            return self.held.read_block(position, buffer);
        }
        let offset = offset_of(&self.place.runs, self.place.block_bytes, position)
            .ok_or_else(|| io::Error::other(format!("log block {position} has no place on its disk")))?;
        self.journal.read_exact_at(buffer, offset)?;
        Ok(Content::Present)
    }
}

/// The same for a guest that goes on: what it has written past its journal is at home, and newer than what the journal has. Its kernel
/// may have nothing left to write there, so that nobody would put right what an older version is written over.
struct BesideTheGuest<'l, 'a>(LogReader<'l, 'a>);

impl LogRead for BesideTheGuest<'_, '_> {
    type Error = io::Error;

    fn read(&mut self, position: u32, buffer: &mut [u8]) -> io::Result<Content> {
        if self.0.held.past(position) == Some(Past::Written) {
            return Ok(Content::AtHome);
        }
        self.0.read(position, buffer)
    }
}

/// A log that is all at its own place on storage.
pub(crate) struct StoredLog<'l> {
    pub place: &'l FoundLogPlace,
    pub journal: &'l LoggedFile,
}

impl LogRead for StoredLog<'_> {
    type Error = io::Error;

    fn read(&mut self, position: u32, buffer: &mut [u8]) -> io::Result<Content> {
        let offset = offset_of(&self.place.runs, self.place.block_bytes, position)
            .ok_or_else(|| io::Error::other(format!("log block {position} has no place on its disk")))?;
        self.journal.read_exact_at(buffer, offset)?;
        Ok(Content::Present)
    }
}

/// What a report says of a log that was in its own place on storage when its VM ended.
const LEFT_ON_STORAGE: &str = "the journal is whole in its own place on storage and was left there: the guest's own kernel replays it at \
                               the next mount, as without amberlog; where nothing lies between its file system and this disk (no \
                               device mapper, md or cache in the guest), 'amberlog recover --disk' or e2fsck may, too";

/// The same of a log that is not whole there.
const LEFT_DAMAGED: &str = "the journal in its own place on storage is damaged, and was left there as it is: what it has lost nobody has; \
                            run e2fsck -f before anybody relies on the file system";

/// A log that is in its own place on storage stays as it is: what it owes is all in it, and where its homes are, only its guest's kernel
/// knows (device mapper leaves no trace on a disk). Looks at it, and says what whoever replays it will find. One that is damaged is never
/// called anything else.
///
/// # Errors
/// When it cannot be read: nobody can say whether it is whole.
pub(crate) fn leave_stored(place: &FoundLogPlace, journal: &LoggedFile) -> Result<Report, Error> {
    let found = match dry_run_stored(place, journal) {
        Ok(report) if report.status == Status::Clean => return Ok(report),
        Ok(report) => report,
        // It may be one for its guest's kernel only, with fast commits.
        Err(error @ Error::Refused(_)) => Report::of(Status::Materialised).with_note(error.to_string()),
        Err(error @ Error::Damaged(_)) => Report::of(Status::Damaged).with_note(error.to_string()),
        Err(error @ Error::Failed { .. }) => return Err(error),
    };
    let (status, note) = match found.status {
        Status::Damaged => (Status::Damaged, LEFT_DAMAGED),
        _ => (Status::Materialised, LEFT_ON_STORAGE),
    };
    let seconds = found.seconds;
    let mut report = Report { status, blocks_written: 0, bytes_written: 0, revoked: 0, seconds, ..found };
    report.notes.push(note.to_owned());
    Ok(report)
}

/// Replays a log that is all on storage.
pub(crate) fn finish_stored(place: &FoundLogPlace, home: &LoggedFile, journal: &LoggedFile) -> Result<Report, Error> {
    replay(&mut StoredLog { place, journal }, place, home, journal, || None, || Ok(()))
}

/// Brings the home of a held log to its last committed state.
pub(crate) fn finish(
    held: &HeldLog<'_>,
    place: &FoundLogPlace,
    home: &LoggedFile,
    journal: &LoggedFile,
) -> Result<Report, Error> {
    finish_clearing(held, place, home, journal, None)
}

/// The same. Compounds with these numbers, from the first one up to the last, are cleared away when all is home, and before storage says that
/// its log is empty.
pub(crate) fn finish_clearing(
    held: &HeldLog<'_>,
    place: &FoundLogPlace,
    home: &LoggedFile,
    journal: &LoggedFile,
    compounds: Option<(u32, u32)>,
) -> Result<Report, Error> {
    if held.is_distrusted() {
        return write_in_place(held, place, home, journal);
    }
    if held.is_materialise() {
        return materialise(held, place, journal);
    }
    if held.numbered().is_some() {
        confirm_mark(place, journal).map_err(|error| failed("marking the journal anew", error))?;
        // The guest's next kernel goes on behind these books.
        let next = next_number(held, place, journal)?;
        clear_numbers(held, place, journal, next)?;
    }
    let why_check = || why_check(held, place);
    replay(&mut LogReader { held, place, journal }, place, home, journal, why_check, || match compounds {
        Some((first, last)) => numbers::wipe(held, place, journal, (first, Some(last.wrapping_add(1)))),
        None => Ok(()),
    })
}

/// What has to be said where a flush of the image has failed since the log was opened: what was written home before that, and went from the log, may be
/// lost, and neither a replay nor a later flush tells.
fn why_check(held: &HeldLog<'_>, place: &FoundLogPlace) -> Option<String> {
    held.has_failed_flush().then(|| {
        format!(
            "a flush of the image has failed since the journal of the file system at byte {} was opened, and what had been written there \
             before, data of files too, may be lost: run e2fsck -f",
            place.home_start
        )
    })
}

/// The same in a report of what was done with a log, if it does not say so yet. Gives the sentence.
pub(crate) fn say_why_check(held: &HeldLog<'_>, place: &FoundLogPlace, report: &mut Report) -> Option<String> {
    let why = why_check(held, place)?;
    if report.status != Status::Materialised {
        // There is nobody else to look.
        report.status = Status::Damaged;
    }
    if !report.notes.contains(&why) {
        report.notes.push(why.clone());
    }
    Some(why)
}

/// Writes home what a held log owes, and flushes: its guest goes on.
pub(crate) fn write_home(
    held: &HeldLog<'_>,
    place: &FoundLogPlace,
    home: &LoggedFile,
    journal: &LoggedFile,
) -> Result<Report, Error> {
    write_home_of(&mut BesideTheGuest(LogReader { held, place, journal }), place, home)
}

/// Writes home what a log brings, and flushes. The log stays as it is.
pub(crate) fn write_home_of<L: LogRead + Send>(
    log: &mut L,
    place: &FoundLogPlace,
    home: &LoggedFile,
) -> Result<Report, Error> {
    let excluded = place.own_blocks.iter().map(|range| (range.start, range.end)).collect();
    let bounds = HomeBounds::from_parts(place.home_blocks, place.block_bytes, excluded);
    let log_bounds = LogBounds { superblock_position: 0, blocks: place.log_blocks };
    let len = place.home_blocks * u64::from(place.block_bytes);
    let replay = recovery::Replay::prepare(log, log_bounds, &bounds)?;
    replay.write_blocks(log, &mut ImagePart::new(home, place.home_start, len))
}

/// What [`finish`] would replay; nothing is written.
pub(crate) fn dry_run_held(held: &HeldLog<'_>, place: &FoundLogPlace, journal: &LoggedFile) -> Result<Report, Error> {
    dry_run(&mut LogReader { held, place, journal }, place)
}

/// Whether all that [`finish`] would write home is there already: one that was cut off had only the journal left to empty. Where storage
/// has a log beside the held one, which is replayed first (`is_aged`), this is said of both.
pub(crate) fn is_home_already(
    held: &HeldLog<'_>,
    place: &FoundLogPlace,
    home: &LoggedFile,
    journal: &LoggedFile,
    is_aged: bool,
) -> Result<bool, Error> {
    if is_aged && !is_home(&mut StoredLog { place, journal }, place, home)? {
        return Ok(false);
    }
    is_home(&mut LogReader { held, place, journal }, place, home)
}

/// Whether all that a replay of `log` would write home is there already.
pub(crate) fn is_home<L: LogRead + Send>(log: &mut L, place: &FoundLogPlace, home: &LoggedFile) -> Result<bool, Error> {
    let part = ImagePart::new(home, place.home_start, place.home_blocks * u64::from(place.block_bytes));
    prepared(log, place)?.is_home(log, &part)
}

/// The journal superblock on storage as a recovery of a held log leaves it ([`finish`]).
pub(crate) fn emptied_by(held: &HeldLog<'_>, place: &FoundLogPlace, journal: &LoggedFile) -> Result<Vec<u8>, Error> {
    prepared(&mut LogReader { held, place, journal }, place)?.emptied()
}

/// What [`finish_stored`] would do; nothing is written.
pub(crate) fn dry_run_stored(place: &FoundLogPlace, journal: &LoggedFile) -> Result<Report, Error> {
    dry_run(&mut StoredLog { place, journal }, place)
}

/// What a replay of `log` would do; nothing is written.
pub(crate) fn dry_run<L: LogRead + Send>(log: &mut L, place: &FoundLogPlace) -> Result<Report, Error> {
    prepared(log, place)?.dry_run(log)
}

fn prepared<L: LogRead>(log: &mut L, place: &FoundLogPlace) -> Result<recovery::Replay, Error> {
    let excluded = place.own_blocks.iter().map(|range| (range.start, range.end)).collect();
    let bounds = HomeBounds::from_parts(place.home_blocks, place.block_bytes, excluded);
    let log_bounds = LogBounds { superblock_position: 0, blocks: place.log_blocks };
    recovery::Replay::prepare(log, log_bounds, &bounds)
}

fn replay<L: LogRead + Send>(
    log: &mut L,
    place: &FoundLogPlace,
    home: &LoggedFile,
    journal: &LoggedFile,
    why_check: impl FnOnce() -> Option<String>,
    before_it_is_empty: impl FnOnce() -> io::Result<()>,
) -> Result<Report, Error> {
    let block_bytes = place.block_bytes;
    let superblock_at = offset_of(&place.runs, block_bytes, 0)
        .ok_or_else(|| Error::Refused("the journal's superblock has no place on its disk".to_owned()))?;
    let excluded = place.own_blocks.iter().map(|range| (range.start, range.end)).collect();
    let bounds = HomeBounds::from_parts(place.home_blocks, block_bytes, excluded);
    let mut part = ImagePart::new(home, place.home_start, place.home_blocks * u64::from(block_bytes));
    // Routing has the superblock at position 0, wherever that is on the disk.
    let log_bounds = LogBounds { superblock_position: 0, blocks: place.log_blocks };
    let mut other = ImagePart::new(journal, 0, u64::MAX);
    let journal_place = if place.is_external {
        JournalPlace::Other { disk: &mut other, offset: superblock_at }
    } else {
        JournalPlace::Home { offset: superblock_at - place.home_start }
    };
    let replay = recovery::Replay::prepare(log, log_bounds, &bounds)?;
    replay.run_before_emptying(log, &mut part, journal_place, why_check, before_it_is_empty)
}

/// Writes a log whose books were proven wrong to its own place. Nothing is written to any home ([`crate::distrust`]).
pub(crate) fn write_in_place(
    held: &HeldLog<'_>,
    place: &FoundLogPlace,
    home: &LoggedFile,
    journal: &LoggedFile,
) -> Result<Report, Error> {
    let started = Instant::now();
    if place.is_external {
        // What its tail has passed is on another disk, and storage is about to say that nobody needs the log for it.
        home.sync_data().map_err(|error| failed("flushing the file system", error))?;
    }
    mark_behind_all(held, place, journal)?;
    clear_all_numbers(held, place, journal)?;
    // All that was ever written there, wherever the guest thinks that its log begins.
    let mut report = Report::of(Status::Materialised).with_note(LEFT_TO_THE_GUEST);
    write_blocks(held, place, journal, &mut report)?;
    // Then the live log once more, with what was let go of it, and the superblock.
    held.note_hand_over(held.tail());
    let block_bytes = u64::from(place.block_bytes);
    let excluded = place.own_blocks.iter().map(|range| (range.start, range.end)).collect();
    let bounds = HomeBounds::from_parts(place.home_blocks, place.block_bytes, excluded);
    let mut home_part = ReadOnly(ImagePart::new(home, place.home_start, place.home_blocks * block_bytes));
    // Blocks of a log need not be aligned to the disk, only to each other.
    let first = place.runs.first().map_or(0, |run| run.offset % block_bytes);
    let mut log_part = ImagePart::new(journal, first, u64::MAX);
    let extents: Vec<extfs::JournalExtent> = place
        .runs
        .iter()
        .map(|run| extfs::JournalExtent {
            log: run.first_position,
            physical: (run.offset - first) / block_bytes,
            count: run.count,
        })
        .collect();
    let written = recovery::materialise(
        &mut LogReader { held, place, journal },
        LogBounds { superblock_position: 0, blocks: place.log_blocks },
        &extents,
        &bounds,
        &mut home_part,
        JournalDisk::Other(&mut log_part),
        &[],
    )?;
    report.transactions = written.transactions;
    report.first_sequence = written.first_sequence;
    report.last_sequence = written.last_sequence;
    report.notes.extend(written.notes);
    report.blocks_written += written.blocks_written;
    report.bytes_written += written.bytes_written;
    report.seconds = started.elapsed().as_secs_f64();
    Ok(report)
}

/// A home that is only read.
struct ReadOnly<'a>(ImagePart<'a>);

impl ReadAt for ReadOnly<'_> {
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.0.read_at(offset, buffer)
    }

    fn size(&self) -> u64 {
        self.0.size()
    }
}

impl HomeWriter for ReadOnly<'_> {
    fn write_at(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        Err(io::Error::other(format!("{} bytes at byte {offset} of a home in doubt are not to be written", data.len())))
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// Writes the log to its own place, blocks first and the superblock last: the guest's own kernel replays it.
fn materialise(held: &HeldLog<'_>, place: &FoundLogPlace, journal: &LoggedFile) -> Result<Report, Error> {
    let started = Instant::now();
    mark_behind_all(held, place, journal)?;
    clear_all_numbers(held, place, journal)?;
    let mut report = Report::of(Status::Materialised)
        .with_note("the journal has features that only the guest's own kernel can replay; it will at the next mount");
    write_blocks(held, place, journal, &mut report)?;
    let failed_flushes = journal.failed_flushes();
    write_block(held, place, journal, 0)?;
    journal.sync_since(failed_flushes).map_err(|e| failed("flushing the journal's superblock", e))?;
    report.seconds = started.elapsed().as_secs_f64();
    Ok(report)
}

/// What is held is about to lie in its own place, whole transactions of it, and storage says until the last write of all that its log is empty.
/// Where that write never comes and what is held is lost with the host, the next kernel's numbers begin with that superblock's, and must
/// not meet those. So the mark says a later one, durably on return.
fn mark_behind_all(held: &HeldLog<'_>, place: &FoundLogPlace, journal: &LoggedFile) -> Result<(), Error> {
    let marking = |error| failed("marking the journal anew", error);
    let Some(at) = place.offset_of(0) else { return Ok(()) };
    let failed_flushes = journal.failed_flushes();
    let mut raw = [0; SUPERBLOCK_BYTES];
    journal.read_exact_at(&mut raw, at).map_err(marking)?;
    let Says::Held(opening) = Stored::read(&raw).says else { return Ok(()) };
    let marked = marked_behind(&raw, MarkKind::Held, &opening, number_behind(held, place)).map_err(marking)?;
    // As it is, too: one that is seen may not be durable.
    journal.write_all_at(&marked, at).map_err(marking)?;
    journal.sync_since(failed_flushes).map_err(marking)
}

/// Compounds were in the log's place, and nothing goes home beside them before the mark that gave them up is durable. That it is seen on storage
/// does not say so: who wrote it may have died before its flush, or that one may have failed.
fn confirm_mark(place: &FoundLogPlace, journal: &LoggedFile) -> io::Result<()> {
    let Some(at) = place.offset_of(0) else { return Ok(()) };
    let failed_flushes = journal.failed_flushes();
    let mut raw = [0; SUPERBLOCK_BYTES];
    journal.read_exact_at(&mut raw, at)?;
    if matches!(Stored::read(&raw).says, Says::Held(_)) {
        journal.write_all_at(&raw, at)?;
        journal.sync_since(failed_flushes)?;
    }
    Ok(())
}

/// The first number that none of the held blocks of a log has.
pub(crate) fn number_behind(held: &HeldLog<'_>, place: &FoundLogPlace) -> Option<u32> {
    let mut block = vec![0; place.block_bytes as usize];
    let mut behind = held.tail().map(|tail| tail.sequence);
    for position in 1..held.log_blocks() {
        if held.location(position) == Location::None || !held.read_held(position, &mut block) {
            continue;
        }
        if let Some(header) = jbd2::peek(&block[..HEADER_BYTES]) {
            let next = header.sequence.wrapping_add(1);
            behind = Some(behind.map_or(next, |behind| sequence::latest(behind, next)));
        }
    }
    behind
}

/// The log goes on where it is about to be written: what durability by age left there must not count in it. Nobody reads these books to
/// know what the guest's last transaction was, so all goes whose number is not before the oldest one's; what is held comes after it.
fn clear_all_numbers(held: &HeldLog<'_>, place: &FoundLogPlace, journal: &LoggedFile) -> Result<(), Error> {
    held.tail().map_or(Ok(()), |tail| clear_numbers(held, place, journal, tail.sequence))
}

fn clear_numbers(held: &HeldLog<'_>, place: &FoundLogPlace, journal: &LoggedFile, next: u32) -> Result<(), Error> {
    numbers::wipe(held, place, journal, (next, held.numbered()))
        .map_err(|error| failed("clearing the journal's place", error))
}

fn failed(what: &str, source: io::Error) -> Error {
    Error::Failed { what: what.to_owned(), source }
}

/// Writes every held block but the superblock to its own place, and flushes.
fn write_blocks(
    held: &HeldLog<'_>,
    place: &FoundLogPlace,
    journal: &LoggedFile,
    report: &mut Report,
) -> Result<(), Error> {
    let failed_flushes = journal.failed_flushes();
    for position in 1..held.log_blocks() {
        if write_block(held, place, journal, position)? {
            report.blocks_written += 1;
            report.bytes_written += u64::from(place.block_bytes);
        }
    }
    journal.sync_since(failed_flushes).map_err(|e| failed("flushing the log", e))
}

/// Writes a log block to its own place, if it is held.
fn write_block(held: &HeldLog<'_>, place: &FoundLogPlace, journal: &LoggedFile, position: u32) -> Result<bool, Error> {
    let mut block = vec![0; place.block_bytes as usize];
    if held.location(position) == Location::None || !held.read_held(position, &mut block) {
        return Ok(false);
    }
    let offset = offset_of(&place.runs, place.block_bytes, position).ok_or_else(|| {
        failed("writing the log to its place", io::Error::other(format!("log block {position} has none")))
    })?;
    journal.write_all_at(&block, offset).map_err(|e| failed("writing the log to its place", e))?;
    Ok(true)
}

/// The number after the last transaction.
pub(crate) fn next_number(held: &HeldLog<'_>, place: &FoundLogPlace, journal: &LoggedFile) -> Result<u32, Error> {
    Ok(plan(held, place, journal)?.0.summary().walk.next_sequence())
}

/// What a replay of the held log would bring.
pub(crate) fn plan(held: &HeldLog<'_>, place: &FoundLogPlace, journal: &LoggedFile) -> Result<(Plan, Format), Error> {
    let mut log = LogReader { held, place, journal };
    let mut raw = vec![0; place.block_bytes as usize];
    log.read(0, &mut raw).map_err(|error| failed("reading the held journal", error))?;
    let (said, format) = Superblock::parse(&raw).map_err(|error| Error::Refused(error.to_string()))?;
    let excluded = place.own_blocks.iter().map(|range| (range.start, range.end)).collect();
    let bounds = HomeBounds::from_parts(place.home_blocks, place.block_bytes, excluded);
    let plan = Plan::new(&mut log, &said, &format, &|block| bounds.contains(block))
        .map_err(|error| Error::Refused(error.to_string()))?;
    Ok((plan, format))
}
