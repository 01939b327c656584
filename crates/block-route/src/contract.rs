//! The contract between a device and the place its writes go: requests in, a plan out.
//!
//! Life of a request: the device pops it from a ring, gives it a [`RequestId`] and calls [`Route::route`]. Everything
//! the request waits for is a *hold* on it: each [`DiskOperation`] that names it is one, [`Plan::hold`] is one more. It
//! completes when its last hold is gone, with the first error if there was one. A request that has no hold when its
//! pass has ended completes at once.
//!
//! The device calls `route` for every request of one pass (all it found in its rings), then [`Route::end_of_pass`], and
//! only then carries out the plan, so that a route can treat the pass as one batch: protect first, then read, then
//! complete.
//!
//! Operations of a plan run concurrently and in any order; what must be ordered is sequenced by the route, which hears
//! of each completion that carries a [`Ticket`].

use guest_memory::{MemorySlice, MemoryTable};
use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;

/// Index of a log within its VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LogIndex(pub usize);

/// Names a request from the moment it is routed until it completes. Unique within a device while in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub u32);

/// A route's own mark on an operation, given back when the operation is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ticket(pub u64);

/// What the guest asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestKind {
    /// Read into the segments.
    Read,
    /// Write the segments.
    Write,
    /// Make what was written before durable.
    Flush,
    /// The range's content does not matter any more.
    Discard,
    /// The range reads as zeros afterwards.
    WriteZeroes {
        /// The range may be given back to the storage.
        unmap: bool,
    },
}

/// One request of the guest, checked by the device: inside the disk, segments inside guest memory and adding up to `len`.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// Its name until it completes.
    pub id: RequestId,
    /// What is asked.
    pub kind: RequestKind,
    /// Where it begins on the disk, in bytes (a multiple of 512).
    pub offset: u64,
    /// How long the range is, in bytes (a multiple of 512); 0 for a flush.
    pub len: u64,
    /// The guest memory to read from or write into; empty for what carries no data.
    pub segments: &'a [MemorySlice],
}

/// Memory an operation reads from or writes into.
#[derive(Clone, Debug)]
pub enum Buffer {
    /// Guest memory, or other memory that stays valid until the operation is done.
    Slice(MemorySlice),
    /// The daemon's own bytes (writes only).
    Bytes(Arc<[u8]>),
}

impl Buffer {
    /// Length in bytes.
    pub fn len(&self) -> usize {
        match self {
            Buffer::Slice(slice) => slice.len(),
            Buffer::Bytes(bytes) => bytes.len(),
        }
    }

    /// Whether it holds no byte.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// What the disk engine is to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Read from the disk into the buffers.
    Read,
    /// Write the buffers to the disk.
    Write,
    /// Make everything whose completion was reported before durable on storage.
    Flush,
    /// Let go of the range.
    Discard,
    /// Zero the range.
    WriteZeroes {
        /// The range may be given back to the storage.
        unmap: bool,
    },
}

/// One operation for the disk engine.
#[derive(Clone, Debug)]
pub struct DiskOperation {
    /// The request that waits for it, if one does.
    pub request: Option<RequestId>,
    /// Given back through [`Route::disk_done`], if there is one.
    pub ticket: Option<Ticket>,
    /// What to do.
    pub operation: Operation,
    /// Where on the disk, in bytes.
    pub offset: u64,
    /// How many bytes: the sum of the buffers where there are any.
    pub len: u64,
    /// The memory; empty for what carries no data.
    pub buffers: Vec<Buffer>,
}

/// How a request ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// Done.
    Ok,
    /// Failed: the guest sees an I/O error (`VIRTIO_BLK_S_IOERR`).
    IoError,
    /// Not offered (`VIRTIO_BLK_S_UNSUPP`).
    Unsupported,
}

/// One line of a plan.
#[derive(Clone, Debug)]
pub enum PlanAction {
    /// For the disk engine.
    Disk(DiskOperation),
    /// One more thing the request waits for.
    Hold(RequestId),
    /// One thing less; a status other than [`Status::Ok`] becomes the request's, if it is the first such.
    Release(RequestId, Status),
}

/// What a route wants done, in the order in which it said so.
#[derive(Debug, Default)]
pub struct Plan {
    /// The device takes these out and carries them out.
    pub actions: Vec<PlanAction>,
    /// Requests with which a guest commits: how long they take is told apart.
    pub commits: Vec<RequestId>,
}

impl Plan {
    /// Has the disk engine do something.
    pub fn disk(&mut self, operation: DiskOperation) {
        self.actions.push(PlanAction::Disk(operation));
    }

    /// Keeps a request from completing until it is released.
    pub fn hold(&mut self, request: RequestId) {
        self.actions.push(PlanAction::Hold(request));
    }

    /// Takes one hold off a request.
    pub fn release(&mut self, request: RequestId, status: Status) {
        self.actions.push(PlanAction::Release(request, status));
    }

    /// The request has a commit block of a journal.
    pub fn note_commit(&mut self, request: RequestId) {
        self.commits.push(request);
    }

    /// Fails a request that has no hold yet.
    pub fn fail(&mut self, request: RequestId) {
        self.hold(request);
        self.release(request, Status::IoError);
    }
}

/// Why a device starts to take requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// The driver starts for the first time, or again after a reset of the device or the machine: whoever used the disk
    /// before is gone (QEMU asks for a new in-flight region then).
    Fresh,
    /// The same driver goes on after a pause or a reconnection.
    Resumed,
}

/// What the guest is told of the disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Serial number, at most 20 bytes.
    pub serial: String,
    /// Whether writes are refused.
    pub read_only: bool,
}

/// The place where a device's requests go. One device, one thread: no call overlaps another.
pub trait Route: Send {
    /// What of other devices of the same guest has to end before a start that is about to come (a plural that begins a sentence); nothing:
    /// [`Route::started`] may be called at once. Asked again soon while there is something. It is not waited for in there: one thread may
    /// serve them and this one, and would never bring it to its end.
    fn waits_for_others(&self, _start: Start) -> Option<String> {
        None
    }

    /// The device is about to take its first request since it was started or stopped. May take its time (recovery).
    ///
    /// # Errors
    /// The device then fails every request until the next start.
    fn started(&mut self, start: Start, memory: &Arc<MemoryTable>) -> io::Result<()>;

    /// Decides where a request goes. Must put no work that needs the guest in the way.
    fn route(&mut self, request: &Request<'_>, plan: &mut Plan);

    /// The same for a request that was taken before and was not answered, by another process or before the device was stopped: much may
    /// have come after it that is known by now.
    fn route_again(&mut self, request: &Request<'_>, plan: &mut Plan) {
        self.route(request, plan);
    }

    /// A flush that the guest did not ask for: it was told of no write cache, and a write of its has ended that has to be
    /// durable before it is answered.
    fn flush_after(&mut self, request: &Request<'_>, plan: &mut Plan) {
        self.route(request, plan);
    }

    /// Every request of this pass has been routed; the plan is carried out after this returns.
    fn end_of_pass(&mut self, plan: &mut Plan);

    /// An operation that carries a ticket is done. Further work goes into the plan.
    fn disk_done(&mut self, ticket: Ticket, result: io::Result<()>, plan: &mut Plan);

    /// A descriptor (an eventfd) that becomes readable when the route has work outside a pass; the device reads it empty
    /// and calls [`Route::woken`].
    fn wake_descriptor(&self) -> Option<RawFd> {
        None
    }

    /// The wake descriptor became readable.
    fn woken(&mut self, _plan: &mut Plan) {}

    /// Hands the held log with this number over to its own place on storage (`placement::Journals::change_placement`). Between
    /// two passes. False when it has to wait.
    ///
    /// # Errors
    /// When storage fails, or the log cannot be handed over: it is held as before.
    fn hand_over(&mut self, _log: LogIndex, _plan: &mut Plan) -> io::Result<bool> {
        Err(io::Error::other("this disk's journals cannot be handed over"))
    }

    /// Who asked for a hand-over that had to wait does not ask any more.
    fn give_up_hand_over(&mut self, _log: LogIndex, _plan: &mut Plan) {}

    /// All requests have completed and no more will be taken until the next start.
    fn stopped(&mut self) {}
}
