//! A journal device in a partition of its own: for which file system it is opened.

use super::*;
use guest_kit::image::journal_device;

/// Where the journal device begins, in bytes.
const DEVICE: u64 = 26 << 20;
/// Where there is room for a copy of the file system.
const COPY: u64 = 36 << 20;
const DEVICE_MIB: u32 = 8;
const JOURNAL_INODE: usize = 0xe0;
const UUID: usize = 0x68;
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

/// A daemon has died that held blocks 3000 and 3001 of a file system whose journal is on another disk.
struct Left {
    directory: PathBuf,
    _image: LeftImage,
    /// The images of the file system and of its journal.
    images: [PathBuf; 2],
    area: AreaDirectory,
}

/// The images of a file system and of its journal, on disks of their own, and where the blocks of that are. The file system says that it is
/// mounted.
fn two_images(directory: &Path) -> ([PathBuf; 2], Vec<u64>) {
    let [home, device] = ["home", "image"].map(|name| directory.join(name));
    journal_device(&device, DEVICE_MIB, 4096).expect("made");
    let uuid = std::fs::read(&device).expect("the device")[1024 + 0x68..1024 + 0x78].to_vec();
    let features = "^metadata_csum,^has_journal";
    let blocks = FILE_SYSTEM_BLOCKS.to_string();
    run("mke2fs", &["-q", "-F", "-t", "ext4", "-b", "4096", "-O", features], &home, &[&blocks]);
    edit_at(&home, 0, |superblock| {
        superblock[0x5c] |= HAS_JOURNAL;
        superblock[0x60] |= NEEDS_RECOVERY;
        superblock[JOURNAL_INODE..JOURNAL_INODE + 4].fill(0);
        superblock[JOURNAL_UUID..JOURNAL_UUID + 16].copy_from_slice(&uuid);
    });
    let log_at = (0..u64::from(DEVICE_MIB) << 8).map(|block| block.max(1) * BLOCK).collect();
    ([home, device], log_at)
}

impl Left {
    fn new(edit: impl FnOnce(&mut Vec<u8>)) -> Self {
        Self::after(edit, |rig, _| rig.commit(&[(3000, content(1)), (3001, content(2))]))
    }

    /// The same, after its guest has done something with the file system, which has a route of its own.
    fn after(edit: impl FnOnce(&mut Vec<u8>), does: impl FnOnce(&mut Rig, &mut DiskRoute)) -> Self {
        let directory = tempfile::tempdir_in("/dev/shm").expect("tmpfs");
        let (images, log_at) = two_images(directory.path());
        let mut rig =
            Rig::of_disks(directory, std::slice::from_ref(&images[0]), log_at, 64 << 20, PlacementKind::Retain, None);
        let mut at_home = DiskRoute::new(Arc::clone(&rig.journals), 0);
        let table = Arc::new(rig.map("of the file system"));
        at_home.started(Start::Fresh, &table).expect("started");
        edit(&mut rig.superblock);
        rig.open();
        does(&mut rig, &mut at_home);
        let directory = rig.directory.path().to_owned();
        drop(at_home);
        let (_image, area) = rig.die();
        Left { directory, _image, images, area }
    }

    fn finish(&self) -> Result<Vec<placement::FinishedLog>, FinishError> {
        finish_directory(&self.area, &self.images).and_then(Finish::into_result)
    }

    fn homes(&self) -> [Vec<u8>; 2] {
        homes_of(&self.images)
    }
}

fn edit_at(image: &Path, start: u64, edit: impl FnOnce(&mut [u8])) {
    let file = std::fs::OpenOptions::new().read(true).write(true).open(image).expect("an image");
    let mut superblock = vec![0; 1024];
    file.read_exact_at(&mut superblock, start + 1024).expect("read");
    edit(&mut superblock);
    file.write_all_at(&superblock, start + 1024).expect("written");
}

/// The mark is on the journal's disk. What is on the other one by then may be anything.
#[test]
fn what_is_held_does_not_land_on_another_file_system() {
    type Edit = fn(&mut [u8]);
    let restored: [(Edit, &str); 4] = [
        (|superblock| superblock[UUID..UUID + 16].fill(0x5a), "is 5a5a5a5a-"),
        (|superblock| superblock[JOURNAL_UUID..JOURNAL_UUID + 16].fill(0x5a), "has the journal 5a5a5a5a-"),
        (|superblock| superblock[0x60] &= !NEEDS_RECOVERY, "has to be replayed"),
        (|superblock| superblock.fill(0), "there is no ext2, ext3 or ext4 superblock"),
    ];
    for (edit, sentence) in restored {
        let left = Left::new(|_| ());
        let kept = left.images.each_ref().map(|image| std::fs::read(image).expect("an image"));
        edit_at(&left.images[0], 0, edit);
        let restored = left.images.each_ref().map(|image| std::fs::read(image).expect("an image"));
        let error = left.finish().expect_err("another one");
        assert!(matches!(error, FinishError::Refused(_)) && error.to_string().contains(sentence), "{error}");
        assert!(error.to_string().contains("--give-up"), "what to do: {error}");
        let now = left.images.each_ref().map(|image| std::fs::read(image).expect("an image"));
        assert!(now == restored, "{sentence}: nothing was changed");
        // The right one is put back.
        std::fs::write(&left.images[0], &kept[0]).expect("written");
        assert_eq!(left.finish().expect("finished")[0].recovery.blocks_written, 2, "{sentence}");
        assert_eq!(left.homes(), [content(1), content(2)]);
    }
}

/// One that only its guest's kernel can replay goes to its own place, and to no home: what is there by then is that kernel's matter.
#[test]
fn what_goes_to_no_home_is_put_in_its_place_whatever_is_on_the_other_disk() {
    // It has fast commits.
    let left = Left::new(|superblock| superblock[0x28..0x2c].copy_from_slice(&0x20u32.to_be_bytes()));
    edit_at(&left.images[0], 0, |superblock| superblock[0x60] &= !NEEDS_RECOVERY);
    let home = std::fs::read(&left.images[0]).expect("the file system");
    let finished = left.finish().expect("nothing speaks against it");
    assert_eq!(finished[0].recovery.status, recovery::Status::Materialised);
    assert!(std::fs::read(&left.images[0]).expect("the file system") == home, "nothing is written there");
}

/// A recovery takes the word away that the journal is to be replayed, and empties the journal after that. It may be cut off between the two. Where
/// the file system was given another UUID while it was mounted, it has that from the log by then, and its journal was not told.
#[test]
fn a_recovery_onto_another_disk_that_was_cut_off_goes_on() {
    for (is_restored, has_another_uuid) in [(false, false), (true, false), (false, true), (true, true)] {
        let left = Left::after(
            |_| (),
            |rig, _| {
                let home = std::fs::read(rig.directory.path().join("home")).expect("the file system");
                let mut superblock = home[..BLOCK as usize].to_vec();
                superblock[1024 + UUID..1024 + UUID + 16].fill(0x5a);
                let mut blocks = vec![(3000, content(1)), (3001, content(2))];
                blocks.extend(has_another_uuid.then_some((0, superblock)));
                rig.commit(&blocks);
            },
        );
        let again = left.directory.join("again");
        std::fs::DirBuilder::new().mode(0o700).create(&again).expect("a directory");
        for entry in std::fs::read_dir(left.area.path()).expect("files").flatten() {
            std::fs::copy(entry.path(), again.join(entry.file_name())).expect("copied");
        }
        let marked = std::fs::read(&left.images[1]).expect("the journal");
        left.finish().expect("finished");
        let home = std::fs::read(&left.images[0]).expect("the file system");
        assert_eq!(home[1024 + UUID..1024 + UUID + 16] == [0x5a; 16], has_another_uuid);
        std::fs::write(&left.images[1], &marked).expect("written");
        if is_restored {
            let file = std::fs::OpenOptions::new().write(true).open(&left.images[0]).expect("the file system");
            file.write_all_at(&content(9), 3001 * BLOCK).expect("written");
        }
        let area = AreaDirectory::take_over(&again, &left.directory.join("registry")).expect("free");
        let left = Left { area, ..left };
        let finished = left.finish();
        assert_eq!(finished.is_ok(), !is_restored, "another UUID: {has_another_uuid}: {finished:?}");
        assert_eq!(left.homes()[1], content(if is_restored { 9 } else { 2 }));
    }
}

/// A file system that is mounted is given another UUID, and its journal is told.
#[test]
fn a_file_system_with_another_uuid_is_the_one_that_its_journal_names() {
    let left = Left::new(|superblock| {
        superblock[0x43] = 1;
        superblock[0x100..0x110].fill(0x5a);
    });
    edit_at(&left.images[0], 0, |superblock| superblock[UUID..UUID + 16].fill(0x5a));
    left.finish().expect("finished");
    assert_eq!(left.homes(), [content(1), content(2)]);
}

/// Its journal is not told, as where the kernel is asked to change it: it cannot be told from a clone with a UUID of its own by anybody but a
/// person, who is told how to have it taken for what it is.
#[test]
fn a_file_system_whose_journal_was_not_told_of_its_uuid_gets_the_old_one_back() {
    let give_back = |image: &Path, sentence: String| {
        let (_, command) = sentence.split_once("try again: ").unwrap_or_else(|| panic!("what to do: {sentence}"));
        let (command, _) = command.split_once("'. ").expect("its end");
        let command = format!("{command}'").replace("IMAGE", image.to_str().expect("a name"));
        // Checksums of bitmaps need not fit before the journal is replayed; without -n the program writes nothing then, and ends well.
        assert!(command.starts_with("debugfs -n -w "), "{command}");
        let status = Command::new("sh").args(["-c", &command]).stderr(std::process::Stdio::null()).status();
        assert!(status.expect("a shell").success(), "{command}");
    };
    let another = |superblock: &mut [u8]| superblock[UUID..UUID + 16].fill(0x5a);

    let held = Left::new(|_| ());
    edit_at(&held.images[0], 0, another);
    give_back(&held.images[0], held.finish().expect_err("it may be another one").to_string());
    held.finish().expect("finished");
    assert_eq!(held.homes(), [content(1), content(2)]);

    let shipped = Shipped::new();
    edit_at(&shipped.images[0], 0, another);
    give_back(&shipped.images[0], shipped.recover(false, false).expect_err("it may be another one").to_string());
    shipped.recover(false, false).expect("recovered");
    assert_eq!(homes_of(&shipped.images), [content(1), content(2)]);

    // What has another journal, or was not mounted, is another one.
    for edit in [(|superblock| superblock[JOURNAL_UUID] ^= 1) as fn(&mut [u8]), |superblock| {
        superblock[0x60] &= !NEEDS_RECOVERY
    }] {
        let held = Left::new(|_| ());
        edit_at(&held.images[0], 0, another);
        edit_at(&held.images[0], 0, edit);
        let why = held.finish().expect_err("another one").to_string();
        assert!(why.contains("is 5a5a5a5a-") && !why.contains("debugfs"), "{why}");
    }
}

fn edit_file_system(file: &std::fs::File, edit: impl FnOnce(&mut [u8])) {
    let mut superblock = vec![0; 1024];
    file.read_exact_at(&mut superblock, PARTITION + 1024).expect("read");
    edit(&mut superblock);
    file.write_all_at(&superblock, PARTITION + 1024).expect("written");
}

/// Its guest writes a block of the file system at home.
fn write_at_home(rig: &mut Rig, at_home: &mut DiskRoute, block: u64, content: &[u8]) {
    let home = std::fs::OpenOptions::new().write(true).open(rig.directory.path().join("home")).expect("an image");
    let page = rig.page(content);
    rig.next_request += 1;
    let (id, offset, len) = (RequestId(rig.next_request), block * BLOCK, content.len() as u64);
    let mut plan = Plan::default();
    at_home.route(&Request { id, kind: RequestKind::Write, offset, len, segments: &[page] }, &mut plan);
    at_home.end_of_pass(&mut plan);
    for operation in operations(plan) {
        home.write_all_at(content, offset).expect("written");
        if let Some(ticket) = operation.ticket {
            at_home.disk_done(ticket, Ok(()), &mut Plan::default());
        }
    }
}

/// Storage refuses what a close of the journal writes in its place, so the log stays as it was; and the guest unmounts its file system all the
/// same, of which all is home by then.
#[test]
fn a_journal_whose_close_has_failed_is_no_other_ones() {
    const WRITTEN_AT: std::ops::Range<usize> = 1024 + 0x30..1024 + 0x34;
    const MOUNT_COUNT: usize = 0x34;
    for is_checkpointed in [true, false] {
        let left = Left::after(
            |_| (),
            |rig, at_home| {
                let home = std::fs::read(rig.directory.path().join("home")).expect("the file system");
                let mut superblock = home[..BLOCK as usize].to_vec();
                // The list of orphans.
                superblock[1024 + 0xe8] = 12;
                rig.commit(&[(0, superblock.clone()), (3000, content(1)), (3001, content(2))]);
                if is_checkpointed {
                    write_at_home(rig, at_home, 0, &superblock);
                }
                write_at_home(rig, at_home, 3000, &content(1));
                write_at_home(rig, at_home, 3001, &content(2));
                superblock[1024 + 0x60] &= !NEEDS_RECOVERY;
                let now = u32::from_le_bytes(superblock[WRITTEN_AT].try_into().expect("four bytes")) + 5;
                superblock[WRITTEN_AT].copy_from_slice(&now.to_le_bytes());
                write_at_home(rig, at_home, 0, &superblock);
            },
        );
        let kept = std::fs::read(&left.images[0]).expect("the file system");
        // A copy from before it was mounted is no such one.
        edit_at(&left.images[0], 0, |superblock| superblock[MOUNT_COUNT] ^= 1);
        left.finish().expect_err("a copy");
        std::fs::write(&left.images[0], &kept).expect("written");
        left.finish().unwrap_or_else(|error| panic!("checkpointed: {is_checkpointed}: {error}"));
        assert!(std::fs::read(&left.images[0]).expect("the file system") == kept, "all of it was there");
    }
}

/// A VM has died whose journal, on a disk of its own, was on a server, with blocks 3000 and 3001 of its file system.
struct Shipped {
    _directory: LeftImage,
    images: [PathBuf; 2],
    area: AreaDirectory,
    _server: remote_journal::Server,
    options: RemoteOptions,
}

impl Shipped {
    fn new() -> Self {
        use remote_journal::store::{Simulated, Store, StoreOptions};
        let bounds = StoreOptions { segment_bytes: 256 << 10, space_bytes_max: 64 << 20, journal_bytes_max: 8 << 20 };
        let mut of_server = remote_journal::ServerOptions::new("127.0.0.1:0", "");
        of_server.insecure = true;
        let store = Store::open(Simulated::default(), bounds, 7).expect("a store");
        let server = remote_journal::Server::with_store(of_server, store).expect("a server");
        let security = remote_journal::ClientSecurity { insecure: true, ..Default::default() };
        let timeout = std::time::Duration::from_secs(5);
        let client = remote_journal::ClientOptions { address: server.address().to_string(), security, timeout };
        let options = RemoteOptions { client, name: "disk".to_owned() };
        let directory = tempfile::tempdir_in("/dev/shm").expect("tmpfs");
        let (images, log_at) = two_images(directory.path());
        let (others, kind) = (std::slice::from_ref(&images[0]), PlacementKind::Remote);
        let mut rig = Rig::of_disks(directory, others, log_at, 64 << 20, kind, Some(options.clone()));
        rig.open();
        let until = std::time::Instant::now() + std::time::Duration::from_secs(60);
        let wait_for = |is_it: &mut dyn FnMut() -> bool| {
            while !is_it() {
                assert!(std::time::Instant::now() < until, "its journal is not on the server");
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
        };
        wait_for(&mut || rig.is_on_storage_a_mark());
        let transaction = Transaction { blocks: vec![(3000, content(1)), (3001, content(2))], ..Default::default() };
        let mut log = Vec::new();
        rig.builder.transaction(&transaction, &mut |position, block| log.push((position, block.to_vec())));
        let mut is_told = false;
        for (position, block) in log {
            let page = rig.page(&block);
            let plan = rig.plan(RequestKind::Write, rig.log_at[position as usize], &[page]);
            is_told = plan.actions.iter().any(|action| matches!(action, PlanAction::Release(..)));
        }
        // The last one is the commit block.
        wait_for(&mut || {
            let mut plan = Plan::default();
            rig.route.woken(&mut plan);
            is_told |= plan.actions.iter().any(|action| matches!(action, PlanAction::Release(_, Status::Ok)));
            is_told
        });
        let (image, area) = rig.die();
        Shipped { _directory: image, images, area, _server: server, options }
    }

    fn recover(&self, is_dry_run: bool, is_start: bool) -> Result<Vec<placement::RemoteRecovered>, recovery::Error> {
        recover_remote(&self.images, &self.options, is_dry_run, is_start)
    }
}

/// With both of them locked.
fn recover_remote(
    images: &[PathBuf; 2],
    options: &RemoteOptions,
    is_dry_run: bool,
    is_start: bool,
) -> Result<Vec<placement::RemoteRecovered>, recovery::Error> {
    let access = if is_dry_run { recovery::Access::Read } else { recovery::Access::Write };
    let [home, journal] = images.each_ref().map(|image| recovery::Disk::open(image, access));
    placement::recover_remote_image(&home?, Some(&journal?), options, is_dry_run, is_start)
}

impl Rig {
    fn is_on_storage_a_mark(&self) -> bool {
        let mut raw = [0; jbd2::SUPERBLOCK_BYTES];
        self.file.read_exact_at(&mut raw, self.log_at[0]).expect("read");
        matches!(placement::Stored::read(&raw).says, placement::Says::Remote(_))
    }
}

fn bytes_of(images: &[PathBuf; 2]) -> [Vec<u8>; 2] {
    images.each_ref().map(|image| std::fs::read(image).expect("an image"))
}

fn homes_of(images: &[PathBuf; 2]) -> [Vec<u8>; 2] {
    let home = std::fs::read(&images[0]).expect("the file system");
    [3000, 3001].map(|block| home[block * BLOCK as usize..][..BLOCK as usize].to_vec())
}

type Restored = [(fn(&mut [u8]), &'static str); 2];

/// What an image is that was restored: another file system, or a copy of this one from when it was not mounted.
const RESTORED: Restored = [
    (|superblock| superblock[UUID..UUID + 16].fill(0x5a), "is 5a5a5a5a-"),
    (|superblock| superblock[0x60] &= !NEEDS_RECOVERY, "does not say that its journal has to be replayed"),
];

#[test]
fn what_a_server_has_does_not_land_on_another_file_system() {
    let left = Shipped::new();
    let kept = bytes_of(&left.images);
    for (edit, sentence) in RESTORED {
        edit_at(&left.images[0], 0, edit);
        let restored = bytes_of(&left.images);
        for (is_dry_run, is_start) in [(true, false), (false, true), (false, false)] {
            let error = left.recover(is_dry_run, is_start).expect_err("another one");
            assert!(error.is_refusal() && error.to_string().contains(sentence), "{error}");
            assert!(error.to_string().contains("e2fsck -fy on it with -j"), "what to do: {error}");
            assert!(bytes_of(&left.images) == restored, "{sentence}: nothing was changed");
        }
        std::fs::write(&left.images[0], &kept[0]).expect("written");
    }
    // The right one is put back.
    assert_eq!(left.recover(false, true).expect("recovered")[0].report.blocks_written, 2);
    assert_eq!(homes_of(&left.images), [content(1), content(2)]);
}

/// What is on a server is completed on the journal's disk first. Somebody may have that one locked, and not the other.
#[test]
fn a_start_writes_nothing_to_a_journal_whose_disk_somebody_has() {
    let left = Shipped::new();
    let (images, before) = (left.images.clone(), bytes_of(&left.images));
    let options = DiskOptions {
        name: "disk".to_owned(),
        path: images[0].clone(),
        placement: PlacementKind::Remote,
        honour_flush: false,
        read_only: false,
        nvm: None,
        remote: Some(left.options.clone()),
        durable_within: None,
        write_log: None,
    };
    let had = recovery::Disk::open(&images[1], recovery::Access::Write).expect("nobody has it");
    let somebody = std::thread::spawn(move || {
        std::thread::sleep(std::time::Duration::from_secs(1));
        let is_as_it_was = bytes_of(&images) == before;
        drop(had);
        is_as_it_was
    });
    let mut brought = Vec::new();
    let finished = placement::finish_earlier(&options, &[left.images[1].as_path()], &mut brought);
    assert!(somebody.join().expect("no panic"), "it was written to: {finished:?}");
    finished.expect("it was given up soon");
    assert!(brought.len() == 1 && homes_of(&left.images) == [content(1), content(2)]);
}

#[test]
fn what_the_copy_of_a_shipped_log_has_does_not_land_on_another_file_system() {
    let left = Shipped::new();
    let kept = bytes_of(&left.images);
    let (edit, sentence) = RESTORED[1];
    edit_at(&left.images[0], 0, edit);
    let restored = bytes_of(&left.images);
    let finished = placement::finish_copies(&left.area, &left.images).expect("looked at");
    let error = finished.failed.first().expect("another one").error.to_string();
    assert!(error.contains(sentence) && error.contains("e2fsck -fy on it with -j"), "{error}");
    assert!(finished.finished.is_empty() && bytes_of(&left.images) == restored, "nothing was changed");
    std::fs::write(&left.images[0], &kept[0]).expect("written");
    let finished = placement::finish_copies(&left.area, &left.images).expect("looked at");
    assert!(finished.failed.is_empty() && finished.finished.len() == 1, "{finished:?}");
    assert_eq!(homes_of(&left.images), [content(1), content(2)]);
}

/// A log that is whole in its own place, as a recovery leaves it that was cut off before it brought it home, or a server that was given up.
#[test]
fn a_log_on_another_disk_is_not_replayed_onto_a_file_system_that_asks_for_no_replay() {
    let directory = tempfile::tempdir_in("/dev/shm").expect("tmpfs");
    let (images, log_at) = two_images(directory.path());
    let journal = std::fs::OpenOptions::new().read(true).write(true).open(&images[1]).expect("the journal");
    let mut superblock = vec![0; BLOCK as usize];
    journal.read_exact_at(&mut superblock, log_at[0]).expect("read");
    let (parsed, format) = jbd2::Superblock::parse(&superblock).expect("a journal");
    let (first, sequence) = (parsed.first, parsed.sequence + 1);
    let mut builder = LogBuilder::new(format, first, sequence);
    let transaction = Transaction { blocks: vec![(3000, content(1)), (3001, content(2))], ..Default::default() };
    builder.transaction(&transaction, &mut |position, block| {
        journal.write_all_at(block, log_at[position as usize]).expect("written");
    });
    jbd2::SuperblockEdit::new(&mut superblock).expect("a superblock").start(first).sequence(sequence).seal();
    journal.write_all_at(&superblock, log_at[0]).expect("written");
    let security = remote_journal::ClientSecurity { insecure: true, ..Default::default() };
    let timeout = std::time::Duration::from_secs(1);
    let client = remote_journal::ClientOptions { address: "127.0.0.1:1".to_owned(), security, timeout };
    let options = RemoteOptions { client, name: "disk".to_owned() };
    let recover = |is_dry_run| recover_remote(&images, &options, is_dry_run, false);
    edit_at(&images[0], 0, |superblock| superblock[0x60] &= !NEEDS_RECOVERY);
    let restored = bytes_of(&images);
    for is_dry_run in [true, false] {
        let error = recover(is_dry_run).expect_err("no kernel would");
        assert!(error.is_refusal() && error.to_string().contains("has to be replayed"), "{error}");
        assert!(bytes_of(&images) == restored, "nothing was changed");
    }
    edit_at(&images[0], 0, |superblock| superblock[0x60] |= NEEDS_RECOVERY);
    assert_eq!(recover(false).expect("recovered")[0].report.blocks_written, 2);
    // It was cut off before it emptied the journal.
    journal.write_all_at(&superblock, log_at[0]).expect("written");
    recover(false).expect("all of it is there");
    assert_eq!(homes_of(&images), [content(1), content(2)]);
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

/// The same of one that was handed over before its device begins anew.
#[test]
fn a_journal_device_that_two_name_and_that_was_handed_over_goes_on() {
    let mut rig = Rig::with_journal_device(PlacementKind::Retain);
    rig.says_that_it_is_mounted(true);
    rig.open();
    let earlier = superblock_of(&rig);
    rig.commit(&[(3000, content(1))]);
    let index = rig.journals.logs()[0].index();
    rig.journals.change_placement(index, PlacementKind::Storage).expect("it may");
    assert!(rig.route.hand_over(index, &mut Plan::default()).expect("asked"));
    let copy = rig.home(0);
    let operations = rig.write(COPY, &copy);
    rig.carry_out(operations);
    let table = Arc::new(rig.map("after"));
    rig.route.started(Start::Fresh, &table).expect("started");
    assert_eq!(rig.journals.logs().len(), 1, "its guest may go on");
    assert!(rig.write(rig.log_at[0], &earlier).is_empty(), "what storage has of the log is lost");
}
