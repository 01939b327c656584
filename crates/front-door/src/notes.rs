//! What a door knows of its VMM, kept where it outlives the process of the door ([`supervision::Shelf`]), if there is such a place.
//!
//! Each message that is noted is an item of its own. What belongs together is put there between [`Shelf::begin`] and [`Shelf::end`]. Where
//! that was begun and not ended, nobody knows what the VMM has said and what it was answered, and it is let go; so is one of which not
//! all is found that was put there, or something that was taken out, and its door is opened anew.

use crate::message::Message;
use crate::record::Record;
use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, Mutex, MutexGuard};
use supervision::{Found, Shelf};

const DOOR: &str = "door";
const GUEST: &str = "guest";
const UNANSWERED: &str = "unanswered";
const FRESH: &str = "fresh";
/// How the names of messages begin.
const SAID: &str = "said ";
/// Bytes of a disk's name.
const NAME_BYTES_MAX: usize = 255;

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
    pub fn new(mut shelf: Shelf, name: &str, listener: &UnixListener) -> Self {
        shelf.put(DOOR, name.as_bytes(), &[listener.as_fd()]);
        let inner = Inner { record: Record::default(), shelf, stored: BTreeMap::new(), is_fresh_stored: false };
        Notes { inner: Mutex::new(inner) }
    }

    /// Of a door that an earlier process left on `shelf`. Nothing if it had got nowhere, or is not `expected` under its name.
    pub fn found(mut shelf: Shelf, expected: impl Fn(&str) -> bool) -> Option<FoundDoor> {
        let (is_whole, is_begun) = (shelf.is_whole(), shelf.is_begun());
        let mut found = shelf.take_found();
        let guest = found.remove(GUEST).and_then(guest_of);
        let door = found.remove(DOOR).filter(|_| is_whole).and_then(door_of);
        let Some((name, listener)) = door.filter(|(name, _)| expected(name)) else {
            if let Some((_, pid)) = guest {
                log::warn!(
                    "the connection of process {pid} is dropped: what the service manager kept of its disk is not what it was \
                     given last"
                );
            }
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
        let record = Record::of(&stored, is_fresh).filter(|_| is_understood && !is_begun);
        let unanswered = found.get_mut(UNANSWERED).map(message_of);
        let inner = Inner { record: Record::default(), shelf, stored, is_fresh_stored: is_fresh };
        let notes = Notes { inner: Mutex::new(inner) };
        let guest = match (guest, record, unanswered) {
            // What has no answer yet is there and understood, or is not there.
            (Some((connection, pid)), Some(record), unanswered @ (None | Some(Some(_)))) => {
                notes.lock().record = record;
                Some(FoundGuest { connection, pid, unanswered: unanswered.flatten() })
            }
            (guest, ..) => {
                if let Some((_, pid)) = guest {
                    log::warn!(
                        "disk {name}: the connection of process {pid} is dropped: it was in the midst of a word when the earlier                          supervisor ended"
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
        inner.shelf.end();
        inner.shelf.put(GUEST, pid.to_string().as_bytes(), &[connection.as_fd()]);
    }

    /// It is gone.
    pub fn let_out(&self) {
        self.lock().forget();
    }

    /// Something is about to be taken off a connection.
    pub fn begin(&self) {
        self.lock().shelf.begin();
    }

    /// All of that was done.
    pub fn end(&self) {
        self.lock().shelf.end();
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
    }
}

fn door_of(found: Found) -> Option<(String, UnixListener)> {
    let name = String::from_utf8(found.words).ok().filter(|name| is_disk_name(name))?;
    Some((name, found.descriptors.into_iter().next()?.into()))
}

/// Whether a disk can be called so: what a worker says may be anything.
pub fn is_disk_name(name: &str) -> bool {
    name.len() <= NAME_BYTES_MAX && !name.contains(char::is_control)
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
    use supervision::stand_in::StandIn;

    /// What another process finds: the VMM, what it is told again, whether the driver starts anew, what has no answer.
    type State = Option<(i32, Vec<(u32, Vec<u8>)>, bool, Option<u32>)>;

    /// What another process finds, which changes nothing of this one's.
    fn state(store: &StandIn) -> State {
        let door = Notes::found(store.copy().open().split("door"), |_| true)?;
        let record = door.notes.record();
        let again = record.told_again();
        let said = again.iter().map(|message| (message.code, message.payload.clone())).collect();
        door.guest.map(|guest| (guest.pid, said, record.is_fresh(), guest.unanswered.map(|message| message.code)))
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

    fn steps() -> Vec<Step> {
        let ring = |code| message(code, &[0, 0, 0, 0, 128, 0, 0, 0]);
        let question = message(31, &[1; 24]);
        let say = Step::Say;
        vec![
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
        ]
    }

    /// Takes all steps, and gives the state after each. What is found at any moment of a step is said to `found`.
    fn take_steps(store: &StandIn, mut found: impl FnMut(usize, &State)) -> Vec<State> {
        let directory = tempfile::tempdir().expect("a directory");
        let listener = UnixListener::bind(directory.path().join("disk.sock")).expect("bound");
        let notes = Notes::new(store.open().split("door"), "d", &listener);
        let (ours, _theirs) = UnixStream::pair().expect("a pair");
        let seen: Arc<Mutex<Vec<State>>> = Arc::default();
        let into = Arc::clone(&seen);
        store.look(move |store| into.lock().expect("no panic").push(state(store)));
        let mut states = Vec::new();
        for (number, step) in steps().into_iter().enumerate() {
            match step {
                Step::In(pid) => notes.let_in(pid, &ours),
                Step::Out => notes.let_out(),
                Step::Began => notes.began(),
                Step::Ask(asked) => {
                    notes.begin();
                    notes.set_unanswered(Some(&asked));
                    notes.end();
                }
                Step::Answer(asked) => {
                    notes.begin();
                    notes.note(&asked, Some(&asked));
                    notes.set_unanswered(None);
                    notes.end();
                }
                Step::Say(said) => {
                    notes.begin();
                    notes.note(&said, None);
                    notes.end();
                }
            }
            let after = state(store);
            for state in std::mem::take(&mut *seen.lock().expect("no panic")) {
                found(number, &state);
            }
            found(number, &after);
            states.push(after);
        }
        states
    }

    /// Killed after any change of what is stored, a door is found as it was before what it was about, or after that; or its VMM is let
    /// go. So it is whatever one word the store misses.
    #[test]
    fn whenever_a_door_dies_it_is_found_before_or_after_a_message() {
        let store = StandIn::default();
        let expected = take_steps(&store, |_, _| {});
        assert!(
            expected
                .last()
                .is_some_and(|last| last.as_ref().is_some_and(|(pid, said, ..)| *pid == 8 && said.is_empty()))
        );
        assert!(
            expected.iter().filter(|state| state.is_none()).count() == 1,
            "only who is out is not there: {expected:?}"
        );
        let words = store.told();
        assert!(words > 30, "{words}");
        for missed in 0..=words {
            let store = StandIn::default();
            // The first word is the format's, without which nobody looks at anything.
            store.miss(missed + 1);
            let (mut looks, mut dropped) = (0, 0);
            take_steps(&store, |number, found| {
                looks += 1;
                dropped += usize::from(found.is_none());
                let before = number.checked_sub(1).map(|number| &expected[number]);
                let is_one = found.is_none() || Some(found) == before || *found == expected[number];
                assert!(is_one, "{missed}, step {number}: {found:?} is neither {before:?} nor {:?}", expected[number]);
            });
            assert!(looks > 30 && dropped > 0, "{looks} times, of which {dropped} without a VMM");
            assert!(missed < words || dropped < looks, "nothing was missed");
        }
    }

    #[test]
    fn a_door_is_found_only_under_its_name() {
        let directory = tempfile::tempdir().expect("a directory");
        let listener = UnixListener::bind(directory.path().join("disk.sock")).expect("bound");
        let store = StandIn::default();
        drop(Notes::new(store.open().split("door"), "d", &listener));
        assert!(Notes::found(store.copy().open().split("door"), |name| name == "d").is_some());
        let next = store.copy();
        assert!(Notes::found(next.open().split("door"), |name| name == "e").is_none());
        assert!(next.open().split("door").take_found().is_empty(), "it is nobody's");
        for name in ["a\0b", "a\nb", &"a".repeat(256)] {
            assert!(!is_disk_name(name));
            let store = StandIn::default();
            drop(Notes::new(store.open().split("door"), name, &listener));
            assert!(Notes::found(store.copy().open().split("door"), |_| true).is_none(), "{name:?}");
        }
    }
}
