//! Blocks that change hands: each step removes a file, or frees the middle of one, and at once writes another, with direct or buffered I/O.
//!
//! Each sector says which step wrote it, and where in its file. So the host sees a block of one file in another, a block that was never
//! written, and work that is lost.

use crate::options::Options;
use crate::random::Random;
use crate::report::{CHANNEL, Report};
use crate::{Result, at};
use rustix::fs::FallocateFlags;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{File, OpenOptions};
use std::io::ErrorKind;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

const SECTOR: usize = 512;
const BLOCK: usize = 4096;
/// `O_DIRECT` of x86 and RISC-V alike.
const O_DIRECT: i32 = 0o40000;
/// Files that there are at a time.
const SLOTS: u64 = 9;
/// The longest file.
const BLOCKS_MAX: u64 = 20;
/// Every so many steps all is made durable, and told.
const SYNC_EVERY: u64 = 6;

/// Name and content.
type Files = BTreeMap<String, Vec<u8>>;

/// What one step does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Step {
    number: u64,
    /// The file whose place it takes is removed first.
    slot: u64,
    blocks: u64,
    is_direct: bool,
    /// Blocks that are freed once the file is written, and written again.
    punched: Option<(u64, u64)>,
}

impl Step {
    fn new(seed: u64, number: u64) -> Self {
        let mut random = Random::of(seed, number);
        let blocks = 1 + random.below(BLOCKS_MAX);
        let first = random.below(blocks);
        let punched = (random.below(3) == 0).then_some((first, 1 + random.below(blocks - first)));
        Step { number, slot: random.below(SLOTS), blocks, is_direct: random.below(2) == 0, punched }
    }

    fn name(&self) -> String {
        format!("f{}", self.number)
    }

    /// The bytes of some of its blocks, at a multiple of a block in memory, as direct I/O wants them: the buffer, and where they begin.
    fn bytes(&self, first_block: u64, blocks: u64) -> (Vec<u8>, usize) {
        let mut buffer = vec![0; (blocks as usize + 1) * BLOCK];
        let begin = buffer.as_ptr().align_offset(BLOCK);
        let sectors = first_block * (BLOCK / SECTOR) as u64..;
        for (sector, bytes) in sectors.zip(buffer[begin..begin + blocks as usize * BLOCK].chunks_mut(SECTOR)) {
            bytes.copy_from_slice(&stamp(self.number, sector));
        }
        (buffer, begin)
    }
}

/// A sector of the file of step `number`.
fn stamp(number: u64, sector: u64) -> [u8; SECTOR] {
    let mut stamp = [0; SECTOR];
    for (index, word) in stamp.chunks_mut(8).enumerate() {
        // Another word each time, so that a part of a sector from elsewhere shows.
        let value = [number + 1, sector, crate::random::mix(number << 32 | sector)][index % 3];
        word.copy_from_slice(&value.wrapping_add(index as u64).to_le_bytes());
    }
    stamp
}

/// `guest-tools reuse --directory D --seed N --count N [--report FILE]`: the directory must not exist. Tells `reuse N` when all that step N
/// and those before it have done is durable.
pub fn run(mut options: Options) -> Result<()> {
    let directory = options.required("directory")?;
    let seed = options.number("seed", 1, 0..=u64::MAX)?;
    let count = options.number("count", 120, 1..=1 << 20)?;
    let channel = options.text("report").unwrap_or_else(|| CHANNEL.to_owned());
    options.finish()?;
    let mut report = Report::open(&channel, "reuse")?;
    let root = Path::new(&directory);
    std::fs::create_dir(root).map_err(at("create", root))?;
    let opened = File::open(root).map_err(at("open", root))?;
    let mut slots: BTreeMap<u64, Step> = BTreeMap::new();
    for number in 0..count {
        let step = Step::new(seed, number);
        if let Some(before) = slots.insert(step.slot, step) {
            let path = root.join(before.name());
            std::fs::remove_file(&path).map_err(at("remove", &path))?;
        }
        write(&root.join(step.name()), &step)?;
        if (number + 1) % SYNC_EVERY == 0 {
            rustix::fs::syncfs(&opened).map_err(|error| at("sync", root)(error.into()))?;
            report.acknowledge(number)?;
        }
    }
    Ok(())
}

fn write(path: &Path, step: &Step) -> Result<()> {
    let open = |flags| OpenOptions::new().write(true).create(true).custom_flags(flags).open(path);
    // Not every file system of a test has direct I/O.
    let file = match open(if step.is_direct { O_DIRECT } else { 0 }) {
        Err(error) if step.is_direct && error.kind() == ErrorKind::InvalidInput => open(0),
        opened => opened,
    }
    .map_err(at("create", path))?;
    let put = |first: u64, blocks: u64| {
        let (buffer, begin) = step.bytes(first, blocks);
        let bytes = &buffer[begin..begin + blocks as usize * BLOCK];
        file.write_all_at(bytes, first * BLOCK as u64).map_err(at("write", path))
    };
    put(0, step.blocks)?;
    if let Some((first, blocks)) = step.punched {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        match rustix::fs::fallocate(&file, flags, first * BLOCK as u64, blocks * BLOCK as u64) {
            // ext3 knows no holes that are made afterwards.
            Ok(()) | Err(rustix::io::Errno::OPNOTSUPP) => put(first, blocks)?,
            Err(error) => return Err(at("punch a hole into", path)(error.into())),
        }
    }
    Ok(())
}

/// What is wrong with the files that were found (name and content), as sentences. `acknowledged` is the last step that is known to be durable, of
/// `steps`; later ones may be. With `may_be_stale` data goes its own way, as with data=writeback: a file that is not known to be durable may hold
/// what its blocks held before, and one that was removed later what came after it, as ext4 hands such blocks out before the removal is committed.
pub fn check(seed: u64, files: &Files, acknowledged: Option<u64>, steps: u64, may_be_stale: bool) -> Vec<String> {
    let removed_by = removals(seed, steps);
    let mut faults = Vec::new();
    let is_durable = |number: u64| acknowledged.is_some_and(|last| number <= last);
    for (name, content) in files {
        let Some(number) = name.strip_prefix('f').and_then(|number| number.parse::<u64>().ok()) else {
            faults.push(format!("{name} was never made"));
            continue;
        };
        if may_be_stale && (!is_durable(number) || removed_by.contains_key(&number)) {
            continue;
        }
        for (sector, bytes) in (0..).zip(content.chunks(SECTOR)) {
            let is_own = *bytes == stamp(number, sector)[..bytes.len()];
            if !is_own && (is_durable(number) || bytes.iter().any(|byte| *byte != 0)) {
                let first = u64::from_le_bytes(bytes[..8].try_into().unwrap_or_default());
                faults.push(format!("{name}, sector {sector}: begins with {first}, where {} is right", number + 1));
                break;
            }
        }
    }
    faults.extend(check_order(seed, files, acknowledged));
    faults
}

/// A step's files, and when each is removed.
fn removals(seed: u64, steps: u64) -> BTreeMap<u64, u64> {
    let (mut removed_by, mut in_slot) = (BTreeMap::new(), BTreeMap::new());
    for number in 0..steps {
        if let Some(before) = in_slot.insert(Step::new(seed, number).slot, number) {
            removed_by.insert(before, number);
        }
    }
    removed_by
}

/// Names come and go in the order of the steps: the files are those after some step, or in the midst of the next one, and no step is lost that
/// is durable.
fn check_order(seed: u64, files: &Files, acknowledged: Option<u64>) -> Vec<String> {
    let found: BTreeSet<u64> = files.keys().filter_map(|name| name.strip_prefix('f')?.parse().ok()).collect();
    let least = acknowledged.map_or(0, |last| last + 1);
    // Of what comes behind the newest file only removals can have happened, one of them.
    let most = found.last().map_or(0, |newest| newest + 1).max(least);
    let removed_by = removals(seed, most + 1);
    let after = |steps: u64| -> BTreeSet<u64> {
        (0..steps).filter(|number| removed_by.get(number).is_none_or(|by| *by >= steps)).collect()
    };
    let is_in_order = (least..=most).any(|steps| {
        let names = after(steps);
        let is_removed_next = |number: &u64| removed_by.get(number) == Some(&steps);
        found == names || found == names.iter().copied().filter(|number| !is_removed_next(number)).collect()
    });
    if !is_in_order {
        return vec![format!("files {found:?} are those after no step from {least} on")];
    }
    let Some(last) = acknowledged else { return Vec::new() };
    let mut faults = Vec::new();
    for step in found.range(..=last).map(|number| Step::new(seed, *number)) {
        let bytes = files[&step.name()].len();
        if bytes != step.blocks as usize * BLOCK {
            faults.push(format!("{} has {bytes} bytes, not {} blocks", step.name(), step.blocks));
        }
    }
    faults
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(root: &Path) -> Files {
        let entries = std::fs::read_dir(root).unwrap().map(|entry| entry.unwrap());
        entries.map(|entry| (entry.file_name().into_string().unwrap(), std::fs::read(entry.path()).unwrap())).collect()
    }

    fn run_in(directory: &Path, count: u64) -> Files {
        let channel = directory.join("report");
        File::create(&channel).unwrap();
        let root = directory.join("reuse");
        let words = format!("--directory {} --seed 5 --count {count} --report {}", root.display(), channel.display());
        run(Options::parse(words.split(' ').map(str::to_owned)).unwrap()).unwrap();
        let last = (count / SYNC_EVERY * SYNC_EVERY).checked_sub(1);
        let told = std::fs::read_to_string(channel).unwrap();
        assert_eq!(told.lines().last().map(str::to_owned), last.map(|last| format!("ack reuse {last}")));
        files(&root)
    }

    #[test]
    fn what_the_load_leaves_is_right_and_nothing_else_is() {
        let directory = tempfile::tempdir().unwrap();
        let files = run_in(directory.path(), 60);
        assert_eq!(files.len() as u64, SLOTS);
        let faults = |change: &dyn Fn(&mut Files), acknowledged, may_be_stale| {
            let mut files = files.clone();
            change(&mut files);
            check(5, &files, acknowledged, 60, may_be_stale).len()
        };
        let (newest, oldest) =
            ("f59".to_owned(), files.keys().min_by_key(|name| name[1..].parse::<u64>().unwrap()).unwrap().clone());
        assert!(files.contains_key(&newest));
        for acknowledged in [None, Some(53), Some(59)] {
            assert_eq!(faults(&|_| {}, acknowledged, false), 0, "{acknowledged:?}");
        }
        // Lost, or of another file, or not whole; and what was removed is back.
        assert_eq!(faults(&|files| drop(files.remove("f59")), Some(59), false), 1);
        assert_eq!(faults(&|files| drop(files.remove("f59")), Some(53), false), 0, "it was not durable");
        assert_eq!(faults(&|files| files.get_mut("f59").unwrap().truncate(100), Some(59), false), 1);
        let older = files[&oldest][..SECTOR].to_vec();
        let takes = |files: &mut Files| files.get_mut("f59").unwrap()[..SECTOR].copy_from_slice(&older);
        assert_eq!(faults(&takes, Some(59), true), 1);
        assert_eq!(faults(&takes, Some(53), false), 1, "a block of another file shows, durable or not");
        assert_eq!(faults(&takes, Some(53), true), 0, "data=writeback shows such");
        let zeros = |files: &mut Files| files.get_mut("f59").unwrap()[..SECTOR].fill(0);
        assert_eq!(faults(&zeros, Some(59), false), 1);
        assert_eq!(faults(&zeros, Some(53), false), 0, "it was not durable");
        let removed = (0..54).map(|number| format!("f{number}")).find(|name| !files.contains_key(name)).unwrap();
        let content = (0..BLOCK / SECTOR)
            .flat_map(|sector| stamp(removed[1..].parse().unwrap(), sector as u64))
            .collect::<Vec<_>>();
        assert!(faults(&|files| drop(files.insert(removed.clone(), content.clone())), Some(59), false) > 0);
        assert_eq!(faults(&|files| drop(files.insert("g".to_owned(), Vec::new())), None, false), 1);
    }
}
