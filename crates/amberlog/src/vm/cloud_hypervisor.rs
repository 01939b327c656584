//! What in Cloud Hypervisor's arguments matters to us: devices that take guest memory away, or write to it, without a page fault.
//!
//! It only reads, and knows options by their names as of version 54: of one that it does not know, nothing can be said, and pages are then
//! copied instead of protected. A list of what is harmless is kept, not of what is not: a new device of a new version is no hole.

use std::ffi::{OsStr, OsString};
use std::path::Path;

/// Options after which pages can be protected, whatever their values are but for what [`reason_of`] says.
const HARMLESS: [&str; 22] = [
    "cmdline",
    "console",
    "cpus",
    "debug-console",
    "disk",
    "event-monitor",
    "firmware",
    "initramfs",
    "kernel",
    "landlock",
    "landlock-rules",
    "log-file",
    "memory",
    "memory-zone",
    "net",
    "numa",
    "pci-segment",
    "platform",
    "rng",
    "seccomp",
    "serial",
    "watchdog",
];

/// Whether a program is Cloud Hypervisor, by its name.
pub fn is_it(program: &OsStr) -> bool {
    Path::new(program).file_name().is_some_and(|name| name == "cloud-hypervisor" || name == "cloud-hypervisor-static")
}

/// What in the arguments contradicts what amberlog promises.
pub fn contradiction(arguments: &[OsString]) -> Option<String> {
    let restores = |word: &OsString| {
        let text = word.to_string_lossy();
        text == "--restore" || text.starts_with("--restore=")
    };
    arguments.iter().any(restores).then(|| {
        "--restore: a guest that comes from elsewhere has a journal that is not here, so what it commits could not be held; start it anew"
            .to_owned()
    })
}

/// What in the arguments (the program's name first) keeps guest pages from being protected. Disks whose sockets are in `ours` do not count.
pub fn bypasses_protection(arguments: &[OsString], ours: &Path) -> Option<String> {
    let mut option = String::new();
    // The kernel's copy of them ends with an empty one.
    for word in arguments.iter().skip(1).filter(|word| !word.is_empty()) {
        let text = word.to_string_lossy();
        let (name, value) = match text.strip_prefix("--") {
            // Both `--disk VALUE` and `--disk=VALUE`; several values may follow.
            Some(given) => {
                let (name, value) = given.split_once('=').map_or((given, None), |(name, value)| (name, Some(value)));
                name.clone_into(&mut option);
                (name, value)
            }
            None if text.starts_with("-v") && text[1..].bytes().all(|byte| byte == b'v') => continue,
            None => (option.as_str(), Some(&*text)),
        };
        if let Some(reason) = reason_of(name, value, ours) {
            return Some(reason);
        }
    }
    None
}

fn reason_of(name: &str, value: Option<&str>, ours: &Path) -> Option<String> {
    let shown = value.map_or_else(|| format!("--{name}"), |value| format!("--{name} {value}"));
    let because = |what: &str| Some(format!("{what} ('{shown}')"));
    match name {
        "api-socket" => return because("what is asked of Cloud Hypervisor by its API socket is not seen"),
        "balloon" => return because("a balloon takes pages away without a fault"),
        "device" => return because("a passed-through device writes to guest memory without a fault"),
        _ if !HARMLESS.contains(&name) => return because("what this option of Cloud Hypervisor does is not known"),
        _ => {}
    }
    let parts = || value.unwrap_or_default().split(',').filter_map(|part| part.split_once('='));
    let has = |key: &str, values: &[&str]| parts().any(|(name, value)| name == key && values.contains(&value));
    match name {
        "disk" | "net" if parts().any(|(key, _)| key == "vhost_user") && !has("vhost_user", &["off", "false"]) => {
            let socket = parts().find_map(|(key, value)| matches!(key, "socket" | "vhost_socket").then_some(value));
            let is_ours = name == "disk" && socket.is_some_and(|socket| Path::new(socket).starts_with(ours));
            if is_ours { None } else { because("another vhost-user device writes to guest memory without a fault") }
        }
        "memory" | "memory-zone" if parts().any(|(key, _)| key.starts_with("hotplug")) => {
            because("memory that is plugged in and out takes pages away without a fault")
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(text: &str) -> Vec<OsString> {
        text.split(' ').map(OsString::from).collect()
    }

    #[test]
    fn a_machine_with_our_disks_bypasses_nothing() {
        let ours = Path::new("/run/amberlog/db");
        for text in [
            "cloud-hypervisor --kernel vmlinux --cmdline console=ttyS0 --cpus boot=2 --memory size=1G,shared=on",
            "cloud-hypervisor -vv --memory size=0 --memory-zone id=m,size=1G,shared=on,file=/run/amberlog/db/area/ram --disk path=/root.img \
             vhost_user=on,socket=/run/amberlog/db/disk0.sock,num_queues=1 --net=tap=vm0,mac= --rng src=/dev/urandom",
        ] {
            assert_eq!(bypasses_protection(&list(text), ours), None, "{text}");
        }
    }

    #[test]
    fn what_bypasses_protection_is_found_and_so_is_what_is_not_known() {
        let ours = Path::new("/run/amberlog/db");
        for text in [
            "--api-socket /run/ch.sock",
            "--api-socket=path=/run/ch.sock",
            "--balloon size=0,free_page_reporting=on",
            "--device path=/sys/bus/pci/devices/0000:01:00.0",
            "--user-device socket=/x",
            "--fs tag=a,socket=/x",
            "--vdpa path=/dev/vhost-vdpa-0",
            "--pmem file=/x",
            "--restore source_url=file:///x",
            "--something-new",
            "--disk vhost_user=on,socket=/run/other/disk0.sock",
            "--disk path=/a vhost_user=true,socket=/run/amberlog/dbx/disk0.sock",
            "--disk vhost_user=on",
            "--net vhost_user=true,socket=/run/amberlog/db/disk0.sock",
            "--memory size=1G,hotplug_method=virtio-mem,hotplug_size=1G",
            "--memory-zone id=m,size=1G,hotplug_size=1G",
        ] {
            let given = list(&format!("cloud-hypervisor --cpus boot=1 {text}"));
            assert!(bypasses_protection(&given, ours).is_some(), "{text}");
        }
    }

    #[test]
    fn a_guest_that_is_restored_is_turned_away() {
        for text in ["ch --restore source_url=file:///x", "ch --cpus boot=1 --restore=source_url=file:///x"] {
            assert!(contradiction(&list(text)).is_some_and(|reason| reason.starts_with("--restore")), "{text}");
        }
        assert_eq!(contradiction(&list("ch --cpus boot=1 --kernel restore")), None);
    }

    #[test]
    fn it_is_known_by_its_name() {
        assert!(is_it(OsStr::new("/usr/bin/cloud-hypervisor")) && is_it(OsStr::new("cloud-hypervisor-static")));
        assert!(!is_it(OsStr::new("/usr/bin/ch-remote")) && !is_it(OsStr::new("qemu-system-x86_64")));
    }
}
