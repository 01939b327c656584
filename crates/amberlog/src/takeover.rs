//! Taking over the directory of a VM that was killed a moment ago.
//!
//! The kernel needs a while to take a large VMM down, and until then its lock stays. So a directory that is in use is
//! asked for again for a little while before that is believed. What is counted are the pauses in between: a host that is busy makes
//! them longer, and never fewer.

use placement::{AreaDirectory, DirectoryError};
use std::path::Path;
use std::time::Duration;

/// How long a process that was killed may take to end.
pub const PATIENCE: Duration = Duration::from_secs(2);
const PAUSE: Duration = Duration::from_millis(20);

/// What is left of it for several directories, one after the other: whoever was killed before the first one is asked for ends while that is waited
/// for, too, so that all of them together are waited for no longer than for one.
#[derive(Debug, Default)]
pub struct Patience {
    waited: Duration,
}

impl Patience {
    /// Takes over `path`, waiting for whoever has it for what is left.
    ///
    /// # Errors
    /// [`DirectoryError::InUse`] when somebody still has it then.
    pub fn take_over(&mut self, path: &Path, registry: &Path) -> Result<AreaDirectory, DirectoryError> {
        let mut left = PATIENCE.saturating_sub(self.waited);
        loop {
            match AreaDirectory::take_over(path, registry) {
                Err(DirectoryError::InUse { .. }) if !left.is_zero() => {
                    std::thread::sleep(PAUSE);
                    left = left.saturating_sub(PAUSE);
                    self.waited += PAUSE;
                }
                outcome => return outcome,
            }
        }
    }

    /// How long it has waited so far: what its pauses were to take.
    #[cfg(test)]
    pub fn waited(&self) -> Duration {
        self.waited
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn several_directories_are_waited_for_together() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let registry = directory.path().join("registry");
        let areas = [(); 3].map(|()| AreaDirectory::create(&directory.path().join("vms"), &registry).expect("made"));
        let mut patience = Patience::default();
        for area in &areas {
            let taken = patience.take_over(area.path(), &registry);
            assert!(matches!(taken, Err(DirectoryError::InUse { .. })), "somebody has it");
            assert_eq!(patience.waited(), PATIENCE, "once for all");
        }
        let path = areas[0].path().to_owned();
        drop(areas);
        // A child that another test begins has the lock until it is a program of its own.
        let is_had = (0..500).any(|_| {
            let taken = patience.take_over(&path, &registry);
            assert_eq!(patience.waited(), PATIENCE, "nothing is left of it");
            std::thread::sleep(PAUSE);
            taken.is_ok()
        });
        assert!(is_had, "what is free is had without any");
    }
}
