//! What a journal superblock on storage says of the logs that its disk had on a server: the next one may take their place
//! there, and no other may; which of two images is the older; and who is just about to recover it.
//!
//! What must always hold: no image names a log on a server that counts, but by the mark. Whoever has an image may have a copy, and
//! may have given its mark up (`e2fsck -fy`); a log that counts for another image must not give way to the next one of that.
//! * A mark stands beside a lineage that names none. Who takes the mark away names the log that it was of.
//! * What a log is begun as is on storage before, so any copy of then may name it. Before the mark is written the log is given another
//!   name on the server, which storage has never seen.
//! * Where somebody opens an image with a mark that counts no more, what that names is forgotten: an earlier amberlog named it
//!   in the lineage as well.
//!
//! A loss of power between the renaming and the mark leaves a log on the server that its own disk cannot name: nothing of it is
//! needed, and the journal stays on storage until somebody deletes that log.
//!
//! It lies in the padding before the mark (bytes 0x7C to 0xBF), and stays when the mark goes. Kernels, e2fsck and an older
//! amberlog keep it and do not read it; what it says is compared with what the server has, so that one that was left
//! behind is found out, not believed.

use super::mark::{self, RemoteMark};
use jbd2::{SUPERBLOCK_BYTES, Superblock, SuperblockEdit};

const OFFSET: usize = mark::OFFSET - BYTES;
const MAGIC: &[u8; 8] = b"AMBRLIN1";
const BYTES: usize = 8 + 3 * 16 + 8 + 4;

/// Tells one log from every other; zeros for none.
pub(super) type Nonce = [u8; 16];

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Lineage {
    /// The last log of this disk on the server that is known to count no more.
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

    /// Of the superblock on storage when a guest opens its log: a mark in it does not count.
    pub fn of_opened(block: &[u8]) -> Self {
        let mut lineage = Self::read(block).unwrap_or_default();
        if let Some(mark) = RemoteMark::left_in(block) {
            for nonce in [&mut lineage.held, &mut lineage.tried] {
                if *nonce == mark.nonce {
                    *nonce = Nonce::default();
                }
            }
        }
        lineage
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
}
