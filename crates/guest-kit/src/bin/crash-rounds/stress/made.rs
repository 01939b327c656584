//! What is made on the host for a while, and is gone when it is dropped: a file system that is mounted, a swap file, a group of processes whose memory is
//! accounted for.
//!
//! Failure story: what cannot be taken away is told on stderr, and stays.

use crate::stress::settings::{read, write};
use guest_kit::program;
use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags, mount, mount_remount, unmount};
use std::ffi::CString;
use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// How long until whoever uses it has ended.
const IN_USE: Duration = Duration::from_secs(20);
const LOOK: Duration = Duration::from_millis(100);
const SWAP_BYTES: u64 = 1 << 30;

fn directory() -> io::Result<TempDir> {
    tempfile::Builder::new().prefix("crash-round-memory-").tempdir()
}

/// Tries again until it succeeds, for as long as something may still be in use.
fn patiently(mut what: impl FnMut() -> io::Result<()>) -> io::Result<()> {
    let deadline = Instant::now() + IN_USE;
    loop {
        match what() {
            Err(_) if Instant::now() < deadline => std::thread::sleep(LOOK),
            outcome => return outcome,
        }
    }
}

/// A file system on a directory of its own.
#[derive(Debug)]
pub struct Mounted {
    /// Nothing once it is given away.
    directory: Option<TempDir>,
    is_kept: bool,
}

impl Mounted {
    /// Mounts one of this kind, with these options.
    ///
    /// # Errors
    /// When that is not permitted, or the kernel has no such file system.
    pub fn new(kind: &str, options: &str) -> io::Result<Self> {
        let directory = directory()?;
        let options = CString::new(options)?;
        mount(kind, directory.path(), kind, MountFlags::NOSUID | MountFlags::NODEV, options.as_c_str())?;
        Ok(Self { directory: Some(directory), is_kept: false })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        self.directory.as_ref().expect("only drop takes it").path()
    }

    /// Gives it other options.
    ///
    /// # Errors
    /// When the kernel refuses them.
    pub fn remount(&self, options: &str) -> io::Result<()> {
        Ok(mount_remount(self.path(), MountFlags::NOSUID | MountFlags::NODEV, options)?)
    }

    /// It stays, for somebody to look at what is in it.
    pub fn keep(&mut self) {
        self.is_kept = true;
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let Some(directory) = self.directory.take() else { return };
        let path = directory.path();
        if self.is_kept {
            eprintln!("{} stays mounted: the memory of a round that failed is kept in it", path.display());
        } else if patiently(|| Ok(unmount(path, UnmountFlags::empty())?)).is_ok()
            || unmount(path, UnmountFlags::DETACH).is_ok()
        {
            return;
        } else {
            eprintln!("{} cannot be unmounted", path.display());
        }
        // What is removed with the directory would be what is mounted on it.
        let _ = directory.keep();
    }
}

/// A file to swap to, in use.
#[derive(Debug)]
pub struct SwapFile {
    directory: Option<TempDir>,
}

impl SwapFile {
    /// Makes one where temporary files go.
    ///
    /// # Errors
    /// When that is not permitted, or not to be had on that file system.
    pub fn new() -> Result<Self, String> {
        let directory = directory().map_err(|error| format!("a directory cannot be made: {error}"))?;
        let path = directory.path().join("swap");
        let mut open = OpenOptions::new();
        let file = open.write(true).create_new(true).mode(0o600).open(&path);
        let made = file.and_then(|file| Ok(fallocate(&file, FallocateFlags::empty(), 0, SWAP_BYTES)?));
        made.map_err(|error| format!("{} cannot be made: {error}", path.display()))?;
        for name in ["mkswap", "swapon"] {
            let run = program::command(name).and_then(|mut command| program::run(command.arg(&path), &[0]));
            run.map_err(|error| error.to_string())?;
        }
        Ok(Self { directory: Some(directory) })
    }
}

impl Drop for SwapFile {
    fn drop(&mut self) {
        let Some(directory) = self.directory.take() else { return };
        let path = directory.path().join("swap");
        let run = program::command("swapoff").and_then(|mut command| program::run(command.arg(&path), &[0]));
        if let Err(error) = run {
            eprintln!("{} stays in use, as a swap file: {error}", path.display());
            let _ = directory.keep();
        }
    }
}

/// Whose memory is accounted for in a cgroup of its own.
#[derive(Debug)]
pub struct Group {
    directory: PathBuf,
    /// Of the second version of cgroups.
    is_unified: bool,
}

impl Group {
    /// Makes one beside this process's own, or below it.
    ///
    /// # Errors
    /// A sentence when there are no such groups, or none may be made.
    pub fn new(root: &Path) -> Result<Self, String> {
        let of_kernel = |name: &str| std::fs::read_to_string(root.join("proc/self").join(name)).unwrap_or_default();
        let (parent, is_unified) = parent_of_group(&of_kernel("cgroup"), &of_kernel("mounts"))
            .ok_or_else(|| "no cgroups that account for memory are mounted".to_owned())?;
        let parent = root.join(parent.strip_prefix("/").unwrap_or(&parent));
        let controllers = std::fs::read_to_string(parent.join("cgroup.subtree_control")).unwrap_or_default();
        if is_unified && !controllers.split_whitespace().any(|name| name == "memory") {
            return Err(format!("{} does not account for the memory of its groups", parent.display()));
        }
        let directory = parent.join(format!("amberlog-stress-{}", std::process::id()));
        std::fs::create_dir(&directory).map_err(|error| format!("{} cannot be made: {error}", directory.display()))?;
        let group = Self { directory, is_unified };
        if !is_unified {
            // Whoever needs memory while the bound is low waits until it is not, and is not killed for it.
            let _ = write(&group.directory.join("memory.oom_control"), "1");
        }
        Ok(group)
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.directory
    }

    fn usage_bytes(&self) -> io::Result<u64> {
        let name = if self.is_unified { "memory.current" } else { "memory.usage_in_bytes" };
        read(&self.directory.join(name))?.parse::<u64>().map_err(io::Error::other)
    }

    fn bound(&self) -> (PathBuf, &'static str) {
        let (name, none) = if self.is_unified { ("memory.high", "max") } else { ("memory.limit_in_bytes", "-1") };
        (self.directory.join(name), none)
    }

    /// Has the kernel take an eighth of the group's memory away, at most so much: at once, or by a bound that stands for a while.
    ///
    /// # Errors
    /// What the kernel says; that it found less to take is none.
    pub fn reclaim(&self, bytes_max: u64, stands: Duration) -> io::Result<()> {
        let usage = self.usage_bytes()?;
        let bytes = (usage / 8).min(bytes_max);
        let at_once = self.directory.join("memory.reclaim");
        let outcome = if self.is_unified && stands.is_zero() && at_once.exists() {
            write(&at_once, &bytes.to_string())
        } else {
            let (bound, none) = self.bound();
            let lowered = write(&bound, &(usage - bytes).to_string());
            // Where it is one that nobody may be above, it stands no longer than it has to.
            if self.is_unified {
                std::thread::sleep(stands);
            }
            let is_raised = write(&bound, none);
            lowered.and(is_raised)
        };
        match outcome.as_ref().err().and_then(Errno::from_io_error) {
            // It found less than it should take.
            Some(Errno::AGAIN | Errno::BUSY) => Ok(()),
            _ => outcome,
        }
    }

    /// Nobody is bound any more.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn let_go(&self) -> io::Result<()> {
        let (bound, none) = self.bound();
        write(&bound, none)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = self.let_go();
        // Guests whose memory it is may be about to end.
        if let Err(error) = patiently(|| std::fs::remove_dir(&self.directory)) {
            eprintln!("{} cannot be removed: {error}", self.directory.display());
        }
    }
}

/// Where a group can be made, and whether it is one of the second version, from `/proc/self/cgroup` and `/proc/self/mounts`. In the first version
/// that is below this process's own group, whose bounds go on to hold; in the second one beside it, since a group with processes has none below it.
fn parent_of_group(groups: &str, mounts: &str) -> Option<(PathBuf, bool)> {
    let mounted = |is_it: &dyn Fn(&str, &str) -> bool| {
        mounts.lines().find_map(|line| {
            let mut words = line.split(' ').skip(1);
            let (at, kind, options) = (words.next()?, words.next()?, words.next()?);
            is_it(kind, options).then(|| PathBuf::from(at))
        })
    };
    let own = |is_it: &dyn Fn(&str) -> bool| {
        groups.lines().find_map(|line| {
            let mut words = line.splitn(3, ':').skip(1);
            let (controllers, path) = (words.next()?, words.next()?);
            is_it(controllers).then(|| path.trim_start_matches('/').to_owned())
        })
    };
    let has_memory = |list: &str| list.split(',').any(|name| name == "memory");
    if let Some(path) = own(&has_memory) {
        let at = mounted(&|kind, options| kind == "cgroup" && has_memory(options))?;
        return Some((at.join(path), false));
    }
    let path = own(&str::is_empty)?;
    let at = mounted(&|kind, _| kind == "cgroup2")?;
    let beside = Path::new(&path).parent().map_or_else(|| at.clone(), |parent| at.join(parent));
    Some((beside, true))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_is_made_where_memory_is_accounted_for() {
        let first = "tmpfs /sys/fs/cgroup tmpfs rw 0 0\ncgroup /sys/fs/cgroup/cpu cgroup rw,cpu 0 0\n\
                     cgroup /sys/fs/cgroup/memory cgroup rw,relatime,memory 0 0\n\
                     cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n";
        let second = "proc /proc proc rw 0 0\ncgroup2 /sys/fs/cgroup cgroup2 rw,nsdelegate 0 0\n";
        let cases = [
            ("4:memory:/a/b\n1:cpu:/\n0::/\n", first, Some(("/sys/fs/cgroup/memory/a/b", false))),
            ("0::/user.slice/session-1.scope\n", second, Some(("/sys/fs/cgroup/user.slice", true))),
            ("0::/init.scope\n", second, Some(("/sys/fs/cgroup", true))),
            ("0::/\n", second, Some(("/sys/fs/cgroup", true))),
            ("4:memory:/\n", second, None),
            ("", "", None),
        ];
        for (groups, mounts, expected) in cases {
            let expected = expected.map(|(path, is_unified)| (PathBuf::from(path), is_unified));
            assert_eq!(parent_of_group(groups, mounts), expected, "{groups}");
        }
    }

    #[test]
    fn what_is_mounted_is_gone_afterwards_unless_it_is_kept() {
        let mount = || Mounted::new("tmpfs", "mode=0700").inspect(|mounted| mounted.remount("size=1m").unwrap());
        let mounted = match mount() {
            Ok(mounted) => mounted,
            Err(error) => return eprintln!("left out: nothing can be mounted here: {error}"),
        };
        let path = mounted.path().to_owned();
        std::fs::write(path.join("file"), "content").unwrap();
        drop(mounted);
        assert!(!path.exists());
        let mut kept = mount().unwrap();
        let path = kept.path().to_owned();
        std::fs::write(path.join("file"), "content").unwrap();
        kept.keep();
        drop(kept);
        let is_there = path.join("file").exists();
        let _ = unmount(&path, UnmountFlags::DETACH);
        std::fs::remove_dir(&path).unwrap();
        assert!(is_there);
    }

    /// Whoever is in it would wait for memory for ever.
    #[test]
    fn no_bound_stays_on_a_group() {
        for (is_unified, [usage, bound, none]) in [
            (true, ["memory.current", "memory.high", "max"]),
            (false, ["memory.usage_in_bytes", "memory.limit_in_bytes", "-1"]),
        ] {
            let directory = tempfile::tempdir().unwrap();
            let at = |name: &str| directory.path().join(name);
            std::fs::write(at(usage), "80000000\n").unwrap();
            std::fs::write(at(bound), "").unwrap();
            // These files would be in the way of its end: a group of the kernel's is removed with its own.
            let group = std::mem::ManuallyDrop::new(Group { directory: directory.path().to_owned(), is_unified });
            group.reclaim(1 << 20, Duration::from_millis(1)).unwrap();
            assert_eq!(read(&at(bound)).unwrap(), none);
            std::fs::write(at(bound), "").unwrap();
            std::fs::write(at("memory.reclaim"), "").unwrap();
            group.reclaim(1 << 20, Duration::ZERO).unwrap();
            let asked = if is_unified { ("1048576", "") } else { ("", none) };
            assert_eq!((read(&at("memory.reclaim")).unwrap().as_str(), read(&at(bound)).unwrap().as_str()), asked);
        }
    }
}
