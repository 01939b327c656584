//! The thread that ships a log: connects, sends, hears, falls back, comes back.
//!
//! While its server may be asked for the log by somebody else, this thread waits for no storage: another one writes marks
//! ([`super::at_storage`]), and this one gives signs, listens, and does nothing else until that has ended.

use super::Shared;
use super::at_storage::AtStorage;
use super::lineage::Nonce;
use super::mark::RemoteMark;
use super::mark_found::MarkFound;
use super::report::RemoteCounters;
use super::shared_storage::Taken;
use super::state::{Mode, State};
use remote_journal::client::{BatchSender, DurableReceiver, Heard};
use remote_journal::message::Batch;
use remote_journal::{Client, ClientError};
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;

/// A connection that held this long did not fail at once: the back-off begins anew.
const STEADY: Duration = Duration::from_secs(10);
/// A sign is given at least so often, however patient this side is: a server lets somebody else have the journal of who says nothing for three
/// times as long as it may, and drops who says nothing for a minute.
const PING_PAUSE: Duration = remote_journal::SIGN_WITHIN.saturating_sub(Duration::from_secs(1));

/// How long after the last thing that was sent a sign is due.
fn sign_pause(patience: Duration) -> Duration {
    (patience / 3).min(PING_PAUSE)
}

/// How long there is nothing to do, if nothing comes: no longer than until a sign is due.
fn idle_pause(patience: Duration, since_sent: Duration) -> Duration {
    (patience / 4).min(sign_pause(patience).saturating_sub(since_sent))
}

/// Longer than any server is silent.
const IDLE_MAX: Duration = Duration::from_secs(3600);
/// Batches sent before the server is listened to.
const BATCHES_MAX: usize = 8;
/// Things that the server has said and that were not looked at yet: while nobody has time for more, they wait in the network.
const HEARD_MAX: usize = 64;
/// Log blocks written to storage before the lock is let go for a moment.
const CHUNK_BLOCKS: usize = 64;

/// Why shipping ended.
enum Ended {
    /// The guest closed the log, or opened another.
    Over,
    /// Nobody here has the log any more, whatever storage says of it.
    Dropped,
    /// Somebody waits for the log on storage.
    Settle,
    /// Somebody wishes the log on storage, until they wish it back.
    Paused,
    /// Only its guest's own kernel can replay the log from now on.
    LocalOnly,
    /// The server cannot be used.
    Failed(ClientError),
    /// Storage failed.
    Storage(io::Error),
}

impl From<ClientError> for Ended {
    fn from(error: ClientError) -> Self {
        Ended::Failed(error)
    }
}

/// Runs until the log is dropped.
pub(super) async fn run(shared: &Arc<Shared>) {
    let mut back_off = shared.back_off.min;
    loop {
        let generation = loop {
            settle_stored(shared);
            let to_be_completed = {
                let state = shared.lock();
                if shared.is_shut_down() {
                    return;
                }
                let is_begun = !state.may_not_begin;
                if state.mode == Mode::Storage && !state.is_local_only && !state.is_paused && is_begun {
                    break state.generation;
                }
                // Another process has left it so, and has died.
                (state.is_to_be_completed() && is_begun).then_some(state.generation)
            };
            match to_be_completed {
                Some(generation) => {
                    RemoteCounters::add(&shared.counters.fall_backs, 1);
                    complete(shared, generation);
                }
                None => shared.work.notified().await,
            }
        };
        let started = Instant::now();
        let ended = ship(shared, generation).await;
        let error = match ended {
            Ended::Dropped => return,
            Ended::Over => {
                back_off = shared.back_off.min;
                continue;
            }
            ended => ended,
        };
        let was_remote = {
            let mut state = shared.lock();
            if state.generation != generation {
                continue;
            }
            let mode = state.mode;
            match mode {
                Mode::Returning => state.give_up_return(),
                Mode::Switching | Mode::Remote => state.begin_fall_back(),
                _ => {}
            }
            // The next attempt comes when it is wished back, not after a back-off.
            state.has_failed_to_connect = !matches!(error, Ended::Paused | Ended::LocalOnly);
            mode == Mode::Remote
        };
        shared.changed.notify_all();
        match &error {
            Ended::Failed(error) if error.is_fenced() && was_remote => {
                log::error!(
                    "{}: {error}; somebody else has taken this journal, so nothing is written to its disk here any more",
                    shared.name
                );
                shared.give_up(true);
                continue;
            }
            Ended::Failed(error) if was_remote => {
                RemoteCounters::add(&shared.counters.fall_backs, 1);
                log::warn!("{}: {error}; the journal falls back to its own place on storage", shared.name);
            }
            Ended::Failed(error) => {
                log::warn!(
                    "{}: {error}; the journal stays on storage, next attempt in {} ms",
                    shared.name,
                    back_off.as_millis()
                );
            }
            Ended::Storage(error) => {
                log::error!("{}: {error}", shared.name);
                if Taken::is(error) {
                    shared.give_up(true);
                    continue;
                }
            }
            Ended::Paused => log::info!("{}: the journal goes to its own place on storage, as wished", shared.name),
            Ended::LocalOnly => log::warn!(
                "{}: this journal has fast commits now, or features that are not known; it goes to its own place on storage",
                shared.name
            ),
            Ended::Over | Ended::Dropped | Ended::Settle => {}
        }
        if !complete(shared, generation) {
            continue;
        }
        if matches!(error, Ended::Settle) {
            let (epoch, nonce, had_log) = {
                let state = shared.lock();
                (state.epoch, state.nonce, state.epoch != 0)
            };
            if settle_stored(shared) && had_log {
                tell_closed(shared, epoch, nonce).await;
            }
            continue;
        }
        if started.elapsed() > STEADY {
            back_off = shared.back_off.min;
        }
        // Somebody who wants the log settled does not wait for the next attempt.
        let until = tokio::time::Instant::now() + back_off;
        while tokio::time::Instant::now() < until {
            let state_is_urgent = {
                let state = shared.lock();
                shared.is_shut_down() || state.wants_settling || state.is_paused || state.generation != generation
            };
            if state_is_urgent {
                break;
            }
            let _ = tokio::time::timeout_at(until, shared.work.notified()).await;
        }
        back_off = (back_off * 2).min(shared.back_off.max);
    }
}

/// Completes the log on storage. Where that fails it is given up.
fn complete(shared: &Shared, generation: u64) -> bool {
    let outcome = fall_back(shared, generation);
    if let Err(error) = &outcome {
        log::error!(
            "{}: completing the journal on storage failed: {error}; the guest's journal writes fail",
            shared.name
        );
        shared.give_up(Taken::is(error));
    }
    outcome.is_ok()
}

/// Somebody waits for the log on storage: where it is complete there, and counts, it is over. (One that has failed is not,
/// whoever asks.)
fn settle_stored(shared: &Shared) -> bool {
    let storage = shared.on_storage();
    let is_wanted = {
        let state = shared.lock();
        state.wants_settling && state.mode == Mode::Storage
    };
    if !is_wanted {
        return false;
    }
    // Whoever settles it replays it from there.
    if let Err(error) = shared.check(&storage) {
        log::error!("{}: {error}", shared.name);
        shared.give_up(Taken::is(&error));
        return false;
    }
    shared.lock().close();
    shared.changed.notify_all();
    shared.disk.wake.wake();
    true
}

/// Whether storage says, or may say, that this log on the server counts: then the server is not told that it is over, whoever
/// believes so.
fn may_count(shared: &Shared, epoch: u64, nonce: Nonce) -> bool {
    shared.read_superblock().map_or(true, |found| match RemoteMark::read(&found) {
        MarkFound::Live(mark) => mark == RemoteMark { epoch, nonce },
        MarkFound::Damaged => true,
        MarkFound::None | MarkFound::Stale => false,
    })
}

/// Tells the server that a log is over. Nothing depends on it: storage says so already.
async fn tell_closed(shared: &Shared, epoch: u64, nonce: [u8; 16]) {
    if may_count(shared, epoch, nonce) {
        log::error!("{}: storage says that the log on the server counts, so the server keeps it", shared.name);
        return;
    }
    let telling = async {
        let mut client = Client::connect(&shared.client).await?;
        client.close(&shared.name, epoch, nonce).await
    };
    match tokio::time::timeout(Duration::from_secs(2), telling).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => log::info!("{}: the server was not told that the log is over: {error}", shared.name),
        Err(_) => log::info!("{}: the server was not told that the log is over: it did not answer", shared.name),
    }
}

/// Ships one log for as long as that goes well.
async fn ship(shared: &Arc<Shared>, generation: u64) -> Ended {
    match ship_log(shared, generation).await {
        Ok(ended) | Err(ended) => ended,
    }
}

fn interruption(shared: &Shared, generation: u64) -> Option<Ended> {
    let state = shared.lock();
    if state.generation != generation {
        Some(Ended::Over)
    } else if shared.is_shut_down() {
        Some(Ended::Dropped)
    } else if state.wants_settling {
        Some(Ended::Settle)
    } else if state.is_local_only {
        Some(Ended::LocalOnly)
    } else {
        state.is_paused.then_some(Ended::Paused)
    }
}

/// Waits for something, unless the log ends meanwhile.
async fn unless_over<T>(
    shared: &Shared,
    generation: u64,
    waiting: impl Future<Output = Result<T, ClientError>>,
) -> Result<T, Ended> {
    tokio::pin!(waiting);
    loop {
        if let Some(ended) = interruption(shared, generation) {
            return Err(ended);
        }
        tokio::select! {
            result = &mut waiting => return Ok(result?),
            () = shared.work.notified() => {}
        }
    }
}

async fn ship_log(shared: &Arc<Shared>, generation: u64) -> Result<Ended, Ended> {
    let patience = shared.client.timeout;
    let mut client = unless_over(shared, generation, Client::connect(&shared.client)).await?;
    RemoteCounters::add(&shared.counters.connects, 1);
    let place = &shared.place;
    let epoch_min = shared.lock().epoch;
    let (nonce, after) = say_which_is_next(shared, generation)?;
    let beginning = client.begin(&shared.name, place.file_system_uuid, nonce, epoch_min, place.block_bytes, &after);
    let epoch = unless_over(shared, generation, beginning).await?;
    // Nothing is changed by this; a server that cannot rename a log says so before all of it is sent.
    unless_over(shared, generation, client.rename(&shared.name, epoch, nonce, nonce)).await?;
    let mut line = Line::new(shared, client)?;
    {
        let mut state = shared.lock();
        if state.generation != generation || state.mode != Mode::Storage {
            return Ok(Ended::Over);
        }
        state.begin_return(epoch, nonce);
    }
    let mut switch = Switch { epoch, until: 0, own: None, is_asked: false };
    let mut last_mark = Instant::now();
    let mut unsent = VecDeque::new();
    let mut wire_bytes = 0;
    loop {
        if let Some(ended) = interruption(shared, generation) {
            let nonce = shared.lock().nonce;
            if matches!(ended, Ended::Over) && !may_count(shared, epoch, nonce) {
                let _ = line.sender.close(&shared.name, epoch, nonce).await;
                let closed = tokio::time::timeout(patience.min(Duration::from_secs(1)), async {
                    while !matches!(line.heard.recv().await, Some(Ok(Heard::Done)) | None | Some(Err(_))) {}
                });
                let _ = closed.await;
            }
            return Ok(ended);
        }
        let has_more;
        let is_waiting = {
            let mut state = shared.lock();
            unsent.extend(state.outbox.drain(..));
            // What is live comes from the copy as it can be sent, so that it is not in memory all at once.
            while unsent.len() < BATCHES_MAX && state.copy_some().map_err(Ended::Storage)? {
                unsent.extend(state.outbox.drain(..));
            }
            has_more = state.has_more_to_copy();
            // For its batches, or for what it was asked for: commits wait for either.
            state.is_waiting() || (switch.is_asked && !line.is_renamed)
        };
        if !unsent.is_empty() {
            // In parts: while a large log is sent, the server's progress has to be seen.
            let part: Vec<Batch> = unsent.drain(..unsent.len().min(BATCHES_MAX)).collect();
            RemoteCounters::add(&shared.counters.batches, part.len() as u64);
            let blocks = || part.iter().flat_map(|batch| &batch.blocks);
            let bytes: usize = blocks().map(|block| block.content.len()).sum();
            RemoteCounters::add(&shared.counters.blocks, blocks().count() as u64);
            RemoteCounters::add(&shared.counters.block_bytes, bytes as u64);
            let mut sending = Box::pin(line.sender.send(part));
            // A slow link takes its time: what is durable meanwhile is told, and what ends the log ends this in the midst of a frame.
            let interrupted = loop {
                if let Some(ended) = interruption(shared, generation) {
                    break Some(ended);
                }
                tokio::select! {
                    biased;
                    result = &mut sending => {
                        result?;
                        break None;
                    }
                    result = line.heard.recv() => line.is_renamed |= hear(shared, result)? == Said::Done,
                    () = shared.work.notified() => {}
                }
            };
            drop(sending);
            if let Some(ended) = interrupted {
                let nonce = shared.lock().nonce;
                if matches!(ended, Ended::Over) {
                    tell_closed(shared, epoch, nonce).await;
                }
                return Ok(ended);
            }
            shared.lock().sent(bytes);
            // The link takes what it is given, each piece in time: a slow one is no broken one.
            line.last_sent = Instant::now();
            (line.last_progress, line.last_sign) = (line.last_sent, line.last_sent);
            let sent = line.sender.sent_bytes();
            RemoteCounters::add(&shared.counters.wire_bytes, sent - wire_bytes);
            wire_bytes = sent;
        }
        if !is_waiting {
            line.last_progress = Instant::now();
        } else if line.last_progress.elapsed() > patience {
            return Err(Ended::Failed(remote_journal::LinkError::TimedOut(patience).into()));
        }
        if line.last_sign.elapsed() > patience {
            return Err(Ended::Failed(remote_journal::LinkError::TimedOut(patience).into()));
        }
        line.give_sign_if_due().await?;
        if switch.is_due(&shared.lock(), line.is_renamed) {
            let is_renamed = line.is_renamed;
            let advancing = move |shared: &Shared| advance(shared, generation, switch, is_renamed);
            switch = line.while_at_storage(shared, advancing).await?;
        }
        if let Some(own) = switch.own.filter(|_| !switch.is_asked) {
            switch.is_asked = true;
            line.sender.rename(&shared.name, epoch, nonce, own).await?;
            // It is waited for from now on, however long storage took before that.
            line.last_progress = Instant::now();
        }
        let (is_to_be_renewed, mark_age) = {
            let state = shared.lock();
            (state.is_to_be_renewed(), state.mark_age)
        };
        if last_mark.elapsed() > mark_age {
            last_mark = Instant::now();
            if is_to_be_renewed {
                line.while_at_storage(shared, move |shared| renew_mark(shared, generation)).await?;
            }
        }
        let is_idle = unsent.is_empty() && !has_more;
        let pause = if is_idle { idle_pause(patience, line.last_sent.elapsed()) } else { Duration::ZERO };
        tokio::select! {
            biased;
            result = line.heard.recv() => line.take(shared, result)?,
            () = shared.work.notified() => {}
            () = tokio::time::sleep(pause) => {}
        }
    }
}

/// For so many times what is waited for a server, and no longer than a minute, signs are given while one thing is done on storage.
const SIGNS_AT_STORAGE: u32 = 12;
const SIGNS_AT_STORAGE_MAX: Duration = Duration::from_secs(60);

/// A connection on which a log is shipped.
struct Line {
    sender: BatchSender,
    heard: mpsc::Receiver<Result<Heard, ClientError>>,
    /// A connection that ends takes its ear along.
    _hearing: AbortOnDrop,
    at_storage: AtStorage,
    patience: Duration,
    last_sent: Instant,
    last_progress: Instant,
    last_sign: Instant,
    /// The log is called on the server what it was asked to call it.
    is_renamed: bool,
}

impl Line {
    fn new(shared: &Arc<Shared>, client: Client) -> Result<Self, ClientError> {
        let at_storage = AtStorage::begin(shared)?;
        let (sender, receiver) = client.into_pipeline();
        let (heard, hearing) = listen(receiver);
        let now = Instant::now();
        Ok(Line {
            sender,
            heard,
            _hearing: hearing,
            at_storage,
            patience: shared.client.timeout,
            last_sent: now,
            last_progress: now,
            last_sign: now,
            is_renamed: false,
        })
    }

    async fn give_sign_if_due(&mut self) -> Result<(), Ended> {
        if self.last_sent.elapsed() >= sign_pause(self.patience) {
            self.sender.ping().await?;
            self.last_sent = Instant::now();
        }
        Ok(())
    }

    /// Takes what the server has said.
    fn take(&mut self, shared: &Shared, result: Option<Result<Heard, ClientError>>) -> Result<(), Ended> {
        self.last_sign = Instant::now();
        match hear(shared, result)? {
            Said::Progress => self.last_progress = self.last_sign,
            Said::Done => self.is_renamed = true,
            Said::Nothing => {}
        }
        Ok(())
    }

    /// Does something on storage, and waits until it has ended, whatever becomes of the connection and of the log meanwhile: nothing else
    /// is done to that at a time. Signs are given here, and what the server says is taken.
    async fn while_at_storage<T: Send + 'static>(
        &mut self,
        shared: &Shared,
        work: impl FnOnce(&Shared) -> Result<T, Ended> + Send + 'static,
    ) -> Result<T, Ended> {
        let mut said = self.at_storage.ask(work);
        let mut of_line = Ok(());
        let last_sign_at = Instant::now() + (SIGNS_AT_STORAGE * self.patience).min(SIGNS_AT_STORAGE_MAX);
        let said = loop {
            let until_sign = sign_pause(self.patience).saturating_sub(self.last_sent.elapsed());
            let is_up = of_line.is_ok();
            // A host whose storage hangs for good is lost, though it could still speak: its log goes to who starts its guest elsewhere.
            let gives_signs = is_up && Instant::now() < last_sign_at;
            tokio::select! {
                biased;
                said = &mut said => break said,
                result = self.heard.recv(), if is_up => of_line = self.take(shared, result),
                () = tokio::time::sleep(until_sign), if gives_signs => of_line = self.give_sign_if_due().await,
            }
        };
        // Of storage first: that decides where the log is.
        let outcome = self.at_storage.outcome(said)?;
        of_line.map(|()| outcome)
    }
}

/// Hears what a server says.
pub(super) fn listen(mut receiver: DurableReceiver) -> (mpsc::Receiver<Result<Heard, ClientError>>, AbortOnDrop) {
    let (sender, heard) = mpsc::channel(HEARD_MAX);
    let hearing = tokio::spawn(async move {
        loop {
            // While much is on its way over a slow link the server has nothing to say: whether it is there is judged by who is told.
            let result = receiver.hear(IDLE_MAX).await;
            let is_end = result.is_err();
            if sender.send(result).await.is_err() || is_end {
                return;
            }
        }
    });
    (heard, AbortOnDrop(hearing))
}

/// What the server's words come to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Said {
    /// More is durable than was known.
    Progress,
    /// What it was asked for is done.
    Done,
    /// It is there.
    Nothing,
}

/// Takes what the server has said.
fn hear(shared: &Shared, result: Option<Result<Heard, ClientError>>) -> Result<Said, Ended> {
    match result {
        Some(Ok(Heard::Durable(sequence))) => {
            let mut state = shared.lock();
            let known = state.acknowledged;
            if state.acknowledge(sequence) {
                shared.disk.wake.wake();
            }
            // A server that says the same again and again does nothing.
            Ok(if state.acknowledged > known { Said::Progress } else { Said::Nothing })
        }
        Some(Ok(Heard::Done)) => Ok(Said::Done),
        Some(Ok(Heard::Alive)) => Ok(Said::Nothing),
        Some(Err(error)) => Err(error.into()),
        None => Err(Ended::Failed(remote_journal::LinkError::Closed.into())),
    }
}

pub(super) struct AbortOnDrop(tokio::task::JoinHandle<()>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// How far a log has come on its way to the server.
#[derive(Clone, Copy)]
struct Switch {
    epoch: u64,
    /// The last batch before everything goes to the server.
    until: u64,
    /// What it is called before it counts.
    own: Option<Nonce>,
    is_asked: bool,
}

impl Switch {
    /// Whether the server has all that it needs before storage may say that it counts.
    fn is_there(&self, state: &State, is_renamed: bool) -> bool {
        is_renamed && state.acknowledged >= self.until && state.stored_in_flight == 0
    }

    /// Whether there is something to be done on storage, as far as it can be told without its lock.
    fn is_due(&self, state: &State, is_renamed: bool) -> bool {
        match state.mode {
            Mode::Returning => state.is_copied(),
            Mode::Switching => self.is_there(state, is_renamed),
            _ => false,
        }
    }
}

/// Goes on from `Returning` to `Switching`, or from there to `Remote`, if that may be. Gives how far it has come.
fn advance(shared: &Shared, generation: u64, mut switch: Switch, is_renamed: bool) -> Result<Switch, Ended> {
    let mut storage = shared.on_storage();
    {
        let mut state = shared.lock();
        if state.generation != generation {
            return Ok(switch);
        }
        if state.mode == Mode::Returning && state.is_copied() {
            drop(state);
            // Whoever has lost the disk renames nothing.
            shared.check(&storage).map_err(Ended::Storage)?;
            state = shared.lock();
            if state.generation != generation || state.mode != Mode::Returning {
                return Ok(switch);
            }
            switch.until = state.begin_switch().map_err(Ended::Storage)?;
            let own = remote_journal::random();
            // This process, and one that follows it, can name it from now on; storage does when it counts no more.
            storage.own = own;
            shared.mirror.iter().for_each(|mirror| mirror.say(|said| said.named = own));
            switch.own = Some(own);
        }
        if state.mode != Mode::Switching || !switch.is_there(&state, is_renamed) {
            return Ok(switch);
        }
        state.nonce = storage.own;
    }
    let (epoch, nonce) = (switch.epoch, storage.own);
    let superblock = {
        let state = shared.lock();
        if state.generation != generation || state.mode != Mode::Switching {
            return Ok(switch);
        }
        state.mirror.superblock()
    };
    // From the moment it is on storage the server counts; everything that anybody was told of is there.
    let marked = superblock
        .ok_or_else(|| io::Error::other("the log has no superblock"))
        .and_then(|block| shared.write_mark(&mut storage, &block, epoch, nonce));
    let mut state = shared.lock();
    if let Err(error) = marked {
        if Taken::is(&error) {
            return Err(Ended::Storage(error));
        }
        // Whether the mark arrived is not known. Nobody was told of anything since the switch began, so both places have
        // all that counts, and completing the log on storage takes the mark away.
        return Err(Ended::Storage(io::Error::new(
            error.kind(),
            format!("marking the journal on storage failed: {error}"),
        )));
    }
    state.mode = Mode::Remote;
    if state.release_held() {
        shared.disk.wake.wake();
    }
    drop(state);
    shared.changed.notify_all();
    RemoteCounters::add(&shared.counters.returns, 1);
    log::info!("{}: the journal goes to {}, epoch {epoch}", shared.name, shared.client.address);
    Ok(switch)
}

/// Says on storage what the next log is told from every other by, before the server is asked to begin it: whatever becomes of
/// that, whoever has this disk then can name what the server has. Gives that, and the logs that it may follow.
fn say_which_is_next(shared: &Shared, generation: u64) -> Result<(Nonce, Vec<Nonce>), Ended> {
    let mut storage = shared.on_storage();
    let superblock = {
        let state = shared.lock();
        if state.generation != generation || state.mode != Mode::Storage {
            return Err(Ended::Over);
        }
        state.mirror.superblock()
    };
    let nonce = storage.lineage.next();
    shared.check(&storage).map_err(Ended::Storage)?;
    if storage.lineage.tried != nonce {
        let mut lineage = storage.lineage;
        lineage.tried = nonce;
        let block = superblock.ok_or_else(|| io::Error::other("the log has no superblock"));
        let said = block.and_then(|block| {
            let mut bytes = block.to_vec();
            RemoteMark::remove_from(&mut bytes);
            lineage.write_into(&mut bytes);
            let failed_flushes = shared.medium.failed_flushes();
            shared.write_superblock(&mut storage, &bytes)?;
            shared.medium.sync_since(failed_flushes)
        });
        said.map_err(Ended::Storage)?;
        storage.lineage = lineage;
    }
    Ok((nonce, storage.lineage.logs()))
}

/// Writes the mark once more, with a higher count, and tells the server's log of it. Where that fails nothing is lost.
fn renew_mark(shared: &Shared, generation: u64) -> Result<(), Ended> {
    let mut storage = shared.on_storage();
    let (superblock, epoch, nonce) = {
        let state = shared.lock();
        if state.generation != generation || !state.is_to_be_renewed() {
            return Ok(());
        }
        (state.mirror.superblock(), state.epoch, state.nonce)
    };
    let Some(superblock) = superblock else { return Ok(()) };
    match shared.write_mark(&mut storage, &superblock, epoch, nonce) {
        Ok(()) => {}
        Err(error) if Taken::is(&error) => return Err(Ended::Storage(error)),
        Err(error) => {
            log::warn!("{}: the mark of the journal server could not be written anew: {error}", shared.name);
            return Ok(());
        }
    }
    let mut block = superblock.to_vec();
    storage.lineage.write_into(&mut block);
    let mut state = shared.lock();
    if state.generation == generation && state.mode == Mode::Remote {
        state.renew(block.into());
    }
    Ok(())
}

/// Completes the log on storage, if it is not: blocks, flush, their commit blocks, flush, superblock, flush; then storage
/// counts. Where it counted all along, and so might be replayed from any moment of this, the superblock comes first as
/// well: blocks may go where the one on storage still has its tail.
///
/// Whoever was cut off from the server does not know whether somebody else has taken the log there: storage is asked before
/// every step ([`super::shared_storage`]).
pub(super) fn fall_back(shared: &Shared, generation: u64) -> io::Result<()> {
    // All that counts is written from here on: a flush that has failed by its end, whoever asked for it, may have lost some of it.
    let failed_flushes = shared.medium.failed_flushes();
    let mut commits = false;
    let mut written: Option<Arc<[u8]>> = None;
    loop {
        let mut storage = shared.on_storage();
        {
            let state = shared.lock();
            if shared.is_shut_down() || state.generation != generation || state.mode != Mode::FallingBack {
                return Ok(());
            }
        }
        shared.check(&storage)?;
        storage.counts_no_more();
        let (superblock, blocks, storage_counts) = {
            let mut state = shared.lock();
            if state.generation != generation || state.mode != Mode::FallingBack {
                return Ok(());
            }
            if commits && !state.is_clean(false) {
                // What the guest wrote meanwhile may belong to a commit block that it wrote meanwhile.
                commits = false;
            }
            let blocks = state.take_dirty(CHUNK_BLOCKS, commits)?;
            (state.mirror.superblock(), blocks, state.storage_counts())
        };
        let superblock = superblock.ok_or_else(|| io::Error::other("the log has no superblock"))?;
        let with_lineage = |storage: &super::OnStorage, superblock: &[u8]| {
            let mut bytes = superblock.to_vec();
            RemoteMark::remove_from(&mut bytes);
            storage.lineage.write_into(&mut bytes);
            bytes
        };
        if storage_counts && written.as_ref().is_none_or(|written| !Arc::ptr_eq(written, &superblock)) {
            let bytes = with_lineage(&storage, &superblock);
            shared.write_superblock(&mut storage, &bytes)?;
            shared.medium.sync_since(failed_flushes)?;
            written = Some(superblock);
        }
        for (position, content) in &blocks {
            shared.write_block(*position, content)?;
        }
        if !blocks.is_empty() {
            continue;
        }
        shared.medium.sync_since(failed_flushes)?;
        if !commits {
            commits = true;
            continue;
        }
        // Everything is there; nothing may be added while storage is told that it counts.
        let mut state = shared.lock();
        if state.generation != generation || state.mode != Mode::FallingBack {
            return Ok(());
        }
        if !state.is_clean(true) {
            continue;
        }
        if let Some(superblock) = state.mirror.superblock() {
            shared.check(&storage)?;
            let bytes = with_lineage(&storage, &superblock);
            shared.write_superblock(&mut storage, &bytes)?;
            shared.medium.sync_since(failed_flushes)?;
            written = Some(superblock);
        }
        if state.server_counts() && !shared.medium.patience().is_zero() {
            // Whoever took the log before that was there may have had their own superblock on its way.
            drop(state);
            shared.medium.wait_for_others();
            shared.check(&storage)?;
            shared.lock().set_storage_counts();
            commits = false;
            continue;
        }
        state.end_fall_back();
        drop(state);
        shared.disk.set_dirty();
        shared.disk.wake.wake();
        shared.changed.notify_all();
        log::info!("{}: the journal is complete in its own place on storage", shared.name);
        return Ok(());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whatever wakes it in between, and however patient it is.
    #[test]
    fn a_sign_is_given_often_enough_for_every_patience() {
        for patience in [100, 5_000, 15_000, 39_000, 40_000, 41_000, 600_000].map(Duration::from_millis) {
            for woken_after in (0..10_000).step_by(7).map(Duration::from_millis) {
                let (mut since_sent, due) = (Duration::ZERO, sign_pause(patience));
                let mut is_woken = false;
                while since_sent < due {
                    let pause = idle_pause(patience, since_sent);
                    assert!(!pause.is_zero(), "{patience:?}: it would not rest");
                    since_sent += if is_woken { pause } else { pause.min(woken_after) };
                    is_woken = true;
                }
                assert!(since_sent < remote_journal::SIGN_WITHIN, "{patience:?}: nothing for {since_sent:?}");
            }
        }
    }
}
