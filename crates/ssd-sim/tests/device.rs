//! Devices as a whole: policies for requests in bytes, preconditioning, wear, and runs of traces.

use io_trace::{Format, Kind, Layout, Names, Options, Writer, WriterOptions, open_reader};
use ssd_sim::device::{DeviceOptions, FtlOptions, Precondition, ServeError, SubPage, build};
use ssd_sim::flash::Halt;
use ssd_sim::ftl::FtlKind;
use ssd_sim::geometry::Geometry;
use ssd_sim::report::{LabelledReport, figures, html};
use ssd_sim::run::{RunError, RunOptions, Unwatched, Watch, run};
use ssd_sim::workload::{Shape, Workload};
use std::io::Cursor;
use std::sync::atomic::{AtomicU64, Ordering};

fn small(kind: FtlKind) -> DeviceOptions {
    let mut options = DeviceOptions::new(kind, Geometry { extra_blocks: 16, ..Geometry::with_blocks(128) });
    options.check().unwrap();
    options.seed = 3;
    options
}

#[test]
fn pages_covered_partly_are_counted_and_read_on_demand() {
    for kind in FtlKind::ALL {
        let mut options = small(kind);
        options.sub_page = SubPage::ReadModifyWrite;
        let mut device = build(&options);
        let mut serve = |kind, address, length| device.serve(kind, address, length).unwrap();
        serve(Kind::Home, 0, 8192); // four whole pages
        serve(Kind::Home, 512, 512); // within one page: one read
        serve(Kind::Home, 1024, 2048); // the end of one, the beginning of the next: two reads
        serve(Kind::Home, 20_480 + 1, 1); // a page never written: nothing to read
        serve(Kind::Read, 2047, 2); // touches two pages
        serve(Kind::Read, 100_000, 2048); // never written, unaligned: two pages
        serve(Kind::Discard, 1, 4096); // covers only page 1 wholly
        serve(Kind::Flush, 0, 0);
        let host = *device.host_counters();
        assert_eq!(
            (host.pages_written, host.partial_pages_written, host.read_modify_write_reads),
            (4 + 1 + 2 + 1, 4, 3)
        );
        assert_eq!((host.pages_read, host.unwritten_pages_read, host.pages_trimmed), (4, 2, 1));
        assert_eq!(device.flash_counters().host_reads, 3 + 2);
        assert_eq!(device.flash_counters().host_writes, 8);
    }
}

#[test]
fn requests_beyond_the_device_are_refused_or_wrapped() {
    let mut options = small(FtlKind::Page);
    let capacity = options.geometry.logical_bytes();
    let mut device = build(&options);
    for (address, length) in [(capacity, 1), (capacity - 2048, 4096), (u64::MAX, 2), (0, capacity + 1)] {
        let error = device.serve(Kind::Home, address, length).unwrap_err();
        assert!(matches!(error, ServeError::Beyond { .. }), "{error}");
    }
    assert_eq!(device.flash_counters().host_writes, 0);
    options.wrap = true;
    let mut device = build(&options);
    device.serve(Kind::Home, capacity - 2048, 4096).unwrap();
    device.serve(Kind::Home, 5 * capacity, 2048).unwrap();
    assert_eq!(device.host_counters().pages_written, 3);
    device.serve(Kind::Read, 0, 2048).unwrap();
    assert_eq!(device.host_counters().unwritten_pages_read, 0);
}

#[test]
fn preconditioning_fills_and_is_not_counted() {
    for kind in FtlKind::ALL {
        for (precondition, filled) in
            [(Precondition::Fresh, 0), (Precondition::Sequential, 8192), (Precondition::Random(50), 4096)]
        {
            let mut options = small(kind);
            options.precondition = precondition;
            let mut device = build(&options);
            device.precondition(&|| false).unwrap();
            assert_eq!(device.flash_counters().flash_writes(), 0);
            assert_eq!(device.erase_counts().iter().sum::<u32>(), 0);
            device.serve(Kind::Read, 0, options.geometry.logical_bytes()).unwrap();
            let host = device.host_counters();
            assert_eq!(host.pages_read - host.unwritten_pages_read, filled, "{kind:?} {precondition:?}");
        }
    }
}

fn hammer(options: &DeviceOptions, writes: u32) -> (Result<(), ServeError>, Box<dyn ssd_sim::device::Device>) {
    let mut device = build(options);
    device.precondition(&|| false).unwrap();
    // A few hot blocks on a device full of cold data: the worst for wear.
    let mut workload = Workload::new(Shape::Random, options.geometry.logical_pages() / 16, 1);
    for _ in 0..writes {
        if let Err(error) = device.serve(Kind::Home, u64::from(workload.next_page()) * 2048, 2048) {
            return (Err(error), device);
        }
    }
    (Ok(()), device)
}

#[test]
fn wear_levelling_evens_wear_out_and_counts_its_cost() {
    for kind in FtlKind::ALL {
        let spread = |levelling| {
            let mut options = small(kind);
            options.precondition = Precondition::Sequential;
            (options.wear.levelling, options.wear.threshold) = (levelling, 8);
            let (result, device) = hammer(&options, 100_000);
            result.unwrap();
            let counts = device.erase_counts();
            let c = *device.flash_counters();
            assert_eq!(levelling, c.wear_moves > 0, "{kind:?}");
            assert!(c.wear_copies <= c.copies && c.wear_erases <= c.erases);
            counts.iter().max().unwrap() - counts.iter().min().unwrap()
        };
        let (off, on) = (spread(false), spread(true));
        assert!(on * 3 < off * 2, "{kind:?}: {on} with, {off} without");
    }
}

#[test]
fn blocks_go_bad_until_the_device_is_worn_out() {
    for kind in FtlKind::ALL {
        let mut options = small(kind);
        options.precondition = Precondition::Sequential;
        options.wear.erase_limit = 30;
        let (result, device) = hammer(&options, 2_000_000);
        assert!(matches!(result, Err(ServeError::Halt(Halt::WornOut(_)))), "{kind:?}: {result:?}");
        assert!(device.bad_blocks() > 3, "{kind:?}");
        assert!(device.erase_counts().iter().all(|&c| c <= 30));
        // With wear levelling the same device takes more.
        options.wear = ssd_sim::device::WearOptions { levelling: true, threshold: 4, erase_limit: 30 };
        let (_, levelled) = hammer(&options, 2_000_000);
        let (with, without) = (levelled.host_counters().pages_written, device.host_counters().pages_written);
        println!("{kind:?} {with} {without}");
        assert!(with > without, "{kind:?}: {with} pages with, {without} without");
    }
}

fn trace(requests: u64) -> Vec<u8> {
    let mut names = Names::new();
    let vm = names.vm("guest").unwrap();
    names.disk(vm, "vda", 8 << 20);
    names.disk(vm, "vdb", 8 << 20);
    let mut writer = Writer::new(Vec::new(), names, WriterOptions::default()).unwrap();
    let mut workload = Workload::new(Shape::Random, 4096, 5);
    for i in 0..requests {
        let kind = [Kind::Home, Kind::Journal, Kind::Read, Kind::Home][i as usize % 4];
        let address = u64::from(workload.next_page()) * 2048;
        let record =
            io_trace::Record { time_ns: i * 1_000_000, address, length: 2048, vm: 0, disk: (i % 2) as u16, kind };
        writer.record(&record).unwrap();
    }
    writer.finish().unwrap()
}

fn run_trace(options: &RunOptions, bytes: Vec<u8>, watch: &dyn Watch) -> Result<ssd_sim::report::Report, RunError> {
    let mut source = open_reader(Cursor::new(bytes), "t", &Options::default()).unwrap();
    run(&mut source, options, watch)
}

fn run_options(kind: FtlKind) -> RunOptions {
    RunOptions { device: small(kind), layout: Layout::Auto, warm_up_requests: 0, without_journal: false }
}

#[test]
fn a_report_adds_up() {
    for kind in FtlKind::ALL {
        let report = run_trace(&run_options(kind), trace(20_000), &Unwatched).unwrap();
        assert_eq!((report.requests, report.host_pages_read, report.host_pages_written), (20_000, 5_000, 15_000));
        assert_eq!(report.traffic.bytes, 20_000 * 2048);
        assert_eq!(report.traffic.journal_bytes_written, 5_000 * 2048);
        assert_eq!(
            report.flash_writes,
            report.host_pages_written + report.gc.valid_page_copies + report.mapping.writes
        );
        let reads = report.host_pages_read - report.unwritten_pages_read;
        assert_eq!(report.flash_reads, reads + report.gc.valid_page_copies + report.mapping.reads);
        assert_eq!(report.gc.data.time_us + report.gc.translation.time_us, report.gc.time_us);
        assert_eq!(report.time_us, report.flash_reads * 88 + report.flash_writes * 263 + report.erases * 2000);
        let blocks: u32 = report.wear.distribution.iter().map(|d| d.1).sum();
        assert_eq!(blocks, 128 + 16);
        assert!(report.response.mean_us >= report.service.mean_us);
        assert!(report.course.len() <= 512 && report.course.len() > 100);
        // Both disks lie side by side: 2 × 4096 pages fit exactly.
        assert!(!report.disks_overlaid);
        // The contract's keys are there.
        let json = serde_json::to_value(&report).unwrap();
        for key in [
            "schema",
            "ftl",
            "requests",
            "host_pages_read",
            "host_pages_written",
            "flash_reads",
            "flash_writes",
            "erases",
            "write_amplification",
            "time_us",
            "requests_per_second",
        ] {
            assert!(!json[key].is_null(), "{key}");
        }
        for (object, keys) in [
            ("gc", &["runs", "valid_page_copies", "erases", "time_us"][..]),
            ("merges", &["switch", "partial", "full"][..]),
            ("mapping", &["reads", "writes", "hits", "misses"][..]),
        ] {
            assert!(keys.iter().all(|k| json[object][k].is_u64()), "{object}");
        }
    }
}

#[test]
fn without_the_journal_less_is_written() {
    let all = run_trace(&run_options(FtlKind::Fast), trace(8_000), &Unwatched).unwrap();
    let options = RunOptions { without_journal: true, ..run_options(FtlKind::Fast) };
    let retained = run_trace(&options, trace(8_000), &Unwatched).unwrap();
    assert_eq!((retained.requests, retained.journal_requests_left_out), (6_000, 2_000));
    assert!(retained.erases < all.erases);
    let labelled = |mode: &str, report| LabelledReport {
        workload: "rnd_write".into(),
        mode: Some(mode.into()),
        trace: "t".into(),
        report,
    };
    let reports = [labelled("journal", all), labelled("retain", retained)];
    let lines = figures::lines(&reports);
    assert_eq!(lines.iter().map(|l| (l.figure, l.writes_only)).collect::<Vec<_>>(), figures::CHARTS);
    assert_eq!(lines[0].values, [None, None, Some(8_000.0), Some(6_000.0)]);
    assert_eq!((lines[0].change_percent, lines[0].within_paper()), (Some(-25.0), Some(true)));
    assert_eq!((lines[1].change_percent, lines[1].within_paper()), (Some(-25.0), Some(false)));
    // The trace's 2000 reads are in the traffic and not in the writes: 6000 of them, 4000 without the journal.
    assert_eq!(lines[2].values, [None, None, Some(6_000.0 * 2048.0), Some(4_000.0 * 2048.0)]);
    let text = figures::table(&lines);
    assert!(text.contains("Figure 4") && text.contains("-25.0 %") && text.contains("within"), "{text}");
    let page = html::page(&reports, &lines);
    assert!(page.contains("<svg") && !page.contains("http") && !page.contains("<script"));
}

#[test]
fn warm_up_is_served_but_not_counted() {
    let options = RunOptions { warm_up_requests: 5_000, ..run_options(FtlKind::Dftl) };
    let report = run_trace(&options, trace(8_000), &Unwatched).unwrap();
    assert_eq!((report.requests, report.warm_up_requests), (3_000, 5_000));
    assert_eq!(report.host_pages_read + report.host_pages_written, 3_000);
}

#[test]
fn a_run_stops_when_asked_and_reports_what_there_is() {
    struct After(AtomicU64);
    impl Watch for After {
        fn should_stop(&self) -> bool {
            self.0.fetch_add(1, Ordering::Relaxed) >= 1
        }
    }
    let report = run_trace(&run_options(FtlKind::Page), trace(20_000), &After(AtomicU64::new(0))).unwrap();
    assert!(report.interrupted && report.requests > 4_000 && report.requests < 20_000);
}

#[test]
fn refusals_name_the_request() {
    let mut options = run_options(FtlKind::Page);
    options.device.geometry.blocks = 100;
    let error = run_trace(&options, trace(1_000), &Unwatched).unwrap_err();
    assert!(matches!(error, RunError::Refused { .. }), "{error}");
    let text = "1 0 0 4 0\n2 0 99999999 4 0\n";
    let read = Options { format: Format::DiskSim, ..Options::default() };
    let mut source = open_reader(Cursor::new(text), "t", &read).unwrap();
    let error = run(&mut source, &run_options(FtlKind::Fast), &Unwatched).unwrap_err().to_string();
    assert!(error.starts_with("request 2 of the trace (line or frame 2)") && error.contains("--blocks"), "{error}");
}

#[test]
fn options_that_cannot_work_are_sentences() {
    let mut options = small(FtlKind::Fast);
    if let FtlOptions::Fast(fast) = &mut options.ftl {
        fast.rw_log_blocks = 16;
    }
    assert!(options.check().unwrap_err().contains("--rw-log-blocks"));
    let mut options = small(FtlKind::Dftl);
    options.geometry.extra_blocks = 4;
    assert!(options.check().unwrap_err().contains("--extra-blocks"));
    options.geometry.page_bytes = 3000;
    assert!(options.check().is_err());
}

#[test]
fn memory_is_within_twelve_bytes_a_page() {
    for kind in FtlKind::ALL {
        let mut options = DeviceOptions::new(kind, Geometry::with_blocks(16_384));
        options.wear.levelling = true;
        let device = build(&options);
        let per_page = device.memory_bytes() as f64 / options.geometry.physical_pages() as f64;
        assert!(per_page <= 12.0, "{kind:?}: {per_page}");
    }
}
