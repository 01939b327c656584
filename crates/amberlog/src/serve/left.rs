//! The note of a VM that a daemon has left running: which process is to come back to its sockets.
//!
//! It is in the directory of the VM's sockets, which a new start of the host empties. A process is known by its number and
//! by when it was started, so that no other one is taken for it.

use crate::vm::watched::Watched;
use anyhow::Context;
use own_files::OwnDirectory;
use std::path::Path;

const NOTE: &str = "left";
const BYTES_MAX: u64 = 100;

fn open(sockets: &Path) -> Result<OwnDirectory, own_files::Error> {
    OwnDirectory::open_allowing(sockets, super::SOCKETS_OTHERS)
}

/// Notes that the next daemon finds process `pid` waiting for its disks.
///
/// # Errors
/// When it cannot be written, or the process has ended.
pub fn write(sockets: &Path, pid: i32) -> anyhow::Result<()> {
    let started = placement::process_started_at(pid).with_context(|| format!("process {pid} has ended"))?;
    Ok(open(sockets)?.write(NOTE, format!("{pid} {started}\n").as_bytes())?)
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
///
/// # Errors
/// When somebody else can have written that.
pub fn find(sockets: &Path) -> anyhow::Result<Left> {
    let note = match open(sockets).and_then(|sockets| sockets.read(NOTE, BYTES_MAX)) {
        Err(error) if error.is_missing() => None,
        other => other?,
    };
    let text = String::from_utf8_lossy(&note.unwrap_or_default()).into_owned();
    let Some((pid, started)) = text.trim_end().split_once(' ') else { return Ok(Left::Nobody) };
    let (Ok(pid), Ok(started)) = (pid.parse::<i32>(), started.parse::<u64>()) else { return Ok(Left::Nobody) };
    // Watched first: from here on the number means this process.
    Ok(match Watched::new(pid) {
        Some(watched) if placement::process_started_at(pid) == Some(started) => Left::Waits(pid, watched),
        _ => Left::Gone,
    })
}

/// Nobody is to come back any more.
///
/// # Errors
/// When the note is there and cannot be removed.
pub fn forget(sockets: &Path) -> anyhow::Result<()> {
    match open(sockets).and_then(|sockets| sockets.remove(NOTE)) {
        Err(error) if !error.is_missing() => Err(error.into()),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn only_the_process_that_was_left_is_found() {
        let sockets = tempfile::tempdir().expect("a directory");
        std::fs::set_permissions(sockets.path(), std::fs::Permissions::from_mode(0o700)).expect("its mode");
        let find = |sockets: &Path| find(sockets).expect("ours");
        assert!(matches!(find(sockets.path()), Left::Nobody));
        let mut process = std::process::Command::new("sleep").arg("60").spawn().expect("started");
        let pid = process.id() as i32;
        write(sockets.path(), pid).expect("it lives");
        assert!(matches!(find(sockets.path()), Left::Waits(found, _) if found == pid));
        // Its number alone is not enough.
        std::fs::write(sockets.path().join(NOTE), format!("{pid} 1\n")).expect("written");
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
