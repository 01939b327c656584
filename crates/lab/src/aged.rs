//! Aged disks for experiments (parameter `used_percent`): made once from a seed, kept among what is built for guests, and
//! copied for every cell.
//!
//! Failure story: an image appears under its name only when it is whole; what is found there is measured again before use.

use crate::error::{FileContext, Result};
use guest_kit::aged::{Aged, AgedRecipe, measure};
use guest_kit::image::{ExtRecipe, copy_image};
use guest_kit::program;
use std::path::PathBuf;

/// The layout score of the 2012 paper's aged disks, in per cent.
pub const SCORE_PERCENT: u8 = 10;

/// The image of a recipe, and what it measures.
///
/// # Errors
/// When it cannot be made, or what is there under its name is no file system.
pub(crate) fn template(base: ExtRecipe, used_percent: u64, seed: u64) -> Result<(PathBuf, Aged)> {
    let used_percent = u8::try_from(used_percent.min(95)).unwrap_or(95);
    let recipe = AgedRecipe { base, used_percent, score_percent: SCORE_PERCENT, seed };
    let directory = program::workspace().join("build/guest/images");
    std::fs::create_dir_all(&directory).at("make", &directory)?;
    let kind = if recipe.base.ext3 { "ext3" } else { "ext4" };
    let path = directory.join(format!(
        "aged-{kind}-{}-{:?}-{used_percent}-{SCORE_PERCENT}-{seed}.img",
        recipe.base.size_mib, recipe.base.journal
    ));
    if !path.is_file() {
        eprintln!("    ageing a disk of {} MiB to {used_percent} %", recipe.base.size_mib);
        let full = path.with_extension(format!("partial-{}", std::process::id()));
        let aged = recipe.make(&full);
        let copied = aged.and_then(|_| copy_image(&full, &path.with_extension("copy")));
        std::fs::remove_file(&full).at("remove", &full)?;
        copied?;
        std::fs::rename(path.with_extension("copy"), &path).at("rename to", &path)?;
    }
    let aged = measure(&path)?;
    eprintln!(
        "    aged disk: {:.1} % in use, layout score {:.3} ({} files, {} blocks)",
        aged.used_percent,
        aged.layout.score().unwrap_or(0.0),
        aged.layout.files,
        aged.layout.blocks
    );
    Ok((path, aged))
}
