//! libvirt's hook: whether a domain could reach its disks, looked at before QEMU is started.
//!
//! A QEMU that is to connect again (`reconnect`) waits for ever for a socket that it may not open, and `virsh start` with it. So what
//! would keep it from its disks is looked for here, with the eyes of QEMU's user, and said. Must never: ask libvirt anything, which
//! waits for this; touch a disk's socket, where a connection counts as a VMM. Failure story: libvirt does not start the domain, and
//! shows the sentence; a domain without amberlog's disks is no business of this.

use super::apparmor;
use super::domain::socket;
use super::xml::{self, Element};
use crate::client::{CONTROL, Daemon, default_run};
use anyhow::{Context, ensure};
use clap::Args;
use serde_json::{Value, json};
use std::ffi::CString;
use std::io::Read;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How long a VM may take until it waits for its VMM, and how long it is let alone between two looks.
const PATIENCE: Duration = Duration::from_secs(30);
const PAUSE: Duration = Duration::from_millis(200);
/// What values in qemu.conf stand between.
const QUOTE: char = '\u{22}';
/// Bytes of a domain's XML.
const DOCUMENT_BYTES_MAX: u64 = 16 << 20;

/// Arguments of `amberlog libvirt hook`, as libvirt gives them to its hooks (libvirt.org/hooks.html).
#[derive(Args, Debug)]
pub struct HookArgs {
    /// The domain.
    domain: String,
    /// What happens to it.
    operation: String,
    /// How far that is.
    sub_operation: String,
    /// Nothing of use.
    extra: Option<String>,
    /// libvirt's configuration of QEMU: who it runs as.
    #[arg(long, value_name = "FILE", default_value = "/etc/libvirt/qemu.conf")]
    qemu_conf: PathBuf,
}

/// Who will open something.
struct User {
    name: String,
    uid: u32,
    gids: Vec<u32>,
}

/// Runs the command.
///
/// # Errors
/// Why the domain could not reach its disks.
pub fn run(args: &HookArgs) -> anyhow::Result<()> {
    if (args.operation.as_str(), args.sub_operation.as_str()) != ("prepare", "begin") {
        return Ok(());
    }
    let mut document = String::new();
    std::io::stdin().take(DOCUMENT_BYTES_MAX).read_to_string(&mut document).context("reading the domain's XML")?;
    let domain = xml::parse(&document).map_err(|sentence| anyhow::anyhow!("{sentence}"))?;
    check(
        &args.domain,
        &domain,
        || user(&args.qemu_conf, &domain),
        |files| {
            let conf = std::fs::read_to_string(&args.qemu_conf).unwrap_or_default();
            confined(Path::new("/"), &args.domain, &domain, &conf, files)
        },
    )
}

/// Whether AppArmor lets the domain's QEMU use these files, on the machine whose root directory is `root`.
fn confined(root: &Path, name: &str, domain: &Element, conf: &str, files: &[(PathBuf, &str)]) -> anyhow::Result<()> {
    let is_confined = apparmor::confines(root, domain, conf, std::process::id());
    let refused = is_confined.then(|| apparmor::refused(root, domain, files)).flatten();
    ensure!(
        refused.is_none(),
        "AppArmor confines the QEMU of the domain {name}, and no rule lets it use {}: cat /usr/share/doc/amberlog/apparmor/libvirt-qemu >> \
         /{}, and start the domain again; it would wait for its disks for ever",
        refused.unwrap_or(root).display(),
        apparmor::LOCAL
    );
    Ok(())
}

/// Looks at all disks of a domain that are amberlog's. `confined` says what AppArmor keeps from it, of what it has to use.
fn check(
    name: &str,
    domain: &Element,
    user: impl Fn() -> anyhow::Result<User>,
    confined: impl Fn(&[(PathBuf, &str)]) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let environment = |variable: &str| {
        let line = domain.find("qemu:commandline")?;
        let named = |element: &&Element| element.name == "qemu:env" && element.get("name").as_deref() == Some(variable);
        line.elements().find(named)?.get("value")
    };
    let shim_socket = environment(guest_memory::SHIM_SOCKET_VARIABLE).map(PathBuf::from);
    // RUN/VM/DISK.sock.
    let is_ours = |socket: &PathBuf| {
        let directory = socket.parent();
        let run = directory.and_then(Path::parent);
        directory.is_some() && directory == shim_socket.as_deref().and_then(Path::parent)
            || run.is_some_and(|run| run == default_run() || run.join(CONTROL).exists())
    };
    let disks = domain.find("devices").into_iter().flat_map(Element::elements).filter(|device| device.name == "disk");
    let sockets: Vec<PathBuf> = disks.filter_map(socket).filter(is_ours).collect();
    let Some(first) = sockets.first() else { return Ok(()) };
    let directory = first.parent().context("a socket is in a directory")?;
    let run = directory.parent().context("a VM's directory is in the daemon's")?;
    let vm = directory.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let others = sockets.iter().find(|socket| socket.parent() != Some(directory));
    ensure!(
        others.is_none(),
        "the domain {name} has disks of two VMs of amberlog, {} and {}: a VM is one process; name them in one [[vm]] of the configuration",
        first.display(),
        others.map(|socket| socket.display().to_string()).unwrap_or_default()
    );

    let daemon = Daemon { run: run.to_owned() };
    let ask = || {
        let mut status = daemon
            .ask_quickly(&json!({"command": "status", "vm": vm}))
            .with_context(|| format!("the domain {name} has its disks from amberlog, which does not serve them"))?;
        Ok(status["vms"][0].take())
    };
    let began = Instant::now();
    let has_time = || {
        std::thread::sleep(PAUSE);
        began.elapsed() < PATIENCE
    };
    until_it_waits(&vm, ask, has_time)?;
    let user = user()?;
    for socket in &sockets {
        let is_socket = std::fs::symlink_metadata(socket).is_ok_and(|metadata| metadata.file_type().is_socket());
        ensure!(
            is_socket,
            "vm {vm} has no disk {}: 'amberlog libvirt define --domain {name}' makes the domain's disks those of the configuration",
            socket.display()
        );
        reachable(socket, &user, 0o6, &vm)?;
    }
    // By the names that the kernel knows them by.
    let resolved = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let mut files: Vec<(PathBuf, &str)> = sockets.iter().map(|socket| (resolved(socket), "rw")).collect();
    if let Some(socket) = &shim_socket {
        reachable(socket, &user, 0o6, &vm)?;
        files.push((resolved(socket), "rw"));
        for library in
            environment("LD_PRELOAD").iter().flat_map(|all| all.split(':')).filter(|path| path.contains("amberlog"))
        {
            reachable(Path::new(library), &user, 0o4, &vm)?;
            files.push((resolved(Path::new(library)), "mr"));
        }
    }
    files.extend(memory_directory(domain).map(|area| (area.join("ram"), "rw")));
    confined(&files)?;
    let is_shared =
        domain.find("memoryBacking").and_then(|backing| backing.find("access")).and_then(|access| access.get("mode"));
    ensure!(
        is_shared.as_deref() == Some("shared"),
        "the domain {name} does not share its memory, and QEMU could hand nothing over: <memoryBacking><source type='memfd'/>\
         <access mode='shared'/></memoryBacking>, or 'amberlog libvirt define --domain {name}'"
    );
    // Made by root's hands or not: what the file system has is there to be seen.
    if let Some(area) = memory_directory(domain)
        && let Ok(needed) = super::domain::memory_bytes(domain)
    {
        let free = free_bytes(&area).with_context(|| format!("asking {} for room", area.display()))?;
        ensure!(
            needed <= free,
            "the memory of the domain {name} ({} MiB) does not fit into {}, which has {} MiB that no other guest may still touch; a guest that \
             touches more than there is is ended by the kernel: enlarge that tmpfs (mount -o remount,size=...), or give the domain less",
            needed >> 20,
            area.display(),
            free >> 20
        );
    }
    Ok(())
}

/// The VM's directory, where the domain's memory is in a file there.
fn memory_directory(domain: &Element) -> Option<PathBuf> {
    let line = domain.find("qemu:commandline")?;
    let words = line.elements().filter(|element| element.name == "qemu:arg").filter_map(|element| element.get("value"));
    let path = words.filter_map(|word| Some(word.split_once(",mem-path=")?.1.replace(",,", ","))).next()?;
    Path::new(&path).parent()?.canonicalize().ok()
}

/// Bytes that a file system has for one more guest, without what the guests whose memory lies beside this directory have not touched yet.
fn free_bytes(area: &Path) -> anyhow::Result<u64> {
    let status = rustix::fs::statvfs(area)?;
    if status.f_blocks == 0 {
        // A tmpfs without a bound.
        return Ok(u64::MAX);
    }
    let free = status.f_bavail.saturating_mul(status.f_frsize);
    let beside = area.parent().into_iter().flat_map(std::fs::read_dir).flatten().flatten();
    // What a VMM that has ended left in its own directory is made anew, or used again.
    let beside = beside.filter(|directory| directory.path() != area);
    let files = beside.flat_map(|directory| std::fs::read_dir(directory.path())).flatten().flatten();
    let untouched = files
        .filter(|file| file.file_name().to_string_lossy().starts_with("ram"))
        .filter_map(|file| file.metadata().ok())
        .map(|file| file.len().saturating_sub(file.blocks() * 512));
    Ok(free.saturating_sub(untouched.sum()))
}

/// Looks at a VM's entry in `status` until it waits for its VMM: after a boot, or the end of the VMM before, that takes a moment, and
/// libvirt does not try again to start a domain by itself. `has_time` makes a pause, and says whether there is to be another look.
fn until_it_waits(
    vm: &str,
    mut ask: impl FnMut() -> anyhow::Result<Value>,
    mut has_time: impl FnMut() -> bool,
) -> anyhow::Result<()> {
    loop {
        let entry = ask()?;
        let state = entry["state"].as_str().unwrap_or_default();
        if state == "waiting" {
            return Ok(());
        }
        // A VMM that was ended a moment ago is that of a domain that is started again.
        let is_left = state == "running" && entry["vmm_has_ended"] == true;
        let passes = is_left || matches!(state, "preparing" | "recovering" | "restarting");
        ensure!(
            passes && has_time(),
            "amberlog's vm {vm} is {}, and no VMM can have its disks now{}",
            entry["state_text"].as_str().unwrap_or(state),
            if passes { "; try again in a moment" } else { "" }
        );
    }
}

/// Whom QEMU runs as: the domain's own label, libvirt's configuration, or Debian's default.
fn user(qemu_conf: &Path, domain: &Element) -> anyhow::Result<User> {
    let of_domain = domain.elements().find_map(|element| {
        (element.name == "seclabel" && element.get("model").as_deref() == Some("dac"))
            .then(|| element.find("label").map(Element::text))
            .flatten()
    });
    let of_domain = of_domain
        .and_then(|label| Some(label.trim_start_matches('+').split(':').next()?.trim_start_matches('+').to_owned()));
    let text = std::fs::read_to_string(qemu_conf).unwrap_or_default();
    let of_file = text.lines().find_map(|line| {
        let (key, value) = line.split_once('=')?;
        (key.trim() == "user").then(|| value.trim().trim_matches(QUOTE).trim_start_matches('+').to_owned())
    });
    let name = of_domain.or(of_file).unwrap_or_else(|| "libvirt-qemu".to_owned());
    let user = match name.parse::<u32>() {
        Ok(uid) => nix::unistd::User::from_uid(uid.into())?,
        Err(_) => nix::unistd::User::from_name(&name)?,
    };
    let user = user.with_context(|| format!("QEMU is to run as {name}, and there is no such user"))?;
    let gids = nix::unistd::getgrouplist(&CString::new(user.name.clone())?, user.gid)?;
    Ok(User { name: user.name, uid: user.uid.as_raw(), gids: gids.into_iter().map(nix::unistd::Gid::as_raw).collect() })
}

impl User {
    /// Whether it may do so (bits of rwx) with a file of this owner and mode.
    fn may(&self, metadata: &std::fs::Metadata, wanted: u32) -> bool {
        let mode = metadata.mode();
        let bits = if metadata.uid() == self.uid {
            mode >> 6
        } else if self.gids.contains(&metadata.gid()) {
            mode >> 3
        } else {
            mode
        };
        self.uid == 0 || bits & wanted == wanted
    }
}

/// Whether the user can get there and do what is wanted.
fn reachable(path: &Path, user: &User, wanted: u32, vm: &str) -> anyhow::Result<()> {
    let sentence = |at: &Path| {
        format!(
            "QEMU runs as {}, which may not {} {}: let it, in amberlog's configuration ([sockets] with owner = \"{}\", or a group that it is \
             in), and reload; vm {vm} would wait for its disks for ever",
            user.name,
            if at == path { "use" } else { "pass through" },
            at.display(),
            user.name
        )
    };
    for above in path.ancestors().skip(1).collect::<Vec<_>>().into_iter().rev() {
        let metadata = std::fs::metadata(above).with_context(|| format!("looking at {}", above.display()))?;
        ensure!(user.may(&metadata, 0o1), "{}", sentence(above));
    }
    let metadata = std::fs::metadata(path).with_context(|| format!("looking at {}", path.display()))?;
    ensure!(user.may(&metadata, wanted), "{}", sentence(path));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn somebody(uid: u32, gids: &[u32]) -> User {
        User { name: "somebody".to_owned(), uid, gids: gids.to_vec() }
    }

    #[test]
    fn a_user_is_looked_at_as_the_kernel_does() {
        let directory = tempfile::tempdir().expect("a directory");
        let file = directory.path().join("a");
        std::fs::write(&file, "").expect("written");
        let own = std::fs::metadata(&file).expect("there");
        let set =
            |path: &Path, mode| std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).expect("set");
        set(&file, 0o660);
        set(directory.path(), 0o710);
        let (uid, gid) = (own.uid(), own.gid());
        let stranger = somebody(uid + 1, &[gid + 1]);
        let member = somebody(uid + 1, &[gid + 1, gid]);
        reachable(&file, &member, 0o6, "x").expect("in the group");
        let error = reachable(&file, &stranger, 0o6, "x").expect_err("a stranger");
        assert!(error.to_string().contains("may not pass through"), "{error}");
        set(directory.path(), 0o711);
        let error = reachable(&file, &stranger, 0o6, "x").expect_err("a stranger");
        assert!(error.to_string().contains("may not use"), "{error}");
        // The owner's bits count for the owner, even if the group's are more.
        set(&file, 0o060);
        assert!(somebody(uid, &[gid]).may(&std::fs::metadata(&file).expect("there"), 0o6) == (uid == 0));
    }

    #[test]
    fn a_domain_without_our_disks_is_no_business_of_ours() {
        for document in [
            "<domain/>",
            "<domain><devices><disk type='file'><source file='/a'/></disk></devices></domain>",
            "<domain><devices><disk type='vhostuser'><source type='unix' path='/nonexistent/spdk/vhost.0'/></disk></devices></domain>",
        ] {
            let domain = xml::parse(document).expect("it is XML");
            let nobody = |_: &[(PathBuf, &str)]| unreachable!("nothing is looked at");
            check("x", &domain, || unreachable!("nobody is looked up"), nobody).expect("nothing to say");
        }
        let ours = "<domain xmlns:qemu='x'><devices><disk type='vhostuser'><source path='/nonexistent/run/web/a.sock'/></disk></devices>\
                    <qemu:commandline><qemu:env name='AMBERLOG_SHIM_SOCKET' value='/nonexistent/run/web/shim.sock'/></qemu:commandline></domain>";
        let error = check("web", &xml::parse(ours).expect("it is XML"), || Ok(somebody(0, &[])), |_| Ok(()))
            .expect_err("no daemon");
        assert!(format!("{error:#}").contains("no daemon answers"), "{error:#}");
    }

    #[test]
    fn a_qemu_that_apparmor_keeps_from_its_disks_is_not_started() {
        let root = tempfile::tempdir().expect("a directory");
        let write = |name: &str, text: &str| {
            let path = root.path().join(name);
            std::fs::create_dir_all(path.parent().expect("a directory")).expect("made");
            std::fs::write(path, text).expect("written");
        };
        let domain = xml::parse("<domain/>").expect("it is XML");
        let files =
            [(PathBuf::from("/run/amberlog/web/a.sock"), "rw"), (PathBuf::from("/dev/shm/amberlog-9/web-1/ram"), "rw")];
        let asked = |conf: &str| confined(root.path(), "web", &domain, conf, &files).map_err(|error| error.to_string());
        assert_eq!(asked(""), Ok(()), "there is no AppArmor");
        write("sys/kernel/security/apparmor/profiles", "libvirtd (enforce)\n");
        let sentence = asked("").expect_err("no rule");
        assert!(sentence.contains("no rule lets it use /run/amberlog/web/a.sock: cat /usr/share"), "{sentence}");
        assert!(sentence.contains(" >> /etc/apparmor.d/local/abstractions/libvirt-qemu,"), "{sentence}");
        assert_eq!(asked("security_driver = \"none\"\n"), Ok(()));
        write(apparmor::LOCAL, "/run/amberlog/*/*.sock rw,\n");
        assert!(asked("").expect_err("no rule").contains("no rule lets it use /dev/shm/amberlog-9/web-1/ram"));
        write(apparmor::LOCAL, include_str!("../../../../packaging/apparmor/libvirt-qemu"));
        assert_eq!(asked(""), Ok(()));
    }

    #[test]
    fn memory_that_others_have_not_touched_is_not_free() {
        let shm = tempfile::tempdir_in("/dev/shm").expect("tmpfs");
        let area = shm.path().join("web-1");
        std::fs::create_dir(&area).expect("made");
        let all = free_bytes(&area).expect("asked");
        let other = shm.path().join("db-1");
        std::fs::create_dir(&other).expect("made");
        std::fs::File::create(other.join("ram.taken")).and_then(|file| file.set_len(64 << 30)).expect("made");
        assert!(free_bytes(&area).expect("asked") <= all.saturating_sub(63 << 30));
        let words = format!("memory-backend-file,id=amberlog-memory,size=1,share=on,mem-path={}/ram", area.display());
        let text = format!(
            "<domain xmlns:qemu='x'><qemu:commandline><qemu:arg value='-object'/><qemu:arg value='{words}'/></qemu:commandline></domain>"
        );
        assert_eq!(memory_directory(&xml::parse(&text).expect("it is XML")), area.canonicalize().ok());
    }

    #[test]
    fn a_vm_that_will_wait_in_a_moment_is_waited_for() {
        let look = |states: &[&str], pauses: usize| {
            let (mut asked, mut paused) = (0, 0);
            let ask = || {
                asked += 1;
                Ok(json!({"state": states[asked - 1], "state_text": format!("{}, it says", states[asked - 1])}))
            };
            let has_time = || {
                paused += 1;
                paused <= pauses
            };
            until_it_waits("db", ask, has_time).map_err(|error| error.to_string())
        };
        assert_eq!(look(&["waiting"], 0), Ok(()));
        assert_eq!(look(&["preparing", "recovering", "restarting", "waiting"], 3), Ok(()));
        // The VMM that it runs for has gone.
        let mut states = ["running", "running", "recovering", "waiting"].iter();
        let mut pauses = 0;
        let ask =
            || Ok(json!({"state": states.next().expect("no other look"), "state_text": "x", "vmm_has_ended": true}));
        let has_time = || {
            pauses += 1;
            true
        };
        until_it_waits("db", ask, has_time).expect("it waits");
        assert_eq!((pauses, states.len()), (3, 0));
        let lives = || Ok(json!({"state": "running", "state_text": "running", "vmm_has_ended": false}));
        until_it_waits("db", lives, || unreachable!("it is not waited for")).expect_err("somebody has them");
        // Its time is over, or time does not help.
        for (states, sentence) in [
            (
                &["preparing", "preparing"][..],
                "preparing, it says, and no VMM can have its disks now; try again in a moment",
            ),
            (&["running"], "running, it says, and no VMM can have its disks now"),
            (&["preparing", "failed"], "failed, it says, and no VMM can have its disks now"),
            (&["held"], "held, it says, and no VMM can have its disks now"),
        ] {
            assert_eq!(look(states, 1), Err(format!("amberlog's vm db is {sentence}")));
        }
        let error = until_it_waits("db", || anyhow::bail!("no daemon"), || unreachable!("it is not asked again"));
        assert_eq!(error.expect_err("nobody answers").to_string(), "no daemon");
    }

    #[test]
    fn libvirt_says_whom_qemu_runs_as() {
        let directory = tempfile::tempdir().expect("a directory");
        let conf = directory.path().join("qemu.conf");
        std::fs::write(&conf, "#user = \"nobody\"\nuser = \"root\"\n").expect("written");
        let plain = xml::parse("<domain/>").expect("it is XML");
        assert_eq!(user(&conf, &plain).expect("root").uid, 0);
        let own = xml::parse("<domain><seclabel model='dac'><label>+65534:+65534</label></seclabel></domain>")
            .expect("it is XML");
        assert_eq!(user(&conf, &own).expect("nobody").uid, 65534);
    }
}
