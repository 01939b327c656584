//! How long a commit waits for the journal server over loopback: the embedded store against a stream of three replicas
//! (servers with `sync_interval: always`), taken in turns in one run.
//!
//!     cargo run --release -p remote-journal --example commit_latency -- [DIRECTORY [COMMITS]]
//!
//! DIRECTORY, by default the one for temporary files (`TMPDIR`), has to be on a disk: all four stores are made below it.

#[path = "../tests/jetstream/cluster.rs"]
#[expect(dead_code, reason = "the tests need more of it")]
mod cluster;

use cluster::Cluster;
use remote_journal::client::{BatchSender, DurableReceiver, Heard};
use remote_journal::jetstream::JetStream;
use remote_journal::message::{Batch, Block};
use remote_journal::store::{Store, StoreOptions};
use remote_journal::{Client, ClientOptions, ClientSecurity, Server, ServerOptions};
use std::time::{Duration, Instant};

/// Commits before the other store has its turn.
const TURN: usize = 50;
const LIMIT: Duration = Duration::from_secs(60);
const BOUNDS: StoreOptions =
    StoreOptions { segment_bytes: 16 << 20, space_bytes_max: 256 << 20, journal_bytes_max: 64 << 20 };

struct Writer {
    what: &'static str,
    _server: Server,
    sender: BatchSender,
    receiver: DurableReceiver,
    epoch: u64,
    sequence: u64,
    latencies: Vec<Duration>,
}

impl Writer {
    async fn start(what: &'static str, server: Server) -> Self {
        let options = ClientOptions {
            address: server.address().to_string(),
            security: ClientSecurity { insecure: true, ..ClientSecurity::default() },
            timeout: LIMIT,
        };
        let mut client = Client::connect(&options).await.expect("connects");
        let epoch = client.begin("disk", [1; 16], [2; 16], 0, 4096, &[]).await.expect("begun");
        let (sender, receiver) = client.into_pipeline();
        Writer { what, _server: server, sender, receiver, epoch, sequence: 0, latencies: Vec::new() }
    }

    async fn commit(&mut self, blocks: usize) {
        self.sequence += 1;
        let blocks = (0..blocks).map(|at| Block::new(at as u32, vec![self.sequence as u8; 4096].into())).collect();
        let tail = self.sequence.saturating_sub(200).max(1);
        let started = Instant::now();
        let batch = Batch { epoch: self.epoch, sequence: self.sequence, tail, blocks };
        self.sender.send(vec![batch]).await.expect("sent");
        while !matches!(self.receiver.hear(LIMIT).await.expect("heard"), Heard::Durable(last) if last == self.sequence)
        {
        }
        self.latencies.push(started.elapsed());
    }

    /// Prints what was measured; gives the median and the 99th percentile, in microseconds.
    fn report(&mut self, blocks: usize) -> [f64; 2] {
        self.latencies.sort_unstable();
        let at = |part: f64| self.latencies[((self.latencies.len() - 1) as f64 * part) as usize].as_secs_f64() * 1e6;
        let (p50, p99) = (at(0.5), at(0.99));
        println!(
            "{:>3} KiB  {:<22} p50 {p50:>7.0} us   p99 {p99:>7.0} us   {} commits",
            blocks * 4,
            self.what,
            self.latencies.len()
        );
        self.latencies.clear();
        [p50, p99]
    }
}

fn options(store: &std::path::Path) -> ServerOptions {
    let mut options = ServerOptions::new("127.0.0.1:0", store);
    options.insecure = true;
    options.bounds = BOUNDS;
    options
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let directory = arguments.next().map_or_else(std::env::temp_dir, Into::into);
    let commits: usize = arguments.next().map_or(2000, |count| count.parse().expect("COMMITS is a number"));
    let Some(cluster) = Cluster::start_in(&directory, 3, "") else { return };
    let own = tempfile::tempdir_in(&directory).expect("a directory");
    let embedded = Server::start(options(own.path())).expect("starts");
    let stream = JetStream::open(cluster.options(BOUNDS.space_bytes_max)).expect("a stream");
    let store = Store::open(stream, BOUNDS, 9).expect("a store");
    let replicated = Server::with_store(options(own.path()), store).expect("starts");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let writers = runtime.block_on(async {
        let mut writers =
            [Writer::start("embedded store", embedded).await, Writer::start("JetStream, 3 replicas", replicated).await];
        for blocks in [1, 16] {
            for turn in 0..=commits / TURN {
                for writer in &mut writers {
                    for _ in 0..TURN {
                        writer.commit(blocks).await;
                    }
                    if turn == 0 {
                        writer.latencies.clear();
                    }
                }
            }
            let [one, other] = writers.each_mut().map(|writer| writer.report(blocks));
            println!("         embedded / JetStream: p50 {:.2}, p99 {:.2}", one[0] / other[0], one[1] / other[1]);
        }
        writers
    });
    // Servers wait for their stores when they are dropped, which is not to be done within the runtime.
    drop(writers);
}
