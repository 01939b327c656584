//! A VM that can be moved to another host while its guest runs (experimental, off unless the configuration asks for it).
//!
//! When the VMM begins to move its guest, every journal is brought to storage, and stays there. When it has stopped the guest, whatever
//! was left goes to storage, the images are flushed, sealed ([`image_file::Seal`]) and given up, in this order, and only then the VMM is
//! answered. The daemon at the other end has waited for the locks; it takes them, sees by the seal that this guest left the image so, and
//! takes the logs as they are on storage. A guest whose migration has failed comes back in the same way.
//!
//! What must never happen: that two hosts write to an image, or that a guest is served whose memory does not fit it. [`state`] keeps that.
//! Failure story: what cannot be brought to storage keeps the images here, locked, and says so; the guest at the other end waits, and
//! nothing is lost. Whoever has neither the locks nor the proof does nothing, and says what to do.

mod state;
mod users;
mod waiting;
mod wishes;

use super::earlier::{self, BroughtHome, LeftMeanwhile};
use super::{Attached, VmOptions};
use crate::worker::Line;
use anyhow::Context;
use block_device::{Begin, DeviceHandle, Gate, Image};
use block_route::{Route, Start};
use image_file::Seal;
use placement::{Change, Journals, PlacementKind};
use rustix::process::{Uid, geteuid};
use serde_json::{Value, json};
use state::{Holds, Pause, State, Taken, Task};
use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use supervision::{Kept, Said};
use users::{User, Users};
use waiting::Waiting;
use wishes::{Wishes, Wishing};

/// Kept while the images are not to be touched: the seals with which they were given up, or that no guest has begun.
const NOT_OURS: &str = "images not ours";
/// How the keys begin that are kept of disks whose driver has begun.
const BEGUN: &str = "begun ";
/// And those that say where the rings of a disk were stopped, and whether these are all.
const STOPPED: &str = "stopped ";
/// Kept of a guest that was left: the names of its disks of which nothing was heard since.
const UNHEARD_OF: &str = "unheard of";
/// Kept while the images are owed to a guest that was moved, and waits for them.
const OWES_GIVING_UP: &str = "owes giving up";
/// Kept of journals that are on storage for as long as their guest is being moved: where they go back to.
const WISHES: &str = "journals that go back";
/// How often a lock that somebody else has is tried: a guest stands still meanwhile.
const LOCK_PAUSE: Duration = Duration::from_millis(3);
/// How long the VMM of a guest that was left may take to come with all of its disks: it tries once a second.
const COMING_PATIENCE: Duration = Duration::from_secs(60);
/// How long one attempt to bring the journals to storage takes, at most, and the pause between two.
const HAND_OVER_PATIENCE: Duration = Duration::from_secs(5);
const HAND_OVER_PAUSE: Duration = Duration::from_millis(500);
/// How long a stopped guest's journals may take to get there: its VMM does nothing else meanwhile.
const LAST_PATIENCE: Duration = Duration::from_secs(20);
/// The same when that is tried again, where nobody stands still but a guest that goes on here after all, and the pause between two tries.
const AGAIN_PATIENCE: Duration = Duration::from_secs(1);
const AGAIN_PAUSE: Duration = Duration::from_millis(500);

/// Who uses them ([`Migration::using`]).
const CHANGES_IMAGES: &str = "somebody makes an image larger, or has disks come or go, and waits for storage";

/// Why the guest of a VM that is made so cannot be moved; nothing if it can.
pub fn why_not(options: &VmOptions) -> Option<String> {
    if !options.can_migrate {
        return Some("it is not asked for ([migration] experimental = true in the configuration)".to_owned());
    }
    if let Some(disk) = options.journal_disks.first() {
        return Some(format!("it has a journal on a device of its own ({})", disk.path.display()));
    }
    for disk in &options.disks {
        let path = disk.path.display();
        if matches!(disk.placement, PlacementKind::Discard | PlacementKind::Nvm | PlacementKind::Remote) {
            return Some(format!("{path} has placement {}", disk.placement.name()));
        }
        if disk.model.is_some() || disk.log_writes.is_some() {
            return Some(format!("{path} is modelled or written down (model=, log-writes=)"));
        }
        match std::fs::metadata(&disk.path) {
            // Who opens it says what is wrong.
            Err(_) => {}
            Ok(metadata) if metadata.is_file() => {}
            Ok(_) => {
                return Some(format!(
                    "{path} is no file: nobody could tell whether another host has written to it meanwhile"
                ));
            }
        }
    }
    None
}

/// Why an image cannot be sealed for another host by this user, if so: who seals it sets its times, which is for its owner.
fn why_unsealed(image: &Image, own: Uid) -> Option<String> {
    let owner = image.file().metadata().ok()?.uid();
    let path = image.path().display();
    (!image.is_read_only() && !own.is_root() && owner != own.as_raw()).then(|| {
        format!(
            "{path} belongs to another user, and only its owner, or root, can seal it for another host: chown {} {path}",
            own.as_raw()
        )
    })
}

/// See the module.
pub struct Migration {
    name: String,
    line: Arc<Line>,
    journals: Arc<Journals>,
    images: Vec<Arc<Image>>,
    /// Where journals go back to.
    wishes: Wishes,
    /// Who changes the images meanwhile.
    users: Users,
    /// Its disks, for who looks for what others have left for them; images that are raw are not asked whether they are.
    attached: Vec<Attached>,
    inner: Mutex<Inner>,
    changed: Condvar,
}

struct Inner {
    state: State,
    handles: Vec<DeviceHandle<dyn Route>>,
    /// Who waits until the images are sealed, or given up.
    pausing: Option<(Pause, SyncSender<()>)>,
    /// Its guest is not moved any more: its journals may go where they were.
    is_over: bool,
    /// Since when an earlier daemon's guest may come, where it was left.
    left_since: Option<Instant>,
    /// Every journal was seen on storage since its guest is being moved.
    is_handed_over: bool,
    /// Why something of a move could not be done, as it was last.
    trouble: Option<String>,
    /// What a guest waits for that has come.
    waiting: Waiting,
    is_quitting: bool,
}

/// A guest for which images are prepared, that may have to be given up for a moment and taken again.
struct Coming {
    left: LeftMeanwhile,
    brought: BroughtHome,
}

impl Inner {
    /// Why something is not done, if so. A guest that waits says it first: what a move before it could not do is past.
    fn why_not_done(&self) -> Option<&str> {
        self.waiting.sentence().or(self.trouble.as_deref())
    }

    /// What is told of a guest that waits counts as long as one does.
    fn waits_no_more(&mut self) {
        if !self.state.is_waited_for() {
            self.waiting.is_over();
        }
    }

    /// The disks with which the VMM of a guest that was left has not come in all this time: they were unplugged.
    fn those_away(&mut self, now: Instant) -> Vec<usize> {
        match self.left_since {
            Some(since) if now.saturating_duration_since(since) > COMING_PATIENCE => self.state.has_not_come(),
            _ => Vec::new(),
        }
    }
}

impl std::fmt::Debug for Migration {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Migration").field("name", &self.name).finish_non_exhaustive()
    }
}

/// What a VM's images are when it is prepared or gone on with.
pub enum Beginning {
    /// Locked, for a guest that an earlier daemon has left.
    Ours,
    /// Anybody's, until a guest begins here.
    Awaited,
    /// As a worker before had them.
    GoesOn(KeptMigration),
}

/// What a worker has kept of it.
pub struct KeptMigration {
    /// Nothing where they were locked; the seals with which they were given up, if they were.
    not_ours: Option<Option<Vec<Option<Seal>>>>,
    begun: Vec<String>,
    unheard_of: Vec<String>,
    stopped: BTreeMap<String, Stopped>,
    owes_giving_up: bool,
    wishes: Option<String>,
}

/// Rings that are stopped, with their positions, and whether those are all of a disk.
type Stopped = (Vec<(u16, u16)>, bool);

impl KeptMigration {
    /// Of what is kept.
    ///
    /// # Errors
    /// When that is not understood.
    pub fn of(kept: &Kept) -> anyhow::Result<Self> {
        let understood = |text: &str| -> anyhow::Result<Option<Vec<Option<Seal>>>> {
            let seals: Option<Vec<Option<(u64, u32)>>> =
                serde_json::from_str(text).context("what is kept of images that were given up")?;
            let seal = |(seconds, nanoseconds)| Seal { seconds, nanoseconds };
            Ok(seals.map(|seals| seals.into_iter().map(|known| known.map(seal)).collect()))
        };
        let not_ours = kept.data(NOT_OURS).map(understood).transpose()?;
        let mut stopped = BTreeMap::new();
        for (name, text) in kept.all(STOPPED) {
            stopped.insert(name, serde_json::from_str(&text).context("what is kept of rings that were stopped")?);
        }
        let begun = kept.all(BEGUN).into_iter().map(|(name, _)| name).collect();
        let unheard_of = kept.data(UNHEARD_OF).map(serde_json::from_str).transpose();
        Ok(KeptMigration {
            not_ours,
            begun,
            unheard_of: unheard_of.context("what is kept of disks that may have been unplugged")?.unwrap_or_default(),
            stopped,
            owes_giving_up: kept.data(OWES_GIVING_UP).is_some(),
            wishes: kept.data(WISHES).map(str::to_owned),
        })
    }

    /// Whether the images are not to be locked.
    pub fn are_not_ours(&self) -> bool {
        self.not_ours.is_some()
    }

    /// Whether nothing is known of what is on them.
    pub fn are_awaited(&self) -> bool {
        self.not_ours == Some(None)
    }
}

/// What stands on images that can be written.
fn seals_on(images: &[Arc<Image>]) -> std::io::Result<Vec<Option<Seal>>> {
    let found = |image: &Arc<Image>| if image.read_only() { Ok(None) } else { Seal::on(image.file()).map(Some) };
    images.iter().map(found).collect()
}

impl Migration {
    /// Of a VM whose images are so.
    ///
    /// # Errors
    /// When an image cannot be sealed or examined.
    pub fn new(
        line: &Arc<Line>,
        journals: &Arc<Journals>,
        images: &[Arc<Image>],
        options: &VmOptions,
        beginning: Beginning,
    ) -> anyhow::Result<Arc<Self>> {
        let mut wishes = Wishes::default();
        let mut left_since = None;
        let state = match beginning {
            Beginning::Ours => {
                let mut state = State::new(images.len(), Holds::Ours);
                state.note_found(seals_on(images)?);
                state
            }
            Beginning::Awaited => State::new(images.len(), Holds::Awaited),
            Beginning::GoesOn(kept) => {
                if let Some(text) = &kept.wishes {
                    wishes = Wishes::kept(text).context("what is kept of journals that go back")?;
                }
                let names = || journals.disks().iter().map(|disk| &disk.options.name);
                let begun: Vec<bool> = names().map(|name| kept.begun.contains(name)).collect();
                let unheard_of: Vec<bool> = names().map(|name| kept.unheard_of.contains(name)).collect();
                let holds = match kept.not_ours {
                    None => Holds::Ours,
                    Some(None) => Holds::Awaited,
                    Some(Some(seals)) => Holds::Given(seals),
                };
                if holds != Holds::Ours {
                    // The worker may have died before, or after it had locked them and before it had said so.
                    images.iter().for_each(|image| image.unlock());
                }
                let mut state = State::new(images.len(), holds);
                state.note_found(seals_on(images)?);
                state.goes_on(&begun);
                state.goes_on_without(&unheard_of);
                // Its VMM comes again with all that it has.
                left_since = unheard_of.contains(&true).then(Instant::now);
                if kept.owes_giving_up {
                    state.owed_giving_up();
                }
                for (index, disk) in journals.disks().iter().enumerate() {
                    if let Some((positions, all)) = kept.stopped.get(&disk.options.name) {
                        state.was_stopped(index, positions.clone(), *all);
                    }
                }
                state
            }
        };
        if *state.holds() == Holds::Awaited {
            line.keep(NOT_OURS, "null", None)?;
        }
        Ok(Arc::new(Migration {
            name: options.name.clone(),
            line: Arc::clone(line),
            journals: Arc::clone(journals),
            images: images.to_vec(),
            wishes,
            users: Users::default(),
            attached: options.attach()?,
            inner: Mutex::new(Inner {
                state,
                handles: Vec::new(),
                pausing: None,
                is_over: false,
                left_since,
                is_handed_over: false,
                trouble: None,
                waiting: Waiting::default(),
                is_quitting: false,
            }),
            changed: Condvar::new(),
        }))
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().expect("no panic under this lock")
    }

    /// A guest of an earlier daemon goes on, whose logs were taken, and which has used these of its disks. Nobody would ever stop one that
    /// it does not have.
    pub fn was_left(&self, used: &[bool]) {
        {
            let mut inner = self.lock();
            inner.state.was_left(used);
            inner.left_since = Some(Instant::now());
        }
        // The next worker finds a guest that has begun, and no seal; and has to know before that for which disks nobody may come.
        self.keep_unheard_of();
        for disk in self.journals.disks().iter().zip(used).filter_map(|(disk, is_used)| is_used.then_some(disk)) {
            let _ = self.line.keep(&format!("{BEGUN}{}", disk.options.name), "", None);
        }
        self.line.settle();
    }

    /// Whether a driver of this VMM has used a disk.
    pub fn has_begun(&self, disk: usize) -> bool {
        self.lock().state.has_begun(disk)
    }

    /// Whether its guest is where it is for good: what leaves it to another daemon lets go of what a move needs.
    ///
    /// # Errors
    /// When it is being moved, or its images are owed to where it went.
    pub fn check_stays(&self) -> anyhow::Result<()> {
        let inner = self.lock();
        anyhow::ensure!(
            !inner.state.is_moving() && !inner.state.owes_giving_up(),
            "its guest is being moved: wait until it has gone, or cancel the migration"
        );
        Ok(())
    }

    /// Whether what is owed to its images may be brought home: its VMM is gone.
    pub fn may_recover(&self) -> bool {
        self.lock().state.may_recover()
    }

    /// Whether its images may be worked on.
    ///
    /// # Errors
    /// Why not.
    pub fn check_ours(&self) -> anyhow::Result<()> {
        match self.lock().state.holds() {
            Holds::Ours => Ok(()),
            Holds::Given(_) => anyhow::bail!(
                "vm {}: its guest was moved to another host, or saved to a file in that way, and its images were given up with it",
                self.name
            ),
            Holds::Awaited => {
                anyhow::bail!(
                    "vm {}: no guest of it has begun here, and its images are anybody's until then",
                    self.name
                )
            }
            Holds::Lost(why) => anyhow::bail!("vm {}: {why}", self.name),
        }
    }

    /// What `status` says of it.
    pub fn status(&self) -> Value {
        let inner = self.lock();
        let images = match inner.state.holds() {
            Holds::Ours => "ours",
            Holds::Given(_) => "given-up",
            Holds::Awaited => "awaited",
            Holds::Lost(_) => "lost",
        };
        let why_not = self.distrusted().or_else(|| self.images.iter().find_map(|image| why_unsealed(image, geteuid())));
        let on_storage = self.journals.check_left().is_ok();
        json!({
            "possible": why_not.is_none(),
            "why_not": why_not,
            "images": images,
            "under_way": inner.state.is_moving(),
            "journals_on_storage": on_storage,
            "trouble": inner.why_not_done(),
        })
    }

    fn distrusted(&self) -> Option<String> {
        let log = self.journals.logs().into_iter().find(|log| log.is_distrusted())?;
        let name = &self.journals.disk(log.home_disk()).options.name;
        Some(format!("the journal of disk {name} is not what it seemed, which the next daemon would not know"))
    }

    /// The gate of a disk.
    pub fn gate(self: &Arc<Self>, disk: usize) -> Arc<dyn Gate> {
        Arc::new(DiskGate { migration: Arc::clone(self), disk })
    }

    /// Begins to work: in a thread of its own, until what is given is dropped.
    ///
    /// # Errors
    /// When the kernel has no thread.
    pub fn start(self: &Arc<Self>, handles: Vec<DeviceHandle<dyn Route>>) -> std::io::Result<Working> {
        self.lock().handles = handles;
        let migration = Arc::clone(self);
        let thread = std::thread::Builder::new().name("migration".to_owned());
        let thread = log_context::spawn(thread, move || migration.work())?;
        Ok(Working { migration: Arc::clone(self), thread: Some(thread) })
    }

    fn work(&self) {
        let mut next_try: Option<Instant> = None;
        let mut coming: Option<Coming> = None;
        let mut next_look: Option<Instant> = None;
        let mut inner = self.lock();
        loop {
            if inner.is_quitting {
                return;
            }
            if let Some((pause, done)) = inner.pausing.take() {
                drop(inner);
                self.pause(pause);
                let _ = done.send(());
                inner = self.lock();
                continue;
            }
            if std::mem::take(&mut inner.is_over) {
                drop(inner);
                self.go_back();
                inner = self.lock();
                continue;
            }
            let pause = match inner.state.task() {
                Task::Take | Task::Prepare if next_look.is_some_and(|at| Instant::now() < at) => Some(LOCK_PAUSE),
                Task::Take => {
                    drop(inner);
                    if !self.take() {
                        self.note_busy(Instant::now());
                    }
                    inner = self.lock();
                    Some(LOCK_PAUSE)
                }
                task @ (Task::Adopt | Task::Prepare) => {
                    // What was looked at for another guest may be something else by now.
                    coming = coming.filter(|_| inner.state.was_let_go());
                    drop(inner);
                    let looked = match task {
                        Task::Adopt => self.adopt().map(|()| true),
                        _ => self.prepare(coming.get_or_insert_with(|| self.coming())),
                    };
                    let refusal = match looked {
                        Ok(true) => {
                            self.note_ours();
                            None
                        }
                        // They are to be taken again, or looked at again.
                        Ok(false) => {
                            inner = self.lock();
                            let is_waiting = inner.waiting.sentence().is_some();
                            next_look = is_waiting.then(|| Instant::now() + AGAIN_PAUSE);
                            continue;
                        }
                        Err(error) => {
                            let why = format!("{error:#}");
                            log::error!("vm {}: its guest cannot go on here: {why}", self.name);
                            Some(why)
                        }
                    };
                    inner = self.lock();
                    inner.waiting.is_over();
                    if !inner.state.looked_for(&task, refusal) {
                        drop(inner);
                        // Whoever follows this process looks for himself.
                        let _ = self.line.keep(NOT_OURS, "null", None);
                        self.line.settle();
                        self.images.iter().for_each(|image| image.unlock());
                        inner = self.lock();
                    }
                    continue;
                }
                Task::HandOver if !inner.is_handed_over => {
                    drop(inner);
                    let outcome = self.hand_over(HAND_OVER_PATIENCE);
                    inner = self.lock();
                    match outcome {
                        Ok(()) => {
                            inner.is_handed_over = true;
                            if !inner.state.owes_giving_up() {
                                inner.trouble = None;
                            }
                            log::info!("vm {}: its guest is being moved; every journal is on storage", self.name);
                        }
                        Err(error) => {
                            let sentence = format!(
                                "its guest is being moved, and a journal cannot go to storage, so the other host will not get the \
                                 images: {error:#}"
                            );
                            if inner.trouble.as_ref() != Some(&sentence) {
                                log::error!("vm {}: {sentence}", self.name);
                            }
                            inner.trouble = Some(sentence);
                        }
                    }
                    Some(HAND_OVER_PAUSE)
                }
                Task::GiveUp => match next_try.and_then(|at| at.checked_duration_since(Instant::now())) {
                    Some(left) if !left.is_zero() => Some(left),
                    _ => {
                        inner.state.gives_up_again();
                        drop(inner);
                        self.give_up_again();
                        next_try = Some(Instant::now() + AGAIN_PAUSE);
                        inner = self.lock();
                        continue;
                    }
                },
                _ => None,
            };
            if inner.pausing.is_some() || inner.is_over {
                continue;
            }
            inner = match pause {
                Some(pause) => self.changed.wait_timeout(inner, pause).expect("no panic under this lock").0,
                None => self.changed.wait(inner).expect("no panic under this lock"),
            };
        }
    }

    /// Somebody else has one of its images, for which a guest waits.
    fn note_busy(&self, now: Instant) {
        let mut inner = self.lock();
        // It may have gone meanwhile.
        let said = if inner.state.is_waited_for() { inner.waiting.is_busy(now) } else { None };
        drop(inner);
        if let Some(sentence) = said {
            log::warn!("vm {}: {sentence}", self.name);
        }
    }

    /// Its images cannot be prepared yet for a guest that waits.
    fn note_waiting(&self, sentence: &str) {
        let mut inner = self.lock();
        let is_said = inner.state.is_waited_for() && inner.waiting.cannot_prepare(sentence);
        drop(inner);
        if is_said {
            log::warn!("vm {}: {sentence}", self.name);
        }
    }

    /// Brings every journal to storage, where it stays.
    fn hand_over(&self, patience: Duration) -> anyhow::Result<()> {
        if let Some(why) = self.distrusted() {
            anyhow::bail!("{why}");
        }
        let deadline = Instant::now() + patience;
        let handles = self.lock().handles.clone();
        for log in self.journals.logs() {
            {
                let mut wishing = self.wishes.lock();
                let name = &self.journals.disk(log.home_disk()).options.name;
                wishing.moves(name, log.place().home_start, log.wanted());
                self.keep_wishes(&wishing);
                if self.journals.change_placement(log.index(), PlacementKind::Storage)? != Change::HandOver {
                    continue;
                }
            }
            let (number, disk) = (log.index(), log.journal_disk());
            while !handles[disk].with_route(move |route, plan| route.hand_over(number, plan))?? {
                if Instant::now() > deadline {
                    handles[disk].with_route(move |route, plan| route.give_up_hand_over(number, plan))?;
                    anyhow::bail!("disk {} has not been quiet for a moment", self.journals.disk(disk).options.name);
                }
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        Ok(self.journals.check_left()?)
    }

    /// Its guest stays: what it mounts next is held again.
    fn go_back(&self) {
        {
            let mut inner = self.lock();
            inner.is_handed_over = false;
            // It was moved, and waits for what is not given up yet.
            if inner.state.owes_giving_up() {
                return;
            }
            inner.trouble = None;
            if *inner.state.holds() != Holds::Ours {
                return;
            }
        }
        let mut wishing = self.wishes.lock();
        for log in self.journals.logs() {
            let name = &self.journals.disk(log.home_disk()).options.name;
            let Some(wish) = wishing.take_back(name, log.place().home_start) else { continue };
            if log.wanted() == PlacementKind::Storage
                && let Err(error) = self.journals.change_placement(log.index(), wish)
            {
                log::warn!("vm {}: {error}", self.name);
            }
        }
        self.keep_wishes(&wishing);
    }

    fn keep_wishes(&self, wishing: &Wishing<'_>) {
        let _ = self.line.keep(WISHES, &wishing.text(), None);
    }

    /// Somebody wishes the journals of a disk to be somewhere, which is done here: that is not undone when its guest stays after all.
    pub fn wish<T>(&self, disk: usize, change: impl FnOnce() -> T) -> T {
        let mut wishing = self.wishes.lock();
        let outcome = change();
        if wishing.wished(&self.journals.disk(disk).options.name) {
            self.keep_wishes(&wishing);
        }
        outcome
    }

    /// For whoever changes the images by an operator's wish: they stay as they are, and here, until what is given is dropped.
    ///
    /// # Errors
    /// When they are not this process's, or about to be given up.
    pub fn using(&self) -> anyhow::Result<User<'_>> {
        let user = self.users.enter();
        self.check_ours()?;
        user.with_context(|| {
            format!("vm {}: its guest is stopped at this moment, to be moved or saved; ask again", self.name)
        })
    }

    /// The guest is stopped, and its VMM waits for this.
    fn pause(&self, pause: Pause) {
        let began = Instant::now();
        let closed = self.users.close(LAST_PATIENCE);
        let outcome = match pause {
            _ if closed.is_none() => Err(anyhow::anyhow!(CHANGES_IMAGES)),
            Pause::GiveUp => self.hand_over(LAST_PATIENCE).and_then(|()| self.seal(LAST_PATIENCE)),
            // One that has something here stays so: its VMM saves it to a file, perhaps, and will hear of it when it is restored.
            _ if self.journals.check_left().is_err() || self.distrusted().is_some() => {
                self.lock().state.paused();
                return;
            }
            _ => self.seal(LAST_PATIENCE),
        };
        match outcome.and_then(|seals| if pause == Pause::GiveUp { self.give_up(seals) } else { Ok(()) }) {
            Ok(()) if pause == Pause::GiveUp => log::info!(
                "vm {}: its guest is stopped, and everything of it is on storage; its images are given up, after {:.1} ms",
                self.name,
                began.elapsed().as_secs_f64() * 1e3
            ),
            Ok(()) => {}
            Err(error) if pause == Pause::GiveUp => {
                let sentence = not_given_up(&error);
                log::error!("vm {}: {sentence}", self.name);
                // Whoever follows this process goes on trying.
                let _ = self.line.keep(OWES_GIVING_UP, "", None);
                self.line.settle();
                let mut inner = self.lock();
                inner.trouble = Some(sentence);
                inner.state.could_not_give_up();
                return;
            }
            Err(error) => log::warn!(
                "vm {}: its images cannot be sealed, so that a guest that is saved now cannot be restored: {error:#}",
                self.name
            ),
        }
        self.lock().state.paused();
    }

    /// Its guest waits at the other end for what could not be given up when it was stopped.
    fn give_up_again(&self) {
        let closed = self.users.close(AGAIN_PATIENCE).context(CHANGES_IMAGES);
        let outcome = closed.and_then(|_closed| {
            self.hand_over(AGAIN_PATIENCE)?;
            self.give_up(self.seal(AGAIN_PATIENCE)?)
        });
        let mut inner = self.lock();
        match outcome {
            Ok(()) => {
                inner.trouble = None;
                inner.state.paused();
                drop(inner);
                self.owes_nothing();
                log::info!("vm {}: everything of its guest is on storage by now; its images are given up", self.name);
            }
            Err(error) => {
                let sentence = not_given_up(&error);
                if inner.trouble.as_ref() != Some(&sentence) {
                    log::error!("vm {}: {sentence}", self.name);
                }
                inner.trouble = Some(sentence);
                inner.state.could_not_give_up();
            }
        }
    }

    fn owes_nothing(&self) {
        let _ = self.line.say(&Said::Forget { key: OWES_GIVING_UP.to_owned() }, &[]);
        self.line.settle();
    }

    /// Its VMM is gone, nothing of it is under way, and what could not be given up may be given up still: before anything is brought home.
    pub fn give_up_at_last(&self) {
        if !self.lock().state.owes_giving_up() {
            return;
        }
        let outcome = self.seal(Duration::ZERO).and_then(|seals| self.give_up(seals));
        match outcome {
            Ok(()) => log::info!("vm {}: its images are given up at last to its guest, which was moved", self.name),
            Err(error) => log::error!(
                "vm {}: its guest was moved, and its images could not be given up before its VMM ended ({error:#}): it cannot go on at the \
                 other end, and is to be started anew",
                self.name
            ),
        }
    }

    /// Makes all durable that was written, and seals the images.
    fn seal(&self, patience: Duration) -> anyhow::Result<Vec<Option<Seal>>> {
        let (positions, handles) = {
            let inner = self.lock();
            // A disk that no driver has used here is as it was.
            let positions = inner.state.positions().into_iter().enumerate();
            let positions = positions.map(|(disk, at)| inner.state.has_begun(disk).then_some(at)).collect::<Vec<_>>();
            (positions, inner.handles.clone())
        };
        // What amberlog writes by itself, no ring waits for.
        let deadline = Instant::now() + patience;
        for handle in &handles {
            while !handle.is_idle()? {
                anyhow::ensure!(Instant::now() < deadline, "storage has not answered all that was asked of it");
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        self.journals.check_left()?;
        self.journals.flush_images()?;
        // Whoever serves it next does not know, and storage does not say so again.
        if let Some(disk) = (0..self.images.len()).find(|disk| self.journals.has_untold_failure(*disk)) {
            let name = &self.journals.disk(disk).options.name;
            anyhow::bail!(
                "a flush of disk {name} has failed, what was written last may be lost, and its guest has to hear of it here"
            );
        }
        let seals = self.images.iter().zip(&positions).map(|(image, positions)| {
            if image.read_only() {
                return Ok(None);
            }
            let Some(positions) = positions else { return Ok(Some(Seal::on(image.file())?)) };
            let sealed = Seal::put_on(image.file(), positions);
            sealed
                .map(Some)
                .with_context(|| format!("sealing {} (amberlog has to be its owner)", image.path().display()))
        });
        seals.collect()
    }

    /// From here on they are anybody's: noted first, so that whoever follows this process leaves them alone.
    fn give_up(&self, seals: Vec<Option<Seal>>) -> anyhow::Result<()> {
        let text: Vec<Option<(u64, u32)>> =
            seals.iter().map(|seal| seal.map(|seal| (seal.seconds, seal.nanoseconds))).collect();
        self.line.keep(NOT_OURS, &serde_json::to_string(&text)?, None)?;
        self.line.settle();
        self.lock().state.given(seals);
        self.images.iter().for_each(|image| image.unlock());
        Ok(())
    }

    /// Takes the images, if nobody has them.
    fn take(&self) -> bool {
        let mut locked = Vec::new();
        for image in &self.images {
            match image.try_lock() {
                Ok(true) => locked.push(image),
                Ok(false) => break,
                Err(error) => {
                    log::debug!("locking an image: {error}");
                    break;
                }
            }
        }
        let found = if locked.len() == self.images.len() { seals_on(&self.images).ok() } else { None };
        let was_given = matches!(self.lock().state.holds(), Holds::Given(_));
        let taken = found.map_or(Taken::Busy, Taken::Locked);
        let is_busy = taken == Taken::Busy;
        // Noted before its guest is let in: whoever follows this process has them. One that has come is let in later, when its images were
        // looked at, and until then they are awaited.
        if was_given
            && let Taken::Locked(found) = &taken
            && self.lock().state.fits(found)
        {
            self.note_ours();
        }
        if !self.lock().state.taken(taken) {
            locked.iter().for_each(|image| image.unlock());
            if !is_busy {
                self.lock().waiting.is_over();
                if let Err(error) = self.check_ours() {
                    log::error!("{error:#}");
                }
            }
            return !is_busy;
        }
        if was_given {
            log::info!("vm {}: its images are as it left them, and its guest goes on here", self.name);
        } else {
            self.measure();
        }
        let mut inner = self.lock();
        inner.trouble = None;
        // Whether more is waited for is known when they were looked at.
        inner.waiting.is_free();
        true
    }

    fn note_ours(&self) {
        let _ = self.line.say(&Said::Forget { key: NOT_OURS.to_owned() }, &[]);
        self.line.settle();
    }

    /// A VMM that asked before its images were ours may know another size.
    fn measure(&self) {
        let handles = self.lock().handles.clone();
        for handle in &handles {
            let before = handle.image().size_bytes();
            match handle.image().measure() {
                Ok(size_bytes) if size_bytes == before => {}
                measured => {
                    if let Err(error) = measured.and_then(|_| handle.resize()) {
                        log::error!("vm {}: {error}", self.name);
                    }
                }
            }
        }
    }

    fn written_to(&self) -> Vec<&std::path::Path> {
        self.images.iter().filter(|image| !image.read_only()).map(|image| image.path()).collect()
    }

    /// A guest has come on images as it left them.
    fn adopt(&self) -> anyhow::Result<()> {
        self.journals.arrive(&self.written_to())?;
        log::info!(
            "vm {}: its guest has come from elsewhere, and its journals are taken as they are on storage",
            self.name
        );
        Ok(())
    }

    fn coming(&self) -> Coming {
        let left = LeftMeanwhile::for_other_than(self.journals.directory().path());
        Coming { left, brought: BroughtHome::default() }
    }

    /// A guest begins. False where the images are to be taken once more before it can.
    fn prepare(&self, coming: &mut Coming) -> anyhow::Result<bool> {
        self.prepare_after(coming).map_err(|error| coming.brought.but(error))
    }

    fn prepare_after(&self, coming: &mut Coming) -> anyhow::Result<bool> {
        // When its VM was prepared they were looked at, too, and were anybody's from then on.
        let Coming { left, brought } = coming;
        let in_use = match left.is_there(&self.attached) {
            Ok(false) => None,
            Ok(true) => Some(None),
            // Whoever is to be done with it needs the locks, perhaps.
            Err(error) if earlier::is_in_use(&error) => Some(Some(error)),
            Err(error) => return Err(error),
        };
        if let Some(in_use) = in_use {
            if !self.let_go() {
                // It is found again: a VM that can be moved has nothing elsewhere, of which a mark would count as seen.
                self.note_waiting(&format!(
                    "its guest has come, and waits until its images can be given up for what an earlier run left for them: {CHANGES_IMAGES}"
                ));
                return Ok(false);
            }
            let finished = in_use.map_or_else(|| left.finish(&self.attached, &[], brought), Err);
            match finished {
                Err(error) if earlier::is_in_use(&error) => {
                    self.note_waiting(&format!(
                        "its guest has come, and waits until what an earlier run left for its images can be brought home: {error:#}"
                    ));
                }
                finished => {
                    finished?;
                    self.lock().waiting.can_prepare();
                }
            }
            return Ok(false);
        }
        for (image, disk) in self.images.iter().zip(&self.attached) {
            if !disk.is_raw {
                crate::raw::require(image.path())?;
            }
        }
        self.journals.look_again(&self.written_to())?;
        Ok(true)
    }

    /// Gives the images up for somebody who needs the locks, which no guest has used since they were taken; unless somebody changes them at an
    /// operator's wish, which takes as long as storage does, and is waited for: there is time, for the guest that they are prepared for waits.
    fn let_go(&self) -> bool {
        let Some(_closed) = self.users.close(AGAIN_PATIENCE) else { return false };
        self.lock().state.lets_go();
        self.images.iter().for_each(|image| image.unlock());
        true
    }

    fn begins(&self, disk: usize, positions: &[(u16, u16)], start: Start) -> Begin {
        let mut inner = self.lock();
        let was_unheard_of = inner.state.unheard_of().contains(&disk);
        let had_begun = inner.state.has_begun(disk);
        let before = inner.state.stopped_rings(disk);
        let owed_giving_up = inner.state.owes_giving_up();
        let begin = inner.state.begins(disk, positions, start);
        let has_begun = inner.state.has_begun(disk);
        let after = inner.state.stopped_rings(disk);
        let stays = owed_giving_up && !inner.state.owes_giving_up();
        inner.is_over |= stays && !inner.state.is_moving();
        drop(inner);
        self.changed.notify_all();
        if stays {
            self.owes_nothing();
        }
        if was_unheard_of {
            self.keep_unheard_of();
        }
        if before != after {
            self.keep_stopped(disk, &after);
        }
        if has_begun && !had_begun {
            let name = &self.journals.disk(disk).options.name;
            let _ = self.line.keep(&format!("{BEGUN}{name}"), "", None);
            self.line.settle();
        }
        begin
    }

    /// One that is not heard by whoever follows this process counts for a while as one that may be about to come: its door has it come at once.
    fn keep_unheard_of(&self) {
        // Told under the lock, so that what is told last is what is so.
        let inner = self.lock();
        let unheard_of = inner.state.unheard_of();
        let names: Vec<&str> =
            unheard_of.into_iter().map(|disk| self.journals.disk(disk).options.name.as_str()).collect();
        let text = serde_json::to_string(&names).expect("names are text");
        let _ = self.line.keep(UNHEARD_OF, &text, None);
    }

    /// On return whoever follows this process knows it.
    fn keep_stopped(&self, disk: usize, stopped: &Stopped) {
        let name = &self.journals.disk(disk).options.name;
        let text = serde_json::to_string(stopped).expect("numbers are text");
        let _ = self.line.keep(&format!("{STOPPED}{name}"), &text, None);
        self.line.settle();
    }

    fn ring_stopped(&self, disk: usize, ring: u16, position: u16) {
        let stopped = {
            let mut inner = self.lock();
            inner.state.ring_stopped(disk, ring, position);
            inner.state.stopped_rings(disk)
        };
        self.keep_stopped(disk, &stopped);
    }

    fn stopped(&self, disk: usize, positions: &[(u16, u16)]) {
        let mut inner = self.lock();
        let unheard_of = inner.state.unheard_of();
        let away = inner.those_away(Instant::now());
        let pause = inner.state.stopped(disk, positions);
        let stopped: Vec<_> =
            away.into_iter().chain([disk]).map(|disk| (disk, inner.state.stopped_rings(disk))).collect();
        let is_heard = inner.state.unheard_of() != unheard_of;
        inner.waits_no_more();
        drop(inner);
        if is_heard {
            self.keep_unheard_of();
        }
        // Before the VMM is answered, which asks no second time.
        stopped.iter().for_each(|(disk, stopped)| self.keep_stopped(*disk, stopped));
        if pause == Pause::Stay {
            return;
        }
        let mut inner = self.lock();
        let (done, is_done) = sync_channel(1);
        inner.pausing = Some((pause, done));
        drop(inner);
        self.changed.notify_all();
        // It ends when this process does, or the thread: then nothing was given up.
        let _ = is_done.recv();
    }

    fn gone(&self, disk: usize) {
        let mut inner = self.lock();
        let was_unheard_of = inner.state.unheard_of().contains(&disk);
        inner.is_over |= inner.state.gone(disk);
        inner.waits_no_more();
        drop(inner);
        if was_unheard_of {
            self.keep_unheard_of();
        }
        self.changed.notify_all();
    }

    fn logging(&self, disk: usize, is_logging: bool) {
        let mut inner = self.lock();
        inner.is_over |= inner.state.logging(disk, is_logging);
        drop(inner);
        self.changed.notify_all();
    }
}

/// What is said of a guest that was stopped to be moved, and whose images are here.
fn not_given_up(error: &anyhow::Error) -> String {
    format!(
        "its guest is stopped to be moved, and its images stay locked here, for not everything of it is on storage: {error:#}. \
         The guest at the other end waits; mend that, which is tried again until then, or cancel the migration and have the guest go on \
         here (cont)"
    )
}

/// The thread of [`Migration::start`]; ends when this is dropped.
pub struct Working {
    migration: Arc<Migration>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Working {
    fn drop(&mut self) {
        {
            let mut inner = self.migration.lock();
            inner.is_quitting = true;
            inner.pausing = None;
            inner.handles.clear();
        }
        self.migration.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// That of one disk.
#[derive(Debug)]
struct DiskGate {
    migration: Arc<Migration>,
    disk: usize,
}

impl Gate for DiskGate {
    fn begins(&self, positions: &[(u16, u16)], start: Start) -> Begin {
        self.migration.begins(self.disk, positions, start)
    }

    fn ring_stopped(&self, ring: u16, position: u16) {
        self.migration.ring_stopped(self.disk, ring, position);
    }

    fn stopped(&self, positions: &[(u16, u16)]) {
        self.migration.stopped(self.disk, positions);
    }

    fn gone(&self) {
        self.migration.gone(self.disk);
    }

    fn logging(&self, is_logging: bool) {
        self.migration.logging(self.disk, is_logging);
    }
}

#[cfg(test)]
mod tests {
    use super::super::earlier::tests::{Other, leave};
    use super::*;
    use block_device::ImageOptions;
    use guest_memory::VmMemory;
    use placement::{AreaDirectory, JournalsOptions, LeftGuest};
    use std::os::fd::OwnedFd;
    use std::path::Path;
    use supervision::Channel;

    /// A VM with an image in this directory, without a guest.
    fn vm_in(directory: &Path) -> (VmOptions, Arc<Image>, Arc<Journals>) {
        let path = directory.join("image");
        std::fs::File::create(&path).and_then(|file| file.set_len(1 << 20)).expect("an image");
        let options = VmOptions::for_test(&[path.to_str().expect("a name")]);
        let image = Arc::new(Image::open_unlocked(&path, ImageOptions::default()).expect("an image"));
        let disks = options.attach().expect("a disk").into_iter().map(|disk| disk.options).collect();
        let area = AreaDirectory::create(&directory.join("vms"), &placement::own_place()).expect("made");
        let journals = JournalsOptions { disks, budget_bytes: 1 << 20, tracer: None };
        let journals = Journals::awaiting(&VmMemory::new(), area, journals).expect("journals");
        (options, image, journals)
    }

    /// Keeps what a worker says, until it has gone.
    fn supervise(line: OwnedFd) -> JoinHandle<Kept> {
        std::thread::spawn(move || {
            let (channel, mut kept) = (Channel::from(line), Kept::default());
            while let Some((said, descriptors)) = channel.receive::<Said>().expect("a message") {
                if let Said::Settle = said {
                    rustix::io::write(&descriptors[0], &[1]).expect("told");
                } else {
                    assert!(kept.heard(&said, descriptors).expect("there is room"));
                }
            }
            kept
        })
    }

    /// A guest was left with a disk that was unplugged then, and the worker that was told so has died.
    #[test]
    fn whoever_follows_knows_for_which_disks_of_a_left_guest_nobody_may_come() {
        let directory = tempfile::tempdir_in("/dev/shm").expect("tmpfs");
        let (options, image, journals) = vm_in(directory.path());
        let begin = |line: &Arc<Line>, beginning| {
            Migration::new(line, &journals, std::slice::from_ref(&image), &options, beginning).expect("begun")
        };
        let at = [(0, 5)];
        for is_heard in [false, true] {
            let (line, supervisor) = Line::to_nobody();
            let supervisor = supervise(supervisor);
            let migration = begin(&line, Beginning::Ours);
            migration.was_left(&[true]);
            if is_heard {
                assert_eq!(migration.begins(0, &at, Start::Resumed), Begin::Yes(Start::Resumed));
            }
            drop((migration, line));
            let kept = KeptMigration::of(&supervisor.join().expect("no panic")).expect("understood");
            let (line, _supervisor) = Line::to_nobody();
            let migration = begin(&line, Beginning::GoesOn(kept));
            let (mut inner, now) = (migration.lock(), Instant::now());
            assert!(inner.state.has_begun(0) && !inner.state.stopped_rings(0).1, "it runs, for all that is known");
            assert_eq!(inner.those_away(now), [0; 0], "it may be about to come");
            let away: &[usize] = if is_heard { &[] } else { &[0] };
            assert_eq!(inner.those_away(now + 2 * COMING_PATIENCE), away);
        }
        journals.directory().remove();
    }

    /// Its images were anybody's since its VM was prepared, and a VM of this host had them meanwhile.
    #[test]
    fn what_was_left_before_the_images_were_ours_is_looked_for_once_more() {
        let directory = tempfile::tempdir_in("/dev/shm").expect("tmpfs");
        let (options, image, journals) = vm_in(directory.path());
        let path = image.path().to_owned();
        let area = |name: &str| AreaDirectory::create(&directory.path().join(name), &placement::own_place());
        let (line, _supervisor) = Line::to_nobody();
        let begin = || Migration::new(&line, &journals, std::slice::from_ref(&image), &options, Beginning::Awaited);
        let left = begin().expect("begun");
        let other = Image::open_unlocked(&path, ImageOptions::default()).expect("an image");
        let is_ours = || {
            let is_free = other.try_lock().expect("a lock");
            if is_free {
                other.unlock();
            }
            !is_free
        };
        {
            let (mut inner, start) = (left.lock(), Instant::now());
            inner.state = State::new(1, Holds::Ours);
            inner.state.was_left(&[true]);
            inner.left_since = Some(start);
            assert_eq!(inner.those_away(start + COMING_PATIENCE), [0; 0], "it may be about to come");
            assert_eq!(inner.those_away(start + 2 * COMING_PATIENCE), [0]);
        }
        let migration = begin().expect("begun");
        let begins = || migration.lock().state.begins(0, &[(0, 0)], Start::Fresh);
        let is_coming = || {
            assert_eq!(begins(), Begin::Wait);
            assert!(migration.take() && is_ours(), "nobody has them");
            assert_eq!((begins(), migration.lock().state.task()), (Begin::Wait, Task::Prepare));
        };
        // It has died.
        let left = area("others").expect("made");
        left.register(&path).expect("registered");
        let left_at = left.path().to_owned();
        drop(left);
        is_coming();
        let mut coming = migration.coming();
        assert!(!migration.prepare(&mut coming).expect("it is finished"), "by somebody who needs the locks");
        assert!(!left_at.exists() && !is_ours() && migration.check_ours().is_err(), "they are anybody's");
        // Somebody has them meanwhile, for whom nobody waits whose VMM has gone.
        assert!(other.try_lock().expect("a lock") && !migration.take());
        migration.gone(0);
        assert_eq!(migration.lock().state.task(), Task::Nothing);
        other.unlock();
        is_coming();
        // It lives, and has given the image up. What died before it was served as another's is named behind that one.
        let left = area("others").expect("made");
        let living = area("others").expect("made");
        [&left, &living].iter().for_each(|area| area.register(&path).expect("registered"));
        let left_at = left.path().to_owned();
        drop(left);
        let mut coming = migration.coming();
        assert!(!migration.prepare(&mut coming).expect("it is finished") && !left_at.exists());
        is_coming();
        assert!(migration.prepare(&mut coming).expect("its guest begins") && is_ours());
        // By now it has died, and what it has may be something again.
        let living_at = living.path().to_owned();
        assert!(living_at.exists());
        drop(living);
        assert!(!migration.prepare(&mut coming).expect("it is finished") && !living_at.exists());
        is_coming();
        // Its guest waits for the next daemon.
        let pid = std::process::id() as i32;
        let guest =
            LeftGuest { vm: "db".to_owned(), pid, started: placement::process_started_at(pid).expect("it lives") };
        placement::note_left_guest(&path, &guest).expect("noted");
        let refused = migration.prepare(&mut migration.coming());
        placement::forget_left_guest(&path);
        assert!(refused.is_err() && is_ours());
        assert!(migration.prepare(&mut migration.coming()).expect("its guest begins"));
        journals.directory().remove();
    }

    /// What a VM has left is brought home by whoever has the image's lock, which somebody else takes first.
    #[test]
    fn a_guest_that_begins_waits_for_who_uses_its_image_meanwhile() {
        let directory = tempfile::tempdir_in("/dev/shm").expect("tmpfs");
        let (mut options, image, journals) = vm_in(directory.path());
        let path = image.path().to_owned();
        std::fs::remove_file(&path).expect("it is made anew");
        guest_kit::image::ExtRecipe::ext4(32, 4).make(&path).expect("made");
        options.disks[0] = format!("{},placement=copy", path.display()).parse().expect("a disk");
        let image = Arc::new(Image::open_unlocked(image.path(), ImageOptions::default()).expect("an image"));
        let (line, _supervisor) = Line::to_nobody();
        let beginning = Beginning::Awaited;
        let migration =
            Migration::new(&line, &journals, std::slice::from_ref(&image), &options, beginning).expect("begun");
        let other = Image::open_unlocked(&path, ImageOptions::default()).expect("an image");
        // It dies. What it had is there still, and its VMM may be as well.
        let dead = Other::new(&directory.path().join("others"), &migration.attached);
        dead.mount();
        let begins = || migration.lock().state.begins(0, &[(0, 0)], Start::Fresh);
        let is_coming = || {
            assert_eq!(begins(), Begin::Wait);
            assert!(migration.take(), "nobody has them");
            assert_eq!((begins(), migration.lock().state.task()), (Begin::Wait, Task::Prepare));
        };
        is_coming();
        let mut coming = migration.coming();
        let trouble = || migration.status()["trouble"].as_str().map(str::to_owned);
        let waits = |coming: &mut Coming| {
            assert!(!migration.prepare(coming).expect("it waits"));
            assert_eq!(migration.lock().state.task(), Task::Take, "it is tried again");
            let trouble = trouble().expect("it is said");
            assert!(trouble.contains("can be brought home: ") && trouble.contains("in use"), "{trouble}");
        };
        waits(&mut coming);
        is_coming();
        assert!(trouble().is_some(), "it is so still while that is looked at again");
        // A guest that has gone waits for nothing.
        migration.gone(0);
        assert_eq!(trouble(), None);
        migration.note_waiting("somebody has found that out only now");
        migration.note_busy(Instant::now() - Duration::from_secs(60));
        migration.note_busy(Instant::now());
        assert_eq!(trouble(), None);
        is_coming();
        waits(&mut coming);
        is_coming();
        // An operator changes something of the images, for as long as it takes.
        let user = migration.using().expect("they are ours");
        assert!(!migration.prepare(&mut coming).expect("it waits"));
        assert_eq!(migration.lock().state.task(), Task::Prepare, "they are ours, and looked at again");
        assert!(trouble().is_some_and(|trouble| trouble.contains("makes an image larger")), "{:?}", trouble());
        drop(user);
        // By now it is gone, but somebody has the image before it can be finished.
        let left = leave(dead, directory.path());
        image.unlock();
        assert!(other.try_lock().expect("a lock"));
        waits(&mut coming);
        other.unlock();
        is_coming();
        let user = migration.using().expect("they are ours");
        assert!(!migration.prepare(&mut coming).expect("it waits") && left.exists());
        drop(user);
        assert!(!migration.prepare(&mut coming).expect("it is finished"), "by somebody who needs the locks");
        assert!(!left.exists() && trouble().is_none());
        is_coming();
        assert!(migration.prepare(&mut coming).expect("its guest begins"));
        journals.directory().remove();
    }

    #[test]
    fn only_its_owner_and_root_can_seal_an_image_for_another_host() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        file.as_file().set_len(1 << 20).expect("a length");
        let owner = file.as_file().metadata().expect("there").uid();
        let of = |uid: u32| Uid::from_raw(uid);
        let image = Image::open(file.path(), ImageOptions::default()).expect("an image");
        assert_eq!(why_unsealed(&image, of(owner)), None);
        assert_eq!(why_unsealed(&image, Uid::ROOT), None);
        let said = why_unsealed(&image, of(owner + 1)).expect("it is somebody else's");
        assert!(said.contains("belongs to another user") && said.contains(&format!("chown {} ", owner + 1)), "{said}");
        drop(image);
        // Nobody seals what is only read.
        let reader = ImageOptions { read_only: true, ..ImageOptions::default() };
        let image = Image::open(file.path(), reader).expect("an image");
        assert_eq!(why_unsealed(&image, of(owner + 1)), None);
    }
}
