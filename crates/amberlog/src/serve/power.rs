//! `amberlog on-battery` and `on-mains`: what a UPS says, and what becomes of the journals.
//!
//! On battery every journal that is held goes to storage, and VMs that are prepared meanwhile begin there. A file in the daemon's
//! directory says so, and outlives the daemon: whoever kills that does not put the mains back. Must never: leave a journal held on
//! battery and say that all is well. Failure story: what could not be handed over is named, with its reason, to who asked and in the log; the rest is on storage.

use super::asked::DiskChange;
use super::slots::{Slots, living};
use super::supervised::Supervised;
use crate::vm::VmOptions;
use anyhow::Context;
use placement::PlacementKind;
use serde_json::{Value, json};
use std::borrow::Cow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The file that is there while the host runs on battery.
fn flag(run: &Path) -> PathBuf {
    run.join("on-battery")
}

/// Whether the host runs on battery, as far as was said.
pub fn is_on_battery(run: &Path) -> bool {
    flag(run).symlink_metadata().is_ok()
}

/// What a VM is prepared from at this moment.
pub fn as_of_now<'o>(run: &Path, options: &'o VmOptions) -> Cow<'o, VmOptions> {
    if !is_on_battery(run) {
        return Cow::Borrowed(options);
    }
    let mut options = options.clone();
    for disk in options.disks.iter_mut().filter(|disk| disk.placement.is_held()) {
        disk.placement = PlacementKind::Storage;
    }
    Cow::Owned(options)
}

/// Notes what is so from now on, and has the journals of all VMs follow. Gives an entry for each disk whose journals have to.
///
/// # Errors
/// When it cannot be noted; nothing was changed then.
pub fn set(slots: &Slots, run: &Path, on_battery: bool, patience: Duration) -> anyhow::Result<Value> {
    static ONE_AT_A_TIME: std::sync::Mutex<()> = std::sync::Mutex::new(());
    let _one_at_a_time = ONE_AT_A_TIME.lock().expect("no panic under this lock");
    let flag = flag(run);
    let noted = match on_battery {
        true => std::fs::File::create(&flag).map(drop),
        false => std::fs::remove_file(&flag).or_else(|error| match error.kind() {
            std::io::ErrorKind::NotFound => Ok(()),
            _ => Err(error),
        }),
    };
    noted.with_context(|| format!("noting at {} whether the host runs on battery", flag.display()))?;
    log::info!("the host runs on {}", if on_battery { "battery: journals go to storage" } else { "mains" });
    // Those that were taken out and are over stay there until the next reload.
    let all: Vec<_> = living(slots).into_iter().map(|(_, slot)| slot).collect();
    let deadline = Instant::now() + patience;
    // All at once: a battery is not patient.
    let threads: Vec<_> = all
        .into_iter()
        .map(|slot| std::thread::spawn(move || Arc::clone(&slot).follow_power(on_battery, deadline)))
        .collect();
    let mut disks = Vec::new();
    for thread in threads {
        let entries = thread.join().map_err(|_| anyhow::anyhow!("a thread that hands journals over has failed"))?;
        disks.extend(entries);
    }
    // Who asks may be a UPS's program, which does not look at what it is told.
    if on_battery {
        disks.iter().filter(|entry| !entry["error"].is_null()).for_each(|entry| log::error!("on battery: {entry}"));
    }
    Ok(json!({"schema": 1, "on_battery": on_battery, "disks": disks}))
}

/// How long journals of a disk that came may take to be on storage.
const FOLLOW_PATIENCE: Duration = Duration::from_secs(60);

/// Has disks of a VM come or go ([`Supervised::change_disks`]); on battery the journals of those that came are on storage, too.
///
/// # Errors
/// When the disks cannot come or go.
pub fn change_disks(slot: &Supervised, run: &Path, change: DiskChange) -> anyhow::Result<Value> {
    let mut answer = slot.change_disks(change)?;
    if is_on_battery(run) {
        let moved = slot.follow_power(true, Instant::now() + FOLLOW_PATIENCE);
        moved.iter().filter(|entry| !entry["error"].is_null()).for_each(|entry| log::error!("on battery: {entry}"));
        answer["on_battery"] = moved.into();
    }
    Ok(answer)
}

/// Whether a journal is not where the host's power wants it, now or from the next mount on. `to` is where that is; `is_lost` says of a
/// placement whether a loss of power costs what is there.
pub fn has_to_move(
    on_battery: bool,
    to: PlacementKind,
    (placement, wanted): (PlacementKind, PlacementKind),
    is_lost: impl Fn(PlacementKind) -> bool,
) -> bool {
    if on_battery {
        // One that is to be held from the next mount on would be so on battery.
        return is_lost(placement) || is_lost(wanted);
    }
    // One that could not go to storage while on battery would go there with its next mount.
    (to.is_held() || to == PlacementKind::Nvm) && [placement, wanted].contains(&PlacementKind::Storage)
}

/// Of a VM of which nothing could be moved, and why.
pub fn not_moved(vm: &str, why: &str) -> Value {
    json!({"vm": vm, "disk": null, "placement": null, "when": null, "error": format!("vm {vm}: {why}")})
}

/// What became of the journals of one disk.
pub fn entry(vm: &str, disk: &str, to: PlacementKind, result: anyhow::Result<&'static str>) -> Value {
    let (when, error) = match result {
        Ok(when) => (Some(when), None),
        Err(error) => (None, Some(format!("{error:#}"))),
    };
    json!({"vm": vm, "disk": disk, "placement": to.name(), "when": when, "error": error})
}

#[cfg(test)]
mod tests {
    use super::*;
    use PlacementKind::{Copy, Discard, Nvm, Remote, Retain, Storage};

    #[test]
    fn a_journal_moves_where_it_is_not_or_will_not_be_as_the_power_wants() {
        let on_battery = |place| has_to_move(true, Storage, place, |placement| placement.is_held());
        assert!(on_battery((Retain, Retain)) && on_battery((Copy, Storage)) && on_battery((Storage, Retain)));
        assert!(!on_battery((Storage, Storage)) && !on_battery((Nvm, Nvm)));
        let on_mains = |to, place| has_to_move(false, to, place, |_| unreachable!("the mains are back"));
        for to in [Retain, Copy, Nvm] {
            assert!(on_mains(to, (Storage, Storage)) && on_mains(to, (Storage, to)), "{to:?}");
            assert!(on_mains(to, (to, Storage)), "{to:?}: it could not go, and is not to go with its next mount");
            assert!(!on_mains(to, (to, to)), "{to:?}");
        }
        assert!(!on_mains(Copy, (Retain, Retain)), "what somebody else has wished stays");
        for to in [Storage, Remote, Discard] {
            assert!(!on_mains(to, (Storage, Storage)), "{to:?}");
        }
    }
}
