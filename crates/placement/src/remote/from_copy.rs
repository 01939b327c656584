//! A log that was on a server goes home from the copy that its process has left in tmpfs: the server may be lost.
//!
//! It is what the next worker does, and then the end of a VM: completed in its own place, and replayed from there. Whoever asks for it has
//! the images locked. What must never happen: that anything is written where storage is not as that process left it, since somebody else
//! has the log then (who has claimed it, and no more, is dead where all who could have are on this host: he had the images locked as well); that
//! a copy that lacks something is taken for all of it; or that anything goes to another file system than the log's.
//!
//! Failure story: killed at any moment, it can be done again; what storage says then is what the copy says that it may be.

use super::mirror::{MirrorFile, Phase};
use super::recover::check_home;
use super::ship::fall_back;
use super::state::Mode;
use super::{BackOff, JournalStorage, RemoteLog, RemoteOptions, Shared, Taken};
use crate::disk::Disk;
use crate::finish::LEFT_TO_THE_GUEST;
use crate::finish::{dry_run, finish_stored, leave_stored};
use crate::scan::{FoundLogPlace, why_not_replayed};
use jbd2::{Content, LogRead};
use recovery::{Error, Report, Status};
use remote_journal::{ClientOptions, ClientSecurity};
use std::io;
use std::sync::Arc;
use std::time::Duration;

fn failed(source: io::Error) -> Error {
    Error::Failed { what: "completing on storage a journal that was on a server".to_owned(), source }
}

fn refused(error: io::Error) -> Error {
    if Taken::is(&error) { Error::Refused(format!("{error}; nothing was changed")) } else { failed(error) }
}

/// Brings home what a copy has of an open log, whose file system and journal are on these disks.
///
/// # Errors
/// A refusal where somebody else has the log, or the copy lacks something: nothing was changed.
pub(crate) fn finish_from_copy(
    name: &str,
    place: &FoundLogPlace,
    [home, journal]: [Arc<Disk>; 2],
    mirror: MirrorFile,
) -> Result<Report, Error> {
    [&home, &journal].iter().for_each(|disk| super::shared_storage::forget_cached(disk));
    know_claim(name, place, [&home, &journal], &mirror)?;
    let said = mirror.says();
    if said.phase == Phase::Failed {
        // Storage had failed, or its server had given the log to somebody: who has it by now has said so on storage.
        let shared = shared(name, place, [&home, &journal], None);
        if !said.may_be.contains(&shared.read_superblock().map_err(failed)?) {
            return Err(refused(Taken::error()));
        }
        mirror.say(|said| said.phase = Phase::Open);
    }
    let mirror = Arc::new(mirror);
    let disks = [Arc::clone(&home), Arc::clone(&journal)];
    let (options, medium) = (nobodys(name), Arc::clone(&journal));
    let left = RemoteLog::shared_of_left(&options, place.clone(), disks, medium, BackOff::default(), mirror);
    let shared = left.map_err(refused)?;
    shared.settle_found().map_err(failed)?;
    // What nobody here can replay goes to its own place, and to no home.
    let is_distrusted = shared.is_distrusted.load(std::sync::atomic::Ordering::Acquire);
    if !is_distrusted && !dry_run(&mut OfCopy(&shared), place).is_err_and(|error| error.is_refusal()) {
        let superblock = shared.lock().mirror.superblock();
        let superblock = superblock.ok_or_else(|| failed(io::Error::other("the copy has no superblock")))?;
        check_home(place, [&*home, &*journal], ("what the copy has", &superblock), &mut OfCopy(&shared))?;
    }
    let (generation, is_to_be_completed) = {
        let mut state = shared.lock();
        state.may_not_begin = false;
        (state.generation, state.is_to_be_completed())
    };
    if is_to_be_completed {
        fall_back(&shared, generation).map_err(|error| {
            shared.lock().fail(Taken::is(&error));
            failed(error)
        })?;
    }
    if shared.lock().mode != Mode::Storage {
        return Err(failed(io::Error::other("the log's own place lacks something still")));
    }
    shared.check(&shared.on_storage()).map_err(failed)?;
    let report = if is_distrusted {
        Report::of(Status::Materialised).with_note(LEFT_TO_THE_GUEST)
    } else if let Some(why) = why_not_replayed(place, &home.file, &journal.file).map_err(failed)? {
        Report::of(Status::Materialised).with_note(LEFT_TO_THE_GUEST).with_note(why)
    } else {
        match finish_stored(place, &home.file, &journal.file) {
            // It is whole in its own place, and only its guest's kernel can replay it.
            Err(error) if error.is_refusal() => leave_stored(place, &journal.file)?,
            finished => finished?,
        }
    };
    shared.lock().close();
    Ok(report)
}

/// Somebody was about to recover the log from its server, has claimed it on storage, and was killed: what he has written besides is in the log's
/// own place, where all of the copy is written, too.
fn know_claim(
    name: &str,
    place: &FoundLogPlace,
    [home, journal]: [&Arc<Disk>; 2],
    mirror: &MirrorFile,
) -> Result<(), Error> {
    let mut said = mirror.says();
    let found = shared(name, place, [home, journal], None).read_superblock().map_err(failed)?;
    if said.may_be.contains(&found) || !said.is_claimed(&found) {
        return Ok(());
    }
    if !journal.patience().is_zero() {
        return Err(Error::Refused(format!(
            "{}: somebody was about to recover this journal from its server, and another host may have the disk open: whether that is over \
             cannot be told from here; nothing was changed: make a copy of the disk on a file system of this host, and give that with --image",
            journal.options.name
        )));
    }
    said.may_be.push(found);
    mirror.storage_may_be(&said.may_be);
    Ok(())
}

/// The log as the copy has it. What it does not have is behind the tail or was never written.
struct OfCopy<'s>(&'s Shared);

impl LogRead for OfCopy<'_> {
    type Error = io::Error;

    fn read(&mut self, position: u32, buffer: &mut [u8]) -> io::Result<Content> {
        match self.0.lock().mirror.get(position)? {
            Some(content) if content.len() == buffer.len() => buffer.copy_from_slice(&content),
            _ => buffer.fill(0),
        }
        Ok(Content::Present)
    }
}

/// Nothing is asked of a server.
fn nobodys(name: &str) -> RemoteOptions {
    let client = ClientOptions { address: String::new(), security: ClientSecurity::default(), timeout: Duration::ZERO };
    RemoteOptions { client, name: name.to_owned() }
}

fn shared(
    name: &str,
    place: &FoundLogPlace,
    [home, journal]: [&Arc<Disk>; 2],
    mirror: Option<Arc<MirrorFile>>,
) -> Arc<Shared> {
    let disks = [Arc::clone(home), Arc::clone(journal)];
    let medium = Arc::clone(journal);
    RemoteLog::shared(&nobodys(name), place.clone(), disks, medium, BackOff::default(), mirror)
}
