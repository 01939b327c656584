//! When what the guest does proves the books wrong.
//!
//! The books say where committed blocks belong: tags give numbers of home blocks, and the scan of the disk says where block 0 of
//! that file system is. Both can be wrong without anybody's fault. A device-mapper table between the file system and the
//! disk sends some blocks elsewhere, a cache writes them later or not at all, and a kernel may do what nobody knew of. None
//! of that can be seen beforehand. What can be seen is that the guest acts as if something had happened that did not
//! happen here.
//!
//! Three things are taken for proof, because no guest whose blocks are where the books say does them:
//!
//! * It reads the log, and begins anew where no transaction begins that was seen, past committed blocks that were never written
//!   home. A kernel that mounts the log again does that, but only after its replay has written all of those blocks. (A
//!   log that begins elsewhere without having been read is another one: [`crate::SuperblockEffect::Foreign`].)
//! * A committed tag names a block outside the file system, or inside the log itself.
//! * Its tail moves past committed blocks that were never written home, while the same contents were written to other
//!   blocks of the same file system that had no reason to get them. Either alone is legal: a guest in `data=journal` mode lets
//!   freed blocks go without a word, and it may write any content anywhere. Together, and [`MISPLACED_MIN`] times, they
//!   say that the home of a block is not where the books have it.
//!
//! A home write with another content counts as written home: ext4 writes its superblock past its own journal, and
//! e2fsck mends what it replays.
//!
//! From the first proof on nothing is read from the books any more. The log is kept block for block, as the guest writes
//! it, which is right whatever is wrong: it is what storage would have. Nothing is written home, because homes are what is
//! in doubt; what the guest's tail has passed is by its own word not needed. Whoever holds the log has to bring it
//! to its own place on storage and to leave it there (`JournalArea::take_distrusted`).

use crate::jcb::VmJcb;
use crate::pages::Pages;
use guest_memory::MemorySlice;
use std::hash::BuildHasher;

/// So many contents at the wrong place are no coincidence.
const MISPLACED_MIN: u32 = 3;

/// Bytes of each of the two pieces of a block that stand for its content.
const PIECE_BYTES: usize = 64;

/// Contents written home lately for which the books have no reason: 44 bits of a hash each, the newest in each slot.
#[derive(Debug, Default)]
pub(crate) struct Unexplained {
    slots: Vec<u32>,
}

impl Unexplained {
    const SLOTS: usize = 4096;

    fn note(&mut self, hash: u64) {
        if self.slots.is_empty() {
            self.slots = vec![0; Self::SLOTS];
        }
        self.slots[hash as usize % Self::SLOTS] = Self::mark(hash);
    }

    fn has(&self, hash: u64) -> bool {
        self.slots.get(hash as usize % Self::SLOTS).is_some_and(|slot| *slot == Self::mark(hash))
    }

    fn mark(hash: u64) -> u32 {
        // 0 is an empty slot.
        ((hash >> 32) as u32).max(1)
    }

    /// Bytes of memory it takes.
    pub(crate) fn memory_bytes(&self) -> u64 {
        self.slots.len() as u64 * 4
    }
}

impl VmJcb {
    /// What stands for the content of a block; nothing for one that says nothing, such as zeros.
    fn fingerprint(&self, copy: impl Fn(usize, &mut [u8])) -> Option<u64> {
        let mut pieces = [0; 2 * PIECE_BYTES];
        let (first, second) = pieces.split_at_mut(PIECE_BYTES);
        copy(0, first);
        copy(self.shape.block_bytes as usize / 2, second);
        pieces.iter().any(|byte| *byte != pieces[0]).then(|| self.hasher().hash_one(pieces))
    }

    /// A home write carries a content that the books have no reason for.
    pub(crate) fn note_unexplained(&mut self, content: &MemorySlice) {
        if self.transactions.is_empty() || self.table.is_materialise() {
            return;
        }
        if let Some(hash) = self.fingerprint(|at, piece| content.copy_out(at, piece)) {
            self.unexplained.note(hash);
        }
    }

    /// Whether a log block is owed and its home block was never written since it was committed.
    fn is_unwritten(&self, position: u32) -> bool {
        self.location(position).is_held()
            && !self.written_over.contains(&position)
            && self.home_of(position).is_some_and(|block| self.newest(block) == Some(position))
    }

    /// The guest's tail is about to move to a place where no transaction of ours begins. Says whether that proves the books
    /// wrong.
    pub(crate) fn contradicts_new_beginning(&mut self, tail: crate::table::Tail) -> bool {
        let unwritten = (1..self.shape.log_blocks).filter(|position| self.is_unwritten(*position)).count();
        if unwritten == 0 {
            return false;
        }
        self.distrust(format!(
            "the guest moved its journal's tail to log block {} (transaction {}), where no transaction begins that was seen, \
             past {unwritten} committed blocks that were never written home",
            tail.position, tail.sequence
        ));
        true
    }

    /// The guest's tail is about to pass the oldest `count` transactions. Says whether that, with what was seen before,
    /// proves the books wrong.
    pub(crate) fn contradicts_passing(&mut self, pages: &Pages, count: usize) -> bool {
        let (Some(format), Some(oldest)) = (self.format, self.transactions.front()) else { return false };
        if self.unexplained.memory_bytes() == 0 || count == 0 {
            return false;
        }
        let mut block = vec![0; self.shape.block_bytes as usize];
        let mut position = oldest.first_position;
        let end = self.transactions.get(count).map_or(self.cursor.position, |next| next.first_position);
        loop {
            if self.is_unwritten(position) && self.read_version(pages, position, &mut block) {
                let hash = self.fingerprint(|at, piece| piece.copy_from_slice(&block[at..at + piece.len()]));
                if hash.is_some_and(|hash| self.unexplained.has(hash)) {
                    self.misplaced += 1;
                }
            }
            position = format.next(position);
            if position == end {
                break;
            }
        }
        if self.misplaced < MISPLACED_MIN {
            return false;
        }
        self.distrust(format!(
            "the guest's journal is done with {} committed blocks that were never written home, but to other blocks of \
             the disk",
            self.misplaced
        ));
        true
    }

    /// A committed tag names a block that no tag of this file system can name.
    pub(crate) fn contradicts_tag(&mut self, sequence: u32, block: u64) {
        self.distrust(format!(
            "transaction {sequence} of the guest's journal has a version of block {block}, which is {}",
            if block < self.shape.home_blocks { "the journal's own" } else { "beyond the end of the file system" }
        ));
    }

    /// The books are wrong.
    fn distrust(&mut self, why: String) {
        // First for whoever finds the log after a kill in the next instant.
        self.table.set_distrusted();
        self.contradiction.get_or_insert(why);
    }

    /// Forgets what was seen: the log is opened, or closed.
    pub(crate) fn forget_signs(&mut self) {
        self.unexplained = Unexplained::default();
        self.misplaced = 0;
        self.written_over.clear();
        self.contradiction = None;
    }
}
