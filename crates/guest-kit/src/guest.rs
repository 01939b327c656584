//! A running guest: started from a [`GuestSpec`], watched through its report channel, killed in
//! whatever way a test asks for, and never left behind.
//!
//! Failure story: every wait has a limit, and every error carries the end of the console. The
//! run's directory (console, QEMU's stderr) is removed at the end, unless something failed.

use crate::assets::Assets;
use crate::cloud_hypervisor;
use crate::error::{Error, FileContext, Result};
use crate::interrupt;
use crate::platform::Platform;
use crate::program;
use crate::qmp::Qmp;
use crate::report::{Acknowledged, ReportChannel, Reported};
use crate::scratch::{Scratch, Use};
use crate::spec::{Disks, GuestSpec};
use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use std::cell::Cell;
use std::fs::File;
use std::io::Write;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// A guest that runs, or ran.
pub struct Guest {
    name: String,
    directory: Option<Scratch>,
    child: Child,
    ended: Option<ExitStatus>,
    report: ReportChannel,
    qmp_listener: UnixListener,
    qmp: Option<Qmp>,
    failed: Cell<bool>,
    quiet: bool,
}

impl Guest {
    /// Starts QEMU (or the wrapper) on this platform and waits for nothing.
    pub(crate) fn launch_on(spec: GuestSpec, platform: &Platform) -> Result<Self> {
        if interrupt::is_requested() {
            return Err(Error::Interrupted);
        }
        let assets = Assets::get()?;
        let temporary = spec.directory.clone().unwrap_or_else(std::env::temp_dir);
        let directory = Scratch::new_in(&temporary, Use::Run)?;
        let path = directory.path();

        let initramfs = path.join("initramfs");
        let mut archive = File::create(&initramfs).at("create", &initramfs)?;
        archive.write_all(assets.initramfs()).at("write", &initramfs)?;
        archive.write_all(&platform.kernel.modules_archive(&spec.modules)?).at("write", &initramfs)?;
        for name in &spec.programs {
            archive.write_all(&Assets::program(name)?).at("write", &initramfs)?;
        }
        archive.write_all(&spec.run_archive()).at("write", &initramfs)?;
        drop(archive);

        let report_path = path.join("report");
        let report = ReportChannel::listen(UnixListener::bind(&report_path).at("listen on", &report_path)?);
        let qmp_path = path.join("qmp");
        let qmp_listener = UnixListener::bind(&qmp_path).at("listen on", &qmp_path)?;

        let vmm = program::find_program(match spec.disks {
            Disks::CloudHypervisor(_) => cloud_hypervisor::PROGRAM,
            Disks::Plain(_) | Disks::Wrapper(_) => "qemu-system-x86_64",
        })?;
        // A wrapper is asked to end, so that it can take its QEMU along; QEMU itself is killed.
        let death = if matches!(spec.disks, Disks::Wrapper(_)) { "TERM" } else { "KILL" };
        let mut command = Command::new(program::find_program("setpriv")?);
        command.args(["--pdeathsig", death, "--"]);
        let arguments = match &spec.disks {
            Disks::CloudHypervisor(words) => spec.cloud_hypervisor_arguments(platform, path, words),
            Disks::Plain(_) | Disks::Wrapper(_) => spec.arguments(platform, path),
        };
        if let Disks::Wrapper(words) = &spec.disks {
            command.args(words).arg("--");
        }
        command
            .arg(&vmm)
            .args(arguments)
            .envs(spec.environment.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null())
            .stdout(log_file(&path.join("stdout.log"))?)
            .stderr(directory.errors()?)
            .process_group(0);
        let started = program::spawn(command);
        let child = match started {
            Ok(child) => child,
            Err(error) => {
                let _ = UnixStream::connect(&report_path);
                return Err(error).at("start", &vmm);
            }
        };
        interrupt::enter(child.id(), directory.path());
        if let Disks::CloudHypervisor(_) = spec.disks {
            // It writes none itself, and what was started has become it.
            let pid_file = path.join("qemu.pid");
            std::fs::write(&pid_file, child.id().to_string()).at("write", &pid_file)?;
            cloud_hypervisor::report(path, &report_path, child.id()).at("listen to", &report_path)?;
        }
        Ok(Self {
            name: spec.name,
            directory: Some(directory),
            child,
            ended: None,
            report,
            qmp_listener,
            qmp: None,
            failed: Cell::new(false),
            quiet: false,
        })
    }

    /// What the guest has reported so far.
    pub fn reported(&self) -> Reported {
        self.report.snapshot()
    }

    /// All that the guest has reported, once QEMU is gone: waits for the channel's end, so that
    /// nothing sent before a kill is missed.
    pub fn final_report(&self) -> Reported {
        let _ = self.report.wait(Duration::from_secs(10), |reported| reported.closed.then_some(()));
        self.report.snapshot()
    }

    /// What was acknowledged on one stream so far.
    pub fn acknowledged(&self, stream: &str) -> Acknowledged {
        self.report.snapshot().acknowledged.get(stream).copied().unwrap_or_default()
    }

    /// Sends a line to the script, which must be reading its serial port: `exec 5</dev/ttyS1; mark ready; read -r line <&5`.
    pub fn tell(&self, line: &str) -> Result<()> {
        self.report.tell(line).map_err(|error| self.failure(&format!("it cannot be told '{line}': {error}")))
    }

    /// Waits for a `mark TEXT` of the script.
    pub fn wait_mark(&mut self, text: &str, timeout: Duration) -> Result<()> {
        let problem = format!("the mark '{text}' did not come");
        let came = self.await_report(&problem, timeout, |reported| {
            let has_failed = reported.exit_code.is_some_and(|code| code != 0);
            let came = reported.marks.iter().any(|mark| mark == text);
            (came || has_failed).then_some(came)
        })?;
        // Nothing comes any more of a script that has failed.
        if came { Ok(()) } else { Err(self.failure(&format!("{problem}: the script has failed"))) }
    }

    /// Waits until `number` (or a higher one) is acknowledged on `stream`.
    pub fn wait_acknowledged(&mut self, stream: &str, number: u64, timeout: Duration) -> Result<()> {
        let problem = format!("{number} was not acknowledged on '{stream}'");
        self.await_report(&problem, timeout, |reported| {
            let last = reported.acknowledged.get(stream)?.last?;
            (last >= number).then_some(())
        })
    }

    /// Waits until the guest has come up `boots` times.
    pub fn wait_boots(&mut self, boots: u32, timeout: Duration) -> Result<()> {
        let problem = format!("user space did not come up {boots} times");
        self.await_report(&problem, timeout, |reported| (reported.boots >= boots).then_some(()))
    }

    /// Waits for the script's exit code.
    pub fn wait_exit_code(&mut self, timeout: Duration) -> Result<i32> {
        self.await_report("its script did not end", timeout, |reported| reported.exit_code)
    }

    /// Waits until anything that `found` looks for has been reported.
    pub fn await_report<T>(
        &mut self,
        problem: &str,
        timeout: Duration,
        mut found: impl FnMut(&Reported) -> Option<T>,
    ) -> Result<T> {
        let deadline = Instant::now() + timeout;
        loop {
            // In slices, to notice a wrapper that ended without ever starting QEMU.
            let left = deadline.saturating_duration_since(Instant::now());
            let slice = left.min(Duration::from_millis(200));
            if let Some(value) = self.report.wait(slice, &mut found) {
                return Ok(value);
            }
            if let Ok(Some(status)) = self.child.try_wait() {
                self.note_end(status);
                // All that it wrote is in the socket: one more look.
                if let Some(value) = self.report.wait(Duration::from_secs(1), &mut found) {
                    return Ok(value);
                }
                return Err(self.failure(&format!("{problem} before QEMU ended with {status}")));
            }
            if left.is_zero() {
                let seconds = timeout.as_secs_f32();
                return Err(self.failure(&format!("{problem} within {seconds:.0} s")));
            }
            if self.report.snapshot().closed {
                std::thread::sleep(Duration::from_millis(20));
            }
        }
    }

    /// Waits until QEMU (or the wrapper, which recovers first) has ended.
    pub fn wait_end(&mut self, timeout: Duration) -> Result<ExitStatus> {
        let deadline = Instant::now() + timeout;
        loop {
            if let Some(status) = self.ended {
                return Ok(status);
            }
            match self.child.try_wait() {
                Ok(Some(status)) => self.note_end(status),
                Ok(None) if Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(5));
                }
                Ok(None) => {
                    let seconds = timeout.as_secs_f32();
                    return Err(self.failure(&format!("it did not end within {seconds:.0} s")));
                }
                Err(error) => return Err(self.failure(&format!("it cannot be awaited: {error}"))),
            }
        }
    }

    /// The process id of QEMU itself, wrapper or not.
    pub fn qemu_pid(&self) -> Result<u32> {
        let path = self.directory().join("qemu.pid");
        let text = std::fs::read_to_string(&path).at("read", &path)?;
        text.trim().parse().map_err(|_| self.failure("QEMU's pid file holds no number"))
    }

    /// The process id of what was started: the wrapper, or QEMU itself.
    pub fn process_id(&self) -> u32 {
        self.child.id()
    }

    /// `kill -9` of QEMU itself. A wrapper lives on and recovers: see [`Self::wait_end`].
    pub fn kill_qemu(&mut self) -> Result<()> {
        let pid = self.qemu_pid()?;
        self.signal_process(pid, Signal::KILL)
    }

    /// Stops QEMU where it is (`SIGSTOP`), its wrapper goes on: what the guest has asked for is still done, and nothing else.
    pub fn freeze(&mut self) -> Result<()> {
        let pid = self.qemu_pid()?;
        self.signal_process(pid, Signal::STOP)
    }

    /// Lets QEMU go on after [`Self::freeze`].
    pub fn thaw(&mut self) -> Result<()> {
        let pid = self.qemu_pid()?;
        self.signal_process(pid, Signal::CONT)
    }

    /// Sends a signal to what was started: the wrapper, or QEMU itself. Stopping it and letting it go on is for all of its
    /// processes: a wrapper may have several.
    pub fn signal(&mut self, signal: Signal) -> Result<()> {
        let group = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        match group.filter(|_| matches!(signal, Signal::STOP | Signal::CONT)) {
            Some(group) => kill_process_group(group, signal)
                .map_err(|error| self.failure(&format!("its processes cannot be signalled: {error}"))),
            None => self.signal_process(self.child.id(), signal),
        }
    }

    /// `kill -9` of wrapper and QEMU together (their process group), and waits for the end.
    pub fn kill_all(&mut self) -> Result<ExitStatus> {
        self.kill_everything();
        self.wait_end(Duration::from_secs(30))
    }

    /// The session with QEMU's machine protocol.
    pub fn qmp(&mut self) -> Result<&mut Qmp> {
        if self.qmp.is_none() {
            self.qmp = Some(Qmp::accept(&self.qmp_listener, Duration::from_secs(20))?);
        }
        Ok(self.qmp.as_mut().expect("set just above"))
    }

    /// All that the guest has written to its console.
    pub fn console(&self) -> String {
        read_lossy(&self.directory().join("console.log"))
    }

    /// All that QEMU and the wrapper have written to stderr.
    pub fn stderr(&self) -> String {
        read_lossy(&self.directory().join("stderr.log"))
    }

    /// The run's directory: console.log, stdout.log, stderr.log, sockets.
    pub fn directory(&self) -> &Path {
        self.directory.as_ref().expect("only drop takes it").path()
    }

    /// An error about this guest, with the end of its console; the run's directory is kept.
    pub fn failure(&self, problem: &str) -> Error {
        self.failed.set(true);
        Error::Guest {
            name: self.name.clone(),
            problem: problem.to_owned(),
            stderr: program::tail(&self.stderr(), 20),
            console_path: self.directory().join("console.log"),
            console: program::tail(&self.console(), 40),
        }
    }

    /// Failures of this guest are an answer, not a fault, or were kept elsewhere: nothing is kept or shown.
    pub fn forgive(&mut self) {
        self.quiet = true;
    }

    fn note_end(&mut self, status: ExitStatus) {
        self.ended = Some(status);
        // Its number may be given to a stranger from now on.
        interrupt::leave(self.child.id());
    }

    fn signal_process(&self, pid: u32, signal: Signal) -> Result<()> {
        let target = i32::try_from(pid).ok().and_then(Pid::from_raw);
        let sent = target.map(|target| kill_process(target, signal));
        match sent {
            Some(Ok(())) => Ok(()),
            _ => Err(self.failure(&format!("process {pid} is not there to be signalled"))),
        }
    }

    fn kill_everything(&mut self) {
        // The group first: QEMU is in it too, unless the wrapper gave it one of its own.
        if self.ended.is_none() {
            interrupt::kill(self.child.id(), self.directory());
        } else {
            interrupt::kill_qemu(self.directory());
        }
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.kill_everything();
        if self.ended.is_none() {
            let _ = self.child.wait();
        }
        interrupt::leave(self.child.id());
        // Lets the report thread end if QEMU never connected.
        let _ = UnixStream::connect(self.directory().join("report"));
        let panicking = std::thread::panicking();
        if panicking && !self.failed.get() && !self.quiet {
            eprintln!("{}", self.failure("the test failed while this guest ran"));
        }
        if let Some(directory) = self.directory.take()
            && (panicking || self.failed.get())
            && !self.quiet
            && !interrupt::is_requested()
        {
            let kept = directory.keep();
            let _ = std::fs::remove_file(kept.join("initramfs"));
        }
    }
}

fn log_file(path: &PathBuf) -> Result<File> {
    File::create(path).at("create", path)
}

fn read_lossy(path: &Path) -> String {
    std::fs::read(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default()
}
