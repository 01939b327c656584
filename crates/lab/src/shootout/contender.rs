//! Who takes part: file systems and their ways to journal, on the same medium, and amberlog's placements.

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
    /// Another one, by its name: what its module and its mkfs are called after.
    Other(&'static str),
}

/// Who serves the guest's disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Served {
    /// amberlog, under this placement (its name and what belongs to it; NVM's and remote's places are added).
    Amberlog(&'static str),
    /// QEMU itself.
    Qemu(Cache),
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

const EXT4: FileSystem = FileSystem::Ext4 { features: "" };
const PLAIN: Served = Served::Amberlog("storage");

const ALL: [(&str, FileSystem, &str, Served); 28] = [
    ("ext4-ordered", EXT4, "data=ordered", PLAIN),
    ("ext4-journal", EXT4, "data=journal", PLAIN),
    ("ext4-fast-commit", FileSystem::Ext4 { features: "fast_commit" }, "data=ordered", PLAIN),
    ("ext4-nobarrier", EXT4, "data=ordered,barrier=0", PLAIN),
    ("ext4-tmpfs-journal", FileSystem::Ext4TmpfsJournal, "data=journal,journal_path=/dev/vdb", PLAIN),
    ("xfs", FileSystem::Other("xfs"), "rw", PLAIN),
    ("btrfs", FileSystem::Other("btrfs"), "rw", PLAIN),
    ("f2fs", FileSystem::Other("f2fs"), "rw", PLAIN),
    ("qemu-none", EXT4, "data=ordered", Served::Qemu(Cache::None)),
    ("qemu-writeback", EXT4, "data=ordered", Served::Qemu(Cache::Writeback)),
    ("qemu-none-journal", EXT4, "data=journal", Served::Qemu(Cache::None)),
    ("qemu-unsafe", EXT4, "data=ordered", Served::Qemu(Cache::Unsafe)),
    ("qemu-unsafe-journal", EXT4, "data=journal", Served::Qemu(Cache::Unsafe)),
    ("retain", EXT4, "data=journal", Served::Amberlog("retain")),
    ("retain-ordered", EXT4, "data=ordered", Served::Amberlog("retain")),
    ("retain-5", EXT4, "data=journal", Served::Amberlog("retain,durable-within=5")),
    ("retain-0", EXT4, "data=journal", Served::Amberlog("retain,durable-within=0")),
    ("retain-0-ordered", EXT4, "data=ordered", Served::Amberlog("retain,durable-within=0")),
    ("retain-5-ordered", EXT4, "data=ordered", Served::Amberlog("retain,durable-within=5")),
    ("retain-never-hot", EXT4, "data=journal", Served::Amberlog("retain,hot-pages=never")),
    ("retain-faulted-hot", EXT4, "data=journal", Served::Amberlog("retain,hot-pages=faulted")),
    ("retain-scattered-8", EXT4, "data=journal", Served::Amberlog("retain,hot-pages=scattered:8")),
    ("retain-scattered-16", EXT4, "data=journal", Served::Amberlog("retain,hot-pages=scattered:16")),
    ("retain-scattered-32", EXT4, "data=journal", Served::Amberlog("retain,hot-pages=scattered:32")),
    ("copy", EXT4, "data=journal", Served::Amberlog("copy")),
    ("nvm", EXT4, "data=journal", Served::Amberlog("nvm")),
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
            FileSystem::Other(kind) => match missing(kind, &stock) {
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

/// Why a file system cannot take part: the guest's kernel has it not, or the host cannot make one.
fn missing(kind: &str, platform: &Platform) -> Option<String> {
    let listed = |directory: &Path, list: &str| {
        let text = std::fs::read_to_string(directory.join(list)).unwrap_or_default();
        text.lines().any(|line| line.contains(&format!("/{kind}.ko")))
    };
    let has = platform.kernel.modules.as_deref().is_some_and(|directory| {
        ["modules.dep", "modules.builtin"].iter().any(|list| listed(directory, list)) || has_module(directory, kind)
    });
    if !has {
        return Some(format!("the guest's kernel ({}) has no {kind}", platform.kernel.version));
    }
    let tool = format!("mkfs.{kind}");
    guest_kit::program::find_program(&tool).is_err().then(|| format!("{tool} is not installed"))
}

/// A kernel package that was only unpacked has no lists yet.
fn has_module(directory: &Path, kind: &str) -> bool {
    let place = directory.join("kernel/fs").join(kind);
    [format!("{kind}.ko"), format!("{kind}.ko.xz")].iter().any(|name| place.join(name).is_file())
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
}
