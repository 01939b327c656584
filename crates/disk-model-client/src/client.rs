//! A virtual disk's end of the connection to a modelled one.

use crate::error::Error;
use crate::protocol::{ANSWER_BYTES, FULL, Record};
use crate::request::Request;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;

/// A connection. Requests may be submitted and completions taken from different threads.
#[derive(Debug)]
pub struct Client {
    stream: UnixStream,
}

/// The received part of an answer that is not whole yet: one for each client, with whoever takes its completions.
#[derive(Debug, Default)]
pub struct Inbox {
    part: Vec<u8>,
}

impl Client {
    /// Asks the model that listens at `socket` for room for a disk of `size_bytes`.
    ///
    /// # Errors
    /// When nobody listens there, or the modelled disk is full.
    pub fn connect(socket: &Path, size_bytes: u64) -> Result<Self, Error> {
        let stream = UnixStream::connect(socket).map_err(|source| Error::Socket { path: socket.to_owned(), source })?;
        Self::over(stream, size_bytes)
    }

    /// The same of the model at the other end of a connection.
    ///
    /// # Errors
    /// When nobody answers there, or the modelled disk is full.
    pub fn over(mut stream: UnixStream, size_bytes: u64) -> Result<Self, Error> {
        stream.write_all(&Record::Greeting { size_bytes }.to_bytes())?;
        let mut answer = [0; ANSWER_BYTES];
        stream.read_exact(&mut answer)?;
        if u64::from_le_bytes(answer) == FULL {
            return Err(Error::Full { size_bytes });
        }
        stream.set_nonblocking(true)?;
        Ok(Client { stream })
    }

    /// Begins a request, at this instant; its tag must not be one that is under way.
    ///
    /// # Errors
    /// When the model is gone, or has not read for so long that the socket is full.
    pub fn submit(&self, request: Request) -> io::Result<()> {
        (&self.stream).write_all(&Record::Request(request).to_bytes())
    }

    /// Appends the tags of what has completed; never waits.
    ///
    /// # Errors
    /// When the model is gone: nothing under way will complete any more.
    pub fn completed(&self, inbox: &mut Inbox, tags: &mut Vec<u64>) -> io::Result<()> {
        let mut buffer = [0; 1024];
        loop {
            match (&self.stream).read(&mut buffer) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => {
                    inbox.part.extend_from_slice(&buffer[..count]);
                    let whole = inbox.part.len() / ANSWER_BYTES * ANSWER_BYTES;
                    for bytes in inbox.part[..whole].chunks_exact(ANSWER_BYTES) {
                        tags.push(u64::from_le_bytes(bytes.try_into().expect("a chunk of that size")));
                    }
                    inbox.part.drain(..whole);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }
}

impl AsFd for Client {
    /// Readable when something has completed.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}
