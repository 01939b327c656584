//! filebench's personalities, with its names and parameters, written anew: file_delete (the 2012 paper's), fileserver and
//! varmail. What they print is one line of `name=value` words, for the host to read.
//!
//! Numbers are those of filebench's own `fileserver.f`, `varmail.f` and `filemicro_delete.f`. A file's size is gamma-distributed
//! with shape 1.5 about a mean (filebench's default for a file set), an append is uniform up to `meanappendsize`
//! (`appendfilerand`), directories hold `meandirwidth` entries each and are nested. A number of flows takes the place of a time. They promise
//! nothing and acknowledge nothing; varmail's fsyncs are timed one by one.

use crate::latency::Latencies;
use crate::options::Options;
use crate::random::Random;
use crate::{Result, at};
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex};
use std::time::Instant;

const KIB: u64 = 1 << 10;
const IO_BYTES: usize = 1 << 20;

/// A personality's parameters, as in filebench's own workload files unless options say otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Personality {
    name: &'static str,
    files: u64,
    directory_width: u64,
    mean_file_kib: u64,
    append_kib_max: u64,
    threads: u64,
    /// Which part of the files is there at the start, in per cent.
    preallocated_percent: u64,
}

const PERSONALITIES: [Personality; 3] = [
    // 40,000 files in 100 directories, 16 KB, 16 threads: the paper, section 5.1.
    Personality {
        name: "file_delete",
        files: 40_000,
        directory_width: 400,
        mean_file_kib: 16,
        append_kib_max: 0,
        threads: 16,
        preallocated_percent: 100,
    },
    Personality {
        name: "fileserver",
        files: 10_000,
        directory_width: 20,
        mean_file_kib: 128,
        append_kib_max: 16,
        threads: 50,
        preallocated_percent: 80,
    },
    Personality {
        name: "varmail",
        files: 1_000,
        directory_width: 1_000_000,
        mean_file_kib: 16,
        append_kib_max: 16,
        threads: 16,
        preallocated_percent: 80,
    },
];

/// `guest-tools filebench --personality file_delete|fileserver|varmail --directory D --phase create|run [--files N]
/// [--threads N] [--flows N] [--seed N]`: `create` makes the initial files, `run` deletes all of them (file_delete) or
/// goes through the personality's flow N times (1000), over all threads.
pub fn run(mut options: Options) -> Result<()> {
    let name = options.required("personality")?;
    let personality = PERSONALITIES.into_iter().find(|other| other.name == name).ok_or_else(|| {
        format!("--personality is '{name}'; it must be one of {}", PERSONALITIES.map(|other| other.name).join(", "))
    })?;
    let directory = PathBuf::from(options.required("directory")?);
    let phase = options.required("phase")?;
    let files = options.number("files", personality.files, 1..=1_000_000)?;
    let threads = options.number("threads", personality.threads, 1..=256)?;
    let flows = options.number("flows", 1000, 1..=100_000_000)?;
    let seed = options.number("seed", 1, 0..=u64::MAX)?;
    options.finish()?;
    let set = FileSet::new(&directory, Personality { files, threads, ..personality }, seed);
    match (phase.as_str(), name.as_str()) {
        ("create", _) => set.create(),
        ("run", "file_delete") => set.delete_all(),
        ("run", _) => set.flow(flows),
        _ => Err(format!("--phase is '{phase}'; it must be create or run")),
    }
}

/// A file's place in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Absent,
    There,
    Busy,
}

struct FileSet {
    directory: PathBuf,
    personality: Personality,
    seed: u64,
    states: Mutex<Vec<State>>,
    changed: Condvar,
    bytes: Vec<u8>,
}

impl FileSet {
    fn new(directory: &Path, personality: Personality, seed: u64) -> Self {
        let mut bytes = vec![0; IO_BYTES];
        Random::new(seed).fill(&mut bytes);
        let there = personality.files * personality.preallocated_percent / 100;
        let states = (0..personality.files).map(|file| if file < there { State::There } else { State::Absent });
        Self {
            directory: directory.to_owned(),
            personality,
            seed,
            states: Mutex::new(states.collect()),
            changed: Condvar::new(),
            bytes,
        }
    }

    /// Files lie in directories of `directory_width` files, these in directories of as many, until one is enough.
    fn path(&self, file: u64) -> PathBuf {
        self.directory_of(file).join(file.to_string())
    }

    fn directory_of(&self, file: u64) -> PathBuf {
        let width = self.personality.directory_width;
        let mut numbers = vec![file / width];
        let mut last = (self.personality.files - 1) / width;
        while last >= width {
            last /= width;
            numbers.push(numbers[numbers.len() - 1] / width);
        }
        numbers.iter().rev().fold(self.directory.clone(), |path, number| path.join(format!("d{number}")))
    }

    fn create(&self) -> Result<()> {
        let started = Instant::now();
        let mut written = 0;
        for file in (0..self.personality.files).step_by(usize::try_from(self.personality.directory_width).unwrap_or(1))
        {
            let path = self.directory_of(file);
            std::fs::create_dir_all(&path).map_err(at("create", &path))?;
        }
        for file in 0..self.personality.files * self.personality.preallocated_percent / 100 {
            let mut random = Random::of(self.seed, file);
            written += self.write_whole(file, gamma_bytes(self.personality.mean_file_kib, &mut random))?;
        }
        println!("phase=create bytes={written} seconds={:.2}", started.elapsed().as_secs_f64());
        Ok(())
    }

    fn write_whole(&self, file: u64, bytes: u64) -> Result<u64> {
        let path = self.path(file);
        let mut opened = File::create(&path).map_err(at("create", &path))?;
        self.append(&mut opened, bytes, &path)?;
        Ok(bytes)
    }

    fn append(&self, file: &mut File, bytes: u64, path: &Path) -> Result<()> {
        let mut left = bytes;
        while left > 0 {
            let now = usize::try_from(left).unwrap_or(IO_BYTES).min(IO_BYTES);
            file.write_all(&self.bytes[..now]).map_err(at("write", path))?;
            left -= now as u64;
        }
        Ok(())
    }

    /// Every thread takes the next file; so filebench's `deletefile` threads do.
    fn delete_all(&self) -> Result<()> {
        let started = Instant::now();
        let next = AtomicU64::new(0);
        self.in_threads(|_| {
            loop {
                let file = next.fetch_add(1, Ordering::Relaxed);
                if file >= self.personality.files {
                    return Ok(());
                }
                let path = self.path(file);
                std::fs::remove_file(&path).map_err(at("remove", &path))?;
            }
        })?;
        let seconds = started.elapsed().as_secs_f64();
        println!("phase=run operations={} seconds={seconds:.3} delete_seconds={seconds:.3}", self.personality.files);
        Ok(())
    }

    fn flow(&self, flows: u64) -> Result<()> {
        let started = Instant::now();
        let next = AtomicU64::new(0);
        let (fsyncs, operations) = (Mutex::new(Latencies::new()), AtomicU64::new(0));
        self.in_threads(|thread| {
            let mut random = Random::of(self.seed, 1 << 40 | thread);
            let mut times = Latencies::new();
            while next.fetch_add(1, Ordering::Relaxed) < flows {
                let count = match self.personality.name {
                    "varmail" => self.varmail(&mut random, &mut times)?,
                    _ => self.fileserver(&mut random)?,
                };
                operations.fetch_add(count, Ordering::Relaxed);
            }
            fsyncs.lock().expect("no panic under this lock").merge(times);
            Ok(())
        })?;
        let seconds = started.elapsed().as_secs_f64();
        let rate = flows as f64 / seconds.max(1e-6);
        println!(
            "phase=run flows={flows} operations={} seconds={seconds:.3} flows_per_second={rate:.2}{}",
            operations.into_inner(),
            fsyncs.into_inner().expect("no panic under this lock").words("fsync")
        );
        Ok(())
    }

    /// What `appendfilerand` appends: anything from one byte to its size.
    fn append_bytes(&self, random: &mut Random) -> u64 {
        1 + random.below(self.personality.append_kib_max * KIB)
    }

    /// deletefile; createfile, appendfilerand, fsync; openfile, readwholefile, appendfilerand, fsync; openfile,
    /// readwholefile.
    fn varmail(&self, random: &mut Random, fsyncs: &mut Latencies) -> Result<u64> {
        self.delete_one(random)?;
        self.with_one(State::Absent, random, |random, path| {
            let mut file = File::create(path).map_err(at("create", path))?;
            self.append(&mut file, self.append_bytes(random), path)?;
            fsync(&file, path, fsyncs)?;
            Ok(State::There)
        })?;
        self.with_one(State::There, random, |random, path| {
            read_whole(path)?;
            let mut file = OpenOptions::new().append(true).open(path).map_err(at("open", path))?;
            self.append(&mut file, self.append_bytes(random), path)?;
            fsync(&file, path, fsyncs)?;
            Ok(State::There)
        })?;
        self.with_one(State::There, random, |_, path| read_whole(path).map(|()| State::There))?;
        Ok(13)
    }

    /// createfile, writewholefile; openfile, appendfilerand; openfile, readwholefile; deletefile; statfile.
    fn fileserver(&self, random: &mut Random) -> Result<u64> {
        self.with_one(State::Absent, random, |random, path| {
            let bytes = gamma_bytes(self.personality.mean_file_kib, random);
            let mut file = File::create(path).map_err(at("create", path))?;
            self.append(&mut file, bytes, path)?;
            Ok(State::There)
        })?;
        self.with_one(State::There, random, |random, path| {
            let mut file = OpenOptions::new().append(true).open(path).map_err(at("open", path))?;
            self.append(&mut file, self.append_bytes(random), path)?;
            Ok(State::There)
        })?;
        self.with_one(State::There, random, |_, path| read_whole(path).map(|()| State::There))?;
        self.delete_one(random)?;
        self.with_one(State::There, random, |_, path| {
            std::fs::metadata(path).map_err(at("look at", path)).map(|_| State::There)
        })?;
        Ok(11)
    }

    fn delete_one(&self, random: &mut Random) -> Result<()> {
        self.with_one(State::There, random, |_, path| {
            std::fs::remove_file(path).map_err(at("remove", path)).map(|()| State::Absent)
        })
    }

    /// Does something with a file in that state that nobody else is busy with; waits if there is none.
    fn with_one(
        &self,
        wanted: State,
        random: &mut Random,
        work: impl FnOnce(&mut Random, &Path) -> Result<State>,
    ) -> Result<()> {
        let file = {
            let mut states = self.states.lock().expect("no panic under this lock");
            loop {
                let start = random.below(self.personality.files);
                let found = (0..self.personality.files)
                    .map(|step| (start + step) % self.personality.files)
                    .find(|&file| states[usize::try_from(file).unwrap_or(0)] == wanted);
                if let Some(file) = found {
                    states[usize::try_from(file).unwrap_or(0)] = State::Busy;
                    break file;
                }
                states = self.changed.wait(states).expect("no panic under this lock");
            }
        };
        let path = self.path(file);
        let after = work(random, &path)?;
        self.states.lock().expect("no panic under this lock")[usize::try_from(file).unwrap_or(0)] = after;
        self.changed.notify_all();
        Ok(())
    }

    fn in_threads(&self, work: impl Fn(u64) -> Result<()> + Sync) -> Result<()> {
        std::thread::scope(|scope| {
            let work = &work;
            let threads: Vec<_> =
                (0..self.personality.threads).map(|thread| scope.spawn(move || work(thread))).collect();
            threads.into_iter().try_for_each(|thread| thread.join().map_err(|_| "a thread panicked".to_owned())?)
        })
    }
}

fn fsync(file: &File, path: &Path, latencies: &mut Latencies) -> Result<()> {
    latencies.time(|| file.sync_all()).map_err(at("fsync", path))
}

fn read_whole(path: &Path) -> Result<()> {
    let mut file = File::open(path).map_err(at("open", path))?;
    let mut buffer = vec![0; 64 << 10];
    while file.read(&mut buffer).map_err(at("read", path))? > 0 {}
    Ok(())
}

/// Gamma with shape 1.5: an exponential and half the square of a normal (that is shape 0.5), times a scale.
fn gamma_bytes(mean_kib: u64, random: &mut Random) -> u64 {
    let mut uniform = || (random.below(1 << 53) as f64 + 1.0) / (1u64 << 53) as f64;
    let exponential = -uniform().ln();
    let normal = (-2.0 * uniform().ln()).sqrt() * (std::f64::consts::TAU * uniform()).cos();
    let mean_bytes = (mean_kib * KIB) as f64;
    (((exponential + normal * normal / 2.0) / 1.5 * mean_bytes) as u64).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(words: &str) -> Result<()> {
        run(Options::parse(words.split(' ').map(str::to_owned)).unwrap())
    }

    #[test]
    fn sizes_have_the_mean_of_the_personality() {
        let mut random = Random::new(3);
        let total: u64 = (0..40_000).map(|_| gamma_bytes(16, &mut random)).sum();
        let mean = total / 40_000;
        assert!((15_900..16_900).contains(&mean), "a mean of {mean} bytes instead of 16384");
    }

    #[test]
    fn numbers_are_filebenchs_own() {
        let of = |name: &str| PERSONALITIES.into_iter().find(|personality| personality.name == name).unwrap();
        let numbers = |name: &str| {
            let Personality {
                files,
                directory_width,
                mean_file_kib,
                append_kib_max,
                threads,
                preallocated_percent,
                ..
            } = of(name);
            [files, directory_width, mean_file_kib, append_kib_max, threads, preallocated_percent]
        };
        // $nfiles, $meandirwidth, $meanfilesize, $meanappendsize, $nthreads, prealloc
        assert_eq!(numbers("fileserver"), [10_000, 20, 128, 16, 50, 80]);
        assert_eq!(numbers("varmail"), [1_000, 1_000_000, 16, 16, 16, 80]);
        // The 2012 paper: 40,000 files in 100 directories, 16 KB, 16 threads.
        assert_eq!(numbers("file_delete"), [40_000, 400, 16, 0, 16, 100]);
        let set = FileSet::new(Path::new("/set"), of("fileserver"), 1);
        assert_eq!(set.path(0), Path::new("/set/d0/d0/d0/0"));
        assert_eq!(set.path(9_999), Path::new("/set/d1/d24/d499/9999"));
        let mut random = Random::new(3);
        let total: u64 = (0..10_000).map(|_| set.append_bytes(&mut random)).sum();
        assert!(
            (8_000..8_400).contains(&(total / 10_000)),
            "appends are uniform up to 16 KiB: a mean of {}",
            total / 10_000
        );
    }

    #[test]
    fn every_personality_runs_and_deletion_leaves_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path().display();
        call(&format!("--personality file_delete --directory {root}/d --phase create --files 500")).unwrap();
        let count = |name: &str| std::fs::read_dir(directory.path().join(name)).unwrap().count();
        assert_eq!((count("d"), count("d/d0"), count("d/d1")), (2, 400, 100));
        call(&format!("--personality file_delete --directory {root}/d --phase run --files 500")).unwrap();
        assert_eq!((count("d/d0"), count("d/d1")), (0, 0));
        for name in ["varmail", "fileserver"] {
            let words = format!("--personality {name} --directory {root}/{name} --files 40 --threads 8");
            call(&format!("{words} --phase create")).unwrap();
            call(&format!("{words} --phase run --flows 50")).unwrap();
        }
        // 40 files in directories of 20.
        assert_eq!(count("fileserver"), 2);
        assert!(call(&format!("--personality webserver --directory {root} --phase run")).is_err());
    }
}
