//! A worker dies in the midst of something, and another one goes on: with the files that were left, as they were at that moment.

use super::*;
use crate::DiskRoute;
use crate::attached::DiskOptions;
use crate::hand_over::Change;
use crate::held_mark::HeldMark;
use crate::keeper::{HomeChange, HomeVerdict, Steps, SuperblockBlock};
use crate::mark;
use block_route::{Plan, PlanAction, Request, RequestId, RequestKind, Route, Status};
use jbd2::SuperblockEdit;
use jbd2::build::{LogBuilder, Transaction};
use journal_area::{Content, Doubt, LogWrite, Tail};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

const BLOCK: u64 = 4096;
/// Where the first partition begins.
const START: usize = 1 << 20;
const OPENING: Opening = Opening { number: *b"sixteen numbers.", count: 3 };
const OTHER: Opening = Opening { number: *b"others' numbers.", count: 3 };
const LATER: Opening = Opening { count: 4, ..OPENING };
const HERE: Tail = Tail { position: 9, sequence: 7 };

fn held() -> Adopted {
    Adopted {
        is_open: true,
        is_empty: false,
        openings: Some([LATER, OPENING]),
        is_marked: true,
        handed_over: None,
        is_recovering: false,
        is_distrusted: false,
        is_closing: false,
        numbered: None,
        doubt: Doubt::default(),
    }
}

#[test]
fn what_is_held_is_taken_up_only_if_storage_says_the_same() {
    let judged = |books: Adopted, says| judge(&books, says, 1024).ok();
    let closed = Adopted { is_open: false, is_empty: true, ..held() };
    let opening = Adopted { is_empty: true, is_marked: false, ..held() };
    let leaving = Adopted { handed_over: Some(HERE), ..held() };
    let left = Adopted { handed_over: Some(HERE), ..closed };
    let live = |position, sequence| Says::Live(Tail { position, sequence });
    // Row 1: storage may have said it already, or not yet.
    assert_eq!(judged(held(), Says::Held(OPENING)), Some(Found::Held(OPENING)));
    assert_eq!(judged(held(), Says::Held(LATER)), Some(Found::Held(LATER)));
    assert_eq!(judged(opening, Says::Held(OPENING)), Some(Found::Held(OPENING)));
    assert_eq!(judged(leaving, Says::Held(OPENING)), Some(Found::Held(OPENING)));
    for says in [Says::Held(OTHER), Says::Empty, Says::Error, Says::Stale, Says::Dropped(OPENING), live(9, 7)] {
        assert_eq!(judged(held(), says), None, "{says:?}");
        // Its guest was told that it is open, and has committed nothing yet.
        assert_eq!(judged(Adopted { is_empty: true, ..held() }, says), None, "{says:?}");
    }
    // Row 2.
    assert_eq!(judged(leaving, live(9, 7)), Some(Found::HandedOver(7)));
    for says in [live(9, 8), live(10, 7), Says::Empty] {
        assert_eq!(judged(leaving, says), None, "{says:?}");
    }
    // Row 3: also a journal that a kernel has just replayed in its own place.
    for says in [Says::Empty, Says::Error, Says::Stale, Says::Held(OTHER), live(1, 5)] {
        assert_eq!(judged(opening, says), Some(Found::NotOpened), "{says:?}");
        assert_eq!(judged(Adopted { is_empty: false, ..opening }, says), None, "{says:?}");
        assert_eq!(judged(Adopted { handed_over: Some(HERE), ..opening }, says), None, "{says:?}");
    }
    assert_eq!(judged(Adopted { openings: None, ..held() }, Says::Held(Opening { number: [0; 16], count: 0 })), None);
    // Row 5: only a recovery leaves nothing where something was held.
    let recovering = Adopted { is_recovering: true, ..held() };
    for says in [Says::Empty, Says::Error] {
        assert_eq!(judged(recovering, says), Some(Found::Recovered), "{says:?}");
        assert_eq!(judged(Adopted { is_marked: false, ..recovering }, says), None, "{says:?}");
        assert_eq!(judged(Adopted { handed_over: Some(HERE), ..recovering }, says), None, "{says:?}");
    }
    assert_eq!(judged(recovering, Says::Held(OPENING)), Some(Found::Held(OPENING)));
    assert_eq!(judged(recovering, live(9, 7)), None);
    // It was closed, and that its guest may go on with it was not written down.
    let recovered = Adopted { is_open: false, is_empty: true, ..recovering };
    assert_eq!(judged(recovered, Says::Empty), Some(Found::Recovered));
    assert_eq!(judged(recovered, live(9, 7)), Some(Found::Closed));
    assert_eq!(judged(Adopted { handed_over: Some(HERE), ..recovered }, Says::Empty), Some(Found::Closed));
    // Row 5a: not before storage says so.
    let closing = Adopted { is_closing: true, ..held() };
    assert_eq!(judged(closing, Says::Empty), Some(Found::Closing));
    assert_eq!(judged(closing, Says::Held(OPENING)), Some(Found::Held(OPENING)));
    assert_eq!(judged(Adopted { is_marked: false, ..closing }, Says::Empty), None);
    for says in [Says::Error, Says::Stale, Says::Held(OTHER), live(9, 7)] {
        assert_eq!(judged(closing, says), None, "{says:?}");
    }
    let shut = Adopted { is_open: false, is_empty: true, ..closing };
    for says in [Says::Empty, live(9, 7)] {
        assert_eq!(judged(shut, says), Some(Found::Closed), "{says:?}");
    }
    // It went elsewhere, which is not described.
    for books in [closed, left] {
        assert_eq!(judged(books, Says::Nvm(OPENING)), None);
    }
    // Rows 4 and 6.
    assert_eq!(judged(left, live(9, 7)), Some(Found::HandedOver(7)));
    assert_eq!(judged(left, live(700, 30)), Some(Found::HandedOver(7)));
    for (books, says) in [(left, live(5, 6)), (left, Says::Empty), (closed, live(9, 7)), (closed, Says::Held(OPENING))]
    {
        assert_eq!(judged(books, says), Some(Found::Closed), "{says:?}");
    }
}

/// Files of a VM's directory as they were at some moment.
type Files = Vec<(PathBuf, Vec<u8>)>;

struct Rig {
    directory: tempfile::TempDir,
    image: PathBuf,
    journals: Arc<Journals>,
    superblock: Vec<u8>,
    builder: LogBuilder,
    within: Option<Duration>,
    /// As the disk is configured.
    configured: PlacementKind,
    /// The other worker comes to the point where it serves the guest.
    goes_on: bool,
}

impl Rig {
    fn new() -> Self {
        Self::durable_within(None)
    }

    fn durable_within(within: Option<Duration>) -> Self {
        Self::configured(PlacementKind::Copy, within)
    }

    fn configured(configured: PlacementKind, within: Option<Duration>) -> Self {
        let directory = tempfile::tempdir_in("/dev/shm").expect("tmpfs");
        let image = directory.path().join("image");
        std::fs::File::create(&image).and_then(|file| file.set_len(4096 * BLOCK)).expect("an image");
        let made =
            Command::new("mke2fs").args(["-q", "-F", "-t", "ext4", "-b", "4096", "-J", "size=4"]).arg(&image).status();
        assert!(made.expect("e2fsprogs are installed").success());
        let area = AreaDirectory::create(&directory.path().join("vms"), &directory.path().join("registry"));
        let journals =
            Journals::new(&VmMemory::new(), area.expect("a directory"), options_of(&image, configured, within))
                .expect("journals");
        let log = journals.logs().remove(0);
        let mut superblock = vec![0; BLOCK as usize];
        log.read_stored(0, &mut superblock).expect("read");
        let (parsed, format) = jbd2::Superblock::parse(&superblock).expect("a journal");
        let builder = LogBuilder::new(format, parsed.first, parsed.sequence + 1);
        Rig { directory, image, journals, superblock, builder, within, configured, goes_on: true }
    }

    /// Puts its file system into the first of that many partitions.
    fn partition(&mut self, count: usize) {
        let file_system = std::fs::read(&self.image).expect("the image");
        let mut image = vec![0; START + count * file_system.len()];
        for index in 0..count {
            // An entry of a master boot record: its type is Linux.
            let (entry, start) = (0x1be + 16 * index, START + index * file_system.len());
            image[entry + 4] = 0x83;
            image[entry + 8..entry + 12].copy_from_slice(&(start as u32 / 512).to_le_bytes());
            image[entry + 12..entry + 16].copy_from_slice(&(file_system.len() as u32 / 512).to_le_bytes());
        }
        image[510..512].copy_from_slice(&[0x55, 0xaa]);
        image[START..START + file_system.len()].copy_from_slice(&file_system);
        std::fs::write(&self.image, image).expect("written");
        self.begin_anew();
    }

    /// Another VM begins with the image as it is.
    fn begin_anew(&mut self) {
        let (name, registry) = (self.directory.path().join("anew"), self.directory.path().join("registry"));
        let area = AreaDirectory::create(&name, &registry).expect("a directory");
        let options = options_of(&self.image, self.configured, self.within);
        self.journals = Journals::new(&VmMemory::new(), area, options).expect("it is served");
    }

    fn log(&self) -> Arc<KeptLog> {
        self.journals.logs().remove(0)
    }

    fn superblock_from(&self, start: u32, sequence: u32) -> Vec<u8> {
        let mut block = self.superblock.clone();
        SuperblockEdit::new(&mut block).expect("a superblock").start(start).sequence(sequence).seal();
        block
    }

    /// The superblock with which a kernel opens the log.
    fn opening(&self) -> Vec<u8> {
        self.superblock_from(self.builder.position, self.builder.sequence)
    }

    /// Whether the superblock goes to storage as it is.
    fn write_superblock(&self, block: &[u8]) -> bool {
        let superblock = SuperblockBlock { content: block, request: RequestId(0) };
        self.journals.superblock_written(&self.log(), superblock, &mut Steps::default()).1.expect("written")
    }

    fn open(&self) {
        assert!(!self.write_superblock(&self.opening()) && self.log().is_open());
    }

    fn commit(&mut self, block: u64) {
        let transaction = Transaction { blocks: vec![(block, vec![7; BLOCK as usize])], ..Transaction::default() };
        let mut writes = Vec::new();
        self.builder.transaction(&transaction, &mut |position, block| {
            writes.push(LogWrite { position, content: Content::Bytes(block.to_vec()) });
        });
        assert_eq!(self.journals.area.hold(self.log().id, &writes).committed, 1);
    }

    /// Which opening storage is said to have.
    fn opening_on_storage(&self) -> Opening {
        self.journals.area.adopted(self.log().id).and_then(|books| books.openings).expect("it is open")[0]
    }

    fn says(&self) -> Says {
        self.log().stored().expect("read").says
    }

    fn store(&self, block: &[u8]) {
        let log = self.log();
        log.journal
            .file
            .write_all_at(&block[..jbd2::SUPERBLOCK_BYTES], log.place_of(0).expect("it has one"))
            .expect("written");
    }

    fn files(&self) -> Files {
        let directory = self.journals.directory();
        let names = directory.directory().names().expect("read").into_iter().filter(|name| name != "lock");
        let paths = names.map(|name| directory.path().join(name));
        paths.map(|path| (path.clone(), std::fs::read(&path).expect("read"))).collect()
    }

    /// What is written down of the logs at this moment.
    fn description(&self) -> Files {
        self.files().into_iter().filter(|(path, _)| path.ends_with("area.json")).collect()
    }

    /// The worker is killed, and another one goes on with the files as they are, or as they were.
    fn die(&mut self, files: Option<Files>) -> io::Result<()> {
        self.die_and_serve(files, options_of(&self.image, self.configured, self.within))
    }

    /// The same, and the other one has these disks.
    fn die_and_serve(&mut self, files: Option<Files>, options: JournalsOptions) -> io::Result<()> {
        let files = files.unwrap_or_else(|| self.files());
        let directory = self.journals.directory();
        let lock = directory.lock_file().try_clone().expect("a descriptor");
        let path = directory.path().to_owned();
        for (path, content) in files {
            std::fs::write(path, content).expect("written");
        }
        let (directory, description) =
            AreaDirectory::adopt(&path, &self.directory.path().join("registry"), lock).expect("it is there");
        self.journals = Journals::resume(&VmMemory::new(), directory, &description, options)?;
        if self.goes_on { self.journals.go_on() } else { Ok(()) }
    }

    /// Why another one does not go on. What was left stays found by who finishes it after the VMM's end.
    fn is_refused(&mut self, files: Option<Files>) -> String {
        let before = self.journals.directory().description().expect("read").expect("it is there").logs;
        let error = self.die(files).expect_err("it cannot go on").to_string();
        let after = self.journals.directory().description().expect("read").expect("it is there").logs;
        assert_eq!(before, after);
        error
    }
}

fn options(image: &std::path::Path, durable_within: Option<Duration>) -> JournalsOptions {
    options_of(image, PlacementKind::Copy, durable_within)
}

fn options_of(image: &std::path::Path, placement: PlacementKind, durable_within: Option<Duration>) -> JournalsOptions {
    let disk = DiskOptions {
        name: "disk".to_owned(),
        path: image.to_owned(),
        placement,
        honour_flush: false,
        read_only: false,
        nvm: None,
        remote: None,
        durable_within,
        write_log: None,
    };
    JournalsOptions { disks: vec![disk], budget_bytes: 64 << 20, tracer: None }
}

#[test]
fn a_held_log_goes_on_again_and_again() {
    let mut rig = Rig::new();
    rig.open();
    for block in 2000..2010 {
        rig.commit(block);
        // Something went home: the mark counts on.
        crate::disk::DiskCounters::add(&rig.log().home.counters.home_bytes_to_storage, 1);
        rig.journals.tick(0);
        rig.die(None).expect("it goes on");
        let log = rig.log();
        assert!(log.is_held_open() && matches!(rig.says(), Says::Held(_)));
        assert_eq!(rig.journals.area.owed(log.id).blocks, block - 1999);
    }
    let block = rig.superblock_from(0, rig.builder.sequence);
    assert!(rig.write_superblock(&block), "and is closed as any");
    rig.die(None).expect("it goes on");
    assert!(!rig.log().is_open());
}

/// A guest suspends, and its worker dies before it goes on; or once it has said what its log is. The worker that takes over knows which.
#[test]
fn another_worker_knows_that_a_log_was_closed_under_its_guest() {
    let mut rig = Rig::new();
    assert!(!rig.log().may_go_on_unannounced());
    let opening = rig.opening();
    rig.open();
    rig.commit(2000);
    let description = rig.description();
    rig.journals.recover_disk(0).expect("its device begins anew");
    for (path, bytes) in description {
        // Killed before it was written down.
        std::fs::write(path, bytes).expect("written");
    }
    for _ in 0..2 {
        rig.die(None).expect("it goes on");
        assert!(rig.log().may_go_on_unannounced() && rig.says() == Says::Empty);
    }
    let sequence = rig.builder.sequence;
    let mut writes = Vec::new();
    let transaction = Transaction { blocks: vec![(2001, vec![8; BLOCK as usize])], ..Transaction::default() };
    rig.builder.transaction(&transaction, &mut |position, block| writes.push((position, block.to_vec())));
    let memory = guest_memory::VmMemory::new();
    let goes_on = |rig: &Rig, (position, block): &(u32, Vec<u8>)| {
        let slice = simulated(&memory, block);
        rig.journals.goes_on_unannounced(&rig.log(), *position, &[slice]).expect("understood")
    };
    let description = rig.description();
    let said: Vec<bool> = writes.iter().map(|write| goes_on(&rig, write)).collect();
    assert_eq!(said, [false, false, true], "the commit");
    assert_eq!(rig.says(), Says::Live(Tail { position: writes[0].0, sequence }));
    for (path, bytes) in description {
        // Killed before that was written down.
        std::fs::write(path, bytes).expect("written");
    }
    for _ in 0..2 {
        rig.die(None).expect("it goes on");
        assert!(rig.log().is_open() && !rig.log().may_go_on_unannounced());
        assert!(!rig.write_superblock(&opening), "what it says is there is not there");
    }

    let mut rig = Rig::new();
    rig.open();
    rig.commit(2000);
    rig.journals.recover_disk(0).expect("its device begins anew");
    rig.journals.scan(0).expect("looked at");
    let block = rig.superblock_from(0, rig.builder.sequence + 1);
    rig.write_superblock(&block);
    rig.die(None).expect("it goes on");
    assert!(!rig.log().may_go_on_unannounced(), "a new kernel has looked at it");
}

/// A worker dies in the midst of the transaction with which a guest goes on: the next one finds its beginning on storage, or not all of it.
#[test]
fn a_transaction_that_two_workers_have_seen_goes_on_whole() {
    let memory = guest_memory::VmMemory::new();
    for (dies_after, is_lost) in [(0, None), (1, None), (2, None), (2, Some(1))] {
        let mut rig = Rig::new();
        rig.open();
        rig.commit(2000);
        rig.journals.recover_disk(0).expect("its device begins anew");
        rig.journals.scan(0).expect("looked at");
        let sequence = rig.builder.sequence;
        let mut writes = Vec::new();
        let blocks = vec![(2001, vec![8; BLOCK as usize])];
        let transaction = Transaction { blocks, revokes: vec![2000], ..Transaction::default() };
        rig.builder.transaction(&transaction, &mut |position, block| writes.push((position, block.to_vec())));
        assert_eq!(writes.len(), 4, "revokes come first");
        for (index, (position, block)) in writes.iter().enumerate() {
            let log = rig.log();
            let slice = simulated(&memory, block);
            let goes_on = rig.journals.goes_on_unannounced(&log, *position, &[slice]);
            match (index, is_lost) {
                (3, None) => {
                    assert!(goes_on.expect("understood"), "died after {dies_after}");
                    assert_eq!(rig.says(), Says::Live(Tail { position: writes[0].0, sequence }));
                }
                (3, Some(_)) => {
                    let error = goes_on.expect_err("it is not whole");
                    assert!(error.to_string().contains("did not come whole"), "{error}");
                    assert_eq!(rig.says(), Says::Empty);
                }
                _ => assert!(!goes_on.expect("understood")),
            }
            if is_lost != Some(index) {
                let at = log.place_of(*position).expect("it has one");
                log.journal.file.write_all_at(block, at).expect("written");
            }
            if index == dies_after {
                rig.die(None).expect("it goes on");
            }
        }
    }
}

/// A block as a page of a guest's.
fn simulated(memory: &Arc<VmMemory>, block: &[u8]) -> guest_memory::MemorySlice {
    let name = format!("page-{}", memory.page_count());
    let file = tempfile::tempfile_in("/dev/shm").expect("tmpfs");
    file.set_len(BLOCK).expect("a length");
    file.write_all_at(block, 0).expect(&name);
    let at = u64::from(memory.page_count()) * BLOCK;
    let region =
        guest_memory::RegionDescriptor { gpa: at, size: BLOCK, user_addr: 0x7000_0000 + at, file, file_offset: 0 };
    let page = guest_memory::PageId(memory.page_count());
    memory.map(vec![region]).expect("mapped");
    memory.page(page).expect("a page").sub(0, block.len())
}

/// What was durable stays so, and what was not becomes so first: in one compound, with the number after those that are there. Where all of it
/// is there already, there is none.
#[test]
fn one_that_was_made_durable_by_age_stays_so() {
    use crate::keeper::{Side, Step};
    for within in [Duration::from_secs(3600), Duration::ZERO] {
        let mut rig = Rig::durable_within(Some(within));
        rig.open();
        let mut numbers = Vec::new();
        for (block, deaths) in [(2000, 1), (2001, 1), (2001, 2), (2002, 2), (2002, 1)] {
            if rig.journals.area.owed(rig.log().id).blocks < block - 1999 {
                rig.commit(block);
            }
            for _ in 0..deaths {
                rig.die(None).expect("it goes on");
                assert!(matches!(rig.says(), Says::Aged(..)), "{:?}", rig.says());
            }
            let log = rig.log();
            assert!(log.is_held_open());
            assert_eq!(rig.journals.area.owed(log.id).blocks, block - 1999);
            let mut steps = Steps::default();
            log.keeper.woken(&log, Side::Home, &mut steps);
            assert!(
                matches!(steps.0[..], [(_, Step::Flush { .. })]),
                "nothing is built on what may be lost: {steps:?}"
            );
            while !steps.0.is_empty() {
                let mut next = Steps::default();
                for (_, step) in steps.0 {
                    match step {
                        Step::Write { mut offset, content, task, .. } => {
                            for buffer in content {
                                let block_route::Buffer::Bytes(bytes) = buffer else { unreachable!("its own bytes") };
                                if let Some(jbd2::Header { kind: jbd2::Kind::Descriptor, sequence }) =
                                    jbd2::peek(&bytes[..12])
                                {
                                    numbers.push(sequence);
                                }
                                log.journal.file.write_all_at(&bytes, offset).expect("written");
                                offset += bytes.len() as u64;
                            }
                            log.keeper.done(&log, task, None, &mut next);
                        }
                        Step::Flush { task } => log.keeper.done(&log, task, None, &mut next),
                        _ => {}
                    }
                }
                steps = next;
            }
            assert_eq!(numbers.len() as u64, block - 1999);
        }
        assert!(numbers.windows(2).all(|two| two[0] + 1 == two[1]), "{numbers:?}");
        // Another opening's mark is not followed.
        let raw = rig.superblock.clone();
        let (first, sequence) = (rig.builder.position, rig.builder.sequence);
        rig.store(&mark::aged(&raw, &OTHER, (first, sequence)).expect("a superblock"));
        assert!(rig.is_refused(None).contains("another opening"));
    }
}

/// A loss of power has left what was durable, and a worker dies before the guest begins that it is replayed for: the next one does that, whatever
/// is configured by now.
#[test]
fn what_a_loss_of_power_has_left_waits_for_the_guest_that_begins() {
    for configured in [PlacementKind::Copy, PlacementKind::Storage] {
        let within = Some(Duration::from_secs(3600));
        let mut rig = Rig::durable_within(within);
        rig.open();
        assert!(matches!(rig.says(), Says::Aged(..)));
        rig.configured = configured;
        rig.within = within.filter(|_| configured.is_held());
        rig.begin_anew();
        for _ in 0..2 {
            rig.die(None).expect("it goes on");
            assert!(!rig.log().is_open() && matches!(rig.says(), Says::Aged(..)), "{:?}", rig.says());
        }
        rig.journals.replay_aged(0).expect("replayed");
        assert!(matches!(rig.says(), Says::Empty), "{:?}", rig.says());
    }
}

/// Where it is not wished any more, what was durable is given up, as the last thing.
#[test]
fn one_that_was_made_durable_by_age_goes_on_held() {
    let mut rig = Rig::durable_within(Some(Duration::from_secs(3600)));
    rig.open();
    rig.commit(2000);
    rig.within = None;
    for _ in 0..3 {
        rig.die(None).expect("it goes on");
        assert!(rig.log().is_held_open() && matches!(rig.says(), Says::Held(_)), "{:?}", rig.says());
    }
    assert_eq!(rig.journals.area.owed(rig.log().id).blocks, 1);
}

/// A mark that gave compounds up may not be durable yet when its worker dies, and an earlier amberlog's may say a number that compounds in the
/// log's place have had, which the next kernel would come to.
#[test]
fn a_mark_beside_compounds_is_written_anew_by_whoever_goes_on() {
    let mut rig = Rig::new();
    rig.open();
    rig.commit(2000);
    let before = rig.opening_on_storage();
    let number = rig.builder.sequence + 5;
    rig.journals.area.note_numbered(rig.log().id, Some(number));
    for deaths in 1..4 {
        rig.goes_on = false;
        rig.die(None).expect("it is taken up");
        assert!(rig.log().is_held_open());
        assert_eq!(rig.opening_on_storage().count, before.count + deaths - 1);
        rig.journals.go_on().expect("it goes on");
        assert_eq!(rig.opening_on_storage(), Opening { count: before.count + deaths, ..before });
        let mut raw = [0; jbd2::SUPERBLOCK_BYTES];
        let log = rig.log();
        log.journal.file.read_exact_at(&mut raw, log.place_of(0).expect("a place")).expect("read");
        let said = Superblock::decode(&raw).expect("a superblock");
        assert_eq!((said.sequence, said.is_empty(), said.errno != 0), (number, true, true));
    }
    assert_eq!(rig.journals.area.owed(rig.log().id).blocks, 1);
}

/// One that was written and could not be flushed may be lost without another word: it is written anew before anything counts on it.
#[test]
fn a_mark_that_may_be_lost_is_written_anew() {
    let rig = Rig::new();
    rig.open();
    let (log, area) = (rig.log(), &rig.journals.area);
    let number = rig.builder.sequence;
    let ahead = || crate::opening::mark_ahead(&log, area, number).map(|()| rig.opening_on_storage().count);
    let first = ahead().expect("written");
    assert_eq!(ahead().expect("nothing is to be done"), first);
    let marked = log.take_mark().expect("a mark");
    log.put_mark_back(Some(Marked { is_durable: false, ..marked }));
    assert_eq!(ahead().expect("written"), first + 1);
    assert_eq!(ahead().expect("nothing is to be done"), first + 1);
}

/// A hand-over that fails before it has begun leaves the log as it was: it is made durable by age again.
#[test]
fn a_hand_over_that_cannot_write_its_mark_did_not_begin() {
    let mut rig = Rig::durable_within(Some(Duration::from_secs(3600)));
    rig.open();
    rig.commit(2000);
    let log = rig.log();
    let change = rig.journals.change_placement(log.index, PlacementKind::Storage).expect("possible");
    assert_eq!(change, Change::HandOver);
    let index = log.index;
    // What was made durable ends first.
    assert!(!rig.journals.hand_over(index).expect("not yet"));
    log.keeper.woken(&log, crate::keeper::Side::Home, &mut Steps::default());
    assert!(matches!(rig.says(), Says::Held(_)), "{:?}", rig.says());
    let reason = || log.keeper.durability(&log).and_then(|report| report.reason);
    assert!(reason().is_some_and(|reason| reason.contains("on its way to storage")), "{:?}", reason());
    let marked = log.take_mark().expect("a mark");
    log.put_mark_back(Some(Marked { bytes: vec![0; 1024], is_durable: false, ..marked.clone() }));
    assert!(rig.journals.hand_over(index).is_err());
    log.put_mark_back(Some(marked));
    assert!(reason().is_some_and(|reason| reason.contains("not yet")), "{:?}", reason());
    assert!(rig.journals.hand_over(index).expect("handed over"));
}

/// What the books know of compounds has to be what is there: with no age nobody goes on otherwise, and with one it begins anew.
#[test]
fn compounds_that_are_not_as_the_books_say_are_not_followed() {
    for (ahead, is_followed) in [(0, true), (1, true), (2, false), (u32::MAX, false)] {
        for within in [Duration::from_secs(3600), Duration::ZERO] {
            let mut rig = Rig::durable_within(Some(within));
            rig.open();
            rig.commit(2000);
            let next = rig.builder.sequence - 1;
            rig.journals.area.note_numbered(rig.log().id, Some(next.wrapping_add(ahead)));
            match (is_followed, within.is_zero()) {
                (false, true) => assert!(rig.is_refused(None).contains("durable-within=0"), "{ahead} ahead"),
                _ => {
                    rig.die(None).expect("it goes on");
                    assert_eq!(matches!(rig.says(), Says::Aged(..)), is_followed, "{ahead} ahead");
                    let log = rig.log();
                    log.keeper.woken(&log, crate::keeper::Side::Home, &mut Steps::default());
                    let numbered = rig.journals.area.adopted(log.id).and_then(|books| books.numbered);
                    assert!(!is_followed || numbered == Some(next + ahead), "{numbered:?}, {ahead} ahead");
                }
            }
        }
    }
}

/// What the guest's log has let go of is at home, or was freed. Its superblock is never freed.
#[test]
fn what_the_log_has_let_go_of_is_told_from_what_is_never_freed() {
    use crate::keeper::{Side, Step};
    use durability::FoundSaid;
    use std::collections::HashMap;
    let mut rig = Rig::durable_within(Some(Duration::from_secs(3600)));
    rig.open();
    rig.commit(0);
    rig.commit(2000);
    rig.die(None).expect("it goes on");
    let log = rig.log();
    let mut steps = Steps::default();
    log.keeper.woken(&log, Side::Home, &mut steps);
    while !steps.0.is_empty() {
        let mut next = Steps::default();
        for (_, step) in steps.0 {
            if let Step::Write { mut offset, content, task, .. } = step {
                for buffer in content {
                    let block_route::Buffer::Bytes(bytes) = buffer else { unreachable!("its own bytes") };
                    log.journal.file.write_all_at(&bytes, offset).expect("written");
                    offset += bytes.len() as u64;
                }
                log.keeper.done(&log, task, None, &mut next);
            } else if let Step::Flush { task } = step {
                log.keeper.done(&log, task, None, &mut next);
            }
        }
        steps = next;
    }
    let mut raw = vec![0; BLOCK as usize];
    log.read_stored(0, &mut raw).expect("read");
    let (_, format) = jbd2::Superblock::parse(&raw).expect("a journal");
    let numbered = rig.journals.area.adopted(log.id).and_then(|books| books.numbered);
    let found = |format, owed: &HashMap<u64, (u32, Arc<[u8]>)>| {
        let owed = |block: u64| owed.get(&block).cloned();
        let found = crate::followed::found(&log, &rig.journals.area, &raw, &format, &owed, numbered)?;
        Ok::<_, String>(found.copies.iter().map(|copy| (copy.block, copy.said)).collect::<Vec<_>>())
    };
    let other = jbd2::Format { block_size: 1024, ..format };
    assert!(found(other, &HashMap::new()).is_err_and(|why| why.contains("another format")));
    let owed = [(0, 0), (2000, 7)].map(|(block, byte)| (block, (5, Arc::from(vec![byte; BLOCK as usize]))));
    assert_eq!(
        found(format, &HashMap::from(owed)).expect("a log"),
        [(0, FoundSaid::Newer), (2000, FoundSaid::Same(5))]
    );
    // The guest's tail waits for the revoke of both, as they are not seen to be at home: rule (g).
    let moved = rig.superblock_from(rig.builder.position, rig.builder.sequence);
    let superblock = SuperblockBlock { content: &moved, request: RequestId(1) };
    let mut steps = Steps::default();
    rig.journals.superblock_written(&log, superblock, &mut steps).1.expect("it waits");
    assert!(!steps.0.iter().any(|(_, step)| matches!(step, Step::Superblock(..))), "it is told too early");
    // An earlier amberlog let it pass.
    rig.journals.area.superblock_written(log.id, &moved).expect("taken");
    assert_eq!(
        found(format, &HashMap::new()).expect("a log"),
        [(0, FoundSaid::AtHome(rig.builder.sequence - 1)), (2000, FoundSaid::Nothing)]
    );
}

/// Books that contradict themselves name nothing: that is not taken for a log of which all is home.
#[test]
fn nothing_is_followed_by_books_that_are_wrong() {
    for within in [Duration::from_secs(3600), Duration::ZERO] {
        let mut rig = Rig::durable_within(Some(within));
        rig.open();
        let id = rig.log().id;
        // It has grown, and whoever goes on does not see it.
        rig.journals.area.resize_home(id, 5000);
        rig.commit(4500);
        if within.is_zero() {
            assert!(rig.is_refused(None).contains("its books are wrong"));
        } else {
            rig.die(None).expect("it goes on");
            assert!(matches!(rig.says(), Says::Held(_)), "{:?}", rig.says());
        }
    }
}

/// What storage has may be lost: it is no truth, and not called one, whatever was promised.
#[test]
fn nothing_is_followed_where_storage_has_failed() {
    for within in [Duration::from_secs(3600), Duration::ZERO] {
        let mut rig = Rig::durable_within(Some(within));
        rig.open();
        rig.commit(2000);
        rig.journals.area.note_doubt(rig.log().id, |doubt| doubt.is_doubted = true);
        for _ in 0..2 {
            rig.die(None).expect("it goes on");
            assert!(rig.log().is_held_open() && matches!(rig.says(), Says::Held(_)), "{:?}", rig.says());
        }
    }
}

/// Storage fails just when it is to say that a log is empty: it is open, and the table says so.
#[test]
fn one_that_could_not_be_closed_is_not_being_closed() {
    use crate::keeper::{Side, Step};
    let rig = Rig::durable_within(Some(Duration::from_secs(3600)));
    rig.open();
    let log = rig.log();
    let is_closing = || rig.journals.area.adopted(log.id).expect("it is there").is_closing;
    let closing = rig.superblock_from(0, rig.builder.sequence);
    let mut steps = Steps::default();
    let superblock = SuperblockBlock { content: &closing, request: RequestId(1) };
    rig.journals.superblock_written(&log, superblock, &mut steps).1.expect("it waits");
    log.keeper.woken(&log, Side::Home, &mut steps);
    let mut was_closing = false;
    while !steps.0.is_empty() {
        let mut next = Steps::default();
        for (_, step) in steps.0 {
            match step {
                Step::Write { task, .. } => {
                    was_closing |= is_closing();
                    let failed = std::io::Error::other("storage failed");
                    log.keeper.done(&log, task, is_closing().then_some(&failed), &mut next);
                }
                Step::Flush { task } => log.keeper.done(&log, task, None, &mut next),
                _ => {}
            }
        }
        steps = next;
    }
    assert!(was_closing && !is_closing() && matches!(rig.says(), Says::Held(_)), "{:?}", rig.says());
}

/// A guest's tail passes what it was told is home when it is, whoever goes on by then.
#[test]
fn what_was_absorbed_goes_home_whoever_goes_on() {
    use crate::keeper::Step;
    for within in [None, Some(Duration::from_secs(3600))] {
        let mut rig = Rig::durable_within(Some(Duration::from_secs(3600)));
        rig.open();
        rig.commit(2000);
        rig.commit(2001);
        let (area, id) = (&rig.journals.area, rig.log().id);
        let mut writes = area.host_writes(id, 1, false);
        let (operation, write) = writes.remove(0);
        let journal_area::Source::Held(content) = write.source else { panic!("it is held") };
        area.home_write_ended(id, operation, false);
        assert!(area.absorb(id, &(2000..2001), &[Some(content)], None, 8));
        rig.within = within;
        rig.die(None).expect("it goes on");
        let log = rig.log();
        assert_eq!(rig.journals.area.absorbed(log.id), 1);
        assert!(log.keeper.shows_homes(&log));
        let tail = rig.opening();
        let superblock = SuperblockBlock { content: &tail, request: RequestId(7) };
        let mut steps = Steps::default();
        rig.journals.superblock_written(&log, superblock, &mut steps).1.expect("it is held");
        log.keeper.woken(&log, crate::keeper::Side::Home, &mut steps);
        let mut taken = 0;
        while !steps.0.is_empty() {
            let mut next = Steps::default();
            for (_, step) in steps.0 {
                match step {
                    Step::Write { mut offset, content, task, .. } => {
                        for buffer in content {
                            let mut bytes = vec![0; buffer.len()];
                            match buffer {
                                block_route::Buffer::Slice(slice) => slice.copy_out(0, &mut bytes),
                                block_route::Buffer::Bytes(given) => bytes.copy_from_slice(&given),
                            }
                            log.home.file.write_all_at(&bytes, offset).expect("written");
                            offset += bytes.len() as u64;
                        }
                        log.keeper.done(&log, task, None, &mut next);
                    }
                    Step::Flush { task } => log.keeper.done(&log, task, None, &mut next),
                    Step::Retry => log.keeper.drive(&log, &mut next),
                    Step::Superblock(request, _) => {
                        assert_eq!(request, RequestId(7));
                        let mut home = vec![0; BLOCK as usize];
                        log.home.file.read_exact_at(&mut home, 2000 * BLOCK).expect("read");
                        assert!(home.iter().all(|byte| *byte == 7), "what the guest was told is home is");
                        taken += 1;
                    }
                    _ => {}
                }
            }
            steps = next;
        }
        assert_eq!(taken, 1, "the tail waits for nothing more");
        assert!(!log.keeper.shows_homes(&log));
    }
}

/// Nothing begins, and nothing is given up, but as the last thing: while nobody goes on with the guest, a loss of power finds what was durable.
#[test]
fn storage_is_as_it_was_until_the_guest_is_served() {
    let mut rig = Rig::durable_within(Some(Duration::from_secs(3600)));
    rig.open();
    rig.commit(2000);
    let raw = |rig: &Rig| rig.log().stored_superblock().expect("read");
    let before = raw(&rig);
    // Something else fails, as often as it likes.
    rig.goes_on = false;
    for within in [Some(3600), Some(0), Some(3600), None, None] {
        rig.within = within.map(Duration::from_secs);
        rig.die(None).expect("its books are good");
        assert!(rig.log().is_held_open() && raw(&rig) == before && matches!(rig.says(), Says::Aged(..)));
        // Nothing of its own begins before, nor is anything counted.
        crate::disk::DiskCounters::add(&rig.log().home.counters.home_bytes_to_storage, 1);
        rig.journals.tick(0);
        let mut steps = Steps::default();
        rig.log().begin_emptying();
        rig.log().keeper.woken(&rig.log(), crate::keeper::Side::Home, &mut steps);
        assert!(!rig.log().keeper.may_be_taken(&rig.log()), "storage has what is not the guest's own");
        use crate::keeper::Step;
        let is_begun = |step: &Step| matches!(step, Step::Write { .. } | Step::Flush { .. });
        assert!(!steps.0.iter().any(|(_, step)| is_begun(step)) && raw(&rig) == before);
    }
    rig.goes_on = true;
    rig.die(None).expect("it goes on");
    assert!(matches!(rig.says(), Says::Held(_)));
    // Another journal of the VM cannot be followed: this one is as it was.
    let mut rig = Rig::durable_within(Some(Duration::from_secs(3600)));
    std::fs::copy(&rig.image, rig.directory.path().join("other")).expect("copied");
    let block = rig.opening();
    rig.open();
    rig.commit(2000);
    let own = options(&rig.image, None).disks[0].name.clone();
    let both = |rig: &Rig| {
        let mut options = named(rig, &[&own, "other"]);
        options.disks[0].durable_within = rig.within;
        options
    };
    rig.die_and_serve(None, both(&rig)).expect("one came");
    let log = rig.journals.logs().remove(1);
    let superblock = SuperblockBlock { content: &block, request: RequestId(0) };
    rig.journals.superblock_written(&log, superblock, &mut Steps::default()).1.expect("written");
    rig.store(&mark::aged(&block, &rig.opening_on_storage(), (9, 7)).expect("a superblock"));
    let other = log.place_of(0).expect("it has one");
    let torn = mark::marked(&block, MarkKind::Held, &OTHER).expect("a superblock");
    log.journal.file.write_all_at(&torn, other).expect("written");
    let before = raw(&rig);
    let options = both(&rig);
    assert!(rig.die_and_serve(None, options).expect_err("one of them").to_string().contains("another opening"));
    assert!(raw(&rig) == before && matches!(rig.says(), Says::Aged(..)));
}

/// Whether a flush of the guest is told at once that one has failed.
fn is_flush_told(route: &mut DiskRoute) -> bool {
    let request = Request { id: RequestId(7), kind: RequestKind::Flush, offset: 0, len: 0, segments: &[] };
    let mut plan = Plan::default();
    route.route(&request, &mut plan);
    route.end_of_pass(&mut plan);
    plan.actions.iter().any(|action| matches!(action, PlanAction::Release(_, Status::IoError)))
}

/// A flush has failed, and who asked for it has died: its guest hears of it all the same, once, and nothing vouches for storage under
/// this mount.
#[test]
fn storage_that_has_failed_has_failed_whoever_goes_on() {
    for is_told in [false, true] {
        let mut rig = Rig::durable_within(Some(Duration::from_secs(3600)));
        rig.open();
        rig.commit(2000);
        rig.journals.disk(0).note_failed_flush();
        if is_told {
            let mut route = DiskRoute::new(Arc::clone(&rig.journals), 0);
            assert!(is_flush_told(&mut route));
            // With this it has the answer.
            assert!(!is_flush_told(&mut route));
        }
        for deaths in 1..=3 {
            rig.die(None).expect("it goes on");
            let log = rig.log();
            let mut steps = Steps::default();
            rig.journals.tick(0);
            log.keeper.woken(&log, crate::keeper::Side::Home, &mut steps);
            let writes = |step: &crate::keeper::Step| matches!(step, crate::keeper::Step::Write { .. });
            assert!(!steps.0.iter().any(|(_, step)| writes(step)) && matches!(rig.says(), Says::Held(_)));
            let durability = rig.journals.report("vm").disks[0].durability.clone().expect("it was asked for");
            assert!(durability.reason.is_some_and(|why| why.contains("storage has failed")), "death {deaths}");
            let mut route = DiskRoute::new(Arc::clone(&rig.journals), 0);
            // One that dies before the guest can have the answer says so again.
            assert_eq!(is_flush_told(&mut route), !is_told && deaths < 3, "death {deaths}");
            if deaths > 1 {
                assert!(!is_flush_told(&mut route));
            }
        }
        // Mounted again.
        let log = rig.log();
        rig.journals.area.close(log.id);
        log.set_closed();
        rig.store(&rig.superblock_from(0, rig.builder.sequence));
        rig.open();
        assert!(matches!(rig.says(), Says::Aged(..)), "{:?}", rig.says());
        rig.die(None).expect("it goes on");
        let log = rig.log();
        log.keeper.woken(&log, crate::keeper::Side::Home, &mut Steps::default());
        let durability = rig.journals.report("vm").disks[0].durability.clone().expect("it was asked for");
        assert!(durability.reason.is_none_or(|why| why.contains("not yet")), "it begins");
    }
}

/// What its guest brought, or was left, goes on in its own place, and is said to.
#[test]
fn a_journal_that_is_not_where_it_was_asked_to_be_says_so() {
    let mut rig = Rig::durable_within(Some(Duration::from_secs(5)));
    let disk = |rig: &Rig| rig.journals.report("vm").disks.remove(0);
    assert_eq!((disk(&rig).placement_effective, disk(&rig).placement_reason), ("copy", None));
    // A kernel has replayed a log of its own, and goes on in it.
    let mut first = Vec::new();
    let transaction = Transaction { blocks: vec![(2000, vec![7; BLOCK as usize])], ..Transaction::default() };
    let opening = rig.opening();
    rig.builder.transaction(&transaction, &mut |position, block| first.push((position, block.to_vec())));
    for (position, block) in first {
        let at = rig.log().place_of(position).expect("it has one");
        rig.log().journal.file.write_all_at(&block, at).expect("written");
    }
    assert!(rig.write_superblock(&opening) && !rig.log().is_open(), "it stays where it is");
    let said = disk(&rig);
    assert_eq!((said.placement, said.placement_effective), ("copy", "storage"));
    assert!(said.placement_reason.expect("a reason").contains("next unmounted"));
    let durability = said.durability.expect("it was asked for");
    assert_eq!(durability.within_s, None);
    assert!(durability.reason.expect("a reason").contains("next unmounted"));
    // It is unmounted.
    let empty = rig.superblock_from(0, rig.builder.sequence);
    assert!(rig.write_superblock(&empty));
    rig.store(&empty);
    assert_eq!((disk(&rig).placement_effective, disk(&rig).placement_reason), ("copy", None));
    rig.open();
    assert!(disk(&rig).durability.is_some_and(|durability| durability.within_s == Some(5)));
}

/// A log in its own place that cannot be read is not called whole.
#[test]
fn what_cannot_be_read_is_not_left_as_if_it_were_whole() {
    let rig = Rig::new();
    rig.store(&rig.superblock_from(9, 7));
    let log = rig.log();
    let left = crate::finish::leave_stored(&log.place, &log.journal.file);
    assert_eq!(left.expect("read").status, recovery::Status::Materialised);
    // What jbd2 would not begin with, whatever is wrong with it.
    let good = rig.superblock_from(9, 7);
    for (offset, is) in [(0, 0xdead_beef_u32), (0x0c, 8192), (0x10, 1 << 30), (0x1c, 1 << 30)] {
        let mut bad = good.clone();
        bad[offset..offset + 4].copy_from_slice(&is.to_be_bytes());
        if offset > 0 {
            jbd2::SuperblockEdit::new(&mut bad).expect("a superblock").seal();
        }
        rig.store(&bad);
        let left = crate::finish::leave_stored(&log.place, &log.journal.file).expect("it can be read");
        assert_eq!((left.status, left.blocks_written), (recovery::Status::Damaged, 0), "{offset:#x}: {left:?}");
        assert!(!left.notes.iter().any(|note| note.contains("is whole")), "{left:?}");
    }
    rig.store(&good);
    let cut = std::fs::File::options().write(true).open(&rig.image).expect("opened");
    cut.set_len(log.place_of(2).expect("it has one")).expect("cut off");
    let error = crate::finish::leave_stored(&log.place, &log.journal.file).expect_err("it is not there");
    assert!(!error.is_refusal(), "{error}");
}

#[test]
fn one_that_was_being_opened_is_opened_once_more() {
    let mut rig = Rig::new();
    // Its table is open, and storage does not say so yet.
    rig.journals.area.superblock_written(rig.log().id, &rig.opening()).expect("there is room");
    rig.die(None).expect("it goes on");
    assert!(!rig.log().is_open() && !rig.journals.area.is_open(rig.log().id));
    // Storage says so, and nobody has noted that.
    let block = rig.opening();
    rig.journals.area.superblock_written(rig.log().id, &block).expect("there is room");
    rig.journals.area.note_opening(rig.log().id, &OPENING, false);
    rig.store(&mark::marked(&block, MarkKind::Held, &OPENING).expect("a superblock"));
    rig.die(None).expect("it goes on");
    assert!(rig.log().is_held_open());
    assert!(!rig.write_superblock(&block), "the guest, which was not answered, says it again");
    rig.commit(2000);
    rig.die(None).expect("it goes on");
    assert_eq!(rig.journals.area.owed(rig.log().id).blocks, 1);
}

#[test]
fn one_that_was_being_closed_is_closed_once_more() {
    let mut rig = Rig::new();
    rig.open();
    rig.commit(2000);
    let block = rig.superblock_from(0, rig.builder.sequence);
    assert!(rig.write_superblock(&block), "it is not on storage yet");
    rig.die(None).expect("it goes on");
    assert!(!rig.log().is_open() && matches!(rig.says(), Says::Held(_)));
    assert!(rig.write_superblock(&block));
    rig.store(&block);
    rig.die(None).expect("it goes on");
    assert!(!rig.log().is_open() && rig.says() == Says::Empty);
}

/// It was made durable by age, and its last compound has the number that its guest's next transaction will have: its worker is killed when storage
/// says that the log is empty, and before that compound is overwritten.
#[test]
fn no_last_compound_stays_that_its_guest_would_meet() {
    use std::collections::BTreeSet;
    let mut rig = Rig::durable_within(Some(Duration::from_secs(3600)));
    rig.open();
    rig.commit(2000);
    let (log, next) = (rig.log(), rig.builder.sequence);
    let heads = |rig: &Rig| -> BTreeSet<u32> {
        let log = rig.log();
        let mut head = [0; jbd2::HEADER_BYTES];
        let mut number = |position: u32| {
            log.journal.file.read_exact_at(&mut head, log.place_of(position).expect("it has one")).expect("read");
            jbd2::peek(&head).map(|header| header.sequence)
        };
        (1..log.place.log_blocks).filter_map(&mut number).collect()
    };
    // Compounds of the two numbers before that one, that one, and a number that only an earlier opening can have had.
    let (_, format) = jbd2::Superblock::parse(&rig.superblock).expect("a journal");
    let last = next.wrapping_add(1);
    let mut compounds = LogBuilder::new(format, 40, next - 2);
    for _ in 0..4 {
        let transaction = Transaction { blocks: vec![(2000, vec![7; BLOCK as usize])], ..Transaction::default() };
        compounds.transaction(&transaction, &mut |position, block| {
            let at = log.place_of(position).expect("it has one");
            log.journal.file.write_all_at(block, at).expect("written");
        });
    }
    assert_eq!(heads(&rig), (next - 2..=last).collect());
    rig.journals.area.note_numbered(log.id, Some(last));
    rig.journals.area.note_closing(log.id, true);
    rig.store(&rig.superblock_from(0, last));
    let before = rig.files();
    rig.die(None).expect("it goes on");
    assert!(!rig.log().is_open() && rig.says() == Says::Empty);
    assert_eq!(heads(&rig), [next - 2, next - 1, last].into(), "what its guest would meet is not there");
    // The next snapshot has them so, also where this worker dies before who keeps account of writes was told, behind that or in its midst.
    let is_told = |rig: &Rig| {
        let (place, written) = (&rig.log().place, rig.journals.written_to_go_on(0));
        let mut offsets = (0..place.log_blocks).map(|position| place.offset_of(position).expect("it has one"));
        offsets.all(|at| written.iter().any(|range| range.contains(&at)))
    };
    assert!(is_told(&rig));
    rig.die(None).expect("it goes on");
    assert!(!rig.log().is_open() && is_told(&rig));
    rig.die(Some(before)).expect("it goes on");
    assert!(!rig.log().is_open() && is_told(&rig));
    // It closes it once more, with its own number.
    let block = rig.superblock_from(0, next);
    assert!(rig.write_superblock(&block));
    rig.store(&block);
    assert!(!heads(&rig).contains(&next));
}

#[test]
fn one_whose_mark_is_not_there_any_more_is_refused() {
    for commits in 0..2 {
        let mut rig = Rig::new();
        rig.open();
        (0..commits).for_each(|index| rig.commit(2000 + index));
        let clean = rig.superblock.clone();
        rig.store(&clean);
        let why = rig.is_refused(None);
        assert!(why.contains("storage does not say any more that it is held"), "{why}");
        rig.store(&mark::marked(&clean, MarkKind::Held, &OTHER).expect("a superblock"));
        assert!(rig.is_refused(None).contains("another opening"));
    }
}

#[test]
fn one_that_was_handed_over_is_on_storage() {
    for moment in ["noted", "said", "closed"] {
        let mut rig = Rig::new();
        rig.open();
        rig.commit(2000);
        let id = rig.log().id;
        let from = Tail { position: rig.builder.position, sequence: rig.builder.sequence };
        let before = rig.files();
        rig.journals.area.look(id, |held| held.note_hand_over(Some(from))).expect("there");
        let noted = rig.files();
        if moment == "noted" {
            rig.die(Some(noted)).expect("it goes on");
            assert!(rig.log().is_held_open(), "storage has not said so");
            assert_eq!(rig.journals.area.adopted(rig.log().id).expect("there").handed_over, None);
            continue;
        }
        assert!(rig.journals.hand_over(rig.log().index).expect("handed over"));
        assert_eq!(rig.says(), Says::Live(from));
        let files = if moment == "said" {
            noted
        } else {
            // The description says still that it is held.
            let is_description = |path: &PathBuf| path.ends_with("area.json");
            let described = before.into_iter().filter(|(path, _)| is_description(path));
            rig.files().into_iter().filter(|(path, _)| !is_description(path)).chain(described).collect()
        };
        rig.die(Some(files)).expect("it goes on");
        let log = rig.log();
        assert!(log.is_open() && log.placement == PlacementKind::Storage, "{moment}");
        assert!(!rig.journals.area.is_open(log.id));
        // A superblock that says less than storage does stays away from there.
        assert!(!rig.write_superblock(&rig.superblock_from(from.position - 3, from.sequence - 1)), "{moment}");
        assert!(rig.write_superblock(&rig.superblock_from(from.position, from.sequence)), "{moment}");
        rig.die(None).expect("it goes on");
        assert!(rig.log().is_open() && rig.log().placement == PlacementKind::Storage);
    }
}

/// What a disk was configured as says nothing of what its journal is by now.
#[test]
fn what_is_held_goes_on_whatever_was_configured() {
    use PlacementKind::{Copy, Retain, Storage};
    for configured in [Storage, Copy, Retain] {
        for live in [Copy, Retain] {
            let mut rig = Rig::configured(configured, None);
            let index = rig.log().index;
            assert_eq!(rig.journals.change_placement(index, live).expect("it may"), Change::Done);
            rig.open();
            for block in 2000..2003 {
                rig.commit(block);
                rig.die(None).unwrap_or_else(|error| panic!("{configured:?}, {live:?}: {error}"));
                let log = rig.log();
                assert!(
                    log.is_held_open() && log.placement == live && log.wanted() == live,
                    "{configured:?}, {live:?}"
                );
                assert_eq!(rig.journals.area.owed(log.id).blocks, block - 1999);
                let described = rig.journals.directory().description().expect("read").expect("it is there").logs;
                assert_eq!(described.len(), 1, "{configured:?}, {live:?}");
            }
            // Handed over, it is on storage, from there on.
            let from = Tail { position: rig.builder.position, sequence: rig.builder.sequence };
            let index = rig.log().index;
            rig.journals.change_placement(index, Storage).expect("it may");
            rig.die(None).expect("it goes on");
            let log = rig.log();
            assert!(log.is_held_open() && log.wanted() == Storage, "{configured:?}, {live:?}: it is on its way still");
            assert!(rig.journals.hand_over(log.index).expect("handed over"));
            for _ in 0..3 {
                rig.die(None).expect("it goes on");
                let log = rig.log();
                assert!(log.is_open() && log.placement == Storage, "{configured:?}, {live:?}");
                let earlier = rig.superblock_from(from.position - 3, from.sequence - 1);
                assert!(!rig.write_superblock(&earlier), "{configured:?}, {live:?}: what lies there was never written");
            }
            assert!(rig.write_superblock(&rig.superblock_from(from.position, from.sequence)));
            // The next mount is not bound by that.
            let closed = rig.superblock_from(0, from.sequence);
            assert!(rig.write_superblock(&closed));
            rig.store(&closed);
            rig.die(None).expect("it goes on");
            assert!(!rig.log().is_open() && rig.log().storage_from.is_none());
        }
    }
}

/// Who wants an image that holds all that is committed is not told that it does where nobody can know.
#[test]
fn nobody_says_that_all_is_home_where_the_books_cannot_know() {
    // Blocks of every kind are put on storage for want of memory, one at a time: tagged ones, those that describe, the commit block.
    for missing in 0..4 {
        let mut rig = Rig::new();
        rig.open();
        let (area, id) = (Arc::clone(&rig.journals.area), rig.log().id);
        let transaction = Transaction {
            blocks: vec![(2000, vec![7; BLOCK as usize]), (2001, vec![8; BLOCK as usize])],
            ..Transaction::default()
        };
        let mut writes = Vec::new();
        rig.builder.transaction(&transaction, &mut |position, block| writes.push((position, block.to_vec())));
        assert_eq!(writes.len(), 4);
        for (index, (position, block)) in writes.into_iter().enumerate() {
            if index == missing {
                rig.log()
                    .journal
                    .file
                    .write_all_at(&block, rig.log().place_of(position).expect("it has one"))
                    .expect("written");
                area.stored(id, position);
            } else {
                area.hold(id, &[LogWrite { position, content: Content::Bytes(block) }]);
            }
        }
        for write in area.host_writes(id, 8, false) {
            area.home_write_ended(id, write.0, true);
        }
        assert_eq!(area.owed(id).writable, 0, "the host has nothing left to do");
        let why = rig.journals.check_all_home(None).expect_err("it is not home").to_string();
        assert!(why.contains("1 blocks of the journal are in their own place on storage"), "{missing}: {why}");
        rig.journals.check_all_home(Some(7)).expect("another disk");
        // The guest has written all of it home, and says so. Where no transaction was seen to end, the log goes to its own place.
        let tail = rig.opening();
        assert_eq!(rig.write_superblock(&tail), !area.is_open(id), "{missing}");
        rig.journals.check_all_home(None).unwrap_or_else(|why| panic!("{missing}: {why}"));
    }
    // What only a kernel can replay.
    let mut rig = Rig::new();
    rig.journals.check_all_home(None).expect("nothing is held");
    let incompat = u32::from_be_bytes(*rig.superblock[0x28..].first_chunk().expect("inside")) | 0x20;
    rig.superblock[0x28..0x2c].copy_from_slice(&incompat.to_be_bytes());
    rig.open();
    assert!(rig.journals.area.owed(rig.log().id).materialise);
    let why = rig.journals.check_all_home(Some(0)).expect_err("nobody can know").to_string();
    assert!(why.contains("only the guest's own kernel"), "{why}");
}

/// After a worker's death the host writes nothing home of which only the guest knows whether it is home, and says so to who wants all of it there.
#[test]
fn what_only_the_guest_knows_to_be_home_is_not_said_to_be() {
    let mut rig = Rig::new();
    rig.open();
    rig.commit(2000);
    rig.commit(2001);
    rig.die(None).expect("it goes on");
    let (area, id) = (Arc::clone(&rig.journals.area), rig.log().id);
    assert_eq!((area.owed(id).blocks, area.owed(id).writable), (2, 0), "the host has nothing to do");
    let why = rig.journals.check_all_home(None).expect_err("it is not home").to_string();
    assert!(why.contains("of 2 blocks only the guest knows"), "{why}");
    rig.journals.check_known_home(0).expect("the rest is");
    let unknown = rig.journals.versions_unknown(0).expect("they can be had");
    let places: Vec<u64> = unknown.iter().map(|(offset, _)| *offset).collect();
    assert_eq!(places, [2000, 2001].map(|block| rig.log().home_offset(block)));
    assert!(unknown.iter().all(|(_, content)| content.len() as u64 == BLOCK && content[0] != 0));
    // The next one is known.
    rig.commit(2001);
    assert_eq!(area.owed(id).writable, 1);
    assert_eq!(rig.journals.versions_unknown(0).expect("they can be had").len(), 1);
}

/// Whoever finishes what was left does not pass over a table of something open.
#[test]
fn the_table_of_an_open_journal_that_is_not_described_is_not_thrown_away() {
    let mut rig = Rig::new();
    rig.open();
    rig.commit(2000);
    let directory = rig.journals.directory();
    let mut description = directory.description().expect("read").expect("it is there");
    assert!(crate::found::open_logs(directory).expect("described").is_some_and(|left| left.logs.len() == 1));
    description.logs.clear();
    let path = directory.path().join("area.json");
    std::fs::write(&path, serde_json::to_vec(&description).expect("json")).expect("written");
    let expect_refused = || {
        let why = crate::found::open_logs(directory).err().expect("refused").to_string();
        assert!(why.contains("no description beside it says of which"), "{why}");
    };
    expect_refused();
    // Nor where somebody has taken the description away.
    std::fs::remove_file(&path).expect("removed");
    expect_refused();
}

/// The guest writes past its journal what nobody was asked for when a worker died: a hand-over does not write over that. Of what was asked of the
/// dead one, nobody knows whether it is newer than what was committed: that is what counts.
#[test]
fn a_hand_over_after_a_death_leaves_what_was_written_past_the_journal_since() {
    for (is_repeated, is_noted) in [(false, false), (true, true), (true, false)] {
        let mut rig = Rig::new();
        rig.open();
        (2000..2002).for_each(|block| rig.commit(block));
        let ask = |rig: &Rig, is_repeated| {
            let (log, blocks) = (rig.log(), 2000..2001);
            let change = HomeChange {
                kind: RequestKind::Write,
                request: RequestId(7),
                range: 2000 * BLOCK..2001 * BLOCK,
                whole: blocks.clone(),
                blocks,
                payload: &[None],
                slices: &[],
                is_watched: false,
                is_again: is_repeated,
            };
            log.keeper.home_begins(&log, &change, &mut Steps::default()).expect("nothing fails")
        };
        if is_noted {
            // It was on its way.
            ask(&rig, false);
        }
        rig.die(None).expect("it goes on");
        let log = rig.log();
        let HomeVerdict::Go { operation, .. } = ask(&rig, is_repeated) else { panic!("nothing is in the way") };
        let at = |block: u64| log.home_offset(block);
        log.home.file.write_all_at(&[9; BLOCK as usize], at(2000)).expect("written");
        log.keeper.home_ended(&log, operation, true, &mut Steps::default());
        let change = rig.journals.change_placement(log.index, PlacementKind::Storage).expect("possible");
        assert_eq!(change, Change::HandOver);
        assert!(rig.journals.hand_over(log.index).expect("handed over"));
        let image = std::fs::read(&rig.image).expect("the image");
        let found = [2000, 2001].map(|block| image[at(block) as usize]);
        // Where nobody knows which of the two is newer, all of the log is in its place, and nothing is written home.
        let is_known = !is_repeated || is_noted;
        assert_eq!(found, [9, if is_known { 7 } else { 0 }], "repeated: {is_repeated}, noted: {is_noted}");
        let Says::Live(tail) = rig.says() else { panic!("{:?}", rig.says()) };
        assert_eq!(tail.sequence == rig.builder.sequence, is_known);
    }
}

#[test]
fn what_was_wished_is_not_forgotten() {
    let mut rig = Rig::new();
    rig.open();
    rig.commit(2000);
    let change = rig.journals.change_placement(rig.log().index, PlacementKind::Storage).expect("possible");
    assert_eq!(change, Change::HandOver);
    rig.die(None).expect("it goes on");
    assert!(rig.log().is_held_open() && rig.log().wanted() == PlacementKind::Storage);
    assert!(rig.journals.hand_over(rig.log().index).expect("handed over"));
    rig.die(None).expect("it goes on");
    let block = rig.superblock_from(0, rig.builder.sequence);
    assert!(rig.write_superblock(&block));
    rig.store(&block);
    for _ in 0..2 {
        rig.die(None).expect("it goes on");
        assert!(!rig.log().is_open() && rig.log().placement == PlacementKind::Storage);
    }
    rig.log().distrust();
    rig.journals.describe_or_complain();
    rig.die(None).expect("it goes on");
    assert!(rig.log().is_distrusted());
    rig.journals.change_placement(rig.log().index, PlacementKind::Copy).expect_err("it stays on storage");
}

/// Nor by a reset before it got there, wherever the worker dies after that.
#[test]
fn what_was_wished_is_not_forgotten_by_a_reset() {
    for dies in ["never", "before it is written down", "after that"] {
        let mut rig = Rig::new();
        rig.open();
        rig.commit(2000);
        let change = rig.journals.change_placement(rig.log().index, PlacementKind::Storage).expect("possible");
        assert_eq!(change, Change::HandOver);
        let described = rig.files();
        rig.journals.recover_disk(0).expect("its device begins anew");
        match dies {
            "never" => {}
            "after that" => rig.die(None).expect("it goes on"),
            _ => {
                let is_description = |path: &PathBuf| path.ends_with("area.json");
                let described = described.into_iter().filter(|(path, _)| is_description(path));
                let files = rig.files().into_iter().filter(|(path, _)| !is_description(path)).chain(described);
                let files = files.collect();
                rig.die(Some(files)).expect("it goes on");
            }
        }
        let log = rig.log();
        assert_eq!((log.placement, log.is_open()), (PlacementKind::Storage, false), "it dies {dies}");
        assert!(log.may_go_on_unannounced() && rig.says() == Says::Empty, "it dies {dies}");
        assert!(rig.journals.hand_over(log.index).expect("asked"));
    }
}

/// Whoever has asked is told that a log is there when it is, whoever has closed it meanwhile.
#[test]
fn one_that_was_closed_on_its_way_is_there_before_that_is_said() {
    let rig = Rig::new();
    let log = rig.log();
    assert!(!log.is_open() && log.placement == PlacementKind::Copy);
    log.want(PlacementKind::Storage);
    assert!(rig.journals.hand_over(log.index).expect("asked"));
    assert_eq!(rig.log().placement, PlacementKind::Storage);
}

/// Two have asked for it, and the one who has not heard that it is there asks on behind a reset. It is live in its own place, and its guest, which
/// may have been suspended, believes that it begins earlier.
#[test]
fn who_asks_once_more_changes_nothing_of_one_that_is_on_storage() {
    let mut rig = Rig::new();
    rig.open();
    rig.commit(2000);
    let from = Tail { position: rig.builder.position, sequence: rig.builder.sequence };
    let index = rig.log().index;
    assert_eq!(rig.journals.change_placement(index, PlacementKind::Storage).expect("possible"), Change::HandOver);
    assert!(rig.journals.hand_over(index).expect("handed over"));
    rig.journals.recover_disk(0).expect("its device begins anew");
    assert!(!rig.log().is_open() && rig.says() == Says::Live(from));
    assert!(rig.journals.hand_over(index).expect("asked"));
    assert_eq!(rig.log().storage_from, Some(from.sequence));
    let earlier = rig.superblock_from(from.position - 3, from.sequence - 1);
    assert!(!rig.write_superblock(&earlier), "what lies there was never written");
}

/// The disk with the file system begins anew, and the thread of the one with the journal has it opened at that moment: it stays with who
/// keeps it.
#[test]
fn a_wish_is_not_followed_while_the_log_is_being_opened() {
    let rig = Rig::new();
    let (journals, log) = (Arc::clone(&rig.journals), rig.log());
    log.want(PlacementKind::Storage);
    let opening = log.state.opening.lock().expect("no panic under this lock");
    std::thread::scope(|scope| {
        let following = scope.spawn(|| journals.follow_wish(&log));
        // Whoever does not wait is through by then.
        std::thread::sleep(Duration::from_millis(200));
        log.set_open();
        drop(opening);
        following.join().expect("no panic");
    });
    assert_eq!(rig.log().placement, PlacementKind::Copy);
}

#[test]
fn one_that_is_not_found_any_more_is_refused_and_stays_described() {
    let mut rig = Rig::new();
    rig.open();
    rig.commit(2000);
    let image = std::fs::File::options().write(true).open(&rig.image).expect("the image");
    image.write_all_at(&[0; 1024], extfs::SUPERBLOCK_OFFSET).expect("written");
    let why = rig.is_refused(None);
    assert!(why.contains("is not where it was"), "{why}");
}

/// Its guest has closed its journal, and made another file system there, or none.
#[test]
fn one_that_is_closed_and_gone_is_forgotten() {
    let mut rig = Rig::new();
    rig.open();
    rig.commit(2000);
    let block = rig.superblock_from(0, rig.builder.sequence);
    assert!(rig.write_superblock(&block));
    rig.store(&block);
    let image = std::fs::File::options().write(true).open(&rig.image).expect("the image");
    image.write_all_at(&[0; 1024], extfs::SUPERBLOCK_OFFSET).expect("written");
    rig.die(None).expect("it goes on");
    assert!(rig.journals.logs().is_empty());
    assert!(rig.journals.directory().description().expect("read").expect("it is there").logs.is_empty());
    rig.die(None).expect("and again");
}

/// The same, and a scan has seen that it is gone; its worker dies before that is written down. And its files, which are described still, are there.
#[test]
fn one_that_a_scan_has_forgotten_keeps_nobody_from_going_on() {
    let mut rig = Rig::new();
    let image = std::fs::File::options().write(true).open(&rig.image).expect("the image");
    image.write_all_at(&[0; 1024], extfs::SUPERBLOCK_OFFSET).expect("written");
    rig.journals.forget_log(&rig.log());
    assert!(rig.journals.logs().is_empty());
    rig.die(None).expect("it goes on");
    assert!(rig.journals.logs().is_empty());
    rig.journals.scan(0).expect("looked at");
    assert!(!rig.files().iter().any(|(path, _)| path.extension().is_some_and(|ending| ending == "table")));
}

/// Its file system has gone by what the thread of another disk sees, amid a write of its superblock.
#[test]
fn one_is_not_forgotten_while_its_superblock_is_written() {
    let rig = Rig::new();
    rig.open();
    let log = rig.log();
    let amid = log.state.opening.lock().expect("no panic under this lock");
    let is_forgotten =
        || std::thread::scope(|other| other.spawn(|| rig.journals.forget_log(&log)).join()).expect("no panic");
    assert!(!is_forgotten() && log.is_held_open());
    drop(amid);
    assert!(is_forgotten());
}

/// Its file system has gone, and something of ours is on its way to where it was: it is kept until that has ended.
#[test]
fn one_is_not_forgotten_while_something_of_it_is_on_its_way() {
    use crate::keeper::{Side, Step};
    for is_aged in [false, true] {
        let mut rig = Rig::durable_within(is_aged.then_some(Duration::from_secs(3600)));
        rig.open();
        rig.commit(2000);
        let log = rig.log();
        let mut steps = Steps::default();
        if is_aged {
            // Its superblock is written anew.
            let mut block = rig.opening();
            SuperblockEdit::new(&mut block).expect("a superblock").errno(-30).seal();
            let superblock = SuperblockBlock { content: &block, request: RequestId(7) };
            rig.journals.superblock_written(&log, superblock, &mut steps).1.expect("it is held");
        } else {
            log.begin_emptying();
            log.keeper.drive(&log, &mut steps);
        }
        let is_on_its_way = |step: &Step| matches!(step, Step::Write { .. } | Step::Flush { .. });
        assert!(steps.0.iter().any(|(_, step)| is_on_its_way(step)), "durable by age: {is_aged}");
        let files = rig.files();
        assert!(!rig.journals.forget_log(&log), "durable by age: {is_aged}");
        assert!(log.is_held_open() && rig.files() == files, "nothing has happened");
        while steps.0.iter().any(|(_, step)| is_on_its_way(step)) {
            let mut next = Steps::default();
            for (_, step) in steps.0 {
                if let Step::Write { task, .. } | Step::Flush { task } = step {
                    log.keeper.done(&log, task, None, &mut next);
                }
            }
            steps = next;
        }
        assert!(rig.journals.forget_log(&log), "durable by age: {is_aged}");
        // Whatever waits to go home is asked about once more, and a superblock that waited is a block as any other.
        let passed_on = rig.journals.take_passed_on(log.home_disk);
        assert!(passed_on.iter().any(|(_, _, step)| matches!(step, Step::Retry)), "durable by age: {is_aged}");
        let opening = rig.opening();
        let superblock = SuperblockBlock { content: &opening, request: RequestId(8) };
        let (_, passes) = rig.journals.superblock_written(&log, superblock, &mut Steps::default());
        assert!(passes.expect("written") && !log.is_open(), "durable by age: {is_aged}");
        // Nor does anything begin from then on, though its disk is still asked.
        let mut steps = Steps::default();
        log.keeper.woken(&log, Side::Home, &mut steps);
        assert!(!steps.0.iter().any(|(_, step)| is_on_its_way(step)), "durable by age: {is_aged}");
    }
}

/// A file system is mounted whose entry in the partition table has gone.
#[test]
fn one_whose_partition_has_no_entry_any_more_goes_on() {
    let mut rig = Rig::new();
    rig.partition(1);
    rig.open();
    rig.commit(2000);
    let image = std::fs::File::options().write(true).open(&rig.image).expect("the image");
    image.write_all_at(&[0; 512], 0).expect("written");
    for _ in 0..2 {
        rig.die(None).expect("it goes on");
        let log = rig.log();
        assert!(log.is_held_open() && log.place.home_start == START as u64);
        assert_eq!(rig.journals.area.owed(log.id).blocks, 1);
        assert!(!rig.journals.disk(0).layout().logs.is_empty(), "what is written there is the log's");
    }
}

/// Storage says that a journal is held which nobody holds: who begins warns, and who follows goes on.
#[test]
fn a_mark_of_what_was_lost_long_ago_keeps_nobody_from_going_on() {
    for placement in [PlacementKind::Copy, PlacementKind::Storage, PlacementKind::Discard] {
        let mut rig = Rig::configured(placement, None);
        rig.store(&mark::marked(&rig.superblock, MarkKind::Held, &OTHER).expect("a superblock"));
        rig.begin_anew();
        for _ in 0..2 {
            rig.die(None).expect("it goes on");
            assert!(!rig.log().is_open() && rig.log().placement == placement);
        }
    }
}

/// A guest may put anything on its disk, also a journal that lives in a region of NVM of somebody's.
#[test]
fn what_its_guest_has_put_there_keeps_nobody_from_going_on() {
    let mut rig = Rig::new();
    let file_system = std::fs::read(&rig.image).expect("the image");
    rig.partition(2);
    rig.open();
    rig.commit(2000);
    let elsewhere = rig.log().place_of(0).expect("it has one") as usize - START;
    let mut other = file_system;
    let mark = mark::marked(&rig.superblock, MarkKind::Nvm, &OTHER).expect("a superblock");
    other[elsewhere..elsewhere + mark.len()].copy_from_slice(&mark);
    let image = std::fs::File::options().write(true).open(&rig.image).expect("the image");
    image.write_all_at(&other, (START + other.len()) as u64).expect("written");
    rig.die(None).expect("it goes on");
    assert_eq!((rig.journals.logs().len(), rig.log().is_held_open()), (1, true));
}

/// Nothing is left of files that say nothing, and what is new has room where they were.
#[test]
fn files_of_journals_that_are_not_held_do_not_add_up() {
    let mut rig = Rig::configured(PlacementKind::Storage, None);
    let names = |rig: &Rig| {
        let names = rig.journals.directory().directory().names().expect("read").into_iter();
        let mut names: Vec<String> = names.filter_map(|name| name.into_string().ok()).collect();
        names.retain(|name| name.starts_with("log-"));
        names.len()
    };
    let before = names(&rig);
    for _ in 0..3 {
        rig.die(None).expect("it goes on");
        assert_eq!(names(&rig), before);
    }
    // Nor is anything taken away that says something.
    let mut rig = Rig::new();
    rig.open();
    rig.commit(2000);
    rig.die(None).expect("it goes on");
    assert_eq!(rig.journals.area.owed(rig.log().id).blocks, 1);
}

#[test]
fn what_was_brought_into_a_closed_log_is_remembered() {
    let mut rig = Rig::new();
    rig.journals.area.set_foreign(rig.log().id, true);
    rig.die(None).expect("it goes on");
    let block = rig.opening();
    assert!(rig.write_superblock(&block) && !rig.log().is_open(), "it stays on storage");
    rig.store(&block);
    rig.die(None).expect("it goes on");
    assert!(!rig.log().is_open() && rig.log().placement == PlacementKind::Copy);
    let block = rig.superblock_from(0, rig.builder.sequence);
    assert!(rig.write_superblock(&block));
    rig.store(&block);
    rig.die(None).expect("it goes on");
    rig.open();
    assert!(matches!(HeldMark::read(&stored_bytes(&rig)), HeldMark::Ours(MarkKind::Held, _)));
}

fn stored_bytes(rig: &Rig) -> Vec<u8> {
    let log = rig.log();
    let mut raw = vec![0; jbd2::SUPERBLOCK_BYTES];
    log.journal.file.read_exact_at(&mut raw, log.place_of(0).expect("it has one")).expect("read");
    raw
}

#[test]
fn one_that_somebody_wrote_over_is_refused() {
    let mut rig = Rig::new();
    rig.open();
    let first = rig.builder.position;
    rig.commit(2000);
    rig.commit(2001);
    let over = LogWrite { position: first + 1, content: Content::Bytes(vec![9; BLOCK as usize]) };
    rig.journals.area.hold(rig.log().id, &[over]);
    let why = rig.is_refused(None);
    assert!(why.contains("written over"), "{why}");
    // Its guest closes it, and opens another one.
    let block = rig.superblock_from(0, rig.builder.sequence);
    assert!(rig.write_superblock(&block));
    rig.store(&block);
    rig.open();
    rig.die(None).expect("it goes on");
    assert!(rig.log().is_held_open());
}

/// Options of disks by their names: the rig's own is "d".
fn named(rig: &Rig, names: &[&str]) -> JournalsOptions {
    let own = options(&rig.image, None).disks.remove(0);
    let disk = |name: &&str| {
        let path = if *name == own.name { rig.image.clone() } else { rig.directory.path().join(name) };
        DiskOptions { name: (*name).to_owned(), path, ..own.clone() }
    };
    JournalsOptions { disks: names.iter().map(disk).collect(), ..options(&rig.image, None) }
}

#[test]
fn disks_come_go_and_change_places_between_two_workers() {
    let mut rig = Rig::new();
    let own = options(&rig.image, None).disks[0].name.clone();
    // Another file system, whose journal waits to be replayed by its guest's kernel.
    std::fs::copy(&rig.image, rig.directory.path().join("other")).expect("copied");
    let other = std::fs::File::options().write(true).open(rig.directory.path().join("other")).expect("opened");
    let at = rig.log().place_of(0).expect("it has one");
    other.write_all_at(&rig.superblock_from(9, 7), at).expect("written");
    rig.open();
    rig.commit(2000);
    let owed = |rig: &Rig, disk: usize| {
        let log = rig.journals.logs().into_iter().find(|log| log.home_disk == disk).expect("a log");
        (log.placement, log.is_open(), rig.journals.area.owed(log.id).blocks)
    };
    rig.die_and_serve(None, named(&rig, &["other", &own])).expect("one came before it");
    assert_eq!(owed(&rig, 1), (PlacementKind::Copy, true, 1));
    assert_eq!(owed(&rig, 0), (PlacementKind::Copy, false, 0), "it begins as configured, whatever is to be replayed");
    assert!(!rig.journals.disk(0).was_started() && rig.journals.disk(1).was_started());
    rig.die_and_serve(None, named(&rig, &[&own, "other"])).expect("they changed places");
    assert_eq!(owed(&rig, 0), (PlacementKind::Copy, true, 1));
    assert_eq!(owed(&rig, 1), (PlacementKind::Copy, false, 0));
    rig.die_and_serve(None, named(&rig, &[&own])).expect("one is gone, which owed nothing");
    assert_eq!((rig.journals.logs().len(), owed(&rig, 0)), (1, (PlacementKind::Copy, true, 1)));
    rig.die(None).expect("as if it had never been there");
    assert_eq!(owed(&rig, 0), (PlacementKind::Copy, true, 1));
}

/// A worker that has fewer disks writes that down and dies; the next one has those of before.
#[test]
fn a_disk_that_a_worker_had_not_is_registered_by_the_next_one() {
    let mut rig = Rig::new();
    let own = options(&rig.image, None).disks[0].name.clone();
    let path = rig.directory.path().join("other");
    std::fs::copy(&rig.image, &path).expect("copied");
    rig.die_and_serve(None, named(&rig, &[&own, "other"])).expect("one came");
    let registered = |rig: &Rig, image: &Path| {
        let found = AreaDirectory::find(&rig.directory.path().join("registry"), image).expect("examined");
        found.as_deref() == Some(rig.journals.directory().path())
    };
    assert!(registered(&rig, &path) && registered(&rig, &rig.image));
    rig.die_and_serve(None, named(&rig, &[&own])).expect("it is gone");
    assert!(!registered(&rig, &path) && registered(&rig, &rig.image));
    rig.die_and_serve(None, named(&rig, &[&own, "other"])).expect("it is there again");
    assert!(registered(&rig, &path) && registered(&rig, &rig.image));
    let images = rig.journals.directory().description().expect("read").expect("it is there").images;
    assert_eq!(images.map(|images| images.len()), Some(2), "each once");
}

#[test]
fn a_disk_that_is_owed_something_does_not_go() {
    let mut rig = Rig::new();
    let own = options(&rig.image, None).disks[0].name.clone();
    std::fs::copy(&rig.image, rig.directory.path().join("other")).expect("copied");
    rig.die_and_serve(None, named(&rig, &[&own, "other"])).expect("one came");
    rig.open();
    rig.commit(2000);
    let before = rig.journals.directory().description().expect("read").expect("it is there");
    let error = rig.die_and_serve(None, named(&rig, &["other"])).expect_err("it is held").to_string();
    assert!(error.contains("its disk is not served any more"), "{error}");
    assert_eq!(rig.journals.directory().description().expect("read").expect("it is there"), before);
    rig.die_and_serve(None, named(&rig, &[&own, "other"])).expect("with it, it goes on");
    assert_eq!(rig.journals.area.owed(rig.log().id).blocks, 1);
}

/// A recovery beside a guest that runs, or before it begins anew, empties the journal on storage before it closes the books.
#[test]
fn one_whose_recovery_had_come_to_its_end_is_closed() {
    let mut rig = Rig::new();
    rig.open();
    rig.commit(2000);
    let log = rig.log();
    let before = rig.files();
    let taking = rig.journals.area.take_for_recovery(log.id).expect("nothing is under way");
    let files = rig.files();
    drop(taking);
    assert_eq!(rig.files(), before, "what is given up was never so");
    // Storage says still that it is held: nothing was emptied.
    rig.die(Some(files.clone())).expect("it goes on");
    assert!(rig.log().is_held_open());
    let empty = rig.superblock_from(0, rig.builder.sequence);
    rig.store(&empty);
    rig.die(Some(files)).expect("it goes on");
    assert!(!rig.log().is_open() && rig.journals.area.owed(rig.log().id).blocks == 0);
    rig.open();
    rig.commit(2000);
    rig.store(&empty);
    rig.is_refused(None);
}

/// Its superblock has arrived on storage, and the flush behind it has failed: the log goes on being held, and storage says so.
#[test]
fn a_log_that_could_not_be_put_in_its_place_is_held_again() {
    let mut rig = Rig::new();
    rig.open();
    rig.commit(2000);
    let log = rig.log();
    let before = rig.opening_on_storage();
    let taking = rig.journals.area.take_for_hand_over(log.id).expect("nothing is under way");
    let marked = log.take_mark().expect("a mark");
    crate::finish::write_in_place(&taking.log(), &log.place, &log.home.file, &log.journal.file).expect("written");
    assert!(matches!(rig.says(), Says::Live(_)), "{:?}", rig.says());
    let marked = crate::left_to_guest::held_again(&log, &taking, marked);
    assert!(marked.is_durable);
    drop(taking);
    // Where the mark could not be written, what is live on storage is not taken for all there is.
    assert_eq!(rig.journals.area.adopted(log.id).map(|books| books.handed_over), Some(None));
    log.put_mark_back(Some(marked));
    assert_eq!(rig.says(), Says::Held(before));
    let raw = log.stored().expect("read").superblock.expect("a superblock");
    assert!(raw.sequence >= rig.builder.sequence, "{raw:?}");
    // What is committed from now on is nowhere else.
    rig.commit(2001);
    rig.die(None).expect("it goes on");
    assert!(rig.log().is_held_open());
    assert_eq!(rig.journals.area.owed(rig.log().id).blocks, 2);
}
