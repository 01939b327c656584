//! The copy of a log that is shipped to a journal server, as an earlier worker has left it, or a new one.

use crate::description::{AreaDirectory, COPY_ENDING};
use crate::remote::{MirrorFile, Phase};
use crate::scan::FoundLogPlace;
use own_files::How;
use std::io;
use std::sync::Arc;

/// The copy of a log, as an earlier worker has left it, or a new one.
#[derive(Debug)]
pub(crate) struct LeftCopy {
    pub name: String,
    pub file: Arc<MirrorFile>,
}

impl LeftCopy {
    /// A new one.
    pub fn make(directory: &AreaDirectory, place: &FoundLogPlace, number: u64) -> io::Result<Self> {
        let name = format!("log-{number}{COPY_ENDING}");
        let file = directory.directory().file(&name, How::MakeNew).map_err(io::Error::other)?;
        Ok(LeftCopy { name, file: Arc::new(MirrorFile::make(file, place)?) })
    }

    /// Whether a guest has the log open.
    pub fn is_open(&self) -> bool {
        self.file.says().phase != Phase::Closed
    }

    /// Where a log has no keeper that could go on with its copy.
    pub fn refuse_if_open(copy: Option<&Self>, why: &str) -> io::Result<()> {
        match copy {
            Some(copy) if copy.is_open() => Err(io::Error::other(format!(
                "the journal whose copy is {} was shipped to a server, and {why}",
                copy.name
            ))),
            _ => Ok(()),
        }
    }
}
