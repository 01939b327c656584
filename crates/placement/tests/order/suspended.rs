//! A guest that suspends: its device is started anew, and the same kernel goes on with its log.

use super::*;

impl Rig {
    fn reset(&mut self, name: &str) {
        let table = Arc::new(self.map(name));
        self.route.started(Start::Fresh, &table).expect("started");
    }

    /// The blocks of the guest's next transaction, with their positions, as its kernel writes them.
    fn next_transaction(&mut self, blocks: &[(u64, Vec<u8>)]) -> Vec<(u32, Vec<u8>)> {
        let transaction = Transaction { blocks: blocks.to_vec(), ..Transaction::default() };
        let mut log = Vec::new();
        self.builder.transaction(&transaction, &mut |position, block| log.push((position, block.to_vec())));
        log
    }

    fn write_log(&mut self, (position, block): &(u32, Vec<u8>)) {
        let operations = self.write(self.log_at[*position as usize], block);
        assert_eq!(operations.len(), 1, "it goes to its own place");
        self.carry_out(operations);
    }

    fn stored(&self) -> jbd2::Superblock {
        let mut raw = vec![0; jbd2::SUPERBLOCK_BYTES];
        self.file.read_exact_at(&mut raw, self.log_at[0]).expect("read");
        jbd2::Superblock::decode(&raw).expect("a journal")
    }

    /// Another daemon, to which its guest was left.
    fn left_to_another(self) -> Rig {
        let directory = tempfile::tempdir_in("/dev/shm").expect("tmpfs");
        std::fs::copy(&self.image, directory.path().join("image")).expect("copied");
        let mut next = Rig::of(directory, self.log_at.clone(), 64 << 20, PlacementKind::Retain, None);
        (next.builder, next.superblock) = (self.builder.clone(), self.superblock.clone());
        next.journals.adopt().expect("as it was left");
        next
    }

    fn superblock(&self, start: u32, sequence: u32) -> Vec<u8> {
        let mut block = self.superblock.clone();
        jbd2::SuperblockEdit::new(&mut block).expect("a superblock").start(start).sequence(sequence).seal();
        block
    }

    /// What a kernel that mounts the image as it is now finds in a home block: nothing, where it replays nothing.
    fn after_a_mount(&self, block: u64) -> Vec<u8> {
        let copy = self.directory.path().join("copy");
        let bytes = std::fs::read(&self.image).expect("the image");
        let partition = PARTITION as usize..(PARTITION + FILE_SYSTEM_BLOCKS * BLOCK) as usize;
        std::fs::write(&copy, &bytes[partition]).expect("copied");
        let output = Command::new("e2fsck").args(["-E", "journal_only", "-fy"]).arg(&copy).output().expect("e2fsck");
        assert!(output.status.code().is_some_and(|code| code < 4), "{}", String::from_utf8_lossy(&output.stdout));
        let bytes = std::fs::read(&copy).expect("the copy");
        bytes[(block * BLOCK) as usize..][..BLOCK as usize].to_vec()
    }
}

#[test]
fn a_kernel_that_goes_on_after_a_reset_is_believed() {
    for (placement, is_reversed) in [(PlacementKind::Retain, false), (PlacementKind::Copy, true)] {
        let mut rig = Rig::with(64 << 20, placement, None);
        rig.open();
        let opened = (rig.builder.position, rig.builder.sequence);
        rig.commit(&[(3000, content(1))]);
        rig.commit(&[(3000, content(2)), (3001, content(3))]);
        rig.reset("after");
        assert_eq!(rig.home(3000), content(2), "what was committed is home");
        assert!(rig.stored().is_empty());

        let (start, sequence) = (rig.builder.position, rig.builder.sequence);
        let mut blocks = rig.next_transaction(&[(3001, content(4)), (3002, content(5))]);
        let commit = blocks.pop().expect("a commit block");
        if is_reversed {
            blocks.reverse();
        }
        blocks.iter().for_each(|block| rig.write_log(block));
        assert!(rig.stored().is_empty(), "nothing is committed yet");
        let operations = rig.write(rig.log_at[commit.0 as usize], &commit.1);
        assert_eq!((rig.stored().start, rig.stored().sequence), (start, sequence), "before the commit is answered");
        rig.carry_out(operations);
        assert_eq!(rig.after_a_mount(3002), content(5), "{placement:?}");
        let more = rig.next_transaction(&[(3003, content(6))]);
        more.iter().for_each(|block| rig.write_log(block));
        assert_eq!((rig.after_a_mount(3001), rig.after_a_mount(3003)), (content(4), content(6)));

        // Its tail lies where nothing of the log is on storage; a later one does not.
        let block = rig.superblock(opened.0, opened.1);
        assert!(rig.write(rig.log_at[0], &block).is_empty(), "it is kept from storage");
        assert_eq!(rig.stored().sequence, sequence);
        let block = rig.superblock(more[0].0, sequence + 1);
        let operations = rig.write(rig.log_at[0], &block);
        rig.carry_out(operations);
        assert_eq!(rig.stored().start, more[0].0);
        assert_eq!(rig.after_a_mount(3003), content(6));

        // It unmounts, and mounts again: the log is where it was wished.
        for block in [(4, content(4)), (5, content(5))] {
            let operations = rig.write(Rig::home_at(2997 + block.0), &block.1);
            rig.carry_out(operations);
        }
        let operations = rig.write(rig.log_at[0], &rig.superblock(0, rig.builder.sequence));
        rig.carry_out(operations);
        rig.open();
        rig.commit(&[(3004, content(7))]);
        assert_eq!(rig.owed(), 1, "it is held");
    }
}

#[test]
fn a_tail_that_moves_first_after_a_reset_changes_nothing() {
    let mut rig = Rig::new();
    rig.open();
    let opened = (rig.builder.position, rig.builder.sequence);
    rig.commit(&[(3000, content(1))]);
    rig.commit(&[(3001, content(2))]);
    rig.reset("after");
    // The kernel that goes on says where it believes that its log begins.
    let operations = rig.write(rig.log_at[0], &rig.superblock(opened.0, opened.1));
    rig.carry_out(operations);
    let (start, sequence) = (rig.builder.position, rig.builder.sequence);
    let blocks = rig.next_transaction(&[(3002, content(5))]);
    blocks.iter().for_each(|block| rig.write_log(block));
    assert_eq!((rig.stored().start, rig.stored().sequence), (start, sequence));
    assert_eq!(rig.after_a_mount(3002), content(5));
}

#[test]
fn a_commit_without_its_transaction_fails_after_a_reset() {
    let mut rig = Rig::new();
    rig.open();
    rig.commit(&[(3000, content(1))]);
    // The reset came in the midst of it.
    let blocks = rig.next_transaction(&[(3001, content(2)), (3002, content(3))]);
    let (before, after) = blocks.split_at(2);
    for (position, block) in before {
        assert!(rig.write(rig.log_at[*position as usize], block).is_empty(), "the log is held");
    }
    rig.reset("after");
    let (commit, data) = after.split_last().expect("a commit block");
    data.iter().for_each(|block| rig.write_log(block));
    let page = rig.page(&commit.1);
    let plan = rig.plan(RequestKind::Write, rig.log_at[commit.0 as usize], &[page]);
    let failed = |action: &PlanAction| matches!(action, PlanAction::Release(_, Status::IoError));
    assert!(plan.actions.iter().any(failed), "{:?}", plan.actions);
    assert!(rig.stored().is_empty());
}

#[test]
fn whoever_else_writes_there_is_not_believed() {
    let mut rig = Rig::new();
    rig.open();
    rig.commit(&[(3000, content(1))]);
    rig.reset("after");
    let mut copied =
        LogBuilder::new(jbd2::Superblock::parse(&rig.superblock).expect("a journal").1, 1, rig.builder.sequence - 1);
    // An image is copied over the disk, piece by piece: of this number there is one transaction, and another one before it.
    for seed in [2, 3] {
        let transaction = Transaction { blocks: vec![(3001, content(seed))], ..Transaction::default() };
        let mut log = Vec::new();
        copied.transaction(&transaction, &mut |position, block| log.push((position, block.to_vec())));
        log.iter().for_each(|block| rig.write_log(block));
    }
    assert!(rig.stored().is_empty(), "what is copied says itself what it is");

    // A new kernel says first that its log is open.
    let mut rig = Rig::new();
    rig.open();
    rig.commit(&[(3000, content(1))]);
    rig.reset("after");
    // Behind the number that a recovery leaves out, as it finds it.
    (rig.builder.position, rig.builder.sequence) = (1, rig.stored().sequence);
    rig.open();
    rig.commit(&[(3001, content(2))]);
    assert_eq!(rig.owed(), 1, "it is held");
}

/// What a guest writes past its journal is newer for that guest, and older than what a replay brings: the one that goes on has to find it, and a
/// new kernel has to find what it would find on any disk.
#[test]
fn what_was_written_past_the_journal_is_there_for_who_goes_on_and_replayed_for_who_begins() {
    for placement in [PlacementKind::Retain, PlacementKind::Copy] {
        for goes_on in [true, false] {
            let mut rig = Rig::with(64 << 20, placement, None);
            rig.open();
            rig.commit(&[(3000, content(1)), (3001, content(2))]);
            rig.commit(&[(3002, content(3))]);
            let operations = rig.write(Rig::home_at(3000), &content(9));
            rig.carry_out(operations);
            let (tail, sequence) = (rig.builder.position, rig.builder.sequence);
            rig.reset("after");
            assert!(rig.home(3000) == content(9), "{placement:?}: its guest may go on");
            assert!(rig.after_a_mount(3000) == content(1), "{placement:?}: as on any disk");
            assert_eq!((rig.after_a_mount(3001), rig.after_a_mount(3002)), (content(2), content(3)));
            if goes_on {
                let blocks = rig.next_transaction(&[(3001, content(4))]);
                blocks.iter().for_each(|block| rig.write_log(block));
                assert_eq!((rig.home(3000), rig.after_a_mount(3001)), (content(9), content(4)));
                // Its tail moves.
                let operations = rig.write(rig.log_at[0], &rig.superblock(tail, sequence));
                rig.carry_out(operations);
                assert_eq!((rig.stored().start, rig.stored().sequence), (tail, sequence));
                assert_eq!((rig.after_a_mount(3000), rig.after_a_mount(3001)), (content(9), content(4)));
            }
            let operations = rig.write(rig.log_at[0], &rig.superblock(0, rig.builder.sequence));
            rig.carry_out(operations);
            rig.open();
            rig.commit(&[(3004, content(7))]);
            assert_eq!(rig.owed(), 1, "{placement:?}: it is held");
        }
    }
}

/// What its guest commits next is found, too, where its journal was wished to be on storage before it went on.
#[test]
fn a_kernel_that_goes_on_after_a_change_of_placement_is_believed() {
    let mut rig = Rig::new();
    rig.open();
    rig.commit(&[(3000, content(1))]);
    rig.reset("after");
    let index = rig.journals.logs()[0].index();
    assert_eq!(rig.journals.change_placement(index, PlacementKind::Storage).expect("it may"), Change::Done);
    let (start, sequence) = (rig.builder.position, rig.builder.sequence);
    let blocks = rig.next_transaction(&[(3001, content(4))]);
    blocks.iter().for_each(|block| rig.write_log(block));
    assert_eq!((rig.stored().start, rig.stored().sequence), (start, sequence));
    assert!(rig.after_a_mount(3001) == content(4));
}

/// Blocks of its map lie between those of its journal.
fn in_pieces() -> Rig {
    let directory = tempfile::tempdir_in("/dev/shm").expect("tmpfs");
    let image = directory.path().join("image");
    let blocks = FILE_SYSTEM_BLOCKS.to_string();
    run("mke2fs", &["-q", "-F", "-t", "ext3", "-b", "4096", "-J", "size=4"], &image, &[&blocks]);
    let bytes = std::fs::read(&image).expect("the image");
    let found = extfs::discover(&bytes).expect("readable").remove(0);
    let extents = found.journal.extents(&found.superblock);
    let blocks = extents.iter().flat_map(|extent| (0..u64::from(extent.count)).map(|index| extent.physical + index));
    let log_at = blocks.map(|block| block * BLOCK).collect();
    Rig::of(directory, log_at, 64 << 20, PlacementKind::Copy, None)
}

/// Also where what it commits lies in another piece of the disk than the superblock does.
#[test]
fn a_journal_in_pieces_goes_on_on_storage_after_a_reset() {
    let mut rig = in_pieces();
    let log = rig.journals.logs().remove(0);
    let second = log.place().runs.get(1).expect("a second piece").first_position;
    rig.open();
    for seed in 1.. {
        rig.commit(&[(3000, content(seed))]);
        if rig.builder.position >= second {
            break;
        }
    }
    rig.reset("after");
    let change = rig.journals.change_placement(log.index(), PlacementKind::Storage).expect("it may");
    assert_eq!(change, Change::Done);
    let (start, sequence) = (rig.builder.position, rig.builder.sequence);
    let blocks = rig.next_transaction(&[(3001, content(9))]);
    blocks.iter().for_each(|block| rig.write_log(block));
    assert_eq!((rig.stored().start, rig.stored().sequence), (start, sequence), "storage says so");
}

/// Whoever has asked for a log on storage goes on asking while its guest is reset: it is there before he is told so.
#[test]
fn a_log_that_was_wished_on_storage_is_there_after_a_reset() {
    for placement in [PlacementKind::Retain, PlacementKind::Copy] {
        for is_asked_before in [false, true] {
            let mut rig = Rig::with(64 << 20, placement, None);
            rig.open();
            rig.commit(&[(3000, content(1))]);
            let write = rig.write(Rig::home_at(3000), &content(1));
            let index = rig.journals.logs()[0].index();
            let change = rig.journals.change_placement(index, PlacementKind::Storage).expect("it may");
            assert_eq!(change, Change::HandOver);
            if is_asked_before {
                let is_done = rig.route.hand_over(index, &mut Plan::default()).expect("asked");
                assert!(!is_done, "a home write is under way");
            }
            rig.carry_out(write);
            rig.reset("after");
            assert_eq!(rig.home(3000), content(1), "what was committed is home");
            let log = rig.journals.logs().remove(0);
            assert_eq!((log.placement, log.is_open()), (PlacementKind::Storage, false), "{placement:?}");
            assert!(rig.route.hand_over(index, &mut Plan::default()).expect("asked"));
            rig.journals.check_left().expect("nothing of it is here");
            // What the next kernel commits is on storage.
            (rig.builder.position, rig.builder.sequence) = (1, rig.stored().sequence);
            let superblock = superblock_of(&rig);
            let operations = rig.write(rig.log_at[0], &superblock);
            assert_eq!(operations.len(), 1, "storage has its superblock");
            rig.carry_out(operations);
            let blocks = rig.next_transaction(&[(3001, content(2))]);
            blocks.iter().for_each(|block| rig.write_log(block));
            assert_eq!((rig.owed(), rig.stored().start), (0, 1), "{placement:?}");
        }
    }
}

/// The same by another daemon, to which its guest was left.
#[test]
fn a_kernel_that_goes_on_after_it_was_left_is_believed() {
    for is_noted in [true, false] {
        let mut rig = Rig::new();
        rig.open();
        rig.commit(&[(3000, content(1))]);
        rig.reset("after");
        rig.journals.check_left().expect("nothing is here");
        let starts = rig.journals.may_go_on_unannounced(0);
        assert_eq!(starts, [PARTITION]);
        let mut rig = rig.left_to_another();
        if is_noted {
            rig.journals.awaits_unannounced(0, &starts);
        }
        let blocks = rig.next_transaction(&[(3001, content(4))]);
        blocks.iter().for_each(|block| rig.write_log(block));
        assert_eq!(rig.stored().is_empty(), !is_noted);
    }
}

/// A log that was handed over is closed when its device begins anew, and is live in its own place. Whoever wishes it elsewhere before its guest goes
/// on has it there when that has closed it: the guest believes still that it begins where it did, and storage has nothing of that.
#[test]
fn a_wish_after_a_reset_does_not_forget_where_storage_has_the_log_from() {
    for (is_left, to) in [(false, PlacementKind::Retain), (false, PlacementKind::Copy), (true, PlacementKind::Retain)] {
        let mut rig = Rig::new();
        rig.open();
        let earlier = superblock_of(&rig);
        rig.commit(&[(3000, content(1))]);
        let index = rig.journals.logs()[0].index();
        rig.journals.change_placement(index, PlacementKind::Storage).expect("it may");
        assert!(rig.route.hand_over(index, &mut Plan::default()).expect("asked"));
        let from = (rig.builder.position, rig.builder.sequence);
        if is_left {
            rig = rig.left_to_another();
        }
        rig.reset("after");
        let log = rig.journals.logs().remove(0);
        assert_eq!((log.placement, log.is_open()), (PlacementKind::Storage, false));
        let change = rig.journals.change_placement(log.index(), to).expect("it may");
        // Its guest goes on.
        let blocks = rig.next_transaction(&[(3001, content(4))]);
        blocks.iter().for_each(|block| rig.write_log(block));
        assert!(rig.write(rig.log_at[0], &earlier).is_empty(), "{to:?}: what storage has of the log is lost");
        assert_eq!((rig.stored().start, rig.stored().sequence), from);
        assert_eq!(change, Change::AtNextMount);
        // It unmounts, and mounts again.
        let operations = rig.write(rig.log_at[0], &rig.superblock(0, rig.builder.sequence));
        rig.carry_out(operations);
        assert_eq!(rig.journals.logs()[0].placement, to);
        rig.open();
        rig.commit(&[(3004, content(7))]);
        assert_eq!(rig.owed(), 1, "{to:?}: it is held");
    }
}
