//! Placement `nvm` against the NJS paper's baseline: ext4 with data=journal and its journal on a disk that is the host's
//! memory. The paper's loads, scaled to what a guest without KVM does in minutes, and one more that is metadata alone.
//!
//! Under both is the paper's kind of drive, modelled ("WD 1TB HDD": 7,200 rpm), or another one (`--drive`). An emulated
//! guest's processor is many times slower than the paper's, so the drive is slowed down too; where guests have KVM it is
//! not. NVM and journal have 16 MiB, so that the file is 64 times as large, as in the paper (8 GB and 128 MB).
//!
//! The paper's latency of 300 ns a write and its 1 GB/s are added to every fence of ours and not to the baseline's requests,
//! which is to our disadvantage: a request takes some hundred times as long anyway.

use crate::alternative::{Alternative, Njs, Run, Setting, run};
use crate::figure::{Basis, Figure, Limit, median};
use crate::machine::{Machine, load, mib};
use crate::options::Options;
use crate::programs;
use crate::{Outcome, sentence};
use serde_json::{Map, Value, json};
use std::io::Write;
use std::path::Path;

/// The region, and the baseline's journal.
const NVM_MIB: u32 = 16;
/// The file that is written over.
const FILE_MIB: u32 = 1024;
/// Seconds that a second of the modelled drive takes where the guest's processor is emulated.
const TIME_SCALE_EMULATED: u32 = 5;

/// A load, and what the paper has for it.
struct Load {
    name: &'static str,
    prepare: String,
    work: String,
    /// Throughput over that of the baseline, where the paper has it.
    throughput_min: Option<f64>,
    /// What byte-level updates save of the bytes to NVM, where the paper says so.
    delta_share: Option<f64>,
    /// It changes nothing but metadata.
    is_metadata: bool,
}

fn loads(options: &Options) -> Vec<Load> {
    let write_mib = if options.quick { 16 } else { 96 };
    // Over a file that mke2fs has put there.
    let fio = |kind: &str, size_mib: u32, write_mib: u32| {
        format!(
            "fio --name=over --filename=/mnt/file --rw={kind} --bs=4k --size={size_mib}M --io_size={write_mib}M \
             --ioengine=psync --thread --refill_buffers --randrepeat=1 --output=/tmp/fio"
        )
    };
    let append = format!("guest-tools append --file /mnt/new --mib {write_mib} --sync");
    // The paper's files have 1 KB to 1 MB.
    let (files, transactions) = if options.quick { (50, 50) } else { (300, 600) };
    // The personalities of filebench, with as many files and as much work as a guest without KVM does in seconds.
    let bench = |personality: &str, files: u32, flows: u32| {
        let tool = format!(
            "guest-tools filebench --directory /mnt/set --personality {personality} --files {files} --threads 4"
        );
        (format!("{tool} --phase create"), format!("{tool} --phase run --flows {flows}"))
    };
    let many = |full, quick| if options.quick { quick } else { full };
    let namespace = |phase: &str| {
        let (files, operations) = if options.quick { (500, 500) } else { (4000, 10_000) };
        format!("guest-tools namespace --directory /mnt/set --files {files} --operations {operations} --phase {phase}")
    };
    let (file_server, serve) = bench("fileserver", many(700, 60), many(400, 40));
    let (mail, send) = bench("varmail", many(1000, 100), many(500, 50));
    let over_write = |name, work, throughput_min| Load {
        name,
        prepare: String::new(),
        work,
        throughput_min: Some(throughput_min),
        delta_share: None,
        is_metadata: false,
    };
    vec![
        Load {
            name: "sequential write",
            prepare: String::new(),
            work: append,
            throughput_min: Some(1.244),
            delta_share: None,
            is_metadata: false,
        },
        over_write("re-write", fio("write", write_mib, write_mib), 1.563),
        over_write("random write", fio("randwrite", FILE_MIB, write_mib / 3), 2.371),
        Load {
            name: "postmark",
            prepare: String::new(),
            work: format!(
                "mkdir /mnt/postmark
                 printf '%s\\n' 'set location /mnt/postmark' 'set size 1024 524288' 'set write 4096' \
                     'set read 4096' 'set number {files}' 'set transactions {transactions}' run | postmark"
            ),
            throughput_min: Some(1.539),
            delta_share: Some(0.417),
            is_metadata: false,
        },
        Load {
            name: "fileserver",
            prepare: file_server,
            work: serve,
            throughput_min: Some(1.431),
            delta_share: Some(0.303),
            is_metadata: false,
        },
        Load {
            name: "varmail",
            prepare: mail,
            work: send,
            throughput_min: Some(1.506),
            delta_share: Some(0.454),
            is_metadata: false,
        },
        Load {
            name: "names",
            prepare: namespace("create"),
            work: namespace("run"),
            throughput_min: None,
            delta_share: None,
            is_metadata: true,
        },
    ]
}

/// Runs commits without a guest, then the loads.
pub fn measure(options: &Options, machine: &Machine, directory: &Path) -> Outcome<(Vec<Figure>, Value)> {
    let (mut figures, commits) =
        if options.load.is_empty() { programs::nvm_commit_cost()? } else { (Vec::new(), Value::Null) };
    let time_scale = options.time_scale.unwrap_or(if machine.is_emulated() { TIME_SCALE_EMULATED } else { 1 });
    println!(
        "\nthe drive is modelled: {}, a second of which takes {time_scale} s; NVM and journal have {NVM_MIB} MiB",
        options.drive
    );
    let content = tempfile::tempdir_in(directory).map_err(sentence)?;
    std::fs::File::create(content.path().join("file"))
        .and_then(|file| (0..FILE_MIB).try_for_each(|_| (&file).write_all(&[0x5a; 1 << 20])))
        .map_err(sentence)?;
    let setting = Setting {
        image_mib: 2048,
        journal_mib: NVM_MIB,
        memory_mib: 512,
        fio: true,
        flush_us: None,
        content: Some(content.path().to_owned()),
        model: Some((options.drive.clone(), f64::from(time_scale))),
    };
    let mut details = Map::new();
    details.insert("commits".to_owned(), commits);
    println!("\n{:18} {:18} {:>9} {:>14} {:>14} {:>12}", "load", "", "seconds", "to storage", "to NVM", "absorbed");
    for one in loads(options).iter().filter(|one| one.name.starts_with(&options.load)) {
        let mut detail = Vec::new();
        let mut once = |alternative: Alternative| -> Outcome<Run> {
            eprintln!("{}: {} (load {})", one.name, alternative.name(), load());
            let result = run(alternative, &setting, machine, directory, &one.prepare, &one.work, "")?;
            println!(
                "{:18} {:18} {:>9.2} {:>10.1} MiB {:>10.1} MiB {:>8.1} MiB",
                one.name,
                alternative.name(),
                result.seconds,
                mib(result.bytes_to_storage),
                mib(result.nvm("bytes_to_nvm")),
                mib(result.nvm("bytes_absorbed"))
            );
            detail.push(json!({ "alternative": alternative.name(), "load": load(), "run": result.to_json() }));
            Ok(result)
        };
        let mut ratios = Vec::new();
        let mut bounds = Vec::new();
        let mut whole = None;
        for round in 0..options.rounds.min(3) {
            let mut turns =
                [Alternative::MemoryJournalOnModel, Alternative::Nvm(Njs::Whole), Alternative::NoJournalOnModel];
            turns.rotate_left((round % 3) as usize);
            let [mut theirs, mut ours, mut unjournaled] = [0.0; 3];
            for alternative in turns {
                // Its times are all that it is for.
                if options.quick && alternative == Alternative::NoJournalOnModel {
                    continue;
                }
                let result = once(alternative)?;
                match alternative {
                    Alternative::MemoryJournalOnModel => theirs = result.seconds,
                    Alternative::NoJournalOnModel => unjournaled = result.seconds,
                    _ => {
                        ours = result.seconds;
                        whole = Some(result);
                    }
                }
            }
            ratios.push(theirs / ours);
            if !options.quick {
                bounds.push(theirs / unjournaled);
            }
        }
        let name = one.name;
        let limit = Limit::AtLeast(one.throughput_min.unwrap_or(1.0));
        let rounds = |ratios: &[f64]| {
            format!("rounds {}", ratios.iter().map(|ratio| format!("{ratio:.2}")).collect::<Vec<_>>().join(" "))
        };
        let throughput = Figure::new(format!("{name}: throughput, nvm / (e)"), median(&ratios), "", limit, Basis::Time)
            .note(rounds(&ratios));
        figures.push(if one.throughput_min.is_some() { throughput } else { throughput.not_judged() });
        if !bounds.is_empty() {
            let name = format!("{name}: throughput, (f) / (e)");
            let bound = Figure::new(name, median(&bounds), "", Limit::AtLeast(1.0), Basis::Time);
            figures.push(bound.note(rounds(&bounds)).not_judged());
        }
        let Some(whole) = whole else { continue };
        if one.is_metadata {
            let retain = once(Alternative::Retain)?;
            figures.push(bytes_figure(name, &whole, &retain));
        }
        if let Some(share) = one.delta_share {
            let [paper, plain, undelayed, everything] =
                [Njs::Paper, Njs::NoByteLevel, Njs::NoDelayedCheckpoint, Njs::LogEverything]
                    .map(|njs| once(Alternative::Nvm(njs)));
            figures.extend(ablations(name, share, &paper?, &plain?, &undelayed?, &everything?));
        }
        details.insert(name.to_owned(), Value::Array(detail));
    }
    Ok((figures, Value::Object(details)))
}

fn ratio(one: u64, other: u64) -> f64 {
    one as f64 / other as f64
}

fn bytes_figure(name: &str, nvm: &Run, retain: &Run) -> Figure {
    let name = format!("{name}: bytes to storage, nvm / retain");
    Figure::new(name, ratio(nvm.bytes_to_storage, retain.bytes_to_storage), "", Limit::AtMost(0.7), Basis::Count).note(
        format!(
            "{:.1} / {:.1} MiB; of it appends {:.1}, checkpoints {:.1}",
            mib(nvm.bytes_to_storage),
            mib(retain.bytes_to_storage),
            mib(nvm.nvm("append_bytes_written_home")),
            mib(nvm.nvm("checkpoint_bytes"))
        ),
    )
}

/// The paper's Figures 9 (b), 10 and 11. Times are of one run each, and not judged.
fn ablations(name: &str, share: f64, paper: &Run, plain: &Run, undelayed: &Run, everything: &Run) -> [Figure; 4] {
    let bytes = |run: &Run| run.nvm("bytes_to_nvm");
    [
        Figure::new(
            format!("{name}: bytes to NVM saved by differences"),
            1.0 - ratio(bytes(paper), bytes(plain)),
            "",
            Limit::AtLeast(share),
            Basis::Count,
        )
        .note(format!("{:.1} / {:.1} MiB", mib(bytes(paper)), mib(bytes(plain)))),
        Figure::new(
            format!("{name}: bytes to NVM, appends home / log everything"),
            ratio(bytes(paper), bytes(everything)),
            "",
            Limit::AtMost(1.0),
            Basis::Count,
        )
        .note(format!("{:.1} / {:.1} MiB", mib(bytes(paper)), mib(bytes(everything)))),
        Figure::new(
            format!("{name}: throughput, appends home / no-DC"),
            undelayed.seconds / paper.seconds,
            "",
            Limit::AtLeast(1.0),
            Basis::Time,
        )
        .not_judged(),
        Figure::new(
            format!("{name}: throughput, all-journal / appends home"),
            paper.seconds / everything.seconds,
            "",
            Limit::AtLeast(1.0),
            Basis::Time,
        )
        .not_judged(),
    ]
}
