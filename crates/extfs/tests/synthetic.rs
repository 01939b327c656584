//! Disks made by hand: partition tables, and maps that no mke2fs makes.

use extfs::{Journal, JournalExtent, ReadAt, discover, partitions};
use std::collections::BTreeMap;
use std::io;

/// A disk of any size of which only some blocks are not zero.
struct Sparse {
    size: u64,
    blocks: BTreeMap<u64, Vec<u8>>,
}

const BLOCK: u64 = 4096;

impl Sparse {
    fn new(blocks: u64) -> Self {
        Sparse { size: blocks * BLOCK, blocks: BTreeMap::new() }
    }

    fn block(&mut self, number: u64) -> &mut Vec<u8> {
        self.blocks.entry(number).or_insert_with(|| vec![0; BLOCK as usize])
    }

    fn put(&mut self, offset: u64, bytes: &[u8]) {
        let inside = (offset % BLOCK) as usize;
        self.block(offset / BLOCK)[inside..inside + bytes.len()].copy_from_slice(bytes);
    }
}

impl ReadAt for Sparse {
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        assert!(offset + buffer.len() as u64 <= self.size, "read beyond the end at byte {offset}");
        for (index, byte) in buffer.iter_mut().enumerate() {
            let at = offset + index as u64;
            *byte = self.blocks.get(&(at / BLOCK)).map_or(0, |block| block[(at % BLOCK) as usize]);
        }
        Ok(())
    }

    fn size(&self) -> u64 {
        self.size
    }
}

const TABLE: u64 = 20;
const INODE: u64 = TABLE * BLOCK + 7 * 256;

/// A file system with 64-bit block numbers and a journal inode of `journal_blocks` blocks whose map begins with `root`.
fn file_system(blocks: u64, journal_blocks: u32, flags: u32, root: &[u8]) -> Sparse {
    let mut disk = Sparse::new(blocks);
    let mut superblock = vec![0; 1024];
    let mut put = |offset: usize, bytes: &[u8]| superblock[offset..offset + bytes.len()].copy_from_slice(bytes);
    put(0x00, &8192u32.to_le_bytes());
    put(0x04, &(blocks as u32).to_le_bytes());
    put(0x150, &((blocks >> 32) as u32).to_le_bytes());
    put(0x18, &2u32.to_le_bytes());
    put(0x20, &32768u32.to_le_bytes());
    put(0x28, &8192u32.to_le_bytes());
    put(0x38, &[0x53, 0xef, 1, 0]);
    put(0x4c, &1u32.to_le_bytes());
    put(0x58, &256u16.to_le_bytes());
    put(0x5c, &4u32.to_le_bytes());
    put(0x60, &0xc0u32.to_le_bytes());
    put(0xe0, &8u32.to_le_bytes());
    put(0xfe, &64u16.to_le_bytes());
    disk.put(1024, &superblock);
    for (offset, block) in [(0, 3u32), (4, 4), (8, TABLE as u32)] {
        disk.put(BLOCK + offset, &block.to_le_bytes());
    }
    let size = u64::from(journal_blocks) * BLOCK;
    disk.put(INODE, &0x8180u16.to_le_bytes());
    disk.put(INODE + 0x04, &(size as u32).to_le_bytes());
    disk.put(INODE + 0x6c, &((size >> 32) as u32).to_le_bytes());
    disk.put(INODE + 0x1a, &1u16.to_le_bytes());
    disk.put(INODE + 0x20, &flags.to_le_bytes());
    disk.put(INODE + 0x28, root);
    disk
}

const EXTENTS: u32 = 0x80000;

fn header(entries: u16, max: u16, depth: u16) -> Vec<u8> {
    [0xf30a, entries, max, depth, 0, 0].iter().flat_map(|value: &u16| value.to_le_bytes()).collect()
}

fn leaf(log: u32, physical: u64, count: u16) -> Vec<u8> {
    let mut entry = log.to_le_bytes().to_vec();
    entry.extend(count.to_le_bytes());
    entry.extend(((physical >> 32) as u16).to_le_bytes());
    entry.extend((physical as u32).to_le_bytes());
    entry
}

fn index(log: u32, block: u64) -> Vec<u8> {
    let mut entry = log.to_le_bytes().to_vec();
    entry.extend((block as u32).to_le_bytes());
    entry.extend(((block >> 32) as u16).to_le_bytes());
    entry.extend([0, 0]);
    entry
}

fn node(depth: u16, entries: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = header(entries.len() as u16, 340, depth);
    entries.iter().for_each(|entry| bytes.extend(entry));
    bytes
}

fn root(depth: u16, entries: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = header(entries.len() as u16, 4, depth);
    entries.iter().for_each(|entry| bytes.extend(entry));
    bytes
}

fn journal(disk: &Sparse) -> Journal {
    discover(disk).expect("memory").remove(0).journal
}

fn refused(disk: &Sparse, text: &str) {
    match journal(disk) {
        Journal::NotUnderstood { reason, .. } => assert!(reason.contains(text), "{reason}"),
        other => panic!("{other:?} where {text} was expected"),
    }
}

#[test]
fn beyond_two_to_the_32_blocks() {
    let blocks = 1u64 << 34;
    let (far, farther) = ((1u64 << 33) + 5, (1u64 << 33) + 70_000);
    let mut disk = file_system(blocks, 40_000, EXTENTS, &root(1, &[index(0, far)]));
    let entries = [leaf(0, far + 1, 32768), leaf(32768, farther, 7232)];
    disk.put(far * BLOCK, &node(0, &entries));
    let expected = Journal::Internal {
        inode: 8,
        blocks: 40_000,
        extents: vec![
            JournalExtent { log: 0, physical: far + 1, count: 32768 },
            JournalExtent { log: 32768, physical: farther, count: 7232 },
        ],
        map_blocks: vec![far],
    };
    assert_eq!(journal(&disk), expected);
}

#[test]
fn extent_trees_that_cannot_be() {
    let leaf_root = |entries: &[Vec<u8>]| file_system(100_000, 2000, EXTENTS, &root(0, entries));
    refused(&leaf_root(&[leaf(0, 5000, 1000), leaf(1001, 6001, 999)]), "hole");
    refused(&leaf_root(&[leaf(0, 5000, 1000), leaf(999, 6001, 1001)]), "hole or goes back");
    refused(&leaf_root(&[leaf(0, 5000, 1000), leaf(1000, 5999, 1000)]), "twice");
    refused(&leaf_root(&[leaf(0, 99_000, 2000)]), "outside the file system");
    refused(&leaf_root(&[leaf(0, 0, 2000)]), "outside the file system");
    refused(&leaf_root(&[leaf(0, 5000, 0)]), "empty or not written");
    refused(&leaf_root(&[leaf(0, 5000, 32768 + 2000)]), "empty or not written");
    refused(&leaf_root(&[leaf(0, 5000, 1500)]), "ends at log block 1500");
    refused(&file_system(100_000, 2000, EXTENTS, &root(6, &[index(0, 99)])), "6 levels deep");
    refused(&file_system(100_000, 2000, EXTENTS, &[0; 60]), "damaged");
    refused(&file_system(100_000, 1000, EXTENTS, &root(0, &[leaf(0, 5000, 1000)])), "fewer than the least");
    // A node that is its own child, at every depth; and one whose depth does not fit.
    for depth in 1..=5 {
        let mut disk = file_system(100_000, 2000, EXTENTS, &root(depth, &[index(0, 99)]));
        disk.put(99 * BLOCK, &node(depth - 1, &[index(0, 99)]));
        let text = if depth == 1 { "outside the file system" } else { "twice" };
        match journal(&disk) {
            Journal::NotUnderstood { reason, .. } => assert!(
                reason.contains(text) || reason.contains("empty") || reason.contains("damaged"),
                "{depth}: {reason}"
            ),
            other => panic!("{other:?}"),
        }
    }
    // The tree's own block is named as a block of the journal.
    let mut disk = file_system(100_000, 2000, EXTENTS, &root(1, &[index(0, 5001)]));
    disk.put(5001 * BLOCK, &node(0, &[leaf(0, 5000, 2000)]));
    refused(&disk, "twice");
}

#[test]
fn a_map_ends_where_the_file_system_ends() {
    let blocks = 8000;
    let within = file_system(blocks, 1024, EXTENTS, &root(0, &[leaf(0, blocks - 1024, 1024)]));
    let Journal::Internal { extents, .. } = journal(&within) else { panic!("the last blocks are the file system's") };
    assert_eq!(extents, [JournalExtent { log: 0, physical: blocks - 1024, count: 1024 }]);
    refused(&file_system(blocks, 1024, EXTENTS, &root(0, &[leaf(0, blocks - 1023, 1024)])), "outside the file system");
    // The block of the superblock is none of the journal's.
    refused(&file_system(blocks, 1024, EXTENTS, &root(0, &[leaf(0, 0, 1024)])), "outside the file system");
}

#[test]
fn block_maps_that_cannot_be() {
    let pointers = |blocks: &[u32]| blocks.iter().flat_map(|block| block.to_le_bytes()).collect::<Vec<u8>>();
    let direct: Vec<u32> = (5000..5012).collect();
    let full = |indirect: u32, double: u32| pointers(&[&direct[..], &[indirect, double, 0]].concat());
    let build = |indirect, double| file_system(100_000, 1100, 0, &full(indirect, double));
    let run: Vec<u32> = (5012..6036).collect();
    let mut good = build(99, 98);
    good.put(99 * BLOCK, &pointers(&run));
    good.put(98 * BLOCK, &pointers(&[97]));
    good.put(97 * BLOCK, &pointers(&(7000..7064).collect::<Vec<u32>>()));
    let Journal::Internal { extents, map_blocks, .. } = journal(&good) else { panic!("{:?}", journal(&good)) };
    assert_eq!(map_blocks, [97, 98, 99]);
    assert_eq!(extents.iter().map(|e| (e.physical, e.count)).collect::<Vec<_>>(), [(5000, 1036), (7000, 64)]);
    refused(&build(0, 98), "outside the file system");
    let mut hole = build(99, 98);
    hole.put(99 * BLOCK, &pointers(&[5012, 0, 5014]));
    refused(&hole, "outside the file system");
    // The same indirect block again and again.
    let mut cyclic = build(99, 98);
    cyclic.put(99 * BLOCK, &pointers(&run));
    cyclic.put(98 * BLOCK, &pointers(&[99, 99, 99]));
    refused(&cyclic, "twice");
}

fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0, |crc: u32, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| if crc & 1 != 0 { crc >> 1 ^ 0xedb8_8320 } else { crc >> 1 })
    })
}

/// A GPT on sectors of `sector` bytes: its primary and its backup table.
fn gpt(sector: usize, sectors: usize, parts: &[(u64, u64)]) -> Vec<u8> {
    let mut disk = vec![0; sector * sectors];
    disk[446 + 4] = 0xee;
    disk[446 + 8..][..8].copy_from_slice(&[1, 0, 0, 0, 0xff, 0xff, 0xff, 0xff]);
    disk[510..512].copy_from_slice(&[0x55, 0xaa]);
    let mut entries = vec![0u8; 128 * 128];
    for (index, (first, last)) in parts.iter().enumerate() {
        let entry = &mut entries[index * 128..][..128];
        entry[0] = 1;
        entry[32..40].copy_from_slice(&first.to_le_bytes());
        entry[40..48].copy_from_slice(&last.to_le_bytes());
    }
    let entry_sectors = entries.len() / sector;
    for (here, table) in [(1, 2), (sectors - 1, sectors - 1 - entry_sectors)] {
        disk[table * sector..][..entries.len()].copy_from_slice(&entries);
        let mut header = vec![0; 92];
        header[..8].copy_from_slice(b"EFI PART");
        header[8..16].copy_from_slice(&[0, 0, 1, 0, 92, 0, 0, 0]);
        header[24..32].copy_from_slice(&(here as u64).to_le_bytes());
        header[72..80].copy_from_slice(&(table as u64).to_le_bytes());
        header[80..88].copy_from_slice(&[128, 0, 0, 0, 128, 0, 0, 0]);
        header[88..92].copy_from_slice(&crc32(&entries).to_le_bytes());
        let checksum = crc32(&header);
        header[16..20].copy_from_slice(&checksum.to_le_bytes());
        disk[here * sector..][..92].copy_from_slice(&header);
    }
    disk
}

#[test]
fn guid_partition_tables() {
    for sector in [512usize, 4096] {
        let disk = gpt(sector, 1000, &[(100, 199), (200, 200), (900, 5000)]);
        let found: Vec<_> = partitions(&disk).expect("memory").iter().map(|p| (p.number, p.offset, p.length)).collect();
        let bytes = sector as u64;
        let expected = [(1, 100 * bytes, 100 * bytes), (2, 200 * bytes, bytes), (3, 900 * bytes, 100 * bytes)];
        assert_eq!(found, expected, "the last one is cut off at the end of the disk");
        // The primary table damaged, header or entries: the backup is taken. Both: there are no partitions.
        for place in [sector + 40, 2 * sector + 200] {
            let mut damaged = disk.clone();
            damaged[place] ^= 1;
            assert_eq!(partitions(&damaged).expect("memory").len(), 3);
            damaged[999 * sector + 40] ^= 1;
            assert_eq!(partitions(&damaged).expect("memory"), []);
        }
    }
}

fn entry(disk: &mut [u8], sector: usize, index: usize, kind: u8, start: u32, count: u32) {
    disk[sector * 512 + 510..][..2].copy_from_slice(&[0x55, 0xaa]);
    let entry = &mut disk[sector * 512 + 446 + 16 * index..][..16];
    entry[4] = kind;
    entry[8..12].copy_from_slice(&start.to_le_bytes());
    entry[12..16].copy_from_slice(&count.to_le_bytes());
}

#[test]
fn master_boot_records() {
    let mut disk = vec![0; 1000 * 512];
    assert_eq!(partitions(&disk).expect("memory"), []);
    entry(&mut disk, 0, 0, 0x83, 10, 20);
    entry(&mut disk, 0, 3, 0x05, 100, 800);
    entry(&mut disk, 100, 0, 0x83, 5, 10);
    entry(&mut disk, 100, 1, 0x05, 50, 100);
    entry(&mut disk, 150, 0, 0x83, 5, 2000);
    let found: Vec<_> =
        partitions(&disk).expect("memory").iter().map(|p| (p.number, p.offset / 512, p.length / 512)).collect();
    assert_eq!(found, [(1, 10, 20), (5, 105, 10), (6, 155, 845)]);
    // A chain that goes back to its beginning ends.
    entry(&mut disk, 150, 1, 0x05, 0, 100);
    assert_eq!(partitions(&disk).expect("memory").len(), 3);
    entry(&mut disk, 150, 1, 0x05, 50, 100);
    assert_eq!(partitions(&disk).expect("memory").len(), 3);
    // Boot code that looks like a table.
    entry(&mut disk, 0, 1, 0x83, 15, 20);
    assert_eq!(partitions(&disk).expect("memory"), [], "overlapping partitions are none");
    entry(&mut disk, 0, 1, 0x83, 5000, 20);
    assert_eq!(partitions(&disk).expect("memory"), [], "partitions beyond the disk are none");
}

/// An array's superblock, version 1 with its own place, or 0.90.
fn md(at: u64, major: u32) -> Vec<u8> {
    let mut raw = vec![0; 256];
    raw[0..4].copy_from_slice(&0xa92b_4efcu32.to_le_bytes());
    raw[4..8].copy_from_slice(&major.to_le_bytes());
    raw[8..12].copy_from_slice(&90u32.to_le_bytes());
    raw[144..152].copy_from_slice(&(at / 512).to_le_bytes());
    raw
}

#[test]
fn a_disk_that_shows_what_lies_between_is_left_alone() {
    const BLOCKS: u64 = 10_000;
    let plain = || {
        let mut root = header(1, 4, 0);
        root.extend(leaf(0, 100, 1024));
        let mut disk = file_system(BLOCKS, 1024, EXTENTS, &root);
        // Longer than the file system, and of an odd size.
        disk.size += 50 * BLOCK + 3 * 512;
        disk
    };
    let journal = |disk: &Sparse| discover(disk).unwrap().remove(0).journal;
    assert!(matches!(journal(&plain()), Journal::Internal { .. }));
    let sectors = plain().size / 512;
    let (at_10, at_090) = ((sectors - 16) / 8 * 8 * 512, (sectors / 128 * 128 - 128) * 512);
    let bcache = [0xc6, 0x85, 0x73, 0xf6, 0x4e, 0x1a, 0x45, 0xca, 0x82, 0x65, 0xf5, 0x7f, 0x48, 0xba, 0x6d, 0x81];
    let at_drbd = plain().size / 4096 * 4096 - 4096 + 60;
    for (at, bytes, says) in [
        (at_drbd, 0x8374_026bu32.to_be_bytes().to_vec(), "DRBD"),
        (at_drbd, 0x8374_026du32.to_be_bytes().to_vec(), "DRBD"),
        (at_10, md(at_10, 1), "metadata 1.0"),
        (at_090, md(at_090, 0), "metadata 0.90"),
        (4096, md(4096, 1), "metadata 1.2"),
        (512, b"LABELONE".to_vec(), "LVM"),
        (0, b"LUKS\xba\xbe\0\x02".to_vec(), "LUKS"),
        (4096 + 24, bcache.to_vec(), "bcache"),
    ] {
        let mut disk = plain();
        disk.put(at, &bytes);
        match journal(&disk) {
            Journal::NotUnderstood { reason, .. } => assert!(reason.contains(says), "{says}: {reason}"),
            other => panic!("{says}: {other:?}"),
        }
    }
    // Not where it says it is, of another kind, or in the file system's own blocks: left over.
    let drbd_of_old = 0x8374_026au32.to_be_bytes().to_vec();
    for (at, bytes) in [(at_10, md(at_10 + 512, 1)), (at_10, md(at_10, 7)), (at_drbd, drbd_of_old)] {
        let mut disk = plain();
        disk.put(at, &bytes);
        assert!(matches!(journal(&disk), Journal::Internal { .. }));
    }
    let mut disk = plain();
    disk.size = BLOCKS * BLOCK;
    let at = (disk.size / 512 - 16) / 8 * 8 * 512;
    disk.put(at, &md(at, 1));
    disk.put(disk.size - 4096 + 60, &0x8374_026bu32.to_be_bytes());
    assert!(matches!(journal(&disk), Journal::Internal { .. }), "the file system reaches over it");
}

/// A disk that counts how often it is read.
struct Counting<'a>(&'a Sparse, std::cell::Cell<u64>);

impl ReadAt for Counting<'_> {
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.1.set(self.1.get() + 1);
        self.0.read_at(offset, buffer)
    }

    fn size(&self) -> u64 {
        self.0.size()
    }
}

/// Partitions can overlap: each may be one and the same file system, whose journal's map has very many pieces.
#[test]
fn a_look_at_a_disk_costs_what_one_file_system_may() {
    const NODES: u32 = 300;
    const RUNS: u32 = 340 * NODES;
    // Its runs lie apart from each other.
    let fs_blocks = 2 * u64::from(RUNS) + 10_000;
    let fs = {
        let indices: Vec<Vec<u8>> = (0..NODES).map(|n| index(n * 340, 5000 + u64::from(n))).collect();
        let mut fs = file_system(fs_blocks, RUNS, EXTENTS, &root(2, &[index(0, 4999)]));
        fs.put(4999 * BLOCK, &node(1, &indices));
        for n in 0..NODES {
            let leaves: Vec<Vec<u8>> =
                (0..340).map(|k| leaf(n * 340 + k, 8000 + 2 * u64::from(n * 340 + k), 1)).collect();
            fs.put((5000 + u64::from(n)) * BLOCK, &node(0, &leaves));
        }
        fs
    };
    const START: u64 = 4096;
    let mut disk = Sparse::new(START + fs_blocks + 100);
    for (block, bytes) in fs.blocks {
        disk.blocks.insert(START + block, bytes);
    }
    // As many entries as a table may have, all of them the same.
    let first = START * BLOCK / 512;
    let mut entries = vec![0; 4096 * 128];
    for entry in entries.chunks_exact_mut(128) {
        entry[0] = 1;
        entry[32..40].copy_from_slice(&first.to_le_bytes());
        entry[40..48].copy_from_slice(&(first + fs_blocks * BLOCK / 512 - 1).to_le_bytes());
    }
    disk.put(446 + 4, &[0xee]);
    disk.put(446 + 8, &[1, 0, 0, 0, 0xff, 0xff, 0xff, 0xff]);
    disk.put(510, &[0x55, 0xaa]);
    let mut header = vec![0; 92];
    header[..8].copy_from_slice(b"EFI PART");
    header[8..16].copy_from_slice(&[0, 0, 1, 0, 92, 0, 0, 0]);
    header[24..32].copy_from_slice(&1u64.to_le_bytes());
    header[72..80].copy_from_slice(&8u64.to_le_bytes());
    header[80..88].copy_from_slice(&[0, 16, 0, 0, 128, 0, 0, 0]);
    header[88..92].copy_from_slice(&crc32(&entries).to_le_bytes());
    let checksum = crc32(&header);
    header[16..20].copy_from_slice(&checksum.to_le_bytes());
    disk.put(512, &header);
    for (number, bytes) in entries.chunks_exact(512).enumerate() {
        disk.put((8 + number as u64) * 512, bytes);
    }
    let disk = Counting(&disk, std::cell::Cell::new(0));
    let found = discover(&disk).expect("memory");
    assert_eq!(found.len(), 255, "Linux looks at no more entries");
    assert!(matches!(found[0].journal, Journal::Internal { .. }), "the first is served");
    let pieces: usize = found.iter().map(|fs| fs.journal.extents(&fs.superblock).len()).sum();
    assert!(pieces <= (1 << 20) + RUNS as usize, "{pieces} pieces");
    assert!(disk.1.get() < 20 * 255 + 12 * u64::from(NODES), "{} reads", disk.1.get());
    match &found[254].journal {
        Journal::NotUnderstood { reason, .. } => assert!(reason.contains("pieces together"), "{reason}"),
        other => panic!("{other:?}"),
    }
}
