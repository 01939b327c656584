//! Image and region of placement `nvm` are two things that can be copied, restored and mixed up. Only what belongs together is brought
//! together; all else is refused, and left as it is.

#[path = "remount_model/guest.rs"]
#[allow(dead_code, reason = "made for a model that does more")]
mod guest;

use guest::{Guest, Kind};
use nvm_journal::medium::{OpenOptions, RegionChoice};
use placement::{
    AreaDirectory, DiskOptions, Journals, JournalsOptions, NvmDisk, NvmFinished, NvmOptions, PlacementKind,
    recover_image,
};
use recovery::{Access, Disk, Error, Status};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

/// A disk and its region at one moment, and what the disk's blocks are to be.
struct Moment {
    image: Vec<u8>,
    region: Vec<u8>,
    expected: BTreeMap<u64, Vec<u8>>,
}

fn moment(guest: &Guest, region: &Path) -> Moment {
    let (image, expected) = guest.stored();
    Moment { image, region: std::fs::read(region).expect("the region"), expected }
}

/// A life: moments between which blocks have left the region, with more committed since.
fn moments(image: &[u8], seed: u64) -> Vec<Moment> {
    let directory = tempfile::tempdir_in("/dev/shm").expect("tmpfs");
    let region = directory.path().join("region");
    let mut guest = Guest::on_region(image, &region, seed);
    let mut moments = Vec::new();
    for _ in 0..4 {
        guest.commit();
        guest.commit();
        guest.write_home();
        moments.push(moment(&guest, &region));
        guest.empty_region();
    }
    moments
}

fn region_options(path: &Path) -> OpenOptions {
    OpenOptions {
        path: path.to_owned(),
        region: RegionChoice::default(),
        create_bytes: None,
        delay: None,
        stores: None,
    }
}

/// Brings `region` home to `image`. Gives what came of it, and both as they are then.
fn recover(image: &[u8], region: &[u8]) -> (Result<Option<NvmFinished>, Error>, Vec<u8>, Vec<u8>) {
    let directory = tempfile::tempdir_in("/dev/shm").expect("tmpfs");
    let (image_path, region_path) = (directory.path().join("image"), directory.path().join("region"));
    std::fs::write(&image_path, image).expect("written");
    std::fs::write(&region_path, region).expect("written");
    let outcome = Disk::open(&image_path, Access::Write)
        .and_then(|disk| recover_image(&disk, region_options(&region_path), Access::Write));
    let read = |path: &Path| std::fs::read(path).expect("read");
    (outcome, read(&image_path), read(&region_path))
}

#[track_caller]
fn assert_recovered(moment: &Moment) -> Vec<u8> {
    let (outcome, image, _) = recover(&moment.image, &moment.region);
    let finished = outcome.expect("they belong together").expect("something is owed");
    assert_eq!(finished.recovery.status, Status::Recovered);
    for (home, content) in &moment.expected {
        let block_bytes = content.len();
        assert!(image[*home as usize * block_bytes..][..block_bytes] == content[..], "block {home}");
    }
    image
}

#[track_caller]
fn assert_refused(image: &[u8], region: &[u8], why: &str) {
    let (outcome, image_after, region_after) = recover(image, region);
    match outcome {
        Err(Error::Refused(sentence)) => assert!(sentence.contains(why), "{sentence}"),
        other => panic!("it is not refused: {other:?}"),
    }
    assert!(image_after == image && region_after == region, "something was changed");
}

#[test]
fn an_image_and_a_region_of_two_moments_are_told_apart() {
    for kind in [Kind::Checksums, Kind::SmallBlocks] {
        let image = guest::images(kind).remove(0);
        let moments = moments(&image, 3);
        for (at, of_image) in moments.iter().enumerate() {
            for (other, of_region) in moments.iter().enumerate() {
                if at == other {
                    assert_recovered(of_image);
                    continue;
                }
                if matches!(kind, Kind::SmallBlocks) {
                    // The superblock shares its page of the host's cache with other blocks: the mark is not counted on there.
                    continue;
                }
                let is_restored_image = at < other;
                let why = if is_restored_image { "this image is an older copy" } else { "the region is an older copy" };
                assert_refused(&of_image.image, &of_region.region, why);
            }
        }
        // Before its journal was ever opened, and after.
        assert_refused(&image, &moments[2].region, "another epoch");
    }
}

/// Data goes home past the journal, and what refers to it is committed after a flush. Nothing leaves the region meanwhile. An image and a
/// region that are taken for those of one moment make a disk on which what refers to data finds that, or what came right after it.
#[test]
fn what_refers_to_data_never_comes_beside_other_data() {
    for is_empty_first in [false, true] {
        let directory = tempfile::tempdir_in("/dev/shm").expect("tmpfs");
        let region = directory.path().join("region");
        let mut guest = Guest::on_marked_region(&guest::images(Kind::Checksums).remove(0), &region, 8);
        guest.commit_reference(0);
        if is_empty_first {
            guest.empty_region();
        }
        let mut moments = vec![moment(&guest, &region)];
        for generation in 1..5 {
            guest.write_data(generation);
            moments.push(moment(&guest, &region));
            guest.flush();
            moments.push(moment(&guest, &region));
            guest.commit_reference(generation);
            moments.push(moment(&guest, &region));
        }
        let (mut refused, mut accepted) = (0, 0);
        for (at, of_image) in moments.iter().enumerate() {
            for (other, of_region) in moments.iter().enumerate() {
                let (outcome, image, _) = recover(&of_image.image, &of_region.region);
                if let Err(error) = outcome {
                    assert!(at != other && matches!(error, Error::Refused(_)), "moments {at} and {other}: {error}");
                    refused += 1;
                    continue;
                }
                accepted += 1;
                let (reference, data) = guest.generations(&image);
                // Between two marks, which is from one flush to the next here, a commit comes and the data of the next one.
                assert!(
                    (reference..=reference + 2).contains(&data),
                    "the image of moment {at} and the region of {other}: reference {reference} beside data {data}"
                );
            }
        }
        assert!(refused > 0 && accepted >= moments.len(), "{refused} refused, {accepted} accepted");
    }
}

#[test]
fn a_copy_of_a_region_that_was_recovered_from_is_owed_nothing() {
    let image = guest::images(Kind::Checksums).remove(0);
    let moments = moments(&image, 4);
    let recovered = assert_recovered(&moments[1]);
    let (outcome, image_after, _) = recover(&recovered, &moments[1].region);
    let finished = outcome.expect("nothing is wrong with it").expect("it says so");
    assert_eq!(finished.recovery.status, Status::Clean);
    assert!(image_after == recovered, "nothing was written");
    // Nor is it when the disk was used since, with a region of its own.
    let directory = tempfile::tempdir_in("/dev/shm").expect("tmpfs");
    let region = directory.path().join("region");
    let mut guest = Guest::on_region(&recovered, &region, 5);
    guest.commit();
    let since = moment(&guest, &region);
    assert_refused(&since.image, &moments[1].region, "in another region");
    assert_refused(&moments[1].image, &since.region, "in another region");
    assert_recovered(&since);
}

/// A clone of the disk has the same journal, and may stand at the number at which a recovery from the region leaves it.
#[test]
fn an_image_that_only_stands_where_a_recovery_leaves_it_is_not_taken_for_recovered() {
    for kind in [Kind::Checksums, Kind::SmallBlocks] {
        let moment = moments(&guest::images(kind).remove(0), 4).remove(1);
        let mut clone = assert_recovered(&moment);
        let found = nvm_journal::Found::read(&moment.region).expect("whole").expect("a region");
        let (block, _) = found.latest.last_key_value().expect("it holds something");
        clone[*block as usize * found.geometry.block_bytes as usize] ^= 1;
        assert_refused(&clone, &moment.region, "another epoch");
    }
}

/// Two hosts have the disk, and each a region: whoever does not have the one that the journal is in takes nothing.
#[test]
fn another_host_without_the_region_does_not_begin() {
    let image = guest::images(Kind::Checksums).remove(0);
    let moment = moments(&image, 6).remove(1);
    let directory = tempfile::tempdir_in("/dev/shm").expect("tmpfs");
    let path = directory.path().join("image");
    std::fs::write(&path, &moment.image).expect("written");
    let mut options = NvmOptions::new(directory.path().join("other region"));
    options.create_bytes = 4 << 20;
    let nvm = Arc::new(NvmDisk::open(options).expect("a region can be made"));
    let disk = Disk::open(&path, Access::Write).expect("the image");
    match nvm.finish_earlier(&disk, &mut Vec::new()) {
        Err(Error::Refused(sentence)) => assert!(sentence.contains("is in an NVM region"), "{sentence}"),
        other => panic!("it is not refused: {other:?}"),
    }
    drop(disk);
    for placement in [PlacementKind::Retain, PlacementKind::Storage, PlacementKind::Nvm] {
        let area = AreaDirectory::create(&directory.path().join("vms"), &directory.path().join("registry"));
        let options = DiskOptions {
            name: "disk".to_owned(),
            path: path.clone(),
            placement,
            honour_flush: false,
            read_only: false,
            nvm: (placement == PlacementKind::Nvm).then(|| Arc::clone(&nvm)),
            remote: None,
            durable_within: None,
            write_log: None,
        };
        let options = JournalsOptions { disks: vec![options], budget_bytes: 1 << 20, tracer: None };
        let memory = guest_memory::VmMemory::new();
        let error = Journals::new(&memory, area.expect("a directory"), options).expect_err("it is refused");
        assert!(error.to_string().contains("is in a region of NVM"), "{error}");
    }
    assert!(std::fs::read(&path).expect("read") == moment.image, "something was changed");
}

/// A VM's guest had its journal on storage from the beginning: there is a file for a region, and nobody ever made one of it.
#[test]
fn a_region_that_nothing_was_ever_put_into_owes_nothing_to_an_image_that_says_so() {
    let image = guest::images(Kind::Checksums).remove(0);
    let moment = moments(&image, 8).remove(1);
    let nothing = vec![0; moment.region.len()];
    let (outcome, after, region) = recover(&image, &nothing);
    assert!(matches!(outcome, Ok(None)), "{outcome:?}");
    assert!(after == image && region == nothing, "something was changed");
    assert_refused(&moment.image, &nothing, "holds nothing");
    let mut other = nothing.clone();
    other[100] = 1;
    assert_refused(&image, &other, "is no NVM region of amberlog's");
}

#[test]
fn a_region_that_is_cut_short_or_of_another_version_is_refused() {
    let image = guest::images(Kind::Checksums).remove(0);
    let moment = moments(&image, 7).remove(2);
    for len in [4096, moment.region.len() / 2, moment.region.len() - 4096] {
        let (outcome, after, _) = recover(&moment.image, &moment.region[..len]);
        assert!(matches!(outcome, Err(Error::Refused(_))), "{len} bytes: {outcome:?}");
        assert!(after == moment.image, "{len} bytes: something was changed");
    }
    // Whatever byte of the header is another: the version is among them.
    for at in 0..32 {
        let mut region = moment.region.clone();
        region[at] ^= 1;
        let (outcome, after, _) = recover(&moment.image, &region);
        assert!(matches!(outcome, Err(Error::Refused(_))), "byte {at}: {outcome:?}");
        assert!(after == moment.image, "byte {at}: something was changed");
    }
}

/// Something is written over a transaction of the open log, which no kernel does. What comes then is no transaction of its
/// kernel's, however much it looks like the next one; the region has nothing more to do with the disk, which says so.
#[test]
fn a_log_that_is_written_over_leaves_nothing_to_bring_home() {
    for (kind, seed) in
        [Kind::Checksums, Kind::SmallBlocks].into_iter().flat_map(|kind| (1..12).map(move |n| (kind, n)))
    {
        let image = guest::images(kind).remove(0);
        let directory = tempfile::tempdir_in("/dev/shm").expect("tmpfs");
        let region = directory.path().join("region");
        let mut guest = Guest::on_region(&image, &region, seed);
        guest.commit();
        guest.commit();
        // Killed while the log ends, or afterwards.
        let mut moments = Vec::new();
        let read_region = || std::fs::read(&region).expect("the region");
        let blocks = guest.write_over_live(seed % 2 == 0, &mut |guest| {
            moments.push((guest.stored_image(), read_region()));
        });
        moments.push((guest.stored_image(), read_region()));
        drop(guest);
        for (when, (stored, of_region)) in moments.into_iter().enumerate() {
            let (outcome, image, _) = recover(&stored, &of_region);
            assert!(outcome.is_ok(), "{kind:?}, seed {seed}, moment {when}: {outcome:?}");
            for (home, content) in &blocks {
                let at = *home as usize * content.len();
                assert!(
                    image[at..at + content.len()] != content[..],
                    "{kind:?}, seed {seed}, moment {when}: block {home} was brought home"
                );
            }
        }
    }
}
