//! What the next worker has to know of an open log that neither its region nor storage says: notes in the VM's directory in tmpfs.
//!
//! They are a file to which a note is appended for each thing that changes: a log block that came, a transaction that is about to be
//! published, what the guest has at a block's home, where its log begins. The next worker reads them from the beginning
//! ([`Noted`]). When they have become long they are written anew as they mean now, into another file that takes the place of the first in one
//! step ([`Notes::renew`]).
//!
//! What counts when a worker is killed between any two of its stores:
//! * A note is whole or it is not there (each has its length and a checksum). Nothing that a guest was told is without its note: notes come
//!   before the answer.
//! * The region and the notes cannot change in one step. So a note of something that changes the region too comes *first*, and if it is the
//!   last one, the region says whether that has come to pass ([`Noted::settle`]): a transaction, and a log that begins anew, by the
//!   number of the last transaction (a log that begins anew where it stood means the same either way); a block that is held again by being there. What leaves the region is not noted at all: what the notes say of a
//!   block's home means nothing where the region has no version of it, and what is said to be at home by our hand means nothing
//!   where it has one. (So *that* is noted before the block leaves.)
//! * What the guest wrote past its journal is noted when that write has *ended*, before its request is answered. Earlier would be wrong where
//!   only a part of a block is written, and the rest is in the region only: asked again, it would be taken from storage, which is older.
//! * A tail is noted when it counts, not when it is asked for: its request is answered later, and asked again.
//!
//! What is not noted, and why it need not be: what is under way (it is waited for, or asked again by the guest), appends that went home early
//! (their blocks are free), what proves that the journal is not what it seems (who follows does not watch it), what a checkpoint has written (it stays in the region, and goes once more), which writes are durable (all of them
//! are taken for not durable until the next flush).
//!
//! It must never: be believed where it does not agree with the region; keep a guest from going on. Failure story: notes that cannot be written
//! are removed, which is said, and the next worker refuses to go on with the log, as it does where there are none. So are notes that a guest makes
//! too many of at once: memory of the host's is not a guest's to fill. Where they cannot be written anew they stay, and are added to.

use super::log_stream::{LeftLog, Tail, digest_of};
use super::versions::HomeState;
use jbd2::{Format, Superblock};
use nvm_journal::ATTACHMENT_BYTES;
use own_files::{How, OwnDirectory};
use std::collections::{HashMap, HashSet, VecDeque};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

const MAGIC: &[u8; 8] = b"nvmnote1";
const ENDING: &str = ".notes";
const BEGINNING: &str = "nvm-";
/// Notes are written anew when this much was added to them, or as much as they had when they were new, whichever is more.
const ADDED_MIN: u64 = 8 << 20;
/// More than this, or as much as they had when they were new, is never added to them: who has a guest that makes them grow so fast goes
/// without. Between two looks at their length a kernel writes a part of a transaction, and that is a quarter of its log at most.
const ADDED_MAX: u64 = 64 << 20;
/// More than this nobody believes.
const BYTES_MAX: u64 = 8 << 30;
/// Kind, length and checksum.
const HEAD_BYTES: usize = 9;
/// The kind of a log block.
const LOG_BLOCK: u8 = 3;

/// Which log notes are about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Identity {
    /// Its journal's UUID.
    pub journal: [u8; 16],
    /// Where its file system begins, in bytes of its disk.
    pub home_start: u64,
    /// Which opening of it: the number of its mark on storage.
    pub number: [u8; 16],
}

/// One thing that has changed. See the module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Note {
    /// The log is open, and stands so; nothing else is known of it.
    Begun { superblock: Box<[u8; ATTACHMENT_BYTES]>, tail: Tail, cursor: Tail, committed_at: (u64, u32) },
    /// A transaction begins there that is in the log, behind those that were noted before.
    Live(Tail),
    /// A log block came.
    LogBlock(u32, Arc<[u8]>),
    /// Log blocks of the last transaction, and their digests.
    Last(Vec<(u32, u64)>),
    /// The next transaction is about to be published.
    Committed(Committed),
    /// What the guest has at the homes of blocks in the region, and the transaction of their versions.
    Homes(Vec<(u64, u32, HomeState)>),
    /// Blocks that are at home by our hand, while the guest's log has them, and their transactions.
    AtHome(Vec<(u64, u32)>),
    /// Blocks that the guest's log need not bring back.
    NotAtHome(Range<u64>),
    /// A block is about to be held again, whose version is of this transaction.
    Restored(u64, u32),
    /// The guest's log begins there now.
    Tail(Tail),
    /// It begins anew, perhaps with other features.
    Anew(Box<[u8; ATTACHMENT_BYTES]>, Tail),
    /// Somebody has read the superblock, and would replay a log with these blocks, or an empty one.
    Read(Option<Vec<u64>>),
    /// The guest goes on after that.
    Unread,
    /// A flush has failed.
    FlushFailed,
    /// No more of the log is taken.
    Failed,
}

/// A transaction that is about to be published.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Committed {
    pub sequence: u32,
    /// The log block behind it.
    pub next: u32,
    pub committed_at: (u64, u32),
    pub puts: Vec<u64>,
    pub appends: Vec<u64>,
    pub revokes: Vec<u64>,
}

/// Writes numbers.
#[derive(Default)]
struct Out(Vec<u8>);

impl Out {
    fn u32(&mut self, value: u32) -> &mut Self {
        self.0.extend_from_slice(&value.to_le_bytes());
        self
    }

    fn u64(&mut self, value: u64) -> &mut Self {
        self.0.extend_from_slice(&value.to_le_bytes());
        self
    }

    fn tail(&mut self, tail: Tail) -> &mut Self {
        self.u32(tail.position).u32(tail.sequence)
    }

    fn time(&mut self, (seconds, nanoseconds): (u64, u32)) -> &mut Self {
        self.u64(seconds).u32(nanoseconds)
    }

    fn blocks(&mut self, blocks: &[u64]) -> &mut Self {
        self.u32(blocks.len() as u32);
        blocks.iter().for_each(|block| {
            self.u64(*block);
        });
        self
    }
}

/// Reads them; nothing where they end too soon.
struct In<'a>(&'a [u8]);

impl<'a> In<'a> {
    fn bytes(&mut self, count: usize) -> Option<&'a [u8]> {
        let (bytes, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(bytes)
    }

    fn u8(&mut self) -> Option<u8> {
        self.bytes(1)?.first().copied()
    }

    fn u32(&mut self) -> Option<u32> {
        Some(u32::from_le_bytes(*self.bytes(4)?.first_chunk()?))
    }

    fn u64(&mut self) -> Option<u64> {
        Some(u64::from_le_bytes(*self.bytes(8)?.first_chunk()?))
    }

    fn tail(&mut self) -> Option<Tail> {
        Some(Tail { position: self.u32()?, sequence: self.u32()? })
    }

    fn time(&mut self) -> Option<(u64, u32)> {
        Some((self.u64()?, self.u32()?))
    }

    fn uuid(&mut self) -> Option<[u8; 16]> {
        self.bytes(16)?.first_chunk().copied()
    }

    fn superblock(&mut self) -> Option<Box<[u8; ATTACHMENT_BYTES]>> {
        self.bytes(ATTACHMENT_BYTES)?.first_chunk().copied().map(Box::new)
    }

    fn blocks(&mut self) -> Option<Vec<u64>> {
        let count = self.u32()?;
        (0..count).map(|_| self.u64()).collect()
    }

    /// Whatever is left, one after the other.
    fn rest<T>(&mut self, read: impl Fn(&mut Self) -> Option<T>) -> Option<Vec<T>> {
        let mut all = Vec::new();
        while !self.0.is_empty() {
            all.push(read(self)?);
        }
        Some(all)
    }
}

fn state_number(state: HomeState) -> u8 {
    match state {
        HomeState::Behind => 0,
        HomeState::Same => 1,
        HomeState::Other => 2,
    }
}

fn state_of(number: u8) -> Option<HomeState> {
    match number {
        0 => Some(HomeState::Behind),
        1 => Some(HomeState::Same),
        2 => Some(HomeState::Other),
        _ => None,
    }
}

/// One note in the file.
fn framed(kind: u8, payload: &[u8]) -> Vec<u8> {
    let checksum = crc32c::crc32c_append(crc32c::crc32c(&[kind]), payload);
    let mut bytes = Vec::with_capacity(HEAD_BYTES + payload.len());
    bytes.push(kind);
    bytes.extend_from_slice(&(payload.len() as u32).to_le_bytes());
    bytes.extend_from_slice(&checksum.to_le_bytes());
    bytes.extend_from_slice(payload);
    bytes
}

/// The next note of a file, if it is whole.
fn unframed<'a>(rest: &mut In<'a>) -> Option<(u8, &'a [u8])> {
    let (kind, len, checksum) = (rest.u8()?, rest.u32()?, rest.u32()?);
    let payload = rest.bytes(len as usize)?;
    (crc32c::crc32c_append(crc32c::crc32c(&[kind]), payload) == checksum).then_some((kind, payload))
}

/// Writes two pieces, one behind the other.
fn write_both(file: &File, pieces: [&[u8]; 2], at: u64) -> io::Result<()> {
    let written = rustix::io::pwritev(file, &pieces.map(io::IoSlice::new), at)?;
    if written < pieces[0].len() + pieces[1].len() {
        return Err(io::ErrorKind::WriteZero.into());
    }
    Ok(())
}

impl Note {
    /// Its bytes in the file, and what follows them.
    fn parts(&self) -> (Vec<u8>, Option<&[u8]>) {
        let Note::LogBlock(position, content) = self else { return (self.bytes(), None) };
        let mut bytes = vec![LOG_BLOCK];
        bytes.extend_from_slice(&(content.len() as u32 + 4).to_le_bytes());
        let checksum = crc32c::crc32c_append(crc32c::crc32c(&[LOG_BLOCK]), &position.to_le_bytes());
        bytes.extend_from_slice(&crc32c::crc32c_append(checksum, content).to_le_bytes());
        bytes.extend_from_slice(&position.to_le_bytes());
        (bytes, Some(content))
    }

    fn bytes(&self) -> Vec<u8> {
        let mut out = Out::default();
        let kind = match self {
            Note::Begun { superblock, tail, cursor, committed_at } => {
                out.0.extend_from_slice(&superblock[..]);
                out.tail(*tail).tail(*cursor).time(*committed_at);
                1
            }
            Note::Live(begin) => {
                out.tail(*begin);
                2
            }
            Note::LogBlock(position, content) => {
                out.u32(*position).0.extend_from_slice(content);
                LOG_BLOCK
            }
            Note::Last(blocks) => {
                blocks.iter().for_each(|(position, digest)| {
                    out.u32(*position).u64(*digest);
                });
                4
            }
            Note::Committed(of) => {
                out.u32(of.sequence).u32(of.next).time(of.committed_at);
                out.blocks(&of.puts).blocks(&of.appends).blocks(&of.revokes);
                5
            }
            Note::Homes(homes) => {
                homes.iter().for_each(|(block, sequence, state)| {
                    out.u64(*block).u32(*sequence).0.push(state_number(*state));
                });
                6
            }
            Note::AtHome(blocks) => {
                blocks.iter().for_each(|(block, sequence)| {
                    out.u64(*block).u32(*sequence);
                });
                7
            }
            Note::NotAtHome(blocks) => {
                out.u64(blocks.start).u64(blocks.end);
                8
            }
            Note::Restored(block, sequence) => {
                out.u64(*block).u32(*sequence);
                9
            }
            Note::Tail(tail) => {
                out.tail(*tail);
                10
            }
            Note::Anew(superblock, tail) => {
                out.0.extend_from_slice(&superblock[..]);
                out.tail(*tail);
                11
            }
            Note::Read(None) => 12,
            Note::Read(Some(blocks)) => {
                out.blocks(blocks);
                13
            }
            Note::Unread => 14,
            Note::FlushFailed => 15,
            Note::Failed => 16,
        };
        framed(kind, &out.0)
    }

    fn read(kind: u8, payload: &[u8]) -> Option<Note> {
        let mut read = In(payload);
        let note = match kind {
            1 => {
                let superblock = read.superblock()?;
                Note::Begun { superblock, tail: read.tail()?, cursor: read.tail()?, committed_at: read.time()? }
            }
            2 => Note::Live(read.tail()?),
            LOG_BLOCK => Note::LogBlock(read.u32()?, Arc::from(std::mem::take(&mut read.0))),
            4 => Note::Last(read.rest(|read| Some((read.u32()?, read.u64()?)))?),
            5 => Note::Committed(Committed {
                sequence: read.u32()?,
                next: read.u32()?,
                committed_at: read.time()?,
                puts: read.blocks()?,
                appends: read.blocks()?,
                revokes: read.blocks()?,
            }),
            6 => Note::Homes(read.rest(|read| Some((read.u64()?, read.u32()?, state_of(read.u8()?)?)))?),
            7 => Note::AtHome(read.rest(|read| Some((read.u64()?, read.u32()?)))?),
            8 => Note::NotAtHome(read.u64()?..read.u64()?),
            9 => Note::Restored(read.u64()?, read.u32()?),
            10 => Note::Tail(read.tail()?),
            11 => Note::Anew(read.superblock()?, read.tail()?),
            12 => Note::Read(None),
            13 => Note::Read(Some(read.blocks()?)),
            14 => Note::Unread,
            15 => Note::FlushFailed,
            16 => Note::Failed,
            _ => return None,
        };
        read.0.is_empty().then_some(note)
    }
}

/// The notes of one open log, as they are written.
#[derive(Debug)]
pub(super) struct Notes {
    directory: Option<Arc<OwnDirectory>>,
    name: String,
    /// Nothing where they could not be written, or there is no directory.
    file: Option<File>,
    identity: Identity,
    bytes: u64,
    /// How many of them there were when they were new.
    bytes_new: u64,
    /// How many there were when it was last tried to write them anew.
    bytes_tried: u64,
    /// That no more of the log is taken is in them.
    pub is_failure_noted: bool,
}

impl Notes {
    /// Begins to note what becomes of a log that stands so. Without a directory nothing is noted.
    pub fn begin(directory: Option<Arc<OwnDirectory>>, identity: Identity, state: &[Note]) -> Self {
        let name = directory.as_ref().map_or(String::new(), |directory| take_name(directory));
        let mut notes = Notes {
            directory,
            name,
            file: None,
            identity,
            bytes: 0,
            bytes_new: 0,
            bytes_tried: 0,
            is_failure_noted: false,
        };
        notes.renew(state);
        notes
    }

    /// Goes on with those of a worker that died, which are written anew at once.
    ///
    /// # Errors
    /// When they cannot be: those of the worker that died are as they were, for another one.
    pub fn go_on(
        directory: Arc<OwnDirectory>,
        (name, identity): (String, Identity),
        state: &[Note],
    ) -> io::Result<Self> {
        let mut notes = Notes {
            directory: Some(directory),
            name,
            file: None,
            identity,
            bytes: 0,
            bytes_new: 0,
            bytes_tried: 0,
            is_failure_noted: false,
        };
        notes.write_anew(state)?;
        Ok(notes)
    }

    /// None, until they are known.
    pub fn none() -> Self {
        let identity = Identity { journal: [0; 16], home_start: 0, number: [0; 16] };
        Notes {
            directory: None,
            name: String::new(),
            file: None,
            identity,
            bytes: 0,
            bytes_new: 0,
            bytes_tried: 0,
            is_failure_noted: false,
        }
    }

    /// Whether there are any: without, no other worker goes on with the log.
    pub fn are_there(&self) -> bool {
        self.file.is_some()
    }

    /// The name of their file.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Adds a note: it is there on return.
    pub fn note(&mut self, note: &Note) {
        let Some(file) = &self.file else { return };
        let (bytes, content) = note.parts();
        let more = (bytes.len() + content.map_or(0, <[u8]>::len)) as u64;
        if self.bytes + more - self.bytes_new > ADDED_MAX.max(self.bytes_new) {
            self.give_up("its guest makes too many of them");
            return;
        }
        let written = match content {
            None => file.write_all_at(&bytes, self.bytes),
            // What is not copied once more.
            Some(content) => write_both(file, [&bytes, content], self.bytes),
        };
        match written {
            Ok(()) => self.bytes += more,
            Err(error) => self.give_up(&format!("they cannot be written: {error}")),
        }
    }

    /// Whether they ought to be written anew.
    pub fn are_long(&self) -> bool {
        self.file.is_some() && self.bytes - self.bytes_tried > ADDED_MIN.max(self.bytes_new)
    }

    /// Writes them anew, as they mean now.
    pub fn renew(&mut self, state: &[Note]) {
        match self.write_anew(state) {
            Ok(()) => {}
            // What is there is whole, and goes on being added to.
            Err(error) if self.file.is_some() => {
                log::warn!("what another worker has to know of a journal on NVM is not written anew: {error}");
                self.bytes_tried = self.bytes;
            }
            Err(error) => self.give_up(&error.to_string()),
        }
    }

    fn write_anew(&mut self, state: &[Note]) -> io::Result<()> {
        let Some(directory) = self.directory.clone() else { return Ok(()) };
        let mut bytes = MAGIC.to_vec();
        let mut identity = Out::default();
        identity.0.extend_from_slice(&self.identity.journal);
        identity.u64(self.identity.home_start).0.extend_from_slice(&self.identity.number);
        bytes.extend(framed(0, &identity.0));
        state.iter().for_each(|note| bytes.extend(note.bytes()));
        directory.write(&self.name, &bytes).map_err(io::Error::other)?;
        let file = directory.file(&self.name, How::Write).map_err(|error| {
            // The one before has gone: nothing may be added to it.
            self.file = None;
            io::Error::other(error)
        })?;
        (self.bytes, self.bytes_new, self.bytes_tried) = (bytes.len() as u64, bytes.len() as u64, bytes.len() as u64);
        self.is_failure_noted = state.contains(&Note::Failed);
        self.file = Some(file);
        Ok(())
    }

    /// Nobody is to believe them.
    pub fn give_up(&mut self, why: &str) {
        if self.file.take().is_some() || self.bytes == 0 {
            log::warn!(
                "a worker that dies cannot be followed by another one while its guest has the journal on NVM open: what that one has to \
                 know is not noted in the VM's directory ({why})"
            );
        }
        self.bytes = 1;
        self.remove();
    }

    /// The log is not in the region any more.
    pub fn remove(&mut self) {
        self.file = None;
        if let Some(directory) = &self.directory
            && let Err(error) = directory.remove(&self.name)
        {
            log::warn!("{error}");
        }
    }
}

fn is_notes(name: &std::ffi::OsStr) -> bool {
    let number = name.to_str().and_then(|name| name.strip_prefix(BEGINNING)?.strip_suffix(ENDING));
    number.is_some_and(|number| number.parse::<u64>().is_ok())
}

/// A name that no notes have: taken on return, since another disk's thread may look for one, too.
fn take_name(directory: &OwnDirectory) -> String {
    let mut number = 0u64;
    loop {
        let name = format!("{BEGINNING}{number}{ENDING}");
        let is_taken = directory.kind(&name).is_none() && directory.file(&name, How::MakeNew).is_ok();
        // Where none can be made, who writes to it says why.
        if is_taken || directory.kind(&name).is_none() {
            return name;
        }
        number += 1;
    }
}

/// Removes the notes in a directory that are none of these.
pub(super) fn forget_all_but(directory: &OwnDirectory, used: &[String]) {
    for name in directory.names().unwrap_or_default().iter().filter(|name| is_notes(name)) {
        if !used.iter().any(|used| **used == **name)
            && let Err(error) = directory.remove(name)
        {
            log::warn!("{error}");
        }
    }
}

/// Notes that an earlier worker has left.
#[derive(Debug)]
pub(super) struct FoundNotes {
    name: String,
    pub identity: Identity,
    notes: Vec<Note>,
}

impl FoundNotes {
    /// All notes in a directory of logs that `is_it` picks.
    pub fn find(directory: &OwnDirectory, is_it: impl Fn(&Identity) -> bool) -> io::Result<Vec<Self>> {
        let mut found = Vec::new();
        for name in directory.names().map_err(io::Error::other)? {
            if !is_notes(&name) {
                continue;
            }
            let Some(bytes) = directory.read(&name, BYTES_MAX).map_err(io::Error::other)? else { continue };
            if let Some(notes) = Self::read(name.to_string_lossy().into_owned(), &bytes)
                && is_it(&notes.identity)
            {
                found.push(notes);
            }
        }
        Ok(found)
    }

    fn read(name: String, bytes: &[u8]) -> Option<Self> {
        let mut rest = In(bytes.strip_prefix(MAGIC)?);
        let (0, identity) = unframed(&mut rest)? else { return None };
        let mut identity = In(identity);
        let identity = Identity { journal: identity.uuid()?, home_start: identity.u64()?, number: identity.uuid()? };
        let mut notes = Vec::new();
        // Behind one that is not whole there is nothing.
        while let Some((kind, payload)) = unframed(&mut rest) {
            notes.push(Note::read(kind, payload)?);
        }
        Some(FoundNotes { name, identity, notes })
    }

    /// The name of their file.
    pub fn name(&self) -> &str {
        &self.name
    }
}

/// A log as notes say that it is.
#[derive(Clone, Debug)]
pub(super) struct Noted {
    pub format: Format,
    pub superblock: Box<[u8; ATTACHMENT_BYTES]>,
    pub tail: Tail,
    pub cursor: Tail,
    pub live: VecDeque<Tail>,
    pub committed_at: (u64, u32),
    pub copies: HashMap<u32, Arc<[u8]>>,
    /// Log blocks of the last transaction: their digests.
    pub last: HashMap<u32, u64>,
    pub homes: HashMap<u64, (u32, HomeState)>,
    pub at_home: HashMap<u64, u32>,
    /// Somebody has read the superblock: the blocks of the log that was shown, if it was not empty.
    pub read: Option<Option<Vec<u64>>>,
    pub has_flush_failed: bool,
    pub has_failed: bool,
}

/// What is left to do to the region for it to agree with the notes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rest {
    Nothing,
    /// Its sequence number goes back to this one.
    Sequence(u32),
}

fn format_of(superblock: &[u8; ATTACHMENT_BYTES]) -> Result<Format, String> {
    Superblock::parse(superblock).map(|(_, format)| format).map_err(|error| error.to_string())
}

impl Noted {
    /// What notes mean, together with the region: its last transaction, and whether it has a version of a block.
    ///
    /// # Errors
    /// A sentence when they do not agree.
    pub fn settle(found: FoundNotes, sequence: u32, contains: &dyn Fn(u64) -> bool) -> Result<(Self, Rest), String> {
        let mut notes = found.notes;
        let last = notes.pop_if(|note| matches!(note, Note::Committed(_) | Note::Restored(..) | Note::Anew(..)));
        let mut notes = notes.into_iter();
        let Some(Note::Begun { superblock, tail, cursor, committed_at }) = notes.next() else {
            return Err("the notes on it do not say how it began".to_owned());
        };
        let mut noted = Noted {
            format: format_of(&superblock)?,
            superblock,
            tail,
            cursor,
            live: VecDeque::new(),
            committed_at,
            copies: HashMap::new(),
            last: HashMap::new(),
            homes: HashMap::new(),
            at_home: HashMap::new(),
            read: None,
            has_flush_failed: false,
            has_failed: false,
        };
        notes.try_for_each(|note| noted.apply(note))?;
        let before = noted.cursor.sequence.wrapping_sub(1);
        let mut rest = Rest::Nothing;
        match last {
            Some(Note::Committed(of)) if sequence == before && of.sequence == noted.cursor.sequence => {}
            Some(Note::Restored(block, _)) if !contains(block) => {}
            Some(Note::Restored(block, of)) => {
                noted.apply(Note::Restored(block, of))?;
                if sequence == noted.cursor.sequence {
                    rest = Rest::Sequence(before);
                }
            }
            // Its guest says so once more. Where it begins anew just where it stood, as a kernel does that turns features on in an empty log, the
            // number does not tell, and nothing is lost by taking it for done: it may have been answered, and nothing was live.
            Some(Note::Anew(_, tail)) if sequence == before && tail != noted.cursor => {}
            Some(last) => noted.apply(last)?,
            None => {}
        }
        let expected = noted.cursor.sequence.wrapping_sub(1);
        if rest == Rest::Nothing && sequence != expected {
            return Err(format!("its last transaction is {sequence}, and {expected} by the notes on it"));
        }
        noted.homes.retain(|block, _| contains(*block));
        noted.at_home.retain(|block, _| !contains(*block));
        Ok((noted, rest))
    }

    fn apply(&mut self, note: Note) -> Result<(), String> {
        match note {
            Note::Begun { .. } => return Err("the notes on it begin twice".to_owned()),
            Note::Live(begin) => self.live.push_back(begin),
            Note::LogBlock(position, content) => {
                self.copies.insert(position, content);
            }
            Note::Last(blocks) => self.last = blocks.into_iter().collect(),
            Note::Committed(of) => self.committed(of)?,
            Note::Homes(homes) => {
                self.homes.extend(homes.into_iter().map(|(block, sequence, state)| (block, (sequence, state))));
            }
            Note::AtHome(blocks) => self.at_home.extend(blocks),
            Note::NotAtHome(blocks) => self.at_home.retain(|block, _| !blocks.contains(block)),
            Note::Restored(block, sequence) => {
                self.at_home.remove(&block);
                self.homes.insert(block, (sequence, HomeState::Other));
            }
            Note::Tail(tail) => self.tail_is(tail)?,
            Note::Anew(superblock, tail) => {
                self.format = format_of(&superblock)?;
                self.superblock = superblock;
                (self.tail, self.cursor) = (tail, tail);
                self.live.clear();
                self.copies.clear();
                self.last.clear();
                self.at_home.clear();
                self.read = None;
            }
            Note::Read(blocks) => self.read = Some(blocks),
            Note::Unread => self.read = None,
            Note::FlushFailed => self.has_flush_failed = true,
            Note::Failed => self.has_failed = true,
        }
        Ok(())
    }

    fn committed(&mut self, of: Committed) -> Result<(), String> {
        if of.sequence != self.cursor.sequence || !self.format.contains(of.next) {
            return Err(format!(
                "transaction {} follows {} in the notes on it",
                of.sequence,
                self.cursor.sequence.wrapping_sub(1)
            ));
        }
        self.last.clear();
        let mut position = self.cursor.position;
        while position != of.next {
            if let Some(block) = self.copies.remove(&position) {
                self.last.insert(position, digest_of(&block));
            }
            position = self.format.next(position);
        }
        for block in &of.revokes {
            self.homes.remove(block);
            self.at_home.remove(block);
        }
        for block in of.puts {
            self.at_home.remove(&block);
            self.homes.insert(block, (of.sequence, HomeState::Behind));
        }
        for block in of.appends {
            self.at_home.insert(block, of.sequence);
        }
        self.live.push_back(self.cursor);
        self.committed_at = of.committed_at;
        self.cursor = Tail { position: of.next, sequence: of.sequence.wrapping_add(1) };
        Ok(())
    }

    fn tail_is(&mut self, tail: Tail) -> Result<(), String> {
        if tail == self.tail {
            return Ok(());
        }
        match self.live.iter().position(|begin| *begin == tail) {
            Some(count) => {
                self.live.drain(..count);
            }
            None if tail == self.cursor => self.live.clear(),
            None => return Err(format!("the notes on it say that it begins with transaction {}", tail.sequence)),
        }
        self.tail = tail;
        // What the guest's log has passed it does not bring back.
        self.at_home.retain(|_, sequence| !jbd2::sequence::is_after(tail.sequence, *sequence));
        Ok(())
    }

    /// The log itself.
    pub fn log(&self) -> LeftLog {
        LeftLog {
            format: self.format,
            tail: self.tail,
            cursor: self.cursor,
            live: self.live.clone(),
            copies: self.copies.clone(),
            committed_at: self.committed_at,
            last: self.last.iter().map(|(position, digest)| (*position, *digest)).collect(),
        }
    }

    /// Log blocks that were taken, and may not have been answered: their digests.
    pub fn sent(&self) -> HashMap<u32, u64> {
        let copies = self.copies.iter().map(|(position, block)| (*position, digest_of(block)));
        self.last.iter().map(|(position, digest)| (*position, *digest)).chain(copies).collect()
    }

    /// Blocks of the region of whose homes nothing is known.
    pub fn unknown(&self, homes: impl Iterator<Item = u64>) -> HashSet<u64> {
        homes.filter(|block| !self.homes.contains_key(block)).collect()
    }
}

#[cfg(test)]
mod tests;
