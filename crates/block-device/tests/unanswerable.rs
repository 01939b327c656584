//! Requests that cannot be done because their memory cannot be reached, and chains that are no requests: what a driver reads
//! in the status byte of whatever comes back was written by this device, or its ring is stopped.

mod common;

use block_device::{CacheMode, Device};
use common::{Journal, MIB, NotingRoute, Place, open, pattern, start};
use proptest::prelude::*;
use std::time::{Duration, Instant};
use test_frontend::{
    ANSWER_TIMEOUT, Descriptor, FrontEnd, FrontEndOptions, GuestRam, STATUS_IO_ERROR, STATUS_OK, STATUS_UNANSWERED,
    TestDisk, Transfer, descriptor_flags,
};
use vhost::vhost_user::VhostUserFrontend;
use vhost::{VhostBackend, VhostUserMemoryRegionInfo};
use vmm_sys_util::eventfd::EventFd;

/// Two regions that meet, and one far away with nothing before or after it.
const MEET: u64 = 8 * MIB;
const END: u64 = 16 * MIB;
const FAR: u64 = 64 * MIB;
const FAR_BYTES: u64 = MIB;
/// Nothing is there.
const NOWHERE: u64 = 1 << 40;

const READ: u32 = 0;
const WRITE: u32 = 1;
const FLUSH: u32 = 4;
const IDENTITY: u32 = 8;

fn ram() -> GuestRam {
    GuestRam::with_regions(&[(0, MEET), (MEET, END - MEET), (FAR, FAR_BYTES)]).unwrap()
}

/// A device, the connection to it, and the descriptor that says that queue 0 is stopped.
struct Rig {
    device: Device<NotingRoute>,
    journal: Journal,
    place: Place,
}

struct Line {
    disk: TestDisk,
    stopped: EventFd,
    /// Header, status and room for a table: in the first region.
    header: u64,
    status: u64,
    table: u64,
    data: u64,
}

impl Rig {
    fn new() -> Self {
        let place = Place::new(MIB);
        let (device, journal) = start(&place, open(&place.image(), CacheMode::Auto), |_, _| {});
        Rig { device, journal, place }
    }

    /// A new connection, as after a reset: with two queues, of which the second is always sound.
    fn line(&self) -> Line {
        let options = FrontEndOptions { queues: 2, queue_size: 64, memory_slots: true, ..FrontEndOptions::default() };
        let mut front_end = FrontEnd::connect(&self.place.socket(), ram(), options).unwrap();
        let stopped = EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC).unwrap();
        front_end.messages.set_vring_err(0, &stopped).unwrap();
        front_end.start().unwrap();
        let take = |bytes| front_end.ram.take(bytes, 4096);
        let (header, status, table, data) = (take(4096), take(4096), take(64 * 1024), take(64 * 1024));
        front_end.ram.write(status, &[STATUS_UNANSWERED; 4096]);
        Line { disk: TestDisk::new(front_end), stopped, header, status, table, data }
    }
}

impl Line {
    fn ask(&self, kind: u32) {
        let ram = &self.disk.front_end.ram;
        ram.put(self.header, kind.to_le());
        ram.put(self.header + 4, 0u32);
        ram.put(self.header + 8, 0u64);
    }

    /// Offers descriptors as they are, the first one first.
    fn offer(&mut self, descriptors: &[Descriptor]) -> u16 {
        let queue = &mut self.disk.front_end.queues[0];
        let indices = queue.reserve(descriptors.len()).expect("free descriptors");
        for (index, descriptor) in indices.iter().zip(descriptors) {
            queue.put_descriptor(*index, *descriptor);
        }
        let head = indices[0];
        queue.belongs_to(head, indices);
        queue.make_available(head);
        queue.publish();
        queue.kick.write(1).unwrap();
        head
    }

    /// Offers a well-formed chain, and waits for what becomes of it: the status at `status`, or nothing when the ring was
    /// stopped without giving it back.
    fn outcome(&mut self, chain: &[Descriptor], status: u64) -> Option<u8> {
        let head = self.disk.front_end.queues[0].add(chain).expect("free descriptors");
        self.disk.front_end.queues[0].publish();
        self.disk.front_end.queues[0].kick.write(1).unwrap();
        self.wait(head).map(|_| self.disk.front_end.ram.get(status))
    }

    /// Waits until the head comes back, with the bytes written, or the ring is stopped.
    fn wait(&mut self, head: u16) -> Option<u32> {
        let deadline = Instant::now() + ANSWER_TIMEOUT;
        loop {
            // Asked first: what a ring gives back, it gives back before it is stopped.
            let is_stopped = self.stopped.read().is_ok();
            if let Some((used, written)) = self.disk.front_end.queues[0].take_used() {
                assert!(!is_stopped, "a ring is stopped with a chain that it gave back");
                assert_eq!(used, head);
                return Some(written);
            }
            if is_stopped {
                return None;
            }
            assert!(Instant::now() < deadline, "neither an answer nor an end");
            std::thread::yield_now();
        }
    }

    /// The other queue does what it should.
    fn works(&mut self) {
        let bytes = pattern(4096, 4096, 77);
        let data = self.data;
        self.disk.front_end.ram.write(data, &bytes);
        assert_eq!(self.disk.request_on(1, 8, &Transfer::Write(vec![(data, 4096)])).unwrap().status, STATUS_OK);
        self.disk.front_end.ram.write(data, &[0; 4096]);
        assert_eq!(self.disk.request_on(1, 8, &Transfer::Read(vec![(data, 4096)])).unwrap().status, STATUS_OK);
        assert!(self.disk.front_end.ram.read(data, 4096) == bytes);
    }
}

#[test]
fn a_chain_without_a_status_byte_to_write_stops_its_ring() {
    let rig = Rig::new();
    let next = |address, len, next| Descriptor { address, len, flags: descriptor_flags::NEXT, next };
    let indirect = |address, len| Descriptor { address, len, flags: descriptor_flags::INDIRECT, next: 0 };
    let (readable, writable) = (Descriptor::readable, Descriptor::writable);
    type Make = Box<dyn Fn(&Line, u16) -> Vec<Descriptor>>;
    let bad: Vec<(&str, Make)> = vec![
        ("nothing to write", Box::new(move |line, _| vec![readable(line.header, 16)])),
        ("nothing at all", Box::new(move |line, _| vec![readable(line.header, 0)])),
        ("only nothing to write", Box::new(move |line, _| vec![writable(line.header, 0)])),
        ("outside of memory", Box::new(move |_, _| vec![writable(NOWHERE, 16)])),
        ("wrapping around", Box::new(move |_, _| vec![writable(u64::MAX - 3, 16)])),
        ("its end outside of memory", Box::new(move |_, _| vec![writable(END - 4, 16)])),
        ("over the end of the last region", Box::new(move |_, _| vec![writable(FAR + FAR_BYTES - 1, 2)])),
        ("four gigabytes at once", Box::new(move |_, _| vec![writable(0, u32::MAX)])),
        ("the next one outside of the ring", Box::new(move |line, _| vec![next(line.header, 16, 1000)])),
        ("a loop of one", Box::new(move |line, first| vec![next(line.header, 16, first)])),
        ("an indirect table outside of memory", Box::new(move |_, _| vec![indirect(NOWHERE, 64)])),
        ("an indirect table partly outside of memory", Box::new(move |_, _| vec![indirect(END - 16, 32)])),
        ("an indirect table of no length", Box::new(move |line, _| vec![indirect(line.table, 0)])),
        ("an indirect table with half a descriptor", Box::new(move |line, _| vec![indirect(line.table, 24)])),
        ("an indirect table larger than can be", Box::new(move |_, _| vec![indirect(0, !15)])),
        (
            "an indirect table with more behind it",
            Box::new(move |line, _| {
                let flags = descriptor_flags::INDIRECT | descriptor_flags::NEXT;
                vec![Descriptor { flags, ..indirect(line.table, 64) }]
            }),
        ),
        (
            "a table within a table",
            Box::new(move |line, _| {
                let queue = &line.disk.front_end.queues[0];
                queue.put_table(line.table, &[indirect(line.table, 16)]);
                vec![indirect(line.table, 16)]
            }),
        ),
        (
            "a loop inside an indirect table",
            Box::new(move |line, _| {
                let queue = &line.disk.front_end.queues[0];
                queue.put_table(line.table, &[next(line.header, 16, 0), next(line.header, 16, 0)]);
                line.disk.front_end.ram.put(line.table + 16 + 12, descriptor_flags::NEXT);
                line.disk.front_end.ram.put(line.table + 16 + 14, 0u16);
                vec![indirect(line.table, 32)]
            }),
        ),
        (
            "the next one outside of an indirect table",
            Box::new(move |line, _| {
                line.disk.front_end.queues[0]
                    .put_table(line.table, &[next(line.header, 16, 1), writable(line.status, 1)]);
                vec![indirect(line.table, 16)]
            }),
        ),
    ];
    for (what, make) in &bad {
        let mut line = rig.line();
        line.ask(FLUSH);
        let first = line.disk.front_end.queues[0].reserve(1).unwrap();
        line.disk.front_end.queues[0].belongs_to(first[0], first.clone());
        // It goes back, so that it is the next one to be reserved.
        line.disk.front_end.queues[0].make_available(first[0]);
        line.disk.front_end.queues[0].put_descriptor(first[0], writable(line.status, 1));
        line.disk.front_end.queues[0].publish();
        line.disk.front_end.queues[0].kick.write(1).unwrap();
        assert_eq!(line.wait(first[0]), Some(1), "{what}: a status alone is a request that fails");
        assert_eq!(line.disk.front_end.ram.get::<u8>(line.status), STATUS_IO_ERROR);
        let before = rig.device.handle().counters().malformed_chains;
        let chain = make(&line, first[0]);
        let head = line.offer(&chain);
        assert_eq!(line.wait(head), None, "{what}");
        assert_eq!(rig.device.handle().counters().malformed_chains, before + 1, "{what}");
        line.works();
        // Stopping it is answered, and at once: nothing is under way.
        let began = Instant::now();
        line.disk.front_end.stop().unwrap();
        assert!(began.elapsed() < Duration::from_secs(4), "{what}: the chain is waited for");
    }
    // Chains of two and more: a loop, and to read after to write.
    let mut line = rig.line();
    let indices = line.disk.front_end.queues[0].reserve(2).unwrap();
    for (index, other) in [(0, 1), (1, 0)] {
        line.disk.front_end.queues[0].put_descriptor(indices[index], next(line.header, 16, indices[other]));
    }
    line.disk.front_end.queues[0].make_available(indices[0]);
    line.disk.front_end.queues[0].publish();
    line.disk.front_end.queues[0].kick.write(1).unwrap();
    assert_eq!(line.wait(indices[0]), None, "a loop of two");
    drop(line);
    let mut line = rig.line();
    let status = line.status;
    let chain = [writable(status, 1), readable(line.header, 16)];
    assert_eq!(line.outcome(&chain, status), None, "to read after to write");
    assert_eq!(line.disk.front_end.ram.get::<u8>(status), STATUS_UNANSWERED);
    drop(line);
    let mut line = rig.line();
    let chain = [readable(line.header, 16), writable(line.data, 512), writable(NOWHERE, 1)];
    let status = line.status;
    assert_eq!(line.outcome(&chain, status), None, "a status byte outside of memory");
    let faults = rig.journal.faults();
    assert!(faults.iter().any(|fault| fault.contains("queue 0 is stopped until the guest is reset")), "{faults:?}");
    let missing = faults.iter().filter(|fault| fault.contains("has not handed over, and its requests")).count();
    assert_eq!(missing, 1, "said once: {faults:?}");
    // A new start makes the ring whole again.
    drop(line);
    let mut line = rig.line();
    line.ask(FLUSH);
    let status = line.status;
    let chain = [readable(line.header, 16), writable(status, 1)];
    assert_eq!(line.outcome(&chain, status), Some(STATUS_OK));
    drop(line);
    let route = rig.device.stop().unwrap();
    let written = route.routed.iter().filter(|(kind, ..)| *kind == block_route::RequestKind::Write).count();
    assert_eq!(written, bad.len(), "only the writes of the other queue reached the route");
}

#[test]
fn a_buffer_that_cannot_be_reached_is_an_error() {
    let rig = Rig::new();
    let mut line = rig.line();
    let (header, status, data) = (line.header, line.status, line.data);
    let (readable, writable) = (Descriptor::readable, Descriptor::writable);
    let head = readable(header, 16);
    let end = writable(status, 1);
    let cases: Vec<(&str, u32, Vec<Descriptor>)> = vec![
        ("a read to nowhere", READ, vec![head, writable(NOWHERE, 512), end]),
        ("a read partly to nowhere", READ, vec![head, writable(END - 256, 512), end]),
        ("a read to before a region", READ, vec![head, writable(FAR - 256, 512), end]),
        (
            "a read between two good ones",
            READ,
            vec![head, writable(data, 512), writable(END, 512), writable(data, 512), end],
        ),
        ("a read that wraps around", READ, vec![head, writable(u64::MAX - 255, 512), end]),
        ("a write from nowhere", WRITE, vec![head, readable(NOWHERE, 512), end]),
        ("a write partly from nowhere", WRITE, vec![head, readable(END - 256, 512), end]),
        ("a write from four gigabytes", WRITE, vec![head, readable(0, u32::MAX), end]),
        ("a header nowhere", WRITE, vec![readable(NOWHERE, 16), readable(data, 512), end]),
        ("half a header nowhere", WRITE, vec![readable(header, 8), readable(NOWHERE, 8), readable(data, 512), end]),
        ("a flush with a buffer nowhere", FLUSH, vec![head, readable(NOWHERE, 1), end]),
        ("a serial number to nowhere", IDENTITY, vec![head, writable(NOWHERE, 20), end]),
        ("data and status in one, which begins nowhere", READ, vec![head, writable(FAR - 512, 513)]),
    ];
    for (what, kind, chain) in &cases {
        for is_indirect in [false, true] {
            line.ask(*kind);
            let at = if chain.len() == 2 { FAR } else { status };
            line.disk.front_end.ram.put(at, STATUS_UNANSWERED);
            let table = line.table;
            let head = if is_indirect {
                line.disk.front_end.queues[0].add_indirect(table, chain)
            } else {
                line.disk.front_end.queues[0].add(chain)
            };
            line.disk.front_end.queues[0].publish();
            line.disk.front_end.queues[0].kick.write(1).unwrap();
            assert_eq!(line.wait(head.unwrap()), Some(1), "{what}: the status, and nothing else");
            assert_eq!(line.disk.front_end.ram.get::<u8>(at), STATUS_IO_ERROR, "{what}");
        }
    }
    let faults = rig.journal.faults();
    assert_eq!(faults.len(), 1, "{faults:?}");
    assert!(faults[0].contains("memory-backend-memfd with share=on"), "{faults:?}");
    line.works();
    drop(line);
    let route = rig.device.stop().unwrap();
    assert_eq!(route.routed.len(), 2, "none of it reached the route");
}

#[test]
fn what_lies_across_two_regions_is_reached() {
    let rig = Rig::new();
    let mut line = rig.line();
    let (readable, writable) = (Descriptor::readable, Descriptor::writable);
    let status = line.status;
    line.disk.front_end.ram.write(MEET - 256, &pattern(0, 512, 3));
    line.ask(WRITE);
    let chain = [readable(line.header, 16), readable(MEET - 256, 512), writable(status, 1)];
    assert_eq!(line.outcome(&chain, status), Some(STATUS_OK));
    // The table's second descriptor has one half in each region, and the status is the first byte of the second.
    line.disk.front_end.ram.put(status, STATUS_UNANSWERED);
    line.ask(READ);
    let data = line.data;
    let chain = [readable(line.header, 16), writable(data, 512), writable(status, 1)];
    let head = line.disk.front_end.queues[0].add_indirect(MEET - 24, &chain).unwrap();
    line.disk.front_end.queues[0].publish();
    line.disk.front_end.queues[0].kick.write(1).unwrap();
    assert_eq!(line.wait(head), Some(513));
    assert_eq!(line.disk.front_end.ram.get::<u8>(status), STATUS_OK);
    assert!(line.disk.front_end.ram.read(data, 512) == pattern(0, 512, 3));
    line.ask(READ);
    let chain = [readable(line.header, 16), writable(MEET - 512, 513)];
    line.disk.front_end.ram.put(MEET, STATUS_UNANSWERED);
    assert_eq!(line.outcome(&chain, MEET), Some(STATUS_OK));
    assert!(rig.journal.faults().is_empty());
}

/// The far region, as a VMM names it.
fn far_region(disk: &TestDisk) -> VhostUserMemoryRegionInfo {
    disk.front_end.ram.regions().unwrap().into_iter().find(|region| region.guest_phys_addr == FAR).unwrap()
}

/// Messages without an answer were carried out when a later one is answered.
fn until_heard(disk: &mut TestDisk) {
    disk.front_end.messages.get_queue_num().unwrap();
}

#[test]
fn memory_that_is_taken_away_under_a_request_is_not_read_as_done() {
    let rig = Rig::new();
    let (readable, writable) = (Descriptor::readable, Descriptor::writable);
    let near = 4096;
    // Where the data is, where the status is, and what comes of it.
    for (what, data, status, expected) in [
        ("neither", near, near, Some(STATUS_OK)),
        ("the data", FAR, near, Some(STATUS_IO_ERROR)),
        ("the status", near, FAR + 4096, None),
        ("both", FAR, FAR + 4096, None),
    ] {
        let mut line = rig.line();
        rig.device.handle().with_route(|route, _| route.hold_writes = true).unwrap();
        line.ask(WRITE);
        let data = if data == near { line.data } else { data };
        let status = if status == near { line.status } else { status };
        line.disk.front_end.ram.put(status, STATUS_UNANSWERED);
        let chain = [readable(line.header, 16), readable(data, 512), writable(status, 1)];
        let head = line.disk.front_end.queues[0].add(&chain).unwrap();
        line.disk.front_end.queues[0].publish();
        line.disk.front_end.queues[0].kick.write(1).unwrap();
        let handle = rig.device.handle();
        while handle.with_route(|route, _| route.held.is_empty()).unwrap() {
            std::thread::yield_now();
        }
        let region = far_region(&line.disk);
        line.disk.front_end.messages.remove_mem_region(&region).unwrap();
        until_heard(&mut line.disk);
        handle
            .with_route(|route, plan| {
                route.hold_writes = false;
                for (id, ..) in route.held.drain(..) {
                    plan.release(id, block_route::Status::Ok);
                }
            })
            .unwrap();
        let answer = line.wait(head).map(|_| line.disk.front_end.ram.get::<u8>(status));
        assert_eq!(answer, expected, "{what} was taken away");
        line.works();
    }
}

#[test]
fn memory_that_is_plugged_in_and_handed_over_is_used() {
    let rig = Rig::new();
    let mut line = rig.line();
    let region = far_region(&line.disk);
    line.disk.front_end.messages.remove_mem_region(&region).unwrap();
    until_heard(&mut line.disk);
    let (readable, writable) = (Descriptor::readable, Descriptor::writable);
    let status = line.status;
    let chain = [readable(line.header, 16), readable(FAR, 512), writable(status, 1)];
    line.ask(WRITE);
    assert_eq!(line.outcome(&chain, status), Some(STATUS_IO_ERROR), "it is not there yet");
    // As QEMU hands a pc-dimm over whose memory is shared: a file without a name (a memfd).
    line.disk.front_end.messages.add_mem_region(&region).unwrap();
    until_heard(&mut line.disk);
    line.ask(WRITE);
    assert_eq!(line.outcome(&chain, status), Some(STATUS_OK));
    line.ask(READ);
    let chain = [readable(line.header, 16), writable(FAR + 512, 512), writable(FAR + 9000, 1)];
    line.disk.front_end.ram.put(FAR + 9000, STATUS_UNANSWERED);
    assert_eq!(line.outcome(&chain, FAR + 9000), Some(STATUS_OK));
}

/// A buffer of a random chain.
#[derive(Clone, Debug)]
struct Piece {
    address: u64,
    len: u32,
    is_writable: bool,
}

fn piece() -> impl Strategy<Value = Piece> {
    let address = prop_oneof![
        // Anywhere in the second region, where the tests have nothing of their own.
        8 => (MEET + MIB)..(END - MIB),
        1 => Just(NOWHERE),
        1 => (END - 600)..END,
        1 => (FAR - 600)..FAR,
        1 => (FAR + FAR_BYTES - 600)..(FAR + FAR_BYTES),
        1 => (MEET - 600)..MEET,
        1 => Just(u64::MAX - 100),
    ];
    let len = prop_oneof![1 => Just(0u32), 2 => Just(1u32), 2 => Just(16u32), 4 => Just(512u32), 1 => 1u32..1200];
    (address, len, any::<bool>()).prop_map(|(address, len, is_writable)| Piece { address, len, is_writable })
}

/// Whether a byte is in memory.
fn is_known(address: u64) -> bool {
    address < END || (FAR..FAR + FAR_BYTES).contains(&address)
}

/// Where the driver looks for the status of a chain, by the specification alone: the last byte that the device may write. Nothing
/// when there is none or it cannot be reached, or when the order says that this is no chain.
fn status_address(pieces: &[Piece]) -> Option<u64> {
    let mut last = None;
    for piece in pieces.iter().filter(|piece| piece.len > 0 || !piece.is_writable) {
        if piece.is_writable {
            last = Some(piece.address.checked_add(u64::from(piece.len) - 1));
        } else if last.is_some() {
            return None;
        }
    }
    last.flatten().filter(|address| is_known(*address))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    /// One device for all cases would be faster still, but a failure could then not be made smaller.
    #[test]
    fn whatever_comes_back_has_a_status(
        chains in proptest::collection::vec(
            (
                proptest::collection::vec(piece(), 1..6),
                proptest::sample::select(vec![READ, WRITE, FLUSH, IDENTITY, 11, 13, 77]),
                any::<bool>(),
                0u8..10,
            ),
            1..12,
        ),
    ) {
        let rig = Rig::new();
        let mut line = rig.line();
        for (mut pieces, kind, is_indirect, shape) in chains {
            // Mostly a header first, a status last, and what is to be read before what is to be written.
            if shape > 0 {
                pieces.sort_by_key(|piece| piece.is_writable);
                pieces.insert(0, Piece { address: line.header, len: 16, is_writable: false });
            }
            if shape > 2 {
                pieces.push(Piece { address: line.status, len: 1, is_writable: true });
            }
            line.ask(kind);
            let expected = status_address(&pieces);
            if let Some(address) = expected {
                line.disk.front_end.ram.put(address, STATUS_UNANSWERED);
            }
            let chain: Vec<Descriptor> = pieces
                .iter()
                .map(|piece| {
                    let make = if piece.is_writable { Descriptor::writable } else { Descriptor::readable };
                    make(piece.address, piece.len)
                })
                .collect();
            let table = line.table;
            let queue = &mut line.disk.front_end.queues[0];
            let head = if is_indirect { queue.add_indirect(table, &chain) } else { queue.add(&chain) }.unwrap();
            queue.publish();
            queue.kick.write(1).unwrap();
            match (line.wait(head), expected) {
                (Some(written), Some(address)) => {
                    let status = line.disk.front_end.ram.get::<u8>(address);
                    prop_assert!(status <= 2, "status {status} of {pieces:?}");
                    prop_assert!(written >= 1);
                }
                (None, None) => {
                    drop(line);
                    line = rig.line();
                }
                (Some(_), None) => prop_assert!(false, "given back without a status: {pieces:?}"),
                (None, Some(_)) => prop_assert!(false, "not answered though it could have been: {pieces:?}"),
            }
        }
    }
}
