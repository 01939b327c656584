//! Memory that outlives a crash, as this crate uses it.
//!
//! A store becomes durable at the first [`Medium::fence`] after it was written back ([`Medium::write_back`], or at once
//! for [`Medium::stream`]). Until then it may be durable or not: caches evict lines when they like, and no two words are
//! durable together. Only an aligned word of 8 bytes is never half old and half new. Everything in this crate is correct
//! under exactly this contract, and [`simulated`](crate::medium::SimulatedMedium) tests it to the letter.

mod delay;
mod file;
mod mapped;
mod neighbours;
mod region_choice;
#[cfg(feature = "simulate")]
mod simulated;
mod stores;

pub use delay::DelayModel;
pub use file::{MediumFile, OpenOptions, probe};
pub use mapped::{MappedMedium, MappedView};
pub use region_choice::RegionChoice;
#[cfg(feature = "simulate")]
pub use simulated::{CrashImages, SimulatedMedium, StepObserver};
pub use stores::StoreKind;

use std::io;

/// Bytes that are durable together or not at all.
pub const WORD_BYTES: u64 = 8;
/// Bytes of a cache line, the unit of writing back.
pub const LINE_BYTES: u64 = 64;

/// What a medium survives. Found by probing; never more than what was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durability {
    /// Mapped with `MAP_SYNC`: the processor's stores reach the device behind the file without the page cache.
    Persistent,
    /// A file in the page cache, made durable by `fdatasync`.
    Synced,
    /// Host memory behind a file system without storage (tmpfs): outlives processes, not the host kernel or its power.
    Emulated,
}

impl Durability {
    /// Its name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Durability::Persistent => "persistent",
            Durability::Synced => "synced",
            Durability::Emulated => "emulated",
        }
    }

    /// What it means, as a sentence for an operator.
    pub fn sentence(self) -> &'static str {
        match self {
            Durability::Persistent => {
                "mapped with MAP_SYNC: survives a loss of power as far as the memory behind the file does"
            }
            Durability::Synced => {
                "an ordinary file, made durable by fdatasync: survives a loss of power as far as its storage honours a \
                 flush"
            }
            Durability::Emulated => {
                "host memory: survives the guest, the VMM and amberlog, but neither the host's kernel nor its power"
            }
        }
    }
}

/// Memory that outlives a crash. Offsets are bytes from its beginning.
pub trait Medium: Send {
    /// All of it, as the processor sees it: stores that are not durable yet are in it.
    fn bytes(&self) -> &[u8];

    /// Stores one aligned word.
    fn store_word(&mut self, offset: u64, value: u64);

    /// Begins to write back the lines of a range.
    fn write_back(&mut self, offset: u64, len: u64);

    /// Stores whole aligned lines past the cache: what a store and [`Medium::write_back`] do, for content that is not
    /// read again soon.
    fn stream(&mut self, offset: u64, bytes: &[u8]);

    /// Makes everything durable whose writing back was begun.
    ///
    /// # Errors
    /// When that failed: nothing is known then of what was stored since the last fence, and every later fence fails too.
    fn fence(&mut self) -> io::Result<()>;

    /// What it survives.
    fn durability(&self) -> Durability;

    /// Where in it, but at its very beginning, a region could begin if its device was cut in another way.
    fn other_beginnings(&self) -> &[u64] {
        &[]
    }

    /// Bytes that it has.
    fn len(&self) -> u64 {
        self.bytes().len() as u64
    }

    /// Whether it has none.
    fn is_empty(&self) -> bool {
        self.bytes().is_empty()
    }

    /// Reads one aligned word.
    fn word(&self, offset: u64) -> u64 {
        word_of(self.bytes(), offset)
    }
}

impl<M: Medium + ?Sized> Medium for Box<M> {
    fn bytes(&self) -> &[u8] {
        (**self).bytes()
    }

    fn store_word(&mut self, offset: u64, value: u64) {
        (**self).store_word(offset, value);
    }

    fn write_back(&mut self, offset: u64, len: u64) {
        (**self).write_back(offset, len);
    }

    fn stream(&mut self, offset: u64, bytes: &[u8]) {
        (**self).stream(offset, bytes);
    }

    fn fence(&mut self) -> io::Result<()> {
        (**self).fence()
    }

    fn durability(&self) -> Durability {
        (**self).durability()
    }

    fn other_beginnings(&self) -> &[u64] {
        (**self).other_beginnings()
    }
}

/// Reads one word of a region's bytes.
///
/// # Panics
/// When it is outside.
pub(crate) fn word_of(bytes: &[u8], offset: u64) -> u64 {
    let at = offset as usize;
    let word: &[u8; 8] = bytes[at..].first_chunk().expect("a word inside the region");
    u64::from_le_bytes(*word)
}
