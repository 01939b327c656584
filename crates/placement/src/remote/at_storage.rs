//! The thread that waits for storage while a log is shipped.
//!
//! A flush may take longer than a server keeps a log for a client that says nothing, and the lock of the superblock may be with a guest's
//! write that waits as long. So the thread that ships asks this one, and gives signs and listens meanwhile. One thing is done at a time, and
//! whoever asked waits for its end.
//!
//! Failure story: a panic in it is one of who asked. It ends when nobody can ask it any more, after what it has begun. Nobody joins it: whoever lets
//! go of it has waited for all that it asked for, so that nothing is under way; and who panics meanwhile must not wait for storage that hangs.

use super::Shared;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::thread::{Builder, JoinHandle};
use tokio::sync::oneshot;

type Work = Box<dyn FnOnce(&Shared) + Send>;

/// Does what has to wait for storage.
pub(super) struct AtStorage {
    works: Sender<Work>,
    /// Nothing once it was found dead.
    thread: Option<JoinHandle<()>>,
}

impl AtStorage {
    /// # Errors
    /// When there can be no thread.
    pub fn begin(shared: &Arc<Shared>) -> io::Result<Self> {
        let (works, asked) = channel::<Work>();
        let shared = Arc::clone(shared);
        let thread = Builder::new().name("remote".to_owned());
        let thread = log_context::spawn(thread, move || asked.into_iter().for_each(|work| work(&shared)))?;
        Ok(AtStorage { works, thread: Some(thread) })
    }

    /// Has something done. What is said of it when it has ended is for [`AtStorage::outcome`].
    pub fn ask<T: Send + 'static>(&mut self, work: impl FnOnce(&Shared) -> T + Send + 'static) -> oneshot::Receiver<T> {
        let (says, said) = oneshot::channel();
        // Where that thread is dead, what is said is an error.
        let _ = self.works.send(Box::new(move |shared| drop(says.send(work(shared)))));
        said
    }

    /// What came of it.
    pub fn outcome<T>(&mut self, said: Result<T, oneshot::error::RecvError>) -> T {
        said.unwrap_or_else(|_| match self.thread.take().map(JoinHandle::join) {
            Some(Err(panic)) => std::panic::resume_unwind(panic),
            _ => unreachable!("a thread that does what it is asked says what came of it"),
        })
    }
}
