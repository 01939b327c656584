//! What is added to a VMM's arguments, and what in them matters to us.

use anyhow::Context;
use std::ffi::{OsStr, OsString};
use std::path::Path;

/// Default of QEMU's `-m`, in MiB.
const DEFAULT_MEMORY_MIB: u64 = 128;

/// A disk as the VMM is told of it.
#[derive(Clone, Debug)]
pub struct Attachment {
    /// Its socket.
    pub socket: std::path::PathBuf,
    /// Number of request queues.
    pub queues: u16,
}

/// Value of the last `-m` in bytes: `512`, `512M`, `2G`, `size=2G,slots=...`.
fn memory_bytes(arguments: &[OsString]) -> Result<u64, String> {
    let mut found = None;
    let mut previous: &OsStr = OsStr::new("");
    for argument in arguments {
        if previous == "-m" || previous == "--m" {
            found = Some(argument.to_string_lossy().into_owned());
        }
        previous = argument;
    }
    let Some(text) = found else { return Ok(DEFAULT_MEMORY_MIB << 20) };
    let first = text.split(',').next().unwrap_or_default();
    let size = first.strip_prefix("size=").unwrap_or(first);
    let digits: String = size.chars().take_while(char::is_ascii_digit).collect();
    let number: u64 = digits.parse().map_err(|_| format!("-m {text}: the memory size is not a number"))?;
    let shift = match &size[digits.len()..] {
        "" | "M" | "m" | "MiB" => 20,
        "K" | "k" => 10,
        "G" | "g" | "GiB" => 30,
        "T" | "t" => 40,
        "B" | "b" => 0,
        other => return Err(format!("-m {text}: '{other}' is no unit of memory")),
    };
    number.checked_mul(1 << shift).filter(|bytes| *bytes > 0).ok_or_else(|| format!("-m {text}: impossible size"))
}

/// Whether the guest's memory, where amberlog makes its file, fits into `directory`'s file system as it is now: a guest
/// that touched more than there is would be killed in the middle of its work.
///
/// # Errors
/// A sentence.
pub fn check_room(given: &[OsString], directory: &Path) -> anyhow::Result<()> {
    if has_backend(given) {
        return Ok(());
    }
    let needed = memory_bytes(given).map_err(crate::exit::usage)?;
    let status = rustix::fs::statvfs(directory).with_context(|| format!("asking {} for room", directory.display()))?;
    let free = status.f_bavail.saturating_mul(status.f_frsize);
    anyhow::ensure!(
        needed <= free,
        "the guest's {} MiB of memory do not fit into {}, which has {} MiB free; enlarge that tmpfs (mount -o \
         remount,size=...), name another one with --shm, or give the guest less with -m",
        needed >> 20,
        directory.display(),
        free >> 20
    );
    Ok(())
}

fn has_backend(given: &[OsString]) -> bool {
    given.iter().any(|argument| argument.to_string_lossy().starts_with("memory-backend-"))
}

/// What in the arguments takes guest memory away, or writes to it, without a page fault: protection cannot hold then.
pub fn bypasses_protection(arguments: &[OsString]) -> Option<String> {
    const BYPASSES: &[(&str, &str)] = &[
        ("balloon", "a balloon takes pages away without a fault"),
        ("virtio-mem", "virtio-mem takes pages away without a fault"),
        ("free-page-reporting", "free page reporting takes pages away without a fault"),
        ("vfio-", "a passed-through device writes to guest memory without a fault"),
        ("vhost-user", "another vhost-user device writes to guest memory without a fault"),
        ("vhost-vdpa", "a vDPA device writes to guest memory without a fault"),
    ];
    arguments.iter().find_map(|argument| {
        let text = argument.to_string_lossy();
        BYPASSES.iter().find(|(mark, _)| text.contains(mark)).map(|(_, reason)| format!("{reason} ('{text}')"))
    })
}

/// The arguments of a VMM without the vhost-user disks whose sockets are in `directory`: those are ours.
pub fn without_our_disks(arguments: Vec<OsString>, directory: &Path) -> Vec<OsString> {
    let directory = directory.to_string_lossy();
    let texts: Vec<String> = arguments.iter().map(|argument| argument.to_string_lossy().into_owned()).collect();
    // `socket,id=ID,path=SOCKET`, or the same as JSON.
    let ours: Vec<&str> = texts
        .iter()
        .filter(|text| text.contains(&*directory))
        .filter_map(|text| {
            let after = text.split_once("id=").or_else(|| text.split_once("\"id\":\""))?.1;
            after.split([',', '"']).next()
        })
        .collect();
    let is_ours = |text: &str| {
        text.contains("vhost-user-blk")
            && ours.iter().any(|id| {
                text.split([',', '{', '}'])
                    .any(|part| part == format!("chardev={id}") || part == format!("\"chardev\":\"{id}\""))
            })
    };
    let keep: Vec<bool> = texts.iter().map(|text| !is_ours(text)).collect();
    arguments.into_iter().zip(keep).filter_map(|(argument, keep)| keep.then_some(argument)).collect()
}

/// What a VMM that somebody else starts needs to have its memory shared and its disks here, as words of QEMU's command line.
pub fn arguments_for_strangers(
    memory_mib: u64,
    memory_file: &Path,
    disks: &[Attachment],
    reconnect: bool,
) -> Result<Vec<OsString>, String> {
    let mut words: Vec<OsString> = vec!["-m".into(), format!("{memory_mib}M").into()];
    words = arguments(&words, memory_file, disks)?;
    if reconnect {
        for word in words.iter_mut().filter(|word| word.to_string_lossy().starts_with("socket,")) {
            word.push(",reconnect=1");
        }
    }
    Ok(words)
}

/// The VMM's command line with shared memory and disks added.
///
/// # Errors
/// A sentence when the given arguments cannot work with ours.
pub fn arguments(given: &[OsString], memory_file: &Path, disks: &[Attachment]) -> Result<Vec<OsString>, String> {
    if given.iter().any(|argument| argument == "-daemonize" || argument == "--daemonize") {
        return Err("-daemonize does not work here: amberlog has to see the VMM end; remove it".to_owned());
    }
    let mut arguments = given.to_vec();
    if has_backend(given) {
        let shared = given
            .iter()
            .map(|argument| argument.to_string_lossy())
            .filter(|argument| argument.starts_with("memory-backend-"))
            .all(|argument| {
                argument.contains("share=on")
                    || argument.contains("share=yes")
                    || (argument.starts_with("memory-backend-memfd") && !argument.contains("share=off"))
            });
        if !shared {
            return Err(
                "the memory backend in the VMM's arguments is not shared: add share=on to it, or leave it out \
                        and amberlog adds one"
                    .to_owned(),
            );
        }
    } else {
        let bytes = memory_bytes(given)?;
        arguments.push("-object".into());
        let mut object =
            OsString::from(format!("memory-backend-file,id=amberlog-memory,size={bytes},share=on,mem-path="));
        object.push(memory_file);
        arguments.push(object);
        arguments.push("-machine".into());
        arguments.push("memory-backend=amberlog-memory".into());
    }
    for (index, disk) in disks.iter().enumerate() {
        arguments.push("-chardev".into());
        let mut chardev = OsString::from(format!("socket,id=amberlog-disk{index},path="));
        chardev.push(&disk.socket);
        arguments.push(chardev);
        arguments.push("-device".into());
        arguments.push(
            format!("vhost-user-blk-pci,id=amberlog{index},chardev=amberlog-disk{index},num-queues={}", disk.queues)
                .into(),
        );
    }
    Ok(arguments)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(text: &str) -> Vec<OsString> {
        text.split(' ').map(OsString::from).collect()
    }

    #[test]
    fn memory_sizes() {
        for (text, bytes) in [
            ("q", 128 << 20),
            ("q -m 256", 256 << 20),
            ("q -m 2G", 2 << 30),
            ("q -m size=1G,slots=2,maxmem=4G", 1 << 30),
            ("q -m 1 -m 64M", 64 << 20),
        ] {
            assert_eq!(memory_bytes(&list(text)), Ok(bytes), "{text}");
        }
        assert!(memory_bytes(&list("q -m lots")).is_err());
        assert!(memory_bytes(&list("q -m 3X")).is_err());
    }

    #[test]
    fn a_private_backend_is_refused() {
        let path = Path::new("/shm/ram");
        assert!(arguments(&list("q -object memory-backend-ram,id=m,size=1G"), path, &[]).is_err());
        let kept = arguments(&list("q -object memory-backend-memfd,id=m,size=1G"), path, &[]).expect("shared");
        assert_eq!(kept.len(), 3);
        assert!(arguments(&list("q -daemonize"), path, &[]).is_err());
    }

    #[test]
    fn our_own_disks_do_not_count_as_strangers() {
        let run = Path::new("/run/amberlog/db");
        let ours = list(
            "q -chardev socket,id=c1,path=/run/amberlog/db/root.sock -device vhost-user-blk-pci,id=d,chardev=c1,num-queues=1",
        );
        assert_eq!(bypasses_protection(&without_our_disks(ours.clone(), run)), None);
        assert!(bypasses_protection(&without_our_disks(ours, Path::new("/run/amberlog/web"))).is_some());
        let json = list(
            r#"q -chardev socket,id=c1,path=/run/amberlog/db/a.sock -device {"driver":"vhost-user-blk-pci","chardev":"c1","bus":"b"}"#,
        );
        assert_eq!(bypasses_protection(&without_our_disks(json, run)), None);
        let other = list(
            "q -chardev socket,id=c1,path=/run/amberlog/db/a.sock -chardev socket,id=c11,path=/x -device vhost-user-blk-pci,chardev=c11",
        );
        assert!(bypasses_protection(&without_our_disks(other, run)).is_some());
        let net = list("q -chardev socket,id=c1,path=/run/amberlog/db/a.sock -device vhost-user-net,chardev=c1");
        assert!(bypasses_protection(&without_our_disks(net, run)).is_some());
    }

    #[test]
    fn what_bypasses_protection_is_found() {
        assert!(bypasses_protection(&list("q -device virtio-balloon-pci")).is_some());
        assert_eq!(bypasses_protection(&list("q -device virtio-net-pci")), None);
    }
}
