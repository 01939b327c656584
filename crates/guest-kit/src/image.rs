//! Makes disk images of every kind that guests are tested on: ext4 and ext3, any block size, with
//! internal, external or no journal, whole-disk or partitioned, empty or with a root file system.
//! No root privileges, no loop devices, no mounts.
//!
//! Failure story: the tools of e2fsprogs and util-linux do the work; what they complain of is the
//! error. Images are sparse files, overwritten if they exist.

use crate::assets::Assets;
use crate::error::{Error, FileContext, Result};
use crate::program::{command, run};
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use tempfile::TempDir;

/// Bytes of a MiB.
pub const MIB: u64 = 1 << 20;

/// Where a file system's journal is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Journal {
    /// In the file system, of this many MiB.
    Internal(u32),
    /// On a disk of its own, made by [`journal_device`]. In the guest, mount with
    /// `-o journal_path=/dev/vdb`: the image cannot know the guest's device number.
    External(PathBuf),
    /// None.
    None,
}

/// A place in a file that holds a file system: the whole file, or a partition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileSystem {
    /// The image.
    pub image: PathBuf,
    /// Where in the image the file system begins, in bytes.
    pub offset: u64,
    /// The image of its external journal.
    pub external_journal: Option<PathBuf>,
}

impl FileSystem {
    /// The file system that fills the image from its start, with its journal inside.
    pub fn whole(image: impl Into<PathBuf>) -> Self {
        Self { image: image.into(), offset: 0, external_journal: None }
    }

    /// How e2fsprogs spells it.
    pub(crate) fn argument(&self) -> String {
        let image = self.image.to_string_lossy();
        if self.offset == 0 { image.into_owned() } else { format!("{image}?offset={}", self.offset) }
    }
}

/// The recipe of an ext3 or ext4 file system.
#[derive(Clone, Debug)]
pub struct ExtRecipe {
    /// Its size in MiB.
    pub size_mib: u32,
    /// Bytes of a block: 1024, 2048 or 4096; up to 65536 for guests that can.
    pub block_bytes: u32,
    /// ext3: indirect blocks, no extents, no checksums.
    pub ext3: bool,
    /// Its journal.
    pub journal: Journal,
    /// Features for `mke2fs -O` beyond the defaults: "^64bit", "metadata_csum_seed".
    pub features: Vec<String>,
    /// Further words for `mke2fs`: "-C", "65536".
    pub arguments: Vec<String>,
    /// A directory whose content the file system gets.
    pub content: Option<PathBuf>,
}

impl ExtRecipe {
    /// ext4 with 4 KB blocks and an internal journal.
    pub fn ext4(size_mib: u32, journal_mib: u32) -> Self {
        Self {
            size_mib,
            block_bytes: 4096,
            ext3: false,
            journal: Journal::Internal(journal_mib),
            features: Vec::new(),
            arguments: Vec::new(),
            content: None,
        }
    }

    /// ext3 with 4 KB blocks and an internal journal.
    pub fn ext3(size_mib: u32, journal_mib: u32) -> Self {
        Self { ext3: true, ..Self::ext4(size_mib, journal_mib) }
    }

    /// Makes an image that holds nothing else.
    pub fn make(&self, image: &Path) -> Result<FileSystem> {
        create_sparse(image, u64::from(self.size_mib) * MIB)?;
        self.make_at(image, 0)
    }

    /// Makes the file system in an existing image, from byte `offset` on.
    pub fn make_at(&self, image: &Path, offset: u64) -> Result<FileSystem> {
        let mut tool = command("mke2fs")?;
        tool.args(["-F", "-q", "-t", if self.ext3 { "ext3" } else { "ext4" }]);
        tool.args(["-b", &self.block_bytes.to_string()]);
        let mut extended = "nodiscard,lazy_itable_init=0,lazy_journal_init=0".to_owned();
        if offset != 0 {
            extended.push_str(&format!(",offset={offset}"));
        }
        tool.args(["-E", &extended]);
        let mut features = self.features.clone();
        match &self.journal {
            Journal::Internal(mib) => drop(tool.args(["-J", &format!("size={mib}")])),
            Journal::External(_) | Journal::None => features.push("^has_journal".to_owned()),
        }
        if !features.is_empty() {
            tool.args(["-O", &features.join(",")]);
        }
        if let Some(content) = &self.content {
            tool.arg("-d").arg(content);
        }
        tool.args(&self.arguments);
        tool.arg(image).arg(format!("{}k", u64::from(self.size_mib) * 1024));
        run(&mut tool, &[0])?;
        let mut file_system = FileSystem { image: image.to_owned(), offset, external_journal: None };
        if let Journal::External(device) = &self.journal {
            attach_journal(&file_system, device)?;
            file_system.external_journal = Some(device.clone());
        }
        Ok(file_system)
    }
}

/// Makes an external journal device; `block_bytes` must be that of the file system it will serve.
pub fn journal_device(image: &Path, size_mib: u32, block_bytes: u32) -> Result<()> {
    create_sparse(image, u64::from(size_mib) * MIB)?;
    let mut tool = command("mke2fs")?;
    tool.args(["-F", "-q", "-O", "journal_dev", "-b", &block_bytes.to_string()]).arg(image);
    run(&mut tool, &[0]).map(drop)
}

/// Joins a file system made without a journal and a journal device, as `mke2fs -J device=` does;
/// that insists on block devices, so here the two superblocks are edited. Fields as in the kernel's
/// documentation, filesystems/ext4: `s_uuid` and `s_blocksize`-dependent place of the journal's
/// superblock; `s_nr_users` and `s_users` of it.
pub fn attach_journal(file_system: &FileSystem, device: &Path) -> Result<()> {
    const SUPERBLOCK: u64 = 1024;
    const UUID: u64 = 0x68;
    const LOG_BLOCK_SIZE: u64 = 0x18;
    const JOURNAL_USERS_COUNT: u64 = 0x40;
    const JOURNAL_USERS: u64 = 0x100;
    let journal = OpenOptions::new().read(true).write(true).open(device).at("open", device)?;
    let mut uuid = [0; 16];
    journal.read_exact_at(&mut uuid, SUPERBLOCK + UUID).at("read", device)?;
    let mut log = [0; 4];
    journal.read_exact_at(&mut log, SUPERBLOCK + LOG_BLOCK_SIZE).at("read", device)?;
    let journal_superblock = match u32::from_le_bytes(log) {
        0 => 2 * 1024,
        shift @ 1..=6 => 1024 << shift,
        shift => {
            let problem = format!("its block size, 2^{shift} KB, is beyond 64 KB");
            return Err(Error::Image { image: device.to_owned(), problem });
        }
    };
    let mut own_uuid = [0; 16];
    let image = File::open(&file_system.image).at("open", &file_system.image)?;
    image.read_exact_at(&mut own_uuid, file_system.offset + SUPERBLOCK + UUID).at("read", &file_system.image)?;
    journal.write_all_at(&1u32.to_be_bytes(), journal_superblock + JOURNAL_USERS_COUNT).at("write", device)?;
    journal.write_all_at(&own_uuid, journal_superblock + JOURNAL_USERS).at("write", device)?;

    let hex: String = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
    let dashed = [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-");
    for request in ["feature has_journal".to_owned(), format!("ssv journal_uuid {dashed}")] {
        let mut tool = command("debugfs")?;
        tool.args(["-w", "-R", &request]).arg(file_system.argument());
        run(&mut tool, &[0])?;
    }
    Ok(())
}

/// Makes (or empties) a sparse file of `bytes`.
pub fn create_sparse(image: &Path, bytes: u64) -> Result<()> {
    let file = File::create(image).at("create", image)?;
    file.set_len(bytes).at("set the size of", image)
}

/// Copies an image, keeping it sparse.
pub fn copy_image(from: &Path, to: &Path) -> Result<()> {
    let mut tool = command("cp")?;
    tool.args(["--sparse=always", "--reflink=auto", "--"]).arg(from).arg(to);
    run(&mut tool, &[0]).map(drop)
}

/// Kinds of partition tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PartitionTable {
    /// Master boot record.
    Mbr,
    /// GUID partition table.
    Gpt,
}

/// Makes an image with Linux partitions of the given sizes; gives their offsets in bytes.
pub fn partitioned(image: &Path, table: PartitionTable, sizes_mib: &[u32]) -> Result<Vec<u64>> {
    let mut offset = MIB;
    let mut script = match table {
        PartitionTable::Mbr => "label: dos\nunit: sectors\n".to_owned(),
        PartitionTable::Gpt => "label: gpt\nunit: sectors\n".to_owned(),
    };
    let mut offsets = Vec::new();
    for size in sizes_mib {
        let bytes = u64::from(*size) * MIB;
        script.push_str(&format!("start={}, size={}, type=L\n", offset / 512, bytes / 512));
        offsets.push(offset);
        offset += bytes;
    }
    // Room for the second copy of a GPT.
    partition(image, offset + MIB, &script)?;
    Ok(offsets)
}

/// Makes an image of `bytes` with the partitions of a script of sfdisk's.
pub fn partition(image: &Path, bytes: u64, script: &str) -> Result<()> {
    create_sparse(image, bytes)?;
    let mut tool = command("sfdisk")?;
    let mut child = tool
        .arg("--quiet")
        .arg(image)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .at("run sfdisk on", image)?;
    let written = child.stdin.take().map(|mut stdin| stdin.write_all(script.as_bytes()));
    let output = child.wait_with_output().at("run sfdisk on", image)?;
    if !output.status.success() || !matches!(written, Some(Ok(()))) {
        return Err(Error::Program {
            command: format!("sfdisk {}", image.display()),
            status: output.status.to_string(),
            output: String::from_utf8_lossy(&output.stderr).into_owned(),
        });
    }
    Ok(())
}

/// A directory with everything that a guest's root file system needs, for
/// [`ExtRecipe::content`]; boot it with [`crate::GuestSpec::root`].
pub fn root_directory() -> Result<TempDir> {
    let temporary = std::env::temp_dir();
    let directory = tempfile::tempdir().at("create a directory in", &temporary)?;
    Assets::get()?.base_tree().write_to(directory.path())?;
    Ok(directory)
}
