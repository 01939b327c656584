//! Images that are full and old from the start: so many per cent of the blocks in use, files in pieces to a given layout
//! score (Smith and Seltzer, "File System Aging", SIGMETRICS 1997), as the 2012 paper's section 5.2.6 had them from
//! Impressions (Agrawal and others, FAST 2009). The same seed gives the same layout.
//!
//! Nothing is written into the files: e2fsprogs allocates their blocks, in an image that shows it only those blocks free that
//! the file is to get. Every free block is drawn to belong to one of a few generations of files, or to nobody, so that a
//! block's neighbour is of its own kind with the probability that the score asks for; a generation's files are made while
//! only its blocks are free. What stays free is in as small pieces. Sizes are log-normal as Impressions' default (median
//! 13 KB), directories hold 20 files.
//!
//! Failure story: e2fsck repairs what the drawing left marked and must then find the image clean; a score or a filling that
//! came out otherwise is told as measured, not as asked for.

use crate::error::{Error, FileContext, Result};
use crate::image::ExtRecipe;
use crate::program::{command, run};
use extfs::{LayoutScore, ReadAt, file_system, layout_score};
use guest_tools::random::Random;
use std::fmt::Write as _;
use std::fs::File;
use std::io;
use std::ops::RangeInclusive;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Generations of files that take turns on the disk.
const GENERATIONS: usize = 3;
/// Files of a directory.
const FILES_PER_DIRECTORY: u64 = 20;
/// Impressions' default: the logarithm of a size in bytes has this mean and this deviation.
const SIZE_LN_MEAN: f64 = 9.48;
const SIZE_LN_DEVIATION: f64 = 2.46;
/// The largest file, as a part of the file system: one that is all of a generation would leave none for others.
const LARGEST_PART: u64 = 32;
/// An extent tree's leaf or a map's block holds at least so many pieces.
const PIECES_PER_MAP_BLOCK: u64 = 160;

/// The recipe of an aged image.
#[derive(Clone, Debug)]
pub struct AgedRecipe {
    /// The file system to fill; it must be whole-disk, with 4096-byte blocks or smaller.
    pub base: ExtRecipe,
    /// Of all blocks, so many are in use at the end, in per cent.
    pub used_percent: u8,
    /// The score asked for, in per cent: 10 is a score of 0.1.
    pub score_percent: u8,
    /// From which the layout follows.
    pub seed: u64,
}

/// What an image came to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Aged {
    /// Read back from the image.
    pub layout: LayoutScore,
    /// Blocks in use of all, in per cent.
    pub used_percent: f64,
}

/// An image, read block by block.
struct ImageFile(File, u64);

impl ReadAt for ImageFile {
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.0.read_exact_at(buffer, offset)
    }

    fn size(&self) -> u64 {
        self.1
    }
}

impl AgedRecipe {
    /// Makes the image, clean by e2fsck's judgement, and measures it. e2fsprogs writes zeros into ext3's files:
    /// [`crate::image::copy_image`] leaves them out.
    ///
    /// # Errors
    /// When a tool fails, or the file system is too small to be filled so.
    pub fn make(&self, image: &Path) -> Result<Aged> {
        self.base.make(image)?;
        let bad = |problem: String| Error::Image { image: image.to_owned(), problem };
        let list = run(command("dumpe2fs")?.arg(image), &[0])?;
        let free = free_blocks(&String::from_utf8_lossy(&list.stdout));
        let all = u64::from(self.base.size_mib) * (1 << 20) / u64::from(self.base.block_bytes);
        let free_count: u64 = free.iter().map(|range| range.end() - range.start() + 1).sum();
        let wanted = (all * u64::from(self.used_percent.min(100)) / 100).saturating_sub(all - free_count);
        if wanted == 0 || free_count < wanted || free_count == 0 {
            return Err(bad(format!(
                "it cannot be filled to {} %: {free_count} of {all} blocks are free",
                self.used_percent
            )));
        }
        let plan = self.plan(&free, wanted, free_count);
        let directory = tempfile::tempdir().at("create a directory in", &std::env::temp_dir())?;
        let commands = directory.path().join("commands");
        std::fs::write(&commands, self.commands(&plan, &free, wanted, all, directory.path())?)
            .at("write", &commands)?;
        run(command("debugfs")?.arg("-w").arg("-f").arg(&commands).arg(image), &[0])?;
        // What the drawing marked and no file got is freed: e2fsck works the bitmaps out from the files.
        run(command("e2fsck")?.args(["-f", "-y"]).arg(image), &[0, 1])?;
        run(command("e2fsck")?.args(["-f", "-n"]).arg(image), &[0])?;
        measure(image)
    }

    /// Each generation's runs of blocks (first and count), and at the end those of nobody.
    fn plan(&self, free: &[RangeInclusive<u64>], wanted: u64, free_count: u64) -> Vec<Vec<(u64, u64)>> {
        let mut random = Random::new(self.seed);
        let stay = f64::from(self.score_percent.min(99)) / 100.0;
        // A little more than the files take, since the last of a generation's blocks are hard to use up.
        let used = (wanted as f64 / free_count as f64 * 1.05).min(1.0);
        let mut runs: Vec<Vec<(u64, u64)>> = vec![Vec::new(); GENERATIONS + 1];
        let share = |kind: usize| if kind == GENERATIONS { 1.0 - used } else { used / GENERATIONS as f64 };
        let mut kind = 0;
        for block in free.iter().cloned().flatten() {
            if uniform(&mut random) >= stay {
                // To another kind, drawn by its share.
                let mut left = uniform(&mut random) * (1.0 - share(kind));
                let others = (0..=GENERATIONS).filter(|&other| other != kind);
                let mut next = kind;
                for other in others {
                    next = other;
                    left -= share(other);
                    if left < 0.0 {
                        break;
                    }
                }
                kind = next;
            }
            match runs[kind].last_mut() {
                Some((first, count)) if *first + *count == block => *count += 1,
                _ => runs[kind].push((block, 1)),
            }
        }
        runs
    }

    /// debugfs's commands: everything is marked, then generation after generation is freed and filled with files.
    fn commands(
        &self,
        plan: &[Vec<(u64, u64)>],
        free: &[RangeInclusive<u64>],
        wanted: u64,
        all: u64,
        directory: &Path,
    ) -> Result<String> {
        let empty = directory.join("empty");
        std::fs::write(&empty, []).at("write", &empty)?;
        let mut text = String::new();
        let mut add = |line: std::fmt::Arguments<'_>| {
            let _ = text.write_fmt(line);
            text.push('\n');
        };
        for range in free {
            add(format_args!("setb {} {}", range.start(), range.end() - range.start() + 1));
        }
        let mut random = Random::new(!self.seed);
        let (mut files, mut left) = (0, wanted);
        for runs in &plan[..GENERATIONS] {
            for (first, count) in runs {
                add(format_args!("freeb {first} {count}"));
            }
            let blocks: u64 = runs.iter().map(|(_, count)| count).sum();
            // What is left over stays free for the next generation.
            let mut budget = (blocks * 49 / 50).min(left);
            while budget > 0 {
                let mut cost = 0;
                if files % FILES_PER_DIRECTORY == 0 {
                    let name = files / FILES_PER_DIRECTORY;
                    add(format_args!("cd /\nmkdir aged-{name}\ncd aged-{name}"));
                    cost += 1;
                }
                let size = file_blocks(&mut random, u64::from(self.base.block_bytes), all / LARGEST_PART).min(budget);
                cost += size + if size > 4 { 1 + size / PIECES_PER_MAP_BLOCK } else { 0 };
                add(format_args!(
                    "write {} file-{files}\nfallocate file-{files} 0 {}\nsif file-{files} size {}",
                    empty.display(),
                    size - 1,
                    size * u64::from(self.base.block_bytes)
                ));
                files += 1;
                budget = budget.saturating_sub(cost);
                left = left.saturating_sub(cost);
            }
        }
        Ok(text)
    }
}

/// Reads an image's layout score, and how full it is.
///
/// # Errors
/// When it holds no ext file system, or a damaged one.
pub fn measure(image: &Path) -> Result<Aged> {
    let bad = |problem: String| Error::Image { image: image.to_owned(), problem };
    let file = File::open(image).at("open", image)?;
    let bytes = file.metadata().at("look at", image)?.len();
    let disk = ImageFile(file, bytes);
    let found = file_system(&disk, None, 0, bytes).at("read", image)?;
    let superblock = found.ok_or_else(|| bad("it holds no ext file system".to_owned()))?.superblock;
    let layout = layout_score(&disk, &superblock).map_err(|error| bad(error.to_string()))?;
    let list = run(command("dumpe2fs")?.arg(image), &[0])?;
    let free: u64 = free_blocks(&String::from_utf8_lossy(&list.stdout)).iter().map(|r| r.end() - r.start() + 1).sum();
    let used_percent = 100.0 * (1.0 - free as f64 / superblock.blocks_count as f64);
    Ok(Aged { layout, used_percent })
}

/// The free blocks that dumpe2fs lists, group by group.
fn free_blocks(text: &str) -> Vec<RangeInclusive<u64>> {
    let lines = text.lines().filter_map(|line| line.strip_prefix("  Free blocks: "));
    let words = lines.flat_map(|line| line.split(", "));
    words
        .filter_map(|word| {
            let (first, last) = word.trim().split_once('-').unwrap_or((word.trim(), word.trim()));
            Some(first.parse().ok()?..=last.parse().ok()?)
        })
        .collect()
}

/// From 0 to below 1.
fn uniform(random: &mut Random) -> f64 {
    random.below(1 << 53) as f64 / (1u64 << 53) as f64
}

fn file_blocks(random: &mut Random, block_bytes: u64, most: u64) -> u64 {
    let normal: f64 = (0..12).map(|_| uniform(random)).sum::<f64>() - 6.0;
    let bytes = (SIZE_LN_MEAN + SIZE_LN_DEVIATION * normal).exp();
    ((bytes / block_bytes as f64).ceil() as u64).clamp(1, most.max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_is_as_full_and_as_old_as_asked_for_and_the_same_again() {
        let directory = tempfile::tempdir().unwrap();
        let image = directory.path().join("image");
        let near = |aged: &Aged, used_percent: f64, score: f64| {
            assert!((aged.used_percent - used_percent).abs() < 1.5, "{aged:?}");
            assert!((aged.layout.score().unwrap() - score).abs() < 0.03, "{:?}, {aged:?}", aged.layout.score());
            assert!(aged.layout.files > 50, "{aged:?}");
        };
        let recipe = AgedRecipe { base: ExtRecipe::ext3(64, 4), used_percent: 77, score_percent: 10, seed: 4 };
        let aged = recipe.make(&image).unwrap();
        near(&aged, 77.0, 0.1);
        assert_eq!(recipe.make(&image).unwrap(), aged, "the same seed gives the same layout");
        let other = AgedRecipe { base: ExtRecipe::ext4(64, 4), used_percent: 50, score_percent: 60, seed: 5 };
        near(&other.make(&image).unwrap(), 50.0, 0.6);
    }

    #[test]
    fn free_blocks_are_read_and_a_full_image_is_refused() {
        let text = "Group 0: (Blocks 0-99)\n  Free blocks: 5, 7-9\n  Free inodes: 3-4\nGroup 1:\n  Free blocks: \n";
        assert_eq!(free_blocks(text), [5..=5, 7..=9]);
        let directory = tempfile::tempdir().unwrap();
        let recipe = AgedRecipe { base: ExtRecipe::ext3(16, 4), used_percent: 10, score_percent: 10, seed: 1 };
        assert!(recipe.make(&directory.path().join("image")).unwrap_err().to_string().contains("cannot be filled"));
    }
}
