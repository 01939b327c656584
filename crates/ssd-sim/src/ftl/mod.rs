//! The flash translation layers, each in its own file behind one trait.
//!
//! An FTL turns the host's page reads, writes and trims into operations on a [`Flash`]. It owns the mapping, the
//! free blocks and the choice of victims; it never touches counters of page operations (the flash counts those)
//! and never bends the flash's rules. How to add one is told in `docs/ssd.md`.

pub mod dftl;
pub mod fast;
pub mod page;
pub mod superblock;

use crate::flash::{Flash, Observer, Step};
use crate::geometry::{BlockNumber, Lpn, Ppn};

/// Most pages that [`Ftl::prefetch`] looks at together.
pub const PREFETCH_MAX: usize = 16;

/// A flash translation layer.
pub trait Ftl<O: Observer> {
    /// The host writes a page, whole.
    fn write(&mut self, flash: &mut Flash<O>, lpn: Lpn) -> Step;

    /// The host reads a page. `false` when it was never written (or was trimmed): no flash page is read for it.
    fn read(&mut self, flash: &mut Flash<O>, lpn: Lpn) -> Step<bool>;

    /// The host no longer needs a page. `false` when there was none.
    fn trim(&mut self, flash: &mut Flash<O>, lpn: Lpn) -> Step<bool>;

    /// Where the page is, without any cost: for checks.
    fn mapped(&self, flash: &Flash<O>, lpn: Lpn) -> Option<Ppn>;

    /// Moves a block's live pages elsewhere and frees it (static wear levelling). `false` when this block cannot
    /// be moved now, because it is being written or there is no room.
    fn relocate(&mut self, flash: &mut Flash<O>, block: BlockNumber) -> Step<bool>;

    /// Looks at what serving these pages (at most [`PREFETCH_MAX`]) will look at first, and nothing else: called for
    /// several requests before they are served, their cache misses overlap. Works in rounds over all pages, each round
    /// going where the answers of the one before lead.
    fn prefetch(&self, flash: &Flash<O>, lpns: &[Lpn]);

    /// Bytes of memory the simulation of this FTL uses, the flash not counted.
    fn memory_bytes(&self) -> u64;
}

/// Which FTL.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum FtlKind {
    /// Page-mapped with the whole map in RAM: the ideal.
    Page,
    /// FAST (Lee et al. 2007).
    Fast,
    /// Superblock FTL (Kang et al. 2006).
    Superblock,
    /// DFTL (Gupta et al. 2009).
    Dftl,
}

impl FtlKind {
    /// All, in the order of reports.
    pub const ALL: [FtlKind; 4] = [FtlKind::Page, FtlKind::Fast, FtlKind::Superblock, FtlKind::Dftl];

    /// The name in options and reports.
    pub fn name(self) -> &'static str {
        match self {
            FtlKind::Page => "page",
            FtlKind::Fast => "fast",
            FtlKind::Superblock => "superblock",
            FtlKind::Dftl => "dftl",
        }
    }
}

impl std::str::FromStr for FtlKind {
    type Err = String;

    fn from_str(text: &str) -> Result<FtlKind, String> {
        FtlKind::ALL
            .into_iter()
            .find(|kind| kind.name() == text)
            .ok_or_else(|| format!("no FTL is called {text}; there are page, fast, superblock and dftl"))
    }
}
