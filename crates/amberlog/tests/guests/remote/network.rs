//! A server on the other end of a real link that loses everything: neither side is told, as when a host or a switch fails.
//!
//! The server is in a network namespace, behind a pair of virtual interfaces. Where that cannot be made (no root), the test
//! says so and is left out; where the kernel has no `netem`, only its delay and its losses are.

use super::{
    JournalServer, TO_SERVER, TO_STORAGE, assert_work_is_there, more_is_acknowledged, recovered, remote_disk_within,
    wait_for_log,
};
use crate::support::*;
use guest_kit::image::ExtRecipe;
use guest_kit::workload::Workload;
use rustix::process::{Pid, Signal, kill_process};
use std::process::{Command, Stdio};

/// A namespace, and a link to it.
struct Link {
    namespace: String,
    near: String,
    server_address: String,
}

fn ip(words: &[&str]) -> Result<(), String> {
    let output = Command::new("ip").args(words).stdin(Stdio::null()).output().map_err(|error| error.to_string())?;
    if output.status.success() {
        Ok(())
    } else {
        Err(format!("ip {}: {}", words.join(" "), text(&output.stderr).trim()))
    }
}

impl Link {
    fn make() -> Result<Self, String> {
        let number = std::process::id();
        let namespace = format!("amberlog-{number}");
        let near = format!("amb{}", number % 1_000_000);
        let network = format!("10.213.{}", number % 250);
        let (near_address, server_address) = (format!("{network}.1/30"), format!("{network}.2"));
        ip(&["netns", "add", &namespace])?;
        let link = Link { namespace, near, server_address };
        let (namespace, near) = (link.namespace.as_str(), link.near.as_str());
        ip(&["link", "add", near, "type", "veth", "peer", "name", "far", "netns", namespace])?;
        ip(&["addr", "add", &near_address, "dev", near])?;
        ip(&["link", "set", near, "up"])?;
        ip(&["-n", namespace, "addr", "add", &format!("{}/30", link.server_address), "dev", "far"])?;
        link.set_up(true);
        Ok(link)
    }

    /// What is sent while it is down is lost, and nobody hears of that.
    fn set_up(&self, is_up: bool) {
        let state = if is_up { "up" } else { "down" };
        ip(&["-n", &self.namespace, "link", "set", "far", state]).expect("the link can be set");
    }

    /// Milliseconds that packets take more, and how many in a hundred are lost; false where the kernel cannot do that.
    fn is_bad(&self, delay_ms: u32, loss_percent: u32) -> bool {
        Command::new("tc")
            .args(["qdisc", "replace", "dev", &self.near, "root", "netem"])
            .args(["delay", &format!("{delay_ms}ms"), "loss", &format!("{loss_percent}%")])
            .output()
            .is_ok_and(|output| output.status.success())
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        // The interfaces go with it.
        let _ = ip(&["netns", "del", &self.namespace]);
    }
}

/// The link fails and comes back; the server stops answering and goes on; the link fails and everything on this side dies.
#[test]
#[ignore = "long: make crash"]
fn a_server_that_says_nothing_any_more_is_given_up_and_found_again() {
    let link = match Link::make() {
        Ok(link) => link,
        Err(error) => return eprintln!("left out: {error}"),
    };
    let bench = Bench::new();
    let listen = format!("{}:0", link.server_address);
    let server = JournalServer::start_in(Some(&link.namespace), &bench.path("store"), &listen, &[]);
    let pid = Pid::from_child(&server.process);
    let image = bench.path("image");
    let file_system = ExtRecipe::ext4(96, 8).make(&image).unwrap();
    let load = Workload::new(71).without_postmark();
    let spec = bench.spec("half-open", load.script(), remote_disk_within(1500, &image, &server.address));
    let mut guest = guest_kit::Guest::start(spec).unwrap();
    more_is_acknowledged(&mut guest, 5);
    wait_for_log(&guest, TO_SERVER, 1);
    if link.is_bad(40, 2) {
        more_is_acknowledged(&mut guest, 3);
        assert!(link.is_bad(0, 0));
    } else {
        eprintln!("left out: delay and loss, which this kernel cannot do");
    }

    link.set_up(false);
    wait_for_log(&guest, TO_STORAGE, 1);
    wait_for_log(&guest, "the journal stays on storage", 1);
    more_is_acknowledged(&mut guest, 3);
    link.set_up(true);
    wait_for_log(&guest, TO_SERVER, 2);
    more_is_acknowledged(&mut guest, 3);

    // Its kernel still takes connections and bytes.
    kill_process(pid, Signal::STOP).unwrap();
    wait_for_log(&guest, TO_STORAGE, 2);
    more_is_acknowledged(&mut guest, 3);
    kill_process(pid, Signal::CONT).unwrap();
    wait_for_log(&guest, TO_SERVER, 3);
    more_is_acknowledged(&mut guest, 3);

    link.set_up(false);
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&guest.kill_all().unwrap()), Some(9));
    let reported = guest.final_report();
    link.set_up(true);
    let done = recovered(&image, &server.address, &[]);
    assert_eq!(done["status"], "recovered", "{done}");
    assert_work_is_there(&load, &file_system, &reported);
}
