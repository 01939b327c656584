//! The control block of one file system's log (the paper's `VM_JCB`, section 4.4): its tuples, hash tables and pool.
//!
//! Invariants, checked by [`VmJcb::check`] in tests and by recovery on what a dead process left:
//!
//! * A location that names a page or a slot is the only one to name it.
//! * Every committed version that is the newest of its home block is in `by_block` and in `versions`; no other position is. What is not
//!   needs no home: nobody asks for it but who shows the log, and the log's own tags say it.
//! * What is owed (`owed`) are the newest versions that are held; how many of the newest are on storage is counted (`stored_versions`).
//! * As long as the log is open, it has the layout in which it was opened: positions mean something in that alone.
//! * The newest version of a block is never [`Location::Gone`]: only a newer commit, a revoke or a discard makes it so,
//!   and those take it out of `by_block`.
//! * The table's tail never moves past a transaction that still owes a block.
//! * A position's location changes in one place, [`VmJcb::set_location`].
//! * What is absorbed (`absorbed`) is the newest version of its home block, and copied.

use crate::batch::Accepted;
use crate::index::Index;
use crate::inflight::InFlight;
use crate::location::{Location, Past};
use crate::lone::Ahead;
use crate::pages::Pages;
use crate::pool::Pool;
use crate::positions::Positions;
use crate::strays::Strays;
use crate::table::{Table, Tail};
use guest_memory::{MemorySlice, PageId};
use hashbrown::DefaultHashBuilder;
use jbd2::Format;
use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};

/// What a log and its file system look like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogShape {
    /// Bytes in a block of the file system and of the log.
    pub block_bytes: u32,
    /// Blocks in the log, the superblock included.
    pub log_blocks: u32,
    /// Blocks in the file system: home block numbers are below it.
    pub home_blocks: u64,
}

/// How a log is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holding {
    /// By reference to protected guest pages where possible.
    Retain,
    /// By copy, always.
    Copy,
}

/// Counters of one log since it was attached; names as in the report of `amberlog run`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names are the report's and say it all")]
pub struct Counters {
    pub transactions: u64,
    pub blocks_committed: u64,
    pub pages_protected: u64,
    pub protect_calls: u64,
    pub cow_faults: u64,
    pub pages_copied: u64,
    pub blocks_retained_now: u64,
    pub blocks_retained_max: u64,
    pub area_bytes_max: u64,
    pub pool_bytes_max: u64,
    /// Bytes of copied blocks in use at this moment.
    pub pool_bytes_now: u64,
    /// Blocks whose home write was seen, so that they were let go.
    pub released_home: u64,
    /// Blocks that a newer committed version made unneeded.
    pub released_superseded: u64,
    /// Blocks let go because of a revoke record.
    pub released_revoked: u64,
    /// Blocks let go because the guest discarded them.
    pub released_discarded: u64,
    /// Blocks that the host wrote home itself.
    pub written_home_by_host: u64,
}

/// A committed transaction of the live log.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Transaction {
    pub sequence: u32,
    pub first_position: u32,
}

/// A transaction whose commit block has not been seen, as far as it has been read. Its tags and what it revokes are not kept: a transaction
/// may fill a quarter of the log, a hostile one all of it, and its control blocks, which say them, are held ([`VmJcb::pending_tags`]).
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Partial {
    /// Next control block to look at; 0 means: start at the cursor.
    pub position: u32,
    /// Log blocks from the cursor to `position`.
    pub blocks: u64,
}

/// Ranges in their order, those that overlap or touch as one.
fn ascending_and_apart(mut ranges: Vec<std::ops::Range<u64>>) -> Vec<std::ops::Range<u64>> {
    ranges.sort_unstable_by_key(|range| range.start);
    ranges.dedup_by(|next, before| {
        let is_one = next.start <= before.end;
        if is_one {
            before.end = before.end.max(next.end);
        }
        is_one
    });
    ranges
}

/// The control block of one log.
#[derive(Debug)]
pub struct VmJcb {
    pub(crate) shape: LogShape,
    pub(crate) holding: Holding,
    /// Home blocks that the log itself takes: ascending, apart. A guest decides in how many pieces they are, and every tag is looked for.
    own_blocks: Vec<std::ops::Range<u64>>,
    pub(crate) table: Table,
    pub(crate) pool: Pool,
    pub(crate) format: Option<Format>,
    /// Of the journal whose superblock is held.
    pub(crate) uuid: Option<[u8; 16]>,
    by_page: Index,
    by_block: Index,
    /// The newest versions.
    pub(crate) versions: Positions,
    /// Those of them that are held: what is owed.
    pub(crate) owed: Positions,
    /// How many of the newest are only at their own place in the log on storage, where they were put for want of memory.
    pub(crate) stored_versions: u64,
    /// Versions whose first word was taken out of the log because it looks like a log block's (`JBD2_FLAG_ESCAPE`).
    escaped: Positions,
    hasher: DefaultHashBuilder,
    pub(crate) transactions: VecDeque<Transaction>,
    /// Where the next transaction begins, and its sequence number.
    pub(crate) cursor: Tail,
    pub(crate) partial: Partial,
    /// What the last descriptor said: a guess.
    pub(crate) ahead: Ahead,
    pub(crate) in_flight: InFlight,
    /// Somebody has written over the live log: what is in it is not to be brought home but by a replay.
    pub(crate) is_torn: bool,
    /// Versions over which the guest has written something else at home, past its own journal. Only a replay may bring
    /// them back.
    pub(crate) overwritten: Positions,
    /// Versions whose home write the guest was told of, and that are not at home, with their home blocks: see `absorbed`.
    pub(crate) absorbed: BTreeMap<u32, u64>,
    /// Block slots that an operation on its way to storage reads from, and how many do.
    pins: HashMap<u32, u32>,
    /// Pinned slots that nobody names any more.
    zombies: Vec<u32>,
    /// A block slot for the next superblock, so that the guest can write it while there is no memory. It and the one that is in use
    /// take turns while the log is open.
    superblock_spare: Option<u32>,
    pub(crate) counters: Counters,
    /// Owed versions whose home block was written, with something else, since they were committed.
    pub(crate) written_over: Positions,
    pub(crate) strays: Strays,
    /// What proved the books wrong.
    pub(crate) contradiction: Option<String>,
    /// The log is read as it was when its transactions counted for the first time ([`VmJcb::rebuild`]): what is at home or gone
    /// was there then.
    pub(crate) is_rebuilding: bool,
    /// Somebody is bringing it elsewhere ([`crate::Taking`]): what is newest of it, and where it begins, must not change.
    pub(crate) is_taken: bool,
    /// The host was asked to write home what is copied, and may write none of it: until something changes others are asked.
    pub(crate) has_nothing_to_write: bool,
    /// Somebody wants to know of every transaction that is accepted.
    pub(crate) tells_accepted: bool,
    /// Those that nobody was told of yet.
    pub(crate) accepted: Vec<Accepted>,
    /// Pages that were released, and that the books of pages do not know of yet.
    pub(crate) loose: Vec<PageId>,
    scratch: Vec<u8>,
}

impl VmJcb {
    pub(crate) fn new(
        shape: LogShape,
        holding: Holding,
        own_blocks: Vec<std::ops::Range<u64>>,
        table: Table,
        pool: Pool,
    ) -> Self {
        VmJcb {
            shape,
            holding,
            own_blocks: ascending_and_apart(own_blocks),
            table,
            pool,
            format: None,
            uuid: None,
            // It gets more bits when the guest has more pages.
            by_page: Index::new(shape.log_blocks, 0),
            by_block: Index::new(shape.log_blocks, shape.home_blocks),
            versions: Positions::new(shape.log_blocks),
            owed: Positions::new(shape.log_blocks),
            stored_versions: 0,
            escaped: Positions::new(shape.log_blocks),
            hasher: DefaultHashBuilder::default(),
            transactions: VecDeque::new(),
            cursor: Tail { position: 0, sequence: 0 },
            partial: Partial::default(),
            ahead: Ahead::default(),
            in_flight: InFlight::default(),
            is_torn: false,
            overwritten: Positions::new(shape.log_blocks),
            absorbed: BTreeMap::new(),
            pins: HashMap::new(),
            zombies: Vec::new(),
            superblock_spare: None,
            counters: Counters::default(),
            written_over: Positions::new(shape.log_blocks),
            strays: Strays::default(),
            contradiction: None,
            is_rebuilding: false,
            is_taken: false,
            has_nothing_to_write: false,
            tells_accepted: false,
            accepted: Vec::new(),
            loose: Vec::new(),
            scratch: vec![0; shape.block_bytes as usize],
        }
    }

    /// Whether replay would write a copy of `block`.
    pub(crate) fn is_home(&self, block: u64) -> bool {
        let behind = self.own_blocks.partition_point(|range| range.start <= block);
        let is_own = behind > 0 && block < self.own_blocks[behind - 1].end;
        block < self.shape.home_blocks && !is_own
    }

    /// Whether the log is open: a guest has it mounted, or left it so.
    pub(crate) fn is_open(&self) -> bool {
        self.table.tail().is_some()
    }

    pub(crate) fn location(&self, position: u32) -> Location {
        // A word of our own making; a damaged one would have been refused when the table was opened.
        self.table.load(position).unwrap_or(Location::None)
    }

    pub(crate) fn hasher(&self) -> &DefaultHashBuilder {
        &self.hasher
    }

    /// The log block that holds `page` by reference.
    pub(crate) fn position_of_page(&self, page: PageId) -> Option<u32> {
        self.by_page.find(u64::from(page.0)).filter(|position| self.location(*position) == Location::Guest(page))
    }

    /// Whether any log block is held by reference to a page.
    pub(crate) fn retains_pages(&self) -> bool {
        self.by_page.len() > 0
    }

    /// The log block with the newest committed version of `block`, whether it is owed or already home.
    pub(crate) fn newest(&self, block: u64) -> Option<u32> {
        self.by_block.find(block)
    }

    /// The newest versions, in no order: home block and log block. One pass over all takes a millisecond for a log of 1 GiB.
    pub(crate) fn blocks_and_positions(&self) -> impl Iterator<Item = (u64, u32)> {
        self.by_block.iter()
    }

    /// Changes where a log block's content is. The only place that does: what the old location named is let go after the
    /// table says the new one, and the books of pages and of owed blocks follow.
    pub(crate) fn set_location(&mut self, pages: &Pages, position: u32, new: Location) {
        self.set_location_past(pages, position, new, None);
    }

    /// And what the guest has done past its journal is said with it, in one step.
    fn set_location_past(&mut self, pages: &Pages, position: u32, new: Location, past: Option<Past>) {
        let old = self.location(position);
        if old == new {
            return;
        }
        if let Location::Guest(page) = old {
            self.by_page.remove(u64::from(page.0), position);
        }
        let is_newest = self.is_newest(position);
        if old.is_held() && !new.is_held() && is_newest {
            self.owed.remove(position);
        }
        self.table.store_past(position, new, past);
        self.absorbed.remove(&position);
        if new.is_held() && !old.is_held() && is_newest {
            self.owed.insert(position);
        }
        if is_newest {
            self.stored_versions += u64::from(new == Location::Storage);
            self.stored_versions -= u64::from(old == Location::Storage);
        }
        match old {
            Location::Guest(page) => pages.release(page, &mut self.loose),
            Location::Block(slot) if position == 0 && self.superblock_spare.is_none() && new.is_held() => {
                self.superblock_spare = Some(slot);
            }
            Location::Block(slot) => self.give_block_slot(slot),
            Location::Small(slot) => self.pool.give_small(slot),
            Location::None | Location::Home | Location::Gone | Location::Storage => {}
        }
        if let Location::Guest(page) = new {
            self.enter_page(pages, position, page);
        }
        let held = |location: Location| u64::from(location.is_held());
        self.counters.blocks_retained_now += held(new);
        self.counters.blocks_retained_now -= held(old);
        self.counters.blocks_retained_max = self.counters.blocks_retained_max.max(self.counters.blocks_retained_now);
    }

    fn enter_page(&mut self, pages: &Pages, position: u32, page: PageId) {
        let page = u64::from(page.0);
        if !self.by_page.can_have(page) {
            self.by_page.widen_to(u64::from(pages.memory().page_count()));
        }
        if !self.by_page.insert(page, position) {
            // A page is in one log block. Of the two the one counts that is there now: who does not find it here would let the guest change it.
            let other = self.by_page.find(page);
            other.map(|other| self.by_page.remove(page, other));
            self.by_page.insert(page, position);
            // Which page a block is in, its guest decides: no other guest's log ends with this one's books, and no worker, whose
            // follower would refuse such a table.
            self.distrust(format!(
                "page {page} is in log block {position}, and was still known to be in log block {other:?}: this is a fault of amberlog's"
            ));
        }
    }

    /// Whether a log block is the newest committed version of its home block.
    pub(crate) fn is_newest(&self, position: u32) -> bool {
        self.versions.contains(position)
    }

    /// Holds the log's superblock, in place of the one before. False where there is no memory for it, or none for the next one in a log
    /// that is not open yet.
    pub(crate) fn hold_superblock(&mut self, pages: &Pages, block: &[u8]) -> bool {
        let slot = self.superblock_spare.take().or_else(|| self.pool.take_block());
        let Some(slot) = slot else { return self.differs_in_tail_alone(pages, block) };
        self.pool.fill_block(slot, block);
        self.set_location(pages, 0, Location::Block(slot));
        self.keep_spare();
        self.superblock_spare.is_some() || self.is_open()
    }

    /// Takes a slot for the next superblock, if there is none.
    pub(crate) fn keep_spare(&mut self) {
        if self.superblock_spare.is_none() {
            self.superblock_spare = self.pool.take_block();
        }
    }

    /// Whether the superblock that is held says the same, but for where the log begins: that is the table's to say, and whoever reads the
    /// superblock reads it with that.
    fn differs_in_tail_alone(&self, pages: &Pages, block: &[u8]) -> bool {
        let mut held = vec![0; self.shape.block_bytes as usize];
        let (Ok(said), true) = (jbd2::Superblock::decode(block), self.read_held(pages, 0, &mut held)) else {
            return false;
        };
        let Ok(mut edit) = jbd2::SuperblockEdit::new(&mut held) else { return false };
        edit.start(said.start).sequence(said.sequence).seal();
        self.is_open() && held == block
    }

    fn give_block_slot(&mut self, slot: u32) {
        if self.pins.contains_key(&slot) {
            self.zombies.push(slot);
        } else {
            self.pool.give_block(slot);
        }
    }

    /// Keeps a block slot's content in place until [`VmJcb::unpin`].
    pub(crate) fn pin(&mut self, slot: u32) {
        *self.pins.entry(slot).or_insert(0) += 1;
    }

    pub(crate) fn unpin(&mut self, slot: u32) {
        let Some(count) = self.pins.get_mut(&slot) else { return };
        *count -= 1;
        if *count == 0 {
            self.pins.remove(&slot);
            if let Some(index) = self.zombies.iter().position(|zombie| *zombie == slot) {
                self.zombies.swap_remove(index);
                self.pool.give_block(slot);
            }
        }
    }

    /// Log blocks from `from` to `to`, going round the log's end.
    pub(crate) fn distance(&self, from: u32, to: u32) -> u32 {
        self.format.as_ref().map_or(0, |format| format.distance(from, to))
    }

    /// The transaction that a committed log block belongs to.
    pub(crate) fn transaction_index(&self, position: u32) -> Option<usize> {
        let tail = self.transactions.front()?.first_position;
        let distance = self.distance(tail, position);
        let index = self.transactions.partition_point(|entry| self.distance(tail, entry.first_position) <= distance);
        index.checked_sub(1)
    }

    /// The sequence number of the transaction that a committed log block belongs to.
    pub(crate) fn sequence_of(&self, position: u32) -> Option<u32> {
        self.transaction_index(position).map(|index| self.transactions[index].sequence)
    }

    /// Makes `position` the newest committed version of `block`; the one it supersedes is let go. Its transaction must
    /// be on the list.
    pub(crate) fn commit_version(&mut self, pages: &Pages, position: u32, block: u64, escaped: bool) {
        self.forget_version(position);
        if let Some(older) = self.newest(block) {
            self.drop_version(pages, (block, older));
            self.counters.released_superseded += 1;
        }
        let is_entered = self.by_block.insert(block, position);
        // Whoever follows makes these books anew, from the log itself.
        assert!(is_entered, "rule 3: log block {position} is a version of block {block}, which has another one");
        self.versions.insert(position);
        if escaped {
            self.escaped.insert(position);
        }
        let location = self.location(position);
        if location.is_held() {
            self.owed.insert(position);
        }
        self.stored_versions += u64::from(location == Location::Storage);
        self.counters.blocks_committed += 1;
    }

    /// The transaction that a log block belongs to, if it is one of the live log's that count.
    pub(crate) fn live_index(&self, position: u32) -> Option<usize> {
        let tail = self.transactions.front()?.first_position;
        let is_live = self.format.is_some_and(|format| format.contains(position))
            && self.distance(tail, position) < self.distance(tail, self.cursor.position);
        if is_live { self.transaction_index(position) } else { None }
    }

    /// Takes a version out of the books, whatever its content; its location stays. Its home block is not known, so that has to be looked for
    /// among all: for what should be no version any more.
    fn forget_version(&mut self, position: u32) {
        self.forget_versions(std::iter::once(position));
    }

    /// The same for many: one pass over what is newest, and none where none of them is.
    pub(crate) fn forget_versions(&mut self, positions: impl Iterator<Item = u32>) {
        let mut is_any = false;
        for position in positions {
            is_any |= self.forget_place(position);
        }
        if is_any {
            let versions = &self.versions;
            self.by_block.retain(|position| versions.contains(position));
        }
    }

    /// What is known of a newest version by its log block. False where it is none. Who calls takes it out of `by_block`.
    fn forget_place(&mut self, position: u32) -> bool {
        if !self.versions.remove(position) {
            return false;
        }
        let location = self.location(position);
        if location.is_held() {
            self.owed.remove(position);
        }
        self.stored_versions -= u64::from(location == Location::Storage);
        self.say_past(position, None);
        self.escaped.remove(position);
        self.written_over.remove(position);
        self.overwritten.remove(position);
        self.absorbed.remove(&position);
        true
    }

    /// Has the table say what the guest has done at home of a held version, past its journal.
    pub(crate) fn say_past(&mut self, position: u32, past: Option<Past>) {
        let location = self.location(position);
        let is_version = matches!(location, Location::Guest(_) | Location::Block(_));
        if is_version && self.table.past(position) != past && !self.table.is_absorbed(position) {
            self.table.store_past(position, location, past);
        }
    }

    /// Whether a version is held with its first word taken out.
    pub(crate) fn is_escaped(&self, position: u32) -> bool {
        self.escaped.contains(position)
    }

    /// The newest versions of blocks in `blocks`: home block and log block.
    pub(crate) fn versions_in(&self, blocks: &std::ops::Range<u64>) -> Vec<(u64, u32)> {
        if blocks.end - blocks.start <= self.by_block.len() as u64 {
            blocks.clone().filter_map(|block| Some((block, self.newest(block)?))).collect()
        } else {
            self.by_block.iter().filter(|(block, _)| blocks.contains(block)).collect()
        }
    }

    /// The newest committed versions of these blocks: home block, transaction, log block, and whether it is written down that the guest has
    /// asked to write over it.
    pub(crate) fn newest_versions(&self, blocks: &std::ops::Range<u64>) -> Vec<(u64, u32, u32, bool)> {
        let of = |(block, position)| {
            let is_gone_over = self.table.past(position).is_some();
            Some((block, self.sequence_of(position)?, position, is_gone_over))
        };
        self.versions_in(blocks).into_iter().filter_map(of).collect()
    }

    /// Copies a held version out as it belongs home: with its first word put back if it was escaped.
    pub(crate) fn read_version(&self, pages: &Pages, position: u32, buffer: &mut [u8]) -> bool {
        let held = self.read_held(pages, position, buffer);
        if held && self.escaped.contains(position) {
            buffer[..4].copy_from_slice(&jbd2::MAGIC.to_be_bytes());
        }
        held
    }

    /// A version that nobody needs any more.
    pub(crate) fn drop_version(&mut self, pages: &Pages, (block, position): (u64, u32)) {
        self.forget_place(position);
        // Whatever else is known of it: its number's next log block is refused as long as this one is there.
        self.by_block.remove(block, position);
        self.set_location(pages, position, Location::Gone);
    }

    /// Forgets a log block altogether: the log's tail has passed it.
    pub(crate) fn clear_position(&mut self, pages: &Pages, position: u32) {
        self.forget_version(position);
        self.set_location(pages, position, Location::None);
    }

    /// Copies the content of a held log block out; false when it is not held in memory.
    pub(crate) fn read_held(&self, pages: &Pages, position: u32, buffer: &mut [u8]) -> bool {
        match self.location(position) {
            Location::Guest(page) => match pages.memory().page(page) {
                Some(slice) => slice.copy_out(0, buffer),
                None => return false,
            },
            Location::Block(slot) => self.pool.read_block(slot, buffer),
            Location::Small(slot) => self.pool.read_small(slot, buffer),
            Location::None | Location::Home | Location::Gone | Location::Storage => return false,
        }
        true
    }

    /// The content of a held version in place, where it is there just as it belongs home.
    pub(crate) fn held_slice(&self, pages: &Pages, position: u32) -> Option<MemorySlice> {
        if self.escaped.contains(position) {
            return None;
        }
        match self.location(position) {
            Location::Guest(page) => pages.memory().page(page),
            Location::Block(slot) => Some(self.pool.block(slot)),
            _ => None,
        }
    }

    /// Copies the content of a retained page out and lets it go; false when there is no memory to copy it to.
    pub(crate) fn copy_page_out(&mut self, pages: &Pages, position: u32, page: PageId) -> bool {
        let Some(slice) = pages.memory().page(page) else { return false };
        let mut scratch = std::mem::take(&mut self.scratch);
        slice.copy_out(0, &mut scratch);
        let slot = self.pool.insert_block(&scratch);
        self.scratch = scratch;
        let Some(slot) = slot else { return false };
        // It is the same version still.
        let past = self.table.past(position);
        self.set_location_past(pages, position, Location::Block(slot), past);
        self.counters.pages_copied += 1;
        self.note_memory();
        true
    }

    /// Opens the log's books for a log that begins at `tail`.
    pub(crate) fn open_books(&mut self, tail: Tail) -> std::io::Result<()> {
        // The superblock is held as long as the log is open. Other blocks need not be.
        if !self.table.make_room(0) || !self.table.make_map() {
            return Err(std::io::ErrorKind::StorageFull.into());
        }
        self.table.set_handed_over(None);
        self.forget_signs();
        self.cursor = tail;
        self.partial = Partial::default();
        self.transactions.clear();
        Ok(())
    }

    /// Somebody has written over the live log, or it is whole again. The table says so first: nobody goes on with a log that is
    /// not whole.
    pub(crate) fn set_torn(&mut self, is_torn: bool) {
        self.table.set_torn(is_torn);
        self.is_torn = is_torn;
    }

    /// Takes in what the table says already: pages by number, what is held.
    pub(crate) fn adopt_locations(&mut self, pages: &Pages) {
        let mut held = 0;
        for position in 0..self.shape.log_blocks {
            let location = self.location(position);
            held += u64::from(location.is_held());
            if let Location::Guest(page) = location {
                self.enter_page(pages, position, page);
            }
        }
        self.counters.blocks_retained_now = held;
        self.counters.blocks_retained_max = held;
    }

    /// Books for a log that was open in an earlier process, and is to be read from `tail` on.
    pub(crate) fn reopen_books(&mut self, tail: Tail) {
        self.cursor = tail;
    }

    /// After the log was read again: newest versions that are gone were discarded, and of the others it is not known whether the
    /// guest has written something else over them at home.
    pub(crate) fn forget_discarded(&mut self) {
        let mut gone = Vec::new();
        for (block, position) in self.by_block.iter() {
            match self.location(position) {
                Location::Gone => gone.push(position),
                Location::Home => {}
                // The guest has written that very version, and was told so.
                _ if self.table.is_absorbed(position) => {
                    self.absorbed.insert(position, block);
                }
                _ => self.overwritten.insert(position),
            }
        }
        self.forget_versions(gone.into_iter());
    }

    /// The file system has `home_blocks` blocks now.
    pub(crate) fn resize_home(&mut self, home_blocks: u64) {
        self.shape.home_blocks = home_blocks;
        self.by_block.widen_to(home_blocks);
    }

    /// Forgets everything: the log is closed and owes nothing.
    pub(crate) fn close_books(&mut self, pages: &Pages) {
        if !self.is_open() && !self.table.has_room() {
            // Closed already.
            return;
        }
        self.ahead = Ahead::default();
        self.table.set_tail(None);
        // Position 0, the superblock, is cleared last: until then an opened table still describes a closed log.
        for position in (0..self.shape.log_blocks).rev() {
            if self.location(position) != Location::None {
                self.set_location(pages, position, Location::None);
            }
        }
        if let Some(slot) = self.superblock_spare.take() {
            self.pool.give_block(slot);
        }
        self.table.clear();
        self.escaped.clear();
        self.overwritten.clear();
        self.absorbed.clear();
        self.table.set_read(false);
        self.set_torn(false);
        // Of a file system that has become another one, too.
        self.by_block = Index::new(self.shape.log_blocks, self.shape.home_blocks);
        self.versions.clear();
        self.owed.clear();
        self.stored_versions = 0;
        self.by_page.clear();
        self.transactions = VecDeque::new();
        self.partial = Partial::default();
        self.accepted.clear();
        self.format = None;
        self.uuid = None;
        self.forget_signs();
    }

    /// Blocks that are still to be written home.
    pub(crate) fn owed_blocks(&self) -> u64 {
        self.owed.len() as u64
    }

    /// The same, and what of a transaction that is not read to its end lies there: it may be committed.
    pub(crate) fn stored_or_unread(&self, pages: &Pages) -> u64 {
        let is_stored = |position: u32| self.location(position) == Location::Storage;
        let next = if self.partial.position == 0 { self.cursor.position } else { self.partial.position };
        let mut unread = 0;
        if next != 0 && self.location(next) != Location::None {
            unread += u64::from(is_stored(next));
            self.pending_tags(pages, &mut |position, _| {
                unread += u64::from(is_stored(position));
                true
            });
        }
        self.stored_versions + unread
    }

    /// Of them those that the host may write home.
    pub(crate) fn writable_blocks(&self) -> u64 {
        if self.is_torn {
            return 0;
        }
        self.owed_blocks() - self.owed.count_common(&self.overwritten) as u64
    }

    /// The counters, with those of this moment.
    pub(crate) fn counters_now(&self) -> Counters {
        Counters { pool_bytes_now: self.pool.used_bytes(), ..self.counters }
    }

    /// Bytes of memory the books take: tuples and their tables, not the copied blocks.
    pub(crate) fn area_bytes(&self) -> u64 {
        self.table.memory_bytes()
            + self.by_page.memory_bytes()
            + self.by_block.memory_bytes()
            + self.strays.memory_bytes()
            + (self.transactions.capacity() * size_of::<Transaction>()) as u64
            + [&self.versions, &self.owed, &self.escaped, &self.overwritten, &self.written_over]
                .map(Positions::memory_bytes)
                .iter()
                .sum::<u64>()
    }

    /// Gives back what the table takes for a part of the log of which little is held any more.
    pub(crate) fn give_back_sparse(&mut self) {
        self.table.give_back_sparse(self.cursor.position);
    }

    /// Gives back what grew and is not needed any more: the guest's tail has moved.
    pub(crate) fn give_back_unused(&mut self) {
        self.table.give_back_unused(self.cursor.position);
        self.give_back_sparse();
        if self.transactions.capacity() > 4 * self.transactions.len() + 64 {
            self.transactions.shrink_to(2 * self.transactions.len());
        }
    }

    pub(crate) fn note_memory(&mut self) {
        self.counters.area_bytes_max = self.counters.area_bytes_max.max(self.area_bytes());
        self.counters.pool_bytes_max = self.counters.pool_bytes_max.max(self.pool.memory_bytes());
    }

    /// Checks the invariants of the header; what is wrong, as a sentence. Costs time: for tests.
    pub(crate) fn check(&self, pages: &Pages) -> Result<(), String> {
        self.table.check()?;
        self.by_block.check()?;
        self.by_page.check()?;
        let mut named = HashSet::new();
        let mut held = 0;
        for position in 0..self.shape.log_blocks {
            let location = self.table.load(position).ok_or(format!("log block {position} has a damaged word"))?;
            if location.is_held() {
                held += 1;
                if !named.insert(location) {
                    return Err(format!("{location:?} is named twice, once by log block {position}"));
                }
            }
            if self.is_open() && self.is_newest(position) && location == Location::Gone {
                return Err(format!("the newest version of a block, at log block {position}, is gone"));
            }
            if self.absorbed.contains_key(&position) && !(self.table.is_absorbed(position) && self.is_newest(position))
            {
                return Err(format!("log block {position} is absorbed, and not copied or not the newest"));
            }
            if let Location::Guest(page) = location
                && self.position_of_page(page) != Some(position)
            {
                return Err(format!("page {page:?} of log block {position} is not in the page table"));
            }
            if let Location::Guest(page) = location
                && !pages.is_kept(page)
            {
                return Err(format!("page {page:?} of log block {position} is not retained, or not protected"));
            }
        }
        if held != self.counters.blocks_retained_now {
            return Err(format!("{held} blocks are held, {} are counted", self.counters.blocks_retained_now));
        }
        let mut newest: Vec<u32> = self.by_block.iter().map(|(_, position)| position).collect();
        newest.sort_unstable();
        if !self.versions.iter().eq(newest.iter().copied()) {
            return Err("the newest versions by their home blocks are not those by their log blocks".to_owned());
        }
        if let Some((position, block)) =
            self.absorbed.iter().find(|(position, block)| self.newest(**block) != Some(**position))
        {
            return Err(format!(
                "log block {position} is absorbed for block {block}, of which it is not the newest version"
            ));
        }
        let retained = self
            .by_page
            .iter()
            .filter(|(page, position)| self.location(*position) == Location::Guest(PageId(*page as u32)));
        if retained.count() != self.by_page.len() {
            return Err("a page is in the page table, and no log block is in it".to_owned());
        }
        if !self.owed.iter().eq(self.versions.iter().filter(|position| self.location(*position).is_held())) {
            return Err("what is owed is not just the newest versions that are held".to_owned());
        }
        if let Some(position) = self.owed.iter().find(|position| self.live_index(*position).is_none()) {
            return Err(format!("log block {position} is owed, and no transaction that counts has it"));
        }
        let is_stored = |position: &u32| self.location(*position) == Location::Storage;
        let stored = self.versions.iter().filter(is_stored).count() as u64;
        if stored != self.stored_versions {
            return Err(format!("{stored} newest versions are on storage, {} are counted", self.stored_versions));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_put_in_order_and_together() {
        let together = ascending_and_apart(vec![40..50, 7..8, 20..30, 8..9, 22..25, 29..35, 60..61]);
        assert_eq!(together, [7..9, 20..35, 40..50, 60..61]);
        assert_eq!(ascending_and_apart(Vec::new()), []);
    }

    #[test]
    fn blocks_of_the_log_are_not_home_in_whichever_order_they_are_told() {
        let directory = tempfile::tempdir_in("/dev/shm").expect("tmpfs");
        let shape = LogShape { block_bytes: 1024, log_blocks: 64, home_blocks: 300 };
        let own = [200..210, 30..31, 100..150, 32..40, 31..32, 299..305, 0..1];
        let table = Table::create(&directory.path().join("table"), shape.block_bytes, shape.log_blocks).expect("made");
        let pool = Pool::create(&directory.path().join("pool"), shape.block_bytes, shape.log_blocks).expect("made");
        let jcb = VmJcb::new(shape, Holding::Copy, own.to_vec(), table, pool);
        for block in (0..400).chain([u64::MAX]) {
            let is_own = own.iter().any(|range| range.contains(&block));
            assert_eq!(jcb.is_home(block), block < shape.home_blocks && !is_own, "{block}");
        }
    }

    fn jcb(directory: &std::path::Path) -> (Pages, VmJcb) {
        let shape = LogShape { block_bytes: 4096, log_blocks: 64, home_blocks: 1000 };
        let table = Table::create(&directory.join("table"), shape.block_bytes, shape.log_blocks).expect("made");
        let pool = Pool::create(&directory.join("pool"), shape.block_bytes, shape.log_blocks).expect("made");
        (Pages::new(guest_memory::VmMemory::new()), VmJcb::new(shape, Holding::Retain, Vec::new(), table, pool))
    }

    #[test]
    fn a_log_whose_books_have_a_page_twice_is_not_trusted() {
        let directory = tempfile::tempdir_in("/dev/shm").expect("tmpfs");
        let (pages, mut jcb) = jcb(directory.path());
        jcb.enter_page(&pages, 5, PageId(3));
        jcb.enter_page(&pages, 6, PageId(4));
        assert_eq!(jcb.contradiction, None);
        jcb.enter_page(&pages, 7, PageId(3));
        let why = jcb.contradiction.as_deref().expect("it is known");
        assert!(why.starts_with("page 3 is in log block 7, and was still known to be in log block Some(5)"), "{why}");
        assert_eq!(jcb.by_page.find(3), Some(7), "the guest does not change what counts now");
    }

    #[test]
    #[should_panic(expected = "rule 3: log block 64 is a version of block 9, which has another one")]
    fn a_version_that_the_books_do_not_take_is_not_passed_over() {
        let directory = tempfile::tempdir_in("/dev/shm").expect("tmpfs");
        let (pages, mut jcb) = jcb(directory.path());
        jcb.commit_version(&pages, 64, 9, false);
    }
}
