//! `amberlog disk-model`: one modelled disk for several runs, which then share its arm, queue and cache.

use anyhow::Context;
use command_line::exit;
use disk_model::validate::{self, Of};
use disk_model::{Model, Profile, Server, ServerOptions, time_scale};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Arguments of `amberlog disk-model`.
#[derive(clap::Args, Debug)]
pub struct DiskModelArgs {
    /// The drive: st336753lw (or -write-through, -protected, -scsi-flush), hdd-7200 (or -protected, -write-through), st39102lw,
    /// sata-ssd, nvme, nvme-protected, pcm or none.
    #[arg(value_name = "NAME")]
    profile: Profile,
    /// Where runs find it: give them --disk IMAGE,model=SOCKET (with a / in it).
    #[arg(long, value_name = "SOCKET", required_unless_present = "validate")]
    socket: Option<PathBuf>,
    /// Serve nothing, but print the model beside a real drive: response times that were measured, in DiskSim's validate format.
    #[arg(long, value_name = "TRACE", conflicts_with = "socket")]
    validate: Option<PathBuf>,
    /// Seconds for a second of the modelled disk: 2 makes it half as fast as it was.
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0, value_parser = time_scale)]
    time_scale: f64,
    /// Of what is random in the model.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

/// Serves until SIGTERM or SIGINT, then prints what the disk did.
pub fn run(args: DiskModelArgs) -> ExitCode {
    let done = match &args.validate {
        Some(trace) => print_comparison(&args, trace),
        None => serve(args),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => exit::report("amberlog disk-model", &error, exit::code_of(&error)),
    }
}

fn print_comparison(args: &DiskModelArgs, trace: &Path) -> anyhow::Result<()> {
    let text = std::fs::read_to_string(trace).with_context(|| format!("reading {}", trace.display()))?;
    let served = validate::parse(&text).map_err(|reason| anyhow::anyhow!("{}: {reason}", trace.display()))?;
    let modelled = validate::replay(&mut Model::new(args.profile, args.seed), &served);
    println!("{} beside a drive that was measured, one request at a time; response times in ms", args.profile);
    for (words, of) in [("all", Of::All), ("reads", Of::Reads), ("writes", Of::Writes)] {
        let comparison = validate::compare(&served, &modelled, of);
        if comparison.count == 0 {
            continue;
        }
        println!("\n{words}: {} requests\n{:>9} {:>9} {:>9}", comparison.count, "quantile", "measured", "model");
        for (quantile, measured, modelled) in &comparison.quantiles {
            println!("{:>7.0} % {measured:>9.2} {modelled:>9.2}", quantile * 100.0);
        }
        let (measured, modelled) = comparison.means;
        println!("{:>9} {measured:>9.2} {modelled:>9.2}", "mean");
        let percent = 100.0 * comparison.rms / measured.max(f64::MIN_POSITIVE);
        println!("distance of the curves, root mean square: {:.2} ms, {percent:.0} % of the mean", comparison.rms);
    }
    Ok(())
}

fn serve(args: DiskModelArgs) -> anyhow::Result<()> {
    let mut signals = signal_hook::iterator::Signals::new([signal_hook::consts::SIGTERM, signal_hook::consts::SIGINT])?;
    let server = Server::start(ServerOptions {
        profile: args.profile,
        seed: args.seed,
        time_scale: args.time_scale,
        socket: args.socket.clone(),
    })?;
    let socket = args.socket.as_deref().unwrap_or(Path::new(""));
    log::info!("{} at {}", args.profile.description(), socket.display());
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
