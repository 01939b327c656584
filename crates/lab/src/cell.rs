//! One measurement: which mode, how many guests, which disk and parameter, and which iteration.

use serde::{Deserialize, Serialize};
use std::fmt;

/// How the guests' file system is journalled, and where the journal lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// data=writeback, journal on storage.
    Writeback,
    /// data=ordered, journal on storage.
    Ordered,
    /// data=journal, journal on storage.
    Journal,
    /// data=journal without flushes in the guest: what the papers' kernels did; on a drive with a cache no crash safety.
    #[serde(rename = "journal-nobarrier")]
    JournalNoBarrier,
    /// data=journal, journal retained in guest memory: VMA journaling.
    Vma,
    /// VMA journaling as published: as `vma`, and nothing is copied that can stay in the guest's page, whatever is expected of it.
    #[serde(rename = "vma-published")]
    VmaPublished,
    /// VMA journaling as `retain` is by default: as `vma`, and by the rule for what is copied that users get.
    #[serde(rename = "vma-lone")]
    VmaLone,
    /// data=ordered, journal retained: VMA journaling for metadata alone (the 2012 paper's section 6.2).
    #[serde(rename = "vma-ordered")]
    VmaOrdered,
    /// data=writeback, journal retained.
    #[serde(rename = "vma-writeback")]
    VmaWriteback,
    /// data=journal, journal writes dropped: the papers' upper bound, without crash safety.
    Bound,
    /// data=journal, external journal on a tmpfs file of the host: today's way.
    Tmpfs,
    /// The same, the memory slowed to that of the NJS paper: its "Journal on Ramdisk".
    #[serde(rename = "tmpfs-slowed")]
    TmpfsSlowed,
    /// data=journal, journal copied to host memory.
    Copy,
    /// data=journal, journal kept as NJS does on a region of (slowed) memory that stands for persistent memory.
    Nvm,
    /// NJS as published: as `nvm`, all appends home at once, and nothing before the region is three fourths full.
    Njs,
    /// NJS-no-BJ as published: as `njs`, every version written whole.
    #[serde(rename = "njs-no-bj")]
    NjsNoByteLevel,
    /// NJS-no-DC as published: as `njs`, the guest's checkpoints not delayed.
    #[serde(rename = "njs-no-dc")]
    NjsNoDelayedCheckpoint,
    /// NJS-all-journal as published: as `njs`, all appends logged.
    #[serde(rename = "njs-all-journal")]
    NjsLogEverything,
    /// NJS-no-BJ: as `nvm`, every version written whole.
    #[serde(rename = "nvm-no-bj")]
    NvmNoByteLevel,
    /// NJS-no-DC: as `nvm`, the guest's checkpoints not delayed.
    #[serde(rename = "nvm-no-dc")]
    NvmNoDelayedCheckpoint,
    /// As `nvm`, many appends logged where that takes less time, and sent home in the background.
    #[serde(rename = "nvm-auto")]
    NvmByCost,
    /// As `nvm`, a transaction acknowledged before the flush of its appends: a loss of power may cost the last one.
    #[serde(rename = "nvm-pipelined")]
    NvmPipelined,
    /// NJS-all-journal: as `nvm`, appends logged too.
    #[serde(rename = "nvm-all-journal")]
    NvmLogEverything,
    /// A file system without a journal.
    NoJournal,
    /// data=journal, external journal on a RAM disk in the guest's own memory: RAM-disk journaling as in the papers.
    Ramdisk,
    /// data=writeback, journal writes dropped.
    #[serde(rename = "bound-writeback")]
    BoundWriteback,
    /// data=ordered, journal writes dropped.
    #[serde(rename = "bound-ordered")]
    BoundOrdered,
    /// data=writeback, journal shipped to a journal server.
    #[serde(rename = "remote-writeback")]
    RemoteWriteback,
    /// data=ordered, journal shipped to a journal server.
    #[serde(rename = "remote-ordered")]
    RemoteOrdered,
    /// data=journal, journal shipped to a journal server.
    #[serde(rename = "remote-journal")]
    RemoteJournal,
}

impl Mode {
    /// All of them.
    pub const ALL: [Self; 30] = [
        Self::Writeback,
        Self::Ordered,
        Self::Journal,
        Self::JournalNoBarrier,
        Self::Vma,
        Self::VmaPublished,
        Self::VmaLone,
        Self::VmaOrdered,
        Self::VmaWriteback,
        Self::Bound,
        Self::Tmpfs,
        Self::TmpfsSlowed,
        Self::Copy,
        Self::Nvm,
        Self::Njs,
        Self::NjsNoByteLevel,
        Self::NjsNoDelayedCheckpoint,
        Self::NjsLogEverything,
        Self::NvmNoByteLevel,
        Self::NvmNoDelayedCheckpoint,
        Self::NvmByCost,
        Self::NvmPipelined,
        Self::NvmLogEverything,
        Self::NoJournal,
        Self::Ramdisk,
        Self::BoundWriteback,
        Self::BoundOrdered,
        Self::RemoteWriteback,
        Self::RemoteOrdered,
        Self::RemoteJournal,
    ];

    /// Its name in descriptions, tables and files.
    pub fn name(self) -> &'static str {
        match self {
            Self::Writeback => "writeback",
            Self::Ordered => "ordered",
            Self::Journal => "journal",
            Self::JournalNoBarrier => "journal-nobarrier",
            Self::Vma => "vma",
            Self::VmaPublished => "vma-published",
            Self::VmaLone => "vma-lone",
            Self::VmaOrdered => "vma-ordered",
            Self::VmaWriteback => "vma-writeback",
            Self::TmpfsSlowed => "tmpfs-slowed",
            Self::Njs => "njs",
            Self::NjsNoByteLevel => "njs-no-bj",
            Self::NjsNoDelayedCheckpoint => "njs-no-dc",
            Self::NjsLogEverything => "njs-all-journal",
            Self::Bound => "bound",
            Self::Tmpfs => "tmpfs",
            Self::Copy => "copy",
            Self::Nvm => "nvm",
            Self::NvmNoByteLevel => "nvm-no-bj",
            Self::NvmNoDelayedCheckpoint => "nvm-no-dc",
            Self::NvmByCost => "nvm-auto",
            Self::NvmPipelined => "nvm-pipelined",
            Self::NvmLogEverything => "nvm-all-journal",
            Self::NoJournal => "nojournal",
            Self::Ramdisk => "ramdisk",
            Self::BoundWriteback => "bound-writeback",
            Self::BoundOrdered => "bound-ordered",
            Self::RemoteWriteback => "remote-writeback",
            Self::RemoteOrdered => "remote-ordered",
            Self::RemoteJournal => "remote-journal",
        }
    }

    /// The mode of that name.
    pub fn by_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|mode| mode.name() == name)
    }

    /// amberlog's placement of the journal, without its options.
    pub fn placement(self) -> &'static str {
        match self {
            Self::Writeback
            | Self::Ordered
            | Self::Journal
            | Self::JournalNoBarrier
            | Self::Tmpfs
            | Self::TmpfsSlowed
            | Self::NoJournal
            | Self::Ramdisk => "storage",
            Self::Vma | Self::VmaPublished | Self::VmaLone | Self::VmaOrdered | Self::VmaWriteback => "retain",
            Self::Bound | Self::BoundWriteback | Self::BoundOrdered => "discard",
            Self::Copy => "copy",
            Self::Nvm
            | Self::Njs
            | Self::NjsNoByteLevel
            | Self::NjsNoDelayedCheckpoint
            | Self::NjsLogEverything
            | Self::NvmNoByteLevel
            | Self::NvmNoDelayedCheckpoint
            | Self::NvmByCost
            | Self::NvmPipelined
            | Self::NvmLogEverything => "nvm",
            Self::RemoteWriteback | Self::RemoteOrdered | Self::RemoteJournal => "remote",
        }
    }

    /// For the modes on persistent memory: what amberlog's disk option says of NJS beyond the region's place and size.
    pub fn nvm_options(self) -> Option<&'static str> {
        match self {
            Self::Nvm => Some(""),
            Self::Njs => Some(",nvm-append-home=0,nvm-early-runs=0"),
            Self::NjsNoByteLevel => Some(",nvm-append-home=0,nvm-early-runs=0,nvm-byte-level=off"),
            Self::NjsNoDelayedCheckpoint => Some(",nvm-append-home=0,nvm-early-runs=0,nvm-delayed-checkpoint=off"),
            Self::NjsLogEverything => Some(",nvm-early-runs=0,nvm-log-everything"),
            Self::NvmNoByteLevel => Some(",nvm-byte-level=off"),
            Self::NvmNoDelayedCheckpoint => Some(",nvm-delayed-checkpoint=off"),
            Self::NvmByCost => Some(",nvm-append-home=auto"),
            Self::NvmPipelined => Some(",nvm-pipelined=on"),
            Self::NvmLogEverything => Some(",nvm-log-everything"),
            _ => None,
        }
    }

    /// For the modes that retain: which blocks are copied all the same.
    pub fn hot_pages(self) -> Option<&'static str> {
        match self {
            // As the papers have it: what can stay in the guest's pages does, as long as nothing speaks against that page.
            Self::Vma | Self::VmaOrdered | Self::VmaWriteback => Some("foreseen"),
            Self::VmaPublished => Some("never"),
            Self::VmaLone => Some("lone"),
            _ => None,
        }
    }

    /// Whether the journal is held in the guest's memory.
    pub fn is_retained(self) -> bool {
        self.placement() == "retain"
    }

    /// Whether the journal is on a device of its own, in the host's memory.
    pub fn has_journal_in_tmpfs(self) -> bool {
        matches!(self, Self::Tmpfs | Self::TmpfsSlowed)
    }

    /// Whether amberlog finds a journal on the data disk when the guest starts.
    pub fn has_journal_on_image(self) -> bool {
        !matches!(self, Self::NoJournal | Self::Ramdisk)
    }

    /// Options of the guest's mount. The bound's kernel asks for no flush, as the papers' did not: what has no journal has
    /// nothing that must come first.
    pub fn mount_options(self) -> &'static str {
        match self {
            Self::Writeback | Self::RemoteWriteback | Self::VmaWriteback => "data=writeback",
            Self::Ordered | Self::RemoteOrdered | Self::VmaOrdered => "data=ordered",
            Self::Tmpfs | Self::TmpfsSlowed => "data=journal,journal_path=/dev/vdb",
            Self::Ramdisk => "data=journal,journal_path=/dev/ram0",
            Self::NoJournal => "rw",
            Self::Bound | Self::JournalNoBarrier => "data=journal,barrier=0",
            Self::BoundWriteback => "data=writeback,barrier=0",
            Self::BoundOrdered => "data=ordered,barrier=0",
            Self::Journal
            | Self::Vma
            | Self::VmaPublished
            | Self::VmaLone
            | Self::Copy
            | Self::Nvm
            | Self::Njs
            | Self::NjsNoByteLevel
            | Self::NjsNoDelayedCheckpoint
            | Self::NjsLogEverything
            | Self::NvmNoByteLevel
            | Self::NvmNoDelayedCheckpoint
            | Self::NvmByCost
            | Self::NvmPipelined
            | Self::NvmLogEverything
            | Self::RemoteJournal => "data=journal",
        }
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// All iterations of this are averaged.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Group {
    /// The modelled disk.
    pub disk: String,
    /// The experiment's own parameter; 0 where it has none.
    pub parameter: u64,
    /// Guests at once.
    pub guests: u32,
    /// The workload.
    pub workload: String,
    /// The journaling mode.
    pub mode: Mode,
}

/// One measurement.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Cell {
    /// What it is one of.
    #[serde(flatten)]
    pub group: Group,
    /// Which one, from 0.
    pub iteration: u32,
}

impl Cell {
    /// The name of its file of raw results, without ending.
    pub fn file_name(&self) -> String {
        let Group { disk, parameter, guests, workload, mode } = &self.group;
        format!("{workload}-{mode}-{guests}-{disk}-{parameter}-{}", self.iteration)
    }
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Group { disk, parameter, guests, workload, mode } = &self.group;
        write!(f, "{workload}, {mode}, {guests} guest{}, {disk}", if *guests == 1 { "" } else { "s" })?;
        if *parameter != 0 {
            write!(f, ", {parameter}")?;
        }
        write!(f, ", iteration {}", self.iteration + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_the_same_in_texts_and_in_results() {
        for mode in Mode::ALL {
            assert_eq!(Mode::by_name(mode.name()), Some(mode));
            assert_eq!(serde_json::to_string(&mode).unwrap(), format!("\"{mode}\""));
            assert_eq!(mode.nvm_options().is_some(), mode.placement() == "nvm");
        }
    }

    /// What users get is measured by one mode, and the papers' rule is not it.
    #[test]
    fn one_mode_copies_as_users_have_it() {
        let rules = [Mode::Vma, Mode::VmaPublished, Mode::VmaLone].map(Mode::hot_pages);
        assert_eq!(rules, [Some("foreseen"), Some("never"), Some("lone")]);
        assert_eq!((Mode::VmaLone.placement(), Mode::VmaLone.mount_options()), ("retain", "data=journal"));
    }

    /// What may cost a transaction is in no mode that does not say so.
    #[test]
    fn a_transaction_is_acknowledged_before_its_flush_in_one_mode_alone() {
        for mode in Mode::ALL {
            let is_pipelined = mode.nvm_options().is_some_and(|options| options.contains("nvm-pipelined=on"));
            assert_eq!(is_pipelined, mode.name() == "nvm-pipelined", "{mode}");
        }
    }

    /// All of NJS that its paper measures, as it was published; what differs from amberlog's defaults does so in every one of them.
    #[test]
    fn njs_as_published_sends_all_appends_home_and_nothing_early() {
        for mode in Mode::ALL.into_iter().filter(|mode| mode.name().starts_with("njs")) {
            let options = mode.nvm_options().unwrap();
            assert!(options.contains(",nvm-early-runs=0"), "{mode}");
            assert!(options.contains(",nvm-append-home=0") != (mode == Mode::NjsLogEverything), "{mode}");
            let ours = Mode::by_name(&mode.name().replace("njs", "nvm")).unwrap().nvm_options().unwrap();
            assert!(options.ends_with(ours), "{mode}: {options}");
        }
    }
}
