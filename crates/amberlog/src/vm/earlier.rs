//! What earlier processes have left for the images of a VM goes home before it is served.
//!
//! Must never: call something refused, which promises that nothing was changed, once something was; or pass over what was done because of
//! what failed after it. Failure story: each log goes home by itself, and what could not stays where it is, with its sentence.

use super::Attached;
use crate::takeover::{PATIENCE, Patience};
use anyhow::Context;
use block_device::Image;
use placement::{AreaDirectory, DirectoryError, FinishError};
use recovery::{Report, Status};
use std::borrow::Borrow;
use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How often the lock of an image is tried that somebody has.
const LOCK_PAUSE: Duration = Duration::from_millis(20);

/// Images to which something was brought home for a VM that may be refused yet.
#[derive(Debug, Default)]
pub(super) struct BroughtHome(Vec<PathBuf>);

impl BroughtHome {
    fn note(&mut self, image: &Path, report: &Report) {
        let is_changed = !matches!(report.status, Status::None | Status::Clean);
        if is_changed && !self.0.iter().any(|noted| noted == image) {
            self.0.push(image.to_owned());
        }
    }

    /// Why the VM is not served in the end.
    pub(super) fn but(&self, error: anyhow::Error) -> anyhow::Error {
        if self.0.is_empty() {
            return error;
        }
        let images: Vec<String> = self.0.iter().map(|image| image.display().to_string()).collect();
        // Without the kind of the error: it may be one that says that nothing was changed.
        anyhow::anyhow!(
            "{}; before that, what an earlier run left was brought home to {}",
            command_line::exit::sentence(&error),
            images.join(" and ")
        )
    }
}

/// Refuses images that a guest goes on with under the next daemon: it would not survive that another one writes to them.
pub(super) fn refuse_left(disks: &[Attached]) -> anyhow::Result<()> {
    for path in disks.iter().filter(|disk| !disk.options.read_only).map(|disk| &disk.options.path) {
        if let Some(guest) = placement::left_guest(path)? {
            let sentence = placement::Owed::Left(guest).sentence(path).unwrap_or_default();
            return Err(FinishError::Refused(format!("{}: {sentence}", path.display())).into());
        }
    }
    Ok(())
}

/// Finishes what an earlier process left for these images in areas in tmpfs. Gives what is known for the look that follows once they are
/// locked ([`finish_left_meanwhile`]): what keeps nobody from them is waited for once.
pub(super) fn finish_areas(disks: &[Attached], brought: &mut BroughtHome) -> anyhow::Result<LeftMeanwhile> {
    let mut left = LeftMeanwhile::default();
    left.finish_areas(disks, brought, true)?;
    Ok(LeftMeanwhile { copied: left.copied, patience: left.patience, ..LeftMeanwhile::default() })
}

/// The same once the images are locked. Until then they were anybody's: a VM of this host that had them, and has died or was left, may have
/// left something since that was looked for last, in an area or elsewhere. What is finished locks the images itself, so they are given up for that with
/// `unlock`, and taken again with `lock`, until nothing is found while they are locked.
pub(super) fn finish_left_meanwhile(
    mut left: LeftMeanwhile,
    disks: &[Attached],
    journals: &[&Path],
    brought: &mut BroughtHome,
    unlock: impl Fn(),
    lock: impl Fn() -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    while left.is_there(disks)? {
        unlock();
        left.finish(disks, journals, brought)?;
        lock()?;
    }
    Ok(())
}

/// What was left for images until they were locked, for who looks more than once.
#[derive(Debug, Default)]
pub(super) struct LeftMeanwhile {
    /// Areas that were finished, and that of who asks.
    done: HashSet<PathBuf>,
    /// Those that were in use when the images were locked last, and held nothing for them.
    in_use: HashSet<PathBuf>,
    /// Of which that was said that images which are only read are copies of what they have.
    copied: HashSet<PathBuf>,
    /// What images said of logs that are elsewhere, when that was looked for.
    marks: HashSet<Vec<u8>>,
    /// Of the last look at areas. Each has its own: whoever has the images in between may be killed after the one before.
    patience: Patience,
}

impl LeftMeanwhile {
    /// For who has a directory of his own.
    pub(super) fn for_other_than(own: &Path) -> Self {
        LeftMeanwhile { done: HashSet::from([own.to_owned()]), ..LeftMeanwhile::default() }
    }

    /// Whether there is something for these images, which are locked, that was not looked at yet.
    ///
    /// # Errors
    /// When they are not to be used.
    pub(super) fn is_there(&mut self, disks: &[Attached]) -> anyhow::Result<bool> {
        refuse_left(disks)?;
        let has_area = self.has_area(disks)?;
        Ok(self.has_elsewhere(disks) || has_area)
    }

    /// Finishes that, once they are not locked any more. Each is looked at once: what of it is for other images stays. An area that somebody uses
    /// at this moment is left for the next look, which can tell whether it has anything for them: these images are anybody's now.
    ///
    /// # Errors
    /// When something cannot be brought home; [`is_in_use`] where it can be when somebody else is done with it.
    pub(super) fn finish(
        &mut self,
        disks: &[Attached],
        journals: &[&Path],
        brought: &mut BroughtHome,
    ) -> anyhow::Result<()> {
        self.finish_areas(disks, brought, false)?;
        finish_elsewhere(disks, journals, brought)
    }

    /// An area that is in use holds nothing for them if its VM has given them up: then no mark on them names it any more. Where one does, it is a
    /// VMM's that has outlived its worker and its daemon, and the locks with these: what is held there is on none of them, and cannot be had before
    /// that VMM ends. Whether it is so is asked each time anew, for they were anybody's in between. Each mark is asked for what it says of the image
    /// that it is on, so that nothing depends on which image is looked at first.
    fn has_area(&mut self, disks: &[Attached]) -> anyhow::Result<bool> {
        self.in_use.clear();
        let (mut looked_at, mut has_area) = (self.done.clone(), false);
        self.patience = Patience::default();
        let registries = placement::own_places()?;
        for (disk, registry) in disks.iter().flat_map(|disk| registries.iter().map(move |registry| (disk, registry))) {
            while let Some((left, _)) = next_area(&disk.options.path, registry, &mut looked_at)? {
                let (mut taken, mut marked) = (AreaDirectory::take_over(&left, registry), Vec::new());
                if matches!(taken, Err(DirectoryError::InUse { .. })) {
                    marked = marked_for(disks, &left, registry)?;
                    // Nobody waits for one that holds nothing for these, nor twice for one that keeps nobody from them.
                    marked.retain(|(disk, is_by_key)| {
                        *is_by_key || !disk.options.read_only || !self.copied.contains(&left)
                    });
                    if !marked.is_empty() {
                        taken = self.patience.take_over(&left, registry);
                    }
                }
                match taken {
                    Ok(_) => has_area = true,
                    Err(error @ DirectoryError::InUse { .. }) => {
                        if marked.iter().any(|(_, is_by_key)| *is_by_key) {
                            return Err(error.into());
                        }
                        for (disk, _) in marked {
                            refuse_copy(&left, disk)?;
                            self.copied.insert(left.clone());
                        }
                        self.in_use.insert(left);
                    }
                    Err(error) if error.is_missing() => {}
                    Err(error) => return Err(error.into()),
                }
            }
        }
        Ok(has_area)
    }

    /// Whether regions of NVM or journal servers of these disks have something for them, as their images say with a mark that was not seen yet.
    fn has_elsewhere(&mut self, disks: &[Attached]) -> bool {
        let images: Vec<&Path> = disks.iter().map(|disk| disk.options.path.as_path()).collect();
        // What cannot be read is found out, and said, by whoever looks for their journals.
        let found = placement::marked_elsewhere(&images).unwrap_or_default();
        let has_place = |disk: usize| disks[disk].options.nvm.is_some() || disks[disk].options.remote.is_some();
        found.into_iter().filter(|(disk, mark)| has_place(*disk) && self.marks.insert(mark.to_vec())).count() > 0
    }

    /// What somebody uses refuses a disk (`refuses_in_use`), or is passed over.
    fn finish_areas(
        &mut self,
        disks: &[Attached],
        brought: &mut BroughtHome,
        refuses_in_use: bool,
    ) -> anyhow::Result<()> {
        let mut looked_at: HashSet<PathBuf> = self.done.union(&self.in_use).cloned().collect();
        self.patience = Patience::default();
        let registries = placement::own_places()?;
        for (disk, registry) in disks.iter().flat_map(|disk| registries.iter().map(move |registry| (disk, registry))) {
            // One that is gone may have been named in front of another one.
            while let Some((left, is_by_key)) = next_area(&disk.options.path, registry, &mut looked_at)? {
                match self.patience.take_over(&left, registry) {
                    Ok(directory) => finish_area(&directory, disks, brought)?,
                    Err(error @ DirectoryError::InUse { .. }) => {
                        if refuses_in_use {
                            refuse_in_use(&left, is_by_key, disk, error)?;
                            self.copied.insert(left);
                        }
                        continue;
                    }
                    // Whoever had it is done with it, and has removed it: another VM with the same read-only disk, for one.
                    Err(error) if error.is_missing() => {}
                    Err(error) => return Err(error.into()),
                }
                self.done.insert(left);
            }
        }
        for disk in disks {
            // What cannot be read is said by whoever opens it to serve it.
            if let Ok(Some(sentence)) = placement::held_by_another(&disk.options.path) {
                return Err(FinishError::Refused(sentence).into());
            }
        }
        Ok(())
    }
}

/// Those of these disks of which a mark says that this area has a journal of theirs, and whether it is named for them, too.
fn marked_for<'d>(disks: &'d [Attached], area: &Path, registry: &Path) -> anyhow::Result<Vec<(&'d Attached, bool)>> {
    let images: Vec<&Path> = disks.iter().map(|disk| disk.options.path.as_path()).collect();
    let marked = placement::marked_for(area, &images).context("looking for amberlog's marks on its images")?;
    let with_name = |disk: usize| {
        let by_key = AreaDirectory::find_but(registry, images[disk], |other| other != area);
        Ok((&disks[disk], by_key.map_err(|error| missing(images[disk], error))?.is_some()))
    };
    marked.into_iter().map(with_name).collect()
}

/// Whether something could not be brought home because somebody uses an image or what is held for it: it is tried again when he does not.
pub(super) fn is_in_use(error: &anyhow::Error) -> bool {
    let of_finish = error.downcast_ref::<FinishError>();
    let of_directory = match of_finish {
        Some(FinishError::Directory(error)) => Some(error),
        _ => error.downcast_ref(),
    };
    matches!(of_finish, Some(FinishError::InUse(_))) || matches!(of_directory, Some(DirectoryError::InUse { .. }))
}

/// Locks all of these images; or none, where somebody has the one that is given.
///
/// # Errors
/// When the kernel refuses.
pub(super) fn try_lock_all<I: Borrow<Image>>(images: &[I]) -> Result<Option<&Path>, block_device::Error> {
    for (at, image) in images.iter().enumerate() {
        let locked = image.borrow().try_lock();
        if !matches!(locked, Ok(true)) {
            images[..at].iter().for_each(|image| image.borrow().unlock());
            return locked.map(|_| Some(image.borrow().path()));
        }
    }
    Ok(None)
}

/// The same, waiting for a while for whoever has one.
///
/// # Errors
/// When somebody has one still.
pub(super) fn lock_all<I: Borrow<Image>>(images: &[I]) -> anyhow::Result<()> {
    let deadline = Instant::now() + PATIENCE;
    while let Some(path) = try_lock_all(images)? {
        if Instant::now() >= deadline {
            return Err(block_device::Error::ImageInUse { path: path.to_owned() }.into());
        }
        std::thread::sleep(LOCK_PAUSE);
    }
    Ok(())
}

/// An area that may hold something for this image and was not looked at yet, and whether it is the image itself that is named for it.
fn next_area(
    path: &Path,
    registry: &Path,
    looked_at: &mut HashSet<PathBuf>,
) -> anyhow::Result<Option<(PathBuf, bool)>> {
    let by_key = AreaDirectory::find_but(registry, path, |area| looked_at.contains(area));
    let by_key = by_key.map_err(|error| missing(path, error))?;
    let is_by_key = by_key.is_some();
    // What cannot be read is found out, and said, by whoever opens it to serve it.
    let by_mark = || placement::area_of_marked(registry, path).ok().flatten();
    let left = by_key.or_else(by_mark).filter(|left| looked_at.insert(left.clone()));
    Ok(left.map(|left| (left, is_by_key)))
}

fn missing(path: &Path, error: DirectoryError) -> anyhow::Error {
    if path.exists() {
        error.into()
    } else {
        anyhow::anyhow!("the image {} does not exist; make it, or correct the path", path.display())
    }
}

/// Refuses a disk for which somebody who lives holds something; but one that is only read and no more than a copy.
fn refuse_in_use(left: &Path, is_by_key: bool, disk: &Attached, in_use: DirectoryError) -> anyhow::Result<()> {
    if is_by_key {
        return Err(in_use.into());
    }
    refuse_copy(left, disk)
}

/// The same, of one for which no area is named, and that has the mark of one.
fn refuse_copy(left: &Path, disk: &Attached) -> anyhow::Result<()> {
    let path = disk.options.path.display();
    // A copy of what a VM that runs is served, or the same by another name, as by a loop device: which cannot be told.
    if disk.options.read_only {
        log::warn!(
            "{path}: its journal is held in memory for a VM that runs, of whose image it is a copy or another name; what is held is \
             not on it"
        );
        return Ok(());
    }
    let sentence = format!(
        "{path}: its journal is held in memory for a VM that runs (in {}): it is that VM's image by another name, or a copy \
         without what is held; nothing was changed. Copies are made with 'amberlog snapshot'. To use this one as it is, run \
         'e2fsck -fy' on it first, which gives up what is missing",
        left.display()
    );
    Err(FinishError::Refused(sentence).into())
}

fn finish_area(directory: &AreaDirectory, disks: &[Attached], brought: &mut BroughtHome) -> anyhow::Result<()> {
    let images: Vec<PathBuf> = disks.iter().map(|disk| disk.options.path.clone()).collect();
    let mut outcome = placement::finish_directory(directory, &images)?;
    for log in &outcome.finished {
        brought.note(&log.image, &log.recovery);
        let (transactions, blocks) = (log.recovery.transactions, log.recovery.blocks_written);
        let what =
            format!("finished an earlier run's recovery: {transactions} transactions, {blocks} blocks written home");
        say(&log.image, &what, &log.recovery);
    }
    if outcome.failed.is_empty() {
        placement::remove_finished(directory);
    }
    // What is left for images that this VM does not have waits for these, and keeps nobody from the others.
    let of_named = outcome.take_failure_of_named();
    for failed in outcome.failed.iter().filter(|failed| !failed.is_of_named) {
        log::warn!(
            "{} keeps what is held for {}, which is no disk of this VM: {}",
            directory.path().display(),
            failed.image.display(),
            failed.error
        );
    }
    of_named.map_or(Ok(()), |error| Err(error.into()))
}

/// Says what came home to an image, from wherever it was.
fn say(image: &Path, what: &str, report: &Report) {
    let (level, sentence) = said(what, report);
    log::log!(level, "{}: {sentence}", image.display());
}

/// All that an operator should know of it is in it, as in what `recover` prints. What is lost, or may be, is never silent (rule 4 of
/// ARCHITECTURE.md).
fn said(what: &str, report: &Report) -> (log::Level, String) {
    let level = if report.status == Status::Damaged { log::Level::Warn } else { log::Level::Info };
    let sentences: Vec<&str> = std::iter::once(what).chain(report.notes.iter().map(String::as_str)).collect();
    (level, sentences.join("; "))
}

/// Brings home what regions of NVM and journal servers have for these disks, whose external journals may be among `journals`.
pub(super) fn finish_elsewhere(
    disks: &[Attached],
    journals: &[&Path],
    brought: &mut BroughtHome,
) -> anyhow::Result<()> {
    for disk in disks {
        let path = &disk.options.path;
        let mut of_disk = Vec::new();
        let finished = placement::finish_earlier(&disk.options, journals, &mut of_disk);
        for one in &of_disk {
            say(path, &one.to_string(), one.report());
            brought.note(path, one.report());
        }
        finished?;
        if !of_disk.is_empty() {
            // The copy of what was on a server has stayed until now.
            placement::sweep_after(path);
        }
    }
    Ok(())
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::VmOptions;
    use super::*;
    use block_device::ImageOptions;
    use block_route::{Plan, Request, RequestId, RequestKind, Route, Start};
    use guest_kit::image::ExtRecipe;
    use guest_memory::{PageId, RegionDescriptor, VmMemory};
    use jbd2::{Superblock, SuperblockEdit};
    use placement::{DiskRoute, Journals, JournalsOptions};
    use std::os::unix::fs::{DirBuilderExt, FileExt};
    use std::sync::Arc;

    const BLOCK: usize = 4096;

    /// A VM that has the image of a file system, without its locks.
    pub(in super::super) struct Other {
        memory: Arc<VmMemory>,
        pub(in super::super) journals: Arc<Journals>,
    }

    impl Other {
        pub(in super::super) fn new(shm: &Path, disks: &[Attached]) -> Self {
            let area = AreaDirectory::create(shm, &placement::own_place()).expect("made");
            disks.iter().for_each(|disk| area.register(&disk.options.path).expect("registered"));
            let memory = VmMemory::new();
            let disks = disks.iter().map(|disk| disk.options.clone()).collect();
            let options = JournalsOptions { disks, budget_bytes: 1 << 20, tracer: None };
            let journals = Journals::new(&memory, area, options).expect("journals");
            Other { memory, journals }
        }

        /// Its guest mounts the file system on its first disk.
        pub(in super::super) fn mount(&self) {
            let image = std::fs::read(&self.journals.disk(0).options.path).expect("the image");
            let file_system = extfs::discover(&image).expect("readable").remove(0);
            let at = file_system.journal.extents(&file_system.superblock)[0].physical as usize * BLOCK;
            let mut block = image[at..at + BLOCK].to_vec();
            let said = Superblock::decode(&block).expect("a journal");
            let mut edit = SuperblockEdit::new(&mut block).expect("a journal");
            edit.start(said.first).sequence(said.sequence + 1).seal();
            let path = self.journals.directory().path().join("ram");
            let file = std::fs::OpenOptions::new().create_new(true).read(true).write(true).open(path).expect("made");
            file.write_all_at(&block, 0).expect("written");
            let ram = RegionDescriptor { gpa: 0, size: BLOCK as u64, user_addr: 0x7000_0000, file, file_offset: 0 };
            let table = Arc::new(self.memory.map(vec![ram]).expect("mapped"));
            let mut route = DiskRoute::new(Arc::clone(&self.journals), 0);
            route.started(Start::Fresh, &table).expect("started");
            let segments = [self.memory.page(PageId(0)).expect("a page")];
            let (id, kind, offset, len) = (RequestId(0), RequestKind::Write, at as u64, BLOCK as u64);
            let mut plan = Plan::default();
            route.route(&Request { id, kind, offset, len, segments: &segments }, &mut plan);
            route.end_of_pass(&mut plan);
        }
    }

    /// It dies with all of its processes. Gives the directory that it leaves, below this one.
    pub(in super::super) fn leave(other: Other, directory: &Path) -> PathBuf {
        let (left, journals) = (directory.join("left"), &other.journals);
        std::fs::DirBuilder::new().mode(0o700).create(&left).expect("made");
        for entry in std::fs::read_dir(journals.directory().path()).expect("files").flatten() {
            std::fs::copy(entry.path(), left.join(entry.file_name())).expect("copied");
        }
        journals.directory().remove();
        let area = AreaDirectory::take_over(&left, &placement::own_place()).expect("free");
        journals.disks().iter().for_each(|disk| area.register(&disk.options.path).expect("registered"));
        left
    }

    fn image_of(path: &Path) -> Image {
        Image::open_unlocked(path, ImageOptions::default()).expect("an image")
    }

    fn is_locked(path: &Path) -> bool {
        let other = image_of(path);
        !other.try_lock().expect("a lock")
    }

    /// Its worker and its daemon were killed, and the locks went with them. What it is owed is in the area that its VMM keeps locked.
    #[test]
    fn what_a_vmm_holds_that_has_lost_its_locks_is_not_taken_for_nothing() {
        let directory = tempfile::tempdir_in("/dev/shm").expect("tmpfs");
        let path = directory.path().join("image");
        ExtRecipe::ext4(32, 4).make(&path).expect("made");
        let attached = |path: &Path, options: &str| {
            VmOptions::for_test(&[&format!("{},placement=copy{options}", path.display())]).attach().expect("a disk")
        };
        let disks = attached(&path, "");
        let other = Other::new(&directory.path().join("others"), &disks);
        let begins = |disks: &[Attached]| {
            let images = [image_of(&disks[0].options.path)];
            lock_all(&images).expect("they are free");
            let unlock = || images[0].unlock();
            let (left, mut brought) = (LeftMeanwhile::default(), BroughtHome::default());
            let begun = finish_left_meanwhile(left, disks, &[], &mut brought, unlock, || lock_all(&images));
            assert!(is_locked(images[0].path()));
            begun.map_err(|error| format!("{error:#}"))
        };
        begins(&disks).expect("nothing of it is held");
        other.mount();
        let why = begins(&disks).expect_err("its journal is held");
        assert!(why.contains("in use"), "{why}");
        let copy = directory.path().join("copy");
        std::fs::copy(&path, &copy).expect("copied");
        let why = begins(&attached(&copy, "")).expect_err("its journal is held");
        assert!(why.contains("held in memory for a VM that runs"), "{why}");
        other.journals.directory().remove();
        begins(&disks).expect("nothing holds anything of it");
    }

    /// An image in this directory, with a file system, as a disk, and a copy of it that is only read.
    fn image_and_copy(directory: &Path, name: &str) -> [String; 2] {
        let [image, copy] = [name.to_owned(), format!("copy-of-{name}")].map(|name| directory.join(name));
        ExtRecipe::ext4(32, 4).make(&image).expect("made");
        [format!("{},placement=copy", image.display()), format!("{},placement=copy,readonly=on", copy.display())]
    }

    fn path_of(disk: &str) -> &Path {
        Path::new(disk.split(',').next().expect("a path"))
    }

    fn attached(disks: &[&String]) -> Vec<Attached> {
        let disks: Vec<&str> = disks.iter().map(|disk| disk.as_str()).collect();
        VmOptions::for_test(&disks).attach().expect("disks")
    }

    /// A VMM has outlived its worker, and the locks with that. What its image is owed keeps nobody from a copy that is only read, nor from what it
    /// has given up, and everybody from that image: in whatever order they are given.
    #[test]
    fn what_a_vmm_holds_is_told_by_the_mark_of_each_disk_in_any_order() {
        let directory = tempfile::tempdir_in("/dev/shm").expect("tmpfs");
        let [image, copy] = image_and_copy(directory.path(), "image");
        let [given_up, _] = image_and_copy(directory.path(), "given-up");
        let other = Other::new(&directory.path().join("others"), &attached(&[&image, &given_up]));
        other.mount();
        std::fs::copy(path_of(&image), path_of(&copy)).expect("copied");
        for is_reversed in [false, true] {
            let looked = |disks: [&String; 2]| {
                let mut disks = attached(&disks);
                if is_reversed {
                    disks.reverse();
                }
                LeftMeanwhile::default().is_there(&disks).map_err(|error| format!("{error:#}"))
            };
            let why = looked([&image, &copy]).expect_err("what it is owed is held");
            assert!(why.contains("in use"), "reversed: {is_reversed}: {why}");
            assert_eq!(looked([&given_up, &copy]), Ok(false), "reversed: {is_reversed}");
        }
        other.journals.directory().remove();
    }

    /// The kernel needs a while to take a VMM down: that is waited for once, whatever their number, and not where it does not matter.
    #[test]
    fn areas_in_use_are_waited_for_together() {
        let directory = tempfile::tempdir_in("/dev/shm").expect("tmpfs");
        let disks = ["a", "b"].map(|name| image_and_copy(directory.path(), name));
        let others =
            disks.each_ref().map(|[image, _]| Other::new(&directory.path().join("others"), &attached(&[image])));
        let given_up = attached(&[&disks[0][0], &disks[1][0]]);
        let mut left = LeftMeanwhile::default();
        assert!(!left.is_there(&given_up).expect("looked"), "they hold nothing");
        assert_eq!(left.patience.waited(), Duration::ZERO);
        others.iter().for_each(Other::mount);
        for [image, copy] in &disks {
            std::fs::copy(path_of(image), path_of(copy)).expect("copied");
        }
        let copies = attached(&[&disks[0][1], &disks[1][1]]);
        let mut left = LeftMeanwhile::default();
        for waits in [PATIENCE, Duration::ZERO, Duration::ZERO] {
            assert!(!left.is_there(&copies).expect("looked"), "they are only read");
            assert_eq!(
                left.patience.waited(),
                waits,
                "they may have been killed a moment ago, and are waited for once"
            );
        }
        others.iter().for_each(|other| other.journals.directory().remove());
    }

    /// It looks before it has the locks, and once more when it has them.
    #[test]
    fn an_ordinary_start_waits_once_for_what_a_disk_is_a_copy_of() {
        let directory = tempfile::tempdir_in("/dev/shm").expect("tmpfs");
        let [image, copy] = image_and_copy(directory.path(), "image");
        let other = Other::new(&directory.path().join("others"), &attached(&[&image]));
        other.mount();
        std::fs::copy(path_of(&image), path_of(&copy)).expect("copied");
        let copies = attached(&[&copy]);
        let mut left = finish_areas(&copies, &mut BroughtHome::default()).expect("it is only read");
        assert_eq!(left.patience.waited(), PATIENCE, "it may have been killed a moment ago");
        assert!(!left.is_there(&copies).expect("it is only read"));
        assert_eq!(left.patience.waited(), Duration::ZERO, "it was waited for");
        other.journals.directory().remove();
    }

    /// Somebody else finishes it, or looks at it.
    #[test]
    fn an_area_that_is_used_while_nobody_has_the_locks_is_looked_at_once_more() {
        let directory = tempfile::tempdir_in("/dev/shm").expect("tmpfs");
        let [image, _] = image_and_copy(directory.path(), "image");
        let other = Other::new(&directory.path().join("others"), &attached(&[&image]));
        other.mount();
        let (at, own) = (leave(other, directory.path()), placement::own_place());
        let disks = attached(&[&image]);
        let (mut left, mut brought) = (LeftMeanwhile::default(), BroughtHome::default());
        assert!(left.is_there(&disks).expect("looked"));
        let used = AreaDirectory::take_over(&at, &own).expect("free");
        left.finish(&disks, &[], &mut brought).expect("it is not asked what it is for");
        let in_use = left.is_there(&disks).expect_err("its journal is held there");
        assert!(is_in_use(&in_use), "{in_use:#}");
        drop(used);
        assert!(left.is_there(&disks).expect("looked"));
        left.finish(&disks, &[], &mut brought).expect("it is finished");
        assert!(!at.exists() && !left.is_there(&disks).expect("looked"));
    }

    /// A VM has a disk when its region is looked at, and dies before this one has the locks.
    #[test]
    fn what_was_left_elsewhere_before_images_were_locked_is_brought_home() {
        let directory = tempfile::tempdir_in("/dev/shm").expect("tmpfs");
        let path = directory.path().join("image");
        ExtRecipe::ext4(32, 4).make(&path).expect("made");
        let region = directory.path().join("region");
        let options =
            VmOptions::for_test(&[&format!("{},placement=nvm={},nvm-size=64", path.display(), region.display())]);
        let attached = || {
            let mut disks = options.attach().expect("a disk");
            super::super::nvm::open(&options.disks[0], &mut disks[0].options).expect("a region");
            disks
        };
        let disks = attached();
        let other = Other::new(&directory.path().join("others"), &disks);
        other.mount();
        other.journals.directory().remove();
        // It dies, and so does its lock.
        let as_left = directory.path().join("as left");
        std::fs::copy(&region, &as_left).and_then(|_| std::fs::rename(&as_left, &region)).expect("replaced");
        let (disks, images, marked) = (attached(), [image_of(&path)], placement::marked_elsewhere(&[&path]));
        assert_eq!(marked.expect("read").len(), 1);
        lock_all(&images).expect("they are free");
        let (unlock, mut brought) = (|| images[0].unlock(), BroughtHome::default());
        let left = LeftMeanwhile::default();
        finish_left_meanwhile(left, &disks, &[], &mut brought, unlock, || lock_all(&images)).expect("it begins");
        assert!(is_locked(&path) && placement::marked_elsewhere(&[&path]).expect("read").is_empty());
    }

    fn code(error: &anyhow::Error) -> String {
        format!("{:?}", crate::exit::report(error))
    }

    #[test]
    fn what_is_lost_is_said_aloud_by_a_start_as_well() {
        let whole = Report::of(Status::Recovered).with_note("the last transaction is lost");
        assert_eq!(said("home", &whole), (log::Level::Info, "home; the last transaction is lost".to_owned()));
        let damaged = Report::of(Status::Damaged).with_note("3 blocks are damaged").with_note("look at them");
        assert_eq!(said("home", &damaged), (log::Level::Warn, "home; 3 blocks are damaged; look at them".to_owned()));
    }

    /// Exit code 3 says that nothing was changed, 2 that nothing was done.
    #[test]
    fn what_is_refused_after_something_was_brought_home_has_failed() {
        let refused = || -> anyhow::Error { FinishError::Refused("it does not fit".to_owned()).into() };
        let (image, mut brought) = (Path::new("/srv/a.img"), BroughtHome::default());
        for status in [Status::None, Status::Clean] {
            brought.note(image, &Report::of(status));
        }
        let unchanged = brought.but(refused());
        assert!(unchanged.downcast_ref::<FinishError>().is_some_and(FinishError::is_refusal));
        assert_eq!(code(&unchanged), code(&refused()));
        for status in [Status::Recovered, Status::Damaged, Status::Materialised] {
            let mut brought = BroughtHome::default();
            brought.note(image, &Report::of(status));
            brought.note(image, &Report::of(status));
            for error in [refused(), crate::exit::usage("a mistake"), crate::exit::refused("damaged")] {
                let error = brought.but(error);
                assert_eq!(code(&error), code(&anyhow::anyhow!("failed")), "{error}");
                assert!(error.to_string().ends_with("was brought home to /srv/a.img"), "{error}");
            }
        }
    }
}
