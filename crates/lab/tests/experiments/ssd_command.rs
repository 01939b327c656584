//! `amberlog ssd` and `amberlog trace` as scripts call them: outputs, exit codes, messages.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

fn amberlog(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_amberlog-lab")).args(arguments).stdin(Stdio::null()).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// Page writes and reads on 1024 pages, in MSR-Cambridge CSV.
fn msr(directory: &Path, name: &str, requests: u64) -> PathBuf {
    let path = directory.join(name);
    let mut lines = String::new();
    for i in 0..requests {
        let kind = if i % 5 == 4 { "Read" } else { "Write" };
        let address = (i * i * 31 + i * 7) % 1024 * 2048;
        lines += &format!("{},host,0,{kind},{address},2048,0\n", 128_166_372_000_000_000u64 + i * 5000);
    }
    std::fs::write(&path, lines).unwrap();
    path
}

const DEVICE: [&str; 6] = ["--blocks", "32", "--extra-blocks", "12", "--precondition", "sequential"];

#[test]
fn json_has_the_contracts_keys_and_adds_up() {
    let directory = tempfile::tempdir().unwrap();
    let trace = msr(directory.path(), "t.csv", 20_000);
    for ftl in ["page", "fast", "superblock", "dftl"] {
        let mut arguments = vec!["ssd", "--ftl", ftl, "--trace", trace.to_str().unwrap(), "--format", "msr", "--json"];
        arguments.extend(DEVICE);
        let output = amberlog(&arguments);
        assert!(output.status.success(), "{}", text(&output.stderr));
        let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        let number =
            |key: &str| json.pointer(key).and_then(serde_json::Value::as_u64).unwrap_or_else(|| panic!("{key}"));
        assert_eq!((number("/schema"), json["ftl"].as_str()), (1, Some(ftl)));
        assert_eq!(
            (number("/requests"), number("/host_pages_read"), number("/host_pages_written")),
            (20_000, 4_000, 16_000)
        );
        let (copies, erases) = (number("/gc/valid_page_copies"), number("/erases"));
        assert!(erases > 100);
        assert_eq!(number("/flash_writes"), 16_000 + copies + number("/mapping/writes"));
        assert_eq!(number("/gc/time_us"), copies * (88 + 263) + number("/gc/erases") * 2000);
        assert_eq!(number("/merges/full") > 0, ftl == "fast");
        assert!(
            json["write_amplification"].as_f64().unwrap() > 1.0 && json["requests_per_second"].as_f64().unwrap() > 0.0
        );
        // The same input gives the same output, but for the wall clock.
        let again: serde_json::Value = serde_json::from_slice(&amberlog(&arguments).stdout).unwrap();
        assert_eq!((&json["erases"], &json["gc"], &json["wear"]), (&again["erases"], &again["gc"], &again["wear"]));
    }
}

#[test]
fn exit_codes_are_the_contracts() {
    let directory = tempfile::tempdir().unwrap();
    let trace = msr(directory.path(), "t.csv", 100);
    let trace = trace.to_str().unwrap();
    let damaged = directory.path().join("damaged.csv");
    std::fs::write(&damaged, "128166372000000000,host,0,Write,0,2048,0\n128166372000000001,host,0,Wrote,0,2048,0\n")
        .unwrap();
    let damaged = damaged.to_str().unwrap();
    let cases: [(&[&str], i32, &str); 11] = [
        (&["ssd", "--ftl", "page", "--trace", trace, "--format", "msr"], 0, ""),
        (&["ssd", "--ftl", "page", "--trace", trace, "--format", "msr", "--cmt-entries", "9"], 2, "--cmt-entries"),
        (&["ssd", "--ftl", "page", "--trace", trace, "--format", "msr", "--frob"], 2, "--frob"),
        (&["ssd", "--ftl", "ideal", "--trace", trace], 2, "ideal"),
        (&["ssd", "--ftl", "page", "--trace", trace, "--format", "csv"], 2, "csv"),
        (&["ssd", "--ftl", "page", "--trace", trace], 3, "--format"),
        (&["ssd", "--ftl", "page", "--trace", trace, "--format", "spc"], 3, "line 1"),
        (&["ssd", "--ftl", "page", "--trace", damaged, "--format", "msr"], 3, "line 2"),
        (
            &["ssd", "--ftl", "page", "--trace", damaged, "--format", "msr", "--lenient"],
            0,
            "1 unreadable lines or frames were skipped, the first: line 2: ",
        ),
        (&["ssd", "--ftl", "page", "--trace", trace, "--format", "msr", "--blocks", "8"], 3, "--blocks"),
        (&["ssd", "--ftl", "page", "--trace", "/nonexistent/trace"], 1, "/nonexistent/trace"),
    ];
    for (arguments, code, part) in cases {
        let output = amberlog(arguments);
        let message = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {message}");
        assert!(message.contains(part), "{arguments:?}: {message}");
    }
}

#[test]
fn every_option_is_in_the_book() {
    let book = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/ssd.md")).unwrap();
    // As a word: `--trace` is not in the book because `--trace-something` is.
    let is_there = |option: &str| {
        book.match_indices(option).any(|(at, _)| {
            !book[at + option.len()..].starts_with(|c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_')
        })
    };
    for command in [&["ssd"][..], &["trace", "summary"], &["trace", "convert"]] {
        let help = text(&amberlog(&[command, &["--help"]].concat()).stdout);
        let options: Vec<&str> = help
            .lines()
            .filter(|line| line.trim_start().starts_with('-'))
            .filter_map(|line| line.split_whitespace().find(|word| word.starts_with("--")))
            .map(|word| word.trim_end_matches(','))
            .filter(|option| *option != "--help")
            .collect();
        assert!(options.len() >= 5, "{help}");
        for option in options {
            assert!(is_there(option), "docs/ssd.md does not tell of {option} of amberlog {}", command.join(" "));
        }
    }
}

#[test]
fn traces_come_through_a_pipe_and_packed() {
    let directory = tempfile::tempdir().unwrap();
    let trace = msr(directory.path(), "t.csv", 1_000);
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gzip.write_all(&std::fs::read(&trace).unwrap()).unwrap();
    let packed = gzip.finish().unwrap();
    let mut child = Command::new(env!("CARGO_BIN_EXE_amberlog-lab"))
        .args(["ssd", "--ftl", "page", "--trace", "-", "--format", "msr", "--json"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(&packed).unwrap();
    let output = child.wait_with_output().unwrap();
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(json["requests"], 1_000);
}

#[test]
fn a_comparison_prints_the_papers_figures_and_a_page() {
    let directory = tempfile::tempdir().unwrap();
    let long = msr(directory.path(), "journal.csv", 8_000);
    let short = msr(directory.path(), "vma.csv", 4_000);
    let page = directory.path().join("page.html");
    let (journal, vma) = (format!("untar/journal={}", long.display()), format!("untar/vma={}", short.display()));
    let mut arguments = vec!["ssd", "--compare", "--trace", &journal, "--trace", &vma, "--format", "msr"];
    arguments.extend(DEVICE);
    arguments.extend(["--html", page.to_str().unwrap()]);
    let output = amberlog(&arguments);
    let table = text(&output.stdout);
    assert!(output.status.success(), "{}", text(&output.stderr));
    for part in ["Figure 2", "Figure 3", "Figure 4", "Figure 5", "superblock", "-50.0 %", "-42.4 .. -56.7 %"] {
        assert!(table.contains(part), "{part}: {table}");
    }
    assert!(std::fs::read_to_string(&page).unwrap().ends_with("</html>\n"));
    arguments.push("--json");
    let json: serde_json::Value = serde_json::from_slice(&amberlog(&arguments).stdout).unwrap();
    assert_eq!((json["runs"].as_array().unwrap().len(), &json["runs"][0]["mode"]), (8, &"journal".into()));
    assert_eq!(json["figures"][0]["change_percent"], -50.0);
}

#[test]
fn trace_convert_keeps_every_request() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    let trace = msr(directory.path(), "t.csv", 1_000);
    let trace = trace.to_str().unwrap();
    let (amber, back) = (path("t.amber"), path("back.csv"));
    assert!(amberlog(&["trace", "convert", "--format", "msr", trace, "--zstd", "3", "-o", &amber]).status.success());
    assert!(amberlog(&["trace", "convert", &amber, "--to", "msr", "-o", &back]).status.success());
    let strip = |path: &str| -> Vec<String> {
        // Times become relative; the rest must be the same.
        std::fs::read_to_string(path).unwrap().lines().map(|l| l.split_once(',').unwrap().1.to_owned()).collect()
    };
    assert_eq!(strip(trace), strip(&back));
    let output = amberlog(&["trace", "summary", &amber, "--json", "--filter", "kind=write"]);
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(
        (&json["schema"], &json["traces"][0]["requests"], &json["traces"][0]["format"]),
        (&1.into(), &800.into(), &"amber".into())
    );
    // Two VMs onto one disk, side by side.
    let merged = path("merged.amber");
    let arguments = ["trace", "convert", "--merge", &amber, &amber, "--onto-one-disk", "stride:2097152", "-o", &merged];
    assert!(amberlog(&arguments).status.success());
    let summary_of = |path: &str| -> serde_json::Value {
        serde_json::from_slice::<serde_json::Value>(&amberlog(&["trace", "summary", path, "--json"]).stdout).unwrap()
            ["traces"][0]
            .take()
    };
    // The same recording twice is two VMs, whose disks lie beside one another.
    let (one, both) = (summary_of(&amber), summary_of(&merged));
    assert_eq!((&one["requests"], &both["requests"]), (&1_000.into(), &2_000.into()));
    assert_eq!(both["footprint_bytes"].as_u64().unwrap(), 2 * one["footprint_bytes"].as_u64().unwrap());
    // A failed conversion leaves what was there.
    let output = amberlog(&["trace", "convert", "--format", "spc", trace, "-o", &amber]);
    assert_eq!(output.status.code(), Some(3));
    assert!(amberlog(&["trace", "summary", &amber]).status.success());
    assert!(!Path::new(&format!("{amber}.partial")).exists());
}

#[test]
fn ctrl_c_prints_what_there_is_so_far() {
    let directory = tempfile::tempdir().unwrap();
    let lines = std::fs::read(msr(directory.path(), "t.csv", 100_000)).unwrap();
    let run = |arguments: &[&str]| {
        let mut child = Command::new(env!("CARGO_BIN_EXE_amberlog-lab"))
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        // More than a pipe holds, so it was begun to be read; and the pipe stays open: the trace has no end yet.
        let mut pipe = child.stdin.take().unwrap();
        pipe.write_all(&lines).unwrap();
        let pid = rustix::process::Pid::from_child(&child);
        rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
        let output = child.wait_with_output().unwrap();
        drop(pipe);
        assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
        assert!(text(&output.stderr).contains("interrupted"), "{}", text(&output.stderr));
        serde_json::from_slice::<serde_json::Value>(&output.stdout).unwrap()
    };
    let report = run(&["ssd", "--ftl", "fast", "--trace", "-", "--format", "msr", "--json"]);
    assert_eq!(report["interrupted"], true);
    assert!(report["requests"].as_u64().unwrap() <= 100_000 && report["flash_writes"].is_u64());
    let summary = run(&["trace", "summary", "-", "--format", "msr", "--json"]);
    assert_eq!(summary["interrupted"], true);
}

/// The 2010 paper's experiment on one guest's traces, through the script that prints its figures. Everything here is
/// decided by the traces in the repository, so the bounds are those of the paper where ours keep them, not a tolerance.
#[test]
fn the_2010_papers_figures_hold_on_traces_of_real_guests() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let output = Command::new(root.join("scripts/ssd-figures.sh"))
        .arg(root.join("crates/ssd-sim/traces/2010"))
        // One guest's disk of 4 GB.
        .args(["--blocks", "32768", "--precondition", "sequential", "--json"])
        .env("AMBERLOG", env!("CARGO_BIN_EXE_amberlog-lab"))
        .stdin(Stdio::null())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(json["runs"].as_array().unwrap().len(), 5 * 4 * 3);
    let mut seen = [0; 6];
    for line in json["figures"].as_array().unwrap() {
        let [_, _, journal, vma] = [0, 1, 2, 3].map(|mode| line["values"][mode].as_f64().unwrap());
        // The spare blocks take in all that the compilation writes: DFTL erases nothing in any mode.
        if line["workload"] == "kernel_compile" && line["ftl"] == "dftl" {
            assert_eq!((journal, vma), (0.0, 0.0));
            continue;
        }
        let change = line["change_percent"].as_f64().unwrap();
        match (line["figure"].as_u64().unwrap(), &line["writes_only"] == true) {
            (3, true) => assert!((-56.7..=-42.4).contains(&change), "write traffic: {line}"),
            (4, _) => {
                // At least what the paper saves; and every mode is below full data journaling on storage.
                let least = line["paper_percent"][1].as_f64().unwrap();
                assert!(change <= least, "erases: {line}");
                for mode in [0, 1, 3] {
                    assert!(line["values"][mode].as_f64().unwrap() < journal, "erases: {line}");
                }
                if line["workload"] == "untar" && line["ftl"] == "dftl" {
                    // The paper: writeback and ordered result in only 37.8 % and 40 % of the erases of journal.
                    for mode in [0, 1] {
                        let share = line["values"][mode].as_f64().unwrap() / journal;
                        assert!((0.34..0.42).contains(&share), "{share} of journal's erases: {line}");
                    }
                }
            }
            (_, _) => assert!(change < 0.0, "{line}"),
        }
        seen[line["figure"].as_u64().unwrap() as usize] += 1;
    }
    assert_eq!(seen[2..], [5, 10, 14, 14]);
}
