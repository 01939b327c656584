//! Many VMs on one host (simulated front-ends, one disk each): each has a worker of its own, which is small, and whose death costs no other
//! VM anything. `AMBERLOG_VMS=200` for the number that a host may have; a few otherwise.

use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use test_frontend::{FrontEnd, FrontEndOptions, GuestRam, STATUS_OK, TestDisk};

const LIMIT: Duration = Duration::from_secs(180);
/// What a worker that does nothing may have for itself alone, in KiB.
const IDLE_KIB_MAX: u64 = 8 << 10;
const IMAGE_BYTES: u64 = 4 << 20;
const PIECE: usize = 4096;

struct Daemon {
    process: Child,
    run: PathBuf,
    log: PathBuf,
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Daemon {
    fn start(directory: &Path, shm: &Path, vms: usize) -> Self {
        let run = directory.join("run");
        let mut config = format!("shm = {shm:?}\nrun = {run:?}\n");
        for vm in 0..vms {
            let image = directory.join(format!("{vm}.img"));
            std::fs::File::create(&image).and_then(|file| file.set_len(IMAGE_BYTES)).expect("an image");
            config += &format!("[[vm]]\nname = \"vm{vm}\"\ndisks = [{image:?}]\n");
        }
        let path = directory.join("amberlog.toml");
        std::fs::write(&path, config).expect("written");
        let log = directory.join("log");
        let process = Command::new(env!("CARGO_BIN_EXE_amberlog"))
            .args(["serve".as_ref(), "--config".as_ref(), path.as_os_str()])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(std::fs::File::create(&log).expect("a log"))
            .spawn()
            .expect("amberlog starts");
        Daemon { process, run, log }
    }

    fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// The entries of all VMs, by name.
    fn status(&self) -> BTreeMap<String, Value> {
        let output = Command::new(env!("CARGO_BIN_EXE_amberlog"))
            .args(["status".as_ref(), "--json".as_ref(), "--run".as_ref(), self.run.as_os_str()])
            .output()
            .expect("amberlog starts");
        let all: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
        let entries = all["vms"].as_array().cloned().unwrap_or_default();
        entries.into_iter().filter_map(|entry| Some((entry["vm"].as_str()?.to_owned(), entry))).collect()
    }

    fn await_all(&self, vms: usize, what: &str, is_so: impl Fn(&Value) -> bool) -> BTreeMap<String, Value> {
        let deadline = Instant::now() + LIMIT;
        loop {
            let status = self.status();
            if status.len() == vms && status.values().all(&is_so) {
                return status;
            }
            let other = status.values().find(|entry| !is_so(entry));
            assert!(Instant::now() < deadline, "not all are {what}: {other:?}\n{}", self.log());
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

/// What no other process shares, in KiB.
fn own_kib(pid: u64) -> u64 {
    let rollup = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).expect("it lives");
    let of = |name: &str| -> u64 {
        let line = rollup.lines().find_map(|line| line.strip_prefix(name)).expect("a line of it");
        line.trim().trim_end_matches(" kB").parse().expect("a number")
    };
    of("Private_Dirty:") + of("Private_Clean:") + of("Swap:")
}

fn is_waiting(entry: &Value) -> bool {
    entry["state"].as_str().is_some_and(|state| state.starts_with("waiting"))
}

fn piece(vm: usize, round: usize) -> Vec<u8> {
    let mut bytes = vec![round as u8; PIECE];
    bytes[..8].copy_from_slice(&(vm as u64).to_le_bytes());
    bytes
}

fn milliseconds(mut times: Vec<Duration>) -> String {
    times.sort_unstable();
    let at = |share: f64| times[((times.len() - 1) as f64 * share).round() as usize].as_secs_f64() * 1e3;
    format!("p50 {:.1} ms, p99 {:.1} ms, longest {:.1} ms, n = {}", at(0.5), at(0.99), at(1.0), times.len())
}

#[test]
fn many_vms_each_with_a_small_worker_whose_death_no_other_one_notices() {
    let vms: usize = std::env::var("AMBERLOG_VMS").map_or(6, |text| text.parse().expect("AMBERLOG_VMS is a number"));
    // Each has some forty descriptors here, and so it has in the supervisor, which inherits the bound.
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let all = rustix::process::Rlimit { current: limit.maximum, ..limit };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, all).expect("up to the hard limit");
    let directory = tempfile::tempdir().expect("a directory");
    let shm = tempfile::Builder::new().prefix("amberlog-crowd-").tempdir_in("/dev/shm").expect("tmpfs");
    let began = Instant::now();
    let daemon = Daemon::start(directory.path(), shm.path(), vms);
    let status = daemon.await_all(vms, "waiting", is_waiting);
    println!("{vms} VMs wait for their VMMs after {:.1} s", began.elapsed().as_secs_f64());
    let worker = |status: &BTreeMap<String, Value>, vm: usize| {
        let pid = status[&format!("vm{vm}")]["worker_pid"].as_u64();
        pid.unwrap_or_else(|| panic!("vm{vm} has no worker\n{}", daemon.log()))
    };
    let mut own: Vec<u64> = (0..vms).map(|vm| own_kib(worker(&status, vm))).collect();
    own.sort_unstable();
    println!("an idle worker has for itself: median {} KiB, most {} KiB", own[vms / 2], own[vms - 1]);
    println!("the supervisor has {} KiB", own_kib(u64::from(daemon.process.id())));
    assert!(own[vms - 1] <= IDLE_KIB_MAX, "an idle worker has {} KiB", own[vms - 1]);

    let mut disks: Vec<TestDisk> = (0..vms)
        .map(|vm| {
            let socket = PathBuf::from(status[&format!("vm{vm}")]["sockets"][0].as_str().expect("a socket").to_owned());
            let ram = GuestRam::new(2 << 20).expect("memory");
            let mut front_end = FrontEnd::connect(&socket, ram, FrontEndOptions::default()).expect("connected");
            front_end.start().expect("started");
            TestDisk::new(front_end)
        })
        .collect();
    let mut request = |vm: usize, round: usize, times: &mut Vec<Duration>| {
        let began = Instant::now();
        let status = disks[vm].write(0, &piece(vm, round)).unwrap_or_else(|error| panic!("vm{vm}: {error:?}"));
        times.push(began.elapsed());
        assert_eq!(status, STATUS_OK, "vm{vm}, round {round}");
        let (status, bytes) = disks[vm].read(0, PIECE).unwrap_or_else(|error| panic!("vm{vm}: {error:?}"));
        assert!(status == STATUS_OK && bytes == piece(vm, round), "vm{vm}, round {round}");
    };
    let (mut quiet, mut own_death, mut beside) = (Vec::new(), Vec::new(), Vec::new());
    (0..vms).for_each(|vm| request(vm, 0, &mut quiet));
    for victim in 0..vms {
        let pid = rustix::process::Pid::from_raw(worker(&status, victim) as i32).expect("a number");
        rustix::process::kill_process(pid, rustix::process::Signal::KILL).expect("it lived");
        // Its neighbours, and some that are far away; all of them at the end.
        let others = (1..vms).filter(|far| far % 7 == 1 || *far < 4).map(|far| (victim + far) % vms);
        others.for_each(|vm| request(vm, victim + 1, &mut beside));
        request(victim, victim + 1, &mut own_death);
    }
    (0..vms).for_each(|vm| request(vm, vms + 1, &mut quiet));
    println!("a request, nobody dies: {}", milliseconds(quiet));
    println!("while another VM's worker dies: {}", milliseconds(beside));
    println!("after one's own has died: {}", milliseconds(own_death));
    let after = daemon.await_all(vms, "running, with one death", |entry| {
        entry["state"].as_str().is_some_and(|state| state.starts_with("running")) && entry["restarts"] == 1
    });
    assert!((0..vms).all(|vm| worker(&after, vm) != worker(&status, vm)));
}
