//! Whose a region is: which file system's blocks it holds, and since which opening of its journal.
//!
//! An owner is written into the record that is not in use, and then named by one word: first while the region holds
//! nothing, later when something of it changes. So a region is always wholly one owner's or nobody's.

use crate::error::Error;
use crate::layout::{Geometry, MAGIC, MAGIC_UNFINISHED, NONE_PREPARED, doubled, field, undoubled};
use crate::medium::{Medium, word_of};

/// Bytes of an attachment.
pub const ATTACHMENT_BYTES: usize = 1024;
const RECORD_WORDS: usize = 12;
/// What word 10 says of a log that was left. Elsewhere it is 0, and not a part of the checksum: who does not know the word refuses the record.
const LEFT: u64 = 1;

/// A file system whose blocks a region holds.
#[derive(Clone, PartialEq, Eq)]
pub struct Owner {
    /// Its UUID.
    pub file_system: [u8; 16],
    /// UUID of its journal.
    pub journal: [u8; 16],
    /// Where it begins on its disk, in bytes.
    pub home_start: u64,
    /// Blocks that there is room for where it is.
    pub home_blocks: u64,
    /// CRC-32C of what on its disk tells this opening of its journal from every other.
    pub mark_checksum: u32,
    /// All of its log is in the journal's own place, as its guest has it: what the region holds is not to be brought home any more, by
    /// nobody.
    pub is_left: bool,
    /// What whoever recovers needs beside the blocks.
    pub attachment: [u8; ATTACHMENT_BYTES],
}

impl std::fmt::Debug for Owner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Owner")
            .field("file_system", &self.file_system)
            .field("home_start", &self.home_start)
            .finish_non_exhaustive()
    }
}

/// Which record is valid, if one is, and how often the region has had an owner.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct OwnerWord {
    /// Grows with every owner: 30 bits.
    pub epoch: u32,
    /// 0 or 1; nothing when the region is free.
    pub record: Option<usize>,
}

impl OwnerWord {
    pub fn encode(self) -> u64 {
        doubled(self.epoch << 2 | self.record.map_or(0, |record| record as u32 + 1))
    }

    pub fn decode(word: u64) -> Result<Self, Error> {
        let damaged = || Error::refused("the NVM region is damaged: its owner is neither known nor nobody");
        let word = undoubled(word).ok_or_else(damaged)?;
        let record = match word & 3 {
            0 => None,
            1 => Some(0),
            2 => Some(1),
            _ => return Err(damaged()),
        };
        Ok(OwnerWord { epoch: word >> 2, record })
    }
}

fn words_of(owner: &Owner, epoch: u32) -> [u64; RECORD_WORDS] {
    let half = |uuid: &[u8; 16], at: usize| word_of(uuid, at as u64);
    let mut words = [0; RECORD_WORDS];
    words[0] = half(&owner.file_system, 0);
    words[1] = half(&owner.file_system, 8);
    words[2] = half(&owner.journal, 0);
    words[3] = half(&owner.journal, 8);
    words[4] = owner.home_start;
    words[5] = owner.home_blocks;
    words[6] = u64::from(epoch);
    words[7] = u64::from(crc32c::crc32c(&owner.attachment));
    words[8] = u64::from(owner.mark_checksum);
    words[10] = if owner.is_left { LEFT } else { 0 };
    words[9] = u64::from(checksum(&words));
    words
}

fn checksum(words: &[u64; RECORD_WORDS]) -> u32 {
    let flags = words[10..11].iter().filter(|word| **word != 0);
    words[..9].iter().chain(flags).fold(0, |checksum, word| crc32c::crc32c_append(checksum, &word.to_le_bytes()))
}

/// Reads the owner of a region; nothing when it is free.
///
/// # Errors
/// [`Error::Refused`] when its record is damaged.
pub(crate) fn read(region: &[u8]) -> Result<(OwnerWord, Option<Owner>), Error> {
    let word = OwnerWord::decode(word_of(region, field::OWNER))?;
    let Some(record) = word.record else { return Ok((word, None)) };
    let words: [u64; RECORD_WORDS] =
        std::array::from_fn(|index| word_of(region, field::RECORDS[record] + index as u64 * 8));
    let at = field::ATTACHMENTS[record] as usize;
    let attachment: &[u8; ATTACHMENT_BYTES] = region[at..].first_chunk().expect("a superblock is a page");
    if words[9] != u64::from(checksum(&words))
        || words[7] != u64::from(crc32c::crc32c(attachment))
        || words[6] != u64::from(word.epoch)
    {
        return Err(Error::refused("the NVM region is damaged: the record of its owner does not match its checksum"));
    }
    let uuid = |first: usize| {
        let mut uuid = [0; 16];
        uuid[..8].copy_from_slice(&words[first].to_le_bytes());
        uuid[8..].copy_from_slice(&words[first + 1].to_le_bytes());
        uuid
    };
    let owner = Owner {
        file_system: uuid(0),
        journal: uuid(2),
        home_start: words[4],
        home_blocks: words[5],
        mark_checksum: words[8] as u32,
        is_left: words[10] & LEFT != 0,
        attachment: *attachment,
    };
    Ok((word, Some(owner)))
}

/// Gives a free, empty region an owner, or its owner another record.
pub(crate) fn write<M: Medium>(medium: &mut M, owner: &Owner) -> Result<OwnerWord, Error> {
    let failed = || Error::failed("writing the owner of the NVM region");
    let before = OwnerWord::decode(medium.word(field::OWNER))?;
    // Never the record that is in use.
    let record = before.record.map_or(0, |record| 1 - record);
    let after = OwnerWord { epoch: before.epoch.wrapping_add(1) & ((1 << 30) - 1), record: Some(record) };
    for (index, word) in words_of(owner, after.epoch).iter().enumerate() {
        medium.store_word(field::RECORDS[record] + index as u64 * 8, *word);
    }
    medium.write_back(field::RECORDS[record], RECORD_WORDS as u64 * 8);
    medium.stream(field::ATTACHMENTS[record], &owner.attachment);
    medium.fence().map_err(failed())?;
    medium.store_word(field::OWNER, after.encode());
    medium.write_back(field::OWNER, 8);
    medium.fence().map_err(failed())?;
    Ok(after)
}

/// Makes a region nobody's. What it holds counts no more; where that looks like a region of another cut of the device, it is none from here
/// on, so that nobody is refused for what a guest had in its blocks.
///
/// That goes for one that is whole and has an owner, too: a guest can write such a one, to the last checksum, and nothing here tells it from a
/// true one. There is none in a region that was claimed since regions of other cuts are looked for first; an earlier amberlog may have claimed
/// this one around it. So what is put out is said.
///
/// False where it is nobody's, durably, and the medium has failed when that was cleared: nothing is lost by that, and nothing more can be
/// stored there.
pub(crate) fn clear<M: Medium>(medium: &mut M) -> Result<bool, Error> {
    let failed = || Error::failed("giving the NVM region back");
    let before = OwnerWord::decode(medium.word(field::OWNER))?;
    medium.store_word(field::OWNER, OwnerWord { record: None, ..before }.encode());
    medium.write_back(field::OWNER, 8);
    medium.fence().map_err(failed())?;
    // An amberlog that does not know of prepared transactions claims a region and leaves what stands there.
    medium.store_word(field::PREPARED, NONE_PREPARED);
    medium.write_back(field::PREPARED, 8);
    let seeming: Vec<u64> =
        medium.other_beginnings().iter().copied().filter(|at| medium.word(at + field::MAGIC) == MAGIC).collect();
    let owned: Vec<(u64, Owner)> = seeming.iter().filter_map(|at| owned_at(medium.bytes(), *at)).collect();
    for at in seeming {
        medium.store_word(at + field::MAGIC, MAGIC_UNFINISHED);
        medium.write_back(at + field::MAGIC, 8);
    }
    if let Err(error) = medium.fence() {
        log::warn!(
            "the NVM region was given back, and nobody needs anything in it; making durable what was cleared in it since has failed ({error}), so \
             that it is not used again before it is opened anew"
        );
        return Ok(false);
    }
    if let Some((first, owner)) = owned.first() {
        log::warn!(
            "the NVM region that is given back had in it, at byte {first} of its device or file, what looks like a region of another cut with \
             committed blocks of the file system {} (of such there were {}): that is none any more; a guest can have written it, and nothing is \
             amiss then, but where an earlier amberlog let two VMs have overlapping regions, run e2fsck -f on that file system",
            uuid_text(&owner.file_system),
            owned.len()
        );
    }
    Ok(true)
}

/// What looks like a region with an owner at byte `at` of another one, just as one would be that was made there. Gives where that is in the
/// device.
fn owned_at(region: &[u8], at: u64) -> Option<(u64, Owner)> {
    let begin = Geometry::read(region).ok()??.region_offset.checked_add(at)?;
    let there = region.get(at as usize..)?;
    let geometry = Geometry::read(there).ok()??;
    let (_, owner) = read(there).ok()?;
    owner.filter(|_| geometry.region_offset == begin).map(|owner| (begin, owner))
}

fn uuid_text(uuid: &[u8; 16]) -> String {
    let hex: String = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
    [0..8, 8..12, 12..16, 16..20, 20..32].map(|part| &hex[part]).join("-")
}
