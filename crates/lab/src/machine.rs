//! What a run was made on, kept with its results.

use guest_kit::{Platform, program};
use std::collections::BTreeMap;

/// The machine's load averages, now.
pub fn load() -> String {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').take(3).collect::<Vec<_>>().join(" ")
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
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
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

/// Processor time of a process of this machine so far, in seconds; 0 if there is none of that number.
pub fn process_cpu_seconds(pid: u32) -> f64 {
    /// Clock ticks a second of `/proc` (`USER_HZ`), the same on every Linux of today.
    const TICKS: f64 = 100.0;
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The name in parentheses may hold anything; utime and stime are the 12th and 13th words behind it.
    let words = text.rsplit_once(')').map_or("", |(_, rest)| rest).split_whitespace();
    words.skip(11).take(2).filter_map(|word| word.parse::<u64>().ok()).map(|ticks| ticks as f64).sum::<f64>() / TICKS
}
