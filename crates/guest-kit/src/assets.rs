//! What every guest boots from: Debian's cloud kernel, unpacked under `build/guest/kernel`, and an
//! initramfs with busybox, postmark, e2fsprogs, our own guest tools and the few modules that a
//! virtio disk needs. Built once per process, in memory: always from the current inputs.
//!
//! Failure story: whatever is missing is named together with the script that provides it.

use crate::error::{Error, FileContext, Result};
use crate::modules::ModuleTree;
use crate::program;
use crate::tree::FileTree;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, OnceLock};

/// The parts that guests boot from.
pub struct Assets {
    kernel: PathBuf,
    modules: PathBuf,
    base: FileTree,
    initramfs: Vec<u8>,
}

/// Modules that every guest loads, with what they depend on. ext4 and jbd2 are built into
/// Debian's cloud kernel; the list says so to the reader and would load them elsewhere.
const MODULES: [&str; 4] = ["virtio_pci", "virtio_blk", "ext4", "jbd2"];

impl Assets {
    /// The assets of this process; the first call prepares them (fetching the kernel if need be).
    pub fn get() -> Result<&'static Self> {
        static ASSETS: OnceLock<std::result::Result<Assets, String>> = OnceLock::new();
        ASSETS
            .get_or_init(|| Self::prepare().map_err(|error| error.to_string()))
            .as_ref()
            .map_err(|text| Error::Assets(text.clone()))
    }

    /// The kernel image for QEMU's `-kernel`.
    pub fn kernel(&self) -> &Path {
        &self.kernel
    }

    /// A module of the guests' kernel that not every guest loads, for [`crate::GuestSpec::files`]; it must depend on no
    /// other one.
    ///
    /// # Errors
    /// When there is none of that name, or it is built in, or needs others.
    pub fn module(&self, name: &str) -> Result<Vec<u8>> {
        match ModuleTree::read(&self.modules)?.load_order(&[name])?.as_slice() {
            [only] => std::fs::read(only).at("read", only),
            other => Err(Error::Assets(format!("the module {name} is {} files, not one", other.len()))),
        }
    }

    /// Modules of the guests' kernel that not every guest loads, in the order in which they are to be inserted, with what they
    /// depend on and without what is built in: names and contents, for [`crate::GuestSpec::files`].
    ///
    /// # Errors
    /// When there is none of a name.
    pub fn modules(&self, names: &[&str]) -> Result<Vec<(String, Vec<u8>)>> {
        let order = ModuleTree::read(&self.modules)?.load_order(names)?;
        let name = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        order.iter().map(|path| Ok((name(path), std::fs::read(path).at("read", path)?))).collect()
    }

    /// The initramfs that all guests share; a run appends its own small archive.
    pub fn initramfs(&self) -> &[u8] {
        &self.initramfs
    }

    /// The same programs as files, for the root file system of a disk.
    pub fn base_tree(&self) -> &FileTree {
        &self.base
    }

    /// A program of the host with its libraries, as an archive to append. Prepared once per process.
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
        tree.program(&program::find_program(name)?, &format!("bin/{name}"))?;
        let archive: Arc<[u8]> = tree.archive().into();
        archives.insert(name, archive.clone());
        Ok(archive)
    }

    /// Our own tools, built for the guest.
    pub(crate) fn guest_tools() -> Result<&'static Path> {
        guest_tools()
    }

    fn prepare() -> Result<Self> {
        let kernel_directory = fetch_kernel()?;
        let kernel = first_with_prefix(&kernel_directory.join("boot"), "vmlinuz-")?;
        let modules_directory = first_with_prefix(&kernel_directory.join("lib/modules"), "")?;

        let mut base = programs()?;
        base.file("sbin/guest-main", 0o755, include_str!("../../../guest/main"));
        base.file("etc/guest-prelude", 0o644, include_str!("../../../guest/prelude"));

        let mut boot = base.clone();
        boot.file("init", 0o755, include_str!("../../../guest/init"));
        // The kernel opens it for init before anything could be mounted.
        boot.character_device("dev/console", 5, 1);
        let mut list = String::new();
        for module in ModuleTree::read(&modules_directory)?.load_order(&MODULES)? {
            let name = module.file_name().unwrap_or_default().to_string_lossy().into_owned();
            boot.file(&format!("lib/modules/{name}"), 0o644, std::fs::read(&module).at("read", &module)?);
            list.push_str(&format!("/lib/modules/{name}\n"));
        }
        boot.file("etc/load-modules", 0o644, list);
        Ok(Self { kernel, modules: modules_directory, initramfs: boot.archive(), base })
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

/// Where the unpacked kernel package is, after `scripts/fetch-kernel.sh` made sure of it.
fn fetch_kernel() -> Result<PathBuf> {
    let directory = program::workspace().join("build/guest/kernel");
    if !directory.join("package").is_file() {
        let script = program::workspace().join("scripts/fetch-kernel.sh");
        program::run(&mut Command::new(script), &[0])?;
    }
    Ok(directory)
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

fn first_with_prefix(directory: &Path, prefix: &str) -> Result<PathBuf> {
    let mut names: Vec<PathBuf> = std::fs::read_dir(directory)
        .at("read", directory)?
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .filter(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(prefix)))
        .collect();
    names.sort();
    names.into_iter().next().ok_or_else(|| {
        Error::Assets(format!(
            "{} holds no {prefix}*; remove build/guest/kernel and run scripts/fetch-kernel.sh",
            directory.display()
        ))
    })
}
