//! What a commit costs: 32 MiB of file data, held by protecting its pages against held by copying them, in the same run.
//!
//! Uses a real userfaultfd on this process's own memory (the VMM's part) and a second mapping of the same file (the
//! daemon's part), as in a VM. Prints µs per page for the protection alone and per block for the whole commit, and the
//! ratios that `make bench` asks for: protect cost at most 0.5 µs a page, commit at most 1.0 × copying.
//!
//! With a number of MiB as argument: the protection alone, of that much in one call (the 2012 paper's Figure 13).

use guest_memory::{PAGE_BYTES, PageId, RegionDescriptor, VmMemory};
use jbd2::build::{LogBuilder, SuperblockBuilder, Transaction};
use jbd2::{Checksum, Features, Superblock};
use journal_area::{Content, Holding, JournalArea, LogShape, LogWrite};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

const COMMIT_PAGES: u32 = 8192;
const LOG_BLOCKS: u32 = 32768;
const ROUNDS: usize = 12;

fn userfault() -> OwnedFd {
    // SAFETY: a system call without pointers; the result is checked and owned by nobody else.
    unsafe {
        let descriptor = libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | libc::O_NONBLOCK);
        assert!(descriptor >= 0, "userfaultfd is not permitted: {}", std::io::Error::last_os_error());
        OwnedFd::from_raw_fd(descriptor as i32)
    }
}

fn cpu_time() -> Duration {
    // SAFETY: an all-zero timespec is valid, and it lives across the call.
    let time = unsafe {
        let mut time: libc::timespec = std::mem::zeroed();
        assert_eq!(libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut time), 0);
        time
    };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Commits `ROUNDS` times 32 MiB; returns the median CPU time a commit.
fn commits(holding: Holding, checksum: Checksum) -> Duration {
    let directory = tempfile::tempdir_in("/dev/shm").expect("a directory in tmpfs");
    let bytes = u64::from(COMMIT_PAGES) * PAGE_BYTES as u64;
    let file = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(true)
        .open(directory.path().join("ram"))
        .expect("a file");
    file.set_len(bytes).expect("a length");
    // SAFETY: a fresh shared mapping; it is never unmapped.
    let vmm = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            bytes as usize,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED,
            file.as_raw_fd(),
            0,
        )
    };
    assert_ne!(vmm, libc::MAP_FAILED);
    // SAFETY: inside the mapping just made.
    unsafe { std::ptr::write_bytes(vmm.cast::<u8>(), 0x5a, bytes as usize) };
    let memory = VmMemory::new();
    memory
        .map(vec![RegionDescriptor { gpa: 0, size: bytes, user_addr: vmm as u64, file, file_offset: 0 }])
        .expect("mapped");
    memory.take_userfaultfd(userfault()).expect("protection");
    let area = JournalArea::new(&memory, u64::MAX);
    let shape = LogShape { block_bytes: 4096, log_blocks: LOG_BLOCKS, home_blocks: 1 << 20 };
    let log = area.make_log(directory.path(), "log", shape, holding, Vec::new()).expect("a log");
    let superblock = SuperblockBuilder {
        maxlen: LOG_BLOCKS,
        features: Features { compat: 0, incompat: Features::REVOKE, ro_compat: 0 },
        start: 1,
        ..SuperblockBuilder::default()
    }
    .checksum(checksum);
    let (_, format) = Superblock::parse(&superblock.build()).expect("valid");
    let mut builder = LogBuilder::new(format, 1, 1);
    area.superblock_written(log, &superblock.build()).expect("opened");
    let mut times = Vec::new();
    for round in 0..ROUNDS {
        let transaction = Transaction {
            blocks: (0..u64::from(COMMIT_PAGES)).map(|block| (block, vec![0x5a; PAGE_BYTES])).collect(),
            ..Transaction::default()
        };
        let (position, sequence) = (builder.position, builder.sequence);
        let mut page = 0;
        let mut writes = Vec::new();
        builder.transaction(&transaction, &mut |position, block| {
            let content = if jbd2::peek(block).is_some() {
                Content::Bytes(block.to_vec())
            } else {
                page += 1;
                Content::Page(memory.page(PageId(page - 1)).expect("a page"))
            };
            writes.push(LogWrite { position, content });
        });
        // As virtio-blk brings them: requests of up to 126 segments, a few requests a pass.
        let started = cpu_time();
        for batch in writes.chunks(512) {
            let outcome = area.hold(log, batch);
            assert!(outcome.no_memory.is_empty());
        }
        times.push(cpu_time() - started);
        assert_eq!(area.counters(log).transactions as usize, round + 1, "the transaction was accepted");
        let _ = (position, sequence);
        let next = SuperblockBuilder { start: builder.position, sequence: builder.sequence, ..superblock.clone() };
        area.superblock_written(log, &next.build()).expect("the tail moves");
    }
    times.sort_unstable();
    times[ROUNDS / 2]
}

/// Protects `page_count` written pages, `batch_pages` a call; the median of [`ROUNDS`].
fn protection(page_count: u32, batch_pages: usize) -> Duration {
    let file = tempfile::tempfile_in("/dev/shm").expect("a file in tmpfs");
    let bytes = u64::from(page_count) * PAGE_BYTES as u64;
    file.set_len(bytes).expect("a length");
    // SAFETY: a fresh shared mapping; it is never unmapped.
    let vmm = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            bytes as usize,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED,
            file.as_raw_fd(),
            0,
        )
    };
    assert_ne!(vmm, libc::MAP_FAILED);
    // SAFETY: inside the mapping just made.
    unsafe { std::ptr::write_bytes(vmm.cast::<u8>(), 1, bytes as usize) };
    let memory = VmMemory::new();
    memory
        .map(vec![RegionDescriptor { gpa: 0, size: bytes, user_addr: vmm as u64, file, file_offset: 0 }])
        .expect("mapped");
    memory.take_userfaultfd(userfault()).expect("protection");
    let pages: Vec<PageId> = (0..page_count).map(PageId).collect();
    let mut protect = Vec::new();
    for _ in 0..ROUNDS {
        let started = Instant::now();
        for batch in pages.chunks(batch_pages) {
            memory.protect(batch).expect("protected");
        }
        protect.push(started.elapsed());
        memory.unprotect(&pages);
    }
    protect.sort_unstable();
    protect[ROUNDS / 2]
}

fn main() {
    if let Some(mib) = std::env::args().nth(1) {
        let mib: u32 = mib.parse().ok().filter(|mib| (1..=1024).contains(mib)).expect("MiB: a number from 1 to 1024");
        let pages = mib * 256;
        let time = protection(pages, pages as usize);
        println!("  protection alone         {:8.3} µs a page", time.as_secs_f64() * 1e6 / f64::from(pages));
        return;
    }
    let per_page = |time: Duration| time.as_secs_f64() * 1e6 / f64::from(COMMIT_PAGES);
    // The calls that one commit makes, batch by batch.
    let protect = protection(COMMIT_PAGES, 512);
    println!("commit of 32 MiB of file data, median of {ROUNDS} ({COMMIT_PAGES} pages)");
    println!("  protection alone         {:8.3} µs a page   (limit 0.5)", per_page(protect));
    for checksum in [Checksum::None, Checksum::V3] {
        let retained = commits(Holding::Retain, checksum);
        let copied = commits(Holding::Copy, checksum);
        println!(
            "  commit, checksum {checksum:?}:  retain {:6.3} µs CPU a block, copy {:6.3} µs, ratio {:.2}   (limit 1.0)",
            per_page(retained),
            per_page(copied),
            retained.as_secs_f64() / copied.as_secs_f64()
        );
    }
}
