//! What a door knows of its VMM, kept where it outlives the process of the door ([`supervision::Shelf`]), if there is such a place.
//!
//! Each message that is noted is an item of its own. What belongs together is put there between [`Shelf::begin`] and [`Shelf::end`]. Where
//! that was begun and not ended, nobody knows what the VMM has said and what it was answered, and it is let go; so is one of which not
//! all is found that was put there, or something that was taken out, and its door is opened anew.
//!
//! A guest can have its VMM say things as fast as it likes (masking an interrupt is a message), and who has the shelf has it for all VMs
//! of a host. So there is a bound on how often it is told something ([`Pace`]): beyond it what is noted is put there a moment later,
//! and until then nothing is ended that was begun.

use crate::message::Message;
use crate::record::Record;
use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use supervision::{Found, Shelf};

const DOOR: &str = "door";
const GUEST: &str = "guest";
const UNANSWERED: &str = "unanswered";
const FRESH: &str = "fresh";
/// How the names of messages begin.
const SAID: &str = "said ";
/// Words to who has the shelf, at once: a VMM with 16 rings that connects says some 150 messages, and twice when it is told to reset.
const WORDS_MAX: u32 = 1024;
/// And in each second after that.
const WORDS_A_SECOND: u32 = 32;
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
    unanswered: Option<Arc<Message>>,
    unanswered_stored: Option<Arc<Message>>,
    pace: Pace,
    /// What is noted is not on the shelf yet.
    is_behind: bool,
    /// Something was begun, and not ended yet.
    is_amid: bool,
}

/// How much may be said at some moment.
struct Pace {
    words: u32,
    since: Instant,
}

impl Pace {
    fn new() -> Self {
        Pace { words: WORDS_MAX, since: Instant::now() }
    }

    /// Whether something may be said `now`.
    fn allows(&mut self, now: Instant) -> bool {
        let seconds = now.saturating_duration_since(self.since).as_secs();
        if seconds > 0 {
            let more = u32::try_from(seconds).unwrap_or(u32::MAX).saturating_mul(WORDS_A_SECOND);
            self.words = self.words.saturating_add(more).min(WORDS_MAX);
            self.since = now;
        }
        self.words > 0
    }

    fn spend(&mut self, words: u32) {
        self.words = self.words.saturating_sub(words);
    }
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
        Self::with(shelf, BTreeMap::new(), false, None)
    }

    fn with(
        shelf: Shelf,
        stored: BTreeMap<String, Arc<Message>>,
        is_fresh_stored: bool,
        unanswered: Option<Arc<Message>>,
    ) -> Self {
        let record = Record::default();
        let (unanswered_stored, pace) = (unanswered.clone(), Pace::new());
        Notes {
            inner: Mutex::new(Inner {
                record,
                shelf,
                stored,
                is_fresh_stored,
                unanswered,
                unanswered_stored,
                pace,
                is_behind: false,
                is_amid: false,
            }),
        }
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
        let notes = Self::with(shelf, stored, is_fresh, unanswered.clone().flatten());
        let guest = match (guest, record, unanswered) {
            // What has no answer yet is there and understood, or is not there.
            (Some((connection, pid)), Some(record), unanswered @ (None | Some(Some(_)))) => {
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

    /// The door listens there from now on, and not where it did.
    pub fn listens_at(&self, name: &str, listener: &UnixListener) {
        self.lock().shelf.put(DOOR, name.as_bytes(), &[listener.as_fd()]);
    }

    /// A VMM is let in.
    pub fn let_in(&self, pid: i32, connection: &UnixStream) {
        let mut inner = self.lock();
        inner.forget();
        inner.end();
        inner.pace.spend(2);
        inner.shelf.put(GUEST, pid.to_string().as_bytes(), &[connection.as_fd()]);
    }

    /// It is gone.
    pub fn let_out(&self) {
        self.lock().forget();
    }

    /// Something is about to be taken off a connection.
    pub fn begin(&self) {
        let mut inner = self.lock();
        inner.is_amid = true;
        inner.shelf.begin();
    }

    /// All of that was done.
    pub fn end(&self) {
        self.lock().end();
    }

    /// How long until [`Notes::catch_up`] may have something to do.
    pub fn patience(&self) -> Option<Duration> {
        self.lock().is_behind.then_some(Duration::from_secs(1))
    }

    /// Puts on the shelf what could not be put there when it was noted, if it may be by now.
    pub fn catch_up(&self) {
        let mut inner = self.lock();
        if inner.is_behind {
            inner.store();
        }
    }

    /// Whether a VMM may be let in: one that comes and goes as fast as it can must not be heard at the same pace by who has the shelf.
    pub fn may_let_in(&self) -> bool {
        let mut inner = self.lock();
        !inner.shelf.is_kept() || inner.pace.allows(Instant::now())
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
    pub fn set_unanswered(&self, message: Option<&Arc<Message>>) {
        let mut inner = self.lock();
        inner.unanswered = message.cloned();
        inner.store();
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
        (self.unanswered, self.unanswered_stored) = (None, None);
        self.pace.spend(2);
        self.store_all();
    }

    fn end(&mut self) {
        self.is_amid = false;
        if !self.is_behind {
            self.shelf.end();
        }
    }

    /// Brings the shelf up to date, or has that be done later.
    fn store(&mut self) {
        if !self.shelf.is_kept() {
            return;
        }
        if self.pace.allows(Instant::now()) {
            let was_behind = self.is_behind;
            self.store_all();
            if was_behind && !self.is_amid {
                self.shelf.end();
            }
        } else {
            // From this word on whoever finds the shelf lets the VMM go.
            self.shelf.begin();
            self.is_behind = true;
        }
    }

    fn store_all(&mut self) {
        if !self.shelf.is_kept() {
            return;
        }
        self.is_behind = false;
        let mut words = 0;
        let items = self.record.items();
        for gone in self.stored.keys().filter(|item| !items.contains_key(*item)) {
            words += 1;
            self.shelf.remove(&format!("{SAID}{gone}"));
        }
        for (item, message) in &items {
            if self.stored.get(item).is_some_and(|stored| Arc::ptr_eq(stored, message)) {
                continue;
            }
            let descriptors: Vec<_> = message.descriptors.iter().map(AsFd::as_fd).collect();
            words += 2;
            self.shelf.put(&format!("{SAID}{item}"), &message.to_bytes(), &descriptors);
        }
        self.stored = items;
        let is_same = match (&self.unanswered, &self.unanswered_stored) {
            (Some(one), Some(other)) => Arc::ptr_eq(one, other),
            (one, other) => one.is_none() && other.is_none(),
        };
        if !is_same {
            words += 2;
            match &self.unanswered {
                Some(message) => {
                    let descriptors: Vec<_> = message.descriptors.iter().map(AsFd::as_fd).collect();
                    self.shelf.put(UNANSWERED, &message.to_bytes(), &descriptors);
                }
                None => self.shelf.remove(UNANSWERED),
            }
            self.unanswered_stored.clone_from(&self.unanswered);
        }
        if self.record.is_fresh() != self.is_fresh_stored {
            self.is_fresh_stored = self.record.is_fresh();
            if self.is_fresh_stored {
                self.shelf.put(FRESH, &[], &[]);
            } else {
                self.shelf.remove(FRESH);
            }
            words += 1;
        }
        self.pace.spend(words);
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

    /// A guest that masks and unmasks its interrupts as fast as it can is not heard so fast by who has the shelf; and what is found of its
    /// VMM is what it said last, or no VMM.
    #[test]
    fn who_has_the_shelf_is_not_told_everything_at_once() {
        const MESSAGES: u32 = 20_000;
        let directory = tempfile::tempdir().expect("a directory");
        let listener = UnixListener::bind(directory.path().join("disk.sock")).expect("bound");
        let store = StandIn::default();
        let notes = Notes::new(store.open().split("door"), "d", &listener);
        let (ours, _theirs) = UnixStream::pair().expect("a pair");
        notes.let_in(7, &ours);
        let (mut missed, mut found_last) = (0, 0);
        let say = |number: u32| {
            notes.begin();
            // SET_VRING_CALL, each with other bytes so that it can be told which one was found.
            notes.note(&message(13, &[0_u32.to_le_bytes(), number.to_le_bytes()].concat()), None);
            notes.end();
        };
        for number in 0..MESSAGES {
            say(number);
            if number % 97 != 0 {
                continue;
            }
            match state(&store) {
                None => missed += 1,
                Some((_, said, ..)) => {
                    found_last += 1;
                    let last = said.iter().find(|(code, _)| *code == 13).map(|(_, payload)| payload[4..].to_vec());
                    assert_eq!(last, Some(number.to_le_bytes().to_vec()));
                }
            }
        }
        assert!(missed > 0 && found_last > 0, "{missed} times no VMM, {found_last} times what was said last");
        let told = store.told();
        assert!(told < MESSAGES as usize / 4, "told {told} times of {MESSAGES} messages");
        assert!(notes.patience().is_some());
        // As if it had been quiet for a while.
        notes.lock().pace.words = 1;
        notes.catch_up();
        assert!(notes.patience().is_none());
        let (pid, said, ..) = state(&store).expect("a VMM");
        assert!(pid == 7 && said.iter().any(|(_, payload)| payload.ends_with(&(MESSAGES - 1).to_le_bytes())));
        // Who is behind is let out at once, and whoever comes next is not taken for it.
        notes.lock().pace.words = 0;
        say(0);
        assert!(!notes.may_let_in());
        notes.let_out();
        assert!(state(&store).is_none());
        notes.let_in(8, &ours);
        assert!(state(&store).is_some_and(|(pid, said, ..)| pid == 8 && said.is_empty()));
    }

    #[test]
    fn so_much_may_be_said_in_each_second() {
        let mut pace = Pace::new();
        let start = pace.since;
        assert!(pace.allows(start));
        pace.spend(WORDS_MAX - 1);
        assert!(pace.allows(start));
        pace.spend(2);
        assert!(!pace.allows(start + Duration::from_millis(999)));
        assert!(pace.allows(start + Duration::from_secs(1)) && pace.words == WORDS_A_SECOND);
        assert!(pace.allows(start + Duration::from_secs(1_000_000)) && pace.words == WORDS_MAX);
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
