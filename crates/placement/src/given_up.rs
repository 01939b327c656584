//! Giving up what is held for an image that nobody can have any more, or that it does not fit: a person has said so.
//!
//! What must never happen: that anything else of the directory goes, or that something goes which can still be brought home. So only a log is
//! given up whose recovery was tried, and failed; the table is closed first, which is one word, and everything else follows from there.
//! No image is touched: its own mark, if it comes back, says that its journal is elsewhere, and nobody takes it for clean.

use crate::description::{AreaDirectory, LogDescription, is_at};
use crate::finish::dry_run;
use crate::found::{FailedLog, FinishError, give_back, open_logs};
use jbd2::{Content, LogRead};
use journal_area::{FoundLog, HeldLog, Location};
use serde::Serialize;
use std::collections::HashSet;
use std::io;
use std::path::{Path, PathBuf};

/// What is lost with a log that is given up.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Loss {
    /// The image with the file system.
    pub image: PathBuf,
    /// The image with the log, where that is another one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub journal: Option<PathBuf>,
    /// Where the file system begins on it, in bytes.
    pub offset: u64,
    /// Committed transactions that the log has; nothing where that cannot be told without the image.
    pub transactions: Option<u64>,
    /// Blocks that would have been written home, or, where that cannot be told, blocks of the log that are in memory.
    pub blocks: u64,
}

/// A log without its disk.
struct WithoutDisk<'l, 'a>(&'l HeldLog<'a>);

impl LogRead for WithoutDisk<'_, '_> {
    type Error = io::Error;

    fn read(&mut self, position: u32, buffer: &mut [u8]) -> io::Result<Content> {
        if self.0.location(position) == Location::Storage {
            return Err(io::Error::other(format!("log block {position} is on its disk")));
        }
        self.0.read_block(position, buffer)
    }
}

impl FailedLog {
    /// Whether the image at this path, as it was called when the log was held, is its home or has its journal.
    pub fn is_of(&self, image: &Path) -> bool {
        is_at(image, &self.image) || self.journal.as_ref().is_some_and(|journal| is_at(image, journal))
    }
}

/// What would be lost with logs that could not be finished.
///
/// # Errors
/// When the directory cannot be read.
pub fn losses(directory: &AreaDirectory, failed: &[&FailedLog]) -> Result<Vec<Loss>, FinishError> {
    let Some(left) = open_logs(directory)? else { return Ok(Vec::new()) };
    let is_meant = |log: &LogDescription| failed.iter().any(|failed| failed.name == log.name);
    Ok(left.logs.iter().filter(|(log, found)| found.is_open() && is_meant(log)).map(loss).collect())
}

fn loss((log, found): &(LogDescription, FoundLog)) -> Loss {
    let held = found.log();
    let in_memory = |position: &u32| {
        matches!(held.location(*position), Location::Guest(_) | Location::Block(_) | Location::Small(_))
    };
    let replayed = dry_run(&mut WithoutDisk(&held), &log.place).ok();
    Loss {
        image: log.home_image.clone(),
        journal: log.place.is_external.then(|| log.journal_image.clone()),
        offset: log.place.home_start,
        transactions: replayed.as_ref().map(|report| report.transactions),
        blocks: replayed
            .map_or_else(|| (0..held.log_blocks()).filter(in_memory).count() as u64, |report| report.blocks_written),
    }
}

/// Gives up logs that could not be finished. The directory can be removed afterwards if nothing else in it is owed.
///
/// # Errors
/// When the directory cannot be read, and nothing was given up; or when what was given up cannot be taken out of it.
pub fn give_up(directory: &AreaDirectory, failed: &[&FailedLog]) -> Result<(), FinishError> {
    let Some(left) = open_logs(directory)? else { return Ok(()) };
    let is_meant = |log: &LogDescription| failed.iter().any(|failed| failed.name == log.name);
    let (given_up, stays): (Vec<_>, Vec<_>) = left.logs.into_iter().partition(|(log, _)| is_meant(log));
    given_up.iter().for_each(|(_, found)| found.close());
    let needed: HashSet<u32> = stays.iter().flat_map(|(_, found)| found.pages().map(|page| page.0)).collect();
    give_back(&left.ram, &needed);
    let names: Vec<&str> = given_up.iter().map(|(log, _)| log.name.as_str()).collect();
    Ok(directory.forget_logs(&names)?)
}
