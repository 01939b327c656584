//! A log that leaves its region while its guest runs, and what is done to it meanwhile.

use super::*;

/// A log that shall leave, whose operations `holds` picks are awaited; it is taken on until one of them is.
fn leaves(rig: &mut Rig, holds: impl Fn(&DiskOperation) -> bool + 'static) {
    let index = rig.log(0).index();
    rig.journals.change_placement(index, PlacementKind::Storage).expect("it may");
    rig.holds = Box::new(holds);
    for _ in 0..10 {
        if rig.held.is_empty() {
            assert!(!rig.leave(0).expect("it is on its way"));
        }
    }
    assert_eq!(rig.held.len(), 1, "it waits for that");
}

fn has_left(rig: &mut Rig) {
    rig.end_held();
    for _ in 0..10 {
        rig.leave(0).expect("it leaves");
    }
    assert!(rig.log(0).placement == PlacementKind::Storage, "it has left");
}

/// Blocks leave the region as soon as they are at home, by a checkpoint's hand or by the guest's own. A copy of the disk that was made
/// before that does not have them, and is not taken for the disk that the region belongs to.
#[test]
fn an_image_of_before_is_told_from_the_one_that_a_leaving_log_went_home_to() {
    for by_guest in [false, true] {
        let mut rig = Rig::with(1, |options| options.mark_age = Duration::ZERO);
        rig.superblock(0, true);
        rig.commit(0, IN_USE, &content(1));
        let before = std::fs::read(&rig.image).expect("the image");
        if by_guest {
            let at = rig.home_at(0, IN_USE);
            rig.request(RequestKind::Write, at, &mut content(2));
        }
        let recovered = rig.recovered_beside(&before).expect("nothing has left the region");
        assert!(recovered[rig.home_at(0, IN_USE) as usize..][..BLOCK as usize] == content(1)[..]);
        let superblock = rig.file_systems[0].log_at[0];
        leaves(&mut rig, move |operation| operation.operation == Operation::Write && operation.offset == superblock);
        assert!(rig.stored(0, IN_USE) == content(1 + u8::from(by_guest)), "it is at home");
        match rig.recovered_beside(&before) {
            Err(recovery::Error::Refused(why)) => assert!(why.contains("this image is an older copy"), "{why}"),
            other => {
                panic!("by its guest: {by_guest}: what was committed is lost: {:?}", other.map(|image| image.len()))
            }
        }
        assert!(rig.recovered_block(IN_USE) == content(1 + u8::from(by_guest)));
        has_left(&mut rig);
    }
}

/// A log block that comes once more, with another content, is in its place when that is answered, however far the log is on its way there.
#[test]
fn a_log_block_that_comes_again_while_its_log_leaves_is_in_its_place() {
    let mut rig = Rig::new(1);
    rig.superblock(0, true);
    rig.commit(0, IN_USE, &content(1));
    // A transaction that is not complete.
    let of = &rig.file_systems[0];
    let [first, second] = [0, 1].map(|further| of.log_at[of.builder.position as usize + further]);
    for at in [first, second] {
        rig.request(RequestKind::Write, at, &mut content(2));
    }
    let superblock = rig.file_systems[0].log_at[0];
    leaves(&mut rig, move |operation| operation.operation == Operation::Write && operation.offset == superblock);
    rig.request(RequestKind::Write, first, &mut content(3));
    has_left(&mut rig);
    for (at, expected) in [(first, content(3)), (second, content(2))] {
        let mut stored = content(0);
        rig.file.read_exact_at(&mut stored, at).expect("read");
        assert!(stored == expected, "log block at byte {at}: what was written last is lost");
    }
}

/// Its device begins anew after it has left, and then somebody wishes it elsewhere. Its guest, if it was suspended, believes still that it begins
/// where it did, and its own place has nothing of that.
#[test]
fn a_wish_after_a_reset_does_not_forget_where_storage_has_the_log_from() {
    for to in [PlacementKind::Nvm, PlacementKind::Retain] {
        let mut rig = Rig::new(1);
        rig.superblock(0, true);
        let of = &rig.file_systems[0];
        let (mut earlier, at) = (of.superblock.clone(), of.log_at[0]);
        let (start, sequence) = (of.builder.position, of.builder.sequence);
        SuperblockEdit::new(&mut earlier).expect("a superblock").start(start).sequence(sequence).seal();
        rig.commit(0, IN_USE, &content(1));
        rig.change(0, PlacementKind::Storage);
        rig.start("after").expect("started");
        assert!(!rig.log(0).is_open());
        let change = rig.change(0, to);
        // Its guest goes on.
        rig.commit(0, IN_USE + 1, &content(2));
        assert_eq!(rig.request(RequestKind::Write, at, &mut earlier), 0, "{to:?}: it is kept from storage");
        assert!(rig.replayed(0) == [(IN_USE + 1, content(2))].into(), "{to:?}: {:?}", rig.replayed(0).keys());
        assert_eq!(change, Change::AtNextMount);
        rig.superblock(0, false);
        assert_eq!(rig.log(0).placement, to);
    }
}

/// The superblock on storage of a journal that begins there.
fn superblock_at(file: &std::fs::File, at: u64) -> jbd2::Superblock {
    let mut raw = [0; jbd2::SUPERBLOCK_BYTES];
    file.read_exact_at(&mut raw, at).expect("read");
    jbd2::Superblock::decode(&raw).expect("a superblock")
}

/// What becomes of the last flush of a log that leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LastFlush {
    Ends,
    Fails,
    WorkerDies,
}

/// Storage says already that it has the log, and that is being made durable, when its guest closes it. What the guest says is on storage when it is
/// answered, the region is free, and the log lives where it was wished last.
#[test]
fn a_log_that_is_closed_in_the_last_flush_of_its_leaving_is_closed_and_has_left() {
    use LastFlush::{Ends, Fails, WorkerDies};
    for last_flush in [Ends, Fails, WorkerDies] {
        for wish in [PlacementKind::Storage, PlacementKind::Nvm, PlacementKind::Retain] {
            if (last_flush, wish) == (WorkerDies, PlacementKind::Retain) {
                // The worker that follows has other memory here than the guest has.
                continue;
            }
            let mut rig = Rig::new(1);
            rig.superblock(0, true);
            rig.commit(0, IN_USE, &content(1));
            let (file, at) = (rig.file.try_clone().expect("a descriptor"), rig.file_systems[0].log_at[0]);
            let is_last = move |operation: &DiskOperation| {
                operation.operation == Operation::Flush && !superblock_at(&file, at).is_empty()
            };
            leaves(&mut rig, is_last);
            if wish != PlacementKind::Storage {
                let index = rig.log(0).index();
                rig.journals.change_placement(index, wish).expect("it may");
            }
            rig.superblock(0, false);
            assert_eq!(rig.waiting(), 1, "{last_flush:?}: it is answered when storage has it");
            match last_flush {
                Ends => rig.end_held(),
                Fails => {
                    rig.fails = Box::new(|operation| operation.operation == Operation::Flush);
                    rig.end_held();
                    rig.fails = Box::new(|_| false);
                }
                WorkerDies => {
                    rig.held.clear();
                    rig.holds = Box::new(|_| false);
                    rig.die().expect("it goes on");
                    assert!(rig.log(0).is_open(), "its guest asks once more");
                    rig.superblock(0, false);
                }
            }
            assert!(last_flush == WorkerDies || rig.waiting() == 0, "{last_flush:?}, {wish:?}: it waits for ever");
            let (log, found) = (rig.log(0), superblock_at(&rig.file, at));
            assert_eq!((log.placement, log.is_open()), (wish, false), "{last_flush:?}");
            let sequence = rig.file_systems[0].builder.sequence;
            assert_eq!((found.start, found.sequence), (0, sequence), "{last_flush:?}, {wish:?}");
            assert!(rig.stored(0, IN_USE) == content(1), "{last_flush:?}, {wish:?}");
            // The region is the next one's.
            rig.superblock(1, true);
            assert_eq!(rig.commit(1, IN_USE, &content(2)), 0, "{last_flush:?}, {wish:?}: the region is claimed still");
            rig.superblock(1, false);
            rig.superblock(0, true);
            let bytes = rig.commit(0, IN_USE + 1, &content(3));
            assert_eq!(bytes > 0, wish == PlacementKind::Storage, "{last_flush:?}, {wish:?}");
        }
    }
}
