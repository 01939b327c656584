//! One split ring: what the VMM said of it, and the running state while it is started.

use crate::chain::{ChainError, one_slice};
use crate::config_space::QUEUE_SIZE_MAX;
use crate::inflight::{InflightQueue, InflightRegion};
use guest_memory::{DirtyLog, MemorySlice, MemoryTable, PageId};
use std::collections::VecDeque;
use std::fs::File;
use std::sync::Arc;
use vhost::vhost_user::message::VhostUserVringState;
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::GuestAddress;

/// Where the VMM has the three parts of a ring, in its own address space.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RingAddresses {
    pub(crate) descriptors: u64,
    pub(crate) available: u64,
    pub(crate) used: u64,
    /// Where in the guest's memory the VMM wants it marked that the used ring was written.
    pub(crate) used_log: Option<u64>,
}

/// Why a ring cannot be used (any more).
#[derive(Debug, thiserror::Error)]
pub(crate) enum RingError {
    #[error("its addresses are not inside guest memory")]
    Addresses,
    #[error("its size or the alignment of its parts is wrong: {0}")]
    Shape(virtio_queue::Error),
    #[error("its size of {0} is not a power of two up to {QUEUE_SIZE_MAX}")]
    Size(u32),
    #[error("the available ring is wrong: {0}")]
    Available(virtio_queue::Error),
    #[error("the used ring cannot be written: {0}")]
    Used(virtio_queue::Error),
    #[error(
        "it has no place in the in-flight region, and {0} of its requests are not answered: nobody knows which of them an earlier process \
         has done; reset the guest"
    )]
    Placeless(u16),
    #[error("the guest made descriptor {0} available, which is beyond the ring or still in flight")]
    Head(u16),
    #[error("descriptor chain {0} cannot be answered: {1}")]
    Chain(u16, ChainError),
    #[error("descriptor chain {0} cannot be answered: {1}")]
    NoRoom(u16, guest_memory::Error),
}

/// A ring as the VMM configured it.
#[derive(Debug, Default)]
pub(crate) struct Ring {
    pub(crate) size: u16,
    pub(crate) addresses: RingAddresses,
    pub(crate) base: u16,
    /// Where this process has stopped it, with nothing in flight.
    pub(crate) stopped_at: Option<u16>,
    pub(crate) kick: Option<File>,
    pub(crate) call: Option<File>,
    pub(crate) err: Option<File>,
    pub(crate) enabled: bool,
    /// It said something impossible and is not looked at before its next start.
    pub(crate) broken: bool,
    /// A page of it holds a committed block that there is no memory to copy to: nothing is written to the ring, and nothing taken
    /// from it, before there is.
    pub(crate) is_in_the_way: bool,
    /// There while the ring is started.
    pub(crate) running: Option<RunningRing>,
    /// Counts starts, so that what belongs to an earlier one is told apart.
    pub(crate) epoch: u32,
    /// Chains in flight of the current start.
    pub(crate) in_flight: u16,
    /// Somebody waits for the ring to become idle, to be told its base.
    pub(crate) stop_waiter: Option<StopWaiter>,
}

impl Ring {
    /// It is not given back before what an earlier process had in flight was done.
    pub(crate) fn is_owed_to(&self) -> bool {
        let is_patient = self.stop_waiter.as_ref().is_some_and(|waiter| waiter.patience == Patience::All);
        is_patient && !self.broken && self.running.as_ref().is_some_and(|running| running.resubmissions() > 0)
    }
}

/// What is waited for before a ring is given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Patience {
    /// All that was taken, and what an earlier process had in flight: the guest goes on elsewhere, where nobody does it again.
    All,
    /// All that has buffers in the guest's memory, however long that takes: whoever has the ring back may give that memory to a guest that
    /// begins anew, and what storage reads would land in it, or be written out of it. Anything else (a flush, or what has only been taken,
    /// and waits for room) is left marked after the drain timeout.
    Begun,
    /// Nothing after this moment: the VMM has gone, or this process ends.
    Until(std::time::Instant),
}

/// The answer to GET_VRING_BASE that is still owed.
#[derive(Debug)]
pub(crate) struct StopWaiter {
    pub(crate) reply: std::sync::mpsc::SyncSender<VhostUserVringState>,
    pub(crate) patience: Patience,
    pub(crate) since: std::time::Instant,
    /// It was said that this takes long.
    pub(crate) was_said: bool,
}

/// Who has had a ring before it is started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Whose {
    /// Nobody, or this process, or one that has given it back: its base is where it stands.
    Known,
    /// A process that may have died with requests in flight.
    AnEarlierOnes,
}

/// A started ring.
#[derive(Debug)]
pub(crate) struct RunningRing {
    queue: Queue,
    pub(crate) table: Arc<MemoryTable>,
    /// The descriptor table.
    pub(crate) descriptors: MemorySlice,
    /// All three parts.
    parts: [MemorySlice; 3],
    inflight: Option<InflightQueue>,
    /// Heads in flight, a bit each: a legal driver never offers one twice.
    heads: Box<[u64]>,
    /// Heads to be done again after a reconnection, before anything new is taken, …
    resubmit: VecDeque<u16>,
    /// … and those of them that were taken and are in flight, a bit each.
    again: Box<[u64]>,
    /// Nothing new is taken.
    is_ending: bool,
    /// The guest does not kick at the moment.
    quiet: bool,
    /// Something was put into the used ring since the guest was last told.
    tell_guest: bool,
    /// Something was, since the descriptor at which the guest is told was given.
    has_answered: bool,
    /// The guest is told whether it asked for it or not: an interrupt may have been lost with a connection.
    tell_anyway: bool,
}

impl RunningRing {
    /// Sets the ring up from what the VMM said.
    pub(crate) fn new(
        index: u16,
        ring: &Ring,
        table: &Arc<MemoryTable>,
        event_index: bool,
        region: Option<&Arc<InflightRegion>>,
        whose: Whose,
    ) -> Result<Self, RingError> {
        if ring.size == 0 || ring.size > QUEUE_SIZE_MAX || !ring.size.is_power_of_two() {
            return Err(RingError::Size(u32::from(ring.size)));
        }
        let RingAddresses { descriptors, available, used, .. } = ring.addresses;
        let guest = |address| table.user_to_guest(address).ok_or(RingError::Addresses);
        let (descriptors, available, used) = (guest(descriptors)?, guest(available)?, guest(used)?);
        let mut queue = Queue::new(QUEUE_SIZE_MAX).map_err(RingError::Shape)?;
        queue.try_set_size(ring.size).map_err(RingError::Shape)?;
        queue.try_set_desc_table_address(GuestAddress(descriptors)).map_err(RingError::Shape)?;
        queue.try_set_avail_ring_address(GuestAddress(available)).map_err(RingError::Shape)?;
        queue.try_set_used_ring_address(GuestAddress(used)).map_err(RingError::Shape)?;
        queue.set_event_idx(event_index);
        queue.set_ready(true);
        let size = usize::from(ring.size);
        let part = |address, len| one_slice(table, address, len).ok_or(RingError::Addresses);
        let parts = [part(descriptors, 16 * size)?, part(available, 6 + 2 * size)?, part(used, 6 + 8 * size)?];
        if !queue.is_valid(table.guest_memory()) {
            return Err(RingError::Addresses);
        }
        let mut running = RunningRing {
            queue,
            table: Arc::clone(table),
            descriptors: parts[0],
            parts,
            inflight: region.and_then(|region| region.queue(index, ring.size)),
            heads: vec![0; size.div_ceil(64)].into(),
            again: vec![0; size.div_ceil(64)].into(),
            resubmit: VecDeque::new(),
            is_ending: false,
            quiet: false,
            tell_guest: false,
            has_answered: false,
            tell_anyway: false,
        };
        running.take_position(ring.base, whose)?;
        Ok(running)
    }

    /// Finds out where the ring stands: from the base the VMM named, or, when the in-flight region was in use before, from the
    /// used ring and the number of requests in flight. After a disconnection the VMM's base is the used index as it was at that
    /// moment, and requests may have been answered since: they must not be done again.
    ///
    /// A ring of an earlier process that has no place in a region stands where the used ring does if every request was answered. If not, no
    /// place is the right one: what is begun too early is done twice, what is begun too late never.
    fn take_position(&mut self, base: u16, whose: Whose) -> Result<(), RingError> {
        let memory = self.table.guest_memory();
        let used_index = self.queue.used_idx(memory, std::sync::atomic::Ordering::Acquire).map_err(RingError::Used)?.0;
        self.queue.set_next_used(used_index);
        self.queue.set_next_avail(base);
        if let Some(inflight) = &mut self.inflight {
            let was_in_use = inflight.is_in_use();
            let heads = inflight.recover(used_index);
            if was_in_use {
                self.queue.set_next_avail(used_index.wrapping_add(heads.len() as u16));
                self.resubmit = heads.into();
                // Who had it before may have died between an answer and its interrupt.
                self.tell_anyway();
            }
        } else if whose == Whose::AnEarlierOnes {
            let available =
                self.queue.avail_idx(memory, std::sync::atomic::Ordering::Acquire).map_err(RingError::Available)?.0;
            if available != used_index {
                return Err(RingError::Placeless(available.wrapping_sub(used_index)));
            }
            self.queue.set_next_avail(used_index);
        }
        Ok(())
    }

    /// Goes on with the ring in another memory table (the VMM plugged memory in or out).
    pub(crate) fn move_to(&mut self, addresses: RingAddresses, table: &Arc<MemoryTable>) -> Result<(), RingError> {
        let size = usize::from(self.queue.size());
        let part = |address, len, known| {
            let guest = table.user_to_guest(address).filter(|guest| *guest == known).ok_or(RingError::Addresses)?;
            one_slice(table, guest, len).ok_or(RingError::Addresses)
        };
        self.parts = [
            part(addresses.descriptors, 16 * size, self.queue.desc_table())?,
            part(addresses.available, 6 + 2 * size, self.queue.avail_ring())?,
            part(addresses.used, 6 + 8 * size, self.queue.used_ring())?,
        ];
        self.descriptors = self.parts[0];
        self.table = Arc::clone(table);
        Ok(())
    }

    /// The guest is told at another descriptor from now on: what was answered may have been told at one where nobody listens. (Where nothing was,
    /// it is not: a guest may have its interrupts masked and unmasked each time.)
    pub(crate) fn is_told_elsewhere(&mut self) {
        self.tell_anyway |= std::mem::take(&mut self.has_answered);
    }

    /// Has the guest told at the next occasion, whether it asked for it or not: of what somebody else may have answered. That is told again
    /// where it is told elsewhere.
    pub(crate) fn tell_anyway(&mut self) {
        self.tell_anyway = true;
        self.has_answered = true;
    }

    /// The guest pages of the ring.
    pub(crate) fn pages(&self) -> impl Iterator<Item = PageId> {
        self.parts.iter().flat_map(|part| part.pages()).map(PageId)
    }

    /// Asks for the pages that are written here, in case they were retained before the guest made a ring of them.
    pub(crate) fn prepare_writes(&self) -> Result<(), guest_memory::Error> {
        self.parts.iter().try_for_each(|part| self.table.prepare_write(part))
    }

    /// Marks what of the ring is written here: the used ring. False when the log has no bit for it.
    pub(crate) fn mark_used(&self, log: &DirtyLog, used_log: Option<u64>) -> bool {
        let used = &self.parts[2];
        self.table.mark_written(used, log) & used_log.is_none_or(|at| log.mark(at, used.len() as u64))
    }

    /// Where the driver's next available entry is: the answer to GET_VRING_BASE.
    pub(crate) fn next_available(&self) -> u16 {
        self.queue.next_avail()
    }

    /// Whether the in-flight region says what is in flight, so that another process can go on with it.
    pub(crate) fn has_place(&self) -> bool {
        self.inflight.is_some()
    }

    /// How many requests wait to be done again.
    pub(crate) fn resubmissions(&self) -> usize {
        self.resubmit.len()
    }

    /// Takes nothing but what an earlier process had taken, from here on.
    pub(crate) fn take_nothing_new(&mut self) {
        self.is_ending = true;
    }

    fn mark_head(&mut self, head: u16) -> Result<(), RingError> {
        if head >= self.queue.size() {
            return Err(RingError::Head(head));
        }
        let word = &mut self.heads[usize::from(head) / 64];
        let bit = 1 << (head % 64);
        if *word & bit != 0 {
            return Err(RingError::Head(head));
        }
        *word |= bit;
        Ok(())
    }

    /// Takes the next chain: its head.
    pub(crate) fn pop(&mut self) -> Result<Option<(u16, bool)>, RingError> {
        if let Some(head) = self.resubmit.pop_front() {
            self.mark_head(head)?;
            self.again[usize::from(head) / 64] |= 1 << (head % 64);
            return Ok(Some((head, true)));
        }
        if self.is_ending {
            return Ok(None);
        }
        let memory = self.table.guest_memory();
        let head = match self.queue.iter(memory).map_err(RingError::Available)?.next() {
            Some(chain) => chain.head_index(),
            None => return Ok(None),
        };
        self.mark_head(head)?;
        if let Some(inflight) = &mut self.inflight {
            inflight.taken(head);
        }
        Ok(Some((head, false)))
    }

    /// Whether a head that is in flight was in flight before, too.
    pub(crate) fn is_again(&self, head: u16) -> bool {
        self.again[usize::from(head) / 64] & (1 << (head % 64)) != 0
    }

    /// Puts a chain into the used ring.
    pub(crate) fn push_used(&mut self, head: u16, written: u32) -> Result<(), RingError> {
        if let Some(inflight) = &mut self.inflight {
            inflight.completing(head);
        }
        self.queue.add_used(self.table.guest_memory(), head, written).map_err(RingError::Used)?;
        let (word, bit) = (usize::from(head) / 64, 1 << (head % 64));
        self.heads[word] &= !bit;
        self.again[word] &= !bit;
        if let Some(inflight) = &mut self.inflight {
            inflight.completed(head, self.queue.next_used());
        }
        self.tell_guest = true;
        self.has_answered = true;
        Ok(())
    }

    /// Whether the guest wants an interrupt for what was put into the used ring since this was last asked.
    pub(crate) fn wants_interrupt(&mut self) -> Result<bool, RingError> {
        if !std::mem::take(&mut self.tell_guest) && !self.tell_anyway {
            return Ok(false);
        }
        let anyway = std::mem::take(&mut self.tell_anyway);
        Ok(self.queue.needs_notification(self.table.guest_memory()).map_err(RingError::Used)? || anyway)
    }

    /// Asks the guest not to kick.
    pub(crate) fn hush(&mut self) -> Result<(), RingError> {
        if !self.quiet {
            self.queue.disable_notification(self.table.guest_memory()).map_err(RingError::Used)?;
            self.quiet = true;
        }
        Ok(())
    }

    /// Asks the guest to kick again. Returns whether there is something to take already.
    pub(crate) fn listen(&mut self) -> Result<bool, RingError> {
        self.quiet = false;
        let more = self.queue.enable_notification(self.table.guest_memory()).map_err(RingError::Used)?;
        Ok(more && !self.is_ending || !self.resubmit.is_empty())
    }

    /// Whether there is something to take, cheaply.
    pub(crate) fn has_more(&self) -> bool {
        let memory = self.table.guest_memory();
        !self.resubmit.is_empty()
            || !self.is_ending
                && self
                    .queue
                    .avail_idx(memory, std::sync::atomic::Ordering::Acquire)
                    .is_ok_and(|index| index.0 != self.queue.next_avail())
    }
}
