//! A log is handed over while the storage that it is on does not answer, or while the host writes home.

use super::*;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::time::Duration;

/// What nobody holds up takes less.
const LIMIT: Duration = Duration::from_secs(20);

/// The thread that hands it over waits for its storage. The other disks of the VM are looked at and changed meanwhile; and what is found of this
/// log then, or wished of it, is not lost when its storage answers.
#[test]
fn storage_that_hangs_in_a_hand_over_holds_up_no_other_disk() {
    // The first write is the mark's, the others are homes and the log.
    for hangs_from in [0, 1] {
        let Rig { directory, image, log_at, .. } = Rig::new();
        let other = directory.path().join("other");
        std::fs::copy(&image, &other).expect("copied");
        let others = std::slice::from_ref(&other);
        let mut rig = Rig::of_disks(directory, others, log_at, 64 << 20, PlacementKind::Retain, None);
        rig.open();
        rig.commit(&[(300, content(1))]);
        let journals = Arc::clone(&rig.journals);
        let on = |disk: usize| journals.logs().into_iter().find(|log| log.home_disk() == disk).expect("it has one");
        let (moves, stays) = (on(1).index(), on(0).index());
        let room = on(1).place().home_blocks;
        assert_eq!(journals.change_placement(moves, PlacementKind::Storage).expect("it may"), Change::HandOver);

        let (begins, has_begun) = channel();
        let (answers, waits) = channel::<()>();
        let (waits, writes) = (Mutex::new(waits), AtomicUsize::new(0));
        journals.disk(1).simulate_writes(move || {
            if writes.fetch_add(1, Ordering::AcqRel) >= hangs_from {
                // Once nobody listens any more it does not matter.
                let _ = begins.send(());
                // Nothing is ever sent: it goes on when the other side is gone.
                let _ = waits.lock().expect("no panic under this lock").recv();
            }
            true
        });
        let (route, file, others) = (&mut rig.route, &rig.file, Arc::clone(&journals));
        let (is_done, seen) = std::thread::scope(|scope| {
            let hands_over = scope.spawn(move || route.hand_over(moves, &mut Plan::default()));
            has_begun.recv().expect("it writes");
            let (says, hears) = channel();
            scope.spawn(move || {
                // There is more room for its file system from now on.
                file.write_all_at(&partition_table(FILE_SYSTEM_BLOCKS + 2000), 0).expect("written");
                others.scan(0).expect("looked at");
                let change = |(log, to)| others.change_placement(log, to).expect("it may");
                let changed = [(stays, PlacementKind::Storage), (moves, PlacementKind::Copy)].map(change);
                // Nobody listens if that took too long.
                let _ = says.send(changed);
            });
            let seen = hears.recv_timeout(LIMIT);
            // Whatever became of that, both end now.
            drop(answers);
            (hands_over.join().expect("it does not panic"), seen)
        });
        let changed = seen.expect("others wait for storage that is not theirs");
        assert_eq!(changed, [Change::Done, Change::AtNextMount], "hangs from write {hangs_from} on");
        assert!(is_done.expect("handed over"));
        let log = on(1);
        assert_eq!((log.placement, log.wanted()), (PlacementKind::Storage, PlacementKind::Copy));
        assert!(log.place().home_blocks > room, "what was found meanwhile is lost");
        assert_eq!(on(0).placement, PlacementKind::Storage);
        assert!(rig.home(300) == content(1));
    }
}

/// A write of the host's that is under way must not land after what the guest writes there past us from then on.
#[test]
fn a_log_is_not_handed_over_while_the_host_writes_home() {
    let mut rig = Rig::new();
    rig.open();
    rig.commit(&[(300, content(1))]);
    rig.journals.logs()[0].begin_emptying();
    let writes = rig.woken();
    assert_eq!(writes.len(), 1, "what is owed goes home");
    let index = rig.journals.logs()[0].index();
    assert_eq!(rig.journals.change_placement(index, PlacementKind::Storage).expect("it may"), Change::HandOver);
    assert!(!rig.route.hand_over(index, &mut Plan::default()).expect("asked"));
    rig.carry_out(writes);
    assert!(rig.route.hand_over(index, &mut Plan::default()).expect("asked"));
    assert_eq!(rig.journals.logs()[0].placement, PlacementKind::Storage);
    assert!(rig.home(300) == content(1));
}

/// A guest was left whose journal would be shipped from its next mount on: the copy that this process has made ready for it is not needed.
#[test]
fn a_guest_that_was_left_needs_no_copy_of_its_journal() {
    let mut rig = Rig::new();
    rig.open();
    rig.commit(&[(300, content(1))]);
    let index = rig.journals.logs()[0].index();
    rig.journals.change_placement(index, PlacementKind::Storage).expect("it may");
    assert!(rig.route.hand_over(index, &mut Plan::default()).expect("asked"));
    rig.journals.flush_images().expect("flushed");
    let client = remote_journal::ClientOptions {
        address: "127.0.0.1:9".to_owned(),
        security: remote_journal::ClientSecurity::default(),
        timeout: std::time::Duration::from_secs(1),
    };
    let remote = RemoteOptions { client, name: "disk".to_owned() };
    let directory = tempfile::tempdir_in("/dev/shm").expect("tmpfs");
    std::fs::copy(&rig.image, directory.path().join("image")).expect("copied");
    let next = Rig::of(directory, rig.log_at.clone(), 64 << 20, PlacementKind::Remote, Some(remote));
    let copies = || {
        let files = std::fs::read_dir(next.journals.directory().path()).expect("its directory").flatten();
        files.filter(|file| file.file_name().to_string_lossy().ends_with(".copy")).count()
    };
    let held = || next.journals.area.memory().held_bytes;
    let before = held();
    assert_eq!(copies(), 1);
    next.journals.adopt().expect("as it was left");
    let log = next.journals.logs().remove(0);
    assert!(log.is_open() && log.placement == PlacementKind::Storage, "{log:?}");
    assert_eq!(copies(), 0, "nobody would ever remove it");
    assert!(held() + next.log_at.len() as u64 * BLOCK <= before, "its memory is set aside for ever");
}
