//! What the measurements were made on, said beside them.

use guest_kit::image;
use guest_kit::{Accelerator, Platform};
use rustix::fs::{Mode, OFlags};
use serde_json::{Value, json};
use std::fmt;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Instant;

/// A flush that takes less than this has not waited for a medium.
const HONEST_FLUSH_US: f64 = 500.0;
const PROBES: u64 = 40;

/// The machine, and the storage under the images.
#[derive(Clone, Debug)]
pub struct Machine {
    platform: Platform,
    processors: usize,
    processor: String,
    kernel: String,
    qemu: String,
    load_at_start: String,
    /// Whether images can be opened around the host's page cache.
    pub direct: bool,
    /// Median of a 4 KB write and its flush, in µs.
    pub flush_us: f64,
}

impl Machine {
    /// What runs the guests.
    pub fn guests_run_on(&self) -> &'static str {
        self.platform.accelerator.name()
    }

    /// Looks around, and times flushes in `directory`.
    pub fn look(directory: &Path, platform: &Platform) -> Result<Self, String> {
        let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let processor = read("/proc/cpuinfo")
            .lines()
            .find_map(|line| line.strip_prefix("model name").map(|rest| rest.trim_start_matches(['\t', ' ', ':'])))
            .unwrap_or("unknown")
            .to_owned();
        let version = guest_kit::program::command("qemu-system-x86_64")
            .and_then(|mut command| guest_kit::program::run(command.arg("--version"), &[0]))
            .map_err(|error| error.to_string())?;
        let qemu = String::from_utf8_lossy(&version.stdout).lines().next().unwrap_or_default().to_owned();
        let probe = directory.join("probe");
        let flush_us = flush_us(&probe).map_err(|error| format!("cannot write to {}: {error}", probe.display()))?;
        let direct = rustix::fs::open(&probe, OFlags::RDWR | OFlags::DIRECT | OFlags::CLOEXEC, Mode::empty()).is_ok();
        let _ = std::fs::remove_file(&probe);
        Ok(Self {
            platform: platform.clone(),
            processors: std::thread::available_parallelism().map_or(1, usize::from),
            processor,
            kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
            qemu,
            load_at_start: load(),
            direct,
            flush_us,
        })
    }

    /// Whether guests' processors are emulated.
    pub fn is_emulated(&self) -> bool {
        self.platform.accelerator == Accelerator::Tcg
    }

    /// Whether a flush waits for the medium here: only then does leaving flushes out gain what it
    /// gains on a disk.
    pub fn honours_flush(&self) -> bool {
        self.flush_us >= HONEST_FLUSH_US
    }

    /// The cache mode of QEMU's own drives, so that their flushes reach the storage.
    pub fn cache(&self) -> guest_kit::Cache {
        if self.direct { guest_kit::Cache::None } else { guest_kit::Cache::Writeback }
    }

    /// For `--json`.
    pub fn to_json(&self) -> Value {
        json!({
            "accelerator": self.platform.accelerator.name(), "guest_kernel": self.platform.kernel.version, "processors": self.processors, "processor": self.processor,
            "kernel": self.kernel, "qemu": self.qemu, "load_at_start": self.load_at_start,
            "direct_io": self.direct, "flush_us": self.flush_us,
        })
    }
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} × {}, Linux {}, {}", self.processors, self.processor, self.kernel, self.qemu)?;
        write!(
            f,
            "guests under {}; load average at the start {}; images {} the host's page cache; a 4 KB write and its flush \
             take {:.0} µs there{}",
            self.platform.describe(),
            self.load_at_start,
            if self.direct { "around" } else { "through" },
            self.flush_us,
            if self.honours_flush() { "" } else { ": this storage does not wait for a medium" },
        )
    }
}

/// The machine's load averages, now.
pub fn load() -> String {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').take(3).collect::<Vec<_>>().join(" ")
}

/// Overwrites blocks of a written file and flushes each.
fn flush_us(path: &Path) -> std::io::Result<f64> {
    let file = File::create(path)?;
    let block = [0x5a; 4096];
    for index in 0..PROBES {
        file.write_all_at(&block, index * 4096)?;
    }
    file.sync_all()?;
    let mut times = Vec::new();
    for index in 0..PROBES {
        let started = Instant::now();
        file.write_all_at(&block, index * 4096)?;
        file.sync_data()?;
        times.push(started.elapsed().as_secs_f64() * 1e6);
    }
    Ok(crate::figure::median(&times))
}

/// Bytes that a file takes.
pub fn bytes_on_disk(path: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata(path).map_or(0, |metadata| metadata.blocks() * 512)
}

/// A MiB, for messages.
pub fn mib(bytes: u64) -> f64 {
    bytes as f64 / image::MIB as f64
}
