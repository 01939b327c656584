//! A control block rebuilt from what a dead process left, so that another one goes on with the log under its guest.
//!
//! Table, pool and retained pages are as the dead process left them: right after every store (`table`). What was only in its memory is
//! worked out again. Which versions count, and of which blocks they are, the held log itself says: it is read from its tail as it was
//! when it was written. Where the books have forgotten since, they forget again: a version that is gone and newest was
//! discarded.
//!
//! What is not known any more is taken for the worse: which owed versions the guest has written over at home, past its own
//! journal, beside those of which the table says so (all of them, so the host writes none home by itself until the guest has moved on); which pages are hot, and what was seen that
//! could not be explained (none). A log whose books were proven wrong, or that somebody has written over, is refused: what was known of it
//! beside the table is gone.

use crate::error::Error;
use crate::jcb::{Holding, LogShape, VmJcb};
use crate::location::Location;
use crate::pages::Pages;
use crate::pool::Pool;
use crate::table::{Passed, Table};
use guest_memory::{HostFile, PAGE_BYTES, PageId};
use jbd2::Superblock;
use std::ops::Range;
use std::path::Path;

impl VmJcb {
    /// Opens table and pool, and goes on with the log in them. The guest's memory has to be mapped as it was.
    ///
    /// # Errors
    /// When they contradict themselves, or name what is not there. Nothing was changed then.
    pub(crate) fn rebuild(
        pages: &Pages,
        shape: LogShape,
        holding: Holding,
        own_blocks: Vec<Range<u64>>,
        (table, table_path): (HostFile, &Path),
        (pool, pool_path): (HostFile, &Path),
    ) -> Result<Self, Error> {
        let table = Table::from_file(table, table_path)?;
        let damaged = |position, what: &str| Error::Table { position, what: what.to_owned() };
        if (table.block_bytes(), table.log_blocks()) != (shape.block_bytes, shape.log_blocks) {
            return Err(damaged(0, "is of a log of another size"));
        }
        let pool = Pool::from_file(pool, pool_path, shape.block_bytes, shape.log_blocks)?;
        let mut jcb = VmJcb::new(shape, holding, own_blocks, table, pool);
        let Some(tail) = jcb.table.tail() else {
            // It was closed, and perhaps not all of it forgotten.
            jcb.table.clear();
            jcb.pool.go_on();
            return Ok(jcb);
        };
        if jcb.table.is_distrusted() || jcb.table.is_torn() {
            return Err(damaged(0, "is said to be of a log whose books were proven wrong, or that was written over"));
        }
        if tail.position >= shape.log_blocks {
            return Err(damaged(0, "is said to be followed by a log that begins beyond its end"));
        }
        let mut retained: Vec<PageId> = Vec::new();
        for position in 0..shape.log_blocks {
            let location = jcb.table.load(position).ok_or_else(|| damaged(position, "has an impossible word"))?;
            let is_there = match location {
                Location::Guest(page) => {
                    let is_whole = pages.memory().page(page).is_some_and(|slice| slice.is_whole_page());
                    retained.push(page);
                    is_whole && shape.block_bytes as usize == PAGE_BYTES
                }
                Location::Block(slot) => jcb.pool.claim_block(slot),
                Location::Small(slot) => jcb.pool.claim_small(slot),
                _ => true,
            };
            if !is_there {
                return Err(damaged(position, "names what is not there, or is named twice"));
            }
        }
        retained.sort_unstable();
        if retained.windows(2).any(|pair| pair[0] == pair[1]) {
            return Err(damaged(0, "has a page that is named twice"));
        }
        let mut block = vec![0; shape.block_bytes as usize];
        if !jcb.read_held(pages, 0, &mut block) {
            return Err(damaged(0, "is not held, though the log is open"));
        }
        let superblock =
            Superblock::decode(&block).map_err(|error| Error::Table { position: 0, what: error.to_string() })?;
        // The last that can be refused: what is retained has a log from here on that lets it go one day.
        if !pages.adopt(&retained) {
            return Err(damaged(0, "has a page that another log has"));
        }
        jcb.table.give_back_what_was_left();
        jcb.pool.go_on();
        jcb.keep_spare();
        jcb.adopt_locations(pages);
        jcb.reopen_books(tail);
        jcb.uuid = Some(superblock.uuid);
        jcb.format = superblock.format().ok();
        jcb.forget_what_was_passed(pages, tail.position);
        jcb.is_rebuilding = true;
        jcb.accept(pages);
        jcb.is_rebuilding = false;
        jcb.forget_passed(pages);
        jcb.forget_discarded();
        jcb.counters.transactions = 0;
        jcb.counters.blocks_committed = 0;
        jcb.counters.released_superseded = 0;
        jcb.counters.released_revoked = 0;
        jcb.note_memory();
        Ok(jcb)
    }

    /// The earlier process died when the tail had passed something, and before all of that was forgotten.
    fn forget_what_was_passed(&mut self, pages: &Pages, tail: u32) {
        let positions = match (self.table.passed(), self.format) {
            (Some(Passed::Everything), _) => (1..self.shape.log_blocks).collect(),
            (Some(Passed::From(from)), Some(format)) if format.contains(from) && format.contains(tail) => {
                let next = |position: &u32| Some(format.next(*position)).filter(|position| *position != tail);
                std::iter::successors(Some(from), next).collect()
            }
            _ => Vec::new(),
        };
        for position in positions {
            if self.location(position) != Location::None {
                self.set_location(pages, position, Location::None);
            }
        }
        self.table.set_forgotten();
    }

    /// Only versions that count can be at home or gone. What was let go, and was to be forgotten when the earlier process died, would stand
    /// in the way of what the guest writes there next: a replay that comes to it says that the log is not whole.
    fn forget_passed(&mut self, pages: &Pages) {
        for position in 1..self.shape.log_blocks {
            let is_let_go = matches!(self.location(position), Location::Home | Location::Gone);
            if is_let_go && self.live_index(position).is_none() {
                self.set_location(pages, position, Location::None);
            }
        }
    }
}
