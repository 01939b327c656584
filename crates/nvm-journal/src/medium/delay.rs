//! What slower memory would cost: the paper's model (section IV-A), after Mnemosyne's.
//!
//! Everything that a fence makes durable costs its bytes at the medium's bandwidth, and the fence one write latency. The
//! time is spent by spinning on the processor's clock: a sleep is never shorter than some 50 µs.

use std::time::{Duration, Instant};

/// Latency and bandwidth of writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DelayModel {
    /// Latency of a write in nanoseconds.
    pub write_latency_ns: u64,
    /// Bandwidth of writes in bytes per second.
    pub bytes_per_second: u64,
}

impl DelayModel {
    /// The paper's phase-change memory: 300 ns, 1 GB/s.
    pub const PAPER: DelayModel = DelayModel { write_latency_ns: 300, bytes_per_second: 1_000_000_000 };

    /// How long making `bytes` durable takes.
    pub fn time(&self, bytes: u64) -> Duration {
        let transfer = u128::from(bytes) * 1_000_000_000 / u128::from(self.bytes_per_second.max(1));
        Duration::from_nanos(self.write_latency_ns + transfer as u64)
    }

    pub(crate) fn spend(&self, bytes: u64) {
        let time = self.time(bytes);
        let clock = Instant::now();
        while clock.elapsed() < time {
            std::hint::spin_loop();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_papers_memory() {
        assert_eq!(DelayModel::PAPER.time(0), Duration::from_nanos(300));
        assert_eq!(DelayModel::PAPER.time(4096), Duration::from_nanos(4396));
    }
}
