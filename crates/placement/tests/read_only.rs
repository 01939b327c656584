//! Disks that a VM may only read: nothing is ever owed to them, whatever the guest writes to its other disks.

use guest_kit::image::{ExtRecipe, Journal, journal_device};
use guest_memory::VmMemory;
use placement::{AreaDirectory, DiskOptions, Journals, JournalsOptions, PlacementKind};
use std::path::Path;

/// How many journals are found on these disks, of which the first is only read or not.
fn journals_found(directory: &Path, images: &[&Path], first_is_read_only: bool) -> usize {
    let area = AreaDirectory::create(&directory.join("vms"), &directory.join("registry")).expect("a directory");
    let options = |(index, image): (usize, &&Path)| DiskOptions {
        name: format!("disk{index}"),
        path: image.to_path_buf(),
        placement: PlacementKind::Retain,
        honour_flush: true,
        read_only: first_is_read_only && index == 0,
        nvm: None,
        remote: None,
        durable_within: None,
        write_log: None,
    };
    let disks = images.iter().enumerate().map(options).collect();
    let options = JournalsOptions { disks, budget_bytes: 64 << 20, tracer: None };
    Journals::new(&VmMemory::new(), area, options).expect("journals").logs().len()
}

/// The journal of a file system on a disk that is only read may be a device that this guest writes: what it commits there
/// must not be written home, to an image that others read.
#[test]
fn no_journal_is_held_for_a_disk_that_is_only_read() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = |name: &str| directory.path().join(name);
    let (internal, external, journal) = (path("internal"), path("external"), path("journal"));
    ExtRecipe::ext4(32, 4).make(&internal).expect("made");
    journal_device(&journal, 16, 4096).expect("made");
    ExtRecipe { journal: Journal::External(journal.clone()), ..ExtRecipe::ext4(64, 0) }.make(&external).expect("made");
    for images in [vec![internal.as_path()], vec![&external, &journal]] {
        assert_eq!(journals_found(directory.path(), &images, false), 1, "{images:?}");
        assert_eq!(journals_found(directory.path(), &images, true), 0, "{images:?}");
    }
}
