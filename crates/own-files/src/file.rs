//! Files in a directory of ours.

use crate::directory::OwnDirectory;
use crate::error::Error;
use rustix::fs::{FileType, Mode, OFlags, Stat};
use rustix::process::geteuid;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

/// What a file is opened for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    /// Reading one that is there.
    Read,
    /// Reading and writing one that is there.
    Write,
    /// Reading and writing, made if it is not there.
    WriteOrMake,
    /// Reading and writing a new one: it is an error if the name is taken, by a link for one.
    MakeNew,
}

impl How {
    fn flags(self) -> OFlags {
        // No link is followed, and what is no file at all (a pipe, a device) is not waited for.
        OFlags::CLOEXEC
            | OFlags::NOFOLLOW
            | OFlags::NONBLOCK
            | OFlags::NOCTTY
            | match self {
                How::Read => OFlags::RDONLY,
                How::Write => OFlags::RDWR,
                How::WriteOrMake => OFlags::RDWR | OFlags::CREATE,
                How::MakeNew => OFlags::RDWR | OFlags::CREATE | OFlags::EXCL,
            }
    }
}

/// Whether an opened file is a plain one that only we can have made, under no other name.
///
/// # Errors
/// A sentence when it is not.
pub fn check_opened(file: impl AsFd, shown: &Path) -> Result<Stat, Error> {
    let stat = check_plain(file, shown)?;
    let us = geteuid().as_raw();
    if stat.st_uid != us {
        let owner = stat.st_uid;
        return Err(Error::not_ours(
            shown,
            format!("it belongs to user {owner}, not to user {us}, who runs amberlog; it is not used"),
        ));
    }
    Ok(stat)
}

/// Whether an opened file is a plain one, under no other name.
fn check_plain(file: impl AsFd, shown: &Path) -> Result<Stat, Error> {
    let stat = rustix::fs::fstat(file).map_err(Error::system("examining", shown))?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(Error::not_ours(shown, "it is no plain file; remove what is there"));
    }
    if stat.st_nlink > 1 {
        return Err(Error::not_ours(
            shown,
            format!(
                "it has {} names (hard links), so that it may be somebody else's file; it is not used",
                stat.st_nlink
            ),
        ));
    }
    Ok(stat)
}

impl OwnDirectory {
    /// Opens a file, and judges what was opened.
    ///
    /// # Errors
    /// When it is a link, no plain file, not ours, or has a second name; when the system refuses.
    pub fn file(&self, name: impl AsRef<OsStr>, how: How) -> Result<File, Error> {
        let (file, shown) = self.opened(name.as_ref(), how)?;
        check_opened(&file, &shown)?;
        Ok(file)
    }

    /// Opens a file that we made and may have given to another user to write to: only we can have given it its name here.
    ///
    /// # Errors
    /// As [`OwnDirectory::file`], but for whose it is.
    pub fn given_file(&self, name: impl AsRef<OsStr>, how: How) -> Result<File, Error> {
        let (file, shown) = self.opened(name.as_ref(), how)?;
        check_plain(&file, &shown)?;
        Ok(file)
    }

    fn opened(&self, name: &OsStr, how: How) -> Result<(File, PathBuf), Error> {
        let shown = self.path().join(name);
        let name = self.name(name)?;
        let mode = Mode::RUSR | Mode::WUSR;
        let file = match rustix::fs::openat(self, name, how.flags(), mode) {
            Ok(descriptor) => File::from(descriptor),
            Err(rustix::io::Errno::LOOP) => {
                return Err(Error::not_ours(&shown, "it is a link where a file belongs; remove it"));
            }
            // A socket, or a pipe that nobody reads.
            Err(rustix::io::Errno::NXIO) => {
                return Err(Error::not_ours(&shown, "it is no plain file; remove what is there"));
            }
            Err(error) => return Err(Error::system("opening", &shown)(error)),
        };
        Ok((file, shown))
    }

    /// Reads a whole file of at most `bytes_max`; nothing if there is none.
    ///
    /// # Errors
    /// As [`OwnDirectory::file`], and when it is longer.
    pub fn read(&self, name: impl AsRef<OsStr>, bytes_max: u64) -> Result<Option<Vec<u8>>, Error> {
        let shown = self.path().join(name.as_ref());
        let file = match self.file(name, How::Read) {
            Ok(file) => file,
            Err(error) if error.is_missing() => return Ok(None),
            Err(error) => return Err(error),
        };
        let mut bytes = Vec::new();
        file.take(bytes_max + 1).read_to_end(&mut bytes).map_err(Error::system("reading", &shown))?;
        if bytes.len() as u64 > bytes_max {
            return Err(Error::not_ours(&shown, format!("it has more than the {bytes_max} bytes that it can have")));
        }
        Ok(Some(bytes))
    }

    /// Puts a file with these bytes in the place of whatever had the name, in one step.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn write(&self, name: impl AsRef<OsStr>, bytes: &[u8]) -> Result<(), Error> {
        let shown = self.path().join(name.as_ref());
        let mut temporary = name.as_ref().to_owned();
        temporary.push(".new");
        self.remove(&temporary)?;
        let mut file = self.file(&temporary, How::MakeNew)?;
        let written = file.write_all(bytes).map_err(Error::system("writing", &shown));
        let written = written.and_then(|()| self.rename(&temporary, name.as_ref()));
        if written.is_err() {
            // A half of it would keep a file system full. That this fails, too, is no other news.
            let _ = self.remove(&temporary);
        }
        written
    }

    /// Gives a file another name in the same directory; what had that name goes.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn rename(&self, from: impl AsRef<OsStr>, to: impl AsRef<OsStr>) -> Result<(), Error> {
        let shown = self.path().join(from.as_ref());
        let (from, to) = (self.name(from.as_ref())?, self.name(to.as_ref())?);
        rustix::fs::renameat(self, from, self, to).map_err(Error::system("renaming", &shown))
    }

    /// Removes a name: of a link, the link. One that is not there is no error; a directory is one.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn remove(&self, name: impl AsRef<OsStr>) -> Result<(), Error> {
        let shown = self.path().join(name.as_ref());
        let name = self.name(name.as_ref())?;
        match rustix::fs::unlinkat(self, name, rustix::fs::AtFlags::empty()) {
            Ok(()) | Err(rustix::io::Errno::NOENT) => Ok(()),
            Err(error) => Err(Error::system("removing", &shown)(error)),
        }
    }
}
