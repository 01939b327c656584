//! Who may touch the images of a VM that can be moved to another host: a state machine, without locks, files or time.
//!
//! | holds | locks | what this process may do with the images | until |
//! |---|---|---|---|
//! | `Ours` | ours | all | its guest was stopped while it is moved, everything is on storage, and the images are sealed: `Given` |
//! | `Given` | anybody's | nothing | its guest is started again, and the locks could be taken: with whole seals `Ours`, else `Lost` |
//! | `Awaited` | anybody's | nothing | a guest is started here, and the locks could be taken: `Ours`, and the guest is looked at. So a VM without a guest keeps no other host from its images |
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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
        }
    }

    /// Its guest was served by a worker before this one: these disks had begun.
    pub fn goes_on(&mut self, has_begun: &[bool]) {
        for (disk, has_begun) in self.disks.iter_mut().zip(has_begun) {
            disk.has_begun = *has_begun;
        }
        if has_begun.contains(&true) {
            self.is_adopted = true;
            self.is_unprepared = false;
        }
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

    /// What a thread that may wait is to do now.
    pub fn task(&self) -> Task {
        match self.holds {
            Holds::Given(_) | Holds::Awaited if self.wants_images => Task::Take,
            Holds::Ours if self.wanted != Task::Nothing => self.wanted.clone(),
            Holds::Ours if self.is_moving() => Task::HandOver,
            _ => Task::Nothing,
        }
    }

    /// A driver starts.
    pub fn begins(&mut self, disk: usize, positions: &[(u16, u16)], start: Start) -> Begin {
        let now = &mut self.disks[disk];
        now.is_running = true;
        match &self.holds {
            Holds::Lost(why) => return Begin::No(why.clone()),
            Holds::Given(_) | Holds::Awaited => {
                self.wants_images = true;
                return Begin::Wait;
            }
            Holds::Ours if self.is_pausing => return Begin::Wait,
            Holds::Ours => {}
        }
        if now.has_begun {
            return Begin::Yes(start);
        }
        let is_whole = now.found.is_some_and(|seal| seal.is_of(positions));
        let is_underway = start == Start::Resumed || positions.iter().any(|(_, position)| *position != 0);
        match (is_whole, is_underway) {
            // Read-only disks have no seal: nothing of them can be out of date that was not so on the other host.
            (false, true) if now.found.is_some() => Begin::No(CHANGED.to_owned()),
            (false, false) if self.is_unprepared => {
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

    /// The last ring of a disk is stopped.
    pub fn stopped(&mut self, disk: usize, positions: &[(u16, u16)]) -> Pause {
        let now = &mut self.disks[disk];
        (now.is_running, now.positions) = (false, positions.to_vec());
        if self.disks.iter().any(|disk| disk.is_running) {
            return Pause::Stay;
        }
        self.wants_images = false;
        self.wanted = Task::Nothing;
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

    /// The VMM has lost its connection to a disk. Says whether its guest is not being moved any more.
    pub fn gone(&mut self, disk: usize) -> bool {
        self.disks[disk].is_running = false;
        if !self.disks.iter().any(|disk| disk.is_running) {
            self.wants_images = false;
            self.wanted = Task::Nothing;
        }
        self.logging(disk, false)
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
    }

    /// What came of [`Task::Take`]. True when they are ours; otherwise whoever has locked them unlocks them.
    pub fn taken(&mut self, taken: Taken) -> bool {
        let Taken::Locked(found) = taken else { return false };
        match &self.holds {
            Holds::Given(seals) if *seals == found => {
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

    /// What came of [`Task::Adopt`] or [`Task::Prepare`]: the sentence says why its guest cannot go on.
    pub fn looked_for(&mut self, task: &Task, refusal: Option<String>) {
        self.wanted = Task::Nothing;
        match refusal {
            None => {
                self.is_unprepared = false;
                self.is_adopted |= *task == Task::Adopt;
            }
            Some(why) => self.holds = Holds::Lost(why),
        }
    }
}

#[cfg(test)]
mod tests;
