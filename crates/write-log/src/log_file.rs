//! The log as it is written.

use crate::{FLAG_DISCARD, FLAG_FLUSH, FLAG_MARK, MAGIC, SECTOR_BYTES, VERSION};
use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Mutex, MutexGuard};

/// Zeros that are written into the log at once, in bytes.
const ZEROS_BYTES: usize = 64 << 10;

/// A flush that is under way.
#[derive(Debug)]
#[must_use = "a flush that never ends keeps all that follows out of the log"]
pub struct Pending(u64);

/// What waits for a flush that is under way.
#[derive(Debug)]
enum Item {
    /// A flush; nothing yet, or whether it went well.
    Flush(u64, Option<bool>),
    Write(u64, Vec<u8>),
    Zeros(u64, u64),
    Discard(u64, u64),
    Mark(String),
}

#[derive(Debug)]
struct State {
    at: u64,
    entries: u64,
    next_flush: u64,
    waiting: VecDeque<Item>,
    has_ended: bool,
}

/// See the crate.
#[derive(Debug)]
pub struct WriteLog {
    file: File,
    name: String,
    state: Mutex<State>,
}

impl WriteLog {
    /// An empty log. A file that is there is written over if it is empty or such a log.
    ///
    /// # Errors
    /// When it cannot be made, or something else is there.
    pub fn create(path: &Path) -> io::Result<Self> {
        let file = File::options().read(true).write(true).create(true).truncate(false).open(path)?;
        Self::begin(file, path)
    }

    /// The same for a file that the caller has opened to be read and written; `path` is what it is called.
    ///
    /// # Errors
    /// As [`WriteLog::create`].
    pub fn begin(file: File, path: &Path) -> io::Result<Self> {
        let mut magic = [0; 8];
        if file.metadata()?.len() > 0
            && !(file.read_exact_at(&mut magic, 0).is_ok() && u64::from_le_bytes(magic) == MAGIC)
        {
            return Err(io::Error::new(
                io::ErrorKind::AlreadyExists,
                "there is a file that is no log of writes; name another one, or remove it",
            ));
        }
        file.set_len(0)?;
        let state = State { at: 1, entries: 0, next_flush: 0, waiting: VecDeque::new(), has_ended: false };
        let log = WriteLog { file, name: path.display().to_string(), state: Mutex::new(state) };
        log.write_head(0)?;
        Ok(log)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic under this lock")
    }

    /// A write has ended, and well.
    pub fn written(&self, offset: u64, bytes: &[u8]) {
        self.enter(|| Item::Write(offset, bytes.to_vec()));
    }

    /// A range was zeroed.
    pub fn zeroed(&self, offset: u64, len: u64) {
        self.enter(|| Item::Zeros(offset, len));
    }

    /// A range was given back; it reads as zeros.
    pub fn discarded(&self, offset: u64, len: u64) {
        self.enter(|| Item::Discard(offset, len));
    }

    /// A name for this place in the log, for whoever replays it.
    pub fn mark(&self, name: &str) {
        self.enter(|| Item::Mark(name.chars().take(400).collect()));
    }

    /// A flush is about to be sent: it covers what has ended before.
    pub fn flush_begins(&self) -> Pending {
        let mut state = self.lock();
        let number = state.next_flush;
        state.next_flush += 1;
        if !state.has_ended {
            state.waiting.push_back(Item::Flush(number, None));
        }
        Pending(number)
    }

    /// It has ended; without `is_ok` it was never sent, and is not in the log. For one that failed there is [`WriteLog::flush_failed`].
    pub fn flush_ended(&self, flush: &Pending, is_ok: bool) {
        let mut state = self.lock();
        for item in &mut state.waiting {
            if let Item::Flush(number, result) = item
                && *number == flush.0
            {
                *result = Some(is_ok);
            }
        }
        self.write_out(&mut state);
    }

    /// It was sent and failed. What it was to cover may be lost, and the next one, which succeeds, says nothing of that: the log ends here.
    pub fn flush_failed(&self, flush: &Pending) {
        self.flush_ended(flush, false);
        self.end("a flush failed, and whether what was written before is there nobody knows");
    }

    /// What is on the image is not known any more: the log ends here.
    pub fn end(&self, reason: &str) {
        let mut state = self.lock();
        if !state.has_ended {
            log::error!("the log of writes {} ends before its disk does: {reason}", self.name);
            state.has_ended = true;
            state.waiting.clear();
        }
    }

    fn enter(&self, item: impl FnOnce() -> Item) {
        let mut state = self.lock();
        if !state.has_ended {
            state.waiting.push_back(item());
            self.write_out(&mut state);
        }
    }

    /// Writes down what waits for no flush any more.
    fn write_out(&self, state: &mut State) {
        while let Some(item) = state.waiting.front() {
            if matches!(item, Item::Flush(_, None)) {
                return;
            }
            let Some(item) = state.waiting.pop_front() else { return };
            if let Err(error) = self.append(state, &item) {
                log::error!("the log of writes {} ends before its disk does: {error}", self.name);
                state.has_ended = true;
                state.waiting.clear();
            }
        }
    }

    fn append(&self, state: &mut State, item: &Item) -> io::Result<()> {
        let sectors = |len: u64| {
            if len.is_multiple_of(SECTOR_BYTES) {
                Ok(len / SECTOR_BYTES)
            } else {
                Err(io::Error::other("a write that is no whole number of sectors"))
            }
        };
        let (offset, count, flags, data_len) = match item {
            Item::Flush(_, Some(false) | None) => return Ok(()),
            Item::Flush(_, Some(true)) => (0, 0, FLAG_FLUSH, 0),
            Item::Write(offset, bytes) => (sectors(*offset)?, sectors(bytes.len() as u64)?, 0, 0),
            Item::Zeros(offset, len) => (sectors(*offset)?, sectors(*len)?, 0, 0),
            Item::Discard(offset, len) => (sectors(*offset)?, sectors(*len)?, FLAG_DISCARD, 0),
            Item::Mark(name) => (0, 0, FLAG_MARK, name.len() as u64),
        };
        let mut head = vec![0; SECTOR_BYTES as usize];
        for (index, field) in [offset, count, flags, data_len].into_iter().enumerate() {
            head[index * 8..index * 8 + 8].copy_from_slice(&field.to_le_bytes());
        }
        if let Item::Mark(name) = item {
            head[32..32 + name.len()].copy_from_slice(name.as_bytes());
        }
        let at = state.at * SECTOR_BYTES;
        self.file.write_all_at(&head, at)?;
        state.at += 1;
        match item {
            Item::Write(_, bytes) => {
                self.file.write_all_at(bytes, at + SECTOR_BYTES)?;
                state.at += count;
            }
            Item::Zeros(_, len) => {
                let zeros = vec![0; ZEROS_BYTES];
                let mut done = 0;
                while done < *len {
                    let part = (*len - done).min(ZEROS_BYTES as u64);
                    self.file.write_all_at(&zeros[..part as usize], at + SECTOR_BYTES + done)?;
                    done += part;
                }
                state.at += count;
            }
            _ => {}
        }
        state.entries += 1;
        self.write_head(state.entries)
    }

    /// The number of entries counts last, so that a log is good whenever its writer dies.
    fn write_head(&self, entries: u64) -> io::Result<()> {
        let mut head = vec![0; SECTOR_BYTES as usize];
        for (index, field) in [MAGIC, VERSION, entries, SECTOR_BYTES].into_iter().enumerate() {
            head[index * 8..index * 8 + 8].copy_from_slice(&field.to_le_bytes());
        }
        self.file.write_all_at(&head, 0)
    }
}
