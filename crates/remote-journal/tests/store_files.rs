//! What becomes of a store's files while no server runs, or beside one: cut, removed, put back from an older copy, of another
//! version, on a disk that is full. What is fetched afterwards is all that was acknowledged, or it is refused.

use remote_journal::store::{Directory, Medium, Store, StoreError, StoreOptions};
use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

const SMALL: StoreOptions =
    StoreOptions { segment_bytes: 128 << 10, space_bytes_max: 4 << 20, journal_bytes_max: 8 << 20 };

fn open(path: &Path) -> Result<Store<Directory>, StoreError> {
    // A program that another test starts at this moment has the lock's descriptor until it is executed.
    let directory = (0..200).find_map(|_| {
        let directory = Directory::open(path).ok();
        if directory.is_none() {
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        directory
    });
    Store::open(directory.expect("a directory"), SMALL, 77)
}

fn name(journal: u8) -> String {
    format!("client/j{journal}")
}

fn content(journal: u8, sequence: u64) -> Vec<u8> {
    vec![(u64::from(journal) * 16 + sequence % 16) as u8; 1000 + 517 * (sequence as usize % 9)]
}

/// Epochs and last batches of journals, as they were acknowledged.
type Acknowledged = BTreeMap<u8, (u64, u64)>;

/// Begins logs and adds to them, one group each.
fn write(store: &mut Store<Directory>, journals: std::ops::Range<u8>, batches: u64) -> Acknowledged {
    let mut acknowledged = Acknowledged::new();
    for j in journals {
        let (id, epoch) = store.begin(&name(j), [j; 16], [j; 16], 0, 4096).expect("begun");
        for sequence in 1..=batches {
            store.append(id, epoch, sequence, 1, &content(j, sequence)).expect("appended");
            store.commit().expect("durable");
        }
        acknowledged.insert(j, (epoch, batches));
    }
    acknowledged
}

/// Whether a journal is whole; a panic where it is neither that nor refused.
fn is_whole(store: &mut Store<Directory>, j: u8, (epoch, last): (u64, u64)) -> bool {
    let Ok(info) = store.info(&name(j)) else { return false };
    if info.epoch != epoch || !info.is_live {
        return false;
    }
    for sequence in info.tail.. {
        match store.fetch(&name(j), epoch, sequence) {
            Ok(Some(batch)) => assert_eq!(batch, content(j, sequence), "journal {j}, batch {sequence}"),
            Ok(None) => {
                assert_eq!((info.tail, sequence - 1), (1, last), "journal {j} lacks acknowledged batches, silently");
                return true;
            }
            Err(StoreError::Damaged(_)) => return false,
            Err(error) => panic!("journal {j}: {error}"),
        }
    }
    unreachable!("it ends somewhere")
}

fn segments(path: &Path) -> Vec<PathBuf> {
    let mut paths: Vec<PathBuf> = std::fs::read_dir(path)
        .expect("a directory")
        .map(|entry| entry.expect("an entry").path())
        .filter(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("segment-")))
        .collect();
    paths.sort();
    paths
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).expect("made");
    for entry in std::fs::read_dir(from).expect("a directory") {
        let entry = entry.expect("an entry");
        std::fs::copy(entry.path(), to.join(entry.file_name())).expect("copied");
    }
}

fn cut(path: &Path, bytes: u64) {
    OpenOptions::new().write(true).open(path).expect("there").set_len(bytes).expect("cut");
}

/// Bytes of a segment up to its last that is not zero.
fn used(path: &Path) -> u64 {
    let bytes = std::fs::read(path).expect("read");
    bytes.iter().rposition(|byte| *byte != 0).map_or(0, |last| last as u64 + 1)
}

/// Opens, and looks that nothing is silently missing; then goes on, and looks once more after the next two starts: what
/// was damaged once stays known. Gives the journals that are whole.
fn judge(path: &Path, acknowledged: &Acknowledged) -> Vec<u8> {
    let mut whole = Vec::new();
    for start in 0..3 {
        let mut store = match open(path) {
            Ok(store) => store,
            Err(error) => {
                let error = error.to_string();
                assert!(error.contains("store"), "{error}");
                return Vec::new();
            }
        };
        let now: Vec<u8> =
            acknowledged.iter().filter(|(j, of)| is_whole(&mut store, **j, **of)).map(|(j, _)| *j).collect();
        assert!(
            now.len() == acknowledged.len() || store.counters().damaged_places > 0 || start > 0,
            "not counted as damage"
        );
        assert!(start == 0 || now == whole, "after start {start} {now:?} are whole, and were {whole:?}");
        whole = now;
        // Others are served all the same.
        let other = write(&mut store, 100 + start..101 + start, 4);
        assert!(other.iter().all(|(j, of)| is_whole(&mut store, *j, *of)));
        store.end().expect("ended");
    }
    whole
}

/// The last segment cut anywhere, removed, or as it was once before; after an orderly stop and after a crash.
#[test]
fn an_end_that_is_missing_is_not_taken_for_a_torn_one() {
    for is_ended in [true, false] {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("store");
        let mut store = open(&path).expect("opens");
        let mut acknowledged = write(&mut store, 0..2, 30);
        let (id, epoch) = store.begin(&name(2), [2; 16], [2; 16], 0, 4096).expect("begun");
        store.commit().expect("durable");
        let early = directory.path().join("early");
        let (before, mut last) = (segments(&path).pop(), 0);
        let mut append = |last: &mut u64| {
            *last += 1;
            store.append(id, epoch, *last, 1, &content(2, *last)).expect("appended");
            store.commit().expect("durable");
        };
        // In a segment of which there is an older copy.
        while segments(&path).pop() == before {
            append(&mut last);
        }
        copy(&path, &early);
        (0..4).for_each(|_| append(&mut last));
        acknowledged.insert(2, (epoch, last));
        if is_ended {
            store.end().expect("ended");
        }
        drop(store);
        let last = segments(&path).pop().expect("there is one");
        let file = last.file_name().expect("a name");
        let end = used(&last);
        for what in 0..13u64 {
            let damaged = directory.path().join("damaged");
            let _ = std::fs::remove_dir_all(&damaged);
            copy(&path, &damaged);
            let last = damaged.join(file);
            match what {
                0 => std::fs::remove_file(&last).expect("removed"),
                1 => drop(std::fs::copy(early.join(file), &last).expect("put back")),
                2 => cut(&last, 0),
                3 => {
                    // All of it zeros, and as long as it was.
                    let len = std::fs::metadata(&last).expect("there").len();
                    cut(&last, 0);
                    cut(&last, len);
                }
                12 => {
                    // Without them nobody knows how far it went.
                    cut(&last, end - 5000);
                    (0..2)
                        .for_each(|index| std::fs::remove_file(damaged.join(format!("end-{index}"))).expect("removed"));
                }
                _ => cut(&last, end * (what - 3) / 9),
            }
            let whole = judge(&damaged, &acknowledged);
            assert!(
                what == 11 || !whole.contains(&2),
                "{what}, ended {is_ended}: journal 2 cannot be whole: {whole:?}"
            );
        }
    }
}

/// More live journals than an end mark can list: what it says of segment and group still tells that the end is missing.
#[test]
fn a_missing_end_is_seen_with_many_journals() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("store");
    let mut store = open(&path).expect("opens");
    let mut acknowledged = write(&mut store, 0..40, 3);
    let (id, epoch) = store.begin(&name(50), [50; 16], [50; 16], 0, 4096).expect("begun");
    let (before, mut last) = (segments(&path).pop(), 0);
    // One batch at least is in the first segment, and one in the last.
    while last < 2 || segments(&path).pop() == before {
        last += 1;
        store.append(id, epoch, last, 1, &content(50, last)).expect("appended");
        store.commit().expect("durable");
    }
    acknowledged.insert(50, (epoch, last));
    store.end().expect("ended");
    drop(store);
    std::fs::remove_file(segments(&path).pop().expect("there is one")).expect("removed");
    let whole = judge(&path, &acknowledged);
    assert!(!whole.contains(&50), "{whole:?}");
}

/// A rotten record in the very last group, with another one of that group behind it: as far as the segment can say it may have been
/// torn, but the end mark says that it was durable. Only its journal is lost.
#[test]
fn a_rotten_record_of_the_last_group_costs_its_own_journal_alone() {
    for is_ended in [true, false] {
        rotten_in_the_last_group(is_ended);
    }
}

fn rotten_in_the_last_group(is_ended: bool) {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("store");
    let mut store = open(&path).expect("opens");
    let mut acknowledged = write(&mut store, 0..2, 3);
    let (id, epoch) = store.begin(&name(2), [2; 16], [2; 16], 0, 4096).expect("begun");
    store.commit().expect("durable");
    let (neighbour, of_neighbour) = store.begin(&name(3), [3; 16], [3; 16], 0, 4096).expect("begun");
    store.commit().expect("durable");
    for sequence in 1..=3 {
        store.append(id, epoch, sequence, 1, &content(2, sequence)).expect("appended");
        store.append(neighbour, of_neighbour, sequence, 1, &content(3, sequence)).expect("appended");
    }
    store.commit().expect("durable");
    acknowledged.insert(2, (epoch, 3));
    acknowledged.insert(3, (of_neighbour, 3));
    if is_ended {
        store.end().expect("ended");
    }
    drop(store);
    let last = segments(&path).pop().expect("there is one");
    let bytes = std::fs::read(&last).expect("read");
    let wanted = content(2, 2);
    let at = bytes.windows(wanted.len()).position(|window| window == wanted).expect("it is there");
    let file = OpenOptions::new().write(true).open(&last).expect("there");
    file.write_all_at(&[0xee; 8], at as u64 + 100).expect("rotten");
    // What lies behind it is another journal's, and was durable.
    assert_eq!(judge(&path, &acknowledged), [0, 1, 3]);
}

/// A client that has as many journals as it may have gets room for another one: those that are over go first, then those that
/// were recovered, and never one that somebody needs.
#[test]
fn a_recovered_journal_makes_room_for_another_one() {
    let directory = tempfile::tempdir().expect("a directory");
    let mut store = open(&directory.path().join("store")).expect("opens");
    let of = |index: usize| format!("client/{index}");
    let nonce = |index: usize| [index as u8; 16];
    let begin = |store: &mut Store<Directory>, index| store.begin(&of(index), [1; 16], nonce(index), 0, 4096);
    let max = remote_journal::store::JOURNALS_OF_CLIENT_MAX;
    for index in 0..max {
        begin(&mut store, index).expect("begun");
    }
    let error = begin(&mut store, max).expect_err("all of them are live");
    assert!(error.to_string().contains("too many journals"), "{error}");
    let taken = store.take(&of(7)).expect("taken");
    store.recovered(&of(7), taken.epoch, nonce(7), taken.fence).expect("recovered");
    let info = store.info(&of(9)).expect("it is there");
    store.close(&of(9), info.epoch, nonce(9)).expect("closed");
    begin(&mut store, max).expect("in the place of the one that is over");
    assert!(store.info(&of(9)).is_err() && store.info(&of(7)).is_ok());
    begin(&mut store, max + 1).expect("in the place of the one that was recovered");
    assert!(store.info(&of(7)).is_err());
    begin(&mut store, max + 2).expect_err("all of them are live again");
}

/// What others have left, and nobody needs, keeps no client from its first journal; what somebody needs stays.
#[test]
fn journals_of_others_that_are_over_make_room() {
    let directory = tempfile::tempdir().expect("a directory");
    let mut store = open(&directory.path().join("store")).expect("opens");
    let begin = |store: &mut Store<Directory>, name: &str| store.begin(name, [1; 16], [1; 16], 0, 4096);
    let (each, all) = (remote_journal::store::JOURNALS_OF_CLIENT_MAX, remote_journal::store::JOURNALS_MAX);
    for index in 0..all {
        let name = format!("client{}/{}", index / each, index % each);
        let (_, epoch) = begin(&mut store, &name).expect("begun");
        // All of one, and one of each other.
        if index / each == 3 || index % each == 5 {
            store.close(&name, epoch, [1; 16]).expect("closed");
        }
    }
    begin(&mut store, "another/0").expect("in the place of the oldest of the client with most");
    assert!(store.info("client3/0").is_err() && store.info("client3/1").is_ok() && store.info("client0/5").is_ok());
    begin(&mut store, "client0/one more").expect("in the place of its own");
    assert!(store.info("client0/5").is_err() && store.info("client3/1").is_ok());
    let error = begin(&mut store, "client0/and more").expect_err("all of its own are live");
    assert!(error.to_string().contains("too many journals"), "{error}");
    assert!(store.info("client3/1").is_ok(), "nobody is to lose what another one has no right to");
    for index in 0..all / each {
        let live =
            (0..each).filter(|at| *at != 5 && index != 3).all(|at| store.info(&format!("client{index}/{at}")).is_ok());
        assert!(live, "client {index}");
    }
}

/// Every other segment likewise.
#[test]
fn a_segment_that_is_missing_or_cut_is_seen() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("store");
    let mut store = open(&path).expect("opens");
    let acknowledged = write(&mut store, 0..4, 30);
    store.end().expect("ended");
    drop(store);
    let names: Vec<_> = segments(&path).iter().map(|path| path.file_name().expect("a name").to_owned()).collect();
    assert!(names.len() > 3, "{names:?}");
    for of in &names[..names.len() - 1] {
        for part in 0..5u64 {
            let damaged = directory.path().join("damaged");
            let _ = std::fs::remove_dir_all(&damaged);
            copy(&path, &damaged);
            let one = damaged.join(of);
            match part {
                0 => std::fs::remove_file(&one).expect("removed"),
                part => cut(&one, used(&one) * (part - 1) / 4),
            }
            let whole = judge(&damaged, &acknowledged);
            assert!(whole.len() < acknowledged.len(), "{of:?} {part}: nothing is missing?");
        }
    }
}

/// Another version in every header, or in one segment's, with a right checksum or without.
#[test]
fn another_version_is_refused_and_left_as_it_is() {
    for has_checksum in [true, false] {
        for only_last in [false, true] {
            let directory = tempfile::tempdir().expect("a directory");
            let path = directory.path().join("store");
            let mut store = open(&path).expect("opens");
            let acknowledged = write(&mut store, 0..3, 30);
            store.end().expect("ended");
            drop(store);
            let all = segments(&path);
            let changed = if only_last { &all[all.len() - 1..] } else { &all[..] };
            for segment in changed {
                let mut bytes = std::fs::read(segment).expect("read");
                for at in (0..bytes.len()).step_by(64) {
                    if bytes[at..].starts_with(b"AMBL") {
                        bytes[at + 5] = 2;
                        if has_checksum {
                            let crc = crc32c::crc32c(&bytes[at..at + 60]).to_le_bytes();
                            bytes[at + 60..at + 64].copy_from_slice(&crc);
                        }
                    }
                }
                std::fs::write(segment, bytes).expect("written");
            }
            let before: Vec<Vec<u8>> = all.iter().map(|path| std::fs::read(path).expect("read")).collect();
            if has_checksum || !only_last {
                let error = open(&path).err().expect("refused").to_string();
                assert!(error.contains("version"), "{error}");
            } else {
                // One segment in which nothing can be read may as well be damaged.
                judge(&path, &acknowledged);
            }
            for (segment, before) in all.iter().zip(&before) {
                if changed.contains(segment) {
                    let after = std::fs::read(segment).expect("it is there");
                    assert!(&after == before, "{} was changed", segment.display());
                }
            }
        }
    }
}

#[test]
fn a_full_store_can_still_be_recovered_from_and_freed() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("store");
    let mut store = open(&path).expect("opens");
    let kept = write(&mut store, 0..3, 20);
    // Full to the last byte that batches may have.
    let (id, epoch) = store.begin(&name(9), [9; 16], [0; 16], 0, 4096).expect("begun");
    let (mut last, mut bytes) = (0, 60_000);
    while bytes > 0 {
        match store.append(id, epoch, last + 1, 1, &vec![9; bytes]) {
            Ok(()) => last += 1,
            Err(StoreError::Full(_)) => bytes /= 4,
            Err(error) => panic!("{error}"),
        }
        store.commit().expect("durable");
    }
    // Clients that come back and find no room, and come back.
    for round in 0..200u8 {
        if let Ok((id, epoch)) = store.begin(&name(50), [50; 16], [round; 16], 0, 4096) {
            let _ = store.append(id, epoch, 1, 1, &vec![1; 100_000]);
        }
        // And one that stays, whose batches would fit into a reserve.
        if store.append(id, epoch, last + 1, 1, &vec![9; 6000]).is_ok() {
            last += 1;
        }
        store.commit().expect("durable");
        if round % 50 == 49 {
            store.end().expect("ended");
            drop(store);
            store = open(&path).expect("opens");
        }
    }
    drop(store);
    let mut store = open(&path).expect("opens, full as it is");
    for (j, of) in &kept {
        let taken = store.take(&name(*j)).expect("the reserve is for this");
        store.commit().expect("durable");
        assert!(is_whole(&mut store, *j, *of));
        store.recovered(&name(*j), of.0, [*j; 16], taken.fence).expect("the reserve is for this");
        store.commit().expect("durable");
    }
    store.delete(&name(9), true).expect("the reserve is for this");
    store.commit().expect("durable");
    let (id, epoch) = store.begin(&name(51), [51; 16], [0; 16], 0, 4096).expect("begun");
    for sequence in 1..=20 {
        store.append(id, epoch, sequence, 1, &vec![1; 60_000]).expect("there is room again");
        store.commit().expect("durable");
    }
}

/// The directory, or the segment that is written, is moved away or removed beside an open store.
#[test]
fn what_would_not_be_found_again_is_not_acknowledged() {
    for what in 0..3 {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("store");
        let mut store = open(&path).expect("opens");
        write(&mut store, 0..1, 3);
        let segment = segments(&path).pop().expect("there is one");
        match what {
            0 => std::fs::rename(&path, directory.path().join("elsewhere")).expect("moved"),
            1 => std::fs::remove_file(segment).expect("removed"),
            _ => drop(
                std::fs::copy(&segment, path.join("copy")).and_then(|_| std::fs::rename(path.join("copy"), segment)),
            ),
        }
        let begun = store.begin(&name(1), [1; 16], [1; 16], 0, 4096);
        let appended = begun.and_then(|(id, epoch)| store.append(id, epoch, 1, 1, b"x"));
        let error = appended.and_then(|()| store.commit()).expect_err("not acknowledged").to_string();
        assert!(error.contains("moved, removed or replaced"), "{error}");
        assert!(store.begin(&name(2), [2; 16], [1; 16], 0, 4096).is_err(), "it has failed for good");
    }
}

/// One rotten batch of an idle client stays, and what lies elsewhere is cleaned on.
#[test]
fn a_rotten_batch_does_not_stop_cleaning() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("store");
    let mut store = open(&path).expect("opens");
    let idle = write(&mut store, 0..1, 2);
    let slow_content = |sequence: u64| vec![sequence as u8; 3000];
    let file = OpenOptions::new().write(true).open(&segments(&path)[0]).expect("there");
    let bytes = std::fs::read(&segments(&path)[0]).expect("read");
    let wanted = content(0, 2);
    let at = bytes.windows(wanted.len()).position(|window| window == wanted).expect("it is there");
    file.write_all_at(&[0xee; 8], at as u64 + 100).expect("rotten");
    let (busy, epoch) = store.begin(&name(1), [1; 16], [1; 16], 0, 4096).expect("begun");
    let (slow, slow_epoch) = store.begin(&name(2), [2; 16], [2; 16], 0, 4096).expect("begun");
    let mut slow_last = 0;
    for sequence in 1..=1500u64 {
        let tail = sequence.saturating_sub(3).max(1);
        store.append(busy, epoch, sequence, tail, &vec![3; 30_000]).expect("there is room: nearly nothing is live");
        // A batch of it is in every segment, each larger than what is rotten.
        if sequence % 4 == 0 {
            slow_last += 1;
            store.append(slow, slow_epoch, slow_last, 1, &slow_content(slow_last)).expect("there is room");
        }
        store.commit().expect("durable");
        store.clean().expect("cleaned");
    }
    let is_slow_whole = |store: &mut Store<Directory>| {
        (1..=slow_last).all(|sequence| {
            let batch = store.fetch(&name(2), slow_epoch, sequence).expect("fetched");
            batch.is_some_and(|batch| batch == slow_content(sequence))
        })
    };
    assert!(is_slow_whole(&mut store));
    assert!(!is_whole(&mut store, 0, idle[&0]));
    drop(store);
    let mut store = open(&path).expect("opens");
    assert!(is_slow_whole(&mut store));
    assert!(!is_whole(&mut store, 0, idle[&0]));
}

#[test]
fn what_the_first_version_left_is_read() {
    let directory = tempfile::tempdir().expect("a directory");
    let archive = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/stores/0e81c47.tar.zst");
    let tar = Command::new("tar").arg("--zstd").arg("-xf").arg(&archive).arg("-C").arg(directory.path()).status();
    assert!(tar.expect("tar and zstd are installed").success());
    for of in ["ended", "killed"] {
        for start in 0..3 {
            let mut store = open(&directory.path().join(of)).expect("opens");
            assert_eq!(store.counters().damaged_places, 0, "{of}");
            for j in 1..=4u8 {
                let info = store.info(&name(j)).expect("there");
                let expected = (u64::from(j) + 1, 60, j != 4, if j == 2 { 55 } else { 1 });
                assert_eq!((info.epoch, info.last, info.is_live, info.tail), expected, "{of}, journal {j}");
                assert_eq!(info.fence, info.epoch + u64::from(j == 3));
                for sequence in info.tail..=if j == 4 { 0 } else { 60 } {
                    let batch = store.fetch(&name(j), info.epoch, sequence).expect("whole").expect("there");
                    assert_eq!(batch, content(j, sequence));
                }
            }
            let mut at = 1;
            while start < 2 && at < 30 {
                let (id, epoch) = store.begin(&name(20 + start), [0; 16], [at as u8; 16], 0, 4096).expect("begun");
                store.append(id, epoch, 1, 1, &content(20, at)).expect("appended");
                store.commit().expect("durable");
                at += 1;
            }
            if start == 0 {
                store.end().expect("ended");
            }
        }
    }
}

/// A file system of its own, taken away at the end.
struct Small(tempfile::TempDir);

impl Small {
    /// Nothing where this process may not mount.
    fn mounted(bytes: u64) -> Option<Self> {
        let small = Small(tempfile::tempdir().expect("a temporary directory"));
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &format!("size={bytes},mode=0700"), "none"]).arg(small.0.path());
        mount.output().is_ok_and(|output| output.status.success()).then_some(small)
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.0.path()).output();
    }
}

/// What is shorter than a reserve is wished to be is kept as one where there is no room for more.
#[test]
fn a_reserve_is_not_let_go_for_being_short() {
    let directory = tempfile::tempdir().expect("a directory");
    let mut medium = Directory::open(&directory.path().join("store")).expect("opens");
    medium.reserve(64 << 10).expect("there is room");
    let bytes = medium.reserved_bytes();
    assert_eq!(bytes, 128 << 10);
    let (_, taken) = medium.create_from_reserve(1, 1000).expect("there is one");
    medium.publish(1).expect("named");
    assert_eq!((taken, medium.reserved_bytes()), (64 << 10, 64 << 10));
    // There are more journals by now, and no disk has room for this.
    medium.reserve(1 << 50).expect_err("no room");
    medium.delete(1).expect("deleted");
    assert_eq!(medium.reserved_bytes(), bytes);
    // A longer one takes the place of a short one.
    medium.create(2, 256 << 10).expect("there is room");
    medium.publish(2).expect("named");
    medium.delete(2).expect("deleted");
    assert_eq!(medium.reserved_bytes(), (64 << 10) + (256 << 10));
    // What is not needed goes.
    medium.reserve(64 << 10).expect("there is room");
    medium.create(3, 256 << 10).expect("there is room");
    medium.publish(3).expect("named");
    let before = medium.reserved_bytes();
    medium.delete(3).expect("deleted");
    assert_eq!((medium.reserved_bytes(), medium.list().expect("listed").len()), (before, 0));
}

/// A client may say any number.
#[test]
fn whoever_writes_can_be_fenced_off_whatever_its_epoch_is() {
    let directory = tempfile::tempdir().expect("a directory");
    let mut store = open(directory.path()).expect("opens");
    assert!(store.begin(&name(0), [1; 16], [2; 16], u64::MAX - 1, 512).is_err(), "the last number");
    let (id, epoch) = store.begin(&name(0), [1; 16], [2; 16], u64::MAX - 2, 512).expect("begun");
    store.append(id, epoch, 1, 1, b"x").expect("it is its writer");
    store.commit().expect("durable");
    let fence = store.take(&name(0)).expect("taken").fence;
    assert!(fence > epoch);
    assert!(matches!(store.append(id, epoch, 2, 1, b"x"), Err(StoreError::Fenced { .. })));
    // Who has recovered it must not be taken for who takes it now.
    assert!(matches!(store.take(&name(0)), Err(StoreError::Refused(_))));
    store.recovered(&name(0), epoch, [2; 16], fence).expect("its recoverer");
}

/// Somebody else fills the disk, and takes whatever is let go: what frees room goes on without end, over starts of the server.
#[test]
fn a_disk_that_others_fill_does_not_use_the_reserves_up() {
    let Some(small) = Small::mounted(3 << 20) else { return eprintln!("left out: this process may not mount") };
    let path = small.0.path().join("store");
    let options = StoreOptions { space_bytes_max: 1 << 30, ..SMALL };
    let open = || Store::open(Directory::open(&path).expect("a directory"), options, 77).expect("opens");
    // With long names, so that soon a longer reserve is wished.
    let name = |number: u32| format!("client{}/{number:0110}", number / 200);
    let mut store = open();
    let begin = |store: &mut Store<Directory>, number: u32| {
        store.begin(&name(number), [1; 16], [2; 16], 0, 4096).map(drop)?;
        store.commit()
    };
    for number in 0..255 {
        begin(&mut store, number).expect("there is room");
    }
    let mut other = std::fs::File::create(small.0.path().join("other")).expect("made");
    let mut fill = || while other.write_all(&[1; 4096]).is_ok() {};
    for number in 255..295 {
        fill();
        begin(&mut store, number).unwrap_or_else(|error| panic!("journal {number}: {error}"));
    }
    for round in 0..300 {
        fill();
        let taken = store.take(&name(round % 295)).map(drop).and_then(|()| store.commit());
        taken.unwrap_or_else(|error| panic!("round {round}: {error}"));
        if round % 60 == 59 {
            store.end().expect("ended");
            drop(store);
            fill();
            store = open();
        }
    }
}
