//! Who takes part: file systems and their ways to journal, on the same medium, and amberlog's placements.

use super::kinds::Death;
use crate::error::{Error, Result};
use guest_kit::{Cache, Platform};
use std::path::Path;

/// How a file system is made and mounted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FileSystem {
    /// ext4 with its journal inside; `-O` features beyond the usual.
    Ext4 { features: &'static str },
    /// ext4 with its journal on a file in the host's memory.
    Ext4TmpfsJournal,
    /// ext4 on dm-writecache in the guest, whose cache is a file in the host's memory.
    Ext4Writecache,
    /// Another one, by its name: what its module and its mkfs are called after.
    Other(&'static str),
}

/// Who serves the guest's disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Served {
    /// amberlog, under this placement (its name and what belongs to it; NVM's and remote's places are added).
    Amberlog(&'static str),
    /// QEMU itself, on the medium.
    Qemu(Cache),
    /// The same, by a thread of the disk's own and io_uring.
    QemuIothread(Cache),
    /// QEMU itself, on the file behind the medium: the host's page cache takes part, and nobody counts what reaches it.
    QemuCached(Cache),
}

/// What is still there of what was acknowledged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Promise {
    Everything,
    /// What was acknowledged so many seconds before, or earlier.
    Older(u64),
    /// All but the last transaction of each log, which may be gone as a whole: nothing that was acknowledged later is there without what was before.
    AllButLast,
    Nothing,
}

impl Promise {
    pub(super) fn in_words(self) -> String {
        match self {
            Self::Everything => "everything".to_owned(),
            Self::Older(seconds) => format!("what is older than {seconds} s"),
            Self::AllButLast => "all but the last transaction of each log".to_owned(),
            Self::Nothing => "no promise".to_owned(),
        }
    }
}

/// One that takes part.
#[derive(Clone, Debug)]
pub(super) struct Contender {
    pub(super) name: String,
    pub(super) file_system: FileSystem,
    pub(super) mount: &'static str,
    pub(super) served: Served,
    /// What its guest runs on.
    pub(super) platform: Platform,
    /// Whether the guest's kernel must be the stock one, which has modules.
    pub(super) is_stock: bool,
}

impl FileSystem {
    /// Whether a second disk of the guest's, which has a part of it, is a file in the host's memory.
    pub(super) fn has_memory_disk(self) -> bool {
        matches!(self, Self::Ext4TmpfsJournal | Self::Ext4Writecache)
    }

    fn in_words(self) -> String {
        match self {
            Self::Ext4 { features: "" } => "ext4".to_owned(),
            Self::Ext4 { features } => format!("ext4 with {features}"),
            Self::Ext4TmpfsJournal => "ext4, its journal on a file in the host's memory".to_owned(),
            Self::Ext4Writecache => "ext4 on dm-writecache, whose cache is a file in the host's memory".to_owned(),
            Self::Other(kind) => kind.to_owned(),
        }
    }
}

impl Served {
    fn in_words(self) -> String {
        let of = |cache| match cache {
            Cache::None => "none",
            Cache::Writeback => "writeback",
            Cache::Unsafe => "unsafe",
        };
        match self {
            Self::Amberlog(placement) => format!("amberlog, placement={placement}"),
            Self::Qemu(cache) => format!("QEMU, cache={}", of(cache)),
            Self::QemuIothread(cache) => {
                format!("QEMU, cache={},aio=io_uring, a thread of its own (iothread)", of(cache))
            }
            Self::QemuCached(cache) => format!("QEMU, cache={}, on the file behind the medium", of(cache)),
        }
    }

    /// The name of amberlog's placement, and its options as the disk's option has them; nothing where amberlog does not serve it.
    pub(super) fn placement(self) -> Option<(&'static str, &'static str)> {
        let Self::Amberlog(placement) = self else { return None };
        Some(placement.split_at(placement.find(',').unwrap_or(placement.len())))
    }

    /// Whether its journal is in a region or on a server: amberlog brings it home when it serves the disk again.
    pub(super) fn has_journal_elsewhere(self) -> bool {
        matches!(self.placement(), Some(("nvm" | "remote", _)))
    }

    /// Whether a transaction is acknowledged before the flush of its appends has ended.
    pub(super) fn is_pipelined(self) -> bool {
        self.placement().is_some_and(|(_, options)| options.split(',').any(|option| option == "nvm-pipelined=on"))
    }

    /// How many seconds after it is acknowledged a record is durable at the latest, where that goes by age.
    pub(super) fn durable_within(self) -> Option<u64> {
        let Self::Amberlog(placement) = self else { return None };
        placement.split(',').find_map(|word| word.strip_prefix("durable-within="))?.parse().ok()
    }

    /// Whether what it promises is amberlog's word, and no file system's or QEMU's.
    pub(super) fn is_placement(self) -> bool {
        matches!(self, Self::Amberlog(placement) if placement != "storage")
    }

    /// Whether anything of it can be killed and judged: what is not on the medium forgets nothing with the host's power.
    pub(super) fn is_on_medium(self) -> bool {
        !matches!(self, Self::QemuCached(_))
    }
}

/// What is promised for what was acknowledged before a death; `docs/guarantees.md` has amberlog's part of it.
pub(super) fn promise(file_system: FileSystem, mount: &str, served: Served, death: Death) -> Promise {
    if death != Death::Host {
        return Promise::Everything;
    }
    let is_on_memory = file_system.has_memory_disk() || mount.contains("barrier=0");
    match served {
        _ if is_on_memory => Promise::Nothing,
        Served::Qemu(Cache::Unsafe) | Served::QemuIothread(Cache::Unsafe) | Served::QemuCached(_) => Promise::Nothing,
        Served::Amberlog(placement) if placement.starts_with("retain") || placement.starts_with("copy") => {
            match served.durable_within() {
                Some(0) => Promise::Everything,
                Some(seconds) => Promise::Older(seconds),
                None => Promise::Nothing,
            }
        }
        Served::Amberlog(_) if served.is_pipelined() => Promise::AllButLast,
        Served::Amberlog(_) | Served::Qemu(_) | Served::QemuIothread(_) => Promise::Everything,
    }
}

/// How many seconds after it is acknowledged a record of this contender's is durable at the latest, where that goes by age.
pub(super) fn durable_within(name: &str) -> Option<u64> {
    ALL.into_iter().find(|(known, ..)| *known == name)?.3.durable_within()
}

/// File system and mount options, who serves it, and what it promises, in words, of a contender's name.
pub(super) fn described(name: &str) -> Option<[String; 3]> {
    let plain = name.strip_suffix("-stock").unwrap_or(name);
    let (_, file_system, mount, served) = ALL.into_iter().find(|(known, ..)| *known == plain)?;
    let host = promise(file_system, mount, served, Death::Host).in_words();
    let promised = if served.is_on_medium() {
        format!("guest or VMM dies: everything; host dies: {host}")
    } else {
        "not tried".to_owned()
    };
    Some([format!("{}, {mount}", file_system.in_words()), served.in_words(), promised])
}

const EXT4: FileSystem = FileSystem::Ext4 { features: "" };
const PLAIN: Served = Served::Amberlog("storage");

const ALL: [(&str, FileSystem, &str, Served); 35] = [
    ("ext4-ordered", EXT4, "data=ordered", PLAIN),
    ("ext4-journal", EXT4, "data=journal", PLAIN),
    ("ext4-fast-commit", FileSystem::Ext4 { features: "fast_commit" }, "data=ordered", PLAIN),
    ("ext4-nobarrier", EXT4, "data=ordered,barrier=0", PLAIN),
    ("ext4-tmpfs-journal", FileSystem::Ext4TmpfsJournal, "data=journal,journal_path=/dev/vdb", PLAIN),
    ("ext4-writecache", FileSystem::Ext4Writecache, "data=ordered", PLAIN),
    ("xfs", FileSystem::Other("xfs"), "rw", PLAIN),
    ("btrfs", FileSystem::Other("btrfs"), "rw", PLAIN),
    ("f2fs", FileSystem::Other("f2fs"), "rw", PLAIN),
    ("qemu-none", EXT4, "data=ordered", Served::Qemu(Cache::None)),
    ("qemu-writeback", EXT4, "data=ordered", Served::Qemu(Cache::Writeback)),
    ("qemu-writeback-journal", EXT4, "data=journal", Served::Qemu(Cache::Writeback)),
    ("qemu-none-journal", EXT4, "data=journal", Served::Qemu(Cache::None)),
    ("qemu-none-journal-iothread", EXT4, "data=journal", Served::QemuIothread(Cache::None)),
    ("qemu-unsafe", EXT4, "data=ordered", Served::Qemu(Cache::Unsafe)),
    ("qemu-unsafe-journal", EXT4, "data=journal", Served::Qemu(Cache::Unsafe)),
    ("qemu-writeback-cached", EXT4, "data=ordered", Served::QemuCached(Cache::Writeback)),
    ("qemu-writeback-journal-cached", EXT4, "data=journal", Served::QemuCached(Cache::Writeback)),
    ("qemu-unsafe-cached", EXT4, "data=ordered", Served::QemuCached(Cache::Unsafe)),
    ("qemu-unsafe-journal-cached", EXT4, "data=journal", Served::QemuCached(Cache::Unsafe)),
    ("retain", EXT4, "data=journal", Served::Amberlog("retain")),
    ("retain-ordered", EXT4, "data=ordered", Served::Amberlog("retain")),
    ("retain-5", EXT4, "data=journal", Served::Amberlog("retain,durable-within=5")),
    ("retain-0", EXT4, "data=journal", Served::Amberlog("retain,durable-within=0")),
    ("retain-5-ordered", EXT4, "data=ordered", Served::Amberlog("retain,durable-within=5")),
    ("retain-0-ordered", EXT4, "data=ordered", Served::Amberlog("retain,durable-within=0")),
    ("retain-never-hot", EXT4, "data=journal", Served::Amberlog("retain,hot-pages=never")),
    ("retain-faulted-hot", EXT4, "data=journal", Served::Amberlog("retain,hot-pages=faulted")),
    ("retain-foreseen-hot", EXT4, "data=journal", Served::Amberlog("retain,hot-pages=foreseen")),
    ("retain-lone-hot", EXT4, "data=journal", Served::Amberlog("retain,hot-pages=lone")),
    ("copy", EXT4, "data=journal", Served::Amberlog("copy")),
    ("nvm", EXT4, "data=journal", Served::Amberlog("nvm")),
    ("nvm-pipelined", EXT4, "data=journal", Served::Amberlog("nvm,nvm-pipelined=on")),
    ("remote", EXT4, "data=journal", Served::Amberlog("remote")),
    ("remote-ordered", EXT4, "data=ordered", Served::Amberlog("remote")),
];
/// Beside those that need the stock kernel, where that is another platform.
const REFERENCES: [&str; 2] = ["ext4-ordered", "retain"];

/// Those of these names, or all; and why others are left out.
pub(super) fn chosen(names: &[String]) -> Result<(Vec<Contender>, Vec<String>)> {
    let native = Platform::native()?.clone();
    let stock = stock_platform()?;
    let (mut contenders, mut absent, mut references) = (Vec::new(), Vec::new(), false);
    for name in names {
        if !ALL.iter().any(|(known, ..)| known == name) {
            let all = ALL.map(|(name, ..)| name).join(", ");
            return Err(Error::NotOfShootOut(format!("contender '{name}'; there are {all}")));
        }
    }
    for (name, file_system, mount, served) in ALL {
        if !names.is_empty() && !names.iter().any(|chosen| chosen == name) {
            continue;
        }
        let make = |platform: &Platform, is_stock: bool, name: &str| Contender {
            name: name.to_owned(),
            file_system,
            mount,
            served,
            platform: platform.clone(),
            is_stock,
        };
        match file_system {
            FileSystem::Other(_) | FileSystem::Ext4Writecache if is_built_in(file_system, &native)? => {
                match uninstalled(file_system) {
                    Some(reason) => absent.push(format!("{name}: {reason}")),
                    None => contenders.push(make(&native, false, name)),
                }
            }
            FileSystem::Other(_) | FileSystem::Ext4Writecache => match missing(file_system, &stock) {
                Some(reason) => absent.push(format!("{name}: {reason}")),
                None => {
                    references |= native != stock;
                    contenders.push(make(&stock, true, name));
                }
            },
            _ => contenders.push(make(&native, false, name)),
        }
    }
    if references {
        for (name, file_system, mount, served) in ALL.into_iter().filter(|(name, ..)| REFERENCES.contains(name)) {
            let name = format!("{name}-stock");
            contenders.push(Contender { name, file_system, mount, served, platform: stock.clone(), is_stock: true });
        }
    }
    Ok((contenders, absent))
}

/// What a guest with modules runs on here.
fn stock_platform() -> Result<Platform> {
    let mut spec = guest_kit::GuestSpec::new("stock", "true");
    spec.modules.push("brd".to_owned());
    Ok(Platform::for_guest(&spec)?)
}

/// What a kernel needs for a file system: a module, where it is among modules, and the option that builds it in.
fn needed(file_system: FileSystem) -> Option<(&'static str, String, String)> {
    match file_system {
        FileSystem::Other(kind) => Some((kind, format!("kernel/fs/{kind}"), format!("{}_FS", kind.to_uppercase()))),
        FileSystem::Ext4Writecache => {
            Some(("dm-writecache", "kernel/drivers/md".to_owned(), "DM_WRITECACHE".to_owned()))
        }
        FileSystem::Ext4 { .. } | FileSystem::Ext4TmpfsJournal => None,
    }
}

/// Whether a kernel has it without modules.
fn is_built_in(file_system: FileSystem, platform: &Platform) -> Result<bool> {
    match needed(file_system) {
        Some((_, _, option)) => Ok(platform.kernel.has_built_in(&option)?),
        None => Ok(true),
    }
}

/// Why a file system cannot take part: the guest's kernel has it not, or the host lacks a program.
fn missing(file_system: FileSystem, platform: &Platform) -> Option<String> {
    let (kind, place, _) = needed(file_system)?;
    let listed = |directory: &Path, list: &str| {
        let text = std::fs::read_to_string(directory.join(list)).unwrap_or_default();
        text.lines().any(|line| line.contains(&format!("/{kind}.ko")))
    };
    let has = platform.kernel.modules.as_deref().is_some_and(|directory| {
        ["modules.dep", "modules.builtin"].iter().any(|list| listed(directory, list))
            || has_module(&directory.join(&place), kind)
    });
    if !has {
        return Some(format!("the guest's kernel ({}) has no {kind}", platform.kernel.version));
    }
    uninstalled(file_system)
}

/// What the host makes it with, if it does not have that.
fn uninstalled(file_system: FileSystem) -> Option<String> {
    let tool = match file_system {
        FileSystem::Other(kind) => format!("mkfs.{kind}"),
        FileSystem::Ext4Writecache => "dmsetup".to_owned(),
        FileSystem::Ext4 { .. } | FileSystem::Ext4TmpfsJournal => return None,
    };
    guest_kit::program::find_program(&tool).is_err().then(|| format!("{tool} is not installed"))
}

/// A kernel package that was only unpacked has no lists yet.
fn has_module(place: &Path, kind: &str) -> bool {
    [format!("{kind}.ko"), format!("{kind}.ko.xz")].iter().any(|name| place.join(name).is_file())
}

/// All of them, on a platform that nothing is looked for of.
#[cfg(test)]
pub(super) fn all_for_tests(accelerator: guest_kit::Accelerator) -> Vec<Contender> {
    let kernel = guest_kit::Kernel {
        image: "vmlinux".into(),
        modules: None,
        version: "6.12".to_owned(),
        is_smp: false,
        format: guest_kit::kernel::Format::Elf,
    };
    let platform = Platform { accelerator, kernel, cpu: "host".to_owned(), bios: None, kernel_arguments: "" };
    ALL.into_iter()
        .map(|(name, file_system, mount, served)| Contender {
            name: name.to_owned(),
            file_system,
            mount,
            served,
            platform: platform.clone(),
            is_stock: false,
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_unknown_ones_refused() {
        let names: std::collections::BTreeSet<_> = ALL.iter().map(|(name, ..)| name).collect();
        assert_eq!(names.len(), ALL.len());
        assert!(matches!(chosen(&["zfs".to_owned()]), Err(Error::NotOfShootOut(_))));
    }

    #[test]
    fn each_is_held_to_what_it_promises() {
        let of = |name: &str| {
            let (_, file_system, mount, served) = ALL.into_iter().find(|(known, ..)| *known == name).unwrap();
            assert_eq!(promise(file_system, mount, served, Death::Vmm), Promise::Everything, "{name}");
            promise(file_system, mount, served, Death::Host)
        };
        for name in [
            "ext4-ordered",
            "xfs",
            "qemu-none",
            "qemu-none-journal-iothread",
            "qemu-writeback",
            "retain-0",
            "retain-0-ordered",
            "nvm",
            "remote",
        ] {
            assert_eq!(of(name), Promise::Everything, "{name}");
        }
        for name in ["retain-5", "retain-5-ordered"] {
            assert_eq!(of(name), Promise::Older(5), "{name}");
        }
        assert_eq!(of("nvm-pipelined"), Promise::AllButLast);
        for name in [
            "ext4-nobarrier",
            "ext4-tmpfs-journal",
            "ext4-writecache",
            "qemu-unsafe",
            "retain",
            "retain-never-hot",
            "copy",
            "qemu-writeback-journal-cached",
        ] {
            assert_eq!(of(name), Promise::Nothing, "{name}");
        }
        let [_, served, promised] = described("qemu-writeback-journal-cached").unwrap();
        assert_eq!(
            (served.as_str(), promised.as_str()),
            ("QEMU, cache=writeback, on the file behind the medium", "not tried")
        );
        let [_, served, promised] = described("retain-5").unwrap();
        assert_eq!(served, "amberlog, placement=retain,durable-within=5");
        assert_eq!(promised, "guest or VMM dies: everything; host dies: what is older than 5 s");
        assert_eq!(described("ext4-ordered-stock"), described("ext4-ordered"));
        let [_, served, promised] = described("nvm-pipelined").unwrap();
        assert_eq!(served, "amberlog, placement=nvm,nvm-pipelined=on");
        assert_eq!(promised, "guest or VMM dies: everything; host dies: all but the last transaction of each log");
    }

    /// Whose journal is elsewhere must not be looked after by e2fsck before amberlog has brought it home.
    #[test]
    fn a_placement_is_known_with_its_options_too() {
        let of = |name: &str| ALL.into_iter().find(|(known, ..)| *known == name).unwrap().3;
        assert_eq!(of("nvm-pipelined").placement(), Some(("nvm", ",nvm-pipelined=on")));
        assert_eq!(of("nvm").placement(), Some(("nvm", "")));
        assert_eq!(of("qemu-none").placement(), None);
        let elsewhere: Vec<_> = ALL.into_iter().filter(|one| one.3.has_journal_elsewhere()).map(|one| one.0).collect();
        assert_eq!(elsewhere, ["nvm", "nvm-pipelined", "remote", "remote-ordered"]);
        let pipelined: Vec<_> = ALL.into_iter().filter(|one| one.3.is_pipelined()).map(|one| one.0).collect();
        assert_eq!(pipelined, ["nvm-pipelined"]);
    }
}
