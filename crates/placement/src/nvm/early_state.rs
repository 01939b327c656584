//! What went home of a transaction before it is complete: the state of [`super::early`].

use std::collections::BTreeMap;
use std::sync::Arc;

/// What went home early of the transaction that is being written into the log, or committed.
#[derive(Debug, Default)]
pub(super) struct Early {
    /// Its sequence number.
    pub sequence: Option<u32>,
    /// Writes of an earlier generation are of no transaction that can still count.
    pub generation: u64,
    /// Seen, and not sent.
    pub gathered: BTreeMap<u64, Arc<[u8]>>,
    /// Sent, with what.
    pub sent: BTreeMap<u64, Arc<[u8]>>,
    /// Writes under way, of this generation and of all.
    pub writing: usize,
    pub writing_all: usize,
    pub has_failed: bool,
    /// The transaction before had enough appends to be sent home: this one probably has, too.
    pub is_expected: bool,
}

impl Early {
    /// Nothing that was sent is of a transaction that can still count.
    pub fn forget(&mut self) {
        let (writing_all, is_expected) = (self.writing_all, self.is_expected);
        *self = Early { generation: self.generation + 1, writing_all, is_expected, ..Early::default() };
    }

    /// Whether the next transaction can be expected to have many appends.
    pub fn expect(&mut self, many: bool) {
        self.is_expected = many;
    }

    /// Another guest begins; nothing is under way.
    pub fn begin_anew(&mut self) {
        self.forget();
        self.writing_all = 0;
    }

    /// What was sent for another transaction than `sequence` does not count.
    pub fn keep_only(&mut self, sequence: u32) {
        if self.sequence != Some(sequence) {
            self.forget();
            self.sequence = Some(sequence);
        }
        self.gathered.clear();
    }

    /// Whether exactly this went home.
    pub fn is_sent(&self, block: u64, content: &Arc<[u8]>) -> bool {
        self.sent.get(&block).is_some_and(|sent| Arc::ptr_eq(sent, content) || sent == content)
    }

    /// Whether any of it went home.
    pub fn has_sent(&self) -> bool {
        !self.sent.is_empty()
    }

    pub fn contains(&self, block: u64) -> bool {
        self.sent.contains_key(&block)
    }

    /// What was sent of a block is not, or will not be, what is at its home.
    pub fn take_back(&mut self, block: u64) {
        self.gathered.remove(&block);
        self.sent.remove(&block);
    }

    /// Forgets blocks that are no appends of the transaction after all.
    pub fn retain(&mut self, is_append: impl Fn(&u64) -> bool) {
        self.sent.retain(|block, _| is_append(block));
    }

    /// Whether any early write is under way, whosever.
    pub fn is_writing(&self) -> bool {
        self.writing_all > 0
    }
}
