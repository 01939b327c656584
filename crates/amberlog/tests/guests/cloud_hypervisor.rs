//! Guests under Cloud Hypervisor, where it is installed and KVM runs the guests' own kernel: no package registry has it.

use crate::remote::{assert_work_is_there, more_is_acknowledged};
use crate::serve::{Daemon, write_config};
use crate::support::*;
use crate::worker::kill_nine;
use guest_kit::image::ExtRecipe;
use guest_kit::workload::Workload;
use guest_kit::{AtEnd, Disks, Guest, GuestSpec};
use std::ffi::OsString;
use std::fs::OpenOptions;

const MEMORY_MIB: u64 = 256;

/// A guest on a VM's only disk, whose memory is in the VM's directory or not, with more words.
fn spec(daemon: &Daemon, bench: &Bench, load: &Workload, is_in_directory: bool, more: &[&str]) -> GuestSpec {
    let mut spec = daemon.spec("ch", load.script());
    spec.qemu_arguments.clear();
    let run = bench.path("run").join("ch");
    let ram = run.join("area/ram");
    let mut words: Vec<String> = if is_in_directory {
        // It gives the file no size of its own.
        let file = OpenOptions::new().write(true).open(&ram).unwrap();
        file.set_len(MEMORY_MIB << 20).unwrap();
        let zone = format!("id=memory,size={MEMORY_MIB}M,shared=on,file={}", ram.display());
        ["--memory", "size=0", "--memory-zone", &zone].map(str::to_owned).to_vec()
    } else {
        vec!["--memory".to_owned(), format!("size={MEMORY_MIB}M,shared=on")]
    };
    let socket = run.join("disk0.sock");
    words.extend([
        "--disk".to_owned(),
        format!("vhost_user=on,socket={},num_queues=1,queue_size=128", socket.display()),
    ]);
    words.extend(more.iter().map(|word| (*word).to_owned()));
    spec.disks = Disks::CloudHypervisor(words.into_iter().map(OsString::from).collect());
    spec.at_end = AtEnd::Stay;
    spec
}

/// The VMM is killed, its worker is killed under it, and all of them together; with the guest's memory in a place where pages can be
/// protected, in another one, and with a balloon that keeps them from it.
#[test]
#[ignore = "needs cloud-hypervisor on PATH, and KVM"]
fn a_guest_of_cloud_hypervisor_loses_nothing() {
    let balloon = ["--balloon", "size=0"];
    for (is_in_directory, more, placement) in
        [(true, &[][..], "retain"), (false, &[], "copy"), (true, &balloon, "copy")]
    {
        for is_daemon_killed in [false, true] {
            let bench = Bench::new();
            let image = bench.path("image");
            let file_system = ExtRecipe::ext4(96, 8).make(&image).unwrap();
            let config = write_config(&bench, &[("ch", image.to_str().unwrap().to_owned())]);
            let daemon = Daemon::start(&bench, &config);
            let load = Workload::new(400 + u64::from(is_daemon_killed)).without_postmark();
            let mut guest = Guest::start(spec(&daemon, &bench, &load, is_in_directory, more)).unwrap();
            more_is_acknowledged(&mut guest, 5);
            let entry = daemon.wait_state("ch", "running");
            assert_eq!(entry["disks"][0]["placement_effective"], placement, "{entry}\n{}", daemon.log());
            let protected = entry["disks"][0]["counters"]["pages_protected"].as_u64().unwrap();
            assert_eq!(protected > 0, placement == "retain", "{entry}");
            // A third death within ten seconds, and nobody would follow.
            for _ in 0..2 {
                kill_nine(daemon.wait_state("ch", "running")["worker_pid"].as_u64().unwrap() as u32);
                more_is_acknowledged(&mut guest, 3);
            }
            if is_daemon_killed {
                drop(daemon);
                guest.kill_all().unwrap();
                bench.recover_area();
            } else {
                guest.kill_all().unwrap();
                daemon.wait_state("ch", "waiting");
            }
            assert_work_is_there(&load, &file_system, &guest.final_report());
        }
    }
}
