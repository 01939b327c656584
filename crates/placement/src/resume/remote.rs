//! A log that is shipped to a journal server: its worker has died, and another one goes on (`crate::remote` says how, and why that is
//! right).
//!
//! The description names the file with the copy of the log; the file says whether its guest has the log open. What must never
//! happen: that a log which its guest has open is taken for a closed one, or goes on without its copy. So a copy that says that
//! nobody has the log open is believed, and one that is open, has failed or lacks something is gone on with or refused.

use super::refused;
use crate::description::COPY_ENDING;
use crate::disk::PlacementKind;
use crate::journals::Journals;
use crate::kept_log::KeptLog;
use crate::left::Wish;
use crate::left_copy::LeftCopy;
use crate::remote::MirrorFile;
use crate::scan::FoundLogPlace;
use own_files::How;
use std::ffi::OsStr;
use std::io;
use std::sync::Arc;

impl Journals {
    /// What an earlier worker has left of a log that it shipped.
    pub(crate) fn take_left_copy(
        &self,
        place: &FoundLogPlace,
        configured: PlacementKind,
        wish: Option<&Wish>,
    ) -> io::Result<Option<LeftCopy>> {
        let Some(wish) = wish else { return Ok(None) };
        let name = match &wish.copy {
            None if configured == PlacementKind::Remote => {
                return Err(refused(format!(
                    "disk {}: the journal of the file system at byte {} was shipped to a server by an earlier amberlog, which \
                     kept no copy of it for another worker",
                    self.disk(place.home_disk).options.name,
                    place.home_start
                )));
            }
            None => return Ok(None),
            Some(name) if name.is_empty() => return Ok(None),
            Some(name) => name.clone(),
        };
        if !name.ends_with(COPY_ENDING) {
            return Err(refused(format!("{name} is no name of a journal's copy")));
        }
        let opened = self.directory().directory().file(OsStr::new(&name), How::Write).map_err(io::Error::other);
        let file = opened.and_then(|file| MirrorFile::take_up(file, place));
        let file = file
            .map_err(|error| refused(format!("the copy {name} of a journal that was shipped to a server: {error}")))?;
        let copy = LeftCopy { name, file: Arc::new(file) };
        if configured != PlacementKind::Remote {
            LeftCopy::refuse_if_open(Some(&copy), "is not to be any more")?;
            return Ok(None);
        }
        Ok(Some(copy))
    }

    /// Says whether this is a log that was shipped, open or not: then it is as it was.
    pub(super) fn resume_shipped(&self, log: &Arc<KeptLog>) -> bool {
        if log.keeper.copy_name().is_none() {
            return false;
        }
        let (name, at) = (&log.home.options.name, log.place.home_start);
        if log.keeper.was_taken_up(log) {
            log.set_open();
            log::info!("disk {name}: the journal of the file system at byte {at} goes on, by way of storage");
        } else {
            log::info!("disk {name}: the journal of the file system at byte {at} is not in use");
            self.follow_wish(log);
        }
        true
    }
}
