//! The programs beside `amberlog`: what serves VMs carries no experiments and no servers, and still knows their commands.

use disk_model::{Profile, Server, ServerOptions};
use guest_kit::program::has_ended_within;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

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
    for unwanted in ["lab", "ssd-sim", "disk-model", "guest-kit", "test-frontend", "journal-server", "async-nats"] {
        assert!(!crates.iter().any(|name| name == unwanted), "amberlog needs {unwanted}");
    }
    // Moving bytes needs nothing of where journals live.
    let device = crates_below("block-device");
    for unwanted in ["placement", "journal-area", "remote-journal", "tokio", "jbd2", "disk-model"] {
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

/// A copy of `amberlog`, and beside it an `amberlog-lab` that notes how it is called, and has a drive of this process answer at the socket
/// that it is given.
struct Beside {
    directory: tempfile::TempDir,
    shm: tempfile::TempDir,
    _drive: Server,
}

impl Beside {
    fn new() -> Self {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let shm = tempfile::tempdir_in("/dev/shm").expect("tmpfs");
        std::fs::copy(env!("CARGO_BIN_EXE_amberlog"), directory.path().join("amberlog")).expect("copied");
        let socket = Some(directory.path().join("drive"));
        let options = ServerOptions { profile: Profile::St39102lw, seed: 1, time_scale: 0.001, socket };
        let beside = Beside { directory, shm, _drive: Server::start(options).expect("a drive") };
        let at = beside.directory.path().display();
        beside
            .set_lab(&format!("echo \"$*\" >>{at}/calls\necho $$ >>{at}/pids\nln -s {at}/drive \"$6\"\nexec sleep 60"));
        beside
    }

    fn set_lab(&self, script: &str) {
        let lab = self.directory.path().join("amberlog-lab");
        std::fs::write(&lab, format!("#!/bin/sh\n{script}\n")).expect("written");
        std::fs::set_permissions(&lab, PermissionsExt::from_mode(0o755)).expect("made executable");
    }

    /// What `amberlog-lab` has noted.
    fn noted(&self, what: &str) -> Vec<String> {
        let text = std::fs::read_to_string(self.directory.path().join(what)).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }

    /// A disk that takes a drive's time.
    fn disk(&self, name: &str, bytes: u64) -> String {
        let path = self.directory.path().join(name);
        std::fs::File::create(&path).and_then(|file| file.set_len(bytes)).expect("an image");
        format!("{},model=st39102lw", path.display())
    }

    fn command(&self, disks: &[&str], vmm: &[&str]) -> Command {
        let mut command = Command::new(self.directory.path().join("amberlog"));
        command.args(["run", "--time-scale", "2", "--shm"]).arg(self.shm.path());
        for disk in disks {
            command.args(["--disk", *disk]);
        }
        command.arg("--").args(vmm);
        command
    }

    fn run(&self, disks: &[&str]) -> Output {
        self.command(disks, &["true"]).output().expect("amberlog runs")
    }

    fn assert_nothing_runs(&self) {
        for pid in self.noted("pids") {
            assert!(has_ended_within(pid.parse().expect("a number"), Duration::from_secs(10)), "process {pid} runs");
        }
    }
}

#[test]
fn disks_that_name_one_drive_share_one_which_ends_with_the_run() {
    let beside = Beside::new();
    let (small, other) = (beside.disk("small", 1 << 20), beside.disk("other", 1 << 20));
    let output = beside.run(&[&small, &other]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let calls = beside.noted("calls");
    let [call] = calls.as_slice() else { panic!("both disks have one drive: {calls:?}") };
    let socket = call.strip_prefix("disk-model st39102lw --time-scale 2 --socket ").expect("what amberlog-lab takes");
    assert!(Path::new(socket).symlink_metadata().is_err(), "its socket is taken away");
    beside.assert_nothing_runs();
    // They are side by side on it: of disks of 5 GiB a drive of 9.1 GB holds one.
    let (first, second) = (beside.disk("first", 5 << 30), beside.disk("second", 5 << 30));
    let output = beside.run(&[&first]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let output = beside.run(&[&first, &second]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("model=st39102lw: the modelled disk has no room left"), "{said}");
    beside.assert_nothing_runs();
    assert_eq!(beside.noted("calls").len(), 3);
}

#[test]
fn a_modelled_disk_ends_when_its_run_is_killed() {
    let beside = Beside::new();
    let disk = beside.disk("image", 1 << 20);
    let mut command = beside.command(&[&disk], &["sh", "-c", "exec sleep 60"]);
    let mut run = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().expect("amberlog starts");
    let deadline = Instant::now() + Duration::from_secs(60);
    while beside.noted("pids").is_empty() {
        assert!(Instant::now() < deadline, "amberlog-lab was not started");
        std::thread::sleep(Duration::from_millis(20));
    }
    run.kill().expect("killed");
    run.wait().expect("its end");
    beside.assert_nothing_runs();
}

#[test]
fn a_drive_that_does_not_begin_ends_the_run_with_the_reason() {
    let beside = Beside::new();
    let disk = beside.disk("image", 1 << 20);
    beside.set_lab("exit 7");
    let output = beside.run(&[&disk]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(1) && said.contains("has ended before it served"), "{said}");
    std::fs::remove_file(beside.directory.path().join("amberlog-lab")).expect("removed");
    let output = beside.run(&[&disk]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("model=st39102lw: cannot start ") && said.contains("; install amberlog-lab"), "{said}");
}
