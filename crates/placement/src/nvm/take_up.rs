//! Going on with a log whose worker has died while its guest runs: with its region ([`nvm_journal::Journal::take_up`]), what was noted
//! ([`super::notes`]), and what storage says.
//!
//! Whose a region is, and what storage says of it, means this; the first row that fits counts, anything else is refused:
//!
//! | row | region | storage ([`super::books::RegionBooks::judge`]) | notes | the worker died |
//! |---|---|---|---|---|
//! | 1 | no log's | not in a region | | while the log was closed, or lived elsewhere: as storage says |
//! | 2 | this log's | its mark | of this opening, and they agree with the region | while the log was open: it is |
//! | 3 | this log's; it was left | its mark, or that of distrust | | while it left for its own place: it is there |
//! | 4 | this log's | owes nothing, or emptied | | while it was opened, closed, handed over or recovered: as storage says |
//!
//! A region of this log's that holds nothing, and of which storage says nothing, gives way to the one that the log is in ([`super::books::RegionBooks::yields`]), and is
//! given back with the rest.
//!
//! In row 2 a transaction that the guest was told of before the flush of its appends ([`super::acknowledged`]) is made durable and counts, before the notes are
//! compared with the region: they say so already. The mark is made durable, in case the worker died before its flush of it had ended: what is committed counts on it. In rows 3
//! and 4 the region is given back, once what storage says is durable. That, and whatever else is done to storage, comes when
//! nothing else can fail any more ([`crate::Journals::go_on`]).
//!
//! It must never: go on with a log of which anything is missing; give a region back while storage says that the log is in it.
//!
//! Failure story: what does not agree is refused with a sentence, and region, notes and storage mean what they meant. The worker that follows
//! may be killed at any point of this: notes are written anew before anything is done to the log.

use super::books::{RegionVerdict, RegionWhy};
use super::captured::Captured;
use super::condition::Condition;
use super::coverage::Coverage;
use super::log_stream::LogStream;
use super::mark::{self, Mark, Marks};
use super::notes::{FoundNotes, Noted, Notes, Rest};
use super::recover::books;
use super::superblock::copies_max;
use super::versions::{AtHome, Held, HomeState};
use super::work::Work;
use super::{NvmDisk, Region, State};
use crate::keeper::{TakenUp, ToSettle};
use crate::log::Log;
use crate::opening::write_mark_bytes;
use crate::stored::{Says, Stored};
use extfs::Allocation;
use jbd2::Superblock;
use nvm_journal::{Found, Journal, Owner};
use own_files::OwnDirectory;
use std::io;
use std::sync::Arc;

fn refused(what: impl Into<String>) -> io::Error {
    io::Error::other(what.into())
}

/// A region that says it is a log's.
struct OfLog {
    slot: usize,
    found: Found,
    owner: Owner,
    /// What storage means to it.
    verdict: Result<RegionVerdict, RegionWhy>,
}

impl NvmDisk {
    /// Which region is this log's, and those that give way to it.
    fn slots_of(&self, log: &Log, raw: &Mark, superblock: &Superblock) -> io::Result<(Option<OfLog>, Vec<usize>)> {
        let (mut of_log, mut yielding): (Option<OfLog>, Vec<OfLog>) = (None, Vec::new());
        for (slot, state) in self.states().enumerate() {
            let State::Idle(medium) = &*state else { continue };
            let Some(found) = Found::read(medium.bytes()).map_err(io::Error::other)? else { continue };
            let Some(owner) = found.owner.clone() else { continue };
            if owner.home_start != log.place.home_start || owner.journal != superblock.uuid {
                continue;
            }
            let books = books(&found, &owner, medium.bytes(), superblock, &log.home.file)?;
            let verdict = books.judge(raw, superblock);
            let one = OfLog { slot, found, owner, verdict };
            if books.yields(verdict) {
                yielding.push(one);
            } else if of_log.replace(one).is_some() {
                return Err(refused("two regions of NVM say that they have it"));
            }
        }
        // Where none has it, one is as good as another.
        let of_log = of_log.or_else(|| yielding.pop());
        Ok((of_log, yielding.into_iter().map(|one| one.slot).collect()))
    }
}

/// Settles what is to be settled, and then makes these regions, which hold nothing, nobody's.
fn with_yielding(nvm: Arc<NvmDisk>, settle: ToSettle, yielding: Vec<usize>) -> ToSettle {
    Box::new(move || {
        settle()?;
        for slot in yielding {
            if let State::Idle(medium) = &mut *nvm.lock(slot) {
                nvm_journal::forget(medium).map_err(io::Error::other)?;
            }
        }
        Ok(())
    })
}

/// Makes durable what storage says, and then a region nobody's.
fn give_back(nvm: Arc<NvmDisk>, slot: usize, log: Log, superblock: Option<Vec<u8>>) -> ToSettle {
    Box::new(move || {
        let failed_flushes = [&log.home, &log.journal].map(|disk| disk.file.failed_flushes());
        if let Some(superblock) = superblock {
            log.journal.file.write_all_at(&superblock, log.place_of(0)?)?;
        }
        log.home.file.sync_since(failed_flushes[0])?;
        log.journal.file.sync_since(failed_flushes[1])?;
        let mut state = nvm.lock(slot);
        let State::Idle(medium) = &mut *state else { return Ok(()) };
        nvm_journal::forget(medium).map_err(io::Error::other)
    })
}

/// Makes the mark durable that storage has, and has the region know it: the worker that died may have been between two of them, and may
/// have written its first one, on which every commit counts, without a flush behind it. Not every guest sends one.
fn settle_mark(nvm: Arc<NvmDisk>, slot: usize, log: Log, mark: Mark) -> ToSettle {
    Box::new(move || {
        write_mark_bytes(&log, &mark)?;
        let mut state = nvm.lock(slot);
        let State::Held(captured) = &mut *state else { return Ok(()) };
        let checksum = mark::checksum(&mark);
        if captured.owner.mark_checksum != checksum {
            captured.owner.mark_checksum = checksum;
            captured.journal.set_owner(&captured.owner).map_err(io::Error::other)?;
        }
        Ok(())
    })
}

impl Work {
    /// See the module. `raw` is the journal superblock on storage.
    pub(super) fn take_up(&mut self, log: &Log, raw: &Mark) -> io::Result<(TakenUp, Option<ToSettle>)> {
        let nvm = Arc::clone(&self.nvm);
        let superblock = Superblock::decode(raw).map_err(io::Error::other)?;
        let says = Stored::read(raw).says;
        let (of_log, yielding) = nvm.slots_of(log, raw, &superblock)?;
        let Some(OfLog { slot, found, owner, verdict }) = of_log else {
            return match says {
                Says::Nvm(_) => {
                    Err(refused("storage says that a region of NVM has it, and no region of the disk does"))
                }
                _ => Ok((TakenUp::AsStored, None)),
            };
        };
        let verdict = verdict.map_err(|why| {
            refused(format!(
                "its region of NVM owes {} blocks, and storage is not as that knows it ({why:?})",
                found.latest.len()
            ))
        })?;
        let (taken_up, settle) = match verdict {
            RegionVerdict::Marked => (TakenUp::Open, self.take_up_open(log, slot, owner, raw)?),
            RegionVerdict::Left => {
                let from = Superblock::decode(&owner.attachment).map_err(io::Error::other)?.sequence;
                let settle = give_back(Arc::clone(&nvm), slot, log.clone(), Some(owner.attachment.to_vec()));
                (TakenUp::Left(from), settle)
            }
            RegionVerdict::OwesNothing | RegionVerdict::Emptied => {
                let taken_up = match says {
                    Says::LeftToGuest(tail) if owner.is_left => TakenUp::Left(tail.sequence),
                    _ => TakenUp::AsStored,
                };
                (taken_up, give_back(Arc::clone(&nvm), slot, log.clone(), None))
            }
        };
        Ok((taken_up, Some(with_yielding(nvm, settle, yielding))))
    }

    /// Row 2.
    fn take_up_open(&mut self, log: &Log, slot: usize, owner: Owner, raw: &Mark) -> io::Result<ToSettle> {
        let nvm = Arc::clone(&self.nvm);
        let directory = nvm.directory().ok_or_else(|| refused("there is no directory with notes on it"))?;
        let number = mark::number(raw).ok_or_else(|| refused("its mark has no number"))?;
        let (journal, home_start) = (owner.journal, owner.home_start);
        let notes = of_opening(&directory, journal, home_start, number)?;
        let mut state = nvm.lock(slot);
        let State::Idle(mut medium) = std::mem::replace(&mut *state, State::Failed) else {
            return Err(refused("its region of NVM is in use"));
        };
        count_acknowledged(&mut medium, log)?;
        let taken = Journal::take_up(medium, nvm.journal_options()).map_err(io::Error::other)?;
        let mut journal = taken.ok_or_else(|| refused("its region of NVM is nobody's"))?;
        let name = notes.name().to_owned();
        let identity = notes.identity;
        let settled = Noted::settle(notes, journal.sequence(), &|block| journal.contains(block));
        let (noted, rest) = settled.map_err(refused)?;
        if noted.has_failed {
            return Err(refused("it was given up: its region of NVM or its disk has failed"));
        }
        if !noted.unknown(journal.homes()).is_empty() {
            return Err(refused("its region of NVM has blocks that the notes on it do not know"));
        }
        if let Rest::Sequence(sequence) = rest {
            journal.set_sequence(sequence).map_err(io::Error::other)?;
        }
        let stream = LogStream::left(noted.log(), copies_max(&journal));
        let held = |(block, (sequence, home)): (&u64, &(u32, HomeState))| {
            // Whether it is durable is not known.
            let overwritten = (*home == HomeState::Other).then_some(1);
            let last_overwritten = overwritten;
            (
                *block,
                Held { sequence: *sequence, home: *home, noted: *home, overwrites: 0, overwritten, last_overwritten },
            )
        };
        let mut captured = Captured {
            all_but_own: log.place.all_but_own(),
            log: Arc::new(log.clone()),
            stream,
            journal,
            marks: Marks::new(*raw),
            homes: noted.homes.iter().map(held).collect(),
            at_home: noted
                .at_home
                .iter()
                .map(|(block, sequence)| (*block, AtHome { sequence: *sequence, digest: None }))
                .collect(),
            allocation: Allocation::default(),
            shown: None,
            is_read: false,
            doubtful: Vec::new(),
            has_failed: false,
            notes: Notes::none(),
            resent: noted.sent(),
            owner,
        };
        if let Some(blocks) = &noted.read {
            captured.show_again(&self.home.file, blocks.as_deref())?;
        }
        if noted.has_flush_failed {
            // Storage has said so to the process before; its guest hears of it once more.
            self.home.note_failed_flush();
            captured.flush_failed(0);
        }
        let to_settle = settle_mark(Arc::clone(&nvm), slot, log.clone(), *raw);
        captured.notes = Notes::go_on(directory, (name, identity), &captured.state(noted.has_flush_failed))?;
        log::info!(
            "disk {}: the journal of the file system at byte {} is on NVM as before: {} blocks there, {} log blocks of a transaction that is \
             not complete",
            self.name(),
            log.place.home_start,
            captured.journal.len(),
            captured.stream.copies().count()
        );
        self.follows(&captured, slot);
        *state = State::Held(Box::new(captured));
        Ok(to_settle)
    }

    /// What is known beside the log.
    fn follows(&mut self, captured: &Captured, slot: usize) {
        self.slot = Some(slot);
        self.coverage = Coverage::taken_up();
        // What the process before heard of one, for whichever log of the disk, this log has not been told yet.
        self.failed_flushes = self.home.told_failures();
        self.is_distrusted = captured.log.is_distrusted();
        if self.is_distrusted {
            self.home.wake.wake();
        }
        // What the guest wrote home of its live transactions is not known, and what is not known would prove too much.
        self.watch.forget();
    }
}

/// Has the transaction count that the guest may have been told of before the flush of its appends: the kernel has them, and is to make them durable
/// now. Storage has the same bytes as before.
fn count_acknowledged(medium: &mut Region, log: &Log) -> io::Result<()> {
    let found = Found::read(medium.bytes()).map_err(io::Error::other)?;
    let Some(prepared) = found.and_then(|found| found.prepared) else { return Ok(()) };
    let holds = match Condition::decode(&prepared.condition) {
        Some(condition) if condition.is_of(log.place.block_bytes) => {
            condition.holds_for_good(&log.home.file, log.place.home_start)?
        }
        _ => false,
    };
    if !holds {
        return Err(refused("its last transaction was acknowledged, and what that wrote home is not there"));
    }
    nvm_journal::count_prepared(medium).map_err(io::Error::other)
}

/// The notes of an opening.
fn of_opening(
    directory: &OwnDirectory,
    journal: [u8; 16],
    home_start: u64,
    number: [u8; 16],
) -> io::Result<FoundNotes> {
    let mut found = FoundNotes::find(directory, |identity| {
        identity.journal == journal && identity.home_start == home_start && identity.number == number
    })?;
    match (found.pop(), found.is_empty()) {
        (Some(notes), true) => Ok(notes),
        (Some(_), false) => Err(refused("there are two sets of notes on it")),
        (None, _) => Err(refused("nothing was noted in the VM's directory of what it has to be gone on with")),
    }
}

/// Removes notes that nobody goes on with, of all disks of a VM.
pub(crate) fn forget_notes<'d>(disks: impl Iterator<Item = &'d Arc<NvmDisk>>) {
    let (mut directory, mut used) = (None, Vec::new());
    for nvm in disks {
        directory = directory.or_else(|| nvm.directory());
        used.extend(nvm.states().filter_map(|state| match &*state {
            State::Held(captured) => Some(captured.notes.name().to_owned()),
            State::Idle(_) | State::Failed => None,
        }));
    }
    if let Some(directory) = directory {
        super::notes::forget_all_but(&directory, &used);
    }
}
