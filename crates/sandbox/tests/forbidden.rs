//! Tries what is forbidden, in a process of its own for each try: a thread that enters a sandbox in some role, and asks.

use sandbox::{Role, Sandbox, enter_worker};
use std::fs::File;
use std::io;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::Command;

/// Tells the child what to try: SANDBOX, ATTEMPT, DIRECTORY.
const TRY: &str = "AMBERLOG_SANDBOX_TRY";
/// How the child ends when the attempt worked, and when it was refused with an error.
const WORKED: i32 = 40;
const REFUSED: i32 = 41;

/// What is tried.
fn attempt(what: &str, directory: &Path) -> io::Result<()> {
    let call = |number: libc::c_long, arguments: [libc::c_long; 4]| {
        let [first, second, third, fourth] = arguments;
        // SAFETY: these calls get numbers and null pointers only, and a new mapping is never used.
        let result = unsafe { libc::syscall(number, first, second, third, fourth, -1, 0) };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    };
    let socket = |family: i32| call(libc::SYS_socket, [family.into(), libc::SOCK_STREAM.into(), 0, 0]);
    match what {
        "exec" => Err(Command::new("/bin/true").exec()),
        "exec in a thread" => std::thread::spawn(|| Err(Command::new("/bin/true").exec())).join().expect("no panic"),
        "ptrace" => call(libc::SYS_ptrace, [libc::PTRACE_TRACEME.into(), 0, 0, 0]),
        "unshare" => call(libc::SYS_unshare, [libc::CLONE_NEWUSER.into(), 0, 0, 0]),
        "fork" => call(libc::SYS_clone, [libc::SIGCHLD.into(), 0, 0, 0]).map(|()| std::process::exit(WORKED)),
        "signal another" => {
            call(libc::SYS_kill, [rustix::process::getppid().map_or(1, |p| p.as_raw_nonzero().get()).into(), 0, 0, 0])
        }
        "limits of another" => call(libc::SYS_prlimit64, [1, 7, 8, 0]),
        "message queue" => call(libc::SYS_msgget, [0, 0, 0, 0]),
        "of tomorrow" => call(1000, [0; 4]),
        "terminal" => call(libc::SYS_ioctl, [0, 0x5412, 0, 0]),
        "io_uring" => call(libc::SYS_io_uring_setup, [1, 0, 0, 0]),
        "code" => {
            let (protection, flags) = (libc::PROT_READ | libc::PROT_EXEC, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
            call(libc::SYS_mmap, [0, 4096, protection.into(), flags.into()])
        }
        "internet" => socket(libc::AF_INET),
        "packets" => socket(libc::AF_PACKET),
        "unix" => socket(libc::AF_UNIX),
        "shadow" => File::open("/etc/shadow").map(drop),
        "hosts" => std::fs::read("/etc/hosts").map(drop),
        "write outside" => File::create(directory.with_extension("outside")).map(drop),
        "write inside" => std::fs::write(directory.join("new"), b"x")
            .and_then(|()| std::fs::rename(directory.join("new"), directory.join("log-0.table"))),
        "arguments" => std::fs::read("/proc/self/cmdline").map(drop),
        "ordinary work" => {
            let blocks: Vec<Vec<u8>> = (0..64).map(|number| vec![number; 1 << 20]).collect();
            let sum = std::thread::spawn(move || blocks.iter().map(|block| u64::from(block[77])).sum::<u64>());
            assert_eq!(sum.join().expect("no panic"), 2016);
            assert!(std::time::SystemTime::now().elapsed().is_ok());
            assert!(std::panic::catch_unwind(|| panic!("on purpose")).is_err());
            rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC)?;
            rustix::fs::memfd_create("inflight", rustix::fs::MemfdFlags::CLOEXEC)?;
            Ok(())
        }
        other => panic!("{other}?"),
    }
}

/// Not a test by itself: what the others start.
#[test]
fn child() {
    let Ok(text) = std::env::var(TRY) else { return };
    let mut words = text.split(':');
    let [sandbox, what, directory] = [(); 3].map(|()| words.next().expect("three words").to_owned());
    let outcome = std::thread::spawn(move || {
        let directory = Path::new(&directory);
        match sandbox.as_str() {
            "worker" => enter_worker(),
            "disk" => Sandbox::new(directory, false).enter(Role::Disk),
            "vmm" => Sandbox::new(directory, false).enter(Role::Vmm),
            "disk with a network" => Sandbox::new(directory, true).enter(Role::Disk),
            other => panic!("{other}?"),
        }
        attempt(&what, directory)
    });
    match outcome.join().expect("no panic") {
        Ok(()) => std::process::exit(WORKED),
        Err(error) => {
            eprintln!("{error}");
            std::process::exit(REFUSED)
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// The process was ended, with a sentence.
    Killed,
    /// An error.
    Refused,
    Worked,
}

fn try_it(sandbox: &str, what: &str) -> (End, String) {
    let place = tempfile::tempdir().expect("a directory");
    let directory = place.path().join("vm");
    std::fs::create_dir(&directory).expect("made");
    let output = Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", "child", "--nocapture"])
        .env(TRY, format!("{sandbox}:{what}:{}", directory.display()))
        .output()
        .expect("started");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let end = match (output.status.code(), output.status.signal()) {
        (Some(WORKED), _) => End::Worked,
        (Some(REFUSED), _) => End::Refused,
        (_, Some(libc::SIGABRT)) => End::Killed,
        other => panic!("{sandbox}, {what}: {other:?}: {said}"),
    };
    (end, said)
}

#[track_caller]
fn expect(sandbox: &str, cases: &[(&str, End)]) {
    for (what, expected) in cases {
        let (end, said) = try_it(sandbox, what);
        assert_eq!(end, *expected, "{sandbox}, {what}: {said}");
        if end == End::Killed {
            assert!(said.contains("asked for system call"), "{sandbox}, {what}: {said}");
        }
    }
}

/// What every role has in common.
const ALL: &[(&str, End)] = &[
    ("exec", End::Killed),
    ("exec in a thread", End::Killed),
    ("ptrace", End::Killed),
    ("unshare", End::Killed),
    ("packets", End::Killed),
    ("unix", End::Worked),
    ("arguments", End::Worked),
    ("write inside", End::Worked),
    ("ordinary work", End::Worked),
];

#[test]
fn a_thread_that_works_for_a_guest_gets_nothing_else() {
    for role in ["disk", "vmm"] {
        expect(role, ALL);
        expect(
            role,
            &[
                ("io_uring", End::Killed),
                ("code", End::Killed),
                ("internet", End::Killed),
                ("fork", End::Killed),
                ("signal another", End::Killed),
                ("limits of another", End::Killed),
                ("message queue", End::Killed),
                ("of tomorrow", End::Killed),
                ("terminal", End::Killed),
                ("shadow", End::Refused),
                ("hosts", End::Refused),
                ("write outside", End::Refused),
            ],
        );
    }
    let (_, said) = try_it("disk", "ptrace");
    let call = format!("'disk' asked for system call {},", libc::SYS_ptrace);
    assert!(said.contains(&call), "{said}");
}

#[test]
fn one_whose_journal_is_on_a_server_can_reach_it() {
    expect("disk with a network", ALL);
    expect(
        "disk with a network",
        &[
            ("internet", End::Worked),
            ("code", End::Worked),
            ("hosts", End::Worked),
            ("io_uring", End::Killed),
            ("write outside", End::Refused),
        ],
    );
}

#[test]
fn a_worker_starts_nothing_and_keeps_its_files() {
    expect("worker", ALL);
    expect(
        "worker",
        &[("internet", End::Worked), ("code", End::Worked), ("hosts", End::Worked), ("write outside", End::Worked)],
    );
}
