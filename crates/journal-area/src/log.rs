//! The held log as replay reads it: from a live control block, from one that is being taken elsewhere, or from the files that a
//! dead process left.

use crate::error::Error;
use crate::jcb::VmJcb;
use crate::location::{Location, Past};
use crate::logs::Cell;
use crate::pages::Pages;
use crate::pool::Pool;
use crate::table::{Doubt, Opening, Table, Tail};
use guest_memory::{HostFile, PAGE_BYTES, PageId};
use jbd2::Content as LogContent;
use std::io;
use std::path::Path;
use std::sync::Arc;

/// What a dead process left of one log.
#[derive(Debug)]
pub struct FoundLog {
    table: Table,
    pool: Pool,
    /// The guest's memory files, each with the number of its first page.
    ram: Vec<(u32, HostFile)>,
}

/// The file that has a page, and where in it. The one rule for whether a page is there and for where it is read: files
/// that are said to overlap have each page once, in the first of them.
fn place_in(ram: &[(u32, HostFile)], page: PageId) -> Option<(&HostFile, u64)> {
    ram.iter().find_map(|(first, file)| {
        let offset = u64::from(page.0.checked_sub(*first)?) * PAGE_BYTES as u64;
        (offset + PAGE_BYTES as u64 <= file.len()).then_some((file, offset))
    })
}

impl FoundLog {
    /// Opens table and pool and checks that every location they name exists, once.
    ///
    /// # Errors
    /// When a file is missing, or the table contradicts itself.
    pub fn open(table: &Path, pool: &Path, ram: Vec<(u32, HostFile)>) -> Result<Self, Error> {
        Self::from_files((HostFile::open(table)?, table), (HostFile::open(pool)?, pool), ram)
    }

    /// The same of files that were opened by somebody else, each with what it is called in errors.
    ///
    /// # Errors
    /// As [`FoundLog::open`].
    pub fn from_files(
        (table, table_path): (HostFile, &Path),
        (pool, pool_path): (HostFile, &Path),
        ram: Vec<(u32, HostFile)>,
    ) -> Result<Self, Error> {
        let table = Table::from_file(table, table_path)?;
        let mut pool = Pool::from_file(pool, pool_path, table.block_bytes(), table.log_blocks())?;
        let damaged = |position, what: String| Error::Table { position, what };
        let mut pages = std::collections::HashSet::new();
        if table.tail().is_some_and(|tail| tail.position >= table.log_blocks()) {
            return Err(damaged(0, "is said to be followed by a log that begins beyond its end".to_owned()));
        }
        // What was named by a log that is closed is not there any more.
        let named = if table.tail().is_some() { table.log_blocks() } else { 0 };
        for position in 0..named {
            let location =
                table.load(position).ok_or_else(|| damaged(position, "has an impossible word".to_owned()))?;
            let once = match location {
                Location::Guest(page) => {
                    let known = place_in(&ram, page).is_some();
                    known && table.block_bytes() as usize == PAGE_BYTES && pages.insert(page)
                }
                Location::Block(slot) => pool.claim_block(slot),
                Location::Small(slot) => pool.claim_small(slot),
                _ => true,
            };
            if !once {
                return Err(damaged(position, format!("names {location:?}, which does not exist or is named twice")));
            }
        }
        Ok(FoundLog { table, pool, ram })
    }

    /// Bytes in a log block.
    pub fn block_bytes(&self) -> u32 {
        self.table.block_bytes()
    }

    /// Number of log blocks.
    pub fn log_blocks(&self) -> u32 {
        self.table.log_blocks()
    }

    /// Whether there is anything to finish.
    pub fn is_open(&self) -> bool {
        self.table.tail().is_some()
    }

    /// Whether it was only being opened: its guest was not told so, and has committed nothing.
    pub fn is_unopened(&self) -> bool {
        let is_there = |position| self.table.load(position) != Some(Location::None);
        self.is_open()
            && !self.table.is_marked()
            && !self.table.is_recovering()
            && self.table.handed_over().is_none()
            && !(1..self.table.log_blocks()).any(is_there)
    }

    /// Which opening of the log it is.
    pub fn opening(&self) -> Option<[Opening; 2]> {
        self.table.opening()
    }

    /// The guest pages it needs.
    pub fn pages(&self) -> impl Iterator<Item = PageId> + '_ {
        let named = if self.is_open() { self.table.log_blocks() } else { 0 };
        (0..named).filter_map(|position| match self.table.load(position) {
            Some(Location::Guest(page)) => Some(page),
            _ => None,
        })
    }

    /// The log, for replay.
    pub fn log(&self) -> HeldLog<'_> {
        HeldLog { from: From::Found(self) }
    }

    /// Whether its guest was closing it, and storage is, or was about to be, told so.
    pub fn is_closing(&self) -> bool {
        self.table.is_marked() && self.table.is_closing()
    }

    /// Where the log goes on outside, if it was being handed over.
    pub fn handed_over(&self) -> Option<Tail> {
        self.table.handed_over()
    }

    /// Nobody is to replay it: where its homes were is something else by now. From here on it is what a log is whose books were proven
    /// wrong, kept block for block.
    pub fn distrust(&self) {
        self.table.set_distrusted();
    }

    /// A flush of its disk has failed: whoever finishes it later has to know it.
    pub fn note_failed_flush(&self) {
        self.table.set_doubt(Doubt { is_doubted: true, flush_failed: true, ..self.table.doubt() });
    }

    /// Says that there is nothing left to finish.
    pub fn close(&self) {
        self.table.set_tail(None);
    }
}

#[derive(Debug)]
enum From<'a> {
    Live(&'a VmJcb, &'a Pages),
    /// Under the log's lock for the time of each question only.
    Taken(&'a Pages, Arc<Cell>),
    Found(&'a FoundLog),
}

/// A log whose blocks are held in memory, or known to be at home.
#[derive(Debug)]
pub struct HeldLog<'a> {
    from: From<'a>,
}

/// A live log as it is at this moment.
fn look_at<T>(pages: &Pages, cell: &Cell, look: impl FnOnce(&mut HeldLog<'_>) -> T) -> T {
    cell.locked(pages, |jcb| look(&mut HeldLog::live(jcb, pages)))
}

impl<'a> HeldLog<'a> {
    pub(crate) fn live(jcb: &'a VmJcb, pages: &'a Pages) -> Self {
        HeldLog { from: From::Live(jcb, pages) }
    }

    pub(crate) fn taken(pages: &'a Pages, cell: Arc<Cell>) -> Self {
        HeldLog { from: From::Taken(pages, cell) }
    }

    /// Asks the log as it is at this moment.
    fn now<T>(&self, ask: impl FnOnce(&HeldLog<'_>, &Table) -> T) -> T {
        match &self.from {
            From::Live(jcb, _) => ask(self, &jcb.table),
            From::Found(found) => ask(self, &found.table),
            From::Taken(pages, cell) => look_at(pages, cell, |held| held.now(ask)),
        }
    }

    /// Notes, for whoever finds the log, that it goes on outside from here on as soon as the outside says so; or that it
    /// does not.
    pub fn note_hand_over(&self, cursor: Option<Tail>) {
        self.now(|_, table| table.set_handed_over(cursor));
    }

    /// The first number that nothing has which was made durable beside it, if anything was.
    pub fn numbered(&self) -> Option<u32> {
        self.now(|_, table| table.numbered())
    }

    /// Whether something that was written to storage in this opening may be lost.
    pub fn is_doubted(&self) -> bool {
        self.now(|_, table| table.doubt().is_doubted)
    }

    /// Whether a flush of its disk has failed in this opening.
    pub fn has_failed_flush(&self) -> bool {
        self.now(|_, table| table.doubt().flush_failed)
    }

    /// Number of log blocks.
    pub fn log_blocks(&self) -> u32 {
        self.now(|_, table| table.log_blocks())
    }

    /// Bytes in a log block.
    pub fn block_bytes(&self) -> u32 {
        self.now(|_, table| table.block_bytes())
    }

    /// Whether the log has to be materialised instead of replayed.
    pub fn is_materialise(&self) -> bool {
        self.now(|_, table| table.is_materialise())
    }

    /// Whether the books were proven wrong: the log is kept block for block, and where its blocks belong is in doubt.
    pub fn is_distrusted(&self) -> bool {
        self.now(|_, table| table.is_distrusted())
    }

    /// Where the live log begins.
    pub fn tail(&self) -> Option<Tail> {
        self.now(|_, table| table.tail())
    }

    /// Where a log block's content is.
    pub fn location(&self, position: u32) -> Location {
        self.now(|_, table| table.load(position).unwrap_or(Location::None))
    }

    /// Whether the guest has written something over the home of what is there, past its journal, or may have; nothing where no more is known.
    pub fn past(&self, position: u32) -> Option<Past> {
        self.now(|_, table| table.past(position))
    }

    /// Whether a log block belongs to a transaction of the live log that counts. Nothing is known of a log that was found.
    pub fn is_live(&self, position: u32) -> bool {
        match &self.from {
            From::Live(jcb, _) => jcb.live_index(position).is_some(),
            From::Taken(pages, cell) => look_at(pages, cell, |held| held.is_live(position)),
            From::Found(_) => false,
        }
    }

    /// Copies a held block out; false when it is not held in memory.
    pub fn read_held(&self, position: u32, buffer: &mut [u8]) -> bool {
        match &self.from {
            From::Live(jcb, pages) => jcb.read_held(pages, position, buffer),
            From::Taken(pages, cell) => look_at(pages, cell, |held| held.read_held(position, buffer)),
            From::Found(found) => match self.location(position) {
                Location::Guest(page) => {
                    let Some((file, offset)) = place_in(&found.ram, page) else { return false };
                    file.slice(offset, PAGE_BYTES).copy_out(0, buffer);
                    true
                }
                Location::Block(slot) => {
                    found.pool.read_block(slot, buffer);
                    true
                }
                Location::Small(slot) => {
                    found.pool.read_small(slot, buffer);
                    true
                }
                _ => false,
            },
        }
    }

    /// Reads a log block as replay wants it. The superblock says that the log begins at our own tail.
    ///
    /// # Errors
    /// When a block is only on storage ([`Location::Storage`]): the caller has to read it there.
    pub fn read_block(&self, position: u32, buffer: &mut [u8]) -> io::Result<LogContent> {
        if let From::Taken(pages, cell) = &self.from {
            // In one piece: a page that is copied out meanwhile is at one place or the other.
            return look_at(pages, cell, |held| held.read_block(position, buffer));
        }
        if self.read_held(position, buffer) {
            if position == 0
                && let Some(tail) = self.tail()
            {
                jbd2::SuperblockEdit::new(buffer)
                    .map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e.to_string()))?
                    .start(tail.position)
                    .sequence(tail.sequence)
                    .seal();
            }
            return Ok(LogContent::Present);
        }
        match self.location(position) {
            // A log begins with a control block, which is never let go. This one was passed, when its guest began a new log at this place
            // and the process died before that was forgotten: the new log is empty.
            Location::Home | Location::Gone if self.tail().is_some_and(|tail| tail.position == position) => {
                buffer.fill(0);
                Ok(LogContent::Present)
            }
            Location::Home | Location::Gone => Ok(LogContent::AtHome),
            Location::Storage => {
                Err(io::Error::other(format!("log block {position} is at its own place on storage, not held")))
            }
            _ => {
                // Not written since the tail passed it: whatever storage has there is not of this log.
                buffer.fill(0);
                Ok(LogContent::Present)
            }
        }
    }
}

impl jbd2::LogRead for HeldLog<'_> {
    type Error = io::Error;

    fn read(&mut self, position: u32, buffer: &mut [u8]) -> io::Result<LogContent> {
        self.read_block(position, buffer)
    }
}
