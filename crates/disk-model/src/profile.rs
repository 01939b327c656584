//! The drives that can be modelled, and their numbers.

use std::fmt;
use std::str::FromStr;

/// A drive by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Profile {
    /// Seagate ST336753LW, the data disk of Huang and Chang, 2012: see [`SpinningDrive::ST336753LW`].
    St336753lw,
    /// The same with its write cache switched off.
    St336753lwWriteThrough,
    /// The same with a write cache that outlasts a loss of power: flushes cost nothing.
    St336753lwProtected,
    /// The same, and what is younger than a flush need not wait for it, as SCSI has it.
    St336753lwScsiFlush,
    /// A drive of 1 TB for desktops: see [`SpinningDrive::HDD_7200`].
    Hdd7200,
    /// The same with a write cache that outlasts a loss of power: flushes cost nothing.
    Hdd7200Protected,
    /// The same with its write cache switched off.
    Hdd7200WriteThrough,
    /// A Seagate ST39102LW, whose response times were published: what the model is held against.
    St39102lw,
    /// Phase-change memory as the NJS paper simulates it: 300 ns a write, 1 GB/s.
    Pcm,
    /// A SATA SSD: see [`FlashDrive::SATA_SSD`].
    SataSsd,
    /// An NVMe drive: see [`FlashDrive::NVME`].
    Nvme,
    /// An NVMe drive for servers, with capacitors: see [`FlashDrive::NVME_PROTECTED`].
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

/// No request waits longer because others lie closer.
const PATIENCE_NS: u64 = 250_000_000;

/// A drive with an arm.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SpinningDrive {
    /// What it holds, in bytes.
    pub capacity_bytes: u64,
    /// One revolution, in ns.
    pub revolution_ns: u64,
    /// From the surface, in bytes per second, track changes included.
    pub media_bytes_per_second: u64,
    /// A seek to the next track, in ns.
    pub seek_track_ns: u64,
    /// The mean seek between two places that are equally likely everywhere, in ns.
    pub seek_average_ns: u64,
    /// Across the cable, in bytes per second.
    pub bus_bytes_per_second: u64,
    /// What each command costs beside its bytes, in ns.
    pub command_ns: u64,
    /// The cache for writes, in bytes; 0: off.
    pub write_cache_bytes: u64,
    /// What is in the write cache outlasts a loss of power (a battery, or capacitors), so that a flush has nothing to do.
    pub is_cache_durable: bool,
    /// How far it reads on by itself after a read, in bytes.
    pub read_ahead_bytes: u64,
    /// While a flush waits, nothing younger is written. SCSI does not ask for that; a drive that empties its cache does it.
    pub is_flush_barrier: bool,
    /// A request that has waited so long is the next one, wherever it lies, in ns.
    pub patience_ns: u64,
}

impl SpinningDrive {
    /// Seek, rotation, transfer and capacity as in the paper's Table II (its "1.5K RPM" is 15K: half a turn takes 2 ms).
    /// What the paper does not say is as such drives were: Ultra320 SCSI, an 8 MiB buffer, write cache on as shipped.
    pub const ST336753LW: Self = Self {
        capacity_bytes: 36_700_000_000,
        revolution_ns: 4_000_000,
        media_bytes_per_second: 63_000_000,
        seek_track_ns: 400_000,
        seek_average_ns: 4_000_000,
        bus_bytes_per_second: 320_000_000,
        command_ns: 40_000,
        write_cache_bytes: 8 << 20,
        is_cache_durable: false,
        read_ahead_bytes: 512 << 10,
        is_flush_barrier: true,
        patience_ns: PATIENCE_NS,
    };

    /// Of the data sheet: 9.1 GB, 10,045 rpm, 0.98 and 5.4 ms (a mean of reads and writes), 19 MB/s in the middle, Ultra2, a buffer of 1 MiB.
    /// What a command costs is what its fastest ones took where its response times were measured, with its write cache on.
    pub const ST39102LW: Self = Self {
        capacity_bytes: 9_105_018_880,
        revolution_ns: 5_973_121,
        media_bytes_per_second: 19_000_000,
        seek_track_ns: 980_000,
        seek_average_ns: 5_400_000,
        bus_bytes_per_second: 80_000_000,
        command_ns: 450_000,
        write_cache_bytes: 1 << 20,
        is_cache_durable: false,
        read_ahead_bytes: 64 << 10,
        is_flush_barrier: true,
        patience_ns: PATIENCE_NS,
    };

    /// The class of drive below the NJS paper's journals ("WD 1TB HDD", no more is said): numbers typical of 7,200 rpm drives
    /// of those years, from data sheets, not those of one product.
    pub const HDD_7200: Self = Self {
        capacity_bytes: 1_000_000_000_000,
        revolution_ns: 8_333_333,
        media_bytes_per_second: 126_000_000,
        seek_track_ns: 1_000_000,
        seek_average_ns: 8_900_000,
        bus_bytes_per_second: 300_000_000,
        command_ns: 40_000,
        write_cache_bytes: 64 << 20,
        is_cache_durable: false,
        read_ahead_bytes: 1 << 20,
        is_flush_barrier: true,
        patience_ns: PATIENCE_NS,
    };

    /// The drive for loads that are a part of what they were: its caches are that part of what they are, and its patience is
    /// such a part of what it is (`clocks`, in the drive's own time: a slowed one slows it once more).
    #[must_use]
    pub fn scaled(self, sizes: f64, clocks: f64) -> Self {
        let part = |full: u64, part: f64| (full as f64 * part).round() as u64;
        // A cache that is there stays one, of a block at least.
        let cache = |full: u64| if full == 0 { 0 } else { part(full, sizes).max(4096) };
        Self {
            write_cache_bytes: cache(self.write_cache_bytes),
            read_ahead_bytes: cache(self.read_ahead_bytes),
            patience_ns: part(self.patience_ns, clocks).max(1),
            ..self
        }
    }
}

/// A drive without an arm. The numbers are typical of their class, from data sheets, not those of one product.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FlashDrive {
    /// Commands served at once.
    pub queue_depth: usize,
    /// A small read, in ns.
    pub read_ns: u64,
    /// A small write into the drive's own memory, in ns.
    pub write_ns: u64,
    /// In bytes per second.
    pub read_bytes_per_second: u64,
    /// In bytes per second.
    pub write_bytes_per_second: u64,
    /// A flush after which something was written since the last one, in ns; one after nothing costs a command.
    pub flush_ns: u64,
    /// How far a single latency strays, in per cent of it, both ways.
    pub jitter_percent: u64,
}

impl FlashDrive {
    /// A drive for desktops, without capacitors.
    pub const SATA_SSD: Self = Self {
        queue_depth: 32,
        read_ns: 90_000,
        write_ns: 40_000,
        read_bytes_per_second: 540_000_000,
        write_bytes_per_second: 500_000_000,
        flush_ns: 2_000_000,
        jitter_percent: 10,
    };

    /// Likewise.
    pub const NVME: Self = Self {
        queue_depth: 256,
        read_ns: 80_000,
        write_ns: 20_000,
        read_bytes_per_second: 3_500_000_000,
        write_bytes_per_second: 2_500_000_000,
        flush_ns: 500_000,
        jitter_percent: 10,
    };

    /// Phase-change memory behind a queue, as NJS's simulator has it for both of its journals: what is written is there.
    pub const PCM: Self = Self {
        queue_depth: 64,
        read_ns: 100,
        write_ns: 300,
        read_bytes_per_second: 4_000_000_000,
        write_bytes_per_second: 1_000_000_000,
        flush_ns: 300,
        jitter_percent: 0,
    };

    /// The same with capacitors: a flush finds nothing to do.
    pub const NVME_PROTECTED: Self = Self { flush_ns: 20_000, ..Self::NVME };
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
