//! The copy of a live log: what its guest was told is written, wherever else it is by now. It lies in a file of the VM's directory in
//! tmpfs, so that a worker that follows one that was killed has it, too.
//!
//! What a worker knows of a log on a server that neither storage nor the server says is here: blocks that the guest was told are
//! written and that were not sent, or not heard of; and what the superblock on storage may be if nobody else has written it.
//! Everything else can be told from those two, and from the superblock on storage.
//!
//! What must always hold, at any moment at which the process may be killed:
//! * A block is in the file before its guest is told that it is written, and until a superblock of the guest that lets go of it is there.
//! * The file says that storage may be a superblock before that is written.
//! * It says that the log's own place lacks something before anything is only here ([`Mirror::only_here`]), and the opposite when
//!   all of it is there.
//! * It says that the log is open as the last step of opening it, and closed as the last of closing: where a kill comes between,
//!   the guest was told nothing and does it again.
//! * Where it is not all that, it says so ([`Phase::Lost`]), and is not gone on with.
//!
//! The file has two records, written in turn, each with a number and a checksum; then a byte for each log block, whether it is there; then
//! the blocks. A record counts when it is whole: the newer one of two. A block comes before its byte, a record before the bytes that it
//! takes away: what a kill leaves is at most more than is live, as in a journal's own place.
//!
//! Failure story: where the file cannot be written, what is new is kept in the process's memory, and no other process goes on with
//! it until the log is opened anew. Where it cannot be read, the log fails as where storage does. A loss of power takes the file
//! away, and nothing depends on it then.

use super::lineage::{Lineage, Nonce};
use super::mark::RemoteMark;
use super::mark_found::MarkFound;
use crate::scan::FoundLogPlace;
use jbd2::{Kind, SUPERBLOCK_BYTES, Superblock};
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use tracing_mutex::stdsync::{Mutex, MutexGuard};

const MAGIC: &[u8; 8] = b"AMBRMIR1";
/// Bytes of a record before what it has of superblocks.
const HEAD_BYTES: usize = 64;
const CHECKSUM_BYTES: usize = 4;
/// So many superblocks that storage may have are written down; of more, the last.
const MAY_BE_MAX: usize = 8;
const PAGE: u64 = 4096;

pub(super) fn is_commit(block: &[u8]) -> bool {
    jbd2::peek(block).is_some_and(|header| header.kind == Kind::Commit)
}

/// A superblock on storage as if nobody had claimed the log for recovery.
fn unclaimed(superblock: &[u8]) -> Vec<u8> {
    let mut bytes = superblock.to_vec();
    let lineage = Lineage::read(&bytes).unwrap_or_default();
    Lineage { claim: Nonce::default(), ..lineage }.write_into(&mut bytes);
    bytes
}

/// What becomes of the log under a process that goes on with it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Phase {
    /// No guest was told that it is open.
    #[default]
    Closed,
    /// All that counts of it is in the file.
    Open,
    /// Somebody else has it, or storage failed.
    Failed,
    /// Something of it was only in the memory of the process.
    Lost,
}

const PHASES: [Phase; 4] = [Phase::Closed, Phase::Open, Phase::Failed, Phase::Lost];

/// What the file says of the log as a whole.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Said {
    pub phase: Phase,
    /// The log's own place has all that anybody was told of.
    pub is_stored: bool,
    /// Somebody wishes it on storage for now.
    pub is_paused: bool,
    /// It is not what it seemed.
    pub is_distrusted: bool,
    /// What the log was last called on the server before it counted there: storage has it with the mark, and not before. Zeros for
    /// none, and in what an earlier amberlog wrote.
    pub named: Nonce,
    /// The guest's, as it wrote it last.
    pub superblock: Vec<u8>,
    /// What the one on storage is if nobody else has written it.
    pub may_be: Vec<Vec<u8>>,
}

impl Said {
    /// Whether this copy may be the last one that has all of the log: `stored`, the superblock on storage, is as its process left it, and
    /// says that the log is on a server, or it begins a log of which storage lacks something.
    pub fn is_owed(&self, stored: &[u8]) -> bool {
        let is_left =
            matches!(self.phase, Phase::Open | Phase::Failed) && self.may_be.iter().any(|may_be| may_be == stored);
        let is_elsewhere = matches!(RemoteMark::read(stored), MarkFound::Live(_) | MarkFound::Damaged);
        let is_begun = Superblock::decode(stored).is_ok_and(|superblock| !superblock.is_empty());
        is_left && (is_elsewhere || (is_begun && !self.is_stored))
    }

    /// Whether its process left it with an open log: whether it is owed to anybody is for storage to say.
    pub fn is_left_open(&self) -> bool {
        matches!(self.phase, Phase::Open | Phase::Failed)
    }

    /// Whether storage is as its process left it but for who claimed the log last: somebody was about to fetch it from its server, and has come
    /// no further than to its own place.
    pub fn is_claimed(&self, stored: &[u8]) -> bool {
        let is_marked = matches!(RemoteMark::read(stored), MarkFound::Live(_));
        self.is_left_open() && is_marked && self.may_be.iter().any(|may_be| unclaimed(may_be) == unclaimed(stored))
    }

    /// Whether it has to be kept, though it may not be what is brought home: also where somebody was about to fetch the same log from its
    /// server, and has claimed it on storage, and no more.
    pub fn may_be_owed(&self, stored: &[u8]) -> bool {
        let mark = RemoteMark::read(stored);
        let is_claimed =
            matches!(mark, MarkFound::Live(_)) && self.may_be.iter().any(|may_be| RemoteMark::read(may_be) == mark);
        self.is_owed(stored) || (self.is_left_open() && is_claimed)
    }

    fn encode(&self, number: u64, shape: Shape) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend_from_slice(&number.to_le_bytes());
        bytes.extend_from_slice(&shape.block_bytes.to_le_bytes());
        bytes.extend_from_slice(&shape.log_blocks.to_le_bytes());
        bytes.extend_from_slice(&(self.superblock.len() as u32).to_le_bytes());
        bytes.extend_from_slice(&(self.may_be.len() as u32).to_le_bytes());
        let phase = PHASES.iter().position(|phase| *phase == self.phase).unwrap_or_default() as u8;
        bytes.extend_from_slice(&[phase, self.is_stored.into(), self.is_paused.into(), self.is_distrusted.into()]);
        bytes.extend_from_slice(&self.named);
        bytes.resize(HEAD_BYTES, 0);
        bytes.extend_from_slice(&self.superblock);
        self.may_be.iter().for_each(|superblock| bytes.extend_from_slice(superblock));
        bytes.extend_from_slice(&jbd2::crc32c(!0, &bytes).to_le_bytes());
        bytes
    }

    /// A record and its number; nothing where it is not whole, or is of another log.
    fn decode(bytes: &[u8], shape: Shape) -> Option<(u64, Self)> {
        let word = |at: usize| Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
        if !bytes.starts_with(MAGIC) || word(16)? != shape.block_bytes || word(20)? != shape.log_blocks {
            return None;
        }
        let number = u64::from_le_bytes(bytes.get(8..16)?.try_into().ok()?);
        let (superblock, count) = (word(24)? as usize, word(28)? as usize);
        if superblock > shape.block_bytes as usize || count > MAY_BE_MAX {
            return None;
        }
        let end = HEAD_BYTES + superblock + count * SUPERBLOCK_BYTES;
        if word(end)? != jbd2::crc32c(!0, &bytes[..end]) {
            return None;
        }
        let flag = |at: usize| bytes[at] != 0;
        let rest = &bytes[HEAD_BYTES..end];
        let said = Said {
            phase: *PHASES.get(usize::from(bytes[32]))?,
            is_stored: flag(33),
            is_paused: flag(34),
            is_distrusted: flag(35),
            named: std::array::from_fn(|index| bytes[36 + index]),
            superblock: rest[..superblock].to_vec(),
            may_be: rest[superblock..].chunks(SUPERBLOCK_BYTES).map(<[u8]>::to_vec).collect(),
        };
        Some((number, said))
    }
}

#[derive(Clone, Copy, Debug)]
struct Shape {
    block_bytes: u32,
    log_blocks: u32,
}

impl Shape {
    fn of(place: &FoundLogPlace) -> Self {
        Shape { block_bytes: place.block_bytes, log_blocks: place.log_blocks }
    }

    fn record_bytes(self) -> u64 {
        let most = HEAD_BYTES + self.block_bytes as usize + MAY_BE_MAX * SUPERBLOCK_BYTES + CHECKSUM_BYTES;
        (most as u64).next_multiple_of(PAGE)
    }

    fn bytes_at(self) -> u64 {
        2 * self.record_bytes()
    }

    fn blocks_at(self) -> u64 {
        (self.bytes_at() + u64::from(self.log_blocks)).next_multiple_of(PAGE)
    }

    fn block_at(self, position: u32) -> u64 {
        self.blocks_at() + u64::from(position) * u64::from(self.block_bytes)
    }
}

/// The file. Its own lock is taken last.
#[derive(Debug)]
pub(crate) struct MirrorFile {
    file: File,
    shape: Shape,
    said: Mutex<(u64, Said)>,
}

impl MirrorFile {
    /// A file of nothing, for a log that nobody has open.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn make(file: File, place: &FoundLogPlace) -> io::Result<Self> {
        let shape = Shape::of(place);
        // So that what it says can be changed, whatever becomes of the memory.
        rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, shape.blocks_at())?;
        file.set_len(shape.block_at(shape.log_blocks))?;
        let made = MirrorFile { file, shape, said: Mutex::default() };
        made.write_record(&mut made.said(), Said::default())?;
        Ok(made)
    }

    /// What an earlier process has left.
    ///
    /// # Errors
    /// When it cannot be read, or says nothing of this log.
    pub fn take_up(file: File, place: &FoundLogPlace) -> io::Result<Self> {
        let shape = Shape::of(place);
        let read = |slot: u64| {
            let mut bytes = vec![0; shape.record_bytes() as usize];
            file.read_exact_at(&mut bytes, slot * shape.record_bytes())?;
            Ok::<_, io::Error>(Said::decode(&bytes, shape))
        };
        let newest = [read(0)?, read(1)?].into_iter().flatten().max_by_key(|(number, _)| *number);
        let said = newest.ok_or_else(|| io::Error::other("what was left of it says nothing"))?;
        Ok(MirrorFile { file, shape, said: Mutex::new(said) })
    }

    fn said(&self) -> MutexGuard<'_, (u64, Said)> {
        self.said.lock().expect("no panic under this lock")
    }

    /// What it says now.
    pub fn says(&self) -> Said {
        self.said().1.clone()
    }

    fn write_record(&self, now: &mut (u64, Said), said: Said) -> io::Result<()> {
        let number = now.0 + 1;
        // The other one stays whole meanwhile.
        self.file.write_all_at(&said.encode(number, self.shape), number % 2 * self.shape.record_bytes())?;
        *now = (number, said);
        Ok(())
    }

    /// Says something else from now on. Where that cannot be written, no other process goes on with the log.
    pub fn say(&self, change: impl FnOnce(&mut Said)) {
        let mut now = self.said();
        let mut said = now.1.clone();
        change(&mut said);
        if now.1.phase == Phase::Lost && said.phase != Phase::Closed {
            // Until the log is opened anew, or is over: of one that is over nothing is lacking.
            now.1 = Said { phase: Phase::Lost, ..said };
        } else if said != now.1
            && let Err(error) = self.write_record(&mut now, said.clone())
        {
            now.1 = said;
            self.lose(&mut now, &error);
        }
    }

    /// Something of the log is not in the file.
    fn lose(&self, now: &mut (u64, Said), error: &io::Error) {
        if now.1.phase != Phase::Lost {
            log::warn!(
                "keeping a copy of a journal in the VM's directory failed: {error}; until the journal is opened anew no other worker \
                 can go on with it"
            );
        }
        now.1.phase = Phase::Lost;
        // Both of them: a record that is not whole would leave the one before.
        let lost = now.1.clone();
        if self.write_record(now, lost.clone()).and_then(|()| self.write_record(now, lost)).is_err()
            && let Err(error) = self.file.set_len(0)
        {
            log::error!("emptying the copy of a journal in the VM's directory failed: {error}");
        }
    }

    fn loses_if(&self, outcome: io::Result<()>) -> bool {
        match outcome {
            Ok(()) => false,
            Err(error) => {
                self.lose(&mut self.said(), &error);
                true
            }
        }
    }

    /// Storage may be one of these from now on.
    pub fn storage_may_be(&self, superblocks: &[Vec<u8>]) {
        let last = superblocks.len().saturating_sub(MAY_BE_MAX);
        self.say(|said| said.may_be = superblocks[last..].to_vec());
    }

    fn read(&self, position: u32) -> io::Result<Arc<[u8]>> {
        let mut content = vec![0; self.shape.block_bytes as usize];
        self.file.read_exact_at(&mut content, self.shape.block_at(position))?;
        Ok(content.into())
    }

    fn write(&self, position: u32, content: &[u8]) -> io::Result<()> {
        if position >= self.shape.log_blocks || content.len() != self.shape.block_bytes as usize {
            return Err(io::Error::other(format!("log block {position} has no place in it")));
        }
        self.file.write_all_at(content, self.shape.block_at(position))?;
        self.file.write_all_at(&[1], self.shape.bytes_at() + u64::from(position))
    }

    fn remove(&self, positions: Range<u32>) -> io::Result<()> {
        let zeros = vec![0; positions.len()];
        self.file.write_all_at(&zeros, self.shape.bytes_at() + u64::from(positions.start))
    }

    fn positions(&self) -> io::Result<Vec<u32>> {
        let mut bytes = vec![0; self.shape.log_blocks as usize];
        self.file.read_exact_at(&mut bytes, self.shape.bytes_at())?;
        Ok((0..).zip(bytes).filter(|(_, byte)| *byte != 0).map(|(position, _)| position).collect())
    }

    /// Gives the memory of the blocks back.
    fn give_back(&self) {
        let flags = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
        let (from, to) = (self.shape.blocks_at(), self.shape.block_at(self.shape.log_blocks));
        // Another file system may not do that: then it is given back with the file.
        let _ = rustix::fs::fallocate(&self.file, flags, from, to - from);
    }
}

/// Where a block of the copy is.
#[derive(Clone, Debug)]
enum Copy {
    InFile {
        is_commit: bool,
    },
    /// Where there is no file, or it could not be written.
    Here(Arc<[u8]>),
}

/// The copy of one log.
#[derive(Debug, Default)]
pub(crate) struct Mirror {
    superblock: Option<Arc<[u8]>>,
    blocks: BTreeMap<u32, Copy>,
    file: Option<Arc<MirrorFile>>,
}

impl Mirror {
    /// The copy of a log that nobody has open. Without a file, no other process goes on with it.
    pub fn new(file: Option<Arc<MirrorFile>>) -> Self {
        Mirror { file, ..Mirror::default() }
    }

    /// The copy of an open log that an earlier process has left.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn take_up(file: Arc<MirrorFile>) -> io::Result<Self> {
        let mut blocks = BTreeMap::new();
        for position in file.positions()? {
            blocks.insert(position, Copy::InFile { is_commit: is_commit(&file.read(position)?) });
        }
        let superblock = Some(file.says().superblock.into());
        Ok(Mirror { superblock, blocks, file: Some(file) })
    }

    fn say(&self, change: impl FnOnce(&mut Said)) {
        if let Some(file) = &self.file {
            file.say(change);
        }
    }

    /// The guest opens the log with this superblock. Storage has it.
    pub fn open(&mut self, superblock: Arc<[u8]>) {
        self.blocks.clear();
        if let Some(file) = &self.file {
            let mut now = file.said();
            let closed = Said { phase: Phase::Closed, ..now.1.clone() };
            let open = Said { phase: Phase::Open, is_stored: true, superblock: superblock.to_vec(), ..closed.clone() };
            let said = file
                .file
                .set_len(file.shape.block_at(file.shape.log_blocks))
                .and_then(|()| file.write_record(&mut now, closed))
                .and_then(|()| file.remove(0..file.shape.log_blocks))
                .and_then(|()| file.write_record(&mut now, open));
            if let Err(error) = said {
                file.lose(&mut now, &error);
            }
        }
        self.superblock = Some(superblock);
    }

    /// The log is over, and storage says so.
    pub fn close(&mut self) {
        self.end(Phase::Closed);
    }

    /// Nothing can be written any more.
    pub fn fail(&mut self) {
        self.say(|said| said.phase = Phase::Failed);
    }

    /// Storage had failed, and may be well again.
    pub fn is_tried_again(&mut self) {
        self.say(|said| said.phase = Phase::Open);
    }

    fn end(&mut self, phase: Phase) {
        self.blocks.clear();
        self.superblock = None;
        if let Some(file) = &self.file {
            file.say(|said| {
                *said = Said { phase, is_paused: said.is_paused, is_distrusted: said.is_distrusted, ..Said::default() }
            });
            file.give_back();
        }
    }

    /// The guest writes a log block. On return another process has it, too.
    pub fn put(&mut self, position: u32, content: &Arc<[u8]>) {
        let copy = match &self.file {
            Some(file) if !file.loses_if(file.write(position, content)) => {
                Copy::InFile { is_commit: is_commit(content) }
            }
            _ => Copy::Here(Arc::clone(content)),
        };
        self.blocks.insert(position, copy);
    }

    /// The guest writes its superblock, which lets go of these positions.
    pub fn pass(&mut self, superblock: Arc<[u8]>, passed: &[u32]) {
        self.say(|said| said.superblock = superblock.to_vec());
        self.superblock = Some(superblock);
        for position in passed {
            self.blocks.remove(position);
        }
        let Some(file) = &self.file else { return };
        let mut positions = passed.iter().copied().peekable();
        while let Some(first) = positions.next() {
            let mut end = first + 1;
            while positions.next_if_eq(&end).is_some() {
                end += 1;
            }
            if file.loses_if(file.remove(first..end)) {
                return;
            }
        }
    }

    /// The same superblock, with something in it that is not the guest's.
    pub fn renew(&mut self, superblock: Arc<[u8]>) {
        self.superblock = Some(superblock);
    }

    /// From now on blocks are taken that the log's own place does not get.
    pub fn only_here(&mut self) {
        self.say(|said| said.is_stored = false);
    }

    /// The log's own place has all of it, and gets what comes.
    pub fn is_stored(&mut self) {
        self.say(|said| said.is_stored = true);
    }

    /// The guest's superblock, as it wrote it last.
    pub fn superblock(&self) -> Option<Arc<[u8]>> {
        self.superblock.clone()
    }

    /// Any log block; nothing where it is not live.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn get(&self, position: u32) -> io::Result<Option<Arc<[u8]>>> {
        if position == 0 {
            return Ok(self.superblock());
        }
        match (self.blocks.get(&position), &self.file) {
            (Some(Copy::Here(content)), _) => Ok(Some(Arc::clone(content))),
            (Some(Copy::InFile { .. }), Some(file)) => file.read(position).map(Some),
            _ => Ok(None),
        }
    }

    /// The positions of blocks that are here, but for the superblock, and whether each is a commit block.
    pub fn positions(&self) -> impl Iterator<Item = (u32, bool)> + '_ {
        self.blocks.iter().map(|(position, copy)| match copy {
            Copy::InFile { is_commit } => (*position, *is_commit),
            Copy::Here(content) => (*position, is_commit(content)),
        })
    }

    /// Positions in this range that are here.
    pub fn within(&self, range: Range<u32>) -> impl Iterator<Item = u32> + '_ {
        self.blocks.range(range).map(|(position, _)| *position)
    }

    /// How many blocks are here, with the superblock.
    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.blocks.len() + usize::from(self.superblock.is_some())
    }
}

#[cfg(test)]
mod tests;
