//! Regions of one device that was cut in another way. A region that owes something is nobody's to write into, whichever part of the device
//! it is: where it lies in the part that is asked for, around it or beside it, that part is refused.
//!
//! A region is found by its superblock, and only where a region can begin. What lies in a region that has an owner is what that guest committed,
//! and a guest can commit whatever it likes, so nothing in there is taken for a superblock. When the region is given back, what looks
//! like one is taken away ([`crate::owner::clear`]): a guest must not have its neighbours refused after its end.

use crate::layout::{Geometry, MAGIC, PAGE_BYTES, field};
use crate::medium::word_of;
use crate::owner::OwnerWord;
use std::collections::BTreeSet;
use std::io;

/// Bytes of a superblock that say how large a region is and whether it has an owner.
pub(super) const HEAD_BYTES: usize = 256;

/// These.
pub(super) type Head = [u8; HEAD_BYTES];

/// What a region is to whoever wants its place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum What {
    /// It has an owner.
    Owed,
    /// It cannot be told: why not.
    Unknown(String),
}

/// A region that is not to be written into.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Neighbour {
    /// Its first byte in the device, and the one behind it.
    pub begin: u64,
    pub end: u64,
    pub what: What,
}

impl Neighbour {
    /// Reads what lies at `begin`. Nothing where there is no region, or a free one.
    fn read(begin: u64, head: &Head) -> Option<Self> {
        if word_of(head, field::MAGIC) != MAGIC {
            return None;
        }
        let what = match Geometry::decode(head).and_then(|_| OwnerWord::decode(word_of(head, field::OWNER))) {
            Ok(OwnerWord { record: None, .. }) => return None,
            Ok(_) => What::Owed,
            Err(error) => What::Unknown(error.to_string()),
        };
        // Of one that is damaged it is not known where it ends.
        let len = Geometry::len_in(head).unwrap_or(PAGE_BYTES);
        Some(Neighbour { begin, end: begin.saturating_add(len), what })
    }
}

/// The first region that reaches into `len` bytes from `offset` on and is not to be written into, but for the one that begins just there: whoever
/// opens that reads it. `beginnings` are the places where one can begin.
pub(super) fn overlapping(
    beginnings: &BTreeSet<u64>,
    (offset, len): (u64, u64),
    head_at: &dyn Fn(u64) -> io::Result<Head>,
) -> io::Result<Option<Neighbour>> {
    let mut content_until = 0;
    for begin in beginnings.range(..offset + len) {
        if *begin < content_until {
            continue;
        }
        let Some(neighbour) = Neighbour::read(*begin, &head_at(*begin)?) else { continue };
        if *begin != offset && neighbour.end > offset {
            return Ok(Some(neighbour));
        }
        content_until = neighbour.end;
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::doubled;

    const DEVICE: u64 = 16 << 20;

    /// A superblock of a region with an owner, or a free one.
    fn head(begin: u64, bytes: u64, is_owed: bool) -> Head {
        let mut head = [0; HEAD_BYTES];
        let geometry = Geometry::fill(begin, bytes, 4096, 1).expect("room");
        for (index, word) in geometry.words().iter().enumerate() {
            head[index * 8..index * 8 + 8].copy_from_slice(&word.to_le_bytes());
        }
        let owner = OwnerWord { epoch: 3, record: is_owed.then_some(1) };
        head[field::OWNER as usize..][..8].copy_from_slice(&owner.encode().to_le_bytes());
        head
    }

    fn find(device: &[(u64, Head)], place: (u64, u64)) -> Option<(u64, u64)> {
        let head_at =
            |at: u64| Ok(device.iter().find(|(begin, _)| *begin == at).map_or([0; HEAD_BYTES], |(_, head)| *head));
        let beginnings = crate::medium::region_choice::beginnings(DEVICE);
        overlapping(&beginnings, place, &head_at).expect("read").map(|found| (found.begin, found.end))
    }

    const WHOLE: (u64, u64) = (0, DEVICE);
    const HALVES: [(u64, u64); 2] = [(0, 8 << 20), (8 << 20, 8 << 20)];
    const LAST_QUARTER: (u64, u64) = (12 << 20, 4 << 20);

    #[test]
    fn what_lies_within_around_or_across_is_found_if_it_owes_something() {
        let third = (4 << 20, 4 << 20);
        for (owed, asked) in [
            (HALVES[1], WHOLE),
            (WHOLE, HALVES[1]),
            (WHOLE, LAST_QUARTER),
            (LAST_QUARTER, HALVES[1]),
            (third, HALVES[0]),
            ((4 << 20, 6 << 20), HALVES[1]),
        ] {
            let region = |is_owed| [(owed.0, head(owed.0, owed.1, is_owed))];
            assert_eq!(find(&region(true), asked), Some((owed.0, owed.0 + owed.1)), "{owed:?} for {asked:?}");
            assert_eq!(find(&region(false), asked), None, "{owed:?} for {asked:?}, and it was given back");
        }
        let halves = HALVES.map(|(begin, bytes)| (begin, head(begin, bytes, true)));
        assert_eq!(find(&halves, HALVES[0]), None, "they are beside each other");
        assert_eq!(find(&halves, HALVES[1]), None, "they are beside each other");
    }

    #[test]
    fn what_a_guest_committed_is_no_region() {
        // A guest of the first half has written down one that would reach into the second.
        let forged = (4 << 20, head(4 << 20, 8 << 20, true));
        let first = |is_owed| (0, head(0, HALVES[0].1, is_owed));
        assert_eq!(find(&[first(true), forged], HALVES[1]), None);
        assert_eq!(find(&[first(true), forged], HALVES[0]), None, "nor is it to whoever brings the first half home");
        assert_eq!(find(&[first(false), forged], HALVES[1]), Some((4 << 20, 12 << 20)));
    }

    #[test]
    fn what_cannot_be_read_is_not_written_over() {
        let mut damaged = head(LAST_QUARTER.0, LAST_QUARTER.1, false);
        damaged[0x18] ^= 1;
        assert!(find(&[(LAST_QUARTER.0, damaged)], HALVES[1]).is_some());
        assert_eq!(find(&[(0, damaged)], HALVES[1]), None, "where it ended nobody knows");
        let mut of_nobody = head(0, DEVICE, true);
        of_nobody[field::OWNER as usize..][..8].copy_from_slice(&(doubled(7) ^ 1).to_le_bytes());
        assert_eq!(find(&[(0, of_nobody)], HALVES[1]), Some(WHOLE));
    }
}
