//! A store's segments in a NATS JetStream stream: what was acknowledged is on most of its replicas, and on their disks where
//! the servers run with `sync_interval: always`.
//!
//! A segment is a subject; what a group writes is one message, or a few. Everything that the store does on a directory it
//! does here: records, groups, checkpoints, cleaning, epochs. What this adds, because a replicated log fails in its own ways:
//! * every message carries a number without gaps over the whole stream, who wrote it, its place in its segment, and
//!   checksums;
//! * it is published under a name of its own (`Nats-Msg-Id`) and on condition that the stream's last message is the one
//!   before (`Nats-Expected-Last-Sequence`): published again, it is no second message; and a second server on the same
//!   stream fences off the first, whichever replica leads;
//! * before a segment is removed, a control message says which numbers may be missing from then on. Any other number that
//!   is missing is a gap;
//! * where a number is missing or a checksum is wrong, another replica is made leader and asked, and only what no leader
//!   can give is lost; then the stream is refused.
//!
//! What must always hold: nothing is acknowledged before the stream has acknowledged it; when it is not known whether a
//! message is there, nothing else is published before it is; nothing is read past a gap.
//!
//! Failure story: a cluster that has no leader, or is not reached, is waited for as long as [`NatsOptions::patience`] says;
//! then the store has failed, and its clients go on on their own storage. A stream that is full refuses new segments, as a
//! full disk does.

mod config;
mod message;
mod options;
mod stream;
mod survey;

pub use options::{NatsAddress, NatsOptions};

use crate::store::{Medium, SegmentFile};
use bytes::Bytes;
use message::{HEAD_BYTES, Kind};
use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use stream::{Link, Read};

/// How long one answer of the servers is waited for.
const ANSWER: Duration = Duration::from_secs(3);
/// Other leaders that are asked for a message that one cannot read.
const OTHER_LEADERS_ASKED: usize = 2;
/// Bytes that are read ahead.
const AHEAD_BYTES_MAX: u64 = 8 << 20;
/// Messages that are read ahead.
const AHEAD_MAX: usize = 64;

/// Part of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Piece {
    offset: u64,
    len: u64,
    /// The message that it is in.
    number: u64,
}

/// What the stream has of a segment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Content {
    /// By offset.
    pieces: Vec<Piece>,
    /// Numbers of all its messages, those that count no more as well.
    numbers: Vec<u64>,
}

impl Content {
    fn add(&mut self, piece: Piece) {
        self.numbers.push(piece.number);
        self.pieces.push(piece);
    }

    /// What lies behind an offset does not count any more, says a message of this number.
    fn cut(&mut self, end: u64, number: u64) {
        self.numbers.push(number);
        self.pieces.retain(|piece| piece.offset < end);
        if let Some(last) = self.pieces.last_mut() {
            last.len = last.len.min(end - last.offset);
        }
    }

    fn len(&self) -> u64 {
        self.pieces.last().map_or(0, |last| last.offset + last.len)
    }
}

struct Shared {
    link: Link,
    segments: BTreeMap<u64, Content>,
    /// Messages that were read last, with their heads.
    window: BTreeMap<u64, Bytes>,
    /// The last message of them that was asked for.
    read_last: u64,
    /// Segments whose messages could not be removed yet: up to which number.
    leftovers: BTreeMap<u64, u64>,
}

/// A stream as a store's medium.
pub struct JetStream(Arc<Mutex<Shared>>);

/// One segment of it.
pub struct Segment {
    shared: Arc<Mutex<Shared>>,
    number: u64,
}

fn lock(shared: &Mutex<Shared>) -> MutexGuard<'_, Shared> {
    shared.lock().expect("no panic under this lock")
}

impl JetStream {
    /// Opens a stream, made if there is none, reads and checks all of it, and fences off the journal server that had it
    /// before.
    ///
    /// # Errors
    /// When no server answers, the stream is not kept as a store needs it, or something of it is lost on every replica.
    pub fn open(options: NatsOptions) -> io::Result<Self> {
        let mut link = Link::open(options)?;
        let segments = survey::open(&mut link)?;
        let (window, leftovers) = (BTreeMap::new(), BTreeMap::new());
        Ok(JetStream(Arc::new(Mutex::new(Shared { link, segments, window, read_last: 0, leftovers }))))
    }

    fn segment(&self, number: u64) -> Segment {
        Segment { shared: Arc::clone(&self.0), number }
    }
}

impl Medium for JetStream {
    type File = Segment;

    /// Messages lie beside nothing: records have their own multiple.
    fn block_bytes(&self) -> usize {
        64
    }

    fn list(&self) -> io::Result<Vec<u64>> {
        Ok(lock(&self.0).segments.keys().copied().collect())
    }

    fn create(&mut self, number: u64, bytes: u64) -> io::Result<Segment> {
        let mut shared = lock(&self.0);
        if !shared.link.has_room_for(bytes)? {
            let reason = format!("the stream {} has no room for {bytes} bytes more", shared.link.name());
            return Err(io::Error::new(io::ErrorKind::StorageFull, reason));
        }
        shared.segments.insert(number, Content::default());
        drop(shared);
        Ok(self.segment(number))
    }

    /// It is there with its first message.
    fn publish(&mut self, _number: u64) -> io::Result<()> {
        Ok(())
    }

    /// By the numbers of its messages.
    fn proves_its_end(&self) -> bool {
        true
    }

    fn open(&self, number: u64) -> io::Result<Segment> {
        Ok(self.segment(number))
    }

    /// First it is written down that its messages may be missing, then they are removed. That they are is not waited for
    /// without end: what is left is removed the next time.
    fn delete(&mut self, number: u64) -> io::Result<()> {
        let mut shared = lock(&self.0);
        let Shared { link, segments, leftovers, .. } = &mut *shared;
        let Some(content) = segments.remove(&number) else { return Ok(()) };
        let Some(last) = content.numbers.iter().copied().max() else { return Ok(()) };
        link.absent.insert_all(content.numbers);
        survey::publish_control(link)?;
        leftovers.insert(number, last);
        leftovers.retain(|segment, last| match link.purge(&link.segment_subject(*segment), *last) {
            Ok(()) => false,
            Err(error) => {
                log::warn!("{error}");
                true
            }
        });
        Ok(())
    }
}

impl SegmentFile for Segment {
    fn write_at(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let mut shared = lock(&self.shared);
        let mut at = offset;
        for part in bytes.chunks(config::CONTENT_BYTES_MAX) {
            let number = shared.link.publish(Kind::Piece, self.number, at, part)?;
            let piece = Piece { offset: at, len: part.len() as u64, number };
            shared.segments.entry(self.number).or_default().add(piece);
            at += part.len() as u64;
        }
        Ok(())
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        let mut shared = lock(&self.shared);
        let mut at = 0;
        while at < buffer.len() {
            let byte = offset + at as u64;
            let (piece, message) = shared.message_with(self.number, byte)?;
            let from = (byte - piece.offset) as usize;
            let len = (piece.len as usize - from).min(buffer.len() - at);
            let content = &message[HEAD_BYTES..];
            let content = content.get(from..from + len).ok_or(io::ErrorKind::UnexpectedEof)?;
            buffer[at..at + len].copy_from_slice(content);
            at += len;
        }
        Ok(())
    }

    fn sync(&mut self) -> io::Result<()> {
        // The stream has acknowledged every message, which is when it is durable.
        Ok(())
    }

    fn truncate(&mut self, bytes: u64) -> io::Result<()> {
        if SegmentFile::len(self)? <= bytes {
            return Ok(());
        }
        let mut shared = lock(&self.shared);
        let number = shared.link.publish(Kind::Ends, self.number, bytes, &[])?;
        shared.segments.entry(self.number).or_default().cut(bytes, number);
        Ok(())
    }

    fn len(&self) -> io::Result<u64> {
        let shared = lock(&self.shared);
        Ok(shared.segments.get(&self.number).map_or(0, Content::len))
    }
}

impl Shared {
    /// The piece that has this byte of a segment, and its message; from another replica where the leader's is damaged.
    fn message_with(&mut self, segment: u64, byte: u64) -> io::Result<(Piece, Bytes)> {
        let pieces = self.segments.get(&segment).map_or(&[][..], |content| content.pieces.as_slice());
        let at = pieces.partition_point(|piece| piece.offset + piece.len <= byte);
        let Some(piece) = pieces.get(at).copied().filter(|piece| piece.offset <= byte) else {
            return Err(io::ErrorKind::UnexpectedEof.into());
        };
        let was_before = at > 0 && pieces[at - 1].number == self.read_last;
        self.read_last = piece.number;
        if let Some(message) = self.window.get(&piece.number) {
            return Ok((piece, message.clone()));
        }
        // Who reads one after the other wants the next ones soon.
        let ahead = if was_before { AHEAD_MAX } else { 1 };
        let mut bytes = 0;
        let numbers: Vec<u64> = pieces[at..]
            .iter()
            .take(ahead)
            .take_while(|piece| {
                bytes += piece.len;
                bytes <= AHEAD_BYTES_MAX.max(piece.len)
            })
            .map(|piece| piece.number)
            .collect();
        self.window.clear();
        for other in 0..=OTHER_LEADERS_ASKED {
            let mut why = "it is not there".to_owned();
            let window = &mut self.window;
            self.link.read(numbers.iter().copied(), |number, read| {
                match read {
                    Read::Whole(_, message) => {
                        window.insert(number, message);
                    }
                    Read::Damaged(what) if number == piece.number => why = what,
                    _ => {}
                }
                Ok(())
            })?;
            if let Some(message) = self.window.get(&piece.number) {
                return Ok((piece, message.clone()));
            }
            log::warn!("stream {}: message {} cannot be read: {why}", self.link.name(), piece.number);
            if other < OTHER_LEADERS_ASKED && self.link.replicas() > 1 {
                let followers = self.link.standing()?.followers;
                self.link.move_leader(followers.get(other % followers.len().max(1)).map(String::as_str))?;
            }
        }
        let reason = format!("message {} of the stream {} is lost or damaged", piece.number, self.link.name());
        Err(io::Error::new(io::ErrorKind::InvalidData, reason))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_segment_that_ends_earlier_is_cut() {
        let mut content = Content::default();
        for (number, (offset, len)) in [(0, 64), (64, 128), (192, 64)].into_iter().enumerate() {
            content.add(Piece { offset, len, number: number as u64 });
        }
        content.cut(128, 7);
        assert_eq!((content.len(), content.pieces.len()), (128, 2));
        content.cut(0, 8);
        assert_eq!((content.len(), content.pieces.len()), (0, 0));
        // Its messages are still in the stream, and have to be known when it is removed.
        assert_eq!(content.numbers, [0, 1, 2, 7, 8]);
    }
}
