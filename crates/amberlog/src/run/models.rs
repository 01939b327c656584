//! The modelled disks of an `amberlog run`: a process of `amberlog-lab` for each drive that its disks name (`model=NAME`), at a socket
//! of its own. The worker asks there, as it asks one that somebody else has started, and so does the worker that follows it.
//!
//! What none of them must ever do: outlive the run. Failure story: where one does not begin, the run ends before there is a VMM; of one
//! that ends later, the worker says that its disks go on at their own speed.

use crate::children::OwnChild;
use crate::vm::model_socket;
use crate::vm::watched::Watched;
use command_line::programs;
use disk_model_client::Profile;
use own_files::OwnDirectory;
use rustix::process::Signal;
use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::io;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// How long a drive may take until it answers.
const BEGINS_WITHIN: Duration = Duration::from_secs(20);
/// How often it is asked.
const ROUND: Duration = Duration::from_millis(10);

/// See the module. They end when this is dropped.
pub struct Models {
    /// What the names of their sockets begin with, if there are any.
    sockets: Option<PathBuf>,
    _running: Vec<Model>,
}

impl Models {
    /// Starts one for each drive, and waits until all of them answer. To be called from the main thread: the kernel ends them when the
    /// calling one does.
    pub fn start(drives: &[Profile], time_scale: f64) -> anyhow::Result<Self> {
        if drives.is_empty() {
            return Ok(Models { sockets: None, _running: Vec::new() });
        }
        let place = OwnDirectory::open_or_make_allowing(&placement::own_place(), placement::PASSED_THROUGH)?;
        // Its keys are the system's random numbers, drawn anew in each process.
        let random = RandomState::new().build_hasher().finish();
        let sockets = place.path().join(format!("model-{random:016x}"));
        let program = programs::beside(crate::LAB).map_err(anyhow::Error::msg)?;
        let mut running = Vec::new();
        for drive in drives {
            running.push(Model::start(&program, *drive, model_socket(&sockets, *drive), time_scale)?);
        }
        Ok(Models { sockets: Some(sockets), _running: running })
    }

    /// What the names of their sockets begin with, if there are any.
    pub fn sockets(&self) -> Option<&Path> {
        self.sockets.as_deref()
    }
}

/// A drive that runs.
struct Model {
    process: OwnChild,
    socket: PathBuf,
}

impl Model {
    fn start(program: &Path, drive: Profile, socket: PathBuf, time_scale: f64) -> anyhow::Result<Self> {
        let mut command = Command::new(program);
        command.args(["disk-model", drive.name(), "--time-scale", &time_scale.to_string(), "--socket"]).arg(&socket);
        // Standard output is the VMM's, and nobody has asked for what a drive says at its end.
        command.stdin(Stdio::null()).stdout(Stdio::null());
        if std::env::var_os("AMBERLOG_LOG").is_none() {
            // That it serves is said by one that somebody has started, and of no interest here.
            command.env("AMBERLOG_LOG", "warn");
        }
        // A terminal sends its signals to all processes alike, and the guest writes until its VMM has ended.
        command.process_group(0);
        let parent = rustix::process::getpid();
        // SAFETY: between fork and exec only system calls that are safe there are made, on plain numbers.
        unsafe {
            command.pre_exec(move || {
                // It takes its socket away then, which nobody else would.
                rustix::process::set_parent_process_death_signal(Some(Signal::TERM))?;
                // The parent may have died before that call; then nobody will send the signal.
                if rustix::process::getppid() != Some(parent) {
                    return Err(io::Error::other("amberlog ended while it started a modelled disk"));
                }
                // A guest waits for it as for a worker. Where that cannot be, turns stay as they are.
                let _ = crate::turns::shorten();
                Ok(())
            });
        }
        let process = OwnChild::start(&mut command)
            .map_err(|error| anyhow::anyhow!("model={drive}: {}", programs::not_started(program, &error)))?;
        let model = Model { process, socket };
        model.wait_until_it_answers(drive)?;
        Ok(model)
    }

    fn wait_until_it_answers(&self, drive: Profile) -> anyhow::Result<()> {
        let deadline = Instant::now() + BEGINS_WITHIN;
        let process = Watched::new(self.process.id() as i32);
        while let Err(error) = UnixStream::connect(&self.socket) {
            let has_ended = process.as_ref().is_none_or(|process| process.wait(ROUND));
            anyhow::ensure!(
                !has_ended,
                "model={drive}: the modelled disk has ended before it served; what it said itself stands above"
            );
            anyhow::ensure!(
                Instant::now() < deadline,
                "model={drive}: the modelled disk does not answer within {} s: {error}",
                BEGINS_WITHIN.as_secs()
            );
        }
        Ok(())
    }
}

impl Drop for Model {
    fn drop(&mut self) {
        // Nothing of it is needed any more, and it may have ended. Killed, it leaves its socket.
        let _ = self.process.kill();
        let _ = self.process.wait();
        let _ = std::fs::remove_file(&self.socket);
    }
}
