//! What a guest writes into its log in one pass, and what became of it.

use guest_memory::MemorySlice;

/// One block that the guest writes into its log.
#[derive(Debug)]
pub struct LogWrite {
    /// Log block: not the superblock (position 0), which has a call of its own.
    pub position: u32,
    /// The content.
    pub content: Content,
}

/// Where the content of a log write comes from.
#[derive(Debug)]
pub enum Content {
    /// A whole guest page, which may be retained.
    Page(MemorySlice),
    /// Bytes gathered from smaller pieces of guest memory.
    Bytes(Vec<u8>),
    /// What a guest writes to while it is read: each time something else, and the last one from then on.
    #[cfg(test)]
    Changing(std::sync::Mutex<std::collections::VecDeque<Vec<u8>>>),
}

impl Content {
    pub(crate) fn copy_out(&self, offset: usize, buffer: &mut [u8]) {
        match self {
            Content::Page(slice) => slice.copy_out(offset, buffer),
            Content::Bytes(bytes) => buffer.copy_from_slice(&bytes[offset..offset + buffer.len()]),
            #[cfg(test)]
            Content::Changing(contents) => {
                let mut contents = contents.lock().expect("no panic under this lock");
                buffer.copy_from_slice(&contents[0][offset..offset + buffer.len()]);
                if contents.len() > 1 {
                    contents.pop_front();
                }
            }
        }
    }

    /// Whether it is a control block's, at this moment. A guest can write to its pages until they are protected or copied: what was read
    /// before says nothing of what is kept.
    pub(crate) fn is_control(&self) -> bool {
        let mut head = [0; jbd2::HEADER_BYTES];
        self.copy_out(0, &mut head);
        jbd2::peek(&head).is_some()
    }
}

/// What became of a batch of log writes.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Indices into the batch of blocks that no memory could be found for: they have to go to their own place on
    /// storage, and [`crate::JournalArea::stored`] has to be told when they are there.
    pub no_memory: Vec<usize>,
    /// Indices of blocks that nobody could be told of, wherever they were: these writes must fail. They are not of this log; or an earlier
    /// build made its table, and there is not even room in that. The guest's journal stops then without damage.
    pub no_room: Vec<usize>,
    /// Transactions that this batch completed.
    pub committed: u32,
    /// The same one by one, for who asked for it ([`crate::JournalArea::tell_accepted`]).
    pub accepted: Vec<Accepted>,
    /// Indices of writes that changed nothing: what they write is part of a transaction that counts already.
    pub repeated: Vec<usize>,
}

/// A transaction that was accepted: its commit block is there, with all that it commits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Accepted {
    /// Its sequence number.
    pub sequence: u32,
    /// The log block of its first control block.
    pub first_position: u32,
    /// The log block of its commit block.
    pub commit_position: u32,
    /// What it commits, in its order: log block and home block. Versions that replay would skip are not among them.
    pub tags: Vec<(u32, u64)>,
    /// The home blocks that it revokes.
    pub revokes: Vec<u64>,
}
