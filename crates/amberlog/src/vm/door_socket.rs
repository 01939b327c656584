//! The socket at which a VMM finds a disk. The supervisor listens there, at a door that workers make and that outlives them.
//!
//! Must never: be there under its name while nobody listens, or another door than the one that is kept. Failure story: a worker that dies as
//! it leaves its guest has taken the name away, and the door stays, which nobody finds; the next worker that goes on has it listen
//! at a new socket, which gets the name when that is kept. Whoever dies in between leaves no name, and the next one does it again.

use crate::worker::Line;
use std::io::ErrorKind::NotFound;
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use supervision::Said;

/// See the module.
pub(super) struct DoorSocket {
    disk: String,
    /// The supervisor's number of the door.
    door: usize,
    listener: Option<UnixListener>,
    /// It was made under another name, and gets this one.
    renamed: Option<(PathBuf, PathBuf)>,
}

impl DoorSocket {
    /// Of the disk whose door has this number, and `is_open` or not, to be found at `path`. What is missing is made, and nobody listens there yet.
    ///
    /// # Errors
    /// When it cannot be made.
    pub(super) fn prepare(disk: &str, door: usize, is_open: bool, path: &Path) -> anyhow::Result<Self> {
        let is_nowhere = is_open && std::fs::symlink_metadata(path).is_err_and(|error| error.kind() == NotFound);
        let mut socket = DoorSocket { disk: disk.to_owned(), door, listener: None, renamed: None };
        if is_nowhere {
            // Whoever is inside goes on without it.
            if let Err(error) = socket.make_beside(path) {
                log::error!("disk {disk}: no VMM finds its door: {error}");
            }
        } else if !is_open {
            socket.listener = Some(block_device::listen(path)?);
        }
        Ok(socket)
    }

    fn make_beside(&mut self, path: &Path) -> Result<(), block_device::Error> {
        // No longer than any disk's own: there is a bound.
        let beside = path.with_file_name(format!(".{}", self.door));
        // The door may listen there, since the death of a worker that was about to give it its name.
        let _ = std::fs::remove_file(&beside);
        self.listener = Some(block_device::listen(&beside)?);
        self.renamed = Some((beside, path.to_owned()));
        Ok(())
    }

    /// Lets VMMs in there.
    ///
    /// # Errors
    /// When the supervisor is gone.
    pub(super) fn open(&self, line: &Line) -> std::io::Result<()> {
        let disk = self.door;
        match &self.listener {
            None => line.say(&Said::Open { disk }, &[]),
            Some(listener) => line.say(&Said::Door { disk, name: self.disk.clone() }, &[listener.as_fd()]),
        }
    }

    /// Gives it its name, where it was made under another one: when the supervisor has heard of it, and if it listens there.
    pub(super) fn show(self) {
        let DoorSocket { disk, listener, renamed: Some((from, to)), .. } = self else { return };
        // The supervisor has its own descriptor of this socket, or nobody listens any more.
        drop(listener);
        let shown = match UnixStream::connect(&from) {
            Ok(_) => std::fs::rename(&from, &to),
            Err(error) => Err(error),
        };
        if let Err(error) = shown {
            log::error!("disk {disk}: no VMM finds its door: {error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whoever dies at any moment of it, what has the name is what the door listens at.
    #[test]
    fn a_door_that_nobody_finds_is_found_when_it_listens_at_a_new_socket() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("d.sock");
        let prepare = |is_open| DoorSocket::prepare("d", 0, is_open, &path).expect("prepared");
        let first = prepare(false);
        assert!(first.listener.is_some() && UnixStream::connect(&path).is_ok(), "a new one is there at once");
        assert!(prepare(true).listener.is_none(), "it is found");
        std::fs::remove_file(&path).expect("removed");
        let again = prepare(true);
        assert!(again.listener.is_some() && !path.exists(), "nobody has heard of it yet");
        // Its worker dies, and the door listens there by now. The next one's socket does not reach the supervisor.
        let third = prepare(true);
        third.show();
        assert!(!path.exists(), "nobody listens there, and the next worker has to see that");
        let fourth = prepare(true);
        let listener = fourth.listener.as_ref().expect("made").try_clone().expect("a descriptor");
        fourth.show();
        UnixStream::connect(&path).expect("found");
        drop((listener, again, first));
        std::fs::remove_dir_all(directory.path()).expect("removed");
        let fifth = prepare(true);
        assert!(fifth.listener.is_none(), "the guest that is inside goes on");
        fifth.show();
    }
}
