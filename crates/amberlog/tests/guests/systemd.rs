//! A real systemd starts the daemon, keeps its descriptors, and starts it again when it dies or hangs. It is a manager of a user's services, in namespaces
//! of its own, so it takes nothing of this machine's. Needs root and systemd, and says so where they are not.

use crate::serve::{Daemon, write_config};
use crate::support::*;
use crate::worker::kill_nine;
use guest_kit::image::ExtRecipe;
use guest_kit::{Guest, Signal};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

const SYSTEMD: &str = "/lib/systemd/systemd";
/// Set in the namespaces.
const INSIDE: &str = "GUEST_TEST_HAS_SYSTEMD";
const TEST: &str = "systemd::a_guest_goes_on_whose_supervisor_a_real_systemd_starts_again";

const NAMESPACES: [&str; 6] = ["--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--cgroup"];

/// It is to believe that the machine was booted by a systemd. What is written is gone with the namespace.
const PRELUDE: &str = r#"
set -e
mount --make-rprivate /
mount -t tmpfs none /run
mkdir -p /run/systemd/system /run/user/0 /run/home/.config/systemd/user
export XDG_RUNTIME_DIR=/run/user/0 USERS_HOME="$HOME" HOME=/run/home
/lib/systemd/systemd --user --unit=basic.target > /run/systemd.log 2>&1 &
for attempt in $(seq 100); do systemctl --user is-active -q basic.target && break; sleep 0.1; done
export HOME="$USERS_HOME"
exec "$1" --exact "$2" --ignored --nocapture
"#;

fn systemctl(words: &[&str]) -> String {
    let output = Command::new("systemctl").arg("--user").args(words).env("HOME", "/run/home").output().unwrap();
    assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// The daemon's unit, as far as it is the packaged one where it dies.
fn write_unit(bench: &Bench, config: &Path) {
    let unit = format!(
        "[Unit]\nStartLimitIntervalSec=0\n[Service]\nType=notify\nExecStart={} serve --config {}\nKillMode=process\n\
         Restart=on-failure\nRestartSec=100ms\nFileDescriptorStoreMax=32768\nLimitCORE=0\nWatchdogSec=3\nStandardError=append:{}\n",
        amberlog().display(),
        config.display(),
        bench.path("daemon.log").display()
    );
    std::fs::write("/run/home/.config/systemd/user/amberlog.service", unit).unwrap();
    systemctl(&["daemon-reload"]);
}

#[test]
#[ignore = "`make crash` runs it: it needs a systemd that can be started in namespaces of its own"]
fn a_guest_goes_on_whose_supervisor_a_real_systemd_starts_again() {
    if std::env::var_os(INSIDE).is_some() {
        return goes_on();
    }
    let can = Command::new("unshare").args(NAMESPACES).args(["test", "-x", SYSTEMD]).output();
    if !can.is_ok_and(|output| output.status.success()) {
        println!("skipped: root and {SYSTEMD} are needed");
        return;
    }
    let mut command = Command::new("unshare");
    command.args(NAMESPACES).args(["bash", "-c", PRELUDE, "bash"]);
    command.arg(std::env::current_exe().unwrap()).arg(TEST);
    let output = command.env(INSIDE, "1").output().unwrap();
    let text = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
    eprintln!("{text}");
}

fn goes_on() {
    let bench = Bench::new();
    let image = bench.path("one.img");
    let file_system = ExtRecipe::ext4(96, 8).make(&image).unwrap();
    let config = write_config(&bench, &[("one", image.to_str().unwrap().to_owned())]);
    write_unit(&bench, &config);
    let mut command = Command::new("bash");
    // It stands for the daemon only where that is asked.
    command.args(["-c", "systemctl --user start amberlog; exec sleep infinity", "daemon"]);
    let daemon = Daemon::start_by(command, &bench, &config);
    let layout = overwritten(8);
    let writer = record_writer("/mnt/a", "a", &layout, "--forever");
    let script = format!("mount -t ext4 -o data=journal /dev/vda /mnt || fail mount\nmkdir /mnt/a\n{writer}");
    let mut guest = Guest::start(daemon.spec("one", script)).unwrap();
    guest.wait_acknowledged("a", 10, LIMIT).unwrap();
    let pid = |entry: &serde_json::Value, name: &str| entry[name].as_u64().unwrap_or_else(|| panic!("{entry}")) as u32;
    let kept = || systemctl(&["show", "-P", "NFileDescriptorStore", "amberlog"]).trim().parse::<u32>().unwrap();
    for round in 0..5 {
        let before = daemon.wait_state("one", "running");
        assert!(before["disks"][0]["counters"]["blocks_retained_now"].as_u64() > Some(0), "{before}");
        assert!(kept() > 0);
        let supervisor = pid(&before, "supervisor_pid");
        if round % 2 == 1 {
            kill_nine(pid(&before, "worker_pid"));
        }
        let begun = Instant::now();
        if round == 4 {
            // Its watchdog ends one that hangs.
            let pid = rustix::process::Pid::from_raw(supervisor.cast_signed()).unwrap();
            rustix::process::kill_process(pid, Signal::STOP).unwrap();
        } else {
            kill_nine(supervisor);
        }
        let deadline = Instant::now() + LIMIT;
        // While nobody answers, and while the next one begins, there is no VMM.
        let goes_on = || {
            let output = daemon.ask(&["status", "--json", "one"]);
            let entry: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
            entry["state"] == "running" && entry["supervisor_pid"].as_u64() != Some(supervisor.into())
        };
        while !goes_on() {
            assert!(Instant::now() < deadline, "round {round}\n{}", daemon.log());
            std::thread::sleep(Duration::from_millis(20));
        }
        assert_eq!(pid(&daemon.entry("one"), "vmm_pid"), guest.qemu_pid().unwrap());
        let last = guest.acknowledged("a").last.unwrap_or(0);
        if let Err(error) = guest.wait_acknowledged("a", last + 20, LIMIT) {
            panic!("round {round}: {error}\n--- the daemon's log\n{}", daemon.log());
        }
        eprintln!("round {round}: 20 more were acknowledged {:?} after; {} descriptors kept", begun.elapsed(), kept());
    }
    let restarts = systemctl(&["show", "-P", "NRestarts", "amberlog"]);
    assert_eq!(restarts.trim(), "5");
    let console = guest.console();
    assert!(!console.contains("I/O error") && !console.contains("Aborting journal"), "{console}");
    guest.kill_qemu().unwrap();
    guest.wait_end(LIMIT).unwrap();
    let reported = guest.final_report();
    daemon.wait_state("one", "waiting");
    systemctl(&["stop", "amberlog"]);
    assert_consistent(&file_system);
    assert_records(&file_system, "/a", "a", &layout, &reported);
}
