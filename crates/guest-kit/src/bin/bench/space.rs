//! Bytes to storage and host memory: a sequential append, postmark and a tree unpacked, under every
//! alternative.

use crate::Outcome;
use crate::alternative::{Alternative, Run, Setting, run};
use crate::figure::{Basis, Figure, Limit};
use crate::machine::{Machine, mib};
use crate::options::Options;
use guest_kit::image;
use serde_json::{Map, Value};
use std::path::Path;

const BLOCK_BYTES: u64 = 4096;
/// Superblock writes that a mount and an unmount bring to the journal's own place: the mark, its
/// removal, and the guest's own closing ones.
const MARK_BLOCKS_MAX: u64 = 8;

/// Runs every load under every alternative, once: these are counts, not times.
pub fn measure(options: &Options, machine: &Machine, directory: &Path) -> Outcome<(Vec<Figure>, Value)> {
    let setting = Setting {
        image_mib: options.image_mib(),
        journal_mib: options.journal_mib(),
        memory_mib: 512,
        fio: false,
        flush_us: None,
        content: None,
        model: None,
    };
    let (files, transactions) = options.postmark();
    let loads = [
        ("append", format!("guest-tools append --file /mnt/file --mib {}", options.append_mib())),
        (
            "postmark",
            format!(
                "mkdir /mnt/postmark
                 printf 'set location /mnt/postmark\\nset number {files}\\nset transactions {transactions}\\nrun\\n' |
                 postmark"
            ),
        ),
        ("untar", format!("guest-tools untar --directory /mnt/tree --files {}", options.tree_files())),
    ];
    let mut figures = Vec::new();
    let mut details = Map::new();
    println!("\n{:10} {:20} {:>12} {:>12} {:>9}", "load", "", "to storage", "sent", "seconds");
    for (name, load) in &loads {
        let mut runs: Vec<(Alternative, Run)> = Vec::new();
        let mut detail = Map::new();
        for alternative in Alternative::ALL {
            eprintln!("{name}: {}", alternative.name());
            let result = run(alternative, &setting, machine, directory, "", load, "")?;
            println!(
                "{name:10} {:20} {:>8.1} MiB {:>8.1} MiB {:>9.1}",
                alternative.name(),
                mib(result.bytes_to_storage),
                mib(result.bytes_sent),
                result.seconds
            );
            detail.insert(alternative.name().to_owned(), result.to_json());
            runs.push((alternative, result));
        }
        let of = |wanted| runs.iter().find(|(alternative, _)| *alternative == wanted).map(|(_, run)| run);
        let (Some(retain), Some(full), Some(ordered), Some(memory)) = (
            of(Alternative::Retain),
            of(Alternative::FullJournal),
            of(Alternative::Ordered),
            of(Alternative::MemoryJournal),
        ) else {
            return Err("an alternative was not run".to_owned());
        };
        figures.extend(byte_figures(name, retain, full, ordered));
        if *name == "append" {
            figures.extend(memory_figures(options, retain, memory));
        }
        details.insert((*name).to_owned(), Value::Object(detail));
    }
    Ok((figures, Value::Object(details)))
}

fn ratio(one: u64, other: u64) -> f64 {
    one as f64 / other as f64
}

fn byte_figures(load: &str, retain: &Run, full: &Run, ordered: &Run) -> Vec<Figure> {
    let journal = retain.counter("journal_bytes_to_storage");
    let received = retain.counter("journal_bytes_received");
    let bytes = retain.bytes_to_storage;
    let (kib, limit) = (journal as f64 / 1024.0, (MARK_BLOCKS_MAX * BLOCK_BYTES / 1024) as f64);
    vec![
        Figure::new(format!("{load}: journal to storage"), kib, "KiB", Limit::AtMost(limit), Basis::Count)
            .note(format!("superblocks at mount and unmount; {:.1} MiB of journal received", mib(received))),
        Figure::new(
            format!("{load}: bytes to storage, retain / (a)"),
            ratio(bytes, full.bytes_to_storage),
            "",
            Limit::AtMost(0.55),
            Basis::Count,
        )
        .note(format!("{:.1} / {:.1} MiB", mib(bytes), mib(full.bytes_to_storage))),
        Figure::new(
            format!("{load}: bytes to storage, retain / (b)"),
            ratio(bytes, ordered.bytes_to_storage),
            "",
            Limit::AtMost(1.03),
            Basis::Count,
        )
        .note(format!("{:.1} / {:.1} MiB", mib(bytes), mib(ordered.bytes_to_storage))),
    ]
}

fn memory_figures(options: &Options, retain: &Run, memory: &Run) -> Vec<Figure> {
    let (area, pool) = (retain.counter("area_bytes_max"), retain.counter("pool_bytes_max"));
    let blocks = retain.counter("blocks_retained_max");
    vec![
        Figure::new(
            "append: host memory for tables a retained block",
            ratio(area, blocks),
            "bytes",
            Limit::AtMost(24.0),
            Basis::Count,
        )
        .note(format!(
            "{area} bytes, {blocks} blocks retained at most; {:.1} bytes a log block",
            ratio(area, u64::from(options.journal_mib()) * (image::MIB / BLOCK_BYTES))
        )),
        Figure::new(
            format!("append of {} MiB, log of {} MiB: tables and copies", options.append_mib(), options.journal_mib()),
            mib(area + pool),
            "MiB",
            Limit::Below(4.0),
            Basis::Count,
        )
        .note(format!("copies {:.2} MiB; (c) takes {:.1} MiB", mib(pool), mib(memory.tmpfs_bytes))),
    ]
}
