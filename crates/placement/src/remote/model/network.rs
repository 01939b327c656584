//! The network between a client and its server, in the test's hands: a proxy that delays, swallows, resets, garbles, or is
//! not there.

use rustix::net;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// What the network does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weather {
    /// Passes everything on.
    Good,
    /// Passes it on late, by milliseconds.
    Slow(u64),
    /// Passes on so many bytes a second from client to server, on each connection that is made in it, and holds few in between.
    Narrow(u64),
    /// Takes everything and passes nothing on: a half-open connection.
    Swallows,
    /// Nobody listens; connections that are open are reset.
    Refuses,
    /// The server says what means nothing.
    Garbles,
}

/// What a narrow link holds.
const NARROW_BUFFER_BYTES: usize = 4 << 10;

#[derive(Debug)]
struct Shared {
    weather: Weather,
    /// Counts resets: connections made before the last one are dead.
    generation: u64,
    to: Option<SocketAddr>,
    open: Vec<TcpStream>,
    ends: bool,
    /// What clients have said, in pieces, and before which of them nothing is passed on.
    said: usize,
    stop_before: Option<usize>,
    is_stopped: bool,
}

#[derive(Debug)]
pub struct Network {
    shared: Arc<Mutex<Shared>>,
    pub address: SocketAddr,
    /// Keeps the port where nobody listens: other tests look for free ones meanwhile.
    _port: OwnedFd,
}

impl Network {
    pub fn new() -> Self {
        let (port, address) = keep_port().expect("a port");
        let listener = TcpListener::bind(address).expect("the port that is kept");
        let shared = Shared {
            weather: Weather::Good,
            generation: 0,
            to: None,
            open: Vec::new(),
            ends: false,
            said: 0,
            stop_before: None,
            is_stopped: false,
        };
        let shared = Arc::new(Mutex::new(shared));
        let of_thread = Arc::clone(&shared);
        std::thread::spawn(move || listen(listener, address, &of_thread));
        Network { shared, address, _port: port }
    }

    fn with<T>(&self, with: impl FnOnce(&mut Shared) -> T) -> T {
        with(&mut self.shared.lock().expect("no panic under this lock"))
    }

    /// Where the server is, if it is.
    pub fn lead_to(&self, to: Option<SocketAddr>) {
        self.with(|shared| shared.to = to);
    }

    pub fn set(&self, weather: Weather) {
        self.with(|shared| {
            shared.weather = weather;
            if weather == Weather::Refuses {
                reset_all(shared);
            }
        });
    }

    /// Stops the client before the server hears so much of it, counted from now.
    pub fn stop_before(&self, said: usize) {
        self.with(|shared| (shared.said, shared.stop_before) = (0, Some(said)));
    }

    /// How many pieces clients have said.
    pub fn said(&self) -> usize {
        self.with(|shared| shared.said)
    }

    pub fn is_stopped(&self) -> bool {
        self.with(|shared| shared.is_stopped)
    }

    pub fn go_on(&self) {
        self.with(|shared| shared.stop_before = None);
    }

    /// Resets every connection. When this has returned, nothing that was on its way arrives.
    pub fn reset(&self) {
        self.with(reset_all);
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        self.with(|shared| {
            shared.ends = true;
            reset_all(shared);
        });
    }
}

/// A port that nobody else is given, and that a listener of ours can be bound to: a socket is bound to it and does not listen.
fn keep_port() -> rustix::io::Result<(OwnedFd, SocketAddr)> {
    let port = net::socket(net::AddressFamily::INET, net::SocketType::STREAM, None)?;
    net::sockopt::set_socket_reuseaddr(&port, true)?;
    net::bind(&port, &SocketAddr::from(([127, 0, 0, 1], 0)))?;
    let address = SocketAddr::try_from(net::getsockname(&port)?)?;
    Ok((port, address))
}

fn reset_all(shared: &mut Shared) {
    shared.generation += 1;
    for stream in shared.open.drain(..) {
        let _ = net::sockopt::set_socket_linger(&stream, Some(Duration::ZERO));
        let _ = stream.shutdown(Shutdown::Both);
    }
}

fn listen(listener: TcpListener, address: SocketAddr, shared: &Arc<Mutex<Shared>>) {
    let mut listener = Some(listener);
    loop {
        let (weather, to) = {
            let shared = shared.lock().expect("no panic under this lock");
            if shared.ends {
                return;
            }
            (shared.weather, shared.to)
        };
        if weather == Weather::Refuses {
            listener = None;
        } else if listener.is_none() {
            listener = TcpListener::bind(address).ok();
        }
        let accepted = listener.as_ref().and_then(|listener| {
            listener.set_nonblocking(true).ok()?;
            listener.accept().ok()
        });
        let Some((near, _)) = accepted else {
            std::thread::sleep(Duration::from_millis(1));
            continue;
        };
        let _ = near.set_nonblocking(false);
        let _ = near.set_nodelay(true);
        if matches!(weather, Weather::Narrow(_)) {
            let _ = net::sockopt::set_socket_recv_buffer_size(&near, NARROW_BUFFER_BYTES);
        }
        let Some(Ok(far)) = to.map(TcpStream::connect) else { continue };
        let _ = far.set_nodelay(true);
        let mut state = shared.lock().expect("no panic under this lock");
        let generation = state.generation;
        for (from, into, is_to_client) in [(&near, &far, false), (&far, &near, true)] {
            let (Ok(from), Ok(into)) = (from.try_clone(), into.try_clone()) else { continue };
            let shared = Arc::clone(shared);
            let piece = if matches!(weather, Weather::Narrow(_)) { NARROW_BUFFER_BYTES } else { 64 << 10 };
            std::thread::spawn(move || pass_on(from, into, is_to_client, generation, piece, &shared));
        }
        state.open.extend([near, far]);
    }
}

/// Whether what a client has just said is not passed on yet; what is, is counted.
fn is_stopped(shared: &Mutex<Shared>) -> bool {
    let mut shared = shared.lock().expect("no panic under this lock");
    shared.is_stopped = shared.stop_before == Some(shared.said) && !shared.ends;
    shared.said += usize::from(!shared.is_stopped);
    shared.is_stopped
}

fn pass_on(
    mut from: TcpStream,
    mut into: TcpStream,
    is_to_client: bool,
    generation: u64,
    piece: usize,
    shared: &Mutex<Shared>,
) {
    let mut bytes = vec![0; piece];
    while let Ok(got @ 1..) = from.read(&mut bytes) {
        let weather = shared.lock().expect("no panic under this lock").weather;
        if let Weather::Slow(ms) = weather {
            std::thread::sleep(Duration::from_millis(ms));
        }
        if let (Weather::Narrow(rate), false) = (weather, is_to_client) {
            std::thread::sleep(Duration::from_secs_f64(got as f64 / rate as f64));
        }
        while !is_to_client && is_stopped(shared) {
            std::thread::sleep(Duration::from_millis(1));
        }
        // Held while writing: after a reset nothing arrives any more.
        let shared = shared.lock().expect("no panic under this lock");
        if shared.generation != generation {
            break;
        }
        match shared.weather {
            Weather::Swallows => continue,
            Weather::Garbles if is_to_client => bytes[..got].fill(0xa5),
            _ => {}
        }
        let _ = into.set_write_timeout(Some(Duration::from_secs(2)));
        if into.write_all(&bytes[..got]).is_err() {
            break;
        }
    }
    // Where everything is swallowed, the end of a connection is as well.
    while {
        let shared = shared.lock().expect("no panic under this lock");
        shared.weather == Weather::Swallows && shared.generation == generation && !shared.ends
    } {
        std::thread::sleep(Duration::from_millis(1));
    }
    let _ = into.shutdown(Shutdown::Both);
    let _ = from.shutdown(Shutdown::Both);
}
