//! Numbers of compounds (crate `durability`) that the guest's own transactions will have.
//!
//! A compound holds one transaction of the guest or several, so its number is behind the guest's by itself. Where durability by age
//! begins again and again, it is not: each time what is owed becomes a compound, whether the guest has committed anything since or not.
//! Whoever replays the guest's next log would take such a compound, right behind a transaction of the guest, for the next one.
//!
//! So what has such a number is overwritten before the guest's own log counts in that place again: when it is closed, handed over,
//! recovered, or written there as it is. Storage must not need the compounds any more then: it says that the log is held (the error
//! mark), or that it is empty. Where what is held is lost beside the error mark, nobody overwrites anything: so the mark itself says a number that
//! no compound has ([`crate::mark::marked_behind`]), and the next kernel begins there.
//!
//! What this must never do: overwrite a block of the guest's. Those that are here are held, those that are not have earlier numbers, or are
//! known to be there.
//!
//! Failure story: what was not overwritten is so when the same is tried again; until then whoever asked fails.

use crate::scan::FoundLogPlace;
use jbd2::{HEADER_BYTES, sequence};
use journal_area::{HeldLog, Location};
use std::io;
use write_log::LoggedFile;

/// What no power cut tears, and what is in front of each control block is in.
pub(crate) const SECTOR_BYTES: usize = 512;

/// Whether compounds, whose numbers are below `numbered`, may have numbers that the guest gives from `next` on.
pub(crate) fn may_meet(next: u32, numbered: Option<u32>) -> bool {
    numbered.is_some_and(|numbered| sequence::is_after(numbered, next))
}

/// Overwrites the heads of what has such a number, but for blocks of the guest's own log that are in their places for want of memory: one of a
/// transaction that is not committed has the next number itself. On return that is durable.
///
/// This goes through the host's cache by pages. Where blocks of the log share theirs with homes ([`is_alone_in_its_page`]), no home write
/// may be under way.
///
/// [`is_alone_in_its_page`]: crate::opening::is_alone_in_its_page
///
/// # Errors
/// When the log's place cannot be read or written.
pub(crate) fn wipe(
    held: &HeldLog<'_>,
    place: &FoundLogPlace,
    journal: &LoggedFile,
    (next, numbered): (u32, Option<u32>),
) -> io::Result<()> {
    let Some(numbered) = numbered.filter(|_| may_meet(next, numbered)) else { return Ok(()) };
    // A sector is whole or not: of a block that is half zeros a power cut would leave one that no kernel understands.
    let nothing = [0; SECTOR_BYTES];
    let failed_flushes = journal.failed_flushes();
    for position in 1..place.log_blocks {
        let Some(offset) = place.offset_of(position) else { continue };
        if held.location(position) == Location::Storage {
            continue;
        }
        let mut head = [0; HEADER_BYTES];
        journal.read_exact_at(&mut head, offset)?;
        let meets = |number: u32| sequence::is_at_or_after(number, next) && sequence::is_after(numbered, number);
        if jbd2::peek(&head).is_some_and(|header| meets(header.sequence)) {
            journal.write_all_at(&nothing, offset)?;
        }
    }
    journal.sync_since(failed_flushes)
}
