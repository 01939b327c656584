//! A VM whose worker has died, and that goes on in another one: what was held stays held.
//!
//! The directory in tmpfs says which logs are held and what was wished of each, the tables where each block is, storage what the marks
//! and the logs in their own places are. What must never happen: that a log is taken for empty, for closed or for another one while it
//! owes something. So a log counts as held only if table, description and the mark on storage agree; anything else is refused, and the
//! VM is left to the recovery that follows its VMM's death. Failure story: nothing is changed on storage before all of that was
//! compared, of every log, and whatever else can fail is over ([`Journals::go_on`]), but for blocks of a log that storage calls empty; what was
//! not taken up stays described.
//!
//! What the books of a log that was held say, and what storage says, mean together (the first row that fits counts; anything else is
//! refused):
//!
//! Where a log was made durable by age beside being held, it stays so, and the table counts as if storage said that it is held: what is
//! durable is read from storage (`followed`), what is not becomes so first, and no commit that was not answered is answered
//! before. Where that is not wished any more, or cannot be and an age was promised, storage is made to say, as the last thing,
//! that the log is only held. Until then storage has what was durable: a guest that nobody goes on with keeps it through a loss of power.
//!
//! | row | table | storage | the worker died |
//! |---|---|---|---|
//! | 1 | open | this opening's mark | while the log was held |
//! | 2 | open, says where it was to be handed over | live from just there | at the end of a hand-over: all of it is on storage |
//! | 3 | open, nothing in it, storage was not seen to say so | no mark of this opening | while it was being opened: its guest was told nothing, and opens it once more |
//! | 4 | closed, says where it was handed over | live from there, or later | after a hand-over that was not yet described; or its guest went on with it unannounced |
//! | 5 | open, being recovered, storage was seen to say that it is held | empty | at the end of the recovery that follows a reset or an unplugging: all of it is home |
//! | 5a | open, says that it is being closed | empty | at the end of its closing, when it was durable by age: all of it is home, and its guest closes it once more |
//! | 5b | closed, was recovered, and nobody has said since what it is | empty | after such a recovery, and before it was described that its guest may go on |
//! | 6 | closed | anything else | while it was closed, or being closed: its guest closes it once more |

mod nvm;

use crate::description::{AreaDirectory, Description, LogDescription, WishDescription};
use crate::disk::PlacementKind;
use crate::finish::StoredLog;
use crate::journals::{Journals, JournalsOptions};
use crate::kept_log::KeptLog;
use crate::layout::LogRun;
use crate::left::{Left, ToMark, Wish};
use crate::log::{Log, Marked};
use crate::mark::MarkKind;
use crate::numbers;
use crate::opening::mark_again;
use crate::scan::FoundLogPlace;
use crate::stored::{Says, Stored};
use guest_memory::VmMemory;
use jbd2::{Plan, SUPERBLOCK_BYTES, Superblock, sequence};
use journal_area::{Adopted, Doubt, Holding, LogId, LogShape, Opening};
use own_files::How;
use std::ffi::OsStr;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

mod remote;

/// In the midst of what a worker has died.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Found {
    /// The log is held, in this opening.
    Held(Opening),
    /// It is on storage, where it was handed over with this transaction.
    HandedOver(u32),
    /// Its guest was not told that it is open.
    NotOpened,
    /// Its recovery had come to its end: nobody uses it, and all is home.
    Recovered,
    /// Its guest was closing it, and all is home.
    Closing,
    Closed,
}

/// The table of this module.
fn judge(books: &Adopted, says: Says, log_blocks: u32) -> Result<Found, &'static str> {
    let is_this = |opening| books.openings.is_some_and(|openings| openings.contains(&opening));
    match (books.is_open, says, books.handed_over) {
        (true, Says::Empty, None) if books.is_closing && books.is_marked && !books.is_recovering => Ok(Found::Closing),
        (true, Says::Held(opening), _) if is_this(opening) => Ok(Found::Held(opening)),
        // That mark may be of what a loss of power has ended.
        (true, _, None) if books.is_empty && !books.is_marked => Ok(Found::NotOpened),
        (true, Says::Held(_), _) => Err("its mark on storage is that of another opening"),
        (true, Says::Live(tail), Some(from)) if tail == from => Ok(Found::HandedOver(from.sequence)),
        (true, Says::Empty | Says::Error, None) if books.is_recovering && books.is_marked => Ok(Found::Recovered),
        (true, ..) => Err("storage does not say any more that it is held"),
        (false, Says::Live(tail), Some(from))
            if jbd2::sequence::is_at_or_after(tail.sequence, from.sequence)
                && tail.sequence.wrapping_sub(from.sequence) <= log_blocks =>
        {
            Ok(Found::HandedOver(from.sequence))
        }
        // The table was closed when the log went elsewhere, and that it did is not described.
        (false, Says::Nvm(_) | Says::Remote(_), _) => {
            Err("storage says that it is kept elsewhere, which is not described")
        }
        // That its guest may go on with it may not have been written down.
        (false, Says::Empty | Says::Error, None) if books.is_recovering && books.is_marked => Ok(Found::Recovered),
        (false, ..) => Ok(Found::Closed),
    }
}

fn refuse_aged(log: &Log, why: &str) -> io::Error {
    refused(format!(
        "disk {}: the journal of the file system at byte {} was made durable by age, and cannot be followed: {why}",
        log.home.options.name, log.place.home_start
    ))
}

fn refused(what: impl Into<String>) -> io::Error {
    io::Error::other(what.into())
}

impl Journals {
    /// Goes on with the journals of a VM whose guest runs. The directory is as an earlier worker of it left it, which has died. None
    /// of the guest's requests may be taken in, and none of its faults answered, before this returns; and none of its requests before
    /// [`Journals::go_on`] does. Nothing is changed on storage that anybody may need.
    ///
    /// # Errors
    /// When what was left does not agree with itself or with storage, or lives where it cannot be taken up.
    pub fn resume(
        memory: &Arc<VmMemory>,
        directory: AreaDirectory,
        description: &Description,
        options: JournalsOptions,
    ) -> io::Result<Arc<Self>> {
        map_memory(memory, &directory, description)?;
        let kept = files_of(description);
        let ByName { description, gone, is_new } = by_name(description, &options);
        let description = &description;
        let images: Vec<PathBuf> =
            options.disks.iter().filter(|disk| !disk.read_only).map(|disk| disk.path.clone()).collect();
        let journals = Self::set_up(memory, directory, options)?;
        let gone = gone.iter().map(|log| journals.check_gone(log, NOT_SERVED)).collect::<io::Result<Vec<_>>>()?;
        // Logs that are not held have files, too, which say nothing: they are made anew under other names. Where the file system is full,
        // these are the room for that.
        let files = journals.directory().directory();
        let names = files.names().map_err(io::Error::other)?;
        let is_of_a_log = |name: &&std::ffi::OsString| name.to_str().is_some_and(|name| name.starts_with("log-"));
        for name in names.iter().filter(is_of_a_log).filter(|name| !kept.iter().any(|kept| name.to_str() == Some(kept)))
        {
            files.remove(name).map_err(io::Error::other)?;
        }
        let number = |name: &std::ffi::OsString| name.to_str()?.strip_prefix("log-")?.split('.').next()?.parse().ok();
        let next = names.iter().filter_map(number).max().map_or(0, |last: u64| last + 1);
        *journals.scanning.lock().expect("no panic under this lock") = next;
        *journals.left.lock().expect("no panic under this lock") =
            Left { logs: description.logs.clone(), wishes: description.wishes.clone() };
        for (disk, _) in journals.disks().iter().zip(&is_new).filter(|(_, is_new)| !**is_new) {
            disk.set_in_use();
        }
        let gone_too = journals.scan_all_left()?;
        let gone = gone.into_iter().chain(gone_too);
        let logs = journals.logs();
        let doubts = logs.iter().map(|log| journals.area.adopted(log.id).map(|books| books.doubt).unwrap_or_default());
        let doubts: Vec<Doubt> = doubts.collect();
        for (log, doubt) in logs.iter().zip(&doubts) {
            let disk = &log.home;
            if doubt.is_untold && disk.failed_flushes() == disk.told_failures() {
                // Storage has said so to the process before.
                disk.note_failed_flush();
            }
        }
        // Which is no news to the tables.
        logs.iter().zip(&doubts).for_each(|(log, doubt)| journals.area.note_doubt(log.id, |now| *now = *doubt));
        for (log, doubt) in logs.iter().zip(&doubts) {
            // What is on a disk that comes now is as at the beginning of a VM.
            if !is_new[log.home_disk] {
                log.keeper.goes_on_doubted(log, *doubt);
                journals.resume_log(log, description)?;
            }
        }
        let images: Vec<&Path> = images.iter().map(PathBuf::as_path).collect();
        journals.directory().keep_images(&images);
        journals.directory().register_missing(&images);
        journals.describe()?;
        gone.for_each(|log| journals.area.forget_log(log));
        journals.forget_notes();
        for (disk, _) in journals.disks().iter().zip(is_new).filter(|(_, is_new)| !is_new) {
            disk.set_started();
            // What was written since the last flush is not known.
            disk.set_dirty();
        }
        Ok(journals)
    }

    /// The same where no guest had begun, and its images are somebody else's by now: nothing is looked for on them.
    ///
    /// # Errors
    /// When the guest's memory or an image cannot be opened.
    pub fn resume_awaiting(
        memory: &Arc<VmMemory>,
        directory: AreaDirectory,
        description: &Description,
        options: JournalsOptions,
    ) -> io::Result<Arc<Self>> {
        map_memory(memory, &directory, description)?;
        Self::awaiting(memory, directory, options)
    }

    /// Has storage say what it is to say of the logs under this process. When nothing else can keep it from serving the guest: what was
    /// durable by age is given up with it.
    ///
    /// # Errors
    /// When storage fails. It says of each log what it said before, or what it is to say: another process can go on.
    pub fn go_on(&self) -> io::Result<()> {
        for ToMark { log, superblock, number, opening } in
            std::mem::take(&mut *self.to_mark.lock().expect("no panic under this lock"))
        {
            mark_again(&log, &self.area, (&superblock, number), opening)?;
            log.keeper.awaits_mark(false);
            log.home.wake.wake();
        }
        self.settle_regions()?;
        self.logs().iter().try_for_each(|log| log.keeper.go_on(log))
    }

    /// Finds all that was left. What is not there any more has to be closed; it is to be forgotten when that is written down.
    fn scan_all_left(&self) -> io::Result<Vec<LogId>> {
        self.scan_all()?;
        let left = std::mem::take(&mut self.left.lock().expect("no panic under this lock").logs);
        let gone: io::Result<Vec<_>> = left.iter().map(|log| self.check_gone(log, "it is not where it was")).collect();
        if gone.is_err() {
            // Who finishes it asks for it.
            self.left.lock().expect("no panic under this lock").logs = left;
        }
        gone
    }

    /// Where an earlier worker has left journals that a scan does not find any more, and that are there all the same: the entry of a partition
    /// table has gone under a file system that is mounted.
    pub(crate) fn left_without_entry(&self) -> io::Result<Vec<FoundLogPlace>> {
        let left = self.left.lock().expect("no panic under this lock");
        let wished = left.wishes.iter().filter(|wish| wish.is_needed()).map(|wish| &wish.place);
        let wished = wished.filter(|place| !left.logs.iter().any(|log| log.place.is_same_log(place)));
        let places = left.logs.iter().map(|log| &log.place).chain(wished);
        let there = places.map(|place| Ok(crate::scan::is_still_there(self.disks(), place)?.then(|| place.clone())));
        there.filter_map(io::Result::transpose).collect()
    }

    /// Whether an earlier worker has left the log at this place held.
    pub(crate) fn was_left_held(&self, place: &FoundLogPlace) -> bool {
        let left = self.left.lock().expect("no panic under this lock");
        left.logs.iter().any(|log| log.place.is_same_log(place))
    }

    /// Whether an earlier worker has left something of the log at this place that no scan may forget.
    pub(crate) fn was_left(&self, place: &FoundLogPlace) -> bool {
        let left = self.left.lock().expect("no panic under this lock");
        left.logs.iter().any(|log| log.place.is_same_log(place))
            || left.wishes.iter().any(|wish| wish.place.is_same_log(place) && wish.is_needed())
    }

    /// What an earlier worker has left of the log at this place: its files, if it was held, and what was wished of it.
    pub(crate) fn take_left(&self, place: &FoundLogPlace) -> io::Result<(Option<LogDescription>, Option<Wish>)> {
        let mut left = self.left.lock().expect("no panic under this lock");
        let index = left.logs.iter().position(|log| log.place.is_same_log(place));
        let log = index.map(|index| left.logs.remove(index));
        let index = left.wishes.iter().position(|wish| wish.place.is_same_log(place));
        let wish = index.map(|index| left.wishes.remove(index));
        let wish = wish.map(|wish| -> io::Result<Wish> {
            let WishDescription { placement, is_distrusted, storage_from, copy, may_go_on_unannounced, .. } = wish;
            let placement = PlacementKind::named(&placement)
                .ok_or_else(|| refused(format!("a journal is wished to have placement {placement}, which is none")))?;
            Ok(Wish { placement, is_distrusted, storage_from, copy, may_go_on_unannounced })
        });
        Ok((log, wish.transpose()?))
    }

    /// A log that is not there any more owes nothing; it has to be forgotten when that is written down.
    fn check_gone(&self, log: &LogDescription, why: &str) -> io::Result<LogId> {
        let place = &log.place;
        let shape =
            LogShape { block_bytes: place.block_bytes, log_blocks: place.log_blocks, home_blocks: place.home_blocks };
        let (path, own_blocks) = (self.directory().path(), place.own_blocks.clone());
        let id = self.area.adopt_log(path, &log.name, shape, Holding::Copy, own_blocks).map_err(io::Error::other)?;
        let is_closed = self.area.adopted(id).is_some_and(|books| !books.is_open);
        if !is_closed {
            return Err(refused(format!(
                "the journal of {} is held as {}, and {why}",
                log.home_image.display(),
                log.name
            )));
        }
        Ok(id)
    }

    fn resume_log(&self, log: &Arc<KeptLog>, description: &Description) -> io::Result<()> {
        if self.resume_shipped(log) {
            return Ok(());
        }
        let was_held = description.logs.iter().any(|left| left.place.is_same_log(&log.place));
        let mut raw = [0; jbd2::SUPERBLOCK_BYTES];
        log.journal.file.read_exact_at(&mut raw, log.place_of(0)?)?;
        if log.placement == PlacementKind::Nvm && self.resume_in_region(log, &raw)? {
            return Ok(());
        }
        let says = Stored::read(&raw).says;
        if let Says::NoJournal(error) = says {
            return Err(refused(format!("a journal superblock on storage: {error}")));
        }
        let says = match says {
            // A loss of power has left it before this guest: where that starts, it is replayed.
            Says::Aged(..) if self.is_closed(log, was_held) => {
                self.follow_wish(log);
                return Ok(());
            }
            Says::Aged(opening, _) if was_held && log.placement.is_held() => {
                if !self.follows(log, opening, &raw)? {
                    self.will_be_only_held(log, opening, &raw)?;
                }
                return self.resume_held(log, Says::Held(opening), None);
            }
            Says::Aged(..) => {
                return Err(refused(format!(
                    "disk {}: the journal of the file system at byte {} was made durable by age beside a held one, and nothing of that \
                     was left",
                    log.home.options.name, log.place.home_start
                )));
            }
            says => says,
        };
        let marked =
            |opening, kind| Marked { opening, kind, bytes: raw.to_vec(), written: u64::MAX, is_durable: false };
        if was_held && log.placement.is_held() {
            return self.resume_held(log, says, Some(&marked));
        }
        match (log.placement, says) {
            (PlacementKind::Discard, Says::Dropped(opening)) => {
                log.set_open();
                log.put_mark_back(Some(marked(opening, MarkKind::Dropped)));
            }
            // In its own place, as configured or since it was handed over.
            (placement, Says::Live(tail) | Says::LeftToGuest(tail)) => {
                if placement != PlacementKind::Storage || log.may_go_on_unannounced() {
                    self.put(log, PlacementKind::Storage, Some(tail.sequence));
                }
                log.is_announced();
                log.set_open();
            }
            (_, says) => {
                if matches!(says, Says::Held(_)) {
                    // It was there before this guest: whatever is held is described.
                    self.warn_of_lost(&log.place);
                }
                self.follow_wish(log);
            }
        }
        Ok(())
    }

    /// Whether an earlier worker has left nothing of a log that its guest could go on with: it is not open, or not one that is held.
    fn is_closed(&self, log: &Log, was_held: bool) -> bool {
        match log.placement.is_held() {
            true => was_held && self.area.adopted(log.id).is_some_and(|books| !books.is_open),
            false => !was_held,
        }
    }

    /// A log that was made durable by age stays so, from where storage has it. False where that is not wished any more, or cannot be and
    /// the guest was promised an age: then it is only held first.
    fn follows(&self, log: &Arc<KeptLog>, opening: Opening, raw: &[u8]) -> io::Result<bool> {
        let books = self.books_of_aged(log, opening)?;
        match log.keeper.follows(log, opening, raw, books.numbered) {
            Ok(follows) => Ok(follows),
            // What waits for durability fails, as it would have: whoever repeats it is told so. And nobody waits whose log was being
            // recovered: its guest is gone, or was answered before it was suspended.
            Err(why) if books.doubt.is_doubted || books.is_recovering || !log.is_durable_at_once() => {
                log::warn!(
                    "disk {}: the journal of the file system at byte {} is only held for now: {why}",
                    log.home.options.name,
                    log.place.home_start
                );
                Ok(false)
            }
            // A guest that asks again for a commit that waits would be told of it at once.
            Err(why) => Err(refuse_aged(
                log,
                &format!("with durable-within=0 what is on storage has to be followed, and {why}"),
            )),
        }
    }

    fn books_of_aged(&self, log: &Log, opening: Opening) -> io::Result<Adopted> {
        let books = self.area.adopted(log.id).ok_or_else(|| refuse_aged(log, "it has gone"))?;
        if !books.is_open || !books.openings.is_some_and(|openings| openings.contains(&opening)) {
            let why = format!(
                "its mark on storage is that of another opening ({opening:?}; the table of the {} log has {:?})",
                if books.is_open { "open" } else { "closed" },
                books.openings
            );
            return Err(refuse_aged(log, &why));
        }
        Ok(books)
    }

    /// A log that was made durable by age goes on as one that is only held. What is held is complete without
    /// what was made durable. Storage is told later.
    fn will_be_only_held(&self, log: &Arc<KeptLog>, opening: Opening, raw: &[u8]) -> io::Result<()> {
        let refuse = |why: &str| refuse_aged(log, why);
        let books = self.books_of_aged(log, opening)?;
        let mut stored = StoredLog { place: &log.place, journal: &log.journal.file };
        let (said, format) = Superblock::parse(raw).map_err(|error| refuse(&error.to_string()))?;
        let plan = Plan::new(&mut stored, &said, &format, &|_| true).map_err(|error| refuse(&error.to_string()))?;
        let mut superblock = vec![0; log.place.block_bytes as usize];
        if !self.area.look(log.id, |held| held.read_held(0, &mut superblock)).unwrap_or(false) {
            return Err(refuse("its superblock is not held"));
        }
        // One more may have been half made. Earlier compounds of this opening, which are not in the log any more, may have had later
        // numbers than the guest's transactions, but none later than these.
        let number = plan.summary().walk.next_sequence().wrapping_add(1);
        let number = books.numbered.map_or(number, |numbered| sequence::latest(number, numbered));
        log.keeper.numbers_from(number);
        log.keeper.awaits_mark(true);
        let opening = Opening { count: opening.count + 1, ..opening };
        let to_mark = ToMark { log: Arc::clone(log), superblock, number, opening };
        self.to_mark.lock().expect("no panic under this lock").push(to_mark);
        Ok(())
    }

    /// Compounds were in the log's place, and the mark that gave them up is seen on storage. Who wrote it may have died before it was durable:
    /// until it is, a power cut leaves them, and they must not be beside homes that are newer. A flush alone is not enough behind one that has
    /// failed. It says a number that no compound has; an earlier amberlog's may say one that some have.
    fn mark_anew_later(&self, log: &Arc<KeptLog>, marked: &Marked, numbered: u32) -> io::Result<()> {
        let said = Superblock::decode(&marked.bytes).map_err(io::Error::other)?;
        let number = sequence::latest(said.sequence, numbered);
        log.keeper.awaits_mark(true);
        let opening = Opening { count: marked.opening.count + 1, ..marked.opening };
        let to_mark = ToMark { log: Arc::clone(log), superblock: marked.bytes.clone(), number, opening };
        self.to_mark.lock().expect("no panic under this lock").push(to_mark);
        Ok(())
    }

    /// A log was being closed that was made durable by age, and storage says that it is empty. Its guest, which closes it once more, says
    /// its own number: a last compound may have that one, and would be taken for the guest's next transaction. It is overwritten while the books
    /// are open still: whoever comes after a kill finds this to be done once more. Storage needs no block of the log.
    fn clear_last_compounds(&self, log: &Log, numbered: Option<u32>) -> io::Result<()> {
        let Some(next) = self.area.next_sequence(log.id) else { return Ok(()) };
        let Some(held) = self.area.log_now(log.id) else { return Ok(()) };
        if numbers::may_meet(next, numbered) {
            self.note_written_to_go_on(log);
        }
        numbers::wipe(&held, &log.place, &log.journal.file, (next, numbered))
    }

    /// Its place may have been written to, now or by an earlier worker that has died before it told anybody: who comes after it does not find
    /// what was there.
    fn note_written_to_go_on(&self, log: &Log) {
        let bytes = |run: &LogRun| run.offset..run.offset + u64::from(run.count) * u64::from(log.place.block_bytes);
        let runs = log.place.runs.iter().map(|run| (log.journal_disk, bytes(run)));
        self.written_to_go_on.lock().expect("no panic under this lock").extend(runs);
    }

    /// Where a disk may have been written to when its logs were taken up ([`Journals::resume`]), in bytes: whoever keeps account of what is written
    /// begins after that.
    pub fn written_to_go_on(&self, disk: usize) -> Vec<Range<u64>> {
        let cleared = self.written_to_go_on.lock().expect("no panic under this lock").clone();
        let cleared = cleared.into_iter().filter(|(of, _)| *of == disk).map(|(_, range)| range);
        let logs = self.logs();
        let superblocks = logs.iter().filter(|log| log.journal_disk == disk).filter_map(|log| {
            let at = log.offset_of(0)?;
            Some(at..at + SUPERBLOCK_BYTES as u64)
        });
        superblocks.chain(cleared).collect()
    }

    /// A log whose table was taken up.
    fn resume_held(
        &self,
        log: &Arc<KeptLog>,
        says: Says,
        marked: Option<&dyn Fn(Opening, MarkKind) -> Marked>,
    ) -> io::Result<()> {
        let books = self.area.adopted(log.id).ok_or_else(|| refused("a log that was taken up has gone"))?;
        let owed = self.area.owed(log.id).blocks;
        let (name, at) = (&log.home.options.name, log.place.home_start);
        let found = judge(&books, says, log.place.log_blocks).map_err(|why| {
            refused(format!("disk {name}: the journal of the file system at byte {at} owes {owed} blocks, and {why}"))
        })?;
        let how = match found {
            Found::Held(_) => "is held as before",
            Found::HandedOver(_) => "is on storage, where it was just handed over",
            Found::NotOpened => "was being opened, which its guest does once more",
            Found::Recovered => "was being recovered, and all of it is home",
            Found::Closing => "was being closed, and all of it is home",
            Found::Closed => "is not in use",
        };
        log::info!("disk {name}: the journal of the file system at byte {at} {how}, {owed} blocks owed");
        match found {
            Found::Held(opening) => {
                self.area.note_opening(log.id, &opening, true);
                if !books.is_marked {
                    // Its guest says once more that it opens the log, and is answered at once: storage has to say it for good.
                    log.journal.file.sync_data()?;
                    self.area.note_marked(log.id);
                }
                self.area.forget_hand_over(log.id);
                self.area.note_closing(log.id, false);
                if let Some(marked) = marked {
                    log.keeper.goes_on_held_only();
                    let marked = marked(opening, MarkKind::Held);
                    if let Some(numbered) = books.numbered {
                        // What was made durable before lies in the log's place still, under these numbers.
                        log.keeper.numbers_from(numbered);
                        self.mark_anew_later(log, &marked, numbered)?;
                    }
                    log.put_mark_back(Some(marked));
                }
                log.set_open();
                if crate::foreign::is_home_unmounted(log)? {
                    // An earlier amberlog held it for the wrong one of two file systems that name it.
                    log.distrust();
                    log.want(PlacementKind::Storage);
                }
                let wanted = log.wanted();
                if wanted.is_held() && wanted != log.placement {
                    let holding = if wanted == PlacementKind::Retain { Holding::Retain } else { Holding::Copy };
                    self.area.set_holding(log.id, holding);
                    self.put(log, wanted, None);
                }
            }
            Found::HandedOver(from) => {
                // Its superblock may not have been flushed.
                log.journal.file.sync_data()?;
                if books.is_distrusted {
                    log.distrust();
                    log.want(PlacementKind::Storage);
                }
                self.put(log, PlacementKind::Storage, Some(from));
                self.area.close(log.id);
                // Also by a guest that goes on with it, which was not written down yet.
                log.is_announced();
                log.set_open();
            }
            Found::NotOpened => {
                self.area.close(log.id);
                self.follow_wish(log);
            }
            Found::Recovered => {
                log.home.file.sync_data()?;
                log.journal.file.sync_data()?;
                self.area.close(log.id);
                log.was_closed_under_the_guest_of_another();
                self.follow_wish(log);
            }
            Found::Closing => {
                // Storage says so since a moment ago, perhaps not for good.
                log.home.file.sync_data()?;
                log.journal.file.sync_data()?;
                self.clear_last_compounds(log, books.numbered)?;
                self.area.close(log.id);
                self.follow_wish(log);
            }
            Found::Closed => {
                // What the guest wrote home before is to be durable when storage says that no log is needed.
                log.home.file.sync_data()?;
                if books.is_closing && books.numbered.is_some() {
                    // By an earlier worker that went on with it, perhaps, and has cleared its last compounds.
                    self.note_written_to_go_on(log);
                }
                self.follow_wish(log);
            }
        }
        Ok(())
    }
}

/// A description, as it is to be read by who has other disks: they come and go between two workers, and are told apart by their names.
struct ByName {
    /// Its places mean the disks that are served from now on.
    description: Description,
    /// Logs of disks that are not served any more.
    gone: Vec<LogDescription>,
    /// Of each disk, whether no earlier worker has served it.
    is_new: Vec<bool>,
}

fn by_name(description: &Description, options: &JournalsOptions) -> ByName {
    let mut description = description.clone();
    let Some(before) = description.disks.take() else {
        return ByName { description, gone: Vec::new(), is_new: vec![false; options.disks.len()] };
    };
    let now = |index: usize| {
        let name = before.get(index)?;
        options.disks.iter().position(|disk| disk.name == *name)
    };
    let moved = |place: &FoundLogPlace| {
        let (home_disk, journal_disk) = (now(place.home_disk)?, now(place.journal_disk)?);
        Some(FoundLogPlace { home_disk, journal_disk, ..place.clone() })
    };
    let mut gone = Vec::new();
    description.logs.retain_mut(|log| match moved(&log.place) {
        Some(place) => {
            log.place = place;
            true
        }
        None => {
            gone.push(log.clone());
            false
        }
    });
    description.wishes.retain_mut(|wish| moved(&wish.place).map(|place| wish.place = place).is_some());
    let is_new = options.disks.iter().map(|disk| !before.contains(&disk.name)).collect();
    ByName { description, gone, is_new }
}

/// The files of logs that say something.
fn files_of(description: &Description) -> Vec<String> {
    let of_tables =
        description.logs.iter().flat_map(|log| [".table", ".pool"].map(|ending| format!("{}{ending}", log.name)));
    let copies = description.wishes.iter().filter_map(|wish| wish.copy.clone());
    of_tables.chain(copies).collect()
}

const NOT_SERVED: &str = "its disk is not served any more";

/// Maps the guest's memory so that its pages have the numbers that the tables know them by.
fn map_memory(memory: &Arc<VmMemory>, directory: &AreaDirectory, description: &Description) -> io::Result<()> {
    for ram in &description.ram {
        let name = ram.path.file_name().unwrap_or(OsStr::new(""));
        if ram.path.parent() != Some(directory.path()) {
            // Nothing is retained in it, nor in what comes behind it.
            break;
        }
        let taken = OsStr::new(crate::description::MEMORY_TAKEN);
        let is_named = description.ram.iter().any(|ram| ram.path.file_name() == Some(taken));
        // It is renamed when the VMM has it: one by the old name is another program's then.
        let is_renamed = name == crate::MEMORY && !is_named && directory.directory().size(taken).is_some();
        let opened = directory.directory().given_file(if is_renamed { taken } else { name }, How::Write);
        let first_page = memory.adopt_file(opened.map_err(io::Error::other)?).map_err(io::Error::other)?;
        if first_page != ram.first_page {
            return Err(refused("the guest's memory files are not what they were"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
