//! One budget of memory over all VMs of a host: whose area has to become smaller, and down to what.
//!
//! As in the paper ("VM aware journaling", section 3.1) the VM with the largest area shrinks first. All are told one *level*: no VM is to
//! hold more than that. It is set so that, were each that holds more brought down to it, all together would hold the budget less an eighth;
//! so the largest one shrinks until it is no larger than the next one, then both do, and who holds less hears of nothing.
//!
//! What it must never do: have a VM shrink that holds less than its share (half of the budget's part of one VM), whatever the others do;
//! leave a level in force when the memory is free again. Failure story: a VM that cannot shrink (its storage does not answer, what it holds
//! cannot go home, its worker says nothing) is seen by what it holds, the others shrink in its place as far as their shares, and
//! where that is not enough it is said. Nothing is refused to anybody for it, so the budget can be passed for a while: by what comes
//! between two looks, and by what cannot go home.

use std::collections::BTreeMap;

/// Nobody is told to hold less.
const SHARE_BYTES_MIN: u64 = 1 << 20;
/// So many looks without a change, with the budget passed, and what a VM holds counts as what it cannot give back.
const PATIENCE_LOOKS: u32 = 10;

/// What one VM holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AreaSize {
    /// All of it.
    pub held_bytes: u64,
    /// Of it, what becomes less when blocks go home: what was copied.
    pub copied_bytes: u64,
}

/// What is to be said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Saying {
    /// The budget was passed, and these begin to shrink, the largest first.
    Shrinks(Vec<String>),
    /// It stays passed: nobody has more to give back.
    Cannot,
    /// There is room again, and nobody is bounded any more.
    Over,
}

#[derive(Clone, Copy, Debug, Default)]
struct Known {
    /// It was told to shrink since the budget was passed.
    is_shrunk: bool,
    /// How often it was, in all.
    shrinks: u64,
    /// The least that it held under the level.
    least_bytes: u64,
    /// Looks since that became less.
    looks: u32,
}

/// See the module.
#[derive(Debug, Default)]
pub struct HostBudget {
    budget_bytes: Option<u64>,
    level_bytes: Option<u64>,
    held_bytes: u64,
    is_stuck: bool,
    known: BTreeMap<String, Known>,
}

impl HostBudget {
    /// Another budget, or none.
    pub fn set_budget(&mut self, budget_bytes: Option<u64>) {
        self.budget_bytes = budget_bytes;
    }

    /// The budget, if there is one.
    pub fn budget_bytes(&self) -> Option<u64> {
        self.budget_bytes
    }

    /// More than this no VM is to hold at the moment; nothing: none is bounded.
    pub fn level_bytes(&self) -> Option<u64> {
        self.level_bytes
    }

    /// What all held at the last look.
    pub fn held_bytes(&self) -> u64 {
        self.held_bytes
    }

    /// Whether the budget is passed, and nobody has more to give back.
    pub fn is_stuck(&self) -> bool {
        self.is_stuck
    }

    /// How often a VM was told to shrink.
    pub fn shrinks(&self, vm: &str) -> u64 {
        self.known.get(vm).map_or(0, |known| known.shrinks)
    }

    /// Whether the next look should come soon: the budget is nearly used, or a level is in force.
    pub fn is_near(&self) -> bool {
        self.level_bytes.is_some() || self.budget_bytes.is_some_and(|budget| self.held_bytes > budget - budget / 4)
    }

    /// Looks at what all VMs hold, and sets the level. VMs that are not among them are forgotten.
    pub fn look(&mut self, areas: &BTreeMap<String, AreaSize>) -> Vec<Saying> {
        self.known.retain(|vm, _| areas.contains_key(vm));
        self.held_bytes = areas.values().map(|area| area.held_bytes).fold(0, u64::saturating_add);
        let Some(budget) = self.budget_bytes else { return self.lift() };
        let (is_passed, target) = (self.held_bytes > budget, budget - budget / 8);
        if self.level_bytes.is_some() && self.held_bytes <= budget - budget / 4 {
            return self.lift();
        }
        if self.level_bytes.is_none() && !is_passed {
            return Vec::new();
        }
        if self.held_bytes <= target {
            // It stays, so that what has shrunk does not grow at once to where it was.
            self.is_stuck = false;
            return Vec::new();
        }
        let sizes: Vec<(u64, u64)> =
            areas.iter().map(|(vm, area)| (area.held_bytes, self.fixed_bytes(vm, *area, is_passed))).collect();
        let share = (budget / 2 / areas.len().max(1) as u64).max(SHARE_BYTES_MIN);
        let level = level_for(&sizes, target, share);
        self.level_bytes = Some(level);
        let mut begun: Vec<(u64, String)> = Vec::new();
        for (vm, area) in areas.iter().filter(|(_, area)| area.held_bytes > level) {
            let known = self.known.entry(vm.clone()).or_default();
            if !known.is_shrunk {
                (known.is_shrunk, known.least_bytes, known.looks) = (true, area.held_bytes, 0);
                known.shrinks += 1;
                begun.push((area.held_bytes, vm.clone()));
            }
        }
        begun.sort_by(|one, other| other.cmp(one));
        let mut said = Vec::new();
        if !begun.is_empty() {
            said.push(Saying::Shrinks(begun.into_iter().map(|(_, vm)| vm).collect()));
        }
        let is_stuck = is_passed && sum_at(&sizes, share) > budget;
        if is_stuck && !self.is_stuck {
            said.push(Saying::Cannot);
        }
        self.is_stuck = is_stuck;
        said
    }

    fn lift(&mut self) -> Vec<Saying> {
        self.known.values_mut().for_each(|known| known.is_shrunk = false);
        self.is_stuck = false;
        self.level_bytes.take().map(|_| Saying::Over).into_iter().collect()
    }

    /// What a VM cannot give back, as far as is known.
    fn fixed_bytes(&mut self, vm: &str, area: AreaSize, is_passed: bool) -> u64 {
        let fixed = area.held_bytes.saturating_sub(area.copied_bytes);
        let Some(known) = self.known.get_mut(vm).filter(|known| known.is_shrunk) else { return fixed };
        // Under load it goes up and down: only what becomes less by something that counts is progress.
        if area.held_bytes < known.least_bytes - known.least_bytes / 64 {
            (known.least_bytes, known.looks) = (area.held_bytes, 0);
        } else if is_passed {
            known.looks = known.looks.saturating_add(1);
        }
        if known.looks >= PATIENCE_LOOKS { area.held_bytes } else { fixed }
    }
}

/// What all would hold at a level. Each is what it holds, and what of it cannot be given back.
fn sum_at(sizes: &[(u64, u64)], level: u64) -> u64 {
    sizes.iter().map(|(held, fixed)| (*held).min(level).max(*fixed)).fold(0, u64::saturating_add)
}

/// The highest level at which all hold no more than `target`, but not below `least`.
fn level_for(sizes: &[(u64, u64)], target: u64, least: u64) -> u64 {
    let most = sizes.iter().map(|(held, _)| *held).max().unwrap_or_default();
    let (mut low, mut high) = (least, most.max(least));
    while low < high {
        let middle = low + (high - low).div_ceil(2);
        if sum_at(sizes, middle) <= target {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    low
}

#[cfg(test)]
mod tests;
