//! What a guest shall be: memory, disks, the script it runs, how it ends.

use crate::accelerator::Accelerator;
use crate::kernel::Kernel;
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

/// How QEMU treats the host's page cache and the guest's flushes for a plain drive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cache {
    /// Through the host's page cache; flushes are honoured.
    Writeback,
    /// Around the host's page cache (O_DIRECT); flushes are honoured.
    None,
    /// Through the host's page cache; flushes are ignored.
    Unsafe,
}

/// A disk served by QEMU itself, without amberlog.
#[derive(Clone, Debug)]
pub struct Drive {
    /// The raw image.
    pub image: PathBuf,
    /// Its cache mode.
    pub cache: Cache,
    /// The guest cannot write it.
    pub read_only: bool,
    /// A thread of its own serves it, through io_uring; otherwise QEMU's main loop does, with a pool of threads.
    pub has_iothread: bool,
}

impl Drive {
    /// A writable drive.
    pub fn new(image: impl Into<PathBuf>, cache: Cache) -> Self {
        Self { image: image.into(), cache, read_only: false, has_iothread: false }
    }
}

/// Who serves the guest's disks.
#[derive(Clone, Debug)]
pub enum Disks {
    /// QEMU's own virtio-blk: the alternative that amberlog is compared with. The first drive is
    /// /dev/vda.
    Plain(Vec<Drive>),
    /// A command that adds the disks and starts QEMU: the words before `--`, such as
    /// `amberlog run --disk IMAGE`.
    Wrapper(Vec<OsString>),
    /// Cloud Hypervisor instead of QEMU: the words for its memory and its disks. The native kernel boots under KVM, or nothing does.
    CloudHypervisor(Vec<OsString>),
}

/// What the guest does when the host's script has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AtEnd {
    /// Unmounts everything and powers off.
    PowerOff,
    /// Powers off without unmounting or writing anything back.
    PowerOffNow,
    /// Reboots without unmounting or writing anything back.
    Reboot,
    /// Goes on running, idle.
    Stay,
}

impl AtEnd {
    fn word(self) -> &'static str {
        match self {
            Self::PowerOff => "power-off",
            Self::PowerOffNow => "power-off-now",
            Self::Reboot => "reboot",
            Self::Stay => "stay",
        }
    }
}

/// The specification of one guest. All fields may be set directly; [`GuestSpec::new`] gives
/// sensible values.
#[derive(Clone, Debug)]
pub struct GuestSpec {
    /// Shown in messages.
    pub name: String,
    /// Memory in MiB (the guest's kernel and initramfs take about 100).
    pub memory_mib: u32,
    /// Virtual processors.
    pub cpus: u32,
    /// Who serves the disks.
    pub disks: Disks,
    /// A shell script, run by busybox's shell as root in the guest; `guest/prelude` is read before.
    pub script: String,
    /// Further files for the guest, in `/run/host/`: name and content.
    pub files: Vec<(String, Vec<u8>)>,
    /// What happens after the script.
    pub at_end: AtEnd,
    /// The device that holds the root file system (`/dev/vda1`), if the guest shall run from one
    /// made by [`crate::image::root_directory`]; the script runs there.
    pub root: Option<String>,
    /// Mount options of the root file system: "rw,data=journal".
    pub root_options: String,
    /// A reset restarts the machine; otherwise it ends QEMU.
    pub reboots: bool,
    /// Further programs of the host that the guest gets, with their libraries: "sqlite3", or "fio", whose libraries are 90 MB,
    /// so that its guest needs 512 MiB of memory at least.
    pub programs: Vec<&'static str>,
    /// Appended to the kernel's command line.
    pub kernel_arguments: String,
    /// Appended to QEMU's command line.
    pub qemu_arguments: Vec<OsString>,
    /// Set for the wrapper and QEMU.
    pub environment: Vec<(OsString, OsString)>,
    /// Overrides what this machine was found to be capable of.
    pub accelerator: Option<Accelerator>,
    /// Overrides which kernel boots.
    pub kernel: Option<Kernel>,
    /// Modules that init inserts, with what they depend on: "brd rd_nr=1". A guest that needs some gets a kernel that has
    /// modules, unless [`Self::kernel`] names one.
    pub modules: Vec<String>,
    /// QEMU's `-M`: "q35", "pc", "microvm,pcie=on".
    pub machine: String,
    /// How long user space may take to come up.
    pub boot_timeout: Duration,
    /// Where the run's directory is made, if not among temporary files.
    pub directory: Option<PathBuf>,
}

impl GuestSpec {
    /// A guest with 256 MiB, one processor and no disk that runs `script` and powers off.
    pub fn new(name: impl Into<String>, script: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            memory_mib: 256,
            cpus: 1,
            disks: Disks::Plain(Vec::new()),
            script: script.into(),
            files: Vec::new(),
            at_end: AtEnd::PowerOff,
            root: None,
            root_options: "rw".to_owned(),
            reboots: false,
            programs: Vec::new(),
            kernel_arguments: String::new(),
            qemu_arguments: Vec::new(),
            environment: Vec::new(),
            accelerator: None,
            kernel: None,
            modules: Vec::new(),
            machine: "q35".to_owned(),
            boot_timeout: Duration::from_secs(120),
            directory: None,
        }
    }

    /// The same guest with QEMU's own drives.
    #[must_use]
    pub fn drives(mut self, drives: Vec<Drive>) -> Self {
        self.disks = Disks::Plain(drives);
        self
    }

    /// The same guest, its disks given by a wrapper command (the words before `--`).
    #[must_use]
    pub fn wrapper<W: Into<OsString>>(mut self, words: impl IntoIterator<Item = W>) -> Self {
        self.disks = Disks::Wrapper(words.into_iter().map(Into::into).collect());
        self
    }

    /// The small archive of this run: settings, script, files.
    pub(crate) fn run_archive(&self) -> Vec<u8> {
        let mut tree = crate::tree::FileTree::new();
        let settings = format!(
            "GUEST_AT_END={}\nGUEST_ROOT={}\nGUEST_ROOT_OPTIONS={}\n",
            self.at_end.word(),
            quote(self.root.as_deref().unwrap_or_default()),
            quote(&self.root_options),
        );
        tree.file("host/settings", 0o644, settings);
        tree.file("host/script", 0o755, self.script.as_str());
        for (name, content) in &self.files {
            tree.file(&format!("host/{name}"), 0o755, content.as_slice());
        }
        tree.archive()
    }
}

/// One word of a shell, whatever is in it.
pub(crate) fn quote(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quoting_survives_quotes() {
        assert_eq!(quote("a'b"), r"'a'\''b'");
    }
}
