//! What is mounted still of a process that was killed: nobody answers for it any more, and its directory cannot be removed.
//!
//! Must never: touch what is of a living process, which is known by its number and its beginning, or of another user; ask anything of a mount whose
//! process may live, for it need not answer.
//!
//! Failure story: what somebody has open, or cannot be unmounted by this user, stays, with a line on stderr.

use rustix::io::Errno;
use rustix::mount::UnmountFlags;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// What mounts are called that are of this crate, before whose they are.
const NAME: &str = "amberlog-test-storage";
/// And what the names of their directories begin with.
pub(crate) const DIRECTORY: &str = "amberlog-storage-";

/// What a mount of this process is called.
pub(crate) fn name() -> String {
    let process = std::process::id();
    format!("{NAME}:{process}:{}", started_at(process).unwrap_or_default())
}

/// When a process began, in ticks since the host did; nothing if it is gone.
fn started_at(process: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // Behind the name of its program, which may be anything, the third field is the first.
    stat.rsplit_once(") ")?.1.split(' ').nth(19)?.parse().ok()
}

/// Whether a process is gone that began then: one that has its number by now is another one.
fn is_gone(process: u32, began: u64) -> bool {
    started_at(process) != Some(began)
}

/// Where that is in a line of `/proc/self/mountinfo`, and what is called so, if it is of this crate, and this user's.
fn mount_in(line: &str, user: u32) -> Option<(PathBuf, u32, u64)> {
    let (where_, what) = line.split_once(" - ")?;
    let mut what = what.split(' ');
    let (kind, name, options) = (what.next()?, what.next()?, what.next()?);
    let mut words = name.strip_prefix(NAME)?.strip_prefix(':')?.split(':');
    let (process, began) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
    let is_own = options.split(',').any(|option| *option == format!("user_id={user}"));
    let path = PathBuf::from(where_.split(' ').nth(4)?);
    let is_named = path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(DIRECTORY));
    (kind == "fuse" && is_own && is_named).then_some((path, process, began))
}

/// Unmounts what processes of this user have left mounted that were killed, and removes where that was. Gives those directories.
pub fn remove_dead_mounts() -> Vec<PathBuf> {
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let user = rustix::process::geteuid().as_raw();
    let dead = mounts.lines().filter_map(|line| mount_in(line, user)).filter(|(path, process, began)| {
        is_gone(*process, *began) && rustix::fs::stat(path).err() == Some(Errno::NOTCONN)
    });
    dead.map(|(path, ..)| path).filter(|path| remove(path)).collect()
}

fn remove(path: &Path) -> bool {
    let outcome = match rustix::mount::unmount(path, UnmountFlags::empty()) {
        // Without privilege only that may.
        Err(Errno::PERM) => {
            let ended = Command::new("fusermount3").arg("-u").arg(path).stderr(Stdio::null()).status();
            ended.is_ok_and(|status| status.success()).then_some(()).ok_or(Errno::PERM)
        }
        outcome => outcome,
    };
    let removed = outcome.map_err(std::io::Error::from).and_then(|()| std::fs::remove_dir(path));
    if let Err(error) = &removed {
        eprintln!("{}, which a killed process left mounted, cannot be removed: {error}", path.display());
    }
    removed.is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TestStorage;
    use std::io::{BufRead, BufReader};

    const AS_CHILD: &str = "TEST_STORAGE_MOUNTS";

    #[test]
    fn only_mounts_of_this_crate_and_user_are_known() {
        let line = |user: u32, path: &str, kind: &str, name: &str| {
            format!("36 35 0:52 / {path} rw,nosuid shared:9 - {kind} {name} rw,user_id={user},group_id=0")
        };
        let (path, name) = ("/tmp/amberlog-storage-main-Ab12", "amberlog-test-storage:77:4711");
        assert_eq!(mount_in(&line(5, path, "fuse", name), 5), Some((PathBuf::from(path), 77, 4711)));
        for other in [
            line(55, path, "fuse", name),
            line(5, "/mnt", "fuse", name),
            line(5, path, "ext4", name),
            line(5, path, "fuse", "amberlog-test-storage"),
            line(5, path, "fuse", "other:77:4711"),
        ] {
            assert_eq!(mount_in(&other, 5), None, "{other}");
        }
    }

    #[test]
    fn a_process_is_known_by_its_number_and_its_beginning() {
        let own = std::process::id();
        let began = started_at(own).expect("it lives");
        assert!(!is_gone(own, began) && is_gone(own, began + 1));
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().expect("started");
        let its = started_at(child.id()).expect("it lives");
        assert!(its >= began && !is_gone(child.id(), its));
        child.kill().and_then(|()| child.wait()).expect("killed");
        assert!(is_gone(child.id(), its));
    }

    /// A shoot-out that was killed left its medium mounted.
    #[test]
    fn what_a_killed_process_left_mounted_is_unmounted_and_nothing_else() {
        let directory = tempfile::tempdir().expect("a directory");
        let backing = directory.path().join("backing");
        std::fs::write(&backing, vec![7; 8192]).expect("a backing file");
        let living = match TestStorage::new(&backing) {
            Ok(storage) => storage,
            Err(error) => return eprintln!("left out: {error}"),
        };
        if std::env::var_os(AS_CHILD).is_some() {
            println!("\nmounted {}", living.image().display());
            // Until it is killed.
            loop {
                std::thread::park();
            }
        }
        let mut child = Command::new(std::env::current_exe().expect("this program"))
            .args([
                "--exact",
                "--nocapture",
                "dead::tests::what_a_killed_process_left_mounted_is_unmounted_and_nothing_else",
            ])
            .env(AS_CHILD, "1")
            .stdout(Stdio::piped())
            .spawn()
            .expect("started");
        let said = BufReader::new(child.stdout.take().expect("its output"));
        let mut lines = said.lines().map(|line| line.expect("a line"));
        let image = lines.find_map(|line| line.strip_prefix("mounted ").map(PathBuf::from)).expect("it is mounted");
        let at = image.parent().expect("its directory").to_owned();
        assert!(!remove_dead_mounts().contains(&at) && image.exists(), "its process lives");
        child.kill().and_then(|()| child.wait()).expect("killed");
        assert_eq!(rustix::fs::stat(&at).err(), Some(Errno::NOTCONN), "nobody answers for it");
        let removed = remove_dead_mounts();
        assert!(removed.contains(&at) && at.symlink_metadata().is_err(), "{removed:?}");
        assert_eq!(std::fs::read(living.image()).expect("it is there").len(), 8192);
    }
}
