//! Recovery from a server: fetch the live log, complete it on storage, replay it from there.
//!
//! What must always hold:
//! * Nothing is written before the whole log has been fetched and verified, and whoever wrote it is fenced off.
//! * Whoever only reads a log (a dry run) fences nobody off, and nothing that its writer does meanwhile is taken for damage.
//! * The mark goes with the superblock, after everything else is on storage. Cut off anywhere, it can be done again.
//! * An image that is older than the log, a copy that was made before the mark was last written, is refused, and nobody is
//!   fenced off for it. So all logs of an image are judged before one of them is taken, and all are taken and judged once more before
//!   anything is written: a VM that runs may have one that is idle, which fits a copy of any age.
//! * Nothing is brought home to another file system than the log's, also where the mark is on the journal's disk alone ([`crate::its_home`]).
//! * What is compared with storage is compared with what that says after the writer was fenced off: until then both go on.
//! * What this host has in its page cache of the disk is no older than the claim on it, once anything else is written.
//! * Another host that is cut off from the server may be falling back just now: it finds our claim on storage, or we find
//!   what it wrote ([`super::shared_storage`]).
//!
//! Failure story: what may go well later (a network that is cut, a server that is full or stops, a secret that is the wrong one) is a
//! failure, with exit code 1; only what is wrong with the image or the log is refused.

use super::lineage::{Lineage, Nonce};
use super::{JournalStorage, MarkFound, RemoteMark, RemoteOptions, shared_storage};
use crate::disk::{Disk, DiskSettings, PlacementKind};
use crate::finish;
use crate::finish::{LEFT_TO_THE_GUEST, StoredLog};
use crate::its_home::why_not_its_home;
use crate::mark;
use crate::scan::offset_of;
use crate::scan::{self, FoundLogPlace};
use crate::stored::Stored;
use jbd2::{Content, LogRead, SUPERBLOCK_BYTES, Superblock, sequence};
use recovery::{Disk as Image, Error, Report, Status};
use remote_journal::message::JournalStatus;
use remote_journal::{BlockingClient, ClientError, FetchedLog};
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long it is waited for that a log's writer is not there any more: a server takes who says nothing for 15 s for gone, and one that
/// was killed has its connection closed at once.
const WRITER_PATIENCE: Duration = Duration::from_secs(if cfg!(test) { 2 } else { 20 });
const WRITER_PAUSE: Duration = Duration::from_millis(500);
/// How often a log is fetched that changes meanwhile.
const FETCHES_MAX: u32 = 5;

/// Whose log may be taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Taking {
    /// That of whoever it is: a person has said so.
    Anybodys,
    /// That of a writer who is not there any more.
    NobodysThere,
}

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

/// An image, whoever has it locked.
pub(super) fn unlocked(path: &Path, read_only: bool) -> Result<Arc<Disk>, Error> {
    let options = DiskSettings {
        name: path.display().to_string(),
        path: path.to_owned(),
        placement: PlacementKind::Storage,
        honour_flush: true,
        read_only,
        durable_within: None,
        write_log: None,
    };
    Ok(Arc::new(Disk::open(options).map_err(failed("opening the image"))?))
}

/// Brings an image to its last committed state, with the logs that a server holds for it, whose own place may be on another image, which is
/// `journal`. Whoever finishes what was left does it so, a start as well as a person, and has locked what is written to. Whoever wrote to the logs
/// is fenced off first. `only_marked`: as a start does it by itself: leave logs alone that are on storage, or empty, and those whose writer is
/// there (the image may be a copy of his); and mind file systems whose journal is not understood only where a server has that.
///
/// # Errors
/// A refusal when the server does not hold what storage says it does, or something of it is missing or damaged:
/// then nothing was changed, for any of them.
pub fn recover_remote_image(
    image: &Image,
    journal: Option<&Image>,
    options: &RemoteOptions,
    dry_run: bool,
    only_marked: bool,
) -> Result<Vec<RemoteRecovered>, Error> {
    let open = |image| Disk::open_locked(image, dry_run).map(Arc::new);
    let disks = std::iter::once(image).chain(journal).map(open).collect::<Result<Vec<_>, _>>()?;
    let taking = if only_marked { Taking::NobodysThere } else { Taking::Anybodys };
    recover_through(disks, options, dry_run, (only_marked, taking), &|disk| disk)
}

/// The same on open disks, of which the first is the image. For tests, the journal is read and written through something else than its disk.
pub(super) fn recover_through(
    disks: Vec<Arc<Disk>>,
    options: &RemoteOptions,
    dry_run: bool,
    (only_marked, taking): (bool, Taking),
    through: &dyn Fn(Arc<Disk>) -> Arc<dyn JournalStorage>,
) -> Result<Vec<RemoteRecovered>, Error> {
    let storages: Vec<_> = disks.iter().map(|disk| through(Arc::clone(disk))).collect();
    storages.iter().for_each(|storage| storage.forget_cached());
    let found = scan::scan(&disks).map_err(failed("looking for journals"))?;
    for left in found.left_alone.iter().filter(|left| left.place.home_disk == 0) {
        // A start leaves alone what is on no server.
        if only_marked && !has_server_mark(&storages, &left.place)? {
            continue;
        }
        let (at, image) = (left.place.home_start, disks[0].options.path.display());
        return Err(Error::Refused(format!(
            "the journal of the file system at byte {at} of {image} is left alone: {}",
            left.reason
        )));
    }
    let places: Vec<&FoundLogPlace> = found.logs.iter().filter(|place| place.home_disk == 0).collect();
    let mut on_server = 0;
    for place in &places {
        on_server += u32::from(has_server_mark(&storages, place)?);
    }
    let recovery = Recovery { disks: &disks, storages: &storages, options, keeps_log: on_server <= 1 };
    let mut judged = Vec::new();
    for place in places {
        judged.extend(judge_log(&recovery, place, dry_run, only_marked)?);
    }
    if dry_run {
        return Ok(judged.into_iter().map(JudgedLog::said).collect());
    }
    for log in &mut judged {
        log.take(&recovery, taking)?;
    }
    for log in &mut judged {
        log.judge_again(&recovery)?;
    }
    let mut recovered = Vec::new();
    for log in judged {
        let one = bring_home(&recovery, log);
        recovered.push(one.map_err(|error| after_others(&recovered, error))?);
    }
    Ok(recovered)
}

/// A refusal promises that nothing was changed: of a log behind others that were brought home it is a failure.
fn after_others(recovered: &[RemoteRecovered], error: Error) -> Error {
    let is_changed = |one: &&RemoteRecovered| !matches!(one.report.status, Status::None | Status::Clean);
    let names: Vec<&str> = recovered.iter().filter(is_changed).map(|one| one.name.as_str()).collect();
    match error {
        error if error.is_refusal() && !names.is_empty() => Error::Failed {
            what: format!("recovering what comes after {}, which was recovered,", names.join(" and ")),
            source: io::Error::other(error),
        },
        error => error,
    }
}

/// The same, of a log that was claimed on storage.
fn after_claim(error: Error) -> Error {
    match error {
        error if error.is_refusal() => Error::Failed {
            what: "bringing home a journal that was completed on storage".to_owned(),
            source: io::Error::other(error),
        },
        error => error,
    }
}

/// Whether some log of an image is on a journal server, or may be, and its epoch if that can be read.
///
/// # Errors
/// When the image cannot be read.
pub fn remote_epoch_of_image(image: &Path, journal: Option<&Path>) -> io::Result<Option<Option<u64>>> {
    let mut disks = Vec::new();
    for path in std::iter::once(image).chain(journal) {
        disks.push(unlocked(path, true).map_err(io::Error::other)?);
    }
    for place in scan::scan(&disks)?.all() {
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

/// What the logs of one image are brought home with.
struct Recovery<'r> {
    disks: &'r [Arc<Disk>],
    storages: &'r [Arc<dyn JournalStorage>],
    options: &'r RemoteOptions,
    /// What is fetched stays in memory until it is written. Of several logs on the server one is there at a time, and each is fetched anew.
    keeps_log: bool,
}

impl Recovery<'_> {
    /// The disk with the file system of a log, and the one with its own place.
    fn disks_of(&self, place: &FoundLogPlace) -> [&Disk; 2] {
        [&*self.disks[place.home_disk], &*self.disks[place.journal_disk]]
    }

    /// What a fetched log comes to, in memory; `raw` is the journal superblock on storage.
    fn judge(
        &self,
        place: &FoundLogPlace,
        raw: &[u8],
        (status, log): (&JournalStatus, &FetchedLog),
    ) -> Result<Report, Error> {
        // A run that was killed had found out, and nobody here replays it, wherever it is. What goes to no home is compared with none.
        if Stored::read(raw).is_distrusted {
            return Ok(left_to_guest());
        }
        let of_log = self.disks_of(place);
        let report = finish::dry_run(&mut Fetched(log), place)?;
        let owned = FoundLogPlace { file_system_uuid: status.owner, ..place.clone() };
        check_home(&owned, of_log, ("what the server has", &log.blocks[&0]), &mut Fetched(log))?;
        Ok(report)
    }
}

/// A log that may be brought home, as it was when it was looked at.
struct JudgedLog<'r> {
    place: &'r FoundLogPlace,
    name: String,
    superblock: OnStorage<'r>,
    /// Nothing where its own place has the live log.
    server: Option<OnServer>,
    /// That one is replayed from there.
    is_replayed: bool,
    /// What bringing it home comes to.
    report: Report,
}

/// A live log on the server.
struct OnServer {
    client: BlockingClient,
    mark: RemoteMark,
    status: JournalStatus,
    log: Option<FetchedLog>,
}

impl OnServer {
    /// A server ends a connection on which nothing was said for a minute, and other logs may have taken as long.
    fn connect_again(&mut self, recovery: &Recovery<'_>) -> Result<(), Error> {
        if !recovery.keeps_log {
            self.client = BlockingClient::connect(&recovery.options.client).map_err(because)?;
        }
        Ok(())
    }
}

/// Looks at a log. Nothing is changed, and nobody is fenced off: another log of the same image may be refused. Gives nothing where it is
/// to be left alone.
fn judge_log<'r>(
    recovery: &Recovery<'r>,
    place: &'r FoundLogPlace,
    dry_run: bool,
    only_marked: bool,
) -> Result<Option<JudgedLog<'r>>, Error> {
    let storage = &*recovery.storages[place.journal_disk];
    let name = recovery.options.name_of(place.home_start);
    let offset = offset_of(&place.runs, place.block_bytes, 0)
        .ok_or_else(|| Error::Refused("the journal's superblock has no place on its disk".to_owned()))?;
    let mut superblock = OnStorage { storage, offset, raw: [0; SUPERBLOCK_BYTES] };
    superblock.read()?;
    let Some(mark) = mark_of(&superblock.raw, &name, only_marked)? else {
        if only_marked {
            return Ok(None);
        }
        let of_log = recovery.disks_of(place);
        let journal = &of_log[1].file;
        let is_distrusted = Stored::read(&superblock.raw).is_distrusted;
        let is_empty = Superblock::decode(&superblock.raw).is_ok_and(|superblock| superblock.is_empty());
        if !is_distrusted && !is_empty {
            check_home(place, of_log, ("its log", &superblock.raw), &mut StoredLog { place, journal })?;
        }
        let report = if is_distrusted && !is_empty {
            left_to_guest()
        } else if is_empty && !dry_run {
            Report::of(Status::Clean)
        } else {
            finish::dry_run_stored(place, journal)?
        };
        let is_replayed = !is_distrusted && !is_empty;
        return Ok(Some(JudgedLog { place, name, superblock, server: None, is_replayed, report }));
    };
    let options = recovery.options;
    let mut client = BlockingClient::connect(&options.client).map_err(because)?;
    let (status, log) = fetch_beside_its_writer(&mut client, options, &name, &mark, place, &mut superblock)?;
    // Judged in memory before anything is written.
    let report = match recovery.judge(place, &superblock.raw, (&status, &log)) {
        // Its guest has ended meanwhile.
        Err(error) if error.is_refusal() && superblock.now()? != superblock.raw => return Err(changing(&name)),
        report => report?,
    };
    let server = Some(OnServer { client, mark, status, log: Some(log).filter(|_| recovery.keeps_log) });
    Ok(Some(JudgedLog { place, name, superblock, server, is_replayed: false, report }))
}

impl JudgedLog<'_> {
    /// Fences off whoever writes the log.
    fn take(&mut self, recovery: &Recovery<'_>, taking: Taking) -> Result<(), Error> {
        let Some(server) = &mut self.server else { return Ok(()) };
        server.connect_again(recovery)?;
        let OnServer { client, mark, .. } = server;
        match taking {
            Taking::Anybodys => take(client, recovery.options, &self.name, mark),
            Taking::NobodysThere => take_free(client, recovery.options, &self.name, mark),
        }
    }

    /// Judges what its writer has made of it until he was fenced off.
    fn judge_again(&mut self, recovery: &Recovery<'_>) -> Result<(), Error> {
        let JudgedLog { place, name, superblock, server, .. } = self;
        let Some(server) = server else { return Ok(()) };
        server.connect_again(recovery)?;
        let fetched = superblock.raw;
        let fenced_off = fetch_fenced_off(server, name, place, superblock);
        if place.home_disk != place.journal_disk {
            // Its file system is looked at once more.
            recovery.storages[place.home_disk].forget_cached();
        }
        let judged = fenced_off.and_then(|(status, log)| {
            recovery.judge(place, &superblock.raw, (&status, &log))?;
            Ok((status, log))
        });
        let (status, log) = match judged {
            // What is wrong is wrong between two moments.
            Err(error) if error.is_refusal() && superblock.now()? != fetched => return Err(changing(name)),
            judged => judged?,
        };
        (server.status, server.log) = (status, Some(log).filter(|_| recovery.keeps_log));
        Ok(())
    }

    /// What is said of a log to whoever asks what would be done with it.
    fn said(self) -> RemoteRecovered {
        let (epoch, report) = match self.server {
            Some(server) => (Some(server.mark.epoch), self.report),
            None => (None, beside_a_stale_one(self.report)),
        };
        RemoteRecovered { name: self.name, home_start: self.place.home_start, epoch, report }
    }
}

/// Whether the journal superblock on storage says so.
fn has_server_mark(storages: &[Arc<dyn JournalStorage>], place: &FoundLogPlace) -> Result<bool, Error> {
    let Some(offset) = offset_of(&place.runs, place.block_bytes, 0) else { return Ok(false) };
    let mut raw = [0; SUPERBLOCK_BYTES];
    storages[place.journal_disk].read_at(offset, &mut raw).map_err(failed("reading the journal superblock"))?;
    Ok(super::is_on_a_server(&raw))
}

fn beside_a_stale_one(report: Report) -> Report {
    report.with_note("the journal on storage is the live one; what a server holds of it is stale")
}

/// Completes a log on storage, where it is on the server and was taken there, and replays it.
fn bring_home(recovery: &Recovery<'_>, judged: JudgedLog<'_>) -> Result<RemoteRecovered, Error> {
    let JudgedLog { place, name, mut superblock, server, is_replayed, report } = judged;
    let [home, journal] = recovery.disks_of(place).map(|disk| &disk.file);
    let Some(mut server) = server else {
        let report = if is_replayed { finish::finish_stored(place, home, journal)? } else { report };
        let report = beside_a_stale_one(report);
        return Ok(RemoteRecovered { name, home_start: place.home_start, epoch: None, report });
    };
    let log = match server.log.take() {
        Some(log) => log,
        None => fetch_taken(&mut server, recovery, &name, place)?,
    };
    let OnServer { mut client, mark, .. } = server;
    let (storages, storage, offset) = (recovery.storages, superblock.storage, superblock.offset);
    let is_distrusted = Stored::read(&superblock.raw).is_distrusted;
    let lineage = Lineage::read(&superblock.raw).unwrap_or_default();
    let failed_flushes = storage.failed_flushes();
    // Until the claim is there another host's guest goes on, and what the scan has read of the disk grows old in the page cache: to be read
    // by the replay, and to be written back, page by page, around what is written here. The claim itself is a part of a page.
    storages.iter().for_each(|storage| storage.forget_cached());
    let claim = superblock.claim(lineage, failed_flushes)?;
    storages.iter().for_each(|storage| storage.forget_cached());
    let completing = || failed("completing the journal on storage");
    let mut blocks: Vec<_> = log.blocks.iter().filter(|(position, _)| **position != 0).collect();
    blocks.sort_by_key(|(position, _)| **position);
    for (position, content) in blocks {
        let offset = offset_in(place, *position).map_err(after_claim)?;
        storage.write_at(offset, content).map_err(completing())?;
    }
    superblock.check()?;
    remove_what_a_fall_back_left(storage, place, &log).map_err(after_claim)?;
    storage.sync_since(failed_flushes).map_err(completing())?;
    superblock.check()?;
    let mut whole = log.blocks[&0].to_vec();
    // The claim stays: without it this could be, byte for byte, what the other host wrote when it fell back.
    Lineage { held: mark.nonce, tried: Default::default(), claim, count: lineage.count }.write_into(&mut whole);
    if is_distrusted {
        let distrusted = mark::distrusted(&whole).map_err(completing())?;
        whole[..SUPERBLOCK_BYTES].copy_from_slice(&distrusted);
    }
    storage.write_at(offset, &whole).map_err(completing())?;
    storage.sync_since(failed_flushes).map_err(completing())?;
    let report = if is_distrusted {
        left_to_guest()
    } else {
        finish::finish_stored(place, home, journal).map_err(after_claim)?
    };
    // Storage has it all; the server keeps what it has until the next log begins, and nobody has to ask for it.
    if let Err(error) = client.close(&name, mark.epoch, mark.nonce) {
        log::warn!("{name}: the server was not told that the log is over: {error}");
    }
    Ok(RemoteRecovered { name, home_start: place.home_start, epoch: Some(mark.epoch), report })
}

/// Refuses a file system that is not the one whose log that is, where its journal is on another disk: the mark is on that one. `raw` is the
/// journal's superblock as its guest has written it last, and `what` what there is of the log, in words.
pub(super) fn check_home<L: LogRead + Send>(
    place: &FoundLogPlace,
    [home, journal]: [&Disk; 2],
    (what, raw): (&str, &[u8]),
    log: &mut L,
) -> Result<(), Error> {
    let books = Superblock::decode(raw).map_err(|error| Error::Refused(format!("{error}; nothing was changed")))?;
    let is_done = || finish::is_home(log, place, &home.file);
    let Some(why) = why_not_its_home(what, place, &books, &home.file, is_done)? else { return Ok(()) };
    Err(Error::Refused(format!(
        "{}: {why}; nothing was changed, and the log is kept: if its VM's own image is to be had still, put that back as it was left, and try \
         again; to use this one without the log, run e2fsck -fy on it with -j {}, as after a loss of power without a journal",
        home.options.name, journal.options.name
    )))
}

/// What is said of a log that was completed on storage, and that is all.
fn left_to_guest() -> Report {
    Report::of(Status::Materialised).with_note(LEFT_TO_THE_GUEST)
}

/// What storage says of the log: the server's, from this epoch on, or none.
fn mark_of(raw: &[u8], name: &str, only_marked: bool) -> Result<Option<RemoteMark>, Error> {
    match RemoteMark::read(raw) {
        MarkFound::Live(mark) => Ok(Some(mark)),
        MarkFound::Damaged => Err(Error::Refused(format!(
            "the journal superblock of {name} has a damaged mark of a journal server: which epoch is the live log \
             cannot be told, so none is replayed; nothing was changed: run e2fsck -fy to give the log up"
        ))),
        MarkFound::Stale if only_marked => Ok(None),
        MarkFound::Stale => Err(Error::Refused(format!(
            "the file system of {name} was used or repaired, by something that does not know of the journal server, \
             since its log went there: what the server has is older and must not be replayed over it; nothing was \
             changed"
        ))),
        MarkFound::None => Ok(None),
    }
}

/// Fetches a log that somebody may be writing to: what its tail passes meanwhile is gone from the server, and that is no damage.
/// Gives the log with the superblock that it belongs to.
fn fetch_beside_its_writer(
    client: &mut BlockingClient,
    options: &RemoteOptions,
    name: &str,
    mark: &RemoteMark,
    place: &FoundLogPlace,
    superblock: &mut OnStorage<'_>,
) -> Result<(JournalStatus, FetchedLog), Error> {
    for _ in 0..FETCHES_MAX {
        let raw = superblock.raw;
        let before = status_of(client, name, mark)?;
        let fetched = fetch(client, name, mark, place).and_then(|(status, log)| {
            refuse_older_server(name, mark.acknowledged(&raw), &status)?;
            refuse_older(name, Lineage::read(&raw).unwrap_or_default().count, &log)?;
            Ok((status, log))
        });
        let refused = match fetched {
            Err(error) if error.is_refusal() => error,
            fetched => return fetched,
        };
        // A mark on storage that is another one says which log is live, better than this one did.
        superblock.read()?;
        if !matches!(RemoteMark::read(&superblock.raw), MarkFound::Live(now) if now == *mark) {
            return Err(changing(name));
        }
        // A server ends the connection on which it has found damage.
        *client = BlockingClient::connect(&options.client).map_err(because)?;
        let is_same = superblock.raw == raw && status_of(client, name, mark)? == before;
        if is_same {
            return Err(refused);
        }
    }
    Err(changing(name))
}

/// The log that was fetched, or what its writer has made of it until it was fenced off: storage says now what that has to have. Its tail
/// may have moved in between, on storage and then on the server.
fn fetch_fenced_off(
    server: &mut OnServer,
    name: &str,
    place: &FoundLogPlace,
    superblock: &mut OnStorage<'_>,
) -> Result<(JournalStatus, FetchedLog), Error> {
    let OnServer { client, mark, status: before, log } = server;
    superblock.read()?;
    if !matches!(RemoteMark::read(&superblock.raw), MarkFound::Live(now) if now == *mark) {
        return Err(changing(name));
    }
    let status = status_of(client, name, mark)?;
    // A server may say anything.
    let fence = before.fence.wrapping_add(1);
    let is_same = status == JournalStatus { fence, ..before.clone() };
    let (status, log) = match log.take().filter(|_| is_same) {
        Some(log) => (status, log),
        None => fetch(client, name, mark, place)?,
    };
    refuse_older_server(name, mark.acknowledged(&superblock.raw), &status)?;
    refuse_older(name, Lineage::read(&superblock.raw).unwrap_or_default().count, &log)?;
    Ok((status, log))
}

/// Fetches a log once more that was judged since its writer was fenced off. It is taken once more, too: only who has taken it on its own
/// connection can say there that it was recovered.
fn fetch_taken(
    server: &mut OnServer,
    recovery: &Recovery<'_>,
    name: &str,
    place: &FoundLogPlace,
) -> Result<FetchedLog, Error> {
    server.connect_again(recovery)?;
    let OnServer { client, mark, status: before, .. } = server;
    take(client, recovery.options, name, mark)?;
    let (status, log) = fetch(client, name, mark, place)?;
    if (status.tail, status.last) != (before.tail, before.last) {
        return Err(changing(name));
    }
    Ok(log)
}

fn changing(name: &str) -> Error {
    Error::Failed {
        what: format!("fetching {name} from the journal server (nothing was changed; try again)"),
        source: io::Error::other("somebody writes to this journal just now"),
    }
}

fn offset_in(place: &FoundLogPlace, position: u32) -> Result<u64, Error> {
    offset_of(&place.runs, place.block_bytes, position)
        .ok_or_else(|| Error::Refused(format!("log block {position} has no place in this journal")))
}

/// A fall-back that was cut off may have left on storage, in any order, blocks of transactions that the server never had:
/// a commit block without all that it commits. The replay from storage must end where the server's log does.
fn remove_what_a_fall_back_left(
    storage: &dyn JournalStorage,
    place: &FoundLogPlace,
    log: &FetchedLog,
) -> Result<(), Error> {
    let Some(Ok(superblock)) = log.blocks.get(&0).map(|block| Superblock::decode(block)) else { return Ok(()) };
    let mut block = vec![0; place.block_bytes as usize];
    for position in superblock.first..superblock.maxlen.min(place.log_blocks) {
        if log.blocks.contains_key(&position) {
            continue;
        }
        let offset = offset_in(place, position)?;
        storage.read_at(offset, &mut block).map_err(failed("reading the journal's own place"))?;
        let is_newer =
            jbd2::peek(&block).is_some_and(|header| sequence::is_at_or_after(header.sequence, superblock.sequence));
        if is_newer {
            block.fill(0);
            storage.write_at(offset, &block).map_err(failed("completing the journal on storage"))?;
        }
    }
    Ok(())
}

/// What a server's no, or its silence, means for who recovers. Nothing was changed until here.
fn because(error: ClientError) -> Error {
    if error.is_damage() {
        return Error::Damaged(format!("{error}; nothing was changed"));
    }
    let what = match error.is_passing() {
        true => "fetching the log from the journal server (nothing was changed; try again)",
        false => "asking the journal server for the log (nothing was changed; mend the cause, and try again)",
    };
    Error::Failed { what: what.to_owned(), source: io::Error::other(error) }
}

/// Refuses an image whose mark is older than the log: what its guest wrote home since is not on it.
fn refuse_older(name: &str, count: u64, log: &FetchedLog) -> Result<(), Error> {
    let of_log = log.blocks.get(&0).and_then(|block| Lineage::read(block)).unwrap_or_default().count;
    if of_log <= count {
        return Ok(());
    }
    Err(Error::Refused(format!(
        "this image is an older copy, a snapshot or a backup, of the disk that the log {name} belongs to: its mark is number \
         {count}, and the log goes on from number {of_log}; what was written to the disk in between is not on it, so the log \
         must not be replayed over it; nothing was changed, and the log is kept for the disk (to use this copy without it, run \
         e2fsck -fy, as after a loss of power without a journal)"
    )))
}

/// Refuses a server whose disk was put back from an older state (a snapshot, a backup, a copy of the store): it has acknowledged more
/// of this log than it has, and what it has is older than the file system.
fn refuse_older_server(name: &str, acknowledged: Option<u64>, status: &JournalStatus) -> Result<(), Error> {
    let Some(acknowledged) = acknowledged.filter(|acknowledged| status.last < *acknowledged) else { return Ok(()) };
    Err(Error::Refused(format!(
        "the journal server has an older state of the log {name} than it once had: its last batch is number {}, and number \
         {acknowledged} was acknowledged; its store was put back from a snapshot or a backup, and the log must not be replayed over \
         a disk that has gone on since; nothing was changed: bring back the server's newest state, or give the log up with \
         e2fsck -fy, as after a loss of power without a journal",
        status.last
    )))
}

/// The state of the very log that storage says is live.
fn status_of(client: &mut BlockingClient, name: &str, mark: &RemoteMark) -> Result<JournalStatus, Error> {
    let status = client.status(name).map_err(because)?.ok_or_else(|| {
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
    Ok(status)
}

fn fetch(
    client: &mut BlockingClient,
    name: &str,
    mark: &RemoteMark,
    place: &FoundLogPlace,
) -> Result<(JournalStatus, FetchedLog), Error> {
    let status = status_of(client, name, mark)?;
    if status.block_bytes != place.block_bytes {
        return Err(Error::Refused(format!(
            "what the server holds as {name} has blocks of {} bytes, and this file system's journal of {}; nothing was changed",
            status.block_bytes, place.block_bytes
        )));
    }
    let log = client.fetch(&status, place.log_blocks).map_err(because)?;
    let is_whole = log.blocks.get(&0).is_some_and(|superblock| Superblock::decode(superblock).is_ok());
    let is_same = log.blocks.iter().all(|(position, content)| {
        content.len() == place.block_bytes as usize
            && *position < place.log_blocks
            && offset_of(&place.runs, place.block_bytes, *position).is_some()
    });
    if !is_whole || !is_same {
        return Err(Error::Refused(format!(
            "what the server holds as {name} is not this file system's journal; nothing was changed"
        )));
    }
    if status.owner != place.file_system_uuid && place.home_disk == place.journal_disk {
        // Epoch and nonce of its mark are proof. (Of a journal on another disk they prove nothing of this one: `check_home`.)
        log::warn!("{name}: the file system was given another UUID while its log was on the journal server");
    }
    Ok((status, log))
}

/// Fences off whoever writes the log, once he is not there any more.
fn take_free(client: &mut BlockingClient, options: &RemoteOptions, name: &str, mark: &RemoteMark) -> Result<(), Error> {
    let began = Instant::now();
    loop {
        match client.take_free(name, mark.epoch, mark.nonce) {
            Err(error) if error.is_in_use() && began.elapsed() < WRITER_PATIENCE => std::thread::sleep(WRITER_PAUSE),
            Err(ClientError::OldServer) => {
                // It cannot tell.
                *client = BlockingClient::connect(&options.client).map_err(because)?;
                return take(client, options, name, mark);
            }
            result => return result.map_err(because),
        }
        // It ends a connection on which it has said no.
        *client = BlockingClient::connect(&options.client).map_err(because)?;
    }
}

/// Fences off whoever writes the log.
fn take(client: &mut BlockingClient, options: &RemoteOptions, name: &str, mark: &RemoteMark) -> Result<(), Error> {
    match client.take_log(name, mark.epoch, mark.nonce) {
        Err(ClientError::OldServer) => {
            // It takes whatever there is; what that was is compared after.
            *client = BlockingClient::connect(&options.client).map_err(because)?;
            client.take(name).map_err(because)
        }
        result => result.map_err(because),
    }
}

/// The journal superblock on storage, as it was read or written last.
struct OnStorage<'d> {
    storage: &'d dyn JournalStorage,
    offset: u64,
    raw: [u8; SUPERBLOCK_BYTES],
}

impl OnStorage<'_> {
    fn now(&self) -> Result<[u8; SUPERBLOCK_BYTES], Error> {
        let mut raw = [0; SUPERBLOCK_BYTES];
        self.storage.read_at(self.offset, &mut raw).map_err(failed("reading the journal superblock"))?;
        Ok(raw)
    }

    fn read(&mut self) -> Result<(), Error> {
        self.raw = self.now()?;
        Ok(())
    }

    /// Whether nobody else has written it since.
    fn check(&self) -> Result<(), Error> {
        if self.now()? == self.raw {
            return Ok(());
        }
        Err(Error::Failed {
            what: "recovering the journal (somebody else uses the disk; when that has ended, try again)".to_owned(),
            source: io::Error::other(shared_storage::Taken),
        })
    }

    /// Says on storage that this journal is being recovered: another host that had it finds that, and writes no more; or it was
    /// faster, and its log on storage is the one that counts.
    fn claim(&mut self, lineage: Lineage, failed_flushes: u64) -> Result<Nonce, Error> {
        let claiming = || failed("claiming the journal on storage");
        self.check()?;
        let claim = remote_journal::random();
        Lineage { claim, ..lineage }.write_into(&mut self.raw);
        self.storage.write_at(self.offset, &self.raw).map_err(claiming())?;
        self.storage.sync_since(failed_flushes).map_err(claiming())?;
        self.storage.wait_for_others();
        self.check()?;
        Ok(claim)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_refused_after_something_was_changed_is_a_failure() {
        let one = |status| RemoteRecovered {
            name: "disk-0".to_owned(),
            home_start: 0,
            epoch: None,
            report: Report::of(status),
        };
        let refused = || Error::Refused("it is older".to_owned());
        for unchanged in [Status::None, Status::Clean] {
            assert!(after_others(&[one(unchanged)], refused()).is_refusal(), "{unchanged:?}");
        }
        for changed in [Status::Recovered, Status::Damaged, Status::Materialised] {
            let error = after_others(&[one(Status::Clean), one(changed)], refused());
            assert!(!error.is_refusal(), "{changed:?}");
            assert_eq!(
                error.to_string(),
                "recovering what comes after disk-0, which was recovered, failed: it is older",
                "{changed:?}"
            );
        }
        assert!(!after_claim(refused()).is_refusal());
    }
}
