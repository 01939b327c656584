//! A guest whose blocks are not where the books say, and guests that only look so.

use super::*;

impl Rig {
    fn fault(&self) -> Option<String> {
        self.report().disks[0].fault.clone()
    }

    fn stored_block(&self, position: u32) -> Vec<u8> {
        self.home(self.log_at[position as usize] / BLOCK)
    }

    /// The tail moves to where the next transaction will begin.
    fn all_is_home(&mut self) {
        assert_eq!(self.write_superblock(self.builder.position, self.builder.sequence), STATUS_OK);
    }

    /// A kernel reads the log from its superblock on, as for a replay, and begins anew elsewhere; it leaves out a number.
    fn reads_and_goes_on(&mut self, blocks: u32) {
        self.disk.read(self.log_at[0], BLOCK as usize).expect("read");
        self.builder.position += blocks;
        self.builder.sequence += 1;
    }

    fn write_home(&mut self, block: u64, content: &[u8]) {
        let page = self.page(content);
        assert_eq!(self.write_pages(block * BLOCK, &[page]), STATUS_OK);
    }

    /// The log is on storage, as the guest has it, and nothing of it was written home.
    #[track_caller]
    fn assert_left_to_the_guest(&mut self, says: &str, homes: &[u64]) {
        let fault = self.fault().expect("a fault is reported");
        assert!(fault.contains(says) && fault.contains("is left to the guest"), "{fault}");
        assert_eq!(self.report().disks[0].placement, "storage");
        let before: Vec<Vec<u8>> = homes.iter().map(|block| self.home(*block)).collect();
        // What it commits now goes to storage as it is.
        let position = self.builder.position;
        self.commit(&[(self.free_block + 900, content(200))]);
        assert!(jbd2::peek(&self.stored_block(position)).is_some(), "a descriptor is where the guest wrote it");
        assert!(self.stored_block(position + 1) == content(200));
        // Any request is served, whole blocks or not.
        let page = self.page(&content(201));
        let at = self.log_at[900] / 512 + 1;
        assert_eq!(self.disk.request(at, &Transfer::Write(vec![(page, 512)])).expect("answered"), STATUS_OK);
        self.die_and_recover();
        let report = self.report();
        assert_eq!(report.disks[0].recovery.status, recovery::Status::Materialised);
        for (block, content) in homes.iter().zip(before) {
            assert!(self.home(*block) == content, "block {block} was written");
        }
        assert!(!self.stored_superblock().is_empty(), "the log is live");
    }

    /// Whoever looks at the image, to recover it, say, is told.
    #[track_caller]
    fn assert_owed_to_the_guest(&self) {
        let owed = placement::owed(&self.image, None).expect("looked at").sentence(&self.image);
        assert!(owed.as_deref().is_some_and(|owed| owed.contains("only the guest's own kernel")), "{owed:?}");
    }

    /// Another amberlog serves the image.
    fn next_run(self, placement: PlacementKind) -> Self {
        let Rig { directory, image, journals, device, disk, .. } = self;
        drop((journals, device, disk));
        std::fs::remove_dir_all(directory.path().join("vms")).expect("removed");
        Self::attach(directory, image, placement, true)
    }
}

#[test]
fn a_tail_that_passes_what_was_never_written_home() {
    let mut rig = Rig::new(PlacementKind::Retain, true);
    let first = rig.free_block;
    let homes: Vec<u64> = (first..first + 5).collect();
    rig.open();
    rig.commit(&homes.iter().map(|block| (*block, content(*block as u8))).collect::<Vec<_>>());
    // What it has replayed, if it has, it wrote elsewhere.
    rig.reads_and_goes_on(40);
    let start = rig.builder.position;
    rig.all_is_home();
    assert_eq!(rig.stored_superblock().start, start);
    rig.assert_left_to_the_guest("past 5 committed blocks that were never written home", &homes);
}

#[test]
fn a_tag_outside_the_file_system_and_one_inside_the_log() {
    for inside in [false, true] {
        let mut rig = Rig::new(PlacementKind::Copy, true);
        let first = rig.free_block;
        rig.open();
        let start = rig.builder.position;
        rig.commit(&[(first, content(1))]);
        rig.commit(&[(first, content(2)), (first + 1, content(3))]);
        assert_eq!(rig.fault(), None);
        let (outside, says) = if inside {
            (rig.log_at[5] / BLOCK, "the journal's own")
        } else {
            (u64::from(u32::MAX) - 1, "beyond the end of the file system")
        };
        rig.commit(&[(outside, content(4)), (first + 2, content(5))]);
        // All of it is there, from its beginning, block for block; but for the version that a newer one supersedes.
        assert_eq!(rig.stored_superblock().start, start);
        for (position, expected) in [(4, content(2)), (5, content(3)), (8, content(4)), (9, content(5))] {
            assert!(rig.stored_block(start + position) == expected, "log block {position}");
        }
        rig.assert_left_to_the_guest(says, &[first, first + 1, first + 2]);
    }
}

#[test]
fn committed_blocks_that_are_written_home_to_other_places() {
    let mut rig = Rig::new(PlacementKind::Retain, true);
    let first = rig.free_block;
    rig.open();
    let pages = rig.commit(&(0..6).map(|index| (first + index, content(index as u8))).collect::<Vec<_>>());
    let cut = (rig.builder.position, rig.builder.sequence);
    // The second transaction stays: one block of it is home, one is superseded by the third.
    let kept = rig.commit(&[(first + 10, content(10)), (first + 11, content(11)), (first + 12, content(12))]);
    rig.commit(&[(first + 11, content(13))]);
    assert_eq!(rig.write_pages((first + 10) * BLOCK, &kept[..1]), STATUS_OK);
    // From the very pages, in one piece, to a place that is 500 blocks off.
    assert_eq!(rig.write_pages((first + 500) * BLOCK, &pages), STATUS_OK);
    assert_eq!(rig.fault(), None, "a guest may write any content anywhere");
    assert_eq!(rig.write_superblock(cut.0, cut.1), STATUS_OK);
    assert_eq!(rig.stored_superblock().start, cut.0);
    // What is on storage now is a journal that any kernel can replay.
    let copy = rig.directory.path().join("copy");
    std::fs::copy(&rig.image, &copy).expect("copied");
    let flag =
        Command::new("debugfs").args(["-w", "-R", "feature needs_recovery"]).arg(&copy).output().expect("debugfs");
    assert!(flag.status.success());
    let replayed = Command::new("e2fsck").args(["-y", "-E", "journal_only"]).arg(&copy).output().expect("e2fsck");
    let bytes = std::fs::read(&copy).expect("the copy");
    let home = |block: u64| bytes[(block * BLOCK) as usize..][..BLOCK as usize].to_vec();
    for (block, seed) in [(10, 10), (11, 13), (12, 12)] {
        assert!(home(first + block) == content(seed), "block {block}: {}", String::from_utf8_lossy(&replayed.stdout));
    }
    let homes: Vec<u64> = (first..first + 13).collect();
    rig.assert_left_to_the_guest("never written home, but to other blocks", &homes);
}

#[test]
fn it_stays_so_through_mounts_resets_and_wishes() {
    let mut rig = Rig::new(PlacementKind::Retain, true);
    let first = rig.free_block;
    rig.open();
    rig.commit(&[(u64::from(u32::MAX) - 1, content(1))]);
    assert!(rig.fault().is_some());
    // Unmounted and mounted again.
    assert_eq!(rig.write_superblock(0, rig.builder.sequence), STATUS_OK);
    rig.open();
    rig.commit(&[(first, content(2))]);
    let log = rig.journals.logs()[0].index();
    let refused = rig.journals.change_placement(log, PlacementKind::Retain).expect_err("it is not held again");
    assert!(refused.to_string().contains("not what it seemed"), "{refused}");
    let position = rig.builder.position;
    let mut rig = rig.reset();
    rig.open();
    rig.commit(&[(first + 1, content(3))]);
    assert!(rig.stored_block(position + 1) == content(3));
    rig.assert_left_to_the_guest("beyond the end", &[first, first + 1]);
}

#[test]
fn a_kill_in_the_next_instant_replays_nothing() {
    for dies_with_us in [false, true] {
        let mut rig = Rig::new(PlacementKind::Retain, true);
        let first = rig.free_block;
        rig.open();
        rig.commit(&[(first, content(1)), (first + 1, content(2))]);
        // Past the device, which would take the log away at once.
        let log = Arc::clone(&rig.journals.logs()[0]);
        let mut block = rig.superblock.clone();
        rig.disk.read(rig.log_at[0], BLOCK as usize).expect("read");
        let start = rig.builder.position + 40;
        let sequence = rig.builder.sequence + 1;
        jbd2::SuperblockEdit::new(&mut block).expect("a superblock").start(start).sequence(sequence).seal();
        rig.journals.area.superblock_written(log.id, &block).expect("held");
        assert!(rig.journals.area.contradiction(log.id).is_some());
        assert_eq!(rig.journals.area.owed(log.id).blocks, 0, "nothing is to be written home any more");
        if dies_with_us {
            let directory = rig.left_behind();
            let finished = finish_directory(&directory, std::slice::from_ref(&rig.image))
                .and_then(Finish::into_result)
                .expect("finished");
            assert_eq!(finished[0].recovery.status, recovery::Status::Materialised);
            assert!(
                finish_directory(&directory, std::slice::from_ref(&rig.image))
                    .expect("nothing left")
                    .finished
                    .is_empty(),
                "once is enough"
            );
        } else {
            rig.die_and_recover();
            assert_eq!(rig.report().disks[0].recovery.status, recovery::Status::Materialised);
            assert!(rig.fault().is_some());
        }
        rig.assert_owed_to_the_guest();
        assert_eq!(rig.stored_superblock().start, start);
        assert!(rig.home(first) != content(1) && rig.home(first + 1) != content(2), "nothing was written home");
        assert!(rig.stored_block(rig.builder.position - 2) == content(2), "the log was, block for block");
    }
}

#[test]
fn guests_that_only_look_so() {
    let mut rig = Rig::new(PlacementKind::Retain, true);
    let first = rig.free_block;
    rig.open();
    // A kernel replays what it finds and goes on elsewhere; e2fsck mends a block first.
    let blocks: Vec<(u64, Vec<u8>)> = (0..6).map(|index| (first + index, content(index as u8))).collect();
    rig.commit(&blocks);
    for (block, content) in &blocks[..5] {
        rig.write_home(*block, content);
    }
    rig.write_home(first + 5, &content(99));
    rig.reads_and_goes_on(100);
    rig.all_is_home();
    // Blocks that were freed are let go without a word, in `data=journal` mode.
    rig.commit(&blocks);
    rig.all_is_home();
    // Contents are written anywhere, and home too.
    rig.commit(&blocks);
    for (block, content) in &blocks {
        rig.write_home(*block + 300, content);
        rig.write_home(*block, content);
    }
    rig.all_is_home();
    // What says nothing is everywhere.
    let zeros: Vec<(u64, Vec<u8>)> = (0..6).map(|index| (first + index, vec![0; BLOCK as usize])).collect();
    rig.commit(&zeros);
    for (block, content) in &zeros {
        rig.write_home(*block + 300, content);
    }
    rig.all_is_home();
    // A discard is as good as a home write.
    rig.commit(&blocks);
    let discard = Transfer::Discard(vec![(first * BLOCK / 512, 6 * BLOCK as u32 / 512, 0)]);
    assert_eq!(rig.disk.request(0, &discard).expect("answered"), STATUS_OK);
    rig.reads_and_goes_on(100);
    rig.all_is_home();
    assert_eq!(rig.fault(), None);
    assert_eq!(rig.report().disks[0].placement, "retain");
    rig.commit(&[(first, content(50))]);
    rig.die_and_recover();
    assert!(rig.home(first) == content(50));
    assert_eq!(rig.fault(), None);
}

/// The next run knows that the journal is not what it seems, whatever placement it is given, and so does whoever looks at the image;
/// until the file system gets a new journal.
#[test]
fn the_next_run_remembers() {
    let mut rig = Rig::new(PlacementKind::Retain, true);
    let first = rig.free_block;
    rig.open();
    rig.commit(&[(u64::from(u32::MAX) - 1, content(1))]);
    assert!(rig.fault().is_some());
    rig.commit(&[(first, content(2))]);
    let (position, sequence) = (rig.builder.position, rig.builder.sequence);
    rig.die_and_recover();
    let placements = [PlacementKind::Retain, PlacementKind::Storage, PlacementKind::Copy];
    for (round, placement) in placements.into_iter().enumerate() {
        rig = rig.next_run(placement);
        (rig.builder.position, rig.builder.sequence) = (position + 10 * round as u32, sequence + round as u32);
        let block = first + 20 + round as u64;
        rig.open();
        let at = rig.builder.position;
        rig.commit(&[(block, content(3))]);
        assert_eq!(rig.report().disks[0].placement, "storage");
        assert_eq!(rig.fault().is_some(), placement != PlacementKind::Storage, "{placement:?}");
        assert!(rig.stored_block(at + 1) == content(3), "its log is on storage");
        rig.die_and_recover();
        assert!(rig.home(block) != content(3), "{placement:?}: nobody here replays it");
        rig.assert_owed_to_the_guest();
    }
    make_image(&rig.image, &[]);
    rig = rig.next_run(PlacementKind::Retain);
    rig.open();
    rig.commit(&[(first, content(4))]);
    assert_eq!((rig.report().disks[0].placement, rig.fault()), ("retain", None));
    rig.die_and_recover();
    assert!(rig.home(first) == content(4));
}

/// It is for good: the guest unmounts and mounts again under the same amberlog, and its journal stays on storage.
#[test]
fn it_stays_on_storage_when_the_guest_mounts_again() {
    let mut rig = Rig::new(PlacementKind::Retain, true);
    rig.open();
    rig.commit(&[(u64::from(u32::MAX) - 1, content(1))]);
    assert!(rig.fault().is_some());
    for round in 0..3 {
        rig.commit(&[(rig.free_block + round, content(2))]);
        assert_eq!(rig.write_superblock(0, rig.builder.sequence), STATUS_OK, "unmounted");
        rig.builder.sequence += 1;
        rig.open();
        let at = rig.builder.position;
        rig.commit(&[(rig.free_block + 10 + round, content(3))]);
        assert_eq!(rig.report().disks[0].placement, "storage");
        assert!(rig.stored_block(at + 1) == content(3), "its log is on storage");
    }
}
