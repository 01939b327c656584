//! A transaction load on the real PostgreSQL: Debian's server and its own `pgbench`, whose transaction is TPC-B's.
//!
//! The server has its defaults (`fsync`, `synchronous_commit` and `full_page_writes` are on) but for 32 MiB of shared buffers and no network. A
//! transaction's time is what pgbench says of it. At the end the sums of accounts, tellers, branches and history must agree, as pgbench leaves them, or the
//! tool fails. The server begins and ends within each call: what a call did is in a checkpoint when it returns.
//!
//! PostgreSQL does not run as root: as root, the server is the user "postgres", whom a guest without users gets.

use crate::latency::Latencies;
use crate::options::Options;
use crate::{Result, at};
use rustix::process::{Pid, Signal, geteuid, kill_process};
use std::os::unix::fs::chown;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Where Debian has its versions.
const VERSIONS: &str = "/usr/lib/postgresql";
const USERS: &str = "/etc/passwd";
const USER: &str = "postgres";
/// The user's number in a guest that has no users.
const NEW_USER: u32 = 5432;
const START_LIMIT: Duration = Duration::from_secs(120);
const LOOK_PAUSE: Duration = Duration::from_millis(20);
const SUMS: &str = "SELECT (SELECT count(*) FROM pgbench_history), (SELECT coalesce(sum(delta), 0) FROM pgbench_history),
    (SELECT sum(abalance) FROM pgbench_accounts), (SELECT sum(tbalance) FROM pgbench_tellers), (SELECT sum(bbalance) FROM pgbench_branches);";

/// `guest-tools postgresql --directory D --phase create|run [--scale N] [--clients N] [--transactions N] [--seed N]`: `create` makes a cluster and
/// pgbench's tables (100,000 accounts a unit of scale), `run` does so many transactions in all, on as many connections as there are clients.
pub fn run(mut options: Options) -> Result<()> {
    let directory = PathBuf::from(options.required("directory")?);
    let phase = options.required("phase")?;
    let scale = options.number("scale", 1, 1..=1000)?;
    let clients = options.number("clients", 4, 1..=64)?;
    let transactions = options.number("transactions", 1000, 1..=100_000_000)?;
    let seed = options.number("seed", 1, 0..=u64::MAX)?;
    options.finish()?;
    let cluster = Cluster::of(directory)?;
    match phase.as_str() {
        "create" => cluster.create(scale),
        "run" => cluster.load(clients, transactions, seed),
        other => Err(format!("--phase is '{other}'; it must be create or run")),
    }
}

/// A cluster of databases, and who may serve it.
struct Cluster {
    data: PathBuf,
    programs: PathBuf,
    /// Who the server is, where that is not who calls.
    user: Option<(u32, u32)>,
    /// Of sockets and logs: in memory, and gone with this.
    scratch: Scratch,
}

impl Cluster {
    fn of(data: PathBuf) -> Result<Self> {
        let programs = newest(Path::new(VERSIONS))
            .ok_or_else(|| format!("there is no PostgreSQL in {VERSIONS} (Debian's package postgresql has it)"))?;
        let user = if geteuid().is_root() { Some(user()?) } else { None };
        let cluster = Cluster { data, programs, user, scratch: Scratch::new()? };
        cluster.give(&cluster.scratch.0)?;
        Ok(cluster)
    }

    fn give(&self, path: &Path) -> Result<()> {
        let Some((user, group)) = self.user else { return Ok(()) };
        chown(path, Some(user), Some(group)).map_err(at("give away", path))
    }

    fn create(&self, scale: u64) -> Result<()> {
        std::fs::create_dir_all(&self.data).map_err(at("create", &self.data))?;
        self.give(&self.data)?;
        let mut make = self.as_server("initdb");
        make.args(["--username", USER, "--auth", "trust", "--no-locale", "--encoding", "UTF8"]);
        make.args(["--no-instructions", "--pgdata"]).arg(&self.data);
        end_well("initdb", &mut make)?;
        let server = self.start()?;
        let scale = scale.to_string();
        end_well("pgbench", self.client("pgbench").args(["--initialize", "--quiet", "--scale", &scale, USER]))?;
        server.stop()
    }

    fn load(&self, clients: u64, transactions: u64, seed: u64) -> Result<()> {
        let server = self.start()?;
        let each = transactions.div_ceil(clients);
        let log = self.scratch.0.join("log");
        let mut bench = self.client("pgbench");
        bench.args(["--no-vacuum", "--protocol", "prepared", "--jobs", "1", "--log"]);
        bench.arg(format!("--log-prefix={}", log.display()));
        bench.args([format!("--random-seed={seed}"), format!("--client={clients}"), format!("--transactions={each}")]);
        let started = Instant::now();
        end_well("pgbench", bench.arg(USER))?;
        let seconds = started.elapsed().as_secs_f64();
        let latencies = self.latencies()?;
        let done = each * clients;
        let after = self.sums()?;
        server.stop()?;
        let [lines, deltas, accounts, tellers, branches] = after;
        // Another run may have gone before.
        if u64::try_from(lines).is_ok_and(|lines| lines < done)
            || latencies.count() as u64 != done
            || [accounts, tellers, branches] != [deltas; 3]
        {
            return Err(format!(
                "the database is wrong: {done} transactions were committed ({} are in pgbench's log), and there are {lines} lines of history; \
                 they sum up to {deltas}, accounts to {accounts}, tellers to {tellers}, branches to {branches}",
                latencies.count()
            ));
        }
        let rate = done as f64 / seconds.max(1e-6);
        println!(
            "phase=run transactions={done} clients={clients} seconds={seconds:.3} transactions_per_second={rate:.2}{}",
            latencies.words("transaction")
        );
        Ok(())
    }

    /// What pgbench has written down of each transaction: client, number, time in µs, script, and when that was.
    fn latencies(&self) -> Result<Latencies> {
        let mut latencies = Latencies::new();
        for entry in std::fs::read_dir(&self.scratch.0).map_err(at("list", &self.scratch.0))? {
            let path = entry.map_err(at("list", &self.scratch.0))?.path();
            if !path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"log")) {
                continue;
            }
            let text = std::fs::read_to_string(&path).map_err(at("read", &path))?;
            for line in text.lines() {
                let us = line.split(' ').nth(2).and_then(|word| word.parse().ok());
                latencies.add(Duration::from_micros(us.ok_or_else(|| format!("pgbench's log has '{line}'"))?));
            }
        }
        Ok(latencies)
    }

    /// Lines of history, and the sums of what they moved, of accounts, tellers and branches.
    fn sums(&self) -> Result<[i64; 5]> {
        let mut ask = self.client("psql");
        ask.args(["--no-psqlrc", "--tuples-only", "--no-align", "--command", SUMS, USER]);
        let output = ask.stdout(Stdio::piped()).stderr(Stdio::piped()).output();
        let output = output.map_err(|error| format!("cannot run psql: {error}"))?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let sums: Vec<i64> = text.trim().split('|').filter_map(|word| word.parse().ok()).collect();
        sums.try_into().map_err(|_| {
            format!("psql did not answer with five sums but '{text}' {}", String::from_utf8_lossy(&output.stderr))
        })
    }

    fn start(&self) -> Result<Server> {
        let mut command = self.as_server("postgres");
        command.arg("-D").arg(&self.data).arg("-k").arg(&self.scratch.0);
        command.args(["-c", "listen_addresses=", "-c", "shared_buffers=32MB"]);
        let child = command.spawn().map_err(|error| format!("cannot run postgres: {error}"))?;
        let mut server = Server(child);
        let started = Instant::now();
        // It says so in the last line of this file.
        let told = self.data.join("postmaster.pid");
        let is_ready = |text: String| text.lines().nth(7).is_some_and(|word| word.trim() == "ready");
        while !std::fs::read_to_string(&told).is_ok_and(is_ready) {
            if let Some(status) = server.0.try_wait().map_err(|error| format!("postgres: {error}"))? {
                return Err(format!("postgres ended with {status}; its last words are above"));
            }
            if started.elapsed() > START_LIMIT {
                return Err(format!("postgres is not ready after {} s", START_LIMIT.as_secs()));
            }
            std::thread::sleep(LOOK_PAUSE);
        }
        Ok(server)
    }

    fn as_server(&self, name: &str) -> Command {
        let mut command = self.command(name);
        if let Some((user, group)) = self.user {
            command.uid(user).gid(group);
        }
        // It looks around before it says that it has no terminal.
        command.current_dir(&self.scratch.0);
        command
    }

    fn client(&self, name: &str) -> Command {
        let mut command = self.command(name);
        command.args(["--username", USER, "--host"]).arg(&self.scratch.0);
        command
    }

    fn command(&self, name: &str) -> Command {
        let mut command = Command::new(self.programs.join(name));
        // The one zone that needs no files.
        command.env("TZ", "GMT").env("LC_ALL", "C").stdin(Stdio::null()).stdout(Stdio::null());
        command
    }
}

fn end_well(name: &str, command: &mut Command) -> Result<()> {
    let output = command.stderr(Stdio::piped()).output().map_err(|error| format!("cannot run {name}: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!("{name} ended with {}: {}", output.status, String::from_utf8_lossy(&output.stderr).trim_end()))
}

/// The programs of the newest version.
fn newest(versions: &Path) -> Option<PathBuf> {
    let names = std::fs::read_dir(versions).ok()?.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let newest = names.filter_map(|name| name.parse::<u32>().ok()).max()?;
    Some(versions.join(newest.to_string()).join("bin"))
}

/// User and group of the server. A guest that has no users gets root and it.
fn user() -> Result<(u32, u32)> {
    let text = match std::fs::read_to_string(USERS) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            let text = format!("root:x:0:0::/:/bin/sh\n{USER}:x:{NEW_USER}:{NEW_USER}::/:/bin/sh\n");
            std::fs::write(USERS, &text).map_err(at("write", USERS))?;
            text
        }
        read => read.map_err(at("read", USERS))?,
    };
    let of = |line: &str| {
        let words: Vec<&str> = line.split(':').collect();
        Some((words.get(2)?.parse().ok()?, words.get(3)?.parse().ok()?))
    };
    let line = text.lines().find(|line| line.split(':').next() == Some(USER));
    line.and_then(of).ok_or_else(|| format!("{USERS} has no user {USER}, which PostgreSQL needs when root calls"))
}

/// A server that runs.
struct Server(Child);

impl Server {
    /// Has it end with a checkpoint.
    fn stop(mut self) -> Result<()> {
        let pid = i32::try_from(self.0.id()).ok().and_then(Pid::from_raw).ok_or("postgres has no process")?;
        kill_process(pid, Signal::INT).map_err(|error| format!("postgres: {error}"))?;
        let status = self.0.wait().map_err(|error| format!("postgres: {error}"))?;
        if status.success() { Ok(()) } else { Err(format!("postgres ended with {status}")) }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A directory that goes.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Result<Self> {
        let path = std::env::temp_dir().join(format!("postgresql-{}", std::process::id()));
        std::fs::create_dir(&path).map_err(at("create", &path))?;
        Ok(Self(path))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn the_newest_version_is_taken() {
        let directory = tempfile::tempdir().unwrap();
        assert_eq!(newest(directory.path()), None);
        for name in ["9", "15", "14", "16.old"] {
            std::fs::create_dir(directory.path().join(name)).unwrap();
        }
        assert_eq!(newest(directory.path()), Some(directory.path().join("15/bin")));
        assert_eq!(newest(Path::new("/nowhere/at/all")), None);
    }

    /// Where it is installed: it is too large to be had for this alone.
    #[test]
    fn the_real_postgresql_takes_the_transactions_and_its_sums_agree() {
        if newest(Path::new(VERSIONS)).is_none() || (geteuid().is_root() && user().is_err()) {
            println!("not tried: there is no PostgreSQL here");
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        std::fs::set_permissions(directory.path(), PermissionsExt::from_mode(0o755)).unwrap();
        let data = directory.path().join("data");
        let call = |words: &str| {
            let words = format!("--directory {} {words}", data.display());
            run(Options::parse(words.split(' ').map(str::to_owned))?)
        };
        call("--phase create").unwrap();
        call("--phase run --transactions 20 --clients 2").unwrap();
        call("--phase run --transactions 5 --clients 1 --seed 9").unwrap();
        // A sum that does not agree is noticed.
        let cluster = Cluster::of(data.clone()).unwrap();
        let server = cluster.start().unwrap();
        let change = "UPDATE pgbench_branches SET bbalance = bbalance + 1";
        end_well("psql", cluster.client("psql").args(["--command", change, USER])).unwrap();
        assert_eq!(cluster.sums().unwrap()[0], 25);
        server.stop().unwrap();
        drop(cluster);
        assert!(call("--phase run --transactions 1 --clients 1").unwrap_err().contains("wrong"));
        assert!(call("--phase create").unwrap_err().contains("initdb"), "there is a cluster");
    }
}
