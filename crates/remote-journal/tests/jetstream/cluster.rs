//! A real NATS cluster on loopback addresses of its own: servers are started, killed, looked at and damaged one by one.

use async_nats::jetstream;
use remote_journal::jetstream::NatsOptions;
use serde_json::json;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

/// The stream's name.
pub const STREAM: &str = "LOG";
/// The most that anything is waited for: on a machine that stands still now and then, elections begin anew.
pub const LIMIT: Duration = Duration::from_secs(180);
/// How long a store waits for its stream, where nothing else is said.
const PATIENCE: Duration = Duration::from_secs(60);

/// `nats-server`, or a word that it is missing; never missing in CI.
fn program() -> Option<PathBuf> {
    let named = std::env::var_os("AMBERLOG_NATS_SERVER").map(PathBuf::from);
    let built = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../build/nats-server");
    let program = named.or(Some(built).filter(|program| program.is_file()));
    if program.is_none() {
        let what = "LEFT OUT: there is no nats-server; scripts/fetch-nats-server.sh builds one, or AMBERLOG_NATS_SERVER names one";
        assert!(std::env::var("CI").as_deref() != Ok("true"), "{what}");
        // Not with a macro of the test harness, which would keep it to itself.
        let _ = writeln!(std::io::stderr(), "{what}");
    }
    program
}

/// Servers `n0`, `n1`...
pub struct Cluster {
    program: PathBuf,
    directory: tempfile::TempDir,
    nodes: Vec<Option<Child>>,
    ip: String,
}

impl Cluster {
    /// Starts it; `more` goes into every server's configuration.
    pub fn start(nodes: usize, more: &str) -> Option<Self> {
        Self::start_in(&std::env::temp_dir(), nodes, more)
    }

    /// The same, with the servers' stores below this directory.
    pub fn start_in(directory: &Path, nodes: usize, more: &str) -> Option<Self> {
        static COUNT: AtomicU8 = AtomicU8::new(1);
        let program = program()?;
        let process = std::process::id();
        // All of 127.0.0.0/8 is ours: nobody else has the ports of this address.
        let ip =
            format!("127.{}.{}.{}", 1 + (process >> 8) % 250, process % 256, COUNT.fetch_add(1, Ordering::Relaxed));
        let directory = tempfile::tempdir_in(directory).expect("a directory");
        let routes: Vec<String> = (0..nodes).map(|node| format!("nats://{ip}:{}", 6222 + node)).collect();
        for node in 0..nodes {
            let cluster = if nodes == 1 {
                String::new()
            } else {
                format!("cluster {{ name: c, listen: \"{ip}:{}\", routes: [{}] }}\n", 6222 + node, routes.join(", "))
            };
            let config = format!(
                "server_name: n{node}\nlisten: \"{ip}:{}\"\njetstream {{ store_dir: \"{}\", sync_interval: always, \
                 max_file_store: 1GB, max_memory_store: 16MB }}\n{cluster}{more}\n",
                4222 + node,
                directory.path().join(format!("store{node}")).display(),
            );
            std::fs::write(directory.path().join(format!("n{node}.conf")), config).expect("written");
        }
        let mut cluster = Cluster { program, directory, nodes: (0..nodes).map(|_| None).collect(), ip };
        (0..nodes).for_each(|node| cluster.start_node(node));
        Some(cluster)
    }

    pub fn start_node(&mut self, node: usize) {
        let log = self.directory.path().join(format!("n{node}.log"));
        let log = std::fs::OpenOptions::new().create(true).append(true).open(log).expect("a log");
        let child = Command::new(&self.program)
            .arg("-c")
            .arg(self.directory.path().join(format!("n{node}.conf")))
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("cloned"))
            .stderr(log)
            .spawn()
            .expect("started");
        self.nodes[node] = Some(child);
    }

    /// kill -9.
    pub fn kill_node(&mut self, node: usize) {
        if let Some(mut child) = self.nodes[node].take() {
            child.kill().expect("it is ours");
            child.wait().expect("it ends");
        }
    }

    /// Asks a node to end, and waits for that: it writes down what it has, and does not look at all of it the next time.
    pub fn stop_node(&mut self, node: usize) {
        if let Some(mut child) = self.nodes[node].take() {
            let process = rustix::process::Pid::from_child(&child);
            rustix::process::kill_process(process, rustix::process::Signal::TERM).expect("it is ours");
            child.wait().expect("it ends");
        }
    }

    /// Where server 0 listens.
    pub fn server(&self) -> String {
        format!("{}:4222", self.ip)
    }

    pub fn url(&self) -> String {
        let servers: Vec<String> = (0..self.nodes.len()).map(|node| format!("{}:{}", self.ip, 4222 + node)).collect();
        format!("nats://{}/{STREAM}", servers.join(","))
    }

    pub fn options(&self, space_bytes: u64) -> NatsOptions {
        let mut options = NatsOptions::new(self.url().parse().expect("an address"), space_bytes);
        options.replicas = self.nodes.len();
        options.patience = PATIENCE;
        options
    }

    pub fn ask<T>(&self, question: impl AsyncFnOnce(jetstream::Context) -> T) -> T {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async {
            let servers: Vec<String> =
                (0..self.nodes.len()).map(|node| format!("{}:{}", self.ip, 4222 + node)).collect();
            let servers: Vec<async_nats::ServerAddr> =
                servers.iter().map(|server| server.parse().expect("an address")).collect();
            let deadline = Instant::now() + LIMIT;
            let client = loop {
                match async_nats::connect(servers.clone()).await {
                    Ok(client) => break client,
                    Err(error) => assert!(Instant::now() < deadline, "none of them is there: {error}"),
                }
                tokio::time::sleep(Duration::from_millis(100)).await;
            };
            question(jetstream::new(client)).await
        })
    }

    /// Bytes and last number of the stream, and the node that leads it.
    pub fn state(&self) -> (u64, u64, usize) {
        let deadline = Instant::now() + LIMIT;
        loop {
            let state = self.ask(async |context| {
                let info = context.get_stream(STREAM).await.ok()?.cached_info().clone();
                let leader = info.cluster?.leader?.strip_prefix('n')?.parse().ok()?;
                Some((info.state.bytes, info.state.last_sequence, leader))
            });
            if let Some(state) = state {
                return state;
            }
            assert!(Instant::now() < deadline, "the stream has no leader");
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    pub fn leader(&self) -> usize {
        self.state().2
    }

    /// Asks the stream's leader to leave it to this node; whether it does is another thing.
    pub fn prefer(&self, node: usize) {
        let _: Option<serde_json::Value> = self.ask(async |context| {
            let preferred = json!({"placement": {"preferred": format!("n{node}")}});
            context.request(format!("STREAM.LEADER.STEPDOWN.{STREAM}"), &preferred).await.ok()
        });
    }

    /// Makes this node the stream's leader.
    pub fn lead(&self, node: usize) {
        let deadline = Instant::now() + LIMIT;
        // Not too often: a server that catches up has to begin anew with every leader.
        while self.leader() != node {
            assert!(Instant::now() < deadline, "n{node} cannot be made leader");
            self.prefer(node);
            for _ in 0..30 {
                if self.leader() == node {
                    return;
                }
                std::thread::sleep(Duration::from_millis(100));
            }
        }
    }

    /// Waits until every server has all of the stream.
    pub fn wait_until_current(&self) {
        let deadline = Instant::now() + LIMIT;
        loop {
            let is_current = self.ask(async |context| {
                let info = context.get_stream(STREAM).await.ok()?.cached_info().clone();
                let replicas = info.cluster?.replicas;
                Some(replicas.len() + 1 == self.nodes.len() && replicas.iter().all(|one| one.current && !one.offline))
            });
            if is_current == Some(true) {
                return;
            }
            assert!(Instant::now() < deadline, "the servers do not agree");
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Flips a bit `behind` bytes behind these, in the messages that a node (which is not running) has stored.
    /// Gives whether there are any such.
    pub fn flip_bit(&self, node: usize, needle: &[u8], behind: usize) -> bool {
        assert!(self.nodes[node].is_none(), "it still runs");
        for block in blocks(&self.directory.path().join(format!("store{node}"))) {
            let mut bytes = std::fs::read(&block).expect("read");
            let found = bytes.windows(needle.len()).position(|window| window == needle);
            if let Some(at) = found {
                bytes[at + behind] ^= 4;
                std::fs::write(&block, bytes).expect("written");
                return true;
            }
        }
        false
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if std::thread::panicking() {
            for node in 0..self.nodes.len() {
                let log = std::fs::read_to_string(self.directory.path().join(format!("n{node}.log")));
                let log = log.unwrap_or_default();
                let lines: Vec<&str> = log.lines().collect();
                eprintln!("n{node}:\n{}", lines[lines.len().saturating_sub(15)..].join("\n"));
            }
        }
        (0..self.nodes.len()).for_each(|node| self.kill_node(node));
    }
}

/// Files of messages below a directory, the stream's own.
fn blocks(directory: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() {
            found.extend(blocks(&path));
        } else if path.extension().is_some_and(|extension| extension == "blk")
            && path.components().any(|part| part.as_os_str() == STREAM)
        {
            found.push(path);
        }
    }
    found
}
