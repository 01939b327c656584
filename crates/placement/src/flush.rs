//! Writing home, while the guest runs, all that its journals owe: before a backup or a snapshot of its image.
//!
//! Under durability by age it is durable before it is home, and no age is waited for: the host's writes of what is not durable wait for a
//! compound (rule (a) of crate `durability`), and whatever waits so has it made at once. All goes home there, too, though the compound alone
//! would make it durable: who copies an image, or reads it without its journal, was promised that nothing is owed.
//!
//! It must never take a log from the guest nor make it wait: blocks go home as they do when memory is short. Nor may it say that all is
//! home where the books do not know what is committed. Failure story: what cannot be written stays owed, and the caller is told.

use crate::journals::Journals;
use crate::kept_log::KeptLog;
use journal_area::NotHome;
use std::io;
use std::time::{Duration, Instant};

const PAUSE: Duration = Duration::from_millis(2);
/// How often it is looked whether the guest has written home what only it can.
const LOOK: Duration = Duration::from_millis(100);
/// Committed blocks that are copied into memory for a snapshot at most, in bytes.
const UNKNOWN_BYTES_MAX: u64 = 256 << 20;

impl Journals {
    /// Has every committed block written home, and flushes the disks. Each log was seen to owe nothing at some moment of
    /// this call; a guest that goes on committing owes again right after. Returns how many blocks were owed at the
    /// beginning.
    ///
    /// # Errors
    /// When storage fails, or a log did not come to owe nothing within `patience`.
    pub fn write_home(&self, patience: Duration) -> io::Result<u64> {
        let deadline = Instant::now() + patience;
        let (held, owed): (Vec<_>, Vec<_>) =
            self.logs().into_iter().filter_map(|log| log.keeper.blocks_owed(&log).map(|blocks| (log, blocks))).unzip();
        let owed: Vec<u64> = owed;
        let seen: Vec<_> = held.iter().map(|log| log.begin_emptying()).collect();
        held.iter().for_each(|log| log.home.wake.wake());
        for (log, (emptied, failed)) in held.iter().zip(seen) {
            self.wait_for_empty(log, emptied, failed, deadline)?;
        }
        for disk in self.disks() {
            if !disk.options.read_only {
                disk.file.sync_data()?;
            }
        }
        // An image that was copied before this lacks what is not held any more.
        (0..self.disks().len()).for_each(|disk| self.tick(disk));
        Ok(owed.iter().sum())
    }

    /// Whether what the guests of a disk, or of all, have committed is at home where [`Journals::write_home`] has just been.
    ///
    /// # Errors
    /// A sentence where the home blocks are something else, though nobody has anything left to write there.
    pub fn check_all_home(&self, disk: Option<usize>) -> io::Result<()> {
        self.check_home(disk, |_| true)
    }

    /// The same, but for blocks of which only the guest knows whether they are home ([`Journals::versions_unknown`]).
    ///
    /// # Errors
    /// As [`Journals::check_all_home`].
    pub fn check_known_home(&self, disk: usize) -> io::Result<()> {
        self.check_home(Some(disk), |why| !matches!(why, NotHome::Unknown(_)))
    }

    /// Has all that is committed be home, as [`Journals::write_home`] and [`Journals::check_all_home`], under a guest that goes on: what only it
    /// can write home is waited for. Returns how many blocks were owed at the beginning.
    ///
    /// # Errors
    /// As theirs.
    pub fn write_all_home(&self, patience: Duration) -> io::Result<u64> {
        let deadline = Instant::now() + patience;
        let blocks = self.write_home(patience)?;
        while self.check_all_home(None).is_err() && Instant::now() < deadline {
            let is_only_unknown = (0..self.disks().len()).all(|disk| self.check_known_home(disk).is_ok());
            if !is_only_unknown {
                break;
            }
            std::thread::sleep(LOOK);
            if let Err(error) = self.write_home(deadline.saturating_duration_since(Instant::now())) {
                // The time was up while it was looked once more: what was waited for is what there is to say.
                return Err(self.check_all_home(None).err().unwrap_or(error));
            }
        }
        self.check_all_home(None)?;
        Ok(blocks)
    }

    /// What of a disk's held journals is committed, and is home or not, which only the guest knows: where in the image, and the content. What is
    /// home after [`Journals::write_home`] under these is the state of the last commit, as a recovery would leave it.
    ///
    /// # Errors
    /// A sentence when it is too much to be had.
    pub fn versions_unknown(&self, disk: usize) -> io::Result<Vec<(u64, Vec<u8>)>> {
        let mut all = Vec::new();
        for log in self.logs().iter().filter(|log| log.home_disk == disk && log.keeper.why_not_home(log).is_some()) {
            let unknown = self.area.versions_unknown(log.id, UNKNOWN_BYTES_MAX).ok_or_else(|| {
                io::Error::other(format!(
                    "disk {}: of more than {} MiB that its guest has committed only the guest knows whether they are home (another worker \
                     served it then): try again in a minute",
                    log.home.options.name,
                    UNKNOWN_BYTES_MAX >> 20
                ))
            })?;
            all.extend(unknown.into_iter().map(|(block, content)| (log.home_offset(block), content)));
        }
        Ok(all)
    }

    fn check_home(&self, disk: Option<usize>, matters: impl Fn(&NotHome) -> bool) -> io::Result<()> {
        let is_its = |log: &KeptLog| disk.is_none_or(|disk| log.home_disk == disk || log.journal_disk == disk);
        for log in self.logs().iter().filter(|log| is_its(log)) {
            if let Some(elsewhere) = log.keeper.lives_elsewhere(log) {
                return Err(io::Error::other(format!(
                    "disk {}: what the file system at byte {} has committed cannot be written home: its journal {elsewhere}; bring it to storage \
                     first (amberlog placement VM {} storage), or end the VM",
                    log.home.options.name, log.place.home_start, log.home.options.name
                )));
            }
            let Some(why) = log.keeper.why_not_home(log).filter(&matters) else { continue };
            let why = match why {
                NotHome::Uninterpreted => {
                    "only the guest's own kernel can replay the journal, which is held block for block: unmount the file system, or end \
                     the VM"
                        .to_owned()
                }
                NotHome::Torn => "the worker before this one died in the midst of a transaction: unmount the file system, or end the VM".to_owned(),
                NotHome::Stored(blocks) => format!(
                    "{blocks} blocks of the journal are in their own place on storage for want of memory: try again when the guest has \
                     written them home (sync in the guest helps), and make room in the tmpfs or raise --memory-budget"
                ),
                NotHome::Unknown(blocks) => format!(
                    "of {blocks} blocks only the guest knows whether they are home (another worker served it when they were committed, or they \
                     were being written): it writes them within a minute as a rule (sync in the guest helps); try again then"
                ),
            };
            return Err(io::Error::other(format!(
                "disk {}: what the file system at byte {} has committed cannot all be written home: {why}",
                log.home.options.name, log.place.home_start
            )));
        }
        Ok(())
    }

    fn wait_for_empty(&self, log: &KeptLog, emptied: u64, failed: u64, deadline: Instant) -> io::Result<()> {
        let name = &log.home.options.name;
        loop {
            // A log that was unmounted or handed over meanwhile owes nothing, too.
            let owed = self.log(log.index).and_then(|now| now.keeper.blocks_owed(&now));
            let Some(blocks) = owed.filter(|_| log.emptied().0 == emptied) else { return Ok(()) };
            if log.emptied().1 != failed {
                return Err(io::Error::other(format!("disk {name}: writing owed blocks home failed; they stay owed")));
            }
            if Instant::now() > deadline {
                log.end_emptying(None);
                return Err(io::Error::new(
                    io::ErrorKind::TimedOut,
                    format!(
                        "disk {name}: {blocks} blocks are still owed: storage is slow, or its guest commits as fast as they go home; wait \
                         longer (--patience), or freeze its file systems first (fsfreeze -f)"
                    ),
                ));
            }
            if !log.is_emptying() {
                // Somebody else waited, too, and does not any more.
                log.begin_emptying();
                log.home.wake.wake();
            }
            std::thread::sleep(PAUSE);
        }
    }
}
