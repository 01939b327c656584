//! On which processors a VM's worker works for its guest (`cpus = "2-3"`).
//!
//! The thread that prepares and serves the VM is bound before it makes any other one for its guest, and those are bound as it is. Must
//! never: bind what the supervisor or another VM does. Failure story: processors that are not there, or not permitted, keep a VM from
//! being prepared, with a sentence; a guest that runs is served on any processor instead.

use anyhow::Context;
use rustix::io::Errno;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::str::FromStr;
use std::sync::OnceLock;

/// A list of processors, as Linux writes such lists: `0,2-3`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cpus {
    numbers: Vec<usize>,
}

impl FromStr for Cpus {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong =
            || format!("cpus is a list of processors such as 2-3 or 0,2-3, below {}, not '{text}'", CpuSet::MAX_CPU);
        let mut numbers = Vec::new();
        for part in text.split(',') {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let number = |digits: &str| {
                let is_plain = digits.bytes().all(|digit| digit.is_ascii_digit());
                digits.parse().ok().filter(|number: &usize| is_plain && *number < CpuSet::MAX_CPU)
            };
            match (number(first), number(last)) {
                (Some(first), Some(last)) if first <= last => numbers.extend(first..=last),
                _ => return Err(wrong()),
            }
        }
        numbers.sort_unstable();
        numbers.dedup();
        Ok(Cpus { numbers })
    }
}

impl Cpus {
    fn set(&self) -> CpuSet {
        let mut set = CpuSet::new();
        self.numbers.iter().for_each(|number| set.set(*number));
        set
    }

    /// What is wrong with it on this host, if anything.
    pub fn problem(&self) -> Option<String> {
        let online = std::fs::read_to_string("/sys/devices/system/cpu/online").ok()?;
        let online: Cpus = online.trim().parse().ok()?;
        let is_there = self.numbers.iter().any(|number| online.numbers.binary_search(number).is_ok());
        (!is_there)
            .then(|| format!("none of the processors that cpus names is there: this host has {}", online.shown()))
    }

    fn shown(&self) -> String {
        let numbers: Vec<_> = self.numbers.iter().map(ToString::to_string).collect();
        numbers.join(",")
    }
}

/// Binds the calling thread, and those that it makes from here on; without a list, to what it was bound to at first.
///
/// # Errors
/// When no processor of the list is there, or it is not permitted.
pub fn bind(cpus: Option<&Cpus>) -> anyhow::Result<()> {
    static AT_FIRST: OnceLock<CpuSet> = OnceLock::new();
    let Some(cpus) = cpus else {
        let Some(at_first) = AT_FIRST.get() else { return Ok(()) };
        return sched_setaffinity(None, at_first).context("letting a VM's worker run on any processor again");
    };
    let at_first = sched_getaffinity(None).context("asking on which processors this process runs")?;
    AT_FIRST.get_or_init(|| at_first);
    sched_setaffinity(None, &cpus.set()).map_err(|error| match error {
        Errno::PERM => anyhow::anyhow!(
            "cpus = \"{}\" is not permitted (a unit needs the drop-in amberlog.service.d/cpus.conf): {error}",
            cpus.shown()
        ),
        Errno::INVAL => {
            anyhow::anyhow!("none of the processors of cpus = \"{}\" is there, or may be used", cpus.shown())
        }
        error => anyhow::anyhow!("binding a VM's worker to cpus = \"{}\": {error}", cpus.shown()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_read_as_linux_writes_them() {
        for (text, numbers) in [("0", &[0][..]), ("2-3", &[2, 3]), ("7,0-2,1", &[0, 1, 2, 7]), ("1023", &[1023])] {
            assert_eq!(text.parse::<Cpus>().map(|cpus| cpus.numbers).as_deref(), Ok(numbers), "{text}");
        }
        for text in ["", "3-2", "1,", "-1", "1024", "+1", "a", "0-99999999999999999999", " 1"] {
            assert!(text.parse::<Cpus>().is_err_and(|error| error.contains("list of processors")), "{text}");
        }
    }

    #[test]
    fn a_thread_is_bound_with_those_that_it_makes_and_let_go_again() {
        let allowed = sched_getaffinity(None).expect("asked");
        let one = (0..CpuSet::MAX_CPU).find(|number| allowed.is_set(*number)).expect("one");
        let of_new_thread = || {
            let set = std::thread::spawn(|| sched_getaffinity(None).expect("asked")).join().expect("it ends");
            (set.count(), set.is_set(one))
        };
        bind(None).expect("nothing to do");
        let cpus: Cpus = one.to_string().parse().expect("a list");
        assert_eq!(cpus.problem(), None);
        bind(Some(&cpus)).expect("bound");
        assert_eq!(of_new_thread(), (1, true));
        // What is not there changes nothing.
        let absent: Cpus = "1023".parse().expect("a list");
        assert!(absent.problem().is_some_and(|problem| problem.contains("this host has")));
        assert!(bind(Some(&absent)).is_err_and(|error| error.to_string().contains("1023")));
        assert_eq!(of_new_thread(), (1, true));
        bind(None).expect("let go");
        assert_eq!(of_new_thread().0, allowed.count());
    }
}
