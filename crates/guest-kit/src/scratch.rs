//! Directories of images, of runs of guests and of what stands for memory, which go when they are dropped; and what a process left behind that was
//! killed: the next one of a lab removes it. Each is locked as long as its process lives, under its name from the beginning, so that what is of a living
//! one is known; that of a guest's run also for as long as something lives that was started in it.
//!
//! It must never: remove what is of a living process, of another user, not made here, or kept for somebody to look at ([`Scratch::keep`]).
//!
//! Failure story: a directory that cannot be looked at or removed stays, with a line on stderr; a process that was killed before its directory had its
//! name leaves an empty one under another.

use crate::error::{FileContext, Result};
use rustix::fs::{FlockOperation, flock};
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Before they are locked.
const UNLOCKED: &str = ".amberlog-";
/// Random characters of their names: no two are the same.
const RANDOM: usize = 12;
/// In one that stays when its process has ended.
const KEPT: &str = "kept";
/// In one in which something was started: where that says what is wrong. It has this open, and with it the lock.
const ERRORS: &str = "stderr.log";

/// What a directory is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// Cells of a lab.
    Lab,
    /// The run of a guest.
    Run,
    /// Images that are recorded.
    Recording,
}

impl Use {
    const ALL: [Use; 3] = [Use::Lab, Use::Run, Use::Recording];

    /// What their names begin with. Those of earlier versions, which locked nothing, had one `-` less.
    fn prefix(self) -> &'static str {
        match self {
            Use::Lab => "amberlog-lab-run-",
            Use::Run => "guest-run-",
            Use::Recording => "record-traces-run-",
        }
    }
}

/// One of this process.
#[derive(Debug)]
pub struct Scratch {
    path: PathBuf,
    /// The directory, open: nobody who is started has it, and the kernel lets go of it with the process, however that ends.
    _lock: File,
    is_kept: bool,
}

impl Scratch {
    /// A new one.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn new_in(parent: &Path, of: Use) -> Result<Self> {
        let made = tempfile::Builder::new().prefix(UNLOCKED).rand_bytes(RANDOM).tempdir_in(parent);
        let made = made.at("write in", parent)?;
        let lock = File::open(made.path()).at("open", made.path())?;
        flock(&lock, FlockOperation::NonBlockingLockExclusive).map_err(Into::into).at("lock", made.path())?;
        let name = made.path().file_name().unwrap_or_default().to_string_lossy().replacen(UNLOCKED, of.prefix(), 1);
        let path = made.path().with_file_name(name);
        std::fs::rename(made.path(), &path).at("make", &path)?;
        // It is not there any more under the name that would be removed.
        let _ = made.keep();
        Ok(Scratch { path, _lock: lock, is_kept: false })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// For the stderr of what is started in it: it counts as living for as long as that does, or what that has started.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn errors(&self) -> Result<File> {
        let path = self.path.join(ERRORS);
        let file = File::create(&path).at("create", &path)?;
        flock(&file, FlockOperation::NonBlockingLockExclusive).map_err(Into::into).at("lock", &path)?;
        Ok(file)
    }

    /// It stays, for somebody to look at.
    pub fn keep(mut self) -> PathBuf {
        let mark = self.path.join(KEPT);
        if let Err(error) = File::create(&mark) {
            eprintln!("{} cannot be made, and the next lab removes its directory: {error}", mark.display());
        }
        self.is_kept = true;
        self.path.clone()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if self.is_kept {
            return;
        }
        if let Err(error) = std::fs::remove_dir_all(&self.path) {
            eprintln!("{} cannot be removed: {error}", self.path.display());
        }
    }
}

/// Where whatever stands for the host's memory is.
pub fn memory() -> &'static Path {
    Path::new("/dev/shm")
}

/// Removes from these directories, and from where temporary files go, what processes left that are gone.
pub fn remove_leftovers(parents: &[&Path]) {
    let temporary = std::env::temp_dir();
    // What is mounted on a directory hides what is below it, and keeps it from being removed.
    for path in test_storage::remove_dead_mounts() {
        eprintln!("unmounted {}, which a process left behind that was killed", path.display());
    }
    remove_leftovers_in(parents.iter().copied().chain([temporary.as_path()]));
}

fn remove_leftovers_in<'p>(parents: impl Iterator<Item = &'p Path>) {
    for directory in parents.flat_map(leftovers) {
        match std::fs::remove_dir_all(&directory.path) {
            Ok(()) => eprintln!("removed {}, which a run left behind that was killed", directory.path.display()),
            Err(error) => {
                eprintln!("{}, which a run left behind, cannot be removed: {error}", directory.path.display())
            }
        }
    }
}

/// One of a process that is gone.
struct Leftover {
    path: PathBuf,
    /// Nobody else removes it meanwhile.
    _lock: File,
}

fn leftovers(parent: &Path) -> Vec<Leftover> {
    let entries = std::fs::read_dir(parent).into_iter().flatten().flatten();
    let is_named = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        Use::ALL.iter().any(|of| name.starts_with(of.prefix()))
    };
    entries.map(|entry| entry.path()).filter(is_named).filter_map(left_behind).collect()
}

fn left_behind(path: PathBuf) -> Option<Leftover> {
    let found = std::fs::symlink_metadata(&path).ok()?;
    if !found.is_dir() || found.uid() != rustix::process::geteuid().as_raw() {
        return None;
    }
    let lock = File::open(&path).ok()?;
    flock(&lock, FlockOperation::NonBlockingLockExclusive).ok()?;
    if path.join(KEPT).symlink_metadata().is_ok() {
        return None;
    }
    // What was started in it may need a while to end.
    match File::open(path.join(ERRORS)) {
        Ok(errors) => flock(&errors, FlockOperation::NonBlockingLockExclusive).ok()?,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
        Err(_) => return None,
    }
    Some(Leftover { path, _lock: lock })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    /// A process that is gone has removed nothing, and has nothing locked. Gives the lock that it had.
    fn kill(scratch: Scratch) -> (PathBuf, File) {
        let (path, lock) = (scratch.path.clone(), scratch._lock.try_clone().unwrap());
        std::mem::forget(scratch);
        (path, lock)
    }

    /// A lab that was killed left gigabytes of images, and its guests' memory; and directories of their runs, and of recordings.
    #[test]
    fn what_a_killed_process_left_is_removed_and_nothing_else() {
        let parent = tempfile::tempdir().unwrap();
        let all = [Use::Lab, Use::Run, Use::Recording];
        let living = all.map(|of| Scratch::new_in(parent.path(), of).unwrap());
        let killed = all.map(|of| Scratch::new_in(parent.path(), of).unwrap());
        let killed = killed.map(|killed| {
            std::fs::write(killed.path().join("disk.img"), [1; 100]).unwrap();
            kill(killed)
        });
        let others = ["amberlog-lab-Ab12Cd", "guest-Ab12Cd", "record-traces-Ab12Cd", "amberlog-tests"];
        let others = others.map(|name| parent.path().join(name));
        others.iter().for_each(|other| std::fs::create_dir(other).unwrap());
        let link = parent.path().join("amberlog-lab-run-link");
        let elsewhere = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink(elsewhere.path(), &link).unwrap();
        let sweep = || remove_leftovers_in([parent.path()].into_iter());
        sweep();
        assert!(killed.iter().all(|(path, _)| path.exists()), "its process lives");
        killed.iter().for_each(|(_, lock)| flock(lock, FlockOperation::Unlock).unwrap());
        sweep();
        assert!(!killed.iter().any(|(path, _)| path.exists()));
        assert!(living.iter().all(|living| living.path().exists()) && others.iter().all(|other| other.exists()));
        assert!(link.is_symlink() && elsewhere.path().exists());
        let paths = living.each_ref().map(|living| living.path().to_owned());
        drop(living);
        assert!(!paths.iter().any(|path| path.exists()));
    }

    #[test]
    fn what_is_kept_to_be_looked_at_stays() {
        let parent = tempfile::tempdir().unwrap();
        let kept = Scratch::new_in(parent.path(), Use::Run).unwrap().keep();
        remove_leftovers_in([parent.path()].into_iter());
        assert!(kept.exists());
    }

    /// A guest ends a moment after whoever started it, and has brought its blocks home by then.
    #[test]
    fn a_run_is_of_what_was_started_in_it_too() {
        let parent = tempfile::tempdir().unwrap();
        let scratch = Scratch::new_in(parent.path(), Use::Run).unwrap();
        let errors = scratch.errors().unwrap();
        let mut child = Command::new("cat").stdin(Stdio::piped()).stderr(errors).spawn().unwrap();
        let (path, lock) = kill(scratch);
        flock(&lock, FlockOperation::Unlock).unwrap();
        let sweep = || remove_leftovers_in([parent.path()].into_iter());
        sweep();
        assert!(path.exists(), "something lives that was started in it");
        drop(child.stdin.take());
        child.wait().unwrap();
        // A child that another test begins has the lock until it is a program of its own.
        let is_removed = (0..500).any(|_| {
            sweep();
            std::thread::sleep(std::time::Duration::from_millis(10));
            !path.exists()
        });
        assert!(is_removed, "nothing lives any more");
    }
}
