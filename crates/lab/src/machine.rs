//! What a run was made on, kept with its results.

use guest_kit::{Platform, program};
use std::collections::BTreeMap;

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

/// The commit of the checkout, with `-dirty` where something was changed.
pub fn commit() -> String {
    let output = program::command("git").ok().and_then(|mut git| {
        let git = git.args(["describe", "--always", "--dirty", "--abbrev=12"]).current_dir(program::workspace());
        program::run(git, &[0]).ok()
    });
    let text = output.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned());
    text.filter(|text| !text.is_empty()).unwrap_or_else(|| format!("version {}", env!("CARGO_PKG_VERSION")))
}

/// Processor, memory, kernel, QEMU, accelerator, guests' kernel.
pub fn describe() -> BTreeMap<String, String> {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let field = |text: &str, name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name));
        line.map_or_else(|| "unknown".to_owned(), |rest| rest.trim_start_matches(['\t', ' ', ':']).to_owned())
    };
    let version = program::command("qemu-system-x86_64")
        .and_then(|mut qemu| program::run(qemu.arg("--version"), &[0]))
        .map(|output| String::from_utf8_lossy(&output.stdout).lines().next().unwrap_or_default().to_owned());
    let processors = processors();
    let platform = Platform::native();
    let accelerator = platform.as_ref().map_or("unknown", |platform| platform.accelerator.name());
    let guest_kernel = platform.map_or_else(|error| error.to_string(), |platform| platform.kernel.version.clone());
    [
        ("processor", format!("{processors} × {}", field(&read("/proc/cpuinfo"), "model name"))),
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
}
