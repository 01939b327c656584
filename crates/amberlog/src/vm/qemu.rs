//! What is added to a VMM's arguments, and what in them matters to us.
//!
//! Must never: override silently what the user has said, or let through what would break amberlog's promise without a word
//! (`-snapshot`, whose guest would believe that nothing is kept). Failure story: what is not understood is refused with a
//! sentence before anything is started; under the daemon, where somebody else starts the VMM, it is turned away.

mod command_line;
mod disks;
mod memory;
mod properties;
mod version;

use anyhow::Context;
use command_line::CommandLine;
pub use command_line::is_known;
use memory::{GuestMemory, RESERVED};
use properties::Properties;
use std::collections::HashSet;
use std::ffi::{OsStr, OsString};
use std::os::fd::RawFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;
pub use version::{Version, reconnect_property};

/// A disk as the VMM is told of it.
#[derive(Clone, Debug)]
pub struct Attachment {
    /// Its socket.
    pub socket: std::path::PathBuf,
    /// Number of request queues.
    pub queues: u16,
    /// Its image, and whether the guest can only read it.
    pub image: (std::path::PathBuf, bool),
}

/// Whether the guest's memory, where amberlog makes its file, fits into `directory`'s file system as it is now: a guest
/// that touched more than there is would be killed in the middle of its work.
///
/// # Errors
/// A sentence.
pub fn check_room(given: &[OsString], directory: &Path) -> anyhow::Result<()> {
    let memory = memory::guest_memory(&CommandLine::parse(given)).map_err(crate::exit::usage)?;
    let GuestMemory::Ours(needed) = memory else { return Ok(()) };
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

/// What in the arguments contradicts what amberlog promises, whoever starts the VMM; a guest may come from elsewhere where that is asked
/// for ([`super::migration`]).
pub fn contradiction(given: &[OsString], may_come: bool) -> Option<String> {
    const REFUSED: &[(&str, &str)] = &[
        (
            "snapshot",
            "-snapshot has no effect on the disks that amberlog serves: what the guest writes would stay; leave it out, and give \
             amberlog a copy of the image if nothing is to stay",
        ),
        (
            "incoming",
            "-incoming: a guest that comes from elsewhere has a journal that is not here, so what it commits could not be \
             recovered; start it anew",
        ),
        (
            "loadvm",
            "-loadvm: a guest that goes back to a snapshot has another disk in its memory than amberlog serves, and would destroy \
             its file systems; start it anew",
        ),
    ];
    let line = CommandLine::parse(given);
    REFUSED
        .iter()
        .find(|(name, _)| line.has(name) && !(may_come && *name == "incoming"))
        .map(|(_, sentence)| (*sentence).to_owned())
}

/// What in the arguments would change what amberlog adds, or hides from it what it has to know.
fn interference(line: &CommandLine<'_>) -> Option<String> {
    if line.has("readconfig") {
        return Some(
            "-readconfig: amberlog does not see what is in that file; write it on the command line".to_owned(),
        );
    }
    let of_ours = |value: &str| {
        format!(
            "{value}: this changes a disk that amberlog serves; say it as the disk's option (--disk IMAGE,queues=N)"
        )
    };
    for value in line.values("set").map(OsStr::to_string_lossy) {
        match value.split_once('.') {
            Some(("device", rest)) if rest.starts_with(RESERVED) => return Some(of_ours(&format!("-set {value}"))),
            Some(("device", _)) => {}
            _ => {
                return Some(format!(
                    "-set {value}: amberlog does not see what this changes; write it in the option itself"
                ));
            }
        }
    }
    for value in line.values("global").map(OsStr::to_string_lossy) {
        let properties = Properties::parse(OsStr::new(&*value), None).unwrap_or_default();
        let driver = properties.get("driver").map_or_else(|| value.clone(), |driver| driver.to_owned().into());
        if driver.starts_with("vhost-user-blk") {
            return Some(of_ours(&format!("-global {value}")));
        }
    }
    for option in ["object", "chardev", "device", "drive", "blockdev", "netdev"] {
        let Ok(all) = line.properties(option, None) else { continue };
        if let Some(id) = all.iter().filter_map(|one| one.get("id")).find(|id| id.starts_with(RESERVED)) {
            return Some(format!(
                "-{option} …,id={id}: ids that begin with '{RESERVED}' are amberlog's own; choose another"
            ));
        }
    }
    None
}

/// How deep one file is named within what names another.
const NAMED_DEPTH_MAX: u32 = 8;

/// What in a value may be a file's name: the whole, the value of each property, what comes behind a protocol (`file:`), and all of that in
/// what is written as `json:`.
fn names_in(text: &str, depth: u32, names: &mut Vec<String>) {
    if depth > NAMED_DEPTH_MAX {
        return;
    }
    names.push(text.to_owned());
    if let Some((protocol, rest)) = text.split_once(':')
        && !protocol.contains(['/', ',', '='])
    {
        names_in(rest, depth + 1, names);
    }
    if text.contains(['=', ',']) || text.trim_start().starts_with('{') {
        let properties = Properties::parse(OsStr::new(text), Some("driver")).unwrap_or_default();
        for (_, value) in properties.iter().filter(|(_, value)| *value != text) {
            names_in(value, depth + 1, names);
        }
    }
}

/// Disks that QEMU would open although amberlog serves them: as a drive, or as anything else that it reads and writes.
fn opens_twice(line: &CommandLine<'_>, disks: &[Attachment]) -> Option<String> {
    const OF_NO_FILE: &[&str] = &["append", "name", "uuid", "id"];
    let identity = |path: &Path| {
        use std::os::unix::fs::MetadataExt;
        let metadata = std::fs::metadata(path).ok()?;
        Some((metadata.dev(), metadata.ino(), metadata.rdev()))
    };
    let ours: HashSet<_> =
        disks.iter().filter(|disk| !disk.image.1).filter_map(|disk| identity(&disk.image.0)).collect();
    for option in line.options.iter().filter(|option| !OF_NO_FILE.contains(&option.name.as_str())) {
        let Some(value) = option.value else { continue };
        let mut names = Vec::new();
        names_in(&value.to_string_lossy(), 0, &mut names);
        for path in names {
            if identity(Path::new(&path)).is_some_and(|identity| ours.contains(&identity)) {
                return Some(format!(
                    "-{} {}: amberlog serves {path}, and the guest would have the same disk twice; leave that option out",
                    option.name,
                    value.to_string_lossy()
                ));
            }
        }
    }
    None
}

/// What in the arguments takes guest memory away, or writes to it, without a page fault: protection cannot hold then. Disks
/// whose sockets are in `ours` do not count.
pub fn bypasses_protection(arguments: &[OsString], ours: Option<&Path>) -> Option<String> {
    const DRIVERS: &[(&str, &str)] = &[
        ("balloon", "a balloon takes pages away without a fault"),
        ("virtio-mem", "virtio-mem takes pages away without a fault"),
        ("free-page-reporting", "free page reporting takes pages away without a fault"),
        ("vfio-", "a passed-through device writes to guest memory without a fault"),
        ("vhost-user", "another vhost-user device writes to guest memory without a fault"),
        ("vhost-vdpa", "a vDPA device writes to guest memory without a fault"),
        ("pvrdma", "an RDMA device writes to guest memory without a fault"),
    ];
    if arguments.is_empty() {
        return Some(
            "the VMM's command line cannot be read (does /proc hide it?), so what it may take away is not seen"
                .to_owned(),
        );
    }
    let line = CommandLine::parse(arguments);
    let chardevs = ours.map(|directory| our_chardevs(&line, directory)).unwrap_or_default();
    for option in &line.options {
        if option.name == "readconfig" {
            return Some(format!("what is in the VMM's -readconfig {} is not seen", option.value?.to_string_lossy()));
        }
        // What may hold one of these devices, or a device that takes its kind from elsewhere. Names and kernel arguments do not.
        if matches!(
            option.name.as_str(),
            "append" | "name" | "kernel" | "initrd" | "fw_cfg" | "smbios" | "serial" | "D"
        ) {
            continue;
        }
        let Some(value) = option.value else { continue };
        let text = value.to_string_lossy();
        let Some((_, reason)) = DRIVERS.iter().find(|(mark, _)| text.contains(mark)) else { continue };
        let device = Properties::parse(value, Some("driver")).unwrap_or_default();
        let is_our_disk = option.name == "device"
            && device.get("driver").is_some_and(|driver| driver.starts_with("vhost-user-blk"))
            && device.get("chardev").is_some_and(|chardev| chardevs.contains(chardev));
        // Our sockets may lie in a directory that is called like one of these.
        let is_our_socket =
            option.name == "chardev" && device.get("id").is_some_and(|chardev| chardevs.contains(chardev));
        if !is_our_disk && !is_our_socket {
            return Some(format!("{reason} ('{text}')"));
        }
    }
    None
}

/// The ids of the character devices that are sockets in a directory.
fn our_chardevs(line: &CommandLine<'_>, directory: &Path) -> HashSet<String> {
    let chardevs = line.properties("chardev", Some("backend")).unwrap_or_default();
    let is_ours =
        |chardev: &&Properties| chardev.get("path").is_some_and(|path| Path::new(path).starts_with(directory));
    chardevs.iter().filter(is_ours).filter_map(|chardev| chardev.get("id").map(str::to_owned)).collect()
}

/// A path as a part of an option's value.
fn escaped(path: &OsStr) -> OsString {
    let mut bytes = Vec::new();
    for byte in path.as_bytes() {
        bytes.push(*byte);
        if *byte == b',' {
            bytes.push(b',');
        }
    }
    OsString::from_vec(bytes)
}

/// Words that give it a monitor (QMP) at the other end of a socket that it inherits.
pub fn monitor_at(descriptor: RawFd) -> [String; 4] {
    [
        "-chardev".to_owned(),
        format!("socket,id={RESERVED}-monitor,fd={descriptor}"),
        "-mon".to_owned(),
        format!("chardev={RESERVED}-monitor,mode=control"),
    ]
}

/// What a VMM that somebody else starts needs to have its memory shared and its disks here, as words of QEMU's command line.
pub fn arguments_for_strangers(
    memory_mib: u64,
    memory_file: &Path,
    disks: &[Attachment],
    reconnect: bool,
) -> Result<Vec<OsString>, String> {
    let mut words: Vec<OsString> = vec!["qemu-system-x86_64".into(), "-m".into(), format!("{memory_mib}M").into()];
    words = arguments(&words, memory_file, disks)?;
    words.remove(0);
    if reconnect {
        for word in words.iter_mut().filter(|word| word.to_string_lossy().starts_with("socket,")) {
            word.push(RECONNECT);
        }
    }
    Ok(words)
}

/// As QEMU understands it up to 10.0.
const RECONNECT: &str = ",reconnect=1";

/// The same word as a QEMU of this version understands it.
pub fn in_words_of(version: Option<Version>, word: &str) -> String {
    let (name, value) = reconnect_property(version);
    match word.strip_suffix(RECONNECT) {
        Some(socket) if word.starts_with("socket,") => format!("{socket},{name}={value}"),
        _ => word.to_owned(),
    }
}

/// The VMM's command line with shared memory and disks added.
///
/// # Errors
/// A sentence when the given arguments cannot work with ours.
pub fn arguments(given: &[OsString], memory_file: &Path, disks: &[Attachment]) -> Result<Vec<OsString>, String> {
    let line = CommandLine::parse(given);
    if line.has("daemonize") {
        return Err("-daemonize does not work here: amberlog has to see the VMM end; remove it".to_owned());
    }
    let refusal = contradiction(given, false).or_else(|| interference(&line)).or_else(|| opens_twice(&line, disks));
    if let Some(sentence) = refusal {
        return Err(sentence);
    }
    let memory = memory::guest_memory(&line)?;
    let mut arguments = given.to_vec();
    if let GuestMemory::Ours(bytes) = memory {
        arguments.push("-object".into());
        let mut object =
            OsString::from(format!("memory-backend-file,id=amberlog-memory,size={bytes},share=on,mem-path="));
        object.push(escaped(memory_file.as_os_str()));
        arguments.push(object);
        arguments.push("-machine".into());
        arguments.push("memory-backend=amberlog-memory".into());
    }
    let added = disks::arguments(&line, disks)?;
    if added.may_be_preceded {
        log::warn!(
            "the VMM's own virtio disks have addresses: the guest may find them before amberlog's, which are \
             /dev/disk/by-id/virtio-NAME in any case"
        );
    }
    let at = if added.is_first { (line.program + 1).min(arguments.len()) } else { arguments.len() };
    arguments.splice(at..at, added.words);
    Ok(arguments)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(text: &str) -> Vec<OsString> {
        text.split(' ').map(OsString::from).collect()
    }

    fn disk(socket: &str) -> Attachment {
        Attachment { socket: socket.into(), queues: 1, image: ("/nonexistent".into(), false) }
    }

    fn added(text: &str) -> Result<String, String> {
        let disks = [disk("/run/a,b/x.sock"), disk("/run/y.sock")];
        let words = arguments(&list(text), Path::new("/shm/ram"), &disks)?;
        Ok(words.iter().map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" "))
    }

    #[test]
    fn memory_and_disks_are_added() {
        let words = added("qemu-system-x86_64 -M q35 -m 64").expect("fine");
        for part in [
            "qemu-system-x86_64 -M q35 -m 64 -object",
            "memory-backend-file,id=amberlog-memory,size=67108864,share=on,mem-path=/shm/ram",
            "-machine memory-backend=amberlog-memory",
            "socket,id=amberlog-disk0,path=/run/a,,b/x.sock",
            "vhost-user-blk-pci,id=amberlog1,chardev=amberlog-disk1,num-queues=1",
        ] {
            assert!(words.contains(part), "{part} is not in {words}");
        }
        let theirs = added("q -object memory-backend-memfd,id=m,size=1G -machine memory-backend=m").expect("shared");
        assert!(!theirs.contains("amberlog-memory"), "{theirs}");
        assert!(added("q -object memory-backend-ram,id=m,size=1G -machine memory-backend=m").is_err());
    }

    #[test]
    fn machines_have_disks_of_their_kind_or_none() {
        for machine in ["q35", "pc", "microvm,pcie=on", "virt"] {
            assert!(added(&format!("q -M {machine}")).expect("fine").contains("vhost-user-blk-pci,"), "{machine}");
        }
        for machine in ["microvm", "microvm,pcie=off", "q35 -machine microvm"] {
            assert!(added(&format!("q -M {machine}")).expect("fine").contains("vhost-user-blk,"), "{machine}");
        }
        for machine in ["isapc", "none"] {
            assert!(added(&format!("q -M {machine}")).expect_err("no bus").contains(machine));
        }
    }

    #[test]
    fn disks_come_before_the_users_own_unless_these_have_addresses() {
        let position = |text: &str| {
            let words = added(text).expect("fine");
            let (ours, theirs) =
                (words.find("vhost-user-blk-pci").expect("ours"), words.find("theirs").expect("theirs"));
            ours < theirs
        };
        assert!(position("qemu-system-x86_64 -device virtio-blk-pci,drive=theirs"));
        assert!(position(r#"nice qemu-system-x86_64 -m 64 -device {"driver":"virtio-blk-pci","drive":"theirs"}"#));
        assert!(!position("qemu-system-x86_64 -device virtio-blk-pci,drive=theirs,addr=5"));
        assert!(!position("qemu-system-x86_64 -device virtio-blk-pci,drive=theirs -device e1000,addr=3"));
        assert!(!position("qemu-system-x86_64 -device virtio-net-pci,id=theirs"));
        let words = added("nice qemu-system-x86_64 -device virtio-blk-pci,drive=d").expect("fine");
        assert!(words.starts_with("nice qemu-system-x86_64 -chardev socket,id=amberlog-disk0"), "{words}");
    }

    #[test]
    fn what_contradicts_the_promise_is_refused_with_a_sentence() {
        for (text, word) in [
            ("q -daemonize", "-daemonize"),
            ("q --snapshot", "-snapshot"),
            ("q -incoming defer", "-incoming"),
            ("q -loadvm before", "-loadvm"),
            ("q -readconfig vm.cfg", "-readconfig"),
            ("q -set drive.d.snapshot=on", "-set drive.d.snapshot=on"),
            ("q -set machine.m.memory-backend=x", "-set machine"),
            ("q -set device.amberlog0.num-queues=4", "queues=N"),
            ("q -global vhost-user-blk-pci.num-queues=4", "queues=N"),
            ("q -global driver=vhost-user-blk,property=num-queues,value=4", "queues=N"),
            ("q -object memory-backend-memfd,id=amberlog-memory", "amberlog's own"),
            (r#"q -device {"driver":"virtio-net-pci","id":"amberlog0"}"#, "amberlog's own"),
        ] {
            let error = added(text).expect_err(text);
            assert!(error.contains(word), "{text}: {error}");
        }
        for text in [
            "q -name -snapshot",
            "q -append -loadvm",
            "q -set device.net0.mac=52:54:00:00:00:01",
            "q -global virtio-net-pci.romfile=",
            "q -mem-prealloc -nodefaults -no-user-config -only-migratable -S",
            "q -drive file=/other.img,if=virtio,snapshot=on",
        ] {
            assert!(added(text).is_ok(), "{text}: {:?}", added(text));
        }
    }

    #[test]
    fn a_disk_of_ours_is_not_opened_by_the_vmm_as_well() {
        let image = tempfile::NamedTempFile::new().expect("a file");
        let shown = image.path().to_str().expect("a plain name");
        let mut disks = [disk("/run/x.sock")];
        disks[0].image.0 = image.path().to_owned();
        for text in [
            format!("q -drive if=virtio,file={shown},snapshot=on"),
            format!("q -drive file.driver=file,file.filename={shown}"),
            format!(
                r#"q -blockdev {{"driver":"raw","node-name":"n","file":{{"driver":"file","filename":"{shown}"}}}}"#
            ),
            format!("q -blockdev file,node-name=n,filename={shown}"),
            format!("q -hda {shown}"),
            format!("q {shown}"),
            format!("q -drive file=file:{shown}"),
            format!(
                r#"q -drive file=json:{{"driver":"raw",,"file":{{"driver":"file",,"filename":"{shown}",,"locking":"off"}}}},if=virtio"#
            ),
            format!("q -drive file=raw:file:{shown}"),
            format!("q -object memory-backend-file,id=m,mem-path={shown},size=1M,share=on -device nvdimm,memdev=m"),
            format!("q -D {shown}"),
            format!("q -serial file:{shown}"),
            format!("q -chardev file,id=c,path={shown}"),
        ] {
            let error = arguments(&list(&text), Path::new("/ram"), &disks).expect_err(&text);
            assert!(error.contains("twice"), "{text}: {error}");
        }
        disks[0].image.1 = true;
        assert!(arguments(&list(&format!("q -hda {shown}")), Path::new("/ram"), &disks).is_ok(), "both only read");
    }

    #[test]
    fn our_own_disks_do_not_count_as_strangers() {
        let run = Some(Path::new("/run/amberlog/db"));
        let ours = list(
            "q -chardev socket,id=c1,path=/run/amberlog/db/root.sock -device vhost-user-blk-pci,id=d,chardev=c1,num-queues=1",
        );
        assert_eq!(bypasses_protection(&ours, run), None);
        assert!(bypasses_protection(&ours, Some(Path::new("/run/amberlog/web"))).is_some());
        let json = list(
            r#"q -chardev {"backend":"socket","id":"c1","path":"/run/amberlog/db/a.sock"} -device {"driver":"vhost-user-blk-pci","chardev":"c1","bus":"b"}"#,
        );
        assert_eq!(bypasses_protection(&json, run), None);
        let other = list(
            "q -chardev socket,id=c1,path=/run/amberlog/db/a.sock -chardev socket,id=c11,path=/x -device vhost-user-blk-pci,chardev=c11",
        );
        assert!(bypasses_protection(&other, run).is_some());
        let net = list("q -chardev socket,id=c1,path=/run/amberlog/db/a.sock -device vhost-user-net,chardev=c1");
        assert!(bypasses_protection(&net, run).is_some());
    }

    #[test]
    fn what_bypasses_protection_is_found() {
        for text in [
            "q -device virtio-balloon-pci",
            r#"q -device {"driver":"virtio-balloon-pci","id":"b"}"#,
            "q -device virtio-mem-pci,memdev=m",
            "q -device vfio-pci,host=01:00.0",
            "q -netdev vhost-user,id=n,chardev=c",
            "q -netdev vhost-vdpa,vhostdev=/dev/vhost-vdpa-0,id=n",
        ] {
            assert!(bypasses_protection(&list(text), None).is_some(), "{text}");
        }
        for text in ["q -device virtio-net-pci", "q -name balloon", "q -append vfio-pci.ids=1:2 -snapshot"] {
            assert_eq!(bypasses_protection(&list(text), None), None, "{text}");
        }
    }
}
