//! The format keeps every record exactly, and a damaged or torn file never panics or lies.

use super::*;
use crate::source::Source;
use crate::{Error, Kind, Names, Record};
use proptest::prelude::*;

fn names() -> Names {
    let mut names = Names::new();
    let web = names.vm("web").unwrap();
    names.disk(web, "vda", 4 << 30);
    let db = names.vm("db").unwrap();
    names.disk(db, "vda", 8 << 30);
    names
}

fn small(zstd_level: Option<i32>) -> WriterOptions {
    WriterOptions { zstd_level, frame_bytes: 256, frame_span_ns: u64::MAX }
}

fn write(records: &[Record], options: WriterOptions) -> Vec<u8> {
    let mut writer = Writer::new(Vec::new(), names(), options).unwrap();
    for record in records {
        writer.record(record).unwrap();
    }
    writer.finish().unwrap()
}

fn read(bytes: &[u8], lenient: bool) -> crate::Result<(Vec<Record>, Ending, u64)> {
    let mut reader = Reader::new(bytes, "t", lenient)?;
    let mut records = Vec::new();
    while let Some(record) = reader.next_record()? {
        records.push(record);
    }
    Ok((records, reader.ending(), reader.notes().skipped))
}

fn any_record() -> impl Strategy<Value = Record> {
    let address = prop_oneof![any::<u64>(), (0u64..1 << 30).prop_map(|s| s * 512), 0u64..4096];
    let length = prop_oneof![any::<u64>(), (0u64..256).prop_map(|s| s * 512), 0u64..9000];
    (any::<u64>(), address, length, any::<u16>(), 0u16..3, 0u8..6).prop_map(
        |(time_ns, address, length, vm, disk, kind)| {
            let kind = Kind::from_number(kind).unwrap();
            let (address, length) = if kind == Kind::Flush { (0, 0) } else { (address, length) };
            Record { time_ns, address, length, vm: vm % 3, disk, kind }
        },
    )
}

fn plain_records(count: u64) -> Vec<Record> {
    let record = |i: u64| Record {
        time_ns: i * 1000,
        address: (i * 37 % 1000) * 4096,
        length: 4096,
        vm: 0,
        disk: (i % 2) as u16,
        kind: Kind::Journal,
    };
    (0..count).map(record).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn what_is_written_is_read(records in prop::collection::vec(any_record(), 0..300), packed in any::<bool>()) {
        let bytes = write(&records, small(packed.then_some(1)));
        let (back, ending, skipped) = read(&bytes, false).unwrap();
        prop_assert_eq!(back, records);
        prop_assert_eq!(ending, Ending::Closed);
        prop_assert_eq!(skipped, 0);
    }

    #[test]
    fn a_cut_anywhere_keeps_all_complete_frames(cut in 0usize..4000) {
        let records = plain_records(400);
        let bytes = write(&records, small(None));
        let cut = PREAMBLE_BYTES + cut % (bytes.len() - PREAMBLE_BYTES);
        let (back, ending, _) = read(&bytes[..cut], false).unwrap();
        prop_assert!(records.starts_with(&back));
        prop_assert_ne!(ending, Ending::Closed);
        // No more than one frame's records are missing from what was written out.
        let complete = bytes[..cut].len() * records.len() / bytes.len();
        prop_assert!(back.len() + 100 > complete, "{} of about {}", back.len(), complete);
    }

    #[test]
    fn a_flipped_byte_is_never_silent(at in 0usize..4000, flip in 1u8..=255) {
        let records = plain_records(400);
        let mut bytes = write(&records, small(Some(1)));
        let at = at % bytes.len();
        bytes[at] ^= flip;
        match read(&bytes, false) {
            // Only in the last frame or in the preamble's unused bytes can a flip go without an error.
            Ok((back, ending, _)) => {
                prop_assert!(records.starts_with(&back));
                prop_assert!(ending != Ending::Closed || (10..16).contains(&at), "{:?} at {}", ending, at);
            }
            Err(Error::Damaged { .. } | Error::Format { .. }) => {}
            Err(other) => prop_assert!(false, "{other}"),
        }
        if at >= PREAMBLE_BYTES {
            // Lenient: what is read is a subsequence of what was written.
            let (back, _, _) = read(&bytes, true).unwrap();
            let mut all = records.iter();
            prop_assert!(back.iter().all(|r| all.any(|a| a == r)));
            prop_assert!(back.len() > 200);
        }
    }

    #[test]
    fn noise_does_not_panic(noise in prop::collection::vec(any::<u8>(), 0..2000)) {
        let mut bytes = MAGIC.to_vec();
        bytes.extend_from_slice(&[1, 0, 0, 0, 0, 0, 0, 0]);
        bytes.extend_from_slice(&noise);
        let _ = read(&bytes, false);
        let _ = read(&bytes, true);
        let _ = read(&noise, true);
    }
}

#[test]
fn a_tail_of_zeroes_is_torn() {
    let records = plain_records(100);
    let mut bytes = write(&records, small(None));
    bytes.truncate(bytes.len() - FRAME_HEADER_BYTES - 8);
    bytes.resize(bytes.len() + 5000, 0);
    let (back, ending, _) = read(&bytes, false).unwrap();
    assert_eq!(back, records);
    assert!(matches!(ending, Ending::Torn { bytes: 5000, .. }), "{ending:?}");
}

#[test]
fn names_come_before_their_first_use() {
    let mut writer = Writer::new(Vec::new(), names(), small(None)).unwrap();
    writer.record(&plain_records(1)[0]).unwrap();
    let vm = writer.add_vm("late").unwrap();
    let disk = writer.add_disk(vm, "vdb", 77).unwrap();
    assert_eq!((vm, disk), (2, 2));
    assert_eq!(writer.add_disk(vm, "vdb", 77).unwrap(), 2);
    assert!(writer.add_disk(9, "vdb", 77).is_err());
    writer.record(&Record { vm, disk, ..plain_records(1)[0] }).unwrap();
    let bytes = writer.finish().unwrap();
    let mut reader = Reader::new(bytes.as_slice(), "t", false).unwrap();
    reader.next_record().unwrap().unwrap();
    assert_eq!(reader.names().vms().len(), 2);
    let late = reader.next_record().unwrap().unwrap();
    assert_eq!(reader.names().vm_name(late.vm), "late");
    assert_eq!(reader.names().disks()[2].capacity_bytes, 77);
}

#[test]
fn an_io_error_is_sticky_and_losses_are_counted() {
    struct Full(usize);
    impl std::io::Write for Full {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            if self.0 < bytes.len() {
                return Err(std::io::Error::other("no space"));
            }
            self.0 -= bytes.len();
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let mut writer = Writer::new(Full(1000), names(), small(None)).unwrap();
    let errors = plain_records(2000).iter().filter(|r| writer.record(r).is_err()).count();
    assert_eq!(errors, 1);
    assert_eq!(writer.records() + writer.lost(), 2000);
    assert!(writer.lost() > 1000);
    assert!(writer.finish().is_err());
}

#[test]
fn a_killed_writer_loses_at_most_a_frame_span() {
    let mut writer =
        Writer::new(Vec::new(), names(), WriterOptions { frame_span_ns: 50_000, ..WriterOptions::default() }).unwrap();
    for record in plain_records(1000) {
        writer.record(&record).unwrap();
    }
    writer.flush().unwrap();
    let frames = writer.finish().unwrap().windows(4).filter(|w| *w == FRAME_MARK).count();
    assert!(frames > 19, "{frames}");
}
