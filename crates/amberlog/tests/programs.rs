//! The programs beside `amberlog`: what serves VMs carries no experiments and no servers, and still knows their commands.

use std::path::{Path, PathBuf};
use std::process::Command;

/// The crates that a package needs to run, as cargo resolves them for it alone.
fn crates_below(package: &str) -> Vec<String> {
    let output = Command::new(env!("CARGO"))
        .args([
            "tree",
            "--offline",
            "--locked",
            "--edges",
            "normal",
            "--prefix",
            "none",
            "--format",
            "{p}",
            "-p",
            package,
        ])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .expect("cargo runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).expect("text");
    text.lines().filter_map(|line| line.split(' ').next()).map(str::to_owned).collect()
}

#[test]
fn what_serves_vms_carries_no_experiments_and_no_servers() {
    let crates = crates_below("amberlog");
    assert!(crates.iter().any(|name| name == "placement"), "{crates:?}");
    for unwanted in ["lab", "ssd-sim", "guest-kit", "test-frontend", "journal-server", "async-nats"] {
        assert!(!crates.iter().any(|name| name == unwanted), "amberlog needs {unwanted}");
    }
    // Moving bytes needs nothing of where journals live.
    let device = crates_below("block-device");
    for unwanted in ["placement", "journal-area", "remote-journal", "tokio", "jbd2"] {
        assert!(!device.iter().any(|name| name == unwanted), "block-device needs {unwanted}");
    }
}

/// What this program prints when it is called so.
fn said(arguments: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_amberlog")).args(arguments).output().expect("it starts");
    [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat()
}

#[test]
fn help_and_pages_have_every_option() {
    let page = |name: &str| {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs").join(name);
        std::fs::read_to_string(path).expect(name)
    };
    let (help, pages) = (said(&["run", "--help"]), page("use.md") + &page("nvm.md"));
    // The sentence that refuses an option of a disk has all that there are.
    let refused = said(&["run", "--disk", "x,moon=1", "--", "true"]).replace('\n', " ");
    let (_, options) = refused.split_once("there are ").expect("a list");
    let names = options.split(|c: char| !(c.is_ascii_lowercase() || c == '-'));
    let names: Vec<&str> =
        names.filter(|name| name.len() > 3 && !["those", "region"].contains(name) && !name.starts_with('-')).collect();
    let names = &names[..=names.iter().position(|name| *name == "nvm-log-everything").expect("the last one")];
    assert!(names.len() > 20, "{names:?}");
    for name in names {
        assert!(help.contains(name), "run --help does not have {name}");
        assert!(pages.contains(&format!("`{name}")), "neither use.md nor nvm.md has {name}");
    }
    let options = help.lines().filter_map(|line| line.trim_start().strip_prefix("--")?.split(' ').next());
    let missing: Vec<&str> = options
        .filter(|option| !option.starts_with("remote-") && !["help", "disk"].contains(option))
        .filter(|option| !pages.contains(&format!("`--{option}")))
        .collect();
    assert!(missing.is_empty(), "use.md does not have {missing:?}");
    let placements = said(&["placement", "--help"]);
    assert!(placements.contains("with placement=nvm, storage, nvm, retain or copy"), "{placements}");
}

#[test]
fn what_goes_to_the_journal_has_its_priority() {
    use std::os::unix::fs::MetadataExt;
    let directory = tempfile::tempdir().expect("a temporary directory");
    let said = |is_journal: bool| {
        let path = directory.path().join("stderr");
        let file = std::fs::File::create(&path).expect("made");
        let metadata = file.metadata().expect("there");
        let inode = metadata.ino() + u64::from(!is_journal);
        let status = Command::new(env!("CARGO_BIN_EXE_amberlog"))
            .args(["status", "--run", "/nonexistent"])
            .env("JOURNAL_STREAM", format!("{}:{inode}", metadata.dev()))
            .env("AMBERLOG_LOG_FORMAT", "moon")
            .stderr(file)
            .status();
        assert_eq!(status.expect("it starts").code(), Some(1));
        std::fs::read_to_string(path).expect("text")
    };
    let lines = said(true);
    let [warning, error] = lines.lines().collect::<Vec<_>>()[..] else { panic!("{lines}") };
    assert!(warning.starts_with("<4>") && warning.contains("AMBERLOG_LOG_FORMAT"), "{lines}");
    assert!(error.starts_with("<3>amberlog: no daemon answers"), "{lines}");
    assert!(!said(false).contains('<'), "somebody else's stderr");
}

#[test]
fn commands_of_other_programs_start_them() {
    let amberlog = Path::new(env!("CARGO_BIN_EXE_amberlog"));
    let beside = tempfile::tempdir().expect("a temporary directory");
    let copy: PathBuf = beside.path().join("amberlog");
    std::fs::copy(amberlog, &copy).expect("copied");
    // A program that says how it was called stands for the real ones, which are tested where they are.
    for name in ["amberlog-lab", "amberlog-journal-server"] {
        let script = beside.path().join(name);
        std::fs::write(&script, "#!/bin/sh\necho \"${0##*/}\" \"$@\"\nexit 3\n").expect("written");
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(&script, mode).expect("made executable");
    }
    for (arguments, said) in [
        (&["lab", "list", "--quick"][..], "amberlog-lab list --quick"),
        (&["ssd", "--help"], "amberlog-lab ssd --help"),
        (&["trace", "summary", "--json", "-"], "amberlog-lab trace summary --json -"),
        (&["disk-model", "sata-ssd", "--socket", "s"], "amberlog-lab disk-model sata-ssd --socket s"),
        (&["journal-server", "--listen", "[::1]:0"], "amberlog-journal-server --listen [::1]:0"),
    ] {
        let output = Command::new(&copy).args(arguments).output().expect("runs");
        assert_eq!(String::from_utf8_lossy(&output.stdout).trim_end(), said);
        assert_eq!(output.status.code(), Some(3), "the other program's exit code");
    }
    std::fs::remove_file(beside.path().join("amberlog-lab")).expect("removed");
    let output = Command::new(&copy).args(["ssd"]).output().expect("runs");
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("install amberlog-lab"), "{output:?}");
}

/// The worker writes it, and what it writes to is the user's.
#[test]
fn a_report_can_be_had_at_standard_output() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let image = directory.path().join("disk.img");
    std::fs::File::create(&image).and_then(|file| file.set_len(1 << 20)).expect("an image");
    let mut command = Command::new(env!("CARGO_BIN_EXE_amberlog"));
    command.args(["run", "--report", "/dev/stdout", "--disk"]).arg(&image).args(["--", "true"]);
    let output = command.env("AMBERLOG_LOG", "error").output().expect("amberlog runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let report = String::from_utf8(output.stdout).expect("text");
    assert!(report.contains("\"disks\""), "no report: {report}");
}

/// What no image could mend is said before anything is opened, as a mistake of who typed it.
#[test]
fn disks_that_contradict_each_other_are_a_usage_error() {
    let directory = tempfile::tempdir().expect("a directory");
    let image = |name: &str| {
        let path = directory.path().join(name);
        std::fs::File::create(&path).and_then(|file| file.set_len(1 << 20)).expect("an image");
        path.display().to_string()
    };
    let (a, b) = (image("a"), image("b"));
    for (words, sentence) in [
        (vec!["--disk".to_owned(), format!("{a},placement=remote=127.0.0.1:9/a")], "--remote-insecure"),
        (vec!["--disk".to_owned(), format!("{a},name=x"), "--disk".to_owned(), format!("{b},name=x")], "x"),
        (
            vec!["--disk".to_owned(), a.clone(), "--journal-disk".to_owned(), format!("{b},for=nosuch")],
            "there is no disk with name=nosuch",
        ),
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_amberlog"))
            .arg("run")
            .args(&words)
            .args(["--", "true"])
            .output()
            .expect("amberlog runs");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(2) && said.contains(sentence), "{words:?}: {said}");
    }
}
