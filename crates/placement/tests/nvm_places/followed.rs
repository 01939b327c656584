//! The worker dies, and another one goes on with what it has left in regions.

use super::*;
use nvm_journal::medium::SimulatedMedium;

impl Rig {
    /// The worker is killed, and another one goes on, or says why it does not. Nothing is under way.
    pub(super) fn die(&mut self) -> std::io::Result<()> {
        let area = self.journals.directory();
        let (path, lock) = (area.path().to_owned(), area.lock_file().try_clone().expect("a descriptor"));
        let registry = self.image.with_file_name("registry");
        let (area, description) = AreaDirectory::adopt(&path, &registry, lock).expect("it is there");
        let options = DiskOptions::from(self.journals.disk(0).options.clone());
        let nvm = self.journals.region(0).expect("regions").options.clone();
        // Of the process that is gone nobody has a lock; here it is the same one.
        let bytes = std::fs::read(&self.region).expect("the regions");
        let of = |choice: RegionChoice| {
            let (at, len) = choice.place(bytes.len() as u64).expect("a region");
            (at, Box::new(SimulatedMedium::from_image(bytes[at as usize..][..len as usize].to_vec())))
        };
        let (at, medium) = of(nvm.region);
        let mut next = NvmDisk::with_medium(nvm.clone(), at, medium).expect("a region");
        for choice in &nvm.more_regions {
            let (at, medium) = of(*choice);
            next.add_region(at, medium).expect("a region");
        }
        let options = DiskOptions { nvm: Some(Arc::new(next)), write_log: self.write_log.clone(), ..options };
        let options = JournalsOptions { disks: vec![options], budget_bytes: 64 << 20, tracer: None };
        self.journals = Journals::resume(&VmMemory::new(), area, &description, options)?;
        self.journals.go_on()?;
        let table = Arc::new(ram(&self.memory, &self.image.with_extension("again")));
        self.route = DiskRoute::new(Arc::clone(&self.journals), 0);
        self.route.started(Start::Resumed, &table)
    }

    pub(super) fn notes(&self) -> Vec<PathBuf> {
        let names = self.journals.directory().directory().names().expect("read");
        let is_notes = |name: &std::ffi::OsString| name.to_string_lossy().ends_with(".notes");
        names.into_iter().filter(is_notes).map(|name| self.journals.directory().path().join(name)).collect()
    }
}

#[test]
fn each_of_two_logs_goes_on_in_its_own_region() {
    let mut rig = Rig::new(2);
    for which in 0..2 {
        rig.superblock(which, true);
        rig.commit(which, IN_USE, &content(which as u8));
    }
    assert_eq!(rig.notes().len(), 2);
    rig.die().expect("it goes on");
    assert_eq!(rig.notes().len(), 2);
    for which in 0..2 {
        assert!(rig.log(which).is_open() && rig.read(which, IN_USE) == content(which as u8));
        assert_eq!(rig.commit(which, IN_USE + 1, &content(10 + which as u8)), 0, "a region has it");
        let at = rig.home_at(which, IN_USE + 1);
        assert_eq!(rig.request(RequestKind::Write, at, &mut content(10 + which as u8)), 0, "and absorbs it");
    }
    for which in 0..2 {
        rig.superblock(which, false);
        assert!(!rig.log(which).is_open() && rig.stored(which, IN_USE + 1) == content(10 + which as u8));
        assert_eq!(rig.notes().len(), 1 - which, "of a log that is in no region nothing is noted");
    }
}

/// A guest that commits without a pause has the next transaction in its log before the last one is durable: what is noted of it does not grow
/// for ever, lest nobody follow.
#[test]
fn what_is_noted_does_not_grow_while_its_guest_never_pauses() {
    let mut rig = Rig::with(1, |options| options.append_home_bytes_min = 0);
    rig.superblock(0, true);
    rig.holds = Box::new(|operation| operation.operation == Operation::Flush);
    let blocks: Vec<u64> = (FILE_SYSTEM_BLOCKS - 100..FILE_SYSTEM_BLOCKS - 40).collect();
    let mut begins = Vec::new();
    let mut longest = 0;
    for round in 0..80u64 {
        let of = &rig.file_systems[0];
        begins.push((of.builder.position, of.builder.sequence));
        let transaction: Vec<_> = blocks.iter().map(|block| (*block, content((round + block) as u8))).collect();
        rig.commit_all(0, &transaction);
        if round > 0 {
            // The one before is durable, and this one is taken up.
            assert_eq!(rig.held.len(), 1, "one flush after the other");
            let flush = rig.held.remove(0);
            rig.end(flush);
            let of = &rig.file_systems[0];
            let (mut block, at) = (of.superblock.clone(), of.log_at[0]);
            let (position, sequence) = begins[round as usize];
            SuperblockEdit::new(&mut block).expect("a superblock").start(position).sequence(sequence).seal();
            rig.request(RequestKind::Write, at, &mut block);
        }
        longest = longest.max(std::fs::metadata(&rig.notes()[0]).expect("its notes").len());
    }
    assert!(longest > 8 << 20, "hardly anything was noted: {longest}");
    assert!(longest < 10 << 20, "nothing was written anew: {longest}");
    // The flush behind the last one, which nobody waits for any more.
    rig.end_held();
    rig.die().expect("it goes on");
    assert!(rig.read(0, blocks[7]) == content((79 + blocks[7]) as u8));
}

/// Of a mark that the worker before has written nobody knows whether it is durable: it may have died before the flush of it. Its guest
/// need not ask for one.
#[test]
fn the_mark_is_durable_before_anything_counts_on_it() {
    let mut rig = Rig::new(1);
    rig.superblock(0, true);
    let path = rig.image.with_file_name("log");
    rig.write_log = Some(Arc::new(WriteLog::create(&path).expect("a log")));
    rig.die().expect("it goes on");
    let log = std::fs::File::open(&path).expect("the log");
    let log: Vec<_> = entries(&log).map(|entry| entry.expect("read")).collect();
    let log_at = rig.file_systems[0].log_at[0];
    let is_mark = |entry: &write_log::Entry| entry.offset == log_at && matches!(entry.kind, EntryKind::Write(_));
    let mark = log.iter().rposition(is_mark).expect("a flush that failed may have lost it: it is written once more");
    assert!(log[mark..].iter().any(|entry| matches!(entry.kind, EntryKind::Flush)), "{log:?}");
    assert_eq!(rig.commit(0, IN_USE, &content(1)), 0, "the region has it");
    assert!(rig.read(0, IN_USE) == content(1));
}

/// Whoever is about to end a worker asks first.
#[test]
fn it_is_said_whether_another_worker_could_go_on() {
    let said = |rig: &Rig| rig.journals.report("vm").disks[0].nvm.as_ref().expect("regions").can_be_followed;
    let mut rig = Rig::new(1);
    assert!(said(&rig), "nothing is open");
    rig.superblock(0, true);
    rig.commit(0, IN_USE, &content(1));
    assert!(said(&rig));
    let mut rig = Rig::new(1);
    std::fs::remove_dir_all(rig.journals.directory().path()).expect("removed");
    rig.superblock(0, true);
    rig.commit(0, IN_USE, &content(1));
    assert!(rig.log(0).is_open() && !said(&rig), "nothing can be noted");
}

/// What was not noted, or is not of this opening, is not guessed; everything is as it was.
#[test]
fn a_log_without_its_notes_is_refused() {
    for is_missing in [true, false] {
        let mut rig = Rig::new(1);
        rig.superblock(0, true);
        rig.commit(0, IN_USE, &content(1));
        let notes = rig.notes().remove(0);
        let of_before = std::fs::read(&notes).expect("read");
        if is_missing {
            std::fs::remove_file(&notes).expect("removed");
        } else {
            rig.commit(0, IN_USE, &content(2));
            rig.commit(0, IN_USE, &content(3));
            std::fs::write(&notes, of_before).expect("written");
        }
        let error = rig.die().expect_err("it cannot go on").to_string();
        let why = if is_missing { "nothing was noted" } else { "by the notes on it" };
        assert!(error.contains("cannot be gone on with") && error.contains(why), "{error}");
        let bytes = rig.recovered();
        let at = rig.home_at(0, IN_USE) as usize;
        assert!(bytes[at..][..BLOCK as usize] == content(if is_missing { 1 } else { 3 })[..]);
    }
}

/// Who follows knows nothing of what was committed before, so that its home writes would prove that the log is not what it seems, with
/// blocks that have the same contents, and need not go home.
#[test]
fn home_writes_of_what_was_committed_before_prove_nothing() {
    let mut rig = Rig::new(1);
    rig.superblock(0, true);
    for n in 0..4 {
        rig.commit(0, IN_USE + n, &content(10 + n as u8));
    }
    rig.die().expect("it goes on");
    for n in 0..4 {
        rig.commit(0, IN_USE + 10 + n, &content(10 + n as u8));
    }
    for n in 0..4 {
        let at = rig.home_at(0, IN_USE + n);
        rig.request(RequestKind::Write, at, &mut content(10 + n as u8));
    }
    let of = &rig.file_systems[0];
    let (mut block, at) = (of.superblock.clone(), of.log_at[0]);
    let (start, sequence) = (of.builder.position, of.builder.sequence);
    SuperblockEdit::new(&mut block).expect("a superblock").start(start).sequence(sequence).seal();
    rig.request(RequestKind::Write, at, &mut block);
    assert_eq!(rig.journals.disk(0).fault(), None);
    assert_eq!(rig.log(0).placement, PlacementKind::Nvm);
}

/// Which of the guest's writes past its journal are durable the worker that died has known.
#[test]
fn a_tail_waits_for_a_flush_of_what_was_written_past_the_journal_before() {
    let mut rig = Rig::new(1);
    rig.superblock(0, true);
    rig.commit(0, IN_USE, &content(1));
    let at = rig.home_at(0, IN_USE);
    rig.request(RequestKind::Write, at, &mut content(2));
    rig.die().expect("it goes on");
    assert!(rig.read(0, IN_USE) == content(2));
    rig.holds = Box::new(|operation| operation.operation == Operation::Flush);
    rig.superblock(0, true);
    assert_eq!(rig.held.len(), 1, "the region's version may be all there is");
    rig.end_held();
    assert!(rig.read(0, IN_USE) == content(2));
}

/// A kernel has replayed the log and begins it anew, and the worker is killed at any step of that: its guest says so once more.
#[test]
fn a_log_that_is_begun_anew_is_not_taken_for_another_one_by_who_follows() {
    let mut steps = 0;
    for died_at in 0.. {
        let mut rig = Rig::new(1);
        rig.superblock(0, true);
        rig.commit(0, IN_USE, &content(1));
        let mut superblock = vec![0; BLOCK as usize];
        let log_at = rig.file_systems[0].log_at[0];
        rig.request(RequestKind::Read, log_at, &mut superblock);
        let (shown, format) = jbd2::Superblock::parse(&superblock).expect("a superblock");
        let at = rig.home_at(0, IN_USE);
        rig.request(RequestKind::Write, at, &mut content(1));
        rig.file_systems[0].builder = LogBuilder::new(format, shown.first, shown.sequence.wrapping_add(2));
        // What there is at that moment.
        let mut files = rig.notes();
        files.extend([rig.image.clone(), rig.region.clone()]);
        type Files = Vec<(PathBuf, Vec<u8>)>;
        let left: Arc<Mutex<Files>> = Arc::default();
        let (count, kept) = (Arc::new(Mutex::new(0)), Arc::clone(&left));
        let counted = Arc::clone(&count);
        *rig.each_step.lock().expect("no panic") = Some((
            Moment::Before,
            Box::new(move || {
                let mut count = counted.lock().expect("no panic");
                if *count == died_at {
                    let of = |file: &PathBuf| (file.clone(), std::fs::read(file).expect("read"));
                    *kept.lock().expect("no panic") = files.iter().map(of).collect();
                }
                *count += 1;
            }),
        ));
        rig.superblock(0, true);
        *rig.each_step.lock().expect("no panic") = None;
        steps = *count.lock().expect("no panic");
        if died_at == steps {
            break;
        }
        for (file, bytes) in left.lock().expect("no panic").iter() {
            std::fs::write(file, bytes).expect("written");
        }
        rig.die().expect("it goes on");
        rig.superblock(0, true);
        assert_eq!(rig.log(0).placement, PlacementKind::Nvm, "died at step {died_at}");
        assert!(rig.log(0).is_open() && rig.journals.disk(0).fault().is_none(), "died at step {died_at}");
        assert_eq!(rig.commit(0, IN_USE, &content(2)), 0, "a region has it, died at step {died_at}");
        let at = rig.home_at(0, IN_USE);
        assert_eq!(rig.request(RequestKind::Write, at, &mut content(2)), 0, "and absorbs it, died at step {died_at}");
    }
    assert!(steps > 0, "the region is written to");
}

/// A guest suspends, its device begins anew, and the worker is killed at the end of bringing its journal home. The guest goes on without a word of
/// what its journal is: storage has what it commits.
#[test]
fn a_log_that_was_brought_home_as_its_worker_died_goes_on_unannounced() {
    let mut rig = Rig::new(1);
    rig.superblock(0, true);
    rig.commit(0, IN_USE, &content(1));
    let names = rig.journals.directory().directory().names().expect("read");
    let before: Vec<_> = names
        .iter()
        .map(|name| rig.journals.directory().path().join(name))
        .filter(|path| path.is_file())
        .map(|path| (path.clone(), std::fs::read(&path).expect("read")))
        .collect();
    assert!(!before.is_empty());
    rig.journals.recover_disk(0).expect("its device begins anew");
    assert!(rig.stored(0, IN_USE) == content(1) && !rig.log(0).is_open());
    // It was not written down.
    for (path, bytes) in &before {
        std::fs::write(path, bytes).expect("written");
    }
    rig.die().expect("it goes on");
    assert!(!rig.log(0).is_open());
    rig.commit(0, IN_USE + 1, &content(2));
    assert!(rig.log(0).is_open(), "storage says so");
    let of = &rig.file_systems[0];
    let found = replayed(&rig.file, &of.log_at);
    assert_eq!(found.get(&(IN_USE + 1)), Some(&content(2)));
}

/// After a suspend its guest says first where it believes that its log begins: what it commits then is on storage all the same.
#[test]
fn a_tail_that_moves_first_after_a_suspend_changes_nothing() {
    let mut rig = Rig::new(1);
    rig.superblock(0, true);
    rig.commit(0, IN_USE, &content(1));
    let of = &rig.file_systems[0];
    let (tail, mut block, at) = ((of.builder.position, of.builder.sequence), of.superblock.clone(), of.log_at[0]);
    rig.commit(0, IN_USE + 1, &content(2));
    rig.journals.recover_disk(0).expect("its device begins anew");
    SuperblockEdit::new(&mut block).expect("a superblock").start(tail.0).sequence(tail.1).seal();
    rig.request(RequestKind::Write, at, &mut block);
    rig.commit(0, IN_USE + 2, &content(3));
    let of = &rig.file_systems[0];
    assert_eq!(replayed(&rig.file, &of.log_at).get(&(IN_USE + 2)), Some(&content(3)));
}
