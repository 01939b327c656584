//! `amberlog disk-model`: one modelled disk for several runs, which then share its arm, queue and cache.

use command_line::exit;
use disk_model::{Profile, Server, ServerOptions, time_scale};
use std::path::PathBuf;
use std::process::ExitCode;

/// Arguments of `amberlog disk-model`.
#[derive(clap::Args, Debug)]
pub struct DiskModelArgs {
    /// The drive: st336753lw, st336753lw-write-through, hdd-7200, hdd-7200-protected, sata-ssd, nvme,
    /// nvme-protected or none.
    #[arg(value_name = "NAME")]
    profile: Profile,
    /// Where runs find it: give them --disk IMAGE,model=SOCKET (with a / in it).
    #[arg(long, value_name = "SOCKET")]
    socket: PathBuf,
    /// Seconds for a second of the modelled disk: 2 makes it half as fast as it was.
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0, value_parser = time_scale)]
    time_scale: f64,
    /// Of what is random in the model.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

/// Serves until SIGTERM or SIGINT, then prints what the disk did.
pub fn run(args: DiskModelArgs) -> ExitCode {
    match serve(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => exit::report("amberlog disk-model", &error, exit::code_of(&error)),
    }
}

fn serve(args: DiskModelArgs) -> anyhow::Result<()> {
    let mut signals = signal_hook::iterator::Signals::new([signal_hook::consts::SIGTERM, signal_hook::consts::SIGINT])?;
    let server = Server::start(ServerOptions {
        profile: args.profile,
        seed: args.seed,
        time_scale: args.time_scale,
        socket: Some(args.socket.clone()),
    })?;
    log::info!("{} at {}", args.profile.description(), args.socket.display());
    let _ = signals.forever().next();
    let totals = server.totals();
    println!(
        "{} reads of {} bytes, {} writes of {} bytes, {} flushes, {} transfers; busy {:.3} s, of which seek and rotation {:.3} s",
        totals.reads,
        totals.read_bytes,
        totals.writes,
        totals.write_bytes,
        totals.flushes,
        totals.transfers,
        totals.busy_ns as f64 / 1e9,
        totals.positioning_ns as f64 / 1e9
    );
    Ok(())
}
