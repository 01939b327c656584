//! One round: a file system, a load, a strike, and the judgement.

use crate::finish::{Finish, Finisher, left_in};
use crate::stress::{self, Stress};
use crate::victim::Victim;
use crate::workers;
use guest_kit::image::{ExtRecipe, FileSystem, copy_image};
use guest_kit::journal_server::JournalServer;
use guest_kit::workload::{self, Mode, READERS, STREAMS, Workload};
use guest_kit::{AtEnd, Cache, Drive, Error, Guest, GuestSpec, Reported, Result, interrupt, judge, program, scratch};
use guest_tools::random::Random;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use tempfile::TempDir;

const LIMIT: Duration = Duration::from_secs(180);

/// What came of a round.
#[derive(Debug, Default)]
pub struct Outcome {
    /// What the guest was told is durable: records, operations and transactions.
    pub acknowledged: u64,
    /// How many of its records the guest has read while it ran.
    pub read_back: u64,
    /// amberlog was killed, and its work was finished by another.
    pub is_finished_by_another: bool,
    /// How often that other was killed in the middle of it.
    pub recoveries_cut_off: u64,
    /// How often the process that serves the guest was killed, and another one went on.
    pub worker_kills: u64,
    /// What was done against its memory.
    pub stress: stress::Done,
    /// What is wrong.
    pub faults: Vec<String>,
}

/// All choices of a round, which follow from its seed.
pub struct Round {
    pub seed: u64,
    under: String,
    pub victim: Victim,
    recipe: ExtRecipe,
    mode: Mode,
    cache: Cache,
    under_load: Duration,
    /// Bound on memory for tables and copies, in MiB: with little of it there is pressure.
    memory_budget_mib: u64,
    finish: Finish,
    /// How often the process that serves the guest is killed before.
    worker_kills: u64,
}

impl Round {
    /// The round of `seed`; `under` is "plain" or a placement.
    pub fn new(seed: u64, under: &str, victim: Option<Victim>, worker_kills: u64) -> Self {
        let mut random = Random::new(seed);
        // Of its own, so that an older seed repeats its round.
        let under = match under {
            "any" => pick(&mut Random::of(seed, 2), &["retain", "retain", "copy", "storage"]),
            under => under,
        };
        let base = if random.below(3) == 0 { ExtRecipe::ext3(128, 8) } else { ExtRecipe::ext4(128, 8) };
        let recipe = ExtRecipe { block_bytes: pick(&mut random, &[4096, 4096, 1024, 2048]), ..base };
        let mode = pick(&mut random, &[Mode::Journal, Mode::Journal, Mode::Ordered]);
        let cache = pick(&mut random, &[Cache::Writeback, Cache::None]);
        let under_load = Duration::from_millis(random.below(6000));
        let drawn = pick(&mut random, &Victim::possible(under == "plain"));
        let victim = victim.unwrap_or(drawn);
        let memory_budget_mib = pick(&mut random, &[256, 256, 4, 1, 0]);
        let mut finish = Finish::of(&mut random);
        if under == "nvm" {
            // Who recovers by area does not know of the region.
            finish.by = Finisher::Run;
        }
        let under = under.to_owned();
        Self { seed, under, victim, recipe, mode, cache, under_load, memory_budget_mib, finish, worker_kills }
    }

    /// Its option of the disk.
    fn placement(&self) -> String {
        match self.under.as_str() {
            "durable" => {
                let mut random = Random::of(self.seed, 3);
                let placement = pick(&mut random, &["retain", "copy"]);
                format!("{placement},durable-within={}", pick(&mut random, &[0, 1, 5]))
            }
            under => under.to_owned(),
        }
    }

    /// Which blocks are copied though they could be retained: mistakes with protected pages show where most pages are protected.
    fn hot_pages(&self) -> &'static str {
        pick(&mut Random::of(self.seed, 4), &["never", "faulted", "foreseen", "lone"])
    }

    /// Whether its guest's memory is in huge pages, where some are to be had.
    pub fn is_in_huge_pages(&self) -> bool {
        Random::of(self.seed, 5).below(4) > 0
    }

    fn is_on_nvm(&self) -> bool {
        self.under == "nvm"
    }

    /// The round in words.
    pub fn describe(&self) -> String {
        let more = match self.under.as_str() {
            "plain" => String::new(),
            _ => format!(", {}, budget {} MiB, {}", self.placement(), self.memory_budget_mib, self.finish.describe()),
        };
        let kills = match self.worker_kills {
            0 => String::new(),
            kills => format!("the worker {kills} times, "),
        };
        format!(
            "seed {}: {} with {} byte blocks, data={}, {kills}{} after {:.1} s{more}",
            self.seed,
            if self.recipe.ext3 { "ext3" } else { "ext4" },
            self.recipe.block_bytes,
            self.mode.name(),
            self.victim.name(),
            self.under_load.as_secs_f64(),
        )
    }

    /// The options that repeat it.
    pub fn options(&self) -> String {
        let kills = match self.worker_kills {
            0 => String::new(),
            kills => format!(" --worker-kills {kills}"),
        };
        format!("--seed {} --under {} --victim {}{kills}", self.seed, self.under, self.victim.name())
    }

    /// Runs it, with the host's memory management against it, if there is one that does. A failure of the machinery is a fault too.
    pub fn run(&self, stress: Option<&Stress>) -> Outcome {
        let mut outcome = Outcome::default();
        if let Err(error) = self.attempt(stress, &mut outcome) {
            outcome.faults.push(error.to_string());
        }
        outcome
    }

    fn attempt(&self, stress: Option<&Stress>, outcome: &mut Outcome) -> Result<()> {
        let directory = directory_in(&std::env::temp_dir())?;
        let image = directory.path().join("image");
        let file_system = self.recipe.make(&image)?;
        let area = directory_in(&stress::directory_of(stress, self.is_in_huge_pages()))?;
        let regions = directory_in(scratch::memory())?;
        let load = Workload::new(self.seed).mode(self.mode).read_back();
        let struck = self.strike(&load, &image, (area.path(), regions.path()), stress, outcome);
        match stress.map(Stress::calm) {
            Some(Ok(done)) => outcome.stress = done,
            Some(Err(error)) => outcome.faults.push(error),
            None => {}
        }
        let judged = struck.and_then(|reported| match self.under.as_str() {
            // What is dropped is lost by any death; the guest had to notice nothing before.
            "discard" => Ok(()),
            _ => self.judge(&load, &file_system, &reported, outcome),
        });
        if (judged.is_err() || !outcome.faults.is_empty()) && !interrupt::is_requested() {
            let kept = std::env::temp_dir().join(format!("crash-round-{}.img", self.seed));
            copy_image(&image, &kept)?;
            outcome.faults.push(format!("the image is kept as {}", kept.display()));
            let area = area.keep();
            outcome.faults.push(format!("the area is kept as {}", area.display()));
            if let Some(stress) = stress.filter(|_| self.is_in_huge_pages()) {
                stress.keep();
            }
            if self.is_on_nvm() {
                outcome.faults.push(format!("the region is kept in {}", regions.keep().display()));
            }
        }
        judged
    }

    /// Runs the guest and ends it; afterwards the image is recovered.
    fn strike(
        &self,
        load: &Workload,
        image: &Path,
        (area, regions): (&Path, &Path),
        stress: Option<&Stress>,
        outcome: &mut Outcome,
    ) -> Result<Reported> {
        let is_plain = self.under == "plain";
        let amberlog = if is_plain { PathBuf::new() } else { program::workspace_binary("amberlog")? };
        let store = image.with_file_name("store");
        let server = (self.under == "remote").then(|| JournalServer::start(&amberlog, &store)).transpose()?;
        let mut disk = OsString::from(image);
        disk.push(format!(",hot-pages={},placement={}", self.hot_pages(), self.placement()));
        if self.is_on_nvm() {
            disk.push(format!("={},nvm-size=16", regions.join("region").display()));
        }
        server.iter().for_each(|server| disk.push(format!("={}", server.journal())));
        let mut spec = GuestSpec::new("crash-round", load.script());
        spec.at_end = AtEnd::Stay;
        spec.reboots = true;
        spec = if is_plain {
            spec.drives(vec![Drive::new(image, self.cache)])
        } else {
            let mut words = stress.map(Stress::words).unwrap_or_default();
            words.extend([amberlog.clone().into(), "run".into(), "--disk".into(), disk.clone()]);
            words.extend(["--memory-budget".into(), self.memory_budget_mib.to_string().into()]);
            words.extend(["--shm".into(), area.into()]);
            if server.is_some() {
                words.push("--remote-insecure".into());
            }
            if self.worker_kills > 0 {
                words.extend(["--deaths-max".into(), "1000000".into()]);
            }
            spec.wrapper(words)
        };
        let mut guest = Guest::start(spec)?;
        let mut random = Random::of(self.seed, 1);
        let is_left = match self.work_and_strike(&mut guest, area, stress, &mut random, outcome) {
            Ok(is_left) => is_left,
            Err(error) => {
                // Why it got no further, if it knows.
                outcome.faults.extend(workload::damage(&guest.reported()));
                return Err(error);
            }
        };
        if is_left {
            let (cut_off, faults) = self.finish.finish(&amberlog, &disk, area, &mut random)?;
            outcome.is_finished_by_another = true;
            outcome.recoveries_cut_off = cut_off;
            outcome.faults.extend(faults);
        } else if !is_plain {
            let left = left_in(area);
            outcome.faults.extend(left.iter().map(|path| format!("{} is left in the area", path.display())));
            if !left.is_empty() {
                outcome.faults.push(format!("amberlog said:\n{}", guest.stderr()));
            }
        }
        if is_plain {
            judge::replay_with_e2fsck(&FileSystem::whole(image))?;
        } else if self.under == "storage" {
            // A journal on storage is left to whoever mounts next.
            program::run(Command::new(&amberlog).args(["recover", "--disk"]).arg(image), &[0])?;
        } else if let Some(server) = &server {
            let mut recover = Command::new(&amberlog);
            recover.args(["recover", "--remote-insecure", "--disk"]).arg(image).args(["--remote", &server.journal()]);
            program::run(&mut recover, &[0])?;
        }
        let reported = guest.final_report();
        outcome.faults.extend(workload::damage(&reported));
        // The last of them counts times of the memory beside.
        let counts = READERS[..2].iter().filter_map(|stream| reported.acknowledged.get(*stream)?.last);
        outcome.read_back = counts.sum();
        Ok(reported)
    }

    /// Has the guest work for a while, with all that is to be borne, and ends it. Gives whether amberlog's work is left to be finished.
    fn work_and_strike(
        &self,
        guest: &mut Guest,
        area: &Path,
        stress: Option<&Stress>,
        random: &mut Random,
        outcome: &mut Outcome,
    ) -> Result<bool> {
        if let Some(stress) = stress {
            stress.begin(guest, area);
        }
        for stream in STREAMS.iter().chain(&READERS) {
            guest.wait_acknowledged(stream, 1, LIMIT)?;
        }
        std::thread::sleep(self.under_load);
        if self.worker_kills > 0 {
            // "records" is the load's verifying writer.
            workers::storm(guest, self.worker_kills, STREAMS[0], random)?;
            outcome.worker_kills = self.worker_kills;
        }
        if self.worker_kills > 0 || stress.is_some() {
            outcome.faults.extend(workers::complaints(guest));
        }
        self.victim.strike(guest, random)
    }

    fn judge(
        &self,
        load: &Workload,
        file_system: &FileSystem,
        reported: &Reported,
        outcome: &mut Outcome,
    ) -> Result<()> {
        let mut verdict = judge::check(file_system)?;
        if verdict.needs_recovery && self.victim.dies_at_boot() && judge::has_empty_journal(file_system)? {
            // It had mounted and not committed: recovery is asked for and finds nothing. Nothing is owed to such a disk, so
            // whoever finishes leaves it alone.
            judge::replay_with_e2fsck(file_system)?;
            verdict = judge::check(file_system)?;
        }
        outcome.faults.extend(verdict.problems);
        if verdict.needs_recovery {
            outcome.faults.push("the journal still has to be replayed".to_owned());
        }
        let evidence = load.check(file_system, reported)?;
        outcome.acknowledged = evidence.acknowledged;
        outcome.faults.extend(evidence.faults);
        Ok(())
    }
}

fn pick<T: Copy>(random: &mut Random, choices: &[T]) -> T {
    let index = usize::try_from(random.below(choices.len() as u64)).unwrap_or(0);
    choices[index]
}

fn directory_in(parent: &Path) -> Result<TempDir> {
    tempfile::Builder::new().prefix("crash-round-").tempdir_in(parent).map_err(|source| Error::File {
        action: "create a directory in",
        path: parent.to_owned(),
        source,
    })
}
