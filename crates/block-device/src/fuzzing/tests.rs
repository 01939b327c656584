//! The fuzz target `chain` on the stable compiler, and the first inputs of its corpus.

#[path = "../../../../fuzz/src/chain.rs"]
mod chain;
#[path = "../../../../fuzz/src/exercise.rs"]
mod exercise;

use exercise::{corpus, exercise, write_seeds};
use virtio_bindings::bindings::virtio_blk::{
    VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT,
    VIRTIO_BLK_T_WRITE_ZEROES,
};

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

#[test]
fn rings_and_chains() {
    exercise("chain", 4000, &|data| {
        chain::run(data);
    });
}

#[test]
fn the_corpus_is_worth_mutating() {
    let understood: Vec<usize> = corpus("chain").iter().map(|data| chain::run(data)).collect();
    assert!(understood.iter().filter(|count| **count >= 3).count() >= 4, "requests understood: {understood:?}");
}

/// Guest memory as a driver that is honest writes it.
struct Memory {
    bytes: Vec<u8>,
    /// Where there is room for buffers.
    free: u64,
    size: u16,
    descriptors: u16,
    available: u16,
}

/// One buffer of a request.
enum Buffer {
    Readable(Vec<u8>),
    Writable(usize),
}

const AVAILABLE_AT: usize = 2048;
const USED_AT: usize = 3072;

impl Memory {
    fn new(size: u16) -> Self {
        Memory { bytes: vec![0; 8192], free: 4096, size, descriptors: 0, available: 0 }
    }

    fn put(&mut self, at: usize, bytes: &[u8]) {
        if self.bytes.len() < at + bytes.len() {
            self.bytes.resize(at + bytes.len(), 0);
        }
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
    }

    fn descriptor(&mut self, at: usize, address: u64, len: usize, flags: u16, next: u16) {
        let mut raw = address.to_le_bytes().to_vec();
        raw.extend((len as u32).to_le_bytes());
        raw.extend(flags.to_le_bytes());
        raw.extend(next.to_le_bytes());
        self.put(at, &raw);
    }

    /// Room for a buffer, with `content` in it.
    fn buffer(&mut self, content: &[u8]) -> u64 {
        let at = self.free;
        self.free += (content.len() as u64).next_multiple_of(16);
        self.put(at as usize, content);
        at
    }

    /// Makes a request available: its header, its buffers, and a status byte.
    fn request(&mut self, kind: u32, sector: u64, buffers: &[Buffer], is_indirect: bool) {
        let mut header = kind.to_le_bytes().to_vec();
        header.extend([0; 4]);
        header.extend(sector.to_le_bytes());
        let mut all = vec![(self.buffer(&header), 16, 0)];
        for buffer in buffers {
            all.push(match buffer {
                Buffer::Readable(content) => (self.buffer(content), content.len(), 0),
                Buffer::Writable(len) => (self.buffer(&vec![0; *len]), *len, WRITE),
            });
        }
        all.push((self.buffer(&[0xee]), 1, WRITE));
        let head = self.descriptors;
        let (table, first) = if is_indirect {
            let table = self.buffer(&vec![0; all.len() * 16]);
            self.descriptor(usize::from(head) * 16, table, all.len() * 16, INDIRECT, 0);
            self.descriptors += 1;
            (table as usize, 0)
        } else {
            self.descriptors += all.len() as u16;
            (0, head)
        };
        for (number, (address, len, flags)) in all.iter().enumerate() {
            let index = first + number as u16;
            let more = if number + 1 < all.len() { NEXT } else { 0 };
            self.descriptor(table + usize::from(index) * 16, *address, *len, flags | more, index + more);
        }
        assert!(self.descriptors <= self.size);
        let slot = AVAILABLE_AT + 4 + 2 * usize::from(self.available % self.size);
        self.put(slot, &head.to_le_bytes());
        self.available += 1;
        self.put(AVAILABLE_AT + 2, &self.available.to_le_bytes());
    }

    /// The input: a head (see fuzz/src/chain.rs) and this memory.
    fn input(self, switches: u8) -> Vec<u8> {
        let mut data = vec![switches, self.size.ilog2() as u8];
        for word in [0, 1024, 0, (AVAILABLE_AT / 16) as u16, (USED_AT / 16) as u16] {
            data.extend(word.to_le_bytes());
        }
        data.extend(&self.bytes[..self.bytes.len().min(self.free as usize)]);
        data
    }
}

fn ranges(ranges: &[(u64, u32, u32)]) -> Buffer {
    let mut content = Vec::new();
    for (sector, sectors, flags) in ranges {
        content.extend(sector.to_le_bytes());
        content.extend(sectors.to_le_bytes());
        content.extend(flags.to_le_bytes());
    }
    Buffer::Readable(content)
}

fn requests(memory: &mut Memory, is_indirect: bool) {
    memory.request(VIRTIO_BLK_T_IN, 8, &[Buffer::Writable(512), Buffer::Writable(1024)], is_indirect);
    memory.request(VIRTIO_BLK_T_OUT, 16, &[Buffer::Readable(vec![7; 1536])], is_indirect);
    memory.request(VIRTIO_BLK_T_FLUSH, 0, &[], is_indirect);
    memory.request(VIRTIO_BLK_T_DISCARD, 0, &[ranges(&[(0, 8, 0), (64, 1, 0)])], is_indirect);
    memory.request(VIRTIO_BLK_T_WRITE_ZEROES, 0, &[ranges(&[(32, 8, 1)])], is_indirect);
    memory.request(VIRTIO_BLK_T_GET_ID, 0, &[Buffer::Writable(20)], is_indirect);
}

/// Makes the first inputs of the corpus; `scripts/fuzz.sh seeds` runs it.
#[test]
#[ignore = "writes the seeds of the kept corpus"]
fn seeds() {
    let seed = |switches: u8, is_indirect: bool| {
        let mut memory = Memory::new(32);
        requests(&mut memory, is_indirect);
        memory.input(switches)
    };
    let many = |switches: u8| {
        let mut memory = Memory::new(64);
        for sector in 0..20 {
            memory.request(VIRTIO_BLK_T_IN, sector, &[Buffer::Writable(512)], sector % 2 == 0);
        }
        memory.input(switches)
    };
    // The last descriptor of a chain names the one right behind the table: that of the ring, and an indirect one.
    let beyond = |is_indirect: bool| {
        let mut memory = Memory::new(2);
        memory.request(VIRTIO_BLK_T_FLUSH, 0, &[], is_indirect);
        let table =
            if is_indirect { u64::from_le_bytes(memory.bytes[..8].try_into().expect("eight bytes")) } else { 0 };
        let last = table as usize + 16;
        memory.put(last + 12, &(WRITE | NEXT).to_le_bytes());
        memory.put(last + 14, &2u16.to_le_bytes());
        memory.input(0)
    };
    write_seeds(
        "chain",
        vec![
            ("beyond-the-ring", beyond(false)),
            ("beyond-an-indirect-table", beyond(true)),
            ("direct", seed(1, false)),
            ("direct-event-index", seed(2, false)),
            ("indirect", seed(0, true)),
            ("indirect-late", seed(10, true)),
            ("read-only", seed(4, true)),
            ("many-reads-late", many(8)),
        ],
    );
}
