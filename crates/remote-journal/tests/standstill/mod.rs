//! A machine that stands still, or has no time for us, is no fault of what is tested: all clocks go on, and nobody gives a sign.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Notes for how long a thread of this process that wanted to run was not let.
struct Standstill {
    ends: Arc<AtomicBool>,
    watch: JoinHandle<Duration>,
}

impl Standstill {
    fn watch() -> Self {
        let ends = Arc::new(AtomicBool::new(false));
        let ends_there = Arc::clone(&ends);
        let watch = std::thread::spawn(move || {
            let mut longest = Duration::ZERO;
            while !ends_there.load(Ordering::Relaxed) {
                let began = Instant::now();
                std::thread::sleep(Duration::from_millis(5));
                longest = longest.max(began.elapsed());
            }
            longest
        });
        Self { ends, watch }
    }

    fn longest(self) -> Duration {
        self.ends.store(true, Ordering::Relaxed);
        self.watch.join().expect("no panic in it")
    }
}

/// Tries this until it is well: what went wrong while the machine stood still for longer than `limit` says nothing. An attempt gives an error
/// only for what comes too late; whatever is lost is a panic in it, which nothing excuses.
pub fn unless_it_stood_still<T>(limit: Duration, mut attempt: impl FnMut() -> Result<T, String>) -> T {
    let mut excused = Vec::new();
    for _ in 0..5 {
        let standstill = Standstill::watch();
        let result = attempt();
        let longest = standstill.longest();
        let wrong = match result {
            Ok(result) => return result,
            Err(wrong) => wrong,
        };
        assert!(longest > limit, "{wrong}, and the machine stood still for {longest:?} only");
        excused.push(format!("{wrong}, {longest:?}"));
    }
    panic!("this machine stands still all the time, or something is wrong: {excused:?}");
}
