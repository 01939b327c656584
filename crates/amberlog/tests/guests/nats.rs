//! Placement `remote` with the server's log in NATS JetStream: a real guest, the command line's server, and a cluster of
//! three NATS servers of which one is killed under load. Then all that is ours is killed too, and another journal server, that
//! never saw the guest, gives its log back.

#[path = "../../../remote-journal/tests/jetstream/cluster.rs"]
#[allow(dead_code, reason = "the module serves the tests of the store as well")]
mod cluster;

use crate::remote::*;
use crate::support::*;
use cluster::Cluster;
use guest_kit::Guest;
use guest_kit::image::ExtRecipe;
use guest_kit::workload::{Mode, Workload};
use std::path::Path;

#[test]
fn a_log_in_jetstream_outlives_a_node_and_its_journal_server() {
    let Some(mut cluster) = Cluster::start(3, "") else { return };
    let bench = Bench::new();
    let url = cluster.url();
    let server = JournalServer::start(Path::new(&url), "127.0.0.1:0", &["--space", "256"]);
    let image = bench.path("image");
    let file_system = ExtRecipe::ext4(96, 8).make(&image).unwrap();
    let load = Workload::new(71).without_postmark().mode(Mode::Journal);
    let words = remote_disk_within(1500, &image, &server.address);
    let mut guest = Guest::start(bench.spec("nats", load.script(), words)).unwrap();
    more_is_acknowledged(&mut guest, 5);
    wait_for_log(&guest, TO_SERVER, 1);
    more_is_acknowledged(&mut guest, 3);

    // While another leader is chosen the log may fall back; it then comes back by itself.
    cluster.kill_node(cluster.leader());
    more_is_acknowledged(&mut guest, 5);
    more_is_acknowledged_on_server(&mut guest, 3);

    server.kill();
    assert_eq!(guest.kill_all().unwrap().signal_number(), Some(9));
    let reported = guest.final_report();
    let server = JournalServer::start(Path::new(&url), "127.0.0.1:0", &["--space", "256"]);
    let done = recovered(&image, &server.address, &[]);
    assert_eq!(done["status"], "recovered", "{done}");
    assert_work_is_there(&load, &file_system, &reported);
}
