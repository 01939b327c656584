//! The file system's superblock in a recovery: what the log holds for it and what recovery itself changes in it go home in
//! one write, after everything else.
//!
//! Were the log's copy written with the other blocks, a crash before the second write would leave a superblock without the
//! record of errors that was at home before (it is not in the log), or, from a log that lies, one that asks for no
//! recovery although the rest of the log is not home yet.
//!
//! A kernel whose journal could not be closed, because storage refused that, may unmount its file system all the same. Then the superblock at
//! home is later than the log's copy, and stays.

use crate::error::Error;
use crate::home::HomeWriter;
use extfs::{ReadAt, SUPERBLOCK_BYTES, SUPERBLOCK_OFFSET, Superblock};
use std::io;

/// What a recovery found, for the superblock to tell.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Findings {
    /// The journal says that an error happened, or one was found in it.
    pub(crate) is_error: bool,
    /// Blocks were lost.
    pub(crate) lost_blocks: bool,
    /// The log's blocks have checksums, so that what it holds need not be doubted.
    pub(crate) is_checked: bool,
}

/// The block that holds a file system's superblock, as it was before the replay.
pub(crate) struct SuperblockHome {
    block: Vec<u8>,
    offset: u64,
}

impl SuperblockHome {
    /// Reads it.
    pub(crate) fn read<H: HomeWriter>(home: &H, block_size: u32) -> Result<Self, Error> {
        let size = u64::from(block_size);
        let mut superblock =
            SuperblockHome { block: vec![0; block_size as usize], offset: SUPERBLOCK_OFFSET / size * size };
        home.read_at(superblock.offset, &mut superblock.block)
            .map_err(Error::failed("reading the file system's superblock"))?;
        Ok(superblock)
    }

    fn raw<'b>(&self, block: &'b mut [u8]) -> &'b mut [u8] {
        let inside = (SUPERBLOCK_OFFSET - self.offset) as usize;
        &mut block[inside..inside + SUPERBLOCK_BYTES]
    }

    /// Everything but this block: what is written to it is kept back.
    pub(crate) fn rest_of<'h, H: HomeWriter>(&self, home: &'h mut H) -> RestOfHome<'h, H> {
        RestOfHome { home, offset: self.offset, len: self.block.len() as u64, kept: None }
    }

    /// Whether this was written after `copy`, under the same mount, and does not ask for a replay: by the kernel that unmounted it. A copy of the
    /// file system from before that mount says another time of its mount, or another count of them. A recovery clears what asks for a replay, and
    /// so does who makes a snapshot: they leave the time of writing, so that one of the same time is no later one.
    fn is_unmounted_after(&self, copy: &[u8]) -> bool {
        let parsed = |block: &[u8]| Superblock::parse(self.raw(&mut block.to_vec()));
        let (Ok(found), Ok(copy)) = (parsed(&self.block), parsed(copy)) else { return false };
        let mount = |superblock: &Superblock| (superblock.uuid, superblock.mounted_at, superblock.mount_count);
        mount(&found) == mount(&copy)
            && found.written_at > copy.written_at
            && !found.needs_recovery()
            && found.check().is_ok()
    }

    /// Writes the superblock, marked as recovered: the log's copy if there is one (`replayed`), else what was at home. The
    /// inner error is a sentence: the log's copy is no superblock of this file system, and went home as it is.
    pub(crate) fn finish<H: HomeWriter>(
        self,
        home: &mut H,
        replayed: Option<Vec<u8>>,
        findings: Findings,
    ) -> Result<Result<(), String>, Error> {
        let replayed = replayed.filter(|copy| !self.is_unmounted_after(copy));
        let is_replayed = replayed.is_some();
        let mut before = self.block.clone();
        let mut block = replayed.unwrap_or_else(|| self.block.clone());
        let edited = edit(self.raw(&mut before), self.raw(&mut block), findings);
        if edited.is_ok() || is_replayed {
            home.write_at(self.offset, &block).map_err(Error::failed("writing the file system's superblock"))?;
        }
        Ok(edited)
    }

    /// Whether it is what [`SuperblockHome::finish`] leaves of the log's copy (`replayed`), or of itself, whatever a recovery finds.
    pub(crate) fn is_finished(&self, replayed: Option<Vec<u8>>, is_checked: bool) -> bool {
        let findings = Findings { is_error: true, lost_blocks: true, is_checked };
        let edited = |block: &[u8]| {
            let (mut before, mut block) = (self.block.clone(), block.to_vec());
            let is_edited = edit(self.raw(&mut before), self.raw(&mut block), findings).is_ok();
            (block, is_edited)
        };
        let replayed = replayed.filter(|copy| !self.is_unmounted_after(copy));
        let (as_left, is_edited) = edited(replayed.as_deref().unwrap_or(&self.block));
        // A copy that is no superblock of this file system goes home as it is.
        let as_found = if is_edited { edited(&self.block).0 } else { self.block.clone() };
        let asks_for_recovery =
            Superblock::parse(self.raw(&mut self.block.clone())).is_ok_and(|it| it.needs_recovery());
        as_left == as_found && !(is_edited && asks_for_recovery)
    }
}

/// Changes `raw` (the newest copy) with what `before` (what was at home) and the recovery have to add.
fn edit(before: &[u8], raw: &mut [u8], findings: Findings) -> Result<(), String> {
    let is_same = match (Superblock::parse(before), Superblock::parse(raw)) {
        (Ok(old), Ok(new)) => {
            let checksum_ok = new.check().is_ok() || findings.is_checked;
            (old.block_size, old.journal_inode) == (new.block_size, new.journal_inode) && checksum_ok
        }
        _ => false,
    };
    if !is_same {
        return Err("the superblock that the log holds is damaged; run e2fsck -f with a backup superblock".to_owned());
    }
    let edited = extfs::SuperblockEdit::new(raw).and_then(|mut edit| {
        edit.keep_error_record(before)?.clear_needs_recovery();
        if findings.is_error {
            edit.set_error();
        }
        if findings.lost_blocks {
            edit.clear_valid();
        }
        edit.seal();
        Ok(())
    });
    edited.map_err(|error| error.to_string())
}

/// A home whose superblock is not written, but kept.
pub(crate) struct RestOfHome<'h, H> {
    home: &'h mut H,
    offset: u64,
    len: u64,
    /// The newest copy of the superblock's block that was to be written.
    pub(crate) kept: Option<Vec<u8>>,
}

impl<H: HomeWriter> ReadAt for RestOfHome<'_, H> {
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.home.read_at(offset, buffer)
    }

    fn size(&self) -> u64 {
        self.home.size()
    }
}

impl<H: HomeWriter> HomeWriter for RestOfHome<'_, H> {
    fn write_at(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        let (start, end) = (self.offset, self.offset + self.len);
        if offset >= end || offset + data.len() as u64 <= start {
            return self.home.write_at(offset, data);
        }
        // Offsets and lengths are whole blocks, so the block is in it as a whole.
        let (before, rest) = data.split_at((start - offset.min(start)) as usize);
        let (kept, after) = rest.split_at(self.len as usize);
        self.kept = Some(kept.to_vec());
        if !before.is_empty() {
            self.home.write_at(offset, before)?;
        }
        if !after.is_empty() {
            self.home.write_at(end, after)?;
        }
        Ok(())
    }

    fn begin_writeback(&mut self, offset: u64, length: u64) {
        self.home.begin_writeback(offset, length);
    }

    fn flush(&mut self) -> io::Result<()> {
        self.home.flush()
    }
}
