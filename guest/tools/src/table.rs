//! The files of the database load: a table of pages and a write-ahead log of frames, and the
//! check that a recovered database is the state after a transaction no older than the last
//! acknowledged one. The shape is SQLite's in WAL mode; the format is our own.
//!
//! Page: "APAG", CRC-32C, page number, transaction, random bytes that follow from seed, page and
//! transaction. Frame: 32 bytes ("AFRM", CRC-32C over frame and page, salt, page number,
//! transaction, 1 if it is the transaction's last) and a page. The log is written over from its
//! start after a checkpoint, with the next salt.

use crate::random::Random;
use std::collections::BTreeMap;

/// Bytes of a page.
pub const PAGE: usize = 4096;
/// Bytes of a frame: its header and a page.
pub const FRAME: usize = 32 + PAGE;
const PAGE_HEADER: usize = 24;
const TRANSACTION_PAGES_MAX: u64 = 8;

/// What a database load does is decided by its seed and the number of its pages.
#[derive(Clone, Copy, Debug)]
pub struct Table {
    /// From which transactions and contents follow.
    pub seed: u64,
    /// Pages of the table.
    pub pages: u64,
}

impl Table {
    /// The pages that a transaction writes, ascending; transactions count from 1.
    pub fn touched(&self, transaction: u64) -> Vec<u64> {
        let mut random = Random::of(self.seed, transaction);
        let count = 1 + random.below(TRANSACTION_PAGES_MAX);
        let mut pages: Vec<u64> = (0..count).map(|_| random.below(self.pages)).collect();
        pages.sort_unstable();
        pages.dedup();
        pages
    }

    /// A page as `transaction` leaves it.
    pub fn page(&self, page: u64, transaction: u64) -> Vec<u8> {
        let mut bytes = vec![0; PAGE];
        bytes[..4].copy_from_slice(b"APAG");
        bytes[8..16].copy_from_slice(&page.to_le_bytes());
        bytes[16..24].copy_from_slice(&transaction.to_le_bytes());
        Random::of(self.seed ^ page, transaction).fill(&mut bytes[PAGE_HEADER..]);
        let sum = crc32c::crc32c(&bytes);
        bytes[4..8].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// A frame of the log.
    pub fn frame(&self, salt: u32, page: u64, transaction: u64, last: bool) -> Vec<u8> {
        let mut bytes = vec![0; 32];
        bytes[..4].copy_from_slice(b"AFRM");
        bytes[8..12].copy_from_slice(&salt.to_le_bytes());
        bytes[12..20].copy_from_slice(&page.to_le_bytes());
        bytes[20..28].copy_from_slice(&transaction.to_le_bytes());
        bytes[28] = u8::from(last);
        bytes.extend_from_slice(&self.page(page, transaction));
        let sum = crc32c::crc32c(&bytes);
        bytes[4..8].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// Salt, page, transaction and last-mark of a frame, if it is one that we wrote.
    fn read_frame(&self, bytes: &[u8]) -> Option<(u32, u64, u64, bool)> {
        let salt = u32::from_le_bytes(bytes.get(8..12)?.try_into().ok()?);
        let page = u64::from_le_bytes(bytes.get(12..20)?.try_into().ok()?);
        let transaction = u64::from_le_bytes(bytes.get(20..28)?.try_into().ok()?);
        let last = bytes.get(28)? == &1;
        (bytes == self.frame(salt, page, transaction, last)).then_some((salt, page, transaction, last))
    }

    /// Recovers a database as its own start-up would, from the table and log files of an image,
    /// and checks it. Gives the transaction that it is the state after.
    pub fn check(&self, table: &[u8], log: &[u8], acknowledged: Option<u64>) -> Result<u64, String> {
        let mut replayed: BTreeMap<u64, u64> = BTreeMap::new();
        let mut open = Vec::new();
        let mut salt = None;
        let mut newest = 0;
        for bytes in log.chunks_exact(FRAME) {
            let Some((frame_salt, page, transaction, last)) = self.read_frame(bytes) else { break };
            if *salt.get_or_insert(frame_salt) != frame_salt {
                break;
            }
            open.push((page, transaction));
            if last {
                replayed.extend(open.drain(..));
                newest = newest.max(transaction);
            }
        }
        // What every page holds now: its version in the log, else that in the table.
        let mut found = Vec::new();
        for page in 0..self.pages {
            let version = match replayed.get(&page) {
                Some(&transaction) => transaction,
                None => self.read_page(table, page)?,
            };
            newest = newest.max(version);
            found.push(version);
        }
        if acknowledged.is_some_and(|last| newest < last) {
            return Err(format!(
                "the database is the state after transaction {newest}, but {} was acknowledged",
                acknowledged.unwrap_or_default()
            ));
        }
        let mut expected = vec![0; found.len()];
        for transaction in 1..=newest {
            for page in self.touched(transaction) {
                if let Some(version) = usize::try_from(page).ok().and_then(|page| expected.get_mut(page)) {
                    *version = transaction;
                }
            }
        }
        match expected.iter().zip(&found).position(|(expected, found)| expected != found) {
            None => Ok(newest),
            Some(page) => Err(format!(
                "page {page} is of transaction {}, and after transaction {newest} it should be of {}",
                found[page], expected[page]
            )),
        }
    }

    /// The transaction that a page of the table is of; 0 for one never written.
    fn read_page(&self, table: &[u8], page: u64) -> Result<u64, String> {
        let start = usize::try_from(page).unwrap_or(usize::MAX).saturating_mul(PAGE);
        let Some(bytes) = table.get(start..start.saturating_add(PAGE)) else {
            return if table.len() <= start {
                Ok(0)
            } else {
                Err(format!("the table ends within page {page}, at byte {}", table.len()))
            };
        };
        if bytes.iter().all(|&byte| byte == 0) {
            return Ok(0);
        }
        let transaction = u64::from_le_bytes(bytes[16..24].try_into().map_err(|_| "a short page")?);
        if bytes == self.page(page, transaction) {
            Ok(transaction)
        } else {
            Err(format!("page {page} of the table is damaged"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: Table = Table { seed: 3, pages: 20 };

    /// Table file after a checkpoint at `checkpoint`, log after that up to `last`.
    fn files(checkpoint: u64, last: u64) -> (Vec<u8>, Vec<u8>) {
        let mut table = vec![0; PAGE * 20];
        for transaction in 1..=checkpoint {
            for page in TABLE.touched(transaction) {
                let start = usize::try_from(page).unwrap() * PAGE;
                table[start..start + PAGE].copy_from_slice(&TABLE.page(page, transaction));
            }
        }
        let mut log = Vec::new();
        for transaction in checkpoint + 1..=last {
            let touched = TABLE.touched(transaction);
            for (index, &page) in touched.iter().enumerate() {
                log.extend(TABLE.frame(9, page, transaction, index + 1 == touched.len()));
            }
        }
        (table, log)
    }

    #[test]
    fn states_are_recognised_and_torn_tails_ignored() {
        let (table, mut log) = files(10, 20);
        assert_eq!(TABLE.check(&table, &log, Some(20)), Ok(20));
        log.truncate(log.len() - 100);
        assert_eq!(TABLE.check(&table, &log, Some(19)), Ok(19));
        assert!(TABLE.check(&table, &log, Some(20)).unwrap_err().contains("acknowledged"));
        let (table, _) = files(10, 10);
        assert_eq!(TABLE.check(&table, &[], Some(10)), Ok(10));
    }

    #[test]
    fn a_lost_or_damaged_page_is_named() {
        let (mut table, log) = files(30, 30);
        table[PAGE * 5 + 1000] ^= 1;
        assert!(TABLE.check(&table, &log, Some(30)).unwrap_err().contains("page 5"));
        table[PAGE * 5..PAGE * 6].fill(0);
        assert!(TABLE.check(&table, &log, Some(30)).unwrap_err().contains("page 5"));
    }
}
