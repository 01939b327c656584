//! The worker of an `amberlog run`: serves the disks, and tells the supervisor what the VMM needs.

use super::RunArgs;
use crate::exit;
use crate::raw::KnownRaw;
use crate::vm::{Serving, Starter, Vm, die_of_panics, lives, qemu, vmm_of};
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
    let (is_resumed, vmm) = (kept.is_some(), kept.as_ref().and_then(vmm_of));
    let vm = match kept {
        Some(kept) => Vm::resume(&args.vm(), kept, &line).context("going on after the death of the worker before")?,
        None => {
            let vm = Vm::prepare(&args.vm(), &KnownRaw::default(), &line, false)?;
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
    // The VMM, which has the user's mask, would let others read it.
    let made = if is_resumed { Ok(()) } else { vm.journals.directory().make_memory() };
    let name = |index, _: &str| format!("disk{index}");
    let served = made.map_err(Into::into).and_then(|()| vm.serve(vm.directory(), Starter::Ourselves, None, name));
    if let Err(error) = &served
        && vmm.is_some_and(lives)
    {
        // Its guest runs and waits: nothing of it is given back, and nothing recovered beside it. The supervisor knows whether another
        // worker is tried, and brings all home when there is none.
        let name = &args.name;
        log::error!("vm {name}: a worker cannot go on with the guest of the one before: {error:#}");
        std::process::exit(i32::from(exit::FAILED));
    }
    let ended = served.and_then(|serving| serve_until_the_end(args, &vm, &line, (serving, is_resumed)));
    let finished = vm.finish(args.report.as_deref());
    // What is still owed is the worse news; a trace or report that is not whole comes after the VMM's own end.
    finished.and(ended)
}

/// Serves the disks until the supervisor says that the VMM has ended. On return nothing of the VM runs any more.
fn serve_until_the_end(
    args: &RunArgs,
    vm: &Vm,
    line: &Line,
    (serving, is_resumed): (Serving, bool),
) -> anyhow::Result<()> {
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
    let living = serving.observer.living();
    serving.stop();
    if let Some(pid) = living {
        // Nothing of a guest that runs is given back, and nothing recovered beside it.
        log::error!(
            "vm {}: its VMM (process {pid}) cannot be ended: end it, and run 'amberlog recover --area' on its directory",
            args.name
        );
        std::process::exit(i32::from(exit::FAILED));
    }
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
