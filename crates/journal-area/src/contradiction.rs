//! When what the guest does proves the books wrong.
//!
//! The books say where committed blocks belong: tags give numbers of home blocks, and the scan of the disk says where block 0 of
//! that file system is. Both can be wrong without anybody's fault. A device-mapper table between the file system and the
//! disk sends some blocks elsewhere, a cache writes them later or not at all, and a kernel may do what nobody knew of. None
//! of that can be seen beforehand. What can be seen is that the guest acts as if something had happened that did not
//! happen here.
//!
//! Three things that it does are taken for proof, because no guest whose blocks are where the books say does them:
//!
//! * It reads the log, and begins anew where no transaction begins that was seen, past committed blocks that were never written
//!   home. A kernel that mounts the log again does that, but only after its replay has written all of those blocks. (A
//!   log that begins elsewhere without having been read is another one: [`crate::SuperblockEffect::Foreign`].)
//! * A committed tag names a block outside the file system, or inside the log itself.
//! * Its tail moves past committed blocks that were never written home, while the same contents were written to other
//!   blocks of the same file system that had no reason to get them. Either alone is legal: a guest in `data=journal` mode lets
//!   freed blocks go without a word, and it may write any content anywhere. Together, again and again, they say that the home of a
//!   block is not where the books have it. What counts as such a write says [`crate::Strays`].
//!
//! A home write with another content counts as written home: ext4 writes its superblock past its own journal, and
//! e2fsck mends what it replays.
//!
//! Whoever looks at the disk may find a fourth: another file system where this one was, while the log is open still (`JournalArea::contradict`).
//!
//! From the first proof on nothing is read from the books any more. The log is kept block for block, as the guest writes
//! it, which is right whatever is wrong: it is what storage would have. Nothing is written home, because homes are what is
//! in doubt; what the guest's tail has passed is by its own word not needed. Whoever holds the log has to bring it
//! to its own place on storage and to leave it there (`JournalArea::take_distrusted`).

use crate::jcb::VmJcb;
use crate::pages::Pages;
use crate::strays::{Mark, Strays};
use guest_memory::MemorySlice;

impl VmJcb {
    /// What stands for the content of a block.
    fn mark(&self, copy: impl Fn(usize, &mut [u8])) -> Mark {
        Mark::of(self.hasher(), self.shape.block_bytes as usize, copy)
    }

    /// A home write of `block` carries a content that the books have no reason for; `owed` is the version that they have, if any.
    pub(crate) fn note_stray(&mut self, block: u64, content: &MemorySlice, owed: Option<&[u8]>) {
        if self.transactions.is_empty() || self.table.is_materialise() {
            return;
        }
        let given = self.mark(|at, piece| content.copy_out(at, piece));
        let owed = owed.map(|owed| self.mark(|at, piece| piece.copy_from_slice(&owed[at..at + piece.len()])));
        self.strays.written(block, given, owed);
    }

    /// A version of `block` is committed, and may have been written there before that.
    pub(crate) fn note_committed(&mut self, pages: &Pages, position: u32, block: u64, data: &mut [u8]) {
        if !self.strays.is_empty() && self.read_version(pages, position, data) {
            let mark = self.mark(|at, piece| piece.copy_from_slice(&data[at..at + piece.len()]));
            self.strays.committed(block, mark);
        }
    }

    /// Whether a log block is owed and its home block was never written since it was committed.
    fn is_unwritten(&self, position: u32) -> bool {
        self.location(position).is_held() && !self.written_over.contains(position) && self.is_newest(position)
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
        if self.strays.is_empty() || count == 0 {
            return false;
        }
        let mut block = vec![0; self.shape.block_bytes as usize];
        let mut position = oldest.first_position;
        let end = self.transactions.get(count).map_or(self.cursor.position, |next| next.first_position);
        loop {
            if self.is_unwritten(position) && self.read_version(pages, position, &mut block) {
                let mark = self.mark(|at, piece| piece.copy_from_slice(&block[at..at + piece.len()]));
                self.strays.passed_unwritten(mark);
            }
            position = format.next(position);
            if position == end {
                break;
            }
        }
        let Some(misplaced) = self.strays.proof() else { return false };
        self.distrust(format!(
            "the guest's journal is done with {misplaced} committed blocks that were never written home, but to other blocks of \
             the disk"
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
    pub(crate) fn distrust(&mut self, why: String) {
        // First for whoever finds the log after a kill in the next instant.
        self.table.set_distrusted();
        self.contradiction.get_or_insert(why);
    }

    /// Forgets what was seen: the log is opened, or closed.
    pub(crate) fn forget_signs(&mut self) {
        self.strays = Strays::default();
        self.written_over.clear();
        self.contradiction = None;
    }
}
