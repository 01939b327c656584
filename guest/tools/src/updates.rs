//! Record updates without any fsync, and a crash in their midst: the 2012 paper's section 5.5. A record of several blocks that
//! was being written back when the system died may be new in one block and old in the next; counting such records is
//! what this is for.
//!
//! The stamps are those of [`crate::record`], with cells of a block.

use crate::options::Options;
use crate::record::{Order, RecordLayout};
use crate::report::{CHANNEL, Report};
use crate::{Result, at};
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::Path;

const BLOCK: u64 = 4096;
const SECTOR: u64 = 512;

/// The layout of the records of a file of `file_mib`.
pub fn layout(record_kib: u64, file_mib: u64, seed: u64) -> RecordLayout {
    let record_bytes = record_kib * 1024;
    let slots = (file_mib << 20) / record_bytes;
    RecordLayout {
        record_bytes,
        cell_bytes: BLOCK.min(record_bytes),
        files: 1,
        order: Order::Overwrite { slots },
        seed,
    }
}

/// `guest-tools updates --file F [--record-kib N] [--file-mib N] [--seed N] --phase create|run [--disk vda] [--crash-kib N]
/// [--first N] [--tell] [--until FILE] [--report FILE]`: `create` writes every record once; `run` updates random ones, beginning with update
/// number `first` (0), each by one `write()`. When N KiB (4096) have been sent to the disk since, it crashes the system, or
/// with `--tell` acknowledges `first` on the stream `limit` and goes on, so that the host can stop the machine in its midst; it then ends between two records once
/// the file `until` is there (a signal would cut a `write()` in two, and with it a record).
pub fn run(mut options: Options) -> Result<()> {
    let path = options.required("file")?;
    let record_kib = options.number("record-kib", 4, 1..=1 << 16)?;
    let file_mib = options.number("file-mib", 32, 1..=1 << 12)?;
    let seed = options.number("seed", 1, 0..=u64::MAX)?;
    let phase = options.required("phase")?;
    let disk = options.text("disk").unwrap_or_else(|| "vda".to_owned());
    let crash_bytes = options.number("crash-kib", 4096, 1..=1 << 24)? * 1024;
    let first = options.number("first", 0, 0..=FIRST_VERSION - 1)?;
    let tell = options.flag("tell");
    let until = options.text("until");
    let channel = options.text("report").unwrap_or_else(|| CHANNEL.to_owned());
    options.finish()?;
    let layout = layout(record_kib, file_mib, seed);
    let Order::Overwrite { slots } = layout.order else { return Err("the layout has no slots".to_owned()) };
    let path = Path::new(&path);
    match phase.as_str() {
        "create" => {
            let mut file = File::create(path).map_err(at("create", path))?;
            // Version 0 of every slot: numbers beyond all updates, so that none is taken for an update.
            for slot in 0..slots {
                file.write_all(&layout.encode(FIRST_VERSION + slot)).map_err(at("write", path))?;
            }
            file.sync_all().map_err(at("fsync", path))
        }
        "run" => {
            let file = OpenOptions::new().write(true).open(path).map_err(at("open", path))?;
            let begin = sent_bytes(&disk)?;
            let mut is_limit_ahead = true;
            for record in first..FIRST_VERSION {
                let (_, offset) = layout.place(record);
                file.write_all_at(&layout.encode(record), offset).map_err(at("write", path))?;
                if is_limit_ahead && record % 8 == 0 && sent_bytes(&disk)? - begin >= crash_bytes {
                    if !tell {
                        return crash();
                    }
                    Report::open(&channel, "limit")?.acknowledge(first)?;
                    is_limit_ahead = false;
                }
                if !is_limit_ahead && until.as_ref().is_some_and(|until| Path::new(until).exists()) {
                    return Ok(());
                }
            }
            Ok(())
        }
        other => Err(format!("--phase is '{other}'; it must be create or run")),
    }
}

/// Numbers of the records that `create` writes.
const FIRST_VERSION: u64 = 1 << 32;

/// How many bytes the kernel has sent to a disk: the seventh number of its `stat`, in sectors.
fn sent_bytes(disk: &str) -> Result<u64> {
    let path = format!("/sys/block/{disk}/stat");
    let text = std::fs::read_to_string(&path).map_err(at("read", &path))?;
    let sectors = text.split_whitespace().nth(6).and_then(|word| word.parse::<u64>().ok());
    sectors.map(|sectors| sectors * SECTOR).ok_or_else(|| format!("{path} has no sectors written"))
}

fn crash() -> Result<()> {
    let path = "/proc/sysrq-trigger";
    std::fs::write(path, "c").map_err(at("write", path))
}

/// What became of the records of a recovered file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Verdict {
    /// All of them.
    pub records: u64,
    /// Those with an update in at least one cell.
    pub updated: u64,
    /// Those whose cells are not all of one version, or are none of ours.
    pub corrupted: u64,
    /// Of those, the one that a commit can cut in two (1 or 0): it begins with cells of the newest version in the file and
    /// goes on with older ones. ext4 takes a handle for every block of a `write()`, so a transaction can end between two.
    pub cut_by_commit: u64,
}

/// Looks at every record of a recovered file.
pub fn judge(layout: &RecordLayout, content: &[u8]) -> Verdict {
    let record_bytes = usize::try_from(layout.record_bytes).unwrap_or(usize::MAX);
    let cell_bytes = usize::try_from(layout.cell_bytes).unwrap_or(usize::MAX);
    let mut verdict = Verdict::default();
    let mut newest = None;
    let mut cut = None;
    for record in content.chunks(record_bytes) {
        verdict.records += 1;
        let versions: Vec<Option<u64>> =
            record.chunks(cell_bytes).zip(0..).map(|(bytes, cell)| layout.decode_cell(bytes, cell)).collect();
        verdict.updated += u64::from(versions.iter().flatten().any(|version| *version < FIRST_VERSION));
        newest = versions.iter().flatten().filter(|version| **version < FIRST_VERSION).max().copied().max(newest);
        let Some(&first) = versions.first() else { continue };
        if first.is_some() && record.len() == record_bytes && versions.iter().all(|version| *version == first) {
            continue;
        }
        verdict.corrupted += 1;
        // A prefix of one version, then one older (the first version of all has the highest numbers).
        let prefix = versions.iter().take_while(|version| **version == first).count();
        let rest = versions.get(prefix).copied().flatten();
        let age = |version: u64| if version >= FIRST_VERSION { 0 } else { version + 1 };
        if let (Some(first), Some(rest)) = (first, rest)
            && versions[prefix..].iter().all(|version| *version == Some(rest))
            && age(rest) < age(first)
        {
            cut = Some(first).max(cut);
        }
    }
    verdict.cut_by_commit = u64::from(cut.is_some() && cut == newest);
    verdict
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_of_two_versions_is_found() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        let words = format!("--file {} --record-kib 16 --file-mib 1 --seed 4 --phase create", path.display());
        run(Options::parse(words.split(' ').map(str::to_owned)).unwrap()).unwrap();
        let layout = layout(16, 1, 4);
        let mut content = std::fs::read(&path).unwrap();
        let found = |content: &[u8]| {
            let Verdict { records, corrupted, cut_by_commit, .. } = judge(&layout, content);
            (records, corrupted, cut_by_commit)
        };
        assert_eq!(found(&content), (64, 0, 0));
        let (_, offset) = layout.place(7);
        let offset = usize::try_from(offset).unwrap();
        let newer = layout.encode(7);
        content[offset..offset + 8192].copy_from_slice(&newer[..8192]);
        assert_eq!(found(&content), (64, 1, 1), "cut while it was the newest");
        content[offset..offset + 16384].copy_from_slice(&newer);
        assert_eq!(found(&content), (64, 0, 0));
        let older = layout.encode(6);
        content[offset + 8192..offset + 12288].copy_from_slice(&older[8192..12288]);
        assert_eq!(found(&content), (64, 1, 0), "new again behind the old cell: no commit does that");
        assert_eq!(found(&content[..content.len() - 1]), (64, 2, 0));
    }
}
