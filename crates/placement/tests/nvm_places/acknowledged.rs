//! A transaction that was acknowledged before the flush of its appends (nvm-pipelined).

use super::*;
use nvm_journal::Found;
use std::sync::atomic::{AtomicBool, Ordering};

/// A block that the bitmap says is free.
const FREE: u64 = FILE_SYSTEM_BLOCKS - 10;

/// What the first region has.
fn found(rig: &Rig) -> Found {
    let region = std::fs::read(&rig.region).expect("read");
    Found::read(&region[..region.len() / 2]).expect("whole").expect("a region")
}

/// The flush behind the last transaction has failed, and storage has lost its append. What is given says that all that the worker itself
/// writes fails, and what the image was before that transaction.
fn with_a_lost_transaction() -> (Rig, Arc<AtomicBool>, Vec<u8>) {
    let mut rig = Rig::with(1, |options| (options.pipelined, options.append_home_bytes_min) = (true, 0));
    let is_broken = Arc::new(AtomicBool::new(false));
    let breaks = Arc::clone(&is_broken);
    rig.journals.disk(0).simulate_writes(move || !breaks.load(Ordering::Relaxed));
    rig.superblock(0, true);
    rig.commit(0, IN_USE, &content(1));
    let before = std::fs::read(&rig.image).expect("read");
    rig.fails = Box::new(|operation| operation.operation == Operation::Flush);
    rig.commit_all(0, &[(IN_USE, content(2)), (FREE, content(3))]);
    rig.fails = Box::new(|_| false);
    assert!(found(&rig).prepared.is_some(), "it was acknowledged, and may be lost");
    rig.file.write_all_at(&[0; BLOCK as usize], rig.home_at(0, FREE)).expect("written");
    rig.may_fail = true;
    (rig, is_broken, before)
}

/// A reader that is no mount, as one that looks at what the disk has, costs the guest nothing; nor does a mount.
#[test]
fn who_reads_where_a_log_begins_has_what_was_acknowledged_made_durable() {
    let (mut rig, is_broken, before) = with_a_lost_transaction();
    let at = rig.file_systems[0].log_at[0];
    is_broken.store(true, Ordering::Relaxed);
    rig.request(RequestKind::Read, at, &mut content(0));
    assert_eq!(rig.failed, [RequestId(rig.next_request)], "nobody reads of a log without it");
    assert!(found(&rig).prepared.is_some(), "it may be lost still");
    is_broken.store(false, Ordering::Relaxed);
    rig.request(RequestKind::Read, at, &mut content(0));
    assert_eq!(rig.failed.len(), 1);
    let found = found(&rig);
    assert_eq!((found.prepared, found.sequence), (None, rig.file_systems[0].builder.sequence.wrapping_sub(1)));
    assert!(rig.recovered_block(FREE) == content(3) && rig.recovered_block(IN_USE) == content(2));
    assert!(rig.recovered_beside(&before).is_err(), "an image of before does not have its append");
    // The kernel mounts again, and has replayed its log: it leaves a number out.
    rig.file_systems[0].builder.sequence += 1;
    rig.superblock(0, true);
    rig.commit(0, IN_USE, &content(4));
    assert_eq!(rig.failed.len(), 1, "its log goes on");
    assert!(rig.recovered_block(FREE) == content(3) && rig.recovered_block(IN_USE) == content(4));
}

/// The log is not what it seems: it goes to its own place with what was acknowledged, or stays.
#[test]
fn a_log_does_not_go_to_its_own_place_without_what_was_acknowledged() {
    for breaks in [false, true] {
        let (mut rig, is_broken, _) = with_a_lost_transaction();
        is_broken.store(breaks, Ordering::Relaxed);
        rig.commit(0, FILE_SYSTEM_BLOCKS + 1, &content(5));
        assert!(rig.journals.disk(0).fault().unwrap_or_default().contains("beyond the end"));
        if breaks {
            assert_eq!(rig.log(0).placement, PlacementKind::Nvm);
            assert!(found(&rig).prepared.is_some(), "it may be lost still");
            is_broken.store(false, Ordering::Relaxed);
            // The guest is gone, and storage works.
            rig.start("next").expect("started");
        } else {
            assert_eq!(rig.log(0).placement, PlacementKind::Storage);
        }
        assert!(rig.replayed(0) == [(IN_USE, content(2)), (FREE, content(3))].into(), "{:?}", rig.replayed(0).keys());
        assert!(rig.stored(0, FREE) == content(3));
    }
}
