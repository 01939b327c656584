//! The log as it is read: by tests, and by whoever replays it.

use crate::{FLAG_DISCARD, FLAG_FLUSH, FLAG_MARK, MAGIC, SECTOR_BYTES, VERSION};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// What an entry says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EntryKind {
    /// These bytes were written.
    Write(Vec<u8>),
    /// So many bytes were given back.
    Discard(u64),
    /// All before it is durable.
    Flush,
    /// A name for this place.
    Mark(String),
}

/// An entry of a log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Where on the image, in bytes.
    pub offset: u64,
    /// What happened.
    pub kind: EntryKind,
}

/// The entries of a log, in order.
///
/// # Errors
/// Each as it is read; a file that is no such log gives one error.
pub fn entries(log: &File) -> impl Iterator<Item = io::Result<Entry>> + '_ {
    let refuse = |reason: &str| io::Error::new(io::ErrorKind::InvalidData, reason.to_owned());
    let head = sector(log, 0).and_then(|head| match head[..4] {
        [MAGIC, VERSION, entries, SECTOR_BYTES] => Ok(entries),
        _ => Err(refuse("it is no log of writes with sectors of 512 bytes")),
    });
    let (mut left, mut failed) = match head {
        Ok(entries) => (entries, None),
        Err(error) => (0, Some(error)),
    };
    let mut at = 1;
    std::iter::from_fn(move || {
        if let Some(error) = failed.take() {
            return Some(Err(error));
        }
        left = left.checked_sub(1)?;
        let read = read_entry(log, &mut at);
        if read.is_err() {
            left = 0;
        }
        Some(read)
    })
}

fn read_entry(log: &File, at: &mut u64) -> io::Result<Entry> {
    let number = *at;
    let refuse = || io::Error::new(io::ErrorKind::InvalidData, format!("the entry at sector {number} is impossible"));
    let head = sector(log, *at)?;
    let [offset, count, flags, data_len] = head[..4] else { return Err(refuse()) };
    let bytes = count.checked_mul(SECTOR_BYTES).ok_or_else(refuse)?;
    let data_at = (*at + 1).checked_mul(SECTOR_BYTES).ok_or_else(refuse)?;
    if bytes > log.metadata()?.len() && flags & FLAG_DISCARD == 0 {
        return Err(refuse());
    }
    let kind = if flags & FLAG_MARK != 0 {
        let mut name = vec![0; usize::try_from(data_len).ok().filter(|len| *len <= 480).ok_or_else(refuse)?];
        log.read_exact_at(&mut name, *at * SECTOR_BYTES + 32)?;
        EntryKind::Mark(String::from_utf8_lossy(&name).into_owned())
    } else if flags & FLAG_DISCARD != 0 {
        EntryKind::Discard(bytes)
    } else if flags & FLAG_FLUSH != 0 && count == 0 {
        EntryKind::Flush
    } else {
        let mut data = vec![0; usize::try_from(bytes).map_err(|_| refuse())?];
        log.read_exact_at(&mut data, data_at)?;
        EntryKind::Write(data)
    };
    *at += 1 + if matches!(kind, EntryKind::Write(_)) { count } else { 0 };
    Ok(Entry { offset: offset.checked_mul(SECTOR_BYTES).ok_or_else(refuse)?, kind })
}

/// A sector as 64-bit numbers.
fn sector(log: &File, number: u64) -> io::Result<[u64; 64]> {
    let mut raw = [0; SECTOR_BYTES as usize];
    log.read_exact_at(&mut raw, number * SECTOR_BYTES)?;
    let mut fields = [0; 64];
    for (field, bytes) in fields.iter_mut().zip(raw.chunks_exact(8)) {
        *field = u64::from_le_bytes(bytes.try_into().unwrap_or_default());
    }
    Ok(fields)
}
