//! The bodies of the cargo-fuzz targets, on the stable compiler: over the kept corpus, and over as many mutations of it as
//! `AMBERLOG_FUZZ_ITERATIONS` says, the same ones every time.

mod common;

#[path = "../../../fuzz/src/ext.rs"]
mod ext;
#[path = "../../../fuzz/src/journal.rs"]
mod journal;

use common::run;
use jbd2::build::{LogBuilder, SuperblockBuilder, Transaction};
use jbd2::{Checksum, Features, Superblock};
use std::path::{Path, PathBuf};
use std::process::Command;

fn corpus_directory(target: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(target)
}

fn corpus(target: &str) -> Vec<Vec<u8>> {
    let directory = corpus_directory(target);
    let mut paths: Vec<PathBuf> = std::fs::read_dir(&directory)
        .unwrap_or_else(|error| panic!("{}: {error}", directory.display()))
        .map(|entry| entry.expect("an entry").path())
        .collect();
    paths.sort();
    assert!(paths.len() >= 4, "{target}: the corpus is gone");
    paths.iter().map(|path| std::fs::read(path).expect("a corpus file")).collect()
}

struct Random(u64);

impl Random {
    fn next(&mut self, below: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % below.max(1) as u64) as usize
    }
}

/// Changes a few bytes, mostly where structures begin, copies pieces over others, or cuts the end off.
fn mutate(data: &mut Vec<u8>, random: &mut Random) {
    for _ in 0..=random.next(4) {
        let length = data.len();
        // Fields are near the beginnings of blocks.
        let near = |random: &mut Random| (random.next(length / 1024 + 1) * 1024 + random.next(96)).min(length - 1);
        let at = if random.next(3) == 0 { random.next(length) } else { near(random) };
        match random.next(7) {
            0 => data[at] ^= 1 << random.next(8),
            1 => data[at] = [0, 1, 0x7f, 0x80, 0xff][random.next(5)],
            2 => data[at] = random.next(256) as u8,
            3 => {
                let from = near(random);
                let count = (4 << random.next(9)).min(length - at.max(from));
                data.copy_within(from..from + count, at);
            }
            4 => {
                let count = (1 << random.next(11)).min(length - at);
                data[at..at + count].fill(0);
            }
            5 => data[0] = random.next(256) as u8,
            _ if random.next(8) == 0 => data.truncate(at.max(16)),
            _ => data[at] = data[at].wrapping_add(random.next(5) as u8).wrapping_sub(2),
        }
    }
}

fn iterations() -> usize {
    std::env::var("AMBERLOG_FUZZ_ITERATIONS").map_or(4000, |text| text.parse().expect("a number"))
}

fn exercise(target: &str, body: &dyn Fn(&[u8])) {
    let corpus = corpus(target);
    corpus.iter().for_each(|data| body(data));
    let mut random = Random(0x2545_f491_4f6c_dd1d);
    for iteration in 0..iterations() {
        let mut data = corpus[random.next(corpus.len())].clone();
        mutate(&mut data, &mut random);
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| body(&data)));
        if result.is_err() {
            let path = std::env::temp_dir().join(format!("amberlog-fuzz-{target}-{iteration}"));
            std::fs::write(&path, &data).expect("room for the input");
            panic!("{target}: iteration {iteration} fails; the input is in {}", path.display());
        }
    }
}

#[test]
fn journals() {
    exercise("journal", &journal::run);
}

#[test]
fn file_systems() {
    assert!(corpus("ext").iter().filter(|data| ext::run(data)).count() >= 4, "the corpus holds good journals");
    exercise("ext", &|data| {
        ext::run(data);
    });
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

/// Makes the corpus anew: `cargo test -p recovery --test fuzz -- --ignored`.
#[test]
#[ignore = "writes the kept corpus"]
fn write_corpus() {
    let write = |target: &str, name: &str, data: Vec<u8>| {
        let directory = corpus_directory(target);
        std::fs::create_dir_all(&directory).expect("a directory");
        std::fs::write(directory.join(name), data).expect("room");
    };
    write("journal", "plain", journal_seed(0, Checksum::None, false, 2, 2));
    write("journal", "version-1", journal_seed(4, Checksum::None, false, 2, 1));
    write("journal", "v1-wide-wraps", journal_seed(1, Checksum::V1, true, 12, 2));
    write("journal", "v2", journal_seed(3, Checksum::V2, false, 15, 2));
    write("journal", "v2-wide-at-home", journal_seed(4, Checksum::V2, true, 3, 2));
    write("journal", "v3-wide-sealed", journal_seed(2, Checksum::V3, true, 17, 2));
    write("journal", "v3-repaired-at-home", journal_seed(7, Checksum::V3, false, 5, 2));
    let ext4 = ext_seed(&["-t", "ext4", "-O", "^metadata_csum,^resize_inode", "-J", "size=1"]);
    write("ext", "ext4-partition", partitioned(&ext4));
    write("ext", "ext4", ext4);
    write("ext", "ext4-checksums", ext_seed(&["-t", "ext4", "-J", "size=1"]));
    write("ext", "ext3", ext_seed(&["-t", "ext3", "-O", "^resize_inode", "-J", "size=1"]));
    write(
        "ext",
        "ext4-64bit-meta-bg",
        ext_seed(&["-t", "ext4", "-O", "64bit,meta_bg,^resize_inode,^metadata_csum", "-J", "size=1"]),
    );
    write("ext", "journal-device", ext_seed(&["-O", "journal_dev"]));
}
