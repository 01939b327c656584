//! What is known of one log: what is live of it, what has to be sent, who waits for what. No I/O but for the copy of what is live
//! ([`super::mirror`]).
//!
//! What must always hold:
//! * `mirror` is the journal as its guest wrote it: every log block from the tail on, and the superblock. Whatever fails,
//!   the log can be completed on storage from it, by this process or by one that follows it.
//! * Batches are formed in the order of the guest's writes, so that any prefix of them is a state in which the guest's
//!   journal once was. That is why only commit blocks wait: where they are durable, all before them is.
//! * On storage a commit block comes after what it commits is durable there, whoever writes it.
//! * What waits to be sent is bounded: beyond that everything waits, not only commit blocks. While storage counts and the server is
//!   catching up nothing waits, and so no content is queued: what is written is noted, and sent from the copy as it is then. Order
//!   counts from the switch on; before it everything noted is sent.
//! * A batch's tail passes nothing that the superblock in it, or before it, still needs.

use super::mirror::{Mirror, is_commit};
use block_route::{RequestId, Status};
use jbd2::{Features, Superblock, SuperblockError};
use remote_journal::message::{Batch, Block};
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// Bytes of blocks in one batch, at most.
const BATCH_BYTES_MAX: usize = 512 << 10;

/// Bytes of blocks that wait to be sent before every write waits until it is durable: a guest that overwrites its log
/// without ever committing must not fill our memory.
const UNSENT_BYTES_MAX: usize = 16 << 20;

/// How old the mark on storage may be while commits go to the server: a copy of the image that was made before the last mark
/// is told from the true one.
const MARK_AGE: Duration = Duration::from_secs(10);

/// Bytes of blocks that may be left to be sent when everything goes to the server: commits wait for that.
const SWITCH_BYTES_MAX: usize = 256 << 10;

/// Where the log's writes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// No guest has it open.
    Closed,
    /// To its own place.
    Storage,
    /// To its own place, which counts, and to the server, which is catching up.
    Returning,
    /// To the server; what is acknowledged waits until storage says that the server counts.
    Switching,
    /// To the server.
    Remote,
    /// The log is being completed on storage.
    FallingBack,
    /// Nowhere: somebody else has the journal, or storage failed.
    Failed,
}

/// What becomes of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// It is taken: nothing waits for it.
    Done,
    /// The request waits until it is durable.
    Held,
    /// It goes to its own place, and [`State::stored`] is to be said when it is there.
    Store,
    /// It fails.
    Fail,
}

#[derive(Debug)]
pub(crate) struct State {
    pub mode: Mode,
    /// Counts openings and closings.
    pub generation: u64,
    pub mirror: Mirror,
    start: u32,
    ring: (u32, u32),
    /// Commit blocks may come before what they commit, so everything waits until it is durable.
    is_strict: bool,
    /// This log cannot be shipped: only its guest's own kernel can replay it.
    pub is_local_only: bool,
    /// Somebody wishes it on storage for now.
    pub is_paused: bool,
    pub epoch: u64,
    pub nonce: [u8; 16],
    /// Written in this pass, and the positions that a superblock let go of.
    pass: Vec<(Block, Vec<u32>)>,
    pass_held: Vec<RequestId>,
    /// Formed and not sent.
    pub outbox: VecDeque<Batch>,
    /// Bytes of blocks in one batch, at most; tests choose it smaller than a pass.
    pub batch_bytes_max: usize,
    /// How old the mark on storage may be while commits go to the server; tests choose it smaller than a test.
    pub mark_age: Duration,
    /// Bytes of blocks in `pass`, and in batches until they are sent.
    unsent_bytes: usize,
    next_sequence: u64,
    batch_of: HashMap<u32, u64>,
    live_batches: BTreeMap<u64, u32>,
    pub acknowledged: u64,
    held: VecDeque<(u64, RequestId)>,
    held_for_storage: Vec<RequestId>,
    /// To be written to storage before the log is complete there.
    dirty: BTreeSet<u32>,
    /// The same, once all of `dirty` is durable.
    dirty_commits: BTreeSet<u32>,
    done: Vec<(RequestId, Status)>,
    pub stored_in_flight: u64,
    /// While falling back: storage still says that the server counts.
    server_counts: bool,
    /// The batch with the superblock that was last sent because of its count alone.
    renewed_with: u64,
    /// Somebody waits until the log is complete on storage and nothing is done to it any more.
    pub wants_settling: bool,
    /// The last attempt to reach the server failed.
    pub has_failed_to_connect: bool,
    /// It has failed because storage did: the log can still be completed there, once storage is well again.
    pub has_storage_failed: bool,
    /// It was gone on with in another process, which may not touch storage yet.
    pub may_not_begin: bool,
    /// Live blocks that the server does not have as they are, before it can count; the superblock first.
    to_copy: BTreeSet<u32>,
    /// Positions that the superblock has let go of, which the server knows when it is sent.
    passed_unsent: BTreeSet<u32>,
    /// The batch with which there was little left of them.
    copied_until: Option<u64>,
}

impl State {
    pub fn new(mirror: Mirror) -> Self {
        State {
            mode: Mode::Closed,
            generation: 0,
            mirror,
            start: 0,
            ring: (0, 0),
            is_strict: false,
            is_local_only: false,
            is_paused: false,
            epoch: 0,
            nonce: [0; 16],
            pass: Vec::new(),
            pass_held: Vec::new(),
            outbox: VecDeque::new(),
            batch_bytes_max: BATCH_BYTES_MAX,
            mark_age: MARK_AGE,
            unsent_bytes: 0,
            next_sequence: 1,
            batch_of: HashMap::new(),
            live_batches: BTreeMap::new(),
            acknowledged: 0,
            held: VecDeque::new(),
            held_for_storage: Vec::new(),
            dirty: BTreeSet::new(),
            dirty_commits: BTreeSet::new(),
            done: Vec::new(),
            stored_in_flight: 0,
            server_counts: false,
            renewed_with: 0,
            wants_settling: false,
            has_failed_to_connect: false,
            has_storage_failed: false,
            may_not_begin: false,
            to_copy: BTreeSet::new(),
            passed_unsent: BTreeSet::new(),
            copied_until: None,
        }
    }

    /// An open log of which another process has died. `storage_counts` says that it is the log on storage that is recovered from;
    /// `is_stored`, that it has all that anybody was told of. The epoch is that of the server's, where that counts.
    pub fn take_up(
        mirror: Mirror,
        superblock: &Superblock,
        storage_counts: bool,
        is_stored: bool,
        (epoch, nonce): (u64, [u8; 16]),
    ) -> Self {
        let mut state = State { epoch, nonce, may_not_begin: true, ..State::new(mirror) };
        state.note_opened(superblock);
        if !(storage_counts && is_stored) {
            state.complete(!storage_counts);
        }
        state
    }

    /// Whether the log is to be completed on storage before anything else is done with it.
    pub fn is_to_be_completed(&self) -> bool {
        self.mode == Mode::FallingBack
    }

    /// A guest opens the log: it is empty, and on storage.
    pub fn open(&mut self, superblock: &Superblock, block: Arc<[u8]>) {
        self.forget_shipping();
        self.mirror.open(block);
        self.note_opened(superblock);
    }

    fn note_opened(&mut self, superblock: &Superblock) {
        self.generation += 1;
        self.mode = Mode::Storage;
        self.start = superblock.start;
        self.is_local_only = false;
        self.note_features(superblock);
        self.has_failed_to_connect = false;
    }

    /// How its guest writes the log from now on. A log that was once one for its own place alone stays that until it is opened anew.
    fn note_features(&mut self, superblock: &Superblock) {
        let (features, format) = (superblock.features, superblock.format());
        self.is_local_only |=
            features.has(Features::FAST_COMMIT) || matches!(format, Err(SuperblockError::UnknownFeatures { .. }));
        self.is_strict = features.has(Features::ASYNC_COMMIT);
        // The area of fast commits is not in the ring. Where that ends with features that are not known is not known either.
        self.ring = match format {
            Ok(format) => (format.first, format.last),
            Err(_) if self.is_local_only => (0, 0),
            Err(_) => (superblock.first, superblock.maxlen),
        };
    }

    /// The log is over: whoever still waits is told so.
    pub fn close(&mut self) {
        self.generation += 1;
        self.mode = Mode::Closed;
        self.mirror.close();
        self.fail_all();
        self.forget_shipping();
    }

    fn fail_all(&mut self) {
        self.move_held();
        self.done.extend(self.held_for_storage.drain(..).map(|request| (request, Status::IoError)));
    }

    /// Nothing can be written any more: somebody else has it, or storage failed.
    pub fn fail(&mut self, is_taken: bool) {
        self.mirror.fail();
        self.server_counts = match self.mode {
            Mode::FallingBack | Mode::Failed => self.server_counts,
            mode => mode == Mode::Remote,
        };
        self.mode = Mode::Failed;
        self.has_storage_failed = !is_taken;
        self.fail_all();
        self.forget_shipping();
    }

    fn forget_shipping(&mut self) {
        self.move_held();
        self.pass.clear();
        self.outbox.clear();
        self.unsent_bytes = 0;
        self.batch_of.clear();
        self.live_batches.clear();
        self.next_sequence = 1;
        self.acknowledged = 0;
        self.renewed_with = 0;
        self.to_copy.clear();
        self.passed_unsent.clear();
        self.copied_until = None;
    }

    /// Whether anything became durable on the server since the superblock was last sent anew.
    pub fn is_to_be_renewed(&self) -> bool {
        self.mode == Mode::Remote && self.acknowledged > self.renewed_with
    }

    /// Storage has the same superblock with a higher count, so the server may.
    pub fn renew(&mut self, block: Arc<[u8]>) {
        self.mirror.renew(Arc::clone(&block));
        self.push(0, block, Vec::new());
        self.form_batches();
        self.renewed_with = self.next_sequence - 1;
    }

    fn move_held(&mut self) {
        self.held_for_storage.extend(self.held.drain(..).map(|(_, request)| request));
        self.held_for_storage.append(&mut self.pass_held);
    }

    /// A log block other than the superblock.
    pub fn write(&mut self, position: u32, content: Arc<[u8]>, request: RequestId) -> Outcome {
        let is_commit = is_commit(&content);
        if !matches!(self.mode, Mode::Closed | Mode::Failed) {
            self.mirror.put(position, &content);
        }
        // Which blocks commit beside those is not known of a log that only a kernel can replay.
        let waits = is_commit || self.is_strict || self.is_local_only || self.unsent_bytes > UNSENT_BYTES_MAX;
        match self.mode {
            Mode::Failed => Outcome::Fail,
            Mode::Closed | Mode::Storage | Mode::Returning => {
                if self.mode == Mode::Returning {
                    self.to_copy.insert(position);
                }
                self.stored_in_flight += 1;
                Outcome::Store
            }
            Mode::Switching | Mode::Remote => {
                self.push(position, content, Vec::new());
                if waits {
                    self.pass_held.push(request);
                }
                if waits { Outcome::Held } else { Outcome::Done }
            }
            Mode::FallingBack => {
                self.set_dirty(position, is_commit);
                if waits {
                    self.held_for_storage.push(request);
                }
                if waits { Outcome::Held } else { Outcome::Done }
            }
        }
    }

    fn push(&mut self, position: u32, content: Arc<[u8]>, passed: Vec<u32>) {
        self.unsent_bytes += content.len();
        self.pass.push((Block::new(position, content), passed));
    }

    /// A superblock behind another one that has not been taken to be sent takes its place: a guest waits for none, and may write as many
    /// as it likes.
    fn push_superblock(&mut self, block: Arc<[u8]>, passed: Vec<u32>) {
        if let Some((last, of_last)) = self.pass.last_mut() {
            if last.position == 0 {
                *last = Block::new(0, block);
                of_last.extend(passed);
                return;
            }
        } else if let Some(last) = self.outbox.back_mut().and_then(|batch| batch.blocks.last_mut())
            && last.position == 0
        {
            *last = Block::new(0, block);
            passed.into_iter().for_each(|position| self.count(position, None));
            return;
        }
        self.push(0, block, passed);
    }

    fn set_dirty(&mut self, position: u32, is_commit: bool) {
        self.dirty.remove(&position);
        self.dirty_commits.remove(&position);
        // Where commit blocks may come first, their checksums tell whether what they commit is there.
        let set = if is_commit && !self.is_strict { &mut self.dirty_commits } else { &mut self.dirty };
        set.insert(position);
    }

    /// The next blocks that have to be written to storage before others may be, or before it is told that it counts.
    ///
    /// # Errors
    /// When the copy cannot be read.
    pub fn take_dirty(&mut self, count: usize, commits: bool) -> io::Result<Vec<(u32, Arc<[u8]>)>> {
        let set = if commits { &mut self.dirty_commits } else { &mut self.dirty };
        let positions: Vec<u32> = set.iter().take(count).copied().collect();
        let mut blocks = Vec::new();
        for position in positions {
            if let Some(content) = self.mirror.get(position)? {
                blocks.push((position, content));
            }
            set.remove(&position);
        }
        Ok(blocks)
    }

    /// Whether everything is on storage, commit blocks with their transactions or all but them.
    pub fn is_clean(&self, commits: bool) -> bool {
        self.dirty.is_empty() && (!commits || self.dirty_commits.is_empty())
    }

    /// These batches are sent.
    pub fn sent(&mut self, bytes: usize) {
        self.unsent_bytes = self.unsent_bytes.saturating_sub(bytes);
    }

    /// The superblock of a log that stays open. Says whether it has to be written to storage now.
    pub fn superblock(&mut self, superblock: &Superblock, block: Arc<[u8]>) -> bool {
        self.note_features(superblock);
        let passed = self.passed(superblock.start);
        for position in &passed {
            self.dirty.remove(position);
            self.dirty_commits.remove(position);
        }
        self.start = superblock.start;
        self.mirror.pass(Arc::clone(&block), &passed);
        match self.mode {
            Mode::Returning => {
                self.to_copy.insert(0);
                self.passed_unsent.extend(passed);
            }
            Mode::Switching | Mode::Remote => self.push_superblock(block, passed),
            _ => {}
        }
        self.storage_counts() && self.mode != Mode::FallingBack
    }

    /// Whether the log on storage is the one that is recovered from: it may lack what nobody was told is durable.
    pub fn storage_counts(&self) -> bool {
        match self.mode {
            Mode::Storage | Mode::Returning | Mode::Switching => true,
            Mode::FallingBack => !self.server_counts,
            Mode::Closed | Mode::Remote | Mode::Failed => false,
        }
    }

    /// While falling back: whether storage still says that the server counts.
    pub fn server_counts(&self) -> bool {
        self.mode == Mode::FallingBack && self.server_counts
    }

    /// While falling back: storage says that it counts.
    pub fn set_storage_counts(&mut self) {
        self.server_counts = false;
    }

    /// The positions from the tail as it was to the tail as it is said to be now.
    fn passed(&self, start: u32) -> Vec<u32> {
        let (first, end) = self.ring;
        let inside = first..end;
        if first == 0 || !inside.contains(&start) || !inside.contains(&self.start) {
            return Vec::new();
        }
        if start >= self.start {
            self.mirror.within(self.start..start).collect()
        } else {
            self.mirror.within(self.start..end).chain(self.mirror.within(first..start)).collect()
        }
    }

    /// Makes batches of what was written in this pass. Says whether there are any.
    pub fn form_batches(&mut self) -> bool {
        let mut blocks = Vec::new();
        let mut bytes = 0;
        for (block, passed) in std::mem::take(&mut self.pass) {
            if bytes + block.content.len() > self.batch_bytes_max && !blocks.is_empty() {
                self.form(std::mem::take(&mut blocks));
                bytes = 0;
            }
            bytes += block.content.len();
            self.count(block.position, Some(self.next_sequence));
            // Only now, with the superblock that says so in the batch: no prefix is without what it needs.
            passed.into_iter().for_each(|position| self.count(position, None));
            blocks.push(block);
        }
        if !blocks.is_empty() {
            self.form(blocks);
        }
        let last = self.next_sequence - 1;
        self.held.extend(self.pass_held.drain(..).map(|request| (last, request)));
        !self.outbox.is_empty() || !self.to_copy.is_empty()
    }

    fn form(&mut self, blocks: Vec<Block>) {
        let sequence = self.next_sequence;
        self.next_sequence += 1;
        let tail = self.live_batches.keys().next().copied().unwrap_or(sequence).min(sequence);
        self.outbox.push_back(Batch { epoch: self.epoch, sequence, tail, blocks });
    }

    /// Notes which batch has a position's newest content.
    fn count(&mut self, position: u32, batch: Option<u64>) {
        let old = match batch {
            Some(batch) => {
                *self.live_batches.entry(batch).or_default() += 1;
                self.batch_of.insert(position, batch)
            }
            None => self.batch_of.remove(&position),
        };
        if let Some(old) = old
            && let Some(count) = self.live_batches.get_mut(&old)
        {
            *count -= 1;
            if *count == 0 {
                self.live_batches.remove(&old);
            }
        }
    }

    /// The server has begun a log for us: everything live goes there, as [`State::copy_some`] says.
    pub fn begin_return(&mut self, epoch: u64, nonce: [u8; 16]) {
        self.forget_shipping();
        (self.epoch, self.nonce) = (epoch, nonce);
        self.mode = Mode::Returning;
        self.to_copy = std::iter::once(0).chain(self.mirror.positions().map(|(position, _)| position)).collect();
    }

    /// Makes a batch of what is live and was not sent since the log was begun. Says whether there was any.
    ///
    /// It goes as it is now: what the guest has written there since goes once more, after it or before.
    ///
    /// # Errors
    /// When the copy cannot be read.
    pub fn copy_some(&mut self) -> io::Result<bool> {
        let bytes = self.push_some(self.batch_bytes_max)?;
        if bytes > 0 {
            self.form_batches();
        }
        if self.is_little_left() {
            self.copied_until.get_or_insert(self.next_sequence - 1);
        }
        Ok(bytes > 0)
    }

    fn push_some(&mut self, bytes_max: usize) -> io::Result<usize> {
        let mut bytes = 0;
        while bytes < bytes_max
            && let Some(position) = self.to_copy.pop_first()
        {
            // What a superblock has let go of meanwhile is not needed.
            let Some(content) = self.mirror.get(position)? else { continue };
            bytes += content.len();
            let passed = if position == 0 { std::mem::take(&mut self.passed_unsent) } else { BTreeSet::new() };
            // It takes the place of what the server had there before.
            self.passed_unsent.remove(&position);
            self.push(position, content, passed.into_iter().collect());
        }
        Ok(bytes)
    }

    /// Whether [`State::copy_some`] has more to send.
    pub fn has_more_to_copy(&self) -> bool {
        !self.to_copy.is_empty()
    }

    fn is_little_left(&self) -> bool {
        let block_bytes = self.mirror.superblock().map_or(0, |block| block.len());
        self.to_copy.len().saturating_mul(block_bytes) <= SWITCH_BYTES_MAX
    }

    /// Bytes of contents that are queued.
    #[cfg(test)]
    pub fn queued_bytes(&self) -> usize {
        let formed = self.outbox.iter().flat_map(|batch| &batch.blocks);
        self.pass.iter().map(|(block, _)| block).chain(formed).map(|block| block.content.len()).sum()
    }

    /// Whether the server has, durably, all but a little of what is live.
    pub fn is_copied(&self) -> bool {
        self.is_little_left() && self.copied_until.is_some_and(|until| self.acknowledged >= until)
    }

    /// From now on nothing goes to storage. Gives the last batch of what did.
    ///
    /// # Errors
    /// When the copy cannot be read: then nothing has changed.
    pub fn begin_switch(&mut self) -> io::Result<u64> {
        self.push_some(usize::MAX)?;
        self.mirror.only_here();
        self.form_batches();
        self.mode = Mode::Switching;
        Ok(self.next_sequence - 1)
    }

    /// The server has said what is durable; those who waited for it are told, if the server counts already.
    pub fn acknowledge(&mut self, sequence: u64) -> bool {
        self.acknowledged = self.acknowledged.max(sequence.min(self.next_sequence - 1));
        self.release_held()
    }

    pub fn release_held(&mut self) -> bool {
        if self.mode != Mode::Remote {
            return false;
        }
        while self.held.front().is_some_and(|(sequence, _)| *sequence <= self.acknowledged) {
            self.done.extend(self.held.pop_front().map(|(_, request)| (request, Status::Ok)));
        }
        !self.done.is_empty()
    }

    /// Whether something was sent that is not known to be durable.
    pub fn is_waiting(&self) -> bool {
        self.acknowledged + 1 < self.next_sequence
    }

    /// The server does not count any more: everything live has to be written to storage.
    pub fn begin_fall_back(&mut self) {
        let server_counts = self.mode == Mode::Remote;
        self.forget_shipping();
        self.complete(server_counts);
    }

    /// Storage may be well again: all of the log is written there once more.
    pub fn complete_again(&mut self) {
        self.has_storage_failed = false;
        self.mirror.is_tried_again();
        self.complete(self.server_counts);
    }

    fn complete(&mut self, server_counts: bool) {
        self.server_counts = server_counts;
        self.mode = Mode::FallingBack;
        self.dirty.clear();
        self.dirty_commits.clear();
        let blocks: Vec<(u32, bool)> = self.mirror.positions().collect();
        blocks.into_iter().for_each(|(position, is_commit)| self.set_dirty(position, is_commit));
    }

    /// The log is complete on storage, and storage counts.
    pub fn end_fall_back(&mut self) {
        self.mirror.is_stored();
        self.mode = Mode::Storage;
        self.done.extend(self.held_for_storage.drain(..).map(|request| (request, Status::Ok)));
    }

    /// Storage counted all along; the server is given up for now.
    pub fn give_up_return(&mut self) {
        self.mode = Mode::Storage;
        self.forget_shipping();
    }

    pub fn take_done(&mut self) -> Vec<(RequestId, Status)> {
        std::mem::take(&mut self.done)
    }
}
