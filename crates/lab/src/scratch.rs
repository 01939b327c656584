//! Directories of images and of what stands for memory, which go when they are dropped; and what a run left behind that was killed: the next one removes
//! it. Each is locked as long as its process lives, under its name from the beginning, so that what is of a living one is known.
//!
//! It must never: remove what is of a living process, of another user, or not of a lab.
//!
//! Failure story: a directory that cannot be looked at or removed stays, with a line on stderr; a process that was killed before its directory had its
//! name leaves an empty one under another.

use crate::error::{FileContext, Result};
use rustix::fs::{FlockOperation, flock};
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// What their names begin with; those of earlier versions, which locked nothing, began with `amberlog-lab-` and had no other `-`.
const PREFIX: &str = "amberlog-lab-run-";
/// Before they are locked.
const UNLOCKED: &str = ".amberlog-lab-";
/// Random characters of their names: no two are the same.
const RANDOM: usize = 12;

/// One of this process.
#[derive(Debug)]
pub(crate) struct Scratch {
    path: PathBuf,
    /// The directory, open: nobody who is started has it, and the kernel lets go of it with the process, however that ends.
    _lock: File,
}

impl Scratch {
    /// A new one.
    ///
    /// # Errors
    /// When it cannot be made.
    pub(crate) fn new_in(parent: &Path) -> Result<Self> {
        let made = tempfile::Builder::new().prefix(UNLOCKED).rand_bytes(RANDOM).tempdir_in(parent);
        let made = made.at("write in", parent)?;
        let lock = File::open(made.path()).at("open", made.path())?;
        flock(&lock, FlockOperation::NonBlockingLockExclusive).map_err(Into::into).at("lock", made.path())?;
        let name = made.path().file_name().unwrap_or_default().to_string_lossy().replacen(UNLOCKED, PREFIX, 1);
        let path = made.path().with_file_name(name);
        std::fs::rename(made.path(), &path).at("make", &path)?;
        // It is not there any more under the name that would be removed.
        let _ = made.keep();
        Ok(Scratch { path, _lock: lock })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir_all(&self.path) {
            eprintln!("{} cannot be removed: {error}", self.path.display());
        }
    }
}

/// Where whatever stands for the host's memory is.
pub(crate) fn memory() -> &'static Path {
    Path::new("/dev/shm")
}

/// Removes from these directories what processes left that are gone.
pub(crate) fn remove_leftovers(parents: &[&Path]) {
    for directory in parents.iter().flat_map(|parent| leftovers(parent)) {
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
    let is_named = |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(PREFIX));
    entries.map(|entry| entry.path()).filter(is_named).filter_map(left_behind).collect()
}

fn left_behind(path: PathBuf) -> Option<Leftover> {
    let found = std::fs::symlink_metadata(&path).ok()?;
    if !found.is_dir() || found.uid() != rustix::process::geteuid().as_raw() {
        return None;
    }
    let lock = File::open(&path).ok()?;
    flock(&lock, FlockOperation::NonBlockingLockExclusive).ok()?;
    Some(Leftover { path, _lock: lock })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A lab that was killed left gigabytes of images, and its guests' memory.
    #[test]
    fn what_a_killed_process_left_is_removed_and_nothing_else() {
        let parent = tempfile::tempdir().unwrap();
        let living = Scratch::new_in(parent.path()).unwrap();
        let killed = Scratch::new_in(parent.path()).unwrap();
        std::fs::write(killed.path().join("disk.img"), [1; 100]).unwrap();
        let (path, lock) = (killed.path().to_owned(), killed._lock.try_clone().unwrap());
        // A process that is gone has removed nothing, and has nothing locked.
        std::mem::forget(killed);
        let killed = path;
        let others = ["amberlog-lab-Ab12Cd", "amberlog-tests"].map(|name| parent.path().join(name));
        others.iter().for_each(|other| std::fs::create_dir(other).unwrap());
        let link = parent.path().join("amberlog-lab-run-link");
        let elsewhere = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink(elsewhere.path(), &link).unwrap();
        remove_leftovers(&[parent.path()]);
        assert!(killed.exists(), "its process lives");
        flock(&lock, FlockOperation::Unlock).unwrap();
        remove_leftovers(&[parent.path()]);
        assert!(!killed.exists());
        assert!(living.path().exists() && others.iter().all(|other| other.exists()));
        assert!(link.is_symlink() && elsewhere.path().exists());
        let path = living.path().to_owned();
        drop(living);
        assert!(!path.exists());
    }
}
