//! The client's end of the wire.

use crate::link::{self, FrameReader, FrameWriter, LinkError, Socket, Stream};
use crate::message::{Batch, JournalStatus, Message, MessageError, PAYLOAD_BYTES_MAX, Refusal};
use crate::security::{self, ClientSecurity};
use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::net::TcpStream;

/// Which server, and how patiently.
#[derive(Clone, Debug)]
pub struct ClientOptions {
    /// HOST:PORT.
    pub address: String,
    /// How it is trusted.
    pub security: ClientSecurity,
    /// A server that does not answer for this long is given up.
    pub timeout: Duration,
}

/// Why something could not be done.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The connection ended.
    #[error("{0}")]
    Link(#[from] LinkError),
    /// The server said no.
    #[error("the journal server refuses: {reason}")]
    Refused {
        /// What kind of no.
        refusal: Refusal,
        /// In its words.
        reason: String,
    },
    /// The server said something else than was asked.
    #[error("the journal server gave an answer to another question")]
    Unexpected,
    /// The server does not know what it is asked.
    #[error("the journal server is older than this amberlog, and cannot tell whose log it has: update it first")]
    OldServer,
    /// The server does not go by the secret that it was shown.
    #[error(
        "the journal server calls this client {found}, and not {shown}, whose secret it was shown: the journals of {shown} would not be \
         found there; start the server with --secrets, or leave --remote-secret out"
    )]
    OtherIdentity {
        /// Whose secret it was.
        shown: String,
        /// Who the server takes it for.
        found: String,
    },
    /// What was fetched is not whole.
    #[error("{0}")]
    Incomplete(String),
}

impl From<io::Error> for ClientError {
    fn from(error: io::Error) -> Self {
        ClientError::Link(error.into())
    }
}

impl ClientError {
    /// An older server says so of a frame that it does not know.
    fn of_kind_unknown(self, kind: u8) -> Self {
        let says = MessageError::Malformed(kind).to_string();
        match self {
            ClientError::Refused { refusal: Refusal::Refused, reason } if reason == says => ClientError::OldServer,
            other => other,
        }
    }

    /// Whether the same may go well later: nothing is said of what the server keeps.
    pub fn is_passing(&self) -> bool {
        match self {
            ClientError::Link(_) => true,
            ClientError::Refused { refusal, .. } => {
                matches!(refusal, Refusal::Full | Refusal::Failed | Refusal::Stopping | Refusal::InUse)
            }
            _ => false,
        }
    }

    /// Whether what the server keeps was found to be damaged, or not whole. Everything else says nothing of it: neither does a server
    /// that does not know us, or does not understand.
    pub fn is_damage(&self) -> bool {
        matches!(self, ClientError::Incomplete(_) | ClientError::Refused { refusal: Refusal::Damaged, .. })
    }

    /// Whether whoever writes to the log is there.
    pub fn is_in_use(&self) -> bool {
        matches!(self, ClientError::Refused { refusal: Refusal::InUse, .. })
    }

    /// Whether somebody else was given a higher epoch.
    pub fn is_fenced(&self) -> bool {
        matches!(self, ClientError::Refused { refusal: Refusal::Fenced, .. })
    }
}

/// Half a second at 500 KB/s, and 100 MB/s over a local network.
const SEND_BUFFER_BYTES: usize = 256 << 10;

/// A log that is fetched comes at least so fast, after a server's first answer: a server that says a little now and then would keep a VM from
/// its start.
const FETCH_BYTES_PER_SECOND_MIN: u64 = 16 << 10;
/// As much as a log is asked for at that pace at most, in logs: blocks are written anew, and kept until those before them are not needed.
const FETCH_LOGS_MAX: u64 = 4;
/// Batches that a writer adds while its log is fetched.
const BATCHES_ADDED_MAX: u64 = 1 << 16;

/// A connection to a server that knows who we are.
pub struct Client {
    reader: FrameReader,
    writer: FrameWriter,
    timeout: Duration,
}

impl Client {
    /// Connects, and proves who we are.
    ///
    /// # Errors
    /// When the server is not there, is not the right one, or does not know us.
    pub async fn connect(options: &ClientOptions) -> Result<Self, ClientError> {
        let connecting = Self::connect_patiently(options);
        tokio::time::timeout(options.timeout, connecting).await.map_err(|_| LinkError::TimedOut(options.timeout))?
    }

    async fn connect_patiently(options: &ClientOptions) -> Result<Self, ClientError> {
        let host = options.address.rsplit_once(':').map_or(options.address.as_str(), |(host, _)| host);
        let credentials = options.security.load(host.trim_matches(['[', ']']))?;
        let stream = TcpStream::connect(&options.address)
            .await
            .map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", options.address)))?;
        link::prepare(&stream)?;
        // What the link has not taken yet is still ours, so that its progress can be seen: on a slow one, megabytes in the
        // kernel would keep the server from saying anything for longer than we wait.
        rustix::net::sockopt::set_socket_send_buffer_size(&stream, SEND_BUFFER_BYTES).map_err(io::Error::from)?;
        let stream = Socket::new(stream);
        let stream = match credentials.tls {
            None => Stream::Plain(stream),
            Some((config, name)) => {
                let connector = tokio_rustls::TlsConnector::from(config);
                Stream::Tls(Box::new(connector.connect(name, stream).await?.into()))
            }
        };
        let (reader, writer) = link::split(stream, options.timeout);
        let mut client = Client { reader, writer, timeout: options.timeout };
        let Message::Challenge { nonce } = client.answer().await? else { return Err(ClientError::Unexpected) };
        let (identity, proof) = match &credentials.secret {
            Some((identity, secret)) => (identity.clone(), security::prove(identity, secret, &nonce)),
            None => (security::ANONYMOUS.to_owned(), security::NO_PROOF),
        };
        let Message::Welcome { identity: found } = client.ask(Message::Hello { identity, proof }).await? else {
            return Err(ClientError::Unexpected);
        };
        match credentials.secret {
            // A server that does not know of secrets goes by a certificate, or calls everybody the same.
            Some((shown, _)) if shown != found => Err(ClientError::OtherIdentity { shown, found }),
            _ => Ok(client),
        }
    }

    /// Waits for what is no mere sign of life: those do not make it wait longer.
    async fn answer(&mut self) -> Result<Message, ClientError> {
        let asked = Instant::now();
        loop {
            let left = self.timeout.saturating_sub(asked.elapsed());
            if left.is_zero() {
                return Err(LinkError::TimedOut(self.timeout).into());
            }
            let message = self.reader.message(PAYLOAD_BYTES_MAX, left, self.timeout).await?;
            match message {
                Message::Refuse { refusal, reason } => return Err(ClientError::Refused { refusal, reason }),
                Message::Pong => {}
                other => return Ok(other),
            }
        }
    }

    async fn ask(&mut self, question: Message) -> Result<Message, ClientError> {
        self.writer.send(&[question]).await?;
        self.answer().await
    }

    async fn done(&mut self, question: Message) -> Result<(), ClientError> {
        match self.ask(question).await? {
            Message::Done => Ok(()),
            _ => Err(ClientError::Unexpected),
        }
    }

    /// Begins a log in the place of none but one of those with the nonces `after`; gives its epoch, which is higher than
    /// `epoch_min`. Batches follow on this connection.
    ///
    /// # Errors
    /// When the server refuses: it has somebody else's live log, or is older than this client.
    pub async fn begin(
        &mut self,
        name: &str,
        owner: [u8; 16],
        nonce: [u8; 16],
        epoch_min: u64,
        block_bytes: u32,
        after: &[[u8; 16]],
    ) -> Result<u64, ClientError> {
        let (name, after) = (name.to_owned(), after.to_vec());
        let question = Message::BeginAfter { name, owner, nonce, epoch_min, block_bytes, after };
        let kind = question.kind();
        match self.ask(question).await.map_err(|error| error.of_kind_unknown(kind))? {
            Message::Begun { epoch } if epoch > epoch_min => Ok(epoch),
            _ => Err(ClientError::Unexpected),
        }
    }

    /// Begins a log as an amberlog up to 0.1 does, which cannot say which log it may follow: for tests of what a server
    /// makes of that.
    ///
    /// # Errors
    /// When the server refuses.
    #[doc(hidden)]
    pub async fn begin_as_before(
        &mut self,
        name: &str,
        owner: [u8; 16],
        nonce: [u8; 16],
        epoch_min: u64,
        block_bytes: u32,
    ) -> Result<u64, ClientError> {
        let question = Message::Begin { name: name.to_owned(), owner, nonce, epoch_min, block_bytes };
        match self.ask(question).await? {
            Message::Begun { epoch } => Ok(epoch),
            _ => Err(ClientError::Unexpected),
        }
    }

    /// Says that a log is over: by its writer, or, on a connection that has taken it, by who recovered it.
    ///
    /// # Errors
    /// When the server refuses.
    pub async fn close(&mut self, name: &str, epoch: u64, nonce: [u8; 16]) -> Result<(), ClientError> {
        self.done(Message::Close { name: name.to_owned(), epoch, nonce }).await
    }

    /// Gives a log that was begun on this connection another nonce.
    ///
    /// # Errors
    /// When the server refuses: somebody else has the log, or the server is older than this client.
    pub async fn rename(&mut self, name: &str, epoch: u64, nonce: [u8; 16], next: [u8; 16]) -> Result<(), ClientError> {
        let question = Message::Rename { name: name.to_owned(), epoch, nonce, next };
        let kind = question.kind();
        self.done(question).await.map_err(|error| error.of_kind_unknown(kind))
    }

    /// The client's journals.
    ///
    /// # Errors
    /// When the connection ends.
    pub async fn list(&mut self) -> Result<Vec<JournalStatus>, ClientError> {
        match self.ask(Message::List).await? {
            Message::Journals(journals) => Ok(journals),
            _ => Err(ClientError::Unexpected),
        }
    }

    /// Fences off whoever writes to a journal.
    ///
    /// # Errors
    /// When the server refuses.
    pub async fn take(&mut self, name: &str) -> Result<(), ClientError> {
        self.done(Message::Take { name: name.to_owned() }).await
    }

    /// Fences off whoever writes this very log. A [`Client::close`] on this connection then says that it was recovered.
    ///
    /// # Errors
    /// When the server refuses: it has another log by now, or is older than this client.
    pub async fn take_log(&mut self, name: &str, epoch: u64, nonce: [u8; 16]) -> Result<(), ClientError> {
        let question = Message::TakeLog { name: name.to_owned(), epoch, nonce };
        let kind = question.kind();
        self.done(question).await.map_err(|error| error.of_kind_unknown(kind))
    }

    /// The same, unless who writes it is there: he may be the true one. The server ends a connection on which it has said so.
    ///
    /// # Errors
    /// Then ([`ClientError::is_in_use`]), and as [`Client::take_log`].
    pub async fn take_free(&mut self, name: &str, epoch: u64, nonce: [u8; 16]) -> Result<(), ClientError> {
        let question = Message::TakeFree { name: name.to_owned(), epoch, nonce };
        let kind = question.kind();
        self.done(question).await.map_err(|error| error.of_kind_unknown(kind))
    }

    /// Removes a journal.
    ///
    /// # Errors
    /// When the server refuses.
    pub async fn delete(&mut self, name: &str, even_live: bool) -> Result<(), ClientError> {
        self.done(Message::Delete { name: name.to_owned(), even_live }).await
    }

    /// Fetches a log of at most `log_blocks` blocks: every batch from the tail to the last, without a gap, each block with
    /// its checksum compared.
    ///
    /// # Errors
    /// When anything is missing or damaged, or no block of that log, or it does not come to an end: no part of it is given then.
    pub async fn fetch(&mut self, status: &JournalStatus, log_blocks: u32) -> Result<FetchedLog, ClientError> {
        let log_bytes = u64::from(log_blocks).saturating_mul(u64::from(status.block_bytes));
        let bytes = status.bytes.min(log_bytes.saturating_mul(FETCH_LOGS_MAX));
        let allowed = 2 * self.timeout + Duration::from_secs(bytes / FETCH_BYTES_PER_SECOND_MIN);
        match tokio::time::timeout(allowed, self.fetch_patiently(status, log_blocks)).await {
            Ok(fetched) => fetched,
            Err(_) => {
                let sentence =
                    format!("{}: its log has not come to an end within {} s", status.name, allowed.as_secs());
                Err(io::Error::new(io::ErrorKind::TimedOut, sentence).into())
            }
        }
    }

    async fn fetch_patiently(&mut self, status: &JournalStatus, log_blocks: u32) -> Result<FetchedLog, ClientError> {
        let JournalStatus { name, epoch, tail, .. } = status.clone();
        self.writer.send(&[Message::Fetch { name: name.clone(), epoch, from: tail }]).await?;
        let mut log = FetchedLog { status: status.clone(), blocks: HashMap::new() };
        let mut next = tail;
        let batches_max = status.batches.saturating_add(BATCHES_ADDED_MAX);
        loop {
            match self.answer().await? {
                Message::Batch(batch) if batch.epoch == epoch && batch.sequence == next => {
                    let after = next.checked_add(1).filter(|after| after - tail <= batches_max);
                    let Some(after) = after else {
                        return Err(ClientError::Incomplete(format!(
                            "{name}: more batches come than the {} that are kept of it; the server is not to be believed",
                            status.batches
                        )));
                    };
                    if let Some(block) = batch.blocks.iter().find(|block| block.position >= log_blocks) {
                        return Err(ClientError::Incomplete(format!(
                            "{name}: log block {} was fetched for a journal of {log_blocks} blocks; it is another's",
                            block.position
                        )));
                    }
                    // Memory is for one log, whatever a server sends.
                    if let Some(block) =
                        batch.blocks.iter().find(|block| block.content.len() != status.block_bytes as usize)
                    {
                        return Err(ClientError::Incomplete(format!(
                            "{name}: log block {} has {} bytes, and this journal's blocks have {}",
                            block.position,
                            block.content.len(),
                            status.block_bytes
                        )));
                    }
                    log.blocks.extend(batch.blocks.into_iter().map(|block| (block.position, block.content)));
                    next = after;
                }
                Message::Batch(batch) => {
                    return Err(ClientError::Incomplete(format!(
                        "{name}: batch {} of epoch {} came where {next} of {epoch} was due; nothing is replayed over a gap",
                        batch.sequence, batch.epoch
                    )));
                }
                Message::Done if next > status.last => return Ok(log),
                Message::Done => {
                    return Err(ClientError::Incomplete(format!(
                        "{name}: the log ends before batch {next}, but {} were acknowledged",
                        status.last
                    )));
                }
                _ => return Err(ClientError::Unexpected),
            }
        }
    }

    /// For a connection on which a log was begun: the half that sends batches, and the one that hears of them.
    pub fn into_pipeline(self) -> (BatchSender, DurableReceiver) {
        (BatchSender(self.writer), DurableReceiver { reader: self.reader })
    }
}

/// Sends batches.
pub struct BatchSender(FrameWriter);

impl BatchSender {
    /// Sends batches, in one write.
    ///
    /// # Errors
    /// When the server takes nothing in time, or is gone.
    pub async fn send(&mut self, batches: Vec<Batch>) -> Result<(), ClientError> {
        let messages: Vec<Message> = batches.into_iter().map(Message::Batch).collect();
        Ok(self.0.send(&messages).await?)
    }

    /// Asks for a sign of life.
    ///
    /// # Errors
    /// When the server is gone.
    pub async fn ping(&mut self) -> Result<(), ClientError> {
        Ok(self.0.send(&[Message::Ping]).await?)
    }

    /// Says that the log is over; the answer comes to the other half.
    ///
    /// # Errors
    /// When the server is gone.
    pub async fn close(&mut self, name: &str, epoch: u64, nonce: [u8; 16]) -> Result<(), ClientError> {
        Ok(self.0.send(&[Message::Close { name: name.to_owned(), epoch, nonce }]).await?)
    }

    /// Gives the log another nonce; the answer comes to the other half.
    ///
    /// # Errors
    /// When the server is gone.
    pub async fn rename(&mut self, name: &str, epoch: u64, nonce: [u8; 16], next: [u8; 16]) -> Result<(), ClientError> {
        Ok(self.0.send(&[Message::Rename { name: name.to_owned(), epoch, nonce, next }]).await?)
    }

    /// Bytes sent so far on this connection, before TLS.
    pub fn sent_bytes(&self) -> u64 {
        self.0.sent_bytes
    }
}

/// What the server tells a writer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Heard {
    /// Durable up to and with this batch.
    Durable(u64),
    /// It is there.
    Alive,
    /// What it was asked for is done: the log is over, or is called otherwise.
    Done,
}

/// Hears of batches.
pub struct DurableReceiver {
    reader: FrameReader,
}

impl DurableReceiver {
    /// Waits for the server. Not to be given up half way.
    ///
    /// # Errors
    /// When the server refuses, is gone, or says nothing for `idle`.
    pub async fn hear(&mut self, idle: Duration) -> Result<Heard, ClientError> {
        match self.reader.message(PAYLOAD_BYTES_MAX, idle, idle).await? {
            Message::Durable { sequence } => Ok(Heard::Durable(sequence)),
            Message::Pong => Ok(Heard::Alive),
            Message::Done => Ok(Heard::Done),
            Message::Refuse { refusal, reason } => Err(ClientError::Refused { refusal, reason }),
            _ => Err(ClientError::Unexpected),
        }
    }
}

/// A log as the server kept it.
#[derive(Clone, Debug)]
pub struct FetchedLog {
    /// Which.
    pub status: JournalStatus,
    /// The newest content of every log block that was needed.
    pub blocks: HashMap<u32, Arc<[u8]>>,
}

/// A client for code that waits.
pub struct BlockingClient {
    runtime: tokio::runtime::Runtime,
    client: Client,
}

impl BlockingClient {
    /// Connects.
    ///
    /// # Errors
    /// As [`Client::connect`].
    pub fn connect(options: &ClientOptions) -> Result<Self, ClientError> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let client = runtime.block_on(Client::connect(options))?;
        Ok(BlockingClient { runtime, client })
    }

    /// As [`Client::list`].
    ///
    /// # Errors
    /// The same.
    pub fn list(&mut self) -> Result<Vec<JournalStatus>, ClientError> {
        self.runtime.block_on(self.client.list())
    }

    /// One journal, if there is one of this name.
    ///
    /// # Errors
    /// As [`Client::list`].
    pub fn status(&mut self, name: &str) -> Result<Option<JournalStatus>, ClientError> {
        Ok(self.list()?.into_iter().find(|journal| journal.name == name))
    }

    /// As [`Client::take`].
    ///
    /// # Errors
    /// The same.
    pub fn take(&mut self, name: &str) -> Result<(), ClientError> {
        self.runtime.block_on(self.client.take(name))
    }

    /// As [`Client::take_log`].
    ///
    /// # Errors
    /// The same.
    pub fn take_log(&mut self, name: &str, epoch: u64, nonce: [u8; 16]) -> Result<(), ClientError> {
        self.runtime.block_on(self.client.take_log(name, epoch, nonce))
    }

    /// As [`Client::take_free`].
    ///
    /// # Errors
    /// The same.
    pub fn take_free(&mut self, name: &str, epoch: u64, nonce: [u8; 16]) -> Result<(), ClientError> {
        self.runtime.block_on(self.client.take_free(name, epoch, nonce))
    }

    /// As [`Client::fetch`].
    ///
    /// # Errors
    /// The same.
    pub fn fetch(&mut self, status: &JournalStatus, log_blocks: u32) -> Result<FetchedLog, ClientError> {
        self.runtime.block_on(self.client.fetch(status, log_blocks))
    }

    /// As [`Client::close`].
    ///
    /// # Errors
    /// The same.
    pub fn close(&mut self, name: &str, epoch: u64, nonce: [u8; 16]) -> Result<(), ClientError> {
        self.runtime.block_on(self.client.close(name, epoch, nonce))
    }

    /// As [`Client::delete`].
    ///
    /// # Errors
    /// The same.
    pub fn delete(&mut self, name: &str, even_live: bool) -> Result<(), ClientError> {
        self.runtime.block_on(self.client.delete(name, even_live))
    }
}

/// Servers that say what none should.
#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::Block;
    use crate::standstill::unless_it_stood_still;
    use std::io::{Read, Write};
    use std::net::TcpListener;

    const NOW_AND_THEN: Duration = Duration::from_millis(20);
    /// Far more often than that something is said, now and then.
    const TIMEOUT: Duration = Duration::from_secs(2);

    fn is_timed_out(error: &ClientError) -> bool {
        matches!(error, ClientError::Link(LinkError::TimedOut(_)))
    }

    fn client(
        timeout: Duration,
        then: impl FnOnce(&mut dyn FnMut(Message) -> bool) + Send + 'static,
    ) -> Result<BlockingClient, String> {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("its address").to_string();
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().expect("a client");
            let mut questions = stream.try_clone().expect("a descriptor");
            // What is asked is not looked at, until the client is gone.
            let questions =
                std::thread::spawn(move || while questions.read(&mut [0; 4096]).is_ok_and(|bytes| bytes > 0) {});
            let mut say = |message: Message| {
                let mut bytes = Vec::new();
                message.write(&mut bytes);
                stream.write_all(&bytes).is_ok()
            };
            say(Message::Challenge { nonce: [0; 32] });
            say(Message::Welcome { identity: "me".to_owned() });
            then(&mut say);
            questions.join().expect("no panic");
        });
        let security = ClientSecurity { insecure: true, ..ClientSecurity::default() };
        BlockingClient::connect(&ClientOptions { address, security, timeout }).map_err(|error| {
            assert!(is_timed_out(&error), "{error}");
            error.to_string()
        })
    }

    fn status(tail: u64, last: u64, batches: u64, bytes: u64) -> JournalStatus {
        JournalStatus {
            name: "j".to_owned(),
            owner: [1; 16],
            nonce: [2; 16],
            epoch: 1,
            fence: 1,
            block_bytes: 512,
            is_live: true,
            is_recovered: false,
            tail,
            last,
            batches,
            bytes,
        }
    }

    fn batch(sequence: u64) -> Message {
        let block = Block::new(0, vec![7; 512].into());
        Message::Batch(Batch { epoch: 1, sequence, tail: 1, blocks: vec![block] })
    }

    #[test]
    fn signs_of_life_are_no_answer() {
        unless_it_stood_still(TIMEOUT / 2, || {
            let mut client = client(TIMEOUT, |say| {
                for _ in 0..1000 {
                    std::thread::sleep(NOW_AND_THEN);
                    if !say(Message::Pong) {
                        return;
                    }
                }
                say(Message::Journals(Vec::new()));
            })?;
            assert!(client.list().is_err_and(|error| is_timed_out(&error)));
            Ok(())
        });
    }

    #[test]
    fn a_log_that_does_not_come_to_an_end_is_given_up() {
        // As fast as it can, from a log of three batches, whatever it says of the last.
        for last in [3, u64::MAX] {
            let mut client = client(Duration::from_secs(60), |say| {
                let mut sequence = 1;
                while sequence < 1 << 20 && say(batch(sequence)) {
                    sequence += 1;
                }
                say(Message::Done);
            })
            .expect("connects");
            let error = client.fetch(&status(1, last, 3, 100), 10).expect_err("more than there are");
            assert!(error.is_damage() && error.to_string().contains("more batches come"), "{error}");
        }
        // Up to the last number that there is.
        let mut end = client(Duration::from_secs(60), |say| {
            say(batch(u64::MAX));
            say(Message::Done);
        })
        .expect("connects");
        let error = end.fetch(&status(u64::MAX, u64::MAX, 1, 100), 10).expect_err("no number follows");
        assert!(error.is_damage(), "{error}");
        // A batch now and then, of a log of many.
        unless_it_stood_still(TIMEOUT / 2, || {
            let mut slow = client(TIMEOUT, |say| {
                for sequence in 1..=1000 {
                    std::thread::sleep(NOW_AND_THEN);
                    if !say(batch(sequence)) {
                        return;
                    }
                }
                say(Message::Done);
            })?;
            let error = slow.fetch(&status(1, 1000, 1000, 100), 10).expect_err("it takes too long");
            if is_timed_out(&error) {
                return Err(error.to_string());
            }
            assert!(error.is_passing() && error.to_string().contains("has not come to an end"), "{error}");
            Ok(())
        });
    }
}
