//! `amberlog snapshot`, `freeze` and `thaw`: an image of a moment, while the guest runs.

use crate::client::{Daemon, text};
use crate::exit;
use clap::Args;
use command_line::output::text as print;
use serde_json::json;
use std::path::PathBuf;
use std::process::ExitCode;

/// Longer than any disk is copied: a week.
const COPIED_SECONDS_MAX: u64 = 7 * 86_400;

/// Arguments of `amberlog snapshot`.
#[derive(Args, Debug)]
pub struct SnapshotArgs {
    /// The VM.
    vm: String,
    /// Its disk, by the name that 'amberlog disk list' shows.
    disk: String,
    /// The image, which the daemon makes: a file that is not there yet, where it may write.
    out: PathBuf,
    /// Have the guest wait while its disk is copied, where the file system cannot share blocks; it is slowed down otherwise.
    #[arg(long)]
    wait: bool,
    /// Only what was written since an earlier snapshot of this disk, as an overlay (qcow2) of the image that was made then.
    #[arg(long, value_name = "ID", conflicts_with = "wait")]
    incremental_since: Option<String>,
    /// Seconds for which the guest waits at most.
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=600))]
    patience: u64,
    #[command(flatten)]
    daemon: Daemon,
}

/// Arguments of `amberlog freeze`.
#[derive(Args, Debug)]
pub struct FreezeArgs {
    /// The VM.
    vm: String,
    /// Seconds after which it goes on by itself.
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=600))]
    seconds: u64,
    #[command(flatten)]
    daemon: Daemon,
}

/// Arguments of `amberlog thaw`.
#[derive(Args, Debug)]
pub struct ThawArgs {
    /// The VM.
    vm: String,
    #[command(flatten)]
    daemon: Daemon,
}

fn end(result: anyhow::Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => exit::report(&error),
    }
}

/// `amberlog snapshot`.
pub fn snapshot(args: &SnapshotArgs) -> ExitCode {
    end((|| {
        let out = std::path::absolute(&args.out)?;
        let question = json!({
            "command": "snapshot", "vm": args.vm, "disk": args.disk, "out": out, "patience_seconds": args.patience,
            "may_wait": args.wait, "since": args.incremental_since,
        });
        // Beyond what the guest waits, all of a disk may be copied.
        let answer = args.daemon.ask_patiently(&question, args.patience + COPIED_SECONDS_MAX)?;
        anyhow::ensure!(
            !matches!(out.try_exists(), Ok(false)),
            "the daemon has made {}, and it is not to be seen from here: its service has a /tmp and /var/tmp of its own (PrivateTmp=yes), \
             where it goes with the service; name a directory that both see",
            out.display()
        );
        let notes: Vec<_> = answer["notes"].as_array().into_iter().flatten().map(text).collect();
        Ok(print(&format!(
            "{}: {}, id {}\n",
            out.display(),
            if notes.is_empty() { "made".to_owned() } else { notes.join(", ") },
            if answer["id"].is_string() { text(&answer["id"]) } else { "none".to_owned() }
        ))?)
    })())
}

/// `amberlog freeze`.
pub fn freeze(args: &FreezeArgs) -> ExitCode {
    end((|| {
        let question = json!({"command": "freeze", "vm": args.vm, "seconds": args.seconds});
        args.daemon.ask_patiently(&question, args.seconds)?;
        Ok(print(&format!("{}: frozen, for {} s at most\n", args.vm, args.seconds))?)
    })())
}

/// `amberlog thaw`.
pub fn thaw(args: &ThawArgs) -> ExitCode {
    end((|| {
        args.daemon.ask_quickly(&json!({"command": "thaw", "vm": args.vm}))?;
        Ok(print(&format!("{}: goes on\n", args.vm))?)
    })())
}
