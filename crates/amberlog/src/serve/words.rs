//! What a VMM is started with so that it finds a VM's disks, and where their sockets are: made by the supervisor of its configuration.
//!
//! Must never: pass on what a worker says of these. It may be its guest's by then, and whoever asks starts a VMM with them: a library
//! that is loaded into it, sockets that it connects to, images that it does not open itself. Failure story: of a VM that is not in the
//! configuration, or whose configuration is not understood, nothing is said.

use super::config::{Config, VmConfig};
use crate::vm::qemu;
use anyhow::Context;
use serde_json::{Value, json};
use std::path::Path;

/// Where a VM's directory in tmpfs is found from beside its sockets, whatever it is called this time.
pub const AREA: &str = "area";

/// A VM, as the file has it.
///
/// # Errors
/// When it is not in there.
pub fn configured(source: &str, name: &str) -> anyhow::Result<VmConfig> {
    let vm = Config::parse(source)?.vms.remove(name);
    vm.with_context(|| format!("vm {name} is not in the configuration"))
}

/// The environment and the arguments of a QEMU that somebody else starts, and the disks that it finds.
///
/// # Errors
/// A sentence when there is no such command line.
pub fn arguments(config: &VmConfig, memory_mib: u64, reconnect: bool) -> anyhow::Result<Value> {
    let disks = config.options.attachments(&config.sockets)?;
    let memory = config.sockets.join(AREA).join("ram");
    let words = qemu::arguments_for_strangers(memory_mib, &memory, &disks, reconnect)
        .map_err(|sentence| anyhow::anyhow!("{sentence}"))?;
    let words: Vec<_> = words.iter().map(|word| word.to_string_lossy()).collect();
    let mut environment = serde_json::Map::new();
    if let Some(shim) = crate::shim::find() {
        environment.insert("LD_PRELOAD".to_owned(), json!(shim));
        environment.insert(guest_memory::SHIM_SOCKET_VARIABLE.to_owned(), json!(config.sockets.join("shim.sock")));
    }
    let disks: Vec<_> = disks
        .iter()
        .map(|disk| json!({"image": disk.image.0, "socket": disk.socket, "readonly": disk.image.1}))
        .collect();
    Ok(json!({"schema": 1, "environment": environment, "arguments": words, "disks": disks}))
}

/// Names the sockets of the disks in a VM's entry: each is in the VM's own directory, and has its disk's name.
pub fn name_sockets(entry: &mut Value, sockets: &Path) {
    if !entry["sockets"].is_array() {
        return;
    }
    let of = |disk: &Value| {
        let name = disk["name"].as_str().filter(|name| super::config::is_file_name(name))?;
        Some(sockets.join(format!("{name}.sock")))
    };
    let named: Value = entry["disks"].as_array().into_iter().flatten().map(|disk| json!(of(disk))).collect();
    entry["sockets"] = named;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whatever_a_worker_says_sockets_are_its_own_vms() {
        let disks = json!([{"name": "root"}, {"name": "../other/root"}, {"name": 7}, {}]);
        let mut entry = json!({"disks": disks, "sockets": ["/run/other/root.sock", 1]});
        name_sockets(&mut entry, Path::new("/run/own"));
        assert_eq!(entry["sockets"], json!(["/run/own/root.sock", null, null, null]));
        // Not served.
        for mut entry in [json!({"disks": [{"name": "root"}]}), json!({"disks": [], "sockets": "x"})] {
            let before = entry.clone();
            name_sockets(&mut entry, Path::new("/run/own"));
            assert_eq!(entry["sockets"], before["sockets"]);
        }
    }
}
