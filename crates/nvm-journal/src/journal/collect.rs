//! Garbage collection (the paper's section III-E): headers that hold nothing gather at the area's end, and become free.
//!
//! Two pointers run towards each other, and a valid header from the end takes the place of one that holds nothing. Up to
//! 256 headers move together. While they do, each has a persistent copy among the reserved headers, because between two
//! fences a header may be durable at neither place. Contents do not move.

use super::{Journal, Versions};
use crate::error::Error;
use crate::layout::{GONE, HEADER_BYTES, Header, Pointer, RESERVED_HEADERS, field};
use crate::medium::Medium;

/// A header on its way.
struct Move {
    from: u32,
    to: u32,
    header: Header,
}

impl<M: Medium> Journal<M> {
    /// Collects garbage. Returns the number of headers that became free.
    ///
    /// # Errors
    /// When a transaction is begun, or the medium fails.
    pub fn collect(&mut self) -> Result<u32, Error> {
        self.check_works()?;
        if self.has_pending() {
            return Err(Error::Failed {
                what: "collecting garbage in the NVM region".to_owned(),
                source: std::io::Error::from(std::io::ErrorKind::ResourceBusy),
            });
        }
        // What was taken away is durably so, and revokes that stand for nothing any more go as well.
        self.fence()?;
        self.fence()?;
        let before = self.checkpoint.end;
        let (mut first, mut last) = (0, before);
        loop {
            let batch = self.next_moves(&mut first, &mut last);
            if batch.is_empty() {
                break;
            }
            self.move_headers(&batch)?;
        }
        let next = Pointer { end: last, transaction: self.checkpoint.transaction };
        self.store(field::CHECKPOINT, next.encode());
        self.medium.write_back(field::CHECKPOINT, 8);
        self.fence()?;
        self.checkpoint = next;
        self.commit_end = last;
        self.invalid = 0;
        self.counters.collections += 1;
        Ok(before - last)
    }

    /// The next moves: `first` and `last` run towards each other, `last` being one past the last header that is left.
    fn next_moves(&self, first: &mut u32, last: &mut u32) -> Vec<Move> {
        let mut moves = Vec::new();
        while moves.len() < RESERVED_HEADERS as usize {
            while *first < *last && self.header(*first).is_some() {
                *first += 1;
            }
            while *first < *last && self.header(*last - 1).is_none() {
                *last -= 1;
            }
            if *first >= *last {
                break;
            }
            let from = *last - 1;
            if let Some(header) = self.header(from) {
                moves.push(Move { from, to: *first, header });
            }
            *first += 1;
            *last -= 1;
        }
        moves
    }

    fn move_headers(&mut self, moves: &[Move]) -> Result<(), Error> {
        for (index, one) in (0..).zip(moves) {
            self.store_header(self.geometry.reserved(index), &one.header);
        }
        self.fence()?;
        for one in moves {
            self.store_header(self.geometry.header(one.to), &one.header);
            self.invalidate(one.from);
            // The header takes its block along.
            self.block_of.swap(one.to as usize, one.from as usize);
            if let Some(Versions { latest, old }) = self.versions.get_mut(&one.header.home) {
                if *latest == one.from {
                    *latest = one.to;
                } else if *old == Some(one.from) {
                    *old = Some(one.to);
                }
            }
        }
        self.fence()?;
        for index in 0..moves.len() as u32 {
            let at = self.geometry.reserved(index);
            self.store(at, GONE);
            self.store(at + 8, GONE);
        }
        self.medium.write_back(self.geometry.reserved(0), moves.len() as u64 * HEADER_BYTES);
        self.counters.headers_moved += moves.len() as u64;
        self.fence()
    }
}
