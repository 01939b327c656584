//! Prints what recording one request costs: `cargo run --release -p io-trace --example writer_speed`.

use io_trace::{Kind, Names, Record, Source, Writer, WriterOptions, amber};
use seeded_random::Random;
use std::time::Instant;

fn main() -> std::io::Result<()> {
    const RECORDS: u64 = 5_000_000;
    for zstd_level in [None, Some(1)] {
        let options = WriterOptions { zstd_level, ..WriterOptions::default() };
        let mut writer = Writer::new(Vec::with_capacity(64 << 20), Names::single("vda"), options)?;
        let begin = Instant::now();
        let mut random = Random::new(1);
        for i in 0..RECORDS {
            let kind = if i % 4 == 0 { Kind::Journal } else { Kind::Home };
            let address = random.below(1 << 24) * 4096;
            writer.record(&Record { time_ns: i * 9_731, address, length: 4096, vm: 0, disk: 0, kind })?;
        }
        let bytes = writer.finish()?;
        let write_ns = begin.elapsed().as_nanos() as f64 / RECORDS as f64;
        let begin = Instant::now();
        let mut reader = amber::Reader::new(bytes.as_slice(), "memory", false).map_err(std::io::Error::other)?;
        let mut read = 0;
        while reader.next_record().map_err(std::io::Error::other)?.is_some() {
            read += 1;
        }
        let read_ns = begin.elapsed().as_nanos() as f64 / read as f64;
        let size = bytes.len() as f64 / RECORDS as f64;
        println!("zstd {zstd_level:?}: write {write_ns:.1} ns, read {read_ns:.1} ns, {size:.2} bytes a record");
    }
    Ok(())
}
