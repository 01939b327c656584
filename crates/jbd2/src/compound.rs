//! One transaction in the place of many: of each home block one version, and what was revoked.
//!
//! Only the control blocks are made here, one at a time when they are asked for; the data blocks stay where they are, and
//! their tags need no more of them than a checksum. So a compound of any size costs one entry a block.
//!
//! What must always hold: within one transaction a block is tagged or revoked, never both, and tagged once. A replay would
//! take a revoke for one of the tag beside it.

use crate::build::{TagChecksum, commit, descriptor_of, records_per_revoke, revoke, tags_per_descriptor};
use crate::format::Format;
use std::collections::HashSet;

/// A block of a compound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CompoundBlock {
    /// The home block.
    pub home: u64,
    /// Its content is escaped in the log.
    pub escaped: bool,
    /// The checksum of the content as it is in the log, under the compound's sequence number ([`crate::tag_checksum`]).
    pub checksum: u32,
}

/// What a compound has at a log block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    /// A control block.
    Control(Vec<u8>),
    /// The content of the block with this index, as it is in the log.
    Data(usize),
}

/// Why there is no compound.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CompoundError {
    /// It is longer than the log.
    #[error("a compound transaction of {blocks} log blocks does not fit into a log of {room}")]
    TooLong {
        /// What it takes.
        blocks: u64,
        /// What there is.
        room: u64,
    },
    /// A block is in it twice.
    #[error("block {0} is in a compound transaction twice, or both tagged and revoked")]
    Twice(u64),
}

/// See the module.
#[derive(Clone, Debug)]
pub struct Compound {
    format: Format,
    start: u32,
    sequence: u32,
    blocks: Vec<CompoundBlock>,
    revokes: Vec<u64>,
    seconds: u64,
    nanoseconds: u32,
    length: u32,
}

impl Compound {
    /// How many log blocks a compound of so many blocks and revokes takes.
    pub fn length(format: &Format, blocks: usize, revokes: usize) -> u64 {
        (revokes.div_ceil(records_per_revoke(format)) + blocks.div_ceil(tags_per_descriptor(format)) + blocks + 1)
            as u64
    }

    /// A compound that ends where `end` begins: the log goes on there, with the transaction after `sequence`. At most
    /// `room` log blocks are to be had before that. `written_at` is the time in its commit block, in seconds and nanoseconds.
    ///
    /// # Errors
    /// When it does not fit, or says two things of a block.
    pub fn ending_at(
        format: Format,
        (end, room): (u32, u32),
        sequence: u32,
        blocks: Vec<CompoundBlock>,
        revokes: Vec<u64>,
        (seconds, nanoseconds): (u64, u32),
    ) -> Result<Self, CompoundError> {
        let length = Self::length(&format, blocks.len(), revokes.len());
        let room = u64::from(room.min(format.log_blocks() - 1));
        if length > room {
            return Err(CompoundError::TooLong { blocks: length, room });
        }
        let mut seen = HashSet::with_capacity(blocks.len() + revokes.len());
        if let Some(twice) =
            blocks.iter().map(|block| block.home).chain(revokes.iter().copied()).find(|b| !seen.insert(*b))
        {
            return Err(CompoundError::Twice(twice));
        }
        let length = length as u32;
        let start = format.advance(end, format.log_blocks() - length);
        Ok(Compound { format, start, sequence, blocks, revokes, seconds, nanoseconds, length })
    }

    /// The log block that it begins with.
    pub fn start(&self) -> u32 {
        self.start
    }

    /// Its sequence number.
    pub fn sequence(&self) -> u32 {
        self.sequence
    }

    /// The blocks that it holds.
    pub fn blocks(&self) -> &[CompoundBlock] {
        &self.blocks
    }

    /// What it has at log block `position`; nothing where it is not.
    pub fn part(&self, position: u32) -> Option<Part> {
        if !self.format.contains(position) {
            return None;
        }
        let mut order = self.format.distance(self.start, position) as usize;
        if order >= self.length as usize {
            return None;
        }
        let records = records_per_revoke(&self.format);
        let revoke_blocks = self.revokes.len().div_ceil(records);
        if order < revoke_blocks {
            let end = self.revokes.len().min((order + 1) * records);
            return Some(Part::Control(revoke(&self.format, self.sequence, &self.revokes[order * records..end])));
        }
        order -= revoke_blocks;
        let tags = tags_per_descriptor(&self.format);
        let (group, within) = (order / (tags + 1), order % (tags + 1));
        let group = group * tags..self.blocks.len().min((group + 1) * tags);
        if group.is_empty() || within > group.len() {
            return Some(Part::Control(commit(&self.format, self.sequence, self.seconds, self.nanoseconds, None)));
        }
        if within > 0 {
            return Some(Part::Data(group.start + within - 1));
        }
        let tags: Vec<TagChecksum> = self.blocks[group]
            .iter()
            .enumerate()
            .map(|(index, block)| TagChecksum {
                block: block.home,
                checksum: block.checksum,
                escaped: block.escaped,
                with_uuid: index == 0,
            })
            .collect();
        Some(Part::Control(descriptor_of(&self.format, self.sequence, &tags)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::build::{SuperblockBuilder, escape};
    use crate::{Checksum, Content, Features, LogRead, Plan, Superblock, tag_checksum};
    use std::collections::BTreeMap;
    use std::convert::Infallible;

    struct Shown<'a>(&'a Compound, &'a [Vec<u8>], u8);

    impl LogRead for Shown<'_> {
        type Error = Infallible;

        fn read(&mut self, position: u32, buffer: &mut [u8]) -> Result<Content, Infallible> {
            match self.0.part(position) {
                Some(Part::Control(block)) => buffer.copy_from_slice(&block),
                Some(Part::Data(index)) => buffer.copy_from_slice(&self.1[index]),
                None => buffer.fill(self.2),
            }
            Ok(Content::Present)
        }
    }

    fn formats() -> impl Iterator<Item = (Superblock, Format)> {
        let checksums = [Checksum::None, Checksum::V1, Checksum::V2, Checksum::V3];
        checksums.into_iter().flat_map(|checksum| {
            [0, Features::WIDE].into_iter().map(move |wide| {
                let features = Features { compat: 0, incompat: Features::REVOKE | wide, ro_compat: 0 };
                let builder =
                    SuperblockBuilder { block_size: 1024, maxlen: 2048, features, ..SuperblockBuilder::default() };
                Superblock::parse(&builder.checksum(checksum).build()).expect("valid")
            })
        })
    }

    fn content(home: u64) -> Vec<u8> {
        let mut data = vec![home as u8; 1024];
        if home.is_multiple_of(5) {
            data[..4].copy_from_slice(&crate::MAGIC.to_be_bytes());
        }
        data
    }

    #[test]
    fn a_replay_of_a_compound_leaves_what_is_in_it() {
        for (superblock, format) in formats() {
            let fit = tags_per_descriptor(&format);
            let records = records_per_revoke(&format);
            for count in [0, 1, 2, fit - 1, fit, fit + 1, 3 * fit] {
                for revoked in [0, 1, records, records + 1] {
                    for end in [format.first, format.first + 1, 700, format.last - 1] {
                        let sequence = u32::MAX;
                        let logged: Vec<(bool, Vec<u8>)> =
                            (0..count as u64).map(|index| escape(&content(index * 3))).collect();
                        let blocks = logged
                            .iter()
                            .zip(0..)
                            .map(|((escaped, data), index)| CompoundBlock {
                                home: index * 3,
                                escaped: *escaped,
                                checksum: tag_checksum(&format, sequence, data),
                            })
                            .collect();
                        let revokes = (0..revoked as u64).map(|index| index * 3 + 1).collect();
                        let compound =
                            Compound::ending_at(format, (end, 2000), sequence, blocks, revokes, (9, 1)).expect("fits");
                        let data: Vec<Vec<u8>> = logged.into_iter().map(|(_, data)| data).collect();
                        let said = Superblock { start: compound.start(), sequence, ..superblock };
                        let mut log = Shown(&compound, &data, 7);
                        let plan = Plan::new(&mut log, &said, &format, &|_| true).expect("a log");
                        let summary = *plan.summary();
                        assert_eq!(
                            (summary.transactions, summary.walk.end_position),
                            (1, end),
                            "it ends where the log goes on"
                        );
                        assert_eq!(summary.walk.end_sequence, 0, "with the next transaction");
                        assert_eq!((summary.revoke_records, summary.revoked), (revoked as u64, 0));
                        let mut found = BTreeMap::new();
                        for planned in plan.blocks() {
                            let copy = planned.newest();
                            let mut block = vec![0; 1024];
                            log.read(copy.position, &mut block).expect("read");
                            assert!(copy.restore(&format, &mut block), "its checksum is right");
                            found.insert(planned.home(), block);
                        }
                        let expected = (0..count as u64).map(|index| (index * 3, content(index * 3)));
                        assert!(found == expected.collect::<BTreeMap<_, _>>());
                    }
                }
            }
        }
    }

    #[test]
    fn what_would_be_no_transaction_is_refused() {
        let (_, format) = formats().next().expect("one");
        let block = |home| CompoundBlock { home, escaped: false, checksum: 0 };
        let make = |blocks: Vec<CompoundBlock>, revokes: Vec<u64>, room| {
            Compound::ending_at(format, (5, room), 1, blocks, revokes, (0, 0)).err()
        };
        assert_eq!(make(vec![block(1), block(1)], vec![], 100), Some(CompoundError::Twice(1)));
        assert_eq!(make(vec![block(1)], vec![1], 100), Some(CompoundError::Twice(1)));
        assert_eq!(make(vec![block(1), block(2)], vec![3], 5), None);
        assert_eq!(make(vec![block(1), block(2)], vec![3], 4), Some(CompoundError::TooLong { blocks: 5, room: 4 }));
    }
}
