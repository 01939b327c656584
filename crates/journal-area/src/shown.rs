//! The live log as its guest reads it: a kernel about to mount, e2fsck, a program that copies the disk.
//!
//! Whoever mounts without a reset of the device has read blocks of the file system before it reads the log, and keeps them
//! in a cache that only its own replay brings up to date. So the guest replays, and finds a log that is good for it: block
//! for block the one that it wrote, with its tail and its sequence numbers. Of what was let go:
//!
//! * a version that is at home is read there;
//! * in place of one that was superseded stands the newest committed version of the same block: replaying it early is
//!   replaying it twice;
//! * what was revoked or discarded is zeros: a replay skips the one, and nobody needs the other.
//!
//! Tags and checksums of such blocks are made to fit. Nothing is kept for this, so it is right at every moment: while the
//! guest commits, and while it replays.
//!
//! What it must never do: show a transaction that does not count as one that does. So only the live part of the log, which
//! was accepted, is changed; whatever else is held is shown as it was written.

use crate::jcb::VmJcb;
use crate::location::Location;
use crate::pages::Pages;
use jbd2::{Checksum, Descriptor, DescriptorEdit, Format, Kind};
use std::collections::HashMap;
use std::io;

/// Blocks that are not held: on the disks of the log and of its file system.
pub trait Outside {
    /// Reads a block of the file system.
    ///
    /// # Errors
    /// When it cannot be read.
    fn home(&mut self, block: u64, buffer: &mut [u8]) -> io::Result<()>;

    /// Reads a log block at its own place.
    ///
    /// # Errors
    /// When it cannot be read.
    fn stored(&mut self, position: u32, buffer: &mut [u8]) -> io::Result<()>;
}

/// What [`VmJcb::home_in_order`] has read already.
#[derive(Debug, Default)]
pub(crate) struct KnownHomes {
    /// A descriptor, and the home blocks that it names.
    tags: Option<(u32, Vec<u64>)>,
    /// All newest versions: where a descriptor is not held.
    all: Option<HashMap<u32, u64>>,
}

impl VmJcb {
    /// Copies log block `position` into `buffer`.
    pub(crate) fn show(
        &mut self,
        pages: &Pages,
        position: u32,
        buffer: &mut [u8],
        outside: &mut dyn Outside,
    ) -> io::Result<()> {
        if position == 0 {
            // Whoever goes on under a kernel that replays it has to know (`VmJcb::is_replayed`).
            self.table.set_read(true);
        }
        match self.location(position) {
            location if location.is_held() => {
                if !self.read_held(pages, position, buffer) {
                    return Err(io::Error::other(format!("log block {position} is in memory that has gone")));
                }
                self.make_fit(pages, position, buffer, outside)
            }
            Location::Home | Location::Gone => {
                // What is at home is newest. Of what is gone nothing but the log knows what it was.
                let home = if self.is_newest(position) {
                    self.home_of(pages, position)
                } else {
                    self.tagged_block(pages, position)
                };
                self.show_let_go(pages, home, buffer, outside)?;
                Ok(())
            }
            Location::Storage => outside.stored(position, buffer),
            // Kept block for block, and never written: it is as storage has it.
            _ if self.table.is_materialise() => outside.stored(position, buffer),
            // Not written since the tail passed it: whatever storage has there is not of this log.
            _ => {
                buffer.fill(0);
                Ok(())
            }
        }
    }

    /// A data block of the live log that is not held any more, and belongs to `home`. Says whether it is escaped.
    fn show_let_go(
        &self,
        pages: &Pages,
        home: Option<u64>,
        buffer: &mut [u8],
        outside: &mut dyn Outside,
    ) -> io::Result<bool> {
        let newest = home.and_then(|home| self.newest(home).map(|newest| (home, newest)));
        let Some((home, newest)) = newest else {
            buffer.fill(0);
            return Ok(false);
        };
        match self.location(newest) {
            Location::Home => outside.home(home, buffer)?,
            Location::Storage => {
                outside.stored(newest, buffer)?;
                if self.is_escaped(newest) {
                    buffer[..4].copy_from_slice(&jbd2::MAGIC.to_be_bytes());
                }
            }
            _ if self.read_version(pages, newest, buffer) => {}
            _ => return Err(io::Error::other(format!("the newest version of block {home} is not held"))),
        }
        let is_escaped = jbd2::is_escaped_content(buffer);
        if is_escaped {
            buffer[..4].fill(0);
        }
        Ok(is_escaped)
    }

    /// The home block of which a log block is the newest version, if it is one. The log's own tag says it; where that cannot be read, since
    /// there was no memory for its descriptor, all that is newest is looked through. For one log block, not for many.
    pub(crate) fn home_of(&self, pages: &Pages, position: u32) -> Option<u64> {
        if !self.is_newest(position) {
            return None;
        }
        let tagged = self.tagged_block(pages, position).filter(|block| self.newest(*block) == Some(position));
        tagged.or_else(|| self.blocks_and_positions().find(|(_, there)| *there == position).map(|(block, _)| block))
    }

    /// The same for one after the other, in the order of the log: each descriptor is read once, and all that is newest is looked through at
    /// most once.
    pub(crate) fn home_in_order(&self, pages: &Pages, position: u32, known: &mut KnownHomes) -> Option<u64> {
        let named = |tags: &Option<(u32, Vec<u64>)>| {
            let (at, blocks) = tags.as_ref()?;
            let block = *blocks.get(self.distance(*at, position).checked_sub(1)? as usize)?;
            (self.newest(block) == Some(position)).then_some(block)
        };
        named(&known.tags).or_else(|| {
            known.tags = self.tags_before(pages, position);
            let all = || self.blocks_and_positions().map(|(block, position)| (position, block)).collect();
            named(&known.tags).or_else(|| known.all.get_or_insert_with(all).get(&position).copied())
        })
    }

    /// The home block that a data block's tag names.
    fn tagged_block(&self, pages: &Pages, position: u32) -> Option<u64> {
        let (at, blocks) = self.tags_before(pages, position)?;
        blocks.get(self.distance(at, position).checked_sub(1)? as usize).copied()
    }

    /// The descriptor of a data block, the nearest control block before it, and the home blocks that its tags name; nothing where that is
    /// none or is not held.
    fn tags_before(&self, pages: &Pages, position: u32) -> Option<(u32, Vec<u64>)> {
        let format = self.format?;
        self.live_index(position)?;
        let mut at = position;
        for _ in 0..self.distance(self.transactions.front()?.first_position, position) {
            at = format.previous(at);
            // Small ones are control blocks; others are when they look so, since data that does is escaped.
            let mut head = [0; jbd2::HEADER_BYTES];
            match self.location(at) {
                Location::Block(slot) => self.pool.block(slot).copy_out(0, &mut head),
                Location::Small(_) => {}
                _ => continue,
            }
            if matches!(self.location(at), Location::Block(_)) && jbd2::peek(&head).is_none() {
                continue;
            }
            let mut block = vec![0; self.shape.block_bytes as usize];
            self.read_held(pages, at, &mut block);
            let is_descriptor = jbd2::peek(&block).is_some_and(|header| header.kind == Kind::Descriptor);
            let blocks = || Descriptor::new(&format, &block).tags().map(|tag| tag.block).collect();
            return is_descriptor.then(|| (at, blocks()));
        }
        None
    }

    /// Makes a control block of the live log fit the data blocks that stand in for others.
    fn make_fit(&self, pages: &Pages, position: u32, block: &mut [u8], outside: &mut dyn Outside) -> io::Result<()> {
        let Some(format) = self.format.filter(|_| !self.table.is_materialise()) else { return Ok(()) };
        if self.is_newest(position) || self.live_index(position).is_none() {
            return Ok(());
        }
        match jbd2::peek(block) {
            Some(header) if header.kind == Kind::Descriptor => {
                self.make_tags_fit(&format, pages, (position, header.sequence), block, outside)
            }
            // It runs over all data blocks of the transaction. A commit without it is valid.
            Some(header) if header.kind == Kind::Commit && format.checksum == Checksum::V1 => {
                jbd2::remove_transaction_checksum(&format, block);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn make_tags_fit(
        &self,
        format: &Format,
        pages: &Pages,
        (position, sequence): (u32, u32),
        block: &mut [u8],
        outside: &mut dyn Outside,
    ) -> io::Result<()> {
        let homes: Vec<u64> = Descriptor::new(format, block).tags().map(|tag| tag.block).collect();
        let mut data = vec![0; block.len()];
        let mut is_changed = false;
        let mut at = position;
        for (index, home) in homes.into_iter().enumerate() {
            at = format.next(at);
            if self.location(at) != Location::Gone {
                continue;
            }
            let is_escaped = self.show_let_go(pages, Some(home), &mut data, outside)?;
            DescriptorEdit::new(format, block).set_data(index, sequence, &data, is_escaped);
            is_changed = true;
        }
        if is_changed {
            DescriptorEdit::new(format, block).seal();
        }
        Ok(())
    }
}
