//! A connection's two halves, TLS or not: frames in and out, each within a time limit.
//!
//! When a peer was heard last is told by its bytes, below TLS, and not by whole frames: a large one takes a slow link minutes, and whoever sends
//! it is there all that time.

use crate::message::{FRAME_HEADER_BYTES, FrameHeader, Message, MessageError};
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf, ReadHalf, WriteHalf};
use tokio::net::TcpStream;
use tokio_rustls::TlsStream;

/// What has to come, or be taken, within the time limit, in bytes. Two seconds at the speed of an old modem.
const PART_BYTES: usize = 16 << 10;
/// What a connection keeps of its buffer, in bytes.
const BUFFER_BYTES: usize = 64 << 10;

/// When something came from a peer last.
#[derive(Debug)]
pub(crate) struct Heard {
    began: Instant,
    at_ms: AtomicU64,
}

impl Heard {
    pub fn new() -> Self {
        Heard { began: Instant::now(), at_ms: AtomicU64::new(0) }
    }

    /// Something has come.
    pub fn now(&self) {
        self.at_ms.store(self.began.elapsed().as_millis() as u64, Ordering::Relaxed);
    }

    /// For how long nothing has come.
    pub fn silence(&self) -> Duration {
        self.began.elapsed().saturating_sub(Duration::from_millis(self.at_ms.load(Ordering::Relaxed)))
    }
}

/// A connection of the network, and when something came on it last.
#[derive(Debug)]
pub(crate) struct Socket {
    tcp: TcpStream,
    heard: Arc<Heard>,
}

impl Socket {
    pub fn new(tcp: TcpStream) -> Self {
        Socket { tcp, heard: Arc::new(Heard::new()) }
    }

    pub fn heard(&self) -> Arc<Heard> {
        Arc::clone(&self.heard)
    }
}

impl AsyncRead for Socket {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = buffer.filled().len();
        let read = Pin::new(&mut this.tcp).poll_read(cx, buffer);
        if buffer.filled().len() > before {
            this.heard.now();
        }
        read
    }
}

impl AsyncWrite for Socket {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().tcp).poll_write(cx, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().tcp).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().tcp).poll_shutdown(cx)
    }
}

/// A stream to the other side.
#[derive(Debug)]
pub(crate) enum Stream {
    Plain(Socket),
    Tls(Box<TlsStream<Socket>>),
}

macro_rules! each {
    ($self:ident, $stream:ident => $what:expr) => {
        match $self.get_mut() {
            Stream::Plain($stream) => {
                let $stream = Pin::new($stream);
                $what
            }
            Stream::Tls($stream) => {
                let $stream = Pin::new($stream.as_mut());
                $what
            }
        }
    };
}

impl AsyncRead for Stream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        each!(self, stream => stream.poll_read(cx, buffer))
    }
}

impl AsyncWrite for Stream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        each!(self, stream => stream.poll_write(cx, bytes))
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        each!(self, stream => stream.poll_flush(cx))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        each!(self, stream => stream.poll_shutdown(cx))
    }
}

/// Why a connection ended.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// The network, or TLS.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// What came is no message.
    #[error("{0}")]
    Message(#[from] MessageError),
    /// Nothing came, or nothing was taken, in time.
    #[error("nothing came from the peer in {} ms", .0.as_millis())]
    TimedOut(Duration),
    /// The other side closed.
    #[error("the peer closed the connection")]
    Closed,
}

/// The half that reads.
pub(crate) struct FrameReader {
    stream: ReadHalf<Stream>,
    payload: Vec<u8>,
}

/// A frame's kind; its payload is in [`FrameReader::payload`].
impl FrameReader {
    /// Waits for a frame: `idle` for its first byte, `patience` for each part of the rest. A peer that sends a byte now and then
    /// is dropped like one that sends none.
    pub async fn frame(&mut self, max: usize, idle: Duration, patience: Duration) -> Result<u8, LinkError> {
        let mut head = [0; FRAME_HEADER_BYTES];
        let first = tokio::time::timeout(idle, self.stream.read(&mut head)).await;
        let got = first.map_err(|_| LinkError::TimedOut(idle))??;
        if got == 0 {
            return Err(LinkError::Closed);
        }
        self.fill(&mut head[got..], patience).await?;
        let header = FrameHeader::read(&head, max)?;
        let mut payload = std::mem::take(&mut self.payload);
        payload.resize(header.payload_bytes, 0);
        for part in payload.chunks_mut(PART_BYTES) {
            self.fill(part, patience).await?;
        }
        header.check(&payload)?;
        self.payload = payload;
        Ok(header.kind)
    }

    /// A slow link takes its time, part by part.
    async fn fill(&mut self, part: &mut [u8], patience: Duration) -> Result<(), LinkError> {
        let filled = tokio::time::timeout(patience, self.stream.read_exact(part)).await;
        filled.map_err(|_| LinkError::TimedOut(patience))??;
        Ok(())
    }

    pub fn payload(&self) -> &[u8] {
        &self.payload
    }

    /// The payload, for keeps.
    pub fn take_payload(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.payload)
    }

    pub async fn message(&mut self, max: usize, idle: Duration, patience: Duration) -> Result<Message, LinkError> {
        let kind = self.frame(max, idle, patience).await?;
        Ok(Message::read(kind, &self.payload)?)
    }
}

/// The half that writes.
pub(crate) struct FrameWriter {
    stream: WriteHalf<Stream>,
    pub patience: Duration,
    buffer: Vec<u8>,
    /// Bytes given to the network, before TLS.
    pub sent_bytes: u64,
}

impl FrameWriter {
    pub async fn send(&mut self, messages: &[Message]) -> Result<(), LinkError> {
        messages.iter().for_each(|message| message.write(&mut self.buffer));
        self.flush().await
    }

    /// Messages that [`FrameWriter::flush`] sends.
    pub fn buffer(&mut self) -> &mut Vec<u8> {
        &mut self.buffer
    }

    /// Sends what is in the buffer. A slow link takes its time, part by part.
    pub async fn flush(&mut self) -> Result<(), LinkError> {
        let patience = self.patience;
        self.sent_bytes += self.buffer.len() as u64;
        for part in self.buffer.chunks(PART_BYTES) {
            let written = tokio::time::timeout(patience, self.stream.write_all(part)).await;
            written.map_err(|_| LinkError::TimedOut(patience))??;
        }
        let flushed = tokio::time::timeout(patience, self.stream.flush()).await;
        flushed.map_err(|_| LinkError::TimedOut(patience))??;
        self.buffer.clear();
        self.buffer.shrink_to(BUFFER_BYTES);
        Ok(())
    }

    pub async fn shut_down(&mut self) {
        let _ = tokio::time::timeout(Duration::from_secs(1), self.stream.shutdown()).await;
    }
}

/// Splits a stream. `patience`: for each write.
pub(crate) fn split(stream: Stream, patience: Duration) -> (FrameReader, FrameWriter) {
    let (reader, writer) = tokio::io::split(stream);
    (
        FrameReader { stream: reader, payload: Vec::new() },
        FrameWriter { stream: writer, patience, buffer: Vec::new(), sent_bytes: 0 },
    )
}

/// Sets what every connection needs: small frames at once, and probes that find a peer that is gone.
pub(crate) fn prepare(stream: &TcpStream) -> io::Result<()> {
    use rustix::net::sockopt;
    stream.set_nodelay(true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, Duration::from_secs(15))?;
    sockopt::set_tcp_keepintvl(stream, Duration::from_secs(5))?;
    sockopt::set_tcp_keepcnt(stream, 3)?;
    Ok(())
}
