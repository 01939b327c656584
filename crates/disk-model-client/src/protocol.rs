//! What goes over the socket between a virtual disk and a modelled one: records of four 64-bit words one way (tag, kind,
//! offset, length), of one word (the tag) the other way, little-endian. The first record each way is the greeting.

use crate::request::{Kind, Request};

/// A record of the virtual disk's.
pub const RECORD_BYTES: usize = 32;
/// An answer of the model's.
pub const ANSWER_BYTES: usize = 8;
/// The kind of a greeting: its length is the virtual disk's size.
const GREETING: u64 = 0x616d_6265_7201;
/// The answer to a greeting: there is room.
pub const WELCOME: u64 = 1;
/// The answer to a greeting: there is none.
pub const FULL: u64 = 2;

/// One record, understood.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Record {
    /// The first one.
    Greeting {
        /// The virtual disk's size.
        size_bytes: u64,
    },
    /// Any later one.
    Request(Request),
}

impl Record {
    /// As it is sent.
    pub fn to_bytes(self) -> [u8; RECORD_BYTES] {
        let words = match self {
            Record::Greeting { size_bytes } => [0, GREETING, 0, size_bytes],
            Record::Request(Request { tag, kind, offset, len }) => {
                let kind = match kind {
                    Kind::Read => 0,
                    Kind::Write => 1,
                    Kind::Flush => 2,
                    Kind::Command => 3,
                };
                [tag, kind, offset, len]
            }
        };
        let mut bytes = [0; RECORD_BYTES];
        for (chunk, word) in bytes.chunks_exact_mut(8).zip(words) {
            chunk.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// What was sent; nothing if it makes no sense.
    pub fn from_bytes(bytes: &[u8; RECORD_BYTES]) -> Option<Self> {
        let mut words = [0u64; 4];
        for (word, chunk) in words.iter_mut().zip(bytes.chunks_exact(8)) {
            *word = u64::from_le_bytes(chunk.try_into().ok()?);
        }
        let [tag, kind, offset, len] = words;
        let kind = match kind {
            GREETING => return Some(Record::Greeting { size_bytes: len }),
            0 => Kind::Read,
            1 => Kind::Write,
            2 => Kind::Flush,
            3 => Kind::Command,
            _ => return None,
        };
        Some(Record::Request(Request { tag, kind, offset, len }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_round_trip_and_nonsense_is_nothing() {
        for kind in [Kind::Read, Kind::Write, Kind::Flush, Kind::Command] {
            let record = Record::Request(Request { tag: 7, kind, offset: 1 << 40, len: 4096 });
            assert_eq!(Record::from_bytes(&record.to_bytes()), Some(record));
        }
        let greeting = Record::Greeting { size_bytes: 5 };
        assert_eq!(Record::from_bytes(&greeting.to_bytes()), Some(greeting));
        assert_eq!(Record::from_bytes(&[0xff; RECORD_BYTES]), None);
    }
}
