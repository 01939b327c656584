//! A guest that writes its journal round and round, a server that keeps any prefix of what it is sent: whatever the prefix,
//! what the superblock in it needs is there.

use super::mark::RemoteMark;
use super::mark_found::MarkFound;
use super::mirror::Mirror;
use super::state::{Mode, Outcome, State};
use block_route::{RequestId, Status};
use jbd2::{Features, Superblock};
use remote_journal::message::Batch;
use std::collections::BTreeMap;
use std::sync::Arc;

const FIRST: u32 = 1;
const END: u32 = 24;
/// Blocks for fast commits, where there are any.
const AREA: u32 = 4;

fn superblock(start: u32, number: u32) -> Arc<[u8]> {
    superblock_with(start, number, 0)
}

/// With features, and an area of fast commits of four blocks.
fn superblock_with(start: u32, number: u32, incompat: u32) -> Arc<[u8]> {
    let mut block = vec![0; 1024];
    let fields = [(0, 0xc03b_3998), (4, 4), (0x0c, 1024), (0x10, END), (0x14, FIRST), (0x18, number), (0x1c, start)];
    for (offset, value) in fields.into_iter().chain([(0x28, incompat), (0x54, AREA)]) {
        block[offset..offset + 4].copy_from_slice(&u32::to_be_bytes(value));
    }
    block.into()
}

fn log_block(number: u32, is_commit: bool) -> Arc<[u8]> {
    let mut block = vec![0; 1024];
    block[12..16].copy_from_slice(&number.to_le_bytes());
    if is_commit {
        block[..8].copy_from_slice(&[0xc0, 0x3b, 0x39, 0x98, 0, 0, 0, 2]);
    }
    block.into()
}

/// A generator of its own, and it stays: the seeded faults (crates/crash-explorer/mutants.list) were tried with the
/// sequences that these models' seeds have here.
pub(super) struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0
    }

    pub fn below(&mut self, bound: u32) -> u32 {
        ((self.next() >> 33) % u64::from(bound.max(1))) as u32
    }
}

fn opened(start: u32) -> State {
    let mut state = State::new(Mirror::default());
    let block = superblock(start, 0);
    state.open(&Superblock::decode(&block).expect("a superblock"), block);
    state
}

fn next(position: u32) -> u32 {
    if position + 1 == END { FIRST } else { position + 1 }
}

/// The newest content of each position.
type Kept = BTreeMap<u32, Arc<[u8]>>;

/// What a server has that was sent these batches, and what it would have that kept everything.
fn server_of(batches: &[Batch]) -> (Kept, Kept) {
    let tail = batches.last().map_or(1, |batch| batch.tail);
    let map = |from: u64| {
        batches
            .iter()
            .filter(|batch| batch.sequence >= from)
            .flat_map(|batch| batch.blocks.iter().map(|block| (block.position, Arc::clone(&block.content))))
            .collect()
    };
    (map(tail), map(1))
}

#[test]
fn every_prefix_of_what_is_sent_has_all_that_its_superblock_needs() {
    for seed in 0..300 {
        let mut random = Random(seed);
        let mut state = opened(FIRST);
        // In some, a pass is more than one batch.
        state.batch_bytes_max =
            [1, 2, 3, usize::MAX][random.below(4) as usize].saturating_mul(superblock(FIRST, 0).len());
        let mut batches: Vec<Batch> = Vec::new();
        state.begin_return(1, [1; 16]);
        assert!(state.copy_some().expect("copied"), "the superblock comes first");
        let (mut head, mut tail, mut starts) = (FIRST, FIRST, vec![FIRST]);
        let (mut number, mut until) = (0, 0);
        // After each write: which log positions are live, for prefixes that end there.
        let mut live_of: BTreeMap<Vec<u8>, Vec<u32>> = BTreeMap::new();
        for _pass in 0..60 {
            for _write in 0..=random.below(5) {
                number += 1;
                let room = next(head) != tail;
                if room && random.below(4) > 0 {
                    let is_commit = random.below(3) == 0;
                    let outcome = state.write(head, log_block(number, is_commit), RequestId(number));
                    assert_ne!(outcome, Outcome::Fail);
                    head = next(head);
                    if is_commit {
                        starts.push(head);
                    }
                } else if starts.len() > 1 {
                    // The tail moves to where some transaction began.
                    let passed = 1 + random.below(starts.len() as u32 - 1) as usize;
                    starts.drain(..passed);
                    tail = starts[0];
                    let block = superblock(tail, number);
                    state.superblock(&Superblock::decode(&block).expect("a superblock"), Arc::clone(&block));
                    let mut live = Vec::new();
                    let mut at = tail;
                    while at != head {
                        live.push(at);
                        at = next(at);
                    }
                    live_of.insert(block.to_vec(), live);
                }
            }
            state.form_batches();
            if random.below(2) == 0 {
                while state.copy_some().expect("copied") && random.below(3) > 0 {}
            }
            batches.extend(state.outbox.drain(..));
            if state.mode == Mode::Returning && random.below(12) == 0 {
                until = state.begin_switch().expect("copied");
                batches.extend(state.outbox.drain(..));
                state.mode = Mode::Remote;
            }
        }
        if state.mode == Mode::Returning {
            until = state.begin_switch().expect("copied");
            batches.extend(state.outbox.drain(..));
        }
        // Before that storage counts, and blocks go in any order.
        for count in until as usize..=batches.len() {
            let (kept, all) = server_of(&batches[..count]);
            assert_eq!(batches[count - 1].sequence, count as u64, "numbered without gaps");
            let block = kept.get(&0).expect("the superblock is always there");
            assert_eq!(block, &all[&0]);
            for position in live_of.get(block.as_ref()).into_iter().flatten() {
                assert_eq!(kept.get(position), all.get(position), "seed {seed}, {count} batches, position {position}");
            }
        }
        // And the copy for falling back is what the server would have.
        let (kept, _) = server_of(&batches);
        let mut at = tail;
        while at != head {
            assert_eq!(state.mirror.get(at).expect("read").as_ref(), kept.get(&at));
            at = next(at);
        }
        assert!(state.mirror.len() <= END as usize);
    }
}

#[test]
fn commits_wait_for_the_place_that_counts() {
    let mut state = opened(FIRST);
    let commit = |state: &mut State, number| state.write(number, log_block(number, true), RequestId(number));
    assert_eq!(commit(&mut state, 1), Outcome::Store);
    state.begin_return(5, [0; 16]);
    while state.copy_some().expect("copied") {}
    assert!(!state.is_copied(), "not before the server says so");
    assert_eq!(commit(&mut state, 2), Outcome::Store, "storage counts until the server has everything");
    state.form_batches();
    let until = state.begin_switch().expect("copied");
    assert!(until == 2 && state.stored_in_flight == 2);
    assert_eq!(state.write(3, log_block(3, false), RequestId(3)), Outcome::Done);
    assert_eq!(commit(&mut state, 4), Outcome::Held);
    state.form_batches();
    assert!(!state.acknowledge(until + 1), "not before storage says that the server counts");
    state.mode = Mode::Remote;
    assert!(state.release_held());
    assert_eq!(state.take_done(), [(RequestId(4), Status::Ok)]);
    assert_eq!(commit(&mut state, 5), Outcome::Held);
    state.form_batches();
    // The server is gone: the commit waits until all of it is on storage.
    state.begin_fall_back();
    assert!(!state.storage_counts());
    assert_eq!(commit(&mut state, 6), Outcome::Held);
    let taken: Vec<u32> = [false, true]
        .into_iter()
        .flat_map(|commits| state.take_dirty(64, commits).expect("read"))
        .map(|(position, _)| position)
        .collect();
    assert_eq!(taken, [3, 1, 2, 4, 5, 6]);
    assert_eq!(state.take_done(), []);
    state.end_fall_back();
    assert_eq!(state.take_done(), [(RequestId(5), Status::Ok), (RequestId(6), Status::Ok)]);
    assert_eq!(commit(&mut state, 7), Outcome::Store);
    // Fenced off: nothing more is taken, and whoever waits is told.
    state.fail(false);
    assert_eq!(commit(&mut state, 8), Outcome::Fail);
}

#[test]
fn a_mark_counts_until_somebody_else_uses_the_file_system() {
    let block = superblock(7, 1);
    let mark = RemoteMark { epoch: 9, nonce: [3; 16] };
    assert_eq!(RemoteMark::read(&block), MarkFound::None);
    let marked = mark.write_into(&block).expect("a superblock");
    assert_eq!(RemoteMark::read(&marked), MarkFound::Live(mark));
    let decoded = Superblock::decode(&marked).expect("still a superblock");
    assert_eq!((decoded.start, decoded.errno), (0, -5));
    let with = |offset: usize, value: u32| {
        let mut block = marked.clone();
        block[offset..offset + 4].copy_from_slice(&value.to_be_bytes());
        block
    };
    assert_eq!(RemoteMark::read(&with(0x1c, 7)), MarkFound::None, "a log on storage is the one that counts");
    assert_eq!(RemoteMark::read(&with(0x20, 0)), MarkFound::Stale, "an fsck has cleared the error");
    assert_eq!(RemoteMark::read(&with(0x18, 2)), MarkFound::Stale, "somebody has used the journal");
    assert_eq!(RemoteMark::read(&with(0, 0)), MarkFound::Damaged, "no superblock, but a mark");
    assert_eq!(RemoteMark::read(&[0x5a; 1024]), MarkFound::None, "no superblock, and nothing of a mark");
    // Whatever is flipped in it, it never reads as no mark, or as another.
    for bit in 0xc0 * 8..0xe8 * 8 {
        let mut damaged = marked.clone();
        damaged[bit / 8] ^= 1 << (bit % 8);
        assert_eq!(RemoteMark::read(&damaged), MarkFound::Damaged, "bit {bit}");
    }
    let mut removed = marked;
    RemoteMark::remove_from(&mut removed);
    assert_eq!(RemoteMark::read(&removed), MarkFound::None);
    assert!(mark.write_into(&[0; 1024]).is_err());
}

#[test]
fn what_waits_to_be_sent_is_bounded() {
    let mut state = opened(FIRST);
    state.begin_return(1, [1; 16]);
    let block: Arc<[u8]> = vec![1; 64 << 10].into();
    let mut taken = 0;
    // While it goes there nothing waits, whatever the link takes.
    for _ in 0..1000 {
        assert_eq!(state.write(2, Arc::clone(&block), RequestId(0)), Outcome::Store);
        let superblock = superblock(FIRST, 0);
        state.superblock(&Superblock::decode(&superblock).expect("a superblock"), superblock);
        state.form_batches();
        assert!(state.queued_bytes() < 1 << 20, "a guest that is faster than its link fills our memory");
    }
    assert!(state.copy_some().expect("copied"));
    state.begin_switch().expect("copied");
    state.mode = Mode::Remote;
    while state.write(3, Arc::clone(&block), RequestId(taken)) == Outcome::Done {
        taken += 1;
        state.form_batches();
        assert!(taken < 1000, "a guest that overwrites its log for ever fills our memory");
    }
    assert!(taken >= 16);
    // Nor does one that only says, again and again, where its log begins.
    let before = state.queued_bytes();
    for number in 0..1000 {
        let superblock = superblock(FIRST, number);
        state.superblock(&Superblock::decode(&superblock).expect("a superblock"), superblock);
        state.form_batches();
        assert!(state.queued_bytes() <= before + 1024, "superblocks fill our memory");
    }
    let last = state.outbox.back().and_then(|batch| batch.blocks.last()).expect("it is sent");
    assert!(last.position == 0 && last.content == superblock(FIRST, 999), "the newest one");
    let unsent: Vec<Batch> = state.outbox.drain(..).collect();
    state.sent(unsent.iter().flat_map(|batch| &batch.blocks).map(|block| block.content.len()).sum());
    assert_eq!(state.write(3, block, RequestId(taken + 1)), Outcome::Done);
    assert!(state.acknowledge(unsent.last().expect("some").sequence), "who waited is told");
}

#[test]
fn commit_blocks_fall_back_after_what_they_commit() {
    let mut state = opened(FIRST);
    for position in 1..9 {
        state.write(position, log_block(position, position % 4 == 0), RequestId(position));
    }
    state.begin_return(1, [1; 16]);
    state.begin_switch().expect("copied");
    state.begin_fall_back();
    let positions = |taken: std::io::Result<Vec<(u32, Arc<[u8]>)>>| {
        taken.expect("read").into_iter().map(|(at, _)| at).collect::<Vec<_>>()
    };
    assert_eq!(positions(state.take_dirty(4, false)), [1, 2, 3, 5]);
    assert!(!state.is_clean(false));
    assert_eq!(positions(state.take_dirty(64, false)), [6, 7]);
    assert!(state.is_clean(false) && !state.is_clean(true));
    assert_eq!(positions(state.take_dirty(64, true)), [4, 8]);
    assert!(state.is_clean(true));
    // Overwritten by something else, it is not a commit block any more.
    state.write(8, log_block(9, false), RequestId(9));
    assert!(state.take_dirty(64, true).expect("read").is_empty());
    assert_eq!(positions(state.take_dirty(64, false)), [8]);
}

/// A kernel turns fast commits on, or something that nobody here knows, in the midst of a log that is shipped: only it can replay that
/// from then on, and only its own place will do. Until it is there whatever is written may be what commits.
#[test]
fn a_log_that_cannot_be_shipped_any_more_is_completed_on_storage() {
    for incompat in [Features::FAST_COMMIT, 0x40] {
        for start in [FIRST, END - 1 - AREA] {
            let mut state = opened(start);
            state.begin_return(1, [1; 16]);
            while state.copy_some().expect("copied") {}
            state.begin_switch().expect("copied");
            state.mode = Mode::Remote;
            assert_eq!(state.write(start, log_block(1, false), RequestId(1)), Outcome::Done);
            assert!(!state.is_local_only);
            let block = superblock_with(start, 1, incompat);
            state.superblock(&Superblock::decode(&block).expect("a superblock"), block);
            assert!(state.is_local_only, "features {incompat:#x}");
            // What is no commit block commits, in the area of fast commits.
            assert_eq!(state.write(END - 1, log_block(2, false), RequestId(2)), Outcome::Held);
            state.form_batches();
            state.begin_fall_back();
            assert_eq!(state.write(END - 2, log_block(3, false), RequestId(3)), Outcome::Held);
            // What is known to commit still comes after what it commits.
            assert_eq!(state.write(FIRST + 5, log_block(4, true), RequestId(4)), Outcome::Held);
            // The tail comes round, and passes nothing of that area.
            let block = superblock_with(FIRST + 1, 2, incompat);
            state.superblock(&Superblock::decode(&block).expect("a superblock"), block);
            let dirty = state.take_dirty(64, false).expect("read").into_iter().map(|(position, _)| position);
            let dirty: Vec<u32> = dirty.filter(|position| *position >= END - AREA).collect();
            assert_eq!(dirty, [END - 2, END - 1], "features {incompat:#x}, from {start} on");
            let commits = state.take_dirty(64, true).expect("read").into_iter().map(|(position, _)| position);
            assert_eq!(commits.collect::<Vec<_>>(), [FIRST + 5]);
            state.end_fall_back();
            assert_eq!(state.take_done(), [2, 3, 4].map(|request| (RequestId(request), Status::Ok)));
            // Without that feature again, it is the same log still.
            let block = superblock(FIRST + 1, 3);
            state.superblock(&Superblock::decode(&block).expect("a superblock"), block);
            assert!(state.is_local_only);
            state.close();
            let block = superblock(FIRST, 4);
            state.open(&Superblock::decode(&block).expect("a superblock"), block);
            assert!(!state.is_local_only, "opened anew, it can be shipped");
        }
    }
}
