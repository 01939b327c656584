//! The copy pool: committed blocks that had to be copied, in a tmpfs file that outlives the process.
//!
//! Two kinds of slots. A *block* slot holds a whole file system block. A *small* slot holds a control block without its
//! zeros: its first bytes and its last four (the tail checksum), which is all that a short descriptor, a revoke block of
//! a few records or a commit block has. Slots come in chunks.
//!
//! A guest that overwrites fills its log with copies, checkpoints, and fills it again. A page that tmpfs gives anew takes a processor ten times
//! as long as one that is used again. So chunks that become empty stay, for as many as were in use at a time not long ago, and go back to the
//! host bit by bit ([`Pool::rest`]); at once where memory is short ([`Pool::give_back_spares`]).

use guest_memory::{Error as MemoryError, HostFile, MemorySlice};
use std::path::Path;

/// Bytes of a small slot.
pub const SMALL_SLOT_BYTES: usize = 256;
/// What a small slot keeps of the beginning of a block, in bytes; the rest of the slot is the block's end.
const SMALL_HEAD_BYTES: usize = SMALL_SLOT_BYTES - SMALL_TAIL_BYTES;
const SMALL_TAIL_BYTES: usize = 4;
/// Empty chunks kept whatever was in use, so that a changing load does not give memory back only to ask for it again.
const SPARE_CHUNKS: usize = 2;
/// What is left to the tmpfs, for others, before chunks are kept that nothing is in.
const ROOM_LEFT_BYTES: u64 = 64 << 20;
/// With every [`Pool::rest`] the memory of what was in use goes down by a part of it: with one a second, what a burst leaves is gone in a
/// minute.
const FORGOTTEN_PART: usize = 16;
/// One bit a slot.
const SLOTS_PER_CHUNK: u32 = 64;

/// Slots of one size in one part of the file.
#[derive(Debug)]
struct Slab {
    base: u64,
    slot_bytes: u64,
    /// One word a chunk: a set bit is a slot in use.
    used: Vec<u64>,
    reserved: Vec<bool>,
    /// Chunks that may have a free slot, each once; a stack, so that the memory used last is used again first.
    candidates: Vec<u32>,
    /// Whether a chunk is among them: it may be though it is full, until it is looked at.
    is_candidate: Vec<bool>,
    empty_reserved: usize,
    slots_used: u64,
    chunks_max: usize,
    chunks_reserved: usize,
    /// As many chunks may be kept: those that were in use at a time, less what was forgotten of that.
    chunks_kept: usize,
}

impl Slab {
    fn new(base: u64, slot_bytes: u64, slots_max: u32) -> Self {
        Slab {
            base,
            slot_bytes,
            used: Vec::new(),
            reserved: Vec::new(),
            candidates: Vec::new(),
            is_candidate: Vec::new(),
            empty_reserved: 0,
            slots_used: 0,
            chunks_max: slots_max.div_ceil(SLOTS_PER_CHUNK) as usize,
            chunks_reserved: 0,
            chunks_kept: 0,
        }
    }

    fn chunk_bytes(&self) -> u64 {
        self.slot_bytes * u64::from(SLOTS_PER_CHUNK)
    }

    fn offset(&self, slot: u32) -> u64 {
        self.base + u64::from(slot) * self.slot_bytes
    }

    fn take(&mut self, file: &HostFile) -> Option<u32> {
        if file.is_simulated_full() {
            return None;
        }
        loop {
            let chunk = match self.candidates.last() {
                Some(chunk) => *chunk as usize,
                None if self.used.len() < self.chunks_max => {
                    self.used.push(0);
                    self.reserved.push(false);
                    self.is_candidate.push(false);
                    self.set_candidate(self.used.len() - 1);
                    self.used.len() - 1
                }
                None => return None,
            };
            if self.used[chunk] == u64::MAX {
                self.candidates.pop();
                self.is_candidate[chunk] = false;
                continue;
            }
            if !self.reserved[chunk] {
                let base = self.base + chunk as u64 * self.chunk_bytes();
                if file.reserve(base, self.chunk_bytes()).is_err() {
                    // There may be free slots in others, which have memory.
                    let has_free =
                        |chunk: &u32| self.reserved[*chunk as usize] && self.used[*chunk as usize] != u64::MAX;
                    let other = self.candidates.iter().rposition(has_free)?;
                    let last = self.candidates.len() - 1;
                    self.candidates.swap(other, last);
                    continue;
                }
                self.reserved[chunk] = true;
                self.chunks_reserved += 1;
                self.empty_reserved += 1;
            }
            if self.used[chunk] == 0 {
                self.empty_reserved -= 1;
                self.chunks_kept = self.chunks_kept.max(self.chunks_used());
            }
            let bit = self.used[chunk].trailing_ones();
            self.used[chunk] |= 1 << bit;
            self.slots_used += 1;
            return Some(chunk as u32 * SLOTS_PER_CHUNK + bit);
        }
    }

    /// Takes a certain slot, when a table that was found names it. False if that is impossible or was done before.
    fn claim(&mut self, slot: u32) -> bool {
        let chunk = (slot / SLOTS_PER_CHUNK) as usize;
        if chunk >= self.chunks_max {
            return false;
        }
        while self.used.len() <= chunk {
            self.used.push(0);
            self.reserved.push(true);
            self.is_candidate.push(false);
            self.chunks_reserved += 1;
        }
        let bit = 1 << (slot % SLOTS_PER_CHUNK);
        let fresh = self.used[chunk] & bit == 0;
        self.used[chunk] |= bit;
        self.slots_used += u64::from(fresh);
        fresh
    }

    /// All that is in use has been claimed, and slots are taken and given from now on. What is empty goes back to the host, wherever
    /// the process before had kept some, and has to be reserved first.
    fn go_on(&mut self, file: &HostFile) {
        self.candidates.clear();
        self.is_candidate.fill(false);
        for chunk in (0..self.used.len()).rev() {
            if self.used[chunk] == 0 {
                self.empty_reserved += 1;
                // Where the host does not take it, it counts as what is there.
                self.give_back(file, chunk);
            }
            if self.used[chunk] != u64::MAX {
                self.set_candidate(chunk);
            }
        }
        let known = self.used.len() as u64 * self.chunk_bytes();
        let rest = self.chunks_max as u64 * self.chunk_bytes() - known;
        if rest > 0 && file.give_back(self.base + known, rest).is_err() {
            log::debug!("what an earlier process had kept of a copy pool stays until it is used");
        }
    }

    fn set_candidate(&mut self, chunk: usize) {
        if !std::mem::replace(&mut self.is_candidate[chunk], true) {
            self.candidates.push(chunk as u32);
        }
    }

    fn give(&mut self, file: &HostFile, slot: u32) {
        let chunk = (slot / SLOTS_PER_CHUNK) as usize;
        let bit = 1 << (slot % SLOTS_PER_CHUNK);
        assert!(self.used[chunk] & bit != 0, "slot {slot} given back twice");
        self.set_candidate(chunk);
        self.used[chunk] &= !bit;
        self.slots_used -= 1;
        if self.used[chunk] == 0 {
            self.empty_reserved += 1;
            let is_kept =
                self.empty_reserved <= SPARE_CHUNKS || self.chunks_reserved <= self.chunks_kept && has_room(file);
            if !is_kept {
                self.give_back(file, chunk);
            }
        }
    }

    /// Chunks in which anything is.
    fn chunks_used(&self) -> usize {
        self.chunks_reserved - self.empty_reserved
    }

    /// Gives the memory of an empty chunk back. False where the host does not take it.
    fn give_back(&mut self, file: &HostFile, chunk: usize) -> bool {
        let base = self.base + chunk as u64 * self.chunk_bytes();
        let is_given = file.give_back(base, self.chunk_bytes()).is_ok();
        if is_given {
            self.reserved[chunk] = false;
            self.chunks_reserved -= 1;
            self.empty_reserved -= 1;
        }
        is_given
    }

    /// Gives empty chunks back until there are `most` with memory, or none is empty but so many. Says how many went.
    fn give_back_to(&mut self, file: &HostFile, most: usize, empty: usize) -> usize {
        let mut count = self.chunks_reserved.saturating_sub(most).min(self.empty_reserved.saturating_sub(empty));
        if count == 0 {
            return 0;
        }
        let before = self.chunks_reserved;
        // From the end, so that what is used again lies together.
        for chunk in (0..self.used.len()).rev() {
            if count > 0 && self.reserved[chunk] && self.used[chunk] == 0 {
                count -= 1;
                if !self.give_back(file, chunk) {
                    break;
                }
            }
        }
        // Those that have memory are taken first.
        let reserved = &self.reserved;
        self.candidates.sort_by_key(|chunk| reserved[*chunk as usize]);
        before - self.chunks_reserved
    }

    /// Some time has passed.
    fn rest(&mut self, file: &HostFile) {
        let kept = self.chunks_kept - self.chunks_kept.div_ceil(FORGOTTEN_PART);
        self.chunks_kept = if has_room(file) { kept.max(self.chunks_used()) } else { self.chunks_used() };
        self.give_back_to(file, self.chunks_kept, SPARE_CHUNKS);
    }

    /// Memory is short.
    fn give_back_spares(&mut self, file: &HostFile) -> usize {
        self.chunks_kept = self.chunks_used();
        self.give_back_to(file, self.chunks_kept, 0)
    }
}

/// Whether memory may be kept in which nothing is.
fn has_room(file: &HostFile) -> bool {
    file.room_bytes().is_some_and(|room| room >= ROOM_LEFT_BYTES)
}

/// Copied blocks of one log.
#[derive(Debug)]
pub struct Pool {
    file: HostFile,
    block_bytes: usize,
    blocks: Slab,
    smalls: Slab,
}

impl Pool {
    fn with_file(file: HostFile, block_bytes: u32, log_blocks: u32) -> Self {
        // Twice the log: while a log block is written anew, its old copy may still be on its way to storage.
        let slots_max = log_blocks.saturating_mul(2).next_multiple_of(SLOTS_PER_CHUNK);
        let small_base = u64::from(slots_max) * u64::from(block_bytes);
        Pool {
            file,
            block_bytes: block_bytes as usize,
            blocks: Slab::new(0, u64::from(block_bytes), slots_max),
            smalls: Slab::new(small_base, SMALL_SLOT_BYTES as u64, slots_max),
        }
    }

    fn file_bytes(block_bytes: u32, log_blocks: u32) -> u64 {
        let slots_max = log_blocks.saturating_mul(2).next_multiple_of(SLOTS_PER_CHUNK);
        u64::from(slots_max) * (u64::from(block_bytes) + SMALL_SLOT_BYTES as u64)
    }

    /// Makes an empty pool for a log of `log_blocks` blocks of `block_bytes` each.
    ///
    /// # Errors
    /// When the file cannot be made.
    pub fn create(path: &Path, block_bytes: u32, log_blocks: u32) -> Result<Self, MemoryError> {
        let file = HostFile::create(path, Self::file_bytes(block_bytes, log_blocks))?;
        Ok(Self::with_file(file, block_bytes, log_blocks))
    }

    /// Takes the pool that belongs to a table which was found. No slot is in use until it is claimed. `path` is what it is
    /// called in errors.
    ///
    /// # Errors
    /// When it has another size.
    pub fn from_file(file: HostFile, path: &Path, block_bytes: u32, log_blocks: u32) -> Result<Self, MemoryError> {
        if file.len() != Self::file_bytes(block_bytes, log_blocks) {
            return Err(MemoryError::System {
                what: format!("opening the copy pool {}", path.display()),
                source: std::io::Error::new(
                    std::io::ErrorKind::InvalidData,
                    "its length does not fit the journal's table",
                ),
            });
        }
        Ok(Self::with_file(file, block_bytes, log_blocks))
    }

    /// Copies a block in. Nothing when there is no memory for it.
    pub fn insert_block(&mut self, block: &[u8]) -> Option<u32> {
        let slot = self.take_block()?;
        self.fill_block(slot, block);
        Some(slot)
    }

    /// Takes a block slot with whatever is in it. Nothing when there is no memory for it.
    pub fn take_block(&mut self) -> Option<u32> {
        self.blocks.take(&self.file)
    }

    /// Copies a block into a slot that was taken, and that no table word names.
    pub fn fill_block(&mut self, slot: u32, block: &[u8]) {
        debug_assert_eq!(block.len(), self.block_bytes);
        self.file.slice(self.blocks.offset(slot), self.block_bytes).copy_in(0, block);
    }

    /// Copies a control block in without its zeros. Nothing when it does not fit, or there is no memory for it.
    pub fn insert_small(&mut self, block: &[u8]) -> Option<u32> {
        debug_assert_eq!(block.len(), self.block_bytes);
        let (head, rest) = block.split_at(SMALL_HEAD_BYTES);
        let (middle, tail) = rest.split_at(rest.len() - SMALL_TAIL_BYTES);
        if middle.iter().any(|byte| *byte != 0) {
            return None;
        }
        let slot = self.smalls.take(&self.file)?;
        let slice = self.file.slice(self.smalls.offset(slot), SMALL_SLOT_BYTES);
        slice.copy_in(0, head);
        slice.copy_in(SMALL_HEAD_BYTES, tail);
        Some(slot)
    }

    /// The content of a block slot in place, for a write to storage. Valid until the slot is given back.
    pub fn block(&self, slot: u32) -> MemorySlice {
        self.file.slice(self.blocks.offset(slot), self.block_bytes)
    }

    /// Copies a block slot out.
    pub fn read_block(&self, slot: u32, buffer: &mut [u8]) {
        self.block(slot).copy_out(0, buffer);
    }

    /// Rebuilds a control block from a small slot.
    pub fn read_small(&self, slot: u32, buffer: &mut [u8]) {
        let slice = self.file.slice(self.smalls.offset(slot), SMALL_SLOT_BYTES);
        let tail_at = buffer.len() - SMALL_TAIL_BYTES;
        slice.copy_out(0, &mut buffer[..SMALL_HEAD_BYTES]);
        buffer[SMALL_HEAD_BYTES..tail_at].fill(0);
        slice.copy_out(SMALL_HEAD_BYTES, &mut buffer[tail_at..]);
    }

    /// Gives a block slot back. No table word may name it any more.
    pub fn give_block(&mut self, slot: u32) {
        self.blocks.give(&self.file, slot);
    }

    /// Gives a small slot back. No table word may name it any more.
    pub fn give_small(&mut self, slot: u32) {
        self.smalls.give(&self.file, slot);
    }

    /// Claims a block slot that a found table names. False when it cannot be, or was claimed before.
    pub fn claim_block(&mut self, slot: u32) -> bool {
        self.blocks.claim(slot)
    }

    /// Claims a small slot that a found table names. False when it cannot be, or was claimed before.
    pub fn claim_small(&mut self, slot: u32) -> bool {
        self.smalls.claim(slot)
    }

    /// All slots that a found table names were claimed: from now on others are taken and given.
    pub fn go_on(&mut self) {
        self.blocks.go_on(&self.file);
        self.smalls.go_on(&self.file);
    }

    /// Whether the host's memory files have room for more than has to be there.
    pub fn has_room(&self) -> bool {
        has_room(&self.file)
    }

    /// Some time has passed, a second for instance: what nothing was in for longer goes back to the host.
    pub fn rest(&mut self) {
        self.blocks.rest(&self.file);
        self.smalls.rest(&self.file);
    }

    /// Memory is short: everything goes back that nothing is in. Says whether anything went.
    pub fn give_back_spares(&mut self) -> bool {
        self.blocks.give_back_spares(&self.file) + self.smalls.give_back_spares(&self.file) > 0
    }

    /// Bytes of memory in which nothing is, and which go back when memory is short.
    pub fn spare_bytes(&self) -> u64 {
        self.blocks.empty_reserved as u64 * self.blocks.chunk_bytes()
            + self.smalls.empty_reserved as u64 * self.smalls.chunk_bytes()
    }

    /// Bytes of host memory that the slots take.
    pub fn memory_bytes(&self) -> u64 {
        self.blocks.chunks_reserved as u64 * self.blocks.chunk_bytes()
            + self.smalls.chunks_reserved as u64 * self.smalls.chunk_bytes()
    }

    /// Bytes in slots that are in use.
    pub fn used_bytes(&self) -> u64 {
        self.blocks.slots_used * self.blocks.slot_bytes + self.smalls.slots_used * self.smalls.slot_bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool(log_blocks: u32) -> (tempfile::TempDir, Pool) {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let pool = Pool::create(&directory.path().join("pool"), 1024, log_blocks).expect("a new pool");
        (directory, pool)
    }

    #[test]
    fn what_goes_in_comes_out() {
        let (_directory, mut pool) = pool(128);
        let mut slots = Vec::new();
        for value in 0..200u8 {
            slots.push(pool.insert_block(&[value; 1024]).expect("room"));
        }
        let mut buffer = [0; 1024];
        for (value, slot) in slots.iter().enumerate() {
            pool.read_block(*slot, &mut buffer);
            assert_eq!(buffer, [value as u8; 1024]);
        }
        assert_eq!(pool.used_bytes(), 200 * 1024);
        for slot in slots {
            pool.give_block(slot);
        }
        assert_eq!(pool.used_bytes(), 0);
        assert_eq!(pool.memory_bytes(), pool.spare_bytes());
        assert!(pool.give_back_spares() && !pool.give_back_spares());
        assert_eq!(pool.memory_bytes(), 0, "empty chunks go back");
    }

    /// A guest can write one log block again and again: a copy is taken for it, and the one before given back.
    #[test]
    fn what_is_known_of_chunks_does_not_grow_with_what_comes_and_goes() {
        let (_directory, mut pool) = pool(128);
        let mut slots: Vec<u32> = (0..63).map(|_| pool.insert_block(&[1; 1024]).expect("room")).collect();
        for turn in 0..1000 {
            let next = pool.insert_block(&[2; 1024]).expect("room");
            pool.give_block(std::mem::replace(&mut slots[turn % 63], next));
            assert!(pool.blocks.candidates.len() <= pool.blocks.used.len());
        }
    }

    /// What a process has kept, and nothing is in, goes back to the host when another one goes on with its log.
    #[test]
    fn who_goes_on_has_no_memory_that_nobody_counts() {
        let directory = tempfile::tempdir_in("/dev/shm").expect("a directory in tmpfs");
        let path = directory.path().join("pool");
        let allocated = || std::os::unix::fs::MetadataExt::blocks(&std::fs::metadata(&path).expect("the file")) * 512;
        for claimed in [None, Some(5), Some(20 * 64)] {
            let mut pool = Pool::create(&path, 1024, 4096).expect("a new pool");
            let slots: Vec<u32> = (0..50 * 64).map(|_| pool.insert_block(&[1; 1024]).expect("room")).collect();
            let file = HostFile::open(&path).expect("it is there");
            drop(pool);
            let mut pool = Pool::from_file(file, &path, 1024, 4096).expect("its own");
            if let Some(slot) = claimed {
                assert!(pool.claim_block(slots[slot as usize]));
            }
            pool.go_on();
            assert_eq!(allocated(), u64::from(claimed.is_some()) * 64 * 1024, "{claimed:?}");
            assert_eq!((allocated(), pool.spare_bytes()), (pool.memory_bytes(), 0));
            if let Some(slot) = claimed {
                pool.give_block(slots[slot as usize]);
            }
            assert!(pool.insert_block(&[3; 1024]).is_some());
            std::fs::remove_file(&path).expect("removed");
        }
    }

    /// What a load has filled once has memory when it comes again, until it has not come for a while.
    #[test]
    fn memory_that_was_in_use_not_long_ago_is_used_again() {
        let directory = tempfile::tempdir_in("/dev/shm").expect("a directory in tmpfs");
        let path = directory.path().join("pool");
        let mut pool = Pool::create(&path, 1024, 4096).expect("a new pool");
        let allocated = || std::os::unix::fs::MetadataExt::blocks(&std::fs::metadata(&path).expect("the file")) * 512;
        const CHUNK_BYTES: u64 = 64 * 1024;
        for _ in 0..3 {
            let slots: Vec<u32> = (0..50 * 64).map(|_| pool.insert_block(&[1; 1024]).expect("room")).collect();
            assert_eq!((pool.memory_bytes(), pool.spare_bytes(), allocated()), (50 * CHUNK_BYTES, 0, 50 * CHUNK_BYTES));
            // Half of it, and then all.
            slots[..25 * 64].iter().for_each(|slot| pool.give_block(*slot));
            assert_eq!((pool.spare_bytes(), allocated()), (25 * CHUNK_BYTES, 50 * CHUNK_BYTES));
            pool.rest();
            assert!(allocated() >= 46 * CHUNK_BYTES, "{} bytes after one second", allocated());
            slots[25 * 64..].iter().for_each(|slot| pool.give_block(*slot));
        }
        let slot = pool.insert_block(&[1; 1024]).expect("room");
        (0..60).for_each(|_| pool.rest());
        assert_eq!(allocated(), (1 + SPARE_CHUNKS as u64) * CHUNK_BYTES, "it is gone in a minute");
        assert_eq!((pool.memory_bytes(), pool.used_bytes()), (allocated(), 1024));
        // And what is left is used first.
        let more: Vec<u32> = (0..3 * 64 - 1).map(|_| pool.insert_block(&[1; 1024]).expect("room")).collect();
        assert_eq!(allocated(), 3 * CHUNK_BYTES);
        more.into_iter().chain([slot]).for_each(|slot| pool.give_block(slot));
        assert!(pool.give_back_spares());
        assert_eq!((allocated(), pool.memory_bytes()), (0, 0));
    }

    #[test]
    fn a_small_slot_keeps_head_and_tail() {
        let (_directory, mut pool) = pool(128);
        let mut block = [0u8; 1024];
        block[..SMALL_HEAD_BYTES].fill(0x5a);
        block[1020..].copy_from_slice(&[1, 2, 3, 4]);
        let slot = pool.insert_small(&block).expect("it fits");
        let mut back = [0xffu8; 1024];
        pool.read_small(slot, &mut back);
        assert_eq!(back, block);
        block[SMALL_HEAD_BYTES] = 1;
        assert_eq!(pool.insert_small(&block), None, "a block with more in it does not fit");
    }

    #[test]
    fn the_pool_is_bounded() {
        let (_directory, mut pool) = pool(64);
        let mut count = 0;
        while pool.insert_block(&[1; 1024]).is_some() {
            count += 1;
            assert!(count <= 128, "more slots than twice the log");
        }
        assert_eq!(count, 128);
    }

    #[test]
    fn free_slots_are_found_where_no_more_memory_is() {
        let (_directory, mut pool) = pool(256);
        let slots: Vec<u32> = (0..256).map(|_| pool.insert_block(&[1; 1024]).expect("room")).collect();
        // All of the last chunks go back to the host, but for two, and one slot of the first.
        slots[64..].iter().chain(&slots[..1]).for_each(|slot| pool.give_block(*slot));
        (0..60).for_each(|_| pool.rest());
        guest_memory::simulated_room::fail_reservations(0..u64::MAX);
        let again: Vec<u32> = std::iter::from_fn(|| pool.insert_block(&[2; 1024])).collect();
        guest_memory::simulated_room::fail_reservations(0..0);
        assert!(again.contains(&slots[0]), "{again:?}");
        assert_eq!(again.len(), 1 + SPARE_CHUNKS * 64);
    }

    #[test]
    #[should_panic(expected = "given back twice")]
    fn a_slot_is_given_back_once() {
        let (_directory, mut pool) = pool(64);
        let slot = pool.insert_block(&[1; 1024]).expect("room");
        pool.give_block(slot);
        pool.give_block(slot);
    }
}
