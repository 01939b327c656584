//! The tick of a VM while its guest runs: it counts on in the marks of held journals, so that an older copy of its image is told
//! from the image, and wakes keepers of journals whose time has come.
//!
//! It must never write once recovery begins: it has ended when it is dropped. Failure story: what is not counted on in time
//! only has an older copy pass that is younger than an interval.

use placement::Journals;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

const INTERVAL: Duration = Duration::from_secs(1);

/// Ends when it is dropped.
pub struct Marks {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Marks {
    /// Begins.
    pub fn start(journals: &Arc<Journals>) -> std::io::Result<Self> {
        let (stop, stopped) = channel::<()>();
        let journals = Arc::clone(journals);
        let thread = std::thread::Builder::new().name("marks".to_owned()).spawn(move || {
            while matches!(stopped.recv_timeout(INTERVAL), Err(RecvTimeoutError::Timeout)) {
                journals.tick();
            }
        })?;
        Ok(Marks { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Marks {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
