//! What the host's memory management does to guests, asked for far more often than it would by itself: each kind is tried at the beginning, and is had or
//! not; then it acts whenever it is told to.
//!
//! KSM is none of them: it takes private memory alone, and that of these guests is shared (docs/guarantees.md, "Limits").
//!
//! Must never: end a process, or leave anything behind on the host. Some kinds work on all of the host's memory, others on a guest's alone.
//!
//! Failure story: a kind that is not to be had says why, in a sentence; an act that the kernel refuses is an error of that act alone. A process that has ended
//! meanwhile is no error.

use crate::stress::made::{Group, Mounted, SwapFile};
use crate::stress::settings::{Settings, read, write};
use guest_kit::program;
use guest_tools::random::Random;
use rustix::io::Errno;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// All kinds, in the order in which they are tried.
pub const NAMES: [&str; 8] = ["huge-pages", "split", "compaction", "swap", "reclaim", "caches", "page-bits", "nodes"];

/// Taken away at once, at most.
const RECLAIM_BYTES_MAX: u64 = 48 << 20;
const BOUND_MS_MAX: u64 = 100;
/// What is no huge page has nothing to be split.
const HUGE_PAGE_BYTES: u64 = 2 << 20;
const PAGE_BYTES: u64 = 4096;

/// A guest whose memory is worked against.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// The process that has its memory.
    pub vmm: u32,
    /// What was started: `amberlog run`, or the VMM itself.
    pub started: u32,
    /// The directory in which the files of its memory are.
    pub area: PathBuf,
}

/// One kind.
#[derive(Debug)]
pub enum Pressure {
    /// Huge pages are made wherever they can be, of a file system in memory for the guests' files; it changes its mind about them.
    HugePages(Option<Mounted>),
    /// Huge pages become small ones.
    Split {
        /// The file of debugfs that has them split.
        path: PathBuf,
        /// Where debugfs was not mounted.
        _mounted: Option<Mounted>,
    },
    /// Pages are moved, to make room in one piece.
    Compaction(PathBuf),
    /// There is swap: what is reclaimed of guests' memory goes there. By itself it does nothing.
    Swap {
        /// What is swapped to.
        _file: SwapFile,
    },
    /// Memory is taken from a guest and its amberlog, which have it again when they use it.
    Reclaim(Group),
    /// The kernel's caches are dropped: images, inodes.
    Caches(PathBuf),
    /// The bits of page tables that say what was used (accessed) and written (soft-dirty) are cleared: all pages are write-protected by somebody else.
    PageBits(PathBuf),
    /// A guest's pages move from one memory of the host to another.
    Nodes(Vec<String>),
}

impl Pressure {
    /// Sets one up, on the host whose files are below `root`.
    ///
    /// # Errors
    /// Why it cannot be had.
    pub fn begin(name: &str, root: &Path, settings: &mut Settings) -> Result<Self, String> {
        let is_real = root == Path::new("/");
        let needs_host = || if is_real { Ok(()) } else { Err("this is not the host".to_owned()) };
        let there = |path: &str| {
            let path = root.join(path);
            // Opened as it will be: a file that is there may be one that may not be written.
            let opened = std::fs::OpenOptions::new().write(true).open(&path);
            opened.map(drop).map_err(|error| format!("{} cannot be written: {error}", path.display()))?;
            Ok::<PathBuf, String>(path)
        };
        Ok(match name {
            "huge-pages" => {
                of_huge_pages(&root.join("sys/kernel/mm/transparent_hugepage"), settings)?;
                let mounted = is_real.then(|| Mounted::new("tmpfs", "huge=always,mode=0700")).transpose();
                Self::HugePages(mounted.map_err(|error| format!("no tmpfs can be mounted: {error}"))?)
            }
            "split" => match there("sys/kernel/debug/split_huge_pages") {
                Ok(path) => Self::Split { path, _mounted: None },
                Err(_) => {
                    needs_host()?;
                    let mounted = Mounted::new("debugfs", "");
                    let mounted = mounted.map_err(|error| format!("debugfs cannot be mounted: {error}"))?;
                    let path = mounted.path().join("split_huge_pages");
                    if !path.exists() {
                        return Err("this kernel's debugfs has no split_huge_pages".to_owned());
                    }
                    Self::Split { path, _mounted: Some(mounted) }
                }
            },
            "compaction" => {
                let path = there("proc/sys/vm/compact_memory")?;
                // Before Linux 5.9 there is none by itself.
                let _ = settings.set(&root.join("proc/sys/vm/compaction_proactiveness"), "100");
                Self::Compaction(path)
            }
            "swap" => {
                needs_host()?;
                Self::Swap { _file: SwapFile::new()? }
            }
            "reclaim" => Self::Reclaim(Group::new(root)?),
            "caches" => Self::Caches(there("proc/sys/vm/drop_caches")?),
            "page-bits" => {
                there("proc/self/clear_refs")?;
                Self::PageBits(root.join("proc"))
            }
            "nodes" => {
                let list = read(&root.join("sys/devices/system/node/has_memory")).unwrap_or_default();
                let nodes = numbers(&list);
                if nodes.len() < 2 {
                    return Err("this host has one memory, for all of its processors".to_owned());
                }
                program::find_program("migratepages")
                    .map_err(|_| "the program migratepages is not installed (Debian's package numactl)".to_owned())?;
                let _ = settings.set(&root.join("proc/sys/kernel/numa_balancing"), "1");
                Self::Nodes(nodes)
            }
            _ => return Err(format!("there is no such kind; there are {}", NAMES.join(", "))),
        })
    }

    /// Which kind it is.
    pub fn name(&self) -> &'static str {
        match self {
            Self::HugePages(_) => "huge-pages",
            Self::Split { .. } => "split",
            Self::Compaction(_) => "compaction",
            Self::Swap { .. } => "swap",
            Self::Reclaim(_) => "reclaim",
            Self::Caches(_) => "caches",
            Self::PageBits(_) => "page-bits",
            Self::Nodes(_) => "nodes",
        }
    }

    /// Whether it does anything when it is told to.
    pub fn acts(&self) -> bool {
        !matches!(self, Self::Swap { .. })
    }

    /// Does it once.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn act(&self, target: &Target, random: &mut Random) -> io::Result<()> {
        let outcome = match self {
            Self::HugePages(None) | Self::Swap { .. } => Ok(()),
            Self::HugePages(Some(mounted)) => {
                let word = pick(random, &["always", "always", "within_size", "advise", "never"]);
                mounted.remount(&format!("huge={word}"))
            }
            Self::Split { path, .. } => split_some(path, &target.area, random),
            Self::Compaction(path) => write(path, "1"),
            Self::Reclaim(group) => {
                let bytes_max = random.below(RECLAIM_BYTES_MAX);
                let stands = if random.below(3) == 0 { random.below(BOUND_MS_MAX) } else { 0 };
                group.reclaim(bytes_max, Duration::from_millis(stands))
            }
            Self::Caches(path) => write(path, pick(random, &["1", "2", "3"])),
            Self::PageBits(processes) => {
                let amberlog = guest_kit::worker_of(target.started).unwrap_or(target.started);
                let process = pick(random, &[target.vmm, target.vmm, amberlog]);
                write(&processes.join(process.to_string()).join("clear_refs"), pick(random, &["1", "4", "4"]))
            }
            Self::Nodes(nodes) => {
                let from = random.below(nodes.len() as u64) as usize;
                let (from, to) = (nodes[from].as_str(), nodes[(from + 1) % nodes.len()].as_str());
                let process = target.vmm.to_string();
                let run = program::command("migratepages")
                    .and_then(|mut command| program::run(command.args([process.as_str(), from, to]), &[0]));
                run.map(drop).map_err(|error| io::Error::other(error.to_string()))
            }
        };
        match outcome {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) if Errno::from_io_error(&error) == Some(Errno::SRCH) => Ok(()),
            outcome => outcome,
        }
    }

    /// The next guest begins as this one did.
    pub fn calm(&self) {
        // What cannot be undone shows when it is done the next time.
        let _ = match self {
            Self::HugePages(Some(mounted)) => mounted.remount("huge=always"),
            Self::Reclaim(group) => group.let_go(),
            _ => Ok(()),
        };
    }

    /// Somebody wants to look at what is in the file system of guests' memory.
    pub fn keep(&mut self) {
        if let Self::HugePages(Some(mounted)) = self {
            mounted.keep();
        }
    }
}

/// Has the kernel look for small pages that could be a huge one all the time, in place of every ten seconds.
fn of_huge_pages(directory: &Path, settings: &mut Settings) -> Result<(), String> {
    let mut set = |name: &str, value: &str| {
        let path = directory.join(name);
        settings.set(&path, value).map_err(|error| format!("{} cannot be set: {error}", path.display()))
    };
    set("enabled", "always")?;
    // It would forbid what the mount asks for.
    if read(&directory.join("shmem_enabled")).is_ok_and(|word| word == "deny") {
        set("shmem_enabled", "never")?;
    }
    set("khugepaged/scan_sleep_millisecs", "10")?;
    set("khugepaged/alloc_sleep_millisecs", "10")?;
    set("khugepaged/pages_to_scan", "16384")
}

/// Has the kernel split the huge pages of some part of each large file below a directory.
fn split_some(path: &Path, area: &Path, random: &mut Random) -> io::Result<()> {
    for (file, bytes) in large_files(area) {
        let (one, other) = (random.below(bytes / PAGE_BYTES), random.below(bytes / PAGE_BYTES));
        write(path, &format!("{},0x{:x},0x{:x}", file.display(), one.min(other), one.max(other) + 1))?;
    }
    Ok(())
}

/// Files that have room for a huge page, in a directory of an area or below it.
fn large_files(directory: &Path) -> Vec<(PathBuf, u64)> {
    let mut found = Vec::new();
    let mut next = vec![directory.to_owned()];
    while let Some(directory) = next.pop() {
        // It may go at any moment.
        for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
            match entry.metadata() {
                Ok(metadata) if metadata.is_dir() => next.push(entry.path()),
                Ok(metadata) if metadata.is_file() && metadata.len() >= HUGE_PAGE_BYTES => {
                    found.push((entry.path(), metadata.len()));
                }
                _ => {}
            }
        }
    }
    found
}

/// "0-1,4" is 0, 1 and 4, as words.
fn numbers(list: &str) -> Vec<String> {
    let ends = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some((first.parse::<u32>().ok()?, last.parse::<u32>().ok()?))
    };
    let ranges = list.split(',').filter_map(ends);
    ranges.flat_map(|(first, last)| first..=last).map(|number| number.to_string()).collect()
}

fn pick<T: Copy>(random: &mut Random, choices: &[T]) -> T {
    choices[random.below(choices.len() as u64) as usize]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_the_kernels_are_read() {
        assert_eq!(numbers("0-1,4"), ["0", "1", "4"]);
        assert_eq!(numbers("0"), ["0"]);
        assert!(numbers("").is_empty());
    }

    #[test]
    fn the_files_of_a_guests_memory_are_split_and_nothing_else() {
        let directory = tempfile::tempdir().unwrap();
        let (area, split) = (directory.path().join("area"), directory.path().join("split_huge_pages"));
        std::fs::create_dir_all(area.join("vm")).unwrap();
        let ram = area.join("vm/ram");
        std::fs::File::create(&ram).unwrap().set_len(8 << 20).unwrap();
        std::fs::write(area.join("vm/books"), [0; 4096]).unwrap();
        std::fs::write(&split, "").unwrap();
        assert_eq!(large_files(&area), [(ram.clone(), 8 << 20)]);
        let target = Target { vmm: 1, started: 1, area };
        let pressure = Pressure::Split { path: split.clone(), _mounted: None };
        pressure.act(&target, &mut Random::new(5)).unwrap();
        let asked = std::fs::read_to_string(&split).unwrap();
        let rest = asked.strip_prefix(&format!("{},0x", ram.display())).unwrap_or_else(|| panic!("{asked}"));
        let (first, end) = rest.split_once(",0x").unwrap_or_else(|| panic!("{asked}"));
        let (first, end) = (u64::from_str_radix(first, 16).unwrap(), u64::from_str_radix(end, 16).unwrap());
        assert!(first < end && end <= 2048, "{asked}");
    }

    #[test]
    fn a_guest_that_has_ended_is_no_error() {
        let directory = tempfile::tempdir().unwrap();
        let target = Target { vmm: 1, started: u32::MAX, area: directory.path().join("gone") };
        let random = &mut Random::new(1);
        assert!(Pressure::PageBits(directory.path().to_owned()).act(&target, random).is_ok());
        let split = Pressure::Split { path: directory.path().join("split"), _mounted: None };
        assert!(split.act(&target, random).is_ok());
        assert!(Pressure::Compaction(directory.path().to_owned()).act(&target, random).is_err());
    }
}
