//! Writing: records are staged, groups made durable, segments begun, ended and deleted.
//!
//! What must always hold: a segment has its name only once its first checkpoint is durable, so one in which nothing can be
//! read was damaged. The end mark is written after the group that it tells of is durable, and before anybody is told of it.
//! Two reserves, which batches never get, are for what frees room: when there is no room for a segment, a reserve becomes one;
//! as there is no batch in it, it is dead once the next one's checkpoint is durable, and becomes a reserve again. So taking,
//! closing, deleting and beginning go on without end in a store that is full, and after a restart.

use super::end_mark::{EndMark, MarkedJournal};
use super::medium::{Medium, SegmentFile};
use super::record::{HEADER_BYTES, Header, Kind, PAYLOAD_BYTES_MAX, record_bytes};
use super::staging::ALIGNMENT;
use super::{Location, Segment, Store, StoreError};
use std::io;

/// Room at the end of every segment that batches leave to what frees room.
const RESERVE_BYTES: u64 = 64 << 10;
/// Staged bytes that are written without waiting for the rest of their group.
const WRITE_BYTES: usize = 4 << 20;
/// The smallest segment that is tried when the disk is nearly full, in bytes.
const SEGMENT_BYTES_MIN: u64 = 256 << 10;
/// A reserve has room for this beside a checkpoint; and is a multiple of it, so that it seldom has to grow.
const RESERVE_STEP_BYTES: u64 = 64 << 10;

fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

impl<M: Medium> Store<M> {
    /// Stages one record; what it says holds once [`Store::commit`] has returned.
    pub(super) fn stage(&mut self, header: Header, payload: &[u8]) -> Result<Location, StoreError> {
        let needed = record_bytes(payload.len());
        let is_batch = header.kind == Kind::Batch;
        if !self.has_room_for(needed, is_batch) {
            self.roll(needed, is_batch)?;
        }
        let Some((number, end)) = self.active else {
            return Err(StoreError::Full("there is no segment to write to".to_owned()));
        };
        let offset = end + self.group_bytes();
        self.put(number, header, payload);
        if self.staged.len() >= WRITE_BYTES {
            self.write_staged()?;
        }
        Ok(Location { segment: number, offset, payload_bytes: payload.len() as u32 })
    }

    /// Whether the active segment has room for a record.
    fn has_room_for(&self, needed: u64, is_batch: bool) -> bool {
        let Some((number, end)) = self.active else { return false };
        let segment = &self.segments[&number];
        let reserve = if is_batch && !self.is_cleaning { RESERVE_BYTES } else { 0 };
        // With what may fill up the group.
        let group = self.group_bytes() + needed + ALIGNMENT as u64;
        !(is_batch && segment.is_reserve) && end + group + reserve <= segment.bytes
    }

    /// Bytes of the group that is being staged.
    fn group_bytes(&self) -> u64 {
        self.written_bytes + self.staged.len() as u64
    }

    fn put(&mut self, segment: u64, header: Header, payload: &[u8]) {
        let is_first = self.group_bytes() == 0;
        let header = Header { segment: segment as u32, group: self.group, store: self.id, is_first, ..header };
        self.staged.extend(&header.bytes(payload));
        self.staged.extend(payload);
        self.staged.pad_to(HEADER_BYTES);
    }

    /// Writes what is staged, in whole blocks; nothing waits until it is durable.
    fn write_staged(&mut self) -> Result<(), StoreError> {
        let Some((number, end)) = self.active else { return Ok(()) };
        let Some(segment) = self.segments.get_mut(&number) else { return Ok(()) };
        let block_bytes = self.medium.block_bytes();
        let whole = self.staged.len() / block_bytes * block_bytes;
        if let Err(error) = segment.file.write_at(end + self.written_bytes, &self.staged.bytes()[..whole]) {
            return Err(self.fail("writing a segment failed", &error));
        }
        self.staged.drop_first(whole);
        self.written_bytes += whole as u64;
        Ok(())
    }

    /// Goes on in a new segment. When there is no room for one, the old one stays, with its reserve; for anything but batches
    /// one of the two reserves is taken.
    fn roll(&mut self, needed: u64, is_batch: bool) -> Result<(), StoreError> {
        self.commit()?;
        let checkpoint = self.checkpoint();
        let least = needed + record_bytes(checkpoint.len()) + 2 * ALIGNMENT as u64 + RESERVE_BYTES;
        let number = self.last_number + 1;
        let (file, bytes, is_reserve) = match self.new_segment(number, least) {
            Ok((file, bytes)) => (file, bytes, false),
            Err(StoreError::Full(_)) if !is_batch => {
                let least = needed + record_bytes(checkpoint.len()) + 2 * ALIGNMENT as u64;
                match self.medium.create_from_reserve(number, least) {
                    Ok((file, bytes)) => (file, bytes, true),
                    Err(error) if is_full(&error) => {
                        return Err(StoreError::Full(format!("there is no reserve of {least} bytes: {error}")));
                    }
                    Err(error) => return Err(self.fail("taking a reserve failed", &error)),
                }
            }
            Err(error) => return Err(error),
        };
        if let Some((old, end)) = self.active.take()
            && let Some(segment) = self.segments.get_mut(&old)
        {
            segment.end = end;
            // A reserve keeps its room, to be one again.
            if !segment.is_reserve {
                segment.bytes = end;
                if let Err(error) = segment.file.truncate(end) {
                    return Err(self.fail("ending a segment failed", &error));
                }
            }
        }
        // Whoever reads a checkpoint that says that there are marks has to find them. Where they are missing, they may come back
        // only once it is written down which journals are in doubt for it.
        if self.mark.is_none() && !self.expects_marks {
            self.write_mark()?;
            self.settle()?;
        }
        self.last_number = number;
        self.segments.insert(number, Segment { file, bytes, end: 0, live_bytes: 0, is_reserve });
        self.active = Some((number, 0));
        let header = self.header(Kind::Checkpoint, 0);
        self.stage(header, &checkpoint)?;
        // Alone in its group: whatever is read after it was written after it was durable.
        self.flush_group()?;
        if let Err(error) = self.medium.publish(number) {
            return Err(self.fail("naming a segment failed", &error));
        }
        self.write_mark()?;
        self.settle()?;
        self.sweep()
    }

    /// Makes a segment as large as there is room for; nothing is known of it yet.
    fn new_segment(&mut self, number: u64, least: u64) -> Result<(M::File, u64), StoreError> {
        let mut bytes = self.options.segment_bytes.max(least);
        loop {
            let used = self.space_bytes().0;
            let made = if used + bytes > self.options.space_bytes_max {
                Err(io::Error::from(io::ErrorKind::StorageFull))
            } else {
                self.medium.create(number, bytes)
            };
            match made {
                Ok(file) => return Ok((file, bytes)),
                Err(error) if is_full(&error) => {
                    if bytes / 4 < least.max(SEGMENT_BYTES_MIN.min(self.options.segment_bytes)) {
                        return Err(StoreError::Full(format!("no room for another {bytes} bytes beside {used}")));
                    }
                    bytes /= 4;
                }
                Err(error) => return Err(self.fail("making a segment failed", &error)),
            }
        }
    }

    pub(super) fn header(&self, kind: Kind, journal: u32) -> Header {
        Header {
            kind,
            payload_bytes: 0,
            payload_crc: 0,
            journal,
            segment: 0,
            epoch: 0,
            sequence: 0,
            tail: 0,
            group: 0,
            store: 0,
            is_first: false,
        }
    }

    /// All journals; whether there are end marks; and where each segment ends, for as many as there is room for.
    fn checkpoint(&self) -> Vec<u8> {
        let mut payload = self.next_id.to_le_bytes().to_vec();
        payload.extend_from_slice(&(self.journals.len() as u32).to_le_bytes());
        self.journals.values().for_each(|journal| journal.record.write(&mut payload));
        payload.push(u8::from(!self.medium.proves_its_end()));
        let room = (PAYLOAD_BYTES_MAX as usize).saturating_sub(payload.len() + 4) / 16;
        let end = |number: &u64, segment: &Segment<M::File>| match self.active {
            Some((active, end)) if active == *number => end,
            _ => segment.end,
        };
        let newest = self.segments.iter().rev().take(room);
        payload.extend_from_slice(&(newest.len() as u32).to_le_bytes());
        for (number, segment) in newest {
            payload.extend_from_slice(&number.to_le_bytes());
            payload.extend_from_slice(&end(number, segment).to_le_bytes());
        }
        payload
    }

    /// Makes everything staged durable.
    ///
    /// # Errors
    /// Then nothing staged may be acknowledged, and the store has failed.
    pub fn commit(&mut self) -> Result<(), StoreError> {
        self.check()?;
        if self.group_bytes() == 0 {
            return Ok(());
        }
        self.flush_group()?;
        self.write_mark()?;
        self.sweep()
    }

    fn flush_group(&mut self) -> Result<(), StoreError> {
        let Some((number, end)) = self.active else { return Ok(()) };
        let past = self.group_bytes() as usize % self.medium.block_bytes();
        if past > 0 {
            // At least a header, as all records are multiples of one.
            let filler = vec![0; self.medium.block_bytes() - past - HEADER_BYTES];
            self.put(number, self.header(Kind::Filler, 0), &filler);
        }
        self.write_staged()?;
        let bytes = std::mem::take(&mut self.written_bytes);
        let Some(segment) = self.segments.get_mut(&number) else { return Ok(()) };
        if let Err(error) = segment.file.sync() {
            return Err(self.fail("making a segment durable failed", &error));
        }
        self.check_place()?;
        self.active = Some((number, end + bytes));
        self.group += 1;
        self.counters.groups += 1;
        self.counters.written_bytes += bytes;
        Ok(())
    }

    /// What is written where nobody will look for it is not durable.
    fn check_place(&mut self) -> Result<(), StoreError> {
        match self.medium.check() {
            Ok(()) => Ok(()),
            Err(error) => Err(self.fail("what was made durable would not be found again", &error)),
        }
    }

    /// Writes down how far everything is durable.
    fn write_mark(&mut self) -> Result<(), StoreError> {
        if self.medium.proves_its_end() {
            return Ok(());
        }
        let (segment, end) =
            self.active.or(self.mark.as_ref().map(|mark| (mark.segment, mark.end))).unwrap_or_default();
        let live = self.journals.values().filter(|journal| journal.record.is_live && !journal.record.is_end_in_doubt);
        let marked = |record: &super::record::JournalRecord| MarkedJournal {
            id: record.id,
            epoch: record.epoch,
            last: record.last,
        };
        let journals = Some(live.map(|journal| marked(&journal.record)).collect());
        let mark = EndMark { store: self.id, next_id: self.next_id, segment, end, group: self.group - 1, journals };
        let written = self.medium.write_end_mark(&mark.bytes());
        self.mark = Some(mark);
        self.is_mark_loose = true;
        match written {
            Ok(()) => Ok(()),
            // The one that is there says too little; that is no harm to what it is about.
            Err(error) if is_full(&error) => {
                log::warn!("how far the store has come cannot be written down: {error}");
                Ok(())
            }
            Err(error) => Err(self.fail("writing how far the store has come failed", &error)),
        }
    }

    /// Whether [`Store::settle`] has anything to do.
    pub fn is_unsettled(&self) -> bool {
        self.is_mark_loose && self.failed.is_none()
    }

    /// Makes durable what is known of how far the store has come. Nothing waits for it: to be called when there is nothing
    /// else to do, and every second or so.
    ///
    /// # Errors
    /// When storage failed.
    pub fn settle(&mut self) -> Result<(), StoreError> {
        self.check()?;
        if std::mem::take(&mut self.is_mark_loose)
            && let Err(error) = self.medium.sync_end_mark()
        {
            return Err(self.fail("making durable how far the store has come failed", &error));
        }
        Ok(())
    }

    /// To be called before the store is closed: what is staged is made durable, and a group behind it shows that it was, so
    /// that damage in it is not taken for a torn end, and outside of the segments it is written down where they end.
    ///
    /// # Errors
    /// As [`Store::commit`]; or when there is no room for that group, which may then be missing.
    pub fn end(&mut self) -> Result<(), StoreError> {
        self.commit()?;
        if self.active.is_none() {
            return self.settle();
        }
        let checkpoint = self.checkpoint();
        let header = self.header(Kind::Checkpoint, 0);
        let staged = self.stage(header, &checkpoint).and_then(|_| self.commit());
        self.settle().and(staged)
    }

    /// Bytes that a reserve should have: a checkpoint and some more.
    pub(super) fn reserve_bytes(&self) -> u64 {
        let checkpoint = record_bytes(self.checkpoint().len()) + 3 * ALIGNMENT as u64;
        checkpoint.next_multiple_of(RESERVE_STEP_BYTES) + RESERVE_STEP_BYTES
    }

    /// Sees to it that there are reserves, if there is room.
    pub(super) fn refill(&mut self) -> Result<(), StoreError> {
        self.check_place()?;
        match self.medium.reserve(self.reserve_bytes()) {
            Ok(()) => Ok(()),
            Err(error) if is_full(&error) => {
                log::warn!("there is no room for what should be kept for taking, closing and deleting: {error}");
                Ok(())
            }
            Err(error) => Err(self.fail("keeping a reserve failed", &error)),
        }
    }

    /// Deletes segments in which nothing is live.
    fn sweep(&mut self) -> Result<(), StoreError> {
        let active = self.active.map(|(number, _)| number);
        let dead: Vec<u64> = self
            .segments
            .iter()
            .filter(|(number, segment)| segment.live_bytes == 0 && Some(**number) != active)
            .map(|(number, _)| *number)
            .collect();
        // The newest segment's checkpoint says all that the dead ones say, so there has to be one.
        if active.is_none() || dead.is_empty() {
            return Ok(());
        }
        for number in dead {
            if let Err(error) = self.medium.delete(number) {
                return Err(self.fail("deleting a segment failed", &error));
            }
            self.segments.remove(&number);
        }
        self.refill()
    }
}
