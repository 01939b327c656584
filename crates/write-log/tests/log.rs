//! A log says what was done, in an order that claims nothing durable that is not.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use write_log::{Entry, EntryKind, LoggedFile, WriteLog, entries};

fn kinds(path: &std::path::Path) -> Vec<(u64, String)> {
    let file = File::open(path).unwrap();
    let read: Vec<Entry> = entries(&file).map(|entry| entry.unwrap()).collect();
    read.into_iter()
        .map(|entry| {
            let what = match entry.kind {
                EntryKind::Write(data) => format!("{}x{}", data[0], data.len()),
                EntryKind::Discard(bytes) => format!("discard {bytes}"),
                EntryKind::Flush => "flush".to_owned(),
                EntryKind::Mark(name) => name,
            };
            (entry.offset, what)
        })
        .collect()
}

fn said(offset: u64, what: &str) -> (u64, String) {
    (offset, what.to_owned())
}

#[test]
fn a_flush_stands_before_what_ended_while_it_was_under_way() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("log");
    let log = WriteLog::create(&path).unwrap();
    log.written(512, &[1; 512]);
    let first = log.flush_begins();
    log.written(1024, &[2; 1024]);
    let second = log.flush_begins();
    log.discarded(4096, 8192);
    let third = log.flush_begins();
    log.zeroed(0, 512);
    assert_eq!(kinds(&path), [said(512, "1x512")], "nothing is said of what waits for a flush");
    log.flush_ended(&second, true);
    log.flush_ended(&third, false);
    assert_eq!(kinds(&path).len(), 1);
    log.flush_ended(&first, true);
    log.mark("here");
    let expected = [
        said(512, "1x512"),
        said(0, "flush"),
        said(1024, "2x1024"),
        said(0, "flush"),
        said(4096, "discard 8192"),
        said(0, "0x512"),
        said(0, "here"),
    ];
    assert_eq!(kinds(&path), expected, "a flush that was not sent is not there");
    // Whether what came before is there is not known: nothing that comes after it counts.
    let fourth = log.flush_begins();
    log.flush_failed(&fourth);
    let fifth = log.flush_begins();
    log.flush_ended(&fifth, true);
    assert_eq!(kinds(&path), expected, "the log has ended");
}

#[test]
fn the_layout_is_that_of_the_kernel() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("log");
    let log = Arc::new(WriteLog::create(&path).unwrap());
    let image = LoggedFile::new(tempfile::tempfile().unwrap(), Some(Arc::clone(&log)));
    image.write_all_at(&[7; 1024], 5 * 512).unwrap();
    image.sync_data().unwrap();
    let raw = std::fs::read(&path).unwrap();
    let number = |at: usize| u64::from_le_bytes(raw[at..at + 8].try_into().unwrap());
    assert_eq!([number(0), number(8), number(16)], [0x006a_7366_7773_6872, 1, 2]);
    assert_eq!(u32::from_le_bytes(raw[24..28].try_into().unwrap()), 512);
    assert_eq!([number(512), number(520), number(528), number(536)], [5, 2, 0, 0]);
    assert!(raw[1024..2048].iter().all(|byte| *byte == 7));
    assert_eq!([number(2048), number(2056), number(2064), number(2072)], [0, 0, 1, 0]);
    assert_eq!(raw.len(), 2560);
}

#[test]
fn a_file_that_is_something_else_is_not_written_over() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("image");
    std::fs::write(&path, [1; 4096]).unwrap();
    assert!(WriteLog::create(&path).unwrap_err().to_string().contains("no log of writes"));
    assert_eq!(std::fs::read(&path).unwrap(), [1; 4096]);
    assert!(entries(&File::open(&path).unwrap()).next().unwrap().is_err());
    std::fs::write(&path, []).unwrap();
    WriteLog::create(&path).unwrap().mark("one");
    WriteLog::create(&path).unwrap();
    assert!(kinds(&path).is_empty(), "a log is written over");
}

#[test]
fn a_log_ends_where_the_image_is_not_known_any_more() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("log");
    let log = Arc::new(WriteLog::create(&path).unwrap());
    let read_only = File::open("/dev/null").unwrap();
    let image = LoggedFile::new(read_only, Some(Arc::clone(&log)));
    log.written(0, &[1; 512]);
    image.write_all_at(&[2; 512], 0).unwrap_err();
    log.written(0, &[3; 512]);
    assert_eq!(kinds(&path), [said(0, "1x512")]);
    // What is cut off is said.
    File::options().write(true).open(&path).unwrap().write_all_at(&9u64.to_le_bytes(), 16).unwrap();
    assert!(entries(&File::open(&path).unwrap()).any(|entry| entry.is_err()));
}
