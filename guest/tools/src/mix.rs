//! The mix: random creates, writes, holes, truncates, unlinks, renames, links of both kinds, attributes, directories and
//! fsyncs, with a ledger made durable now and then; the model behind it is [`crate::tree`]. And the look at what is left of one.

use crate::options::Options;
use crate::report::{CHANNEL, Report};
use crate::tree::{ATTRIBUTE, LEDGER, Operation, RecoveredTree, Tree, TreeVerdict, check, check_untouched};
use crate::{Result, at};
use rustix::fs::{FallocateFlags, XattrFlags};
use rustix::io::Errno;
use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

/// How many operations a worker may be ahead of the last acknowledgement that was read.
pub const AHEAD: u64 = 20_000;
/// How often an operation is tried on a file system that is full.
const TRIES: u32 = 600;
/// The attribute of the ledger that is set after a sync.
const CONFIRMED: &str = "user.confirmed";
/// The sync point in whose midst `--abort` comes: some work is durable already.
const ABORTED_SYNC_POINT: u64 = 20;

/// `guest-tools mix --directory D --seed N [--count N | --forever] [--stream NAME] [--report FILE] [--sync-all]
/// [--acknowledged FILE] [--patient] [--abort FILE]`. The directory must not exist. `--sync-all` makes the whole file system durable before
/// anything is acknowledged, as modes other than `data=journal` need it; `--acknowledged` keeps the last number in a file, for
/// `guest-tools verify`; `--patient` waits where there is no room; `--abort` writes to a file (ext4's `trigger_fs_error`) in the
/// midst of a sync point, after the ledger's fsync.
pub fn run(mut options: Options) -> Result<()> {
    let directory = options.required("directory")?;
    let seed = options.number("seed", 1, 0..=u64::MAX)?;
    let count = options.number("count", 1000, 1..=u64::MAX)?;
    let count = if options.flag("forever") { u64::MAX } else { count };
    let stream = options.text("stream").unwrap_or_else(|| "mix".to_owned());
    let channel = options.text("report").unwrap_or_else(|| CHANNEL.to_owned());
    let (sync_all, is_patient) = (options.flag("sync-all"), options.flag("patient"));
    let (note, abort) = (options.text("acknowledged"), options.text("abort"));
    options.finish()?;

    let mut sync_points = 0;
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
        let mut tries = if is_patient { TRIES } else { 1 };
        if operation == Operation::SyncPoint {
            patiently(&mut tries, || ledger.write_all(&tree.ledger_entry(number)))
                .map_err(at("write", &ledger_path))?;
            patiently(&mut tries, || ledger.sync_all()).map_err(at("fsync", &ledger_path))?;
            sync_points += 1;
            if let Some(abort) = abort.as_ref().filter(|_| sync_points == ABORTED_SYNC_POINT) {
                std::fs::write(abort, "1").map_err(at("write", abort))?;
            }
            if sync_all {
                patiently(&mut tries, || Ok(rustix::fs::syncfs(&ledger)?)).map_err(at("sync", root))?;
            }
            patiently(&mut tries, || confirm(&ledger, number)).map_err(at("confirm the sync of", &ledger_path))?;
            // Here first: who is told on the channel may look at the file.
            if let Some(note) = &note {
                std::fs::write(note, number.to_string()).map_err(at("write", note))?;
            }
            report.acknowledge(number)?;
        } else {
            patiently(&mut tries, || perform(root, &tree, number, &operation))
                .map_err(|error| format!("operation {number}, {operation:?}, failed: {error}"))?;
        }
        tree.apply(number, &operation);
    }
    Ok(())
}

/// An error unless all that was made durable before really was: ext4's sync of a file system succeeds, and writes nothing, once
/// its journal is given up, and so does, in some kernels and for a moment, the fsync of a file whose last transaction is over.
/// A journal that is given up stays so until it is mounted again, and no handle can be had of it; setting an attribute takes one.
/// (What changes an inode and nothing else takes one as well, but says nothing if it gets none.)
fn confirm(ledger: &File, number: u64) -> std::io::Result<()> {
    Ok(rustix::fs::fsetxattr(ledger, CONFIRMED, &number.to_le_bytes(), XattrFlags::empty())?)
}

/// Tries again while there is no room.
fn patiently(tries: &mut u32, mut what: impl FnMut() -> std::io::Result<()>) -> std::io::Result<()> {
    loop {
        match what() {
            Err(error) if *tries > 1 && error.kind() == ErrorKind::StorageFull => {
                *tries -= 1;
                std::thread::sleep(Duration::from_millis(50));
            }
            other => return other,
        }
    }
}

/// `guest-tools verify --directory D --seed N [--acknowledged N] [--untouched]`: whether what is left of a mix is what has to
/// be, after a file system was mounted again. `--untouched` for one that ran with `--sync-all`.
pub fn verify(mut options: Options) -> Result<()> {
    let directory = options.required("directory")?;
    let seed = options.number("seed", 1, 0..=u64::MAX)?;
    let is_untouched = options.flag("untouched");
    let acknowledged = match options.text("acknowledged").filter(|text| !text.is_empty()) {
        None => None,
        Some(text) => Some(text.parse().map_err(|_| format!("--acknowledged is '{text}'; it must be a number"))?),
    };
    options.finish()?;
    let root = Path::new(&directory);
    if acknowledged.is_none() && !root.exists() {
        return Ok(());
    }
    let recovered = RecoveredTree::read(root, true)?;
    let verdict = match acknowledged {
        // The directories of a tree are made before its first operation.
        None => return Ok(()),
        Some(_) if is_untouched => check_untouched(seed, &recovered, acknowledged),
        Some(_) => check(seed, &recovered, acknowledged, AHEAD),
    };
    match verdict {
        TreeVerdict::State(_) => Ok(()),
        TreeVerdict::NoState(text) => Err(text),
    }
}

fn perform(root: &Path, tree: &Tree, number: u64, operation: &Operation) -> std::io::Result<()> {
    let write = |path: &str| OpenOptions::new().write(true).open(root.join(path));
    match operation {
        Operation::Create(path) => File::create_new(root.join(path)).map(drop),
        Operation::Write { path, block } => {
            let bytes = tree.block(number);
            write(path)?.write_all_at(&bytes, block * bytes.len() as u64)
        }
        Operation::Punch { path, block } => {
            let file = write(path)?;
            let (size, length) = (file.metadata()?.len(), tree.block(0).len() as u64);
            let start = block * length;
            match rustix::fs::fallocate(&file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, start, length) {
                // Not every kind of file can have holes punched: zeroes are the same to who reads.
                Err(Errno::OPNOTSUPP) => {
                    let zeroes = vec![0; usize::try_from(size.saturating_sub(start).min(length)).unwrap_or(0)];
                    file.write_all_at(&zeroes, start)
                }
                other => Ok(other?),
            }
        }
        Operation::Symlink { path, target } => std::os::unix::fs::symlink(target, root.join(path)),
        Operation::SetAttribute { path, length } => {
            let value = tree.attribute(number, *length);
            Ok(rustix::fs::setxattr(root.join(path), ATTRIBUTE, &value, XattrFlags::empty())?)
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

    #[test]
    fn the_model_is_what_a_real_file_system_does() {
        let directory = tempfile::tempdir().unwrap();
        let (root, channel) = (directory.path().join("mix"), directory.path().join("report"));
        File::create(&channel).unwrap();
        let words = format!("--directory {} --seed 42 --count 1500 --report {}", root.display(), channel.display());
        let words = words.split(' ').map(str::to_owned);
        run(Options::parse(words).unwrap()).unwrap();
        let recovered = RecoveredTree::read(&root, true).unwrap();
        assert_eq!(check(42, &recovered, Some(1499), 0), TreeVerdict::State(Some(1499)));
        let report = std::fs::read_to_string(channel).unwrap();
        assert!(report.lines().count() > 100, "a sync point about every eighth operation");

        let verified = |words: &str| {
            let words = format!("--directory {} --seed 42 {words}", root.display());
            verify(Options::parse(words.split_whitespace().map(str::to_owned)).unwrap())
        };
        verified("--acknowledged 1499").unwrap();
        let last = report.lines().last().unwrap().split_whitespace().find_map(|word| word.parse::<u64>().ok()).unwrap();
        verified(&format!("--acknowledged {last} --untouched")).unwrap();
        std::fs::remove_dir_all(root.join("d1")).unwrap();
        assert!(verified("--acknowledged 1499").unwrap_err().contains("is missing"));
    }
}
