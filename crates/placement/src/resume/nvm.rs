//! The logs of a VM whose worker has died that were in a region of NVM ([`crate::nvm`], `take_up`, has the table).

use crate::disk::PlacementKind;
use crate::journals::Journals;
use crate::keeper::TakenUp;
use crate::kept_log::KeptLog;
use crate::nvm::forget_notes;
use crate::scan::FoundLogPlace;
use crate::stored::{Says, Stored};
use jbd2::SUPERBLOCK_BYTES;
use recovery::Error;
use std::io;
use std::sync::Arc;

impl Journals {
    /// Whether every disk's region has room for the logs that are on the disk now.
    ///
    /// # Errors
    /// [`Error::Refused`] with a sentence when one has not.
    pub fn check_nvm_room(&self) -> Result<(), Error> {
        for log in self.logs() {
            if let (PlacementKind::Nvm, Some(nvm)) = (log.placement, self.region(log.home_disk)) {
                nvm.check_room(log.place.log_blocks, log.place.block_bytes)?;
            }
        }
        Ok(())
    }

    /// Whether an earlier worker of this VM has left a log in a region of its disk: storage says so, and there are regions.
    pub(crate) fn was_left_in_region(&self, place: &FoundLogPlace) -> io::Result<bool> {
        let disk = self.disk(place.home_disk);
        let Some(offset) = place.offset_of(0) else { return Ok(false) };
        if !self.directory().is_adopted()
            || disk.was_started()
            || self.region(place.home_disk).is_none()
            || place.is_external
        {
            return Ok(false);
        }
        let mut raw = [0; SUPERBLOCK_BYTES];
        self.disk(place.journal_disk).file.read_exact_at(&mut raw, offset)?;
        Ok(matches!(Stored::read(&raw).says, Says::Nvm(_)))
    }

    /// Goes on with a log that may be in a region. False when it is as storage says.
    pub(super) fn resume_in_region(&self, log: &Arc<KeptLog>, raw: &[u8; SUPERBLOCK_BYTES]) -> io::Result<bool> {
        let taken_up = log.keeper.take_up(log, raw).map_err(|error| {
            io::Error::other(format!(
                "disk {}: the journal of the file system at byte {} cannot be gone on with: {error}",
                log.home.options.name, log.place.home_start
            ))
        });
        let (taken_up, to_settle) = taken_up?;
        self.to_settle.lock().expect("no panic under this lock").extend(to_settle);
        match taken_up {
            TakenUp::AsStored => {
                if Stored::read(raw).says == Says::Empty {
                    // Who closed it is not known: a recovery under a guest that goes on, perhaps, which did not get to writing that down.
                    log.was_closed_under_the_guest_of_another();
                }
                return Ok(false);
            }
            TakenUp::Open => log.set_open(),
            TakenUp::Left(from) => {
                log.distrust();
                self.put(log, PlacementKind::Storage, Some(from));
                log.set_open();
            }
        }
        Ok(true)
    }

    /// What storage and the regions are still to say of them.
    pub(super) fn settle_regions(&self) -> io::Result<()> {
        let to_settle = std::mem::take(&mut *self.to_settle.lock().expect("no panic under this lock"));
        to_settle.into_iter().try_for_each(|settle| settle())
    }

    /// Nobody goes on with the notes on logs that are not in a region any more.
    pub(super) fn forget_notes(&self) {
        forget_notes((0..self.disks().len()).filter_map(|disk| self.region(disk)));
    }
}
