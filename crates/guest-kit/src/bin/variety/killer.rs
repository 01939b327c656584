//! Kills the process that serves a guest, again and again, while the guest does whatever its case has it do.

use guest_kit::{Signal, worker_of};
use guest_tools::random::Random;
use rustix::process::{Pid, kill_process};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// Between two kills, at most: now and then the next worker has not begun yet.
const PAUSE_US_MAX: u64 = 600_000;

/// Kills until it is told to stop.
pub struct Killer {
    is_over: Arc<AtomicBool>,
    thread: JoinHandle<u64>,
}

impl Killer {
    /// Begins to kill the workers of the supervisor, as often as `kills` at most.
    pub fn start(supervisor: u32, kills: u64, seed: u64) -> Self {
        let is_over = Arc::new(AtomicBool::new(false));
        let is_told = Arc::clone(&is_over);
        let thread = std::thread::spawn(move || {
            let mut random = Random::of(seed, 11);
            let (mut done, mut last) = (0, None);
            while done < kills && !is_told.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_micros(random.below(PAUSE_US_MAX)));
                let Some(worker) = worker_of(supervisor).filter(|worker| last != Some(*worker)) else { continue };
                if let Some(pid) = i32::try_from(worker).ok().and_then(Pid::from_raw)
                    && kill_process(pid, Signal::KILL).is_ok()
                {
                    (done, last) = (done + 1, Some(worker));
                }
            }
            done
        });
        Self { is_over, thread }
    }

    /// Stops it, and says how often it killed.
    pub fn stop(self) -> u64 {
        self.is_over.store(true, Ordering::Relaxed);
        self.thread.join().unwrap_or(0)
    }
}
