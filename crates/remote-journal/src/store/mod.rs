//! The log-structured store: batches of all journals, appended to segments, made durable group by group.
//!
//! What must always hold:
//! * Nothing is acknowledged before [`Store::commit`] has returned, which is one `fdatasync` for everything that was staged
//!   since the last one.
//! * What was made durable is never written again, nor is a disk's sector that holds any of it: groups begin at multiples of
//!   the medium's blocks.
//! * A segment is deleted only after what made it dead is durable.
//! * A lost batch is never silent: the batches of an epoch are numbered without gaps, every checkpoint says which was the
//!   last, and [`Store::fetch`] refuses a journal with a hole in it.
//! * Only who was given the highest epoch writes: [`Store::append`] compares, and [`Store::take`] raises it.
//! * A live log gives way to the next one of who can name it, and to nobody else: [`Store::begin_after`] compares.
//!
//! Failure story: a full disk is found when a segment is made, before anything of an operation is staged, so that the
//! operation alone fails ([`StoreError::Full`]). When writing or `fdatasync` fails the store has failed for good: after
//! that nobody knows what is durable, so everything is refused until the store is opened again.

mod clean;
mod directory;
mod end_mark;
mod journal;
mod medium;
mod open;
mod record;
#[cfg(any(test, feature = "simulate"))]
mod simulated;
mod staging;
mod write;

pub use directory::Directory;
pub use journal::{JournalInfo, Location};
pub use medium::{Medium, SegmentFile};
#[cfg(any(test, feature = "simulate"))]
pub use simulated::{Simulated, SimulatedFile};

use journal::Journal;
use record::{Header, JournalRecord, Kind};
use staging::Staging;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;

/// Journals in one store.
pub const JOURNALS_MAX: usize = 8192;
/// Journals of one client.
pub const JOURNALS_OF_CLIENT_MAX: usize = 256;

/// What a batch counts as at least, where their number is bounded.
const BATCH_BYTES_MIN: u64 = 8192;
/// So many are always allowed, of a journal and in all.
const BATCHES_MIN: u64 = 4096;

/// Whose journal it is that is called so; nobody's in particular where clients have no names.
fn client_of(name: &str) -> &str {
    name.split_once('/').map_or("", |(client, _)| client)
}

/// How a store is bounded.
#[derive(Clone, Copy, Debug)]
pub struct StoreOptions {
    /// Bytes of a segment.
    pub segment_bytes: u64,
    /// Bytes of all segments together.
    pub space_bytes_max: u64,
    /// Live bytes of one journal.
    pub journal_bytes_max: u64,
}

impl Default for StoreOptions {
    fn default() -> Self {
        StoreOptions { segment_bytes: 64 << 20, space_bytes_max: 64 << 30, journal_bytes_max: 2 << 30 }
    }
}

/// Why the store refuses.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// Somebody else was given a higher epoch.
    #[error("epoch {given} may not write to {name}: epoch {fence} was given out after it")]
    Fenced {
        /// The journal.
        name: String,
        /// The writer's epoch.
        given: u64,
        /// The highest one.
        fence: u64,
    },
    /// No room.
    #[error("the journal server is full: {0}")]
    Full(String),
    /// A batch is missing or damaged.
    #[error("{0}")]
    Damaged(String),
    /// Not there, or not as asked for.
    #[error("{0}")]
    Refused(String),
    /// Storage failed; sticky.
    #[error("the journal server's storage failed: {0}")]
    Failed(String),
}

struct Segment<F> {
    file: F,
    /// Bytes that it takes on the disk.
    bytes: u64,
    /// Where its last group ends, once it is not written any more.
    end: u64,
    live_bytes: u64,
    /// Made of a reserve: it has no batches.
    is_reserve: bool,
}

/// The store.
pub struct Store<M: Medium> {
    medium: M,
    options: StoreOptions,
    id: u32,
    segments: BTreeMap<u64, Segment<M::File>>,
    /// The highest number of a segment that is known to have been used.
    last_number: u64,
    /// The segment that is written, and where its next group begins.
    active: Option<(u64, u64)>,
    staged: Staging,
    /// Bytes of the group that is being staged that were written already.
    written_bytes: u64,
    group: u64,
    /// The last end mark.
    mark: Option<end_mark::EndMark>,
    /// Whether it is not known to be durable.
    is_mark_loose: bool,
    /// Whether some checkpoint says that there are end marks.
    expects_marks: bool,
    /// Bytes of segments in which nothing can be read.
    kept_bytes: u64,
    /// Segments with batches that could not be read when they were to be moved.
    rotten: BTreeSet<u64>,
    journals: BTreeMap<u32, Journal>,
    by_name: HashMap<String, u32>,
    /// Batches of all journals.
    batches_live: u64,
    next_id: u32,
    is_cleaning: bool,
    failed: Option<(io::ErrorKind, String)>,
    counters: StoreCounters,
}

/// What a store has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoreCounters {
    /// Groups made durable.
    pub groups: u64,
    /// Batches appended.
    pub batches: u64,
    /// Bytes of their payloads.
    pub payload_bytes: u64,
    /// Bytes written to segments.
    pub written_bytes: u64,
    /// Bytes of live batches that cleaning copied.
    pub cleaned_bytes: u64,
    /// Damaged places found at start.
    pub damaged_places: u64,
}

impl<M: Medium> Store<M> {
    /// What it has done.
    pub fn counters(&self) -> StoreCounters {
        self.counters
    }

    /// Bytes of all segments, and live bytes in them.
    pub fn space_bytes(&self) -> (u64, u64) {
        let live = self.segments.values().map(|segment| segment.live_bytes).sum();
        let used: u64 = self.segments.values().map(|segment| segment.bytes).sum();
        (used + self.kept_bytes + self.medium.reserved_bytes(), live)
    }

    /// How it has failed; then it refuses everything.
    pub fn failure(&self) -> Option<io::ErrorKind> {
        self.failed.as_ref().map(|(kind, _)| *kind)
    }

    fn check(&self) -> Result<(), StoreError> {
        self.failed.as_ref().map_or(Ok(()), |(_, reason)| Err(StoreError::Failed(reason.clone())))
    }

    fn fail(&mut self, what: &str, error: &io::Error) -> StoreError {
        let reason = format!("{what}: {error}; everything is refused until the store is opened again");
        log::error!("{reason}");
        self.failed = Some((error.kind(), reason.clone()));
        StoreError::Failed(reason)
    }

    fn journal(&self, name: &str) -> Result<&Journal, StoreError> {
        let id = self.by_name.get(name).ok_or_else(|| StoreError::Refused(format!("there is no journal {name}")))?;
        Ok(&self.journals[id])
    }

    /// Writes a journal's new state down and takes it over.
    fn change(&mut self, record: JournalRecord) -> Result<(), StoreError> {
        self.check()?;
        let mut payload = Vec::new();
        record.write(&mut payload);
        let header = self.header(Kind::Journal, record.id);
        self.stage(header, &payload)?;
        self.set_journal(record);
        Ok(())
    }

    /// Begins a new log in a journal, in the place of none but one of those with these nonces: a live one that the client
    /// cannot name is somebody else's. (One that was recovered is nobody's.) Who can name it has its disk, whatever the file
    /// system is called by now.
    ///
    /// # Errors
    /// Then, or when there is no room.
    pub fn begin_after(
        &mut self,
        name: &str,
        owner: [u8; 16],
        nonce: [u8; 16],
        epoch_min: u64,
        block_bytes: u32,
        after: &[[u8; 16]],
    ) -> Result<(u32, u64), StoreError> {
        let old = self.by_name.get(name).map(|id| &self.journals[id].record);
        if let Some(old) = old.filter(|old| old.is_live && !old.is_recovered && !after.contains(&old.nonce)) {
            return Err(StoreError::Refused(format!(
                "{name} holds a live log, epoch {}, that is not this disk's: of another host that runs it, or of a copy of it; \
                 if nobody needs that log, delete it with 'amberlog journal-server delete --force'",
                old.epoch
            )));
        }
        self.begin_anyway(name, owner, nonce, epoch_min, block_bytes)
    }

    /// The same for a client that cannot name a log, but says the last epoch that it was given: where that is not the one of
    /// the live log, or somebody has taken it since, it is refused. One that was given none is believed.
    ///
    /// # Errors
    /// Then, when another file system has it, or there is no room.
    pub fn begin(
        &mut self,
        name: &str,
        owner: [u8; 16],
        nonce: [u8; 16],
        epoch_min: u64,
        block_bytes: u32,
    ) -> Result<(u32, u64), StoreError> {
        let old = self.by_name.get(name).map(|id| &self.journals[id].record);
        if old.is_some_and(|old| old.is_live && !old.is_recovered && old.owner != owner) {
            return Err(StoreError::Refused(format!(
                "{name} holds the live journal of another file system; use another name, or delete it"
            )));
        }
        let is_anothers = |old: &&JournalRecord| (old.epoch, old.fence) != (epoch_min, epoch_min);
        if let Some(old) = old.filter(|old| epoch_min != 0 && old.is_live && !old.is_recovered).filter(is_anothers) {
            return Err(StoreError::Refused(format!(
                "{name} was begun or taken after epoch {epoch_min}, and is at epoch {}: whoever has it now keeps it",
                old.fence
            )));
        }
        self.begin_anyway(name, owner, nonce, epoch_min, block_bytes)
    }

    /// Begins a new log in a journal, made if there is none: everything older of it is stale from now on, and whoever
    /// wrote before is fenced off. Gives the epoch.
    fn begin_anyway(
        &mut self,
        name: &str,
        owner: [u8; 16],
        nonce: [u8; 16],
        epoch_min: u64,
        block_bytes: u32,
    ) -> Result<(u32, u64), StoreError> {
        self.check()?;
        let old = self.by_name.get(name).map(|id| self.journals[id].record.clone());
        let fence = old.as_ref().map_or(0, |old| old.fence);
        // Not the last one: its writer could not be fenced off.
        let Some(epoch) = fence.max(epoch_min).checked_add(1).filter(|epoch| *epoch < u64::MAX) else {
            return Err(StoreError::Refused(format!("{name} has no epoch left; delete it")));
        };
        let id = match &old {
            Some(old) => old.id,
            None => {
                self.make_room_for_journal(name)?;
                self.next_id += 1;
                self.next_id
            }
        };
        self.change(JournalRecord {
            id,
            name: name.to_owned(),
            owner,
            nonce,
            epoch,
            fence: epoch,
            block_bytes,
            is_live: true,
            is_recovered: false,
            tail: 1,
            last: 0,
            is_end_in_doubt: false,
        })?;
        if old.is_none() {
            self.refill()?;
        }
        Ok((id, epoch))
    }

    /// Fences off whoever writes this very log, for its recovery.
    ///
    /// # Errors
    /// When the journal holds another, or there is no room.
    pub fn take_log(&mut self, name: &str, epoch: u64, nonce: [u8; 16]) -> Result<JournalInfo, StoreError> {
        let record = &self.journal(name)?.record;
        if !record.is_live || (record.epoch, record.nonce) != (epoch, nonce) {
            return Err(StoreError::Refused(format!("{name} does not hold epoch {epoch} but {}", record.epoch)));
        }
        self.take(name)
    }

    /// A client that has as many journals as it may have loses the oldest that is over, or else the oldest that was recovered. Where
    /// the store has as many as it may have, and none of these is this client's, the client that has most that are over loses one.
    fn make_room_for_journal(&mut self, name: &str) -> Result<(), StoreError> {
        let client = client_of(name);
        let of_client: Vec<&Journal> =
            self.journals.values().filter(|journal| client_of(&journal.record.name) == client).collect();
        let has_room = of_client.len() < JOURNALS_OF_CLIENT_MAX;
        if self.journals.len() < JOURNALS_MAX && has_room {
            return Ok(());
        }
        let is_over = |journal: &&&Journal| !journal.record.is_live;
        let is_recovered = |journal: &&&Journal| journal.record.is_recovered;
        let own = of_client.iter().find(is_over).or_else(|| of_client.iter().find(is_recovered)).copied();
        let over = own.or_else(|| {
            let mut over: BTreeMap<&str, Vec<&Journal>> = BTreeMap::new();
            for journal in self.journals.values().filter(|journal| has_room && !journal.record.is_live) {
                over.entry(client_of(&journal.record.name)).or_default().push(journal);
            }
            over.into_values().max_by_key(Vec::len).and_then(|journals| journals.first().copied())
        });
        let over = over.map(|journal| journal.record.name.clone());
        match over {
            Some(over) => {
                log::info!("{over} is over, and forgotten to make room for {name}");
                self.delete(&over, false)
            }
            None => Err(StoreError::Full(format!(
                "there are too many journals ({JOURNALS_OF_CLIENT_MAX} live ones a client, {JOURNALS_MAX} in all)"
            ))),
        }
    }

    /// Fences off whoever writes to a journal, for its recovery.
    ///
    /// # Errors
    /// When there is no such journal, or no room, or no number that is higher than its writer's.
    pub fn take(&mut self, name: &str) -> Result<JournalInfo, StoreError> {
        let mut record = self.journal(name)?.record.clone();
        let Some(fence) = record.fence.checked_add(1) else {
            return Err(StoreError::Refused(format!("{name} has no epoch left; delete it")));
        };
        record.fence = fence;
        self.change(record)?;
        Ok(self.journal(name)?.info())
    }

    /// Gives a live log another nonce: whoever can name it by the one before does not take its place any more.
    ///
    /// # Errors
    /// When the journal holds another log, the writer was fenced off, or there is no room.
    pub fn rename(&mut self, name: &str, epoch: u64, nonce: [u8; 16], next: [u8; 16]) -> Result<(), StoreError> {
        let mut record = self.record_of(name, epoch, nonce, epoch)?;
        if next == nonce {
            return Ok(());
        }
        record.nonce = next;
        self.change(record)
    }

    /// Drops the log of an epoch: its writer needs it no more.
    ///
    /// # Errors
    /// When the journal holds another epoch's, the writer was fenced off, or there is no room.
    pub fn close(&mut self, name: &str, epoch: u64, nonce: [u8; 16]) -> Result<(), StoreError> {
        let mut record = self.record_of(name, epoch, nonce, epoch)?;
        record.is_live = false;
        self.change(record)
    }

    /// Who has taken a log (and was given `fence` for that) has recovered it: it is nobody's any more. It is kept until the
    /// next one begins, because which of two copies of a disk was the true one is sometimes found out later.
    ///
    /// # Errors
    /// When the journal holds another epoch's, somebody else has taken it since, or there is no room.
    pub fn recovered(&mut self, name: &str, epoch: u64, nonce: [u8; 16], fence: u64) -> Result<(), StoreError> {
        let mut record = self.record_of(name, epoch, nonce, fence)?;
        record.is_recovered = record.is_live;
        self.change(record)
    }

    fn record_of(&self, name: &str, epoch: u64, nonce: [u8; 16], fence: u64) -> Result<JournalRecord, StoreError> {
        let record = &self.journal(name)?.record;
        if (record.epoch, record.nonce) != (epoch, nonce) {
            return Err(StoreError::Refused(format!("{name} does not hold epoch {epoch} but {}", record.epoch)));
        }
        if record.fence != fence {
            return Err(StoreError::Fenced { name: name.to_owned(), given: fence, fence: record.fence });
        }
        Ok(record.clone())
    }

    /// Removes a journal. `even_live`: with a log that somebody may still need.
    ///
    /// # Errors
    /// When it is not there, or live.
    pub fn delete(&mut self, name: &str, even_live: bool) -> Result<(), StoreError> {
        self.check()?;
        let journal = self.journal(name)?;
        let id = journal.record.id;
        if journal.record.is_live && !journal.record.is_recovered && !even_live {
            return Err(StoreError::Refused(format!(
                "{name} holds a live log ({} batches): recover it, or delete it with --force",
                journal.batches.len()
            )));
        }
        let header = self.header(Kind::Delete, id);
        self.stage(header, &[])?;
        self.remove_journal(id);
        Ok(())
    }

    /// Stages a batch.
    ///
    /// # Errors
    /// When the writer is fenced off, the batch is not the next one, or there is no room.
    pub fn append(
        &mut self,
        journal: u32,
        epoch: u64,
        sequence: u64,
        tail: u64,
        payload: &[u8],
    ) -> Result<(), StoreError> {
        self.check()?;
        let Some(found) = self.journals.get(&journal) else {
            return Err(StoreError::Refused("the journal was deleted".to_owned()));
        };
        let record = &found.record;
        if !record.is_live || epoch != record.epoch || epoch != record.fence {
            return Err(StoreError::Fenced { name: record.name.clone(), given: epoch, fence: record.fence });
        }
        if found.is_suspect || record.is_end_in_doubt {
            return Err(StoreError::Damaged(format!(
                "the store was damaged when the server started; {} has to begin anew",
                record.name
            )));
        }
        if sequence != record.last + 1 || tail < record.tail || tail > sequence {
            return Err(StoreError::Refused(format!(
                "{}: batch {sequence} with tail {tail} cannot follow batch {} with tail {}",
                record.name, record.last, record.tail
            )));
        }
        let released: u64 = found.batches.range(..tail).map(|(_, location)| u64::from(location.payload_bytes)).sum();
        if found.bytes - released + payload.len() as u64 > self.options.journal_bytes_max {
            return Err(StoreError::Full(format!(
                "{} would hold more than {} bytes",
                record.name, self.options.journal_bytes_max
            )));
        }
        // Of each batch something is in memory, however small it is.
        let released = found.batches.range(..tail).count() as u64;
        let is_over =
            |batches: u64, bytes_max: u64| batches - released >= (bytes_max / BATCH_BYTES_MIN).max(BATCHES_MIN);
        if is_over(found.batches.len() as u64, self.options.journal_bytes_max)
            || is_over(self.batches_live, self.options.space_bytes_max)
        {
            return Err(StoreError::Full(format!(
                "{} would be kept in more batches than there is memory for: {} of its own, {} in all",
                record.name,
                found.batches.len(),
                self.batches_live
            )));
        }
        let header = Header { epoch, sequence, tail, ..self.header(Kind::Batch, journal) };
        let location = self.stage(header, payload)?;
        self.counters.batches += 1;
        self.counters.payload_bytes += payload.len() as u64;
        self.add_batch(journal, sequence, tail, location);
        Ok(())
    }

    /// One batch of a journal's epoch; nothing after the last. Everything staged is made durable first.
    ///
    /// # Errors
    /// When a batch is missing or damaged: it is never passed over.
    pub fn fetch(&mut self, name: &str, epoch: u64, sequence: u64) -> Result<Option<Vec<u8>>, StoreError> {
        self.commit()?;
        let journal = self.journal(name)?;
        let record = &journal.record;
        if !record.is_live || record.epoch != epoch {
            return Err(StoreError::Refused(format!("{name} does not hold epoch {epoch}")));
        }
        if sequence > record.last {
            if record.is_end_in_doubt {
                return Err(StoreError::Damaged(format!(
                    "{name}: the store was damaged when the server started, and what followed batch {} of epoch {epoch} may \
                     have been there; a log that may lack its end is not replayed",
                    record.last
                )));
            }
            return Ok(None);
        }
        let Some(location) = journal.batches.get(&sequence) else {
            return Err(StoreError::Damaged(format!(
                "{name}: batch {sequence} of {} to {} of epoch {epoch} is missing; nothing after it can be replayed",
                record.tail, record.last
            )));
        };
        self.read(location).map(Some).map_err(|reason| {
            StoreError::Damaged(format!("{name}: batch {sequence} of epoch {epoch} cannot be read: {reason}"))
        })
    }

    fn read(&self, location: &Location) -> Result<Vec<u8>, String> {
        let segment = self.segments.get(&location.segment).ok_or("its segment is gone")?;
        let mut header = [0; record::HEADER_BYTES];
        segment.file.read_at(location.offset, &mut header).map_err(|error| error.to_string())?;
        let header = Header::read(&header, Some(self.id), location.segment).ok_or("its header is damaged")?;
        let mut payload = vec![0; location.payload_bytes as usize];
        let at = location.offset + record::HEADER_BYTES as u64;
        segment.file.read_at(at, &mut payload).map_err(|error| error.to_string())?;
        if header.matches(&payload) { Ok(payload) } else { Err("its checksum does not match".to_owned()) }
    }

    /// One journal.
    ///
    /// # Errors
    /// When there is none of this name.
    pub fn info(&self, name: &str) -> Result<JournalInfo, StoreError> {
        Ok(self.journal(name)?.info())
    }

    /// All journals whose names begin with this.
    pub fn list(&self, prefix: &str) -> Vec<JournalInfo> {
        self.journals.values().filter(|journal| journal.record.name.starts_with(prefix)).map(Journal::info).collect()
    }
}
