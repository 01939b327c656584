//! What a run was made on, kept with its results.

use guest_kit::{Platform, program};
use std::collections::BTreeMap;
use std::path::Path;

/// The machine's load averages, now.
pub fn load() -> String {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').take(3).collect::<Vec<_>>().join(" ")
}

/// This machine's processors.
pub fn processors() -> u32 {
    std::thread::available_parallelism().map_or(1, |count| u32::try_from(count.get()).unwrap_or(u32::MAX))
}

/// What guests of one processor run on here.
///
/// # Errors
/// When it cannot be found out.
pub fn platform() -> crate::Result<String> {
    Ok(Platform::native()?.describe())
}

/// The commit that this program was built of (not what the checkout has come to since, nor one where it runs), with `-dirty` where something
/// was changed when it was built; the version, if it was not built of a checkout.
pub fn commit() -> String {
    option_env!("AMBERLOG_LAB_COMMIT").map_or_else(|| format!("version {}", env!("CARGO_PKG_VERSION")), str::to_owned)
}

/// This machine's processors, in words.
pub fn processor() -> String {
    format!("{} × {}", processors(), field(&std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default(), "model name"))
}

/// What stands behind a name in a file of names and values.
fn field(text: &str, name: &str) -> String {
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    line.map_or_else(|| "unknown".to_owned(), |rest| rest.trim_start_matches(['\t', ' ', ':']).to_owned())
}

/// A directory, and the file system that it is on: "/dev/shm (tmpfs)".
pub fn place(directory: &Path) -> String {
    let path = directory.canonicalize().unwrap_or_else(|_| directory.to_owned());
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let mounts = mounts.lines().filter_map(|line| {
        let mut words = line.split(' ').skip(1);
        Some((words.next()?, words.next()?))
    });
    // Of two at the same place the later one covers the other.
    let over = mounts.filter(|(at, _)| path.starts_with(at)).max_by_key(|(at, _)| at.len());
    format!("{} ({})", path.display(), over.map_or("unknown", |(_, kind)| kind))
}

/// The machine's processor time so far, in ticks: all of it, and what its own host had for others ("steal", the eighth number of /proc/stat's first line; proc(5)).
pub fn processor_ticks() -> (u64, u64) {
    let text = std::fs::read_to_string("/proc/stat").unwrap_or_default();
    let line = text.lines().next().unwrap_or_default();
    let ticks: Vec<u64> = line.split_whitespace().skip(1).take(8).filter_map(|word| word.parse().ok()).collect();
    (ticks.iter().sum(), ticks.get(7).copied().unwrap_or(0))
}

/// The part of the machine's processor time since then that others had, in per cent.
pub fn steal_percent_since(before: (u64, u64)) -> Option<f64> {
    let now = processor_ticks();
    let all = now.0.saturating_sub(before.0);
    (all > 0).then(|| 100.0 * now.1.saturating_sub(before.1) as f64 / all as f64)
}

/// Processor, memory, kernel, QEMU, accelerator, guests' kernel.
pub fn describe() -> BTreeMap<String, String> {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let version = program::command("qemu-system-x86_64")
        .and_then(|mut qemu| program::run(qemu.arg("--version"), &[0]))
        .map(|output| String::from_utf8_lossy(&output.stdout).lines().next().unwrap_or_default().to_owned());
    let platform = Platform::native();
    let accelerator = platform.as_ref().map_or("unknown", |platform| platform.accelerator.name());
    let guest_kernel = platform.map_or_else(|error| error.to_string(), |platform| platform.kernel.version.clone());
    [
        ("processor", processor()),
        ("memory", field(&read("/proc/meminfo"), "MemTotal")),
        ("kernel", read("/proc/sys/kernel/osrelease").trim().to_owned()),
        ("qemu", version.unwrap_or_else(|error| error.to_string())),
        ("accelerator", accelerator.to_owned()),
        ("guest_kernel", guest_kernel),
        // The programs beside this one were built with it.
        ("build", if cfg!(debug_assertions) { "development profile" } else { "release profile" }.to_owned()),
    ]
    .into_iter()
    .map(|(name, value)| (name.to_owned(), value))
    .collect()
}

/// Processor time of a process and of all that it started and that still runs, so far, in seconds.
pub fn process_tree_cpu_seconds(pid: u32) -> f64 {
    let entries = std::fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    let parents: Vec<(u32, u32)> = entries.filter_map(|pid: u32| Some((pid, parent(pid)?))).collect();
    let (mut tree, mut index) = (vec![pid], 0);
    while let Some(of) = tree.get(index).copied() {
        tree.extend(parents.iter().filter(|(_, parent)| *parent == of).map(|(pid, _)| *pid));
        index += 1;
    }
    tree.into_iter().map(process_cpu_seconds).sum()
}

/// Processor time of an `amberlog run` so far, in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct VmCpu {
    /// Of all of its processes: the supervisor, the worker that serves the disks, the VMM.
    pub all: f64,
    /// Of the VMM alone.
    pub vmm: f64,
}

/// What a VM's processes took so far; `None` once its VMM is gone. The disks are served by a process beside the VMM: the time of
/// the process that was started says nothing of them.
pub fn vm_cpu_seconds(started: u32, vmm: u32) -> Option<VmCpu> {
    parent(vmm)?;
    Some(VmCpu { vmm: process_cpu_seconds(vmm), all: process_tree_cpu_seconds(started) })
}

impl VmCpu {
    /// What was taken since: by all, and by all but the VMM. The VMM is read first, so that the others' part is never below nothing.
    pub fn since(self, before: Self) -> (f64, f64) {
        let all = (self.all - before.all).max(0.0);
        (all, (all - (self.vmm - before.vmm)).max(0.0))
    }
}

fn parent(pid: u32) -> Option<u32> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    text.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()
}

/// Processor time of a process of this machine so far, in seconds; 0 if there is none of that number.
pub fn process_cpu_seconds(pid: u32) -> f64 {
    /// Clock ticks a second of `/proc` (`USER_HZ`), the same on every Linux of today.
    const TICKS: f64 = 100.0;
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The name in parentheses may hold anything; utime and stime are the 12th and 13th words behind it.
    let words = text.rsplit_once(')').map_or("", |(_, rest)| rest).split_whitespace();
    words.skip(11).take(2).filter_map(|word| word.parse::<u64>().ok()).map(|ticks| ticks as f64).sum::<f64>() / TICKS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_counts_with_what_it_started() {
        let mut command = std::process::Command::new("sh");
        command.args(["-c", "sh -c 'i=0; while [ $i -lt 2000000 ]; do i=$((i+1)); done' & wait"]);
        let mut child = command.spawn().expect("a shell");
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
        while process_tree_cpu_seconds(child.id()) <= process_cpu_seconds(child.id()) {
            assert!(std::time::Instant::now() < deadline, "the inner shell's time is never seen");
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        let _ = child.kill();
        let _ = child.wait();
    }

    /// As an `amberlog run`: what was started only waits, one of its children serves, the other one is the VMM.
    #[test]
    fn what_serves_the_disks_counts_and_the_vmm_is_apart() {
        let busy = "i=0; while [ $i -lt 100000000 ]; do i=$((i+1)); done";
        let script = format!("sh -c '{busy}' & sleep 60 & wait");
        let mut child = std::process::Command::new("sh").args(["-c", &script]).spawn().expect("a shell");
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
        let named = |name: &str| -> Option<u32> {
            let all = std::fs::read_dir("/proc").expect("/proc").flatten();
            all.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).find(|pid: &u32| {
                let text = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
                text.trim() == name && parent(*pid) == Some(child.id())
            })
        };
        let pause = std::time::Duration::from_millis(20);
        let (server, vmm) = loop {
            if let (Some(server), Some(vmm)) = (named("sh"), named("sleep")) {
                break (server, vmm);
            }
            assert!(std::time::Instant::now() < deadline, "two children");
            std::thread::sleep(pause);
        };
        let none = VmCpu { all: 0.0, vmm: 0.0 };
        let took = loop {
            let (all, served) = vm_cpu_seconds(child.id(), vmm).expect("it runs").since(none);
            if served > 0.1 {
                assert!(all >= served && process_cpu_seconds(child.id()) < 0.1);
                break vm_cpu_seconds(child.id(), server).expect("it runs").since(none);
            }
            assert!(std::time::Instant::now() < deadline, "the server's time is never seen");
            std::thread::sleep(pause);
        };
        assert!(took.0 > 0.1 && took.1 < 0.1, "the busy one as the VMM leaves next to nothing: {took:?}");
        for pid in [server, vmm, child.id()] {
            let _ = std::process::Command::new("kill").args(["-9", &pid.to_string()]).status();
        }
        let _ = child.wait();
        assert_eq!(vm_cpu_seconds(child.id(), u32::MAX), None, "there is none of that number");
    }
}
