//! Loads and deaths.

use crate::error::{Error, Result};
use crate::workload;

/// What runs in the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Load {
    /// 4 KiB at random places of a file, each made durable.
    Fsync,
    /// TPC-B's transaction on SQLite with its rollback journal.
    Sqlite,
    /// The same with its write-ahead log.
    SqliteWal,
    /// TPC-B's transaction on PostgreSQL, by its own pgbench.
    Postgresql,
    /// Writes to RocksDB, each made durable, by its own db_bench.
    Rocksdb,
    /// A mail server: 16 threads, two fsyncs a flow.
    Varmail,
    /// A file of 200 MiB that grows from nothing, made durable at its end.
    Append,
    /// 50 MiB, 4 KiB at random places of a file of 200 MiB, made durable at its end.
    Overwrite,
    /// A tree like the sources of a kernel, 6,000 files, made durable at its end.
    Untar,
    /// Small files by the thousand that come, change and go; nobody asks for anything to be durable.
    Postmark,
}

impl Load {
    /// All of them.
    pub(super) const ALL: [Self; 10] = [
        Self::Fsync,
        Self::Sqlite,
        Self::SqliteWal,
        Self::Postgresql,
        Self::Rocksdb,
        Self::Varmail,
        Self::Append,
        Self::Overwrite,
        Self::Untar,
        Self::Postmark,
    ];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Fsync => "fsync",
            Self::Sqlite => "sqlite",
            Self::SqliteWal => "sqlite_wal",
            Self::Postgresql => "postgresql",
            Self::Rocksdb => "rocksdb",
            Self::Varmail => "varmail",
            Self::Append => "append",
            Self::Overwrite => "overwrite",
            Self::Untar => "untar",
            Self::Postmark => "postmark",
        }
    }

    /// What its latencies are of, in its tool's words; those that tell none have no such words.
    pub(super) fn operation(self) -> &'static str {
        match self {
            Self::Fsync | Self::Varmail => "fsync",
            Self::Sqlite | Self::SqliteWal | Self::Postgresql => "transaction",
            Self::Rocksdb => "write",
            Self::Append | Self::Overwrite | Self::Untar | Self::Postmark => "operation",
        }
    }

    pub(super) fn programs(self) -> &'static [&'static str] {
        match self {
            Self::Sqlite | Self::SqliteWal => &["sqlite3"],
            Self::Postgresql => &["postgresql"],
            Self::Rocksdb => &["db_bench"],
            Self::Postmark => &["postmark"],
            Self::Fsync | Self::Varmail | Self::Append | Self::Overwrite | Self::Untar => &[],
        }
    }

    /// What the host would have to have installed for it, if it has not: these are large, and nobody needs them but for this.
    fn uninstalled(self) -> Option<&'static str> {
        match self {
            Self::Postgresql if guest_kit::assets::postgresql_version().is_none() => {
                Some("PostgreSQL is not installed (package postgresql)")
            }
            Self::Rocksdb if guest_kit::program::find_program("db_bench").is_err() => {
                Some("db_bench is not installed (package rocksdb-tools)")
            }
            _ => None,
        }
    }

    /// The operations whose latencies are told.
    pub(super) fn operations(self, quick: bool, rounds: u32) -> Option<u64> {
        let one = match self {
            Self::Fsync => FSYNC_MIB.of(quick) * 256,
            Self::Sqlite | Self::SqliteWal => SQLITE_TRANSACTIONS.of(quick),
            Self::Postgresql => POSTGRESQL_TRANSACTIONS.of(quick),
            Self::Rocksdb => ROCKSDB_WRITES.of(quick),
            // A flow has two.
            Self::Varmail => VARMAIL_FLOWS.of(quick) * 2,
            Self::Append | Self::Overwrite | Self::Untar | Self::Postmark => return None,
        };
        Some(one * u64::from(rounds))
    }

    /// What it does and how much of it, in words. Those that begin with their files go on for all rounds; the others begin anew.
    pub(super) fn in_words(self, quick: bool, rounds: u32) -> String {
        let one = self.of_one_round_in_words(quick, if self.goes_on() { rounds } else { 1 });
        let kept = match self {
            _ if rounds == 1 => return one,
            Self::Overwrite => "at other places",
            Self::Append | Self::Untar => "in a new directory, the one before being removed",
            Self::Postmark => "on its own files, which it removes",
            _ => return format!("{one}; these are {rounds} rounds on end"),
        };
        format!("{one}; {rounds} rounds on end, each {kept}")
    }

    /// Whether its rounds are one longer run.
    fn goes_on(self) -> bool {
        self.operations(true, 1).is_some()
    }

    fn of_one_round_in_words(self, quick: bool, rounds: u32) -> String {
        let of = |size: Size| size.of(quick) * u64::from(rounds);
        match self {
            Self::Fsync => {
                format!("{} MiB, 4 KiB at random places of a file of 64 MiB, fdatasync after each", of(FSYNC_MIB))
            }
            Self::Sqlite | Self::SqliteWal => {
                let journal = if self == Self::Sqlite { "rollback journal" } else { "write-ahead log" };
                format!("{} transactions of TPC-B on 10,000 accounts, {journal}", of(SQLITE_TRANSACTIONS))
            }
            Self::Postgresql => format!(
                "pgbench: {} transactions of TPC-B on 100,000 accounts, 4 clients, with the server's start, a look at its sums and its checkpoint at the end",
                of(POSTGRESQL_TRANSACTIONS)
            ),
            Self::Rocksdb => {
                format!(
                    "db_bench: {} writes of 100 bytes, its write-ahead log made durable after each",
                    of(ROCKSDB_WRITES)
                )
            }
            Self::Varmail => format!("filebench varmail: 1,000 files, 16 threads, {} flows", of(VARMAIL_FLOWS)),
            Self::Append => format!("a file of {} MiB that grows from nothing, then sync", of(LARGE_MIB)),
            Self::Overwrite => {
                let [part, all] = [OVERWRITE_MIB, LARGE_MIB].map(of);
                format!("{part} MiB, 4 KiB at random places of a file of {all} MiB, then sync")
            }
            Self::Untar => format!("{} files like a kernel's sources, then sync", of(UNTAR_FILES)),
            Self::Postmark => {
                let [files, directories, transactions] = POSTMARK.map(of);
                format!(
                    "{files} files of 500 to 9,800 bytes in {directories} directories, {transactions} transactions, then sync"
                )
            }
        }
    }

    /// Shell lines behind all clocks that fail where the load did not do its work though its program ended well.
    pub(super) fn check(self) -> &'static str {
        match self {
            // It tells of errors, and ends with 0.
            Self::Postmark => {
                "for told in /tmp/postmark.*; do
             ! grep -q Error: $told || fail postmark: $(grep -m 1 Error: $told)
             grep -q ' deleted ' $told || fail postmark told no result
         done"
            }
            _ => "",
        }
    }

    /// Shell lines before the clock starts, and on it. What has operations goes on for all rounds, on the files that it began with; what is a whole is
    /// done anew in each, in a directory of its own, and the one before is removed then.
    pub(super) fn lines(self, quick: bool, rounds: u32) -> (String, String) {
        let of = |size: Size| size.of(quick);
        let all_rounds = |size: Size| of(size) * u64::from(rounds);
        let sqlite = |journal: &str| {
            let words =
                format!("guest-tools sqlite --directory /mnt/work --journal {journal} --seed 1 --accounts 10000");
            (
                format!("{words} --phase create"),
                format!("{words} --phase run --transactions {}", all_rounds(SQLITE_TRANSACTIONS)),
            )
        };
        // Its time is all that these tell.
        let whole = |work: String, words_to: &str| {
            format!(
                "{{
             round=1
             while [ $round -le {rounds} ]; do
                 rm -rf /mnt/work/round-$((round - 1))
                 mkdir /mnt/work/round-$round
                 {work} >{words_to}
                 sync
                 round=$((round + 1))
             done
             echo phase=run
         }}"
            )
        };
        let large = of(LARGE_MIB);
        match self {
            Self::Append => {
                let file = "/mnt/work/round-$round/file";
                (String::new(), whole(format!("guest-tools append --file {file} --mib {large} --sync"), NOWHERE))
            }
            Self::Overwrite => (
                format!("guest-tools append --file /mnt/work/file --mib {large} --sync >/dev/null"),
                whole(
                    format!(
                        "guest-tools randwrite --file /mnt/work/file --existing --file-mib {large} --mib {} --seed $round",
                        of(OVERWRITE_MIB)
                    ),
                    NOWHERE,
                ),
            ),
            Self::Untar => (
                String::new(),
                whole(
                    format!(
                        "guest-tools untar --directory /mnt/work/round-$round/tree --seed $round --files {}",
                        of(UNTAR_FILES)
                    ),
                    NOWHERE,
                ),
            ),
            Self::Postmark => {
                let [files, directories, transactions] = POSTMARK.map(of);
                let work = workload::postmark(1, files, directories, transactions, "500 9800");
                (String::new(), whole(work, "/tmp/postmark.$round 2>&1"))
            }
            Self::Fsync => (
                "guest-tools append --file /mnt/work/file --mib 64 --sync >/dev/null".to_owned(),
                format!(
                    "guest-tools randwrite --file /mnt/work/file --existing --file-mib 64 --mib {} --fsync-every 1 --seed 1",
                    all_rounds(FSYNC_MIB)
                ),
            ),
            Self::Sqlite => sqlite("delete"),
            Self::SqliteWal => sqlite("wal"),
            Self::Postgresql => {
                let words = "guest-tools postgresql --directory /mnt/work/cluster";
                (
                    format!("{words} --phase create"),
                    format!("{words} --phase run --transactions {}", all_rounds(POSTGRESQL_TRANSACTIONS)),
                )
            }
            Self::Rocksdb => (
                String::new(),
                format!("guest-tools rocksdb --directory /mnt/work/rocksdb --writes {}", all_rounds(ROCKSDB_WRITES)),
            ),
            Self::Varmail => {
                let words =
                    "guest-tools filebench --personality varmail --directory /mnt/work/set --seed 1 --files 1000";
                (
                    format!("{words} --phase create"),
                    format!("{words} --phase run --flows {}", all_rounds(VARMAIL_FLOWS)),
                )
            }
        }
    }
}

const NOWHERE: &str = "/dev/null";

/// How many rounds each load has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Rounds {
    all: u32,
    of: Vec<(Load, u32)>,
}

impl Rounds {
    /// Of words such as "20" and "sqlite=4": so many of every load, but of that one so many.
    pub(super) fn parse(words: &[String]) -> Result<Self> {
        let mut rounds = Rounds { all: 1, of: Vec::new() };
        for word in words {
            let refused = || {
                Error::NotOfShootOut(format!(
                    "rounds '{word}'; they are a number from 1 to {ROUNDS_MAX}, for all loads, or LOAD=NUMBER"
                ))
            };
            let (load, number) =
                word.split_once('=').map_or((None, word.as_str()), |(load, number)| (Some(load), number));
            let number = number.parse().ok().filter(|number| (1..=ROUNDS_MAX).contains(number)).ok_or_else(refused)?;
            match load {
                None => rounds.all = number,
                Some(name) => {
                    let load = Load::ALL.into_iter().find(|load| load.name() == name).ok_or_else(refused)?;
                    rounds.of.push((load, number));
                }
            }
        }
        Ok(rounds)
    }

    pub(super) fn of(&self, load: Load) -> u32 {
        self.of.iter().rev().find(|(of, _)| *of == load).map_or(self.all, |(_, number)| *number)
    }
}

const ROUNDS_MAX: u32 = 1000;

/// How much of a load there is.
#[derive(Clone, Copy)]
struct Size {
    full: u64,
    quick: u64,
}

impl Size {
    fn of(self, quick: bool) -> u64 {
        if quick { self.quick } else { self.full }
    }
}

const FSYNC_MIB: Size = Size { full: 16, quick: 1 };
const SQLITE_TRANSACTIONS: Size = Size { full: 3000, quick: 60 };
const POSTGRESQL_TRANSACTIONS: Size = Size { full: 4000, quick: 40 };
const ROCKSDB_WRITES: Size = Size { full: 4000, quick: 60 };
const VARMAIL_FLOWS: Size = Size { full: 2500, quick: 60 };
const LARGE_MIB: Size = Size { full: 200, quick: 8 };
const OVERWRITE_MIB: Size = Size { full: 50, quick: 2 };
const UNTAR_FILES: Size = Size { full: 6000, quick: 100 };
/// Files, directories, transactions.
const POSTMARK: [Size; 3] =
    [Size { full: 5000, quick: 100 }, Size { full: 100, quick: 4 }, Size { full: 12_500, quick: 200 }];

/// What dies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Death {
    /// The guest's kernel, at once.
    Guest,
    /// The VMM, and amberlog with it, by `kill -9`.
    Vmm,
    /// The host: those, its memory, and what the medium had not been told to flush.
    Host,
}

impl Death {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Guest, Self::Vmm, Self::Host];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Guest => "guest-dies",
            Self::Vmm => "vmm-dies",
            Self::Host => "host-dies",
        }
    }
}

/// Loads of these names, or all; and why others are left out.
pub(super) fn chosen(names: &[String]) -> Result<(Vec<Load>, Vec<String>)> {
    let find = |name: &String| {
        let all = Load::ALL.map(Load::name).join(", ");
        let found = Load::ALL.into_iter().find(|load| load.name() == name);
        found.ok_or_else(|| Error::NotOfShootOut(format!("load '{name}'; there are {all}")))
    };
    let wanted = if names.is_empty() { Load::ALL.to_vec() } else { names.iter().map(find).collect::<Result<_>>()? };
    let absent = wanted.iter().filter_map(|load| Some(format!("{}: {}", load.name(), load.uninstalled()?))).collect();
    Ok((wanted.into_iter().filter(|load| load.uninstalled().is_none()).collect(), absent))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_are_of_all_loads_or_of_one() {
        let of = |words: &[&str]| Rounds::parse(&words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>());
        let all = |rounds: &Rounds| [Load::Fsync, Load::Sqlite].map(|load| rounds.of(load));
        assert_eq!(all(&of(&[]).unwrap()), [1, 1]);
        assert_eq!(all(&of(&["sqlite=4", "20"]).unwrap()), [20, 4]);
        for wrong in ["0", "1001", "x", "zfs=3", "sqlite=", "sqlite=0"] {
            let told = of(&[wrong]).unwrap_err().to_string();
            assert!(told.contains(&format!("'{wrong}'")) && told.contains("LOAD=NUMBER"), "{told}");
        }
    }

    /// Loads were over in less time than a contender takes to make anything durable by age.
    #[test]
    fn rounds_are_so_many_times_the_work() {
        for load in Load::ALL {
            let ((begins, once), (begins_too, thrice)) = (load.lines(false, 1), load.lines(false, 3));
            assert_eq!(begins, begins_too, "{}: it begins with the same", load.name());
            if load.goes_on() {
                let number = |lines: &str| -> u64 {
                    let most = lines
                        .split_whitespace()
                        .zip(lines.split_whitespace().skip(1))
                        .find(|(name, _)| ["--mib", "--transactions", "--writes", "--flows"].contains(name));
                    most.unwrap().1.parse().unwrap()
                };
                assert_eq!(number(&thrice), 3 * number(&once), "{}", load.name());
                assert_eq!(load.operations(false, 3), load.operations(false, 1).map(|one| 3 * one));
            } else {
                assert!(once.contains("-le 1 ]") && thrice.contains("-le 3 ]"), "{thrice}");
                assert!(thrice.contains("rm -rf /mnt/work/round-$((round - 1))"), "{thrice}");
            }
            assert!(load.in_words(false, 3).contains("3 rounds on end"), "{}", load.in_words(false, 3));
            assert!(!load.in_words(false, 1).contains("round"), "{}", load.in_words(false, 1));
        }
    }
}
