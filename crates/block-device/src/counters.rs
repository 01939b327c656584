//! What a device counts, for reports and metrics.

use latency::{Histogram, Snapshot};
use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! latencies {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// How long things took, since the device was started. Written by the device's worker thread, read by anybody.
        #[derive(Debug, Default)]
        pub(crate) struct Latencies {
            $($(#[$doc])* pub(crate) $name: Histogram,)*
        }

        impl Latencies {
            /// Reads all of them, each with its name.
            pub(crate) fn snapshot(&self) -> Vec<(&'static str, Snapshot)> {
                vec![$((stringify!($name), self.$name.snapshot()),)*]
            }
        }
    };
}

latencies! {
    /// Read requests of the guest, from the ring to the answer.
    read,
    /// Write requests of the guest, likewise; those with a commit block, too.
    write,
    /// Flush requests of the guest, likewise.
    flush,
    /// Discard and write-zeroes requests of the guest, likewise.
    discard,
    /// Write requests with a commit block of a journal.
    commit,
    /// Reads of the disk engine from storage.
    storage_read,
    /// Writes of the disk engine to storage: under a held placement these are home writes.
    storage_write,
    /// Flushes of the disk engine.
    storage_flush,
}

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Counters of one device, since it was started. Written by the device's worker thread, read by anybody.
        #[derive(Debug, Default)]
        pub struct Counters {
            $($(#[$doc])* pub(crate) $name: AtomicU64,)*
            pub(crate) latencies: Latencies,
        }

        /// The counters at one moment.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct CountersSnapshot {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl Counters {
            /// Reads all of them.
            pub fn snapshot(&self) -> CountersSnapshot {
                CountersSnapshot { $($name: self.$name.load(Ordering::Relaxed),)* }
            }
        }
    };
}

counters! {
    /// Read requests of the guest taken from a ring.
    read_requests,
    /// Bytes they asked for.
    read_bytes,
    /// Write requests of the guest taken from a ring.
    write_requests,
    /// Bytes they brought.
    write_bytes,
    /// Flush requests of the guest.
    flush_requests,
    /// Discard requests of the guest.
    discard_requests,
    /// Write-zeroes requests of the guest.
    write_zeroes_requests,
    /// Bytes that the disk engine read from storage.
    storage_read_bytes,
    /// Bytes that the disk engine wrote to storage.
    storage_write_bytes,
    /// Flushes that the disk engine sent to storage (several of the guest's may share one).
    storage_flushes,
    /// Transfers that were copied through an aligned buffer because the guest's memory was not aligned for O_DIRECT.
    bounced_transfers,
    /// Requests that ended with an I/O error.
    failed_requests,
    /// Requests that ended as not supported.
    unsupported_requests,
    /// Descriptor chains that were no request at all, and rings that were stopped because of what they said.
    malformed_chains,
    /// Interrupts sent to the guest.
    interrupts,
    /// Passes over the rings that found at least one request.
    passes,
    /// Requests done again from the in-flight region after a reconnection.
    resubmitted_requests,
}

/// Adds to a counter that only one thread writes: a plain load and store, no locked instruction.
pub(crate) fn add(counter: &AtomicU64, value: u64) {
    counter.store(counter.load(Ordering::Relaxed).wrapping_add(value), Ordering::Relaxed);
}
