//! A log as it is: every transaction with what it holds and which checksums match, one after the other.
//!
//! Nothing is kept between transactions, and of one transaction no more than [`REVOKES_KEPT`] revoke records and as many
//! tags as the log has blocks.

use crate::control::{Commit, Descriptor, Revoke, Tag, data_checksum_ok};
use crate::format::Format;
use crate::replay::{Content, LogRead, Place, ReplayError, Verdict, Visitor, Walk, walk};
use crate::superblock::Superblock;

/// Of one transaction, so many revoke records are kept; the others are counted.
pub const REVOKES_KEPT: usize = 1 << 16;

/// A data block of a transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InspectedTag {
    /// The log block.
    pub position: u32,
    /// Its tag.
    pub tag: Tag,
    /// Whether its checksum matches; nothing where there is none, or it was not asked for.
    pub checksum_ok: Option<bool>,
}

/// How a transaction ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InspectedCommit {
    /// The commit block.
    pub position: u32,
    /// Commit time, seconds since 1970.
    pub seconds: u64,
    /// Commit time, nanoseconds within the second.
    pub nanoseconds: u32,
    /// What is made of it.
    pub verdict: Verdict,
}

/// A transaction as it is in the log.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct InspectedTransaction {
    /// Its sequence number.
    pub sequence: u32,
    /// Its first log block.
    pub position: u32,
    /// Number of descriptor blocks.
    pub descriptors: u32,
    /// Those whose checksum does not match.
    pub descriptors_damaged: u32,
    /// Its data blocks.
    pub tags: Vec<InspectedTag>,
    /// Number of revoke blocks.
    pub revoke_blocks: u32,
    /// Those whose checksum or count is wrong.
    pub revoke_blocks_damaged: u32,
    /// Number of revoke records.
    pub revoke_records: u64,
    /// The first of them.
    pub revokes: Vec<u64>,
    /// Its commit; nothing when it was never committed.
    pub commit: Option<InspectedCommit>,
}

/// Shows every transaction of a log to `each`, in log order, the last one even when it has no commit. With `check_data`
/// every data block is read and its checksum compared.
///
/// # Errors
/// When the log cannot be read or followed; what comes before has been shown then.
///
/// # Examples
/// A log of two transactions, of which the second revokes what is in the first:
/// ```
/// use jbd2::build::{LogBuilder, SuperblockBuilder, Transaction};
/// use jbd2::inspect::inspect;
/// use jbd2::{Content, LogRead, Superblock};
/// # struct Memory(Vec<Vec<u8>>);
/// # impl LogRead for Memory {
/// #     type Error = std::convert::Infallible;
/// #     fn read(&mut self, position: u32, buffer: &mut [u8]) -> Result<Content, Self::Error> {
/// #         buffer.copy_from_slice(&self.0[position as usize]);
/// #         Ok(Content::Present)
/// #     }
/// # }
///
/// let raw = SuperblockBuilder { maxlen: 64, start: 1, sequence: 7, ..Default::default() }.build();
/// let (superblock, format) = Superblock::parse(&raw)?;
/// let mut log = Memory(vec![vec![0; 4096]; 64]);
/// let mut builder = LogBuilder::new(format, 1, 7);
/// for transaction in [
///     Transaction { blocks: vec![(5000, vec![1; 4096])], ..Default::default() },
///     Transaction { revokes: vec![5000], ..Default::default() },
/// ] {
///     builder.transaction(&transaction, &mut |position, block| log.0[position as usize].copy_from_slice(block));
/// }
///
/// let mut seen = Vec::new();
/// let walk = inspect(&mut log, &superblock, &format, true, &mut |transaction| {
///     seen.push((transaction.sequence, transaction.position, transaction.tags.len(), transaction.revokes.clone()));
/// })?;
/// assert_eq!(seen, [(7, 1, 1, vec![]), (8, 4, 0, vec![5000])]);
/// assert_eq!(walk.transactions(), 2);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn inspect<L: LogRead>(
    log: &mut L,
    superblock: &Superblock,
    format: &Format,
    check_data: bool,
    each: &mut dyn FnMut(&InspectedTransaction),
) -> Result<Walk, ReplayError<L::Error>> {
    let mut inspector = Inspector {
        format,
        start: superblock.start,
        check_data,
        each,
        transaction: None,
        data: vec![0; format.block_size as usize],
    };
    let walk = walk(log, format, superblock.start, superblock.sequence, &mut inspector);
    inspector.show();
    walk
}

struct Inspector<'a> {
    format: &'a Format,
    start: u32,
    check_data: bool,
    each: &'a mut dyn FnMut(&InspectedTransaction),
    transaction: Option<InspectedTransaction>,
    data: Vec<u8>,
}

impl Inspector<'_> {
    fn transaction(&mut self, place: Place) -> &mut InspectedTransaction {
        self.transaction.get_or_insert_with(|| InspectedTransaction {
            sequence: place.sequence,
            position: place.position,
            ..InspectedTransaction::default()
        })
    }

    fn show(&mut self) {
        if let Some(transaction) = self.transaction.take() {
            (self.each)(&transaction);
        }
    }
}

impl<L: LogRead> Visitor<L> for Inspector<'_> {
    fn descriptor(
        &mut self,
        log: &mut L,
        place: Place,
        descriptor: &Descriptor<'_>,
        checksum_ok: bool,
    ) -> Result<(), ReplayError<L::Error>> {
        let blocks_max = u64::from(self.format.log_blocks());
        let mut tags = Vec::new();
        for (tag, order) in descriptor.tags().zip(place.order + 1..) {
            if order > blocks_max {
                break;
            }
            let position = self.format.advance(self.start, order as u32);
            let mut ok = None;
            if self.check_data && self.format.has_block_checksums() && position < self.format.length {
                let content =
                    log.read(position, &mut self.data).map_err(|source| ReplayError::Read { position, source })?;
                if content == Content::Present {
                    ok = Some(data_checksum_ok(self.format, place.sequence, tag.checksum, &self.data));
                }
            }
            tags.push(InspectedTag { position, tag, checksum_ok: ok });
        }
        let transaction = self.transaction(place);
        transaction.descriptors += 1;
        transaction.descriptors_damaged += u32::from(!checksum_ok);
        transaction.tags.append(&mut tags);
        Ok(())
    }

    fn revoke(
        &mut self,
        _log: &mut L,
        place: Place,
        revoke: &Revoke<'_>,
        checksum_ok: bool,
    ) -> Result<(), ReplayError<L::Error>> {
        let transaction = self.transaction(place);
        transaction.revoke_blocks += 1;
        let records = revoke.records();
        transaction.revoke_blocks_damaged += u32::from(!checksum_ok || records.is_err());
        if let Ok(records) = records {
            transaction.revoke_records += records.len() as u64;
            let room = REVOKES_KEPT.saturating_sub(transaction.revokes.len());
            transaction.revokes.extend(records.take(room));
        }
        Ok(())
    }

    fn commit(
        &mut self,
        _log: &mut L,
        place: Place,
        commit: &Commit<'_>,
        verdict: Verdict,
        _own_transaction_ends: bool,
    ) -> Result<(), ReplayError<L::Error>> {
        self.transaction(place).commit = Some(InspectedCommit {
            position: place.position,
            seconds: commit.seconds(),
            nanoseconds: commit.nanoseconds(),
            verdict,
        });
        self.show();
        Ok(())
    }
}
