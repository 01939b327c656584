//! How other threads have the worker do something: jobs that it runs between passes.

use super::Worker;
use crate::error::Error;
use block_route::Route;
use rustix::event::EventfdFlags;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel, sync_channel};

/// Something for the worker to do.
pub(crate) type Job<R> = Box<dyn FnOnce(&mut Worker<R>) + Send>;

/// The sending side.
pub(crate) struct Mailbox<R: Route + ?Sized> {
    sender: Sender<Job<R>>,
    signal: Arc<OwnedFd>,
}

impl<R: Route + ?Sized> Clone for Mailbox<R> {
    fn clone(&self) -> Self {
        Mailbox { sender: self.sender.clone(), signal: Arc::clone(&self.signal) }
    }
}

/// The worker's side.
pub(crate) struct MailboxReceiver<R: Route + ?Sized> {
    receiver: Receiver<Job<R>>,
    signal: Arc<OwnedFd>,
    peeked: Option<Job<R>>,
}

/// Both sides.
///
/// # Errors
/// When there is no descriptor left.
pub(crate) fn mailbox<R: Route + ?Sized>() -> Result<(Mailbox<R>, MailboxReceiver<R>), Error> {
    let signal = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
        .map_err(|e| Error::system("making an event descriptor", e))?;
    let signal = Arc::new(signal);
    let (sender, receiver) = channel();
    Ok((Mailbox { sender, signal: Arc::clone(&signal) }, MailboxReceiver { receiver, signal, peeked: None }))
}

impl<R: Route + ?Sized> Mailbox<R> {
    /// Leaves a job. Returns whether there is still somebody to do it.
    pub(crate) fn post(&self, job: Job<R>) -> bool {
        if self.sender.send(job).is_err() {
            return false;
        }
        // Full (2^64 signals) means that the worker is told already.
        let _ = rustix::io::write(&*self.signal, &1u64.to_ne_bytes());
        true
    }

    /// Has a job done and waits for what it returns; none when the worker is gone.
    pub(crate) fn ask<T: Send + 'static>(&self, job: impl FnOnce(&mut Worker<R>) -> T + Send + 'static) -> Option<T> {
        let (reply, answer) = sync_channel(1);
        self.post(Box::new(move |worker| {
            // Nobody waits any more if this fails.
            let _ = reply.send(job(worker));
        }));
        answer.recv().ok()
    }
}

impl<R: Route + ?Sized> MailboxReceiver<R> {
    pub(super) fn descriptor(&self) -> RawFd {
        self.signal.as_raw_fd()
    }

    pub(super) fn clear_signal(&self) {
        let mut buffer = [0u8; 8];
        let _ = rustix::io::read(&*self.signal, &mut buffer);
    }

    pub(super) fn next(&mut self) -> Option<Job<R>> {
        self.peeked.take().or_else(|| self.receiver.try_recv().ok())
    }

    pub(super) fn is_empty(&mut self) -> bool {
        if self.peeked.is_none() {
            self.peeked = self.receiver.try_recv().ok();
        }
        self.peeked.is_none()
    }
}
