//! Recovery from a server: fetch the live log, complete it on storage, replay it from there.
//!
//! What must always hold: nothing is written before the whole log has been fetched and verified; the mark goes with the
//! superblock, after everything else is on storage. Cut off anywhere, it can be done again.

use super::{MarkFound, RemoteMark, RemoteOptions};
use crate::disk::{Disk, DiskOptions, PlacementKind};
use crate::finish;
use crate::journals::offset_of;
use crate::scan::{self, FoundLogPlace};
use jbd2::{Content, LogRead, SUPERBLOCK_BYTES, Superblock, sequence};
use recovery::{Error, Report, Status};
use remote_journal::{BlockingClient, ClientError, FetchedLog};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

/// One recovered log.
#[derive(Clone, Debug)]
pub struct RemoteRecovered {
    /// What it is called on the server.
    pub name: String,
    /// Where its file system begins, in bytes.
    pub home_start: u64,
    /// The epoch that was fetched; none where storage had the log.
    pub epoch: Option<u64>,
    /// What was done.
    pub report: Report,
}

/// A fetched log. What the server did not keep is behind the tail or was never written.
struct Fetched<'l>(&'l FetchedLog);

impl LogRead for Fetched<'_> {
    type Error = io::Error;

    fn read(&mut self, position: u32, buffer: &mut [u8]) -> io::Result<Content> {
        match self.0.blocks.get(&position) {
            Some(content) if content.len() == buffer.len() => buffer.copy_from_slice(content),
            _ => buffer.fill(0),
        }
        Ok(Content::Present)
    }
}

fn failed(what: &str) -> impl FnOnce(io::Error) -> Error + '_ {
    move |source| Error::Failed { what: what.to_owned(), source }
}

fn disk(path: &Path, dry_run: bool) -> Result<Arc<Disk>, Error> {
    let options = DiskOptions {
        name: path.display().to_string(),
        path: path.to_owned(),
        placement: PlacementKind::Storage,
        honour_flush: true,
        read_only: dry_run,
        nvm: None,
        remote: None,
    };
    Ok(Arc::new(Disk::open(options).map_err(failed("opening the image"))?))
}

/// Brings an image to its last committed state, with the logs that a server holds for it. Whoever wrote to them is fenced
/// off first. `only_marked`: leave logs alone that are on storage, or empty.
///
/// # Errors
/// [`Error::Refused`] when the server does not hold what storage says it does, or something of it is missing or damaged:
/// then nothing was changed for that log, and those before it are done.
pub fn recover_remote_image(
    image: &Path,
    journal: Option<&Path>,
    options: &RemoteOptions,
    dry_run: bool,
    only_marked: bool,
) -> Result<Vec<RemoteRecovered>, Error> {
    let mut disks = vec![disk(image, dry_run)?];
    if let Some(journal) = journal {
        disks.push(disk(journal, dry_run)?);
    }
    let found = scan::scan(&disks).map_err(failed("looking for journals"))?;
    let mut recovered = Vec::new();
    for place in found.logs.iter().filter(|place| place.home_disk == 0) {
        recovered.extend(recover_log(&disks, place, options, dry_run, only_marked)?);
    }
    Ok(recovered)
}

/// Whether some log of an image is on a journal server, or may be, and its epoch if that can be read.
///
/// # Errors
/// When the image cannot be read.
pub fn remote_epoch_of_image(image: &Path, journal: Option<&Path>) -> io::Result<Option<Option<u64>>> {
    let mut disks = Vec::new();
    for path in std::iter::once(image).chain(journal) {
        disks.push(disk(path, true).map_err(io::Error::other)?);
    }
    for place in scan::scan(&disks)?.logs {
        let Some(offset) = offset_of(&place.runs, place.block_bytes, 0) else { continue };
        let mut raw = [0; SUPERBLOCK_BYTES];
        disks[place.journal_disk].file.read_exact_at(&mut raw, offset)?;
        match RemoteMark::read(&raw) {
            MarkFound::Live(mark) => return Ok(Some(Some(mark.epoch))),
            MarkFound::Damaged => return Ok(Some(None)),
            MarkFound::None | MarkFound::Stale => {}
        }
    }
    Ok(None)
}

fn recover_log(
    disks: &[Arc<Disk>],
    place: &FoundLogPlace,
    options: &RemoteOptions,
    dry_run: bool,
    only_marked: bool,
) -> Result<Option<RemoteRecovered>, Error> {
    let (home, journal) = (&disks[place.home_disk].file, &disks[place.journal_disk].file);
    let name = options.name_of(place.home_start);
    let offset = offset_of(&place.runs, place.block_bytes, 0)
        .ok_or_else(|| Error::Refused("the journal's superblock has no place on its disk".to_owned()))?;
    let mut raw = [0; SUPERBLOCK_BYTES];
    journal.read_exact_at(&mut raw, offset).map_err(failed("reading the journal superblock"))?;
    let mark = match RemoteMark::read(&raw) {
        MarkFound::Live(mark) => Some(mark),
        MarkFound::Damaged => {
            return Err(Error::Refused(format!(
                "the journal superblock of {name} has a damaged mark of a journal server: which epoch is the live log \
                 cannot be told, so none is replayed; nothing was changed: run e2fsck -fy to give the log up"
            )));
        }
        MarkFound::Stale if only_marked => None,
        MarkFound::Stale => {
            return Err(Error::Refused(format!(
                "the file system of {name} was used or repaired, by something that does not know of the journal server, \
                 since its log went there: what the server has is older and must not be replayed over it; nothing was \
                 changed"
            )));
        }
        MarkFound::None => None,
    };
    let Some(mark) = mark else {
        if only_marked {
            return Ok(None);
        }
        let report = if dry_run {
            finish::dry_run_stored(place, journal)?
        } else if Superblock::decode(&raw).is_ok_and(|superblock| superblock.is_empty()) {
            Report::of(Status::Clean)
        } else {
            finish::finish_stored(place, home, journal)?
        };
        let report = report.with_note("the journal on storage is the live one; what a server holds of it is stale");
        return Ok(Some(RemoteRecovered { name, home_start: place.home_start, epoch: None, report }));
    };
    let mut client = BlockingClient::connect(&options.client).map_err(|error| match error {
        ClientError::Refused { .. } => Error::Refused(format!("{error}; nothing was changed")),
        error => failed("reaching the journal server")(io::Error::other(error)),
    })?;
    let log = fetch(&mut client, &name, &mark, place, dry_run)?;
    if dry_run {
        let report = finish::dry_run(&mut Fetched(&log), place)?;
        return Ok(Some(RemoteRecovered { name, home_start: place.home_start, epoch: Some(mark.epoch), report }));
    }
    // Judged in memory before anything is written.
    finish::dry_run(&mut Fetched(&log), place)?;
    let completing = || failed("completing the journal on storage");
    let mut blocks: Vec<_> = log.blocks.iter().filter(|(position, _)| **position != 0).collect();
    blocks.sort_by_key(|(position, _)| **position);
    for (position, content) in blocks {
        journal.write_all_at(content, offset_in(place, *position)?).map_err(completing())?;
    }
    remove_what_a_fall_back_left(journal, place, &log)?;
    journal.sync_data().map_err(completing())?;
    let superblock = &log.blocks[&0];
    journal.write_all_at(superblock, offset).map_err(completing())?;
    journal.sync_data().map_err(completing())?;
    let report = finish::finish_stored(place, home, journal)?;
    // Storage has it all; the server may forget.
    if let Err(error) = client.close(&name, mark.epoch, mark.nonce) {
        log::warn!("{name}: the server was not told that the log is over: {error}");
    }
    Ok(Some(RemoteRecovered { name, home_start: place.home_start, epoch: Some(mark.epoch), report }))
}

fn offset_in(place: &FoundLogPlace, position: u32) -> Result<u64, Error> {
    offset_of(&place.runs, place.block_bytes, position)
        .ok_or_else(|| Error::Refused(format!("log block {position} has no place in this journal")))
}

/// A fall-back that was cut off may have left on storage, in any order, blocks of transactions that the server never had:
/// a commit block without all that it commits. The replay from storage must end where the server's log does.
fn remove_what_a_fall_back_left(journal: &File, place: &FoundLogPlace, log: &FetchedLog) -> Result<(), Error> {
    let Some(Ok(superblock)) = log.blocks.get(&0).map(|block| Superblock::decode(block)) else { return Ok(()) };
    let mut block = vec![0; place.block_bytes as usize];
    for position in superblock.first..superblock.maxlen.min(place.log_blocks) {
        if log.blocks.contains_key(&position) {
            continue;
        }
        let offset = offset_in(place, position)?;
        journal.read_exact_at(&mut block, offset).map_err(failed("reading the journal's own place"))?;
        let is_newer =
            jbd2::peek(&block).is_some_and(|header| sequence::is_at_or_after(header.sequence, superblock.sequence));
        if is_newer {
            block.fill(0);
            journal.write_all_at(&block, offset).map_err(failed("completing the journal on storage"))?;
        }
    }
    Ok(())
}

fn fetch(
    client: &mut BlockingClient,
    name: &str,
    mark: &RemoteMark,
    place: &FoundLogPlace,
    dry_run: bool,
) -> Result<FetchedLog, Error> {
    let refused = |error: remote_journal::ClientError| Error::Refused(format!("{error}; nothing was changed"));
    let status = client.status(name).map_err(refused)?.ok_or_else(|| {
        Error::Refused(format!(
            "the journal server has no journal {name} for this client, but storage says that epoch {} is there; nothing \
             was changed",
            mark.epoch
        ))
    })?;
    if (status.epoch, status.nonce) != (mark.epoch, mark.nonce) || !status.is_live {
        let state = if status.is_live { "" } else { ", which is over" };
        return Err(Error::Refused(format!(
            "storage says that epoch {} of {name} is the live journal, but the server holds epoch {}{state}: this image is \
             not the one that was last used with it, or an older copy; nothing was changed",
            mark.epoch, status.epoch
        )));
    }
    if !dry_run {
        // Before it is read: nothing is added to it after.
        client.take(name).map_err(refused)?;
    }
    // Once more: the writer may have added to it until it was fenced off.
    let status = client.status(name).map_err(refused)?.filter(|now| now.epoch == mark.epoch).ok_or_else(|| {
        Error::Refused(format!("{name} was begun anew by somebody else meanwhile; nothing was changed"))
    })?;
    let log = client.fetch(&status, place.log_blocks).map_err(refused)?;
    let is_whole = log.blocks.get(&0).is_some_and(|superblock| Superblock::decode(superblock).is_ok());
    let is_same = log.blocks.iter().all(|(position, content)| {
        content.len() == place.block_bytes as usize
            && *position < place.log_blocks
            && offset_of(&place.runs, place.block_bytes, *position).is_some()
    });
    if !is_whole || !is_same || status.owner != place.file_system_uuid {
        return Err(Error::Refused(format!(
            "what the server holds as {name} is not this file system's journal; nothing was changed"
        )));
    }
    Ok(log)
}
