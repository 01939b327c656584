//! What the images of a guest looked like when it was left without a daemon: whether they are still so is seen before it goes on.
//!
//! Must never: say that an image is as it was left where it was written to.

use anyhow::Context;
use image_file::Stamp;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Of a file system, and of a journal.
const SUPERBLOCK_BYTES: usize = 1024;

/// An image, which file it was, and what it looked like.
#[derive(Debug, Serialize, Deserialize)]
pub struct LeftImage {
    path: PathBuf,
    device: u64,
    inode: u64,
    block_device: u64,
    /// Nothing in a note of an earlier amberlog.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    as_left: Option<AsLeft>,
}

/// An image as it was left.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AsLeft {
    /// After the last flush.
    stamp: Stamp,
    /// Where superblocks were, and the sums of their bytes ([`image_file::sum`]).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    superblocks: Vec<(u64, u64)>,
    /// A flush of it has failed, and its guest was not told.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    untold: Option<String>,
    /// No driver of its guest has used it: the guest may have no such disk.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    is_unused: bool,
    /// Where file systems begin whose guest may go on with a journal that storage says is empty: it was suspended, perhaps.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    may_go_on: Vec<u64>,
}

impl AsLeft {
    /// What an image looks like that nobody here writes to any more, with superblocks at these places; and whether its guest is still to
    /// be told of a flush that has failed.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn look(image: &File, superblocks: &[u64], untold: Option<String>) -> anyhow::Result<Self> {
        let sums = superblocks.iter().map(|at| Ok((*at, sum_at(image, *at)?))).collect::<std::io::Result<_>>()?;
        Ok(AsLeft { stamp: Stamp::of(image)?, superblocks: sums, untold, is_unused: false, may_go_on: Vec::new() })
    }

    /// The same of an image that no driver of its guest has used, if that is so.
    #[must_use]
    pub fn unused(self, is_unused: bool) -> Self {
        AsLeft { is_unused, ..self }
    }

    /// The same, with the file systems whose guest may go on though their journals are empty.
    #[must_use]
    pub fn going_on(self, may_go_on: Vec<u64>) -> Self {
        AsLeft { may_go_on, ..self }
    }
}

/// Of a superblock; of what there is of it.
fn sum_at(image: &File, at: u64) -> std::io::Result<u64> {
    let mut bytes = [0; SUPERBLOCK_BYTES];
    let read = image.read_at(&mut bytes, at)?;
    Ok(image_file::sum(&bytes[..read]))
}

impl LeftImage {
    pub fn of(path: &Path, file: &File, as_left: Option<AsLeft>) -> anyhow::Result<Self> {
        let is = file.metadata().with_context(|| format!("looking for {}", path.display()))?;
        Ok(LeftImage { path: path.to_owned(), device: is.dev(), inode: is.ino(), block_device: is.rdev(), as_left })
    }

    /// Why it is not what the guest of that process had.
    pub fn check(&self, pid: i32) -> anyhow::Result<()> {
        let path = self.path.display();
        let file =
            File::open(&self.path).with_context(|| format!("opening {path}, which the guest of process {pid} has"))?;
        let is = file.metadata().with_context(|| format!("looking for {path}"))?;
        anyhow::ensure!(
            (is.dev(), is.ino(), is.rdev()) == (self.device, self.inode, self.block_device),
            "{path} is another file than the one that the guest of process {pid} has: put that one back in its place, or end that process"
        );
        let Some(as_left) = &self.as_left else {
            log::warn!("{path}: the amberlog that left it was an earlier one, and did not note what it looked like");
            return Ok(());
        };
        self.check_stamp(as_left, &file, pid)?;
        for (at, sum) in &as_left.superblocks {
            let now = sum_at(&file, *at).with_context(|| format!("reading {path}"))?;
            anyhow::ensure!(now == *sum, "{}", self.refusal(pid, &format!("has another superblock at byte {at} now")));
        }
        Ok(())
    }

    fn check_stamp(&self, as_left: &AsLeft, file: &File, pid: i32) -> anyhow::Result<()> {
        let now = Stamp::of(file).with_context(|| format!("looking at {}", self.path.display()))?;
        match as_left.stamp.became(&now) {
            None => Ok(()),
            Some(what) => anyhow::bail!("{}", self.refusal(pid, &what)),
        }
    }

    fn refusal(&self, pid: i32, what: &str) -> String {
        format!(
            "{} {what}, while the guest of process {pid} was left without a daemon: that guest would write what it has in memory over it, and \
             is not served any more; end that process, and the image is served as it is",
            self.path.display()
        )
    }

    pub fn untold(&self) -> Option<&str> {
        self.as_left.as_ref()?.untold.as_deref()
    }
}

/// The images of a guest that was left.
#[derive(Debug)]
pub struct LeftImages {
    /// Of which process.
    pub pid: i32,
    /// In the order of its disks.
    pub images: Vec<LeftImage>,
}

impl LeftImages {
    /// Whether the images, which are locked by now, in order, are still as they were left.
    ///
    /// # Errors
    /// When one is not.
    pub fn check<'a>(&self, files: impl Iterator<Item = &'a File>) -> anyhow::Result<()> {
        for (image, file) in self.images.iter().zip(files) {
            if let Some(as_left) = &image.as_left {
                image.check_stamp(as_left, file, self.pid)?;
            }
        }
        Ok(())
    }

    /// Which images, in their order, a driver of the guest has used, for all that is known.
    pub fn used(&self) -> Vec<bool> {
        self.images.iter().map(|image| !image.as_left.as_ref().is_some_and(|as_left| as_left.is_unused)).collect()
    }

    /// Of each image, by its place in the order, the file systems whose guest may go on though their journals are empty.
    pub fn going_on(&self) -> impl Iterator<Item = (usize, &[u64])> {
        self.images
            .iter()
            .enumerate()
            .filter_map(|(index, image)| Some((index, &image.as_left.as_ref()?.may_go_on[..])))
    }

    /// Of which images, by their place in the order, the guest is to be told that a flush has failed.
    pub fn untold(&self) -> impl Iterator<Item = (usize, &str)> {
        self.images.iter().enumerate().filter_map(|(index, image)| Some((index, image.untold()?)))
    }
}
