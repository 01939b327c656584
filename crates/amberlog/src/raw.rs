//! Images are raw disks, or are refused: the one place at which every command asks.
//!
//! Must never: let a command read a qcow2 image, a compressed file or a LUKS container as a disk, unless `format=raw` was
//! said. Failure story: what is missing or cannot be opened is left to whoever opens it next, who says so better.

use image_file::OtherFormat;
use recovery::{Access, Disk, Error};
use std::collections::HashSet;
use std::fs::File;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

/// The one value of `format`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    /// The image is a raw disk, whatever it looks like.
    Raw,
}

/// Option of commands that read images.
#[derive(Clone, Copy, Debug, Default, clap::Args)]
pub struct FormatOption {
    /// The images are raw disks, although a guest has written to one what another format begins with.
    #[arg(long, value_name = "raw")]
    format: Option<Format>,
}

impl FormatOption {
    /// Opens an image as a raw disk.
    ///
    /// # Errors
    /// A refusal when it is something else and `--format raw` was not said; as [`Disk::open`].
    pub fn open(self, path: &Path, access: Access) -> Result<Disk, Error> {
        let disk = Disk::open(path, access)?;
        match self.format {
            Some(Format::Raw) => {}
            None => disk.require_raw()?,
        }
        Ok(disk)
    }
}

/// Refuses an image that is something else, before anything else is done with it.
///
/// # Errors
/// [`OtherFormat`].
pub fn require(path: &Path) -> Result<(), OtherFormat> {
    // Nothing else is opened: a pipe would wait for its other end.
    let is_image = |metadata: &std::fs::Metadata| metadata.is_file() || metadata.file_type().is_block_device();
    if !std::fs::metadata(path).is_ok_and(|metadata| is_image(&metadata)) {
        return Ok(());
    }
    match File::open(path).and_then(|file| image_file::probe(&file)) {
        Ok(Some(format)) => Err(OtherFormat { path: path.to_owned(), format }),
        _ => Ok(()),
    }
}

/// Images that are raw because amberlog has served them to a guest, so that whatever they begin with by now is that guest's.
#[derive(Clone, Debug, Default)]
pub struct KnownRaw {
    images: HashSet<(u64, u64)>,
}

impl KnownRaw {
    fn identity(path: &Path) -> Option<(u64, u64)> {
        let metadata = std::fs::metadata(path).ok()?;
        let is_device = metadata.file_type().is_block_device();
        Some(if is_device { (0, metadata.rdev()) } else { (metadata.dev(), metadata.ino()) })
    }

    /// Notes an image.
    pub fn note(&mut self, path: &Path) {
        self.images.extend(Self::identity(path));
    }

    /// Whether the image at `path` was noted. Another file at the same path was not.
    pub fn has(&self, path: &Path) -> bool {
        Self::identity(path).is_some_and(|identity| self.images.contains(&identity))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_same_file_is_known() {
        let directory = tempfile::tempdir().expect("a directory");
        let (old, new) = (directory.path().join("old"), directory.path().join("new"));
        std::fs::write(&old, "QFI\u{fb}").expect("written");
        std::fs::write(&new, "").expect("written");
        let mut known = KnownRaw::default();
        known.note(&old);
        assert!(known.has(&old) && !known.has(&new));
        std::fs::rename(&new, &old).expect("replaced");
        assert!(!known.has(&old));
    }

    #[test]
    fn what_is_no_image_is_left_to_others() {
        let directory = tempfile::tempdir().expect("a directory");
        let pipe = directory.path().join("pipe");
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &pipe,
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR,
            0,
        )
        .expect("a pipe");
        for path in [directory.path(), &pipe, &directory.path().join("none")] {
            assert!(require(path).is_ok(), "{}", path.display());
        }
    }
}
