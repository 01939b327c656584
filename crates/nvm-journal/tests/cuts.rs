//! A file that was cut in several ways, one after the other: whoever opens a part of it never writes over a region that owes something,
//! whichever way that was cut; a region that was given back is in nobody's way; and what a guest commits is no region.

use nvm_journal::medium::{MappedMedium, Medium, MediumFile, OpenOptions, RegionChoice};
use nvm_journal::{ATTACHMENT_BYTES, Error, Found, Journal, JournalOptions, Owner};
use std::path::Path;
use std::sync::Mutex;

const FILE_BYTES: u64 = 16 << 20;
const BLOCK_BYTES: usize = 4096;

/// Warnings, as they were logged.
static LINES: Mutex<Vec<String>> = Mutex::new(Vec::new());

struct Lines;

impl log::Log for Lines {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        LINES.lock().expect("no panic under this lock").push(record.args().to_string());
    }

    fn flush(&self) {}
}

fn owner() -> Owner {
    Owner {
        file_system: [1; 16],
        journal: [2; 16],
        home_start: 4096,
        home_blocks: 1000,
        mark_checksum: 5,
        is_left: false,
        attachment: [9; ATTACHMENT_BYTES],
    }
}

fn choice(cut: &str) -> RegionChoice {
    cut.parse().expect("a region")
}

fn open(path: &Path, cut: &str) -> Result<MediumFile, Error> {
    MediumFile::open(OpenOptions { region: choice(cut), create_bytes: Some(FILE_BYTES), ..OpenOptions::new(path) })
}

fn claim(path: &Path, cut: &str) -> Result<Journal<MappedMedium>, Error> {
    let file = open(path, cut)?;
    let offset = file.offset();
    Journal::claim(file.map()?, offset, BLOCK_BYTES as u32, &owner(), 7, JournalOptions::default())
}

/// Claims a region, commits a block with this content, and dies.
fn commit_and_die(path: &Path, cut: &str, content: &[u8]) {
    let mut journal = claim(path, cut).expect("free");
    journal.put(5, content).expect("room");
    journal.publish().expect("durable");
}

/// Has somebody recover what a region holds.
fn give_back(path: &Path, cut: &str) {
    let mut medium = open(path, cut).expect("it is its own").map().expect("mapped");
    let found = Found::read(medium.bytes()).expect("whole").expect("a region");
    found.verify(medium.bytes()).expect("whole");
    assert_eq!(found.latest.len(), 1, "region {cut} holds its block");
    nvm_journal::forget(&mut medium).expect("given back");
}

#[track_caller]
fn assert_refused(path: &Path, cut: &str, why: &[&str]) {
    let before = std::fs::read(path).expect("the file");
    let error = claim(path, cut).expect_err("something is owed there");
    let sentence = error.to_string();
    assert!(error.is_refusal() && why.iter().all(|why| sentence.contains(why)), "region {cut}: {sentence}");
    assert!(std::fs::read(path).expect("the file") == before, "region {cut}: something was changed");
}

#[test]
fn a_region_that_owes_something_is_never_written_over_by_one_of_another_cut() {
    // Within, around, across.
    for (owed, asked) in [
        ("1/2", "0/1"),
        ("1/4", "0/2"),
        ("3/4", "1/2"),
        ("0/1", "1/2"),
        ("0/1", "63/64"),
        ("0/2", "1/4"),
        ("1/3", "0/2"),
        ("1/2", "2/3"),
        ("2/5", "1/2"),
        ("0/64", "0/1"),
    ] {
        let directory = tempfile::tempdir_in("/dev/shm").expect("tmpfs");
        let path = directory.path().join("region");
        let places = [owed, asked].map(|cut| choice(cut).place(FILE_BYTES).expect("a part"));
        let is_apart = places[0].0 + places[0].1 <= places[1].0 || places[1].0 + places[1].1 <= places[0].0;
        commit_and_die(&path, owed, &[3; BLOCK_BYTES]);
        if is_apart {
            claim(&path, asked).unwrap_or_else(|error| panic!("{asked} beside {owed}: {error}"));
            give_back(&path, owed);
            continue;
        }
        let is_read_by_who_asks = places[0].0 == places[1].0;
        let why: &[&str] = match is_read_by_who_asks {
            true if places[0].1 > places[1].1 => &["give it its size back", "nvm-region=INDEX/COUNT"],
            true => &["holds committed blocks of a file system", "amberlog recover"],
            false => &["overlaps with its region", "nvm-region=INDEX/COUNT", "amberlog recover --disk IMAGE --nvm"],
        };
        assert_refused(&path, asked, why);
        // It is in nobody's way when it was given back, …
        give_back(&path, owed);
        claim(&path, asked)
            .unwrap_or_else(|error| panic!("{asked} after {owed}: {error}"))
            .give_back()
            .expect("given back")
            .expect("it works");
        // … and neither is the other one then.
        commit_and_die(&path, owed, &[4; BLOCK_BYTES]);
        give_back(&path, owed);
    }
}

#[test]
fn the_sentence_names_the_region_that_is_in_the_way() {
    let directory = tempfile::tempdir_in("/dev/shm").expect("tmpfs");
    let path = directory.path().join("region");
    commit_and_die(&path, "1/2", &[3; BLOCK_BYTES]);
    assert_refused(
        &path,
        "0/1",
        &["region 0/1 of", "its region 1/2 from byte 8388608 to 16777216", "--nvm-region 1/2)"],
    );
    // One whose superblock is damaged, or another version's, is not written over either.
    let mut bytes = std::fs::read(&path).expect("the file");
    bytes[8 << 20 | 0x10] ^= 1;
    std::fs::write(&path, &bytes).expect("written");
    assert_refused(&path, "0/1", &["cannot be told", "the 4096 bytes from byte 8388608 on with zeros"]);
    bytes[8 << 20..(8 << 20) + 4096].fill(0);
    std::fs::write(&path, &bytes).expect("written");
    claim(&path, "0/1").expect("as the sentence says");
}

#[test]
fn what_a_guest_commits_is_no_region() {
    let directory = tempfile::tempdir_in("/dev/shm").expect("tmpfs");
    let (path, other) = (directory.path().join("region"), directory.path().join("other"));
    commit_and_die(&other, "0/1", &[3; BLOCK_BYTES]);
    let superblock = std::fs::read(&other).expect("the file")[..BLOCK_BYTES].to_vec();
    // A guest has it in all of its blocks, wherever a region could begin in them.
    let mut journal = claim(&path, "0/2").expect("free");
    while journal.room() > 0 {
        journal.put(u64::from(journal.room()), &superblock).expect("room");
    }
    journal.publish().expect("durable");
    let blocks = journal.len();
    drop(journal);
    claim(&path, "1/2").expect("nobody's").give_back().expect("given back");
    let mut medium = open(&path, "0/2").expect("it is its own").map().expect("mapped");
    let found = Found::read(medium.bytes()).expect("whole").expect("a region");
    found.verify(medium.bytes()).expect("whole");
    assert_eq!(found.latest.len(), blocks);
    nvm_journal::forget(&mut medium).expect("given back");
    drop(medium);
    for cut in ["1/2", "0/2"] {
        claim(&path, cut).unwrap_or_else(|error| panic!("{cut}: {error}"));
    }
}

/// An earlier amberlog let a region be claimed around one that owed something. A guest can have written the same: it is put out, and that is
/// said.
#[test]
fn what_looks_like_a_region_that_owes_something_is_not_put_out_without_a_word() {
    log::set_logger(&Lines).expect("the only one");
    log::set_max_level(log::LevelFilter::Warn);
    let said = |place: &str| {
        let lines = LINES.lock().expect("no panic under this lock");
        lines.iter().filter(|line| line.contains(place)).cloned().collect::<Vec<_>>()
    };
    // No other test here has these places.
    for (cut, begin, is_owed) in [("5/8", 10 << 20, true), ("3/8", 6 << 20, false)] {
        let directory = tempfile::tempdir_in("/dev/shm").expect("tmpfs");
        let path = directory.path().join("region");
        commit_and_die(&path, cut, &[3; BLOCK_BYTES]);
        if !is_owed {
            give_back(&path, cut);
        }
        let within = std::fs::read(&path).expect("the file");
        std::fs::remove_file(&path).expect("removed");
        commit_and_die(&path, "0/1", &[4; BLOCK_BYTES]);
        let mut bytes = std::fs::read(&path).expect("the file");
        let part = begin..begin + (2 << 20);
        bytes[part.clone()].copy_from_slice(&within[part]);
        std::fs::write(&path, &bytes).expect("written");
        give_back(&path, "0/1");
        let said = said(&format!("at byte {begin} of its device or file"));
        assert_eq!(said.len(), usize::from(is_owed), "{said:?}");
        let is_named = |line: &String| line.contains("file system 01010101-0101-0101-0101-010101010101");
        assert!(said.iter().all(is_named), "{said:?}");
        claim(&path, cut).expect("it is in nobody's way").give_back().expect("given back");
    }
}
