//! Disks that another host may have open.

use rustix::fs::{Mode, OFlags};
use std::fs::File;
use std::os::unix::fs::FileTypeExt;

/// File systems that one host has to itself, by what `statfs` calls them.
const LOCAL: [i64; 11] = [
    0xef53,      // ext2, ext3, ext4
    0x5846_5342, // XFS
    0x9123_683e, // btrfs
    0x0102_1994, // tmpfs
    0x8584_58f6, // ramfs
    0x794c_7630, // overlayfs
    0x2fc1_2fc1, // ZFS
    0xf2f5_2010, // F2FS
    0xca45_1a4e, // bcachefs
    0x3153_464a, // JFS
    0x4d44,      // FAT
];

/// Whether another host may have this disk open: image locks do not reach there.
pub(crate) fn may_be_shared(file: &File) -> bool {
    if file.metadata().is_ok_and(|metadata| metadata.file_type().is_block_device()) {
        return true;
    }
    !rustix::fs::fstatfs(file).is_ok_and(|status| LOCAL.contains(&status.f_type))
}

/// The same file or device, read past the page cache; nothing where that cannot be, or need not.
pub(crate) fn open_direct(file: &File, path: &std::path::Path) -> Option<File> {
    if !may_be_shared(file) {
        return None;
    }
    let direct = rustix::fs::open(path, OFlags::RDONLY | OFlags::DIRECT | OFlags::CLOEXEC, Mode::empty()).ok()?;
    let (a, b) = (rustix::fs::fstat(file).ok()?, rustix::fs::fstat(&direct).ok()?);
    ((a.st_dev, a.st_ino) == (b.st_dev, b.st_ino)).then(|| File::from(direct))
}
