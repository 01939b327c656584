//! Fast commits: recognised, never replayed.
//!
//! The fast-commit area begins at log block `last + 1`. Its first block, if it holds fast commits that a mount would
//! replay, begins with a HEAD record that names the transaction they follow (little-endian, `struct ext4_fc_tl`).

use super::log::{Content, LogRead, ReplayError};
use crate::format::Format;

const TAG_HEAD: u16 = 9;
/// Bytes of the HEAD record: tag, length, features, transaction.
const HEAD_BYTES: usize = 12;

/// Whether a mount would find fast commits after the block replay of a log that ends before `end_sequence`.
/// When in doubt, there are some.
pub(super) fn are_live<L: LogRead>(
    log: &mut L,
    format: &Format,
    end_sequence: u32,
) -> Result<bool, ReplayError<L::Error>> {
    let position = format.last.saturating_add(1);
    if !format.fast_commit || position >= format.length {
        return Ok(false);
    }
    let mut block = vec![0; format.block_size as usize];
    let content = log.read(position, &mut block).map_err(|source| ReplayError::Read { position, source })?;
    if content == Content::AtHome {
        return Ok(true);
    }
    Ok(begins_fast_commit(&block[..HEAD_BYTES], end_sequence))
}

fn begins_fast_commit(head: &[u8], end_sequence: u32) -> bool {
    match u16::from_le_bytes([head[0], head[1]]) {
        TAG_HEAD => u32::from_le_bytes([head[8], head[9], head[10], head[11]]) == end_sequence,
        // Other records of fast commits: not where they belong, so better not to guess.
        1..TAG_HEAD => true,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_head_record_names_the_transaction() {
        let head = [9, 0, 8, 0, 0, 0, 0, 0, 7, 0, 0, 0];
        assert!(begins_fast_commit(&head, 7));
        assert!(!begins_fast_commit(&head, 8));
        assert!(!begins_fast_commit(&[0; 12], 0));
        assert!(begins_fast_commit(&[1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], 9));
        assert!(!begins_fast_commit(&[0xff; 12], u32::MAX));
    }
}
