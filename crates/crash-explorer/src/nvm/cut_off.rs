//! A recovery that was cut off by another loss of power, and begun again: the outcome has to be the same, byte for byte.
//!
//! What a recovery writes is told by comparing the disk before and after it. It writes blocks home, flushes, writes the
//! file system's superblock, flushes, empties the journal, flushes, and only then gives the region back; so a disk on
//! which it was cut off has any part of the blocks, or all of them and then the superblocks in that order.

use super::recover_files;
use crate::error::{During, Result};
use crate::finding::{Step, finding};
use crate::scratch::scratch;
use extfs::SUPERBLOCK_OFFSET;
use guest_tools::random::Random;
use placement::Log;
use std::path::Path;

/// What becomes durable together: a superblock is as large.
const UNIT_BYTES: usize = 1024;

/// A disk and a region as a loss of power left them.
pub struct State {
    disk: Vec<u8>,
    region: Vec<u8>,
}

impl State {
    /// Reads both.
    ///
    /// # Errors
    /// When that fails.
    pub fn read(image: &Path, region: &Path) -> Result<Self> {
        Ok(State {
            disk: std::fs::read(image).during("reading an image")?,
            region: std::fs::read(region).during("reading a region")?,
        })
    }
}

/// How far the recovery came.
#[derive(Clone, Copy, Debug)]
enum CutOff {
    SomeBlocks,
    AllBlocks,
    FileSystemSuperblock,
    JournalSuperblock,
}

/// Cuts the recovery that led to `recovered` off once, and runs it again.
pub fn check(before: &State, log: &Log, recovered: &Path, random: &mut Random) -> Step {
    let after = std::fs::read(recovered).during("reading an image")?;
    let cut_offs = [
        CutOff::SomeBlocks,
        CutOff::SomeBlocks,
        CutOff::AllBlocks,
        CutOff::FileSystemSuperblock,
        CutOff::JournalSuperblock,
    ];
    let cut_off = cut_offs[random.below(cut_offs.len() as u64) as usize];
    let of_file_system = (log.home_offset(0) + SUPERBLOCK_OFFSET) as usize;
    let of_journal = log.offset_of(0).unwrap_or(0) as usize;
    let mut disk = before.disk.clone();
    for (index, (from, to)) in after.chunks(UNIT_BYTES).zip(disk.chunks_mut(UNIT_BYTES)).enumerate() {
        if from == to {
            continue;
        }
        let is_done = match (index * UNIT_BYTES, cut_off) {
            (at, CutOff::JournalSuperblock) if at == of_journal => true,
            (at, _) if at == of_journal => false,
            (at, CutOff::SomeBlocks | CutOff::AllBlocks) if at == of_file_system => false,
            (_, CutOff::SomeBlocks) => random.below(2) == 0,
            _ => true,
        };
        if is_done {
            to.copy_from_slice(from);
        }
    }
    let scratch = scratch()?;
    let (image, region) = (scratch.path().join("image"), scratch.path().join("region"));
    std::fs::write(&image, &disk).during("writing an image")?;
    std::fs::write(&region, &before.region).during("writing a region")?;
    if let Err(error) = recover_files(&image, &region)? {
        return finding(format!("a recovery that was cut off ({cut_off:?}) fails when it is begun again: {error}"));
    }
    let again = std::fs::read(&image).during("reading an image")?;
    match again.iter().zip(&after).position(|(one, other)| one != other) {
        None => Ok(()),
        Some(byte) => finding(format!(
            "a recovery that was cut off ({cut_off:?}) and begun again leaves another byte {byte} on the disk"
        )),
    }
}
