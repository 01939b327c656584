//! Every format as its publishers write it, and what is said about lines that are not.

use io_trace::{
    Error, Filter, Filtered, Format, Kind, Layout, Merge, Names, Notes, Options, Placer, Record, Source, Split,
    TextWriter, Writer, WriterOptions, open, open_reader, summary::Summariser,
};
use std::io::{Cursor, Write};

fn options(format: Format, lenient: bool) -> Options {
    Options { format, lenient, blkparse_action: None }
}

fn read_all(mut source: impl Source) -> io_trace::Result<(Vec<Record>, Notes, Names)> {
    let mut records = Vec::new();
    while let Some(record) = source.next_record()? {
        records.push(record);
    }
    Ok((records, source.notes(), source.names().clone()))
}

fn read(text: &str, format: Format) -> (Vec<Record>, Notes, Names) {
    read_all(open_reader(Cursor::new(text.to_owned()), "t", &options(format, false)).unwrap()).unwrap()
}

fn fails(text: &str, format: Format, line: u64, part: &str) {
    let error = read_all(open_reader(Cursor::new(text.to_owned()), "t", &options(format, false)).unwrap()).unwrap_err();
    assert!(error.is_damaged_input());
    match &error {
        Error::Line { line: at, reason, .. } => {
            assert_eq!(*at, line, "{error}");
            assert!(reason.contains(part), "{error}");
        }
        other => panic!("{other}"),
    }
}

fn record(time_ns: u64, kind: Kind, address: u64, length: u64) -> Record {
    Record { time_ns, address, length, vm: 0, disk: 0, kind }
}

#[test]
fn msr_cambridge() {
    // CRLF, no final newline, two disks.
    let text = "128166372003061629,hm,0,Read,383496192,32768,413\r\n128166372016382155,hm,1,Write,2822144,4096,131";
    let (records, notes, names) = read(text, Format::Msr);
    assert_eq!(records[0], record(0, Kind::Read, 383496192, 32768));
    assert_eq!(records[1], Record { disk: 1, ..record(1_332_052_600, Kind::Home, 2822144, 4096) });
    assert_eq!((names.vm_name(0), names.disk_name(1)), ("hm".into(), "1".into()));
    assert_eq!((notes.units, notes.skipped), (2, 0));
    fails("1,hm,0,Read,0,512,1\n2,hm,0,Raed,0,512,1\n", Format::Msr, 2, "Raed");
    fails("1,hm,0,Read,0,512\n", Format::Msr, 1, "6 fields");
    fails("1,hm,0,Read,-4,512,1\n", Format::Msr, 1, "offset");
    fails("1,hm,0,Read,18446744073709551615,512,1\n", Format::Msr, 1, "beyond 64 bits");
}

#[test]
fn spc_financial() {
    let text = "0,303567,3584,w,0.000000\n1,55590,3072,W,0.026214,extra\n0,303567,512,r,1\n";
    let (records, _, names) = read(text, Format::Spc);
    assert_eq!(records[0], record(0, Kind::Home, 303567 * 512, 3584));
    assert_eq!(records[1], Record { disk: 1, ..record(26_214_000, Kind::Home, 55590 * 512, 3072) });
    assert_eq!(records[2], record(1_000_000_000, Kind::Read, 303567 * 512, 512));
    assert_eq!(names.disk_name(1), "asu1");
    fails("0,1,512,x,0\n", Format::Spc, 1, "opcode");
    fails("0,1,512\n", Format::Spc, 1, "opcode is missing");
    fails("0,1,512,r,-1\n", Format::Spc, 1, "time");
}

#[test]
fn disksim_and_ssdsim_are_told_apart() {
    let (records, _, _) = read("640.875000 0\t184  16 1\n641 0 8 1 0\n", Format::DiskSim);
    assert_eq!(records[0], record(640_875_000, Kind::Read, 184 * 512, 16 * 512));
    assert_eq!(records[1], record(641_000_000, Kind::Home, 8 * 512, 512));
    let (records, _, _) = read("641000 0 8 1 0\n641001 0 9 1 1\n", Format::SsdSim);
    assert_eq!(records[0], record(641_000, Kind::Home, 8 * 512, 512));
    assert_eq!(records[1].kind, Kind::Read);
    fails("640.875000 0 184 16 1\n", Format::SsdSim, 1, "milliseconds");
    fails("640 0 184 16 3\n", Format::SsdSim, 1, "neither 0 (write) nor 1 (read)");
    fails("640 0 184 16\n", Format::DiskSim, 1, "4 columns");
}

#[test]
fn blkparse_takes_one_action() {
    let text = "\
  8,0    3        1     0.000000000   697  G   W 223490 + 8 [kjournald]
  8,0    3        2     0.000001829   697  Q   W 223490 + 8 [kjournald]
  8,0    3        3     0.000002000   697  Q   R 10 + 16 [cat]
  8,0    3        4     0.000002500   697  m   N cfq697 insert_request
  8,0    3        5     0.000003000   697  Q   N 0 [x]
  8,0    3        6     0.000003500   697  Q FWS [jbd2/sda-8]
  8,0    3        7     0.000004000   697  Q  DS 4096 + 8 [fstrim]
  8,0    3        8     0.000005000   697  D   W 223490 + 8 [kjournald]
  8,0    3        9     0.000006000   697  C   W 223490 + 8 [0]
CPU0 (sda):
 Reads Queued:           1,        8KiB\t Writes Queued:           1,        4KiB
";
    let (records, notes, _) = read(text, Format::Blkparse);
    let expected = [
        record(1_829, Kind::Home, 223490 * 512, 4096),
        record(2_000, Kind::Read, 5120, 8192),
        record(3_500, Kind::Flush, 0, 0),
        record(4_000, Kind::Discard, 4096 * 512, 4096),
    ];
    assert_eq!(records, expected);
    assert_eq!(notes.ignored, 7);
    let issued = Options { blkparse_action: Some(b'D'), ..options(Format::Blkparse, false) };
    let (records, ..) = read_all(open_reader(Cursor::new(text), "t", &issued).unwrap()).unwrap();
    assert_eq!(records, [record(5_000, Kind::Home, 223490 * 512, 4096)]);
    fails("8,0 3 1 0.0 697 Q X 223490 + 8 [k]\n", Format::Blkparse, 1, "none of R, W, D");
    fails("hello\n", Format::Blkparse, 1, "major,minor");
}

#[test]
fn fio_versions_2_and_3_are_recognised() {
    let two = "fio version 2 iolog\n/dev/x add\n/dev/x open\n/dev/x write 0 4096\n/dev/x wait 250 0\n/dev/x trim 8192 4096\n/dev/x sync 0 0\n/dev/x close\n";
    let (records, _, names) = read(two, Format::Auto);
    let expected = [
        record(0, Kind::Home, 0, 4096),
        record(250_000, Kind::Discard, 8192, 4096),
        record(250_000, Kind::Flush, 0, 0),
    ];
    assert_eq!(records, expected);
    assert_eq!(names.disk_name(0), "/dev/x");
    let (records, _, _) = read("fio version 3 iolog\r\n2 f add\r\n872 f open\r\n878 f read 0 16384\r\n", Format::Auto);
    assert_eq!(records, [record(878_000, Kind::Read, 0, 16384)]);
    fails("fio version 2 iolog\nf write 0\n", Format::Auto, 2, "length is missing");
    fails("fio version 4 iolog\n", Format::Fio, 1, "version");
    fails("fio version 3 iolog\n5 f frob 0 1\n", Format::Fio, 2, "frob");
}

#[test]
fn an_unnamed_format_is_not_guessed() {
    let error = open_reader(Cursor::new("1,hm,0,Read,0,512,1\n"), "t", &Options::default()).err().unwrap();
    assert!(error.to_string().contains("--format"), "{error}");
}

#[test]
fn a_trace_without_requests_is_an_error() {
    for text in ["", "\n\n", "# nothing\n"] {
        let source = open_reader(Cursor::new(text), "t", &options(Format::DiskSim, true)).unwrap();
        assert!(matches!(read_all(source), Err(Error::Empty { .. })));
    }
}

#[test]
fn lenient_counts_and_skips() {
    let long = "9".repeat(100_000);
    let text = format!("1 0 0 8 0\ngarbage\n{long}\n2 0 8 8 1\n\u{7}\n");
    let source = open_reader(Cursor::new(text), "t", &options(Format::DiskSim, true)).unwrap();
    let (records, notes, _) = read_all(source).unwrap();
    assert_eq!(records.len(), 2);
    assert_eq!(notes.skipped, 3);
    assert!(notes.first_skipped.unwrap().starts_with("line 2"));
}

#[test]
fn packed_files_are_unpacked_and_cut_ones_are_damaged() {
    let text = (0..5000).map(|i| format!("{i} 0 {} 8 0\n", i * 7919 % 100_000)).collect::<String>();
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gzip.write_all(text.as_bytes()).unwrap();
    let gzip = gzip.finish().unwrap();
    let zstd = zstd::bulk::compress(text.as_bytes(), 1).unwrap();
    for packed in [gzip, zstd] {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), &packed).unwrap();
        let (source, progress) = open(file.path().to_str().unwrap(), &options(Format::DiskSim, false)).unwrap();
        let (records, ..) = read_all(source).unwrap();
        assert_eq!(records.len(), 5000);
        assert_eq!((progress.bytes(), progress.total_bytes), (packed.len() as u64, packed.len() as u64));
        let cut = packed[..packed.len() / 2].to_vec();
        let error = read_all(open_reader(Cursor::new(cut.clone()), "t", &options(Format::DiskSim, false)).unwrap());
        let error = error.unwrap_err();
        assert!(error.is_damaged_input() && error.to_string().contains("after line "), "{error}");
        let source = open_reader(Cursor::new(cut), "t", &options(Format::DiskSim, true)).unwrap();
        if let Ok((records, notes, _)) = read_all(source) {
            assert!(records.len() < 5000 && notes.tail.is_some());
        }
    }
}

fn amber(records: &[Record], capacity: u64) -> Vec<u8> {
    let mut names = Names::new();
    let vm = names.vm("guest").unwrap();
    names.disk(vm, "vda", capacity);
    let mut writer = Writer::new(Vec::new(), names, WriterOptions::default()).unwrap();
    for record in records {
        writer.record(record).unwrap();
    }
    writer.finish().unwrap()
}

#[test]
fn merged_traces_keep_the_order_of_time_and_their_names() {
    let one = amber(&[record(10, Kind::Home, 0, 512), record(30, Kind::Journal, 512, 512)], 1 << 20);
    let two = amber(&[record(10, Kind::Read, 0, 512), record(20, Kind::Read, 512, 512)], 1 << 20);
    let open = |bytes| open_reader(Cursor::new(bytes), "t", &Options::default()).unwrap();
    let mut merged = Merge::new(vec![("a".to_owned(), open(one)), ("b".to_owned(), open(two))]);
    let mut placer = Placer::new(Layout::Stack);
    let mut seen = Vec::new();
    while let Some(r) = merged.next_record().unwrap() {
        let address = placer.place(&r, merged.names()).unwrap();
        seen.push((r.time_ns, merged.names().vm_name(r.vm), address));
    }
    let at = |t, vm: &str, a| (t, vm.to_owned(), a);
    assert_eq!(seen, [at(10, "a", 0), at(10, "b", 1 << 20), at(20, "b", (1 << 20) + 512), at(30, "a", 512)]);
}

#[test]
fn staggered_traces_begin_one_after_another() {
    let trace = amber(&[record(0, Kind::Home, 0, 512), record(10, Kind::Home, 512, 512)], 4096);
    let source = || open_reader(Cursor::new(trace.clone()), "t", &options(Format::Auto, false)).unwrap();
    let sources = vec![("a".to_owned(), source()), ("b".to_owned(), source()), ("c".to_owned(), source())];
    let (records, _, _) = read_all(Merge::staggered(sources, 7)).unwrap();
    let seen: Vec<(u64, u16)> = records.iter().map(|r| (r.time_ns, r.vm)).collect();
    assert_eq!(seen, [(0, 0), (7, 1), (10, 0), (14, 2), (17, 1), (24, 2)]);
}

#[test]
fn long_requests_are_split_without_loss() {
    let requests = [
        record(1, Kind::Home, 4096, 10_000),
        record(2, Kind::Flush, 0, 0),
        record(3, Kind::Journal, 1 << 40, 8192),
        record(4, Kind::Read, 0, 4096),
    ];
    let trace = amber(&requests, 1 << 41);
    let split = |length_max| {
        let source = open_reader(Cursor::new(trace.clone()), "t", &options(Format::Auto, false)).unwrap();
        read_all(Split::new(source, length_max)).unwrap().0
    };
    assert_eq!(
        split(4096),
        [
            record(1, Kind::Home, 4096, 4096),
            record(1, Kind::Home, 8192, 4096),
            record(1, Kind::Home, 12_288, 1808),
            record(2, Kind::Flush, 0, 0),
            record(3, Kind::Journal, 1 << 40, 4096),
            record(3, Kind::Journal, (1 << 40) + 4096, 4096),
            record(4, Kind::Read, 0, 4096),
        ]
    );
    assert_eq!(split(0), requests);
}

#[test]
fn layouts_place_disks_or_say_why_not() {
    let mut names = Names::new();
    let vm = names.vm("v").unwrap();
    names.disk(vm, "a", 1000 * 512);
    names.disk(vm, "b", 0);
    let on = |disk, address| Record { disk, ..record(0, Kind::Read, address, 512) };
    let mut stack = Placer::new(Layout::Stack);
    assert_eq!(stack.place(&on(0, 512), &names), Ok(512));
    assert!(stack.place(&on(0, 1000 * 512), &names).unwrap_err().contains("beyond"));
    assert!(stack.place(&on(1, 0), &names).unwrap_err().contains("unknown"));
    let mut auto = Placer::new(Layout::Auto);
    assert_eq!(auto.place(&on(1, 512), &names), Ok(512));
    assert!(auto.overlaid());
    let mut stride = Placer::new("stride:1048576".parse().unwrap());
    assert_eq!(stride.place(&on(1, 512), &names), Ok(1048576 + 512));
    assert!(stride.place(&on(0, 1048576), &names).is_err());
    assert!("strode:1".parse::<Layout>().is_err());
}

#[test]
fn filters_choose() {
    let records = [
        record(0, Kind::Read, 0, 512),
        record(2_000_000_000, Kind::Journal, 8192, 512),
        record(4_000_000_000, Kind::Home, 0, 512),
    ];
    let bytes = amber(&records, 0);
    let count = |conditions: &[&str]| {
        let conditions: Vec<String> = conditions.iter().map(|c| c.to_string()).collect();
        let source = open_reader(Cursor::new(bytes.clone()), "t", &Options::default()).unwrap();
        read_all(Filtered::new(source, Filter::parse(&conditions).unwrap())).unwrap().0.len()
    };
    assert_eq!(count(&["kind=write"]), 2);
    assert_eq!(count(&["kind=read,home", "time=1.5.."]), 1);
    assert_eq!(count(&["address=8192..8193"]), 1);
    assert_eq!(count(&["vm=guest", "disk=vda"]), 3);
    assert_eq!(count(&["vm=other"]), 0);
    for bad in ["kind=frob", "time=2..1", "colour=red", "kind"] {
        assert!(Filter::parse(&[bad.to_owned()]).is_err(), "{bad}");
    }
}

#[test]
fn a_summary_counts_what_is_there() {
    let records = [
        record(0, Kind::Home, 0, 8192),
        record(1_000_000_000, Kind::Home, 8192, 4096),
        record(2_000_000_000, Kind::Journal, 1 << 30, 4096),
        record(2_500_000_000, Kind::Read, 100, 100),
        record(2_400_000_000, Kind::Flush, 0, 0),
    ];
    let mut summariser = Summariser::new();
    for r in &records {
        summariser.add(r);
    }
    let s = summariser.summary(&Names::single("vda"));
    assert_eq!((s.requests, s.home.bytes, s.journal.bytes, s.flush.requests), (5, 12288, 4096, 1));
    assert_eq!((s.footprint_bytes, s.written_footprint_bytes), (16384, 16384));
    assert_eq!(s.journal_share, 0.25);
    assert_eq!(s.sequential_writes, 1.0 / 3.0);
    assert_eq!((s.steps_back_in_time, s.seconds, s.end_of_addresses), (1, 2.5, (1 << 30) + 4096));
    // A request over the whole address space ends at the bound instead of eating all memory.
    summariser.add(&record(0, Kind::Home, 0, u64::MAX));
    assert!(summariser.summary(&Names::new()).footprint_is_lower_bound);
}

#[test]
fn converted_text_reads_back() {
    let records = [
        record(0, Kind::Read, 4096, 4096),
        record(1_000_000, Kind::Home, 8192, 512),
        record(3_000_000, Kind::Flush, 0, 0),
    ];
    for format in [Format::Msr, Format::Spc, Format::DiskSim, Format::SsdSim, Format::Fio] {
        let mut writer = TextWriter::new(Vec::new(), format).unwrap();
        for r in &records {
            writer.record(r, &Names::single("vda")).unwrap();
        }
        let dropped = writer.dropped() as usize;
        let text = String::from_utf8(writer.finish().unwrap()).unwrap();
        let (back, ..) = read(&text, format);
        assert_eq!(back, records[..records.len() - dropped], "{format:?}");
    }
    assert!(TextWriter::new(Vec::new(), Format::Blkparse).is_err());
}
