//! What earlier processes have left for the images of a VM goes home before it is served.
//!
//! Must never: call something refused, which promises that nothing was changed, once something was; or pass over what was done because of
//! what failed after it. Failure story: each log goes home by itself, and what could not stays where it is, with its sentence.

use super::Attached;
use crate::takeover::{PATIENCE, take_over};
use block_device::Image;
use placement::{AreaDirectory, Brought, DirectoryError, FinishError};
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

/// Finishes what an earlier process left for these images in areas in tmpfs.
pub(super) fn finish_areas(disks: &[Attached], brought: &mut BroughtHome) -> anyhow::Result<()> {
    finish_areas_but(disks, &mut HashSet::new(), brought)
}

/// The same once the images are locked. Until then they were anybody's: a VM of this host that had them, and has died or was left, may have
/// left something since that was looked for last. What is finished locks the images itself, so they are given up for that with `unlock`, and taken
/// again with `lock`, until nothing is found while they are locked. `own` is the directory of who asks, if there is one.
pub(super) fn finish_left_meanwhile(
    disks: &[Attached],
    own: Option<&Path>,
    brought: &mut BroughtHome,
    unlock: impl Fn(),
    lock: impl Fn() -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let mut looked_at: HashSet<PathBuf> = own.map(Path::to_owned).into_iter().collect();
    loop {
        refuse_left(disks)?;
        if !has_area_but(disks, &mut looked_at)? {
            return Ok(());
        }
        unlock();
        finish_areas_but(disks, &mut looked_at, brought)?;
        lock()?;
    }
}

/// Whether there is an area that was not looked at yet, and may hold something for one of these images, which are locked. Whoever lives and has
/// one has given them up, and holds nothing for them; what else their marks say, who looks at the journals finds out.
fn has_area_but(disks: &[Attached], looked_at: &mut HashSet<PathBuf>) -> anyhow::Result<bool> {
    let registries = placement::own_places()?;
    for (disk, registry) in disks.iter().flat_map(|disk| registries.iter().map(move |registry| (disk, registry))) {
        loop {
            let Some((left, _)) = next_area(&disk.options.path, registry, &mut looked_at.clone())? else { break };
            match take_over(&left, registry, Instant::now() + PATIENCE) {
                Ok(_) => return Ok(true),
                Err(error) if matches!(error, DirectoryError::InUse { .. }) || error.is_missing() => {
                    looked_at.insert(left);
                }
                Err(error) => return Err(error.into()),
            }
        }
    }
    Ok(false)
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

/// Finishes those areas that were not looked at yet.
fn finish_areas_but(
    disks: &[Attached],
    looked_at: &mut HashSet<PathBuf>,
    brought: &mut BroughtHome,
) -> anyhow::Result<()> {
    let registries = placement::own_places()?;
    for (disk, registry) in disks.iter().flat_map(|disk| registries.iter().map(move |registry| (disk, registry))) {
        // One that is gone may have been named in front of another one.
        while let Some((left, is_by_key)) = next_area(&disk.options.path, registry, looked_at)? {
            finish_area(&left, is_by_key, registry, disk, disks, brought)?;
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

/// An area that may hold something for this image and was not looked at yet, and whether it is the image itself that is named for it.
fn next_area(
    path: &Path,
    registry: &Path,
    looked_at: &mut HashSet<PathBuf>,
) -> anyhow::Result<Option<(PathBuf, bool)>> {
    let by_key = AreaDirectory::find(registry, path).map_err(|error| missing(path, error))?;
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

fn finish_area(
    left: &Path,
    is_by_key: bool,
    registry: &Path,
    disk: &Attached,
    disks: &[Attached],
    brought: &mut BroughtHome,
) -> anyhow::Result<()> {
    let path = disk.options.path.display();
    let directory = match take_over(left, registry, Instant::now() + PATIENCE) {
        Ok(directory) => directory,
        // A copy of what a VM that runs is served, or the same by another name, as by a loop device: which cannot be told.
        Err(DirectoryError::InUse { .. }) if !is_by_key && disk.options.read_only => {
            log::warn!(
                "{path}: its journal is held in memory for a VM that runs, of whose image it is a copy or another name; what is held \
                 is not on it"
            );
            return Ok(());
        }
        Err(DirectoryError::InUse { .. }) if !is_by_key => {
            let sentence = format!(
                "{path}: its journal is held in memory for a VM that runs (in {}): it is that VM's image by another name, or a \
                 copy without what is held; nothing was changed. Copies are made with 'amberlog snapshot'. To use this one \
                 as it is, run 'e2fsck -fy' on it first, which gives up what is missing",
                left.display()
            );
            return Err(FinishError::Refused(sentence).into());
        }
        // Whoever had it is done with it, and has removed it: another VM with the same read-only disk, for one.
        Err(error) if error.is_missing() => return Ok(()),
        Err(error) => return Err(error.into()),
    };
    let images: Vec<PathBuf> = disks.iter().map(|disk| disk.options.path.clone()).collect();
    let mut outcome = placement::finish_directory(&directory, &images)?;
    for log in &outcome.finished {
        brought.note(&log.image, &log.recovery);
        log::info!(
            "{}: finished an earlier run's recovery: {} transactions, {} blocks written home",
            log.image.display(),
            log.recovery.transactions,
            log.recovery.blocks_written
        );
    }
    if outcome.failed.is_empty() {
        placement::remove_finished(&directory);
    }
    // What is left for images that this VM does not have waits for these, and keeps nobody from the others.
    let of_named = outcome.take_failure_of_named();
    for failed in outcome.failed.iter().filter(|failed| !failed.is_of_named) {
        log::warn!(
            "{} keeps what is held for {}, which is no disk of this VM: {}",
            left.display(),
            failed.image.display(),
            failed.error
        );
    }
    of_named.map_or(Ok(()), |error| Err(error.into()))
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
            log::info!("{}: {one}", path.display());
            brought.note(
                path,
                match one {
                    Brought::Region(finished) => &finished.recovery,
                    Brought::Server(recovered) => &recovered.report,
                },
            );
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
mod tests {
    use super::*;

    fn code(error: &anyhow::Error) -> String {
        format!("{:?}", crate::exit::report(error))
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
