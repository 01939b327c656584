//! The drives that can be modelled, by name; their numbers are the models'.

use std::fmt;
use std::str::FromStr;

/// A drive by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Profile {
    /// Seagate ST336753LW, the data disk of Huang and Chang, 2012.
    St336753lw,
    /// The same with its write cache switched off.
    St336753lwWriteThrough,
    /// The same with a write cache that outlasts a loss of power: flushes cost nothing.
    St336753lwProtected,
    /// The same, and what is younger than a flush need not wait for it, as SCSI has it.
    St336753lwScsiFlush,
    /// A drive of 1 TB for desktops.
    Hdd7200,
    /// The same with a write cache that outlasts a loss of power: flushes cost nothing.
    Hdd7200Protected,
    /// The same with its write cache switched off.
    Hdd7200WriteThrough,
    /// A Seagate ST39102LW, whose response times were published: what the model is held against.
    St39102lw,
    /// Phase-change memory as the NJS paper simulates it: 300 ns a write, 1 GB/s.
    Pcm,
    /// A SATA SSD.
    SataSsd,
    /// An NVMe drive.
    Nvme,
    /// An NVMe drive for servers, with capacitors.
    NvmeProtected,
    /// A disk that takes no time.
    None,
}

impl Profile {
    /// All of them.
    pub const ALL: [Self; 13] = [
        Self::St336753lw,
        Self::St336753lwWriteThrough,
        Self::St336753lwProtected,
        Self::St336753lwScsiFlush,
        Self::Hdd7200,
        Self::Hdd7200Protected,
        Self::Hdd7200WriteThrough,
        Self::St39102lw,
        Self::Pcm,
        Self::SataSsd,
        Self::Nvme,
        Self::NvmeProtected,
        Self::None,
    ];

    /// Its name on command lines and in results.
    pub fn name(self) -> &'static str {
        match self {
            Self::St336753lw => "st336753lw",
            Self::St336753lwWriteThrough => "st336753lw-write-through",
            Self::St336753lwProtected => "st336753lw-protected",
            Self::St336753lwScsiFlush => "st336753lw-scsi-flush",
            Self::Hdd7200 => "hdd-7200",
            Self::Hdd7200Protected => "hdd-7200-protected",
            Self::Hdd7200WriteThrough => "hdd-7200-write-through",
            Self::St39102lw => "st39102lw",
            Self::Pcm => "pcm",
            Self::SataSsd => "sata-ssd",
            Self::Nvme => "nvme",
            Self::NvmeProtected => "nvme-protected",
            Self::None => "none",
        }
    }

    /// What it is, in a sentence.
    pub fn description(self) -> &'static str {
        match self {
            Self::St336753lw => {
                "Seagate ST336753LW of 2012's paper: 15,000 rpm, 4 ms seek, 2 ms rotation, 63 MB/s, 8 MiB write cache"
            }
            Self::St336753lwWriteThrough => "the same drive with its write cache switched off",
            Self::Hdd7200 => {
                "a 1 TB drive for desktops: 7,200 rpm, 8.9 ms seek, 4.2 ms rotation, 126 MB/s, 64 MiB write cache"
            }
            Self::Hdd7200Protected => {
                "the same behind a controller whose write cache outlasts a loss of power: a flush costs a command"
            }
            Self::St336753lwProtected => "the ST336753LW with a write cache that outlasts a loss of power",
            Self::St336753lwScsiFlush => "the ST336753LW, what is younger than a flush not waiting for it",
            Self::Hdd7200WriteThrough => "the drive for desktops with its write cache switched off",
            Self::St39102lw => {
                "Seagate ST39102LW (Cheetah 9LP): 10,045 rpm, 5.4 ms seek, 3 ms rotation, 19 MB/s, 1 MiB write cache"
            }
            Self::Pcm => "phase-change memory as the NJS paper simulates it: 300 ns a write, 1 GB/s",
            Self::SataSsd => "a SATA SSD: 90/40 µs, 540/500 MB/s, a flush 2 ms",
            Self::Nvme => "an NVMe drive: 80/20 µs, 3.5/2.5 GB/s, a flush 0.5 ms",
            Self::NvmeProtected => {
                "the same with capacitors, as for servers: what it has taken outlasts a loss of power, a flush is 20 µs"
            }
            Self::None => "a disk that takes no time",
        }
    }
}

impl fmt::Display for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Profile {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|profile| profile.name() == name).ok_or_else(|| {
            let names = Self::ALL.map(Self::name).join(", ");
            format!("'{name}' is no disk model; there are {names}, or the socket of a shared one (a path with a /)")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_back() {
        for profile in Profile::ALL {
            assert_eq!(profile.name().parse(), Ok(profile));
        }
        assert!("floppy".parse::<Profile>().unwrap_err().contains("sata-ssd"));
    }
}
