//! Files that the user named and is to read: reports, traces. And the modes of all other files.

use crate::directory::is_in_shared_place;
use crate::error::Error;
use crate::file::check_opened;
use rustix::fs::{Mode, OFlags};
use rustix::process::umask;
use std::fs::File;
use std::path::Path;
use std::sync::OnceLock;

/// The user's own mask, once ours is set.
static USERS_MASK: OnceLock<Mode> = OnceLock::new();

/// From now on what this process makes is for its user alone, but for [`create_output`]. Gives the mask as it was, for
/// processes that are started for the user.
pub fn keep_files_private() -> Mode {
    *USERS_MASK.get_or_init(|| umask(Mode::RWXG | Mode::RWXO))
}

/// The same in a process that such a process has started, whose user has this mask.
pub fn keep_files_private_for(users_mask: Mode) {
    USERS_MASK.get_or_init(|| users_mask);
    umask(Mode::RWXG | Mode::RWXO);
}

/// Makes a file that the user named, or empties the one that is there. It has the mode that the user's mask gives.
///
/// In a directory that others can write to, only a new file or one of ours under one name is written: a link there may be
/// somebody else's and lead anywhere.
///
/// # Errors
/// When it cannot be made, or somebody else may have put it there.
pub fn create_output(path: &Path) -> Result<File, Error> {
    let file = open_output(path)?;
    // A terminal or a pipe has nothing that could be emptied.
    if file.metadata().is_ok_and(|metadata| metadata.is_file()) {
        file.set_len(0).map_err(Error::system("emptying", path))?;
    }
    Ok(file)
}

/// The same for one that is read, too, before it is written: nothing of what is in it goes.
///
/// # Errors
/// As [`create_output`].
pub fn open_output(path: &Path) -> Result<File, Error> {
    let absolute = std::path::absolute(path).map_err(Error::system("finding", path))?;
    let is_shared = is_in_shared_place(&absolute);
    let mode = Mode::from_raw_mode(0o666) & !USERS_MASK.get().copied().unwrap_or(Mode::empty());
    let new = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC | OFlags::NOCTTY;
    match rustix::fs::open(&absolute, new, mode) {
        Ok(descriptor) => {
            if USERS_MASK.get().is_some() {
                rustix::fs::fchmod(&descriptor, mode).map_err(Error::system("setting the mode of", path))?;
            }
            return Ok(File::from(descriptor));
        }
        Err(rustix::io::Errno::EXIST) => {}
        Err(error) => return Err(Error::system("making", path)(error)),
    }
    if !is_shared {
        // A terminal or a pipe can be written and not read.
        let open = |is_read| std::fs::OpenOptions::new().read(is_read).write(true).open(path);
        let opened = if absolute.is_file() { open(true).or_else(|_| open(false)) } else { open(false) };
        return opened.map_err(Error::system("opening", path));
    }
    let there = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOCTTY;
    let descriptor = match rustix::fs::open(&absolute, there, Mode::empty()) {
        Ok(descriptor) => descriptor,
        Err(rustix::io::Errno::LOOP) => {
            return Err(Error::not_ours(
                path,
                "it is a link in a directory that others can write to; it is not written through: name another file",
            ));
        }
        Err(rustix::io::Errno::NXIO) => {
            return Err(Error::not_ours(path, "it is no plain file, in a directory that others can write to"));
        }
        Err(error) => return Err(Error::system("opening", path)(error)),
    };
    check_opened(&descriptor, path)?;
    Ok(File::from(descriptor))
}
