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
/// [--stream NAME] [--report FILE]` and the options of [`RecordLayout::from_options`].
pub fn run(mut options: Options) -> Result<()> {
    let layout = RecordLayout::from_options(&mut options)?;
    let directory = options.required("directory")?;
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
    }
    Ok(())
}
