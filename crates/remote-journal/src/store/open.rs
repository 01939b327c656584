//! Opening a store: segments are read in order, a torn end is cut off, damage is told from it.
//!
//! The last group written before a crash may be torn: any of its sectors may be there or not. What tells damage from that
//! is the groups' numbers: a group is written only when the one before is durable. So where a record cannot be read and a
//! later group is there, something durable was damaged; it is passed over, and the numbers of the
//! batches show the hole. A batch whose header can still be read is known to be lost; where not even that can be, every
//! journal is in doubt until a later batch or checkpoint shows where it ended, and its end is refused. (Damage in the very
//! last group looks like a torn end, unless [`Store::end`] put another behind it: storage with checksums, or the JetStream
//! store, covers that.)

use super::record::{HEADER_BYTES, Header, JournalRecord, Kind, record_bytes};
use super::staging::Staging;
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

/// Whether what lies between a record of `group` and the record `found` may have been torn when power was lost, rather
/// than damaged after it was durable: only what is of the very last group may.
fn is_torn<F: SegmentFile>(
    file: &F,
    len: u64,
    group: Option<u64>,
    found: &Found,
    store: Option<u32>,
    segment: u64,
) -> io::Result<bool> {
    let of_found = found.header.group;
    // A segment begins with a checkpoint alone in its group. A first record has only earlier groups before it.
    let Some(group) = group else { return Ok(false) };
    if of_found > group + 1 || (of_found > group && found.header.is_first) {
        return Ok(false);
    }
    let mut at = found.end();
    loop {
        let next = match read_record(file, len, at, store, segment)? {
            Some(next) => next,
            None => match resynchronise(file, len, at, store, segment)? {
                Some(next) => next,
                None => return Ok(true),
            },
        };
        if next.header.group > of_found {
            return Ok(false);
        }
        at = next.end();
    }
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
            staged: Staging::default(),
            written_bytes: 0,
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
                    if is_last && is_torn(file, len, group, &found, *id, number)? {
                        return Ok(at);
                    }
                    log::error!(
                        "the store is damaged: segment {number:016x}, bytes {at} to {}; what was there is lost",
                        found.offset
                    );
                    self.counters.damaged_places += 1;
                    self.note_damage(number, at, found.offset)?;
                    found
                }
            };
            self.id = *id.get_or_insert(found.header.store);
            group = Some(found.header.group);
            self.group = self.group.max(found.header.group + 1);
            at = found.end();
            self.apply(number, found);
        }
    }

    /// Notes what is lost between two offsets of a segment: the batches whose headers can be read, and whatever else it was.
    fn note_damage(&mut self, number: u64, start: u64, end: u64) -> io::Result<()> {
        let mut at = start;
        let mut is_unknown = false;
        while at + HEADER_BYTES as u64 <= end {
            let mut header = [0; HEADER_BYTES];
            self.segments[&number].file.read_at(at, &mut header)?;
            match Header::read(&header, Some(self.id), number) {
                Some(header) => {
                    let after = at + record_bytes(header.payload_bytes as usize);
                    // A record that reaches into what can be read is none: its header lies in what is lost.
                    is_unknown |= after > end || !matches!(header.kind, Kind::Batch | Kind::Filler);
                    if after <= end {
                        self.note_lost(&header);
                        at = after;
                        continue;
                    }
                }
                None => is_unknown = true,
            }
            at += HEADER_BYTES as u64;
        }
        if is_unknown {
            self.journals.values_mut().for_each(|journal| journal.is_end_in_doubt = true);
        }
        Ok(())
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
                records.into_iter().for_each(|record| {
                    let id = record.id;
                    self.set_journal(record);
                    // It says which batch was the last: what is missing shows as a hole from now on.
                    if let Some(journal) = self.journals.get_mut(&id) {
                        journal.is_end_in_doubt = false;
                    }
                });
            }
            Kind::Journal => {
                if let Some(record) = JournalRecord::read(&mut reader) {
                    self.set_journal(record);
                }
            }
            Kind::Delete => self.remove_journal(header.journal),
            Kind::Filler => {}
            Kind::Batch => {
                let Some(journal) = self.journals.get_mut(&header.journal) else { return };
                if journal.record.is_live && journal.record.epoch == header.epoch {
                    // One that is not the next shows a hole, and one that is shows that there is none.
                    journal.is_end_in_doubt &= header.sequence <= journal.record.last;
                    let location = Location { segment, offset, payload_bytes: header.payload_bytes };
                    self.add_batch(header.journal, header.sequence, header.tail, location);
                }
            }
        }
    }
}
