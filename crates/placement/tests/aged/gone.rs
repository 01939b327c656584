//! A file system that is written over while it is mounted: its log is none any more, and nothing becomes durable of it. Whoever waits for that
//! is answered all the same, whatever he waits for, since nobody hears of that log again.

use super::*;

/// Where the journal's superblock shares its page of the host's cache with homes.
const ODD: u64 = 63 * 512;

impl Rig {
    /// The only operation that is under way; it ends when it is given to [`Rig::end`].
    fn take_out(&mut self) -> DiskOperation {
        assert_eq!(self.waiting.len(), 1, "{:?}", self.waiting);
        self.waiting.remove(0)
    }

    fn end(&mut self, operation: DiskOperation) {
        self.waiting.insert(0, operation);
        self.settle_one();
    }

    /// A write over the begin of the file system, as somebody does who makes another one.
    fn write_over(&mut self) -> DiskOperation {
        self.request(RequestKind::Write, self.start, &vec![0; BLOCK as usize]);
        self.take_out()
    }

    /// That has landed, and the log is forgotten.
    fn is_forgotten(&mut self, over: DiskOperation) {
        assert_eq!(self.journals.logs().len(), 1);
        self.end(over);
        assert!(self.journals.logs().is_empty(), "it is forgotten");
        self.wake(0);
        self.settle();
    }

    fn told_since(&self, before: usize) -> Vec<Status> {
        self.told[before..].iter().map(|(_, status)| *status).collect()
    }
}

/// Durability ends as wished, and that waits for home writes in the page of the journal's superblock: a commit, a superblock and a home write wait.
#[test]
fn who_waits_for_the_end_of_durability_is_answered() {
    let mut rig = Rig::at(ODD, Some(Duration::ZERO));
    let tail = (rig.builder.position, rig.builder.sequence);
    rig.gives_up();
    rig.open();
    rig.commit();
    rig.settle();
    rig.write_home(rig.homes[0], rig.committed);
    let home = rig.take_out();
    let over = rig.write_over();
    let told = rig.told.len();
    rig.commit();
    rig.journals.set_durable_within(0, None).expect("possible");
    rig.wake(0);
    rig.superblock_begins(tail.0, tail.1);
    rig.write_home(rig.homes[1], rig.committed);
    rig.settle();
    assert_eq!((rig.told_since(told), rig.held), (vec![], 3), "all of them wait");
    rig.is_forgotten(over);
    assert_eq!(rig.told_since(told), [Status::Ok; 3]);
    rig.end(home);
    rig.settle();
    assert_eq!(rig.held, 0);
    let said = said(&rig);
    assert_eq!((said.start, said.sequence, said.errno), (tail.0, tail.1, 0), "it is a block as any other");
    let mut stored = vec![0; BLOCK as usize];
    rig.file.read_exact_at(&mut stored, rig.start + rig.homes[1] * BLOCK).expect("read");
    assert!(stored == content(rig.committed), "so is this");
}

/// The same of log blocks for which there is no memory.
#[test]
fn log_blocks_without_memory_are_answered() {
    let mut rig = Rig::at(ODD, Some(Duration::ZERO));
    rig.gives_up();
    rig.open();
    rig.commit();
    rig.settle();
    rig.write_home(rig.homes[0], rig.committed);
    let home = rig.take_out();
    let over = rig.write_over();
    let told = rig.told.len();
    let log = rig.transaction();
    rig.write_log(&log, |_| false);
    rig.settle();
    assert_eq!((rig.told_since(told), rig.held), (vec![], log.len()), "all of them wait");
    rig.is_forgotten(over);
    assert_eq!(rig.told_since(told), vec![Status::IoError; log.len()]);
    rig.end(home);
    rig.settle();
    assert_eq!(rig.held, 0);
}

/// And of a superblock that closes the log, behind which compounds are to be cleared away that share pages with homes.
#[test]
fn a_superblock_that_closes_the_log_is_answered() {
    let mut rig = Rig::at(ODD, None);
    let next = outrun(&mut rig, false);
    rig.write_home(rig.homes[0], rig.committed);
    let home = rig.take_out();
    let over = rig.write_over();
    let told = rig.told.len();
    rig.superblock_begins(0, next);
    rig.write_home(rig.homes[1], rig.committed);
    rig.settle();
    assert_eq!((rig.told_since(told), rig.held), (vec![], 2), "they wait");
    rig.is_forgotten(over);
    assert_eq!(rig.told_since(told), [Status::Ok; 2]);
    rig.end(home);
    rig.settle();
    assert_eq!(rig.held, 0);
    let said = said(&rig);
    assert!(said.is_empty() && said.sequence == next && said.errno == 0, "{said:?}");
}

/// Its VMM has let go of the disk, and the clock of its journal goes on: the disk leaves between two things that are under way.
#[test]
fn a_disk_does_not_leave_beside_what_is_under_way() {
    for within in [None, Some(AGE)] {
        let mut rig = Rig::new(within);
        rig.open();
        rig.commit();
        rig.settle();
        match within {
            None => rig.write_home(rig.homes[0], rig.committed),
            Some(_) => rig.wake(1500),
        }
        assert!(!rig.waiting.is_empty(), "a home write is under way, or a compound");
        let error = rig.journals.leave_disk(0).expect_err("not beside that");
        assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock, "{error}");
        assert!(rig.journals.logs()[0].is_open());
        rig.settle();
        rig.journals.leave_disk(0).expect("it leaves");
        assert!(!rig.journals.logs()[0].is_open());
        for block in rig.homes {
            let mut home = vec![0; BLOCK as usize];
            rig.file.read_exact_at(&mut home, block * BLOCK).expect("read");
            assert!(home == content(rig.committed), "{within:?}: block {block}");
        }
    }
}
