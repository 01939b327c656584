//! A disk whose cache loses, at a power cut, any part of what no flush covers, torn at 512 bytes.

use guest_tools::random::Random;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

pub const SECTOR: u64 = 512;
/// Where the file system's superblock is.
const SUPERBLOCK_SECTORS: [u64; 2] = [2, 3];

/// What a sector may hold beside what is durable, by whom, oldest first.
type Candidates = Vec<(u64, Arc<[u8]>)>;

enum Operation {
    Write { offset: u64, len: u64 },
    Flush { covers: BTreeSet<u64> },
}

#[derive(Default)]
pub struct Disk {
    durable: Vec<u8>,
    unflushed: BTreeMap<u64, Candidates>,
    in_flight: BTreeMap<u64, Operation>,
    ended: BTreeSet<u64>,
    next: u64,
}

/// What is there after a power cut.
pub struct Cut<'d> {
    durable: &'d [u8],
    sectors: BTreeMap<u64, Arc<[u8]>>,
}

impl Disk {
    pub fn new(durable: Vec<u8>) -> Self {
        Disk { durable, ..Disk::default() }
    }

    pub fn write(&mut self, offset: u64, bytes: &[u8]) -> u64 {
        let number = self.next;
        self.next += 1;
        for (index, part) in (0..).zip(bytes.chunks(SECTOR as usize)) {
            self.unflushed.entry(offset / SECTOR + index).or_default().push((number, Arc::from(part)));
        }
        self.in_flight.insert(number, Operation::Write { offset, len: bytes.len() as u64 });
        number
    }

    pub fn flush(&mut self) -> u64 {
        let number = self.next;
        self.next += 1;
        self.in_flight.insert(number, Operation::Flush { covers: self.ended.clone() });
        number
    }

    /// An operation ends.
    pub fn end(&mut self, number: u64) {
        match self.in_flight.remove(&number) {
            Some(Operation::Write { offset, len }) => {
                for sector in offset / SECTOR..(offset + len) / SECTOR {
                    // What ended later lies over what ended earlier.
                    let Some(candidates) = self.unflushed.get_mut(&sector) else { continue };
                    let Some(at) = candidates.iter().position(|(by, _)| *by == number) else { continue };
                    let own = candidates.remove(at);
                    let ended = candidates.iter().rposition(|(by, _)| self.ended.contains(by)).map_or(0, |at| at + 1);
                    candidates.insert(ended.max(at), own);
                }
                self.ended.insert(number);
            }
            Some(Operation::Flush { covers }) => {
                let durable = &mut self.durable;
                self.unflushed.retain(|sector, candidates| {
                    if let Some(last) = candidates.iter().rposition(|(by, _)| covers.contains(by)) {
                        let at = (*sector * SECTOR) as usize;
                        durable[at..at + SECTOR as usize].copy_from_slice(&candidates[last].1);
                        candidates.drain(..=last);
                    }
                    !candidates.is_empty()
                });
                self.ended.retain(|by| !covers.contains(by));
            }
            None => {}
        }
    }

    /// What has ended of these bytes was flushed by itself.
    pub fn settle(&mut self, offset: u64, len: u64) {
        for sector in offset / SECTOR..(offset + len) / SECTOR {
            let Some(candidates) = self.unflushed.get_mut(&sector) else { continue };
            if let Some(last) = candidates.iter().rposition(|(by, _)| self.ended.contains(by)) {
                let at = (sector * SECTOR) as usize;
                self.durable[at..at + SECTOR as usize].copy_from_slice(&candidates[last].1);
                candidates.drain(..=last);
            }
            if candidates.is_empty() {
                self.unflushed.remove(&sector);
            }
        }
    }

    /// What whoever reads it finds.
    pub fn read(&self, offset: u64, into: &mut [u8]) {
        let start = (offset / SECTOR * SECTOR) as usize;
        let end = (offset as usize + into.len()).next_multiple_of(SECTOR as usize);
        let mut whole = self.durable[start..end].to_vec();
        for (sector, candidates) in self.unflushed.range(start as u64 / SECTOR..end as u64 / SECTOR) {
            if let Some((_, bytes)) = candidates.iter().rev().find(|(by, _)| self.ended.contains(by)) {
                let at = (*sector * SECTOR) as usize - start;
                whole[at..at + SECTOR as usize].copy_from_slice(bytes);
            }
        }
        let from = offset as usize - start;
        into.copy_from_slice(&whole[from..from + into.len()]);
    }

    pub fn cut(&self, random: &mut Random) -> Cut<'_> {
        // All is lost, all is kept, or any part, more or less of it.
        let keep = [0, 100, 50, 10, 90][random.below(5) as usize];
        let mut sectors = BTreeMap::new();
        for (sector, candidates) in &self.unflushed {
            if random.below(100) < keep {
                let last = candidates.len() - 1;
                let which = if random.below(3) == 0 { random.below(last as u64 + 1) as usize } else { last };
                sectors.insert(*sector, Arc::clone(&candidates[which].1));
            }
        }
        // ext4 writes its superblock past its journal at times, in two sectors with one checksum: torn, no kernel mounts it, under
        // whatever disk. So that one is written whole here.
        let [first, second] = SUPERBLOCK_SECTORS;
        match sectors.remove(&first) {
            Some(_) => {
                let which = |sector: u64| {
                    self.unflushed.get(&sector).and_then(|all| all.last()).map(|last| Arc::clone(&last.1))
                };
                sectors.extend(SUPERBLOCK_SECTORS.into_iter().filter_map(|sector| Some((sector, which(sector)?))));
            }
            None => drop(sectors.remove(&second)),
        }
        Cut { durable: &self.durable, sectors }
    }
}

impl Cut<'_> {
    pub fn read(&self, offset: u64, into: &mut [u8]) {
        for (index, part) in (0..).zip(into.chunks_mut(SECTOR as usize)) {
            let sector = offset / SECTOR + index;
            let at = (sector * SECTOR) as usize;
            match self.sectors.get(&sector) {
                Some(bytes) => part.copy_from_slice(bytes),
                None => part.copy_from_slice(&self.durable[at..at + part.len()]),
            }
        }
    }

    /// All of it.
    pub fn image(&self) -> Vec<u8> {
        let mut image = self.durable.to_vec();
        for (sector, bytes) in &self.sectors {
            let at = (*sector * SECTOR) as usize;
            image[at..at + SECTOR as usize].copy_from_slice(bytes);
        }
        image
    }
}
