//! Judges an image from outside, with e2fsprogs: is the file system whole, what is in its files,
//! in which blocks do two images differ. Nothing is mounted; the image is never changed (but by
//! [`replay_with_e2fsck`], whose purpose that is).
//!
//! Failure story: whatever e2fsck says and is not known to be harmless is a problem.

mod forgotten;
mod truncated;

pub use forgotten::forgive_forgotten_orphans;

use crate::error::{Error, FileContext, Result};
use crate::image::{FileSystem, copy_image};
use crate::program::{command, run};
use std::fs::File;
use std::io::Read;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use tempfile::TempDir;

/// What e2fsck says of a file system.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Verdict {
    /// Damage.
    pub problems: Vec<String>,
    /// Free totals in the superblock that any journal replay leaves for the mount to recompute.
    pub stale_totals: Vec<String>,
    /// Files that were open and unlinked, or being truncated, at the crash: left to the next mount.
    pub orphans: Vec<String>,
    /// Inodes that a kernel has forgotten, and their blocks ([`forgive_forgotten_orphans`]).
    pub forgotten: Vec<String>,
    /// The journal has not been replayed, so the rest says little.
    pub needs_recovery: bool,
    /// All that e2fsck printed.
    pub output: String,
}

impl Verdict {
    /// Nothing wrong but stale free totals and orphans, and no journal left to replay.
    pub fn is_consistent(&self) -> bool {
        self.problems.is_empty() && !self.needs_recovery
    }

    /// Not even that.
    pub fn is_clean(&self) -> bool {
        self.is_consistent() && self.stale_totals.is_empty() && self.orphans.is_empty() && self.forgotten.is_empty()
    }

    /// Sorts e2fsck's output, of a run with `-n`, or with `-y` on a copy.
    fn parse(output: &str) -> Self {
        let mut verdict = Self { output: output.to_owned(), ..Self::default() };
        for line in output.lines().map(str::trim).filter(|line| !line.is_empty()) {
            if line.contains("skipping journal recovery") {
                verdict.needs_recovery = true;
            } else if line.starts_with("Free blocks count wrong (") || line.starts_with("Free inodes count wrong (") {
                verdict.stale_totals.push(line.to_owned());
            } else if line.starts_with("Clearing orphaned inode ") || line.starts_with("Truncating orphaned inode ") {
                verdict.orphans.push(line.to_owned());
            } else if !is_harmless(line) {
                verdict.problems.push(line.to_owned());
            }
        }
        verdict
    }
}

/// Headings, totals, answers to questions and optimisations offered.
fn is_harmless(line: &str) -> bool {
    line.starts_with("e2fsck ")
        || line.starts_with("Pass ")
        || line.starts_with("Fix? ")
        || line.starts_with("Optimize? ")
        || line.starts_with("Clear? ")
        || line.starts_with("MMP interval is ")
        // Set while mounted, and what is in the file is then looked at.
        || line.starts_with("Feature orphan_present is set but orphan file is clean")
        || line.contains("could be shorter")
        || line.contains("could be narrower")
        || line.ends_with("WARNING: Filesystem still has errors **********")
        || line.ends_with("FILE SYSTEM WAS MODIFIED *****")
        || (line.contains(" files (") && line.ends_with(" blocks"))
}

/// How far a guest's clock may be ahead of the host's: e2fsck is told that it is so much later.
const CLOCK_LEAD_SECONDS: u64 = 3600;

/// Checks a file system with `e2fsck -fn`. If it has orphans, which `-n` cannot follow, a copy is
/// checked with `-fy`, where everything but the orphans' end counts as a problem all the same (and what e2fsck itself does wrong there,
/// `truncated`).
pub fn check(file_system: &FileSystem) -> Result<Verdict> {
    let verdict = e2fsck(file_system, "-fn")?;
    if verdict.needs_recovery || !has_orphans(file_system)? {
        return Ok(verdict);
    }
    let directory = beside(&file_system.image)?;
    let copy = FileSystem { image: directory.path().join("copy"), ..file_system.clone() };
    copy_image(&file_system.image, &copy.image)?;
    let mut verdict = e2fsck(&copy, "-fy")?;
    truncated::forgive_attributes_let_go(&mut verdict, file_system)?;
    Ok(verdict)
}

/// Whether an error is noted in a file system's superblock: whoever mounts or checks it then trusts no list of orphans.
pub fn has_error_noted(file_system: &FileSystem) -> Result<bool> {
    let output = run(command("dumpe2fs")?.arg("-h").arg(file_system.argument()), &[0])?;
    let text = String::from_utf8_lossy(&output.stdout);
    let state = text.lines().find_map(|line| line.strip_prefix("Filesystem state:"));
    Ok(state.is_some_and(|state| state.contains("with errors")))
}

fn e2fsck(file_system: &FileSystem, how: &str) -> Result<Verdict> {
    let mut tool = command("e2fsck")?;
    // An emulated guest's clock may run seconds ahead of the host's, and is no damage.
    tool.env("E2FSCK_TIME", (seconds_now() + CLOCK_LEAD_SECONDS).to_string()).arg(how);
    if let Some(journal) = &file_system.external_journal {
        tool.arg("-j").arg(journal);
    }
    tool.arg(file_system.argument());
    // 0 fine, 1 corrected, 4 left uncorrected: read the text. 8 and more: it could not work at all.
    let output = run(&mut tool, &[0, 1, 4])?;
    let mut text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.push_str(&String::from_utf8_lossy(&output.stderr));
    let mut verdict = Verdict::parse(&text);
    let code = output.status.code().unwrap_or(-1);
    if code != 0 && verdict == (Verdict { output: text, ..Verdict::default() }) {
        verdict.problems.push(format!("e2fsck ended with {code} and named no reason"));
    }
    Ok(verdict)
}

fn seconds_now() -> u64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// Whether a journal is to be replayed before anything else may be said: the feature `needs_recovery` (bit 2 of
/// `s_feature_incompat`).
pub fn needs_recovery(file_system: &FileSystem) -> Result<bool> {
    let file = File::open(&file_system.image).at("open", &file_system.image)?;
    let mut field = [0; 4];
    file.read_exact_at(&mut field, file_system.offset + 1024 + 0x60).at("read", &file_system.image)?;
    Ok(u32::from_le_bytes(field) & 4 != 0)
}

/// Whether the superblock heads a list of orphans (`s_last_orphan`).
fn has_orphans(file_system: &FileSystem) -> Result<bool> {
    let file = File::open(&file_system.image).at("open", &file_system.image)?;
    let mut field = [0; 4];
    file.read_exact_at(&mut field, file_system.offset + 1024 + 0xe8).at("read", &file_system.image)?;
    Ok(field != [0; 4])
}

/// Replays the journal as e2fsck does, and does nothing else: today's way, and the oracle.
///
/// e2fsck stamps the inodes of orphans that it ends. All replays of one process are told the same time, so that two of
/// them differ in nothing that they were not given.
pub fn replay_with_e2fsck(file_system: &FileSystem) -> Result<String> {
    static NOW: OnceLock<String> = OnceLock::new();
    let now = NOW.get_or_init(|| seconds_now().to_string());
    let mut tool = command("e2fsck")?;
    tool.env("E2FSCK_TIME", now).args(["-E", "journal_only", "-y"]);
    if let Some(journal) = &file_system.external_journal {
        tool.arg("-j").arg(journal);
    }
    tool.arg(file_system.argument());
    let output = run(&mut tool, &[0, 1, GAVE_UP])?;
    let mut text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.push_str(&String::from_utf8_lossy(&output.stderr));
    if output.status.code() == Some(GAVE_UP) && !took_a_backup(&text) {
        return Err(Error::Image {
            image: file_system.image.clone(),
            problem: format!("e2fsck did not replay: {text}"),
        });
    }
    Ok(text)
}

/// How e2fsck ends that looked at backups of the superblock and could do nothing with those either.
const GAVE_UP: i32 = 12;

/// Whether e2fsck, which says this, took a backup of the superblock because it did not like the group descriptors: it looks at them before it
/// replays. So does Linux. Where a file system that grows is cut off between its superblock and its descriptors, the journal has
/// both, and any disk can show it: [`replay_with_debugfs`].
pub fn took_a_backup(said: &str) -> bool {
    said.contains("trying backup blocks")
}

/// Replays the journal with e2fsprogs' own code, without a look at anything else before.
pub fn replay_with_debugfs(file_system: &FileSystem) -> Result<()> {
    let mut tool = command("debugfs")?;
    // Bitmaps whose checksums fit only when the journal is replayed are read before that.
    let output = run(tool.args(["-n", "-w", "-R", "journal_run"]).arg(file_system.argument()), &[0])?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    match needs_recovery(file_system)? {
        false => Ok(()),
        true => {
            Err(Error::Image { image: file_system.image.clone(), problem: format!("debugfs did not replay: {said}") })
        }
    }
}

/// Whether an internal journal holds nothing and no error is noted in it: a kernel that mounts says in the file system's
/// superblock that recovery is needed, before its first commit says from where.
pub fn has_empty_journal(file_system: &FileSystem) -> Result<bool> {
    let output = run(command("dumpe2fs")?.arg("-h").arg(file_system.argument()), &[0])?;
    let text = String::from_utf8_lossy(&output.stdout);
    let field = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
    Ok(field("Journal start:") == Some("0") && field("Journal errno:").is_none_or(|errno| errno == "0"))
}

/// The content of a file in an image, or `None` if there is no such file.
pub fn read_file(file_system: &FileSystem, path: &str) -> Result<Option<Vec<u8>>> {
    let directory = beside(&file_system.image)?;
    let target = directory.path().join("file");
    let message = debugfs(file_system, &format!("dump \"{path}\" \"{}\"", target.display()))?;
    if !target.is_file() {
        if message.contains("File not found") {
            return Ok(None);
        }
        let problem = format!("debugfs cannot dump {path}: {}", message.trim());
        return Err(Error::Image { image: file_system.image.clone(), problem });
    }
    std::fs::read(&target).at("read", &target).map(Some)
}

/// Extracts a directory of an image, with all that is below, into a new directory of the host.
/// The result holds a directory of the same last name.
pub fn read_directory(file_system: &FileSystem, path: &str) -> Result<TempDir> {
    let directory = beside(&file_system.image)?;
    // Only root can give files their owners; the complaints about that are not of interest.
    let message = debugfs(file_system, &format!("rdump \"{path}\" \"{}\"", directory.path().display()))?;
    let name = Path::new(path).file_name().unwrap_or_default();
    if !directory.path().join(name).is_dir() {
        let problem = format!("debugfs cannot extract {path}: {}", message.trim());
        return Err(Error::Image { image: file_system.image.clone(), problem });
    }
    Ok(directory)
}

/// The file system block that holds an inode.
pub fn inode_block(file_system: &FileSystem, inode: u32) -> Result<u64> {
    let text = debugfs(file_system, &format!("imap <{inode}>"))?;
    let number = text.split("located at block ").nth(1).and_then(|rest| rest.split(',').next());
    number.and_then(|number| number.parse().ok()).ok_or_else(|| {
        let problem = format!("debugfs cannot locate inode {inode}: {}", text.trim());
        Error::Image { image: file_system.image.clone(), problem }
    })
}

/// Runs one request of debugfs, read-only and without a look at the bitmaps, which may be stale or
/// damaged and are not needed for reading; gives all that it printed.
fn debugfs(file_system: &FileSystem, request: &str) -> Result<String> {
    let mut tool = command("debugfs")?;
    tool.args(["-c", "-R", request]).arg(file_system.argument());
    let output = run(&mut tool, &[0, 1])?;
    let mut text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.push_str(&String::from_utf8_lossy(&output.stderr));
    Ok(text)
}

/// The blocks in which two images differ, as ranges; one that is shorter counts as zeroes.
pub fn differing_blocks(a: &Path, b: &Path, block_bytes: u64) -> Result<Vec<Range<u64>>> {
    const CHUNK: usize = 1 << 20;
    let (file_a, file_b) = (File::open(a).at("open", a)?, File::open(b).at("open", b)?);
    let (mut reader_a, mut reader_b) = (&file_a, &file_b);
    let block = usize::try_from(block_bytes).unwrap_or(CHUNK).clamp(1, CHUNK);
    let chunk = CHUNK - CHUNK % block;
    let (mut bytes_a, mut bytes_b) = (vec![0; chunk], vec![0; chunk]);
    let mut ranges: Vec<Range<u64>> = Vec::new();
    let mut first = 0u64;
    loop {
        let length_a = fill(&mut reader_a, &mut bytes_a).at("read", a)?;
        let length_b = fill(&mut reader_b, &mut bytes_b).at("read", b)?;
        let length = length_a.max(length_b);
        if length == 0 {
            return Ok(ranges);
        }
        for (index, (left, right)) in bytes_a[..length].chunks(block).zip(bytes_b[..length].chunks(block)).enumerate() {
            if left != right {
                let number = first + index as u64;
                match ranges.last_mut() {
                    Some(last) if last.end == number => last.end += 1,
                    _ => ranges.push(number..number + 1),
                }
            }
        }
        first += (chunk / block) as u64;
    }
}

/// Reads until the buffer is full or the file ends, and zeroes the rest.
fn fill(reader: &mut impl Read, buffer: &mut [u8]) -> std::io::Result<usize> {
    let mut filled = 0;
    while filled < buffer.len() {
        match reader.read(&mut buffer[filled..])? {
            0 => break,
            count => filled += count,
        }
    }
    buffer[filled..].fill(0);
    Ok(filled)
}

/// A temporary directory on the image's own file system, where there is room for its content.
fn beside(image: &Path) -> Result<TempDir> {
    let parent = match image.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
        _ => PathBuf::from("."),
    };
    tempfile::Builder::new().prefix(".judge-").tempdir_in(&parent).at("write into", &parent)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::image::{ExtRecipe, Journal, MIB, PartitionTable, journal_device, partitioned};

    pub(super) fn directory() -> TempDir {
        tempfile::tempdir().unwrap()
    }

    /// A directory with one file, for `content`.
    pub(super) fn content() -> TempDir {
        let content = directory();
        std::fs::create_dir(content.path().join("inner")).unwrap();
        std::fs::write(content.path().join("inner/file"), b"content").unwrap();
        content
    }

    #[test]
    fn fresh_images_of_every_kind_are_clean_and_readable() {
        let (directory, content) = (directory(), content());
        let image = directory.path().join("image");
        for ext3 in [false, true] {
            for block_bytes in [1024, 2048, 4096] {
                let recipe =
                    ExtRecipe { ext3, block_bytes, content: Some(content.path().to_owned()), ..ExtRecipe::ext4(64, 8) };
                let file_system = recipe.make(&image).unwrap();
                let verdict = check(&file_system).unwrap();
                assert!(verdict.is_clean(), "{ext3} {block_bytes}: {verdict:?}");
                let file = read_file(&file_system, "/inner/file").unwrap();
                assert_eq!(file.as_deref(), Some(&b"content"[..]));
                assert_eq!(read_file(&file_system, "/inner/other").unwrap(), None);
                let tree = read_directory(&file_system, "/inner").unwrap();
                assert_eq!(std::fs::read(tree.path().join("inner/file")).unwrap(), b"content");
            }
        }
    }

    #[test]
    fn file_systems_in_partitions_are_reached_by_offset() {
        let (directory, content) = (directory(), content());
        let image = directory.path().join("image");
        for table in [PartitionTable::Mbr, PartitionTable::Gpt] {
            let offsets = partitioned(&image, table, &[16, 32]).unwrap();
            assert_eq!(offsets, [MIB, 17 * MIB]);
            for (offset, size) in offsets.into_iter().zip([16, 32]) {
                let mut recipe = ExtRecipe::ext4(size, 4);
                recipe.content = Some(content.path().to_owned());
                let file_system = recipe.make_at(&image, offset).unwrap();
                assert!(check(&file_system).unwrap().is_clean());
                assert!(read_file(&file_system, "/inner/file").unwrap().is_some());
            }
        }
    }

    #[test]
    fn a_guests_clock_may_be_ahead() {
        let directory = tempfile::tempdir().unwrap();
        let file_system = ExtRecipe::ext4(16, 4).make(&directory.path().join("image")).unwrap();
        let ahead = |seconds: u64| {
            let mut tool = command("debugfs").unwrap();
            let request = format!("set_super_value mtime @{}", seconds_now() + seconds);
            run(tool.args(["-w", "-R", &request]).arg(&file_system.image), &[0]).unwrap();
            check(&file_system).unwrap()
        };
        assert!(ahead(600).is_consistent());
        assert!(!ahead(100 * CLOCK_LEAD_SECONDS).is_consistent(), "but no days");
    }

    #[test]
    fn an_external_journal_is_accepted_by_e2fsck() {
        let directory = directory();
        let (image, journal) = (directory.path().join("image"), directory.path().join("journal"));
        for block_bytes in [1024, 4096] {
            journal_device(&journal, 8, block_bytes).unwrap();
            let recipe =
                ExtRecipe { block_bytes, journal: Journal::External(journal.clone()), ..ExtRecipe::ext4(32, 0) };
            let file_system = recipe.make(&image).unwrap();
            let verdict = check(&file_system).unwrap();
            assert!(verdict.is_clean(), "{verdict:?}");
            replay_with_e2fsck(&file_system).unwrap();
        }
    }

    #[test]
    fn damage_is_a_problem_and_not_a_stale_total() {
        let directory = directory();
        let image = directory.path().join("image");
        let file_system = ExtRecipe::ext3(16, 4).make(&image).unwrap();
        // Mark a free block used, behind the file system's back: the block bitmap is then wrong.
        let mut tool = command("debugfs").unwrap();
        tool.args(["-w", "-R", "setb 4000"]).arg(&image);
        run(&mut tool, &[0]).unwrap();
        let verdict = check(&file_system).unwrap();
        assert!(!verdict.is_consistent(), "{verdict:?}");
        assert!(verdict.problems.iter().any(|line| line.contains("Block bitmap differences")));
    }

    #[test]
    fn an_orphan_is_left_to_the_mount_and_hides_no_damage() {
        let (directory, content) = (directory(), content());
        let image = directory.path().join("image");
        let recipe = ExtRecipe { content: Some(content.path().to_owned()), ..ExtRecipe::ext3(16, 4) };
        let file_system = recipe.make(&image).unwrap();
        // As after a crash with an open, unlinked file: no name, no links, on the orphan list.
        let debugfs = |request: &str| {
            let mut tool = command("debugfs").unwrap();
            run(tool.args(["-w", "-R", request]).arg(&image), &[0]).unwrap();
        };
        let inode = 13;
        debugfs("unlink /inner/file");
        debugfs(&format!("sif <{inode}> links_count 0"));
        debugfs(&format!("ssv last_orphan {inode}"));
        let verdict = check(&file_system).unwrap();
        assert!(verdict.is_consistent() && verdict.orphans.len() == 1, "{verdict:?}");
        debugfs("setb 4000");
        assert!(!check(&file_system).unwrap().is_consistent());
    }

    #[test]
    fn an_empty_journal_is_told_from_one_with_something_to_replay_or_an_error() {
        let directory = directory();
        let image = directory.path().join("image");
        let file_system = ExtRecipe::ext3(16, 4).make(&image).unwrap();
        let mut tool = command("debugfs").unwrap();
        run(tool.args(["-w", "-R", "feature needs_recovery"]).arg(&image), &[0]).unwrap();
        assert!(check(&file_system).unwrap().needs_recovery && has_empty_journal(&file_system).unwrap());
        replay_with_e2fsck(&file_system).unwrap();
        assert!(check(&file_system).unwrap().is_consistent());
        // s_start and s_errno of the journal's superblock.
        let said = super::debugfs(&file_system, "bmap <8> 0").unwrap();
        let journal: u64 = said.lines().find_map(|line| line.parse().ok()).unwrap();
        let block_bytes = u64::from(ExtRecipe::ext3(16, 4).block_bytes);
        let set = |field: u64, value: u32| {
            let file = File::options().write(true).open(&image).unwrap();
            file.write_all_at(&value.to_be_bytes(), journal * block_bytes + field).unwrap();
        };
        for field in [0x1c, 0x20] {
            set(field, 1);
            assert!(!has_empty_journal(&file_system).unwrap(), "{field}");
            set(field, 0);
            assert!(has_empty_journal(&file_system).unwrap(), "{field}");
        }
    }

    #[test]
    fn stale_totals_alone_are_consistent_but_not_clean() {
        let directory = directory();
        let image = directory.path().join("image");
        let file_system = ExtRecipe::ext4(16, 4).make(&image).unwrap();
        let mut tool = command("debugfs").unwrap();
        tool.args(["-w", "-R", "ssv free_blocks_count 1"]).arg(&image);
        run(&mut tool, &[0]).unwrap();
        let verdict = check(&file_system).unwrap();
        assert!(verdict.is_consistent() && !verdict.is_clean(), "{verdict:?}");
        assert_eq!(verdict.stale_totals.len(), 1);
    }

    #[test]
    fn differing_blocks_are_ranges_and_a_missing_tail_is_zeroes() {
        let directory = directory();
        let (a, b) = (directory.path().join("a"), directory.path().join("b"));
        let mut bytes = vec![0u8; 3 << 20];
        std::fs::write(&a, &bytes[..2 << 20]).unwrap();
        for at in [4096, 8192, (1 << 20) - 1, (5 << 20) / 2] {
            bytes[at] = 1;
        }
        std::fs::write(&b, &bytes).unwrap();
        let ranges = differing_blocks(&a, &b, 4096).unwrap();
        assert_eq!(ranges, [1..3, 255..256, 640..641]);
        assert_eq!(differing_blocks(&b, &b, 4096).unwrap(), []);
    }
}
