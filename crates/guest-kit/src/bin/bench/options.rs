//! The command line of the bench, and the sizes that follow from it.

use guest_kit::program;
use std::path::PathBuf;

/// A part of the bench.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Bytes to storage and host memory, load by load.
    Space,
    /// fio: random writes, each made durable.
    Fsync,
    /// What a commit costs the host, without a guest.
    Commit,
    /// The plain data path against qemu-storage-daemon.
    DataPath,
    /// NJS on emulated persistent memory, against its paper's baseline.
    Nvm,
    /// The journal on a server, against its own disk and against NBD.
    Remote,
    /// What a guest sees of the death of the process that serves it.
    Pause,
    /// What a guest sees of its journals' going to storage.
    Moved,
    /// What its other disks see of a recovery of one.
    Recovered,
    /// What amberlog adds to the time in which a guest is moved to another host.
    Migration,
}

impl Stage {
    /// All of them, in the order in which they run.
    pub const ALL: [Self; 10] = [
        Self::Commit,
        Self::Fsync,
        Self::Space,
        Self::DataPath,
        Self::Pause,
        Self::Moved,
        Self::Recovered,
        Self::Migration,
        Self::Nvm,
        Self::Remote,
    ];

    /// Its word for `--only`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Space => "space",
            Self::Fsync => "fsync",
            Self::Commit => "commit",
            Self::DataPath => "data-path",
            Self::Nvm => "nvm",
            Self::Remote => "remote",
            Self::Pause => "pause",
            Self::Moved => "moved",
            Self::Recovered => "recovered",
            Self::Migration => "migration",
        }
    }
}

/// What is to be measured, and how large.
#[derive(Clone, Debug)]
pub struct Options {
    /// Small sizes; counters are judged, times are not.
    pub quick: bool,
    /// A missed figure is a failure.
    pub strict: bool,
    /// Where the results go as JSON.
    pub json: Option<PathBuf>,
    /// Where the images are: the storage that is measured on.
    pub directory: PathBuf,
    /// What runs.
    pub stages: Vec<Stage>,
    /// How often times are measured, in turns.
    pub rounds: u64,
    /// Of the loads of stages `nvm` and `remote`, those whose names begin so.
    pub load: String,
    /// The modelled drive of stage `nvm`.
    pub drive: String,
    /// Seconds that a second of it takes.
    pub time_scale: Option<u32>,
}

impl Options {
    /// Reads the command line.
    pub fn from_command_line() -> Result<Self, String> {
        let mut words = guest_tools::options::Options::parse(std::env::args().skip(1))?;
        let quick = words.flag("quick");
        let stages = match words.text("only") {
            None => Stage::ALL.to_vec(),
            Some(list) => list
                .split(',')
                .map(|word| {
                    Stage::ALL.into_iter().find(|stage| stage.name() == word).ok_or_else(|| {
                        format!("--only names '{word}'; it must be of {}", Stage::ALL.map(Stage::name).join(", "))
                    })
                })
                .collect::<Result<_, _>>()?,
        };
        let options = Self {
            quick,
            strict: words.flag("strict"),
            json: words.text("json").map(PathBuf::from),
            directory: words.text("dir").map_or_else(|| program::workspace().join("build/bench"), PathBuf::from),
            stages,
            load: words.text("load").unwrap_or_default(),
            drive: words.text("drive").unwrap_or_else(|| "hdd-7200".to_owned()),
            time_scale: match words.number("time-scale", 0, 0..=1000)? {
                0 => None,
                scale => u32::try_from(scale).ok(),
            },
            rounds: words.number("rounds", if quick { 1 } else { 5 }, 1..=100)?,
        };
        words.finish()?;
        Ok(options)
    }

    fn either<T>(&self, full: T, quick: T) -> T {
        if self.quick { quick } else { full }
    }

    /// The image of every guest.
    pub fn image_mib(&self) -> u32 {
        self.either(2048, 512)
    }

    /// Its journal; the papers' memory figure is for 128 MB.
    pub fn journal_mib(&self) -> u32 {
        self.either(128, 32)
    }

    /// The sequential append.
    pub fn append_mib(&self) -> u32 {
        self.either(600, 96)
    }

    /// Files of postmark, and its transactions.
    pub fn postmark(&self) -> (u32, u32) {
        self.either((1000, 20_000), (300, 2000))
    }

    /// Files of the tree that is unpacked.
    pub fn tree_files(&self) -> u32 {
        self.either(8000, 800)
    }

    /// How long fio writes, in seconds.
    pub fn fio_seconds(&self) -> u32 {
        self.either(15, 5)
    }
}
