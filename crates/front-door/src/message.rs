//! vhost-user messages as they go over a socket: a header, a payload, descriptors. What the payload means, [`crate::Record`] knows as
//! far as it has to.

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

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

    /// Takes one off a connection, waiting for the rest of it. Nothing at the end of the connection.
    ///
    /// # Errors
    /// When it is none, or the connection breaks.
    pub fn read(connection: &UnixStream) -> io::Result<Option<Self>> {
        let mut header = [0; HEADER_BYTES];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let received = loop {
            let flags = RecvFlags::CMSG_CLOEXEC;
            match rustix::net::recvmsg(connection, &mut [IoSliceMut::new(&mut header)], &mut control, flags) {
                Err(Errno::INTR) => {}
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
        let mut connection = connection;
        connection.read_exact(&mut header[received.bytes..])?;
        let word = |at: usize| u32::from_ne_bytes(header[at..at + 4].try_into().expect("four bytes"));
        let bytes = word(8);
        if bytes > PAYLOAD_BYTES_MAX {
            return Err(io::Error::other(format!("a vhost-user message of {bytes} bytes is none")));
        }
        let mut payload = vec![0; bytes as usize];
        connection.read_exact(&mut payload)?;
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
    /// When the connection breaks.
    pub fn write(&self, connection: &UnixStream, is_silent: bool) -> io::Result<()> {
        let flags = if is_silent { self.flags & !NEED_REPLY } else { self.flags };
        let mut bytes = Vec::with_capacity(HEADER_BYTES + self.payload.len());
        for word in [self.code, flags, self.payload.len() as u32] {
            bytes.extend(word.to_ne_bytes());
        }
        bytes.extend(&self.payload);
        let borrowed: Vec<_> = self.descriptors.iter().map(AsFd::as_fd).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !borrowed.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&borrowed)) {
            return Err(io::Error::other("there is no room for the descriptors"));
        }
        let sent = loop {
            match rustix::net::sendmsg(connection, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL) {
                Err(Errno::INTR) => {}
                other => break other?,
            }
        };
        let mut connection = connection;
        connection.write_all(&bytes[sent..])
    }
}
