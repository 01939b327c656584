//! Writing what a plan says, in large pieces.
//!
//! Home blocks are taken in ascending order, a batch at a time. Within a batch the log is read in log order, neighbours
//! together, and home blocks that are neighbours are written together. One thread reads and verifies, another writes.

use crate::error::Error;
use crate::home::HomeWriter;
use jbd2::{Blocks, Content, CopyInLog, Format, LogRead, Plan, PlannedBlock, ReplayError, sequence};
use std::sync::mpsc::{Receiver, SyncSender, channel, sync_channel};

/// Bytes of one batch: large enough for long runs, small enough for a cache.
const BATCH_BYTES: usize = 1 << 20;
/// Batches that are filled, on their way, or being written.
const BATCHES: usize = 4;
/// Bytes that are sent on their way together, while the next are read: as many as a host's file system allocates at once
/// and a disk sorts.
const WRITEBACK_BYTES: u64 = 32 << 20;
/// What lies between blocks that are farther apart than this is not touched by sending them: the log may be there.
const WRITEBACK_GAP_BYTES: u64 = 1 << 20;

/// What became of the blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Written {
    pub(crate) blocks: u64,
    pub(crate) bytes: u64,
    /// Copies whose checksum does not match. An older copy was written, or none.
    pub(crate) damaged: u64,
}

/// Writes every block of `plan`. `home` is nothing in a dry run: then all is read and verified, and nothing written.
pub(crate) fn write<L: LogRead + Send, H: HomeWriter>(
    plan: &Plan,
    log: &mut L,
    mut home: Option<&mut H>,
) -> Result<Written, Error> {
    let format = plan.format();
    if plan.summary().blocks == 0 {
        return Ok(Written::default());
    }
    let (filled_out, filled_in) = sync_channel(BATCHES);
    let (empty_out, empty_in) = channel();
    let batches = plan.summary().blocks.div_ceil(blocks_per_batch(format) as u64).min(BATCHES as u64);
    for _ in 0..batches {
        // The receiver is held below, so this cannot fail.
        let _ = empty_out.send(Batch::new(format));
    }
    std::thread::scope(|scope| {
        // Dropped when this closure is left, however that is: the reader, which waits for empty batches, then ends.
        let empty_out = empty_out;
        let reader = scope.spawn(move || {
            plan.announce(log);
            fill(log, plan.blocks(), empty_in, filled_out)
        });
        let mut written = Written::default();
        let mut writeback = Writeback::default();
        for batch in filled_in {
            batch.write(home.as_deref_mut(), &mut writeback, &mut written)?;
            // The reader has ended when nobody takes it: there is nothing more to fill.
            let _ = empty_out.send(batch);
        }
        match reader.join() {
            Ok(Ok(())) => Ok(written),
            Ok(Err(error)) => Err(error),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}

/// Fills batches until there is nothing more to fill, or nobody to write them.
fn fill<'a, L: LogRead>(
    log: &mut L,
    mut blocks: Blocks<'a>,
    empty: Receiver<Batch<'a>>,
    filled: SyncSender<Batch<'a>>,
) -> Result<(), Error> {
    let mut last = None;
    for mut batch in empty {
        batch.slots.clear();
        batch.slots.extend(blocks.by_ref().take(blocks_per_batch(batch.format)).map(Slot::new));
        batch.slots.iter().for_each(|slot| last = Some(expect_once(last, slot.block.home())));
        if batch.slots.is_empty() {
            break;
        }
        batch.read(log).map_err(Error::from_log)?;
        batch.restore(log).map_err(Error::from_log)?;
        if filled.send(batch).is_err() {
            break;
        }
    }
    Ok(())
}

/// A home block that is written after `last`: of two copies the one that is written later stays, so each block is written once.
fn expect_once(last: Option<u64>, home: u64) -> u64 {
    assert!(last.is_none_or(|last| last < home), "rule 3: block {home} is written home after block {last:?}");
    home
}

/// The transactions of two copies of block `home`, of which the second takes the place of the first, which is damaged.
fn expect_older(home: u64, newer: u32, older: u32) {
    assert!(!sequence::is_after(older, newer), "rule 3: of block {home} transaction {newer} counts before {older}");
}

fn blocks_per_batch(format: &Format) -> usize {
    BATCH_BYTES / format.block_size as usize
}

/// What was written last and not yet sent on its way to storage. The last of it is left for the flush.
#[derive(Default)]
struct Writeback {
    begin: u64,
    end: u64,
    bytes: u64,
}

impl Writeback {
    /// Takes what was written from byte `offset` on. Offsets ascend.
    fn wrote<H: HomeWriter>(&mut self, home: &mut H, offset: u64, length: u64) {
        if self.bytes >= WRITEBACK_BYTES || offset - self.end > WRITEBACK_GAP_BYTES {
            if self.bytes > 0 {
                home.begin_writeback(self.begin, self.end - self.begin);
            }
            *self = Writeback { begin: offset, end: offset, bytes: 0 };
        }
        self.end = offset + length;
        self.bytes += length;
    }
}

#[derive(Clone, Copy)]
struct Slot<'a> {
    block: PlannedBlock<'a>,
    copy: CopyInLog,
    /// Whether its part of the batch's data is to be written.
    is_ready: bool,
}

impl<'a> Slot<'a> {
    fn new(block: PlannedBlock<'a>) -> Self {
        Slot { block, copy: block.newest(), is_ready: false }
    }
}

struct Batch<'a> {
    format: &'a Format,
    block_size: usize,
    damaged: u64,
    slots: Vec<Slot<'a>>,
    /// Indices of slots, by log position.
    by_position: Vec<u32>,
    data: Vec<u8>,
    run: Vec<u8>,
    contents: Vec<Content>,
}

impl<'a> Batch<'a> {
    fn new(format: &'a Format) -> Self {
        Batch {
            format,
            block_size: format.block_size as usize,
            damaged: 0,
            slots: Vec::with_capacity(blocks_per_batch(format)),
            by_position: Vec::new(),
            data: vec![0; BATCH_BYTES],
            run: vec![0; BATCH_BYTES],
            contents: vec![Content::Present; blocks_per_batch(format)],
        }
    }

    /// Reads the newest copy of every block, in log order.
    fn read<L: LogRead>(&mut self, log: &mut L) -> Result<(), ReplayError<L::Error>> {
        self.by_position.clear();
        self.by_position.extend(0..self.slots.len() as u32);
        let slots = &self.slots;
        self.by_position.sort_unstable_by_key(|slot| slots[*slot as usize].copy.position);
        let mut first = 0;
        while first < self.by_position.len() {
            let position = self.position(first);
            let mut end = first + 1;
            while end < self.by_position.len() && self.position(end) as usize == position as usize + (end - first) {
                end += 1;
            }
            self.read_run(log, first, end)?;
            first = end;
        }
        Ok(())
    }

    fn position(&self, index: usize) -> u32 {
        self.slots[self.by_position[index] as usize].copy.position
    }

    /// Reads the slots `first..end` of `by_position`, whose log blocks are neighbours.
    fn read_run<L: LogRead>(&mut self, log: &mut L, first: usize, end: usize) -> Result<(), ReplayError<L::Error>> {
        let position = self.position(first);
        let count = end - first;
        let slot_first = self.by_position[first] as usize;
        let is_in_order =
            self.by_position[first..end].iter().enumerate().all(|(offset, slot)| *slot as usize == slot_first + offset);
        let size = self.block_size;
        let contents = &mut self.contents[..count];
        let target = if is_in_order { &mut self.data[slot_first * size..] } else { &mut self.run[..] };
        log.read_run(position, size, &mut target[..count * size], contents)
            .map_err(|source| ReplayError::Read { position, source })?;
        for (offset, content) in contents.iter().enumerate() {
            let slot = self.by_position[first + offset] as usize;
            self.slots[slot].is_ready = *content == Content::Present;
            if !is_in_order {
                let block = &self.run[offset * size..][..size];
                self.data[slot * size..][..size].copy_from_slice(block);
            }
        }
        Ok(())
    }

    /// Verifies the copies and undoes escapes. Where the newest copy is damaged, the next older one takes its place, as it
    /// would have been written before.
    fn restore<L: LogRead>(&mut self, log: &mut L) -> Result<(), ReplayError<L::Error>> {
        self.damaged = 0;
        for (slot, data) in self.slots.iter_mut().zip(self.data.chunks_exact_mut(self.block_size)) {
            if !slot.is_ready || slot.copy.restore(self.format, data) {
                continue;
            }
            self.damaged += 1;
            slot.is_ready = false;
            for copy in slot.block.copies().skip(1) {
                let position = copy.position;
                expect_older(slot.block.home(), slot.copy.sequence, copy.sequence);
                match log.read(position, data).map_err(|source| ReplayError::Read { position, source })? {
                    Content::AtHome => break,
                    Content::Present if copy.restore(self.format, data) => {
                        slot.is_ready = true;
                        break;
                    }
                    Content::Present => self.damaged += 1,
                }
            }
        }
        Ok(())
    }

    fn write<H: HomeWriter>(
        &self,
        mut home: Option<&mut H>,
        writeback: &mut Writeback,
        written: &mut Written,
    ) -> Result<(), Error> {
        written.damaged += self.damaged;
        let mut first = 0;
        while first < self.slots.len() {
            if !self.slots[first].is_ready {
                first += 1;
                continue;
            }
            let block = self.slots[first].block.home();
            let mut end = first + 1;
            while self
                .slots
                .get(end)
                .is_some_and(|slot| slot.is_ready && slot.block.home() == block + (end - first) as u64)
            {
                end += 1;
            }
            let data = &self.data[first * self.block_size..end * self.block_size];
            if let Some(home) = home.as_deref_mut() {
                home.write_at(block * self.block_size as u64, data)
                    .map_err(Error::failed(format!("writing {} blocks from block {block} on", end - first)))?;
                writeback.wrote(home, block * self.block_size as u64, data.len() as u64);
            }
            written.blocks += (end - first) as u64;
            written.bytes += data.len() as u64;
            first = end;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_that_ascend_are_each_written_once() {
        let last = [0, 1, 7, u64::MAX].into_iter().fold(None, |last, home| Some(expect_once(last, home)));
        assert_eq!(last, Some(u64::MAX));
        expect_older(9, 1, u32::MAX);
        expect_older(9, 5, 5);
    }

    #[test]
    #[should_panic(expected = "rule 3: block 7 is written home after block Some(7)")]
    fn no_block_is_written_twice() {
        expect_once(Some(7), 7);
    }

    #[test]
    #[should_panic(expected = "rule 3: of block 9 transaction 5 counts before 6")]
    fn no_newer_copy_counts_after_an_older_one() {
        expect_older(9, 5, 6);
    }
}
