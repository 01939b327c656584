//! The tick of a VM while its guest runs: it counts on in the marks of held journals, so that an older copy of its image is told
//! from the image, and wakes keepers of journals whose time has come.
//!
//! It must never write once recovery begins: it has ended when it is dropped. Failure story: what is not counted on in time
//! only has an older copy pass that is younger than an interval.

use placement::Journals;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

const INTERVAL: Duration = Duration::from_secs(1);
/// What is due waits no less than this for the next look.
const PAUSE: Duration = Duration::from_millis(5);

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
            let mut next_tick = Instant::now() + INTERVAL;
            loop {
                // No journal is to be durable in less than an interval, so what is asked for after this look is seen in the next.
                let until_tick = next_tick.saturating_duration_since(Instant::now());
                let pause = journals.due_in().map_or(until_tick, |due| due.min(until_tick)).max(PAUSE);
                if !matches!(stopped.recv_timeout(pause), Err(RecvTimeoutError::Timeout)) {
                    break;
                }
                if Instant::now() >= next_tick {
                    next_tick = Instant::now() + INTERVAL;
                    journals.tick();
                } else {
                    journals.wake_due();
                }
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
