//! What a VM's journals hold, over time: lines of JSON in a file, for curves.
//!
//! It must never wait for a guest nor make one wait for longer than a look at counters takes. Failure story: a file that
//! cannot be written to any more ends the samples, with a warning, and nothing else.

use anyhow::Context;
use placement::Journals;
use serde_json::json;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

const INTERVAL: Duration = Duration::from_millis(100);
/// Samples of one run: what is beyond is not kept (some 28 hours).
const SAMPLES_MAX: u32 = 1_000_000;

/// Ends when it is dropped.
pub struct Samples {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Samples {
    /// Begins a file.
    pub fn start(path: &Path, journals: &Arc<Journals>) -> anyhow::Result<Self> {
        let mut file = own_files::create_output(path).context("making the file for samples")?;
        let (stop, stopped) = channel::<()>();
        let journals = Arc::clone(journals);
        let path = path.to_owned();
        let thread = log_context::spawn(std::thread::Builder::new().name("samples".to_owned()), move || {
            let begun = Instant::now();
            for _ in 0..SAMPLES_MAX {
                if !matches!(stopped.recv_timeout(INTERVAL), Err(RecvTimeoutError::Timeout)) {
                    return;
                }
                if let Err(error) = writeln!(file, "{}", line(&journals, begun)) {
                    log::warn!("no more samples: writing {}: {error}", path.display());
                    return;
                }
            }
        })?;
        Ok(Samples { stop: Some(stop), thread: Some(thread) })
    }
}

/// One moment; seconds since the beginning, blocks and bytes summed over the VM's disks, and each disk's own counters.
fn line(journals: &Journals, begun: Instant) -> serde_json::Value {
    let report = journals.report("");
    let sum = |field: fn(&placement::CountersReport) -> u64| -> u64 {
        report.disks.iter().map(|disk| field(&disk.counters)).sum()
    };
    json!({
        "schema": 1,
        "seconds": begun.elapsed().as_secs_f64(),
        "blocks_retained": sum(|counters| counters.blocks_retained_now),
        "pool_bytes": sum(|counters| counters.pool_bytes_now),
        "cow_faults": sum(|counters| counters.cow_faults),
        "transactions": sum(|counters| counters.transactions),
        "disks": report.disks,
        "protection": report.protection,
    })
}

impl Drop for Samples {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
