//! A disk with a volatile cache: what each block may hold after a loss of power.

use std::collections::BTreeMap;
use std::sync::Arc;

#[derive(Clone, Debug)]
struct Write {
    content: Arc<[u8]>,
    by: u64,
    ended: Option<u64>,
    /// It failed: the block may hold it, and no flush will say.
    is_lost: bool,
}

/// The blocks of a disk that were written to, and what they held before.
#[derive(Clone)]
pub struct Disk {
    base: Arc<[u8]>,
    block_bytes: usize,
    blocks: BTreeMap<u64, Vec<Write>>,
    clock: u64,
}

impl Disk {
    pub fn new(base: Arc<[u8]>, block_bytes: usize) -> Self {
        Disk { base, block_bytes, blocks: BTreeMap::new(), clock: 0 }
    }

    /// Write `by` begins: from now on the block may hold this.
    pub fn write(&mut self, by: u64, offset: u64, bytes: &[u8]) {
        let mut at = 0;
        while at < bytes.len() {
            let byte = offset as usize + at;
            let (block, into) = ((byte / self.block_bytes) as u64, byte % self.block_bytes);
            let len = (self.block_bytes - into).min(bytes.len() - at);
            let mut content = self.last(block).to_vec();
            content[into..into + len].copy_from_slice(&bytes[at..at + len]);
            let first = Write { content: self.last(block), by: u64::MAX, ended: Some(0), is_lost: false };
            let writes = self.blocks.entry(block).or_insert_with(|| vec![first]);
            assert!(
                writes.iter().all(|write| write.ended.is_some() || write.is_lost),
                "two writes meet on block {block}"
            );
            writes.push(Write { content: Arc::from(content), by, ended: None, is_lost: false });
            at += len;
        }
    }

    pub fn ended(&mut self, by: u64) {
        self.clock += 1;
        for write in self.blocks.values_mut().flatten().filter(|write| write.by == by) {
            write.ended.get_or_insert(self.clock);
        }
    }

    /// A block holds this, durably, whatever was written there before.
    pub fn is_now(&mut self, block: u64, content: &[u8]) {
        let write = Write { content: Arc::from(content), by: u64::MAX, ended: Some(0), is_lost: false };
        self.blocks.insert(block, vec![write]);
    }

    /// Write `by` failed.
    pub fn lost(&mut self, by: u64) {
        self.blocks.values_mut().flatten().filter(|write| write.by == by).for_each(|write| write.is_lost = true);
    }

    /// A flush that begins now covers what has ended by this time.
    pub fn now(&self) -> u64 {
        self.clock
    }

    pub fn flushed(&mut self, covered: u64) {
        for writes in self.blocks.values_mut() {
            let last = writes.iter().rposition(|write| write.ended.is_some_and(|ended| ended <= covered));
            writes.drain(..last.unwrap_or(0));
        }
    }

    /// A flush failed: what it was to make durable may be there or not, and no later flush will say.
    pub fn flush_failed(&mut self) {
        for write in self.blocks.values_mut().flat_map(|writes| writes.iter_mut().skip(1)) {
            if write.ended.take().is_some() {
                write.is_lost = true;
            }
        }
    }

    /// What a reader gets when nothing is lost.
    pub fn last(&self, block: u64) -> Arc<[u8]> {
        match self.blocks.get(&block).and_then(|writes| writes.last()) {
            Some(write) => Arc::clone(&write.content),
            None => Arc::from(&self.base[block as usize * self.block_bytes..][..self.block_bytes]),
        }
    }

    /// All that a block may hold, oldest first.
    pub fn possible(&self, block: u64) -> Vec<Arc<[u8]>> {
        match self.blocks.get(&block) {
            Some(writes) => writes.iter().map(|write| Arc::clone(&write.content)).collect(),
            None => vec![self.last(block)],
        }
    }

    pub fn written(&self) -> impl Iterator<Item = u64> + '_ {
        self.blocks.keys().copied()
    }
}
