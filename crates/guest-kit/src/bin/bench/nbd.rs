//! As much of an NBD client as a journal device needs: writes and flushes (fixed newstyle, `NBD_OPT_EXPORT_NAME`).

use crate::{Outcome, sentence};
use guest_kit::program;
use std::io::{Read, Write};
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

const OPTION_MAGIC: &[u8; 8] = b"IHAVEOPT";
const REQUEST_MAGIC: u32 = 0x2560_9513;
const REPLY_MAGIC: u32 = 0x6744_6698;
const WRITE: u16 = 1;
const FLUSH: u16 = 3;

/// A server of one file, and a connection to it.
pub struct Nbd {
    server: Child,
    stream: std::net::TcpStream,
    next: u64,
}

impl Nbd {
    /// Exports a file over loopback, each flush an fdatasync.
    pub fn serve(file: &Path) -> Outcome<Self> {
        let port = {
            let free = std::net::TcpListener::bind("127.0.0.1:0").map_err(sentence)?;
            free.local_addr().map_err(sentence)?.port()
        };
        let server = program::command("qemu-nbd")
            .map_err(sentence)?
            .args(["--persistent", "--format=raw", "--cache=writeback", "--bind=127.0.0.1"])
            .arg(format!("--port={port}"))
            .arg(file)
            .stdin(Stdio::null())
            .spawn()
            .map_err(sentence)?;
        let deadline = Instant::now() + Duration::from_secs(10);
        let stream = loop {
            match std::net::TcpStream::connect(("127.0.0.1", port)) {
                Ok(stream) => break stream,
                Err(error) if Instant::now() > deadline => return Err(format!("qemu-nbd does not listen: {error}")),
                Err(_) => std::thread::sleep(Duration::from_millis(20)),
            }
        };
        let mut nbd = Nbd { server, stream, next: 0 };
        nbd.greet().map_err(|error| format!("qemu-nbd: {error}"))?;
        Ok(nbd)
    }

    fn greet(&mut self) -> std::io::Result<()> {
        self.stream.set_nodelay(true)?;
        // Two magic numbers and flags.
        let mut greeting = [0; 18];
        self.stream.read_exact(&mut greeting)?;
        if &greeting[..8] != b"NBDMAGIC" || &greeting[8..16] != OPTION_MAGIC {
            return Err(std::io::Error::other("it does not greet as an NBD server"));
        }
        // Fixed newstyle, no zeroes after the answer; then the export without a name.
        self.stream.write_all(&3u32.to_be_bytes())?;
        self.stream.write_all(&[OPTION_MAGIC.as_slice(), &1u32.to_be_bytes(), &0u32.to_be_bytes()].concat())?;
        let mut answer = [0; 10];
        self.stream.read_exact(&mut answer)
    }

    fn request(&mut self, kind: u16, offset: u64, bytes: &[u8]) -> Outcome<()> {
        self.next += 1;
        let mut frame = REQUEST_MAGIC.to_be_bytes().to_vec();
        frame.extend_from_slice(&0u16.to_be_bytes());
        frame.extend_from_slice(&kind.to_be_bytes());
        frame.extend_from_slice(&self.next.to_be_bytes());
        frame.extend_from_slice(&offset.to_be_bytes());
        frame.extend_from_slice(&(bytes.len() as u32).to_be_bytes());
        frame.extend_from_slice(bytes);
        self.stream.write_all(&frame).map_err(sentence)
    }

    fn answers(&mut self, count: usize) -> Outcome<()> {
        for _ in 0..count {
            let mut answer = [0; 16];
            // qemu-nbd waits for acknowledgements before it sends more of little; the kernel would hold them back.
            rustix::net::sockopt::set_tcp_quickack(&self.stream, true).map_err(sentence)?;
            self.stream.read_exact(&mut answer).map_err(sentence)?;
            let (magic, rest) = answer.split_at(4);
            if magic != REPLY_MAGIC.to_be_bytes() || rest[..4] != [0; 4] {
                return Err(format!("the NBD server answers {answer:?}"));
            }
        }
        Ok(())
    }

    /// Writes the same to all these places, at once, and waits for all.
    pub fn write_all(&mut self, offsets: &[u64], bytes: &[u8]) -> Outcome<()> {
        offsets.iter().try_for_each(|offset| self.request(WRITE, *offset, bytes))?;
        self.answers(offsets.len())
    }

    /// Makes durable what was written.
    pub fn flush(&mut self) -> Outcome<()> {
        self.request(FLUSH, 0, &[])?;
        self.answers(1)
    }
}

impl Drop for Nbd {
    fn drop(&mut self) {
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}
