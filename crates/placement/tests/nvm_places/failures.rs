//! Storage that fails once: whoever waits is served by the next try, and a mount in the same session begins anew.

use super::*;
use placement::{Brought, finish_earlier};
use test_storage::TestStorage;

/// Writes to this place of the disk fail.
fn fails_at(rig: &mut Rig, at: u64) {
    rig.may_fail = true;
    rig.fails = Box::new(move |operation| operation.operation == Operation::Write && operation.offset == at);
}

fn mended(rig: &mut Rig) {
    rig.fails = Box::new(|_| false);
}

/// Time has come for what the journal has to do by itself.
fn woken(rig: &mut Rig) {
    let mut plan = Plan::default();
    rig.route.woken(&mut plan);
    rig.carry_out(plan);
}

/// One block that the guest thinks is at home, whose checkpoint has failed.
fn with_a_failed_checkpoint(change: impl FnOnce(&mut NvmOptions)) -> Rig {
    let mut rig = Rig::with(1, change);
    rig.superblock(0, true);
    rig.commit(0, IN_USE, &content(1));
    let at = rig.home_at(0, IN_USE);
    assert_eq!(rig.request(RequestKind::Write, at, &mut content(1)), 0, "absorbed");
    fails_at(&mut rig, at);
    rig.journals.region(0).expect("regions").request_checkpoint();
    woken(&mut rig);
    rig
}

#[test]
fn a_journal_is_closed_where_a_checkpoint_has_failed_once() {
    let mut rig = with_a_failed_checkpoint(|_| {});
    mended(&mut rig);
    rig.superblock(0, false);
    assert!(rig.failed.is_empty());
    assert!(rig.stored(0, IN_USE) == content(1), "it is home");
    assert!(!rig.log(0).is_open(), "and its journal closed");
}

#[test]
fn a_journal_that_cannot_be_closed_says_so() {
    let mut rig = with_a_failed_checkpoint(|_| {});
    rig.superblock(0, false);
    assert!(rig.failed.is_empty(), "it is tried again first");
    assert!(rig.journals.due_in(0).is_some_and(|due| due.is_zero()), "soon");
    woken(&mut rig);
    woken(&mut rig);
    assert_eq!(rig.failed, [RequestId(rig.next_request)]);
    assert!(rig.log(0).is_open());
    // Unmounted again, with storage that works.
    mended(&mut rig);
    rig.superblock(0, false);
    assert_eq!(rig.failed.len(), 1);
    assert!(!rig.log(0).is_open() && rig.stored(0, IN_USE) == content(1));
}

#[test]
fn a_commit_without_room_waits_for_the_next_try() {
    let mut rig = with_a_failed_checkpoint(|options| {
        options.create_bytes = 5 << 20;
        options.log_everything = true;
    });
    let of = &rig.file_systems[0];
    let own: Vec<u64> = of.log_at.iter().map(|at| (at - of.start) / BLOCK).collect();
    let mut homes =
        (IN_USE + 1..FILE_SYSTEM_BLOCKS).filter(|block| !own.contains(block)).collect::<Vec<_>>().into_iter();
    for transaction in 1..=6 {
        // What is not complete is refused where there is no room, and held where there will be some.
        let blocks: Vec<(u64, Vec<u8>)> = homes.by_ref().take(150).map(|block| (block, content(block as u8))).collect();
        rig.commit_all(0, &blocks);
        for (block, content) in blocks {
            let at = rig.home_at(0, block);
            rig.request(RequestKind::Write, at, &mut content.clone());
        }
        assert!(rig.failed.is_empty(), "transaction {transaction}");
        if rig.journals.due_in(0).is_some_and(|due| due.is_zero()) {
            break;
        }
        assert!(transaction < 6, "the region is full by now");
    }
    mended(&mut rig);
    woken(&mut rig);
    assert!(rig.failed.is_empty(), "it is committed");
    rig.commit(0, IN_USE, &content(3));
    assert!(rig.failed.is_empty());
}

/// The kernel gives its journal up, is unmounted, and mounts the file system again.
#[test]
fn a_mount_after_a_commit_that_failed_begins_anew() {
    let mut rig = Rig::with(1, |options| options.append_home_bytes_min = 0);
    rig.superblock(0, true);
    rig.commit(0, IN_USE, &content(1));
    rig.may_fail = true;
    rig.fails = Box::new(|operation| operation.operation == Operation::Flush);
    let free = FILE_SYSTEM_BLOCKS - 10;
    rig.commit(0, free, &content(2));
    assert!(!rig.failed.is_empty(), "its appends cannot be made durable");
    mended(&mut rig);
    rig.failed.clear();
    rig.commit(0, free + 1, &content(3));
    assert!(!rig.failed.is_empty(), "nothing is committed after that");
    rig.failed.clear();
    // It reads the log, replays what it is shown, and leaves out a number.
    let mut superblock = vec![0; BLOCK as usize];
    let at = rig.file_systems[0].log_at[0];
    rig.request(RequestKind::Read, at, &mut superblock);
    let (shown, format) = jbd2::Superblock::parse(&superblock).expect("a superblock");
    let at = rig.home_at(0, IN_USE);
    rig.request(RequestKind::Write, at, &mut content(1));
    rig.file_systems[0].builder = LogBuilder::new(format, shown.first, shown.sequence.wrapping_add(2));
    rig.superblock(0, true);
    assert!(rig.failed.is_empty(), "it is mounted");
    rig.commit(0, IN_USE, &content(4));
    assert!(rig.failed.is_empty(), "its journal fails in every mount");
    assert!(rig.recovered_block(IN_USE) == content(4));
}

/// Two writes past the journal, the later of which is under way when the tail moves.
#[test]
fn a_tail_does_not_leave_behind_what_an_acknowledged_write_has_replaced() {
    let mut rig = Rig::new(1);
    rig.superblock(0, true);
    rig.commit(0, IN_USE, &content(1));
    let at = rig.home_at(0, IN_USE);
    rig.request(RequestKind::Write, at, &mut content(2));
    rig.request(RequestKind::Flush, 0, &mut []);
    rig.holds = Box::new(move |operation| operation.operation == Operation::Write && operation.offset == at);
    rig.request(RequestKind::Write, at, &mut content(3));
    assert_eq!(rig.held.len(), 1);
    rig.superblock(0, true);
    assert!(rig.recovered_block(IN_USE) == content(2), "what was acknowledged is taken back");
    rig.end_held();
    assert!(rig.recovered_block(IN_USE) == content(3));
}

#[test]
fn a_write_that_ends_beside_another_one_is_not_taken_back() {
    let mut rig = Rig::new(1);
    rig.superblock(0, true);
    rig.commit(0, IN_USE, &content(1));
    let at = rig.home_at(0, IN_USE);
    assert_eq!(rig.request(RequestKind::Write, at, &mut content(1)), 0, "absorbed");
    rig.superblock(0, true);
    rig.holds = Box::new(move |operation| operation.operation == Operation::Write && operation.offset == at);
    rig.request(RequestKind::Write, at, &mut content(2));
    rig.request(RequestKind::Write, at, &mut content(3));
    rig.holds = Box::new(|_| false);
    let first = rig.held.remove(0);
    rig.end(first);
    assert!(rig.recovered_block(IN_USE) == content(2), "what was acknowledged is taken back");
    rig.end_held();
    assert!(rig.recovered_block(IN_USE) == content(3));
}

/// A kernel turns something on that only it can replay. Its own place does not have what is live, so it is refused; with nothing live the
/// log goes on there.
#[test]
fn a_feature_that_appears_in_an_open_log_is_never_replayed_wrongly() {
    for incompat in [jbd2::Features::FAST_COMMIT, 1 << 20] {
        let mut rig = Rig::new(1);
        let log_at = rig.file_systems[0].log_at[0];
        let with = |rig: &Rig| {
            let of = &rig.file_systems[0];
            let mut block = of.superblock.clone();
            let known = u32::from_be_bytes(block[0x28..0x2c].try_into().expect("four bytes"));
            block[0x28..0x2c].copy_from_slice(&(known | incompat).to_be_bytes());
            let (start, sequence) = (of.builder.position, of.builder.sequence);
            SuperblockEdit::new(&mut block).expect("a superblock").start(start).sequence(sequence).seal();
            block
        };
        let mut amid = with(&rig);
        rig.superblock(0, true);
        rig.commit(0, IN_USE, &content(1));
        rig.may_fail = true;
        rig.request(RequestKind::Write, log_at, &mut amid);
        assert_eq!(rig.failed.len(), 1, "features {incompat:#x}");
        rig.may_fail = false;
        assert_eq!(rig.commit(0, IN_USE + 1, &content(2)), 0, "the region has the log still");
        assert!(rig.recovered_block(IN_USE) == content(1) && rig.recovered_block(IN_USE + 1) == content(2));
        for n in 0..2 {
            let at = rig.home_at(0, IN_USE + n);
            rig.request(RequestKind::Write, at, &mut content(1 + n as u8));
        }
        let mut behind = with(&rig);
        rig.request(RequestKind::Write, log_at, &mut behind);
        assert!(rig.stored(0, IN_USE) == content(1) && rig.stored(0, IN_USE + 1) == content(2));
        assert!(rig.commit(0, IN_USE, &content(3)) > 2 * BLOCK, "its own place has the log");
    }
}

/// The flush of a mark fails, and storage works again at once, or fails for good: what is left is taken by the next start, and has
/// what it had before, or a mark with a region that owes nothing.
#[test]
fn an_opening_whose_flush_failed_is_no_obstacle_to_the_next_start() {
    for is_for_good in [false, true] {
        let mut storage = None;
        let mut rig = Rig::on(
            1,
            |_| {},
            |image| match TestStorage::new(image) {
                Ok(shown) => storage.insert(shown).image(),
                Err(_) => image.to_owned(),
            },
        );
        let Some(storage) = storage else { return eprintln!("left out: there is no FUSE here") };
        rig.may_fail = true;
        storage.fail_next_flush(is_for_good);
        rig.superblock(0, true);
        assert_eq!(rig.failed.len(), 1, "its guest hears of it");
        assert!(!rig.log(0).is_open());
        // All of it ends, and somebody begins again with what there is.
        let (image, region) = (rig.image.clone(), rig.region.clone());
        let mut options = NvmOptions::new(&region);
        options.region = RegionChoice { index: 0, count: 2 };
        let Rig { journals, route, _directory: directory, .. } = rig;
        drop((route, journals, storage));
        let options = DiskOptions {
            name: "disk".to_owned(),
            path: image,
            placement: PlacementKind::Nvm,
            honour_flush: false,
            read_only: false,
            nvm: Some(Arc::new(NvmDisk::open(options).expect("nobody has the region"))),
            durable_within: None,
            remote: None,
            write_log: None,
        };
        finish_earlier(&options, &[], &mut Vec::new())
            .unwrap_or_else(|error| panic!("for good: {is_for_good}: {error}"));
        let area = AreaDirectory::create(&directory.path().join("vms"), &directory.path().join("registry"));
        let options = JournalsOptions { disks: vec![options], budget_bytes: 1 << 20, tracer: None };
        let memory = VmMemory::new();
        let journals = Journals::new(&memory, area.expect("a directory"), options);
        journals.unwrap_or_else(|error| panic!("for good: {is_for_good}: {error}"));
    }
}

/// Image and regions as a death leaves them now, for whoever comes next.
fn as_left(rig: &Rig) -> (PathBuf, NvmDisk) {
    let [image, region] = [&rig.image, &rig.region].map(|path| {
        let left = path.with_extension("left");
        std::fs::copy(path, &left).expect("copied");
        left
    });
    let mut options = NvmOptions::new(region);
    options.region = RegionChoice { index: 0, count: 2 };
    options.more_regions = vec![RegionChoice { index: 1, count: 2 }];
    (image, NvmDisk::open(options).expect("nobody has them"))
}

/// The second of two regions fails when both have been brought home. What has come home by then is said all the same: who is told of the failure alone would
/// think that nothing was changed.
#[test]
fn what_came_home_from_one_region_is_said_whatever_becomes_of_the_next() {
    let mut rig = Rig::new(2);
    for which in 0..2 {
        rig.superblock(which, true);
        assert_eq!(rig.commit(which, IN_USE, &content(1)), 0, "a region has it");
    }
    let [image, region] = [&rig.image, &rig.region].map(|path| {
        let left = path.with_extension("left");
        std::fs::copy(path, &left).expect("copied");
        left
    });
    let mut options = NvmOptions::new(&region);
    options.region = RegionChoice { index: 0, count: 2 };
    options.more_regions = vec![RegionChoice { index: 1, count: 2 }];
    let hook = Hook::default();
    at_each_fence(&hook, move || {
        let region = std::fs::read(&region)?;
        let (first, second) = region.split_at(region.len() / 2);
        let is_nobodys =
            |region: &[u8]| nvm_journal::Found::read(region).expect("whole").expect("a region").owner.is_none();
        let has_failed = is_nobodys(first) && is_nobodys(second);
        if has_failed { Err(std::io::Error::other("the region has failed")) } else { Ok(()) }
    });
    let options = DiskOptions {
        name: "disk".to_owned(),
        path: image.clone(),
        placement: PlacementKind::Nvm,
        honour_flush: false,
        read_only: false,
        nvm: Some(Arc::new(hooked(options, &hook, &EachStep::default()))),
        durable_within: None,
        remote: None,
        write_log: None,
    };
    let mut brought = Vec::new();
    let error = finish_earlier(&options, &[], &mut brought).expect_err("the second region fails");
    assert!(!error.is_refusal(), "{error}");
    let offset = |one: &Brought| match one {
        Brought::Region(finished) => finished.offset,
        Brought::Server(recovered) => recovered.home_start,
    };
    assert_eq!(brought.iter().map(offset).collect::<Vec<_>>(), [PARTITIONS[0]]);
    // It was nobody's already, and both file systems are whole.
    let mut brought = Vec::new();
    finish_earlier(&options, &[], &mut brought).expect("nothing is owed any more");
    assert!(brought.is_empty(), "{brought:?}");
    let bytes = std::fs::read(&image).expect("read");
    let is_home = |which: usize| bytes[rig.home_at(which, IN_USE) as usize..][..BLOCK as usize] == content(1)[..];
    assert!((0..2).all(is_home));
}

#[test]
fn what_came_home_from_each_region_is_said() {
    let mut rig = Rig::new(2);
    for which in 0..2 {
        rig.superblock(which, true);
        rig.commit(which, IN_USE, &content(1));
    }
    let (image, nvm) = as_left(&rig);
    let disk = Disk::open(&image, Access::Write).expect("an image");
    let mut brought = Vec::new();
    nvm.finish_earlier(&disk, &mut brought).expect("they belong together");
    assert_eq!(brought.iter().map(|finished| finished.offset).collect::<Vec<_>>(), PARTITIONS);
}

/// The region says durably that it is nobody's, and then fails: it is given back, and not used any more.
#[test]
fn a_region_that_fails_when_it_is_nobodys_was_given_back() {
    let mut rig = Rig::new(1);
    rig.superblock(0, true);
    rig.commit(0, IN_USE, &content(1));
    assert_eq!(rig.notes().len(), 1);
    let (region, mut fences) = (rig.region.clone(), 0);
    at_each_fence(&rig.hook, move || {
        let region = std::fs::read(&region)?;
        let found = nvm_journal::Found::read(&region[..region.len() / 2]).expect("whole").expect("a region");
        fences += u32::from(found.owner.is_none());
        if fences == 2 { Err(std::io::Error::other("the region has failed")) } else { Ok(()) }
    });
    rig.superblock(0, false);
    assert!(rig.hook.lock().expect("no panic").is_none(), "it has not failed");
    assert!(!rig.log(0).is_open() && rig.notes().is_empty(), "nobody goes on with it");
    // What is mounted next is told nothing of it.
    rig.superblock(0, true);
    assert!(rig.commit(0, IN_USE, &content(2)) > 0, "its own place has it");
    assert!(rig.replayed(0) == [(IN_USE, content(2))].into());
}

/// What the guest saw at home of a file system that is gone, and flushed, is nowhere else when its region is nobody's.
#[test]
fn what_the_guest_saw_is_durable_before_the_region_of_a_file_system_that_is_gone_is_nobodys() {
    let mut rig = Rig::new(1);
    rig.superblock(0, true);
    rig.commit(0, IN_USE, &content(1));
    let (start, at, log_at) = (rig.file_systems[0].start, rig.home_at(0, IN_USE), rig.file_systems[0].log_at[0]);
    assert_eq!(rig.request(RequestKind::Write, at, &mut content(1)), 0, "absorbed");
    // Storage has no mark either that would have to be given up, durably.
    rig.file.write_all_at(&[0; BLOCK as usize], log_at).expect("written");
    write_log::simulated_flushes::die_before(1);
    let wiped = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        rig.request(RequestKind::Write, start, &mut vec![0; BLOCK as usize]);
    }));
    write_log::simulated_flushes::die_before(0);
    assert!(wiped.is_err(), "nothing was flushed");
    let region = std::fs::read(&rig.region).expect("read");
    let found = nvm_journal::Found::read(&region[..region.len() / 2]).expect("whole").expect("a region");
    assert!(found.owner.is_some() && rig.stored(0, IN_USE) == content(1), "it is on its way");
}
