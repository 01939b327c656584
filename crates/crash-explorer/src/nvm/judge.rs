//! What must hold of a region and a disk at any moment at which the power may fail.
//!
//! Beside the run there is an ideal disk: one with a cache of its own that takes every request of the guest as it is, log
//! and all. What jbd2 would make of that disk and its complete journal is what recovery has to make of ours and the
//! region, block by block, whatever subset of unflushed writes either has lost. Left out is what is in blocks that are
//! free in the committed block bitmap, and what the guest discarded: nobody may depend on that.

use super::history::{Content, History, id_of};
use crate::error::During;
use crate::recording::{Issue, Kind, Recording};
use crate::simulation::Watcher;
use block_route::{DiskOperation, Operation};
use extfs::{Allocation, ReadAt};
use guest_tools::random::Random;
use jbd2::{LogRead, Plan, Superblock};
use nvm_journal::Found;
use placement::{KeptLog, NvmCondition};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::convert::Infallible;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

/// A write of the journal's superblock.
#[derive(Clone, Debug)]
struct SuperblockWrite {
    block: Arc<[u8]>,
    request: u32,
    is_done: bool,
}

/// What a replay leaves at home, by block.
type Replayed = Arc<BTreeMap<u64, Content>>;

/// See the module.
pub struct Judge {
    log: Arc<KeptLog>,
    block_bytes: u64,
    /// The disk as it was before the guest sent anything.
    base: File,
    /// The disk as it is.
    image: File,
    guest: History,
    ours: History,
    log_blocks: HashMap<u32, Arc<[u8]>>,
    log_version: u64,
    /// The last one that is done, and those after it.
    superblocks: Vec<SuperblockWrite>,
    /// Commit blocks that the guest waits for: request and sequence number.
    commits: HashMap<u32, u32>,
    /// The last one that it was told is committed.
    committed: Option<u32>,
    /// A loss of power may cost that one; …
    is_pipelined: bool,
    /// … then what its log had without it, and what it had written when it was told.
    before_last: Replayed,
    guest_then: History,
    /// How often one was met that might be lost.
    pub prepared: u64,
    /// The log leaves the region, or has left it.
    is_leaving: bool,
    /// Then a commit counts when it was flushed: the last that is in the log, and by flush request.
    unflushed: Option<u32>,
    flushing: HashMap<u32, Option<u32>>,
    discarded: HashSet<u64>,
    replays: HashMap<(u64, u32, u32), Replayed>,
}

/// What becomes of the last transaction in the region.
#[derive(Clone, Copy)]
enum Last<'a> {
    /// It counts, these blocks being at home.
    Counts(&'a BTreeSet<u64>),
    /// It does not, though the guest may have been told of it.
    IsLost(u32),
}

/// One reading of the guest's journal: what it would leave at home.
struct Reading {
    replayed: Replayed,
}

impl Judge {
    /// Nothing has happened yet.
    pub fn new(log: Arc<KeptLog>, base: File, image: File, is_pipelined: bool) -> Self {
        Judge {
            block_bytes: u64::from(log.place().block_bytes),
            log,
            base,
            image,
            guest: History::default(),
            ours: History::default(),
            log_blocks: HashMap::new(),
            log_version: 0,
            superblocks: Vec::new(),
            commits: HashMap::new(),
            committed: None,
            is_pipelined,
            before_last: Replayed::default(),
            guest_then: History::default(),
            prepared: 0,
            is_leaving: false,
            unflushed: None,
            flushing: HashMap::new(),
            discarded: HashSet::new(),
            replays: HashMap::new(),
        }
    }

    /// Block of the disk that a home block is.
    fn on_disk(&self, home: u64) -> u64 {
        self.log.home_offset(home) / self.block_bytes
    }

    /// Home block that a block of the disk is.
    fn home(&self, on_disk: u64) -> Option<u64> {
        on_disk.checked_sub(self.log.home_offset(0) / self.block_bytes)
    }

    fn is_home(&self, block: u64) -> bool {
        let place = self.log.place();
        block < place.home_blocks && !place.own_blocks.iter().any(|range| range.contains(&block))
    }

    /// Log block at a byte of the disk.
    fn position(&self, offset: u64) -> Option<u32> {
        let run = self
            .log
            .place()
            .runs
            .iter()
            .find(|run| offset >= run.offset && offset < run.offset + u64::from(run.count) * self.block_bytes)?;
        Some(run.first_position + ((offset - run.offset) / self.block_bytes) as u32)
    }

    /// Checks what a loss of power would leave now, the region being `region`.
    ///
    /// # Errors
    /// What is wrong, as a sentence.
    pub fn check(&mut self, region: &[u8]) -> Result<(), String> {
        let found = Found::read(region).map_err(|error| format!("the region is refused: {error}"))?;
        let found = found.filter(|found| found.owner.is_some());
        if let Some(found) = &found {
            found.verify(region).map_err(|error| format!("the region is refused: {error}"))?;
            if found.owes() {
                self.check_mark(found)?;
            }
        }
        let (live, other): (Vec<_>, Vec<_>) =
            self.superblocks_on_storage().into_iter().partition(|block| is_live(block));
        for superblock in &live {
            self.check_stored(superblock)?;
        }
        if !live.is_empty() {
            if found.as_ref().is_some_and(Found::owes) {
                return Err("storage may have the log, and the region owes blocks".to_owned());
            }
            if other.is_empty() {
                return Ok(());
            }
            // Where the guest closes its log, storage says so.
            let mut before = vec![0; self.block_bytes as usize];
            let offset = self.log.offset_of(0).unwrap_or(0);
            self.base.read_exact_at(&mut before, offset).map_err(|error| error.to_string())?;
            if found.is_none() && other.iter().any(|block| block[..] == before[..]) {
                return Err("the region is given back, and storage may not have the log".to_owned());
            }
        }
        let sequence = match (&found, self.committed) {
            (Some(found), committed) => {
                let last = found.sequence.wrapping_add(u32::from(found.prepared.is_some()));
                if committed.is_some_and(|committed| jbd2::sequence::is_after(committed, last)) {
                    return Err(format!(
                        "the guest was told that transaction {} is committed, and the region ends with {last}",
                        committed.unwrap_or(0)
                    ));
                }
                last
            }
            (None, committed) => committed.unwrap_or(0),
        };
        let readings = self.readings(sequence)?;
        let condition = match &found {
            Some(found) => self.condition(found)?,
            None => None,
        };
        let Some(condition) = condition else {
            return self.check_blocks(region, found.as_ref(), &readings, Last::Counts(&BTreeSet::new()));
        };
        self.prepared += 1;
        let appends: BTreeSet<u64> = condition.blocks().collect();
        let is_committed = condition.holds(&mut |block, content| {
            let replayed = readings.iter().find_map(|reading| reading.replayed.get(&block));
            content.copy_from_slice(&replayed.ok_or_else(|| io::Error::other("it is not in the log"))?.bytes);
            Ok(())
        });
        if !is_committed.map_err(|error| error.to_string())? {
            return Err("the last transaction counts on what is not in it".to_owned());
        }
        let with = Found::with_prepared(region).map_err(|error| error.to_string())?;
        with.iter().try_for_each(|with| with.verify(region)).map_err(|error| error.to_string())?;
        self.check_blocks(region, with.as_ref(), &readings, Last::Counts(&appends))?;
        let may_be_lost = appends
            .iter()
            .any(|block| self.ours.possible(self.on_disk(*block)).is_none_or(|possible| possible.len() > 1));
        if !may_be_lost {
            return Ok(());
        }
        let readings = self.readings(sequence.wrapping_sub(1))?;
        self.check_blocks(region, found.as_ref(), &readings, Last::IsLost(sequence))
    }

    /// What the last transaction in a region counts on, where it does so.
    fn condition(&self, found: &Found) -> Result<Option<NvmCondition>, String> {
        let Some(prepared) = &found.prepared else { return Ok(None) };
        if !self.is_pipelined {
            return Err("a transaction counts on its appends, and nobody asked for that".to_owned());
        }
        NvmCondition::decode(&prepared.condition).map(Some).ok_or_else(|| "a condition is none".to_owned())
    }

    /// Whether a region's last transaction, of which the guest may have been told, is not there on this image.
    ///
    /// # Errors
    /// When the image cannot be read.
    pub fn is_last_lost(&self, region: &[u8], image: &Path) -> crate::error::Result<bool> {
        let found = Found::read(region).ok().flatten().filter(|found| found.owner.is_some());
        let condition = found.and_then(|found| self.condition(&found).ok().flatten());
        let Some(condition) = condition else { return Ok(false) };
        let file = File::open(image).during("opening an image")?;
        let holds = condition.holds(&mut |block, content| file.read_exact_at(content, self.log.home_offset(block)));
        Ok(!holds.during("reading an image")?)
    }

    fn check_blocks(
        &self,
        region: &[u8],
        found: Option<&Found>,
        readings: &[Reading],
        last: Last<'_>,
    ) -> Result<(), String> {
        let mut blocks: BTreeSet<u64> =
            self.guest.blocks().chain(self.ours.blocks()).filter_map(|block| self.home(block)).collect();
        for reading in readings {
            blocks.extend(reading.replayed.keys());
        }
        if let Some(found) = found {
            blocks.extend(found.latest.keys());
        }
        let without = match last {
            Last::IsLost(sequence) if self.committed == Some(sequence) => {
                Some(Reading { replayed: Arc::clone(&self.before_last) })
            }
            _ => None,
        };
        let is_right = |block: u64, id: [u64; 2]| match &without {
            None => self.is_allowed(block, id, readings),
            Some(without) => self.is_allowed_without(block, id, without, readings),
        };
        for block in blocks {
            if !self.is_home(block) || self.discarded.contains(&block) || self.is_past_the_journal(block) {
                continue;
            }
            if matches!(last, Last::Counts(appends) if appends.contains(&block)) {
                continue;
            }
            let held = found.and_then(|found| found.latest.get(&block).map(|header| found.content(region, header)));
            let wrong = match held {
                Some(content) => (!is_right(block, id_of(content))).then_some("in the region"),
                None => {
                    let possible: Vec<[u64; 2]> = match self.ours.possible(self.on_disk(block)) {
                        Some(all) => all.map(|content| content.id).collect(),
                        None => vec![self.base_content(block).id],
                    };
                    let wrong = possible.iter().any(|id| !is_right(block, *id));
                    wrong.then_some("on the disk")
                }
            };
            let is_free = || match &without {
                None => self.is_free(block, readings),
                Some(without) => self.is_free_in(block, without, &self.guest_then),
            };
            if let Some(place) = wrong
                && !is_free()
            {
                return Err(format!(
                    "block {block} {place} is not what a complete journal would leave there (transaction {}, {})",
                    found.map_or(0, |found| found.sequence),
                    if without.is_some() { "the next one being lost" } else { "the last one" }
                ));
            }
        }
        Ok(())
    }

    /// Whether a block may hold this, the last transaction being lost: what the log has of it without that, wherever its tail is by now, or what the
    /// guest wrote there before it was told of that transaction.
    fn is_allowed_without(&self, block: u64, id: [u64; 2], without: &Reading, readings: &[Reading]) -> bool {
        let known = without.replayed.get(&block);
        if known.is_some_and(|content| content.id == id) {
            return true;
        }
        let is_passed = readings.iter().any(|reading| !reading.replayed.contains_key(&block));
        (known.is_none() || is_passed)
            && match self.guest_then.possible(self.on_disk(block)) {
                Some(mut all) => all.any(|content| content.id == id),
                None => self.base_content(block).id == id,
            }
    }

    /// What the journal's superblock on storage may be.
    fn superblocks_on_storage(&self) -> Vec<Arc<[u8]>> {
        let offset = self.log.offset_of(0).unwrap_or(0);
        let possible = self.ours.possible(offset / self.block_bytes);
        possible.map(|all| all.map(|content| Arc::clone(&content.bytes)).collect()).unwrap_or_default()
    }

    /// Whether the log in its own place is one to be replayed.
    ///
    /// # Errors
    /// When the image cannot be read.
    pub fn is_live(&self, image: &Path) -> crate::error::Result<bool> {
        let mut raw = [0; jbd2::SUPERBLOCK_BYTES];
        let file = File::open(image).during("opening an image")?;
        file.read_exact_at(&mut raw, self.log.offset_of(0).unwrap_or(0)).during("reading an image")?;
        Ok(is_live(&raw))
    }

    /// Checks what a kernel would leave that replays the log in its own place.
    fn check_stored(&mut self, superblock: &[u8]) -> Result<(), String> {
        let (superblock, format) = Superblock::parse(superblock).map_err(|error| error.to_string())?;
        for choice in [0, 1, self.log_version + 2] {
            let (stored, last) = {
                let read = |position: u32| self.stored_block(position, choice);
                let mut log = StoredLog { read: &read };
                let is_home = |block: u64| self.is_home(block);
                let plan = Plan::new(&mut log, &superblock, &format, &is_home).map_err(|error| error.to_string())?;
                (self.left_by(&plan, &mut log), plan.summary().walk.end_sequence.wrapping_sub(1))
            };
            if let Some(committed) = self.committed.filter(|committed| jbd2::sequence::is_after(*committed, last)) {
                return Err(format!(
                    "the guest was told that transaction {committed} is committed, and the log on storage ends with {last}"
                ));
            }
            let readings = self.readings(last)?;
            let mut blocks: BTreeSet<u64> =
                self.guest.blocks().chain(self.ours.blocks()).filter_map(|block| self.home(block)).collect();
            readings.iter().for_each(|reading| blocks.extend(reading.replayed.keys()));
            for block in blocks {
                if !self.is_home(block) || self.discarded.contains(&block) || self.is_past_the_journal(block) {
                    continue;
                }
                let possible: Vec<[u64; 2]> = match (stored.get(&block), self.ours.possible(self.on_disk(block))) {
                    (Some(content), _) => vec![content.id],
                    (None, Some(all)) => all.map(|content| content.id).collect(),
                    (None, None) => vec![self.base_content(block).id],
                };
                if possible.iter().any(|id| !self.is_allowed(block, *id, &readings)) && !self.is_free(block, &readings)
                {
                    return Err(format!(
                        "block {block} is not what a complete journal would leave there, the log being on storage (up to \
                         transaction {last})"
                    ));
                }
            }
        }
        Ok(())
    }

    /// Guests write the file system's superblock past their journals as well, and a log that was handed over does not take
    /// that back.
    fn is_past_the_journal(&self, block: u64) -> bool {
        self.is_leaving && block == extfs::SUPERBLOCK_OFFSET / self.block_bytes
    }

    /// One of the log blocks that storage may have.
    fn stored_block(&self, position: u32, choice: u64) -> Arc<[u8]> {
        let on_disk = self.log.offset_of(position).unwrap_or(0) / self.block_bytes;
        let Some(mut possible) = self.ours.possible(on_disk) else {
            let mut bytes = vec![0; self.block_bytes as usize];
            // Beyond the end there is nothing that anybody replays.
            let _ = self.base.read_exact_at(&mut bytes, on_disk * self.block_bytes);
            return Arc::from(bytes);
        };
        let count = possible.len();
        let index = match choice {
            0 => 0,
            1 => count - 1,
            _ => Random::of(choice, u64::from(position)).below(count as u64) as usize,
        };
        possible.nth(index).map(|content| Arc::clone(&content.bytes)).unwrap_or_default()
    }

    /// What a plan's log leaves at home.
    fn left_by<L: LogRead<Error = Infallible>>(&self, plan: &Plan, log: &mut L) -> BTreeMap<u64, Content> {
        let mut left = BTreeMap::new();
        let mut data = vec![0; self.block_bytes as usize];
        for block in plan.blocks() {
            for copy in block.copies() {
                let Ok(_) = log.read(copy.position, &mut data);
                if copy.restore(plan.format(), &mut data) {
                    left.insert(block.home(), Content::new(&data));
                    break;
                }
            }
        }
        left
    }

    /// While the region owes anything, storage says so.
    fn check_mark(&self, found: &Found) -> Result<(), String> {
        let mut raw = vec![0; jbd2::SUPERBLOCK_BYTES];
        let offset = self.log.offset_of(0).unwrap_or(0);
        self.image.read_exact_at(&mut raw, offset).map_err(|error| error.to_string())?;
        let mark = found.owner.as_ref().map(|owner| owner.mark_checksum);
        let superblock = Superblock::decode(&raw).map_err(|error| error.to_string())?;
        let is_marked = superblock.is_empty() && superblock.errno != 0;
        if mark.is_some_and(|mark| placement::is_mark(&raw, mark)) && is_marked {
            return Ok(());
        }
        Err("the region owes blocks, and the journal superblock on storage does not carry its mark".to_owned())
    }

    fn base_content(&self, home: u64) -> Content {
        let mut bytes = vec![0; self.block_bytes as usize];
        // Beyond the end there is nothing that anybody compares.
        let _ = self.base.read_exact_at(&mut bytes, self.log.home_offset(home));
        Content::new(&bytes)
    }

    /// What the guest's journal may be read as: with the superblock that is done, or one that is on its way.
    fn readings(&mut self, sequence: u32) -> Result<Vec<Reading>, String> {
        let mut readings = Vec::new();
        for write in self.superblocks.clone() {
            readings.push(Reading { replayed: self.replayed(&write.block, sequence)? });
        }
        if readings.is_empty() {
            readings.push(Reading { replayed: Replayed::default() });
        }
        Ok(readings)
    }

    /// What jbd2 would write home from the complete journal, no transaction after `last` being in it.
    fn replayed(&mut self, superblock: &[u8], last: u32) -> Result<Replayed, String> {
        let Ok((superblock, format)) = Superblock::parse(superblock) else { return Ok(Replayed::default()) };
        if superblock.is_empty() {
            return Ok(Replayed::default());
        }
        let key = (self.log_version, superblock.start, last);
        if let Some(known) = self.replays.get(&key) {
            return Ok(Arc::clone(known));
        }
        if self.replays.len() > 8 {
            self.replays.clear();
        }
        let mut log = CompleteLog { blocks: &self.log_blocks, hidden: last.wrapping_add(1) };
        let is_home = |block: u64| self.is_home(block);
        let plan = Plan::new(&mut log, &superblock, &format, &is_home).map_err(|error| error.to_string())?;
        let replayed = Arc::new(self.left_by(&plan, &mut log));
        self.replays.insert(key, Arc::clone(&replayed));
        Ok(replayed)
    }

    fn is_allowed(&self, block: u64, id: [u64; 2], readings: &[Reading]) -> bool {
        readings.iter().any(|reading| match reading.replayed.get(&block) {
            Some(content) => content.id == id,
            None => match self.guest.possible(self.on_disk(block)) {
                Some(mut all) => all.any(|content| content.id == id),
                None => self.base_content(block).id == id,
            },
        })
    }

    /// Whether nobody may depend on a block, in one of the readings.
    fn is_free(&self, block: u64, readings: &[Reading]) -> bool {
        readings.iter().any(|reading| self.is_free_in(block, reading, &self.guest))
    }

    /// The same in one of them, the guest having written this.
    fn is_free_in(&self, block: u64, reading: &Reading, guest: &History) -> bool {
        let view = Committed { judge: self, reading, guest };
        Allocation::default().is_free(&view, block).unwrap_or(false)
    }

    /// The disk's home blocks that have a choice, each with one of what it may hold.
    pub fn lose(&self, choose: &mut dyn FnMut(usize) -> usize) -> Vec<(u64, Arc<[u8]>)> {
        let mut lost = Vec::new();
        for block in self.ours.blocks() {
            // The journal's superblock is also written past the disk's cache.
            if !self.home(block).is_some_and(|home| self.is_home(home)) {
                continue;
            }
            let Some(all) = self.ours.possible(block) else { continue };
            let count = all.len();
            if let Some(content) = all.into_iter().nth(choose(count) % count) {
                lost.push((block * self.block_bytes, Arc::clone(&content.bytes)));
            }
        }
        lost
    }
}

/// The file system as of the last committed transaction.
struct Committed<'a> {
    judge: &'a Judge,
    reading: &'a Reading,
    guest: &'a History,
}

impl ReadAt for Committed<'_> {
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        let block_bytes = self.judge.block_bytes;
        let mut at = 0;
        while at < buffer.len() {
            let (block, into) = ((offset + at as u64) / block_bytes, ((offset + at as u64) % block_bytes) as usize);
            let len = (block_bytes as usize - into).min(buffer.len() - at);
            let content = match self.reading.replayed.get(&block) {
                Some(content) => content.clone(),
                None => {
                    let possible = self.guest.possible(self.judge.on_disk(block));
                    match possible.and_then(|mut all| all.next_back()) {
                        Some(content) => content.clone(),
                        None => self.judge.base_content(block),
                    }
                }
            };
            buffer[at..at + len].copy_from_slice(&content.bytes[into..into + len]);
            at += len;
        }
        Ok(())
    }

    fn size(&self) -> u64 {
        self.judge.log.place().home_blocks * self.judge.block_bytes
    }
}

fn is_live(superblock: &[u8]) -> bool {
    Superblock::decode(superblock).is_ok_and(|superblock| !superblock.is_empty())
}

/// The log as it may be in its own place.
struct StoredLog<'a> {
    read: &'a dyn Fn(u32) -> Arc<[u8]>,
}

impl LogRead for StoredLog<'_> {
    type Error = Infallible;

    fn read(&mut self, position: u32, buffer: &mut [u8]) -> Result<jbd2::Content, Infallible> {
        buffer.copy_from_slice(&(self.read)(position));
        Ok(jbd2::Content::Present)
    }
}

/// The log as the guest wrote it, up to a transaction.
struct CompleteLog<'a> {
    blocks: &'a HashMap<u32, Arc<[u8]>>,
    /// The commit block of this one is not there.
    hidden: u32,
}

impl LogRead for CompleteLog<'_> {
    type Error = Infallible;

    fn read(&mut self, position: u32, buffer: &mut [u8]) -> Result<jbd2::Content, Infallible> {
        let is_hidden = |block: &[u8]| {
            jbd2::peek(block).is_some_and(|header| header.kind == jbd2::Kind::Commit && header.sequence == self.hidden)
        };
        match self.blocks.get(&position).filter(|block| !is_hidden(block)) {
            Some(block) => buffer.copy_from_slice(block),
            None => buffer.fill(0),
        }
        Ok(jbd2::Content::Present)
    }
}

impl Watcher for Judge {
    fn issued(&mut self, recording: &Recording, issue: &Issue) {
        let by = u64::from(issue.id);
        let (start, end) = (issue.offset, issue.offset + issue.len);
        let bytes = match issue.kind {
            Kind::Write => recording.bytes_of(issue),
            Kind::WriteZeroes(_) | Kind::Discard => vec![0; issue.len as usize],
            Kind::Flush => {
                self.guest.flush_begins(by);
                self.flushing.insert(issue.id, self.unflushed);
                return;
            }
            Kind::Read => return,
        };
        let home_start = self.log.home_offset(0);
        if issue.kind == Kind::Discard {
            let first = start.saturating_sub(home_start).div_ceil(self.block_bytes);
            self.discarded.extend(first..end.saturating_sub(home_start) / self.block_bytes);
        } else {
            for block in start / self.block_bytes..end.div_ceil(self.block_bytes) {
                if let Some(home) = self.home(block) {
                    self.discarded.remove(&home);
                }
            }
        }
        let mut at = start;
        while at + self.block_bytes <= end {
            let content = &bytes[(at - start) as usize..(at - start + self.block_bytes) as usize];
            if let Some(position) = self.position(at).filter(|_| issue.kind == Kind::Write) {
                self.log_written(issue.id, position, content);
            }
            at += self.block_bytes;
        }
        let base = self.base.try_clone();
        let block_bytes = self.block_bytes;
        let read = |block: u64| {
            let mut bytes = vec![0; block_bytes as usize];
            if let Ok(base) = &base {
                let _ = base.read_exact_at(&mut bytes, block * block_bytes);
            }
            bytes
        };
        self.guest.write(by, start, &bytes, block_bytes, &read);
    }

    fn request_done(&mut self, id: u32) {
        self.guest.ended(u64::from(id));
        self.guest.flush_ended(u64::from(id));
        if let Some(sequence) = self.commits.remove(&id) {
            if self.is_leaving {
                self.unflushed = Some(sequence);
            } else {
                self.is_committed(sequence);
            }
        }
        if let Some(sequence) = self.flushing.remove(&id).flatten() {
            self.is_committed(sequence);
        }
        if let Some(index) = self.superblocks.iter().position(|write| write.request == id && !write.is_done) {
            self.superblocks[index].is_done = true;
            self.superblocks.drain(..index);
        }
    }

    fn submitted(&mut self, number: u64, operation: &DiskOperation) {
        if operation.operation == Operation::Flush {
            self.ours.flush_begins(number);
        }
    }

    fn executed(&mut self, number: u64, operation: &DiskOperation, bytes: Option<&[u8]>) {
        let Some(bytes) = bytes else { return };
        let block_bytes = self.block_bytes;
        let base = self.base.try_clone();
        let read = |block: u64| {
            let mut bytes = vec![0; block_bytes as usize];
            if let Ok(base) = &base {
                let _ = base.read_exact_at(&mut bytes, block * block_bytes);
            }
            bytes
        };
        self.ours.write(number, operation.offset, bytes, block_bytes, &read);
    }

    fn leaves(&mut self) {
        self.is_leaving = true;
    }

    fn completed(&mut self, number: u64, _operation: &DiskOperation) {
        self.ours.ended(number);
        self.ours.flush_ended(number);
    }
}

impl Judge {
    fn is_committed(&mut self, sequence: u32) {
        if self.committed.is_none_or(|known| jbd2::sequence::is_after(sequence, known)) {
            self.committed = Some(sequence);
            if self.is_pipelined
                && let Some(write) = self.superblocks.first().cloned()
            {
                self.guest_then = self.guest.clone();
                self.before_last = self.replayed(&write.block, sequence.wrapping_sub(1)).unwrap_or_default();
            }
        }
    }

    fn log_written(&mut self, request: u32, position: u32, content: &[u8]) {
        self.log_version += 1;
        let block: Arc<[u8]> = Arc::from(content);
        if position == 0 {
            self.superblocks.push(SuperblockWrite { block, request, is_done: false });
            return;
        }
        if let Some(header) = jbd2::peek(&block).filter(|header| header.kind == jbd2::Kind::Commit) {
            self.commits.insert(request, header.sequence);
        }
        self.log_blocks.insert(position, block);
    }
}
