//! Parts of blocks on storage whose direct I/O takes only whole ones (4096-byte sectors): read, change, write.
//!
//! A file may end within such a block. What it has of that goes through the page cache, always: direct I/O could not read it, and would make
//! the file larger by writing it.
//!
//! Rare: the guest is told the block size. Done synchronously, with nothing else of the disk under way.

use super::aligned::AlignedBuffer;
use super::transfer::{copy_from, copy_to};
use crate::image::{DirectAlignment, Image};
use block_route::{DiskOperation, Operation};
use guest_memory::MemoryTable;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

const PIECE_BYTES: u64 = 1 << 20;

/// Carries out an operation whose place is not aligned.
pub(super) fn whole_blocks(
    image: &Image,
    alignment: DirectAlignment,
    operation: &DiskOperation,
    table: Option<&MemoryTable>,
) -> io::Result<()> {
    let unit = alignment.offset_bytes as u64;
    let whole_end = image.size_bytes() - image.size_bytes() % unit;
    let buffer =
        AlignedBuffer::new((PIECE_BYTES + 2 * unit) as usize, alignment.memory_bytes.max(alignment.offset_bytes));
    let mut done = 0;
    while done < operation.len {
        let start = operation.offset + done;
        let is_last_part = start >= whole_end;
        let room = if is_last_part { u64::MAX } else { whole_end - start };
        let count = (operation.len - done).min(PIECE_BYTES).min(room);
        let first = if is_last_part { start } else { start - start % unit };
        let len = if is_last_part { count } else { (start + count).next_multiple_of(unit) - first } as usize;
        let transfer = if is_last_part { through_cache } else { transfer };
        if !is_last_part || operation.operation == Operation::Read {
            transfer(image, &buffer, first, len, false)?;
        }
        let part = buffer.slice().sub((start - first) as usize, count as usize);
        match operation.operation {
            Operation::Read => copy_to(&operation.buffers, done as usize, &part, table).map_err(io::Error::other)?,
            Operation::Write => copy_from(&operation.buffers, done as usize, &part),
            Operation::WriteZeroes { .. } => part.fill_zero(),
            Operation::Flush | Operation::Discard => return Ok(()),
        }
        if operation.operation != Operation::Read {
            transfer(image, &buffer, first, len, true)?;
        }
        done += count;
    }
    Ok(())
}

/// Of the last part of a file, which is no whole block.
fn through_cache(image: &Image, buffer: &AlignedBuffer, offset: u64, len: usize, write: bool) -> io::Result<()> {
    let tail =
        image.tail().ok_or_else(|| io::Error::other("the image ends within a block, which it did not before"))?;
    let mut bytes = vec![0; len];
    if write {
        buffer.slice().copy_out(0, &mut bytes);
        return tail.write_all_at(&bytes, offset);
    }
    tail.read_exact_at(&mut bytes, offset)?;
    buffer.slice().copy_in(0, &bytes);
    Ok(())
}

fn transfer(image: &Image, buffer: &AlignedBuffer, offset: u64, len: usize, write: bool) -> io::Result<()> {
    let mut done = 0;
    while done < len {
        let (at, left) = (offset + done as u64, len - done);
        let descriptor = image.worked().as_raw_fd();
        // SAFETY: `len` is within the buffer, which nobody else uses; the descriptor is open.
        let result = unsafe {
            let memory = buffer.as_ptr().add(done).cast::<libc::c_void>();
            if write {
                libc::pwrite(descriptor, memory, left, at as libc::off_t)
            } else {
                libc::pread(descriptor, memory, left, at as libc::off_t)
            }
        };
        match result {
            0 => return Err(io::Error::new(io::ErrorKind::UnexpectedEof, format!("the image ends before byte {at}"))),
            count if count > 0 => done += count as usize,
            _ => match io::Error::last_os_error() {
                error if error.kind() == io::ErrorKind::Interrupted => {}
                error => return Err(error),
            },
        }
    }
    Ok(())
}
