//! The children of a supervisor, its own and those that fall to it.
//!
//! Who is the first process of a container (or a subreaper) inherits every process there whose parent has died. A worker's second process ([`crate::last_memory`])
//! is such a one each time a worker is killed. Somebody has to ask how each of them ended, or it stays as a zombie, with its number.
//!
//! What it must never do: ask that of a child that this process has started itself, because whoever waits for that child would never hear of its end.
//! So those are written down under a lock before they can end, and crossed out under it as they are asked. Failure story: a zombie that is not asked for in
//! one round is asked for in the next one, a second later.

use rustix::process::{Pid, WaitId, WaitIdOptions, waitid};
use std::collections::BTreeSet;
use std::io::{self, Read};
use std::mem::MaybeUninit;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

/// How often it is looked for those that have ended.
const ROUND: Duration = Duration::from_secs(1);

/// The numbers of those that this process has started and not asked yet.
static OWN: Mutex<BTreeSet<u32>> = Mutex::new(BTreeSet::new());

fn own() -> MutexGuard<'static, BTreeSet<u32>> {
    OWN.lock().expect("no panic under this lock")
}

/// A child that this process has started. All that a supervisor starts are such ones.
#[derive(Debug)]
pub struct OwnChild(Child);

impl OwnChild {
    /// Starts it.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn start(command: &mut Command) -> io::Result<Self> {
        let mut own = own();
        let child = command.spawn()?;
        own.insert(child.id());
        Ok(OwnChild(child))
    }

    /// Its number.
    pub fn id(&self) -> u32 {
        self.0.id()
    }

    /// Ends it at once.
    ///
    /// # Errors
    /// When the kernel refuses that.
    pub fn kill(&mut self) -> io::Result<()> {
        self.0.kill()
    }

    /// Waits for its end. Says how it ended.
    ///
    /// # Errors
    /// When it cannot be waited for.
    pub fn wait(&mut self) -> io::Result<ExitStatus> {
        if let Some(pid) = i32::try_from(self.id()).ok().and_then(Pid::from_raw) {
            // Without the lock, and it stays to be asked. One that was asked before is none any more, and its answer is known.
            let flags = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
            while matches!(waitid(WaitId::Pid(pid), flags), Err(rustix::io::Errno::INTR)) {}
        }
        // Its number can be another one's as soon as it was asked.
        let mut own = own();
        let status = self.0.wait()?;
        own.remove(&self.id());
        Ok(status)
    }
}

/// What a command prints, and how it ended.
///
/// # Errors
/// When it cannot be started or read.
pub fn output(command: &mut Command) -> io::Result<(ExitStatus, Vec<u8>)> {
    let child = OwnChild::start(command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()))?;
    read_to_end(child, |child| child.stdout.take())
}

/// What a command says of what went wrong, and how it ended.
///
/// # Errors
/// When it cannot be started or read.
pub fn errors(command: &mut Command) -> io::Result<(ExitStatus, Vec<u8>)> {
    let child = OwnChild::start(command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()))?;
    read_to_end(child, |child| child.stderr.take())
}

fn read_to_end<R: Read>(
    mut child: OwnChild,
    stream: impl FnOnce(&mut Child) -> Option<R>,
) -> io::Result<(ExitStatus, Vec<u8>)> {
    let mut said = Vec::new();
    let read = stream(&mut child.0).map(|mut stream| stream.read_to_end(&mut said));
    let status = child.wait()?;
    read.transpose()?;
    Ok((status, said))
}

/// From now on asks those that fall to this process how they ended, if any can.
pub fn take_orphans() {
    if !inherits_orphans() {
        return;
    }
    let taking = std::thread::Builder::new().name("orphans".to_owned()).spawn(|| {
        loop {
            ask_orphans(ended_child);
            std::thread::sleep(ROUND);
        }
    });
    if let Err(error) = taking {
        log::error!("no thread for processes whose parents have died, so they stay as zombies: {error}");
    }
}

/// Whether this is the first process, or has been made a subreaper by whoever became it.
fn inherits_orphans() -> bool {
    rustix::process::getpid().is_init() || rustix::process::child_subreaper().is_ok_and(|is_one| is_one.is_some())
}

/// Asks those that have ended, which `next` names, until there is none, or one that somebody is about to ask.
fn ask_orphans(mut next: impl FnMut() -> Option<Pid>) {
    let own = own();
    while let Some(pid) = next().filter(|pid| !own.contains(&pid.as_raw_nonzero().get().cast_unsigned())) {
        if rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::NOHANG).is_err() {
            return;
        }
    }
}

/// A child that has ended. It stays to be asked.
fn ended_child() -> Option<Pid> {
    let mut found = MaybeUninit::<libc::siginfo_t>::zeroed();
    let flags = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
    // SAFETY: the kernel writes to the variable alone, which lives across the call.
    let result = unsafe { libc::waitid(libc::P_ALL, 0, found.as_mut_ptr(), flags) };
    // SAFETY: zeroes are one, and so is what the kernel has written in their place; a child's end has a number, and zeroes have the number of none.
    let pid = unsafe { found.assume_init().si_pid() };
    if result == 0 { Pid::from_raw(pid) } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pid_of(id: u32) -> Pid {
        Pid::from_raw(id.cast_signed()).expect("a number")
    }

    fn await_end(pid: Pid) {
        waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT).expect("a child");
    }

    fn exits_with(code: u8) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", &format!("exit {code}")]);
        command
    }

    #[test]
    fn orphans_are_asked_and_own_children_are_left_to_who_waits_for_them() {
        // Whatever this process has not noted is an orphan to it.
        let mut orphan = exits_with(5).spawn().expect("started");
        let mut child = OwnChild::start(&mut exits_with(7)).expect("started");
        let (first, second) = (pid_of(orphan.id()), pid_of(child.id()));
        await_end(first);
        await_end(second);
        let mut ended = [first, second].into_iter();
        ask_orphans(|| ended.next());
        orphan.wait().expect_err("it was asked");
        assert_eq!(child.wait().expect("it is still there to be asked").code(), Some(7));
        assert!(!own().contains(&child.id()), "its number may be another one's");
        assert_eq!(child.wait().expect("as before").code(), Some(7));
    }

    #[test]
    fn what_a_command_prints_is_heard_to_its_end() {
        let (status, said) = output(Command::new("sh").args(["-c", "echo a; echo b; exit 3"])).expect("it ran");
        assert_eq!((status.code(), said.as_slice()), (Some(3), b"a\nb\n".as_slice()));
        let (status, said) = errors(Command::new("sh").args(["-c", "echo a; echo b >&2; exit 3"])).expect("it ran");
        assert_eq!((status.code(), said.as_slice()), (Some(3), b"b\n".as_slice()));
        output(&mut Command::new("/nonexistent/program")).expect_err("there is none");
    }
}
