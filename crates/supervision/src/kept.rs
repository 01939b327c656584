//! What is kept for a VM while its worker may die.

use crate::Shelf;
use crate::channel::Channel;
use crate::{Order, Said};
use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Entries kept for one VM: a few for it, a few for each of its disks.
const ENTRIES_MAX: usize = 1024;
/// Descriptors of one entry: what is kept for all VMs together has a bound, which no worker is to use up.
const DESCRIPTORS_MAX: usize = 1;

/// Descriptors, by name, with what belongs to them.
#[derive(Default)]
pub struct Kept {
    entries: BTreeMap<String, (String, Vec<OwnedFd>)>,
    shelf: Shelf,
    /// Not all of it was found, or more than that.
    is_doubtful: bool,
}

impl std::fmt::Debug for Kept {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_set().entries(self.entries.keys()).finish()
    }
}

impl Kept {
    /// What was kept on a shelf, and what will be.
    pub fn on(mut shelf: Shelf) -> Self {
        let is_doubtful = !shelf.is_whole();
        let found = shelf.take_found().into_iter();
        let entries =
            found.map(|(key, found)| (key, (String::from_utf8_lossy(&found.words).into_owned(), found.descriptors)));
        Kept { entries: entries.collect(), shelf, is_doubtful }
    }

    /// Whether what was found on the shelf is not all that was kept there, or is not as it was kept last: no worker may go on with it.
    pub fn is_doubtful(&self) -> bool {
        self.is_doubtful
    }

    /// Takes in what a supervisor says that an earlier worker had kept.
    pub fn take_in(&mut self, key: String, data: String, descriptors: Vec<OwnedFd>) {
        self.entries.insert(key, (data, descriptors));
    }

    /// Does what a worker has said. False if that was something else.
    ///
    /// # Errors
    /// When it wants more kept than can be.
    pub fn heard(&mut self, said: &Said, descriptors: Vec<OwnedFd>) -> io::Result<bool> {
        match said {
            Said::Keep { key, data } => {
                self.check_room(key)?;
                if descriptors.len() > DESCRIPTORS_MAX {
                    return Err(io::Error::other(format!("{} descriptors are to be kept as {key}", descriptors.len())));
                }
                let borrowed: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
                self.shelf.put(key, data.as_bytes(), &borrowed);
                self.entries.insert(key.clone(), (data.clone(), descriptors));
            }
            Said::Forget { key } => self.forget(key),
            Said::Clear => self.clear(),
            Said::Ready
            | Said::Door { .. }
            | Said::Shut { .. }
            | Said::Open { .. }
            | Said::Began { .. }
            | Said::Settle => {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Tells a new worker all of it, and that it was all.
    ///
    /// # Errors
    /// When the worker is gone.
    pub fn tell(&self, worker: &Channel) -> io::Result<()> {
        for (key, (data, descriptors)) in &self.entries {
            let borrowed: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
            worker.send(&Order::Kept { key: key.clone(), data: data.clone() }, &borrowed)?;
        }
        worker.send(&Order::Begin, &[])
    }

    fn check_room(&self, key: &str) -> io::Result<()> {
        if self.entries.len() >= ENTRIES_MAX && !self.entries.contains_key(key) {
            return Err(io::Error::other(format!("more than {ENTRIES_MAX} things are to be kept for one VM")));
        }
        Ok(())
    }

    /// Keeps words without descriptors.
    ///
    /// # Errors
    /// When that is one thing too many.
    pub fn put(&mut self, key: String, data: String) -> io::Result<()> {
        self.check_room(&key)?;
        self.shelf.put(&key, data.as_bytes(), &[]);
        self.entries.insert(key, (data, Vec::new()));
        Ok(())
    }

    /// Lets go of what is kept under keys that begin so, unless this says of the rest of the key, and of what belongs to it, that it stays.
    pub fn retain(&mut self, beginning: &str, stays: impl Fn(&str, &str) -> bool) {
        let goes = |(key, (data, _)): &(&String, &(String, _))| {
            key.strip_prefix(beginning).is_some_and(|rest| !stays(rest, data))
        };
        let gone: Vec<String> = self.entries.iter().filter(goes).map(|(key, _)| key.clone()).collect();
        gone.iter().for_each(|key| self.forget(key));
    }

    /// Lets go of everything.
    pub fn clear(&mut self) {
        self.entries.clear();
        self.shelf.clear();
        self.is_doubtful = false;
    }

    /// Lets go of one thing.
    pub fn forget(&mut self, key: &str) {
        self.entries.remove(key);
        self.shelf.remove(key);
    }

    /// Whether nothing is kept.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// What belongs to a key.
    pub fn data(&self, key: &str) -> Option<&str> {
        self.entries.get(key).map(|(data, _)| data.as_str())
    }

    /// What belongs to the keys that begin so, each without that beginning.
    pub fn all(&self, beginning: &str) -> Vec<(String, String)> {
        let of =
            |(key, (data, _)): (&String, &(String, _))| Some((key.strip_prefix(beginning)?.to_owned(), data.clone()));
        self.entries.iter().filter_map(of).collect()
    }

    /// The one descriptor of a key.
    pub fn descriptor(&self, key: &str) -> Option<BorrowedFd<'_>> {
        self.entries.get(key)?.1.first().map(AsFd::as_fd)
    }

    /// Takes the one descriptor of a key, with what belongs to it.
    pub fn take(&mut self, key: &str) -> Option<(String, OwnedFd)> {
        let (data, descriptors) = self.entries.remove(key)?;
        Some((data, descriptors.into_iter().next()?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stand_in::StandIn;

    fn keep(kept: &mut Kept, key: &str, data: &str, descriptors: usize) -> io::Result<bool> {
        let file = || rustix::fs::memfd_create("kept", rustix::fs::MemfdFlags::CLOEXEC).expect("a file");
        let descriptors = (0..descriptors).map(|_| file()).collect();
        kept.heard(&Said::Keep { key: key.into(), data: data.into() }, descriptors)
    }

    #[test]
    fn the_next_worker_is_told_what_the_last_one_said_last() {
        let mut kept = Kept::default();
        assert!(keep(&mut kept, "a", "1", 1).expect("kept"));
        assert!(keep(&mut kept, "b", "1", 0).expect("kept"));
        assert!(keep(&mut kept, "a", "2", 1).expect("kept"));
        assert!(!kept.heard(&Said::Ready, Vec::new()).expect("nothing to keep"));
        assert!(keep(&mut kept, "c d", "3", 0).expect("kept"));
        assert_eq!(kept.all("c "), [("d".to_owned(), "3".to_owned())]);
        assert!(kept.heard(&Said::Forget { key: "c d".into() }, Vec::new()).expect("forgotten"));
        assert!(kept.all("c ").is_empty());
        let (ours, theirs) = Channel::pair().expect("a pair");
        kept.tell(&ours).expect("told");
        let theirs = Channel::from(theirs);
        let (order, descriptors) = theirs.receive::<Order>().expect("read").expect("one");
        assert_eq!((order, descriptors.len()), (Order::Kept { key: "a".into(), data: "2".into() }, 1));
        assert_eq!(theirs.receive::<Order>().expect("read").expect("another").1.len(), 0);
        assert_eq!(theirs.receive::<Order>().expect("read").expect("the end").0, Order::Begin);
        assert!(kept.heard(&Said::Clear, Vec::new()).expect("let go") && kept.is_empty());
    }

    #[test]
    fn there_is_a_bound() {
        let mut kept = Kept::default();
        for number in 0..ENTRIES_MAX {
            keep(&mut kept, &number.to_string(), "", 0).expect("kept");
        }
        keep(&mut kept, "one more", "", 0).expect_err("too many");
        keep(&mut kept, "7", "again", 1).expect("in its own place");
        keep(&mut kept, "7", "more", 2).expect_err("too many descriptors");
        assert_eq!(kept.data("7"), Some("again"));
        kept.put("one more".into(), String::new()).expect_err("too many");
        kept.put("7".into(), "words".into()).expect("in its own place");
    }

    #[test]
    fn a_part_is_not_taken_for_all() {
        let store = StandIn::default();
        let mut kept = Kept::on(store.open().split("kept"));
        keep(&mut kept, "a", "1", 1).expect("kept");
        store.set_max(store.len());
        keep(&mut kept, "b", "1", 1).expect("kept, as far as anybody knows");
        let mut found = Kept::on(store.copy().open().split("kept"));
        assert!(found.is_doubtful() && found.data("a") == Some("1"));
        found.clear();
        assert!(!found.is_doubtful());
        kept.forget("b");
        assert!(!Kept::on(store.copy().open().split("kept")).is_doubtful());
    }
}
