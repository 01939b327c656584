//! Partition tables: MBR with logical partitions, and GPT.

use crate::bytes::le32;
use crate::gpt;
use crate::partition::Partition;
use crate::read::ReadAt;
use std::io;

const SECTOR: u64 = 512;
const TYPE_GPT: u8 = 0xee;
/// More logical partitions than Linux gives device numbers to.
const LOGICAL_MAX: usize = 128;

/// The partitions of a disk; none when it has no partition table, or a damaged one.
///
/// # Errors
/// When the disk cannot be read.
///
/// # Examples
/// A disk of ten sectors, whose one partition begins at the third:
/// ```
/// use extfs::partitions;
///
/// let mut disk = vec![0; 10 * 512];
/// let entry = 446;
/// disk[entry + 4] = 0x83;
/// disk[entry + 8..entry + 12].copy_from_slice(&2u32.to_le_bytes());
/// disk[entry + 12..entry + 16].copy_from_slice(&8u32.to_le_bytes());
/// disk[510..512].copy_from_slice(&[0x55, 0xaa]);
///
/// let found = partitions(&disk)?;
/// assert_eq!(found.len(), 1);
/// assert_eq!((found[0].number, found[0].offset, found[0].length), (1, 1024, 4096));
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn partitions<R: ReadAt>(disk: &R) -> io::Result<Vec<Partition>> {
    if disk.size() < 2 * SECTOR {
        return Ok(Vec::new());
    }
    let mut sector = [0; SECTOR as usize];
    disk.read_at(0, &mut sector)?;
    let Some(entries) = entries(&sector) else { return Ok(Vec::new()) };
    if entries.iter().any(|entry| entry.kind == TYPE_GPT) {
        return gpt::partitions(disk);
    }
    let mut found = Vec::new();
    for (number, entry) in (1..).zip(entries) {
        if entry.is_empty() {
            continue;
        }
        // Boot code of a disk without partitions can look like a table at first sight.
        let Some(partition) = entry.partition(number, 0, disk.size()) else { return Ok(Vec::new()) };
        if !entry.is_plausible() || found.iter().any(|other| partition.overlaps(other)) {
            return Ok(Vec::new());
        }
        found.push(partition);
    }
    let extended = entries.iter().position(|entry| entry.is_extended());
    if let Some(index) = extended {
        logical(disk, &entries[index], &mut found)?;
        let number = index as u32 + 1;
        found.retain(|partition| partition.number != number);
    }
    Ok(found)
}

/// Whether the disk's first sector says that there is a GPT.
///
/// # Errors
/// When the disk cannot be read.
pub fn has_gpt<R: ReadAt>(disk: &R) -> io::Result<bool> {
    if disk.size() < 2 * SECTOR {
        return Ok(false);
    }
    let mut sector = [0; SECTOR as usize];
    disk.read_at(0, &mut sector)?;
    Ok(entries(&sector).is_some_and(|entries| entries.iter().any(|entry| entry.kind == TYPE_GPT)))
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    status: u8,
    kind: u8,
    start: u64,
    sectors: u64,
}

impl Entry {
    fn is_empty(&self) -> bool {
        self.kind == 0 || self.sectors == 0
    }

    fn is_plausible(&self) -> bool {
        self.status & 0x7f == 0 && self.start > 0
    }

    fn is_extended(&self) -> bool {
        !self.is_empty() && matches!(self.kind, 0x05 | 0x0f | 0x85)
    }

    fn partition(&self, number: u32, base: u64, disk: u64) -> Option<Partition> {
        Partition::new(number, base + self.start, self.sectors, SECTOR, disk)
    }
}

fn entries(sector: &[u8; SECTOR as usize]) -> Option<[Entry; 4]> {
    (sector[510..] == [0x55, 0xaa]).then(|| {
        std::array::from_fn(|index| {
            let raw = &sector[446 + 16 * index..][..16];
            Entry { status: raw[0], kind: raw[4], start: le32(raw, 8).into(), sectors: le32(raw, 12).into() }
        })
    })
}

/// Where the tables of logical partitions are, or would come next, in bytes of the disk: none without an extended partition.
///
/// # Errors
/// When the disk cannot be read.
pub fn logical_tables<R: ReadAt>(disk: &R) -> io::Result<Vec<u64>> {
    if disk.size() < 2 * SECTOR {
        return Ok(Vec::new());
    }
    let mut sector = [0; SECTOR as usize];
    disk.read_at(0, &mut sector)?;
    let extended = entries(&sector).and_then(|entries| entries.into_iter().find(Entry::is_extended));
    let Some(extended) = extended else { return Ok(Vec::new()) };
    Ok(links(disk, &extended)?.into_iter().map(|(link, _)| link * SECTOR).collect())
}

/// The partitions of a chain of logical ones; each content is relative to its own link.
fn logical<R: ReadAt>(disk: &R, extended: &Entry, found: &mut Vec<Partition>) -> io::Result<()> {
    let mut number = 5;
    for (link, entries) in links(disk, extended)? {
        let content = entries.iter().flatten().find(|entry| !entry.is_empty() && !entry.is_extended());
        if let Some(partition) = content.and_then(|entry| entry.partition(number, link, disk.size())) {
            let others = found.iter().filter(|other| other.number >= 5);
            if others.clone().any(|other| other.overlaps(&partition)) {
                break;
            }
            found.push(partition);
            number += 1;
        }
    }
    Ok(())
}

/// Follows a chain of tables: the sector of each, and its entries, which the last one may not have. Links are relative to the extended partition.
fn links<R: ReadAt>(disk: &R, extended: &Entry) -> io::Result<Vec<(u64, Option<[Entry; 4]>)>> {
    let mut chain = Vec::new();
    let mut link = extended.start;
    for _ in 0..LOGICAL_MAX {
        let Some(offset) = link.checked_mul(SECTOR).filter(|offset| disk.size() >= offset + SECTOR) else { break };
        let mut sector = [0; SECTOR as usize];
        disk.read_at(offset, &mut sector)?;
        let entries = entries(&sector);
        chain.push((link, entries));
        match entries.iter().flatten().find(|entry| entry.is_extended()) {
            Some(next) if next.start > 0 => link = extended.start + next.start,
            _ => break,
        }
    }
    Ok(chain)
}
