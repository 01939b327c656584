//! Random small traces: each FTL against its slow model, exactly, and against the invariants that hold for any FTL.

mod reference;

use proptest::prelude::*;
use reference::{Model, Totals};
use ssd_sim::blocks::VictimPolicy;
use ssd_sim::flash::{Flash, Observer, ProgramOrder, Purpose};
use ssd_sim::ftl::dftl::{Dftl, DftlOptions};
use ssd_sim::ftl::fast::{Fast, FastOptions, SequentialGap};
use ssd_sim::ftl::page::{PageFtl, PageOptions};
use ssd_sim::ftl::superblock::{SuperblockFtl, SuperblockOptions};
use ssd_sim::ftl::{Ftl, PREFETCH_MAX};
use ssd_sim::geometry::Geometry;
use std::collections::HashMap;

/// Keeps the content of every page and counts for itself.
#[derive(Default)]
struct Watcher {
    content: HashMap<u32, (u32, u64)>,
    version: u64,
    pages_per_block_bits: u32,
    programs: u64,
    host_programs: u64,
    mapping_programs: u64,
    copies: u64,
    reads: u64,
    erases: u64,
    last_read: Option<(u32, u64)>,
}

impl Observer for Watcher {
    fn programmed(&mut self, page: u32, owner: u32, purpose: Purpose) {
        self.programs += 1;
        match purpose {
            Purpose::Host => self.host_programs += 1,
            Purpose::Mapping => self.mapping_programs += 1,
        }
        assert!(self.content.insert(page, (owner, self.version)).is_none(), "programmed twice");
    }
    fn copied(&mut self, from: u32, to: u32, owner: u32) {
        self.programs += 1;
        self.copies += 1;
        let content = self.content[&from];
        assert_eq!(content.0, owner);
        assert!(self.content.insert(to, content).is_none(), "programmed twice");
    }
    fn was_read(&mut self, page: u32, _purpose: Purpose) {
        self.reads += 1;
        self.last_read = Some(self.content[&page]);
    }
    fn erased(&mut self, block: u32) {
        self.erases += 1;
        let bits = self.pages_per_block_bits;
        self.content.retain(|page, _| page >> bits != block);
    }
}

#[derive(Clone, Copy, Debug)]
enum Op {
    Write(u32),
    Read(u32),
    Trim(u32),
    Run(u32, u32),
}

fn ops(pages: u32) -> impl Strategy<Value = Vec<Op>> {
    // Hot pages, any pages, and sequential runs, so that all kinds of merges occur.
    let page = prop_oneof![2 => 0..pages, 1 => 0..pages / 8 + 1];
    let op = prop_oneof![
        8 => page.clone().prop_map(Op::Write),
        2 => page.clone().prop_map(Op::Read),
        1 => page.clone().prop_map(Op::Trim),
        2 => (page, 1u32..20).prop_map(|(p, n)| Op::Run(p, n)),
    ];
    prop::collection::vec(op, 1..400)
}

fn geometry(blocks: u32, extra_blocks: u32, pages_per_block: u32) -> Geometry {
    Geometry { blocks, extra_blocks, pages_per_block, page_bytes: 512 }
}

/// Runs both and compares everything; checks the invariants on the way.
fn compare<F: Ftl<Watcher>>(geometry: Geometry, order: ProgramOrder, mut ftl: F, mut model: impl Model, ops: &[Op]) {
    let watcher = Watcher { pages_per_block_bits: geometry.page_bits(), ..Watcher::default() };
    let mut flash = Flash::new(geometry, order, 0, watcher);
    let mut latest: HashMap<u32, u64> = HashMap::new();
    let mut host_writes = 0u64;
    let logical = geometry.logical_pages();
    for (index, &op) in ops.iter().enumerate() {
        let (from, to) = match op {
            Op::Run(page, count) => (page % logical, (page % logical + count).min(logical)),
            Op::Write(page) | Op::Read(page) | Op::Trim(page) => (page % logical, page % logical + 1),
        };
        // Looking ahead must never go astray, whatever is mapped where (it cannot change anything).
        let ahead: Vec<u32> = (0..PREFETCH_MAX as u32).map(|i| (from + i * 5) % logical).collect();
        ftl.prefetch(&flash, &ahead);
        for lpn in from..to {
            match op {
                Op::Write(_) | Op::Run(..) => {
                    flash.observer.version += 1;
                    ftl.write(&mut flash, lpn).unwrap();
                    model.write(lpn);
                    latest.insert(lpn, flash.observer.version);
                    host_writes += 1;
                }
                Op::Read(_) => {
                    let found = ftl.read(&mut flash, lpn).unwrap();
                    assert_eq!(found, latest.contains_key(&lpn), "op {index}: reads what was written");
                    if found {
                        assert_eq!(flash.observer.last_read, Some((lpn, latest[&lpn])), "op {index}: reads the newest");
                    }
                    assert_eq!(model.read(lpn), found);
                }
                Op::Trim(_) => {
                    let found = ftl.trim(&mut flash, lpn).unwrap();
                    assert_eq!(found, latest.remove(&lpn).is_some());
                    assert_eq!(model.trim(lpn), found);
                }
            }
        }
    }
    // Every page holds what was last written to it; nothing else is live but mapping pages.
    let mut mapped = 0u64;
    for lpn in 0..logical {
        let content = ftl.mapped(&flash, lpn).map(|page| {
            assert!(flash.is_live(page));
            flash.observer.content[&page]
        });
        assert_eq!(content, latest.get(&lpn).map(|&version| (lpn, version)), "page {lpn}");
        mapped += u64::from(content.is_some());
    }
    let c = flash.counters;
    let watcher = &flash.observer;
    let live: u64 = (0..geometry.physical_blocks()).map(|b| u64::from(flash.live_pages(b))).sum();
    assert!(live >= mapped && (c.mapping_writes > 0 || live == mapped), "live {live}, mapped {mapped}");
    // Two independent sets of counters, and what they must add up to.
    assert_eq!(c.host_writes, host_writes);
    assert_eq!((c.flash_writes(), c.erases, c.copies), (watcher.programs, watcher.erases, watcher.copies));
    assert_eq!((c.host_writes, c.mapping_writes), (watcher.host_programs, watcher.mapping_programs));
    assert_eq!(c.flash_reads(), watcher.reads + watcher.copies);
    let pages = geometry.physical_pages();
    assert!((c.erases * u64::from(geometry.pages_per_block)) + pages >= c.flash_writes());
    assert_eq!(flash.erase_counts().map(u64::from).sum::<u64>(), c.erases);
    assert_eq!(
        c.switch_merges + c.partial_merges + c.full_merges + 2 * c.sequential_full_merges + c.log_block_erases,
        if c.switch_merges + c.partial_merges + c.full_merges + c.sequential_full_merges > 0 {
            c.erases
        } else {
            c.log_block_erases
        }
    );
    // The slow model, exactly: totals and the wear of every block.
    let totals = Totals {
        host_reads: c.host_reads,
        host_writes: c.host_writes,
        mapping_reads: c.mapping_reads,
        mapping_writes: c.mapping_writes,
        copies: c.copies,
        spare_reads: c.spare_reads,
        erases: c.erases,
        gc_runs: c.gc_runs,
        switch: c.switch_merges,
        partial: c.partial_merges,
        full: c.full_merges,
        sequential_full: c.sequential_full_merges,
        log_erases: c.log_block_erases,
        hits: c.mapping_hits,
        misses: c.mapping_misses,
    };
    assert_eq!(totals, model.flash().totals);
    assert_eq!(flash.erase_counts().collect::<Vec<_>>(), model.flash().erases);
}

/// Static wear levelling moves blocks at any time: no page may be lost by it, and nothing is programmed twice.
fn survives_relocation<F: Ftl<Watcher>>(geometry: Geometry, mut ftl: F, ops: &[Op]) {
    let watcher = Watcher { pages_per_block_bits: geometry.page_bits(), ..Watcher::default() };
    let mut flash = Flash::new(geometry, ProgramOrder::Ascending, 0, watcher);
    let mut latest: HashMap<u32, u64> = HashMap::new();
    let logical = geometry.logical_pages();
    for (index, &op) in ops.iter().enumerate() {
        match op {
            Op::Write(page) | Op::Run(page, _) | Op::Read(page) => {
                flash.observer.version += 1;
                ftl.write(&mut flash, page % logical).unwrap();
                latest.insert(page % logical, flash.observer.version);
            }
            Op::Trim(page) => {
                ftl.trim(&mut flash, page % logical).unwrap();
                latest.remove(&(page % logical));
            }
        }
        if index % 3 == 0 {
            ftl.relocate(&mut flash, (index * 7) as u32 % geometry.physical_blocks()).unwrap();
        }
    }
    for lpn in 0..logical {
        let content = ftl.mapped(&flash, lpn).map(|page| flash.observer.content[&page]);
        assert_eq!(content, latest.get(&lpn).map(|&version| (lpn, version)), "page {lpn}");
        assert_eq!(ftl.read(&mut flash, lpn).unwrap(), latest.contains_key(&lpn));
    }
}

fn policy(cost_benefit: bool) -> VictimPolicy {
    if cost_benefit { VictimPolicy::CostBenefit } else { VictimPolicy::Greedy }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, max_shrink_iters: 2000, ..ProptestConfig::default() })]

    #[test]
    fn page_agrees(
        blocks in 1u32..12, spare in 0u32..6, pages in 1u32..12, threshold in 1u32..4, cost_benefit: bool,
        levelling: bool, ops in ops(96)
    ) {
        let geometry = geometry(blocks, threshold + 2 + spare, pages);
        let options = PageOptions { gc_free_blocks: threshold, victim: policy(cost_benefit) };
        options.check(&geometry).unwrap();
        let mut model = reference::page::Page::new(
            geometry.physical_blocks() as usize, pages as usize, threshold as usize, cost_benefit,
        );
        model.flash_mut().levelling = levelling;
        compare(geometry, ProgramOrder::Ascending, PageFtl::new(&geometry, options, levelling), model, &ops);
    }

    #[test]
    fn fast_agrees(
        blocks in 1u32..12, extra in 4u32..9, pages in 1u32..12, random in 1u32..8, in_flight: bool, any: bool,
        levelling: bool, ops in ops(96)
    ) {
        let geometry = geometry(blocks, extra, pages);
        let random = random.min(extra - 1);
        let sw_gap = if in_flight { SequentialGap::MergeInFlight } else { SequentialGap::MergeThenAppend };
        let options = FastOptions { rw_log_blocks: random, sw_gap };
        options.check(&geometry).unwrap();
        let mut model = reference::fast::Fast::new(
            blocks as usize, extra as usize, pages as usize, random as usize, in_flight, any,
        );
        let order = if any { ProgramOrder::Any } else { ProgramOrder::Ascending };
        model.flash_mut().levelling = levelling;
        compare(geometry, order, Fast::new(&geometry, options, levelling), model, &ops);
    }

    #[test]
    fn superblock_agrees(
        blocks in 1u32..12, spare in 0u32..6, pages in 1u32..12, n in 1u32..5, m in 1u32..5,
        threshold in 2u32..4, tables in 1u32..6, hot_cold: bool, cost_benefit: bool, levelling: bool,
        ops in ops(96)
    ) {
        let geometry = geometry(blocks, threshold + 2 + spare, pages);
        let options = SuperblockOptions {
            superblock_blocks: n, update_blocks: m, gc_free_blocks: threshold, pt_cache_entries: tables, hot_cold, victim: policy(cost_benefit),
        };
        options.check(&geometry).unwrap();
        let mut model = reference::superblock::SuperblockModel::new(
            blocks as usize, geometry.extra_blocks as usize, pages as usize, n as usize, m as usize,
            threshold as usize, tables as usize, hot_cold, cost_benefit,
        );
        model.flash_mut().levelling = levelling;
        compare(geometry, ProgramOrder::Ascending, SuperblockFtl::new(&geometry, options, levelling), model, &ops);
    }

    #[test]
    fn dftl_agrees(
        blocks in 1u32..48, spare in 0u32..6, pages in 3u32..12, threshold in 2u32..4, cache in 1u32..40,
        protected in 0u32..40, batch: bool, cost_benefit: bool, levelling: bool,
        ops in ops(512)
    ) {
        // 512-byte pages hold 128 entries, so up to five translation pages.
        let mut geometry = geometry(blocks, 0, pages);
        let translation = DftlOptions::translation_pages(&geometry).div_ceil(pages);
        geometry.extra_blocks = threshold + 3 + translation + spare;
        let options = DftlOptions {
            cmt_entries: cache, cmt_protected: protected.min(cache - 1), batch_update: batch,
            gc_free_blocks: threshold, victim: policy(cost_benefit),
        };
        options.check(&geometry).unwrap();
        let mut model = reference::dftl::Dftl::new(
            geometry.physical_blocks() as usize, pages as usize, 128, cache as usize, options.cmt_protected as usize,
            batch, threshold as usize, cost_benefit,
        );
        model.flash_mut().levelling = levelling;
        compare(geometry, ProgramOrder::Ascending, Dftl::new(&geometry, options, levelling), model, &ops);
    }

    #[test]
    fn no_page_is_lost_by_wear_levelling(blocks in 1u32..12, pages in 3u32..12, ops in ops(96)) {
        let geometry = geometry(blocks, 10, pages);
        survives_relocation(geometry, PageFtl::new(&geometry, PageOptions::default(), true), &ops);
        survives_relocation(geometry, Fast::new(&geometry, FastOptions::for_geometry(&geometry), true), &ops);
        survives_relocation(geometry, SuperblockFtl::new(&geometry, SuperblockOptions::default(), true), &ops);
        let options = DftlOptions { cmt_entries: 8, cmt_protected: 4, ..DftlOptions::default() };
        survives_relocation(geometry, Dftl::new(&geometry, options, true), &ops);
    }
}
