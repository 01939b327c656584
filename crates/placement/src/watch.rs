//! Whether a guest's journal is what it seems, where its log only passes through (placement `remote`) and is replayed by us in the
//! end. What is taken for proof, and why no legal guest does it, says `journal-area/src/contradiction.rs`: a committed tag that
//! no tag of this file system can be; and a tail that passes committed blocks which were never written home, while their contents
//! were written to other blocks of the disk that had no reason to get them.
//!
//! It remembers no contents but those of a transaction that is not complete, and eight bytes for each block that is live in the log.
//!
//! It must never: change what is done with a write. Whoever asks hears why the books are wrong, once.
//!
//! Failure story: a log that cannot be followed (fast commits, one that is brought, more blocks than a log has) is not watched.

use crate::keeper::HomeChange;
use crate::nvm::log_stream::{LogStream, Tail, TailMove};
use crate::scan::FoundLogPlace;
use block_route::RequestId;
use jbd2::Superblock;
use journal_area::{Mark, Strays};
use recovery::HomeBounds;
use std::collections::hash_map::RandomState;
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;

/// The newest committed version of a block.
#[derive(Clone, Copy, Debug)]
struct Newest {
    sequence: u32,
    content: Mark,
    /// Something was written there since it was committed.
    is_written: bool,
}

/// What is known of one log.
#[derive(Debug, Default)]
pub(crate) struct Watch {
    /// Nothing while the log is closed, or is not followed.
    stream: Option<LogStream>,
    /// What is not the log's own, of the log that is followed.
    all_but_own: Option<HomeBounds>,
    /// Sequence numbers of the live transactions, and the blocks of each.
    live: VecDeque<(u32, Vec<u64>)>,
    newest: HashMap<u64, Newest>,
    strays: Strays,
    /// Changes of homes that wait, and will be asked about again.
    waiting: HashSet<(RequestId, u64)>,
    hasher: RandomState,
}

impl Watch {
    pub fn is_on(&self) -> bool {
        self.stream.is_some()
    }

    /// The guest opens its log with this superblock.
    pub fn opened(&mut self, place: &FoundLogPlace, superblock: &Superblock) {
        self.forget();
        let format = superblock.format().ok().filter(|format| !format.fast_commit && format.contains(superblock.start));
        let tail = Tail { position: superblock.start, sequence: superblock.sequence };
        self.stream = format.map(|format| LogStream::new(format, tail, place.log_blocks as usize));
        self.all_but_own = Some(place.all_but_own());
    }

    /// Another process has watched it until now: what was written home under that one is not known. No committed block is missed there.
    pub fn is_taken_up(&mut self) {
        self.newest.values_mut().for_each(|newest| newest.is_written = true);
    }

    /// Nothing is known of the log any more.
    pub fn forget(&mut self) {
        *self = Watch::default();
    }

    /// The guest writes a log block other than the superblock: it counts when [`Watch::settle`] says so.
    pub fn log_write(&mut self, position: u32, content: &Arc<[u8]>) {
        let Some(stream) = self.stream.as_mut() else { return };
        if stream.write(position, Arc::clone(content)).is_err() {
            self.forget();
        }
    }

    /// What was written into the log until now counts before what comes next. Says why the books are wrong, if that proves it. Not
    /// to be called for each block: a guest may write those of one transaction as often as it likes.
    pub fn settle(&mut self, place: &FoundLogPlace) -> Option<String> {
        while let Some(transaction) = self.stream.as_mut()?.accept(&|_| true) {
            let sequence = transaction.sequence;
            for block in &transaction.revokes {
                self.newest.remove(block);
            }
            for (block, content) in &transaction.blocks {
                // A tag of this file system cannot name it.
                let is_own = self.all_but_own.as_ref().is_some_and(|bounds| !bounds.contains(*block));
                if is_own || *block >= place.home_blocks {
                    let where_it_is = if *block < place.home_blocks {
                        "the journal's own"
                    } else {
                        "beyond the end of the file system"
                    };
                    self.forget();
                    return Some(format!(
                        "transaction {sequence} of the guest's journal has a version of block {block}, which is {where_it_is}"
                    ));
                }
                let copy = |at: usize, piece: &mut [u8]| piece.copy_from_slice(&content[at..at + piece.len()]);
                let content = Mark::of(&self.hasher, content.len(), copy);
                self.strays.committed(*block, content);
                self.newest.insert(*block, Newest { sequence, content, is_written: false });
            }
            self.live.push_back((sequence, transaction.blocks.into_keys().collect()));
        }
        None
    }

    /// The guest asks to change its file system. What has to wait is asked about again and again, and counts as of when it was asked
    /// first: a kernel lets its tail pass a version of a file that was deleted while a write of it is still under way.
    pub fn home_asked(&mut self, change: &HomeChange<'_>) {
        if !self.waiting.contains(&(change.request, change.range.start)) {
            self.home_change(change);
        }
    }

    /// Whether that has to wait.
    pub fn home_answered(&mut self, change: &HomeChange<'_>, waits: bool) {
        let key = (change.request, change.range.start);
        if waits && self.is_on() {
            self.waiting.insert(key);
        } else {
            self.waiting.remove(&key);
        }
    }

    /// The guest writes blocks of its file system, or gives them up. What another process was asked before says nothing of where homes are.
    pub fn home_change(&mut self, change: &HomeChange<'_>) {
        if self.live.is_empty() {
            return;
        }
        for (index, block) in change.blocks.clone().enumerate() {
            let slice = change.payload.get(index).and_then(Option::as_ref);
            let content = slice.map(|slice| Mark::of(&self.hasher, slice.len(), |at, piece| slice.copy_out(at, piece)));
            let owed = self.newest.get_mut(&block).map(|newest| {
                // With another content, too: ext4 writes its superblock past its journal, and e2fsck mends what it replays.
                newest.is_written = true;
                newest.content
            });
            match content {
                Some(content) if owed == Some(content) => self.strays.placed(),
                Some(content) if !change.is_again => self.strays.written(block, content, owed),
                Some(_) => {}
                None => {}
            }
        }
    }

    /// The guest writes the superblock of its open log; of one that ends, with no log in it. Says why the books are wrong, if that
    /// proves it.
    pub fn tail_moves(&mut self, superblock: &Superblock) -> Option<String> {
        let stream = self.stream.as_mut()?;
        let until = if superblock.is_empty() {
            None
        } else {
            let tail = Tail { position: superblock.start, sequence: superblock.sequence };
            match stream.move_tail(tail) {
                TailMove::Passed(sequence) => Some(sequence),
                TailMove::Anew => {
                    // A kernel has replayed it, or somebody has brought another.
                    (self.live, self.newest) = Default::default();
                    return None;
                }
            }
        };
        let is_passed = |sequence: u32| until.is_none_or(|until| jbd2::sequence::is_after(until, sequence));
        while self.live.front().is_some_and(|(sequence, _)| is_passed(*sequence)) {
            let Some((sequence, blocks)) = self.live.pop_front() else { break };
            for block in blocks {
                let Some(newest) = self.newest.get(&block).copied().filter(|newest| newest.sequence == sequence) else {
                    continue;
                };
                self.newest.remove(&block);
                if !newest.is_written {
                    self.strays.passed_unwritten(newest.content);
                }
            }
        }
        let misplaced = self.strays.proof()?;
        self.forget();
        Some(format!(
            "the guest's journal is done with {misplaced} committed blocks that were never written home, but to other blocks of \
             the disk"
        ))
    }
}

#[cfg(test)]
mod tests;
