//! Finishing a held log beside which storage was made durable by age (crate `durability`): the guest is gone, and the host alive.
//!
//! Storage has a live log of compounds, good by itself; what was committed later is held. Replaying the held log onto homes at
//! once would break storage for as long as that takes: cut off in its midst by a power cut, the older copies in the compounds would be
//! replayed over some of the newer homes. So what is held becomes durable first:
//!
//! 1. What a power cut would have replayed is replayed, and flushed.
//! 2. Storage says that its log is empty, with the number after its last compound, still beside the same opening of the held log.
//! 3. All that is held and not at home becomes one compound, in front of which everything is flushed, and behind.
//! 4. From there on it is a recovery like any other: homes, flush, an empty journal. When all is home, and before that is said to be so, the
//!    compound is cleared away.
//!
//! A kill or a power cut anywhere leaves a file system that is consistent with the log that lies in it, and with a kill the held log
//! is as it was: the same again brings the same.
//!
//! That has one exception. Where a compound does not fit, where storage has failed since the log was opened, or where the log cannot be
//! replayed by us, storage gets the error mark first, as a held log without durability has it (rule 4 of ARCHITECTURE.md): with the host
//! alive nothing is lost, and a power cut in the midst of that recovery needs a full check of the file system.
//!
//! Compounds may have had numbers that the guest's next transactions will have (each recovery that is killed late uses one up, too). Once
//! what they hold was replayed and flushed, storage says that its log is empty behind them all, and needs none; they are cleared away
//! with this one.
//!
//! What it must never do: write a home block of a version before a compound holds it, or storage has the error mark; put a compound
//! where log blocks of the guest lie.

use crate::finish::{LogReader, StoredLog, finish, finish_clearing, plan, write_home_of};
use crate::mark;
use crate::numbers;
use crate::scan::FoundLogPlace;
use crate::stored::{Says, Stored};
use durability::{AnswerId, Committed, Durability, Freed, Place, Step, Transaction, Version, View};
use jbd2::{Content, CopyInLog, Format, LogRead, SUPERBLOCK_BYTES, Superblock, sequence};
use journal_area::{HeldLog, Location, Opening};
use recovery::{Error, Report};
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use write_log::LoggedFile;

fn failed(what: &str) -> impl FnOnce(io::Error) -> Error {
    let what = what.to_owned();
    move |source| Error::Failed { what, source }
}

/// Now, for a commit block.
pub(crate) fn wall_clock() -> (u64, u32) {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    (now.as_secs(), now.subsec_nanos())
}

/// Brings the home of a held log to its last committed state; see the module.
pub(crate) fn finish_aged(
    held: &HeldLog<'_>,
    place: &FoundLogPlace,
    home: &LoggedFile,
    journal: &LoggedFile,
) -> Result<Report, Error> {
    let Some(superblock_at) = place.offset_of(0) else { return finish(held, place, home, journal) };
    let mut raw = vec![0; SUPERBLOCK_BYTES];
    journal.read_exact_at(&mut raw, superblock_at).map_err(failed("reading the journal superblock"))?;
    let Says::Aged(opening, tail) = Stored::read(&raw).says else {
        return finish(held, place, home, journal);
    };
    // Where log blocks lie in their own places for want of memory, a compound would land on them.
    let is_stored = (1..held.log_blocks()).any(|at| held.location(at) == Location::Storage);
    // Where storage has failed since, nobody knows what of the compounds is there; what is held does not need them.
    if held.is_materialise() || held.is_distrusted() || held.is_doubted() || is_stored {
        give_compounds_up(held, place, home, journal)?;
        return finish(held, place, home, journal);
    }
    let stored = write_home_of(&mut StoredLog { place, journal }, place, home)?;
    let number = stored.last_sequence.map_or(tail.sequence, |last| last.wrapping_add(1));
    let number = held.numbered().map_or(number, |numbered| sequence::latest(number, numbered));
    let (owed, next) = owed(held, place, journal)?;
    if owed.versions.is_empty() {
        // The numbers that the guest's next kernel gives begin behind those of the held log, and no compound may stay that has one of them.
        if !numbers::may_meet(next, Some(number)) {
            return finish(held, place, home, journal);
        }
        empty(&raw, &opening, number, (place, journal))?;
    } else if !append(&raw, &opening, number, owed, (place, home, journal))? {
        // One of that number may have been begun.
        mark_held(&raw, (&opening, number.wrapping_add(1)), superblock_at, journal)?;
        wipe(held, place, journal, (next, number))?;
        return finish(held, place, home, journal);
    }
    // A guest that was suspended goes on with the number in front of that one, and no compound may stay that it would meet: not where we are
    // killed behind the write that empties the journal either, since nobody looks for more then.
    finish_clearing(held, place, home, journal, Some((next, number)))
}

/// What is held counts from here on, and not the compounds on storage, if it has any: that gets the error mark.
pub(crate) fn give_compounds_up(
    held: &HeldLog<'_>,
    place: &FoundLogPlace,
    home: &LoggedFile,
    journal: &LoggedFile,
) -> Result<(), Error> {
    let Some(superblock_at) = place.offset_of(0) else { return Ok(()) };
    let mut raw = vec![0; SUPERBLOCK_BYTES];
    journal.read_exact_at(&mut raw, superblock_at).map_err(failed("reading the journal superblock"))?;
    let Says::Aged(opening, tail) = Stored::read(&raw).says else { return Ok(()) };
    // A recovery that was killed here may have made one more compound, with the number that storage says.
    let after = tail.sequence.wrapping_add(1);
    let number = held.numbered().map_or(after, |numbered| sequence::latest(after, numbered));
    // What the guest has written home itself, and counts on, comes to storage before the mark: behind that no compound brings it.
    home.sync_data().map_err(failed("flushing the file system"))?;
    mark_held(&raw, (&opening, number), superblock_at, journal)
}

/// No compound stays that has this number or a later one, up to the last.
fn wipe(
    held: &HeldLog<'_>,
    place: &FoundLogPlace,
    journal: &LoggedFile,
    (next, last): (u32, u32),
) -> Result<(), Error> {
    let which = (next, Some(last.wrapping_add(1)));
    numbers::wipe(held, place, journal, which).map_err(failed("clearing the journal's place"))
}

/// The error mark: from here on storage is not good by itself. No compound has this number, or a later one.
fn mark_held(raw: &[u8], (opening, number): (&Opening, u32), at: u64, journal: &LoggedFile) -> Result<(), Error> {
    let marked = mark::marked_behind(raw, mark::MarkKind::Held, opening, Some(number));
    let marked = marked.map_err(failed("marking the journal"))?;
    let failed_flushes = journal.failed_flushes();
    journal.write_all_at(&marked, at).map_err(failed("marking the journal"))?;
    journal.sync_since(failed_flushes).map_err(failed("marking the journal"))
}

/// The newest committed versions that are not at home: where they are in a log that nobody changes any more. They may be as much as the log
/// has, so none is kept in memory.
struct Owed<'l, 'a> {
    log: LogReader<'l, 'a>,
    /// The layout of the log for its guest.
    format: Format,
    versions: Vec<(u64, CopyInLog)>,
}

/// These, and the number after the last transaction.
fn owed<'l, 'a>(
    held: &'l HeldLog<'a>,
    place: &'l FoundLogPlace,
    journal: &'l LoggedFile,
) -> Result<(Owed<'l, 'a>, u32), Error> {
    let (plan, format) = plan(held, place, journal)?;
    let mut log = LogReader { held, place, journal };
    let mut versions = Vec::new();
    let mut content = vec![0; place.block_bytes as usize];
    for block in plan.blocks() {
        for copy in block.copies() {
            let found = log.read(copy.position, &mut content).map_err(failed("reading the held journal"))?;
            if found == Content::AtHome {
                break;
            }
            if copy.restore(&format, &mut content) {
                versions.push((block.home(), copy));
                break;
            }
        }
    }
    Ok((Owed { log, format, versions }, plan.summary().walk.next_sequence()))
}

/// Says on storage that its log, which was just replayed, is empty, and goes on with this number. Gives that superblock.
fn empty(
    raw: &[u8],
    opening: &Opening,
    number: u32,
    (place, journal): (&FoundLogPlace, &LoggedFile),
) -> Result<Vec<u8>, Error> {
    let (_, format) = Superblock::parse(raw).map_err(|error| Error::Refused(error.to_string()))?;
    let emptied = mark::aged(raw, opening, (format.first, number)).map_err(failed("emptying the journal"))?;
    let failed_flushes = journal.failed_flushes();
    journal
        .write_all_at(&emptied, place.offset_of(0).unwrap_or(u64::MAX))
        .and_then(|()| journal.sync_since(failed_flushes))
        .map_err(failed("emptying the journal"))?;
    Ok(emptied)
}

/// Makes one compound of what is owed, on a log that was just replayed. False when it does not fit.
fn append(
    raw: &[u8],
    opening: &Opening,
    number: u32,
    owed: Owed<'_, '_>,
    (place, home, journal): (&FoundLogPlace, &LoggedFile, &LoggedFile),
) -> Result<bool, Error> {
    let failed_flushes = [home, journal].map(LoggedFile::failed_flushes);
    let emptied = empty(raw, opening, number, (place, journal))?;
    let machine = Durability::opened(&emptied, Duration::ZERO).map_err(Error::Refused)?;
    let blocks = owed.versions.iter().zip(0..).map(|((block, _), index)| (*block, Version(index))).collect();
    let transaction = Transaction { sequence: number, blocks, revokes: Vec::new(), freed: Freed::Unknown };
    let machine = machine.on_storage().with_steady_contents();
    let mut run = Run { machine, owed, opening, raw: &emptied, place, home, journal, failed_flushes };
    run.commit(&transaction).map_err(failed("making what is held durable"))
}

/// The machine, with its steps carried out one after the other.
struct Run<'l, 'a> {
    machine: Durability,
    owed: Owed<'l, 'a>,
    opening: &'l Opening,
    raw: &'l [u8],
    place: &'l FoundLogPlace,
    home: &'l LoggedFile,
    journal: &'l LoggedFile,
    /// How many flushes of the two had failed before it began.
    failed_flushes: [u64; 2],
}

impl View for Owed<'_, '_> {
    fn made_durable(&mut self, _through: u32, _blocks: &[(u64, Version)]) {}

    fn at_home(&mut self, _blocks: &[u64]) {}

    fn is_free(&mut self, _block: u64) -> bool {
        false
    }

    fn content(&mut self, version: Version, into: &mut [u8]) -> io::Result<()> {
        let found = usize::try_from(version.0).ok().and_then(|index| self.versions.get(index));
        let (_, copy) = found.ok_or(io::ErrorKind::NotFound)?;
        // Nobody changes it any more, so what was found there is there still.
        if self.log.read(copy.position, into)? != Content::Present {
            return Err(io::Error::other(format!(
                "log block {} of the held journal is not held any more",
                copy.position
            )));
        }
        if copy.restore(&self.format, into) {
            return Ok(());
        }
        Err(io::Error::other(format!("log block {} of the held journal is damaged", copy.position)))
    }

    fn logged(&mut self, _position: u32, _into: &mut [u8]) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn wall_clock(&self) -> (u64, u32) {
        wall_clock()
    }

    /// Nobody writes here.
    fn committed_after(&mut self, _blocks: Range<u64>, _after: u32) -> Vec<Committed> {
        Vec::new()
    }
}

impl Run<'_, '_> {
    fn commit(&mut self, transaction: &Transaction) -> io::Result<bool> {
        let mut steps = Vec::new();
        self.machine.committed(Duration::ZERO, transaction, AnswerId(0), &mut self.owed, &mut steps);
        while !steps.is_empty() {
            let mut next = Vec::new();
            for step in std::mem::take(&mut steps) {
                let operation = match step {
                    Step::Write { operation, place, bytes } => {
                        self.write(place, &bytes)?;
                        operation
                    }
                    Step::Flush { operation } => {
                        self.home.sync_since(self.failed_flushes[0])?;
                        self.journal.sync_since(self.failed_flushes[1])?;
                        operation
                    }
                    Step::Answer { is_good, .. } => return Ok(is_good),
                    Step::Failed(why) => {
                        log::warn!("{why}: the journal is marked instead, and recovered as one that is only held");
                        return Ok(false);
                    }
                    Step::Go(_) => continue,
                };
                self.machine.operation_done(Duration::ZERO, operation, true, &mut self.owed, &mut next);
            }
            steps = next;
        }
        Err(io::Error::other("the compound was never made"))
    }

    fn write(&self, place: Place, bytes: &Arc<[u8]>) -> io::Result<()> {
        let block_bytes = u64::from(self.place.block_bytes);
        match place {
            Place::Home(block) => self.home.write_all_at(bytes, self.place.home_start + block * block_bytes),
            Place::Log(position) => {
                for (offset, part) in parts(self.place, position, bytes)? {
                    self.journal.write_all_at(part, offset)?;
                }
                Ok(())
            }
            Place::Superblock => {
                let said = Superblock::decode(bytes).map_err(io::Error::other)?;
                let marked = mark::aged(self.raw, self.opening, (said.start, said.sequence))?;
                let at = self.place.offset_of(0).ok_or(io::ErrorKind::NotFound)?;
                self.journal.write_all_at(&marked, at)
            }
        }
    }
}

/// Where the blocks of a run in the log are on the disk, and their bytes: a log lies in pieces.
pub(crate) fn parts<'b>(place: &FoundLogPlace, position: u32, bytes: &'b [u8]) -> io::Result<Vec<(u64, &'b [u8])>> {
    let block_bytes = place.block_bytes as usize;
    let mut parts: Vec<(u64, std::ops::Range<usize>)> = Vec::new();
    for (index, position) in (0..bytes.len() / block_bytes).zip(position..) {
        let offset = place
            .offset_of(position)
            .ok_or_else(|| io::Error::other(format!("log block {position} has no place on its disk")))?;
        let range = index * block_bytes..(index + 1) * block_bytes;
        match parts.last_mut() {
            Some((first, run)) if *first + run.len() as u64 == offset => run.end = range.end,
            _ => parts.push((offset, range)),
        }
    }
    Ok(parts.into_iter().map(|(offset, range)| (offset, &bytes[range])).collect())
}
