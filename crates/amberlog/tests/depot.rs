//! The process that keeps descriptors over a daemon's death, as a process: what one program's daemon has left there, another one's does not take.

use rustix::process::{Pid, Signal};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use supervision::depot::InDepot;
use supervision::{Opened, Shelf};

const LIMIT: Duration = Duration::from_secs(30);

/// A process that is ended with the test.
struct Process(Child);

impl Process {
    fn vmm() -> Self {
        Process(Command::new("sleep").arg("60").spawn().expect("started"))
    }

    fn pid(&self) -> i32 {
        self.0.id().cast_signed()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn start(listener: OwnedFd) -> io::Result<()> {
    let mut depot = Command::new(env!("CARGO_BIN_EXE_amberlog")).arg("depot").stdin(Stdio::from(listener)).spawn()?;
    std::thread::spawn(move || depot.wait());
    Ok(())
}

/// A daemon comes of a program that keeps things in this way.
fn daemon(run: &Path, format: &str) -> Shelf {
    let taken = InDepot::take(&run.join("store.sock"), Box::new(start)).expect("a depot");
    let Opened::Ours(shelf) = taken.open(format, &[]) else { panic!("{format} is not the way in which it is kept") };
    shelf
}

/// A daemon with no VM, which says why it does not serve.
fn refused(directory: &Path) -> String {
    let config = directory.join("amberlog.toml");
    let [shm, run, image] = ["shm", "run", "image"].map(|name| directory.join(name));
    std::fs::create_dir_all(&shm).expect("a directory");
    File::create(&image).and_then(|image| image.set_len(1 << 20)).expect("an image");
    let text =
        format!("shm = {shm:?}\nrun = {run:?}\n[[vm]]\nname = \"db\"\ndisks = [\"{},format=raw\"]\n", image.display());
    std::fs::write(&config, text).expect("written");
    let output = Command::new("timeout")
        .args(["20", env!("CARGO_BIN_EXE_amberlog"), "serve", "--config"])
        .arg(config)
        .output()
        .expect("it ran");
    assert_eq!(output.status.code(), Some(1), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn run_in(directory: &Path) -> PathBuf {
    use std::os::unix::fs::DirBuilderExt;
    let run = directory.join("run");
    std::fs::DirBuilder::new().mode(0o700).create(&run).expect("a directory");
    run
}

/// The depots that hear there: one, or none.
fn depot_of(run: &Path) -> Option<u32> {
    let path = run.join("store.sock");
    let sockets = std::fs::read_to_string("/proc/net/unix").expect("sockets");
    let hears =
        sockets.lines().find(|line| line.ends_with(path.to_str().expect("text")) && line.contains(" 00010000 "))?;
    let inode = format!("socket:[{}]", hears.split_whitespace().nth(6)?);
    let entries = std::fs::read_dir("/proc").expect("processes").flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).find(|pid: &u32| {
        std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name == "depot\n")
            && std::fs::read_link(format!("/proc/{pid}/fd/0")).is_ok_and(|input| input == Path::new(&inode))
    })
}

fn await_no_depot(run: &Path) {
    let deadline = Instant::now() + LIMIT;
    while depot_of(run).is_some() {
        assert!(Instant::now() < deadline, "it stays");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Its guests wait for the program that they had, and get it; when their VMMs end, whatever is started serves.
#[test]
fn what_another_programs_daemon_has_left_waits_for_that() {
    let directory = tempfile::tempdir().expect("a directory");
    let run = run_in(directory.path());
    let vmm = Process::vmm();
    let started = started_at(vmm.pid());
    let file = tempfile::tempfile().expect("a file");
    {
        let mut shelf = daemon(&run, "999 (amberlog 9.9)");
        let mut kept = shelf.split("db").split("kept");
        kept.put("vmm", format!("{} {started}", vmm.pid()).as_bytes(), &[]);
        kept.put("memory", b"ram", &[file.as_fd()]);
    }
    for _ in 0..2 {
        let why = refused(directory.path());
        assert!(why.contains("999 (amberlog 9.9)") && why.contains("(db)"), "{why}");
    }
    let mut shelf = daemon(&run, "999 (amberlog 9.9)");
    let mut kept = shelf.split("db").split("kept");
    assert!(kept.is_whole());
    assert_eq!(kept.take_found()["memory"].descriptors.len(), 1);
    drop((kept, shelf));
    drop(vmm);
    await_no_depot(&run);
}

/// A service manager's signals are for all alike: it stays as long as a guest needs it. When it is stopped as its daemon ends, it is killed where
/// nobody needs it, and otherwise not.
#[test]
fn a_depot_ends_when_nothing_is_left_and_not_before() {
    let directory = tempfile::tempdir().expect("a directory");
    let run = run_in(directory.path());
    let vmm = Process::vmm();
    let words = format!("{} {}", vmm.pid(), started_at(vmm.pid()));
    let signal = |signal| {
        let depot = depot_of(&run).expect("a depot").cast_signed();
        rustix::process::kill_process(Pid::from_raw(depot).expect("a number"), signal).expect("it lives");
    };
    let mut shelf = daemon(&run, "1");
    shelf.split("db").split("kept").put("vmm", words.as_bytes(), &[]);
    [Signal::TERM, Signal::HUP, Signal::INT, Signal::STOP].into_iter().for_each(signal);
    drop(shelf);
    signal(Signal::CONT);
    let mut shelf = daemon(&run, "1");
    let mut kept = shelf.split("db").split("kept");
    assert!(kept.words("vmm").is_some(), "it was killed");
    kept.clear();
    shelf.clear();
    signal(Signal::STOP);
    assert!(depot_of(&run).is_some());
    drop((kept, shelf));
    // It has nothing, and does not answer.
    await_no_depot(&run);
    // Nobody waits for the one that was there.
    drop(daemon(&run, "1"));
    await_no_depot(&run);
}

fn started_at(pid: i32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("it lives");
    let after = stat.rsplit_once(") ").expect("a name").1;
    after.split(' ').nth(19).expect("a field").parse().expect("a number")
}
