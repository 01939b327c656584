//! A disk with a volatile cache.

use guest_tools::random::Random;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

pub const SECTOR: usize = 512;

/// A write, or a flush of what had ended when it came.
pub enum Operation {
    Write { offset: usize, bytes: Arc<[u8]> },
    Flush { covers: BTreeSet<u64> },
}

/// What a sector may hold beside what is durable, oldest first.
type Candidates = Vec<(u64, Vec<u8>)>;

#[derive(Default)]
pub struct Disk {
    pub durable: Vec<u8>,
    unflushed: BTreeMap<usize, Candidates>,
    pub in_flight: BTreeMap<u64, Operation>,
    ended: BTreeSet<u64>,
    next: u64,
}

impl Disk {
    pub fn new(bytes: usize) -> Self {
        Disk { durable: vec![0; bytes], ..Disk::default() }
    }

    pub fn write(&mut self, offset: usize, bytes: Arc<[u8]>) -> u64 {
        let number = self.next;
        self.next += 1;
        for (index, part) in bytes.chunks(SECTOR).enumerate() {
            self.unflushed.entry(offset / SECTOR + index).or_default().push((number, part.to_vec()));
        }
        self.in_flight.insert(number, Operation::Write { offset, bytes });
        number
    }

    pub fn flush(&mut self) -> u64 {
        let number = self.next;
        self.next += 1;
        self.in_flight.insert(number, Operation::Flush { covers: self.ended.clone() });
        number
    }

    /// An operation ends. Whether it was a flush.
    pub fn end(&mut self, number: u64) -> bool {
        match self.in_flight.remove(&number).unwrap() {
            Operation::Write { offset, bytes } => {
                // What ended later lies over what ended earlier; of two that were under way at a time either may.
                let is_under = number.is_multiple_of(3);
                for index in 0..bytes.len() / SECTOR {
                    let candidates = self.unflushed.get_mut(&(offset / SECTOR + index)).unwrap();
                    let at = candidates.iter().position(|(by, _)| *by == number).unwrap();
                    let own = candidates.remove(at);
                    let ended = candidates.iter().rposition(|(by, _)| self.ended.contains(by)).map_or(0, |at| at + 1);
                    candidates.insert(if is_under { at } else { ended.max(at) }, own);
                }
                self.ended.insert(number);
                false
            }
            Operation::Flush { covers } => {
                let durable = &mut self.durable;
                let in_flight = &self.in_flight;
                self.unflushed.retain(|sector, candidates| {
                    if let Some(last) = candidates.iter().rposition(|(by, _)| covers.contains(by)) {
                        durable[sector * SECTOR..(sector + 1) * SECTOR].copy_from_slice(&candidates[last].1);
                        let later = candidates.split_off(last + 1);
                        // One that is under way lands at any time.
                        candidates.retain(|(by, _)| in_flight.contains_key(by));
                        candidates.extend(later);
                    }
                    !candidates.is_empty()
                });
                self.ended.retain(|by| !covers.contains(by));
                true
            }
        }
    }

    /// Who sent it is gone: all of it was sent before, or none, or some of its sectors were.
    pub fn orphan(&mut self, number: u64, random: &mut Random) {
        let kept = random.below(3);
        if kept == 0 {
            self.end(number);
            return;
        }
        let Operation::Write { offset, bytes } = self.in_flight.remove(&number).unwrap() else { return };
        for index in 0..bytes.len() / SECTOR {
            let sector = offset / SECTOR + index;
            let candidates = self.unflushed.get_mut(&sector).unwrap();
            candidates.retain(|(by, _)| *by != number);
            if candidates.is_empty() {
                self.unflushed.remove(&sector);
            }
        }
        if kept == 1 {
            return;
        }
        for (index, part) in bytes.chunks(SECTOR).enumerate() {
            if random.below(2) == 0 {
                let own = self.write(offset + index * SECTOR, Arc::from(part));
                self.end(own);
            }
        }
    }

    /// What whoever reads it finds: the newest of what has ended.
    pub fn read(&self, offset: usize, into: &mut [u8]) {
        into.copy_from_slice(&self.durable[offset..offset + into.len()]);
        for (index, part) in into.chunks_mut(SECTOR).enumerate() {
            let candidates = self.unflushed.get(&(offset / SECTOR + index));
            if let Some((_, bytes)) =
                candidates.and_then(|all| all.iter().rev().find(|(by, _)| self.ended.contains(by)))
            {
                part.copy_from_slice(bytes);
            }
        }
    }

    /// What is there after a power cut.
    pub fn cut(&self, random: &mut Random) -> Vec<u8> {
        let mut image = self.durable.clone();
        // All lost, all kept, or any part, more or less of it.
        let keep = [0, 100, 50, 15, 85][random.below(5) as usize];
        for (sector, candidates) in &self.unflushed {
            if random.below(100) < keep {
                let last = candidates.len() as u64 - 1;
                let which = if random.below(3) == 0 { random.below(last + 1) } else { last } as usize;
                image[sector * SECTOR..(sector + 1) * SECTOR].copy_from_slice(&candidates[which].1);
            }
        }
        image
    }
}
