//! Taking over the directory of a VM that was killed a moment ago.
//!
//! The kernel needs a while to take a large VMM down, and until then its lock stays. So a directory that is in use is
//! asked for again for a little while before that is believed.

use placement::{AreaDirectory, DirectoryError};
use std::path::Path;
use std::time::{Duration, Instant};

/// How long a process that was killed may take to end.
pub const PATIENCE: Duration = Duration::from_secs(2);
const PAUSE: Duration = Duration::from_millis(20);

/// Takes over `path`, waiting until `deadline` for whoever has it.
///
/// # Errors
/// [`DirectoryError::InUse`] when somebody still has it then.
pub fn take_over(path: &Path, registry: &Path, deadline: Instant) -> Result<AreaDirectory, DirectoryError> {
    loop {
        match AreaDirectory::take_over(path, registry) {
            Err(DirectoryError::InUse { .. }) if Instant::now() < deadline => std::thread::sleep(PAUSE),
            outcome => return outcome,
        }
    }
}

/// The same for several directories, one after the other: whoever was killed before the first one is asked for ends while that is waited for, too,
/// so that all of them together are waited for no longer than for one.
#[derive(Debug)]
pub struct Patience(Duration);

impl Default for Patience {
    fn default() -> Self {
        Patience(PATIENCE)
    }
}

impl Patience {
    /// Takes over `path`, waiting for whoever has it for what is left.
    ///
    /// # Errors
    /// [`DirectoryError::InUse`] when somebody still has it then.
    pub fn take_over(&mut self, path: &Path, registry: &Path) -> Result<AreaDirectory, DirectoryError> {
        let began = Instant::now();
        let outcome = take_over(path, registry, began + self.0);
        self.0 = self.0.saturating_sub(began.elapsed());
        outcome
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
        let (mut patience, began) = (Patience::default(), Instant::now());
        for area in &areas {
            let taken = patience.take_over(area.path(), &registry);
            assert!(matches!(taken, Err(DirectoryError::InUse { .. })) && began.elapsed() >= PATIENCE);
        }
        assert!(began.elapsed() < 2 * PATIENCE, "{:?}", began.elapsed());
        let path = areas[0].path().to_owned();
        drop(areas);
        patience.take_over(&path, &registry).expect("what is free is had without any");
    }
}
