//! Who changes the images at an operator's wish, while they may be given up at any moment: what was sealed must not be changed any more.

use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// See the module.
#[derive(Debug, Default)]
pub struct Users {
    inner: Mutex<Inner>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Inner {
    count: usize,
    is_closed: bool,
}

impl Users {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().expect("no panic under this lock")
    }

    /// Nobody seals or gives up the images until what is given is dropped. Nothing while somebody does.
    pub fn enter(&self) -> Option<User<'_>> {
        let mut inner = self.lock();
        (!inner.is_closed).then(|| {
            inner.count += 1;
            User(self)
        })
    }

    /// Waits until nobody is there, and lets nobody in until what is given is dropped. Nothing when somebody stays for longer than this.
    pub fn close(&self, patience: Duration) -> Option<Closed<'_>> {
        let deadline = Instant::now() + patience;
        let mut inner = self.lock();
        debug_assert!(!inner.is_closed, "one thread closes");
        inner.is_closed = true;
        let closed = Closed(self);
        while inner.count > 0 {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                drop(inner);
                drop(closed);
                return None;
            }
            inner = self.changed.wait_timeout(inner, left).expect("no panic under this lock").0;
        }
        Some(closed)
    }
}

/// Somebody who changes them.
#[derive(Debug)]
pub struct User<'u>(&'u Users);

impl Drop for User<'_> {
    fn drop(&mut self) {
        self.0.lock().count -= 1;
        self.0.changed.notify_all();
    }
}

/// Nobody changes them.
#[derive(Debug)]
pub struct Closed<'u>(&'u Users);

impl Drop for Closed<'_> {
    fn drop(&mut self) {
        self.0.lock().is_closed = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};

    #[test]
    fn who_is_there_is_waited_for_and_nobody_comes_meanwhile() {
        let users = Users::default();
        let user = users.enter().expect("open");
        assert!(users.close(Duration::ZERO).is_none(), "somebody is there");
        let other = users.enter().expect("open again");
        let has_left = AtomicBool::new(false);
        std::thread::scope(|threads| {
            let closing = threads.spawn(|| {
                let closed = users.close(Duration::from_secs(60)).expect("nobody is there any more");
                assert!(has_left.load(Ordering::SeqCst));
                assert!(users.enter().is_none(), "nobody comes");
                drop(closed);
            });
            drop(user);
            while users.enter().is_some() {
                std::thread::yield_now();
            }
            has_left.store(true, Ordering::SeqCst);
            drop(other);
            closing.join().expect("no panic");
        });
        assert!(users.enter().is_some(), "open again");
    }
}
