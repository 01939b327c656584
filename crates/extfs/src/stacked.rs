//! What lies between a file system and its disk, as far as the disk shows it: md, DRBD, LVM, LUKS, bcache.
//!
//! The beginning of such a disk can look like a file system, and where blocks go can still be somebody else's matter. In an md
//! mirror with its metadata at the end, and under DRBD with internal metadata, every block is where the file system says. They are left
//! alone too: a recovery would bring one mirror forward and not the others, the array would read now from this one and now
//! from that, and a resync from another one would take back what was recovered.
//!
//! A device-mapper table leaves no trace. Whoever holds a journal has to notice from what the guest does (crate
//! `journal-area`).

use crate::read::ReadAt;
use crate::superblock::Superblock;
use std::io;

const SECTOR: u64 = 512;
/// Of DRBD's metadata, 60 bytes into its last block and big-endian: of version 8 in use and not (as its activity log tells), and of
/// version 9 (kernel: drbd_int.h, `meta_data_on_disk`; drbd-utils: drbdmeta.c, v08 and v09).
const DRBD_MAGICS: std::ops::RangeInclusive<u32> = 0x8374_026b..=0x8374_026d;
const DRBD_BLOCK: u64 = 4096;
const MD_MAGIC: u32 = 0xa92b_4efc;
/// Of bcache's superblock, 24 bytes into it.
const BCACHE_MAGIC: [u8; 16] =
    [0xc6, 0x85, 0x73, 0xf6, 0x4e, 0x1a, 0x45, 0xca, 0x82, 0x65, 0xf5, 0x7f, 0x48, 0xba, 0x6d, 0x81];
/// Where md's metadata 1.2 and bcache's superblock are.
const SECOND_PAGE: u64 = 4096;

/// What lies between a file system and its disk.
pub(crate) struct Between {
    /// As a sentence without its end.
    pub what: String,
    /// The file system is where it seems to be, and its blocks are where it says.
    pub is_in_place: bool,
}

/// What `disk`, which begins with the file system that `superblock` is of, belongs to beside it; nothing if it shows nothing.
///
/// # Errors
/// When the disk cannot be read.
pub(crate) fn what_lies_between<R: ReadAt>(disk: &R, superblock: &Superblock) -> io::Result<Option<Between>> {
    let in_front = |what: &str| Ok(Some(Between { what: what.to_owned(), is_in_place: false }));
    let mut word = [0; 8];
    for sector in 0..4 {
        if read(disk, sector * SECTOR, &mut word)? && word == *b"LABELONE" {
            return in_front("the disk is a physical volume of LVM (there is its label)");
        }
    }
    if read(disk, 0, &mut word)? && word[..6] == *b"LUKS\xba\xbe" {
        return in_front("the disk is encrypted (there is a LUKS header)");
    }
    let mut magic = [0; 16];
    if read(disk, SECOND_PAGE + 24, &mut magic)? && magic == BCACHE_MAGIC {
        return in_front("the disk belongs to bcache (there is its superblock)");
    }
    for (metadata, at) in md_places(disk.size()) {
        // What the file system reaches over is its own, and only left over from an array that was.
        let is_at_the_end = at > SECOND_PAGE;
        if (!is_at_the_end || at >= superblock.bytes()) && is_md(disk, at)? {
            let what = format!("the disk is a member of an md array (metadata {metadata} at byte {at})");
            return Ok(Some(Between { what, is_in_place: is_at_the_end }));
        }
    }
    // Internal metadata ends with the disk, in whole blocks of 4 KiB.
    let drbd_at = (disk.size() & !(DRBD_BLOCK - 1)).saturating_sub(DRBD_BLOCK);
    let mut magic = [0; 4];
    if drbd_at >= superblock.bytes()
        && read(disk, drbd_at + 60, &mut magic)?
        && DRBD_MAGICS.contains(&u32::from_be_bytes(magic))
    {
        let what = "the disk is replicated by DRBD (there is its metadata at the end)".to_owned();
        return Ok(Some(Between { what, is_in_place: true }));
    }
    Ok(None)
}

/// Where md has its metadata on a device of `size` bytes (kernel: md.c, super_90_load and super_1_load).
fn md_places(size: u64) -> Vec<(&'static str, u64)> {
    let sectors = size / SECTOR;
    let mut places = vec![("1.1", 0), ("1.2", SECOND_PAGE)];
    if sectors >= 16 {
        places.push(("1.0", ((sectors - 16) & !7) * SECTOR));
    }
    if sectors >= 256 {
        places.push(("0.90", ((sectors & !127) - 128) * SECTOR));
    }
    places
}

fn is_md<R: ReadAt>(disk: &R, at: u64) -> io::Result<bool> {
    let mut raw = [0; 152];
    if !read(disk, at, &mut raw)? {
        return Ok(false);
    }
    let number = |from: usize| u32::from_le_bytes([raw[from], raw[from + 1], raw[from + 2], raw[from + 3]]);
    let own_place = u64::from(number(144)) | u64::from(number(148)) << 32;
    Ok(number(0) == MD_MAGIC
        && match number(4) {
            0 => number(8) == 90,
            1 => own_place == at / SECTOR,
            _ => false,
        })
}

/// Reads what is there; false when the disk is not that long.
fn read<R: ReadAt>(disk: &R, at: u64, buffer: &mut [u8]) -> io::Result<bool> {
    if at + buffer.len() as u64 > disk.size() {
        return Ok(false);
    }
    disk.read_at(at, buffer).map(|()| true)
}
