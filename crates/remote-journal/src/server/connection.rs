//! One connection: prove who it is, then ask and be answered, within limits of size and time.

use super::metrics::Metrics;
use super::presence::Presence;
use super::store_thread::{Answer, No, Operation, Question, Reply, Writer};
use crate::link::{self, FrameReader, FrameWriter, Heard, LinkError, Socket, Stream};
use crate::message::{
    BatchHeader, Message, PAYLOAD_BYTES_MAX, PAYLOAD_BYTES_MAX_BEFORE_HELLO, Refusal, write_stored_batch,
};
use crate::security::{self, Secrets};
use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::net::TcpStream;
use tokio::sync::{Semaphore, mpsc, oneshot, watch};

/// Answers other than stored batches on their way to a peer.
const ANSWERS_IN_FLIGHT: usize = 8;
/// Stored batches of one fetch on their way to a peer.
const FETCHED_IN_FLIGHT: usize = 2;
/// Fetches of one client at a time; more wait. With [`FETCHED_IN_FLIGHT`] they have a quarter of what all may have in memory.
const FETCHES_OF_CLIENT_MAX: usize = 8;
const _: () = assert!(FETCHES_OF_CLIENT_MAX * FETCHED_IN_FLIGHT * PAYLOAD_BYTES_MAX <= super::FETCH_ROOM_BYTES / 4);
/// After so many bytes no more replies are taken into one write.
const WRITE_BYTES: usize = 256 << 10;
/// What a peer has to take within the time limit, in bytes, besides something of each part: one that takes each part in the last moment
/// holds what others wait for.
const PACE_BYTES: usize = 512 << 10;
/// Dropped connections that are logged within [`LOG_PERIOD`].
const LOG_LINES_MAX: u32 = 20;
const LOG_PERIOD: Duration = Duration::from_secs(10);
/// Batches of one connection that are on their way to the store, or whose acknowledgement is on its way back.
const BATCHES_IN_FLIGHT: usize = 1024;
/// Connections of one client.
pub(crate) const CONNECTIONS_OF_CLIENT_MAX: usize = 256;

/// What connections share.
pub(crate) struct Shared {
    pub tls: Option<tokio_rustls::TlsAcceptor>,
    pub has_client_certificates: bool,
    pub secrets: Option<Secrets>,
    pub operations: std::sync::mpsc::Sender<Operation>,
    /// Bytes of batches that wait for the store.
    pub room: Arc<Semaphore>,
    /// Bytes of stored batches that are on their way to those who fetch them.
    pub fetch_room: Arc<Semaphore>,
    pub metrics: Arc<Metrics>,
    /// Connections of each client that is known, and the right to fetch.
    pub of_client: Mutex<HashMap<String, (usize, Arc<Semaphore>)>>,
    pub log_lines: Mutex<LogLines>,
    /// For the whole of TLS and the proof, in all.
    pub hello_timeout: Duration,
    /// For a whole frame once it has begun, and for each write.
    pub frame_timeout: Duration,
    /// Between frames.
    pub idle_timeout: Duration,
    /// A peer of which nothing came for so long is not there.
    pub silence: Duration,
}

/// Why a connection ended.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Ended {
    #[error("{0}")]
    Link(#[from] LinkError),
    #[error("it could not prove that it is {0}")]
    Unauthenticated(String),
    #[error("{}", .0.reason)]
    No(No),
    #[error("it said what only a server says, or out of turn")]
    OutOfTurn,
    #[error("the server is stopping")]
    Stopping,
    #[error("it had not proven who it is, and others came")]
    Evicted,
}

/// How many lines about dropped connections were logged of late, and how many were not.
#[derive(Debug, Default)]
pub(crate) struct LogLines {
    since: Option<Instant>,
    logged: u32,
    left_out: u64,
}

impl LogLines {
    /// Whether one more may be logged; and how many were left out before it.
    fn take(&mut self) -> Option<u64> {
        if self.since.is_none_or(|since| since.elapsed() > LOG_PERIOD) {
            (self.since, self.logged) = (Some(Instant::now()), 0);
        }
        if self.logged >= LOG_LINES_MAX {
            self.left_out += 1;
            return None;
        }
        self.logged += 1;
        Some(std::mem::take(&mut self.left_out))
    }
}

fn no(refusal: Refusal, reason: &str) -> No {
    No { refusal, reason: reason.to_owned() }
}

/// A connection whose peer has proven who it is: its halves, when something was last heard, the identity, and its slot.
type Greeted = (FrameReader, FrameWriter, Arc<Heard>, String, Option<Slot>);

/// One of a client's connections.
struct Slot {
    shared: Arc<Shared>,
    identity: String,
    fetches: Arc<Semaphore>,
}

impl Slot {
    fn take(shared: &Arc<Shared>, identity: &str) -> Option<Self> {
        let mut of_client = shared.of_client.lock().expect("no panic under this lock");
        let new = || (0, Arc::new(Semaphore::new(FETCHES_OF_CLIENT_MAX)));
        let (count, fetches) = of_client.entry(identity.to_owned()).or_insert_with(new);
        if *count >= CONNECTIONS_OF_CLIENT_MAX {
            return None;
        }
        *count += 1;
        Some(Slot { shared: Arc::clone(shared), identity: identity.to_owned(), fetches: Arc::clone(fetches) })
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut of_client = self.shared.of_client.lock().expect("no panic under this lock");
        if let Some((count, _)) = of_client.get_mut(&self.identity) {
            *count -= 1;
            if *count == 0 {
                of_client.remove(&self.identity);
            }
        }
    }
}

impl Shared {
    /// TLS and the proof. `None` for the slot where the client has all of its connections.
    async fn greet(self: &Arc<Self>, stream: TcpStream) -> Result<Greeted, Ended> {
        link::prepare(&stream).map_err(LinkError::from)?;
        let stream = Socket::new(stream);
        let heard = stream.heard();
        let mut certified = None;
        let stream = match &self.tls {
            None => Stream::Plain(stream),
            Some(acceptor) => {
                let tls = acceptor.accept(stream).await.map_err(LinkError::from)?;
                let certificates = tls.get_ref().1.peer_certificates();
                certified = certificates.and_then(|chain| security::identity_of(chain.first()?));
                Stream::Tls(Box::new(tls.into()))
            }
        };
        let (mut reader, mut writer) = link::split(stream, self.frame_timeout);
        let nonce = security::random();
        writer.send(&[Message::Challenge { nonce }]).await?;
        let message = reader.message(PAYLOAD_BYTES_MAX_BEFORE_HELLO, self.hello_timeout, self.hello_timeout).await?;
        let Message::Hello { identity: claimed, proof } = message else { return Err(Ended::OutOfTurn) };
        // A secret that is wrong is not mended by a certificate: that is another identity, with other journals.
        let has_no_secret = claimed == security::ANONYMOUS && proof == security::NO_PROOF;
        let identity = match (&self.secrets, certified) {
            (Some(secrets), _) if secrets.verify(&claimed, &nonce, &proof) => Some(claimed.clone()),
            (Some(_), certified) => certified.filter(|_| has_no_secret),
            (None, Some(certified)) => Some(certified),
            (None, None) if !self.has_client_certificates => Some(security::ANONYMOUS.to_owned()),
            (None, None) => None,
        };
        let Some(identity) = identity else {
            let reason = "who you are is not proven: the identity or its secret is wrong".to_owned();
            let _ = writer.send(&[Message::Refuse { refusal: Refusal::Unauthenticated, reason }]).await;
            writer.shut_down().await;
            return Err(Ended::Unauthenticated(claimed));
        };
        // Counted before the peer hears that it is welcome: of two connections the one made first is the one that is served.
        let slot = Slot::take(self, &identity);
        writer.send(&[Message::Welcome { identity: identity.clone() }]).await?;
        Ok((reader, writer, heard, identity, slot))
    }

    /// Serves a connection to its end. `is_known` is told once the peer has proven who it is.
    pub async fn serve(
        self: Arc<Self>,
        stream: TcpStream,
        mut stopping: watch::Receiver<bool>,
        mut evicted: oneshot::Receiver<()>,
        is_known: impl FnOnce(),
    ) -> Result<(), Ended> {
        let greeted = tokio::select! {
            greeted = tokio::time::timeout(self.hello_timeout, self.greet(stream)) => greeted,
            Ok(()) = &mut evicted => return Err(Ended::Evicted),
        };
        let (mut reader, writer, heard, identity, slot) =
            greeted.map_err(|_| LinkError::TimedOut(self.hello_timeout))??;
        is_known();
        let (replies, receiver) = mpsc::unbounded_channel();
        let (writer_ended, mut writer_ends) = oneshot::channel();
        let writing = tokio::spawn(async move {
            let ended = write_replies(writer, receiver).await;
            let _ = writer_ended.send(());
            ended
        });
        if slot.is_none() {
            let reason = format!("{identity} has {CONNECTIONS_OF_CLIENT_MAX} connections already");
            // It may well be otherwise soon: nothing is said of what is kept.
            let _ = replies.send(Reply::No(no(Refusal::Full, &reason), None));
        }
        let requests = async {
            match &slot {
                Some(slot) => self.read_requests(&mut reader, heard, &replies, slot).await,
                None => Ok(()),
            }
        };
        let ended = tokio::select! {
            biased;
            ended = requests => ended,
            _ = stopping.wait_for(|stopping| *stopping) => Err(Ended::Stopping),
            // It said its last word, or the peer does not listen any more.
            _ = &mut writer_ends => Ok(()),
        };
        let last = match &ended {
            Err(Ended::No(no)) => Some(no.clone()),
            Err(Ended::Stopping) => Some(no(Refusal::Stopping, "the journal server is stopping")),
            Err(Ended::Link(LinkError::Message(error))) => Some(no(Refusal::Refused, &error.to_string())),
            Err(Ended::OutOfTurn) => Some(no(Refusal::Refused, "that is not said here")),
            _ => None,
        };
        if let Some(last) = last {
            let _ = replies.send(Reply::No(last, None));
        }
        drop(replies);
        // What is on its way to the store may still be answered; a peer that does not listen is not waited for long.
        let written = tokio::time::timeout(self.frame_timeout, writing).await;
        match (ended, written) {
            (Ok(()), Ok(Ok(result))) => result,
            (Err(Ended::Stopping | Ended::Link(LinkError::Closed)), _) => Ok(()),
            (ended, _) => ended,
        }
    }

    async fn ask(&self, question: Question) -> Result<Answer, Ended> {
        let (sender, receiver) = oneshot::channel();
        let stopped = || Ended::No(no(Refusal::Stopping, "the journal server is stopping"));
        self.operations.send(Operation::Ask(question, sender)).map_err(|_| stopped())?;
        receiver.await.map_err(|_| stopped())?.map_err(Ended::No)
    }

    async fn read_requests(
        &self,
        reader: &mut FrameReader,
        heard: Arc<Heard>,
        replies: &mpsc::UnboundedSender<Reply>,
        slot: &Slot,
    ) -> Result<(), Ended> {
        let identity = &slot.identity;
        let own = |name: String| format!("{identity}/{name}");
        let answers = Arc::new(Semaphore::new(ANSWERS_IN_FLIGHT));
        let fetched = Arc::new(Semaphore::new(FETCHED_IN_FLIGHT));
        let batches = Arc::new(Semaphore::new(BATCHES_IN_FLIGHT));
        let turn = async |of: &Arc<Semaphore>| Arc::clone(of).acquire_owned().await.map_err(|_| Ended::Stopping);
        let mut begun: Option<(u32, u32)> = None;
        // What this connection has taken, and the fence that it was given for that.
        let mut taken: Option<(String, u64)> = None;
        let presence = Arc::new(Presence::new(heard, self.silence));
        let writer = || Writer { replies: replies.downgrade(), presence: Arc::clone(&presence) };
        loop {
            presence.listens();
            let kind = reader.frame(PAYLOAD_BYTES_MAX, self.idle_timeout, self.frame_timeout).await?;
            presence.is_served();
            if kind == 6 {
                let header = BatchHeader::read(reader.payload()).map_err(LinkError::from)?;
                let Some((journal, block_bytes)) = begun else { return Err(Ended::OutOfTurn) };
                if header.block_bytes != block_bytes {
                    return Err(Ended::No(no(Refusal::Refused, "a batch has blocks of another size than its journal")));
                }
                let payload = reader.take_payload();
                // What all share comes last: who waits for something of its own has nothing of it.
                let turn = turn(&batches).await?;
                let room = Arc::clone(&self.room).acquire_many_owned(payload.len() as u32).await;
                let Ok(room) = room else { return Err(Ended::Stopping) };
                let replies = replies.clone();
                let append = Operation::Append { journal, header, payload, replies, turn, _room: room };
                self.operations.send(append).map_err(|_| Ended::Stopping)?;
                continue;
            }
            let message = Message::read(kind, reader.payload()).map_err(LinkError::from)?;
            let question = match message {
                Message::Ping => {
                    let _ = replies.send(Reply::Message(Message::Pong, turn(&answers).await?));
                    continue;
                }
                Message::Fetch { name, epoch, from } => {
                    let name = own(name);
                    let mut sequence = from;
                    let fetch = turn(&slot.fetches).await?;
                    loop {
                        let question = Question::Fetch { name: name.clone(), epoch, sequence };
                        let turn = turn(&fetched).await?;
                        let room = Arc::clone(&self.fetch_room).acquire_many_owned(PAYLOAD_BYTES_MAX as u32).await;
                        let Ok(mut room) = room else { return Err(Ended::Stopping) };
                        match self.ask(question).await? {
                            Answer::Batch(Some(batch)) => {
                                // It is shorter than it might have been.
                                drop(room.split(PAYLOAD_BYTES_MAX.saturating_sub(batch.len())));
                                let _ = replies.send(Reply::Stored(batch, [turn, room]));
                            }
                            _ => break,
                        }
                        sequence += 1;
                    }
                    // Over when its last word is written: until then its batches are in memory.
                    let _ = replies.send(Reply::Message(Message::Done, fetch));
                    continue;
                }
                Message::Begin { .. } | Message::BeginAfter { .. } if begun.is_some() => return Err(Ended::OutOfTurn),
                Message::Begin { name, owner, nonce, epoch_min, block_bytes } => {
                    begun = Some((0, block_bytes));
                    let (name, writer) = (own(name), writer());
                    Question::Begin { name, owner, nonce, epoch_min, block_bytes, after: None, writer }
                }
                Message::BeginAfter { name, owner, nonce, epoch_min, block_bytes, after } => {
                    begun = Some((0, block_bytes));
                    let (name, writer, after) = (own(name), writer(), Some(after));
                    Question::Begin { name, owner, nonce, epoch_min, block_bytes, after, writer }
                }
                Message::Close { name, epoch, nonce } => {
                    let name = own(name);
                    let taken = taken.as_ref().filter(|(taken, _)| *taken == name).map(|(_, fence)| *fence);
                    Question::Close { name, epoch, nonce, taken }
                }
                Message::Take { name } => {
                    let name = own(name);
                    taken = Some((name.clone(), 0));
                    Question::Take { name, log: None, if_free: false }
                }
                Message::TakeLog { name, epoch, nonce } => {
                    let name = own(name);
                    taken = Some((name.clone(), 0));
                    Question::Take { name, log: Some((epoch, nonce)), if_free: false }
                }
                Message::TakeFree { name, epoch, nonce } => {
                    let name = own(name);
                    taken = Some((name.clone(), 0));
                    Question::Take { name, log: Some((epoch, nonce)), if_free: true }
                }
                Message::Rename { name, epoch, nonce, next } => {
                    Question::Rename { name: own(name), epoch, nonce, next }
                }
                Message::List => Question::List { prefix: format!("{identity}/") },
                Message::Delete { name, even_live } => Question::Delete { name: own(name), even_live },
                _ => return Err(Ended::OutOfTurn),
            };
            let turn = turn(&answers).await?;
            let answer = match self.ask(question).await? {
                Answer::Begun { journal, epoch } => {
                    begun = begun.map(|(_, block_bytes)| (journal, block_bytes));
                    Message::Begun { epoch }
                }
                Answer::Taken { fence } => {
                    taken = taken.map(|(name, _)| (name, fence));
                    Message::Done
                }
                Answer::Done | Answer::Batch(_) => Message::Done,
                Answer::List(journals) => Message::Journals(journals),
            };
            let _ = replies.send(Reply::Message(answer, turn));
        }
    }

    pub fn log_end(&self, peer: std::net::SocketAddr, ended: Result<(), Ended>) {
        match ended {
            Ok(()) => log::debug!("{peer}: the connection ended"),
            Err(ended) => {
                if matches!(ended, Ended::Unauthenticated(_)) {
                    self.metrics.unauthenticated.fetch_add(1, Ordering::Relaxed);
                }
                self.log_dropped(peer, &ended);
            }
        }
    }

    /// Peers that are dropped all the time do not fill the log.
    pub fn log_dropped(&self, peer: std::net::SocketAddr, why: &dyn std::fmt::Display) {
        self.metrics.dropped.fetch_add(1, Ordering::Relaxed);
        match self.log_lines.lock().expect("no panic under this lock").take() {
            None => {}
            Some(0) => log::warn!("{peer}: the connection was dropped: {why}"),
            Some(others) => {
                log::warn!("{peer}: the connection was dropped: {why} ({others} others were dropped before it)");
            }
        }
    }
}

/// Writes replies until there can be no more, or the last word was said. Of several "durable", the last says it all.
async fn write_replies(mut writer: FrameWriter, mut replies: mpsc::UnboundedReceiver<Reply>) -> Result<(), Ended> {
    while let Some(first) = replies.recv().await {
        // Given back when the replies are written.
        let mut turns = Vec::new();
        let mut next = Some(first);
        let mut last = None;
        let mut durable = None;
        while let Some(reply) = next {
            if let Reply::Durable(sequence, turn) = reply {
                turns.push(turn);
                durable = Some(sequence);
            } else {
                let buffer = writer.buffer();
                if let Some(sequence) = durable.take() {
                    Message::Durable { sequence }.write(buffer);
                }
                match reply {
                    Reply::Durable(..) => {}
                    Reply::Message(message, turn) => {
                        turns.push(turn);
                        message.write(buffer);
                    }
                    Reply::Stored(payload, of_it) => {
                        turns.extend(of_it);
                        if let Err(error) = write_stored_batch(buffer, &payload) {
                            last = Some(no(Refusal::Damaged, &error.to_string()));
                        }
                    }
                    Reply::No(no, turn) => {
                        turns.extend(turn);
                        last = Some(no);
                    }
                }
            }
            if last.is_some() || writer.buffer().len() > WRITE_BYTES {
                break;
            }
            next = replies.try_recv().ok();
        }
        let buffer = writer.buffer();
        if let Some(sequence) = durable {
            Message::Durable { sequence }.write(buffer);
        }
        if let Some(No { refusal, reason }) = &last {
            Message::Refuse { refusal: *refusal, reason: reason.clone() }.write(buffer);
        }
        let limit = writer.patience * (1 + writer.buffer().len().div_ceil(PACE_BYTES) as u32);
        tokio::time::timeout(limit, writer.flush()).await.map_err(|_| LinkError::TimedOut(limit))??;
        if let Some(no) = last {
            writer.shut_down().await;
            return Err(Ended::No(no));
        }
    }
    writer.shut_down().await;
    Ok(())
}
