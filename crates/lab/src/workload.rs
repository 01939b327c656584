//! The workloads, as shell lines for a guest: sizes are the papers', times a scale.

/// What runs in the guests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Workload {
    /// filebench: 600 MB appended, 8 KB at a time.
    SeqWrite,
    /// filebench: 128 MB in 4 KB writes at random places of a 512 MB file.
    RndWrite,
    /// filebench: 40,000 files of 16 KB in 100 directories, deleted by 16 threads; their creation is not on the clock.
    FileDelete,
    /// Debian's postmark: 10,000 files in 200 directories, 25,000 transactions.
    Postmark,
    /// A tree like Linux 2.6.11's sources: 17,090 files in 1,083 directories, 231 MB.
    Untar,
    /// What compiling a kernel does to the disk, the compiler's work being a pause: 900 units, 25 MB of objects.
    KernelCompile,
    /// filebench: a mail server, two fsyncs a flow.
    Varmail,
    /// filebench: a file server, without fsync.
    Fileserver,
    /// Transactions with a write-ahead log, as SQLite's: an fdatasync each, a checkpoint every 50.
    Database,
    /// Records of a database file updated in place, without fsync.
    Updates,
    /// Nothing: the experiment needs no guest.
    None,
}

impl Workload {
    /// All of them.
    pub const ALL: [Self; 11] = [
        Self::SeqWrite,
        Self::RndWrite,
        Self::FileDelete,
        Self::Postmark,
        Self::Untar,
        Self::KernelCompile,
        Self::Varmail,
        Self::Fileserver,
        Self::Database,
        Self::Updates,
        Self::None,
    ];

    /// Its name in descriptions, files and tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::SeqWrite => "seq_write",
            Self::RndWrite => "rnd_write",
            Self::FileDelete => "file_delete",
            Self::Postmark => "postmark",
            Self::Untar => "untar",
            Self::KernelCompile => "kernel_compile",
            Self::Varmail => "varmail",
            Self::Fileserver => "fileserver",
            Self::Database => "database",
            Self::Updates => "updates",
            Self::None => "none",
        }
    }

    /// The workload of that name.
    pub fn by_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|workload| workload.name() == name)
    }

    /// Roughly how long it takes at full size in one guest without KVM, in seconds.
    pub fn seconds(self) -> f64 {
        match self {
            Self::SeqWrite => 60.0,
            Self::RndWrite | Self::Postmark => 45.0,
            Self::FileDelete => 90.0,
            Self::Untar => 60.0,
            Self::KernelCompile => 120.0,
            Self::Varmail | Self::Database => 60.0,
            Self::Fileserver => 120.0,
            Self::Updates => 15.0,
            Self::None => 0.0,
        }
    }

    /// Lines that run before the clock starts; /mnt is an empty file system.
    pub fn prepare(self, scale: f64, seed: u64) -> String {
        match self {
            Self::SeqWrite | Self::Untar | Self::Updates | Self::None => String::new(),
            // As the paper's: the file is there and has its blocks.
            Self::RndWrite => {
                format!(
                    "guest-tools append --file /mnt/file --write-bytes 1048576 --mib {} --sync >/dev/null",
                    part(512, scale)
                )
            }
            Self::FileDelete => format!("{} --phase create", filebench("file_delete", 40_000, scale, seed)),
            Self::Postmark | Self::Database => "mkdir /mnt/work".to_owned(),
            Self::KernelCompile => format!(
                "guest-tools untar --directory /mnt/tree --seed {seed} --files {} --sync >/dev/null",
                part(17_090, scale)
            ),
            // The set is small already: not scaled, or every flow would meet the same few files.
            Self::Varmail => format!("{} --phase create", filebench("varmail", 1_000, 1.0, seed)),
            Self::Fileserver => format!("{} --phase create", filebench("fileserver", 10_000, scale, seed)),
        }
    }

    /// Lines that run on the clock.
    pub fn load(self, scale: f64, seed: u64) -> String {
        match self {
            Self::SeqWrite => format!("guest-tools append --file /mnt/file --mib {}", part(600, scale)),
            Self::RndWrite => format!(
                "guest-tools randwrite --file /mnt/file --existing --file-mib {} --mib {} --seed {seed}",
                part(512, scale),
                part(128, scale)
            ),
            Self::FileDelete => format!("{} --phase run", filebench("file_delete", 40_000, scale, seed)),
            Self::Postmark => format!(
                "printf 'set location /mnt/work\\nset seed {}\\nset number {}\\nset subdirectories {}\\nset transactions \
                 {}\\nset size 500 9800\\nrun\\n' | postmark",
                seed % 1_000_000,
                part(10_000, scale),
                part(200, scale),
                part(25_000, scale)
            ),
            Self::Untar => {
                format!("guest-tools untar --directory /mnt/tree --seed {seed} --files {}", part(17_090, scale))
            }
            Self::KernelCompile => format!(
                "guest-tools compile --sources /mnt/tree --objects /mnt/objects --units {} --mib {} --pause-ms 60 --seed {seed}",
                part(900, scale),
                part(25, scale)
            ),
            Self::Varmail => {
                format!("{} --phase run --flows {}", filebench("varmail", 1_000, 1.0, seed), part(5_000, scale))
            }
            Self::Fileserver => {
                format!("{} --phase run --flows {}", filebench("fileserver", 10_000, scale, seed), part(5_000, scale))
            }
            Self::Database => format!(
                "guest-tools database --directory /mnt/work --seed {seed} --pages 2000 --count {} --report /dev/null",
                part(5_000, scale)
            ),
            Self::Updates | Self::None => String::new(),
        }
    }
}

fn filebench(personality: &str, files: u64, scale: f64, seed: u64) -> String {
    format!(
        "guest-tools filebench --personality {personality} --directory /mnt/set --seed {seed} --files {}",
        part(files, scale)
    )
}

/// A part of the paper's size, at least 1.
#[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)]
pub fn part(full: u64, scale: f64) -> u64 {
    ((full as f64 * scale).round() as u64).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn full_size_is_the_papers_and_a_part_of_it_scales() {
        assert!(Workload::SeqWrite.load(1.0, 1).ends_with("--mib 600"));
        assert!(
            Workload::Postmark
                .load(1.0, 1)
                .contains("set number 10000\\nset subdirectories 200\\nset transactions 25000")
        );
        assert!(Workload::Untar.load(0.1, 1).ends_with("--files 1709"));
        assert_eq!(part(25, 0.001), 1);
        for workload in Workload::ALL {
            assert_eq!(Workload::by_name(workload.name()), Some(workload));
        }
    }
}
