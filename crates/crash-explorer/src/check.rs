//! What must hold at a crash point, whatever of the writes in flight had reached the disk.
//!
//! The choice is not sampled here but covered: a block that both recoveries write is equal when they write the same; a
//! block that only one of them writes must be on the disk already, in every version that the disk can have: as it is
//! now, and as each write in flight would make it.

use crate::compare::compare_blocks;
use crate::complete::{HeldReader, JudgedLog, Recovered};
use crate::error::{Error, Result};
use crate::finding::{Step, Stop, finding};
use crate::hand_over;
use crate::simulation::Simulation;
use guest_memory::HostFile;
use jbd2::{Content, LogRead};
use journal_area::{FoundLog, HeldLog, JournalArea, Outside};
use std::fs::File;
use std::os::unix::fs::FileExt;

/// Checks the promises at this very moment.
///
/// # Errors
/// The first one that is broken.
pub fn check(simulation: &Simulation<'_>) -> Step {
    if let Err(fault) = simulation.journals.area.check() {
        return finding(format!("the area's books are wrong: {fault}"));
    }
    for log in &simulation.logs {
        if simulation.is_stored(log) {
            hand_over::check(simulation, log)?;
        } else {
            check_log(simulation, log)?;
        }
    }
    Ok(())
}

fn check_log(simulation: &Simulation<'_>, judged: &JudgedLog) -> Step {
    let area = &simulation.journals.area;
    let owed = area.owed(judged.log.id);
    if owed.is_open != judged.is_open() {
        return finding(format!(
            "the guest's journal is {}, the area has it {}",
            if judged.is_open() { "open" } else { "closed" },
            if owed.is_open { "open" } else { "closed" },
        ));
    }
    if !owed.is_open {
        return Ok(());
    }
    check_mark(simulation, judged)?;
    let journal = &simulation.images[judged.description.place.journal_disk];
    let recover =
        |held: &HeldLog<'_>| judged.replay(&mut HeldReader { held, judged, journal }, &simulation.images, &[]);
    let live = area.look(judged.log.id, |held| recover(held)).expect("nobody has forgotten it");
    let live = refuse("the live log", live)?;
    if live.report.blocks_written != owed.blocks {
        return finding(format!(
            "recovery writes {} blocks where {} are owed",
            live.report.blocks_written, owed.blocks
        ));
    }
    let found = refuse("the files of a dead process", open_found(simulation, judged))?;
    let found = refuse("the files of a dead process", recover(&found.log()))?;
    if live.home.changes() != found.home.changes() {
        return finding("the files of a dead process recover to something else than the live log");
    }
    let complete = refuse("the complete journal", judged.replay(&mut judged.complete(), &simulation.images, &[]))?;
    compare(simulation, judged, &live, &complete)?;
    check_shown(simulation, judged, &complete)
}

/// A kernel that mounts at this moment, without a reset, replays the log that it is shown over what it has in its cache: so
/// that log brings back every block that the complete journal does, whatever is at home already.
fn check_shown(simulation: &Simulation<'_>, judged: &JudgedLog, complete: &Recovered<'_>) -> Step {
    let mut log = ShownLog { area: &simulation.journals.area, images: &simulation.images, judged };
    let shown = refuse("the log that is shown", judged.replay(&mut log, &simulation.images, &[]))?;
    let counts = |recovered: &Recovered<'_>| (recovered.report.status, recovered.report.transactions);
    if counts(&shown) != counts(complete) {
        return finding(format!(
            "the log that is shown is {:?}, the complete journal {:?}",
            counts(&shown),
            counts(complete)
        ));
    }
    for (block, content) in complete.home.blocks() {
        if judged.bounds.contains(*block)
            && !judged.discarded.contains(block)
            && shown.home.blocks().get(block) != Some(content)
        {
            return finding(format!("a replay of the log that is shown does not bring back block {block}"));
        }
    }
    Ok(())
}

/// The log as a guest reads it.
struct ShownLog<'l> {
    area: &'l JournalArea,
    images: &'l [File],
    judged: &'l JudgedLog,
}

impl LogRead for ShownLog<'_> {
    type Error = std::io::Error;

    fn read(&mut self, position: u32, buffer: &mut [u8]) -> std::io::Result<Content> {
        let mut outside = OnImages { images: self.images, judged: self.judged };
        match self.area.show(self.judged.log.id, position, buffer, &mut outside)? {
            true => Ok(Content::Present),
            false => Err(std::io::Error::other("the log is not open")),
        }
    }
}

struct OnImages<'l> {
    images: &'l [File],
    judged: &'l JudgedLog,
}

impl Outside for OnImages<'_> {
    fn home(&mut self, block: u64, buffer: &mut [u8]) -> std::io::Result<()> {
        self.images[self.judged.description.place.home_disk].read_exact_at(buffer, self.judged.log.home_offset(block))
    }

    fn stored(&mut self, position: u32, buffer: &mut [u8]) -> std::io::Result<()> {
        let offset = self.judged.offset_of(position).ok_or_else(|| std::io::Error::other("no place"))?;
        self.images[self.judged.description.place.journal_disk].read_exact_at(buffer, offset)
    }
}

fn refuse<T>(what: &str, result: Result<T>) -> std::result::Result<T, Stop> {
    result.or_else(|error| finding(format!("{what} cannot be recovered: {error}")))
}

/// The log as a process would find it after amberlog was killed now.
///
/// # Errors
/// When the files contradict themselves.
pub fn open_found(simulation: &Simulation<'_>, judged: &JudgedLog) -> Result<FoundLog> {
    let path = simulation.journals.directory().path();
    let name = &judged.description.name;
    let ram = HostFile::open(&path.join("ram")).map_err(|e| Error::Other(e.to_string()))?;
    FoundLog::open(&path.join(format!("{name}.table")), &path.join(format!("{name}.pool")), vec![(0, ram)])
        .map_err(|e| Error::Other(e.to_string()))
}

/// While a log is held, the superblock on storage says that it is empty and that an error happened (rule 4 of
/// ARCHITECTURE.md).
fn check_mark(simulation: &Simulation<'_>, judged: &JudgedLog) -> Step {
    let mut raw = vec![0; jbd2::SUPERBLOCK_BYTES];
    let offset = judged.offset_of(0).unwrap_or(0);
    let image = &simulation.images[judged.description.place.journal_disk];
    if image.read_exact_at(&mut raw, offset).is_err() {
        return finding("the journal superblock on storage cannot be read");
    }
    match jbd2::Superblock::decode(&raw) {
        Ok(superblock) if superblock.is_empty() && superblock.errno != 0 => Ok(()),
        // Beside it storage is made durable by age.
        Ok(_) if matches!(placement::HeldMark::read(&raw), placement::HeldMark::Ours(placement::MarkKind::Aged, _)) => {
            Ok(())
        }
        Ok(_) => finding("a journal is held, and the superblock on storage does not carry the error mark"),
        Err(error) => finding(format!("the journal superblock on storage is damaged: {error}")),
    }
}

/// Compares what two recoveries leave, for every choice of what had landed.
fn compare(simulation: &Simulation<'_>, judged: &JudgedLog, held: &Recovered<'_>, complete: &Recovered<'_>) -> Step {
    compare_blocks(simulation, judged, held, complete)?;
    check_superblock(simulation, judged, held, complete)?;
    let (ours, theirs) = (judged.superblock_left(held)?, judged.superblock_left(complete)?);
    if (ours.sequence, ours.start, ours.errno) != (theirs.sequence, theirs.start, theirs.errno) {
        return finding(format!(
            "the journal is left at transaction {} (start {}, error {}) instead of {} ({}, {})",
            ours.sequence, ours.start, ours.errno, theirs.sequence, theirs.start, theirs.errno
        ));
    }
    Ok(())
}

/// The file system's superblock is read and edited at the end of a replay, so each version that the disk can have is tried.
fn check_superblock(
    simulation: &Simulation<'_>,
    judged: &JudgedLog,
    held: &Recovered<'_>,
    complete: &Recovered<'_>,
) -> Step {
    let block = judged.superblock_block();
    let place = &judged.description.place;
    if held.home.block(block).ok() != complete.home.block(block).ok() {
        return finding("the file system's superblock becomes another one");
    }
    let (start, end) = (judged.log.home_offset(block), judged.log.home_offset(block + 1));
    for pending in simulation.in_flight_writes() {
        let (from, to) = (pending.operation.offset, pending.operation.offset + pending.operation.len);
        if pending.disk != place.home_disk || from >= end || to <= start {
            continue;
        }
        let Some(bytes) = pending.bytes() else { continue };
        let landed = [(pending.disk, from, bytes)];
        let journal = &simulation.images[place.journal_disk];
        let ours = simulation.journals.area.look(judged.log.id, |held| {
            judged.replay(&mut HeldReader { held, judged, journal }, &simulation.images, &landed)
        });
        let ours = refuse("the live log", ours.expect("nobody has forgotten it"))?;
        let theirs =
            refuse("the complete journal", judged.replay(&mut judged.complete(), &simulation.images, &landed))?;
        if ours.home.block(block).ok() != theirs.home.block(block).ok() {
            return finding("the file system's superblock becomes another one when a write in flight has landed");
        }
    }
    Ok(())
}
