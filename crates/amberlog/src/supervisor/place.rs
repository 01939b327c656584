//! Where a VM's directory in tmpfs is, and whether it still is there: somebody may have removed it under a guest that runs, systemd-logind for
//! one at the end of its user's last session.
//!
//! The guest goes on then, as all is open; but what it commits is in files without a name, which nobody finds who comes later. Must never:
//! call a directory gone that its own worker has just removed, since nothing is owed in it.

use placement::DirectoryIdentity;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// See the module.
#[derive(Debug, Default)]
pub struct Place(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    /// No descriptor: that would keep it locked.
    directory: Option<(PathBuf, DirectoryIdentity)>,
    /// It was gone at the last look.
    was_gone: bool,
    is_said: bool,
}

impl Place {
    /// This is the directory now, with its lock; or there is none.
    pub fn set(&self, directory: Option<(&Path, BorrowedFd<'_>)>) {
        let directory = directory.and_then(|(path, lock)| Some((path.to_owned(), DirectoryIdentity::of(lock).ok()?)));
        *self.0.lock().expect("no panic under this lock") = Inner { directory, ..Inner::default() };
    }

    /// Where it is, and whether it still is.
    pub fn look(&self) -> Option<(PathBuf, bool)> {
        let inner = self.0.lock().expect("no panic under this lock");
        let (path, identity) = inner.directory.as_ref()?;
        Some((path.clone(), identity.is_at(path)))
    }

    /// A regular look. Gives where it was, once: when it is gone at this look and was at the one before.
    pub fn seen_gone(&self) -> Option<PathBuf> {
        let mut inner = self.0.lock().expect("no panic under this lock");
        let (path, identity) = inner.directory.clone()?;
        let is_gone = !identity.is_at(&path);
        let was_gone = std::mem::replace(&mut inner.was_gone, is_gone);
        (is_gone && was_gone && !std::mem::replace(&mut inner.is_said, true)).then_some(path)
    }
}

/// What there is to say of a VM whose directory is gone, and to do.
pub fn sentence(vm: &str, directory: &str) -> String {
    format!(
        "vm {vm}: its directory {directory} in tmpfs was removed while it is served (systemd-logind does that at the end of its user's last \
         session, where RemoveIPC= is not no): the guest goes on, but no other worker can go on with it, and what it has committed is lost if \
         amberlog dies: run 'amberlog flush {vm}', shut the guest down, and start it anew"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn a_directory_that_is_gone_twice_is_said_once() {
        let base = tempfile::tempdir().expect("a directory");
        let directory = base.path().join("vm-1-0");
        let place = Place::default();
        assert!(place.look().is_none() && place.seen_gone().is_none());
        let make = || {
            std::fs::create_dir(&directory).expect("made");
            let lock = std::fs::File::create(directory.join("lock")).expect("made");
            place.set(Some((&directory, lock.as_fd())));
        };
        make();
        assert_eq!(place.look(), Some((directory.clone(), true)));
        assert_eq!(place.seen_gone(), None);
        std::fs::remove_dir_all(&directory).expect("removed");
        assert_eq!(place.look(), Some((directory.clone(), false)));
        // Its worker may be about to say that it has removed it.
        assert_eq!(place.seen_gone(), None);
        assert_eq!(place.seen_gone(), Some(directory.clone()));
        assert_eq!(place.seen_gone(), None, "it was said");
        make();
        assert_eq!(place.seen_gone(), None);
        std::fs::remove_dir_all(&directory).expect("removed");
        assert_eq!(place.seen_gone(), None);
        place.set(None);
        assert!(place.seen_gone().is_none() && place.look().is_none());
    }
}
