//! Where the library is that is preloaded into the VMM.

use std::path::PathBuf;

/// Its file name.
pub const FILE_NAME: &str = "libamberlog_vmm_shim.so";

/// Finds it: where `AMBERLOG_SHIM` says, beside the program, or in `../lib/amberlog` from there.
pub fn find() -> Option<PathBuf> {
    if let Some(path) = std::env::var_os("AMBERLOG_SHIM") {
        return Some(PathBuf::from(path)).filter(|path| path.is_file());
    }
    let program = std::env::current_exe().ok()?;
    let directory = program.parent()?;
    [directory.join(FILE_NAME), directory.join("../lib/amberlog").join(FILE_NAME)]
        .into_iter()
        .find(|path| path.is_file())
}
