//! Tests of what is kept in a store.

use super::*;
use crate::stand_in::StandIn;
use std::io::{Read, Seek, Write};

fn file(content: &str) -> File {
    let file = memfd_create("vault", MemfdFlags::CLOEXEC).expect("a file");
    let mut file = File::from(file);
    file.write_all(content.as_bytes()).expect("written");
    file
}

fn content(found: &Found) -> String {
    let mut file = File::from(found.descriptors[0].try_clone().expect("a descriptor"));
    file.rewind().expect("a file");
    let mut text = String::new();
    file.read_to_string(&mut text).expect("read");
    text
}

#[test]
fn what_was_put_last_is_found_by_one_process_after_the_other() {
    let store = StandIn::default();
    let mut root = store.open();
    let mut vm = root.split("db");
    let mut kept = vm.split("kept");
    kept.put("a", b"1", &[file("first").as_fd()]);
    kept.put("a", b"2", &[file("second").as_fd()]);
    vm.split("door").put("0", b"", &[]);
    kept.put("gone", b"", &[]);
    kept.remove("gone");
    let mut store = store.of_a_dead_process();
    drop((root, vm, kept));
    for _ in 0..3 {
        let mut root = store.open();
        assert_eq!(root.parts().into_iter().collect::<Vec<_>>(), ["db"]);
        let mut vm = root.split("db");
        assert!(root.parts().is_empty());
        let (mut kept, mut door) = (vm.split("kept"), vm.split("door"));
        assert!(kept.is_whole() && door.is_whole() && vm.is_whole());
        assert_eq!(door.take_found().into_keys().collect::<Vec<_>>(), ["0"]);
        let found = kept.take_found();
        assert_eq!(found.keys().collect::<Vec<_>>(), ["a"]);
        assert_eq!((found["a"].words.as_slice(), content(&found["a"]).as_str()), (b"2".as_slice(), "second"));
        store = store.of_a_dead_process();
    }
    let mut vm = store.open().split("db");
    let (mut kept, door) = (vm.split("kept"), vm.split("door"));
    kept.put("a", b"3", &[]);
    let mut found = store.copy().open().split("db");
    assert_eq!(found.split("kept").take_found()["a"].words, b"3");
    kept.clear();
    let mut found = store.copy().open().split("db");
    assert!(found.split("kept").take_found().is_empty());
    assert_eq!(found.split("door").take_found().len(), 1, "a shelf that was split off is another one's");
    drop(door);
}

/// Killed between putting one in and taking the other out.
#[test]
fn of_two_with_one_name_the_later_counts() {
    let store = StandIn::default();
    for (number, item, words) in [(8, "format", "test"), (9, "db/a", "old"), (10, "db/a", "new")] {
        store.plant(number, item, words.as_bytes(), &[]);
    }
    store.put("amberlog-11", file("no envelope").as_fd()).expect("put");
    store.put("another", file("nobody's").as_fd()).expect("put");
    let mut root = store.open();
    assert_eq!(store.len(), 3, "what counts no more is taken out, and what is another's stays");
    let mut db = root.split("db");
    assert!(!db.is_whole(), "nobody knows whether that is all");
    assert_eq!(db.take_found()["a"].words, b"new");
    root.put("b", b"words", &[]);
    assert_eq!(store.copy().open().words("b"), Some(b"words".as_slice()));
    assert!(store.names().contains(&"amberlog-12".to_owned()), "no number is used twice");
}

/// A process that may have no more descriptors is given what it has kept all the same, the next time.
#[test]
fn what_cannot_be_read_now_is_not_thrown_away() {
    use std::io::{Error, ErrorKind};
    assert!(super::is_passing(&Error::from_raw_os_error(24)), "EMFILE");
    assert!(super::is_passing(&ErrorKind::ResourceBusy.into()), "its descriptors did not come along");
    assert!(!super::is_passing(&Error::from_raw_os_error(88)) && !super::is_passing(&Error::other("strange")));
}

/// Whatever word the store misses, and whenever the process ends: what is found is the last or the one before, or known not to be whole.
#[test]
fn what_is_found_is_true_or_known_not_to_be() {
    type State = BTreeMap<String, Vec<u8>>;
    let steps: [(&str, Option<&str>); 9] = [
        ("a", Some("1")),
        ("b", Some("1")),
        ("a", Some("2")),
        ("a", None),
        ("b", Some("2")),
        ("c", Some("1")),
        ("c", None),
        ("c", Some("1")),
        ("b", None),
    ];
    let look = |store: &StandIn| {
        let mut shelf = store.copy().open().split("vm");
        let is_whole = shelf.is_whole();
        is_whole.then(|| shelf.take_found().into_iter().map(|(item, found)| (item, found.words)).collect::<State>())
    };
    let (mut is_missed, mut is_found) = (0, 0);
    for missed in 0..30 {
        let store = StandIn::default();
        let mut shelf = store.open().split("vm");
        let (mut before, mut state) = (State::new(), State::new());
        store.miss(missed);
        let seen: Arc<std::sync::Mutex<Vec<Option<State>>>> = Arc::default();
        let into = Arc::clone(&seen);
        store.look(move |store| into.lock().expect("no panic").push(look(store)));
        for (item, words) in steps {
            match words {
                Some(words) => {
                    state.insert(item.to_owned(), words.into());
                    shelf.put(item, words.as_bytes(), &[]);
                }
                None => {
                    state.remove(item);
                    shelf.remove(item);
                }
            }
            let mut all = std::mem::take(&mut *seen.lock().expect("no panic"));
            all.push(look(&store));
            for found in all {
                match found {
                    None => {
                        is_missed += 1;
                        assert!(missed < 29, "{item}: nothing was missed");
                    }
                    Some(found) => {
                        is_found += 1;
                        assert!(found == before || found == state, "{missed}, {item}: {found:?} is not {state:?}");
                    }
                }
            }
            if missed == 29 {
                assert!(look(&store).is_some(), "nothing was missed");
            }
            before = state.clone();
        }
    }
    assert!(is_missed > 50 && is_found > 100, "{is_missed} times known not to be, {is_found} times found");
}

#[test]
fn what_cannot_be_kept_is_not_taken_for_all() {
    let store = StandIn::default();
    let mut vm = store.open().split("vm");
    vm.put("b", b"1", &[]);
    vm.put("a", &vec![0; BYTES_MAX], &[]);
    assert!(!store.copy().open().split("vm").is_whole());
    vm.put("a", b"1", &[]);
    assert!(store.copy().open().split("vm").is_whole(), "the next time it could be");
    vm.put("seal", b"", &[]);
    assert!(store.copy().open().split("vm").is_whole(), "nobody has the seal's name");
    store.set_max(store.len());
    vm.put("c", b"1", &[]);
    assert!(!store.copy().open().split("vm").is_whole(), "a store that is full says nothing");
    let mut none = Shelf::default();
    none.put("a", b"1", &[]);
    none.begin();
    none.clear();
    assert!(!none.is_kept() && none.parts().is_empty() && none.is_whole());
}

/// What was let go of is gone in one step, even where the store does not let go.
#[test]
fn what_was_let_go_of_is_not_found() {
    for missed in 0..4 {
        let store = StandIn::default();
        let mut vm = store.open().split("vm");
        vm.put("a", b"1", &[]);
        vm.put("b", b"1", &[]);
        store.miss(missed);
        let seen: Arc<std::sync::Mutex<Vec<(bool, usize)>>> = Arc::default();
        let into = Arc::clone(&seen);
        store.look(move |store| {
            let mut shelf = store.copy().open().split("vm");
            into.lock().expect("no panic").push((shelf.is_whole(), shelf.take_found().len()));
        });
        vm.clear();
        let seen = std::mem::take(&mut *seen.lock().expect("no panic"));
        // But for the seal itself nothing has to be let go of.
        let are_gone = seen.iter().all(|seen| *seen == (true, 0));
        assert!(are_gone || missed < 2 && seen[2] == (false, 1), "{missed}: {seen:?}");
    }
}

#[test]
fn what_was_begun_and_not_ended_is_known() {
    let store = StandIn::default();
    let mut vm = store.open().split("vm");
    vm.put("a", b"1", &[]);
    vm.begin();
    let is_begun = || store.copy().open().split("vm").is_begun();
    assert!(is_begun());
    vm.put("a", b"2", &[]);
    assert!(is_begun(), "it is not ended by what is put");
    vm.remove("a");
    assert!(is_begun(), "nor by what is removed");
    vm.end();
    assert!(!is_begun());
}

#[test]
fn what_another_program_keeps_is_not_touched() {
    let store = StandIn::default();
    let mut root = store.open();
    root.split("db").put("a", b"1", &[]);
    let names = store.names();
    let Opened::Foreign { format, parts } = store.copy().open_as("other 2.0") else { panic!("it is another's") };
    assert_eq!((format.as_str(), parts.into_iter().collect::<Vec<_>>()), ("test", vec!["db".to_owned()]));
    assert!(matches!(store.copy().open_as("test 2.0"), Opened::Ours(_)), "only the first word is the format");
    assert_eq!(store.names(), names);
    let old = StandIn::default();
    old.plant(0, "db/a", b"1", &[]);
    assert!(matches!(old.open_as("test"), Opened::Foreign { .. }), "who says nothing keeps it in another way");
    assert_eq!(old.len(), 1);
}

/// A later program goes on with it; from then on the earlier one does not, whatever of that the store has taken.
#[test]
fn what_an_earlier_program_keeps_is_taken_up() {
    let store = StandIn::default();
    store.open().split("db").put("a", b"1", &[]);
    assert!(matches!(store.copy().open_after("later 2.0", &["earlier"]), Opened::Foreign { .. }));
    let Opened::Ours(mut root) = store.open_after("later 2.0", &["test"]) else { panic!("it goes on with that") };
    assert_eq!(root.split("db").words("a"), Some(&b"1"[..]));
    let Opened::Foreign { format, .. } = store.copy().open_as("test") else { panic!("it is a later one's") };
    assert_eq!(format, "later 2.0");
    let Opened::Ours(mut root) = store.copy().open_after("later 2.0", &["test"]) else { panic!("its own") };
    assert_eq!(root.split("db").words("a"), Some(&b"1"[..]));
}
