//! Two hosts, one image, one guest that is copied from one to the other: every interleaving of what VMMs, operators, deaths and the steps
//! of giving up and taking can be, to a depth, with the state machine itself on both sides.
//!
//! What must hold: nobody writes without the lock, and a copy of the guest that is served knows all that was ever written. So no two
//! write, and nothing that was acknowledged is lost or overwritten by a guest that does not know of it.

use super::*;
use std::collections::HashSet;

/// What both hosts see.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Image {
    locked_by: Option<usize>,
    /// As its time of change has it.
    seal: Seal,
    /// Counts writes.
    content: u8,
}

/// A copy of the guest, in a VMM.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Guest {
    /// The newest write that it knows of.
    knows: u8,
    position: u16,
    is_running: bool,
    /// Its disk is served at this moment.
    is_served: bool,
}

/// How far the source is with giving up.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Giving {
    Not,
    /// The VMM waits: everything is to be brought to storage.
    Asked,
    Sealed,
    Noted,
}

#[derive(Clone, PartialEq, Eq, Hash)]
enum Note {
    Awaited,
    Ours,
    Given(Vec<Option<Seal>>),
}

#[derive(Clone, PartialEq, Eq, Hash)]
struct Host {
    /// What its worker knows; nothing when it is dead.
    state: Option<State>,
    /// What the supervisor keeps.
    note: Note,
    has_begun: bool,
    giving: Giving,
    guest: Option<Guest>,
    is_moving: bool,
}

#[derive(Clone, PartialEq, Eq, Hash)]
struct World {
    hosts: [Host; 2],
    image: Image,
    /// Operations left of each kind that could go on for ever.
    left: [u8; 4],
}

const WRITES: usize = 0;
const COPIES: usize = 1;
const DEATHS: usize = 2;
const TURNS: usize = 3;

fn positions(guest: &Guest) -> Vec<(u16, u16)> {
    vec![(0, guest.position)]
}

impl World {
    fn new() -> Self {
        let host = |holds| Host {
            state: Some(State::new(1, holds)),
            note: Note::Awaited,
            has_begun: false,
            giving: Giving::Not,
            guest: None,
            is_moving: false,
        };
        let seal = Seal { seconds: 1, nanoseconds: 1 };
        let mut source = host(Holds::Awaited);
        source.guest = Some(Guest { knows: 0, position: 0, is_running: true, is_served: false });
        World {
            hosts: [source, host(Holds::Awaited)],
            image: Image { locked_by: None, seal, content: 0 },
            left: [3, 3, 2, 3],
        }
    }

    fn write(&mut self, at: usize) {
        assert_eq!(self.image.locked_by, Some(at), "a write without the lock");
        let guest = self.hosts[at].guest.as_mut().expect("who writes is there");
        assert_eq!(guest.knows, self.image.content, "a guest that does not know what was written is served");
        self.image.content += 1;
        // A clock, and no seal.
        self.image.seal = Seal { seconds: 100 + u64::from(self.image.content), nanoseconds: 0 };
        guest.knows = self.image.content;
        guest.position = guest.position.wrapping_add(1);
    }

    fn spend(&self, kind: usize) -> Option<World> {
        let mut next = self.clone();
        next.left[kind] = next.left[kind].checked_sub(1)?;
        Some(next)
    }

    fn next(&self) -> Vec<World> {
        let mut all = Vec::new();
        for at in [0, 1] {
            self.of_guest(at, &mut all);
            self.of_worker(at, &mut all);
            self.of_operator(at, &mut all);
        }
        all
    }

    fn of_guest(&self, at: usize, all: &mut Vec<World>) {
        let host = &self.hosts[at];
        let (Some(guest), Some(_)) = (&host.guest, &host.state) else { return };
        if guest.is_running && !guest.is_served {
            let mut next = self.clone();
            let host = &mut next.hosts[at];
            let state = host.state.as_mut().expect("it lives");
            // A new VMM asks for a new in-flight region, whatever its guest is; one that goes on does not.
            let start = if host.has_begun { Start::Resumed } else { Start::Fresh };
            if let Begin::Yes(_) = state.begins(0, &positions(guest), start) {
                host.has_begun = true;
                let guest = host.guest.as_mut().expect("it is there");
                guest.is_served = true;
                assert_eq!(next.image.locked_by, Some(at), "served without the lock");
                let guest = next.hosts[at].guest.as_ref().expect("it is there");
                assert_eq!(guest.knows, next.image.content, "a stale guest is let in");
            }
            all.push(next);
        }
        if guest.is_running
            && guest.is_served
            && let Some(mut next) = self.spend(WRITES)
        {
            next.write(at);
            all.push(next);
        }
    }

    fn of_worker(&self, at: usize, all: &mut Vec<World>) {
        let host = &self.hosts[at];
        let Some(state) = &host.state else {
            // The next one, with what the supervisor kept.
            let mut next = self.clone();
            let host = &mut next.hosts[at];
            let holds = match &host.note {
                Note::Given(seals) => Holds::Given(seals.clone()),
                Note::Ours => Holds::Ours,
                Note::Awaited => Holds::Awaited,
            };
            if holds != Holds::Ours && next.image.locked_by == Some(at) {
                next.image.locked_by = None;
            }
            let mut state = State::new(1, holds);
            state.goes_on(&[host.has_begun]);
            state.note_found(vec![Some(next.image.seal)]);
            state.logging(0, host.is_moving);
            // What was not answered is asked again.
            if host.giving != Giving::Not {
                let guest = host.guest.as_ref().expect("it was stopped");
                host.giving =
                    if state.stopped(0, &positions(guest)) == Pause::GiveUp { Giving::Asked } else { Giving::Not };
                if host.giving == Giving::Not {
                    state.paused();
                }
            }
            host.state = Some(state);
            all.push(next);
            return;
        };
        match host.giving {
            Giving::Asked => {
                // Storage fails: it stays as it was.
                let mut failed = self.clone();
                failed.hosts[at].giving = Giving::Not;
                failed.hosts[at].state.as_mut().expect("it lives").paused();
                all.push(failed);
                let mut next = self.clone();
                next.image.seal = Seal::of(7, &state.positions()[0]);
                next.hosts[at].giving = Giving::Sealed;
                all.push(next);
            }
            Giving::Sealed => {
                let mut next = self.clone();
                next.hosts[at].note = Note::Given(vec![Some(next.image.seal)]);
                next.hosts[at].giving = Giving::Noted;
                all.push(next);
            }
            Giving::Noted => {
                let mut next = self.clone();
                let host = &mut next.hosts[at];
                let state = host.state.as_mut().expect("it lives");
                let Note::Given(seals) = host.note.clone() else { panic!("noted") };
                state.given(seals);
                state.paused();
                host.giving = Giving::Not;
                assert_eq!(next.image.locked_by, Some(at));
                next.image.locked_by = None;
                all.push(next);
            }
            Giving::Not => match state.task() {
                Task::Take => {
                    let mut next = self.clone();
                    let state = next.hosts[at].state.as_mut().expect("it lives");
                    if next.image.locked_by.is_some_and(|by| by != at) {
                        assert!(!state.taken(Taken::Busy));
                        return;
                    }
                    if state.taken(Taken::Locked(vec![Some(next.image.seal)])) {
                        next.image.locked_by = Some(at);
                        // Noted before anybody is let in.
                        next.hosts[at].note = Note::Ours;
                    }
                    all.push(next);
                }
                task @ (Task::Adopt | Task::Prepare) => {
                    let mut next = self.clone();
                    next.hosts[at].state.as_mut().expect("it lives").looked_for(&task, None);
                    all.push(next);
                }
                Task::HandOver | Task::Nothing => {}
            },
        }
    }

    fn of_operator(&self, at: usize, all: &mut Vec<World>) {
        let other = 1 - at;
        let host = &self.hosts[at];
        if let Some(guest) = host.guest.as_ref().filter(|guest| guest.is_running && host.state.is_some())
            && let Some(mut next) = self.spend(TURNS)
        {
            // It is stopped, at the end of a migration or to be saved. A request that was not let in stays in its ring.
            let host = &mut next.hosts[at];
            host.is_moving = true;
            let state = host.state.as_mut().expect("it lives");
            state.logging(0, true);
            let is_asked = state.stopped(0, &positions(guest)) == Pause::GiveUp;
            host.giving = if is_asked { Giving::Asked } else { Giving::Not };
            if !is_asked {
                state.paused();
            }
            let guest = host.guest.as_mut().expect("it is there");
            (guest.is_running, guest.is_served) = (false, false);
            all.push(next);
        }
        if host.guest.as_ref().is_some_and(|guest| !guest.is_running) && host.giving == Giving::Not {
            // It goes on where it was, or its copy begins on the other host: both, if the operator errs.
            let mut next = self.clone();
            next.hosts[at].guest.as_mut().expect("it is there").is_running = true;
            all.push(next);
            if self.hosts[other].guest.is_none()
                && let Some(mut next) = self.spend(COPIES)
            {
                next.hosts[other].guest = host.guest.clone();
                all.push(next);
            }
        }
        if host.guest.is_some()
            && host.giving == Giving::Not
            && host.state.is_some()
            && let Some(mut next) = self.spend(DEATHS)
        {
            // The VMM ends; its VM is prepared anew.
            let is_ours = next.image.locked_by == Some(at);
            assert!(!is_ours || next.hosts[at].state.as_ref().is_some_and(|state| *state.holds() == Holds::Ours));
            if is_ours {
                next.image.locked_by = None;
            }
            let fresh = Host {
                state: Some(State::new(1, Holds::Awaited)),
                note: Note::Awaited,
                has_begun: false,
                giving: Giving::Not,
                guest: None,
                is_moving: false,
            };
            next.hosts[at] = fresh;
            all.push(next);
        }
        if host.state.is_some()
            && let Some(mut next) = self.spend(DEATHS)
        {
            // The worker dies. The supervisor has the locks, if it had.
            let host = &mut next.hosts[at];
            host.state = None;
            if let Some(guest) = &mut host.guest {
                guest.is_served = false;
            }
            all.push(next);
        }
    }
}

#[test]
fn no_interleaving_has_two_writers_or_a_stale_one() {
    let mut seen = HashSet::new();
    let mut open = vec![World::new()];
    let (mut moved, mut back) = (false, false);
    while let Some(world) = open.pop() {
        for next in world.next() {
            if seen.insert(next.clone()) {
                moved |= next.hosts[1].guest.as_ref().is_some_and(|guest| guest.is_served && guest.knows > 0);
                back |= next.hosts[0].note == Note::Ours
                    && next.left[TURNS] < 3
                    && next.hosts[0].guest.as_ref().is_some_and(|guest| guest.is_served && guest.knows > 0);
                open.push(next);
            }
        }
    }
    assert!(moved && back, "guests go on, too: {} states", seen.len());
    assert!(seen.len() > 5_000, "{} states", seen.len());
}

#[test]
fn a_guest_that_was_stopped_goes_on_only_on_what_it_left() {
    let left = [(0, 9)];
    let found = |seal| {
        let mut state = State::new(1, Holds::Ours);
        state.note_found(vec![Some(seal)]);
        state
    };
    // Restored from a file, on the image as it was left.
    let mut state = found(Seal::of(3, &left));
    assert_eq!(state.begins(0, &left, Start::Fresh), Begin::Wait);
    assert_eq!(state.task(), Task::Adopt);
    state.looked_for(&Task::Adopt, None);
    assert_eq!(state.begins(0, &left, Start::Fresh), Begin::Yes(Start::Resumed));
    // An earlier save of it, or an image that was written to.
    for seal in [Seal::of(3, &[(0, 10)]), Seal { seconds: 3, nanoseconds: 5 }] {
        assert!(matches!(found(seal).begins(0, &left, Start::Fresh), Begin::No(_)));
    }
    // One that begins.
    assert_eq!(found(Seal::of(3, &left)).begins(0, &[(0, 0)], Start::Fresh), Begin::Yes(Start::Fresh));
    // One that begins on images that nobody has looked at.
    let mut state = State::new(1, Holds::Awaited);
    assert_eq!(state.begins(0, &[(0, 0)], Start::Fresh), Begin::Wait);
    assert_eq!(state.task(), Task::Take);
    assert!(!state.taken(Taken::Busy));
    assert!(state.taken(Taken::Locked(vec![Some(Seal { seconds: 3, nanoseconds: 5 })])));
    assert_eq!(state.begins(0, &[(0, 0)], Start::Fresh), Begin::Wait);
    assert_eq!(state.task(), Task::Prepare);
    assert!(!state.may_recover());
    state.looked_for(&Task::Prepare, None);
    assert_eq!(state.begins(0, &[(0, 0)], Start::Fresh), Begin::Yes(Start::Fresh));
    assert!(state.may_recover());
}

#[test]
fn images_go_with_the_last_disk() {
    let mut state = State::new(2, Holds::Ours);
    state.note_found(vec![Some(Seal { seconds: 1, nanoseconds: 1 }); 2]);
    for disk in [0, 1] {
        assert_eq!(state.begins(disk, &[(0, 0)], Start::Fresh), Begin::Yes(Start::Fresh));
    }
    state.logging(0, true);
    assert_eq!(state.task(), Task::HandOver);
    assert_eq!(state.stopped(0, &[(0, 4)]), Pause::Stay);
    assert_eq!(state.stopped(1, &[(0, 5)]), Pause::GiveUp);
    assert_eq!(state.begins(1, &[(0, 5)], Start::Resumed), Begin::Wait, "while they are sealed");
    assert!(state.logging(0, false));
}
