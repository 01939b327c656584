//! Whether a peer is there: a connection may stay long after the host at its other end has lost its power.
//!
//! A client says something every few seconds (crate `placement`, which ships), and what it says may take a slow link long: so every byte counts
//! that comes from it. One of which nothing has come for longer, and of which nothing is being worked on, is taken for gone by who asks for its
//! journal; the connection itself lives on for as long as it may.

use crate::link::Heard;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// When a peer was heard last.
#[derive(Debug)]
pub(crate) struct Presence {
    heard: Arc<Heard>,
    /// One that was silent for so long is not there.
    silence: Duration,
    /// It waits for us: for an answer, or for room.
    is_served: AtomicBool,
}

impl Presence {
    pub fn new(heard: Arc<Heard>, silence: Duration) -> Self {
        Presence { heard, silence, is_served: AtomicBool::new(false) }
    }

    /// What came is worked on.
    pub fn is_served(&self) {
        self.is_served.store(true, Ordering::Relaxed);
    }

    /// It can say something else.
    pub fn listens(&self) {
        self.heard.now();
        self.is_served.store(false, Ordering::Relaxed);
    }

    pub fn is_there(&self) -> bool {
        self.is_served.load(Ordering::Relaxed) || self.heard.silence() < self.silence
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_says_nothing_for_long_is_not_there() {
        let heard = Arc::new(Heard::new());
        let (long, none) = (Duration::from_secs(600), Duration::ZERO);
        let [patient, impatient] = [long, none].map(|silence| Presence::new(Arc::clone(&heard), silence));
        patient.listens();
        impatient.listens();
        assert!(patient.is_there() && !impatient.is_there());
        impatient.is_served();
        assert!(impatient.is_there(), "it waits for an answer");
        impatient.listens();
        assert!(!impatient.is_there());
    }
}
