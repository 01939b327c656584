//! What every guest boots from beside its kernel ([`crate::kernel`]): an initramfs with busybox, postmark, e2fsprogs and our own
//! guest tools. Built once per process, in memory: always from the current inputs.
//!
//! Failure story: whatever is missing is named together with the script that provides it.

use crate::error::{Error, Result};
use crate::program;
use crate::tree::FileTree;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, OnceLock};

/// The parts that guests boot from.
pub struct Assets {
    base: FileTree,
    initramfs: Vec<u8>,
}

impl Assets {
    /// The assets of this process; the first call prepares them.
    pub fn get() -> Result<&'static Self> {
        static ASSETS: OnceLock<std::result::Result<Assets, String>> = OnceLock::new();
        ASSETS
            .get_or_init(|| Self::prepare().map_err(|error| error.to_string()))
            .as_ref()
            .map_err(|text| Error::Assets(text.clone()))
    }

    /// The initramfs that all guests share; a kernel appends its modules, and a run its own small archive.
    pub fn initramfs(&self) -> &[u8] {
        &self.initramfs
    }

    /// The same programs as files, for the root file system of a disk.
    pub fn base_tree(&self) -> &FileTree {
        &self.base
    }

    /// A program of the host with its libraries, as an archive to append; "postgresql" is the server with all that it needs, where the host has it.
    /// Prepared once per process.
    ///
    /// # Errors
    /// When it is not installed; scripts/install-packages.sh has the list.
    pub fn program(name: &'static str) -> Result<Arc<[u8]>> {
        static ARCHIVES: Mutex<BTreeMap<&'static str, Arc<[u8]>>> = Mutex::new(BTreeMap::new());
        let mut archives = ARCHIVES.lock().expect("no panic under this lock");
        if let Some(archive) = archives.get(name) {
            return Ok(archive.clone());
        }
        let mut tree = FileTree::new();
        match name {
            "postgresql" => postgresql(&mut tree)?,
            _ => tree.program(&program::find_program(name)?, &format!("bin/{name}"))?,
        }
        let archive: Arc<[u8]> = tree.archive().into();
        archives.insert(name, archive.clone());
        Ok(archive)
    }

    /// Our own tools, built for the guest.
    pub(crate) fn guest_tools() -> Result<&'static Path> {
        guest_tools()
    }

    fn prepare() -> Result<Self> {
        let mut base = programs()?;
        base.file("sbin/guest-main", 0o755, include_str!("../../../guest/main"));
        base.file("etc/guest-prelude", 0o644, include_str!("../../../guest/prelude"));

        let mut boot = base.clone();
        boot.file("init", 0o755, include_str!("../../../guest/init"));
        // The kernel opens it for init before anything could be mounted.
        boot.character_device("dev/console", 5, 1);
        Ok(Self { initramfs: boot.archive(), base })
    }
}

/// Busybox with its applets, postmark, e2fsprogs, guest-tools, and empty mount points.
fn programs() -> Result<FileTree> {
    let mut tree = FileTree::new();
    for directory in ["dev", "proc", "sys", "run", "tmp", "mnt", "etc"] {
        tree.directory(directory);
    }
    let busybox = program::find_program("busybox")?;
    let list = program::run(program::command("busybox")?.arg("--list"), &[0])?;
    tree.program(&busybox, "bin/busybox")?;
    for applet in String::from_utf8_lossy(&list.stdout).lines() {
        if applet != "busybox" && !applet.is_empty() && !applet.contains('/') {
            tree.symlink(&format!("bin/{applet}"), "busybox");
        }
    }
    for name in ["postmark", "mke2fs", "tune2fs", "e2fsck", "debugfs", "dumpe2fs", "resize2fs"] {
        tree.program(&program::find_program(name)?, &format!("bin/{name}"))?;
    }
    for name in ["mkfs.ext3", "mkfs.ext4"] {
        tree.symlink(&format!("bin/{name}"), "mke2fs");
    }
    tree.file("etc/mke2fs.conf", 0o644, std::fs::read("/etc/mke2fs.conf").unwrap_or_default());
    tree.symlink("etc/mtab", "/proc/mounts");
    tree.program(guest_tools()?, "bin/guest-tools")?;
    Ok(tree)
}

/// Where Debian has its versions of PostgreSQL, and what they share.
const POSTGRESQL: [&str; 2] = ["/usr/lib/postgresql", "/usr/share/postgresql"];

/// The newest version of PostgreSQL that the host has; `None` where it has none.
pub fn postgresql_version() -> Option<u32> {
    let names = std::fs::read_dir(POSTGRESQL[0]).ok()?.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    names.filter_map(|name| name.parse().ok()).max()
}

/// Its server, and what makes, asks and loads one, where they are on the host: they find what they share by that.
fn postgresql(tree: &mut FileTree) -> Result<()> {
    let version = postgresql_version().ok_or_else(|| Error::NoProgram("postgres (package postgresql)".to_owned()))?;
    let [programs, shared] = POSTGRESQL.map(|directory| Path::new(directory).join(version.to_string()));
    for name in ["postgres", "initdb", "pgbench", "psql"] {
        let path = programs.join("bin").join(name);
        tree.program(&path, &path.to_string_lossy())?;
    }
    // What initdb loads into each cluster.
    for name in ["plpgsql.so", "dict_snowball.so"] {
        let path = programs.join("lib").join(name);
        tree.program(&path, &path.to_string_lossy())?;
    }
    tree.copy(&shared)
}

/// Builds the guest's own tools, in a target directory of their own so that a running
/// `cargo test` is never waited for.
fn guest_tools() -> Result<&'static Path> {
    static TOOLS: OnceLock<std::result::Result<PathBuf, String>> = OnceLock::new();
    TOOLS
        .get_or_init(|| {
            let target = program::workspace().join("build/guest/target");
            let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
            let mut command = Command::new(cargo);
            command
                .args(["build", "--quiet", "--release", "-p", "guest-tools", "--target-dir"])
                .arg(&target)
                .current_dir(program::workspace())
                .env_remove("RUSTFLAGS");
            program::run(&mut command, &[0])
                .map(|_| target.join("release/guest-tools"))
                .map_err(|error| error.to_string())
        })
        .as_deref()
        .map_err(|text| Error::Assets(text.clone()))
}
