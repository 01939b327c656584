//! What a door knows of its VMM, kept where it outlives the process of the door ([`supervision::Shelf`]), if there is such a place.
//!
//! Each message that is noted is an item of its own. What belongs together is put there between two strokes of a *seal*, a word in a
//! file: where the seal is found broken, or not as many items as it says, nobody knows what the VMM has said and what it was answered,
//! and it is let go.

use crate::message::Message;
use crate::record::Record;
use rustix::fs::{MemfdFlags, memfd_create};
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, Mutex, MutexGuard};
use supervision::{Found, Shelf};

const DOOR: &str = "door";
const GUEST: &str = "guest";
const UNANSWERED: &str = "unanswered";
const FRESH: &str = "fresh";
/// How the names of messages begin.
const SAID: &str = "said ";

/// See the module.
pub struct Notes {
    inner: Mutex<Inner>,
}

struct Inner {
    record: Record,
    shelf: Shelf,
    /// What of the record is on the shelf.
    stored: BTreeMap<String, Arc<Message>>,
    is_fresh_stored: bool,
    seal: Option<File>,
    is_broken: bool,
}

/// A door as an earlier process left it.
pub struct FoundDoor {
    pub name: String,
    pub listener: UnixListener,
    pub guest: Option<FoundGuest>,
    pub notes: Notes,
}

/// The VMM inside.
pub struct FoundGuest {
    pub connection: UnixStream,
    pub pid: i32,
    pub unanswered: Option<Arc<Message>>,
}

impl Notes {
    /// Of a door that is new, to be kept on `shelf`.
    pub fn new(mut shelf: Shelf, name: &str, listener: &UnixListener) -> io::Result<Self> {
        let mut seal = None;
        if shelf.is_kept() {
            let file = File::from(memfd_create("door", MemfdFlags::CLOEXEC)?);
            shelf.put(DOOR, name.as_bytes(), &[listener.as_fd(), file.as_fd()]);
            seal = Some(file);
        }
        let (record, stored) = (Record::default(), BTreeMap::new());
        let inner = Inner { record, shelf, stored, is_fresh_stored: false, seal, is_broken: false };
        Ok(Notes { inner: Mutex::new(inner) })
    }

    /// Of a door that an earlier process left on `shelf`. Nothing if it had got nowhere.
    pub fn found(mut shelf: Shelf) -> Option<FoundDoor> {
        let mut found = shelf.take_found();
        let Some((name, listener, seal)) = found.remove(DOOR).and_then(door_of) else {
            shelf.clear();
            return None;
        };
        let mut stored = BTreeMap::new();
        let mut is_understood = true;
        for (item, found) in &mut found {
            let Some(item) = item.strip_prefix(SAID) else { continue };
            match message_of(found) {
                Some(message) => drop(stored.insert(item.to_owned(), message)),
                None => is_understood = false,
            }
        }
        let is_fresh = found.contains_key(FRESH);
        let record = Record::of(&stored, is_fresh).filter(|_| is_understood);
        let mut words = [0; 16];
        let is_read = seal.read_exact_at(&mut words, 0).is_ok();
        let (is_broken, count) = words.split_at(8);
        let is_whole = is_read && is_broken == [0; 8] && count == (stored.len() as u64).to_ne_bytes();
        let guest = found.remove(GUEST).and_then(guest_of);
        let unanswered = found.get_mut(UNANSWERED).map(message_of);
        let inner = Inner {
            record: Record::default(),
            shelf,
            stored,
            is_fresh_stored: is_fresh,
            seal: Some(seal),
            is_broken: false,
        };
        let notes = Notes { inner: Mutex::new(inner) };
        let guest = match (guest, record, unanswered) {
            // What has no answer yet is there and understood, or is not there.
            (Some((connection, pid)), Some(record), unanswered @ (None | Some(Some(_)))) if is_whole => {
                notes.lock().record = record;
                Some(FoundGuest { connection, pid, unanswered: unanswered.flatten() })
            }
            (guest, ..) => {
                if let Some((_, pid)) = guest {
                    log::warn!(
                        "disk {name}: the connection of process {pid} is dropped: it was in the midst of a word when the earlier \
                         supervisor ended"
                    );
                }
                notes.let_out();
                None
            }
        };
        Some(FoundDoor { name, listener, guest, notes })
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().expect("no panic under this lock")
    }

    /// A VMM is let in.
    pub fn let_in(&self, pid: i32, connection: &UnixStream) {
        let mut inner = self.lock();
        inner.forget();
        inner.set_seal(false);
        inner.shelf.put(GUEST, pid.to_string().as_bytes(), &[connection.as_fd()]);
    }

    /// It is gone.
    pub fn let_out(&self) {
        self.lock().forget();
    }

    /// Something is about to be taken off a connection.
    pub fn begin(&self) {
        self.lock().set_seal(true);
    }

    /// All of that was done.
    pub fn end(&self) {
        self.lock().set_seal(false);
    }

    /// See [`Record::note`].
    pub fn note(&self, message: &Arc<Message>, answer: Option<&Message>) {
        let mut inner = self.lock();
        inner.record.note(message, answer);
        inner.store();
    }

    /// See [`Record::began`]. On return it is kept.
    pub fn began(&self) {
        let mut inner = self.lock();
        inner.record.began();
        inner.store();
    }

    /// What has no answer yet, if anything.
    pub fn set_unanswered(&self, message: Option<&Message>) {
        let mut inner = self.lock();
        match message {
            Some(message) => {
                let descriptors: Vec<_> = message.descriptors.iter().map(AsFd::as_fd).collect();
                inner.shelf.put(UNANSWERED, &message.to_bytes(), &descriptors);
            }
            None => inner.shelf.remove(UNANSWERED),
        }
    }

    /// What is noted at this moment.
    pub fn record(&self) -> Record {
        self.lock().record.clone()
    }

    /// The door is closed for good.
    pub fn close(&self) {
        self.lock().shelf.clear();
    }
}

impl Inner {
    fn forget(&mut self) {
        // Without a guest nothing else counts.
        self.shelf.remove(GUEST);
        self.shelf.remove(UNANSWERED);
        self.record = Record::default();
        self.store();
    }

    fn set_seal(&mut self, is_broken: bool) {
        self.is_broken = is_broken;
        let words = [u64::from(self.is_broken).to_ne_bytes(), (self.stored.len() as u64).to_ne_bytes()].concat();
        if let Some(Err(error)) = self.seal.as_ref().map(|seal| seal.write_all_at(&words, 0)) {
            log::warn!("what a VMM says cannot be kept over the death of this process: {error}");
        }
    }

    /// Brings the shelf up to date.
    fn store(&mut self) {
        if !self.shelf.is_kept() {
            return;
        }
        let items = self.record.items();
        for gone in self.stored.keys().filter(|item| !items.contains_key(*item)) {
            self.shelf.remove(&format!("{SAID}{gone}"));
        }
        for (item, message) in &items {
            if self.stored.get(item).is_some_and(|stored| Arc::ptr_eq(stored, message)) {
                continue;
            }
            let descriptors: Vec<_> = message.descriptors.iter().map(AsFd::as_fd).collect();
            self.shelf.put(&format!("{SAID}{item}"), &message.to_bytes(), &descriptors);
        }
        self.stored = items;
        if self.record.is_fresh() != self.is_fresh_stored {
            self.is_fresh_stored = self.record.is_fresh();
            if self.is_fresh_stored {
                self.shelf.put(FRESH, &[], &[]);
            } else {
                self.shelf.remove(FRESH);
            }
        }
        self.set_seal(self.is_broken);
    }
}

fn door_of(found: Found) -> Option<(String, UnixListener, File)> {
    let [listener, seal] = <[OwnedFd; 2]>::try_from(found.descriptors).ok()?;
    Some((String::from_utf8(found.words).ok()?, listener.into(), seal.into()))
}

fn guest_of(found: Found) -> Option<(UnixStream, i32)> {
    let pid = String::from_utf8(found.words).ok()?.parse().ok()?;
    Some((found.descriptors.into_iter().next()?.into(), pid))
}

fn message_of(found: &mut Found) -> Option<Arc<Message>> {
    Message::of_bytes(&found.words, std::mem::take(&mut found.descriptors)).map(Arc::new)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::BorrowedFd;
    use std::sync::atomic::{AtomicBool, Ordering};
    use supervision::Store;

    type Stored = BTreeMap<String, OwnedFd>;
    /// What another process finds: the VMM, what it is told again, whether the driver starts anew, what has no answer.
    type State = Option<(i32, Vec<(u32, Vec<u8>)>, bool, Option<u32>)>;

    #[derive(Clone, Default)]
    struct StandIn {
        stored: Arc<Mutex<Stored>>,
        /// What would be found if the process died now, each time that this changes.
        found: Arc<Mutex<Vec<State>>>,
        looks: Arc<AtomicBool>,
    }

    impl Store for StandIn {
        fn put(&self, name: &str, descriptor: BorrowedFd<'_>) -> io::Result<()> {
            self.stored.lock().expect("no panic").insert(name.to_owned(), descriptor.try_clone_to_owned()?);
            self.look();
            Ok(())
        }

        fn remove(&self, name: &str) {
            self.stored.lock().expect("no panic").remove(name);
            self.look();
        }
    }

    impl StandIn {
        fn open(&self) -> Shelf {
            let stored = self.stored.lock().expect("no panic");
            let left = stored.iter().map(|(name, it)| (name.clone(), it.try_clone().expect("a descriptor"))).collect();
            drop(stored);
            Shelf::open(Box::new(StandIn::default()), left)
        }

        fn look(&self) {
            if self.looks.load(Ordering::Relaxed) {
                let state = self.state();
                self.found.lock().expect("no panic").push(state);
            }
        }

        /// What another process finds, which changes nothing of this one's.
        fn state(&self) -> State {
            let copy = StandIn::default();
            let mut shelf = Shelf::open(Box::new(copy.clone()), Vec::new());
            for (item, mut found) in self.open().take_found() {
                if item == DOOR {
                    let mut words = [0; 16];
                    let seal = File::from(found.descriptors.pop().expect("a seal"));
                    let count = seal.read_at(&mut words, 0).expect("read");
                    let own = File::from(memfd_create("seal", MemfdFlags::CLOEXEC).expect("a file"));
                    own.write_all_at(&words[..count], 0).expect("written");
                    found.descriptors.push(own.into());
                }
                let borrowed: Vec<_> = found.descriptors.iter().map(AsFd::as_fd).collect();
                shelf.put(&item, &found.words, &borrowed);
            }
            let door = Notes::found(copy.open()).expect("a door");
            let record = door.notes.record();
            let again = record.told_again();
            let said = again.iter().map(|message| (message.code, message.payload.clone())).collect();
            door.guest.map(|guest| (guest.pid, said, record.is_fresh(), guest.unanswered.map(|message| message.code)))
        }
    }

    enum Step {
        In(i32),
        Out,
        Began,
        Ask(Arc<Message>),
        Answer(Arc<Message>),
        Say(Arc<Message>),
    }

    fn message(code: u32, payload: &[u8]) -> Arc<Message> {
        Arc::new(Message::new(code, payload.to_vec()))
    }

    /// Killed after any change of what is stored, a door is found as it was before what it was about, or after that; or its VMM is let go.
    #[test]
    fn whenever_a_door_dies_it_is_found_before_or_after_a_message() {
        let directory = tempfile::tempdir().expect("a directory");
        let listener = UnixListener::bind(directory.path().join("disk.sock")).expect("bound");
        let store = StandIn::default();
        let notes = Notes::new(Shelf::open(Box::new(store.clone()), Vec::new()), "d", &listener).expect("notes");
        store.looks.store(true, Ordering::Relaxed);
        let (ours, _theirs) = UnixStream::pair().expect("a pair");
        let ring = |code| message(code, &[0, 0, 0, 0, 128, 0, 0, 0]);
        let question = message(31, &[1; 24]);
        let say = Step::Say;
        let steps = [
            Step::In(7),
            Step::Ask(Arc::clone(&question)),
            Step::Answer(question),
            say(message(32, &[2; 24])),
            say(message(2, &[3; 8])),
            say(message(5, &[4; 40])),
            say(ring(8)),
            say(ring(10)),
            say(ring(12)),
            Step::Began,
            say(message(37, &[5; 40])),
            say(message(37, &[6; 40])),
            say(message(38, &[5; 40])),
            say(ring(8)),
            say(message(34, &[])),
            Step::Out,
            Step::In(8),
        ];
        let take = |step: &Step| match step {
            Step::In(pid) => notes.let_in(*pid, &ours),
            Step::Out => notes.let_out(),
            Step::Began => notes.began(),
            Step::Ask(asked) => {
                notes.begin();
                notes.set_unanswered(Some(asked));
                notes.end();
            }
            Step::Answer(asked) => {
                notes.begin();
                notes.note(asked, Some(asked));
                notes.set_unanswered(None);
                notes.end();
            }
            Step::Say(said) => {
                notes.begin();
                notes.note(said, None);
                notes.end();
            }
        };
        let (mut before, mut looks, mut dropped) = (store.state(), 0, 0);
        for (number, step) in steps.iter().enumerate() {
            take(step);
            let after = store.state();
            for found in std::mem::take(&mut *store.found.lock().expect("no panic")) {
                looks += 1;
                dropped += usize::from(found.is_none());
                let is_one = found.is_none() || found == before || found == after;
                assert!(is_one, "step {number}: {found:?} is neither {before:?} nor {after:?}");
            }
            before = after;
        }
        assert!(before.is_some_and(|(pid, said, ..)| pid == 8 && said.is_empty()));
        assert!(looks > 20 && dropped < looks, "{looks} times, of which {dropped} without a VMM");
    }
}
