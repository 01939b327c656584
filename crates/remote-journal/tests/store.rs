//! The store against a model: whatever was acknowledged is there after power is lost at any step, with any part of what was
//! not durable; damage is refused, never passed over.

use proptest::prelude::*;
use remote_journal::store::{Simulated, Store, StoreError, StoreOptions};
use seeded_random::Random;
use std::collections::BTreeMap;

const SMALL: StoreOptions =
    StoreOptions { segment_bytes: 256 << 10, space_bytes_max: 64 << 20, journal_bytes_max: 8 << 20 };

fn open(medium: Simulated) -> Result<Store<Simulated>, StoreError> {
    Store::open(medium, SMALL, 77)
}

#[derive(Clone, Debug)]
enum Step {
    Begin(u8),
    /// Of which journal, how many bytes, how many batches stay.
    Append(u8, usize, u64),
    Take(u8),
    Close(u8),
    Delete(u8),
    Commit,
    Clean,
    Reopen,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        2 => (0..3u8).prop_map(Step::Begin),
        20 => (0..3u8, 1..60_000usize, 1..12u64).prop_map(|(j, len, kept)| Step::Append(j, len, kept)),
        1 => (0..3u8).prop_map(Step::Take),
        1 => (0..3u8).prop_map(Step::Close),
        1 => (0..3u8).prop_map(Step::Delete),
        8 => Just(Step::Commit),
        3 => Just(Step::Clean),
        1 => Just(Step::Reopen),
    ]
}

#[derive(Clone, Debug, Default, PartialEq)]
struct ModelJournal {
    id: u32,
    epoch: u64,
    fence: u64,
    live: bool,
    tail: u64,
    last: u64,
    batches: BTreeMap<u64, Vec<u8>>,
}

type Model = BTreeMap<u8, ModelJournal>;

fn name(journal: u8) -> String {
    format!("client/j{journal}")
}

fn content(seed: u64, len: usize) -> Vec<u8> {
    let mut content = vec![0; len];
    Random::new(seed).fill(&mut content);
    content
}

/// What the store holds of each journal, read back.
fn read_back(store: &mut Store<Simulated>) -> Result<Model, StoreError> {
    let mut model = Model::new();
    for info in store.list("client/") {
        let index = info.name.trim_start_matches("client/j").parse().expect("a number");
        let mut journal = ModelJournal {
            epoch: info.epoch,
            fence: info.fence,
            live: info.is_live,
            tail: info.tail,
            last: info.last,
            ..ModelJournal::default()
        };
        if info.is_live {
            for sequence in info.tail..=info.last {
                if let Some(batch) = store.fetch(&info.name, info.epoch, sequence)? {
                    journal.batches.insert(sequence, batch);
                }
            }
        }
        model.insert(index, journal);
    }
    Ok(model)
}

/// Without what does not outlive the process or does not matter.
fn comparable(model: &Model) -> Model {
    let mut model = model.clone();
    for journal in model.values_mut() {
        journal.id = 0;
        if !journal.live {
            (journal.tail, journal.last) = (0, 0);
            journal.batches.clear();
        }
    }
    model
}

/// Carries out the steps until one fails; gives every state that may be found after the crash: the one that was last
/// acknowledged, and those of the group that was on its way.
fn run(medium: &Simulated, steps: &[Step]) -> Result<Vec<Model>, (Vec<Model>, StoreError)> {
    let mut model = Model::new();
    let mut possible = vec![model.clone()];
    let mut store = open(medium.clone()).map_err(|error| (possible.clone(), error))?;
    for (number, step) in steps.iter().enumerate() {
        let result = match step {
            Step::Begin(j) => store.begin(&name(*j), [*j; 16], [number as u8; 16], 0, 4096).map(|(id, epoch)| {
                let journal = model.entry(*j).or_default();
                *journal = ModelJournal { id, epoch, fence: epoch, live: true, tail: 1, ..ModelJournal::default() };
            }),
            Step::Append(j, len, kept) => match model.get_mut(j) {
                None => Ok(()),
                Some(journal) => {
                    let sequence = journal.last + 1;
                    let tail = journal.tail.max(sequence.saturating_sub(*kept)).min(sequence);
                    let batch = content(number as u64, *len);
                    let appended = store.append(journal.id, journal.epoch, sequence, tail, &batch);
                    let may = journal.live && journal.epoch == journal.fence;
                    match appended {
                        Ok(()) => {
                            assert!(may, "a fenced or closed journal was written to");
                            journal.batches.insert(sequence, batch);
                            (journal.last, journal.tail) = (sequence, tail);
                            journal.batches = journal.batches.split_off(&tail);
                            Ok(())
                        }
                        Err(StoreError::Fenced { .. }) if !may => Ok(()),
                        Err(error) => Err(error),
                    }
                }
            },
            Step::Take(j) if model.contains_key(j) => store.take(&name(*j)).map(|_| {
                model.get_mut(j).expect("there").fence += 1;
            }),
            Step::Close(j) if model.contains_key(j) => {
                let (epoch, nonce) = {
                    let info = store.info(&name(*j)).expect("there");
                    (info.epoch, info.nonce)
                };
                let journal = model.get_mut(j).expect("there");
                match store.close(&name(*j), epoch, nonce) {
                    // Somebody has taken the log: its writer ends nothing any more.
                    Err(StoreError::Fenced { .. }) if journal.fence != journal.epoch => Ok(()),
                    closed => closed.map(|()| {
                        assert_eq!(journal.fence, journal.epoch, "a fenced writer closed a log");
                        journal.live = false;
                    }),
                }
            }
            Step::Delete(j) if model.contains_key(j) => store.delete(&name(*j), true).map(|()| {
                model.remove(j);
            }),
            Step::Commit => store.commit().map(|()| possible.clear()),
            Step::Clean => store.clean().map(|has_cleaned| {
                if has_cleaned {
                    possible.clear();
                }
            }),
            Step::Reopen => store.commit().and_then(|()| {
                possible = vec![model.clone()];
                store = open(medium.clone())?;
                for (j, journal) in &mut model {
                    journal.id = 0;
                    assert_eq!(store.info(&name(*j))?.last, journal.last);
                }
                // Numbers of journals are kept; only the model forgot them.
                for (j, journal) in &mut model {
                    journal.id = ids(&mut store, *j);
                }
                Ok(())
            }),
            _ => Ok(()),
        };
        if let Err(error) = result {
            // What the failed step staged may be there, or not; what it would have changed is like the step after.
            return Err((possible, error));
        }
        possible.push(model.clone());
    }
    match store.commit() {
        Ok(()) => Ok(vec![model]),
        Err(error) => Err((possible, error)),
    }
}

/// The number of a journal: found by trying, since the interface gives it only to who begins.
fn ids(store: &mut Store<Simulated>, journal: u8) -> u32 {
    let info = store.info(&name(journal)).expect("there");
    for id in 1..200 {
        let refused = store.append(id, info.epoch, u64::MAX, u64::MAX, b"x");
        match refused {
            Err(StoreError::Refused(reason)) if reason.starts_with(&info.name) => return id,
            Err(StoreError::Fenced { name, .. }) if name == info.name => return id,
            _ => {}
        }
    }
    panic!("{} has no number", info.name)
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None,
        cases: std::env::var("PROPTEST_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(24),
        ..ProptestConfig::default() })]

    /// Power is lost at every operation of the medium in turn (or at some of many).
    #[test]
    fn what_was_acknowledged_outlives_power(steps in prop::collection::vec(step(), 1..60), seed in any::<u64>()) {
        let whole = Simulated::default();
        let last = run(&whole, &steps).expect("nothing fails while there is power");
        let found = read_back(&mut open(whole.clone()).expect("opens")).expect("whole");
        prop_assert_eq!(comparable(&found), comparable(&last[0]));
        let operations = whole.operations();
        let every = (operations / 40).max(1);
        for at in (0..operations).step_by(every as usize) {
            let medium = Simulated::default();
            medium.die_at(at);
            let possible = match run(&medium, &steps) {
                Ok(last) => last,
                Err((possible, _)) => possible,
            };
            let mut random = Random::of(seed, at);
            let after = medium.after_power_loss(|| random.below(2) == 0);
            let mut store = open(after.clone()).expect("a torn end is no damage");
            prop_assert_eq!(store.counters().damaged_places, 0, "after operation {}", at);
            let found = comparable(&read_back(&mut store).expect("whole"));
            // A batch alone moves the tail with it, so states between two steps are among those of single journals.
            let is_possible = found_is_possible(&found, &possible);
            prop_assert!(is_possible, "after operation {at}: {:?}\nnot among {:?}", brief(&found), possible.iter().map(brief).collect::<Vec<_>>());
            // It goes on, and what is there is there once more.
            store.begin("client/j9", [9; 16], [9; 16], 0, 4096).expect("goes on");
            store.commit().expect("goes on");
            let again = comparable(&read_back(&mut open(after).expect("opens")).expect("whole"));
            for (journal, of_it) in &found {
                prop_assert_eq!(again.get(journal), Some(of_it));
            }
        }
    }
}

/// Each journal is as it was in one of the possible states (sectors of one unsynced write survive in any combination, but
/// records count only up to the first that is torn, so states of the whole are prefixes too).
fn found_is_possible(found: &Model, possible: &[Model]) -> bool {
    possible.iter().any(|model| comparable(model) == *found) || {
        // The step that failed had changed the model only after it succeeded: its record may have arrived all the same.
        let keys: std::collections::BTreeSet<u8> =
            found.keys().chain(possible.iter().flat_map(|model| model.keys())).copied().collect();
        let differing = |model: &Model| {
            let model = comparable(model);
            keys.iter().filter(|key| model.get(key) != found.get(key)).count()
        };
        possible.last().is_some_and(|last| differing(last) <= 1)
    }
}

fn brief(model: &Model) -> Vec<(u8, u64, u64, bool, u64, u64, usize)> {
    model.iter().map(|(j, m)| (*j, m.epoch, m.fence, m.live, m.tail, m.last, m.batches.len())).collect()
}

#[test]
fn a_flipped_bit_is_refused_and_never_passed_over() {
    let medium = Simulated::default();
    let mut store = open(medium.clone()).expect("opens");
    let (id, epoch) = store.begin("client/j0", [0; 16], [0; 16], 0, 4096).expect("begun");
    store.commit().expect("durable");
    for sequence in 1..=6 {
        store.append(id, epoch, sequence, 1, &content(sequence, 5000)).expect("appended");
        store.commit().expect("durable");
    }
    drop(store);
    // Somewhere in the third batch: after checkpoint, begin and two batches.
    medium.flip(1, 128 + 256 + 2 * 5100 + 2000);
    let mut store = open(medium.clone()).expect("opens");
    assert_eq!(store.counters().damaged_places, 1);
    let info = store.info("client/j0").expect("there");
    assert_eq!((info.tail, info.last), (1, 6), "what follows the damage is not forgotten");
    let missing: Vec<u64> = (1..=6).filter(|sequence| store.fetch("client/j0", epoch, *sequence).is_err()).collect();
    assert_eq!(missing.len(), 1, "{missing:?}");
    let error = store.fetch("client/j0", epoch, missing[0]).expect_err("missing").to_string();
    assert!(error.contains("is missing"), "{error}");
    // Nothing is added to it; a new log may be begun.
    assert!(matches!(store.append(id, epoch, 7, 1, b"x"), Err(StoreError::Damaged(_))));
    let (id, epoch) = store.begin("client/j0", [0; 16], [1; 16], 0, 4096).expect("begun");
    store.append(id, epoch, 1, 1, b"x").expect("appended");
    store.commit().expect("durable");
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None,
        cases: std::env::var("PROPTEST_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(200),
        ..ProptestConfig::default() })]

    /// Wherever durable bytes are damaged, missing, or on a sector that gives an error, in a store that was ended and in one
    /// whose server died: what is fetched of a journal is all that was acknowledged, or it is refused. Above all it is not a
    /// log that ends early. It is so after the next start as well, when others have gone on.
    #[test]
    fn no_damage_shortens_a_log(
        batches in prop::collection::vec((0..4u8, 1..20_000usize, prop::bool::weighted(0.3)), 1..60),
        place in 0.0..1.0f64,
        bytes in prop_oneof![Just(1u64), 1..200u64, 1..60_000u64],
        what in 0..5u8,
        marks in 0..3usize,
        is_closed in any::<bool>(),
    ) {
        let medium = Simulated::default();
        let mut store = open(medium.clone()).expect("opens");
        let begun: Vec<(u32, u64)> =
            (0..4).map(|j| store.begin(&name(j), [j; 16], [0; 16], 0, 4096).expect("begun")).collect();
        store.commit().expect("durable");
        let mut written: Vec<Vec<Vec<u8>>> = vec![Vec::new(); 4];
        for (number, (j, len, commits)) in batches.iter().enumerate() {
            let (id, epoch) = begun[usize::from(*j)];
            let batch = content(number as u64, *len);
            let log = &mut written[usize::from(*j)];
            log.push(batch);
            store.append(id, epoch, log.len() as u64, 1, &log[log.len() - 1]).expect("appended");
            if *commits {
                store.commit().expect("durable");
            }
        }
        store.commit().expect("durable");
        let end = medium.used();
        if is_closed {
            store.end().expect("durable");
        }
        drop(store);
        let at = (end.iter().map(|(_, len)| len).sum::<u64>() as f64 * place) as u64;
        let mut before = 0;
        for (segment, len) in end {
            if (before..before + len).contains(&at) {
                let at = at - before;
                match what {
                    0 => medium.cut(segment, None),
                    1 => medium.cut(segment, Some(at)),
                    2 => medium.break_sector(segment, at),
                    _ => medium.wipe(segment, at, bytes.min(len - at)),
                }
            }
            before += len;
        }
        // One mark is enough; where there is none, nobody knows where the store ended.
        (0..marks).for_each(|index| medium.remove_end_mark(index));
        for start in 0..2 {
            let mut store = match open(medium.clone()) {
                Ok(store) => store,
                Err(StoreError::Damaged(_)) => return Ok(()),
                Err(error) => panic!("{error}"),
            };
            // Where all of it is gone there is nothing to tell that it was there.
            let is_gone = marks == 2 && (what == 0 || what == 1 && at == 0);
            assert_complete_or_refused(&mut store, &written, is_gone || start > 0)?;
            let (id, epoch) = store.begin("client/j9", [9; 16], [start; 16], 0, 4096).expect("others go on");
            for sequence in 1..=12 {
                store.append(id, epoch, sequence, 1, &content(sequence, 30_000)).expect("others go on");
                store.commit().expect("others go on");
            }
        }
    }
}

fn assert_complete_or_refused(
    store: &mut Store<Simulated>,
    written: &[Vec<Vec<u8>>],
    may_be_gone: bool,
) -> Result<(), TestCaseError> {
    for (j, log) in written.iter().enumerate() {
        let Ok(info) = store.info(&name(j as u8)) else {
            prop_assert!(may_be_gone || store.counters().damaged_places > 0, "journal {} is gone", j);
            continue;
        };
        let mut fetched = Vec::new();
        let refused = loop {
            match store.fetch(&info.name, info.epoch, info.tail + fetched.len() as u64) {
                Ok(Some(batch)) => fetched.push(batch),
                Ok(None) => break false,
                Err(_) => break true,
            }
        };
        prop_assert!(refused || &fetched == log, "journal {}: {} of {} batches", j, fetched.len(), log.len());
    }
    Ok(())
}

#[test]
fn a_bit_that_flips_while_the_store_is_open_is_seen_when_it_is_read() {
    let medium = Simulated::default();
    let mut store = open(medium.clone()).expect("opens");
    let (id, epoch) = store.begin("client/j0", [0; 16], [0; 16], 0, 4096).expect("begun");
    store.append(id, epoch, 1, 1, &content(1, 5000)).expect("appended");
    store.commit().expect("durable");
    medium.flip(1, 3000);
    assert!(matches!(store.fetch("client/j0", epoch, 1), Err(StoreError::Damaged(_))));
}

#[test]
fn a_full_disk_refuses_batches_and_a_new_epoch_makes_room() {
    let medium = Simulated::default();
    medium.set_capacity(3 * SMALL.segment_bytes);
    let mut store = open(medium.clone()).expect("opens");
    let (id, epoch) = store.begin("client/j0", [0; 16], [0; 16], 0, 4096).expect("begun");
    let mut last = 0;
    let error = loop {
        match store.append(id, epoch, last + 1, 1, &content(last, 30_000)) {
            Ok(()) => last += 1,
            Err(error) => break error,
        }
    };
    assert!(matches!(error, StoreError::Full(_)), "{error}");
    assert!(last > 10);
    store.commit().expect("what was staged before is durable");
    assert!(store.fetch("client/j0", epoch, last).expect("whole").is_some());
    // Stale once a new epoch is durable: the segments go, and there is room.
    let (id, epoch) = store.begin("client/j0", [0; 16], [1; 16], 0, 4096).expect("the reserve is for this");
    store.commit().expect("durable");
    for sequence in 1..=10 {
        store.append(id, epoch, sequence, 1, &content(sequence, 30_000)).expect("there is room again");
    }
    store.commit().expect("durable");
}

#[test]
fn space_is_bounded_by_what_is_live() {
    let medium = Simulated::default();
    let mut store = open(medium.clone()).expect("opens");
    let (idle, idle_epoch) = store.begin("client/idle", [1; 16], [0; 16], 0, 4096).expect("begun");
    let (busy, busy_epoch) = store.begin("client/busy", [2; 16], [0; 16], 0, 4096).expect("begun");
    let kept = content(7, 10_000);
    let mut idle_last = 0;
    for sequence in 1..=2000u64 {
        let tail = sequence.saturating_sub(3).max(1);
        store.append(busy, busy_epoch, sequence, tail, &content(sequence, 20_000)).expect("appended");
        if sequence % 100 == 0 {
            // Live in a segment that is otherwise dead: cleaning has to move it.
            idle_last += 1;
            store.append(idle, idle_epoch, idle_last, 1, &kept).expect("appended");
        }
        store.commit().expect("durable");
        store.clean().expect("cleaned");
    }
    let (used, live) = store.space_bytes();
    assert!(live < 400_000 && used < 2 * live + 7 * SMALL.segment_bytes, "{used} bytes for {live} live ones");
    assert!(medium.bytes() <= used + SMALL.segment_bytes);
    assert!(store.counters().cleaned_bytes > 0);
    drop(store);
    let mut store = open(medium).expect("opens");
    for sequence in 1..=idle_last {
        assert_eq!(store.fetch("client/idle", idle_epoch, sequence).expect("whole"), Some(kept.clone()));
    }
}

#[test]
fn another_file_system_s_live_journal_is_left_alone() {
    let mut store = open(Simulated::default()).expect("opens");
    let (_, epoch) = store.begin("client/j0", [1; 16], [0; 16], 0, 4096).expect("begun");
    assert!(matches!(store.begin("client/j0", [2; 16], [0; 16], 0, 4096), Err(StoreError::Refused(_))));
    assert!(matches!(store.delete("client/j0", false), Err(StoreError::Refused(_))));
    store.close("client/j0", epoch, [0; 16]).expect("closed");
    let (_, higher) = store.begin("client/j0", [2; 16], [0; 16], 41, 4096).expect("begun");
    assert_eq!(higher, 42, "above what the client knows of");
}

#[test]
fn journals_that_are_over_make_room_for_others() {
    let mut store = open(Simulated::default()).expect("opens");
    let (kept, epoch) = store.begin("client/kept", [1; 16], [0; 16], 0, 4096).expect("begun");
    store.append(kept, epoch, 1, 1, b"x").expect("appended");
    store.begin("another/j", [2; 16], [0; 16], 0, 4096).expect("begun");
    for number in 0..600 {
        let name = format!("client/over-{number}");
        let (_, epoch) = store.begin(&name, [1; 16], [0; 16], 0, 4096).expect("there is room");
        store.close(&name, epoch, [0; 16]).expect("closed");
        store.commit().expect("durable");
    }
    assert!(store.fetch("client/kept", epoch, 1).expect("whole").is_some());
    assert!(store.info("another/j").is_ok());
    let mut live = 1;
    let error = loop {
        match store.begin(&format!("client/live-{live}"), [1; 16], [0; 16], 0, 4096) {
            Ok(_) => live += 1,
            Err(error) => break error,
        }
    };
    assert!(matches!(error, StoreError::Full(_)) && live == 256, "{live}: {error}");
}

/// Of each batch something is in memory, so that their number is bounded where their bytes say little.
#[test]
fn small_batches_do_not_fill_the_servers_memory() {
    let mut store = open(Simulated::default()).expect("empty");
    let (journal, epoch) = store.begin("client/j0", [0; 16], [0; 16], 0, 512).expect("begun");
    let mut sequence = 0;
    let error = loop {
        match store.append(journal, epoch, sequence + 1, 1, &[7; 64]) {
            Ok(()) => sequence += 1,
            Err(error) => break error,
        }
        assert!(sequence < 100_000, "nothing bounds them");
        if sequence % 64 == 0 {
            store.commit().expect("durable");
        }
    };
    assert!(matches!(error, StoreError::Full(_)), "{error}");
    assert_eq!(sequence, 4096);
    // Where the log goes on, there is room again; and the store opens with as many as it has.
    store.append(journal, epoch, sequence + 1, sequence, &[7; 64]).expect("the tail has passed the others");
    for next in sequence + 2..sequence + 100 {
        store.append(journal, epoch, next, next - 1, &[7; 64]).expect("appended");
    }
}
