//! What processors did over time, beside a load: the VMs', amberlog's with their QEMU, the journal server's, and all of the host's, as per
//! cent of one processor, from /proc/stat and /proc/PID/stat.
//!
//! It must never hold up a load: it looks four times a second. Failure story: a process that is gone has used nothing more.

use crate::machine::process_tree_cpu_seconds;
use crate::rig::Running;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

const PAUSE: Duration = Duration::from_millis(250);
/// Ticks of /proc/stat in a second.
const TICKS: f64 = 100.0;

type Curves = BTreeMap<String, Vec<(f64, f64)>>;

/// A thread that looks at processors until it is told to end.
pub(crate) struct Sampler {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Curves>>,
}

impl Sampler {
    /// Begins with what runs now.
    pub(crate) fn start(running: &Running) -> Self {
        let vms: Vec<u32> = running.guests.iter().map(guest_kit::Guest::process_id).collect();
        let server = running.journal_server.as_ref().map(crate::journal_server::JournalServer::process_id);
        let stop = Arc::new(AtomicBool::new(false));
        let told = Arc::clone(&stop);
        let thread =
            std::thread::Builder::new().name("processors".to_owned()).spawn(move || sample(&vms, server, &told));
        Sampler { stop, thread: thread.ok() }
    }

    /// What was seen.
    pub(crate) fn end(mut self) -> Curves {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().and_then(|thread| thread.join().ok()).unwrap_or_default()
    }
}

impl Drop for Sampler {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

fn sample(vms: &[u32], server: Option<u32>, stop: &AtomicBool) -> Curves {
    let now = || {
        let server = server.map_or(0.0, process_tree_cpu_seconds);
        (vms.iter().map(|pid| process_tree_cpu_seconds(*pid)).sum::<f64>(), server, host_seconds())
    };
    let (begun, mut curves) = (Instant::now(), Curves::new());
    let (mut before, mut at) = (now(), 0.0);
    while !stop.load(Ordering::Relaxed) {
        std::thread::sleep(PAUSE);
        let (seen, seconds) = (now(), begun.elapsed().as_secs_f64());
        let percent = |after: f64, before: f64| (100.0 * (after - before) / (seconds - at)).max(0.0).round();
        let mut add = |name: &str, value: f64| {
            curves.entry(name.to_owned()).or_default().push(((seconds * 100.0).round() / 100.0, value))
        };
        add("vm_cpu", percent(seen.0, before.0));
        if server.is_some() {
            add("server_cpu", percent(seen.1, before.1));
        }
        add("host_cpu", percent(seen.2, before.2));
        (before, at) = (seen, seconds);
    }
    curves
}

/// Time that the host's processors were busy, all together.
fn host_seconds() -> f64 {
    busy_seconds(&std::fs::read_to_string("/proc/stat").unwrap_or_default())
}

/// Of /proc/stat: user, nice, system, irq, softirq, steal; guests' time is in user already, idle and iowait are not busy.
fn busy_seconds(text: &str) -> f64 {
    let line = text.lines().next().unwrap_or_default();
    let ticks: Vec<f64> = line.split_whitespace().skip(1).filter_map(|word| word.parse().ok()).collect();
    let at = |index: usize| ticks.get(index).copied().unwrap_or(0.0);
    (at(0) + at(1) + at(2) + at(5) + at(6) + at(7)) / TICKS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiting_is_not_busy() {
        assert!((busy_seconds("cpu  100 50 25 9999 8888 5 10 10 7 7\ncpu0 1 1 1 1\n") - 2.0).abs() < 1e-9);
        assert!(busy_seconds("").abs() < 1e-9);
    }
}
