//! Somebody else than a kernel writes where a held journal is: an image is copied over the disk inside the VM, in any order
//! and in pieces of any size, over a journal that is open or one that is closed.
//!
//! The place of a log is a part of a disk: what was written there last is what is read there, until a kernel's own log goes
//! over it. So what was held when the log turns out to be none, or another, or ends, reaches its place; and a log that was
//! brought stays on storage, where the rest of it is.
//!
//! Failure story: what cannot be written to its place fails the guest's write, and the log stays as it was.

use crate::disk::DiskCounters;
use crate::journals::{Journals, Log};
use block_route::segments;
use guest_memory::MemorySlice;
use jbd2::Superblock;
use journal_area::{HeldLog, SuperblockEffect};
use std::io;
use std::ops::Range;
use std::sync::atomic::Ordering;

impl Log {
    /// A block of it, not its superblock, is written while it is closed. mke2fs does so, too, with zeros.
    pub(crate) fn note_foreign(&self, slices: &[MemorySlice]) {
        if !self.placement.is_held() || self.is_foreign.load(Ordering::Acquire) {
            return;
        }
        if segments::gather(slices).iter().any(|byte| *byte != 0) {
            self.is_foreign.store(true, Ordering::Release);
        }
    }
}

impl Journals {
    /// The guest writes the superblock of a log that is held, or to be held.
    pub(crate) fn held_superblock_written(&self, log: &Log, block: &[u8]) -> io::Result<SuperblockEffect> {
        let is_open = log.is_open();
        if is_open && Superblock::decode(block).is_ok_and(|superblock| superblock.is_empty()) {
            self.spill(log, |held, position| !held.is_live(position) && !held.is_materialise())?;
        }
        let effect = self.area.superblock_written(log.id, block).map_err(io::Error::other)?;
        if matches!(effect, SuperblockEffect::Foreign | SuperblockEffect::NotALog) {
            if is_open {
                self.spill(log, |_, _| true)?;
            }
            self.area.close(log.id);
        }
        Ok(effect)
    }

    /// Writes held log blocks to their own places. A log that ends needs none of its own blocks there; but where it was is
    /// a part of a disk, and what somebody has written over it has to be there.
    pub(crate) fn spill(&self, log: &Log, wanted: impl Fn(&HeldLog<'_>, u32) -> bool) -> io::Result<()> {
        let file = &self.disk(log.journal_disk).file;
        let bytes = self.area.look(log.id, |held| -> io::Result<u64> {
            let mut block = vec![0; log.place.block_bytes as usize];
            let mut bytes = 0;
            for position in 1..held.log_blocks() {
                if !wanted(held, position) || !held.read_held(position, &mut block) {
                    continue;
                }
                if let Some(offset) = log.offset_of(position) {
                    file.write_all_at(&block, offset)?;
                    bytes += block.len() as u64;
                }
            }
            Ok(bytes)
        })?;
        if bytes > 0 {
            self.disk(log.journal_disk).set_dirty();
            DiskCounters::add(&self.disk(log.journal_disk).counters.journal_bytes_to_storage, bytes);
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
            log.is_foreign.store(false, Ordering::Release);
            return Ok(false);
        };
        // A kernel goes on where the empty log says, or right behind it, and nothing of what it will write is there yet.
        let stored = self.stored(log)?.superblock;
        let goes_on = stored.is_some_and(|stored| {
            stored.is_empty() && stored.uuid == open.uuid && open.sequence.wrapping_sub(stored.sequence) <= 1
        });
        let mut first = vec![0; log.place.block_bytes as usize];
        let is_there = log.offset_of(open.start).is_some()
            && self.read_stored(log, open.start, &mut first).is_ok()
            && jbd2::peek(&first).is_some_and(|header| header.sequence == open.sequence);
        if goes_on && !is_there && !log.is_foreign.load(Ordering::Acquire) {
            return Ok(false);
        }
        log::info!(
            "disk {}: the journal of the file system at byte {} has something in it that did not come through here; it \
             stays on storage until it is next empty",
            self.disk(log.home_disk).options.name,
            log.place.home_start
        );
        Ok(true)
    }

    /// Reads a log block at its own place.
    pub(crate) fn read_stored(&self, log: &Log, position: u32, content: &mut [u8]) -> io::Result<()> {
        let offset = log
            .offset_of(position)
            .ok_or_else(|| io::Error::other(format!("log block {position} has no place on its disk")))?;
        self.disk(log.journal_disk).file.read_exact_at(content, offset)
    }

    /// A block of a held log after a write of its bytes `part`; without `slices` those become zeros.
    pub(crate) fn patched(
        &self,
        log: &Log,
        position: u32,
        part: Range<usize>,
        slices: &[MemorySlice],
    ) -> io::Result<Vec<u8>> {
        let mut content = vec![0; log.place.block_bytes as usize];
        if part.len() < content.len() && !self.area.look(log.id, |held| held.read_held(position, &mut content)) {
            self.read_stored(log, position, &mut content)?;
        }
        if slices.is_empty() {
            content[part].fill(0);
        } else {
            content[part].copy_from_slice(&segments::gather(slices));
        }
        Ok(content)
    }
}
