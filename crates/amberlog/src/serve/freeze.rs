//! A VM's disks held still for a moment, and images made of that moment: `amberlog freeze|thaw|snapshot`.
//!
//! Frozen, nothing is taken from the guest's rings, all that it had asked for is answered, every committed block that was held is home,
//! and storage is flushed: what is in the images is the state of the last commit. The guest waits, and goes on by itself when the
//! time is up, whoever died meanwhile. Must never: hold a guest beyond that time, or let a copy pass for one of a moment if the
//! guest went on before it was done. Failure story: what cannot be held is let go at once, and a copy that is not whole is removed.

use super::slot::Live;
use anyhow::{Context, bail, ensure};
use block_device::{DeviceHandle, Image};
use block_route::Route;
use jbd2::{Superblock, SuperblockEdit};
use placement::{HeldMark, MarkKind, PlacementKind};
use recovery::{Access, Disk, LogPlace, Status};
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

/// The longest that a guest can be held.
pub const HOLD_MAX: Duration = Duration::from_secs(600);
/// How often it is looked whether what was asked for is answered.
const LOOK: Duration = Duration::from_millis(2);
/// Bytes copied at once.
const PIECE_BYTES: usize = 1 << 20;
/// The error that amberlog's own mark puts into a journal superblock that had none (EIO, as jbd2 has it).
const MARK_ERRNO: i32 = -5;

/// Holds all disks of a VM for a time, and brings home what it is owed.
///
/// # Errors
/// When it is not quiet, or not all home, within half of the time; it goes on then.
pub fn freeze(live: &Live, time: Duration) -> anyhow::Result<()> {
    let until = Instant::now() + time.min(HOLD_MAX);
    let frozen = hold(live, until).and_then(|()| settle(live, Instant::now() + time.min(HOLD_MAX) / 2));
    if frozen.is_err() {
        thaw(live).context("letting the guest go on")?;
    }
    frozen
}

fn hold(live: &Live, until: Instant) -> anyhow::Result<()> {
    live.handles.iter().try_for_each(|handle| handle.hold(Some(until)).map(drop).map_err(Into::into))
}

fn settle(live: &Live, deadline: Instant) -> anyhow::Result<()> {
    for handle in &live.handles {
        while !handle.is_idle()? {
            ensure!(Instant::now() < deadline, "storage has not answered what the guest has asked for; it goes on");
            std::thread::sleep(LOOK);
        }
    }
    live.journals.write_home(deadline.saturating_duration_since(Instant::now()))?;
    Ok(())
}

/// Lets a VM go on. Says whether it was held until now.
///
/// # Errors
/// When it is not served any more.
pub fn thaw(live: &Live) -> anyhow::Result<bool> {
    let mut was_held = true;
    for handle in &live.handles {
        was_held &= handle.hold(None)?;
    }
    Ok(was_held)
}

/// Makes an image of what a disk has committed, ready to be used. Gives what was done to its journal.
///
/// # Errors
/// When the disk's journals are not in it or in memory, the image cannot be made, or the guest was not quiet; `out` is not there then.
pub fn snapshot(live: &Live, index: usize, out: &Path, time: Duration, may_wait: bool) -> anyhow::Result<Vec<String>> {
    let name = &live.journals.disk(index).options.name;
    for log in live.journals.logs().iter().filter(|log| log.home_disk() == index) {
        ensure!(
            log.journal_disk() == index,
            "the journal of disk {name} is another disk, and an image of one without the other is of no use: freeze the VM, and copy both"
        );
        ensure!(
            matches!(log.placement, PlacementKind::Retain | PlacementKind::Copy | PlacementKind::Storage),
            "the journal of disk {name} has placement {}: put it on storage first (amberlog placement)",
            log.placement.name()
        );
        ensure!(
            !log.is_distrusted(),
            "the journal of disk {name} is not what it seemed, and cannot be replayed: make the copy when its VM has ended"
        );
    }
    let of = || format!("making the image {}", out.display());
    let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(out).with_context(of)?;
    let made = copy_of_a_moment(live, &live.handles[index], &file, time, may_wait).and_then(|()| finish(out));
    if made.is_err() {
        let _ = std::fs::remove_file(out);
    }
    made.with_context(of)
}

fn copy_of_a_moment(
    live: &Live,
    handle: &DeviceHandle<dyn Route>,
    out: &File,
    time: Duration,
    may_wait: bool,
) -> anyhow::Result<()> {
    freeze(live, time)?;
    let copied = copy(handle.image(), out, may_wait);
    let was_held = thaw(live)?;
    copied?;
    ensure!(was_held, "the guest went on before the image was whole; give it more time (--patience)");
    Ok(())
}

/// Shares the blocks where the file system can do that, and copies them otherwise, if the guest may wait for it.
fn copy(image: &Image, out: &File, may_wait: bool) -> anyhow::Result<()> {
    match rustix::fs::ioctl_ficlone(out, image.file()) {
        Ok(()) => return Ok(()),
        Err(error) if !may_wait => bail!(
            "the file system cannot share blocks between the two ({error}), and the guest would wait until all of {} is copied; say \
             --wait if it may",
            image.path().display()
        ),
        Err(_) => {}
    }
    let mut from = image.reopen_buffered()?;
    let size_bytes = image.size_bytes();
    rustix::fs::ftruncate(out, size_bytes)?;
    let mut piece = vec![0; PIECE_BYTES];
    let mut at = 0;
    while at < size_bytes {
        // What is a hole there is one here.
        at = match rustix::fs::seek(&from, rustix::fs::SeekFrom::Data(at)) {
            Ok(data) => data,
            Err(rustix::io::Errno::NXIO) => break,
            Err(_) => at,
        };
        from.seek(SeekFrom::Start(at))?;
        let len = usize::try_from(size_bytes - at).unwrap_or(PIECE_BYTES).min(PIECE_BYTES);
        let got = from.read(&mut piece[..len])?;
        if got == 0 {
            break;
        }
        out.write_all_at(&piece[..got], at)?;
        at += got as u64;
    }
    Ok(())
}

/// Takes amberlog's marks off the copy's journals, which say that what was committed is elsewhere, and replays what is in them.
fn finish(out: &Path) -> anyhow::Result<Vec<String>> {
    let disk = Disk::open(out, Access::Write)?;
    let located = match recovery::locate(&disk, None) {
        Ok(located) => located,
        // No file system that is understood: as it is.
        Err(error) if error.is_refusal() => Vec::new(),
        Err(error) => return Err(error.into()),
    };
    for one in located.iter().filter(|one| matches!(one.log, LogPlace::Internal)) {
        let extents = one.file_system.journal.extents(&one.file_system.superblock);
        let first = extents.first().context("a journal has a first block")?;
        let at = one.file_system.offset + first.physical * u64::from(one.file_system.superblock.block_size);
        unmark(disk.file(), at)?;
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

fn unmark(file: &File, at: u64) -> io::Result<()> {
    let mut block = vec![0; jbd2::SUPERBLOCK_BYTES];
    file.read_exact_at(&mut block, at)?;
    let is_held = matches!(HeldMark::read(&block), HeldMark::Ours(MarkKind::Held, _));
    // An error that its guest has put there stays.
    let is_ours = is_held && Superblock::decode(&block).is_ok_and(|superblock| superblock.errno == MARK_ERRNO);
    if is_ours {
        SuperblockEdit::new(&mut block).map_err(io::Error::other)?.errno(0).seal();
        file.write_all_at(&block, at)?;
    }
    Ok(())
}
