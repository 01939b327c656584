//! Sends what was written to a file on its way to storage, while more is written.
//!
//! Beginning the writeback of many scattered blocks costs the thread that asks for it as much as the disk takes for them,
//! so that others do it. It is a hint and never more: what was not sent, or failed, is sent or told by the next flush.

use rustix::fs::{Advice, fadvise};
use std::fs::File;
use std::num::NonZeroU64;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

/// One is held up by a disk of many scattered blocks; more than two had nothing to do.
const THREADS: usize = 2;
/// Stretches that wait. One that finds no room is left for the flush.
const STRETCHES_WAITING: usize = 256;

/// Threads that begin writeback. They start with the first stretch and end when this is dropped or waited for.
#[derive(Debug)]
pub(crate) struct Writeback {
    /// Not a descriptor of their own: closing one would give up the record lock of the whole process.
    file: Arc<File>,
    started: Option<(SyncSender<Stretch>, Vec<JoinHandle<()>>)>,
}

/// First byte, and bytes.
type Stretch = (u64, NonZeroU64);

impl Writeback {
    pub(crate) fn new(file: Arc<File>) -> Self {
        Writeback { file, started: None }
    }

    /// Lets `length` bytes from byte `offset` on begin their way.
    pub(crate) fn begin(&mut self, offset: u64, length: u64) {
        let Some(length) = NonZeroU64::new(length) else { return };
        let (sender, _) = self.started.get_or_insert_with(|| start(&self.file));
        // Full, or no thread could be started: the flush will do it.
        let _ = sender.try_send((offset, length));
    }

    /// Waits until all has been begun that was asked for.
    pub(crate) fn wait(&mut self) {
        let Some((sender, threads)) = self.started.take() else { return };
        drop(sender);
        for thread in threads {
            // It only gave hints.
            let _ = thread.join();
        }
    }
}

impl Drop for Writeback {
    fn drop(&mut self) {
        self.wait();
    }
}

fn start(file: &Arc<File>) -> (SyncSender<Stretch>, Vec<JoinHandle<()>>) {
    let (sender, receiver) = sync_channel(STRETCHES_WAITING);
    let receiver = Arc::new(Mutex::new(receiver));
    let threads = (0..THREADS).filter_map(|_| {
        let (file, receiver) = (Arc::clone(file), Arc::clone(&receiver));
        log_context::spawn(std::thread::Builder::new().name("writeback".into()), move || work(&file, &receiver)).ok()
    });
    (sender, threads.collect())
}

fn work(file: &File, stretches: &Mutex<Receiver<Stretch>>) {
    loop {
        let next = stretches.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok((offset, length)) = next else { return };
        // "Not needed" begins the writeback of dirty pages, which stay in the cache meanwhile, and forgets clean ones, of
        // which there are few between blocks that lie close together.
        let _ = fadvise(file, offset, Some(length), Advice::DontNeed);
    }
}
