//! The database load: transactions over a table of pages, each made durable in a write-ahead log
//! and then acknowledged, with a checkpoint now and then. The format is [`crate::table`]'s. At the end it tells how long
//! the transactions took, checkpoints included.

use crate::latency::Latencies;
use crate::options::Options;
use crate::report::{CHANNEL, Report};
use crate::table::{FRAME, PAGE, Table};
use crate::{Result, at};
use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Instant;

/// The names of table and log in the directory of the database.
pub const FILES: [&str; 2] = ["table", "log"];

/// `guest-tools database --directory D --seed N [--pages N] [--checkpoint TRANSACTIONS]
/// [--count N | --forever] [--stream NAME] [--report FILE]`.
pub fn run(mut options: Options) -> Result<()> {
    let directory = options.required("directory")?;
    let seed = options.number("seed", 1, 0..=u64::MAX)?;
    let pages = options.number("pages", 500, 1..=1 << 20)?;
    let checkpoint = options.number("checkpoint", 50, 1..=1_000_000)?;
    let count = options.number("count", 200, 1..=u64::MAX)?;
    let count = if options.flag("forever") { u64::MAX } else { count };
    let stream = options.text("stream").unwrap_or_else(|| "database".to_owned());
    let channel = options.text("report").unwrap_or_else(|| CHANNEL.to_owned());
    options.finish()?;

    let mut report = Report::open(&channel, &stream)?;
    let directory = Path::new(&directory);
    std::fs::create_dir_all(directory).map_err(at("create", directory))?;
    let [table_path, log_path] = FILES.map(|name| directory.join(name));
    let table_file = File::create(&table_path).map_err(at("create", &table_path))?;
    let log_file = File::create(&log_path).map_err(at("create", &log_path))?;
    for path in [Some(directory), directory.parent()].into_iter().flatten() {
        let opened = File::open(path).map_err(at("open", path))?;
        opened.sync_all().map_err(at("fsync", path))?;
    }

    let table = Table { seed, pages };
    let started = Instant::now();
    let mut latencies = Latencies::new();
    let mut salt = 1u32;
    let mut log_end = 0u64;
    let mut owed: BTreeMap<u64, u64> = BTreeMap::new();
    for transaction in 1..=count {
        let begun = Instant::now();
        let touched = table.touched(transaction);
        let mut frames = Vec::with_capacity(touched.len() * FRAME);
        for (index, &page) in touched.iter().enumerate() {
            frames.extend(table.frame(salt, page, transaction, index + 1 == touched.len()));
            owed.insert(page, transaction);
        }
        log_file.write_all_at(&frames, log_end).map_err(at("write", &log_path))?;
        log_file.sync_data().map_err(at("fdatasync", &log_path))?;
        log_end += frames.len() as u64;
        report.acknowledge(transaction)?;
        if transaction % checkpoint == 0 {
            for (page, version) in std::mem::take(&mut owed) {
                let bytes = table.page(page, version);
                table_file.write_all_at(&bytes, page * PAGE as u64).map_err(at("write", &table_path))?;
            }
            table_file.sync_all().map_err(at("fsync", &table_path))?;
            (log_end, salt) = (0, salt.wrapping_add(1));
        }
        // A load that goes on for ever is killed, and must not grow with its time.
        if count != u64::MAX {
            latencies.add(begun.elapsed());
        }
    }
    let seconds = started.elapsed().as_secs_f64();
    let rate = count as f64 / seconds.max(1e-6);
    println!(
        "phase=run transactions={count} seconds={seconds:.3} transactions_per_second={rate:.2}{}",
        latencies.words("transaction")
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_load_leaves_is_a_good_database() {
        let directory = tempfile::tempdir().unwrap();
        let channel = directory.path().join("report");
        File::create(&channel).unwrap();
        for count in ["1", "49", "120"] {
            let root = directory.path().join(count);
            let words = format!(
                "--directory {} --seed 5 --pages 60 --checkpoint 50 --count {count} --report {}",
                root.display(),
                channel.display()
            );
            run(Options::parse(words.split(' ').map(str::to_owned)).unwrap()).unwrap();
            let [table, log] = FILES.map(|name| std::fs::read(root.join(name)).unwrap());
            let count = count.parse().unwrap();
            assert_eq!(Table { seed: 5, pages: 60 }.check(&table, &log, Some(count)), Ok(count));
        }
    }
}
