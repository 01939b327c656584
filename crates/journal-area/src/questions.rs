//! What is asked of a log, and changes nothing.

use crate::area::{CommittedVersion, JournalArea, NotHome, Owed};
use crate::inflight::Writer;
use crate::jcb::{Counters, VmJcb};
use crate::location::{Location, Past};
use crate::logs::LogId;
use crate::table::Tail;
use std::ops::Range;

impl JournalArea {
    /// Whether the log is open.
    pub fn is_open(&self, id: LogId) -> bool {
        self.with(id, |jcb| jcb.is_open()).unwrap_or_default()
    }

    /// Whether the host is writing blocks of a log home.
    pub fn has_host_writes_in_flight(&self, id: LogId) -> bool {
        self.with_in_flight(id, |jcb| jcb.in_flight.has_host_writes()).unwrap_or_default()
    }

    /// Whether a home write of the guest's is on its way to storage.
    pub fn has_guest_writes_in_flight(&self, id: LogId) -> bool {
        self.with_in_flight(id, |jcb| jcb.in_flight.overlaps(&(0..u64::MAX), Some(Writer::Guest))).unwrap_or_default()
    }

    /// Whether a home write, the guest's or the host's, is on its way to storage.
    pub fn has_home_writes_in_flight(&self, id: LogId) -> bool {
        self.with_in_flight(id, |jcb| !jcb.in_flight.is_empty()).unwrap_or_default()
    }

    /// Whether the guest has written something past the journal of an open log over which a replay would write an older version: there,
    /// or perhaps, where an earlier worker died meanwhile.
    pub fn is_written_past(&self, id: LogId) -> bool {
        let is_any = |jcb: &VmJcb| jcb.is_open() && jcb.written_past().iter().any(|(_, past)| past.is_some());
        self.with(id, |jcb| is_any(jcb)).unwrap_or_default()
    }

    /// Whether anything committed is in pages of the guest, and nowhere else.
    pub fn retains_pages(&self) -> bool {
        self.logs.find(|_, jcb| jcb.retains_pages().then_some(())).is_some()
    }

    /// `LOG_OP_QUERY`: what a log owes.
    pub fn owed(&self, id: LogId) -> Owed {
        let owed = self.with(id, |jcb| {
            // What is kept block for block is not for us to write home.
            let blocks = if jcb.contradiction.is_some() { 0 } else { jcb.owed_blocks() };
            Owed {
                is_open: jcb.is_open(),
                blocks,
                bytes: blocks * u64::from(jcb.shape.block_bytes),
                stored_blocks: jcb.stored_versions,
                writable: if jcb.contradiction.is_some() { 0 } else { jcb.writable_blocks() },
                materialise: jcb.table.is_materialise(),
            }
        });
        owed.unwrap_or_default()
    }

    /// Whether there is such a block of which nobody knows what is newer, it or the journal's version.
    pub fn is_past_unknown(&self, id: LogId) -> bool {
        let is_any =
            |jcb: &VmJcb| jcb.is_open() && jcb.written_past().iter().any(|(_, past)| *past == Some(Past::Begun));
        self.with(id, |jcb| is_any(jcb)).unwrap_or_default()
    }

    /// Why the home blocks of an open log are not all that its guest has committed, though the host has nothing left to write there.
    pub fn why_not_home(&self, id: LogId) -> Option<NotHome> {
        let why = |jcb: &VmJcb| {
            if !jcb.is_open() {
                None
            } else if jcb.table.is_materialise() || jcb.contradiction.is_some() {
                Some(NotHome::Uninterpreted)
            } else if jcb.is_torn {
                Some(NotHome::Torn)
            } else {
                let stored = Some(jcb.stored_or_unread(&self.pages)).filter(|blocks| *blocks > 0).map(NotHome::Stored);
                stored.or_else(|| {
                    Some(jcb.versions_unknown().len() as u64).filter(|blocks| *blocks > 0).map(NotHome::Unknown)
                })
            }
        };
        self.with(id, |jcb| why(jcb)).flatten()
    }

    /// Copies a committed version out as it belongs home, or says where it is. `sequence` is its transaction's.
    pub fn version(&self, id: LogId, position: u32, sequence: u32, buffer: &mut [u8]) -> CommittedVersion {
        let version = |jcb: &mut VmJcb| {
            if !jcb.is_newest(position) || jcb.sequence_of(position) != Some(sequence) {
                return CommittedVersion::Gone;
            }
            match jcb.location(position) {
                Location::Home => {
                    jcb.home_of(&self.pages, position).map_or(CommittedVersion::Gone, CommittedVersion::Home)
                }
                Location::Storage => CommittedVersion::Stored { is_escaped: jcb.is_escaped(position) },
                _ if jcb.read_version(&self.pages, position, buffer) => CommittedVersion::Copied,
                _ => CommittedVersion::Gone,
            }
        };
        self.with(id, version).unwrap_or(CommittedVersion::Gone)
    }

    /// The number of the next transaction of an open log.
    pub fn next_sequence(&self, id: LogId) -> Option<u32> {
        self.with(id, |jcb| jcb.is_open().then_some(jcb.cursor.sequence)).flatten()
    }

    /// The newest committed versions that are not at home: transaction, home block, log block; by transaction, the oldest first.
    pub fn versions_owed(&self, id: LogId) -> Vec<(u32, u64, u32)> {
        self.with(id, |jcb| jcb.versions_owed()).unwrap_or_default()
    }

    /// The newest committed versions that are at home, likewise.
    pub fn versions_at_home(&self, id: LogId) -> Vec<(u32, u64, u32)> {
        self.with(id, |jcb| jcb.versions_at_home()).unwrap_or_default()
    }

    /// Of [`JournalArea::versions_owed`] the home blocks that the guest has written past its journal since, or may have; nothing where no
    /// more is known.
    pub fn written_past(&self, id: LogId) -> Vec<(u64, Option<Past>)> {
        self.with(id, |jcb| jcb.written_past()).unwrap_or_default()
    }

    /// The newest committed versions of these blocks, wherever they are: home block, transaction, log block, and whether it is written down
    /// that the guest has asked to write over it.
    pub fn newest_versions(&self, id: LogId, blocks: &Range<u64>) -> Vec<(u64, u32, u32, bool)> {
        self.with(id, |jcb| jcb.newest_versions(blocks)).unwrap_or_default()
    }

    /// Those of which [`NotHome::Unknown`] speaks: home block, and content as it belongs there. Nothing where that is more than `bytes_max`, or
    /// the books do not say what is committed. What a recovery would write home at this moment is these, beside what is at home.
    pub fn versions_unknown(&self, id: LogId, bytes_max: u64) -> Option<Vec<(u64, Vec<u8>)>> {
        let contents = |jcb: &mut VmJcb| {
            let unknown = jcb.versions_unknown();
            let is_too_much = unknown.len() as u64 * u64::from(jcb.shape.block_bytes) > bytes_max;
            if is_too_much || jcb.contradiction.is_some() || jcb.is_torn || jcb.table.is_materialise() {
                return None;
            }
            let content = |(block, position)| {
                let mut content = vec![0; jcb.shape.block_bytes as usize];
                jcb.read_version(&self.pages, position, &mut content).then_some((block, content))
            };
            unknown.into_iter().map(content).collect()
        };
        self.with(id, contents).flatten()
    }

    /// The counters of a log.
    pub fn counters(&self, id: LogId) -> Counters {
        self.with(id, |jcb| jcb.counters_now()).unwrap_or_default()
    }

    /// Where the live log of `id` begins.
    pub fn tail(&self, id: LogId) -> Option<Tail> {
        self.with(id, |jcb| jcb.table.tail()).flatten()
    }
}
