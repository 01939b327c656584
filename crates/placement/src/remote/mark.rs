//! The mark on storage: which epoch of which log on a journal server is this journal's live one.
//!
//! It lies in the padding of the journal superblock (bytes 0xC0 to 0xE7; jbd2 and e2fsck neither read nor change it), in
//! the first sector, so that it arrives or not together with `s_start`. It is there exactly while the log on the server is
//! the one that counts; a superblock with a log on storage (`s_start` not 0) never carries one that counts.
//!
//! Kernels and e2fsck that know nothing of amberlog keep the padding. So a mark says for which `s_sequence` it was written,
//! and counts only beside an error number: who uses or repairs the file system changes one or the other, and from then on
//! what the server holds is older than the file system, and must not be replayed over it.

use jbd2::{ERRNO_EIO, SUPERBLOCK_BYTES, Superblock, SuperblockEdit};
use std::io;

pub(super) const OFFSET: usize = 0xc0;
const MAGIC: &[u8; 8] = b"AMBREMO1";
const BYTES: usize = 8 + 8 + 16 + 4 + 4;

/// Behind the mark: the last batch that the server had acknowledged when the mark was written, and a CRC over the log's nonce and that.
/// A server that has less was put back from an older state. An earlier amberlog neither writes nor reads it.
const ACKNOWLEDGED: usize = OFFSET + BYTES;
const ACKNOWLEDGED_BYTES: usize = 8 + 4;

fn acknowledged_crc(nonce: &[u8; 16], batch: u64) -> [u8; 4] {
    jbd2::crc32c(jbd2::crc32c(!0, nonce), &batch.to_le_bytes()).to_le_bytes()
}

/// Which log on the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteMark {
    /// Its epoch.
    pub epoch: u64,
    /// Tells it from another of the same number.
    pub nonce: [u8; 16],
}

impl RemoteMark {
    /// The superblock that goes to storage: an empty log that an error happened to, and this mark.
    ///
    /// # Errors
    /// When `block` is no journal superblock.
    pub(crate) fn write_into(&self, block: &[u8]) -> io::Result<Vec<u8>> {
        let mut bytes = block.get(..SUPERBLOCK_BYTES).unwrap_or(block).to_vec();
        let Superblock { errno, sequence, .. } = Superblock::decode(&bytes).map_err(io::Error::other)?;
        let mut mark = MAGIC.to_vec();
        mark.extend_from_slice(&self.epoch.to_le_bytes());
        mark.extend_from_slice(&self.nonce);
        mark.extend_from_slice(&sequence.to_le_bytes());
        mark.extend_from_slice(&jbd2::crc32c(!0, &mark).to_le_bytes());
        bytes[OFFSET..OFFSET + BYTES].copy_from_slice(&mark);
        SuperblockEdit::new(&mut bytes)
            .map_err(io::Error::other)?
            .start(0)
            .errno(if errno == 0 { ERRNO_EIO } else { errno })
            .seal();
        Ok(bytes)
    }

    /// Says beside this mark, in a superblock that is sealed after, what the server had acknowledged.
    pub(super) fn write_acknowledged(&self, block: &mut [u8], batch: u64) {
        if let Some(bytes) = block.get_mut(ACKNOWLEDGED..ACKNOWLEDGED + ACKNOWLEDGED_BYTES) {
            bytes[..8].copy_from_slice(&batch.to_le_bytes());
            bytes[8..].copy_from_slice(&acknowledged_crc(&self.nonce, batch));
        }
    }

    /// What the server of this mark has acknowledged at least; nothing where that is not known.
    pub(super) fn acknowledged(&self, block: &[u8]) -> Option<u64> {
        let bytes = block.get(ACKNOWLEDGED..ACKNOWLEDGED + ACKNOWLEDGED_BYTES)?;
        let batch = u64::from_le_bytes(std::array::from_fn(|index| bytes[index]));
        (bytes[8..] == acknowledged_crc(&self.nonce, batch)).then_some(batch)
    }

    /// A mark in a superblock, whether it counts or not.
    pub(super) fn left_in(block: &[u8]) -> Option<Self> {
        let (mark, _) = parse(block.get(OFFSET..OFFSET + BYTES)?)?;
        Some(mark)
    }

    /// The same superblock without any mark.
    pub(crate) fn remove_from(block: &mut [u8]) {
        if block.len() >= SUPERBLOCK_BYTES && block[OFFSET..OFFSET + BYTES].iter().any(|byte| *byte != 0) {
            block[OFFSET..OFFSET + BYTES].fill(0);
            block[ACKNOWLEDGED..ACKNOWLEDGED + ACKNOWLEDGED_BYTES].fill(0);
            if let Ok(mut edit) = SuperblockEdit::new(block) {
                edit.seal();
            }
        }
    }
}

/// What lies where the mark of a server does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MarkPlace {
    Zeros,
    /// Something that is no whole mark; without a superblock around it, the begin of one.
    Damaged,
    /// A whole mark that was written for another `s_sequence`.
    OtherSequence,
    Whole(RemoteMark),
}

/// Looks there, in a journal superblock or in what is none.
pub(crate) fn mark_place(block: &[u8], superblock: Option<&Superblock>) -> MarkPlace {
    let Some(mark) = block.get(OFFSET..OFFSET + BYTES) else { return MarkPlace::Zeros };
    let Some(superblock) = superblock else {
        return if mark.starts_with(MAGIC) { MarkPlace::Damaged } else { MarkPlace::Zeros };
    };
    if mark.iter().all(|byte| *byte == 0) {
        return MarkPlace::Zeros;
    }
    match parse(mark) {
        None => MarkPlace::Damaged,
        Some((_, sequence)) if superblock.sequence != sequence => MarkPlace::OtherSequence,
        Some((mark, _)) => MarkPlace::Whole(mark),
    }
}

/// A whole mark, and the `s_sequence` that it was written for.
fn parse(mark: &[u8]) -> Option<(RemoteMark, u32)> {
    let (head, crc) = mark.split_at(BYTES - 4);
    if !head.starts_with(MAGIC) || jbd2::crc32c(!0, head).to_le_bytes() != crc {
        return None;
    }
    let epoch = u64::from_le_bytes(std::array::from_fn(|index| head[8 + index]));
    let sequence = u32::from_le_bytes(std::array::from_fn(|index| head[32 + index]));
    Some((RemoteMark { epoch, nonce: std::array::from_fn(|index| head[16 + index]) }, sequence))
}
