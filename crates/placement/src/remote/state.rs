//! What is known of one log: what is live of it, what has to be sent, who waits for what. No I/O.
//!
//! What must always hold:
//! * `mirror` is the journal as its guest wrote it: every log block from the tail on, and the superblock. Whatever fails,
//!   the log can be completed on storage from it.
//! * Batches are formed in the order of the guest's writes, so that any prefix of them is a state in which the guest's
//!   journal once was. That is why only commit blocks wait: where they are durable, all before them is.
//! * On storage a commit block comes after what it commits is durable there, whoever writes it.
//! * What waits to be sent is bounded: beyond that everything waits, not only commit blocks.
//! * A batch's tail passes nothing that the superblock in it, or before it, still needs.

use block_route::{RequestId, Status};
use jbd2::{Features, Kind, Superblock};
use remote_journal::message::{Batch, Block};
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;

/// Bytes of blocks in one batch, at most.
const BATCH_BYTES_MAX: usize = 512 << 10;

/// Bytes of blocks that wait to be sent before every write waits until it is durable: a guest that overwrites its log
/// without ever committing must not fill our memory.
const UNSENT_BYTES_MAX: usize = 16 << 20;

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

fn is_commit(block: &[u8]) -> bool {
    jbd2::peek(block).is_some_and(|header| header.kind == Kind::Commit)
}

#[derive(Debug)]
pub(crate) struct State {
    pub mode: Mode,
    /// Counts openings and closings.
    pub generation: u64,
    pub mirror: BTreeMap<u32, Arc<[u8]>>,
    start: u32,
    ring: (u32, u32),
    /// Commit blocks may come before what they commit, so everything waits until it is durable.
    is_strict: bool,
    /// Why this log cannot be shipped.
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
    pub is_shut_down: bool,
}

impl State {
    pub fn new() -> Self {
        State {
            mode: Mode::Closed,
            generation: 0,
            mirror: BTreeMap::new(),
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
            is_shut_down: false,
        }
    }

    /// A guest opens the log: it is empty, and on storage.
    pub fn open(&mut self, superblock: &Superblock, block: Arc<[u8]>) {
        self.forget_shipping();
        self.generation += 1;
        self.mode = Mode::Storage;
        self.mirror = BTreeMap::from([(0, block)]);
        self.start = superblock.start;
        self.ring = (superblock.first, superblock.maxlen);
        let features = superblock.features;
        self.is_strict = features.has(Features::ASYNC_COMMIT);
        self.is_local_only = features.has(Features::FAST_COMMIT) || features.incompat & !Features::KNOWN_INCOMPAT != 0;
        self.has_failed_to_connect = false;
    }

    /// The log is over: whoever still waits is told so.
    pub fn close(&mut self) {
        self.generation += 1;
        self.mode = Mode::Closed;
        self.mirror.clear();
        self.fail_all();
        self.forget_shipping();
    }

    fn fail_all(&mut self) {
        self.move_held();
        self.done.extend(self.held_for_storage.drain(..).map(|request| (request, Status::IoError)));
    }

    /// Nothing can be written any more.
    pub fn fail(&mut self) {
        self.mode = Mode::Failed;
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
    }

    /// Whether anything became durable on the server since the superblock was last sent anew.
    pub fn is_to_be_renewed(&self) -> bool {
        self.mode == Mode::Remote && self.acknowledged > self.renewed_with
    }

    /// Storage has the same superblock with a higher count, so the server may.
    pub fn renew(&mut self, block: Arc<[u8]>) {
        self.mirror.insert(0, Arc::clone(&block));
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
            self.mirror.insert(position, Arc::clone(&content));
        }
        let waits = is_commit || self.is_strict || self.unsent_bytes > UNSENT_BYTES_MAX;
        match self.mode {
            Mode::Failed => Outcome::Fail,
            Mode::Closed | Mode::Storage | Mode::Returning => {
                if self.mode == Mode::Returning {
                    self.push(position, content, Vec::new());
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

    fn set_dirty(&mut self, position: u32, is_commit: bool) {
        self.dirty.remove(&position);
        self.dirty_commits.remove(&position);
        // Where commit blocks may come first, their checksums tell whether what they commit is there.
        let set = if is_commit && !self.is_strict { &mut self.dirty_commits } else { &mut self.dirty };
        set.insert(position);
    }

    /// The next blocks that have to be written to storage before others may be, or before it is told that it counts.
    pub fn take_dirty(&mut self, count: usize, commits: bool) -> Vec<(u32, Arc<[u8]>)> {
        let set = if commits { &mut self.dirty_commits } else { &mut self.dirty };
        let positions: Vec<u32> = set.iter().take(count).copied().collect();
        positions.iter().for_each(|position| {
            set.remove(position);
        });
        positions.into_iter().filter_map(|position| Some((position, Arc::clone(self.mirror.get(&position)?)))).collect()
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
        let passed = self.passed(superblock.start);
        for position in &passed {
            self.mirror.remove(position);
            self.dirty.remove(position);
            self.dirty_commits.remove(position);
        }
        self.start = superblock.start;
        self.mirror.insert(0, Arc::clone(&block));
        if matches!(self.mode, Mode::Returning | Mode::Switching | Mode::Remote) {
            self.push(0, block, passed);
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
            self.mirror.range(self.start..start).map(|(position, _)| *position).collect()
        } else {
            let wrapped = self.mirror.range(self.start..end).chain(self.mirror.range(first..start));
            wrapped.map(|(position, _)| *position).collect()
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
        !self.outbox.is_empty()
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

    /// The server has begun a log for us: everything live goes into its first batches. Gives the last of them.
    pub fn begin_return(&mut self, epoch: u64, nonce: [u8; 16]) -> u64 {
        self.forget_shipping();
        (self.epoch, self.nonce) = (epoch, nonce);
        self.mode = Mode::Returning;
        // What is copied here is in memory anyway: it is not counted as waiting.
        self.pass = self
            .mirror
            .iter()
            .map(|(position, content)| (Block::new(*position, Arc::clone(content)), Vec::new()))
            .collect();
        self.form_batches();
        self.next_sequence - 1
    }

    /// From now on nothing goes to storage. Gives the last batch of what did.
    pub fn begin_switch(&mut self) -> u64 {
        self.form_batches();
        self.mode = Mode::Switching;
        self.next_sequence - 1
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
        self.server_counts = self.mode == Mode::Remote;
        self.mode = Mode::FallingBack;
        self.forget_shipping();
        self.dirty.clear();
        self.dirty_commits.clear();
        let blocks: Vec<(u32, bool)> =
            self.mirror.iter().filter(|(at, _)| **at != 0).map(|(at, block)| (*at, is_commit(block))).collect();
        blocks.into_iter().for_each(|(position, is_commit)| self.set_dirty(position, is_commit));
    }

    /// The log is complete on storage, and storage counts.
    pub fn end_fall_back(&mut self) {
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
