//! The fuzz targets `journal` and `ext` on the stable compiler (fuzz/src/exercise.rs says how), with a bound on the memory
//! that an input may take.

mod common;

#[path = "../../../fuzz/src/exercise.rs"]
mod exercise;
#[path = "../../../fuzz/src/ext.rs"]
mod ext;
#[path = "../../../fuzz/src/journal.rs"]
mod journal;

use common::run;
use exercise::{corpus, exercise, write_seeds};
use jbd2::build::{LogBuilder, SuperblockBuilder, Transaction};
use jbd2::{Checksum, Features, Superblock};
use std::alloc::{GlobalAlloc, Layout, System};
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// What one input may take at once, beside itself: the fixed batches of a replay are 10 MB, a map as long as an input
/// allows is less.
const MEMORY_BYTES_MAX: usize = 64 << 20;

/// Counts what is allocated.
struct Counting;

static NOW_BYTES: AtomicUsize = AtomicUsize::new(0);
static MOST_BYTES: AtomicUsize = AtomicUsize::new(0);

// SAFETY: everything is passed on to the system's allocator as it is.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let now = NOW_BYTES.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        MOST_BYTES.fetch_max(now, Ordering::Relaxed);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        NOW_BYTES.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// One at a time, so that what is counted is one input's.
static ALONE: Mutex<()> = Mutex::new(());

/// Runs the target's inputs, and bounds the memory of each.
fn bounded(target: &str, body: &dyn Fn(&[u8])) {
    let _alone = ALONE.lock().unwrap_or_else(|poison| poison.into_inner());
    exercise(target, 4000, &|data| {
        let before = NOW_BYTES.load(Ordering::Relaxed);
        MOST_BYTES.store(before, Ordering::Relaxed);
        body(data);
        let most = MOST_BYTES.load(Ordering::Relaxed).saturating_sub(before);
        assert!(most <= MEMORY_BYTES_MAX, "an input of {} bytes takes {most} bytes of memory", data.len());
    });
}

#[test]
fn journals() {
    bounded("journal", &journal::run);
}

#[test]
fn file_systems() {
    bounded("ext", &|data| {
        ext::run(data);
    });
}

#[test]
fn the_corpus_is_worth_mutating() {
    let _alone = ALONE.lock().unwrap_or_else(|poison| poison.into_inner());
    assert!(corpus("ext").iter().filter(|data| ext::run(data)).count() >= 4, "the corpus holds good journals");
}

fn journal_seed(switches: u8, checksum: Checksum, wide: bool, start: u32, version: u8) -> Vec<u8> {
    let superblock = SuperblockBuilder {
        version,
        block_size: 1024,
        maxlen: 20,
        start,
        sequence: u32::MAX,
        uuid: [5; 16],
        features: Features {
            compat: 0,
            incompat: Features::REVOKE | if wide { Features::WIDE } else { 0 },
            ro_compat: 0,
        },
        ..SuperblockBuilder::default()
    };
    let superblock = if version == 1 { superblock } else { superblock.checksum(checksum) };
    let raw = superblock.build();
    let format = Superblock::parse(&raw).expect("a superblock").1;
    let mut data = vec![0; 1 + 20 * 1024];
    data[0] = switches;
    data[1..1025].copy_from_slice(&raw);
    let mut builder = LogBuilder::new(format, start, u32::MAX);
    let block = |value: u8| {
        let mut block = vec![0; 1024];
        block[..8].fill(value);
        block
    };
    let mut magic = block(9);
    magic[..4].copy_from_slice(&jbd2::MAGIC.to_be_bytes());
    for (number, blocks, revokes) in [
        (0u64, vec![(300, block(1)), (301, block(2)), (302, magic)], vec![]),
        (1, vec![(301, block(3))], vec![300, 999]),
        (2, vec![(300, block(4)), (303, block(5))], vec![]),
    ] {
        let transaction = Transaction { blocks, revokes, seconds: 1000 + number };
        builder.transaction(&transaction, &mut |position, block| {
            data[1 + position as usize * 1024..][..1024].copy_from_slice(block);
        });
    }
    data
}

/// An image as the `ext` target takes it: its size, and its metadata blocks.
fn ext_seed(options: &[&str]) -> Vec<u8> {
    let directory = common::scratch();
    let path = directory.path().join("image");
    run(Command::new("mke2fs")
        .args(["-q", "-F", "-b", "1024", "-E", "nodiscard"])
        .args(options)
        .arg(&path)
        .arg("8192"));
    let bytes = std::fs::read(&path).expect("an image");
    let found = extfs::discover(&bytes).expect("memory").remove(0);
    let mut blocks = vec![1, 2];
    if let extfs::Journal::Internal { map_blocks, .. } = &found.journal {
        let table = extfs::group(&bytes, &found.superblock, 0).expect("memory").expect("group 0").inode_table;
        blocks.extend([table, table + 1]);
        blocks.extend(map_blocks);
    }
    let mut data = (bytes.len() as u32 / 1024).to_le_bytes().to_vec();
    for block in blocks {
        data.extend((block as u32).to_le_bytes());
        data.extend(1024u16.to_le_bytes());
        data.extend(&bytes[block as usize * 1024..][..1024]);
    }
    data
}

/// Puts a disk seed behind a partition table.
fn partitioned(seed: &[u8]) -> Vec<u8> {
    let mut table = vec![0u8; 512];
    table[446 + 4] = 0x83;
    table[446 + 8..446 + 16].copy_from_slice(&[0, 8, 0, 0, 0, 64, 0, 0]);
    table[510..].copy_from_slice(&[0x55, 0xaa]);
    let size = u32::from_le_bytes([seed[0], seed[1], seed[2], seed[3]]) + 1024;
    let mut data = size.to_le_bytes().to_vec();
    data.extend(0u32.to_le_bytes());
    data.extend(512u16.to_le_bytes());
    data.extend(table);
    let mut rest = &seed[4..];
    while rest.len() > 6 {
        let block = u32::from_le_bytes([rest[0], rest[1], rest[2], rest[3]]) + 1024;
        data.extend(block.to_le_bytes());
        data.extend(&rest[4..6 + 1024]);
        rest = &rest[6 + 1024..];
    }
    data
}

/// Makes the first inputs of the corpus; `scripts/fuzz.sh seeds` runs it.
#[test]
#[ignore = "writes the seeds of the kept corpus"]
fn seeds() {
    write_seeds(
        "journal",
        vec![
            ("plain", journal_seed(0, Checksum::None, false, 2, 2)),
            ("version-1", journal_seed(4, Checksum::None, false, 2, 1)),
            ("v1-wide-wraps", journal_seed(1, Checksum::V1, true, 12, 2)),
            ("v2", journal_seed(3, Checksum::V2, false, 15, 2)),
            ("v2-wide-at-home", journal_seed(4, Checksum::V2, true, 3, 2)),
            ("v3-wide-sealed", journal_seed(2, Checksum::V3, true, 17, 2)),
            ("v3-repaired-at-home", journal_seed(7, Checksum::V3, false, 5, 2)),
        ],
    );
    let ext4 = ext_seed(&["-t", "ext4", "-O", "^metadata_csum,^resize_inode", "-J", "size=1"]);
    let meta_bg = ["-t", "ext4", "-O", "64bit,meta_bg,^resize_inode,^metadata_csum", "-J", "size=1"];
    write_seeds(
        "ext",
        vec![
            ("ext4-partition", partitioned(&ext4)),
            ("ext4", ext4),
            ("ext4-checksums", ext_seed(&["-t", "ext4", "-J", "size=1"])),
            ("ext3", ext_seed(&["-t", "ext3", "-O", "^resize_inode", "-J", "size=1"])),
            ("ext4-64bit-meta-bg", ext_seed(&meta_bg)),
            ("journal-device", ext_seed(&["-O", "journal_dev"])),
        ],
    );
}
