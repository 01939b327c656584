//! Guests at once on one modelled disk: images, start, a common beginning, and what is kept of one that failed.
//!
//! All guests boot and prepare, drop their caches and wait; when the last one is ready all are told to begin, so that
//! they contend for the disk as the paper's did. What they then do is the business of `load`, `crash` and `integrity`.
//!
//! Failure story: a guest that does not end in time fails its cell; all guests of the cell are killed and their
//! consoles kept.

use crate::cell::{Cell, Group, Mode};
use crate::clocks;
use crate::error::{Error, FileContext, Result};
use crate::journal_server::JournalServer;
use crate::measured::{CellResult, Parameters};
use crate::workload::{Sizes, Workload};
use disk_model::{Model, Profile, Server, ServerOptions};
use guest_kit::aged::Aged;
use guest_kit::image::{self, ExtRecipe, FileSystem, Journal};
use guest_kit::scratch::{self, Scratch, Use};
use guest_kit::{Guest, GuestSpec, Platform, interrupt, program, toolchain};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// ext3's journal on such a disk, in MiB.
const JOURNAL_MIB: u64 = 128;
/// The paper's RAM disk, in MiB.
const RAM_DISK_MIB: u64 = 40;
/// The smallest that jbd2 takes with room to spare, in MiB.
const JOURNAL_MIB_MIN: u64 = 8;
/// Bytes of a block of the guests' file systems.
pub const BLOCK_BYTES: u64 = 4096;
/// How often a cell's guests are booted at most.
const BOOTS_MAX: u32 = 3;
/// The pace of the modelled disk while guests prepare what their load begins with: nothing is measured then.
const PREPARATION_TIME_SCALE: f64 = 0.05;
/// ext3's commit interval.
pub(crate) const COMMIT_SECONDS: u64 = 5;
/// NJS's memory: the latency of a write in ns, and its bandwidth in MB/s.
pub(crate) const NVM_LATENCY_NS: f64 = 300.0;
pub(crate) const NVM_BANDWIDTH_MB: f64 = 1000.0;
const BOOT_LIMIT: Duration = Duration::from_secs(600);

/// Where images are made, and fresh ones to copy.
pub struct Rig {
    /// Guests that serve one cell after the other; they end before the images do.
    pub(crate) session: Option<Session>,
    pub(crate) directory: Scratch,
    fresh: BTreeMap<(u32, u64, bool, u64), PathBuf>,
    /// Of the fresh images that are full and old: how much so.
    aged: BTreeMap<PathBuf, Aged>,
    /// Half of the time that a whole run of a group takes.
    pub(crate) halves: BTreeMap<Group, f64>,
    /// Where consoles of failed guests go.
    consoles: PathBuf,
    /// What a cell's load may take at most, if that was said.
    limit: Option<Duration>,
}

/// What a cell's guests get.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan<'a> {
    pub(crate) cell: &'a Cell,
    pub(crate) parameters: &'a Parameters,
    /// The name of the experiment's own parameter.
    pub(crate) parameter: Option<&'a str>,
    /// The size of a guest's disk.
    pub(crate) image_mib: u32,
    /// The size of its journal.
    pub(crate) journal_mib: u64,
    /// Seconds for a second of the modelled disk.
    pub(crate) time_scale: f64,
}

/// The length of a group's journal, in MiB: the papers', or what the experiment's parameter says, to scale.
pub(crate) fn configured_journal_mib(group: &Group, scale: f64, parameter: Option<&str>) -> u64 {
    let full = match (parameter, group.mode) {
        // ext3's transactions hold a quarter of the log at most.
        (Some("transaction_mib"), _) => group.parameter * 4,
        (Some("journal_mib"), _) => group.parameter,
        (_, Mode::Ramdisk) => RAM_DISK_MIB,
        _ => JOURNAL_MIB,
    };
    crate::workload::part(full, scale).max(JOURNAL_MIB_MIN)
}

impl<'a> Plan<'a> {
    /// The papers' disk and journal, or what the cell's parameter says, to scale.
    pub(crate) fn new(cell: &'a Cell, parameters: &'a Parameters, parameter: Option<&'a str>) -> Self {
        let journal_mib = configured_journal_mib(&cell.group, parameters.scale, parameter);
        let image_mib = Workload::by_name(&cell.group.workload).map_or(0, Workload::image_mib);
        Plan { cell, parameters, parameter, image_mib, journal_mib, time_scale: parameters.time_scale }
    }

    fn mode(&self) -> Mode {
        self.cell.group.mode
    }

    /// How much of the disk is in use from the start, in per cent; 0 for an empty one.
    fn used_percent(&self) -> u64 {
        if self.parameter == Some("used_percent") { self.cell.group.parameter } else { 0 }
    }

    pub(crate) fn mount_options(&self) -> String {
        let options = self.mode().mount_options();
        let has_timer = self.mode() != Mode::NoJournal;
        match self.parameter {
            Some("commit_seconds") if has_timer => {
                format!(
                    "{options},commit={}",
                    clocks::commit_seconds(self.cell.group.parameter, self.parameters.clocks)
                )
            }
            _ if has_timer && self.parameters.clocks != 1.0 => {
                format!("{options},commit={}", clocks::commit_seconds(COMMIT_SECONDS, self.parameters.clocks))
            }
            _ => options.to_owned(),
        }
    }

    /// The shell lines that mount the data disk.
    pub(crate) fn mount(&self) -> String {
        let ram_disk = if self.mode() == Mode::Ramdisk {
            // A kernel without modules has no brd: a loop device on a file in the guest's memory, which nothing writes back, is called so there.
            format!(
                "if [ ! -b /dev/ram0 ]; then
                     mkdir -p /tmp/ram-disk
                     mount -t ramfs ram-disk /tmp/ram-disk || fail ramfs
                     dd if=/dev/zero of=/tmp/ram-disk/file bs=1M count={mib} 2>/dev/null || fail 'RAM disk'
                     losetup /dev/loop0 /tmp/ram-disk/file || fail losetup
                     mknod /dev/ram0 b 7 0 || fail mknod
                 fi
                 /bin/mke2fs -F -q -O journal_dev -b {BLOCK_BYTES} /dev/ram0 || fail 'journal device'
                 /bin/tune2fs -J device=/dev/ram0 /dev/vda >/dev/null || fail tune2fs\n",
                mib = self.journal_mib,
            )
        } else {
            String::new()
        };
        format!("{ram_disk}{}", self.mount_alone())
    }

    fn mount_alone(&self) -> String {
        format!("mount -t ext4 -o {} /dev/vda /mnt || fail mount", self.mount_options())
    }

    /// Everything home, and an empty journal.
    fn mount_again(&self) -> String {
        format!("umount /mnt || fail umount\n{}", self.mount_alone())
    }

    /// The shell lines up to the common beginning.
    pub(crate) fn preamble(&self, workload: Workload, number: u32) -> String {
        format!(
            "set -e
             {clocks}
             {mount}
             {prepare}
             {settle}
             sync
             echo 3 >/proc/sys/vm/drop_caches
             exec 5</dev/ttyS1
             mark ready
             read -r go <&5
             echo 'lab: the load begins'
             read -r begin rest </proc/uptime",
            clocks = clocks::guest_lines(self.parameters),
            mount = self.mount(),
            prepare = workload.prepare(sizes(self.parameters, self.cell, number)),
            settle = if workload.is_prepared() { self.mount_again() } else { String::new() },
        )
    }
}

/// The guests of one cell, started; with the disk that they share.
pub(crate) struct Running {
    pub(crate) guests: Vec<Guest>,
    pub(crate) images: Vec<PathBuf>,
    pub(crate) reports: Vec<PathBuf>,
    /// Where each guest's memory and tables are.
    pub(crate) areas: Vec<PathBuf>,
    /// What each guest's journal held over time, and when that began.
    pub(crate) samples: Vec<(PathBuf, Instant)>,
    pub(crate) server: Server,
    /// Slowed memory that an external journal is on.
    _memory: Option<Server>,
    /// Its pace from the common beginning on.
    time_scale: f64,
    /// Where journals are shipped to.
    pub(crate) journal_server: Option<JournalServer>,
    /// What getting here took: seconds of each part.
    pub(crate) phases: BTreeMap<String, f64>,
    pub(crate) directory: TempDir,
    pub(crate) tmpfs: Scratch,
}

/// A guest that serves one crash after the other.
pub(crate) struct Session {
    pub(crate) running: Running,
    pub(crate) group: Group,
    pub(crate) seed: u64,
    pub(crate) record_kib: u64,
    /// What the guest says when it is ready for the next crash.
    pub(crate) awaited: Option<String>,
}

impl Rig {
    /// A rig with its images in `images`, or where temporary files go.
    ///
    /// # Errors
    /// When no directory can be made there.
    pub fn new(images: Option<&Path>, consoles: PathBuf, limit: Option<Duration>) -> Result<Self> {
        let parent = images.map_or_else(std::env::temp_dir, Path::to_owned);
        let directory = Scratch::new_in(&parent, Use::Lab)?;
        Ok(Rig {
            session: None,
            directory,
            fresh: BTreeMap::new(),
            aged: BTreeMap::new(),
            halves: BTreeMap::new(),
            consoles,
            limit,
        })
    }

    /// What earlier runs found out that these are to have in common with them.
    pub(crate) fn know(&mut self, kept: &CellResult) {
        if let Some(half) = kept.half_seconds {
            self.halves.entry(kept.cell.group.clone()).or_insert(half);
        }
    }

    /// Many times what it should take: a guest beyond it hangs.
    pub(crate) fn time_limit(&self, workload: Workload, cell: &Cell, parameters: &Parameters) -> Duration {
        let share = f64::from(cell.group.guests) * parameters.time_scale.max(1.0);
        let ample = Duration::from_secs_f64(120.0 + workload.seconds() * parameters.scale * share * 10.0);
        self.limit.unwrap_or(ample)
    }

    /// A fresh file system, made once and then copied (sparse).
    fn image(&mut self, to: &Path, plan: &Plan<'_>, internal: bool) -> Result<()> {
        let key = (plan.image_mib, plan.journal_mib, internal, plan.used_percent());
        if !self.fresh.contains_key(&key) {
            let path = self.directory.path().join(format!("fresh-{}-{}-{internal}.img", key.0, key.1));
            let journal = u32::try_from(plan.journal_mib).unwrap_or(u32::MAX);
            let mut recipe = if plan.parameters.file_system == "ext3" {
                ExtRecipe::ext3(plan.image_mib, journal)
            } else {
                ExtRecipe::ext4(plan.image_mib, journal)
            };
            if !internal {
                recipe.journal = Journal::None;
            }
            if key.3 > 0 {
                let (path, aged) = crate::aged::template(recipe, key.3, plan.parameters.seed)?;
                self.aged.insert(path.clone(), aged);
                self.fresh.insert(key, path.clone());
                return Ok(image::copy_image(&path, to)?);
            }
            // mke2fs writes zeros over journal and inode tables: without them a copy takes no time.
            let full = path.with_extension("full");
            recipe.make(&full)?;
            image::copy_image(&full, &path)?;
            std::fs::remove_file(&full).at("remove", &full)?;
            self.fresh.insert(key, path);
        }
        Ok(image::copy_image(&self.fresh[&key], to)?)
    }

    /// What is known of an aged disk, as fields of a result.
    pub(crate) fn aged_fields(&self, plan: &Plan<'_>) -> Vec<(String, f64)> {
        let of = |key: &&(u32, u64, bool, u64)| {
            (key.0, key.1, key.3) == (plan.image_mib, plan.journal_mib, plan.used_percent())
        };
        let aged = self.fresh.iter().find(|(key, _)| of(key)).and_then(|(_, path)| self.aged.get(path));
        let Some(aged) = aged else { return Vec::new() };
        let score = aged.layout.score().map(|score| ("layout_score".to_owned(), score));
        score.into_iter().chain([("used_percent".to_owned(), aged.used_percent)]).collect()
    }

    /// Boots the cell's guests with a script each; returns when all have told `mark ready`. Nothing has been measured by
    /// then, so a guest that does not come up is tried again (emulated ones fail now and then on a busy machine).
    pub(crate) fn start(&mut self, plan: &Plan<'_>, script: impl Fn(u32) -> String) -> Result<Running> {
        for _ in 1..BOOTS_MAX {
            match self.boot(plan, &script) {
                Err(_) if interrupt::is_requested() => return Err(Error::Interrupted),
                Err(error @ Error::Guest(_)) => eprintln!("    once more: {}", first_line(&error.to_string())),
                other => return other,
            }
        }
        self.boot(plan, &script)
    }

    fn boot(&mut self, plan: &Plan<'_>, script: &impl Fn(u32) -> String) -> Result<Running> {
        let (cell, parameters) = (plan.cell, plan.parameters);
        let group = &cell.group;
        let started = Instant::now();
        let directory = tempfile::tempdir_in(self.directory.path()).at("write in", self.directory.path())?;
        let tmpfs = Scratch::new_in(scratch::memory(), Use::Lab)?;
        let profile: Profile = group.disk.parse().map_err(Error::Told)?;
        let seed = parameters.seed + u64::from(cell.iteration);
        let sizes = parameters.constants();
        let options = ServerOptions {
            profile,
            seed,
            time_scale: plan.time_scale.min(PREPARATION_TIME_SCALE),
            socket: Some(directory.path().join("model")),
        };
        let server = Server::start_with(Model::scaled(profile, seed, sizes, parameters.drive_clocks()), options)?;
        // As slow beside the drive as it was: preparation too, which is short on it.
        let memory = (group.mode == Mode::TmpfsSlowed).then(|| {
            let socket = Some(directory.path().join("memory"));
            Server::start(ServerOptions { profile: Profile::Pcm, seed, time_scale: plan.time_scale, socket })
        });
        let journal_server = match group.mode.placement() {
            "remote" => Some(JournalServer::start(&directory.path().join("journals"))?),
            _ => None,
        };
        let mut running = Running {
            guests: Vec::new(),
            images: Vec::new(),
            reports: Vec::new(),
            areas: Vec::new(),
            samples: Vec::new(),
            server,
            _memory: memory.transpose()?,
            time_scale: plan.time_scale,
            journal_server,
            phases: BTreeMap::new(),
            directory,
            tmpfs,
        };
        for number in 0..group.guests {
            let image = running.directory.path().join(format!("disk-{number}.img"));
            let internal = group.mode.has_journal_on_image() && !group.mode.has_journal_in_tmpfs();
            self.image(&image, plan, internal)?;
            running.images.push(image);
        }
        running.note_phase("images", started);
        let booting = Instant::now();
        for number in 0..group.guests {
            let mut words = running.words(plan, number)?;
            if workload_of(cell)?.needs_toolchain() {
                let mut disk = toolchain::image(self.directory.path())?.into_os_string();
                disk.push(",readonly,name=toolchain");
                words.extend(["--disk".into(), disk]);
            }
            let mut spec = GuestSpec::new(format!("{cell}, guest {number}"), script(number)).wrapper(words);
            spec.memory_mib = parameters.guest_mib;
            spec.programs = workload_of(cell)?.programs().to_vec();
            // The kernel's test of its timer fails where the emulator was kept from running for a moment.
            spec.kernel_arguments = "no_timer_check".to_owned();
            spec.environment = vec![("AMBERLOG_LOG".into(), "warn".into())];
            if group.mode == Mode::Ramdisk && Platform::native()?.kernel.modules.is_some() {
                spec.modules.push(format!("brd rd_nr=1 rd_size={}", plan.journal_mib * 1024));
            }
            same_platform(&Platform::native()?.describe(), &Platform::for_guest(&spec)?.describe(), group.mode)?;
            running.guests.push(Guest::launch(spec)?);
        }
        for number in 0..running.guests.len() {
            let up = running.guests[number].await_report("its user space did not come up", BOOT_LIMIT, |reported| {
                (reported.boots > 0).then_some(())
            });
            if let Err(error) = up {
                self.keep_console(&mut running.guests[number], cell, number);
                return Err(error.into());
            }
        }
        running.note_phase("boot", booting);
        let preparing = Instant::now();
        // What a large load prepares takes its part of the time that the load may take.
        let preparation = BOOT_LIMIT.max(self.time_limit(workload_of(cell)?, cell, parameters));
        for number in 0..running.guests.len() {
            if let Err(error) = running.guests[number].wait_mark("ready", preparation) {
                self.keep_console(&mut running.guests[number], cell, number);
                return Err(error.into());
            }
        }
        running.note_phase("prepare", preparing);
        Ok(running)
    }

    /// Keeps the console of a guest that failed; gives words for the message.
    pub(crate) fn keep_console(&self, guest: &mut Guest, cell: &Cell, number: usize) -> String {
        let path = self.consoles.join(format!("{}-guest{number}.log", cell.file_name()));
        let text = format!("{}\n--- stderr of QEMU and amberlog\n{}", guest.console(), guest.stderr());
        let kept = std::fs::create_dir_all(&self.consoles).and_then(|()| std::fs::write(&path, text));
        match kept {
            Ok(()) => {
                guest.forgive();
                format!("; its console is in {}", path.display())
            }
            Err(error) => format!("; its console could not be kept: {error}"),
        }
    }
}

impl Running {
    /// What amberlog is told of a guest's disks.
    fn words(&mut self, plan: &Plan<'_>, number: u32) -> Result<Vec<OsString>> {
        let mode = plan.mode();
        let image = &self.images[number as usize];
        let report = self.directory.path().join(format!("report-{number}.json"));
        let mut words: Vec<OsString> = vec![program::workspace_binary("amberlog")?.into(), "run".into()];
        let mut disk = image.clone().into_os_string();
        disk.push(format!(",name=data,placement={}", mode.placement()));
        if let Some(rule) = mode.hot_pages() {
            disk.push(format!(",hot-pages={rule}"));
        }
        if let Some(options) = mode.nvm_options() {
            disk.push("=");
            disk.push(self.tmpfs.path().join(format!("nvm-{number}")));
            // As many times slower as the drive is.
            let latency = (NVM_LATENCY_NS * plan.time_scale).round();
            let bandwidth = (NVM_BANDWIDTH_MB / plan.time_scale).round().max(1.0);
            disk.push(format!(
                ",nvm-size={},nvm-latency={latency},nvm-bandwidth={bandwidth}{options}",
                plan.journal_mib
            ));
        }
        if let Some(server) = &self.journal_server {
            disk.push(format!("={}/data-{number}", server.address()));
            words.push("--remote-insecure".into());
        }
        disk.push(",model=");
        disk.push(self.directory.path().join("model"));
        words.extend(["--disk".into(), disk]);
        if mode.has_journal_in_tmpfs() {
            let journal = self.tmpfs.path().join(format!("journal-{number}.img"));
            let mib = u32::try_from(plan.journal_mib).unwrap_or(u32::MAX);
            image::journal_device(&journal, mib, u32::try_from(BLOCK_BYTES).unwrap_or(4096))?;
            image::attach_journal(&FileSystem::whole(image), &journal)?;
            let mut disk = journal.into_os_string();
            disk.push(",for=data,name=journal");
            if mode == Mode::TmpfsSlowed {
                disk.push(",model=");
                disk.push(self.directory.path().join("memory"));
            }
            words.extend(["--journal-disk".into(), disk]);
        }
        let area = self.tmpfs.path().join(format!("area-{number}"));
        std::fs::create_dir(&area).at("make", &area)?;
        let samples = self.directory.path().join(format!("samples-{number}.jsonl"));
        words.extend(["--samples".into(), samples.clone().into(), "--shm".into(), area.clone().into()]);
        words.extend(["--report".into(), report.clone().into()]);
        self.samples.push((samples, Instant::now()));
        self.areas.push(area);
        self.reports.push(report);
        Ok(words)
    }

    pub(crate) fn note_phase(&mut self, name: &str, begun: Instant) {
        self.phases.insert(name.to_owned(), begun.elapsed().as_secs_f64());
    }

    /// From here on the modelled disk is as slow as it should be.
    pub(crate) fn set_pace(&self) {
        self.server.set_time_scale(self.time_scale);
    }

    /// Lets all guests begin.
    pub(crate) fn go(&self) -> Result<()> {
        self.set_pace();
        Ok(self.guests.iter().try_for_each(|guest| guest.tell("go"))?)
    }
}

/// What a guest's random choices follow from.
pub(crate) fn guest_seed(parameters: &Parameters, cell: &Cell, number: u32) -> u64 {
    parameters.seed * 1_000_003 + u64::from(cell.iteration) * 1009 + u64::from(number)
}

/// What a guest's workload follows from.
pub(crate) fn sizes(parameters: &Parameters, cell: &Cell, number: u32) -> Sizes {
    let seed = guest_seed(parameters, cell, number);
    Sizes { scale: parameters.scale, seed, parameter: cell.group.parameter }
}

pub(crate) fn workload_of(cell: &Cell) -> Result<Workload> {
    let name = &cell.group.workload;
    Workload::by_name(name).ok_or_else(|| Error::Told(format!("there is no workload '{name}'")))
}

/// The first line of an error: consoles are kept elsewhere.
pub(crate) fn first_line(text: &str) -> &str {
    text.lines().next().unwrap_or_default()
}

/// A guest that needs modules gets a kernel that has some, on whatever runs that one: beside the others' it would be compared with
/// what is not the same.
fn same_platform(of_run: &str, own: &str, mode: Mode) -> Result<()> {
    if of_run == own {
        return Ok(());
    }
    Err(Error::Told(format!(
        "guests of mode {mode} need modules, which the kernel of this run ({of_run}) has not; they would run on {own}, and be compared \
         with guests that do not: set ACCEL=tcg for the whole run"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guests_of_another_platform_are_refused() {
        assert!(same_platform("tcg, Linux 6.1", "tcg, Linux 6.1", Mode::Ramdisk).is_ok());
        let refused = same_platform("kvm, Linux 6.12", "tcg, Linux 6.1", Mode::Ramdisk).unwrap_err().to_string();
        assert!(refused.contains("ramdisk") && refused.contains("tcg, Linux 6.1"), "{refused}");
    }
}
