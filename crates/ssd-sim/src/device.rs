//! A whole device: flash, an FTL, and requests in bytes.
//!
//! Policies that a request in bytes raises are settled here and documented in `docs/ssd.md`: a page that a write
//! covers partly is programmed whole ([`SubPage`]), a read of a page that was never written costs no flash
//! operation, a discard trims only pages it covers wholly, a flush costs nothing (there is no write buffer).

use crate::flash::{Counters, Flash, Halt, ProgramOrder, Step};
use crate::ftl::dftl::{Dftl, DftlOptions};
use crate::ftl::fast::{Fast, FastOptions};
use crate::ftl::page::{PageFtl, PageOptions};
use crate::ftl::superblock::{SuperblockFtl, SuperblockOptions};
use crate::ftl::{Ftl, FtlKind};
use crate::geometry::{Geometry, Lpn, OPERATION_US_MAX, Timing};
use crate::random::Permutation;
use io_trace::Kind;
use serde::Serialize;

/// The FTL and its parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum FtlOptions {
    /// Page-mapped.
    Page(PageOptions),
    /// FAST.
    Fast(FastOptions),
    /// Superblock FTL.
    Superblock(SuperblockOptions),
    /// DFTL.
    Dftl(DftlOptions),
}

impl FtlOptions {
    /// The papers' values for an FTL on this geometry.
    pub fn defaults(kind: FtlKind, geometry: &Geometry) -> FtlOptions {
        match kind {
            FtlKind::Page => FtlOptions::Page(PageOptions::default()),
            FtlKind::Fast => FtlOptions::Fast(FastOptions::for_geometry(geometry)),
            FtlKind::Superblock => FtlOptions::Superblock(SuperblockOptions::default()),
            FtlKind::Dftl => FtlOptions::Dftl(DftlOptions::default()),
        }
    }

    /// Which FTL these are for.
    pub fn kind(&self) -> FtlKind {
        match self {
            FtlOptions::Page(_) => FtlKind::Page,
            FtlOptions::Fast(_) => FtlKind::Fast,
            FtlOptions::Superblock(_) => FtlKind::Superblock,
            FtlOptions::Dftl(_) => FtlKind::Dftl,
        }
    }
}

/// What a write that covers a page partly does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum SubPage {
    /// Programs the page whole, without reading it: what public simulators do.
    Whole,
    /// Reads the rest of the page first, where the page was written before.
    ReadModifyWrite,
}

/// What the device holds before the trace begins. Its cost is not counted; the wear it caused is kept out of the
/// erase counts that reports show, too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Precondition {
    /// Erased.
    Fresh,
    /// Every page written once, in order.
    Sequential,
    /// This percentage of the pages written once each, in random order.
    Random(u8),
}

/// Wear levelling and bad blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct WearOptions {
    /// Off by default, since none of the FTL papers' evaluations had it. On: free blocks are used least worn
    /// first, and a block in use whose erase count falls behind is moved.
    pub levelling: bool,
    /// How far a block's erase count may fall behind the most erased one's before its content is moved.
    pub threshold: u32,
    /// Erases that a block survives; 0: the run wears nothing out.
    pub erase_limit: u32,
}

/// Erases a block of SLC flash sustains (2010 paper, section I): used to project a lifetime.
pub const SLC_ERASE_LIMIT: u32 = 100_000;

impl Default for WearOptions {
    fn default() -> WearOptions {
        WearOptions { levelling: false, threshold: 64, erase_limit: 0 }
    }
}

/// Everything a device is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct DeviceOptions {
    /// Shape of the flash.
    pub geometry: Geometry,
    /// Operation times.
    pub timing: Timing,
    /// FTL and its parameters.
    pub ftl: FtlOptions,
    /// Order of programs in a block.
    pub program_order: ProgramOrder,
    /// Partly covered pages.
    pub sub_page: SubPage,
    /// Addresses beyond the device are taken modulo its size instead of stopping the run.
    pub wrap: bool,
    /// State before the trace.
    pub precondition: Precondition,
    /// Wear levelling.
    pub wear: WearOptions,
    /// Seed of random preconditioning.
    pub seed: u64,
}

impl DeviceOptions {
    /// The papers' values for an FTL on this geometry.
    pub fn new(kind: FtlKind, geometry: Geometry) -> DeviceOptions {
        DeviceOptions {
            geometry,
            timing: Timing::default(),
            ftl: FtlOptions::defaults(kind, &geometry),
            program_order: ProgramOrder::Ascending,
            sub_page: SubPage::Whole,
            wrap: false,
            precondition: Precondition::Fresh,
            wear: WearOptions::default(),
            seed: 1,
        }
    }

    /// Says which options are impossible or do not fit together.
    pub fn check(&self) -> Result<(), String> {
        self.geometry.check()?;
        let times = [self.timing.read_us, self.timing.write_us, self.timing.erase_us, self.timing.spare_read_us];
        if times.iter().any(|&us| us > OPERATION_US_MAX) {
            return Err(format!("an operation time is more than {OPERATION_US_MAX} microseconds"));
        }
        if let Precondition::Random(percent) = self.precondition
            && percent > 100
        {
            return Err(format!("--precondition random:{percent} is more than 100 percent"));
        }
        match &self.ftl {
            FtlOptions::Page(options) => options.check(&self.geometry),
            FtlOptions::Fast(options) => options.check(&self.geometry),
            FtlOptions::Superblock(options) => options.check(&self.geometry),
            FtlOptions::Dftl(options) => options.check(&self.geometry),
        }
    }
}

/// What a device counts beside its flash.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct HostCounters {
    /// Pages of read requests.
    pub pages_read: u64,
    /// Those of them that were never written.
    pub unwritten_pages_read: u64,
    /// Pages of write requests.
    pub pages_written: u64,
    /// Pages that a write covered only partly.
    pub partial_pages_written: u64,
    /// Pages read to complete a partly covered page.
    pub read_modify_write_reads: u64,
    /// Pages trimmed that held data.
    pub pages_trimmed: u64,
}

/// Why a request was not served.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ServeError {
    /// The FTL or the device stopped.
    #[error(transparent)]
    Halt(#[from] Halt),
    /// The request lies beyond the device.
    #[error(
        "a request of {length} bytes at byte {address} lies beyond the device's {capacity} bytes: give it more --blocks, \
         or say --beyond wrap"
    )]
    Beyond {
        /// First byte.
        address: u64,
        /// Bytes.
        length: u64,
        /// Size of the device.
        capacity: u64,
    },
}

/// Most requests that [`Device::prefetch`] looks at together.
pub use crate::ftl::PREFETCH_MAX;

/// A device of any FTL.
pub trait Device: Send {
    /// Serves one request.
    fn serve(&mut self, kind: Kind, address: u64, length: u64) -> Result<(), ServeError>;
    /// Looks at what these requests (first bytes) will look at first: no effect but on the processor's caches, which
    /// makes serving them afterwards faster, the more the larger the device.
    fn prefetch(&self, addresses: &[u64]);
    /// Brings the device into its state before the trace and forgets what that cost. `stop` is asked now and then.
    fn precondition(&mut self, stop: &dyn Fn() -> bool) -> Step;
    /// Forgets what was counted so far.
    fn reset(&mut self);
    /// Flash operations so far.
    fn flash_counters(&self) -> &Counters;
    /// Host pages so far.
    fn host_counters(&self) -> &HostCounters;
    /// Erases of each block since the last reset.
    fn erase_counts(&self) -> Vec<u32>;
    /// Blocks that went bad.
    fn bad_blocks(&self) -> u32;
    /// What it was made of.
    fn options(&self) -> &DeviceOptions;
    /// Bytes of memory the simulation uses.
    fn memory_bytes(&self) -> u64;
}

/// Builds a device. The options must have passed [`DeviceOptions::check`].
///
/// # Examples
/// A page that is written twice and read, and what that took:
/// ```
/// use io_trace::Kind;
/// use ssd_sim::device::{DeviceOptions, build};
/// use ssd_sim::ftl::FtlKind;
/// use ssd_sim::geometry::Geometry;
///
/// let options = DeviceOptions::new(FtlKind::Page, Geometry::with_blocks(64));
/// options.check()?;
/// let mut device = build(&options);
/// device.serve(Kind::Journal, 0, 2048)?;
/// device.serve(Kind::Journal, 0, 2048)?;
/// device.serve(Kind::Read, 0, 2048)?;
/// let counters = device.flash_counters();
/// assert_eq!((counters.flash_writes(), counters.flash_reads()), (2, 1));
/// assert_eq!(counters.time_us(&options.timing), 2 * 263 + 88);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn build(options: &DeviceOptions) -> Box<dyn Device> {
    let (geometry, levelling) = (&options.geometry, options.wear.levelling);
    match options.ftl {
        FtlOptions::Page(o) => Box::new(Machine::new(*options, PageFtl::new(geometry, o, levelling))),
        FtlOptions::Fast(o) => Box::new(Machine::new(*options, Fast::new(geometry, o, levelling))),
        FtlOptions::Superblock(o) => Box::new(Machine::new(*options, SuperblockFtl::new(geometry, o, levelling))),
        FtlOptions::Dftl(o) => Box::new(Machine::new(*options, Dftl::new(geometry, o, levelling))),
    }
}

struct Machine<F> {
    options: DeviceOptions,
    flash: Flash,
    ftl: F,
    host: HostCounters,
    page_shift: u32,
    logical_bytes: u64,
    // Erase counts at the last reset; empty while they are all 0.
    erases_before: Vec<u32>,
    // Static wear levelling looks around after this many erases.
    next_wear_check: u64,
}

impl<F: Ftl<()>> Machine<F> {
    fn new(options: DeviceOptions, ftl: F) -> Machine<F> {
        Machine {
            flash: Flash::new(options.geometry, options.program_order, options.wear.erase_limit, ()),
            ftl,
            host: HostCounters::default(),
            page_shift: options.geometry.page_bytes.trailing_zeros(),
            logical_bytes: options.geometry.logical_bytes(),
            erases_before: Vec::new(),
            next_wear_check: wear_interval(&options),
            options,
        }
    }

    fn write(&mut self, address: u64, end: u64) -> Step {
        let page_mask = (1u64 << self.page_shift) - 1;
        let (first, last) = ((address >> self.page_shift) as Lpn, ((end - 1) >> self.page_shift) as Lpn);
        self.host.pages_written += u64::from(last - first) + 1;
        // A page can be covered partly at the request's beginning, its end, or both.
        let head = address & page_mask != 0;
        let tail = end & page_mask != 0;
        if head || tail {
            let pages: &[Lpn] = match (head, tail && (first != last || !head)) {
                (true, true) => &[first, last],
                (true, false) => &[first],
                (false, _) => &[last],
            };
            self.host.partial_pages_written += pages.len() as u64;
            if self.options.sub_page == SubPage::ReadModifyWrite {
                for &page in pages {
                    self.host.read_modify_write_reads += u64::from(self.ftl.read(&mut self.flash, page)?);
                }
            }
        }
        for lpn in first..=last {
            self.ftl.write(&mut self.flash, lpn)?;
        }
        Ok(())
    }

    fn read(&mut self, address: u64, end: u64) -> Step {
        let (first, last) = ((address >> self.page_shift) as Lpn, ((end - 1) >> self.page_shift) as Lpn);
        self.host.pages_read += u64::from(last - first) + 1;
        for lpn in first..=last {
            let written = self.ftl.read(&mut self.flash, lpn)?;
            self.host.unwritten_pages_read += u64::from(!written);
        }
        Ok(())
    }

    fn discard(&mut self, address: u64, end: u64) -> Step {
        let page = 1u64 << self.page_shift;
        let (first, after) = (address.div_ceil(page), end >> self.page_shift);
        for lpn in first..after {
            self.host.pages_trimmed += u64::from(self.ftl.trim(&mut self.flash, lpn as Lpn)?);
        }
        Ok(())
    }

    fn serve_part(&mut self, kind: Kind, address: u64, end: u64) -> Step {
        match kind {
            Kind::Read => self.read(address, end)?,
            Kind::Home | Kind::Journal | Kind::WriteZeroes => self.write(address, end)?,
            Kind::Discard => self.discard(address, end)?,
            Kind::Flush => {}
        }
        if self.options.wear.levelling && self.flash.counters.erases >= self.next_wear_check {
            self.level_wear()?;
        }
        Ok(())
    }

    /// Static wear levelling: moves the least erased block in use when it has fallen too far behind.
    #[cold]
    fn level_wear(&mut self) -> Step {
        self.next_wear_check = self.flash.counters.erases + wear_interval(&self.options);
        let behind = self.flash.erase_count_max().saturating_sub(self.options.wear.threshold);
        let blocks = self.options.geometry.physical_blocks();
        let in_use = (0..blocks).filter(|&b| self.flash.live_pages(b) > 0 && self.flash.erase_count(b) < behind);
        let Some(coldest) = in_use.min_by_key(|&b| self.flash.erase_count(b)) else { return Ok(()) };
        let before = self.flash.counters;
        if self.ftl.relocate(&mut self.flash, coldest)? {
            let counters = &mut self.flash.counters;
            counters.wear_moves += 1;
            counters.wear_copies += counters.copies - before.copies;
            counters.wear_erases += counters.erases - before.erases;
        }
        Ok(())
    }
}

/// Looking for the coldest block scans all blocks: this often, it costs a few steps per erase.
fn wear_interval(options: &DeviceOptions) -> u64 {
    u64::from(options.geometry.physical_blocks() / 64).max(1)
}

impl<F: Ftl<()> + Send> Device for Machine<F> {
    fn serve(&mut self, kind: Kind, address: u64, length: u64) -> Result<(), ServeError> {
        if length == 0 || kind == Kind::Flush {
            return Ok(());
        }
        let capacity = self.logical_bytes;
        if let Some(end) = address.checked_add(length).filter(|&end| end <= capacity) {
            return Ok(self.serve_part(kind, address, end)?);
        }
        if !self.options.wrap || length > capacity {
            return Err(ServeError::Beyond { address, length, capacity });
        }
        let address = address % capacity;
        let first = length.min(capacity - address);
        self.serve_part(kind, address, address + first)?;
        if length > first {
            self.serve_part(kind, 0, length - first)?;
        }
        Ok(())
    }

    fn prefetch(&self, addresses: &[u64]) {
        let mut lpns = [0; PREFETCH_MAX];
        let mut count = 0;
        for &address in addresses.iter().take(PREFETCH_MAX).filter(|&&address| address < self.logical_bytes) {
            lpns[count] = (address >> self.page_shift) as Lpn;
            count += 1;
        }
        self.ftl.prefetch(&self.flash, &lpns[..count]);
    }

    fn precondition(&mut self, stop: &dyn Fn() -> bool) -> Step {
        let pages = u64::from(self.options.geometry.logical_pages());
        let (count, permutation) = match self.options.precondition {
            Precondition::Fresh => return Ok(()),
            Precondition::Sequential => (pages, None),
            Precondition::Random(percent) => {
                (pages * u64::from(percent) / 100, Some(Permutation::new(pages, self.options.seed)))
            }
        };
        for index in 0..count {
            let lpn = permutation.as_ref().map_or(index, |p| p.at(index));
            self.ftl.write(&mut self.flash, lpn as Lpn)?;
            if index % (1 << 20) == 0 && stop() {
                break;
            }
        }
        self.reset();
        Ok(())
    }

    fn reset(&mut self) {
        self.flash.reset_counters();
        self.host = HostCounters::default();
        self.erases_before = self.flash.erase_counts().collect();
        self.next_wear_check = wear_interval(&self.options);
    }

    fn flash_counters(&self) -> &Counters {
        &self.flash.counters
    }

    fn host_counters(&self) -> &HostCounters {
        &self.host
    }

    fn erase_counts(&self) -> Vec<u32> {
        let before = self.erases_before.iter().copied().chain(std::iter::repeat(0));
        self.flash.erase_counts().zip(before).map(|(now, before)| now - before).collect()
    }

    fn bad_blocks(&self) -> u32 {
        self.flash.bad_blocks()
    }

    fn options(&self) -> &DeviceOptions {
        &self.options
    }

    fn memory_bytes(&self) -> u64 {
        self.flash.memory_bytes() + self.ftl.memory_bytes()
    }
}
