//! A guest's kernel that goes on with a log that was closed under it.
//!
//! A device that is started anew has mostly a new kernel before it, so what was held goes home, and storage says that the log is empty
//! ([`crate::journals`]). But a guest that suspends resets its disks, too, and goes on where it was. (One that hibernates does so in another VM,
//! which this does not see.) Its kernel knows of an open log: it writes the next transaction where the last one ended, and no superblock before. Storage would say
//! of an acknowledged commit that there is none.
//!
//! So what is written without a superblock into a log that was closed under its guest is looked at. When it is the very transaction that would come next, whole but for
//! its commit block, storage says that the log begins with it before that commit is answered: the log is as a hand-over leaves it
//! ([`crate::hand_over`]), and goes on in its own place until its guest closes it. Nobody else writes such a thing: a new kernel writes the superblock
//! first, and whoever copies an image over the disk writes other transactions, too.
//!
//! A worker that dies between the two leaves to the next one that this is so, but not which blocks were written. A transaction that had begun
//! then does not come whole to that one. It is found in the log's own place: its kernel sends the commit block when it was told that all others are
//! there. What is not found whole there has its commit fail.
//!
//! What this must never do: say that a log is live which somebody else than its kernel has written. Failure story: a commit of that number
//! that is not understood, or that storage cannot be told of, fails, and the guest's kernel ends its journal instead of going on with a lost one.

use crate::disk::PlacementKind;
use crate::journals::Journals;
use crate::log::Log;
use crate::stored::Says;
use crate::unannounced::{Before, PART_MAX, Unannounced};
use block_route::segments;
use extfs::{SUPERBLOCK_BYTES, SUPERBLOCK_OFFSET};
use guest_memory::MemorySlice;
use jbd2::{Descriptor, Format, HEADER_BYTES, Header, Kind, Superblock, SuperblockEdit};
use journal_area::Tail;
use std::io;
use tracing_mutex::stdsync::MutexGuard;

/// What storage says: the number of the transaction that comes next in a log that was closed under its guest, and the log's shape. A recovery
/// leaves one number out behind the last transaction, as the kernel's does.
fn next_of(log: &Log) -> io::Result<Option<(u32, Format)>> {
    if log.stored()?.says != Says::Empty {
        return Ok(None);
    }
    let superblock = Superblock::decode(&log.stored_superblock()?).map_err(io::Error::other)?;
    Ok(superblock.format().ok().map(|format| (superblock.sequence.wrapping_sub(1), format)))
}

fn header_of(slices: &[MemorySlice]) -> Option<Header> {
    jbd2::peek(&segments::gather(&segments::part(slices, 0, HEADER_BYTES as u64)))
}

impl Log {
    fn unannounced(&self) -> MutexGuard<'_, Unannounced> {
        self.state.unannounced.lock().expect("no panic under this lock")
    }

    /// Its device begins anew, and what was held went home: what comes now is looked at, until somebody says what the log is. (The number that
    /// a recovery leaves out is nobody else's. A guest that has closed its log itself has written the transaction before the next.)
    pub(crate) fn was_closed_under_its_guest(&self) {
        *self.unannounced() = Unannounced::default();
    }

    /// The same, and an earlier worker has served its guest since.
    pub(crate) fn was_closed_under_the_guest_of_another(&self) {
        *self.unannounced() = Unannounced { is_taken_up: true, ..Unannounced::default() };
    }

    /// Whether somebody may go on with it without a word: for the next worker, too, which has not seen how it was closed.
    pub(crate) fn may_go_on_unannounced(&self) -> bool {
        !matches!(self.unannounced().next, Some(None))
    }

    /// Its guest has said what the log is: nobody goes on with it without a word until the device begins anew.
    pub(crate) fn is_announced(&self) {
        *self.unannounced() = Unannounced::of_nobody();
    }

    /// A superblock is about to be written by which storage may say something else than until now.
    pub(crate) fn note_announcing(&self) {
        let mut unannounced = self.unannounced();
        if unannounced.next.is_none() {
            // A disk that cannot be read says nothing.
            unannounced.next = Some(next_of(self).unwrap_or(None));
        }
    }

    /// A block is about to be written into the log, which is closed. Gives where the transaction begins, and its number, if this commits it.
    ///
    /// # Errors
    /// When the disk cannot be read, or it commits what is not understood.
    fn unannounced_write(&self, position: u32, slices: &[MemorySlice]) -> io::Result<Option<(u32, u32)>> {
        let mut unannounced = self.unannounced();
        let known = match unannounced.next {
            Some(known) => known,
            None => *unannounced.next.insert(next_of(self)?),
        };
        let Some((next, format)) = known else { return Ok(None) };
        let header = header_of(slices);
        let is_other = header.is_some_and(|header| header.sequence != next);
        if is_other || unannounced.written.len() as u32 > self.place.log_blocks / PART_MAX {
            *unannounced = Unannounced::of_nobody();
            return Ok(None);
        }
        if header.is_none_or(|header| header.kind != Kind::Commit) {
            unannounced.written.insert(position, header.is_some());
            return Ok(None);
        }
        match unannounced.before(position, &format) {
            Before::Transaction(first) if !unannounced.is_taken_up || self.begins_at(first, next, &format)? => {
                Ok(Some((first, next)))
            }
            Before::Part | Before::Transaction(_) => {
                let first = if unannounced.is_taken_up { self.stored_before(position, next, &format)? } else { None };
                let first = first.ok_or_else(|| {
                    io::Error::other(format!(
                        "its journal was closed when the device was started anew, and its guest commits transaction {next}, which did not come whole \
                         (file system at byte {}): that fails, so that the guest ends its journal",
                        self.place.home_start
                    ))
                })?;
                Ok(Some((first, next)))
            }
            Before::Other => {
                *unannounced = Unannounced::of_nobody();
                Ok(None)
            }
        }
    }

    /// Whether that transaction begins there: no control block of it lies before, as far as one can reach. A large one has several descriptors, of which an
    /// earlier worker may have stored the first.
    fn begins_at(&self, first: u32, sequence: u32, format: &Format) -> io::Result<bool> {
        let log_blocks = format.last - format.first;
        let mut head = [0; HEADER_BYTES];
        for back in 1..=log_blocks / PART_MAX {
            let position = format.first + (first - format.first + log_blocks - back) % log_blocks;
            self.journal.file.read_exact_at(&mut head, self.place_of(position)?)?;
            if jbd2::peek(&head).is_some_and(|header| header.sequence == sequence) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Where a transaction begins in the log's own place that ends with the commit block which is about to come at `commit`, and is whole but for that.
    fn stored_before(&self, commit: u32, sequence: u32, format: &Format) -> io::Result<Option<u32>> {
        let log_blocks = format.last - format.first;
        let back = |count: u32| format.first + (commit - format.first + log_blocks - count) % log_blocks;
        let mut block = vec![0; format.block_size as usize];
        let read = |position: u32, block: &mut [u8]| self.journal.file.read_exact_at(block, self.place_of(position)?);
        let mut farthest = None;
        for count in 1..=log_blocks / PART_MAX {
            read(back(count), &mut block[..HEADER_BYTES])?;
            if jbd2::peek(&block[..HEADER_BYTES]).is_some_and(|header| header.sequence == sequence) {
                farthest = Some(count);
            }
        }
        // From one control block to the next: the last is the commit block.
        let Some(first) = farthest else { return Ok(None) };
        let mut count = first;
        while count > 0 {
            read(back(count), &mut block)?;
            let header = jbd2::peek(&block).filter(|header| header.sequence == sequence);
            let named = match header.map(|header| header.kind) {
                Some(Kind::Descriptor) => {
                    let descriptor = Descriptor::new(format, &block);
                    if !descriptor.checksum_ok() {
                        return Ok(None);
                    }
                    u32::try_from(descriptor.tags().count()).unwrap_or(u32::MAX)
                }
                Some(Kind::Revoke) => 0,
                _ => return Ok(None),
            };
            match count.checked_sub(named.saturating_add(1)) {
                Some(left) => count = left,
                None => return Ok(None),
            }
        }
        Ok(Some(back(first)))
    }

    /// Has storage say that the log begins there, and that its file system needs it.
    fn announce(&self, start: u32, sequence: u32) -> io::Result<()> {
        let at = self.place.home_start + SUPERBLOCK_OFFSET;
        let mut raw = vec![0; SUPERBLOCK_BYTES];
        let failed_flushes = [&self.home, &self.journal].map(|disk| disk.file.failed_flushes());
        self.home.file.read_exact_at(&mut raw, at)?;
        if !extfs::Superblock::parse(&raw).map_err(io::Error::other)?.needs_recovery() {
            extfs::SuperblockEdit::new(&mut raw).map_err(io::Error::other)?.set_needs_recovery().seal();
            self.home.file.write_all_at(&raw, at)?;
            self.home.file.sync_since(failed_flushes[0])?;
        }
        let mut superblock = self.stored_superblock()?;
        SuperblockEdit::new(&mut superblock).map_err(io::Error::other)?.start(start).sequence(sequence).seal();
        self.journal.file.write_all_at(&superblock, self.place_of(0)?)?;
        self.journal.file.sync_since(failed_flushes[1])
    }
}

impl Journals {
    /// A block is about to be written into a log that is closed. Says whether the log goes on in its own place from here, unannounced.
    ///
    /// # Errors
    /// What has that write fail.
    pub(crate) fn goes_on_unannounced(&self, log: &Log, position: u32, slices: &[MemorySlice]) -> io::Result<bool> {
        if matches!(log.placement, PlacementKind::Discard | PlacementKind::Remote) {
            return Ok(false);
        }
        let Some((start, sequence)) = log.unannounced_write(position, slices)? else { return Ok(false) };
        if log.placement.is_held() {
            // Whoever finds it between the two has to know where storage has it from, as after a hand-over.
            if let Some(held) = self.area.log_now(log.id) {
                held.note_hand_over(Some(Tail { position: start, sequence }));
            }
        }
        log.announce(start, sequence)?;
        // What it has written there is its own.
        self.area.set_foreign(log.id, false);
        log.is_announced();
        self.area.forget_recovering(log.id);
        log.set_open();
        self.stays_on_storage(log.index, sequence);
        log::warn!(
            "disk {}: its guest goes on with a journal that was closed when the device was started anew, as after a suspend (file system at byte {}): \
             it is on storage until its guest closes it",
            log.home.options.name,
            log.place.home_start
        );
        Ok(true)
    }
}
