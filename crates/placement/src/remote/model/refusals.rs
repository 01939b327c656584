//! What `recover --remote` refuses: nothing of the image is changed then.

use super::guest::Guest;
use super::network::{Network, Weather};
use super::world::{BLOCK, PATIENCE, TIMEOUT, World, client_options, recover_image};
use crate::remote::state::Outcome;
use crate::remote::{MarkFound, RemoteMark, RemoteOptions};
use crate::stored::{Says, Stored};
use block_route::{RequestId, Status};
use jbd2::SuperblockEdit;
use recovery::Error;
use remote_journal::Server;
use std::path::Path;
use std::time::{Duration, Instant};

/// Bytes of the journal superblock in an image.
fn superblock_at(world: &World) -> usize {
    crate::scan::offset_of(&world.place.runs, world.place.block_bytes, 0).expect("a place") as usize
}

fn mark_of(world: &World, image: &[u8]) -> MarkFound {
    RemoteMark::read(&image[superblock_at(world)..][..BLOCK])
}

/// Recovers `image` from `server` and gives why that is refused.
fn refusal(image: &[u8], path: &Path, options: &RemoteOptions) -> String {
    std::fs::write(path, image).expect("written");
    let result = recover_image(path, options, false, false);
    assert!(std::fs::read(path).expect("read") == image, "{result:?}: the image was changed");
    match result {
        Err(Error::Refused(reason) | Error::Damaged(reason)) => {
            assert!(reason.contains("nothing was changed"), "{reason}");
            reason
        }
        other => panic!("not refused: {other:?}"),
    }
}

/// A guest that has some transactions on the server, and what a crash would leave now.
fn shipped(seed: u64) -> (Guest, Vec<u8>) {
    let mut guest = Guest::patient(seed, 0);
    guest.wait_until_remote(true);
    for _ in 0..6 {
        guest.commit();
    }
    let image = guest.world.image_now();
    assert!(matches!(mark_of(&guest.world, &image), MarkFound::Live(_)));
    (guest, image)
}

#[test]
fn what_is_not_the_images_live_log_is_refused() {
    let directory = tempfile::tempdir_in("/dev/shm").expect("tmpfs");
    let path = directory.path().join("image");
    let (mut guest, image) = shipped(300);
    let world = std::sync::Arc::clone(&guest.world);
    let at = superblock_at(&world);

    // The mark: damaged, of somebody who knew nothing of it, of another log.
    let server = world.serve_copy();
    let options = client_options(server.address(), PATIENCE);
    let with = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut changed = image.clone();
        change(&mut changed);
        changed
    };
    for byte in [0xc0, 0xc8, 0xd3, 0xe1, 0xe7] {
        let reason = refusal(&with(&|image| image[at + byte] ^= 4), &path, &options);
        assert!(reason.contains("damaged mark"), "{reason}");
    }
    let edit = |image: &mut Vec<u8>, sequence: u32, errno: i32| {
        SuperblockEdit::new(&mut image[at..at + BLOCK]).expect("a superblock").sequence(sequence).errno(errno).seal();
    };
    for repaired in [with(&|image| edit(image, 1, -5)), with(&|image| image[at + 0x20..at + 0x24].fill(0))] {
        assert_eq!(mark_of(&world, &repaired), MarkFound::Stale);
        let reason = refusal(&repaired, &path, &options);
        assert!(reason.contains("used or repaired"), "{reason}");
    }
    let MarkFound::Live(mark) = mark_of(&world, &image) else { panic!("no mark") };
    let forged = |mark: RemoteMark| {
        with(&|image| {
            let block = mark.write_into(&image[at..at + BLOCK]).expect("a superblock");
            image[at..at + block.len()].copy_from_slice(&block);
        })
    };
    for (mark, word) in [
        (RemoteMark { epoch: mark.epoch + 1, ..mark }, "the server holds epoch"),
        (RemoteMark { epoch: mark.epoch - 1, ..mark }, "the server holds epoch"),
        (RemoteMark { nonce: [7; 16], ..mark }, "the server holds epoch"),
    ] {
        let reason = refusal(&forged(mark), &path, &options);
        assert!(reason.contains(word), "{reason}");
    }
    let other_name = RemoteOptions { name: "other".to_owned(), ..options.clone() };
    let reason = refusal(&image, &path, &other_name);
    assert!(reason.contains("has no journal other"), "{reason}");
    // Its file system was given another UUID (at byte 1024) while it was mounted: what the mark says is proof enough.
    std::fs::write(&path, with(&|image| image[1024 + 0x68] ^= 1)).expect("written");
    let recovered = recover_image(&path, &options, false, false).expect("it is this image's log");
    assert_eq!(recovered.len(), 1);
    drop(server);

    // A batch that is damaged, and one that is gone.
    for (from, to) in world.damages() {
        let Some(server) = world.serve_damaged(from, to) else { continue };
        std::fs::write(&path, &image).expect("written");
        let options = client_options(server.address(), PATIENCE);
        let result = recover_image(&path, &options, false, false);
        let after = std::fs::read(&path).expect("read");
        match result {
            // What was damaged is not needed.
            Ok(_) => {}
            Err(Error::Refused(reason) | Error::Damaged(reason)) => {
                assert!(after == image && reason.contains("nothing was changed"), "{reason}")
            }
            Err(other) => panic!("{other}"),
        }
    }

    // An older copy of the image: the server has gone on to another epoch.
    guest.world.network.reset();
    guest.commit();
    guest.wait_until_remote(true);
    let server = world.serve_copy();
    let reason = refusal(&image, &path, &client_options(server.address(), PATIENCE));
    assert!(reason.contains("an older copy"), "{reason}");
}

#[test]
fn a_wrong_secret_says_nothing_of_the_log_and_another_tenants_journal_is_not_there() {
    let directory = tempfile::tempdir_in("/dev/shm").expect("tmpfs");
    let path = directory.path().join("image");
    let write = |name: &str, text: &str| {
        let path = directory.path().join(name);
        std::fs::write(&path, text).expect("written");
        path
    };
    let (guest, image) = shipped(301);
    let secrets = write("secrets", "anonymous 0123456789abcdef\nbob abcdefghijklmnop\n");
    let server: Server = guest.world.serve_copy_with(|options| options.secrets = Some(secrets.clone()));
    let as_who = |file: std::path::PathBuf| {
        let mut options = client_options(server.address(), PATIENCE);
        options.client.security.secret = Some(file);
        options
    };
    // Whoever takes a refusal for damage would give a good log up.
    std::fs::write(&path, &image).expect("written");
    let wrong = as_who(write("wrong", "anonymous abcdefghijklmnop"));
    let error = recover_image(&path, &wrong, false, false).expect_err("it is the wrong secret");
    let sentence = error.to_string();
    assert!(!error.is_refusal() && sentence.contains("not proven"), "{sentence}");
    assert!(sentence.contains("nothing was changed") && std::fs::read(&path).expect("read") == image, "{sentence}");
    let reason = refusal(&image, &path, &as_who(write("bob", "bob abcdefghijklmnop")));
    assert!(reason.contains("has no journal"), "{reason}");
    std::fs::write(&path, &image).expect("written");
    let right = as_who(write("right", "anonymous 0123456789abcdef"));
    let recovered = recover_image(&path, &right, false, false).expect("recovered");
    assert_eq!(recovered.len(), 1);
    assert!(recovered[0].report.transactions > 0, "{recovered:?}");
    assert_eq!(mark_of(&guest.world, &std::fs::read(&path).expect("read")), MarkFound::None);
}

/// A network that fails, and a server that stops, say nothing of the log: it is a failure, not a refusal, and can be tried again.
#[test]
fn a_network_that_fails_while_a_log_is_fetched_changes_nothing() {
    let directory = tempfile::tempdir_in("/dev/shm").expect("tmpfs");
    let path = directory.path().join("image");
    let (guest, image) = shipped(303);
    let server = guest.world.serve_copy();
    let network = Network::new();
    network.lead_to(Some(server.address()));
    // Short, so that what is swallowed is soon given up.
    let options = client_options(network.address, TIMEOUT);
    let fails = |what: &str| {
        std::fs::write(&path, &image).expect("written");
        let result = recover_image(&path, &options, false, false);
        assert!(std::fs::read(&path).expect("read") == image, "{what}: the image was changed");
        match result {
            Err(Error::Failed { what, .. }) => assert!(what.contains("try again"), "{what}"),
            other => panic!("{what}: {other:?}"),
        }
    };
    for weather in [Weather::Refuses, Weather::Swallows, Weather::Garbles] {
        network.set(weather);
        fails(&format!("{weather:?}"));
        network.set(Weather::Good);
    }
    // Cut after more and more of it.
    for ms in [5, 15, 25, 35] {
        network.set(Weather::Slow(10));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(ms));
                network.set(Weather::Refuses);
            });
            fails(&format!("after {ms} ms"));
        });
        network.set(Weather::Good);
    }
    server.stop();
    fails("stopped");
    let server = guest.world.serve_copy();
    network.lead_to(Some(server.address()));
    network.set(Weather::Good);
    let options = client_options(network.address, PATIENCE);
    let recovered = recover_image(&path, &options, false, false).expect("recovered");
    assert!(recovered[0].report.transactions > 0, "{recovered:?}");
}

/// A copy of an idle guest's disk cannot be told from it: a start of one waits for who writes the log, and takes it from nobody who is there.
#[test]
fn a_start_of_a_copy_does_not_fence_off_the_guest_that_is_there() {
    let directory = tempfile::tempdir_in("/dev/shm").expect("tmpfs");
    let path = directory.path().join("image");
    let (mut guest, image) = shipped(304);
    std::fs::write(&path, &image).expect("written");
    let options = client_options(guest.world.network.address, PATIENCE);
    let start = || recover_image(&path, &options, false, true);
    let error = start().expect_err("somebody writes to it");
    assert!(matches!(error, Error::Failed { .. }), "{error}");
    assert!(error.to_string().contains("is written by a client that is connected"), "{error}");
    assert!(std::fs::read(&path).expect("read") == image, "it was changed");
    // It was not fenced off.
    guest.commit();
    guest.end();
    std::fs::write(&path, &image).expect("written");
    recover_image(&path, &options, false, false).expect_err("that log is over");
}

/// Whoever recovers a journal fences off who still writes it: that one's commits fail, and it leaves storage alone.
#[test]
fn who_is_fenced_off_writes_nothing_any_more() {
    let directory = tempfile::tempdir_in("/dev/shm").expect("tmpfs");
    let path = directory.path().join("image");
    let (guest, image) = shipped(302);
    std::fs::write(&path, &image).expect("written");
    let options = client_options(guest.world.network.address, PATIENCE);
    let recovered = recover_image(&path, &options, false, false).expect("recovered");
    assert!(recovered[0].report.transactions > 0, "{recovered:?}");
    let mut commit = vec![0; BLOCK];
    commit[..8].copy_from_slice(&[0xc0, 0x3b, 0x39, 0x98, 0, 0, 0, 2]);
    // It may not have heard of that yet: then it will.
    let outcome = guest.log.write(1, commit.as_slice().into(), RequestId(u32::MAX));
    guest.log.end_of_pass();
    if outcome != Outcome::Fail {
        let deadline = Instant::now() + Duration::from_secs(60);
        let told = loop {
            let done = guest.log.take_done();
            if !done.is_empty() {
                break done;
            }
            assert!(Instant::now() < deadline, "nobody is told");
            std::thread::sleep(Duration::from_millis(1));
        };
        assert_eq!((outcome, told), (Outcome::Held, vec![(RequestId(u32::MAX), Status::IoError)]));
    }
    assert_eq!(guest.log.write(2, commit.into(), RequestId(1)), Outcome::Fail);
    assert!(guest.log.settle().is_err());
    assert!(guest.world.image_now() == image, "storage was written to");
}

/// Whoever reads a journal fences nobody off, and what its guest does meanwhile is no damage.
#[test]
fn who_reads_a_journal_that_is_written_to_disturbs_nobody() {
    let directory = tempfile::tempdir_in("/dev/shm").expect("tmpfs");
    let path = directory.path().join("image");
    let (mut guest, _) = shipped(304);
    let world = std::sync::Arc::clone(&guest.world);
    let options = client_options(world.network.address, PATIENCE);
    let is_over = std::sync::atomic::AtomicBool::new(false);
    let read = std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let (mut whole, mut passing) = (0, 0);
            while !is_over.load(std::sync::atomic::Ordering::Relaxed) || whole == 0 {
                let image = world.image_now();
                if !matches!(mark_of(&world, &image), MarkFound::Live(_)) {
                    continue;
                }
                std::fs::write(&path, &image).expect("written");
                match recover_image(&path, &options, true, false) {
                    Ok(_) => whole += 1,
                    Err(Error::Failed { .. }) => passing += 1,
                    // The copy is one of a moment ago.
                    Err(Error::Refused(reason) | Error::Damaged(reason)) => {
                        assert!(reason.contains("an older copy"), "{reason}")
                    }
                }
                assert!(std::fs::read(&path).expect("read") == image, "it was written to");
            }
            (whole, passing)
        });
        for _ in 0..60 {
            guest.commit();
            guest.pass(2);
        }
        is_over.store(true, std::sync::atomic::Ordering::Relaxed);
        reader.join().expect("nothing is refused")
    });
    assert!(read.0 > 0, "{read:?}");
    assert!(guest.log.report().is_remote_now, "its writer was disturbed: {read:?}");
    assert_eq!(guest.log.report().fall_backs, 0);
    guest.commit();
}

/// A guest proves that its journal is not what it seems, and the host loses power before or after the log has come back.
#[test]
fn a_log_that_was_found_out_is_brought_to_its_place_and_not_replayed() {
    let directory = tempfile::tempdir_in("/dev/shm").expect("tmpfs");
    let path = directory.path().join("image");
    for has_come_back in [false, true] {
        let (mut guest, _) = shipped(304);
        let world = std::sync::Arc::clone(&guest.world);
        let at = superblock_at(&world);
        if has_come_back {
            guest.log.distrust().expect("written");
            guest.wait_until_remote(false);
            // The superblocks that come later say it, too.
            guest.pass(1);
        } else {
            // Its tail has moved on the server: an image that knows less of it is an older copy.
            guest.pass(2);
            guest.log.say_distrusted().expect("written");
        }
        let image = world.image_now();
        let says = Stored::read(&image[at..at + BLOCK]);
        assert!(says.is_distrusted, "{says:?}");
        assert!(has_come_back || matches!(says.says, Says::Remote(_)), "{says:?}");
        let server = world.serve_copy();
        let options = client_options(server.address(), PATIENCE);
        for dry_run in [true, false] {
            std::fs::write(&path, &image).expect("written");
            let recovered = recover_image(&path, &options, dry_run, false).expect("recovered");
            assert_eq!(recovered[0].report.status, recovery::Status::Materialised, "{recovered:?}");
            let is_to_be_changed = !dry_run && !has_come_back;
            assert!(is_to_be_changed || std::fs::read(&path).expect("read") == image, "it was changed");
        }
        let after = std::fs::read(&path).expect("read");
        let says = Stored::read(&after[at..at + BLOCK]);
        assert!(matches!(says.says, Says::LeftToGuest(_)), "{says:?}");
        let log: Vec<u64> =
            (0..world.place.log_blocks).filter_map(|position| world.place.offset_of(position)).collect();
        for block in 0..after.len() / BLOCK {
            let is_log = log.contains(&((block * BLOCK) as u64));
            let is_same = after[block * BLOCK..][..BLOCK] == image[block * BLOCK..][..BLOCK];
            assert!(is_log || is_same, "block {block} was written");
        }
    }
}

/// The store's disk is put back from a snapshot while the client's goes on: epoch, nonce and the end of the log all fit each other.
#[test]
fn a_server_that_was_put_back_from_an_older_state_is_refused() {
    let directory = tempfile::tempdir_in("/dev/shm").expect("tmpfs");
    let path = directory.path().join("image");
    let (mut guest, before) = shipped(301);
    let world = std::sync::Arc::clone(&guest.world);
    let older = world.serve_copy();
    for _ in 0..6 {
        guest.commit();
    }
    // Its tail moves, and the mark is written anew.
    while guest.live() > 1 {
        guest.pass(1);
    }
    let image = world.image_now();
    assert!(mark_of(&world, &image) == mark_of(&world, &before), "it is the same log");
    let reason = refusal(&image, &path, &client_options(older.address(), PATIENCE));
    assert!(reason.contains("put back from a snapshot or a backup"), "{reason}");
    drop(older);
    // With what it has now, and of an amberlog that did not say what was acknowledged.
    let at = superblock_at(&world);
    let mut unsaid = image.clone();
    unsaid[at + 0xe8..at + 0xf4].fill(0);
    let server = world.serve_copy();
    for image in [image, unsaid] {
        std::fs::write(&path, image).expect("written");
        let recovered = recover_image(&path, &client_options(server.address(), PATIENCE), true, false);
        assert_eq!(recovered.expect("it is the log").len(), 1);
    }
    guest.end();
}
