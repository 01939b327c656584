//! The decision against simulated VMs, which shrink as fast and as far as they like.

use super::*;
use seeded_random::Random;

const MIB: u64 = 1 << 20;

fn areas(sizes: &[(&str, u64, u64)]) -> BTreeMap<String, AreaSize> {
    let area = |(name, held, copied): &(&str, u64, u64)| {
        ((*name).to_owned(), AreaSize { held_bytes: held * MIB, copied_bytes: copied * MIB })
    };
    sizes.iter().map(area).collect()
}

fn shrunk(said: &[Saying]) -> Vec<&str> {
    let names = said.iter().filter_map(|saying| match saying {
        Saying::Shrinks(names) => Some(names.iter().map(String::as_str)),
        _ => None,
    });
    names.flatten().collect()
}

#[test]
fn the_largest_shrinks_and_a_small_one_hears_of_nothing() {
    let mut budget = HostBudget::default();
    budget.set_budget(Some(80 * MIB));
    assert_eq!(budget.look(&areas(&[("a", 60, 60), ("b", 20, 20)])), []);
    let said = budget.look(&areas(&[("a", 70, 70), ("b", 20, 20)]));
    assert_eq!(said, [Saying::Shrinks(vec!["a".to_owned()])]);
    // 80 less an eighth, less what the other one has.
    assert_eq!(budget.level_bytes(), Some(50 * MIB));
    assert_eq!((budget.shrinks("a"), budget.shrinks("b")), (1, 0));
    // It has done so, and goes on as it is: nobody is told anew, and it does not grow back at once.
    assert_eq!(budget.look(&areas(&[("a", 50, 50), ("b", 20, 20)])), []);
    assert_eq!(budget.level_bytes(), Some(50 * MIB));
    assert_eq!(budget.look(&areas(&[("a", 40, 40), ("b", 20, 20)])), [Saying::Over]);
    assert_eq!(budget.level_bytes(), None);
}

#[test]
fn several_large_ones_shrink_to_one_level() {
    let mut budget = HostBudget::default();
    budget.set_budget(Some(80 * MIB));
    let said = budget.look(&areas(&[("a", 50, 50), ("b", 60, 60), ("c", 10, 10)]));
    assert_eq!(shrunk(&said), ["b", "a"]);
    assert_eq!(budget.level_bytes(), Some(30 * MIB));
}

/// A VM that gives nothing back (its storage hangs): the others shrink in its place as far as their shares, and then it is said.
#[test]
fn others_shrink_for_one_that_does_not_and_not_below_their_shares() {
    let mut budget = HostBudget::default();
    budget.set_budget(Some(80 * MIB));
    let sizes = areas(&[("hangs", 90, 90), ("b", 30, 30), ("c", 8, 8)]);
    let mut said = Vec::new();
    for _ in 0..2 * PATIENCE_LOOKS {
        said.extend(budget.look(&sizes));
    }
    assert_eq!(shrunk(&said), ["hangs", "b"], "c has less than its share");
    assert_eq!(budget.level_bytes(), Some(80 * MIB / 2 / 3));
    assert_eq!(said.iter().filter(|saying| **saying == Saying::Cannot).count(), 1, "{said:?}");
    assert!(budget.is_stuck());
    // It answers again.
    budget.look(&areas(&[("hangs", 30, 30), ("b", 13, 13), ("c", 8, 8)]));
    assert!(!budget.is_stuck());
}

/// A worker that follows another one, and a VM that is gone.
#[test]
fn a_budget_that_goes_leaves_nobody_bounded() {
    let mut budget = HostBudget::default();
    budget.set_budget(Some(10 * MIB));
    let sizes = areas(&[("a", 70, 70), ("b", 20, 20)]);
    budget.look(&sizes);
    assert!(budget.level_bytes().is_some() && budget.is_near());
    budget.set_budget(None);
    assert_eq!(budget.look(&sizes), [Saying::Over]);
    assert_eq!((budget.level_bytes(), budget.is_near()), (None, false));
    budget.set_budget(Some(10 * MIB));
    budget.look(&sizes);
    assert_eq!(budget.shrinks("a"), 2, "for each time that it was told");
    assert_eq!(budget.look(&BTreeMap::new()), [Saying::Over]);
    assert_eq!(budget.shrinks("a"), 0, "a VM that comes has no past");
}

struct Simulated {
    held: u64,
    /// What it cannot give back, known or not.
    floor: u64,
    /// What of it is seen to be fixed.
    tables: u64,
    bytes_a_look: u64,
}

/// Whatever VMs there are: who shrinks is larger than who does not, nobody shrinks below his share or further than is needed, and when
/// nothing is added the budget is kept or it is said that it cannot be.
#[test]
fn the_budget_is_kept_or_it_is_said() {
    let (mut kept, mut stuck) = (0, 0);
    for seed in 0..4000 {
        let mut random = Random::new(seed);
        let count = 1 + random.below(6) as usize;
        let total = MIB * (8 + random.below(500));
        let mut vms: Vec<Simulated> = (0..count)
            .map(|_| {
                let held = random.below(2 * total / count as u64) + 1;
                let tables = if random.below(3) == 0 { random.below(held) } else { held / 50 };
                let floor = if random.below(4) == 0 { tables + random.below(held - tables) } else { tables };
                Simulated { held, floor, tables, bytes_a_look: held / 32 + 1 + random.below(held) }
            })
            .collect();
        let mut budget = HostBudget::default();
        budget.set_budget(Some(total));
        let share = (total / 2 / count as u64).max(SHARE_BYTES_MIN);
        let mut is_said = false;
        let growing = random.below(40);
        for look in 0..growing + 400 {
            let sizes: BTreeMap<String, AreaSize> = vms
                .iter()
                .enumerate()
                .map(|(index, vm)| {
                    (
                        index.to_string(),
                        AreaSize { held_bytes: vm.held, copied_bytes: vm.held - vm.tables.min(vm.held) },
                    )
                })
                .collect();
            let before: Vec<u64> = (0..count).map(|index| budget.shrinks(&index.to_string())).collect();
            let said = budget.look(&sizes);
            is_said |= said.contains(&Saying::Cannot);
            let sum: u64 = vms.iter().map(|vm| vm.held).sum();
            assert_eq!(budget.held_bytes(), sum);
            if let Some(level) = budget.level_bytes() {
                assert!(level >= share, "seed {seed}: nobody shrinks below his share");
                assert!(sum > total - total / 4, "seed {seed}: a level is in force though there is room");
            } else {
                assert!(sum <= total, "seed {seed}: the budget is passed, and nobody is told");
            }
            let begun = shrunk(&said);
            let is_told = |index: usize| budget.shrinks(&index.to_string()) > before[index];
            for index in 0..count {
                assert_eq!(begun.contains(&index.to_string().as_str()), is_told(index));
                let is_shrunk =
                    |other: usize| budget.known.get(&other.to_string()).is_some_and(|known| known.is_shrunk);
                let mut larger = (0..count).filter(|other| vms[*other].held > vms[index].held);
                let is_first = larger.all(is_shrunk);
                assert!(!is_told(index) || is_first, "seed {seed}: {index} shrinks before a larger one");
            }
            if look == 0
                && let Some(level) = budget.level_bytes()
                && level > share
            {
                let at = |level: u64| vms.iter().map(|vm| vm.held.min(level).max(vm.tables)).sum::<u64>();
                assert!(at(level) <= total - total / 8, "seed {seed}: the level is too high");
                assert!(at(level + 1) > total - total / 8, "seed {seed}: more shrinks than is needed");
            }
            let level = budget.level_bytes().unwrap_or(u64::MAX);
            for vm in &mut vms {
                if vm.held > level {
                    vm.held = vm.held.saturating_sub(vm.bytes_a_look).max(level).max(vm.floor.min(vm.held));
                } else if look < growing {
                    vm.held += random.below(total / 20);
                }
            }
        }
        let sum: u64 = vms.iter().map(|vm| vm.held).sum();
        assert!(
            sum <= total || (budget.is_stuck() && is_said),
            "seed {seed}: {sum} of {total} bytes, and nothing is said"
        );
        assert!(sum > total || !budget.is_stuck(), "seed {seed}: it is said that it cannot be, and it is");
        if sum <= total { kept += 1 } else { stuck += 1 }
    }
    assert!(kept > 500 && stuck > 100, "{kept} kept, {stuck} stuck");
}
