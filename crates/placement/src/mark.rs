//! The mark on storage of a journal that lives elsewhere: what it is, which opening of it, and how far that had got.
//!
//! The superblock on storage says that the log is empty and that an error happened to it (rule 4 of ARCHITECTURE.md), so that kernels and
//! e2fsck look at the whole file system should what is held be lost. Beside that, in the superblock's padding (bytes 0x80 to
//! 0xAF; jbd2 and e2fsck neither read nor change it; the mark of a journal server lies behind it), it carries a number that
//! was drawn when the log was opened, and a count that goes on for as long as anything is written to the disk. The area
//! has both too. So a held log is told from that of a clone of the same image, and an image as it was left from an older copy
//! of it, which blocks that went home meanwhile are not in.
//!
//! Kernels keep the padding when they write the superblock. So the mark says for which `s_sequence` it was written, and
//! counts only beside an error number in an empty log.
//!
//! A journal that was not what it seemed ([`crate::distrust`]) has another mark, which counts whatever the log is. It goes with the
//! journal: mke2fs and `tune2fs -O ^has_journal` remove it. It lies in front of the others (bytes 0x60 to 0x6B): what the superblock says
//! of a server's logs has to outlive it, or the log on the server would be taken for that of a younger disk.

use crate::remote::mark::RemoteMark;
use jbd2::{ERRNO_EIO, SUPERBLOCK_BYTES, Superblock, SuperblockEdit};
use journal_area::Opening;
use std::io;

const OFFSET: usize = 0x80;
const MAGIC: &[u8; 8] = b"AMBHELD1";
const BYTES: usize = 8 + 4 + 16 + 8 + 4 + 4;
const DISTRUSTED: &[u8; 8] = b"AMBDIST1";
const DISTRUSTED_OFFSET: usize = 0x60;
const DISTRUSTED_BYTES: usize = 8 + 4;

/// What was meant by a mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MarkKind {
    /// The log is held in tmpfs.
    Held,
    /// The log is dropped.
    Dropped,
    /// The log is in a region of persistent memory, which knows this mark (`nvm/mark.rs`).
    Nvm,
    /// The log is held in tmpfs, and beside it storage is made durable by age: what storage has is a file system by itself.
    Aged,
}

/// The superblock that goes to storage: an empty log that an error happened to, and a mark.
///
/// # Errors
/// When `block` is no journal superblock.
pub(crate) fn marked(block: &[u8], kind: MarkKind, opening: &Opening) -> io::Result<Vec<u8>> {
    marked_behind(block, kind, opening, None)
}

/// The same in the place of a log of compounds (crate `durability`): its `s_sequence` is at least the first number that none of them has.
///
/// They lie in the log's place still, and some have numbers that come after the guest's. If what is held is lost, the next kernel writes
/// its log over them from the log's first block on, with numbers from `s_sequence` on: with an earlier one a transaction of its would end some
/// day in front of a compound that has the next number, and whoever replays that log would take it for the kernel's next transaction.
///
/// # Errors
/// When `block` is no journal superblock.
pub(crate) fn marked_behind(
    block: &[u8],
    kind: MarkKind,
    opening: &Opening,
    numbered: Option<u32>,
) -> io::Result<Vec<u8>> {
    let Superblock { errno, sequence, .. } = Superblock::decode(block).map_err(io::Error::other)?;
    let sequence = numbered.map_or(sequence, |numbered| jbd2::sequence::latest(sequence, numbered));
    let mut bytes = with_mark(block, kind, opening, sequence);
    SuperblockEdit::new(&mut bytes)
        .map_err(io::Error::other)?
        .start(0)
        .sequence(sequence)
        .errno(if errno == 0 { ERRNO_EIO } else { errno })
        .seal();
    Ok(bytes)
}

/// A marked superblock without its mark: an empty log that an error happened to, and nobody has it.
///
/// # Errors
/// When `block` is no journal superblock.
pub(crate) fn given_up(block: &[u8]) -> io::Result<Vec<u8>> {
    let mut bytes = block.get(..SUPERBLOCK_BYTES).unwrap_or(block).to_vec();
    Superblock::decode(&bytes).map_err(io::Error::other)?;
    bytes[OFFSET..OFFSET + BYTES].fill(0);
    remove_distrust(&mut bytes);
    SuperblockEdit::new(&mut bytes).map_err(io::Error::other)?.seal();
    Ok(bytes)
}

/// A journal superblock that says that its journal was not what it seemed.
///
/// # Errors
/// When `block` is no journal superblock.
pub(crate) fn distrusted(block: &[u8]) -> io::Result<Vec<u8>> {
    let mut bytes = block.get(..SUPERBLOCK_BYTES).unwrap_or(block).to_vec();
    Superblock::decode(&bytes).map_err(io::Error::other)?;
    if bytes[OFFSET..].starts_with(MAGIC) {
        // Nobody holds it any more. Elsewhere the lineage of a server's logs lies there, and stays.
        bytes[OFFSET..OFFSET + BYTES].fill(0);
    }
    let crc = jbd2::crc32c(!0, DISTRUSTED).to_le_bytes();
    bytes[DISTRUSTED_OFFSET..DISTRUSTED_OFFSET + DISTRUSTED_BYTES].copy_from_slice(&[&DISTRUSTED[..], &crc].concat());
    SuperblockEdit::new(&mut bytes).map_err(io::Error::other)?.seal();
    Ok(bytes)
}

/// Whether a journal superblock says so.
pub(crate) fn is_distrusted(block: &[u8]) -> bool {
    let crc = jbd2::crc32c(!0, DISTRUSTED).to_le_bytes();
    // The second place is where it was first.
    [DISTRUSTED_OFFSET, OFFSET].into_iter().any(|at| {
        block.get(at..at + DISTRUSTED_BYTES).is_some_and(|mark| mark.starts_with(DISTRUSTED) && mark[8..] == crc)
    })
}

fn remove_distrust(bytes: &mut [u8]) {
    if let Some(mark) = bytes.get_mut(DISTRUSTED_OFFSET..DISTRUSTED_OFFSET + DISTRUSTED_BYTES)
        && mark.starts_with(DISTRUSTED)
    {
        mark.fill(0);
    }
}

/// The superblock of a log that is made durable by age: where it begins on storage, and which opening of the held one it stands beside.
/// No error happened to it.
///
/// # Errors
/// When `block` is no journal superblock.
pub(crate) fn aged(block: &[u8], opening: &Opening, (start, sequence): (u32, u32)) -> io::Result<Vec<u8>> {
    let mut bytes = with_mark(block, MarkKind::Aged, opening, sequence);
    SuperblockEdit::new(&mut bytes).map_err(io::Error::other)?.start(start).sequence(sequence).seal();
    Ok(bytes)
}

fn with_mark(block: &[u8], kind: MarkKind, opening: &Opening, sequence: u32) -> Vec<u8> {
    let mut bytes = block.get(..SUPERBLOCK_BYTES).unwrap_or(block).to_vec();
    bytes.resize(SUPERBLOCK_BYTES, 0);
    let mut mark = MAGIC.to_vec();
    mark.extend_from_slice(&u32::to_le_bytes(match kind {
        MarkKind::Held => 1,
        MarkKind::Dropped => 2,
        MarkKind::Nvm => 3,
        MarkKind::Aged => 4,
    }));
    mark.extend_from_slice(&opening.number);
    mark.extend_from_slice(&opening.count.to_le_bytes());
    mark.extend_from_slice(&sequence.to_le_bytes());
    mark.extend_from_slice(&jbd2::crc32c(!0, &mark).to_le_bytes());
    bytes[OFFSET..OFFSET + BYTES].copy_from_slice(&mark);
    remove_distrust(&mut bytes);
    // One that a server left counts again beside our error number, if nobody has committed since.
    RemoteMark::remove_from(&mut bytes);
    bytes
}

/// The mark that lies in a superblock, if it is whole and was written for its `s_sequence`.
pub(crate) fn of_this_sequence(block: &[u8], superblock: &Superblock) -> Option<(MarkKind, Opening)> {
    lying_in(block).filter(|(.., sequence)| *sequence == superblock.sequence).map(|(kind, opening, _)| (kind, opening))
}

/// The mark that lies in a superblock, if it is whole, and the `s_sequence` that it was written for: it may count no more.
pub(crate) fn lying_in(block: &[u8]) -> Option<(MarkKind, Opening, u32)> {
    let (head, crc) = block.get(OFFSET..OFFSET + BYTES)?.split_at(BYTES - 4);
    let word = |at: usize| u32::from_le_bytes(std::array::from_fn(|index| head[at + index]));
    let kind = match word(8) {
        1 => MarkKind::Held,
        2 => MarkKind::Dropped,
        3 => MarkKind::Nvm,
        4 => MarkKind::Aged,
        _ => return None,
    };
    let is_whole = head.starts_with(MAGIC) && jbd2::crc32c(!0, head).to_le_bytes() == crc;
    if !is_whole {
        return None;
    }
    let number = std::array::from_fn(|index| head[12 + index]);
    let count = u64::from_le_bytes(std::array::from_fn(|index| head[28 + index]));
    Some((kind, Opening { number, count }, word(36)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::held_mark::HeldMark;

    fn superblock() -> Vec<u8> {
        let mut block = vec![0u8; 4096];
        for (at, value) in [(0, 0xc03b_3998u32), (4, 4), (0xc, 4096), (0x10, 1024), (0x14, 1), (0x18, 77), (0x1c, 9)] {
            block[at..at + 4].copy_from_slice(&value.to_be_bytes());
        }
        block
    }

    #[test]
    fn a_mark_is_read_as_it_was_written_and_only_where_it_counts() {
        let opening = Opening { number: *b"sixteen numbers.", count: 1 << 40 };
        for kind in [MarkKind::Held, MarkKind::Dropped, MarkKind::Nvm] {
            let marked = marked(&superblock(), kind, &opening).expect("a superblock");
            assert_eq!(HeldMark::read(&marked), HeldMark::Ours(kind, opening));
            assert_eq!(crate::remote::RemoteMark::read(&marked), crate::remote::MarkFound::None, "it is no server's");
            let decoded = Superblock::decode(&marked).expect("a superblock");
            assert!(decoded.is_empty() && decoded.errno == ERRNO_EIO && decoded.sequence == 77);
            for bit in 0..BYTES * 8 {
                let mut damaged = marked.clone();
                damaged[OFFSET + bit / 8] ^= 1 << (bit % 8);
                assert_eq!(HeldMark::read(&damaged), HeldMark::Plain, "bit {bit}");
            }
            let edited = |edit: fn(SuperblockEdit<'_>)| {
                let mut edited = marked.clone();
                edit(SuperblockEdit::new(&mut edited).expect("a superblock"));
                HeldMark::read(&edited)
            };
            assert_eq!(edited(|mut edit| edit.errno(0).seal()), HeldMark::None, "a kernel has mounted it");
            assert_eq!(edited(|mut edit| edit.start(3).seal()), HeldMark::None, "its log is on storage");
            assert_eq!(edited(|mut edit| edit.sequence(78).seal()), HeldMark::Plain, "it was used since");
        }
        for (numbered, sequence) in [(90, 90), (5, 77)] {
            let marked = marked_behind(&superblock(), MarkKind::Held, &opening, Some(numbered)).expect("a superblock");
            assert_eq!(HeldMark::read(&marked), HeldMark::Ours(MarkKind::Held, opening));
            assert_eq!(Superblock::decode(&marked).expect("a superblock").sequence, sequence);
        }
        let distrusted = distrusted(&superblock()).expect("a superblock");
        assert!(is_distrusted(&distrusted) && !is_distrusted(&superblock()));
        assert_eq!(HeldMark::read(&distrusted), HeldMark::LeftToGuest);
        assert_eq!(crate::remote::RemoteMark::read(&distrusted), crate::remote::MarkFound::None, "it is no server's");
        let mut held = marked(&distrusted, MarkKind::Held, &opening).expect("a superblock");
        assert!(!is_distrusted(&held) && matches!(HeldMark::read(&held), HeldMark::Ours(MarkKind::Held, _)));
        held = super::distrusted(&held).expect("a superblock");
        assert!(is_distrusted(&held) && HeldMark::read(&held) == HeldMark::Plain, "nobody holds it");
        let mut first = superblock();
        first[OFFSET..OFFSET + DISTRUSTED_BYTES]
            .copy_from_slice(&distrusted[DISTRUSTED_OFFSET..DISTRUSTED_OFFSET + DISTRUSTED_BYTES]);
        assert!(is_distrusted(&first), "where it was first");
        let mut empty = distrusted.clone();
        SuperblockEdit::new(&mut empty).expect("a superblock").start(0).seal();
        assert!(is_distrusted(&empty) && HeldMark::read(&empty) == HeldMark::None, "there is nothing to replay");
        assert_eq!(HeldMark::read(&superblock()), HeldMark::None);
        assert_eq!(HeldMark::read(b"short"), HeldMark::None);
    }
}
