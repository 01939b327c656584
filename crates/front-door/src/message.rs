//! vhost-user messages as they go over a socket: a header, a payload, descriptors. What the payload means, [`crate::Record`] knows as
//! far as it has to.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Bytes of a header: request, flags, size of the payload; each a `u32` in the host's order.
const HEADER_BYTES: usize = 12;
/// Bytes of a payload, at most.
const PAYLOAD_BYTES_MAX: u32 = 4096;
/// Descriptors of one message, at most: a memory table has eight.
const DESCRIPTORS_MAX: usize = 32;
/// The flag that asks for an answer to a message that has none by itself.
const NEED_REPLY: u32 = 8;

/// Not of vhost-user: what a worker says, over its end of a connection, before it drops it of its own will. A worker that is killed does
/// not say it.
pub const GOODBYE: u32 = u32::MAX;

/// Messages that are answered by themselves: GET_FEATURES, GET_VRING_BASE, GET_PROTOCOL_FEATURES, GET_QUEUE_NUM, GET_CONFIG,
/// GET_INFLIGHT_FD, GET_MAX_MEM_SLOTS, GET_STATUS, GET_SHARED_OBJECT, CHECK_DEVICE_STATE, GET_SHMEM_CONFIG.
const ANSWERED: [u32; 11] = [1, 11, 15, 17, 24, 31, 36, 40, 41, 43, 44];

/// Where the VMM wants pages marked that are written: the VMM waits for the answer, so that it can let go of an earlier log.
pub(crate) const SET_LOG_BASE: u32 = 6;

/// What ends the wait of a door's thread before its time: the door is closed.
#[derive(Debug)]
pub(crate) struct Closing {
    /// An event is here, perhaps this one.
    pub signal: OwnedFd,
    pub is_closing: AtomicBool,
}

/// How long somebody waits until a message is here as a whole, or is said. A time for each part would be none: whoever says a byte now and
/// then would be waited for as long as it likes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wait<'a> {
    deadline: Option<Instant>,
    closing: Option<&'a Closing>,
}

impl<'a> Wait<'a> {
    /// From now on so long, or until the door is closed.
    pub fn new(patience: Duration, closing: Option<&'a Closing>) -> Self {
        Wait { deadline: Some(Instant::now() + patience), closing }
    }

    /// Until the door is closed.
    pub fn without_end(closing: &'a Closing) -> Self {
        Wait { deadline: None, closing: Some(closing) }
    }

    /// Waits until a connection is ready for that, or has ended.
    fn until(&self, connection: &UnixStream, ready: PollFlags) -> io::Result<()> {
        loop {
            let mut list = vec![PollFd::new(connection, ready)];
            list.extend(self.closing.map(|closing| PollFd::new(&closing.signal, PollFlags::IN)));
            let left = self.deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            let left = left.map(Timespec::try_from).transpose().map_err(io::Error::other)?;
            match poll(&mut list, left.as_ref()) {
                Err(Errno::INTR) => continue,
                other => other?,
            };
            let speaks = |index: usize| list.get(index).is_some_and(|entry| !entry.revents().is_empty());
            let (is_ready, is_called) = (speaks(0), speaks(1));
            if let Some(closing) = self.closing.filter(|_| is_called) {
                // Whatever else it says is looked for as soon as this wait is over.
                let _ = rustix::io::read(&closing.signal, &mut [0u8; 8]);
                if closing.is_closing.load(Ordering::Acquire) {
                    return Err(io::Error::new(io::ErrorKind::ConnectionAborted, "the door is closed"));
                }
            }
            if is_ready {
                return Ok(());
            }
            if self.deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Err(io::Error::new(
                    io::ErrorKind::TimedOut,
                    "the rest of a message does not come, or is not taken",
                ));
            }
        }
    }

    /// Fills that from a connection.
    fn fill(&self, connection: &UnixStream, mut bytes: &mut [u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            match rustix::net::recv(connection, &mut *bytes, RecvFlags::DONTWAIT) {
                Ok((_, 0)) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok((_, received)) => bytes = &mut bytes[received..],
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => self.until(connection, PollFlags::IN)?,
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}

/// One message.
#[derive(Debug)]
pub struct Message {
    /// Which one.
    pub code: u32,
    /// Version and flags.
    pub flags: u32,
    /// What follows the header.
    pub payload: Vec<u8>,
    /// What came along.
    pub descriptors: Vec<OwnedFd>,
}

impl Message {
    /// A message without descriptors.
    pub fn new(code: u32, payload: Vec<u8>) -> Self {
        Message { code, flags: 1, payload, descriptors: Vec::new() }
    }

    /// Whether an answer follows.
    pub fn is_answered(&self) -> bool {
        self.flags & NEED_REPLY != 0 || self.is_question()
    }

    /// Whether it is answered by its own kind, and not only because somebody wants to know that it was understood.
    pub fn is_question(&self) -> bool {
        // A log in shared memory is answered, any other would not be.
        ANSWERED.contains(&self.code) || (self.code == SET_LOG_BASE && !self.descriptors.is_empty())
    }

    /// Whether no more descriptors came along than such a message has.
    pub fn is_modest(&self) -> bool {
        // SET_MEM_TABLE has one for each region.
        self.descriptors.len() <= if self.code == 5 { 8 } else { 1 }
    }

    /// The `u32` at an offset of the payload; 0 if it is not there.
    pub fn word(&self, at: usize) -> u32 {
        let bytes = self.payload.get(at..at + 4).and_then(|bytes| bytes.try_into().ok());
        u32::from_ne_bytes(bytes.unwrap_or_default())
    }

    /// It in bytes, without its descriptors.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(8 + self.payload.len());
        bytes.extend(self.code.to_ne_bytes());
        bytes.extend(self.flags.to_ne_bytes());
        bytes.extend(&self.payload);
        bytes
    }

    /// The same again. Nothing if these are not such bytes.
    pub fn of_bytes(bytes: &[u8], descriptors: Vec<OwnedFd>) -> Option<Self> {
        let (code, rest) = bytes.split_first_chunk::<4>()?;
        let (flags, payload) = rest.split_first_chunk::<4>()?;
        let (code, flags) = (u32::from_ne_bytes(*code), u32::from_ne_bytes(*flags));
        Some(Message { code, flags, payload: payload.to_vec(), descriptors })
    }

    /// Takes one off a connection, waiting for all of it. Nothing at the end of the connection.
    ///
    /// # Errors
    /// When it is none, or does not come in time, or the connection breaks.
    pub(crate) fn read(connection: &UnixStream, wait: &Wait<'_>) -> io::Result<Option<Self>> {
        let mut header = [0; HEADER_BYTES];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let received = loop {
            let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
            match rustix::net::recvmsg(connection, &mut [IoSliceMut::new(&mut header)], &mut control, flags) {
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => wait.until(connection, PollFlags::IN)?,
                other => break other?,
            }
        };
        let descriptors = control
            .drain()
            .filter_map(|message| match message {
                RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
                _ => None,
            })
            .flatten()
            .collect();
        if received.bytes == 0 {
            return Ok(None);
        }
        if received.flags.contains(ReturnFlags::CTRUNC) {
            return Err(io::Error::other("a vhost-user message came with too many descriptors"));
        }
        wait.fill(connection, &mut header[received.bytes..])?;
        let word = |at: usize| u32::from_ne_bytes(header[at..at + 4].try_into().expect("four bytes"));
        let bytes = word(8);
        if bytes > PAYLOAD_BYTES_MAX {
            return Err(io::Error::other(format!("a vhost-user message of {bytes} bytes is none")));
        }
        let mut payload = vec![0; bytes as usize];
        wait.fill(connection, &mut payload)?;
        Ok(Some(Message { code: word(0), flags: word(4), payload, descriptors }))
    }

    /// Whether nothing comes from a connection any more: all that was said has been taken, and the other end has gone. Takes nothing.
    pub fn is_over(connection: &UnixStream) -> bool {
        loop {
            match rustix::net::recv(connection, &mut [0u8; 1], RecvFlags::PEEK | RecvFlags::DONTWAIT) {
                Ok((_, bytes)) => return bytes == 0,
                Err(Errno::INTR) => {}
                Err(error) => return error != Errno::AGAIN,
            }
        }
    }

    /// Puts it into a connection, with the flag that asks for an answer or, where `is_silent`, without.
    ///
    /// # Errors
    /// When it is not taken in time, or the connection breaks.
    pub(crate) fn write(&self, connection: &UnixStream, is_silent: bool, wait: &Wait<'_>) -> io::Result<()> {
        let bytes = self.spoken(is_silent);
        let borrowed: Vec<_> = self.descriptors.iter().map(AsFd::as_fd).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !borrowed.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&borrowed)) {
            return Err(io::Error::other("there is no room for the descriptors"));
        }
        let mut sent = 0;
        while sent < bytes.len() {
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            match rustix::net::sendmsg(connection, &[IoSlice::new(&bytes[sent..])], &mut control, flags) {
                Ok(more) => {
                    sent += more;
                    // The descriptors went with the first byte.
                    control.clear();
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => wait.until(connection, PollFlags::OUT)?,
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// It as it goes over a connection.
    fn spoken(&self, is_silent: bool) -> Vec<u8> {
        let flags = if is_silent { self.flags & !NEED_REPLY } else { self.flags };
        let mut bytes = Vec::with_capacity(HEADER_BYTES + self.payload.len());
        for word in [self.code, flags, self.payload.len() as u32] {
            bytes.extend(word.to_ne_bytes());
        }
        bytes.extend(&self.payload);
        bytes
    }
}

/// Says over a worker's end of a connection that it is dropped of the worker's own will.
pub fn say_goodbye(connection: &UnixStream) {
    // Whoever does not hear it sees the end.
    let bytes = Message::new(GOODBYE, Vec::new()).spoken(false);
    let _ = rustix::net::send(connection, &bytes, SendFlags::NOSIGNAL);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::sync::mpsc::{RecvTimeoutError, channel};

    const SOON: Duration = Duration::from_millis(100);

    /// Each byte comes long before the wait for it alone would be over.
    #[test]
    fn the_time_for_a_message_is_for_all_of_it() {
        let (ours, mut theirs) = UnixStream::pair().expect("a pair");
        let header: Vec<u8> = [2u32, 1, 4096].iter().flat_map(|word| word.to_ne_bytes()).collect();
        theirs.write_all(&header).expect("written");
        let (over, is_over) = channel::<()>();
        let trickle = std::thread::spawn(move || {
            while is_over.recv_timeout(SOON / 20) == Err(RecvTimeoutError::Timeout) && theirs.write_all(&[0]).is_ok() {}
        });
        let error = Message::read(&ours, &Wait::new(SOON, None)).expect_err("its end does not come in time");
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        drop((over, ours));
        trickle.join().expect("no panic");
    }

    #[test]
    fn who_does_not_take_what_it_is_told_is_not_waited_for_longer() {
        let (ours, theirs) = UnixStream::pair().expect("a pair");
        let message = Message::new(2, vec![7; PAYLOAD_BYTES_MAX as usize]);
        let error = (0..1000).find_map(|_| message.write(&ours, false, &Wait::new(SOON, None)).err());
        assert_eq!(error.expect("there is no room for so many").kind(), io::ErrorKind::TimedOut);
        // What was said before is whole.
        let heard = Message::read(&theirs, &Wait::new(SOON, None)).expect("read").expect("one");
        assert_eq!((heard.code, heard.payload), (2, message.payload));
    }
}
