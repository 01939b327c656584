//! The device's options on the command line: which there are, which FTL uses which, and their defaults.

use clap::{Args, ValueEnum};
use ssd_sim::blocks::VictimPolicy;
use ssd_sim::device::{DeviceOptions, FtlOptions, Precondition, SubPage};
use ssd_sim::flash::ProgramOrder;
use ssd_sim::ftl::FtlKind;
use ssd_sim::ftl::dftl::DftlOptions;
use ssd_sim::ftl::fast::SequentialGap;
use ssd_sim::geometry::Geometry;

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Switch {
    On,
    Off,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Policy {
    Greedy,
    CostBenefit,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Gap {
    MergeInFlight,
    MergeThenAppend,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Order {
    Ascending,
    Any,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Beyond {
    Error,
    Wrap,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Partly {
    Whole,
    ReadModifyWrite,
}

fn precondition(text: &str) -> Result<Precondition, String> {
    match text {
        "fresh" => Ok(Precondition::Fresh),
        "sequential" => Ok(Precondition::Sequential),
        other => {
            let percent = other.strip_prefix("random:").and_then(|p| p.parse().ok()).filter(|p| *p <= 100);
            percent
                .map(Precondition::Random)
                .ok_or_else(|| "there are fresh, sequential and random:PERCENT (0 to 100)".into())
        }
    }
}

/// Geometry, times, FTL parameters and wear.
#[derive(Args)]
pub struct DeviceArgs {
    /// Logical blocks
    #[arg(long, default_value_t = 262_144, help_heading = "Device")]
    blocks: u32,
    /// Pages per block
    #[arg(long, default_value_t = 64, help_heading = "Device")]
    pages_per_block: u32,
    /// Bytes per page
    #[arg(long, default_value_t = 2048, help_heading = "Device", value_name = "BYTES")]
    page_size: u32,
    /// Physical blocks beyond the logical ones [default: 3 % of --blocks, at least 8]
    #[arg(long, help_heading = "Device")]
    extra_blocks: Option<u32>,
    /// Microseconds to read a page
    #[arg(long, default_value_t = 88, help_heading = "Device")]
    read_us: u64,
    /// Microseconds to program a page
    #[arg(long, default_value_t = 263, help_heading = "Device")]
    write_us: u64,
    /// Microseconds to erase a block
    #[arg(long, default_value_t = 2000, help_heading = "Device")]
    erase_us: u64,
    /// State before the trace: fresh, sequential, random:PERCENT
    #[arg(long, default_value = "fresh", value_parser = precondition, help_heading = "Device")]
    precondition: Precondition,
    /// Seed of random preconditioning
    #[arg(long, default_value_t = 1, help_heading = "Device")]
    seed: u64,
    /// Requests beyond the device: refused, or taken modulo its size
    #[arg(long, default_value = "error", help_heading = "Device")]
    beyond: Beyond,
    /// A write that covers a page partly: programs it whole, or reads it first
    #[arg(long, default_value = "whole", help_heading = "Device")]
    sub_page: Partly,
    /// Use the least worn free block first, and move cold blocks
    #[arg(long, default_value = "off", help_heading = "Wear")]
    wear_levelling: Switch,
    /// How many erases a block may fall behind before it is moved [default: 64]
    #[arg(long, help_heading = "Wear", value_name = "ERASES")]
    wear_threshold: Option<u32>,
    /// Erases a block survives; it goes bad after them [default: nothing goes bad, lifetimes assume 100000]
    #[arg(long, help_heading = "Wear", value_name = "ERASES", value_parser = clap::value_parser!(u32).range(1..))]
    erase_limit: Option<u32>,
    /// page, superblock, dftl: garbage collection keeps more than this many blocks free [default: 3]
    #[arg(long, help_heading = "Parameters of FTLs")]
    gc_free_blocks: Option<u32>,
    /// page, superblock, dftl: how victims are chosen [default: greedy; dftl: cost-benefit]
    #[arg(long, help_heading = "Parameters of FTLs")]
    victim: Option<Policy>,
    /// fast: random log blocks [default: --extra-blocks - 1]
    #[arg(long, help_heading = "Parameters of FTLs")]
    rw_log_blocks: Option<u32>,
    /// fast: a write that does not continue the sequential log block of its owner [default: merge-in-flight]
    #[arg(long, help_heading = "Parameters of FTLs")]
    sw_gap: Option<Gap>,
    /// fast: order of programs in a block; any is for small-block chips [default: ascending]
    #[arg(long, help_heading = "Parameters of FTLs")]
    program_order: Option<Order>,
    /// superblock: N, logical blocks per superblock [default: 8]
    #[arg(long, help_heading = "Parameters of FTLs")]
    superblock_blocks: Option<u32>,
    /// superblock: M, update blocks per superblock [default: 4]
    #[arg(long, help_heading = "Parameters of FTLs")]
    update_blocks: Option<u32>,
    /// superblock: page tables held in RAM [default: 2048]
    #[arg(long, help_heading = "Parameters of FTLs")]
    pt_cache_entries: Option<u32>,
    /// superblock: copies of garbage collection get a block of their own [default: on]
    #[arg(long, help_heading = "Parameters of FTLs")]
    hot_cold: Option<Switch>,
    /// superblock: microseconds to read a spare area [default: 0]
    #[arg(long, help_heading = "Parameters of FTLs")]
    spare_read_us: Option<u64>,
    /// dftl: entries of the cached mapping table [default: 8192]
    #[arg(long, help_heading = "Parameters of FTLs")]
    cmt_entries: Option<u32>,
    /// dftl: those of them that may be protected [default: 6552 of 8192]
    #[arg(long, help_heading = "Parameters of FTLs")]
    cmt_protected: Option<u32>,
    /// dftl: evicting a dirty entry cleans all of its translation page [default: on]
    #[arg(long, help_heading = "Parameters of FTLs")]
    batch_update: Option<Switch>,
}

impl DeviceArgs {
    /// Refuses the first option that none of these FTLs uses.
    pub fn refuse_unused(&self, ftls: &[FtlKind]) -> Result<(), String> {
        use FtlKind::{Dftl, Fast, Page, Superblock};
        let given: [(&str, bool, &[FtlKind]); 12] = [
            ("--gc-free-blocks", self.gc_free_blocks.is_some(), &[Page, Superblock, Dftl]),
            ("--victim", self.victim.is_some(), &[Page, Superblock, Dftl]),
            ("--rw-log-blocks", self.rw_log_blocks.is_some(), &[Fast]),
            ("--sw-gap", self.sw_gap.is_some(), &[Fast]),
            ("--program-order", self.program_order.is_some(), &[Fast]),
            ("--superblock-blocks", self.superblock_blocks.is_some(), &[Superblock]),
            ("--update-blocks", self.update_blocks.is_some(), &[Superblock]),
            ("--pt-cache-entries", self.pt_cache_entries.is_some(), &[Superblock]),
            ("--hot-cold", self.hot_cold.is_some(), &[Superblock]),
            ("--spare-read-us", self.spare_read_us.is_some(), &[Superblock]),
            ("--cmt-entries", self.cmt_entries.is_some(), &[Dftl]),
            ("--cmt-protected", self.cmt_protected.is_some(), &[Dftl]),
        ];
        let batch = ("--batch-update", self.batch_update.is_some(), &[Dftl][..]);
        for (option, is_given, users) in given.into_iter().chain([batch]) {
            if is_given && !ftls.iter().any(|f| users.contains(f)) {
                let users: Vec<&str> = users.iter().map(|f| f.name()).collect();
                return Err(format!("{option} is not used by the FTL chosen, only by {}", users.join(", ")));
            }
        }
        if self.wear_threshold.is_some() && self.wear_levelling == Switch::Off {
            return Err("--wear-threshold is not used without --wear-levelling on".into());
        }
        Ok(())
    }

    /// The options of one FTL's device, checked.
    pub fn options(&self, ftl: FtlKind) -> Result<DeviceOptions, String> {
        let geometry = Geometry {
            blocks: self.blocks,
            pages_per_block: self.pages_per_block,
            page_bytes: self.page_size,
            extra_blocks: self.extra_blocks.unwrap_or_else(|| Geometry::default_extra_blocks(self.blocks)),
        };
        geometry.check()?;
        let mut options = DeviceOptions::new(ftl, geometry);
        options.timing.read_us = self.read_us;
        options.timing.write_us = self.write_us;
        options.timing.erase_us = self.erase_us;
        options.precondition = self.precondition;
        options.seed = self.seed;
        options.wrap = self.beyond == Beyond::Wrap;
        options.sub_page = match self.sub_page {
            Partly::Whole => SubPage::Whole,
            Partly::ReadModifyWrite => SubPage::ReadModifyWrite,
        };
        options.wear.levelling = self.wear_levelling == Switch::On;
        options.wear.threshold = self.wear_threshold.unwrap_or(options.wear.threshold);
        options.wear.erase_limit = self.erase_limit.unwrap_or(0);
        let victim = self.victim.map(|policy| match policy {
            Policy::Greedy => VictimPolicy::Greedy,
            Policy::CostBenefit => VictimPolicy::CostBenefit,
        });
        match &mut options.ftl {
            FtlOptions::Page(page) => {
                page.gc_free_blocks = self.gc_free_blocks.unwrap_or(page.gc_free_blocks);
                page.victim = victim.unwrap_or(page.victim);
            }
            FtlOptions::Fast(fast) => {
                fast.rw_log_blocks = self.rw_log_blocks.unwrap_or(fast.rw_log_blocks);
                match self.sw_gap {
                    Some(Gap::MergeThenAppend) => fast.sw_gap = SequentialGap::MergeThenAppend,
                    Some(Gap::MergeInFlight) => fast.sw_gap = SequentialGap::MergeInFlight,
                    None => {}
                }
                if self.program_order == Some(Order::Any) {
                    options.program_order = ProgramOrder::Any;
                }
            }
            FtlOptions::Superblock(superblock) => {
                superblock.gc_free_blocks = self.gc_free_blocks.unwrap_or(superblock.gc_free_blocks);
                superblock.victim = victim.unwrap_or(superblock.victim);
                superblock.superblock_blocks = self.superblock_blocks.unwrap_or(superblock.superblock_blocks);
                superblock.update_blocks = self.update_blocks.unwrap_or(superblock.update_blocks);
                superblock.pt_cache_entries = self.pt_cache_entries.unwrap_or(superblock.pt_cache_entries);
                superblock.hot_cold = self.hot_cold.map_or(superblock.hot_cold, |s| s == Switch::On);
                options.timing.spare_read_us = self.spare_read_us.unwrap_or(0);
            }
            FtlOptions::Dftl(dftl) => {
                dftl.gc_free_blocks = self.gc_free_blocks.unwrap_or(dftl.gc_free_blocks);
                dftl.victim = victim.unwrap_or(dftl.victim);
                dftl.cmt_entries = self.cmt_entries.unwrap_or(dftl.cmt_entries);
                dftl.cmt_protected = self.cmt_protected.unwrap_or_else(|| DftlOptions::protected_for(dftl.cmt_entries));
                dftl.batch_update = self.batch_update.map_or(dftl.batch_update, |s| s == Switch::On);
            }
        }
        options.check()?;
        Ok(options)
    }
}
