//! The clock of each disk of a VM while its guest runs: it counts on in the marks of held journals, so that an older copy of an image is
//! told from the image, and wakes keepers of journals whose time has come.
//!
//! It must never write once recovery begins: it has ended when it is dropped; and never wait for one disk on behalf of another, whose
//! transactions become durable in their time. Failure story: what is not counted on in time only has an older copy pass that is younger
//! than an interval.

use placement::Journals;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

const INTERVAL: Duration = Duration::from_secs(1);
/// What is due waits no less than this for the next look.
const PAUSE: Duration = Duration::from_millis(5);

/// Ends when it is dropped.
pub struct Marks {
    /// Of each disk.
    clocks: Vec<(Sender<()>, JoinHandle<()>)>,
}

impl Marks {
    /// Begins.
    pub fn start(journals: &Arc<Journals>) -> std::io::Result<Self> {
        let mut marks = Marks { clocks: Vec::new() };
        for disk in 0..journals.disks().len() {
            let (stop, stopped) = channel::<()>();
            let journals = Arc::clone(journals);
            let thread = std::thread::Builder::new().name("marks".to_owned());
            marks.clocks.push((stop, thread.spawn(move || run(&journals, disk, &stopped))?));
        }
        Ok(marks)
    }
}

fn run(journals: &Journals, disk: usize, stopped: &Receiver<()>) {
    let mut next_tick = Instant::now() + INTERVAL;
    loop {
        // No journal is to be durable in less than an interval, so what is asked for after this look is seen in the next.
        let until_tick = next_tick.saturating_duration_since(Instant::now());
        let pause = journals.due_in(disk).map_or(until_tick, |due| due.min(until_tick)).max(PAUSE);
        if !matches!(stopped.recv_timeout(pause), Err(RecvTimeoutError::Timeout)) {
            break;
        }
        if Instant::now() >= next_tick {
            next_tick = Instant::now() + INTERVAL;
            journals.tick(disk);
        } else {
            journals.wake_due(disk);
        }
    }
}

impl Drop for Marks {
    fn drop(&mut self) {
        let (stops, threads): (Vec<_>, Vec<_>) = std::mem::take(&mut self.clocks).into_iter().unzip();
        drop(stops);
        for thread in threads {
            let _ = thread.join();
        }
    }
}
