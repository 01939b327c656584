//! `--trace FILE`: every request of the VM's disks, in amberlog's own format.

use anyhow::Context;
use io_trace::{Kind, Names, Record, Writer, WriterOptions};
use placement::{TraceKind, Tracer};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// A trace that all disks write to.
#[derive(Clone)]
pub struct Trace {
    path: PathBuf,
    writer: Arc<Mutex<Option<Writer<File>>>>,
    started: Instant,
}

impl Trace {
    /// Makes the file, for a VM with disks of these names and sizes in bytes.
    pub fn create(path: &Path, vm: &str, disks: &[(String, u64)]) -> anyhow::Result<Self> {
        let mut names = Names::new();
        let number = names.vm(vm).context("the VM's name is too long for a trace")?;
        for (name, bytes) in disks {
            names.disk(number, name, *bytes).context("a disk's name is too long for a trace")?;
        }
        let file = own_files::create_output(path)?;
        let writer = Writer::new(file, names, WriterOptions::default())
            .with_context(|| format!("making the trace {}", path.display()))?;
        Ok(Trace { path: path.to_owned(), writer: Arc::new(Mutex::new(Some(writer))), started: Instant::now() })
    }

    /// What the VM's journals call for every request.
    pub fn tracer(&self) -> Tracer {
        let trace = self.clone();
        Box::new(move |disk, kind, address, length| {
            let kind = match kind {
                TraceKind::Journal => Kind::Journal,
                TraceKind::Home => Kind::Home,
                TraceKind::Read => Kind::Read,
                TraceKind::Flush => Kind::Flush,
                TraceKind::Discard => Kind::Discard,
            };
            let time_ns = trace.started.elapsed().as_nanos() as u64;
            if let Some(writer) = &mut *trace.writer.lock().expect("no panic under this lock") {
                // An error is sticky in the writer and told when the trace is finished.
                let _ = writer.record(&Record { time_ns, address, length, vm: 0, disk: disk as u16, kind });
            }
        })
    }

    /// Writes what is buffered and ends the trace.
    pub fn finish(&self) -> anyhow::Result<()> {
        let writer = self.writer.lock().expect("no panic under this lock").take();
        if let Some(writer) = writer {
            let lost = writer.lost();
            writer.finish().with_context(|| format!("finishing the trace {}", self.path.display()))?;
            anyhow::ensure!(lost == 0, "{lost} records of the trace {} were lost", self.path.display());
        }
        Ok(())
    }
}
