//! What logs cost each other that share an area: threads that each commit to a log of their own, all in one area of one VM, against each in
//! an area of its own, in the same run; and what a guest waits that writes to a retained page of one log while another one commits.
//!
//! Uses real userfaultfds on this process's own memory (the VMM's part) and second mappings of the same files (the daemon's part), as in a VM.
//! The kernel's part of protecting is the same process's in both cases. Prints wall time, and ratios of it: 1 is what locks that nobody shares
//! would cost.
//!
//! With a number as argument: so many threads, two otherwise.

use guest_memory::{PAGE_BYTES, PageId, RegionDescriptor, VmMemory};
use jbd2::build::{LogBuilder, SuperblockBuilder, Transaction};
use jbd2::{Checksum, Superblock};
use journal_area::{Content, Holding, HotPages, JournalArea, LogId, LogShape, LogWrite};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

const COMMIT_PAGES: u32 = 4096;
const LOG_BLOCKS: u32 = 16384;
/// Blocks that a disk's thread holds in one pass.
const PASS_BLOCKS: usize = 512;
const ROUNDS: usize = 15;
const COMMITS_A_ROUND: usize = 4;

fn userfault() -> OwnedFd {
    // SAFETY: a system call without pointers; the result is checked and owned by nobody else.
    unsafe {
        let descriptor = libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | libc::O_NONBLOCK);
        assert!(descriptor >= 0, "userfaultfd is not permitted: {}", std::io::Error::last_os_error());
        OwnedFd::from_raw_fd(descriptor as i32)
    }
}

/// A guest of so many pages, its memory written once.
struct Guest {
    memory: Arc<VmMemory>,
    area: Arc<JournalArea>,
    vmm: usize,
    directory: tempfile::TempDir,
}

impl Guest {
    fn new(pages: u32) -> Self {
        let directory = tempfile::tempdir_in("/dev/shm").expect("a directory in tmpfs");
        let path = directory.path().join("ram");
        let file = std::fs::OpenOptions::new().read(true).write(true).create_new(true).open(path).expect("a file");
        let bytes = u64::from(pages) * PAGE_BYTES as u64;
        file.set_len(bytes).expect("a length");
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a fresh shared mapping; it is never unmapped.
        let vmm =
            unsafe { libc::mmap(std::ptr::null_mut(), bytes as usize, rights, libc::MAP_SHARED, file.as_raw_fd(), 0) };
        assert_ne!(vmm, libc::MAP_FAILED);
        // SAFETY: inside the mapping just made.
        unsafe { std::ptr::write_bytes(vmm.cast::<u8>(), 0x5a, bytes as usize) };
        let vmm = vmm.expose_provenance();
        let memory = VmMemory::new();
        let region = RegionDescriptor { gpa: 0, size: bytes, user_addr: vmm as u64, file, file_offset: 0 };
        memory.map(vec![region]).expect("mapped");
        memory.take_userfaultfd(userfault()).expect("protection");
        let area = JournalArea::new(&memory, u64::MAX);
        Guest { memory, area, vmm, directory }
    }
}

/// A log, and the pages that are committed to it.
struct Log {
    memory: Arc<VmMemory>,
    area: Arc<JournalArea>,
    id: LogId,
    first_page: u32,
    superblock: SuperblockBuilder,
    builder: LogBuilder,
}

impl Log {
    fn new(guest: &Guest, first_page: u32, holding: Holding) -> Self {
        let shape = LogShape { block_bytes: 4096, log_blocks: LOG_BLOCKS, home_blocks: 1 << 20 };
        let (path, name) = (guest.directory.path(), format!("log-{first_page}-{holding:?}"));
        let id = guest.area.make_log(path, &name, shape, holding, Vec::new()).expect("a log");
        let superblock =
            SuperblockBuilder { maxlen: LOG_BLOCKS, start: 1, ..SuperblockBuilder::default() }.checksum(Checksum::V3);
        let (_, format) = Superblock::parse(&superblock.build()).expect("valid");
        guest.area.superblock_written(id, &superblock.build()).expect("opened");
        let (memory, area) = (Arc::clone(&guest.memory), Arc::clone(&guest.area));
        Log { memory, area, id, first_page, superblock, builder: LogBuilder::new(format, 1, 1) }
    }

    /// What the guest writes for its next commit.
    fn writes(&mut self) -> Vec<LogWrite> {
        let blocks = (0..u64::from(COMMIT_PAGES)).map(|block| (block, vec![0x5a; PAGE_BYTES])).collect();
        let (mut page, mut writes) = (self.first_page, Vec::new());
        self.builder.transaction(&Transaction { blocks, ..Transaction::default() }, &mut |position, block| {
            let content = if jbd2::peek(block).is_some() {
                Content::Bytes(block.to_vec())
            } else {
                page += 1;
                Content::Page(self.memory.page(PageId(page - 1)).expect("a page"))
            };
            writes.push(LogWrite { position, content });
        });
        writes
    }

    /// Holds it pass by pass, and lets go of all of it.
    fn commit(&self, writes: &[LogWrite]) {
        let before = self.area.counters(self.id).transactions;
        for pass in writes.chunks(PASS_BLOCKS) {
            assert!(self.area.hold(self.id, pass).no_memory.is_empty());
        }
        assert_eq!(self.area.counters(self.id).transactions, before + 1, "the transaction was accepted");
    }

    fn move_tail(&self) {
        let (start, sequence) = (self.builder.position, self.builder.sequence);
        let next = SuperblockBuilder { start, sequence, ..self.superblock.clone() };
        self.area.superblock_written(self.id, &next.build()).expect("the tail moves");
    }
}

/// All logs commit at the same time, each in a thread: how long until the last one is done.
fn commit_all(logs: &mut [Log]) -> Duration {
    let barrier = Barrier::new(logs.len() + 1);
    std::thread::scope(|scope| {
        for log in logs {
            let barrier = &barrier;
            scope.spawn(move || {
                for _ in 0..COMMITS_A_ROUND {
                    let writes = log.writes();
                    barrier.wait();
                    log.commit(&writes);
                    log.move_tail();
                    barrier.wait();
                }
            });
        }
        let mut took = Duration::ZERO;
        for _ in 0..COMMITS_A_ROUND {
            barrier.wait();
            let started = Instant::now();
            barrier.wait();
            took += started.elapsed();
        }
        took
    })
}

/// What a guest waits at each of these pages, which are retained, at moments at which others are at work.
fn faults(guest: &Guest, pages: std::ops::Range<u32>, are_at_work: &AtomicBool) -> Vec<Duration> {
    let wait = |page: u32| {
        while !are_at_work.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_micros(50));
        }
        let place = std::ptr::with_exposed_provenance_mut::<u8>(guest.vmm + page as usize * PAGE_BYTES);
        let started = Instant::now();
        // SAFETY: inside the VMM's mapping; everybody else only copies from there.
        unsafe { place.write_volatile(0x5a) };
        started.elapsed()
    };
    pages.map(wait).collect()
}

fn percentile(times: &mut [Duration], percent: usize) -> f64 {
    times.sort_unstable();
    times[(times.len() * percent / 100).min(times.len() - 1)].as_secs_f64() * 1e6
}

fn main() {
    let threads: u32 = std::env::args().nth(1).map_or(2, |count| count.parse().expect("a number of threads"));
    println!("{threads} threads that commit 16 MiB each at a time, median of {ROUNDS}");
    for holding in [Holding::Retain, Holding::Copy] {
        let shared = Guest::new(threads * COMMIT_PAGES);
        let mut together: Vec<Log> =
            (0..threads).map(|thread| Log::new(&shared, thread * COMMIT_PAGES, holding)).collect();
        let guests: Vec<Guest> = (0..threads).map(|_| Guest::new(COMMIT_PAGES)).collect();
        let mut apart: Vec<Log> = guests.iter().map(|guest| Log::new(guest, 0, holding)).collect();
        let (mut shared_times, mut own_times, mut lone_times) = (Vec::new(), Vec::new(), Vec::new());
        // One after the other, so that what else the machine does falls on all.
        for _ in 0..ROUNDS {
            shared_times.push(commit_all(&mut together));
            own_times.push(commit_all(&mut apart));
            lone_times.push(commit_all(&mut apart[..1]));
        }
        let blocks = f64::from(COMMIT_PAGES) * COMMITS_A_ROUND as f64;
        let [shared, own, lone] =
            [&mut shared_times, &mut own_times, &mut lone_times].map(|times| percentile(times, 50) / blocks);
        println!(
            "  {holding:?}: one area {shared:6.3} µs a block of each, own areas {own:6.3} µs, one thread alone {lone:6.3} µs; sharing costs ×{:.2}",
            shared / own
        );
    }
    // The pages of one log are written to, first while nothing else happens, then while the others commit.
    let guest = Guest::new(threads * COMMIT_PAGES);
    guest.area.set_hot_pages(HotPages::Never);
    let mut logs: Vec<Log> =
        (0..threads).map(|thread| Log::new(&guest, thread * COMMIT_PAGES, Holding::Retain)).collect();
    let (mut quiet, mut busy) = (Vec::new(), Vec::new());
    for is_busy in [false, true, false, true] {
        let (first, others) = logs.split_first_mut().expect("a log");
        let writes = first.writes();
        first.commit(&writes);
        let (has_ended, are_at_work) = (AtomicBool::new(!is_busy), AtomicBool::new(!is_busy));
        std::thread::scope(|scope| {
            for log in others {
                let (has_ended, are_at_work) = (&has_ended, &are_at_work);
                scope.spawn(move || {
                    while !has_ended.load(Ordering::Relaxed) {
                        let writes = log.writes();
                        are_at_work.store(true, Ordering::Relaxed);
                        log.commit(&writes);
                        log.move_tail();
                        are_at_work.store(false, Ordering::Relaxed);
                    }
                });
            }
            std::thread::sleep(Duration::from_millis(20));
            let times = if is_busy { &mut busy } else { &mut quiet };
            times.extend(faults(&guest, 0..COMMIT_PAGES / 4, &are_at_work));
            has_ended.store(true, Ordering::Relaxed);
        });
        first.move_tail();
    }
    for (times, what) in [(&mut quiet, "while nothing else happens"), (&mut busy, "while the other logs commit")] {
        println!(
            "  a fault {what}: median {:6.1} µs, 90% {:6.1} µs, 99% {:6.1} µs",
            percentile(times, 50),
            percentile(times, 90),
            percentile(times, 99)
        );
    }
}
