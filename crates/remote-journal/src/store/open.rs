//! Opening a store: segments are read in order, a torn end is cut off, damage is told from it.
//!
//! The last group written before a crash may be torn: any of its sectors may be there or not. What tells damage from that:
//! * the end marks ([`EndMark`]): up to there everything was durable. A last segment that is missing, that ends earlier, or
//!   that is an older copy of itself is seen by them;
//! * every segment's first checkpoint, which says where the segments before it end;
//! * the groups' numbers: a group is written only when the one before is durable. So where a record cannot be read and a
//!   later group is there, something durable was damaged;
//! * a sector that gives an error.
//!
//! Damage is passed over, and the numbers of the batches show the hole. A batch whose header can still be read is known to be
//! lost; where not even that can be, every journal is in doubt until a later batch, checkpoint or end mark says where it
//! ended, and its end is refused. That doubt is written down with the journal, so that it outlives the damage.
//!
//! What must never happen: a file is cut or removed in which something lies that was not understood. Nothing at all is changed
//! before all of the store was read, and a store of another version is refused as it is.

use super::end_mark::{EndMark, MarkFound};
use super::medium::is_media_error;
use super::record::{HEADER_BYTES, Header, JournalRecord, Kind, record_bytes};
use super::staging::Staging;
use super::{Location, Medium, Segment, SegmentFile, Store, StoreCounters, StoreError, StoreOptions};
use crate::bytes::Reader;
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet, HashMap};
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

/// What is read with one error or none, in bytes.
const PIECE_BYTES: usize = 4096;

/// A segment while it is read.
struct Reading<'f, F> {
    file: &'f F,
    /// Bytes of it that count.
    len: u64,
    segment: u64,
    store: Option<u32>,
    /// Pieces that gave an error.
    unreadable: RefCell<BTreeSet<u64>>,
    /// Another version of the program wrote some of it.
    version: Cell<Option<u8>>,
}

impl<'f, F: SegmentFile> Reading<'f, F> {
    fn new(file: &'f F, len: u64, segment: u64, store: Option<u32>) -> Self {
        Reading { file, len, segment, store, unreadable: RefCell::default(), version: Cell::new(None) }
    }

    /// Reads what can be read; what cannot is zeros, and noted.
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        match self.file.read_at(offset, buffer) {
            Err(error) if is_media_error(&error) => {}
            read => return read,
        }
        let mut at = 0;
        while at < buffer.len() {
            let place = offset + at as u64;
            let len = (PIECE_BYTES - place as usize % PIECE_BYTES).min(buffer.len() - at);
            let piece = &mut buffer[at..at + len];
            match self.file.read_at(place, piece) {
                Err(error) if is_media_error(&error) => {
                    piece.fill(0);
                    if self.unreadable.borrow_mut().insert(place - place % PIECE_BYTES as u64) {
                        log::error!("segment {:016x} cannot be read at byte {place}: {error}", self.segment);
                    }
                }
                read => read?,
            }
            at += len;
        }
        Ok(())
    }

    fn header(&self, bytes: &[u8]) -> Option<Header> {
        let header = Header::read(bytes, self.store, self.segment);
        if header.is_none()
            && let Some(version) = Header::other_version(bytes, self.store)
        {
            self.version.set(Some(version));
        }
        header
    }

    /// The record at an offset.
    fn record(&self, offset: u64) -> io::Result<Option<Found>> {
        if offset + HEADER_BYTES as u64 > self.len {
            return Ok(None);
        }
        let mut header = [0; HEADER_BYTES];
        self.read_at(offset, &mut header)?;
        let Some(header) = self.header(&header) else { return Ok(None) };
        if offset + record_bytes(header.payload_bytes as usize) > self.len {
            return Ok(None);
        }
        let mut payload = vec![0; header.payload_bytes as usize];
        self.read_at(offset + HEADER_BYTES as u64, &mut payload)?;
        Ok(header.matches(&payload).then_some(Found { header, offset, payload }))
    }

    /// The next record that can be read, from `offset` on.
    fn next_record(&self, offset: u64) -> io::Result<Option<Found>> {
        const CHUNK_BYTES: u64 = 1 << 20;
        let mut at = offset;
        while at < self.len {
            let chunk = CHUNK_BYTES.min(self.len - at);
            let mut bytes = vec![0; chunk as usize];
            self.read_at(at, &mut bytes)?;
            for into in (0..bytes.len()).step_by(HEADER_BYTES) {
                if bytes.len() - into >= HEADER_BYTES && self.header(&bytes[into..]).is_some() {
                    let found = self.record(at + into as u64)?;
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
    fn is_torn(&self, group: Option<u64>, found: &Found) -> io::Result<bool> {
        let of_found = found.header.group;
        // A segment begins with a checkpoint alone in its group. A first record has only earlier groups before it.
        let Some(group) = group else { return Ok(false) };
        if of_found > group + 1 || (of_found > group && found.header.is_first) {
            return Ok(false);
        }
        let mut at = found.end();
        loop {
            let next = match self.record(at)? {
                Some(next) => next,
                None => match self.next_record(at)? {
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

    /// Whether nothing was ever written to it, as far as that can be seen.
    fn is_blank(&self) -> io::Result<bool> {
        let mut bytes = vec![0; 1 << 20];
        let mut at = 0;
        while at < self.len {
            let chunk = (bytes.len() as u64).min(self.len - at) as usize;
            self.read_at(at, &mut bytes[..chunk])?;
            if bytes[..chunk].iter().any(|byte| *byte != 0) {
                return Ok(false);
            }
            at += chunk as u64;
        }
        Ok(self.unreadable.borrow().is_empty())
    }
}

/// What is known of a store's end from outside of its segments.
#[derive(Default)]
struct Marks {
    /// The farther of the two.
    mark: Option<EndMark>,
    /// How many were there and are not marks of this version, or are missing beside the other.
    damaged: u64,
}

/// What one segment was found to be.
struct Scanned {
    /// Where it ends.
    end: u64,
    /// Whether anything could be read.
    is_read: bool,
    /// Whether something was lost in it.
    is_damaged: bool,
}

/// What was read of a store so far.
#[derive(Default)]
struct Survey {
    mark: Option<EndMark>,
    /// Whether what the end mark says of journals has been taken in.
    is_mark_applied: bool,
    /// Where segments end, say checkpoints of later ones.
    ends: BTreeMap<u64, u64>,
    /// Whether the newest checkpoint says that there are end marks.
    expects_marks: bool,
    id: Option<u32>,
    /// The last group that was read; 0 where nothing was.
    group: u64,
}

/// What a checkpoint says.
struct Checkpoint {
    next_id: u32,
    records: Vec<JournalRecord>,
    /// Whether there are end marks, and where segments end. The first version did not say.
    outside: Option<(bool, Vec<(u64, u64)>)>,
}

impl Checkpoint {
    fn read(payload: &[u8]) -> Option<Self> {
        let mut reader = Reader::new(payload);
        let (next_id, count) = (reader.u32()?, reader.u32()?);
        let records: Vec<_> = (0..count).map_while(|_| JournalRecord::read(&mut reader)).collect();
        let outside = reader.u8().zip(reader.u32()).map(|(flags, count)| {
            let ends = (0..count).map_while(|_| reader.u64().zip(reader.u64())).collect();
            (flags & 1 != 0, ends)
        });
        Some(Checkpoint { next_id, records, outside })
    }
}

fn other_version(version: impl std::fmt::Display) -> StoreError {
    StoreError::Refused(format!(
        "the store was written by another version of amberlog (its format is version {version}, this one reads {}): nothing \
         was changed; use the version that wrote it, or another directory",
        super::record::VERSION
    ))
}

impl<M: Medium> Store<M> {
    /// Opens a store, new or old. `new_id` names it if it is new.
    ///
    /// # Errors
    /// When segments cannot be read, or were written by another version of the program: nothing was changed then.
    pub fn open(medium: M, options: StoreOptions, new_id: u32) -> Result<Self, StoreError> {
        let mut store = Store {
            medium,
            options,
            id: new_id,
            segments: BTreeMap::new(),
            last_number: 0,
            active: None,
            staged: Staging::default(),
            written_bytes: 0,
            group: 1,
            mark: None,
            is_mark_loose: false,
            expects_marks: false,
            kept_bytes: 0,
            rotten: BTreeSet::new(),
            journals: BTreeMap::new(),
            by_name: HashMap::new(),
            batches_live: 0,
            next_id: 0,
            is_cleaning: false,
            failed: None,
            counters: StoreCounters::default(),
        };
        let failed = |error| StoreError::Failed(format!("reading the store failed: {error}"));
        let ends = store.scan(failed)?;
        store.cut_ends(&ends).map_err(failed)?;
        store.refill()?;
        Ok(store)
    }

    fn marks(&self) -> Result<Marks, StoreError> {
        let failed = |error| StoreError::Failed(format!("reading the end marks of the store failed: {error}"));
        let found = self.medium.read_end_marks().map_err(failed)?;
        let is_any = found.iter().any(Option::is_some);
        let mut marks = Marks::default();
        for bytes in found {
            match bytes.as_deref().map(EndMark::read) {
                Some(MarkFound::Whole(mark)) => {
                    let is_farther = marks.mark.as_ref().is_none_or(|other| mark.group > other.group);
                    if is_farther {
                        marks.mark = Some(mark);
                    }
                }
                Some(MarkFound::Version(version)) => return Err(other_version(version)),
                Some(MarkFound::Damaged) => marks.damaged += 1,
                None => marks.damaged += u64::from(is_any),
            }
        }
        Ok(marks)
    }

    /// Reads all of it, and changes nothing on the medium. Gives where segments end that can be cut there.
    fn scan(&mut self, failed: impl Fn(io::Error) -> StoreError) -> Result<BTreeMap<u64, u64>, StoreError> {
        let numbers = self.medium.list().map_err(&failed)?;
        let Marks { mark, damaged } = self.marks()?;
        if let (true, Some(mark)) = (numbers.is_empty(), mark.as_ref().filter(|mark| mark.segment > 0)) {
            return Err(StoreError::Damaged(format!(
                "the store's segments are gone: segment {:016x} was the last one. Put them back; or remove the store's end \
                 marks as well to begin an empty one",
                mark.segment
            )));
        }
        // Without one a record that a guest made up might be taken for the first.
        let id = mark.as_ref().filter(|mark| mark.segment > 0).map(|mark| mark.store);
        let mut survey = Survey { mark, ..Survey::default() };
        let mut lengths = BTreeMap::new();
        for number in &numbers {
            self.last_number = self.last_number.max(*number);
            match self.medium.open(*number).and_then(|file| Ok((file.len()?, file))) {
                Ok((bytes, file)) => {
                    lengths.insert(*number, bytes);
                    let segment = Segment { file, bytes, end: bytes, live_bytes: 0, is_reserve: false };
                    self.segments.insert(*number, segment);
                }
                Err(error) if is_media_error(&error) => {
                    log::error!("segment {number:016x} cannot be opened: {error}");
                }
                Err(error) => return Err(failed(error)),
            }
            self.ends_before(*number, &mut survey).map_err(&failed)?;
        }
        survey.id = survey.id.or(id);
        let mut cuts = BTreeMap::new();
        let mut unread = Vec::new();
        for number in &numbers {
            if survey.mark.as_ref().is_some_and(|mark| mark.segment < *number) {
                self.apply_mark(&mut survey);
            }
            let Some(len) = lengths.get(number) else {
                self.damage(format_args!("segment {number:016x} cannot be opened; what was in it is lost"));
                self.doubt_all();
                continue;
            };
            let is_last = Some(number) == numbers.last();
            let scanned = self.scan_segment(*number, *len, &mut survey, is_last)?;
            if !scanned.is_read {
                unread.push(*number);
            } else if scanned.end < *len && !scanned.is_damaged {
                cuts.insert(*number, scanned.end);
            }
            if let Some(segment) = self.segments.get_mut(number) {
                // Where it is damaged the rest stays as it is, and is damage the next time as well.
                segment.end = if scanned.is_damaged { *len } else { scanned.end };
            }
        }
        self.set_aside(&unread, &survey, &mut cuts).map_err(&failed)??;
        self.compare_with_marks(damaged, &mut survey);
        self.look_for_holes();
        if self.counters.damaged_places > 0 {
            self.journals.values_mut().for_each(|journal| journal.is_suspect = true);
        }
        if survey.expects_marks && survey.mark.is_none() {
            // Nothing is cut off where it is not known whether it was durable.
            cuts.retain(|_, end| *end == 0);
        }
        self.expects_marks = survey.expects_marks;
        self.mark = survey.mark;
        Ok(cuts)
    }

    /// Reads of a segment's first checkpoint where the earlier ones end.
    fn ends_before(&self, number: u64, survey: &mut Survey) -> io::Result<()> {
        let Some(segment) = self.segments.get(&number) else { return Ok(()) };
        let reading = Reading::new(&segment.file, segment.bytes, number, survey.id);
        let Some(found) = reading.record(0)? else { return Ok(()) };
        survey.id = Some(found.header.store);
        if found.header.kind != Kind::Checkpoint {
            return Ok(());
        }
        let Some((_, ends)) = Checkpoint::read(&found.payload).and_then(|checkpoint| checkpoint.outside) else {
            return Ok(());
        };
        // Whatever came later knew better; but only of what was there before it.
        survey.ends.extend(ends.into_iter().filter(|(before, _)| *before < number));
        Ok(())
    }

    fn damage(&mut self, what: std::fmt::Arguments<'_>) {
        log::error!("the store is damaged: {what}");
        self.counters.damaged_places += 1;
    }

    fn doubt_all(&mut self) {
        let live = self.journals.values_mut().filter(|journal| journal.record.is_live);
        live.for_each(|journal| journal.record.is_end_in_doubt = true);
    }

    /// Takes in what the end mark says of journals, once all before it has been read: what is missing of them shows as a
    /// hole, and of those of which nothing is missing nothing is in doubt.
    fn apply_mark(&mut self, survey: &mut Survey) {
        let Some(mark) = survey.mark.as_ref().filter(|mark| mark.store == self.id) else { return };
        if std::mem::replace(&mut survey.is_mark_applied, true) {
            return;
        }
        self.next_id = self.next_id.max(mark.next_id);
        for marked in mark.journals.iter().flatten() {
            let Some(journal) = self.journals.get_mut(&marked.id) else { continue };
            if journal.record.is_live && journal.record.epoch == marked.epoch {
                journal.record.last = journal.record.last.max(marked.last);
                journal.record.is_end_in_doubt = false;
            }
        }
    }

    /// Reads one segment.
    fn scan_segment(
        &mut self,
        number: u64,
        len: u64,
        survey: &mut Survey,
        is_last: bool,
    ) -> Result<Scanned, StoreError> {
        let failed = |error| StoreError::Failed(format!("reading the store failed: {error}"));
        let known_end = survey.ends.get(&number).copied();
        let marked_end = survey.mark.as_ref().filter(|mark| mark.segment == number).map(|mark| mark.end);
        let counts = known_end.map_or(len, |end| end.min(len));
        // Everything before this was durable.
        let durable = known_end.or(marked_end).unwrap_or(if is_last { 0 } else { counts });
        let mut at = 0;
        let mut group: Option<u64> = None;
        let mut is_damaged = false;
        let end = loop {
            if marked_end.is_some_and(|end| at >= end) {
                self.apply_mark(survey);
            }
            let Some(segment) = self.segments.get(&number) else { break at };
            let reading = Reading::new(&segment.file, counts, number, survey.id);
            let (found, later) = match reading.record(at).map_err(failed)? {
                Some(found) => (Some(found), None),
                None => (None, reading.next_record(at).map_err(failed)?),
            };
            if let Some(version) = reading.version.get() {
                return Err(other_version(version));
            }
            let has_errors = !reading.unreadable.borrow().is_empty();
            let found = match (found, later) {
                (Some(found), _) => found,
                (None, Some(found)) => {
                    if is_last && at >= durable && !has_errors && reading.is_torn(group, &found).map_err(failed)? {
                        break at;
                    }
                    self.damage(format_args!(
                        "segment {number:016x}, bytes {at} to {}; what was there is lost",
                        found.offset
                    ));
                    is_damaged = true;
                    // What the mark tells of is known once what was there before it has been taken for lost.
                    let split = marked_end.map_or(at, |end| end.clamp(at, found.offset));
                    self.note_damage(number, at, split, survey.id).map_err(failed)?;
                    if split > at && Some(split) == marked_end {
                        self.apply_mark(survey);
                    }
                    self.note_damage(number, split, found.offset, survey.id).map_err(failed)?;
                    found
                }
                (None, None) => {
                    // Of a segment that could not be read from its beginning the caller says what that means.
                    if at < durable.max(if has_errors { counts } else { 0 }) && group.is_some() {
                        self.damage(format_args!(
                            "segment {number:016x} ends at byte {at}, and byte {durable} was durable; what was there is lost"
                        ));
                        is_damaged = true;
                        self.note_damage(number, at, durable.max(counts), survey.id).map_err(failed)?;
                    }
                    break at;
                }
            };
            self.id = found.header.store;
            survey.id = Some(self.id);
            group = Some(found.header.group);
            survey.group = survey.group.max(found.header.group);
            self.group = self.group.max(found.header.group + 1);
            at = found.end();
            if found.header.kind == Kind::Checkpoint {
                survey.expects_marks =
                    Checkpoint::read(&found.payload).and_then(|of| of.outside).is_some_and(|(has_marks, _)| has_marks);
            }
            self.apply(number, found);
        };
        Ok(Scanned { end, is_read: group.is_some(), is_damaged })
    }

    /// Segments in which nothing could be read: one that nothing was ever written to is removed, as it was being made when
    /// power was lost; every other stays as it is, and is not used any more.
    fn set_aside(
        &mut self,
        unread: &[u64],
        survey: &Survey,
        cuts: &mut BTreeMap<u64, u64>,
    ) -> io::Result<Result<(), StoreError>> {
        let mut versions = Vec::new();
        let mut kept = Vec::new();
        for number in unread {
            let Some(segment) = self.segments.get(number) else { continue };
            let reading = Reading::new(&segment.file, segment.bytes, *number, None);
            let is_marked = survey.mark.as_ref().is_some_and(|mark| mark.segment == *number);
            let is_listed = survey.ends.get(number).is_some_and(|end| *end > 0);
            let is_torn = self.medium.proves_its_end() && *number == self.last_number;
            if (reading.is_blank()? && !is_marked && !is_listed) || is_torn {
                cuts.insert(*number, 0);
                continue;
            }
            let mut header = [0; HEADER_BYTES];
            if segment.bytes >= HEADER_BYTES as u64 {
                reading.read_at(0, &mut header)?;
            }
            versions.extend(Header::claimed_version(&header).filter(|version| *version != super::record::VERSION));
            kept.push(*number);
        }
        if survey.group == 0 && !kept.is_empty() {
            let error = match versions.first() {
                Some(version) => other_version(*version),
                None => StoreError::Damaged(format!(
                    "nothing can be read in the store: it has {} segments, and none of them is one. Nothing was changed; \
                     give another directory, or put it back from where it was copied",
                    kept.len()
                )),
            };
            return Ok(Err(error));
        }
        for number in kept {
            if let Some(segment) = self.segments.remove(&number) {
                self.kept_bytes += segment.bytes;
            }
            self.damage(format_args!(
                "nothing can be read in segment {number:016x}; it is left as it is, and what was in it is lost"
            ));
            if number == self.last_number {
                self.doubt_all();
            }
        }
        Ok(Ok(()))
    }

    /// Whether the store reaches as far as its end marks say.
    fn compare_with_marks(&mut self, damaged: u64, survey: &mut Survey) {
        if self.medium.proves_its_end() {
            return;
        }
        // The first ones may have been on their way when power was lost.
        for _ in (0..damaged).filter(|_| survey.expects_marks) {
            self.damage(format_args!("an end mark is missing, or is none"));
        }
        if let Some(mark) = survey.mark.take_if(|mark| survey.id.is_some_and(|id| id != mark.store)) {
            self.damage(format_args!("its end marks are those of another store ({:08x})", mark.store));
            survey.expects_marks = true;
        }
        let Some(mark) = survey.mark.clone() else {
            if survey.expects_marks {
                if damaged == 0 {
                    self.damage(format_args!("its end marks are missing"));
                }
                log::error!("whether the end of the store is there is not known");
                self.doubt_all();
            }
            return;
        };
        let reaches = match self.segments.get(&mark.segment) {
            Some(segment) => segment.end >= mark.end,
            None if mark.segment == 0 => survey.group >= mark.group,
            None => survey.group > mark.group,
        };
        if !reaches {
            self.damage(format_args!(
                "its end is missing: segment {:016x} was durable up to byte {}, group {}, and the last that is there is {}",
                mark.segment, mark.end, mark.group, survey.group
            ));
            self.doubt_all();
        }
        self.apply_mark(survey);
        self.group = self.group.max(mark.group + 1);
        self.last_number = self.last_number.max(mark.segment);
    }

    /// A segment that is missing shows as a hole in the journals that had batches there.
    fn look_for_holes(&mut self) {
        let is_whole = |journal: &super::Journal| {
            let record = &journal.record;
            let there = journal.batches.range(record.tail..).count() as u64;
            !record.is_live || there == (record.last + 1).saturating_sub(record.tail)
        };
        let holed: Vec<String> = self
            .journals
            .values()
            .filter(|journal| !is_whole(journal))
            .map(|journal| journal.record.name.clone())
            .collect();
        let is_explained = self.counters.damaged_places > 0;
        for name in holed {
            if is_explained {
                log::error!("batches of {name} are missing");
            } else {
                self.damage(format_args!("batches of {name} are missing"));
            }
        }
    }

    /// Cuts off what was torn, and removes what was never written to.
    fn cut_ends(&mut self, ends: &BTreeMap<u64, u64>) -> io::Result<()> {
        let reserve_bytes = self.reserve_bytes();
        for (number, end) in ends {
            if *end == 0 {
                self.segments.remove(number);
                self.medium.delete(*number)?;
                continue;
            }
            let Some(segment) = self.segments.get_mut(number) else { continue };
            // As long as a reserve, it may become one again, if there is no batch in it; the next segment says where it ends.
            let stays = if segment.live_bytes == 0 { reserve_bytes.max(*end) } else { *end };
            if segment.bytes > reserve_bytes {
                segment.file.truncate(stays)?;
                segment.bytes = stays;
            }
        }
        Ok(())
    }

    /// Notes what is lost between two offsets of a segment: the batches whose headers can be read, and whatever else it was.
    fn note_damage(&mut self, number: u64, start: u64, end: u64, store: Option<u32>) -> io::Result<()> {
        let mut at = start;
        let mut is_unknown = false;
        let mut lost = Vec::new();
        let Some(segment) = self.segments.get(&number) else { return Ok(()) };
        let reading = Reading::new(&segment.file, segment.bytes, number, store);
        while at + HEADER_BYTES as u64 <= end {
            let mut header = [0; HEADER_BYTES];
            if at + HEADER_BYTES as u64 > segment.bytes {
                is_unknown = true;
                break;
            }
            reading.read_at(at, &mut header)?;
            match reading.header(&header) {
                Some(header) => {
                    let after = at + record_bytes(header.payload_bytes as usize);
                    // A record that reaches into what can be read is none: its header lies in what is lost.
                    is_unknown |= after > end || !matches!(header.kind, Kind::Batch | Kind::Filler);
                    if after <= end {
                        lost.push(header);
                        at = after;
                        continue;
                    }
                }
                None => is_unknown = true,
            }
            at += HEADER_BYTES as u64;
        }
        lost.iter().for_each(|header| self.note_lost(header));
        if is_unknown {
            self.doubt_all();
        }
        Ok(())
    }

    fn apply(&mut self, segment: u64, found: Found) {
        let Found { header, offset, payload } = found;
        match header.kind {
            Kind::Checkpoint => {
                let Some(Checkpoint { next_id, records, .. }) = Checkpoint::read(&payload) else { return };
                self.next_id = self.next_id.max(next_id);
                let gone: Vec<u32> = self
                    .journals
                    .keys()
                    .filter(|id| !records.iter().any(|record| record.id == **id))
                    .copied()
                    .collect();
                gone.into_iter().for_each(|id| self.remove_journal(id));
                // Each says which batch was the last: what is missing shows as a hole from now on.
                records.into_iter().for_each(|record| self.set_journal(record));
            }
            Kind::Journal => {
                if let Some(record) = JournalRecord::read(&mut Reader::new(&payload)) {
                    self.set_journal(record);
                }
            }
            Kind::Delete => self.remove_journal(header.journal),
            Kind::Filler => {}
            Kind::Batch => {
                // Its number is never given out again, though what gave it out is lost.
                self.next_id = self.next_id.max(header.journal);
                let Some(journal) = self.journals.get_mut(&header.journal) else { return };
                if journal.record.is_live && journal.record.epoch == header.epoch {
                    // One that is not the next shows a hole, and one that is shows that there is none.
                    journal.record.is_end_in_doubt &= header.sequence <= journal.record.last;
                    let location = Location { segment, offset, payload_bytes: header.payload_bytes };
                    self.add_batch(header.journal, header.sequence, header.tail, location);
                }
            }
        }
    }
}
