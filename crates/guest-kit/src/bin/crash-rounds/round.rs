//! One round: a file system, a load, a strike, and the judgement.

use crate::victim::Victim;
use guest_kit::image::{ExtRecipe, FileSystem, copy_image};
use guest_kit::workload::{Mode, STREAMS, Workload};
use guest_kit::{AtEnd, Cache, Drive, Error, Guest, GuestSpec, Reported, Result, judge, program};
use guest_tools::random::Random;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use tempfile::TempDir;

const LIMIT: Duration = Duration::from_secs(180);

/// All choices of a round, which follow from its seed.
pub struct Round {
    seed: u64,
    under: String,
    victim: Victim,
    recipe: ExtRecipe,
    mode: Mode,
    cache: Cache,
    under_load: Duration,
}

impl Round {
    /// The round of `seed`; `under` is "plain" or a placement.
    pub fn new(seed: u64, under: &str, victim: Option<Victim>) -> Self {
        let mut random = Random::new(seed);
        let base = if random.below(3) == 0 { ExtRecipe::ext3(128, 8) } else { ExtRecipe::ext4(128, 8) };
        let recipe = ExtRecipe { block_bytes: pick(&mut random, &[4096, 4096, 1024, 2048]), ..base };
        let mode = pick(&mut random, &[Mode::Journal, Mode::Journal, Mode::Ordered]);
        let cache = pick(&mut random, &[Cache::Writeback, Cache::None]);
        let under_load = Duration::from_millis(random.below(6000));
        let drawn = pick(&mut random, &Victim::possible(under == "plain"));
        let victim = victim.unwrap_or(drawn);
        Self { seed, under: under.to_owned(), victim, recipe, mode, cache, under_load }
    }

    /// The round in words.
    pub fn describe(&self) -> String {
        format!(
            "seed {}: {} with {} byte blocks, data={}, {} after {:.1} s",
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
        format!("--seed {} --under {} --victim {}", self.seed, self.under, self.victim.name())
    }

    /// Gives the number of acknowledgements, and what is wrong.
    pub fn run(&self) -> Result<(u64, Vec<String>)> {
        let directory = directory_in(&std::env::temp_dir())?;
        let image = directory.path().join("image");
        let file_system = self.recipe.make(&image)?;
        let area = directory_in(Path::new("/dev/shm"))?;
        let load = Workload::new(self.seed).mode(self.mode);
        let reported = self.strike(&load, &image, area.path())?;
        let (acknowledged, mut faults) = self.judge(&load, &file_system, &reported)?;
        if !faults.is_empty() {
            let kept = std::env::temp_dir().join(format!("crash-round-{}.img", self.seed));
            copy_image(&image, &kept)?;
            faults.push(format!("the image is kept as {}", kept.display()));
        }
        Ok((acknowledged, faults))
    }

    /// Runs the guest and ends it; afterwards the image is recovered.
    fn strike(&self, load: &Workload, image: &Path, area: &Path) -> Result<Reported> {
        let amberlog = if self.under == "plain" { PathBuf::new() } else { program::workspace_binary("amberlog")? };
        let mut spec = GuestSpec::new("crash-round", load.script());
        spec.at_end = AtEnd::Stay;
        spec.reboots = true;
        spec = if self.under == "plain" {
            spec.drives(vec![Drive::new(image, self.cache)])
        } else {
            let mut disk = OsString::from(image);
            disk.push(format!(",placement={}", self.under));
            let words: [OsString; 6] =
                [amberlog.clone().into(), "run".into(), "--disk".into(), disk, "--shm".into(), area.into()];
            spec.wrapper(words)
        };
        let mut guest = Guest::start(spec)?;
        for stream in STREAMS {
            guest.wait_acknowledged(stream, 1, LIMIT)?;
        }
        std::thread::sleep(self.under_load);
        let mut random = Random::of(self.seed, 1);
        if self.victim.strike(&mut guest, &mut random)? {
            program::run(Command::new(&amberlog).args(["recover", "--area"]).arg(area), &[0])?;
        }
        if self.under == "plain" {
            judge::replay_with_e2fsck(&FileSystem::whole(image))?;
        } else if self.under == "storage" {
            // A journal on storage is left to whoever mounts next.
            program::run(Command::new(&amberlog).args(["recover", "--disk"]).arg(image), &[0])?;
        }
        Ok(guest.final_report())
    }

    fn judge(&self, load: &Workload, file_system: &FileSystem, reported: &Reported) -> Result<(u64, Vec<String>)> {
        let verdict = judge::check(file_system)?;
        let mut faults = verdict.problems;
        if verdict.needs_recovery {
            faults.push("the journal still has to be replayed".to_owned());
        }
        let evidence = load.check(file_system, reported)?;
        faults.extend(evidence.faults);
        Ok((evidence.acknowledged, faults))
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
