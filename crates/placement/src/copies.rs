//! Copies of journals that were on a server, in the directory of a VM whose processes are gone: what the server has is there, too, and
//! this is what there is where the server is lost.
//!
//! Which image a copy belongs to is told by the journal superblock on storage, which has to be as the copy says that it may be, to the last
//! byte but for a claim of who was about to recover it from its server; and only the very files are looked at that the registry has for this
//! directory, or that the caller names. What is on storage by itself, or was brought home since, or taken by somebody else, is owed nothing
//! from here.
//!
//! Failure story: an image may be exchanged at any moment by whoever can write where it lies. What is looked at is opened without waiting for
//! it, and has to be a file or a block device; what is written to is the very file that is locked, or nothing is written.

use crate::description::COPY_ENDING;
use crate::description::{AreaDirectory, Description, ImageDescription, WishDescription, image_key, is_at};
use crate::disk::Disk;
use crate::earlier::open_left;
use crate::finished::{FailedLog, Finish, FinishError, FinishedLog};
use crate::remote::{MirrorFile, finish_from_copy};
use crate::scan::{self, FoundLogPlace, offset_of};
use jbd2::SUPERBLOCK_BYTES;
use own_files::How;
use std::ffi::OsStr;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A copy that its directory describes.
pub(crate) struct LeftCopies<'d> {
    directory: &'d AreaDirectory,
    description: Description,
}

impl<'d> LeftCopies<'d> {
    /// Those of a directory; none where it describes nothing.
    pub fn of(directory: &'d AreaDirectory) -> Option<Self> {
        let description = directory.description().ok().flatten()?;
        Some(LeftCopies { directory, description })
    }

    /// The images that the directory is about, as far as they are what they were, and those that are `named`.
    fn images(&self, named: &[PathBuf]) -> Vec<PathBuf> {
        let mut images: Vec<PathBuf> = Vec::new();
        let mut keys = Vec::new();
        for path in named {
            if let Ok(key) = image_key(path)
                && !keys.contains(&key)
            {
                keys.push(key);
                images.push(path.clone());
            }
        }
        for image in self.description.images.iter().flatten() {
            if !keys.contains(&image.key) && self.is_as_it_was(image) {
                images.push(image.path.clone());
            }
        }
        images
    }

    fn is_as_it_was(&self, image: &ImageDescription) -> bool {
        self.directory.is_registered(&image.key) && image_key(&image.path).is_ok_and(|key| key == image.key)
    }

    /// Each copy with its log's place, if it can be read.
    fn copies(&self) -> impl Iterator<Item = (&WishDescription, &str, io::Result<MirrorFile>)> {
        self.description.wishes.iter().filter_map(|wish| {
            let name = wish.copy.as_deref().filter(|name| name.ends_with(COPY_ENDING))?;
            if !(1024..=65536).contains(&wish.place.block_bytes) {
                return None;
            }
            let opened = self.directory.directory().file(OsStr::new(name), How::Write).map_err(io::Error::other);
            Some((wish, name, opened.and_then(|file| MirrorFile::take_up(file, &wish.place))))
        })
    }

    /// The image whose journal superblock is as a copy's process left it, if the copy may be the last that has all of the log.
    fn owed<'i>(&self, images: &'i [PathBuf], place: &FoundLogPlace, copy: &MirrorFile) -> Option<&'i Path> {
        let offset = offset_of(&place.runs, place.block_bytes, 0)?;
        let said = copy.says();
        let is_its = |image: &&PathBuf| {
            let mut stored = [0; SUPERBLOCK_BYTES];
            // Whoever can write in its directory may have put a pipe there since.
            let read = image_file::open(image, false).and_then(|file| file.read_exact_at(&mut stored, offset));
            read.is_ok() && (said.is_owed(&stored) || said.is_claimed(&stored))
        };
        images.iter().find(is_its).map(PathBuf::as_path)
    }

    /// Says of a copy that was left open that an image which may be owed it was not looked at: it is not where it was, or another file, or the
    /// registry does not have it for this directory.
    fn not_looked_at(
        &self,
        images: &[PathBuf],
        wish: &WishDescription,
        name: &str,
        copy: &MirrorFile,
    ) -> Option<FailedLog> {
        let is_looked_at = |image: &ImageDescription| {
            images.iter().any(|path| image_key(path).is_ok_and(|key| key == image.key) || is_at(path, &image.path))
        };
        if !copy.says().is_left_open() || !self.may_be_owed(&wish.place, copy) {
            return None;
        }
        let image = self.description.images.iter().flatten().find(|image| !is_looked_at(image))?;
        let (at, path) = (self.directory.path().display(), image.path.display());
        let error = FinishError::Refused(format!(
            "{at}/{name} may be the last copy of a journal that was on a server, and {path}, which may be owed it, was not looked at: it is \
             not there, or another file than it was, or amberlog's list of this user's images does not have it for that directory; nothing \
             was changed: say where it is with 'amberlog recover --area {at} --from-copy --image {path}'"
        ));
        Some(FailedLog::of_copy(&image.path, wish.place.home_start, name, error))
    }

    /// Whether one of them may be the last whole one of its log. What cannot be told is taken for that: an image that is not where it was,
    /// a copy that cannot be read. Who has the image now does not matter, only what is on it.
    pub fn is_any_owed(&self) -> bool {
        let Ok(names) = self.directory.directory().names() else { return true };
        self.copies().any(|(wish, name, copy)| match copy {
            _ if !names.iter().any(|other| other == name) => false,
            Ok(copy) => copy.says().is_left_open() && self.may_be_owed(&wish.place, &copy),
            Err(_) => true,
        })
    }

    fn may_be_owed(&self, place: &FoundLogPlace, copy: &MirrorFile) -> bool {
        let Some(offset) = offset_of(&place.runs, place.block_bytes, 0) else { return true };
        let said = copy.says();
        let Some(images) = self.description.images.as_deref() else { return true };
        images.iter().any(|image| {
            let mut stored = [0; SUPERBLOCK_BYTES];
            let is_there = image_key(&image.path).is_ok_and(|key| key == image.key);
            // Whoever can write in its directory may have put a pipe there since.
            let read = image_file::open(&image.path, false).and_then(|file| {
                let end = rustix::fs::seek(&file, rustix::fs::SeekFrom::End(0))?;
                // Too short for this log, it is another disk of the VM.
                let is_there = offset.checked_add(SUPERBLOCK_BYTES as u64).is_some_and(|needed| needed <= end);
                if is_there { file.read_exact_at(&mut stored, offset) } else { Ok(()) }
            });
            !is_there || read.is_err() || said.may_be_owed(&stored)
        })
    }
}

/// Brings home every journal that was on a server and of which a directory has the last copy. It can be removed afterwards if none failed.
/// `named` are images that the caller says may be owed something, where they are by now.
///
/// # Errors
/// When the directory cannot be read. What concerns one journal only does not keep the others from being finished.
pub fn finish_copies(directory: &AreaDirectory, named: &[PathBuf]) -> Result<Finish, FinishError> {
    let mut outcome = Finish::default();
    let Some(left) = LeftCopies::of(directory) else { return Ok(outcome) };
    let images = left.images(named);
    for (wish, name, copy) in left.copies() {
        let Ok(copy) = copy else { continue };
        let Some(journal) = left.owed(&images, &wish.place, &copy) else {
            outcome.failed.extend(left.not_looked_at(&images, wish, name, &copy));
            continue;
        };
        match finish(&images, journal, &wish.place, name, copy) {
            Ok(mut log) => {
                log.recovery.notes.insert(0, format!("finished from {}", directory.path().join(name).display()));
                outcome.finished.push(log);
            }
            Err(error) => outcome.failed.push(FailedLog::of_copy(journal, wish.place.home_start, name, error)),
        }
    }
    Ok(outcome)
}

fn finish(
    images: &[PathBuf],
    journal: &Path,
    described: &FoundLogPlace,
    name: &str,
    copy: MirrorFile,
) -> Result<FinishedLog, FinishError> {
    // An external journal's file system is on another one.
    let candidates: Vec<&Path> =
        if described.is_external { images.iter().map(PathBuf::as_path).collect() } else { vec![journal] };
    // Locked until all is done.
    let locked = candidates.iter().map(|path| open_left(path)).collect::<Result<Vec<_>, _>>()?;
    let open = |image| Disk::open_locked(image, false).map(Arc::new);
    let disks = locked.iter().map(open).collect::<Result<Vec<_>, _>>()?;
    let not_looked_at =
        |error: io::Error| FinishError::Failed(format!("looking for the journal on {}: {error}", journal.display()));
    let found = scan::scan(&disks).map_err(not_looked_at)?;
    let is_it = |place: &&FoundLogPlace| {
        candidates[place.journal_disk] == journal
            && (place.home_start, place.is_external) == (described.home_start, described.is_external)
            && (place.block_bytes, place.log_blocks) == (described.block_bytes, described.log_blocks)
            && (&place.runs, place.file_system_uuid) == (&described.runs, described.file_system_uuid)
    };
    let place = found.logs.iter().find(is_it).ok_or_else(|| {
        FinishError::Refused(format!(
            "the file system at byte {} whose journal on {} has a copy in {name} is not found; nothing was changed",
            described.home_start,
            journal.display()
        ))
    })?;
    let of_log = [place.home_disk, place.journal_disk].map(|disk| Arc::clone(&disks[disk]));
    let recovery = finish_from_copy(name, place, of_log, copy)?;
    Ok(FinishedLog { image: candidates[place.home_disk].to_owned(), offset: place.home_start, recovery })
}
