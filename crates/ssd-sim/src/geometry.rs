//! The shape and the times of the simulated flash.
//!
//! Defaults are Table II of "Extending Lifetime and Reducing Garbage Collection Overhead of Solid State Disks
//! with Virtual Machine Aware Journaling" (2010), which takes them from the Samsung K9K4G08U0M data sheet.

use serde::Serialize;

/// Logical page number: which 2 KB (by default) of the device the host means.
pub type Lpn = u32;
/// Physical page number: `block << page_bits | page`. Bits of pages that a block does not have are never used.
pub type Ppn = u32;
/// Number of an erase block.
pub type BlockNumber = u32;
/// No page, no block.
pub const NONE: u32 = u32::MAX;

/// Blocks and pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Geometry {
    /// Logical blocks: what the host sees. Table II: 262,144 (32 GB).
    pub blocks: u32,
    /// Pages per block. Table II: 64.
    pub pages_per_block: u32,
    /// Bytes per page. Table II: 2 KB.
    pub page_bytes: u32,
    /// Physical blocks beyond the logical ones (over-provisioning). Default 3 %, as the FTL papers' evaluations use.
    pub extra_blocks: u32,
}

/// Default share of extra blocks in percent (DFTL's evaluation gives devices 3 %).
pub const EXTRA_BLOCKS_PERCENT: u32 = 3;

impl Default for Geometry {
    fn default() -> Geometry {
        Geometry::with_blocks(262_144)
    }
}

impl Geometry {
    /// Table II with this many logical blocks and 3 % (at least 8) extra ones.
    pub fn with_blocks(blocks: u32) -> Geometry {
        let extra_blocks = Geometry::default_extra_blocks(blocks);
        Geometry { blocks, pages_per_block: 64, page_bytes: 2048, extra_blocks }
    }

    /// 3 % of the logical blocks, rounded up, at least 8.
    pub fn default_extra_blocks(blocks: u32) -> u32 {
        (u64::from(blocks) * u64::from(EXTRA_BLOCKS_PERCENT)).div_ceil(100).max(8) as u32
    }

    /// Bits of a [`Ppn`] that number the page within its block.
    pub fn page_bits(&self) -> u32 {
        self.pages_per_block.next_power_of_two().trailing_zeros()
    }

    /// Logical and extra blocks together.
    pub fn physical_blocks(&self) -> u32 {
        self.blocks + self.extra_blocks
    }

    /// Pages the host sees.
    pub fn logical_pages(&self) -> u32 {
        self.blocks * self.pages_per_block
    }

    /// Bytes the host sees.
    pub fn logical_bytes(&self) -> u64 {
        u64::from(self.logical_pages()) * u64::from(self.page_bytes)
    }

    /// Pages there are.
    pub fn physical_pages(&self) -> u64 {
        u64::from(self.physical_blocks()) * u64::from(self.pages_per_block)
    }

    /// Says what is impossible about this geometry.
    pub fn check(&self) -> Result<(), String> {
        if self.blocks == 0 || self.pages_per_block == 0 {
            return Err("a device needs at least one block and one page per block".into());
        }
        if self.pages_per_block > 4096 {
            return Err(format!("{} pages per block are more than the 4096 that are simulated", self.pages_per_block));
        }
        if !(512..=1 << 20).contains(&self.page_bytes) || !self.page_bytes.is_power_of_two() {
            return Err(format!(
                "a page of {} bytes: only powers of two from 512 to 1048576 are simulated",
                self.page_bytes
            ));
        }
        let numbers = (u64::from(self.blocks) + u64::from(self.extra_blocks)) << self.page_bits();
        if numbers >= u64::from(NONE) {
            return Err(format!(
                "{numbers} physical pages are more than the 2^32-2 that are simulated; use larger pages"
            ));
        }
        Ok(())
    }
}

/// What each operation takes, in microseconds, transfers included.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Timing {
    /// Reading a page. Table II: 88 µs (25 µs in the array, 63 µs of transfer).
    pub read_us: u64,
    /// Programming a page. Table II: 263 µs (200 µs in the array, 63 µs of transfer).
    pub write_us: u64,
    /// Erasing a block. Table II: 2000 µs.
    pub erase_us: u64,
    /// Reading a page's spare area (Superblock FTL only). Its paper's cost model neglects it: 0.
    pub spare_read_us: u64,
}

impl Default for Timing {
    fn default() -> Timing {
        Timing { read_us: 88, write_us: 263, erase_us: 2000, spare_read_us: 0 }
    }
}

/// The largest operation time accepted, so that no sum of times overflows.
pub const OPERATION_US_MAX: u64 = 10_000_000;
