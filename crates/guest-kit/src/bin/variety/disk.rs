//! The disks of a case.

use crate::case::{Case, Layout};
use guest_kit::image::{self, ExtRecipe, FileSystem, Journal, MIB};
use guest_kit::{Result, program};
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// What a guest gets.
pub struct Disks {
    /// The file system, for who looks from outside.
    pub file_system: FileSystem,
    /// Its device in the guest.
    pub device: &'static str,
}

const SECTOR: u64 = 512;
/// How much a file system may grow.
const ROOM_MIB: u64 = 64;

impl Disks {
    /// Makes the disks of a case in `directory`.
    pub fn make(case: &Case, directory: &Path) -> Result<Self> {
        let image = directory.join("image");
        let mut recipe = case.recipe.clone();
        if let Some(size_mib) = case.external_mib {
            let journal = external_journal(directory);
            image::journal_device(&journal, size_mib, recipe.block_bytes)?;
            recipe.journal = Journal::External(journal);
        }
        let (offset, device) = lay_out(case.layout, &image, &recipe)?;
        let file_system = recipe.make_at(&image, offset)?;
        Ok(Self { file_system, device })
    }

    /// The file system and its journal in another directory, out of its partition: e2fsck cannot replay a journal in one.
    pub fn copied(&self, directory: &Path) -> Result<FileSystem> {
        let image = directory.join("copy");
        if self.file_system.offset == 0 {
            image::copy_image(&self.file_system.image, &image)?;
        } else {
            let mut words = vec![OsString::from("if="), OsString::from("of=")];
            words[0].push(&self.file_system.image);
            words[1].push(&image);
            let mut tool = program::command("dd")?;
            let skip = format!("skip={}", self.file_system.offset);
            tool.args(&words).args(["bs=1M", "iflag=skip_bytes", "conv=sparse", "status=none", &skip]);
            program::run(&mut tool, &[0])?;
        }
        let external_journal = match &self.file_system.external_journal {
            None => None,
            Some(journal) => {
                let copy = directory.join("journal-copy");
                image::copy_image(journal, &copy)?;
                Some(copy)
            }
        };
        Ok(FileSystem { image, offset: 0, external_journal })
    }
}

fn external_journal(directory: &Path) -> PathBuf {
    directory.join("journal")
}

/// Makes the image, and gives where the file system begins and which device it is.
fn lay_out(layout: Layout, image: &Path, recipe: &ExtRecipe) -> Result<(u64, &'static str)> {
    let bytes = u64::from(recipe.size_mib) * MIB;
    let sectors = bytes / SECTOR;
    let partitioned = |script: String, first: u64, device| {
        image::partition(image, first * SECTOR + bytes + 2 * MIB, &script)?;
        Ok((first * SECTOR, device))
    };
    match layout {
        Layout::Whole => image::create_sparse(image, bytes).map(|()| (0, "/dev/vda")),
        Layout::Roomy => image::create_sparse(image, bytes + ROOM_MIB * MIB).map(|()| (0, "/dev/vda")),
        Layout::Primary => {
            let script = format!("label: dos\nstart=2048, size=4096, type=L\nstart=6144, size={sectors}, type=L\n");
            partitioned(script, 6144, "/dev/vda2")
        }
        Layout::Logical => {
            let extended = sectors + 4096;
            let script = format!(
                "label: dos\ndisk1 : start=2048, size=2048, type=L\ndisk2 : start=4096, size={extended}, type=5\n\
                 disk5 : start=6144, size={sectors}, type=L\n"
            );
            partitioned(script, 6144, "/dev/vda5")
        }
        Layout::Gpt => {
            let script = format!("label: gpt\nstart=2048, size=4096, type=L\nstart=6144, size={sectors}, type=L\n");
            partitioned(script, 6144, "/dev/vda2")
        }
        Layout::Sector63 => partitioned(format!("label: dos\nstart=63, size={sectors}, type=L\n"), 63, "/dev/vda1"),
    }
}
