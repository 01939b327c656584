//! Materialise: write a live log that is held in memory into the journal's own place on storage, so that the guest's own
//! kernel (or e2fsck) finds it there.
//!
//! Whoever holds the log may have let go of data blocks that are home already, or that a newer committed copy or a revoke
//! supersedes ([`Content::AtHome`]). In their place goes what their home block has now: replaying the log writes that, and
//! then whatever newer copies there are, so the outcome is the same. Their tags are changed to fit.
//!
//! The journal superblock is written last, after a flush: until then storage has the log that it had.

use crate::error::Error;
use crate::home::{HomeBounds, HomeWriter};
use crate::replay::LogBounds;
use crate::report::{Report, Status};
use extfs::JournalExtent;
use jbd2::{
    Commit, Content, Descriptor, DescriptorEdit, Format, LogRead, Place, ReplayError, Revoke, Superblock, Verdict,
    Visitor, is_escaped_content, remove_transaction_checksum, walk,
};
use std::io;
use std::time::Instant;

/// The disk that a journal's own place is on.
pub enum JournalDisk<'a> {
    /// That of the file system.
    Home,
    /// Another one.
    Other(&'a mut dyn HomeWriter),
}

/// Blocks are written in pieces of this many bytes.
const PIECE_BYTES: usize = 1 << 20;

/// Writes the live part of `log`, then the blocks `also` (log blocks that are held but not yet, or not understood as, part
/// of a transaction: the tail that is being written, the fast-commit area), then the journal superblock, into the journal's
/// own place: `extents` of `disk`.
///
/// A log that is not understood is written as `also` says, block for block.
///
/// # Errors
/// When reading or writing fails. The journal superblock on storage is then as it was.
pub fn materialise<L: LogRead, H: HomeWriter>(
    log: &mut L,
    journal: LogBounds,
    extents: &[JournalExtent],
    bounds: &HomeBounds,
    home: &mut H,
    disk: JournalDisk<'_>,
    also: &[u32],
) -> Result<Report, Error> {
    let started = Instant::now();
    let block_size = bounds.block_size() as usize;
    let mut raw = vec![0; block_size];
    let position = journal.superblock_position;
    read_held(log, position, &mut raw)?;
    let mut writer = Writer {
        home,
        disk,
        extents,
        block_size,
        bounds,
        first: None,
        position: 0,
        piece: Vec::with_capacity(PIECE_BYTES),
        written: 0,
        is_flushed: false,
        failure: None,
    };
    let mut report = Report::of(Status::Materialised);
    if let Ok((superblock, format)) = Superblock::parse(&raw)
        && format.block_size as usize == block_size
        && format.length <= journal.blocks
    {
        let start = superblock.start;
        let mut copier = Copier { writer: &mut writer, format, start, is_changed: false };
        let walked = walk(log, &format, start, superblock.sequence, &mut copier);
        if let Some(failure) = writer.failure.take() {
            return Err(failure);
        }
        match walked {
            Ok(walk) if walk.transactions() > 0 => {
                report.transactions = walk.transactions().into();
                report.first_sequence = Some(walk.first_sequence);
                report.last_sequence = Some(walk.end_sequence.wrapping_sub(1));
            }
            Ok(_) => {}
            Err(error @ (ReplayError::Read { .. } | ReplayError::NotHeld { .. })) => {
                return Err(Error::from_log(error));
            }
            Err(error) => report.notes.push(format!("the log is damaged ({error}); it was written as it is")),
        }
    }
    let mut block = vec![0; block_size];
    for position in also.iter().filter(|position| **position != journal.superblock_position) {
        read_held(log, *position, &mut block)?;
        writer.put(*position, &block)?;
    }
    writer.flush()?;
    writer.put_superblock(position, &raw)?;
    writer.flush()?;
    report.blocks_written = writer.written;
    report.bytes_written = writer.written * block_size as u64;
    report.seconds = started.elapsed().as_secs_f64();
    Ok(report)
}

fn read_held<L: LogRead>(log: &mut L, position: u32, block: &mut [u8]) -> Result<(), Error> {
    match log.read(position, block) {
        Ok(Content::Present) => Ok(()),
        Ok(Content::AtHome) => Err(Error::from_log(ReplayError::<io::Error>::NotHeld { position })),
        Err(source) => Err(Error::from_log(ReplayError::Read { position, source })),
    }
}

/// Writes log blocks, neighbours together.
struct Writer<'a, 'd, H: HomeWriter> {
    home: &'a mut H,
    disk: JournalDisk<'d>,
    extents: &'a [JournalExtent],
    block_size: usize,
    bounds: &'a HomeBounds,
    /// Log block that `piece` begins with.
    first: Option<u32>,
    /// Log block that would continue `piece`.
    position: u32,
    piece: Vec<u8>,
    written: u64,
    /// A flush covers all that was put.
    is_flushed: bool,
    /// A failure while the log was followed, which has its own kind of error.
    failure: Option<Error>,
}

impl<H: HomeWriter> Writer<'_, '_, H> {
    fn put(&mut self, position: u32, block: &[u8]) -> Result<(), Error> {
        if self.first.is_some() && (position != self.position || self.piece.len() + block.len() > PIECE_BYTES) {
            self.write_piece()?;
        }
        self.first.get_or_insert(position);
        self.position = position + 1;
        self.piece.extend_from_slice(block);
        self.is_flushed = false;
        Ok(())
    }

    /// The journal's superblock, which says that the log is in its place.
    fn put_superblock(&mut self, position: u32, block: &[u8]) -> Result<(), Error> {
        assert!(self.is_flushed, "the journal's superblock is written before the log that it tells of is flushed");
        self.put(position, block)
    }

    fn write_piece(&mut self) -> Result<(), Error> {
        let Some(mut position) = self.first.take() else { return Ok(()) };
        let piece = std::mem::take(&mut self.piece);
        let mut rest = &piece[..];
        while !rest.is_empty() {
            let after = self.extents.partition_point(|extent| extent.log <= position);
            let found = after.checked_sub(1).map(|index| self.extents[index]);
            let Some(extent) = found.filter(|extent| position - extent.log < extent.count) else {
                return Err(Error::refused(format!(
                    "log block {position} is outside the journal; materialising stopped"
                )));
            };
            let inside = position - extent.log;
            let count = ((extent.count - inside) as usize).min(rest.len() / self.block_size);
            let (now, later) = rest.split_at(count * self.block_size);
            let offset = (extent.physical + u64::from(inside)) * self.block_size as u64;
            match &mut self.disk {
                JournalDisk::Home => self.home.write_at(offset, now),
                JournalDisk::Other(disk) => disk.write_at(offset, now),
            }
            .map_err(Error::failed(format!("writing log block {position} to its own place")))?;
            self.written += count as u64;
            position += count as u32;
            rest = later;
        }
        self.piece = piece;
        self.piece.clear();
        Ok(())
    }

    fn flush(&mut self) -> Result<(), Error> {
        self.write_piece()?;
        match &mut self.disk {
            JournalDisk::Home => self.home.flush(),
            JournalDisk::Other(disk) => disk.flush(),
        }
        .map_err(Error::failed("flushing the journal"))?;
        self.is_flushed = true;
        Ok(())
    }

    /// What home block `block` has now, as it would be in the log, and whether it had to be escaped.
    fn home_block(&self, block: u64, data: &mut [u8]) -> Result<bool, Error> {
        if !self.bounds.contains(block) {
            data.fill(0);
            return Ok(false);
        }
        self.home
            .read_at(block * self.block_size as u64, data)
            .map_err(Error::failed(format!("reading block {block} of the file system")))?;
        let escaped = is_escaped_content(data);
        if escaped {
            data[..4].fill(0);
        }
        Ok(escaped)
    }
}

/// Follows the log and writes what it comes to.
struct Copier<'w, 'a, 'd, H: HomeWriter> {
    writer: &'w mut Writer<'a, 'd, H>,
    format: Format,
    start: u32,
    /// Whether a data block of the present transaction is not what it was.
    is_changed: bool,
}

/// Stops the walk; the reason is in `Writer::failure`.
fn stop<E: std::error::Error + 'static>(place: Place) -> ReplayError<E> {
    ReplayError::NotHeld { position: place.position }
}

impl<H: HomeWriter> Copier<'_, '_, '_, H> {
    fn put<E: std::error::Error + 'static>(
        &mut self,
        place: Place,
        position: u32,
        block: &[u8],
    ) -> Result<(), ReplayError<E>> {
        let put = self.writer.put(position, block);
        self.keep(place, put)
    }

    fn keep<T, E: std::error::Error + 'static>(
        &mut self,
        place: Place,
        result: Result<T, Error>,
    ) -> Result<T, ReplayError<E>> {
        result.map_err(|failure| {
            self.writer.failure = Some(failure);
            stop(place)
        })
    }
}

impl<L: LogRead, H: HomeWriter> Visitor<L> for Copier<'_, '_, '_, H> {
    fn descriptor(
        &mut self,
        log: &mut L,
        place: Place,
        descriptor: &Descriptor<'_>,
        _checksum_ok: bool,
    ) -> Result<(), ReplayError<L::Error>> {
        let mut raw = descriptor.block().to_vec();
        let mut data = vec![0; raw.len()];
        let blocks_max = u64::from(self.format.log_blocks());
        let tags =
            || descriptor.tags().enumerate().zip(place.order + 1..).take_while(|(_, order)| *order <= blocks_max);
        let mut changed = Vec::new();
        for ((index, tag), order) in tags() {
            let position = self.format.advance(self.start, order as u32);
            let content = log.read(position, &mut data).map_err(|source| ReplayError::Read { position, source })?;
            if content == Content::AtHome {
                let home = self.writer.home_block(tag.block, &mut data);
                let escaped = self.keep(place, home)?;
                DescriptorEdit::new(&self.format, &mut raw).set_data(index, place.sequence, &data, escaped);
                changed.push(index);
            }
        }
        if !changed.is_empty() {
            DescriptorEdit::new(&self.format, &mut raw).seal();
            self.is_changed = true;
        }
        self.put(place, place.position, &raw)?;
        for ((index, tag), order) in tags() {
            let position = self.format.advance(self.start, order as u32);
            if changed.binary_search(&index).is_ok() {
                let home = self.writer.home_block(tag.block, &mut data);
                self.keep(place, home)?;
            } else {
                log.read(position, &mut data).map_err(|source| ReplayError::Read { position, source })?;
            }
            self.put(place, position, &data)?;
        }
        Ok(())
    }

    fn revoke(
        &mut self,
        _log: &mut L,
        place: Place,
        revoke: &Revoke<'_>,
        _checksum_ok: bool,
    ) -> Result<(), ReplayError<L::Error>> {
        self.put(place, place.position, revoke.block())
    }

    fn commit(
        &mut self,
        _log: &mut L,
        place: Place,
        commit: &Commit<'_>,
        _verdict: Verdict,
        _own_transaction_ends: bool,
    ) -> Result<(), ReplayError<L::Error>> {
        let mut raw = commit.block().to_vec();
        if self.is_changed {
            remove_transaction_checksum(&self.format, &mut raw);
            self.is_changed = false;
        }
        self.put(place, place.position, &raw)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checked::tests::Anything;

    fn written(is_flushed: bool) {
        let bounds = HomeBounds::from_parts(100, 1024, Vec::new());
        let extents = [JournalExtent { log: 0, physical: 10, count: 16 }];
        let mut writer = Writer {
            home: &mut Anything,
            disk: JournalDisk::Home,
            extents: &extents,
            block_size: 1024,
            bounds: &bounds,
            first: None,
            position: 0,
            piece: Vec::new(),
            written: 0,
            is_flushed: false,
            failure: None,
        };
        writer.put(1, &[0; 1024]).expect("put");
        if is_flushed {
            writer.flush().expect("flushed");
        }
        writer.put_superblock(0, &[0; 1024]).expect("put");
        writer.flush().expect("flushed");
        assert_eq!(writer.written, 2);
    }

    #[test]
    fn the_superblock_is_written_behind_a_flush() {
        written(true);
    }

    #[test]
    #[should_panic(expected = "the journal's superblock is written before the log that it tells of is flushed")]
    fn and_never_before() {
        written(false);
    }
}
