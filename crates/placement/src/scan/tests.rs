//! Disks that show the same file system many times over.

use super::*;
use crate::description::{AreaDirectory, PIECES_DESCRIBED_MAX};
use crate::disk::{DiskSettings, PlacementKind};
use crate::journals::{Journals, JournalsOptions};
use guest_kit::image::{ExtRecipe, Journal as JournalRecipe, journal_device};
use guest_memory::VmMemory;
use std::path::Path;

const MIB: u64 = 1 << 20;

fn disk(name: &str, path: &Path, read_only: bool) -> Arc<Disk> {
    let options = DiskSettings {
        name: name.to_owned(),
        path: path.to_owned(),
        placement: PlacementKind::Copy,
        honour_flush: false,
        read_only,
        durable_within: None,
        write_log: None,
    };
    Arc::new(Disk::open(options).expect("an image"))
}

fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0, |crc: u32, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| if crc & 1 != 0 { crc >> 1 ^ 0xedb8_8320 } else { crc >> 1 })
    })
}

/// A disk with `partitions`, from and to byte, each as often as it is said, under a GPT that has no more to say.
fn with_table(path: &Path, size: u64, partitions: &[(Range<u64>, usize)]) -> File {
    let file = File::options().read(true).write(true).create(true).truncate(false).open(path).expect("an image");
    file.set_len(size).expect("its size");
    let mut first = [0u8; 512];
    first[446 + 4] = 0xee;
    first[446 + 8..446 + 16].copy_from_slice(&[1, 0, 0, 0, 0xff, 0xff, 0xff, 0xff]);
    first[510..].copy_from_slice(&[0x55, 0xaa]);
    file.write_all_at(&first, 0).expect("written");
    let mut entries = Vec::new();
    for (range, times) in partitions {
        for _ in 0..*times {
            let mut entry = [0; 128];
            entry[0] = 1;
            entry[32..40].copy_from_slice(&(range.start / 512).to_le_bytes());
            entry[40..48].copy_from_slice(&(range.end / 512 - 1).to_le_bytes());
            entries.extend(entry);
        }
    }
    file.write_all_at(&entries, 1024).expect("written");
    let mut header = [0; 92];
    header[..8].copy_from_slice(b"EFI PART");
    header[8..16].copy_from_slice(&[0, 0, 1, 0, 92, 0, 0, 0]);
    header[24..32].copy_from_slice(&1u64.to_le_bytes());
    header[72..80].copy_from_slice(&2u64.to_le_bytes());
    header[80..84].copy_from_slice(&((entries.len() / 128) as u32).to_le_bytes());
    header[84..88].copy_from_slice(&128u32.to_le_bytes());
    header[88..92].copy_from_slice(&crc32(&entries).to_le_bytes());
    let checksum = crc32(&header);
    header[16..20].copy_from_slice(&checksum.to_le_bytes());
    file.write_all_at(&header, 512).expect("written");
    file
}

/// A file system that names a journal device, and that device, made as files of their own.
fn external(directory: &Path) -> (Vec<u8>, Vec<u8>) {
    let (home, journal) = (directory.join("home"), directory.join("journal"));
    journal_device(&journal, 8, 4096).expect("made");
    ExtRecipe { journal: JournalRecipe::External(journal.clone()), ..ExtRecipe::ext4(16, 0) }
        .make(&home)
        .expect("made");
    (std::fs::read(home).expect("read"), std::fs::read(journal).expect("read"))
}

/// Partitions can overlap. As many as there can be of both a file system and its journal device on each of two disks cost a look that
/// many times, and not each with each.
#[test]
fn file_systems_and_devices_that_share_a_uuid_are_not_all_thought_of_together() {
    let directory = tempfile::tempdir().expect("a directory");
    let (home, device) = external(directory.path());
    let disks: Vec<Arc<Disk>> = ["a", "b"]
        .map(|name| {
            let path = directory.path().join(name);
            let parts = [(4 * MIB..20 * MIB, 127), (20 * MIB..28 * MIB, 128), (4 * MIB..20 * MIB, 3000)];
            let file = with_table(&path, 32 * MIB, &parts);
            file.write_all_at(&home, 4 * MIB).expect("written");
            file.write_all_at(&device, 20 * MIB).expect("written");
            disk(name, &path, name == "a")
        })
        .into();
    let found = scan(&disks).expect("looked at");
    // Those of the disk that can only be read have no say, and no log is made for them.
    assert!(found.logs.iter().all(|place| place.home_disk == 0), "a copy of it is held");
    let count = found.logs.len() + found.left_alone.len();
    assert!((2 * 255..=4 * 255).contains(&(count + 1)), "{count} places");
    assert_eq!(found.left_alone.iter().filter(|left| left.place.home_disk == 1).count(), 127 + 255);
}

/// Few are thought of with each other all, and many come to the same: none is held that somebody else lays claim to, and one that nobody
/// does is.
#[test]
fn who_is_left_alone_does_not_depend_on_how_many_there_are() {
    let directory = tempfile::tempdir().expect("a directory");
    let (home, device) = external(directory.path());
    for (homes, devices, held) in [(1, 1, 1), (2, 1, 0), (1, 2, 0), (1, 65, 0), (65, 1, 0), (9, 9, 0), (2, 2, 0)] {
        let path = directory.path().join("image");
        let parts = [(4 * MIB..20 * MIB, homes), (20 * MIB..28 * MIB, devices)];
        let file = with_table(&path, 32 * MIB, &parts);
        file.write_all_at(&home, 4 * MIB).expect("written");
        file.write_all_at(&device, 20 * MIB).expect("written");
        let found = scan(&[disk("a", &path, false)]).expect("looked at");
        assert_eq!(found.logs.len(), held, "{homes} file systems, {devices} devices");
    }
}

/// A file system whose journal is in as many pieces as it has blocks.
fn in_pieces(path: &Path, pieces: u32) {
    const BLOCK: u64 = 4096;
    let file = File::options().write(true).create(true).truncate(true).open(path).expect("an image");
    let blocks = 1000 + 2 * u64::from(pieces);
    file.set_len(blocks * BLOCK).expect("its size");
    let put = |offset: u64, bytes: &[u8]| file.write_all_at(bytes, offset).expect("written");
    let superblock = [
        (0x00, 8192u32),
        (0x04, blocks as u32),
        (0x18, 2),
        (0x20, 32768),
        (0x28, 8192),
        (0x38, 0x0001_ef53),
        (0x4c, 1),
        (0x58, 256),
        (0x5c, 4),
        (0x60, 0x40),
        (0xe0, 8),
    ];
    superblock.iter().for_each(|(offset, value)| put(1024 + offset, &value.to_le_bytes()));
    [(0, 3u32), (4, 4), (8, 20)].iter().for_each(|(offset, block)| put(BLOCK + offset, &block.to_le_bytes()));
    let inode = 20 * BLOCK + 7 * 256;
    let node = |entries: usize, max: u16, depth: u16| {
        [0xf30a, entries as u16, max, depth, 0, 0].iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>()
    };
    let entry = |words: [u32; 3]| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>();
    put(inode, &0x8180u16.to_le_bytes());
    put(inode + 4, &(pieces * BLOCK as u32).to_le_bytes());
    put(inode + 0x1a, &1u16.to_le_bytes());
    put(inode + 0x20, &0x80000u32.to_le_bytes());
    let root = [node(1, 4, 2), entry([0, 100, 0])].concat();
    put(inode + 0x28, &root);
    let firsts: Vec<u32> = (0..pieces).step_by(340).collect();
    let indices = firsts.iter().zip(101..).flat_map(|(first, block)| entry([*first, block, 0]));
    put(100 * BLOCK, &node(firsts.len(), 340, 1).into_iter().chain(indices).collect::<Vec<u8>>());
    for (first, block) in firsts.iter().zip(101..) {
        let these = *first..pieces.min(first + 340);
        let leaves = these.clone().flat_map(|log| entry([log, 1, 1000 + 2 * log]));
        put(block * BLOCK, &node(these.len(), 340, 0).into_iter().chain(leaves).collect::<Vec<u8>>());
    }
}

/// What is held is written down for whoever comes next, who has to be able to read it.
#[test]
fn journals_in_very_many_pieces_are_left_alone() {
    let base = tempfile::tempdir().expect("a directory");
    let of = |pieces: &[u32]| {
        let directory =
            AreaDirectory::create(&base.path().join("vms"), &base.path().join("registry")).expect("a directory");
        let options = pieces.iter().zip(0..).map(|(pieces, number): (&u32, u32)| {
            let path = base.path().join(format!("image-{number}"));
            in_pieces(&path, *pieces);
            disk(&format!("disk{number}"), &path, false).options.clone().into()
        });
        let options = JournalsOptions { disks: options.collect(), budget_bytes: 64 << 20, tracer: None };
        let journals = Journals::new(&VmMemory::new(), directory, options).expect("it can be served");
        let description = journals.directory().description().expect("it is read").expect("it is there");
        assert_eq!(description.logs.len(), journals.logs().len());
        let held = journals.logs().iter().map(|log| log.home_disk()).collect::<Vec<_>>();
        let reason = journals.disks().iter().find_map(|disk| disk.unheld()).unwrap_or_default();
        assert_eq!(held.len() == pieces.len(), reason.is_empty(), "{reason}");
        assert!(reason.is_empty() || reason.contains("pieces together"), "{reason}");
        held
    };
    let most = PIECES_DESCRIBED_MAX as u32 / 2;
    assert_eq!(of(&[most - 100]), [0]);
    assert_eq!(of(&[most]), [0; 0]);
    assert_eq!(of(&[most / 2, most / 2, most / 4]), [0, 2], "what there is room for is held");
}

/// A guest makes a file system and wipes it, as often as it likes: what is walked over for every home write is what is there.
#[test]
fn logs_that_were_forgotten_take_nothing() {
    let base = tempfile::tempdir().expect("a directory");
    let path = base.path().join("image");
    in_pieces(&path, 2000);
    let directory =
        AreaDirectory::create(&base.path().join("vms"), &base.path().join("registry")).expect("a directory");
    let options = vec![disk("disk", &path, false).options.clone().into()];
    let options = JournalsOptions { disks: options, budget_bytes: 64 << 20, tracer: None };
    let journals = Journals::new(&VmMemory::new(), directory, options).expect("it can be served");
    let image = File::options().write(true).open(&path).expect("the image");
    let magic = extfs::SUPERBLOCK_OFFSET + 0x38;
    let mut seen = std::collections::HashSet::new();
    for _ in 0..100 {
        let log = journals.logs().pop().expect("it is there");
        assert!(seen.insert((log.id, log.index)), "whoever names one that was forgotten finds another");
        image.write_all_at(&[0, 0], magic).expect("written");
        journals.scan(0).expect("looked at");
        assert!(journals.logs().is_empty() && journals.log(log.index).is_none());
        assert_eq!(journals.area.log_count(), 0);
        assert!(!journals.area.is_open(log.id) && journals.area.name_of(log.id).is_empty());
        image.write_all_at(&[0x53, 0xef], magic).expect("written");
        journals.scan(0).expect("looked at");
        assert_eq!((journals.logs().len(), journals.area.log_count()), (1, 1));
    }
}

/// As one who looks at each run finds it.
#[test]
fn where_a_log_block_is() {
    let run =
        |first_position: u32, count| LogRun { offset: 1000 + 2048 * u64::from(first_position), first_position, count };
    // The last two as of a journal device, whose first block has no position.
    for runs in [vec![run(0, 5), run(5, 1), run(6, 300)], vec![run(0, 1), run(3, 40)], vec![run(2, 1)], Vec::new()] {
        for position in (0..320).chain([u32::MAX]) {
            let it = runs.iter().find(|run| (run.first_position..run.first_position + run.count).contains(&position));
            let expected = it.map(|run| run.offset + 1024 * u64::from(position - run.first_position));
            assert_eq!(offset_of(&runs, 1024, position), expected, "{position} of {runs:?}");
        }
    }
}
