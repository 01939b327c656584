//! An open log whose transactions go to the region, and what is known of each block's home.

use super::Region;
use super::log_stream::{LogStream, Tail, TailMove, Transaction, digest_of};
use super::mark::Marks;
use super::notes::{Note, Notes};
use super::versions::{AtHome, Held, HomeState, Written};
use super::view::CommittedView;
use crate::log::Log;
use extfs::Allocation;
use jbd2::{Compound, CompoundBlock, CompoundError, Part, build};
use nvm_journal::{Error, Journal, Owner};
use recovery::HomeBounds;
use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use write_log::LoggedFile;

/// See the module.
pub(super) struct Captured {
    pub log: Arc<Log>,
    /// What is not the log's own.
    pub all_but_own: HomeBounds,
    pub stream: LogStream,
    pub journal: Journal<Region>,
    pub owner: Owner,
    /// What the journal's superblock on storage is meanwhile.
    pub marks: Marks,
    pub homes: HashMap<u64, Held>,
    pub at_home: HashMap<u64, AtHome>,
    pub allocation: Allocation,
    /// The log as somebody has read its superblock, since the guest wrote into it last.
    pub shown: Option<Compound>,
    /// Somebody has read its superblock since then: a kernel may have replayed it.
    pub is_read: bool,
    /// What the guest has written past its journal, and a failed flush may have lost: the region's version is all there is.
    pub doubtful: Vec<Written>,
    /// Something failed for good: no more of the log is taken.
    pub has_failed: bool,
    /// What the next worker has to know.
    pub notes: Notes,
    /// Log blocks that an earlier worker has taken, of its last transaction and of what it has not committed: their digests. Any of
    /// them may come once more, whatever has become of its transaction since.
    pub resent: HashMap<u32, u64>,
}

/// Whether a block is one of the file system's that the log may bring back: not the log's own.
fn is_home(log: &Log, all_but_own: &HomeBounds, block: u64) -> bool {
    block < log.place.home_blocks && all_but_own.contains(block)
}

/// Whether a transaction is one that a tail has passed.
fn is_passed(sequence: u32, passed: TailMove) -> bool {
    match passed {
        TailMove::Passed(tail) => jbd2::sequence::is_after(tail, sequence),
        TailMove::Anew => true,
    }
}

impl Captured {
    pub fn block_bytes(&self) -> u64 {
        u64::from(self.log.place.block_bytes)
    }

    /// The latest version of a block as it is written home now.
    pub fn written(&self, block: u64) -> Option<Written> {
        let (held, version) = self.homes.get(&block).zip(self.journal.version_of(block))?;
        Some(Written::of(block, version, held))
    }

    /// Whether what was written is the latest version still, and nothing else has been sent home since.
    pub fn is_at_home(&self, written: &Written) -> bool {
        self.written(written.block) == Some(*written)
            && self.homes.get(&written.block).is_some_and(|held| held.home != HomeState::Other)
    }

    /// A flush has failed: what was written until now may not be on storage, but for what had ended before `durable`, the number of an
    /// end that a flush has made durable.
    pub fn flush_failed(&mut self, durable: u64) {
        self.notes.note(&Note::FlushFailed);
        self.marks.flush_failed();
        let mut doubtful = std::mem::take(&mut self.doubtful);
        // What an earlier one may have lost is not there because a later one was good.
        doubtful.retain(|written| self.written(written.block) == Some(*written));
        let others = self.homes.keys().filter(|block| self.is_overwritten_since(**block, durable));
        doubtful.extend(others.filter_map(|block| self.written(*block)));
        self.doubtful = doubtful;
    }

    /// Whether the guest's write past its journal onto a block ended later than the one with this number, or has not ended.
    pub fn is_overwritten_since(&self, block: u64, number: u64) -> bool {
        self.homes.get(&block).is_some_and(|held| {
            held.home == HomeState::Other && held.overwritten.is_none_or(|overwritten| overwritten > number)
        })
    }

    /// Whether what the guest wrote past its journal onto a block, and was told of, is newer than the end with this number; what has
    /// not ended yet is nobody's to miss.
    pub fn is_last_overwritten_since(&self, block: u64, number: u64) -> bool {
        self.homes.get(&block).is_some_and(|held| {
            held.home == HomeState::Other && held.last_overwritten.is_some_and(|overwritten| overwritten > number)
        })
    }

    /// Whether the guest's write past its journal onto a block may be lost, with nothing written there since.
    pub fn is_doubtful(&self, block: u64) -> bool {
        !self.doubtful.is_empty()
            && self.homes.get(&block).is_some_and(|held| held.home == HomeState::Other)
            && self.written(block).is_some_and(|written| self.doubtful.contains(&written))
    }

    /// Whether the guest has written something past its journal over which a replay would write an older version.
    pub fn is_written_past(&self) -> bool {
        self.homes.values().any(|held| held.home == HomeState::Other)
    }

    /// A block that the guest is done with when its log begins later, though what it wrote there may be lost: the region's version is
    /// all there is.
    pub fn doubtful_passed_by(&self, passed: TailMove) -> Option<u64> {
        let is_such = |written: &&Written| {
            self.is_doubtful(written.block)
                && self.homes.get(&written.block).is_some_and(|held| is_passed(held.sequence, passed))
        };
        self.doubtful.iter().find(is_such).map(|written| written.block)
    }

    /// The next transaction, if all of it is there.
    pub fn accept(&mut self) -> Option<Transaction> {
        self.stream.accept(&|block| is_home(&self.log, &self.all_but_own, block))
    }

    /// Whether all of the next transaction is there.
    pub fn is_next_complete(&mut self) -> bool {
        self.stream.is_next_complete()
    }

    /// What has come of the next transaction, and was not seen ahead before.
    pub fn ahead(&mut self) -> Vec<(u64, Arc<[u8]>)> {
        let mut seen = Vec::new();
        let is_home = |block| is_home(&self.log, &self.all_but_own, block);
        self.stream.ahead(&is_home, |block, content| seen.push((block, content)));
        seen
    }

    /// Whether a block was free before the next transaction; false in doubt.
    pub fn was_free(&mut self, home: &LoggedFile, block: u64) -> bool {
        let place = &self.log.place;
        let view = CommittedView {
            journal: &self.journal,
            home,
            start: place.home_start,
            len: place.home_blocks * u64::from(place.block_bytes),
            block_bytes: u64::from(place.block_bytes),
        };
        self.allocation.is_free(&view, block).unwrap_or_else(|error| {
            log::warn!("reading the block bitmap of block {block} failed: {error}; the block is taken for one in use");
            false
        })
    }

    /// The content that the guest sees in `block`, where that is in the region.
    pub fn visible(&self, block: u64) -> Option<&[u8]> {
        match self.homes.get(&block) {
            Some(Held { home: HomeState::Behind | HomeState::Same, .. }) => self.journal.latest(block),
            _ => None,
        }
    }

    /// Takes blocks out of the region: durably so on return.
    pub fn release(&mut self, blocks: &[u64]) -> Result<(), Error> {
        let result = self.journal.release(blocks.iter().copied());
        if result.is_ok() {
            for block in blocks {
                self.homes.remove(block);
            }
        } else {
            self.has_failed = true;
        }
        result
    }

    /// What leaves the region when the guest's log begins later: what the log held before and the guest has not written home, or has
    /// overwritten there, is not wanted any more. `is_busy` tells blocks that a write is on its way to, which are left for its end, unless
    /// an earlier one has ended: that was acknowledged, and recovery would take it back.
    pub fn passed_by(&self, passed: TailMove, is_busy: &dyn Fn(u64) -> bool) -> Vec<u64> {
        self.homes
            .iter()
            .filter(|(block, held)| {
                let is_left = is_busy(**block) && held.last_overwritten.is_none();
                held.home != HomeState::Same && is_passed(held.sequence, passed) && !is_left
            })
            .map(|(block, _)| *block)
            .collect()
    }

    /// The guest's log begins later now.
    pub fn tail_moved(&mut self, passed: TailMove, is_busy: &dyn Fn(u64) -> bool) -> Result<(), Error> {
        self.at_home.retain(|_, known| !is_passed(known.sequence, passed));
        let gone = self.passed_by(passed, is_busy);
        self.release(&gone)?;
        if passed == TailMove::Anew {
            self.journal.set_sequence(self.stream.cursor().sequence.wrapping_sub(1))?;
        }
        Ok(())
    }

    /// Whoever reads the journal's superblock may be a kernel about to mount, which replays what it finds: all that the
    /// guest has not seen at home as its log would leave it there, as one transaction that ends where the log goes on. It
    /// stands until the guest writes into its log.
    pub fn show(&mut self) -> Result<(), CompoundError> {
        self.shown = None;
        self.is_read = true;
        if self.stream.tail() == self.stream.cursor() {
            self.notes.note(&Note::Read(None));
            return Ok(());
        }
        let mut blocks: Vec<u64> =
            self.homes.iter().filter(|(_, held)| held.home != HomeState::Same).map(|(block, _)| *block).collect();
        blocks.sort_unstable();
        self.notes.note(&Note::Read(Some(blocks.clone())));
        let contents = |block: u64| self.journal.latest(block).map(<[u8]>::to_vec);
        self.shown = Some(self.compound_of(&blocks, &contents)?);
        Ok(())
    }

    /// A log of these blocks, as one transaction that ends where the guest's log does.
    fn compound_of(
        &self,
        blocks: &[u64],
        content_of: &dyn Fn(u64) -> Option<Vec<u8>>,
    ) -> Result<Compound, CompoundError> {
        let (format, cursor) = (*self.stream.format(), self.stream.cursor());
        let sequence = cursor.sequence.wrapping_sub(1);
        let of = |home: &u64| -> Option<CompoundBlock> {
            let (escaped, data) = build::escape(&content_of(*home)?);
            Some(CompoundBlock { home: *home, escaped, checksum: jbd2::tag_checksum(&format, sequence, &data) })
        };
        let blocks = blocks.iter().filter_map(of).collect();
        let room = format.log_blocks().saturating_sub(self.stream.copies().count() as u32 + 1);
        Compound::ending_at(format, (cursor.position, room), sequence, blocks, Vec::new(), self.stream.committed_at())
    }

    /// The same log as an earlier worker has shown it; some of it may have gone home since.
    pub fn show_again(&mut self, home: &LoggedFile, blocks: Option<&[u64]>) -> io::Result<()> {
        self.is_read = true;
        let Some(blocks) = blocks else { return Ok(()) };
        let contents: HashMap<u64, Vec<u8>> =
            blocks.iter().map(|block| Ok((*block, self.content_of(home, *block)?))).collect::<io::Result<_>>()?;
        self.shown = Some(self.compound_of(blocks, &|block| contents.get(&block).cloned()).map_err(io::Error::other)?);
        Ok(())
    }

    /// What the next worker has to know, anew. `has_flush_failed` says that the guest is still to be told of a flush that has.
    pub fn state(&self, has_flush_failed: bool) -> Vec<Note> {
        let stream = &self.stream;
        let (tail, cursor, committed_at) = (stream.tail(), stream.cursor(), stream.committed_at());
        let superblock = Box::new(self.owner.attachment);
        let mut notes = vec![Note::Begun { superblock, tail, cursor, committed_at }];
        notes.extend(stream.live().map(|(begin, _)| Note::Live(begin)));
        notes.extend(stream.copies().map(|(position, block)| Note::LogBlock(position, Arc::clone(block))));
        notes.push(Note::Last(stream.last().to_vec()));
        notes.push(Note::Homes(self.homes.iter().map(|(block, held)| (*block, held.sequence, held.noted)).collect()));
        notes.push(Note::AtHome(self.at_home.iter().map(|(block, known)| (*block, known.sequence)).collect()));
        if self.is_read {
            let blocks = |shown: &Compound| shown.blocks().iter().map(|block| block.home).collect();
            notes.push(Note::Read(self.shown.as_ref().map(blocks)));
        }
        if has_flush_failed || self.doubtful.iter().any(|written| self.is_doubtful(written.block)) {
            notes.push(Note::FlushFailed);
        }
        if self.has_failed {
            notes.push(Note::Failed);
        }
        notes
    }

    /// The guest writes into its log: nobody replays what was shown.
    pub fn goes_on_unread(&mut self) {
        if std::mem::take(&mut self.is_read) {
            self.notes.note(&Note::Unread);
        }
        self.shown = None;
    }

    /// A kernel has replayed the log, or had none in it, and begins it anew: what could not be committed before is over. A region that
    /// fails has said so by then. True where the next worker has to be told that.
    pub fn begins_anew(&mut self) -> bool {
        self.is_read = false;
        self.shown = None;
        std::mem::take(&mut self.has_failed)
    }

    /// Whether a block of a transaction that is in the log was taken before and not answered: by an earlier worker, which is asked once
    /// of each block that comes, or by this one before the device was stopped, of which the request itself says so. The same bytes
    /// over a block that is there already change nothing.
    pub fn is_sent_again(&mut self, position: u32, content: &[u8], is_again: bool) -> bool {
        let by_earlier = if self.resent.is_empty() { None } else { self.resent.remove(&position) };
        let by_this = || self.stream.last().iter().find(|(at, _)| *at == position).map(|(_, digest)| *digest);
        let known = by_earlier.or_else(|| by_this().filter(|_| is_again));
        known.is_some_and(|digest| digest == digest_of(content)) && self.stream.is_live(position)
    }

    /// Notes what the guest has at the homes of these blocks, as far as that is not noted.
    pub fn note_homes(&mut self, blocks: impl Iterator<Item = u64>) {
        let mut changed = Vec::new();
        for block in blocks {
            if let Some(held) = self.homes.get_mut(&block)
                && held.noted != held.home
            {
                held.noted = held.home;
                changed.push((block, held.sequence, held.home));
            }
        }
        if !changed.is_empty() {
            self.notes.note(&Note::Homes(changed));
        }
    }

    /// Where the log that is shown begins.
    pub fn shown_tail(&self) -> Tail {
        match &self.shown {
            Some(compound) => Tail { position: compound.start(), sequence: compound.sequence() },
            None => self.stream.cursor(),
        }
    }

    /// The log block `position` as it is shown.
    pub fn shown_block(&self, home: &LoggedFile, position: u32) -> io::Result<Vec<u8>> {
        let mut block = vec![0; self.block_bytes() as usize];
        match self.shown.as_ref().and_then(|compound| Some((compound, compound.part(position)?))) {
            Some((_, Part::Control(control))) => block = control,
            Some((compound, Part::Data(index))) => {
                let of = compound.blocks()[index];
                match self.journal.latest(of.home) {
                    Some(content) => block.copy_from_slice(content),
                    None => self.read_home(home, of.home, &mut block)?,
                }
                if of.escaped {
                    block[..4].fill(0);
                }
            }
            // Whatever storage has there is not of this log.
            None => {
                if let Some(copy) = self.stream.read(position) {
                    block.copy_from_slice(copy);
                }
            }
        }
        Ok(block)
    }

    /// Whether a version's transaction has left the guest's log.
    pub fn is_past(&self, sequence: u32) -> bool {
        jbd2::sequence::is_after(self.stream.tail().sequence, sequence)
    }

    /// Reads a block from its home.
    pub fn read_home(&self, home: &LoggedFile, block: u64, content: &mut [u8]) -> io::Result<()> {
        home.read_exact_at(content, self.log.home_offset(block))
    }

    /// What must hold between calls, for tests.
    pub fn check(&self) -> Result<(), String> {
        if self.journal.has_pending() {
            // A commit is under way.
            return Ok(());
        }
        self.journal.check()?;
        for block in self.journal.homes() {
            if !self.homes.contains_key(&block) {
                return Err(format!("nothing is known of the home of block {block}, which is in the region"));
            }
        }
        match self.homes.keys().find(|block| !self.journal.contains(**block)) {
            Some(block) => Err(format!("block {block} is not in the region")),
            None => match self.at_home.keys().find(|block| self.journal.contains(**block)) {
                Some(block) => Err(format!("block {block} is in the region and known at home")),
                None => Ok(()),
            },
        }
    }
}
