//! One modelled disk on the real clock, for any number of virtual ones: each gets a region of it, as if it were a
//! partition, and all wait for the same arm.
//!
//! One thread does everything: it waits for records and for the model's next event, whichever comes first. The model's
//! own time is what counts: a thread that wakes late completes late, but the arm has gone on meanwhile.

use crate::completion::{Completion, Totals};
use crate::model::Model;
use disk_model_client::protocol::{FULL, RECORD_BYTES, Record, WELCOME};
use disk_model_client::{Client, Error, Profile, Request};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Instant;

/// Virtual disks on one modelled disk.
const CLIENTS_MAX: usize = 64;
/// Requests of one virtual disk under way.
const UNDER_WAY_MAX: u64 = 4096;

/// What a server is made from.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// The drive.
    pub profile: Profile,
    /// Of the model.
    pub seed: u64,
    /// Seconds of this machine for a second of the model: above 1 the disk is slower than it was, below 1 faster.
    pub time_scale: f64,
    /// Where others can connect; removed at the end.
    pub socket: Option<PathBuf>,
}

#[derive(Debug, Default)]
struct Shared {
    arriving: Vec<UnixStream>,
    totals: Totals,
    /// What the pace is to be from now on.
    time_scale: Option<f64>,
    stop: bool,
}

/// A running modelled disk; dropping it ends it.
#[derive(Debug)]
pub struct Server {
    shared: Arc<Mutex<Shared>>,
    waker: UnixStream,
    thread: Option<JoinHandle<()>>,
    socket: Option<PathBuf>,
}

impl Server {
    /// Starts the thread, and listens.
    ///
    /// # Errors
    /// When the socket cannot be made, or the system refuses a thread or a descriptor.
    pub fn start(options: ServerOptions) -> Result<Self, Error> {
        let model = Model::new(options.profile, options.seed);
        Self::start_with(model, options)
    }

    /// The same with a model that was made already: a scaled one.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub fn start_with(model: Model, options: ServerOptions) -> Result<Self, Error> {
        let listener = match &options.socket {
            Some(path) => {
                let listen = |path: &PathBuf| {
                    let listener = UnixListener::bind(path)?;
                    listener.set_nonblocking(true)?;
                    Ok(listener)
                };
                Some(listen(path).map_err(|source| Error::Listen { path: path.clone(), source })?)
            }
            None => None,
        };
        let (waker, woken) = UnixStream::pair()?;
        woken.set_nonblocking(true)?;
        waker.set_nonblocking(true)?;
        let shared = Arc::new(Mutex::new(Shared::default()));
        let worker = Worker {
            model,
            clock: Clock::new(options.time_scale),
            listener,
            woken,
            shared: Arc::clone(&shared),
            clients: Vec::new(),
            regions: Vec::new(),
            next_tag: 0,
            owners: HashMap::new(),
        };
        let thread = std::thread::Builder::new().name("disk-model".to_owned()).spawn(move || worker.run())?;
        Ok(Server { shared, waker, thread: Some(thread), socket: options.socket })
    }

    /// A virtual disk of `size_bytes` in this process.
    ///
    /// # Errors
    /// When the modelled disk is full.
    pub fn connect(&self, size_bytes: u64) -> Result<Client, Error> {
        let (ours, theirs) = UnixStream::pair()?;
        self.shared.lock().expect("no panic under this lock").arriving.push(theirs);
        self.wake();
        Client::over(ours, size_bytes)
    }

    /// What the modelled disk did so far.
    pub fn totals(&self) -> Totals {
        self.shared.lock().expect("no panic under this lock").totals
    }

    /// Changes the pace from now on, whatever is under way; see [`ServerOptions::time_scale`].
    pub fn set_time_scale(&self, time_scale: f64) {
        self.shared.lock().expect("no panic under this lock").time_scale = Some(time_scale);
        self.wake();
    }

    fn wake(&self) {
        // A full pipe wakes as well.
        let _ = (&self.waker).write(&[1]);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.shared.lock().expect("no panic under this lock").stop = true;
        self.wake();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        if let Some(path) = &self.socket {
            let _ = std::fs::remove_file(path);
        }
    }
}

/// The model's time: that of this machine, stretched.
struct Clock {
    /// When the present pace began, and the model's time then.
    since: Instant,
    since_ns: u64,
    scale: f64,
}

impl Clock {
    fn new(scale: f64) -> Self {
        Clock { since: Instant::now(), since_ns: 0, scale: scale.clamp(1e-6, 1e6) }
    }

    /// The model's time never jumps: only its pace is another.
    fn set_scale(&mut self, scale: f64) {
        let (now, since_ns) = (Instant::now(), self.now_ns());
        *self = Clock { since: now, since_ns, scale: scale.clamp(1e-6, 1e6) };
    }

    fn now_ns(&self) -> u64 {
        self.since_ns + (self.since.elapsed().as_nanos() as f64 / self.scale) as u64
    }

    /// Until `at_ns` of the model, for `poll`.
    fn until(&self, at_ns: u64) -> Timespec {
        let left_ns = (at_ns.saturating_sub(self.now_ns()) as f64 * self.scale).min(1e15) as i64;
        Timespec { tv_sec: left_ns / 1_000_000_000, tv_nsec: left_ns % 1_000_000_000 }
    }
}

struct Connection {
    id: u64,
    stream: UnixStream,
    part: Vec<u8>,
    /// Where its disk begins on the modelled one, and how long it is; none before its greeting.
    region: Option<(u64, u64)>,
    under_way: u64,
    gone: bool,
}

struct Worker {
    model: Model,
    clock: Clock,
    listener: Option<UnixListener>,
    woken: UnixStream,
    shared: Arc<Mutex<Shared>>,
    clients: Vec<Connection>,
    /// Who has which region, sorted by place.
    regions: Vec<(u64, u64, u64)>,
    next_tag: u64,
    /// Of the model's tags: whose they are, and what they are called there.
    owners: HashMap<u64, (u64, u64)>,
}

impl Worker {
    fn run(mut self) {
        let mut completed = Vec::new();
        loop {
            let stop = {
                let mut shared = self.shared.lock().expect("no panic under this lock");
                for stream in std::mem::take(&mut shared.arriving) {
                    add_client(&mut self.clients, &mut self.next_tag, stream);
                }
                if let Some(scale) = shared.time_scale.take() {
                    self.clock.set_scale(scale);
                }
                shared.stop
            };
            if stop {
                return;
            }
            if let Err(error) = self.wait() {
                log::error!("the disk model cannot wait for requests and ends: {error}");
                return;
            }
            self.accept();
            for index in 0..self.clients.len() {
                self.read(index);
            }
            self.model.advance(self.clock.now_ns(), &mut completed);
            // Before anybody learns that something is done: who then asks finds it counted.
            self.shared.lock().expect("no panic under this lock").totals = self.model.totals();
            self.answer(&mut completed);
            self.forget_gone();
        }
    }

    fn wait(&mut self) -> io::Result<()> {
        let mut list = vec![PollFd::new(&self.woken, PollFlags::IN)];
        if let Some(listener) = &self.listener {
            list.push(PollFd::new(listener, PollFlags::IN));
        }
        list.extend(self.clients.iter().map(|client| PollFd::new(&client.stream, PollFlags::IN)));
        let timeout = self.model.next_event_ns().map(|at| self.clock.until(at));
        match poll(&mut list, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let mut buffer = [0; 64];
        while matches!((&self.woken).read(&mut buffer), Ok(count) if count > 0) {}
        Ok(())
    }

    fn accept(&mut self) {
        let Some(listener) = &self.listener else { return };
        while let Ok((stream, _)) = listener.accept() {
            add_client(&mut self.clients, &mut self.next_tag, stream);
        }
    }

    fn read(&mut self, index: usize) {
        let mut buffer = [0; 64 * RECORD_BYTES];
        let client = &mut self.clients[index];
        match (&client.stream).read(&mut buffer) {
            Ok(0) => client.gone = true,
            Ok(count) => client.part.extend_from_slice(&buffer[..count]),
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
            Err(_) => client.gone = true,
        }
        let whole = client.part.len() / RECORD_BYTES * RECORD_BYTES;
        let records: Vec<u8> = client.part.drain(..whole).collect();
        for bytes in records.chunks_exact(RECORD_BYTES) {
            let record = Record::from_bytes(bytes.try_into().expect("a chunk of that size"));
            if !self.take(index, record) {
                log::warn!("a client of the disk model broke the protocol and is dropped");
                self.clients[index].gone = true;
                return;
            }
        }
    }

    /// Takes one record; false if it makes no sense.
    fn take(&mut self, index: usize, record: Option<Record>) -> bool {
        let now = self.clock.now_ns();
        let client = &mut self.clients[index];
        match (record, client.region) {
            (Some(Record::Greeting { size_bytes }), None) => {
                let room = room(&self.regions, self.model.capacity_bytes(), size_bytes);
                let answer = if room.is_some() { WELCOME } else { FULL };
                client.gone |= (&client.stream).write_all(&answer.to_le_bytes()).is_err();
                if let Some(start) = room {
                    client.region = Some((start, size_bytes));
                    self.regions.push((start, start + size_bytes, client.id));
                    self.regions.sort_unstable();
                }
                true
            }
            (Some(Record::Request(request)), Some((start, size))) => {
                let inside = request.offset.checked_add(request.len).is_some_and(|end| end <= size);
                if !inside || client.under_way >= UNDER_WAY_MAX {
                    return false;
                }
                client.under_way += 1;
                self.next_tag += 1;
                self.owners.insert(self.next_tag, (client.id, request.tag));
                let request = Request { tag: self.next_tag, offset: start + request.offset, ..request };
                self.model.submit(now, request);
                true
            }
            _ => false,
        }
    }

    fn answer(&mut self, completed: &mut Vec<Completion>) {
        for completion in completed.drain(..) {
            let Some((id, tag)) = self.owners.remove(&completion.tag) else { continue };
            let Some(client) = self.clients.iter_mut().find(|client| client.id == id) else { continue };
            client.under_way -= 1;
            // So few answers can be under way that a socket with no room for one belongs to a client that hangs.
            client.gone |= (&client.stream).write_all(&tag.to_le_bytes()).is_err();
        }
    }

    fn forget_gone(&mut self) {
        for client in self.clients.iter().filter(|client| client.gone) {
            self.regions.retain(|(_, _, id)| *id != client.id);
        }
        self.clients.retain(|client| !client.gone);
    }
}

fn add_client(clients: &mut Vec<Connection>, next_id: &mut u64, stream: UnixStream) {
    if clients.len() >= CLIENTS_MAX || stream.set_nonblocking(true).is_err() {
        log::warn!("the disk model has {CLIENTS_MAX} disks already, and refuses another");
        return;
    }
    *next_id += 1;
    clients.push(Connection { id: *next_id, stream, part: Vec::new(), region: None, under_way: 0, gone: false });
}

/// The first place with room for `size` bytes.
fn room(regions: &[(u64, u64, u64)], capacity: Option<u64>, size: u64) -> Option<u64> {
    let mut start = 0u64;
    for &(begin, end, _) in regions {
        if begin.saturating_sub(start) >= size && begin > start {
            break;
        }
        start = start.max(end);
    }
    let end = start.checked_add(size)?;
    (end <= capacity.unwrap_or(u64::MAX)).then_some(start)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_pace_takes_the_time_that_was() {
        let pause = || std::thread::sleep(std::time::Duration::from_millis(2));
        let mut clock = Clock::new(1e-3);
        pause();
        let before = clock.now_ns();
        assert!(before >= 2_000_000_000, "two milliseconds are two seconds: {before}");
        clock.set_scale(1e6);
        let at = clock.now_ns();
        pause();
        assert!(at >= before && clock.now_ns() - at < 1_000_000_000, "and now next to nothing");
    }

    #[test]
    fn regions_are_side_by_side_and_gaps_are_used_again() {
        assert_eq!(room(&[], Some(100), 100), Some(0));
        assert_eq!(room(&[], Some(100), 101), None);
        let regions = [(0, 10, 1), (30, 40, 2)];
        assert_eq!(room(&regions, Some(100), 20), Some(10));
        assert_eq!(room(&regions, Some(100), 21), Some(40));
        assert_eq!(room(&regions, Some(60), 21), None);
    }
}
