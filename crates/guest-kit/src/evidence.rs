//! Reads the work of the guest's tools out of a recovered image and checks it against what was
//! acknowledged; the formats and the rules are those of the crate `guest-tools`.
//!
//! Failure story: an image that cannot be read at all is an error; lost or damaged work is a
//! verdict.

use crate::error::{Error, FileContext, Result};
use crate::image::FileSystem;
use crate::judge::{read_directory, read_file};
use crate::report::Acknowledged;
use guest_tools::{database, mix, reuse, tree};
use std::collections::BTreeMap;
use std::path::Path;

pub use guest_tools::record::{Order, RecordLayout, RecordVerdict};
pub use guest_tools::table::Table;
pub use guest_tools::tree::TreeVerdict;

/// Checks the files that `guest-tools records` has left in `directory` of a file system.
pub fn records(
    file_system: &FileSystem,
    directory: &str,
    layout: &RecordLayout,
    acknowledged: Acknowledged,
) -> Result<RecordVerdict> {
    Ok(layout.check(&files_of(file_system, directory, layout)?, acknowledged.last))
}

/// The same after a power cut, where data is not journaled; `newest` is the last record that may have been begun.
pub fn torn_records(
    file_system: &FileSystem,
    directory: &str,
    layout: &RecordLayout,
    acknowledged: Acknowledged,
    newest: u64,
) -> Result<RecordVerdict> {
    Ok(layout.check_torn(&files_of(file_system, directory, layout)?, acknowledged.last, newest))
}

fn files_of(file_system: &FileSystem, directory: &str, layout: &RecordLayout) -> Result<Vec<Option<Vec<u8>>>> {
    (0..layout.files).map(|file| read_file(file_system, &format!("{directory}/{}", layout.file_name(file)))).collect()
}

/// Checks the tree that `guest-tools mix` has left in `directory` of a file system that was mounted
/// with data=journal. With nothing acknowledged nothing is promised, and nothing looked at.
pub fn mix(file_system: &FileSystem, directory: &str, seed: u64, acknowledged: Acknowledged) -> Result<TreeVerdict> {
    if acknowledged.last.is_none() {
        return Ok(TreeVerdict::State(None));
    }
    let extracted = read_directory(file_system, directory)?;
    let root = extracted.path().join(Path::new(directory).file_name().unwrap_or_default());
    let recovered = tree::RecoveredTree::read(&root, false).map_err(Error::Assets)?;
    Ok(tree::check(seed, &recovered, acknowledged.last, mix::AHEAD))
}

/// Checks the files that `guest-tools reuse` has left in `directory` in `steps` steps at most, and gives what is wrong with them as sentences.
/// `may_be_stale` with data=writeback.
pub fn reuse(
    file_system: &FileSystem,
    directory: &str,
    seed: u64,
    acknowledged: Acknowledged,
    steps: u64,
    may_be_stale: bool,
) -> Result<Vec<String>> {
    let name = Path::new(directory).file_name().unwrap_or_default();
    let extracted = match read_directory(file_system, directory) {
        Ok(extracted) => extracted,
        // It need not have come that far.
        Err(_) if acknowledged.last.is_none() => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let mut files = BTreeMap::new();
    let root = extracted.path().join(name);
    for entry in std::fs::read_dir(&root).at("read", &root)? {
        let path = entry.at("read", &root)?.path();
        let content = std::fs::read(&path).at("read", &path)?;
        files.insert(path.file_name().unwrap_or_default().to_string_lossy().into_owned(), content);
    }
    Ok(reuse::check(seed, &files, acknowledged.last, steps, may_be_stale))
}

/// Checks the database that `guest-tools database` has left in `directory`; gives the transaction
/// that it is the state after.
pub fn database(file_system: &FileSystem, directory: &str, table: Table, acknowledged: Acknowledged) -> Result<u64> {
    let mut files = Vec::new();
    for name in database::FILES {
        let content = read_file(file_system, &format!("{directory}/{name}"))?;
        if content.is_none() && acknowledged.last.is_some() {
            let problem = format!("{directory}/{name} is not there");
            return Err(Error::Image { image: file_system.image.clone(), problem });
        }
        files.push(content.unwrap_or_default());
    }
    table
        .check(&files[0], &files[1], acknowledged.last)
        .map_err(|problem| Error::Image { image: file_system.image.clone(), problem })
}
