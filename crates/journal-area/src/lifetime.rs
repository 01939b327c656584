//! How an area and its logs come and go: made, taken up from what an earlier process has left, forgotten.

use crate::area::JournalArea;
use crate::error::Error;
use crate::faults::AreaCopyOnWrite;
use crate::jcb::{Holding, LogShape, VmJcb};
use crate::logs::{Files, LogId};
use crate::pool::Pool;
use crate::table::Table;
use guest_memory::{HostFile, VmMemory};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

impl JournalArea {
    /// The area of the VM with this memory, which copies pages out through it from now on. `budget_bytes` bounds tables
    /// and copies; above it the largest log's oldest owed blocks are written home.
    pub fn new(memory: &Arc<VmMemory>, budget_bytes: u64) -> Arc<Self> {
        let area = Arc::new(JournalArea::without_logs(memory, budget_bytes));
        memory.set_copy_on_write(Arc::new(AreaCopyOnWrite(Arc::downgrade(&area))));
        area
    }

    /// `LOG_OP_INIT`: makes the control block of a log, closed, with its two files in `directory`. `own_blocks` are the
    /// blocks of the file system that the log itself takes: a tag that names one of them is not a version of anything.
    ///
    /// # Errors
    /// When the files cannot be made.
    pub fn make_log(
        &self,
        directory: &Path,
        name: &str,
        shape: LogShape,
        holding: Holding,
        own_blocks: Vec<Range<u64>>,
    ) -> Result<LogId, Error> {
        let files = Files {
            name: name.to_owned(),
            table: directory.join(format!("{name}.table")),
            pool: directory.join(format!("{name}.pool")),
        };
        let table = Table::create(&files.table, shape.block_bytes, shape.log_blocks)?;
        let pool = Pool::create(&files.pool, shape.block_bytes, shape.log_blocks)?;
        Ok(self.logs.listed().add(VmJcb::new(shape, holding, own_blocks, table, pool), files))
    }

    /// The same of a log whose files an earlier process left in `directory`: goes on with it as it is. The guest's memory has to be
    /// mapped as it was, and nothing of the guest may run that could fault or ask before this returns.
    ///
    /// # Errors
    /// When the files are not there, or contradict themselves: nothing was changed.
    pub fn adopt_log(
        &self,
        directory: &Path,
        name: &str,
        shape: LogShape,
        holding: Holding,
        own_blocks: Vec<Range<u64>>,
    ) -> Result<LogId, Error> {
        let files = Files {
            name: name.to_owned(),
            table: directory.join(format!("{name}.table")),
            pool: directory.join(format!("{name}.pool")),
        };
        let (table, pool) = (HostFile::open(&files.table)?, HostFile::open(&files.pool)?);
        // Until it is there nobody looks for a page.
        let mut listed = self.logs.listed();
        let found = ((table, files.table.as_path()), (pool, files.pool.as_path()));
        let jcb = VmJcb::rebuild(&self.pages, shape, holding, own_blocks, found.0, found.1)?;
        self.look_for_contradiction(&jcb);
        Ok(listed.add(jcb, files))
    }

    /// `LOG_OP_CLEANUP`: forgets a log and removes its files. What it owed is lost unless it was recovered before.
    /// Whoever still names it finds a log that is closed and holds nothing.
    pub fn forget_log(&self, id: LogId) {
        let Some(cell) = self.logs.cell(id) else { return };
        let has_left = self.locked(&cell, |jcb| {
            jcb.close_books(&self.pages);
            jcb.set_leaving();
            for path in [&cell.files.table, &cell.files.pool] {
                if let Err(error) = std::fs::remove_file(path) {
                    log::warn!("removing {} failed: {error}", path.display());
                }
            }
            jcb.has_left()
        });
        self.pages.let_loose_go();
        if has_left {
            self.logs.remove(id);
        }
        self.feed_starved();
    }
}
