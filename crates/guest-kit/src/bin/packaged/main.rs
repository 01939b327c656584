//! The packages on a Debian that runs: `packaged DEBIAN LOGS`, which `make packages-test` calls. It needs root.
//!
//! In the directory DEBIAN is one with QEMU, in which amberlog is not installed. Its systemd is started ([`machine`]); the packages in /root/old
//! there are installed, and the unit runs as it is: its user, its sandbox, its watchdog. QEMUs of another user, without a privilege, run guests on
//! its disks, which commit all the time. Under them the packages in /root/new are installed; workers and daemon are exchanged as docs/serve.md says;
//! the packages are not removed. Then the QEMUs are killed, what was acknowledged is looked for, and the packages are removed and purged.
//!
//! Failure story: what is not as promised is a sentence and exit code 1, with the end of the daemon's log.

#![forbid(unsafe_code)]

mod machine;

use guest_kit::evidence::{self, Order, RecordLayout};
use guest_kit::image::{ExtRecipe, FileSystem};
use guest_kit::{Acknowledged, AtEnd, Guest, GuestSpec, Platform, judge};
use machine::{Machine, read, sentence, write};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(180);
const PAUSE: Duration = Duration::from_millis(50);
/// Records that a guest has to be told are durable before it counts as going on.
const MORE: u64 = 30;
/// A load beside the records: new files of full blocks, one after the other and without end. Pages are protected for such blocks, and copied for
/// those that end in zeros; and they are written home again and again, so that many are protected at any moment only under a load that goes on.
const WHOLE: &str = "mkdir /mnt/whole
(file=0; while :; do
    file=$(((file + 1) % 8)); rm -f /mnt/whole/$file
    dd if=/dev/urandom of=/mnt/whole/$file bs=64k count=16 conv=fsync 2>/dev/null || fail dd
    sleep 0.5
done) &";
/// Blocks of 4 KiB that are held in protected pages before anything is exchanged.
const PROTECTED: u64 = 200;
/// Whom the QEMUs run as, and the groups that docs/libvirt.md has the administrator give such a user.
const USERS: &str = "u vmm - \"virtual machines\"\nm vmm amberlog\nm vmm kvm\n";

type Outcome<T> = Result<T, String>;

/// A VM of the configuration.
struct Vm {
    name: &'static str,
    options: &'static str,
    mode: &'static str,
    layout: RecordLayout,
    /// Its journal is found on storage, where its guest's own kernel replays it.
    is_replayed: bool,
}

fn vms() -> [Vm; 2] {
    let layout =
        |seed| RecordLayout { order: Order::Overwrite { slots: 30 }, files: 2, seed, ..RecordLayout::default() };
    [
        Vm { name: "db", options: ",hot-pages=foreseen", mode: "journal", layout: layout(1), is_replayed: false },
        Vm { name: "log", options: ",placement=storage", mode: "ordered", layout: layout(2), is_replayed: true },
    ]
}

fn main() -> ExitCode {
    let words: Vec<PathBuf> = std::env::args_os().skip(1).map(PathBuf::from).collect();
    let [debian, logs] = &words[..] else {
        eprintln!("packaged: say 'packaged DEBIAN LOGS'");
        return ExitCode::from(2);
    };
    match packaged(debian, logs) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("packaged: {error}");
            ExitCode::FAILURE
        }
    }
}

fn step(text: &str) {
    println!("packages: {text}");
}

fn packaged(debian: &Path, logs: &Path) -> Outcome<()> {
    let platform = Platform::native().map_err(sentence)?;
    let kernel = platform.kernel.image.parent().ok_or("the guests' kernel is in a directory")?;
    // QEMU's directories, where its user may make files.
    let runs = tempfile::Builder::new().prefix("amberlog-runs.").tempdir_in("/var/tmp").map_err(sentence)?;
    let places = [kernel, runs.path()];
    step(&format!("a Debian that runs: systemd, its services, and guests under QEMU ({})", platform.describe()));
    let machine = Machine::boot(debian, &places, &logs.join("systemd.log"))?;
    let bench = Bench { machine, runs: runs.path() };
    bench.go().map_err(|error| {
        let journal = bench.machine.run(&["journalctl", "--no-pager", "-o", "cat", "-n", "80", "-u", "amberlog"]);
        format!("{error}\n--- the end of the daemon's log\n{}", journal.unwrap_or_else(|error| error))
    })
}

struct Bench<'a> {
    machine: Machine,
    runs: &'a Path,
}

impl Bench<'_> {
    fn run(&self, words: &[&str]) -> Outcome<String> {
        self.machine.run(words)
    }

    fn shell(&self, script: &str) -> Outcome<String> {
        self.run(&["sh", "-c", script])
    }

    /// Runs what has to fail; gives what it says.
    fn refused(&self, words: &[&str]) -> Outcome<String> {
        let output = self.machine.inside(words).map_err(sentence)?;
        let said = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
        if output.status.success() { Err(format!("{} has succeeded: {said}", words.join(" "))) } else { Ok(said) }
    }

    fn path(&self, inside: &str) -> PathBuf {
        self.machine.root.join(inside.trim_start_matches('/'))
    }

    fn image(&self, vm: &Vm) -> FileSystem {
        FileSystem::whole(self.path(&format!("/srv/{}.img", vm.name)))
    }

    fn show(&self, property: &str) -> Outcome<String> {
        Ok(self.run(&["systemctl", "show", "--value", "-p", property, "amberlog.service"])?.trim().to_owned())
    }

    /// An entry of `amberlog status`, when the VM is so.
    fn wait_state(&self, vm: &str, state: &str) -> Outcome<Value> {
        let deadline = Instant::now() + LIMIT;
        loop {
            let said = self.run(&["amberlog", "status", "--json", vm]);
            let entry: Value = said.as_ref().ok().and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default();
            if entry["state"] == state {
                return Ok(entry);
            }
            if Instant::now() > deadline {
                return Err(format!("vm {vm} is not {state}: {said:?}"));
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// Waits until much of what is held for a VM is in protected pages of its guest, and not in copies, where pages can be protected.
    fn wait_protected(&self, vm: &str, protects: bool) -> Outcome<()> {
        if !protects {
            return Ok(());
        }
        let deadline = Instant::now() + LIMIT;
        loop {
            let entry = self.wait_state(vm, "running")?;
            let counter = |name: &str| entry["disks"][0]["counters"][name].as_u64().unwrap_or(0);
            let copied = counter("pool_bytes_now") / 4096;
            let protected = counter("blocks_retained_now").saturating_sub(copied);
            if protected >= PROTECTED && counter("pages_protected") >= PROTECTED {
                step(&format!("  {vm}: {protected} blocks are held in protected pages, {copied} in copies"));
                return Ok(());
            }
            ensure(Instant::now() < deadline, || {
                format!("{protected} blocks are held in protected pages, and not {PROTECTED}: {entry}")
            })?;
            std::thread::sleep(PAUSE);
        }
    }

    fn go(&self) -> Outcome<()> {
        step("installed: the unit is started by its package, and is what it says it is");
        self.shell("dpkg -i /root/old/*.deb 2>&1")?;
        self.is_fenced(&self.show("MainPID")?)?;
        self.configure()?;
        let mut guests = Vec::new();
        for vm in vms() {
            let worker = pid(&self.wait_state(vm.name, "waiting")?, "worker_pid")?;
            self.is_fenced(&worker)?;
            guests.push((self.start(&vm)?, vm));
        }
        self.go_on(&mut guests, "as installed")?;
        let entry = self.wait_state("db", "running")?;
        let counter = |name: &str| entry["disks"][0]["counters"][name].as_u64().unwrap_or(0);
        let protects = Path::new("/dev/userfaultfd").exists();
        ensure(counter("blocks_retained_now") > 0, || format!("nothing is held for the guest: {entry}"))?;
        self.snapshot(&mut guests)?;

        step("upgraded under its guests");
        let before = self.show("MainPID")?;
        let said = self.shell("dpkg -i /root/new/*.deb 2>&1")?;
        ensure(said.contains("'amberlog upgrade' has this version"), || {
            format!("the package does not say how: {said}")
        })?;
        self.stays(&before)?;
        ensure(!self.is_new(&before)?, || "the daemon's program is new before it was exchanged".to_owned())?;
        self.go_on(&mut guests, "after dpkg -i of the next version")?;
        self.wait_protected("db", protects)?;
        self.run(&["amberlog", "upgrade"])?;
        for vm in vms() {
            let worker = pid(&self.wait_state(vm.name, "running")?, "worker_pid")?;
            ensure(self.is_new(&worker)?, || {
                format!("vm {} is served by the old program after amberlog upgrade", vm.name)
            })?;
            self.is_fenced(&worker)?;
        }
        self.go_on(&mut guests, "under the next version's workers")?;
        self.wait_protected("db", protects)?;
        self.run(&["systemctl", "kill", "--kill-whom=main", "--signal=KILL", "amberlog"])?;
        let after = self.wait_for_another(&before)?;
        ensure(self.is_new(&after)?, || "systemd has started the old program again".to_owned())?;
        self.is_fenced(&after)?;
        self.go_on(&mut guests, "under the next version's daemon")?;
        for vm in vms() {
            let entry = self.wait_state(vm.name, "running")?;
            ensure(self.is_new(&pid(&entry, "worker_pid")?)?, || format!("vm {} has an old worker again", vm.name))?;
        }
        let entry = self.wait_state("db", "running")?;
        let placement = &entry["disks"][0]["placement_effective"];
        ensure(placement == "retain" || !protects, || format!("the journal is not held where it was: {entry}"))?;
        ensure(entry["disks"][0]["counters"]["blocks_retained_now"].as_u64() > Some(0), || format!("{entry}"))?;

        step("not removed under its guests");
        let said = self.refused(&["dpkg", "-r", "amberlog"])?;
        ensure(said.contains("2 VMs run on disks that amberlog serves"), || {
            format!("the refusal does not say why: {said}")
        })?;
        self.stays(&after)?;
        self.go_on(&mut guests, "after the package was not removed")?;
        ensure(self.run(&["amberlog", "health"])?.trim() == "all is well", || "health is not well".to_owned())?;
        self.wait_protected("db", protects)?;
        self.end(guests)?;
        self.remove()
    }

    /// What the administrator does after the installation, and udev at boot.
    fn configure(&self) -> Outcome<()> {
        // The rule of the package, as udev would have it be; there is no udev in a container.
        let rule = read(&self.path("/lib/udev/rules.d/70-amberlog.rules"))?;
        ensure(rule.contains("KERNEL==\"userfaultfd\", SUBSYSTEM==\"misc\", GROUP=\"kvm\", MODE=\"0660\""), || {
            rule.clone()
        })?;
        write(&self.path("/root/users"), USERS)?;
        self.shell("systemd-sysusers - < /root/users")?;
        // After that: where there is no udev the group kvm is made for its member.
        self.shell("for device in /dev/kvm /dev/userfaultfd; do [ ! -c $device ] || { chgrp kvm $device && chmod 660 $device || exit 1; }; done")?;
        // What keeps it from a device is said here, and not by a guest that does not come up.
        self.shell(
            "for device in /dev/kvm /dev/userfaultfd; do
                [ ! -c $device ] || setpriv --reuid vmm --regid vmm --init-groups sh -c \"exec 3<>$device\" ||
                    { ls -l $device; id vmm; cat /proc/self/cgroup; exit 1; }
            done",
        )?;
        let mut config = read(&self.path("/etc/amberlog/amberlog.toml"))?;
        config.push_str("\nreports = \"/var/lib/amberlog\"\n[sockets]\ngroup = \"amberlog\"\n");
        for vm in vms() {
            let file_system = self.image(&vm);
            ExtRecipe::ext4(96, 8).make(&file_system.image).map_err(sentence)?;
            let image = format!("/srv/{}.img", vm.name);
            self.shell(&format!("chgrp amberlog {image} && chmod 660 {image}"))?;
            config.push_str(&format!("[[vm]]\nname = {:?}\ndisks = [\"{image}{}\"]\n", vm.name, vm.options));
        }
        write(&self.path("/etc/amberlog/amberlog.toml"), &config)?;
        self.run(&["amberlog", "serve", "--check"])?;
        self.run(&["systemctl", "reload", "amberlog"])?;
        Ok(())
    }

    /// Starts a VM's guest, with its QEMU in the machine: a user without a privilege.
    fn start(&self, vm: &Vm) -> Outcome<Guest> {
        let needed = self.run(&["amberlog", "arguments", vm.name, "--memory", "256", "--json", "--reconnect"])?;
        let needed: Value = serde_json::from_str(&needed).map_err(sentence)?;
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let environment = needed["environment"].as_object().into_iter().flatten();
        let environment: Vec<String> = environment.map(|(name, value)| format!("{name}={}", text(value))).collect();
        // The library is for QEMU alone, not for what starts it. The word that goes is the '--' of the kit.
        let script = format!(
            "chown -R vmm: {} && shift && exec setpriv --reuid vmm --regid vmm --init-groups --inh-caps=-all --bounding-set=-all env {} \"$@\"",
            self.runs.display(),
            environment.join(" ")
        );
        let mut words = self.machine.enter();
        words.extend(["sh", "-c", &script, "sh"].map(str::to_owned));
        let writer = format!("guest-tools records --directory /mnt/a --stream a {} --forever", vm.layout.to_options());
        let script =
            format!("mount -t ext4 -o data={} /dev/vda /mnt || fail mount\nmkdir /mnt/a\n{WHOLE}\n{writer}", vm.mode);
        let mut spec = GuestSpec::new(vm.name, script).wrapper(words);
        spec.qemu_arguments =
            needed["arguments"].as_array().into_iter().flatten().map(|word| text(word).into()).collect();
        spec.at_end = AtEnd::Stay;
        spec.kernel_arguments = "no_timer_check".to_owned();
        spec.directory = Some(self.runs.to_owned());
        Guest::start(spec).map_err(sentence)
    }

    /// All guests are told of more that is durable, and none complains of its disk.
    fn go_on(&self, guests: &mut [(Guest, Vm)], when: &str) -> Outcome<()> {
        for (guest, vm) in guests.iter_mut() {
            let last = guest.acknowledged("a").last.unwrap_or(0);
            guest.wait_acknowledged("a", last + MORE, LIMIT).map_err(|error| format!("{when}: {error}"))?;
            let console = guest.console();
            let complaint =
                ["I/O error", "Aborting journal", "Remounting"].into_iter().find(|word| console.contains(word));
            ensure(complaint.is_none(), || format!("{when}, the guest of {} says {complaint:?}:\n{console}", vm.name))?;
        }
        let count = |(guest, vm): &(Guest, Vm)| format!("{} {}", vm.name, guest.acknowledged("a").count);
        step(&format!("  acknowledged {when}: {}", guests.iter().map(count).collect::<Vec<_>>().join(", ")));
        Ok(())
    }

    /// An image of this moment, where docs/serve.md says that the packaged daemon may make one.
    fn snapshot(&self, guests: &mut [(Guest, Vm)]) -> Outcome<()> {
        let (guest, vm) = &guests[0];
        let acknowledged = guest.acknowledged("a");
        self.run(&["amberlog", "snapshot", vm.name, "disk0", "/var/lib/amberlog/moment.img"])?;
        let moment = FileSystem::whole(self.path("/var/lib/amberlog/moment.img"));
        look(&moment, vm, acknowledged)?;
        std::fs::remove_file(moment.image).map_err(sentence)
    }

    /// Whether a process of the daemon's is what the unit says: its user, no privilege, filters, namespaces, and a file system that is read-only.
    fn is_fenced(&self, pid: &str) -> Outcome<()> {
        let user = self.run(&["id", "-u", "amberlog"])?;
        let user = user.trim();
        let status = self.run(&["cat", &format!("/proc/{pid}/status")])?;
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
            line.unwrap_or_default().split_whitespace().collect::<Vec<_>>().join(" ")
        };
        let none = "0000000000000000";
        let mut expected =
            vec![("Uid", [user; 4].join(" ")), ("NoNewPrivs", "1".to_owned()), ("Seccomp", "2".to_owned())];
        expected.extend(["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"].map(|name| (name, none.to_owned())));
        for (name, value) in expected {
            ensure(field(name) == value, || format!("process {pid} has {name} {}, and not {value}", field(name)))?;
        }
        for namespace in ["mnt", "net"] {
            let of = |pid: &str| self.run(&["readlink", &format!("/proc/{pid}/ns/{namespace}")]);
            ensure(of(pid)? != of("1")?, || format!("process {pid} has no {namespace} namespace of its own"))?;
        }
        let mounts = self.run(&["cat", &format!("/proc/{pid}/mountinfo")])?;
        let options = |place: &str| {
            let of = mounts.lines().rfind(|line| line.split(' ').nth(4) == Some(place));
            of.and_then(|line| line.split(' ').nth(5))
                .unwrap_or_default()
                .split(',')
                .next()
                .unwrap_or_default()
                .to_owned()
        };
        for (place, is) in [("/", "ro"), ("/srv", "rw"), ("/var/lib/amberlog", "rw"), ("/run/amberlog", "rw")] {
            ensure(options(place) == is, || {
                format!("{place} is {:?} for process {pid}, and not {is}:\n{mounts}", options(place))
            })?;
        }
        self.shell(&format!("! test -e /proc/{pid}/root/dev/kvm")).map(drop)
    }

    /// Whether a process runs the program that is installed now.
    fn is_new(&self, pid: &str) -> Outcome<bool> {
        let both = self.shell(&format!("stat -L -c %d:%i /proc/{pid}/exe /usr/bin/amberlog"))?;
        let mut lines = both.lines();
        Ok(lines.next() == lines.next())
    }

    fn stays(&self, pid: &str) -> Outcome<()> {
        let now = (self.show("ActiveState")?, self.show("MainPID")?);
        ensure(now == ("active".to_owned(), pid.to_owned()), || {
            format!("the daemon was process {pid}, and is now {now:?}")
        })
    }

    fn wait_for_another(&self, pid: &str) -> Outcome<String> {
        let deadline = Instant::now() + LIMIT;
        loop {
            let now = (self.show("ActiveState")?, self.show("MainPID")?);
            if now.0 == "active" && now.1 != pid && now.1 != "0" {
                return Ok(now.1);
            }
            ensure(Instant::now() < deadline, || format!("systemd has not started the daemon again: {now:?}"))?;
            std::thread::sleep(PAUSE);
        }
    }

    /// The guests die, and what they were told is there.
    fn end(&self, guests: Vec<(Guest, Vm)>) -> Outcome<()> {
        for (mut guest, vm) in guests {
            guest.kill_all().map_err(sentence)?;
            let acknowledged = guest.final_report().acknowledged.get("a").copied().unwrap_or_default();
            self.wait_state(vm.name, "waiting")?;
            let file_system = self.image(&vm);
            if vm.is_replayed {
                judge::replay_with_e2fsck(&file_system).map_err(sentence)?;
            }
            look(&file_system, &vm, acknowledged)?;
            step(&format!("  {}: {} records acknowledged, all there", vm.name, acknowledged.count));
            ensure(self.path(&format!("/var/lib/amberlog/{}.json", vm.name)).is_file(), || {
                "no report was written".to_owned()
            })?;
        }
        Ok(())
    }

    fn remove(&self) -> Outcome<()> {
        step("removed and purged");
        self.shell("dpkg -r amberlog amberlog-lab amberlog-journal-server 2>&1")?;
        ensure(self.show("ActiveState")? != "active", || "the unit runs without its package".to_owned())?;
        let left = self.shell("ps -o pid=,args= -u amberlog || true")?;
        ensure(left.trim().is_empty(), || format!("processes are left: {left}"))?;
        let said = self.shell("dpkg -P amberlog amberlog-lab amberlog-journal-server 2>&1")?;
        ensure(!said.contains("is left"), || format!("a purge leaves something: {said}"))?;
        for path in ["/etc/amberlog", "/var/lib/amberlog", "/lib/systemd/system/amberlog.service", "/dev/shm/amberlog"]
        {
            self.shell(&format!("! test -e {path}"))?;
        }
        let failed = self.run(&["systemctl", "list-units", "--failed", "--plain", "--no-legend"])?;
        ensure(!failed.contains("amberlog"), || failed.clone())
    }
}

/// Consistent, and with all that was acknowledged.
fn look(file_system: &FileSystem, vm: &Vm, acknowledged: Acknowledged) -> Outcome<()> {
    let verdict = judge::check(file_system).map_err(sentence)?;
    ensure(verdict.is_consistent(), || format!("{}: {verdict:?}", file_system.image.display()))?;
    let verdict = evidence::records(file_system, "/a", &vm.layout, acknowledged).map_err(sentence)?;
    ensure(verdict.is_good() && acknowledged.count >= MORE, || {
        format!("vm {}, {} acknowledged: {verdict:?}", vm.name, acknowledged.count)
    })
}

fn pid(entry: &Value, name: &str) -> Outcome<String> {
    entry[name].as_u64().map(|pid| pid.to_string()).ok_or_else(|| format!("there is no {name} in {entry}"))
}

fn ensure(is: bool, why_not: impl FnOnce() -> String) -> Outcome<()> {
    if is { Ok(()) } else { Err(why_not()) }
}
