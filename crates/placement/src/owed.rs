//! What an image is owed that is not on it: looked up before anybody calls it clean.
//!
//! Two things tell. The registry names the area in which the image's log is held; and the journal superblock on the image
//! carries amberlog's mark for as long as its log is elsewhere, whoever has the area and whether there still is one.
//! Nothing is changed here.

use crate::copies::LeftCopies;
use crate::description::{AreaDirectory, ImageDescription, LogDescription, image_key};
use crate::directory_error::DirectoryError;
use crate::disk::{Disk, DiskSettings, PlacementKind};
use crate::finish::dry_run_held;
use crate::finished::FinishError;
use crate::found::{area_opened_as, open_logs, was_opened_in};
use crate::held_mark::HeldMark;
use crate::mark::MarkKind;
use crate::registry::{
    LeftGuest, find_left, foreign_entries, forget_left, has_opening, note_left, own_place, own_places,
};
use crate::remote::{MarkFound, RemoteMark};
use crate::scan;
use crate::scan::{FoundLogPlace, offset_of};
use crate::stored::{Says, Stored};
use jbd2::{SUPERBLOCK_BYTES, Superblock};
use journal_area::FoundLog;
use std::collections::{BTreeSet, HashSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// What an image is owed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Owed {
    /// Nothing that anything here or on the image says.
    Nothing,
    /// Transactions that a killed amberlog left in an area, and how many, where that can be told.
    Held(PathBuf, Option<u64>),
    /// Something, perhaps, in an area that a process uses.
    InUse(PathBuf),
    /// An area holds the log of an image of which this one is a copy, or the same by another name.
    Copy(PathBuf),
    /// The image says that its log is elsewhere, and it was not found.
    Lost(Vec<LostLog>),
    /// Nothing; but a guest whose daemon has left it alone goes on with the image under the next one.
    Left(LeftGuest),
}

/// A log that its image says is elsewhere, and that was not found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LostLog {
    /// Where its file system begins, in bytes.
    pub offset: u64,
    /// The mark.
    pub mark: HeldMark,
    /// The error number on storage.
    pub errno: i32,
    /// Who else on this host says that he holds something for the image: his place, and his number.
    pub others: Vec<(PathBuf, u32)>,
}

/// Looks up what an image is owed, whose journal may be on a device of its own. Reads only, but for locks.
///
/// # Errors
/// When the image cannot be read, or what is held cannot be looked at.
pub fn owed(image: &Path, journal: Option<&Path>) -> Result<Owed, FinishError> {
    let images: Vec<&Path> = std::iter::once(image).chain(journal).collect();
    let places = own_places()?;
    if let Some(held) = held_in_any(&places, &images)? {
        return Ok(held);
    }
    for path in &images {
        if let Some(guest) = left_guest(path)? {
            return Ok(Owed::Left(guest));
        }
    }
    // By its mark: it was copied, moved or restored, or is here by another name.
    let lost = marks(&images)
        .map_err(|error| FinishError::Failed(format!("looking for amberlog's mark on {}: {error}", image.display())))?;
    for log in &lost {
        let HeldMark::Ours(MarkKind::Held | MarkKind::Aged, opening) = log.mark else { continue };
        let area = places.iter().find_map(|registry| area_opened_as(registry, &opening.number));
        if let Some(area) = area {
            return Ok(Owed::Copy(area));
        }
    }
    // What durability by age leaves is a file system by itself, whoever has what came later.
    let lost: Vec<LostLog> =
        lost.into_iter().filter(|log| !matches!(log.mark, HeldMark::Ours(MarkKind::Aged, _))).collect();
    let keys: Vec<String> = images.iter().filter_map(|path| image_key(path).ok()).collect();
    let others = keys.iter().flat_map(|key| foreign_entries(key));
    let others = others.map(|(place, user, _)| (place, user)).collect::<Vec<_>>();
    let lost: Vec<LostLog> = lost.into_iter().map(|log| LostLog { others: others.clone(), ..log }).collect();
    Ok(if lost.is_empty() { Owed::Nothing } else { Owed::Lost(lost) })
}

/// The guest that waits to go on with this image under another daemon, and lives.
///
/// # Errors
/// When others may have written what says so.
pub fn left_guest(image: &Path) -> Result<Option<LeftGuest>, DirectoryError> {
    let Ok(key) = image_key(image) else { return Ok(None) };
    for registry in own_places()? {
        if let Some(guest) = find_left(&registry, &key)? {
            return Ok(Some(guest));
        }
    }
    Ok(None)
}

/// Notes that a guest goes on with this image under the next daemon: until [`forget_left_guest`], or its end.
///
/// # Errors
/// When the image is gone, or that cannot be written.
pub fn note_left_guest(image: &Path, guest: &LeftGuest) -> Result<(), DirectoryError> {
    let key = image_key(image).map_err(|error| DirectoryError::system("looking for", image, error))?;
    note_left(&own_place(), &key, guest)
}

/// The guest that went on with this image is served again.
pub fn forget_left_guest(image: &Path) {
    let Ok(key) = image_key(image) else { return };
    own_places().unwrap_or_default().iter().for_each(|registry| forget_left(registry, &key));
}

/// The area, if a registry knows of one, of a VM that opened a journal of this image, or of one that it is a copy of.
///
/// # Errors
/// When the image cannot be read.
pub fn area_of_marked(registry: &Path, image: &Path) -> io::Result<Option<PathBuf>> {
    Ok(marks(&[image])?.iter().find_map(|log| match log.mark {
        HeldMark::Ours(MarkKind::Held | MarkKind::Aged, opening) => area_opened_as(registry, &opening.number),
        _ => None,
    }))
}

/// Those of these images, by their index, that have a part in a journal of which storage says that an area has it: its file system is on them, or
/// its own place.
///
/// # Errors
/// When an image cannot be read.
pub fn marked_for(area: &Path, images: &[&Path]) -> io::Result<BTreeSet<usize>> {
    let mut marked = BTreeSet::new();
    for (place, log) in marks_at(images)? {
        if let HeldMark::Ours(MarkKind::Held | MarkKind::Aged, opening) = log.mark
            && was_opened_in(area, &opening.number)
        {
            marked.extend([place.home_disk, place.journal_disk]);
        }
    }
    Ok(marked)
}

/// Why an image is not to be used although nothing of this user's holds anything for it: its journal was held in memory, and
/// another user of this host has the very log. Nothing if nobody does; that somebody only says so does not count.
///
/// # Errors
/// When the image cannot be read.
pub fn held_by_another(image: &Path) -> io::Result<Option<String>> {
    let Ok(key) = image_key(image) else { return Ok(None) };
    let others = foreign_entries(&key);
    if others.is_empty() {
        return Ok(None);
    }
    for log in marks(&[image])? {
        // What was made durable by age is whole by itself, and older than what that user has.
        let HeldMark::Ours(MarkKind::Held | MarkKind::Aged, opening) = log.mark else { continue };
        let has_it = |(_, user, area): &&(PathBuf, u32, Option<PathBuf>)| {
            area.as_deref().is_some_and(|area| has_opening(area, *user, &opening.number))
        };
        if let Some((place, user, _)) = others.iter().find(has_it) {
            let others = vec![(place.clone(), *user)];
            return Ok(Some(LostLog { others, ..log }.sentence(&image.display().to_string())));
        }
    }
    Ok(None)
}

/// What is held for images in any area that is named for one of them. One in front may be in use and hold nothing (its VM waits for its guest, or
/// has given the image up), or be what a start that was killed has left: one behind it is looked at all the same, and what that is known to hold
/// comes before what is not known.
fn held_in_any(registries: &[PathBuf], images: &[&Path]) -> Result<Option<Owed>, FinishError> {
    let mut in_use = None;
    for (registry, image) in registries.iter().flat_map(|registry| images.iter().map(move |image| (registry, image))) {
        let mut looked_at = HashSet::new();
        while let Some(area) = AreaDirectory::find_but(registry, image, |area| looked_at.contains(area))? {
            match held_in(&area, registry, image) {
                Ok(Owed::Nothing) => {}
                Ok(found @ Owed::InUse(_)) => in_use = in_use.or(Some(found)),
                Ok(held) => return Ok(Some(held)),
                // It refuses the image by itself.
                Err(error) if in_use.is_some() => log::debug!("{}: {error}", area.display()),
                Err(error) => return Err(error),
            }
            looked_at.insert(area);
        }
    }
    Ok(in_use)
}

/// What an area holds for an image.
fn held_in(area: &Path, registry: &Path, image: &Path) -> Result<Owed, FinishError> {
    let directory = match AreaDirectory::take_over(area, registry) {
        Ok(directory) => directory,
        Err(DirectoryError::InUse { .. }) => return Ok(Owed::InUse(area.to_owned())),
        Err(error) if error.is_missing() => return Ok(Owed::Nothing),
        Err(error) => return Err(error.into()),
    };
    let Some(left) = open_logs(&directory)? else { return Ok(Owed::Nothing) };
    let key = image_key(image).ok();
    let is_its = |log: &LogDescription| key.is_some() && (log.home_key == key || log.journal_key == key);
    // Something of it is held there, and nobody can say what.
    if let Some((_, error)) = left.unreadable.into_iter().find(|(log, _)| is_its(log)) {
        return Err(error);
    }
    let open: Vec<_> = left.logs.iter().filter(|(log, found)| found.is_open() && is_its(log)).collect();
    if open.is_empty() {
        return Ok(Owed::Nothing);
    }
    let counts: Option<Vec<u64>> = open.iter().map(|(log, found)| transactions(log, found, image)).collect();
    Ok(Owed::Held(area.to_owned(), counts.map(|counts| counts.iter().sum())))
}

fn transactions(log: &LogDescription, found: &FoundLog, image: &Path) -> Option<u64> {
    // Blocks that are at their own place are on the disk with the log.
    let journal = if log.place.is_external { &log.journal_image } else { image };
    let file = write_log::LoggedFile::new(image_file::open(journal, false).ok()?, None);
    dry_run_held(&found.log(), &log.place, &file).ok().map(|report| report.transactions)
}

/// What no directory in tmpfs holds of the images that one is about: a sentence for each of their logs that is in a region of NVM or on a
/// journal server, which that directory's recovery leaves where it is. Only images that our own list names for it are opened, and only those
/// that are what they were. Reads only.
///
/// # Errors
/// When the description or an image cannot be read.
pub fn elsewhere(directory: &AreaDirectory) -> Result<Vec<(PathBuf, String)>, FinishError> {
    let images = directory.description()?.and_then(|description| description.images).unwrap_or_default();
    let is_its = |image: &ImageDescription| {
        image_key(&image.path).is_ok_and(|key| key == image.key) && directory.is_registered(&image.key)
    };
    let paths: Vec<PathBuf> = images.into_iter().filter(is_its).map(|image| image.path).collect();
    let has_copy = LeftCopies::of(directory).is_some_and(|copies| copies.is_any_owed());
    let or_from_copy = has_copy.then(|| {
        let shown = directory.path().display();
        format!("; where that server is lost, 'amberlog recover --area {shown} --from-copy' brings it home from the copy there")
    });
    elsewhere_of(&paths, &or_from_copy.unwrap_or_default()).map_err(|error| {
        FinishError::Failed(format!("looking for journals that are not in {}: {error}", directory.path().display()))
    })
}

fn elsewhere_of(images: &[PathBuf], or_from_copy: &str) -> io::Result<Vec<(PathBuf, String)>> {
    let disks = images.iter().map(|image| look_at(image)).collect::<io::Result<Vec<_>>>()?;
    let mut found = Vec::new();
    for place in scan::scan(&disks)?.all() {
        let Some(raw) = superblock_of(&disks, &place)? else { continue };
        let (image, offset) = (&images[place.home_disk], place.home_start);
        let at = image.display();
        let sentence = match (HeldMark::read(&raw), RemoteMark::read(&raw)) {
            (HeldMark::Ours(MarkKind::Nvm, _), _) => format!(
                "the journal of the file system at byte {offset} is in a region of NVM, and not finished by this: run \
                 'amberlog recover --disk {at} --nvm PATH' with the region that it was used with"
            ),
            (_, MarkFound::Live(_)) => format!(
                "the journal of the file system at byte {offset} is on a journal server, and not finished by this: run \
                 'amberlog recover --disk {at} --remote HOST:PORT/NAME'{or_from_copy}"
            ),
            _ => continue,
        };
        found.push((image.clone(), sentence));
    }
    Ok(found)
}

/// Those logs of these images that are in a region of NVM or on a journal server: of each the image that its file system is on, by its index, and what
/// storage says, which is something else whenever somebody has had it meanwhile.
///
/// # Errors
/// When an image cannot be read.
pub fn marked_elsewhere(images: &[&Path]) -> io::Result<Vec<(usize, [u8; SUPERBLOCK_BYTES])>> {
    let disks = images.iter().map(|image| look_at(image)).collect::<io::Result<Vec<_>>>()?;
    let mut marked = Vec::new();
    for place in scan::scan(&disks)?.all() {
        let Some(raw) = superblock_of(&disks, &place)? else { continue };
        if matches!(Stored::read(&raw).says, Says::Nvm(_) | Says::Remote(_)) {
            marked.push((place.home_disk, raw));
        }
    }
    Ok(marked)
}

/// The logs of an image that say that they are elsewhere.
fn marks(images: &[&Path]) -> io::Result<Vec<LostLog>> {
    Ok(marks_at(images)?.into_iter().map(|(_, log)| log).collect())
}

/// The same, and where each is: on which of these images.
fn marks_at(images: &[&Path]) -> io::Result<Vec<(FoundLogPlace, LostLog)>> {
    let disks = images.iter().map(|image| look_at(image)).collect::<io::Result<Vec<_>>>()?;
    let mut lost = Vec::new();
    for place in scan::scan(&disks)?.all() {
        let Some(raw) = superblock_of(&disks, &place)? else { continue };
        let mark = HeldMark::read(&raw);
        if let (true, Ok(superblock)) = (mark != HeldMark::None, Superblock::decode(&raw)) {
            let log = LostLog { offset: place.home_start, mark, errno: superblock.errno, others: Vec::new() };
            lost.push((place, log));
        }
    }
    Ok(lost)
}

/// An image as a disk that is only looked at.
fn look_at(image: &Path) -> io::Result<Arc<Disk>> {
    let disk = Disk::open(DiskSettings {
        name: image.display().to_string(),
        path: image.to_path_buf(),
        placement: PlacementKind::Storage,
        honour_flush: true,
        read_only: true,
        durable_within: None,
        write_log: None,
    })?;
    Ok(Arc::new(disk))
}

/// What storage has of a log's superblock.
fn superblock_of(disks: &[Arc<Disk>], place: &FoundLogPlace) -> io::Result<Option<[u8; SUPERBLOCK_BYTES]>> {
    let Some(offset) = offset_of(&place.runs, place.block_bytes, 0) else { return Ok(None) };
    let mut raw = [0; SUPERBLOCK_BYTES];
    disks[place.journal_disk].file.read_exact_at(&mut raw, offset)?;
    Ok(Some(raw))
}

impl Owed {
    /// What there is to say, and to do, about an image; nothing if it is owed nothing.
    pub fn sentence(&self, image: &Path) -> Option<String> {
        let image = image.display();
        match self {
            Owed::Nothing => None,
            Owed::Held(area, count) => {
                let area = area.display();
                let what = match count {
                    Some(1) => "1 transaction of this image is".to_owned(),
                    Some(count) => format!("{count} transactions of this image are"),
                    None => "transactions of this image are".to_owned(),
                };
                Some(format!(
                    "{what} held in {area}, and not on it; nothing was changed: run 'amberlog recover --area {area}'"
                ))
            }
            Owed::InUse(area) => Some(format!(
                "transactions of this image may be held in {}, which another amberlog or a VM it started uses; nothing was \
                 changed: end that first",
                area.display()
            )),
            Owed::Copy(area) => Some(format!(
                "the journal of this image was opened by the VM whose blocks are held in {}: it is that VM's image, moved or \
                 copied, or the same by another name; nothing was changed: run 'amberlog recover --area {} --image {image}'",
                area.display(),
                area.display()
            )),
            Owed::Left(guest) => Some(format!(
                "this image is in use: the guest of process {} (VM {}) goes on with it under the next amberlog, for which 'amberlog \
                 detach' has left it; nothing was changed: end that process, or start the daemon",
                guest.pid, guest.vm
            )),
            Owed::Lost(logs) => {
                let all: Vec<String> = logs.iter().map(|log| log.sentence(&image.to_string())).collect();
                Some(all.join("; "))
            }
        }
    }
}

impl LostLog {
    fn sentence(&self, image: &str) -> String {
        let offset = self.offset;
        let check = format!(
            "run 'e2fsck -f' on the file system at byte {offset} of {image}, which looks at all of it, before anybody uses it"
        );
        match self.mark {
            HeldMark::Ours(MarkKind::Dropped, _) => format!(
                "the journal of the file system at byte {offset} was dropped (placement=discard) while the file system was \
                 in use; nothing was changed: {check}"
            ),
            HeldMark::Ours(MarkKind::Held | MarkKind::Aged, _) => {
                let mut sentence = format!(
                    "the journal of the file system at byte {offset} carries amberlog's mark: it was held in memory, its \
                     transactions are not on this image, and nothing that this user holds has them; nothing was changed. "
                );
                match self.others.first() {
                    Some((place, user)) => {
                        sentence +=
                            &format!("User {user} has an entry for it in {}: run this as that user. ", place.display());
                    }
                    None => {
                        sentence += "Another user or another host may hold them, if the image was copied or moved from there; \
                                     recover there first. ";
                    }
                }
                sentence
                    + &format!(
                        "If the host has lost power or was started anew since, what was committed last is lost: {check}"
                    )
            }
            HeldMark::Ours(MarkKind::Nvm, _) => format!(
                "the journal of the file system at byte {offset} is in a region of NVM, and its transactions are not all on this \
                 image; nothing was changed: give the region that it was used with (--nvm PATH, or placement nvm=PATH). If that \
                 is gone, {check}"
            ),
            HeldMark::LeftToGuest => format!(
                "the journal of the file system at byte {offset} was found not to be what it seemed, by an amberlog that served it: \
                 something lies between that file system and this disk (device mapper, md, a cache), so only the guest's own \
                 kernel can replay it; nothing was changed: start the guest (placement=storage)"
            ),
            HeldMark::Plain | HeldMark::None => format!(
                "the journal of the file system at byte {offset} is empty and has an error number ({}), as when an amberlog held \
                 it elsewhere: in a region of NVM (then give --nvm PATH), or in memory that is gone; nothing was changed. If \
                 nothing holds it, {check}",
                self.errno
            ),
        }
    }
}
