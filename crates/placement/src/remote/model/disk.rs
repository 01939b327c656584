//! A disk with a volatile cache: of each block, what it may hold after a loss of power.

use std::collections::BTreeMap;

#[derive(Clone, Debug)]
struct Write {
    content: Vec<u8>,
    by: u64,
    ended: Option<u64>,
}

/// The blocks that were written to since the beginning.
pub struct Disk {
    pub base: Vec<u8>,
    block_bytes: usize,
    blocks: BTreeMap<u64, Vec<Write>>,
    clock: u64,
    writes: u64,
}

impl Disk {
    pub fn new(base: Vec<u8>, block_bytes: usize) -> Self {
        Disk { base, block_bytes, blocks: BTreeMap::new(), clock: 0, writes: 0 }
    }

    /// A write begins: from now on each of its blocks may hold this. Gives its number.
    pub fn write(&mut self, offset: u64, bytes: &[u8]) -> u64 {
        self.writes += 1;
        let mut at = 0;
        while at < bytes.len() {
            let byte = offset as usize + at;
            let (block, into) = ((byte / self.block_bytes) as u64, byte % self.block_bytes);
            let len = (self.block_bytes - into).min(bytes.len() - at);
            let last = self.last(block);
            let mut content = last.clone();
            content[into..into + len].copy_from_slice(&bytes[at..at + len]);
            let writes =
                self.blocks.entry(block).or_insert_with(|| vec![Write { content: last, by: 0, ended: Some(0) }]);
            let meets = writes.iter().any(|write| write.ended.is_none() && write.content != content);
            assert!(!meets, "two different writes meet on block {block}");
            writes.push(Write { content, by: self.writes, ended: None });
            at += len;
        }
        self.writes
    }

    pub fn ended(&mut self, by: u64) {
        self.clock += 1;
        for write in self.blocks.values_mut().flatten().filter(|write| write.by == by) {
            write.ended.get_or_insert(self.clock);
        }
    }

    /// Everything that has ended is durable.
    pub fn flush(&mut self) {
        for writes in self.blocks.values_mut() {
            let last = writes.iter().rposition(|write| write.ended.is_some());
            writes.drain(..last.unwrap_or(0));
        }
    }

    /// What a reader gets when nothing is lost.
    pub fn last(&self, block: u64) -> Vec<u8> {
        match self.blocks.get(&block).and_then(|writes| writes.last()) {
            Some(write) => write.content.clone(),
            None => self.base[block as usize * self.block_bytes..][..self.block_bytes].to_vec(),
        }
    }

    /// The disk after a loss of power; `choose` is given how many contents a block may have, oldest first.
    pub fn after_power_loss(&self, mut choose: impl FnMut(usize) -> usize) -> Vec<u8> {
        let mut image = self.base.clone();
        for (block, writes) in &self.blocks {
            let content = &writes[choose(writes.len())].content;
            image[*block as usize * self.block_bytes..][..self.block_bytes].copy_from_slice(content);
        }
        image
    }
}
