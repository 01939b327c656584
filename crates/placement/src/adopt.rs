//! A guest that goes on from one amberlog to the next: the first hands its journals over to storage and leaves, the next
//! one takes the guest as it is.
//!
//! What must never happen: that the next one takes a log for empty, or for whole, of which the first one held anything. So the
//! first asserts that nothing is held before it leaves, and the next believes only what storage says: a log that is
//! live in its own place, or one that is empty and carries no mark. Failure story: anything else is refused with a
//! sentence, and the guest waits for its disks as if amberlog had been killed.

use crate::disk::PlacementKind;
use crate::journals::Journals;
use crate::keepers::keeper_of;
use crate::kept_log::KeptLog;
use crate::log::Log;
use crate::stored::{Elsewhere, Says};
use std::io;
use std::path::Path;
use std::sync::Arc;

impl Journals {
    /// Whether a guest could go on without this process: every log that is open is in its own place on storage.
    ///
    /// # Errors
    /// A sentence about the first log that is not.
    pub fn check_left(&self) -> io::Result<()> {
        for log in self.logs() {
            let is_elsewhere = log.is_open() && !log.keeper.leaves_nothing_here();
            if is_elsewhere || log.keeper.blocks_owed(&log).is_some() {
                return Err(io::Error::other(format!(
                    "disk {}: the journal of the file system at byte {} lives in placement {}, and cannot be left",
                    log.home.options.name,
                    log.place.home_start,
                    log.placement.name()
                )));
            }
        }
        Ok(())
    }

    /// Makes durable what was written to the images: the guest's next flush goes to another process.
    ///
    /// # Errors
    /// When storage fails: what had been written to that image may be lost, and its guest hears so at its next flush.
    pub fn flush_images(&self) -> io::Result<()> {
        (0..self.disks().len()).try_for_each(|disk| self.flush_image(disk))
    }

    /// The same of one image.
    ///
    /// # Errors
    /// As [`Journals::flush_images`].
    pub fn flush_image(&self, disk: usize) -> io::Result<()> {
        let disk = self.disk(disk);
        let flushed = if disk.options.read_only { Ok(()) } else { disk.file.sync_data() };
        flushed.map_err(|error| {
            let of = &disk.options;
            io::Error::new(
                error.kind(),
                format!(
                    "disk {}: flushing the image {} failed, and what its guest had written last may be lost: {error}",
                    of.name,
                    of.path.display()
                ),
            )
        })
    }

    /// Whether a flush of this disk has failed, and its guest was not told: storage does not say so again, so whoever serves it next has to.
    pub fn has_untold_failure(&self, disk: usize) -> bool {
        let disk = self.disk(disk);
        disk.failed_flushes() > disk.told_failures()
    }

    /// An amberlog that served this disk before has seen a flush fail, as the sentence says, and left before its guest had heard of it: the
    /// guest's next flush fails. After [`Journals::adopt`].
    pub fn owes_failure(&self, disk: usize, sentence: &str) {
        self.disk(disk).note_fault(sentence);
        self.disk(disk).note_failed_flush();
    }

    /// Where the superblocks of the file systems on a disk are, and of the journals whose logs are on it, in bytes: blocks that
    /// whoever makes, checks, mounts or replays such a file system writes to.
    pub fn superblock_places(&self, disk: usize) -> Vec<u64> {
        let mut places = Vec::new();
        for log in self.logs() {
            if log.home_disk == disk {
                places.push(log.place.home_start + extfs::SUPERBLOCK_OFFSET);
            }
            if log.journal_disk == disk {
                places.extend(log.offset_of(0));
            }
        }
        places.sort_unstable();
        places.dedup();
        places
    }

    /// Takes a guest that another amberlog served and left: its logs are on storage, and stay there until the next mount.
    /// Before any of its devices is started.
    ///
    /// # Errors
    /// When what storage says of a log is not what that amberlog would have left. Nothing was changed on storage.
    pub fn adopt(&self) -> io::Result<()> {
        let _one_at_a_time = self.scanning.lock().expect("no panic under this lock");
        let logs = self.logs();
        let found = logs.iter().map(|log| self.find_left(log)).collect::<io::Result<Vec<_>>>()?;
        let mut copies = Vec::new();
        for (log, live_from) in logs.iter().zip(found) {
            let Some(sequence) = live_from else { continue };
            if log.placement == PlacementKind::Remote {
                // A copy on a server would begin in the midst: that way is open again when the VM is started anew.
                log.want(PlacementKind::Storage);
            }
            let on_storage = KeptLog {
                log: Log { placement: PlacementKind::Storage, storage_from: Some(sequence), ..log.log.clone() },
                keeper: keeper_of(&self.area, log.id, PlacementKind::Storage, &log.home, None),
            };
            on_storage.set_open();
            log.keeper.leave();
            copies.extend(log.keeper.copy_name().map(str::to_owned));
            self.replace_log(Arc::new(on_storage));
        }
        self.describe()?;
        // Nothing says any more that they are there.
        for name in copies {
            if let Err(error) = self.directory().directory().remove(name) {
                log::warn!("{error}");
            }
        }
        for disk in self.disks() {
            disk.set_started();
        }
        Ok(())
    }

    /// Where the file systems of a disk begin whose guest may go on with a journal that storage says is empty ([`crate::unannounced`]).
    pub fn may_go_on_unannounced(&self, disk: usize) -> Vec<u64> {
        let may = |log: &Arc<KeptLog>| !log.is_open() && log.may_go_on_unannounced();
        self.logs_at_home(disk).iter().filter(|log| may(log)).map(|log| log.place.home_start).collect()
    }

    /// An amberlog that served this disk before has left these so. After [`Journals::adopt`].
    pub fn awaits_unannounced(&self, disk: usize, home_starts: &[u64]) {
        for log in self.logs_at_home(disk) {
            if !log.is_open() && home_starts.contains(&log.place.home_start) {
                log.was_closed_under_the_guest_of_another();
            }
        }
    }

    /// These images are this VM's from now on, which it had not looked at, and a guest comes with them that was stopped elsewhere: its logs are
    /// looked for, and taken as they are on storage.
    ///
    /// # Errors
    /// When an image cannot be read, or what storage says of a log is not what that guest's daemon has left.
    pub fn arrive(&self, images: &[&Path]) -> io::Result<()> {
        self.look_again(images)?;
        self.adopt()
    }

    /// These images are this VM's from now on, which it had not looked at: its logs are looked for.
    ///
    /// # Errors
    /// When an image cannot be read or noted.
    pub fn look_again(&self, images: &[&Path]) -> io::Result<()> {
        self.directory().register_missing(images);
        self.scan_all()?;
        self.check_durable_within()
    }

    /// The transaction with which a log in its own place begins; nothing for one that is empty.
    fn find_left(&self, log: &Log) -> io::Result<Option<u32>> {
        let refuse = |what: &str| {
            Err(io::Error::other(format!(
                "disk {}: the journal of the file system at byte {} {what}: its guest cannot go on here; end the VM, and \
                 what it is owed is looked for",
                log.home.options.name, log.place.home_start
            )))
        };
        let stored = log.stored()?;
        match (stored.says, stored.live_from()) {
            // What came after it was in that amberlog's memory.
            (Says::Aged(..), _) => refuse("was made durable by age, and what was committed last is not on storage"),
            (_, Ok(live_from)) => Ok(live_from.map(|tail| tail.sequence)),
            (Says::NoJournal(_), _) => refuse("cannot be read on storage"),
            (_, Err(Elsewhere)) => refuse("is marked on storage as held elsewhere, or with an error"),
        }
    }
}
