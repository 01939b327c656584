//! The workloads, as shell lines for a guest: sizes are the papers', times a scale.

use guest_kit::toolchain;

/// The guest's tools, among the compiler's files.
const TOOLCHAIN: &str = "chroot /toolchain guest-tools";

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
    /// 400 C files of a freestanding program, compiled and linked by Debian's GCC.
    KernelCompile,
    /// filebench: a mail server, two fsyncs a flow.
    Varmail,
    /// filebench: a file server, without fsync.
    Fileserver,
    /// IOzone's write: a new file of 8 GB, 4 KB at a time (NJS, Table I).
    IozoneWrite,
    /// IOzone's re-write: the same again, over it.
    IozoneRewrite,
    /// Re-writes of a file that is small enough to stay in NJS's region: 32 MB, six times, each made durable. The
    /// parameter `change_percent` says how much of a record is new.
    IozoneChange,
    /// IOzone's random write: as many records at random places of it.
    IozoneRandomWrite,
    /// Debian's postmark with the parameters of the remote journaling thesis: 150,000 files of 500 to 1,000 bytes, 20,000
    /// transactions.
    RjPostmark,
    /// Debian's postmark with NJS's parameters: 10,000 files of 1 KB to 1 MB.
    NjsPostmark,
    /// The file server with NJS's parameters: 50,000 files of 128 KB.
    NjsFileserver,
    /// The mail server with NJS's parameters: 400,000 files of 16 KB.
    NjsVarmail,
    /// Transactions with a write-ahead log, as SQLite's: an fdatasync each, a checkpoint every 50.
    Database,
    /// TPC-B's transaction on Debian's SQLite, with its own default journal (delete).
    Sqlite,
    /// The same with SQLite's write-ahead log.
    SqliteWal,
    /// Records of a database file updated in place, without fsync.
    Updates,
    /// Nothing: the experiment needs no guest.
    None,
}

/// What a run's sizes and random choices follow from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sizes {
    /// Sizes, as a part of the paper's.
    pub scale: f64,
    /// From which everything random follows.
    pub seed: u64,
    /// The value of the experiment's own parameter; 0 where it has none.
    pub parameter: u64,
}

/// The papers' virtual data disks, in MiB.
const IMAGE_MIB: u32 = 4096;
/// What NJS's files of 8 GB fit into with room to spare, in MiB.
const LARGE_IMAGE_MIB: u32 = 16_384;

impl Workload {
    /// All of them.
    pub const ALL: [Self; 21] = [
        Self::SeqWrite,
        Self::RndWrite,
        Self::FileDelete,
        Self::Postmark,
        Self::Untar,
        Self::KernelCompile,
        Self::Varmail,
        Self::Fileserver,
        Self::IozoneWrite,
        Self::IozoneRewrite,
        Self::IozoneChange,
        Self::IozoneRandomWrite,
        Self::RjPostmark,
        Self::NjsPostmark,
        Self::NjsFileserver,
        Self::NjsVarmail,
        Self::Database,
        Self::Sqlite,
        Self::SqliteWal,
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
            Self::IozoneWrite => "iozone_write",
            Self::IozoneRewrite => "iozone_rewrite",
            Self::IozoneChange => "iozone_change",
            Self::IozoneRandomWrite => "iozone_random_write",
            Self::RjPostmark => "rj_postmark",
            Self::NjsPostmark => "njs_postmark",
            Self::NjsFileserver => "njs_fileserver",
            Self::NjsVarmail => "njs_varmail",
            Self::Database => "database",
            Self::Sqlite => "sqlite",
            Self::SqliteWal => "sqlite_wal",
            Self::Updates => "updates",
            Self::None => "none",
        }
    }

    /// The workload of that name.
    pub fn by_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|workload| workload.name() == name)
    }

    /// Roughly how long it takes at full size in one guest without KVM, in seconds, preparation included.
    pub fn seconds(self) -> f64 {
        match self {
            Self::SeqWrite | Self::RndWrite => 70.0,
            Self::Untar => 45.0,
            Self::Postmark | Self::FileDelete => 40.0,
            Self::RjPostmark => 300.0,
            Self::IozoneChange => 45.0,
            Self::Fileserver | Self::Sqlite | Self::SqliteWal => 120.0,
            Self::KernelCompile => 700.0,
            Self::Varmail | Self::Database => 60.0,
            Self::IozoneWrite => 400.0,
            Self::IozoneRewrite => 900.0,
            Self::IozoneRandomWrite => 4500.0,
            Self::NjsPostmark | Self::NjsFileserver | Self::NjsVarmail => 1200.0,
            Self::Updates => 15.0,
            Self::None => 0.0,
        }
    }

    /// The size of the image that it needs, in MiB.
    pub fn image_mib(self) -> u32 {
        match self {
            Self::IozoneWrite
            | Self::IozoneRewrite
            | Self::IozoneRandomWrite
            | Self::NjsPostmark
            | Self::NjsFileserver
            | Self::NjsVarmail => LARGE_IMAGE_MIB,
            _ => IMAGE_MIB,
        }
    }

    /// Programs of the host that its guests need beyond what every guest has.
    pub fn programs(self) -> &'static [&'static str] {
        match self {
            Self::Sqlite | Self::SqliteWal => &["sqlite3"],
            _ => &[],
        }
    }

    /// Whether its guests have the read-only disk with a compiler ([`guest_kit::toolchain`]).
    pub fn needs_toolchain(self) -> bool {
        self == Self::KernelCompile
    }

    /// Whether there are files before the clock starts. They are written home, and the file system is mounted anew: what a
    /// journal still owed of them would be paid on the clock, and only by those modes that journal data.
    pub fn is_prepared(self) -> bool {
        match self {
            Self::SeqWrite | Self::Untar | Self::IozoneWrite | Self::Updates | Self::None => false,
            // A directory.
            Self::Postmark | Self::RjPostmark | Self::NjsPostmark | Self::Database => false,
            Self::RndWrite
            | Self::FileDelete
            | Self::KernelCompile
            | Self::Varmail
            | Self::Fileserver
            | Self::NjsVarmail
            | Self::NjsFileserver
            | Self::IozoneRewrite
            | Self::IozoneRandomWrite
            | Self::IozoneChange
            | Self::Sqlite
            | Self::SqliteWal => true,
        }
    }

    /// Lines that run before the clock starts; /mnt is an empty file system.
    pub fn prepare(self, sizes: Sizes) -> String {
        let Sizes { scale, seed, .. } = sizes;
        match self {
            Self::SeqWrite | Self::Untar | Self::IozoneWrite | Self::Updates | Self::None => String::new(),
            // As the paper's: the file is there and has its blocks.
            Self::RndWrite => {
                format!(
                    "guest-tools append --file /mnt/file --write-bytes 1048576 --mib {} --sync >/dev/null",
                    part(512, scale)
                )
            }
            Self::FileDelete => format!("{} --phase create", filebench("file_delete", 40_000, sizes)),
            Self::Postmark | Self::RjPostmark | Self::NjsPostmark | Self::Database => "mkdir /mnt/work".to_owned(),
            Self::KernelCompile => format!(
                "{}\n{TOOLCHAIN} sources --directory /mnt/sources --seed {seed} --units {}\numount /toolchain/mnt",
                toolchain::MOUNT,
                part(400, scale)
            ),
            // The set is small already: not scaled, or every flow would meet the same few files.
            Self::Varmail => format!("{} --phase create", filebench("varmail", 1_000, unscaled(sizes))),
            Self::Fileserver => format!("{} --phase create", filebench("fileserver", 10_000, sizes)),
            Self::NjsVarmail => format!("{} --phase create", filebench("varmail", 400_000, sizes)),
            Self::NjsFileserver => format!("{} --phase create", filebench("fileserver", 50_000, sizes)),
            Self::IozoneRewrite | Self::IozoneRandomWrite => iozone("write", 8192, sizes),
            Self::IozoneChange => iozone("write", 32, sizes),
            Self::Sqlite => format!("{} --phase create", sqlite("delete", sizes)),
            Self::SqliteWal => format!("{} --phase create", sqlite("wal", sizes)),
        }
    }

    /// Lines that run on the clock.
    pub fn load(self, sizes: Sizes) -> String {
        let Sizes { scale, seed, parameter } = sizes;
        match self {
            Self::SeqWrite => format!("guest-tools append --file /mnt/file --mib {}", part(600, scale)),
            Self::RndWrite => format!(
                "guest-tools randwrite --file /mnt/file --existing --file-mib {} --mib {} --seed {seed}",
                part(512, scale),
                part(128, scale)
            ),
            Self::FileDelete => format!("{} --phase run", filebench("file_delete", 40_000, sizes)),
            Self::Postmark => {
                let [files, directories, transactions] = [10_000, 200, 25_000].map(|full| part(full, scale));
                postmark(seed, files, directories, transactions, "500 9800")
            }
            // Its section 4.2; it does not tell the subdirectories: as many files in each as the 2012 paper has.
            Self::RjPostmark => {
                let [files, directories, transactions] = [150_000, 3_000, 20_000].map(|full| part(full, scale));
                postmark(seed, files, directories, transactions, "500 1000")
            }
            // Table I: 10K files of 1KB~1MB. It does not tell the transactions: one a file.
            Self::NjsPostmark => {
                let files = part(10_000, scale);
                postmark(seed, files, part(200, scale), files, "1024 1048576")
            }
            Self::Untar => {
                format!("guest-tools untar --directory /mnt/tree --seed {seed} --files {}", part(17_090, scale))
            }
            Self::KernelCompile => {
                // The disk's other place goes before it is unmounted.
                format!(
                    "(mount -o bind /mnt /toolchain/mnt && {TOOLCHAIN} build --sources /mnt/sources --objects /mnt/objects --units {}; umount /toolchain/mnt)",
                    part(400, scale)
                )
            }
            Self::Varmail => {
                format!("{} --phase run --flows {}", filebench("varmail", 1_000, unscaled(sizes)), part(5_000, scale))
            }
            Self::Fileserver => {
                format!("{} --phase run --flows {}", filebench("fileserver", 10_000, sizes), part(5_000, scale))
            }
            // The paper runs them for a time; here a flow for every eighth file.
            Self::NjsVarmail => {
                format!("{} --phase run --flows {}", filebench("varmail", 400_000, sizes), part(50_000, scale))
            }
            Self::NjsFileserver => {
                format!("{} --phase run --flows {}", filebench("fileserver", 50_000, sizes), part(6_250, scale))
            }
            Self::IozoneWrite => iozone("write", 8192, sizes),
            Self::IozoneRewrite => iozone("rewrite", 8192, sizes),
            Self::IozoneChange => {
                let percent = parameter.clamp(1, 100);
                format!("{} --passes 6 --fsync --change-percent {percent}", iozone("rewrite", 32, sizes))
            }
            Self::IozoneRandomWrite => iozone("random-write", 8192, sizes),
            Self::Database => format!(
                "guest-tools database --directory /mnt/work --seed {seed} --pages 2000 --count {} --report /dev/null",
                part(5_000, scale)
            ),
            Self::Sqlite => format!("{} --phase run --transactions {}", sqlite("delete", sizes), part(5_000, scale)),
            Self::SqliteWal => format!("{} --phase run --transactions {}", sqlite("wal", sizes), part(5_000, scale)),
            Self::Updates | Self::None => String::new(),
        }
    }
}

fn unscaled(sizes: Sizes) -> Sizes {
    Sizes { scale: 1.0, ..sizes }
}

fn filebench(personality: &str, files: u64, Sizes { scale, seed, .. }: Sizes) -> String {
    format!(
        "guest-tools filebench --personality {personality} --directory /mnt/set --seed {seed} --files {}",
        part(files, scale)
    )
}

/// Shell words that run postmark in /mnt/work.
pub(crate) fn postmark(seed: u64, files: u64, directories: u64, transactions: u64, bytes: &str) -> String {
    format!(
        "printf 'set location /mnt/work\\nset seed {}\\nset number {files}\\nset subdirectories {directories}\\nset transactions \
         {transactions}\\nset size {bytes}\\nrun\\n' | postmark",
        seed % 1_000_000
    )
}

/// Records are IOzone's default, 4 KB.
fn iozone(test: &str, mib: u64, Sizes { scale, seed, .. }: Sizes) -> String {
    format!("guest-tools iozone --file /mnt/file --test {test} --seed {seed} --mib {}", part(mib, scale))
}

/// As many accounts as TPC-B has for a branch, and not so few that all are in one page.
fn sqlite(journal: &str, Sizes { scale, seed, .. }: Sizes) -> String {
    let accounts = part(100_000, scale).max(1000);
    format!("guest-tools sqlite --directory /mnt/work --journal {journal} --seed {seed} --accounts {accounts}")
}

/// A part of the paper's size, at least 1.
pub fn part(full: u64, scale: f64) -> u64 {
    ((full as f64 * scale).round() as u64).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn full_size_is_the_papers_and_a_part_of_it_scales() {
        let sizes = Sizes { scale: 1.0, seed: 1, parameter: 0 };
        let load = |workload: Workload| workload.load(sizes);
        assert!(load(Workload::SeqWrite).ends_with("--mib 600"));
        assert!(load(Workload::RndWrite).contains("--file-mib 512 --mib 128"));
        assert!(Workload::FileDelete.prepare(sizes).contains("--files 40000"));
        assert!(
            load(Workload::Postmark)
                .contains("set number 10000\\nset subdirectories 200\\nset transactions 25000\\nset size 500 9800\\n")
        );
        assert!(load(Workload::KernelCompile).contains("--units 400;"));
        assert!(load(Workload::Untar).contains("--files 17090"));
        assert!(Workload::Untar.load(Sizes { scale: 0.1, ..sizes }).ends_with("--files 1709"));
        assert!(
            load(Workload::RjPostmark).contains(
                "set number 150000\\nset subdirectories 3000\\nset transactions 20000\\nset size 500 1000\\n"
            )
        );
        // NJS, Table I.
        for workload in [Workload::IozoneWrite, Workload::IozoneRewrite, Workload::IozoneRandomWrite] {
            assert!(load(workload).ends_with("--mib 8192"), "8 GB");
        }
        assert!(load(Workload::NjsPostmark).contains("set number 10000\\n"));
        assert!(load(Workload::NjsPostmark).contains("set size 1024 1048576\\n"));
        assert!(load(Workload::NjsFileserver).contains("fileserver --directory /mnt/set --seed 1 --files 50000"));
        assert!(load(Workload::NjsVarmail).contains("varmail --directory /mnt/set --seed 1 --files 400000"));
        assert!(Workload::IozoneChange.load(Sizes { parameter: 25, ..sizes }).ends_with("--change-percent 25"));
        assert_eq!(part(25, 0.001), 1);
        for workload in Workload::ALL {
            assert_eq!(Workload::by_name(workload.name()), Some(workload));
        }
    }
}
