//! The end of everything at once, for a program that was told to stop: every guest that runs is killed, none is started any
//! more, and what waits for one gets an error at once, so that the program ends by its ordinary way, which removes its
//! directories.
//!
//! Failure story: a guest that is started at this very moment sees the request when it enters itself.

use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

static REQUESTED: AtomicBool = AtomicBool::new(false);
/// Process groups of what was started, and the directories of their runs.
static RUNNING: Mutex<BTreeMap<u32, PathBuf>> = Mutex::new(BTreeMap::new());

/// Whether the end was asked for.
pub fn is_requested() -> bool {
    REQUESTED.load(Ordering::SeqCst)
}

/// Asks for the end: kills all guests of this process.
pub fn request() {
    REQUESTED.store(true, Ordering::SeqCst);
    for (group, directory) in running().iter() {
        kill(*group, directory);
    }
}

fn running() -> MutexGuard<'static, BTreeMap<u32, PathBuf>> {
    RUNNING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Enters a guest that was started; kills it if it is too late.
pub(crate) fn enter(group: u32, directory: &Path) {
    let mut running = running();
    running.insert(group, directory.to_owned());
    if is_requested() {
        kill(group, directory);
    }
}

/// A guest is gone.
pub(crate) fn leave(group: u32) {
    running().remove(&group);
}

/// `kill -9` of a process group, and of the QEMU whose pid file is in `directory`: a wrapper may have given it a group of
/// its own. Once QEMU has ended its pid file is gone or names a stranger, hence the look at its command line.
pub(crate) fn kill(group: u32, directory: &Path) {
    if let Some(group) = pid(group) {
        let _ = kill_process_group(group, Signal::KILL);
    }
    kill_qemu(directory);
}

/// `kill -9` of the QEMU of a run.
pub(crate) fn kill_qemu(directory: &Path) {
    let text = std::fs::read_to_string(directory.join("qemu.pid")).unwrap_or_default();
    let Ok(number) = text.trim().parse::<u32>() else { return };
    let own = directory.join("initramfs").into_os_string().into_encoded_bytes();
    let is_ours = std::fs::read(format!("/proc/{number}/cmdline"))
        .is_ok_and(|line| line.windows(own.len()).any(|window| window == own));
    if is_ours && let Some(process) = pid(number) {
        let _ = kill_process(process, Signal::KILL);
    }
}

fn pid(number: u32) -> Option<Pid> {
    i32::try_from(number).ok().and_then(Pid::from_raw)
}
