//! The logs of an area, each behind a lock of its own, and what is known of them without it.
//!
//! Lock order: the list of logs, then a log, then the pages (`pages`), then what is taken for a moment with nothing under it (`budget`). Nobody
//! has two logs' locks at a time, and the list is only had for a moment, but where a log is adopted. What concerns several logs looks at
//! one after the other ([`Logs::find`], [`Logs::all`]): each such place says why it is right that the first may have changed when the last is looked at.

use crate::jcb::VmJcb;
use crate::pages::Pages;
use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, TryLockError};
use std::time::Duration;
use tracing_mutex::stdsync::{Mutex, MutexGuard, RwLock, RwLockWriteGuard};

/// Names a log within its VM's area.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LogId(pub usize);

#[derive(Debug)]
pub(crate) struct Files {
    pub name: String,
    pub table: PathBuf,
    pub pool: PathBuf,
}

/// What a log says of itself whenever its lock is let go. Of two logs that grow at a time, at least one sees both when it asks afterwards whether that is too
/// much: stores and loads have one order (`SeqCst`).
#[derive(Debug, Default)]
struct Published {
    /// Tables and copied blocks.
    memory_bytes: AtomicU64,
    /// The copied blocks, with the room that is kept for more.
    pool_bytes: AtomicU64,
    /// Of these what nothing is in.
    spare_bytes: AtomicU64,
    /// Blocks that are in use.
    used_bytes: AtomicU64,
    /// The host may write home what is owed.
    is_writable: AtomicBool,
}

/// A log.
#[derive(Debug)]
pub(crate) struct Cell {
    pub id: LogId,
    pub files: Files,
    jcb: Mutex<VmJcb>,
    /// The log was forgotten while home writes were in flight, which may read from its pool: it goes with the last one. Changes under its lock.
    is_leaving: AtomicBool,
    published: Published,
}

impl Cell {
    /// Locks it.
    pub fn lock(&self) -> Locked<'_> {
        Locked { jcb: self.jcb.lock().expect("no panic under a log's lock"), cell: self }
    }

    /// The same, if nobody has it.
    pub fn try_lock(&self) -> Option<Locked<'_>> {
        match self.jcb.try_lock() {
            Ok(jcb) => Some(Locked { jcb, cell: self }),
            Err(TryLockError::WouldBlock) => None,
            Err(TryLockError::Poisoned(_)) => panic!("no panic under a log's lock"),
        }
    }

    /// Does something with it, under its lock. Pages that are released go to the books of pages.
    pub fn locked<T>(&self, pages: &Pages, act: impl FnOnce(&mut Locked<'_>) -> T) -> T {
        let mut jcb = self.lock();
        let given = act(&mut jcb);
        pages.add_loose(std::mem::take(&mut jcb.loose));
        given
    }

    #[cfg(test)]
    pub fn is_locked(&self) -> bool {
        self.try_lock().is_none()
    }

    pub fn is_leaving(&self) -> bool {
        self.is_leaving.load(Ordering::SeqCst)
    }

    pub fn memory_bytes(&self) -> u64 {
        self.published.memory_bytes.load(Ordering::SeqCst)
    }

    pub fn pool_bytes(&self) -> u64 {
        self.published.pool_bytes.load(Ordering::SeqCst)
    }

    pub fn spare_bytes(&self) -> u64 {
        self.published.spare_bytes.load(Ordering::SeqCst)
    }

    pub fn used_bytes(&self) -> u64 {
        self.published.used_bytes.load(Ordering::SeqCst)
    }

    pub fn is_writable(&self) -> bool {
        self.published.is_writable.load(Ordering::SeqCst)
    }
}

/// A log whose lock is held.
pub(crate) struct Locked<'a> {
    jcb: MutexGuard<'a, VmJcb>,
    cell: &'a Cell,
}

impl Locked<'_> {
    /// It was forgotten.
    pub fn set_leaving(&self) {
        self.cell.is_leaving.store(true, Ordering::SeqCst);
    }

    /// It was forgotten, and its last home write has ended: nobody needs it any more. That stays so, since none begins in a log that is leaving.
    pub fn has_left(&self) -> bool {
        self.cell.is_leaving() && self.jcb.in_flight.is_empty()
    }
}

impl Deref for Locked<'_> {
    type Target = VmJcb;

    fn deref(&self) -> &VmJcb {
        &self.jcb
    }
}

impl DerefMut for Locked<'_> {
    fn deref_mut(&mut self) -> &mut VmJcb {
        &mut self.jcb
    }
}

impl Drop for Locked<'_> {
    /// Under the lock still, so that the last who had it has the last word.
    fn drop(&mut self) {
        let say = |known: &AtomicU64, now: u64| {
            if known.load(Ordering::Relaxed) != now {
                known.store(now, Ordering::SeqCst);
            }
        };
        let (jcb, published) = (&*self.jcb, &self.cell.published);
        say(&published.memory_bytes, jcb.area_bytes() + jcb.pool.memory_bytes());
        say(&published.pool_bytes, jcb.pool.memory_bytes());
        say(&published.spare_bytes, jcb.pool.spare_bytes());
        say(&published.used_bytes, jcb.pool.used_bytes());
        // Only its guest can do anything about the others.
        let is_writable =
            !jcb.is_torn && jcb.contradiction.is_none() && !jcb.table.is_materialise() && !jcb.has_nothing_to_write;
        if published.is_writable.load(Ordering::Relaxed) != is_writable {
            published.is_writable.store(is_writable, Ordering::SeqCst);
        }
    }
}

/// The logs that are there, by their numbers. A number is not used again, since whoever names a log that was forgotten must not find another;
/// and a guest can have as many forgotten as it likes, which take nothing and are not walked over.
#[derive(Debug, Default)]
pub(crate) struct Listed {
    cells: BTreeMap<usize, Arc<Cell>>,
    /// The next one's number.
    next: usize,
}

impl Listed {
    pub fn add(&mut self, jcb: VmJcb, files: Files) -> LogId {
        let id = LogId(self.next);
        self.next += 1;
        let (is_leaving, published) = (AtomicBool::new(false), Published::default());
        let cell = Arc::new(Cell { id, files, jcb: Mutex::new(jcb), is_leaving, published });
        // What it takes counts before it is found.
        drop(cell.lock());
        self.cells.insert(id.0, cell);
        id
    }
}

/// So often those that are busy are looked at again, after a pause each, before one of them is waited for.
const BUSY_LOOKS: u32 = 50;
const BUSY_PAUSE: Duration = Duration::from_micros(50);

/// All of them.
#[derive(Debug, Default)]
pub(crate) struct Logs {
    listed: RwLock<Listed>,
}

impl Logs {
    /// The list, for who changes it.
    pub fn listed(&self) -> RwLockWriteGuard<'_, Listed> {
        self.listed.write().expect("no panic under this lock")
    }

    pub fn remove(&self, id: LogId) {
        self.listed().cells.remove(&id.0);
    }

    /// A log, also one that is leaving.
    pub fn cell(&self, id: LogId) -> Option<Arc<Cell>> {
        self.listed.read().expect("no panic under this lock").cells.get(&id.0).map(Arc::clone)
    }

    /// Those that are there at this moment, in the order of their numbers.
    pub fn all(&self) -> Vec<Arc<Cell>> {
        self.listed.read().expect("no panic under this lock").cells.values().map(Arc::clone).collect()
    }

    pub fn len(&self) -> usize {
        self.listed.read().expect("no panic under this lock").cells.len()
    }

    /// What all of them say of themselves, put together.
    pub fn sum(&self, bytes: impl Fn(&Cell) -> u64) -> u64 {
        self.listed.read().expect("no panic under this lock").cells.values().map(|cell| bytes(cell)).sum()
    }

    /// Looks at one log after the other, each under its lock, until something is found. Whoever has one for long does not keep others from being
    /// looked at: those come first that nobody has.
    pub fn find<T>(&self, mut look: impl FnMut(&Cell, &mut VmJcb) -> Option<T>) -> Option<T> {
        let mut look = |cell: &Cell, mut jcb: Locked<'_>| look(cell, &mut jcb);
        let cells = self.all();
        let mut in_use = Vec::new();
        for cell in &cells {
            match cell.try_lock() {
                Some(jcb) => {
                    if let Some(found) = look(cell, jcb) {
                        return Some(found);
                    }
                }
                None => in_use.push(cell),
            }
        }
        // Most are busy for a moment. One may be for long (it reads from storage for a guest that mounts), and need not be the one.
        for _ in 0..BUSY_LOOKS {
            if in_use.len() < 2 {
                break;
            }
            std::thread::sleep(BUSY_PAUSE);
            for cell in std::mem::take(&mut in_use) {
                let Some(jcb) = cell.try_lock() else {
                    in_use.push(cell);
                    continue;
                };
                if let Some(found) = look(cell, jcb) {
                    return Some(found);
                }
            }
        }
        in_use.into_iter().find_map(|cell| look(cell, cell.lock()))
    }
}
