//! Directories that only their owner can enter, below directories in which nobody else can exchange them.

use crate::error::Error;
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;
use rustix::process::geteuid;
use std::ffi::{OsStr, OsString};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

/// A directory that is ours alone, opened. Nothing else is ever looked up by its path again.
#[derive(Debug)]
pub struct OwnDirectory {
    descriptor: OwnedFd,
    /// The one above.
    parent: OwnedFd,
    path: PathBuf,
}

/// Whether `name` names something in a directory, and nothing anywhere else.
pub fn is_name(name: &OsStr) -> bool {
    let bytes = name.as_bytes();
    !bytes.is_empty() && bytes != b"." && bytes != b".." && !bytes.contains(&b'/') && !bytes.contains(&0)
}

/// Enough to pass through.
const THROUGH: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
const READ: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// Whether nobody but us and root can exchange what lies in a directory and is ours.
fn check_way(descriptor: impl AsFd, path: &Path) -> Result<(), Error> {
    let stat = rustix::fs::fstat(descriptor).map_err(Error::system("examining", path))?;
    let us = geteuid().as_raw();
    if stat.st_uid != 0 && stat.st_uid != us {
        return Err(Error::not_ours(
            path,
            format!(
                "it belongs to user {}, who can exchange what lies in it; name a directory whose parents belong to root or \
                 to user {us}",
                stat.st_uid
            ),
        ));
    }
    if stat.st_mode & 0o022 != 0 && stat.st_mode & 0o1000 == 0 {
        return Err(Error::not_ours(
            path,
            format!(
                "others can write to it (mode {:04o}), and exchange what lies in it; name another directory, or take that \
                 right away (chmod go-w)",
                stat.st_mode & 0o7777
            ),
        ));
    }
    Ok(())
}

/// How root becomes another user for one command.
fn as_that_user(us: u32, stat: &Stat) -> String {
    match us {
        0 => format!(" (setpriv --reuid={} --regid={} --init-groups amberlog ...)", stat.st_uid, stat.st_gid),
        _ => String::new(),
    }
}

/// Whether an opened directory is ours alone.
fn check_own(stat: &Stat, path: &Path, others: u32) -> Result<(), Error> {
    let us = geteuid().as_raw();
    if stat.st_uid != us {
        return Err(Error::not_ours(
            path,
            format!(
                "it belongs to user {}, not to user {us}, who runs amberlog; it is not used: name another directory, or run \
                 this as that user{}",
                stat.st_uid,
                as_that_user(us, stat)
            ),
        ));
    }
    let mode = stat.st_mode & 0o7777;
    if mode & 0o077 & !others != 0 {
        return Err(Error::not_ours(
            path,
            format!(
                "others can enter it or write to it (mode {mode:04o}), so that what is in it cannot be trusted; look at \
                 what is in it, then take that right away (chmod 700)"
            ),
        ));
    }
    Ok(())
}

/// What is demanded of an opened directory.
#[derive(Clone, Copy)]
enum Demand {
    /// Ours, with these bits of the group's and others' at most.
    Own(u32),
    /// Nobody else can exchange what is ours in it.
    Way,
}

impl Demand {
    /// Nobody else may ever be able to write.
    fn own_but(others: u32) -> Self {
        Demand::Own(others & 0o055)
    }
}

/// Opens a directory by its path from the root, and checks every step. The path has no links.
fn descend(path: &Path) -> Result<OwnedFd, Error> {
    let mut descriptor = rustix::fs::open("/", THROUGH, Mode::empty()).map_err(Error::system("opening", path))?;
    let mut at = PathBuf::from("/");
    check_way(&descriptor, &at)?;
    for component in path.components() {
        let Component::Normal(name) = component else { continue };
        at.push(name);
        descriptor =
            rustix::fs::openat(&descriptor, name, THROUGH, Mode::empty()).map_err(Error::system("opening", &at))?;
        check_way(&descriptor, &at)?;
    }
    Ok(descriptor)
}

/// The directory above, its path without links, and the last name.
fn split(path: &Path) -> Result<(PathBuf, OsString), Error> {
    let absolute = std::path::absolute(path).map_err(Error::system("finding", path))?;
    match (absolute.parent(), absolute.file_name()) {
        (Some(parent), Some(name)) => Ok((parent.to_owned(), name.to_owned())),
        _ => Err(Error::not_ours(path, "it has no name of its own; name a directory below")),
    }
}

impl OwnDirectory {
    /// Opens a directory that is ours alone, in which others can do nothing (mode 0700).
    ///
    /// # Errors
    /// When it is a link, somebody else's, open to others, or in a place where others can exchange it.
    pub fn open(path: &Path) -> Result<Self, Error> {
        Self::open_allowing(path, 0)
    }

    /// The same for one whose mode may have these bits of the group's and others' too (0o050: the group may enter and
    /// look). Nobody but the owner may ever be able to write.
    ///
    /// # Errors
    /// As [`OwnDirectory::open`].
    pub fn open_allowing(path: &Path, others: u32) -> Result<Self, Error> {
        Self::open_demanding(path, Demand::own_but(others))
    }

    /// Opens a directory in which directories of ours can lie: one of ours or root's, in which others cannot write, or only
    /// make what is their own (as in /dev/shm). What lies in it is to be judged by itself.
    ///
    /// # Errors
    /// As [`OwnDirectory::open`].
    pub fn open_place(path: &Path) -> Result<Self, Error> {
        Self::open_demanding(path, Demand::Way)
    }

    fn open_demanding(path: &Path, demand: Demand) -> Result<Self, Error> {
        let (parent, name) = split(path)?;
        let parent = std::fs::canonicalize(&parent).map_err(Error::system("finding", path))?;
        Self::beneath(descend(&parent)?, &parent, &name, demand)
    }

    /// Opens it, and makes it and what is missing above it.
    ///
    /// # Errors
    /// As [`OwnDirectory::open`], and when it cannot be made.
    pub fn open_or_make(path: &Path) -> Result<Self, Error> {
        Self::open_or_make_allowing(path, 0)
    }

    /// The same for one whose mode may have these bits too, as [`OwnDirectory::open_allowing`].
    ///
    /// # Errors
    /// As [`OwnDirectory::open_or_make`].
    pub fn open_or_make_allowing(path: &Path, others: u32) -> Result<Self, Error> {
        Self::open_or_make_demanding(path, Demand::own_but(others))
    }

    /// The same as [`OwnDirectory::open_place`]; what is made is ours alone.
    ///
    /// # Errors
    /// As [`OwnDirectory::open_or_make`].
    pub fn open_or_make_place(path: &Path) -> Result<Self, Error> {
        Self::open_or_make_demanding(path, Demand::Way)
    }

    fn open_or_make_demanding(path: &Path, demand: Demand) -> Result<Self, Error> {
        let (above, name) = split(path)?;
        // What is there, and what is not; a link that leads nowhere is there.
        let mut there = above.clone();
        let mut missing = Vec::new();
        while let Err(error) = std::fs::symlink_metadata(&there) {
            let (parent, name) = split(&there)?;
            if error.kind() != std::io::ErrorKind::NotFound {
                return Err(Error::system("finding", &there)(error));
            }
            there = parent;
            missing.push(name);
        }
        let mut at = std::fs::canonicalize(&there).map_err(Error::system("finding", &there))?;
        let mut descriptor = descend(&at)?;
        while let Some(name) = missing.pop() {
            make(&descriptor, &at, &name)?;
            let made = Self::beneath(descriptor, &at, &name, Demand::Own(0))?;
            at.push(name);
            descriptor = made.descriptor;
        }
        make(&descriptor, &at, &name)?;
        Self::beneath(descriptor, &at, &name, demand)
    }

    fn beneath(parent: OwnedFd, above: &Path, name: &OsStr, demand: Demand) -> Result<Self, Error> {
        let path = above.join(name);
        let descriptor = match rustix::fs::openat(&parent, name, READ, Mode::empty()) {
            Ok(descriptor) => descriptor,
            Err(error @ (Errno::LOOP | Errno::NOTDIR)) => {
                let is_link = rustix::fs::statat(&parent, name, AtFlags::SYMLINK_NOFOLLOW)
                    .is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Symlink);
                return Err(match (is_link, error) {
                    (true, _) => Error::not_ours(&path, "it is a link; name the directory itself"),
                    (false, error) => Error::system("opening the directory", &path)(error),
                });
            }
            Err(error) => {
                // Whose it is says more than that it cannot be opened.
                let stat = rustix::fs::statat(&parent, name, AtFlags::SYMLINK_NOFOLLOW);
                if let (Errno::ACCESS | Errno::PERM, Ok(stat)) = (error, stat) {
                    check_own(&stat, &path, 0o055)?;
                }
                return Err(Error::system("opening the directory", &path)(error));
            }
        };
        match demand {
            Demand::Own(others) => {
                let stat = rustix::fs::fstat(&descriptor).map_err(Error::system("examining", &path))?;
                check_own(&stat, &path, others)?;
            }
            Demand::Way => check_way(&descriptor, &path)?,
        }
        Ok(OwnDirectory { descriptor, parent, path })
    }

    /// Where it is: without links, and with nobody else able to exchange a part of it.
    pub fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn name<'n>(&self, name: &'n OsStr) -> Result<&'n OsStr, Error> {
        if is_name(name) {
            return Ok(name);
        }
        Err(Error::not_ours(&self.path, format!("'{}' is no name of a file in it", name.display())))
    }

    fn again(&self) -> Result<OwnedFd, Error> {
        self.descriptor.try_clone().map_err(Error::system("duplicating the descriptor of", &self.path))
    }

    /// Opens a directory in it, which has to be ours alone.
    ///
    /// # Errors
    /// As [`OwnDirectory::open`].
    pub fn directory(&self, name: impl AsRef<OsStr>) -> Result<Self, Error> {
        self.directory_allowing(name, 0)
    }

    /// The same for one whose mode may have these bits too, as [`OwnDirectory::open_allowing`].
    ///
    /// # Errors
    /// As [`OwnDirectory::open`].
    pub fn directory_allowing(&self, name: impl AsRef<OsStr>, others: u32) -> Result<Self, Error> {
        let name = self.name(name.as_ref())?;
        Self::beneath(self.again()?, &self.path, name, Demand::own_but(others))
    }

    /// Opens a directory in it, and makes it if there is none.
    ///
    /// # Errors
    /// As [`OwnDirectory::open`], and when it cannot be made.
    pub fn directory_or_make(&self, name: impl AsRef<OsStr>, others: u32) -> Result<Self, Error> {
        make(&self.descriptor, &self.path, self.name(name.as_ref())?)?;
        self.directory_allowing(name, others)
    }

    /// Makes a new directory in it; nothing if the name is taken.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn make_new(&self, name: impl AsRef<OsStr>) -> Result<Option<Self>, Error> {
        if make(&self.descriptor, &self.path, self.name(name.as_ref())?)? {
            return self.directory(name).map(Some);
        }
        Ok(None)
    }

    /// The names in it, in order.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn names(&self) -> Result<Vec<OsString>, Error> {
        let entries = Dir::read_from(&self.descriptor).map_err(Error::system("reading the directory", &self.path))?;
        let mut names = Vec::new();
        for entry in entries {
            let entry = entry.map_err(Error::system("reading the directory", &self.path))?;
            let name = OsStr::from_bytes(entry.file_name().to_bytes());
            if is_name(name) {
                names.push(name.to_owned());
            }
        }
        names.sort();
        Ok(names)
    }

    /// What has a name in it; of a link, the link.
    pub fn kind(&self, name: impl AsRef<OsStr>) -> Option<FileType> {
        let name = self.name(name.as_ref()).ok()?;
        let stat = rustix::fs::statat(&self.descriptor, name, AtFlags::SYMLINK_NOFOLLOW).ok()?;
        Some(FileType::from_raw_mode(stat.st_mode))
    }

    /// The size of what has a name in it, in bytes.
    pub fn size(&self, name: impl AsRef<OsStr>) -> Option<u64> {
        let name = self.name(name.as_ref()).ok()?;
        let stat = rustix::fs::statat(&self.descriptor, name, AtFlags::SYMLINK_NOFOLLOW).ok()?;
        u64::try_from(stat.st_size).ok()
    }

    /// Where a link of ours in it leads; nothing if there is none.
    pub fn link(&self, name: impl AsRef<OsStr>) -> Option<PathBuf> {
        let name = self.name(name.as_ref()).ok()?;
        let stat = rustix::fs::statat(&self.descriptor, name, AtFlags::SYMLINK_NOFOLLOW).ok()?;
        if stat.st_uid != geteuid().as_raw() {
            return None;
        }
        let target = rustix::fs::readlinkat(&self.descriptor, name, Vec::new()).ok()?;
        Some(PathBuf::from(OsStr::from_bytes(target.to_bytes())))
    }

    /// Puts a link into it in the place of one that had the name.
    ///
    /// # Errors
    /// When something that is no link has the name, or the system refuses.
    pub fn set_link(&self, name: impl AsRef<OsStr>, target: &Path) -> Result<(), Error> {
        let shown = self.path.join(name.as_ref());
        match self.kind(name.as_ref()) {
            None => {}
            Some(FileType::Symlink) => self.remove(name.as_ref())?,
            Some(_) => return Err(Error::not_ours(&shown, "it is no link of amberlog's; remove it")),
        }
        rustix::fs::symlinkat(target, &self.descriptor, self.name(name.as_ref())?)
            .map_err(Error::system("making the link", &shown))
    }

    /// Removes the directory itself, which has to be empty.
    ///
    /// # Errors
    /// When it is not, or the system refuses.
    pub fn remove_self(&self) -> Result<(), Error> {
        let name = self.path.file_name().unwrap_or_default();
        rustix::fs::unlinkat(&self.parent, name, AtFlags::REMOVEDIR)
            .map_err(Error::system("removing the directory", &self.path))
    }
}

impl AsFd for OwnDirectory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

/// Makes a directory. False if the name is taken.
fn make(parent: &OwnedFd, above: &Path, name: &OsStr) -> Result<bool, Error> {
    match rustix::fs::mkdirat(parent, name, Mode::RWXU) {
        Ok(()) => Ok(true),
        Err(Errno::EXIST) => Ok(false),
        // A file system that cannot be written to has it all the same, perhaps.
        Err(_) if rustix::fs::statat(parent, name, AtFlags::SYMLINK_NOFOLLOW).is_ok() => Ok(false),
        Err(error) => Err(Error::system("making the directory", &above.join(name))(error)),
    }
}

/// Whether somebody else can have put there what has this path.
pub fn is_in_shared_place(path: &Path) -> bool {
    std::path::absolute(path).ok().and_then(|path| path.parent().map(is_shared)).unwrap_or(true)
}

/// Whether others can put something into the directory with this path, or exchange it.
fn is_shared(path: &Path) -> bool {
    let Ok(path) = std::fs::canonicalize(path) else { return true };
    let Ok(descriptor) = descend(&path) else { return true };
    rustix::fs::fstat(descriptor).is_ok_and(|stat| stat.st_mode & 0o022 != 0)
}
