//! The in-flight region: shared memory, kept by the VMM, that says which descriptors a device had taken when it died.
//!
//! Layout and order of the split ring from the vhost-user specification, section "Inflight I/O tracking". The VMM could
//! write nonsense into it; every value read from it is checked.

use crate::config_space::{QUEUE_SIZE_MAX, QUEUES_MAX};
use rustix::fs::{MemfdFlags, SealFlags};
use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU64, Ordering};
use vm_memory::{FileOffset, MmapRegion, VolatileMemory};

const QUEUE_HEADER_BYTES: usize = 16;
const STATE_BYTES: usize = 16;
const QUEUE_ALIGNMENT_BYTES: usize = 64;
const VERSION: u16 = 1;

// Offsets inside a queue's part.
const AT_VERSION: usize = 8;
const AT_DESCRIPTOR_COUNT: usize = 10;
const AT_LAST_BATCH_HEAD: usize = 12;
const AT_USED_INDEX: usize = 14;
// Offsets inside a descriptor's state.
const STATE_INFLIGHT: usize = 0;
const STATE_NEXT: usize = 6;
const STATE_COUNTER: usize = 8;

fn queue_bytes(queue_size: u16) -> usize {
    (QUEUE_HEADER_BYTES + STATE_BYTES * usize::from(queue_size)).next_multiple_of(QUEUE_ALIGNMENT_BYTES)
}

/// What the states of the descriptors take that a queue may have beyond `queue_size`.
fn further_bytes(queue_size: u16) -> usize {
    STATE_BYTES * usize::from(QUEUE_SIZE_MAX - queue_size)
}

/// A region with place for rings of any size.
fn roomy_bytes(queues: u16, queue_size: u16) -> usize {
    (queue_bytes(queue_size) + further_bytes(queue_size)) * usize::from(queues)
}

/// A region for all queues of a device.
#[derive(Debug)]
pub(crate) struct InflightRegion {
    memory: MmapRegion<()>,
    queues: u16,
    /// Descriptors of each queue that the VMM asked for: the layout of the first part.
    queue_size: u16,
    /// There is a second part, with the further descriptors of each queue.
    is_roomy: bool,
}

/// What the VMM says of a region (vhost-user's inflight description).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) mmap_size: u64,
    pub(crate) mmap_offset: u64,
    pub(crate) queues: u16,
    pub(crate) queue_size: u16,
}

impl InflightRegion {
    /// Makes a fresh one, all zeros. Returns the memory file for the VMM, sealed against being cut.
    ///
    /// Each queue has place for the largest ring there is, whatever the VMM asks for: QEMU asks for its `queue-size=` of 128, and QEMU 10.0
    /// then lets a guest have rings of 1,024. A ring without a place could not be gone on with by another process. What is beyond that
    /// which was asked for follows behind it, so that the part that the specification describes is as it says, whoever reads it.
    ///
    /// # Errors
    /// More or larger queues than there can be; no memory.
    pub(crate) fn create(queues: u16, queue_size: u16) -> io::Result<(File, u64)> {
        check_counts(queues, queue_size)?;
        let size = roomy_bytes(queues, queue_size) as u64;
        let file =
            File::from(rustix::fs::memfd_create("amberlog-inflight", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?);
        file.set_len(size)?;
        rustix::fs::fcntl_add_seals(&file, SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL)?;
        Ok((file, size))
    }

    /// Maps what the VMM gave back.
    ///
    /// # Errors
    /// A file that is too small, or that could be cut under us, or counts beyond the bounds.
    pub(crate) fn open(file: File, shape: Shape) -> io::Result<Arc<Self>> {
        let refuse = |reason: &str| Err(io::Error::new(io::ErrorKind::InvalidInput, reason.to_owned()));
        check_counts(shape.queues, shape.queue_size)?;
        // An earlier amberlog made it as small as the VMM had asked for, and its VMM has that one still.
        let (asked, roomy) =
            (queue_bytes(shape.queue_size) * usize::from(shape.queues), roomy_bytes(shape.queues, shape.queue_size));
        let is_roomy = shape.mmap_size >= roomy as u64;
        let needed = if is_roomy { roomy } else { asked };
        let end = shape.mmap_offset.checked_add(needed as u64);
        if shape.mmap_size < needed as u64 || end.is_none_or(|end| end > file.metadata().map_or(0, |m| m.size())) {
            return refuse("the in-flight region is smaller than its queues");
        }
        if !rustix::fs::fcntl_get_seals(&file).is_ok_and(|seals| seals.contains(SealFlags::SHRINK)) {
            return refuse("the in-flight region is not a memory file sealed against shrinking");
        }
        let memory = MmapRegion::from_file(FileOffset::new(file, shape.mmap_offset), needed)
            .map_err(|e| io::Error::other(format!("mapping the in-flight region failed: {e}")))?;
        Ok(Arc::new(InflightRegion { memory, queues: shape.queues, queue_size: shape.queue_size, is_roomy }))
    }

    /// The part of one queue, if the region has it.
    pub(crate) fn queue(self: &Arc<Self>, index: u16, size: u16) -> Option<InflightQueue> {
        let has_place = index < self.queues && (size <= self.queue_size || self.is_roomy && size <= QUEUE_SIZE_MAX);
        has_place.then(|| InflightQueue {
            region: Arc::clone(self),
            base: queue_bytes(self.queue_size) * usize::from(index),
            further: queue_bytes(self.queue_size) * usize::from(self.queues)
                + further_bytes(self.queue_size) * usize::from(index),
            size,
            counter: 0,
        })
    }
}

fn check_counts(queues: u16, queue_size: u16) -> io::Result<()> {
    if queues == 0 || queues > QUEUES_MAX || queue_size == 0 || queue_size > QUEUE_SIZE_MAX {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("an in-flight region for {queues} queues of {queue_size} is refused"),
        ));
    }
    Ok(())
}

/// One queue's part of the region.
#[derive(Debug)]
pub(crate) struct InflightQueue {
    region: Arc<InflightRegion>,
    base: usize,
    /// Where its descriptors are that the VMM did not ask for.
    further: usize,
    size: u16,
    /// Order of submission, for the next descriptor.
    counter: u64,
}

impl InflightQueue {
    fn header(&self, at: usize) -> &AtomicU16 {
        self.region.memory.get_atomic_ref(self.base + at).expect("the region holds all its queues")
    }

    fn state_at(&self, head: u16) -> usize {
        debug_assert!(head < self.size);
        match head.checked_sub(self.region.queue_size) {
            None => self.base + QUEUE_HEADER_BYTES + STATE_BYTES * usize::from(head),
            Some(further) => self.further + STATE_BYTES * usize::from(further),
        }
    }

    fn inflight(&self, head: u16) -> &AtomicU8 {
        let at = self.state_at(head) + STATE_INFLIGHT;
        self.region.memory.get_atomic_ref(at).expect("the region holds all its queues")
    }

    fn next(&self, head: u16) -> &AtomicU16 {
        let at = self.state_at(head) + STATE_NEXT;
        self.region.memory.get_atomic_ref(at).expect("the region holds all its queues")
    }

    fn counter_of(&self, head: u16) -> &AtomicU64 {
        let at = self.state_at(head) + STATE_COUNTER;
        self.region.memory.get_atomic_ref(at).expect("the region holds all its queues")
    }

    /// The descriptor was taken from the available ring.
    pub(crate) fn taken(&mut self, head: u16) {
        self.counter = self.counter.wrapping_add(1);
        self.counter_of(head).store(self.counter, Ordering::Release);
        self.inflight(head).store(1, Ordering::Release);
    }

    /// The descriptor is about to be put into the used ring (whose index is published right after).
    pub(crate) fn completing(&mut self, head: u16) {
        let last = self.header(AT_LAST_BATCH_HEAD).load(Ordering::Relaxed);
        self.next(head).store(last, Ordering::Release);
        self.header(AT_LAST_BATCH_HEAD).store(head, Ordering::Release);
    }

    /// The used ring's index, now `used_index`, has been published with the descriptor in it.
    pub(crate) fn completed(&mut self, head: u16, used_index: u16) {
        self.inflight(head).store(0, Ordering::Release);
        self.header(AT_USED_INDEX).store(used_index, Ordering::Release);
    }

    /// Whether a ring was recovered from it or used it before: it is not as it was made.
    pub(crate) fn is_in_use(&self) -> bool {
        self.header(AT_VERSION).load(Ordering::Relaxed) == VERSION
    }

    /// Brings the region in step with the used ring, and returns the descriptors that were in flight, oldest first.
    pub(crate) fn recover(&mut self, used_index: u16) -> Vec<u16> {
        if !self.is_in_use() {
            // Fresh, all zeros.
            self.header(AT_VERSION).store(VERSION, Ordering::Relaxed);
            self.header(AT_DESCRIPTOR_COUNT).store(self.size, Ordering::Relaxed);
            self.header(AT_USED_INDEX).store(used_index, Ordering::Relaxed);
        }
        // Death came between publishing the used index and clearing the marks: clear those of that last batch.
        let behind = used_index.wrapping_sub(self.header(AT_USED_INDEX).load(Ordering::Relaxed));
        if behind <= self.size {
            let mut head = self.header(AT_LAST_BATCH_HEAD).load(Ordering::Relaxed);
            for _ in 0..behind {
                if head >= self.size {
                    break;
                }
                self.inflight(head).store(0, Ordering::Relaxed);
                head = self.next(head).load(Ordering::Relaxed);
            }
        }
        self.header(AT_USED_INDEX).store(used_index, Ordering::Release);
        let mut heads: Vec<(u64, u16)> = (0..self.size)
            .filter(|head| self.inflight(*head).load(Ordering::Relaxed) == 1)
            .map(|head| (self.counter_of(head).load(Ordering::Relaxed), head))
            .collect();
        heads.sort_unstable();
        self.counter = heads.last().map_or(0, |(counter, _)| *counter);
        heads.into_iter().map(|(_, head)| head).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn region(queues: u16, queue_size: u16) -> (File, Shape) {
        let (file, size) = InflightRegion::create(queues, queue_size).expect("made");
        (file, Shape { mmap_size: size, mmap_offset: 0, queues, queue_size })
    }

    fn queue_of(file: &File, shape: Shape, index: u16) -> InflightQueue {
        let file = file.try_clone().expect("duplicated");
        let region = InflightRegion::open(file, shape).expect("opens");
        region.queue(index, shape.queue_size).expect("has it")
    }

    #[test]
    fn what_was_taken_is_found_again_in_order() {
        let (file, shape) = region(2, 8);
        let mut queue = queue_of(&file, shape, 1);
        assert!(queue.recover(0).is_empty());
        for head in [5, 2, 7] {
            queue.taken(head);
        }
        queue.completing(2);
        queue.completed(2, 1);
        drop(queue);
        assert!(queue_of(&file, shape, 0).recover(0).is_empty(), "the other queue is untouched");
        let mut again = queue_of(&file, shape, 1);
        assert_eq!(again.recover(1), [5, 7]);
        again.taken(3);
        assert_eq!(queue_of(&file, shape, 1).recover(1), [5, 7, 3], "the order goes on after a recovery");
    }

    #[test]
    fn a_death_between_publishing_and_clearing_is_seen() {
        let (file, shape) = region(1, 8);
        let mut queue = queue_of(&file, shape, 0);
        queue.recover(40);
        for head in [1, 2, 3] {
            queue.taken(head);
        }
        queue.completing(1);
        queue.completed(1, 41);
        queue.completing(3);
        // The used ring's index is now 42; death comes here.
        assert_eq!(queue_of(&file, shape, 0).recover(42), [2]);
    }

    #[test]
    fn nonsense_in_the_region_does_no_harm() {
        let (file, shape) = region(1, 8);
        let mut queue = queue_of(&file, shape, 0);
        queue.recover(0);
        queue.header(AT_LAST_BATCH_HEAD).store(60000, Ordering::Relaxed);
        queue.header(AT_USED_INDEX).store(1, Ordering::Relaxed);
        queue.inflight(4).store(77, Ordering::Relaxed);
        assert!(queue.recover(9).is_empty());
    }

    /// QEMU 10.0 asks for 128 descriptors and has rings of 1,024.
    #[test]
    fn a_ring_that_is_larger_than_the_vmm_said_has_its_place() {
        for asked in [1, 8, 127, 128, 1023, QUEUE_SIZE_MAX] {
            let (file, shape) = region(2, asked);
            let open = || InflightRegion::open(file.try_clone().expect("duplicated"), shape).expect("opens");
            let heads = |index| {
                let mut heads = [0, asked - 1, asked.min(QUEUE_SIZE_MAX - 1), 700 + index, QUEUE_SIZE_MAX - 1].to_vec();
                heads.sort_unstable();
                heads.dedup();
                heads
            };
            for index in [0, 1] {
                let mut queue = open().queue(index, QUEUE_SIZE_MAX).expect("has it");
                assert!(queue.recover(index).is_empty(), "the other queue is in the way");
                heads(index).into_iter().for_each(|head| queue.taken(head));
            }
            for index in [0, 1] {
                let mut queue = open().queue(index, QUEUE_SIZE_MAX).expect("has it");
                assert!(queue.is_in_use());
                assert_eq!(queue.recover(index), heads(index));
            }
            assert!(open().queue(2, 1).is_none());
        }
    }

    /// Whoever knows the specification alone, as an earlier amberlog does, finds the first part of it.
    #[test]
    fn what_was_asked_for_is_where_the_specification_has_it() {
        let (file, shape) = region(2, 8);
        let mut queue =
            InflightRegion::open(file.try_clone().expect("duplicated"), shape).expect("opens").queue(1, 1024);
        let queue = queue.as_mut().expect("has it");
        queue.recover(0);
        queue.taken(3);
        queue.taken(900);
        let asked = Shape { mmap_size: 2 * queue_bytes(8) as u64, ..shape };
        assert_eq!(queue_of(&file, asked, 1).recover(0), [3]);
    }

    /// What an earlier amberlog made is laid out as the VMM said, and has no place for more.
    #[test]
    fn a_region_of_an_earlier_amberlog_is_understood() {
        let (file, shape) = region(2, 128);
        for missing in [roomy_bytes(2, 128) - 2 * queue_bytes(128), 1] {
            let shape = Shape { mmap_size: (roomy_bytes(2, 128) - missing) as u64, ..shape };
            let region = InflightRegion::open(file.try_clone().expect("duplicated"), shape).expect("opens");
            assert!(region.queue(0, 256).is_none());
            assert_eq!(region.queue(1, 128).expect("has it").base, queue_bytes(128));
        }
    }

    #[test]
    fn regions_beyond_the_bounds_are_refused() {
        InflightRegion::create(0, 8).expect_err("no queue");
        InflightRegion::create(QUEUES_MAX + 1, 8).expect_err("too many queues");
        InflightRegion::create(1, QUEUE_SIZE_MAX + 1).expect_err("too large a queue");
        let (file, shape) = region(1, 8);
        let open = |shape| InflightRegion::open(file.try_clone().expect("duplicated"), shape);
        open(Shape { mmap_offset: 4096, ..shape }).expect_err("beyond the file");
        open(Shape { mmap_offset: u64::MAX - 8, ..shape }).expect_err("wraps");
        open(Shape { mmap_size: 63, ..shape }).expect_err("larger than told");
        let unsealed = tempfile::tempfile().expect("a file");
        unsealed.set_len(1 << 20).expect("its length");
        InflightRegion::open(unsealed, shape).expect_err("could be cut under us");
    }
}
