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
    pub(super) const ALL: [Self; 8] = [
        Self::Fsync,
        Self::Sqlite,
        Self::SqliteWal,
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
            Self::Sqlite | Self::SqliteWal => "transaction",
            Self::Append | Self::Overwrite | Self::Untar | Self::Postmark => "operation",
        }
    }

    pub(super) fn programs(self) -> &'static [&'static str] {
        match self {
            Self::Sqlite | Self::SqliteWal => &["sqlite3"],
            Self::Postmark => &["postmark"],
            Self::Fsync | Self::Varmail | Self::Append | Self::Overwrite | Self::Untar => &[],
        }
    }

    /// Shell lines before the clock starts, and on it.
    pub(super) fn lines(self, quick: bool) -> (String, String) {
        let count = |full: u64, small: u64| if quick { small } else { full };
        let sqlite = |journal: &str| {
            let words =
                format!("guest-tools sqlite --directory /mnt/work --journal {journal} --seed 1 --accounts 10000");
            (format!("{words} --phase create"), format!("{words} --phase run --transactions {}", count(3000, 60)))
        };
        // Its time is all that these tell.
        let whole = |work: String| format!("{{ {work} >/dev/null; sync; echo phase=run; }}");
        let large = count(200, 8);
        match self {
            Self::Append => {
                (String::new(), whole(format!("guest-tools append --file /mnt/work/file --mib {large} --sync")))
            }
            Self::Overwrite => (
                format!("guest-tools append --file /mnt/work/file --mib {large} --sync >/dev/null"),
                whole(format!(
                    "guest-tools randwrite --file /mnt/work/file --existing --file-mib {large} --mib {} --seed 1",
                    count(50, 2)
                )),
            ),
            Self::Untar => (
                String::new(),
                whole(format!("guest-tools untar --directory /mnt/work/tree --seed 1 --files {}", count(6000, 100))),
            ),
            Self::Postmark => {
                let [files, directories, transactions] =
                    [(5000, 100), (100, 4), (12_500, 200)].map(|(a, b)| count(a, b));
                (String::new(), whole(workload::postmark(1, files, directories, transactions, "500 9800")))
            }
            Self::Fsync => (
                "guest-tools append --file /mnt/work/file --mib 64 --sync >/dev/null".to_owned(),
                format!(
                    "guest-tools randwrite --file /mnt/work/file --existing --file-mib 64 --mib {} --fsync-every 1 --seed 1",
                    count(16, 1)
                ),
            ),
            Self::Sqlite => sqlite("delete"),
            Self::SqliteWal => sqlite("wal"),
            Self::Varmail => {
                let words =
                    "guest-tools filebench --personality varmail --directory /mnt/work/set --seed 1 --files 1000";
                (format!("{words} --phase create"), format!("{words} --phase run --flows {}", count(2500, 60)))
            }
        }
    }
}

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

pub(super) fn chosen(names: &[String]) -> Result<Vec<Load>> {
    let find = |name: &String| {
        let all = Load::ALL.map(Load::name).join(", ");
        let found = Load::ALL.into_iter().find(|load| load.name() == name);
        found.ok_or_else(|| Error::NotOfShootOut(format!("load '{name}'; there are {all}")))
    };
    if names.is_empty() { Ok(Load::ALL.to_vec()) } else { names.iter().map(find).collect() }
}
