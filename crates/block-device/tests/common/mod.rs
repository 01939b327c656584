//! A device and a front-end in one process, for tests.

#![allow(dead_code)]

use block_device::{CacheMode, Device, DeviceConfig, Image, ImageOptions, Observer, Peer};
use block_route::{Buffer, DiskOperation, Operation, PlainRoute, Plan, Request, Route, Start, Ticket};
use guest_memory::{MemoryTable, PageId, VmMemory};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use test_frontend::{FrontEnd, FrontEndOptions, GuestRam, TestDisk};

pub const MIB: u64 = 1 << 20;

/// The ticket of a write of the route's own.
const OWN_WRITE: Ticket = Ticket(u64::MAX);

/// What the observer and the route were told, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Told {
    Connected,
    Disconnected,
    RingPages(Vec<PageId>),
    Started(Start),
    Stopped,
    /// A write of the route's own has ended.
    OwnWriteDone,
    /// Something of the guest's is wrong.
    Fault(String),
    /// Its VMM stands still, or goes on.
    StandsStill(bool),
}

/// Notes everything.
#[derive(Clone, Debug, Default)]
pub struct Journal(pub Arc<Mutex<Vec<Told>>>, pub Arc<Mutex<Vec<i32>>>);

impl Journal {
    pub fn note(&self, told: Told) {
        self.0.lock().unwrap().push(told);
    }

    pub fn all(&self) -> Vec<Told> {
        self.0.lock().unwrap().clone()
    }

    pub fn faults(&self) -> Vec<String> {
        self.all()
            .into_iter()
            .filter_map(|told| if let Told::Fault(sentence) = told { Some(sentence) } else { None })
            .collect()
    }

    pub fn starts(&self) -> Vec<Start> {
        self.all()
            .into_iter()
            .filter_map(|told| if let Told::Started(start) = told { Some(start) } else { None })
            .collect()
    }
}

impl Observer for Journal {
    fn connected(&self, peer: Peer) -> Result<(), String> {
        self.1.lock().unwrap().push(peer.pid);
        self.note(Told::Connected);
        Ok(())
    }

    fn ring_pages(&self, pages: &[PageId]) {
        self.note(Told::RingPages(pages.to_vec()));
    }

    fn fault(&self, sentence: &str) {
        self.note(Told::Fault(sentence.to_owned()));
    }

    fn stands_still(&self, since: Option<Instant>) {
        self.note(Told::StandsStill(since.is_some()));
    }

    fn disconnected(&self, _peer: Peer) {
        self.note(Told::Disconnected);
    }
}

/// A plain route that notes when it is started and stopped, and can be told to keep writes back, or to answer them at once
/// and write something of its own instead.
#[derive(Debug, Default)]
pub struct NotingRoute {
    pub journal: Journal,
    pub hold_writes: bool,
    pub writes_itself: bool,
    pub held: Vec<(block_route::RequestId, u64, Vec<guest_memory::MemorySlice>)>,
    pub refuse_start: bool,
    pub routed: Vec<(block_route::RequestKind, u64, u64)>,
    /// Where those of them begin that were taken before.
    pub routed_again: Vec<u64>,
    plain: PlainRoute,
}

impl Route for NotingRoute {
    fn started(&mut self, start: Start, memory: &Arc<MemoryTable>) -> io::Result<()> {
        self.journal.note(Told::Started(start));
        if self.refuse_start {
            return Err(io::Error::other("refused for a test"));
        }
        self.plain.started(start, memory)
    }

    fn route(&mut self, request: &Request<'_>, plan: &mut Plan) {
        self.routed.push((request.kind, request.offset, request.len));
        if self.hold_writes && request.kind == block_route::RequestKind::Write {
            plan.hold(request.id);
            self.held.push((request.id, request.offset, request.segments.to_vec()));
        } else if self.writes_itself && request.kind == block_route::RequestKind::Write {
            plan.disk(DiskOperation {
                request: None,
                ticket: Some(OWN_WRITE),
                operation: Operation::Write,
                offset: request.offset,
                len: request.len,
                buffers: vec![Buffer::Bytes(Arc::from(vec![0xee; request.len as usize]))],
            });
        } else {
            self.plain.route(request, plan);
        }
    }

    fn route_again(&mut self, request: &Request<'_>, plan: &mut Plan) {
        self.routed_again.push(request.offset);
        self.route(request, plan);
    }

    fn end_of_pass(&mut self, plan: &mut Plan) {
        self.plain.end_of_pass(plan);
    }

    fn disk_done(&mut self, ticket: Ticket, result: io::Result<()>, plan: &mut Plan) {
        if ticket == OWN_WRITE {
            self.journal.note(Told::OwnWriteDone);
            return;
        }
        self.plain.disk_done(ticket, result, plan);
    }

    fn stopped(&mut self) {
        self.journal.note(Told::Stopped);
    }
}

/// A disk image in a directory of its own, with room for a socket.
pub struct Place {
    pub directory: tempfile::TempDir,
}

impl Place {
    pub fn new(size: u64) -> Self {
        let place = Place { directory: tempfile::tempdir().unwrap() };
        std::fs::File::create(place.image()).unwrap().set_len(size).unwrap();
        place
    }

    pub fn image(&self) -> PathBuf {
        self.directory.path().join("disk.img")
    }

    pub fn socket(&self) -> PathBuf {
        self.directory.path().join("disk.sock")
    }
}

pub fn open(path: &Path, cache: CacheMode) -> Arc<Image> {
    Arc::new(Image::open(path, ImageOptions { cache, ..ImageOptions::default() }).unwrap())
}

/// A machine that stands still is no device that does.
pub const STOP_MARGIN: Duration = Duration::from_secs(60);

/// Starts a device with a noting route.
pub fn start(
    place: &Place,
    image: Arc<Image>,
    change: impl FnOnce(&mut DeviceConfig, &mut NotingRoute),
) -> (Device<NotingRoute>, Journal) {
    let mut config = DeviceConfig::new("test-disk", place.socket(), image);
    (config.drain_timeout, config.stop_margin) = (Duration::from_secs(5), STOP_MARGIN);
    let journal = Journal::default();
    let mut route = NotingRoute { journal: journal.clone(), ..NotingRoute::default() };
    change(&mut config, &mut route);
    let device = Device::start(config, Box::new(route), VmMemory::new(), Arc::new(journal.clone())).unwrap();
    (device, journal)
}

pub fn connect(place: &Place, options: FrontEndOptions) -> FrontEnd {
    FrontEnd::connect(&place.socket(), GuestRam::new(64 * MIB).unwrap(), options).unwrap()
}

/// A started disk on a device.
pub fn disk(place: &Place, options: FrontEndOptions) -> TestDisk {
    let mut front_end = connect(place, options);
    front_end.start().unwrap();
    TestDisk::new(front_end)
}

/// An image of `size` bytes, a device on it and a started disk.
pub fn rig(size: u64, cache: CacheMode) -> (Place, Device<NotingRoute>, TestDisk) {
    let place = Place::new(size);
    let (device, _) = start(&place, open(&place.image(), cache), |_, _| {});
    let disk = disk(&place, FrontEndOptions::default());
    (place, device, disk)
}

/// Bytes that say where they belong.
pub fn pattern(offset: u64, len: usize, salt: u64) -> Vec<u8> {
    (0..len as u64)
        .map(|position| {
            let at = offset + position;
            ((at / 512).wrapping_mul(0x9e37_79b9).wrapping_add(at ^ salt) >> 3) as u8
        })
        .collect()
}
