//! The worker thread of a device: takes requests from the rings, has the route decide, carries its plan out, answers.
//!
//! It waits for nothing but its io_uring, which watches the kick descriptors, the mailbox and the route's own wake
//! descriptor beside the disk operations.

mod lifecycle;
mod logging;
mod mailbox;
mod pass;
mod patience;
mod plan;

pub(crate) use mailbox::{Mailbox, MailboxReceiver, mailbox};

use crate::chain::Chain;
use crate::config::Observer;
use crate::config_space::{self, bit};
use crate::counters::Counters;
use crate::engine::{Engine, Event};
use crate::gate::Gate;
use crate::image::Image;
use crate::inflight::InflightRegion;
use crate::log_limit::LogLimit;
use crate::request::{ID_BYTES, Limits, Range};
use crate::ring::Ring;
use crate::tracker::Tracker;
use block_route::{Plan, Route, Start};
use guest_memory::{DirtyLog, MemoryTable};
use patience::Patient;
use std::collections::VecDeque;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};
use throttle::Throttle;
use virtio_bindings::bindings::virtio_blk::{VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_WRITE_ZEROES};

/// Watch tokens: the rings have their index, below these.
const TOKEN_MAILBOX: u32 = u32::MAX;
const TOKEN_ROUTE: u32 = u32::MAX - 1;
/// The part of a ring's token that is its index; above it is the ring's epoch.
const TOKEN_RING_BITS: u32 = 8;
/// While somebody waits for rings to become idle, their deadlines are looked at this often.
const STOP_CHECK: Duration = Duration::from_millis(50);
/// Who has a guest wait before it begins, a gate or what other disks have under way, is asked again this often: the guest stands still meanwhile.
const GATE_CHECK: Duration = Duration::from_millis(2);
/// Who is not asked for so long (its disk is held, or its throttle used up) begins to wait anew.
const ASKED_WITHIN: Duration = Duration::from_secs(1);

/// Completions handled before the guest is told: it then goes on while the next ones are handled here.
const EVENTS_MAX: usize = 8;

/// What a worker is made of.
pub(crate) struct WorkerParts<R: Route + ?Sized> {
    pub(crate) name: String,
    pub(crate) image: Arc<Image>,
    pub(crate) route: Box<R>,
    pub(crate) observer: Arc<dyn Observer>,
    pub(crate) counters: Arc<Counters>,
    pub(crate) identity: [u8; ID_BYTES],
    pub(crate) queues: u16,
    pub(crate) drain_timeout: Duration,
    pub(crate) polling_max: Duration,
    pub(crate) write_cache: bool,
    pub(crate) gate: Option<Arc<dyn Gate>>,
    pub(crate) throttle: Option<Throttle>,
}

/// See the module.
pub(crate) struct Worker<R: Route + ?Sized> {
    name: String,
    image: Arc<Image>,
    pub(crate) route: Box<R>,
    observer: Arc<dyn Observer>,
    counters: Arc<Counters>,
    identity: [u8; ID_BYTES],
    drain_timeout: Duration,
    mailbox: MailboxReceiver<R>,
    engine: Engine,

    features: u64,
    rings: Vec<Ring>,
    /// Rings to take requests from: started, enabled and sound.
    active: Vec<u16>,
    /// Rings that are started: what they complete is told to the guest.
    running: Vec<u16>,
    table: Option<Arc<MemoryTable>>,
    region: Option<Arc<InflightRegion>>,
    /// How the next start is to be understood, as far as the in-flight messages have told.
    origin: Option<Start>,
    /// The route has been told of the start.
    started: bool,
    /// The route has refused to start: every request fails until the next one.
    refused: bool,

    tracker: Tracker,
    pub(crate) plan: Plan,
    chain: Chain,
    ranges: Vec<Range>,
    /// Chains whose last part is done but that need a flush before they are answered.
    flush_after: VecDeque<u32>,
    /// When the last pass began.
    pass_began: Instant,
    /// Bytes of the buffers of what it has taken.
    pass_bytes: u64,
    /// Requests that wait until a page can be written to.
    patient: Patient,
    log_limit: LogLimit,
    /// The guest was seen to use memory that nobody was told of, and that was said.
    missed_memory: bool,
    polling: Polling,
    /// Whether the guest is told of a write cache.
    write_cache: bool,
    /// Who knows whether the guest may use the disk, where it can be moved elsewhere; a VMM may ask then for what [`Worker::log`] is.
    gate: Option<Arc<dyn Gate>>,
    /// The gate, or the route, is asked again soon whether it may begin.
    is_kept_waiting: bool,
    /// Since when its start waits for what other disks have under way, and when it was last asked whether it does.
    awaits_others: Option<(Instant, Instant)>,
    /// Requests were taken since somebody looked.
    has_taken: bool,
    /// Where rings were stopped, while others are running.
    stopped_positions: Vec<(u16, u16)>,
    /// Where the VMM wants each page marked that is written here, and what its guest has not written itself.
    log: Option<DirtyLog>,
    throttle: Option<Throttle>,
    /// Until when nothing is taken from the rings.
    held_until: Option<Instant>,
    /// Rings that somebody waits for to become idle.
    stopping: usize,
    /// Told to end: at once when nothing is under way, and then at the latest.
    quit_deadline: Option<Instant>,
}

impl<R: Route + ?Sized> Worker<R> {
    pub(crate) fn new(parts: WorkerParts<R>, engine: Engine, mailbox: MailboxReceiver<R>) -> Self {
        let WorkerParts {
            name,
            image,
            route,
            observer,
            counters,
            identity,
            queues,
            drain_timeout,
            polling_max,
            write_cache,
            gate,
            throttle,
        } = parts;
        Worker {
            name,
            image,
            route,
            observer,
            counters,
            identity,
            drain_timeout,
            mailbox,
            engine,
            features: 0,
            rings: (0..queues).map(|_| Ring::default()).collect(),
            active: Vec::new(),
            running: Vec::new(),
            table: None,
            region: None,
            origin: None,
            started: false,
            refused: false,
            tracker: Tracker::default(),
            plan: Plan::default(),
            chain: Chain::default(),
            ranges: Vec::new(),
            flush_after: VecDeque::new(),
            pass_began: Instant::now(),
            pass_bytes: 0,
            patient: Patient::default(),
            log_limit: LogLimit::default(),
            missed_memory: false,
            polling: Polling::new(polling_max),
            write_cache,
            gate,
            is_kept_waiting: false,
            awaits_others: None,
            has_taken: false,
            stopped_positions: Vec::new(),
            log: None,
            throttle,
            held_until: None,
            stopping: 0,
            quit_deadline: None,
        }
    }

    /// Works until told to quit. Returns the route, and how many operations storage has not answered: those are under way still.
    pub(crate) fn run(mut self) -> (Box<R>, usize) {
        self.begin();
        while !self.ended() {
            if !self.turn() {
                // Hands over and sleeps in one call.
                self.rest();
            }
        }
        self.end()
    }

    /// Watches what it is told things by.
    pub(crate) fn begin(&mut self) {
        self.engine.watch(self.mailbox.descriptor(), TOKEN_MAILBOX);
        if let Some(descriptor) = self.route.wake_descriptor() {
            self.engine.watch(descriptor, TOKEN_ROUTE);
        }
    }

    /// Does what there is to do. Returns whether there is more; otherwise not all of it has been handed to the kernel.
    pub(crate) fn turn(&mut self) -> bool {
        let mut busy = self.run_jobs();
        busy |= self.take_events();
        busy |= self.try_patient_again();
        self.interrupt_guests();
        self.answer_stop_waiters();
        busy |= self.pass();
        self.interrupt_guests();
        let has_more = busy && self.more_to_do();
        if has_more {
            self.engine.enter(false, None);
        }
        has_more
    }

    /// Whether a turn since the last time has taken requests.
    pub(crate) fn has_taken(&mut self) -> bool {
        std::mem::take(&mut self.has_taken)
    }

    /// After the last turn: as [`Worker::run`].
    pub(crate) fn end(mut self) -> (Box<R>, usize) {
        let unanswered = self.engine.pending();
        if unanswered > 0 {
            // The kernel may write to guest memory and to our buffers for as long as it likes: all of it stays.
            std::mem::forget(self.table.take());
            self.engine.abandon();
        }
        (self.route, unanswered)
    }

    /// Ends the worker when what is under way is done, or after the drain timeout.
    pub(crate) fn quit(&mut self) {
        self.quit_deadline = Some(Instant::now() + self.drain_timeout);
        self.engine.forget_model();
    }

    pub(crate) fn ended(&self) -> bool {
        self.quit_deadline.is_some_and(|deadline| self.engine.pending() == 0 || Instant::now() >= deadline)
    }

    fn run_jobs(&mut self) -> bool {
        let mut any = false;
        while let Some(job) = self.mailbox.next() {
            any = true;
            job(self);
            self.carry_out();
        }
        any
    }

    /// Handles what has completed, up to a number.
    fn take_events(&mut self) -> bool {
        let mut any = false;
        let mut count = 0;
        while count < EVENTS_MAX
            && let Some(event) = self.engine.reap()
        {
            any = true;
            count += 1;
            match event {
                Event::Done { request, ticket, result } => self.operation_done(request, ticket, result),
                Event::Readable(TOKEN_MAILBOX) => self.mailbox.clear_signal(),
                Event::Readable(TOKEN_ROUTE) => self.route_woken(),
                // A kick: the pass that follows looks at every ring anyway.
                Event::Readable(_) => {}
                Event::WatchLost(token) => self.watch_again(token),
            }
        }
        if any {
            self.carry_out();
        }
        any
    }

    fn route_woken(&mut self) {
        if let Some(descriptor) = self.route.wake_descriptor() {
            read_empty(descriptor);
        }
        self.route.woken(&mut self.plan);
    }

    fn watch_again(&mut self, token: u32) {
        match token {
            TOKEN_MAILBOX => self.engine.watch(self.mailbox.descriptor(), TOKEN_MAILBOX),
            TOKEN_ROUTE => {
                if let Some(descriptor) = self.route.wake_descriptor() {
                    self.engine.watch(descriptor, TOKEN_ROUTE);
                }
            }
            _ => {
                let index = (token & ((1 << TOKEN_RING_BITS) - 1)) as u16;
                let Some(ring) = self.rings.get(usize::from(index)) else { return };
                if ring.running.is_some()
                    && ring_token(index, ring.epoch) == token
                    && let Some(kick) = &ring.kick
                {
                    self.engine.watch(kick.as_raw_fd(), token);
                }
            }
        }
    }

    /// Nothing to do: polls for a moment if that has paid lately, then sleeps.
    fn rest(&mut self) {
        let idle_since = Instant::now();
        // Only the guest's next request is polled for, which saves it the kick. Storage takes longer than a wake-up costs,
        // and what completes during a sleep is handled together.
        let guest_alone = self.waits_for_guest_alone();
        if guest_alone && self.debt(idle_since).is_none() && self.poll(idle_since) {
            return;
        }
        let Some(timeout) = self.may_sleep(idle_since) else { return };
        self.engine.enter(true, timeout);
        if guest_alone {
            self.polling.waited(idle_since.elapsed());
        }
    }

    fn waits_for_guest_alone(&self) -> bool {
        self.engine.pending() == 0 && !self.has_patient()
    }

    /// Asks for kicks, and says for how long it may be slept. Nothing: there is something to do.
    #[expect(clippy::option_option, reason = "one is whether, the other for how long")]
    pub(crate) fn may_sleep(&mut self, idle_since: Instant) -> Option<Option<Duration>> {
        // With too much under way, or a debt to be paid, no ring is looked at; otherwise each is looked at once more after asking for kicks.
        let debt = self.debt(idle_since);
        if debt.is_none() && !self.congested() {
            let mut more = false;
            for position in 0..self.active.len() {
                let index = self.active[position];
                let Some(running) = &mut self.rings[usize::from(index)].running else { continue };
                let listened = running.listen();
                // It may have been written in the used ring that kicks are wanted.
                self.mark_used(index);
                match listened {
                    Ok(found) => more |= found,
                    Err(error) => {
                        self.break_ring(index, &error);
                        return None;
                    }
                }
            }
            if more && self.may_take() {
                return None;
            }
        }
        if self.ended() {
            return None;
        }
        let waits = self.stopping > 0 || self.quit_deadline.is_some() || self.has_patient();
        let asks = self.is_kept_waiting.then_some(GATE_CHECK);
        Some([waits.then_some(STOP_CHECK), asks, debt].into_iter().flatten().min())
    }

    /// How long it is to be polled for its guest's next request before its thread sleeps; nothing where that is not what it waits for.
    pub(crate) fn polls_for(&self, idle_since: Instant) -> Option<Duration> {
        let waits = self.waits_for_guest_alone() && self.debt(idle_since).is_none();
        waits.then(|| self.polling.time().unwrap_or_default())
    }

    /// It was polled and slept for so long.
    pub(crate) fn has_waited(&mut self, time: Duration) {
        self.polling.waited(time);
    }

    /// Its engine, for a thread that has several workers and sleeps for all of them.
    pub(crate) fn engine(&mut self) -> &mut Engine {
        &mut self.engine
    }

    /// Looks for work without sleeping, as long as that has paid lately. Returns whether it found some.
    fn poll(&mut self, start: Instant) -> bool {
        let Some(time) = self.polling.time() else { return false };
        self.engine.enter(false, None);
        while !self.more_to_do() {
            if start.elapsed() > time {
                return false;
            }
            std::hint::spin_loop();
        }
        // Completions that the kernel hands out only when entered.
        self.engine.enter(false, None);
        true
    }

    /// Whether there is something to do already, seen without entering the kernel.
    pub(crate) fn more_to_do(&mut self) -> bool {
        if self.engine.has_completions() || !self.mailbox.is_empty() {
            return true;
        }
        let rings_have_more = self
            .active
            .iter()
            .any(|index| self.rings[usize::from(*index)].running.as_ref().is_some_and(|running| running.has_more()));
        rings_have_more && !self.congested() && self.debt(Instant::now()).is_none() && self.may_take()
    }

    pub(crate) fn set_throttle(&mut self, throttle: Option<Throttle>) {
        self.throttle = throttle;
    }

    /// Has nothing taken from the rings until then. Says whether that is so now.
    pub(crate) fn hold(&mut self, until: Option<Instant>) -> bool {
        let was_held = self.held(Instant::now()).is_some();
        self.held_until = until;
        was_held
    }

    pub(crate) fn is_held(&self) -> bool {
        self.held(Instant::now()).is_some()
    }

    /// Whether all that was taken is answered. What waits for room was taken, and goes on whoever holds the rings.
    pub(crate) fn is_idle(&self) -> bool {
        self.tracker.live_chains() == 0 && self.engine.pending() == 0 && !self.has_patient_chains()
    }

    fn held(&self, now: Instant) -> Option<Duration> {
        self.held_until?.checked_duration_since(now).filter(|left| !left.is_zero())
    }

    /// How long nothing may be taken from the rings, because the guest has had what it may have, or is held.
    fn debt(&self, now: Instant) -> Option<Duration> {
        let owed = self.throttle.as_ref().and_then(|throttle| throttle.wait(now));
        owed.max(self.held(now))
    }

    fn limits(&self) -> Limits {
        Limits {
            size_bytes: self.image.size_bytes(),
            read_only: self.image.read_only(),
            discard: self.features & bit(VIRTIO_BLK_F_DISCARD) != 0,
            write_zeroes: self.features & bit(VIRTIO_BLK_F_WRITE_ZEROES) != 0,
        }
    }

    fn offered_features(&self) -> u64 {
        config_space::features(&self.image, self.write_cache)
    }
}

fn ring_token(index: u16, epoch: u32) -> u32 {
    // 22 bits of epoch keep the tokens of rings below those of the mailbox and the route.
    (epoch & ((1 << 22) - 1)) << TOKEN_RING_BITS | u32::from(index)
}

/// Reads a descriptor (an eventfd) until nothing is left, without ever blocking on it.
fn read_empty(descriptor: RawFd) {
    // SAFETY: the route promises that its wake descriptor stays open while the route lives.
    let descriptor = unsafe { BorrowedFd::borrow_raw(descriptor) };
    let mut buffer = [0u8; 8];
    for _ in 0..64 {
        let mut list = [rustix::event::PollFd::new(&descriptor, rustix::event::PollFlags::IN)];
        let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        if !matches!(rustix::event::poll(&mut list, Some(&now)), Ok(1))
            || !list[0].revents().contains(rustix::event::PollFlags::IN)
            || rustix::io::read(descriptor, &mut buffer).is_err()
        {
            return;
        }
    }
}

/// How long to poll before sleeping: grows while waits turn out short, ends at once when one was long.
#[derive(Debug)]
struct Polling {
    max: Duration,
    current: Duration,
}

impl Polling {
    const FIRST: Duration = Duration::from_micros(4);

    fn new(max: Duration) -> Self {
        Polling { max, current: Duration::ZERO }
    }

    fn time(&self) -> Option<Duration> {
        (!self.current.is_zero()).then_some(self.current)
    }

    /// Something came after `time` of polling in vain and sleeping.
    fn waited(&mut self, time: Duration) {
        self.current = if time > self.max {
            Duration::ZERO
        } else if time > self.current {
            (self.current * 2).max(Self::FIRST).min(self.max)
        } else {
            self.current
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn polling_grows_with_short_waits_and_ends_with_a_long_one() {
        let microseconds = Duration::from_micros;
        let mut polling = Polling::new(microseconds(32));
        assert_eq!(polling.time(), None);
        for expected in [4, 8, 16, 32, 32] {
            polling.waited(microseconds(30));
            assert_eq!(polling.time(), Some(microseconds(expected.min(32))));
        }
        polling.waited(microseconds(33));
        assert_eq!(polling.time(), None);
        let mut never = Polling::new(Duration::ZERO);
        never.waited(microseconds(1));
        assert_eq!(never.time(), None);
    }

    #[test]
    fn tokens_do_not_meet() {
        assert!(ring_token(63, u32::MAX) < TOKEN_ROUTE);
        assert_ne!(ring_token(1, 1), ring_token(1, 2));
        assert_ne!(ring_token(1, 1), ring_token(2, 1));
    }
}
