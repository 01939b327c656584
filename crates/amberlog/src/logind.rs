//! Whether systemd-logind takes away what a user has in /dev/shm when that user's last session ends (`RemoveIPC=` of logind.conf(5), which is
//! yes if nothing is said): guests' memory and their journals are there. System users are spared, and root.
//!
//! Must never: keep anybody from starting a VM. Failure story: a configuration that cannot be read counts as one that says nothing.

use std::path::{Path, PathBuf};

/// The first number of a user who is no system user (`UID_MIN` of login.defs(5), as systemd is built with).
const ORDINARY: u32 = 1000;
const SHARED: &str = "/dev/shm";

/// Says so where it may happen to what is put into `shm`.
pub fn warn(shm: &Path) {
    let user = rustix::process::geteuid().as_raw();
    let is_concerned = user >= ORDINARY && shm.starts_with(SHARED) && Path::new("/run/systemd/system").is_dir();
    if is_concerned && removes_ipc(Path::new("/")) {
        log::warn!(
            "systemd-logind removes what user {user} has in {SHARED} when the user's last session ends, and guests' journals with it: set RemoveIPC=no \
             in /etc/systemd/logind.conf and restart systemd-logind, or have a system user run amberlog"
        );
    }
}

/// What the files below `root` say, in the order in which systemd reads them: the last word counts.
fn removes_ipc(root: &Path) -> bool {
    let mut files = vec![root.join("etc/systemd/logind.conf")];
    for directory in ["usr/lib", "run", "etc"] {
        let directory = root.join(directory).join("systemd/logind.conf.d");
        let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
        let mut dropped: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
        dropped.retain(|path| path.extension().is_some_and(|extension| extension == "conf"));
        dropped.sort();
        files.extend(dropped);
    }
    let texts = files.iter().filter_map(|path| std::fs::read_to_string(path).ok());
    let said = texts.flat_map(|text| text.lines().filter_map(value_of).collect::<Vec<_>>()).last();
    said.is_none_or(|value| !matches!(&*value.to_ascii_lowercase(), "no" | "n" | "false" | "f" | "off" | "0"))
}

fn value_of(line: &str) -> Option<String> {
    let (name, value) = line.split_once('=')?;
    (name.trim() == "RemoveIPC").then(|| value.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_word_counts() {
        let root = tempfile::tempdir().expect("a directory");
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().expect("a directory")).expect("made");
            std::fs::write(path, text).expect("written");
        };
        assert!(removes_ipc(root.path()), "if nothing is said");
        write("etc/systemd/logind.conf", "[Login]\n#RemoveIPC=no\nKillUserProcesses=no\n");
        assert!(removes_ipc(root.path()), "a comment says nothing");
        write("etc/systemd/logind.conf", "[Login]\nRemoveIPC = no\n");
        assert!(!removes_ipc(root.path()));
        write("usr/lib/systemd/logind.conf.d/10-x.conf", "[Login]\nRemoveIPC=yes\n");
        assert!(removes_ipc(root.path()));
        write("etc/systemd/logind.conf.d/90-vms.conf", "[Login]\nRemoveIPC=off\n");
        write("etc/systemd/logind.conf.d/95-not.conf.bak", "[Login]\nRemoveIPC=yes\n");
        assert!(!removes_ipc(root.path()));
    }
}
