//! The kernels that guests boot: Debian's stock one, and others given as a file. What can be known of a kernel without
//! booting it is read from its image: version, and whether it was built for more than one processor.
//!
//! Failure story: a file that is no kernel is an error that says what it lacks.

use crate::error::{Error, FileContext, Result};
use crate::modules::ModuleTree;
use crate::program;
use crate::tree::FileTree;
use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// Modules that every guest loads, with what they depend on. ext4 and jbd2 are built into
/// Debian's cloud kernel; the list says so to the reader and would load them elsewhere.
const MODULES: [&str; 4] = ["virtio_pci", "virtio_blk", "ext4", "jbd2"];

/// A kernel's configuration is some hundred kB of text.
const CONFIGURATION_BYTES_MAX: u64 = 8 << 20;

/// How an image begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// A bzImage, which unpacks itself.
    Compressed,
    /// An ELF file, entered by way of its PVH note.
    Elf,
}

/// A kernel that guests can boot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kernel {
    /// The file for QEMU's `-kernel`.
    pub image: PathBuf,
    /// Its `lib/modules/VERSION`; without one, all that guests need is built in.
    pub modules: Option<PathBuf>,
    /// "6.1.0-56-cloud-amd64".
    pub version: String,
    /// It can use more than one processor.
    pub is_smp: bool,
    /// How the image begins.
    pub format: Format,
}

impl Kernel {
    /// Debian's kernel, fetched if need be.
    ///
    /// # Errors
    /// When it cannot be fetched: scripts/fetch-kernel.sh.
    pub fn stock() -> Result<&'static Self> {
        static STOCK: OnceLock<std::result::Result<Kernel, String>> = OnceLock::new();
        STOCK
            .get_or_init(|| stock().map_err(|error| error.to_string()))
            .as_ref()
            .map_err(|text| Error::Assets(text.clone()))
    }

    /// An unpacked package of Debian's: `boot/vmlinuz-VERSION` and `lib/modules/VERSION` below `directory`.
    ///
    /// # Errors
    /// When one of them is not there, or is none.
    pub fn unpacked(directory: &Path) -> Result<Self> {
        let mut kernel = Self::of_file(&first_with_prefix(&directory.join("boot"), "vmlinuz-")?)?;
        kernel.modules = Some(first_with_prefix(&directory.join("lib/modules"), "")?);
        Ok(kernel)
    }

    /// A kernel that needs no modules.
    ///
    /// # Errors
    /// When the file cannot be read or is no kernel for x86.
    pub fn of_file(image: &Path) -> Result<Self> {
        let bytes = std::fs::read(image).at("read", image)?;
        let (format, banner) = banner(&bytes).ok_or_else(|| {
            Error::Assets(format!(
                "{} is no guest's kernel: neither a bzImage nor an uncompressed vmlinux with a version in it",
                image.display()
            ))
        })?;
        let is_smp = banner.split_whitespace().any(|word| word == "SMP");
        let version = banner.split_whitespace().next().unwrap_or_default().to_owned();
        Ok(Self { image: image.to_owned(), modules: None, version, is_smp, format })
    }

    /// Whether something is built into the kernel, by the configuration that it carries: "XFS_FS". What carries none is taken not to have it.
    ///
    /// # Errors
    /// When the image cannot be read.
    pub fn has_built_in(&self, option: &str) -> Result<bool> {
        let bytes = std::fs::read(&self.image).at("read", &self.image)?;
        let line = format!("CONFIG_{option}=y");
        Ok(configuration(&bytes).is_some_and(|text| text.lines().any(|known| known == line)))
    }

    /// What every guest loads and what `wanted` names, with what these depend on, as an archive to append to the initramfs: the
    /// modules and a list in the order in which init inserts them. A word of `wanted` may have parameters: "brd rd_nr=1".
    ///
    /// # Errors
    /// When there is none of a name. A kernel that has no modules is taken to have everything built in.
    pub(crate) fn modules_archive(&self, wanted: &[String]) -> Result<Arc<[u8]>> {
        type Key = (Option<PathBuf>, Vec<String>);
        static ARCHIVES: Mutex<BTreeMap<Key, Arc<[u8]>>> = Mutex::new(BTreeMap::new());
        let key = (self.modules.clone(), wanted.to_vec());
        let mut archives = ARCHIVES.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(archive) = archives.get(&key) {
            return Ok(archive.clone());
        }
        let archive: Arc<[u8]> = self.read_modules(wanted)?.into();
        archives.insert(key, archive.clone());
        Ok(archive)
    }

    fn read_modules(&self, wanted: &[String]) -> Result<Vec<u8>> {
        let mut tree = FileTree::new();
        let mut list = String::new();
        if let Some(directory) = &self.modules {
            let of = |line: &str| line.split_whitespace().next().unwrap_or_default().to_owned();
            let names: Vec<String> =
                MODULES.iter().map(|name| (*name).to_owned()).chain(wanted.iter().map(|line| of(line))).collect();
            let names: Vec<&str> = names.iter().map(String::as_str).collect();
            for module in ModuleTree::read(directory)?.load_order(&names)? {
                let stem = module.file_stem().unwrap_or_default().to_string_lossy().into_owned();
                let parameters = wanted.iter().find(|line| of(line).replace('-', "_") == stem.replace('-', "_"));
                let parameters = parameters.and_then(|line| line.split_once(' ')).map_or("", |(_, rest)| rest);
                tree.file(&format!("lib/modules/{stem}.ko"), 0o644, std::fs::read(&module).at("read", &module)?);
                list.push_str(&format!("/lib/modules/{stem}.ko {parameters}\n"));
            }
        }
        tree.file("etc/load-modules", 0o644, list);
        Ok(tree.archive())
    }
}

/// Between these marks a kernel that was built with `IKCONFIG` has its own configuration, compressed (kernel/configs.c).
const CONFIGURATION: [&[u8]; 2] = [b"IKCFG_ST", b"IKCFG_ED"];

/// The configuration that an uncompressed kernel carries.
fn configuration(bytes: &[u8]) -> Option<String> {
    let find = |mark: &[u8], from: usize| {
        bytes.get(from..)?.windows(mark.len()).position(|window| window == mark).map(|at| from + at)
    };
    let [begin, end] = CONFIGURATION;
    let begin = find(begin, 0)? + begin.len();
    let end = find(end, begin)?;
    let mut text = String::new();
    flate2::read::GzDecoder::new(&bytes[begin..end]).take(CONFIGURATION_BYTES_MAX).read_to_string(&mut text).ok()?;
    Some(text)
}

/// The format of an image, and what it says of itself: version, builder, "#1 SMP …". The places are those of the kernel's
/// documentation: arch/x86/boot ("HdrS" at 0x202, `kernel_version` at 0x20e).
fn banner(bytes: &[u8]) -> Option<(Format, String)> {
    let text = |at: usize| -> Option<String> {
        let rest = bytes.get(at..bytes.len().min(at + 512))?;
        let end = rest.iter().position(|byte| matches!(byte, 0 | b'\n'))?;
        Some(String::from_utf8_lossy(&rest[..end]).into_owned())
    };
    if bytes.get(0x202..0x206) == Some(b"HdrS") {
        let pointer = u16::from_le_bytes(bytes.get(0x20e..0x210)?.try_into().ok()?);
        return text(usize::from(pointer) + 0x200).map(|banner| (Format::Compressed, banner));
    }
    if !bytes.starts_with(b"\x7fELF") {
        return None;
    }
    const BEGINNING: &[u8] = b"Linux version ";
    let candidates = bytes.windows(BEGINNING.len()).enumerate().filter(|(_, window)| *window == BEGINNING);
    // Among them are a format of printk ("Linux version %s") and one that the build has not filled in to its end.
    let banners = candidates.filter_map(|(at, _)| text(at + BEGINNING.len()));
    let banners = banners.filter(|banner| banner.starts_with(|first: char| first.is_ascii_digit()));
    banners.max_by_key(String::len).map(|banner| (Format::Elf, banner))
}

/// The unpacked kernel package, after `scripts/fetch-kernel.sh` made sure of it.
fn stock() -> Result<Kernel> {
    let directory = program::workspace().join("build/guest/kernel");
    if !directory.join("package").is_file() {
        let script = program::workspace().join("scripts/fetch-kernel.sh");
        program::run(&mut Command::new(script), &[0])?;
    }
    Kernel::unpacked(&directory)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_tells_its_version_and_whether_it_knows_of_other_processors() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("kernel");
        let mut compressed = vec![0; 0x1000];
        compressed[0x202..0x206].copy_from_slice(b"HdrS");
        compressed[0x20e..0x210].copy_from_slice(&0x0400u16.to_le_bytes());
        let text = b"6.1.0-56-cloud-amd64 (a@b) #1 SMP PREEMPT_DYNAMIC Debian\0";
        compressed[0x600..0x600 + text.len()].copy_from_slice(text);
        std::fs::write(&path, compressed).unwrap();
        let kernel = Kernel::of_file(&path).unwrap();
        assert_eq!((kernel.version.as_str(), kernel.is_smp), ("6.1.0-56-cloud-amd64", true));
        assert_eq!(kernel.format, Format::Compressed);

        let mut elf = b"\x7fELF".to_vec();
        elf.extend_from_slice(b"....Linux version %s\0....Linux version 6.12.1 (a@b) (gcc) #1 PREEMPT_NONE\n\0");
        std::fs::write(&path, elf).unwrap();
        let kernel = Kernel::of_file(&path).unwrap();
        assert_eq!((kernel.version.as_str(), kernel.is_smp, kernel.format), ("6.12.1", false, Format::Elf));

        std::fs::write(&path, b"#!/bin/sh\n").unwrap();
        let error = Kernel::of_file(&path).unwrap_err().to_string();
        assert!(error.contains("is no guest's kernel"), "{error}");
    }

    #[test]
    fn a_kernel_that_carries_its_configuration_tells_what_is_built_in() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("kernel");
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
        std::io::Write::write_all(&mut gzip, b"CONFIG_XFS_FS=y\n# CONFIG_F2FS_FS is not set\nCONFIG_BTRFS_FS=m\n")
            .unwrap();
        let mut elf = b"\x7fELF....Linux version 6.12.1 (a@b) (gcc) #1 PREEMPT_NONE\n\0".to_vec();
        std::fs::write(&path, &elf).unwrap();
        assert!(!Kernel::of_file(&path).unwrap().has_built_in("XFS_FS").unwrap(), "it carries none");
        elf.extend([CONFIGURATION[0], &gzip.finish().unwrap(), CONFIGURATION[1]].concat());
        std::fs::write(&path, &elf).unwrap();
        let kernel = Kernel::of_file(&path).unwrap();
        let has = ["XFS_FS", "F2FS_FS", "BTRFS_FS", "XFS"].map(|option| kernel.has_built_in(option).unwrap());
        assert_eq!(has, [true, false, false, false]);
    }

    #[test]
    fn a_module_is_listed_after_what_it_needs_and_with_its_parameters() {
        let kernel = Kernel::stock().unwrap();
        let archive = kernel.modules_archive(&["brd rd_nr=1 rd_size=4096".to_owned()]).unwrap();
        let text = String::from_utf8_lossy(&archive);
        let list = text.split("/lib/modules/virtio_pci.ko \n").nth(1).expect("every guest loads it");
        assert!(list.contains("/lib/modules/brd.ko rd_nr=1 rd_size=4096\n"));
        assert!(kernel.modules_archive(&["no-such-module".to_owned()]).is_err());
    }
}
