//! Storage that takes longer than a server keeps a log for who says nothing.

use super::guest::Guest;
use super::network::Weather;
use super::standstill::{sleep_awake, unless_it_stood_still};
use super::world::{PATIENCE, TIMEOUT, client_options, recover_image};
use recovery::Error;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The server of the first test keeps a log so long for a client that says nothing.
const SILENCE: Duration = Duration::from_millis(3000);
/// Longer than that, and shorter than a host whose storage hangs gives signs.
const FLUSH: Duration = Duration::from_millis(4000);

/// A mark is written anew, and its flush takes its time: a start of a copy of the disk does not take the log meanwhile, and the guest's
/// commits go on when it has ended.
#[test]
fn a_log_whose_mark_takes_long_to_be_written_anew_is_not_taken_over() {
    // Only a machine that stood still for a third of the silence is an excuse.
    unless_it_stood_still(SILENCE / 3, taken_while_a_mark_is_written);
}

/// An error where something took the log from its writer, or that one left the server.
fn taken_while_a_mark_is_written() -> Result<(), String> {
    let directory = tempfile::tempdir_in("/dev/shm").expect("tmpfs");
    let path = directory.path().join("image");
    // It gives a sign each third of that, and gives the server up only on a machine that is an excuse.
    let mut guest = Guest::with_timeout(310, 0, SILENCE / 2);
    let world = Arc::clone(&guest.world);
    world.stop_server();
    world.start_server_with(|options| options.silence = SILENCE);
    guest.wait_until_remote(true);
    guest.commit();
    let image = world.image_now();
    let fall_backs = guest.log.report().fall_backs;
    world.hang(true);
    guest.log.set_mark_age(Duration::from_millis(1));
    world.wait_until_somebody_hangs();
    let began = Instant::now();
    std::thread::sleep(FLUSH);
    std::fs::write(&path, &image).expect("written");
    let options = client_options(world.network.address, PATIENCE);
    let started = recover_image(&path, &options, false, true);
    assert!(began.elapsed() > SILENCE);
    let Err(error @ Error::Failed { .. }) = started else {
        world.hang(false);
        world.crash();
        return Err(format!("the log was taken from its writer: {started:?}"));
    };
    assert!(error.to_string().contains("is written by a client that is connected"), "{error}");
    world.hang(false);
    let marks = guest.log.report().marks;
    guest.commit();
    guest.wait_until_remote(true);
    let fall_backs = guest.log.report().fall_backs - fall_backs;
    let deadline = Instant::now() + Duration::from_secs(60);
    while guest.log.report().marks <= marks {
        assert!(Instant::now() < deadline, "the mark is not written anew any more");
        std::thread::sleep(Duration::from_millis(1));
    }
    world.crash();
    if fall_backs == 0 { Ok(()) } else { Err("it was sent to storage for nothing".to_owned()) }
}

/// The mark with which the server begins to count takes its time: the server hears of its client meanwhile.
#[test]
fn a_log_whose_mark_takes_long_to_be_written_gives_signs_meanwhile() {
    // A third of what these clients wait for a server.
    unless_it_stood_still(TIMEOUT / 3, signs_while_a_mark_is_written);
}

fn signs_while_a_mark_is_written() -> Result<(), String> {
    let mut guest = Guest::new(311, 0);
    let world = Arc::clone(&guest.world);
    world.weather(Weather::Refuses);
    guest.wait_until_remote(false);
    guest.commit();
    guest.hang();
    world.weather(Weather::Good);
    guest.wait_until_switching();
    let connects = guest.log.report().connects;
    world.hang(true);
    guest.go_on();
    world.wait_until_somebody_hangs();
    let said = world.network.said();
    std::thread::sleep(FLUSH);
    // One each third of the half second that these clients wait for a server.
    let said = world.network.said() - said;
    assert!(!guest.log.report().is_remote_now, "the mark is not durable yet");
    world.hang(false);
    guest.wait_until_remote(true);
    let attempts = guest.log.report().connects - connects;
    guest.commit();
    world.crash();
    if said < 8 {
        return Err(format!("{said} signs in {FLUSH:?}"));
    }
    if attempts > 0 {
        return Err(format!("it was not the same connection: {attempts} more"));
    }
    Ok(())
}

/// Storage hangs and does not come back: the host is lost, though its network lives, and who starts its guest elsewhere may have the log. When
/// storage goes on after all, so does the guest.
#[test]
fn a_host_whose_storage_hangs_for_good_gives_no_signs_for_ever() {
    let mut guest = Guest::new(312, 0);
    let world = Arc::clone(&guest.world);
    guest.wait_until_remote(true);
    guest.commit();
    world.hang(true);
    guest.log.set_mark_age(Duration::from_millis(1));
    world.wait_until_somebody_hangs();
    // Twelve times the half second that these clients wait for a server, and four more.
    sleep_awake(Duration::from_millis(8000));
    let said = world.network.said();
    sleep_awake(FLUSH);
    assert_eq!(world.network.said() - said, 0, "it still says that it is there");
    guest.log.set_mark_age(Duration::from_secs(60));
    world.hang(false);
    guest.wait_until_remote(true);
    guest.commit();
    world.crash();
}
