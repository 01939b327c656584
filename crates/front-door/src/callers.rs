//! Those who have connected to a disk's socket and not spoken yet: the first of them whose words are a vhost-user message is
//! the VMM.
//!
//! A connection alone says nothing: a health check makes one, and so does a QEMU that still fills its memory. It costs a
//! descriptor, keeps nobody else away, and is let go when it says something else, says nothing for [`SILENCE_MAX`], or when
//! [`CALLERS_MAX`] others have come after it.

use rustix::net::RecvFlags;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// How long one may be silent. QEMU connects before it allocates the guest's memory, which may take minutes.
const SILENCE_MAX: Duration = Duration::from_secs(600);
/// Silent ones at once, for one disk.
const CALLERS_MAX: usize = 16;

/// Bytes of a vhost-user header: request, flags, size; each a `u32` in the host's order.
pub const HEADER_BYTES: usize = 12;
/// Bytes of a vhost-user message after its header, at most.
const PAYLOAD_BYTES_MAX: u32 = 4096;
/// The last request there is (GET_SHMEM_CONFIG); they begin with 1.
const REQUEST_MAX: u32 = 44;
/// The bits of the flags: version, reply, a reply is wanted.
const VERSION: u32 = 3;
const NEED_REPLY: u32 = 8;

/// One of them.
#[derive(Debug)]
struct Caller {
    connection: UnixStream,
    pid: i32,
    since: Instant,
}

/// All of them, the earliest first.
#[derive(Debug)]
pub struct Callers {
    disk: String,
    callers: Vec<Caller>,
}

/// What somebody has said first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Said {
    Nothing,
    /// The connection has ended.
    Goodbye,
    Nonsense,
    VhostUser,
}

/// The process at the other end of a connection (SO_PEERCRED: it cannot be forged); 0 if it is in another pid namespace.
pub fn process_of(connection: &UnixStream) -> i32 {
    rustix::net::sockopt::socket_peercred(connection).map_or(0, |credentials| credentials.pid.as_raw_nonzero().get())
}

impl Callers {
    /// Nobody, for the disk that log lines call `disk`.
    pub fn new(disk: &str) -> Self {
        Callers { disk: disk.to_owned(), callers: Vec::new() }
    }

    /// Somebody has connected.
    pub fn add(&mut self, connection: UnixStream) {
        if self.callers.len() == CALLERS_MAX {
            let first = self.callers.remove(0);
            log::warn!(
                "disk {}: the connection of process {} is dropped: it has said nothing, and {CALLERS_MAX} more have come",
                self.disk,
                first.pid
            );
        }
        let pid = process_of(&connection);
        log::debug!("disk {}: process {pid} is at the socket, and has said nothing yet", self.disk);
        self.callers.push(Caller { connection, pid, since: Instant::now() });
    }

    /// What to wait for.
    pub fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.callers.iter().map(|caller| caller.connection.as_fd())
    }

    /// How long to wait at most; `None` if nobody is there.
    pub fn patience(&self) -> Option<Duration> {
        self.callers.first().map(|first| SILENCE_MAX.saturating_sub(first.since.elapsed()))
    }

    /// Hears everybody. Gives the first connection that speaks vhost-user; none of its bytes has been taken.
    pub fn hear(&mut self) -> Option<UnixStream> {
        let mut index = 0;
        while let Some(caller) = self.callers.get(index) {
            let (pid, silent_for) = (caller.pid, caller.since.elapsed());
            match heard(&caller.connection) {
                Said::Nothing if silent_for < SILENCE_MAX => {
                    index += 1;
                    continue;
                }
                Said::VhostUser => return Some(self.callers.remove(index).connection),
                Said::Nothing => {
                    log::warn!(
                        "disk {}: the connection of process {pid} is dropped: it has said nothing for {} s",
                        self.disk,
                        silent_for.as_secs()
                    );
                }
                Said::Goodbye => log::debug!("disk {}: process {pid} has gone without a word", self.disk),
                Said::Nonsense => log::warn!(
                    "disk {}: the connection of process {pid} is dropped: what it says is no vhost-user message",
                    self.disk
                ),
            }
            self.callers.remove(index);
        }
        None
    }

    /// The disk has been given to process `pid`: nobody else waits for it.
    pub fn turn_away(&mut self, pid: i32) {
        for caller in self.callers.drain(..) {
            log::warn!("disk {}: process {} is turned away: process {pid} has this disk", self.disk, caller.pid);
        }
    }
}

/// Looks at the first bytes of a connection without taking them. A front-end sends a header with one call: a part of one is
/// nonsense.
fn heard(connection: &UnixStream) -> Said {
    let mut header = [0u8; HEADER_BYTES];
    match rustix::net::recv(connection, &mut header, RecvFlags::PEEK | RecvFlags::DONTWAIT) {
        Ok((_, 0)) => Said::Goodbye,
        Ok((_, HEADER_BYTES)) if is_request(&header) => Said::VhostUser,
        Ok(_) => Said::Nonsense,
        Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => Said::Nothing,
        Err(_) => Said::Goodbye,
    }
}

fn is_request(header: &[u8; HEADER_BYTES]) -> bool {
    let word = |at: usize| u32::from_ne_bytes(header[at..at + 4].try_into().expect("four bytes"));
    let (request, flags, size) = (word(0), word(4), word(8));
    (1..=REQUEST_MAX).contains(&request)
        && flags & !NEED_REPLY & VERSION == 1
        && flags & !(NEED_REPLY | VERSION) == 0
        && size <= PAYLOAD_BYTES_MAX
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};

    fn message(request: u32, flags: u32, size: u32) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        for (at, word) in [request, flags, size].into_iter().enumerate() {
            bytes[at * 4..at * 4 + 4].copy_from_slice(&word.to_ne_bytes());
        }
        bytes
    }

    fn get_features() -> [u8; HEADER_BYTES] {
        message(1, 1, 0)
    }

    #[test]
    fn only_a_vhost_user_request_is_one() {
        assert!(is_request(&get_features()));
        assert!(is_request(&message(3, 9, 0)), "a reply is wanted");
        assert!(!is_request(&message(0, 1, 0)) && !is_request(&message(u32::MAX, 1, 0)), "no such request");
        assert!(!is_request(&message(1, 0, 0)) && !is_request(&message(1, 2, 0)), "no such version");
        assert!(!is_request(&message(1, 5, 0)), "a reply");
        assert!(!is_request(&message(1, 1, PAYLOAD_BYTES_MAX + 1)), "too long");
    }

    #[test]
    fn who_speaks_first_is_chosen_and_keeps_its_words() {
        let mut callers = Callers::new("d");
        let mut theirs = Vec::new();
        for _ in 0..5 {
            let (ours, other) = UnixStream::pair().expect("a pair");
            callers.add(ours);
            theirs.push(other);
        }
        assert!(callers.hear().is_none() && callers.callers.len() == 5);
        // One asks for something else, one for half a message, one goes.
        theirs[1].write_all(b"GET / HTTP/1.1\r\n\r\n").expect("written");
        theirs[2].write_all(&get_features()[..7]).expect("written");
        drop(theirs.pop());
        assert!(callers.hear().is_none() && callers.callers.len() == 2);
        theirs[3].write_all(&get_features()).expect("written");
        let mut chosen = callers.hear().expect("it has spoken");
        let mut bytes = [0; HEADER_BYTES];
        chosen.read_exact(&mut bytes).expect("all that it said");
        assert_eq!(bytes, get_features());
        callers.turn_away(1);
        assert_eq!(theirs[0].read(&mut bytes).expect("the end"), 0, "a silent one is turned away then");
    }

    #[test]
    fn silent_ones_are_bounded_in_number_and_time() {
        let mut callers = Callers::new("d");
        let mut theirs: Vec<UnixStream> = Vec::new();
        for _ in 0..=CALLERS_MAX {
            let (ours, other) = UnixStream::pair().expect("a pair");
            callers.add(ours);
            theirs.push(other);
        }
        assert_eq!(callers.callers.len(), CALLERS_MAX);
        let mut bytes = [0; 1];
        assert_eq!(theirs[0].read(&mut bytes).expect("the end"), 0, "the earliest made room");
        let Some(long_ago) = Instant::now().checked_sub(SILENCE_MAX) else { return };
        callers.callers[0].since = long_ago;
        assert_eq!(callers.patience(), Some(Duration::ZERO));
        assert!(callers.hear().is_none());
        assert_eq!(callers.callers.len(), CALLERS_MAX - 1);
    }
}
