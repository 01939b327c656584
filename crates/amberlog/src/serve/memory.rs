//! One budget of memory over all VMs of the host, as far as this process has to do with it: it asks each worker what its area holds, has
//! the decision made ([`supervision::HostBudget`]), and tells the workers what room they have.
//!
//! It must never wait for one worker longer than for the others, nor take one that says nothing for one that holds nothing. Failure
//! story: a worker that does not answer counts with what it held last, and is asked again when it has answered or given up; one
//! that follows another hears its room with the next question. Without this thread each VM has its own budget, and no more.

use super::asked::Asked;
use super::slots::{Slots, living};
use super::supervised::Supervised;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use supervision::{AreaSize, HostBudget, Saying};

/// How often it is looked while little of the budget is used …
const PAUSE: Duration = Duration::from_secs(1);
/// … and while it is nearly used, or passed.
const PAUSE_NEAR: Duration = Duration::from_millis(200);
/// How long a look waits for answers.
const PATIENCE: Duration = Duration::from_millis(500);
/// A budget that is passed again and again is said so often.
const SAID_EVERY: Duration = Duration::from_secs(600);

#[derive(Default)]
struct Area {
    size: AreaSize,
    /// It is being asked.
    is_asked: bool,
    /// The room that its worker has said to have heard of.
    told: Option<u64>,
}

#[derive(Default)]
struct Inner {
    budget: HostBudget,
    areas: BTreeMap<String, Area>,
    said: Option<Instant>,
}

/// See the module.
#[derive(Default)]
pub struct HostMemory {
    inner: Mutex<Inner>,
    changed: Condvar,
}

/// The thread that looks after the memory of all VMs.
///
/// # Errors
/// When it cannot be started.
pub fn look_after(memory: &Arc<HostMemory>, slots: &Slots) -> std::io::Result<()> {
    let (memory, slots) = (Arc::clone(memory), Arc::clone(slots));
    std::thread::Builder::new().name("memory".to_owned()).spawn(move || {
        loop {
            memory.wait_until_wanted();
            memory.look(&living(&slots));
        }
    })?;
    Ok(())
}

impl HostMemory {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().expect("no panic under this lock")
    }

    /// Another budget, or none.
    pub fn set_budget(&self, budget_bytes: Option<u64>) {
        let mut inner = self.lock();
        if inner.budget.budget_bytes() != budget_bytes {
            inner.budget.set_budget(budget_bytes);
            inner.said = None;
            self.changed.notify_all();
        }
    }

    /// What `status` says of all VMs together.
    pub fn status(&self) -> Value {
        let inner = self.lock();
        let budget = &inner.budget;
        let held = budget.budget_bytes().map(|_| budget.held_bytes());
        json!({"budget_bytes": budget.budget_bytes(), "held_bytes": held, "level_bytes": budget.level_bytes(),
            "is_stuck": budget.is_stuck()})
    }

    /// Adds to a VM's entry in `status` what is known of it here.
    pub fn add(&self, entry: &mut Value) {
        let Some(name) = entry["vm"].as_str() else { return };
        let shrinks = self.lock().budget.shrinks(name);
        if let Some(memory) = entry.get_mut("memory").and_then(Value::as_object_mut) {
            memory.insert("shrinks".to_owned(), json!(shrinks));
        }
    }

    /// Waits for the next look. Without a budget there is none once everybody has heard that he is not bounded.
    fn wait_until_wanted(&self) {
        let mut inner = self.lock();
        loop {
            let pause = if inner.budget.is_near() { PAUSE_NEAR } else { PAUSE };
            let before = inner.budget.budget_bytes();
            inner = self.changed.wait_timeout(inner, pause).expect("no panic under this lock").0;
            let is_told = inner.areas.values().all(|area| area.told.is_none() && !area.is_asked);
            if inner.budget.budget_bytes().is_some() || before.is_some() || !is_told {
                return;
            }
        }
    }

    /// Asks all, decides, and tells those who have heard something else.
    fn look(self: &Arc<Self>, all: &[(String, Arc<Supervised>)]) {
        self.lock().areas.retain(|name, _| all.iter().any(|(other, _)| other == name));
        let level = self.lock().budget.level_bytes();
        self.tell(all, level);
        let decided = {
            let mut inner = self.lock();
            let areas = inner.areas.iter().map(|(name, area)| (name.clone(), area.size)).collect();
            let said = inner.budget.look(&areas);
            said.into_iter().for_each(|saying| inner.say(&saying));
            inner.budget.level_bytes()
        };
        if decided != level {
            self.tell(all, decided);
        }
    }

    /// Tells each its room, which asks for what it holds. Who is still being asked is left alone.
    fn tell(self: &Arc<Self>, all: &[(String, Arc<Supervised>)], room_bytes: Option<u64>) {
        for (name, slot) in all {
            {
                let mut inner = self.lock();
                let area = inner.areas.entry(name.clone()).or_default();
                if area.is_asked {
                    continue;
                }
                area.is_asked = true;
            }
            let (memory, name, slot) = (Arc::clone(self), name.clone(), Arc::clone(slot));
            let asked = name.clone();
            let asking = std::thread::Builder::new().name("memory asker".to_owned()).spawn(move || {
                let answer = slot.ask(&Asked::Room { room_bytes }, Duration::ZERO);
                memory.heard(&name, answer.ok().map(|answer| (answer, room_bytes)));
            });
            if asking.is_err() {
                self.heard(&asked, None);
            }
        }
        let mut inner = self.lock();
        let deadline = Instant::now() + PATIENCE;
        while inner.areas.values().any(|area| area.is_asked) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            inner = self.changed.wait_timeout(inner, left).expect("no panic under this lock").0;
        }
    }

    /// What a worker has answered to the room that it was told; nothing: it has said nothing, and holds what it did.
    fn heard(&self, name: &str, answer: Option<(Value, Option<u64>)>) {
        let mut inner = self.lock();
        if let Some(area) = inner.areas.get_mut(name) {
            area.is_asked = false;
            if let Some((answer, room_bytes)) = answer {
                let bytes = |key: &str| answer[key].as_u64().unwrap_or_default();
                area.size = AreaSize { held_bytes: bytes("held_bytes"), copied_bytes: bytes("copied_bytes") };
                area.told = room_bytes;
            }
        }
        self.changed.notify_all();
    }
}

impl Inner {
    fn say(&mut self, saying: &Saying) {
        let mib = |bytes: u64| format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20));
        let (held, budget) = (mib(self.budget.held_bytes()), mib(self.budget.budget_bytes().unwrap_or_default()));
        match saying {
            Saying::Shrinks(vms) => {
                let level = mib(self.budget.level_bytes().unwrap_or_default());
                let sentence = format!(
                    "the journals of all VMs hold {held}, and the memory budget of the host is {budget}: blocks of vm {} go home until \
                     none holds more than {level}",
                    vms.join(", vm ")
                );
                if self.said.is_some_and(|said| said.elapsed() < SAID_EVERY) {
                    log::debug!("{sentence}");
                } else {
                    self.said = Some(Instant::now());
                    log::warn!("{sentence}");
                }
            }
            Saying::Cannot => log::warn!(
                "the journals of all VMs hold {held}, more than the memory budget of the host, {budget}, and no VM can give back \
                 more at this moment: raise budget_mib, or have journals live on storage (amberlog placement VM DISK storage)"
            ),
            Saying::Over => log::info!(
                "the journals of all VMs hold {held}, and none is bounded by the memory budget of the host any more"
            ),
        }
    }
}
