//! GUID partition tables. Both CRCs must match; the backup table is taken when the primary one's do not.

use crate::bytes::{crc32, le32, le64};
use crate::partition::Partition;
use crate::read::ReadAt;
use std::io;

const SIGNATURE: &[u8] = b"EFI PART";
const HEADER_BYTES: usize = 92;
/// UEFI asks for room for 128 entries; tables of more than this many are not understood.
const ENTRIES_MAX: u32 = 4096;
const ENTRY_BYTES_MAX: u32 = 4096;
const ENTRY_BYTES: usize = 128;
/// Linux looks at no more entries than it can number partitions (`DISK_MAX_PARTS`, less the disk itself): what lies behind is
/// no partition to any guest of ours. That some of them overlap, as those of images that begin as a CD and as a disk do, is nothing to it.
const ENTRIES_LOOKED_AT: usize = 255;

pub(crate) fn partitions<R: ReadAt>(disk: &R) -> io::Result<Vec<Partition>> {
    for sector_bytes in [512, 4096] {
        let sectors = disk.size() / sector_bytes;
        if sectors < 3 {
            continue;
        }
        for header in [1, sectors - 1] {
            if let Some(found) = table(disk, header, sector_bytes)? {
                return Ok(found);
            }
        }
    }
    Ok(Vec::new())
}

fn table<R: ReadAt>(disk: &R, header_sector: u64, sector_bytes: u64) -> io::Result<Option<Vec<Partition>>> {
    let mut header = vec![0; sector_bytes as usize];
    disk.read_at(header_sector * sector_bytes, &mut header)?;
    let Some(table) = Table::parse(&mut header, header_sector, sector_bytes, disk.size()) else { return Ok(None) };
    let mut entries = vec![0; table.entries as usize * table.entry_bytes as usize];
    disk.read_at(table.offset, &mut entries)?;
    if crc32(&entries) != table.checksum {
        return Ok(None);
    }
    let mut found = Vec::new();
    for (number, entry) in (1..).zip(entries.chunks_exact(table.entry_bytes as usize)).take(ENTRIES_LOOKED_AT) {
        let entry = &entry[..ENTRY_BYTES];
        if entry[..16] == [0; 16] {
            continue;
        }
        let (first, last) = (le64(entry, 32), le64(entry, 40));
        let sectors = last.checked_sub(first).and_then(|count| count.checked_add(1)).unwrap_or(0);
        found.extend(Partition::new(number, first, sectors, sector_bytes, disk.size()));
    }
    Ok(Some(found))
}

struct Table {
    offset: u64,
    entries: u32,
    entry_bytes: u32,
    checksum: u32,
}

impl Table {
    fn parse(header: &mut [u8], sector: u64, sector_bytes: u64, disk: u64) -> Option<Table> {
        let bytes = le32(header, 12) as usize;
        if !header.starts_with(SIGNATURE) || !(HEADER_BYTES..=header.len()).contains(&bytes) {
            return None;
        }
        let stored = le32(header, 16);
        header[16..20].fill(0);
        let table = Table {
            offset: le64(header, 72).checked_mul(sector_bytes)?,
            entries: le32(header, 80),
            entry_bytes: le32(header, 84),
            checksum: le32(header, 88),
        };
        let table_bytes = u64::from(table.entries.min(ENTRIES_MAX)) * u64::from(table.entry_bytes.min(ENTRY_BYTES_MAX));
        let is_good = crc32(&header[..bytes]) == stored
            && le64(header, 24) == sector
            && table.entries <= ENTRIES_MAX
            && (ENTRY_BYTES as u32..=ENTRY_BYTES_MAX).contains(&table.entry_bytes)
            && table.offset.checked_add(table_bytes).is_some_and(|end| end <= disk);
        is_good.then_some(table)
    }
}
