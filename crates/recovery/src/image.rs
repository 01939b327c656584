//! Recovery of images and block devices: find the file systems, find their journals, judge all, then write.

use crate::disk::Disk;
use crate::error::Error;
use crate::file_log::FileLog;
use crate::home::{DiskHome, HomeBounds, JournalPlace};
use crate::replay::{LogBounds, Replay};
use crate::report::{Report, Status};
use extfs::{FileSystem, Journal, discover};

/// How to recover.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// Judge and verify everything, write nothing.
    pub dry_run: bool,
}

/// A file system, and where its journal is.
#[derive(Clone, Debug)]
pub struct Located {
    /// The file system.
    pub file_system: FileSystem,
    /// Its journal.
    pub log: LogPlace,
}

/// Where a file system's journal is.
#[derive(Clone, Debug)]
pub enum LogPlace {
    /// Nowhere: the file system has none.
    None,
    /// In the file system itself.
    Internal,
    /// On the disk that was given as the journal's.
    Device(FileSystem),
    /// On a disk that was not given.
    Missing {
        /// UUID of the journal device.
        uuid: [u8; 16],
    },
    /// It must be left alone.
    NotUnderstood {
        /// Why.
        reason: String,
    },
}

/// What became of one file system.
#[derive(Debug)]
pub struct FileSystemReport {
    /// The partition that holds it; nothing when it has the whole disk.
    pub partition: Option<u32>,
    /// Its UUID.
    pub uuid: [u8; 16],
    /// What was done, or why nothing was.
    pub result: Result<Report, Error>,
}

/// Finds the file systems on `disk`, and for each its journal: in itself, or on `journal`.
///
/// # Errors
/// A refusal when there is no file system on `disk`, or `journal` belongs to none of them.
pub fn locate(disk: &Disk, journal: Option<&Disk>) -> Result<Vec<Located>, Error> {
    let look = |disk: &Disk| {
        discover(disk).map_err(Error::failed(format!("looking for file systems on {}", disk.path().display())))
    };
    let file_systems = look(disk)?;
    let shown = disk.path().display();
    if file_systems.is_empty() {
        return Err(Error::damaged(format!("{shown} holds no ext2, ext3 or ext4 file system; nothing was changed")));
    }
    let devices = match journal {
        Some(journal) if journal.is_same(disk) => {
            return Err(Error::refused(format!("{shown} was given both as the disk and as its journal")));
        }
        Some(journal) => {
            let devices: Vec<FileSystem> =
                look(journal)?.into_iter().filter(|found| found.superblock.is_journal_device()).collect();
            if devices.is_empty() {
                return Err(Error::refused(format!(
                    "{} holds no external journal (mke2fs -O journal_dev makes one); nothing was changed",
                    journal.path().display()
                )));
            }
            devices
        }
        None => Vec::new(),
    };
    let located: Vec<Located> = file_systems
        .into_iter()
        .map(|file_system| Located { log: log_place(&file_system, &devices), file_system })
        .collect();
    let is_used = located.iter().any(|one| matches!(one.log, LogPlace::Device(_)));
    if let (Some(device), false) = (devices.first(), is_used) {
        let wanted: Vec<String> = located
            .iter()
            .filter_map(|one| match &one.log {
                LogPlace::Missing { uuid } => Some(uuid_text(uuid)),
                _ => None,
            })
            .collect();
        let wants = if wanted.is_empty() { "none".to_owned() } else { wanted.join(", ") };
        return Err(Error::refused(format!(
            "the journal given has UUID {}, but {shown} wants {wants}; nothing was changed",
            uuid_text(&device.superblock.uuid)
        )));
    }
    Ok(located)
}

fn log_place(file_system: &FileSystem, devices: &[FileSystem]) -> LogPlace {
    match &file_system.journal {
        Journal::None => LogPlace::None,
        Journal::Internal { .. } => LogPlace::Internal,
        Journal::NotUnderstood { reason, .. } => LogPlace::NotUnderstood { reason: reason.clone() },
        Journal::JournalDevice { .. } => {
            LogPlace::NotUnderstood { reason: "it is an external journal, not a file system".to_owned() }
        }
        Journal::External { uuid } => match devices.iter().find(|device| device.superblock.uuid == *uuid) {
            None => LogPlace::Missing { uuid: *uuid },
            Some(device) => match &device.journal {
                Journal::NotUnderstood { reason, .. } => {
                    LogPlace::NotUnderstood { reason: format!("on the journal device, {reason}") }
                }
                _ if device.superblock.block_size != file_system.superblock.block_size => LogPlace::NotUnderstood {
                    reason: format!(
                        "the journal device has blocks of {} bytes but the file system of {}",
                        device.superblock.block_size, file_system.superblock.block_size
                    ),
                },
                _ => LogPlace::Device(device.clone()),
            },
        },
    }
}

/// A UUID as people write it.
pub fn uuid_text(uuid: &[u8; 16]) -> String {
    let hex: Vec<String> = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
    [&hex[..4], &hex[4..6], &hex[6..8], &hex[8..10], &hex[10..]].map(|part| part.concat()).join("-")
}

enum Step<'a> {
    Done(Result<Report, Error>),
    Replay(Box<Replay>, FileLog<'a>),
}

/// Recovers every file system on `disk`, those with an external journal from `journal`.
///
/// All of them are judged before the first is written. One that is refused does not keep the others from being recovered.
///
/// A file system whose superblock does not ask for recovery, or whose log is empty, is left as it is. (e2fsck -y would
/// replay a log though the superblock does not ask for it; the kernel discards it. This does neither.)
///
/// # Errors
/// When there is nothing that could be recovered. What concerns one file system only is in its report.
pub fn recover_disk(disk: &Disk, journal: Option<&Disk>, options: Options) -> Result<Vec<FileSystemReport>, Error> {
    let located = locate(disk, journal)?;
    let steps: Vec<Step<'_>> =
        located.iter().map(|one| prepare(disk, journal, one).unwrap_or_else(|error| Step::Done(Err(error)))).collect();
    let mut reports = Vec::new();
    for (one, step) in located.iter().zip(steps) {
        let result = match step {
            Step::Done(result) => result,
            Step::Replay(replay, mut log) if options.dry_run => replay.dry_run(&mut log),
            Step::Replay(replay, log) => carry_out(disk, journal, one, *replay, log),
        };
        let Located { file_system, .. } = one;
        reports.push(FileSystemReport { partition: file_system.partition, uuid: file_system.superblock.uuid, result });
    }
    Ok(reports)
}

fn prepare<'a>(disk: &'a Disk, journal: Option<&'a Disk>, located: &Located) -> Result<Step<'a>, Error> {
    let file_system = &located.file_system;
    let done = |report| Ok(Step::Done(Ok(report)));
    let (log_disk, log_holder) = match &located.log {
        LogPlace::None => return done(Report::of(Status::None)),
        LogPlace::NotUnderstood { reason } => {
            return Err(Error::refused(format!("{reason}; nothing was changed")));
        }
        LogPlace::Missing { uuid } if file_system.superblock.needs_recovery() => {
            return Err(Error::refused(format!(
                "its journal is on another disk, UUID {}; give that one with --journal",
                uuid_text(uuid)
            )));
        }
        LogPlace::Missing { .. } => return done(Report::of(Status::Clean)),
        LogPlace::Internal => (disk, file_system),
        LogPlace::Device(device) => (journal.unwrap_or(disk), device),
    };
    let mut log = FileLog::new(log_disk, log_holder);
    let replay = Replay::prepare(&mut log, LogBounds::new(log_holder), &HomeBounds::new(file_system))?;
    let superblock = replay.journal();
    if matches!(located.log, LogPlace::Device(_)) && superblock.nr_users > 1 {
        return Err(Error::refused(format!(
            "the external journal is shared by {} file systems, which is not supported; nothing was changed",
            superblock.nr_users
        )));
    }
    if !file_system.superblock.needs_recovery() {
        let mut report = Report::of(Status::Clean);
        if !superblock.is_empty() {
            report = report.with_note(
                "the journal is not empty, but the file system does not ask for recovery: it was left as it is, and the \
                 guest's kernel will discard the journal",
            );
        }
        return done(report);
    }
    if superblock.is_empty() {
        return done(Report::of(Status::Clean));
    }
    Ok(Step::Replay(Box::new(replay), log))
}

fn carry_out(
    disk: &Disk,
    journal: Option<&Disk>,
    located: &Located,
    replay: Replay,
    mut log: FileLog<'_>,
) -> Result<Report, Error> {
    let file_system = &located.file_system;
    let mut home = DiskHome::new(disk, file_system.offset, file_system.length);
    let block_size = u64::from(file_system.superblock.block_size);
    match (&located.log, journal) {
        (LogPlace::Device(device), Some(journal)) => {
            let mut journal_home = DiskHome::new(journal, device.offset, device.length);
            let offset = u64::from(device.journal.superblock_position()) * block_size;
            replay.run(&mut log, &mut home, JournalPlace::Other { disk: &mut journal_home, offset })
        }
        _ => {
            let first = file_system.journal.extents(&file_system.superblock).first().map_or(0, |first| first.physical);
            replay.run(&mut log, &mut home, JournalPlace::Home { offset: first * block_size })
        }
    }
}
