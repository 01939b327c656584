//! The record writer: writes numbered records, makes each durable, and only then tells the host.

use crate::options::Options;
use crate::record::RecordLayout;
use crate::report::{CHANNEL, Report};
use crate::{Result, at};
use rustix::fs::OFlags;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

/// How a record is made durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Durable {
    Fsync,
    Fdatasync,
    OSync,
}

/// `guest-tools records --directory D [--count N | --forever] [--sync fsync|fdatasync|osync]
/// [--stream NAME] [--report FILE] [--begun FILE]` and the options of [`RecordLayout::from_options`]. The file `--begun` is
/// made as soon as a record has been acknowledged. With `--verify N` nothing is written: the records up to N, which were
/// acknowledged, are looked for, and `expected=.. faults=..` is told.
pub fn run(mut options: Options) -> Result<()> {
    let layout = RecordLayout::from_options(&mut options)?;
    let directory = options.required("directory")?;
    if let Some(last) = options.text("verify") {
        let last = last.parse().map_err(|_| format!("--verify is '{last}', which is no record's number"))?;
        options.finish()?;
        return verify(&layout, Path::new(&directory), last);
    }
    let count = options.number("count", 100, 1..=u64::MAX)?;
    let count = if options.flag("forever") { u64::MAX } else { count };
    let durable = match options.text("sync").as_deref() {
        None | Some("fsync") => Durable::Fsync,
        Some("fdatasync") => Durable::Fdatasync,
        Some("osync") => Durable::OSync,
        Some(other) => return Err(format!("--sync is '{other}'; it must be fsync, fdatasync or osync")),
    };
    let stream = options.text("stream").unwrap_or_else(|| "records".to_owned());
    let channel = options.text("report").unwrap_or_else(|| CHANNEL.to_owned());
    let mut begun = options.text("begun");
    options.finish()?;

    let mut report = Report::open(&channel, &stream)?;
    let directory = Path::new(&directory);
    std::fs::create_dir_all(directory).map_err(at("create", directory))?;
    let files = (0..layout.files)
        .map(|file| {
            let path = directory.join(layout.file_name(file));
            let mut open = OpenOptions::new();
            open.write(true).create(true).truncate(true);
            if durable == Durable::OSync {
                open.custom_flags(OFlags::SYNC.bits().cast_signed());
            }
            open.open(&path).map_err(at("create", &path))
        })
        .collect::<Result<Vec<File>>>()?;
    // A durable record in a file without a durable name would be lost all the same.
    for path in [Some(directory), directory.parent()].into_iter().flatten() {
        let opened = File::open(path).map_err(at("open", path))?;
        opened.sync_all().map_err(at("fsync", path))?;
    }

    for record in 0..count {
        let (file, offset) = layout.place(record);
        let file = &files[usize::try_from(file).expect("files are few")];
        let fail = |error| format!("record {record} is not durable: {error}");
        file.write_all_at(&layout.encode(record), offset).map_err(fail)?;
        match durable {
            Durable::Fsync => file.sync_all().map_err(fail)?,
            Durable::Fdatasync => file.sync_data().map_err(fail)?,
            Durable::OSync => {}
        }
        report.acknowledge(record)?;
        if let Some(begun) = begun.take() {
            File::create(&begun).map_err(at("create", Path::new(&begun)))?;
        }
    }
    Ok(())
}

/// Tells how many of the records up to `last` should be there, and how many are missing or damaged.
fn verify(layout: &RecordLayout, directory: &Path, last: u64) -> Result<()> {
    // A file that is gone has none of its records.
    let files: Vec<Option<Vec<u8>>> =
        (0..layout.files).map(|file| std::fs::read(directory.join(layout.file_name(file))).ok()).collect();
    let verdict = layout.check(&files, Some(last));
    println!("expected={} faults={}", verdict.expected, verdict.faults_count);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_or_damaged_is_counted() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("set");
        let words = |more: &str| {
            let text = format!("--directory {} {more}", path.display());
            Options::parse(text.split_whitespace().map(str::to_owned)).unwrap()
        };
        let begun = directory.path().join("begun");
        run(words(&format!("--count 10 --report /dev/null --begun {}", begun.display()))).unwrap();
        assert!(begun.exists());
        let layout = RecordLayout::default();
        let expected = |last: u64| {
            let files = [std::fs::read(path.join(layout.file_name(0))).ok()];
            layout.check(&files, Some(last)).faults_count
        };
        assert_eq!(expected(9), 0);
        assert!(run(words("--verify 9")).is_ok() && run(words("--verify x")).is_err());
        let file = File::options().write(true).open(path.join(layout.file_name(0))).unwrap();
        file.set_len(8 * 4096).unwrap();
        assert_eq!(expected(9), 2);
    }
}
