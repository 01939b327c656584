//! Cleaning: live batches of the segment with the fewest go to the end of the log, and the segment is deleted.

use super::record::{Header, Kind};
use super::{Location, Medium, Store, StoreError};

/// Segments beyond twice what is live that are left alone.
const SLACK_SEGMENTS: u64 = 4;

impl<M: Medium> Store<M> {
    /// Cleans one segment, if that is worth it or room is short. To be called between groups.
    ///
    /// # Errors
    /// When storage failed; want of room is none, the segment then stays.
    pub fn clean(&mut self) -> Result<bool, StoreError> {
        self.check()?;
        let (used, live) = self.space_bytes();
        let segment_bytes = self.options.segment_bytes;
        let is_wasteful = used > 2 * live + SLACK_SEGMENTS * segment_bytes;
        let is_short = used + 2 * segment_bytes > self.options.space_bytes_max;
        let active = self.active.map(|(number, _)| number);
        let victim = self
            .segments
            .iter()
            .filter(|(number, segment)| Some(**number) != active && segment.live_bytes * 4 < segment.bytes * 3)
            // What could be moved out of those was.
            .filter(|(number, _)| !self.rotten.contains(number))
            .min_by_key(|(_, segment)| segment.live_bytes * 1024 / segment.bytes.max(1))
            .map(|(number, _)| *number);
        let Some(victim) = victim.filter(|_| is_wasteful || is_short) else { return Ok(false) };
        self.commit()?;
        self.is_cleaning = true;
        let moved = self.move_batches(victim);
        self.is_cleaning = false;
        match moved {
            // Committing deletes the segment, once its batches are durable elsewhere.
            Ok(()) => self.commit().map(|()| true),
            Err(StoreError::Full(_)) => self.commit().map(|()| false),
            Err(error) => Err(error),
        }
    }

    fn move_batches(&mut self, victim: u64) -> Result<(), StoreError> {
        let batches: Vec<(u32, u64, u64, u64, Location)> = self
            .journals
            .values()
            .flat_map(|journal| {
                let record = &journal.record;
                let here = journal.batches.iter().filter(|(_, location)| location.segment == victim);
                here.map(|(sequence, location)| (record.id, record.epoch, record.tail, *sequence, *location))
            })
            .collect();
        for (id, epoch, tail, sequence, location) in batches {
            let payload = match self.read(&location) {
                Ok(payload) => payload,
                Err(reason) => {
                    // It stays where it is, and so does its segment; everything else goes on.
                    let name = &self.journals[&id].record.name;
                    log::error!("{name}: batch {sequence} in segment {victim:016x} cannot be read: {reason}");
                    self.rotten.insert(victim);
                    continue;
                }
            };
            let header = Header { epoch, sequence, tail: tail.min(sequence), ..self.header(Kind::Batch, id) };
            let moved = self.stage(header, &payload)?;
            self.counters.cleaned_bytes += payload.len() as u64;
            self.add_batch(id, sequence, tail, moved);
        }
        Ok(())
    }
}
