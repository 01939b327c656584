//! The load that crash tests, rounds and the demo put on a guest's disk: postmark beside our own
//! tools, whose acknowledged work can be checked in the recovered image.
//!
//! Failure story: lost work is not an error of this module but its answer, as sentences.

use crate::error::Result;
use crate::evidence::{self, Order, RecordLayout, Table, TreeVerdict};
use crate::image::FileSystem;
use crate::report::{Acknowledged, Reported};
use guest_tools::random::Random;
use guest_tools::report::DAMAGED;

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
    is_read_back: bool,
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
/// On these the guest says how much it has read, with [`Workload::read_back`]: records, records, and times of the memory beside them.
pub const READERS: [&str; 3] = ["records-read-back", "log-read-back", "memory"];
const TABLE_PAGES: u64 = 200;

impl Workload {
    /// A load on the file system of `/dev/vda`, mounted with data=journal, with postmark.
    pub fn new(seed: u64) -> Self {
        Self { seed, mode: Mode::Journal, mount: "/dev/vda".to_owned(), postmark: true, is_read_back: false }
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

    /// Records are also read back while the guest runs, and a program beside them writes and reads memory: see [`damage`].
    #[must_use]
    pub fn read_back(mut self) -> Self {
        self.is_read_back = true;
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
        let (read_back, memory) = if self.is_read_back {
            ("--read-back", format!("guest-tools memory --seed {seed} &"))
        } else {
            ("", String::new())
        };
        format!(
            "mount -t ext4 -o data={mode} {mount} /mnt || fail mount
             if [ -e /mnt/records ]; then
                 mark back again
                 exit 0
             fi
             {postmark}
             guest-tools records --directory /mnt/records --stream records {read_back} --forever {records} &
             guest-tools records --directory /mnt/log --stream log --sync fdatasync {read_back} --forever {log} &
             guest-tools mix --directory /mnt/mix --seed {seed} --forever &
             guest-tools database --directory /mnt/database --seed {seed} --pages {TABLE_PAGES} --forever &
             {memory}
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

/// What a guest has read, while it ran, that was not what it had written.
pub fn damage(reported: &Reported) -> Vec<String> {
    let damaged = reported.marks.iter().filter_map(|mark| mark.strip_prefix(DAMAGED));
    damaged.map(|what| format!("the guest read what it had not written:{what}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_that_reads_what_it_did_not_write_is_believed() {
        let marks = ["back again", "damaged: memory of a program: page 3 is zeroes"].map(str::to_owned).to_vec();
        let reported = Reported { marks, ..Reported::default() };
        let expected = "the guest read what it had not written: memory of a program: page 3 is zeroes";
        assert_eq!(damage(&reported), [expected]);
        let script = Workload::new(1).read_back().script();
        assert_eq!(script.matches("--read-back").count(), 2, "{script}");
        assert!(script.contains("guest-tools memory --seed 1 &"), "{script}");
        let script = Workload::new(1).script();
        assert!(!script.contains("--read-back") && !script.contains("guest-tools memory"), "{script}");
    }
}
