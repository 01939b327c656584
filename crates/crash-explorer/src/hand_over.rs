//! A held log is handed over to storage at some moment of the recording, and the process is killed between any two of its
//! stores while that happens.
//!
//! From then on the log on storage is the one that counts: whenever none of the guest's writes into it is on its way, a replay of
//! it has to leave what a replay of the complete log leaves, but for the file system's superblock, which guests also
//! write past their journals.
//!
//! Or its guest is reset before it got there, with which a run ends: whoever goes on asking is told that it is there when it is, and what
//! was acknowledged is home.

use crate::compare::compare_blocks;
use crate::complete::JudgedLog;
use crate::error::{During, Error};
use crate::finding::{Step, Stop, finding};
use crate::scenario::Scenario;
use crate::scratch::scratch;
use crate::simulation::Simulation;
use block_route::{LogIndex, Route, Start};
use guest_kit::image::copy_image;
use guest_kit::{Reported, judge};
use guest_memory::simulated_kill;
use jbd2::{Content, LogRead};
use placement::{AreaDirectory, Change, Finish, LogDescription, PlacementKind, finish_directory};
use std::cell::RefCell;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;

/// Stores of a hand-over before which the process is killed: the first ones, which are the note and the closing of the books.
const KILLS_MAX: usize = 4;

/// Reads a log from its own place.
struct StoredReader<'l> {
    judged: &'l JudgedLog,
    journal: &'l File,
}

impl LogRead for StoredReader<'_> {
    type Error = std::io::Error;

    fn read(&mut self, position: u32, buffer: &mut [u8]) -> std::io::Result<Content> {
        let offset = self.judged.offset_of(position).ok_or_else(|| std::io::Error::other("no place"))?;
        self.journal.read_exact_at(buffer, offset)?;
        Ok(Content::Present)
    }
}

/// Checks a log that was handed over, at a moment when all that the guest wrote into it has arrived.
///
/// # Errors
/// When its replay leaves something else than the complete log's.
pub fn check(simulation: &Simulation<'_>, judged: &JudgedLog) -> Step {
    let place = &judged.description.place;
    let block_bytes = judged.block_bytes();
    let is_into_log = |offset: u64, len: u64| {
        let overlaps = |start: u64, count: u32| offset < start + u64::from(count) * block_bytes && start < offset + len;
        place.runs.iter().any(|run| overlaps(run.offset, run.count))
    };
    let on_its_way = simulation.in_flight_writes().any(|pending| {
        pending.disk == place.journal_disk && is_into_log(pending.operation.offset, pending.operation.len)
    });
    if !judged.is_open() || on_its_way || simulation.is_in_pass(place.journal_disk) {
        return Ok(());
    }
    let journal = &simulation.images[place.journal_disk];
    let stored = match judged.replay(&mut StoredReader { judged, journal }, &simulation.images, &[]) {
        Ok(stored) => stored,
        Err(error) => return finding(format!("the log that was handed over cannot be replayed: {error}")),
    };
    let complete = judged.replay(&mut judged.complete(), &simulation.images, &[])?;
    compare_blocks(simulation, judged, &stored, &complete)?;
    let (ours, theirs) = (judged.superblock_left(&stored)?, judged.superblock_left(&complete)?);
    if (ours.sequence, ours.start, ours.errno) != (theirs.sequence, theirs.start, theirs.errno) {
        return finding(format!(
            "the journal that was handed over is left at transaction {} (start {}, error {}) instead of {} ({}, {})",
            ours.sequence, ours.start, ours.errno, theirs.sequence, theirs.start, theirs.errno
        ));
    }
    Ok(())
}

/// Hands over every log that is held and can be by now. Says whether any was.
///
/// # Errors
/// When it fails, or a process that was killed in the midst of it leaves something that cannot be recovered from.
pub fn attempt(simulation: &mut Simulation<'_>) -> Result<bool, Stop> {
    let mut any = false;
    for index in 0..simulation.logs.len() {
        let number = simulation.logs[index].log.index();
        let Some(log) = simulation.journals.log(number).filter(|log| log.is_held_open()) else { continue };
        if simulation.is_in_pass(log.journal_disk()) {
            continue;
        }
        let change = simulation.journals.change_placement(number, PlacementKind::Storage);
        if change.during("asking for a hand-over")? != Change::HandOver {
            return finding("a held, open log is said to be elsewhere already");
        }
        let kills = Kills::begin(simulation)?;
        let handed = simulation.hand_over_on(log.journal_disk(), number);
        let kills = kills.end();
        match handed {
            Err(error) => return finding(format!("handing a log over fails: {error}")),
            Ok(false) => continue,
            Ok(true) => any = true,
        }
        check_is_there(simulation, number)?;
        for kill in &kills.directories {
            judge_kill(simulation, kill)?;
        }
    }
    Ok(any)
}

/// Whoever wished it there was told that it is.
///
/// # Errors
/// When it is anywhere else.
pub fn check_is_there(simulation: &Simulation<'_>, number: LogIndex) -> Step {
    match simulation.journals.log(number).map(|log| log.placement) {
        Some(PlacementKind::Storage) | None => Ok(()),
        Some(other) => finding(format!("a log that was handed over is said to be on storage, and is in {other:?}")),
    }
}

/// The logs that are there.
fn numbers(simulation: &Simulation<'_>) -> Vec<LogIndex> {
    let logs = simulation.logs.iter().map(|judged| judged.log.index());
    logs.filter(|number| simulation.journals.log(*number).is_some()).collect()
}

/// Every log is wished on storage, and before it got there the guest is reset. Whoever wished that asks on, and knows nothing of it.
///
/// # Errors
/// When he is told that a log is there which is not, or what was acknowledged is lost.
pub fn reset(simulation: &mut Simulation<'_>) -> Step {
    for number in numbers(simulation) {
        let change = simulation.journals.change_placement(number, PlacementKind::Storage);
        change.during("asking for a hand-over")?;
    }
    simulation.drain()?;
    let table = Arc::clone(&simulation.table);
    for route in &mut simulation.routes {
        if let Err(error) = route.started(Start::Fresh, &table) {
            return finding(format!("a device does not begin anew while a log is handed over: {error}"));
        }
    }
    // Another worker may have gone on meanwhile, which has numbers of its own.
    for number in numbers(simulation) {
        let Some(log) = simulation.journals.log(number) else { continue };
        match simulation.hand_over_on(log.journal_disk(), number) {
            Ok(true) => check_is_there(simulation, number)?,
            Ok(false) => return finding("a log whose guest was reset is not handed over"),
            Err(error) => return finding(format!("handing a log over whose guest was reset fails: {error}")),
        }
    }
    if let Err(error) = simulation.journals.check_left() {
        return finding(format!("every log was handed over, and something is held still: {error}"));
    }
    judge_left(simulation, &simulation.image_paths(), "reset")
}

/// What processes leave that are killed between two stores.
struct Kills {
    taken: Rc<RefCell<Vec<PathBuf>>>,
    scratch: tempfile::TempDir,
}

struct Taken {
    directories: Vec<PathBuf>,
    _scratch: tempfile::TempDir,
}

impl Kills {
    fn begin(simulation: &Simulation<'_>) -> crate::error::Result<Self> {
        let scratch = scratch()?;
        let taken = Rc::new(RefCell::new(Vec::new()));
        let sink = Rc::clone(&taken);
        let area = simulation.journals.directory().path().to_owned();
        let images = simulation.directory.path().to_owned();
        let disks = simulation.images.len();
        let names: Vec<String> = simulation.logs.iter().map(|judged| judged.description.name.clone()).collect();
        let to = scratch.path().to_owned();
        simulated_kill::set_look(Some(Box::new(move || {
            let count = sink.borrow().len();
            if count >= KILLS_MAX {
                return;
            }
            let directory = to.join(format!("{count}"));
            let copied = std::fs::create_dir(&directory).is_ok()
                && (0..disks).all(|disk| {
                    let name = format!("disk{disk}");
                    copy_image(&images.join(&name), &directory.join(&name)).is_ok()
                })
                && names
                    .iter()
                    .flat_map(|name| [format!("{name}.table"), format!("{name}.pool")])
                    .all(|name| copy_image(&area.join(&name), &directory.join(&name)).is_ok())
                && copy_image(&area.join("ram"), &directory.join("ram")).is_ok();
            assert!(copied, "what a killed process leaves can be copied");
            sink.borrow_mut().push(directory);
        })));
        Ok(Kills { taken, scratch })
    }

    fn end(self) -> Taken {
        simulated_kill::set_look(None);
        Taken { directories: self.taken.take(), _scratch: self.scratch }
    }
}

/// For each log the superblock on storage, if that says that the log is live there.
fn live_on_storage(simulation: &Simulation<'_>, images: &[PathBuf]) -> Result<Vec<Option<Vec<u8>>>, Error> {
    let of = |judged: &JudgedLog| {
        let mut raw = vec![0; jbd2::SUPERBLOCK_BYTES];
        let image = File::open(&images[judged.description.place.journal_disk])?;
        image.read_exact_at(&mut raw, judged.offset_of(0).unwrap_or(0))?;
        let is_live = jbd2::Superblock::decode(&raw).is_ok_and(|superblock| !superblock.is_empty());
        Ok(is_live.then_some(raw))
    };
    simulation.logs.iter().map(of).collect::<std::io::Result<_>>().during("looking at storage")
}

/// The next process finishes what one left; what is then still in a journal on storage is the guest's kernel's to replay.
fn judge_kill(simulation: &Simulation<'_>, kill: &Path) -> Step {
    let other = |e: placement::DirectoryError| Error::Other(e.to_string());
    let area = AreaDirectory::create(&kill.join("area"), &kill.join("registry")).map_err(other)?;
    let images: Vec<PathBuf> = (0..simulation.images.len()).map(|disk| kill.join(format!("disk{disk}"))).collect();
    let mut logs = Vec::new();
    for judged in &simulation.logs {
        let name = &judged.description.name;
        for ending in ["table", "pool"] {
            let file = format!("{name}.{ending}");
            std::fs::rename(kill.join(&file), area.path().join(&file)).during("moving what a process left")?;
        }
        let place = judged.description.place.clone();
        let (home, journal) = (images[place.home_disk].clone(), images[place.journal_disk].clone());
        logs.push(LogDescription::new(name.clone(), home, journal, place));
    }
    let ram = area.path().join("ram");
    std::fs::rename(kill.join("ram"), &ram).during("moving the guest's memory")?;
    area.describe(&[(ram, 0)], logs, Vec::new()).during("describing the area")?;
    let live = live_on_storage(simulation, &images)?;
    if let Err(error) = finish_directory(&area, &images).and_then(Finish::into_result) {
        return finding(format!("killed while a log is handed over, what is left cannot be finished: {error}"));
    }
    let left = live_on_storage(simulation, &images)?;
    if live.iter().zip(left).any(|(live, left)| live.is_some() && *live != left) {
        return finding(
            "a log that was handed over is whole on storage, and was not left to its guest's kernel".to_owned(),
        );
    }
    judge_left(simulation, &images, "killed")
}

/// What the guest's next kernel finds is whole, and has what was acknowledged.
fn judge_left(simulation: &Simulation<'_>, images: &[PathBuf], how: &str) -> Step {
    for judged in &simulation.logs {
        judge::replay_with_e2fsck(&judged.file_system(images)).map_err(Error::from)?;
    }
    let file_system = simulation.logs[0].file_system(images);
    let verdict = judge::check(&file_system).map_err(Error::from)?;
    if let Some(problem) = verdict.problems.first() {
        return finding(format!("{how} while a log is handed over: e2fsck -fn says: {problem}"));
    }
    let reported = Reported { acknowledged: simulation.acknowledged.clone(), ..Reported::default() };
    let scenario = Scenario::named(&simulation.recording.scenario)?;
    match scenario.check(&file_system, &reported)?.first() {
        Some(fault) => finding(format!("{how} while a log is handed over, acknowledged work is lost: {fault}")),
        None => Ok(()),
    }
}
