//! Where the content of one log block is: the machine-address half of the paper's tuple, in 32 bits.

use guest_memory::PageId;

const KIND_SHIFT: u32 = 29;
const VALUE_MASK: u32 = (1 << KIND_SHIFT) - 1;
const ABSORBED: u32 = 7;
/// Slots of a pool are fewer: `LOG_BLOCKS_MAX`, twice.
const SLOTS_MAX: u32 = 1 << 27;

/// What the guest has done at home of a version that is held: it has written, or may have, something newer past its journal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Past {
    /// It has asked for that when this version was the newest one. What is at home is not known; who was not answered asks again.
    Begun,
    /// It is there, and nothing else is on its way there.
    Written,
}

/// Where the content of one log block is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Location {
    /// Nothing is held: what the journal's own place on storage has is what the log has.
    None,
    /// In this page of the guest's own memory, which is protected.
    Guest(PageId),
    /// Copied, in this slot of the copy pool.
    Block(u32),
    /// Copied without its zeros, in this small slot of the copy pool (control blocks).
    Small(u32),
    /// Its home block on storage has the same content.
    Home,
    /// Superseded by a newer committed version, or revoked: nobody needs it any more.
    Gone,
    /// Written to its own place on storage because there was no memory for it.
    Storage,
}

impl Location {
    /// Packs kind and number; the value that a table starts with, zero, is [`Location::None`].
    pub fn pack(self) -> u32 {
        let (kind, value) = match self {
            Location::None => (0, 0),
            Location::Guest(page) => (1, page.0),
            Location::Block(slot) => (2, slot),
            Location::Small(slot) => (3, slot),
            Location::Home => (4, 0),
            Location::Gone => (5, 0),
            Location::Storage => (6, 0),
        };
        assert!(value <= VALUE_MASK, "{self:?} has no word: its number is too large");
        kind << KIND_SHIFT | value
    }

    /// The word of a copied block whose home write the guest was told of, while its home block on storage does not have it yet
    /// (`absorbed`). An amberlog that does not know of such takes it for a damaged one.
    pub fn pack_absorbed(slot: u32) -> u32 {
        assert!(slot <= VALUE_MASK, "an absorbed block in slot {slot} has no word: its number is too large");
        ABSORBED << KIND_SHIFT | slot
    }

    /// Whether a word is such a one.
    pub fn is_absorbed(word: u32) -> bool {
        word >> KIND_SHIFT == ABSORBED
    }

    /// The word of a held version over which the guest has written, or may have, past its journal. An amberlog that does not know of such
    /// takes it for a damaged one. Nothing where no word says so.
    pub fn pack_past(self, past: Past) -> Option<u32> {
        let (kind, value) = match (self, past) {
            (Location::Guest(page), Past::Begun) => (4, page.0),
            (Location::Guest(page), Past::Written) => (5, page.0),
            (Location::Block(slot), Past::Begun) => (6, slot),
            (Location::Block(slot), Past::Written) => (0, slot),
            _ => return None,
        };
        (value < VALUE_MASK).then_some(kind << KIND_SHIFT | (value + 1))
    }

    /// What a word says of that.
    pub fn past(word: u32) -> Option<Past> {
        match (word >> KIND_SHIFT, word & VALUE_MASK) {
            (_, 0) => None,
            (4 | 6, _) => Some(Past::Begun),
            (0 | 5, _) => Some(Past::Written),
            _ => None,
        }
    }

    /// The inverse of [`Location::pack`], [`Location::pack_absorbed`] and [`Location::pack_past`]; nothing for a word that was never packed
    /// (a damaged table).
    pub fn unpack(word: u32) -> Option<Location> {
        let value = word & VALUE_MASK;
        Some(match (word >> KIND_SHIFT, value) {
            (0, 0) => Location::None,
            (1, page) => Location::Guest(PageId(page)),
            (2 | ABSORBED, slot) => Location::Block(slot),
            (3, slot) => Location::Small(slot),
            (4, 0) => Location::Home,
            (5, 0) => Location::Gone,
            (6, 0) => Location::Storage,
            (4 | 5, page) => Location::Guest(PageId(page - 1)),
            (0 | 6, slot) if slot <= SLOTS_MAX => Location::Block(slot - 1),
            _ => return None,
        })
    }

    /// Whether the content is held in memory by us or for us.
    pub fn is_held(self) -> bool {
        matches!(self, Location::Guest(_) | Location::Block(_) | Location::Small(_))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packing_is_reversible() {
        for location in [
            Location::None,
            Location::Guest(PageId(0)),
            Location::Guest(PageId(VALUE_MASK)),
            Location::Block(17),
            Location::Small(VALUE_MASK),
            Location::Home,
            Location::Gone,
            Location::Storage,
        ] {
            assert_eq!(Location::unpack(location.pack()), Some(location));
        }
        assert_eq!(Location::None.pack(), 0, "an untouched table holds nothing");
        assert_eq!(Location::unpack(VALUE_MASK), None);
        let word = Location::pack_absorbed(17);
        assert_eq!((Location::unpack(word), Location::is_absorbed(word)), (Some(Location::Block(17)), true));
        assert!(!Location::is_absorbed(Location::Block(17).pack()));
    }

    #[test]
    #[should_panic(expected = "Block(536870912) has no word: its number is too large")]
    fn a_number_that_is_too_large_is_not_cut() {
        Location::Block(VALUE_MASK + 1).pack();
    }

    #[test]
    #[should_panic(expected = "an absorbed block in slot 536870912 has no word")]
    fn nor_is_that_of_an_absorbed_block() {
        Location::pack_absorbed(VALUE_MASK + 1);
    }

    #[test]
    fn a_word_says_what_was_written_past_it() {
        for location in [Location::Guest(PageId(0)), Location::Guest(PageId(VALUE_MASK - 1)), Location::Block(0)] {
            for past in [Past::Begun, Past::Written] {
                let word = location.pack_past(past).expect("a word");
                assert_eq!((Location::unpack(word), Location::past(word)), (Some(location), Some(past)));
                assert!(!Location::is_absorbed(word));
            }
        }
        for location in [Location::Guest(PageId(VALUE_MASK)), Location::Small(1), Location::Home, Location::None] {
            assert_eq!(location.pack_past(Past::Written), None);
            assert_eq!(Location::past(location.pack()), None);
        }
        assert_eq!(Location::past(Location::pack_absorbed(17)), None);
    }
}
