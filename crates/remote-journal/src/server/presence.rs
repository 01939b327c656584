//! Whether a peer is there: a connection may stay long after the host at its other end has lost its power.
//!
//! A client says something every ten seconds at the least (crate `placement`, which ships). One that has said nothing for longer, and of
//! which nothing is being worked on, is taken for gone by who asks for its journal; the connection itself lives on for as long as it may.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A peer that was silent for so long is not there.
pub(crate) const SILENT: Duration = Duration::from_secs(15);

/// When a peer was heard last.
#[derive(Debug)]
pub(crate) struct Presence {
    began: Instant,
    heard_ms: AtomicU64,
    /// It waits for us: for an answer, or for room.
    is_served: AtomicBool,
}

impl Presence {
    pub fn new() -> Self {
        Presence { began: Instant::now(), heard_ms: AtomicU64::new(0), is_served: AtomicBool::new(false) }
    }

    /// Something came, and is worked on.
    pub fn heard(&self) {
        self.is_served.store(true, Ordering::Relaxed);
    }

    /// It can say something else.
    pub fn listens(&self) {
        self.heard_ms.store(self.began.elapsed().as_millis() as u64, Ordering::Relaxed);
        self.is_served.store(false, Ordering::Relaxed);
    }

    pub fn is_there(&self) -> bool {
        self.was_there_at(self.began.elapsed())
    }

    fn was_there_at(&self, now: Duration) -> bool {
        let silent = now.saturating_sub(Duration::from_millis(self.heard_ms.load(Ordering::Relaxed)));
        self.is_served.load(Ordering::Relaxed) || silent < SILENT
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_says_nothing_for_long_is_not_there() {
        let peer = Presence::new();
        peer.listens();
        let now = peer.began.elapsed();
        assert!(peer.is_there());
        assert!(!peer.was_there_at(now + SILENT + SILENT));
        peer.heard();
        assert!(peer.was_there_at(now + SILENT + SILENT), "it waits for an answer");
        peer.listens();
        assert!(peer.is_there() && !peer.was_there_at(now + SILENT + SILENT));
    }
}
