//! A ring as a guest could write it: its three parts, its descriptors, and the requests in its chains.
//!
//! Input: a head of [`HEAD_BYTES`] bytes, then the guest's memory from its first byte on; what is not given is zero. The
//! head: switches (1 byte), exponent of the ring's size (1), where the available ring is taken up (2, little-endian), the
//! disk's size in sectors (2), and where the descriptor table, the available ring and the used ring are (2 each, in units
//! of 16 bytes). Guest memory is two files that meet in the middle, and one page far above them.
//!
//! What is checked: no panic, no byte outside guest memory, no head twice at the same time, every request inside the
//! disk, and an end: a ring holds only so many requests, and a chain so many descriptors. Requests are answered as a device
//! would, so what a guest lets it write may be the ring itself.

use block_device::fuzzing::{Ask, Asked, DESCRIPTORS_MAX, Probe, Setup};
use guest_memory::{MemorySlice, MemoryTable, RegionDescriptor, VmMemory};
use std::fs::File;
use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::Arc;

const HEAD_BYTES: usize = 12;
const SECTOR: u64 = 512;

/// Bytes of each of the two files that meet.
const FILE_BYTES: u64 = 32 << 10;
/// Where the lone page is.
const FAR: u64 = 1 << 40;
const FAR_BYTES: u64 = 4096;
/// What the VMM adds to a guest address.
const VMM: u64 = 0x7000_0000_0000;
/// Requests taken of one input. More than a ring can hold at once, because the device's own writes may fill it again.
const TAKEN_MAX: usize = 600;

/// Chains without indirect tables are all that is understood.
const DIRECT_ONLY: u8 = 1;
/// Interrupts are asked for by index.
const EVENT_INDEX: u8 = 2;
/// The disk cannot be written.
const READ_ONLY: u8 = 4;
/// Every other request is answered late.
const LATE: u8 = 8;

fn file(bytes: u64) -> File {
    // SAFETY: the name is a C string; the descriptor is new and nobody else's.
    let descriptor = unsafe { OwnedFd::from_raw_fd(libc::memfd_create(c"fuzz".as_ptr(), libc::MFD_CLOEXEC)) };
    let file = File::from(descriptor);
    file.set_len(bytes).expect("a memory file has a length");
    file
}

fn guest_memory() -> Arc<MemoryTable> {
    let vm = VmMemory::new();
    let region = |gpa, size| RegionDescriptor { gpa, size, user_addr: VMM + gpa, file: file(size), file_offset: 0 };
    let regions = vec![region(0, FILE_BYTES), region(FILE_BYTES, FILE_BYTES), region(FAR, FAR_BYTES)];
    Arc::new(vm.map(regions).expect("memory is mapped"))
}

thread_local! {
    static MEMORY: Arc<MemoryTable> = guest_memory();
}

struct Bounds {
    table: Arc<MemoryTable>,
    regions: Vec<MemorySlice>,
}

impl Bounds {
    fn new(table: &Arc<MemoryTable>) -> Self {
        let mut regions = Vec::new();
        table.slices(0, 2 * FILE_BYTES as usize, &mut regions).expect("the two files");
        table.slices(FAR, FAR_BYTES as usize, &mut regions).expect("the lone page");
        Bounds { table: Arc::clone(table), regions }
    }

    fn fill(&self, content: &[u8]) {
        let mut rest = content;
        for region in &self.regions {
            let (now, later) = rest.split_at(rest.len().min(region.len()));
            region.copy_in(0, now);
            region.sub(now.len(), region.len() - now.len()).fill_zero();
            rest = later;
        }
    }

    fn check(&self, slice: &MemorySlice) {
        let start = slice.as_ptr() as usize;
        let is_inside = self.regions.iter().any(|region| {
            let from = region.as_ptr() as usize;
            start >= from && start + slice.len() <= from + region.len()
        });
        assert!(is_inside && !slice.is_empty(), "{slice:?} is not guest memory");
    }
}

/// Runs one input. Returns how many requests were understood.
pub fn run(data: &[u8]) -> usize {
    let Some((head, content)) = data.split_first_chunk::<HEAD_BYTES>() else { return 0 };
    let table = MEMORY.with(Arc::clone);
    let bounds = Bounds::new(&table);
    bounds.fill(&content[..content.len().min((2 * FILE_BYTES + FAR_BYTES) as usize)]);
    let switches = head[0];
    let word = |at: usize| u16::from_le_bytes([head[at], head[at + 1]]);
    let address = |at: usize| VMM + u64::from(word(at)) * 16;
    let setup = Setup {
        size: 1u16.checked_shl(u32::from(head[1] % 13)).unwrap_or(0),
        addresses: [address(6), address(8), address(10)],
        base: word(2),
        event_index: switches & EVENT_INDEX != 0,
        indirect: switches & DIRECT_ONLY == 0,
        disk_bytes: u64::from(word(4)) * SECTOR,
        read_only: switches & READ_ONLY != 0,
    };
    let Some(mut probe) = Probe::new(&table, &setup) else { return 0 };
    let mut held: Vec<u16> = Vec::new();
    let mut understood = 0;
    let mut taken_count = 0;
    while taken_count < TAKEN_MAX {
        let Some(taken) = probe.take() else { break };
        taken_count += 1;
        assert!(taken.head < setup.size, "a head beyond the ring");
        assert!(!held.contains(&taken.head), "head {} is taken twice", taken.head);
        let mut written = 0;
        if let Some(asked) = &taken.asked {
            written = carry_out(&bounds, &setup, asked);
            understood += usize::from(!matches!(asked.ask, Ask::Finish(_)));
        }
        if switches & LATE != 0 && taken_count % 2 == 0 {
            held.push(taken.head);
        } else if !probe.answer(taken.head, written) {
            break;
        }
        if taken_count % 8 == 0 && probe.pause().is_none() {
            break;
        }
    }
    for head in held {
        probe.answer(head, 1);
    }
    let _ = probe.pause();
    understood
}

fn total(slices: &[MemorySlice]) -> u64 {
    slices.iter().map(|slice| slice.len() as u64).sum()
}

/// Checks a request and does what a device does to guest memory. Returns the bytes written.
fn carry_out(bounds: &Bounds, setup: &Setup, asked: &Asked) -> u32 {
    // A buffer is in as many pieces as regions that it touches.
    assert!(asked.readable.len() + asked.writable.len() < 3 * DESCRIPTORS_MAX, "more pieces than a chain can have");
    asked.readable.iter().chain(&asked.writable).chain([&asked.status]).for_each(|slice| bounds.check(slice));
    assert_eq!(asked.status.len(), 1);
    let check_range = |offset: u64, len: u64| {
        assert!(len > 0 && offset.is_multiple_of(SECTOR) && len.is_multiple_of(SECTOR), "{offset} {len}");
        assert!(offset + len <= setup.disk_bytes, "a request beyond the end of the disk");
    };
    let mut written = 1;
    match asked.ask {
        Ask::Read { offset, len } => {
            check_range(offset, len);
            assert_eq!(total(&asked.writable), len);
            for slice in &asked.writable {
                bounds.table.prepare_write(slice).expect("nothing is retained");
                let bytes: Vec<u8> = (0..slice.len()).map(|at| (at as u64 + offset) as u8).collect();
                slice.copy_in(0, &bytes);
            }
            written += len as u32;
        }
        Ask::Write { offset, len } => {
            check_range(offset, len);
            assert!(!setup.read_only, "a disk that cannot be written is written");
            assert_eq!(total(&asked.readable), len);
        }
        Ask::Ranges => {
            assert!(!setup.read_only, "a disk that cannot be written is written");
            assert!(!asked.ranges.is_empty() && asked.ranges.len() <= 32);
            asked.ranges.iter().for_each(|(_, offset, len)| check_range(*offset, *len));
        }
        Ask::Identity => assert!(!asked.writable.is_empty()),
        Ask::Flush | Ask::Finish(_) => {}
    }
    asked.status.copy_in(0, &[0]);
    written
}
