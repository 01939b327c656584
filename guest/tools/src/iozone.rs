//! IOzone's write tests, written anew: write (a new file, record after record), re-write (the same again, over it) and
//! random write. NJS's paper runs them on one file of 8 GB.
//!
//! What is new in a record that is written over can be less than all of it (`--change-percent`), which is what the
//! paper varies in its Figure 9 (a). They make traffic; they promise nothing and acknowledge nothing.

use crate::options::Options;
use crate::random::Random;
use crate::{Result, at};
use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::Instant;

const MIB: u64 = 1 << 20;

/// `guest-tools iozone --file F --test write|rewrite|random-write [--mib N] [--record-kib N] [--change-percent N] [--passes N]
/// [--fsync] [--seed N]`: N MiB (64) in records of N KiB (4, IOzone's default); re-write and random-write need the file of a write, write
/// as much as it has in each pass (1), and change that much (100 per cent) of each record. `--fsync` makes each pass durable before
/// the next (IOzone's -e).
pub fn run(mut options: Options) -> Result<()> {
    let path = PathBuf::from(options.required("file")?);
    let test = options.required("test")?;
    let bytes = options.number("mib", 64, 1..=1 << 20)? * MIB;
    let record_bytes = options.number("record-kib", 4, 1..=1 << 14)? * 1024;
    let change_percent = options.number("change-percent", 100, 0..=100)?;
    let passes = options.number("passes", 1, 1..=1000)?;
    let seed = options.number("seed", 1, 0..=u64::MAX)?;
    let fsync = options.flag("fsync");
    options.finish()?;
    let is_write = test == "write";
    if !is_write && test != "rewrite" && test != "random-write" {
        return Err(format!("--test is '{test}'; it must be write, rewrite or random-write"));
    }
    let records = bytes / record_bytes;
    if records == 0 {
        return Err(format!("{bytes} bytes are less than one record of {record_bytes} bytes"));
    }
    let file = OpenOptions::new().write(true).create(is_write).truncate(is_write).open(&path);
    let file = file.map_err(at("open", &path))?;
    let length = file.metadata().map_err(at("look at", &path))?.len();
    if !is_write && length < records * record_bytes {
        return Err(format!(
            "{} has {length} bytes; a write of {} must come before",
            path.display(),
            records * record_bytes
        ));
    }
    let started = Instant::now();
    let mut buffer = vec![0; usize::try_from(record_bytes).expect("bounded above")];
    let changed = usize::try_from(record_bytes * change_percent / 100).expect("less than a record");
    for pass in 0..passes {
        let mut random = Random::of(seed, pass);
        for number in 0..records {
            let record = if test == "random-write" { random.below(records) } else { number };
            // The first version of a record, and over its beginning what this pass changes.
            Random::of(!seed, record).fill(&mut buffer);
            if !is_write {
                Random::of(seed, (pass + 1) << 32 | number).fill(&mut buffer[..changed]);
            }
            file.write_all_at(&buffer, record * record_bytes).map_err(at("write", &path))?;
        }
        if fsync {
            file.sync_all().map_err(at("fsync", &path))?;
        }
    }
    let seconds = started.elapsed().as_secs_f64();
    println!("phase=run records={} seconds={seconds:.3}", records * passes);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(words: &str) -> Result<()> {
        run(Options::parse(words.split(' ').map(str::to_owned))?)
    }

    #[test]
    fn a_rewrite_changes_as_much_of_every_record_as_it_is_told() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        let words = |rest: &str| format!("--file {} --mib 1 --seed 3 {rest}", path.display());
        assert!(call(&words("--test rewrite")).is_err(), "there is no file to write over");
        call(&words("--test write")).unwrap();
        let first = std::fs::read(&path).unwrap();
        assert_eq!(first.len() as u64, MIB);
        let changed = |other: &[u8]| -> Vec<usize> {
            let pairs = first.chunks(4096).zip(other.chunks(4096));
            pairs.map(|(one, two)| one.iter().zip(two).filter(|(a, b)| a != b).count()).collect()
        };
        call(&words("--test rewrite --change-percent 25")).unwrap();
        let quarter = changed(&std::fs::read(&path).unwrap());
        assert!(quarter.iter().all(|&bytes| (900..=1024).contains(&bytes)), "a quarter of each record: {quarter:?}");
        call(&words("--test rewrite --change-percent 0")).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), first, "with nothing changed, it is what the write wrote");
        call(&words("--test random-write --fsync")).unwrap();
        let random = changed(&std::fs::read(&path).unwrap());
        let touched = random.iter().filter(|&&bytes| bytes > 0).count();
        assert!((140..180).contains(&touched), "256 draws of 256 records meet some 162 of them, not {touched}");
        assert!(call(&words("--test read")).is_err());
    }
}
