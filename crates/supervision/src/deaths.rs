//! How often a worker may die before it is not started again by itself.

use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::str::FromStr;
use std::time::{Duration, Instant};

/// So many deaths …
pub const DEATHS_MAX: usize = 3;
/// … in so long are too many.
pub const WITHIN: Duration = Duration::from_secs(10);

/// Over so long it is counted how often they died.
pub const COUNTED: Duration = Duration::from_secs(3600);
/// More is not counted one by one.
const COUNTED_MAX: usize = 1000;

/// What its owner wants of a VM whose worker dies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OnCrash {
    /// Another one goes on, unless they die again and again.
    #[default]
    Restart,
    /// None goes on: the guest waits until somebody has looked.
    Hold,
    /// The VMM is ended, and what it was owed goes home.
    KillVmm,
}

impl FromStr for OnCrash {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "restart" => Ok(OnCrash::Restart),
            "hold" => Ok(OnCrash::Hold),
            "kill-vmm" => Ok(OnCrash::KillVmm),
            other => Err(format!("'{other}' is none of restart, hold, kill-vmm")),
        }
    }
}

/// What to do after a death.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Start another worker.
    Restart,
    /// It dies again and again, or nobody wants another one: hold the VM as it is, and say so.
    Hold,
    /// End the VMM.
    EndVmm,
}

/// The deaths of one VM's workers.
#[derive(Clone, Debug)]
pub struct Deaths {
    recent: VecDeque<Instant>,
    total: u64,
    most: usize,
}

impl Default for Deaths {
    fn default() -> Self {
        Self::at_most(DEATHS_MAX)
    }
}

impl Deaths {
    /// None so far; `most` of them in [`WITHIN`] are too many.
    pub fn at_most(most: usize) -> Self {
        Deaths { recent: VecDeque::new(), total: 0, most }
    }

    /// A worker has died. Says what to do.
    pub fn died(&mut self, now: Instant, wanted: OnCrash) -> Next {
        self.total += 1;
        self.recent.push_back(now);
        if self.recent.len() > COUNTED_MAX {
            self.recent.pop_front();
        }
        match wanted {
            OnCrash::KillVmm => Next::EndVmm,
            OnCrash::Restart if self.within(WITHIN, now) < self.most => Next::Restart,
            OnCrash::Restart | OnCrash::Hold => Next::Hold,
        }
    }

    /// How many there were in the last hour that nobody has looked at.
    pub fn counted(&self, now: Instant) -> usize {
        self.within(COUNTED, now)
    }

    fn within(&self, time: Duration, now: Instant) -> usize {
        self.recent.iter().rev().take_while(|death| now.saturating_duration_since(**death) < time).count()
    }

    /// Somebody wants it tried again.
    pub fn forgive(&mut self) {
        self.recent.clear();
    }

    /// How many there were.
    pub fn total(&self) -> u64 {
        self.total
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_in_ten_seconds_are_too_many() {
        let begin = Instant::now();
        let at = |seconds| begin + Duration::from_secs(seconds);
        let mut deaths = Deaths::default();
        for seconds in [0, 5, 10, 15, 20] {
            assert_eq!(deaths.died(at(seconds), OnCrash::Restart), Next::Restart, "{seconds}");
        }
        assert_eq!(deaths.died(at(21), OnCrash::Restart), Next::Hold);
        assert_eq!(deaths.total(), 6);
        deaths.forgive();
        assert_eq!(deaths.died(at(22), OnCrash::Restart), Next::Restart);
        assert_eq!(deaths.total(), 7);
    }

    #[test]
    fn those_of_an_hour_are_counted_until_somebody_has_looked() {
        let begin = Instant::now();
        let at = |seconds| begin + Duration::from_secs(seconds);
        let mut deaths = Deaths::default();
        for seconds in (0..7200).step_by(600) {
            assert_eq!(deaths.died(at(seconds), OnCrash::Restart), Next::Restart);
        }
        assert_eq!(deaths.counted(at(6600)), 6);
        assert_eq!(deaths.counted(at(9000)), 2);
        deaths.forgive();
        assert_eq!((deaths.counted(at(9000)), deaths.total()), (0, 12));
        let mut deaths = Deaths::at_most(usize::MAX);
        for _ in 0..5000 {
            deaths.died(begin, OnCrash::Restart);
        }
        assert_eq!(deaths.counted(begin), COUNTED_MAX);
    }

    #[test]
    fn an_owner_may_want_something_else() {
        let mut deaths = Deaths::default();
        for (name, next) in [("hold", Next::Hold), ("kill-vmm", Next::EndVmm), ("restart", Next::Hold)] {
            let wanted = name.parse().expect("a policy");
            assert_eq!(deaths.died(Instant::now(), wanted), next, "{name}");
        }
        "again".parse::<OnCrash>().expect_err("no policy");
    }
}
