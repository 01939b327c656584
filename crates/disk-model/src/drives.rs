//! The numbers of the drives that are modelled.

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
