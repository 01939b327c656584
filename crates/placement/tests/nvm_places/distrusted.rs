//! A journal in a region that is not what it seems: something lies between the file system and the disk, and its blocks are elsewhere.

use super::*;
use placement::HeldMark;
use recovery::Status;
use std::sync::atomic::{AtomicU64, Ordering};

/// What a kernel finds in the log when it has begun later.
fn expected() -> BTreeMap<u64, Vec<u8>> {
    [(10, 30), (12, 22), (13, 23)].map(|(n, seed)| (IN_USE + n, content(seed))).into()
}

/// A guest whose first four blocks land on others. Gives the superblock with which its tail passes them, which proves it.
fn mapped_elsewhere(rig: &mut Rig) -> Vec<u8> {
    rig.superblock(0, true);
    for n in 0..4 {
        rig.commit(0, IN_USE + n, &content(10 + n as u8));
    }
    let of = &rig.file_systems[0];
    let tail = (of.builder.position, of.builder.sequence);
    for n in 0..4 {
        rig.commit(0, IN_USE + 10 + n, &content(20 + n as u8));
    }
    rig.commit(0, IN_USE + 10, &content(30));
    // One is written home, and absorbed; on one comes something else.
    assert_eq!(write_home(rig, IN_USE + 11, 21), 0);
    write_home(rig, IN_USE + 12, 99);
    for n in 0..4 {
        write_home(rig, IN_USE + 100 + n, 10 + n as u8);
    }
    let mut block = rig.file_systems[0].superblock.clone();
    SuperblockEdit::new(&mut block).expect("a superblock").start(tail.0).sequence(tail.1).seal();
    block
}

fn write_home(rig: &mut Rig, block: u64, seed: u8) -> u64 {
    let at = rig.home_at(0, block);
    rig.request(RequestKind::Write, at, &mut content(seed))
}

fn tail_moves(rig: &mut Rig, block: &mut [u8]) {
    let at = rig.file_systems[0].log_at[0];
    rig.request(RequestKind::Write, at, block);
    let fault = rig.journals.disk(0).fault().unwrap_or_default();
    assert!(fault.contains("is not what it seemed"), "{fault}");
}

#[test]
fn it_goes_to_its_own_place_as_it_is() {
    for is_gone in [false, true] {
        let mut rig = Rig::new(1);
        let mut block = mapped_elsewhere(&mut rig);
        if is_gone {
            // Nothing more is done before the guest is gone.
            rig.holds = Box::new(|operation| operation.operation == Operation::Write);
            let at = rig.home_at(0, IN_USE + 13);
            rig.request(RequestKind::Write, at, &mut [1; 512]);
            rig.held.clear();
        }
        tail_moves(&mut rig, &mut block);
        rig.holds = Box::new(|_| false);
        if is_gone {
            rig.start("next").expect("started");
        } else {
            assert_eq!(rig.log(0).placement, PlacementKind::Storage);
        }
        assert!(rig.replayed(0) == expected(), "{:?}", rig.replayed(0).keys());
        assert!(rig.stored(0, IN_USE + 11) == content(21) && rig.stored(0, IN_USE + 12) == content(99));
        for n in 0..4 {
            assert!(rig.stored(0, IN_USE + n) != content(10 + n as u8), "written home by us");
        }
        if is_gone {
            continue;
        }
        // The guest goes on, and storage has it.
        assert!(rig.commit(0, IN_USE + 14, &content(31)) > 2 * BLOCK);
        let mut replayed = rig.replayed(0);
        assert!(replayed.remove(&(IN_USE + 14)) == Some(content(31)) && replayed == expected());
        rig.superblock(0, false);
        rig.superblock(0, true);
        assert!(rig.commit(0, IN_USE, &content(32)) > 2 * BLOCK, "it stays there");
    }
}

/// A flush of another part of the disk fails while it is written there, and storage says so to whoever asked for that one: it stays in its region.
#[test]
fn it_is_not_in_its_place_by_a_flush_behind_one_that_failed() {
    let mut has_failed = 0;
    for writes in 1.. {
        let mut rig = Rig::new(1);
        rig.may_fail = true;
        let mut block = mapped_elsewhere(&mut rig);
        let (written, journals) = (Arc::new(AtomicU64::new(0)), Arc::clone(&rig.journals));
        let counted = Arc::clone(&written);
        rig.journals.disk(0).simulate_writes(move || {
            if counted.fetch_add(1, Ordering::AcqRel) + 1 == writes {
                journals.disk(0).note_failed_flush();
            }
            true
        });
        tail_moves(&mut rig, &mut block);
        if written.load(Ordering::Acquire) < writes {
            assert_eq!(rig.log(0).placement, PlacementKind::Storage);
            break;
        }
        assert_eq!(rig.log(0).placement, PlacementKind::Nvm, "after {writes} writes");
        has_failed += 1;
    }
    assert!(has_failed > 4, "{has_failed} failures");
}

#[test]
fn one_with_a_block_that_no_file_system_has_is_one() {
    let mut rig = Rig::new(1);
    rig.superblock(0, true);
    rig.commit(0, IN_USE, &content(1));
    rig.commit(0, FILE_SYSTEM_BLOCKS + 1, &content(2));
    assert!(rig.journals.disk(0).fault().unwrap_or_default().contains("beyond the end"));
    assert_eq!(rig.log(0).placement, PlacementKind::Storage);
    let expected = [(IN_USE, content(1)), (FILE_SYSTEM_BLOCKS + 1, content(2))].into();
    assert!(rig.replayed(0) == expected, "what the guest committed last is there, too, as it wrote it");
}

#[test]
fn what_its_tail_is_about_to_pass_goes_along_unless_that_is_durable() {
    for is_ok in [true, false] {
        let mut rig = Rig::with(1, |options| options.mark_age = Duration::ZERO);
        rig.may_fail = true;
        let mut block = mapped_elsewhere(&mut rig);
        rig.holds = Box::new(|operation| operation.operation == Operation::Flush);
        tail_moves(&mut rig, &mut block);
        assert_eq!(rig.held.len(), 1, "the tail waits for a flush");
        assert_eq!(
            rig.log(0).placement,
            PlacementKind::Nvm,
            "its superblock would not say where the guest's log begins"
        );
        if !is_ok {
            rig.fails = Box::new(|operation| operation.operation == Operation::Flush);
        }
        rig.end_held();
        assert_eq!(rig.log(0).placement, PlacementKind::Storage);
        assert_eq!(rig.failed.is_empty(), is_ok);
        let mut replayed = rig.replayed(0);
        if !is_ok {
            for n in 0..4 {
                assert!(replayed.remove(&(IN_USE + n)) == Some(content(10 + n as u8)), "its guest has that in its log");
            }
        }
        // The absorbed one is at home, but in the log that has what comes before it as well.
        replayed.remove(&(IN_USE + 11));
        assert!(replayed == expected(), "{:?}", replayed.keys());
    }
}

/// What is found after a kill.
struct Killed {
    image: PathBuf,
    region: PathBuf,
    log_at: Vec<u64>,
    start: u64,
    /// The log's own place and the region, as they were at the step before.
    before: (Vec<Vec<u8>>, Vec<u8>),
    /// Kills after which the log was brought home with trust, and after which it was left to its guest.
    trusted: u32,
    left: u32,
}

impl Killed {
    fn own_place(&self) -> Vec<Vec<u8>> {
        let file = std::fs::File::open(&self.image).expect("an image");
        let block = |at: &u64| {
            let mut block = vec![0; BLOCK as usize];
            file.read_exact_at(&mut block, *at).expect("read");
            block
        };
        self.log_at.iter().map(block).collect()
    }

    /// Something was stored to the region. What was written to the log's own place since the last time may have got so far, or so far.
    fn step(&mut self) {
        let (log, region) = (self.own_place(), std::fs::read(&self.region).expect("read"));
        let (log_before, region_before) = std::mem::replace(&mut self.before, (log, region));
        let differs = |position: &usize| log_before[*position] != self.before.0[*position];
        let changed: Vec<usize> = (0..log_before.len()).filter(differs).collect();
        for count in 0..changed.len() {
            let missing: Vec<(u64, &Vec<u8>)> =
                changed[count..].iter().map(|position| (self.log_at[*position], &log_before[*position])).collect();
            let (trusted, left) = self.recover(&region_before, &missing);
            (self.trusted, self.left) = (self.trusted + trusted, self.left + left);
        }
        let region = self.before.1.clone();
        let (trusted, left) = self.recover(&region, &[]);
        (self.trusted, self.left) = (self.trusted + trusted, self.left + left);
    }

    fn recover(&self, region: &[u8], missing: &[(u64, &Vec<u8>)]) -> (u32, u32) {
        let (left_image, left_region) = (self.image.with_extension("left"), self.region.with_extension("left"));
        std::fs::copy(&self.image, &left_image).expect("copied");
        std::fs::write(&left_region, region).expect("written");
        let file = std::fs::OpenOptions::new().read(true).write(true).open(&left_image).expect("an image");
        for (at, block) in missing {
            file.write_all_at(block, *at).expect("written");
        }
        let recover = || {
            let choice = RegionChoice { index: 0, count: 2 };
            let options = OpenOptions { region: choice, ..OpenOptions::new(&left_region) };
            let disk = Disk::open(&left_image, Access::Write).expect("an image");
            recover_image(&disk, options, Access::Write)
        };
        let status = recover().expect("it is what a kill leaves").map(|finished| finished.recovery.status);
        let stored = |block: u64| {
            let mut content = vec![0; BLOCK as usize];
            file.read_exact_at(&mut content, self.start + block * BLOCK).expect("read");
            content
        };
        if status == Some(Status::Recovered) {
            assert_eq!(self.left, 0, "it was left already");
            assert!(expected().iter().all(|(block, content)| stored(*block) == *content));
            assert!(stored(IN_USE + 11) == content(21));
            return (1, 0);
        }
        assert!(matches!(status, None | Some(Status::Materialised | Status::Clean)), "{status:?}");
        assert!(replayed(&file, &self.log_at) == expected(), "its guest's kernel finds another log");
        assert!(stored(IN_USE + 10) != content(30) && stored(IN_USE + 12) == content(99), "written home");
        let mut superblock = vec![0; jbd2::SUPERBLOCK_BYTES];
        file.read_exact_at(&mut superblock, self.log_at[0]).expect("read");
        assert_eq!(HeldMark::read(&superblock), HeldMark::LeftToGuest);
        assert!(recover().is_ok_and(|finished| finished.is_none()), "the region is nobody's");
        // A copy of the disk of before has nothing of that log.
        std::fs::copy(self.image.with_extension("older"), &left_image).expect("copied");
        std::fs::write(&left_region, region).expect("written");
        assert!(recover().is_err_and(|error| error.is_refusal()), "an older copy of the disk is taken for it");
        (0, 1)
    }
}

#[test]
fn a_kill_on_its_way_leaves_one_that_is_brought_home_or_left_to_its_guest() {
    let mut rig = Rig::with(1, |options| options.create_bytes = 8 << 20);
    let mut block = mapped_elsewhere(&mut rig);
    let of = &rig.file_systems[0];
    let mut killed = Killed {
        image: rig.image.clone(),
        region: rig.region.clone(),
        log_at: of.log_at.clone(),
        start: of.start,
        before: (Vec::new(), std::fs::read(&rig.region).expect("read")),
        trusted: 0,
        left: 0,
    };
    killed.before.0 = killed.own_place();
    std::fs::copy(&rig.image, rig.image.with_extension("older")).expect("copied");
    let killed = Arc::new(Mutex::new(killed));
    let steps = Arc::clone(&killed);
    let step = Box::new(move || steps.lock().expect("no panic").step());
    *rig.each_step.lock().expect("no panic") = Some((Moment::After, step));
    tail_moves(&mut rig, &mut block);
    *rig.each_step.lock().expect("no panic") = None;
    assert_eq!(rig.log(0).placement, PlacementKind::Storage);
    let killed = killed.lock().expect("no panic");
    assert!(killed.trusted > 30 && killed.left >= 3, "{} and {}", killed.trusted, killed.left);
}
