//! `amberlog on-battery` and `on-mains`: what a UPS's daemon calls.

use crate::client::{Daemon, text};
use crate::exit;
use anyhow::bail;
use clap::Args;
use command_line::output::{in_a_line, text as print};
use serde_json::{Value, json};
use std::process::ExitCode;

/// Arguments of both.
#[derive(Args, Debug)]
pub struct PowerArgs {
    /// Seconds after which a journal is given up; the others go on.
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    patience: u64,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    daemon: Daemon,
}

/// Runs one of the commands.
pub fn run(args: &PowerArgs, on_battery: bool) -> ExitCode {
    match set(args, on_battery) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => exit::report(&error),
    }
}

fn set(args: &PowerArgs, on_battery: bool) -> anyhow::Result<()> {
    let question = json!({"command": "power", "on_battery": on_battery, "patience_seconds": args.patience});
    let answer = args.daemon.ask_patiently(&question, args.patience)?;
    let disks: Vec<&Value> = answer["disks"].as_array().into_iter().flatten().collect();
    if args.json {
        print(&format!("{answer}\n"))?;
    } else {
        let mut lines = format!("on {}\n", if on_battery { "battery" } else { "mains" });
        for disk in &disks {
            let outcome = disk["error"]
                .as_str()
                .map_or_else(|| text(&disk["when"]), |error| format!("NOT: {}", in_a_line(error)));
            lines +=
                &format!("{}, {}: {} ({outcome})\n", text(&disk["vm"]), text(&disk["disk"]), text(&disk["placement"]));
        }
        print(&lines)?;
    }
    let failed = disks.iter().filter(|disk| disk["error"].is_string()).count();
    if failed > 0 {
        bail!("the journals of {failed} disks are not where they are to be; each line says why");
    }
    Ok(())
}
