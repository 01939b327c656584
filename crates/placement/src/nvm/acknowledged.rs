//! The transaction that the guest was told of before the flush of its appends ([`super::NvmOptions::pipelined`]), until that has ended.
//!
//! It is still the one that is being committed, of which nothing counts in the region, and the next one begins when its flush has ended: so a
//! loss of power costs the last acknowledged one at most, and never a part of it. For recovery it is *prepared*: it counts where its appends are at home
//! ([`super::condition`]). Whoever recovers beside a live host finds them there, since their writes have ended.
//!
//! The guest goes on meanwhile, and must not be taken at its word: nothing may reach storage, or leave the region, that is right only if the
//! transaction counts. What it writes home of the transaction's own blocks is absorbed where it is what the transaction has for them (an `fsync` under
//! `data=journal` does so before it returns). Else it waits, lest a part of the transaction be there without the rest, and lest an append be
//! another than the one that recovery looks for. So does what it writes anywhere else but over blocks that are free without the
//! transaction: it may have freed what is there. Discards wait. A tail of its log waits that would have versions leave the region which the
//! guest has not written home: the transaction may have them once more, or say that they are not wanted; and one that passes the transaction,
//! where something of that was absorbed. Whoever closes the log, has it leave, or
//! asks for all that is committed to be home waits, too, as they do for any commit.
//!
//! What need not wait: what is absorbed (nothing is written), reads (the guest sees what it committed), flushes (what the guest itself has written home
//! is durable by them, as ever), and what a checkpoint brings home, which is of earlier transactions.
//!
//! It must never: let a block of an earlier transaction be overwritten at home by what came after this one; have what is noted of a block be older
//! than this transaction, and be noted behind it.
//!
//! Failure story: where the flush fails, or the region, after the guest was told, the transaction is *lost* to this process: it stays prepared, for whoever
//! recovers, no later one is committed, and what would wait for it fails. Whoever reads where the log begins, as a kernel does that mounts again
//! without a reset, has it made durable first, and is told of an error where that fails: so does a log that goes to its own place. Only who writes
//! over the log does so without it, where that fails.

use super::captured::Captured;
use super::commit_state::Commit;
use super::log_stream::TailMove;
use super::notes::Note;
use super::report::NvmCounters;
use super::versions::HomeState;
use super::work::Work;
use jbd2::sequence;
use nvm_journal::Error;
use std::io;

/// Why something fails that would have to wait for ever.
fn lost(sequence: u32) -> io::Error {
    io::Error::other(format!(
        "whether transaction {sequence}, which was acknowledged before the flush of its appends (nvm-pipelined), is durable is not known: \
         that flush has failed"
    ))
}

impl Work {
    /// The transaction that the guest was told of, and that is not durable.
    pub(super) fn acknowledged(&self) -> Option<&Commit> {
        self.commit.as_ref().filter(|commit| commit.is_acknowledged)
    }

    /// Whether there is one.
    pub(super) fn has_acknowledged(&self) -> bool {
        self.acknowledged().is_some()
    }

    /// Whether there is one, and it will never be known to be durable.
    pub(super) fn has_lost(&self) -> bool {
        self.commit.as_ref().is_some_and(Commit::is_lost)
    }

    /// Whether it says anything of a block.
    pub(super) fn is_acknowledged(&self, block: u64) -> bool {
        self.acknowledged().is_some_and(|commit| commit.has(block))
    }

    /// Whether this is what it has for a block, as one that may become durable: then it need not be written home.
    pub(super) fn is_acknowledged_content(&self, block: u64, given: Option<&[u8]>) -> bool {
        let commit = self.acknowledged().filter(|commit| !commit.is_lost() && !self.in_flight.touches(block));
        given.is_some() && commit.and_then(|commit| commit.content(block)) == given
    }

    /// The guest has written home what the transaction has for this block.
    pub(super) fn absorb_ahead(&mut self, captured: &mut Captured, block: u64) {
        let Some(commit) = &mut self.commit else { return };
        if commit.absorb(block) {
            // Behind what is noted of the transaction, whose version this is of.
            captured.notes.note(&Note::Homes(vec![(block, commit.sequence, HomeState::Same)]));
        }
    }

    /// What a reader gets of a block: what the guest was told is committed.
    pub(super) fn visible<'a>(&'a self, captured: &'a Captured, block: u64) -> Option<&'a [u8]> {
        self.acknowledged().and_then(|commit| commit.content(block)).or_else(|| captured.visible(block))
    }

    /// Whether the guest may overwrite a block at home that the transaction says nothing of: nobody needs it without that either.
    pub(super) fn may_overwrite(&self, captured: &mut Captured, block: u64) -> bool {
        !self.has_acknowledged() || captured.was_free(&self.home.file, block)
    }

    /// What it is behind waits, unless that would be for ever.
    pub(super) fn behind_acknowledged<T>(&self) -> Result<Option<T>, Error> {
        match &self.commit {
            Some(commit) if commit.is_lost() => {
                let what = "writing home what comes after the last transaction on NVM".to_owned();
                Err(Error::Failed { what, source: lost(commit.sequence) })
            }
            _ => Ok(None),
        }
    }

    /// Whether a tail has versions leave the region that may be needed without the transaction.
    pub(super) fn tail_relies_on_acknowledged(&self, captured: &Captured, passed: TailMove) -> bool {
        let is_behind = |block: &u64| captured.homes.get(block).is_some_and(|held| held.home == HomeState::Behind);
        // Of what the guest has written home of the transaction's own, none is at home: who has done so may be done with all of it.
        let is_past = |commit: &Commit| match passed {
            TailMove::Passed(tail) => sequence::is_after(tail, commit.sequence),
            TailMove::Anew => true,
        };
        if self.acknowledged().is_some_and(|commit| commit.has_absorbed() && is_past(commit)) {
            return true;
        }
        self.has_acknowledged()
            && captured.passed_by(passed, &|block| self.in_flight.touches(block)).iter().any(is_behind)
    }

    /// The same, where that will not change any more.
    ///
    /// # Errors
    /// Then.
    pub(super) fn refuse_tail_behind_lost(&self, captured: &Captured, passed: TailMove) -> io::Result<()> {
        match &self.commit {
            Some(commit) if commit.is_lost() && self.tail_relies_on_acknowledged(captured, passed) => {
                Err(lost(commit.sequence))
            }
            _ => Ok(()),
        }
    }

    /// Its flush has failed, or the region.
    pub(super) fn say_lost(&self) {
        NvmCounters::add(&self.nvm.counters.commits_in_doubt, 1);
        if let Some(commit) = &self.commit {
            log::error!(
                "disk {}: {}; it is what the next recovery finds if its appends are there, and nothing later is committed",
                self.name(),
                lost(commit.sequence)
            );
        }
    }

    /// Whoever writes over the log does so without a transaction that is lost.
    ///
    /// # Errors
    /// Where its guest has written something of it home, which is nowhere else.
    pub(super) fn withdraw_lost(&mut self, captured: &mut Captured) -> io::Result<()> {
        let Some(commit) = self.commit.as_ref().filter(|commit| commit.is_lost()) else { return Ok(()) };
        if commit.has_absorbed() {
            return Err(lost(commit.sequence));
        }
        captured.journal.withdraw().map_err(io::Error::other)?;
        self.commit = None;
        Ok(())
    }

    /// One that is lost is made durable after all.
    ///
    /// # Errors
    /// When that fails: it is as it was.
    pub(super) fn make_lost_durable(&mut self, captured: &mut Captured) -> io::Result<()> {
        let Some(sequence) = self.commit.as_ref().filter(|commit| commit.is_lost()).map(|commit| commit.sequence)
        else {
            return Ok(());
        };
        self.make_acknowledged_durable(captured).map_err(|error| {
            io::Error::new(error.kind(), format!("{}, and it cannot be made so: {error}", lost(sequence)))
        })?;
        log::info!("disk {}: transaction {sequence} is durable after all", self.name());
        Ok(())
    }

    /// Makes it durable at once, where nothing else is on its way to its blocks any more.
    ///
    /// # Errors
    /// When that fails: it is as it was.
    pub(super) fn make_acknowledged_durable(&mut self, captured: &mut Captured) -> io::Result<()> {
        if !self.has_acknowledged() {
            return Ok(());
        }
        let failed_flushes = self.home.file.failed_flushes();
        // As with every transaction whose appends go home: an image of before does not have them.
        let mark = self.begin_mark(captured)?;
        // A flush that failed may have lost what it was to make durable, and no later one says so.
        for (block, content) in self.acknowledged().into_iter().flat_map(Commit::appends) {
            self.home.file.write_all_at(content, captured.log.home_offset(block))?;
        }
        if let Err(error) = self.home.file.sync_since(failed_flushes) {
            self.flush_failed(captured);
            return Err(error);
        }
        self.end_mark(captured, mark)?;
        self.end_acknowledged(captured);
        if self.has_acknowledged() {
            return Err(io::Error::other("the NVM region has failed"));
        }
        Ok(())
    }
}
