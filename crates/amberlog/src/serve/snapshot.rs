//! Images made of one moment of a disk while its guest runs: `amberlog snapshot`.
//!
//! The VM is frozen ([`super::freeze`]) until the moment is there: blocks are shared with the new file where the file system can do that;
//! elsewhere the guest goes on at once, and what it writes over is copied first ([`image_moments`]). A moment has a name, and what was
//! written since can be had as an overlay of the image that was made then. The names are kept for the next worker, and end with the VM.
//!
//! Must never: let a copy pass for one of a moment that it is not of: the image has its name when it is whole, and another one before.
//! Failure story: a copy that fails is removed, and the guest goes on; with the worker a copy ends, and its unfinished file stays.

use super::freeze::{HOLD_MAX, freeze_for_copy, thaw};
use super::live::Live;
use crate::vm::moments::{Identity, Made, WrittenAt};
use crate::worker::Line;
use anyhow::{Context, bail, ensure};
use block_device::Image;
use image_moments::{Base, BlockSet, Changes, Moment, Overlay, Record, Source, Target};
use jbd2::{Superblock, SuperblockEdit};
use placement::{HeldMark, KeptLog, MarkKind, PlacementKind};
use recovery::{Access, Disk, FileLog, HomeBounds, LogBounds, LogPlace, Replay, Status};
use std::collections::hash_map::RandomState;
use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::hash::BuildHasher;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Bytes copied at once.
const PIECE_BYTES: usize = 1 << 20;
/// The error that amberlog's own mark puts into a journal superblock that had none (EIO, as jbd2 has it).
const MARK_ERRNO: i32 = -5;
/// What was asked for.
pub struct Wish<'w> {
    /// Where to.
    pub out: &'w Path,
    /// How long the guest may be held.
    pub time: Duration,
    /// Whether it may be held while everything is copied.
    pub may_wait: bool,
    /// The snapshot whose image has the rest.
    pub since: Option<&'w str>,
}

/// Makes an image of what a disk has committed, ready to be used. Gives its name, and what was done to its journal.
///
/// # Errors
/// When the disk's journals are not in it or in memory, the image cannot be made, or the guest was not quiet; there is no image then.
pub(super) fn snapshot(
    live: &Live,
    index: usize,
    wish: &Wish<'_>,
    line: &Line,
) -> anyhow::Result<(String, Vec<String>)> {
    let _asked = live.moments.asked();
    let name = &live.journals.disk(index).options.name;
    check_journals(live, index)?;
    // Before it waits for anything; once more when nobody can forget it.
    wish.since.map(|id| live.moments.find(name, id)).transpose()?;
    let of = || format!("making the image {}", wish.out.display());
    ensure!(!wish.out.exists(), "{}: there is something already", of());
    let mut unfinished = OsString::from(wish.out);
    unfinished.push(".unfinished");
    let unfinished = PathBuf::from(unfinished);
    let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&unfinished);
    let file = file
        .with_context(|| {
            format!("making {} (if it is of a copy that ended with its worker, remove it first)", unfinished.display())
        })
        .with_context(of)?;
    let made = make(live, index, wish, &unfinished, file, line);
    let made = made.and_then(|(id, notes)| {
        name_it(&unfinished, wish.out)?;
        Ok((id, notes))
    });
    if made.is_err() {
        let _ = std::fs::remove_file(&unfinished);
    }
    made.with_context(of)
}

/// Whether an image of a disk would have all of its journals.
fn check_journals(live: &Live, index: usize) -> anyhow::Result<()> {
    let name = &live.journals.disk(index).options.name;
    for log in logs(live, index) {
        ensure!(
            log.journal_disk() == index,
            "the journal of disk {name} is another disk, and an image of one without the other is of no use: freeze the VM, and copy both"
        );
        ensure!(
            matches!(log.placement, PlacementKind::Retain | PlacementKind::Copy)
                || log.is_on_storage().unwrap_or(false),
            "the journal of disk {name} has placement {}: put it on storage first (amberlog placement)",
            log.placement.name()
        );
        ensure!(
            !log.is_distrusted(),
            "the journal of disk {name} is not what it seemed, and cannot be replayed: make the copy when its VM has ended"
        );
    }
    Ok(())
}

/// A journal of a disk at the moment.
struct JournalPlace {
    /// Where its superblock is, and where its file system begins, in bytes.
    superblock: u64,
    file_system: u64,
    /// A guest has it open: a mark in its place is that of what is held for it, which is home.
    is_open: bool,
}

/// The journals of a disk whose VM is held.
fn journals_at_the_moment(live: &Live, index: usize) -> anyhow::Result<Vec<JournalPlace>> {
    // What was so before may not be so any more.
    check_journals(live, index)?;
    let source = live.handles[index].image().reopen_for_copy()?;
    let place = |log: Arc<KeptLog>| {
        let place = JournalPlace {
            superblock: log.offset_of(0).context("a journal has a first block")?,
            file_system: log.home_offset(0),
            is_open: log.is_open(),
        };
        let mut block = vec![0; jbd2::SUPERBLOCK_BYTES];
        source.read_exact_at(&mut block, place.superblock)?;
        ensure!(place.is_open || !is_marked(&block), is_elsewhere(place.file_system));
        Ok(place)
    };
    logs(live, index).into_iter().map(place).collect()
}

fn is_marked(block: &[u8]) -> bool {
    matches!(HeldMark::read(block), HeldMark::Ours(MarkKind::Held, _))
}

fn is_elsewhere(file_system: u64) -> String {
    format!(
        "the journal of the file system at byte {file_system} was held in memory, and is not held here: what was committed may be missing, and an \
         image would pass for whole; 'amberlog recover --disk' says what became of it, and a plain copy of the image keeps saying so"
    )
}

/// Of the file system that a disk's own image is on so much stays free.
const ROOM_LEFT_BYTES: u64 = 64 << 20;

/// Whether a copy leaves the guest room for what its image has not allocated yet.
fn check_room(image: &File, out: &File, bytes: u64) -> anyhow::Result<()> {
    if image.metadata()?.dev() != out.metadata()?.dev() {
        return Ok(());
    }
    let file_system = rustix::fs::fstatvfs(out)?;
    let free = file_system.f_bavail.saturating_mul(file_system.f_frsize);
    let needed = bytes.saturating_add(bytes / 16).saturating_add(ROOM_LEFT_BYTES);
    ensure!(
        free >= needed,
        "its copy could take the last of the file system that the disk's own image is on ({free} bytes are free, and {needed} wanted): its guest would \
         have errors; name a place elsewhere"
    );
    Ok(())
}

fn logs(live: &Live, index: usize) -> Vec<Arc<KeptLog>> {
    live.journals.logs().into_iter().filter(|log| log.home_disk() == index).collect()
}

/// Gives a file its name, and never takes another one's.
fn name_it(from: &Path, to: &Path) -> anyhow::Result<()> {
    use rustix::fs::{CWD, RenameFlags, renameat_with};
    match renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        // A file system that does not know how.
        Err(rustix::io::Errno::INVAL) => {
            ensure!(!to.exists(), "there is something already");
            std::fs::rename(from, to)?;
        }
        other => other?,
    }
    let directory = to.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    Ok(File::open(directory)?.sync_all()?)
}

const WENT_ON: &str = "the guest went on before the image was whole; give it more time (--patience)";

fn make(
    live: &Live,
    index: usize,
    wish: &Wish<'_>,
    path: &Path,
    out: File,
    line: &Line,
) -> anyhow::Result<(String, Vec<String>)> {
    let name = live.journals.disk(index).options.name.clone();
    let image = live.handles[index].image();
    let (freezing, base) = live.moments.freezing_with(&name, wish.since)?;
    ensure!(
        freezing.is_none_or(|until| Instant::now() >= until),
        "its VM is frozen: let it go on first (amberlog thaw), or copy its images as they are"
    );
    let until = Instant::now() + wish.time.min(HOLD_MAX);
    freeze_for_copy(live, wish.time, index)?;
    let begun = begin((live, index), (wish, until), base.as_ref(), &out, line);
    let begun = match begun {
        Ok(begun) => begun,
        Err(error) => {
            thaw(live)?;
            return Err(error);
        }
    };
    let target = match begun.source {
        None => {
            ensure!(thaw(live)?, WENT_ON);
            drop(freezing);
            Target::Whole(out)
        }
        Some((source, target)) => {
            let moment = Arc::new(Moment::new(source, image.size_bytes(), begun.wanted, target));
            // Until it is let go of, nobody else's freeze begins.
            let mut freezing = Some(freezing);
            let copied = begun.changes.keep_while(&moment, || -> anyhow::Result<()> {
                let is_wanted = live.moments.copies(&moment);
                ensure!(thaw(live)?, WENT_ON);
                freezing = None;
                is_wanted?;
                Ok(moment.copy()?)
            });
            let Some(copied) = copied else {
                thaw(live)?;
                drop(freezing);
                bail!("another snapshot of disk {name} is being made; wait for it");
            };
            copied?;
            // A writer may be about to let go of it.
            let mut moment = moment;
            loop {
                match Arc::try_unwrap(moment) {
                    Ok(moment) => break moment.into_target(),
                    Err(shared) => moment = shared,
                }
                std::thread::yield_now();
            }
        }
    };
    let (mut notes, is_overlay) = match target {
        // By its descriptor: the name may be another file's by now.
        Target::Whole(file) => {
            let replayed = |at: u64, len: u64| {
                // It has these as the journal has them, and the disk's own may be others, and newer ones: what was written past the journal.
                begun.changes.begins(at, len);
                begun.changes.ended(at, len);
            };
            let path = format!("/proc/self/fd/{}", file.as_raw_fd());
            (finish(Path::new(&path), &begun.unknown, &begun.journals, replayed)?, false)
        }
        Target::Overlay(mut overlay) => {
            let count = overlay.len();
            for (offset, content) in &begun.unknown {
                overlay.write(*offset, content)?;
            }
            finish_overlay(&mut overlay, &begun.journals)?;
            overlay.finish()?;
            (vec![format!("{count} blocks of 64 KiB")], true)
        }
    };
    let id = begun.id;
    let (file, written) = identity(path)?;
    let made = Made {
        id: id.clone(),
        since: begun.epoch,
        image: wish.out.to_owned(),
        is_overlay,
        file,
        written: Some(written),
    };
    if Arc::ptr_eq(&begun.record, &begun.changes.record()) {
        live.moments.keep(&name, &begun.changes, Some(made), line)?;
    } else {
        // Its epoch is one of a record that is not kept any more.
        notes.push("what was written meanwhile is not known, so none can be made of what was written since".to_owned());
    }
    Ok((id, notes))
}

/// Which file it is, and when it was written to last.
fn identity(path: &Path) -> io::Result<(Identity, WrittenAt)> {
    let metadata = std::fs::metadata(path)?;
    Ok(((metadata.dev(), metadata.ino(), metadata.len()), (metadata.mtime(), metadata.mtime_nsec())))
}

/// What is settled while a VM is frozen.
struct Begun {
    changes: Arc<Changes>,
    /// Where the epoch is counted.
    record: Arc<Record>,
    id: String,
    epoch: u16,
    wanted: Option<BlockSet>,
    journals: Vec<JournalPlace>,
    /// What is committed and belongs there, and is in the image or not.
    unknown: Vec<(u64, Vec<u8>)>,
    /// What is to be copied, and where to; nothing when the file has it all.
    source: Option<(Source, Target)>,
}

fn begin(
    (live, index): (&Live, usize),
    (wish, until): (&Wish<'_>, Instant),
    base: Option<&Made>,
    out: &File,
    line: &Line,
) -> anyhow::Result<Begun> {
    let disk = live.journals.disk(index);
    let image = live.handles[index].image();
    let journals = journals_at_the_moment(live, index)?;
    let changes = match image.changes() {
        Some(changes) => Arc::clone(changes),
        None => {
            let changes = Changes::new(Record::new().context("a record of what is written")?);
            Arc::clone(image.tell(Arc::new(changes)))
        }
    };
    disk.tell(&changes);
    let size_bytes = image.size_bytes();
    let mut epoch = changes.record().next_epoch().filter(|_| !changes.record().is_broken());
    if epoch.is_none() && base.is_none() {
        // Nothing is known of what was written since earlier ones any more, and nothing is under way.
        live.moments.forget(&disk.options.name);
        changes.begin_anew(Record::new().context("a record of what is written")?);
        epoch = changes.record().next_epoch();
    }
    let epoch = epoch
        .context("what was written since is not known any more; make a whole one (without --incremental-since)")?;
    live.moments.keep(&disk.options.name, &changes, None, line)?;
    // A random number of the kernel's.
    let id = format!("{:016x}", RandomState::new().hash_one(epoch));
    let record = changes.record();
    let unknown = live.journals.versions_unknown(index)?;
    for (offset, content) in &unknown {
        // The image that is made has it, and the disk's own may not: what is made of changes has it, and the next one looks again.
        changes.begins(*offset, content.len() as u64);
        changes.ended(*offset, content.len() as u64);
    }
    if let Some(base) = base {
        match identity(&base.image) {
            Ok((file, written)) => ensure!(
                file == base.file && base.written.is_none_or(|then| then == written),
                "{} is another file than the image that was made then, or was written to since; put that one back, or make a whole one \
                 (without --incremental-since)",
                base.image.display()
            ),
            // It may have been brought elsewhere.
            Err(error) => log::warn!("{}, which an overlay is made of, is not there ({error})", base.image.display()),
        }
        for journal in &journals {
            ensure!(
                is_empty_on_storage(image, journal)?,
                "the journal of disk {} has something in it on storage, which only a whole snapshot replays: leave --incremental-since out, or \
                 have the journal held in memory, with no durable-within (amberlog placement)",
                disk.options.name
            );
        }
    }
    // What is to be changed in an overlay (finish_overlay) has to be there whole: a partition may begin anywhere.
    let superblocks: Vec<(u64, usize)> = journals
        .iter()
        .flat_map(|journal| {
            let of_file_system = (journal.file_system + extfs::SUPERBLOCK_OFFSET, extfs::SUPERBLOCK_BYTES);
            [(journal.superblock, jbd2::SUPERBLOCK_BYTES), of_file_system]
        })
        .collect();
    let begun =
        |wanted, source| Begun { changes: Arc::clone(&changes), record, id, epoch, wanted, journals, unknown, source };
    if let Some(base) = base {
        let wanted = changes.record().since(base.since, size_bytes);
        let mut wanted = wanted
            .context("what was written since is not known any more; make a whole one (without --incremental-since)")?;
        superblocks.into_iter().for_each(|(at, len)| wanted.keep_together(at, len as u64));
        check_room(image.file(), out, wanted.len() * image_moments::BLOCK_BYTES)?;
        let overlay =
            Overlay::new(out.try_clone()?, size_bytes, Base { path: base.image.clone(), is_overlay: base.is_overlay })?;
        return Ok(begun(Some(wanted), Some((image.reopen_for_copy()?, Target::Overlay(overlay)))));
    }
    if rustix::fs::ioctl_ficlone(out, image.file()).is_ok() {
        return Ok(begun(None, None));
    }
    check_room(image.file(), out, image.file().metadata()?.blocks() * 512)?;
    rustix::fs::ftruncate(out, size_bytes)?;
    if wish.may_wait {
        copy(image, out, || {
            ensure!(!live.moments.is_over(), "its VM has ended");
            ensure!(Instant::now() < until, WENT_ON);
            Ok(())
        })?;
        return Ok(begun(None, None));
    }
    Ok(begun(None, Some((image.reopen_for_copy()?, Target::Whole(out.try_clone()?)))))
}

/// Copies all of a frozen disk, as long as it may go on.
fn copy(image: &Image, out: &File, may_go_on: impl Fn() -> anyhow::Result<()>) -> anyhow::Result<()> {
    let from = image.reopen_for_copy()?;
    let size_bytes = image.size_bytes();
    let mut piece = vec![0; PIECE_BYTES];
    let mut at = 0;
    while at < size_bytes {
        // What is a hole there is one here.
        at = match rustix::fs::seek(from.file(), rustix::fs::SeekFrom::Data(at)) {
            Ok(data) => data,
            Err(rustix::io::Errno::NXIO) => break,
            Err(_) => at,
        };
        may_go_on()?;
        let len = usize::try_from(size_bytes - at).unwrap_or(PIECE_BYTES).min(PIECE_BYTES);
        from.read_exact_at(&mut piece[..len], at)?;
        out.write_all_at(&piece[..len], at)?;
        at += len as u64;
    }
    Ok(())
}

/// Whether a journal has nothing in its place on storage.
fn is_empty_on_storage(image: &Image, journal: &JournalPlace) -> anyhow::Result<bool> {
    let mut block = vec![0; jbd2::SUPERBLOCK_BYTES];
    image.reopen_for_copy()?.read_exact_at(&mut block, journal.superblock)?;
    Ok(Superblock::decode(&block)?.is_empty())
}

/// Takes amberlog's marks off what an overlay has of its journals, and says that nothing is to be replayed. What it does not have is
/// its base's, where that was done.
fn finish_overlay(overlay: &mut Overlay, journals: &[JournalPlace]) -> anyhow::Result<()> {
    for journal in journals {
        let mut block = vec![0; jbd2::SUPERBLOCK_BYTES];
        overlay.edit(journal.superblock, &mut block, |block| unmarked(block).map(drop))?;
        let mut raw = vec![0; extfs::SUPERBLOCK_BYTES];
        overlay.edit(journal.file_system + extfs::SUPERBLOCK_OFFSET, &mut raw, |raw| {
            if extfs::Superblock::parse(raw).map_err(io::Error::other)?.check().is_ok() {
                extfs::SuperblockEdit::new(raw).map_err(io::Error::other)?.clear_needs_recovery().seal();
            }
            Ok(())
        })?;
    }
    Ok(())
}

/// Takes amberlog's marks off the copy's journals, which say that what was committed is elsewhere, replays what is in them, and then puts there
/// what was committed after that, and was held. Says where it has replayed something, in bytes. Fails where the copy has not all of the
/// disk's journals of that moment, or one that was not held here.
fn finish(
    out: &Path,
    held: &[(u64, Vec<u8>)],
    journals: &[JournalPlace],
    replayed: impl Fn(u64, u64),
) -> anyhow::Result<Vec<String>> {
    let disk = Disk::open(out, Access::Write)?;
    let located = match recovery::locate(&disk, None) {
        Ok(located) => located,
        // No file system that is understood: as it is.
        Err(error) if error.is_refusal() => Vec::new(),
        Err(error) => return Err(error.into()),
    };
    let mut open: Vec<&JournalPlace> = journals.iter().filter(|journal| journal.is_open).collect();
    for one in located.iter().filter(|one| matches!(one.log, LogPlace::Internal)) {
        let extents = one.file_system.journal.extents(&one.file_system.superblock);
        let first = extents.first().context("a journal has a first block")?;
        let at = one.file_system.offset + first.physical * u64::from(one.file_system.superblock.block_size);
        let is_open = open.iter().any(|journal| journal.superblock == at);
        open.retain(|journal| journal.superblock != at);
        unmark(disk.file(), at, is_open).with_context(|| is_elsewhere(one.file_system.offset))?;
        let file_system = &one.file_system;
        let mut log = FileLog::new(&disk, file_system);
        let replay = Replay::prepare(&mut log, LogBounds::new(file_system), &HomeBounds::new(file_system))?;
        let block_bytes = u64::from(file_system.superblock.block_size);
        for block in replay.plan().blocks() {
            replayed(file_system.offset + block.home() * block_bytes, block_bytes);
        }
    }
    if let Some(journal) = open.first() {
        bail!(
            "the file system at byte {} whose journal is held is not found on the disk any more: copy the image as it is",
            journal.file_system
        );
    }
    let mut notes = Vec::new();
    if !located.is_empty() {
        for report in recovery::recover_disk(&disk, None, recovery::Options::default())? {
            let result = report.result?;
            ensure!(
                matches!(result.status, Status::Clean | Status::Recovered | Status::None),
                "its journal is {}: {}",
                serde_json::to_value(result.status)?.as_str().unwrap_or("damaged"),
                result.notes.join("; ")
            );
            notes.push(format!("{} transactions replayed", result.transactions));
        }
        for (offset, content) in held {
            disk.file().write_all_at(content, *offset)?;
        }
        for one in located.iter().filter(|one| matches!(one.log, LogPlace::Internal)) {
            needs_no_recovery(disk.file(), one.file_system.offset)?;
        }
    }
    disk.file().sync_all()?;
    Ok(notes)
}

/// Says in a file system whose journal is empty now that nothing is to be replayed, as a clean unmount does: its guest had it mounted.
fn needs_no_recovery(file: &File, file_system: u64) -> anyhow::Result<()> {
    let at = file_system + extfs::SUPERBLOCK_OFFSET;
    let mut raw = vec![0; extfs::SUPERBLOCK_BYTES];
    file.read_exact_at(&mut raw, at)?;
    // A damaged one stays as it is, for e2fsck to see.
    if extfs::Superblock::parse(&raw)?.check().is_ok() {
        extfs::SuperblockEdit::new(&mut raw)?.clear_needs_recovery().seal();
        file.write_all_at(&raw, at)?;
    }
    Ok(())
}

fn unmark(file: &File, at: u64, is_held_here: bool) -> anyhow::Result<()> {
    let mut block = vec![0; jbd2::SUPERBLOCK_BYTES];
    file.read_exact_at(&mut block, at)?;
    ensure!(is_held_here || !is_marked(&block), "it has the mark of a journal in memory");
    if unmarked(&mut block)? {
        file.write_all_at(&block, at)?;
    }
    Ok(())
}

/// What may lie in the place of a journal that was made durable by age has numbers beyond the guest's, by as many as it began anew.
const NUMBERS_LEFT_OUT: u32 = 1 << 24;

/// Takes amberlog's mark out of a journal superblock, if it has one. The kernel that mounts the image goes on with a number that nothing
/// in the place of the journal has.
fn unmarked(block: &mut [u8]) -> io::Result<bool> {
    let is_held = is_marked(block);
    // An error that its guest has put there stays.
    let said = Superblock::decode(block).ok().filter(|superblock| is_held && superblock.errno == MARK_ERRNO);
    if let Some(said) = said {
        let sequence = said.sequence.wrapping_add(NUMBERS_LEFT_OUT);
        SuperblockEdit::new(block).map_err(io::Error::other)?.errno(0).sequence(sequence).seal();
    }
    Ok(said.is_some())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;
    use std::process::Command;

    #[test]
    fn where_an_image_is_not_as_its_disk_is_said() -> anyhow::Result<()> {
        let directory = tempfile::tempdir()?;
        let (image, data) = (directory.path().join("image"), directory.path().join("data"));
        let made = Command::new("mke2fs")
            .args(["-q", "-t", "ext4", "-b", "4096", "-J", "size=4"])
            .arg(&image)
            .arg("32M")
            .status()?;
        assert!(made.success());
        std::fs::write(&data, vec![b'j'; 2 * 4096])?;
        let commands = directory.path().join("commands");
        std::fs::write(&commands, format!("jo -c\njw -b 8000,8002 {}\njc\n", data.display()))?;
        assert!(Command::new("debugfs").args(["-w", "-f"]).arg(&commands).arg(&image).output()?.status.success());
        let places = RefCell::new(Vec::new());
        let notes = finish(&image, &[], &[], |at, len| places.borrow_mut().push((at, len)))?;
        assert_eq!(notes, ["1 transactions replayed"]);
        assert_eq!(places.into_inner(), [(8000 * 4096, 4096), (8002 * 4096, 4096)]);
        let mut block = [0; 4096];
        File::open(&image)?.read_exact_at(&mut block, 8002 * 4096)?;
        assert!(block.iter().all(|byte| *byte == b'j'), "it is replayed");
        Ok(())
    }
}
