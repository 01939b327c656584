//! Numbered, checksummed records, and the check that every acknowledged one is there and whole.
//!
//! A record is made of *cells* no larger than a file system block, each with its own stamp,
//! because atomicity after a crash is one file system block: a record that was being overwritten
//! may be old in one cell and new in the next.
//!
//! | bytes of a cell | content |
//! |---|---|
//! | 0..4 | "AREC" |
//! | 4..8 | CRC-32C of the cell with these four bytes zero |
//! | 8..16 | record number, little-endian |
//! | 16..20 | cell of the record |
//! | 20..24 | zero |
//! | 24.. | random bytes that follow from seed, record and cell |

use crate::Result;
use crate::options::Options;
use crate::random::Random;
use std::collections::BTreeMap;

const MAGIC: &[u8; 4] = b"AREC";
const HEADER: usize = 24;
/// What storage writes whole.
const SECTOR: usize = 512;

/// Where the next record goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Behind the last one.
    Append,
    /// Into a random one of this many slots, over what is there.
    Overwrite {
        /// The number of slots.
        slots: u64,
    },
}

/// All that decides where records are and what they hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordLayout {
    /// Bytes of a record, a multiple of `cell_bytes`.
    pub record_bytes: u64,
    /// Bytes of a cell: at most a file system block.
    pub cell_bytes: u64,
    /// Over how many files records are spread.
    pub files: u64,
    /// Where they go.
    pub order: Order,
    /// From which their content and places follow.
    pub seed: u64,
}

impl Default for RecordLayout {
    fn default() -> Self {
        Self { record_bytes: 4096, cell_bytes: 1024, files: 1, order: Order::Append, seed: 1 }
    }
}

/// One thing wrong with the records of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordFault {
    /// The acknowledged record that is missing or damaged.
    pub record: u64,
    /// What is there instead, and where.
    pub found: String,
}

/// The outcome of checking an image's records.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RecordVerdict {
    /// Acknowledged records that had to be there (those overwritten later excepted).
    pub expected: u64,
    /// How many of the expected ones are missing or damaged.
    pub faults_count: u64,
    /// The first of the faults.
    pub faults: Vec<RecordFault>,
    /// The highest record number seen.
    pub newest: Option<u64>,
}

impl RecordVerdict {
    /// Every acknowledged record is there and whole.
    pub fn is_good(&self) -> bool {
        self.faults_count == 0
    }

    fn fault(&mut self, record: u64, found: String) {
        self.faults_count += 1;
        if self.faults.len() < 20 {
            self.faults.push(RecordFault { record, found });
        }
    }
}

/// Of which record a cell that is not whole is, if of any: from its bytes, its number, and the record that is expected.
type Torn<'a> = dyn Fn(&[u8], u64, u64) -> Option<u64> + 'a;

impl RecordLayout {
    /// Reads `--record-bytes --cell-bytes --files --slots --seed`.
    pub fn from_options(options: &mut Options) -> Result<Self> {
        let default = Self::default();
        let cell_bytes = options.number("cell-bytes", default.cell_bytes, 32..=65536)?;
        let record_bytes = options.number("record-bytes", default.record_bytes, 32..=1 << 24)?;
        if record_bytes % cell_bytes != 0 {
            return Err(format!("--record-bytes {record_bytes} is no multiple of --cell-bytes {cell_bytes}"));
        }
        let slots = options.number("slots", 0, 0..=1 << 24)?;
        Ok(Self {
            record_bytes,
            cell_bytes,
            files: options.number("files", default.files, 1..=1000)?,
            order: if slots == 0 { Order::Append } else { Order::Overwrite { slots } },
            seed: options.number("seed", default.seed, 0..=u64::MAX)?,
        })
    }

    /// The options that [`Self::from_options`] reads back.
    pub fn to_options(&self) -> String {
        let slots = match self.order {
            Order::Append => 0,
            Order::Overwrite { slots } => slots,
        };
        format!(
            "--record-bytes {} --cell-bytes {} --files {} --slots {slots} --seed {}",
            self.record_bytes, self.cell_bytes, self.files, self.seed
        )
    }

    /// The name of a file of records.
    pub fn file_name(&self, file: u64) -> String {
        format!("records-{file}")
    }

    /// The place of a record: file, and offset in it.
    pub fn place(&self, record: u64) -> (u64, u64) {
        let slot = self.slot(record);
        (slot % self.files, (slot / self.files).saturating_mul(self.record_bytes))
    }

    fn slot(&self, record: u64) -> u64 {
        match self.order {
            Order::Append => record,
            Order::Overwrite { slots } => Random::of(self.seed, record).below(slots),
        }
    }

    fn cells(&self) -> u64 {
        self.record_bytes / self.cell_bytes
    }

    /// The bytes of a record.
    pub fn encode(&self, record: u64) -> Vec<u8> {
        (0..self.cells()).flat_map(|cell| self.encode_cell(record, cell)).collect()
    }

    fn encode_cell(&self, record: u64, cell: u64) -> Vec<u8> {
        let mut bytes = vec![0; usize::try_from(self.cell_bytes).expect("a cell is small")];
        bytes[..4].copy_from_slice(MAGIC);
        bytes[8..16].copy_from_slice(&record.to_le_bytes());
        bytes[16..20].copy_from_slice(&u32::try_from(cell).expect("few cells").to_le_bytes());
        Random::of(self.seed, record ^ (cell << 48)).fill(&mut bytes[HEADER..]);
        let sum = crc32c::crc32c(&bytes);
        bytes[4..8].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// The record number of a cell, if it is whole: recomputed byte for byte.
    pub(crate) fn decode_cell(&self, bytes: &[u8], cell: u64) -> Option<u64> {
        let record = u64::from_le_bytes(bytes.get(8..16)?.try_into().ok()?);
        (bytes == self.encode_cell(record, cell)).then_some(record)
    }

    /// Checks the files of an image (`None`: not there) against the last acknowledged record.
    /// All lower numbers must have been acknowledged too, as the writer does.
    pub fn check(&self, files: &[Option<Vec<u8>>], acknowledged: Option<u64>) -> RecordVerdict {
        self.check_each(files, acknowledged, &|_, _, _| None)
    }

    /// The same where data is not journaled, after a power cut: a cell that was being written over in place may be torn, each of its
    /// sectors (512 bytes) of the acknowledged record or of a later one, up to `newest`, the last that may have been begun.
    pub fn check_torn(&self, files: &[Option<Vec<u8>>], acknowledged: Option<u64>, newest: u64) -> RecordVerdict {
        self.check_each(files, acknowledged, &|bytes, cell, record| {
            let slot = self.slot(record);
            let later: Vec<Vec<u8>> = (record..=newest)
                .filter(|later| self.slot(*later) == slot)
                .map(|later| self.encode_cell(later, cell))
                .collect();
            let is_one_of = |at: usize, part: &[u8]| later.iter().any(|whole| whole[at..at + part.len()] == *part);
            let is_torn = (0..).step_by(SECTOR).zip(bytes.chunks(SECTOR)).all(|(at, part)| is_one_of(at, part));
            is_torn.then_some(record)
        })
    }

    fn check_each(&self, files: &[Option<Vec<u8>>], acknowledged: Option<u64>, torn: &Torn<'_>) -> RecordVerdict {
        let mut verdict = RecordVerdict::default();
        // The newest acknowledged record of every slot: that, or a newer one, must be there.
        let mut expected = BTreeMap::new();
        if let Some(last) = acknowledged {
            for record in 0..=last {
                expected.insert(self.slot(record), record);
            }
        }
        verdict.expected = expected.len() as u64;
        for (&slot, &record) in &expected {
            let (file, offset) = self.place(record);
            let content = usize::try_from(file).ok().and_then(|file| files.get(file)?.as_ref());
            let Some(content) = content else {
                verdict.fault(record, format!("{} is not there", self.file_name(file)));
                continue;
            };
            if let Err(found) = self.check_record(content, slot, (offset, record), torn, &mut verdict.newest) {
                verdict.fault(record, format!("{} at byte {offset}: {found}", self.file_name(file)));
            }
        }
        verdict
    }

    fn check_record(
        &self,
        content: &[u8],
        slot: u64,
        (offset, record): (u64, u64),
        torn: &Torn<'_>,
        newest: &mut Option<u64>,
    ) -> std::result::Result<(), String> {
        for cell in 0..self.cells() {
            let start = usize::try_from(offset + cell * self.cell_bytes).unwrap_or(usize::MAX);
            let end = start.saturating_add(usize::try_from(self.cell_bytes).unwrap_or(usize::MAX));
            let Some(bytes) = content.get(start..end) else {
                return Err(format!("the file ends at byte {}", content.len()));
            };
            match self.decode_cell(bytes, cell).or_else(|| torn(bytes, cell, record)) {
                None if bytes.iter().all(|&byte| byte == 0) => return Err(format!("cell {cell} is zeroes")),
                None => return Err(format!("cell {cell} is damaged")),
                Some(found) if found < record => {
                    return Err(format!("cell {cell} is of the older record {found}"));
                }
                Some(found) if self.slot(found) != slot => {
                    return Err(format!("cell {cell} is of record {found}, which belongs elsewhere"));
                }
                Some(found) => *newest = (*newest).max(Some(found)),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(layout: &RecordLayout, records: u64) -> Vec<Option<Vec<u8>>> {
        let mut files = vec![Vec::new(); usize::try_from(layout.files).unwrap()];
        for record in 0..records {
            let (file, offset) = layout.place(record);
            let (file, offset) = (usize::try_from(file).unwrap(), usize::try_from(offset).unwrap());
            let bytes = layout.encode(record);
            let content: &mut Vec<u8> = &mut files[file];
            content.resize(content.len().max(offset + bytes.len()), 0);
            content[offset..offset + bytes.len()].copy_from_slice(&bytes);
        }
        files.into_iter().map(Some).collect()
    }

    fn layouts() -> [RecordLayout; 2] {
        let append = RecordLayout { files: 3, record_bytes: 2048, ..RecordLayout::default() };
        let overwrite = RecordLayout { order: Order::Overwrite { slots: 10 }, ..append.clone() };
        [append, overwrite]
    }

    #[test]
    fn what_was_written_is_found_and_newer_ones_are_welcome() {
        for layout in layouts() {
            let files = written(&layout, 60);
            for acknowledged in [None, Some(0), Some(30), Some(59)] {
                let verdict = layout.check(&files, acknowledged);
                assert!(verdict.is_good(), "{verdict:?}");
            }
            assert_eq!(layout.check(&files, Some(59)).newest, Some(59));
        }
    }

    #[test]
    fn missing_damaged_and_stale_records_are_named() {
        for layout in layouts() {
            let files = written(&layout, 60);
            assert!(!layout.check(&files, Some(90)).is_good());
            let (file, offset) = layout.place(59);
            let mut damaged = files.clone();
            let at = usize::try_from(offset).unwrap() + 1500;
            damaged[usize::try_from(file).unwrap()].as_mut().unwrap()[at] ^= 1;
            let verdict = layout.check(&damaged, Some(59));
            assert_eq!(verdict.faults_count, 1, "{verdict:?}");
            assert_eq!(verdict.faults[0].record, 59);
            assert!(verdict.faults[0].found.contains("cell 1 is damaged"));
            let mut missing = files;
            missing[usize::try_from(file).unwrap()] = None;
            assert!(!layout.check(&missing, Some(59)).is_good());
        }
    }

    /// Slot by slot: a later record that is written over an acknowledged one, and torn; and an earlier one.
    #[test]
    fn a_torn_cell_may_be_of_later_records_and_not_of_earlier_ones() {
        let [_, layout] = layouts();
        let Order::Overwrite { slots } = layout.order else { panic!("{layout:?}") };
        let in_slot = |slot: u64| (0..60).filter(move |record| layouts()[1].slot(*record) == slot).collect::<Vec<_>>();
        let records = (0..slots).map(in_slot).find(|records| records.len() >= 3).unwrap();
        let [first, second, third] = records[..3] else { panic!("{records:?}") };
        let files = written(&layout, second + 1);
        let (file, offset) = layout.place(second);
        // The second sector of its first cell.
        let torn_with = |record: u64| {
            let mut files = files.clone();
            let at = usize::try_from(offset).unwrap() + SECTOR;
            let other = &layout.encode_cell(record, 0)[SECTOR..2 * SECTOR];
            files[usize::try_from(file).unwrap()].as_mut().unwrap()[at..at + SECTOR].copy_from_slice(other);
            files
        };
        assert!(layout.check_torn(&torn_with(third), Some(second), 59).is_good());
        assert!(!layout.check(&torn_with(third), Some(second)).is_good(), "nothing tears what is journaled");
        assert!(!layout.check_torn(&torn_with(third), Some(second), third - 1).is_good(), "it was not begun");
        assert!(!layout.check_torn(&torn_with(first), Some(second), 59).is_good());
        assert!(!layout.check_torn(&torn_with(second), Some(third), 59).is_good());
    }

    #[test]
    fn an_older_version_is_not_accepted() {
        let [_, layout] = layouts();
        let old = written(&layout, 59);
        let verdict = layout.check(&old, Some(59));
        assert_eq!(verdict.faults_count, 1, "{verdict:?}");
    }

    #[test]
    fn options_round_trip() {
        for layout in layouts() {
            let words = layout.to_options();
            let mut options = Options::parse(words.split_whitespace().map(str::to_owned)).unwrap();
            assert_eq!(RecordLayout::from_options(&mut options), Ok(layout));
        }
    }
}
