//! The bodies of the fuzz targets on the stable compiler: over the kept corpus, and over as many mutations of it as
//! `AMBERLOG_FUZZ_ITERATIONS` says, the same ones every time. Part of the tests that include it, not of the targets.
//!
//! The kept corpus is fuzz/corpus/TARGET.tar.zst. An input that fails is written to a file that the panic names, which the
//! target itself takes too: `cargo fuzz run TARGET FILE`. One that does not end ends the process.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

/// No input may take this long, by far, however busy the machine is.
const HANGS: Duration = Duration::from_secs(120);

fn archive(target: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(format!("{target}.tar.zst"))
}

/// The kept inputs of a target, in the order of their names.
pub fn corpus(target: &str) -> Vec<Vec<u8>> {
    let archive = archive(target);
    let directory = tempfile::tempdir().expect("a temporary directory");
    let tar = Command::new("tar").arg("--zstd").arg("-xf").arg(&archive).arg("-C").arg(directory.path()).status();
    assert!(tar.expect("tar and zstd are installed").success(), "{} cannot be unpacked", archive.display());
    let mut paths: Vec<PathBuf> = std::fs::read_dir(directory.path())
        .expect("a directory")
        .map(|entry| entry.expect("an entry").path())
        .collect();
    paths.sort();
    assert!(paths.len() >= 4, "{target}: the corpus is gone");
    paths.iter().map(|path| std::fs::read(path).expect("a corpus file")).collect()
}

/// Puts `inputs` (name and content) where `scripts/fuzz.sh` finds them, to be added to the kept corpus.
pub fn write_seeds(target: &str, inputs: Vec<(&str, Vec<u8>)>) {
    let directory = archive(target).with_file_name(target);
    std::fs::create_dir_all(&directory).expect("a directory");
    for (name, data) in inputs {
        std::fs::write(directory.join(name), data).expect("room");
    }
}

/// A sequence of numbers that is the same on every machine. Of this file alone, as the mutations were tried with it.
pub struct Random(u64);

impl Random {
    /// A number below `below`.
    pub fn next(&mut self, below: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % below.max(1) as u64) as usize
    }
}

/// Changes a few bytes, mostly where structures begin, copies pieces over others, or cuts the end off.
fn mutate(data: &mut Vec<u8>, random: &mut Random) {
    for _ in 0..=random.next(4) {
        let length = data.len();
        // Fields are near the beginnings of blocks.
        let near = |random: &mut Random| (random.next(length / 1024 + 1) * 1024 + random.next(96)).min(length - 1);
        let at = if random.next(3) == 0 { random.next(length) } else { near(random) };
        match random.next(8) {
            0 => data[at] ^= 1 << random.next(8),
            1 => data[at] = [0, 1, 0x7f, 0x80, 0xff][random.next(5)],
            2 => data[at] = random.next(256) as u8,
            3 => {
                let from = near(random);
                let count = (4 << random.next(9)).min(length - at.max(from));
                data.copy_within(from..from + count, at);
            }
            4 => {
                let count = (1 << random.next(11)).min(length - at);
                data[at..at + count].fill(0);
            }
            5 => data[0] = random.next(256) as u8,
            6 => {
                // The largest number of some width.
                let count = (1 << random.next(4)).min(length - at);
                data[at..at + count].fill(0xff);
            }
            _ if random.next(8) == 0 => data.truncate(at.max(16)),
            _ => data[at] = data[at].wrapping_add(random.next(5) as u8).wrapping_sub(2),
        }
    }
}

/// How many mutations: as `AMBERLOG_FUZZ_ITERATIONS` says, or else this many.
pub fn iterations(otherwise: usize) -> usize {
    std::env::var("AMBERLOG_FUZZ_ITERATIONS").map_or(otherwise, |text| text.parse().expect("a number"))
}

/// Runs `body` over the kept corpus and over mutations of it, as many as `iterations` says.
pub fn exercise(target: &str, otherwise: usize, body: &dyn Fn(&[u8])) {
    let mutations = iterations(otherwise);
    let corpus = corpus(target);
    let kept = std::env::temp_dir().join(format!("amberlog-fuzz-{target}-{}", std::process::id()));
    let (started, starts) = channel::<()>();
    let shown = kept.clone();
    let watch = std::thread::spawn(move || {
        while match starts.recv_timeout(HANGS) {
            Ok(()) => true,
            Err(RecvTimeoutError::Disconnected) => false,
            Err(RecvTimeoutError::Timeout) => {
                eprintln!("an input takes longer than {} s; see {}", HANGS.as_secs(), shown.display());
                std::process::abort();
            }
        } {}
    });
    let mut random = Random(0x2545_f491_4f6c_dd1d);
    for number in 0..corpus.len() + mutations {
        let mut data = corpus.get(number).cloned().unwrap_or_else(|| corpus[random.next(corpus.len())].clone());
        if number >= corpus.len() && !data.is_empty() {
            mutate(&mut data, &mut random);
        }
        started.send(()).expect("the watch is there");
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| body(&data)));
        if let Err(panic) = result {
            std::fs::write(&kept, &data).expect("room for the input");
            eprintln!("{target}: input {number} fails; it is in {}", kept.display());
            std::panic::resume_unwind(panic);
        }
    }
    drop(started);
    watch.join().expect("the watch does not panic");
}
