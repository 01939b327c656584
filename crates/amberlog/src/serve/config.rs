//! The daemon's configuration: a TOML file, read whole and checked before anything of it counts.
//!
//! Disks are written as on the command line of `amberlog run`, so that what was tried there can be copied.

use super::access::{Access, AccessEntry};
use super::cpus::Cpus;
use crate::metrics::endpoint::Address;
use crate::vm::{DiskOption, JournalDiskOption, Threads, VmOptions};
use anyhow::{Context, bail, ensure};
use command_line::remote_options::RemoteTrust;
use serde::Deserialize;
use std::collections::{BTreeMap, HashMap};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use supervision::OnCrash;

/// Bytes of a configuration file.
const BYTES_MAX: u64 = 1 << 20;
/// Where Linux ends a Unix socket's path, the final zero included (unix(7)).
const SOCKET_PATH_MAX: usize = 108;

/// The file as it is written.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default = "placement::own_place")]
    shm: PathBuf,
    #[serde(default = "crate::client::default_run")]
    run: PathBuf,
    reports: Option<PathBuf>,
    #[serde(default)]
    remote: RemoteTrust,
    #[serde(default)]
    sockets: AccessEntry,
    #[serde(default)]
    metrics: MetricsEntry,
    #[serde(default)]
    migration: MigrationEntry,
    #[serde(default)]
    memory: MemoryEntry,
    #[serde(default, rename = "vm")]
    vms: Vec<VmEntry>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct MetricsEntry {
    #[serde(default)]
    listen: Vec<String>,
    /// Of its Unix sockets.
    #[serde(default)]
    socket: AccessEntry,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct MigrationEntry {
    /// Guests may be moved to other hosts while they run.
    #[serde(default)]
    experimental: bool,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct MemoryEntry {
    /// For tables and copied blocks of all VMs together; each has its own bound besides.
    budget_mib: Option<u64>,
}

/// Where metrics are, and who may connect to the Unix sockets among these places.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MetricsConfig {
    /// Sockets and addresses; none: off.
    pub addresses: Vec<Address>,
    /// Of the Unix sockets.
    pub access: Access,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct VmEntry {
    name: String,
    #[serde(default)]
    disks: Vec<String>,
    #[serde(default)]
    journal_disks: Vec<String>,
    #[serde(default = "default_budget")]
    memory_budget_mib: u64,
    #[serde(default)]
    threads: Threads,
    remote: Option<RemoteTrust>,
    sockets: Option<AccessEntry>,
    #[serde(default, rename = "on-crash")]
    on_crash: OnCrash,
    cpus: Option<String>,
    /// Where its VMM's monitor listens (QMP).
    monitor: Option<PathBuf>,
    /// How long its guest may take to shut down.
    shutdown_seconds: Option<u64>,
}

/// How long a guest has to shut down, if nothing is said, in seconds; and at most.
const SHUTDOWN_SECONDS: u64 = 60;
const SHUTDOWN_SECONDS_MAX: u64 = 3600;

fn default_budget() -> u64 {
    256
}

/// How a guest is asked to shut down.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shutdown {
    /// Where its VMM's monitor listens.
    pub monitor: PathBuf,
    /// How long it has for it.
    pub patience: Duration,
}

/// One VM, as configured. Equal ones need no restart.
#[derive(Clone, Debug)]
pub struct VmConfig {
    /// What it is made from.
    pub options: VmOptions,
    /// The daemon's directory, in which that of its sockets is.
    pub run: PathBuf,
    /// Where its sockets are.
    pub sockets: PathBuf,
    /// Who may connect to them.
    pub access: Access,
    /// Where its report goes when its VMM has ended.
    pub report: Option<PathBuf>,
    /// What becomes of it when its worker dies. In effect at once.
    pub on_crash: OnCrash,
    /// How its guest is asked to shut down when the daemon ends, if it is. In effect at once.
    pub shutdown: Option<Shutdown>,
    /// On which processors its worker works for its guest.
    pub cpus: Option<Cpus>,
    /// What the file says of it, for a comparison.
    text: String,
    /// The same without its disks.
    apart_from_disks: String,
    /// The whole file, for whoever goes on with it.
    pub source: Arc<str>,
}

impl PartialEq for VmConfig {
    fn eq(&self, other: &Self) -> bool {
        self.text == other.text
    }
}

/// What disks one configuration of a VM has that another has not, by name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskChanges {
    /// Disks that come.
    pub added: Vec<String>,
    /// Disks that go.
    pub removed: Vec<String>,
}

impl VmConfig {
    /// What of the disks is otherwise in `wanted`, if only disks come and go.
    ///
    /// # Errors
    /// What else is otherwise, which takes effect when its VMM has ended.
    pub fn disk_changes(&self, wanted: &VmConfig) -> anyhow::Result<DiskChanges> {
        ensure!(
            self.apart_from_disks == wanted.apart_from_disks,
            "more than its disks is changed, which takes effect when its VMM has ended"
        );
        let name = |disk: &DiskOption| disk.name.clone().unwrap_or_default();
        let without = |all: &[DiskOption], others: &[DiskOption]| {
            let is_there = |disk: &&DiskOption| others.iter().any(|other| other.name == disk.name);
            all.iter().filter(|disk| !is_there(disk)).map(name).collect::<Vec<_>>()
        };
        for disk in &wanted.options.disks {
            let now = self.options.disks.iter().find(|now| now.name == disk.name);
            ensure!(
                now.is_none_or(|now| format!("{now:?}") == format!("{disk:?}")),
                "disk {} is changed, which takes effect when its VMM has ended; a disk that is to go or to come has a name of its \
                 own (name=)",
                name(disk)
            );
        }
        Ok(DiskChanges {
            added: without(&wanted.options.disks, &self.options.disks),
            removed: without(&self.options.disks, &wanted.options.disks),
        })
    }

    /// The file, with one disk of this VM more.
    ///
    /// # Errors
    /// When the file cannot be read any more, or would be too long.
    pub fn source_with(&self, disk: &DiskOption, text: &str) -> anyhow::Result<String> {
        let name = disk.name.clone().unwrap_or_else(|| format!("disk{}", self.options.disks.len()));
        let is_taken = self.options.disk_names()?.into_iter().any(|(known, _)| known == name);
        ensure!(!is_taken, "it has a disk {name} already; give this one another name (name=)");
        let text = if disk.name.is_some() { text.to_owned() } else { format!("{text},name={name}") };
        self.source_changed(|disks| {
            disks.push(toml::Value::String(text));
            Ok(())
        })
    }

    /// The file, with one disk of this VM less.
    ///
    /// # Errors
    /// When there is no such disk, or it is the only one.
    pub fn source_without(&self, name: &str) -> anyhow::Result<String> {
        let index = self.options.disks.iter().position(|disk| disk.name.as_deref() == Some(name));
        let index = index.with_context(|| format!("it has no disk {name}"))?;
        ensure!(self.options.disks.len() > 1, "disk {name} is the only one, and a VM has at least one");
        self.source_changed(|disks| {
            // A name that was given by the place is said from now on.
            for (disk, option) in disks.iter_mut().zip(&self.options.disks) {
                let text = disk.as_str().context("a disk is not written as text")?;
                let is_named = text.parse::<DiskOption>().is_ok_and(|disk| disk.name.is_some());
                if let Some(name) = option.name.as_ref().filter(|_| !is_named) {
                    *disk = toml::Value::String(format!("{text},name={name}"));
                }
            }
            disks.remove(index);
            Ok(())
        })
    }

    fn source_changed(
        &self,
        change: impl FnOnce(&mut Vec<toml::Value>) -> anyhow::Result<()>,
    ) -> anyhow::Result<String> {
        let mut file: toml::Table = toml::from_str(&self.source)?;
        let mut vms = file.get_mut("vm").and_then(toml::Value::as_array_mut).into_iter().flatten();
        let vm = vms.find(|vm| vm.get("name").and_then(toml::Value::as_str) == Some(&self.options.name));
        let disks = vm.and_then(|vm| vm.get_mut("disks")).and_then(toml::Value::as_array_mut);
        change(disks.context("the configuration that it is served with has no disks of this VM")?)?;
        let text = toml::to_string(&file)?;
        ensure!(text.len() as u64 <= BYTES_MAX, "the configuration would be too long with it");
        Ok(text)
    }
}

/// A configuration that was understood.
#[derive(Clone, Debug)]
pub struct Config {
    /// Directory of the daemon's sockets.
    pub run: PathBuf,
    /// Directory in tmpfs for guest memory and tables.
    pub shm: PathBuf,
    /// Directory for reports.
    pub reports: Option<PathBuf>,
    /// Where metrics are.
    pub metrics: MetricsConfig,
    /// What tables and copied blocks of all VMs are to take together.
    pub memory_budget_bytes: Option<u64>,
    /// The VMs by name.
    pub vms: BTreeMap<String, VmConfig>,
}

impl Config {
    /// Reads and checks a file. Gives its text, too.
    ///
    /// # Errors
    /// A line for each thing that is wrong: what, and where.
    pub fn read(path: &Path) -> anyhow::Result<(Self, String)> {
        let of = || format!("the configuration {}", path.display());
        let metadata = std::fs::metadata(path).with_context(of)?;
        // A pipe would be waited for; systemd and shells hand over /dev/null and /dev/stdin, which are no files either.
        ensure!(
            !metadata.file_type().is_fifo(),
            "{}: it is a pipe, and is read again at each reload; name a file",
            of()
        );
        let bytes = metadata.len();
        ensure!(bytes <= BYTES_MAX, "{}: {bytes} bytes are more than the {BYTES_MAX} it can have", of());
        let text = std::fs::read_to_string(path).with_context(of)?;
        Ok((Self::parse(&text).with_context(of)?, text))
    }

    /// Checks the text of such a file.
    ///
    /// # Errors
    /// As [`Config::read`].
    pub fn parse(text: &str) -> anyhow::Result<Self> {
        let file: File = toml::from_str(text)?;
        let mut vms = BTreeMap::new();
        let mut images = HashMap::new();
        let mut problems = Vec::new();
        for entry in &file.vms {
            let name = &entry.name;
            if !is_file_name(name) {
                problems.push(format!("vm '{name}': a name has letters, digits and -_. and does not begin with a dot"));
                continue;
            }
            let vm = match entry.check(&file) {
                Ok(vm) => vm,
                Err(of_vm) => {
                    problems.extend(of_vm.into_iter().map(|problem| format!("vm {name}: {problem}")));
                    continue;
                }
            };
            for (path, is_read_only) in vm.options.images() {
                let earlier: Option<(&String, bool)> = images.insert(path.to_owned(), (name, is_read_only));
                if let Some((other, others_read_only)) = earlier
                    && !(is_read_only && others_read_only)
                {
                    problems.push(format!(
                        "vm {name}: vm {other} has the image {}, too: an image has one user, or several that all have it readonly",
                        path.display()
                    ));
                }
            }
            if vms.insert(name.clone(), vm).is_some() {
                problems.push(format!("two VMs have the name {name}"));
            }
        }
        if file.memory.budget_mib == Some(0) {
            problems.push("memory: budget_mib is at least 1; without it there is no budget over all VMs".to_owned());
        }
        let addresses = parse_all::<Address>(&file.metrics.listen, &mut problems);
        let access = file.metrics.socket.check().map_err(|error| problems.push(format!("metrics: {error:#}"))).ok();
        let Some(access) = access.filter(|_| problems.is_empty()) else { bail!("{}", problems.join("\n")) };
        let source: Arc<str> = Arc::from(text);
        vms.values_mut().for_each(|vm: &mut VmConfig| vm.source = Arc::clone(&source));
        let metrics = MetricsConfig { addresses, access };
        let memory_budget_bytes = file.memory.budget_mib.map(|mib| mib.saturating_mul(1 << 20));
        Ok(Config { run: file.run, shm: file.shm, reports: file.reports, metrics, memory_budget_bytes, vms })
    }

    /// The bits of the mode with which VMMs of other users can pass through the directories that all VMs share.
    pub fn way(&self) -> u32 {
        self.vms.values().fold(0, |way, vm| way | vm.access.way(true))
    }
}

/// Whether it can be a part of a socket's path.
pub(super) fn is_file_name(name: &str) -> bool {
    let is_fit = |character: char| character.is_ascii_alphanumeric() || "-_.".contains(character);
    !name.is_empty() && name.len() <= 64 && !name.starts_with('.') && name.chars().all(is_fit)
}

impl VmEntry {
    /// What it says, or all that is wrong with it.
    fn check(&self, file: &File) -> Result<VmConfig, Vec<String>> {
        let mut problems = Vec::new();
        if self.disks.is_empty() {
            problems.push("it has no disks".to_owned());
        }
        let mut disks = parse_all::<DiskOption>(&self.disks, &mut problems);
        // Said here, so that it stays the same when one before it goes.
        for (index, disk) in disks.iter_mut().enumerate() {
            disk.name.get_or_insert_with(|| format!("disk{index}"));
        }
        let journal_disks = parse_all::<JournalDiskOption>(&self.journal_disks, &mut problems);
        let sockets = file.run.join(&self.name);
        let options = VmOptions {
            name: self.name.clone(),
            disks,
            journal_disks,
            shm: file.shm.clone(),
            memory_budget_mib: self.memory_budget_mib,
            threads: self.threads,
            model_sockets: None,
            trust: self.remote.clone().unwrap_or_else(|| file.remote.clone()),
            can_migrate: file.migration.experimental,
            sandbox: false,
            trace: None,
            samples: None,
        };
        for (path, _) in options.images().filter(|(path, _)| !path.is_absolute()) {
            problems.push(format!(
                "the image {} has no absolute path, and a daemon has no place of its own",
                path.display()
            ));
        }
        let names = options.disk_names().unwrap_or_else(|error| {
            problems.push(format!("{error:#}"));
            Vec::new()
        });
        for (disk, _) in names {
            if !is_file_name(&disk) {
                problems.push(format!("the disk's name '{disk}' cannot be a file's: letters, digits and -_."));
            }
            if disk == "shim" {
                problems.push("a disk cannot have the name shim: that is another socket's".to_owned());
            }
            let socket = sockets.join(format!("{disk}.sock"));
            if socket.as_os_str().len() >= SOCKET_PATH_MAX {
                problems.push(format!(
                    "the socket {} has too long a path: at most {} bytes",
                    socket.display(),
                    SOCKET_PATH_MAX - 1
                ));
            }
        }
        for drive in options.named_models() {
            problems.push(format!(
                "model={drive}: a daemon starts no modelled disk: start 'amberlog-lab disk-model {drive} --socket PATH', \
                 and write model=PATH, with a / in it"
            ));
        }
        let access = self.sockets.as_ref().unwrap_or(&file.sockets).check();
        let access = access.map_err(|error| problems.push(format!("{error:#}"))).ok();
        let cpus = self.cpus.as_deref().map(str::parse::<Cpus>).transpose();
        let cpus = cpus.unwrap_or_else(|error| {
            problems.push(error);
            None
        });
        let shutdown = self.shutdown(&mut problems);
        let Some(access) = access.filter(|_| problems.is_empty()) else { return Err(problems) };
        let report = file.reports.as_ref().map(|directory| directory.join(format!("{}.json", self.name)));
        let text = format!("{options:?} {sockets:?} {access:?} {report:?} {cpus:?}");
        let other = VmOptions { disks: Vec::new(), ..options.clone() };
        let apart_from_disks = format!("{other:?} {sockets:?} {access:?} {report:?} {cpus:?}");
        let (run, on_crash) = (file.run.clone(), self.on_crash);
        let source = Arc::from("");
        Ok(VmConfig { options, run, sockets, access, report, on_crash, shutdown, cpus, text, apart_from_disks, source })
    }

    fn shutdown(&self, problems: &mut Vec<String>) -> Option<Shutdown> {
        let seconds = self.shutdown_seconds.unwrap_or(SHUTDOWN_SECONDS);
        match &self.monitor {
            None if self.shutdown_seconds.is_some() => {
                problems.push(
                    "shutdown_seconds needs a monitor, where the guest's power button is (-qmp unix:PATH,server=on,wait=off)"
                        .to_owned(),
                );
                None
            }
            Some(monitor) if !monitor.is_absolute() => {
                problems.push(format!("the monitor {} has no absolute path", monitor.display()));
                None
            }
            Some(_) if seconds > SHUTDOWN_SECONDS_MAX => {
                problems.push(format!("shutdown_seconds is at most {SHUTDOWN_SECONDS_MAX}"));
                None
            }
            monitor => monitor.clone().map(|monitor| Shutdown { monitor, patience: Duration::from_secs(seconds) }),
        }
    }
}

fn parse_all<T: std::str::FromStr<Err = String>>(texts: &[String], problems: &mut Vec<String>) -> Vec<T> {
    let mut parsed = Vec::new();
    for text in texts {
        match text.parse() {
            Ok(one) => parsed.push(one),
            Err(error) => problems.push(format!("'{text}': {error}")),
        }
    }
    parsed
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = r#"
        run = "/run/test"
        reports = "/var/reports"
        [remote]
        insecure = true
        timeout_ms = 700
        [[vm]]
        name = "db"
        disks = ["/srv/db.img,placement=remote=127.0.0.1:9/db", "/srv/scratch.img,name=scratch,placement=discard"]
        journal_disks = ["/srv/journal.img,for=scratch"]
        [[vm]]
        name = "web"
        disks = ["/srv/web.img"]
        memory_budget_mib = 64
        [vm.sockets]
        group = "root"
    "#;

    #[test]
    fn a_configuration_is_understood_and_compared() {
        let config = Config::parse(GOOD).expect("good");
        assert_eq!(config.vms.keys().collect::<Vec<_>>(), ["db", "web"]);
        let db = &config.vms["db"];
        assert_eq!(db.sockets, Path::new("/run/test/db"));
        assert_eq!(db.report.as_deref(), Some(Path::new("/var/reports/db.json")));
        let names: Vec<_> = db.options.disk_names().expect("named").into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["disk0", "scratch", "journal0"]);
        assert_eq!(config.memory_budget_bytes, None);
        let bounded = GOOD.replace("[remote]", "[memory]\nbudget_mib = 512\n[remote]");
        let bounded = Config::parse(&bounded).expect("good");
        assert_eq!(bounded.memory_budget_bytes, Some(512 << 20));
        assert_eq!(bounded.vms["db"], config.vms["db"], "no VM is changed by it");
        assert_eq!(db.options.trust.client("127.0.0.1:9").timeout.as_millis(), 700);
        let again = Config::parse(&GOOD.replace("= 64", "= 65")).expect("good");
        assert!(again.vms["db"] == config.vms["db"] && again.vms["web"] != config.vms["web"]);
        assert!(!db.access.is_shared() && config.vms["web"].access.is_shared() && config.way() == 0o011);
        let bound = Config::parse(&GOOD.replace("= 64", "= 64\ncpus = \"2-3\"")).expect("good");
        assert!(bound.vms["web"].cpus.is_some() && bound.vms["web"] != config.vms["web"]);
        assert!(config.vms["web"].disk_changes(&bound.vms["web"]).is_err(), "it is no matter of disks");
        let together = Config::parse(&GOOD.replace("= 64", "= 64\nthreads = \"one\"")).expect("good");
        assert_eq!(
            (config.vms["web"].options.threads, together.vms["web"].options.threads),
            (Threads::Each, Threads::One)
        );
        assert!(config.vms["web"].disk_changes(&together.vms["web"]).is_err(), "it is no matter of disks");
        let same = Config::parse(&GOOD.replace("= 64", "= 64\nthreads = \"each\"")).expect("good");
        assert!(same.vms["web"] == config.vms["web"], "it is so anyway");
        let error = Config::parse(&GOOD.replace("= 64", "= 64\ncpus = \"x\"")).expect_err("no list").to_string();
        assert!(error.contains("vm web: cpus is a list of processors"), "{error}");
        let again = Config::parse(&GOOD.replace("[vm.sockets]", "[vm.sockets]\nmode = \"0600\"")).expect("good");
        assert!(again.vms["web"] != config.vms["web"]);
    }

    #[test]
    fn disks_come_and_go_by_name() {
        let vm = |text: &str| Config::parse(text).expect("good").vms.remove("web").expect("web");
        let now = vm(GOOD);
        let text = "/srv/more.img,readonly";
        let with = now.source_with(&text.parse().expect("a disk"), text).expect("added");
        let with = vm(&with);
        assert_eq!(with.options.disks.len(), 2);
        let changes = now.disk_changes(&with).expect("only disks");
        assert_eq!((changes.added, changes.removed.len()), (vec!["disk1".to_owned()], 0));
        let without = vm(&with.source_without("disk0").expect("removed"));
        let changes = with.disk_changes(&without).expect("the other keeps its name");
        assert_eq!((changes.added.len(), changes.removed), (0, vec!["disk0".to_owned()]));
        assert!(now == vm(&with.source_without("disk1").expect("removed")), "what was added is gone again");
        now.source_without("disk0").expect_err("the only one");
        with.source_without("disk7").expect_err("there is none");
        with.source_with(&"/x,name=disk1".parse().expect("a disk"), "/x,name=disk1").expect_err("the name is taken");
        for (from, to) in
            [("= 64", "= 65"), ("/srv/web.img", "/srv/other.img"), ("/srv/web.img", "/srv/web.img,queues=3")]
        {
            let error = now.disk_changes(&vm(&GOOD.replace(from, to))).expect_err(to);
            assert!(error.to_string().contains("when its VMM has ended"), "{error}");
        }
    }

    #[test]
    fn metrics_are_off_unless_a_place_is_named() {
        assert!(Config::parse(GOOD).expect("good").metrics.addresses.is_empty());
        let text = GOOD.replace("[remote]", "[metrics]\nlisten = [\"/run/m.sock\", \"127.0.0.1:9469\"]\n[remote]");
        let metrics = Config::parse(&text).expect("good").metrics;
        assert_eq!(metrics.addresses, [Address::Unix("/run/m.sock".into()), Address::Tcp("127.0.0.1:9469".to_owned())]);
        assert!(!metrics.access.is_shared());
    }

    #[test]
    fn all_that_is_wrong_is_said() {
        let text =
            GOOD.replace("/srv/web.img", "web.img,placement=moon\", \"x.img").replace("for=scratch", "for=nobody");
        let error = format!("{:#}", Config::parse(&text).expect_err("much is wrong"));
        for words in ["placement 'moon'", "x.img has no absolute path", "name=nobody"] {
            assert!(error.contains(words), "{words}: {error}");
        }
    }

    #[test]
    fn several_vms_may_read_one_image() {
        let text = GOOD.replace("/srv/web.img\"", "/srv/web.img\", \"/srv/base.img,readonly\"");
        let text = text.replace(
            "name=scratch,placement=discard\"",
            "name=scratch,placement=discard\", \"/srv/base.img,readonly\"",
        );
        assert_eq!(text.matches("base.img").count(), 2);
        Config::parse(&text).expect("both only read it");
        let error = Config::parse(&text.replacen("base.img,readonly", "base.img", 1)).expect_err("one writes it");
        assert!(format!("{error:#}").contains("an image has one user"), "{error:#}");
    }

    #[test]
    fn what_cannot_be_is_refused_with_the_reason() {
        for (from, to, expected) in [
            ("name = \"web\"", "name = \"db\"", "two VMs have the name db"),
            ("name = \"web\"", "name = \"../web\"", "a name has letters"),
            ("/srv/web.img", "/srv/db.img", "an image has one user"),
            ("/srv/web.img", "/srv/db.img,readonly", "an image has one user"),
            ("/srv/web.img", "web.img", "no absolute path"),
            ("/srv/web.img", "/srv/web.img,placement=moon", "there is no placement 'moon'"),
            ("/srv/web.img", "/srv/web.img,name=shim", "another socket's"),
            ("/srv/web.img", "/srv/web.img,name=a/b", "cannot be a file's"),
            ("/srv/web.img", "/srv/web.img,model=nvme", "start 'amberlog-lab disk-model nvme --socket PATH'"),
            ("for=scratch", "for=scratch,model=pcm", "start 'amberlog-lab disk-model pcm --socket PATH'"),
            ("for=scratch", "for=nobody", "no disk with name=nobody"),
            ("memory_budget_mib", "memory_budget_gib", "unknown field"),
            ("memory_budget_mib = 64", "threads = \"two\"", "unknown variant `two`"),
            ("insecure = true", "insecure = true\nca = \"/x\"", "insecure"),
            ("/run/test", &"/run".repeat(30), "too long a path"),
            ("group = \"root\"", "mode = \"0666\"", "has no business at a disk"),
            ("[remote]", "[metrics]\nlisten = [\"nowhere\"]\n[remote]", "neither a socket's path"),
            ("[remote]", "[metrics]\nlisten = []\nsocket = { mode = \"0666\" }\n[remote]", "no business at a disk"),
            ("group = \"root\"", "groups = \"root\"", "unknown field"),
            ("[remote]", "[memory]\nbudget_mib = 0\n[remote]", "at least 1"),
            ("[remote]", "[memory]\nbudget = 5\n[remote]", "unknown field"),
        ] {
            let text = GOOD.replace(from, to);
            assert_ne!(text, GOOD, "{from}");
            let error = format!("{:#}", Config::parse(&text).expect_err(to));
            assert!(error.contains(expected), "{to}: {error}");
        }
        let text = GOOD.replace("/srv/web.img", "/srv/web.img,model=/run/drive");
        Config::parse(&text).expect("somebody else has started that drive");
    }
}
