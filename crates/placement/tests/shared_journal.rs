//! Two file systems that lay claim to the same blocks: a copy of a file system with a journal device names that device, as the original does;
//! and partitions can overlap. Neither is held: which of them a commit is of, only the guest's kernel knows.

use guest_kit::image::{ExtRecipe, Journal, copy_image, journal_device};
use guest_memory::VmMemory;
use placement::{AreaDirectory, DiskOptions, Journals, JournalsOptions, PlacementKind};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The journals of a VM with these disks, of which some can only be read.
fn journals(directory: &Path, images: &[(&PathBuf, bool)]) -> Arc<Journals> {
    let area = AreaDirectory::create(&directory.join("vms"), &directory.join("registry")).expect("a directory");
    let options = |(index, (image, read_only)): (usize, &(&PathBuf, bool))| DiskOptions {
        name: format!("disk{index}"),
        path: image.to_path_buf(),
        placement: PlacementKind::Retain,
        honour_flush: true,
        read_only: *read_only,
        nvm: None,
        remote: None,
        durable_within: None,
        write_log: None,
    };
    let disks = images.iter().enumerate().map(options).collect();
    Journals::new(&VmMemory::new(), area, JournalsOptions { disks, budget_bytes: 64 << 20, tracer: None })
        .expect("journals")
}

#[test]
fn a_copied_file_system_and_its_original_share_a_journal_device() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = |name: &str| directory.path().join(name);
    let (original, copy, journal) = (path("original"), path("copy"), path("journal"));
    journal_device(&journal, 16, 4096).expect("made");
    ExtRecipe { journal: Journal::External(journal.clone()), ..ExtRecipe::ext4(64, 0) }.make(&original).expect("made");
    let found = |images: &[(&PathBuf, bool)]| journals(directory.path(), images).logs().len();
    assert_eq!(found(&[(&original, false), (&journal, false)]), 1);
    copy_image(&original, &copy).expect("copied");
    assert_eq!(found(&[(&original, false), (&copy, false), (&journal, false)]), 0);
    assert_eq!(found(&[(&original, false), (&copy, true), (&journal, false)]), 1, "the copy writes no journal");
    assert_eq!(found(&[(&original, true), (&copy, false), (&journal, false)]), 1, "nor does this original");
}

/// A copy of a journal device has its UUID, and comes first or last.
#[test]
fn a_journal_device_and_its_copy_are_told_apart_by_nobody() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = |name: &str| directory.path().join(name);
    let (home, journal, copy) = (path("home"), path("journal"), path("copy"));
    journal_device(&journal, 16, 4096).expect("made");
    ExtRecipe { journal: Journal::External(journal.clone()), ..ExtRecipe::ext4(64, 0) }.make(&home).expect("made");
    copy_image(&journal, &copy).expect("copied");
    for images in [[&home, &copy, &journal], [&home, &journal, &copy]] {
        assert_eq!(journals(directory.path(), &images.map(|image| (image, false))).logs().len(), 0);
    }
}

/// The guest makes the copy while it runs, and takes it away again.
#[test]
fn what_a_journal_device_is_known_with_follows_what_the_guest_does() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = |name: &str| directory.path().join(name);
    let (original, copy, journal) = (path("original"), path("copy"), path("journal"));
    journal_device(&journal, 16, 4096).expect("made");
    ExtRecipe { journal: Journal::External(journal.clone()), ..ExtRecipe::ext4(64, 0) }.make(&original).expect("made");
    std::fs::File::create(&copy).and_then(|file| file.set_len(64 << 20)).expect("made");
    let vm = journals(directory.path(), &[(&original, false), (&copy, false), (&journal, false)]);
    let homes = || vm.logs().iter().map(|log| log.home_disk()).collect::<Vec<_>>();
    assert_eq!(homes(), [0]);
    std::fs::write(&copy, std::fs::read(&original).expect("read")).expect("written");
    vm.scan(1).expect("looked at");
    assert_eq!(homes(), [0; 0], "nobody has it open");
    let zeros = vec![0; 64 << 20];
    std::fs::write(&original, &zeros).expect("written");
    vm.scan(0).expect("looked at");
    assert_eq!(homes(), [1], "the copy is the only one that names it");
}

/// Partitions that overlap, as of a table that was written by hand.
#[test]
fn file_systems_that_overlap_are_left_alone() {
    let directory = tempfile::tempdir().expect("a directory");
    let image = directory.path().join("image");
    let mib = 1u64 << 20;
    guest_kit::image::partition(
        &image,
        96 * mib,
        "label: gpt\nstart=2048, size=65536, type=L\nstart=75776, size=65536, type=L\n",
    )
    .expect("partitioned");
    for start in [2048 * 512, 75776 * 512] {
        ExtRecipe::ext4(24, 4).make_at(&image, start).expect("made");
    }
    assert_eq!(journals(directory.path(), &[(&image, false)]).logs().len(), 2);
    // The first reaches into the second: its superblock is whole, and says that it has the room.
    set_gpt_end(&image, 75776 + 4096);
    assert_eq!(journals(directory.path(), &[(&image, false)]).logs().len(), 0);
}

/// Writes another end of the first partition into a GPT, with its checksums.
fn set_gpt_end(image: &Path, last: u64) {
    use std::os::unix::fs::FileExt;
    let file = std::fs::OpenOptions::new().read(true).write(true).open(image).expect("the image");
    let mut header = [0; 92];
    file.read_exact_at(&mut header, 512).expect("read");
    let word = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().expect("four bytes"));
    let (count, each) = (word(80), word(84));
    let mut entries = vec![0; (count * each) as usize];
    file.read_exact_at(&mut entries, 1024).expect("read");
    entries[40..48].copy_from_slice(&last.to_le_bytes());
    file.write_all_at(&entries, 1024).expect("written");
    header[88..92].copy_from_slice(&crc32(&entries).to_le_bytes());
    header[16..20].fill(0);
    let sum = crc32(&header);
    header[16..20].copy_from_slice(&sum.to_le_bytes());
    file.write_all_at(&header, 512).expect("written");
}

fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0u32, |mut crc, byte| {
        crc ^= u32::from(*byte);
        (0..8).for_each(|_| crc = (crc >> 1) ^ (0xedb8_8320 & 0u32.wrapping_sub(crc & 1)));
        crc
    })
}

/// Memory may be gone soon when a file system is made, or a guest comes that had it elsewhere: its journal is not held there, and is when that is over.
#[test]
fn a_journal_that_comes_while_memory_is_doubtful_is_on_storage() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = |name: &str| directory.path().join(name);
    let (early, late, made) = (path("early"), path("late"), path("made"));
    ExtRecipe::ext4(32, 4).make(&early).expect("made");
    ExtRecipe::ext4(32, 4).make(&made).expect("made");
    std::fs::File::create(&late).and_then(|file| file.set_len(32 << 20)).expect("made");
    let vm = journals(directory.path(), &[(&early, false), (&late, false)]);
    let placements = || vm.logs().iter().map(|log| (log.placement, log.wanted())).collect::<Vec<_>>();
    assert_eq!(placements(), [(PlacementKind::Retain, PlacementKind::Retain)]);
    vm.doubt_memory(true);
    std::fs::write(&late, std::fs::read(&made).expect("read")).expect("written");
    vm.scan(1).expect("looked at");
    let storage = (PlacementKind::Storage, PlacementKind::Storage);
    assert_eq!(
        placements(),
        [(PlacementKind::Retain, PlacementKind::Retain), storage],
        "who is known is moved by others"
    );
    vm.doubt_memory(false);
    vm.change_placement(vm.logs()[1].index(), PlacementKind::Retain).expect("it may");
    assert_eq!(placements()[1].0, PlacementKind::Retain);
}
