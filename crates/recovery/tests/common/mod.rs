//! Images from the real mke2fs, logs from our builder, and the real e2fsck as the judge.

#![allow(dead_code, reason = "each test program uses its own part")]

use extfs::{FileSystem, ReadAt};
use jbd2::build::{LogBuilder, Transaction};
use jbd2::{Checksum, Features, Format, SuperblockEdit};
use recovery::{Access, Disk, LogPlace, locate};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// A directory for images, in memory where there is one for files: flushes to a busy disk take longer than all the rest.
pub fn scratch() -> tempfile::TempDir {
    let memory = Path::new("/dev/shm");
    let made = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() };
    made.or_else(|_| tempfile::tempdir()).expect("a temporary directory")
}

/// How many cases a test with random input runs: `AMBERLOG_CASES`, or `default`.
pub fn cases(default: u32) -> u32 {
    std::env::var("AMBERLOG_CASES").ok().map_or(default, |text| text.parse().expect("AMBERLOG_CASES is a number"))
}

pub fn output(command: &mut Command) -> Output {
    command.env("E2FSCK_CONFIG", "/dev/null").env("LC_ALL", "C").env("E2FSCK_TIME", "2000000000");
    match command.output() {
        Ok(output) => output,
        Err(error) => panic!("{command:?} (e2fsprogs is needed): {error}"),
    }
}

pub fn run(command: &mut Command) {
    let output = output(command);
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {text}");
}

/// Runs debugfs commands on an image, with write access.
pub fn debugfs(image: &Path, commands: &[&str]) {
    for one in commands {
        run(Command::new("debugfs").arg("-w").args(["-R", one]).arg(image));
    }
}

/// Replays with the judge. Returns whether it had nothing to complain of, and what it said.
pub fn e2fsck(image: &Path, journal: Option<&Path>) -> (Option<i32>, String) {
    let mut command = Command::new("timeout");
    command.args(["60", "e2fsck", "-y", "-E", "journal_only"]);
    if let Some(journal) = journal {
        command.arg("-j").arg(journal);
    }
    let output = output(command.arg(image));
    let text = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    (output.status.code(), text)
}

/// What an image is made as.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    pub block_size: u32,
    pub external: bool,
    pub ext3: bool,
    pub wide: bool,
}

/// An image that needs recovery but has an empty log.
pub struct Image {
    pub shape: Shape,
    pub path: PathBuf,
    pub journal_path: Option<PathBuf>,
    pub file_system: FileSystem,
    /// Whose blocks the log's are: the file system, or the journal device.
    pub holder: FileSystem,
    /// Free blocks.
    pub homes: Vec<u64>,
}

const JOURNAL_UUID: &str = "12345678-9abc-def0-1234-56789abcdef0";

impl Image {
    pub fn make(directory: &Path, shape: Shape) -> Image {
        let size = shape.block_size;
        let name = format!("{size}-{}-{}-{}", shape.external, shape.ext3, shape.wide);
        let path = directory.join(&name);
        let blocks = 4096.to_string();
        let mut mke2fs = Command::new("mke2fs");
        mke2fs.args(["-q", "-F", "-b", &size.to_string(), "-E", "nodiscard,lazy_itable_init=1"]);
        mke2fs.args(["-t", if shape.ext3 { "ext3" } else { "ext4" }]);
        if !shape.ext3 {
            mke2fs.args(["-O", if shape.wide { "64bit" } else { "^64bit" }]);
        }
        if shape.external {
            mke2fs.args(["-O", "^has_journal"]);
        } else {
            mke2fs.args(["-J", &format!("size={}", 1024 * size / (1 << 20))]);
        }
        run(mke2fs.arg(&path).arg(&blocks));
        let journal_path = shape.external.then(|| {
            // mke2fs -J device= wants a block device, so the two are joined by hand.
            let journal = directory.join(format!("{name}.journal"));
            let mut mke2fs = Command::new("mke2fs");
            mke2fs.args(["-q", "-F", "-b", &size.to_string(), "-O", "journal_dev", "-U", JOURNAL_UUID]);
            run(mke2fs.arg(&journal).arg("1030"));
            debugfs(&path, &["feature has_journal", &format!("ssv journal_uuid {JOURNAL_UUID}"), "ssv journal_inum 0"]);
            journal
        });
        debugfs(&path, &["feature needs_recovery"]);
        let disk = Disk::open(&path, Access::Look).expect("an image");
        let journal = journal_path.as_deref().map(|path| Disk::open(path, Access::Look).expect("a journal"));
        let located = locate(&disk, journal.as_ref()).expect("a file system").remove(0);
        let file_system = located.file_system;
        let holder = match located.log {
            LogPlace::Internal => file_system.clone(),
            LogPlace::Device(device) => device,
            other => panic!("{other:?}"),
        };
        let bounds = recovery::HomeBounds::new(&file_system);
        // The end of a fresh file system is free.
        let homes = (4096 - 400..4090).filter(|block| bounds.contains(*block)).collect::<Vec<_>>();
        assert!(homes.len() > 300, "{shape:?}: {}", homes.len());
        Image { shape, path, journal_path, file_system, holder, homes }
    }

    pub fn copy_to(&self, directory: &Path, name: &str) -> Copy {
        let path = directory.join(name);
        std::fs::copy(&self.path, &path).expect("room for a copy");
        let journal_path = self.journal_path.as_ref().map(|from| {
            let to = directory.join(format!("{name}.journal"));
            std::fs::copy(from, &to).expect("room for a copy");
            to
        });
        Copy { path, journal_path }
    }

    /// Byte, on the disk that the log is on, of log block `position`.
    pub fn log_offset(&self, position: u32) -> u64 {
        let extents = self.holder.journal.extents(&self.holder.superblock);
        let extent = extents.iter().rfind(|extent| extent.log <= position).expect("a journal block");
        (extent.physical + u64::from(position - extent.log)) * u64::from(self.shape.block_size)
    }

    pub fn superblock_position(&self) -> u32 {
        self.holder.journal.superblock_position()
    }

    /// Blocks that belong to the journal and not to what is recovered.
    pub fn journal_blocks(&self) -> Vec<u64> {
        if self.shape.external {
            return Vec::new();
        }
        let extents = self.file_system.journal.extents(&self.file_system.superblock);
        extents.iter().flat_map(|extent| extent.physical..extent.physical + u64::from(extent.count)).collect()
    }
}

pub struct Copy {
    pub path: PathBuf,
    pub journal_path: Option<PathBuf>,
}

impl Copy {
    pub fn log_file(&self) -> File {
        let path = self.journal_path.as_ref().unwrap_or(&self.path);
        File::options().read(true).write(true).open(path).expect("an image")
    }

    pub fn recover(&self, dry_run: bool) -> Result<recovery::Report, recovery::Error> {
        let access = if dry_run { Access::Read } else { Access::Write };
        let disk = Disk::open(&self.path, access)?;
        let journal = self.journal_path.as_deref().map(|path| Disk::open(path, access)).transpose()?;
        recovery::recover_disk(&disk, journal.as_ref(), recovery::Options { dry_run })?.remove(0).result
    }

    pub fn length(&self) -> u64 {
        std::fs::metadata(&self.path).expect("an image").len()
    }

    pub fn bytes(&self) -> Vec<u8> {
        std::fs::read(&self.path).expect("an image")
    }

    pub fn journal_bytes(&self) -> Vec<u8> {
        self.journal_path.as_ref().map_or_else(Vec::new, |path| std::fs::read(path).expect("a journal"))
    }
}

/// How a log is written.
#[derive(Clone, Copy, Debug)]
pub struct LogShape {
    pub checksum: Checksum,
    pub wide: bool,
    pub async_commit: bool,
    pub version_1: bool,
    pub start: u32,
    pub sequence: u32,
    pub errno: i32,
}

impl LogShape {
    pub fn simple(checksum: Checksum) -> Self {
        LogShape { checksum, wide: true, async_commit: false, version_1: false, start: 5, sequence: 7, errno: 0 }
    }
}

/// Turns the journal superblock on `copy` into one that says what `shape` says, and writes it.
pub fn open_log(image: &Image, copy: &Copy, shape: &LogShape) -> (Vec<u8>, Format) {
    let file = copy.log_file();
    let offset = image.log_offset(image.superblock_position());
    let mut raw = vec![0; image.shape.block_size as usize];
    file.read_exact_at(&mut raw, offset).expect("a journal superblock");
    let put = |raw: &mut [u8], at: usize, value: u32| raw[at..at + 4].copy_from_slice(&value.to_be_bytes());
    if shape.version_1 {
        put(&mut raw, 4, 3);
        raw[0x24..].fill(0);
    } else {
        let mut incompat = Features::REVOKE;
        incompat |= if shape.wide { Features::WIDE } else { 0 };
        incompat |= if shape.async_commit { Features::ASYNC_COMMIT } else { 0 };
        incompat |= match shape.checksum {
            Checksum::V2 => Features::CSUM_V2,
            Checksum::V3 => Features::CSUM_V3,
            _ => 0,
        };
        put(&mut raw, 0x24, u32::from(shape.checksum == Checksum::V1));
        put(&mut raw, 0x28, incompat);
        raw[0x50] = if matches!(shape.checksum, Checksum::V2 | Checksum::V3) { 4 } else { 0 };
        put(&mut raw, 0xfc, 0);
    }
    SuperblockEdit::new(&mut raw)
        .expect("a journal")
        .start(shape.start)
        .sequence(shape.sequence)
        .errno(shape.errno)
        .seal();
    file.write_all_at(&raw, offset).expect("room");
    let format = jbd2::Superblock::parse(&raw).expect("a good superblock").1;
    (raw, format)
}

/// Writes transactions into the log on `copy`; returns the builder and the log blocks written, in order.
pub fn write_log(
    image: &Image,
    copy: &Copy,
    mut builder: LogBuilder,
    transactions: &[Transaction],
    last_uncommitted: bool,
) -> (LogBuilder, Vec<u32>) {
    let file = copy.log_file();
    let mut positions = Vec::new();
    let mut sink = |position: u32, block: &[u8]| {
        positions.push(position);
        file.write_all_at(block, image.log_offset(position)).expect("room");
    };
    for (index, transaction) in transactions.iter().enumerate() {
        if last_uncommitted && index + 1 == transactions.len() {
            builder.body(transaction, &mut sink);
        } else {
            builder.transaction(transaction, &mut sink);
        }
    }
    (builder, positions)
}

/// Blocks (of the file system's size) in which two images differ.
pub fn differing_blocks(a: &[u8], b: &[u8], block_size: u32, blocks: u64) -> Vec<u64> {
    let size = block_size as usize;
    (0..blocks)
        .filter(|block| {
            let from = *block as usize * size;
            a.get(from..from + size) != b.get(from..from + size)
        })
        .collect()
}

/// A disk in memory, for the library's own traits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryDisk {
    pub bytes: Vec<u8>,
}

impl ReadAt for MemoryDisk {
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> std::io::Result<()> {
        self.bytes.read_at(offset, buffer)
    }

    fn size(&self) -> u64 {
        self.bytes.len() as u64
    }
}
