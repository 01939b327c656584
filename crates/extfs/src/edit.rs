//! Changes to a raw superblock, as recovery makes them.

use crate::bytes::{crc32c, le16, le32};
use crate::superblock::{SUPERBLOCK_BYTES, Superblock, SuperblockError, field, incompat, ro_compat, state};

/// Changes fields of a raw superblock in place, and never loses what it does not know. Call [`SuperblockEdit::seal`] last.
///
/// # Examples
/// ```
/// use extfs::{SUPERBLOCK_BYTES, Superblock, SuperblockEdit, SuperblockError, state};
///
/// // As little as makes a superblock: a number of blocks, and the magic number.
/// let mut raw = vec![0; SUPERBLOCK_BYTES];
/// raw[0x04] = 64;
/// raw[0x38..0x3a].copy_from_slice(&0xef53u16.to_le_bytes());
/// SuperblockEdit::new(&mut raw)?.set_needs_recovery().set_error().seal();
///
/// let superblock = Superblock::parse(&raw)?;
/// assert!(superblock.needs_recovery());
/// assert_ne!(superblock.state & state::ERROR, 0);
/// assert_eq!(superblock.bytes(), 64 * 1024);
/// # Ok::<(), SuperblockError>(())
/// ```
#[derive(Debug)]
pub struct SuperblockEdit<'a> {
    raw: &'a mut [u8],
}

impl<'a> SuperblockEdit<'a> {
    /// Begins to change `raw`.
    ///
    /// # Errors
    /// When it is no superblock.
    pub fn new(raw: &'a mut [u8]) -> Result<Self, SuperblockError> {
        Superblock::parse(raw)?;
        Ok(SuperblockEdit { raw })
    }

    /// Says that the journal need not be replayed (any more).
    pub fn clear_needs_recovery(&mut self) -> &mut Self {
        let features = le32(self.raw, field::INCOMPAT) & !incompat::NEEDS_RECOVERY;
        self.raw[field::INCOMPAT..field::INCOMPAT + 4].copy_from_slice(&features.to_le_bytes());
        self
    }

    /// Says that the journal has to be replayed.
    pub fn set_needs_recovery(&mut self) -> &mut Self {
        let features = le32(self.raw, field::INCOMPAT) | incompat::NEEDS_RECOVERY;
        self.raw[field::INCOMPAT..field::INCOMPAT + 4].copy_from_slice(&features.to_le_bytes());
        self
    }

    /// Marks the file system as having errors: e2fsck checks it in full, and a mount warns.
    pub fn set_error(&mut self) -> &mut Self {
        self.state(|state| state | state::ERROR)
    }

    /// Marks the file system as not cleanly unmounted: e2fsck checks it in full.
    pub fn clear_valid(&mut self) -> &mut Self {
        self.state(|state| state & !state::VALID)
    }

    fn state(&mut self, change: impl Fn(u16) -> u16) -> &mut Self {
        let state = change(le16(self.raw, field::STATE));
        self.raw[field::STATE..field::STATE + 2].copy_from_slice(&state.to_le_bytes());
        self
    }

    /// Takes the record of errors (`s_error_count` … `s_last_error_block`, and the error bit of the state) from an older
    /// copy of the superblock. Errors are recorded at home at once and not through the journal, so a replay must not undo
    /// them; the kernel keeps them likewise (`ext4_load_and_init_journal`).
    ///
    /// # Errors
    /// When `older` is no superblock.
    pub fn keep_error_record(&mut self, older: &[u8]) -> Result<&mut Self, SuperblockError> {
        Superblock::parse(older)?;
        let range = field::ERROR_COUNT..field::ERROR_END;
        self.raw[range.clone()].copy_from_slice(&older[range]);
        let error = le16(older, field::STATE) & state::ERROR;
        Ok(self.state(|state| state | error))
    }

    /// Computes the checksum anew, if superblocks of this file system have one.
    pub fn seal(&mut self) {
        if le32(self.raw, field::RO_COMPAT) & ro_compat::METADATA_CHECKSUMS != 0 {
            let checksum = crc32c(!0, &self.raw[..field::CHECKSUM]);
            self.raw[field::CHECKSUM..SUPERBLOCK_BYTES].copy_from_slice(&checksum.to_le_bytes());
        }
    }
}
