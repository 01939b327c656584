//! The daemon's configuration: a TOML file, read whole and checked before anything of it counts.
//!
//! Disks are written as on the command line of `amberlog run`, so that what was tried there can be copied.

use crate::vm::{DiskOption, JournalDiskOption, VmOptions};
use anyhow::{Context, ensure};
use command_line::remote_options::RemoteTrust;
use serde::Deserialize;
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

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
    #[serde(default = "super::ask::default_run")]
    run: PathBuf,
    reports: Option<PathBuf>,
    #[serde(default)]
    remote: RemoteTrust,
    #[serde(default, rename = "vm")]
    vms: Vec<VmEntry>,
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
    remote: Option<RemoteTrust>,
}

fn default_budget() -> u64 {
    256
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
    /// Where its report goes when its VMM has ended.
    pub report: Option<PathBuf>,
    /// What the file says of it, for a comparison.
    text: String,
}

impl PartialEq for VmConfig {
    fn eq(&self, other: &Self) -> bool {
        self.text == other.text
    }
}

/// A configuration that was understood.
#[derive(Clone, Debug)]
pub struct Config {
    /// Directory of the daemon's sockets.
    pub run: PathBuf,
    /// Directory in tmpfs for guest memory and tables.
    pub shm: PathBuf,
    /// The VMs by name.
    pub vms: BTreeMap<String, VmConfig>,
}

impl Config {
    /// Reads and checks a file.
    ///
    /// # Errors
    /// A sentence that says what is wrong and where.
    pub fn read(path: &Path) -> anyhow::Result<Self> {
        let of = || format!("the configuration {}", path.display());
        let bytes = std::fs::metadata(path).with_context(of)?.len();
        ensure!(bytes <= BYTES_MAX, "{}: {bytes} bytes are more than the {BYTES_MAX} it can have", of());
        Self::parse(&std::fs::read_to_string(path).with_context(of)?).with_context(of)
    }

    fn parse(text: &str) -> anyhow::Result<Self> {
        let file: File = toml::from_str(text)?;
        let mut vms = BTreeMap::new();
        let mut images = HashMap::new();
        for entry in &file.vms {
            let name = &entry.name;
            ensure!(
                is_file_name(name),
                "vm '{name}': a name has letters, digits and -_. and does not begin with a dot"
            );
            let vm = entry.check(&file).with_context(|| format!("vm {name}"))?;
            for path in paths(&vm.options) {
                if let Some(other) = images.insert(path.to_owned(), name) {
                    anyhow::bail!("vm {name}: vm {other} has the image {}, too: an image has one user", path.display());
                }
            }
            ensure!(vms.insert(name.clone(), vm).is_none(), "two VMs have the name {name}");
        }
        Ok(Config { run: file.run, shm: file.shm, vms })
    }
}

fn paths(options: &VmOptions) -> impl Iterator<Item = &Path> {
    let disks = options.disks.iter().map(|disk| disk.path.as_path());
    disks.chain(options.journal_disks.iter().map(|disk| disk.path.as_path()))
}

/// Whether it can be a part of a socket's path.
fn is_file_name(name: &str) -> bool {
    let is_fit = |character: char| character.is_ascii_alphanumeric() || "-_.".contains(character);
    !name.is_empty() && name.len() <= 64 && !name.starts_with('.') && name.chars().all(is_fit)
}

impl VmEntry {
    fn check(&self, file: &File) -> anyhow::Result<VmConfig> {
        ensure!(!self.disks.is_empty(), "it has no disks");
        let disks = self.disks.iter().map(|text| parse::<DiskOption>(text)).collect::<anyhow::Result<Vec<_>>>()?;
        let journals = self
            .journal_disks
            .iter()
            .map(|text| parse::<JournalDiskOption>(text))
            .collect::<anyhow::Result<Vec<_>>>()?;
        let sockets = file.run.join(&self.name);
        let options = VmOptions {
            name: self.name.clone(),
            disks,
            journal_disks: journals,
            shm: file.shm.clone(),
            memory_budget_mib: self.memory_budget_mib,
            time_scale: 1.0,
            trust: self.remote.clone().unwrap_or_else(|| file.remote.clone()),
            trace: None,
            samples: None,
        };
        for path in paths(&options) {
            ensure!(
                path.is_absolute(),
                "the image {} has no absolute path, and a daemon has no place of its own",
                path.display()
            );
        }
        for (disk, _) in options.disk_names()? {
            ensure!(is_file_name(&disk), "the disk's name '{disk}' cannot be a file's: letters, digits and -_.");
            ensure!(disk != "shim", "a disk cannot have the name shim: that is another socket's");
            let socket = sockets.join(format!("{disk}.sock"));
            ensure!(
                socket.as_os_str().len() < SOCKET_PATH_MAX,
                "the socket {} has too long a path: at most {} bytes",
                socket.display(),
                SOCKET_PATH_MAX - 1
            );
        }
        let report = file.reports.as_ref().map(|directory| directory.join(format!("{}.json", self.name)));
        let text = format!("{:?} {:?} {:?}", options, sockets, report);
        Ok(VmConfig { options, run: file.run.clone(), sockets, report, text })
    }
}

fn parse<T: std::str::FromStr<Err = String>>(text: &str) -> anyhow::Result<T> {
    text.parse().map_err(|error| anyhow::anyhow!("'{text}': {error}"))
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
        assert_eq!(db.options.trust.client("127.0.0.1:9").timeout.as_millis(), 700);
        let again = Config::parse(&GOOD.replace("= 64", "= 65")).expect("good");
        assert!(again.vms["db"] == config.vms["db"] && again.vms["web"] != config.vms["web"]);
    }

    #[test]
    fn what_cannot_be_is_refused_with_the_reason() {
        for (from, to, expected) in [
            ("name = \"web\"", "name = \"db\"", "two VMs have the name db"),
            ("name = \"web\"", "name = \"../web\"", "a name has letters"),
            ("/srv/web.img", "/srv/db.img", "an image has one user"),
            ("/srv/web.img", "web.img", "no absolute path"),
            ("/srv/web.img", "/srv/web.img,placement=moon", "there is no placement 'moon'"),
            ("/srv/web.img", "/srv/web.img,name=shim", "another socket's"),
            ("/srv/web.img", "/srv/web.img,name=a/b", "cannot be a file's"),
            ("for=scratch", "for=nobody", "no disk with name=nobody"),
            ("memory_budget_mib", "memory_budget_gib", "unknown field"),
            ("insecure = true", "insecure = true\nca = \"/x\"", "insecure"),
            ("/run/test", &"/run".repeat(30), "too long a path"),
        ] {
            let text = GOOD.replace(from, to);
            assert_ne!(text, GOOD, "{from}");
            let error = format!("{:#}", Config::parse(&text).expect_err(to));
            assert!(error.contains(expected), "{to}: {error}");
        }
    }
}
