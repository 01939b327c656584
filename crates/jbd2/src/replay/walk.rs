//! The scan pass: follow the log from its start and find where it ends.
//!
//! This is a transcription of outcomes, not of code: of `do_one_pass(PASS_SCAN)` as e2fsprogs 1.47 and Linux 6.x have it,
//! down to the cases that look like accidents (they are what a guest's own kernel does, and recovery must not be told
//! from that).

use super::log::{Content, LogRead, ReplayError};
use crate::checksum::crc32_be;
use crate::control::{Commit, Descriptor, Kind, Revoke, peek};
use crate::format::{Checksum, Format};

/// What was made of a commit block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The transaction counts.
    Committed,
    /// A checksum does not match and the commit is older than the one before: left over from an earlier use of the log.
    Stale,
    /// A checksum does not match: the log is damaged here, and ends here.
    Damaged,
    /// After a damaged commit; it does not count.
    AfterDamage,
}

/// Why the log ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// `s_start` is 0.
    Empty,
    /// The next block does not begin with the magic number.
    NotAControlBlock,
    /// The next block belongs to another transaction.
    OtherSequence {
        /// The one it belongs to.
        found: u32,
    },
    /// The next block is of no known kind.
    UnknownKind {
        /// Its kind.
        kind: u32,
    },
    /// The next transaction's checksums do not match, and it is older than the one before.
    Stale,
}

impl std::fmt::Display for End {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            End::Empty => f.write_str("the log is empty"),
            End::NotAControlBlock => f.write_str("the block is not a control block"),
            End::OtherSequence { found } => write!(f, "the block belongs to transaction {found}"),
            End::UnknownKind { kind } => write!(f, "the block is of unknown kind {kind}"),
            End::Stale => f.write_str("the commit's checksum does not match and it is older than the one before"),
        }
    }
}

/// Where a walk ended, and what it found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Walk {
    /// `s_sequence`: the first transaction that was looked for.
    pub first_sequence: u32,
    /// The first transaction that does not count. What counts is `first_sequence..end_sequence`, modulo 2^32.
    pub end_sequence: u32,
    /// A transaction whose commit is there but damaged: corruption must be reported.
    pub failed_commit: Option<u32>,
    /// Log block where the walk ended.
    pub end_position: u32,
    /// Why it ended there.
    pub end: End,
}

impl Walk {
    /// Number of transactions that count.
    pub fn transactions(&self) -> u32 {
        self.end_sequence.wrapping_sub(self.first_sequence)
    }

    /// What `s_sequence` becomes once the log has been replayed: past every sequence number that is in the log.
    pub fn next_sequence(&self) -> u32 {
        self.end_sequence.wrapping_add(1)
    }
}

/// A control block that the walk came to.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// The log block.
    pub position: u32,
    /// How many log blocks after `s_start` it is.
    pub order: u64,
    /// The transaction that it belongs to.
    pub sequence: u32,
}

/// Is told of every control block, in log order. What it sees need not count: only the end of the walk tells.
///
/// # Examples
/// The home blocks that a log names, those of a transaction without a commit among them:
/// ```
/// use jbd2::build::{LogBuilder, SuperblockBuilder, Transaction};
/// use jbd2::{Content, Descriptor, LogRead, Place, ReplayError, Superblock, Visitor, walk};
/// # struct Memory(Vec<Vec<u8>>);
/// # impl LogRead for Memory {
/// #     type Error = std::convert::Infallible;
/// #     fn read(&mut self, position: u32, buffer: &mut [u8]) -> Result<Content, Self::Error> {
/// #         buffer.copy_from_slice(&self.0[position as usize]);
/// #         Ok(Content::Present)
/// #     }
/// # }
///
/// struct Homes(Vec<u64>);
///
/// impl<L: LogRead> Visitor<L> for Homes {
///     fn descriptor(
///         &mut self,
///         _log: &mut L,
///         _place: Place,
///         descriptor: &Descriptor<'_>,
///         _checksum_ok: bool,
///     ) -> Result<(), ReplayError<L::Error>> {
///         self.0.extend(descriptor.tags().map(|tag| tag.block));
///         Ok(())
///     }
/// }
///
/// let raw = SuperblockBuilder { maxlen: 64, start: 1, sequence: 7, ..Default::default() }.build();
/// let (superblock, format) = Superblock::parse(&raw)?;
/// let mut log = Memory(vec![vec![0; 4096]; 64]);
/// let mut builder = LogBuilder::new(format, 1, 7);
/// let writing = |home: u64| Transaction { blocks: vec![(home, vec![1; 4096])], ..Default::default() };
/// let mut sink = |position: u32, block: &[u8]| log.0[position as usize].copy_from_slice(block);
/// builder.transaction(&writing(50), &mut sink);
/// builder.body(&writing(60), &mut sink);
///
/// let mut homes = Homes(Vec::new());
/// let walked = walk(&mut log, &format, superblock.start, superblock.sequence, &mut homes)?;
/// assert_eq!(homes.0, [50, 60]);
/// assert_eq!(walked.transactions(), 1, "the second was never committed");
/// assert_eq!(walked.end_position, 6);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait Visitor<L: LogRead> {
    /// A descriptor. Its data blocks follow it: the n-th is `place.order + 1 + n`.
    ///
    /// # Errors
    /// Those of the log.
    fn descriptor(
        &mut self,
        _log: &mut L,
        _place: Place,
        _descriptor: &Descriptor<'_>,
        _checksum_ok: bool,
    ) -> Result<(), ReplayError<L::Error>> {
        Ok(())
    }

    /// A revoke block.
    ///
    /// # Errors
    /// Those of the log.
    fn revoke(
        &mut self,
        _log: &mut L,
        _place: Place,
        _revoke: &Revoke<'_>,
        _checksum_ok: bool,
    ) -> Result<(), ReplayError<L::Error>> {
        Ok(())
    }

    /// A commit block. `own_transaction_ends` is false when a damaged commit keeps the walk at the same sequence number.
    ///
    /// # Errors
    /// Those of the log.
    fn commit(
        &mut self,
        _log: &mut L,
        _place: Place,
        _commit: &Commit<'_>,
        _verdict: Verdict,
        _own_transaction_ends: bool,
    ) -> Result<(), ReplayError<L::Error>> {
        Ok(())
    }
}

/// Looks at nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoVisitor;

impl<L: LogRead> Visitor<L> for NoVisitor {}

/// After so many times round the log without an end, the log is damaged. (jbd2 would go on for ever.)
const ROUNDS_MAX: u64 = 4;

/// The most blocks that a log from `start` on can have without overlapping itself.
pub(super) fn longest_log(format: &Format, start: u32) -> u64 {
    u64::from(format.last - start.min(format.first))
}

/// Follows the log from block `start`, transaction `sequence`. An empty log (`start` 0) ends at once.
///
/// # Errors
/// When the log cannot be read, or jbd2 would fail the whole recovery.
pub fn walk<L: LogRead, V: Visitor<L>>(
    log: &mut L,
    format: &Format,
    start: u32,
    sequence: u32,
    visitor: &mut V,
) -> Result<Walk, ReplayError<L::Error>> {
    if start == 0 {
        return Ok(Walk {
            first_sequence: sequence,
            // jbd2 goes on with s_sequence + 1, as after a replay of nothing.
            end_sequence: sequence,
            failed_commit: None,
            end_position: 0,
            end: End::Empty,
        });
    }
    if start >= format.last {
        return Err(ReplayError::OutsideLog { position: u64::from(start) });
    }
    let walker = Walker {
        log,
        longest: longest_log(format, start),
        format,
        first: sequence,
        sequence,
        next: u64::from(start),
        walked: 0,
        end_sequence: 0,
        failed_commit: None,
        checksum: !0,
        checksum_known: true,
        control_damaged: false,
        last_seconds: 0,
        block: vec![0; format.block_size as usize],
        data: Vec::new(),
    };
    walker.run(visitor)
}

enum Step {
    On,
    End(End),
}

struct Walker<'a, L: LogRead> {
    log: &'a mut L,
    format: &'a Format,
    first: u32,
    sequence: u32,
    /// The most blocks that a log can have without overlapping itself.
    longest: u64,
    /// Log block that comes next. Beyond the journal only when a descriptor is damaged.
    next: u64,
    /// Log blocks passed since the start.
    walked: u64,
    /// As in jbd2, 0 says that it is not known yet.
    end_sequence: u32,
    failed_commit: Option<u32>,
    /// Checksum of kind 1 over the transaction so far.
    checksum: u32,
    /// False once a data block's bytes were not available: whoever held the log has verified it.
    checksum_known: bool,
    /// A descriptor's or revoke block's checksum did not match; only the transaction's commit time tells what it means.
    control_damaged: bool,
    last_seconds: u64,
    block: Vec<u8>,
    data: Vec<u8>,
}

impl<L: LogRead> Walker<'_, L> {
    fn run<V: Visitor<L>>(mut self, visitor: &mut V) -> Result<Walk, ReplayError<L::Error>> {
        loop {
            let place = self.read_next()?;
            if let Step::End(end) = self.step(place, visitor)? {
                let end_sequence = if self.end_sequence == 0 { self.sequence } else { self.end_sequence };
                return Ok(Walk {
                    first_sequence: self.first,
                    end_sequence,
                    failed_commit: self.failed_commit,
                    end_position: place.position,
                    end,
                });
            }
        }
    }

    fn read_next(&mut self) -> Result<Place, ReplayError<L::Error>> {
        if self.walked > ROUNDS_MAX * u64::from(self.format.length) {
            return Err(ReplayError::Endless { sequence: self.sequence });
        }
        let position = match u32::try_from(self.next) {
            Ok(position) if position < self.format.length => position,
            _ => return Err(ReplayError::OutsideLog { position: self.next }),
        };
        let mut block = std::mem::take(&mut self.block);
        let content = self.log.read(position, &mut block);
        self.block = block;
        match content.map_err(|source| ReplayError::Read { position, source })? {
            Content::Present => {}
            Content::AtHome => return Err(ReplayError::NotHeld { position }),
        }
        let order = self.walked;
        self.pass(1);
        Ok(Place { position, order, sequence: self.sequence })
    }

    /// Passes `count` blocks with at most one wrap, as jbd2 does.
    fn pass(&mut self, count: u64) {
        self.next += count;
        self.walked += count;
        if self.next >= u64::from(self.format.last) {
            self.next -= u64::from(self.format.log_blocks());
        }
    }

    fn step<V: Visitor<L>>(&mut self, place: Place, visitor: &mut V) -> Result<Step, ReplayError<L::Error>> {
        let Some(header) = peek(&self.block) else { return Ok(Step::End(End::NotAControlBlock)) };
        if header.sequence != self.sequence {
            return Ok(Step::End(End::OtherSequence { found: header.sequence }));
        }
        let block = std::mem::take(&mut self.block);
        let step = match header.kind {
            Kind::Descriptor => self.descriptor(place, &block, visitor),
            Kind::Revoke => self.revoke(place, &block, visitor),
            Kind::Commit => self.commit(place, &block, visitor),
            kind => Ok(Step::End(End::UnknownKind { kind: kind.number() })),
        };
        self.block = block;
        step
    }

    fn descriptor<V: Visitor<L>>(
        &mut self,
        place: Place,
        block: &[u8],
        visitor: &mut V,
    ) -> Result<Step, ReplayError<L::Error>> {
        let descriptor = Descriptor::new(self.format, block);
        let checksum_ok = descriptor.checksum_ok();
        self.control_damaged |= !checksum_ok;
        let tags = descriptor.tags().count() as u64;
        if self.format.checksum == Checksum::V1 && self.end_sequence == 0 {
            self.checksum = crc32_be(self.checksum, block);
            self.add_data(tags)?;
        } else {
            self.pass(tags);
        }
        visitor.descriptor(self.log, place, &descriptor, checksum_ok)?;
        Ok(Step::On)
    }

    /// Adds the next `count` blocks to the checksum of kind 1.
    fn add_data(&mut self, count: u64) -> Result<(), ReplayError<L::Error>> {
        self.data.resize(self.block_bytes(), 0);
        for _ in 0..count {
            let position = match u32::try_from(self.next) {
                Ok(position) if position < self.format.length => position,
                _ => return Err(ReplayError::OutsideLog { position: self.next }),
            };
            let content =
                self.log.read(position, &mut self.data).map_err(|source| ReplayError::Read { position, source })?;
            match content {
                Content::Present => self.checksum = crc32_be(self.checksum, &self.data),
                Content::AtHome => self.checksum_known = false,
            }
            self.pass(1);
        }
        Ok(())
    }

    fn block_bytes(&self) -> usize {
        self.format.block_size as usize
    }

    fn revoke<V: Visitor<L>>(
        &mut self,
        place: Place,
        block: &[u8],
        visitor: &mut V,
    ) -> Result<Step, ReplayError<L::Error>> {
        let revoke = Revoke::new(self.format, block);
        let checksum_ok = revoke.checksum_ok();
        self.control_damaged |= !checksum_ok;
        visitor.revoke(self.log, place, &revoke, checksum_ok)?;
        Ok(Step::On)
    }

    fn commit<V: Visitor<L>>(
        &mut self,
        place: Place,
        block: &[u8],
        visitor: &mut V,
    ) -> Result<Step, ReplayError<L::Error>> {
        let commit = Commit::new(self.format, block);
        let seconds = commit.seconds();
        let is_older = seconds < self.last_seconds;
        if self.control_damaged {
            if !is_older {
                visitor.commit(self.log, place, &commit, Verdict::Damaged, true)?;
                return Err(ReplayError::Checksum { sequence: self.sequence, position: place.position });
            }
            visitor.commit(self.log, place, &commit, Verdict::Stale, true)?;
            return Ok(Step::End(End::Stale));
        }
        let mut checksum_ok = commit.checksum_ok();
        if self.format.checksum == Checksum::V1 {
            if self.end_sequence != 0 {
                // A commit after a damaged one: it was no interrupted commit, the log is corrupt.
                self.failed_commit = Some(self.end_sequence);
                visitor.commit(self.log, place, &commit, Verdict::AfterDamage, false)?;
                return Ok(Step::On);
            }
            checksum_ok = !self.checksum_known || commit.transaction_checksum_ok(self.checksum);
            if checksum_ok {
                self.checksum = !0;
                self.checksum_known = true;
            }
        }
        let mut verdict = if self.end_sequence == 0 { Verdict::Committed } else { Verdict::AfterDamage };
        if !checksum_ok {
            if is_older {
                visitor.commit(self.log, place, &commit, Verdict::Stale, true)?;
                return Ok(Step::End(End::Stale));
            }
            self.end_sequence = self.sequence;
            verdict = Verdict::Damaged;
            if !self.format.async_commit {
                // The walk stays at this sequence number, so it ends at the next transaction.
                self.failed_commit = Some(self.sequence);
                visitor.commit(self.log, place, &commit, verdict, false)?;
                return Ok(Step::On);
            }
        }
        if verdict == Verdict::Committed && self.walked > self.longest {
            return Err(ReplayError::Endless { sequence: self.sequence });
        }
        self.last_seconds = seconds;
        self.sequence = self.sequence.wrapping_add(1);
        visitor.commit(self.log, place, &commit, verdict, true)?;
        Ok(Step::On)
    }
}
