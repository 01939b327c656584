//! The mix: random creates, writes, truncates, unlinks, renames, links, directories and fsyncs,
//! with a ledger made durable now and then; the model behind it is [`crate::tree`].

use crate::options::Options;
use crate::report::{CHANNEL, Report};
use crate::tree::{Operation, Tree};
use crate::{Result, at};
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// The name of the ledger in the directory of the mix.
pub const LEDGER: &str = "ledger";

/// `guest-tools mix --directory D --seed N [--count N | --forever] [--stream NAME] [--report FILE]`.
/// The directory must not exist.
pub fn run(mut options: Options) -> Result<()> {
    let directory = options.required("directory")?;
    let seed = options.number("seed", 1, 0..=u64::MAX)?;
    let count = options.number("count", 1000, 1..=u64::MAX)?;
    let count = if options.flag("forever") { u64::MAX } else { count };
    let stream = options.text("stream").unwrap_or_else(|| "mix".to_owned());
    let channel = options.text("report").unwrap_or_else(|| CHANNEL.to_owned());
    options.finish()?;

    let mut report = Report::open(&channel, &stream)?;
    let root = Path::new(&directory);
    let mut tree = Tree::new(seed);
    std::fs::create_dir(root).map_err(at("create", root))?;
    for name in tree.directories() {
        let path = root.join(name);
        std::fs::create_dir(&path).map_err(at("create", &path))?;
    }
    let ledger_path = root.join(LEDGER);
    let mut ledger = File::create_new(&ledger_path).map_err(at("create", &ledger_path))?;

    for number in 0..count {
        let operation = tree.operation(number);
        if operation == Operation::SyncPoint {
            ledger.write_all(&tree.ledger_entry(number)).map_err(at("write", &ledger_path))?;
            ledger.sync_all().map_err(at("fsync", &ledger_path))?;
            report.acknowledge(number)?;
        } else {
            perform(root, &tree, number, &operation)
                .map_err(|error| format!("operation {number}, {operation:?}, failed: {error}"))?;
        }
        tree.apply(number, &operation);
    }
    Ok(())
}

fn perform(root: &Path, tree: &Tree, number: u64, operation: &Operation) -> std::io::Result<()> {
    let write = |path: &str| OpenOptions::new().write(true).open(root.join(path));
    match operation {
        Operation::Create(path) => File::create_new(root.join(path)).map(drop),
        Operation::Write { path, block } => {
            let bytes = tree.block(number);
            write(path)?.write_all_at(&bytes, block * bytes.len() as u64)
        }
        Operation::Truncate { path, length } => write(path)?.set_len(*length),
        Operation::Unlink(path) => std::fs::remove_file(root.join(path)),
        Operation::Rename { from, to } => std::fs::rename(root.join(from), root.join(to)),
        Operation::Link { from, to } => std::fs::hard_link(root.join(from), root.join(to)),
        Operation::MakeDirectory(path) => std::fs::create_dir(root.join(path)),
        Operation::RemoveDirectory(path) => std::fs::remove_dir(root.join(path)),
        Operation::Fsync(path) => write(path)?.sync_all(),
        Operation::SyncPoint => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::{RecoveredTree, TreeVerdict, check};

    #[test]
    fn the_model_is_what_a_real_file_system_does() {
        let directory = tempfile::tempdir().unwrap();
        let (root, channel) = (directory.path().join("mix"), directory.path().join("report"));
        File::create(&channel).unwrap();
        let words = format!("--directory {} --seed 42 --count 1500 --report {}", root.display(), channel.display());
        let words = words.split(' ').map(str::to_owned);
        run(Options::parse(words).unwrap()).unwrap();
        let mut recovered = RecoveredTree { ledger: std::fs::read(root.join(LEDGER)).unwrap(), ..Default::default() };
        for parent in std::fs::read_dir(&root).unwrap().map(|entry| entry.unwrap().path()) {
            if parent.is_dir() {
                let name = parent.file_name().unwrap().to_str().unwrap().to_owned();
                for child in std::fs::read_dir(&parent).unwrap().map(|entry| entry.unwrap().path()) {
                    let path = format!("{name}/{}", child.file_name().unwrap().to_str().unwrap());
                    if child.is_dir() {
                        recovered.directories.insert(path);
                    } else {
                        recovered.files.insert(path, std::fs::read(&child).unwrap());
                    }
                }
                recovered.directories.insert(name);
            }
        }
        assert_eq!(check(42, &recovered, Some(1499), 0), TreeVerdict::State(Some(1499)));
        let report = std::fs::read_to_string(channel).unwrap();
        assert!(report.lines().count() > 100, "a sync point about every eighth operation");
    }
}
