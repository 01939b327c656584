//! A VM's disks held still for a moment: `amberlog freeze|thaw`, and the moment of `amberlog snapshot` ([`super::snapshot`]).
//!
//! Frozen, nothing is taken from the guest's rings, all that it had asked for is answered, every committed block that was held is home,
//! and storage is flushed: what is in the images is the state of the last commit. The guest waits, and goes on by itself when the
//! time is up, whoever died meanwhile. Must never: hold a guest beyond that time. Failure story: what cannot be held is let go at once.

use super::live::Live;
use anyhow::{Context, ensure};
use std::io;
use std::time::{Duration, Instant};

/// The longest that a guest can be held.
pub const HOLD_MAX: Duration = Duration::from_secs(600);
/// How often it is looked whether what was asked for is answered.
const LOOK: Duration = Duration::from_millis(2);

/// Holds all disks of a VM for a time, and brings home what it is owed.
///
/// # Errors
/// When it is not quiet, or not all home, within half of the time; it goes on then.
pub fn freeze(live: &Live, time: Duration) -> anyhow::Result<()> {
    freeze_until(live, time, |live| live.journals.check_all_home(None))
}

/// The same where one disk matters, and who freezes has what only the guest knows to be home or not put into the copy that he makes.
///
/// # Errors
/// As [`freeze`].
pub(super) fn freeze_for_copy(live: &Live, time: Duration, disk: usize) -> anyhow::Result<()> {
    freeze_until(live, time, |live| live.journals.check_known_home(disk))
}

fn freeze_until(live: &Live, time: Duration, check: impl FnOnce(&Live) -> io::Result<()>) -> anyhow::Result<()> {
    let until = Instant::now() + time.min(HOLD_MAX);
    let frozen = hold(live, until).and_then(|()| settle(live, Instant::now() + time.min(HOLD_MAX) / 2, check));
    if frozen.is_err() {
        thaw(live).context("letting the guest go on")?;
    }
    frozen
}

fn hold(live: &Live, until: Instant) -> anyhow::Result<()> {
    live.handles.iter().try_for_each(|handle| handle.hold(Some(until)).map(drop).map_err(Into::into))
}

fn settle(live: &Live, deadline: Instant, check: impl FnOnce(&Live) -> io::Result<()>) -> anyhow::Result<()> {
    for handle in &live.handles {
        while !handle.is_idle()? {
            ensure!(Instant::now() < deadline, "storage has not answered what the guest has asked for; it goes on");
            std::thread::sleep(LOOK);
        }
    }
    live.journals.write_home(deadline.saturating_duration_since(Instant::now()))?;
    Ok(check(live)?)
}

/// Lets a VM go on. Says whether it was held until now.
///
/// # Errors
/// When it is not served any more.
pub fn thaw(live: &Live) -> anyhow::Result<bool> {
    let mut was_held = true;
    for handle in &live.handles {
        was_held &= handle.hold(None)?;
    }
    Ok(was_held)
}
