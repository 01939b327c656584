//! The ways to have a journal, and a run of a guest under one of them.
//!
//! Each run has an image of its own, fresh from mke2fs, on the storage as it is or on a modelled drive. QEMU's drives are opened so that a guest's
//! flush reaches the storage.

use crate::machine::{Machine, bytes_on_disk};
use crate::{Outcome, sentence};
use guest_kit::image::{self, ExtRecipe, Journal};
use guest_kit::{Cache, Drive, Guest, GuestSpec, Reported, program};
use serde_json::{Value, json};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;
use test_storage::TestStorage;

const LIMIT: Duration = Duration::from_secs(1800);
const SECTOR_BYTES: u64 = 512;

/// Who keeps the journal, and which.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Alternative {
    /// amberlog, data=journal, journal held in the guest's memory.
    Retain,
    /// QEMU's own disk, data=journal.
    FullJournal,
    /// QEMU's own disk, data=ordered.
    Ordered,
    /// QEMU's own disks, data=journal on a second disk that is a tmpfs file of the host.
    MemoryJournal,
    /// QEMU's own disk, no journal.
    NoJournal,
    /// As [`Alternative::MemoryJournal`], on a modelled drive: amberlog serves both disks, and has nothing to do with their
    /// journal.
    MemoryJournalOnModel,
    /// As [`Alternative::NoJournal`], on a modelled drive.
    NoJournalOnModel,
    /// amberlog, data=journal, journal on emulated persistent memory of the NJS paper.
    Nvm(Njs),
}

/// NJS, and what its paper leaves out of it for comparisons.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Njs {
    /// All of it, small appends to the region.
    Whole,
    /// As in the paper: appends home, always. So are those that follow.
    Paper,
    /// NJS-no-BJ: every version written whole.
    NoByteLevel,
    /// NJS-no-DC: no home write is absorbed.
    NoDelayedCheckpoint,
    /// NJS-all-journal: appends go to the region.
    LogEverything,
}

impl Njs {
    fn option(self) -> &'static str {
        match self {
            Self::Whole => "",
            Self::Paper => ",nvm-append-home=0",
            Self::NoByteLevel => ",nvm-append-home=0,nvm-byte-level=off",
            Self::NoDelayedCheckpoint => ",nvm-append-home=0,nvm-delayed-checkpoint=off",
            Self::LogEverything => ",nvm-log-everything",
        }
    }
}

/// Bytes a second that the NJS paper's memory takes.
const NVM_BYTES_PER_SECOND: u64 = 1_000_000_000;

impl Alternative {
    /// Those of the first papers.
    pub const ALL: [Self; 5] = [Self::Retain, Self::FullJournal, Self::Ordered, Self::MemoryJournal, Self::NoJournal];

    /// Its name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Retain => "retain",
            Self::FullJournal => "(a) data=journal",
            Self::Ordered => "(b) data=ordered",
            Self::MemoryJournal => "(c) tmpfs journal",
            Self::NoJournal => "(d) no journal",
            Self::MemoryJournalOnModel => "(e) RAM journal",
            Self::NoJournalOnModel => "(f) no journal",
            Self::Nvm(Njs::Whole) => "nvm",
            Self::Nvm(Njs::Paper) => "nvm, appends home",
            Self::Nvm(Njs::NoByteLevel) => "nvm, no-BJ",
            Self::Nvm(Njs::NoDelayedCheckpoint) => "nvm, no-DC",
            Self::Nvm(Njs::LogEverything) => "nvm, all-journal",
        }
    }

    fn mount_options(self) -> &'static str {
        match self {
            Self::Retain | Self::FullJournal | Self::Nvm(_) => "-o data=journal",
            Self::Ordered => "-o data=ordered",
            Self::MemoryJournal | Self::MemoryJournalOnModel => "-o data=journal,journal_path=/dev/vdb",
            Self::NoJournal | Self::NoJournalOnModel => "",
        }
    }
}

/// The image and guest of a run.
#[derive(Clone, Debug)]
pub struct Setting {
    /// Of the image.
    pub image_mib: u32,
    /// Of the journal.
    pub journal_mib: u32,
    /// Of the guest.
    pub memory_mib: u32,
    /// Whether the guest has fio.
    pub fio: bool,
    /// How long the image's storage takes for a flush, in µs, where that is not left to the machine's own.
    pub flush_us: Option<u64>,
    /// A directory whose files the image has from the beginning.
    pub content: Option<PathBuf>,
    /// The drive that the image is on, for alternatives that can have a modelled one, and how many seconds one of its takes.
    pub model: Option<(String, f64)>,
}

/// What a run came to.
#[derive(Clone, Debug)]
pub struct Run {
    /// Seconds from the load's start to the end of its `sync`, by the guest's clock.
    pub seconds: f64,
    /// Bytes that reached the storage, in whole sectors; where amberlog serves the disk, those of journal, home and
    /// recovery by amberlog's own report, otherwise those that the guest's kernel sent to the disk.
    pub bytes_to_storage: u64,
    /// Bytes that the guest's kernel sent to /dev/vda, journal and all.
    pub bytes_sent: u64,
    /// What the tmpfs journal takes on the host.
    pub tmpfs_bytes: u64,
    /// amberlog's report of the disk; null for the others.
    pub report: Value,
    /// All that the guest told.
    pub reported: Reported,
}

impl Run {
    /// A counter of amberlog's report.
    pub fn counter(&self, name: &str) -> u64 {
        self.report["counters"][name].as_u64().unwrap_or(0)
    }

    /// A counter of amberlog's report on a region of NVM.
    pub fn nvm(&self, name: &str) -> u64 {
        self.report["nvm"][name].as_u64().unwrap_or(0)
    }

    /// For `--json`.
    pub fn to_json(&self) -> Value {
        json!({
            "seconds": self.seconds, "bytes_to_storage": self.bytes_to_storage, "bytes_sent": self.bytes_sent,
            "tmpfs_bytes": self.tmpfs_bytes, "report": self.report,
        })
    }
}

/// Boots a guest under `alternative`, mounts a fresh file system at /mnt, runs `prepare`, then
/// `load` on the clock, then syncs and unmounts, and takes stock.
pub fn run(
    alternative: Alternative,
    setting: &Setting,
    machine: &Machine,
    directory: &Path,
    prepare: &str,
    load: &str,
    afterwards: &str,
) -> Outcome<Run> {
    let directory = tempfile::tempdir_in(directory).map_err(sentence)?;
    let image = directory.path().join("disk.img");
    let tmpfs = tempfile::Builder::new().prefix("amberlog-bench-").tempdir_in("/dev/shm").map_err(sentence)?;
    let journal_image = tmpfs.path().join("journal.img");
    let mut recipe = ExtRecipe::ext4(setting.image_mib, setting.journal_mib);
    recipe.content.clone_from(&setting.content);
    match alternative {
        Alternative::NoJournal | Alternative::NoJournalOnModel => recipe.journal = Journal::None,
        Alternative::MemoryJournal | Alternative::MemoryJournalOnModel => {
            image::journal_device(&journal_image, setting.journal_mib, recipe.block_bytes).map_err(sentence)?;
            recipe.journal = Journal::External(journal_image.clone());
        }
        _ => {}
    }
    recipe.make(&image).map_err(sentence)?;
    // What mke2fs left in the page cache is not the guest's to pay for.
    let file = std::fs::File::open(&image).map_err(sentence)?;
    file.sync_all().map_err(sentence)?;
    drop(file);
    let storage = setting.flush_us.map(|_| TestStorage::new(&image)).transpose().map_err(sentence)?;
    let image = match (&storage, setting.flush_us) {
        (Some(storage), Some(flush_us)) => {
            storage.set_flush_us(flush_us);
            storage.image()
        }
        _ => image,
    };

    let script = format!(
        "set -e
         mount -t ext4 {options} /dev/vda /mnt
         {prepare}
         sync
         {remount}
         read begin rest </proc/uptime
         {load}
         sync
         read end rest </proc/uptime
         mark worked $begin $end
         umount /mnt
         {afterwards}
         mark sent $(cat /sys/block/vda/stat)",
        options = alternative.mount_options(),
        // What was prepared is home before the clock starts: a journal with data owes it still, and the others do not.
        remount = if prepare.trim().is_empty() {
            String::new()
        } else {
            format!("umount /mnt\nmount -t ext4 {} /dev/vda /mnt", alternative.mount_options())
        },
    );
    let mut spec = GuestSpec::new(format!("bench {}", alternative.name()), script);
    spec.memory_mib = setting.memory_mib;
    if setting.fio {
        spec.programs.push("fio");
    }
    spec.boot_timeout = Duration::from_secs(300);
    let report_path = directory.path().join("report.json");
    let spec = match alternative {
        Alternative::Retain
        | Alternative::Nvm(_)
        | Alternative::MemoryJournalOnModel
        | Alternative::NoJournalOnModel => {
            let amberlog = program::workspace_binary("amberlog").map_err(sentence)?;
            let mut disk: OsString = image.clone().into();
            disk.push(",name=data,placement=");
            match alternative {
                Alternative::Nvm(njs) => {
                    disk.push("nvm=");
                    disk.push(tmpfs.path().join("region"));
                    disk.push(format!(
                        ",nvm-size={},nvm-latency=300,nvm-bandwidth={}{}",
                        setting.journal_mib,
                        NVM_BYTES_PER_SECOND / 1_000_000,
                        njs.option()
                    ));
                }
                Alternative::Retain => disk.push("retain"),
                _ => disk.push("storage"),
            }
            let mut words: Vec<OsString> = vec![amberlog.into(), "run".into(), "--disk".into()];
            if let Some((profile, time_scale)) = &setting.model {
                disk.push(format!(",model={profile}"));
                words.extend([disk, "--time-scale".into(), time_scale.to_string().into()]);
            } else {
                words.push(disk);
            }
            if alternative == Alternative::MemoryJournalOnModel {
                let mut journal: OsString = journal_image.clone().into();
                journal.push(",for=data,name=journal");
                words.extend(["--journal-disk".into(), journal]);
            }
            words.extend(["--report".into(), report_path.clone().into()]);
            spec.wrapper(words)
        }
        Alternative::MemoryJournal => {
            spec.drives(vec![Drive::new(&image, machine.cache()), Drive::new(&journal_image, Cache::Writeback)])
        }
        _ => spec.drives(vec![Drive::new(&image, machine.cache())]),
    };
    let reported = Guest::run(spec, LIMIT).map_err(sentence)?;
    let (seconds, bytes_sent) = stock(&reported)?;
    let mut run = Run {
        seconds,
        bytes_to_storage: bytes_sent,
        bytes_sent,
        tmpfs_bytes: bytes_on_disk(&journal_image),
        report: Value::Null,
        reported,
    };
    if matches!(alternative, Alternative::Retain | Alternative::Nvm(_) | Alternative::MemoryJournalOnModel) {
        let text = std::fs::read_to_string(&report_path)
            .map_err(|error| format!("amberlog wrote no report to {}: {error}", report_path.display()))?;
        let report: Value = serde_json::from_str(&text).map_err(sentence)?;
        run.report = report["disks"][0].clone();
        let expected = if alternative == Alternative::MemoryJournalOnModel { "external" } else { "internal" };
        if run.report["journal"]["kind"] != expected {
            return Err(format!("amberlog did not find the journal of the image; its report: {text}"));
        }
        // Of an external journal these are what the host's memory took.
        let journal = if expected == "external" { 0 } else { run.counter("journal_bytes_to_storage") };
        run.bytes_to_storage = journal
            + run.counter("home_bytes_to_storage")
            + run.report["recovery"]["bytes_written"].as_u64().unwrap_or(0);
    }
    Ok(run)
}

/// Seconds of the load, and bytes sent to the disk: the seventh number of the disk's `stat`
/// (the kernel's Documentation/block/stat.rst), in sectors of 512 bytes.
fn stock(reported: &Reported) -> Outcome<(f64, u64)> {
    let words = |name: &str| {
        let mark = reported.marks.iter().find_map(|mark| mark.strip_prefix(name));
        mark.map(|rest| rest.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
            .ok_or_else(|| format!("the guest did not tell '{name}'"))
    };
    let number = |words: &[String], index: usize| {
        let word = words.get(index).map(String::as_str).unwrap_or_default();
        word.parse::<f64>().map_err(|_| format!("the guest told '{word}' where a number was expected"))
    };
    let worked = words("worked ")?;
    let sent = words("sent ")?;
    let sectors: u64 =
        sent.get(6).and_then(|word| word.parse().ok()).ok_or("the guest's disk statistics have no sectors written")?;
    Ok((number(&worked, 1)? - number(&worked, 0)?, sectors * SECTOR_BYTES))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stock_is_taken_from_marks() {
        let marks = ["worked 10.50 12.75", "sent 1 2 3 4 5 6 70 8 9 10 11"];
        let mut reported = Reported { marks: marks.map(str::to_owned).to_vec(), ..Reported::default() };
        let (seconds, bytes) = stock(&reported).unwrap();
        assert!((seconds - 2.25).abs() < 1e-9);
        assert_eq!(bytes, 70 * 512);
        reported.marks[1] = "sent 1 2 3".to_owned();
        assert!(stock(&reported).is_err());
    }
}
