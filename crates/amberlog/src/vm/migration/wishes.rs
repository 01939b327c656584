//! Where journals are to live that are on storage while their guest is moved: as was wished of them before, unless somebody wishes
//! otherwise meanwhile. A wish of an operator, or of the host's power, is never undone by the end of a migration.

use placement::PlacementKind;
use serde::{Deserialize, Serialize};
use std::sync::{Mutex, MutexGuard};

/// Of one journal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Wish {
    /// The disk with its file system, and where on it that begins, in bytes.
    disk: String,
    home_start: u64,
    /// Where it is to go back to.
    placement: String,
}

/// See the module. Whoever wishes something has this locked until that is so.
#[derive(Debug, Default)]
pub struct Wishes(Mutex<Vec<Wish>>);

impl Wishes {
    /// As a worker before has had it kept.
    ///
    /// # Errors
    /// When that is not understood.
    pub fn kept(text: &str) -> serde_json::Result<Self> {
        Ok(Wishes(Mutex::new(serde_json::from_str(text)?)))
    }

    /// Nobody else wishes anything until this is dropped.
    pub fn lock(&self) -> Wishing<'_> {
        Wishing(self.0.lock().expect("no panic under this lock"))
    }
}

/// The right to wish.
pub struct Wishing<'w>(MutexGuard<'w, Vec<Wish>>);

impl Wishing<'_> {
    /// A journal is brought to storage because its guest is moved: it is to go back there. Nothing changes where it is on storage by a wish.
    pub fn moves(&mut self, disk: &str, home_start: u64, wanted: PlacementKind) {
        if wanted != PlacementKind::Storage {
            self.0.retain(|wish| (wish.disk.as_str(), wish.home_start) != (disk, home_start));
            self.0.push(Wish { disk: disk.to_owned(), home_start, placement: wanted.name().to_owned() });
        }
    }

    /// Somebody wishes the journals of a disk to be where he says: that is not undone. Says whether that changes anything.
    pub fn wished(&mut self, disk: &str) -> bool {
        let before = self.0.len();
        self.0.retain(|wish| wish.disk != disk);
        self.0.len() != before
    }

    /// Where a journal is to go back to whose guest stays; once.
    pub fn take_back(&mut self, disk: &str, home_start: u64) -> Option<PlacementKind> {
        let at = self.0.iter().position(|wish| (wish.disk.as_str(), wish.home_start) == (disk, home_start))?;
        self.0.remove(at).placement.parse().ok()
    }

    /// For the next worker.
    pub fn text(&self) -> String {
        serde_json::to_string(&*self.0).expect("words and numbers are text")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use PlacementKind::{Copy, Retain, Storage};

    #[test]
    fn what_was_wished_meanwhile_is_not_undone() {
        let wishes = Wishes::default();
        wishes.lock().moves("a", 0, Retain);
        wishes.lock().moves("a", 512, Copy);
        wishes.lock().moves("b", 0, Copy);
        // It was on storage before, by a wish.
        wishes.lock().moves("c", 0, Storage);
        // Handed over once more, when it is on storage already.
        wishes.lock().moves("b", 0, Storage);
        assert!(wishes.lock().wished("a") && !wishes.lock().wished("a"));
        let next = Wishes::kept(&wishes.lock().text()).expect("understood");
        for wishes in [wishes, next] {
            let mut wishing = wishes.lock();
            let back =
                [("a", 0), ("a", 512), ("b", 0), ("c", 0), ("b", 0)].map(|(disk, at)| wishing.take_back(disk, at));
            assert_eq!(back, [None, None, Some(Copy), None, None]);
        }
    }

    #[test]
    fn a_wish_for_memory_while_it_is_moved_counts_at_its_end() {
        let wishes = Wishes::default();
        wishes.lock().moves("a", 0, Retain);
        // 'placement v a copy', and then its guest is stopped.
        wishes.lock().wished("a");
        wishes.lock().moves("a", 0, Copy);
        assert_eq!(wishes.lock().take_back("a", 0), Some(Copy));
    }
}
