//! The server is lost, and all processes of the host are killed: the copy in the VM's directory has what the guest was told.

use super::guest::Guest;
use super::world::BLOCK;
use super::{CAUSES, begins};
use crate::copies::finish_copies;
use crate::description::{AreaDirectory, WishDescription};
use crate::finished::Finish;
use crate::remote::lineage::Lineage;
use crate::remote::{MirrorFile, Phase};
use own_files::How;
use recovery::Status;
use std::ffi::OsStr;
use std::io::Write;
use std::path::PathBuf;

const COPY: &str = "log-0.copy";

/// What is left of a VM.
struct Left {
    base: tempfile::TempDir,
    image: PathBuf,
    directory: AreaDirectory,
    /// What is on storage.
    before: Vec<u8>,
}

impl Left {
    /// All of the guest's processes are killed.
    fn of(guest: &Guest) -> Self {
        guest.life.kill();
        let base = tempfile::tempdir_in("/dev/shm").expect("tmpfs");
        let image = base.path().join("image");
        let before = guest.world.image_now();
        std::fs::write(&image, &before).expect("written");
        let directory = AreaDirectory::create(&base.path().join("vms"), &base.path().join("registry")).expect("made");
        directory.register(&image).expect("registered");
        let bytes = std::fs::read(guest.world.copy_path(guest.workers)).expect("a copy");
        let mut copy = directory.directory().file(OsStr::new(COPY), How::MakeNew).expect("made");
        copy.write_all(&bytes).expect("written");
        let wish = WishDescription {
            place: guest.world.place.clone(),
            placement: "remote".to_owned(),
            is_distrusted: false,
            storage_from: None,
            copy: Some(COPY.to_owned()),
            may_go_on_unannounced: false,
        };
        directory.describe(&[], Vec::new(), vec![wish]).expect("described");
        Left { base, image, directory, before }
    }

    fn finish(&self) -> Finish {
        finish_copies(&self.directory, &[]).expect("it can be read")
    }

    fn now(&self) -> Vec<u8> {
        std::fs::read(&self.image).expect("the image")
    }

    fn say(&self, phase: Phase, place: &crate::scan::FoundLogPlace) {
        let file = self.directory.directory().file(OsStr::new(COPY), How::Write).expect("it is there");
        MirrorFile::take_up(file, place).expect("it says something").say(|said| said.phase = phase);
    }
}

/// On the server, in the midst of a transaction, and after whatever has sent the log elsewhere.
#[test]
fn what_the_guest_was_told_goes_home_from_the_copy() {
    for seed in 0..12 {
        // Those that are not taken from the server are to be on it.
        let make = if seed < 5 { Guest::patient } else { Guest::new };
        let mut guest = make(2400 + seed, 0);
        guest.wait_until_remote(true);
        for _ in 0..4 {
            guest.commit();
        }
        guest.write_some_home();
        if seed % 3 == 1 {
            guest.pass(2);
        }
        if let Some(cause) = (seed as usize).checked_sub(5).and_then(|index| CAUSES.get(index)) {
            begins(&guest, *cause);
        }
        guest.begin_commit();
        let left = Left::of(&guest);
        guest.world.stop_server();
        let outcome = left.finish();
        assert!(outcome.failed.is_empty(), "seed {seed}: {:?}", outcome.failed);
        if let [log] = &outcome.finished[..] {
            assert_eq!((&log.image, log.offset), (&left.image, 0));
            assert!(log.recovery.status == Status::Recovered && log.recovery.transactions > 0, "{:?}", log.recovery);
            assert_eq!(guest.world.fault(&left.now(), &left.before), None, "seed {seed}");
        } else {
            // All of it was on storage again.
            assert!(outcome.finished.is_empty() && seed > 4 && left.now() == left.before, "seed {seed}");
        }
        assert!(left.finish().finished.is_empty(), "once is enough");
        crate::remove_finished(&left.directory);
        assert!(!left.directory.path().exists(), "nothing is owed any more");
        drop(left.base);
    }
}

/// Storage had failed while the server was lost: the copy says so, and is tried once more.
#[test]
fn a_copy_of_a_log_that_had_failed_goes_home() {
    let mut guest = Guest::patient(2500, 0);
    guest.wait_until_remote(true);
    guest.commit();
    let left = Left::of(&guest);
    left.say(Phase::Failed, &guest.world.place);
    assert_eq!(left.finish().finished.len(), 1);
    assert_eq!(guest.world.fault(&left.now(), &left.before), None);
}

/// Somebody was about to recover the log from its server, and was killed when he had claimed it; then the server is lost.
#[test]
fn a_copy_of_a_log_that_was_claimed_goes_home() {
    let mut guest = Guest::patient(2505, 0);
    guest.wait_until_remote(true);
    guest.commit();
    let left = Left::of(&guest);
    let place = &guest.world.place;
    let at = crate::scan::offset_of(&place.runs, place.block_bytes, 0).expect("a place") as usize;
    let lineage = Lineage::read(&left.before[at..at + BLOCK]).expect("it has one");
    let with = |lineage: Lineage| {
        let mut image = left.before.clone();
        lineage.write_into(&mut image[at..at + BLOCK]);
        std::fs::write(&left.image, &image).expect("written");
        image
    };
    // Of another moment, it is another's.
    let another = with(Lineage { claim: [7; 16], count: lineage.count + 1, ..lineage });
    let outcome = left.finish();
    assert!(outcome.finished.is_empty() && outcome.failed.is_empty() && left.now() == another, "{outcome:?}");
    with(Lineage { claim: [7; 16], ..lineage });
    let outcome = left.finish();
    assert!(outcome.finished.len() == 1 && outcome.failed.is_empty(), "{outcome:?}");
    assert_eq!(guest.world.fault(&left.now(), &left.before), None);
    crate::remove_finished(&left.directory);
    assert!(!left.directory.path().exists(), "nothing is owed any more");
}

#[test]
fn a_copy_that_lacks_something_or_is_not_the_images_is_not_brought_home() {
    let mut guest = Guest::patient(2501, 0);
    guest.wait_until_remote(true);
    guest.commit();
    let left = Left::of(&guest);
    let place = &guest.world.place;
    // Somebody else has the log: storage says something else.
    let at = crate::scan::offset_of(&place.runs, place.block_bytes, 0).expect("a place") as usize;
    let mut taken = left.before.clone();
    taken[at + 0x300] ^= 1;
    std::fs::write(&left.image, &taken).expect("written");
    let outcome = left.finish();
    assert!(outcome.finished.is_empty() && outcome.failed.is_empty() && left.now() == taken);
    // Another file has its name.
    let other = left.image.with_file_name("other");
    std::fs::write(&other, &left.before).expect("written");
    std::fs::rename(&other, &left.image).expect("renamed");
    let outcome = left.finish();
    assert!(outcome.finished.is_empty() && left.now() == left.before);
    let [failed] = &outcome.failed[..] else { panic!("it is not passed over: {outcome:?}") };
    let why = failed.error.to_string();
    assert!(failed.error.is_refusal() && why.contains("--from-copy --image") && why.contains("image"), "{why}");
    // Somebody says that it is the one.
    let outcome = finish_copies(&left.directory, std::slice::from_ref(&left.image)).expect("it can be read");
    assert!(outcome.finished.len() == 1 && outcome.failed.is_empty(), "{outcome:?}");
    assert_eq!(guest.world.fault(&left.now(), &left.before), None);
    let left = Left::of(&guest);
    left.say(Phase::Lost, place);
    let outcome = left.finish();
    // It says of itself that it is no copy of all.
    assert!(outcome.finished.is_empty() && outcome.failed.is_empty() && left.now() == left.before);
}

/// Somebody begins with the image, and is refused, or killed before he has got anywhere: his directory is in the list then, and nothing in it.
#[test]
fn a_start_that_was_refused_takes_nobodys_copy_away() {
    for (seed, is_killed) in [(2502, false), (2503, true)] {
        let mut guest = Guest::patient(seed, 0);
        guest.wait_until_remote(true);
        guest.commit();
        let left = Left::of(&guest);
        let (vms, registry) = (left.base.path().join("vms"), left.base.path().join("registry"));
        let refused = AreaDirectory::create(&vms, &registry).expect("made");
        refused.register(&left.image).expect("registered");
        if !is_killed {
            refused.remove();
            assert_eq!(
                AreaDirectory::find(&registry, &left.image).expect("looked").as_deref(),
                Some(left.directory.path())
            );
        }
        let lock = refused.lock_file().try_clone().expect("a descriptor");
        drop(refused);
        let elsewhere = crate::elsewhere(&left.directory).expect("looked");
        assert!(elsewhere.len() == 1 && elsewhere[0].1.contains("--from-copy"), "{elsewhere:?}");
        let outcome = left.finish();
        assert!(outcome.failed.is_empty() && outcome.finished.len() == 1, "{outcome:?}");
        assert_eq!(guest.world.fault(&left.now(), &left.before), None);
        drop(lock);
        crate::sweep(&vms, &registry);
        assert_eq!(
            AreaDirectory::find(&registry, &left.image).expect("looked").as_deref(),
            Some(left.directory.path())
        );
    }
}

/// Whoever can write where the image lies puts a pipe in its place, which nobody writes to.
#[test]
fn a_pipe_in_the_place_of_an_image_is_not_waited_for() {
    let mut guest = Guest::patient(2504, 0);
    guest.wait_until_remote(true);
    guest.commit();
    let left = Left::of(&guest);
    std::fs::remove_file(&left.image).expect("removed");
    rustix::fs::mknodat(rustix::fs::CWD, &left.image, rustix::fs::FileType::Fifo, 0o600.into(), 0).expect("a pipe");
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        // As if it were the file that it was: a number is given to another file again.
        let outcome = finish_copies(&left.directory, std::slice::from_ref(&left.image)).expect("it can be read");
        crate::remove_finished(&left.directory);
        let is_kept = left.directory.path().exists();
        sender.send(outcome.finished.is_empty() && is_kept)
    });
    let is_kept = receiver.recv_timeout(std::time::Duration::from_secs(20));
    assert!(is_kept.expect("it was waited for"), "and nothing is thrown away for it");
}
