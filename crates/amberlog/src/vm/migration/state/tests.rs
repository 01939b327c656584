//! Two hosts, the images of one VM, one guest that is copied from one to the other: every interleaving of what VMMs, operators, deaths and
//! the steps of giving up and taking can be, to a depth, with the state machine itself on both sides. Disks and rings are stopped one after
//! the other, sealed and unlocked one after the other, and a worker or a VMM may die between any two of these steps.
//!
//! What must hold: nobody writes without the lock, and a copy of the guest that is served knows all that was ever written. So no two
//! write, and nothing that was acknowledged is lost or overwritten by a guest that does not know of it. And a guest that is nowhere else is
//! never refused: with no more than one copy that runs, every one goes on.

use super::*;
use std::collections::HashSet;

/// Rings that are stopped, with their positions, and whether those are all of a disk.
type Stopped = (Vec<(u16, u16)>, bool);

/// What both hosts see of a disk.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Image {
    locked_by: Option<usize>,
    /// As its time of change has it.
    seal: Seal,
    /// Counts writes.
    content: u8,
}

/// A copy of the guest, in a VMM.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Guest {
    /// Of each disk, the newest write that it knows of.
    knows: Vec<u8>,
    /// Of each disk, of each ring.
    positions: Vec<Vec<u16>>,
    is_running: bool,
    /// How many rings the VMM has stopped, of all; nothing while it does not stop them.
    stopping: Option<usize>,
    /// The disk is served at this moment.
    is_served: Vec<bool>,
}

/// How far the source is with giving up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Giving {
    Not,
    /// The VMM waits: everything is to be brought to storage.
    Asked(Pause),
    /// So many images were looked at.
    Sealing(Pause, usize),
    Noted,
    /// So many are unlocked.
    Unlocking(usize),
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Note {
    Awaited,
    Ours,
    Given(Vec<Option<Seal>>),
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Host {
    /// What its worker knows; nothing when it is dead.
    state: Option<State>,
    /// What the supervisor keeps.
    note: Note,
    begun: Vec<bool>,
    stopped: Vec<Option<Stopped>>,
    /// That it owes its images to a guest that waits elsewhere.
    owes_giving_up: bool,
    /// What its doors know.
    door_began: Vec<bool>,
    giving: Giving,
    /// What the VMM has asked last was done, and it has not heard so.
    is_unheard: bool,
    guest: Option<Guest>,
    is_moving: bool,
}

/// How many of what there is, and how often what could go on for ever happens.
#[derive(Clone, Copy)]
struct Scale {
    /// Rings of each disk.
    rings: &'static [usize],
    left: [u8; 5],
    /// Both copies of a guest may be let go on.
    operators_err: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct World {
    hosts: [Host; 2],
    images: Vec<Image>,
    left: [u8; 5],
    /// An operator had both copies go on, or storage failed: one of them may be refused.
    is_in_doubt: bool,
}

const WRITES: usize = 0;
const COPIES: usize = 1;
const DEATHS: usize = 2;
const TURNS: usize = 3;
/// How often storage fails, or something is found that others have left for the images.
const FAILURES: usize = 4;

impl Guest {
    fn of_disk(&self, disk: usize) -> Vec<(u16, u16)> {
        self.positions[disk].iter().enumerate().map(|(ring, at)| (ring as u16, *at)).collect()
    }

    fn ring(&self, number: usize) -> Option<(usize, usize)> {
        let all = self.positions.iter().enumerate();
        let mut all = all.flat_map(|(disk, rings)| (0..rings.len()).map(move |ring| (disk, ring)));
        all.nth(number)
    }

    /// Rings of a disk that run, where the VMM may not have heard that it has stopped one more.
    fn started(&self, disk: usize, is_unheard: bool) -> Vec<(u16, u16)> {
        let stopped = match (self.is_running, self.stopping) {
            (true, _) => 0,
            (false, Some(stopped)) => stopped + usize::from(is_unheard),
            (false, None) => usize::MAX,
        };
        let before: usize = self.positions[..disk].iter().map(Vec::len).sum();
        self.of_disk(disk).into_iter().filter(|(ring, _)| before + usize::from(*ring) >= stopped).collect()
    }
}

fn new_host(disks: usize) -> Host {
    Host {
        state: Some(State::new(disks, Holds::Awaited)),
        note: Note::Awaited,
        begun: vec![false; disks],
        stopped: vec![None; disks],
        owes_giving_up: false,
        door_began: vec![false; disks],
        giving: Giving::Not,
        is_unheard: false,
        guest: None,
        is_moving: false,
    }
}

impl World {
    fn new(scale: &Scale) -> Self {
        let disks = scale.rings.len();
        let seal = Seal { seconds: 1, nanoseconds: 1 };
        let mut source = new_host(disks);
        source.guest = Some(Guest {
            knows: vec![0; disks],
            positions: scale.rings.iter().map(|rings| vec![0; *rings]).collect(),
            is_running: true,
            stopping: None,
            is_served: vec![false; disks],
        });
        World {
            hosts: [source, new_host(disks)],
            images: vec![Image { locked_by: None, seal, content: 0 }; disks],
            left: scale.left,
            is_in_doubt: false,
        }
    }

    fn write(&mut self, at: usize, disk: usize, ring: usize) {
        let image = &mut self.images[disk];
        assert_eq!(image.locked_by, Some(at), "a write without the lock");
        let guest = self.hosts[at].guest.as_mut().expect("who writes is there");
        assert_eq!(guest.knows[disk], image.content, "a guest that does not know what was written is served");
        image.content += 1;
        // A clock, and no seal.
        image.seal = Seal { seconds: 100 + u64::from(image.content), nanoseconds: 0 };
        guest.knows[disk] = image.content;
        guest.positions[disk][ring] = guest.positions[disk][ring].wrapping_add(1);
    }

    fn spend(&self, kind: usize) -> Option<World> {
        let mut next = self.clone();
        next.left[kind] = next.left[kind].checked_sub(1)?;
        Some(next)
    }

    fn next(&self, scale: &Scale) -> Vec<World> {
        let mut all = Vec::new();
        for at in [0, 1] {
            self.of_guest(at, &mut all);
            self.of_vmm(at, &mut all);
            self.of_worker(at, &mut all);
            self.of_operator(at, scale, &mut all);
        }
        all
    }

    fn of_guest(&self, at: usize, all: &mut Vec<World>) {
        let host = &self.hosts[at];
        let (Some(guest), Some(_)) = (&host.guest, &host.state) else { return };
        for disk in 0..self.images.len() {
            let started = guest.started(disk, host.is_unheard);
            if started.is_empty() {
                continue;
            }
            if !guest.is_served[disk] {
                let mut next = self.clone();
                let host = &mut next.hosts[at];
                let state = host.state.as_mut().expect("it lives");
                // A new VMM asks for a new in-flight region, whatever its guest is; one that goes on does not, nor one whose door knows.
                let start = if host.door_began[disk] { Start::Resumed } else { Start::Fresh };
                let before = state.stopped_rings(disk).0;
                let begin = state.begins(disk, &started, start);
                host.owes_giving_up = state.owes_giving_up();
                if before != state.stopped_rings(disk).0 {
                    host.stopped[disk] = Some(state.stopped_rings(disk));
                }
                match begin {
                    Begin::Yes(start) => {
                        let is_underway = started.iter().any(|(_, position)| *position != 0);
                        assert!(
                            !is_underway || start == Start::Resumed,
                            "journals are recovered under a guest that runs"
                        );
                        host.begun[disk] = true;
                        let guest = host.guest.as_mut().expect("it is there");
                        guest.is_served[disk] = true;
                        if guest.positions[disk].iter().all(|position| *position == 0) {
                            // It has asked for nothing yet.
                            guest.knows[disk] = next.images[disk].content;
                        }
                        assert_eq!(next.images[disk].locked_by, Some(at), "served without the lock");
                        let guest = next.hosts[at].guest.as_ref().expect("it is there");
                        assert_eq!(guest.knows[disk], next.images[disk].content, "a stale guest is let in");
                    }
                    Begin::No(why) => assert!(self.is_in_doubt, "the only copy of a guest is refused: {why}"),
                    Begin::Wait => {}
                }
                all.push(next);
            } else if !host.door_began[disk] {
                let mut next = self.clone();
                next.hosts[at].door_began[disk] = true;
                all.push(next);
            } else if guest.is_running {
                for ring in 0..guest.positions[disk].len() {
                    if let Some(mut next) = self.spend(WRITES) {
                        next.write(at, disk, ring);
                        all.push(next);
                    }
                }
            }
        }
    }

    /// It stops the rings one after the other.
    fn of_vmm(&self, at: usize, all: &mut Vec<World>) {
        let host = &self.hosts[at];
        let (Some(guest), Some(_)) = (&host.guest, &host.state) else { return };
        let Some(number) = guest.stopping.filter(|_| host.giving == Giving::Not) else { return };
        let mut next = self.clone();
        let now = &mut next.hosts[at];
        if host.is_unheard {
            now.is_unheard = false;
            let guest = now.guest.as_mut().expect("it is there");
            guest.stopping = Some(number + 1);
            let (disk, _) = guest.ring(number).expect("there is one");
            if guest.started(disk, false).is_empty() {
                guest.is_served[disk] = false;
            }
            if guest.ring(number + 1).is_none() {
                guest.stopping = None;
            }
            all.push(next);
            return;
        }
        let Some((disk, ring)) = guest.ring(number) else { return };
        let state = now.state.as_mut().expect("it lives");
        let position = guest.positions[disk][ring];
        state.ring_stopped(disk, ring as u16, position);
        now.stopped[disk] = Some(state.stopped_rings(disk));
        // The device knows what it has stopped itself.
        if ring + 1 == guest.positions[disk].len() {
            let pause = state.stopped(disk, &[(ring as u16, position)]);
            now.stopped[disk] = Some(state.stopped_rings(disk));
            if pause != Pause::Stay {
                now.giving = Giving::Asked(pause);
            }
        }
        now.is_unheard = true;
        all.push(next);
    }

    fn of_worker(&self, at: usize, all: &mut Vec<World>) {
        let host = &self.hosts[at];
        let Some(state) = &host.state else {
            all.push(self.with_next_worker(at));
            return;
        };
        let mut next = self.clone();
        let now = &mut next.hosts[at];
        match host.giving {
            Giving::Asked(pause) => {
                // Storage fails: it stays as it was. What is to be given up is so when storage does not any more.
                if let Some(mut failed) = self.spend(FAILURES) {
                    let now = &mut failed.hosts[at];
                    now.giving = Giving::Not;
                    let state = now.state.as_mut().expect("it lives");
                    if pause == Pause::GiveUp {
                        state.could_not_give_up();
                        now.owes_giving_up = true;
                    } else {
                        state.paused();
                        failed.is_in_doubt = true;
                    }
                    all.push(failed);
                }
                now.giving = Giving::Sealing(pause, 0);
                all.push(next);
            }
            Giving::Sealing(pause, disk) if disk < self.images.len() => {
                assert_eq!(next.images[disk].locked_by, Some(at), "sealed without the lock");
                if state.has_begun(disk) {
                    next.images[disk].seal = Seal::of(7, &state.positions()[disk]);
                }
                now.giving = Giving::Sealing(pause, disk + 1);
                all.push(next);
            }
            Giving::Sealing(Pause::GiveUp, _) => {
                now.note = Note::Given(next.images.iter().map(|image| Some(image.seal)).collect());
                now.giving = Giving::Noted;
                all.push(next);
            }
            Giving::Sealing(..) => {
                now.state.as_mut().expect("it lives").paused();
                now.giving = Giving::Not;
                all.push(next);
            }
            Giving::Noted => {
                let Note::Given(seals) = host.note.clone() else { panic!("noted") };
                now.state.as_mut().expect("it lives").given(seals);
                now.owes_giving_up = false;
                now.giving = Giving::Unlocking(0);
                all.push(next);
            }
            Giving::Unlocking(disk) => {
                if disk < self.images.len() {
                    assert_eq!(next.images[disk].locked_by, Some(at));
                    next.images[disk].locked_by = None;
                    now.giving = Giving::Unlocking(disk + 1);
                } else {
                    now.state.as_mut().expect("it lives").paused();
                    now.giving = Giving::Not;
                }
                all.push(next);
            }
            Giving::Not => match state.task() {
                Task::Take => {
                    let is_free = |image: &Image| image.locked_by.is_none_or(|by| by == at);
                    let now_state = now.state.as_mut().expect("it lives");
                    if !self.images.iter().all(is_free) {
                        assert!(!now_state.taken(Taken::Busy));
                        return;
                    }
                    let found: Vec<Option<Seal>> = self.images.iter().map(|image| Some(image.seal)).collect();
                    if matches!(host.note, Note::Given(_)) && now_state.fits(&found) {
                        // Noted first; it may die here.
                        let mut noted = self.clone();
                        noted.hosts[at].note = Note::Ours;
                        noted.images.iter_mut().for_each(|image| image.locked_by = Some(at));
                        if let Some(mut dead) = noted.spend(DEATHS) {
                            dead.bury(at);
                            all.push(dead);
                        }
                        now.note = Note::Ours;
                    }
                    if now_state.taken(Taken::Locked(found)) {
                        next.images.iter_mut().for_each(|image| image.locked_by = Some(at));
                    }
                    all.push(next);
                }
                task @ (Task::Adopt | Task::Prepare) => {
                    // What is there cannot be understood: nobody knows why.
                    let mut refused = self.clone();
                    let reason = Some("for a test".to_owned());
                    if !refused.hosts[at].state.as_mut().expect("it lives").looked_for(&task, reason) {
                        refused.hosts[at].note = Note::Awaited;
                        refused.images.iter_mut().for_each(|image| image.locked_by = None);
                    }
                    refused.is_in_doubt = true;
                    all.push(refused);
                    if task == Task::Prepare
                        && let Some(mut found) = self.spend(FAILURES)
                    {
                        found.hosts[at].state.as_mut().expect("it lives").lets_go();
                        found.images.iter_mut().for_each(|image| image.locked_by = None);
                        all.push(found);
                    }
                    now.note = Note::Ours;
                    now.state.as_mut().expect("it lives").looked_for(&task, None);
                    all.push(next);
                }
                Task::GiveUp => {
                    now.state.as_mut().expect("it lives").gives_up_again();
                    now.giving = Giving::Asked(Pause::GiveUp);
                    all.push(next);
                }
                Task::HandOver | Task::Nothing => {}
            },
        }
    }

    fn bury(&mut self, at: usize) {
        let host = &mut self.hosts[at];
        host.state = None;
        // What was not answered is asked again.
        (host.giving, host.is_unheard) = (Giving::Not, false);
        if let Some(guest) = &mut host.guest {
            guest.is_served.fill(false);
        }
    }

    /// The next one, with what the supervisor kept.
    fn with_next_worker(&self, at: usize) -> World {
        let mut next = self.clone();
        let host = &mut next.hosts[at];
        let holds = match &host.note {
            Note::Given(seals) => Holds::Given(seals.clone()),
            Note::Ours => Holds::Ours,
            Note::Awaited => Holds::Awaited,
        };
        if holds != Holds::Ours {
            next.images.iter_mut().filter(|image| image.locked_by == Some(at)).for_each(|image| image.locked_by = None);
        }
        let mut state = State::new(next.images.len(), holds);
        state.note_found(next.images.iter().map(|image| Some(image.seal)).collect());
        state.goes_on(&host.begun);
        if host.owes_giving_up {
            state.owed_giving_up();
        }
        for (disk, stopped) in host.stopped.iter().enumerate() {
            if let Some((positions, all)) = stopped {
                state.was_stopped(disk, positions.clone(), *all);
            }
        }
        for disk in 0..host.begun.len() {
            state.logging(disk, host.is_moving);
        }
        host.state = Some(state);
        next
    }

    fn of_operator(&self, at: usize, scale: &Scale, all: &mut Vec<World>) {
        let other = 1 - at;
        let host = &self.hosts[at];
        let disks = self.images.len();
        if let Some(guest) = host.guest.as_ref().filter(|guest| guest.is_running && host.state.is_some()) {
            // It is stopped: at the end of a migration, or to be saved to a file.
            for is_moving in [true, false] {
                let Some(mut next) = self.spend(TURNS) else { continue };
                let host = &mut next.hosts[at];
                host.is_moving = is_moving;
                let state = host.state.as_mut().expect("it lives");
                (0..disks).for_each(|disk| _ = state.logging(disk, is_moving));
                host.guest = Some(Guest { is_running: false, stopping: Some(0), ..guest.clone() });
                all.push(next);
            }
        }
        let is_stopped = |guest: &Guest| !guest.is_running && guest.stopping.is_none();
        if let Some(guest) = host.guest.as_ref().filter(|guest| is_stopped(guest) && host.state.is_some()) {
            // It goes on where it was (the migration has failed, or was cancelled), or its copy begins on the other host: both, if the operator
            // errs.
            let runs_elsewhere = self.hosts[other].guest.is_some();
            if !runs_elsewhere || scale.operators_err {
                let mut next = self.clone();
                next.is_in_doubt |= runs_elsewhere;
                let host = &mut next.hosts[at];
                host.is_moving = false;
                let state = host.state.as_mut().expect("it lives");
                (0..disks).for_each(|disk| _ = state.logging(disk, false));
                host.guest.as_mut().expect("it is there").is_running = true;
                all.push(next);
            }
            if !runs_elsewhere && let Some(mut next) = self.spend(COPIES) {
                // What was not given up, nor will be, is not there for it.
                next.is_in_doubt |= !matches!(host.note, Note::Given(_)) && !host.owes_giving_up;
                next.hosts[other].guest =
                    Some(Guest { is_running: true, is_served: vec![false; disks], ..guest.clone() });
                all.push(next);
            }
        }
        let is_quiet = host.giving == Giving::Not && host.state.is_some();
        if host.guest.is_some()
            && is_quiet
            && let Some(mut next) = self.spend(DEATHS)
        {
            // The VMM ends, whatever it was about; its VM is prepared anew. What its guest was owed goes home only where that is ours.
            let state = host.state.as_ref().expect("it lives");
            let has_locks = self.images.iter().any(|image| image.locked_by == Some(at));
            assert!(!has_locks || *state.holds() == Holds::Ours);
            if state.may_recover() && host.begun.contains(&true) {
                assert!(self.images.iter().all(|image| image.locked_by == Some(at)), "recovered without the lock");
            }
            next.images.iter_mut().filter(|image| image.locked_by == Some(at)).for_each(|image| image.locked_by = None);
            next.hosts[at] = new_host(disks);
            // Its copy, if there is one, may be older than what was written since.
            next.is_in_doubt |= self.hosts[other].guest.is_some() || *state.holds() == Holds::Ours;
            all.push(next);
        }
        if host.state.is_some()
            && let Some(mut next) = self.spend(DEATHS)
        {
            // The worker dies, amid whatever. The supervisor has the locks, if it had.
            next.bury(at);
            all.push(next);
        }
    }
}

fn explore(scale: &Scale) -> usize {
    // Each with the one before it, so that what is wrong comes with the shortest way there.
    let mut seen: Vec<(World, usize)> = vec![(World::new(scale), 0)];
    let mut known: HashSet<World> = seen.iter().map(|(world, _)| world.clone()).collect();
    let (mut moved, mut back) = (false, false);
    let serves = |host: &Host| {
        let guest = host.guest.as_ref();
        guest.is_some_and(|guest| {
            guest.is_served.iter().all(|served| *served) && guest.knows.iter().any(|knows| *knows > 0)
        })
    };
    let mut at = 0;
    while at < seen.len() {
        let world = seen[at].0.clone();
        let next = std::panic::catch_unwind(|| world.next(scale)).unwrap_or_else(|_| {
            let mut way = vec![at];
            while way[way.len() - 1] != 0 {
                way.push(seen[way[way.len() - 1]].1);
            }
            let way: Vec<String> = way.iter().rev().map(|step| format!("{:?}", seen[*step].0)).collect();
            panic!("what no step may do, after\n{}", way.join("\n"));
        });
        for next in next {
            if known.insert(next.clone()) {
                moved |= serves(&next.hosts[1]) && !next.is_in_doubt;
                back |= next.hosts[0].note == Note::Ours
                    && next.left[TURNS] < scale.left[TURNS]
                    && next.hosts[0].guest.as_ref().is_some_and(|guest| guest.is_running)
                    && serves(&next.hosts[0]);
                seen.push((next, at));
            }
        }
        at += 1;
    }
    assert!(moved && back, "guests go on, too: {} states", seen.len());
    println!("{} states", seen.len());
    seen.len()
}

#[test]
fn no_interleaving_has_two_writers_or_a_stale_one() {
    let states = explore(&Scale { rings: &[1], left: [2, 1, 2, 2, 2], operators_err: true });
    assert!(states > 5_000, "{states} states");
}

#[test]
fn nor_with_two_disks() {
    let states = explore(&Scale { rings: &[1, 1], left: [1, 1, 1, 1, 1], operators_err: true });
    assert!(states > 5_000, "{states} states");
}

#[test]
fn nor_with_two_rings_of_a_disk() {
    let states = explore(&Scale { rings: &[2], left: [1, 1, 2, 1, 1], operators_err: false });
    assert!(states > 5_000, "{states} states");
}

#[test]
fn a_driver_with_fewer_rings_leaves_none_behind() {
    let mut state = State::new(1, Holds::Ours);
    state.note_found(vec![Some(Seal { seconds: 1, nanoseconds: 1 })]);
    assert_eq!(state.begins(0, &[(0, 0), (1, 0)], Start::Fresh), Begin::Yes(Start::Fresh));
    state.ring_stopped(0, 0, 4);
    assert_eq!(state.stopped(0, &[(0, 4), (1, 5)]), Pause::Seal);
    state.paused();
    assert_eq!(state.positions(), [[(0, 4), (1, 5)]]);
    // Its guest is reset.
    assert_eq!(state.begins(0, &[(0, 0)], Start::Fresh), Begin::Yes(Start::Fresh));
    assert_eq!(state.stopped(0, &[(0, 1)]), Pause::Seal);
    assert_eq!(state.positions(), [[(0, 1)]]);
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

/// Something was left for its images by others, which need the locks to be brought home.
#[test]
fn images_that_were_let_go_are_taken_again_for_a_guest_that_waits() {
    let found = || Taken::Locked(vec![Some(Seal { seconds: 3, nanoseconds: 5 })]);
    let begun = || {
        let mut state = State::new(1, Holds::Awaited);
        assert_eq!(state.begins(0, &[(0, 0)], Start::Fresh), Begin::Wait);
        assert!(state.taken(found()) && !state.was_let_go());
        assert_eq!(state.begins(0, &[(0, 0)], Start::Fresh), Begin::Wait);
        assert_eq!(state.task(), Task::Prepare);
        state
    };
    let mut state = begun();
    state.lets_go();
    assert_eq!((state.holds(), state.task()), (&Holds::Awaited, Task::Take));
    assert!(state.taken(found()) && state.was_let_go());
    assert_eq!(state.task(), Task::Nothing, "its driver asks again");
    assert_eq!(state.begins(0, &[(0, 0)], Start::Fresh), Begin::Wait);
    assert_eq!(state.task(), Task::Prepare);
    state.looked_for(&Task::Prepare, None);
    assert_eq!(state.begins(0, &[(0, 0)], Start::Fresh), Begin::Yes(Start::Fresh));
    // Its VMM has gone, before that or after it.
    for is_before in [true, false] {
        let mut state = begun();
        if is_before {
            state.gone(0);
        }
        state.lets_go();
        if !is_before {
            state.gone(0);
        }
        assert_eq!((state.holds(), state.task()), (&Holds::Awaited, Task::Nothing));
        assert!(!state.was_let_go(), "the next one is another one");
    }
}

/// A guest was left with two disks, of which one was unplugged.
#[test]
fn a_disk_that_a_left_guest_has_no_more_keeps_nothing() {
    let left = || {
        let mut state = State::new(2, Holds::Ours);
        state.note_found(vec![Some(Seal { seconds: 1, nanoseconds: 1 }); 2]);
        state.was_left(&[true, true]);
        assert_eq!(state.begins(0, &[(0, 5)], Start::Resumed), Begin::Yes(Start::Resumed));
        state.logging(0, true);
        state
    };
    // It may be about to come.
    assert_eq!(left().stopped(0, &[(0, 5)]), Pause::Stay);
    let mut state = left();
    assert_eq!(state.has_not_come(), [1]);
    assert_eq!(state.stopped_rings(1), (Vec::new(), true));
    assert_eq!(state.stopped(0, &[(0, 5)]), Pause::GiveUp);
    // It has come, and is stopped, or goes.
    for goes in [false, true] {
        let mut state = left();
        assert_eq!(state.begins(1, &[(0, 7)], Start::Resumed), Begin::Yes(Start::Resumed));
        assert_eq!(state.has_not_come(), [0; 0]);
        assert_eq!(state.stopped(0, &[(0, 5)]), Pause::Stay);
        if goes {
            state.gone(1);
        } else {
            assert_eq!(state.stopped(1, &[(0, 7)]), Pause::GiveUp);
        }
        assert_eq!(state.has_not_come(), [0; 0]);
    }
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
