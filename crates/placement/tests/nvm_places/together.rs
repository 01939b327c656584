//! The regions of one disk are brought home together or not at all: an image that one of them must not be brought home to is the wrong one for
//! the others, too.

use super::*;
use recovery::Error;

/// Image and regions as a death leaves them, and the image as it was before.
struct Left {
    older: Vec<u8>,
    image: Vec<u8>,
    region: Vec<u8>,
}

/// Two file systems whose guest has committed to both; what was committed until the older image was made has left the regions since.
fn left(rig: &mut Rig) -> Left {
    for which in 0..2 {
        rig.superblock(which, true);
        assert_eq!(rig.commit(which, IN_USE, &content(which as u8)), 0, "a region has it");
    }
    let older = std::fs::read(&rig.image).expect("read");
    for which in 0..2 {
        let at = rig.home_at(which, IN_USE);
        assert_eq!(rig.request(RequestKind::Write, at, &mut content(which as u8)), 0, "absorbed");
    }
    rig.journals.region(0).expect("regions").request_checkpoint();
    for _ in 0..3 {
        let mut plan = Plan::default();
        rig.route.woken(&mut plan);
        rig.carry_out(plan);
    }
    for which in 0..2 {
        assert!(rig.stored(which, IN_USE) == content(which as u8), "it went home");
        assert_eq!(rig.commit(which, IN_USE + 1, &content(10 + which as u8)), 0, "a region has it");
    }
    let [image, region] = [&rig.image, &rig.region].map(|path| std::fs::read(path).expect("read"));
    for which in 0..2 {
        let at = rig.file_systems[which].log_at[0] as usize;
        assert!(image[at..][..BLOCK as usize] != older[at..][..BLOCK as usize], "their marks differ");
    }
    Left { older, image, region }
}

impl Left {
    /// The image on which this file system is an older copy, and the other one was idle meanwhile.
    fn older_in(&self, which: usize) -> Vec<u8> {
        let mut image = self.image.clone();
        let bytes = PARTITIONS[which] as usize..(PARTITIONS[which] + FILE_SYSTEM_BLOCKS * BLOCK) as usize;
        image[bytes.clone()].copy_from_slice(&self.older[bytes]);
        image
    }

    /// The regions, with something else in a block of this file system.
    fn damaged_in(&self, which: usize) -> Vec<u8> {
        let mut region = self.region.clone();
        let first = which * region.len() / 2;
        let block = content(10 + which as u8);
        let at = (first..first + region.len() / 2 - block.len())
            .step_by(64)
            .find(|at| region[*at..][..block.len()] == block[..])
            .expect("the region has it");
        region[at + 100] ^= 1;
        region
    }
}

/// Whoever begins next with this image and these regions: what came of that, what was brought home, and both as they are then.
fn finish(rig: &Rig, image: &[u8], region: &[u8]) -> (Result<(), Error>, Vec<u64>, [Vec<u8>; 2]) {
    let paths = [&rig.image, &rig.region].map(|path| path.with_extension("left"));
    std::fs::write(&paths[0], image).expect("written");
    std::fs::write(&paths[1], region).expect("written");
    let mut options = NvmOptions::new(&paths[1]);
    options.region = RegionChoice { index: 0, count: 2 };
    options.more_regions = vec![RegionChoice { index: 1, count: 2 }];
    let nvm = NvmDisk::open(options).expect("nobody has them");
    let disk = Disk::open(&paths[0], Access::Write).expect("an image");
    let mut brought = Vec::new();
    let outcome = nvm.finish_earlier(&disk, &mut brought);
    let offsets = brought.iter().map(|finished| finished.offset).collect();
    (outcome, offsets, paths.map(|path| std::fs::read(path).expect("read")))
}

#[track_caller]
fn assert_refused(rig: &Rig, image: &[u8], region: &[u8], why: &str) {
    let (outcome, brought, [image_after, region_after]) = finish(rig, image, region);
    match outcome {
        Err(Error::Refused(sentence)) => assert!(sentence.contains(why), "{sentence}"),
        other => panic!("it is not refused: {other:?}"),
    }
    assert!(brought.is_empty(), "{brought:?}");
    assert!(image_after == image, "the image was changed");
    assert!(region_after == region, "a region was changed");
}

/// The mark of a file system that was idle is the same on both images, and so is one that is never written anew.
#[test]
fn an_image_that_is_older_by_one_of_its_marks_gets_nothing_of_any_region() {
    let mut rig = Rig::new(2);
    let left = left(&mut rig);
    for which in 0..2 {
        assert_refused(&rig, &left.older_in(which), &left.region, "this image is an older copy");
    }
    let (outcome, brought, [image, _]) = finish(&rig, &left.image, &left.region);
    outcome.expect("they belong together");
    assert_eq!(brought, PARTITIONS);
    for which in 0..2 {
        let at = rig.home_at(which, IN_USE + 1) as usize;
        assert!(image[at..][..BLOCK as usize] == content(10 + which as u8)[..], "file system {which}");
    }
}

#[test]
fn a_region_that_is_damaged_keeps_the_others_as_they_are() {
    let mut rig = Rig::new(2);
    let left = left(&mut rig);
    for which in 0..2 {
        assert_refused(&rig, &left.image, &left.damaged_in(which), "is damaged");
    }
    // Nor is anything brought home where one of two file systems is not to be seen.
    for start in PARTITIONS {
        let mut image = left.image.clone();
        let magic_at = (start + extfs::SUPERBLOCK_OFFSET) as usize + 56;
        image[magic_at..magic_at + 2].fill(0);
        assert_refused(&rig, &image, &left.region, "there is none like it");
    }
}

/// Which of them the disk was used with last is said by nobody.
#[test]
fn of_two_regions_with_one_journal_neither_is_brought_home() {
    let mut rig = Rig::new(2);
    let left = left(&mut rig);
    let half = left.region.len() / 2;
    for which in 0..2 {
        let copied = left.region[which * half..][..half].repeat(2);
        assert_refused(&rig, &left.image, &copied, "so one of them is a copy");
    }
}

/// A person names one region: the others of its file are asked as well.
#[test]
fn a_region_that_is_named_is_not_brought_home_to_an_image_that_another_one_calls_older() {
    let mut rig = Rig::new(2);
    let left = left(&mut rig);
    let [image, region] = [&rig.image, &rig.region].map(|path| path.with_extension("left"));
    std::fs::write(&region, &left.region).expect("written");
    for (which, named) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
        for access in [Access::Read, Access::Write] {
            let bytes = left.older_in(which);
            std::fs::write(&image, &bytes).expect("written");
            let choice = RegionChoice { index: named, count: 2 };
            let disk = Disk::open(&image, access).expect("an image");
            let options = OpenOptions { region: choice, ..OpenOptions::new(&region) };
            let error = recover_image(&disk, options, access).expect_err("it is an older copy");
            assert!(error.is_refusal() && error.to_string().contains("an older copy"), "{error}");
            assert!(std::fs::read(&image).expect("read") == bytes, "the image was changed");
            assert!(std::fs::read(&region).expect("read") == left.region, "a region was changed");
        }
    }
}

/// A mark cannot be made durable, nor what stood there before: the region stays claimed, and holds nothing. The guest mounts again, and has the
/// other one.
fn claimed_in_vain(rig: &mut Rig) {
    rig.may_fail = true;
    write_log::simulated_flushes::fail(1000);
    rig.superblock(0, true);
    write_log::simulated_flushes::fail(0);
    assert_eq!(rig.failed.len(), 1, "its guest hears of it");
    assert!(!rig.log(0).is_open());
    rig.superblock(0, true);
    assert_eq!(rig.commit(0, IN_USE, &content(1)), 0, "a region has it");
    assert_eq!(has_owner(&std::fs::read(&rig.region).expect("read")), [true; 2]);
}

/// Whether each of two regions is somebody's.
fn has_owner(region: &[u8]) -> [bool; 2] {
    let (first, second) = region.split_at(region.len() / 2);
    [first, second]
        .map(|region| nvm_journal::Found::read(region).expect("whole").is_some_and(|found| found.owner.is_some()))
}

#[test]
fn a_region_that_was_claimed_in_vain_is_no_obstacle_to_the_next_start() {
    let mut rig = Rig::new(2);
    claimed_in_vain(&mut rig);
    let [image, region] = [&rig.image, &rig.region].map(|path| std::fs::read(path).expect("read"));
    let (outcome, brought, [image_after, region_after]) = finish(&rig, &image, &region);
    outcome.expect("one of them has it");
    assert_eq!(brought, [PARTITIONS[0]; 2]);
    let at = rig.home_at(0, IN_USE) as usize;
    assert!(image_after[at..][..BLOCK as usize] == content(1)[..], "what was committed is lost");
    assert_eq!(has_owner(&region_after), [false; 2]);
    // Where the one that has it is missing, it is not taken for that.
    let mut alone = region.clone();
    alone[region.len() / 2..].fill(0);
    assert_refused(&rig, &image, &alone, "is in another region");
}

#[test]
fn a_region_that_was_claimed_in_vain_is_no_obstacle_to_the_worker_that_follows() {
    let mut rig = Rig::new(2);
    claimed_in_vain(&mut rig);
    rig.die().expect("it goes on");
    assert!(rig.log(0).is_open() && rig.read(0, IN_USE) == content(1));
    rig.superblock(1, true);
    assert_eq!(rig.commit(1, IN_USE, &content(2)), 0, "it was given back, and has this one now");
}
