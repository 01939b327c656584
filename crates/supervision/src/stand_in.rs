//! For tests: a store that forgets on demand, and what a process would find that is started after this one's death.

use crate::vault::{NAME, Opened, SEAL, Shelf, Store, envelope, read};
use rustix::fs::{MemfdFlags, memfd_create};
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::SystemTime;

/// Called after every change.
type Look = Arc<dyn Fn(&StandIn) + Send + Sync>;

/// See the module.
#[derive(Clone, Default)]
pub struct StandIn {
    inner: Arc<Mutex<Inner>>,
}

#[derive(Default)]
struct Inner {
    stored: BTreeMap<String, OwnedFd>,
    /// How often it was told something.
    told: usize,
    /// Which of these it misses.
    misses: Option<usize>,
    /// Takes no more than that, and says nothing.
    stored_max: Option<usize>,
    is_deaf: bool,
    look: Option<Look>,
}

impl Store for StandIn {
    fn put(&self, name: &str, descriptor: BorrowedFd<'_>) -> io::Result<()> {
        let descriptor = descriptor.try_clone_to_owned()?;
        self.hear(|inner| {
            if inner.stored_max.is_none_or(|max| inner.stored.len() < max) {
                inner.stored.insert(name.to_owned(), descriptor);
            }
        });
        Ok(())
    }

    fn remove(&self, name: &str) {
        self.hear(|inner| drop(inner.stored.remove(name)));
    }
}

impl StandIn {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().expect("no panic under this lock")
    }

    fn hear(&self, change: impl FnOnce(&mut Inner)) {
        let look = {
            let mut inner = self.lock();
            let told = inner.told;
            inner.told += 1;
            if inner.misses != Some(told) && !inner.is_deaf {
                change(&mut inner);
            }
            inner.look.clone()
        };
        if let Some(look) = look {
            look(self);
        }
    }

    /// Has something looked at whenever it was told something.
    pub fn look(&self, look: impl Fn(&StandIn) + Send + Sync + 'static) {
        self.lock().look = Some(Arc::new(look));
    }

    /// It misses what it is told after `told` other words from now on.
    pub fn miss(&self, told: usize) {
        let mut inner = self.lock();
        inner.misses = Some(inner.told + told);
    }

    /// It takes no more than this, and does not say so.
    pub fn set_max(&self, max: usize) {
        self.lock().stored_max = Some(max);
    }

    /// How often it was told something.
    pub fn told(&self) -> usize {
        self.lock().told
    }

    /// How much it has.
    pub fn len(&self) -> usize {
        self.lock().stored.len()
    }

    /// Whether it has nothing.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The names under which it has something.
    pub fn names(&self) -> Vec<String> {
        self.lock().stored.keys().cloned().collect()
    }

    /// Opens it as another process.
    ///
    /// # Panics
    /// When there are no descriptors left, or it is of another format.
    pub fn open(&self) -> Shelf {
        match self.open_as("test") {
            Opened::Ours(shelf) => shelf,
            Opened::Foreign { format, .. } => panic!("it is kept as {format}"),
        }
    }

    /// Opens it as another program.
    ///
    /// # Panics
    /// When there are no descriptors left.
    pub fn open_as(&self, format: &str) -> Opened {
        self.open_after(format, &[])
    }

    /// Opens it as another program, which goes on with these ways, too.
    ///
    /// # Panics
    /// When there are no descriptors left.
    pub fn open_after(&self, format: &str, before: &[&str]) -> Opened {
        let left = {
            let inner = self.lock();
            let left = inner.stored.iter();
            left.map(|(name, it)| (name.clone(), it.try_clone().expect("a descriptor"))).collect()
        };
        Shelf::open(Box::new(self.clone()), left, format, before)
    }

    /// What another process would find if this one died now, whatever this one does from now on.
    ///
    /// # Panics
    /// When there are no descriptors left.
    pub fn copy(&self) -> StandIn {
        let inner = self.lock();
        let stored = inner.stored.iter().map(|(name, it)| {
            let copied = read(it).ok().filter(|(item, _)| item.ends_with(&format!("/{SEAL}"))).map(|(item, found)| {
                let mut bytes = [0; 64];
                let seal = File::from(found.descriptors.into_iter().next().expect("a file"));
                let count = seal.read_at(&mut bytes, 0).expect("read");
                let own = File::from(memfd_create("seal", MemfdFlags::CLOEXEC).expect("a file"));
                own.write_all_at(&bytes[..count], 0).expect("written");
                envelope(&item, &found.words, &[own.as_fd()]).expect("an envelope")
            });
            (name.clone(), copied.unwrap_or_else(|| it.try_clone().expect("a descriptor")))
        });
        let inner = Inner { stored: stored.collect(), stored_max: inner.stored_max, ..Inner::default() };
        StandIn { inner: Arc::new(Mutex::new(inner)) }
    }

    /// When its seals were written last.
    ///
    /// # Panics
    /// When one of them is no file.
    pub fn sealed(&self) -> Vec<SystemTime> {
        let inner = self.lock();
        let seals = inner.stored.values().filter_map(|it| read(it).ok());
        let seals = seals.filter(|(item, _)| item.ends_with(&format!("/{SEAL}")));
        let files = seals.map(|(_, found)| File::from(found.descriptors.into_iter().next().expect("a file")));
        files.map(|file| file.metadata().and_then(|metadata| metadata.modified()).expect("a time")).collect()
    }

    /// The process that had it is dead: nothing of what it does from now on is heard. Gives it to the next one.
    pub fn of_a_dead_process(&self) -> StandIn {
        let next = self.copy();
        let mut inner = self.lock();
        inner.is_deaf = true;
        inner.stored.clear();
        next
    }

    /// Puts an item in as another process would have done, with this number and without a seal.
    ///
    /// # Panics
    /// When there are no descriptors left.
    pub fn plant(&self, number: u64, item: &str, words: &[u8], descriptors: &[BorrowedFd<'_>]) {
        let envelope = envelope(item, words, descriptors).expect("an envelope");
        self.put(&format!("{NAME}{number}"), envelope.as_fd()).expect("it takes it");
    }
}
