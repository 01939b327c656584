//! Benchmark: a full 1 GB log, replayed by e2fsck and by amberlog, each on its own copy of the same image, in the same run.
//!
//! ```text
//! cargo run --release -p recovery --example full_log -- [--megabytes 1024] [--layout random|sequential|mixed]
//!     [--rounds 3] [--directory DIR] [--cold]
//! ```
//! Needs mke2fs and e2fsck. Prints each time and the ratio of the medians; checks that both images end up the same but for
//! the superblock and the journal. A third copy gets the same writes with no log read at all: what the disk takes for
//! them bounds what any replay can reach. `--cold` drops the page cache before each run (root only).

use jbd2::build::{LogBuilder, Transaction};
use jbd2::{LogRead, SuperblockEdit};
use recovery::{Access, Disk, FileLog, Options, locate, recover_disk};
use seeded_random::Random;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

const BLOCK: usize = 4096;
/// Blocks from here to the end are free in a fresh file system of this size (flex_bg keeps metadata before).
const FREE_FROM: u64 = 1_600_000;
const FREE_TO: u64 = 2_000_000;

struct Settings {
    megabytes: u32,
    layout: String,
    rounds: usize,
    directory: PathBuf,
    cold: bool,
}

fn settings() -> Settings {
    let mut settings =
        Settings { megabytes: 1024, layout: "random".into(), rounds: 3, directory: std::env::temp_dir(), cold: false };
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().unwrap_or_else(|| panic!("{argument} needs a value"));
        match argument.as_str() {
            "--megabytes" => settings.megabytes = value().parse().expect("a number of megabytes"),
            "--layout" => settings.layout = value(),
            "--rounds" => settings.rounds = value().parse().expect("a number of rounds"),
            "--directory" => settings.directory = value().into(),
            "--cold" => settings.cold = true,
            other => panic!("{other} is no option"),
        }
    }
    settings
}

fn run(command: &mut Command) {
    let output = command.output().expect("the program starts");
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
}

fn make_image(path: &Path, settings: &Settings) -> (usize, u64) {
    let journal = format!("size={}", settings.megabytes);
    run(Command::new("mke2fs").args(["-q", "-F", "-t", "ext4", "-b", "4096", "-J", &journal]).arg(path).arg("8G"));
    let disk = Disk::open(path, Access::Look).expect("the image");
    let located = locate(&disk, None).expect("a file system").remove(0);
    let extents = located.file_system.journal.extents(&located.file_system.superblock);
    let is_apart = |extent: &extfs::JournalExtent| {
        extent.physical >= FREE_TO || extent.physical + u64::from(extent.count) <= FREE_FROM
    };
    assert!(extents.iter().all(is_apart), "the journal is where the home blocks are to be");
    let mut log = FileLog::new(&disk, &located.file_system);
    let mut raw = vec![0; BLOCK];
    log.read(0, &mut raw).expect("the journal superblock");
    // What the kernel turns on at the first mount.
    raw[0x28..0x2c].copy_from_slice(&0x13u32.to_be_bytes());
    raw[0x50] = 4;
    SuperblockEdit::new(&mut raw).expect("a journal").start(1).seal();
    let (superblock, format) = jbd2::Superblock::parse(&raw).expect("a journal");
    let file = File::options().write(true).open(path).expect("the image");
    let place = |position: u32| {
        let extent = extents.iter().rfind(|extent| extent.log <= position).expect("a journal block");
        (extent.physical + u64::from(position - extent.log)) * BLOCK as u64
    };
    let mut builder = LogBuilder::new(format, 1, superblock.sequence);
    let mut homes = homes(&settings.layout);
    let (mut blocks, mut random) = (0, Random::new(1));
    // Long runs are gathered, or making the log would take longer than replaying it.
    let (mut gathered, mut gathered_at) = (Vec::new(), 0);
    loop {
        let transaction = Transaction {
            blocks: (0..2000).map(|_| (homes.next().expect("endless"), content(&mut random))).collect(),
            revokes: Vec::new(),
            seconds: 1_000_000 + u64::from(builder.sequence),
        };
        let left = format.last - builder.position;
        if builder.blocks_needed(&transaction) + 1 >= left as usize {
            break;
        }
        blocks += transaction.blocks.len();
        builder.transaction(&transaction, &mut |position, block| {
            let offset = place(position);
            if offset != gathered_at + gathered.len() as u64 || gathered.len() > 8 << 20 {
                file.write_all_at(&gathered, gathered_at).expect("room for the log");
                gathered.clear();
                gathered_at = offset;
            }
            gathered.extend_from_slice(block);
        });
    }
    file.write_all_at(&gathered, gathered_at).expect("room for the log");
    file.write_all_at(&raw, place(0)).expect("room for the superblock");
    run(Command::new("debugfs").args(["-w", "-R", "feature needs_recovery"]).arg(path));
    file.sync_all().expect("room on the disk");
    (blocks, u64::from(builder.position) * BLOCK as u64)
}

fn content(random: &mut Random) -> Vec<u8> {
    let mut data = vec![0; BLOCK];
    random.fill(&mut data);
    data
}

/// Home blocks without end: scattered, one after the other, or runs of 64 at scattered places.
fn homes(layout: &str) -> Box<dyn Iterator<Item = u64>> {
    let range = FREE_TO - FREE_FROM;
    // A step that has no factor in common with the range visits every block once a round.
    let scattered = (0u64..).map(move |n| FREE_FROM + n.wrapping_mul(104_729) % range);
    match layout {
        "random" => Box::new(scattered),
        "sequential" => Box::new((0u64..).map(move |n| FREE_FROM + n % range)),
        "mixed" => {
            Box::new((0u64..).map(move |n| FREE_FROM + (n / 64).wrapping_mul(104_729 * 64) % (range - 64) + n % 64))
        }
        other => panic!("{other} is no layout; random, sequential and mixed are"),
    }
}

/// The least that any replay has to do: the same blocks written in ascending order, neighbours together, and made durable.
/// No log is read. What a replay takes beyond this is its own.
fn write_only(path: &Path, layout: &str, blocks: usize) -> Duration {
    let mut homes: Vec<u64> = homes(layout).take(blocks).collect();
    homes.sort_unstable();
    homes.dedup();
    let mut data = vec![0; 256 * BLOCK];
    Random::new(2).fill(&mut data);
    let file = File::options().write(true).open(path).expect("the image");
    let started = Instant::now();
    for run in homes.chunk_by(|a, b| *b == *a + 1).flat_map(|run| run.chunks(256)) {
        file.write_all_at(&data[..run.len() * BLOCK], run[0] * BLOCK as u64).expect("room for the blocks");
    }
    file.sync_data().expect("room on the disk");
    started.elapsed()
}

fn copy(from: &Path, to: &Path, cold: bool) {
    run(Command::new("cp").args(["--sparse=always", "--reflink=never"]).arg(from).arg(to));
    run(&mut Command::new("sync"));
    if cold {
        std::fs::write("/proc/sys/vm/drop_caches", "3").expect("root may drop the page cache");
    }
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

fn assert_same(a: &Path, b: &Path) {
    let (a, b) = (File::open(a).expect("an image"), File::open(b).expect("an image"));
    let (mut x, mut y) = (vec![0; BLOCK], vec![0; BLOCK]);
    for block in FREE_FROM..FREE_TO {
        a.read_exact_at(&mut x, block * BLOCK as u64).expect("a block");
        b.read_exact_at(&mut y, block * BLOCK as u64).expect("a block");
        assert!(x == y, "block {block} differs");
    }
}

fn main() {
    let settings = settings();
    let directory = tempfile::tempdir_in(&settings.directory).expect("a directory for the images");
    let path = |name: &str| directory.path().join(name);
    let (original, theirs, ours) = (path("original"), path("e2fsck"), path("amberlog"));
    let (blocks, bytes) = make_image(&original, &settings);
    println!("log: {} MB, {blocks} data blocks, layout {}, csum v3, 64bit", bytes >> 20, settings.layout);
    let (mut e2fsck, mut amberlog, mut least) = (Vec::new(), Vec::new(), Vec::new());
    for round in 1..=settings.rounds {
        copy(&original, &theirs, settings.cold);
        let started = Instant::now();
        run(Command::new("e2fsck").args(["-y", "-E", "journal_only"]).arg(&theirs));
        e2fsck.push(started.elapsed());
        copy(&original, &ours, settings.cold);
        let started = Instant::now();
        let disk = Disk::open(&ours, Access::Write).expect("the image");
        let report = recover_disk(&disk, None, Options::default()).expect("a file system").remove(0).result;
        drop(disk);
        amberlog.push(started.elapsed());
        let report = report.expect("a recovery");
        if round == 1 {
            assert_same(&theirs, &ours);
        }
        copy(&original, &ours, settings.cold);
        least.push(write_only(&ours, &settings.layout, blocks));
        println!(
            "round {round}: e2fsck {:.3} s, amberlog {:.3} s, the writes alone {:.3} s ({} blocks, {} transactions)",
            e2fsck[round - 1].as_secs_f64(),
            amberlog[round - 1].as_secs_f64(),
            least[round - 1].as_secs_f64(),
            report.blocks_written,
            report.transactions
        );
    }
    let (e2fsck, amberlog, least) = (median(e2fsck), median(amberlog), median(least));
    println!(
        "median: e2fsck {:.3} s, amberlog {:.3} s, the writes alone {:.3} s; ratio {:.2}, the most that is possible {:.2}",
        e2fsck.as_secs_f64(),
        amberlog.as_secs_f64(),
        least.as_secs_f64(),
        e2fsck.as_secs_f64() / amberlog.as_secs_f64(),
        e2fsck.as_secs_f64() / least.as_secs_f64()
    );
}
