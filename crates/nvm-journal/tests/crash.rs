//! Power fails at every store, writing back and fence of random work, and what is recovered is what was committed.
//!
//! The judge is a model that knows nothing of regions: the content of each home block as it was last committed. The
//! medium is the simulated one, which loses any subset of words that no fence covers. A run follows from its seed; work
//! goes on from crashed images, so that recovery, taking over and formatting are crashed as well.
//!
//! Now and then the process is killed at a store, whatever it was about, and another one goes on with the region under the same
//! owner; what it does from there is crashed and judged as before.
//!
//! `AMBERLOG_NVM_POINTS` makes it longer (`make crash`), `AMBERLOG_SEED` changes the choices.

use nvm_journal::medium::{CrashImages, SimulatedMedium};
use nvm_journal::{ATTACHMENT_BYTES, Found, Journal, JournalOptions, Owner, forget};
use seeded_random::Random;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

const BLOCK_BYTES: usize = 512;
const HOMES: u64 = 28;
const REGION_BYTES: usize = 4 * 4096 + 44 * (BLOCK_BYTES + 20);
const POINTS_MIN: u64 = 2_000;

type Content = [u8; BLOCK_BYTES];

/// What recovery may find.
#[derive(Clone, Default)]
struct Expected {
    /// Each home block as it was last committed.
    state: BTreeMap<u64, Content>,
    /// What is at home.
    home: BTreeMap<u64, Content>,
    /// The last committed sequence number.
    sequence: u32,
    /// What the call that is going on may have made of some blocks.
    changes: BTreeMap<u64, Content>,
    /// All of the changes or none of them; otherwise each by itself.
    is_atomic: bool,
    /// What the call may have made of the sequence number.
    next_sequence: u32,
    /// Nobody owns the region, or may own it: what is in it does not count.
    is_free: bool,
    /// The changes may be there as a prepared transaction, on this condition; …
    condition: Option<Vec<u8>>,
    /// … and they are, and do not count by themselves.
    is_prepared: bool,
}

impl Expected {
    fn settle(&mut self) {
        self.state.append(&mut self.changes);
        self.sequence = self.next_sequence;
        self.is_decided();
    }

    /// Nothing is prepared any more.
    fn is_decided(&mut self) {
        (self.condition, self.is_prepared) = (None, false);
    }

    /// What is there with all of the changes.
    fn after(&self) -> BTreeMap<u64, Content> {
        let mut after = self.state.clone();
        after.extend(self.changes.iter().map(|(home, content)| (*home, *content)));
        after
    }

    /// What a prepared transaction is, it being there.
    fn judge_prepared(&self, image: &[u8], condition: &[u8]) -> Result<(), String> {
        if self.condition.as_deref() != Some(condition) {
            return Err("a transaction is prepared that is none, or on another condition".to_owned());
        }
        let found = Found::with_prepared(image).map_err(|error| error.to_string())?.ok_or("no region")?;
        found.verify(image).map_err(|error| error.to_string())?;
        let mut recovered = self.home.clone();
        for (home, header) in &found.latest {
            recovered.insert(*home, found.content(image, header).try_into().expect("a block"));
        }
        if found.sequence != self.next_sequence || recovered != self.after() {
            return Err("a prepared transaction is not all there".to_owned());
        }
        Ok(())
    }
}

struct Shared {
    expected: Expected,
    random: Random,
    /// Stores, write-backs and fences.
    steps: u64,
    /// Those of them at which power failed.
    points: u64,
    seed: u64,
    doing: &'static str,
    /// The crash image to go on with, after this step.
    crash_at: u64,
    crashed: Option<Vec<u8>>,
    /// The next kill, after this step: the medium, and what was to be found then.
    kill_at: u64,
    killed: Option<(SimulatedMedium, Expected)>,
    kills: u64,
    /// Most steps are looked at only up to this one, so that there is time for many kills.
    looked_at_until: u64,
}

fn lock(shared: &Arc<Mutex<Shared>>) -> MutexGuard<'_, Shared> {
    shared.lock().expect("no panic under this lock")
}

/// Recovers from an image and compares.
fn judge(image: &[u8], expected: &Expected) -> Result<(), String> {
    let mut recovered = expected.home.clone();
    let (mut sequence, mut is_prepared) = (None, false);
    match Found::read(image) {
        Ok(Some(found)) if found.owner.is_some() => {
            found.verify(image).map_err(|error| error.to_string())?;
            if let Some(prepared) = found.prepared.as_ref().filter(|_| !expected.is_free) {
                expected.judge_prepared(image, &prepared.condition)?;
                is_prepared = true;
            }
            for (home, header) in &found.latest {
                let content = Content::try_from(found.content(image, header)).map_err(|error| error.to_string())?;
                recovered.insert(*home, content);
            }
            sequence = Some(found.sequence);
            let owner = found.owner.as_ref().map_or(0, |owner| owner.mark_checksum as u8);
            if found.owner != Some(owner_with(owner)) {
                return Err("the owner's record is a mixture".to_owned());
            }
        }
        Ok(_) => {}
        Err(error) => return Err(format!("the region is refused: {error}")),
    }
    if sequence.is_none() && !expected.is_free {
        return Err("the region has lost its owner".to_owned());
    }
    if expected.is_prepared && !(is_prepared && recovered == expected.state && sequence == Some(expected.sequence)) {
        return Err("what is prepared is not, or counts already".to_owned());
    }
    let after = expected.after();
    if expected.is_atomic {
        let is_before = recovered == expected.state && sequence.is_none_or(|found| found == expected.sequence);
        let is_after = recovered == after && sequence.is_none_or(|found| found == expected.next_sequence);
        if is_before || is_after {
            return Ok(());
        }
    }
    for (home, content) in &recovered {
        let is_before = expected.state.get(home) == Some(content);
        let is_after = expected.changes.get(home) == Some(content);
        if !is_before && !is_after {
            return Err(format!("block {home} is neither its committed version nor the one on its way"));
        }
    }
    if expected.is_atomic {
        return Err("a part of a transaction is there".to_owned());
    }
    // A number that is too high is harmless; one that was used before is not.
    match sequence {
        Some(found) if found < expected.sequence || found > expected.next_sequence + 1 => {
            Err(format!("the sequence number is {found}, after {}", expected.sequence))
        }
        _ => Ok(()),
    }
}

fn point(shared: &Arc<Mutex<Shared>>, images: &CrashImages<'_>) {
    let mut shared = lock(shared);
    let shared = &mut *shared;
    shared.steps += 1;
    if shared.steps > shared.looked_at_until && !shared.steps.is_multiple_of(16) {
        return shared.kill(images);
    }
    shared.points += 1;
    for how in 0..4 {
        let random = &mut shared.random;
        let image = match how {
            0 => images.image(&mut |_| 0),
            1 => images.image(&mut |count| count - 1),
            2 => images.image(&mut |count| random.below(count as u64) as usize),
            // All but a few, or only a few.
            _ => {
                let few = random.below(2) == 0;
                images.image(&mut |count| if (random.below(6) == 0) == few { count - 1 } else { 0 })
            }
        };
        if let Err(problem) = judge(&image, &shared.expected) {
            panic!(
                "seed {}, step {}, in {}, image {how} ({} words unsettled): {problem}",
                shared.seed,
                shared.steps,
                shared.doing,
                images.unsettled_words()
            );
        }
        if shared.crashed.is_none() && shared.steps >= shared.crash_at && how == 2 {
            shared.crashed = Some(image);
        }
    }
    shared.kill(images);
}

impl Shared {
    fn kill(&mut self, images: &CrashImages<'_>) {
        if self.killed.is_none() && self.steps >= self.kill_at {
            self.killed = Some((images.after_a_kill(), self.expected.clone()));
            self.kill_at = u64::MAX;
        }
    }
}

struct Run {
    shared: Arc<Mutex<Shared>>,
    random: Random,
    journal: Journal<SimulatedMedium>,
    options: JournalOptions,
}

fn owner() -> Owner {
    owner_with(3)
}

fn owner_with(byte: u8) -> Owner {
    Owner {
        file_system: [1; 16],
        journal: [2; 16],
        home_start: 0,
        home_blocks: HOMES,
        mark_checksum: u32::from(byte),
        is_left: byte % 2 == 1,
        attachment: [byte; ATTACHMENT_BYTES],
    }
}

impl Run {
    /// Takes a region over as a crash left it: recovers, gives it back, claims it anew.
    fn take_over(shared: &Arc<Mutex<Shared>>, image: Vec<u8>, random: Random, options: JournalOptions) -> Self {
        {
            let mut shared = lock(shared);
            // What the crash left is what there is from here on: recovery brings it home.
            let mut state = shared.expected.home.clone();
            if let Ok(Some(found)) = Found::read(&image)
                && found.owner.is_some()
            {
                for (home, header) in &found.latest {
                    state.insert(*home, found.content(&image, header).try_into().expect("a block"));
                }
                shared.expected.sequence = found.sequence;
            }
            shared.expected.changes.clear();
            shared.expected.is_decided();
            shared.expected.state.clone_from(&state);
            shared.expected.home = state;
            shared.expected.next_sequence = shared.expected.sequence;
            shared.expected.is_free = true;
            shared.doing = "taking over";
            shared.crash_at = u64::MAX;
            shared.crashed = None;
            shared.kill_at = u64::MAX;
            shared.killed = None;
        }
        let mut medium = SimulatedMedium::from_image(image);
        let observed = Arc::clone(shared);
        medium.observe(Some(Box::new(move |images| point(&observed, images))));
        let is_region = Found::read(nvm_journal::medium::Medium::bytes(&medium)).expect("never damaged").is_some();
        if is_region {
            forget(&mut medium).expect("given back");
        }
        let sequence = lock(shared).expected.sequence;
        let journal =
            Journal::claim(medium, 0, BLOCK_BYTES as u32, &owner(), sequence, options).expect("a free region");
        lock(shared).expected.is_free = false;
        Run { shared: Arc::clone(shared), random, journal, options }
    }

    fn expected(&self) -> MutexGuard<'_, Shared> {
        lock(&self.shared)
    }

    /// A new content: often a few bytes from the last one.
    fn content(&mut self, home: u64) -> Content {
        let mut content = self.expected().expected.state[&home];
        match self.random.below(8) {
            0 => content.fill_with(|| self.random.bits() as u8),
            1 => {}
            count => {
                for _ in 0..count {
                    content[self.random.below(BLOCK_BYTES as u64) as usize] = self.random.bits() as u8;
                }
            }
        }
        content
    }

    fn home(&mut self) -> u64 {
        // Some blocks are written much more often than others.
        let limit = if self.random.below(2) == 0 { HOMES } else { 5 };
        self.random.below(limit)
    }

    fn some_homes(&mut self) -> Vec<u64> {
        let mut homes: Vec<u64> = self.journal.homes().collect();
        homes.sort_unstable();
        let part = 1 + self.random.below(4);
        homes.retain(|_| self.random.below(part) == 0);
        homes
    }

    /// If the process was killed in the midst of the last call, another one goes on from there. It may be killed as it does so.
    fn go_on_after_a_kill(&mut self) {
        loop {
            let killed = self.expected().killed.take();
            let Some((medium, expected)) = killed else { return };
            self.take_up(medium, expected);
        }
    }

    /// Sets the moment of the next kill: as often at the begin of a call as deep in a long one.
    fn kill_soon(&mut self) {
        let within = 1 << self.random.below(11);
        let soon = self.random.below(within);
        let mut shared = self.expected();
        shared.kill_at = shared.steps + soon;
    }

    fn take_up(&mut self, mut medium: SimulatedMedium, mut expected: Expected) {
        let image = nvm_journal::medium::Medium::bytes(&medium).to_vec();
        assert_eq!(judge(&image, &expected), Ok(()), "seed {}", self.expected().seed);
        let Ok(Some(found)) = Found::read(&image) else { return };
        if found.owner.is_none() || found.geometry.block_bytes as usize != BLOCK_BYTES {
            // Nobody goes on with what is nobody's.
            return;
        }
        {
            // Until the other one has made durable what it finds, power may leave what it may have left before the kill.
            let mut shared = self.expected();
            shared.expected.clone_from(&expected);
            shared.doing = "going on after a kill";
            shared.kills += 1;
            if shared.looked_at_until != u64::MAX {
                shared.looked_at_until = shared.steps + 30;
            }
        }
        if self.random.below(3) == 0 {
            self.kill_soon();
        }
        let observed = Arc::clone(&self.shared);
        medium.observe(Some(Box::new(move |images| point(&observed, images))));
        let (image, found) = match found.prepared {
            None => (image, found),
            Some(_) => {
                self.expected().expected.is_prepared = false;
                if self.random.below(2) == 0 {
                    nvm_journal::count_prepared(&mut medium).expect("the medium works");
                } else {
                    nvm_journal::withdraw_prepared(&mut medium).expect("the medium works");
                    self.expected().expected.changes.clear();
                }
                let image = nvm_journal::medium::Medium::bytes(&medium).to_vec();
                let found = Found::read(&image).expect("a region").expect("a region");
                assert!(found.prepared.is_none());
                (image, found)
            }
        };
        let taken = Journal::take_up(medium, self.options).expect("as a kill leaves it").expect("it has an owner");
        let before = std::mem::replace(&mut self.journal, taken);
        before.into_medium().observe(None);
        // From here on it is what the other one has found.
        expected.state.clone_from(&expected.home);
        for (home, header) in &found.latest {
            expected.state.insert(*home, found.content(&image, header).try_into().expect("a block"));
        }
        (expected.sequence, expected.next_sequence) = (found.sequence, found.sequence);
        expected.changes.clear();
        expected.is_decided();
        expected.is_free = false;
        expected.is_atomic = true;
        let mut shared = self.expected();
        shared.expected = expected;
        for (home, content) in &shared.expected.state {
            let latest = self.journal.latest(*home).unwrap_or(&shared.expected.home[home]);
            assert_eq!(latest, content, "seed {}, block {home}", shared.seed);
        }
        assert_eq!(self.journal.sequence(), shared.expected.sequence);
    }

    fn step(&mut self) {
        if self.random.below(4) != 0 {
            self.kill_soon();
        }
        self.any_step();
        self.go_on_after_a_kill();
        assert_eq!(self.journal.check(), Ok(()), "seed {}", self.expected().seed);
    }

    fn any_step(&mut self) {
        match self.random.below(21) {
            0..=11 => self.transaction(),
            12..=13 => {
                let homes = self.some_homes();
                self.checkpoint(homes);
            }
            14 => self.let_go(),
            15..=16 => {
                self.expected().doing = "garbage collection";
                self.journal.collect().expect("the medium works");
            }
            17 => self.restore(),
            18 => self.another_sequence(),
            19 => {
                self.expected().doing = "another record of the owner";
                let byte = self.random.bits() as u8;
                self.journal.set_owner(&owner_with(byte)).expect("the medium works");
            }
            _ => self.another_owner(),
        }
    }

    fn make_room(&mut self, headers: u32) {
        if self.journal.room() < headers {
            self.expected().doing = "garbage collection for room";
            self.journal.collect().expect("the medium works");
        }
        if self.journal.room() < headers {
            let all = self.journal.homes().collect();
            self.checkpoint(all);
            self.expected().doing = "garbage collection after a checkpoint";
            self.journal.collect().expect("the medium works");
        }
        assert!(self.journal.room() >= headers);
    }

    fn transaction(&mut self) {
        let mut writes = BTreeMap::new();
        let mut revokes = Vec::new();
        for _ in 0..1 + self.random.below(7) {
            let home = self.home();
            let content = self.content(home);
            writes.insert(home, content);
        }
        for _ in 0..self.random.below(6).saturating_sub(3) {
            revokes.push(self.home());
        }
        self.make_room(writes.len() as u32 + revokes.len() as u32);
        let is_abandoned = self.random.below(8) == 0;
        {
            let mut shared = self.expected();
            shared.doing = if is_abandoned { "a transaction that is abandoned" } else { "a commit" };
            let expected = &mut shared.expected;
            expected.is_atomic = true;
            expected.next_sequence = expected.sequence;
            if !is_abandoned {
                expected.next_sequence += 1;
                expected.changes = writes.clone();
                for home in &revokes {
                    let at_home = expected.home[home];
                    if expected.changes.contains_key(home) || self.journal.contains(*home) {
                        expected.changes.insert(*home, at_home);
                    }
                }
            }
        }
        for (home, content) in &writes {
            if self.random.below(5) == 0 {
                // Written twice in one transaction.
                let other = self.content(*home);
                self.journal.put(*home, &other).expect("there is room");
            }
            self.journal.put(*home, content).expect("there is room");
        }
        for home in &revokes {
            self.journal.revoke(*home).expect("there is room");
        }
        let is_withdrawn = !is_abandoned && self.random.below(3) == 0 && self.prepare(&revokes);
        if is_abandoned {
            self.journal.abandon();
        } else if is_withdrawn {
            {
                let mut shared = self.expected();
                shared.doing = "withdrawing";
                shared.expected.is_prepared = false;
            }
            self.journal.withdraw().expect("the medium works");
            let mut shared = self.expected();
            shared.expected.changes.clear();
            shared.expected.next_sequence = shared.expected.sequence;
            shared.expected.is_decided();
            return;
        } else {
            {
                let mut shared = self.expected();
                shared.doing = "publishing";
                shared.expected.is_prepared = false;
            }
            self.journal.publish().expect("the medium works");
        }
        self.expected().expected.settle();
        for home in writes.keys().filter(|home| !is_abandoned && !revokes.contains(home)) {
            assert_eq!(self.journal.latest(*home), Some(&writes[home][..]));
        }
        for home in revokes.iter().filter(|_| !is_abandoned) {
            assert!(!self.journal.contains(*home));
        }
    }

    /// The transaction that is begun counts on a condition, while this and that happens beside it. True when it is to be withdrawn.
    fn prepare(&mut self, revokes: &[u64]) -> bool {
        let mut condition = vec![0; self.random.below(3 * BLOCK_BYTES as u64) as usize];
        condition.fill_with(|| self.random.bits() as u8);
        if !self.journal.can_prepare(condition.len()) {
            return false;
        }
        {
            let mut shared = self.expected();
            shared.doing = "preparing";
            shared.expected.condition = Some(condition.clone());
        }
        self.journal.prepare(&condition).expect("there is room");
        assert!(self.journal.is_prepared() && self.journal.put(0, &[0; BLOCK_BYTES]).is_err());
        self.expected().expected.is_prepared = true;
        for _ in 0..self.random.below(3) {
            match self.random.below(2) {
                0 => {
                    let mut homes = self.some_homes();
                    // What a revoke leaves is what was at home when that was begun.
                    homes.retain(|home| !revokes.contains(home));
                    self.checkpoint(homes);
                }
                _ => {
                    self.expected().doing = "another record of the owner beside what is prepared";
                    let byte = self.random.bits() as u8;
                    self.journal.set_owner(&owner_with(byte)).expect("the medium works");
                }
            }
        }
        self.random.below(4) == 0
    }

    /// Some blocks go home, and then out of the region.
    fn checkpoint(&mut self, homes: Vec<u64>) {
        let mut shared = self.expected();
        shared.doing = "a checkpoint";
        for home in &homes {
            let content = Content::try_from(self.journal.latest(*home).expect("a version")).expect("a block");
            assert_eq!(shared.expected.state[home], content);
            shared.expected.home.insert(*home, content);
        }
        drop(shared);
        self.journal.release(homes).expect("the medium works");
    }

    /// Some blocks are not wanted any more: what is at home is what there is. Never an older version.
    fn let_go(&mut self) {
        let homes = self.some_homes();
        {
            let mut shared = self.expected();
            shared.doing = "letting go";
            let expected = &mut shared.expected;
            expected.is_atomic = false;
            expected.next_sequence = expected.sequence;
            expected.changes = homes.iter().map(|home| (*home, expected.home[home])).collect();
        }
        self.journal.release(homes).expect("the medium works");
        self.expected().expected.settle();
    }

    fn restore(&mut self) {
        let home = self.home();
        if self.journal.contains(home) {
            return;
        }
        self.make_room(1);
        let content = self.content(home);
        {
            let mut shared = self.expected();
            shared.doing = "holding a block again";
            let expected = &mut shared.expected;
            expected.is_atomic = false;
            expected.next_sequence = expected.sequence;
            expected.changes = BTreeMap::from([(home, content)]);
        }
        self.journal.restore(home, &content).expect("there is room");
        self.expected().expected.settle();
        assert_eq!(self.journal.sequence(), self.expected().expected.sequence);
    }

    fn another_sequence(&mut self) {
        let sequence = self.journal.sequence() + self.random.below(3) as u32;
        {
            let mut shared = self.expected();
            shared.doing = "another sequence number";
            shared.expected.is_atomic = true;
            shared.expected.next_sequence = sequence;
        }
        self.journal.set_sequence(sequence).expect("the medium works");
        self.expected().expected.settle();
    }

    fn another_owner(&mut self) {
        let all = self.journal.homes().collect();
        self.checkpoint(all);
        self.expected().doing = "another owner";
        self.expected().expected.is_free = true;
        let sequence = self.journal.sequence();
        let medium = std::mem::replace(
            &mut self.journal,
            Journal::claim(SimulatedMedium::new(REGION_BYTES), 0, BLOCK_BYTES as u32, &owner(), 0, self.options)
                .expect("a stand-in"),
        )
        .give_back()
        .expect("given back")
        .expect("the medium works");
        // Now and then for a file system with other blocks in between: the region is formatted anew.
        let medium = if self.random.below(4) == 0 {
            let other = Journal::claim(medium, 0, 1024, &owner(), sequence, self.options).expect("free");
            other.give_back().expect("given back").expect("the medium works")
        } else {
            medium
        };
        self.journal = Journal::claim(medium, 0, BLOCK_BYTES as u32, &owner(), sequence, self.options).expect("free");
        self.expected().expected.is_free = false;
    }
}

/// One run: some episodes of work, each beginning with what the crash of the one before left. In every second run power fails more
/// seldom, and kills are many.
fn run(seed: u64, episodes: u32) -> (u64, u64) {
    let has_many_kills = seed.is_multiple_of(2);
    let mut random = Random::new(seed);
    let mut home = BTreeMap::new();
    for block in 0..HOMES {
        let mut content = [0; BLOCK_BYTES];
        content.fill_with(|| random.bits() as u8);
        home.insert(block, content);
    }
    let options = JournalOptions { byte_level: random.below(4) != 0, checksums: random.below(4) != 0 };
    let expected = Expected { state: home.clone(), home, sequence: 10, next_sequence: 10, ..Expected::default() };
    let shared = Arc::new(Mutex::new(Shared {
        expected,
        random: Random::new(seed ^ 0x6372_6173_6800),
        steps: 0,
        points: 0,
        seed,
        doing: "",
        crash_at: u64::MAX,
        crashed: None,
        kill_at: u64::MAX,
        killed: None,
        kills: 0,
        looked_at_until: if has_many_kills { 0 } else { u64::MAX },
    }));
    let mut image = vec![0; REGION_BYTES];
    for _ in 0..episodes {
        let next = random.bits();
        let mut run = Run::take_over(&shared, image, Random::new(next), options);
        let within = if has_many_kills { 40_000 } else { 900 };
        let crash_at = lock(&shared).steps + random.below(within);
        lock(&shared).crash_at = crash_at;
        loop {
            run.step();
            let mut shared = lock(&shared);
            if let Some(crashed) = shared.crashed.take() {
                image = crashed;
                break;
            }
        }
        // Whatever the call that was cut off would have settled: the model goes by what the image says.
        run.journal.into_medium().observe(None);
        let mut shared = lock(&shared);
        shared.doing = "the end of an episode";
    }
    let shared = lock(&shared);
    (shared.points, shared.kills)
}

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().unwrap_or_else(|_| panic!("{name} is a number")))
}

#[test]
fn power_may_fail_at_every_store_write_back_and_fence() {
    let wanted = number("AMBERLOG_NVM_POINTS", 100_000).max(POINTS_MIN);
    let mut seed = number("AMBERLOG_SEED", 1);
    let started = Instant::now();
    let (mut points, mut kills) = (0, 0);
    while points < wanted {
        let (more, more_kills) = run(seed, 6);
        points += more;
        kills += more_kills;
        seed += 1;
    }
    println!(
        "{points} crash points, 4 crash images each, {kills} kills, {:.0} points/s (seeds to {})",
        points as f64 / started.elapsed().as_secs_f64(),
        seed - 1
    );
    assert!(points >= POINTS_MIN && kills >= points / 300);
}
