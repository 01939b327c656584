//! Whether a transaction's appends cost less time in the region than at home, as measured.
//!
//! Home, a commit waits until they are written and flushed: on a drive with an arm some turns of its platter, on one that need not
//! flush next to nothing. In the region it waits for the bytes to be stored. Neither is known before, and both change with what else
//! the disk does: so both are measured as they happen, and one transaction in a while goes home to look.

use std::time::Duration;

/// After so many transactions whose appends were logged one goes home, so that what that costs is known.
const LOGGED_MAX: u32 = 64;
/// Stores of fewer bytes say more about the clock than about the memory.
const STORED_BYTES_MIN: u64 = 64 << 10;
/// What one measurement moves a mean by.
const WEIGHT: f64 = 0.25;

/// What was measured lately.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct AppendCost {
    /// Nanoseconds that a commit waited for appends of its own to be durable at home.
    home_ns: Option<f64>,
    /// Nanoseconds to store a byte in the region.
    stored_ns_per_byte: Option<f64>,
    /// Transactions whose appends were logged since some went home.
    logged: u32,
}

impl AppendCost {
    /// A transaction's appends went home, and its commit waited so long.
    pub fn went_home(&mut self, waited: Duration) {
        self.logged = 0;
        moves(&mut self.home_ns, waited.as_nanos() as f64);
    }

    /// So many bytes were stored in the region.
    pub fn stored(&mut self, bytes: u64, took: Duration) {
        if bytes >= STORED_BYTES_MIN {
            moves(&mut self.stored_ns_per_byte, took.as_nanos() as f64 / bytes as f64);
        }
    }

    /// A transaction's appends are logged.
    pub fn logged(&mut self) {
        self.logged += 1;
    }

    /// Whether so many bytes of appends are to be logged. The first that come go home: what that costs is not known.
    pub fn is_log_cheaper(&self, bytes: u64) -> bool {
        let Some(home_ns) = self.home_ns.filter(|_| self.logged < LOGGED_MAX) else { return false };
        // Of a region that nothing large was stored in yet: it is memory, and looked at now.
        self.stored_ns_per_byte.is_none_or(|each| each * (bytes as f64) < home_ns)
    }
}

fn moves(mean: &mut Option<f64>, measured: f64) {
    *mean = Some(mean.map_or(measured, |mean| mean + WEIGHT * (measured - mean)));
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn after(home: Duration, stored: Duration) -> AppendCost {
        let mut cost = AppendCost::default();
        cost.went_home(home);
        cost.stored(MIB, stored);
        cost
    }

    #[test]
    fn the_cheaper_of_the_two_is_taken_and_what_is_not_known_is_looked_at() {
        assert!(!AppendCost::default().is_log_cheaper(MIB), "nothing is known of the disk");
        // A drive with an arm, and the paper's memory; and a disk that is faster than the memory.
        assert!(after(Duration::from_millis(15), Duration::from_millis(1)).is_log_cheaper(2 * MIB));
        assert!(!after(Duration::from_millis(15), Duration::from_millis(1)).is_log_cheaper(16 * MIB));
        assert!(!after(Duration::from_micros(300), Duration::from_millis(1)).is_log_cheaper(MIB));
    }

    #[test]
    fn a_disk_that_has_become_fast_is_noticed() {
        let mut cost = after(Duration::from_millis(15), Duration::from_millis(1));
        let mut home = 0;
        for _ in 0..20 * LOGGED_MAX {
            if cost.is_log_cheaper(MIB) {
                cost.logged();
            } else {
                cost.went_home(Duration::from_micros(200));
                home += 1;
            }
        }
        assert!(!cost.is_log_cheaper(MIB) && home > LOGGED_MAX, "{home} went home");
    }

    #[test]
    fn a_few_bytes_say_nothing_of_the_memory() {
        let mut cost = after(Duration::from_millis(15), Duration::from_millis(1));
        cost.stored(4096, Duration::from_millis(50));
        assert!(cost.is_log_cheaper(MIB));
    }
}
