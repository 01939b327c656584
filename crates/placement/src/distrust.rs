//! A log whose books were proven wrong while its guest runs (what proves it: crate `journal-area`, `contradiction`).
//!
//! What is right at that moment? Something between the file system and this disk sends blocks elsewhere, or the guest's kernel
//! does what nobody here knew of. So:
//!
//! * Nothing more is written home by us: where home is, is what is in doubt. What the guest's own tail has passed is on storage
//!   by its own word, wherever that is.
//! * What is held and live goes, block for block, to the log's own place, where it would be if nobody had held it. Data blocks
//!   that were let go because their content had reached the disk are read from where it was seen to arrive. The
//!   superblock comes last, after a flush, and says that the log begins where the books say it does.
//! * From there on every write of the guest to these blocks goes to storage as it is, whether it is a log write or the block of
//!   somebody above us, and every flush is passed on.
//! * Nobody here replays that log, now or after the VM's end. The guest's own kernel does at the next mount: it knows where its
//!   blocks are. The report says so, and that a contradiction was found.
//! * It stays so for as long as the VM lives, mounts and resets included, and after it: the journal superblock on storage says so
//!   when the VM has ended (`mark.rs`), for the next run and for `recover`; that of a log on a journal server at once, whoever has
//!   it then ([`crate::remote`]). A run that ends before it can write that begins with trust, and finds out again.
//!
//! Failure story: the area has marked the log's table before anything else happened, so that whoever finds it after a kill
//! brings it to its place in the same way, and replays nothing. Where storage fails, the log stays held, block for block, and storage is
//! told so again, whatever of it arrived there.

use crate::disk::{DiskCounters, PlacementKind};
use crate::finish::write_in_place;
use crate::journals::Journals;
use crate::kept_log::KeptLog;
use crate::left_to_guest::{held_again, say_beside};
use crate::scan::FoundLogPlace;
use crate::stored::Stored;
use block_route::LogIndex;
use jbd2::SUPERBLOCK_BYTES;
use journal_area::Taking;
use std::io;
use std::sync::Arc;

impl Journals {
    /// Takes the logs on this disk away whose books were proven wrong. Only the device with the log may call this, between two
    /// passes. What has to wait stays held, block for block, until the next call.
    pub(crate) fn distrust_on(&self, disk: usize) {
        for log in self.logs().into_iter().filter(|log| log.journal_disk == disk && log.is_held_open()) {
            let Some(why) = self.area.contradiction(log.id) else { continue };
            // A block on its way to its own place would be read there before it has arrived.
            if !log.keeper.may_be_taken(&log) || log.keeper.has_stored_in_flight() {
                continue;
            }
            say_beside(&self.area, &log, log.keeper.durability(&log).as_ref(), &why);
            if let Err(error) = self.distrust(log.index)
                && log.failed_to_leave()
            {
                log::error!(
                    "disk {}: writing the journal to its own place failed: {error}; it stays in memory, block for block",
                    log.journal.options.name
                );
            }
        }
        self.area.look_for_contradictions();
    }

    /// Takes one away. False when that has to wait. As with a hand-over storage is written under the log's own `recovering`.
    fn distrust(&self, index: LogIndex) -> io::Result<bool> {
        let Some(log) = self.log(index) else { return Ok(true) };
        let Ok(_alone) = log.state.recovering.try_lock() else { return Ok(false) };
        // It may have been recovered, or taken elsewhere, until a moment ago.
        let Some(log) = self.log(index).filter(|log| log.is_held_open()) else { return Ok(true) };
        let Some(taking) = self.area.take_distrusted(log.id) else { return Ok(false) };
        self.put_in_place(&log, taking)?;
        log.end_emptying(None);
        Ok(true)
    }

    /// Puts a log into its own place, block for block, where it stays open: its guest's own kernel replays it, or goes on with it. All that any
    /// superblock of its guest's can say is there: none is kept from storage. The caller has the log's `recovering`, and not `scanning`.
    pub(crate) fn put_in_place(&self, log: &Arc<KeptLog>, taking: Taking<'_>) -> io::Result<()> {
        // Nobody may write the mark over the superblock that goes to storage now.
        let marked = log.take_mark();
        let bytes = match write_in_place(&taking.log(), &log.place, &log.home.file, &log.journal.file) {
            Ok(report) => report.bytes_written,
            Err(error) => {
                let marked = marked.map(|marked| held_again(log, &taking, marked));
                drop(taking);
                log.put_mark_back(marked);
                log.home.wake.wake();
                return Err(io::Error::other(error));
            }
        };
        self.put_taken(log, taking, None);
        // Changes of homes may have waited.
        log.home.wake.wake();
        DiskCounters::add(&log.journal.counters.journal_bytes_to_storage, bytes);
        // Flushes were not passed on while it was held.
        log.home.set_dirty();
        log.journal.set_dirty();
        Ok(())
    }

    /// Whether an earlier run found a journal not to be what it seemed. Its guest is about to start.
    pub(crate) fn was_distrusted(&self, place: &FoundLogPlace) -> io::Result<bool> {
        let mut raw = [0; SUPERBLOCK_BYTES];
        let Some(offset) = place.offset_of(0) else { return Ok(false) };
        self.disk(place.journal_disk).file.read_exact_at(&mut raw, offset)?;
        if !Stored::read(&raw).is_distrusted {
            return Ok(false);
        }
        let disk = self.disk(place.home_disk);
        let sentence = format!(
            "the journal of the file system at byte {} was not what it seemed when amberlog served it before: it stays on storage \
             and is left to the guest; give the disk placement=storage, or, where nothing lies between that file system \
             and this disk any more, give the file system a new journal (tune2fs -O ^has_journal, then -j)",
            place.home_start
        );
        log::warn!("disk {}: {sentence}", disk.options.name);
        if disk.options.placement != PlacementKind::Storage {
            disk.note_fault(&sentence);
        }
        Ok(true)
    }
}
