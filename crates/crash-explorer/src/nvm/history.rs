//! What each block of a disk with a volatile cache may hold after a loss of power: what was durable, and everything that
//! was written since.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hasher};
use std::sync::Arc;

/// A block's content, known by 128 bits of hash.
#[derive(Clone, Debug)]
pub struct Content {
    /// Two hashes: what tells contents apart.
    pub id: [u64; 2],
    /// The bytes.
    pub bytes: Arc<[u8]>,
}

impl Content {
    /// Of these bytes.
    pub fn new(bytes: &[u8]) -> Self {
        Content { id: id_of(bytes), bytes: Arc::from(bytes) }
    }
}

/// What a content is known by.
pub fn id_of(bytes: &[u8]) -> [u64; 2] {
    [1, 2].map(|key: u64| {
        let mut hasher = DefaultHasher::new();
        hasher.write_u64(key);
        hasher.write(bytes);
        hasher.finish()
    })
}

#[derive(Clone, Debug)]
struct Write {
    content: Content,
    by: u64,
    /// When it was known to have ended.
    ended: Option<u64>,
}

/// The blocks of a disk that were written to.
#[derive(Clone, Debug, Default)]
pub struct History {
    blocks: BTreeMap<u64, Vec<Write>>,
    /// Counts ends of writes, so that a flush knows which were before it.
    clock: u64,
    flushes: BTreeMap<u64, u64>,
}

impl History {
    /// Write `by` puts `bytes` at byte `offset`; `base` gives what a block held before it was ever written.
    pub fn write(&mut self, by: u64, offset: u64, bytes: &[u8], block_bytes: u64, base: &dyn Fn(u64) -> Vec<u8>) {
        let mut at = 0;
        while at < bytes.len() {
            let (block, into) = ((offset + at as u64) / block_bytes, ((offset + at as u64) % block_bytes) as usize);
            let len = (block_bytes as usize - into).min(bytes.len() - at);
            let writes = self
                .blocks
                .entry(block)
                .or_insert_with(|| vec![Write { content: Content::new(&base(block)), by: u64::MAX, ended: Some(0) }]);
            let mut content = writes.last().expect("never empty").content.bytes.to_vec();
            content[into..into + len].copy_from_slice(&bytes[at..at + len]);
            writes.push(Write { content: Content::new(&content), by, ended: None });
            at += len;
        }
    }

    /// Write `by` has ended.
    pub fn ended(&mut self, by: u64) {
        self.clock += 1;
        for writes in self.blocks.values_mut() {
            for write in writes.iter_mut().filter(|write| write.by == by) {
                write.ended.get_or_insert(self.clock);
            }
        }
    }

    /// Flush `by` begins: it covers what has ended.
    pub fn flush_begins(&mut self, by: u64) {
        self.flushes.insert(by, self.clock);
    }

    /// Flush `by` has ended.
    pub fn flush_ended(&mut self, by: u64) {
        let Some(covered) = self.flushes.remove(&by) else { return };
        for writes in self.blocks.values_mut() {
            let last = writes.iter().rposition(|write| write.ended.is_some_and(|ended| ended <= covered));
            writes.drain(..last.unwrap_or(0));
        }
    }

    /// All that a block may hold, oldest first; nothing for a block that was never written.
    pub fn possible(&self, block: u64) -> Option<impl DoubleEndedIterator<Item = &Content> + ExactSizeIterator> {
        self.blocks.get(&block).map(|writes| writes.iter().map(|write| &write.content))
    }

    /// The blocks that were written.
    pub fn blocks(&self) -> impl Iterator<Item = u64> + '_ {
        self.blocks.keys().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flush_makes_durable_what_had_ended_before_it() {
        let mut history = History::default();
        let base = |_: u64| vec![0; 8];
        let first = |history: &History| -> Vec<u8> {
            history.possible(0).expect("written").map(|content| content.bytes[0]).collect()
        };
        history.write(1, 0, &[1; 8], 8, &base);
        assert_eq!(first(&history), [0, 1]);
        history.ended(1);
        history.write(2, 0, &[2; 8], 8, &base);
        history.flush_begins(3);
        history.ended(2);
        assert_eq!(first(&history), [0, 1, 2]);
        history.flush_ended(3);
        assert_eq!(first(&history), [1, 2]);
        history.flush_begins(4);
        history.flush_ended(4);
        assert_eq!(first(&history), [2]);
        history.write(5, 4, &[7; 2], 8, &base);
        let last = history.possible(0).and_then(|mut all| all.next_back().cloned()).expect("written");
        assert_eq!(last.bytes[..], [2, 2, 2, 2, 7, 7, 2, 2]);
    }
}
