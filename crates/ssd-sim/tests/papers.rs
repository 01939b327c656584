//! The FTL papers' examples (their mechanisms step by step, on devices small enough to check by hand), and the order of the FTLs on the papers' kinds of workloads.

use io_trace::Kind;
use ssd_sim::blocks::VictimPolicy;
use ssd_sim::device::{Device, DeviceOptions, FtlOptions, Precondition, build};
use ssd_sim::flash::{Flash, ProgramOrder};
use ssd_sim::ftl::dftl::{Dftl, DftlOptions};
use ssd_sim::ftl::fast::{Fast, FastOptions, SequentialGap};
use ssd_sim::ftl::superblock::{SuperblockFtl, SuperblockOptions};
use ssd_sim::ftl::{Ftl, FtlKind};
use ssd_sim::geometry::Geometry;
use ssd_sim::workload::{Shape, Workload};

fn geometry(blocks: u32, extra_blocks: u32, pages_per_block: u32) -> Geometry {
    Geometry { blocks, extra_blocks, pages_per_block, page_bytes: 2048 }
}

/// FAST with four pages a block, as its paper draws it, all pages written once in order.
fn fast(blocks: u32, rw_log_blocks: u32, sw_gap: SequentialGap) -> (Fast, Flash) {
    let geometry = geometry(blocks, 8, 4);
    let mut flash: Flash = Flash::new(geometry, ProgramOrder::Ascending, 0, ());
    let mut ftl = Fast::new(&geometry, FastOptions { rw_log_blocks, sw_gap }, false);
    for lpn in 0..blocks * 4 {
        ftl.write(&mut flash, lpn).unwrap();
    }
    assert_eq!(flash.counters.erases, 0, "first writes go to data blocks in place");
    (ftl, flash)
}

fn write_all(ftl: &mut impl Ftl<()>, flash: &mut Flash, lpns: &[u32]) {
    for &lpn in lpns {
        ftl.write(flash, lpn).unwrap();
    }
}

#[test]
fn fast_switch_merge() {
    // A logical block rewritten from its first page to its last fills the SW log block, which
    // takes the data block's place when the next sequence begins: no copy, one erase.
    let (mut ftl, mut flash) = fast(4, 2, SequentialGap::MergeInFlight);
    write_all(&mut ftl, &mut flash, &[4, 5, 6, 7, 8]);
    let c = flash.counters;
    assert_eq!((c.switch_merges, c.partial_merges, c.full_merges, c.copies, c.erases), (1, 0, 0, 0, 1));
}

#[test]
fn fast_partial_merge() {
    // Half a logical block was rewritten when another sequence begins: the other half is copied behind it.
    let (mut ftl, mut flash) = fast(4, 2, SequentialGap::MergeInFlight);
    write_all(&mut ftl, &mut flash, &[4, 5, 8]);
    let c = flash.counters;
    assert_eq!((c.switch_merges, c.partial_merges, c.full_merges, c.copies, c.erases), (0, 1, 0, 2, 1));
}

#[test]
fn fast_full_merges_of_a_random_log_block() {
    // The victim RW log block holds pages of two logical blocks; each is merged once, with its
    // newest copies from all log blocks, and then the victim is erased: 2 × 4 copies, 2 + 1 erases.
    let (mut ftl, mut flash) = fast(4, 2, SequentialGap::MergeInFlight);
    write_all(&mut ftl, &mut flash, &[5, 9, 6, 10]); // fills the first log block with blocks 1 and 2
    write_all(&mut ftl, &mut flash, &[5, 13, 14, 15]); // fills the second; page 5 anew
    assert_eq!(flash.counters.erases, 0);
    write_all(&mut ftl, &mut flash, &[13]); // all full: the oldest goes
    let c = flash.counters;
    assert_eq!((c.full_merges, c.log_block_erases, c.copies, c.erases), (2, 1, 8, 3));
    // Page 5's newest copy came from the second log block and is no longer in it.
    let page = ftl.mapped(&flash, 5).unwrap();
    assert_eq!(flash.live_pages(flash.block_of(page)), 4);
}

#[test]
fn fast_full_associativity_spares_merges() {
    // The paper's argument against block-associative log blocks (BAST): updates spread over as many logical
    // blocks as a log block has pages cost no erase until the log blocks are full.
    let (mut ftl, mut flash) = fast(8, 2, SequentialGap::MergeInFlight);
    write_all(&mut ftl, &mut flash, &[1, 5, 9, 13, 17, 21, 25, 29]);
    assert_eq!((flash.counters.erases, flash.counters.copies), (0, 0));
    // BAST would have thrashed: with two log blocks, six of the eight writes would each have cost a merge.
}

#[test]
fn fast_gap_in_the_sequence() {
    // Pages 4, 5, then 7 of the same logical block: the page in flight takes part in a partial merge (page 6 copied) ...
    let (mut ftl, mut flash) = fast(4, 2, SequentialGap::MergeInFlight);
    write_all(&mut ftl, &mut flash, &[4, 5, 7]);
    let c = flash.counters;
    assert_eq!((c.partial_merges, c.sequential_full_merges, c.copies, c.erases), (1, 0, 1, 1));
    // ... a page written again, in a full one (pages 4, 6 and 7 copied; SW log block and data block erased) ...
    let (mut ftl, mut flash) = fast(4, 2, SequentialGap::MergeInFlight);
    write_all(&mut ftl, &mut flash, &[4, 5, 5]);
    let c = flash.counters;
    assert_eq!((c.partial_merges, c.sequential_full_merges, c.copies, c.erases), (0, 1, 3, 2));
    // ... and by the other reading the SW log block is merged first, and the page begins a new one.
    let (mut ftl, mut flash) = fast(4, 2, SequentialGap::MergeThenAppend);
    write_all(&mut ftl, &mut flash, &[4, 5, 7]);
    let c = flash.counters;
    assert_eq!((c.partial_merges, c.sequential_full_merges, c.copies, c.erases), (1, 0, 2, 1));
}

#[test]
fn dftl_translation_miss_with_a_dirty_victim() {
    // DFTL's example: a request for page 1280 misses; the victim's entry (page 1) is dirty, so its translation page
    // is read and written anew, and then the translation page of 1280 is read: two reads and a write.
    let geometry = geometry(64, 16, 64);
    let options = DftlOptions { cmt_entries: 2, cmt_protected: 1, ..DftlOptions::default() };
    let mut flash: Flash = Flash::new(geometry, ProgramOrder::Ascending, 0, ());
    let mut ftl = Dftl::new(&geometry, options, false);
    // All translation pages exist before the example begins.
    write_all(&mut ftl, &mut flash, &[1, 1280, 2000, 3000, 1280, 3000, 1]);
    let before = flash.counters;
    // Cached: 1 (dirty, probationary: the victim) and 3000 (dirty, protected).
    ftl.read(&mut flash, 1280).unwrap();
    let c = flash.counters;
    assert_eq!(c.mapping_misses - before.mapping_misses, 1);
    assert_eq!((c.mapping_reads - before.mapping_reads, c.mapping_writes - before.mapping_writes), (2, 1));
    assert_eq!(c.host_reads - before.host_reads, 1);
    // A clean victim costs the one read (3.1): 1280 is clean now and goes.
    ftl.read(&mut flash, 2000).unwrap();
    let after = flash.counters;
    assert_eq!((after.mapping_reads - c.mapping_reads, after.mapping_writes - c.mapping_writes), (1, 0));
    // A hit costs nothing.
    ftl.read(&mut flash, 2000).unwrap();
    assert_eq!(
        (flash.counters.mapping_reads, flash.counters.mapping_hits),
        (after.mapping_reads, after.mapping_hits + 1)
    );
}

#[test]
fn dftl_batch_update_writes_a_translation_page_once() {
    // Dirty entries of one translation page are written together.
    let writes = |batch_update| {
        let geometry = geometry(64, 16, 64);
        let options = DftlOptions { cmt_entries: 8, cmt_protected: 1, batch_update, ..DftlOptions::default() };
        let mut flash: Flash = Flash::new(geometry, ProgramOrder::Ascending, 0, ());
        let mut ftl = Dftl::new(&geometry, options, false);
        write_all(&mut ftl, &mut flash, &[0, 1, 2, 3, 4, 5, 6, 7]); // one translation page, all dirty
        write_all(&mut ftl, &mut flash, &[512, 513, 514, 515, 516, 517, 518, 519]); // all eight are evicted
        flash.counters.mapping_writes
    };
    assert_eq!((writes(true), writes(false)), (1, 8));
}

#[test]
fn superblock_absorbs_updates_of_neighbouring_blocks_together() {
    // Superblock FTL: updates of any block of a superblock share its U-block; a page written again
    // there costs no merge, and a U-block whose pages are all dead is erased without a copy.
    let geometry = geometry(8, 8, 4);
    let options = SuperblockOptions { superblock_blocks: 4, update_blocks: 2, ..SuperblockOptions::default() };
    let mut flash: Flash = Flash::new(geometry, ProgramOrder::Ascending, 0, ());
    let mut ftl = SuperblockFtl::new(&geometry, options, false);
    for lpn in 0..16 {
        ftl.write(&mut flash, lpn).unwrap();
    }
    // One page of each of the four blocks, into one U-block: nothing is copied, nothing erased.
    write_all(&mut ftl, &mut flash, &[0, 4, 8, 12]);
    assert_eq!((flash.counters.copies, flash.counters.erases), (0, 0));
    // The same again: the first U-block is dead and goes without a copy when the next is needed.
    write_all(&mut ftl, &mut flash, &[0, 4, 8, 12, 0]);
    assert_eq!((flash.counters.copies, flash.counters.erases), (0, 1));
}

#[test]
fn dftl_collection_updates_cached_entries_lazily_and_the_others_by_translation_page() {
    // DFTL's garbage collection of a data block: of its two valid pages one is cached, whose entry is updated in the
    // cache; the other costs one read and one write of its translation page. 128 entries a translation page, two of them.
    let geometry = Geometry { blocks: 64, extra_blocks: 6, pages_per_block: 4, page_bytes: 512 };
    let options = DftlOptions {
        cmt_entries: 255,
        cmt_protected: 100,
        gc_free_blocks: 2,
        victim: VictimPolicy::Greedy,
        ..DftlOptions::default()
    };
    options.check(&geometry).unwrap();
    let mut flash: Flash = Flash::new(geometry, ProgramOrder::Ascending, 0, ());
    let mut ftl = Dftl::new(&geometry, options, false);
    // The block to be collected: pages 0 and 128 stay valid, 1 and 2 do not. Page 0 is protected by being read.
    write_all(&mut ftl, &mut flash, &[0, 128, 1, 2]);
    ftl.read(&mut flash, 0).unwrap();
    // All other pages; the last one evicts 128, the least recently used, whose translation page is written, and is then
    // looked for in that translation page.
    let others: Vec<u32> = (3..256).filter(|&lpn| lpn != 128).collect();
    write_all(&mut ftl, &mut flash, &others);
    assert_eq!((flash.counters.mapping_reads, flash.counters.mapping_writes), (1, 1));
    let victim = flash.block_of(ftl.mapped(&flash, 0).unwrap());
    // One dead page in each of several blocks, two in that one, until too few blocks are free.
    write_all(&mut ftl, &mut flash, &[1, 2, 10, 20, 30, 40, 50, 60, 70]);
    assert_eq!(flash.counters.gc_runs, 0);
    write_all(&mut ftl, &mut flash, &[80]);
    let c = flash.counters;
    assert_eq!((c.gc_runs, c.copies, c.erases, flash.erase_count(victim)), (1, 2, 1, 1));
    assert_eq!((c.gc_mapping_reads, c.gc_mapping_writes), (1, 1));
    // Where page 0 went is known without any translation page.
    ftl.read(&mut flash, 0).unwrap();
    assert_eq!(flash.counters.mapping_misses, c.mapping_misses);
    ftl.read(&mut flash, 128).unwrap();
    assert_eq!(flash.counters.mapping_misses, c.mapping_misses + 1);
}

#[test]
fn superblock_collects_the_block_with_the_fewest_valid_pages_and_keeps_what_survives_apart() {
    // Two D-blocks and one U-block of four pages. Blocks 0-3 and 4-7 are updated by 0, 1, 2 and 4; the next write needs a
    // U-block more than there may be.
    let after = |hot_cold| {
        let geometry = geometry(8, 8, 4);
        let options =
            SuperblockOptions { superblock_blocks: 2, update_blocks: 1, hot_cold, ..SuperblockOptions::default() };
        options.check(&geometry).unwrap();
        let mut flash: Flash = Flash::new(geometry, ProgramOrder::Ascending, 0, ());
        let mut ftl = SuperblockFtl::new(&geometry, options, false);
        write_all(&mut ftl, &mut flash, &[0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 4]);
        assert_eq!((flash.counters.copies, flash.counters.erases), (0, 0));
        write_all(&mut ftl, &mut flash, &[5]);
        let [survivor, written] = [3, 5].map(|lpn| flash.block_of(ftl.mapped(&flash, lpn).unwrap()));
        (flash.counters.copies, flash.counters.erases, survivor == written)
    };
    // The first block has one valid page, which is copied before the page written; the full U-block is a D-block now.
    assert_eq!(after(false), (1, 1, true));
    // With hot-cold separation the copy gets a block of its own, and the second block's three valid pages join it.
    assert_eq!(after(true), (4, 2, false));
}

#[test]
fn superblock_takes_blocks_from_the_least_recently_written_superblock() {
    // Four superblocks of two blocks, and a pool that two U-blocks bring down to its threshold.
    let geometry = geometry(8, 4, 4);
    let options =
        SuperblockOptions { superblock_blocks: 2, update_blocks: 2, gc_free_blocks: 2, ..SuperblockOptions::default() };
    options.check(&geometry).unwrap();
    let mut flash: Flash = Flash::new(geometry, ProgramOrder::Ascending, 0, ());
    let mut ftl = SuperblockFtl::new(&geometry, options, false);
    write_all(&mut ftl, &mut flash, &(0..32).collect::<Vec<_>>());
    let [first, second] = [0, 8].map(|lpn| flash.block_of(ftl.mapped(&flash, lpn).unwrap()));
    // A block's worth of each of two superblocks is written again: a block without valid pages in each.
    write_all(&mut ftl, &mut flash, &[0, 1, 2, 3, 8, 9, 10, 11]);
    assert_eq!(flash.counters.erases, 0);
    write_all(&mut ftl, &mut flash, &[16]);
    assert_eq!((flash.counters.copies, flash.counters.erases), (0, 1));
    assert_eq!((flash.erase_count(first), flash.erase_count(second)), (1, 0));
}

#[test]
fn superblock_reads_two_spare_areas_for_a_page_table_that_is_not_cached() {
    // PMD and PT lie in spare areas; a page table covers eight pages.
    let geometry = geometry(8, 8, 4);
    let options = SuperblockOptions { pt_cache_entries: 1, ..SuperblockOptions::default() };
    let mut flash: Flash = Flash::new(geometry, ProgramOrder::Ascending, 0, ());
    let mut ftl = SuperblockFtl::new(&geometry, options, false);
    write_all(&mut ftl, &mut flash, &(0..16).collect::<Vec<_>>());
    let spare_reads: Vec<u64> = [15, 0, 7, 8, 0]
        .map(|lpn| {
            let before = flash.counters.spare_reads;
            ftl.read(&mut flash, lpn).unwrap();
            flash.counters.spare_reads - before
        })
        .to_vec();
    assert_eq!(spare_reads, [0, 2, 0, 2, 2]);
}

/// Erases (after the fill) of each FTL, in the order page, FAST, Superblock, DFTL.
fn erases(blocks: u32, shape: Shape, share: f64, writes: u32, pages_per_write: u64) -> [u64; 4] {
    FtlKind::ALL.map(|kind| {
        let mut options = DeviceOptions::new(kind, Geometry::with_blocks(blocks));
        options.precondition = Precondition::Sequential;
        if let FtlOptions::Dftl(dftl) = &mut options.ftl {
            // The paper's rule: the cache gets the RAM of FAST's map for its 3 % log pages.
            dftl.cmt_entries = options.geometry.extra_blocks * 64 / 2;
            dftl.cmt_protected = DftlOptions::protected_for(dftl.cmt_entries);
        }
        options.check().unwrap();
        let mut device = build(&options);
        device.precondition(&|| false).unwrap();
        let pages = (f64::from(options.geometry.logical_pages()) * share) as u32;
        let mut workload = Workload::new(shape, pages / pages_per_write as u32, 7);
        for _ in 0..writes {
            let page = u64::from(workload.next_page()) * pages_per_write;
            device.serve(Kind::Home, page * 2048, pages_per_write * 2048).unwrap();
        }
        device.flash_counters().erases
    })
}

#[test]
fn random_writes_cost_page_least_then_dftl_then_superblock_then_fast() {
    // The 2010 paper's rnd_write: 4 kB writes at random within a file that takes a small part of the disk.
    let [page, fast, superblock, dftl] = erases(4096, Shape::Random, 0.03, 60_000, 2);
    assert!(page <= dftl && dftl <= superblock && superblock <= fast, "{page} {dftl} {superblock} {fast}");
    assert!(fast > 2 * page, "{fast} {page}");
}

#[test]
fn skewed_writes_keep_that_order() {
    let shape = Shape::HotCold { accesses: 0.8, pages: 0.2 };
    let [page, fast, superblock, dftl] = erases(4096, shape, 0.03, 60_000, 2);
    assert!(page <= dftl && dftl <= superblock && superblock <= fast, "{page} {dftl} {superblock} {fast}");
}

#[test]
fn sequential_writes_cost_every_ftl_about_the_same() {
    // Switch merges only: one erase per block written.
    let writes = 4096 * 64 * 2;
    let all = erases(4096, Shape::Sequential, 1.0, writes, 1);
    for erases in all {
        let per_block = erases as f64 / (f64::from(writes) / 64.0);
        assert!((0.9..1.1).contains(&per_block), "{all:?}");
    }
}

#[test]
fn more_spare_blocks_mean_fewer_erases() {
    for kind in FtlKind::ALL {
        let run = |extra_blocks| {
            let mut options = DeviceOptions::new(kind, Geometry { extra_blocks, ..Geometry::with_blocks(1024) });
            options.precondition = Precondition::Sequential;
            let mut device = build(&options);
            device.precondition(&|| false).unwrap();
            let mut workload = Workload::new(Shape::Random, options.geometry.logical_pages(), 3);
            for _ in 0..60_000 {
                device.serve(Kind::Home, u64::from(workload.next_page()) * 2048, 2048).unwrap();
            }
            device.flash_counters().erases
        };
        let (few, many) = (run(40), run(300));
        assert!(many < few, "{kind:?}: {many} with 300, {few} with 40");
    }
}

#[test]
fn a_full_cache_makes_dftl_page_mapped() {
    // With a cache for the whole map only garbage collection of cold translation pages remains.
    let writes = |kind, cmt: u32| {
        let mut options = DeviceOptions::new(kind, Geometry { extra_blocks: 64, ..Geometry::with_blocks(256) });
        if let FtlOptions::Dftl(dftl) = &mut options.ftl {
            (dftl.cmt_entries, dftl.cmt_protected) = (cmt, cmt / 2);
        }
        let mut device: Box<dyn Device> = build(&options);
        let mut workload = Workload::new(Shape::Random, options.geometry.logical_pages(), 3);
        for _ in 0..50_000 {
            device.serve(Kind::Home, u64::from(workload.next_page()) * 2048, 2048).unwrap();
        }
        device.flash_counters().mapping_writes
    };
    assert_eq!(writes(FtlKind::Dftl, 256 * 64), 0);
    assert!(writes(FtlKind::Dftl, 256) > 1000);
}
