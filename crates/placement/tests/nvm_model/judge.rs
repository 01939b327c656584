//! The judge: what recovery would leave, and what it does leave, against jbd2's replay of the complete journal.

use super::{BLOCK, Guest, Random};
use jbd2::{Content, Format, LogRead, Plan as Replay, Superblock};
use nvm_journal::Found;
use nvm_journal::medium::SimulatedMedium;
use placement::{NvmCondition, NvmDisk, NvmOptions};
use recovery::Access;
use std::collections::{BTreeMap, HashMap};
use std::convert::Infallible;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;

/// Whether a block may hold something, by what the log would leave.
type IsRight<'a> = dyn Fn(u64, &[u8], &[BTreeMap<u64, Vec<u8>>]) -> bool + 'a;

/// A log as it was written, but for a transaction that may not be committed yet.
struct CompleteLog<'a> {
    blocks: &'a HashMap<u32, Vec<u8>>,
    hidden: u32,
}

impl LogRead for CompleteLog<'_> {
    type Error = Infallible;

    fn read(&mut self, position: u32, buffer: &mut [u8]) -> Result<Content, Infallible> {
        match self.blocks.get(&position) {
            Some(block) if jbd2::peek(block).is_none_or(|header| header.sequence != self.hidden) => {
                buffer.copy_from_slice(block);
            }
            _ => buffer.fill(0),
        }
        Ok(Content::Present)
    }
}

/// A log as storage has it.
struct StoredLog<'a> {
    read: &'a dyn Fn(u32) -> Arc<[u8]>,
}

impl LogRead for StoredLog<'_> {
    type Error = Infallible;

    fn read(&mut self, position: u32, buffer: &mut [u8]) -> Result<Content, Infallible> {
        buffer.copy_from_slice(&(self.read)(position));
        Ok(Content::Present)
    }
}

/// What a replay of a log leaves, and its last transaction.
fn replay(log: &mut impl LogRead<Error = Infallible>, superblock: &[u8]) -> (BTreeMap<u64, Vec<u8>>, u32) {
    let (superblock, format): (Superblock, Format) = Superblock::parse(superblock).expect("a superblock");
    let plan = Replay::new(log, &superblock, &format, &|_| true).expect("a good log");
    let mut replayed = BTreeMap::new();
    for block in plan.blocks() {
        let copy = block.newest();
        let mut data = vec![0; BLOCK];
        let Ok(_) = log.read(copy.position, &mut data);
        assert!(copy.restore(plan.format(), &mut data));
        replayed.insert(block.home(), data);
    }
    (replayed, plan.summary().walk.end_sequence.wrapping_sub(1))
}

/// The same of a log that was read, its superblock at position 0.
pub(super) fn replay_shown(log: &HashMap<u32, Vec<u8>>) -> (BTreeMap<u64, Vec<u8>>, u32) {
    let sequence = Superblock::decode(&log[&0]).expect("a superblock").sequence;
    replay(&mut CompleteLog { blocks: log, hidden: sequence.wrapping_sub(1) }, &log[&0])
}

fn is_live(superblock: &[u8]) -> bool {
    !Superblock::decode(superblock).expect("a superblock").is_empty()
}

impl Guest {
    /// What recovery would leave now.
    pub(super) fn check(&mut self) {
        self.note_own_flushes();
        self.nvm.check().expect("the books are right");
        let region = self.nvm.look_at_region(|medium| medium.bytes().to_vec()).expect("it has not failed");
        self.judge(&region);
    }

    /// What the worker has flushed by itself (where somebody unmounts, say) is durable as well: all that had ended before.
    pub(super) fn note_own_flushes(&mut self) {
        let log = std::fs::File::open(self.directory.path().join("log")).expect("the log");
        let is_flush = |entry: &std::io::Result<write_log::Entry>| {
            matches!(entry.as_ref().expect("read").kind, write_log::EntryKind::Flush)
        };
        let bytes = log.metadata().expect("the log").len();
        if bytes == self.own_flushes.0 {
            return;
        }
        let flushes = write_log::entries(&log).filter(is_flush).count();
        let (_, before) = std::mem::replace(&mut self.own_flushes, (bytes, flushes));
        if before < flushes && !self.has_broken {
            let now = self.ours.now();
            self.ours.flushed(now);
        }
    }

    pub(super) fn replayed(&self, superblock: &[u8], last: u32) -> BTreeMap<u64, Vec<u8>> {
        replay(&mut CompleteLog { blocks: &self.log, hidden: last.wrapping_add(1) }, superblock).0
    }

    /// What the journal's superblock on storage may be.
    pub(super) fn superblocks_on_storage(&self) -> Vec<Vec<u8>> {
        let offset = self.log_at[0];
        let mut in_file = vec![0; BLOCK];
        self.file.read_exact_at(&mut in_file, offset).expect("read");
        // The mark is written, and flushed, past what is simulated here.
        let is_marked = Superblock::decode(&in_file).expect("a superblock").errno != 0;
        if is_marked && !self.is_on_its_way(offset) {
            return vec![in_file];
        }
        self.ours.possible(offset / BLOCK as u64).iter().map(|content| content.to_vec()).collect()
    }

    /// One of the logs that storage may have.
    fn log_on_storage(&self, position: u32, choice: u64) -> Arc<[u8]> {
        let possible = self.ours.possible(self.log_at[position as usize] / BLOCK as u64);
        let index = match choice {
            0 => 0,
            1 => possible.len() - 1,
            _ => Random::new(choice ^ u64::from(position) << 32).below(possible.len() as u64) as usize,
        };
        Arc::clone(&possible[index])
    }

    /// What a kernel that replays the log on storage would leave.
    fn judge_stored(&self, superblock: &[u8]) {
        for choice in [0, 1, self.next_operation + 2] {
            let read = |position: u32| self.log_on_storage(position, choice);
            let (stored, last) = replay(&mut StoredLog { read: &read }, superblock);
            let readings = self.readings_to(last);
            for block in self.metadata.iter().chain(&self.dynamic).copied() {
                let contents = match stored.get(&block) {
                    Some(content) => vec![Arc::from(content.clone())],
                    None => self.ours.possible(block),
                };
                for content in contents {
                    assert!(
                        self.is_allowed(block, &content, &readings),
                        "block {block} is not what a complete journal would leave there, the log being on storage (up to \
                         transaction {last})"
                    );
                }
            }
        }
    }

    /// Whether a block may hold this: in one of the readings, the block being in use.
    pub(super) fn is_allowed(&self, block: u64, content: &[u8], readings: &[BTreeMap<u64, Vec<u8>>]) -> bool {
        let (byte, bit) = ((block - 1) as usize / 8, (block - 1) % 8);
        // A log that was handed over does not take back what the guest has written past it.
        if self.is_leaving && self.sent_home.get(&block).is_some_and(|sent| sent.iter().any(|sent| sent == content)) {
            return true;
        }
        readings.iter().any(|replayed| match replayed.get(&block) {
            Some(replayed) => replayed[..] == *content,
            None => self.ideal.possible(block).iter().any(|possible| possible[..] == *content),
        }) || readings.iter().any(|replayed| match replayed.get(&self.bitmap) {
            Some(bitmap) => bitmap[byte] >> bit & 1 == 0,
            None => self.ideal.possible(self.bitmap).iter().any(|bitmap| bitmap[byte] >> bit & 1 == 0),
        })
    }

    /// What the log would leave without the last transaction, of which the guest may have been told already.
    fn readings_without(&self, last: u32) -> Vec<BTreeMap<u64, Vec<u8>>> {
        let before = last.wrapping_sub(1);
        assert!(
            !jbd2::sequence::is_after(self.committed, last),
            "the guest was told that {} is committed, and what is left ends with {before}, or with one more",
            self.committed
        );
        self.superblocks.iter().map(|superblock| self.replayed(superblock, before)).collect()
    }

    /// Whether a block may hold this where the last transaction is lost: what the log has of it without that, wherever its tail is by now; or what the
    /// guest wrote there before it was told of that transaction, and its tail has passed; or anything, where the block is free.
    fn is_allowed_without(&self, last: u32, block: u64, content: &[u8], readings: &[BTreeMap<u64, Vec<u8>>]) -> bool {
        if self.committed != last {
            return self.is_allowed(block, content, readings);
        }
        let is_free = |bitmap: &[u8]| bitmap[(block - 1) as usize / 8] >> ((block - 1) % 8) & 1 == 0;
        let is_free = match self.before_last.get(&self.bitmap) {
            Some(bitmap) => is_free(bitmap),
            None => self.ideal_then.possible(self.bitmap).iter().any(|bitmap| is_free(bitmap)),
        };
        let is_passed = self.is_leaving || readings.iter().any(|replayed| !replayed.contains_key(&block));
        let is_sent = || self.sent_before_last.get(&block).is_some_and(|sent| sent.iter().any(|sent| sent == content));
        is_free
            || match self.before_last.get(&block) {
                Some(before) => before == content || is_passed && is_sent(),
                None => self.ideal_then.possible(block).iter().any(|possible| possible[..] == *content),
            }
    }

    /// What the last transaction in a region counts on, where it does so.
    fn condition(&self, found: &Found) -> Option<NvmCondition> {
        let prepared = found.prepared.as_ref()?;
        assert!(self.is_pipelined(), "a transaction counts on its appends, and nobody asked for that");
        Some(NvmCondition::decode(&prepared.condition).expect("a condition"))
    }

    fn readings_to(&self, last: u32) -> Vec<BTreeMap<u64, Vec<u8>>> {
        assert!(
            !jbd2::sequence::is_after(self.committed, last),
            "the guest was told that {} is committed, and what is left ends with {last}",
            self.committed,
        );
        // A transaction that failed is none, though the region has its number for a moment while it holds a block again.
        let last = if self.committing.is_none() { self.committed } else { last };
        // One that fails has its number, too, until the guest is told.
        let readings = if self.has_broken && last != self.committed { vec![last, self.committed] } else { vec![last] };
        let of = |last| self.superblocks.iter().map(move |superblock| self.replayed(superblock, last));
        readings.into_iter().flat_map(of).collect()
    }

    pub(super) fn judge(&self, region: &[u8]) {
        let found = Found::read(region).expect("a region").filter(|found| found.owner.is_some());
        if found.is_none() && self.next_request <= 1 {
            return;
        }
        let (live, marked): (Vec<_>, Vec<_>) =
            self.superblocks_on_storage().into_iter().partition(|superblock| is_live(superblock));
        live.iter().for_each(|superblock| self.judge_stored(superblock));
        let Some(found) = found else {
            assert!(marked.is_empty() || self.may_be_closed, "neither the region nor storage has the log");
            if !marked.is_empty() {
                self.judge_closed();
            }
            return;
        };
        assert!(live.is_empty() || !found.owes(), "storage has the log, and the region owes blocks");
        found.verify(region).expect("a good region");
        if marked.is_empty() {
            return;
        }
        let Some(condition) = self.condition(&found) else {
            return self.judge_found(
                region,
                &found,
                &|block, content, readings| self.is_allowed(block, content, readings),
                &self.readings_to(found.sequence),
            );
        };
        let last = found.sequence.wrapping_add(1);
        let with = Found::with_prepared(region).expect("a region").expect("a region");
        with.verify(region).expect("a good region");
        let readings = self.readings_to(last);
        let appends: Vec<u64> = condition.blocks().collect();
        let is_committed = condition.holds(&mut |block, content| {
            content.copy_from_slice(&readings[0][&block]);
            Ok(())
        });
        assert!(is_committed.expect("read"), "the condition is not of what was committed");
        for block in &appends {
            assert!(
                self.ours.last(*block)[..] == readings[0][block][..],
                "it is acknowledged, and block {block} is not at home"
            );
        }
        // With all of its appends there …
        let is_right = |block: u64, content: &[u8], readings: &[_]| {
            appends.contains(&block) || self.is_allowed(block, content, readings)
        };
        self.judge_found(region, &with, &is_right, &readings);
        // … and without, where one of them may not be.
        if appends
            .iter()
            .any(|block| self.ours.possible(*block).iter().any(|content| content[..] != readings[0][block][..]))
        {
            let is_right =
                |block: u64, content: &[u8], readings: &[_]| self.is_allowed_without(last, block, content, readings);
            self.judge_found(region, &found, &is_right, &self.readings_without(last));
        }
    }

    /// The same of a region whose last transaction counts, or not.
    fn judge_found(&self, region: &[u8], found: &Found, is_right: &IsRight<'_>, readings: &[BTreeMap<u64, Vec<u8>>]) {
        for block in self.metadata.iter().chain(&self.dynamic).copied() {
            let in_region = found.latest.get(&block).map(|header| found.content(region, header).to_vec());
            let (place, possible) = match in_region {
                Some(content) => ("in the region", vec![Arc::from(content)]),
                None => ("at home", self.ours.possible(block)),
            };
            for content in possible {
                assert!(
                    is_right(block, &content, readings),
                    "block {block} {place} is not what a complete journal would leave there (transaction {}; {:?} is prepared)",
                    found.sequence,
                    found.prepared.as_ref().map(|prepared| prepared.pointer)
                );
            }
        }
        let known = |block: &u64| self.metadata.contains(block) || self.dynamic.contains(block);
        assert!(found.latest.keys().all(known), "the region holds what the guest never wrote");
    }

    /// The log is empty, and in no region: all that was committed is home.
    fn judge_closed(&self) {
        let readings = self.readings_to(self.committed);
        for block in self.metadata.iter().chain(&self.dynamic).copied() {
            for content in self.ours.possible(block) {
                assert!(
                    self.is_allowed(block, &content, &readings),
                    "block {block} is not home, and the log is closed"
                );
            }
        }
    }

    /// The power fails, and what is left is really recovered, in copies.
    pub fn recover(&mut self) {
        let region = self.nvm.look_at_region(|medium| medium.bytes().to_vec()).expect("it has not failed");
        let found = Found::read(&region).expect("a region").filter(|found| found.owner.is_some());
        let path: PathBuf = self.directory.path().join("recovered");
        std::fs::copy(self.directory.path().join("image"), &path).expect("copied");
        let copy = std::fs::OpenOptions::new().read(true).write(true).open(&path).expect("the copy");
        for block in self.ours.written().collect::<Vec<_>>() {
            let possible = self.ours.possible(block);
            let content = &possible[self.random.below(possible.len() as u64) as usize];
            copy.write_all_at(content, block * BLOCK as u64).expect("written");
        }
        let superblocks = self.superblocks_on_storage();
        let superblock = &superblocks[self.random.below(superblocks.len() as u64) as usize];
        copy.write_all_at(superblock, self.log_at[0]).expect("written");
        let prepared = found.as_ref().and_then(|found| Some((found.sequence.wrapping_add(1), self.condition(found)?)));
        let mut lost = None;
        let mut last = found.as_ref().map(|found| found.sequence);
        if let Some((sequence, condition)) = prepared {
            let is_there = condition.holds(&mut |block, content| copy.read_exact_at(content, block * BLOCK as u64));
            let is_there = is_there.expect("read");
            self.recovered[usize::from(is_there)] += 1;
            if is_there { last = Some(sequence) } else { lost = Some(sequence) }
        }
        let medium = SimulatedMedium::from_image(region);
        let nvm = NvmDisk::with_medium(NvmOptions::new("left"), 0, Box::new(medium)).expect("a good region");
        let image = recovery::Disk::open(&path, Access::Write).expect("the copy");
        nvm.finish_earlier(&image, &mut Vec::new()).expect("recovered");
        let read = |position: u32| {
            let mut content = vec![0; BLOCK];
            copy.read_exact_at(&mut content, self.log_at[position as usize]).expect("read");
            Arc::from(content)
        };
        let superblock = read(0);
        let (stored, readings) = if is_live(&superblock) {
            let (stored, last) = replay(&mut StoredLog { read: &read }, &superblock);
            (stored, self.readings_to(last))
        } else if let Some(lost) = lost {
            (BTreeMap::new(), self.readings_without(lost))
        } else {
            let last = last.or_else(|| self.may_be_closed.then_some(self.committed));
            (BTreeMap::new(), self.readings_to(last.expect("the region has the log")))
        };
        for block in self.metadata.iter().chain(&self.dynamic).copied() {
            let mut content = vec![0; BLOCK];
            copy.read_exact_at(&mut content, block * BLOCK as u64).expect("read");
            if let Some(stored) = stored.get(&block) {
                content.clone_from(stored);
            }
            let is_right = match lost {
                None => self.is_allowed(block, &content, &readings),
                Some(last) => self.is_allowed_without(last, block, &content, &readings),
            };
            assert!(is_right, "block {block} is not as a complete journal has it ({lost:?} is lost)");
        }
        std::fs::remove_file(&path).expect("removed");
    }
}
