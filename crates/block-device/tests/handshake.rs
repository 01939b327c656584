//! A worker dies with each message of a VMM's start, of a pause of its guest and of its resets, before it has heard it, before it has answered
//! it, or after that; the next one is another real device, behind the same door, which may die in its turn while it is told what was said. The VMM sees that an answer takes longer, and
//! nothing else.

mod common;

use block_device::{CacheMode, Device, DeviceConfig, Entrance, Image, ImageOptions};
use block_route::{PlainRoute, Plan, Request, Route, Start, Ticket};
use common::{Journal, MIB, Place, Told, open, pattern};
use front_door::{Admission, Door};
use guest_memory::{MemoryTable, VmMemory};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
};
use std::io::{self, IoSlice, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use supervision::Shelf;
use test_frontend::{ANSWER_TIMEOUT, DriverQueue, FrontEnd, FrontEndOptions, GuestRam, STATUS_OK, TestDisk};
use test_storage::TestStorage;
use vhost::vhost_user::VhostUserFrontend;

const HEADER_BYTES: usize = 12;
const NEED_REPLY: u32 = 8;
/// Messages that are answered by themselves, of those that come: GET_FEATURES, GET_VRING_BASE, GET_PROTOCOL_FEATURES, GET_QUEUE_NUM, GET_CONFIG,
/// GET_INFLIGHT_FD.
const QUESTIONS: [u32; 6] = [1, 11, 15, 17, 24, 31];
/// More messages than come.
const MESSAGES_MAX: usize = 400;

/// When a worker dies.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Moment {
    BeforeItHears,
    BeforeItAnswers,
    AfterThat,
}

struct Heard {
    bytes: Vec<u8>,
    descriptors: Vec<OwnedFd>,
}

impl Heard {
    fn from(mut stream: &UnixStream) -> Option<Self> {
        let mut bytes = vec![0; HEADER_BYTES];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut vector = [IoSliceMut::new(&mut bytes)];
        let received = rustix::net::recvmsg(stream, &mut vector, &mut control, RecvFlags::CMSG_CLOEXEC).ok()?.bytes;
        let of = |message| match message {
            RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
            _ => None,
        };
        let descriptors: Vec<OwnedFd> = control.drain().filter_map(of).flatten().collect();
        if received == 0 {
            return None;
        }
        stream.read_exact(&mut bytes[received..]).ok()?;
        let len = u32::from_ne_bytes(bytes[8..12].try_into().ok()?) as usize;
        bytes.resize(HEADER_BYTES + len, 0);
        stream.read_exact(&mut bytes[HEADER_BYTES..]).ok()?;
        Some(Heard { bytes, descriptors })
    }

    fn word(&self, at: usize) -> u32 {
        u32::from_ne_bytes(self.bytes[at..at + 4].try_into().expect("four bytes"))
    }

    fn is_answered(&self) -> bool {
        QUESTIONS.contains(&self.word(0)) || self.word(4) & NEED_REPLY != 0
    }

    fn pass_on(&self, stream: &UnixStream) -> io::Result<()> {
        let borrowed: Vec<_> = self.descriptors.iter().map(AsFd::as_fd).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(borrowed.is_empty() || control.push(SendAncillaryMessage::ScmRights(&borrowed)));
        let vector = [IoSlice::new(&self.bytes)];
        let sent = rustix::net::sendmsg(stream, &vector, &mut control, SendFlags::NOSIGNAL)?;
        assert_eq!(sent, self.bytes.len());
        Ok(())
    }
}

/// A worker's way in, and what tells that it has died: with the code of the message with which it did, or because it was given up.
struct Worker {
    entrance: Arc<Entrance>,
    dies: Option<(usize, Moment)>,
    died: Sender<Option<u32>>,
    threads: Sender<JoinHandle<()>>,
}

impl Admission for Worker {
    fn admit(&self, connection: OwnedFd, pid: i32) -> io::Result<()> {
        let connection = UnixStream::from(connection);
        let Some((at, moment)) = self.dies else {
            self.entrance.admit(connection, pid);
            return Ok(());
        };
        let (ours, theirs) = UnixStream::pair()?;
        self.entrance.admit(theirs, pid);
        let died = self.died.clone();
        let thread = std::thread::spawn(move || {
            let last = pass_on_until(&connection, &ours, at, moment);
            // Without a goodbye, whatever the device behind it says.
            drop((connection, ours));
            if last.is_some() {
                died.send(last).expect("somebody waits for it");
            }
        });
        self.threads.send(thread).map_err(io::Error::other)
    }

    fn give_up(&self) {
        assert!(self.dies.is_some(), "a worker that lives was given up");
        self.died.send(None).expect("somebody waits for it");
    }

    fn shut(&self, _is_shut: bool) {}
}

/// Passes messages on between a door and a worker, to the moment of its death. The code of the last one. Nothing if the door has ended
/// the connection before.
fn pass_on_until(door: &UnixStream, device: &UnixStream, at: usize, moment: Moment) -> Option<u32> {
    for number in 0.. {
        let message = Heard::from(door)?;
        let is_last = number == at;
        if is_last && moment == Moment::BeforeItHears {
            return Some(message.word(0));
        }
        message.pass_on(device).ok()?;
        if message.is_answered() {
            let answer = Heard::from(device)?;
            if is_last && moment == Moment::BeforeItAnswers {
                return Some(message.word(0));
            }
            answer.pass_on(door).ok()?;
        }
        if is_last {
            return Some(message.word(0));
        }
    }
    None
}

/// What a worker's route does: it says when the driver is let in.
struct Begins {
    plain: PlainRoute,
    door: Arc<Door>,
    starts: Starts,
}

/// How the driver was let in, each time.
type Starts = Arc<Mutex<Vec<Start>>>;

impl Route for Begins {
    fn started(&mut self, start: Start, memory: &Arc<MemoryTable>) -> io::Result<()> {
        self.plain.started(start, memory)?;
        self.door.began();
        self.starts.lock().expect("no panic under this lock").push(start);
        Ok(())
    }

    fn route(&mut self, request: &Request<'_>, plan: &mut Plan) {
        self.plain.route(request, plan);
    }

    fn end_of_pass(&mut self, plan: &mut Plan) {
        self.plain.end_of_pass(plan);
    }

    fn disk_done(&mut self, ticket: Ticket, result: io::Result<()>, plan: &mut Plan) {
        self.plain.disk_done(ticket, result, plan);
    }
}

fn device(
    place: &Place,
    image: &Arc<Image>,
    door: &Arc<Door>,
    starts: &Starts,
) -> (Device<Begins>, Arc<Entrance>, Journal) {
    let (entrance, journal) = (Entrance::new().unwrap(), Journal::default());
    let mut config = DeviceConfig::new("test-disk", place.socket(), Arc::clone(image));
    config.entrance = Some(Arc::clone(&entrance));
    let route = Box::new(Begins { plain: PlainRoute, door: Arc::clone(door), starts: Arc::clone(starts) });
    let device = Device::start(config, route, VmMemory::new(), Arc::new(journal.clone())).unwrap();
    (device, entrance, journal)
}

type Outcome<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// A guest writes and reads.
fn works(disk: &mut TestDisk, salt: u64) -> Outcome<()> {
    for at in [0, MIB] {
        let bytes = pattern(at, 4096, salt);
        if disk.write(at, &bytes)? != STATUS_OK || disk.read(at, 4096)? != (STATUS_OK, bytes) {
            return Err(format!("what was written at {at} is not what is read, {salt}").into());
        }
    }
    Ok(())
}

/// A guest's driver begins anew, and works. Whoever used the disk before is gone, and the worker that lets it in is told so; one that follows has
/// it go on.
fn begins(mut front_end: FrontEnd, salt: u64, starts: &Starts) -> Outcome<TestDisk> {
    let ram = front_end.ram.clone();
    for queue in &mut front_end.queues {
        *queue = DriverQueue::new(&ram, queue.options())?;
    }
    let known = starts.lock().expect("no panic under this lock").len();
    front_end.start()?;
    let mut disk = TestDisk::new(front_end);
    works(&mut disk, salt)?;
    let starts = starts.lock().expect("no panic under this lock")[known..].to_vec();
    // Where nobody asks for answers, a worker may follow yet for the driver before: the one that died had served that to its end.
    let late = if disk.front_end.asks_for_answers() {
        0
    } else {
        starts.iter().take_while(|start| **start == Start::Resumed).count()
    };
    if starts.get(late) != Some(&Start::Fresh) || starts[late + 1..].contains(&Start::Fresh) {
        return Err(format!("start {salt} of the driver was taken for {starts:?}").into());
    }
    Ok(disk)
}

/// A VMM connects and starts its guest, which works; it is paused, goes on, and is reset in either way.
fn lives(place: &Place, options: FrontEndOptions, starts: &Starts) -> Outcome<()> {
    let mut front_end = FrontEnd::connect(&place.socket(), GuestRam::new(16 * MIB)?, options)?;
    if front_end.size_bytes()? != 16 * MIB {
        return Err("the disk has another size".into());
    }
    let mut disk = begins(front_end, 1, starts)?;
    let bases = disk.front_end.stop()?;
    disk.front_end.start_with_bases(&bases)?;
    works(&mut disk, 2)?;
    disk.front_end.stop()?;
    let mut disk = begins(disk.front_end, 3, starts)?;
    disk.front_end.messages.reset_device()?;
    begins(disk.front_end, 4, starts)?;
    Ok(())
}

/// One life, with these deaths, one after the other. The code of the message of the first one, if so many come.
fn round(deaths: &[(usize, Moment)], options: &FrontEndOptions) -> Option<u32> {
    let place = Arc::new(Place::new(16 * MIB));
    let image = open(&place.image(), CacheMode::Auto);
    round_on(&place, |_| Arc::clone(&image), deaths, options)
}

/// The same, where each worker may find its image as another one.
fn round_on(
    place: &Arc<Place>,
    image: impl Fn(usize) -> Arc<Image>,
    deaths: &[(usize, Moment)],
    options: &FrontEndOptions,
) -> Option<u32> {
    let _ = std::fs::remove_file(place.socket());
    let listener = UnixListener::bind(place.socket()).unwrap();
    let door = Arc::new(Door::open(listener, "test-disk", Shelf::default()).unwrap());
    let starts = Starts::default();
    let (died, has_died): (_, Receiver<Option<u32>>) = channel();
    let (threads, started) = channel();
    let mut devices = Vec::new();
    let mut let_in = |number: usize| {
        let (device, entrance, journal) = device(place, &image(number), &door, &starts);
        devices.push(device);
        let (died, threads) = (died.clone(), threads.clone());
        door.worker(Worker { entrance, dies: deaths.get(number).copied(), died, threads });
        journal
    };
    let mut journal = let_in(0);
    let (tell, told) = channel();
    let (of_vmm, place_of_vmm, starts_of_vmm) = (options.clone(), Arc::clone(place), Arc::clone(&starts));
    let vmm = std::thread::spawn(move || {
        let _ = tell.send(lives(&place_of_vmm, of_vmm, &starts_of_vmm).map_err(|error| error.to_string()));
    });
    let (mut first, mut dead, begun) = (None, 0, Instant::now());
    let outcome = loop {
        if let Ok(code) = has_died.try_recv() {
            if code.is_none() {
                // It was given up because it is gone, and that is told, too.
                continue;
            }
            first = first.or(code);
            dead += 1;
            // It lives in this process: it does nothing more once it has noticed.
            while journal.all().contains(&Told::Connected) && !journal.all().contains(&Told::Disconnected) {
                assert!(begun.elapsed() < ANSWER_TIMEOUT, "its end is not noticed");
                std::thread::sleep(Duration::from_millis(1));
            }
            door.worker_gone();
            journal = let_in(dead);
        }
        match told.recv_timeout(Duration::from_millis(1)) {
            Ok(outcome) => break outcome,
            Err(_) if vmm.is_finished() => break Err("its thread has failed".to_owned()),
            Err(_) if begun.elapsed() > ANSWER_TIMEOUT => break Err("it waits for ever".to_owned()),
            Err(_) => {}
        }
    };
    // The message of the death may be the last one, of which the VMM does not wait for anything.
    first = first.or_else(|| has_died.try_iter().flatten().next());
    assert_eq!(outcome, Ok(()), "deaths at {deaths:?}, the first with message {first:?}, {options:?}");
    vmm.join().expect("no panic");
    drop((door, devices));
    started.try_iter().for_each(|thread| thread.join().expect("no panic"));
    first
}

fn each_message(options: &FrontEndOptions) {
    for moment in [Moment::BeforeItHears, Moment::BeforeItAnswers, Moment::AfterThat] {
        let codes: Vec<u32> = (0..MESSAGES_MAX).map_while(|at| round(&[(at, moment)], options)).collect();
        assert!(codes.len() > 50 && codes.len() < MESSAGES_MAX, "{moment:?}: {codes:?}");
        // From the first question over the rings that are enabled to the last reset.
        assert!([1, 15, 16, 21, 2, 12, 18, 11, 34].iter().all(|code| codes.contains(code)), "{moment:?}: {codes:?}");
        // The next one dies at some message of what it is told.
        for at in 0..codes.len() {
            let then = [0, at / 2, 1, at][at % 4];
            round(&[(at, moment), (then, Moment::BeforeItAnswers), (at.abs_diff(then), moment)], options);
        }
    }
}

#[test]
fn a_vmm_that_asks_for_answers_lives_though_its_worker_dies_at_any_message() {
    each_message(&FrontEndOptions { need_reply: true, ..FrontEndOptions::default() });
}

#[test]
fn and_one_that_does_not() {
    each_message(&FrontEndOptions::default());
}

#[test]
fn and_one_with_more_queues_and_regions() {
    each_message(&FrontEndOptions { queues: 2, memory_slots: true, need_reply: true, ..FrontEndOptions::default() });
}

/// Storage does not take discards any more when the next worker comes: what the guest was told of when it began stays so for it.
#[test]
fn a_guest_that_was_told_of_discards_goes_on_where_storage_takes_none() {
    let place = Arc::new(Place::new(16 * MIB));
    let storage = match TestStorage::new(&place.image()) {
        Ok(storage) => storage,
        Err(error) => return eprintln!("left out: {error}"),
    };
    let opened = |path: &std::path::Path| Arc::new(Image::open(path, ImageOptions::default()).unwrap());
    let images = [opened(&place.image()), opened(&storage.image())];
    assert_eq!([images[0].discard(), images[1].discard()], [true, false]);
    let options = FrontEndOptions { need_reply: true, ..FrontEndOptions::default() };
    let of = |number: usize| Arc::clone(&images[number.min(1)]);
    for at in [15, 20, 30, 40] {
        assert!(round_on(&place, of, &[(at, Moment::AfterThat)], &options).is_some());
    }
}
