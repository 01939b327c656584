//! Who may touch the images of a VM that can be moved to another host: a state machine, without locks, files or time.
//!
//! | holds | locks | what this process may do with the images | until |
//! |---|---|---|---|
//! | `Ours` | ours | all | its guest was stopped while it is moved, everything is on storage, and the images are sealed: `Given` |
//! | `Given` | anybody's | nothing | its guest is started again, and the locks could be taken: with whole seals `Ours`, else `Lost` |
//! | `Awaited` | anybody's | nothing | a guest is started here, and the locks could be taken: `Ours`, and the guest is looked at. So a VM without a guest keeps no other host from its images. What others have left for them is brought home without the locks: `Awaited` once more |
//! | `Lost` | anybody's | nothing, for this guest for ever | its VMM ends |
//!
//! A guest whose rings begin anywhere but at their beginning has come from elsewhere, or was restored from a file. It goes on only where
//! the seal on its image says that this very guest left it, and that nobody has written since ([`image_file::Seal`]).

use block_device::Begin;
use block_route::Start;
use image_file::Seal;

/// Whose the images are.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Holds {
    /// They are locked.
    Ours,
    /// They were given up, each with this seal; nothing for one that is only read.
    Given(Vec<Option<Seal>>),
    /// No guest has begun here, and whoever needs them has them.
    Awaited,
    /// They were given up and changed by somebody else: for this reason.
    Lost(String),
}

/// What is known of a disk.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Disk {
    is_running: bool,
    is_logging: bool,
    /// A driver of this VMM has used it.
    has_begun: bool,
    /// It was used under an earlier daemon, and nothing was heard of it since: its VMM is about to come with it, or has it no more.
    is_unheard_of: bool,
    /// Of its rings that are stopped, in their order.
    positions: Vec<(u16, u16)>,
    /// As it was found on the image when that became ours, before anything was written.
    found: Option<Seal>,
}

/// What is to be done, by a thread that may wait.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Task {
    /// Nothing.
    Nothing,
    /// Every journal is brought to storage, and stays there.
    HandOver,
    /// Its images could not be given up when its guest was stopped: that is tried again ([`State::gives_up_again`]).
    GiveUp,
    /// The locks are taken, if they can be: [`State::taken`].
    Take,
    /// Its logs are looked for, and taken as they are on storage: [`State::looked_for`].
    Adopt,
    /// Its images are looked at as before any guest begins: [`State::looked_for`].
    Prepare,
}

/// What came of [`Task::Take`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Taken {
    /// Somebody else has one of the images.
    Busy,
    /// They are locked, and this is what stands on each that can be written.
    Locked(Vec<Option<Seal>>),
}

/// What becomes of the images when the last ring of a VM is stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pause {
    /// They stay ours.
    Stay,
    /// They stay ours, and are sealed if everything is on storage: its VMM may save its guest to a file.
    Seal,
    /// The guest is moved: everything is brought to storage, they are sealed, and given up ([`State::given`]).
    GiveUp,
}

/// See the module.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct State {
    holds: Holds,
    disks: Vec<Disk>,
    /// Nothing was looked for on the images since they are ours.
    is_unprepared: bool,
    /// Its logs were taken as they are on storage.
    is_adopted: bool,
    wants_images: bool,
    /// A guest has come, or begins: its logs are to be looked for.
    wanted: Task,
    /// They are being sealed: nobody begins meanwhile.
    is_pausing: bool,
    /// Its guest was stopped to be moved, and the images could not be given up. It waits at the other end, unless it goes on here.
    owes_giving_up: bool,
    /// They were given up for a moment, and the guest that they are prepared for waits for them.
    is_let_go: bool,
    /// Why disks that no driver has begun on are not let in, beside others that are served.
    refusal: Option<String>,
}

const CHANGED: &str = "the image was changed since its guest was stopped, or another guest has used it since: this guest's memory does not \
                       fit it any more. Nothing was changed; end its VMM, and start the guest anew or from what was saved last";

impl State {
    /// Of a VM with so many disks.
    pub fn new(disks: usize, holds: Holds) -> Self {
        let is_unprepared = holds == Holds::Awaited;
        State {
            holds,
            disks: vec![Disk::default(); disks],
            is_unprepared,
            is_adopted: false,
            wants_images: false,
            wanted: Task::Nothing,
            is_pausing: false,
            owes_giving_up: false,
            is_let_go: false,
            refusal: None,
        }
    }

    /// Its guest was served by a worker before this one: these disks had begun. They run, for all that is known, so that nothing is given
    /// up before each of them was stopped ([`State::was_stopped`]).
    pub fn goes_on(&mut self, has_begun: &[bool]) {
        for (disk, has_begun) in self.disks.iter_mut().zip(has_begun) {
            (disk.has_begun, disk.is_running) = (*has_begun, *has_begun);
        }
        if has_begun.contains(&true) {
            self.is_adopted = true;
            self.is_unprepared = false;
        }
    }

    /// Its guest was left by an earlier daemon, and had used these disks. One of them may have been unplugged since, or before, and nobody
    /// will ever stop that ([`State::has_not_come`]).
    pub fn was_left(&mut self, used: &[bool]) {
        self.goes_on(used);
        for (disk, is_used) in self.disks.iter_mut().zip(used) {
            disk.is_unheard_of = *is_used;
        }
    }

    /// The same where a worker before this one was told so, and had heard nothing of these disks yet. After [`State::goes_on`].
    pub fn goes_on_without(&mut self, unheard_of: &[bool]) {
        for (disk, is_unheard_of) in self.disks.iter_mut().zip(unheard_of) {
            disk.is_unheard_of = disk.is_running && *is_unheard_of;
        }
    }

    /// The disks of which nothing was heard yet since its guest was left: for whoever follows this process.
    pub fn unheard_of(&self) -> Vec<usize> {
        let all = self.disks.iter().enumerate();
        all.filter_map(|(at, disk)| disk.is_unheard_of.then_some(at)).collect()
    }

    /// Its VMM had the time to come with all disks that it has: those of which nothing was heard are none of its guest's any more. Gives them.
    pub fn has_not_come(&mut self) -> Vec<usize> {
        let away = self.disks.iter_mut().enumerate().filter(|(_, disk)| disk.is_unheard_of);
        let let_go = |(at, disk): (usize, &mut Disk)| {
            (disk.is_unheard_of, disk.is_running) = (false, false);
            at
        };
        away.map(let_go).collect()
    }

    /// Before this worker the images were to be given up, and could not be.
    pub fn owed_giving_up(&mut self) {
        // It may have died right after they were.
        self.owes_giving_up = self.holds == Holds::Ours;
    }

    /// Before this worker these rings of a disk were stopped: all of them, or those alone.
    pub fn was_stopped(&mut self, disk: usize, positions: Vec<(u16, u16)>, all: bool) {
        let now = &mut self.disks[disk];
        now.positions = positions;
        now.is_running &= !all;
    }

    /// What stands on the images, which are ours and not written to yet.
    pub fn note_found(&mut self, found: Vec<Option<Seal>>) {
        for (disk, found) in self.disks.iter_mut().zip(found) {
            disk.found = found;
        }
    }

    /// Whose the images are.
    pub fn holds(&self) -> &Holds {
        &self.holds
    }

    /// Whether its guest is being moved.
    pub fn is_moving(&self) -> bool {
        self.disks.iter().any(|disk| disk.is_logging)
    }

    /// Whether what is owed to the images may be brought home when its VMM is gone.
    pub fn may_recover(&self) -> bool {
        self.holds == Holds::Ours && !self.is_unprepared
    }

    fn is_running(&self) -> bool {
        self.disks.iter().any(|disk| disk.is_running)
    }

    /// Whether the images are still to be given up to a guest that waits elsewhere.
    pub fn owes_giving_up(&self) -> bool {
        self.owes_giving_up
    }

    /// What a thread that may wait is to do now.
    pub fn task(&self) -> Task {
        match self.holds {
            Holds::Given(_) | Holds::Awaited if self.wants_images => Task::Take,
            Holds::Ours if self.wanted != Task::Nothing => self.wanted.clone(),
            Holds::Ours if self.owes_giving_up && !self.is_running() => Task::GiveUp,
            Holds::Ours if self.is_moving() => Task::HandOver,
            _ => Task::Nothing,
        }
    }

    /// A driver starts.
    pub fn begins(&mut self, disk: usize, positions: &[(u16, u16)], start: Start) -> Begin {
        // Before anything of it is noted: what is being sealed are the positions at which it was stopped.
        if self.holds == Holds::Ours && self.is_pausing {
            return Begin::Wait;
        }
        let now = &mut self.disks[disk];
        (now.is_running, now.is_unheard_of) = (true, false);
        match start {
            // Another driver, with other rings, perhaps.
            Start::Fresh => now.positions.clear(),
            Start::Resumed => {
                now.positions.retain(|(known, _)| !positions.iter().any(|(ring, _)| ring == known));
            }
        }
        match &self.holds {
            Holds::Lost(why) => return Begin::No(why.clone()),
            Holds::Given(_) | Holds::Awaited => {
                self.wants_images = true;
                return Begin::Wait;
            }
            // It goes on here.
            Holds::Ours => self.owes_giving_up = false,
        }
        let now = &mut self.disks[disk];
        if now.has_begun {
            // Where a guest has come, and the worker that let it in died before its door knew, the region is new and the guest is not: its
            // journals must not be recovered under it.
            let is_underway = positions.iter().any(|(_, position)| *position != 0);
            return Begin::Yes(if is_underway { Start::Resumed } else { start });
        }
        if let Some(why) = &self.refusal {
            return Begin::No(why.clone());
        }
        let is_whole = now.found.is_some_and(|seal| seal.is_of(positions));
        let is_underway = start == Start::Resumed || positions.iter().any(|(_, position)| *position != 0);
        match (is_whole, is_underway) {
            // Read-only disks have no seal: nothing of them can be out of date that was not so on the other host.
            (false, true) if now.found.is_some() => Begin::No(CHANGED.to_owned()),
            (false, false) if self.is_unprepared => {
                // They may have been taken for one that has gone.
                self.wants_images = true;
                self.wanted = Task::Prepare;
                Begin::Wait
            }
            (false, false) => {
                now.has_begun = true;
                Begin::Yes(Start::Fresh)
            }
            _ if !self.is_adopted => {
                self.wanted = Task::Adopt;
                Begin::Wait
            }
            _ => {
                now.has_begun = true;
                Begin::Yes(Start::Resumed)
            }
        }
    }

    /// A ring of a disk is stopped. What was known of it before, of an answer that nobody heard, is past.
    pub fn ring_stopped(&mut self, disk: usize, ring: u16, position: u16) {
        let known = &mut self.disks[disk].positions;
        known.retain(|(other, _)| *other != ring);
        known.push((ring, position));
        known.sort_unstable();
    }

    /// Of a disk, the rings that are stopped, and whether those are all.
    pub fn stopped_rings(&self, disk: usize) -> (Vec<(u16, u16)>, bool) {
        (self.disks[disk].positions.clone(), !self.disks[disk].is_running)
    }

    /// The last ring of a disk is stopped; others may have been before this worker.
    pub fn stopped(&mut self, disk: usize, positions: &[(u16, u16)]) -> Pause {
        for (ring, position) in positions {
            self.ring_stopped(disk, *ring, *position);
        }
        (self.disks[disk].is_running, self.disks[disk].is_unheard_of) = (false, false);
        if self.is_running() {
            return Pause::Stay;
        }
        self.waits_no_more();
        // Of a guest that was not let in nothing is to be given up.
        let has_begun = self.disks.iter().any(|disk| disk.has_begun);
        let pause = match (&self.holds, has_begun) {
            (Holds::Ours, true) if self.is_moving() => Pause::GiveUp,
            (Holds::Ours, true) => Pause::Seal,
            _ => Pause::Stay,
        };
        self.is_pausing = pause != Pause::Stay;
        pause
    }

    /// What [`State::stopped`] asked for is over, whatever came of it.
    pub fn paused(&mut self) {
        self.is_pausing = false;
    }

    /// It is over, and the images were to be given up and are not.
    pub fn could_not_give_up(&mut self) {
        self.is_pausing = false;
        self.owes_giving_up = self.holds == Holds::Ours;
    }

    /// [`Task::GiveUp`] is about to be done: nobody begins meanwhile, until [`State::paused`] or [`State::could_not_give_up`].
    pub fn gives_up_again(&mut self) {
        debug_assert_eq!(self.task(), Task::GiveUp);
        self.is_pausing = true;
    }

    /// The VMM has lost its connection to a disk. Says whether its guest is not being moved any more.
    pub fn gone(&mut self, disk: usize) -> bool {
        (self.disks[disk].is_running, self.disks[disk].is_unheard_of) = (false, false);
        if !self.is_running() {
            self.waits_no_more();
        }
        self.logging(disk, false)
    }

    /// Whether there is a guest for which the images are taken and looked at, or were: not one that has gone.
    pub fn is_waited_for(&self) -> bool {
        self.wants_images || self.wanted != Task::Nothing
    }

    fn waits_no_more(&mut self) {
        self.wants_images = false;
        self.wanted = Task::Nothing;
        self.is_let_go = false;
    }

    /// The VMM wants pages marked, or no longer. Says whether its guest is not being moved any more.
    pub fn logging(&mut self, disk: usize, is_logging: bool) -> bool {
        let was_moving = self.is_moving();
        self.disks[disk].is_logging = is_logging;
        was_moving && !self.is_moving()
    }

    /// How far the rings of each disk had got when they were stopped.
    pub fn positions(&self) -> Vec<Vec<(u16, u16)>> {
        self.disks.iter().map(|disk| disk.positions.clone()).collect()
    }

    /// Its disks that were used by a driver of this VMM.
    pub fn has_begun(&self, disk: usize) -> bool {
        self.disks[disk].has_begun
    }

    /// They are sealed, and about to be anybody's. Before they are unlocked.
    pub fn given(&mut self, seals: Vec<Option<Seal>>) {
        debug_assert_eq!(self.holds, Holds::Ours, "what is not ours is not given up");
        self.holds = Holds::Given(seals);
        self.owes_giving_up = false;
    }

    /// Whether images on which that was found are ours once they are locked. Asked before [`State::taken`], so that it can be noted first.
    pub fn fits(&self, found: &[Option<Seal>]) -> bool {
        match &self.holds {
            Holds::Given(seals) => seals == found,
            Holds::Awaited | Holds::Ours => true,
            Holds::Lost(_) => false,
        }
    }

    /// What came of [`Task::Take`]. True when they are ours; otherwise whoever has locked them unlocks them.
    pub fn taken(&mut self, taken: Taken) -> bool {
        let Taken::Locked(found) = taken else { return false };
        let fits = self.fits(&found);
        match &self.holds {
            Holds::Given(_) if fits => {
                self.holds = Holds::Ours;
                true
            }
            Holds::Given(_) => {
                self.holds = Holds::Lost(CHANGED.to_owned());
                false
            }
            Holds::Awaited => {
                self.note_found(found);
                self.holds = Holds::Ours;
                true
            }
            Holds::Ours => true,
            Holds::Lost(_) => false,
        }
    }

    /// [`Task::Prepare`] has found what others have left for the images, which is to be brought home first, by somebody who needs the locks: they are
    /// anybody's again, and taken once more if there is a guest still that waits for them. Before they are unlocked.
    pub fn lets_go(&mut self) {
        debug_assert!(self.holds == Holds::Ours && self.is_unprepared, "a guest may have them");
        self.holds = Holds::Awaited;
        self.wanted = Task::Nothing;
        self.is_let_go = self.wants_images;
    }

    /// Whether it is the same guest still for which they were given up for a moment.
    pub fn was_let_go(&self) -> bool {
        self.is_let_go
    }

    /// What came of [`Task::Adopt`] or [`Task::Prepare`]: the sentence says why its guest cannot go on. False when the images are not ours any
    /// more: who has locked them unlocks them. They stay locked where a disk of them is served.
    pub fn looked_for(&mut self, task: &Task, refusal: Option<String>) -> bool {
        self.wanted = Task::Nothing;
        self.is_let_go = false;
        match refusal {
            None => {
                self.is_unprepared = false;
                self.is_adopted |= *task == Task::Adopt;
            }
            Some(why) if self.disks.iter().any(|disk| disk.has_begun) => self.refusal = Some(why),
            Some(why) => self.holds = Holds::Lost(why),
        }
        self.holds == Holds::Ours
    }
}

#[cfg(test)]
mod tests;
