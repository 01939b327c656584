//! Guest, machine and disk together, one random step after the other.

use crate::disk::{Disk, SECTOR};
use crate::guest::{
    BITMAP, BLOCK, COUNTER, Committed, DATA, DATA_BLOCKS, DIRECT, HOME_BLOCKS, Running, State, TABLE, Use, is_set,
    pattern,
};
use crate::judge::{self, JOURNAL};
use durability::{
    AnswerId, Committed as Newest, Durability, FoundSaid, Freed, Kind, OperationId, Past, Place, Step, Transaction,
    Version, View, WhenAsked, WriteId,
};
use guest_tools::random::Random;
use jbd2::build::SuperblockBuilder;
use jbd2::{Checksum, Compound, Features, Format, Superblock};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// An operation of the disk ends after so many steps at the latest.
const LATENCY_MAX: u64 = 6;
/// What is older than its age and this is durable: what is being written out when its time comes, and its own writing out.
const WRITE_OUT: u64 = 30 * LATENCY_MAX;
const FIRST: u32 = 7;
/// A guest that comes to rest before durability begins does so at this step.
const REST: u64 = 120;

/// What a run is like.
#[derive(Clone, Copy, Debug)]
pub struct Setting {
    pub checksum: Checksum,
    pub wide: bool,
    pub log_blocks: u32,
    /// In steps.
    pub within: u64,
    /// Data is written in place, and metadata that is freed is revoked; without, everything is journaled.
    pub in_place: bool,
    pub tells_frees: bool,
    /// Begins without durability.
    pub engages: bool,
    /// And goes over to it when all that is committed is home.
    pub at_rest: bool,
    /// How often it is asked for what, in percent.
    pub checkpoints: u64,
    /// It only journals: nothing but age makes it durable.
    pub is_quiet: bool,
    pub tails: u64,
    /// How often, in a thousand steps, the process that has the machine dies and another one follows.
    pub deaths: u64,
    /// A home write of the guest has so many blocks at most.
    pub spread: u64,
    /// How often the host writes home what is committed, in percent.
    pub hosts: u64,
    /// How often the guest writes home what it is writing home already, in percent. It keeps its log until it has written it alone.
    pub overlaps: u64,
    /// Blocks that the machine reads into memory at a time, and revoked blocks that it knows one by one.
    pub at_once: (u64, usize),
    /// A compound is read in parts, since what was committed stays.
    pub is_steady: bool,
    /// Durability begins with several compounds.
    pub begins_in_parts: bool,
}

impl Setting {
    pub fn of_seed(seed: u64) -> Self {
        let mut random = Random::of(seed, 9);
        let drawn = Setting {
            checksum: [Checksum::None, Checksum::V1, Checksum::V2, Checksum::V3][random.below(4) as usize],
            wide: random.below(2) == 0,
            log_blocks: [40, 64, 130, 400][random.below(4) as usize],
            within: [0, 10, 60, 200][random.below(4) as usize],
            in_place: random.below(3) != 0,
            tells_frees: random.below(6) != 0,
            engages: random.below(4) == 0,
            at_rest: Random::of(seed, 11).below(2) == 0,
            checkpoints: [0, 5, 20, 50][random.below(4) as usize],
            tails: [0, 2, 10, 30][random.below(4) as usize],
            is_quiet: random.below(10) == 0,
            deaths: [0, 3, 20, 100][Random::of(seed, 13).below(4) as usize],
            spread: [1, 2, 5, 12][Random::of(seed, 15).below(4) as usize],
            hosts: [0, 5, 20, 50][Random::of(seed, 16).below(4) as usize],
            overlaps: [0, 0, 20, 60][Random::of(seed, 17).below(4) as usize],
            at_once: [(1, 0), (3, 1), (8, 4), (1000, 1000)][Random::of(seed, 19).below(4) as usize],
            is_steady: false,
            begins_in_parts: Random::of(seed, 22).below(2) == 0,
        };
        let drawn = Setting { is_steady: drawn.at_once.0 == 8 && Random::of(seed, 21).below(2) == 0, ..drawn };
        // Who goes on cannot tell apart two writes to one place that were both not answered.
        let overlaps = if drawn.deaths > 0 { 0 } else { drawn.overlaps };
        let drawn = Setting { overlaps, ..drawn };
        let quiet = Setting { in_place: false, engages: false, checkpoints: 0, tails: 0, log_blocks: 400, ..drawn };
        if drawn.is_quiet { quiet } else { drawn }
    }
}

/// A write of the guest, or of the host.
#[derive(Clone, Debug)]
struct GuestWrite {
    blocks: Range<u64>,
    kind: Kind,
    bytes: Option<Arc<[u8]>>,
    what: What,
    /// Of its blocks the transaction whose newest version it carried when it set out.
    carries: BTreeMap<u64, u32>,
    /// It is with the disk.
    is_sent: bool,
    /// It was asked of a process that died.
    is_repeated: bool,
    /// Another one of the guest's to the same place was under way beside it: what is there then is not known.
    is_tainted: bool,
}

impl GuestWrite {
    fn new(blocks: Range<u64>, kind: Kind, bytes: Option<Arc<[u8]>>, what: What) -> Self {
        GuestWrite {
            blocks,
            kind,
            bytes,
            what,
            carries: BTreeMap::new(),
            is_sent: false,
            is_repeated: false,
            is_tainted: false,
        }
    }

    fn overlaps(&self, blocks: &Range<u64>) -> bool {
        self.blocks.start < blocks.end && blocks.start < self.blocks.end
    }

    fn is_hosts(&self) -> bool {
        matches!(self.what, What::Host(_))
    }
}

#[derive(Clone, Debug)]
enum What {
    /// The home write of blocks, each as of a transaction.
    Home(Vec<(u64, u32)>),
    /// The host's, of what is newest.
    Host(u32),
    InPlace(u64, u32),
    /// Past the journal.
    Direct(u32),
    Discard,
}

/// What the guest has written when it asks for a flush, and may count on when that is answered: directly, and in place.
#[derive(Clone, Debug, Default)]
struct Flushed {
    direct: u32,
    in_place: HashMap<u64, u32>,
}

#[derive(Clone, Debug)]
enum Asked {
    Commit,
    Tail(u32),
    Flush(Flushed),
    Now(u32),
    Close,
}

#[derive(Clone, Debug)]
enum OnDisk {
    Machine(OperationId),
    Guest(WriteId),
}

struct Shown<'a> {
    bitmap: &'a mut Option<Vec<u8>>,
    durable: &'a mut HashMap<u64, (Version, bool)>,
    versions: &'a mut HashMap<Version, Vec<u8>>,
    contents: &'a HashMap<Version, Vec<u8>>,
    version_of: &'a HashMap<(u64, u32), Version>,
    books: &'a BTreeMap<u64, (u32, bool)>,
    past: &'a BTreeMap<u64, (u32, Past)>,
    read: &'a mut HashSet<Version>,
    through: Option<u32>,
    disk: &'a Disk,
    now: u64,
}

impl Shown<'_> {
    /// What whoever reads it finds at home.
    fn home(&self, block: u64) -> Vec<u8> {
        let mut content = vec![0; BLOCK];
        self.disk.read(block as usize * BLOCK, &mut content);
        content
    }

    /// The newest version of a block that the guest's log has.
    fn newest(&self, block: u64) -> Option<Newest> {
        let (transaction, _) = *self.books.get(&block)?;
        let is_gone_over = self.past.get(&block).is_some_and(|(past, _)| *past == transaction);
        Some(Newest { block, version: self.version_of[&(block, transaction)], transaction, is_gone_over })
    }
}

impl View for Shown<'_> {
    fn made_durable(&mut self, through: u32, blocks: &[(u64, Version)]) {
        self.through = Some(through);
        for (block, version) in blocks {
            let is_held = self.versions.remove(version).is_some();
            assert!(is_held || self.read.contains(version), "block {block} has a version that is not held");
            let content = &self.contents[version];
            // What is durable once more is at home still, and nowhere else perhaps.
            if !is_held && *block != DIRECT && self.durable.get(block) == Some(&(*version, true)) {
                assert!(self.home(*block) == *content, "home has another version of block {block} than is durable");
            }
            self.durable.insert(*block, (*version, false));
            if *block == BITMAP {
                *self.bitmap = Some(content.clone());
            }
        }
    }

    fn at_home(&mut self, blocks: &[u64]) {
        for block in blocks {
            // Of before durability began, or of another machine's.
            let Some((version, is_home)) = self.durable.get_mut(block) else { continue };
            *is_home = true;
            let at = *block as usize * BLOCK;
            let content = &self.contents[version];
            assert!(self.disk.durable[at..at + BLOCK] == content[..], "block {block} is not at home");
            if *block == BITMAP {
                *self.bitmap = None;
            }
        }
    }

    fn is_free(&mut self, block: u64) -> bool {
        let bitmap = match &*self.bitmap {
            Some(bitmap) => bitmap.clone(),
            None => self.home(BITMAP),
        };
        (DATA..HOME_BLOCKS).contains(&block) && !is_set(&bitmap, block)
    }

    fn content(&mut self, version: Version, into: &mut [u8]) -> io::Result<()> {
        let is_newest =
            || self.books.keys().any(|block| self.newest(*block).is_some_and(|newest| newest.version == version));
        assert!(self.versions.contains_key(&version) || is_newest(), "a version that the guest's log does not have");
        self.read.insert(version);
        into.copy_from_slice(&self.contents[&version]);
        Ok(())
    }

    fn logged(&mut self, position: u32, into: &mut [u8]) -> io::Result<()> {
        self.disk.read(JOURNAL + position as usize * BLOCK, into);
        Ok(())
    }

    fn wall_clock(&self) -> (u64, u32) {
        (self.now / 50, self.now as u32)
    }

    fn committed_after(&mut self, blocks: Range<u64>, after: u32) -> Vec<Newest> {
        blocks.filter_map(|block| self.newest(block)).filter(|newest| newest.transaction > after).collect()
    }
}

pub struct World {
    setting: Setting,
    random: Random,
    random_of_deaths: Random,
    random_of_hosts: Random,
    now: u64,
    disk: Disk,
    machine: Option<Durability>,
    format: Format,
    // What runs the machine.
    versions: HashMap<Version, Vec<u8>>,
    /// Of all there ever were.
    contents: HashMap<Version, Vec<u8>>,
    version_of: HashMap<(u64, u32), Version>,
    /// Those that a compound has had.
    read: HashSet<Version>,
    /// Writes of the guest that were not sent, when they came and when they had waited.
    pub unsent: [u64; 2],
    next_version: u64,
    /// Of each transaction: what the guest's log no longer has when its tail has passed it.
    versions_of: BTreeMap<u32, Vec<Version>>,
    /// The journal superblock as it was.
    superblock: Vec<u8>,
    /// Nothing while home tells it.
    durable_bitmap: Option<Vec<u8>>,
    /// Of each block the newest version that is durable, and whether home tells it, as far as this machine has said.
    durable: HashMap<u64, (Version, bool)>,
    /// The disk's operations, and when each ends at the latest.
    on_disk: BTreeMap<u64, (OnDisk, u64)>,
    asked: HashMap<AnswerId, Asked>,
    next_id: u64,
    is_judged: bool,
    engaged_at: Option<u64>,
    durables: u64,
    // The guest.
    state: State,
    running: Running,
    committing: Option<Committed>,
    committed: BTreeMap<u32, Committed>,
    states: BTreeMap<u32, State>,
    next_sequence: u32,
    tail: u32,
    is_moving_tail: bool,
    is_closing: bool,
    stamps: u32,
    /// Of blocks written in place: the last stamp that has ended.
    ended_stamps: HashMap<u64, u32>,
    /// Of the same: what a flush has promised.
    in_place_floor: HashMap<u64, u32>,
    /// What had ended when the log was opened.
    unseen: Flushed,
    writes: BTreeMap<WriteId, GuestWrite>,
    /// What the guest has in memory of the block that is also written directly.
    direct_now: u32,
    direct_journaled: u32,
    direct_ended: Vec<(u64, u32)>,
    /// Of these: what a flush has covered, and what has to be there.
    direct_flushed: u32,
    /// Asked past a committed version of a process that died and had not written that down, as of a version that is at home: who follows cannot
    /// tell it from what is older than that version.
    direct_doubted: u32,
    direct_floor: u32,
    directs: BTreeSet<u32>,
    /// Of each block the newest committed version that the guest's log has, and whether it is at home: the books that outlive a process.
    books: BTreeMap<u64, (u32, bool)>,
    /// Versions by block and transaction over which a write of the guest went that was not seen to carry them: the host leaves them alone.
    overwritten: BTreeSet<(u64, u32)>,
    /// Writes that may go, and wait for the host's to the same place.
    stalled: Vec<WriteId>,
    /// Of versions that are not at home: what is written down of writes past the journal, for who follows.
    past: BTreeMap<u64, (u32, Past)>,
    /// What is written past the journal and has ended.
    direct_home: u32,
    /// When a process died, the guest's log knew nothing of that block, and has not journaled it since.
    is_direct_forgotten: bool,
    died_at: u64,
    /// Storage is about to say that the log is empty, because its guest closes it: the books say so, too.
    says_closing: bool,
    pub deaths: u64,
    /// Home writes of several blocks, writes of the host, and home writes beside others to the same place.
    pub odd: [u64; 3],
    /// The last transaction that must not be lost.
    floor: u32,
    pub cuts: u64,
}

impl World {
    pub fn new(seed: u64, setting: Setting) -> Self {
        let features = Features {
            compat: 0,
            incompat: Features::REVOKE | if setting.wide { Features::WIDE } else { 0 },
            ro_compat: 0,
        };
        let superblock = SuperblockBuilder {
            block_size: BLOCK as u32,
            maxlen: setting.log_blocks,
            sequence: FIRST,
            features,
            ..SuperblockBuilder::default()
        }
        .checksum(setting.checksum)
        .build();
        let (_, format) = Superblock::parse(&superblock).unwrap();
        let mut disk = Disk::new(JOURNAL + setting.log_blocks as usize * BLOCK);
        let state = State::new();
        for block in [COUNTER, BITMAP, TABLE, DIRECT] {
            let at = block as usize * BLOCK;
            disk.durable[at..at + BLOCK].copy_from_slice(&state.content(block, FIRST - 1));
        }
        disk.durable[JOURNAL..JOURNAL + superblock.len().min(BLOCK)].copy_from_slice(&superblock[..BLOCK]);
        let states = BTreeMap::from([(FIRST - 1, state.clone())]);
        let durable_bitmap = Some(state.bitmap());
        World {
            setting,
            random: Random::of(seed, 1),
            random_of_deaths: Random::of(seed, 14),
            random_of_hosts: Random::of(seed, 18),
            now: 0,
            disk,
            machine: None,
            format,
            versions: HashMap::new(),
            contents: HashMap::new(),
            version_of: HashMap::new(),
            read: HashSet::new(),
            unsent: [0; 2],
            next_version: 0,
            versions_of: BTreeMap::new(),
            superblock: superblock[..BLOCK].to_vec(),
            durable_bitmap,
            durable: HashMap::new(),
            on_disk: BTreeMap::new(),
            asked: HashMap::new(),
            next_id: 0,
            is_judged: !setting.engages,
            engaged_at: None,
            durables: 0,
            state,
            running: Running::default(),
            committing: None,
            committed: BTreeMap::new(),
            states,
            next_sequence: FIRST,
            tail: FIRST,
            is_moving_tail: false,
            is_closing: false,
            stamps: 0,
            ended_stamps: HashMap::new(),
            in_place_floor: HashMap::new(),
            unseen: Flushed::default(),
            writes: BTreeMap::new(),
            direct_now: 0,
            direct_journaled: FIRST - 1,
            direct_ended: Vec::new(),
            direct_flushed: 0,
            direct_doubted: 0,
            direct_floor: 0,
            directs: BTreeSet::new(),
            books: BTreeMap::new(),
            overwritten: BTreeSet::new(),
            stalled: Vec::new(),
            past: BTreeMap::new(),
            direct_home: 0,
            is_direct_forgotten: false,
            died_at: 0,
            says_closing: false,
            deaths: 0,
            odd: [0; 3],
            floor: FIRST - 1,
            cuts: 0,
        }
    }

    pub fn durable_transactions(&self) -> u64 {
        self.durables
    }

    fn time(&self) -> Duration {
        Duration::from_millis(self.now)
    }

    fn bounded(&self, machine: Durability) -> Durability {
        let (blocks, revoked) = self.setting.at_once;
        let machine = machine.with_at_once(blocks, revoked);
        if self.setting.is_steady { machine.with_steady_contents() } else { machine }
    }

    fn id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    /// Calls the machine and carries its steps out.
    fn with_machine<T>(
        &mut self,
        call: impl FnOnce(&mut Durability, Duration, &mut dyn View, &mut Vec<Step>) -> T,
    ) -> Result<T, String> {
        let mut steps = Vec::new();
        let mut machine = self.machine.take().expect("a log is open");
        let mut view = Shown {
            bitmap: &mut self.durable_bitmap,
            durable: &mut self.durable,
            versions: &mut self.versions,
            contents: &self.contents,
            version_of: &self.version_of,
            books: &self.books,
            past: &self.past,
            read: &mut self.read,
            through: None,
            disk: &self.disk,
            now: self.now,
        };
        let result = call(&mut machine, Duration::from_millis(self.now), &mut view, &mut steps);
        if let Some(through) = view.through {
            self.durables += 1;
            self.floor = self.floor.max(through);
        }
        self.is_judged |= machine.is_proven();
        self.machine = Some(machine);
        for step in steps {
            self.carry_out(step)?;
        }
        Ok(result)
    }

    fn carry_out(&mut self, step: Step) -> Result<(), String> {
        match step {
            Step::Write { operation, place, bytes } => {
                let offset = match place {
                    Place::Home(block) => block as usize * BLOCK,
                    Place::Log(position) => JOURNAL + position as usize * BLOCK,
                    Place::Superblock => JOURNAL,
                };
                self.says_closing |= place == Place::Superblock && Superblock::decode(&bytes).unwrap().is_empty();
                let told = crate::guest::told(&bytes);
                if place == Place::Home(DIRECT) && self.is_direct_forgotten && told.0 < self.direct_home {
                    return Err(format!("{} is written over what the guest wrote past its log", told.0));
                }
                if let Place::Log(position) = place {
                    let end = position + (bytes.len() / BLOCK) as u32;
                    assert!(position >= self.format.first && end <= self.format.last, "a write past the log");
                }
                let number = self.disk.write(offset, bytes);
                self.send(number, OnDisk::Machine(operation));
            }
            Step::Flush { operation } => {
                let number = self.disk.flush();
                self.send(number, OnDisk::Machine(operation));
            }
            Step::Go(id) => {
                let at_home = self.machine.as_ref().and_then(|machine| machine.settled_but_for(id));
                let write = self.writes.get(&id).expect("a write that is under way").clone();
                if at_home.is_some_and(|versions| self.is_home(&write, &versions)) {
                    self.unsent[1] += 1;
                    self.note_carried(id);
                    self.with_machine(|machine, now, view, steps| machine.write_unneeded(now, id, view, steps))?;
                    self.guest_write_ended(id, None);
                } else {
                    self.go(id);
                }
            }
            Step::Answer { answer, is_good } => self.answered(answer, is_good)?,
            Step::Failed(why) => return Err(format!("the machine gave up: {why}")),
        }
        Ok(())
    }

    fn send(&mut self, number: u64, what: OnDisk) {
        let due = self.now + 1 + self.random.below(LATENCY_MAX);
        self.on_disk.insert(number, (what, due));
    }

    /// A write of the guest, or of the host, reaches the disk, unless one of the host's is on its way there.
    fn go(&mut self, id: WriteId) {
        let write = self.writes.get(&id).expect("a write that is under way").clone();
        let is_in_the_way = |other: &GuestWrite| other.is_hosts() && other.overlaps(&write.blocks);
        if !write.is_hosts() && self.writes.values().any(is_in_the_way) {
            self.stalled.push(id);
            return;
        }
        let len = (write.blocks.end - write.blocks.start) as usize * BLOCK;
        self.writes.entry(id).and_modify(|write| write.is_sent = true);
        for block in write.blocks.clone() {
            match (&write.what, self.books.get_mut(&block)) {
                (What::Discard, Some(_)) if write.kind == Kind::Discard => _ = self.books.remove(&block),
                // About to be written over: held again.
                (_, Some((_, is_home))) => *is_home = false,
                _ => {}
            }
        }
        let over = match &self.machine {
            Some(_) => self.goes_over(id),
            None => write.blocks.clone().collect(),
        };
        self.note_carried(id);
        // One that came before a version, and has the same to say, is no reason to forget that before it is durable.
        let durable = self.machine.as_ref().map(Durability::durable);
        let is_seen = |block: &u64, transaction: &mut u32| {
            over.contains(block) || durable.is_none_or(|durable| *transaction <= durable)
        };
        self.writes.entry(id).and_modify(|write| write.carries.retain(is_seen));
        let GuestWrite { carries, is_tainted, .. } = self.writes[&id].clone();
        for block in write.blocks.clone() {
            let Some((newest, _)) = self.books.get(&block) else { continue };
            let was = self.past.remove(&block).is_some_and(|(sequence, _)| sequence == *newest);
            let is_carried = carries.contains_key(&block);
            if !is_carried && (was || over.contains(&block)) {
                self.past.insert(block, (*newest, Past::Begun));
            }
            if !is_carried || is_tainted {
                self.overwritten.insert((block, *newest));
            } else {
                self.overwritten.remove(&(block, *newest));
            }
        }
        if let Some(machine) = &mut self.machine {
            machine.write_carries(id, carries.into_keys());
        }
        let bytes = write.bytes.unwrap_or_else(|| Arc::from(vec![0; len]));
        let number = self.disk.write(write.blocks.start as usize * BLOCK, bytes);
        self.send(number, OnDisk::Guest(id));
    }

    fn goes_over(&mut self, id: WriteId) -> Vec<u64> {
        self.with_machine(|machine, _, view, _| machine.goes_over(id, view)).expect("no steps")
    }

    /// The books see which versions a home write carries, when it sets out or needs not to.
    fn note_carried(&mut self, id: WriteId) {
        let write = &self.writes[&id];
        if let (What::Home(_) | What::Host(_), Some(bytes)) = (&write.what, &write.bytes) {
            let newest = |block: u64| self.books.get(&block).map(|(sequence, _)| (block, *sequence));
            let is_carried = |(block, sequence): &(u64, u32)| {
                let at = (*block - write.blocks.start) as usize * BLOCK;
                self.content(*block, *sequence) == bytes[at..at + BLOCK]
            };
            let carries = write.blocks.clone().filter_map(newest).filter(is_carried).collect();
            self.writes.entry(id).and_modify(|write| write.carries = carries);
        }
    }

    /// Whether a write carries just these versions. Whoever says so has to be right: storage must have them.
    fn is_home(&self, write: &GuestWrite, versions: &[Version]) -> bool {
        let content: Vec<u8> = versions.iter().flat_map(|version| self.contents[version].iter().copied()).collect();
        let mut now = vec![0; content.len()];
        self.disk.read(write.blocks.start as usize * BLOCK, &mut now);
        assert!(now == content, "blocks {:?} are not as they were said to be", write.blocks);
        matches!(write.what, What::Home(..)) && write.bytes.as_deref() == Some(content.as_slice())
    }

    fn guest_write(&mut self, write: GuestWrite) -> Result<(), String> {
        let id = WriteId(self.id());
        let (blocks, kind) = (write.blocks.clone(), write.kind);
        let at_home: Option<Vec<Version>> = self
            .machine
            .as_ref()
            .filter(|_| kind == Kind::Write)
            .and_then(|machine| blocks.clone().map(|block| machine.settled(block)).collect());
        let is_home = at_home.is_some_and(|versions| self.is_home(&write, &versions));
        let mut write = write;
        let when = WhenAsked { first: None, is_repeated: write.is_repeated };
        for other in self.writes.values_mut().filter(|other| !other.is_hosts() && other.overlaps(&blocks)) {
            (write.is_tainted, other.is_tainted) = (true, true);
            self.odd[2] += 1;
        }
        self.writes.insert(id, write);
        if is_home {
            self.unsent[0] += 1;
            self.note_carried(id);
            self.guest_write_ended(id, None);
            return Ok(());
        }
        if self.machine.is_none()
            || self.with_machine(|machine, now, view, steps| {
                machine.write_begins(now, id, kind, blocks.clone(), blocks, when, view, steps)
            })?
        {
            self.go(id);
        } else {
            for block in self.goes_over(id) {
                let Some((newest, _)) = self.books.get(&block) else { continue };
                if self.past.get(&block).is_none_or(|(sequence, _)| sequence != newest) {
                    self.past.insert(block, (*newest, Past::Begun));
                }
            }
        }
        Ok(())
    }

    /// The host writes home what is committed, for memory's sake: not beside a write of the guest's that is with the disk, and not over
    /// what the guest may have written past its journal.
    fn host_writes(&mut self) -> Result<(), String> {
        let Some(machine) = &self.machine else { return Ok(()) };
        let under_way = machine.closed_to_host();
        let owed: Vec<(u64, u32)> = self
            .books
            .iter()
            .filter(|(block, (sequence, is_home))| {
                let is_on_its_way =
                    |write: &GuestWrite| write.blocks.contains(block) && (write.is_sent || write.is_hosts());
                !is_home
                    && !under_way.touches(&(**block..**block + 1))
                    && !self.overwritten.contains(&(**block, *sequence))
                    && self.past.get(block).is_none_or(|(past, _)| past != sequence)
                    && !self.writes.values().any(is_on_its_way)
            })
            .map(|(block, (sequence, _))| (*block, *sequence))
            .collect();
        let which = self.random_of_hosts.below(owed.len() as u64) as usize;
        let Some((block, sequence)) = owed.get(which).copied() else { return Ok(()) };
        let (id, blocks) = (WriteId(self.id()), block..block + 1);
        let bytes = Some(Arc::from(self.content(block, sequence)));
        self.writes.insert(id, GuestWrite::new(blocks.clone(), Kind::Write, bytes, What::Host(sequence)));
        self.odd[1] += 1;
        let may_go = self.with_machine(|machine, now, view, steps| {
            machine.write_begins(now, id, Kind::Write, blocks.clone(), blocks, WhenAsked::default(), view, steps)
        })?;
        if may_go {
            self.go(id);
        }
        Ok(())
    }

    /// What waited for a write of the host's goes on.
    fn let_stalled_go(&mut self) {
        for id in std::mem::take(&mut self.stalled) {
            self.go(id);
        }
    }

    fn is_busy(&self, block: u64) -> bool {
        self.writes.values().any(|write| write.blocks.contains(&block) && !write.is_hosts())
    }

    /// The guest is told that its write is done; `number` is that of the disk, if it got there.
    fn guest_write_ended(&mut self, id: WriteId, number: Option<u64>) {
        let write = self.writes.remove(&id).unwrap();
        for block in write.blocks.clone() {
            if let (Some((newest, false)), Some((sequence, past))) = (self.books.get(&block), self.past.get_mut(&block))
                && sequence == newest
                && !write.is_hosts()
                && !write.carries.contains_key(&block)
            {
                *past = Past::Written;
            }
        }
        match write.what {
            // It knows no more than before, and writes them home again.
            What::Home(_) if write.is_tainted => {}
            What::Home(blocks) => {
                for (block, sequence) in blocks {
                    if let Some((newest, is_home)) = self.books.get_mut(&block) {
                        *is_home |= write.carries.get(&block) == Some(newest);
                    }
                    if let Some(committed) = self.committed.get_mut(&sequence) {
                        committed.owed.remove(&block);
                    }
                }
            }
            What::Host(sequence) => {
                if let Some((newest, is_home)) = self.books.get_mut(&write.blocks.start) {
                    *is_home |= *newest == sequence;
                }
                self.let_stalled_go();
            }
            What::InPlace(block, stamp) => {
                self.running.ordered.remove(&block);
                self.ended_stamps.insert(block, stamp);
            }
            What::Direct(stamp) => {
                self.direct_home = stamp;
                self.direct_ended.push((number.expect("it is always sent"), stamp));
            }
            What::Discard => {}
        }
    }

    fn operation_ended(&mut self, number: u64) -> Result<(), String> {
        let (what, _) = self.on_disk.remove(&number).unwrap();
        let covers = match self.disk.in_flight.get(&number) {
            Some(crate::disk::Operation::Flush { covers }) => covers.clone(),
            _ => BTreeSet::new(),
        };
        if self.disk.end(number) {
            let is_covered = |(by, _): &(u64, u32)| covers.contains(by);
            let floor = self.direct_ended.iter().filter(|ended| is_covered(ended)).map(|(_, stamp)| *stamp).max();
            self.direct_flushed = self.direct_flushed.max(floor.unwrap_or(0));
            self.direct_ended.retain(|ended| !is_covered(ended));
            self.keep_direct();
        }
        match what {
            OnDisk::Machine(operation) => self.with_machine(|machine, now, view, steps| {
                machine.operation_done(now, operation, true, view, steps);
            }),
            OnDisk::Guest(id) => {
                self.guest_write_ended(id, Some(number));
                if self.machine.is_some() {
                    self.with_machine(|machine, now, view, steps| machine.write_ended(now, id, true, view, steps))?;
                }
                Ok(())
            }
        }
    }

    fn answered(&mut self, answer: AnswerId, is_good: bool) -> Result<(), String> {
        if !is_good {
            return Err("there is no durability".to_owned());
        }
        match self.asked.remove(&answer).expect("answered once") {
            Asked::Commit => self.commit_told(),
            Asked::Tail(tail) => {
                self.tail = tail;
                self.is_moving_tail = false;
                self.books.retain(|_, (sequence, _)| *sequence >= tail);
                let later = self.versions_of.split_off(&tail);
                for version in std::mem::replace(&mut self.versions_of, later).into_values().flatten() {
                    self.versions.remove(&version);
                }
                self.keep_direct();
            }
            // With an age a flush promises that age, and no more.
            Asked::Flush(written) if self.setting.within == 0 => {
                self.direct_flushed = self.direct_flushed.max(written.direct);
                self.keep_direct();
                for (block, stamp) in written.in_place {
                    let floor = self.in_place_floor.entry(block).or_default();
                    *floor = stamp.max(*floor);
                }
            }
            Asked::Flush(_) => {}
            Asked::Now(through) => self.floor = self.floor.max(through),
            Asked::Close => {
                self.is_closing = false;
                self.machine = None;
                self.books.clear();
                self.floor = self.next_sequence - 1;
                self.tail = self.next_sequence;
                self.keep_direct();
            }
        }
        Ok(())
    }

    /// What was written directly and flushed stays, once the guest's own log has no copy that is older: until then a replay brings that.
    fn keep_direct(&mut self) {
        if self.direct_journaled < self.tail && self.direct_flushed > self.direct_doubted {
            self.direct_floor = self.direct_floor.max(self.direct_flushed);
        }
    }

    fn commit_told(&mut self) {
        let mut committed = self.committing.take().unwrap();
        committed.told_at = Some(self.now);
        for older in self.committed.values_mut() {
            older.owed.retain(|block| !committed.journaled.contains(block) && !committed.freed.contains(block));
        }
        if self.setting.within == 0 && self.is_judged || !self.setting.tells_frees && self.machine.is_some() {
            self.floor = self.floor.max(committed.sequence);
        }
        self.committed.insert(committed.sequence, committed);
    }

    // What the guest does.

    pub fn step(&mut self) -> Result<(), String> {
        self.now += 1;
        let due: Vec<u64> =
            self.on_disk.iter().filter(|(_, (_, due))| *due <= self.now).map(|(number, _)| *number).collect();
        for number in due {
            self.operation_ended(number)?;
        }
        if self.random.below(3) == 0 && !self.on_disk.is_empty() {
            let which = self.random.below(self.on_disk.len() as u64) as usize;
            let number = *self.on_disk.keys().nth(which).unwrap();
            self.operation_ended(number)?;
        }
        if self.machine.as_ref().is_some_and(|machine| machine.deadline().is_some_and(|at| at <= self.time())) {
            self.with_machine(|machine, now, view, steps| machine.timer(now, view, steps))?;
        }
        if self.random_of_deaths.below(1000) < self.setting.deaths {
            self.die()?;
        }
        if !self.is_closing {
            self.act()?;
        }
        for _ in 0..2 {
            self.cut()?;
        }
        Ok(())
    }

    fn act(&mut self) -> Result<(), String> {
        if self.setting.engages && self.setting.at_rest && self.now > REST {
            // Nothing comes until durability has begun.
            self.checkpoint()?;
            let is_at_rest = self.committing.is_none() && self.committed.values().all(|older| older.owed.is_empty());
            return if is_at_rest && self.random.below(4) == 0 { self.engage() } else { Ok(()) };
        }
        let chance = self.random.below(if self.setting.is_quiet { 65 } else { 100 });
        if self.random.below(100) < self.setting.checkpoints {
            self.checkpoint()?;
        }
        if self.random.below(100) < self.setting.tails {
            self.move_tail()?;
        }
        if self.random_of_hosts.below(100) < self.setting.hosts {
            self.host_writes()?;
        }
        match chance {
            0..45 => self.modify()?,
            45..65 => self.commit()?,
            65..70 => self.overwrite_in_place()?,
            70..73 => self.discard()?,
            73..75 => self.write_directly()?,
            75..78 if self.machine.is_some() => {
                let answer = self.ask(Asked::Flush(self.written_beside_machine()));
                self.with_machine(|machine, now, view, steps| machine.flush_asked(now, answer, view, steps))?;
            }
            78 if self.machine.is_some() => {
                let last = self.committed.keys().next_back().copied().unwrap_or(0);
                let answer = self.ask(Asked::Now(last));
                self.with_machine(|machine, now, view, steps| machine.flush_now(now, answer, view, steps))?;
            }
            79 if self.random.below(6) == 0 => self.close()?,
            80 if self.random.below(3) == 0 && self.machine.is_some() => {
                let within = Duration::from_millis(self.random.below(self.setting.within + 1));
                let within = if self.setting.within == 0 { Duration::ZERO } else { within };
                self.with_machine(|machine, now, view, steps| machine.set_within(now, within, view, steps))?;
            }
            81..90 if self.setting.engages && !self.setting.at_rest => self.engage()?,
            _ => {}
        }
        Ok(())
    }

    fn ask(&mut self, what: Asked) -> AnswerId {
        let answer = AnswerId(self.id());
        self.asked.insert(answer, what);
        answer
    }

    /// What came before a machine was there is not its matter.
    fn written_beside_machine(&self) -> Flushed {
        let direct = self.direct_ended.iter().map(|(_, stamp)| *stamp).filter(|stamp| *stamp > self.unseen.direct);
        let mut in_place = self.ended_stamps.clone();
        in_place.retain(|block, stamp| self.unseen.in_place.get(block) != Some(stamp));
        Flushed { direct: direct.max().unwrap_or(0), in_place }
    }

    fn stamp(&mut self) -> u32 {
        self.stamps += 1;
        self.stamps
    }

    fn pick(&mut self, wanted: impl Fn(&Self, u64, Use) -> bool) -> Option<u64> {
        let found: Vec<u64> = (0..DATA_BLOCKS)
            .filter(|index| wanted(self, DATA + index, self.state.uses[*index as usize]))
            .map(|index| DATA + index)
            .collect();
        let which = self.random.below(found.len() as u64) as usize;
        found.get(which).copied()
    }

    fn set_use(&mut self, block: u64, what: Use) {
        self.state.uses[(block - DATA) as usize] = what;
    }

    /// Changes something in the running transaction.
    fn modify(&mut self) -> Result<(), String> {
        match self.random.below(10) {
            0..4 => {
                let is_there = |world: &Self, block: u64, what: Use| {
                    what == Use::Free
                        && !world.running.freed.contains(&block)
                        && !world.committing.as_ref().is_some_and(|committing| committing.freed.contains(&block))
                        && !world.is_busy(block)
                };
                // The first ones mostly, so that they are used again soon.
                let Some(block) = self.pick(is_there) else { return Ok(()) };
                let stamp = self.stamp();
                self.running.journaled.extend([BITMAP, TABLE]);
                if self.setting.in_place && self.random.below(2) == 0 {
                    let owner = stamp;
                    self.set_use(block, Use::InPlace(owner, stamp));
                    self.running.ordered.insert(block);
                    self.write_in_place(block, owner, stamp)?;
                } else {
                    self.set_use(block, Use::Journaled(stamp));
                    self.running.journaled.insert(block);
                    self.running.revokes.remove(&block);
                }
            }
            4..7 => {
                let Some(block) = self.pick(|_, _, what| matches!(what, Use::Journaled(_))) else { return Ok(()) };
                let stamp = self.stamp();
                self.set_use(block, Use::Journaled(stamp));
                self.running.journaled.extend([block, TABLE]);
            }
            7..9 => {
                let is_old = |world: &Self, block: u64, what: Use| match what {
                    Use::Free => false,
                    Use::Journaled(_) => true,
                    Use::InPlace(..) => !world.running.ordered.contains(&block) && !world.is_busy(block),
                };
                let Some(block) = self.pick(is_old) else { return Ok(()) };
                let was_journaled = matches!(self.state.uses[(block - DATA) as usize], Use::Journaled(_));
                self.running.journaled.remove(&block);
                if was_journaled && self.setting.in_place {
                    self.running.revokes.insert(block);
                }
                self.set_use(block, Use::Free);
                self.running.freed.insert(block);
                self.running.journaled.extend([BITMAP, TABLE]);
            }
            _ => {
                // It has more to say than what it is writing past its journal just now.
                if self.is_busy(DIRECT) && self.random_of_hosts.below(2) == 0 {
                    self.direct_now = self.stamp();
                }
                self.running.journaled.insert(DIRECT);
            }
        }
        Ok(())
    }

    fn write_in_place(&mut self, block: u64, owner: u32, stamp: u32) -> Result<(), String> {
        let bytes = Some(Arc::from(pattern(block, stamp, owner)));
        self.guest_write(GuestWrite::new(block..block + 1, Kind::Write, bytes, What::InPlace(block, stamp)))
    }

    fn overwrite_in_place(&mut self) -> Result<(), String> {
        let is_idle = |world: &Self, block: u64, what: Use| matches!(what, Use::InPlace(..)) && !world.is_busy(block);
        let Some(block) = self.pick(is_idle) else { return Ok(()) };
        let Use::InPlace(owner, _) = self.state.uses[(block - DATA) as usize] else { return Ok(()) };
        let stamp = self.stamp();
        self.write_in_place(block, owner, stamp)
    }

    fn discard(&mut self) -> Result<(), String> {
        let is_free = |world: &Self, block: u64, what: Use| {
            what == Use::Free
                && !world.is_busy(block)
                && !world.running.freed.contains(&block)
                && !world.committing.as_ref().is_some_and(|committing| committing.freed.contains(&block))
        };
        let Some(block) = self.pick(is_free) else { return Ok(()) };
        let kind = if self.random.below(4) == 0 { Kind::Zeroes } else { Kind::Discard };
        self.guest_write(GuestWrite::new(block..block + 1, kind, None, What::Discard))
    }

    /// As ext4 writes its superblock, past the journal.
    fn write_directly(&mut self) -> Result<(), String> {
        let is_in = |set: &BTreeSet<u64>| set.contains(&DIRECT);
        if self.is_busy(DIRECT)
            || is_in(&self.running.journaled)
            || self.committing.as_ref().is_some_and(|committing| is_in(&committing.journaled))
        {
            return Ok(());
        }
        let stamp = self.stamp();
        self.direct_now = stamp;
        self.directs.insert(stamp);
        let bytes = Some(Arc::from(pattern(DIRECT, stamp, 0)));
        self.guest_write(GuestWrite::new(DIRECT..DIRECT + 1, Kind::Write, bytes, What::Direct(stamp)))
    }

    fn used(&self) -> u64 {
        let live = self.committed.range(self.tail..).map(|(_, committed)| u64::from(committed.length));
        live.sum::<u64>() + self.committing.as_ref().map_or(0, |committing| u64::from(committing.length))
    }

    fn commit(&mut self) -> Result<(), String> {
        if self.committing.is_some() || self.running.journaled.is_empty() || !self.running.ordered.is_empty() {
            return Ok(());
        }
        self.running.journaled.insert(COUNTER);
        let length = Compound::length(&self.format, self.running.journaled.len(), self.running.revokes.len());
        if self.used() + length >= u64::from(self.format.log_blocks()) {
            return self.move_tail();
        }
        let sequence = self.next_sequence;
        if self.machine.is_none() && !self.setting.engages {
            let mut raw = SuperblockBuilder {
                block_size: BLOCK as u32,
                maxlen: self.setting.log_blocks,
                sequence,
                start: 1,
                features: Features {
                    compat: 0,
                    incompat: Features::REVOKE | if self.setting.wide { Features::WIDE } else { 0 },
                    ro_compat: 0,
                },
                ..SuperblockBuilder::default()
            }
            .checksum(self.setting.checksum)
            .build();
            raw.truncate(BLOCK);
            let machine = Durability::opened(&raw, Duration::from_millis(self.setting.within))?;
            self.machine = Some(self.bounded(machine));
            self.unseen = Flushed { direct: self.stamps, in_place: self.ended_stamps.clone() };
        }
        self.next_sequence += 1;
        let running = std::mem::take(&mut self.running);
        let before = self.states[&(sequence - 1)].bitmap();
        for (index, what) in self.state.uses.iter_mut().enumerate() {
            if let Use::InPlace(_, at_least) = what {
                *at_least = self.ended_stamps[&(DATA + index as u64)];
            }
        }
        let after = self.state.bitmap();
        let freed: BTreeSet<u64> = (DATA..HOME_BLOCKS).filter(|b| is_set(&before, *b) && !is_set(&after, *b)).collect();
        if running.journaled.contains(&DIRECT) {
            self.direct_journaled = sequence;
            self.is_direct_forgotten = false;
            self.state.direct = self.direct_now;
        }
        let mut blocks = Vec::new();
        for block in &running.journaled {
            let version = Version(self.next_version);
            self.next_version += 1;
            let content = self.state.content(*block, sequence);
            self.contents.insert(version, content.clone());
            self.versions.insert(version, content);
            self.version_of.insert((*block, sequence), version);
            self.versions_of.entry(sequence).or_default().push(version);
            blocks.push((*block, version));
        }
        self.books.extend(running.journaled.iter().map(|block| (*block, (sequence, false))));
        running.revokes.iter().for_each(|block| _ = self.books.remove(block));
        self.states.insert(sequence, self.state.clone());
        let transaction = Transaction {
            sequence,
            blocks,
            revokes: running.revokes.iter().copied().collect(),
            freed: if self.setting.tells_frees {
                Freed::Blocks(freed.iter().map(|block| *block..block + 1).collect())
            } else {
                Freed::Unknown
            },
        };
        self.committing = Some(Committed {
            sequence,
            length: length as u32,
            owed: running.journaled.clone(),
            freed: running.freed,
            journaled: running.journaled,
            state: self.state.clone(),
            told_at: None,
        });
        if self.machine.is_some() {
            let answer = self.ask(Asked::Commit);
            self.with_machine(|machine, now, view, steps| machine.committed(now, &transaction, answer, view, steps))
        } else {
            self.commit_told();
            Ok(())
        }
    }

    /// Writes committed blocks home: one, and those after it that are owed, too.
    fn checkpoint(&mut self) -> Result<(), String> {
        let is_beside = self.random_of_hosts.below(100) < self.setting.overlaps;
        let is_in_the_way = |write: &GuestWrite, block: &u64| {
            // No more than two at a time: some time there is none.
            let may_be_beside = is_beside && matches!(write.what, What::Home(_)) && !write.is_tainted;
            write.blocks.contains(block) && !write.is_hosts() && !may_be_beside
        };
        let is_held = |block: &u64| {
            self.writes.values().any(|write| is_in_the_way(write, block))
                || self.running.journaled.contains(block)
                || self.committing.as_ref().is_some_and(|committing| committing.journaled.contains(block))
        };
        let owed: BTreeMap<u64, u32> = self
            .committed
            .values()
            .flat_map(|committed| committed.owed.iter().map(|block| (*block, committed.sequence)))
            .filter(|(block, _)| !is_held(block))
            .collect();
        let which = self.random.below(owed.len() as u64) as usize;
        let Some(first) = owed.keys().nth(which).copied() else { return Ok(()) };
        let most = 1 + self.random_of_hosts.below(self.setting.spread);
        let blocks = (first..first + most).map_while(|block| owed.get(&block).map(|sequence| (block, *sequence)));
        let blocks: Vec<(u64, u32)> = blocks.collect();
        self.odd[0] += u64::from(blocks.len() > 1);
        let mut content = Vec::new();
        for (block, sequence) in &blocks {
            let state = &self.committed[sequence].state;
            // What the buffer holds: past the journal it may have got newer.
            let is_direct = *block == DIRECT;
            content.extend(if is_direct {
                pattern(DIRECT, self.direct_now, 0)
            } else {
                state.content(*block, *sequence)
            });
        }
        let range = first..first + blocks.len() as u64;
        self.guest_write(GuestWrite::new(range, Kind::Write, Some(Arc::from(content)), What::Home(blocks)))
    }

    fn move_tail(&mut self) -> Result<(), String> {
        if self.is_moving_tail {
            return Ok(());
        }
        let first = self.committed.values().find(|committed| !committed.owed.is_empty());
        let tail = first.map_or_else(
            || self.committing.as_ref().map_or(self.next_sequence, |committing| committing.sequence),
            |committed| committed.sequence,
        );
        if tail <= self.tail {
            return Ok(());
        }
        if self.machine.is_none() {
            self.tail = tail;
            self.books.retain(|_, (sequence, _)| *sequence >= tail);
            self.keep_direct();
            return Ok(());
        }
        self.is_moving_tail = true;
        let answer = self.ask(Asked::Tail(tail));
        self.with_machine(|machine, now, view, steps| machine.tail_moves(now, tail, answer, view, steps))
    }

    /// An unmount: all is home, and the log is closed.
    fn close(&mut self) -> Result<(), String> {
        if self.machine.is_none()
            || self.committing.is_some()
            || !self.running.journaled.is_empty()
            || !self.running.ordered.is_empty()
            || self.committed.values().any(|committed| !committed.owed.is_empty())
            || !self.writes.is_empty()
            || self.is_moving_tail
        {
            return Ok(());
        }
        let mut raw = vec![0; SECTOR * 2];
        self.disk.read(JOURNAL, &mut raw);
        let Ok(mut edit) = jbd2::SuperblockEdit::new(&mut raw) else { return Err("no superblock".to_owned()) };
        edit.start(0).sequence(self.next_sequence).seal();
        self.is_closing = true;
        let answer = self.ask(Asked::Close);
        self.with_machine(|machine, now, view, steps| machine.closes(now, &raw, answer, view, steps))
    }

    /// Durability begins under a running guest.
    fn engage(&mut self) -> Result<(), String> {
        if self.machine.is_some() || !self.writes.is_empty() || self.committed.is_empty() {
            return Ok(());
        }
        let mut newest = BTreeMap::new();
        for committed in self.committed.values() {
            for block in &committed.owed {
                newest.insert(*block, committed.sequence);
            }
        }
        let past = self.known_past();
        let mut owed = BTreeMap::new();
        for (block, sequence) in newest {
            let version = Version(self.next_version);
            self.next_version += 1;
            let content = self.committed[&sequence].state.content(block, sequence);
            self.contents.insert(version, content.clone());
            self.versions.insert(version, content);
            self.version_of.insert((block, sequence), version);
            let none = Transaction { sequence, blocks: vec![], revokes: vec![], freed: Freed::Blocks(vec![]) };
            owed.entry(sequence).or_insert(none).blocks.push((block, version));
        }
        let last = *self.committed.keys().next_back().unwrap();
        // Journaled and owed, or at home: the bitmap is that of the last transaction.
        self.durable_bitmap = Some(self.states[&last].bitmap());
        self.durable.clear();
        let owed: Vec<Transaction> = owed.into_values().collect();
        let mut raw = vec![0; BLOCK];
        self.disk.read(JOURNAL, &mut raw);
        let within = Duration::from_millis(self.setting.within);
        let machine = Durability::engaged(&raw, within, (&owed, self.tail, last), &past, self.time())?;
        let machine = self.bounded(machine);
        let machine = if self.setting.begins_in_parts { machine.begins_in_parts() } else { machine };
        let compounds = machine.begins_before().wrapping_sub(machine.next_number());
        self.machine = Some(machine);
        self.setting.engages = false;
        // Each of them takes its time.
        self.engaged_at = Some(self.now + u64::from(compounds - 1) * WRITE_OUT);
        // A transaction that is on its way to be told was held already.
        self.with_machine(|machine, now, view, steps| machine.timer(now, view, steps))
    }

    /// What is written down of writes past the journal, of what is newest and not at home.
    fn known_past(&self) -> BTreeMap<u64, Past> {
        let newest = |block: &u64| self.books.get(block).filter(|(_, is_home)| !is_home).map(|(sequence, _)| *sequence);
        let known = self.past.iter().filter(|(block, (sequence, _))| newest(block) == Some(*sequence));
        known.map(|(block, (_, past))| (*block, *past)).collect()
    }

    fn content(&self, block: u64, sequence: u32) -> Vec<u8> {
        self.states[&sequence].content(block, sequence)
    }

    /// The process that has the machine dies, and another one goes on with what it finds. The guest asks again for all that it was not
    /// answered.
    fn die(&mut self) -> Result<(), String> {
        if !self.machine.as_ref().is_some_and(Durability::is_proven) {
            return Ok(());
        }
        let mut superblock = vec![0; BLOCK];
        self.disk.read(JOURNAL, &mut superblock);
        if Superblock::decode(&superblock).unwrap().is_empty() && !self.says_closing {
            // Not opened on storage yet.
            return Ok(());
        }
        for (number, _) in std::mem::take(&mut self.on_disk) {
            self.disk.orphan(number, &mut self.random_of_deaths);
        }
        let mut image = vec![0; self.disk.durable.len()];
        self.disk.read(0, &mut image);
        self.deaths += 1;
        self.died_at = self.now;
        let Some((mut found, contents)) = judge::found(&image) else { return self.find_closed() };
        self.says_closing = false;
        self.is_direct_forgotten = !self.books.contains_key(&DIRECT);
        let newest = self.books.get(&DIRECT).map(|(sequence, _)| *sequence);
        if self.past.get(&DIRECT).is_some_and(|(sequence, past)| Some(*sequence) == newest && *past == Past::Begun) {
            // What the one on its way goes over may be there, or be torn: where there is no room, the copy goes home.
            self.direct_doubted = self.direct_doubted.max(self.direct_home);
        }
        let last = self.committing.as_ref().map(|committing| committing.sequence);
        let last = last.or(self.committed.keys().next_back().copied()).unwrap_or(self.tail - 1);
        for (copy, content) in found.copies.iter_mut().zip(contents) {
            copy.said = match self.books.get(&copy.block) {
                // It is never freed.
                None if copy.block == DIRECT => FoundSaid::AtHome(self.tail - 1),
                None => FoundSaid::Nothing,
                Some((sequence, true)) => FoundSaid::AtHome(*sequence),
                Some((sequence, false)) if self.content(copy.block, *sequence) == content => FoundSaid::Same(*sequence),
                Some(_) => FoundSaid::Newer,
            };
        }
        self.versions.clear();
        self.versions_of.clear();
        let mut owed = BTreeMap::new();
        let books: Vec<(u64, u32)> = self
            .books
            .iter()
            .filter(|(_, (_, is_home))| !is_home)
            .map(|(block, (sequence, _))| (*block, *sequence))
            .collect();
        for (block, sequence) in books {
            let version = Version(self.next_version);
            self.next_version += 1;
            self.contents.insert(version, self.content(block, sequence));
            self.versions.insert(version, self.content(block, sequence));
            self.version_of.insert((block, sequence), version);
            self.versions_of.entry(sequence).or_default().push(version);
            let none = Transaction { sequence, blocks: vec![], revokes: vec![], freed: Freed::Blocks(vec![]) };
            owed.entry(sequence).or_insert(none).blocks.push((block, version));
        }
        self.durable_bitmap = Some(self.states[&last.max(FIRST - 1)].bitmap());
        self.durable.clear();
        let owed: Vec<Transaction> = owed.into_values().collect();
        let within = Duration::from_millis(self.setting.within);
        let (past, owed) = (self.known_past(), (&owed[..], self.tail, last));
        let machine = Durability::followed(&superblock, within, &found, owed, &past, self.time())?;
        let machine = self.bounded(machine);
        self.machine = Some(machine);
        // In the guest's order, or any other. What the host wrote is not asked for again.
        let mut writes = self.take_writes();
        if newest.is_some() && !self.known_past().contains_key(&DIRECT) {
            let directs = writes.iter().filter_map(|write| match write.what {
                What::Direct(stamp) => Some(stamp),
                _ => None,
            });
            self.direct_doubted = directs.fold(self.direct_doubted, u32::max);
        }
        for asked in self.take_asked() {
            let answer = self.ask(asked.clone());
            match asked {
                Asked::Commit if self.setting.within > 0 && self.setting.tells_frees => {
                    self.asked.remove(&answer);
                    self.commit_told();
                }
                Asked::Commit => {
                    self.with_machine(|machine, now, view, steps| machine.flush_now(now, answer, view, steps))?
                }
                Asked::Now(_) => {
                    self.with_machine(|machine, now, view, steps| machine.flush_now(now, answer, view, steps))?
                }
                Asked::Tail(tail) => {
                    self.with_machine(|machine, now, view, steps| machine.tail_moves(now, tail, answer, view, steps))?
                }
                Asked::Flush(_) => {
                    self.with_machine(|machine, now, view, steps| machine.flush_asked(now, answer, view, steps))?
                }
                Asked::Close => {
                    let mut raw = superblock.clone();
                    let mut edit = jbd2::SuperblockEdit::new(&mut raw).map_err(|error| error.to_string())?;
                    edit.start(0).sequence(self.next_sequence).seal();
                    self.with_machine(|machine, now, view, steps| machine.closes(now, &raw, answer, view, steps))?;
                }
            }
        }
        while !writes.is_empty() {
            let which = self.random_of_deaths.below(writes.len() as u64) as usize;
            self.guest_write(writes.remove(which))?;
        }
        self.with_machine(|machine, now, view, steps| machine.timer(now, view, steps))
    }

    /// The guest's writes, in its order, none of which has ended.
    fn take_writes(&mut self) -> Vec<GuestWrite> {
        self.stalled.clear();
        let writes = std::mem::take(&mut self.writes).into_values().filter(|write| !write.is_hosts());
        writes
            .map(|write| GuestWrite { is_sent: false, is_repeated: true, carries: BTreeMap::new(), ..write })
            .collect()
    }

    /// All that was asked and not answered, in its order.
    fn take_asked(&mut self) -> Vec<Asked> {
        let mut asked: Vec<(AnswerId, Asked)> = std::mem::take(&mut self.asked).into_iter().collect();
        asked.sort_unstable_by_key(|(answer, _)| *answer);
        asked.into_iter().map(|(_, asked)| asked).collect()
    }

    /// Storage says that the log is empty, and its guest was not told: it closes it once more, and whoever goes on has made sure of
    /// what storage says.
    fn find_closed(&mut self) -> Result<(), String> {
        if !self.says_closing || !self.is_closing {
            return Err("storage says that the log is empty, and nobody closes it".to_owned());
        }
        let number = self.disk.flush();
        self.disk.end(number);
        self.machine = None;
        let writes = self.take_writes();
        for asked in self.take_asked() {
            let answer = self.ask(asked);
            self.answered(answer, true)?;
        }
        writes.into_iter().try_for_each(|write| self.guest_write(write))
    }

    /// The power goes.
    fn cut(&mut self) -> Result<(), String> {
        self.cuts += 1;
        if !self.is_judged && self.engaged_at.is_some_and(|at| self.now > at + WRITE_OUT) {
            return Err("durability was wished, and has not begun".to_owned());
        }
        let mut image = self.disk.cut(&mut self.random);
        // Until durability has begun, storage says that it is no truth.
        if !self.is_judged && image[JOURNAL..JOURNAL + BLOCK] == self.superblock {
            return Ok(());
        }
        judge::replay(&mut image)?;
        let sequence = judge::state_of(&image)?;
        let state = self.states.get(&sequence).ok_or_else(|| format!("transaction {sequence} never was"))?;
        let due = |at: u64| (at + self.setting.within).max(self.died_at) + WRITE_OUT;
        let told = self.committed.values().filter(|committed| committed.told_at.is_some_and(|at| self.now > due(at)));
        let promised = told.map(|committed| committed.sequence).max().unwrap_or(0).max(self.floor);
        if sequence < promised && self.machine.is_some() {
            return Err(format!("transaction {sequence} is the last, and {promised} was promised"));
        }
        let directs = &self.directs;
        let written_directly = |stamp: u32| directs.contains(&stamp) && stamp > state.direct;
        judge::compare(&image, state, sequence, &written_directly)?;
        for (block, floor) in &self.in_place_floor {
            let is_older = |part: &[u8]| crate::guest::told(part).0 < *floor;
            let is_in_place = matches!(state.uses[(block - DATA) as usize], Use::InPlace(..));
            if is_in_place && judge::block(&image, *block).chunks(SECTOR).any(is_older) {
                return Err(format!("block {block} is older than {floor}, which a flush has promised"));
            }
        }
        let direct = crate::guest::told(judge::block(&image, DIRECT)).0;
        if direct < self.direct_floor {
            return Err(format!("what was written directly came back as {direct}, older than {}", self.direct_floor));
        }
        Ok(())
    }
}
