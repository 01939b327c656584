//! How far a store has come, kept outside its segments: the last segment, where it ends, its last group, and the last batch
//! of each live journal. What is missing at the end of a store can be told from a torn end by nothing in the store itself.
//!
//! An end mark is one sector, so that it arrives whole or not at all, and there are two of the same content, so that one may be
//! damaged. It is written after the group it tells of is durable, so it never promises too much; it is itself made durable
//! when the store pauses, every second or so, with every new segment, and when the store is ended. So it says a little too
//! little after a loss of power, and nothing too little when a process dies.

use crate::bytes::Reader;

/// Bytes of an end mark: a sector.
pub const END_MARK_BYTES: usize = 512;
const MAGIC: &[u8; 8] = b"AMBL-END";
const VERSION: u32 = 1;
/// Journals that there is room for.
const JOURNALS_MAX: usize = 22;
const NOT_LISTED: u32 = u32::MAX;

/// A journal at the time of the mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MarkedJournal {
    /// Its number.
    pub id: u32,
    /// The epoch of its log.
    pub epoch: u64,
    /// Its last batch.
    pub last: u64,
}

/// How far a store was durable.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EndMark {
    /// Which store.
    pub store: u32,
    /// The highest number of a journal that was given out.
    pub next_id: u32,
    /// The last segment; 0 when there was none.
    pub segment: u64,
    /// Where its last group ends.
    pub end: u64,
    /// That group.
    pub group: u64,
    /// All live journals; nothing where there were too many to list.
    pub journals: Option<Vec<MarkedJournal>>,
}

/// What lies where a mark should.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MarkFound {
    /// A mark.
    Whole(EndMark),
    /// One of another version of the program.
    Version(u32),
    /// Nothing that can be read.
    Damaged,
}

impl EndMark {
    /// The mark as it is written.
    pub fn bytes(&self) -> [u8; END_MARK_BYTES] {
        let listed = self.journals.as_ref().filter(|journals| journals.len() <= JOURNALS_MAX);
        let mut out = MAGIC.to_vec();
        let count = listed.map_or(NOT_LISTED, |journals| journals.len() as u32);
        for word in [VERSION, self.store, self.next_id, count] {
            out.extend_from_slice(&word.to_le_bytes());
        }
        for word in [self.segment, self.end, self.group] {
            out.extend_from_slice(&word.to_le_bytes());
        }
        for journal in listed.into_iter().flatten() {
            out.extend_from_slice(&journal.id.to_le_bytes());
            out.extend_from_slice(&journal.epoch.to_le_bytes());
            out.extend_from_slice(&journal.last.to_le_bytes());
        }
        out.resize(END_MARK_BYTES - 4, 0);
        let crc = crc32c::crc32c(&out);
        out.extend_from_slice(&crc.to_le_bytes());
        out.try_into().expect("the fields are so many bytes")
    }

    /// Reads one.
    pub fn read(bytes: &[u8]) -> MarkFound {
        Self::read_fields(bytes).unwrap_or(MarkFound::Damaged)
    }

    fn read_fields(bytes: &[u8]) -> Option<MarkFound> {
        let (head, crc) = bytes.get(..END_MARK_BYTES)?.split_at(END_MARK_BYTES - 4);
        if !head.starts_with(MAGIC) || crc32c::crc32c(head).to_le_bytes() != crc {
            return None;
        }
        let mut reader = Reader::new(&head[MAGIC.len()..]);
        let version = reader.u32()?;
        if version != VERSION {
            return Some(MarkFound::Version(version));
        }
        let (store, next_id, count) = (reader.u32()?, reader.u32()?, reader.u32()?);
        let (segment, end, group) = (reader.u64()?, reader.u64()?, reader.u64()?);
        let journals = match count {
            NOT_LISTED => None,
            count => Some(
                (0..count.min(JOURNALS_MAX as u32))
                    .map(|_| Some(MarkedJournal { id: reader.u32()?, epoch: reader.u64()?, last: reader.u64()? }))
                    .collect::<Option<_>>()?,
            ),
        };
        Some(MarkFound::Whole(EndMark { store, next_id, segment, end, group, journals }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_is_read_as_it_was_written_or_not_at_all() {
        let journal = |id| MarkedJournal { id, epoch: u64::MAX - u64::from(id), last: 7 };
        for count in [0, 1, JOURNALS_MAX as u32] {
            let journals = Some((0..count).map(journal).collect());
            let mark = EndMark { store: 1, next_id: 2, segment: 3, end: 4096, group: 5, journals };
            let bytes = mark.bytes();
            assert_eq!(EndMark::read(&bytes), MarkFound::Whole(mark));
            for at in 0..END_MARK_BYTES {
                let mut bytes = bytes;
                bytes[at] ^= 4;
                assert_eq!(EndMark::read(&bytes), MarkFound::Damaged, "byte {at}");
            }
            assert_eq!(EndMark::read(&bytes[..100]), MarkFound::Damaged);
        }
        let many = (0..=JOURNALS_MAX as u32).map(journal).collect();
        let mark = EndMark { journals: Some(many), ..EndMark::default() };
        let MarkFound::Whole(read) = EndMark::read(&mark.bytes()) else { panic!("it is whole") };
        assert_eq!(read.journals, None, "some of them would be worse than none");
    }
}
