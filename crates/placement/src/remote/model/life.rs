//! The life of a worker: until when what it does counts. A worker that is killed stops at a step on storage, or between two things
//! that its guest asks of it, and nothing of it is heard of again; what it sent before may arrive late.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

#[derive(Debug, Default)]
pub struct Life {
    is_dead: AtomicBool,
    /// Steps on storage that it still takes; zero for any number.
    steps_left: AtomicU64,
    pub steps: AtomicU64,
}

impl Life {
    pub fn is_dead(&self) -> bool {
        self.is_dead.load(Ordering::SeqCst)
    }

    pub fn kill(&self) {
        self.is_dead.store(true, Ordering::SeqCst);
    }

    /// It dies at the last of so many steps on storage.
    pub fn kill_after(&self, steps: u64) {
        self.steps_left.store(steps, Ordering::SeqCst);
    }

    /// Before and after each step on storage. Of one that is dead nothing comes after.
    pub fn step(&self) {
        self.steps.fetch_add(1, Ordering::SeqCst);
        let last = self.steps_left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1));
        if last == Ok(1) {
            self.kill();
        }
        if self.is_dead() {
            std::panic::resume_unwind(Box::new("this worker is dead"));
        }
    }
}
