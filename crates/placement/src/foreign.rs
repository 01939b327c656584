//! Somebody else than a kernel writes where a journal is that is held, or in a region of NVM (`nvm/foreign.rs`): an image is copied over the disk inside the VM, in any order
//! and in pieces of any size, over a journal that is open or one that is closed.
//!
//! The place of a log is a part of a disk: what was written there last is what is read there, until a kernel's own log goes
//! over it. So what was held when the log turns out to be none, or another, or ends, reaches its place; and a log that was
//! brought stays on storage, where the rest of it is.
//!
//! Failure story: what cannot be written to its place fails the guest's write, and the log stays as it was.

use crate::disk::DiskCounters;
use crate::keepers::Held;
use crate::log::Log;
use block_route::segments;
use guest_memory::MemorySlice;
use jbd2::Superblock;
use journal_area::{Error, HeldLog, SuperblockEffect};
use std::io;
use std::ops::Range;

/// Whether the superblock that opens a closed log brings a log along, which begins where it says. `was_written` tells that
/// something was written into the log while it was closed.
///
/// # Errors
/// When the disk cannot be read.
pub(crate) fn is_brought(log: &Log, open: &Superblock, was_written: bool) -> io::Result<bool> {
    if is_another_ones(log)? {
        return Ok(true);
    }
    // A kernel goes on where the empty log says, or right behind it, and nothing of what it will write is there yet.
    let stored = log.stored()?.superblock;
    let goes_on = stored.is_some_and(|stored| {
        stored.is_empty() && stored.uuid == open.uuid && open.sequence.wrapping_sub(stored.sequence) <= 1
    });
    let is_there = is_live_there(log, open);
    if goes_on && !is_there && !was_written {
        return Ok(false);
    }
    // Once, and not each time its tail moves.
    let level = if log.is_brought() { log::Level::Debug } else { log::Level::Info };
    let why = if was_written {
        "something was written into it while it was closed".to_owned()
    } else if is_there {
        format!("block {} of it has transaction {} already, which its guest is to write", open.start, open.sequence)
    } else {
        let stored = stored.map_or_else(
            || "there is no journal's superblock".to_owned(),
            |stored| format!("it begins at block {} with transaction {}", stored.start, stored.sequence),
        );
        format!("its guest begins at block {} with transaction {}, and on storage {stored}", open.start, open.sequence)
    };
    log::log!(
        level,
        "disk {}: the journal of the file system at byte {} has something in it that did not come through here ({why}); \
         it stays on storage until it is next empty",
        log.home.options.name,
        log.place.home_start
    );
    Ok(true)
}

/// Whether the log that is being opened may be another file system's than the one that it is known with. A journal device can be
/// named by two (a copy of a file system names what the original names), and by none of them be used at the moment.
///
/// A kernel says that a file system has a live journal (`needs_recovery`) before it writes the journal's first superblock
/// (ext4_setup_super), so the one that does not say so is not the one that was mounted.
///
/// # Errors
/// When the disk cannot be read.
pub(crate) fn is_another_ones(log: &Log) -> io::Result<bool> {
    let why = if log.is_contested() {
        "another file system lays claim to it, too"
    } else if is_home_unmounted(log)? {
        "that is not mounted"
    } else {
        return Ok(false);
    };
    // Once, and not each time its tail moves.
    let level = if log.is_brought() { log::Level::Debug } else { log::Level::Info };
    log::log!(
        level,
        "disk {}: the journal of the file system at byte {} is opened, and {why}; it stays on storage until it is next empty",
        log.home.options.name,
        log.place.home_start
    );
    Ok(true)
}

/// Whether the log is on a journal device, and its file system does not say that it is mounted.
///
/// # Errors
/// When the disk cannot be read.
pub(crate) fn is_home_unmounted(log: &Log) -> io::Result<bool> {
    if !log.place.is_external {
        return Ok(false);
    }
    let mut raw = [0; extfs::SUPERBLOCK_BYTES];
    log.home.file.read_exact_at(&mut raw, log.place.home_start + extfs::SUPERBLOCK_OFFSET)?;
    Ok(!extfs::Superblock::parse(&raw).is_ok_and(|superblock| superblock.needs_recovery()))
}

/// Whether the transaction with which a superblock begins a log is in its own place already: a kernel has yet to write it, also one that
/// has just replayed.
pub(crate) fn is_live_there(log: &Log, open: &Superblock) -> bool {
    let mut first = vec![0; log.place.block_bytes as usize];
    log.offset_of(open.start).is_some()
        && log.read_stored(open.start, &mut first).is_ok()
        && jbd2::peek(&first).is_some_and(|header| header.sequence == open.sequence)
}

/// Whether a write puts anything but zeros there.
pub(crate) fn is_something(slices: &[MemorySlice]) -> bool {
    segments::gather(slices).iter().any(|byte| *byte != 0)
}

impl Held {
    /// A block of a closed log, not its superblock, is written. mke2fs does so, too, with zeros.
    pub(crate) fn note_foreign(&self, slices: &[MemorySlice]) {
        if !self.is_foreign() && is_something(slices) {
            self.set_foreign(true);
        }
    }

    /// The guest writes the superblock of a log that is held, or to be held.
    pub(crate) fn held_superblock_written(&self, log: &Log, block: &[u8]) -> io::Result<SuperblockEffect> {
        let is_open = log.is_open();
        if is_open && Superblock::decode(block).is_ok_and(|superblock| superblock.is_empty()) {
            self.spill(log, |held, position| !held.is_live(position) && !held.is_materialise())?;
        }
        let effect = self.area.superblock_written(self.id, block).map_err(|error| match error {
            Error::NoMemory { .. } => io::Error::new(io::ErrorKind::OutOfMemory, error),
            _ => io::Error::other(error),
        })?;
        if matches!(effect, SuperblockEffect::Foreign | SuperblockEffect::NotALog) {
            if is_open {
                self.spill(log, |_, _| true)?;
            }
            self.area.close(self.id);
        }
        Ok(effect)
    }

    /// Writes held log blocks to their own places. A log that ends needs none of its own blocks there; but where it was is
    /// a part of a disk, and what somebody has written over it has to be there.
    pub(crate) fn spill(&self, log: &Log, wanted: impl Fn(&HeldLog<'_>, u32) -> bool) -> io::Result<()> {
        let file = &log.journal.file;
        let Some(held) = self.area.log_now(self.id) else { return Ok(()) };
        let mut block = vec![0; log.place.block_bytes as usize];
        let mut bytes = 0;
        for position in 1..held.log_blocks() {
            if !wanted(&held, position) || !held.read_held(position, &mut block) {
                continue;
            }
            if let Some(offset) = log.offset_of(position) {
                file.write_all_at(&block, offset)?;
                bytes += block.len() as u64;
            }
        }
        if bytes > 0 {
            log.journal.set_dirty();
            DiskCounters::add(&log.journal.counters.journal_bytes_to_storage, bytes);
        }
        Ok(())
    }

    /// Whether the superblock that opens a log comes from somebody who brings the log itself along, instead of from a
    /// kernel that is about to write its first transaction: an image is copied over the disk inside the VM, in any order, or
    /// a tool writes into the log. All of it stays on storage then, until it is empty.
    ///
    /// # Errors
    /// When the disk cannot be read.
    pub(crate) fn is_foreign_log(&self, log: &Log, block: &[u8]) -> io::Result<bool> {
        let open = Superblock::decode(block).ok().filter(|superblock| !superblock.is_empty());
        let Some(open) = open.filter(|_| log.offset_of(0).is_some()) else {
            if self.is_foreign() {
                self.set_foreign(false);
            }
            return Ok(false);
        };
        is_brought(log, &open, self.is_foreign())
    }

    /// A block of a held log after a write of its bytes `part`; without `slices` those become zeros.
    pub(crate) fn patched_block(
        &self,
        log: &Log,
        position: u32,
        part: Range<usize>,
        slices: &[MemorySlice],
    ) -> io::Result<Vec<u8>> {
        let mut content = vec![0; log.place.block_bytes as usize];
        let is_part = part.len() < content.len();
        if is_part && !self.area.look(self.id, |held| held.read_held(position, &mut content)).unwrap_or(false) {
            log.read_stored(position, &mut content)?;
        }
        if slices.is_empty() {
            content[part].fill(0);
        } else {
            content[part].copy_from_slice(&segments::gather(slices));
        }
        Ok(content)
    }
}
