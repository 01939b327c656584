//! A guest's log as it is written, turned into committed transactions.

use jbd2::{Commit, Descriptor, Format, Kind, Revoke, peek, sequence};
use std::collections::HashMap;
use std::sync::Arc;

/// A transaction that counts.
#[derive(Debug)]
pub struct Committed {
    pub sequence: u32,
    pub blocks: Vec<(u64, Arc<[u8]>)>,
    pub revokes: Vec<u64>,
}

/// The log of a file system while it is open.
#[derive(Debug)]
pub struct Stream {
    pub format: Format,
    blocks: HashMap<u32, Arc<[u8]>>,
    position: u32,
    sequence: u32,
}

impl Stream {
    pub fn new(format: Format, position: u32, sequence: u32) -> Self {
        Stream { format, blocks: HashMap::new(), position, sequence }
    }

    pub fn write(&mut self, position: u32, block: &[u8]) {
        self.blocks.insert(position, Arc::from(block));
    }

    /// The next transaction, if all of it is there.
    pub fn next(&mut self) -> Option<Committed> {
        let mut found = Committed { sequence: self.sequence, blocks: Vec::new(), revokes: Vec::new() };
        let mut at = self.position;
        for _ in 0..self.format.log_blocks() {
            let block = Arc::clone(self.blocks.get(&at)?);
            let header = peek(&block).filter(|header| header.sequence == self.sequence)?;
            at = self.format.next(at);
            match header.kind {
                Kind::Descriptor => {
                    for tag in Descriptor::new(&self.format, &block).tags() {
                        let mut content = self.blocks.get(&at)?.to_vec();
                        if !jbd2::data_checksum_ok(&self.format, self.sequence, tag.checksum, &content) {
                            return None;
                        }
                        if tag.escaped {
                            content[..4].copy_from_slice(&jbd2::MAGIC.to_be_bytes());
                        }
                        found.blocks.push((tag.block, Arc::from(content)));
                        at = self.format.next(at);
                    }
                }
                Kind::Revoke => found.revokes.extend(Revoke::new(&self.format, &block).records().ok()?),
                Kind::Commit => {
                    if !Commit::new(&self.format, &block).checksum_ok() {
                        return None;
                    }
                    (self.position, self.sequence) = (at, self.sequence.wrapping_add(1));
                    return Some(found);
                }
                _ => return None,
            }
        }
        None
    }

    /// The guest's log begins with this transaction.
    pub fn is_before(&self, tail: u32) -> bool {
        sequence::is_after(tail, self.sequence)
    }
}
