//! The disk engine: operations in, completions out, on one io_uring that also watches the worker's descriptors.
//!
//! What a pass brings is handed to the kernel in small batches, the rest of it by [`Engine::enter`]. Flushes are grouped: one runs at a time, those
//! that arrive meanwhile share the next one and its result, so that an error of write-back reaches every flush it
//! belongs to. At most [`DEPTH_MAX`] operations are in the kernel; the others wait in order.

mod aligned;
mod direct;
mod logged;
mod modelled;
mod transfer;

use crate::counters::{self, Counters};
use crate::error::Error;
use crate::image::Image;
use aligned::AlignedBuffer;
use block_route::{DiskOperation, Operation, RequestId, Ticket};
use disk_model_client::Client;
use guest_memory::MemoryTable;
use image_moments::Changes;
use io_uring::{IoUring, cqueue, opcode, squeue, types};
use logged::writes;
use modelled::Modelled;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};
use transfer::{Progress, Transfer};
use write_log::WriteLog;

/// Operations in the kernel at once.
pub(crate) const DEPTH_MAX: usize = 256;
const RING_ENTRIES: u32 = 512;
/// Transfers handed to the kernel at once: those of a larger batch would wait for its last one.
const SUBMISSIONS_MAX: usize = 4;
/// Memory for transfers that are not aligned for direct I/O, at once, in bytes.
const BOUNCE_BYTES_MAX: usize = 16 << 20;

const TAG_SHIFT: u32 = 56;
const TAG_TRANSFER: u64 = 0;
const TAG_FLUSH: u64 = 1;
const TAG_WATCH: u64 = 2;
const TAG_IGNORE: u64 = 3;
/// The token of the disk model's descriptor, which the engine watches for itself.
const TOKEN_MODEL: u32 = u32::MAX - 2;

/// What came out of the engine.
#[derive(Debug)]
pub(crate) enum Event {
    /// An operation is done.
    Done { request: Option<RequestId>, ticket: Option<Ticket>, result: io::Result<()> },
    /// A watched descriptor became readable.
    Readable(u32),
    /// A descriptor is not watched any more: watch it again.
    WatchLost(u32),
}

/// See the module.
pub(crate) struct Engine {
    ring: IoUring,
    image: Arc<Image>,
    counters: Arc<Counters>,
    transfers: Vec<Option<Box<Transfer>>>,
    free: Vec<u32>,
    in_kernel: usize,
    bounced_bytes: usize,
    /// Transfers put into the submission queue since the kernel was last entered.
    queued: usize,
    waiting: VecDeque<DiskOperation>,
    flushes_waiting: Vec<DiskOperation>,
    flushes_running: Vec<DiskOperation>,
    flush_began: Instant,
    /// The flush that is under way, in the log of writes.
    flush_in_log: Option<write_log::Pending>,
    spare_vectors: Vec<Vec<libc::iovec>>,
    zeros: AlignedBuffer,
    table: Option<Arc<MemoryTable>>,
    /// Completions found outside of [`Engine::reap`].
    ready: VecDeque<Event>,
    /// The disk that this one is to be as slow as.
    modelled: Option<Modelled>,
}

impl Engine {
    /// An engine for `image`, used by the calling thread alone from now on. Where that sleeps for several engines at once, the kernel signals the
    /// event descriptor `signal` whenever something completes.
    ///
    /// # Errors
    /// When the kernel refuses an io_uring.
    pub(crate) fn new(
        image: Arc<Image>,
        counters: Arc<Counters>,
        model: Option<Arc<Client>>,
        under_way: Option<&OwnedFd>,
        signal: Option<BorrowedFd<'_>>,
    ) -> Result<Self, Error> {
        let ring = build_ring(signal.is_some()).map_err(|e| {
            Error::system(
                "making an io_uring failed (is it disabled by the sysctl kernel.io_uring_disabled or a container?)",
                e,
            )
        })?;
        let missing = missing_operations(&ring);
        if !missing.is_empty() {
            return Err(Error::system(
                format!("the kernel's io_uring cannot {} (Linux 5.19 or newer is needed)", missing.join(", ")),
                io::Error::from(io::ErrorKind::Unsupported),
            ));
        }
        // The kernel keeps what is registered until the last operation has ended, and longer: it takes a ring down when it finds time.
        // So locks stay until then, whoever dies. Operations go to a file that is not registered, where the end of that says enough.
        let pipe = under_way.filter(|_| !image.tells_its_end()).map(AsRawFd::as_raw_fd);
        ring.submitter()
            .register_files(&[Some(image.file().as_raw_fd()), pipe].into_iter().flatten().collect::<Vec<_>>())
            .map_err(|e| Error::system("registering the image with io_uring", e))?;
        if let Some(signal) = signal {
            ring.submitter()
                .register_eventfd(signal.as_raw_fd())
                .map_err(|e| Error::system("registering an event descriptor with io_uring", e))?;
        }
        let mut engine = Engine {
            ring,
            image,
            counters,
            transfers: Vec::new(),
            free: Vec::new(),
            in_kernel: 0,
            bounced_bytes: 0,
            queued: 0,
            waiting: VecDeque::new(),
            flushes_waiting: Vec::new(),
            flushes_running: Vec::new(),
            flush_began: Instant::now(),
            flush_in_log: None,
            spare_vectors: Vec::new(),
            zeros: AlignedBuffer::new(transfer::ZEROS_BYTES, 4096),
            table: None,
            ready: VecDeque::new(),
            modelled: model.map(Modelled::new),
        };
        if let Some(descriptor) = engine.modelled.as_ref().map(Modelled::descriptor) {
            engine.watch(descriptor, TOKEN_MODEL);
        }
        Ok(engine)
    }

    /// The guest memory that operations write to from now on.
    pub(crate) fn set_table(&mut self, table: Arc<MemoryTable>) {
        self.table = Some(table);
    }

    /// Operations whose end nobody was told: in the kernel, waiting, under way in the disk model, or done and not reaped yet.
    pub(crate) fn pending(&self) -> usize {
        let done = self.ready.iter().filter(|event| matches!(event, Event::Done { .. })).count();
        done + self.in_kernel
            + self.waiting.len()
            + self.flushes_waiting.len()
            + self.modelled.as_ref().map_or(0, Modelled::under_way)
    }

    /// Waits for no disk model any more: what it delays is done in truth.
    pub(crate) fn forget_model(&mut self) {
        if let Some(mut modelled) = self.modelled.take() {
            self.unwatch(TOKEN_MODEL);
            self.ready.extend(modelled.release_all());
        }
    }

    /// The disk model has something to tell.
    fn ask_model(&mut self) {
        if let Some(modelled) = &mut self.modelled
            && let Err(error) = modelled.take_completed(&mut self.ready)
        {
            log::error!(
                "the disk model of {} is gone ({error}); the disk goes on at its own speed",
                self.image.path().display()
            );
            self.forget_model();
        }
    }

    /// Operations that wait because the kernel has enough.
    pub(crate) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Takes an operation. It reaches the kernel with the next [`Engine::enter`], at the latest.
    pub(crate) fn submit(&mut self, operation: DiskOperation) {
        if let Some(error) = self.refusal(&operation) {
            self.finish(operation, Err(error));
        } else if operation.operation == Operation::Flush && self.modelled.is_some() {
            // The host's own disk has no say in how long a modelled one takes.
            self.finish(operation, Ok(()));
        } else if operation.operation == Operation::Flush {
            self.flushes_waiting.push(operation);
        } else if operation.operation == Operation::Discard
            && self.image.write_log().is_none()
            && self.image.changes().is_some_and(|changes| changes.is_copied())
        {
            // It is a hint, and what it gives up would have to be copied first.
            self.finish(operation, Ok(()));
        } else {
            if let Some(changes) = self.told_of(&operation) {
                changes.begins(operation.offset, operation.len);
            }
            self.waiting.push_back(self.as_logged(operation));
            self.pump();
        }
    }

    /// Who is to hear of an operation before and after it. Nobody of one that is refused.
    fn told_of(&self, operation: &DiskOperation) -> Option<&Changes> {
        let changes = self.image.changes().filter(|_| writes(operation))?;
        self.refusal(operation).is_none().then_some(changes)
    }

    /// Operations that a route must not ask for: they would touch what is not the disk.
    fn refusal(&self, operation: &DiskOperation) -> Option<io::Error> {
        let refuse = |reason: &str| Some(io::Error::new(io::ErrorKind::InvalidInput, reason.to_owned()));
        if operation.operation == Operation::Flush {
            return None;
        }
        let end = operation.offset.checked_add(operation.len);
        if operation.len == 0 || end.is_none_or(|end| end > self.image.size_bytes()) {
            return refuse("the range is empty or outside the disk");
        }
        let buffered: u64 = operation.buffers.iter().map(|buffer| buffer.len() as u64).sum();
        match operation.operation {
            Operation::Read if operation.buffers.iter().any(|b| matches!(b, block_route::Buffer::Bytes(_))) => {
                refuse("bytes of the daemon's own are not read into")
            }
            Operation::Read | Operation::Write if buffered != operation.len => {
                refuse("the buffers are not as long as the range")
            }
            Operation::Write | Operation::Discard | Operation::WriteZeroes { .. } if self.image.read_only() => {
                refuse("the disk is read-only")
            }
            _ => None,
        }
    }

    /// Moves waiting operations into the submission queue as far as there is room.
    fn pump(&mut self) {
        while let Some(front) = self.waiting.front() {
            if self.is_behind_in_log(front) {
                return;
            }
            if let Some(alignment) = self.image.direct()
                && !transfer::place_is_aligned(front, alignment)
                && matches!(front.operation, Operation::Read | Operation::Write | Operation::WriteZeroes { .. })
            {
                // Part of a block: read, change, write, with nothing else on the way.
                if self.in_kernel > 0 {
                    return;
                }
                let operation = self.waiting.pop_front().expect("there is a front");
                let result = direct::whole_blocks(&self.image, alignment, &operation, self.table.as_deref());
                self.finish(operation, result);
                continue;
            }
            let bounce = Transfer::bounce_bytes(front, self.image.direct());
            let bounce_full = bounce > 0 && self.bounced_bytes > 0 && self.bounced_bytes + bounce > BOUNCE_BYTES_MAX;
            if self.in_kernel >= DEPTH_MAX || bounce_full {
                return;
            }
            let operation = self.waiting.pop_front().expect("there is a front");
            if bounce > 0 {
                counters::add(&self.counters.bounced_transfers, 1);
            }
            let vectors = self.spare_vectors.pop().unwrap_or_default();
            let transfer = Box::new(Transfer::new(operation, self.image.direct(), vectors));
            self.bounced_bytes += transfer.bounce_len();
            self.in_kernel += 1;
            let index = match self.free.pop() {
                Some(index) => index,
                None => {
                    self.transfers.push(None);
                    (self.transfers.len() - 1) as u32
                }
            };
            self.transfers[index as usize] = Some(transfer);
            self.push_transfer(index);
            self.queued += 1;
            if self.queued >= SUBMISSIONS_MAX {
                self.enter_kernel(false, None);
            }
        }
    }

    fn place_alignment(&self) -> usize {
        self.image.direct().map_or(1, |direct| direct.offset_bytes)
    }

    fn file(&self) -> types::Fd {
        types::Fd(self.image.worked().as_raw_fd())
    }

    fn push_transfer(&mut self, index: u32) {
        let file = self.file();
        let alignment = self.place_alignment();
        let (others, waits) = (self.in_kernel > 1, self.image.waits());
        let transfer = self.transfers[index as usize].as_mut().expect("the transfer is under way");
        match transfer.next_entry(file, self.table.as_deref(), &self.zeros, alignment, others, waits) {
            // SAFETY: the transfer (boxed) and the memory it names stay until its completion has been reaped.
            Ok(entry) => unsafe { self.push(entry.user_data(TAG_TRANSFER << TAG_SHIFT | u64::from(index))) },
            Err(error) => self.transfer_ended(index, Err(io::Error::other(error))),
        }
    }

    /// SAFETY: what the entry points to must stay valid until its completion.
    unsafe fn push(&mut self, entry: squeue::Entry) {
        loop {
            // SAFETY: promise of the caller.
            if unsafe { self.ring.submission().push(&entry) }.is_ok() {
                return;
            }
            // Full: the kernel takes what there is, which makes room.
            if let Err(error) = self.ring.submit()
                && !matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY))
            {
                log::error!("handing requests to the kernel failed: {error}");
            }
            self.collect();
        }
    }

    /// Watches a descriptor; [`Event::Readable`] comes once for every time it is signalled.
    pub(crate) fn watch(&mut self, descriptor: RawFd, token: u32) {
        let entry = opcode::PollAdd::new(types::Fd(descriptor), libc::POLLIN as u32)
            .multi(true)
            .build()
            .user_data(TAG_WATCH << TAG_SHIFT | u64::from(token));
        // SAFETY: the entry points to nothing.
        unsafe { self.push(entry) };
    }

    /// Ends a watch.
    pub(crate) fn unwatch(&mut self, token: u32) {
        let entry = opcode::PollRemove::new(TAG_WATCH << TAG_SHIFT | u64::from(token))
            .build()
            .user_data(TAG_IGNORE << TAG_SHIFT);
        // SAFETY: the entry points to nothing.
        unsafe { self.push(entry) };
    }

    fn start_flush(&mut self) {
        if self.flushes_running.is_empty() && !self.flushes_waiting.is_empty() {
            std::mem::swap(&mut self.flushes_running, &mut self.flushes_waiting);
            self.in_kernel += 1;
            self.flush_began = Instant::now();
            counters::add(&self.counters.storage_flushes, 1);
            self.image.flush_begins();
            self.flush_in_log = self.image.write_log().map(WriteLog::flush_begins);
            // Of the open file that outlives its workers: it remembers an error of write-back that nobody was told of, and one that
            // is opened after somebody else has seen that error would not.
            let entry = opcode::Fsync::new(types::Fd(self.image.file().as_raw_fd()))
                .flags(types::FsyncFlags::DATASYNC)
                .build()
                .user_data(TAG_FLUSH << TAG_SHIFT);
            // SAFETY: the entry points to nothing.
            unsafe { self.push(entry) };
        }
    }

    /// Hands everything to the kernel; with `wait`, sleeps until something completes or the time is over.
    pub(crate) fn enter(&mut self, wait: bool, timeout: Option<Duration>) {
        self.pump();
        self.start_flush();
        self.enter_kernel(wait && self.ready.is_empty(), timeout);
    }

    fn enter_kernel(&mut self, wait: bool, timeout: Option<Duration>) {
        self.queued = 0;
        let result = match (wait, timeout) {
            (true, Some(timeout)) => {
                let time = types::Timespec::from(timeout);
                let arguments = types::SubmitArgs::new().timespec(&time);
                self.ring.submitter().submit_with_args(1, &arguments)
            }
            (true, None) => self.ring.submitter().submit_and_wait(1),
            (false, _) if self.ring.submission().is_empty() && !self.has_work() => return,
            (false, _) => self.ring.submitter().submit(),
        };
        if let Err(error) = result
            && !matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY | libc::ETIME))
        {
            log::error!("handing requests to the kernel failed: {error}");
        }
    }

    /// Whether the kernel has completions that it only hands out when entered.
    fn has_work(&mut self) -> bool {
        let submission = self.ring.submission();
        submission.taskrun() || submission.cq_overflow()
    }

    /// Whether something has completed, seen without entering the kernel.
    pub(crate) fn has_completions(&mut self) -> bool {
        !self.ready.is_empty() || self.has_work() || !self.ring.completion().is_empty()
    }

    /// Takes the next completion.
    pub(crate) fn reap(&mut self) -> Option<Event> {
        if self.ready.is_empty() {
            self.collect();
        }
        self.ready.pop_front()
    }

    fn collect(&mut self) {
        loop {
            let Some(entry) = self.ring.completion().next() else { break };
            self.completed(&entry);
        }
    }

    fn completed(&mut self, entry: &cqueue::Entry) {
        let (tag, value) = (entry.user_data() >> TAG_SHIFT, entry.user_data() & ((1 << TAG_SHIFT) - 1));
        match tag {
            TAG_TRANSFER => self.transfer_completed(value as u32, entry.result()),
            TAG_FLUSH => {
                self.in_kernel -= 1;
                let error = -entry.result();
                let is_begun = !matches!(error, libc::EINTR | libc::EAGAIN);
                let error = if is_begun { self.image.flush_ended(error) } else { error };
                if let (Some(log), Some(flush)) = (self.image.write_log(), self.flush_in_log.take()) {
                    match error {
                        libc::EINTR | libc::EAGAIN => log.flush_ended(&flush, false),
                        ..=0 => log.flush_ended(&flush, true),
                        _ => log.flush_failed(&flush),
                    }
                }
                if matches!(error, libc::EINTR | libc::EAGAIN) {
                    // Not begun: those flushes go first the next time.
                    let mut again = std::mem::take(&mut self.flushes_running);
                    again.append(&mut self.flushes_waiting);
                    self.flushes_waiting = again;
                    return;
                }
                self.counters.latencies.storage_flush.record(self.flush_began.elapsed());
                for operation in std::mem::take(&mut self.flushes_running) {
                    let result = if error > 0 { Err(io::Error::from_raw_os_error(error)) } else { Ok(()) };
                    self.finish(operation, result);
                }
            }
            TAG_WATCH if value as u32 == TOKEN_MODEL => {
                self.ask_model();
                if !cqueue::more(entry.flags())
                    && let Some(descriptor) = self.modelled.as_ref().map(Modelled::descriptor)
                {
                    self.watch(descriptor, TOKEN_MODEL);
                }
            }
            TAG_WATCH => {
                if entry.result() >= 0 {
                    self.ready.push_back(Event::Readable(value as u32));
                }
                if !cqueue::more(entry.flags()) && entry.result() != -libc::ECANCELED {
                    self.ready.push_back(Event::WatchLost(value as u32));
                }
            }
            _ => {}
        }
    }

    fn transfer_completed(&mut self, index: u32, result: i32) {
        let alignment = self.place_alignment() as u64;
        let Some(transfer) = self.transfers.get_mut(index as usize).and_then(Option::as_mut) else {
            log::error!("the kernel completed transfer {index} which is not under way");
            return;
        };
        match transfer.advance(result, self.table.as_deref(), alignment) {
            Progress::Again => self.push_transfer(index),
            Progress::Done(result) => self.transfer_ended(index, result),
        }
    }

    fn transfer_ended(&mut self, index: u32, result: io::Result<()>) {
        let transfer = self.transfers[index as usize].take().expect("the transfer is under way");
        self.free.push(index);
        self.in_kernel -= 1;
        self.bounced_bytes -= transfer.bounce_len();
        let time = transfer.began.elapsed();
        let is_without_effect = transfer.is_without_effect;
        let (operation, vectors) = transfer.into_parts();
        if self.spare_vectors.len() < DEPTH_MAX {
            self.spare_vectors.push(vectors);
        }
        match operation.operation {
            Operation::Read => self.counters.latencies.storage_read.record(time),
            Operation::Write => self.counters.latencies.storage_write.record(time),
            _ => {}
        }
        if !is_without_effect {
            self.note_in_log(&operation, &result);
        }
        self.operation_ended(operation, result);
    }

    /// An operation ends that the kernel never had, or that was done without a transfer.
    fn finish(&mut self, operation: DiskOperation, result: io::Result<()>) {
        self.note_in_log(&operation, &result);
        self.operation_ended(operation, result);
    }

    fn operation_ended(&mut self, operation: DiskOperation, result: io::Result<()>) {
        if let Some(changes) = self.told_of(&operation) {
            changes.ended(operation.offset, operation.len);
        }
        match (&result, operation.operation) {
            (Ok(()), Operation::Read) => counters::add(&self.counters.storage_read_bytes, operation.len),
            (Ok(()), Operation::Write) => counters::add(&self.counters.storage_write_bytes, operation.len),
            (Ok(()), _) => {}
            (Err(error), kind) => log::debug!(
                "{kind:?} of {} bytes at byte {} of {}: {error}",
                operation.len,
                operation.offset,
                self.image.path().display()
            ),
        }
        if result.is_ok()
            && let Some(modelled) = &mut self.modelled
        {
            match modelled.delay(operation) {
                Ok(()) => {}
                Err((operation, error)) => {
                    log::error!(
                        "the disk model of {} does not take requests ({error}); the disk goes on at its own speed",
                        self.image.path().display()
                    );
                    self.forget_model();
                    let DiskOperation { request, ticket, .. } = operation;
                    self.ready.push_back(Event::Done { request, ticket, result });
                }
            }
            return;
        }
        let DiskOperation { request, ticket, .. } = operation;
        self.ready.push_back(Event::Done { request, ticket, result });
    }

    /// For an engine whose operations never end (storage hangs): leaks what the kernel may still write to.
    pub(crate) fn abandon(self) {
        log::error!(
            "{} operations on {} never ended; their memory is not freed",
            self.in_kernel,
            self.image.path().display()
        );
        std::mem::forget(self);
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // Closing an io_uring lets its files go some time later; the next user of a block device would find it busy.
        if let Err(error) = self.ring.submitter().unregister_files() {
            log::debug!("unregistering an image failed: {error}");
        }
    }
}

/// What an engine asks a kernel for, with the kernel's names.
const OPERATIONS: [(&str, u8); 8] = [
    ("READ", opcode::Read::CODE),
    ("WRITE", opcode::Write::CODE),
    ("READV", opcode::Readv::CODE),
    ("WRITEV", opcode::Writev::CODE),
    ("FSYNC", opcode::Fsync::CODE),
    ("FALLOCATE", opcode::Fallocate::CODE),
    ("POLL_ADD", opcode::PollAdd::CODE),
    ("POLL_REMOVE", opcode::PollRemove::CODE),
];

/// What of that the kernel says it has not: better known before a guest asks for it. A kernel that cannot be asked is older than any that is
/// supported, or forbids that alone: it is found out later.
fn missing_operations(ring: &IoUring) -> Vec<&'static str> {
    let mut probe = io_uring::Probe::new();
    if let Err(error) = ring.submitter().register_probe(&mut probe) {
        log::debug!("what io_uring can do here is not known: {error}");
        return Vec::new();
    }
    OPERATIONS.iter().filter(|(_, code)| !probe.is_supported(*code)).map(|(name, _)| *name).collect()
}

/// With `is_signalled` completions are handed out by themselves whenever the thread enters or leaves the kernel, and not only where this ring is
/// waited for. Otherwise the signal of a completion that an event descriptor has brought about (a kick is one) comes with a delay, or not at all.
fn build_ring(is_signalled: bool) -> io::Result<IoUring> {
    // From best (Linux 6.1) to what the oldest supported kernel has (5.19).
    let best = || {
        let mut builder = IoUring::builder();
        builder.setup_clamp().setup_cqsize(4 * RING_ENTRIES).dontfork();
        builder
    };
    if !is_signalled {
        let deferred = best().setup_single_issuer().setup_defer_taskrun().setup_taskrun_flag().build(RING_ENTRIES);
        match deferred {
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {}
            other => return other,
        }
    }
    match best().setup_coop_taskrun().setup_taskrun_flag().build(RING_ENTRIES) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => best().build(RING_ENTRIES),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::image::ImageOptions;
    use block_route::Buffer;

    /// Whoever ends, or starts anew, when nothing is pending must have heard of every end: a route that was not told waits for it.
    #[test]
    fn what_is_done_is_pending_until_somebody_has_heard_of_it() {
        const COUNT: usize = 20;
        let file = tempfile::NamedTempFile::new().expect("a file");
        file.as_file().set_len(1 << 20).expect("a length");
        let image = Arc::new(Image::open(file.path(), ImageOptions::default()).expect("an image"));
        let mut engine = Engine::new(image, Arc::new(Counters::default()), None, None, None).expect("an io_uring");
        for index in 0..COUNT as u64 {
            let buffers = vec![Buffer::Bytes(Arc::from(vec![7; 4096]))];
            engine.submit(DiskOperation {
                request: None,
                ticket: None,
                operation: Operation::Write,
                offset: index * 4096,
                len: 4096,
                buffers,
            });
        }
        while engine.in_kernel + engine.waiting.len() > 0 {
            engine.enter(false, None);
            engine.collect();
        }
        for left in (0..COUNT).rev() {
            assert_eq!(engine.pending(), left + 1);
            assert!(matches!(engine.reap(), Some(Event::Done { result: Ok(()), .. })));
        }
        assert_eq!(engine.pending(), 0);
    }

    /// What is under way has the open file that says so when it has ended, and not the one with the locks, which others have as well.
    #[test]
    fn operations_go_to_the_file_that_tells_their_end() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        file.as_file().set_len(1 << 20).expect("a length");
        let image = Arc::new(Image::open(file.path(), ImageOptions::default()).expect("an image"));
        assert!(image.tells_its_end(), "this file system has no locks of open files");
        let reader = std::fs::File::open(file.path()).expect("opened");
        // SAFETY: both descriptors are open. That of the image's locks cannot be written to from now on, which is what is tried.
        assert!(unsafe { libc::dup2(reader.as_raw_fd(), image.file().as_raw_fd()) } >= 0);
        let mut engine = Engine::new(image, Arc::new(Counters::default()), None, None, None).expect("an io_uring");
        let write =
            |operation, buffers, len| DiskOperation { request: None, ticket: None, operation, offset: 0, len, buffers };
        engine.submit(write(Operation::Write, vec![Buffer::Bytes(Arc::from(vec![7; 4096]))], 4096));
        engine.submit(write(Operation::WriteZeroes { unmap: false }, Vec::new(), 8192));
        for _ in 0..2 {
            while engine.pending() > 0 && engine.ready.is_empty() {
                engine.enter(true, None);
                engine.collect();
            }
            assert!(matches!(engine.reap(), Some(Event::Done { result: Ok(()), .. })));
        }
    }
}
