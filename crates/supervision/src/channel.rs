//! Messages with descriptors, whole or not at all: a pair of Unix sockets that keep messages apart.

use rustix::io::Errno;
use rustix::net::sockopt::Timeout;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

/// Descriptors of one message: Linux's own bound (`SCM_MAX_FD`).
pub const DESCRIPTORS_MAX: usize = 253;
/// Bytes of one message.
const BYTES_MAX: usize = 64 << 10;

/// One end.
#[derive(Debug)]
pub struct Channel {
    socket: OwnedFd,
}

impl From<OwnedFd> for Channel {
    fn from(socket: OwnedFd) -> Self {
        Channel { socket }
    }
}

impl Channel {
    /// Both ends; the other one is to be given to a process.
    ///
    /// # Errors
    /// When the kernel has no descriptor for it.
    pub fn pair() -> io::Result<(Self, OwnedFd)> {
        let (ours, theirs) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        Ok((ours.into(), theirs))
    }

    /// Says nothing more: the other end hears an end. What that one says is heard still.
    pub fn end(&self) {
        // It may have gone first.
        let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Write);
    }

    /// Neither says nor hears anything any more: whoever waits here hears an end, too.
    pub fn end_both_ways(&self) {
        let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
    }

    /// From now on an end that does not read is waited for so long only.
    ///
    /// # Errors
    /// When the kernel does not know how.
    pub fn set_patience(&self, patience: Duration) -> io::Result<()> {
        Ok(rustix::net::sockopt::set_socket_timeout(&self.socket, Timeout::Send, Some(patience))?)
    }

    /// From now on what the other end says is waited for so long only; nothing: for ever.
    ///
    /// # Errors
    /// When the kernel does not know how.
    pub fn set_hearing_patience(&self, patience: Option<Duration>) -> io::Result<()> {
        Ok(rustix::net::sockopt::set_socket_timeout(&self.socket, Timeout::Recv, patience)?)
    }

    /// Says something. Waits while the other end has too much to read, as long as [`Channel::set_patience`] says.
    ///
    /// # Errors
    /// When the other end is gone, or does not read, or that is too much for one message.
    pub fn send(&self, message: &impl Serialize, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        let bytes = serde_json::to_vec(message).map_err(io::Error::other)?;
        self.send_bytes(&bytes, BYTES_MAX, descriptors)
    }

    /// The same of bytes, of which at most so many are sent.
    pub(crate) fn send_bytes(&self, bytes: &[u8], bytes_max: usize, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        if bytes.len() > bytes_max || descriptors.len() > DESCRIPTORS_MAX {
            return Err(io::Error::other(format!(
                "{} bytes and {} descriptors are too much for one message",
                bytes.len(),
                descriptors.len()
            )));
        }
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
            return Err(io::Error::other("there is no room for the descriptors"));
        }
        loop {
            match rustix::net::sendmsg(&self.socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL) {
                Err(Errno::INTR) => {}
                other => return other.map(drop).map_err(Into::into),
            }
        }
    }

    /// Waits for what the other end says. Nothing when it is gone.
    ///
    /// # Errors
    /// When what came is not what is understood here, or came without its descriptors.
    pub fn receive<T: DeserializeOwned>(&self) -> io::Result<Option<(T, Vec<OwnedFd>)>> {
        let Some((bytes, descriptors)) = self.receive_bytes(BYTES_MAX, RecvFlags::empty())? else { return Ok(None) };
        let message = serde_json::from_slice(&bytes).map_err(io::Error::other)?;
        Ok(Some((message, descriptors)))
    }

    /// The same of bytes, of which a message has at most so many.
    pub(crate) fn receive_bytes(
        &self,
        bytes_max: usize,
        flags: RecvFlags,
    ) -> io::Result<Option<(Vec<u8>, Vec<OwnedFd>)>> {
        let mut bytes = vec![0; bytes_max];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let received = loop {
            let flags = flags | RecvFlags::CMSG_CLOEXEC;
            match rustix::net::recvmsg(&self.socket, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags) {
                // The other end died with something unread. What it had said before is still to be read; then comes the end.
                Err(Errno::INTR | Errno::CONNRESET) => {}
                other => break other?,
            }
        };
        let descriptors: Vec<OwnedFd> = control
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
        if received.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
            return Err(io::Error::other("a message came without its end, or without its descriptors"));
        }
        bytes.truncate(received.bytes);
        Ok(Some((bytes, descriptors)))
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Order, Said};
    use std::io::{Read, Seek, Write};

    #[test]
    fn messages_stay_apart_and_bring_their_descriptors() {
        let (ours, theirs) = Channel::pair().expect("a pair");
        let theirs = Channel::from(theirs);
        let mut file = tempfile();
        file.write_all(b"content").expect("written");
        ours.send(&Order::Kept { key: "a".into(), data: "b".into() }, &[file.as_fd(), file.as_fd()]).expect("sent");
        ours.send(&Order::Begin, &[]).expect("sent");
        let (order, mut descriptors) = theirs.receive::<Order>().expect("read").expect("one");
        assert_eq!((order, descriptors.len()), (Order::Kept { key: "a".into(), data: "b".into() }, 2));
        let mut again = std::fs::File::from(descriptors.remove(0));
        again.rewind().expect("the same file");
        let mut text = String::new();
        again.read_to_string(&mut text).expect("read");
        assert_eq!(text, "content");
        let (order, descriptors) = theirs.receive::<Order>().expect("read").expect("another");
        assert_eq!((order, descriptors.len()), (Order::Begin, 0));
        drop(ours);
        assert!(theirs.receive::<Order>().expect("the end").is_none());
        theirs.send(&Said::Ready, &[]).expect_err("nobody is there");
    }

    #[test]
    fn what_was_said_before_a_death_is_heard_whatever_was_unread() {
        let (ours, theirs) = Channel::pair().expect("a pair");
        let theirs = Channel::from(theirs);
        ours.send(&Order::Begin, &[]).expect("sent, and never read");
        let file = tempfile();
        theirs.send(&Said::Began { disk: 1 }, &[]).expect("sent");
        theirs.send(&Said::Keep { key: "a".into(), data: String::new() }, &[file.as_fd()]).expect("sent");
        drop(theirs);
        assert_eq!(ours.receive::<Said>().expect("read").expect("one").0, Said::Began { disk: 1 });
        assert_eq!(ours.receive::<Said>().expect("read").expect("another").1.len(), 1);
        assert!(ours.receive::<Said>().expect("the end").is_none());
    }

    #[test]
    fn what_is_too_much_or_not_understood_is_an_error() {
        let (ours, theirs) = Channel::pair().expect("a pair");
        let theirs = Channel::from(theirs);
        ours.send(&Said::Keep { key: "x".repeat(BYTES_MAX), data: String::new() }, &[]).expect_err("too long");
        ours.send(&Said::Ready, &[]).expect("sent");
        theirs.receive::<Order>().expect_err("not an order");
    }

    fn tempfile() -> std::fs::File {
        rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).expect("a file").into()
    }
}
