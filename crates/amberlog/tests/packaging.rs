//! The files in `packaging/`, judged by the tools that read them: systemd's own.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// What `systemd-analyze security` may give at most, in tenths: from 0 (safe) to 100 (exposed).
const EXPOSURE_MAX: &str = "20";

fn packaging() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging").canonicalize().unwrap()
}

fn run(command: &mut Command) -> Output {
    command.output().unwrap_or_else(|error| panic!("{command:?}: {error}; scripts/install-packages.sh installs it"))
}

fn said(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// The unit, with drop-ins, in a directory of its own and with programs that are there.
fn unit(drop_ins: &[&str]) -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    let text = std::fs::read_to_string(packaging().join("amberlog.service")).unwrap();
    assert!(text.contains("ExecStart=/usr/bin/amberlog serve"));
    let text = text.replace("/usr/bin/amberlog", env!("CARGO_BIN_EXE_amberlog"));
    std::fs::write(directory.path().join("amberlog.service"), text).unwrap();
    let place = directory.path().join("amberlog.service.d");
    std::fs::create_dir(&place).unwrap();
    for name in drop_ins {
        std::fs::copy(packaging().join("amberlog.service.d").join(name), place.join(name)).unwrap();
    }
    directory
}

fn exposure(unit: &Path) -> Output {
    let threshold = format!("--threshold={EXPOSURE_MAX}");
    run(Command::new("systemd-analyze").args(["security", "--offline=true", "--no-pager", &threshold]).arg(unit))
}

#[test]
fn the_unit_gives_away_next_to_nothing() {
    let directory = unit(&[]);
    let output = exposure(&directory.path().join("amberlog.service"));
    assert!(output.status.success(), "{}", said(&output));
    // The same without what was done for it: the tool is able to say no.
    let text = std::fs::read_to_string(packaging().join("amberlog.service")).unwrap();
    let bare: String = text
        .lines()
        .filter(|line| !line.contains("Protect") && !line.contains("Restrict"))
        .collect::<Vec<_>>()
        .join("\n");
    let path = directory.path().join("bare.service");
    std::fs::write(&path, bare).unwrap();
    assert!(!exposure(&path).status.success());
}

#[test]
fn systemd_understands_the_unit_and_its_drop_ins() {
    for drop_ins in [
        &[][..],
        &["remote.conf"],
        &["block-devices.conf"],
        &["metrics.conf"],
        &["cpus.conf"],
        &["remote.conf", "block-devices.conf"],
    ] {
        let directory = unit(drop_ins);
        let output = run(Command::new("systemd-analyze")
            .args(["verify", "--man=no", "--recursive-errors=no"])
            .arg(directory.path().join("amberlog.service")));
        // Its complaints are warnings, with status 0.
        assert!(output.status.success() && said(&output).is_empty(), "{drop_ins:?}: {}", said(&output));
    }
}

#[test]
fn the_unit_starts_between_its_images_and_those_who_start_guests() {
    let text = std::fs::read_to_string(packaging().join("amberlog.service")).unwrap();
    let of = |key: &str| -> BTreeSet<&str> {
        text.lines()
            .filter_map(|line| line.strip_prefix(key)?.strip_prefix('='))
            .flat_map(str::split_whitespace)
            .collect()
    };
    let (before, after) = (of("Before"), of("After"));
    for unit in ["libvirtd.service", "virtqemud.service", "libvirt-guests.service", "pve-guests.service"] {
        assert!(before.contains(unit), "{unit}");
    }
    for unit in ["remote-fs.target", "iscsid.service"] {
        assert!(after.contains(unit), "{unit}");
    }
}

#[test]
fn the_user_and_the_directories_are_understood() {
    // Given by name, it would be looked for below the root.
    let file = |name: &str| std::fs::File::open(packaging().join(name)).unwrap();
    let root = tempfile::tempdir().unwrap();
    let etc = root.path().join("etc");
    std::fs::create_dir(&etc).unwrap();
    let of = format!("--root={}", root.path().display());
    let output = run(Command::new("systemd-sysusers").args([&of, "-"]).stdin(file("sysusers.d/amberlog.conf")));
    assert!(output.status.success(), "{}", said(&output));
    let users = std::fs::read_to_string(etc.join("passwd")).unwrap();
    assert!(users.contains("amberlog:x:") && users.contains("/usr/sbin/nologin"), "{users}");
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let output =
        run(Command::new("systemd-tmpfiles").args(["--create", &of, "-"]).stdin(file("tmpfiles.d/amberlog.conf")));
    assert!(output.status.success(), "{}", said(&output));
    assert!(root.path().join("dev/shm/amberlog").is_dir() && etc.join("amberlog").is_dir());
}

#[test]
fn the_journal_servers_unit_is_understood_and_gives_away_little() {
    let text = std::fs::read_to_string(packaging().join("amberlog-journal-server.service")).unwrap();
    assert!(text.contains("ExecStart=/usr/bin/amberlog-journal-server --listen"));
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("amberlog-journal-server.service");
    // Any program that is there will do.
    std::fs::write(&path, text.replace("/usr/bin/amberlog-journal-server", env!("CARGO_BIN_EXE_amberlog"))).unwrap();
    let output = exposure(&path);
    assert!(output.status.success(), "{}", said(&output));
    let output = run(Command::new("systemd-analyze").args(["verify", "--man=no", "--recursive-errors=no"]).arg(&path));
    assert!(output.status.success() && said(&output).is_empty(), "{}", said(&output));
}

/// The files and directories of ours below /usr that documents and the files in `packaging/` name.
fn installed_paths_that_are_named() -> BTreeSet<String> {
    let pattern = "/usr/(lib|share/doc)/amberlog/[a-zA-Z0-9_./-]+";
    let output = run(Command::new("grep")
        .args(["-rhoE", "--exclude=test-packages.sh", pattern, "docs", "packaging", "README.md"])
        .current_dir(packaging().join("..")));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.lines().map(|path| path.trim_end_matches('.').to_owned()).collect()
}

/// Links of the pages below a directory that lead nowhere, and how many links there are. Whether headings are there, guest-kit's tests say.
fn dead_links(directory: &Path) -> (Vec<String>, usize) {
    let output = run(Command::new("find").arg(directory).args(["-name", "*.md"]));
    let pages = String::from_utf8_lossy(&output.stdout).into_owned();
    let (mut dead, mut count) = (Vec::new(), 0);
    for page in pages.lines().map(Path::new) {
        let text = std::fs::read_to_string(page).unwrap();
        for line in text.lines().filter(|line| !line.starts_with("    ")) {
            let outside: String = line.split('`').step_by(2).collect();
            for part in outside.split("](").skip(1) {
                let target = part.split([')', '#']).next().unwrap();
                count += 1;
                if !target.starts_with("http") && !page.parent().unwrap().join(target).exists() {
                    dead.push(format!("{}: {target}", page.display()));
                }
            }
        }
    }
    (dead, count)
}

/// What `make install` puts where, and that what it installs works from there.
#[test]
fn what_is_installed_is_whole() {
    let programs = Path::new(env!("CARGO_BIN_EXE_amberlog")).parent().unwrap();
    let root = tempfile::tempdir().unwrap();
    let prefix = Path::new("/opt/amber");
    let install = || run(Command::new(packaging().join("install.sh")).args([programs, prefix, root.path()]));
    let output = install();
    assert!(output.status.success(), "run 'cargo build --workspace' first: {}", said(&output));
    let at = |name: &str| root.path().join("opt/amber").join(name);
    for name in [
        "bin/amberlog-lab",
        "bin/amberlog-journal-server",
        "lib/amberlog/libamberlog_vmm_shim.so",
        "lib/sysusers.d/amberlog.conf",
        "lib/tmpfiles.d/amberlog.conf",
        "lib/udev/rules.d/70-amberlog.rules",
        "share/man/man1/amberlog.1",
        "share/man/man1/amberlog-disk-resize.1",
        "share/man/man1/amberlog-lab-run.1",
        "share/man/man1/amberlog-journal-server.1",
        "share/zsh/vendor-completions/_amberlog",
        "share/fish/vendor_completions.d/amberlog.fish",
        "share/doc/amberlog/docs/serve.md",
        "share/doc/amberlog/prometheus/amberlog.rules.yml",
    ] {
        assert!(at(name).is_file(), "{name} is not installed");
    }
    let unit = std::fs::read_to_string(at("lib/systemd/system/amberlog.service")).unwrap();
    assert!(
        unit.contains("ExecStart=/opt/amber/bin/amberlog serve --config /opt/amber/etc/amberlog/amberlog.toml")
            && unit.contains("ExecReload=/usr/bin/kill"),
        "{unit}"
    );
    let output = run(Command::new(at("bin/amberlog")).args(["libvirt", "--help"]));
    assert!(output.status.success(), "{}", said(&output));
    let output = run(Command::new("bash").arg("-n").arg(at("share/bash-completion/completions/amberlog")));
    assert!(output.status.success(), "{}", said(&output));
    let (dead, links) = dead_links(&at("share/doc/amberlog"));
    assert!(dead.is_empty(), "{dead:#?}");
    assert!(links > 100, "{links} links");
    let hook = std::fs::read_to_string(at("share/doc/amberlog/libvirt/amberlog")).unwrap();
    assert!(hook.contains("exec /opt/amber/bin/amberlog libvirt hook"), "{hook}");
    // Its program is not there: domains of others start, and go on.
    for operation in [["prepare", "begin"], ["reconnect", "begin"]] {
        let output = run(Command::new(at("share/doc/amberlog/libvirt/amberlog")).arg("other").args(operation));
        assert!(output.status.success(), "{}", said(&output));
    }
    // What pages, and the files themselves, say is somewhere is there, and what is called can be.
    let named = installed_paths_that_are_named();
    for path in &named {
        let there = at(path.strip_prefix("/usr/").unwrap());
        assert!(there.exists(), "{path} is named, and not installed");
        if path.contains("/power/") {
            let output = run(Command::new(&there).env("NOTIFYTYPE", "ONBATT"));
            assert!(said(&output).contains("/opt/amber/bin/amberlog: not found"), "{path}: {}", said(&output));
        }
    }
    assert!(named.iter().filter(|path| path.contains("/power/")).count() == 3, "{named:?}");
    // A configuration that is there is left alone.
    let config = at("etc/amberlog/amberlog.toml");
    std::fs::write(&config, "# mine\n").unwrap();
    assert!(install().status.success());
    assert_eq!(std::fs::read_to_string(config).unwrap(), "# mine\n");
}

/// The scripts in `packaging/backup`, with a program of `amberlog`'s name that notes how it is called, and says no where a file tells it to.
struct Backup {
    directory: tempfile::TempDir,
}

impl Backup {
    fn new() -> Self {
        use std::os::unix::fs::PermissionsExt;
        let directory = tempfile::tempdir().unwrap();
        let write = |name: &str, text: String| {
            let path = directory.path().join(name);
            // By another process: a program that this one has open for writing is busy for whatever another test starts meanwhile.
            let draft = directory.path().join("draft");
            std::fs::write(&draft, text).unwrap();
            assert!(Command::new("cp").args([&draft, &path]).status().unwrap().success());
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        };
        let at = directory.path().display();
        write(
            "amberlog",
            format!(
                "#!/bin/sh\necho \"$@\" >>{at}/calls\n[ ! -e {at}/no-$1 ] || exit 1\ncase \"$1\" in\n\
                 disk) echo 'DISK BYTES PLACEMENT IMAGE'; [ -e {at}/no-disks ] || echo 'disk0 1 retain a, b\nlog 1 retain c, d' ;;\n\
                 status) echo '{{'; printf '  \"state\": \"%s\",\\n' \"$(cat {at}/state)\"; echo '}}' ;;\n\
                 snapshot) : >\"$4\" ;;\nesac\n"
            ),
        );
        write("state", "waiting".to_owned());
        for name in ["around-freeze", "snapshot-all", "vzdump-hook", "proxmox-hookscript"] {
            let text = std::fs::read_to_string(packaging().join("backup").join(name)).unwrap();
            // That one has snapshot-all do it.
            assert!(name == "vzdump-hook" || text.contains("/usr/bin/amberlog"), "{name}");
            write(name, text.replace("/usr/bin/amberlog", &format!("{at}/amberlog")).replace("sleep 1", ":"));
        }
        Backup { directory }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn says_no(&self, command: &str, is: bool) {
        let path = self.path(&format!("no-{command}"));
        if is { std::fs::write(path, "").unwrap() } else { std::fs::remove_file(path).unwrap() }
    }

    /// Its exit code, and how amberlog was called meanwhile.
    fn run(&self, script: &str, arguments: &[&str]) -> (i32, Vec<String>) {
        let _ = std::fs::remove_file(self.path("calls"));
        let at = self.directory.path();
        let output = run(Command::new(self.path(script))
            .args(arguments)
            .current_dir(at)
            .env("DUMPDIR", at.join("dump"))
            .env("PVE_CONFIGURATION", at));
        let calls = std::fs::read_to_string(self.path("calls")).unwrap_or_default();
        let calls = calls.replace(&format!("{}/", at.display()), "");
        (output.status.code().unwrap(), calls.lines().map(str::to_owned).collect())
    }
}

#[test]
fn a_command_runs_while_a_vm_is_frozen_and_a_guest_that_went_on_is_told() {
    let backup = Backup::new();
    let calls = |command: &str| backup.run("around-freeze", &["db", "20", "sh", "-c", command]);
    let both = ["freeze db --seconds 20".to_owned(), "thaw db".to_owned()];
    assert_eq!(calls("[ $(wc -l <calls) = 1 ]"), (0, both.to_vec()));
    assert_eq!(calls("exit 7"), (7, both.to_vec()));
    backup.says_no("thaw", true);
    assert_eq!(calls("true"), (1, both.to_vec()));
    backup.says_no("freeze", true);
    assert_eq!(calls("touch ran"), (1, both[..1].to_vec()));
    assert!(!backup.path("ran").exists());
    assert_eq!(backup.run("around-freeze", &["db", "20"]).0, 2);
}

/// The package goes when the process that a guest was left with is gone, whoever has its number by then; not before.
#[test]
fn the_package_stays_while_a_guest_waits_for_the_next_daemon() {
    let directory = tempfile::tempdir().unwrap();
    let sockets = directory.path().join("run/db");
    std::fs::create_dir_all(&sockets).unwrap();
    // The package's own places, elsewhere; and no daemon.
    let script = std::fs::read_to_string(packaging().join("debian/amberlog.prerm")).unwrap();
    assert!(script.contains("/run/amberlog/*/left") && script.contains("/run/systemd/system"));
    let script = script
        .replace("/run/amberlog/", &format!("{}/", directory.path().join("run").display()))
        .replace("/run/systemd/system", "/nonexistent");
    let path = directory.path().join("prerm");
    std::fs::write(&path, script).unwrap();
    let removed = |note: &str| {
        std::fs::write(sockets.join("left"), note).unwrap();
        let mut command = Command::new("/bin/sh");
        let output = run(command.arg(&path).arg("remove").env("PATH", "/usr/bin:/bin"));
        assert!(output.status.success() || said(&output).contains("waits for the next one"), "{}", said(&output));
        output.status.success()
    };
    let mut process = Command::new("sleep").arg("60").spawn().unwrap();
    let pid = process.id();
    let started = placement::process_started_at(pid.cast_signed()).unwrap();
    let note = |started: u64| format!("{{\"pid\":{pid},\"started\":{started},\"configuration\":\"\",\"images\":[]}}");
    assert!(!removed(&note(started)), "it lives");
    assert!(!removed(&note(0)), "nobody knows when it was started");
    assert!(!removed("noise"), "what is not understood is a guest's");
    assert!(removed(&note(started + 1)), "another process has its number");
    process.kill().unwrap();
    while placement::process_started_at(pid.cast_signed()).is_some() {
        std::thread::yield_now();
    }
    assert!(removed(&note(started)) && removed(&note(0)), "nobody has asked how it ended");
    process.wait().unwrap();
    assert!(removed(&note(started)) && removed(&note(0)));
}

#[test]
fn vzdump_has_an_image_of_each_disk_and_keeps_the_last_ones_until_they_are_there() {
    let backup = Backup::new();
    let image = |name: &str| backup.path("dump/amberlog-100").join(name);
    assert_eq!(backup.run("vzdump-hook", &["job-start"]), (0, vec![]));
    std::fs::write(backup.path("100.conf"), "memory: 2048\nargs: -device vhost-user-blk-pci,chardev=a\n").unwrap();
    std::fs::write(backup.path("101.conf"), "memory: 2048\nscsi0: local:x\n").unwrap();
    let expected = [
        "disk list 100",
        "snapshot 100 disk0 dump/amberlog-100.unfinished/disk0.img",
        "snapshot 100 log dump/amberlog-100.unfinished/log.img",
    ];
    let start = || backup.run("vzdump-hook", &["backup-start", "snapshot", "100"]);
    assert_eq!(start(), (0, expected.map(str::to_owned).to_vec()));
    assert!(image("disk0.img").is_file() && image("log.img").is_file());
    std::fs::write(image("disk0.img"), "of monday").unwrap();
    backup.says_no("snapshot", true);
    assert_eq!(start().0, 1);
    assert_eq!(backup.run("vzdump-hook", &["backup-abort", "snapshot", "100"]).0, 0);
    assert_eq!(std::fs::read_to_string(image("disk0.img")).unwrap(), "of monday");
    backup.says_no("snapshot", false);
    assert_eq!(start().0, 0);
    assert_eq!(std::fs::read_to_string(image("disk0.img")).unwrap(), "");
    assert!(!backup.path("dump/amberlog-100.unfinished").exists());
    assert!(!backup.path("dump/amberlog-100.before").exists());
    // A guest that has no disk of amberlog's.
    assert_eq!(backup.run("vzdump-hook", &["backup-start", "snapshot", "101"]), (0, vec![]));
    // One that is held has no disks, and no images are no backup.
    std::fs::write(image("disk0.img"), "of tuesday").unwrap();
    backup.says_no("disks", true);
    assert_eq!(backup.run("snapshot-all", &["100", "dump"]), (1, vec!["disk list 100".to_owned()]));
    assert_eq!(start(), (1, vec!["disk list 100".to_owned()]));
    backup.says_no("disks", false);
    assert_eq!(std::fs::read_to_string(image("disk0.img")).unwrap(), "of tuesday");
    // The daemon does not answer: there is no backup.
    backup.says_no("disk", true);
    assert_eq!(start().0, 1);
}

#[test]
fn proxmox_starts_a_guest_when_its_disks_are_there() {
    let backup = Backup::new();
    let start = |vm: &str| backup.run("proxmox-hookscript", &[vm, "pre-start"]);
    std::fs::write(backup.path("100.conf"), "memory: 2048\nargs: -device vhost-user-blk-pci,chardev=a\n").unwrap();
    std::fs::write(backup.path("101.conf"), "memory: 2048\nscsi0: local:x\n").unwrap();
    assert_eq!(start("100"), (0, vec!["status --json 100".to_owned()]));
    assert_eq!(start("101"), (0, vec![]));
    assert_eq!(backup.run("proxmox-hookscript", &["100", "post-start"]), (0, vec![]));
    std::fs::write(backup.path("state"), "failed").unwrap();
    let (code, calls) = start("100");
    assert_eq!((code, calls.len()), (1, 30));
}

/// The calls that a word of SystemCallFilter= stands for.
fn calls(word: &str, sets: &BTreeMap<String, Vec<String>>) -> BTreeSet<String> {
    match sets.get(word) {
        Some(words) => words.iter().flat_map(|word| calls(word, sets)).collect(),
        None => BTreeSet::from([word.to_owned()]),
    }
}

/// What the daemon is seen to call, and some of which no set of systemd's knows or which a set taken away would take along.
const NEEDED: &[&str] = &[
    "io_uring_setup",
    "io_uring_enter",
    "io_uring_register",
    "seccomp",
    "prctl",
    "landlock_create_ruleset",
    "landlock_add_rule",
    "landlock_restrict_self",
    "chown",
    "fchownat",
    "fchmodat",
    "umask",
    "pidfd_open",
    "pidfd_send_signal",
    "memfd_create",
    "fallocate",
    "flock",
    "eventfd2",
    "clone3",
    "futex",
    "mmap",
    "mremap",
    "madvise",
    "statx",
    "renameat",
    "symlinkat",
    "unlinkat",
    "openat",
    "openat2",
    "sendmsg",
    "recvmsg",
    "accept4",
    "getrandom",
    "fdatasync",
    "pread64",
    "pwrite64",
    "pwritev",
    "fcntl",
    "ioctl",
    "poll",
    "ppoll",
    "epoll_wait",
    "tgkill",
    "rt_sigaction",
    "sched_yield",
    "sched_getaffinity",
    "sigaltstack",
    "rseq",
    "kill",
    "fstatfs",
    "readlink",
];

#[test]
fn the_unit_lets_the_daemon_call_what_it_needs() {
    let output = run(Command::new("systemd-analyze").args(["syscall-filter", "--no-pager"]));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let mut sets: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut set = String::new();
    for line in text.lines() {
        match line.strip_prefix("    ").map(str::trim) {
            None if line.starts_with('@') => set = line.trim().to_owned(),
            Some(word) if !word.starts_with('#') => sets.entry(set.clone()).or_default().push(word.to_owned()),
            _ => {}
        }
    }
    let unit = std::fs::read_to_string(packaging().join("amberlog.service")).unwrap();
    let mut allowed = BTreeSet::new();
    for line in unit.lines().filter_map(|line| line.strip_prefix("SystemCallFilter=")) {
        let (takes_away, words) = line.strip_prefix('~').map_or((false, line), |words| (true, words));
        for call in words.split_whitespace().flat_map(|word| calls(word, &sets)) {
            if takes_away {
                allowed.remove(&call)
            } else {
                allowed.insert(call)
            };
        }
    }
    let missing: Vec<_> = NEEDED.iter().filter(|call| !allowed.contains(**call)).collect();
    assert!(missing.is_empty(), "{missing:?}");
    for never in ["ptrace", "mount", "init_module", "bpf", "setuid", "reboot", "perf_event_open", "swapon"] {
        assert!(!allowed.contains(never), "{never}");
    }
}
