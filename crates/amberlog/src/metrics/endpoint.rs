//! Where Prometheus comes to look: HTTP on a Unix socket or a TCP address, off unless the configuration names one.
//!
//! It knows one document and no names or passwords: bind it to this machine, or to a network whose members may know how busy the
//! disks are. Must never: let somebody who comes and says nothing, or takes no answer, keep others away, or the daemon from its work: where
//! there is no place for the next, the oldest of those goes. Failure story: a request that is no request gets an answer that says so, and
//! the connection ends; a document that cannot be made is 500.

use super::text::{Format, render};
use anyhow::Context;
use serde_json::Value;
use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// Scrapes at a time.
const SCRAPES_MAX: usize = 8;
/// Bytes of a request's head.
const HEAD_BYTES_MAX: usize = 8 << 10;
/// How long a request may take, all of it, and the way of its answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// An honest scraper has asked within this time.
const GRACE: Duration = Duration::from_millis(500);
/// Between two looks whether there is a place.
const PAUSE: Duration = Duration::from_millis(20);
/// Bytes that are written with one call: each of the kernel's buffers would have the time of the call anew.
const PART_BYTES: usize = 16 << 10;

/// One place where it listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// A Unix socket.
    Unix(PathBuf),
    /// An address and port.
    Tcp(String),
}

impl std::str::FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.starts_with('/') {
            return Ok(Address::Unix(text.into()));
        }
        let has_port =
            text.rsplit_once(':').is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok());
        if has_port {
            Ok(Address::Tcp(text.to_owned()))
        } else {
            Err(format!(
                "metrics: '{text}' is neither a socket's path (/run/amberlog/metrics.sock) nor an address (127.0.0.1:9469)"
            ))
        }
    }
}

/// What answers the question for `status`.
pub type Source = Arc<dyn Fn() -> Value + Send + Sync>;

/// The sockets; a Unix socket's name is removed when this is dropped.
#[derive(Debug)]
pub struct Endpoint {
    sockets: Vec<PathBuf>,
    addresses: Vec<std::net::SocketAddr>,
}

trait Stream: Send + Sync {
    fn read(&self, bytes: &mut [u8]) -> io::Result<usize>;
    fn write(&self, bytes: &[u8]) -> io::Result<usize>;
    fn set_patience(&self, time: Duration) -> io::Result<()>;
    /// Whoever waits for it waits no more.
    fn end(&self);
}

macro_rules! stream {
    ($kind:ty) => {
        impl Stream for $kind {
            fn read(&self, bytes: &mut [u8]) -> io::Result<usize> {
                Read::read(&mut &*self, bytes)
            }

            fn write(&self, bytes: &[u8]) -> io::Result<usize> {
                Write::write(&mut &*self, bytes)
            }

            fn set_patience(&self, time: Duration) -> io::Result<()> {
                self.set_read_timeout(Some(time))?;
                self.set_write_timeout(Some(time))
            }

            fn end(&self) {
                // It may have gone first.
                let _ = self.shutdown(std::net::Shutdown::Both);
            }
        }
    };
}

stream!(TcpStream);
stream!(UnixStream);

/// Waits for whoever comes next.
type Accept = Box<dyn Fn() -> io::Result<Arc<dyn Stream>> + Send>;

impl Endpoint {
    /// Listens at all addresses, and answers in threads of its own for as long as the process lives. `open` gives a socket to those
    /// who may connect.
    ///
    /// # Errors
    /// When an address is taken, is not this machine's, or may not be used.
    pub fn start(
        addresses: &[Address],
        open: impl Fn(&Path) -> anyhow::Result<()>,
        source: &Source,
    ) -> anyhow::Result<Self> {
        let mut endpoint = Endpoint { sockets: Vec::new(), addresses: Vec::new() };
        // All or none: a thread that accepts keeps its address for the life of the process.
        let mut all: Vec<Accept> = Vec::new();
        for address in addresses {
            all.push(match address {
                Address::Tcp(name) => {
                    let listener =
                        TcpListener::bind(name).with_context(|| format!("listening at {name} for metrics"))?;
                    endpoint.addresses.push(listener.local_addr()?);
                    Box::new(move || Ok(Arc::new(listener.accept()?.0) as Arc<dyn Stream>))
                }
                Address::Unix(path) => {
                    let listener = listen(path)?;
                    endpoint.sockets.push(path.clone());
                    open(path)?;
                    Box::new(move || Ok(Arc::new(listener.accept()?.0) as Arc<dyn Stream>))
                }
            });
        }
        let places = Arc::new(Places::default());
        for accept in all {
            let (places, source) = (Arc::clone(&places), Arc::clone(source));
            std::thread::Builder::new().name("metrics".to_owned()).spawn(move || {
                loop {
                    let Ok(stream) = accept() else {
                        // Out of descriptors, perhaps: not to be tried without a pause.
                        std::thread::sleep(Duration::from_millis(100));
                        continue;
                    };
                    let place = Place::take(&places, &stream);
                    let source = Arc::clone(&source);
                    let _ = std::thread::Builder::new().name("scrape".to_owned()).spawn(move || {
                        if let Err(error) = answer(&*stream, place, &source) {
                            log::debug!("a scrape ended early: {error}");
                        }
                    });
                }
            })?;
        }
        Ok(endpoint)
    }

    /// The TCP addresses, with the ports that were chosen.
    pub fn addresses(&self) -> &[std::net::SocketAddr] {
        &self.addresses
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        for path in &self.sockets {
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Listens at a Unix socket; one that nobody listens at any more is replaced.
fn listen(path: &Path) -> anyhow::Result<UnixListener> {
    let of = || format!("listening at {} for metrics", path.display());
    match UnixListener::bind(path) {
        Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => {
            use std::os::unix::fs::FileTypeExt;
            let is_socket = std::fs::symlink_metadata(path).is_ok_and(|metadata| metadata.file_type().is_socket());
            anyhow::ensure!(is_socket, "{}: something that is no socket is there; remove it", of());
            anyhow::ensure!(
                UnixStream::connect(path).is_err(),
                "{}: another process listens there; name another path",
                of()
            );
            std::fs::remove_file(path).with_context(of)?;
            UnixListener::bind(path).with_context(of)
        }
        other => other.with_context(of),
    }
}

/// Somebody who has connected.
struct Scraper {
    stream: Arc<dyn Stream>,
    since: Instant,
    /// It has asked, and its answer is made: it is not waited for.
    is_answered: bool,
}

/// All of them, by number, which is by age.
#[derive(Default)]
struct Places(Mutex<(u64, BTreeMap<u64, Scraper>)>);

/// One scrape's place among those at once.
struct Place {
    places: Arc<Places>,
    number: u64,
}

impl Places {
    fn lock(&self) -> MutexGuard<'_, (u64, BTreeMap<u64, Scraper>)> {
        self.0.lock().expect("no panic under this lock")
    }
}

impl Place {
    /// Waits for one: where there is none, whoever has had his time and is waited for makes room. None where all are being answered.
    fn take(places: &Arc<Places>, stream: &Arc<dyn Stream>) -> Option<Self> {
        loop {
            let mut all = places.lock();
            if all.1.len() >= SCRAPES_MAX {
                let (number, since) = all.1.iter().find(|(_, one)| !one.is_answered).map(|(n, one)| (*n, one.since))?;
                if since.elapsed() < GRACE {
                    drop(all);
                    std::thread::sleep(PAUSE);
                    continue;
                }
                if let Some(gone) = all.1.remove(&number) {
                    gone.stream.end();
                }
            }
            all.0 += 1;
            let number = all.0;
            all.1.insert(number, Scraper { stream: Arc::clone(stream), since: Instant::now(), is_answered: false });
            return Some(Place { places: Arc::clone(places), number });
        }
    }

    fn set_answered(&self, is_answered: bool) {
        if let Some(scraper) = self.places.lock().1.get_mut(&self.number) {
            scraper.is_answered = is_answered;
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.places.lock().1.remove(&self.number);
    }
}

/// The head of a request, up to its empty line; none if it is too long, or does not come in time.
fn head(stream: &dyn Stream, deadline: Instant) -> io::Result<Option<String>> {
    let mut bytes = Vec::new();
    let mut part = [0; 1024];
    while !bytes.windows(4).any(|end| end == b"\r\n\r\n") {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() || bytes.len() > HEAD_BYTES_MAX {
            return Ok(None);
        }
        stream.set_patience(left)?;
        match stream.read(&mut part)? {
            0 => return Ok(None),
            got => bytes.extend_from_slice(&part[..got]),
        }
    }
    Ok(String::from_utf8(bytes).ok())
}

/// Writes all of it until some moment, however slowly it is taken.
fn write_until(stream: &dyn Stream, mut bytes: &[u8], deadline: Instant) -> io::Result<()> {
    while !bytes.is_empty() {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.set_patience(left)?;
        match stream.write(&bytes[..bytes.len().min(PART_BYTES)]) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(taken) => bytes = &bytes[taken..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// What is answered to the head of a request: status line, type, document.
fn response(head: Option<&str>, source: &Source) -> (&'static str, &'static str, String) {
    const PLAIN: &str = "text/plain; charset=utf-8";
    let say = |status, text: &str| (status, PLAIN, format!("{text}\n"));
    let Some(head) = head else { return say("400 Bad Request", "this is no request") };
    let mut words = head.lines().next().unwrap_or_default().split(' ');
    let (method, target) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    if !words.next().is_some_and(|version| version.starts_with("HTTP/1.")) {
        return say("400 Bad Request", "this is no request of HTTP 1");
    }
    if !["GET", "HEAD"].contains(&method) {
        return say("405 Method Not Allowed", "there is only GET");
    }
    if !["/metrics", "/"].contains(&target.split('?').next().unwrap_or_default()) {
        return say("404 Not Found", "metrics are at /metrics");
    }
    let accepts_open_metrics = head.lines().any(|line| {
        line.split_once(':').is_some_and(|(name, value)| {
            name.eq_ignore_ascii_case("accept") && value.to_ascii_lowercase().contains("application/openmetrics-text")
        })
    });
    let (format, kind) = match accepts_open_metrics {
        true => (Format::OpenMetrics, "application/openmetrics-text; version=1.0.0; charset=utf-8"),
        false => (Format::Plain, "text/plain; version=0.0.4; charset=utf-8"),
    };
    let status = source();
    match status["error"].as_str() {
        Some(error) => say("500 Internal Server Error", error),
        None => ("200 OK", kind, render(&status, format)),
    }
}

fn answer(stream: &dyn Stream, place: Option<Place>, source: &Source) -> io::Result<()> {
    let (status, kind, document) = if let Some(place) = &place {
        let head = head(stream, Instant::now() + PATIENCE)?;
        place.set_answered(true);
        let (status, kind, document) = response(head.as_deref(), source);
        place.set_answered(false);
        let is_head = head.is_some_and(|head| head.starts_with("HEAD "));
        (status, kind, if is_head { String::new() } else { document })
    } else {
        ("503 Service Unavailable", "text/plain; charset=utf-8", "too many ask at once\n".to_owned())
    };
    let answer = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{document}",
        document.len()
    );
    write_until(stream, answer.as_bytes(), Instant::now() + PATIENCE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn source() -> Source {
        Arc::new(|| json!({"vms": [{"vm": "db", "state": "waiting", "disks": []}]}))
    }

    fn ask(stream: &mut (impl Read + Write), request: &str) -> String {
        stream.write_all(request.as_bytes()).expect("asked");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("answered");
        answer
    }

    #[test]
    fn addresses_are_read() {
        assert_eq!("/run/m.sock".parse(), Ok(Address::Unix("/run/m.sock".into())));
        assert_eq!("[::1]:9469".parse(), Ok(Address::Tcp("[::1]:9469".into())));
        for text in ["", "9469", ":9469", "m.sock", "host:port", "host:70000"] {
            assert!(text.parse::<Address>().is_err(), "{text}");
        }
    }

    /// One that is taken leaves no thread with the others: when that was mended, all can be had.
    #[test]
    fn an_address_that_is_taken_keeps_no_other_one() {
        let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
        let free = TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("its address").to_string();
        let second = taken.local_addr().expect("its address").to_string();
        let addresses = [Address::Tcp(free), Address::Tcp(second)];
        assert!(Endpoint::start(&addresses, |_| Ok(()), &source()).is_err());
        drop(taken);
        let endpoint = Endpoint::start(&addresses, |_| Ok(()), &source()).expect("both are free");
        assert_eq!(endpoint.addresses().len(), 2);
    }

    #[test]
    fn it_answers_at_both_kinds_of_sockets_and_removes_its_own() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("metrics.sock");
        drop(UnixListener::bind(&path).expect("one that nobody listens at any more"));
        let addresses = [Address::Unix(path.clone()), Address::Tcp("127.0.0.1:0".to_owned())];
        let endpoint = Endpoint::start(&addresses, |_| Ok(()), &source()).expect("started");
        let mut unix = UnixStream::connect(&path).expect("connected");
        let plain = ask(&mut unix, "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
        assert!(plain.starts_with("HTTP/1.1 200 OK\r\n") && plain.contains("version=0.0.4"), "{plain}");
        assert!(plain.contains("amberlog_vm_state{vm=\"db\",state=\"waiting\"} 1\n"), "{plain}");
        let mut tcp = TcpStream::connect(endpoint.addresses()[0]).expect("connected");
        let open = ask(&mut tcp, "GET / HTTP/1.1\r\nACCEPT: application/openmetrics-text;version=1.0.0\r\n\r\n");
        assert!(open.contains("openmetrics-text; version=1.0.0") && open.ends_with("# EOF\n"), "{open}");
        for (request, status) in [
            ("GET /other HTTP/1.1\r\n\r\n", "404"),
            ("POST /metrics HTTP/1.1\r\n\r\n", "405"),
            ("hello\r\n\r\n", "400"),
        ] {
            let mut unix = UnixStream::connect(&path).expect("connected");
            let answer = ask(&mut unix, request);
            assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{request}: {answer}");
        }
        let mut unix = UnixStream::connect(&path).expect("connected");
        let head = ask(&mut unix, "HEAD /metrics HTTP/1.1\r\n\r\n");
        assert!(head.starts_with("HTTP/1.1 200") && head.ends_with("\r\n\r\n"), "{head}");
        let second = Endpoint::start(&addresses[..1], |_| Ok(()), &source()).expect_err("it is taken");
        assert!(format!("{second:#}").contains("another process listens there"), "{second:#}");
        drop(endpoint);
        assert!(!path.exists());
    }

    /// A connection on which nothing is waited for without end: a fault is to be seen, not waited for.
    fn connected(path: &Path) -> UnixStream {
        let stream = UnixStream::connect(path).expect("connected");
        stream.set_read_timeout(Some(Duration::from_secs(30))).expect("set");
        stream
    }

    /// What a request is answered; empty if it was sent away before it had asked.
    fn told(path: &Path) -> String {
        let mut stream = connected(path);
        let _ = stream.write_all(b"GET / HTTP/1.1\r\n\r\n");
        let mut bytes = Vec::new();
        let _ = stream.read_to_end(&mut bytes);
        String::from_utf8(bytes).expect("text")
    }

    /// They stay, and say nothing; so do as many after them.
    #[test]
    fn those_who_say_nothing_keep_nobody_away() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("metrics.sock");
        let _endpoint = Endpoint::start(&[Address::Unix(path.clone())], |_| Ok(()), &source()).expect("started");
        let mut silent: Vec<_> = (0..SCRAPES_MAX).map(|_| connected(&path)).collect();
        let answer = told(&path);
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        // The oldest of them has gone.
        assert_eq!(silent.remove(0).read(&mut [0; 1]).expect("the end"), 0);
        silent.extend((0..SCRAPES_MAX).map(|_| connected(&path)));
        let answer = told(&path);
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    }

    /// Beyond as many as there are places, one is told so at once, and has a place when those have their answers.
    #[test]
    fn those_who_are_being_answered_are_not_sent_away() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("metrics.sock");
        let (asked, is_asked) = std::sync::mpsc::channel();
        let (go_on, wait) = std::sync::mpsc::channel::<()>();
        let (asked, wait) = (Mutex::new(asked), Mutex::new(wait));
        let slow: Source = Arc::new(move || {
            asked.lock().expect("no panic").send(()).expect("somebody counts");
            // Until the other end is dropped.
            let _ = wait.lock().expect("no panic").recv();
            json!({"vms": []})
        });
        let _endpoint = Endpoint::start(&[Address::Unix(path.clone())], |_| Ok(()), &slow).expect("started");
        let askers: Vec<_> = (0..SCRAPES_MAX)
            .map(|_| {
                let path = path.clone();
                std::thread::spawn(move || told(&path))
            })
            .collect();
        (0..SCRAPES_MAX).for_each(|_| is_asked.recv().expect("one asks"));
        let answer = told(&path);
        assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 503"), "{answer}");
        drop(go_on);
        for asker in askers {
            let answer = asker.join().expect("no panic");
            assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        }
        while !told(&path).starts_with("HTTP/1.1 200") {}
    }

    /// Somebody who takes an answer byte by byte has a time for all of it.
    #[test]
    fn the_time_for_an_answer_is_for_all_of_it() {
        let (ours, theirs) = UnixStream::pair().expect("a pair");
        let (over, is_over) = std::sync::mpsc::channel::<()>();
        let slow = std::thread::spawn(move || {
            let mut part = vec![0; PART_BYTES];
            while is_over.recv_timeout(Duration::from_millis(5)) == Err(std::sync::mpsc::RecvTimeoutError::Timeout)
                && theirs.read(&mut part).is_ok()
            {}
        });
        let document = vec![b'x'; 64 << 20];
        let error = write_until(&ours, &document, Instant::now() + Duration::from_millis(100)).expect_err("in vain");
        assert!(matches!(error.kind(), io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock), "{error}");
        drop((over, ours));
        slow.join().expect("no panic");
    }

    #[test]
    fn a_daemon_that_cannot_say_is_an_error() {
        let failing: Source = Arc::new(|| json!({"error": "it is ending"}));
        let (status, _, text) = response(Some("GET / HTTP/1.1\r\n\r\n"), &failing);
        assert!(status.starts_with("500") && text.contains("it is ending"), "{status} {text}");
    }
}
