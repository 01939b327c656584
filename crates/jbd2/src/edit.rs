//! Changes to control blocks of a log that is written to storage again.
//!
//! A data block whose bytes were let go of, because its home block has them or a newer copy follows, is written to the log
//! with other bytes than it had. Its tag, and what checksums cover that tag, must then say so.

use crate::bytes::put_be32;
use crate::control::{FLAG_ESCAPE, Tags, commit_field, data_checksum};
use crate::format::{Checksum, Format};

/// Changes tags of a raw descriptor block. Call [`DescriptorEdit::seal`] last.
#[derive(Debug)]
pub struct DescriptorEdit<'a> {
    format: &'a Format,
    block: &'a mut [u8],
}

impl<'a> DescriptorEdit<'a> {
    /// Begins to change `block`, a descriptor.
    ///
    /// # Panics
    /// If it is not `format.block_size` bytes.
    pub fn new(format: &'a Format, block: &'a mut [u8]) -> Self {
        assert_eq!(block.len(), format.block_size as usize);
        DescriptorEdit { format, block }
    }

    /// Makes the `index`-th tag say that its data block is `data` (as it is in the log), escaped or not. Nothing happens
    /// when there is no such tag.
    pub fn set_data(&mut self, index: usize, sequence: u32, data: &[u8], escaped: bool) {
        let mut tags = Tags::new(self.format, self.block);
        if index > 0 && tags.nth(index - 1).is_none() {
            return;
        }
        let offset = tags.offset();
        if tags.next().is_none() {
            return;
        }
        let raw = &mut self.block[offset..offset + self.format.tag_bytes()];
        let flags = u16::from_be_bytes([raw[6], raw[7]]) & !FLAG_ESCAPE | if escaped { FLAG_ESCAPE } else { 0 };
        raw[6..8].copy_from_slice(&flags.to_be_bytes());
        let checksum = data_checksum(self.format, sequence, data);
        match self.format.checksum {
            Checksum::None | Checksum::V1 => {}
            Checksum::V2 => raw[4..6].copy_from_slice(&(checksum as u16).to_be_bytes()),
            Checksum::V3 => put_be32(raw, 12, checksum),
        }
    }

    /// Computes the block's checksum anew, if it has one.
    pub fn seal(&mut self) {
        if self.format.has_block_checksums() {
            let tail = self.block.len() - 4;
            let checksum = self.format.control_checksum(self.block, tail);
            put_be32(self.block, tail, checksum);
        }
    }
}

/// Takes the checksum of kind 1 out of a raw commit block: a commit without one is valid. Other commits stay as they are.
///
/// # Panics
/// If `block` is not `format.block_size` bytes.
pub fn remove_transaction_checksum(format: &Format, block: &mut [u8]) {
    assert_eq!(block.len(), format.block_size as usize);
    if format.checksum == Checksum::V1 {
        block[commit_field::CHECKSUM_TYPE..commit_field::CHECKSUM + 4].fill(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::build::{self, SuperblockBuilder, TagSpec};
    use crate::control::{Commit, Descriptor, data_checksum_ok};
    use crate::superblock::Superblock;

    #[test]
    fn an_edited_tag_fits_its_new_data() {
        for checksum in [Checksum::None, Checksum::V1, Checksum::V2, Checksum::V3] {
            let raw = SuperblockBuilder { block_size: 1024, ..SuperblockBuilder::default() }.checksum(checksum).build();
            let format = Superblock::parse(&raw).expect("valid").1;
            let (old, new) = (vec![1; 1024], vec![2; 1024]);
            let tags: Vec<TagSpec<'_>> =
                (0..5).map(|block| TagSpec { block, data: &old, escaped: block == 2, with_uuid: block == 0 }).collect();
            for index in 0..5 {
                let mut block = build::descriptor(&format, 9, &tags);
                let mut edit = DescriptorEdit::new(&format, &mut block);
                edit.set_data(index, 9, &new, index != 2);
                edit.set_data(5, 9, &new, true);
                edit.seal();
                let descriptor = Descriptor::new(&format, &block);
                assert!(descriptor.checksum_ok());
                for (number, tag) in descriptor.tags().enumerate() {
                    let data = if number == index { &new } else { &old };
                    assert_eq!(tag.block, number as u64);
                    assert!(data_checksum_ok(&format, 9, tag.checksum, data));
                    assert_eq!(tag.escaped, (number == 2) != (number == index));
                }
            }
        }
    }

    #[test]
    fn a_commit_without_its_checksum_is_valid() {
        let raw = SuperblockBuilder::default().checksum(Checksum::V1).build();
        let format = Superblock::parse(&raw).expect("valid").1;
        let mut block = build::commit(&format, 9, 5, 6, Some(77));
        assert!(!Commit::new(&format, &block).transaction_checksum_ok(78));
        remove_transaction_checksum(&format, &mut block);
        assert!(Commit::new(&format, &block).transaction_checksum_ok(78));
        assert_eq!(Commit::new(&format, &block).seconds(), 5);
    }
}
