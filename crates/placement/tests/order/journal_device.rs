//! A journal device in a partition of its own: for which file system it is opened.

use super::*;
use guest_kit::image::journal_device;

/// Where the journal device begins, in bytes.
const DEVICE: u64 = 26 << 20;
/// Where there is room for a copy of the file system.
const COPY: u64 = 36 << 20;
const DEVICE_MIB: u32 = 8;
const JOURNAL_INODE: usize = 0xe0;
const JOURNAL_UUID: usize = 0xd0;
const HAS_JOURNAL: u8 = 4;
const NEEDS_RECOVERY: u8 = 4;

impl Rig {
    /// A file system in the first partition, whose journal is in the second.
    fn with_journal_device(placement: PlacementKind) -> Self {
        let directory = tempfile::tempdir_in("/dev/shm").expect("tmpfs");
        let (image, device) = (directory.path().join("image"), directory.path().join("device"));
        journal_device(&device, DEVICE_MIB, 4096).expect("made");
        let device = std::fs::read(&device).expect("the device");
        let file = std::fs::OpenOptions::new().create_new(true).read(true).write(true).open(&image).expect("made");
        file.set_len(DISK_BYTES).expect("a length");
        let offset = format!("offset={PARTITION}");
        let features = "^metadata_csum,^has_journal";
        run(
            "mke2fs",
            &["-q", "-F", "-t", "ext4", "-b", "4096", "-O", features, "-E", &offset],
            &image,
            &[&FILE_SYSTEM_BLOCKS.to_string()],
        );
        file.write_all_at(&device, DEVICE).expect("written");
        let mut table = partition_table(FILE_SYSTEM_BLOCKS);
        table[462 + 4] = 0x83;
        table[462 + 8..462 + 12].copy_from_slice(&((DEVICE / 512) as u32).to_le_bytes());
        table[462 + 12..462 + 16].copy_from_slice(&(DEVICE_MIB << 11).to_le_bytes());
        table[478 + 4] = 0x83;
        table[478 + 8..478 + 12].copy_from_slice(&((COPY / 512) as u32).to_le_bytes());
        table[478 + 12..478 + 16].copy_from_slice(&((FILE_SYSTEM_BLOCKS * BLOCK / 512) as u32).to_le_bytes());
        file.write_all_at(&table, 0).expect("a partition table");
        let log_at = (0..u64::from(DEVICE_MIB) << 8).map(|block| DEVICE + block.max(1) * BLOCK).collect();
        edit_file_system(&file, |superblock| {
            superblock[0x5c] |= HAS_JOURNAL;
            superblock[JOURNAL_INODE..JOURNAL_INODE + 4].fill(0);
            superblock[JOURNAL_UUID..JOURNAL_UUID + 16].copy_from_slice(&device[1024 + 0x68..1024 + 0x78]);
        });
        Self::of(directory, log_at, 64 << 20, placement, None)
    }

    /// Its kernel mounts the file system, or says that it did not.
    fn says_that_it_is_mounted(&mut self, is_mounted: bool) {
        let mut block = self.home(0);
        let word = &mut block[1024 + 0x60];
        *word = if is_mounted { *word | NEEDS_RECOVERY } else { *word & !NEEDS_RECOVERY };
        let operations = self.write(Self::home_at(0), &block);
        self.carry_out(operations);
    }
}

fn edit_file_system(file: &std::fs::File, edit: impl FnOnce(&mut [u8])) {
    let mut superblock = vec![0; 1024];
    file.read_exact_at(&mut superblock, PARTITION + 1024).expect("read");
    edit(&mut superblock);
    file.write_all_at(&superblock, PARTITION + 1024).expect("written");
}

/// What opens it may be mounted from a disk that is not one of this VM's, or with another file system that names it.
#[test]
fn a_journal_device_is_held_for_a_file_system_that_says_that_it_is_mounted() {
    for placement in [PlacementKind::Retain, PlacementKind::Copy, PlacementKind::Discard] {
        for is_mounted in [false, true] {
            let mut rig = Rig::with_journal_device(placement);
            assert_eq!(rig.journals.logs().len(), 1);
            rig.says_that_it_is_mounted(is_mounted);
            let mut block = rig.superblock.clone();
            let (start, sequence) = (rig.builder.position, rig.builder.sequence);
            jbd2::SuperblockEdit::new(&mut block).expect("a superblock").start(start).sequence(sequence).seal();
            let stored = rig.write(rig.log_at[0], &block);
            assert_eq!(stored.is_empty(), is_mounted, "{placement:?}: only one that is held stays away from storage");
            rig.carry_out(stored);
            assert_eq!(rig.journals.logs()[0].is_open(), is_mounted, "{placement:?}");
        }
    }
}

/// A copy of its file system comes while it is mounted. It goes on, a suspend included, until it is closed, and is not opened again.
#[test]
fn a_journal_device_that_two_name_goes_on_until_it_is_closed() {
    let mut rig = Rig::with_journal_device(PlacementKind::Retain);
    rig.says_that_it_is_mounted(true);
    rig.open();
    rig.commit(&[(3000, content(1))]);
    let copy = rig.home(0);
    let operations = rig.write(COPY, &copy);
    rig.carry_out(operations);
    assert_eq!(rig.journals.logs().len(), 1, "what is open goes on");
    rig.commit(&[(3000, content(2))]);
    assert_eq!(rig.owed(), 1);
    // Its device begins anew, and the same kernel goes on.
    let table = Arc::new(rig.map("after"));
    rig.route.started(Start::Fresh, &table).expect("started");
    assert_eq!(rig.home(3000), content(2), "what was committed is home");
    let (start, sequence) = (rig.builder.position, rig.builder.sequence);
    let transaction = Transaction { blocks: vec![(3001, content(3))], ..Transaction::default() };
    let mut log = Vec::new();
    rig.builder.transaction(&transaction, &mut |position, block| log.push((position, block.to_vec())));
    for (position, block) in log {
        let operations = rig.write(rig.log_at[position as usize], &block);
        rig.carry_out(operations);
    }
    let mut raw = vec![0; jbd2::SUPERBLOCK_BYTES];
    rig.file.read_exact_at(&mut raw, rig.log_at[0]).expect("read");
    let stored = jbd2::Superblock::decode(&raw).expect("a journal");
    assert_eq!((stored.start, stored.sequence), (start, sequence), "storage says so");
    // It is closed, and its file system unmounted.
    let mut block = rig.superblock.clone();
    jbd2::SuperblockEdit::new(&mut block).expect("a superblock").start(0).sequence(sequence + 2).seal();
    let operations = rig.write(rig.log_at[0], &block);
    rig.carry_out(operations);
    rig.says_that_it_is_mounted(false);
    rig.says_that_it_is_mounted(true);
    let mut block = rig.superblock.clone();
    jbd2::SuperblockEdit::new(&mut block).expect("a superblock").start(1).sequence(sequence + 2).seal();
    assert_eq!(rig.write(rig.log_at[0], &block).len(), 1, "whose it is next cannot be told: it is storage's");
}
