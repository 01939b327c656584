//! What is on a disk, in a few words, for people: why no journal was found there. A guess, which nothing depends on.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Marks: offset in bytes, bytes, words.
const MARKS: &[(u64, &[u8], &str)] = &[
    (0, b"LUKS\xba\xbe", "LUKS encryption"),
    (512, b"LABELONE", "an LVM physical volume"),
    (0, b"LABELONE", "an LVM physical volume"),
    (0, b"XFSB", "an XFS file system"),
    (65536 + 64, b"_BHRfS_M", "a btrfs file system"),
    (1024, b"\x10\x20\xf5\xf2", "an F2FS file system"),
    (4096, b"\xfc\x4e\x2b\xa9", "a RAID member"),
    (0, b"\xfc\x4e\x2b\xa9", "a RAID member"),
    (4086, b"SWAPSPACE2", "swap space"),
    (0, b"hsqs", "a squashfs file system"),
    (32769, b"CD001", "an ISO 9660 file system"),
    (3, b"NTFS    ", "an NTFS file system"),
    (82, b"FAT32   ", "a FAT file system"),
    (54, b"FAT16   ", "a FAT file system"),
    (3, b"EXFAT   ", "an exFAT file system"),
    (1024 + 56, b"\x53\xef", "an ext2, ext3 or ext4 file system"),
    (512, b"EFI PART", "a partition table"),
    (510, b"\x55\xaa", "a partition table or boot sector"),
];
const BEGINNING_BYTES: usize = 4096;

/// Says what a disk begins with.
///
/// # Errors
/// When it cannot be read.
pub fn content(image: &File) -> io::Result<&'static str> {
    let is_at = |offset: u64, mark: &[u8]| -> io::Result<bool> {
        let mut found = vec![0; mark.len()];
        match image.read_exact_at(&mut found, offset) {
            Ok(()) => Ok(found == mark),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
            Err(error) => Err(error),
        }
    };
    for (offset, mark, words) in MARKS {
        if is_at(*offset, mark)? {
            return Ok(words);
        }
    }
    let is_zero = is_at(0, &[0; BEGINNING_BYTES])?;
    Ok(if is_zero { "nothing (zeros)" } else { "something that is not known" })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn disks_are_named() {
        let name = |marks: &[(usize, &[u8])]| {
            let mut disk = vec![0; 1 << 20];
            marks.iter().for_each(|(at, mark)| disk[*at..*at + mark.len()].copy_from_slice(mark));
            let mut file = tempfile::tempfile().expect("a file");
            file.write_all(&disk).expect("written");
            content(&file).expect("readable")
        };
        assert_eq!(name(&[]), "nothing (zeros)");
        assert_eq!(name(&[(0, b"what is this")]), "something that is not known");
        assert_eq!(name(&[(512, b"LABELONE")]), "an LVM physical volume");
        assert_eq!(name(&[(0, b"LUKS\xba\xbe")]), "LUKS encryption");
        assert_eq!(name(&[(510, b"\x55\xaa"), (512, b"EFI PART")]), "a partition table");
        assert_eq!(name(&[(510, b"\x55\xaa"), (3, b"NTFS    ")]), "an NTFS file system");
        assert_eq!(content(&tempfile::tempfile().expect("a file")).expect("readable"), "something that is not known");
    }
}
