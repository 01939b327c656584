//! The VMs of a daemon, by name.

use super::supervised::Supervised;
use anyhow::Context;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

/// The VMs by name, as the daemon has them at the moment.
pub type Slots = Arc<Mutex<BTreeMap<String, Arc<Supervised>>>>;

/// Those that are not over. The lock on all of them is not held while one of them is asked: a VM that is slow to say it keeps nobody from
/// the others, nor the watchdog from saying that the daemon lives.
pub fn living(slots: &Slots) -> Vec<(String, Arc<Supervised>)> {
    let all = slots.lock().expect("no panic under this lock").clone();
    all.into_iter().filter(|(_, slot)| !slot.is_over()).collect()
}

/// The one of this name, if it is not over; in the same way.
pub fn find(slots: &Slots, name: &str) -> anyhow::Result<Arc<Supervised>> {
    let slot = slots.lock().expect("no panic under this lock").get(name).cloned();
    let slot = slot.filter(|slot| !slot.is_over());
    slot.with_context(|| format!("there is no vm {name} in the configuration"))
}
