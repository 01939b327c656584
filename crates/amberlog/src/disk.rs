//! `amberlog disk`: what can be done to the disks of a daemon's VM while its guest runs.

use crate::client::{Daemon, text};
use crate::exit;
use crate::vm::{Bounds, qemu, size};
use anyhow::Context;
use clap::{Args, Subcommand};
use command_line::output::text as print;
use serde_json::{Value, json};
use std::ffi::{OsStr, OsString};
use std::process::ExitCode;
use std::time::Duration;

/// Arguments of `amberlog disk`.
#[derive(Args, Debug)]
pub struct DiskArgs {
    #[command(subcommand)]
    command: DiskCommand,
}

#[derive(Subcommand, Debug)]
enum DiskCommand {
    /// Show a VM's disks: image, size, placement, socket.
    List {
        /// The VM.
        vm: String,
        #[command(flatten)]
        daemon: Daemon,
    },
    /// Serve one more disk to a guest that runs, and print how its VMM plugs it in.
    Add {
        /// The VM.
        vm: String,
        /// The disk, as it is written in the configuration: IMAGE[,name=NAME][,placement=PLACEMENT]...
        disk: String,
        /// The QEMU that runs the VM: asked for its version, since not every one understands the same words.
        #[arg(long, value_name = "PROGRAM", default_value = "qemu-system-x86_64")]
        qemu: OsString,
        #[command(flatten)]
        daemon: Daemon,
    },
    /// Serve a disk no more that the VMM has unplugged: what it is owed goes home, and its image is free.
    Remove {
        /// The VM.
        vm: String,
        /// Its disk, by the name that 'amberlog disk list' shows.
        disk: String,
        #[command(flatten)]
        daemon: Daemon,
    },
    /// Make an image larger while its guest runs, and tell the guest; of a block device that has become larger, only tell it.
    Resize {
        /// The VM.
        vm: String,
        /// Its disk, by the name that 'amberlog disk list' shows.
        disk: String,
        /// The new size, in bytes or with K, M, G or T behind it; with + before it, so much more.
        size: String,
        #[command(flatten)]
        daemon: Daemon,
    },
    /// Bound what a guest may ask of a disk, from now on and until the VM is served anew; without a bound, bound it no more.
    Throttle(ThrottleArgs),
}

#[derive(Args, Debug)]
struct ThrottleArgs {
    /// The VM.
    vm: String,
    /// Its disk, by the name that 'amberlog disk list' shows.
    disk: String,
    /// Reads, writes, discards and zeroings a second.
    #[arg(long, value_name = "N", value_parser = size)]
    iops: Option<u64>,
    /// So many at once, after a time without; a tenth of a second's if not given.
    #[arg(long, value_name = "N", value_parser = size, requires = "iops")]
    iops_burst: Option<u64>,
    /// Bytes read and written a second, or with K, M, G or T.
    #[arg(long, value_name = "BYTES", value_parser = size)]
    bytes_per_second: Option<u64>,
    /// So many at once, after a time without; a tenth of a second's if not given.
    #[arg(long, value_name = "BYTES", value_parser = size, requires = "bytes_per_second")]
    bytes_burst: Option<u64>,
    #[command(flatten)]
    daemon: Daemon,
}

/// Runs the command.
pub fn run(args: &DiskArgs) -> ExitCode {
    let result = match &args.command {
        DiskCommand::List { vm, daemon } => list(daemon, vm),
        DiskCommand::Add { vm, disk, qemu, daemon } => add(daemon, vm, disk, qemu),
        DiskCommand::Remove { vm, disk, daemon } => remove(daemon, vm, disk),
        DiskCommand::Resize { vm, disk, size, daemon } => resize(daemon, vm, disk, size),
        DiskCommand::Throttle(args) => throttle(args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => exit::report(&error),
    }
}

fn entry(daemon: &Daemon, vm: &str) -> anyhow::Result<Value> {
    Ok(daemon.ask_quickly(&json!({"command": "status", "vm": vm}))?["vms"][0].clone())
}

fn list(daemon: &Daemon, vm: &str) -> anyhow::Result<()> {
    let entry = entry(daemon, vm)?;
    let mut lines = format!("{:<12} {:>16} {:<9} {}\n", "DISK", "BYTES", "PLACEMENT", "IMAGE, SOCKET");
    for (index, disk) in entry["disks"].as_array().into_iter().flatten().enumerate() {
        let text = |value: &Value| if value.is_string() { text(value) } else { "-".to_owned() };
        lines += &format!(
            "{:<12} {:>16} {:<9} {}, {}\n",
            text(&disk["name"]),
            disk["io"]["size_bytes"].as_u64().map_or("-".to_owned(), |bytes| bytes.to_string()),
            text(&disk["placement"]),
            text(&disk["image"]),
            text(&entry["sockets"][index])
        );
    }
    Ok(print(&lines)?)
}

/// How long a disk that comes or goes may take: what it is owed is brought home.
const CHANGE_PATIENCE: Duration = Duration::from_secs(180);

fn add(daemon: &Daemon, vm: &str, disk: &str, qemu: &OsStr) -> anyhow::Result<()> {
    let answer = daemon.ask(&json!({"command": "disk-add", "vm": vm, "disk": disk}), CHANGE_PATIENCE)?;
    let name = text(&answer["added"][0]);
    let entry = entry(daemon, vm)?;
    let disks = entry["disks"].as_array().into_iter().flatten();
    let index = disks.enumerate().find(|(_, disk)| disk["name"] == name.as_str()).map(|(index, _)| index);
    let socket = index.map_or_else(String::new, |index| text(&entry["sockets"][index]));
    Ok(print(&plug_in(vm, &name, &socket, qemu::Version::of(qemu)))?)
}

/// How the VMM plugs a disk in.
fn plug_in(vm: &str, name: &str, socket: &str, version: Option<qemu::Version>) -> String {
    let (reconnect, value) = qemu::reconnect_property(version);
    let id = format!("amberlog-{name}");
    let address = json!({"type": "unix", "data": {"path": socket}});
    let backend = json!({"type": "socket", "data": {"addr": address, "server": false, (reconnect): value}});
    let connect = json!({"execute": "chardev-add", "arguments": {"id": id, "backend": backend}});
    let device = json!({"driver": "vhost-user-blk-pci", "id": format!("{id}-device"), "chardev": id});
    let plug = json!({"execute": "device_add", "arguments": device});
    format!(
        "{vm}, {name}: is served at {socket} until the VM ends; write it into the configuration if it is to stay. Plug it in:\n\
         QEMU (QMP; on a machine whose PCI bus takes no plugged device, as q35's, name a free root port: \"bus\": \"PORT\"):\n  \
         {connect}\n  {plug}\n\
         libvirt (virsh attach-device DOMAIN FILE --live):\n  \
         <disk type='vhostuser' device='disk'><driver name='qemu' type='raw'/><source type='unix' path='{socket}'>\
         <reconnect enabled='yes' timeout='1'/></source><target dev='TARGET' bus='virtio'/></disk>\n"
    )
}

fn remove(daemon: &Daemon, vm: &str, disk: &str) -> anyhow::Result<()> {
    let question = json!({"command": "disk-remove", "vm": vm, "disk": disk});
    daemon.ask(&question, CHANGE_PATIENCE)?;
    Ok(print(&format!("{vm}, {disk}: is served no more, and its image is free\n"))?)
}

/// How long a disk that becomes larger may take: its file systems are looked at first.
pub const RESIZE_PATIENCE: Duration = Duration::from_secs(60);

fn resize(daemon: &Daemon, vm: &str, disk: &str, wanted: &str) -> anyhow::Result<()> {
    let number = size(wanted.trim_start_matches('+')).map_err(exit::usage)?;
    let size_bytes = if wanted.starts_with('+') {
        let entry = entry(daemon, vm)?;
        let disks = entry["disks"].as_array().into_iter().flatten();
        let now = disks.filter(|entry| entry["name"] == disk).find_map(|entry| entry["io"]["size_bytes"].as_u64());
        now.with_context(|| format!("vm {vm} has no disk {disk} that is served now"))?.saturating_add(number)
    } else {
        number
    };
    let question = json!({"command": "resize", "vm": vm, "disk": disk, "size_bytes": size_bytes});
    let answer = daemon.ask_patiently(&question, RESIZE_PATIENCE.as_secs())?;
    Ok(print(&format!(
        "{vm}, {disk}: {} bytes; the guest has been told\n",
        answer["size_bytes"].as_u64().unwrap_or(size_bytes)
    ))?)
}

fn throttle(args: &ThrottleArgs) -> anyhow::Result<()> {
    let bounds = Bounds {
        operations: args.iops,
        operations_burst: args.iops_burst,
        bytes: args.bytes_per_second,
        bytes_burst: args.bytes_burst,
    };
    bounds.limits().map_err(exit::usage)?;
    let question = json!({"command": "throttle", "vm": args.vm, "disk": args.disk, "bounds": bounds});
    let limits = args.daemon.ask_quickly(&question)?["limits"].clone();
    let bound = |bound: &Value, what: &str| match bound["per_second"].as_u64() {
        Some(number) => format!("{number} {what} a second ({} at once)", bound["burst"].as_u64().unwrap_or_default()),
        None => format!("any number of {what}"),
    };
    let sentence = format!("{}, {}", bound(&limits["iops"], "operations"), bound(&limits["bytes"], "bytes"));
    Ok(print(&format!("{}, {}: {sentence}\n", args.vm, args.disk))?)
}
