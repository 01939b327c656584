//! Records a real guest: its disks are served here, as they are, and everything is written down.

use crate::error::{During, Error, Result};
use crate::recorder::{Recorder, RecordingRoute};
use crate::recording::{PAGE_BYTES, Recording};
use crate::scenario::Scenario;
use block_device::{Device, DeviceConfig, Image, ImageOptions, Observer};
use block_route::PlainRoute;
use guest_kit::{AtEnd, Guest, GuestSpec};
use guest_memory::{PageId, VmMemory};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

const MEMORY_MIB: u32 = 192;
const LIMIT: Duration = Duration::from_secs(600);

struct RingObserver(Recorder);

impl Observer for RingObserver {
    fn ring_pages(&self, pages: &[PageId]) {
        self.0.ring_pages(pages);
    }
}

/// Runs the guest of a scenario and records it.
///
/// # Errors
/// When the guest does not do its work.
pub fn record(scenario: &Scenario) -> Result<Recording> {
    let directory = tempfile::tempdir().during("making a directory")?;
    let shared = tempfile::tempdir_in("/dev/shm").during("making a directory for guest memory")?;
    let path = |name: &str| directory.path().join(name);
    scenario.make(&path("disk0"), &path("disk1"))?;
    let disks = 1 + usize::from(scenario.is_external());
    let recorder = Recorder::new(scenario.name, MEMORY_MIB << 20 >> PAGE_BYTES.trailing_zeros());
    let memory = VmMemory::new();
    let system = |error: block_device::Error| Error::Other(error.to_string());
    let mut devices = Vec::new();
    let mut arguments = vec![
        "-object".to_owned(),
        format!(
            "memory-backend-file,id=ram,size={MEMORY_MIB}M,share=on,mem-path={}",
            shared.path().join("ram").display()
        ),
        "-machine".to_owned(),
        "memory-backend=ram".to_owned(),
    ];
    for index in 0..disks {
        let image = path(&format!("disk{index}"));
        recorder.add_disk(&image).during("reading the image")?;
        let image = Arc::new(Image::open(&image, ImageOptions::default()).map_err(system)?);
        let socket = path(&format!("socket{index}"));
        let config = DeviceConfig::new(format!("disk{index}"), &socket, image);
        let route = Box::new(RecordingRoute::new(PlainRoute, index, recorder.clone()));
        let observer = Arc::new(RingObserver(recorder.clone()));
        devices.push(Device::start(config, route, Arc::clone(&memory), observer).map_err(system)?);
        arguments.extend([
            "-chardev".to_owned(),
            format!("socket,id=c{index},path={}", socket.display()),
            "-device".to_owned(),
            format!("vhost-user-blk-pci,chardev=c{index},num-queues=1"),
        ]);
    }
    let mut spec = GuestSpec::new(scenario.name, scenario.script());
    spec.memory_mib = MEMORY_MIB;
    spec.at_end = AtEnd::Stay;
    spec.qemu_arguments = arguments.into_iter().map(Into::into).collect();
    let mut guest = Guest::start(spec)?;
    let mut heard: BTreeMap<String, u64> = BTreeMap::new();
    let mut is_done = false;
    while !is_done {
        guest.await_report("no work was acknowledged", LIMIT, |reported| {
            for (stream, acknowledged) in &reported.acknowledged {
                let Some(last) = acknowledged.last else { continue };
                if heard.get(stream).is_none_or(|before| *before < last) {
                    recorder.acknowledged(stream, last);
                    heard.insert(stream.clone(), last);
                }
            }
            is_done = reported.marks.iter().any(|mark| mark == "done");
            (is_done || reported.exit_code.is_some()).then_some(())
        })?;
        if !is_done {
            return Err(guest.failure("its script ended early").into());
        }
    }
    // A few home writes more.
    std::thread::sleep(Duration::from_millis(700));
    recorder.end();
    guest.kill_all()?;
    drop(devices);
    Ok(recorder.take())
}
