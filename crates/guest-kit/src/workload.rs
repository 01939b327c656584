//! The load that crash tests, rounds and the demo put on a guest's disk: postmark beside our own
//! tools, whose acknowledged work can be checked in the recovered image.
//!
//! Failure story: lost work is not an error of this module but its answer, as sentences.

use crate::error::Result;
use crate::evidence::{self, Order, RecordLayout, Table, TreeVerdict};
use crate::image::FileSystem;
use crate::report::{Acknowledged, Reported};
use guest_tools::random::Random;

/// How a file system is mounted; what is promised after a crash follows from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// data=journal.
    Journal,
    /// data=ordered.
    Ordered,
    /// data=writeback.
    Writeback,
}

impl Mode {
    /// The word of the mount option.
    pub fn name(self) -> &'static str {
        match self {
            Self::Journal => "journal",
            Self::Ordered => "ordered",
            Self::Writeback => "writeback",
        }
    }
}

/// A load without end, everything about it following from its seed.
#[derive(Clone, Debug)]
pub struct Workload {
    seed: u64,
    mode: Mode,
    mount: String,
    postmark: bool,
}

/// What was found of a guest's work.
#[derive(Clone, Debug, Default)]
pub struct Evidence {
    /// How much was acknowledged: records, operations and transactions.
    pub acknowledged: u64,
    /// What of it is missing or damaged.
    pub faults: Vec<String>,
}

/// The streams that the load acknowledges on.
pub const STREAMS: [&str; 4] = ["records", "log", "mix", "database"];
const TABLE_PAGES: u64 = 200;

impl Workload {
    /// A load on the file system of `/dev/vda`, mounted with data=journal, with postmark.
    pub fn new(seed: u64) -> Self {
        Self { seed, mode: Mode::Journal, mount: "/dev/vda".to_owned(), postmark: true }
    }

    /// With another journaling mode.
    #[must_use]
    pub fn mode(mut self, mode: Mode) -> Self {
        self.mode = mode;
        self
    }

    /// On another device; further mount options may come first: `-o journal_path=/dev/vdb /dev/vda`.
    #[must_use]
    pub fn device(mut self, words: &str) -> Self {
        self.mount = words.to_owned();
        self
    }

    /// Without postmark, whose appetite makes everything else slow.
    #[must_use]
    pub fn without_postmark(mut self) -> Self {
        self.postmark = false;
        self
    }

    /// The layout of the overwritten records.
    pub fn records(&self) -> RecordLayout {
        let slots = 20 + Random::of(self.seed, 1).below(40);
        RecordLayout { files: 3, order: Order::Overwrite { slots }, seed: self.seed, ..RecordLayout::default() }
    }

    /// The layout of the appended records.
    pub fn log(&self) -> RecordLayout {
        RecordLayout { record_bytes: 3072, seed: self.seed, ..RecordLayout::default() }
    }

    fn table(&self) -> Table {
        Table { seed: self.seed, pages: TABLE_PAGES }
    }

    /// The guest's script: mounts, starts everything, and never ends by itself. When it finds its
    /// own work of an earlier boot, it touches nothing and tells the mark `back again`.
    pub fn script(&self) -> String {
        let seed = self.seed;
        let postmark = if self.postmark {
            "mkdir -p /mnt/postmark
             printf 'set location /mnt/postmark\\nset seed 7\\nset number 200\\nset transactions 1000000\\nrun\\n' |
                 postmark >/dev/null &"
        } else {
            ""
        };
        format!(
            "mount -t ext4 -o data={mode} {mount} /mnt || fail mount
             if [ -e /mnt/records ]; then
                 mark back again
                 exit 0
             fi
             {postmark}
             guest-tools records --directory /mnt/records --stream records --forever {records} &
             guest-tools records --directory /mnt/log --stream log --sync fdatasync --forever {log} &
             guest-tools mix --directory /mnt/mix --seed {seed} --forever &
             guest-tools database --directory /mnt/database --seed {seed} --pages {TABLE_PAGES} --forever &
             wait",
            mode = self.mode.name(),
            mount = self.mount,
            records = self.records().to_options(),
            log = self.log().to_options(),
        )
    }

    /// Looks for all acknowledged work in a recovered file system.
    pub fn check(&self, file_system: &FileSystem, reported: &Reported) -> Result<Evidence> {
        let mut evidence = Evidence::default();
        let acknowledged = |stream: &str| reported.acknowledged.get(stream).copied().unwrap_or_default();
        for stream in STREAMS {
            let Acknowledged { count, out_of_order, .. } = acknowledged(stream);
            evidence.acknowledged += count;
            if out_of_order > 0 {
                evidence.faults.push(format!("{stream}: {out_of_order} acknowledgements came out of order"));
            }
        }
        for (stream, layout) in [("records", self.records()), ("log", self.log())] {
            let verdict = evidence::records(file_system, &format!("/{stream}"), &layout, acknowledged(stream))?;
            for fault in &verdict.faults {
                evidence.faults.push(format!("{stream}: record {}: {}", fault.record, fault.found));
            }
        }
        if self.mode == Mode::Journal
            && let TreeVerdict::NoState(text) = evidence::mix(file_system, "/mix", self.seed, acknowledged("mix"))?
        {
            evidence.faults.push(format!("mix: {text}"));
        }
        if let Err(error) = evidence::database(file_system, "/database", self.table(), acknowledged("database")) {
            evidence.faults.push(format!("database: {error}"));
        }
        Ok(evidence)
    }
}
