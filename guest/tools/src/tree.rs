//! A small model of a directory tree, the random operations that change it, and the check that a
//! recovered tree is the state after some operation no older than the last acknowledged one.
//!
//! The check holds for `data=journal`, where all changes of a file system become durable in the
//! order in which they were made: what is recovered is a prefix of the operations, never a mix.

use crate::random::Random;
use std::collections::{BTreeMap, BTreeSet};

const DIRECTORIES: u64 = 4;
const NAMES: u64 = 12;
const SUBDIRECTORIES: u64 = 3;
const BLOCK: usize = 4096;
const BLOCKS_MAX: u64 = 8;
/// Bytes of an entry of the ledger: the operation's number, and its sum.
pub const LEDGER_ENTRY: usize = 16;

/// One operation on the tree; paths are relative.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Operation {
    /// A new, empty file.
    Create(String),
    /// One block is written, in place or behind the end.
    Write {
        /// The file.
        path: String,
        /// Which block of 4096 bytes.
        block: u64,
    },
    /// The file gets another length.
    Truncate {
        /// The file.
        path: String,
        /// Its new length in bytes.
        length: u64,
    },
    /// A name is removed.
    Unlink(String),
    /// A name is changed, possibly over another one.
    Rename {
        /// The old name.
        from: String,
        /// The new name.
        to: String,
    },
    /// A second name for a file.
    Link {
        /// The existing name.
        from: String,
        /// The new name.
        to: String,
    },
    /// A new directory.
    MakeDirectory(String),
    /// An empty directory is removed.
    RemoveDirectory(String),
    /// A file is made durable (which may or may not commit what came before).
    Fsync(String),
    /// An entry is appended to the ledger, which is made durable: everything up to here is.
    SyncPoint,
}

#[derive(Clone, Debug, Default)]
struct Content {
    bytes: Vec<u8>,
    sum: u64,
}

/// The model.
#[derive(Clone, Debug)]
pub struct Tree {
    seed: u64,
    names: BTreeMap<String, u64>,
    contents: BTreeMap<u64, Content>,
    directories: BTreeSet<String>,
    ledger: Vec<u8>,
    next_file: u64,
}

/// What was found in an image.
#[derive(Clone, Debug, Default)]
pub struct RecoveredTree {
    /// Files by relative path, the ledger excepted.
    pub files: BTreeMap<String, Vec<u8>>,
    /// Directories by relative path.
    pub directories: BTreeSet<String>,
    /// The ledger.
    pub ledger: Vec<u8>,
}

/// The outcome of [`check`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TreeVerdict {
    /// The tree is the state after this operation (`None`: before the first).
    State(Option<u64>),
    /// It is no such state; the text tells the differences to the nearest one.
    NoState(String),
}

impl Tree {
    /// The tree before the first operation: four empty directories and an empty ledger.
    pub fn new(seed: u64) -> Self {
        Self {
            seed,
            names: BTreeMap::new(),
            contents: BTreeMap::new(),
            directories: (0..DIRECTORIES).map(|number| format!("d{number}")).collect(),
            ledger: Vec::new(),
            next_file: 0,
        }
    }

    /// The directories that exist now.
    pub fn directories(&self) -> impl Iterator<Item = &str> {
        self.directories.iter().map(String::as_str)
    }

    /// Operation `number`, which is possible in the present state.
    pub fn operation(&self, number: u64) -> Operation {
        let mut random = Random::of(self.seed, number);
        if random.below(8) == 0 {
            return Operation::SyncPoint;
        }
        let fresh = format!("d{}/f{}", random.below(DIRECTORIES), random.below(NAMES));
        let Some(existing) = self.pick(&mut random) else { return Operation::Create(fresh) };
        let fresh_is_free = !self.names.contains_key(&fresh);
        match random.below(20) {
            0..=3 if fresh_is_free => Operation::Create(fresh),
            0..=8 => Operation::Write { path: existing, block: random.below(BLOCKS_MAX) },
            9..=10 => {
                let length = random.below(BLOCKS_MAX * BLOCK as u64 + 1);
                Operation::Truncate { path: existing, length }
            }
            11..=12 => Operation::Unlink(existing),
            13..=15 if fresh != existing && !self.same_file(&fresh, &existing) => {
                Operation::Rename { from: existing, to: fresh }
            }
            16 if fresh_is_free => Operation::Link { from: existing, to: fresh },
            17..=18 => {
                let path = format!("d{}/s{}", random.below(DIRECTORIES), random.below(SUBDIRECTORIES));
                if self.directories.contains(&path) {
                    Operation::RemoveDirectory(path)
                } else {
                    Operation::MakeDirectory(path)
                }
            }
            _ => Operation::Fsync(existing),
        }
    }

    /// Renaming one name of a file over another name of it does nothing at all (POSIX).
    fn same_file(&self, a: &str, b: &str) -> bool {
        self.names.get(a).is_some_and(|file| self.names.get(b) == Some(file))
    }

    fn pick(&self, random: &mut Random) -> Option<String> {
        let index = usize::try_from(random.below(self.names.len() as u64)).ok()?;
        self.names.keys().nth(index).cloned()
    }

    /// The bytes that operation `number` writes into a block.
    pub fn block(&self, number: u64) -> Vec<u8> {
        let mut bytes = vec![0; BLOCK];
        Random::of(self.seed ^ 0x626c_6f63_6b73, number).fill(&mut bytes);
        bytes
    }

    /// The ledger's entry for operation `number`.
    pub fn ledger_entry(&self, number: u64) -> [u8; LEDGER_ENTRY] {
        let mut entry = [0; LEDGER_ENTRY];
        entry[..8].copy_from_slice(&number.to_le_bytes());
        let sum = Random::of(self.seed, number).next();
        entry[8..].copy_from_slice(&sum.to_le_bytes());
        entry
    }

    /// Changes the model as `operation`, which must be the one of `number`, changes the tree.
    pub fn apply(&mut self, number: u64, operation: &Operation) {
        match operation {
            Operation::Create(path) => {
                self.names.insert(path.clone(), self.next_file);
                self.contents.insert(self.next_file, Content::default());
                self.next_file += 1;
            }
            Operation::Write { path, block } => {
                let bytes = self.block(number);
                let start = usize::try_from(*block).unwrap_or(0) * BLOCK;
                self.change(path, |content| {
                    content.resize(content.len().max(start + BLOCK), 0);
                    content[start..start + BLOCK].copy_from_slice(&bytes);
                });
            }
            Operation::Truncate { path, length } => {
                let length = usize::try_from(*length).unwrap_or(0);
                self.change(path, |content| content.resize(length, 0));
            }
            Operation::Unlink(path) => self.remove(path),
            Operation::Rename { from, to } => {
                self.remove(to);
                if let Some(file) = self.names.remove(from) {
                    self.names.insert(to.clone(), file);
                }
            }
            Operation::Link { from, to } => {
                if let Some(&file) = self.names.get(from) {
                    self.names.insert(to.clone(), file);
                }
            }
            Operation::MakeDirectory(path) => drop(self.directories.insert(path.clone())),
            Operation::RemoveDirectory(path) => drop(self.directories.remove(path)),
            Operation::Fsync(_) => {}
            Operation::SyncPoint => {
                let entry = self.ledger_entry(number);
                self.ledger.extend_from_slice(&entry);
            }
        }
    }

    fn change(&mut self, path: &str, change: impl FnOnce(&mut Vec<u8>)) {
        if let Some(content) = self.names.get(path).and_then(|file| self.contents.get_mut(file)) {
            change(&mut content.bytes);
            content.sum = sum(&content.bytes);
        }
    }

    fn remove(&mut self, path: &str) {
        if let Some(file) = self.names.remove(path)
            && !self.names.values().any(|&other| other == file)
        {
            self.contents.remove(&file);
        }
    }

    /// How a recovered tree (given with the sums of its files) differs from this state.
    fn differences(&self, recovered: &RecoveredTree, sums: &BTreeMap<&str, u64>) -> Vec<String> {
        let mut differences = Vec::new();
        for (name, file) in &self.names {
            let expected = self.contents.get(file).map_or(0, |content| content.sum);
            match sums.get(name.as_str()) {
                None => differences.push(format!("{name} is missing")),
                Some(&found) if found != expected => differences.push(format!("{name} has other content")),
                Some(_) => {}
            }
        }
        for name in sums.keys().filter(|name| !self.names.contains_key(**name)) {
            differences.push(format!("{name} should not be there"));
        }
        for name in self.directories.symmetric_difference(&recovered.directories) {
            differences.push(format!("directory {name} is missing or should not be there"));
        }
        if self.ledger != recovered.ledger {
            differences.push(format!(
                "the ledger has {} bytes and should have {}",
                recovered.ledger.len(),
                self.ledger.len()
            ));
        }
        differences
    }
}

fn sum(bytes: &[u8]) -> u64 {
    (u64::from(crc32c::crc32c(bytes)) << 32) | bytes.len() as u64
}

/// Looks for the state that a recovered tree is in, from the last acknowledged operation on and
/// at most `ahead` operations further: so far could the guest have come without our knowing.
pub fn check(seed: u64, recovered: &RecoveredTree, acknowledged: Option<u64>, ahead: u64) -> TreeVerdict {
    let sums = recovered.files.iter().map(|(name, bytes)| (name.as_str(), sum(bytes))).collect();
    let mut tree = Tree::new(seed);
    let mut nearest: Option<(u64, Vec<String>)> = None;
    let first = acknowledged.map_or(0, |number| number + 1);
    for next in 0..=first.saturating_add(ahead) {
        // `tree` is the state before operation `next`.
        if next >= first {
            let differences = tree.differences(recovered, &sums);
            if differences.is_empty() {
                return TreeVerdict::State(next.checked_sub(1));
            }
            if nearest.as_ref().is_none_or(|(_, best)| differences.len() < best.len()) {
                nearest = Some((next, differences));
            }
        }
        let operation = tree.operation(next);
        tree.apply(next, &operation);
    }
    let (next, mut differences) = nearest.unwrap_or_default();
    differences.truncate(20);
    TreeVerdict::NoState(format!(
        "the tree is the state after no operation from {first} on; nearest is the one before {next}: {}",
        differences.join("; ")
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(operations: u64) -> (Tree, RecoveredTree) {
        let mut tree = Tree::new(7);
        for number in 0..operations {
            let operation = tree.operation(number);
            tree.apply(number, &operation);
        }
        let files = tree.names.iter().map(|(name, file)| (name.clone(), tree.contents[file].bytes.clone()));
        let recovered = RecoveredTree {
            files: files.collect(),
            directories: tree.directories.clone(),
            ledger: tree.ledger.clone(),
        };
        (tree, recovered)
    }

    #[test]
    fn every_state_is_recognised_and_only_when_new_enough() {
        for operations in [1, 10, 500, 2000] {
            let (_, recovered) = after(operations);
            let verdict = check(7, &recovered, Some(operations - 1), 0);
            // The last operations may have changed nothing (fsync): the first match is reported.
            assert_eq!(verdict, TreeVerdict::State(Some(operations - 1)));
            assert!(matches!(check(7, &recovered, None, 2000), TreeVerdict::State(_)));
            let newer = check(7, &recovered, Some(operations + 50), 200);
            assert!(matches!(newer, TreeVerdict::NoState(_)), "{newer:?}");
        }
    }

    #[test]
    fn all_operations_occur() {
        let mut tree = Tree::new(1);
        let mut kinds = BTreeSet::new();
        for number in 0..5000 {
            let operation = tree.operation(number);
            let text = format!("{operation:?}");
            kinds.insert(text.split(['(', ' ']).next().unwrap_or_default().to_owned());
            tree.apply(number, &operation);
        }
        assert_eq!(kinds.len(), 10, "{kinds:?}");
    }

    #[test]
    fn any_difference_is_seen() {
        let (tree, recovered) = after(500);
        let name = tree.names.keys().next().unwrap().clone();
        let mut changed = recovered.clone();
        changed.files.get_mut(&name).unwrap().push(1);
        let mut missing = recovered.clone();
        missing.files.remove(&name);
        let mut extra = recovered.clone();
        extra.directories.insert("d0/s9".to_owned());
        let mut short = recovered;
        short.ledger.truncate(LEDGER_ENTRY);
        for tampered in [changed, missing, extra, short] {
            assert!(matches!(check(7, &tampered, Some(450), 100), TreeVerdict::NoState(_)));
        }
    }
}
