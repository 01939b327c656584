//! Recovery from a region alone: after the guest, the VMM, amberlog, the host's kernel or its power (the paper's III-F).
//!
//! Everything is judged before anything is written. Blocks go home first, in large runs; then the file system's superblock
//! and the journal's are finished by the code that finishes every other recovery, which is shown a log with one transaction
//! that holds the superblock, if the region has a version of it; and last the region is given back. Cut off anywhere and
//! run again, the outcome is the same. (A last transaction that counts on its appends being at home does so, or not, from the first recovery that looks
//! on: the region says so before anything is written.)

use super::books::{RegionBooks, RegionVerdict, RegionWhy};
use super::condition::{Condition, Outcome};
use super::mark;
use super::{Region, State, region_error};
use crate::finish::ImagePart;
use crate::finish::LEFT_TO_THE_GUEST;
use crate::scan::offset_of;
use crate::scan::{FoundLogPlace, internal_place};
use extfs::{FileSystem, Journal as JournalOf, ReadAt, SUPERBLOCK_OFFSET};
use jbd2::build::{LogBuilder, Transaction};
use jbd2::{Content, Format, LogRead, Superblock, SuperblockEdit};
use nvm_journal::medium::{Medium, MediumFile, OpenOptions, RegionChoice};
use nvm_journal::{Found, Header, Owner};
use recovery::{Access, Disk as Image, Error, HomeBounds, HomeWriter, JournalPlace, LogBounds, Report, Status};
use std::convert::Infallible;
use std::io;
use std::ops::DerefMut;
use std::path::Path;
use std::time::{Duration, Instant};
use write_log::LoggedFile;

/// Bytes that are written home in one piece at most.
const RUN_BYTES: usize = 1 << 20;
/// What is said of a transaction whose condition is not true; nothing where it is.
fn lost(outcome: Outcome) -> Option<String> {
    let why = match outcome {
        Outcome::True => return None,
        Outcome::Untrue => "they are not all at home".to_owned(),
        Outcome::Unreadable(block) => format!("block {block} of the file system, one of them, cannot be read"),
    };
    Some(format!(
        "the last transaction was acknowledged before the flush of its appends (nvm-pipelined), and {why}: it is lost, and all before it is \
         recovered"
    ))
}

/// What a recovery from a region did.
#[derive(Clone, Debug)]
pub struct NvmFinished {
    /// Where the file system begins on its disk, in bytes.
    pub offset: u64,
    /// The numbers.
    pub recovery: Report,
}

/// What the journal superblock on storage says of a region.
#[derive(Debug, PartialEq, Eq)]
enum Stored {
    /// It is as it was made when the log was opened: the region's blocks belong onto this disk.
    Marked,
    /// The log is in its own place, as its guest had it, and its superblock is to say so.
    Left,
    /// Nothing is owed: a recovery was cut off after its last write, or nothing was ever committed.
    NothingOwed(&'static str),
    /// Nothing is owed, and another region has the log: this one was claimed for an opening that failed. Where no other region of the disk has
    /// it, that one is missing.
    Claimed,
}

impl Stored {
    /// Whether the log is in the region by what storage says.
    fn has_log(&self) -> bool {
        matches!(self, Stored::Marked | Stored::Left)
    }
}

/// Why a region is refused where the log is in another one.
const IN_ANOTHER: &str =
    "the journal of this disk is in another region, or was when the disk was copied; give that one";

/// Recovers an image from a region. Nothing when the region holds nothing.
///
/// # Errors
/// [`Error::Refused`] when nothing was changed: the region is damaged, in use, or belongs to another file system or
/// another opening of its journal. [`Error::Failed`] when reading or writing failed; it can be run again.
pub fn recover_image(image: &Image, options: OpenOptions, access: Access) -> Result<Option<NvmFinished>, Error> {
    let path = options.path.clone();
    let home = unlogged(image)?;
    let others = options.clone();
    if access == Access::Write {
        let file = MediumFile::open(options).map_err(region_error(&path))?;
        let medium: Region = Box::new(file.map().map_err(region_error(&path))?);
        if Found::read(medium.bytes()).map_err(region_error(&path))?.is_none() {
            // A start makes the file that it names, and whether it may be one is seen when a log is opened; a person's path may be a wrong one.
            return of_nothing(medium.bytes(), &path, &home);
        }
        refuse_older_by_others(&others, &home)?;
        let mut brought = Vec::new();
        recover_regions(std::iter::once(&mut State::Idle(medium)), &path, &home, &mut brought)?;
        return Ok(brought.pop());
    }
    let view = MediumFile::look(options).and_then(MediumFile::map_for_reading).map_err(region_error(&path))?;
    if Found::read(view.bytes()).map_err(region_error(&path))?.is_none() {
        return of_nothing(view.bytes(), &path, &home);
    }
    refuse_older_by_others(&others, &home)?;
    let Some(judged) = Judged::alone(view.bytes(), &path, &home)? else {
        return refuse_without_region(&path, &home).map(|()| None);
    };
    Ok(Some(NvmFinished { offset: judged.owner.home_start, recovery: judged.report() }))
}

/// A person names one region, and the disk may have others in the same file or device. An image that is an older copy by one of those is so for this
/// one, whose mark may be the same on both. They are looked at, whoever uses them; one that cannot be read says nothing.
///
/// # Errors
/// A refusal, where one of them says so.
fn refuse_older_by_others(options: &OpenOptions, home: &LoggedFile) -> Result<(), Error> {
    let RegionChoice { index: named, count } = options.region;
    for index in (0..count).filter(|index| *index != named) {
        let choice = RegionChoice { index, count };
        let other = OpenOptions { region: choice, create_bytes: None, ..options.clone() };
        let Ok(view) = MediumFile::look(other).and_then(MediumFile::map_for_reading) else { continue };
        if is_older_by(view.bytes(), home) == Some(true) {
            return Err(Error::Refused(format!(
                "{}: region {choice} of it says that this image is an older copy, a snapshot or a backup, of the disk that had its journals here, so \
                 what region {named}/{count} holds must not be brought home to it either: give the true image; nothing was changed",
                options.path.display()
            )));
        }
    }
    Ok(())
}

/// Whether an image is an older copy by what a region says. Nothing where that says nothing of it.
fn is_older_by(region: &[u8], home: &LoggedFile) -> Option<bool> {
    let found = Found::read(region).ok()??;
    let owner = found.owner.as_ref()?;
    let place = place_of(home, owner).ok()??;
    let superblock = read_superblock(home, &place).ok()?;
    let raw = &superblock[..jbd2::SUPERBLOCK_BYTES];
    let on_storage = Superblock::decode(raw).ok()?;
    Some(RegionBooks::new(&found, owner).judge(raw, &on_storage) == Err(RegionWhy::OlderImage))
}

/// Bytes of a region's superblock and of the headers behind it: where anything was ever put into one, something is there.
const BEGINNING_BYTES: usize = 64 << 10;

/// The same of a file that no journal was ever put into: the region of a VM whose guest had its journal on storage from the beginning,
/// say. Anything else that is no region is a wrong path.
fn of_nothing(bytes: &[u8], path: &Path, home: &LoggedFile) -> Result<Option<NvmFinished>, Error> {
    let beginning = &bytes[..bytes.len().min(BEGINNING_BYTES)];
    if beginning.iter().any(|byte| *byte != 0) {
        return Err(Error::Refused(format!("{} is no NVM region of amberlog's", path.display())));
    }
    refuse_without_region(path, home).map(|()| None)
}

/// An image that no VM uses.
pub(super) fn unlogged(image: &Image) -> Result<LoggedFile, Error> {
    LoggedFile::unlogged(image.file()).map_err(|source| Error::Failed { what: "opening the image".to_owned(), source })
}

/// Brings home what the regions of one disk hold for the file systems on `home`, and gives them back: for whoever finishes what an earlier
/// process left, a start as well as a person. An image on which one of them must not be brought home is the wrong one for all: each is judged
/// before anything is done for any. What was done is in `brought`, also where a later one failed.
///
/// # Errors
/// As [`recover_medium`]; and a refusal where none of them holds anything, and the disk says that its journal is in one.
pub(super) fn recover_regions<R: DerefMut<Target = State>>(
    regions: impl Iterator<Item = R>,
    path: &Path,
    home: &LoggedFile,
    brought: &mut Vec<NvmFinished>,
) -> Result<(), Error> {
    let regions: Vec<R> = regions.collect();
    // What a guest of this process has was left by nobody.
    if regions.iter().any(|region| !matches!(**region, State::Idle(_))) {
        return Ok(());
    }
    let before = brought.len();
    recover_idle(regions, path, home, brought)?;
    if brought.len() > before { Ok(()) } else { refuse_without_region(path, home) }
}

/// The same of those regions that nobody of this process has.
///
/// # Errors
/// As [`recover_medium`].
pub(super) fn recover_idle<R: DerefMut<Target = State>>(
    mut regions: Vec<R>,
    path: &Path,
    home: &LoggedFile,
    brought: &mut Vec<NvmFinished>,
) -> Result<(), Error> {
    let mut judged: Vec<(&mut Region, Judged)> = Vec::new();
    for region in &mut regions {
        let State::Idle(medium) = &mut **region else { continue };
        if let Some(one) = Judged::new(medium.bytes(), path, home)? {
            judged.push((medium, one));
        }
    }
    refuse_together(&judged, path)?;
    // What was claimed for nothing is given back when storage has what the other one held, durably.
    judged.sort_by_key(|(_, one)| !one.stored.has_log());
    let before = brought.len();
    for (medium, one) in judged {
        // A region may have been given back for which nothing had to be written.
        let finished = one.carry_out(medium, path, home).map_err(|error| error.after(brought.len() > before))?;
        brought.push(finished);
    }
    Ok(())
}

/// What cannot be of regions of one disk. Of two that have the same journal one is a copy of the other, and which of them the disk was used with
/// cannot be told. And where storage says that a journal is in another region, one of these has to have it.
///
/// # Errors
/// A refusal, where it is so.
fn refuse_together(judged: &[(&mut Region, Judged)], path: &Path) -> Result<(), Error> {
    let shown = path.display();
    for (index, (_, one)) in judged.iter().enumerate() {
        let is_same = |owner: &Owner| owner.home_start == one.owner.home_start && owner.journal == one.owner.journal;
        let mut others = judged.iter().enumerate().filter(|(other, _)| *other != index).map(|(_, (_, other))| other);
        let is_elsewhere = others.any(|other| other.stored.has_log() && is_same(&other.owner));
        if one.stored == Stored::Claimed && !is_elsewhere {
            return Err(Error::Refused(format!("{shown}: {IN_ANOTHER}; nothing was changed")));
        }
        if one.stored.has_log() && is_elsewhere {
            return Err(Error::Refused(format!(
                "{shown}: two of its regions say that they have the journal of the file system at byte {} of the disk, so one of them is a copy: \
                 give the true one alone; nothing was changed",
                one.owner.home_start
            )));
        }
    }
    Ok(())
}

/// Brings home what a region holds for the file system on `home`, and gives the region back. Nothing where it holds nothing.
///
/// # Errors
/// As [`recover_image`].
pub(crate) fn recover_medium(
    medium: &mut Region,
    path: &Path,
    home: &LoggedFile,
) -> Result<Option<NvmFinished>, Error> {
    match Judged::alone(medium.bytes(), path, home)? {
        Some(judged) => judged.carry_out(medium, path, home).map(Some),
        None => Ok(None),
    }
}

/// Where a region holds nothing, the disk must not say that its journal is in one: that is another, or it was lost.
///
/// # Errors
/// When it does.
fn refuse_without_region(path: &Path, home: &LoggedFile) -> Result<(), Error> {
    let failed = |source| Error::Failed { what: "looking for file systems on the disk".to_owned(), source };
    let size =
        rustix::fs::seek(home.for_reading(), rustix::fs::SeekFrom::End(0)).map_err(|error| failed(error.into()))?;
    for file_system in extfs::discover(&WholeDisk { file: home, size }).map_err(failed)? {
        let Some(place) = internal_place(0, &file_system) else { continue };
        if mark::is_on_nvm(&read_superblock(home, &place)?) {
            return Err(Error::Refused(format!(
                "the journal of the file system at byte {} of the disk is in an NVM region, and {} holds nothing: give the \
                 region that it was used with, or run e2fsck -fy to give the journal up; nothing was changed",
                place.home_start,
                path.display()
            )));
        }
    }
    Ok(())
}

/// A region and a disk that belong together.
struct Judged {
    found: Found,
    owner: Owner,
    place: FoundLogPlace,
    /// The journal superblock's whole block, as the guest last wrote it.
    superblock: Vec<u8>,
    format: Format,
    stored: Stored,
    /// What the last transaction counts on, and whether that is so; nothing where it just counts.
    condition: Option<(Condition, Outcome)>,
    /// How long it took to find that out.
    judging: Duration,
}

impl Judged {
    /// The same of a region that is looked at by itself.
    fn alone(region: &[u8], path: &Path, home: &LoggedFile) -> Result<Option<Self>, Error> {
        let judged = Self::new(region, path, home)?;
        match judged {
            Some(Judged { stored: Stored::Claimed, .. }) => {
                Err(Error::Refused(format!("{}: {IN_ANOTHER}; nothing was changed", path.display())))
            }
            judged => Ok(judged),
        }
    }

    /// Nothing where the region holds nothing.
    fn new(region: &[u8], path: &Path, home: &LoggedFile) -> Result<Option<Self>, Error> {
        let started = Instant::now();
        let shown = path.display();
        // One that was never made one: whether it may be is seen when a log is opened.
        let Some(mut found) = Found::read(region).map_err(region_error(path))? else { return Ok(None) };
        let Some(owner) = found.owner.clone() else { return Ok(None) };
        found.verify(region).map_err(region_error(path))?;
        let refuse = |reason: String| Error::Refused(format!("{shown}: {reason}; nothing was changed"));
        let place = place_of(home, &owner)?.ok_or_else(|| {
            refuse(format!(
                "the region belongs to the ext file system {} at byte {} of a disk, and there is none like it on this one: give the disk \
                 that has it, or put its partition back, or remove the region's file where that is not wanted any more",
                recovery::uuid_text(&owner.file_system),
                owner.home_start
            ))
        })?;
        if place.file_system_uuid != owner.file_system && !is_journal(home, &place, &owner.journal)? {
            return Err(refuse(format!(
                "the region belongs to another file system: to {}, and at byte {} of the disk is {}",
                recovery::uuid_text(&owner.file_system),
                owner.home_start,
                recovery::uuid_text(&place.file_system_uuid)
            )));
        }
        if place.block_bytes != found.geometry.block_bytes {
            return Err(refuse(format!(
                "the region has blocks of {} bytes, the file system of {}",
                found.geometry.block_bytes, place.block_bytes
            )));
        }
        let damaged = |error: jbd2::SuperblockError| refuse(format!("the journal superblock in the region: {error}"));
        let (_, format) = Superblock::parse(&owner.attachment).map_err(damaged)?;
        let mut superblock = read_superblock(home, &place)?;
        let raw = &superblock[..jbd2::SUPERBLOCK_BYTES];
        let on_storage = Superblock::decode(raw).map_err(|error| refuse(error.to_string()))?;
        let books = books(&found, &owner, region, &on_storage, home)
            .map_err(|source| Error::Failed { what: "reading what may have been written home".to_owned(), source })?;
        let stored = stored(&books, raw, &on_storage, &owner).map_err(refuse)?;
        superblock[..owner.attachment.len()].copy_from_slice(&owner.attachment);
        let bounds = bounds(&place);
        let mut condition = None;
        if let Some(prepared) = found.prepared.as_ref().filter(|_| stored == Stored::Marked) {
            let of = Condition::decode(&prepared.condition)
                .filter(|of| of.is_of(place.block_bytes) && of.blocks().all(|block| bounds.contains(block)))
                .ok_or_else(|| refuse("what its last transaction counts on is not known".to_owned()))?;
            let at = |block: u64| place.home_start + block * u64::from(place.block_bytes);
            let outcome = of
                .outcome(&mut |block, content| home.read_exact_at(content, at(block)))
                .map_err(|source| Error::Failed { what: "reading what was written home".to_owned(), source })?;
            if outcome == Outcome::True
                && let Some(with) = Found::with_prepared(region).map_err(region_error(path))?
            {
                with.verify(region).map_err(region_error(path))?;
                found = with;
            }
            condition = Some((of, outcome));
        }
        if let Some(outside) = found.latest.keys().find(|block| !bounds.contains(**block)) {
            return Err(refuse(format!(
                "the region holds a version of block {outside}, which is outside the file system or in its journal"
            )));
        }
        let judging = started.elapsed();
        Ok(Some(Judged { found, owner, place, superblock, format, stored, condition, judging }))
    }

    /// Does what is to be done: brings home what the region holds, and gives it back.
    fn carry_out(self, medium: &mut Region, path: &Path, home: &LoggedFile) -> Result<NvmFinished, Error> {
        let started = Instant::now();
        let mut report = self.report();
        let mut steps = || {
            match self.stored {
                Stored::Marked => {
                    self.decide(medium, path, home)?;
                    self.write_home(medium.bytes(), home)?;
                    let finished = self.finish(medium.bytes(), home)?;
                    report.status = report.status.max(finished.status);
                    report.notes.extend(finished.notes);
                }
                Stored::Left => self.leave(home)?,
                Stored::NothingOwed(_) | Stored::Claimed => {}
            }
            nvm_journal::forget(medium).map_err(region_error(path))
        };
        // A journal that is another one by now is found out when its blocks are home, for one.
        steps().map_err(|error: Error| error.after(home.has_written()))?;
        report.seconds = (self.judging + started.elapsed()).as_secs_f64();
        Ok(NvmFinished { offset: self.owner.home_start, recovery: report })
    }

    /// Has the last transaction count, or not, for whoever comes after this.
    fn decide(&self, medium: &mut Region, path: &Path, home: &LoggedFile) -> Result<(), Error> {
        let Some((condition, outcome)) = &self.condition else { return Ok(()) };
        if let Some(lost) = lost(*outcome) {
            log::warn!("{}: {lost}", path.display());
            return nvm_journal::withdraw_prepared(medium).map_err(region_error(path));
        }
        let is_so = condition
            .holds_for_good(home, self.place.home_start)
            .map_err(|source| Error::Failed { what: "making durable what was written home".to_owned(), source })?;
        if !is_so {
            return Err(Error::Refused(format!("{}: the disk has changed meanwhile", path.display())));
        }
        nvm_journal::count_prepared(medium).map_err(region_error(path))
    }

    fn report(&self) -> Report {
        match self.stored {
            Stored::NothingOwed(note) => return Report::of(Status::Clean).with_note(note),
            Stored::Claimed => {
                return Report::of(Status::Clean)
                    .with_note("the region was claimed for a journal that is in another one; it is given back");
            }
            Stored::Left => return Report::of(Status::Materialised).with_note(LEFT_TO_THE_GUEST),
            Stored::Marked => {}
        }
        let transactions = u64::from(self.found.checkpoint.transaction);
        let blocks = self.found.latest.len() as u64;
        let mut report = Report {
            status: Status::Recovered,
            transactions,
            blocks_written: blocks,
            bytes_written: blocks * u64::from(self.place.block_bytes),
            last_sequence: (transactions > 0).then_some(self.found.sequence),
            ..Report::default()
        };
        let first = Superblock::decode(&self.owner.attachment).map(|superblock| superblock.sequence);
        report.first_sequence = report.last_sequence.and(first.ok());
        if let Some(lost) = self.condition.as_ref().and_then(|(_, outcome)| lost(*outcome)) {
            report = report.with_note(lost);
        }
        if self.found.reserved > 0 {
            report = report.with_note("garbage collection of the NVM region was cut off; nothing of it is lost");
        }
        report
    }

    fn superblock_block(&self) -> u64 {
        SUPERBLOCK_OFFSET / u64::from(self.place.block_bytes)
    }

    /// Writes every latest version home but that of the superblock, and flushes.
    fn write_home(&self, region: &[u8], home: &LoggedFile) -> Result<(), Error> {
        let failed = |what: &'static str| move |source| Error::Failed { what: what.to_owned(), source };
        let superblock = self.superblock_block();
        let versions: Vec<(&u64, &Header)> =
            self.found.latest.iter().filter(|(block, _)| **block != superblock).collect();
        let block_bytes = u64::from(self.place.block_bytes);
        let mut run: Vec<u8> = Vec::new();
        let mut first = 0;
        let mut part = self.part(home);
        let mut write = |first: u64, run: &[u8]| {
            part.write_at(first * block_bytes, run).map_err(failed("writing committed blocks home"))
        };
        for (block, header) in versions {
            let next = first + run.len() as u64 / block_bytes;
            if !run.is_empty() && (next != *block || run.len() >= RUN_BYTES) {
                write(first, &run)?;
                run.clear();
            }
            if run.is_empty() {
                first = *block;
            }
            run.extend_from_slice(self.found.content(region, header));
        }
        if !run.is_empty() {
            write(first, &run)?;
        }
        part.flush().map_err(failed("flushing the recovered blocks"))
    }

    fn part<'a>(&self, home: &'a LoggedFile) -> ImagePart<'a> {
        let place = &self.place;
        ImagePart::new(home, place.home_start, place.home_blocks * u64::from(place.block_bytes))
    }

    /// Where the journal's superblock is, in bytes of the disk.
    fn superblock_offset(&self) -> Result<u64, Error> {
        offset_of(&self.place.runs, self.place.block_bytes, 0)
            .ok_or_else(|| Error::Refused("the journal's superblock has no place on its disk".to_owned()))
    }

    /// Has storage say that the log is in its own place.
    fn leave(&self, home: &LoggedFile) -> Result<(), Error> {
        let failed_flushes = home.failed_flushes();
        home.write_all_at(&self.owner.attachment, self.superblock_offset()?)
            .and_then(|()| home.sync_since(failed_flushes))
            .map_err(|source| Error::Failed { what: "writing the journal's superblock".to_owned(), source })
    }

    /// Marks the file system as recovered and its journal as empty, as every recovery does.
    fn finish(&self, region: &[u8], home: &LoggedFile) -> Result<Report, Error> {
        let mut log = self.last_log(region)?;
        let place = &self.place;
        let offset = self.superblock_offset()?;
        let log_bounds = LogBounds { superblock_position: 0, blocks: place.log_blocks };
        let journal = JournalPlace::Home { offset: offset - place.home_start };
        recovery::replay(&mut log, log_bounds, &bounds(place), &mut self.part(home), journal)
    }

    /// A log that ends where the guest's did, with nothing in it but the file system's superblock.
    fn last_log(&self, region: &[u8]) -> Result<LastLog, Error> {
        let has_committed = self.found.checkpoint.transaction != 0;
        let sequence = if has_committed { self.found.sequence } else { self.found.sequence.wrapping_add(1) };
        let mut superblock = self.superblock.clone();
        SuperblockEdit::new(&mut superblock)
            .map_err(|error| Error::Refused(error.to_string()))?
            .start(self.format.first)
            .sequence(sequence)
            .seal();
        let mut blocks = Vec::new();
        if has_committed {
            let held = self.found.latest.get(&self.superblock_block());
            let of_superblock =
                held.map(|header| (self.superblock_block(), self.found.content(region, header).to_vec()));
            let transaction = Transaction { blocks: of_superblock.into_iter().collect(), ..Transaction::default() };
            LogBuilder::new(self.format, self.format.first, sequence)
                .transaction(&transaction, &mut |_, block| blocks.push(block.to_vec()));
        }
        Ok(LastLog { superblock, first: self.format.first, blocks })
    }
}

/// See [`Judged::last_log`].
struct LastLog {
    superblock: Vec<u8>,
    first: u32,
    blocks: Vec<Vec<u8>>,
}

impl LogRead for LastLog {
    type Error = Infallible;

    fn read(&mut self, position: u32, buffer: &mut [u8]) -> Result<Content, Infallible> {
        let block = match position.checked_sub(self.first) {
            None => (position == 0).then_some(&self.superblock),
            Some(index) => self.blocks.get(index as usize),
        };
        match block {
            Some(block) => buffer.copy_from_slice(block),
            None => buffer.fill(0),
        }
        Ok(Content::Present)
    }
}

fn bounds(place: &FoundLogPlace) -> HomeBounds {
    let excluded = place.own_blocks.iter().map(|range| (range.start, range.end)).collect();
    HomeBounds::from_parts(place.home_blocks, place.block_bytes, excluded)
}

struct WholeDisk<'a> {
    file: &'a LoggedFile,
    size: u64,
}

impl ReadAt for WholeDisk<'_> {
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> std::io::Result<()> {
        self.file.read_exact_at(buffer, offset)
    }

    fn size(&self) -> u64 {
        self.size
    }
}

/// The file system that a region belongs to, as it is on this disk: at its place, with an internal journal.
fn place_of(home: &LoggedFile, owner: &Owner) -> Result<Option<FoundLogPlace>, Error> {
    let failed = |source| Error::Failed { what: "looking for the file system on the disk".to_owned(), source };
    let size =
        rustix::fs::seek(home.for_reading(), rustix::fs::SeekFrom::End(0)).map_err(|error| failed(error.into()))?;
    let disk = WholeDisk { file: home, size };
    let is_its = |file_system: &FileSystem| {
        file_system.offset == owner.home_start && matches!(file_system.journal, JournalOf::Internal { .. })
    };
    // Only where a kernel would find it now: something else may have been made of that disk since.
    let file_system = extfs::discover(&disk).map_err(failed)?.into_iter().find(is_its);
    Ok(file_system.and_then(|file_system| {
        let mut place = internal_place(0, &file_system)?;
        // A file system that was growing has blocks in its journal that are beyond the end that it still tells.
        let on_disk = (size - owner.home_start) / u64::from(place.block_bytes);
        place.home_blocks = place.home_blocks.max(owner.home_blocks).min(on_disk);
        Some(place)
    }))
}

fn read_superblock(home: &LoggedFile, place: &FoundLogPlace) -> Result<Vec<u8>, Error> {
    let offset = offset_of(&place.runs, place.block_bytes, 0)
        .ok_or_else(|| Error::Refused("the journal's superblock has no place on its disk".to_owned()))?;
    let mut block = vec![0; place.block_bytes as usize];
    home.read_exact_at(&mut block, offset)
        .map_err(|source| Error::Failed { what: "reading the journal superblock".to_owned(), source })?;
    Ok(block)
}

fn is_journal(home: &LoggedFile, place: &FoundLogPlace, uuid: &[u8; 16]) -> Result<bool, Error> {
    let block = read_superblock(home, place)?;
    Ok(Superblock::decode(&block).is_ok_and(|superblock| superblock.uuid == *uuid))
}

/// What a region knows of the log that it has, and whether that is at home where the answer tells a recovery that was cut off.
///
/// # Errors
/// When what is at home cannot be read.
pub(super) fn books(
    found: &Found,
    owner: &Owner,
    region: &[u8],
    on_storage: &Superblock,
    home: &LoggedFile,
) -> io::Result<RegionBooks> {
    let is_empty = on_storage.is_empty() && on_storage.errno == 0;
    let is_home = is_empty && is_all_home(found, owner, region, home)?;
    Ok(RegionBooks { is_home, ..RegionBooks::new(found, owner) })
}

/// Whether what a region holds is at home, but for the file system's superblock, which a recovery goes on to change. What the last transaction
/// counts on is decided by then.
fn is_all_home(found: &Found, owner: &Owner, region: &[u8], home: &LoggedFile) -> io::Result<bool> {
    let block_bytes = u64::from(found.geometry.block_bytes);
    let place = |block: u64| {
        let offset = block.checked_mul(block_bytes).and_then(|bytes| bytes.checked_add(owner.home_start));
        offset.filter(|offset| i64::try_from(*offset).is_ok())
    };
    let mut at_home = vec![0; found.geometry.block_bytes as usize];
    for (block, header) in found.latest.iter().filter(|(block, _)| **block != SUPERBLOCK_OFFSET / block_bytes) {
        let Some(offset) = place(*block) else { return Ok(false) };
        match home.read_exact_at(&mut at_home, offset) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(false),
            read => read?,
        }
        if at_home != found.content(region, header) {
            return Ok(false);
        }
    }
    Ok(found.prepared.is_none())
}

/// Whether the journal superblock on storage is the one of the region's epoch.
fn stored(books: &RegionBooks, raw: &[u8], on_storage: &Superblock, owner: &Owner) -> Result<Stored, String> {
    let verdict = books.judge(raw, on_storage);
    match verdict {
        Ok(RegionVerdict::Marked) => return Ok(Stored::Marked),
        Ok(RegionVerdict::Left) => return Ok(Stored::Left),
        Ok(RegionVerdict::OwesNothing) => {
            return Ok(Stored::NothingOwed("the region holds no block that is not at home; it is given back"));
        }
        Ok(RegionVerdict::Emptied) => {
            return Ok(Stored::NothingOwed("an earlier recovery from the region was cut off after its last write"));
        }
        Err(RegionWhy::OlderImage) => {
            return Err("this image is an older copy, a snapshot or a backup, of the disk that the region belongs to: what left \
                        the region since is not on it, so what the region holds must not be brought home to it: give the true \
                        image, or have e2fsck -f look at all of this one before anybody uses it"
                .to_owned());
        }
        Err(RegionWhy::OlderRegion) => {
            return Err(
                "the region is an older copy of the one that this disk was used with last: what it holds must not be \
                        brought home over what came after; give the true region"
                    .to_owned(),
            );
        }
        Err(RegionWhy::OtherRegion) if books.yields(verdict) => return Ok(Stored::Claimed),
        Err(RegionWhy::OtherRegion) => return Err(IN_ANOTHER.to_owned()),
        Err(RegionWhy::OtherJournal) => {
            return Err("the region belongs to another journal (the UUIDs differ)".to_owned());
        }
        Err(RegionWhy::OtherEpoch) => {}
    }
    Err(format!(
        "the region is of another epoch: it was taken when the journal stood at transaction {}, and the journal on the disk \
         has been used since (it is at {}, {}, and does not carry the region's mark)",
        Superblock::decode(&owner.attachment).map_or(0, |superblock| superblock.sequence),
        on_storage.sequence,
        if on_storage.is_empty() { "empty" } else { "not empty" }
    ))
}
