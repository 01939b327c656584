//! What would keep VMs from being served, looked for before it does: all of it, not the first.
//!
//! `serve --check` says it and ends; a daemon says it of a VM that cannot be served. Must never: lock, make or change anything, or
//! look into what only a daemon that serves would (journals, what an earlier one left). So a check beside a running daemon is harmless,
//! and finds nothing wrong in its having the images.
//!
//! What may be read and written is another thing for whoever checks (root, mostly) than for a daemon with a user of its own, in a file
//! system of its own (ReadWritePaths=, ProtectHome= of its unit). So a daemon that is there is asked to look.

use super::config::{Config, VmConfig};
use crate::client::Daemon;
use crate::metrics::endpoint::Address;
use crate::raw::KnownRaw;
use crate::vm::in_memory::not_in_memory;
use own_files::OwnDirectory;
use rustix::fs::Access;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::collections::HashMap;
use std::fs::Metadata;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

/// Images may be on storage that is slow to say what is there.
const DAEMON_PATIENCE_S: u64 = 20;

/// Something that is wrong.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct Problem {
    /// What, where, and what to do.
    pub sentence: String,
    /// An image is damaged or refused; anything else is to be made or mended.
    pub is_refusal: bool,
}

impl Problem {
    fn new(sentence: impl Into<String>) -> Self {
        Problem { sentence: sentence.into(), is_refusal: false }
    }
}

/// All that is found of a configuration.
#[derive(Debug, Default, Deserialize, Serialize)]
pub struct Found {
    /// What is wrong.
    pub problems: Vec<Problem>,
    /// What is not wrong and should be known all the same.
    pub notes: Vec<String>,
}

impl Found {
    /// Looks as this process.
    pub fn here(config: &Config) -> Self {
        Found { problems: all(config), notes: notes(config) }
    }

    /// Has the daemon look that would serve it, if there is one. Otherwise this process does, and what that does not know is a note.
    pub fn by_whoever_serves(config: &Config, text: &str) -> Self {
        let daemon = Daemon { run: config.run.clone() };
        let asked = daemon.ask_patiently(&json!({"command": "check", "configuration": text}), DAEMON_PATIENCE_S);
        let found = asked.and_then(|mut answer| Ok(serde_json::from_value::<Found>(answer["found"].take())?));
        match found {
            Ok(mut found) => {
                let run = config.run.display();
                found.notes.push(format!("a daemon answers at {run}: this is what it sees, and what it may do"));
                found
            }
            Err(error) => {
                let mut found = Found::here(config);
                if rustix::process::geteuid().is_root() {
                    found.notes.push(format!(
                        "this is what root sees, and may do; a daemon with a user and a unit of its own may find otherwise (images that are \
                         not its group's or not in ReadWritePaths=): check again when it runs ({error:#})"
                    ));
                }
                found
            }
        }
    }
}

/// Everything that would keep a configuration from being served.
pub fn all(config: &Config) -> Vec<Problem> {
    let mut problems = Vec::new();
    for (path, what) in [
        (Some(&config.shm), "for guest memory (shm)"),
        (Some(&config.run), "for sockets (run)"),
        (config.reports.as_ref(), "for reports (reports)"),
    ] {
        problems.extend(path.and_then(|path| directory(path, what)).map(Problem::new));
    }
    problems.extend(not_believed(&config.shm, OwnDirectory::open_place));
    problems.extend(not_believed(&config.run, |run| OwnDirectory::open_allowing(run, super::RUN_OTHERS)));
    problems.extend(config.metrics.addresses.iter().filter_map(metrics_socket).map(Problem::new));
    problems.extend(room(config).map(Problem::new));
    let mut users: HashMap<_, Vec<(&str, &Path, bool)>> = HashMap::new();
    for (name, vm) in &config.vms {
        problems.extend(
            self::vm(vm, &KnownRaw::default())
                .into_iter()
                .map(|problem| Problem { sentence: format!("vm {name}: {}", problem.sentence), ..problem }),
        );
        for (image, is_read_only) in vm.options.images() {
            if let Ok(metadata) = std::fs::metadata(image) {
                users.entry(identity(&metadata)).or_default().push((name, image, is_read_only));
            }
        }
    }
    for users in users.values() {
        // The same path is the configuration's affair; here it is two names of one image.
        let writer = users.iter().position(|(.., is_read_only)| !is_read_only);
        if let (Some(writer), true) = (writer, users.iter().any(|(_, path, _)| *path != users[0].1)) {
            let (vm, path, _) = users[writer];
            let others: Vec<_> = users
                .iter()
                .filter(|user| user.1 != path)
                .map(|user| format!("{} of vm {}", user.1.display(), user.0))
                .collect();
            problems.push(Problem::new(format!(
                "vm {vm}: the image {} is the same as {}: an image has one user, or several that all have it readonly",
                path.display(),
                others.join(", ")
            )));
        }
    }
    problems
}

/// Everything that would keep one VM from being served. Images that are `known` are not asked whether they are raw.
pub fn vm(vm: &VmConfig, known: &KnownRaw) -> Vec<Problem> {
    let mut problems = Vec::new();
    let options = &vm.options;
    let raw = options.disks.iter().map(|disk| disk.is_raw).chain(options.journal_disks.iter().map(|disk| disk.is_raw));
    for ((image, is_read_only), is_raw) in options.images().zip(raw) {
        problems.extend(self::image(image, is_read_only, is_raw || known.has(image)));
    }
    for disk in &options.disks {
        if let Some(nvm) = &disk.nvm
            && !nvm.path.exists()
        {
            let parent = nvm.path.parent().unwrap_or(Path::new("/"));
            problems.extend(directory(parent, "for the region of NVM").map(Problem::new));
        }
        if let Some(remote) = &disk.remote {
            let security = options.trust.client(&remote.address).security;
            let (certificate, key) = security.certificate.unzip();
            for file in [security.ca, security.secret, certificate, key].into_iter().flatten() {
                if let Err(error) = rustix::fs::access(&file, Access::READ_OK) {
                    problems.push(Problem::new(format!("{} cannot be read: {error}", file.display())));
                }
            }
        }
    }
    problems.extend(vm.cpus.as_ref().and_then(|cpus| cpus.problem()).map(Problem::new));
    problems.extend(directory(&vm.sockets, "for the VM's sockets").map(Problem::new));
    for (name, _) in options.disk_names().unwrap_or_default() {
        let socket = vm.sockets.join(format!("{name}.sock"));
        if std::fs::symlink_metadata(&socket).is_ok_and(|metadata| !metadata.file_type().is_socket()) {
            problems.push(Problem::new(format!(
                "{} is no socket, and one has to be made there; remove it",
                socket.display()
            )));
        }
    }
    problems
}

fn identity(metadata: &Metadata) -> (u64, u64) {
    if metadata.file_type().is_block_device() { (0, metadata.rdev()) } else { (metadata.dev(), metadata.ino()) }
}

fn image(path: &Path, is_read_only: bool, is_raw: bool) -> Option<Problem> {
    let shown = path.display();
    let metadata = match std::fs::metadata(path) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            return Some(Problem::new(format!("the image {shown} does not exist; make it, or correct the path")));
        }
        Err(error) => return Some(Problem::new(format!("the image {shown} cannot be looked at: {error}"))),
    };
    if !metadata.is_file() && !metadata.file_type().is_block_device() {
        return Some(Problem::new(format!("the image {shown} is neither a regular file nor a block device")));
    }
    let (access, verb) =
        if is_read_only { (Access::READ_OK, "read") } else { (Access::READ_OK | Access::WRITE_OK, "read and written") };
    if let Err(error) = rustix::fs::access(path, access) {
        return Some(Problem::new(format!("the image {shown} cannot be {verb}: {error}")));
    }
    if metadata.is_file() && metadata.len() < block_device::SECTOR_BYTES {
        return Some(Problem::new(format!(
            "the image {shown} is too small: a disk has at least one sector of 512 bytes; make it larger (truncate -s 10G)"
        )));
    }
    match crate::raw::require(path) {
        Err(error) if !is_raw => Some(Problem { sentence: error.to_string(), is_refusal: true }),
        _ => None,
    }
}

/// Why files cannot be made in a directory that is made if it is not there.
fn directory(path: &Path, what: &str) -> Option<String> {
    let shown = path.display();
    let existing = path.ancestors().find(|ancestor| ancestor.symlink_metadata().is_ok()).unwrap_or(Path::new("/"));
    if !existing.is_dir() {
        return Some(format!("the directory {shown} {what} cannot be: {} is no directory", existing.display()));
    }
    let error = rustix::fs::access(existing, Access::WRITE_OK | Access::EXEC_OK).err()?;
    Some(if existing == path {
        format!("nothing can be made in the directory {shown} {what}: {error}")
    } else {
        format!("the directory {shown} {what} cannot be made in {}: {error}", existing.display())
    })
}

/// Why a directory, or the one in which it is made, is not believed to be ours.
fn not_believed(path: &Path, open: impl Fn(&Path) -> Result<OwnDirectory, own_files::Error>) -> Option<Problem> {
    let is_there = |path: &Path| path.symlink_metadata().is_ok();
    let opened = if is_there(path) {
        open(path)
    } else {
        // The root is a place of its own.
        OwnDirectory::open_place(path.ancestors().find(|above| is_there(above) && above.parent().is_some())?)
    };
    // What is missing or cannot be read has been said.
    opened
        .err()
        .filter(|error| matches!(error, own_files::Error::NotOurs { .. }))
        .map(|error| Problem::new(error.to_string()))
}

/// Why nothing can listen at a socket of metrics.
fn metrics_socket(address: &Address) -> Option<String> {
    let path = match address {
        Address::Unix(path) => path,
        Address::Tcp(name) => {
            // Taken it may be by the daemon that runs.
            let error = std::net::TcpListener::bind(name).err()?;
            return (error.kind() != std::io::ErrorKind::AddrInUse)
                .then(|| format!("metrics: nothing can listen at {name}: {error}"));
        }
    };
    match path.symlink_metadata() {
        Ok(metadata) if metadata.file_type().is_socket() => None,
        Ok(_) => Some(format!("metrics: {} is no socket, and one has to be made there; remove it", path.display())),
        Err(_) => directory(path.parent()?, "for the socket of metrics"),
    }
}

/// Whether tables and copied blocks fit into the tmpfs. Guest memory comes on top, of which nothing is known before a VMM is there.
fn room(config: &Config) -> Option<String> {
    let existing = config.shm.ancestors().find(|ancestor| ancestor.is_dir())?;
    let status = rustix::fs::statvfs(existing).ok()?;
    let each_mib: u64 = config.vms.values().map(|vm| vm.options.memory_budget_mib).fold(0, u64::saturating_add);
    // One budget over all of them bounds them, too.
    let needed_mib = config.memory_budget_bytes.map_or(each_mib, |bytes| each_mib.min(bytes >> 20));
    let room_mib = status.f_blocks.saturating_mul(status.f_frsize) >> 20;
    (needed_mib > room_mib).then(|| {
        format!(
            "the memory budgets of all VMs are {needed_mib} MiB, and {} has {room_mib} MiB, in which the guests' memory has to be, \
             too; enlarge that tmpfs (mount -o remount,size=...), or lower memory_budget_mib",
            existing.display()
        )
    })
}

/// What is not wrong and should be known all the same.
fn notes(config: &Config) -> Vec<String> {
    let mut notes: Vec<String> = not_in_memory(&config.shm).into_iter().collect();
    if crate::shim::find().is_none() {
        notes.push(format!(
            "{} was not found beside amberlog: journal blocks are copied instead of protected",
            crate::shim::FILE_NAME
        ));
    }
    notes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(directory: &Path, disks: &[&str]) -> Config {
        let shown = directory.display();
        let disks: Vec<String> = disks.iter().map(|disk| format!("{:?}", format!("{shown}/{disk}"))).collect();
        let text = format!(
            "shm = \"{shown}/shm\"\nrun = \"{shown}/run\"\nreports = \"{shown}/reports\"\n[[vm]]\nname = \"db\"\nmemory_budget_mib = 1\ndisks = [{}]\n",
            disks.join(", ")
        );
        let path = directory.join("amberlog.toml");
        std::fs::write(&path, text).expect("written");
        Config::read(&path).expect("good").0
    }

    #[test]
    fn everything_that_is_wrong_is_said_and_nothing_is_made() {
        let directory = tempfile::tempdir().expect("a directory");
        let at = |name: &str| directory.path().join(name);
        std::fs::write(at("good"), [0; 4096]).expect("written");
        std::fs::write(at("tiny"), [0; 100]).expect("written");
        std::fs::write(at("qcow2"), b"QFI\xfb\0\0\0\x03".repeat(64)).expect("written");
        std::fs::hard_link(at("good"), at("again")).expect("linked");
        std::fs::create_dir(at("place")).expect("made");
        let good = config(directory.path(), &["good", "qcow2,format=raw"]);
        assert_eq!(all(&good), []);
        assert!(!at("run").exists() && !at("reports").exists() && !at("shm").exists());

        std::fs::create_dir_all(at("run/db")).expect("made");
        std::fs::write(at("run/db/disk0.sock"), "").expect("written");
        std::fs::write(at("reports"), "").expect("written");
        let bad = config(directory.path(), &["good", "missing", "tiny", "qcow2", "place", "again"]);
        let problems = all(&bad);
        let expected = [
            ("reports", "is no directory"),
            ("missing", "does not exist"),
            ("tiny", "too small"),
            ("qcow2", "format=raw"),
            ("place", "neither"),
            ("disk0.sock", "no socket"),
            ("again", "is the same as"),
        ];
        for (name, words) in expected {
            assert!(
                problems.iter().any(|problem| problem.sentence.contains(name) && problem.sentence.contains(words)),
                "{name}: {problems:#?}"
            );
        }
        assert_eq!(problems.len(), expected.len(), "{problems:#?}");
        assert_eq!(problems.iter().filter(|problem| problem.is_refusal).count(), 1);
    }
}
