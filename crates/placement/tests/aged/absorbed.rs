//! Home writes that are answered before they are done, under durability by age.

use super::*;
use std::ops::RangeInclusive;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

/// Nothing becomes due by itself.
const LONG: Duration = Duration::from_secs(3600);

impl Rig {
    /// The last transaction goes home, all of it.
    pub(super) fn write_homes(&mut self) {
        let last = self.committed;
        self.homes.into_iter().for_each(|block| self.write_home(block, last));
    }

    fn read_home(&mut self, block: u64) -> Vec<u8> {
        let page = PageId(self.next % PAGES);
        self.next += 1;
        self.memory.simulated_guest_write(page, 0, &vec![0xEE; BLOCK as usize]);
        let slices = vec![self.memory.page(page).expect("a page")];
        let (id, mut plan) = (RequestId(self.next), Plan::default());
        let request = Request { id, kind: RequestKind::Read, offset: block * BLOCK, len: BLOCK, segments: &slices };
        self.route.route(&request, &mut plan);
        for action in plan.actions {
            let PlanAction::Disk(DiskOperation { operation: Operation::Read, offset, len, buffers, .. }) = action
            else {
                panic!("a read takes a read: {action:?}");
            };
            let mut bytes = vec![0; len as usize];
            self.file.read_exact_at(&mut bytes, offset).expect("read");
            for buffer in buffers {
                let Buffer::Slice(slice) = buffer else { panic!("into memory of ours") };
                slice.copy_in(0, &bytes.drain(..slice.len()).collect::<Vec<u8>>());
            }
        }
        let mut read = vec![0; BLOCK as usize];
        slices[0].copy_out(0, &mut read);
        read
    }

    fn stored_home(&self, block: u64) -> Vec<u8> {
        let mut stored = vec![0; BLOCK as usize];
        self.file.read_exact_at(&mut stored, block * BLOCK).expect("read");
        stored
    }

    fn expect_read(&mut self, version: u8) {
        for block in self.homes {
            assert_eq!(self.read_home(block)[0], version, "block {block} is read as it was written");
        }
    }

    fn expect_stored(&self, versions: RangeInclusive<u8>) {
        for block in self.homes {
            let stored = self.stored_home(block);
            assert!(versions.contains(&stored[0]), "block {block} is at home as {}, not as {versions:?}", stored[0]);
        }
    }

    /// The guest's log begins where it ends now. What it gives up is home when it is told.
    fn move_tail(&mut self) {
        let mut block = self.superblock.clone();
        let (start, sequence) = (self.builder.position, self.builder.sequence);
        jbd2::SuperblockEdit::new(&mut block).expect("a superblock").start(start).sequence(sequence).seal();
        self.request(RequestKind::Write, self.log_at[0], &block);
        while self.held > 0 {
            assert!(!self.waiting.is_empty(), "the superblock waits for nothing");
            self.settle_one();
        }
        self.expect_stored(self.committed..=self.committed);
        self.settle();
    }

    /// A transaction of these blocks.
    pub(super) fn commit_of(&mut self, blocks: &[(u64, Vec<u8>)]) {
        let mut log = Vec::new();
        let transaction = Transaction { blocks: blocks.to_vec(), ..Transaction::default() };
        self.builder.transaction(&transaction, &mut |position, block| log.push((position, block.to_vec())));
        self.write_log(&log, |_| true);
    }

    fn superblock_that_waits(&mut self, sequence: u32) {
        let mut block = self.superblock.clone();
        let start = self.builder.position;
        jbd2::SuperblockEdit::new(&mut block).expect("a superblock").start(start).sequence(sequence).seal();
        self.request(RequestKind::Write, self.log_at[0], &block);
    }

    /// Storage does what it was told, but for writes of homes.
    fn settle_with_failing_homes(&mut self) {
        while !self.waiting.is_empty() {
            let block = self.waiting[0].offset / BLOCK;
            if self.waiting[0].operation == Operation::Write && self.homes.contains(&block) {
                let operation = self.waiting.remove(0);
                let mut plan = Plan::default();
                if let Some(ticket) = operation.ticket {
                    let error = std::io::Error::other("it is broken");
                    self.route.disk_done(ticket, Err(error), &mut plan);
                }
                self.plan(plan);
            } else {
                self.settle_one();
            }
        }
    }

    /// Time goes on, and nobody but the one who looks after time wakes the disk.
    fn wake_when_due(&mut self) {
        let due = self.journals.due_in(0).expect("somebody looks after it");
        self.clock.fetch_add(due.as_millis() as u64 + 1, Ordering::AcqRel);
        assert!(self.journals.due_in(0).is_some_and(|due| due.is_zero()), "it is never due");
        let mut plan = Plan::default();
        self.route.woken(&mut plan);
        self.plan(plan);
    }
}

/// An fsync of ext4 first writes home what earlier transactions committed of its file.
#[test]
fn home_writes_of_what_is_not_durable_make_no_compounds() {
    let mut rig = Rig::new(Some(LONG));
    rig.open();
    for _ in 0..20 {
        rig.commit();
        rig.settle();
        rig.write_homes();
        assert_eq!((rig.held, rig.waiting.len()), (0, 0), "they are answered at once");
        let last = rig.committed;
        rig.expect_read(last);
    }
    assert_eq!(rig.compounds(), 0);
    rig.expect_stored(0..=0);
    rig.pass(LONG.as_millis() as u64 + 1000);
    assert_eq!(rig.compounds(), 1);
    rig.expect_stored(20..=20);
    rig.expect_read(20);
    rig.promise(20);
    rig.move_tail();
    assert_eq!(rig.compounds(), 1, "all is durable and home");
    assert!(rig.judge() > 20);
}

/// What was free went home with the compound; its guest writes it home as well, when its kernel cleans up.
#[test]
fn what_went_home_as_an_append_is_not_sent_twice() {
    let mut rig = Rig::new(Some(LONG));
    let image = std::fs::read(&rig.image).expect("read");
    let mut allocation = extfs::Allocation::default();
    let free: Vec<u64> =
        (0..BLOCKS).rev().filter(|block| allocation.is_free(&image, *block).expect("bitmaps")).take(2).collect();
    let [other, block] = free[..] else { panic!("nothing is free") };
    rig.open();
    rig.commit_of(&[(block, content(1)), (other, content(5))]);
    rig.settle();
    rig.pass(LONG.as_millis() as u64 + 1000);
    assert_eq!((rig.compounds(), rig.stored_home(block)), (1, content(1)));
    let released = |rig: &Rig| rig.journals.report("vm").disks[0].counters.released_home;
    let before = released(&rig);
    rig.write_home(block, 1);
    assert_eq!((rig.waiting.len(), rig.held, released(&rig)), (0, 0, before + 1), "it is there already");
    assert_eq!(rig.read_home(block), content(1));
    // Other content is sent, and so is what was there before when it comes again.
    for version in [2, 5, 2, 5] {
        rig.write_home(other, version);
        assert_eq!(rig.waiting.len(), 1, "as {version}");
        rig.settle();
        assert_eq!(rig.stored_home(other), content(version));
    }
    // Nor is a newer version the one that went there.
    rig.commit_of(&[(block, content(3))]);
    rig.settle();
    rig.write_home(block, 3);
    rig.pass(LONG.as_millis() as u64 + 1000);
    assert_eq!(rig.stored_home(block), content(3));
}

/// The first of so many blocks that lie together and are free.
fn free_run(rig: &Rig, len: u64) -> u64 {
    let image = std::fs::read(&rig.image).expect("read");
    let mut allocation = extfs::Allocation::default();
    let mut is_free = |block: u64| allocation.is_free(&image, block).expect("bitmaps");
    (0..BLOCKS - len).rev().find(|first| (*first..first + len).all(&mut is_free)).expect("free blocks")
}

/// A write of several blocks, some of which are home as appends: the others go by themselves.
#[test]
fn what_storage_has_of_a_write_is_not_sent() {
    for with_age in [true, false] {
        let mut rig = Rig::new(Some(LONG));
        let first = free_run(&rig, 5);
        rig.open();
        rig.commit_of(&[(first, content(1)), (first + 1, content(2)), (first + 4, content(4))]);
        rig.settle();
        rig.pass(LONG.as_millis() as u64 + 1000);
        assert_eq!((rig.compounds(), rig.stored_home(first)), (1, content(1)));
        if !with_age {
            rig.journals.set_durable_within(0, None).expect("a wish");
            rig.pass(1000);
        }
        let written = [1, 2, 8, 9, 4].map(content).concat();
        rig.request(RequestKind::Write, rig.start + first * BLOCK, &written);
        let sent: Vec<(u64, u64)> = rig.waiting.iter().map(|write| (write.offset, write.len)).collect();
        let expected = if with_age { (first + 2, 2) } else { (first, 5) };
        assert_eq!(sent, [(rig.start + expected.0 * BLOCK, expected.1 * BLOCK)], "with an age: {with_age}");
        rig.settle();
        assert_eq!(rig.held, 0, "it is answered");
        for (block, version) in (first..).zip([1, 2, 8, 9, 4]) {
            assert_eq!(rig.stored_home(block), content(version));
        }
    }
}

/// Absorbed while its compound is being made, to which it is an append: that brings it home.
#[test]
fn what_is_absorbed_is_not_sent_again_after_its_append() {
    let mut rig = Rig::new(Some(LONG));
    let block = free_run(&rig, 1);
    rig.open();
    rig.commit_of(&[(block, content(1))]);
    rig.settle();
    rig.wake(LONG.as_millis() as u64 + 1000);
    let under_way = rig.waiting.len();
    assert!(under_way > 0, "a compound is being made");
    rig.write_home(block, 1);
    assert_eq!((rig.waiting.len(), rig.held, rig.compounds()), (under_way, 0, 0), "it is absorbed");
    rig.settle();
    let counters = rig.journals.report("vm").disks[0].counters.clone();
    assert_eq!((rig.compounds(), counters.written_home_by_host, counters.released_home), (1, 0, 1));
    assert_eq!(rig.stored_home(block), content(1));
    assert_eq!(rig.read_home(block), content(1));
    // Nothing of it is left to wait for.
    rig.write_home(block, 7);
    assert_eq!(rig.waiting.len(), 1);
    rig.settle();
    assert_eq!((rig.held, rig.stored_home(block)), (0, content(7)));
}

#[test]
fn a_tail_does_not_pass_what_is_not_home() {
    let mut rig = Rig::new(Some(LONG));
    rig.open();
    for round in 1..=3 {
        rig.commit();
        rig.settle();
        rig.write_homes();
        assert_eq!(rig.compounds(), round - 1);
        rig.move_tail();
        assert_eq!(rig.compounds(), round);
        rig.promise(rig.committed);
        // From then on nothing before it is absorbed, and there is no need to.
        rig.write_homes();
        rig.settle();
        assert_eq!((rig.held, rig.compounds()), (0, round));
        assert_eq!(rig.journals.disk(0).compound_times().count(), round, "each was timed");
    }
    rig.commit();
    rig.write_homes();
    let tail = rig.builder.sequence;
    rig.superblock(0, tail);
    rig.expect_stored(4..=4);
    assert_eq!(rig.held, 0, "the log is closed");
    rig.promise(4);
    assert!(rig.judge() > 50);
}

#[test]
fn what_else_is_written_there_comes_after_it() {
    let mut rig = Rig::new(Some(LONG));
    rig.open();
    rig.commit();
    rig.settle();
    rig.write_homes();
    rig.write_home(rig.homes[0], DIRECT);
    assert_eq!(rig.held, 1, "it waits");
    let mut has_been_home = false;
    while rig.held > 0 {
        rig.settle_one();
        has_been_home |= rig.stored_home(rig.homes[0]) == content(1);
    }
    rig.settle();
    assert!(has_been_home, "what it covers is home first, so that a part of it would be right");
    assert_eq!(rig.read_home(rig.homes[0]), content(DIRECT));
    rig.pass(LONG.as_millis() as u64 * 2);
    assert_eq!(rig.stored_home(rig.homes[0]), content(DIRECT), "nothing older comes later");
    assert!(rig.judge() > 20);
}

/// What waits behind absorbed content is older than what is committed meanwhile, and is not taken for that at home.
#[test]
fn what_waits_is_as_old_as_it_was_when_it_came() {
    let mut rig = Rig::new(Some(LONG));
    rig.open();
    rig.commit();
    rig.settle();
    rig.write_homes();
    rig.write_home(rig.homes[0], DIRECT);
    assert_eq!(rig.held, 1, "it waits");
    rig.commit();
    rig.settle();
    assert_eq!(rig.stored_home(rig.homes[0]), content(DIRECT));
    rig.pass(LONG.as_millis() as u64 * 2);
    rig.write_home(rig.homes[1], 2);
    rig.write_home(rig.homes[2], 2);
    rig.settle();
    // The log goes round on storage, with something else.
    let other = rig.homes[2] + 1;
    for number in 0..200 {
        rig.commit_of(&[(other, content(number))]);
        rig.settle();
        rig.pass(LONG.as_millis() as u64 * 2);
        let image = std::fs::read(&rig.image).expect("the image");
        assert_eq!(state(&Image::of(&image), (&rig.log_at, &rig.homes), 2, false), Ok(2), "round {number}");
    }
}

/// A write of the host waits for its compound, and durability cannot end since storage fails. Nobody waits for that write any more when the
/// guest is gone, and it comes to nothing.
#[test]
fn a_write_of_the_hosts_that_never_began_keeps_no_recovery_waiting() {
    let mut rig = Rig::new(Some(LONG));
    let goes_well = Arc::new(AtomicBool::new(true));
    let asked = Arc::clone(&goes_well);
    rig.journals.disk(0).simulate_writes(move || asked.load(Ordering::Acquire));
    rig.open();
    rig.commit();
    rig.settle();
    rig.write_homes();
    rig.write_home(rig.homes[0], DIRECT);
    assert_eq!(rig.held, 1, "it waits for the host's own, which waits for a compound");
    goes_well.store(false, Ordering::Release);
    rig.journals.set_durable_within(0, None).expect("possible");
    rig.wake(0);
    rig.settle();
    assert!(rig.journals.disk(0).fault().expect("it is said").contains("marking it failed"));
    let begun = Instant::now();
    rig.journals.recover_all().expect_err("storage fails");
    goes_well.store(true, Ordering::Release);
    rig.journals.recover_all().expect("recovered");
    assert!(begun.elapsed() < Duration::from_secs(20), "it waited for what never began");
    rig.expect_stored(1..=1);
}

/// With no durability in force nothing but time has the host try again.
#[test]
fn a_write_home_that_fails_is_tried_again() {
    let mut rig = Rig::new(Some(LONG));
    rig.open();
    rig.commit();
    rig.settle();
    rig.write_homes();
    rig.gives_up();
    rig.journals.set_durable_within(0, None).expect("possible");
    rig.wake(0);
    rig.settle_with_failing_homes();
    let tail = rig.builder.sequence;
    rig.superblock_that_waits(tail);
    for _ in 0..3 {
        rig.settle_with_failing_homes();
        assert_eq!(rig.held, 1, "what it gives up is not home");
        rig.wake_when_due();
    }
    while rig.held > 0 {
        assert!(!rig.waiting.is_empty(), "nobody tries again");
        rig.settle_one();
    }
    rig.expect_stored(1..=1);
    assert!(said(&rig).is_empty());
}

/// One that never succeeds is not waited for for ever.
#[test]
fn a_home_that_cannot_be_written_is_an_error() {
    let mut rig = Rig::new(Some(LONG));
    rig.open();
    rig.commit();
    rig.settle();
    rig.write_homes();
    rig.gives_up();
    rig.journals.set_durable_within(0, None).expect("possible");
    rig.wake(0);
    rig.settle_with_failing_homes();
    let tail = rig.builder.sequence;
    rig.superblock_that_waits(tail);
    rig.write_home(rig.homes[0], DIRECT);
    assert_eq!(rig.held, 2);
    for _ in 0..40 {
        if rig.held == 0 {
            break;
        }
        rig.settle_with_failing_homes();
        rig.wake_when_due();
    }
    assert_eq!(rig.held, 0, "they wait for ever");
    let failed = rig.told.iter().filter(|(_, status)| *status == Status::IoError).count();
    assert_eq!(failed, 2);
    assert!(rig.journals.disk(0).fault().is_some_and(|fault| fault.contains("cannot be written there")));
    // Nothing is lost by it.
    rig.settle_with_failing_homes();
    rig.wake_when_due();
    rig.settle();
    rig.expect_stored(1..=1);
}

#[test]
fn other_content_is_not_absorbed() {
    let mut rig = Rig::new(Some(LONG));
    rig.open();
    rig.commit();
    rig.settle();
    rig.write_home(rig.homes[0], DIRECT);
    assert_eq!(rig.held, 1, "it waits for the compound");
    rig.settle();
    assert_eq!((rig.held, rig.compounds()), (0, 1));
    assert_eq!(rig.stored_home(rig.homes[0]), content(DIRECT));
}

#[test]
fn nothing_is_absorbed_with_no_age() {
    let mut rig = Rig::new(Some(Duration::ZERO));
    rig.open();
    rig.commit();
    // The commit is not answered, and nobody writes home before it is: but if somebody did, it would wait.
    let held = rig.held;
    rig.write_homes();
    assert_eq!(rig.held, held + 3);
    rig.settle();
    assert_eq!(rig.held, 0);
    rig.expect_stored(1..=1);
}

/// What an age allowed is durable and home before a flush is answered that comes after the age.
#[test]
fn a_flush_with_no_age_waits_for_what_was_absorbed_before() {
    let mut rig = Rig::new(Some(LONG));
    rig.open();
    rig.commit();
    rig.settle();
    rig.write_homes();
    rig.journals.set_durable_within(0, Some(Duration::ZERO)).expect("possible");
    rig.wake(0);
    rig.request(RequestKind::Flush, 0, &[]);
    assert!(rig.held > 0, "it waits");
    while rig.held > 0 {
        rig.settle_one();
    }
    rig.promise(1);
    rig.expect_stored(1..=1);
    rig.settle();
    assert!(rig.judge() > 10);
}

#[test]
fn all_of_it_goes_home_when_no_durability_is_in_force() {
    let mut rig = Rig::new(Some(LONG));
    rig.open();
    rig.commit();
    rig.settle();
    rig.write_homes();
    rig.gives_up();
    rig.journals.set_durable_within(0, None).expect("possible");
    rig.wake(0);
    while !rig.waiting.is_empty() {
        rig.expect_read(1);
        rig.settle_one();
    }
    rig.expect_stored(1..=1);
    assert!(rig.judge() > 10);
}

/// The same where the guest closes its log at that moment.
#[test]
fn a_log_that_is_only_held_is_not_closed_before_all_of_it_is_home() {
    let mut rig = Rig::new(Some(LONG));
    rig.open();
    rig.commit();
    rig.settle();
    rig.write_homes();
    rig.gives_up();
    rig.journals.set_durable_within(0, None).expect("possible");
    rig.wake(0);
    let mut block = rig.superblock.clone();
    let sequence = rig.builder.sequence;
    jbd2::SuperblockEdit::new(&mut block).expect("a superblock").start(0).sequence(sequence).seal();
    rig.request(RequestKind::Write, rig.log_at[0], &block);
    while rig.held > 0 {
        rig.settle_one();
    }
    rig.expect_stored(1..=1);
    rig.settle();
    assert!(said(&rig).is_empty());
    assert!(rig.judge() > 10);
}

#[test]
fn a_death_brings_it_home() {
    let mut rig = Rig::new(Some(LONG));
    rig.open();
    for _ in 0..3 {
        rig.commit();
        rig.settle();
        rig.write_homes();
    }
    rig.expect_stored(0..=0);
    expect_recovered(&rig);
    rig.promise(3);
    assert!(rig.judge() > 10);
}

/// Commits, home writes, reads, tails, time and changes of the age, in any order; then a death, and power cuts everywhere.
fn whatever_comes(seed: u64, has_changes: bool) {
    let mut random = Random::new(seed);
    let mut rig = Rig::new(Some(AGE));
    if has_changes {
        rig.gives_up();
    }
    rig.open();
    // What the guest has written to each home last.
    let mut written = [0; 3];
    for _ in 0..60 {
        let which = random.below(3) as usize;
        match random.below(100) {
            0..22 if rig.committed < 180 => rig.commit(),
            0..55 if rig.committed > 0 => {
                // No kernel has two writes to a block under way.
                if rig.held > 0 {
                    rig.settle();
                }
                rig.write_home(rig.homes[which], rig.committed);
                written[which] = rig.committed;
            }
            55..70 => {
                for _ in 0..random.below(4) {
                    if !rig.waiting.is_empty() {
                        rig.settle_one();
                    }
                }
            }
            70..78 => rig.wake(random.below(700)),
            78..82 if !has_changes => {
                rig.settle();
                rig.pass(1500);
                rig.promise(rig.committed);
            }
            82..90 if rig.committed > 0 => {
                if rig.held > 0 {
                    rig.settle();
                }
                if written[which] == rig.committed {
                    // Of what is on its way to storage the test's storage knows nothing yet.
                    rig.settle();
                    let home = rig.homes[which];
                    assert_eq!(rig.read_home(home), content(rig.committed), "seed {seed}");
                }
            }
            90..95 => {
                rig.settle();
                let last = rig.committed;
                for which in (0..3).filter(|which| written[*which] != last) {
                    rig.write_home(rig.homes[which], last);
                }
                written = [last; 3];
                while rig.held > 0 {
                    rig.settle_one();
                }
                // In use, and with nothing in them: the first transaction is the first content.
                if last > 0 {
                    rig.settle();
                    rig.move_tail();
                }
            }
            _ if has_changes => {
                let within = [None, Some(Duration::ZERO), Some(AGE)][which];
                rig.journals.set_durable_within(0, within).expect("possible");
                rig.wake(0);
            }
            _ => {}
        }
    }
    rig.settle();
    assert_eq!(rig.held, 0, "seed {seed}: somebody waits for nothing");
    assert!(rig.told.iter().all(|(_, status)| *status == Status::Ok), "seed {seed}: the guest is told of an error");
    expect_recovered(&rig);
    rig.promise(rig.committed);
    rig.judge();
}

#[test]
fn whatever_a_guest_does() {
    (0..24).for_each(|seed| whatever_comes(seed, false));
}

#[test]
fn whatever_a_guest_does_beside_changes() {
    (100..124).for_each(|seed| whatever_comes(seed, true));
}
