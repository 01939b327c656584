//! The number and the count of the mark on storage: by them an image that is older than its region is told from the true one.
//!
//! While a region has a log, the journal superblock on storage is the mark, and the region knows its checksum. Blocks leave the
//! region when they are durable at home; an image that was copied before does not have them. So the mark is written anew,
//! with the next count, before blocks leave: with the flush of every slice of a checkpoint and of every transaction whose appends go
//! home, and otherwise when the last one is older than [`AGE`].
//!
//! Storage has even counts only. First the region is told an odd one, which says that storage has the count before it or the one after;
//! then storage is written and flushed; then the region is told of that, and only then do blocks leave. So a crash at any
//! point leaves two that belong together, and two of different moments never seem to.

use super::captured::Captured;
use super::route::NvmRoute;
use crate::mark::{MarkKind, marked};
use crate::opening::{is_alone_in_its_page, write_mark_bytes, write_mark_unflushed};
use crate::stored::{Says, Stored};
use jbd2::SUPERBLOCK_BYTES;
use journal_area::Opening;
use std::io;
use std::time::{Duration, Instant};

/// How old a mark may be when blocks leave the region that the guest wrote home itself.
const AGE: Duration = Duration::from_secs(1);
/// How many counts lie between the marks of two copies that are still told apart by which is the older. Further apart they are
/// of two openings, and refused as such.
const DISTANCE_MAX: u64 = 1 << 15;

pub(crate) type Mark = [u8; SUPERBLOCK_BYTES];

fn opening_of(superblock: &[u8]) -> Option<Opening> {
    match Stored::read(superblock).says {
        Says::Nvm(opening) => Some(opening),
        _ => None,
    }
}

fn with_opening(superblock: &[u8], opening: &Opening) -> io::Result<Mark> {
    let mark = marked(superblock, MarkKind::Nvm, opening)?;
    mark.first_chunk().copied().ok_or_else(|| io::Error::other("the journal superblock is cut short"))
}

/// The mark with a count that is so much higher; the same where there is no count, as an older amberlog leaves it.
fn counted_on(mark: &Mark, by: u64) -> io::Result<Mark> {
    match opening_of(mark) {
        Some(opening) => with_opening(mark, &Opening { count: opening.count + by, ..opening }),
        None => Ok(*mark),
    }
}

/// The mark that comes after one.
fn next(mark: &Mark) -> io::Result<Mark> {
    counted_on(mark, 2)
}

/// The journal superblock that storage carries while the region has the log: empty, with an error, and with its first count.
pub(crate) fn first(superblock: &[u8]) -> io::Result<Mark> {
    with_opening(superblock, &Opening { number: remote_journal::random(), count: 0 })
}

/// What the region knows a mark by. A CRC over bytes that end with their own CRC is the same whatever they are, and a mark has
/// one in it: so number and count are taken once more.
pub(crate) fn checksum(mark: &Mark) -> u32 {
    let crc = crc32c::crc32c(mark);
    match opening_of(mark) {
        Some(opening) => {
            crc32c::crc32c_append(crc32c::crc32c_append(crc, &opening.number), &opening.count.to_le_bytes())
        }
        None => crc,
    }
}

/// How a superblock from storage stands to a region's mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Standing {
    /// It is the mark, or one of the two that the region is between.
    Same,
    /// It is a mark of before: the image is an older copy.
    Older,
    /// It is a later mark: the region is an older copy.
    Newer,
    /// It is another opening's, or no mark.
    Other,
}

/// Compares them. Both are the journal's own: its UUID is the same. Only a mark of the same number can have the region's checksum.
pub(crate) fn standing(on_storage: &Mark, mark_checksum: u32) -> Standing {
    let is_it = |mark: &Mark| checksum(mark) == mark_checksum;
    if is_it(on_storage) {
        return Standing::Same;
    }
    let Some(opening) = opening_of(on_storage) else { return Standing::Other };
    let count = opening.count;
    let with = |count: Option<u64>| {
        let counted = count.and_then(|count| with_opening(on_storage, &Opening { count, ..opening }).ok());
        counted.is_some_and(|mark| is_it(&mark))
    };
    // The region is between two marks.
    if with(count.checked_add(1)) || with(count.checked_sub(1)) {
        return Standing::Same;
    }
    for distance in 2..DISTANCE_MAX {
        if with(count.checked_add(distance)) {
            return Standing::Older;
        }
        if with(count.checked_sub(distance)) {
            return Standing::Newer;
        }
    }
    Standing::Other
}

/// Whether a journal superblock is the mark of the region whose owner has this checksum.
pub fn is_mark(superblock: &[u8], mark_checksum: u32) -> bool {
    superblock.first_chunk().is_some_and(|superblock| standing(superblock, mark_checksum) == Standing::Same)
}

/// Whether a journal superblock says that the log is in some region.
pub(super) fn is_on_nvm(superblock: &[u8]) -> bool {
    opening_of(superblock).is_some()
}

impl NvmRoute {
    /// Whether the superblock on storage is the mark, and stays so.
    fn has_mark(&self) -> bool {
        self.leaving.is_none() && self.closing.as_ref().is_none_or(|closing| !closing.is_on_its_way)
    }

    /// Writes the next mark, which the next flush makes durable.
    pub(super) fn begin_mark(&mut self, captured: &mut Captured) -> io::Result<()> {
        if !self.has_mark() || captured.next_mark.is_some() || !is_alone_in_its_page(&captured.log) {
            return Ok(());
        }
        self.expect_mark(captured)?;
        let mark = next(&captured.mark)?;
        // Where this fails, storage may have it all the same: the region knows that.
        write_mark_unflushed(&captured.log, &mark)?;
        captured.next_mark = Some(mark);
        Ok(())
    }

    /// The region is told that storage has this mark or the next.
    fn expect_mark(&self, captured: &mut Captured) -> io::Result<()> {
        captured.owner.mark_checksum = checksum(&counted_on(&captured.mark, 1)?);
        captured.journal.set_owner(&captured.owner).map_err(io::Error::other)
    }

    /// A flush has ended that was begun after the next mark was written: the region is told.
    pub(super) fn end_mark(&mut self, captured: &mut Captured) -> io::Result<()> {
        if !self.has_mark() {
            return Ok(());
        }
        let Some(mark) = captured.next_mark.take() else { return Ok(()) };
        captured.owner.mark_checksum = checksum(&mark);
        captured.mark = mark;
        captured.marked = Instant::now();
        captured.journal.set_owner(&captured.owner)?;
        Ok(())
    }

    /// Both at once, where the last one is too old.
    pub(super) fn renew_old_mark(&mut self, captured: &mut Captured) -> io::Result<()> {
        let is_young = captured.marked.elapsed() < AGE;
        if is_young || !self.has_mark() || captured.journal.is_empty() || !is_alone_in_its_page(&captured.log) {
            return Ok(());
        }
        let mark = match captured.next_mark {
            Some(mark) => mark,
            None => {
                self.expect_mark(captured)?;
                next(&captured.mark)?
            }
        };
        write_mark_bytes(&captured.log, &mark)?;
        captured.next_mark = Some(mark);
        self.end_mark(captured)
    }
}

#[cfg(test)]
mod tests {
    use super::{DISTANCE_MAX, Mark, Standing, checksum, counted_on, next, opening_of, standing, with_opening};
    use jbd2::SuperblockEdit;
    use jbd2::build::SuperblockBuilder;
    use journal_area::Opening;

    #[test]
    fn a_mark_says_which_of_two_copies_is_the_older() {
        for superblock in [SuperblockBuilder::default(), SuperblockBuilder::default().checksum(jbd2::Checksum::V3)] {
            of_one_journal(&superblock.build());
        }
    }

    fn of_one_journal(superblock: &[u8]) {
        let mark = || super::first(superblock).expect("a superblock");
        let later = |mark: &Mark| next(mark).expect("a superblock");
        let marks: Vec<Mark> = std::iter::successors(Some(mark()), |mark| Some(later(mark))).take(6).collect();
        for (index, region) in marks.iter().enumerate() {
            let checksum = checksum(region);
            for (other, on_storage) in marks.iter().enumerate() {
                let expected = match other {
                    _ if other == index => Standing::Same,
                    _ if other < index => Standing::Older,
                    _ => Standing::Newer,
                };
                assert_eq!(standing(on_storage, checksum), expected, "{other} on storage, {index} in the region");
                // Between this mark and the next.
                let between = super::checksum(&counted_on(region, 1).expect("a superblock"));
                let expected = match other {
                    _ if other == index || other == index + 1 => Standing::Same,
                    _ if other < index => Standing::Older,
                    _ => Standing::Newer,
                };
                assert_eq!(standing(on_storage, between), expected, "{other} on storage, after {index} in the region");
            }
            let opening = opening_of(region).expect("a mark");
            let far = Opening { count: 2 * DISTANCE_MAX, ..opening };
            assert_eq!(standing(&with_opening(region, &far).expect("a mark"), checksum), Standing::Other);
        }
        // Another opening, with the same count; and one without a number.
        assert_eq!(standing(&mark(), checksum(&marks[0])), Standing::Other, "another number");
        let mut other = marks[0];
        SuperblockEdit::new(&mut other).expect("a superblock").sequence(99).seal();
        assert_eq!(standing(&other, checksum(&marks[0])), Standing::Other);
        assert!(marks.iter().all(|mark| super::is_on_nvm(mark)));
        let mut unnumbered: Mark = *superblock.first_chunk().expect("a block");
        let mut edit = SuperblockEdit::new(&mut unnumbered).expect("a superblock");
        edit.start(0).errno(crate::stored::MARK_ERRNO).seal();
        assert_eq!(standing(&unnumbered, checksum(&marks[0])), Standing::Other);
        let same = standing(&unnumbered, checksum(&unnumbered));
        assert_eq!(same, Standing::Same, "as an older amberlog leaves it");
        assert!(next(&unnumbered).expect("a superblock") == unnumbered && !super::is_on_nvm(&unnumbered));
    }
}
