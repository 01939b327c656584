//! Disks that come to a VM, or leave it, while its guest runs.
//!
//! A worker serves the disks that it began with. Others are served by the next one, which goes on with the guest as after a death: so
//! this one prepares them, has them kept, and is replaced. Must never: have something kept that the next worker cannot go on with,
//! or take a disk that somebody uses. Failure story: what cannot be prepared is refused while this worker serves on; what was kept
//! before this worker died, and is of no disk that is served, is let go by the next one ([`clean_up`]).

use super::{Attached, VmOptions, finish_areas, open_image, require_raw};
use crate::raw::KnownRaw;
use crate::worker::Line;
use anyhow::Context;
use block_device::{DeviceHandle, Image};
use block_route::Route;
use guest_memory::VmMemory;
use placement::{AreaDirectory, Journals, JournalsOptions, PlacementKind};
use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use supervision::{Kept, Said};

const IMAGE: &str = "image ";
const DOOR: &str = "door ";
/// Bounds that were set while the guest ran.
pub const THROTTLE: &str = "throttle ";

/// The key of a disk's image.
pub fn image_key(disk: &str) -> String {
    format!("{IMAGE}{disk}")
}

/// The key of a disk's door, whose number belongs to it.
pub fn door_key(disk: &str) -> String {
    format!("{DOOR}{disk}")
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

/// Lets go of what is kept for disks that are not served any more.
pub(super) fn clean_up(kept: &Kept, doors: &Doors, attached: &[Attached], line: &Line) -> std::io::Result<()> {
    let is_served = |name: &str| attached.iter().any(|disk| disk.options.name == name);
    for (name, disk) in doors.numbers.iter().filter(|(name, _)| !is_served(name)) {
        line.say(&Said::Shut { disk: *disk }, &[])?;
        line.say(&Said::Forget { key: door_key(name) }, &[])?;
    }
    for beginning in [IMAGE, THROTTLE] {
        for (name, _) in kept.all(beginning).iter().filter(|(name, _)| !is_served(name)) {
            line.say(&Said::Forget { key: format!("{beginning}{name}") }, &[])?;
        }
    }
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
    let mut attached = options.attach()?;
    attached.retain(|disk| names.contains(&disk.options.name));
    for (option, name) in options.disks.iter().filter_map(|option| Some((option, option.name.as_ref()?))) {
        anyhow::ensure!(
            option.log_writes.is_none() || !names.contains(name),
            "disk {name}: a log of writes has to begin with its VM"
        );
    }
    finish_areas(&attached)?;
    require_raw(&mut attached, known)?;
    for disk in &attached {
        for brought in placement::finish_earlier(&disk.options, &[])? {
            log::info!("{}: {brought}", disk.options.path.display());
        }
    }
    let mut prepared = Vec::new();
    for disk in &attached {
        let image = open_image(disk)?;
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
        line.keep(&image_key(&self.name), "", Some(self.image.file().as_fd()))?;
        // They are the next worker's now.
        self.image.leave_locks();
        Ok(())
    }
}

/// Brings home what a disk is owed that its VMM has let go of. Nobody may come to it any more.
///
/// # Errors
/// When storage fails: the disk is as it was.
pub fn finish(journals: &Journals, handle: &DeviceHandle<dyn Route>, disk: usize) -> anyhow::Result<()> {
    journals.recover_disk(disk)?;
    let name = &journals.disk(disk).options.name;
    anyhow::ensure!(!journals.holds_of(disk), "disk {name}: something of it is held still; ask again");
    handle.image().file().sync_all().with_context(|| format!("disk {name}: flushing its image"))
}

/// The socket of a disk that nobody is to find any more.
pub fn close_socket(path: &Path) {
    if let Err(error) = std::fs::remove_file(path) {
        log::debug!("removing {}: {error}", path.display());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn doors_keep_their_numbers() {
        let mut doors = Doors::default();
        assert_eq!((doors.of("a"), doors.of("b"), doors.of("a")), ((0, true), (1, true), (0, false)));
        let mut kept = Kept::default();
        for (name, (number, _)) in [("b", doors.of("b"))] {
            kept.take_in(door_key(name), number.to_string(), Vec::new());
        }
        let mut later = Doors::kept(&kept);
        assert!(later.has("b") && !later.has("a"));
        assert_eq!((later.of("c"), later.of("b")), ((2, true), (1, false)));
    }
}
