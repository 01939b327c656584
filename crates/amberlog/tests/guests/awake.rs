//! A clock that stands still when all of the machine does, for tests that say "by then somebody else must have done it": that one has not
//! been let run either. It makes a wait longer, and never a check weaker.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

const TICK: Duration = Duration::from_millis(10);
/// A tick that takes longer counts for no more than this.
const TICK_MAX: Duration = Duration::from_millis(50);
/// Who was not let run for so long was on a machine that stood still, and not just a busy one.
const STANDSTILL: Duration = Duration::from_millis(500);

#[derive(Default)]
struct Clock {
    awake_us: AtomicU64,
    stood_still_us: AtomicU64,
}

fn clock() -> &'static Clock {
    static CLOCK: OnceLock<&Clock> = OnceLock::new();
    CLOCK.get_or_init(|| {
        let clock: &Clock = Box::leak(Box::default());
        // Ends with the process of the tests.
        std::thread::spawn(move || {
            let mut last = Instant::now();
            loop {
                std::thread::sleep(TICK);
                let gap = last.elapsed();
                last += gap;
                let add = |to: &AtomicU64, more: Duration| to.fetch_add(more.as_micros() as u64, Ordering::SeqCst);
                add(&clock.awake_us, gap.min(TICK_MAX));
                if gap > STANDSTILL {
                    add(&clock.stood_still_us, gap);
                }
            }
        });
        clock
    })
}

/// For how long this process has been let run since somebody asked for the first time.
pub fn now() -> Duration {
    Duration::from_micros(clock().awake_us.load(Ordering::SeqCst))
}

/// For how long the machine has stood still since then.
pub fn stood_still() -> Duration {
    Duration::from_micros(clock().stood_still_us.load(Ordering::SeqCst))
}

/// Waits until this process was let run for so long.
pub fn sleep(time: Duration) {
    let until = now() + time;
    while now() < until {
        std::thread::sleep(TICK);
    }
}
