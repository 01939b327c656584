//! What a journal superblock on storage says of the logs that its disk had on a server: the next one may take their place
//! there, and no other may; which of two images is the older; and who is just about to recover it.
//!
//! It lies in the padding before the mark (bytes 0x7C to 0xBF), and stays when the mark goes. Kernels, e2fsck and an older
//! amberlog keep it and do not read it; what it says is compared with what the server has, so that one that was left
//! behind is found out, not believed.

use super::mark;
use jbd2::{SUPERBLOCK_BYTES, Superblock, SuperblockEdit};

const OFFSET: usize = mark::OFFSET - BYTES;
const MAGIC: &[u8; 8] = b"AMBRLIN1";
const BYTES: usize = 8 + 3 * 16 + 8 + 4;

/// Tells one log from every other; zeros for none.
pub(super) type Nonce = [u8; 16];

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Lineage {
    /// The last log that the server is known to have begun for this disk.
    pub held: Nonce,
    /// One that the server was asked to begin: whether it has is not known.
    pub tried: Nonce,
    /// Who was the last to take a log for recovery. Whoever wrote it before finds this, and leaves storage alone.
    pub claim: Nonce,
    /// Grows with every mark, and whenever a log's tail moves; the log on the server says the same, never more. An image
    /// that says less is an older copy.
    pub count: u64,
}

impl Lineage {
    /// Of a superblock from storage, or from a log on a server. One that is damaged says nothing.
    pub fn read(block: &[u8]) -> Option<Self> {
        let bytes = block.get(OFFSET..OFFSET + BYTES)?;
        let (head, crc) = bytes.split_at(BYTES - 4);
        if !head.starts_with(MAGIC) || jbd2::crc32c(!0, head).to_le_bytes() != crc {
            return None;
        }
        let nonce = |at: usize| std::array::from_fn(|index| head[at + index]);
        let count = u64::from_le_bytes(std::array::from_fn(|index| head[56 + index]));
        Some(Lineage { held: nonce(8), tried: nonce(24), claim: nonce(40), count })
    }

    pub fn write_into(&self, block: &mut [u8]) {
        if block.len() < SUPERBLOCK_BYTES || Superblock::decode(block).is_err() {
            // The guest writes something else there.
            return;
        }
        let mut bytes = MAGIC.to_vec();
        for nonce in [&self.held, &self.tried, &self.claim] {
            bytes.extend_from_slice(nonce);
        }
        bytes.extend_from_slice(&self.count.to_le_bytes());
        bytes.extend_from_slice(&jbd2::crc32c(!0, &bytes).to_le_bytes());
        block[OFFSET..OFFSET + BYTES].copy_from_slice(&bytes);
        if let Ok(mut edit) = SuperblockEdit::new(block) {
            edit.seal();
        }
    }

    /// The logs whose place on the server the next one may take.
    pub fn logs(&self) -> Vec<Nonce> {
        [self.held, self.tried].into_iter().filter(|nonce| *nonce != Nonce::default()).collect()
    }

    /// What the next log is told from every other by: the one of an attempt of which it is not known how it ended, if there
    /// was one.
    pub fn next(&self) -> Nonce {
        if self.tried == Nonce::default() { remote_journal::random() } else { self.tried }
    }

    /// The server has begun the log that it was asked for.
    pub fn begun(&mut self) {
        self.held = std::mem::take(&mut self.tried);
    }
}
