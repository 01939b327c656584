//! The host's C compiler on a disk of its own, for guests that compile: too large for an initramfs, and read from the disk as
//! a real guest would. The papers' guests, too, had their programs on another disk than the one that was measured.
//!
//! In the guest, [`MOUNT`] mounts it at /toolchain; `chroot /toolchain` then finds `gcc`, `as`, `ld`, `gzip`, `guest-tools` and
//! the measured file system at /mnt.

use crate::assets::Assets;
use crate::error::{FileContext, Result};
use crate::image::{ExtRecipe, Journal};
use crate::program::{command, find_program, run};
use crate::tree::FileTree;
use std::path::{Path, PathBuf};

/// Shell lines of a guest that has the image as its one read-only disk, and /mnt mounted.
pub const MOUNT: &str = "mkdir -p /toolchain
for disk in /sys/block/vd*; do
    [ \"$(cat $disk/ro)\" = 0 ] || mount -t ext4 -o ro /dev/${disk##*/} /toolchain || fail 'no toolchain'
done
mount -o bind /mnt /toolchain/mnt || fail 'the toolchain has no place for the disk'
mount -o bind /dev /toolchain/dev";

const IMAGE_MIB: u32 = 192;

/// The image in `directory`, made there if it is not there yet. Guests may share it, read-only.
///
/// # Errors
/// When the host has no gcc (scripts/install-packages.sh installs it), or the image cannot be made.
pub fn image(directory: &Path) -> Result<PathBuf> {
    let image = directory.join("toolchain.img");
    if image.is_file() {
        return Ok(image);
    }
    let mut tree = FileTree::new();
    for name in ["mnt", "dev", "tmp"] {
        tree.directory(name);
    }
    for name in ["gcc", "as", "ld", "gzip"] {
        tree.program(&find_program(name)?, &format!("usr/bin/{name}"))?;
    }
    // The compiler proper, where the driver looks for it.
    let output = run(command("gcc")?.arg("-print-prog-name=cc1"), &[0])?;
    let compiler = PathBuf::from(String::from_utf8_lossy(&output.stdout).trim());
    tree.program(&compiler, &compiler.to_string_lossy())?;
    tree.program(Assets::guest_tools()?, "usr/bin/guest-tools")?;
    let content = tempfile::tempdir_in(directory).at("create a directory in", directory)?;
    tree.write_to(content.path())?;
    let mut recipe = ExtRecipe::ext4(IMAGE_MIB, 0);
    recipe.journal = Journal::None;
    recipe.content = Some(content.path().to_owned());
    let partial = directory.join("toolchain.partial");
    recipe.make(&partial)?;
    std::fs::rename(&partial, &image).at("rename to", &image)?;
    Ok(image)
}
