//! One operation on its way through the kernel: how far it is, and its next submission.

use super::aligned::AlignedBuffer;
use crate::image::DirectAlignment;
use block_route::{Buffer, DiskOperation, Operation};
use guest_memory::{MemorySlice, MemoryTable};
use io_uring::{opcode, squeue, types};
use std::time::Instant;

/// IOV_MAX: the kernel takes no more at once.
const VECTORS_MAX: usize = 1024;
/// The kernel transfers no more at once (MAX_RW_COUNT), in bytes.
const TRANSFER_BYTES_MAX: usize = 1 << 30;
/// An unaligned transfer is copied in pieces of this, in bytes.
pub(super) const BOUNCE_BYTES_MAX: usize = 1 << 20;
/// Zeros that are written where a range cannot be zeroed by the storage, in bytes.
pub(super) const ZEROS_BYTES: usize = 256 << 10;
const ZERO_VECTORS_MAX: usize = 16;
/// Reads through the page cache of at least this, in bytes, are copied by the kernel's own threads, side by side, when
/// there are several.
const ASYNC_BYTES_MIN: usize = 128 << 10;
/// How often a submission is repeated that the kernel answers with "again".
const RETRIES_MAX: u32 = 1000;

/// How an operation is carried out.
#[derive(Debug)]
enum Way {
    /// Straight between storage and the buffers.
    Straight,
    /// Through a buffer aligned for direct I/O, piece by piece.
    Bounced(AlignedBuffer),
    /// By the file system.
    Allocate { mode: i32 },
    /// By writing zeros.
    Zeros,
}

/// An operation in the kernel's hands. Its memory stays where it is until it is done.
#[derive(Debug)]
pub(super) struct Transfer {
    pub(super) operation: DiskOperation,
    done: u64,
    way: Way,
    vectors: Vec<libc::iovec>,
    /// Bytes of the submission under way.
    submitted: usize,
    retries: u32,
    /// It ends well and has changed nothing: storage that cannot discard.
    pub(super) is_without_effect: bool,
    /// When it was made, for the kernel to have.
    pub(super) began: Instant,
}

// SAFETY: the vectors are addresses of memory that the transfer's operation names; nothing is tied to a thread.
unsafe impl Send for Transfer {}

/// What a completion means.
pub(super) enum Progress {
    /// It is done, or has failed.
    Done(std::io::Result<()>),
    /// It goes on with another submission.
    Again,
}

fn buffer_ptr(buffer: &Buffer) -> *mut u8 {
    match buffer {
        Buffer::Slice(slice) => slice.as_ptr(),
        // Bytes are only ever written to storage, never read into.
        Buffer::Bytes(bytes) => bytes.as_ptr().cast_mut(),
    }
}

/// Whether direct I/O can work on the buffers as they are.
pub(super) fn memory_is_aligned(operation: &DiskOperation, alignment: DirectAlignment) -> bool {
    let mask = alignment.memory_bytes - 1;
    operation.buffers.iter().all(|buffer| (buffer_ptr(buffer) as usize | buffer.len()) & mask == 0)
}

/// Whether the place on the image is one that direct I/O takes.
pub(super) fn place_is_aligned(operation: &DiskOperation, alignment: DirectAlignment) -> bool {
    let mask = alignment.offset_bytes as u64 - 1;
    (operation.offset | operation.len) & mask == 0
}

impl Transfer {
    /// Bytes of bounce memory that an operation needs.
    pub(super) fn bounce_bytes(operation: &DiskOperation, direct: Option<DirectAlignment>) -> usize {
        match (operation.operation, direct) {
            (Operation::Read | Operation::Write, Some(alignment)) if !memory_is_aligned(operation, alignment) => {
                (operation.len as usize).min(BOUNCE_BYTES_MAX)
            }
            _ => 0,
        }
    }

    pub(super) fn new(operation: DiskOperation, direct: Option<DirectAlignment>, vectors: Vec<libc::iovec>) -> Self {
        let way = match operation.operation {
            Operation::Read | Operation::Write => match Self::bounce_bytes(&operation, direct) {
                0 => Way::Straight,
                bytes => {
                    let alignment = direct.map_or(1, |direct| direct.memory_bytes.max(direct.offset_bytes));
                    Way::Bounced(AlignedBuffer::new(bytes, alignment))
                }
            },
            Operation::Discard | Operation::WriteZeroes { unmap: true } => {
                Way::Allocate { mode: libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE }
            }
            Operation::WriteZeroes { unmap: false } => {
                Way::Allocate { mode: libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE }
            }
            Operation::Flush => unreachable!("flushes are not transfers"),
        };
        Transfer {
            operation,
            done: 0,
            way,
            vectors,
            submitted: 0,
            retries: 0,
            is_without_effect: false,
            began: Instant::now(),
        }
    }

    /// Takes the vectors out, to be used by the next transfer.
    pub(super) fn into_parts(self) -> (DiskOperation, Vec<libc::iovec>) {
        (self.operation, self.vectors)
    }

    /// Whether it holds bounce memory, and how much, in bytes.
    pub(super) fn bounce_len(&self) -> usize {
        if let Way::Bounced(buffer) = &self.way { buffer.len() } else { 0 }
    }

    fn left(&self) -> u64 {
        self.operation.len - self.done
    }

    /// The next submission. `table` is asked for every guest page that the kernel will write to. Where `image_waits`, a thread of the kernel's does.
    ///
    /// The caller must keep the transfer, and the memory its operation names, until the submission has completed.
    ///
    /// # Errors
    /// A page of the guest's must not be written: the transfer ends here.
    pub(super) fn next_entry(
        &mut self,
        file: types::Fd,
        table: Option<&MemoryTable>,
        zeros: &AlignedBuffer,
        alignment_bytes: usize,
        others_under_way: bool,
        image_waits: bool,
    ) -> Result<squeue::Entry, guest_memory::Error> {
        let offset = self.operation.offset + self.done;
        let aside = |entry: squeue::Entry| if image_waits { entry.flags(squeue::Flags::ASYNC) } else { entry };
        match &self.way {
            Way::Straight => {
                self.gather(alignment_bytes);
                let read = self.operation.operation == Operation::Read;
                if read && self.done == 0 {
                    for buffer in &self.operation.buffers {
                        if let (Buffer::Slice(slice), Some(table)) = (buffer, table) {
                            table.prepare_write(slice)?;
                        }
                    }
                }
                let entry = self.entry_of_vectors(file, read, offset);
                let cached = alignment_bytes == 1;
                Ok(if cached && read && others_under_way && self.submitted >= ASYNC_BYTES_MIN {
                    entry.flags(squeue::Flags::ASYNC)
                } else {
                    aside(entry)
                })
            }
            Way::Bounced(buffer) => {
                let count = (self.left() as usize).min(buffer.len());
                self.submitted = count;
                Ok(aside(if self.operation.operation == Operation::Read {
                    opcode::Read::new(file, buffer.as_ptr(), count as u32).offset(offset).build()
                } else {
                    copy_from(&self.operation.buffers, self.done as usize, &buffer.slice().sub(0, count));
                    opcode::Write::new(file, buffer.as_ptr(), count as u32).offset(offset).build()
                }))
            }
            Way::Allocate { mode } => {
                self.submitted = 0;
                Ok(opcode::Fallocate::new(file, self.left()).offset(offset).mode(*mode).build())
            }
            Way::Zeros => {
                self.vectors.clear();
                let mut left = self.left() as usize;
                self.submitted = 0;
                while left > 0 && self.vectors.len() < ZERO_VECTORS_MAX {
                    let count = left.min(zeros.len());
                    self.vectors.push(libc::iovec { iov_base: zeros.as_ptr().cast(), iov_len: count });
                    self.submitted += count;
                    left -= count;
                }
                Ok(aside(self.entry_of_vectors(file, false, offset)))
            }
        }
    }

    /// Collects what is left of the buffers into vectors, joining neighbours; not all of it where there is a limit, but
    /// then a multiple of `alignment_bytes`.
    fn gather(&mut self, alignment_bytes: usize) {
        self.vectors.clear();
        self.submitted = 0;
        let mut skip = self.done as usize;
        for buffer in &self.operation.buffers {
            let len = buffer.len();
            if skip >= len {
                skip -= len;
                continue;
            }
            let room = TRANSFER_BYTES_MAX - self.submitted;
            let count = (len - skip).min(room);
            if count == 0 {
                break;
            }
            let base = buffer_ptr(buffer).wrapping_add(skip);
            skip = 0;
            let full = self.vectors.len() == VECTORS_MAX;
            match self.vectors.last_mut() {
                Some(last) if last.iov_base.cast::<u8>().wrapping_add(last.iov_len) == base => last.iov_len += count,
                _ if full => break,
                _ => self.vectors.push(libc::iovec { iov_base: base.cast(), iov_len: count }),
            }
            self.submitted += count;
        }
        if (self.submitted as u64) < self.left() {
            let mut excess = self.submitted % alignment_bytes;
            self.submitted -= excess;
            while excess > 0 {
                let last = self.vectors.last_mut().expect("the vectors hold what was submitted");
                let cut = excess.min(last.iov_len);
                last.iov_len -= cut;
                excess -= cut;
                if last.iov_len == 0 {
                    self.vectors.pop();
                }
            }
        }
    }

    fn entry_of_vectors(&self, file: types::Fd, read: bool, offset: u64) -> squeue::Entry {
        match self.vectors[..] {
            [one] if read => opcode::Read::new(file, one.iov_base.cast(), one.iov_len as u32).offset(offset).build(),
            [one] => opcode::Write::new(file, one.iov_base.cast(), one.iov_len as u32).offset(offset).build(),
            _ if read => {
                opcode::Readv::new(file, self.vectors.as_ptr(), self.vectors.len() as u32).offset(offset).build()
            }
            _ => opcode::Writev::new(file, self.vectors.as_ptr(), self.vectors.len() as u32).offset(offset).build(),
        }
    }

    /// Takes the kernel's answer in. `alignment_bytes` is that of places in direct I/O, or 1.
    pub(super) fn advance(&mut self, result: i32, table: Option<&MemoryTable>, alignment_bytes: u64) -> Progress {
        if result < 0 {
            return self.failed(-result);
        }
        if let Way::Allocate { .. } = self.way {
            return Progress::Done(Ok(()));
        }
        let mut count = (result as usize).min(self.submitted) as u64;
        if let Way::Bounced(buffer) = &self.way
            && self.operation.operation == Operation::Read
            && let Err(error) =
                copy_to(&self.operation.buffers, self.done as usize, &buffer.slice().sub(0, count as usize), table)
        {
            return Progress::Done(Err(std::io::Error::other(error)));
        }
        if self.done + count >= self.operation.len {
            return Progress::Done(Ok(()));
        }
        // A direct transfer goes on where direct I/O can: what lies behind the last whole unit is done again.
        count -= (self.done + count) % alignment_bytes;
        if count == 0 {
            let what = if self.operation.operation == Operation::Read { "read" } else { "write" };
            let place = self.operation.offset + self.done;
            return Progress::Done(Err(std::io::Error::new(
                std::io::ErrorKind::UnexpectedEof,
                format!("the image ends at or before byte {place}, within a {what}"),
            )));
        }
        self.done += count;
        Progress::Again
    }

    fn failed(&mut self, errno: i32) -> Progress {
        match (errno, &self.way) {
            (libc::EINTR | libc::EAGAIN, _) if self.retries < RETRIES_MAX => {
                self.retries += 1;
                Progress::Again
            }
            (libc::EOPNOTSUPP | libc::ENOSYS | libc::EINVAL, Way::Allocate { .. }) => {
                match self.operation.operation {
                    // A discard is a hint.
                    Operation::Discard => {
                        self.is_without_effect = true;
                        Progress::Done(Ok(()))
                    }
                    _ => {
                        self.way = Way::Zeros;
                        Progress::Again
                    }
                }
            }
            _ => Progress::Done(Err(std::io::Error::from_raw_os_error(errno))),
        }
    }
}

/// Copies the bytes of `buffers` from `start` on into `target`, as many as it has.
pub(super) fn copy_from(buffers: &[Buffer], start: usize, target: &MemorySlice) {
    walk(buffers, start, target.len(), |buffer, at, done, part| match buffer {
        Buffer::Slice(slice) => copy(&slice.sub(at, part), &target.sub(done, part)),
        Buffer::Bytes(bytes) => target.copy_in(done, &bytes[at..at + part]),
    });
}

/// Copies all of `source` into `buffers`, from `start` on, up to the first page that must not be written.
pub(super) fn copy_to(
    buffers: &[Buffer],
    start: usize,
    source: &MemorySlice,
    table: Option<&MemoryTable>,
) -> Result<(), guest_memory::Error> {
    let mut result = Ok(());
    walk(buffers, start, source.len(), |buffer, at, done, part| {
        let Buffer::Slice(slice) = buffer else { return };
        let target = slice.sub(at, part);
        if let (Ok(()), Some(table)) = (&result, table) {
            result = table.prepare_write(&target);
        }
        if result.is_ok() {
            copy(&source.sub(done, part), &target);
        }
    });
    result
}

/// Copies between guest memory and a buffer of the daemon's own.
fn copy(source: &MemorySlice, target: &MemorySlice) {
    debug_assert_eq!(source.len(), target.len());
    // SAFETY: both are mapped (promise of MemorySlice::new), equally long, and apart: one of them is an AlignedBuffer.
    unsafe { std::ptr::copy_nonoverlapping(source.as_ptr(), target.as_ptr(), source.len()) }
}

/// Calls with each buffer's part of the `count` bytes from `start` on: the buffer, where in it, how much before, how much.
fn walk(buffers: &[Buffer], start: usize, count: usize, mut each: impl FnMut(&Buffer, usize, usize, usize)) {
    let mut skip = start;
    let mut done = 0;
    for buffer in buffers {
        let len = buffer.len();
        if skip >= len {
            skip -= len;
            continue;
        }
        let part = (len - skip).min(count - done);
        if part == 0 {
            return;
        }
        each(buffer, skip, done, part);
        done += part;
        skip = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_discard_that_storage_cannot_do_ends_well_and_has_changed_nothing() {
        let of = |operation| {
            let operation =
                DiskOperation { request: None, ticket: None, operation, offset: 4096, len: 4096, buffers: Vec::new() };
            Transfer::new(operation, None, Vec::new())
        };
        let mut discard = of(Operation::Discard);
        assert!(matches!(discard.advance(-libc::EOPNOTSUPP, None, 1), Progress::Done(Ok(()))));
        assert!(discard.is_without_effect);
        let mut done = of(Operation::Discard);
        assert!(matches!(done.advance(0, None, 1), Progress::Done(Ok(()))) && !done.is_without_effect);
        // Zeros are promised.
        let mut zeros = of(Operation::WriteZeroes { unmap: true });
        assert!(matches!(zeros.advance(-libc::EOPNOTSUPP, None, 1), Progress::Again) && !zeros.is_without_effect);
    }
}
