//! What the journal superblock on storage means to a region that has its log: a table like those of [`crate::stored`].

use super::mark::{Standing, standing};
use crate::stored::{Says, Stored};
use jbd2::Superblock;
use nvm_journal::{Found, Owner};

/// What a region of NVM knows of the log that it has.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RegionBooks {
    /// The journal's UUID.
    pub journal: [u8; 16],
    /// What it knows the mark by that storage carries while the region has the log ([`crate::nvm::mark`]).
    pub mark_checksum: u32,
    /// Whether it holds a block that is not at home.
    pub owes: bool,
    /// The last transaction in it.
    pub sequence: u32,
    /// It says that all of the log is in the journal's own place, for its guest's own kernel ([`crate::nvm`], `distrusted`).
    pub is_left: bool,
    /// All that it holds is at home. Known only where the log is empty on storage, and an error of it is not said.
    pub is_home: bool,
}

/// What storage means to a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RegionVerdict {
    /// It is as the region knows it: the region's blocks belong onto this disk.
    Marked,
    /// It is as the region knows it, and the log was left in its own place: only its superblock is missing there.
    Left,
    /// The region holds nothing that is not at home.
    OwesNothing,
    /// It is as a recovery from this region leaves it.
    Emptied,
}

/// Why what a region holds does not belong onto a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RegionWhy {
    /// The image is an older copy: what left the region since is not on it.
    OlderImage,
    /// The region is an older copy: the image has what left the true one since.
    OlderRegion,
    /// The log is in another region.
    OtherRegion,
    /// It is another journal.
    OtherJournal,
    /// It was used since.
    OtherEpoch,
}

impl RegionBooks {
    /// Those of a region as it was found, of which it is not known what is at home.
    pub fn new(found: &Found, owner: &Owner) -> Self {
        RegionBooks {
            journal: owner.journal,
            mark_checksum: owner.mark_checksum,
            owes: found.owes(),
            sequence: found.sequence,
            is_left: owner.is_left,
            is_home: false,
        }
    }

    /// Whether the region gives way to another one of the disk that has the log, if there is one. It was claimed for an opening of the log that
    /// failed, with all that was tried to undo that: it holds nothing, and storage does not say, or no more, that the log is in this one.
    pub fn yields(&self, verdict: Result<RegionVerdict, RegionWhy>) -> bool {
        !self.owes && matches!(verdict, Ok(RegionVerdict::OwesNothing) | Err(RegionWhy::OtherRegion))
    }

    /// What storage means to the region. The first row that fits counts:
    ///
    /// | row | storage | verdict |
    /// |---|---|---|
    /// | 1 | its journal, with the mark that the region knows, or one of two that it is between | marked; left, where the region says that the log was |
    /// | 2 | its journal, with an earlier mark of that opening | refused: an older image |
    /// | 3 | its journal, with a later mark of that opening | refused: an older region |
    /// | 4 | in a region, by any other mark | refused: another region |
    /// | 4a | its journal, with the mark of distrust, and the region says that the log was left in its own place | owes nothing |
    /// | 5 | anything else, and the region holds nothing that is not at home | owes nothing |
    /// | 6 | another UUID | refused: another journal |
    /// | 7 | empty without an error, two past the region's last transaction, and all that the region holds is at home | emptied: a recovery was cut off after its last write |
    /// | 8 | anything else | refused: another epoch |
    ///
    /// # Errors
    /// Why what the region holds does not belong there.
    pub fn judge(&self, raw: &[u8], superblock: &Superblock) -> Result<RegionVerdict, RegionWhy> {
        let is_its = superblock.uuid == self.journal;
        let standing = match raw.first_chunk() {
            Some(raw) if is_its => standing(raw, self.mark_checksum),
            _ => Standing::Other,
        };
        let stored = Stored::read(raw);
        match standing {
            Standing::Same if self.is_left => return Ok(RegionVerdict::Left),
            Standing::Same => return Ok(RegionVerdict::Marked),
            Standing::Older => return Err(RegionWhy::OlderImage),
            Standing::Newer => return Err(RegionWhy::OlderRegion),
            Standing::Other if matches!(stored.says, Says::Nvm(_)) => return Err(RegionWhy::OtherRegion),
            Standing::Other => {}
        }
        // Only who has left it writes that mark, and after the region said so. Where the log has got since is the guest's.
        let has_left = self.is_left && is_its && stored.is_distrusted;
        if has_left || !self.owes {
            return Ok(RegionVerdict::OwesNothing);
        }
        if !is_its {
            return Err(RegionWhy::OtherJournal);
        }
        let is_emptied = matches!(stored.live_from(), Ok(None));
        // A clone of the disk may stand at that number as well.
        if is_emptied && self.is_home && superblock.sequence == self.sequence.wrapping_add(2) {
            return Ok(RegionVerdict::Emptied);
        }
        Err(RegionWhy::OtherEpoch)
    }
}
