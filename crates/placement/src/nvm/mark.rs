//! The number and the count of the mark on storage: by them an image that is older than its region is told from the true one.
//!
//! While a region has a log, the journal superblock on storage is the mark, and the region knows its checksum. Blocks leave the
//! region when they are durable at home; an image that was copied before does not have them. Nor does it have the data that its guest
//! has written home since, past the journal, and which the region's next transactions refer to (`data=ordered`). So the mark is
//! written anew, with the next count, before blocks leave and before what follows is committed: with the flush of every slice of a
//! checkpoint and of every transaction whose appends go home, and otherwise, with every flush that reaches the disk anyway, when the
//! last one is older than [`super::NvmOptions::mark_age`]. So it is while the log leaves the region, until its own superblock is on its way.
//!
//! Storage has even counts only. First the region is told an odd one, which says that storage has the count before it or the one after;
//! then storage is written and flushed; then the region is told of that, and only then do blocks leave. So a crash at any
//! point leaves two that belong together, and two of different moments never seem to.

use crate::mark::{MarkKind, marked};
use crate::stored::{Says, Stored};
use jbd2::SUPERBLOCK_BYTES;
use journal_area::Opening;
use std::io;
use std::time::{Duration, Instant};

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
pub(super) fn counted_on(mark: &Mark, by: u64) -> io::Result<Mark> {
    match opening_of(mark) {
        Some(opening) => with_opening(mark, &Opening { count: opening.count + by, ..opening }),
        None => Ok(*mark),
    }
}

/// The mark that comes after one.
pub(super) fn next(mark: &Mark) -> io::Result<Mark> {
    counted_on(mark, 2)
}

/// The journal superblock that storage carries while the region has the log: empty, with an error, and with its first count.
pub(crate) fn first(superblock: &[u8]) -> io::Result<Mark> {
    with_opening(superblock, &Opening { number: remote_journal::random(), count: 0 })
}

/// The number of an opening.
pub(super) fn number(mark: &Mark) -> Option<[u8; 16]> {
    opening_of(mark).map(|opening| opening.number)
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

/// The marks of an open log: the one that storage has durably, and the one that comes after it.
///
/// Each time that a mark is written has a number. A flush makes durable what was written when it began; one that fails makes doubtful
/// all that was written until it ended, and a later flush says nothing of that.
#[derive(Debug)]
pub(super) struct Marks {
    durable: Mark,
    /// Written, and the region was not told yet.
    next: Option<Mark>,
    /// Number of the last time that one was written, …
    written: u64,
    /// … of the last that is known to be durable, …
    told: u64,
    /// … and of the last that a failed flush may have lost.
    lost: u64,
    /// When the last one became durable.
    at: Instant,
}

/// What has to be written so that the next flush makes a new mark durable.
#[derive(Debug)]
pub(super) enum ToWrite {
    /// It is written already, under this number.
    Nothing(u64),
    /// The same once more: a failed flush may have lost it.
    Again(Box<Mark>),
    /// The one after the durable one.
    Next,
}

impl Marks {
    pub fn new(durable: Mark) -> Self {
        Marks { durable, next: None, written: 0, told: 0, lost: 0, at: Instant::now() }
    }

    /// What storage has, or had before the next one.
    pub fn durable(&self) -> &Mark {
        &self.durable
    }

    pub fn to_write(&self) -> ToWrite {
        match self.next {
            Some(_) if self.written > self.lost => ToWrite::Nothing(self.written),
            Some(mark) => ToWrite::Again(Box::new(mark)),
            None => ToWrite::Next,
        }
    }

    /// The number of the last one that is known to be durable.
    pub fn told(&self) -> u64 {
        self.told
    }

    /// How long ago it became so.
    pub fn age(&self) -> Duration {
        self.at.elapsed()
    }

    /// Gives the number of that.
    pub fn was_written(&mut self, mark: Mark) -> u64 {
        self.next = Some(mark);
        self.written += 1;
        self.written
    }

    /// Storage has the durable one, whatever was written since.
    pub fn forget_next(&mut self) {
        self.next = None;
        self.told = self.written;
    }

    /// A flush has failed.
    pub fn flush_failed(&mut self) {
        self.lost = self.written;
    }

    /// Whether what was written under this number may not be on storage, whatever a flush says.
    pub fn is_lost(&self, number: u64) -> bool {
        number > self.told && number <= self.lost
    }

    /// The mark with this number is durable. Gives it, unless that was known.
    pub fn became_durable(&mut self, number: u64) -> Option<Mark> {
        if number <= self.told {
            return None;
        }
        self.told = number;
        self.durable = self.next.take()?;
        self.at = Instant::now();
        Some(self.durable)
    }
}

#[cfg(test)]
mod tests {
    use super::with_opening;
    use super::{DISTANCE_MAX, Mark, Marks, Standing, ToWrite, checksum, counted_on, next, opening_of, standing};
    use jbd2::SuperblockEdit;
    use jbd2::build::SuperblockBuilder;
    use journal_area::Opening;

    /// Storage with a cache: a flush that fails loses what was not on the medium yet, and says so once.
    struct Storage {
        cached: Mark,
        is_dirty: bool,
        medium: Mark,
    }

    #[test]
    fn the_region_is_told_of_no_mark_that_storage_may_not_have() {
        for seed in 0..300 {
            let mut random = seeded_random::Random::new(seed);
            let first = super::first(&SuperblockBuilder::default().build()).expect("a superblock");
            let mut marks = Marks::new(first);
            let mut storage = Storage { cached: first, is_dirty: false, medium: first };
            // Flushes that are under way, with the number that each was begun with.
            let mut flushes: Vec<u64> = Vec::new();
            let mut writes_since_told = 0;
            for _ in 0..200 {
                if random.below(2) == 0 && flushes.len() < 4 {
                    let mark = match marks.to_write() {
                        ToWrite::Nothing(number) => {
                            flushes.push(number);
                            continue;
                        }
                        ToWrite::Again(mark) => *mark,
                        ToWrite::Next => next(marks.durable()).expect("a superblock"),
                    };
                    (storage.cached, storage.is_dirty) = (mark, true);
                    writes_since_told += 1;
                    flushes.push(marks.was_written(mark));
                } else if !flushes.is_empty() {
                    let number = flushes.swap_remove(random.below(flushes.len() as u64) as usize);
                    let has_failed = random.below(8) == 0;
                    if has_failed {
                        storage.is_dirty = false;
                        marks.flush_failed();
                        writes_since_told = 0;
                        continue;
                    }
                    // It need not cover what was written since it began.
                    let covers = number == marks.written || random.below(2) == 0;
                    if covers && std::mem::replace(&mut storage.is_dirty, false) {
                        storage.medium = storage.cached;
                    }
                    if !marks.is_lost(number) && marks.became_durable(number).is_some() {
                        writes_since_told = 0;
                    }
                    assert!(*marks.durable() == storage.medium || !storage.is_older(marks.durable()), "seed {seed}");
                }
                assert!(writes_since_told < 2, "seed {seed}: a mark is written once, but for flushes that fail");
            }
        }
    }

    impl Storage {
        /// Whether the medium has a mark of before this one.
        fn is_older(&self, mark: &Mark) -> bool {
            standing(&self.medium, checksum(mark)) == Standing::Older
        }
    }

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
        edit.start(0).errno(jbd2::ERRNO_EIO).seal();
        assert_eq!(standing(&unnumbered, checksum(&marks[0])), Standing::Other);
        let same = standing(&unnumbered, checksum(&unnumbered));
        assert_eq!(same, Standing::Same, "as an older amberlog leaves it");
        assert!(next(&unnumbered).expect("a superblock") == unnumbered && !super::is_on_nvm(&unnumbered));
    }
}
