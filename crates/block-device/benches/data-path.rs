//! The plain data path against qemu-storage-daemon's vhost-user-blk export: the same front-end, the same image, the
//! same cache mode, in turns. Prints what each does and the ratio.
//!
//! `cargo bench -p block-device --bench data-path -- [--dir DIR] [--cache direct|buffered] [--seconds N] [--rounds N]
//! [--size-mib N] [--rival io_uring|native|threads] [--only WORD]`
//!
//! The image is written in full beforehand. Each server is a process of its own.

use block_device::{CacheMode, Device, DeviceConfig, Image, ImageOptions};
use block_route::PlainRoute;
use guest_memory::VmMemory;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::time::Duration;
use test_frontend::{FrontEnd, FrontEndOptions, GuestRam, LoadOptions, LoadResult, Pattern, run_load};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

const MIB: u64 = 1 << 20;

#[derive(Clone, Debug)]
struct Options {
    directory: PathBuf,
    buffered: bool,
    duration: Duration,
    rounds: usize,
    size_bytes: u64,
    rival: String,
    only: Option<String>,
}

struct Case {
    name: &'static str,
    pattern: Pattern,
    depth: u16,
    block_bytes: u32,
}

const CASES: [Case; 6] = [
    Case { name: "random read 4K depth 1", pattern: Pattern::RandomRead, depth: 1, block_bytes: 4096 },
    Case { name: "random read 4K depth 32", pattern: Pattern::RandomRead, depth: 32, block_bytes: 4096 },
    Case { name: "random write 4K depth 1", pattern: Pattern::RandomWrite, depth: 1, block_bytes: 4096 },
    Case { name: "random write 4K depth 32", pattern: Pattern::RandomWrite, depth: 32, block_bytes: 4096 },
    Case { name: "sequential read 1M depth 4", pattern: Pattern::SequentialRead, depth: 4, block_bytes: 1 << 20 },
    Case { name: "sequential write 1M depth 4", pattern: Pattern::SequentialWrite, depth: 4, block_bytes: 1 << 20 },
];

fn options(arguments: &[String]) -> Result<Options> {
    let mut options = Options {
        directory: std::env::temp_dir(),
        buffered: false,
        duration: Duration::from_secs(2),
        rounds: 3,
        size_bytes: 512 * MIB,
        rival: "io_uring".to_owned(),
        only: None,
    };
    let mut rest = arguments.iter();
    while let Some(name) = rest.next() {
        // Cargo adds this one.
        if name == "--bench" {
            continue;
        }
        let value = rest.next().ok_or_else(|| format!("{name} wants a value"))?;
        match name.as_str() {
            "--dir" => options.directory = value.into(),
            "--cache" => options.buffered = value == "buffered",
            "--seconds" => options.duration = Duration::from_secs_f64(value.parse()?),
            "--rounds" => options.rounds = value.parse::<usize>()?.max(1),
            "--size-mib" => options.size_bytes = value.parse::<u64>()? * MIB,
            "--rival" => options.rival.clone_from(value),
            "--only" => options.only = Some(value.clone()),
            _ => return Err(format!("unknown option {name}").into()),
        }
    }
    Ok(options)
}

/// Serves the image until standard input ends: what the child process does.
fn serve(socket: &str, image: &str, buffered: bool) -> Result<()> {
    let cache = if buffered { CacheMode::Buffered } else { CacheMode::Direct };
    let image = Image::open(Path::new(image), ImageOptions { cache, ..ImageOptions::default() })?;
    let mut config = DeviceConfig::new("bench", socket, Arc::new(image));
    if let Ok(microseconds) = std::env::var("POLLING_US") {
        config.polling_max = Duration::from_micros(microseconds.parse()?);
    }
    let device = Device::start(config, Box::new(PlainRoute), VmMemory::new(), Arc::new(()))?;
    println!("ready");
    std::io::stdout().flush()?;
    let mut line = String::new();
    while std::io::stdin().read_line(&mut line)? > 0 {}
    device.stop()?;
    Ok(())
}

/// A server process, ended when dropped.
struct Server {
    child: Child,
    socket: PathBuf,
    ends_by_signal: bool,
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        if self.ends_by_signal
            && let Some(pid) = rustix::process::Pid::from_raw(self.child.id() as i32)
        {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        }
        for _ in 0..200 {
            if matches!(self.child.try_wait(), Ok(Some(_))) {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn start_ours(directory: &Path, image: &Path, options: &Options) -> Result<Server> {
    let socket = directory.join("ours.sock");
    let mut child = Command::new(std::env::current_exe()?)
        .arg("--serve")
        .args([&socket, image])
        .arg(if options.buffered { "buffered" } else { "direct" })
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut line = String::new();
    BufReader::new(child.stdout.take().ok_or("no standard output")?).read_line(&mut line)?;
    if line.trim() != "ready" {
        return Err("our server did not start".into());
    }
    Ok(Server { child, socket, ends_by_signal: false })
}

fn start_rival(directory: &Path, image: &Path, options: &Options) -> Result<Server> {
    let socket = directory.join("rival.sock");
    let _ = std::fs::remove_file(&socket);
    let direct = if options.buffered { "off" } else { "on" };
    // QEMU's `native` needs direct I/O.
    let rival = if options.buffered && options.rival == "native" { "threads" } else { &options.rival };
    let file = format!(
        "driver=file,node-name=file,filename={},cache.direct={direct},aio={rival},discard=unmap",
        image.display()
    );
    let export = format!(
        "type=vhost-user-blk,id=disk,node-name=disk,addr.type=unix,addr.path={},writable=on,num-queues=1,iothread=worker",
        socket.display()
    );
    let child = Command::new("qemu-storage-daemon")
        .args(["--object", "iothread,id=worker"])
        .args(["--blockdev", &file])
        .args(["--blockdev", "driver=raw,node-name=disk,file=file"])
        .args(["--export", &export])
        .stdin(Stdio::null())
        .spawn()
        .map_err(|e| format!("qemu-storage-daemon cannot be started ({e}); install qemu-utils or qemu-system"))?;
    Ok(Server { child, socket, ends_by_signal: true })
}

fn measure(server: &Server, case: &Case, options: &Options, round: usize) -> Result<LoadResult> {
    let front_end_options = FrontEndOptions { queue_size: 128, inflight: false, ..FrontEndOptions::default() };
    let mut front_end = FrontEnd::connect(&server.socket, GuestRam::new(64 * MIB)?, front_end_options)?;
    front_end.start()?;
    let load = LoadOptions {
        pattern: case.pattern,
        depth: case.depth,
        block_bytes: case.block_bytes,
        span_bytes: options.size_bytes,
        duration: options.duration,
        seed: round as u64,
        queue: 0,
    };
    let result = run_load(&mut front_end, load)?;
    front_end.stop()?;
    if result.failed > 0 {
        return Err(format!("{}: {} requests failed", case.name, result.failed).into());
    }
    Ok(result)
}

fn write_image(path: &Path, size_bytes: u64) -> Result<()> {
    let mut file = std::fs::File::create(path)?;
    let block: Vec<u8> = (0..MIB).map(|at| (at.wrapping_mul(2_654_435_761) >> 7) as u8).collect();
    for _ in 0..size_bytes / MIB {
        file.write_all(&block)?;
    }
    file.sync_all()?;
    Ok(())
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// User and system time of a process, in seconds.
fn cpu_seconds(pid: u32) -> f64 {
    let Ok(stat) = std::fs::read_to_string(format!("/proc/{pid}/stat")) else { return 0.0 };
    let Some((_, fields)) = stat.rsplit_once(')') else { return 0.0 };
    let field = |index: usize| fields.split_whitespace().nth(index).and_then(|text| text.parse().ok()).unwrap_or(0.0);
    // Fields 14 and 15 of proc(5), in ticks of 1/100 s.
    (field(11) + field(12)) / 100.0
}

fn bench(options: &Options) -> Result<()> {
    let directory = tempfile::tempdir_in(&options.directory)?;
    let image = directory.path().join("disk.img");
    eprintln!("writing {} MiB to {} ...", options.size_bytes / MIB, image.display());
    write_image(&image, options.size_bytes)?;
    println!(
        "image in {}, cache {}, rival qemu-storage-daemon with an iothread and aio={}, {} rounds of {:?} each",
        options.directory.display(),
        if options.buffered { "buffered" } else { "direct" },
        options.rival,
        options.rounds,
        options.duration
    );
    println!(
        "{:<28} {:>12} {:>12} {:>6} {:>9} {:>9} {:>9} {:>9} {:>8} {:>8}",
        "", "ours /s", "rival /s", "ratio", "p50 us", "rival", "p99 us", "rival", "cpu us", "rival"
    );
    for case in &CASES {
        if options.only.as_ref().is_some_and(|only| !case.name.contains(only)) {
            continue;
        }
        let mut rates = [Vec::new(), Vec::new()];
        let mut latencies = [Vec::new(), Vec::new()];
        let mut tails = [Vec::new(), Vec::new()];
        let mut costs = [Vec::new(), Vec::new()];
        for round in 0..options.rounds {
            // In turns, and each first every other time.
            for turn in 0..2 {
                let who = (turn + round) % 2;
                let server = if who == 0 {
                    start_ours(directory.path(), &image, options)?
                } else {
                    start_rival(directory.path(), &image, options)?
                };
                let before = cpu_seconds(server.child.id());
                let result = measure(&server, case, options, round)?;
                let cpu = cpu_seconds(server.child.id()) - before;
                rates[who].push(result.requests_per_second());
                latencies[who].push(result.latency.percentile(50.0) as f64 / 1000.0);
                tails[who].push(result.latency.percentile(99.0) as f64 / 1000.0);
                costs[who].push(cpu * 1e6 / result.requests as f64);
                drop(server);
            }
        }
        // Of what was measured side by side: other work on the machine then weighs on both.
        let mut ratios: Vec<f64> = rates[0].iter().zip(&rates[1]).map(|(ours, rival)| ours / rival).collect();
        let ratio = median(&mut ratios);
        let [ours, rival] = rates.each_mut().map(|rates| median(rates));
        let [p50, rival_p50] = latencies.each_mut().map(|values| median(values));
        let [p99, rival_p99] = tails.each_mut().map(|values| median(values));
        let [cpu, rival_cpu] = costs.each_mut().map(|values| median(values));
        println!(
            "{:<28} {ours:>12.0} {rival:>12.0} {ratio:>6.2} {p50:>9.1} {rival_p50:>9.1} {p99:>9.1} {rival_p99:>9.1} {cpu:>8.1} {rival_cpu:>8.1}",
            case.name
        );
    }
    Ok(())
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let done = match &arguments[..] {
        [serve_flag, socket, image, cache] if serve_flag == "--serve" => serve(socket, image, cache == "buffered"),
        // `cargo test --benches` runs every bench once with this; there is nothing to test.
        [.., last] if last == "--test" => Ok(()),
        _ => options(&arguments).and_then(|options| bench(&options)),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("data-path: {error}");
            ExitCode::FAILURE
        }
    }
}
