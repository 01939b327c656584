//! What a daemon and its depot say to each other, as bytes: the kind, then numbers little-endian, then texts, each with its length before it.

use crate::channel::Channel;
use crate::vault::BYTES_MAX as ITEM_BYTES_MAX;
use rustix::net::RecvFlags;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

/// Another number where the two say other things.
pub(super) const FORMAT: u32 = 1;
/// How the first message of each begins: whoever says anything else is neither.
const MAGIC: &[u8; 8] = b"amberld1";
/// Of an item's name in the store.
const NAME_BYTES_MAX: usize = 64;
/// Of one message.
const BYTES_MAX: usize = ITEM_BYTES_MAX + NAME_BYTES_MAX + 16;

/// See the module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Message {
    /// A daemon has come, and is heard from now on.
    Daemon { format: u32 },
    /// The depot, which is this process, has heard that; what it has follows.
    Depot { format: u32, pid: i32 },
    /// Another daemon is there.
    Busy,
    /// Who came is fenced in further than the daemon before, as what serves a guest is, and gets nothing.
    Refused,
    /// An item, under its name in the store, with the descriptors that come along: from the depot, it has it; from the daemon, it is to be kept.
    Item { name: String, item: String, words: Vec<u8> },
    /// That was all.
    All,
    /// Let go of what has this name.
    Remove { name: String },
}

impl Message {
    fn encode(&self) -> Vec<u8> {
        let text = |bytes: &mut Vec<u8>, text: &str| {
            bytes.extend((text.len() as u32).to_le_bytes());
            bytes.extend(text.as_bytes());
        };
        let mut bytes = Vec::new();
        match self {
            Message::Daemon { format } => {
                bytes.push(b'd');
                bytes.extend(MAGIC);
                bytes.extend(format.to_le_bytes());
            }
            Message::Depot { format, pid } => {
                bytes.push(b'D');
                bytes.extend(MAGIC);
                bytes.extend(format.to_le_bytes());
                bytes.extend(pid.to_le_bytes());
            }
            Message::Busy => bytes.push(b'b'),
            Message::Refused => bytes.push(b'f'),
            Message::Item { name, item, words } => {
                bytes.push(b'i');
                text(&mut bytes, name);
                text(&mut bytes, item);
                bytes.extend(words);
            }
            Message::All => bytes.push(b'a'),
            Message::Remove { name } => {
                bytes.push(b'r');
                text(&mut bytes, name);
            }
        }
        bytes
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let (kind, mut rest) = bytes.split_first()?;
        let number = |rest: &mut &[u8]| {
            let (number, left) = rest.split_first_chunk::<4>()?;
            *rest = left;
            Some(u32::from_le_bytes(*number))
        };
        let text = |rest: &mut &[u8]| {
            let length = number(rest)? as usize;
            let (text, left) = rest.split_at_checked(length)?;
            *rest = left;
            String::from_utf8(text.to_vec()).ok()
        };
        let message = match kind {
            b'd' => {
                rest = rest.strip_prefix(MAGIC)?;
                Message::Daemon { format: number(&mut rest)? }
            }
            b'D' => {
                rest = rest.strip_prefix(MAGIC)?;
                Message::Depot { format: number(&mut rest)?, pid: number(&mut rest)?.cast_signed() }
            }
            b'b' => Message::Busy,
            b'f' => Message::Refused,
            b'i' => {
                let (name, item) = (text(&mut rest)?, text(&mut rest)?);
                Message::Item { name, item, words: std::mem::take(&mut rest).to_vec() }
            }
            b'a' => Message::All,
            b'r' => Message::Remove { name: text(&mut rest)? },
            _ => return None,
        };
        rest.is_empty().then_some(message)
    }

    pub(super) fn send(&self, to: &Channel, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        to.send_bytes(&self.encode(), BYTES_MAX, descriptors)
    }

    /// Nothing at the end.
    pub(super) fn receive(from: &Channel) -> io::Result<Option<(Self, Vec<OwnedFd>)>> {
        Self::receive_so(from, RecvFlags::empty())
    }

    /// The same, or an error (`WouldBlock`) where nothing has come yet.
    pub(super) fn receive_at_once(from: &Channel) -> io::Result<Option<(Self, Vec<OwnedFd>)>> {
        Self::receive_so(from, RecvFlags::DONTWAIT)
    }

    fn receive_so(from: &Channel, flags: RecvFlags) -> io::Result<Option<(Self, Vec<OwnedFd>)>> {
        let Some((bytes, descriptors)) = from.receive_bytes(BYTES_MAX, flags)? else { return Ok(None) };
        let message = Self::decode(&bytes).ok_or_else(|| io::Error::other("what was said is not understood"))?;
        Ok(Some((message, descriptors)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_is_heard_and_nothing_else() {
        let name = "amberlog-7".to_owned();
        let messages = [
            Message::Daemon { format: 1 },
            Message::Depot { format: u32::MAX, pid: -1 },
            Message::Busy,
            Message::Refused,
            Message::Item { name: name.clone(), item: "one/kept/vmm".to_owned(), words: vec![0, 255, 1] },
            Message::Item { name: String::new(), item: String::new(), words: Vec::new() },
            Message::All,
            Message::Remove { name },
        ];
        for message in messages {
            let bytes = message.encode();
            assert_eq!(Message::decode(&bytes).as_ref(), Some(&message));
            let has_words = matches!(message, Message::Item { .. });
            for cut in 0..bytes.len() {
                assert!(has_words || Message::decode(&bytes[..cut]).is_none(), "{message:?} cut at {cut}");
            }
            assert!(has_words || Message::decode(&[&bytes[..], &[0]].concat()).is_none());
        }
        for strange in [&b""[..], b"x", b"i\xff\xff\xff\xff", b"r\x02\0\0\0\xff\xff", b"dsomething"] {
            assert_eq!(Message::decode(strange), None, "{strange:?}");
        }
    }
}
