//! Whether a process is still the one that it was.

/// When a process was started, in ticks since the host was (proc(5), field 22 of stat); nothing if it is gone, or hidden (proc(5),
/// `hidepid`): [`process_lives`] tells. With its number this names a process for good.
pub fn process_started_at(pid: i32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name before may hold anything, a parenthesis too.
    let mut fields = stat.rsplit_once(") ")?.1.split(' ');
    if matches!(fields.next(), Some("Z" | "X")) {
        return None;
    }
    fields.nth(18)?.parse().ok()
}

/// Whether the process with this number that was started then lives. Where /proc does not show it, any process with this number counts,
/// as does any where it is not known when it was started (0), or no descriptor is left: what is taken for dead loses its memory.
pub fn process_lives(pid: i32, started: u64) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use rustix::io::Errno;
    use rustix::process::{Pid, PidfdFlags, pidfd_open};
    // First: from here on the number means this process.
    let process = match Pid::from_raw(pid.max(0)).map(|pid| pidfd_open(pid, PidfdFlags::empty())) {
        Some(Ok(process)) => Some(process),
        Some(Err(Errno::MFILE | Errno::NFILE | Errno::NOMEM)) => None,
        // Nobody has the number, or a thread does.
        None | Some(Err(_)) => return false,
    };
    if process_started_at(pid).is_some_and(|now| started != 0 && now != started) {
        return false;
    }
    let Some(process) = process else { return true };
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    // Readable once it has ended, also while nobody has asked how.
    poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&at_once)) != Ok(1)
}
