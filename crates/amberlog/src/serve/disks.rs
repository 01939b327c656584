//! What can be done to the disks of a VM that is served, while its guest runs: `amberlog disk list|resize|throttle`.

use anyhow::{Context, ensure};
use block_device::{DeviceHandle, ImageKind, SECTOR_BYTES};
use block_route::Route;
use serde_json::{Value, json};
use std::time::Instant;
use throttle::{Limits, Throttle};

/// Makes an image larger and tells the guest, or tells it of a block device that has become larger. Gives the size in bytes.
///
/// # Errors
/// When it would become smaller, cannot become larger, or is only read. One caller at a time; `note` looks at the disk anew before the
/// guest is told.
pub fn resize(
    name: &str,
    handle: &DeviceHandle<dyn Route>,
    size_bytes: u64,
    note: impl FnOnce() -> anyhow::Result<()>,
) -> anyhow::Result<u64> {
    let image = handle.image();
    let path = image.path().display();
    ensure!(!image.read_only(), "disk {name} is only read, and so is its size");
    ensure!(
        size_bytes.is_multiple_of(SECTOR_BYTES),
        "{size_bytes} bytes are no whole sectors of {SECTOR_BYTES}; round it up"
    );
    // Not as it was measured last: what the guest was told of is all there.
    let is_file = image.kind() == ImageKind::File;
    let now = image.size_bytes().max(if is_file { image.file().metadata()?.len() } else { 0 });
    ensure!(
        size_bytes >= now,
        "disk {name} has {now} bytes and would lose what is behind {size_bytes}: a disk of a running guest only grows; shrink the file \
         system in the guest, shut it down, and then the image"
    );
    if is_file {
        rustix::fs::ftruncate(image.file(), size_bytes).with_context(|| format!("making {path} larger"))?;
    }
    note().with_context(|| format!("looking for journals on {path}"))?;
    let is = handle.resize()?;
    ensure!(
        is == size_bytes,
        "disk {name} has {is} bytes now, as {path} has: make the device larger first (lvextend, for one)"
    );
    log::info!("disk {name}: has {is} bytes now; it had {now}");
    Ok(is)
}

/// Bounds what a guest may ask of a disk from now on, until the VM is served anew. It leaves its group, if it is in one.
///
/// # Errors
/// When the device has been stopped.
pub fn throttle(name: &str, handle: &DeviceHandle<dyn Route>, limits: Limits) -> anyhow::Result<()> {
    handle.set_throttle((!limits.is_empty()).then(|| Throttle::new(limits, Instant::now())))?;
    log::info!("disk {name}: {}", if limits.is_empty() { "is bounded no more" } else { "has other bounds" });
    Ok(())
}

/// What is bounded, as JSON.
pub fn limits(limits: Limits) -> Value {
    let bound = |bound: Option<throttle::Bound>| {
        bound.map(|bound| json!({"per_second": bound.per_second, "burst": bound.burst}))
    };
    json!({"iops": bound(limits.operations), "bytes": bound(limits.bytes)})
}
