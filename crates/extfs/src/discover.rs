//! The ext file systems of a disk.

use crate::inode::internal_journal;
use crate::journal::{Journal, PIECES_MAX};
use crate::read::{ReadAt, Window};
use crate::stacked::{Between, what_lies_between};
use crate::superblock::{SUPERBLOCK_BYTES, SUPERBLOCK_OFFSET, Superblock, compat};
use crate::table::partitions;
use std::cell::Cell;
use std::io;

/// An ext2, ext3 or ext4 file system, or an external journal, on a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileSystem {
    /// The partition that holds it; nothing when it has the whole disk.
    pub partition: Option<u32>,
    /// Byte of the disk where it begins.
    pub offset: u64,
    /// Bytes of its partition (the file system may be shorter).
    pub length: u64,
    /// Its superblock.
    pub superblock: Superblock,
    /// Its journal.
    pub journal: Journal,
}

/// Finds the ext file systems on a disk: the one that has all of it, or those in its partitions. A superblock that is left
/// over in front of a valid partition table is not looked at.
///
/// All the maps of a disk together cost as much as the largest one alone may: partitions can overlap, and each can show the same map.
///
/// # Errors
/// When the disk cannot be read.
pub fn discover<R: ReadAt>(disk: &R) -> io::Result<Vec<FileSystem>> {
    let partitions = partitions(disk)?;
    if partitions.is_empty() {
        return Ok(file_system(disk, None, 0, disk.size())?.into_iter().collect());
    }
    let disk = Counted { disk, reads: Cell::new(0) };
    let mut found = Vec::new();
    let mut pieces = 0;
    for partition in partitions {
        let window = Window::new(&disk, partition.offset, partition.length);
        let Some(superblock) = superblock(&window)? else { continue };
        let journal = if pieces + disk.reads.get() < PIECES_MAX {
            journal(&window, &superblock)?
        } else {
            let reason = format!("the journals before it on its disk are in more than {PIECES_MAX} pieces together");
            Journal::NotUnderstood { reason, behind: None }
        };
        pieces += journal.pieces();
        let (offset, length) = (partition.offset, partition.length);
        found.push(FileSystem { partition: Some(partition.number), offset, length, superblock, journal });
    }
    Ok(found)
}

/// A disk, and how often it was read.
struct Counted<'a, R> {
    disk: &'a R,
    reads: Cell<usize>,
}

impl<R: ReadAt> ReadAt for Counted<'_, R> {
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.reads.set(self.reads.get() + 1);
        self.disk.read_at(offset, buffer)
    }

    fn size(&self) -> u64 {
        self.disk.size()
    }
}

/// The ext file system in the `length` bytes of `disk` from `offset` on, if there is one.
///
/// # Errors
/// When the disk cannot be read.
pub fn file_system<R: ReadAt>(
    disk: &R,
    partition: Option<u32>,
    offset: u64,
    length: u64,
) -> io::Result<Option<FileSystem>> {
    let window = Window::new(disk, offset, length);
    let Some(superblock) = superblock(&window)? else { return Ok(None) };
    let journal = journal(&window, &superblock)?;
    Ok(Some(FileSystem { partition, offset, length, superblock, journal }))
}

fn superblock<R: ReadAt>(window: &R) -> io::Result<Option<Superblock>> {
    if window.size() < SUPERBLOCK_OFFSET + SUPERBLOCK_BYTES as u64 {
        return Ok(None);
    }
    let mut raw = [0; SUPERBLOCK_BYTES];
    window.read_at(SUPERBLOCK_OFFSET, &mut raw)?;
    Ok(Superblock::parse(&raw).ok())
}

fn journal<R: ReadAt>(disk: &R, superblock: &Superblock) -> io::Result<Journal> {
    let not_understood = |reason: String| Ok(Journal::NotUnderstood { reason, behind: None });
    if let Err(error) = superblock.check() {
        return not_understood(error.to_string());
    }
    if superblock.bytes() > disk.size() {
        let (says, has) = (superblock.bytes(), disk.size());
        return not_understood(format!("the superblock says {says} bytes, but there are only {has}: it was cut off"));
    }
    if let Some(Between { what, is_in_place }) = what_lies_between(disk, superblock)? {
        let reason = format!("{what}, so that where its blocks go is not for this disk to say");
        let behind = if is_in_place { Some(Box::new(journal_of(disk, superblock)?)) } else { None };
        return Ok(Journal::NotUnderstood { reason, behind });
    }
    journal_of(disk, superblock)
}

/// The journal of a file system that has its disk for itself.
fn journal_of<R: ReadAt>(disk: &R, superblock: &Superblock) -> io::Result<Journal> {
    let not_understood = |reason: String| Ok(Journal::NotUnderstood { reason, behind: None });
    if superblock.is_journal_device() {
        return Ok(Journal::JournalDevice { superblock_block: if superblock.block_size == 1024 { 2 } else { 1 } });
    }
    if superblock.compat & compat::HAS_JOURNAL == 0 {
        return Ok(Journal::None);
    }
    let has_uuid = superblock.journal_uuid != [0; 16];
    match (superblock.journal_inode, has_uuid) {
        (0, true) => Ok(Journal::External { uuid: superblock.journal_uuid }),
        (0, false) => not_understood("the superblock names neither a journal inode nor a journal device".to_owned()),
        (_, true) => not_understood("the superblock names both a journal inode and a journal device".to_owned()),
        (_, false) => internal_journal(disk, superblock),
    }
}
