//! The catalogue of what is recorded: a file system, a load whose work can be checked, and how it is mounted.
//!
//! A recording names its scenario; what the load acknowledged is checked by what is written here, so whoever changes a
//! load here has to record it again.

use crate::error::{Error, Result};
use guest_kit::evidence::{self, Order, RecordLayout, Table, TreeVerdict};
use guest_kit::image::{ExtRecipe, FileSystem, Journal};
use guest_kit::{Acknowledged, Reported};

/// What runs in the guest, beside a file of fsynced records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Load {
    /// Debian's postmark: small files created, appended to, read and deleted.
    Postmark,
    /// Transactions over a table of pages, through a write-ahead log, with checkpoints.
    Database,
    /// Renames, truncates, unlinks, links, directories, fsyncs.
    Mix,
    /// Files removed and holes punched, and their blocks written for other files at once, half of it with direct I/O.
    Reuse,
}

/// One entry of the catalogue.
#[derive(Clone, Copy, Debug)]
pub struct Scenario {
    /// Its name, and that of its recording.
    pub name: &'static str,
    load: Load,
    ext3: bool,
    /// Bytes of a block.
    pub block_bytes: u32,
    is_external: bool,
    /// Features beyond the usual, for `mke2fs -O`, …
    features: &'static [&'static str],
    /// … and further words for it.
    arguments: &'static [&'static str],
    /// Mount options.
    options: &'static str,
    /// Unmounted and mounted again half way.
    remounts: bool,
    /// Operations of the mix, or steps of the reuse.
    steps: u64,
    seed: u64,
}

const SCENARIO: Scenario = Scenario {
    name: "",
    load: Load::Mix,
    ext3: false,
    block_bytes: 4096,
    is_external: false,
    features: &[],
    arguments: &[],
    options: "data=journal",
    remounts: false,
    steps: 420,
    seed: 1,
};

const TABLE_PAGES: u64 = 60;
/// Fsynced records that are written.
const RECORDS: u64 = 24;

impl Scenario {
    /// All of them.
    pub const ALL: [Scenario; 13] = [
        Scenario { name: "postmark", load: Load::Postmark, seed: 11, ..SCENARIO },
        Scenario { name: "database", load: Load::Database, seed: 12, ..SCENARIO },
        Scenario { name: "mix", load: Load::Mix, remounts: true, seed: 13, ..SCENARIO },
        // Six groups, whose bitmaps lie together.
        Scenario {
            name: "mix-ordered",
            arguments: &["-g", "1024"],
            options: "data=ordered,discard",
            seed: 14,
            ..SCENARIO
        },
        Scenario { name: "mix-small-blocks", block_bytes: 1024, seed: 15, ..SCENARIO },
        Scenario { name: "postmark-ext3", load: Load::Postmark, ext3: true, block_bytes: 1024, seed: 16, ..SCENARIO },
        Scenario { name: "database-external", load: Load::Database, is_external: true, seed: 17, ..SCENARIO },
        // Each group with its own bitmaps.
        Scenario {
            name: "reuse-ordered",
            load: Load::Reuse,
            features: &["^flex_bg"],
            arguments: &["-g", "1024"],
            options: "data=ordered,discard",
            steps: 120,
            seed: 18,
            ..SCENARIO
        },
        Scenario {
            name: "reuse-writeback",
            load: Load::Reuse,
            options: "data=writeback",
            steps: 120,
            seed: 19,
            ..SCENARIO
        },
        Scenario {
            name: "postmark-ordered-ext3",
            load: Load::Postmark,
            ext3: true,
            block_bytes: 1024,
            options: "data=ordered",
            seed: 20,
            ..SCENARIO
        },
        // Every run of the tests plays each recording: from here on they are shorter.
        //
        // Without extents and checksums, and each of six groups with its own bitmaps.
        Scenario { name: "mix-ext3", ext3: true, arguments: &["-g", "1024"], steps: 210, seed: 21, ..SCENARIO },
        // A bit of a bitmap is four blocks, and there are three groups, of 512 clusters (which is what -g says here). Neither the reuse nor the
        // mix: both leave files on the list of orphans that are to be cut short, and e2fsck (1.47.0) does damage when it does that in clusters,
        // where the kernel does none.
        Scenario {
            name: "postmark-bigalloc",
            load: Load::Postmark,
            features: &["bigalloc"],
            arguments: &["-C", "16384", "-g", "512"],
            options: "data=ordered,discard",
            seed: 22,
            ..SCENARIO
        },
        // Blocks of data are in the journal, and revoked, before they are another file's.
        Scenario {
            name: "reuse-journal",
            load: Load::Reuse,
            arguments: &["-g", "1024"],
            options: "data=journal,discard",
            steps: 60,
            seed: 23,
            ..SCENARIO
        },
    ];

    /// The scenario of this name.
    ///
    /// # Errors
    /// When there is none.
    pub fn named(name: &str) -> Result<Scenario> {
        Self::ALL.into_iter().find(|scenario| scenario.name == name).ok_or_else(|| {
            let names: Vec<_> = Self::ALL.iter().map(|scenario| scenario.name).collect();
            Error::Other(format!("there is no scenario '{name}'; there are {}", names.join(", ")))
        })
    }

    /// Makes the file system; `journal` is where an external journal goes.
    ///
    /// # Errors
    /// When mke2fs does not work.
    pub fn make(&self, image: &std::path::Path, journal: &std::path::Path) -> Result<FileSystem> {
        let journal = if self.is_external {
            guest_kit::image::journal_device(journal, 8, self.block_bytes)?;
            Journal::External(journal.to_owned())
        } else {
            Journal::Internal(if self.block_bytes == 1024 { 1 } else { 4 })
        };
        let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect();
        let recipe = ExtRecipe {
            ext3: self.ext3,
            block_bytes: self.block_bytes,
            journal,
            features: words(self.features),
            arguments: words(self.arguments),
            ..ExtRecipe::ext4(24, 4)
        };
        Ok(recipe.make(image)?)
    }

    /// Whether its journal is on a disk of its own, the second.
    pub fn is_external(&self) -> bool {
        self.is_external
    }

    /// Whether data is journaled, so that what is overwritten is old or new, and never torn.
    pub fn journals_data(&self) -> bool {
        self.options.contains("data=journal")
    }

    fn records(&self) -> RecordLayout {
        RecordLayout { files: 2, order: Order::Overwrite { slots: 12 }, seed: self.seed, ..RecordLayout::default() }
    }

    fn table(&self) -> Table {
        Table { seed: self.seed, pages: TABLE_PAGES }
    }

    /// The guest's script; it marks "done" when it is.
    pub fn script(&self) -> String {
        let (seed, steps) = (self.seed, self.steps);
        let journal = if self.is_external { "journal_path=/dev/vdb," } else { "" };
        let mount = format!("mount -t ext4 -o {journal}{} /dev/vda /mnt || fail mount", self.options);
        let postmark = |set: &str| {
            format!(
                "mkdir -p /mnt/postmark
                 printf 'set location /mnt/postmark\\nset seed 7\\nset number 40\\nset size 500 6000\\n{set}run\\n' |
                     postmark >/dev/null &"
            )
        };
        let load = match self.load {
            Load::Postmark => postmark("set transactions 300\\n"),
            Load::Database => format!(
                "guest-tools database --directory /mnt/database --seed {seed} --pages {TABLE_PAGES} --count 26 \
                 --checkpoint 8 &"
            ),
            Load::Reuse => format!("guest-tools reuse --directory /mnt/reuse --seed {seed} --count {steps} &"),
            Load::Mix => format!("guest-tools mix --directory /mnt/mix --seed {seed} --count {steps} &"),
        };
        let records = format!(
            "guest-tools records --directory /mnt/records --stream records --count {RECORDS} {}",
            self.records().to_options()
        );
        let again = if self.remounts {
            format!("sync; umount /mnt; mark unmounted; {mount}; touch /mnt/again; sync; touch /mnt/more; sync")
        } else {
            String::new()
        };
        // Home writes soon and often, so that they mix with commits.
        format!(
            "echo 20 >/proc/sys/vm/dirty_writeback_centisecs
             echo 30 >/proc/sys/vm/dirty_expire_centisecs
             {mount}
             {load}
             {records}
             wait
             {again}
             mark done
             while true; do echo more >>/mnt/more; sync; sleep 0.1; done"
        )
    }

    /// What of the acknowledged work is not in a recovered file system, as sentences.
    ///
    /// # Errors
    /// When the image cannot be looked at.
    pub fn check(&self, file_system: &FileSystem, reported: &Reported) -> Result<Vec<String>> {
        self.check_work(file_system, reported, false)
    }

    /// The same after a power cut: data that is written in place, and not journaled, may be torn over what was there, as on any disk.
    ///
    /// # Errors
    /// When the image cannot be looked at.
    pub fn check_after_power_cut(&self, file_system: &FileSystem, reported: &Reported) -> Result<Vec<String>> {
        self.check_work(file_system, reported, !self.journals_data())
    }

    fn check_work(&self, file_system: &FileSystem, reported: &Reported, may_tear: bool) -> Result<Vec<String>> {
        let acknowledged = |stream: &str| reported.acknowledged.get(stream).copied().unwrap_or_default();
        let mut faults = Vec::new();
        let records: Acknowledged = acknowledged("records");
        if records.last.is_some() {
            let verdict = match may_tear {
                true => evidence::torn_records(file_system, "/records", &self.records(), records, RECORDS - 1)?,
                false => evidence::records(file_system, "/records", &self.records(), records)?,
            };
            faults.extend(verdict.faults.iter().map(|fault| format!("records: {}: {}", fault.record, fault.found)));
        }
        if self.load == Load::Mix
            && self.options.contains("journal")
            && let TreeVerdict::NoState(text) = evidence::mix(file_system, "/mix", self.seed, acknowledged("mix"))?
        {
            faults.push(format!("mix: {text}"));
        }
        if self.load == Load::Reuse {
            let may_be_stale = self.options.contains("writeback");
            let of_load = acknowledged("reuse");
            let found = evidence::reuse(file_system, "/reuse", self.seed, of_load, self.steps, may_be_stale)?;
            faults.extend(found.into_iter().map(|fault| format!("reuse: {fault}")));
        }
        if self.load == Load::Database
            && acknowledged("database").last.is_some()
            && let Err(error) = evidence::database(file_system, "/database", self.table(), acknowledged("database"))
        {
            faults.push(format!("database: {error}"));
        }
        Ok(faults)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recording::{Event, Kind, PAGE_BYTES, Recording};
    use std::collections::HashMap;
    use std::path::Path;

    /// `EXT4_FEATURE_INCOMPAT_EXTENTS` and `EXT4_FEATURE_INCOMPAT_FLEX_BG`.
    const EXTENTS: u32 = 0x40;
    const FLEX_BG: u32 = 0x200;
    const SECTOR: usize = 512;

    fn recording(scenario: &Scenario) -> Recording {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("recordings");
        Recording::load(&crate::explore::path(&directory, scenario.name)).expect("a recording")
    }

    /// The file system that the guest got.
    fn file_system(recording: &Recording) -> extfs::FileSystem {
        let mut base = vec![0; recording.disks[0].size_bytes as usize];
        for (block, content) in &recording.disks[0].base {
            let at = *block as usize * PAGE_BYTES;
            base[at..at + PAGE_BYTES].copy_from_slice(recording.content(*content));
        }
        extfs::discover(&base).expect("memory").pop().expect("a file system")
    }

    /// The step whose file has this sector (`guest-tools reuse`): each third word counts on from the step's.
    fn step_of(sector: &[u8]) -> Option<u64> {
        let word = |index: usize| {
            let bytes = sector[8 * index..8 * index + 8].try_into().expect("eight bytes");
            u64::from_le_bytes(bytes).wrapping_sub(index as u64)
        };
        let first = word(0);
        (first != 0 && (3..SECTOR / 8).step_by(3).all(|index| word(index) == first)).then(|| first - 1)
    }

    #[test]
    fn each_recording_has_the_file_system_of_its_scenario() {
        for scenario in Scenario::ALL {
            let (name, found) = (scenario.name, file_system(&recording(&scenario)));
            let superblock = &found.superblock;
            assert_eq!(superblock.block_size, scenario.block_bytes, "{name}: bytes of a block");
            assert_eq!(superblock.incompat & EXTENTS == 0, scenario.ext3, "{name}: extents");
            assert_eq!(superblock.cluster_blocks > 1, scenario.features.contains(&"bigalloc"), "{name}: clusters");
            let is_flexible = !scenario.ext3 && !scenario.features.contains(&"^flex_bg");
            assert_eq!(superblock.incompat & FLEX_BG != 0, is_flexible, "{name}: flexible groups");
            if let Some(words) = scenario.arguments.windows(2).find(|words| words[0] == "-g") {
                let bits = superblock.blocks_per_group / superblock.cluster_blocks;
                assert_eq!(bits.to_string(), words[1], "{name}: bits of a bitmap");
            }
            let is_external = matches!(found.journal, extfs::Journal::External { .. });
            assert_eq!(is_external, scenario.is_external, "{name}: where its journal is");
        }
    }

    #[test]
    fn every_mode_has_its_reuse_and_every_kind_of_file_system_its_load() {
        let is_there = |what: &str, is_it: &dyn Fn(&Scenario) -> bool| {
            assert!(Scenario::ALL.iter().any(is_it), "no scenario has {what}");
        };
        for mode in ["data=journal", "data=ordered", "data=writeback"] {
            is_there(mode, &|scenario| scenario.load == Load::Reuse && scenario.options.contains(mode));
        }
        for (ext3, block_bytes) in [(false, 1024), (false, 4096), (true, 1024), (true, 4096)] {
            let what = format!("ext3 ({ext3}) and blocks of {block_bytes} bytes");
            is_there(&what, &|scenario| (scenario.ext3, scenario.block_bytes) == (ext3, block_bytes));
        }
        is_there("clusters", &|scenario| scenario.features.contains(&"bigalloc"));
        is_there("discards of journaled data", &|scenario| {
            scenario.journals_data() && scenario.options.contains("discard")
        });
    }

    /// What the reuse is for: a block is one file's, and then another's.
    #[test]
    fn blocks_change_hands_in_each_recording_of_reuse() {
        for scenario in Scenario::ALL.into_iter().filter(|scenario| scenario.load == Load::Reuse) {
            let recording = recording(&scenario);
            let found = file_system(&recording);
            let journal = found.journal.extents(&found.superblock);
            let block_bytes = u64::from(found.superblock.block_size);
            let (mut owners, mut changed) = (HashMap::new(), 0);
            for event in &recording.events {
                let Event::Issue(issue) = event else { continue };
                if issue.kind != Kind::Write {
                    continue;
                }
                let bytes = recording.bytes_of(issue);
                for (at, sector) in (issue.offset..).step_by(SECTOR).zip(bytes.chunks_exact(SECTOR)) {
                    let block = at / block_bytes;
                    if at % block_bytes != 0 || extfs::is_inside(&journal, block) {
                        continue;
                    }
                    if let Some(step) = step_of(sector).filter(|step| *step < scenario.steps) {
                        changed += u64::from(owners.insert(block, step).is_some_and(|before| before != step));
                    }
                }
            }
            assert!(changed >= 10, "{}: only {changed} blocks are another file's later", scenario.name);
        }
    }
}
