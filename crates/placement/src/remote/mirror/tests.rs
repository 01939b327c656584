//! What a kill leaves of the file, wherever it comes.

use super::*;
use crate::layout::LogRun;

const BLOCK: u32 = 1024;
const LOG_BLOCKS: u32 = 64;

fn place() -> FoundLogPlace {
    FoundLogPlace {
        home_disk: 0,
        journal_disk: 0,
        home_start: 0,
        block_bytes: BLOCK,
        log_blocks: LOG_BLOCKS,
        home_blocks: 4096,
        runs: vec![LogRun { first_position: 0, offset: 0, count: LOG_BLOCKS }],
        own_blocks: Vec::new(),
        is_external: false,
        file_system_uuid: [0; 16],
    }
}

type Blocks = BTreeMap<u32, Arc<[u8]>>;

struct Bench {
    directory: tempfile::TempDir,
}

impl Bench {
    fn new() -> Self {
        Bench { directory: tempfile::tempdir_in("/dev/shm").expect("tmpfs") }
    }

    fn file(&self) -> File {
        let path = self.directory.path().join("copy");
        File::options().read(true).write(true).create(true).truncate(false).open(path).expect("a file")
    }

    fn make(&self) -> Arc<MirrorFile> {
        Arc::new(MirrorFile::make(self.file(), &place()).expect("made"))
    }

    fn bytes(&self) -> Vec<u8> {
        std::fs::read(self.directory.path().join("copy")).expect("read")
    }

    /// What the next process finds if the file has these bytes.
    fn found_in(&self, bytes: &[u8]) -> io::Result<(Said, Blocks)> {
        let path = self.directory.path().join("left");
        std::fs::write(&path, bytes)?;
        let file = MirrorFile::take_up(File::options().read(true).write(true).open(path)?, &place())?;
        let said = file.says();
        let mirror = Mirror::take_up(Arc::new(file))?;
        let positions: Vec<u32> = mirror.positions().map(|(position, _)| position).collect();
        let read = |position: u32| Ok((position, mirror.get(position)?.expect("it is there")));
        Ok((said, positions.into_iter().map(read).collect::<io::Result<_>>()?))
    }

    fn found(&self) -> (Said, Blocks) {
        self.found_in(&self.bytes()).expect("it can be gone on with")
    }
}

fn block(byte: u8) -> Arc<[u8]> {
    vec![byte; BLOCK as usize].into()
}

#[test]
fn another_process_finds_what_was_put_and_not_passed() {
    let bench = Bench::new();
    let mut mirror = Mirror::new(Some(bench.make()));
    assert_eq!(bench.found().0, Said::default());
    mirror.open(block(1));
    for position in 1..10 {
        mirror.put(position, &block(10 + position as u8));
    }
    mirror.put(3, &block(77));
    let (said, blocks) = bench.found();
    assert_eq!((said.phase, said.is_stored, &said.superblock[..]), (Phase::Open, true, &block(1)[..]));
    assert_eq!(blocks.len(), 9);
    assert_eq!((&blocks[&3], &blocks[&9]), (&block(77), &block(19)));
    mirror.only_here();
    mirror.pass(block(2), &[1, 2, 3, 7]);
    let (said, blocks) = bench.found();
    assert!(!said.is_stored && said.superblock == block(2)[..]);
    assert_eq!(blocks.keys().copied().collect::<Vec<_>>(), [4, 5, 6, 8, 9]);
    mirror.is_stored();
    assert!(bench.found().0.is_stored);
    mirror.close();
    assert_eq!(bench.found().0.phase, Phase::Closed);
    // What was live before is not any more.
    mirror.open(block(3));
    assert!(bench.found().1.is_empty());
    mirror.fail();
    assert_eq!(bench.found().0.phase, Phase::Failed);
}

/// A record that was begun, up to any byte, leaves the one before.
#[test]
fn a_record_counts_when_it_is_whole() {
    let bench = Bench::new();
    let file = bench.make();
    let mut mirror = Mirror::new(Some(Arc::clone(&file)));
    mirror.open(block(1));
    for count in 1..4u8 {
        let before = (bench.bytes(), bench.found().0);
        file.storage_may_be(&(0..count).map(|byte| vec![byte; SUPERBLOCK_BYTES]).collect::<Vec<_>>());
        let after = (bench.bytes(), bench.found().0);
        assert_ne!(before.1, after.1);
        let last = (0..after.0.len()).rev().find(|at| before.0[*at] != after.0[*at]).expect("something was written");
        for cut in (0..=last).step_by(7).chain([last - 1, last, last + 1]) {
            let mut torn = before.0.clone();
            torn[..cut].copy_from_slice(&after.0[..cut]);
            let expected = if cut > last { &after.1 } else { &before.1 };
            assert_eq!(&bench.found_in(&torn).expect("one is whole").0, expected, "cut at {cut} of {last}");
        }
    }
    // More than there is room for: the last.
    let many: Vec<Vec<u8>> = (0..20).map(|byte| vec![byte; SUPERBLOCK_BYTES]).collect();
    file.storage_may_be(&many);
    assert_eq!(bench.found().0.may_be, many[12..]);
}

/// What cannot be kept there is kept in memory, and nobody goes on without it.
#[test]
fn a_file_that_lacks_something_says_so_until_the_log_is_opened_anew() {
    let bench = Bench::new();
    let mut mirror = Mirror::new(Some(bench.make()));
    mirror.open(block(1));
    mirror.put(5, &block(5));
    // No log has such a block, nor has the file a place for it.
    mirror.put(LOG_BLOCKS, &block(6));
    assert_eq!(mirror.get(LOG_BLOCKS).expect("read"), Some(block(6)));
    assert_eq!(mirror.get(5).expect("read"), Some(block(5)));
    assert_eq!(bench.found().0.phase, Phase::Lost);
    mirror.only_here();
    mirror.pass(block(2), &[5]);
    assert_eq!(mirror.superblock(), Some(block(2)));
    assert_eq!(bench.found().0.phase, Phase::Lost);
    mirror.close();
    assert_eq!(bench.found().0.phase, Phase::Closed, "of a log that is over nothing is lacking");
    mirror.open(block(3));
    assert_eq!(bench.found().0.phase, Phase::Open);
}

#[test]
fn damage_and_other_logs_are_refused() {
    let bench = Bench::new();
    let mut mirror = Mirror::new(Some(bench.make()));
    mirror.open(block(2));
    // Both records are of one length.
    mirror.pass(block(1), &[]);
    let bytes = bench.bytes();
    assert!(bench.found_in(&[]).is_err());
    assert!(bench.found_in(&vec![0; bytes.len()]).is_err());
    let other = FoundLogPlace { log_blocks: LOG_BLOCKS * 2, ..place() };
    assert!(MirrorFile::take_up(bench.file(), &other).is_err());
    let shape = Shape::of(&place());
    // A bit of either record leaves the other one, or nothing; never something else.
    let now = bench.found().0;
    for bit in (0..8 * (HEAD_BYTES + BLOCK as usize + CHECKSUM_BYTES)).step_by(5) {
        let mut damaged = bytes.clone();
        for slot in 0..2 {
            damaged[slot * shape.record_bytes() as usize + bit / 8] ^= 1 << (bit % 8);
        }
        if let Ok((said, _)) = bench.found_in(&damaged) {
            panic!("bit {bit}: {said:?} of {now:?}");
        }
    }
}
