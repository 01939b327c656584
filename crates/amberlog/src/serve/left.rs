//! The note of a VM that a daemon has left running: which process is to come back to its sockets.
//!
//! It is in the directory of the VM's sockets, which a new start of the host empties. A process is known by its number and
//! by when it was started, so that no other one is taken for it.

use crate::vm::watched::Watched;
use anyhow::Context;
use std::io;
use std::path::{Path, PathBuf};

fn note(sockets: &Path) -> PathBuf {
    sockets.join("left")
}

/// Notes that the next daemon finds process `pid` waiting for its disks.
///
/// # Errors
/// When it cannot be written, or the process has ended.
pub fn write(sockets: &Path, pid: i32) -> anyhow::Result<()> {
    let started = placement::process_started_at(pid).with_context(|| format!("process {pid} has ended"))?;
    let path = note(sockets);
    std::fs::write(&path, format!("{pid} {started}\n")).with_context(|| format!("writing {}", path.display()))
}

/// Who was left.
#[derive(Debug)]
pub enum Left {
    /// Nobody.
    Nobody,
    /// A process that has ended since: nobody has replayed its logs.
    Gone,
    /// A process that waits for its disks.
    Waits(i32, Watched),
}

/// Who was left.
pub fn find(sockets: &Path) -> Left {
    let Ok(text) = std::fs::read_to_string(note(sockets)) else { return Left::Nobody };
    let Some((pid, started)) = text.trim_end().split_once(' ') else { return Left::Nobody };
    let (Ok(pid), Ok(started)) = (pid.parse::<i32>(), started.parse::<u64>()) else { return Left::Nobody };
    // Watched first: from here on the number means this process.
    match Watched::new(pid) {
        Some(watched) if placement::process_started_at(pid) == Some(started) => Left::Waits(pid, watched),
        _ => Left::Gone,
    }
}

/// Nobody is to come back any more.
///
/// # Errors
/// When the note is there and cannot be removed.
pub fn forget(sockets: &Path) -> anyhow::Result<()> {
    let path = note(sockets);
    match std::fs::remove_file(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("removing {}", path.display()))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_process_that_was_left_is_found() {
        let sockets = tempfile::tempdir().expect("a directory");
        assert!(matches!(find(sockets.path()), Left::Nobody));
        let mut process = std::process::Command::new("sleep").arg("60").spawn().expect("started");
        let pid = process.id() as i32;
        write(sockets.path(), pid).expect("it lives");
        assert!(matches!(find(sockets.path()), Left::Waits(found, _) if found == pid));
        // Its number alone is not enough.
        std::fs::write(note(sockets.path()), format!("{pid} 1\n")).expect("written");
        assert!(matches!(find(sockets.path()), Left::Gone));
        write(sockets.path(), pid).expect("it lives");
        process.kill().expect("killed");
        process.wait().expect("gone");
        assert!(matches!(find(sockets.path()), Left::Gone));
        assert!(write(sockets.path(), pid).is_err());
        forget(sockets.path()).expect("removed");
        forget(sockets.path()).expect("removed before");
    }
}
