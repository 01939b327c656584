//! What the VMM's messages do to the worker: rings configured, started, stopped; the route told.

use super::{ASKED_WITHIN, Worker, ring_token};
use crate::config_space::{LOG_ALL, PROTOCOL_FEATURES, QUEUE_SIZE_MAX, bit};
use crate::counters::add;
use crate::gate::Begin;
use crate::inflight::InflightRegion;
use crate::ring::{Patience, Ring, RingAddresses, RingError, RunningRing, StopWaiter, Whose};
use block_route::{Route, Start};
use guest_memory::{MemoryTable, PageId};
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::time::Instant;
use vhost::vhost_user::message::VhostUserVringState;
use virtio_bindings::bindings::virtio_blk::{VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH};
use virtio_bindings::bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;

/// Why a message is refused, as a sentence.
pub(crate) type Refusal = String;

impl<R: Route + ?Sized> Worker<R> {
    fn ring(&mut self, index: u32) -> Result<&mut Ring, Refusal> {
        let count = self.rings.len();
        self.rings.get_mut(index as usize).ok_or_else(|| format!("there is no queue {index}; the device has {count}"))
    }

    pub(crate) fn set_features(&mut self, features: u64) -> Result<(), Refusal> {
        // A guest that began under another process may have been told of a write cache that this one would not tell of:
        // its flushes are done as they are. So is it with discards, which storage may not take any more: those have no effect then.
        let log = if self.gate.is_some() { LOG_ALL } else { 0 };
        let known = if self.image.read_only() { 0 } else { bit(VIRTIO_BLK_F_DISCARD) };
        let offered = self.offered_features() | bit(VIRTIO_BLK_F_FLUSH) | known | log;
        if features & !offered != 0 {
            return Err(format!("the features {features:#x} were not offered (those were {offered:#x})"));
        }
        self.features = features;
        if features & LOG_ALL == 0 {
            self.log = None;
        }
        if let Some(gate) = &self.gate {
            gate.logging(features & LOG_ALL != 0);
        }
        self.refresh_lists();
        self.mark_all_used();
        Ok(())
    }

    pub(crate) fn set_table(&mut self, table: Arc<MemoryTable>) {
        for index in 0..self.rings.len() as u16 {
            let ring = &mut self.rings[usize::from(index)];
            let addresses = ring.addresses;
            if let Some(running) = &mut ring.running
                && let Err(error) = running.move_to(addresses, &table)
            {
                self.break_ring(index, &error);
            }
        }
        if let Some(known) = self.table.take() {
            self.tracker.carry_over(|regions| known.carried_over(regions, &table));
        }
        self.engine.set_table(Arc::clone(&table));
        self.table = Some(table);
        self.tell_ring_pages();
        self.prepare_rings();
        self.refresh_lists();
    }

    pub(crate) fn set_ring_size(&mut self, index: u32, size: u32) -> Result<(), Refusal> {
        let ring = self.stopped_ring(index)?;
        match u16::try_from(size) {
            Ok(size) if size.is_power_of_two() && size <= QUEUE_SIZE_MAX => {
                ring.size = size;
                Ok(())
            }
            _ => Err(format!("queue {index}: {}", RingError::Size(size))),
        }
    }

    fn stopped_ring(&mut self, index: u32) -> Result<&mut Ring, Refusal> {
        let ring = self.ring(index)?;
        if ring.running.is_some() {
            return Err(format!("queue {index} is running and cannot be changed"));
        }
        Ok(ring)
    }

    pub(crate) fn set_ring_addresses(&mut self, index: u32, addresses: RingAddresses) -> Result<(), Refusal> {
        // That they are in the guest's memory is looked at when the ring starts: of one that is stopped, the memory may have gone.
        let ring = self.ring(index)?;
        if ring.running.is_some() {
            let known = ring.addresses;
            let same = (known.descriptors, known.available, known.used)
                == (addresses.descriptors, addresses.available, addresses.used);
            // QEMU repeats the addresses when it turns dirty logging on and off; they do not change.
            if !same {
                return Err(format!("queue {index} is running and cannot be moved"));
            }
            ring.addresses = addresses;
            self.mark_used(index as u16);
            return Ok(());
        }
        ring.addresses = addresses;
        Ok(())
    }

    pub(crate) fn set_ring_base(&mut self, index: u32, base: u32) -> Result<(), Refusal> {
        let ring = self.stopped_ring(index)?;
        ring.base = u16::try_from(base).map_err(|_| format!("queue {index}: the base {base} is beyond 65535"))?;
        Ok(())
    }

    pub(crate) fn set_ring_call(&mut self, index: u32, call: Option<File>) -> Result<(), Refusal> {
        let ring = self.ring(index)?;
        ring.call = call;
        // QEMU starts a ring with a descriptor of its own, gives the guest's after that, and does not look what the first was told.
        ring.running.iter_mut().for_each(RunningRing::is_told_elsewhere);
        Ok(())
    }

    pub(crate) fn set_ring_err(&mut self, index: u32, err: Option<File>) -> Result<(), Refusal> {
        self.ring(index)?.err = err;
        Ok(())
    }

    /// A kick descriptor starts the ring.
    pub(crate) fn set_ring_kick(&mut self, index: u32, kick: Option<File>) -> Result<(), Refusal> {
        let Some(kick) = kick else {
            return Err(format!("queue {index} comes without a kick descriptor; polling for ever is not offered"));
        };
        self.ring(index)?;
        let index = index as u16;
        if self.rings[usize::from(index)].running.is_some() {
            let ring = &mut self.rings[usize::from(index)];
            let old = ring_token(index, ring.epoch);
            self.engine.unwatch(old);
            self.engine.enter(false, None);
            self.engine.watch(kick.as_raw_fd(), old);
            self.rings[usize::from(index)].kick = Some(kick);
            return Ok(());
        }
        self.start_ring(index, kick).map_err(|error| format!("queue {index} cannot be started: {error}"))
    }

    fn start_ring(&mut self, index: u16, kick: File) -> Result<(), RingError> {
        let Some(table) = self.table.clone() else { return Err(RingError::Addresses) };
        let event_index = self.features & bit(VIRTIO_RING_F_EVENT_IDX) != 0;
        if self.running.is_empty() {
            self.stopped_positions.clear();
        }
        let ring = &mut self.rings[usize::from(index)];
        let is_followed = self.region.is_some() && self.origin == Some(Start::Resumed);
        let whose = if is_followed && ring.stopped_at != Some(ring.base) { Whose::AnEarlierOnes } else { Whose::Known };
        let mut running = RunningRing::new(index, ring, &table, event_index, self.region.as_ref(), whose)?;
        if self.origin == Some(Start::Resumed) || (self.origin.is_none() && ring.base != 0) {
            running.tell_anyway();
        }
        if running.resubmissions() > 0 {
            log::info!("disk {}: queue {index} does {} requests again", self.name, running.resubmissions());
        }
        ring.epoch = ring.epoch.wrapping_add(1);
        ring.in_flight = 0;
        ring.broken = false;
        let token = ring_token(index, ring.epoch);
        self.engine.watch(kick.as_raw_fd(), token);
        ring.kick = Some(kick);
        ring.running = Some(running);
        self.tell_ring_pages();
        self.prepare_rings();
        self.refresh_lists();
        self.mark_used(index);
        Ok(())
    }

    pub(crate) fn set_ring_enabled(&mut self, index: u32, enabled: bool) -> Result<(), Refusal> {
        self.ring(index)?.enabled = enabled;
        self.refresh_lists();
        Ok(())
    }

    /// Works out which rings requests are taken from.
    pub(super) fn refresh_lists(&mut self) {
        // Without the protocol features there is no message that enables a ring.
        let always = self.features & PROTOCOL_FEATURES == 0;
        self.active.clear();
        self.running.clear();
        for (index, ring) in self.rings.iter().enumerate() {
            if ring.running.is_none() {
                continue;
            }
            self.running.push(index as u16);
            let is_open = match ring.stop_waiter {
                None => ring.enabled || always,
                // A VMM disables a ring before it stops it.
                Some(_) => ring.is_owed_to(),
            };
            if is_open && !ring.broken && !ring.is_in_the_way {
                self.active.push(index as u16);
            }
        }
    }

    fn tell_ring_pages(&self) {
        let mut pages: Vec<PageId> =
            self.rings.iter().filter_map(|ring| ring.running.as_ref()).flat_map(RunningRing::pages).collect();
        pages.sort_unstable();
        pages.dedup();
        self.observer.ring_pages(&pages);
        let mut running = self.rings.iter().filter_map(|ring| ring.running.as_ref());
        self.observer.can_be_followed(running.all(RunningRing::has_place));
    }

    /// Stops taking requests from a ring, and answers when what is in flight is done, as far as that is waited for.
    ///
    /// Where all is, what an earlier process had in flight is done first: it is before the position that is answered, so that
    /// whoever goes on from there alone, on another host, would never do it. Nobody waits any more who has asked before.
    pub(crate) fn stop_ring(
        &mut self,
        index: u32,
        reply: SyncSender<VhostUserVringState>,
        patience: Patience,
    ) -> Result<(), Refusal> {
        let ring = self.ring(index)?;
        if let Some(running) = &mut ring.running {
            running.take_nothing_new();
        }
        let waiter = StopWaiter { reply, patience, since: Instant::now(), was_said: false };
        if ring.stop_waiter.replace(waiter).is_none() {
            self.stopping += 1;
        }
        self.refresh_lists();
        Ok(())
    }

    /// Whether a ring that somebody wants back can be given back.
    fn can_be_given_back(&self, index: u16, waiter: &StopWaiter) -> bool {
        let ring = &self.rings[usize::from(index)];
        let has_time = waiter.since.elapsed() < self.drain_timeout;
        let nothing_taken = ring.running.is_none() || ring.in_flight == 0;
        let is_memory_free = || self.tracker.transfers_of(index) == 0;
        match waiter.patience {
            // Of a ring that ended, what was not begun never is.
            Patience::All => (nothing_taken || ring.broken && self.tracker.live_chains() == 0) && is_memory_free(),
            Patience::Begun => (nothing_taken || !has_time) && is_memory_free(),
            Patience::Until(end) => nothing_taken || Instant::now() >= end,
        }
    }

    /// Answers those who wait for a ring that has become idle.
    pub(super) fn answer_stop_waiters(&mut self) {
        if self.stopping == 0 {
            return;
        }
        for index in 0..self.rings.len() as u16 {
            let ring = &self.rings[usize::from(index)];
            let Some(waiter) = &ring.stop_waiter else { continue };
            if !self.can_be_given_back(index, waiter) {
                self.say_that_it_stands(index);
                continue;
            }
            // Who is not let in has nothing to give back that is his: what is in flight stays marked.
            if ring.is_owed_to() && !self.is_kept_waiting {
                continue;
            }
            if ring.running.is_some() && ring.in_flight > 0 {
                log::error!(
                    "disk {}: queue {index} is stopped with {} requests that storage has not answered; \
                     they stay marked in the in-flight region",
                    self.name,
                    ring.in_flight
                );
            }
            self.interrupt_guest(index);
            let ring = &mut self.rings[usize::from(index)];
            let waiter = ring.stop_waiter.take().expect("there was one");
            self.stopping -= 1;
            if waiter.was_said {
                self.it_goes_on(index, &waiter);
            }
            let ring = &mut self.rings[usize::from(index)];
            let Some(running) = ring.running.take() else {
                let _ = waiter.reply.send(VhostUserVringState::new(u32::from(index), u32::from(ring.base)));
                continue;
            };
            ring.base = running.next_available();
            ring.stopped_at = (ring.in_flight == 0).then_some(ring.base);
            ring.kick = None;
            let state = VhostUserVringState::new(u32::from(index), u32::from(ring.base));
            self.stopped_positions.push((index, ring.base));
            self.engine.unwatch(ring_token(index, ring.epoch));
            self.refresh_lists();
            self.tell_ring_pages();
            if self.running.is_empty() {
                self.device_stopped();
            }
            let _ = waiter.reply.send(state);
        }
    }

    /// A VMM waits for a ring for longer than it should: says so, once.
    fn say_that_it_stands(&mut self, index: u16) {
        let requests = self.tracker.transfers_of(index);
        let ring = &mut self.rings[usize::from(index)];
        let Some(waiter) = &mut ring.stop_waiter else { return };
        if waiter.was_said || waiter.since.elapsed() < self.drain_timeout || requests == 0 {
            return;
        }
        waiter.was_said = true;
        let since = waiter.since;
        log::error!(
            "disk {}: the VMM has stopped queue {index}, and stands still until storage has answered {requests} requests, which have the \
             guest's memory; mend the storage, or kill the VMM",
            self.name
        );
        self.observer.stands_still(Some(since));
    }

    /// What was said of a ring is over.
    fn it_goes_on(&self, index: u16, waiter: &StopWaiter) {
        log::info!(
            "disk {}: queue {index} is given back after {:.1} s",
            self.name,
            waiter.since.elapsed().as_secs_f64()
        );
        let others = self.rings.iter().filter_map(|ring| ring.stop_waiter.as_ref()).filter(|other| other.was_said);
        self.observer.stands_still(others.map(|other| other.since).min());
    }

    /// Where all rings were stopped, when none is running any more; once.
    pub(crate) fn take_stopped_positions(&mut self) -> Option<Vec<(u16, u16)>> {
        if !self.running.is_empty() || self.stopped_positions.is_empty() {
            return None;
        }
        let mut positions = std::mem::take(&mut self.stopped_positions);
        positions.sort_unstable();
        Some(positions)
    }

    fn device_stopped(&mut self) {
        self.is_kept_waiting = false;
        self.awaits_others = None;
        self.origin = None;
        if std::mem::take(&mut self.started) {
            self.route.stopped();
        }
        self.refused = false;
        log::debug!("disk {}: stopped", self.name);
    }

    /// Whether requests may be taken; tells the route of the start before the first one is.
    pub(super) fn may_take(&mut self) -> bool {
        if self.started || self.active.is_empty() {
            return self.started;
        }
        // Requests of an earlier start that storage has not answered yet could change the disk under the new one, and so
        // could writes of the route's own: what the route recovers now is newer than they are.
        let is_quiet = self.tracker.live_chains() == 0 && self.engine.pending() == 0;
        let Some(table) = self.table.clone().filter(|_| is_quiet) else { return false };
        let start = self.origin.unwrap_or_else(|| {
            let fresh = self.running.iter().all(|index| self.rings[usize::from(*index)].base == 0);
            if fresh { Start::Fresh } else { Start::Resumed }
        });
        // Here, and not in the route's call: this thread may be the one that brings it to its end, and has other disks to serve.
        if let Some(what) = self.route.waits_for_others(start) {
            let now = Instant::now();
            // Time in which nobody asks, nor takes anything, is none in which others could not end.
            let waiting = self.awaits_others.filter(|(_, asked)| now.duration_since(*asked) < ASKED_WITHIN);
            let since = waiting.map_or(now, |(since, _)| since);
            self.awaits_others = Some((since, now));
            if now.duration_since(since) < self.drain_timeout {
                self.is_kept_waiting = true;
                return false;
            }
            self.fails_every_request(&format!("{what} have not ended in {:.0} s", since.elapsed().as_secs_f64()));
            return true;
        }
        self.awaits_others = None;
        let start = match self.ask_gate(start) {
            Begin::Yes(start) => start,
            Begin::Wait => {
                self.is_kept_waiting = true;
                return false;
            }
            Begin::No(sentence) => {
                self.fails_every_request(&sentence);
                return true;
            }
        };
        self.is_kept_waiting = false;
        log::debug!("disk {}: starts, {start:?}", self.name);
        self.refused = match self.route.started(start, &table) {
            Ok(()) => {
                self.observer.began();
                false
            }
            Err(error) => {
                log::error!("disk {} fails every request: {error}", self.name);
                true
            }
        };
        self.started = true;
        true
    }

    /// It has begun, and its route does not hear of it.
    fn fails_every_request(&mut self, sentence: &str) {
        log::error!("disk {} fails every request: {sentence}", self.name);
        self.observer.fault(sentence);
        (self.is_kept_waiting, self.refused, self.started) = (false, true, true);
    }

    fn ask_gate(&mut self, start: Start) -> Begin {
        let Some(gate) = self.gate.clone() else { return Begin::Yes(start) };
        let position = |index: &u16| (*index, self.rings[usize::from(*index)].base);
        let positions: Vec<(u16, u16)> = self.running.iter().map(position).collect();
        let begin = gate.begins(&positions, start);
        if begin == Begin::Yes(Start::Resumed) && self.origin != Some(Start::Resumed) {
            // It has come from elsewhere, and an interrupt may have been lost on the way.
            for ring in &mut self.rings {
                ring.running.iter_mut().for_each(RunningRing::tell_anyway);
            }
        }
        begin
    }

    /// A ring said something impossible: it is left alone until its next start; others go on.
    ///
    /// virtio 1.2, section 2.1.2 has a device set DEVICE_NEEDS_RESET then. vhost-user has no message from a device that
    /// would do so (VHOST_USER_SET_STATUS goes the other way): what it has is the ring's error descriptor, which QEMU
    /// looks at and says something of, and the guest's request that is never answered.
    pub(super) fn break_ring(&mut self, index: u16, error: &RingError) {
        add(&self.counters.malformed_chains, 1);
        let name = &self.name;
        if let Some(count) = self.log_limit.next() {
            log::error!("disk {name}: queue {index} is stopped: {error} ({count} such messages so far)");
        }
        self.observer.fault(&format!("queue {index} is stopped until the guest is reset: {error}"));
        if let RingError::Chain(_, error) = error
            && let Some(address) = error.unknown_address()
        {
            self.memory_is_missing(address);
        }
        let ring = &mut self.rings[usize::from(index)];
        ring.broken = true;
        if let Some(err) = &ring.err {
            let _ = rustix::io::write(err.as_fd(), &1u64.to_ne_bytes());
        }
        self.refresh_lists();
    }

    /// The VMM asked for a new in-flight region: a first start, or a reset.
    pub(crate) fn region_requested(&mut self) {
        self.origin = Some(Start::Fresh);
    }

    pub(crate) fn set_region(&mut self, region: Arc<InflightRegion>) {
        self.origin.get_or_insert(Start::Resumed);
        self.region = Some(region);
    }

    /// The VMM has gone: everything it configured is forgotten; the rings have been stopped.
    pub(crate) fn forget_front_end(&mut self) {
        self.forget_configuration();
        self.table = None;
    }

    fn forget_configuration(&mut self) {
        for ring in &mut self.rings {
            let epoch = ring.epoch;
            *ring = Ring { epoch, ..Ring::default() };
        }
        self.stopping = 0;
        self.refresh_lists();
        self.features = 0;
        self.log = None;
        self.region = None;
        self.origin = None;
    }

    /// RESET_DEVICE: as at the beginning, but the connection and the memory stay.
    pub(crate) fn reset(&mut self) {
        self.forget_configuration();
        self.origin = Some(Start::Fresh);
    }

    /// Rings that are running, to be stopped.
    pub(crate) fn running_rings(&self) -> Vec<u16> {
        self.running.clone()
    }

    /// The same, and those of which something is in flight since they were.
    pub(crate) fn rings_in_use(&self) -> Vec<u16> {
        let is_in_use =
            |index: &u16| self.rings[usize::from(*index)].running.is_some() || self.tracker.transfers_of(*index) > 0;
        (0..self.rings.len() as u16).filter(is_in_use).collect()
    }

    /// Whether something is in flight that has the guest's memory.
    pub(crate) fn has_guest_memory(&self) -> bool {
        (0..self.rings.len() as u16).any(|index| self.tracker.transfers_of(index) > 0)
    }
}
