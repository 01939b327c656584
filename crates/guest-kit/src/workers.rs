//! The process that serves the disks of a guest: a child of `amberlog run`, and not the one that was started.

/// The worker of an `amberlog run` at this moment.
pub fn worker_of(supervisor: u32) -> Option<u32> {
    // Any of its threads may have started it.
    let threads = std::fs::read_dir(format!("/proc/{supervisor}/task")).ok()?.flatten();
    let all: Vec<String> =
        threads.filter_map(|thread| std::fs::read_to_string(thread.path().join("children")).ok()).collect();
    all.iter().flat_map(|list| list.split_whitespace()).filter_map(|pid| pid.parse().ok()).find(|pid| is_worker(*pid))
}

fn is_worker(pid: u32) -> bool {
    // One that has ended has no arguments any more.
    let arguments = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    arguments.split(|byte| *byte == 0).nth(1) == Some(b"worker")
}
