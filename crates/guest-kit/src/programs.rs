//! The programs that are really used, as one number: what guests boot from, which is built from the checkout at each start, and what serves their disks,
//! which lies beside the program that runs. Who keeps what it measured keeps this with it: a commit says of what one program was built, and not what the
//! others have become since.
//!
//! It must never: take another program for the one that is known.
//!
//! Failure story: what serves disks may be changed while a run goes on; [`Programs::refuse_changed`] says so before the next guest is started.

use crate::assets::Assets;
use crate::error::{Error, FileContext, Result};
use crate::program;
use std::collections::hash_map::DefaultHasher;
use std::hash::Hasher;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Beside the program that runs.
const SERVING: [&str; 3] = ["amberlog", "libamberlog_vmm_shim.so", "amberlog-journal-server"];

/// What a run is made with.
#[derive(Clone, Debug)]
pub struct Programs {
    digest: String,
    files: Vec<(PathBuf, Stamp)>,
}

/// What tells a file from itself before a change: inode, bytes, and when it was changed, in seconds and ns.
type Stamp = (u64, u64, i64, i64);

impl Programs {
    /// Those of this process; prepares what guests boot from, where that was not done yet.
    ///
    /// # Errors
    /// When a program cannot be built or read.
    pub fn here() -> Result<Self> {
        let mut files: Vec<PathBuf> = std::env::current_exe().into_iter().collect();
        // What is not built is not used, or fails where it is.
        files.extend(SERVING.iter().filter_map(|name| program::workspace_binary(name).ok()));
        Self::of(Assets::get()?.initramfs(), files)
    }

    fn of(initramfs: &[u8], files: Vec<PathBuf>) -> Result<Self> {
        // With another compiler the same bytes may be another number: what it builds is another program.
        let mut hasher = DefaultHasher::new();
        let mut add = |bytes: &[u8]| {
            hasher.write_usize(bytes.len());
            hasher.write(bytes);
        };
        add(initramfs);
        let mut stamped = Vec::new();
        for path in files {
            // What is changed after this look is found to be.
            let stamp = stamp(&path)?;
            add(path.file_name().unwrap_or_default().as_encoded_bytes());
            add(&std::fs::read(&path).at("read", &path)?);
            stamped.push((path, stamp));
        }
        Ok(Programs { digest: format!("{:016x}", hasher.finish()), files: stamped })
    }

    /// All of them, in 16 digits.
    pub fn digest(&self) -> &str {
        &self.digest
    }

    /// An error where one that serves disks is another one by now.
    ///
    /// # Errors
    /// Then.
    pub fn refuse_changed(&self) -> Result<()> {
        match self.files.iter().find(|(path, known)| stamp(path).ok().as_ref() != Some(known)) {
            None => Ok(()),
            Some((path, _)) => Err(Error::Assets(format!(
                "{} was changed while this run went on: what came now would be of another program; what was measured is kept, and the same command \
                 says how to go on",
                path.display()
            ))),
        }
    }
}

fn stamp(path: &Path) -> Result<Stamp> {
    let file = std::fs::metadata(path).at("look at", path)?;
    Ok((file.ino(), file.len(), file.mtime(), file.mtime_nsec()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A run that went on after an edit measured other tools in its guests without a word.
    #[test]
    fn any_program_that_is_another_one_is_seen() {
        let directory = tempfile::tempdir().expect("a directory");
        let paths = ["amberlog", "shim"].map(|name| directory.path().join(name));
        let write = |bytes: [&[u8]; 2]| {
            for (path, bytes) in paths.iter().zip(bytes) {
                std::fs::write(path, bytes).expect("written");
            }
        };
        let of = |initramfs: &[u8]| Programs::of(initramfs, paths.to_vec()).expect("read");
        write([b"one", b"two"]);
        let before = of(b"tools");
        assert_eq!(before.digest(), of(b"tools").digest());
        assert_eq!(before.digest().len(), 16);
        assert_ne!(before.digest(), of(b"other tools").digest(), "what guests boot from");
        before.refuse_changed().expect("nothing was changed");
        write([b"onet", b"wo"]);
        assert_ne!(before.digest(), of(b"tools").digest(), "what serves disks");
        let told = before.refuse_changed().expect_err("it was changed").to_string();
        assert!(told.contains("amberlog") && told.contains("another program"), "{told}");
        std::fs::remove_file(&paths[1]).expect("removed");
        assert!(before.refuse_changed().is_err());
    }
}
