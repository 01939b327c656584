//! A VM's directory in tmpfs: what outlives the process, and how the next one finds and locks it.
//!
//! The lock is an flock that the VMM inherits, or is given by the preloaded library: it is free only when both processes are
//! gone, so nobody finishes a recovery while the guest could still write. A VMM without the library is noted by its number
//! and the moment it was started at, and looked for. A registry by image tells the next user of an image that a recovery is
//! unfinished, wherever the directory lies.

use crate::scan::FoundLogPlace;
use serde::{Deserialize, Serialize};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

const DESCRIPTION: &str = "area.json";
const LOCK: &str = "lock";
const VMMS: &str = "vmms";
/// More processes than these are not noted for one VM.
const VMMS_MAX: usize = 64;

/// One file of guest memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RamDescription {
    /// Where it is.
    pub path: PathBuf,
    /// Number of its first page.
    pub first_page: u32,
}

/// One log whose tables are in the directory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogDescription {
    /// Name of its files, without the ending.
    pub name: String,
    /// The image with the file system.
    pub home_image: PathBuf,
    /// The image with the log; the same for an internal one.
    pub journal_image: PathBuf,
    /// What the first was, whatever it is called by now.
    #[serde(default)]
    pub home_key: Option<String>,
    /// What the second was.
    #[serde(default)]
    pub journal_key: Option<String>,
    /// Where log and file system are on them.
    pub place: FoundLogPlace,
}

impl LogDescription {
    /// A log and its images as they are now. Paths are made absolute: the next process may run elsewhere.
    pub fn new(name: String, home_image: PathBuf, journal_image: PathBuf, place: FoundLogPlace) -> Self {
        let key = |path: &Path| image_key(path).ok();
        let (home_key, journal_key) = (key(&home_image), key(&journal_image));
        let absolute = |path: PathBuf| std::path::absolute(&path).unwrap_or(path);
        let (home_image, journal_image) = (absolute(home_image), absolute(journal_image));
        LogDescription { name, home_image, journal_image, home_key, journal_key, place }
    }
}

/// What is written down beside the tables.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Description {
    /// Version of this file.
    pub schema: u32,
    /// Guest memory.
    pub ram: Vec<RamDescription>,
    /// Logs.
    pub logs: Vec<LogDescription>,
}

/// A VM's directory in tmpfs, locked.
#[derive(Debug)]
pub struct AreaDirectory {
    path: PathBuf,
    registry: PathBuf,
    lock: File,
}

/// Why a directory cannot be taken.
#[derive(Debug, thiserror::Error)]
pub enum DirectoryError {
    /// Its owner, or the owner's VM, is still alive.
    #[error("{path} is in use by another amberlog or by a VM it started; end that first")]
    InUse {
        /// The directory.
        path: PathBuf,
    },
    /// Something failed.
    #[error("{what} {path}: {source}")]
    System {
        /// What was being done.
        what: &'static str,
        /// To what.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
}

fn system<'a>(what: &'static str, path: &'a Path) -> impl FnOnce(io::Error) -> DirectoryError + 'a {
    move |source| DirectoryError::System { what, path: path.to_owned(), source }
}

/// Where areas are looked up by image, whatever directory they lie in: one place a user.
pub fn registry() -> PathBuf {
    PathBuf::from(format!("/dev/shm/amberlog-{}", rustix::process::getuid().as_raw()))
}

/// Names an image or block device by what it is rather than by a path.
pub(crate) fn image_key(path: &Path) -> io::Result<String> {
    let metadata = std::fs::metadata(path)?;
    Ok(if metadata.file_type().is_block_device() {
        format!("block-{:x}", metadata.rdev())
    } else {
        format!("file-{:x}-{:x}", metadata.dev(), metadata.ino())
    })
}

fn make_private(path: &Path) -> Result<(), DirectoryError> {
    match std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path) {
        Ok(()) => Ok(()),
        Err(error) => Err(system("making the directory", path)(error)),
    }
}

/// When a process was started, in ticks since the host was (proc(5), field 22 of stat); nothing if it is gone. With its
/// number this names a process for good.
pub fn process_started_at(pid: i32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name before may hold anything, a parenthesis too.
    let mut fields = stat.rsplit_once(") ")?.1.split(' ');
    if matches!(fields.next(), Some("Z" | "X")) {
        return None;
    }
    fields.nth(18)?.parse().ok()
}

fn lives_one_of(noted: &Path) -> bool {
    let noted = std::fs::read_to_string(noted).unwrap_or_default();
    noted.lines().filter_map(|line| line.split_once(' ')).any(|(pid, started)| {
        let (pid, started) = (pid.parse().ok(), started.parse::<u64>().ok());
        started.is_some() && pid.and_then(process_started_at) == started
    })
}

impl AreaDirectory {
    /// Makes and locks a directory for a VM under `base`.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn create(base: &Path, registry: &Path) -> Result<Self, DirectoryError> {
        make_private(base)?;
        make_private(&registry.join("by-image"))?;
        for number in 0..10_000 {
            let path = base.join(format!("vm-{}-{number}", std::process::id()));
            match std::fs::DirBuilder::new().mode(0o700).create(&path) {
                Ok(()) => return Self::lock(path, registry.to_owned()),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(system("making the directory", &path)(error)),
            }
        }
        Err(system("making a directory under", base)(io::Error::from(io::ErrorKind::AlreadyExists)))
    }

    /// Locks a directory that an earlier process left.
    ///
    /// # Errors
    /// [`DirectoryError::InUse`] while that process, or the VM it started, lives.
    pub fn take_over(path: &Path, registry: &Path) -> Result<Self, DirectoryError> {
        Self::lock(path.to_owned(), registry.to_owned())
    }

    fn lock(path: PathBuf, registry: PathBuf) -> Result<Self, DirectoryError> {
        let lock_path = path.join(LOCK);
        let lock = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .mode(0o600)
            .open(&lock_path)
            .map_err(system("opening", &lock_path))?;
        match rustix::fs::flock(&lock, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
            Ok(()) if lives_one_of(&path.join(VMMS)) => Err(DirectoryError::InUse { path }),
            Ok(()) => Ok(AreaDirectory { path, registry, lock }),
            Err(rustix::io::Errno::WOULDBLOCK) => Err(DirectoryError::InUse { path }),
            Err(error) => Err(system("locking", &lock_path)(error.into())),
        }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Notes a VMM that was started by others and may not have the lock: while it lives, the directory cannot be taken over.
    ///
    /// # Errors
    /// When it cannot be noted, or is one of too many.
    pub fn note_vmm(&self, pid: i32) -> io::Result<()> {
        let path = self.path.join(VMMS);
        let noted = std::fs::read_to_string(&path).unwrap_or_default();
        if noted.lines().count() >= VMMS_MAX {
            return Err(io::Error::other(format!("more than {VMMS_MAX} processes have asked for disks of this VM")));
        }
        let Some(started) = process_started_at(pid) else { return Ok(()) };
        std::fs::write(path, format!("{noted}{pid} {started}\n"))
    }

    /// The lock, for the VMM to inherit.
    pub fn lock_file(&self) -> &File {
        &self.lock
    }

    /// Writes the description anew, in one step.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn describe(&self, ram: &[(PathBuf, u32)], logs: Vec<LogDescription>) -> io::Result<()> {
        let ram = ram
            .iter()
            .map(|(path, first_page)| RamDescription { path: path.clone(), first_page: *first_page })
            .collect();
        let text = serde_json::to_vec_pretty(&Description { schema: 1, ram, logs }).map_err(io::Error::other)?;
        let temporary = self.path.join("area.json.new");
        std::fs::write(&temporary, text)?;
        std::fs::rename(&temporary, self.path.join(DESCRIPTION))
    }

    /// Reads the description. Nothing if there is none: the process died before it had anything to keep.
    ///
    /// # Errors
    /// When it cannot be read or is damaged.
    pub fn description(&self) -> Result<Option<Description>, DirectoryError> {
        let path = self.path.join(DESCRIPTION);
        let text = match std::fs::read(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(system("reading", &path)(error)),
        };
        let description: Description =
            serde_json::from_slice(&text).map_err(|e| system("understanding", &path)(io::Error::other(e)))?;
        if description.schema != 1 {
            return Err(system("understanding", &path)(io::Error::other("it is of a newer amberlog")));
        }
        Ok(Some(description))
    }

    /// Says in the registry that this directory may hold what `image` is owed.
    ///
    /// # Errors
    /// When the registry cannot be written.
    pub fn register(&self, image: &Path) -> Result<(), DirectoryError> {
        let key = image_key(image).map_err(system("examining", image))?;
        let link = self.registry.join("by-image").join(key);
        let _ = std::fs::remove_file(&link);
        std::os::unix::fs::symlink(&self.path, &link).map_err(system("making the link", &link))
    }

    /// The directory of an earlier process that may hold what `image` is owed.
    ///
    /// # Errors
    /// When the image cannot be examined.
    pub fn find(registry: &Path, image: &Path) -> Result<Option<PathBuf>, DirectoryError> {
        let key = image_key(image).map_err(system("examining", image))?;
        let link = registry.join("by-image").join(key);
        match std::fs::read_link(&link) {
            Ok(target) if target.is_dir() => Ok(Some(target)),
            Ok(_) => {
                let _ = std::fs::remove_file(&link);
                Ok(None)
            }
            Err(_) => Ok(None),
        }
    }

    /// Removes the directory and its place in the registry: nothing in it is needed any more.
    pub fn remove(&self) {
        let by_image = self.registry.join("by-image");
        if let Ok(entries) = std::fs::read_dir(&by_image) {
            for entry in entries.flatten() {
                if std::fs::read_link(entry.path()).is_ok_and(|target| target == self.path) {
                    let _ = std::fs::remove_file(entry.path());
                }
            }
        }
        if let Err(error) = std::fs::remove_dir_all(&self.path) {
            log::warn!("removing {} failed: {error}", self.path.display());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_is_found_locked_and_removed() {
        let base = tempfile::tempdir().expect("a temporary directory");
        let registry = base.path().join("registry");
        let image = base.path().join("image");
        std::fs::write(&image, b"x").expect("an image");
        assert_eq!(AreaDirectory::find(&registry, &image).expect("examined"), None);
        let directory = AreaDirectory::create(&base.path().join("vms"), &registry).expect("made");
        directory.register(&image).expect("registered");
        directory.describe(&[(PathBuf::from("/ram"), 0)], Vec::new()).expect("described");
        let found = AreaDirectory::find(&registry, &image).expect("examined").expect("found");
        assert_eq!(found, directory.path());
        assert!(matches!(AreaDirectory::take_over(&found, &registry), Err(DirectoryError::InUse { .. })));
        // A VMM without the lock: it is the process that was noted, not another one with its number.
        let mut vmm = std::process::Command::new("sleep").arg("60").spawn().expect("started");
        directory.note_vmm(vmm.id() as i32).expect("noted");
        drop(directory);
        assert!(matches!(AreaDirectory::take_over(&found, &registry), Err(DirectoryError::InUse { .. })));
        vmm.kill().expect("killed");
        vmm.wait().expect("gone");
        let vmms = found.join(VMMS);
        std::fs::write(&vmms, format!("{} 1\nnonsense\n", std::process::id())).expect("written");
        let again = AreaDirectory::take_over(&found, &registry).expect("free now");
        assert_eq!(again.description().expect("read").expect("there").ram[0].path, PathBuf::from("/ram"));
        again.remove();
        assert_eq!(AreaDirectory::find(&registry, &image).expect("examined"), None);
    }
}
