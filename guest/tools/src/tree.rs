//! A small model of a directory tree, the random operations that change it, and the check that a
//! recovered tree is the state after some operation no older than the last acknowledged one.
//!
//! [`check`] holds for `data=journal`, where all changes of a file system become durable in the
//! order in which they were made: what is recovered is a prefix of the operations, never a mix.
//! [`check_untouched`] holds in every mode, for a tree that is made durable as a whole before anything is acknowledged.

use crate::random::Random;
use crate::{Result, at};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

const DIRECTORIES: u64 = 4;
const NAMES: u64 = 12;
const SUBDIRECTORIES: u64 = 3;
const SYMBOLIC_LINKS: u64 = 3;
/// Some attributes fit into an inode, others take a block of their own, of 1 KB on some file systems.
const ATTRIBUTE_BYTES_MAX: u64 = 600;
/// The extended attribute that files get.
pub const ATTRIBUTE: &str = "user.model";
/// The name of the ledger in the directory of the tree.
pub const LEDGER: &str = "ledger";
/// How many sync points may have been reached of which nobody was told: one, and another for good measure.
const SYNC_POINTS_AHEAD: u64 = 2;
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
    /// The content of one block becomes zeroes, as far as the file reaches; its length stays.
    Punch {
        /// The file.
        path: String,
        /// Which block of 4096 bytes.
        block: u64,
    },
    /// A new symbolic link.
    Symlink {
        /// Its name.
        path: String,
        /// What it says.
        target: String,
    },
    /// The extended attribute [`ATTRIBUTE`] gets another value.
    SetAttribute {
        /// The file.
        path: String,
        /// Bytes of the value.
        length: u64,
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
    attribute: Option<Vec<u8>>,
}

/// The model.
#[derive(Clone, Debug)]
pub struct Tree {
    seed: u64,
    names: BTreeMap<String, u64>,
    contents: BTreeMap<u64, Content>,
    directories: BTreeSet<String>,
    links: BTreeMap<String, String>,
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
    /// What symbolic links say, by relative path.
    pub links: BTreeMap<String, String>,
    /// Values of [`ATTRIBUTE`] of the files that have it; `None` where they could not be read, as in a copy.
    pub attributes: Option<BTreeMap<String, Vec<u8>>>,
    /// The ledger.
    pub ledger: Vec<u8>,
}

impl RecoveredTree {
    /// Reads a tree in a mounted file system, or (without `with_attributes`) a copy of one.
    ///
    /// # Errors
    /// When something in it cannot be read.
    pub fn read(root: &Path, with_attributes: bool) -> Result<Self> {
        let mut tree = Self { attributes: with_attributes.then(BTreeMap::new), ..Self::default() };
        tree.collect(root, "")?;
        tree.ledger = tree.files.remove(LEDGER).unwrap_or_default();
        Ok(tree)
    }

    fn collect(&mut self, directory: &Path, prefix: &str) -> Result<()> {
        for entry in std::fs::read_dir(directory).map_err(at("read", directory))? {
            let entry = entry.map_err(at("read", directory))?;
            let path = entry.path();
            let name = format!("{prefix}{}", entry.file_name().to_string_lossy());
            let kind = entry.file_type().map_err(at("look at", &path))?;
            if kind.is_dir() {
                // Trees of ours are two deep: a deeper one is damage, and shows as a difference.
                if prefix.matches('/').count() < 4 {
                    self.collect(&path, &format!("{name}/"))?;
                }
                self.directories.insert(name);
            } else if kind.is_symlink() {
                let target = std::fs::read_link(&path).map_err(at("read", &path))?;
                self.links.insert(name, target.to_string_lossy().into_owned());
            } else {
                if let Some(attributes) = &mut self.attributes
                    && let Some(value) = attribute_of(&path)?
                {
                    attributes.insert(name.clone(), value);
                }
                self.files.insert(name, std::fs::read(&path).map_err(at("read", &path))?);
            }
        }
        Ok(())
    }
}

fn attribute_of(path: &Path) -> Result<Option<Vec<u8>>> {
    let mut value = vec![0; usize::try_from(ATTRIBUTE_BYTES_MAX).expect("small") + 1];
    match rustix::fs::getxattr(path, ATTRIBUTE, &mut value[..]) {
        Ok(length) => {
            value.truncate(length);
            Ok(Some(value))
        }
        Err(rustix::io::Errno::NODATA) => Ok(None),
        Err(error) => Err(format!("cannot read the attribute of {}: {error}", path.display())),
    }
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
            links: BTreeMap::new(),
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
        match random.below(25) {
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
            19 => Operation::Punch { path: existing, block: random.below(BLOCKS_MAX) },
            20 => {
                let path = format!("d{}/l{}", random.below(DIRECTORIES), random.below(SYMBOLIC_LINKS));
                if self.links.contains_key(&path) {
                    Operation::Unlink(path)
                } else {
                    // Short ones are kept in the inode, long ones in a block.
                    let length = usize::try_from(random.below(150)).unwrap_or(0);
                    Operation::Symlink { path, target: format!("{number}-{}", "x".repeat(length)) }
                }
            }
            21..=22 => Operation::SetAttribute { path: existing, length: random.below(ATTRIBUTE_BYTES_MAX) },
            _ => Operation::Fsync(existing),
        }
    }

    /// The value that operation `number` gives to an attribute.
    pub fn attribute(&self, number: u64, length: u64) -> Vec<u8> {
        let mut bytes = vec![0; usize::try_from(length).unwrap_or(0)];
        Random::of(self.seed ^ 0x6174_7472, number).fill(&mut bytes);
        bytes
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
        let sum = Random::of(self.seed, number).bits();
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
            Operation::Punch { path, block } => {
                let start = usize::try_from(*block).unwrap_or(0) * BLOCK;
                self.change(path, |content| {
                    let end = content.len().min(start + BLOCK);
                    content.get_mut(start..end).unwrap_or_default().fill(0);
                });
            }
            Operation::Symlink { path, target } => drop(self.links.insert(path.clone(), target.clone())),
            Operation::SetAttribute { path, length } => {
                let value = self.attribute(number, *length);
                if let Some(content) = self.names.get(path).and_then(|file| self.contents.get_mut(file)) {
                    content.attribute = Some(value);
                }
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
        self.links.remove(path);
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
        for name in self.links.keys().chain(recovered.links.keys()).collect::<BTreeSet<_>>() {
            if self.links.get(name) != recovered.links.get(name) {
                differences
                    .push(format!("symbolic link {name} is missing, should not be there or says something else"));
            }
        }
        if let Some(attributes) = &recovered.attributes {
            let wrong = |(name, file): &(&String, &u64)| attributes.get(*name) != self.attribute_of(**file);
            let wrong = self.names.iter().filter(wrong);
            differences.extend(wrong.map(|(name, _)| format!("{name} has another attribute")));
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

impl Tree {
    fn attribute_of(&self, file: u64) -> Option<&Vec<u8>> {
        self.contents.get(&file).and_then(|content| content.attribute.as_ref())
    }

    /// The names that an operation changes, be it the name or what it stands for.
    fn touches(&self, operation: &Operation) -> Vec<String> {
        let names = |path: &String| match self.names.get(path) {
            None => vec![path.clone()],
            Some(file) => self.names.iter().filter(|(_, other)| *other == file).map(|(name, _)| name.clone()).collect(),
        };
        match operation {
            Operation::Create(path)
            | Operation::Unlink(path)
            | Operation::Symlink { path, .. }
            | Operation::MakeDirectory(path)
            | Operation::RemoveDirectory(path) => vec![path.clone()],
            Operation::Write { path, .. }
            | Operation::Punch { path, .. }
            | Operation::SetAttribute { path, .. }
            | Operation::Truncate { path, .. } => names(path),
            Operation::Rename { from, to } | Operation::Link { from, to } => vec![from.clone(), to.clone()],
            Operation::Fsync(_) | Operation::SyncPoint => Vec::new(),
        }
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

/// Whether everything that no operation has touched since the acknowledged sync point, at which the whole tree was made durable,
/// is as it was then, in a tree whose worker never went further than to the next sync points.
pub fn check_untouched(seed: u64, recovered: &RecoveredTree, acknowledged: Option<u64>) -> TreeVerdict {
    let Some(acknowledged) = acknowledged else { return TreeVerdict::State(None) };
    let mut tree = Tree::new(seed);
    for number in 0..=acknowledged {
        let operation = tree.operation(number);
        tree.apply(number, &operation);
    }
    let then = tree.clone();
    let mut touched = BTreeSet::new();
    let mut sync_points = 0;
    for number in acknowledged + 1.. {
        let operation = tree.operation(number);
        sync_points += u64::from(operation == Operation::SyncPoint);
        if sync_points > SYNC_POINTS_AHEAD {
            break;
        }
        touched.extend(tree.touches(&operation));
        tree.apply(number, &operation);
    }
    // What was touched is left out on both sides.
    let is_asked_for = |name: &String| !touched.contains(name);
    let mut expected = then.clone();
    expected.names.retain(|name, _| is_asked_for(name));
    expected.directories.retain(is_asked_for);
    expected.links.retain(|name, _| is_asked_for(name));
    let mut found = recovered.clone();
    found.files.retain(|name, _| is_asked_for(name));
    found.directories.retain(is_asked_for);
    found.links.retain(|name, _| is_asked_for(name));
    if found.ledger.starts_with(&then.ledger) {
        found.ledger.truncate(then.ledger.len());
    }
    let sums = found.files.iter().map(|(name, bytes)| (name.as_str(), sum(bytes))).collect();
    let mut differences = expected.differences(&found, &sums);
    if differences.is_empty() {
        return TreeVerdict::State(Some(acknowledged));
    }
    differences.truncate(20);
    TreeVerdict::NoState(format!(
        "untouched since operation {acknowledged}, at which all was durable: {}",
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
        let attribute = |(name, file): (&String, &u64)| Some((name.clone(), tree.attribute_of(*file)?.clone()));
        let recovered = RecoveredTree {
            files: files.collect(),
            directories: tree.directories.clone(),
            links: tree.links.clone(),
            attributes: Some(tree.names.iter().filter_map(attribute).collect()),
            ledger: tree.ledger.clone(),
        };
        (tree, recovered)
    }

    #[test]
    fn what_nobody_touched_since_all_was_durable_is_held_against_the_tree_and_nothing_else() {
        let mut tree = Tree::new(7);
        let mut sync_points = Vec::new();
        for number in 0..3000 {
            let operation = tree.operation(number);
            if operation == Operation::SyncPoint {
                sync_points.push(number);
            }
            tree.apply(number, &operation);
        }
        let mut seen = 0;
        for (index, &acknowledged) in sync_points.iter().enumerate().step_by(9).skip(1).take(20) {
            // A worker that went on to just before the next one, and a disk that has half of that.
            let (_, recovered) = after(sync_points[index + 1]);
            assert_eq!(check_untouched(7, &recovered, Some(acknowledged)), TreeVerdict::State(Some(acknowledged)));
            // A state far older is none of these.
            let (_, old) = after(sync_points[index - 9]);
            assert!(matches!(check_untouched(7, &old, Some(acknowledged)), TreeVerdict::NoState(_)));
            let (_, mut emptied) = after(acknowledged + 1);
            emptied.files.clear();
            let is_seen = matches!(check_untouched(7, &emptied, Some(acknowledged)), TreeVerdict::NoState(_));
            seen += u32::from(is_seen);
        }
        assert!(seen > 15, "now and then every file was touched since, but not always: {seen}");
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
        assert_eq!(kinds.len(), 13, "{kinds:?}");
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
        let mut short = recovered.clone();
        short.ledger.truncate(LEDGER_ENTRY);
        let mut unlinked = recovered.clone();
        assert!(unlinked.links.pop_first().is_some());
        let mut plain = recovered;
        assert!(plain.attributes.as_mut().unwrap().pop_first().is_some());
        for tampered in [changed, missing, extra, short, unlinked, plain] {
            assert!(matches!(check(7, &tampered, Some(450), 100), TreeVerdict::NoState(_)));
        }
    }
}
