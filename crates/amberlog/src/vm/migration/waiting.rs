//! What a guest waits for that has come, in sentences that are shown for as long as it is so: it can last, and whoever looks at any moment sees it.
//! Pure: it is told what is found out, and when.

use std::time::{Duration, Instant};

/// How long somebody else may have an image before that is said.
const BUSY_PATIENCE: Duration = Duration::from_secs(5);
/// And how often it is said again.
const SAID_AGAIN: Duration = Duration::from_secs(60);

/// Somebody else has one of its images.
const BUSY: &str = "its guest has come, and waits: another process or host has one of its images still. Where that is the daemon that it came from, \
                    that one's status says what is missing";

/// See the module.
#[derive(Debug, Default)]
pub struct Waiting {
    busy: Option<Busy>,
    /// Why its images cannot be looked at, or not be prepared, though nobody else has them.
    to_prepare: Option<String>,
}

#[derive(Debug)]
struct Busy {
    since: Instant,
    said: Option<Instant>,
}

impl Waiting {
    /// Somebody else has one of its images. Gives the sentence where it is to be said now.
    pub fn is_busy(&mut self, now: Instant) -> Option<&'static str> {
        let busy = self.busy.get_or_insert(Busy { since: now, said: None });
        let (since, patience) = busy.said.map_or((busy.since, BUSY_PATIENCE), |said| (said, SAID_AGAIN));
        (now.saturating_duration_since(since) > patience).then(|| {
            busy.said = Some(now);
            BUSY
        })
    }

    /// Nobody else has them.
    pub fn is_free(&mut self) {
        self.busy = None;
    }

    /// They cannot be prepared yet, as this sentence says. Whether it is to be said now.
    pub fn cannot_prepare(&mut self, sentence: &str) -> bool {
        let is_new = self.to_prepare.as_deref() != Some(sentence);
        self.to_prepare = Some(sentence.to_owned());
        is_new
    }

    /// What they waited for is done.
    pub fn can_prepare(&mut self) {
        self.to_prepare = None;
    }

    /// No guest waits any more: it goes on, cannot, or has gone.
    pub fn is_over(&mut self) {
        *self = Waiting::default();
    }

    /// What it waits for, if it does for long.
    pub fn sentence(&self) -> Option<&str> {
        let busy = self.busy.as_ref().and_then(|busy| busy.said).map(|_| BUSY);
        busy.or(self.to_prepare.as_deref())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_waited_for_is_shown_for_as_long_as_it_is_so() {
        let (mut waiting, start) = (Waiting::default(), Instant::now());
        let after = |seconds| start + Duration::from_secs(seconds);
        assert_eq!((waiting.is_busy(start), waiting.is_busy(after(5))), (None, None));
        assert_eq!(waiting.sentence(), None, "that is nothing yet");
        let (said, again) = (waiting.is_busy(after(6)), waiting.is_busy(after(7)));
        assert!(said.is_some_and(|said| said.contains("has one of its images still")) && again.is_none());
        assert_eq!(waiting.sentence(), said);
        assert_eq!((waiting.is_busy(after(66)), waiting.is_busy(after(67))), (None, said));
        // Nobody has them, and what was left for them cannot be brought home.
        waiting.is_free();
        assert_eq!(waiting.sentence(), None);
        assert!(waiting.cannot_prepare("a") && !waiting.cannot_prepare("a"), "it is said once");
        waiting.is_free();
        assert_eq!(waiting.sentence(), Some("a"), "whoever takes them does not know whether that is done");
        assert!(waiting.cannot_prepare("b"), "it is another one");
        // Somebody has them again meanwhile.
        assert_eq!((waiting.is_busy(after(100)), waiting.sentence()), (None, Some("b")));
        assert!(waiting.is_busy(after(106)).is_some_and(|busy| waiting.sentence() == Some(busy)));
        waiting.is_free();
        assert_eq!(waiting.sentence(), Some("b"));
        waiting.can_prepare();
        assert_eq!(waiting.sentence(), None);
        // The next guest waits for itself.
        assert!(waiting.is_busy(after(200)).is_none() && waiting.is_busy(after(206)).is_some());
        waiting.is_over();
        assert_eq!((waiting.is_busy(after(300)), waiting.sentence()), (None, None));
    }
}
