//! One trial: a case, a seed, and who serves the disk. A guest works and is ended; what it left is looked at from outside, and
//! by a fresh guest that mounts it.

use crate::case::{Case, Wanted};
use crate::disk::Disks;
use crate::killer::Killer;
use guest_kit::image::{FileSystem, copy_image};
use guest_kit::journal_server::JournalServer;
use guest_kit::workload::Mode;
use guest_kit::{AtEnd, Cache, Drive, Error, Guest, GuestSpec, Kernel, Reported, Result, judge, program};
use guest_tools::random::Random;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use tempfile::TempDir;

const LIMIT: Duration = Duration::from_secs(300);
const LIBRARY: &str = include_str!("library.sh");
/// How many operations further than at the last step every worker gets before the end.
const OPERATIONS_BEFORE_END: u64 = 40;
/// Of amberlog's log, where something was found.
const LINES_SHOWN: usize = 16;

/// What this guest was started with becomes what the next kernel is started with.
const LOAD_KERNEL: &str = "(cd / && find . -xdev -path ./tmp -prune -o -path ./mnt -prune -o -print | cpio -o -H newc >/tmp/next.cpio) 2>/dev/null
            kexec -l /run/host/kernel --initrd=/tmp/next.cpio --reuse-cmdline >/tmp/out 2>&1 || cannot kexec: $(said /tmp/out)
            rm /tmp/next.cpio";
/// Nothing is written back or unmounted.
const START_KERNEL: &str = "read -r word </dev/ttyS1; kexec -e || bad damaged kexec";

/// How the guest ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// `kill -9` of QEMU.
    Qemu,
    /// `kill -9` of amberlog and QEMU; `recover` finishes.
    Both,
    /// The machine is reset, the same case's kernel mounts again, and then QEMU is killed.
    Reset,
    /// The same with a kernel that the running one starts, which resets the devices itself.
    Kexec,
}

impl End {
    /// For the table.
    pub fn name(self) -> &'static str {
        match self {
            Self::Qemu => "qemu",
            Self::Both => "both",
            Self::Reset => "reset",
            Self::Kexec => "kexec",
        }
    }
}

/// Who serves the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Server {
    /// QEMU itself: the control.
    Qemu,
    /// amberlog, with this placement.
    Amberlog(&'static str),
}

impl Server {
    /// For the table.
    pub fn name(self) -> &'static str {
        match self {
            Self::Qemu => "control",
            Self::Amberlog(placement) => placement,
        }
    }
}

/// What a finding is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// Acknowledged work is not there.
    Lost,
    /// The file system is not whole, cannot be mounted, or stands still.
    Damaged,
}

/// What came of a trial.
#[derive(Debug, Default)]
pub struct Outcome {
    /// Why it cannot be tried.
    pub cannot: Option<String>,
    /// What is wrong.
    pub faults: Vec<(Kind, String)>,
    /// What was seen and is none of the disk's faults.
    pub notes: Vec<String>,
    /// What the trial itself failed of.
    pub failure: Option<String>,
    /// Sync points that were acknowledged.
    pub acknowledged: u64,
    /// A kernel said that it forgets its orphans, as it does where the case has it note an error: no loss of the disk's.
    pub forgets_orphans: bool,
    /// How often the process that serves the guest was killed, and another one went on.
    pub worker_kills: u64,
}

impl Outcome {
    fn hear(&mut self, case: &Case, reported: &Reported) {
        self.forgets_orphans |= case.notes_error() && reported.marks.iter().any(|mark| mark == "orphans forgotten");
    }

    fn fault(&mut self, kind: Kind, text: impl Into<String>) {
        self.faults.push((kind, text.into()));
    }

    /// Notes what e2fsck and the kernel complain of, and does not count it. What is lost, cannot be mounted or stands still counts.
    fn excuse_complaints(&mut self, why: &str) {
        let is_complaint = |(kind, text): &mut (Kind, String)| {
            *kind == Kind::Damaged && ["e2fsck", "the fresh kernel says"].iter().any(|who| text.starts_with(who))
        };
        for (_, text) in self.faults.extract_if(.., is_complaint) {
            self.notes.push(format!("{why}: {text}"));
        }
    }
}

/// All choices of a trial, which follow from case, seed and server.
pub struct Trial<'a> {
    case: &'a Case,
    seed: u64,
    pub server: Server,
    pub mode: Mode,
    pub end: End,
    cache: Cache,
    moment: Duration,
    worker_kills: u64,
}

/// A worker whose work has to be there: its name, its seed, and the last operation that it was told is durable.
struct Stream {
    name: String,
    seed: u64,
    acknowledged: Option<u64>,
}

impl<'a> Trial<'a> {
    /// The trial of `seed`; the same choices whoever serves.
    pub fn new(case: &'a Case, seed: u64, server: Server, end: Option<End>) -> Self {
        // One seed is to be many choices in many cases.
        let of_case = case.name.bytes().fold(0, |sum: u64, byte| sum.wrapping_mul(31).wrapping_add(u64::from(byte)));
        let mut random = Random::of(seed, of_case);
        let mode = pick(&mut random, case.modes);
        let cache = pick(&mut random, &[Cache::Writeback, Cache::None]);
        let drawn = pick(&mut random, &[End::Qemu, End::Qemu, End::Both, End::Reset]);
        let moment = Duration::from_millis(random.below(1200));
        let end = if case.by_kexec { End::Kexec } else { end.unwrap_or(drawn) };
        Self { case, seed, server, mode, end, cache, moment, worker_kills: 0 }
    }

    /// The same, with the process that serves the guest killed so many times at most.
    pub fn killing_workers(mut self, kills: u64) -> Self {
        self.worker_kills = kills;
        self
    }

    /// The same in another mode, if one is asked for; the other choices stay as they are.
    pub fn in_mode(mut self, mode: Option<Mode>) -> Self {
        self.mode = mode.unwrap_or(self.mode);
        self
    }

    /// Runs it.
    pub fn run(&self, keep: Option<&Path>) -> Outcome {
        let mut outcome = Outcome::default();
        if let Err(error) = self.attempt(&mut outcome, keep) {
            outcome.failure = Some(error.to_string());
        }
        outcome
    }

    fn attempt(&self, outcome: &mut Outcome, keep: Option<&Path>) -> Result<()> {
        let directory = directory_in(&std::env::temp_dir())?;
        let area = directory_in(Path::new("/dev/shm"))?;
        let regions = directory_in(Path::new("/dev/shm"))?;
        let kernel = match kernel(self.case.kernel) {
            Ok(kernel) => kernel,
            Err(error) => {
                outcome.cannot = Some(format!("no kernel: {error}"));
                return Ok(());
            }
        };
        let disks = Disks::make(self.case, directory.path())?;
        let backup = self.case.has_backup.then(|| self.backup(directory.path(), kernel.as_ref())).transpose()?;
        let streams = self.work(&disks, backup.as_ref(), (area.path(), regions.path()), kernel.as_ref(), outcome)?;
        // Whoever looks into a finding wants it before anybody has mounted it.
        let aside = directory_in(directory.path())?;
        let before = keep.map(|_| disks.copied(aside.path())).transpose()?;
        if outcome.faults.is_empty() && outcome.cannot.is_none() {
            self.judge(&disks, &streams, kernel.as_ref(), outcome)?;
        }
        if self.has_fast_commits() {
            outcome.excuse_complaints("no loss of the disk's, as ext4 does so to fast commits");
        }
        if let Some(keep) = keep.filter(|_| !outcome.faults.is_empty()) {
            let name = format!("{}-{}-{}", self.case.name.replace('/', "-"), self.seed, self.server.name());
            copy_image(&disks.file_system.image, &keep.join(format!("{name}.img")))?;
            if let Some(before) = before {
                copy_image(&before.image, &keep.join(format!("{name}-before.img")))?;
                if let Some(journal) = before.external_journal {
                    copy_image(&journal, &keep.join(format!("{name}-before-journal.img")))?;
                }
            }
        }
        Ok(())
    }

    /// Whether its journal has fast commits. No replay of them is beyond doubt, e2fsck's least of all, on any disk (docs/guarantees.md): what
    /// was acknowledged has to be there, and what e2fsck says of the rest is noted.
    fn has_fast_commits(&self) -> bool {
        self.case.recipe.features.iter().any(|feature| feature == "fast_commit")
    }

    /// Whether work is looked at only where nobody was at it: the mode does not promise more.
    fn is_loose(&self) -> bool {
        self.mode != Mode::Journal || self.case.is_full
    }

    fn spec(&self, name: &str, script: String, kernel: Option<&Kernel>) -> GuestSpec {
        let mut spec = GuestSpec::new(name, script);
        spec.at_end = AtEnd::Stay;
        spec.kernel = kernel.cloned();
        spec.machine = self.case.machine.to_owned();
        spec.memory_mib = self.case.memory_mib;
        spec.programs = self.case.programs.to_vec();
        // An emulated timer on a busy host is too slow for the kernel's test of it.
        spec.kernel_arguments = "no_timer_check".to_owned();
        if kernel.is_some_and(|kernel| kernel.modules.is_some()) {
            let wants = |word: &str| self.case.steps.contains(word);
            spec.modules.extend(wants("loop").then(|| "loop".to_owned()));
            spec.modules.extend(wants("suspend").then(|| "rtc-cmos".to_owned()));
            spec.modules.extend(self.case.machine.starts_with("microvm").then(|| "virtio_console".to_owned()));
            spec.modules.extend(self.case.recipe.features.iter().any(|f| f == "quota").then(|| "quota_v2".to_owned()));
        }
        spec
    }

    fn settings(&self, device: &str) -> String {
        let case = self.case;
        let mut rest = String::new();
        if !case.mount.is_empty() {
            rest.push_str(&format!(",{}", case.mount));
        }
        if case.external_mib.is_some() {
            rest.push_str(",journal_path=/dev/vdb");
        }
        let mut mix = String::new();
        let loose = if self.is_loose() { "--untouched" } else { "" };
        if self.is_loose() {
            mix.push_str("--sync-all ");
        }
        if case.is_full {
            mix.push_str("--patient");
        }
        format!(
            "DISK={device} REST='{rest}' MOUNT='-t ext4 -o data={}{rest}' MIX='{mix}' LOOSE='{loose}' SEED={}\n",
            self.mode.name(),
            self.seed % 1_000_000_000,
        )
    }

    fn script(&self, device: &str, backup: Option<&(PathBuf, Vec<Stream>)>) -> String {
        let backup = backup.map_or_else(String::new, |(_, streams)| {
            let entry = |stream: &Stream| {
                format!("{}:{}:{} ", stream.name, stream.seed, stream.acknowledged.unwrap_or_default())
            };
            format!("BACKUP=/dev/vdb BACKUP_STREAMS='{}'\n", streams.iter().map(entry).collect::<String>())
        });
        format!(
            "{}{backup}{LIBRARY}
            up || cannot mount: $(said /tmp/mount.err) $(last_words)
            for left in /mnt/w*; do
                [ ! -e $left ] || {{ mark back again; sleep 1000; }}
            done
            next
            settle
            {}
            settle 16
            {}
            streams=; while read -r name seed; do streams=\"$streams $name:$seed\"; done </tmp/started
            mark working $streams
            {}
            wait",
            self.settings(device),
            self.case.steps,
            if self.case.by_kexec { LOAD_KERNEL } else { "" },
            if self.case.by_kexec { START_KERNEL } else { "" },
        )
    }

    /// A live copy of another guest's file system, with the work that has to be in it.
    fn backup(&self, directory: &Path, kernel: Option<&Kernel>) -> Result<(PathBuf, Vec<Stream>)> {
        let directory = directory.join("backup");
        std::fs::create_dir(&directory).map_err(|source| at("create", &directory, source))?;
        let disks = Disks::make(self.case, &directory)?;
        let plain = Case { steps: "", has_backup: false, ..self.case.clone() };
        let trial = Trial {
            case: &plain,
            seed: self.seed + 500,
            server: Server::Qemu,
            end: End::Qemu,
            worker_kills: 0,
            ..*self
        };
        let mut outcome = Outcome::default();
        let streams = trial.work(&disks, None, (&directory, &directory), kernel, &mut outcome)?;
        if let Some(reason) = outcome.cannot.or(outcome.faults.pop().map(|(_, text)| text)) {
            return Err(Error::Assets(format!("no backup can be made: {reason}")));
        }
        Ok((disks.file_system.image, streams))
    }

    /// Runs the guest to its end, and amberlog; gives whose work has to be there.
    fn work(
        &self,
        disks: &Disks,
        backup: Option<&(PathBuf, Vec<Stream>)>,
        (area, regions): (&Path, &Path),
        kernel: Option<&Kernel>,
        outcome: &mut Outcome,
    ) -> Result<Vec<Stream>> {
        let mut spec = self.spec(&self.case.name, self.script(disks.device, backup), kernel);
        if self.case.by_kexec {
            let kernel = kernel.cloned().map_or_else(|| Kernel::stock().cloned(), Ok)?;
            let content = std::fs::read(&kernel.image).map_err(|source| at("read", &kernel.image, source))?;
            spec.files.push(("kernel".to_owned(), content));
        }
        spec.reboots = self.end == End::Reset;
        let image = &disks.file_system.image;
        let journal = disks.file_system.external_journal.as_ref();
        let journal_server = match self.server {
            Server::Amberlog("remote") => {
                Some(JournalServer::start(&program::workspace_binary("amberlog")?, &regions.join("store"))?)
            }
            _ => None,
        };
        let mut words: Vec<OsString> = Vec::new();
        let spec = match self.server {
            Server::Qemu => {
                let all = [Some(image), journal, backup.map(|(path, _)| path)].into_iter().flatten();
                spec.drives(all.map(|path| Drive::new(path, self.cache)).collect())
            }
            Server::Amberlog(placement) => {
                let mut disk = OsString::from(image);
                // Mistakes with protected pages show where most pages are protected.
                let rule = pick(&mut Random::of(self.seed, 5), &["never", "foreseen", "lone"]);
                disk.push(format!(",placement={}", option_of(placement, rule, &regions.join("region"), image)));
                if let Some(server) = &journal_server {
                    disk.push(format!("={}", server.journal()));
                    words.push("--remote-insecure".into());
                }
                words.splice(..0, [program::workspace_binary("amberlog")?.into(), "run".into()]);
                words.extend(["--shm".into(), area.into(), "--disk".into(), disk]);
                if self.worker_kills > 0 {
                    words.extend(["--deaths-max".into(), "1000000".into()]);
                }
                if let Some(journal) = journal {
                    words.extend(["--journal-disk".into(), journal.into()]);
                }
                if let Some((path, _)) = backup {
                    words.extend(["--disk".into(), path.into()]);
                }
                spec.wrapper(words.clone())
            }
        };
        let mut guest = Guest::start(spec)?;
        // Before its steps nobody is killed: how a guest boots is the same in all cases.
        let is_begun = |reported: &Reported| {
            reported.acknowledged.len() >= 2 || reported.exit_code.is_some() || !reported.marks.is_empty()
        };
        guest.await_report("its workers did not begin", LIMIT, |reported| is_begun(reported).then_some(()))?;
        let killer = (self.worker_kills > 0).then(|| Killer::start(guest.process_id(), self.worker_kills, self.seed));
        let told = guest.await_report("its steps did not end", LIMIT, |reported| {
            let ended = reported.exit_code.map(|code| format!("bad damaged the script ended with {code}"));
            let told = |mark: &&String| ["cannot ", "bad ", "working "].iter().any(|word| mark.starts_with(word));
            ended.or_else(|| reported.marks.iter().find(told).cloned())
        })?;
        let Some(entries) = told.strip_prefix("working ") else {
            match told.split_once(' ') {
                Some(("cannot", reason)) => outcome.cannot = Some(reason.to_owned()),
                Some((_, text)) if text.starts_with("lost ") => outcome.fault(Kind::Lost, &text[5..]),
                _ => outcome.fault(Kind::Damaged, told.trim_start_matches("bad damaged ")),
            }
            show_last_words(&guest, outcome);
            guest.forgive();
            return Ok(Vec::new());
        };
        let mut streams = Vec::new();
        for entry in entries.split_whitespace() {
            let (name, seed) = entry.split_once(':').unwrap_or((entry, "0"));
            let seed = seed.split(':').next().and_then(|seed| seed.parse().ok()).unwrap_or(0);
            streams.push(Stream { name: name.to_owned(), seed, acknowledged: None });
        }
        // The last two work on.
        for stream in streams.iter().rev().take(2) {
            let last = guest.acknowledged(&stream.name).last.unwrap_or(0);
            guest.wait_acknowledged(&stream.name, last + OPERATIONS_BEFORE_END, LIMIT)?;
        }
        std::thread::sleep(self.moment);
        if let Some(killer) = killer {
            outcome.worker_kills = killer.stop();
            // Nothing of what the guest does to itself is an error of its disk.
            let console = guest.console();
            for line in console.lines().filter(|line| line.contains("I/O error, dev ")) {
                outcome.fault(Kind::Damaged, format!("the guest noticed that a worker died: {line}"));
            }
        }
        self.end(&mut guest, (area, image, &regions.join("region")), &words, outcome)?;
        let reported = guest.final_report();
        outcome.hear(self.case, &reported);
        let known = backup.map_or(&[][..], |(_, streams)| &streams[..]);
        for stream in &mut streams {
            // Names of workers of the backup were names of workers here, before it was restored.
            let restored = known.iter().find(|other| (&other.name, other.seed) == (&stream.name, stream.seed));
            stream.acknowledged = match restored {
                Some(restored) => restored.acknowledged,
                None => acknowledged(&reported, &stream.name),
            };
            outcome.acknowledged += reported.acknowledged.get(&stream.name).map_or(0, |stream| stream.count);
        }
        let stderr = guest.stderr();
        for line in stderr.lines().filter(|line| line.contains("ERROR") || line.contains("panicked")) {
            outcome.fault(Kind::Damaged, format!("amberlog says: {line}"));
        }
        show_last_words(&guest, outcome);
        guest.forgive();
        Ok(streams)
    }

    fn end(
        &self,
        guest: &mut Guest,
        (area, image, region): (&Path, &Path, &Path),
        words: &[OsString],
        outcome: &mut Outcome,
    ) -> Result<()> {
        match (self.end, self.server) {
            (End::Both, Server::Amberlog(placement)) => {
                guest.kill_all()?;
                let mut recover = Command::new(program::workspace_binary("amberlog")?);
                match placement {
                    // The next one that serves the disk brings it home.
                    "remote" => recover.args(words.iter().skip(1)).args(["--", "true"]),
                    // A region has all that there is; it is no matter of the area's.
                    "nvm" => recover.args(["recover", "--disk"]).arg(image).arg("--nvm").arg(region),
                    _ => recover.args(["recover", "--area"]).arg(area),
                };
                if let Err(error) = program::run(&mut recover, &[0]) {
                    outcome.fault(Kind::Damaged, error.to_string());
                }
            }
            (End::Reset | End::Kexec, _) => {
                match self.end {
                    End::Kexec => guest.tell("kexec")?,
                    _ => guest.qmp()?.system_reset()?,
                }
                let told = guest.await_report("it did not come back", LIMIT, |reported| {
                    let after = reported.marks.iter().skip_while(|mark| !mark.starts_with("working "));
                    after.skip(1).find(|mark| *mark == "back again" || mark.starts_with("cannot ")).cloned()
                })?;
                if told != "back again" {
                    outcome.fault(Kind::Damaged, format!("after a {}: {told}", self.end.name()));
                }
                guest.kill_qemu()?;
            }
            _ => guest.kill_qemu()?,
        }
        guest.wait_end(LIMIT)?;
        if let Server::Amberlog(_) = self.server {
            let left = std::fs::read_dir(area).map_or(0, Iterator::count);
            if left > 0 {
                outcome.fault(Kind::Damaged, format!("{left} files are left in the area"));
            }
        }
        Ok(())
    }

    /// e2fsck, a mount by a fresh guest that looks at the work and works on, e2fsck again.
    fn judge(&self, disks: &Disks, streams: &[Stream], kernel: Option<&Kernel>, outcome: &mut Outcome) -> Result<()> {
        let needs_recovery = judge::needs_recovery(&disks.file_system)?;
        if needs_recovery && !self.has_fast_commits() {
            // A journal on storage is the next kernel's to replay; e2fsck gives up on some that are not.
            let directory = directory_in(&std::env::temp_dir())?;
            let copy = disks.copied(directory.path())?;
            judge::replay_with_e2fsck(&copy)?;
            self.blame(&copy, "e2fsck after its own replay", outcome)?;
        } else if !needs_recovery {
            self.blame(&disks.file_system, "e2fsck", outcome)?;
        }
        let mut looks = String::new();
        for Stream { name, seed, acknowledged } in streams {
            let acknowledged = acknowledged.map_or_else(String::new, |number| number.to_string());
            looks += &format!(
                "guest-tools verify --directory /mnt/{name} --seed {seed} --acknowledged {acknowledged} $LOOSE \
                 2>/tmp/verify.err || mark bad lost {name}: $(head -c 400 /tmp/verify.err)\n"
            );
        }
        let script = format!(
            "{}{LIBRARY}
            up || {{ mark bad damaged a fresh guest cannot mount: $(said /tmp/mount.err) $(last_words); exit 0; }}
            {looks}
            # Whoever is full stays full.
            mkdir -p /mnt/fresh && cp /bin/busybox /mnt/fresh/ 2>/dev/null
            sync; umount /mnt || mark bad damaged a fresh guest cannot unmount
            dmesg | grep -E 'EXT4-fs error|JBD2:.*(error|fail|corrupt)' | head -n 3 | while read -r line; do
                mark bad damaged the fresh kernel says: $line
            done",
            self.settings(disks.device)
        );
        let mut spec = self.spec("fresh", script, kernel);
        spec.at_end = AtEnd::PowerOff;
        let images =
            [Some(&disks.file_system.image), disks.file_system.external_journal.as_ref()].into_iter().flatten();
        let mut guest = Guest::start(spec.drives(images.map(|path| Drive::new(path, Cache::Writeback)).collect()))?;
        guest.wait_exit_code(LIMIT)?;
        guest.wait_end(LIMIT)?;
        let reported = guest.final_report();
        outcome.hear(self.case, &reported);
        for mark in reported.marks {
            if let Some(text) = mark.strip_prefix("bad lost ") {
                outcome.fault(Kind::Lost, format!("in a fresh guest: {text}"));
            } else if let Some(text) = mark.strip_prefix("bad damaged ") {
                outcome.fault(Kind::Damaged, text);
            }
        }
        self.blame(&disks.file_system, "e2fsck after the fresh guest", outcome)
    }

    fn blame(&self, file_system: &FileSystem, who: &str, outcome: &mut Outcome) -> Result<()> {
        let mut verdict = judge::check(file_system)?;
        // e2fsck forgets them as a kernel does.
        if outcome.forgets_orphans || (self.case.notes_error() && judge::has_error_noted(file_system)?) {
            judge::forgive_forgotten_orphans(&mut verdict, file_system)?;
            if !verdict.forgotten.is_empty() {
                outcome.notes.push(format!(
                    "{who}: no loss of the disk's, as ext4 forgot them: {}",
                    verdict.forgotten.join("; ")
                ));
            }
        }
        if verdict.needs_recovery {
            outcome.fault(Kind::Damaged, format!("{who}: the journal is not replayed"));
        }
        let count = verdict.problems.len();
        if count > 0 {
            let first = verdict.problems.into_iter().take(4).collect::<Vec<_>>().join("; ");
            outcome.fault(Kind::Damaged, format!("{who}: {count} lines: {first}"));
        }
        Ok(())
    }
}

/// What amberlog and the guest's kernel said last, where something was found.
fn show_last_words(guest: &Guest, outcome: &mut Outcome) {
    if outcome.faults.is_empty() {
        return;
    }
    for (who, said) in [("amberlog", guest.stderr()), ("the guest's kernel", guest.console())] {
        let lines: Vec<&str> = said.lines().collect();
        let last = &lines[lines.len().saturating_sub(LINES_SHOWN)..];
        outcome.fault(Kind::Damaged, format!("the last words of {who}:\n        {}", last.join("\n        ")));
    }
}

fn acknowledged(reported: &Reported, stream: &str) -> Option<u64> {
    reported.acknowledged.get(stream)?.last
}

/// The placement as an option of a disk with this image; where it holds blocks in the guest's pages, with this rule for which are copied.
fn option_of(placement: &str, rule: &str, region: &Path, image: &Path) -> String {
    match placement {
        "nvm" => {
            // The largest journals are a quarter of their images, and a region has to have half of that.
            let image_mib = std::fs::metadata(image).map_or(0, |metadata| metadata.len() >> 20);
            format!("nvm={},nvm-size={}", region.display(), (image_mib / 6).max(64))
        }
        "retain" => format!("retain,hot-pages={rule}"),
        "durable" => format!("retain,durable-within=1,hot-pages={rule}"),
        "durable-0" => format!("retain,durable-within=0,hot-pages={rule}"),
        placement => placement.to_owned(),
    }
}

/// The kernel, or none where the machine's own choice will do.
fn kernel(wanted: Wanted) -> Result<Option<Kernel>> {
    match wanted {
        Wanted::Native => Ok(None),
        Wanted::Stock => Kernel::stock().map(|kernel| Some(kernel.clone())),
        Wanted::Suite(suite) => {
            program::run(Command::new(program::workspace().join("scripts/fetch-kernel.sh")).arg(suite), &[0])?;
            Kernel::unpacked(&program::workspace().join("build/guest/kernels").join(suite)).map(Some)
        }
    }
}

fn pick<T: Copy>(random: &mut Random, choices: &[T]) -> T {
    choices[usize::try_from(random.below(choices.len() as u64)).unwrap_or(0)]
}

fn directory_in(parent: &Path) -> Result<TempDir> {
    tempfile::Builder::new()
        .prefix("variety-")
        .tempdir_in(parent)
        .map_err(|source| at("create a directory in", parent, source))
}

fn at(action: &'static str, path: &Path, source: std::io::Error) -> Error {
    Error::File { action, path: path.to_owned(), source }
}
