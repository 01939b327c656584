//! Two libvirts move a domain whose disks amberlog serves, as docs/migration.md says, save it and restore it; and do not where it was not asked for.
//!
//! Two hosts are two libvirtds and two daemons of amberlog's, each pair in namespaces of its own (mounts, network, name). Nothing of the machine's
//! own libvirt is used or changed. Without libvirtd, virsh and root they are skipped, and say so; `make test` does not install libvirt.

use crate::migration::{DIRECTORY, STREAM, images, layout_of, script_of};
use crate::serve::Daemon;
use crate::support::*;
use guest_kit::image::FileSystem;
use guest_kit::{Accelerator, Acknowledged, Guest, GuestSpec, Reported, judge, program};
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

const QUEUES: u32 = 2;
const REFUSAL: &str = "Migration disabled: vhost-user backend lacks VHOST_USER_PROTOCOL_F_LOG_SHMFD feature";

/// What a host has of its own, and who keeps it: the words are its directory, where amberlog's sockets are for all in it, and its name.
const INSIDE: &str = r#"
set -e
hostname "$3"
mount -t tmpfs tmpfs /dev/shm
mkdir -m 700 /dev/shm/area
mount -t tmpfs tmpfs /run
mkdir -p /run/libvirt /run/lock
mount --bind "$1/libvirt" /run/libvirt
mount --bind "$1/run" "$2"
for place in etc/libvirt var/lib/libvirt var/cache/libvirt var/log/libvirt; do
    mkdir -p "$1/$place"
    mount --bind "$1/$place" "/$place"
done
echo ready
exec sleep 10000
"#;

/// libvirtd, amberlog, and the namespaces that they are in.
struct Host {
    directory: PathBuf,
    /// amberlog's directory, as it is for all in the namespaces.
    run: PathBuf,
    daemon: Daemon,
    libvirtd: Child,
    namespace: Child,
}

impl Drop for Host {
    fn drop(&mut self) {
        let qemu = std::fs::read_to_string(self.directory.join("libvirt/qemu/v.pid")).ok();
        if let Some(pid) = qemu.and_then(|text| rustix::process::Pid::from_raw(text.trim().parse().ok()?)) {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
        for process in [&mut self.libvirtd, &mut self.namespace] {
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

impl Host {
    fn new(bench: &Bench, name: &str, uuid: u32, images: &[PathBuf], is_experimental: bool) -> Self {
        let (directory, run) = (bench.path(name), bench.path("run"));
        for place in ["libvirt", "run", "etc/libvirt"] {
            std::fs::create_dir_all(directory.join(place)).unwrap();
        }
        std::fs::create_dir_all(&run).unwrap();
        let write = |file: &str, text: &str| std::fs::write(directory.join(file), text).unwrap();
        write(
            "etc/libvirt/qemu.conf",
            "user = \"root\"\ngroup = \"root\"\nsecurity_driver = \"none\"\nnamespaces = []\ncgroup_controllers = []\n\
             stdio_handler = \"file\"\n",
        );
        // libvirt does not move a domain to the host on which it is.
        write(
            "etc/libvirt/libvirtd.conf",
            &format!(
                "auth_unix_rw = \"none\"\nauth_unix_ro = \"none\"\nhost_uuid = \"{uuid:08}-1111-4222-8333-444444444444\"\n"
            ),
        );
        let disks: Vec<String> = images.iter().map(|image| format!("{},queues={QUEUES}", image.display())).collect();
        write(
            "amberlog.toml",
            &format!(
                "shm = \"/dev/shm/area\"\nrun = {run:?}\n[migration]\nexperimental = {is_experimental}\n[[vm]]\nname = \"v\"\n\
                 disks = {disks:?}\n"
            ),
        );
        let mut namespace = Command::new("unshare")
            .args(["--mount", "--net", "--uts", "--propagation", "private", "sh", "-c", INSIDE, "sh"])
            .args([directory.as_os_str(), run.as_os_str(), name.as_ref()])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(namespace.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n");
        let mut command = inside(&namespace);
        command.arg(amberlog());
        let log = directory.join("amberlog.log");
        let daemon = Daemon::start_at(command, &directory.join("run"), &log, &directory.join("amberlog.toml"));
        let said = std::fs::File::create(directory.join("libvirtd.log")).unwrap();
        let mut command = inside(&namespace);
        command.arg(program::find_program("libvirtd").unwrap()).stdin(Stdio::null());
        let libvirtd = command.stdout(said.try_clone().unwrap()).stderr(said).spawn().unwrap();
        let host = Self { directory, run, daemon, libvirtd, namespace };
        host.daemon.wait_state("v", "waiting");
        let deadline = Instant::now() + LIMIT;
        while !host.virsh(&["uri"]).status.success() {
            assert!(Instant::now() < deadline, "{}", host.log());
            std::thread::sleep(Duration::from_millis(100));
        }
        host
    }

    fn log(&self) -> String {
        let libvirtd = std::fs::read_to_string(self.directory.join("libvirtd.log")).unwrap_or_default();
        let qemu = std::fs::read_to_string(self.directory.join("var/log/libvirt/qemu/v.log")).unwrap_or_default();
        [self.daemon.log(), libvirtd, qemu].join("---\n")
    }

    fn virsh(&self, words: &[&str]) -> Output {
        let mut command = inside(&self.namespace);
        command.args(["env", "LC_ALL=C", "timeout", "120", "virsh", "-c", "qemu:///system"]).args(words);
        command.stdin(Stdio::null()).output().unwrap()
    }

    #[track_caller]
    fn good(&self, words: &[&str]) -> String {
        let output = self.virsh(words);
        assert!(output.status.success(), "{words:?}: {}\n{}", text(&output.stderr), self.log());
        text(&output.stdout)
    }

    fn state(&self) -> String {
        text(&self.virsh(&["domstate", "v"]).stdout).trim().to_owned()
    }

    /// The words of `virsh` that move the domain to another one.
    fn move_to(&self, to: &Host, bench: &Bench) -> Output {
        let uri = format!("qemu+unix:///system?socket={}", to.directory.join("libvirt/libvirt-sock").display());
        let way = format!("unix://{}", bench.path("way").display());
        self.virsh(&["migrate", "--live", "--persistent", "v", &uri, "--migrateuri", &way])
    }
}

/// What is called in a host.
fn inside(namespace: &Child) -> Command {
    let mut command = Command::new("nsenter");
    command.args(["-t", &namespace.id().to_string(), "-m", "-n", "-u", "--"]);
    command
}

fn can_be_tried() -> bool {
    let is_there = ["libvirtd", "virsh"].iter().all(|name| program::find_program(name).is_ok());
    let can = is_there && rustix::process::geteuid().is_root();
    if !can {
        println!("skipped: it takes libvirtd, virsh, and root");
    }
    can
}

/// A domain with the kit's guest, as `amberlog libvirt` makes it.
fn domain(bench: &Bench, host: &Host, script: &str) -> PathBuf {
    // What the kit would have started; nothing is.
    let keep = "shift 2; while [ $# -gt 1 ]; do
        case $1 in
            -kernel | -initrd) cp \"$2\" \"$0$1\" ;;
            -append | -cpu) printf %s \"$2\" > \"$0$1\" ;;
        esac
        shift
    done; : > \"$0-all\"";
    let kept = |word: &str| PathBuf::from(format!("{}{word}", bench.path("kit").display()));
    let mut spec = GuestSpec::new("kept", script).wrapper(["sh".into(), "-c".into(), keep.into(), bench.path("kit")]);
    (spec.accelerator, spec.cpus) = (Some(Accelerator::Tcg), QUEUES);
    spec.kernel_arguments = "no_timer_check".to_owned();
    let mut guest = Guest::launch(spec).unwrap();
    let deadline = Instant::now() + LIMIT;
    while !kept("-all").exists() {
        assert!(Instant::now() < deadline, "the kit starts nothing");
        std::thread::sleep(Duration::from_millis(20));
    }
    guest.forgive();
    drop(guest);
    let read = |word: &str| std::fs::read_to_string(kept(word)).unwrap();
    let cpu = read("-cpu");
    let mut words = cpu.split(',');
    let model = words.next().unwrap();
    let features: String = words
        .map(|word| {
            let policy = if word.starts_with('+') { "require" } else { "disable" };
            format!("<feature policy='{policy}' name='{}'/>", &word[1..])
        })
        .collect();
    let serial = |file: &str, port: u32| {
        let path = bench.path(file);
        format!("<serial type='file'><source path='{}' append='on'/><target port='{port}'/></serial>", path.display())
    };
    let xml = format!(
        "<domain type='qemu'><name>v</name><memory unit='MiB'>256</memory><vcpu>{QUEUES}</vcpu>\
         <os><type arch='x86_64' machine='q35'>hvm</type><kernel>{}</kernel><initrd>{}</initrd><cmdline>{}</cmdline></os>\
         <features><acpi/></features>\
         <cpu mode='custom' match='exact' check='none'><model fallback='allow'>{model}</model>{features}</cpu>\
         <devices><emulator>{}</emulator>{}{}<memballoon model='none'/></devices></domain>",
        kept("-kernel").display(),
        kept("-initrd").display(),
        read("-append"),
        program::find_program("qemu-system-x86_64").unwrap().display(),
        serial("console", 0),
        serial("report", 1),
    );
    std::fs::write(bench.path("base.xml"), xml).unwrap();
    let mut command = inside(&host.namespace);
    command.arg(amberlog()).args(["libvirt", "v", "--add-disks", "--xml"]).arg(bench.path("base.xml"));
    let output = command.arg("--run").arg(&host.run).output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    std::fs::write(bench.path("v.xml"), &output.stdout).unwrap();
    bench.path("v.xml")
}

/// What the guest was told is durable.
fn acknowledged(bench: &Bench) -> Acknowledged {
    let all = std::fs::read_to_string(bench.path("report")).unwrap_or_default();
    let whole = all.rsplit_once('\n').map_or("", |(whole, _)| whole);
    let mut numbers = whole.lines().filter_map(|line| line.trim().strip_prefix("ack a ")?.parse::<u64>().ok());
    numbers.by_ref().fold(Acknowledged::default(), |before, number| Acknowledged {
        count: before.count + 1,
        last: before.last.max(Some(number)),
        ..before
    })
}

#[track_caller]
fn goes_on(bench: &Bench, host: &Host) {
    let before = acknowledged(bench).count;
    let deadline = Instant::now() + LIMIT;
    while acknowledged(bench).count < before + 20 {
        let console = || std::fs::read_to_string(bench.path("console")).unwrap_or_default();
        assert!(Instant::now() < deadline, "{}\n{}", console(), host.log());
        std::thread::sleep(Duration::from_millis(50));
        assert!(!console().contains("FAILED"), "{}", console());
    }
}

fn is_good(images: &[PathBuf], told: Acknowledged) {
    for image in images {
        judge::replay_with_e2fsck(&FileSystem::whole(image)).unwrap();
        assert_consistent(&FileSystem::whole(image));
    }
    let reported = Reported { acknowledged: [(STREAM.to_owned(), told)].into_iter().collect(), ..Reported::default() };
    assert_records(&FileSystem::whole(&images[0]), &DIRECTORY[4..], STREAM, &layout_of("retain"), &reported);
}

#[test]
fn virsh_moves_a_domain_there_and_back_and_saves_it() {
    if !can_be_tried() {
        return;
    }
    let version = program::qemu_version().unwrap();
    if version.is_none_or(|version| version < (10, 0)) {
        println!("skipped: QEMU {version:?} damages guests that it moves; 10.0 and newer do not");
        return;
    }
    let bench = Bench::new();
    let (_, images) = images(&bench);
    let hosts = [("one", 1), ("two", 2)].map(|(name, uuid)| Host::new(&bench, name, uuid, &images, true));
    let [one, two] = &hosts;
    let xml = domain(&bench, one, &script_of(&layout_of("retain"), QUEUES));
    one.good(&["define", &xml.display().to_string()]);
    one.good(&["start", "v"]);
    goes_on(&bench, one);
    assert_eq!(one.daemon.entry("v")["disks"][0]["placement_effective"], "retain", "{}", one.log());
    assert_eq!(journal_superblock(&images[0]).errno, -5, "held");
    for (from, to) in [(one, two), (two, one)] {
        let output = from.move_to(to, &bench);
        assert!(output.status.success(), "{}\n{}\n{}", text(&output.stderr), from.log(), to.log());
        assert_eq!((from.state(), to.state()), ("shut off".to_owned(), "running".to_owned()));
        goes_on(&bench, to);
        assert_eq!(to.daemon.entry("v")["migration"]["images"], "ours", "{}", to.log());
        assert_eq!(journal_superblock(&images[0]).errno, 0, "on storage");
        from.daemon.wait_state("v", "waiting");
    }
    one.good(&["managedsave", "v"]);
    one.daemon.wait_state("v", "waiting");
    assert_eq!(one.state(), "shut off");
    one.good(&["start", "v"]);
    goes_on(&bench, one);
    one.good(&["destroy", "v"]);
    one.daemon.wait_state("v", "waiting");
    let told = acknowledged(&bench);
    drop(hosts);
    is_good(&images, told);
}

#[test]
fn virsh_says_why_a_domain_is_neither_moved_nor_saved() {
    if !can_be_tried() {
        return;
    }
    let bench = Bench::new();
    let (_, images) = images(&bench);
    // They are locked where they are: the other host has some of its own.
    let others = vec![bench.path("f.img"), bench.path("g.img")];
    for (image, other) in images.iter().zip(&others) {
        std::fs::copy(image, other).unwrap();
    }
    let hosts = [Host::new(&bench, "one", 1, &images, false), Host::new(&bench, "two", 2, &others, false)];
    let [one, two] = &hosts;
    let xml = domain(&bench, one, &script_of(&layout_of("retain"), QUEUES));
    one.good(&["define", &xml.display().to_string()]);
    one.good(&["start", "v"]);
    goes_on(&bench, one);
    let saved = bench.path("saved").display().to_string();
    for output in [one.move_to(two, &bench), one.virsh(&["managedsave", "v"]), one.virsh(&["save", "v", &saved])] {
        assert!(!output.status.success(), "{}", text(&output.stdout));
        assert!(text(&output.stderr).contains(REFUSAL), "{}", text(&output.stderr));
        assert_eq!(one.state(), "running");
        goes_on(&bench, one);
    }
    one.good(&["destroy", "v"]);
    one.daemon.wait_state("v", "waiting");
    let told = acknowledged(&bench);
    drop(hosts);
    is_good(&images, told);
}
