//! Directories for what simulations make.

use crate::error::{During, Result};

/// Where area and images of simulations lie: memory, if there is some.
pub fn scratch() -> Result<tempfile::TempDir> {
    let shared = std::path::Path::new("/dev/shm");
    let parent = if shared.is_dir() { shared.to_owned() } else { std::env::temp_dir() };
    tempfile::Builder::new().prefix("crash-explorer-").tempdir_in(parent).during("making a directory")
}
