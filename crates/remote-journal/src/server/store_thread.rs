//! The one thread that has the store: it takes what connections ask for in groups, makes a group durable with one
//! `fdatasync`, and only then answers.

use super::metrics::Metrics;
use super::presence::Presence;
use crate::message::{BatchHeader, JournalStatus, Refusal};
use crate::store::{JournalInfo, Medium, Store, StoreError};
use std::collections::HashMap;
use std::io::ErrorKind;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};
use tokio::sync::{OwnedSemaphorePermit, mpsc, oneshot};

/// Operations in one group.
const GROUP_MAX: usize = 4096;
/// Bytes in one group after which no more is taken.
const GROUP_BYTES: usize = 16 << 20;

/// Between two attempts to open a store again.
const REOPEN_PAUSE: Duration = Duration::from_secs(1);

/// A store that has nothing to do for this long makes durable how far it has come.
const SETTLE_PAUSE: Duration = Duration::from_millis(100);
/// One that has much to do does so this often.
const SETTLE_EVERY: Duration = Duration::from_secs(1);

/// Why the server says no.
#[derive(Clone, Debug)]
pub(crate) struct No {
    pub refusal: Refusal,
    pub reason: String,
}

impl From<StoreError> for No {
    fn from(error: StoreError) -> Self {
        let refusal = match &error {
            StoreError::Fenced { .. } => Refusal::Fenced,
            StoreError::Full(_) => Refusal::Full,
            StoreError::Damaged(_) => Refusal::Damaged,
            StoreError::Refused(_) => Refusal::Refused,
            StoreError::Failed(_) => Refusal::Failed,
        };
        No { refusal, reason: error.to_string() }
    }
}

/// The right to one of a connection's replies that are on their way: a peer that asks and does not listen is not answered
/// without end.
pub(crate) type Turn = OwnedSemaphorePermit;

/// What goes to a connection's writer.
#[derive(Debug)]
pub(crate) enum Reply {
    Durable(u64, Turn),
    Message(crate::message::Message, Turn),
    /// A batch as it was stored, and the room that it takes until it is written.
    Stored(Vec<u8>, [Turn; 2]),
    /// The last word.
    No(No, Option<Turn>),
}

/// A question to the store, and what it is answered with.
#[derive(Debug)]
pub(crate) enum Question {
    Begin {
        name: String,
        owner: [u8; 16],
        nonce: [u8; 16],
        epoch_min: u64,
        block_bytes: u32,
        /// The logs that this one may follow; none said by an older client.
        after: Option<Vec<[u8; 16]>>,
        /// Where the writer is told that somebody else has its journal, and whether it is there.
        writer: Writer,
    },
    /// `taken`: what this connection was given when it took the journal; whoever did that recovered it.
    Close {
        name: String,
        epoch: u64,
        nonce: [u8; 16],
        taken: Option<u64>,
    },
    /// `log`: which epoch and nonce it has to be; not said by an older client. `if_free`: only where its writer is not there.
    Take {
        name: String,
        log: Option<(u64, [u8; 16])>,
        if_free: bool,
    },
    Rename {
        name: String,
        epoch: u64,
        nonce: [u8; 16],
        next: [u8; 16],
    },
    List {
        prefix: String,
    },
    Fetch {
        name: String,
        epoch: u64,
        sequence: u64,
    },
    Delete {
        name: String,
        even_live: bool,
    },
}

#[derive(Debug)]
pub(crate) enum Answer {
    Begun { journal: u32, epoch: u64 },
    Taken { fence: u64 },
    Done,
    List(Vec<JournalStatus>),
    Batch(Option<Vec<u8>>),
}

pub(crate) enum Operation {
    Append {
        journal: u32,
        header: BatchHeader,
        payload: Vec<u8>,
        replies: mpsc::UnboundedSender<Reply>,
        turn: Turn,
        /// Held until the batch is durable: bounds what is in memory.
        _room: OwnedSemaphorePermit,
    },
    Ask(Question, oneshot::Sender<Result<Answer, No>>),
    Stop,
}

pub(crate) fn status_of(info: JournalInfo, prefix: &str) -> JournalStatus {
    JournalStatus {
        name: info.name.strip_prefix(prefix).unwrap_or(&info.name).to_owned(),
        owner: info.owner,
        nonce: info.nonce,
        epoch: info.epoch,
        fence: info.fence,
        block_bytes: info.block_bytes,
        is_live: info.is_live,
        is_recovered: info.is_recovered,
        tail: info.tail,
        last: info.last,
        batches: info.batches,
        bytes: info.bytes,
    }
}

/// One who writes to a journal.
#[derive(Clone, Debug)]
pub(crate) struct Writer {
    pub replies: mpsc::WeakUnboundedSender<Reply>,
    pub presence: Arc<Presence>,
}

/// Who writes to a journal, so that it can be told when somebody else has it: it may have nothing to write for long, and
/// would go on believing that it has.
#[derive(Default)]
struct Writers(HashMap<String, (u64, Writer)>);

impl Writers {
    /// Whether who was given this epoch of a journal is connected, and there.
    fn are_there(&self, name: &str, epoch: u64) -> bool {
        self.0.get(name).is_some_and(|(given, writer)| {
            *given == epoch && writer.replies.strong_count() > 0 && writer.presence.is_there()
        })
    }

    /// A journal has another writer from `epoch` on, or none; to be said when that is durable.
    fn fence_off(&mut self, name: &str, epoch: u64) {
        let Some((given, writer)) = self.0.get(name) else { return };
        if *given < epoch {
            let fenced = StoreError::Fenced { name: name.to_owned(), given: *given, fence: epoch };
            // A connection that is gone needs no answer.
            let _ = writer.replies.upgrade().map(|writer| writer.send(Reply::No(fenced.into(), None)));
            self.0.remove(name);
        }
    }

    fn add(&mut self, name: String, epoch: u64, writer: Writer) {
        self.0.retain(|_, (_, writer)| writer.replies.strong_count() > 0);
        self.0.insert(name, (epoch, writer));
    }
}

/// What is to be done once an answer is durable.
enum Then {
    Nothing,
    Begun(String, u64, Writer),
    Taken(String, u64),
}

/// Whoever asks for a log whose writer is there may have a copy of its disk, which nobody can tell from it.
fn refuse_in_use(name: &str) -> No {
    let reason = format!(
        "{name} is written by a client that is connected: end its VM first. If that has the true disk, this is a copy of it: give a \
         clone another name, and its log up. To take the log all the same, and fence that VM off: 'amberlog recover --disk IMAGE --remote \
         HOST:PORT/NAME'"
    );
    No { refusal: Refusal::InUse, reason }
}

fn answer<M: Medium>(
    store: &mut Store<M>,
    writers: &Writers,
    question: Question,
    then: &mut Then,
) -> Result<Answer, No> {
    Ok(match question {
        Question::Begin { name, owner, nonce, epoch_min, block_bytes, after, writer } => {
            let (journal, epoch) = match after {
                Some(after) => store.begin_after(&name, owner, nonce, epoch_min, block_bytes, &after)?,
                None => store.begin(&name, owner, nonce, epoch_min, block_bytes)?,
            };
            *then = Then::Begun(name, epoch, writer);
            Answer::Begun { journal, epoch }
        }
        Question::Close { name, epoch, nonce, taken } => {
            match taken {
                Some(fence) => store.recovered(&name, epoch, nonce, fence)?,
                None => store.close(&name, epoch, nonce)?,
            }
            Answer::Done
        }
        Question::Take { name, log: Some((epoch, _)), if_free: true } if writers.are_there(&name, epoch) => {
            return Err(refuse_in_use(&name));
        }
        Question::Take { name, log, .. } => {
            let fence = match log {
                Some((epoch, nonce)) => store.take_log(&name, epoch, nonce)?,
                None => store.take(&name)?,
            }
            .fence;
            *then = Then::Taken(name, fence);
            Answer::Taken { fence }
        }
        Question::Rename { name, epoch, nonce, next } => {
            store.rename(&name, epoch, nonce, next)?;
            Answer::Done
        }
        Question::List { prefix } => {
            Answer::List(store.list(&prefix).into_iter().map(|info| status_of(info, &prefix)).collect())
        }
        Question::Fetch { name, epoch, sequence } => Answer::Batch(store.fetch(&name, epoch, sequence)?),
        Question::Delete { name, even_live } => {
            store.delete(&name, even_live)?;
            Answer::Done
        }
    })
}

/// Opens a store again that has failed.
pub(crate) type Reopen<M> = Box<dyn FnMut() -> Result<Store<M>, StoreError> + Send>;

/// A store that has failed is opened again, as when the server is started again: what is durable then is what counts. Not
/// when somebody else has it; two servers would take it from each other for ever.
fn reopen<M: Medium>(store: &mut Store<M>, reopen: &mut Option<Reopen<M>>, tried: &mut Option<Instant>) {
    let is_early = tried.is_some_and(|tried| tried.elapsed() < REOPEN_PAUSE);
    if is_early || store.failure().is_none_or(|kind| kind == ErrorKind::PermissionDenied) {
        return;
    }
    let Some(open) = reopen else { return };
    match open() {
        Ok(opened) => {
            log::warn!("the store had failed, and is open again");
            *store = opened;
        }
        Err(error) => log::error!("the store cannot be opened again: {error}"),
    }
    *tried = Some(Instant::now());
}

fn settle<M: Medium>(store: &mut Store<M>, settled: &mut Instant) {
    // A store that has failed has said so.
    let _ = store.settle();
    *settled = Instant::now();
}

fn tell<M: Medium>(store: &Store<M>, metrics: &Metrics) {
    let counters = store.counters();
    let (used, live) = store.space_bytes();
    for (metric, value) in [
        (&metrics.groups, counters.groups),
        (&metrics.batches, counters.batches),
        (&metrics.payload_bytes, counters.payload_bytes),
        (&metrics.written_bytes, counters.written_bytes),
        (&metrics.cleaned_bytes, counters.cleaned_bytes),
        (&metrics.damaged_places, counters.damaged_places),
        (&metrics.store_bytes, used),
        (&metrics.live_bytes, live),
        (&metrics.store_failed, u64::from(store.failure().is_some())),
    ] {
        metric.store(value, Ordering::Relaxed);
    }
}

/// Runs until [`Operation::Stop`], or until nobody can ask any more.
pub(crate) fn run<M: Medium>(
    mut store: Store<M>,
    mut reopening: Option<Reopen<M>>,
    operations: &Receiver<Operation>,
    metrics: &Arc<Metrics>,
) {
    let mut is_stopping = false;
    let mut tried = None;
    let mut settled = Instant::now();
    tell(&store, metrics);
    let mut writers = Writers::default();
    while !is_stopping {
        let first = if store.is_unsettled() {
            match operations.recv_timeout(SETTLE_PAUSE) {
                Ok(first) => first,
                Err(RecvTimeoutError::Timeout) => {
                    settle(&mut store, &mut settled);
                    continue;
                }
                Err(RecvTimeoutError::Disconnected) => break,
            }
        } else {
            let Ok(first) = operations.recv() else { break };
            first
        };
        reopen(&mut store, &mut reopening, &mut tried);
        let mut appended = Vec::new();
        let mut answered = Vec::new();
        let mut bytes = 0;
        for operation in std::iter::once(first).chain(operations.try_iter().take(GROUP_MAX)) {
            match operation {
                Operation::Append { journal, header, payload, replies, turn, _room } => {
                    bytes += payload.len();
                    match store.append(journal, header.epoch, header.sequence, header.tail, &payload) {
                        Ok(()) => appended.push((replies, header.sequence, turn, _room)),
                        Err(error) => {
                            let _ = replies.send(Reply::No(error.into(), Some(turn)));
                        }
                    }
                }
                Operation::Ask(question, reply) => {
                    let mut then = Then::Nothing;
                    let result = answer(&mut store, &writers, question, &mut then);
                    answered.push((reply, result, then));
                }
                Operation::Stop => is_stopping = true,
            }
            if is_stopping || bytes > GROUP_BYTES {
                break;
            }
        }
        let committed = store.commit().map_err(No::from);
        for (replies, sequence, turn, _room) in appended {
            // A connection that is gone needs no answer.
            let _ = replies.send(match &committed {
                Ok(()) => Reply::Durable(sequence, turn),
                Err(no) => Reply::No(no.clone(), Some(turn)),
            });
        }
        for (reply, result, then) in answered {
            if committed.is_ok() {
                match then {
                    Then::Nothing => {}
                    Then::Begun(name, epoch, writer) => {
                        writers.fence_off(&name, epoch);
                        writers.add(name, epoch, writer);
                    }
                    Then::Taken(name, fence) => writers.fence_off(&name, fence),
                }
            }
            let _ = reply.send(committed.clone().and(result));
        }
        if committed.is_ok()
            && let Err(error) = store.clean()
        {
            log::error!("{error}");
        }
        if settled.elapsed() > SETTLE_EVERY {
            settle(&mut store, &mut settled);
        }
        tell(&store, metrics);
    }
    if let Err(error) = store.end() {
        log::warn!("the store was not closed in order: {error}");
    }
}
