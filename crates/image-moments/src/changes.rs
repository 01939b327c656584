//! What stands between those who write to an image and the image.

use crate::{Moment, Record};
use std::sync::{Arc, Mutex, RwLock};

/// Of one image: its record, and the moment that is being copied, if one is.
#[derive(Debug)]
pub struct Changes {
    record: RwLock<Arc<Record>>,
    moment: RwLock<Option<Arc<Moment>>>,
    /// One copy at a time.
    copying: Mutex<()>,
}

impl Changes {
    /// With a record that may have been begun by an earlier process.
    pub fn new(record: Record) -> Self {
        Changes { record: RwLock::new(Arc::new(record)), moment: RwLock::default(), copying: Mutex::default() }
    }

    /// What was written when.
    pub fn record(&self) -> Arc<Record> {
        Arc::clone(&self.record.read().expect("no panic under this lock"))
    }

    /// Begins another record: what was written until now is forgotten. For a moment at which nothing is written.
    pub fn begin_anew(&self, record: Record) {
        *self.record.write().expect("no panic under this lock") = Arc::new(record);
    }

    fn moment(&self) -> Option<Arc<Moment>> {
        self.moment.read().expect("no panic under this lock").clone()
    }

    /// Whether a copy is being made: what need not be done to the image is better left.
    pub fn is_copied(&self) -> bool {
        self.moment().is_some()
    }

    /// This range is about to be written. On return what was there is kept, if somebody wants it.
    pub fn begins(&self, offset: u64, len: u64) {
        self.record().note(offset, len);
        if let Some(moment) = self.moment() {
            moment.keep(offset, len);
        }
    }

    /// A write that was said to begin has ended, well or not.
    pub fn ended(&self, offset: u64, len: u64) {
        // A moment that it met under way has it, or does not have it; the next one has to look.
        self.record().note(offset, len);
    }

    /// Keeps what the image has now, beginning with the next write, until the closure returns. Nothing if one is being kept already.
    pub fn keep_while<T>(&self, moment: &Arc<Moment>, copy: impl FnOnce() -> T) -> Option<T> {
        let _one = self.copying.try_lock().ok()?;
        *self.moment.write().expect("no panic under this lock") = Some(Arc::clone(moment));
        let copied = copy();
        *self.moment.write().expect("no panic under this lock") = None;
        Some(copied)
    }
}
