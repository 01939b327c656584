//! Faults, and whoever else asks for a page, while a log's thread is at work.

use super::*;
use crate::batch::{Content, LogWrite};
use crate::jcb::{Holding, LogShape};
use crate::logs::Cell;
use crate::pages::HotPages;
use guest_memory::{PAGE_BYTES, RegionDescriptor, VmMemory};
use jbd2::Checksum;
use jbd2::build::SuperblockBuilder;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const PAGES: u64 = 16;
const LOG_BLOCKS: u32 = 64;
/// As long as something is looked at that must not happen.
const MOMENT: Duration = Duration::from_millis(50);
/// As long as something may take that does happen.
const PATIENCE: Duration = Duration::from_secs(10);

/// Two logs that are open and empty.
struct Rig {
    memory: Arc<VmMemory>,
    area: Arc<JournalArea>,
    logs: [LogId; 2],
    _directory: tempfile::TempDir,
}

impl Rig {
    fn new() -> Self {
        let directory = tempfile::tempdir_in("/dev/shm").expect("tmpfs");
        let path = directory.path().join("ram");
        let file = std::fs::OpenOptions::new().read(true).write(true).create_new(true).open(path).expect("a file");
        let size = PAGES * PAGE_BYTES as u64;
        file.set_len(size).expect("a length");
        let memory = VmMemory::new();
        memory.simulate_protection();
        memory.map(vec![RegionDescriptor { gpa: 0, size, user_addr: 1 << 40, file, file_offset: 0 }]).expect("mapped");
        let area = JournalArea::new(&memory, u64::MAX);
        area.set_hot_pages(HotPages::Never);
        let shape = LogShape { block_bytes: PAGE_BYTES as u32, log_blocks: LOG_BLOCKS, home_blocks: 1000 };
        let superblock = SuperblockBuilder { maxlen: LOG_BLOCKS, start: 1, ..SuperblockBuilder::default() }
            .checksum(Checksum::None)
            .build();
        let logs = ["one", "other"].map(|name| {
            let log = area.make_log(directory.path(), name, shape, Holding::Retain, Vec::new()).expect("a log");
            area.superblock_written(log, &superblock).expect("opened");
            log
        });
        Rig { memory, area, logs, _directory: directory }
    }

    fn page(&self, position: u32, page: u32) -> LogWrite {
        LogWrite { position, content: Content::Page(self.memory.page(PageId(page)).expect("a page")) }
    }

    /// Holds `writes` in a log, and meanwhile, under that log's lock, `what` happens: the log's thread waits for what it reads, until that has
    /// happened, or for `patience`. Gives whether that was over when it had happened.
    fn while_held(
        &self,
        log: LogId,
        mut writes: Vec<LogWrite>,
        patience: Duration,
        what: impl FnOnce() + Send,
    ) -> bool {
        let changing = Content::Changing(Mutex::new(VecDeque::from([vec![7; PAGE_BYTES]])));
        writes.push(LogWrite { position: LOG_BLOCKS - 1, content: changing });
        let Some(Content::Changing(content)) = writes.last().map(|write| &write.content) else { unreachable!() };
        let is_over = AtomicBool::new(false);
        let cell = self.area.logs.cell(log).expect("it is there");
        std::thread::scope(|scope| {
            let reading = content.lock().expect("no panic");
            scope.spawn(|| self.area.hold(log, &writes));
            while !cell.is_locked() {
                std::thread::yield_now();
            }
            // It has asked by now whether pages can be protected.
            std::thread::sleep(MOMENT);
            let happening = scope.spawn(|| {
                what();
                is_over.load(Ordering::SeqCst)
            });
            let since = Instant::now();
            while !happening.is_finished() && since.elapsed() < patience {
                std::thread::sleep(Duration::from_millis(1));
            }
            is_over.store(true, Ordering::SeqCst);
            drop(reading);
            happening.join().expect("no panic")
        })
    }
}

#[test]
fn a_page_of_another_log_does_not_wait_for_the_one_that_is_busy() {
    let rig = Rig::new();
    rig.area.hold(rig.logs[0], &[rig.page(2, 3)]);
    rig.area.hold(rig.logs[1], &[rig.page(2, 4)]);
    assert!(rig.memory.is_retained(PageId(3)) && rig.memory.is_retained(PageId(4)));
    for page in [4, 9] {
        let has_waited = rig.while_held(rig.logs[0], Vec::new(), PATIENCE, || assert!(rig.area.copy_out(PageId(page))));
        assert!(!has_waited, "page {page} waited for a log that does not have it");
        assert!(!rig.memory.is_retained(PageId(page)));
    }
    assert!(rig.memory.is_retained(PageId(3)));
}

#[test]
fn a_page_of_a_log_that_is_busy_is_waited_for() {
    let rig = Rig::new();
    rig.area.hold(rig.logs[0], &[rig.page(2, 3)]);
    let has_waited = rig.while_held(rig.logs[0], vec![rig.page(3, 5)], MOMENT, || {
        assert!(rig.area.copy_out(PageId(3)), "there is memory to copy it to");
    });
    assert!(has_waited && !rig.memory.is_retained(PageId(3)));
    assert!(rig.memory.is_retained(PageId(5)));
    assert_eq!(rig.area.counters(rig.logs[0]).cow_faults, 1);
}

/// Between the copies and the call that lets the pages go another log may have one of them.
#[test]
fn a_page_that_another_log_has_by_then_does_not_go_with_its_neighbour() {
    let rig = Rig::new();
    rig.area.hold(rig.logs[1], &[rig.page(2, 4)]);
    assert!(rig.area.pages.let_go(PageId(5), &[PageId(4)], false));
    assert!(rig.area.pages.is_kept(PageId(4)) && rig.memory.simulated_is_protected(PageId(4)));
}

/// A device comes that writes past the page tables, while a log's thread is about to protect pages.
#[test]
fn nobody_protects_a_page_after_the_end_of_protection() {
    let rig = Rig::new();
    let has_waited = rig.while_held(rig.logs[1], vec![rig.page(3, 5)], MOMENT, || {
        assert!(rig.memory.end_protection("a device comes"));
    });
    assert!(has_waited);
    assert!(!rig.memory.is_retained(PageId(5)) && !rig.memory.simulated_is_protected(PageId(5)));
    assert_eq!(rig.area.counters(rig.logs[1]).pages_protected, 1, "it had been retained");
    rig.area.hold(rig.logs[0], &[rig.page(2, 3)]);
    assert!(!rig.memory.is_retained(PageId(3)));
}

/// Memory that becomes free after a copy has failed, and before anybody can see that somebody waits for it.
#[test]
fn memory_that_is_free_before_a_waiter_is_noted_is_found() {
    let rig = Rig::new();
    let [log, _] = rig.logs;
    rig.area.hold(log, &[rig.page(3, 1)]);
    assert!(rig.memory.is_retained(PageId(1)));
    // Until the pool has no slot left, which has some for superblocks.
    for position in (1..LOG_BLOCKS).filter(|position| *position != 3) {
        let memory = rig.area.memory();
        if memory.copied_bytes > 0 && rig.area.logs.sum(Cell::used_bytes) == memory.copied_bytes {
            break;
        }
        let content = Content::Bytes(vec![position as u8 | 1; PAGE_BYTES]);
        rig.area.hold(log, &[LogWrite { position, content }]);
    }
    guest_memory::simulated_room::fail_reservations(0..1);
    let is_free = rig.area.copy_out(PageId(1));
    assert_eq!(guest_memory::simulated_room::reservations(), 2, "it had to be tried twice");
    guest_memory::simulated_room::fail_reservations(0..0);
    assert!(is_free, "who waits would wait until somebody else has something to end");
    assert_eq!((rig.area.pages.starved(), rig.memory.is_retained(PageId(1))), (Vec::new(), false));
    rig.area.check().expect("the books are right");
}
