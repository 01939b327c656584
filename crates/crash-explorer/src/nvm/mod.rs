//! Recordings of real guests over placement `nvm`, with power failing at the steps of region and disk.
//!
//! The region is the simulated medium, which loses any subset of words that no fence covers; the disk loses any subset of
//! blocks that no flush covers ([`history`]). [`judge`] says at each step whether recovery would make of it what a
//! complete journal would; at some of them it is really recovered, and e2fsck and the guest's acknowledged work decide.

mod cut_off;
pub mod history;
pub mod judge;

use crate::error::{During, Error, Result};
use crate::explore::{Finding, Outcome, Thoroughness};
use crate::finding::{Step, Stop, finding};
use crate::recording::Recording;
use crate::scenario::Scenario;
use crate::scratch::scratch;
use crate::simulation::{SharedWatcher, Simulation};
use crate::switches::Switches;
use guest_kit::image::{FileSystem, copy_image};
use guest_kit::{Reported, judge as judged_by};
use guest_tools::random::Random;
use judge::Judge;
use nvm_journal::medium::{CrashImages, OpenOptions, SimulatedMedium};
use placement::{ManyAppends, NvmDisk, NvmOptions};
use recovery::{Access, Disk};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Arc, Mutex};

/// Blocks of a region beside half of the log's, at most.
const BLOCKS_BESIDE: u64 = 900;

/// What the steps of the region are looked at with.
struct Look {
    judge: Option<Arc<Mutex<Judge>>>,
    random: Random,
    points_each: u64,
    points: u64,
    visited: u64,
    until: u64,
    finding: Option<String>,
}

impl Look {
    /// A store, a writing back or a fence.
    fn step(&mut self, images: &CrashImages<'_>) {
        let Some(judge) = &self.judge else { return };
        self.visited += 1;
        if self.finding.is_some() || self.visited > self.until || self.random.below(self.points_each) != 0 {
            return;
        }
        self.points += 1;
        let how = self.random.below(4);
        let random = &mut self.random;
        let image = images.image(&mut |count| match how {
            0 => 0,
            1 => count - 1,
            2 => random.below(count as u64) as usize,
            _ if random.below(5) == 0 => 0,
            _ => count - 1,
        });
        let checked = judge.lock().expect("no panic under this lock").check(&image);
        if let Err(problem) = checked {
            self.finding = Some(format!("at step {} of the region: {problem}", self.visited));
        }
    }
}

fn lock<T>(shared: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    shared.lock().expect("no panic under this lock")
}

/// How a seed has the region used.
fn options(random: &mut Random) -> NvmOptions {
    let mut options = NvmOptions::new("the simulated region");
    options.byte_level = random.below(5) != 0;
    options.delayed_checkpoint = random.below(5) != 0;
    options.log_everything = random.below(5) == 0;
    // The paper's way, that of users, and one in which both happen.
    options.append_home_bytes_min = [0, 0, 16 << 10, 1 << 20][random.below(4) as usize];
    options.early_batch_bytes = [0, 16 << 10, 256 << 10][random.below(3) as usize];
    options.early_run_bytes = [0, 8 << 10, 64 << 10][random.below(3) as usize];
    options.early_fill_percent = [10, 50][random.below(2) as usize];
    options.checkpoint_slices = [4, 4, 64][random.below(3) as usize];
    options.checkpoint_slice_bytes_min = [16 << 10, 64 << 10, 1 << 20][random.below(3) as usize];
    options
}

/// One run.
///
/// # Errors
/// When it could not be made; a broken promise is in the outcome.
pub fn run(recording: &Recording, seed: u64, switches: Switches, how: Thoroughness) -> Result<Outcome> {
    let mut random = Random::of(seed, 0x6e76);
    let scenario = Scenario::named(&recording.scenario)?;
    let directory = scratch()?;
    let base = directory.path().join("base");
    recording.write_base(0, &base)?;
    let mut options = options(&mut random);
    // Of a sequence of its own. (By their cost would be by a clock.)
    options.many_appends = [ManyAppends::Home, ManyAppends::Logged][Random::of(seed, 0x6c6f67).below(2) as usize];
    options.pipelined = switches.has(Switches::PIPELINED);
    // Every tail that moves waits for a mark, or hardly any.
    options.mark_age = std::time::Duration::from_secs(seed % 2);
    let region_bytes = region_bytes(&base, &mut random)?;
    let look = Arc::new(Mutex::new(Look {
        judge: None,
        random: Random::of(seed, 0x6c6f),
        points_each: how.points_each,
        points: 0,
        visited: 0,
        until: how.until,
        finding: None,
    }));
    let mut medium = SimulatedMedium::new(region_bytes);
    let seen = Arc::clone(&look);
    medium.observe(Some(Box::new(move |images| lock(&seen).step(images))));
    let other = |error: recovery::Error| Error::Other(error.to_string());
    let nvm = Arc::new(NvmDisk::with_medium(options, 0, Box::new(medium)).map_err(other)?);
    let watcher = Arc::new(Mutex::new(Relay::default()));
    let shared: SharedWatcher = watcher.clone();
    let mut simulation = Simulation::with(recording, seed, switches, (Some(Arc::clone(&nvm)), None), Some(shared))?;
    let log = Arc::clone(&simulation.logs[0].log);
    let open = |path: &Path| File::open(path).during("opening an image");
    let image = open(&simulation.directory.path().join("disk0"))?;
    let judge = Judge::new(log, open(&base)?, image, switches.has(Switches::PIPELINED));
    let judge = Arc::new(Mutex::new(judge));
    lock(&look).judge = Some(Arc::clone(&judge));
    lock(&watcher).judge = Some(Arc::clone(&judge));
    let mut outcome = Outcome::default();
    let mut steps = 0u64;
    let ended = simulation.run(&mut |simulation| -> Step {
        steps += 1;
        if let Some(problem) = &lock(&look).finding {
            return finding(problem.clone());
        }
        if random.below(400) == 0 {
            nvm.request_checkpoint();
        }
        simulation.check_routes()?;
        if random.below(how.points_each.max(8) / 8) == 0 {
            outcome.points += 1;
            let region = nvm.look_at_region(|medium| medium.bytes().to_vec());
            if let Some(region) = region
                && let Err(problem) = lock(&judge).check(&region)
            {
                return finding(format!("between requests: {problem}"));
            }
        }
        let mut choice = Random::of(seed ^ 0x6a75_6467_6500, steps);
        if how.judgements_each != 0 && choice.below(how.judgements_each) == 0 {
            outcome.judgements += 1;
            recover_really(simulation, &nvm, &lock(&judge), &scenario, &mut choice)?;
        }
        Ok(())
    });
    let found = match ended {
        Ok(()) => lock(&look).finding.clone(),
        Err(Stop::Error(error)) => return Err(error),
        Err(Stop::Finding(what)) => Some(what),
    };
    outcome.points += lock(&look).points;
    outcome.prepared = lock(&judge).prepared;
    outcome.left = simulation.logs.iter().filter(|log| simulation.is_stored(log)).count();
    outcome.finding = found.map(|what| Finding {
        scenario: recording.scenario.clone(),
        seed,
        switches,
        point: lock(&look).visited,
        event: simulation.clock(),
        judgements_each: how.judgements_each,
        what: format!("{what} ({:?})", nvm.options),
    });
    Ok(outcome)
}

/// A watcher that has nothing to tell until there is a judge.
#[derive(Default)]
struct Relay {
    judge: Option<Arc<Mutex<Judge>>>,
}

impl crate::simulation::Watcher for Relay {
    fn issued(&mut self, recording: &Recording, issue: &crate::recording::Issue) {
        self.judge.iter().for_each(|judge| lock(judge).issued(recording, issue));
    }

    fn request_done(&mut self, id: u32) {
        self.judge.iter().for_each(|judge| lock(judge).request_done(id));
    }

    fn submitted(&mut self, number: u64, operation: &block_route::DiskOperation) {
        self.judge.iter().for_each(|judge| lock(judge).submitted(number, operation));
    }

    fn executed(&mut self, number: u64, operation: &block_route::DiskOperation, bytes: Option<&[u8]>) {
        self.judge.iter().for_each(|judge| lock(judge).executed(number, operation, bytes));
    }

    fn leaves(&mut self) {
        self.judge.iter().for_each(|judge| lock(judge).leaves());
    }

    fn completed(&mut self, number: u64, operation: &block_route::DiskOperation) {
        self.judge.iter().for_each(|judge| lock(judge).completed(number, operation));
    }
}

/// A size between what is just enough and more than is ever used.
fn region_bytes(base: &Path, random: &mut Random) -> Result<usize> {
    let bytes = std::fs::read(base).during("reading the base image")?;
    let found = extfs::discover(&bytes).map_err(|error| Error::Other(error.to_string()))?;
    let Some(file_system) = found.first() else {
        return Err(Error::Other("there is no file system on the recorded disk".to_owned()));
    };
    let extfs::Journal::Internal { blocks, .. } = &file_system.journal else {
        return Err(Error::Other("the recorded file system has no journal of its own".to_owned()));
    };
    let blocks = u64::from(*blocks) / 2 + 4 + random.below(BLOCKS_BESIDE);
    let each = u64::from(file_system.superblock.block_size) + 20;
    Ok((5 * 4096 + blocks * each).next_multiple_of(4096) as usize)
}

/// Runs a recovery on files. A region that was never formatted, or is free, is of a log that is closed or was never
/// opened: a mount would have nothing to replay.
fn recover_files(image: &Path, region: &Path) -> Result<std::result::Result<(), String>> {
    let disk = Disk::open(image, Access::Write).map_err(|error| Error::Other(error.to_string()))?;
    Ok(match placement::recover_image(&disk, OpenOptions::new(region), Access::Write) {
        Ok(_) => Ok(()),
        Err(error) if error.to_string().contains("is no NVM region") => Ok(()),
        Err(error) => Err(error.to_string()),
    })
}

/// Recovers the region and a disk that has lost some of what was not flushed, and has e2fsck and the guest's acknowledged
/// work judge.
fn recover_really(
    simulation: &Simulation<'_>,
    nvm: &NvmDisk,
    judge: &Judge,
    scenario: &Scenario,
    random: &mut Random,
) -> Step {
    let scratch = scratch()?;
    let (image, region) = (scratch.path().join("image"), scratch.path().join("region"));
    copy_image(&simulation.directory.path().join("disk0"), &image).map_err(Error::from)?;
    let file = File::options().write(true).open(&image).during("opening an image")?;
    for (offset, bytes) in judge.lose(&mut |count| random.below(count as u64) as usize) {
        file.write_all_at(&bytes, offset).during("writing an image")?;
    }
    drop(file);
    let Some(bytes) = nvm.look_at_region(|medium| medium.bytes().to_vec()) else { return Ok(()) };
    std::fs::write(&region, &bytes).during("writing the region")?;
    let is_last_lost = judge.is_last_lost(&bytes, &image)?;
    let before = cut_off::State::read(&image, &region)?;
    if let Err(error) = recover_files(&image, &region)? {
        return finding(format!("recovery from the region fails: {error}"));
    }
    cut_off::check(&before, &simulation.logs[0].log, &image, random)?;
    let file_system = FileSystem::whole(image.clone());
    if judge.is_live(&image)? {
        // The log has left the region: it is the kernel's, or e2fsck's, to replay.
        judged_by::replay_with_e2fsck(&file_system).map_err(Error::from)?;
    }
    let verdict = judged_by::check(&file_system).map_err(Error::from)?;
    if verdict.needs_recovery && verdict.problems.is_empty() {
        judged_by::replay_with_e2fsck(&file_system).map_err(Error::from)?;
    } else if let Some(problem) = verdict.problems.first() {
        return finding(format!("e2fsck -fn on what was recovered: {problem}"));
    }
    if is_last_lost {
        // What the guest says was done by it is not known apart.
        return Ok(());
    }
    let reported = Reported { acknowledged: simulation.acknowledged.clone(), ..Reported::default() };
    match scenario.check(&file_system, &reported)?.first() {
        Some(fault) => finding(format!("acknowledged work is lost: {fault}")),
        None => Ok(()),
    }
}
