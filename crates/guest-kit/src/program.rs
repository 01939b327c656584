//! Runs the host's programs: finds them (also where only root looks), starts them from one thread
//! that lives as long as the process, and turns failures into sentences.
//!
//! Every long-running child gets a parent-death signal through `setpriv --pdeathsig`. The kernel
//! sends that signal when the *thread* that forked dies, hence the one spawning thread.

use crate::error::{Error, Result};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::{Sender, channel, sync_channel};
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};

/// Where a program is, looking also in the directories that a plain user's PATH leaves out.
pub fn find_program(name: &str) -> Result<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/sbin", "/sbin", "/usr/bin", "/bin"].map(PathBuf::from))
        .map(|directory| directory.join(name))
        .find(|candidate| candidate.is_file())
        .ok_or_else(|| Error::NoProgram(name.to_owned()))
}

/// A command for `name`, which must be installed, that reads nothing and speaks English.
pub fn command(name: &str) -> Result<Command> {
    let mut command = Command::new(find_program(name)?);
    command.stdin(Stdio::null()).env("LC_ALL", "C");
    Ok(command)
}

/// QEMU's version, the first two numbers; nothing if it does not say one.
pub fn qemu_version() -> Result<Option<(u32, u32)>> {
    let output = run(command("qemu-system-x86_64")?.arg("--version"), &[0])?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let mut numbers = said.split_once(" version ").map_or("", |(_, version)| version).split('.');
    let mut number = || numbers.next()?.parse::<u32>().ok();
    Ok(number().zip(number()))
}

/// What has a socket of QEMU's connected again a second after it was closed: not every version understands the same words.
pub fn reconnect_property() -> Result<&'static str> {
    let is_new = qemu_version()?.is_some_and(|version| version >= (9, 2));
    Ok(if is_new { "reconnect-ms=1000" } else { "reconnect=1" })
}

/// Waits until a process that need not be our child has ended, all of its threads: /proc calls one a zombie whose first thread has, while
/// others still hold its files and memory. `false` if it lives on after `limit`.
pub fn has_ended_within(pid: u32, limit: Duration) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use rustix::process::{Pid, PidfdFlags, pidfd_open};
    let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) else { return true };
    let Ok(process) = pidfd_open(pid, PidfdFlags::empty()) else { return true };
    let deadline = Instant::now() + limit;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) };
        match poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&left)) {
            Err(rustix::io::Errno::INTR) => {}
            ended => return ended == Ok(1),
        }
    }
}

/// Runs a command to its end; exit codes in `accepted` are fine, any other is an error.
pub fn run(command: &mut Command, accepted: &[i32]) -> Result<Output> {
    let output = command.output().map_err(|error| Error::Program {
        command: describe(command),
        status: "no start".to_owned(),
        output: error.to_string(),
    })?;
    if output.status.code().is_some_and(|code| accepted.contains(&code)) {
        return Ok(output);
    }
    let mut text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.push_str(&String::from_utf8_lossy(&output.stderr));
    Err(Error::Program { command: describe(command), status: output.status.to_string(), output: tail(&text, 20) })
}

/// The last `lines` lines of a text.
pub fn tail(text: &str, lines: usize) -> String {
    let all: Vec<&str> = text.lines().collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}

fn describe(command: &Command) -> String {
    std::iter::once(command.get_program())
        .chain(command.get_args())
        .map(OsStr::to_string_lossy)
        .collect::<Vec<_>>()
        .join(" ")
}

type Job = Box<dyn FnOnce() + Send>;

/// Starts a child from the one thread that outlives every caller, so that a parent-death signal
/// means the death of this process and not of, say, a test's thread.
///
/// # Errors
/// When the program cannot be started.
pub fn spawn(mut command: Command) -> std::io::Result<Child> {
    static JOBS: OnceLock<Mutex<Sender<Job>>> = OnceLock::new();
    let jobs = JOBS.get_or_init(|| {
        let (sender, receiver) = channel::<Job>();
        std::thread::Builder::new()
            .name("spawner".to_owned())
            .spawn(move || receiver.into_iter().for_each(|job| job()))
            .expect("a thread can be started");
        Mutex::new(sender)
    });
    let (answer, child) = sync_channel(1);
    jobs.lock()
        .expect("no spawn panics")
        .send(Box::new(move || {
            let _ = answer.send(command.spawn());
        }))
        .expect("the spawner thread lives as long as the process");
    child.recv().expect("the spawner thread answers")
}

/// The checkout this crate was built from: where `build/`, `scripts/` and `target/` are.
pub fn workspace() -> &'static Path {
    static ROOT: OnceLock<PathBuf> = OnceLock::new();
    ROOT.get_or_init(|| {
        let here = Path::new(env!("CARGO_MANIFEST_DIR"));
        here.ancestors().nth(2).unwrap_or(here).to_owned()
    })
}

/// A binary of this workspace (`amberlog`, say) from the build that this program belongs to: the
/// directory of the running program, or its parent for a test. The environment variable
/// `AMBERLOG_BINARY_DIR` overrides.
pub fn workspace_binary(name: &str) -> Result<PathBuf> {
    let mut candidates = Vec::new();
    if let Some(directory) = std::env::var_os("AMBERLOG_BINARY_DIR") {
        candidates.push(PathBuf::from(directory));
    } else if let Ok(own) = std::env::current_exe() {
        candidates.extend(own.ancestors().skip(1).take(2).map(Path::to_owned));
    }
    candidates.iter().map(|directory| directory.join(name)).find(|candidate| candidate.is_file()).ok_or_else(|| {
        Error::Assets(format!(
            "the program {name} is not built beside this one; run 'cargo build -p {name}' \
                 with the same profile, or set AMBERLOG_BINARY_DIR"
        ))
    })
}
