//! A load on the real RocksDB: its own `db_bench`, of Debian's package rocksdb-tools, with its write-ahead log made durable after each write
//! (`--sync=1`): keys of 16 bytes in random order, values of 100.
//!
//! A write's time is what db_bench says of it: it counts in buckets some tenths wide, so its percentiles are drawn between their ends.

use crate::Result;
use crate::options::Options;
use std::fmt::Write;
use std::process::{Command, Stdio};

const BENCHMARK: &str = "fillrandom";

/// `guest-tools rocksdb --directory D [--writes N] [--seed N]`: makes a database of so many writes.
pub fn run(mut options: Options) -> Result<()> {
    let directory = options.required("directory")?;
    let writes = options.number("writes", 1000, 1..=100_000_000)?;
    let seed = options.number("seed", 1, 1..=i64::MAX as u64)?;
    options.finish()?;
    let mut command = Command::new("db_bench");
    command.arg(format!("--db={directory}")).arg(format!("--wal_dir={directory}"));
    command.args([format!("--benchmarks={BENCHMARK}"), format!("--num={writes}"), format!("--seed={seed}")]);
    command.args(["--sync=1", "--value_size=100", "--threads=1", "--histogram=1", "--compression_type=none"]);
    let output = command.stdin(Stdio::null()).output();
    let output =
        output.map_err(|error| format!("cannot run db_bench (Debian's package rocksdb-tools has it): {error}"))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    if !output.status.success() {
        return Err(format!(
            "db_bench ended with {}: {}",
            output.status,
            String::from_utf8_lossy(&output.stderr).trim_end()
        ));
    }
    let told = told(&text).ok_or_else(|| format!("db_bench told no times of its writes, but: {text}"))?;
    if told.count != writes {
        return Err(format!("db_bench did {} writes of {writes}", told.count));
    }
    println!("phase=run writes={writes}{}", told.words);
    Ok(())
}

/// What db_bench tells of its operations.
#[derive(Debug, PartialEq, Eq)]
struct Told {
    count: u64,
    /// As [`crate::latency::Latencies::words`] has them.
    words: String,
}

/// Of its histogram: a line "Count: N …", one "Percentiles: P50: …", and one for each bucket, "[ LOW, HIGH ] COUNT SHARE% SUM%", in µs.
fn told(text: &str) -> Option<Told> {
    let after = |line: &str, name: &str| line.split_once(name)?.1.split_whitespace().next()?.parse::<f64>().ok();
    let line = |beginning: &str| text.lines().find(|line| line.trim_start().starts_with(beginning));
    let counts = line("Count:")?;
    let percentiles = line("Percentiles:")?;
    let count = after(counts, "Count:")?;
    let mut words = String::new();
    for (name, called) in [("P50:", "p50"), ("P99:", "p99"), ("P99.9:", "p999")] {
        write!(words, " write_{called}_us={:.0}", after(percentiles, name)?).ok()?;
    }
    write!(words, " write_max_us={:.0}", after(line("Min:")?, "Max:")?).ok()?;
    let bucket = |line: &str| {
        let (ends, rest) = line.trim().strip_prefix(['[', '('])?.split_once([']', ')'])?;
        let high = ends.split_once(',')?.1.trim().parse::<f64>().ok()?;
        let sum = rest.split_whitespace().nth(2)?.strip_suffix('%')?.parse::<f64>().ok()?;
        // Nobody draws the last thousandth.
        (sum < 99.95).then(|| format!("{sum}:{high:.0}"))
    };
    let buckets: Vec<String> = text.lines().filter_map(bucket).collect();
    if !buckets.is_empty() {
        write!(words, " write_distribution_us={}", buckets.join(",")).ok()?;
    }
    (count >= 0.0).then_some(Told { count: count as u64, words })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn its_histogram_is_read() {
        let text = "\
fillrandom   :     356.123 micros/op 2808 ops/sec 1.068 seconds 3000 operations;    0.3 MB/s
Microseconds per write:
Count: 3000 Average: 355.8000  StdDev: 61.27
Min: 210  Median: 338.0952  Max: 3401
Percentiles: P50: 338.10 P75: 371.43 P99: 566.67 P99.9: 1283.33 P99.99: 3401.00
------------------------------------------------------
[     170,     250 ]       30   1.000%   1.000%
(     250,     380 ]     2370  79.000%  80.000% ################
(     380,     580 ]      570  19.000%  99.000% ####
(    2900,    4400 ]       30   1.000% 100.000%
";
        let told = told(text).unwrap();
        assert_eq!(told.count, 3000);
        assert_eq!(
            told.words,
            " write_p50_us=338 write_p99_us=567 write_p999_us=1283 write_max_us=3401 write_distribution_us=1:250,80:380,99:580"
        );
        assert_eq!(super::told("fillrandom : nothing"), None);
    }

    /// Where it is installed.
    #[test]
    fn the_real_db_bench_is_understood() {
        if Command::new("db_bench").arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_err() {
            println!("not tried: there is no db_bench here");
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        let words = format!("--directory {} --writes 50", directory.path().join("db").display());
        run(Options::parse(words.split(' ').map(str::to_owned)).unwrap()).unwrap();
    }
}
