//! An image whose writes are written down (crate `write-log`): the log has what the image has, in the order in which it has it.
//!
//! Only where there is such a log: a write's bytes are copied out of the guest's memory first, since a guest may change them
//! under a write; and what overlaps with something under way waits for it, since nobody knows which of two ends last.

use super::Engine;
use block_route::{Buffer, DiskOperation, Operation};
use std::io;

pub(super) fn writes(operation: &DiskOperation) -> bool {
    matches!(operation.operation, Operation::Write | Operation::Discard | Operation::WriteZeroes { .. })
}

impl Engine {
    /// The operation with bytes that nobody changes.
    pub(super) fn as_logged(&self, operation: DiskOperation) -> DiskOperation {
        if self.image.write_log().is_none() || operation.operation != Operation::Write {
            return operation;
        }
        let mut bytes = vec![0; operation.len as usize];
        let mut at = 0;
        for buffer in &operation.buffers {
            match buffer {
                Buffer::Slice(slice) => slice.copy_out(0, &mut bytes[at..at + slice.len()]),
                Buffer::Bytes(own) => bytes[at..at + own.len()].copy_from_slice(own),
            }
            at += buffer.len();
        }
        DiskOperation { buffers: vec![Buffer::Bytes(bytes.into())], ..operation }
    }

    /// Whether an operation has to wait for another one, so that the log says truly which was last.
    pub(super) fn is_behind_in_log(&self, operation: &DiskOperation) -> bool {
        let overlaps = |other: &DiskOperation| {
            writes(other)
                && other.offset < operation.offset + operation.len
                && operation.offset < other.offset + other.len
        };
        self.image.write_log().is_some()
            && writes(operation)
            && self.transfers.iter().flatten().any(|transfer| overlaps(&transfer.operation))
    }

    /// An operation has ended.
    pub(super) fn note_in_log(&self, operation: &DiskOperation, result: &io::Result<()>) {
        let Some(log) = self.image.write_log().filter(|_| writes(operation)) else { return };
        let DiskOperation { offset, len, .. } = *operation;
        match (result, operation.operation) {
            // What was refused has changed nothing.
            (Err(error), _) if error.kind() == io::ErrorKind::InvalidInput => {}
            (Err(error), _) => log.end(&format!("a write at byte {offset} failed ({error})")),
            (Ok(()), Operation::Discard) => log.discarded(offset, len),
            (Ok(()), Operation::WriteZeroes { .. }) => log.zeroed(offset, len),
            (Ok(()), _) => {
                for buffer in &operation.buffers {
                    if let Buffer::Bytes(bytes) = buffer {
                        log.written(offset, bytes);
                    }
                }
            }
        }
    }
}
