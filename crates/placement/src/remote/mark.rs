//! The mark on storage: which epoch of which log on a journal server is this journal's live one.
//!
//! It lies in the padding of the journal superblock (bytes 0xC0 to 0xE3; jbd2 and e2fsck neither read nor change it), in
//! the first sector, so that it arrives or not together with `s_start`. It is there exactly while the log on the server is
//! the one that counts; a superblock with a log on storage (`s_start` not 0) never carries it.

use crate::journals::MARK_ERRNO;
use jbd2::{SUPERBLOCK_BYTES, Superblock, SuperblockEdit};
use std::io;

const OFFSET: usize = 0xc0;
const MAGIC: &[u8; 8] = b"AMBREMO1";
const BYTES: usize = 8 + 8 + 16 + 4;

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
        let errno = Superblock::decode(&bytes).map_err(io::Error::other)?.errno;
        let mut mark = MAGIC.to_vec();
        mark.extend_from_slice(&self.epoch.to_le_bytes());
        mark.extend_from_slice(&self.nonce);
        mark.extend_from_slice(&jbd2::crc32c(!0, &mark).to_le_bytes());
        bytes[OFFSET..OFFSET + BYTES].copy_from_slice(&mark);
        SuperblockEdit::new(&mut bytes)
            .map_err(io::Error::other)?
            .start(0)
            .errno(if errno == 0 { MARK_ERRNO } else { errno })
            .seal();
        Ok(bytes)
    }

    /// The mark in a superblock from storage, if there is one. A log on storage is the live one, whatever the padding says.
    pub fn read(block: &[u8]) -> Option<Self> {
        if !Superblock::decode(block).is_ok_and(|superblock| superblock.is_empty()) {
            return None;
        }
        let mark = block.get(OFFSET..OFFSET + BYTES)?;
        let (head, crc) = mark.split_at(BYTES - 4);
        if !head.starts_with(MAGIC) || jbd2::crc32c(!0, head).to_le_bytes() != crc {
            return None;
        }
        let epoch = u64::from_le_bytes(head[8..16].try_into().ok()?);
        Some(RemoteMark { epoch, nonce: head[16..32].try_into().ok()? })
    }

    /// The same superblock without any mark.
    pub(crate) fn remove_from(block: &mut [u8]) {
        if block.len() >= SUPERBLOCK_BYTES && block[OFFSET..].starts_with(MAGIC) {
            block[OFFSET..OFFSET + BYTES].fill(0);
            if let Ok(mut edit) = SuperblockEdit::new(block) {
                edit.seal();
            }
        }
    }
}
