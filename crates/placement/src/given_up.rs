//! Giving up what is held for an image that nobody can have any more, or that it does not fit: a person has said so.
//!
//! What must never happen: that anything else of the directory goes, or that something goes which can still be brought home. So only a log is
//! given up whose recovery was tried, and failed; the table is closed first, which is one word, and everything else follows from there. Where
//! its files cannot be understood, the table is removed first: without it the rest is nobody's.
//! No image is touched: its own mark, if it comes back, says that its journal is elsewhere, and nobody takes it for clean.

use crate::description::{AreaDirectory, LogDescription, is_at};
use crate::directory_error::DirectoryError;
use crate::finish::dry_run;
use crate::finished::{FailedLog, FinishError};
use crate::found::{LeftLogs, give_back, open_logs};
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
    /// Blocks that would have been written home, or, where that cannot be told, blocks of the log that are in memory; nothing where the log's
    /// files are damaged or missing, so that nobody can tell.
    pub blocks: Option<u64>,
}

/// What came of giving up.
#[derive(Debug, Default)]
pub struct GivenUp {
    /// What was lost with it.
    pub losses: Vec<Loss>,
    /// Why the directory does not say so yet, or why something was not given up: it can be tried again.
    pub unfinished: Option<FinishError>,
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

    /// The image that carries the mark of what is held, and that nobody has named: it may be the one to which that can be brought home.
    pub fn fits(&self) -> Option<&Path> {
        self.fits.as_deref()
    }
}

/// What would be lost with logs that could not be finished.
///
/// # Errors
/// When the directory cannot be read.
pub fn losses(directory: &AreaDirectory, failed: &[&FailedLog]) -> Result<Vec<Loss>, FinishError> {
    let Some(left) = open_logs(directory)? else { return Ok(Vec::new()) };
    Ok(losses_of(&left, failed))
}

fn is_meant(log: &LogDescription, failed: &[&FailedLog]) -> bool {
    failed.iter().any(|failed| failed.name == log.name)
}

fn losses_of(left: &LeftLogs, failed: &[&FailedLog]) -> Vec<Loss> {
    let readable = left.logs.iter().filter(|(log, found)| found.is_open() && is_meant(log, failed)).map(loss);
    let unreadable = left.unreadable.iter().filter(|(log, _)| is_meant(log, failed)).map(|(log, _)| unknown_loss(log));
    readable.chain(unreadable).collect()
}

fn unknown_loss(log: &LogDescription) -> Loss {
    Loss {
        image: log.home_image.clone(),
        journal: log.place.is_external.then(|| log.journal_image.clone()),
        offset: log.place.home_start,
        transactions: None,
        blocks: None,
    }
}

fn loss((log, found): &(LogDescription, FoundLog)) -> Loss {
    let held = found.log();
    let in_memory = |position: &u32| {
        matches!(held.location(*position), Location::Guest(_) | Location::Block(_) | Location::Small(_))
    };
    let replayed = dry_run(&mut WithoutDisk(&held), &log.place).ok();
    let blocks = replayed
        .as_ref()
        .map_or_else(|| (0..held.log_blocks()).filter(in_memory).count() as u64, |report| report.blocks_written);
    Loss {
        transactions: replayed.as_ref().map(|report| report.transactions),
        blocks: Some(blocks),
        ..unknown_loss(log)
    }
}

/// Gives up logs that could not be finished. The directory can be removed afterwards if nothing else in it is owed.
///
/// # Errors
/// When the directory cannot be read: nothing was given up.
pub fn give_up(directory: &AreaDirectory, failed: &[&FailedLog]) -> Result<GivenUp, FinishError> {
    let Some(left) = open_logs(directory)? else { return Ok(GivenUp::default()) };
    let mut outcome = GivenUp { losses: losses_of(&left, failed), unfinished: None };
    let (given_up, stays): (Vec<_>, Vec<_>) = left.logs.into_iter().partition(|(log, _)| is_meant(log, failed));
    given_up.iter().for_each(|(_, found)| found.close());
    let mut names: Vec<String> = given_up.into_iter().map(|(log, _)| log.name).collect();
    let mut is_any_unreadable = false;
    for (log, _) in left.unreadable {
        let removed = is_meant(&log, failed).then(|| directory.directory().remove(format!("{}.table", log.name)));
        match removed {
            Some(Ok(())) => names.push(log.name),
            Some(Err(error)) => {
                outcome.losses.retain(|loss| *loss != unknown_loss(&log));
                outcome.unfinished = Some(DirectoryError::from(error).into());
                is_any_unreadable = true;
            }
            None => is_any_unreadable = true,
        }
    }
    if !is_any_unreadable {
        // Where one is, nobody knows which pages are its own.
        let needed: HashSet<u32> = stays.iter().flat_map(|(_, found)| found.pages().map(|page| page.0)).collect();
        give_back(&left.ram, &needed);
    }
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    if let Err(error) = directory.forget_logs(&names) {
        outcome.unfinished = Some(error.into());
    }
    Ok(outcome)
}
