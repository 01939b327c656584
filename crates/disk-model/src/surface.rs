//! Where the head is and how long it takes to another place: seek, then rotation.
//!
//! Data lies on one spiral: the angle of a byte is its offset modulo a track's bytes, so that a sequential transfer
//! crosses tracks at full speed, and the angle of the platter follows from the time. Nothing is random but the angle at
//! time 0.

use crate::drives::SpinningDrive;

const NS_PER_SECOND: u64 = 1_000_000_000;

/// Bytes to ns at a speed, rounded up.
pub(crate) fn transfer_ns(bytes: u64, bytes_per_second: u64) -> u64 {
    let ns = (u128::from(bytes) * u128::from(NS_PER_SECOND)).div_ceil(u128::from(bytes_per_second.max(1)));
    u64::try_from(ns).unwrap_or(u64::MAX)
}

/// The head over the platter.
#[derive(Clone, Debug)]
pub(crate) struct Surface {
    drive: SpinningDrive,
    track_bytes: u64,
    tracks: u64,
    /// The platter's angle at time 0, as time since the index mark.
    phase_ns: u64,
    /// The byte that the head was at, at `at_ns`.
    head_offset: u64,
    at_ns: u64,
}

impl Surface {
    pub(crate) fn new(drive: SpinningDrive, phase_ns: u64) -> Self {
        let per_turn = u128::from(drive.media_bytes_per_second) * u128::from(drive.revolution_ns);
        let track_bytes = u64::try_from(per_turn / u128::from(NS_PER_SECOND)).unwrap_or(u64::MAX).max(1);
        Surface {
            track_bytes,
            tracks: drive.capacity_bytes.div_ceil(track_bytes).max(1),
            phase_ns: phase_ns % drive.revolution_ns.max(1),
            head_offset: 0,
            at_ns: 0,
            drive,
        }
    }

    /// From one place to another, without rotation. It grows with the square root of the distance (the arm accelerates half
    /// the way and brakes the other half). Between two random places the mean of that root is 8/15 of the root of
    /// a full stroke, which fixes the constant so that the mean seek is the drive's.
    pub(crate) fn seek_ns(&self, from: u64, to: u64) -> u64 {
        let distance = (from / self.track_bytes).abs_diff(to / self.track_bytes);
        if distance == 0 {
            return 0;
        }
        let constant = (self.drive.seek_average_ns.saturating_sub(self.drive.seek_track_ns)) as f64 * 15.0 / 8.0;
        self.drive.seek_track_ns + (constant * (distance as f64 / self.tracks as f64).sqrt()) as u64
    }

    /// How long from `now_ns` until the head is at `offset` and can transfer.
    pub(crate) fn positioning_ns(&self, now_ns: u64, offset: u64) -> u64 {
        let revolution = self.drive.revolution_ns.max(1);
        let there = now_ns + self.seek_ns(self.head_offset, offset);
        let angle = (there % revolution + self.phase_ns) % revolution;
        let wanted = transfer_ns(offset % self.track_bytes, self.drive.media_bytes_per_second) % revolution;
        let by_seek = there - now_ns + (wanted + revolution - angle) % revolution;
        // What lies just ahead comes by itself, if it has not passed yet.
        let passes = offset
            .checked_sub(self.head_offset)
            .map(|gap| self.at_ns + transfer_ns(gap, self.drive.media_bytes_per_second))
            .and_then(|passes| passes.checked_sub(now_ns));
        passes.map_or(by_seek, |wait| wait.min(by_seek))
    }

    pub(crate) fn transfer_ns(&self, bytes: u64) -> u64 {
        transfer_ns(bytes, self.drive.media_bytes_per_second)
    }

    /// A transfer has ended here.
    pub(crate) fn arrive(&mut self, offset: u64, now_ns: u64) {
        self.head_offset = offset;
        self.at_ns = now_ns;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use seeded_random::Random;

    fn surface() -> Surface {
        Surface::new(SpinningDrive::ST336753LW, 0)
    }

    #[test]
    fn the_mean_seek_is_the_drives() {
        let (surface, mut dice) = (surface(), Random::new(1));
        let capacity = SpinningDrive::ST336753LW.capacity_bytes;
        let count = 100_000;
        let total: u64 = (0..count).map(|_| surface.seek_ns(dice.below(capacity), dice.below(capacity))).sum();
        let mean = total / count;
        assert!((3_960_000..4_040_000).contains(&mean), "the mean seek is {mean} ns, not 4 ms");
        assert_eq!(surface.seek_ns(5, 6), 0);
        assert!(surface.seek_ns(0, 252_000) >= 400_000);
    }

    #[test]
    fn the_mean_rotation_is_half_a_turn() {
        let (mut surface, mut dice) = (surface(), Random::new(2));
        let count = 100_000;
        let mut total = 0;
        let mut now = 0;
        for _ in 0..count {
            let offset = dice.below(SpinningDrive::ST336753LW.capacity_bytes);
            // Long after whatever was before, so that nothing comes by itself.
            now += 1_000_000_000 + dice.below(4_000_000);
            total += surface.positioning_ns(now, offset) - surface.seek_ns(surface.head_offset, offset);
            surface.arrive(offset, now);
        }
        let mean = total / count;
        assert!((1_980_000..2_020_000).contains(&mean), "the mean rotation is {mean} ns, not 2 ms");
    }

    #[test]
    fn what_follows_at_once_costs_nothing_and_what_was_missed_costs_a_turn() {
        let mut surface = surface();
        let offset = 252_000 * 1000 + 100_000;
        surface.arrive(offset, 7_000_000);
        assert_eq!(surface.positioning_ns(7_000_000, offset), 0);
        let late = surface.positioning_ns(7_000_100, offset);
        // The angle is fixed by place and time, so the head must first be where the geometry says.
        let phase = surface.positioning_ns(8_000_000, offset);
        assert_eq!((late + 7_000_100) % 4_000_000, (phase + 8_000_000) % 4_000_000);
        assert!(late <= 4_000_000);
    }
}
