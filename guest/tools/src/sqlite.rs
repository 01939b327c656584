//! A transaction load on the real SQLite: Debian's `sqlite3`, spoken to through its standard input and output, as one
//! client that waits for each transaction's commit before it begins the next.
//!
//! The tables and the transaction are TPC-B's, small: an account gets an amount, its branch too, and a line of history
//! says so. At the end the sums must agree with what was sent, or the tool fails. A transaction's time is that from the
//! first byte sent to the answer that follows its COMMIT: it has SQLite's work and a round trip through two pipes in it.

use crate::latency::Latencies;
use crate::options::Options;
use crate::random::Random;
use crate::{Result, at};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Instant;

const BRANCHES: u64 = 10;
/// Bytes of an account's filler, as in TPC-B.
const FILLER_BYTES: usize = 84;
const AMOUNT_MAX: u64 = 10_000;

/// `guest-tools sqlite --directory D --phase create|run [--journal delete|truncate|persist|wal] [--accounts N]
/// [--transactions N] [--seed N]`: `create` makes the database, `run` does so many transactions on it, each durable
/// (`synchronous=FULL`, SQLite's default). The journal is SQLite's own: `delete` is its default.
pub fn run(mut options: Options) -> Result<()> {
    let directory = PathBuf::from(options.required("directory")?);
    let phase = options.required("phase")?;
    let journal = options.text("journal").unwrap_or_else(|| "delete".to_owned());
    let accounts = options.number("accounts", 10_000, 1..=10_000_000)?;
    let transactions = options.number("transactions", 1000, 1..=100_000_000)?;
    let seed = options.number("seed", 1, 0..=u64::MAX)?;
    options.finish()?;
    if !["delete", "truncate", "persist", "wal"].contains(&journal.as_str()) {
        return Err(format!("--journal is '{journal}'; it must be delete, truncate, persist or wal"));
    }
    std::fs::create_dir_all(&directory).map_err(at("create", &directory))?;
    let mut session = Session::open(&directory.join("bank.db"))?;
    match phase.as_str() {
        "create" => create(&mut session, &journal, accounts)?,
        "run" => load(&mut session, &journal, accounts, transactions, seed)?,
        other => return Err(format!("--phase is '{other}'; it must be create or run")),
    }
    session.close()
}

fn create(session: &mut Session, journal: &str, accounts: u64) -> Result<()> {
    let filler = "x".repeat(FILLER_BYTES);
    session.journal(journal)?;
    session.ask(&format!(
        "BEGIN;
         CREATE TABLE branch(id INTEGER PRIMARY KEY, balance INTEGER NOT NULL);
         CREATE TABLE account(id INTEGER PRIMARY KEY, branch INTEGER NOT NULL, balance INTEGER NOT NULL, filler TEXT);
         CREATE TABLE history(account INTEGER NOT NULL, branch INTEGER NOT NULL, amount INTEGER NOT NULL, filler TEXT);
         WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i + 1 < {BRANCHES})
           INSERT INTO branch SELECT i, 0 FROM n;
         WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i + 1 < {accounts})
           INSERT INTO account SELECT i, i % {BRANCHES}, 0, '{filler}' FROM n;
         COMMIT;"
    ))?;
    Ok(())
}

fn load(session: &mut Session, journal: &str, accounts: u64, transactions: u64, seed: u64) -> Result<()> {
    session.journal(journal)?;
    let started = Instant::now();
    let mut latencies = Latencies::new();
    let mut total = 0;
    for transaction in 0..transactions {
        let mut random = Random::of(seed, transaction);
        let account = random.below(accounts);
        let branch = account % BRANCHES;
        let amount = 1 + random.below(AMOUNT_MAX);
        total += amount;
        let text = format!(
            "BEGIN IMMEDIATE;
             UPDATE account SET balance = balance + {amount} WHERE id = {account};
             UPDATE branch SET balance = balance + {amount} WHERE id = {branch};
             INSERT INTO history VALUES({account}, {branch}, {amount}, 'a line of history, fifty bytes or so');
             COMMIT;"
        );
        latencies.time(|| session.ask(&text))?;
    }
    let seconds = started.elapsed().as_secs_f64();
    // Another run may have gone before: what there is more now than the sums of history say is what matters.
    let sums = session.ask(
        "SELECT (SELECT count(*) FROM history), (SELECT sum(amount) FROM history), (SELECT sum(balance) FROM account),
                (SELECT sum(balance) FROM branch);",
    )?;
    let sums: Vec<u64> = sums.split('|').filter_map(|word| word.trim().parse().ok()).collect();
    let [lines, amounts, balances, branches] = sums[..] else {
        return Err("sqlite3 did not answer with four sums".to_owned());
    };
    if lines < transactions || amounts < total || balances != amounts || branches != amounts {
        return Err(format!(
            "the database is wrong: {transactions} transactions of {total} in all were committed, and it has {lines} \
             lines of history of {amounts}, accounts of {balances} and branches of {branches}"
        ));
    }
    let rate = transactions as f64 / seconds.max(1e-6);
    println!(
        "phase=run transactions={transactions} seconds={seconds:.3} transactions_per_second={rate:.2}{}",
        latencies.words("transaction")
    );
    Ok(())
}

/// A running `sqlite3`.
struct Session {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
    asked: u64,
}

impl Session {
    fn open(path: &Path) -> Result<Self> {
        let mut child = Command::new("sqlite3")
            .args(["-batch", "-bail", "-noheader", "-list"])
            .arg(path)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| format!("cannot run sqlite3 (Debian's package of that name has it): {error}"))?;
        let input = child.stdin.take();
        let output = BufReader::new(child.stdout.take().ok_or("sqlite3 has no output")?);
        Ok(Self { child, input, output, asked: 0 })
    }

    /// Sets SQLite's own journal mode, and makes sure that it was taken.
    fn journal(&mut self, mode: &str) -> Result<()> {
        let answer = self.ask(&format!("PRAGMA journal_mode={mode}; PRAGMA synchronous=FULL;"))?;
        if answer.trim() == mode { Ok(()) } else { Err(format!("SQLite took journal mode '{answer}', not '{mode}'")) }
    }

    /// Sends statements; gives what they print once all are done. sqlite3 writes out what it has printed before it reads the
    /// next line, so a line of our own ends the answer.
    fn ask(&mut self, statements: &str) -> Result<String> {
        self.asked += 1;
        let mark = format!("done {}", self.asked);
        let text = format!("{statements}\nSELECT '{mark}';\n");
        let input = self.input.as_mut().ok_or("sqlite3 has been told to end")?;
        input.write_all(text.as_bytes()).and_then(|()| input.flush()).map_err(|error| format!("sqlite3: {error}"))?;
        let mut answer = String::new();
        loop {
            let mut line = String::new();
            if self.output.read_line(&mut line).map_err(|error| format!("sqlite3: {error}"))? == 0 {
                return Err("sqlite3 ended; its last words are above".to_owned());
            }
            if line.trim_end() == mark {
                return Ok(answer);
            }
            answer.push_str(&line);
        }
    }

    fn close(mut self) -> Result<()> {
        drop(self.input.take());
        let status = self.child.wait().map_err(|error| format!("sqlite3: {error}"))?;
        if status.success() { Ok(()) } else { Err(format!("sqlite3 ended with {status}")) }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        drop(self.input.take());
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(words: &str) -> Result<()> {
        run(Options::parse(words.split(' ').map(str::to_owned))?)
    }

    #[test]
    fn the_real_sqlite_takes_the_transactions_and_its_sums_agree() {
        for journal in ["delete", "wal"] {
            let directory = tempfile::tempdir().unwrap();
            let words = format!("--directory {} --accounts 100 --journal {journal}", directory.path().display());
            call(&format!("{words} --phase create")).unwrap();
            call(&format!("{words} --phase run --transactions 20")).unwrap();
            call(&format!("{words} --phase run --transactions 5 --seed 9")).unwrap();
            let mut session = Session::open(&directory.path().join("bank.db")).unwrap();
            assert_eq!(session.ask("SELECT count(*) FROM history;").unwrap(), "25\n");
            assert_eq!(session.ask("PRAGMA journal_mode;").unwrap().trim(), journal);
            // A sum that does not agree is noticed.
            session.ask("UPDATE account SET balance = balance - 1 WHERE id = 3;").unwrap();
            session.close().unwrap();
            assert!(call(&format!("{words} --phase run --transactions 1")).unwrap_err().contains("wrong"));
            assert!(call(&format!("{words} --phase create")).unwrap_err().contains("ended"), "the tables are there");
        }
        assert!(call("--directory /nowhere --phase run --journal memory").is_err());
    }
}
