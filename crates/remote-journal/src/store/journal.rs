//! One journal in memory: which batches are live and where they are.

use super::record::{Header, JournalRecord, Kind};
use super::{Medium, Store};
use std::collections::BTreeMap;

/// Where a batch is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Location {
    /// The segment's number.
    pub segment: u64,
    /// Of its record, in bytes.
    pub offset: u64,
    /// Bytes of its payload.
    pub payload_bytes: u32,
}

/// What a store knows of a journal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JournalInfo {
    /// Its name, after its client's.
    pub name: String,
    /// The file system's UUID.
    pub owner: [u8; 16],
    /// Tells this epoch's log from any other of the same number.
    pub nonce: [u8; 16],
    /// The epoch of what is kept.
    pub epoch: u64,
    /// The highest epoch given out.
    pub fence: u64,
    /// Bytes of a block.
    pub block_bytes: u32,
    /// Whether a log is kept.
    pub is_live: bool,
    /// Whether it was recovered: it is kept until the next one begins.
    pub is_recovered: bool,
    /// First batch needed.
    pub tail: u64,
    /// Last batch.
    pub last: u64,
    /// Batches kept.
    pub batches: u64,
    /// Bytes of them.
    pub bytes: u64,
}

#[derive(Debug)]
pub(super) struct Journal {
    pub record: JournalRecord,
    pub batches: BTreeMap<u64, Location>,
    pub bytes: u64,
    /// The store was found damaged: something of this journal may be lost, so it is not added to.
    pub is_suspect: bool,
}

impl Journal {
    pub fn info(&self) -> JournalInfo {
        let record = &self.record;
        JournalInfo {
            name: record.name.clone(),
            owner: record.owner,
            nonce: record.nonce,
            epoch: record.epoch,
            fence: record.fence,
            block_bytes: record.block_bytes,
            is_live: record.is_live,
            is_recovered: record.is_recovered,
            tail: record.tail,
            last: record.last,
            batches: self.batches.len() as u64,
            bytes: self.bytes,
        }
    }
}

impl<M: Medium> Store<M> {
    fn release(&mut self, location: &Location) {
        if let Some(segment) = self.segments.get_mut(&location.segment) {
            segment.live_bytes -= u64::from(location.payload_bytes);
        }
    }

    /// Takes over a journal's state. A new epoch, or a log that is over, has no batches.
    pub(super) fn set_journal(&mut self, record: JournalRecord) {
        let id = record.id;
        self.by_name.insert(record.name.clone(), id);
        self.next_id = self.next_id.max(id);
        let Some(journal) = self.journals.get_mut(&id) else {
            let journal = Journal { record, batches: BTreeMap::new(), bytes: 0, is_suspect: false };
            self.journals.insert(id, journal);
            return;
        };
        let goes_on = record.is_live && journal.record.epoch == record.epoch;
        let (tail, last) = (journal.record.tail, journal.record.last);
        journal.record = record;
        if goes_on {
            journal.record.tail = journal.record.tail.max(tail);
            journal.record.last = journal.record.last.max(last);
            return;
        }
        journal.bytes = 0;
        journal.is_suspect = false;
        let dropped = std::mem::take(&mut journal.batches);
        self.batches_live -= dropped.len() as u64;
        dropped.values().for_each(|location| self.release(location));
    }

    pub(super) fn remove_journal(&mut self, id: u32) {
        if let Some(journal) = self.journals.remove(&id) {
            self.by_name.remove(&journal.record.name);
            self.batches_live -= journal.batches.len() as u64;
            journal.batches.values().for_each(|location| self.release(location));
        }
    }

    /// A batch that was there and cannot be read: the hole is seen by whoever fetches.
    pub(super) fn note_lost(&mut self, header: &Header) {
        let Some(journal) = self.journals.get_mut(&header.journal) else { return };
        if header.kind == Kind::Batch && journal.record.is_live && journal.record.epoch == header.epoch {
            journal.record.last = journal.record.last.max(header.sequence);
        }
    }

    /// Adds a batch, or puts it elsewhere, and lets go of those before the tail.
    pub(super) fn add_batch(&mut self, id: u32, sequence: u64, tail: u64, location: Location) {
        let Some(journal) = self.journals.get_mut(&id) else { return };
        journal.record.tail = journal.record.tail.max(tail);
        journal.record.last = journal.record.last.max(sequence);
        let mut dropped = Vec::new();
        journal.bytes += u64::from(location.payload_bytes);
        dropped.extend(journal.batches.insert(sequence, location));
        while let Some(first) = journal.batches.first_entry() {
            if *first.key() >= journal.record.tail {
                break;
            }
            dropped.push(first.remove());
        }
        journal.bytes -= dropped.iter().map(|location| u64::from(location.payload_bytes)).sum::<u64>();
        if let Some(segment) = self.segments.get_mut(&location.segment) {
            segment.live_bytes += u64::from(location.payload_bytes);
        }
        self.batches_live = self.batches_live + 1 - dropped.len() as u64;
        dropped.iter().for_each(|location| self.release(location));
    }
}
