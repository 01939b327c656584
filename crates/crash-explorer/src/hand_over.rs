//! A held log is handed over to storage at some moment of the recording, and the process is killed between any two of its
//! stores while that happens.
//!
//! From then on the log on storage is the one that counts: whenever none of the guest's writes into it is on its way, a replay of
//! it has to leave what a replay of the complete log leaves, but for the file system's superblock, which guests also
//! write past their journals.

use crate::compare::compare_blocks;
use crate::complete::JudgedLog;
use crate::error::{During, Error};
use crate::finding::{Step, Stop, finding};
use crate::scenario::Scenario;
use crate::scratch::scratch;
use crate::simulation::Simulation;
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
        for kill in &kills.directories {
            judge_kill(simulation, kill)?;
        }
    }
    Ok(any)
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
    for judged in &simulation.logs {
        judge::replay_with_e2fsck(&judged.file_system(&images)).map_err(Error::from)?;
    }
    let file_system = simulation.logs[0].file_system(&images);
    let verdict = judge::check(&file_system).map_err(Error::from)?;
    if let Some(problem) = verdict.problems.first() {
        return finding(format!("killed while a log is handed over: e2fsck -fn says: {problem}"));
    }
    let reported = Reported { acknowledged: simulation.acknowledged.clone(), ..Reported::default() };
    let scenario = Scenario::named(&simulation.recording.scenario)?;
    match scenario.check(&file_system, &reported)?.first() {
        Some(fault) => finding(format!("killed while a log is handed over, acknowledged work is lost: {fault}")),
        None => Ok(()),
    }
}
