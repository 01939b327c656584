//! One journal comes to live elsewhere while its guest runs.
//!
//! It must never end before the journal is where the answer says. Failure story: what has not been quiet in time stays where it was.

use super::live::Live;
use super::promise::{AT_NEXT_MOUNT, DONE};
use anyhow::Context;
use placement::{Change, KeptLog, PlacementKind};
use std::sync::Arc;
use std::time::{Duration, Instant};

const PAUSE: Duration = Duration::from_millis(1);

/// Has `log`, of the disk of that number that is called `disk`, live at `to`. Gives a sentence about when that is so. `patience` ends at `deadline`.
///
/// # Errors
/// When that cannot be, or takes longer.
pub fn move_log(
    live: &Live,
    (log, index, disk): (&Arc<KeptLog>, usize, &str),
    to: PlacementKind,
    (patience, deadline): (Duration, Instant),
) -> anyhow::Result<&'static str> {
    let journals = &live.journals;
    let change = || journals.change_placement(log.index(), to);
    match live.migration.as_ref().map_or_else(change, |migration| migration.wish(index, change))? {
        // A server may have it still, and what it has is brought to storage by a thread of its own.
        Change::Done if to == PlacementKind::Storage => {
            let now = || journals.logs().into_iter().find(|now| now.index() == log.index());
            while let Some(now) = now()
                && !now.is_on_storage()?
            {
                anyhow::ensure!(
                    Instant::now() <= deadline,
                    "disk {disk}: its journal is not on storage in {} s; it will be as soon as storage has written it \
                     (placement_effective in status)",
                    patience.as_secs()
                );
                std::thread::sleep(PAUSE);
            }
            Ok(DONE)
        }
        Change::Done => Ok(DONE),
        Change::AtNextMount => Ok(AT_NEXT_MOUNT),
        Change::HandOver => {
            let number = log.index();
            let handle = live.handles.get(log.journal_disk()).context("the disk with the journal is gone")?;
            while !handle.with_route(move |route, plan| route.hand_over(number, plan))?? {
                if Instant::now() > deadline {
                    handle.with_route(move |route, plan| route.give_up_hand_over(number, plan))?;
                    anyhow::bail!("disk {disk} has not been quiet for a moment in {} s; try again", patience.as_secs());
                }
                std::thread::sleep(PAUSE);
            }
            Ok(DONE)
        }
    }
}
