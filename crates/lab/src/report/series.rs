//! One colour a mode, on the whole page: related modes have a colour in common and patterns of their own.

use crate::cell::Mode;
use charts::Series;

/// Modes in the order of their meaning, each with its colour and pattern.
const LOOKS: [(Mode, usize, usize); 30] = [
    (Mode::NoJournal, 6, 3),
    (Mode::Bound, 6, 0),
    (Mode::BoundOrdered, 6, 1),
    (Mode::BoundWriteback, 6, 2),
    (Mode::Writeback, 3, 0),
    (Mode::Ordered, 2, 0),
    (Mode::Journal, 0, 0),
    (Mode::JournalNoBarrier, 0, 1),
    (Mode::Vma, 1, 0),
    (Mode::VmaPublished, 1, 3),
    (Mode::VmaLone, 7, 2),
    (Mode::VmaOrdered, 1, 1),
    (Mode::VmaWriteback, 1, 2),
    (Mode::Copy, 4, 0),
    (Mode::Tmpfs, 4, 1),
    (Mode::TmpfsSlowed, 4, 2),
    (Mode::Ramdisk, 4, 3),
    (Mode::Njs, 9, 0),
    (Mode::NjsNoByteLevel, 9, 1),
    (Mode::NjsNoDelayedCheckpoint, 9, 2),
    (Mode::NjsLogEverything, 9, 3),
    (Mode::Nvm, 8, 0),
    (Mode::NvmNoByteLevel, 8, 1),
    (Mode::NvmNoDelayedCheckpoint, 8, 2),
    (Mode::NvmLogEverything, 8, 3),
    (Mode::NvmByCost, 7, 0),
    (Mode::NvmPipelined, 7, 1),
    (Mode::RemoteWriteback, 5, 0),
    (Mode::RemoteOrdered, 5, 1),
    (Mode::RemoteJournal, 5, 2),
];

/// Where a mode comes among others.
pub(super) fn order(mode: Mode) -> usize {
    LOOKS.iter().position(|(other, _, _)| *other == mode).unwrap_or(LOOKS.len())
}

/// A mode as a plot shows it.
pub(super) fn series(mode: Mode) -> Series {
    let (_, colour, pattern) = LOOKS[order(mode).min(LOOKS.len() - 1)];
    Series { name: mode.name().to_owned(), colour, pattern }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_mode_has_a_look_of_its_own() {
        let looks: BTreeSet<_> = Mode::ALL.iter().map(|mode| (series(*mode).colour, series(*mode).pattern)).collect();
        assert_eq!(looks.len(), Mode::ALL.len());
        assert!(Mode::ALL.iter().all(|mode| series(*mode).name == mode.name()));
    }
}
