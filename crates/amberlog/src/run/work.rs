//! The worker of an `amberlog run`: serves the disks, and tells the supervisor what the VMM needs.

use super::RunArgs;
use crate::exit;
use crate::raw::KnownRaw;
use crate::vm::{Serving, Starter, Vm, die_of_panics, qemu};
use crate::worker::Line;
use anyhow::Context;
use guest_memory::SHIM_SOCKET_VARIABLE;
use std::ffi::OsString;
use std::fs::File;
use std::io::{Seek, Write};
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::process::ExitCode;
use supervision::{Order, Said};

/// Runs the command.
pub fn work(args: &RunArgs) -> ExitCode {
    match serve(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => exit::report(&error),
    }
}

fn serve(args: &RunArgs) -> anyhow::Result<()> {
    let line = Line::begin()?;
    let _entered = log_context::enter(log_context::Context::vm(&args.name));
    if !args.no_sandbox {
        sandbox::enter_worker();
    }
    let kept = line.take_kept();
    let is_resumed = kept.is_some();
    let vm = match kept {
        Some(kept) => Vm::resume(&args.vm(), kept, &line).context("going on after the death of the worker before")?,
        None => {
            let vm = Vm::prepare(&args.vm(), &KnownRaw::default(), &line)?;
            vm.memory.keep_to_directory(vm.directory());
            if let Err(error) = qemu::check_room(&args.vmm, vm.directory()) {
                vm.abandon();
                return Err(error);
            }
            vm
        }
    };
    let directory = vm.directory().display();
    die_of_panics(format!(
        "amberlog: this is a bug in amberlog, and the worker of the VM ends with it; what was committed is kept in {directory}"
    ));
    if let Some(reason) = qemu::bypasses_protection(&args.vmm, None) {
        vm.memory.refuse_protection(reason);
    }
    let ended = serve_until_the_end(args, &vm, &line, is_resumed);
    let finished = vm.finish(args.report.as_deref());
    // What is still owed is the worse news; a trace or report that is not whole comes after the VMM's own end.
    finished.and(ended)
}

/// Serves the disks until the supervisor says that the VMM has ended. On return nothing of the VM runs any more.
fn serve_until_the_end(args: &RunArgs, vm: &Vm, line: &Line, is_resumed: bool) -> anyhow::Result<()> {
    let directory = vm.directory();
    if !is_resumed {
        // The VMM, which has the user's mask, would let others read it.
        vm.journals.directory().make_memory()?;
    }
    let serving = vm.serve(directory, Starter::Ourselves, None, |index, _| format!("disk{index}"))?;
    if !is_resumed {
        say_ready(args, vm, line, &serving)?;
    }
    loop {
        match line.hear()? {
            (Order::Ended, _) => break,
            (other, _) => log::debug!("the supervisor said {other:?}"),
        }
    }
    serving.observer.end_stragglers();
    serving.stop();
    Ok(())
}

/// Tells the supervisor what the VMM needs.
fn say_ready(args: &RunArgs, vm: &Vm, line: &Line, serving: &Serving) -> anyhow::Result<()> {
    let arguments = qemu::arguments(&args.vmm, &vm.directory().join(placement::MEMORY), &serving.attachments)
        .map_err(exit::usage)?;
    let needed = super::Needed { environment: preload(serving), arguments };
    let needed = needed.write().context("writing down what the VMM needs")?;
    let lock = vm.journals.directory().lock_file();
    line.say(&Said::Ready, &[needed.as_fd(), lock.as_fd()]).context("telling the supervisor")
}

/// The environment that makes the VMM hand over its userfaultfd.
fn preload(serving: &Serving) -> Vec<(String, OsString)> {
    let Some(shim) = crate::shim::find() else {
        serving.observer.memory.refuse_protection(format!(
            "{} was not found beside amberlog; install it there, or name it in AMBERLOG_SHIM",
            crate::shim::FILE_NAME
        ));
        return Vec::new();
    };
    let mut preload = shim.into_os_string();
    if let Some(other) = std::env::var_os("LD_PRELOAD") {
        preload.push(":");
        preload.push(other);
    }
    let socket = serving.observer.handover.path().as_os_str().to_owned();
    vec![(SHIM_SOCKET_VARIABLE.to_owned(), socket), ("LD_PRELOAD".to_owned(), preload)]
}

impl super::Needed {
    /// As a file in memory: words of any bytes but zero, each with a zero behind it.
    pub(super) fn write(&self) -> std::io::Result<File> {
        let mut file: File = rustix::fs::memfd_create("amberlog-needed", rustix::fs::MemfdFlags::CLOEXEC)?.into();
        let mut word = |word: &[u8]| file.write_all(word).and_then(|()| file.write_all(&[0]));
        word(self.environment.len().to_string().as_bytes())?;
        for (name, value) in &self.environment {
            word(name.as_bytes())?;
            word(value.as_bytes())?;
        }
        self.arguments.iter().try_for_each(|argument| word(argument.as_bytes()))?;
        file.rewind()?;
        Ok(file)
    }
}
