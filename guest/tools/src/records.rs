//! The record writer: writes numbered records, makes each durable, and only then tells the host.

use crate::options::Options;
use crate::random::Random;
use crate::record::{Order, RecordLayout};
use crate::report::{CHANNEL, DAMAGED, Report};
use crate::{Result, at};
use rustix::fs::{Advice, OFlags, fadvise};
use std::collections::BTreeMap;
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
/// [--stream NAME] [--report FILE] [--begun FILE] [--read-back]` and the options of [`RecordLayout::from_options`]. The file
/// `--begun` is made as soon as a record has been acknowledged. With `--read-back` one that was acknowledged is read after each record: see
/// [`ReadBack`]. With `--verify N` nothing is written: the records up to N, which were acknowledged, are looked for, and
/// `expected=.. faults=..` is told.
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
    let is_read_back = options.flag("read-back");
    options.finish()?;

    let mut report = Report::open(&channel, &stream)?;
    let mut read_back = is_read_back.then(|| ReadBack::new(&channel, &stream, layout.seed)).transpose()?;
    let directory = Path::new(&directory);
    std::fs::create_dir_all(directory).map_err(at("create", directory))?;
    let files = (0..layout.files)
        .map(|file| {
            let path = directory.join(layout.file_name(file));
            let mut open = OpenOptions::new();
            open.read(is_read_back).write(true).create(true).truncate(true);
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
        if let Some(read_back) = &mut read_back {
            read_back.look(&layout, &files, record)?;
        }
    }
    Ok(())
}

/// So often is told how many were read back.
const TOLD_EVERY: u64 = 16;

/// Records that were acknowledged are read while more are written, each place as it was written last: what the kernel has in its cache, and every other
/// time what the disk gives, as far as the kernel lets its pages go. How many were read is acknowledged on the stream NAME-read-back.
struct ReadBack {
    report: Report,
    stream: String,
    random: Random,
    /// The last record of each place that is written over.
    newest: BTreeMap<(u64, u64), u64>,
    count: u64,
}

impl ReadBack {
    fn new(channel: &str, stream: &str, seed: u64) -> Result<Self> {
        let report = Report::open(channel, &format!("{stream}-read-back"))?;
        let random = Random::of(seed, u64::MAX);
        Ok(Self { report, stream: stream.to_owned(), random, newest: BTreeMap::new(), count: 0 })
    }

    /// Reads one of the records up to `last`, which was acknowledged just now.
    fn look(&mut self, layout: &RecordLayout, files: &[File], last: u64) -> Result<()> {
        if layout.order != Order::Append {
            self.newest.insert(layout.place(last), last);
        }
        let drawn = self.random.below(last + 1);
        let place = layout.place(drawn);
        let record = self.newest.get(&place).copied().unwrap_or(drawn);
        let (file, offset) = place;
        let from = &files[usize::try_from(file).expect("files are few")];
        let is_from_disk = self.count % 2 == 1;
        if is_from_disk {
            // What the journal needs still stays in the cache, and is read there.
            fadvise(from, 0, None, Advice::DontNeed).map_err(|error| format!("the cache is not let go: {error}"))?;
        }
        let mut found = vec![0; usize::try_from(layout.record_bytes).expect("a record is small")];
        let problem = match from.read_exact_at(&mut found, offset) {
            Ok(()) => difference(layout, record, &found),
            Err(error) => Some(format!("it cannot be read: {error}")),
        };
        if let Some(problem) = problem {
            let name = layout.file_name(file);
            let after = if is_from_disk { "once the cache was let go" } else { "from the cache" };
            let told = format!("{}: record {record} at byte {offset} of {name}, read {after}: {problem}", self.stream);
            self.report.mark(&format!("{DAMAGED} {told}"))?;
            return Err(told);
        }
        self.count += 1;
        if self.count % TOLD_EVERY == 1 {
            self.report.acknowledge(self.count)?;
        }
        Ok(())
    }
}

/// What of a record is not as it was written, if anything.
fn difference(layout: &RecordLayout, record: u64, found: &[u8]) -> Option<String> {
    let at = layout.encode(record).iter().zip(found).position(|(one, other)| one != other)?;
    let cell_bytes = usize::try_from(layout.cell_bytes).expect("a cell is small");
    let (cell, start) = (at / cell_bytes, at - at % cell_bytes);
    let bytes = &found[start..start + cell_bytes];
    Some(match layout.decode_cell(bytes, cell as u64) {
        Some(other) => format!("cell {cell} is of record {other}"),
        None if bytes.iter().all(|byte| *byte == 0) => format!("cell {cell} is zeroes"),
        None => format!("cell {cell} differs from byte {at} on"),
    })
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

    /// A page of the guest's that was not copied out in time, lost, or put in the place of another one.
    #[test]
    fn what_is_read_otherwise_than_it_was_written_is_told() {
        const LAST: u64 = 39;
        let directory = tempfile::tempdir().unwrap();
        let told = directory.path().join("told");
        std::fs::write(&told, "").unwrap();
        let layout = RecordLayout { files: 2, order: Order::Overwrite { slots: 4 }, ..RecordLayout::default() };
        let files: Vec<File> = (0..layout.files)
            .map(|file| {
                let path = directory.path().join(layout.file_name(file));
                File::options().read(true).write(true).create_new(true).open(path).unwrap()
            })
            .collect();
        let write = |record: u64, bytes: &[u8]| {
            let (file, offset) = layout.place(record);
            files[usize::try_from(file).unwrap()].write_all_at(bytes, offset).unwrap();
        };
        let mut read_back = ReadBack::new(told.to_str().unwrap(), "records", 1).unwrap();
        for record in 0..=LAST {
            write(record, &layout.encode(record));
            read_back.look(&layout, &files, record).unwrap();
        }
        assert!(std::fs::read_to_string(&told).unwrap().starts_with("ack records-read-back 1\n"));
        let older = (0..LAST).find(|record| layout.place(*record) == layout.place(LAST)).unwrap();
        let mut damaged = layout.encode(LAST);
        damaged[1024 + 100] ^= 1;
        let cases = [
            (layout.encode(older), format!("cell 0 is of record {older}")),
            (vec![0; 4096], "cell 0 is zeroes".to_owned()),
            (damaged, "cell 1 differs from byte 1124 on".to_owned()),
        ];
        for (bytes, expected) in cases {
            write(LAST, &bytes);
            let problem = (0..1000).find_map(|_| read_back.look(&layout, &files, LAST).err()).expect("it is seen");
            assert!(problem.ends_with(&expected), "{problem}");
            assert!(std::fs::read_to_string(&told).unwrap().contains(&format!("mark {DAMAGED} {problem}\n")));
            write(LAST, &layout.encode(LAST));
        }
        let tail = RecordLayout::default();
        assert_eq!(difference(&tail, 7, &tail.encode(7)), None);
    }
}
