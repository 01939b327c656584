//! Guests at once on one modelled disk: images, start, a common beginning, measurements, end.
//!
//! All guests boot and prepare, drop their caches and wait; when the last one is ready all are told to begin, so that
//! they contend for the disk as the paper's did. Times are the guests' own, bytes are amberlog's own counts.
//!
//! Failure story: a guest that does not end in time fails its cell; all guests of the cell are killed and their
//! consoles kept.

use crate::cell::{Cell, Mode};
use crate::error::{Error, FileContext, Result};
use crate::results::{CellResult, Parameters};
use crate::workload::{Sizes, Workload};
use disk_model::{Profile, Server, ServerOptions, Totals};
use guest_kit::image::{self, ExtRecipe, FileSystem, Journal};
use guest_kit::{Guest, GuestSpec, Reported, program};
use serde_json::Value;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// ext3's journal on such a disk, in MiB.
const JOURNAL_MIB: u64 = 128;
/// The smallest that jbd2 takes with room to spare, in MiB.
const JOURNAL_MIB_MIN: u64 = 8;
/// Bytes of a block of the guests' file systems.
pub const BLOCK_BYTES: u64 = 4096;
/// How often a cell's guests are booted at most.
const BOOTS_MAX: u32 = 3;
const BOOT_LIMIT: Duration = Duration::from_secs(600);

/// Where images are made, and fresh ones to copy.
pub struct Rig {
    directory: TempDir,
    fresh: BTreeMap<(u32, u64, bool), PathBuf>,
    /// Where consoles of failed guests go.
    consoles: PathBuf,
}

/// The guests of one cell, started; with the disk that they share.
pub(crate) struct Running {
    pub(crate) guests: Vec<Guest>,
    pub(crate) images: Vec<PathBuf>,
    pub(crate) reports: Vec<PathBuf>,
    /// Where each guest's memory and tables are.
    pub(crate) areas: Vec<PathBuf>,
    pub(crate) server: Server,
    directory: TempDir,
    tmpfs: TempDir,
}

impl Rig {
    /// A rig with its images in `images`, or where temporary files go.
    ///
    /// # Errors
    /// When no directory can be made there.
    pub fn new(images: Option<&Path>, consoles: PathBuf) -> Result<Self> {
        let parent = images.map_or_else(std::env::temp_dir, Path::to_owned);
        let directory = tempfile::Builder::new().prefix("amberlog-lab-").tempdir_in(&parent).at("write in", &parent)?;
        Ok(Rig { directory, fresh: BTreeMap::new(), consoles })
    }

    /// The journal of a cell, in MiB: the experiment's parameter if that is what it is, or the default to scale.
    fn journal_mib(cell: &Cell, parameters: &Parameters, parameter: Option<&str>) -> u64 {
        let full = match parameter {
            // ext3's transactions hold a quarter of the log at most.
            Some("transaction_mib") => cell.group.parameter * 4,
            Some("journal_mib") => cell.group.parameter,
            _ => JOURNAL_MIB,
        };
        crate::workload::part(full, parameters.scale).max(JOURNAL_MIB_MIN)
    }

    /// A fresh file system, made once and then copied (sparse).
    fn image(
        &mut self,
        to: &Path,
        cell: &Cell,
        journal_mib: u64,
        internal: bool,
        parameters: &Parameters,
    ) -> Result<()> {
        let image_mib = workload_of(cell)?.image_mib();
        let key = (image_mib, journal_mib, internal);
        if !self.fresh.contains_key(&key) {
            let path = self.directory.path().join(format!("fresh-{image_mib}-{journal_mib}-{internal}.img"));
            let journal = u32::try_from(journal_mib).unwrap_or(u32::MAX);
            let mut recipe = if parameters.file_system == "ext3" {
                ExtRecipe::ext3(image_mib, journal)
            } else {
                ExtRecipe::ext4(image_mib, journal)
            };
            if !internal {
                recipe.journal = Journal::None;
            }
            recipe.make(&path)?;
            self.fresh.insert(key, path);
        }
        Ok(image::copy_image(&self.fresh[&key], to)?)
    }

    /// Boots the cell's guests with a script each; returns when all have told `mark ready`. Nothing has been measured by
    /// then, so a guest that does not come up is tried again (emulated ones fail now and then on a busy machine).
    pub(crate) fn start(
        &mut self,
        cell: &Cell,
        parameters: &Parameters,
        parameter: Option<&str>,
        script: impl Fn(u32) -> String,
    ) -> Result<Running> {
        for _ in 1..BOOTS_MAX {
            match self.boot(cell, parameters, parameter, &script) {
                Err(error @ Error::Guest(_)) => eprintln!("    once more: {}", first_line(&error.to_string())),
                other => return other,
            }
        }
        self.boot(cell, parameters, parameter, &script)
    }

    fn boot(
        &mut self,
        cell: &Cell,
        parameters: &Parameters,
        parameter: Option<&str>,
        script: &impl Fn(u32) -> String,
    ) -> Result<Running> {
        let group = &cell.group;
        let directory = tempfile::tempdir_in(self.directory.path()).at("write in", self.directory.path())?;
        let tmpfs_parent = Path::new("/dev/shm");
        let tmpfs =
            tempfile::Builder::new().prefix("amberlog-lab-").tempdir_in(tmpfs_parent).at("write in", tmpfs_parent)?;
        let profile: Profile = group.disk.parse().map_err(Error::Told)?;
        let socket = directory.path().join("model");
        let seed = parameters.seed + u64::from(cell.iteration);
        let server = Server::start(ServerOptions {
            profile,
            seed,
            time_scale: parameters.time_scale,
            socket: Some(socket.clone()),
        })?;
        let amberlog = program::workspace_binary("amberlog")?;
        let journal_mib = Self::journal_mib(cell, parameters, parameter);
        let mut running = Running {
            guests: Vec::new(),
            images: Vec::new(),
            reports: Vec::new(),
            areas: Vec::new(),
            server,
            directory,
            tmpfs,
        };
        for number in 0..group.guests {
            let image = running.directory.path().join(format!("disk-{number}.img"));
            let report = running.directory.path().join(format!("report-{number}.json"));
            let external = group.mode == Mode::Tmpfs;
            let internal = !matches!(group.mode, Mode::Tmpfs | Mode::NoJournal);
            self.image(&image, cell, journal_mib, internal, parameters)?;
            let mut words: Vec<OsString> = vec![amberlog.clone().into(), "run".into(), "--disk".into()];
            let mut disk = image.clone().into_os_string();
            disk.push(format!(",name=data,placement={}", group.mode.placement()));
            if let Some(options) = group.mode.nvm_options() {
                disk.push("=");
                disk.push(running.tmpfs.path().join(format!("nvm-{number}")));
                // The paper's memory: 300 ns a write, 1 GB/s.
                disk.push(format!(",nvm-size={journal_mib},nvm-latency=300,nvm-bandwidth=1000{options}"));
            }
            disk.push(",model=");
            disk.push(&socket);
            words.push(disk);
            if external {
                let journal = running.tmpfs.path().join(format!("journal-{number}.img"));
                let mib = u32::try_from(journal_mib).unwrap_or(u32::MAX);
                image::journal_device(&journal, mib, u32::try_from(BLOCK_BYTES).unwrap_or(4096))?;
                image::attach_journal(&FileSystem::whole(&image), &journal)?;
                let mut disk = journal.into_os_string();
                disk.push(",for=data,name=journal");
                words.extend(["--journal-disk".into(), disk]);
            }
            let area = running.tmpfs.path().join(format!("area-{number}"));
            std::fs::create_dir(&area).at("make", &area)?;
            words.extend(["--report".into(), report.clone().into(), "--shm".into(), area.clone().into()]);
            running.areas.push(area);
            let mut spec = GuestSpec::new(format!("{cell}, guest {number}"), script(number)).wrapper(words);
            spec.memory_mib = parameters.guest_mib;
            spec.programs = workload_of(cell)?.programs().to_vec();
            // The kernel's test of its timer fails where the emulator was kept from running for a moment.
            spec.kernel_arguments = "no_timer_check".to_owned();
            spec.environment = vec![("AMBERLOG_LOG".into(), "warn".into())];
            running.guests.push(Guest::launch(spec)?);
            running.images.push(image);
            running.reports.push(report);
        }
        for number in 0..running.guests.len() {
            if let Err(error) = running.guests[number].wait_mark("ready", BOOT_LIMIT) {
                self.keep_console(&running.guests[number], cell, number);
                return Err(error.into());
            }
        }
        Ok(running)
    }

    /// The shell lines up to the common beginning.
    pub(crate) fn preamble(cell: &Cell, workload: Workload, parameters: &Parameters, number: u32) -> String {
        format!(
            "set -e
             mount -t ext4 -o {options} /dev/vda /mnt || fail mount
             {prepare}
             sync
             echo 3 >/proc/sys/vm/drop_caches
             exec 5</dev/ttyS1
             mark ready
             read -r go <&5
             read -r begin rest </proc/uptime",
            options = cell.group.mode.mount_options(),
            prepare = workload.prepare(sizes(parameters, cell, number)),
        )
    }

    /// Runs a workload to its end in all guests of a cell.
    ///
    /// # Errors
    /// When a guest fails or hangs; its console is kept.
    pub fn load(&mut self, cell: &Cell, parameters: &Parameters, parameter: Option<&str>) -> Result<CellResult> {
        let started = Instant::now();
        let workload = workload_of(cell)?;
        let mut running = self.start(cell, parameters, parameter, |number| {
            format!(
                "{preamble}
                 {load} >/tmp/result
                 read -r loaded rest </proc/uptime
                 sync
                 read -r synced rest </proc/uptime
                 mark stat $(cat /sys/block/vda/stat)
                 umount /mnt
                 read -r ended rest </proc/uptime
                 mark times $begin $loaded $synced $ended
                 grep -e phase= /tmp/result | sed 's/^/mark result /' >/dev/ttyS1 || true",
                preamble = Self::preamble(cell, workload, parameters, number),
                load = workload.load(sizes(parameters, cell, number)),
            )
        })?;
        let before = running.server.totals();
        running.guests.iter().try_for_each(|guest| guest.tell("go"))?;
        let limit = time_limit(workload, cell, parameters);
        let mut result = CellResult {
            cell: cell.clone(),
            parameters: parameters.clone(),
            guests: Vec::new(),
            model: BTreeMap::new(),
            wall_seconds: 0.0,
            load: String::new(),
            failure: None,
        };
        let deadline = Instant::now() + limit;
        for index in 0..running.guests.len() {
            let outcome = finish(&mut running.guests[index], deadline)
                .and_then(|reported| measured(cell.group.mode, &reported, &running.reports[index]));
            match outcome {
                Ok(fields) => result.guests.push(fields),
                Err(error) => {
                    let console = self.keep_console(&running.guests[index], cell, index);
                    result.failure = Some(format!("guest {index}: {}{console}", first_line(&error.to_string())));
                    break;
                }
            }
        }
        result.model = totals(running.server.totals(), before);
        result.wall_seconds = started.elapsed().as_secs_f64();
        result.load = crate::machine::load();
        Ok(result)
    }

    /// Keeps the console of a guest that failed; gives words for the message.
    pub(crate) fn keep_console(&self, guest: &Guest, cell: &Cell, number: usize) -> String {
        let path = self.consoles.join(format!("{}-guest{number}.log", cell.file_name()));
        let text = format!("{}\n--- stderr of QEMU and amberlog\n{}", guest.console(), guest.stderr());
        let kept = std::fs::create_dir_all(&self.consoles).and_then(|()| std::fs::write(&path, text));
        match kept {
            Ok(()) => format!("; its console is in {}", path.display()),
            Err(error) => format!("; its console could not be kept: {error}"),
        }
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

/// Many times what it should take: a guest beyond it hangs.
pub(crate) fn time_limit(workload: Workload, cell: &Cell, parameters: &Parameters) -> Duration {
    let share = f64::from(cell.group.guests) * parameters.time_scale.max(1.0);
    Duration::from_secs_f64(120.0 + workload.seconds() * parameters.scale * share * 10.0)
}

fn finish(guest: &mut Guest, deadline: Instant) -> Result<Reported> {
    let left = || deadline.saturating_duration_since(Instant::now());
    let code = guest.wait_exit_code(left())?;
    if code != 0 {
        return Err(guest.failure(&format!("its script ended with {code}")).into());
    }
    let status = guest.wait_end(left().max(Duration::from_secs(60)))?;
    if !status.success() {
        return Err(guest.failure(&format!("QEMU or amberlog ended with {status}")).into());
    }
    Ok(guest.final_report())
}

/// What a guest told and what amberlog counted, as fields.
fn measured(mode: Mode, reported: &Reported, report: &Path) -> Result<BTreeMap<String, f64>> {
    let mut fields = counters(mode, report)?;
    if mode == Mode::Tmpfs {
        // amberlog writes that journal to storage as it sees it, which is the host's memory.
        let home = fields.get("home_bytes_to_storage").copied().unwrap_or(0.0);
        fields.insert("bytes_to_storage".to_owned(), home);
    }
    let told = |name: &str| {
        let mark = reported.marks.iter().find_map(|mark| mark.strip_prefix(name));
        mark.map(str::to_owned).ok_or_else(|| Error::Told(format!("a guest did not tell '{name}'")))
    };
    let times: Vec<f64> = told("times ")?.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    let [begin, loaded, synced, ended] = times[..] else {
        return Err(Error::Told("a guest's times are not four numbers".to_owned()));
    };
    fields.insert("seconds".to_owned(), synced - begin);
    fields.insert("seconds_unsynced".to_owned(), loaded - begin);
    fields.insert("seconds_unmounted".to_owned(), ended - begin);
    if let Ok(result) = told("result phase=run ") {
        fields.extend(result.split_whitespace().filter_map(|word| {
            let (name, value) = word.split_once('=')?;
            Some((if name == "seconds" { "run_seconds".to_owned() } else { name.to_owned() }, value.parse().ok()?))
        }));
    }
    Ok(fields)
}

/// amberlog's report of the data disk, flattened.
#[allow(clippy::cast_precision_loss)]
pub(crate) fn counters(mode: Mode, report: &Path) -> Result<BTreeMap<String, f64>> {
    let text = std::fs::read(report).at("read", report)?;
    let damaged = |reason: String| Error::Damaged { path: report.to_owned(), reason };
    let value: Value = serde_json::from_slice(&text).map_err(|error| damaged(error.to_string()))?;
    let disk = &value["disks"][0];
    if disk["journal"]["kind"] == "none" && mode != Mode::NoJournal {
        return Err(damaged("amberlog found no journal on the data disk".to_owned()));
    }
    let mut fields = BTreeMap::new();
    for (name, value) in disk["counters"].as_object().into_iter().flatten() {
        fields.extend(value.as_u64().map(|value| (name.clone(), value as f64)));
    }
    for (name, value) in disk["recovery"].as_object().into_iter().flatten() {
        fields.extend(value.as_f64().map(|value| (format!("recovery_{name}"), value)));
    }
    for (name, value) in disk["nvm"].as_object().into_iter().flatten() {
        fields.extend(value.as_u64().map(|value| (format!("nvm_{name}"), value as f64)));
    }
    let of = |name: &str| fields.get(name).copied().unwrap_or(0.0);
    // Where the journal is, be it storage, a RAM disk or persistent memory.
    let journal = if mode.nvm_options().is_some() { of("nvm_bytes_to_nvm") } else { of("journal_bytes_to_storage") };
    let bytes = of("journal_bytes_to_storage") + of("home_bytes_to_storage") + of("recovery_bytes_written");
    fields.insert("bytes_to_storage".to_owned(), bytes);
    fields.insert("journal_write_bytes".to_owned(), journal);
    Ok(fields)
}

#[allow(clippy::cast_precision_loss)]
fn totals(now: Totals, before: Totals) -> BTreeMap<String, f64> {
    let fields = [
        ("reads", now.reads - before.reads),
        ("read_bytes", now.read_bytes - before.read_bytes),
        ("writes", now.writes - before.writes),
        ("write_bytes", now.write_bytes - before.write_bytes),
        ("flushes", now.flushes - before.flushes),
        ("transfers", now.transfers - before.transfers),
        ("positioning_ms", (now.positioning_ns - before.positioning_ns) / 1_000_000),
        ("busy_ms", (now.busy_ns - before.busy_ns) / 1_000_000),
        ("queue_max", now.queue_max),
    ];
    fields.into_iter().map(|(name, value)| (name.to_owned(), value as f64)).collect()
}

/// The first line of an error: consoles are kept elsewhere.
pub(crate) fn first_line(text: &str) -> &str {
    text.lines().next().unwrap_or_default()
}
