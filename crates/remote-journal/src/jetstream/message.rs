//! What the stream's messages are made of: a head of 60 bytes and a content, each with a CRC-32C; and which numbers of the
//! stream may be missing.

use crate::bytes::Reader;

/// Bytes of a head.
pub(super) const HEAD_BYTES: usize = 60;
const MAGIC: u32 = 0x534a_4d41;
const VERSION: u8 = 1;
/// Ranges of missing numbers in one message. There may be as many as there are messages that count: where they are more than these,
/// several messages have them ([`Part`]).
const RANGES_MAX: usize = 32 << 10;
/// Messages that have them, at most: as many ranges as no memory would hold the messages between.
const PARTS_MAX: u32 = 1 << 12;

/// What a message is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Bytes of a segment.
    Piece = 1,
    /// Its segment ends at its offset, whatever was written behind that before.
    Ends = 2,
    /// A journal server has opened the stream, or is about to remove something: the numbers in it may be missing.
    Control = 3,
    /// A journal server is about to open the stream while another writes: that one cannot write behind this. It takes
    /// whatever number the stream gives it.
    Fence = 4,
    /// One of several, with numbers one after the other, that say together what a control message says.
    ControlPart = 5,
}

/// A message's head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Head {
    pub kind: Kind,
    /// Our own number, without gaps over the whole stream; also the sequence number that the stream has to give it. 0 in
    /// a fence.
    pub number: u64,
    /// How many journal servers have opened the stream: whose message it is.
    pub generation: u64,
    /// Tells that journal server from any other that took itself for the same.
    pub run: u64,
    /// The segment; 0 for what is in none.
    pub segment: u64,
    /// Where in its segment, in bytes.
    pub offset: u64,
}

impl Head {
    /// The message.
    pub fn write(&self, content: &[u8]) -> Vec<u8> {
        let mut out = Vec::with_capacity(HEAD_BYTES + content.len());
        out.extend_from_slice(&MAGIC.to_le_bytes());
        out.extend_from_slice(&[self.kind as u8, VERSION, 0, 0]);
        for word in [self.number, self.generation, self.run, self.segment, self.offset] {
            out.extend_from_slice(&word.to_le_bytes());
        }
        out.extend_from_slice(&(content.len() as u32).to_le_bytes());
        out.extend_from_slice(&crc32c::crc32c(content).to_le_bytes());
        let crc = crc32c::crc32c(&out);
        out.extend_from_slice(&crc.to_le_bytes());
        debug_assert_eq!(out.len(), HEAD_BYTES);
        out.extend_from_slice(content);
        out
    }

    /// Reads a message; says what is wrong with it.
    pub fn read(bytes: &[u8]) -> Result<(Self, &[u8]), &'static str> {
        let (head, content) = bytes.split_at_checked(HEAD_BYTES).ok_or("it is too short")?;
        let mut reader = Reader::new(head);
        let fields = |reader: &mut Reader<'_>| {
            let (magic, [kind, version, ..]) = (reader.u32()?, reader.array::<4>()?);
            let mut words = [0; 5];
            for word in &mut words {
                *word = reader.u64()?;
            }
            Some((magic, kind, version, words, reader.u32()?, reader.u32()?, reader.u32()?))
        };
        let (magic, kind, version, words, content_bytes, content_crc, crc) =
            fields(&mut reader).ok_or("it is too short")?;
        if magic != MAGIC || crc != crc32c::crc32c(&head[..HEAD_BYTES - 4]) {
            return Err("its head's checksum does not match");
        }
        if version != VERSION {
            return Err("it is of another version of amberlog");
        }
        if content_bytes as usize != content.len() || content_crc != crc32c::crc32c(content) {
            return Err("its checksum does not match");
        }
        let known = [Kind::Piece, Kind::Ends, Kind::Control, Kind::Fence, Kind::ControlPart];
        let kind = known.into_iter().find(|known| *known as u8 == kind);
        let kind = kind.ok_or("it is of another version of amberlog")?;
        let [number, generation, run, segment, offset] = words;
        Ok((Head { kind, number, generation, run, segment, offset }, content))
    }
}

/// Numbers that may be missing from the stream: ranges, first and last, ascending, apart from each other.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Absent(Vec<(u64, u64)>);

impl Absent {
    pub fn insert(&mut self, number: u64) {
        let at = self.0.partition_point(|(_, last)| last.saturating_add(1) < number);
        match self.0.get_mut(at) {
            Some((first, last)) if number.saturating_add(1) >= *first => {
                *first = (*first).min(number);
                *last = (*last).max(number);
                if let Some(&(next_first, next_last)) = self.0.get(at + 1)
                    && next_first == number + 1
                {
                    self.0[at].1 = next_last;
                    self.0.remove(at + 1);
                }
            }
            _ => self.0.insert(at, (number, number)),
        }
    }

    /// Adds many at once: those of a segment may lie between as many that stay.
    pub fn insert_all(&mut self, mut numbers: Vec<u64>) {
        numbers.sort_unstable();
        let mut known = std::mem::take(&mut self.0).into_iter().peekable();
        let mut added = numbers.into_iter().map(|number| (number, number)).peekable();
        loop {
            let is_known_next = match (known.peek(), added.peek()) {
                (Some(known), Some(added)) => known <= added,
                (Some(_), None) => true,
                (None, Some(_)) => false,
                (None, None) => return,
            };
            let Some((first, last)) = (if is_known_next { known.next() } else { added.next() }) else { return };
            match self.0.last_mut() {
                Some((_, before)) if before.saturating_add(1) >= first => *before = (*before).max(last),
                _ => self.0.push((first, last)),
            }
        }
    }

    pub fn contains(&self, number: u64) -> bool {
        let at = self.0.partition_point(|(_, last)| *last < number);
        self.0.get(at).is_some_and(|(first, _)| *first <= number)
    }

    /// Numbers from 1 to the last that have to be there.
    pub fn others(&self, last: u64) -> impl Iterator<Item = u64> {
        let end = last.saturating_add(1);
        let ranges = self.0.iter().copied().chain(std::iter::once((end, end)));
        let gaps = ranges.scan(1, move |next, (first, last)| {
            let gap = *next..first.min(end);
            *next = last.saturating_add(1);
            Some(gap)
        });
        gaps.flatten()
    }

    /// Contents of the messages that say this, one after the other, each with its kind. `before` is the last of those that said it
    /// before; 0: none.
    ///
    /// # Errors
    /// A sentence when there are too many ranges.
    pub fn write(&self, before: u64) -> Result<Vec<(Kind, Vec<u8>)>, String> {
        self.write_in(before, RANGES_MAX)
    }

    fn write_in(&self, before: u64, ranges_max: usize) -> Result<Vec<(Kind, Vec<u8>)>, String> {
        let bytes_of = |ranges: &[(u64, u64)]| -> Vec<u8> {
            ranges.iter().flat_map(|(first, last)| [first.to_le_bytes(), last.to_le_bytes()].concat()).collect()
        };
        if self.0.len() <= ranges_max {
            // As it was before there were parts, for whoever does not know them.
            return Ok(vec![(Kind::Control, bytes_of(&self.0))]);
        }
        let parts = self.0.chunks(ranges_max);
        let of = u32::try_from(parts.len()).ok().filter(|of| *of <= PARTS_MAX);
        let of = of.ok_or_else(|| format!("{} ranges of its numbers are missing, which is too many", self.0.len()))?;
        let written = |(index, ranges): (u32, &[(u64, u64)])| {
            (Kind::ControlPart, [Part { index, of, before }.write(), bytes_of(ranges)].concat())
        };
        Ok((0..of).zip(parts).map(written).collect())
    }

    /// What the content of a control message says.
    pub fn read(bytes: &[u8]) -> Option<Self> {
        let mut absent = Absent::default();
        absent.read_more(bytes).then_some(absent)
    }

    /// Adds what the next message says; false where that is not well-formed.
    pub fn read_more(&mut self, bytes: &[u8]) -> bool {
        let (ranges, rest) = bytes.as_chunks::<16>();
        if !rest.is_empty() || ranges.len() > RANGES_MAX {
            return false;
        }
        ranges.iter().all(|range| {
            let mut reader = Reader::new(range);
            let Some((first, last)) = reader.u64().zip(reader.u64()) else { return false };
            let before = self.0.last().map_or(0, |(_, last)| *last);
            self.0.push((first, last));
            first > before && last >= first
        })
    }
}

/// Which of the messages that say together what is missing one is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Part {
    pub index: u32,
    pub of: u32,
    /// The last of those that said it before, all of them: what counts where the writer did not come to the end. 0: none.
    pub before: u64,
}

impl Part {
    fn write(&self) -> Vec<u8> {
        [&self.index.to_le_bytes()[..], &self.of.to_le_bytes(), &self.before.to_le_bytes()].concat()
    }

    /// Reads a message's content; gives the ranges in it as well.
    pub fn read(bytes: &[u8]) -> Option<(Self, &[u8])> {
        let (part, ranges) = bytes.split_at_checked(16)?;
        let mut reader = Reader::new(part);
        let part = Part { index: reader.u32()?, of: reader.u32()?, before: reader.u64()? };
        (part.index < part.of && part.of <= PARTS_MAX).then_some((part, ranges))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    const HEAD: Head = Head { kind: Kind::Piece, number: 7, generation: 3, run: 9, segment: 2, offset: 640 };

    #[test]
    fn a_message_is_read_as_it_was_written() {
        let bytes = HEAD.write(b"content");
        assert_eq!(Head::read(&bytes), Ok((HEAD, &b"content"[..])));
    }

    #[test]
    fn no_flipped_bit_and_no_cut_goes_unseen() {
        let bytes = HEAD.write(b"some content");
        for bit in 0..bytes.len() * 8 {
            let mut bytes = bytes.clone();
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert!(Head::read(&bytes).is_err(), "bit {bit}");
        }
        (0..bytes.len()).for_each(|len| assert!(Head::read(&bytes[..len]).is_err(), "{len}"));
    }

    fn written(absent: &Absent) -> Vec<u8> {
        let mut messages = absent.write(0).expect("not too many");
        assert_eq!((messages.len(), messages[0].0), (1, Kind::Control));
        messages.remove(0).1
    }

    #[test]
    fn ranges_out_of_order_are_refused() {
        let of = |ranges: &[(u64, u64)]| Absent::read(&written(&Absent(ranges.to_vec())));
        assert!(of(&[(1, 2), (4, 4)]).is_some());
        for wrong in [&[(0, 2)][..], &[(2, 1)], &[(4, 5), (1, 2)], &[(1, 4), (4, 5)]] {
            assert!(of(wrong).is_none(), "{wrong:?}");
        }
        assert!(Absent::read(&[0; 15]).is_none());
    }

    proptest! {
        #[test]
        fn ranges_hold_what_was_put_in(
            numbers in proptest::collection::vec(1u64..60, 0..60),
            at_once in proptest::collection::vec(1u64..60, 0..30),
        ) {
            let mut absent = Absent::default();
            let mut model = BTreeSet::new();
            for number in numbers {
                absent.insert(number);
                model.insert(number);
            }
            model.extend(&at_once);
            absent.insert_all(at_once);
            let read = Absent::read(&written(&absent)).expect("well-formed");
            // The same in parts.
            let mut of_parts = Absent::default();
            for (index, (kind, content)) in (0..).zip(absent.write_in(5, 3).expect("not too many")) {
                let content = match kind {
                    Kind::ControlPart => {
                        let (part, ranges) = Part::read(&content).expect("well-formed");
                        prop_assert_eq!((part.index, part.before), (index, 5));
                        ranges
                    }
                    _ => &content,
                };
                prop_assert!(of_parts.read_more(content));
            }
            prop_assert_eq!(&of_parts, &absent);
            prop_assert_eq!(&read, &absent);
            (0..62).for_each(|number| assert_eq!(absent.contains(number), model.contains(&number), "{number}"));
            let others: Vec<u64> = absent.others(50).collect();
            prop_assert_eq!(others, (1..=50).filter(|number| !model.contains(number)).collect::<Vec<_>>());
            // No more ranges than there are gaps.
            let runs = model.iter().filter(|number| !model.contains(&(*number - 1))).count();
            prop_assert_eq!(absent.0.len(), runs);
        }
    }
}
