//! Disks that another host may have open.

use rustix::fs::{Mode, OFlags};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::sync::Once;

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

/// How a disk is read that another host may write.
#[derive(Debug)]
pub(crate) enum Direct {
    /// This host has it to itself.
    NotNeeded,
    /// The same file or device, read past the page cache.
    Open(File),
    /// It cannot be read so, for this reason, and whether that was said.
    Impossible(io::Error, Once),
}

/// The same file or device, read past the page cache where another host may write it.
pub(crate) fn open_direct(file: &File, path: &Path) -> Direct {
    if !may_be_shared(file) {
        return Direct::NotNeeded;
    }
    open_past_cache(file, path)
}

fn open_past_cache(file: &File, path: &Path) -> Direct {
    let open = || {
        let direct = rustix::fs::open(path, OFlags::RDONLY | OFlags::DIRECT | OFlags::CLOEXEC, Mode::empty())?;
        let (a, b) = (rustix::fs::fstat(file)?, rustix::fs::fstat(&direct)?);
        if (a.st_dev, a.st_ino) == (b.st_dev, b.st_ino) {
            return Ok(File::from(direct));
        }
        Err(io::Error::other("another file has its name by now"))
    };
    open().map_or_else(|error| Direct::Impossible(error, Once::new()), Direct::Open)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// It is the file itself that is read, or none; and that it is none is not taken for that none is needed.
    #[test]
    fn a_disk_that_cannot_be_read_past_the_cache_is_known_to_be_one() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("image");
        std::fs::write(&path, [1; 4096]).expect("written");
        let file = File::open(&path).expect("opened");
        std::fs::remove_file(&path).expect("removed");
        assert!(matches!(open_past_cache(&file, &path), Direct::Impossible(..)), "it has gone");
        std::fs::write(&path, [2; 4096]).expect("written");
        let Direct::Impossible(why, _) = open_past_cache(&file, &path) else { panic!("another file is read") };
        assert!(why.kind() == io::ErrorKind::Other || why.kind() == io::ErrorKind::InvalidInput, "{why}");
        assert!(!may_be_shared(&file) || !matches!(open_direct(&file, &path), Direct::NotNeeded));
    }
}
