//! Moments of a VM's disks of which an image was made, and what was written since: what an incremental snapshot begins with. A supervisor
//! keeps both for the next worker.
//!
//! Failure story: where what was written is not known any more, that is said, and the next snapshot has to be a whole one.

use crate::worker::Line;
use anyhow::{Context, ensure};
use block_device::Image;
use image_moments::{Changes, Moment, Record};
use placement::Journals;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Instant;
use supervision::{Kept, Said};

/// Moments of a disk that are remembered.
const MOMENTS_MAX: usize = 64;

/// How the keys begin under which a supervisor keeps what was written since.
pub const CHANGES: &str = "changes ";

/// Device and number of a file, and its bytes.
pub type Identity = (u64, u64, u64);

/// When it was written to last, in seconds and nanoseconds.
pub type WrittenAt = (i64, i64);

/// A snapshot that was made.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Made {
    pub id: String,
    /// What was written after it was written in this epoch or later.
    pub since: u16,
    pub image: PathBuf,
    pub is_overlay: bool,
    pub file: Identity,
    /// When it was written to last: whoever repairs or mounts it makes it another one. Nothing where an earlier amberlog made it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub written: Option<WrittenAt>,
}

/// What is remembered of a disk.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Known {
    epoch: u16,
    made: Vec<Made>,
}

/// The moments of a VM's disks, by name.
#[derive(Debug, Default)]
pub struct Moments {
    known: Mutex<BTreeMap<String, Known>>,
    /// One holds the VM at a time: until when somebody's `freeze` lasts.
    freezing: Mutex<Option<Instant>>,
    /// What is being copied; nothing any more once the VM is over.
    copying: Mutex<Copying>,
}

#[derive(Debug, Default)]
struct Copying {
    moments: Vec<Weak<Moment>>,
    /// Snapshots that were asked for, and are not there yet.
    asked: usize,
    is_over: bool,
}

/// While this is there, somebody waits for a snapshot.
pub struct Asked<'m>(&'m Moments);

impl Drop for Asked<'_> {
    fn drop(&mut self) {
        self.0.copying().asked -= 1;
    }
}

impl Moments {
    /// Goes on with what an earlier worker had kept.
    pub fn resume(kept: &mut Kept, images: &[Arc<Image>], journals: &Journals, line: &Line) -> Self {
        let mut all = BTreeMap::new();
        for (index, image) in images.iter().enumerate() {
            let disk = journals.disk(index);
            let name = &disk.options.name;
            let key = format!("{CHANGES}{name}");
            let Some((text, record)) = kept.take(&key) else { continue };
            let taken = serde_json::from_str::<Known>(&text).map_err(io::Error::from).and_then(|known| {
                let record = Record::adopt(record, known.epoch)?;
                Ok((known, Arc::new(Changes::new(record))))
            });
            match taken {
                Ok((known, changes)) => {
                    // What was written until now, to go on, nobody has told it of.
                    for written in journals.written_to_go_on(index) {
                        let len = written.end - written.start;
                        changes.begins(written.start, len);
                        changes.ended(written.start, len);
                    }
                    disk.tell(image.tell(changes));
                    all.insert(name.clone(), known);
                }
                Err(error) => {
                    // What is written from now on is not in it: a worker that could take it up would take it for whole.
                    if let Err(error) = line.say(&Said::Forget { key }, &[]) {
                        log::error!("disk {name}: {error}");
                    }
                    log::warn!(
                        "disk {name}: its next snapshot has to be a whole one: what was written is not known ({error})"
                    );
                }
            }
        }
        Moments { known: Mutex::new(all), ..Moments::default() }
    }

    /// The one who holds the VM still; others wait. What it guards says until when somebody's `freeze` lasts.
    pub fn freezing(&self) -> MutexGuard<'_, Option<Instant>> {
        self.freezing.lock().expect("no panic under this lock")
    }

    /// The same for a snapshot, with the one that it is to begin with: that may have been forgotten while this waited, by another snapshot that has
    /// begun the record of what is written anew. Its epoch is one of a record that is gone then, and means nothing in the new one.
    pub fn freezing_with(
        &self,
        disk: &str,
        since: Option<&str>,
    ) -> anyhow::Result<(MutexGuard<'_, Option<Instant>>, Option<Made>)> {
        let freezing = self.freezing();
        let base = since.map(|id| self.find(disk, id)).transpose()?;
        Ok((freezing, base))
    }

    /// Its VM is over: copies under way fail, and nothing is kept of it any more.
    pub fn end(&self) {
        let mut copying = self.copying();
        copying.is_over = true;
        copying.moments.iter().filter_map(Weak::upgrade).for_each(|moment| moment.stop());
    }

    fn copying(&self) -> MutexGuard<'_, Copying> {
        self.copying.lock().expect("no panic under this lock")
    }

    pub fn copies(&self, moment: &Arc<Moment>) -> anyhow::Result<()> {
        let mut copying = self.copying();
        ensure!(!copying.is_over, "its VM has ended");
        copying.moments.retain(|moment| moment.strong_count() > 0);
        copying.moments.push(Arc::downgrade(moment));
        Ok(())
    }

    /// Whether somebody holds the VM still, or is about to. Waits for nobody.
    pub fn is_frozen(&self) -> bool {
        match self.freezing.try_lock() {
            Ok(until) => until.is_some_and(|until| Instant::now() < until),
            Err(_) => true,
        }
    }

    /// Whether a snapshot is being made: one that ends with its worker, whatever of it is done.
    pub fn are_copied(&self) -> bool {
        self.copying().asked > 0
    }

    pub fn asked(&self) -> Asked<'_> {
        self.copying().asked += 1;
        Asked(self)
    }

    pub fn is_over(&self) -> bool {
        self.copying().is_over
    }

    pub fn forget(&self, disk: &str) {
        self.lock().remove(disk);
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Known>> {
        self.known.lock().expect("no panic under this lock")
    }

    pub fn find(&self, disk: &str, id: &str) -> anyhow::Result<Made> {
        let known = self.lock();
        let made = known.get(disk).and_then(|known| known.made.iter().find(|made| made.id == id));
        made.cloned().with_context(|| {
            format!(
                "snapshot {id} of disk {disk} is not known: it was made before its VM was started, or was not the last {MOMENTS_MAX}; make a \
                 whole one (without --incremental-since)"
            )
        })
    }

    /// Has the next worker know it.
    pub fn keep(&self, disk: &str, changes: &Changes, made: Option<Made>, line: &Line) -> anyhow::Result<()> {
        // What is kept after its VM would be taken for the next one's.
        let copying = self.copying();
        ensure!(!copying.is_over, "its VM has ended");
        let mut all = self.lock();
        let known = all.entry(disk.to_owned()).or_default();
        known.epoch = changes.record().epoch();
        if let Some(made) = made {
            if known.made.len() >= MOMENTS_MAX {
                known.made.remove(0);
            }
            known.made.push(made);
        }
        line.keep(&format!("{CHANGES}{disk}"), &serde_json::to_string(known)?, Some(changes.record().descriptor()))?;
        line.settle();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    /// It waits while another snapshot begins the record anew.
    #[test]
    fn what_a_snapshot_is_to_begin_with_is_looked_for_when_its_vm_is_held() {
        let moments = Moments::default();
        let made = Made {
            id: "a".to_owned(),
            since: 3,
            image: PathBuf::from("a.img"),
            is_overlay: false,
            file: (0, 0, 0),
            written: None,
        };
        moments.lock().insert("db".to_owned(), Known { epoch: 3, made: vec![made] });
        assert_eq!(moments.freezing_with("db", Some("a")).expect("known").1.map(|made| made.since), Some(3));
        assert!(moments.freezing_with("db", None).expect("nothing is asked for").1.is_none());
        let freezing = moments.freezing();
        std::thread::scope(|threads| {
            let waiting = threads.spawn(|| moments.freezing_with("db", Some("a")).is_ok());
            // By now it waits. If not, this shows nothing.
            std::thread::sleep(Duration::from_millis(100));
            moments.forget("db");
            drop(freezing);
            assert!(!waiting.join().expect("no panic"), "the one that it was to begin with is gone");
        });
    }
}
