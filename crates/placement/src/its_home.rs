//! Whether a file system is the one that a log was written for which is elsewhere than in its own place, held or on a server, where that
//! place is on a disk of its own: the mark says which state of the journal's disk the log belongs to, and nothing of the other disk.
//!
//! That one may have been restored, checked, or made anew while nothing ran. Its superblock tells: the UUID, the journal that it names, and that
//! its journal has to be replayed, which a kernel writes before its journal is opened ([`crate::foreign`]) and takes away after it is closed.
//! Whoever restored a copy that was made while the file system was mounted cannot be told from who did not.
//!
//! What must never happen: that blocks of one file system are written onto another, or onto an older state that no kernel would replay a journal
//! onto. Failure story: a recovery that was cut off before it emptied the journal has taken the word away itself, and has put home the UUID that
//! the log says. It is told by all of the log being there.

use crate::scan::FoundLogPlace;
use jbd2::Superblock;
use recovery::{Error, uuid_text};
use std::io;
use write_log::LoggedFile;

/// What speaks against it that `home` is where a log belongs that is on another disk; nothing where nothing does. `what` is what there is of
/// the log, in words; `books` is the journal's superblock as its guest has written it last; `is_done` finds out whether all that a recovery
/// would write home is there already.
///
/// # Errors
/// When the file system cannot be read, and those of `is_done`.
pub(crate) fn why_not_its_home(
    what: &str,
    place: &FoundLogPlace,
    books: &Superblock,
    home: &LoggedFile,
    is_done: impl FnOnce() -> Result<bool, Error>,
) -> Result<Option<String>, Error> {
    if !place.is_external || place.home_disk == place.journal_disk {
        // The mark is on the same disk.
        return Ok(None);
    }
    let at = place.home_start;
    let mut raw = [0; extfs::SUPERBLOCK_BYTES];
    let read = home.read_exact_at(&mut raw, at + extfs::SUPERBLOCK_OFFSET);
    let found = match read.map(|()| extfs::Superblock::parse(&raw)) {
        Ok(Ok(found)) => found,
        Ok(Err(error)) => return Ok(Some(format!("at byte {at} of it {error} any more"))),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
            return Ok(Some(format!("it ends before byte {at}, where its file system was")));
        }
        Err(source) => return Err(Error::Failed { what: "reading the file system's superblock".to_owned(), source }),
    };
    // A file system that is mounted can be given another UUID, and the journal is told so by whoever does that.
    let is_user = books.nr_users > 0 && found.uuid == books.first_user;
    if found.uuid != place.file_system_uuid && !is_user {
        // The log of one that was given it while it was mounted has that UUID, too: a recovery has put it there, if all of the log is there.
        if found.journal_uuid == books.uuid && !found.needs_recovery() && is_done()? {
            return Ok(None);
        }
        let [is, was] = [&found.uuid, &place.file_system_uuid].map(uuid_text);
        let mut why = format!("the file system at byte {at} of it is {is}, and {what} is the journal of {was}");
        // Whoever gave it that while it was mounted need not have told its journal (the kernel does not, asked by tune2fs), and so does a clone
        // look that was given a UUID of its own: a person has to say which it is. tune2fs would ask for the journal's replay first, and debugfs
        // without -n for bitmaps that fit their checksums, which they need not before that replay.
        if found.journal_uuid == books.uuid && found.needs_recovery() {
            why += &format!(
                ", which it may be: it names the same journal, and was mounted. If it is, and was given another UUID while it was, give it the old \
                 one back, and try again: debugfs -n -w -R 'set_super_value uuid {was}' 'IMAGE?offset={at}'. A copy that was given a UUID of its \
                 own is none"
            );
        }
        return Ok(Some(why));
    }
    if found.journal_uuid != books.uuid {
        return Ok(Some(format!(
            "the file system at byte {at} of it has the journal {}, and {what} is the journal {}",
            uuid_text(&found.journal_uuid),
            uuid_text(&books.uuid)
        )));
    }
    if found.needs_recovery() || is_done()? {
        return Ok(None);
    }
    Ok(Some(format!(
        "the file system at byte {at} of it does not say that its journal has to be replayed, as it did when its VM died, and not all of \
         {what} is there: it is an older copy, or was used since"
    )))
}
