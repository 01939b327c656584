//! Which guest pages are retained, and what lets go of them: never one that amberlog itself writes to past the protection,
//! and none for two blocks; by a write home of this very version only.

use guest_memory::{MemoryTable, PAGE_BYTES, PageId, RegionDescriptor, VmMemory, simulated_room};
use jbd2::build::{LogBuilder, SuperblockBuilder, Transaction};
use jbd2::{Checksum, LogRead, Superblock};
use journal_area::{
    Accepted, Content, Error, Holding, HomeWrite, HotPages, JournalArea, LogId, LogShape, LogWrite, Outcome, Over,
    Past, Pressure, SuperblockEffect,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

const BLOCK: usize = PAGE_BYTES;
const PAGES: u32 = 160;
const LOG_BLOCKS: u32 = 64;
const SHAPE: LogShape = LogShape { block_bytes: BLOCK as u32, log_blocks: LOG_BLOCKS, home_blocks: 1000 };

struct Rig {
    memory: Arc<VmMemory>,
    table: MemoryTable,
    area: Arc<JournalArea>,
    log: LogId,
    superblock: SuperblockBuilder,
    builder: LogBuilder,
    /// The guest writes a descriptor, and then, in a request of its own, what it describes.
    is_split: bool,
    /// What was told of the last commit.
    told: Vec<Accepted>,
    directory: tempfile::TempDir,
}

impl Rig {
    fn new() -> Self {
        Self::with_budget(u64::MAX)
    }

    fn with_budget(budget_bytes: u64) -> Self {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let path = directory.path().join("ram");
        let ram = std::fs::OpenOptions::new().read(true).write(true).create_new(true).open(path).expect("a file");
        let size = u64::from(PAGES) * BLOCK as u64;
        ram.set_len(size).expect("a length");
        let memory = VmMemory::new();
        let region = RegionDescriptor { gpa: 0, size, user_addr: 0x7000_0000, file: ram, file_offset: 0 };
        let table = memory.map(vec![region]).expect("mapped");
        memory.simulate_protection();
        let area = JournalArea::new(&memory, budget_bytes);
        // Single pages are retained, too.
        area.set_hot_pages(HotPages::Foreseen);
        let log = area.make_log(directory.path(), "log", SHAPE, Holding::Retain, Vec::new()).expect("a log");
        let superblock =
            SuperblockBuilder { maxlen: LOG_BLOCKS, start: 1, sequence: 1, ..SuperblockBuilder::default() }
                .checksum(Checksum::None);
        let raw = superblock.build();
        let (_, format) = Superblock::parse(&raw).expect("valid");
        assert_eq!(area.superblock_written(log, &raw).expect("held"), SuperblockEffect::Opened);
        Rig {
            memory,
            table,
            area,
            log,
            superblock,
            builder: LogBuilder::new(format, 1, 1),
            is_split: false,
            told: Vec::new(),
            directory,
        }
    }

    /// The process is killed, and another one goes on.
    fn followed(self) -> Self {
        let path = self.directory.path();
        let protected: Vec<PageId> =
            (0..PAGES).map(PageId).filter(|page| self.memory.simulated_is_protected(*page)).collect();
        let ram = std::fs::OpenOptions::new().read(true).write(true).open(path.join("ram")).expect("a file");
        let size = u64::from(PAGES) * BLOCK as u64;
        let memory = VmMemory::new();
        let region = RegionDescriptor { gpa: 0, size, user_addr: 0x7000_0000, file: ram, file_offset: 0 };
        let table = memory.map(vec![region]).expect("mapped");
        memory.simulate_protection();
        memory.protect(&protected).expect("simulated");
        let area = JournalArea::new(&memory, u64::MAX);
        area.set_hot_pages(HotPages::Foreseen);
        let log = area.adopt_log(path, "log", SHAPE, Holding::Retain, Vec::new()).expect("a log");
        Rig { memory, table, area, log, ..self }
    }

    /// Commits blocks, each from a page. Returns their log blocks.
    fn commit(&mut self, blocks: &[(u64, PageId)]) -> Vec<u32> {
        let (positions, outcome) = self.offer(blocks);
        assert_eq!(outcome.committed, 1);
        self.told = outcome.accepted;
        self.area.check().expect("the books are right");
        positions
    }

    /// The same, whatever becomes of it.
    fn offer(&mut self, blocks: &[(u64, PageId)]) -> (Vec<u32>, Outcome) {
        let content = |page: PageId| {
            let mut bytes = vec![0; BLOCK];
            self.memory.page(page).expect("a page").copy_out(0, &mut bytes);
            bytes
        };
        let transaction = Transaction {
            blocks: blocks.iter().map(|(block, page)| (*block, content(*page))).collect(),
            ..Transaction::default()
        };
        let (mut writes, mut positions) = (Vec::new(), Vec::new());
        let mut pages = blocks.iter().map(|(_, page)| *page);
        self.builder.transaction(&transaction, &mut |position, block| {
            let content = if jbd2::peek(block).is_some() {
                Content::Bytes(block.to_vec())
            } else {
                positions.push(position);
                Content::Page(self.memory.page(pages.next().expect("a page a block")).expect("a page"))
            };
            writes.push(LogWrite { position, content });
        });
        if self.is_split {
            self.area.hold(self.log, &writes[..1]);
            writes.remove(0);
        }
        let outcome = self.area.hold(self.log, &writes);
        (positions, outcome)
    }

    /// The guest's log begins where it ends now.
    fn move_tail(&self) {
        let (start, sequence) = (self.builder.position, self.builder.sequence);
        let block = SuperblockBuilder { start, sequence, ..self.superblock.clone() }.build();
        assert_eq!(self.area.superblock_written(self.log, &block).expect("held"), SuperblockEffect::GoesOn);
    }

    fn fill(&self, page: PageId, value: u8) {
        self.memory.simulated_guest_write(page, 0, &[value; BLOCK]);
    }

    /// Whether a log block is held, all of it with this value.
    fn holds(&self, position: u32, value: u8) -> bool {
        let mut block = vec![0; BLOCK];
        self.area.look(self.log, |held| held.read(position, &mut block).expect("held")).expect("there");
        block == [value; BLOCK]
    }
}

#[test]
fn the_pages_of_rings_are_copied() {
    let mut rig = Rig::new();
    let (ring, other) = (PageId(3), PageId(4));
    rig.area.set_excluded_pages([ring].into());
    rig.fill(ring, 3);
    rig.fill(other, 4);
    let positions = rig.commit(&[(10, ring), (11, other)]);
    assert!(!rig.memory.is_retained(ring), "a used ring is written past the protection");
    assert!(rig.memory.is_retained(other));
    // As the device does, without asking.
    rig.memory.page(ring).expect("a page").copy_in(0, &[9; BLOCK]);
    assert!(rig.holds(positions[0], 3) && rig.holds(positions[1], 4));
}

#[test]
fn a_page_is_retained_for_one_block_only() {
    let mut rig = Rig::new();
    let page = PageId(5);
    rig.fill(page, 1);
    // Twice in one batch, and again in the next while it is retained.
    let mut positions = rig.commit(&[(10, page), (11, page)]);
    assert!(rig.memory.is_retained(page));
    positions.extend(rig.commit(&[(12, page)]));
    rig.fill(page, 2);
    rig.area.check().expect("the books are right");
    for position in positions {
        assert!(rig.holds(position, 1), "log block {position} is as it was committed");
    }
    assert_eq!(rig.area.owed(rig.log).blocks, 3);
}

/// What a guest is going to write to again is copied at once, as far as the rule foresees it; what counts is the same under each.
#[test]
fn the_last_block_of_a_file_is_copied() {
    for (rule, tail_is_retained, again_is_retained) in
        [(HotPages::Never, true, true), (HotPages::Faulted, true, false), (HotPages::Foreseen, false, false)]
    {
        let mut rig = Rig::new();
        rig.area.set_hot_pages(rule);
        let (whole, tail, again) = (PageId(1), PageId(2), PageId(3));
        rig.fill(whole, 1);
        rig.fill(tail, 0);
        rig.memory.simulated_guest_write(tail, 0, &[2; BLOCK - 8]);
        rig.fill(again, 3);
        let positions = rig.commit(&[(10, whole), (11, tail), (12, again)]);
        assert!(rig.memory.is_retained(whole) && rig.memory.is_retained(again));
        assert_eq!(rig.memory.is_retained(tail), tail_is_retained, "{rule:?}");
        rig.fill(again, 4);
        let later = rig.commit(&[(12, again)]);
        assert_eq!(rig.memory.is_retained(again), again_is_retained, "{rule:?}");
        // As a guest clears what is behind the file's end.
        rig.memory.simulated_guest_write(tail, BLOCK - 8, &[0; 8]);
        rig.fill(again, 5);
        rig.area.check().expect("the books are right");
        assert!(rig.holds(positions[0], 1) && rig.holds(later[0], 4));
        let mut block = vec![0; BLOCK];
        rig.area.look(rig.log, |held| held.read(positions[1], &mut block).expect("held")).expect("there");
        assert!(block == [[2; BLOCK - 8].as_slice(), &[0; 8]].concat());
    }
}

/// What a call would protect alone is copied, as long as there is room for copies; what a call protects with its neighbours is not.
#[test]
fn pages_with_few_neighbours_are_copied_while_copies_are_allowed() {
    for (budget_bytes, lone_are_retained) in [(u64::MAX, false), (0, true)] {
        let mut rig = Rig::with_budget(budget_bytes);
        rig.area.set_hot_pages(HotPages::Lone);
        (0..PAGES).for_each(|page| rig.fill(PageId(page), page as u8 + 1));
        // A run of eight, in another order than that of their numbers, one of seven, and one page that is told last.
        let run = [7, 2, 3, 4, 1, 6, 5, 0].map(|page| (u64::from(page) + 10, PageId(page)));
        let positions = rig.commit(&run);
        assert!(
            (0..8).all(|page| rig.memory.is_retained(PageId(page))),
            "a run of neighbours is protected by one call"
        );
        let lone = [9, 10, 11, 12, 13, 14, 15].map(|page| (u64::from(page) + 10, PageId(page)));
        let lone_positions = rig.commit(&lone);
        assert!((9..16).all(|page| rig.memory.is_retained(PageId(page)) == lone_are_retained), "budget {budget_bytes}");
        (0..PAGES).for_each(|page| rig.fill(PageId(page), 99));
        rig.area.check().expect("the books are right");
        let committed = run.iter().zip(positions).chain(lone.iter().zip(lone_positions));
        for ((_, page), position) in committed {
            assert!(rig.holds(position, page.0 as u8 + 1), "page {page:?} is as it was committed");
        }
    }
}

/// Pages that follow one another are of no use where their blocks do not: such blocks are likely to be written again before they are home.
#[test]
fn blocks_from_all_over_a_file_have_no_neighbours() {
    let blocks_of = |block_of: fn(u64) -> u64| (0..16).map(move |page| (block_of(page), PageId(page as u32)));
    for (block_of, are_retained) in [(|page| 100 + page) as fn(u64) -> u64, |page| 200 - page, |page| 300 + 2 * page]
        .into_iter()
        .zip([true, true, false])
    {
        for is_split in [false, true] {
            let mut rig = Rig::new();
            rig.area.set_hot_pages(HotPages::Lone);
            (0..16).for_each(|page| rig.fill(PageId(page), page as u8 + 1));
            rig.is_split = is_split;
            let positions = rig.commit(&blocks_of(block_of).collect::<Vec<_>>());
            assert!(
                (0..16).all(|page| rig.memory.is_retained(PageId(page)) == are_retained),
                "block {} of page 1, split {is_split}",
                block_of(1)
            );
            (0..16).for_each(|page| rig.fill(PageId(page), 99));
            assert!(positions.iter().zip(1..).all(|(position, value)| rig.holds(*position, value)));
        }
    }
}

/// Whoever writes to a page that is retained often writes to the next ones: those about it are copied with it, where copies are allowed.
#[test]
fn what_is_retained_around_a_page_that_is_written_to_is_copied_with_it() {
    let (rules, budgets) = ([HotPages::Lone, HotPages::Lone, HotPages::Foreseen], [u64::MAX, 0, u64::MAX]);
    for ((rule, budget_bytes), are_copied) in rules.into_iter().zip(budgets).zip([true, false, false]) {
        let mut rig = Rig::with_budget(budget_bytes);
        rig.area.set_hot_pages(rule);
        let run = (56..72).map(|page| (u64::from(page), PageId(page))).collect::<Vec<_>>();
        run.iter().for_each(|(_, page)| rig.fill(*page, page.0 as u8));
        let positions = rig.commit(&run);
        assert!(run.iter().all(|(_, page)| rig.memory.is_retained(*page)));
        rig.fill(PageId(60), 99);
        rig.area.check().expect("the books are right");
        let retained: Vec<u32> = (56..72).filter(|page| rig.memory.is_retained(PageId(*page))).collect();
        let left: Vec<u32> = (56..72).filter(|page| if are_copied { *page >= 64 } else { *page != 60 }).collect();
        assert_eq!(retained, left, "{rule:?}, budget {budget_bytes}");
        assert!(
            left.iter().all(|page| rig.memory.simulated_is_protected(PageId(*page))),
            "what is retained is protected"
        );
        let copied = (56..72).filter(|page| !left.contains(page)).collect::<Vec<_>>();
        assert!(
            copied.iter().all(|page| !rig.memory.simulated_is_protected(PageId(*page))),
            "all that was copied is let go at once"
        );
        assert_eq!(rig.area.counters(rig.log).cow_faults, 1);
        assert_eq!(rig.area.counters(rig.log).pages_copied, copied.len() as u64);
        (56..72).for_each(|page| rig.fill(PageId(page), 99));
        assert!(positions.iter().zip(56..).all(|(position, value)| rig.holds(*position, value)));
    }
}

/// A run of pages, 56 to 71, each with the block of its number, committed by the rule that copies around a page.
fn rig_with_a_run() -> (Rig, Vec<u32>) {
    let mut rig = Rig::new();
    rig.area.set_hot_pages(HotPages::Lone);
    let run = (56..72).map(|page| (u64::from(page), PageId(page))).collect::<Vec<_>>();
    run.iter().for_each(|(_, page)| rig.fill(*page, page.0 as u8));
    let positions = rig.commit(&run);
    assert!(run.iter().all(|(_, page)| rig.memory.is_retained(*page)));
    (rig, positions)
}

/// A write home that is under way releases what it carries where that stays in its place.
#[test]
fn a_page_on_its_way_home_is_not_copied_with_one_that_is_written_to() {
    let (mut rig, _) = rig_with_a_run();
    let payload = [rig.memory.page(PageId(58))];
    let HomeWrite::Go { operation, .. } = rig.area.home_write_begins(rig.log, 58..59, &payload, &Over::Unknown) else {
        panic!("nothing is in the way")
    };
    rig.fill(PageId(60), 99);
    let retained: Vec<u32> = (56..64).filter(|page| rig.memory.is_retained(PageId(*page))).collect();
    assert_eq!(retained, [58]);
    rig.area.home_write_ended(rig.log, operation, true);
    rig.area.check().expect("the books are right");
    assert!(!rig.memory.is_retained(PageId(58)));
    assert_eq!(rig.area.counters(rig.log).released_home, 1);
    rig.fill(PageId(58), 99);
    rig.commit(&[(58, PageId(58))]);
}

/// Copies that need not be made take no memory that others cannot do without.
#[test]
fn nothing_is_copied_around_a_page_while_memory_is_short() {
    let (rig, positions) = rig_with_a_run();
    let are_retained = |pages: std::ops::Range<u32>| pages.into_iter().all(|page| rig.memory.is_retained(PageId(page)));
    simulated_room::set_room_bytes(Some(1 << 20));
    rig.fill(PageId(60), 99);
    simulated_room::set_room_bytes(None);
    assert!(are_retained(56..60) && are_retained(61..64));
    rig.area.check().expect("the books are right");
    assert!((60..64).zip(&positions[4..]).all(|(page, position)| rig.holds(*position, page)));
}

/// Somebody who waits for memory gets it before anything is copied for speed.
#[test]
fn who_waits_for_a_page_is_let_go_alone() {
    let (rig, positions) = rig_with_a_run();
    simulated_room::set_full(true);
    assert!(!rig.memory.simulated_guest_tries(PageId(60), 0, &[99]), "there was no memory for a copy");
    simulated_room::set_full(false);
    rig.memory.simulated_try_again();
    rig.area.check().expect("the books are right");
    let let_go: Vec<u32> = (56..72).filter(|page| !rig.memory.is_retained(PageId(*page))).collect();
    assert_eq!(let_go, [60]);
    rig.fill(PageId(61), 99);
    let let_go: Vec<u32> = (56..72).filter(|page| !rig.memory.is_retained(PageId(*page))).collect();
    assert_eq!(let_go, (56..64).collect::<Vec<_>>(), "nobody waits any more");
    assert!((56..72).zip(&positions).all(|(page, position)| rig.holds(*position, page)));
}

/// What the VM holds already, for whatever reason, leaves less for copies that need not be.
#[test]
fn pages_with_few_neighbours_are_copied_of_what_is_left_alone() {
    // A first copy takes memory for 64 of them.
    let mut rig = Rig::with_budget(300 << 10);
    rig.area.set_hot_pages(HotPages::Lone);
    (0..PAGES).for_each(|page| rig.fill(PageId(page), page as u8 + 1));
    let before = rig.area.memory().held_bytes;
    rig.commit(&[(10, PageId(2)), (11, PageId(3)), (12, PageId(4))]);
    assert!([2, 3, 4].iter().all(|page| !rig.memory.is_retained(PageId(*page))), "there was room, {before}");
    rig.commit(&[(20, PageId(8)), (21, PageId(9)), (22, PageId(10))]);
    assert!([8, 9, 10].iter().all(|page| rig.memory.is_retained(PageId(*page))), "{}", rig.area.memory().held_bytes);
}

/// A page need not be copied: where there is no memory for a copy, it is retained.
#[test]
fn pages_with_few_neighbours_are_retained_where_there_is_no_memory() {
    let page = PageId(12);
    let mut rig = Rig::new();
    rig.area.set_hot_pages(HotPages::Lone);
    rig.fill(page, 13);
    simulated_room::set_full(true);
    let (positions, outcome) = rig.offer(&[(30, page)]);
    simulated_room::set_full(false);
    assert!(rig.memory.is_retained(page));
    assert_eq!(outcome.no_memory, [0, 2], "what describes the block has to be copied, and goes to storage");
    assert!(rig.holds(positions[0], 13));
    rig.area.check().expect("the books are right");
}

/// The log goes once round while a home write is on its way, and the same page holds another version of the same block
/// at the same place: the write's end says nothing of that one.
#[test]
fn a_write_home_lets_go_of_the_version_that_it_carried() {
    let mut rig = Rig::new();
    let (page, other) = (PageId(5), PageId(6));
    rig.fill(page, 1);
    let first = rig.commit(&[(10, page)]);
    let payload = [rig.memory.page(page)];
    let HomeWrite::Go { operation, replaced, .. } =
        rig.area.home_write_begins(rig.log, 10..11, &payload, &Over::Unknown)
    else {
        panic!("nothing is in the way")
    };
    assert!(replaced.is_empty(), "it goes out as it is");
    // A transaction of one block takes three log blocks, and the log has 63.
    for round in 0..20 {
        rig.move_tail();
        rig.fill(other, round);
        rig.commit(&[(20, other)]);
    }
    rig.move_tail();
    rig.fill(page, 2);
    let again = rig.commit(&[(10, page)]);
    assert_eq!(first, again, "the same log block");
    assert!(rig.memory.is_retained(page), "and the same page");
    rig.area.home_write_ended(rig.log, operation, true);
    assert_eq!(rig.area.owed(rig.log).blocks, 1, "the new version is still owed");
    assert!(rig.holds(again[0], 2));
    rig.area.check().expect("the books are right");
}

/// A home write that brings what is committed, one of something else, and one of a block that the log does not have.
#[test]
fn a_write_past_the_journal_is_told_from_one_that_brings_what_it_has() {
    let mut rig = Rig::new();
    let (same, committed, other) = (PageId(5), PageId(6), PageId(7));
    rig.fill(same, 1);
    rig.fill(committed, 2);
    rig.commit(&[(10, same), (11, committed)]);
    rig.fill(other, 3);
    let payload = [same, other, other].map(|page| rig.memory.page(page));
    let over = Over::AsOf { whole: 10..13, first_asked: None, has_waited: false };
    let HomeWrite::Go { operation, carried, .. } = rig.area.home_write_begins(rig.log, 10..13, &payload, &over) else {
        panic!("nothing is in the way")
    };
    assert_eq!(carried, [10]);
    assert_eq!(rig.area.written_past(rig.log), [(11, Some(Past::Begun))], "it may fail yet");
    rig.area.home_write_ended(rig.log, operation, true);
    assert_eq!(rig.area.written_past(rig.log), [(11, Some(Past::Written))]);
    // Its page is copied out, and the version stays the same.
    rig.fill(committed, 4);
    assert_eq!(rig.area.written_past(rig.log), [(11, Some(Past::Written))]);
    rig.fill(committed, 2);
    let HomeWrite::Go { operation, carried, .. } =
        rig.area.home_write_begins(rig.log, 11..12, &[rig.memory.page(committed)], &Over::Unknown)
    else {
        panic!("nothing is in the way")
    };
    assert_eq!(carried, [11]);
    rig.area.home_write_ended(rig.log, operation, true);
    assert_eq!(rig.area.written_past(rig.log), []);
    rig.area.check().expect("the books are right");
}

/// Files that all have one text: a write of one that was deleted meanwhile goes when the guest's tail has passed what it brings, and others
/// with that text are deleted without a word.
#[test]
fn a_write_that_waited_says_nothing_of_where_homes_are() {
    let as_of = |first_asked, has_waited| Over::AsOf { whole: 0..0, first_asked, has_waited };
    let aged = |has_waited| Over::Blocks { blocks: &[], durable: None, has_waited };
    for (over, is_wrong) in [
        (as_of(Some(1), true), false),
        // Of another process.
        (as_of(None, true), false),
        (aged(true), false),
        (as_of(None, false), true),
        (aged(false), true),
    ] {
        let mut rig = Rig::new();
        let texts: Vec<PageId> = (5..11).map(PageId).collect();
        for page in &texts {
            let text: Vec<u8> = (0..BLOCK).map(|at| (at * (page.0 as usize + 3) / 5) as u8).collect();
            rig.memory.simulated_guest_write(*page, 0, &text);
        }
        let file = |from: u64| (from..).zip(texts.iter().copied()).collect::<Vec<_>>();
        rig.commit(&file(10));
        rig.move_tail();
        rig.fill(PageId(4), 1);
        rig.commit(&[(2, PageId(4))]);
        let payload: Vec<_> = texts.iter().map(|page| rig.memory.page(*page)).collect();
        let HomeWrite::Go { operation, .. } = rig.area.home_write_begins(rig.log, 10..16, &payload, &over) else {
            panic!("nothing is in the way")
        };
        rig.area.home_write_ended(rig.log, operation, true);
        rig.commit(&file(20));
        let block =
            SuperblockBuilder { start: rig.builder.position, sequence: rig.builder.sequence, ..rig.superblock.clone() };
        let _ = rig.area.superblock_written(rig.log, &block.build());
        assert_eq!(rig.area.contradiction(rig.log).is_some(), is_wrong, "{over:?}");
    }
}

/// It was asked before there was that version, and happens to carry the same.
#[test]
fn what_is_not_durable_is_not_let_go_of_for_what_came_before_it() {
    let mut rig = Rig::new();
    let (committed, other) = (PageId(5), PageId(7));
    rig.fill(committed, 1);
    rig.fill(other, 1);
    rig.commit(&[(10, committed)]);
    let transaction = rig.area.newest_versions(rig.log, &(10..11))[0].1;
    for (blocks, durable, is_durable) in
        [(&[][..], transaction - 1, false), (&[10], transaction - 1, true), (&[], transaction, true)]
    {
        for page in [committed, other] {
            let (payload, over) =
                ([rig.memory.page(page)], Over::Blocks { blocks, durable: Some(durable), has_waited: false });
            let HomeWrite::Go { operation, carried, .. } = rig.area.home_write_begins(rig.log, 10..11, &payload, &over)
            else {
                panic!("nothing is in the way")
            };
            assert_eq!(carried, if is_durable { vec![10] } else { vec![] });
            // One that would let go of it fails.
            rig.area.home_write_ended(rig.log, operation, !is_durable);
            assert_eq!(rig.area.owed(rig.log).blocks, 1);
        }
    }
    rig.area.check().expect("the books are right");
}

/// Over which versions a write goes, as far as anybody knows: those that were there when it was asked.
#[test]
fn what_was_asked_before_a_commit_is_not_written_past_it() {
    let mut rig = Rig::new();
    let (committed, other) = (PageId(5), PageId(7));
    rig.fill(committed, 1);
    rig.commit(&[(10, committed)]);
    rig.fill(other, 3);
    let write = |rig: &Rig, over: &Over<'_>| {
        let payload = [rig.memory.page(other)];
        let HomeWrite::Go { operation, .. } = rig.area.home_write_begins(rig.log, 10..11, &payload, over) else {
            panic!("nothing is in the way")
        };
        rig.area.home_write_ended(rig.log, operation, true);
        rig.area.written_past(rig.log)
    };
    let as_of = |whole, first_asked| Over::AsOf { whole, first_asked, has_waited: false };
    assert_eq!(write(&rig, &Over::Blocks { blocks: &[11], durable: None, has_waited: false }), [(10, None)]);
    assert_eq!(write(&rig, &as_of(10..11, Some(0))), [(10, None)], "the transaction is the first");
    assert_eq!(write(&rig, &as_of(11..11, None)), [(10, None)], "a part of the block");
    rig.area.home_write_asked(rig.log, &(10..13), &(10..13));
    assert_eq!(rig.area.written_past(rig.log), [(10, Some(Past::Begun))]);
    assert_eq!(write(&rig, &Over::Unknown), [(10, Some(Past::Written))], "another one was asked after the commit");
    rig.area.home_write_asked(rig.log, &(10..11), &(10..11));
    assert_eq!(rig.area.written_past(rig.log), [(10, Some(Past::Written))], "it has not begun");
    // What was asked of the process before this one may be older than all that it took in.
    rig.fill(committed, 4);
    rig.commit(&[(10, committed)]);
    let rig = rig.followed();
    assert_eq!(write(&rig, &Over::Blocks { blocks: &[11], durable: None, has_waited: true }), [(10, None)]);
    assert!(!rig.area.is_past_unknown(rig.log));
    assert_eq!(write(&rig, &Over::Unknown), [(10, Some(Past::Begun))], "or newer");
    assert!(rig.area.is_past_unknown(rig.log));
    // What is asked for now is not.
    assert_eq!(write(&rig, &as_of(10..11, None)), [(10, Some(Past::Written))]);
    rig.area.check().expect("the books are right");
}

/// There is no memory to copy a retained page to: it is not let go and its content is not touched, whoever asks. The log that it
/// belongs to has blocks written home for it, though nothing of it was ever copied, and then it is let go.
#[test]
fn a_page_that_cannot_be_copied_stays_until_it_is_home() {
    let mut rig = Rig::new();
    let (page, other) = (PageId(5), PageId(6));
    rig.fill(page, 5);
    rig.fill(other, 6);
    let positions = rig.commit(&[(10, page), (11, other)]);
    simulated_room::set_full(true);
    let slice = rig.memory.page(page).expect("a page");
    for _ in 0..2 {
        // amberlog's own write, and the guest's.
        let refused = rig.table.prepare_write(&slice).expect_err("there is no room");
        assert!(refused.to_string().contains("no memory to copy it to"), "{refused}");
        assert!(!rig.memory.simulated_guest_tries(page, 0, &[9; BLOCK]));
    }
    assert!(rig.holds(positions[0], 5) && rig.memory.is_retained(page) && rig.memory.simulated_is_protected(page));
    assert_eq!(rig.area.under_pressure(), Some((rig.log, Pressure::Pages)));
    let writes = rig.area.host_writes(rig.log, 8, false);
    assert_eq!(writes.iter().map(|(_, write)| write.block).collect::<Vec<_>>(), [10, 11]);
    for (operation, _) in writes {
        rig.area.home_write_ended(rig.log, operation, true);
    }
    assert!(!rig.memory.is_retained(page) && !rig.memory.simulated_is_protected(page), "home, and let go");
    assert_eq!(rig.area.under_pressure(), None);
    rig.table.prepare_write(&slice).expect("nothing is in the way");
    simulated_room::set_full(false);
}

/// Somebody waits for pages of two logs. Each has its own written home: the disk of one may not answer.
#[test]
fn every_log_gives_back_pages_that_somebody_waits_for() {
    let mut rig = Rig::new();
    let pages = [PageId(5), PageId(7)];
    let first = rig.log;
    rig.fill(pages[0], 5);
    rig.commit(&[(10, pages[0])]);
    let second = rig.area.make_log(rig.directory.path(), "second", SHAPE, Holding::Retain, Vec::new()).expect("a log");
    let opened = rig.area.superblock_written(second, &rig.superblock.build()).expect("held");
    assert_eq!(opened, SuperblockEffect::Opened);
    let (_, format) = Superblock::parse(&rig.superblock.build()).expect("valid");
    (rig.log, rig.builder) = (second, LogBuilder::new(format, 1, 1));
    rig.fill(pages[1], 7);
    rig.commit(&[(20, pages[1])]);
    assert_eq!((rig.area.pressure_on(first), rig.area.pressure_on(second)), (None, None));
    simulated_room::set_full(true);
    for page in pages {
        assert!(!rig.memory.simulated_guest_tries(page, 0, &[9; BLOCK]));
    }
    for log in [second, first] {
        assert_eq!(rig.area.pressure_on(log), Some(Pressure::Pages), "{log:?}");
        for (operation, _) in rig.area.host_writes(log, 8, false) {
            rig.area.home_write_ended(log, operation, true);
        }
        assert_eq!(rig.area.pressure_on(log), None, "{log:?}");
    }
    assert!(pages.iter().all(|page| !rig.memory.is_retained(*page)), "both are home, and let go");
    simulated_room::set_full(false);
}

/// The host writes a version home from the page that has it. The guest changes that page meanwhile, and the version is in a copy from then on:
/// what the write has brought is not known.
#[test]
fn a_page_that_is_let_go_under_a_write_of_the_hosts_is_told_of() {
    for (is_changed, is_ok) in [(false, true), (true, true), (true, false)] {
        let mut rig = Rig::new();
        let pages = [PageId(5), PageId(7)];
        pages.iter().for_each(|page| rig.fill(*page, 5));
        let positions = rig.commit(&[(10, pages[0]), (20, pages[1])]);
        let writes = rig.area.host_writes(rig.log, 8, false);
        assert_eq!(writes.iter().map(|(_, write)| write.block).collect::<Vec<_>>(), [10, 20]);
        if is_changed {
            rig.fill(pages[0], 9);
        }
        let changed =
            writes.into_iter().flat_map(|(operation, _)| rig.area.home_write_ended(rig.log, operation, is_ok));
        let changed: Vec<u64> = changed.collect();
        assert_eq!(changed, if is_changed { vec![10] } else { vec![] });
        assert_eq!(rig.area.owed(rig.log).blocks, [2, 0, 2, 1][usize::from(is_ok) + 2 * usize::from(is_changed)]);
        if is_changed {
            assert!(rig.holds(positions[0], 5));
        }
        rig.area.check().expect("the books are right");
    }
}

/// The largest log has nothing that the host may write home: what its guest wrote over itself is the guest's. So the next one gives memory
/// back.
#[test]
fn a_log_that_can_give_nothing_back_keeps_no_other_from_it() {
    let mut rig = Rig::new();
    let make = |rig: &Rig, name: &str| {
        let log = rig.area.make_log(rig.directory.path(), name, SHAPE, Holding::Copy, Vec::new()).expect("a log");
        let opened = rig.area.superblock_written(log, &rig.superblock.build()).expect("held");
        assert_eq!(opened, SuperblockEffect::Opened);
        log
    };
    let (_, format) = Superblock::parse(&rig.superblock.build()).expect("valid");
    let (large, small) = (make(&rig, "large"), make(&rig, "small"));
    (rig.log, rig.builder) = (large, LogBuilder::new(format, 1, 1));
    (5..9).for_each(|page| rig.fill(PageId(page), page as u8));
    rig.commit(&[(10, PageId(5)), (11, PageId(6)), (12, PageId(7)), (13, PageId(8))]);
    let HomeWrite::Go { operation, .. } = rig.area.home_write_begins(large, 10..14, &[None; 4], &Over::Unknown) else {
        panic!("nothing is in the way");
    };
    rig.area.home_write_ended(large, operation, true);
    let large_builder = std::mem::replace(&mut rig.builder, LogBuilder::new(format, 1, 1));
    rig.log = small;
    rig.commit(&[(20, PageId(5))]);
    rig.area.set_room(Some(0));
    assert_eq!(rig.area.under_pressure(), Some((large, Pressure::Copies)), "the largest");
    assert!(rig.area.host_writes(large, 8, true).is_empty());
    assert_eq!(rig.area.under_pressure(), Some((small, Pressure::Copies)));
    let writes = rig.area.host_writes(small, 8, true);
    assert_eq!(writes.iter().map(|(_, write)| write.block).collect::<Vec<_>>(), [20]);
    assert!(rig.area.host_writes(small, 8, true).is_empty());
    assert_eq!(rig.area.under_pressure(), Some((small, Pressure::Copies)), "it may have more when that has ended");
    writes.into_iter().for_each(|(operation, _)| drop(rig.area.home_write_ended(small, operation, true)));
    // What comes anew may go home.
    (rig.log, rig.builder) = (large, large_builder);
    rig.commit(&[(14, PageId(6))]);
    assert_eq!(rig.area.under_pressure(), Some((large, Pressure::Copies)));
    assert_eq!(rig.area.host_writes(large, 8, true).len(), 1);
}

/// What the host leaves the VM becomes less than what it holds: what was copied goes home, though its own budget has no end, and
/// nothing is refused meanwhile.
#[test]
fn copied_blocks_go_home_where_the_host_leaves_less_room() {
    let mut rig = Rig::new();
    let (page, other) = (PageId(5), PageId(6));
    rig.fill(page, 5);
    rig.fill(other, 7);
    rig.commit(&[(10, page), (11, other)]);
    rig.fill(page, 6);
    let woken = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&woken);
    rig.area.set_waker(Box::new(move || {
        counted.fetch_add(1, Ordering::SeqCst);
    }));
    let wakes = || woken.load(Ordering::SeqCst);
    let before = rig.area.memory();
    assert!(before.copied_bytes > 0 && before.held_bytes > before.copied_bytes, "{before:?}");
    rig.area.set_room(Some(before.held_bytes));
    assert_eq!((rig.area.under_pressure(), wakes()), (None, 0), "it has room for all that it holds");
    rig.area.set_room(Some(before.held_bytes - 1));
    assert_eq!((rig.area.under_pressure(), wakes()), (Some((rig.log, Pressure::Copies)), 1));
    assert_eq!(rig.area.room_bytes(), Some(before.held_bytes - 1));
    // Whoever keeps a log in memory has to have it, or a log would stay on storage for long. It counts.
    assert!(rig.area.reserve(1000), "only the budget refuses");
    assert_eq!(rig.area.memory().held_bytes, before.held_bytes + 1000);
    rig.area.release(1000);
    for (operation, write) in rig.area.host_writes(rig.log, 8, true) {
        assert_eq!(write.block, 10, "what is retained takes nothing of the host's memory");
        rig.area.home_write_ended(rig.log, operation, true);
    }
    let positions = rig.commit(&[(12, other)]);
    assert_eq!(positions.len(), 1, "it goes on all the while");
    rig.area.set_room(None);
    assert_eq!(rig.area.under_pressure(), None);
    rig.area.check().expect("the books are right");
}

/// The pages of a ring that the guest made of retained ones are let go when there is room, and not before.
#[test]
fn a_page_of_a_ring_waits_for_room() {
    let mut rig = Rig::new();
    let page = PageId(5);
    rig.fill(page, 5);
    let positions = rig.commit(&[(10, page)]);
    simulated_room::set_full(true);
    rig.area.set_excluded_pages([page].into());
    assert!(rig.memory.is_retained(page) && rig.holds(positions[0], 5));
    simulated_room::set_full(false);
    // Whoever answers faults asks now and then.
    rig.memory.simulated_try_again();
    assert!(!rig.memory.is_retained(page) && !rig.memory.simulated_is_protected(page));
    rig.memory.page(page).expect("a page").copy_in(0, &[9; BLOCK]);
    assert!(rig.holds(positions[0], 5));
}

/// Bringing a log elsewhere takes I/O. Whoever does it has no lock meanwhile: its guest's writes to protected pages are answered, and
/// what was committed is read all the same.
#[test]
fn pages_are_answered_while_a_log_is_taken_elsewhere() {
    let mut rig = Rig::new();
    let pages = [PageId(5), PageId(6)];
    rig.fill(pages[0], 1);
    rig.fill(pages[1], 2);
    let positions = rig.commit(&[(10, pages[0]), (11, pages[1])]);
    let taking = rig.area.take_for_hand_over(rig.log).expect("nothing is in the way");
    assert!(rig.area.take_for_recovery(rig.log).is_none(), "one at a time");
    let held = taking.log();
    // In the midst of it: a fault for a page, which needs the lock; and a fault that comes between the two halves of a look.
    rig.fill(pages[0], 3);
    assert!(rig.holds(positions[0], 1) && rig.holds(positions[1], 2));
    let mut block = vec![0; BLOCK];
    assert!(held.read_held(positions[0], &mut block));
    assert_eq!(block, [1; BLOCK]);
    // Homes do not change, and nothing is let go: what is newest was counted when it began.
    assert!(matches!(
        rig.area.home_write_begins(rig.log, 10..11, &[rig.memory.page(pages[1])], &Over::Unknown),
        HomeWrite::Wait
    ));
    rig.area.discarded(rig.log, 10..12);
    assert!(rig.area.host_writes(rig.log, 8, false).is_empty());
    assert_eq!(rig.area.owed(rig.log).blocks, 2);
    // It does not come about: the log is held as it was.
    drop(taking);
    rig.area.check().expect("the books are right");
    assert!(rig.area.is_open(rig.log) && rig.holds(positions[0], 1));
    let payload = [rig.memory.page(pages[1])];
    let HomeWrite::Go { operation, .. } = rig.area.home_write_begins(rig.log, 11..12, &payload, &Over::Unknown) else {
        panic!("nothing is in the way any more")
    };
    assert!(rig.area.take_for_hand_over(rig.log).is_none(), "a home write is on its way");
    rig.area.home_write_ended(rig.log, operation, true);
    // The second time it does, and the log changes hands at one moment.
    let taking = rig.area.take_for_hand_over(rig.log).expect("nothing is in the way");
    assert_eq!(taking.cursor().sequence, rig.builder.sequence);
    let mut has_switched = false;
    taking.end(|| has_switched = true);
    assert!(has_switched && !rig.area.is_open(rig.log));
    assert_eq!(rig.area.owed(rig.log).blocks, 0);
    assert!(!rig.memory.is_retained(pages[0]) && !rig.memory.is_retained(pages[1]));
    rig.area.check().expect("the books are right");
}

/// Who makes transactions durable has to know of each before its commit is acknowledged, and of what is in it.
#[test]
fn accepted_transactions_are_told_to_who_asks() {
    let mut rig = Rig::new();
    let pages = [PageId(5), PageId(6)];
    rig.commit(&[(10, pages[0])]);
    assert_eq!(rig.told, [], "nobody asked");
    rig.area.tell_accepted(rig.log, true);
    let (sequence, first_position) = (rig.builder.sequence, rig.builder.position);
    let positions = rig.commit(&[(11, pages[0]), (12, pages[1])]);
    let tags = vec![(positions[0], 11), (positions[1], 12)];
    let commit_position = rig.builder.position - 1;
    assert_eq!(rig.told, [Accepted { sequence, first_position, commit_position, tags, revokes: Vec::new() }]);
    let revoking = Transaction { revokes: vec![12], ..Transaction::default() };
    let mut writes = Vec::new();
    rig.builder.transaction(&revoking, &mut |position, block| {
        writes.push(LogWrite { position, content: Content::Bytes(block.to_vec()) });
    });
    let told = rig.area.hold(rig.log, &writes).accepted;
    assert_eq!((told.len(), &told[0].revokes, &told[0].tags), (1, &vec![12], &Vec::new()));
    rig.area.tell_accepted(rig.log, false);
    rig.commit(&[(13, pages[0])]);
    assert_eq!(rig.told, []);
}

/// Somebody writes over a transaction of the live log: it and what comes after it count no more, and the host writes nothing home,
/// because whoever does that is about to put something else in the file system's place.
#[test]
fn a_live_log_that_is_written_over_ends_there() {
    let mut rig = Rig::new();
    for (index, block) in [10, 11, 12].into_iter().enumerate() {
        let page = PageId(index as u32);
        rig.fill(page, block as u8);
        rig.commit(&[(block, page)]);
    }
    assert_eq!(rig.area.owed(rig.log).blocks, 3);
    let tail = rig.area.tail(rig.log).expect("a tail").position;
    // A transaction of one block takes three log blocks: this is the second one's descriptor.
    let content = Content::Bytes(vec![0x77; BLOCK]);
    rig.area.hold(rig.log, &[LogWrite { position: tail + 3, content }]);
    rig.area.check().expect("the books are right");
    assert_eq!(rig.area.owed(rig.log).blocks, 1, "the first transaction counts");
    assert!(rig.area.host_writes(rig.log, 8, false).is_empty(), "the host writes into what somebody else writes");
}

/// A home write that is answered before it is done: the version stays owed, is shown, comes before all else that is written there, and
/// neither the log nor the tail goes elsewhere meanwhile.
#[test]
fn an_absorbed_home_write_is_done_before_anything_else() {
    let mut rig = Rig::new();
    let (page, other) = (PageId(5), PageId(6));
    rig.fill(page, 1);
    rig.fill(other, 2);
    let positions = rig.commit(&[(10, page), (11, other)]);
    let (first, tail) = (rig.builder.sequence.wrapping_sub(1), rig.builder.sequence);
    let payload = [rig.memory.page(page)];
    let absorbs = |rig: &Rig, blocks, payload: &[_], tail, most| rig.area.absorb(rig.log, &blocks, payload, tail, most);
    assert!(!absorbs(&rig, 11..12, &payload, None, 8), "other content");
    assert!(!absorbs(&rig, 12..13, &payload, None, 8), "not of the log");
    assert!(!absorbs(&rig, 10..11, &[None], None, 8), "not given");
    assert!(!absorbs(&rig, 10..11, &payload, Some(tail), 8), "the guest is about to give it up");
    assert!(!absorbs(&rig, 10..12, &[payload[0], rig.memory.page(other)], None, 1), "too many");
    let HomeWrite::Go { operation, .. } = rig.area.home_write_begins(rig.log, 10..11, &payload, &Over::Unknown) else {
        panic!("nothing is in the way")
    };
    assert!(!absorbs(&rig, 10..11, &payload, None, 8), "another is under way");
    rig.area.home_write_ended(rig.log, operation, false);
    simulated_room::set_full(true);
    assert!(!absorbs(&rig, 10..11, &payload, None, 8), "no room for a copy");
    simulated_room::set_full(false);
    assert_eq!(rig.area.absorbed(rig.log), 0);

    assert!(absorbs(&rig, 10..11, &payload, Some(first), 8));
    assert!(!rig.memory.is_retained(page), "the guest uses its page again");
    rig.fill(page, 9);
    let mut block = vec![0; BLOCK];
    assert!(rig.area.read_absorbed(rig.log, 10, &mut block) && block == [1; BLOCK]);
    assert!(!rig.area.read_absorbed(rig.log, 11, &mut block));
    assert!(rig.area.has_absorbed_before(rig.log, tail) && !rig.area.has_absorbed_before(rig.log, first));
    assert!(rig.holds(positions[0], 1));
    assert_eq!(rig.area.owed(rig.log).blocks, 2);
    assert!(matches!(rig.area.home_write_begins(rig.log, 8..14, &[None; 6], &Over::Unknown), HomeWrite::Wait));
    assert!(rig.area.take_for_hand_over(rig.log).is_none());
    rig.area.check().expect("the books are right");
    // Whoever absorbs holds such superblocks back. One that came here all the same is refused, and the log is as it was.
    let said = |start: u32, sequence: u32| SuperblockBuilder { start, sequence, ..rig.superblock.clone() }.build();
    for (start, sequence) in [(rig.builder.position, tail), (0, tail), (rig.builder.position, tail + 1)] {
        let error =
            rig.area.superblock_written(rig.log, &said(start, sequence)).map(|effect| (start, sequence, effect));
        assert!(matches!(error, Ok((.., SuperblockEffect::Foreign)) | Err(Error::NotHome)), "{error:?}");
        assert_eq!(error.is_ok(), sequence == tail + 1, "no log of ours begins there");
        assert!(rig.area.tail(rig.log).is_some_and(|tail| tail.sequence == first) && rig.holds(positions[0], 1));
    }
    assert_eq!(rig.area.superblock_written(rig.log, &said(1, first)).expect("taken"), SuperblockEffect::GoesOn);
    rig.area.check().expect("the books are right");
    assert!(rig.area.absorbed_writes(rig.log, 8, &|block, _| block == 11).is_empty());
    let mut writes = rig.area.absorbed_writes(rig.log, 8, &|block, transaction| (block, transaction) == (10, first));
    assert_eq!(writes.iter().map(|(_, write)| write.block).collect::<Vec<_>>(), [10]);
    assert!(rig.area.absorbed_writes(rig.log, 8, &|_, _| true).is_empty(), "it is on its way");
    rig.area.home_write_ended(rig.log, writes.remove(0).0, false);
    assert_eq!(rig.area.absorbed(rig.log), 1, "it is not there yet");
    let writes = rig.area.absorbed_writes(rig.log, 8, &|_, _| true);
    rig.area.home_write_ended(rig.log, writes[0].0, true);
    assert_eq!((rig.area.absorbed(rig.log), rig.area.owed(rig.log).blocks), (0, 1));
    rig.area.check().expect("the books are right");

    // What makes a version unneeded ends it.
    let payload = [rig.memory.page(other)];
    assert!(absorbs(&rig, 11..12, &payload, None, 8));
    rig.fill(other, 3);
    rig.commit(&[(11, other)]);
    assert_eq!(rig.area.absorbed(rig.log), 0, "superseded");
    assert!(absorbs(&rig, 11..12, &payload, None, 8));
    rig.area.discarded(rig.log, 11..12);
    assert_eq!(rig.area.absorbed(rig.log), 0, "discarded");
    assert!(rig.area.take_for_hand_over(rig.log).is_some());
}

/// A table of another log that names a page which is retained by the first one: never written by anybody here, so somebody has put it there.
#[test]
fn a_page_that_another_log_has_is_not_adopted() {
    let mut rig = Rig::new();
    let page = PageId(3);
    rig.fill(page, 5);
    let positions = rig.commit(&[(10, page)]);
    assert!(rig.memory.is_retained(page));
    for file in ["table", "pool"] {
        let path = |name: &str| rig.directory.path().join(format!("{name}.{file}"));
        std::fs::copy(path("log"), path("other")).expect("copied");
    }
    let rig = rig.followed();
    let adopt = || rig.area.adopt_log(rig.directory.path(), "other", SHAPE, Holding::Retain, Vec::new());
    assert!(adopt().is_err());
    rig.area.check().expect("the books are right");
    rig.fill(page, 6);
    assert!(rig.holds(positions[0], 5), "it was copied out");
    adopt().expect("nobody else has it now");
}
