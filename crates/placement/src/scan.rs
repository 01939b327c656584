//! Finding logs on a VM's disks, through crate `extfs`.

use crate::disk::Disk;
use crate::layout::{
    DiskLayout, GPT_FIELDS, HomeRange, LogRange, LogRun, PARTITION_FIELDS, SUPERBLOCK_FIELDS, TABLE_FIELDS, Watch,
};
use block_route::LogIndex;
use extfs::{FileSystem, Journal, ReadAt, SUPERBLOCK_BYTES, SUPERBLOCK_OFFSET};
use journal_area::LOG_BLOCKS_MAX;
use recovery::HomeBounds;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use write_log::LoggedFile;

/// Where a log and its file system are. Two scans that give the same mean the same log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FoundLogPlace {
    /// Index of the disk with the file system.
    pub home_disk: usize,
    /// Index of the disk with the log.
    pub journal_disk: usize,
    /// Where the file system begins on its disk, in bytes.
    pub home_start: u64,
    /// Bytes in a block.
    pub block_bytes: u32,
    /// Blocks in the log, its superblock (position 0) included.
    pub log_blocks: u32,
    /// Blocks that there is room for where the file system is. It may have fewer; when it grows, blocks beyond its end are
    /// in the log before its superblock says so, and jbd2 replays them.
    pub home_blocks: u64,
    /// Where the log blocks are, in order. For an external journal the superblock, which there is device block 1 or 2,
    /// is position 0, and every other position is its device block.
    pub runs: Vec<LogRun>,
    /// Blocks of the file system that the log and its map take.
    pub own_blocks: Vec<Range<u64>>,
    /// Whether the log is on a journal device.
    pub is_external: bool,
    /// UUID of the file system.
    pub file_system_uuid: [u8; 16],
}

/// Where log block `position` is, in bytes, given the runs of its log, in their order: a guest decides how many these are.
pub(crate) fn offset_of(runs: &[LogRun], block_bytes: u32, position: u32) -> Option<u64> {
    let behind = runs.partition_point(|run| run.first_position <= position);
    let run = runs[..behind].last().filter(|run| position - run.first_position < run.count)?;
    Some(run.offset + u64::from(position - run.first_position) * u64::from(block_bytes))
}

impl FoundLogPlace {
    /// Whether they have a block in common.
    pub(crate) fn shares_blocks_with(&self, other: &FoundLogPlace) -> bool {
        let theirs = other.ranges();
        self.ranges().iter().any(|(disk, mine)| {
            theirs.iter().any(|(of, range)| of == disk && range.start < mine.end && mine.start < range.end)
        })
    }

    /// Where log block `position` is on its disk, in bytes.
    pub(crate) fn offset_of(&self, position: u32) -> Option<u64> {
        offset_of(&self.runs, self.block_bytes, position)
    }

    /// Which blocks are not the log's own, for who asks for many of them.
    pub(crate) fn all_but_own(&self) -> HomeBounds {
        let own = self.own_blocks.iter().map(|range| (range.start, range.end)).collect();
        HomeBounds::from_parts(u64::MAX, self.block_bytes, own)
    }

    /// How much there is to be written down of where it is: runs and ranges, and for the rest as much as some of these take.
    pub(crate) fn pieces_described(&self) -> usize {
        16 + self.runs.len() + self.own_blocks.len()
    }

    /// Bytes of the whole log.
    pub(crate) fn log_bytes(&self) -> u64 {
        u64::from(self.log_blocks) * u64::from(self.block_bytes)
    }

    /// Whether a place that was read from a file can be that of a log with these blocks: nothing overflows, and an internal log
    /// lies in its file system. Looking for a block without a place is an error later, as its table says which are needed.
    ///
    /// # Errors
    /// What is wrong.
    pub(crate) fn check(&self, block_bytes: u32, log_blocks: u32) -> Result<(), String> {
        let bytes = |blocks: u64| blocks.checked_mul(u64::from(block_bytes));
        if (self.block_bytes, self.log_blocks) != (block_bytes, log_blocks) {
            return Err(format!(
                "a log of {} blocks of {} bytes is described, and its table is of {log_blocks} of {block_bytes}",
                self.log_blocks, self.block_bytes
            ));
        }
        let home_end = bytes(self.home_blocks)
            .and_then(|len| self.home_start.checked_add(len))
            .filter(|end| i64::try_from(*end).is_ok())
            .ok_or_else(|| {
                format!("a file system of {} blocks at byte {} cannot be", self.home_blocks, self.home_start)
            })?;
        if self.runs.len() > log_blocks as usize {
            return Err(format!("a log of {log_blocks} blocks is said to be in {} pieces", self.runs.len()));
        }
        for run in &self.runs {
            let end = bytes(u64::from(run.count)).and_then(|len| run.offset.checked_add(len));
            let is_inside = end.is_some_and(|end| {
                if self.is_external {
                    i64::try_from(end).is_ok()
                } else {
                    run.offset >= self.home_start && end <= home_end
                }
            });
            if !is_inside {
                return Err(format!(
                    "the log's blocks from {} on are said to be where they cannot be",
                    run.first_position
                ));
            }
        }
        Ok(())
    }

    /// Where it is: of each range of bytes, the disk.
    fn ranges(&self) -> Vec<(usize, Range<u64>)> {
        let bytes =
            |start: u64, blocks: u64| start..start.saturating_add(blocks.saturating_mul(self.block_bytes.into()));
        // An internal log lies in its file system.
        let runs = self.runs.iter().filter(|_| self.is_external);
        std::iter::once((self.home_disk, bytes(self.home_start, self.home_blocks)))
            .chain(runs.map(|run| (self.journal_disk, bytes(run.offset, run.count.into()))))
            .collect()
    }

    /// Whether both are the same log in the same place. A file system that is mounted can grow, and be given another UUID.
    pub fn is_same_log(&self, other: &FoundLogPlace) -> bool {
        let where_it_is = |place: &FoundLogPlace| {
            let FoundLogPlace { home_disk, journal_disk, home_start, block_bytes, log_blocks, is_external, .. } =
                *place;
            (home_disk, journal_disk, home_start, block_bytes, log_blocks, is_external)
        };
        where_it_is(self) == where_it_is(other) && self.runs == other.runs && self.own_blocks == other.own_blocks
    }
}

/// What a scan found.
#[derive(Debug)]
pub(crate) struct Found {
    /// Of each disk, the watches; logs and homes are added once the logs have their numbers.
    pub layouts: Vec<DiskLayout>,
    pub logs: Vec<FoundLogPlace>,
    /// Logs that are left alone though it is known where they are. What storage says of them counts.
    pub left_alone: Vec<LeftAlone>,
    /// Journals that are left alone: the disk, and why.
    pub not_understood: Vec<(usize, String)>,
}

impl Found {
    /// Every log, whoever it is of: for who only reads what storage says of them.
    pub fn all(self) -> impl Iterator<Item = FoundLogPlace> {
        self.logs.into_iter().chain(self.left_alone.into_iter().map(|left| left.place))
    }
}

/// A log that is left alone.
#[derive(Clone, Debug)]
pub(crate) struct LeftAlone {
    pub place: FoundLogPlace,
    /// Why, as a sentence without its full stop.
    pub reason: String,
}

pub(crate) struct DiskReader<'a> {
    file: &'a File,
    pub(crate) size: u64,
}

impl<'a> DiskReader<'a> {
    pub(crate) fn new(file: &'a File) -> io::Result<Self> {
        // Block devices have no length of their own; their end does.
        let size = rustix::fs::seek(file, rustix::fs::SeekFrom::End(0))?;
        Ok(DiskReader { file, size })
    }
}

impl ReadAt for DiskReader<'_> {
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(buffer, offset)
    }

    fn size(&self) -> u64 {
        self.size
    }
}

/// Of what is said of one file system each, so much is said at each look: a guest's table can have many.
const SAID_MAX: usize = 8;

/// Looks at every disk.
pub(crate) fn scan(disks: &[Arc<Disk>]) -> io::Result<Found> {
    let mut layouts = Vec::new();
    let mut file_systems: Vec<(usize, FileSystem)> = Vec::new();
    let mut not_understood = Vec::new();
    let mut left_alone = Vec::new();
    for (index, disk) in disks.iter().enumerate() {
        let reader = DiskReader::new(disk.file.for_reading())?;
        layouts.push(DiskLayout { watches: watches(&reader)?, ..DiskLayout::default() });
        let first = not_understood.len();
        for file_system in extfs::discover(&reader)? {
            if let Journal::NotUnderstood { reason, .. } = &file_system.journal {
                not_understood.push((index, reason.clone()));
                if not_understood.len() - first <= SAID_MAX {
                    log::warn!(
                        "disk {}: the journal of the file system at byte {} is left alone: {reason}",
                        disk.options.name,
                        file_system.offset
                    );
                }
            }
            file_systems.push((index, file_system));
        }
        let more = (not_understood.len() - first).saturating_sub(SAID_MAX);
        if more > 0 {
            log::info!("disk {}: {more} more journals on it are left alone", disk.options.name);
        }
    }
    let mut logs = Vec::new();
    let mut without_device = 0;
    let is_writable = |disk: usize| !disks[disk].options.read_only;
    let pairs = device_pairs(&file_systems, is_writable);
    for (number, (index, file_system)) in file_systems.iter().enumerate() {
        let superblock = &file_system.superblock;
        let block_bytes = superblock.block_size;
        let home_blocks = superblock.blocks_count.max(file_system.length / u64::from(block_bytes));
        let places: Vec<FoundLogPlace> = match &file_system.journal {
            Journal::Internal { .. } => internal_place(*index, file_system).into_iter().collect(),
            Journal::External { .. } => {
                let Some(devices) = pairs.get(&number) else {
                    without_device += 1;
                    if without_device <= SAID_MAX {
                        log::info!(
                            "disk {}: the journal device of the file system at byte {} is not among the VM's disks",
                            disks[*index].options.name,
                            file_system.offset
                        );
                    }
                    continue;
                };
                // Where there are copies of the device, each is its journal, perhaps: it shares its blocks with itself.
                devices
                    .iter()
                    .map(|device| &file_systems[*device])
                    .filter_map(|(of, device)| external_place((*index, file_system), (*of, device), home_blocks))
                    .collect()
            }
            Journal::NotUnderstood { reason, behind: Some(journal) } => {
                let alone = FileSystem { journal: (**journal).clone(), ..file_system.clone() };
                let place = internal_place(*index, &alone).filter(is_served);
                left_alone.extend(place.map(|place| LeftAlone { place, reason: reason.clone() }));
                continue;
            }
            Journal::None | Journal::JournalDevice { .. } | Journal::NotUnderstood { .. } => continue,
        };
        logs.extend(places.into_iter().filter(is_served));
    }
    let (logs, contested) = told_apart(disks, logs);
    for place in contested {
        let (index, at) = (place.home_disk, place.home_start);
        let reason = format!("what the file system at byte {at} has for its own belongs to another one, too: {SHARED}");
        not_understood.push((index, reason.clone()));
        left_alone.push(LeftAlone { place, reason });
    }
    Ok(Found { layouts, logs, left_alone, not_understood })
}

/// So many file systems may name so many journal devices of one UUID that each is thought of with each.
const PAIRS_MAX: usize = 64;

/// Which journal devices a file system may mean, by their numbers. Copies share a UUID, and a guest's partitions can show thousands.
///
/// Where that is so, one file system is thought of with every device, and every one with one device, which are as many pairs as there are
/// of both: that is enough for each to be told of another that lays claim to the same ([`told_apart`]). The one is written to, if any is,
/// since those that are not have no say.
fn device_pairs(
    file_systems: &[(usize, FileSystem)],
    is_writable: impl Fn(usize) -> bool,
) -> HashMap<usize, Vec<usize>> {
    #[derive(Default)]
    struct OfUuid {
        homes: Vec<usize>,
        devices: Vec<usize>,
    }
    // With blocks of different sizes they are nothing to each other.
    let mut by_uuid: HashMap<([u8; 16], u32), OfUuid> = HashMap::new();
    for (number, (_, file_system)) in file_systems.iter().enumerate() {
        let block_bytes = file_system.superblock.block_size;
        match &file_system.journal {
            Journal::External { uuid } => by_uuid.entry((*uuid, block_bytes)).or_default().homes.push(number),
            Journal::JournalDevice { .. } => {
                let of_itself = external_place((0, file_system), (0, file_system), 0);
                if of_itself.is_some_and(|place| is_served(&place)) {
                    by_uuid.entry((file_system.superblock.uuid, block_bytes)).or_default().devices.push(number);
                }
            }
            Journal::None | Journal::Internal { .. } | Journal::NotUnderstood { .. } => {}
        }
    }
    let mut pairs = HashMap::new();
    for OfUuid { homes, devices } in by_uuid.into_values().filter(|of| !of.devices.is_empty()) {
        let all_with_all = homes.len() * devices.len() <= PAIRS_MAX;
        let one = homes.iter().copied().find(|home| is_writable(file_systems[*home].0)).or(homes.first().copied());
        for home in homes {
            let several = all_with_all || Some(home) == one;
            pairs.insert(home, if several { devices.clone() } else { vec![devices[0]] });
        }
    }
    pairs
}

/// The hot path compares offsets with sector-aligned requests and keeps log blocks in tables.
fn is_served(place: &FoundLogPlace) -> bool {
    (1024..=65536).contains(&place.block_bytes) && (2..=LOG_BLOCKS_MAX).contains(&place.log_blocks)
}

/// Where the log of a file system is on a journal device.
fn external_place(
    (home_disk, file_system): (usize, &FileSystem),
    (journal_disk, device): (usize, &FileSystem),
    home_blocks: u64,
) -> Option<FoundLogPlace> {
    let Journal::JournalDevice { superblock_block } = device.journal else { return None };
    let block_bytes = file_system.superblock.block_size;
    let count = u32::try_from(device.superblock.blocks_count).unwrap_or(u32::MAX);
    if device.superblock.block_size != block_bytes || count <= superblock_block + 1 {
        return None;
    }
    let at = |block: u32| device.offset + u64::from(block) * u64::from(block_bytes);
    Some(FoundLogPlace {
        home_disk,
        journal_disk,
        home_start: file_system.offset,
        block_bytes,
        log_blocks: count,
        home_blocks,
        runs: vec![
            LogRun { offset: at(superblock_block), first_position: 0, count: 1 },
            LogRun {
                offset: at(superblock_block + 1),
                first_position: superblock_block + 1,
                count: count - superblock_block - 1,
            },
        ],
        own_blocks: Vec::new(),
        is_external: true,
        file_system_uuid: file_system.superblock.uuid,
    })
}

/// How blocks come to have two owners.
const SHARED: &str = "a copy of a file system names the same journal device as the original, there are two such devices, or partitions overlap";

/// Invariant: no two logs of a layout share a byte, nor does a log with another one's file system; each write of a guest
/// belongs to one of them. What breaks that is the second, and neither of them is held: which of the two a commit is of,
/// only the guest's kernel knows. One that is open already goes on, and is not opened again ([`crate::foreign`]).
///
/// A disk that its guest can only read has no say: its journal is never written.
fn told_apart(disks: &[Arc<Disk>], logs: Vec<FoundLogPlace>) -> (Vec<FoundLogPlace>, Vec<FoundLogPlace>) {
    let writers = logs.iter().enumerate().filter(|(_, place)| !disks[place.home_disk].options.read_only);
    let mut ranges: Vec<(usize, Range<u64>, usize)> = writers
        .flat_map(|(index, place)| place.ranges().into_iter().map(move |(disk, range)| (disk, range, index)))
        .collect();
    ranges.sort_by_key(|(disk, range, _)| (*disk, range.start));
    let mut is_shared = vec![false; logs.len()];
    // Of those that begin before, the one that ends last. Whichever reaches over another is that one when the next begins.
    let mut farthest: Option<&(usize, Range<u64>, usize)> = None;
    for next in &ranges {
        let before = farthest.filter(|before| before.0 == next.0);
        if let Some(before) = before.filter(|before| next.1.start < before.1.end) {
            is_shared[before.2] = true;
            is_shared[next.2] = true;
        }
        farthest = before.filter(|before| before.1.end > next.1.end).or(Some(next));
    }
    let mut shared = is_shared.into_iter();
    logs.into_iter().partition(|_| !shared.next().unwrap_or(false))
}

/// Where the internal log of a file system is; nothing when it has none.
pub(crate) fn internal_place(disk: usize, file_system: &FileSystem) -> Option<FoundLogPlace> {
    let Journal::Internal { blocks, extents, map_blocks, .. } = &file_system.journal else { return None };
    let superblock = &file_system.superblock;
    let block_bytes = superblock.block_size;
    Some(FoundLogPlace {
        home_disk: disk,
        journal_disk: disk,
        home_start: file_system.offset,
        block_bytes,
        log_blocks: *blocks,
        home_blocks: superblock.blocks_count.max(file_system.length / u64::from(block_bytes)),
        runs: runs(file_system, extents),
        own_blocks: extents
            .iter()
            .map(|extent| extent.physical..extent.physical + u64::from(extent.count))
            .chain(map_blocks.iter().map(|block| *block..block + 1))
            .collect(),
        is_external: false,
        file_system_uuid: superblock.uuid,
    })
}

/// Whether the file system of an open log is still where it was, however the rest of the disk looks. While a partition
/// table is being rewritten it may be in halves for a moment, and what is mounted stays mounted.
pub(crate) fn is_still_there(disks: &[Arc<Disk>], place: &FoundLogPlace) -> io::Result<bool> {
    let reader = DiskReader::new(disks[place.home_disk].file.for_reading())?;
    let length = (place.home_blocks * u64::from(place.block_bytes)).min(reader.size.saturating_sub(place.home_start));
    let Some(file_system) = extfs::file_system(&reader, None, place.home_start, length)? else { return Ok(false) };
    Ok(match &file_system.journal {
        Journal::Internal { blocks, extents, .. } => {
            !place.is_external
                && *blocks == place.log_blocks
                && file_system.superblock.block_size == place.block_bytes
                && runs(&file_system, extents) == place.runs
        }
        Journal::External { .. } => place.is_external,
        Journal::NotUnderstood { .. } => true,
        Journal::None | Journal::JournalDevice { .. } => false,
    })
}

/// What speaks against a replay of the log of a guest that is gone: no kernel that came to the disk now would do that. Nothing where one would.
///
/// A kernel that has given its journal up leaves it open when it unmounts, and the disk may have become something else under the same guest:
/// older blocks must not be written over that. Without amberlog the log would lie in its own place, and nobody would look for it.
pub(crate) fn why_not_replayed(
    place: &FoundLogPlace,
    home: &LoggedFile,
    journal: &LoggedFile,
) -> io::Result<Option<&'static str>> {
    let disk = DiskReader::new(home.for_reading())?;
    let found = extfs::discover(&disk)?;
    let Some(file_system) = found.iter().find(|file_system| file_system.offset == place.home_start) else {
        return Ok(Some("no partition begins any more where its file system was, or another one is there"));
    };
    let is_it = match &file_system.journal {
        Journal::Internal { .. } => {
            internal_place(place.home_disk, file_system).is_some_and(|found| found.is_same_log(place))
        }
        Journal::External { uuid } => {
            let devices = extfs::discover(&DiskReader::new(journal.for_reading())?)?;
            let mut places = devices
                .iter()
                .filter(|device| device.superblock.uuid == *uuid)
                .filter_map(|device| external_place((place.home_disk, file_system), (place.journal_disk, device), 0));
            places.any(|found| found.is_same_log(place))
        }
        Journal::NotUnderstood { .. } | Journal::None | Journal::JournalDevice { .. } => false,
    };
    // That it needs recovery it has said as long as its journal was open.
    Ok((!is_it).then_some("its file system is not what it was any more: something else has been made of that disk"))
}

/// Watches the superblock of a file system that is kept though the scan did not find it.
pub(crate) fn watch_superblock(
    disks: &[Arc<Disk>],
    layouts: &mut [DiskLayout],
    place: &FoundLogPlace,
) -> io::Result<()> {
    let start = place.home_start + SUPERBLOCK_OFFSET;
    let mut content = [0; SUPERBLOCK_BYTES];
    disks[place.home_disk].file.read_exact_at(&mut content, start)?;
    let watches = &mut layouts[place.home_disk].watches;
    if !watches.iter().any(|watch| watch.start == start && watch.len == content.len()) {
        watches.push(Watch::new(start, &content, SUPERBLOCK_FIELDS));
    }
    Ok(())
}

fn runs(file_system: &FileSystem, extents: &[extfs::JournalExtent]) -> Vec<LogRun> {
    let block_bytes = u64::from(file_system.superblock.block_size);
    let run = |extent: &extfs::JournalExtent| LogRun {
        offset: file_system.offset + extent.physical * block_bytes,
        first_position: extent.log,
        count: extent.count,
    };
    extents.iter().map(run).collect()
}

/// Whether a GPT is, or may come, where it is on disks with sectors of 4096 bytes.
fn may_have_large_sectors(reader: &DiskReader<'_>) -> io::Result<bool> {
    let has_header = |at: u64| -> io::Result<bool> {
        let mut signature = [0; 8];
        if at + signature.len() as u64 > reader.size {
            return Ok(false);
        }
        reader.read_at(at, &mut signature).map(|()| signature == *b"EFI PART")
    };
    if !extfs::has_gpt(reader)? {
        return Ok(false);
    }
    Ok(has_header(4096)? || (!has_header(512)? && extfs::file_system(reader, None, 0, reader.size)?.is_none()))
}

/// Where a write can change what a scan finds: the partition table, and every place where a superblock is or could be.
fn watches(reader: &DiskReader<'_>) -> io::Result<Vec<Watch>> {
    let mut watches = Vec::new();
    let mut watch = |start: u64, len: usize, fields| -> io::Result<()> {
        let mut content = vec![0; len];
        if start + len as u64 <= reader.size {
            reader.read_at(start, &mut content)?;
            watches.push(Watch::new(start, &content, fields));
        }
        Ok(())
    };
    watch(0, 1024, PARTITION_FIELDS)?;
    // Elsewhere these bytes are a file system's, and change all the while.
    if may_have_large_sectors(reader)? {
        watch(4096, 92, GPT_FIELDS)?;
    }
    for table in extfs::logical_tables(reader)? {
        watch(table, 512, TABLE_FIELDS)?;
    }
    let partitions = extfs::partitions(reader)?;
    if partitions.is_empty() {
        watch(SUPERBLOCK_OFFSET, SUPERBLOCK_BYTES, SUPERBLOCK_FIELDS)?;
    }
    for partition in partitions {
        watch(partition.offset + SUPERBLOCK_OFFSET, SUPERBLOCK_BYTES, SUPERBLOCK_FIELDS)?;
    }
    Ok(watches)
}

/// Adds a log and its home to the layouts of their disks.
pub(crate) fn add_to_layouts(layouts: &mut [DiskLayout], place: &FoundLogPlace, log: LogIndex) {
    let logs = &mut layouts[place.journal_disk].logs;
    for run in &place.runs {
        logs.push(LogRange {
            start: run.offset,
            end: run.offset + u64::from(run.count) * u64::from(place.block_bytes),
            log,
            first_position: run.first_position,
            block_bytes: place.block_bytes,
        });
    }
    logs.sort_by_key(|range| range.start);
    let homes = &mut layouts[place.home_disk].homes;
    homes.push(HomeRange {
        start: place.home_start,
        end: place.home_start + place.home_blocks * u64::from(place.block_bytes),
        log,
        block_bytes: place.block_bytes,
    });
    homes.sort_by_key(|range| range.start);
}

#[cfg(test)]
mod tests;
