//! When the mark on storage ([`super::mark`]) is written anew, and when the region is told of it.
//!
//! It must never: have blocks leave the region under a mark that storage may not have.
//!
//! Failure story: where the next mark cannot be written, or a flush has failed since it was, whoever wanted it is told so, and nothing leaves
//! the region.

use super::captured::Captured;
use super::mark::{ToWrite, checksum, counted_on, next};
use super::work::Work;
use crate::opening::{is_alone_in_its_page, write_mark_unflushed};
use std::io;

impl Work {
    /// Whether the superblock on storage is the mark, and stays so.
    fn has_mark(&self) -> bool {
        !self.departure.is_superblock_on_its_way() && self.closing.as_ref().is_none_or(|closing| !closing.is_on_its_way)
    }

    /// Sees to it that the next mark is written, which the next flush makes durable. Gives the number of that for [`Self::end_mark`].
    pub(super) fn begin_mark(&mut self, captured: &mut Captured) -> io::Result<u64> {
        if !self.has_mark() || !is_alone_in_its_page(&captured.log) {
            return Ok(captured.marks.told());
        }
        let mark = match captured.marks.to_write() {
            ToWrite::Nothing(number) => return Ok(number),
            ToWrite::Again(mark) => *mark,
            ToWrite::Next => {
                self.expect_mark(captured)?;
                next(captured.marks.durable())?
            }
        };
        // Where this fails, storage may have it all the same: the region knows that.
        write_mark_unflushed(&captured.log, &mark)?;
        Ok(captured.marks.was_written(mark))
    }

    /// The region is told that storage has this mark or the next.
    fn expect_mark(&self, captured: &mut Captured) -> io::Result<()> {
        captured.owner.mark_checksum = checksum(&counted_on(captured.marks.durable(), 1)?);
        captured.journal.set_owner(&captured.owner).map_err(io::Error::other)
    }

    /// A flush has ended that was begun after the mark with this number was written: the region is told.
    ///
    /// # Errors
    /// When that fails, or another flush has failed meanwhile: nothing may leave the region.
    pub(super) fn end_mark(&mut self, captured: &mut Captured, number: u64) -> io::Result<()> {
        if !self.has_mark() {
            return Ok(());
        }
        if captured.marks.is_lost(number) {
            return Err(io::Error::other("a flush has failed, and the mark of the NVM region may not be on storage"));
        }
        if let Some(mark) = captured.marks.became_durable(number) {
            captured.owner.mark_checksum = checksum(&mark);
            captured.journal.set_owner(&captured.owner)?;
        }
        Ok(())
    }

    /// Whether the last mark is too old for blocks to leave the region under it, or to come to it: one in which there is nothing yet has
    /// what is committed next.
    pub(super) fn is_mark_old(&self, captured: &Captured) -> bool {
        let mark_age = self.nvm.options.mark_age;
        // One that cannot be written anew is as old as its log, and a flush does not change that.
        let may_be_younger = mark_age.is_zero() || is_alone_in_its_page(&captured.log);
        may_be_younger && captured.marks.age() >= mark_age && self.has_mark()
    }

    /// Begins the next mark where the last one is too old. Gives a number for [`Self::end_mark`].
    pub(super) fn begin_old_mark(&mut self, captured: &mut Captured) -> io::Result<u64> {
        if self.is_mark_old(captured) { self.begin_mark(captured) } else { Ok(captured.marks.told()) }
    }

    /// Both at once, where the last one is too old and somebody mounts: that is rare.
    pub(super) fn renew_old_mark(&mut self, captured: &mut Captured) -> io::Result<()> {
        if captured.journal.is_empty() || !self.is_mark_old(captured) {
            return Ok(());
        }
        let number = self.begin_mark(captured)?;
        if let Err(error) = captured.log.journal.file.sync_data() {
            self.flush_failed(captured);
            return Err(error);
        }
        self.end_mark(captured, number)
    }
}
