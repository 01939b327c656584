//! The stream itself: publishing a message once and knowing that it is there, reading one, moving the leader.

use super::ANSWER;
use super::config::{MESSAGE_BYTES_MAX, check, config, with_headers};
use super::message::{Absent, Head, Kind};
use super::options::NatsOptions;
use async_nats::jetstream::context::{CreateStreamErrorKind, GetStreamErrorKind, PublishErrorKind};
use async_nats::jetstream::message::PublishMessage;
use async_nats::jetstream::stream::{Info, RawMessageErrorKind, Stream};
use async_nats::jetstream::{Context, ContextBuilder, ErrorCode};
use async_nats::{ConnectErrorKind, ServerAddr};
use bytes::Bytes;
use futures_util::StreamExt;
use serde_json::{Value, json};
use std::io;
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;

/// How long one acknowledgement is waited for before the message is published again, which makes no second one of it.
const ACKNOWLEDGEMENT: Duration = Duration::from_secs(1);
/// Between two attempts.
const PAUSE: Duration = Duration::from_millis(100);
/// Messages that are read at a time.
const READS_AT_A_TIME: usize = 32;
/// How long a leader is waited for that was asked for.
const ELECTION: Duration = Duration::from_secs(10);
/// What the oldest server has to be: before it, streams lost messages when servers were killed.
const SERVER_VERSION_MIN: (u64, u64) = (2, 12);
/// Error codes of servers, or of an account, that have no room for a stream.
const NO_ROOM: [ErrorCode; 2] = [ErrorCode::STORAGE_RESOURCES_EXCEEDED, ErrorCode::ACCOUNT_RESOURCES_EXCEEDED];
/// Error codes of a stream, or of a server, that is full.
const FULL: [ErrorCode; 2] = [ErrorCode::INSUFFICIENT_RESOURCES, ErrorCode::STREAM_STORE_FAILED];

/// An attempt that failed.
pub(super) enum Failure {
    /// It may yet succeed.
    Again(String),
    /// It will not.
    Never(io::Error),
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Failure::Never(error)
    }
}

fn again(error: impl std::fmt::Display) -> Failure {
    Failure::Again(error.to_string())
}

pub(super) fn failed(what: impl Into<String>) -> io::Error {
    io::Error::other(what.into())
}

/// Why a message is not there: another journal server's has its number.
#[derive(Debug)]
pub(super) struct Fenced {
    what: String,
    /// That server has only begun to open the stream, and writes nothing yet.
    pub by_opening: bool,
}

impl std::fmt::Display for Fenced {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(&self.what)
    }
}

impl std::error::Error for Fenced {}

/// A message as the leader has it.
pub(super) enum Read {
    /// It is whole.
    Whole(Head, Bytes),
    /// The leader has none of this number.
    Missing,
    /// It cannot be used, and why.
    Damaged(String),
}

/// What there is to know of a stream from its leader.
pub(super) struct Standing {
    pub leader: String,
    /// Names of the other replicas that are there, those first that are up to date.
    pub followers: Vec<String>,
    pub last: u64,
    pub bytes: u64,
}

/// A stream, and our place in it.
pub(super) struct Link {
    runtime: Runtime,
    context: Context,
    stream: Stream,
    options: NatsOptions,
    /// Number of the last message, which is ours.
    pub last: u64,
    pub generation: u64,
    run: u64,
    /// Numbers that may be missing.
    pub absent: Absent,
    /// Numbers of the newest control message, or of its parts: the first and the last; 0: none.
    pub control: (u64, u64),
    /// Why nothing is published any more.
    failed: Option<String>,
    bytes_max: Option<u64>,
}

impl Link {
    /// Connects, makes the stream if there is none, and compares how it is kept with how a store needs it.
    pub fn open(options: NatsOptions) -> io::Result<Self> {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).thread_name("nats").enable_all().build()?;
        let deadline = Instant::now() + options.patience;
        let context = runtime.block_on(connect(&options, deadline))?;
        let stream = runtime.block_on(open_stream(&context, &options, deadline))?;
        check(&stream.cached_info().config, &options)?;
        let bytes_max = u64::try_from(stream.cached_info().config.max_bytes).ok();
        Ok(Link {
            runtime,
            context,
            stream,
            options,
            last: 0,
            generation: 0,
            run: u64::from_le_bytes(crate::security::random()),
            absent: Absent::default(),
            control: (0, 0),
            failed: None,
            bytes_max,
        })
    }

    pub fn name(&self) -> &str {
        &self.options.address.stream
    }

    pub fn replicas(&self) -> usize {
        self.options.replicas
    }

    pub fn patience(&self) -> Duration {
        self.options.patience
    }

    pub fn segment_subject(&self, segment: u64) -> String {
        format!("{}.segment.{segment:016x}", self.name())
    }

    pub fn control_subject(&self) -> String {
        format!("{}.control", self.name())
    }

    pub fn fence_subject(&self) -> String {
        format!("{}.fence", self.name())
    }

    /// Tries until it succeeds, or patience is over.
    fn patiently<T>(&self, what: &str, attempt: impl AsyncFnMut() -> Result<T, Failure>) -> io::Result<T> {
        self.tried_for(self.options.patience, what, attempt)
    }

    fn tried_for<T>(
        &self,
        patience: Duration,
        what: &str,
        attempt: impl AsyncFnMut() -> Result<T, Failure>,
    ) -> io::Result<T> {
        let deadline = Instant::now() + patience;
        self.runtime.block_on(until(deadline, &format!("stream {}: {what}", self.name()), attempt))
    }

    /// How the stream stands, from its leader.
    pub fn standing(&self) -> io::Result<Standing> {
        self.patiently("asking for its state", async || {
            standing_of(self.stream.get_info().await.map_err(again)?).ok_or_else(|| again("it has no leader"))
        })
    }

    /// Whether there is room for so many bytes more.
    pub fn has_room_for(&self, bytes: u64) -> io::Result<bool> {
        let Some(bytes_max) = self.bytes_max else { return Ok(true) };
        Ok(self.standing()?.bytes.saturating_add(with_headers(bytes)) <= bytes_max)
    }

    /// Publishes one message; on return it is durable, once. Gives its number.
    ///
    /// # Errors
    /// Then nobody knows whether it is there, and nothing more is published: [`io::ErrorKind::PermissionDenied`] when another
    /// journal server has the stream.
    pub fn publish(&mut self, kind: Kind, segment: u64, offset: u64, content: &[u8]) -> io::Result<u64> {
        if let Some(reason) = &self.failed {
            return Err(failed(format!("nothing is published any more since: {reason}")));
        }
        let number = self.last + 1;
        let head = Head { kind, number, generation: self.generation, run: self.run, segment, offset };
        let subject = match kind {
            Kind::Control | Kind::ControlPart => self.control_subject(),
            Kind::Fence => self.fence_subject(),
            Kind::Piece | Kind::Ends => self.segment_subject(segment),
        };
        match self.publish_until_known(number, &subject, &Bytes::from(head.write(content))) {
            Ok(()) => {
                self.last = number;
                Ok(number)
            }
            Err(error) => {
                self.failed = Some(error.to_string());
                Err(error)
            }
        }
    }

    /// Whoever has the stream cannot write any more on return, and all that he wrote can be read in peace. After a failed
    /// attempt to open, the next one may be made.
    ///
    /// A message on condition that the last one is the one that was read could fail for ever beside somebody who publishes
    /// one after the other. This one has no condition: it comes behind any of his, and his next one is refused.
    pub fn fence(&mut self) -> io::Result<()> {
        let (kind, generation, run) = (Kind::Fence, self.generation, self.run);
        let message = Bytes::from(Head { kind, number: 0, generation, run, segment: 0, offset: 0 }.write(&[]));
        let subject = self.fence_subject();
        let name = format!("{run:016x}-fence-{:016x}", u64::from_le_bytes(crate::security::random()));
        self.patiently("fencing off the journal server that has it", async || {
            let publish =
                PublishMessage::build().payload(message.clone()).message_id(&name).expected_stream(self.name());
            let acknowledgement =
                self.context.send_publish(subject.clone(), publish).await.map_err(|error| refused(&error))?;
            acknowledgement.await.map(|_| ()).map_err(|error| refused(&error))
        })?;
        self.may_try_again();
        Ok(())
    }

    /// After a failed attempt to open.
    pub fn may_try_again(&mut self) {
        self.failed = None;
    }

    fn publish_until_known(&self, number: u64, subject: &str, message: &Bytes) -> io::Result<()> {
        let name = format!("{:016x}-{number}", self.run);
        let mut leader_moved = Instant::now();
        self.patiently("publishing a message", async || {
            let publish = PublishMessage::build()
                .payload(message.clone())
                .message_id(&name)
                .expected_stream(self.name())
                .expected_last_sequence(number - 1);
            let sent = self.context.send_publish(subject.to_owned(), publish).await;
            let acknowledged = match sent {
                Ok(acknowledgement) => acknowledgement.await,
                Err(error) => Err(error),
            };
            let error = match acknowledged {
                Ok(ack) if ack.stream != self.name() || ack.sequence != number => {
                    return Err(Failure::Never(failed(format!(
                        "message {number} was acknowledged as message {} of stream {}; the stream was made anew, or changed by others",
                        ack.sequence, ack.stream
                    ))));
                }
                Ok(ack) if !ack.duplicate => return Ok(()),
                // It was there already: what is there is looked at.
                Ok(_) => "it was acknowledged as a duplicate, but is not there".to_owned(),
                Err(error) if error.kind() == PublishErrorKind::WrongLastSequence => error.to_string(),
                Err(error) => return Err(refused(&error)),
            };
            // Our own message, whose acknowledgement was lost, or another journal server's.
            match self.read_now(number).await? {
                Read::Whole(_, there) if there == *message => Ok(()),
                Read::Whole(head, _) => Err(Failure::Never(self.fenced(Some(&head)))),
                Read::Damaged(why) => Err(again(format!("message {number} cannot be read: {why}"))),
                Read::Missing => {
                    let standing = self.stream.get_info().await.map_err(again)?;
                    let standing = standing_of(standing).ok_or_else(|| again("it has no leader"))?;
                    if standing.last > number {
                        // We have published nothing behind it: somebody else has, and has removed what had this number.
                        return Err(Failure::Never(self.fenced(None)));
                    }
                    if standing.last + 1 < number && leader_moved.elapsed() > self.options.patience / 6 {
                        log::warn!(
                            "stream {}: {} leads and lacks messages from {} on; another is made leader",
                            self.name(),
                            standing.leader,
                            standing.last + 1
                        );
                        leader_moved = Instant::now();
                        self.ask_for_leader(standing.followers.first().map(String::as_str)).await?;
                    }
                    Err(Failure::Again(error))
                }
            }
        })
    }

    fn fenced(&self, by: Option<&Head>) -> io::Error {
        let theirs = by.map_or("a later opening".to_owned(), |head| format!("opening {}", head.generation));
        let what = format!(
            "another journal server has the stream {} ({theirs} of it, this is {}); only one may run",
            self.name(),
            self.generation
        );
        let by_opening = by.is_some_and(|head| head.kind == Kind::Fence);
        io::Error::new(io::ErrorKind::PermissionDenied, Fenced { what, by_opening })
    }

    async fn read_now(&self, number: u64) -> Result<Read, Failure> {
        read_one(&self.stream, number).await
    }

    /// Reads messages, as the leader has them; gives each to `take`, in order.
    pub fn read(
        &self,
        numbers: impl Iterator<Item = u64>,
        mut take: impl FnMut(u64, Read) -> io::Result<()>,
    ) -> io::Result<()> {
        let deadline = Instant::now() + self.options.patience;
        let read_one = async |number: u64| {
            let what = format!("stream {}: reading message {number}", self.name());
            (number, until(deadline.max(Instant::now() + ANSWER), &what, async || self.read_now(number).await).await)
        };
        self.runtime.block_on(async {
            let mut reads = futures_util::stream::iter(numbers.map(read_one)).buffered(READS_AT_A_TIME);
            while let Some((number, read)) = reads.next().await {
                take(number, read?)?;
            }
            Ok(())
        })
    }

    /// Number of the newest control message, or part of one, that the leader has; 0: none.
    pub fn newest_control(&self) -> io::Result<u64> {
        let subject = self.control_subject();
        self.patiently("reading its newest control message", async || {
            match self.stream.get_last_raw_message_by_subject(&subject).await {
                Ok(message) => Ok(message.sequence),
                Err(error) if error.kind() == RawMessageErrorKind::NoMessageFound => Ok(0),
                Err(error) => Err(again(error)),
            }
        })
    }

    /// Removes what has a subject, up to a number.
    pub fn purge(&self, subject: &str, last: u64) -> io::Result<()> {
        self.patiently("removing messages", async || {
            self.stream.purge().filter(subject).sequence(last + 1).await.map(|_| ()).map_err(again)
        })
    }

    /// Subjects of segments of which there are messages.
    pub fn segments(&self) -> io::Result<Vec<u64>> {
        let prefix = format!("{}.segment.", self.name());
        self.patiently("listing its segments", async || {
            let mut subjects = self.stream.info_with_subjects(format!("{prefix}*")).await.map_err(again)?;
            let mut segments = Vec::new();
            while let Some(subject) = subjects.next().await {
                let (subject, _) = subject.map_err(again)?;
                segments.extend(subject.strip_prefix(&prefix).and_then(|number| u64::from_str_radix(number, 16).ok()));
            }
            Ok(segments)
        })
    }

    /// Makes another replica the leader, this one if it can be had; waits for it.
    pub fn move_leader(&self, preferred: Option<&str>) -> io::Result<()> {
        let before = self.standing()?.leader;
        self.tried_for(ELECTION, "making another replica its leader", async || self.ask_for_leader(preferred).await)?;
        self.tried_for(ELECTION, "waiting for its next leader", async || {
            let info = self.stream.get_info().await.map_err(again)?;
            match standing_of(info) {
                Some(standing) if standing.leader != before => Ok(()),
                _ => Err(again("there is none yet")),
            }
        })
    }

    async fn ask_for_leader(&self, preferred: Option<&str>) -> Result<(), Failure> {
        let question = preferred.map_or(json!({}), |name| json!({"placement": {"preferred": name}}));
        let answer: Value =
            self.context.request(format!("STREAM.LEADER.STEPDOWN.{}", self.name()), &question).await.map_err(again)?;
        match answer["error"]["description"].as_str() {
            None => Ok(()),
            Some(error) => Err(again(error)),
        }
    }
}

/// Tries until it succeeds, or time is up.
async fn until<T>(
    deadline: Instant,
    what: &str,
    mut attempt: impl AsyncFnMut() -> Result<T, Failure>,
) -> io::Result<T> {
    let started = Instant::now();
    loop {
        match attempt().await {
            Ok(done) => return Ok(done),
            Err(Failure::Never(error)) => return Err(error),
            Err(Failure::Again(reason)) if Instant::now() >= deadline => {
                let seconds = started.elapsed().as_secs();
                return Err(io::Error::new(
                    io::ErrorKind::TimedOut,
                    format!("{what}, tried for {seconds} s: {reason}"),
                ));
            }
            Err(Failure::Again(reason)) => log::debug!("{what}: {reason}"),
        }
        tokio::time::sleep(PAUSE).await;
    }
}

async fn read_one(stream: &Stream, number: u64) -> Result<Read, Failure> {
    let message = match stream.get_raw_message(number).await {
        Ok(message) => message,
        Err(error) => {
            return match error.kind() {
                RawMessageErrorKind::NoMessageFound => Ok(Read::Missing),
                // The API is not there, for the moment.
                RawMessageErrorKind::JetStream(error) if error.code() == 503 => Err(again(error)),
                RawMessageErrorKind::JetStream(error) => Ok(Read::Damaged(error.to_string())),
                _ => Err(again(error)),
            };
        }
    };
    Ok(match Head::read(&message.payload) {
        Err(why) => Read::Damaged(why.to_owned()),
        Ok((head, _)) if head.kind != Kind::Fence && head.number != number => {
            Read::Damaged(format!("it says that it is message {}", head.number))
        }
        Ok((head, _)) => Read::Whole(head, message.payload),
    })
}

fn standing_of(info: Info) -> Option<Standing> {
    let (leader, replicas) = match info.cluster {
        // A server that is in no cluster.
        None => (String::new(), Vec::new()),
        Some(cluster) => (cluster.leader?, cluster.replicas),
    };
    let mut replicas: Vec<_> = replicas.into_iter().filter(|replica| !replica.offline).collect();
    replicas.sort_by_key(|replica| (!replica.current, replica.active));
    let followers = replicas.into_iter().map(|replica| replica.name).collect();
    Some(Standing { leader, followers, last: info.state.last_sequence, bytes: info.state.bytes })
}

/// Whether publishing may be tried again.
fn refused(error: &async_nats::jetstream::context::PublishError) -> Failure {
    let source =
        std::error::Error::source(error).and_then(|source| source.downcast_ref::<async_nats::jetstream::Error>());
    match (error.kind(), source) {
        (PublishErrorKind::MaxPayloadExceeded, _) => Failure::Never(failed(error.to_string())),
        (_, Some(source)) if FULL.contains(&source.error_code()) => {
            Failure::Never(io::Error::new(io::ErrorKind::StorageFull, source.to_string()))
        }
        _ => again(error),
    }
}

async fn connect(options: &NatsOptions, deadline: Instant) -> io::Result<Context> {
    let scheme = if options.address.needs_tls { "tls" } else { "nats" };
    let mut servers = Vec::new();
    for server in &options.address.servers {
        let parsed: ServerAddr = format!("{scheme}://{server}").parse()?;
        servers.push(parsed);
    }
    let what = format!("connecting to {}", options.address);
    let client = until(deadline, &what, async || {
        let connecting = options.connect_options().await?.connect(servers.clone());
        connecting.await.map_err(|error| match error.kind() {
            ConnectErrorKind::Authentication
            | ConnectErrorKind::AuthorizationViolation
            | ConnectErrorKind::Tls
            | ConnectErrorKind::ServerParse => Failure::Never(failed(format!("{what}: {error}"))),
            _ => again(error),
        })
    })
    .await?;
    let version = client.server_info().version;
    let mut numbers = version.split('.').map(|number| number.parse().unwrap_or(0u64));
    let found = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    if found < SERVER_VERSION_MIN {
        let (major, minor) = SERVER_VERSION_MIN;
        return Err(failed(format!(
            "{}: nats-server {version} is too old; {major}.{minor} or newer is needed",
            options.address
        )));
    }
    let payload_bytes_max = client.server_info().max_payload;
    if payload_bytes_max < MESSAGE_BYTES_MAX {
        return Err(failed(format!(
            "{}: the servers take messages of {payload_bytes_max} bytes; set their max_payload to {MESSAGE_BYTES_MAX} or more",
            options.address
        )));
    }
    Ok(ContextBuilder::new().timeout(ANSWER).ack_timeout(ACKNOWLEDGEMENT).build(client))
}

async fn open_stream(context: &Context, options: &NatsOptions, deadline: Instant) -> io::Result<Stream> {
    let name = &options.address.stream;
    until(deadline, &format!("opening the stream {name}"), async || {
        let error = match context.get_stream(name).await {
            Ok(stream) => return Ok(stream),
            Err(error) => error,
        };
        match error.kind() {
            GetStreamErrorKind::JetStream(error) if error.error_code() == ErrorCode::STREAM_NOT_FOUND => {
                let made = context.create_stream(config(options)).await;
                let made =
                    made.inspect(|_| log::info!("the stream {name} is made, with {} replicas", options.replicas));
                made.map_err(|error| match error.kind() {
                    CreateStreamErrorKind::JetStream(error) if NO_ROOM.contains(&error.error_code()) => {
                        Failure::Never(failed(format!("making the stream {name}: {error}; lower --space")))
                    }
                    _ => again(error),
                })
            }
            _ => Err(again(error)),
        }
    })
    .await
}
