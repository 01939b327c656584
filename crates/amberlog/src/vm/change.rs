//! Disks that come to a VM, or leave it, while its guest runs.
//!
//! A worker serves the disks that it began with. Others are served by the next one, which goes on with the guest as after a death: so
//! this one prepares them, has them kept, and is replaced. Must never: have something kept that the next worker cannot go on with,
//! or take a disk that somebody uses. Failure story: what cannot be prepared is refused while this worker serves on, and a door that was
//! shut for what then failed is opened again ([`reopen`]); what was kept before this worker died, and is of no disk that is served, is let go by
//! the next one ([`clean_up`]).

use super::earlier::{BroughtHome, finish_areas, finish_elsewhere, finish_left_meanwhile, lock_all, refuse_left};
use super::moments::CHANGES;
use super::{Attached, VmObserver, VmOptions, open_image, require_raw};
use crate::raw::KnownRaw;
use crate::worker::Line;
use anyhow::Context;
use block_device::Image;
use guest_memory::VmMemory;
use placement::{AreaDirectory, Journals, JournalsOptions, PlacementKind};
use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use supervision::{DOOR, Kept, Said};

/// How the keys of images begin.
pub const IMAGE: &str = "image ";
/// How the keys of their second open files begin.
pub const SECOND: &str = "second ";
/// How long the supervisor may take to say whether somebody has a disk.
const SHUT_PATIENCE: Duration = Duration::from_secs(5);
/// How long storage may take for what a VMM had asked for that has gone.
const LEAVING_PATIENCE: Duration = Duration::from_secs(30);
/// How often it is looked.
const LOOK: Duration = Duration::from_millis(2);
/// Bounds that were set while the guest ran.
pub const THROTTLE: &str = "throttle ";
/// A `durable-within` that was wished while the guest ran.
pub const DURABLE_WITHIN: &str = "durable-within ";

/// The key of a disk's image.
pub fn image_key(disk: &str) -> String {
    format!("{IMAGE}{disk}")
}

/// The key of its second open file.
pub fn second_key(disk: &str) -> String {
    format!("{SECOND}{disk}")
}

/// What is said with an image whose operations are under way no longer than [`block_device::await_idle`] takes.
const TELLS_ITS_END: &str = "tells its end";

/// Has the supervisor keep an image for the next worker. Before anything is asked of it: whoever follows relies on what is said of it.
///
/// # Errors
/// When the supervisor is gone.
pub fn keep_image(line: &Line, disk: &str, image: &Image) -> std::io::Result<()> {
    line.keep(&image_key(disk), words_of(image), Some(image.file().as_fd()))
}

/// The same of its second open file ([`Image::set_second`]), which it gets now.
///
/// # Errors
/// When the supervisor is gone.
pub fn keep_second(line: &Line, disk: &str, image: &Image) -> std::io::Result<()> {
    match image.reopen_buffered() {
        Ok(second) => {
            line.keep(&second_key(disk), "", Some(second.as_fd()))?;
            image.set_second(second, false);
        }
        Err(error) => log::debug!("opening {} once more: {error}", image.path().display()),
    }
    Ok(())
}

/// The same where an earlier worker has said `words` of it, if that is not so any more.
///
/// # Errors
/// When the supervisor is gone.
pub fn keep_image_anew(line: &Line, disk: &str, image: &Image, words: &str) -> std::io::Result<()> {
    if words == words_of(image) { Ok(()) } else { keep_image(line, disk, image) }
}

fn words_of(image: &Image) -> &'static str {
    if image.tells_its_end() { TELLS_ITS_END } else { "" }
}

/// Waits until the worker that had `words` said with an image has nothing under way on it. That worker has died; where the words say
/// nothing of it, the pipe has told already.
///
/// # Errors
/// When the kernel does not say it.
pub fn await_idle(words: &str, image: &File, path: &Path) -> anyhow::Result<()> {
    if words != TELLS_ITS_END {
        return Ok(());
    }
    block_device::await_idle(image).with_context(|| format!("waiting for what was under way on {}", path.display()))
}

/// The doors of a VM's disks: the supervisor knows them by numbers, which stay the same while disks come and go.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Doors {
    numbers: BTreeMap<String, usize>,
}

impl Doors {
    /// Those that an earlier worker has left.
    pub fn kept(kept: &Kept) -> Self {
        let number = |(name, number): (String, String)| Some((name, number.parse().ok()?));
        Doors { numbers: kept.all(DOOR).into_iter().filter_map(number).collect() }
    }

    /// Whether there is one for this disk.
    pub fn has(&self, disk: &str) -> bool {
        self.numbers.contains_key(disk)
    }

    /// The number of this disk's, and whether it has just been given.
    pub fn of(&mut self, disk: &str) -> (usize, bool) {
        if let Some(number) = self.numbers.get(disk) {
            return (*number, false);
        }
        let number = self.numbers.values().max().map_or(0, |last| last + 1);
        self.numbers.insert(disk.to_owned(), number);
        (number, true)
    }
}

/// What is kept for disks that are not served any more.
#[derive(Debug, Default)]
pub(super) struct Leftover {
    doors: Vec<usize>,
    keys: Vec<String>,
}

impl Leftover {
    pub(super) fn of(kept: &Kept, doors: &Doors, attached: &[Attached]) -> Self {
        let is_served = |name: &str| attached.iter().any(|disk| disk.options.name == name);
        let gone = doors.numbers.iter().filter(|(name, _)| !is_served(name)).map(|(_, number)| *number);
        let of = |beginning: &'static str| {
            let names = kept.all(beginning).into_iter().filter(|(name, _)| !is_served(name));
            names.map(move |(name, _)| format!("{beginning}{name}"))
        };
        let keys = of(IMAGE).chain(of(SECOND)).chain(of(THROTTLE)).chain(of(CHANGES)).chain(of(DURABLE_WITHIN));
        Leftover { doors: gone.collect(), keys: keys.collect() }
    }

    /// Lets go of it.
    pub(super) fn clean_up(self, line: &Line) -> std::io::Result<()> {
        self.doors.into_iter().try_for_each(|disk| line.say(&Said::Shut { disk }, &[]))?;
        self.keys.into_iter().try_for_each(|key| line.say(&Said::Forget { key }, &[]))
    }
}

/// Whether the images of a VM are where they were when they were opened: another worker opens them by name.
///
/// # Errors
/// The first that is not.
pub fn check_images<'i>(images: impl Iterator<Item = &'i Image>) -> anyhow::Result<()> {
    for image in images {
        check_image(image)?;
    }
    Ok(())
}

/// The same of one.
///
/// # Errors
/// When it is not.
pub fn check_image(image: &Image) -> anyhow::Result<()> {
    let identity = |metadata: std::fs::Metadata| (metadata.dev(), metadata.ino(), metadata.rdev());
    let path = image.path();
    let is = std::fs::metadata(path).map(identity).with_context(|| format!("looking for {}", path.display()))?;
    let was = image.file().metadata().map(identity)?;
    anyhow::ensure!(
        is == was,
        "{} is another file than the one that is served: put that one back in its place",
        path.display()
    );
    Ok(())
}

/// What keeps another worker from going on with a VM that is made so.
pub fn cannot_change(options: &VmOptions) -> Option<String> {
    let disk =
        options.disks.iter().find(|disk| matches!(disk.placement, PlacementKind::Nvm | PlacementKind::Remote))?;
    Some(format!(
        "disks cannot come or go while the guest runs where one has placement {} ({})",
        disk.placement.name(),
        disk.path.display()
    ))
}

/// A disk that is about to come, as this worker has prepared it.
pub struct Prepared {
    name: String,
    path: PathBuf,
    is_read_only: bool,
    image: Image,
}

/// Prepares the disks of `options` that have these names: finishes what an earlier process left for them, locks them, and looks
/// whether a VM could begin with them.
///
/// # Errors
/// As when a VM is prepared. Nothing is kept then.
pub fn prepare(options: &VmOptions, names: &[String], known: &KnownRaw) -> anyhow::Result<Vec<Prepared>> {
    let mut brought = BroughtHome::default();
    prepare_after(options, names, known, &mut brought).map_err(|error| brought.but(error))
}

fn prepare_after(
    options: &VmOptions,
    names: &[String],
    known: &KnownRaw,
    brought: &mut BroughtHome,
) -> anyhow::Result<Vec<Prepared>> {
    let mut attached = options.attach()?;
    attached.retain(|disk| names.contains(&disk.options.name));
    for (option, name) in options.disks.iter().filter_map(|option| Some((option, option.name.as_ref()?))) {
        anyhow::ensure!(
            option.log_writes.is_none() || !names.contains(name),
            "disk {name}: a log of writes has to begin with its VM"
        );
        anyhow::ensure!(
            option.model.is_none() || !names.contains(name),
            "disk {name}: a modelled disk has to begin with its VM"
        );
    }
    refuse_left(&attached)?;
    let left = finish_areas(&attached, brought)?;
    require_raw(&mut attached, known)?;
    finish_elsewhere(&attached, &[], brought)?;
    let images = attached.iter().map(|disk| open_image(disk, false));
    let images = images.collect::<anyhow::Result<Vec<_>>>()?;
    let unlock = || images.iter().for_each(|image| image.unlock());
    finish_left_meanwhile(left, &attached, &[], brought, unlock, || lock_all(&images))?;
    let mut prepared = Vec::new();
    for (disk, image) in attached.iter().zip(images) {
        let options = &disk.options;
        prepared.push(Prepared {
            name: options.name.clone(),
            path: options.path.clone(),
            is_read_only: options.read_only,
            image,
        });
    }
    try_out(options, attached)?;
    Ok(prepared)
}

/// Looks whether their journals can be taken up: the next worker must not be the one who finds out.
fn try_out(options: &VmOptions, attached: Vec<Attached>) -> anyhow::Result<()> {
    let directory = AreaDirectory::create(&options.shm, &placement::own_place())?;
    let disks = attached.into_iter().map(|disk| disk.options).collect();
    let journals = Journals::new(
        &VmMemory::new(),
        directory,
        JournalsOptions { disks, budget_bytes: options.memory_budget_mib << 20, tracer: None },
    )?;
    journals.directory().remove();
    Ok(())
}

impl Prepared {
    /// Has the next worker find it.
    ///
    /// # Errors
    /// When that cannot be written down, or the supervisor is gone.
    pub fn keep(self, journals: &Journals, line: &Line) -> anyhow::Result<()> {
        if !self.is_read_only {
            journals.expect_image(&self.path).with_context(|| format!("noting {}", self.path.display()))?;
        }
        keep_image(line, &self.name, &self.image)?;
        keep_second(line, &self.name, &self.image)?;
        // They are the next worker's now.
        self.image.leave_locks();
        Ok(())
    }
}

/// Shuts the door of a disk that is to go: from then on nobody can have it, until [`reopen`] or another worker.
///
/// # Errors
/// When a VMM has it.
pub fn shut(name: &str, door: usize, socket: &Path, line: &Line) -> anyhow::Result<()> {
    anyhow::ensure!(
        line.shut_door(door, SHUT_PATIENCE)?,
        "disk {name} is in use: unplug it first (virsh detach-device, or QMP's device_del and then chardev-remove)"
    );
    if let Err(error) = std::fs::remove_file(socket) {
        log::debug!("removing {}: {error}", socket.display());
    }
    Ok(())
}

/// Has a disk whose door is shut be nobody's: waits until the device has let go of the VMM that was there (and `is_idle`), and brings home what
/// it is owed (`leaves`, see [`Journals::leave_disk`]).
///
/// # Errors
/// When storage fails.
pub fn leave(
    disk: usize,
    door: usize,
    observer: &VmObserver,
    line: &Line,
    (is_idle, leaves): (impl Fn() -> bool, impl Fn() -> std::io::Result<()>),
) -> anyhow::Result<()> {
    let name = &observer.journals.disk(disk).options.name;
    let is_free = || !observer.rings()[disk].is_connected && line.has_nobody(door) && is_idle();
    leave_when_free(name, Instant::now() + LEAVING_PATIENCE, is_free, leaves)
}

/// What its VMM had asked for last may still be under way, or what its journal does by the clock: then it is looked once more.
fn leave_when_free(
    name: &str,
    deadline: Instant,
    is_free: impl Fn() -> bool,
    leaves: impl Fn() -> std::io::Result<()>,
) -> anyhow::Result<()> {
    loop {
        if is_free() {
            match leaves() {
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                left => return left.with_context(|| format!("disk {name} cannot go")),
            }
        }
        anyhow::ensure!(
            Instant::now() < deadline,
            "disk {name}: storage has not answered what its guest had asked for"
        );
        std::thread::sleep(LOOK);
    }
}

/// Opens a door again that was shut: what was to follow has failed, and the disk is served as before.
///
/// # Errors
/// When its socket cannot be made, or the supervisor is gone.
pub fn reopen(
    name: &str,
    door: usize,
    socket: &Path,
    open_socket: impl FnOnce(&Path) -> anyhow::Result<()>,
    line: &Line,
) -> anyhow::Result<()> {
    let listener = block_device::listen(socket)?;
    open_socket(socket)?;
    line.say(&Said::Door { disk: door, name: name.to_owned() }, &[listener.as_fd()])?;
    // From here on a VMM finds it.
    line.settle();
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use block_device::ImageOptions;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    /// What a worker says of its images has the next one wait, or not.
    #[test]
    fn an_image_that_tells_its_end_is_waited_for() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        file.as_file().set_len(1 << 20).expect("a length");
        let image = Image::open(file.path(), ImageOptions::default()).expect("an image");
        assert!(image.tells_its_end(), "this file system has no locks of open files");
        let kept = image.file().try_clone().expect("a descriptor");
        await_idle("", &kept, file.path()).expect("the pipe has told");
        let words = words_of(&image);
        let is_over = Arc::new(AtomicBool::new(false));
        let waiting = {
            let (is_over, path) = (Arc::clone(&is_over), file.path().to_owned());
            std::thread::spawn(move || await_idle(words, &kept, &path).map(|()| is_over.load(Ordering::SeqCst)))
        };
        // Time for one who does not wait.
        std::thread::sleep(Duration::from_millis(50));
        is_over.store(true, Ordering::SeqCst);
        drop(image);
        assert!(waiting.join().expect("no panic").expect("idle"), "it did not wait");
        let reader = ImageOptions { read_only: true, ..ImageOptions::default() };
        assert_eq!(words_of(&Image::open(file.path(), reader).expect("an image")), "");
    }

    /// A VM of this host has the disk when what was left for it is looked for, and dies before it is locked.
    #[test]
    fn what_is_left_for_a_disk_until_it_is_locked_is_finished_too() {
        let directory = tempfile::tempdir_in("/dev/shm").expect("tmpfs");
        let path = directory.path().join("image");
        std::fs::File::create(&path).and_then(|file| file.set_len(1 << 20)).expect("an image");
        let other = Image::open(&path, ImageOptions::default()).expect("an image");
        let options = VmOptions::for_test(&[&format!("{},name=db", path.display())]);
        let options = VmOptions { shm: directory.path().join("vms"), ..options };
        let preparing = std::thread::spawn(move || prepare(&options, &["db".to_owned()], &KnownRaw::default()));
        // By now it waits for the lock. If not, this shows nothing.
        std::thread::sleep(Duration::from_millis(300));
        let left = AreaDirectory::create(&directory.path().join("others"), &placement::own_place()).expect("made");
        left.register(&path).expect("registered");
        let left_at = left.path().to_owned();
        drop((left, other));
        let prepared = preparing.join().expect("no panic").expect("prepared");
        assert!(!left_at.exists(), "nobody looks for it later");
        let other = Image::open_unlocked(&path, ImageOptions::default()).expect("an image");
        assert!(!other.try_lock().expect("a lock"), "it is locked");
        drop(prepared);
    }

    /// Its journal begins something by its clock, between two looks.
    #[test]
    fn a_disk_that_is_busy_when_it_is_to_go_is_asked_again() {
        let leave = |busy: u32, deadline: Duration, last: fn() -> std::io::Result<()>| {
            let (looks, asked) = (std::cell::Cell::new(0), std::cell::Cell::new(0));
            let is_free = || looks.replace(looks.get() + 1) >= 2;
            let leaves = || {
                asked.set(asked.get() + 1);
                if asked.get() <= busy { Err(std::io::ErrorKind::WouldBlock.into()) } else { last() }
            };
            let left = leave_when_free("db", Instant::now() + deadline, is_free, leaves);
            (left.map_err(|error| format!("{error:#}")), asked.get())
        };
        let minute = Duration::from_secs(60);
        assert_eq!(leave(0, minute, || Ok(())), (Ok(()), 1));
        assert_eq!(leave(3, minute, || Ok(())), (Ok(()), 4));
        let (left, asked) = leave(1, minute, || Err(std::io::Error::other("storage failed")));
        assert_eq!((left, asked), (Err("disk db cannot go: storage failed".to_owned()), 2));
        let (left, _) = leave(u32::MAX, Duration::ZERO, || Ok(()));
        assert!(left.expect_err("it is never free").contains("storage has not answered"));
    }

    #[test]
    fn doors_keep_their_numbers() {
        let mut doors = Doors::default();
        assert_eq!((doors.of("a"), doors.of("b"), doors.of("a")), ((0, true), (1, true), (0, false)));
        let mut kept = Kept::default();
        kept.put(format!("{DOOR}b"), doors.of("b").0.to_string()).expect("kept");
        let mut later = Doors::kept(&kept);
        assert!(later.has("b") && !later.has("a"));
        assert_eq!((later.of("c"), later.of("b")), ((2, true), (1, false)));
    }
}
