//! What a guest shall be: memory, disks, the script it runs, how it ends; and the QEMU command
//! line that follows from it.

use crate::accelerator::Accelerator;
use crate::kernel::Kernel;
use crate::platform::Platform;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
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

    /// QEMU's arguments (without the program's name), for a run whose sockets, console and pid
    /// file are in `directory`.
    pub(crate) fn arguments(&self, platform: &Platform, directory: &Path) -> Vec<OsString> {
        let mut arguments: Vec<OsString> = Vec::new();
        let mut add = |words: &[&str]| arguments.extend(words.iter().map(OsString::from));
        let file = |name: &str| directory.join(name).to_string_lossy().replace(',', ",,");
        add(&["-M", &self.machine, "-m", &format!("{}M", self.memory_mib)]);
        add(&["-smp", &self.cpus.to_string(), "-nodefaults", "-display", "none"]);
        add(&["-accel", platform.accelerator.name(), "-cpu", &platform.cpu]);
        if let Some(bios) = &platform.bios {
            add(&["-bios", bios]);
        }
        if !self.reboots {
            add(&["-no-reboot"]);
        } else if platform.accelerator == Accelerator::Kvm {
            // A processor that is halted by KVM until a page comes stays so for good if QEMU resets it meanwhile (docs/guarantees.md,
            // "Limits"): a fault of KVM's, which is not what these guests are about.
            add(&["-overcommit", "cpu-pm=on"]);
        }
        add(&["-chardev", &format!("file,id=console,path={},append=on", file("console.log"))]);
        add(&["-serial", "chardev:console"]);
        add(&["-chardev", &format!("socket,id=report,path={}", file("report"))]);
        if self.machine.starts_with("microvm") {
            // It has one serial port; init makes /dev/ttyS1 of this.
            add(&["-device", "virtio-serial-pci", "-device", "virtconsole,chardev=report"]);
        } else {
            add(&["-serial", "chardev:report"]);
        }
        add(&["-chardev", &format!("socket,id=qmp,path={}", file("qmp"))]);
        add(&["-mon", "chardev=qmp,mode=control"]);
        add(&["-pidfile", &file("qemu.pid")]);
        add(&["-kernel", &platform.kernel.image.to_string_lossy()]);
        add(&["-initrd", &directory.join("initramfs").to_string_lossy()]);
        // Kernels from 6.8 on may refuse tools that write beside a mounted file system: resize2fs, tune2fs, a wild write.
        let common = "console=ttyS0 loglevel=4 panic=-1 mitigations=off bdev_allow_write_mounted=1";
        let words = [common, platform.kernel_arguments, &self.kernel_arguments];
        add(&["-append", &words.join(" ")]);
        if let Disks::Plain(drives) = &self.disks {
            for (index, drive) in drives.iter().enumerate() {
                let mut node = serde_json::json!({
                    "driver": "raw",
                    "node-name": format!("disk{index}"),
                    "read-only": drive.read_only,
                    "discard": "unmap",
                    "cache": {
                        "direct": drive.cache == Cache::None,
                        "no-flush": drive.cache == Cache::Unsafe,
                    },
                    "file": { "driver": "file", "filename": drive.image.to_string_lossy() },
                });
                let mut device = format!("virtio-blk-pci,drive=disk{index}");
                if drive.has_iothread {
                    node["file"]["aio"] = "io_uring".into();
                    add(&["-object", &format!("iothread,id=thread{index}")]);
                    device += &format!(",iothread=thread{index}");
                }
                add(&["-blockdev", &node.to_string()]);
                add(&["-device", &device]);
            }
        }
        arguments.extend(self.qemu_arguments.iter().cloned());
        arguments
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

    #[test]
    fn drives_come_in_order_and_a_wrapper_has_none() {
        let mut spec = GuestSpec::new("test", "true")
            .drives(vec![Drive::new("/a,b.img", Cache::None), Drive::new("/c.img", Cache::Unsafe)]);
        let platform = Platform::emulated().unwrap();
        let text = |spec: &GuestSpec| {
            spec.arguments(&platform, Path::new("/run,dir"))
                .iter()
                .map(|word| word.to_string_lossy().into_owned())
                .collect::<Vec<_>>()
        };
        let words = text(&spec);
        assert!(words.iter().any(|word| word.contains(r#""filename":"/a,b.img""#)));
        assert!(words.iter().any(|word| word.contains("path=/run,,dir/report")));
        let first = words.iter().position(|word| word.ends_with("drive=disk0")).unwrap();
        let second = words.iter().position(|word| word.ends_with("drive=disk1")).unwrap();
        assert!(first < second);
        assert!(!words.iter().any(|word| word.contains("iothread") || word.contains("aio")), "{words:?}");
        let mut drive = Drive::new("/a.img", Cache::None);
        drive.has_iothread = true;
        let words = text(&GuestSpec::new("test", "true").drives(vec![drive]));
        assert!(words.iter().any(|word| word == "iothread,id=thread0"));
        assert!(words.iter().any(|word| word == "virtio-blk-pci,drive=disk0,iothread=thread0"));
        assert!(words.iter().any(|word| word.contains(r#""aio":"io_uring""#)));
        spec = spec.wrapper(["amberlog", "run"]);
        assert!(!text(&spec).iter().any(|word| word.starts_with("virtio-blk")));
    }
}
