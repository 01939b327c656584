//! Files in a directory of ours.

use crate::directory::OwnDirectory;
use crate::error::Error;
use rustix::fs::{FileType, Mode, OFlags, Stat};
use rustix::process::geteuid;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// What a file in memory is made of.
const PAGE_BYTES: u64 = 4096;

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

    /// As [`OwnDirectory::write`], into a file that an earlier call has put by with room for `reserve_bytes`: what is not
    /// longer than that, with what is there now, can be written where the file system is full, again and again, unless others take within the
    /// moment what the last one had.
    ///
    /// # Errors
    /// When the system refuses. What was put by is not given up then.
    pub fn write_from_reserve(&self, name: impl AsRef<OsStr>, bytes: &[u8], reserve_bytes: u64) -> Result<(), Error> {
        let shown = self.path().join(name.as_ref());
        let mut reserve = name.as_ref().to_owned();
        reserve.push(".new");
        let file = self.file(&reserve, How::WriteOrMake)?;
        let reserved = file.metadata().map_err(Error::system("examining", &shown))?.len();
        let written = file.write_all_at(bytes, 0).and_then(|()| file.set_len(bytes.len() as u64));
        if let Err(error) = written {
            // What did not fit keeps nothing of a full file system but what was put by before.
            let _ = file.set_len(reserved);
            return Err(Error::system("writing", &shown)(error));
        }
        self.rename(&reserve, name.as_ref())?;
        self.put_by(&reserve, reserve_bytes);
        Ok(())
    }

    /// Has a file of so many bytes there, or of as many as can be had. It is a precaution: that there is none is no error.
    fn put_by(&self, name: &OsStr, bytes: u64) {
        let Ok(file) = self.file(name, How::MakeNew) else { return };
        let takes = |bytes| rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, bytes).is_ok();
        let mut sizes =
            std::iter::successors(Some(bytes), |bytes| Some(bytes / 2)).take_while(|bytes| *bytes >= PAGE_BYTES);
        if !sizes.any(takes) {
            let _ = self.remove(name);
        }
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

    /// Gives a file another name in the same directory. False, and nothing was done, where something has that name.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn rename_to_new(&self, from: impl AsRef<OsStr>, to: impl AsRef<OsStr>) -> Result<bool, Error> {
        let shown = self.path().join(from.as_ref());
        let (from, to) = (self.name(from.as_ref())?, self.name(to.as_ref())?);
        match rustix::fs::renameat_with(self, from, self, to, rustix::fs::RenameFlags::NOREPLACE) {
            Ok(()) => Ok(true),
            Err(rustix::io::Errno::EXIST) => Ok(false),
            Err(error) => Err(Error::system("renaming", &shown)(error)),
        }
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    /// A file system of its own, taken away at the end.
    struct Small(tempfile::TempDir);

    impl Small {
        /// Nothing where this process may not mount.
        fn mounted(bytes: u64) -> Option<Self> {
            let small = Small(tempfile::tempdir().expect("a temporary directory"));
            let options = format!("size={bytes},mode=0700");
            let mut mount = Command::new("mount");
            let done = mount.args(["-t", "tmpfs", "-o", &options, "none"]).arg(small.0.path()).output();
            done.is_ok_and(|output| output.status.success()).then_some(small)
        }
    }

    impl Drop for Small {
        fn drop(&mut self) {
            let _ = Command::new("umount").arg("-l").arg(self.0.path()).output();
        }
    }

    #[test]
    fn a_file_is_written_anew_from_its_reserve_where_there_is_no_room() {
        let Some(small) = Small::mounted(1 << 20) else { return eprintln!("left out: this process may not mount") };
        let directory = OwnDirectory::open_or_make(small.0.path()).expect("it is ours");
        let say = |bytes: &[u8]| directory.write_from_reserve("text", bytes, 16 << 10);
        let said = || directory.read("text", 1 << 20).expect("read").expect("it is there");
        say(b"first").expect("there is room");
        // Somebody takes all that is left, and goes on taking.
        let mut other = directory.file("other", How::MakeNew).expect("made");
        let fill = |other: &mut File| while other.write_all(&[1; 4096]).is_ok() {};
        fill(&mut other);
        for len in [1_usize, 4096, 4097, 8 << 10, 9, 16 << 10, 100] {
            let text = vec![len.to_le_bytes()[0]; len];
            say(&text).unwrap_or_else(|error| panic!("{len} bytes: {error}"));
            assert_eq!(said(), text);
        }
        // Beyond what was put by it is an error, which loses neither the old nor the reserve.
        fill(&mut other);
        let len = other.metadata().expect("examined").len();
        other.set_len(len - (64 << 10)).expect("cut");
        say(&[2; 128 << 10]).expect_err("there is no room for that");
        assert_eq!(said(), vec![100; 100]);
        other.write_all_at(&[1; 64 << 10], len - (64 << 10)).expect("what did not fit has taken nothing");
        fill(&mut other);
        say(b"last").expect("its room is there still");
        assert_eq!(said(), b"last");
        // With nothing put by, as an earlier process left it, room is looked for.
        directory.remove("text.new").expect("removed");
        fill(&mut other);
        say(&[3; 8 << 10]).expect_err("there is none");
        drop(other);
        directory.remove("other").expect("removed");
        say(&[3; 8 << 10]).expect("there is");
        assert_eq!(said(), vec![3; 8 << 10]);
    }
}
