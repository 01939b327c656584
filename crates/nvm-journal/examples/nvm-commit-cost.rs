//! What a commit costs, against a non-temporal copy of one block with one fence, on the same medium and in the same run.
//!
//! `cargo run --release -p nvm-journal --example nvm-commit-cost [FILE]`: FILE is where the region is made; a new file in
//! /dev/shm if none is named. Each line is a median over rounds that alternate with the copy.

use nvm_journal::medium::{DelayModel, MappedMedium, Medium, MediumFile, OpenOptions};
use nvm_journal::{ATTACHMENT_BYTES, Journal, JournalOptions, Owner};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const BLOCK_BYTES: usize = 4096;
const ROUNDS: usize = 400;
const HOMES: u64 = 1024;

fn medium(path: &Path, delay: Option<DelayModel>) -> MappedMedium {
    let _ = std::fs::remove_file(path);
    let options = OpenOptions { create_bytes: Some(32 << 20), delay, ..OpenOptions::new(path) };
    let medium = MediumFile::open(options).and_then(MediumFile::map);
    medium.unwrap_or_else(|error| panic!("{error}"))
}

fn journal(medium: MappedMedium, checksums: bool) -> Journal<MappedMedium> {
    let owner = Owner {
        file_system: [1; 16],
        journal: [1; 16],
        home_start: 0,
        home_blocks: 1 << 20,
        mark_checksum: 5,
        is_left: false,
        attachment: [0; ATTACHMENT_BYTES],
    };
    let options = JournalOptions { checksums, ..JournalOptions::default() };
    Journal::claim(medium, 0, BLOCK_BYTES as u32, &owner, 0, options).unwrap_or_else(|error| panic!("{error}"))
}

fn median(mut times: Vec<Duration>) -> f64 {
    times.sort_unstable();
    times[times.len() / 2].as_nanos() as f64
}

/// Content that differs from round to round in its first `changed` bytes.
fn content(home: u64, round: usize, changed: usize) -> Vec<u8> {
    let mut content = vec![home as u8; BLOCK_BYTES];
    for (index, byte) in content[..changed].iter_mut().enumerate() {
        *byte = (round * 7 + index) as u8 | 1;
    }
    content
}

/// Nanoseconds that a block takes in a transaction of `blocks`, and that a copy of one takes.
fn cost(path: &Path, delay: Option<DelayModel>, checksums: bool, blocks: u64, changed: usize) -> (f64, f64) {
    let copy_path = path.with_extension("copy");
    let mut copied = medium(&copy_path, delay);
    let mut journal = journal(medium(path, delay), checksums);
    let (mut commits, mut copies) = (Vec::new(), Vec::new());
    for round in 0..ROUNDS + 8 {
        let contents: Vec<(u64, Vec<u8>)> = (0..blocks)
            .map(|index| {
                // Whole blocks are new ones as long as there are some; updates come back to the same few.
                let home = if changed == BLOCK_BYTES { (round as u64 * blocks + index) % HOMES } else { index };
                (home, content(home, round, changed))
            })
            .collect();
        let started = Instant::now();
        for (home, content) in &contents {
            journal.put(*home, content).unwrap_or_else(|error| panic!("{error}"));
        }
        journal.publish().unwrap_or_else(|error| panic!("{error}"));
        let commit = started.elapsed() / blocks as u32;
        let block = &contents[0].1;
        let started = Instant::now();
        copied.stream((round as u64 % HOMES) * BLOCK_BYTES as u64, block);
        copied.fence().unwrap_or_else(|error| panic!("{error}"));
        let copy = started.elapsed();
        // The first rounds fill in the versions that later ones update.
        if round >= 8 {
            commits.push(commit);
            copies.push(copy);
        }
        if journal.room() < 2 * blocks as u32 {
            let all: Vec<u64> = journal.homes().collect();
            if changed == BLOCK_BYTES {
                journal.release(all).unwrap_or_else(|error| panic!("{error}"));
            }
            journal.collect().unwrap_or_else(|error| panic!("{error}"));
        }
    }
    drop((journal, copied));
    let _ = (std::fs::remove_file(path), std::fs::remove_file(&copy_path));
    (median(commits), median(copies))
}

fn main() {
    let path = std::env::args()
        .nth(1)
        .map_or_else(|| PathBuf::from(format!("/dev/shm/nvm-commit-cost-{}", std::process::id())), PathBuf::from);
    println!("medium                  checksums  blocks  changed   a block      a copy   ratio");
    for (name, delay) in [("as it is", None), ("300 ns, 1 GB/s (paper)", Some(DelayModel::PAPER))] {
        for checksums in [true, false] {
            for (blocks, changed) in [(1, BLOCK_BYTES), (16, BLOCK_BYTES), (1, 64), (16, 64)] {
                let (commit, copy) = cost(&path, delay, checksums, blocks, changed);
                let kept = if checksums { "yes" } else { "no" };
                println!(
                    "{name:<23} {kept:<9} {blocks:>7} {changed:>8} {commit:>7.0} ns {copy:>8.0} ns {:>7.2}",
                    commit / copy
                );
            }
        }
    }
}
