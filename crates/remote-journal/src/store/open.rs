//! Opening a store: segments are read in order, a torn end is cut off, damage is told from it.
//!
//! The last group written before a crash may be torn: any of its sectors may be there or not. What tells damage from that
//! is the groups' numbers: a group is written only when the one before is durable. So where a record cannot be read and a
//! later one of a group after the next is there, something durable was damaged; it is passed over, and the numbers of the
//! batches show the hole. (Damage in the very last group looks like a torn end: storage with checksums, or the JetStream
//! store, covers that.)

use super::record::{HEADER_BYTES, Header, JournalRecord, Kind, record_bytes};
use super::{Location, Medium, Segment, SegmentFile, Store, StoreCounters, StoreError, StoreOptions};
use crate::bytes::Reader;
use std::collections::{BTreeMap, HashMap};
use std::io;

/// A record and where it is.
struct Found {
    header: Header,
    offset: u64,
    payload: Vec<u8>,
}

impl Found {
    fn end(&self) -> u64 {
        self.offset + record_bytes(self.payload.len())
    }
}

fn read_record<F: SegmentFile>(
    file: &F,
    len: u64,
    offset: u64,
    store: Option<u32>,
    segment: u64,
) -> io::Result<Option<Found>> {
    if offset + HEADER_BYTES as u64 > len {
        return Ok(None);
    }
    let mut header = [0; HEADER_BYTES];
    file.read_at(offset, &mut header)?;
    let Some(header) = Header::read(&header, store, segment) else { return Ok(None) };
    if offset + record_bytes(header.payload_bytes as usize) > len {
        return Ok(None);
    }
    let mut payload = vec![0; header.payload_bytes as usize];
    file.read_at(offset + HEADER_BYTES as u64, &mut payload)?;
    Ok(header.matches(&payload).then_some(Found { header, offset, payload }))
}

/// The next record that can be read, from `offset` on.
fn resynchronise<F: SegmentFile>(
    file: &F,
    len: u64,
    offset: u64,
    store: Option<u32>,
    segment: u64,
) -> io::Result<Option<Found>> {
    const CHUNK_BYTES: u64 = 1 << 20;
    let mut at = offset;
    while at < len {
        let chunk = CHUNK_BYTES.min(len - at);
        let mut bytes = vec![0; chunk as usize];
        file.read_at(at, &mut bytes)?;
        for into in (0..bytes.len()).step_by(HEADER_BYTES) {
            if bytes.len() - into >= HEADER_BYTES && Header::read(&bytes[into..], store, segment).is_some() {
                let found = read_record(file, len, at + into as u64, store, segment)?;
                if found.is_some() {
                    return Ok(found);
                }
            }
        }
        at += chunk;
    }
    Ok(None)
}

impl<M: Medium> Store<M> {
    /// Opens a store, new or old. `new_id` names it if it is new.
    ///
    /// # Errors
    /// When segments cannot be read, or were written by a newer program.
    pub fn open(medium: M, options: StoreOptions, new_id: u32) -> Result<Self, StoreError> {
        let mut store = Store {
            medium,
            options,
            id: new_id,
            segments: BTreeMap::new(),
            active: None,
            staged: Vec::new(),
            group: 1,
            journals: BTreeMap::new(),
            by_name: HashMap::new(),
            next_id: 0,
            is_cleaning: false,
            failed: None,
            counters: StoreCounters::default(),
        };
        store.scan().map_err(|error| StoreError::Failed(format!("reading the store failed: {error}")))?;
        Ok(store)
    }

    fn scan(&mut self) -> io::Result<()> {
        let numbers = self.medium.list()?;
        let mut id = None;
        for number in &numbers {
            let file = self.medium.open(*number)?;
            let len = file.len()?;
            self.segments.insert(*number, Segment { file, bytes: len, live_bytes: 0 });
            let is_last = Some(number) == numbers.last();
            let end = self.scan_segment(*number, len, &mut id, is_last)?;
            let Some(segment) = self.segments.get_mut(number) else { continue };
            if end == 0 && is_last {
                // It was being made when power was lost: nothing in it was acknowledged.
                self.segments.remove(number);
                self.medium.delete(*number)?;
            } else if end < len {
                segment.file.truncate(end)?;
                segment.bytes = end;
            }
        }
        if let Some(id) = id {
            self.id = id;
        }
        if self.counters.damaged_places > 0 {
            self.journals.values_mut().for_each(|journal| journal.is_suspect = true);
        }
        Ok(())
    }

    /// Reads one segment; gives where it ends.
    fn scan_segment(&mut self, number: u64, len: u64, id: &mut Option<u32>, is_last: bool) -> io::Result<u64> {
        let mut at = 0;
        let mut group: Option<u64> = None;
        loop {
            let file = &self.segments[&number].file;
            let found = match read_record(file, len, at, *id, number)? {
                Some(found) => found,
                None => {
                    let Some(found) = resynchronise(file, len, at, *id, number)? else { return Ok(at) };
                    let is_torn = group.is_some_and(|group| found.header.group <= group + 1);
                    if is_last && is_torn {
                        return Ok(at);
                    }
                    log::error!(
                        "the store is damaged: segment {number:016x}, bytes {at} to {}; what was there is lost",
                        found.offset
                    );
                    self.counters.damaged_places += 1;
                    found
                }
            };
            id.get_or_insert(found.header.store);
            group = Some(found.header.group);
            self.group = self.group.max(found.header.group + 1);
            at = found.end();
            self.apply(number, found);
        }
    }

    fn apply(&mut self, segment: u64, found: Found) {
        let Found { header, offset, payload } = found;
        let mut reader = Reader::new(&payload);
        match header.kind {
            Kind::Checkpoint => {
                let Some(next_id) = reader.u32() else { return };
                let Some(count) = reader.u32() else { return };
                self.next_id = self.next_id.max(next_id);
                let records: Vec<_> = (0..count).map_while(|_| JournalRecord::read(&mut reader)).collect();
                let gone: Vec<u32> = self
                    .journals
                    .keys()
                    .filter(|id| !records.iter().any(|record| record.id == **id))
                    .copied()
                    .collect();
                gone.into_iter().for_each(|id| self.remove_journal(id));
                records.into_iter().for_each(|record| self.set_journal(record));
            }
            Kind::Journal => {
                if let Some(record) = JournalRecord::read(&mut reader) {
                    self.set_journal(record);
                }
            }
            Kind::Delete => self.remove_journal(header.journal),
            Kind::Batch => {
                let Some(journal) = self.journals.get(&header.journal) else { return };
                if journal.record.is_live && journal.record.epoch == header.epoch {
                    let location = Location { segment, offset, payload_bytes: header.payload_bytes };
                    self.add_batch(header.journal, header.sequence, header.tail, location);
                }
            }
        }
    }
}
