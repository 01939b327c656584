//! The models against sums done by hand. No clock is looked at, but for the one test of the server, which judges order and
//! content alone.

use disk_model::{
    Client, Completion, Error, Inbox, Kind, Model, Profile, Request, Server, ServerOptions, SpinningDrive,
};
use seeded_random::Random;
use std::os::fd::AsFd;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const MS: u64 = 1_000_000;

fn request(tag: u64, kind: Kind, offset: u64, len: u64) -> Request {
    Request { tag, kind, offset, len }
}

/// Writes, one after the other, and a flush; the whole in ns.
fn written_ns(model: &mut Model, requests: &[Request]) -> u64 {
    let mut completed = Vec::new();
    let mut now = 0;
    for request in requests {
        model.submit(now, *request);
        now = model.drain(&mut completed);
    }
    assert_eq!(completed.len(), requests.len());
    now
}

#[test]
fn a_sequential_stream_runs_at_the_medias_speed() {
    let mut model = Model::new(Profile::St336753lw, 1);
    let mut requests: Vec<Request> = (0..128).map(|n| request(n, Kind::Write, n * MIB, MIB)).collect();
    requests.push(request(128, Kind::Flush, 0, 0));
    let ns = written_ns(&mut model, &requests);
    let ideal = 128 * MIB * 1000 / 63;
    assert!((ideal..ideal * 102 / 100).contains(&ns), "{ns} ns instead of {ideal}");
}

#[test]
fn random_reads_one_by_one_take_seek_rotation_and_transfer() {
    let mut model = Model::new(Profile::St336753lw, 2);
    let (mut random, mut now, count) = (Random::new(3), 0, 20_000);
    let mut completed = Vec::new();
    for tag in 0..count {
        let offset = random.below(36_000_000_000 / 4096) * 4096;
        model.submit(now, request(tag, Kind::Read, offset, 4096));
        now = model.drain(&mut completed);
    }
    let mean = now / count;
    // 4 ms, 2 ms, 4096 bytes at 63 MB/s, one command.
    let expected = 6 * MS + 65_016 + 40_000;
    assert!(mean.abs_diff(expected) < expected / 50, "{mean} ns a read instead of {expected}");
}

#[test]
fn a_full_queue_is_served_in_a_better_order() {
    let drained = |depth: u64| {
        let mut model = Model::new(Profile::St336753lwWriteThrough, 2);
        let (mut random, mut completed, mut now) = (Random::new(5), Vec::new(), 0);
        for tag in 0..512 {
            let offset = random.below(36_000_000_000 / 4096) * 4096;
            model.submit(now, request(tag, Kind::Write, offset, 4096));
            if tag % depth == depth - 1 {
                now = model.drain(&mut completed);
            }
        }
        now
    };
    let (alone, together) = (drained(1), drained(64));
    assert!(together * 2 < alone, "64 at once take {together} ns, one by one {alone}");
}

#[test]
fn the_write_cache_answers_at_once_until_it_is_full_and_a_flush_waits_for_all_of_it() {
    let mut model = Model::new(Profile::St336753lw, 1);
    let mut completed = Vec::new();
    let mut random = Random::new(9);
    let mut offset = || random.below(36_000_000_000 / 4096) * 4096;
    for tag in 0..100 {
        model.submit(0, request(tag, Kind::Write, offset(), 4096));
    }
    model.submit(0, request(1000, Kind::Flush, 0, 0));
    model.advance(10 * MS, &mut completed);
    // 100 commands of 40 µs and 12.8 µs on the bus.
    assert_eq!(completed.len(), 100, "all are in the cache within 5.3 ms");
    assert_eq!(completed.last().map(|completion| completion.at_ns), Some(100 * (40_000 + 12_800)));
    let end = model.drain(&mut completed);
    assert_eq!(completed.last().map(|completion| completion.tag), Some(1000));
    assert!(end > 100 * MS, "100 random writes reached the medium in {end} ns");
    assert_eq!(model.totals().transfers, 100);

    // More than the cache holds: the rest waits for the medium.
    let mut model = Model::new(Profile::St336753lw, 1);
    completed.clear();
    for tag in 0..4096 {
        model.submit(0, request(tag, Kind::Write, offset(), 4096));
    }
    model.advance(200 * MS, &mut completed);
    let at_first = completed.len();
    assert!((2048..2300).contains(&at_first), "{at_first} writes of 4 KiB went into 8 MiB");
    model.drain(&mut completed);
    assert_eq!(completed.len(), 4096);
}

/// As `hdd-7200`, of which 16384 scattered writes fill the cache; only the flush differs.
#[test]
fn a_flush_of_a_protected_cache_waits_for_what_has_no_room_in_it_and_for_nothing_else() {
    let flushed_ns = |profile: Profile, writes: u64| {
        let mut model = Model::new(profile, 1);
        let mut random = Random::new(9);
        for tag in 0..writes {
            let offset = random.below(900_000_000_000 / 4096) * 4096;
            model.submit(0, request(tag, Kind::Write, offset, 4096));
        }
        model.submit(0, request(writes, Kind::Flush, 0, 0));
        let mut completed = Vec::new();
        let end = model.drain(&mut completed);
        let at_ns = |wanted: u64| completed.iter().find(|completion| completion.tag == wanted).unwrap().at_ns;
        let last_write = (0..writes).map(at_ns).max().unwrap();
        assert!(at_ns(writes) > last_write, "{profile}: a write that is not in the cache is not durable");
        assert_eq!(completed.len() as u64, writes + 1);
        assert!(end >= at_ns(writes));
        at_ns(writes)
    };
    // 100 commands of 40 µs and 13.7 µs on the bus, and the flush's own 40.
    assert!(flushed_ns(Profile::Hdd7200Protected, 100) < 6 * MS);
    assert!(flushed_ns(Profile::Hdd7200, 100) > 300 * MS);
    assert!(flushed_ns(Profile::Hdd7200Protected, 16_384 + 100) > 300 * MS, "a hundred had no room");
}

#[test]
fn neighbours_leave_the_cache_together_and_overwrites_leave_once() {
    let mut model = Model::new(Profile::St336753lw, 1);
    // Something elsewhere occupies the arm while the rest arrives.
    model.submit(0, request(0, Kind::Read, 20_000 * MIB, 4096));
    for tag in 1..=64 {
        model.submit(0, request(tag, Kind::Write, tag * 4096, 4096));
    }
    for tag in 65..=128 {
        model.submit(0, request(tag, Kind::Write, 4096, 4096));
    }
    model.submit(0, request(999, Kind::Flush, 0, 0));
    let mut completed = Vec::new();
    model.drain(&mut completed);
    assert_eq!(completed.len(), 130);
    assert_eq!(model.totals().transfers, 2, "one read, one write of 64 blocks");
}

#[test]
fn a_flush_waits_for_nothing_younger() {
    let mut model = Model::new(Profile::St336753lw, 1);
    let mut completed = Vec::new();
    model.submit(0, request(1, Kind::Write, 0, 4096));
    model.submit(0, request(2, Kind::Flush, 0, 0));
    for tag in 3..1000 {
        model.submit(0, request(tag, Kind::Write, tag * 10 * MIB, 4096));
    }
    model.drain(&mut completed);
    let flushed = completed.iter().find(|completion| completion.tag == 2).expect("the flush is done").at_ns;
    assert!(flushed < 20 * MS, "the flush took {flushed} ns");
}

/// As SCSI has it, what is younger than a flush may go before it, but not for ever: the flush has a request's patience.
#[test]
fn a_scsi_flush_lets_the_younger_by_and_is_not_starved() {
    let flushed_ns = |profile: Profile| {
        let mut model = Model::new(profile, 1);
        let mut completed = Vec::new();
        for tag in 0..200 {
            model.submit(0, request(tag, Kind::Write, tag * 150 * MIB, 4096));
        }
        model.submit(0, request(1000, Kind::Flush, 0, 0));
        let mut now = 0;
        let mut tag = 1001;
        // A stream that lies near whatever the arm has reached, for as long as the flush waits.
        while !completed.iter().any(|completion: &Completion| completion.tag == 1000) {
            now += MS;
            model.submit(now, request(tag, Kind::Write, (tag % 200) * 150 * MIB + MIB, 4096));
            model.advance(now, &mut completed);
            tag += 1;
            assert!(now < 60_000 * MS, "it is starved");
        }
        if profile != Profile::St336753lwProtected {
            assert!(model.totals().flushing_ns > now - 2 * MS, "{:?}, {now}", model.totals());
        }
        now
    };
    let (barrier, scsi) = (flushed_ns(Profile::St336753lw), flushed_ns(Profile::St336753lwScsiFlush));
    assert!(scsi > barrier, "the younger took some of its time: {scsi} and {barrier} ns");
    assert!(flushed_ns(Profile::St336753lwProtected) < 20 * MS);
}

/// A tenth of the sizes with half of the clocks: a tenth of the cache.
#[test]
fn a_scaled_drive_has_a_part_of_its_cache() {
    let absorbed = |sizes: f64| {
        let mut model = Model::scaled(Profile::St336753lw, 1, sizes, 0.5);
        let (mut completed, mut count) = (Vec::new(), 0);
        for tag in 0..4096 {
            model.submit(0, request(tag, Kind::Write, tag * 8 * MIB, 4096));
        }
        model.advance(60 * MS, &mut completed);
        count += completed.len();
        count
    };
    // 1.2 s of commands do not fit into 60 ms: what has completed went into the cache over the bus.
    let (full, tenth) = (absorbed(1.0), absorbed(0.1));
    assert!(full > 1000 && tenth < 300 && tenth > 150, "{full} and {tenth}");
}

#[test]
fn reads_of_the_cache_and_of_what_was_read_ahead_cost_the_bus_alone() {
    let mut model = Model::new(Profile::St336753lw, 1);
    let mut completed = Vec::new();
    model.submit(0, request(1, Kind::Read, 1000 * MIB, 64 * KIB));
    let first = model.drain(&mut completed);
    model.submit(first + 4 * MS, request(2, Kind::Read, 1000 * MIB + 64 * KIB, 64 * KIB));
    let second = model.drain(&mut completed) - first - 4 * MS;
    assert_eq!(second, 40_000 + 64 * KIB * 1_000_000 / 320_000, "64 KiB over the bus");
    // Just written, on its way to the medium or not.
    model.submit(second + 100 * MS, request(3, Kind::Read, 0, 64 * KIB));
    model.submit(second + 100 * MS, request(4, Kind::Write, 30_000 * MIB, 4096));
    model.submit(second + 100 * MS, request(5, Kind::Read, 30_000 * MIB, 4096));
    completed.clear();
    model.drain(&mut completed);
    let order: Vec<u64> = completed.iter().map(|completion| completion.tag).collect();
    assert_eq!(order, [4, 5, 3]);
}

#[test]
fn a_sequential_reader_that_thinks_is_not_slowed_by_rotation() {
    let mut model = Model::new(Profile::St336753lw, 1);
    let (mut completed, mut now) = (Vec::new(), 0);
    for tag in 0..400 {
        model.submit(now, request(tag, Kind::Read, 5000 * MIB + tag * 64 * KIB, 64 * KIB));
        now = model.drain(&mut completed) + 1_100_000;
    }
    // 64 KiB take 1.04 ms from the medium and 0.24 ms over the bus.
    assert!(now < 400 * 1_600_000, "{now} ns");
}

#[test]
fn the_same_seed_gives_the_same_times_and_another_gives_others() {
    let run = |profile: Profile, seed: u64| -> Vec<Completion> {
        let mut model = Model::new(profile, seed);
        let (mut completed, mut random) = (Vec::new(), Random::new(11));
        for tag in 0..2000 {
            let kind = [Kind::Read, Kind::Write, Kind::Write, Kind::Flush][random.below(4) as usize];
            let offset = random.below(8_000_000) * 4096;
            let len = if kind == Kind::Flush { 0 } else { 4096 };
            model.submit(tag * 500_000, request(tag, kind, offset, len));
        }
        model.drain(&mut completed);
        completed
    };
    for profile in Profile::ALL {
        let first = run(profile, 1);
        assert_eq!(first.len(), 2000, "{profile}: every request completes once");
        assert_eq!(first, run(profile, 1), "{profile}");
        // Nothing of these is random.
        if !matches!(profile, Profile::None | Profile::Pcm) {
            assert_ne!(first, run(profile, 2), "{profile}");
        }
    }
}

#[test]
fn flash_takes_its_latencies_and_shares_its_bus() {
    let mut model = Model::new(Profile::SataSsd, 1);
    let mut completed = Vec::new();
    model.submit(0, request(1, Kind::Read, 0, 4096));
    let end = model.drain(&mut completed);
    assert!((81_000..=99_000).contains(&end), "{end}");
    // 64 MiB in requests of 1 MiB, all at once: 500 MB/s.
    for tag in 0..64 {
        model.submit(end, request(tag, Kind::Write, tag * MIB, MIB));
    }
    let took = model.drain(&mut completed) - end;
    let ideal = 64 * MIB * 2;
    assert!((ideal..ideal * 102 / 100).contains(&took), "{took} ns instead of {ideal}");
    let now = end + took;
    model.submit(now, request(100, Kind::Flush, 0, 0));
    let flushed = model.drain(&mut completed) - now;
    assert!((1_800_000..=2_200_000).contains(&flushed), "{flushed}");
    model.submit(now + flushed, request(101, Kind::Flush, 0, 0));
    assert_eq!(model.drain(&mut completed) - now - flushed, 20_000, "nothing to flush");
}

#[test]
fn virtual_disks_share_one_server_and_a_full_drive_refuses() {
    let directory = tempfile::tempdir().expect("a directory");
    let socket = directory.path().join("model");
    let options =
        ServerOptions { profile: Profile::St336753lw, seed: 1, time_scale: 0.001, socket: Some(socket.clone()) };
    let server = Server::start(options).expect("a server");
    let half = SpinningDrive::ST336753LW.capacity_bytes / 2;
    let clients = [server.connect(half).expect("room"), Client::connect(&socket, half).expect("room")];
    assert!(matches!(server.connect(4096), Err(Error::Full { size_bytes: 4096 })));
    for client in &clients {
        for tag in 0..50 {
            client.submit(request(tag, Kind::Write, tag * MIB, 4096)).expect("a server that lives");
        }
        client.submit(request(50, Kind::Flush, 0, 0)).expect("a server that lives");
    }
    for client in &clients {
        let (mut tags, mut inbox) = (Vec::new(), Inbox::default());
        while tags.len() < 51 {
            let mut list = [rustix::event::PollFd::from_borrowed_fd(client.as_fd(), rustix::event::PollFlags::IN)];
            rustix::event::poll(&mut list, None).expect("poll");
            client.completed(&mut inbox, &mut tags).expect("a server that lives");
        }
        assert_eq!(tags.last(), Some(&50), "the flush comes last");
    }
    assert_eq!(server.totals().writes, 100);
    // A request beyond its own disk ends a client, and its room is free again.
    clients[0].submit(request(0, Kind::Write, half, 4096)).expect("it is sent");
    let (mut tags, mut inbox) = (Vec::new(), Inbox::default());
    while clients[0].completed(&mut inbox, &mut tags).is_ok() {
        std::thread::yield_now();
    }
    let _again = server.connect(half).expect("room again");
    drop(server);
    assert!(!socket.exists());
    assert!(Client::connect(&socket, 4096).is_err());
}
