//! Where in QEMU's command line a VM's disks go, so that the guest finds them in their order.
//!
//! A guest numbers its virtio disks by their address. QEMU gives addresses in the order of `-device`, after those of its default
//! devices and before those of `-drive if=virtio`. So amberlog's disks are the first if they come before the user's own; only
//! where one of these has an address of its own is nothing moved, because that address might be taken then.

use super::Attachment;
use super::command_line::CommandLine;
use super::properties::Properties;
use std::ffi::OsString;

/// How a machine's disks are attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Transport {
    Pci,
    /// The microvm's: one of its virtio-mmio slots for each.
    Mmio,
}

/// Which transport a machine has.
///
/// # Errors
/// A sentence when it has none that a disk could use.
fn transport(machine: &Properties) -> Result<Transport, String> {
    match machine.get("type").unwrap_or_default() {
        "microvm" if machine.is_on("pcie") == Some(true) => Ok(Transport::Pci),
        "microvm" => Ok(Transport::Mmio),
        kind @ ("isapc" | "none") => {
            Err(format!("the machine {kind} has no bus for virtio disks; use q35, pc or microvm"))
        }
        _ => Ok(Transport::Pci),
    }
}

/// What is added to the command line for the disks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskArguments {
    /// The words.
    pub words: Vec<OsString>,
    /// They come before all other options, not after them.
    pub is_first: bool,
    /// A disk of the user's has an address of its own, which may come before ours.
    pub may_be_preceded: bool,
}

/// Makes the arguments for the disks.
///
/// # Errors
/// A sentence when the machine cannot have them.
pub fn arguments(line: &CommandLine<'_>, disks: &[Attachment]) -> Result<DiskArguments, String> {
    let transport = transport(&line.machine()?)?;
    let devices = line.properties("device", Some("driver"))?;
    let driver = |device: &Properties| device.get("driver").unwrap_or_default().to_owned();
    let is_disk =
        |device: &&Properties| ["virtio-blk", "vhost-user-blk"].iter().any(|mark| driver(device).starts_with(mark));
    let has_disks = devices.iter().filter(is_disk).count() > 0;
    let is_addressed = |device: &Properties| device.get("addr").is_some() || device.get("bus").is_some();
    let has_addresses = devices.iter().any(is_addressed);
    let mut words = Vec::new();
    // The guest's kernel finds the microvm's slots from the highest on.
    for (index, disk) in disks.iter().enumerate() {
        words.push("-chardev".into());
        let mut chardev = OsString::from(format!("socket,id=amberlog-disk{index},path="));
        chardev.push(super::escaped(disk.socket.as_os_str()));
        words.push(chardev);
        words.push("-device".into());
        let driver = match transport {
            Transport::Pci => "vhost-user-blk-pci",
            Transport::Mmio => "vhost-user-blk",
        };
        words.push(
            format!("{driver},id=amberlog{index},chardev=amberlog-disk{index},num-queues={}", disk.queues).into(),
        );
    }
    Ok(DiskArguments {
        words,
        is_first: has_disks && !has_addresses,
        may_be_preceded: devices.iter().filter(is_disk).any(is_addressed),
    })
}
