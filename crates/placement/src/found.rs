//! Finishing what a killed amberlog left in its tmpfs files.
//!
//! The directory is locked first (neither the old process nor its VM can be alive then), the images too. A log is only
//! written to the disk it belongs to: the journal superblock on storage has to be the one that was marked when the log
//! was opened, or the one that this very recovery leaves, if it was cut off before.
//!
//! The description beside the tables is not believed beyond the directory: files it names are looked for in there and
//! nowhere else, and an image only counts if the caller has named it or the registry of the same user has it for this
//! directory.

use crate::copies::LeftCopies;
use crate::description::{AreaDirectory, LOCK, LogDescription, MEMORY, MEMORY_TAKEN, image_key, is_at};
use crate::directory_error::{DirectoryError, THROUGH};
use crate::earlier::open_left;
use crate::finish::{finish, is_home_already, leave_stored, say_why_check};
use crate::finished::{FailedLog, Finish, FinishError, FinishedLog};
use crate::its_home::why_not_its_home;
use crate::registry::own_places;
use crate::scan::{offset_of, why_not_replayed};
use crate::stored::{HeldBooks, Says, Stored, Verdict, Why};
use guest_memory::{HostFile, PAGE_BYTES};
use jbd2::{SUPERBLOCK_BYTES, Superblock};
use journal_area::{FoundLog, Opening};
use own_files::{How, OwnDirectory};
use recovery::{Access, Report, Status};
use std::collections::{HashMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use write_log::LoggedFile;

/// The logs of a directory, as its files have them.
pub(crate) struct LeftLogs {
    pub(crate) logs: Vec<(LogDescription, FoundLog)>,
    /// Those whose files are missing or damaged, and why: each is owed perhaps, and keeps no other from being brought home.
    pub(crate) unreadable: Vec<(LogDescription, FinishError)>,
    pub(crate) ram: Vec<(u32, HostFile)>,
}

/// The area, if a registry knows of one, with a log that was opened under this number: the image that carries it may be a copy, or
/// have another name or another file system by now.
pub(crate) fn area_opened_as(registry: &Path, number: &[u8; 16]) -> Option<PathBuf> {
    crate::registry::all_areas(registry).into_iter().find(|area| was_opened_in(area, number))
}

/// Whether an area has a log that was opened under this number.
pub(crate) fn was_opened_in(area: &Path, number: &[u8; 16]) -> bool {
    let Ok(directory) = OwnDirectory::open_allowing(area, THROUGH) else { return false };
    directory.names().unwrap_or_default().iter().any(|name| {
        let is_table = Path::new(name).extension().is_some_and(|ending| ending == "table");
        let file = is_table.then(|| directory.file(name, How::Read).ok()).flatten();
        file.and_then(|file| journal_area::opening_number_of(&file)).as_ref() == Some(number)
    })
}

/// Opens what a directory describes; nothing if it describes nothing.
pub(crate) fn open_logs(directory: &AreaDirectory) -> Result<Option<LeftLogs>, FinishError> {
    let Some(description) = directory.description()? else {
        // Where the description itself is gone, its tables are still owed.
        check_described(directory, &[])?;
        return Ok(None);
    };
    check_described(directory, &description.logs)?;
    let mut elsewhere = Vec::new();
    let mut names = HashSet::new();
    let mut ram = Vec::new();
    for file in &description.ram {
        // Memory is only retained in files of this directory, wherever that was then.
        let Some(name) = file.path.file_name().filter(|name| directory.is_memory(name, &file.path)) else {
            elsewhere.push(file.path.display().to_string());
            continue;
        };
        if !names.insert(name) {
            return Err(FinishError::Refused(format!(
                "{}: the description names the memory file {} twice; nothing was changed",
                directory.path().display(),
                name.display()
            )));
        }
        ram.push((file.first_page, name));
    }
    let open = |name: &OsStr| -> Result<Option<HostFile>, FinishError> {
        let path = directory.path().join(name);
        // The guest's memory may have been given to the VMM's user.
        let is_ram = names.contains(name) || name == MEMORY_TAKEN;
        let opened = if is_ram {
            directory.directory().given_file(name, How::Write)
        } else {
            directory.directory().file(name, How::Write)
        };
        match opened {
            Ok(file) => match HostFile::from_opened(file, &path) {
                Ok(file) => Ok(Some(file)),
                Err(error) => Err(FinishError::Refused(error.to_string())),
            },
            Err(error) if error.is_missing() => Ok(None),
            Err(error) => Err(DirectoryError::from(error).into()),
        }
    };
    let open_ram = || -> Result<Vec<(u32, HostFile)>, FinishError> {
        let mut opened = Vec::new();
        for (first_page, name) in &ram {
            // A VM that never ran has no memory file, or an empty one, and then no log names a page of it.
            // It is renamed when the VMM has it, and the description may be of the moment before: one by the old name is another program's then.
            let is_renamed = *name == MEMORY
                && !names.contains(OsStr::new(MEMORY_TAKEN))
                && directory.directory().size(MEMORY_TAKEN).is_some();
            let name = if is_renamed { OsStr::new(MEMORY_TAKEN) } else { name };
            let is_empty = directory.directory().size(name) == Some(0);
            if !is_empty && let Some(file) = open(name)? {
                opened.push((*first_page, file));
            }
        }
        Ok(opened)
    };
    let mut logs = Vec::new();
    let mut unreadable = Vec::new();
    let read = |log: &LogDescription| -> Result<FoundLog, FinishError> {
        let part = |ending: &str| -> Result<(HostFile, PathBuf), FinishError> {
            let name = OsString::from(format!("{}.{ending}", log.name));
            let path = directory.path().join(&name);
            match open(&name)? {
                Some(file) => Ok((file, path)),
                None => Err(FinishError::Refused(format!("{}: it is not there; nothing was changed", path.display()))),
            }
        };
        let ((table, table_path), (pool, pool_path)) = (part("table")?, part("pool")?);
        let found = FoundLog::from_files((table, &table_path), (pool, &pool_path), open_ram()?);
        let found = found.map_err(|error| {
            let mut sentence = error.to_string();
            if !elsewhere.is_empty() {
                sentence += &format!(
                    "; guest memory that is said to be in {} is not looked at: only what lies in {} is (if it is the \
                     right file, copy it there under the same name)",
                    elsewhere.join(", "),
                    directory.path().display()
                );
            }
            FinishError::Damaged(sentence)
        })?;
        if found.is_open() {
            check_place(directory, log, &found)?;
        }
        Ok(found)
    };
    for log in description.logs {
        match read(&log) {
            Ok(found) => logs.push((log, found)),
            Err(error) => unreadable.push((log, error)),
        }
    }
    Ok(Some(LeftLogs { logs, unreadable, ram: open_ram()? }))
}

/// A table of an open log that nobody describes would go with the directory, and what is owed of that log with it.
fn check_described(directory: &AreaDirectory, logs: &[LogDescription]) -> Result<(), FinishError> {
    for name in directory.directory().names().map_err(DirectoryError::from)? {
        let path = Path::new(&name);
        let is_table = path.extension().is_some_and(|ending| ending == "table");
        let is_described = logs.iter().any(|log| path.file_stem().is_some_and(|stem| *stem == *log.name));
        if is_table
            && !is_described
            && directory.directory().file(&name, How::Read).is_ok_and(|file| journal_area::is_open_in(&file))
        {
            return Err(FinishError::Refused(format!(
                "{}: the table of an open journal, and no description beside it says of which; nothing was changed",
                directory.path().join(path).display()
            )));
        }
    }
    Ok(())
}

/// Finishes every open log of a directory. It can be removed afterwards if none failed. `images` are those that the caller
/// has named, where they are by now: one that was renamed is opened there.
///
/// # Errors
/// When the directory contradicts itself: nothing was changed. What concerns one log only (its image is away, its files are damaged) does not
/// keep the others from being finished.
pub fn finish_directory(directory: &AreaDirectory, images: &[PathBuf]) -> Result<Finish, FinishError> {
    finish_logs(directory, images, false)
}

/// The same where the caller says that `images` are where the owed blocks belong by now, be they other files than they were:
/// each has to carry the mark of the held log as the VM left it.
///
/// # Errors
/// As [`finish_directory`].
pub fn finish_directory_into(directory: &AreaDirectory, images: &[PathBuf]) -> Result<Finish, FinishError> {
    finish_logs(directory, images, true)
}

/// For a start and for a person. `may_be_copies`: a person has said with `--image` where owed blocks belong. A start names the disks of a VM, of
/// which one may be a copy that somebody made: it would get what is held for another one.
fn finish_logs(directory: &AreaDirectory, images: &[PathBuf], may_be_copies: bool) -> Result<Finish, FinishError> {
    let Some(left) = open_logs(directory)? else { return Ok(Finish::default()) };
    let open: Vec<_> = left.logs.into_iter().filter(|(_, found)| found.is_open()).collect();
    let mut outcome = Finish::default();
    let mut present = Vec::new();
    // Pages of logs that are not finished: they stay.
    let mut owed: HashSet<u32> = HashSet::new();
    // Which pages these have, nobody knows.
    let may_give_back = left.unreadable.is_empty();
    for (log, error) in left.unreadable {
        let number = number_in_table(directory, &log);
        let is_of_named = images.iter().any(|image| has_part(image, &log, number));
        outcome.failed.push(FailedLog::new(&log, is_of_named, error));
    }
    for (log, found) in open {
        let number = found.opening().map(|[opening, _]| opening.number);
        let is_of_named = images.iter().any(|image| has_part(image, &log, number));
        match places(directory, &log, &found, images, may_be_copies) {
            Ok(places) => present.push((log, found, places, is_of_named)),
            Err(error) => {
                owed.extend(found.pages().map(|page| page.0));
                let fits = [&log.home_image, &log.journal_image].into_iter().find(|image| {
                    let is_tried = may_be_copies && images.iter().any(|named| is_at(named, image));
                    !is_tried && number.is_some() && number_on(image, &log) == number
                });
                outcome.failed.push(FailedLog { fits: fits.cloned(), ..FailedLog::new(&log, is_of_named, error) });
            }
        }
    }
    if outcome.failed.is_empty() {
        // Nothing is changed for what may yet be refused as a whole.
        let needed = present.iter().flat_map(|(_, found, ..)| found.pages().map(|page| page.0)).collect();
        give_back(&left.ram, &needed);
    }
    let older = older_copies(present.iter().map(|(log, found, places, _)| (log, found, places)));
    for index in 0..present.len() {
        let (log, found, places, is_of_named) = &present[index];
        let offset = log.place.home_start;
        let mut has_failed_flush = false;
        let result = refuse_older(directory, log, places, &older)
            .and_then(|()| finish_log(directory, log, found, places, &mut has_failed_flush));
        if has_failed_flush {
            // It was to cover what others wrote there, too, and no later one says so: neither theirs nor that of the next attempt.
            let of_image = present[index..].iter().filter(|(_, _, other, _)| other.home == places.home);
            of_image.for_each(|(_, found, ..)| found.note_failed_flush());
        }
        match result {
            Ok((image, mut recovery)) => {
                recovery.notes.insert(0, format!("finished from {}", directory.path().display()));
                outcome.finished.push(FinishedLog { image, offset, recovery });
            }
            Err(error) => {
                owed.extend(found.pages().map(|page| page.0));
                outcome.failed.push(FailedLog::new(log, *is_of_named, error));
            }
        }
    }
    if !outcome.failed.is_empty() && !outcome.finished.is_empty() && may_give_back {
        // Whoever is served now has its own guest's memory beside what is left of this one.
        give_back(&left.ram, &owed);
    }
    Ok(outcome)
}

/// Whether an image has a part in a log: it is, or lies where, its home or its journal was; or it carries its mark.
pub(crate) fn has_part(image: &Path, log: &LogDescription, number: Option<[u8; 16]>) -> bool {
    let key = image_key(image).ok();
    let is_it = |path: &Path, its: &Option<String>| is_at(image, path) || (key.is_some() && key == *its);
    let carries = || number.is_some() && number_on(image, log) == number;
    is_it(&log.home_image, &log.home_key) || is_it(&log.journal_image, &log.journal_key) || carries()
}

/// The number of the opening that a log's table has, where no more of it may be readable.
pub(crate) fn number_in_table(directory: &AreaDirectory, log: &LogDescription) -> Option<[u8; 16]> {
    let table = directory.directory().file(OsString::from(format!("{}.table", log.name)), How::Read).ok()?;
    journal_area::opening_number_of(&table)
}

/// Whether what is written down of a log's place can be that of the log whose tables lie beside it.
fn check_place(directory: &AreaDirectory, log: &LogDescription, found: &FoundLog) -> Result<(), FinishError> {
    log.place.check(found.block_bytes(), found.log_blocks()).map_err(|reason| {
        FinishError::Damaged(format!(
            "the description in {} is damaged: {}: {reason}; nothing was changed",
            directory.path().display(),
            log.name
        ))
    })
}

/// Removes what processes that are gone left in `base` although nothing in it is owed to anybody: nobody would come to look
/// for it by an image. Whatever is not certain stays.
pub fn sweep(base: &Path, registry: &Path) {
    let Ok(base) = OwnDirectory::open_place(base) else { return };
    for name in base.names().unwrap_or_default() {
        let is_vms = name.to_str().is_some_and(|name| name.starts_with("vm-"));
        let path = base.path().join(&name);
        // Without its lock it is being made at this moment.
        if !is_vms || !OwnDirectory::open_allowing(&path, THROUGH).is_ok_and(|directory| directory.kind(LOCK).is_some())
        {
            continue;
        }
        remove_if_nothing_is_owed(&path, registry);
    }
}

/// The same for what was left by whoever served `image`, which was recovered from elsewhere: the guest's memory would stay in tmpfs.
pub fn sweep_after(image: &Path) {
    for registry in own_places().unwrap_or_default() {
        sweep_all_of(image, &registry);
    }
}

/// One that lives, or is owed something, may be named in front of others.
fn sweep_all_of(image: &Path, registry: &Path) {
    let mut looked_at = HashSet::new();
    while let Ok(Some(area)) = AreaDirectory::find_but(registry, image, |area| looked_at.contains(area)) {
        remove_if_nothing_is_owed(&area, registry);
        looked_at.insert(area);
    }
}

fn remove_if_nothing_is_owed(path: &Path, registry: &Path) {
    let Ok(directory) = AreaDirectory::take_over(path, registry) else { return };
    let is_owed_nothing = match open_logs(&directory) {
        Ok(None) => true,
        Ok(Some(left)) => left.unreadable.is_empty() && left.logs.iter().all(|(_, found)| !found.is_open()),
        Err(_) => false,
    };
    if is_owed_nothing && !is_copy_owed(&directory) {
        log::info!("{}: nothing in it is owed to anybody, and its process is gone: removed", path.display());
        directory.remove();
    }
}

/// Removes a directory of which every held log was finished, unless it has the copy of one that is on a server, or is not whole on storage:
/// the server may be lost. It is removed once the log has been brought home.
pub fn remove_finished(directory: &AreaDirectory) {
    if is_copy_owed(directory) {
        log::info!(
            "{}: stays until the journal that is on a server, and of which it has a copy, has been brought home",
            directory.path().display()
        );
    } else {
        directory.remove();
    }
}

/// Whether a copy of a log that was shipped to a server may be the last whole one. Only images that the registry has for this directory are
/// looked at.
fn is_copy_owed(directory: &AreaDirectory) -> bool {
    LeftCopies::of(directory).is_some_and(|copies| copies.is_any_owed())
}

/// Where home and journal of a log are by now.
struct Places {
    home: PathBuf,
    journal: Option<PathBuf>,
}

fn places(
    directory: &AreaDirectory,
    log: &LogDescription,
    found: &FoundLog,
    images: &[PathBuf],
    may_be_copies: bool,
) -> Result<Places, FinishError> {
    let number = found.opening().map(|[opening, _]| opening.number);
    let carries = |image: &&PathBuf| number.is_some() && number_on(image, log) == number;
    let (home, journal) = if log.place.is_external {
        // Which file system belongs to a journal that was copied cannot be told from the mark.
        let home = present_path(directory, &log.home_image, log.home_key.as_deref(), images, None)?;
        let copy = images.iter().find(carries).map(|copy| (copy, may_be_copies));
        (home, Some(present_path(directory, &log.journal_image, log.journal_key.as_deref(), images, copy)?))
    } else {
        let copy = images.iter().find(carries).map(|copy| (copy, may_be_copies));
        (present_path(directory, &log.home_image, log.home_key.as_deref(), images, copy)?, None)
    };
    Ok(Places { home, journal })
}

/// The images that are older copies of what was served, and where the file system of the log begins whose mark says so: not every mark does, as that
/// of a file system that was idle meanwhile. What is held for such an image is of a later state of all of it.
fn older_copies<'p>(
    present: impl Iterator<Item = (&'p LogDescription, &'p FoundLog, &'p Places)>,
) -> HashMap<&'p Path, u64> {
    let is_older = |log: &LogDescription, found: &FoundLog, image: &Path| {
        let Some(openings) = found.opening().filter(|_| !found.is_unopened()) else { return false };
        let on_storage = opening_on(image, log);
        on_storage.is_some_and(|opening| opening.number == openings[0].number && !openings.contains(&opening))
    };
    present
        .filter_map(|(log, found, places)| {
            let image = places.journal.as_deref().unwrap_or(&places.home);
            is_older(log, found, image).then_some((image, log.place.home_start))
        })
        .collect()
}

/// A log is not brought home to an image of which another log says that it is an older copy. What its own mark says is seen with all else of it.
fn refuse_older(
    directory: &AreaDirectory,
    log: &LogDescription,
    places: &Places,
    older: &HashMap<&Path, u64>,
) -> Result<(), FinishError> {
    for image in [Some(&places.home), places.journal.as_ref()].into_iter().flatten() {
        let said_by = older.get(image.as_path()).filter(|start| **start != log.place.home_start);
        if let Some(start) = said_by {
            let reason = format!(
                "another journal on it, that of the file system at byte {start}, says by its mark that {}",
                Why::OlderCopy.sentence()
            );
            return Err(not_written(directory, log, image, &reason));
        }
    }
    Ok(())
}

/// Finishes one log. Gives where its home was found.
fn finish_log(
    directory: &AreaDirectory,
    log: &LogDescription,
    found: &FoundLog,
    places: &Places,
    has_failed_flush: &mut bool,
) -> Result<(PathBuf, Report), FinishError> {
    let home = open_left(&places.home)?;
    let journal = places.journal.as_deref().map(open_left).transpose()?;
    // What is finished here was left by an earlier process: the log of this one's writes begins after it.
    let opening = |source| recovery::Error::Failed { what: "opening the image".to_owned(), source };
    let unlogged = |file| LoggedFile::unlogged(file).map_err(opening);
    let logged_home = unlogged(home.file())?;
    let logged_journal =
        journal.as_ref().map_or_else(|| Ok(logged_home.clone()), |journal| unlogged(journal.file()))?;
    let files = [&logged_home, &logged_journal];
    let brought = bring_home(directory, log, found, files);
    *has_failed_flush = files.iter().any(|file| file.failed_flushes() > 0);
    let mut report = brought.map_err(|error| error.after(files.iter().any(|file| file.has_written())))?;
    say_why_check(&found.log(), &log.place, &mut report);
    found.close();
    Ok((home.path().to_owned(), report))
}

/// What is held goes to these files, whose images belong together.
fn bring_home(
    directory: &AreaDirectory,
    log: &LogDescription,
    found: &FoundLog,
    [home, journal]: [&LoggedFile; 2],
) -> Result<Report, FinishError> {
    let verdict = check_identity(directory, found, log, journal)?;
    // One that goes to its own place goes to no home, and what is there may be why.
    let goes_home = !found.log().is_distrusted() && !found.log().is_materialise();
    if let Verdict::Marked | Verdict::Aged(..) = verdict
        && goes_home
    {
        check_home(directory, found, log, [home, journal], matches!(verdict, Verdict::Aged(..)))?;
    }
    if let Verdict::Marked | Verdict::Aged(..) = verdict
        && !found.log().is_distrusted()
        && let Some(why) = why_not_replayed(&log.place, home, journal)?
    {
        log::warn!(
            "{}: the journal of the file system at byte {} is not replayed: {why}; it is put into its own place on storage",
            log.home_image.display(),
            log.place.home_start
        );
        found.distrust();
    }
    let report = match verdict {
        Verdict::Marked => finish(&found.log(), &log.place, home, journal)?,
        Verdict::Aged(..) => crate::aged::finish_aged(&found.log(), &log.place, home, journal)?,
        Verdict::Emptied => Report::of(Status::Clean).with_note("it was recovered before, or closed by its guest"),
        Verdict::NotOpened => {
            Report::of(Status::Clean).with_note("it was being opened: its guest had committed nothing")
        }
        Verdict::HandedOver if found.log().is_distrusted() => {
            Report::of(Status::Materialised).with_note(crate::finish::LEFT_TO_THE_GUEST)
        }
        Verdict::HandedOver => {
            // Whoever handed it over may have died before its flush; from here on nothing else has it.
            let failed = |error| FinishError::Failed(format!("making {} durable: {error}", log.home_image.display()));
            home.sync_data().and_then(|()| journal.sync_data()).map_err(failed)?;
            leave_stored(&log.place, journal)?
        }
    };
    if found.log().is_distrusted() {
        let failed = |error| {
            FinishError::Failed(format!("writing the journal superblock of {}: {error}", log.home_image.display()))
        };
        crate::left_to_guest::remember(&log.place, journal).map_err(failed)?;
    }
    Ok(report)
}

/// The number of the opening that an image's journal superblock carries, where a log has its own.
fn number_on(image: &Path, log: &LogDescription) -> Option<[u8; 16]> {
    opening_on(image, log).map(|opening| opening.number)
}

/// The same with its count.
fn opening_on(image: &Path, log: &LogDescription) -> Option<Opening> {
    let offset = offset_of(&log.place.runs, log.place.block_bytes, 0)?;
    let file = recovery::Disk::open(image, Access::Look).ok()?;
    let mut raw = vec![0; SUPERBLOCK_BYTES];
    file.file().read_exact_at(&mut raw, offset).ok()?;
    match Stored::read(&raw).says {
        Says::Held(opening) | Says::Aged(opening, _) => Some(opening),
        _ => None,
    }
}

/// Where an image is by now: at its old place, or, when it is not there, where one of `images`, which the caller has named, is
/// the same file; or, if that may be, where `copy` carries the log's mark.
fn present_path(
    directory: &AreaDirectory,
    old: &Path,
    key: Option<&str>,
    images: &[PathBuf],
    copy: Option<(&PathBuf, bool)>,
) -> Result<PathBuf, FinishError> {
    let is_same = |path: &Path| key.is_some() && image_key(path).ok().as_deref() == key;
    if let Some(named) = images.iter().find(|image| is_same(image)) {
        return Ok(named.clone());
    }
    match copy {
        // One of the two would lose what is held.
        Some((copy, _)) if is_same(old) => {
            return Err(FinishError::Refused(format!(
                "{} is a copy of {}, or the same by another name, and {} holds committed blocks for that one; nothing was \
                 changed: run 'amberlog recover --area {}' first, then copy it",
                copy.display(),
                old.display(),
                directory.path().display(),
                directory.path().display()
            )));
        }
        Some((copy, true)) => return Ok(copy.clone()),
        Some((copy, false)) => {
            return Err(FinishError::Refused(format!(
                "the image {} is not there any more, and {} holds committed blocks for it; {} is another file with the same mark. \
                 Nothing was changed: if that is where the image is now, run 'amberlog recover --area {} --image {}'",
                old.display(),
                directory.path().display(),
                copy.display(),
                directory.path().display(),
                copy.display()
            )));
        }
        None => {}
    }
    let Ok(present) = image_key(old) else {
        return Err(FinishError::Failed(format!(
            "the image {} is not there any more, and committed blocks are held for it: if it was renamed, give it its old \
             name, or start amberlog run with it; if it is lost, 'amberlog recover --area {} --give-up {}' gives up what is held for it",
            old.display(),
            directory.path().display(),
            old.display()
        )));
    };
    let is_named = images.iter().any(|image| std::path::absolute(image).is_ok_and(|image| image == old));
    if is_named || directory.is_registered(&present) {
        return Ok(old.to_owned());
    }
    let (shown, directory) = (old.display(), directory.path().display());
    Err(FinishError::Refused(format!(
        "{directory} holds committed blocks for the image {shown}, {}; nothing was changed: if it is the right one, say so \
         with 'amberlog recover --area {directory} --image {shown}'",
        if key.is_none_or(|key| key == present) {
            "which nobody has named, and which amberlog's list of this user's images does not have for that directory"
        } else {
            "but another file is there by now (it was copied, restored or replaced)"
        }
    )))
}

/// No more pages of a file are looked at: 2 TiB of guest memory.
const PAGES_MAX: u32 = 1 << 29;

/// Gives all guest memory but the retained pages back to the host at once.
pub(crate) fn give_back(ram: &[(u32, HostFile)], needed: &HashSet<u32>) {
    for (first_page, file) in ram {
        // Pages have numbers of 29 bits: what lies beyond is nobody's.
        let count = u32::try_from(file.len() / PAGE_BYTES as u64).unwrap_or(u32::MAX).min(PAGES_MAX);
        let mut index = 0;
        while index < count {
            let start = index;
            while index < count && !first_page.checked_add(index).is_some_and(|page| needed.contains(&page)) {
                index += 1;
            }
            if index > start {
                let bytes = |pages: u32| u64::from(pages) * PAGE_BYTES as u64;
                if let Err(error) = file.give_back(bytes(start), bytes(index - start)) {
                    log::warn!("giving guest memory back to the host failed: {error}");
                    return;
                }
            }
            index += 1;
        }
    }
}

/// Whether the journal superblock on storage is the one that belongs to the held log.
fn check_identity(
    directory: &AreaDirectory,
    found: &FoundLog,
    log: &LogDescription,
    journal: &LoggedFile,
) -> Result<Verdict, FinishError> {
    let refuse = |reason: String| Err(not_written(directory, log, &log.journal_image, &reason));
    let offset = offset_of(&log.place.runs, log.place.block_bytes, 0)
        .ok_or_else(|| FinishError::Refused("the description has no place for the journal superblock".to_owned()))?;
    let mut raw = vec![0; SUPERBLOCK_BYTES];
    journal.read_exact_at(&mut raw, offset).map_err(|e| {
        FinishError::Failed(format!("reading the journal superblock of {}: {e}", log.journal_image.display()))
    })?;
    let mut block = vec![0; log.place.block_bytes as usize];
    if !found.log().read_held(0, &mut block) {
        return refuse("the held journal has no superblock".to_owned());
    }
    // Only an empty journal is compared with it.
    let is_empty = Superblock::decode(&raw).is_ok_and(|stored| stored.is_empty() && stored.errno == 0);
    let emptied = match is_empty {
        true => match crate::finish::emptied_by(&found.log(), &log.place, journal) {
            // Nothing that could be written home: no recovery of it has emptied this.
            Err(error) if error.is_refusal() => None,
            emptied => Some(emptied?),
        },
        false => None,
    };
    let books = HeldBooks {
        superblock: Superblock::decode(&block).map_err(|error| FinishError::Refused(error.to_string()))?,
        raw: &block,
        openings: found.opening(),
        handed_over: found.handed_over(),
        is_materialise: found.log().is_materialise(),
        emptied: emptied.as_deref(),
        closing_from: found.log().tail().filter(|_| found.is_closing()).map(|tail| tail.sequence),
        log_blocks: log.place.log_blocks,
    };
    books.judge(&raw).or_else(|why| if found.is_unopened() { Ok(Verdict::NotOpened) } else { refuse(why.sentence()) })
}

/// Whether the file system is the one that belongs to the held log, where the two are on disks of their own.
fn check_home(
    directory: &AreaDirectory,
    found: &FoundLog,
    log: &LogDescription,
    [home, journal]: [&LoggedFile; 2],
    is_aged: bool,
) -> Result<(), FinishError> {
    let mut block = vec![0; log.place.block_bytes as usize];
    let held = found.log();
    if !held.read_held(0, &mut block) {
        return Err(not_written(directory, log, &log.journal_image, "the held journal has no superblock"));
    }
    let books = Superblock::decode(&block).map_err(|error| FinishError::Refused(error.to_string()))?;
    let is_done = || is_home_already(&held, &log.place, home, journal, is_aged);
    match why_not_its_home("what is held", &log.place, &books, home, is_done)? {
        None => Ok(()),
        Some(why) => Err(not_written(directory, log, &log.home_image, &why)),
    }
}

/// Nothing of a held log is written to an image of its, and what to do about that.
fn not_written(directory: &AreaDirectory, log: &LogDescription, image: &Path, reason: &str) -> FinishError {
    let or_else = if image == log.journal_image {
        ""
    } else {
        "; if its VM's own is to be had still, put that back as it was left, and start again"
    };
    FinishError::Refused(format!(
        "{}: {reason}; the held journal is not written to it. If the image was restored, checked or made anew meanwhile, what is held is of no \
         use to it: 'amberlog recover --area {} --give-up {}' gives that up, and only that{or_else}",
        image.display(),
        directory.path().display(),
        log.home_image.display()
    ))
}

impl From<io::Error> for FinishError {
    fn from(error: io::Error) -> Self {
        FinishError::Failed(error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::description::WishDescription;
    use crate::layout::LogRun;
    use crate::remote::{MirrorFile, Phase, RemoteMark};
    use crate::scan::FoundLogPlace;

    /// An empty log, or one that begins at a block.
    fn superblock(start: u32) -> Vec<u8> {
        let mut block = vec![0; SUPERBLOCK_BYTES];
        for (offset, value) in [(0, 0xc03b_3998), (4, 4), (0x0c, 1024), (0x10, 64), (0x14, 1), (0x18, 7), (0x1c, start)]
        {
            block[offset..offset + 4].copy_from_slice(&u32::to_be_bytes(value));
        }
        block
    }

    /// Takes over what nobody has. A child that another test begins has the lock until it is a program of its own.
    fn taken_over(path: &Path, registry: &Path) -> AreaDirectory {
        for _ in 0..500 {
            match AreaDirectory::take_over(path, registry) {
                Err(DirectoryError::InUse { .. }) => std::thread::sleep(std::time::Duration::from_millis(10)),
                taken => return taken.expect("a directory of amberlog's"),
            }
        }
        panic!("somebody has {}", path.display())
    }

    /// Whoever is refused was promised that nothing was changed.
    #[test]
    fn what_is_refused_after_a_write_has_failed() {
        let errors =
            || [FinishError::Refused("it does not fit".to_owned()), FinishError::Damaged("it is torn".to_owned())];
        for (error, sentence) in errors().into_iter().zip(["it does not fit", "it is torn"]) {
            assert!(error.is_refusal() && !errors().map(|error| error.after(true)).iter().any(FinishError::is_refusal));
            assert!(error.after(false).is_refusal());
            let said = FinishError::Failed(sentence.to_owned()).followed_by("nothing was given up");
            assert!(!said.is_refusal() && said.to_string().starts_with(sentence), "asking changes nothing of that");
        }
        let file = LoggedFile::unlogged(&tempfile::tempfile().expect("a file")).expect("a descriptor");
        assert!(!file.has_written());
        file.clone().write_all_at(&[1], 0).expect("written");
        assert!(file.has_written(), "whoever wrote");
    }

    /// An image may have been served by several, one after the other, of which one lives, or is owed something.
    #[test]
    fn all_that_was_left_for_an_image_is_swept_whatever_is_named_first() {
        let base = tempfile::tempdir_in("/dev/shm").expect("tmpfs");
        let (vms, registry) = (base.path().join("vms"), base.path().join("registry"));
        let image = base.path().join("image");
        std::fs::write(&image, [0; 4096]).expect("an image");
        let registered = || {
            let directory = AreaDirectory::create(&vms, &registry).expect("made");
            directory.register(&image).expect("registered");
            directory
        };
        for living in 0..3 {
            let mut left: Vec<Option<AreaDirectory>> = (0..3).map(|_| Some(registered())).collect();
            let paths: Vec<PathBuf> = left.iter().flatten().map(|directory| directory.path().to_owned()).collect();
            let lives = left[living].take();
            drop(left);
            let stay = || [0, 1, 2].map(|at| paths[at].exists());
            let is_swept = (0..500).any(|_| {
                sweep_all_of(&image, &registry);
                // A child that another test begins has their locks until it is a program of its own.
                std::thread::sleep(std::time::Duration::from_millis(10));
                stay() == [0, 1, 2].map(|at| at == living)
            });
            assert!(is_swept, "of three that were left for it, number {living} lives: {:?} are there", stay());
            lives.expect("it lives").remove();
        }
    }

    /// The server may be lost: then the copy in tmpfs is all that there is.
    #[test]
    fn a_copy_stays_until_its_log_is_brought_home() {
        let base = tempfile::tempdir_in("/dev/shm").expect("tmpfs");
        let (vms, registry) = (base.path().join("vms"), base.path().join("registry"));
        let image = base.path().join("image");
        let place = FoundLogPlace {
            home_disk: 0,
            journal_disk: 0,
            home_start: 0,
            block_bytes: 1024,
            log_blocks: 64,
            home_blocks: 4096,
            runs: vec![LogRun { first_position: 0, offset: 2048, count: 64 }],
            own_blocks: Vec::new(),
            is_external: false,
            file_system_uuid: [0; 16],
        };
        let marked = RemoteMark { epoch: 1, nonce: [1; 16] }.write_into(&superblock(0)).expect("a superblock");
        let (left, empty) = (superblock(1), superblock(0));
        let mut claimed = marked.clone();
        claimed[0x70] = 1;
        let cases = [
            // Somebody was about to fetch it from its server, and died.
            (Phase::Open, false, &marked, &claimed, true),
            (Phase::Open, false, &marked, &marked, true),
            (Phase::Failed, false, &marked, &marked, true),
            (Phase::Failed, false, &left, &left, true),
            // Storage has all of it; nobody had it open; it was brought home, or somebody else has the disk.
            (Phase::Open, true, &left, &left, false),
            (Phase::Closed, false, &marked, &marked, false),
            (Phase::Lost, false, &marked, &marked, false),
            (Phase::Open, false, &marked, &empty, false),
            (Phase::Failed, false, &marked, &left, false),
        ];
        for (phase, is_stored, may_be, stored, is_owed) in cases {
            let mut bytes = vec![0; 2048];
            bytes.extend_from_slice(stored);
            std::fs::write(&image, bytes).expect("written");
            let directory = AreaDirectory::create(&vms, &registry).expect("made");
            directory.register(&image).expect("registered");
            let file = directory.directory().file(OsStr::new("log-0.copy"), How::MakeNew).expect("made");
            MirrorFile::make(file, &place).expect("made").say(|said| {
                (said.phase, said.is_stored, said.may_be) = (phase, is_stored, vec![may_be.clone()]);
            });
            let wish = WishDescription {
                place: place.clone(),
                placement: "remote".to_owned(),
                is_distrusted: false,
                storage_from: None,
                copy: Some("log-0.copy".to_owned()),
                may_go_on_unannounced: false,
            };
            directory.describe(&[], Vec::new(), vec![wish]).expect("described");
            let path = directory.path().to_owned();
            drop(directory);
            sweep(&vms, &registry);
            assert_eq!(path.exists(), is_owed, "{phase:?}, all is stored: {is_stored}");
            if is_owed {
                // Whether it is owed cannot be told where its image is not.
                let away = image.with_extension("away");
                std::fs::rename(&image, &away).expect("renamed");
                sweep(&vms, &registry);
                remove_finished(&taken_over(&path, &registry));
                assert!(path.exists(), "its image is away");
                std::fs::rename(&away, &image).expect("renamed");
                crate::registry::forget_image(&registry, &image_key(&image).expect("it is there"), &path);
                sweep(&vms, &registry);
                assert!(path.exists(), "its image has no entry any more");
                remove_finished(&taken_over(&path, &registry));
                assert!(path.exists());
                // Another process has brought it home.
                std::fs::write(&image, vec![0; 8192]).expect("written");
                remove_finished(&taken_over(&path, &registry));
                assert!(!path.exists());
            }
        }
    }
}
