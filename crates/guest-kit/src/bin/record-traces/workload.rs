//! The 2010 paper's workloads and journaling modes, with the sizes that it and its companion (SPE 2012, section 5.1)
//! give.
//!
//! The paper's guests took as long as a Pentium 4 of 3.2 GHz needed; what its compilation did in the processor is
//! a pause here, and the time between two commits is shortened with it, so that there are as many commits.

use crate::{Outcome, sentence};
use guest_kit::image::ExtRecipe;
use guest_tools::options::Options;
use guest_tools::random::Random;
use std::io::{BufWriter, Write};
use std::path::Path;

/// The virtual data disk: 4 GB (Table I), and the default journal of that time (SPE 2012, section 5.2.5).
const IMAGE_MIB: u32 = 4096;
const JOURNAL_MIB: u32 = 128;

/// A journaling mode of the paper.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// ext3's data=writeback, journal on storage.
    Writeback,
    /// ext3's data=ordered, journal on storage.
    Ordered,
    /// ext3's data=journal, journal on storage.
    Journal,
    /// ext3's data=journal, journal retained in the guest's memory.
    Vma,
}

impl Mode {
    /// All of them, in the order of the paper's figures.
    pub const ALL: [Self; 4] = [Self::Writeback, Self::Ordered, Self::Journal, Self::Vma];

    /// Its name in the figures.
    pub fn name(self) -> &'static str {
        match self {
            Self::Writeback => "writeback",
            Self::Ordered => "ordered",
            Self::Journal => "journal",
            Self::Vma => "vma",
        }
    }

    /// The mount option data=.
    pub fn data(self) -> &'static str {
        if self == Self::Vma { "journal" } else { self.name() }
    }

    /// What the kernel calls it when it mounts.
    pub fn kernels_word(self) -> &'static str {
        if self.data() == "journal" { "journalled" } else { self.data() }
    }

    /// Where amberlog puts the journal.
    pub fn placement(self) -> &'static str {
        if self == Self::Vma { "retain" } else { "storage" }
    }
}

/// A workload of the paper.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Workload {
    /// 8 KB appended at a time until a file has 600 MB.
    SeqWrite,
    /// 4 KB written at random places of a file of 512 MB, 128 MB in all.
    RndWrite,
    /// Postmark: 10,000 files in 200 directories, 25,000 transactions.
    Postmark,
    /// A source tree of 17,090 files and 231 MB unpacked.
    Untar,
    /// A kernel compiled from such a tree: 25 MB of objects and images.
    KernelCompile,
}

/// What `--percent` makes of the paper's sizes.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    pub percent: u64,
}

impl Sizes {
    /// The paper's sizes scaled.
    pub fn of(percent: u64) -> Self {
        Self { percent }
    }

    fn scaled(self, full: u64) -> u64 {
        (full * self.percent / 100).max(1)
    }
}

impl Workload {
    /// All of them, in the order of the paper's figures.
    pub const ALL: [Self; 5] = [Self::SeqWrite, Self::RndWrite, Self::Postmark, Self::Untar, Self::KernelCompile];

    /// Its name in the figures.
    pub fn name(self) -> &'static str {
        match self {
            Self::SeqWrite => "seq_write",
            Self::RndWrite => "rnd_write",
            Self::Postmark => "postmark",
            Self::Untar => "untar",
            Self::KernelCompile => "kernel_compile",
        }
    }

    /// The image that all modes begin with: what the workload finds is in it, so that making that is not recorded.
    pub fn make_image(self, sizes: &Sizes, image: &Path, directory: &Path) -> Outcome<()> {
        let mut recipe = ExtRecipe::ext3(IMAGE_MIB, JOURNAL_MIB);
        let content = directory.join("content");
        match self {
            Self::SeqWrite | Self::Postmark | Self::Untar => {}
            Self::RndWrite => {
                std::fs::create_dir(&content).map_err(sentence)?;
                fill(&content.join("file"), sizes.scaled(512)).map_err(sentence)?;
                recipe.content = Some(content.clone());
            }
            Self::KernelCompile => {
                let words =
                    format!("--directory {} --files {}", content.join("sources").display(), sizes.scaled(17_090));
                guest_tools::load::untar(Options::parse(words.split(' ').map(str::to_owned))?)?;
                recipe.content = Some(content.clone());
            }
        }
        recipe.make(image).map_err(sentence)?;
        if content.exists() {
            std::fs::remove_dir_all(&content).map_err(sentence)?;
        }
        Ok(())
    }

    /// Mount options besides the journaling mode. Ninety seconds stand for the 450 that we take a compilation of
    /// 2.6.15 to have lasted on the paper's machine: there, everything that the guest's kernel does by the clock it
    /// does five times as often.
    pub fn more_mount_options(self) -> &'static str {
        if self == Self::KernelCompile { ",commit=1" } else { "" }
    }

    /// What the guest runs in /mnt.
    pub fn script(self, sizes: &Sizes, seed: u64) -> String {
        match self {
            Self::SeqWrite => format!("guest-tools append --file /mnt/file --mib {}", sizes.scaled(600)),
            Self::RndWrite => format!(
                "guest-tools randwrite --existing --file /mnt/file --file-mib {} --mib {} --seed {seed}",
                sizes.scaled(512),
                sizes.scaled(128)
            ),
            Self::Postmark => format!(
                "printf 'set location /mnt\\nset seed {seed}\\nset subdirectories 200\\nset number {}\\nset transactions {}\\nrun\\n' | postmark",
                sizes.scaled(10_000),
                sizes.scaled(25_000)
            ),
            Self::Untar => format!("guest-tools untar --directory /mnt/tree --seed {seed} --files {}", sizes.scaled(17_090)),
            Self::KernelCompile => format!(
                "echo 600 >/proc/sys/vm/dirty_expire_centisecs
                 echo 100 >/proc/sys/vm/dirty_writeback_centisecs
                 guest-tools compile --sources /mnt/sources --objects /mnt/objects --units {} --mib {} --pause-ms 100 --seed {seed}",
                sizes.scaled(900),
                sizes.scaled(25)
            ),
        }
    }
}

/// A file without holes.
fn fill(path: &Path, mib: u64) -> std::io::Result<()> {
    let mut file = BufWriter::with_capacity(1 << 20, std::fs::File::create(path)?);
    let mut random = Random::new(mib);
    let mut block = [0; 4096];
    for _ in 0..mib << 8 {
        random.fill(&mut block[..64]);
        file.write_all(&block)?;
    }
    file.flush()
}
