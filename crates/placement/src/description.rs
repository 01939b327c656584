//! A VM's directory in tmpfs: what outlives the process, and how the next one finds and locks it.
//!
//! The lock is an flock that the VMM inherits, or is given by the preloaded library: it is free only when both processes are
//! gone, so nobody finishes a recovery while the guest could still write. A VMM without the library is noted by its number
//! and the moment it was started at, and looked for. A registry by image ([`crate::registry`]) tells the next user of an
//! image that a recovery is unfinished, wherever the directory lies.
//!
//! The directory is opened once, has to be ours alone, and everything in it is reached from there (crate `own-files`). What
//! is removed is what amberlog makes, by name; anything else that lies there stays, and is named.

use crate::directory_error::{DirectoryError, THROUGH};
use crate::processes::{process_lives, process_started_at};
use crate::registry;
use crate::scan::FoundLogPlace;
use guest_memory::VmMemory;
use own_files::{How, OwnDirectory};
use rustix::fs::FileType;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tracing_mutex::stdsync::Mutex;

const DESCRIPTION: &str = "area.json";
pub(crate) const LOCK: &str = "lock";
const VMMS: &str = "vmms";
/// How the names of files end that have the copy of a log which is shipped to a journal server.
pub(crate) const COPY_ENDING: &str = ".copy";

/// Names of the guest's memory: while the next VMM may still open it, and once it is taken.
pub const MEMORY: &str = "ram";
/// See [`MEMORY`].
pub const MEMORY_TAKEN: &str = "ram-taken";
const DESCRIPTION_BYTES_MAX: u64 = 64 << 20;
/// All logs of a VM that are described are in at most so many runs and ranges: each is written down twice, in some 300 bytes, and
/// what is written takes memory of the host that no budget counts. A journal that a kernel or mke2fs has laid out is in a few dozen.
pub(crate) const PIECES_DESCRIBED_MAX: usize = 1 << 15;
/// Room that is put by for the next description: those of a few disks are shorter.
const RESERVE_BYTES_MIN: u64 = 16 << 10;
/// How long a worker may live after its supervisor.
const A_MOMENT: Duration = Duration::from_secs(1);
/// A lock is asked for anew after this, and no more than twice of it counts: on a machine that stands still that worker does not end either.
const PAUSE: Duration = Duration::from_millis(5);
const VMMS_BYTES_MAX: u64 = 64 << 10;
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

/// Where a log is wished to live from its next mount on, whatever the configuration says: for the next worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WishDescription {
    /// Where it is on its disks.
    pub place: FoundLogPlace,
    /// The name of the placement.
    pub placement: String,
    /// It was not what it seemed, and stays on storage for as long as the VM lives.
    pub is_distrusted: bool,
    /// It was handed over to storage while it was open, with this transaction: what lies before was never written there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub storage_from: Option<u32>,
    /// The name of the file with the copy of a log that is shipped to a server; empty where it is not shipped, and nothing if an earlier
    /// amberlog wrote this.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copy: Option<String>,
    /// It was closed under its guest when a device began anew, and its guest has said nothing since: it may go on without a word.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub may_go_on_unannounced: bool,
}

impl WishDescription {
    /// Whether what it says cannot be found out from storage.
    pub(crate) fn is_needed(&self) -> bool {
        self.is_distrusted
            || self.storage_from.is_some()
            || self.may_go_on_unannounced
            || self.copy.as_ref().is_some_and(|name| !name.is_empty())
    }
}

/// An image whose logs may be in the directory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageDescription {
    /// Where it was.
    pub path: PathBuf,
    /// What it was.
    pub key: String,
}

/// What is written down beside the tables.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Description {
    /// Version of this file.
    pub schema: u32,
    /// Guest memory.
    pub ram: Vec<RamDescription>,
    /// Images that are in the registry for this directory; nothing if an earlier amberlog wrote this.
    #[serde(default)]
    pub images: Option<Vec<ImageDescription>>,
    /// Logs.
    pub logs: Vec<LogDescription>,
    /// What is wished of logs, held or not.
    #[serde(default)]
    pub wishes: Vec<WishDescription>,
    /// The names of the disks, in the order that the numbers in places mean; nothing if an earlier amberlog wrote this.
    #[serde(default)]
    pub disks: Option<Vec<String>>,
}

/// A VM's directory in tmpfs, locked.
#[derive(Debug)]
pub struct AreaDirectory {
    directory: OwnDirectory,
    registry: PathBuf,
    lock: File,
    /// What else is amberlog's to remove: memory files by other names than the usual ones.
    memory: Mutex<BTreeSet<OsString>>,
    images: Mutex<Vec<ImageDescription>>,
    disks: Mutex<Vec<String>>,
    /// An earlier worker has made it, for the same VM.
    is_adopted: bool,
}

fn system<'a>(what: &'static str, path: &'a Path) -> impl FnOnce(io::Error) -> DirectoryError + 'a {
    move |source| DirectoryError::system(what, path, source)
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

/// Locks a directory. A worker whose supervisor was killed lives a moment longer: so whoever meets a lock waits for that long, but once
/// only, since most that is locked stays so.
fn try_lock(lock: &File) -> rustix::io::Result<()> {
    static WAITED_US: AtomicU64 = AtomicU64::new(0);
    let waits = || {
        let waited = Duration::from_micros(WAITED_US.load(Ordering::Relaxed));
        let began = Instant::now();
        if waited < A_MOMENT {
            std::thread::sleep(PAUSE);
            // Of several that wait at once none takes the others' moment.
            let now = waited + began.elapsed().min(2 * PAUSE);
            WAITED_US.fetch_max(now.as_micros() as u64, Ordering::Relaxed);
        }
        waited < A_MOMENT
    };
    loop {
        match rustix::fs::flock(lock, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
            Err(rustix::io::Errno::WOULDBLOCK) if waits() => {}
            other => return other,
        }
    }
}

/// Those of the processes that were noted that live still.
fn living(noted: &str) -> Vec<i32> {
    let pairs = noted.lines().filter_map(|line| line.split_once(' '));
    let parsed = pairs.filter_map(|(pid, started)| Some((pid.parse().ok()?, started.parse::<u64>().ok()?)));
    parsed.filter(|(pid, started)| process_lives(*pid, *started)).map(|(pid, _)| pid).collect()
}

/// Those of the processes that had asked for disks of a VM that live still, as its directory at `path` says.
///
/// # Errors
/// When that cannot be read.
pub fn living_vmms(path: &Path) -> Result<Vec<i32>, DirectoryError> {
    let directory = match OwnDirectory::open_allowing(path, THROUGH) {
        // Whoever removed it was done with it.
        Err(error) if error.is_missing() => return Ok(Vec::new()),
        other => other?,
    };
    let noted = directory.read(VMMS, VMMS_BYTES_MAX)?.unwrap_or_default();
    Ok(living(&String::from_utf8_lossy(&noted)))
}

/// Which directory of a VM it is, by its lock, whatever it is called and whether it still has a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirectoryIdentity(u64, u64);

impl DirectoryIdentity {
    /// Of the directory with this lock.
    ///
    /// # Errors
    /// When that cannot be examined.
    pub fn of(lock: impl AsFd) -> io::Result<Self> {
        let found = rustix::fs::fstat(lock)?;
        Ok(DirectoryIdentity(found.st_dev, found.st_ino))
    }

    /// Whether it is there: somebody may have removed it under a guest that runs, or put another one there. What cannot be looked at
    /// counts as being there.
    pub fn is_at(self, path: &Path) -> bool {
        match rustix::fs::lstat(path.join(LOCK)) {
            Ok(found) => DirectoryIdentity(found.st_dev, found.st_ino) == self,
            Err(error) => !matches!(error, rustix::io::Errno::NOENT | rustix::io::Errno::NOTDIR),
        }
    }
}

/// Whether amberlog makes files of this name in a VM's directory, or has the VMM make them.
fn is_amberlogs(name: &OsStr) -> bool {
    let Some(name) = name.to_str() else { return false };
    let is_numbered = |prefix: &str, ending: &str| {
        name.strip_prefix(prefix)
            .and_then(|rest| rest.strip_suffix(ending))
            .is_some_and(|number| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
    };
    matches!(name, DESCRIPTION | "area.json.new" | LOCK | VMMS | "vmms.new" | MEMORY | MEMORY_TAKEN | "shim.sock")
        || is_numbered("log-", ".table")
        || is_numbered("log-", ".pool")
        || is_numbered("nvm-", ".notes")
        || is_numbered("nvm-", ".notes.new")
        || is_numbered("log-", COPY_ENDING)
        || is_numbered("disk", ".sock")
}

impl AreaDirectory {
    /// Makes and locks a directory for a VM under `base`.
    ///
    /// # Errors
    /// When it cannot be made, or others can exchange what lies in `base`.
    pub fn create(base: &Path, registry: &Path) -> Result<Self, DirectoryError> {
        let base = OwnDirectory::open_or_make_place(base)?;
        registry::make(registry)?;
        for number in 0..10_000 {
            if let Some(directory) = base.make_new(format!("vm-{}-{number}", std::process::id()))? {
                match Self::lock(directory, registry.to_owned()) {
                    // Somebody who looks for what is left over was here before the lock.
                    Err(DirectoryError::InUse { .. }) => {}
                    outcome if outcome.as_ref().is_err_and(DirectoryError::is_missing) => {}
                    outcome => return outcome,
                }
            }
        }
        Err(DirectoryError::system("making a directory under", base.path(), io::ErrorKind::AlreadyExists.into()))
    }

    /// Locks a directory that an earlier process left.
    ///
    /// # Errors
    /// [`DirectoryError::InUse`] while that process, or the VM it started, lives.
    pub fn take_over(path: &Path, registry: &Path) -> Result<Self, DirectoryError> {
        Self::lock(OwnDirectory::open_allowing(path, THROUGH)?, registry.to_owned())
    }

    /// Goes on with a directory that another process of ours has made and locked: `lock` is its descriptor of the lock.
    ///
    /// # Errors
    /// When it is not there, or not ours alone, or says nothing of a VM.
    pub fn adopt(path: &Path, registry: &Path, lock: File) -> Result<(Self, Description), DirectoryError> {
        let directory = OwnDirectory::open_allowing(path, THROUGH)?;
        let mut area = Self::made_by_another(directory, registry, lock);
        let description = area.description()?.ok_or_else(|| {
            DirectoryError::system("going on with", path, io::Error::other("it does not say what is in it"))
        })?;
        *area.images.get_mut().expect("no panic under this lock") = description.images.clone().unwrap_or_default();
        Ok((area, description))
    }

    /// Removes one that another process of ours has made and locked, whose removal it may have begun: nothing in it is needed any more.
    pub fn remove_for_another(path: &Path, registry: &Path, lock: File) {
        match OwnDirectory::open_allowing(path, THROUGH) {
            Ok(directory) => Self::made_by_another(directory, registry, lock).remove(),
            Err(error) if error.is_missing() => registry::forget_area(registry, path),
            Err(error) => log::warn!("{error}"),
        }
    }

    fn made_by_another(directory: OwnDirectory, registry: &Path, lock: File) -> Self {
        AreaDirectory {
            directory,
            registry: registry.to_owned(),
            lock,
            memory: Mutex::default(),
            images: Mutex::default(),
            disks: Mutex::default(),
            is_adopted: true,
        }
    }

    /// Whether an earlier worker has made it, for the same VM.
    pub fn is_adopted(&self) -> bool {
        self.is_adopted
    }

    fn lock(directory: OwnDirectory, registry: PathBuf) -> Result<Self, DirectoryError> {
        let lock = directory.file(LOCK, How::WriteOrMake)?;
        let shown = directory.path().join(LOCK);
        match try_lock(&lock) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => {
                let noted = directory.read(VMMS, VMMS_BYTES_MAX)?.unwrap_or_default();
                let vmms = living(&String::from_utf8_lossy(&noted));
                return Err(DirectoryError::InUse { path: directory.path().to_owned(), vmms });
            }
            Err(error) => return Err(system("locking", &shown)(error.into())),
        }
        if lock.metadata().map_err(system("examining", &shown))?.nlink() == 0 {
            // Whoever had it was done with it, and has removed it.
            return Err(own_files::Error::System {
                what: "locking",
                path: shown,
                source: io::ErrorKind::NotFound.into(),
            }
            .into());
        }
        let area = AreaDirectory {
            directory,
            registry,
            lock,
            memory: Mutex::default(),
            images: Mutex::default(),
            disks: Mutex::default(),
            is_adopted: false,
        };
        let vmms = living(&area.vmms()?);
        if !vmms.is_empty() {
            return Err(DirectoryError::InUse { path: area.path().to_owned(), vmms });
        }
        Ok(area)
    }

    fn vmms(&self) -> Result<String, DirectoryError> {
        let noted = self.directory.read(VMMS, VMMS_BYTES_MAX)?.unwrap_or_default();
        Ok(String::from_utf8_lossy(&noted).into_owned())
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        self.directory.path()
    }

    /// The directory itself, opened once more.
    pub(crate) fn directory_again(&self) -> Result<OwnDirectory, DirectoryError> {
        Ok(OwnDirectory::open_allowing(self.path(), THROUGH)?)
    }

    /// The directory itself.
    pub fn directory(&self) -> &OwnDirectory {
        &self.directory
    }

    /// Makes the file that will be the guest's memory, for its owner alone; a VMM that finds none makes one as it likes.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn make_memory(&self) -> Result<(), DirectoryError> {
        self.directory.file(MEMORY, How::MakeNew)?;
        Ok(())
    }

    /// The VMM that connected has the file of its memory open, which is one of those that `memory` has: whoever opens that name from now on
    /// gets another file. Where the VMM's file has been renamed before, one with that name is another program's, which wanted to be this VM,
    /// and its name goes: what pages are retained in never loses its own to it.
    ///
    /// # Errors
    /// When it cannot be renamed, or the VMM has two of that name.
    pub fn take_memory_away(&self, memory: &VmMemory) -> Result<(), DirectoryError> {
        match self.directory.rename_to_new(MEMORY, MEMORY_TAKEN) {
            Err(error) if !error.is_missing() => Err(error.into()),
            Err(_) => Ok(()),
            Ok(false) => {
                let file = match self.directory.given_file(MEMORY, How::Read) {
                    // Another disk's thread has just removed it.
                    Err(error) if error.is_missing() => return Ok(()),
                    opened => opened?,
                };
                if memory.has_file(&file) {
                    return Err(DirectoryError::SecondMemory { path: self.path().join(MEMORY) });
                }
                Ok(self.directory.remove(MEMORY)?)
            }
            Ok(true) => {
                // Another user's VMM has its own file there, with a mode of its own.
                if let Ok(file) = self.directory.given_file(MEMORY_TAKEN, How::Read) {
                    let _ = rustix::fs::fchmod(file, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR);
                }
                Ok(())
            }
        }
    }

    /// Notes a VMM that was started by others and may not have the lock: while it lives, the directory cannot be taken over.
    ///
    /// # Errors
    /// When it cannot be noted, or is one of too many.
    pub fn note_vmm(&self, pid: i32) -> io::Result<()> {
        let noted = self.vmms().map_err(io::Error::other)?;
        if noted.lines().count() >= VMMS_MAX {
            return Err(io::Error::other(format!("more than {VMMS_MAX} processes have asked for disks of this VM")));
        }
        let started = process_started_at(pid).unwrap_or_default();
        if !process_lives(pid, started) {
            return Ok(());
        }
        Ok(self.directory.write(VMMS, format!("{noted}{pid} {started}\n").as_bytes())?)
    }

    /// Whether it is where it was made: somebody may have removed it.
    pub fn is_in_place(&self) -> bool {
        DirectoryIdentity::of(&self.lock).is_ok_and(|identity| identity.is_at(self.path()))
    }

    /// The lock, for the VMM to inherit.
    pub fn lock_file(&self) -> &File {
        &self.lock
    }

    /// Writes the description anew, in one step; not where it says the same already: a worker that follows one that died has nothing else to
    /// say as a rule. Room for the next one is put by, since what a guest's journal comes to (it is distrusted, for one) has to be said where
    /// memory has run out.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn describe(
        &self,
        ram: &[(PathBuf, u32)],
        logs: Vec<LogDescription>,
        wishes: Vec<WishDescription>,
    ) -> io::Result<()> {
        let ram: Vec<RamDescription> = ram
            .iter()
            .map(|(path, first_page)| RamDescription { path: path.clone(), first_page: *first_page })
            .collect();
        self.know_memory(&ram);
        let images = Some(self.images.lock().expect("no panic under this lock").clone());
        let disks = Some(self.disks.lock().expect("no panic under this lock").clone());
        let description = Description { schema: 1, ram, images, logs, wishes, disks };
        let text = serde_json::to_vec_pretty(&description).map_err(io::Error::other)?;
        if text.len() as u64 > DESCRIPTION_BYTES_MAX {
            // Nobody would read it, nor what the one before says then. What is found later is bounded before it is held.
            let path = self.path().join(DESCRIPTION);
            return Err(io::Error::other(format!(
                "{} would have {} bytes, and more than {DESCRIPTION_BYTES_MAX} are not read again: what the journals of the VM are is \
                 not written down; give it fewer disks",
                path.display(),
                text.len()
            )));
        }
        let said = self.directory.read(DESCRIPTION, DESCRIPTION_BYTES_MAX).ok().flatten();
        if said.is_some_and(|said| said == text) {
            return Ok(());
        }
        let reserve = RESERVE_BYTES_MIN.max(2 * text.len() as u64);
        Ok(self.directory.write_from_reserve(DESCRIPTION, &text, reserve)?)
    }

    fn know_memory(&self, ram: &[RamDescription]) {
        let ours = ram.iter().filter(|file| file.path.parent() == Some(self.path()));
        let mut memory = self.memory.lock().expect("no panic under this lock");
        memory.extend(ours.filter_map(|file| file.path.file_name()).map(OsStr::to_owned));
    }

    /// Whether guest memory that was at `path` is the file `name` here: here it was, or this directory is a copy of the one
    /// where it was.
    pub(crate) fn is_memory(&self, name: &OsStr, path: &Path) -> bool {
        let is_here = path.parent() == Some(self.path());
        let is_memory = is_here || (path.is_absolute() && self.directory.kind(name).is_some());
        if is_memory {
            self.memory.lock().expect("no panic under this lock").insert(name.to_owned());
        }
        is_memory
    }

    /// Reads the description. Nothing if there is none: the process died before it had anything to keep.
    ///
    /// # Errors
    /// When it cannot be read or is damaged.
    pub fn description(&self) -> Result<Option<Description>, DirectoryError> {
        let path = self.path().join(DESCRIPTION);
        let Some(text) = self.directory.read(DESCRIPTION, DESCRIPTION_BYTES_MAX)? else { return Ok(None) };
        let description: Description =
            serde_json::from_slice(&text).map_err(|e| system("understanding", &path)(io::Error::other(e)))?;
        if description.schema != 1 {
            return Err(system("understanding", &path)(io::Error::other("it is of a newer amberlog")));
        }
        self.know_memory(&description.ram);
        Ok(Some(description))
    }

    /// Says in the registry that this directory may hold what `image` is owed.
    ///
    /// # Errors
    /// When the registry cannot be written.
    pub fn register(&self, image: &Path) -> Result<(), DirectoryError> {
        let key = image_key(image).map_err(system("examining", image))?;
        registry::note(&self.registry, &key, self.path())?;
        let path = std::path::absolute(image).unwrap_or_else(|_| image.to_owned());
        self.images.lock().expect("no panic under this lock").push(ImageDescription { path, key });
        Ok(())
    }

    /// Says that this directory holds nothing that another image than these is owed: a disk was taken from the VM.
    pub(crate) fn keep_images(&self, images: &[&Path]) {
        let keys: Vec<String> = images.iter().filter_map(|image| image_key(image).ok()).collect();
        self.images.lock().expect("no panic under this lock").retain(|image| {
            let stays = keys.contains(&image.key) || images.iter().any(|served| is_at(served, &image.path));
            if !stays && self.is_registered(&image.key) {
                registry::forget_image(&self.registry, &image.key, self.path());
            }
            stays
        });
    }

    /// Registers those of these images that it is not about: a worker that had others has written that down, and died before it served
    /// them. What cannot be registered is found by its mark alone, which is no reason to end a guest.
    pub(crate) fn register_missing(&self, images: &[&Path]) {
        for image in images {
            let is_first = |key: &str| {
                registry::find(&self.registry, key)
                    .is_ok_and(|areas| areas.first().is_some_and(|area| area == self.path()))
            };
            let is_known = || image_key(image).is_ok_and(|key| is_first(&key) && self.is_about(&key));
            if !is_known()
                && let Err(error) = self.register(image)
            {
                log::warn!("{} cannot be registered: {error}", image.display());
            }
        }
    }

    fn is_about(&self, key: &str) -> bool {
        self.images.lock().expect("no panic under this lock").iter().any(|image| image.key == key)
    }

    /// Names the disks that the numbers in places mean, from the next description on.
    pub(crate) fn name_disks(&self, names: Vec<String>) {
        *self.disks.lock().expect("no panic under this lock") = names;
    }

    /// Whether the registry says that this directory is about the image with this key.
    pub(crate) fn is_registered(&self, key: &str) -> bool {
        registry::find(&self.registry, key).is_ok_and(|areas| areas.iter().any(|area| area == self.path()))
    }

    /// The directory of an earlier process that may hold what `image` is owed.
    ///
    /// # Errors
    /// When the image cannot be examined, or the directory is not ours alone.
    pub fn find(registry: &Path, image: &Path) -> Result<Option<PathBuf>, DirectoryError> {
        Self::find_but(registry, image, |_| false)
    }

    /// The same, but for those that were looked at: there may be one behind.
    ///
    /// # Errors
    /// As [`AreaDirectory::find`].
    pub fn find_but(
        registry: &Path,
        image: &Path,
        was_looked_at: impl Fn(&Path) -> bool,
    ) -> Result<Option<PathBuf>, DirectoryError> {
        let key = image_key(image).map_err(system("examining", image))?;
        for area in registry::find(registry, &key)?.into_iter().filter(|area| !was_looked_at(area)) {
            let is_about = match OwnDirectory::open_allowing(&area, THROUGH) {
                Ok(directory) => describes(&directory, &key)?,
                Err(error) if error.is_missing() => false,
                Err(error) => return Err(error.into()),
            };
            if is_about {
                return Ok(Some(area));
            }
            registry::forget_image(registry, &key, &area);
        }
        Ok(None)
    }

    /// Takes logs out of what is described, whose tables are closed, and removes their files; and takes images out that no log is left of.
    ///
    /// # Errors
    /// When that cannot be written down: the logs are closed all the same.
    pub(crate) fn forget_logs(&self, names: &[&str]) -> Result<(), DirectoryError> {
        let Some(mut description) = self.description()? else { return Ok(()) };
        let (gone, stays): (Vec<_>, Vec<_>) =
            std::mem::take(&mut description.logs).into_iter().partition(|log| names.contains(&log.name.as_str()));
        let keys = |logs: &[LogDescription]| -> BTreeSet<String> {
            logs.iter().flat_map(|log| log.home_key.iter().chain(&log.journal_key)).cloned().collect()
        };
        let needed = keys(&stays);
        let has_copies =
            description.wishes.iter().any(|wish| wish.copy.as_deref().is_some_and(|copy| !copy.is_empty()));
        // An image is looked at for a copy of what is on a server, too, which stays until that is brought home.
        let given_up: BTreeSet<String> = keys(&gone).difference(&needed).filter(|_| !has_copies).cloned().collect();
        if let Some(images) = &mut description.images {
            images.retain(|image| !given_up.contains(&image.key));
        }
        description.logs = stays;
        let path = self.path().join(DESCRIPTION);
        let text = serde_json::to_vec_pretty(&description)
            .map_err(|error| system("describing", &path)(io::Error::other(error)))?;
        let reserve = RESERVE_BYTES_MIN.max(2 * text.len() as u64);
        self.directory.write_from_reserve(DESCRIPTION, &text, reserve)?;
        for key in given_up.iter().filter(|key| self.is_registered(key)) {
            registry::forget_image(&self.registry, key, self.path());
        }
        for name in gone.iter().flat_map(|log| ["table", "pool"].map(|ending| format!("{}.{ending}", log.name))) {
            self.directory.remove(name)?;
        }
        Ok(())
    }

    /// Removes the directory and its place in the registry: nothing in it is needed any more. Only what amberlog makes goes.
    pub fn remove(&self) {
        registry::forget_area(&self.registry, self.path());
        // Its memory is known by name; what is gone or damaged has been said before.
        let _ = self.description();
        let memory = self.memory.lock().expect("no panic under this lock");
        // The lock last: while it is there, the directory is a VM's.
        let is_ours = |name: &OsString| is_amberlogs(name) || memory.contains(name);
        let mut strange = Vec::new();
        let names = self.directory.names().unwrap_or_default();
        for name in names.iter().filter(|name| *name != LOCK) {
            let is_file = matches!(self.directory.kind(name), Some(FileType::RegularFile | FileType::Socket));
            if !is_ours(name) || !is_file {
                strange.push(name.display().to_string());
            } else if let Err(error) = self.directory.remove(name) {
                log::warn!("{error}");
            }
        }
        if !strange.is_empty() {
            log::warn!(
                "{} stays: amberlog has not made {} in it; look at that, and remove it",
                self.path().display(),
                strange.join(", ")
            );
            return;
        }
        if let Err(error) = self.directory.remove(LOCK).and_then(|()| self.directory.remove_self()) {
            log::warn!("{error}");
        }
    }
}

/// Whether an image that is served at `path` was written down as being there.
pub(crate) fn is_at(path: &Path, described: &Path) -> bool {
    std::path::absolute(path).is_ok_and(|path| path == described)
}

/// Whether what lies in a directory is about the image with this key, or does not say that it is not.
fn describes(directory: &OwnDirectory, key: &str) -> Result<bool, DirectoryError> {
    let Some(text) = directory.read(DESCRIPTION, DESCRIPTION_BYTES_MAX)? else { return Ok(true) };
    let images = serde_json::from_slice(&text).ok().and_then(|description: Description| description.images);
    Ok(images.is_none_or(|images| images.iter().any(|image| image.key == key)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::LogRun;

    #[test]
    fn whether_a_process_lives_is_not_told_by_its_number_alone() {
        let mut process = std::process::Command::new("sleep").arg("60").spawn().expect("started");
        let pid = process.id() as i32;
        let started = process_started_at(pid).expect("it lives");
        assert!(process_lives(pid, started));
        assert!(process_lives(pid, 0), "nobody knows when it was started");
        assert!(!process_lives(pid, started + 1), "another one has its number");
        process.kill().expect("killed");
        while process_started_at(pid).is_some() {
            std::thread::yield_now();
        }
        assert!(!process_lives(pid, started) && !process_lives(pid, 0), "nobody has asked how it ended");
        process.wait().expect("gone");
        assert!(!process_lives(pid, started) && !process_lives(pid, 0));
    }

    /// Somebody starts a second VMM of the VM, which is turned away and leaves the file of its memory. Pages are retained in the first one's.
    #[test]
    fn a_second_vmms_memory_does_not_take_the_place_of_the_firsts() {
        let base = tempfile::tempdir().expect("a temporary directory");
        let directory = AreaDirectory::create(&base.path().join("vms"), &base.path().join("registry")).expect("made");
        let memory = VmMemory::new();
        let [ram, taken] = [MEMORY, MEMORY_TAKEN].map(|name| directory.path().join(name));
        directory.take_memory_away(&memory).expect("there is none");
        let make = |content: &[u8]| {
            directory.make_memory().expect("made");
            std::fs::write(&ram, content).expect("a VMM has it");
        };
        make(&[1; 4096]);
        memory.adopt_file(File::options().read(true).write(true).open(&ram).expect("opened")).expect("mapped");
        directory.take_memory_away(&memory).expect("taken");
        for _ in 0..2 {
            make(&[2; 4096]);
            directory.take_memory_away(&memory).expect("the second one's goes");
            assert_eq!(std::fs::read(&taken).expect("it is there"), [1; 4096], "pages are retained in it");
            assert!(!ram.exists());
            directory.take_memory_away(&memory).expect("there is none any more");
        }
        // Memory that is plugged in later, by the same name.
        make(&[3; 4096]);
        memory.adopt_file(File::options().read(true).write(true).open(&ram).expect("opened")).expect("mapped");
        let error = directory.take_memory_away(&memory).expect_err("it is the VMM's, too").to_string();
        assert!(error.contains("two files of its guest's memory by that name"), "{error}");
        assert!(ram.exists() && std::fs::read(&taken).expect("it is there") == [1; 4096]);
    }

    #[test]
    fn a_directory_is_found_locked_and_removed() {
        let base = tempfile::tempdir().expect("a temporary directory");
        let registry = base.path().join("registry");
        let image = base.path().join("image");
        std::fs::write(&image, b"x").expect("an image");
        assert_eq!(AreaDirectory::find(&registry, &image).expect("examined"), None);
        let directory = AreaDirectory::create(&base.path().join("vms"), &registry).expect("made");
        directory.register(&image).expect("registered");
        directory.describe(&[(PathBuf::from("/ram"), 0)], Vec::new(), Vec::new()).expect("described");
        let found = AreaDirectory::find(&registry, &image).expect("examined").expect("found");
        assert_eq!(found, directory.path());
        assert!(matches!(AreaDirectory::take_over(&found, &registry), Err(DirectoryError::InUse { .. })));
        // A VMM without the lock: it is the process that was noted, not another one with its number.
        let mut vmm = std::process::Command::new("sleep").arg("60").spawn().expect("started");
        directory.note_vmm(vmm.id() as i32).expect("noted");
        drop(directory);
        let error = AreaDirectory::take_over(&found, &registry).expect_err("the VMM lives");
        assert!(error.to_string().contains(&format!("it started (process {}); end that", vmm.id())), "{error}");
        vmm.kill().expect("killed");
        vmm.wait().expect("gone");
        let vmms = found.join(VMMS);
        std::fs::write(&vmms, format!("{} 1\nnonsense\n", std::process::id())).expect("written");
        // A program that another test starts at this moment has the lock's descriptor until it is executed.
        let again = (0..200)
            .find_map(|_| {
                let again = AreaDirectory::take_over(&found, &registry).ok();
                if again.is_none() {
                    std::thread::sleep(std::time::Duration::from_millis(10));
                }
                again
            })
            .expect("free now");
        assert_eq!(again.description().expect("read").expect("there").ram[0].path, PathBuf::from("/ram"));
        again.remove();
        assert_eq!(AreaDirectory::find(&registry, &image).expect("examined"), None);
    }

    /// Whoever made it was killed in the midst of removing it, and a VMM has its lock.
    #[test]
    fn a_directory_that_is_removed_in_part_goes() {
        let base = tempfile::tempdir().expect("a temporary directory");
        let registry = base.path().join("registry");
        let image = base.path().join("image");
        std::fs::write(&image, b"x").expect("an image");
        let directory = AreaDirectory::create(&base.path().join("vms"), &registry).expect("made");
        directory.register(&image).expect("registered");
        directory.describe(&[(PathBuf::from("/ram"), 0)], Vec::new(), Vec::new()).expect("described");
        let path = directory.path().to_owned();
        let lock = || directory.lock_file().try_clone().expect("a descriptor");
        std::fs::remove_file(path.join(DESCRIPTION)).expect("removed");
        AreaDirectory::remove_for_another(&path, &registry, lock());
        assert!(!path.exists());
        assert_eq!(AreaDirectory::find(&registry, &image).expect("examined"), None);
        AreaDirectory::remove_for_another(&path, &registry, lock());
    }

    #[test]
    fn a_directory_that_is_removed_is_not_in_place() {
        let base = tempfile::tempdir().expect("a temporary directory");
        let make = || AreaDirectory::create(&base.path().join("vms"), &base.path().join("registry")).expect("made");
        let directory = make();
        assert!(directory.is_in_place());
        // Another one has its name.
        let away = base.path().join("away");
        std::fs::rename(directory.path(), &away).expect("renamed");
        assert!(!directory.is_in_place());
        std::fs::create_dir(directory.path()).expect("made");
        std::fs::write(directory.path().join(LOCK), "").expect("written");
        assert!(!directory.is_in_place());
        std::fs::remove_dir_all(directory.path()).expect("removed");
        std::fs::rename(&away, directory.path()).expect("renamed");
        assert!(directory.is_in_place());
        // As systemd-logind removes what a user has.
        std::fs::remove_dir_all(directory.path()).expect("removed");
        assert!(!directory.is_in_place());
    }

    #[test]
    fn what_is_described_already_needs_no_room() {
        let base = tempfile::tempdir().expect("a temporary directory");
        let directory = AreaDirectory::create(&base.path().join("vms"), &base.path().join("registry")).expect("made");
        let inode = || std::fs::metadata(directory.path().join(DESCRIPTION)).expect("a file").ino();
        let describe = |page| directory.describe(&[(PathBuf::from("/ram"), page)], Vec::new(), Vec::new());
        describe(0).expect("described");
        let first = inode();
        // Where no other file can be made.
        let next = directory.path().join("area.json.new");
        assert!(std::fs::metadata(&next).expect("room is put by").len() >= RESERVE_BYTES_MIN);
        std::fs::remove_file(&next).expect("removed");
        std::fs::create_dir(&next).expect("in the way");
        describe(0).expect("it is described");
        assert_eq!(inode(), first);
        describe(1).expect_err("something else has to be written");
    }

    /// Whatever is written down is read again, also where its logs are in as many pieces as they may be.
    #[test]
    fn what_is_described_is_read_again() {
        let base = tempfile::tempdir().expect("a temporary directory");
        let directory = AreaDirectory::create(&base.path().join("vms"), &base.path().join("registry")).expect("made");
        let place = |pieces: usize| FoundLogPlace {
            home_disk: 7,
            journal_disk: 7,
            home_start: 1 << 60,
            block_bytes: 65536,
            log_blocks: u32::MAX,
            home_blocks: u64::MAX,
            runs: vec![LogRun { offset: u64::MAX, first_position: u32::MAX, count: u32::MAX }; pieces / 2],
            own_blocks: vec![u64::MAX - 1..u64::MAX; pieces / 2],
            is_external: false,
            file_system_uuid: [0xff; 16],
        };
        let describe = |places: Vec<FoundLogPlace>| {
            let image = PathBuf::from(format!("/{}", "x".repeat(250)));
            let log = |place: &FoundLogPlace| LogDescription {
                name: "log-12345".to_owned(),
                home_image: image.clone(),
                journal_image: image.clone(),
                home_key: Some("file-ffffffffffffffff-ffffffffffffffff".to_owned()),
                journal_key: Some("file-ffffffffffffffff-ffffffffffffffff".to_owned()),
                place: place.clone(),
            };
            let wish = |place: &FoundLogPlace| WishDescription {
                place: place.clone(),
                placement: "retain".to_owned(),
                is_distrusted: true,
                storage_from: Some(u32::MAX),
                copy: Some("log-12345.copy".to_owned()),
                may_go_on_unannounced: true,
            };
            directory.describe(&[], places.iter().map(log).collect(), places.iter().map(wish).collect())
        };
        let each = place(0).pieces_described();
        for logs in [1, 300, PIECES_DESCRIBED_MAX / each] {
            let pieces = PIECES_DESCRIBED_MAX / logs - each;
            describe(vec![place(pieces); logs]).unwrap_or_else(|error| panic!("{logs} logs: {error}"));
            let read = directory.description().expect("it is read").expect("it is there");
            assert!(read.logs.len() == logs && read.logs[logs - 1].place == place(pieces));
        }
        // More of them, which an earlier worker may have left: what was written down stays.
        let error = describe(vec![place(16 * PIECES_DESCRIBED_MAX)]).expect_err("nobody could read it");
        assert!(error.to_string().contains("are not read again"), "{error}");
        assert!(directory.description().expect("it is read").is_some());
    }

    #[test]
    fn an_entry_that_is_about_another_vm_by_now_is_forgotten() {
        let base = tempfile::tempdir().expect("a temporary directory");
        let registry = base.path().join("registry");
        let images: Vec<PathBuf> = ["a", "b"].iter().map(|name| base.path().join(name)).collect();
        for image in &images {
            std::fs::write(image, b"x").expect("an image");
        }
        let directory = AreaDirectory::create(&base.path().join("vms"), &registry).expect("made");
        directory.register(&images[0]).expect("registered");
        // A process with the number of an earlier one has its directory where that had its own.
        let stale = image_key(&images[1]).expect("a key");
        registry::note(&registry, &stale, directory.path()).expect("noted");
        directory.describe(&[], Vec::new(), Vec::new()).expect("described");
        assert_eq!(AreaDirectory::find(&registry, &images[0]).expect("looked").as_deref(), Some(directory.path()));
        assert_eq!(AreaDirectory::find(&registry, &images[1]).expect("looked"), None);
        assert!(registry::find(&registry, &stale).expect("looked").is_empty());
    }

    #[test]
    fn only_what_amberlog_makes_is_removed() {
        let base = tempfile::tempdir().expect("a temporary directory");
        let registry = base.path().join("registry");
        let make = || AreaDirectory::create(&base.path().join("vms"), &registry).expect("made");
        let ours = ["ram", "ram-taken", "log-0.table", "log-12.pool", "nvm-3.notes", "vmms", "area.json.new", "node0"];
        let fill = |directory: &AreaDirectory| {
            for name in ours {
                std::fs::write(directory.path().join(name), "x").expect("written");
            }
            let _socket =
                std::os::unix::net::UnixListener::bind(directory.path().join("disk0.sock")).expect("a socket");
            directory.describe(&[(directory.path().join("node0"), 0)], Vec::new(), Vec::new()).expect("described");
        };
        let directory = make();
        fill(&directory);
        directory.remove();
        assert!(!directory.path().exists());
        let dear = base.path().join("dear");
        std::fs::write(&dear, "dear").expect("written");
        for name in ["mine", "log-x.table", "nvm-x.notes", "disk.sock", "vm", "node1"] {
            let directory = make();
            fill(&directory);
            std::fs::write(directory.path().join(name), "mine").expect("written");
            std::os::unix::fs::symlink(&dear, directory.path().join("log-1.table")).expect("a link");
            directory.remove();
            let left: BTreeSet<_> = directory.directory().names().expect("it is there").into_iter().collect();
            assert_eq!(left, BTreeSet::from([name.into(), "log-1.table".into(), LOCK.into()]));
            assert_eq!(std::fs::read_to_string(&dear).expect("there"), "dear");
        }
    }
}
