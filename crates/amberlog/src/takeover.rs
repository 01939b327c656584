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
