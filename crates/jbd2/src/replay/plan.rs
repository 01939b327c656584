//! What a replay leaves at each home block, worked out before anything is written.
//!
//! jbd2 writes every copy in log order, so the last one that is neither revoked nor damaged stays. The plan finds that
//! copy without writing the others, and gives the home blocks in ascending order, so that they can be written in large
//! runs.
//!
//! Memory: 16 bytes per data block of the log, 4 per control block, whatever the log says. Revoke records are looked up
//! among the blocks that the log has copies of and never kept.

use super::fast_commit;
use super::log::{Content, LogRead, ReplayError};
use super::walk::{End, Place, Verdict, Visitor, Walk, longest_log, walk};
use crate::control::{Commit, Descriptor, MAGIC, Revoke, data_checksum_ok};
use crate::format::Format;
use crate::superblock::Superblock;

const ESCAPED: u32 = 1 << 31;
const REVOKED: u32 = 1 << 30;
const HIGH_MASK: u32 = REVOKED - 1;

/// One data block of the log.
#[derive(Clone, Copy, Debug)]
struct Entry {
    /// Upper half of the home block, and the two flags.
    high: u32,
    low: u32,
    /// Log blocks after `s_start`.
    order: u32,
    checksum: u32,
}

impl Entry {
    fn home(&self) -> u64 {
        u64::from(self.high & HIGH_MASK) << 32 | u64::from(self.low)
    }
}

/// What a replay does, in numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Summary {
    /// Where the log ended, and why.
    pub walk: Walk,
    /// Transactions that count.
    pub transactions: u32,
    /// Data blocks in those transactions.
    pub tags: u64,
    /// Home blocks that have a copy to be written.
    pub blocks: u64,
    /// Revoke records in those transactions.
    pub revoke_records: u64,
    /// Data blocks that are not written because of them.
    pub revoked: u64,
    /// Data blocks that belong outside the file system or into its journal. They are not written; the log is damaged.
    pub out_of_bounds: u64,
    /// Fast commits follow the log: a block replay alone would not bring the file system to its last state.
    pub fast_commits: bool,
}

impl Summary {
    /// Whether corruption has to be reported though the log can be replayed.
    pub fn is_damaged(&self) -> bool {
        self.walk.failed_commit.is_some() || self.out_of_bounds > 0
    }
}

/// A replay, worked out.
#[derive(Debug)]
pub struct Plan {
    format: Format,
    start: u32,
    /// Sorted by home block, then by age. Nothing revoked.
    entries: Vec<Entry>,
    /// For each transaction that counts, the order of its commit block.
    commits: Vec<u32>,
    summary: Summary,
}

impl Plan {
    /// Works out the replay of `log`, whose superblock is `superblock` and whose layout `format`. Blocks for which
    /// `is_home` says no are never written.
    ///
    /// # Errors
    /// When the log cannot be read, or jbd2 would fail the whole recovery: then nothing must be written.
    pub fn new<L: LogRead>(
        log: &mut L,
        superblock: &Superblock,
        format: &Format,
        is_home: &dyn Fn(u64) -> bool,
    ) -> Result<Plan, ReplayError<L::Error>> {
        let mut collector = Collector {
            is_home,
            entries: Vec::new(),
            revoke_blocks: Vec::new(),
            commits: Vec::new(),
            out_of_bounds: Vec::new(),
            order_limit: longest_log(format, superblock.start),
        };
        let walk = walk(log, format, superblock.start, superblock.sequence, &mut collector)?;
        let Collector { mut entries, mut revoke_blocks, mut commits, out_of_bounds, .. } = collector;
        commits.truncate(walk.transactions() as usize);
        let end = commits.last().copied().unwrap_or(0);
        entries.truncate(entries.partition_point(|entry| entry.order < end));
        revoke_blocks.truncate(revoke_blocks.partition_point(|order| *order < end));
        let tags = entries.len() as u64;
        let out_of_bounds = out_of_bounds.partition_point(|order| *order < end) as u64;
        let fast_commits = walk.end != End::Empty && fast_commit::are_live(log, format, walk.end_sequence)?;
        let summary = Summary {
            walk,
            transactions: walk.transactions(),
            tags: tags + out_of_bounds,
            blocks: 0,
            revoke_records: 0,
            revoked: 0,
            out_of_bounds,
            fast_commits,
        };
        let mut plan = Plan { format: *format, start: superblock.start, entries, commits, summary };
        plan.entries.sort_unstable_by_key(|entry| (entry.home(), entry.order));
        plan.revoke(log, &revoke_blocks)?;
        plan.drop_what_is_not_written();
        Ok(plan)
    }

    /// The revoke pass: marks the newest copy that each record covers.
    fn revoke<L: LogRead>(&mut self, log: &mut L, revoke_blocks: &[u32]) -> Result<(), ReplayError<L::Error>> {
        let mut block = vec![0; self.format.block_size as usize];
        for order in revoke_blocks {
            let position = self.position(*order);
            let content = log.read(position, &mut block).map_err(|source| ReplayError::Read { position, source })?;
            if content == Content::AtHome {
                return Err(ReplayError::NotHeld { position });
            }
            let transaction = self.transaction(*order);
            let records = Revoke::new(&self.format, &block).records().map_err(|source| ReplayError::RevokeCount {
                position,
                sequence: self.sequence(transaction),
                source,
            })?;
            self.summary.revoke_records += records.len() as u64;
            // A copy in the revoking transaction itself is revoked too.
            let commit = self.commits[transaction];
            for home in records {
                let after = self.entries.partition_point(|entry| (entry.home(), entry.order) < (home, commit));
                if let Some(entry) = after.checked_sub(1).map(|index| &mut self.entries[index])
                    && entry.home() == home
                {
                    entry.high |= REVOKED;
                }
            }
        }
        Ok(())
    }

    /// Keeps only copies that could be what stays at their home block.
    fn drop_what_is_not_written(&mut self) {
        let keep_older = self.format.has_block_checksums();
        let (mut blocks, mut revoked) = (0, 0);
        // From the newest copy of the last home block backwards.
        let mut home = None;
        let mut is_revoked = false;
        let mut has_newer = false;
        let mut kept = self.entries.len();
        for index in (0..self.entries.len()).rev() {
            let entry = self.entries[index];
            if home != Some(entry.home()) {
                home = Some(entry.home());
                is_revoked = false;
                has_newer = false;
            }
            is_revoked |= entry.high & REVOKED != 0;
            if is_revoked {
                revoked += 1;
                continue;
            }
            blocks += u64::from(!has_newer);
            if !has_newer || keep_older {
                kept -= 1;
                self.entries[kept] = entry;
            }
            has_newer = true;
        }
        self.entries.drain(..kept);
        self.entries.shrink_to_fit();
        self.summary.blocks = blocks;
        self.summary.revoked = revoked;
    }

    /// What the replay does, in numbers.
    pub fn summary(&self) -> &Summary {
        &self.summary
    }

    /// Layout of the journal.
    pub fn format(&self) -> &Format {
        &self.format
    }

    /// The home blocks that have a copy to be written, ascending.
    pub fn blocks(&self) -> Blocks<'_> {
        Blocks { plan: self, rest: &self.entries }
    }

    /// Tells `log` which of its blocks will be read to write what the plan says: those between the first and the last
    /// committed one, since their home blocks are in no such order.
    pub fn announce<L: LogRead>(&self, log: &mut L) {
        let Some(count) = self.commits.last() else { return };
        let before_wrap = (*count).min(self.format.last - self.start);
        log.will_read(self.start, before_wrap);
        if before_wrap < *count {
            log.will_read(self.format.first, count - before_wrap);
        }
    }

    fn position(&self, order: u32) -> u32 {
        self.format.advance(self.start, order)
    }

    fn transaction(&self, order: u32) -> usize {
        self.commits.partition_point(|commit| *commit < order)
    }

    fn sequence(&self, transaction: usize) -> u32 {
        self.summary.walk.first_sequence.wrapping_add(transaction as u32)
    }
}

/// Home blocks with their copies, ascending.
#[derive(Clone, Debug)]
pub struct Blocks<'a> {
    plan: &'a Plan,
    rest: &'a [Entry],
}

impl<'a> Iterator for Blocks<'a> {
    type Item = PlannedBlock<'a>;

    fn next(&mut self) -> Option<PlannedBlock<'a>> {
        let home = self.rest.first()?.home();
        let count = self.rest.iter().take_while(|entry| entry.home() == home).count();
        let (entries, rest) = self.rest.split_at(count);
        self.rest = rest;
        Some(PlannedBlock { plan: self.plan, entries, home })
    }
}

/// One home block and its copies in the log.
#[derive(Clone, Copy, Debug)]
pub struct PlannedBlock<'a> {
    plan: &'a Plan,
    entries: &'a [Entry],
    home: u64,
}

impl<'a> PlannedBlock<'a> {
    /// The file system block.
    pub fn home(&self) -> u64 {
        self.home
    }

    /// The newest copy: what is written, if its checksum is right.
    pub fn newest(&self) -> CopyInLog {
        self.copy(&self.entries[self.entries.len() - 1])
    }

    /// The copies that a replay would write one after the other, newest first. What stays is the first of them whose
    /// checksum is right. In journals without data checksums there is only one.
    pub fn copies(&self) -> impl Iterator<Item = CopyInLog> + use<'a> {
        let block = *self;
        self.entries.iter().rev().map(move |entry| block.copy(entry))
    }

    fn copy(&self, entry: &Entry) -> CopyInLog {
        CopyInLog {
            position: self.plan.position(entry.order),
            sequence: self.plan.sequence(self.plan.transaction(entry.order)),
            escaped: entry.high & ESCAPED != 0,
            checksum: entry.checksum,
        }
    }
}

/// A copy of a home block in the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyInLog {
    /// The log block.
    pub position: u32,
    /// The transaction that it belongs to.
    pub sequence: u32,
    /// Its first four bytes were replaced by zeros.
    pub escaped: bool,
    /// Its checksum, from its tag.
    pub checksum: u32,
}

impl CopyInLog {
    /// Verifies `data`, the log block as read, and turns it into what the home block shall hold. False, and `data` as it
    /// was, when the checksum is wrong.
    pub fn restore(&self, format: &Format, data: &mut [u8]) -> bool {
        if !data_checksum_ok(format, self.sequence, self.checksum, data) {
            return false;
        }
        if self.escaped {
            data[..4].copy_from_slice(&MAGIC.to_be_bytes());
        }
        true
    }
}

struct Collector<'a> {
    is_home: &'a dyn Fn(u64) -> bool,
    entries: Vec<Entry>,
    revoke_blocks: Vec<u32>,
    commits: Vec<u32>,
    out_of_bounds: Vec<u32>,
    /// What lies beyond cannot belong to a transaction that counts: the log would overlap itself.
    order_limit: u64,
}

impl<L: LogRead> Visitor<L> for Collector<'_> {
    fn descriptor(
        &mut self,
        _log: &mut L,
        place: Place,
        descriptor: &Descriptor<'_>,
        _checksum_ok: bool,
    ) -> Result<(), ReplayError<L::Error>> {
        for (tag, order) in descriptor.tags().zip(place.order + 1..) {
            if order >= self.order_limit {
                break;
            }
            let order = order as u32;
            if tag.block >> 32 > u64::from(HIGH_MASK) || !(self.is_home)(tag.block) {
                self.out_of_bounds.push(order);
                continue;
            }
            let escaped = if tag.escaped { ESCAPED } else { 0 };
            self.entries.push(Entry {
                high: (tag.block >> 32) as u32 | escaped,
                low: tag.block as u32,
                order,
                checksum: tag.checksum,
            });
        }
        Ok(())
    }

    fn revoke(
        &mut self,
        _log: &mut L,
        place: Place,
        _revoke: &Revoke<'_>,
        _checksum_ok: bool,
    ) -> Result<(), ReplayError<L::Error>> {
        if place.order < self.order_limit {
            self.revoke_blocks.push(place.order as u32);
        }
        Ok(())
    }

    fn commit(
        &mut self,
        _log: &mut L,
        place: Place,
        _commit: &Commit<'_>,
        _verdict: Verdict,
        own_transaction_ends: bool,
    ) -> Result<(), ReplayError<L::Error>> {
        if own_transaction_ends && place.order < self.order_limit {
            self.commits.push(place.order as u32);
        }
        Ok(())
    }
}
