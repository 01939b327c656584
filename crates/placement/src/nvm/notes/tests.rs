use super::*;
use jbd2::build::SuperblockBuilder;
use jbd2::{Checksum, Features};

const BLOCK: u32 = 1024;

fn superblock() -> Box<[u8; ATTACHMENT_BYTES]> {
    superblock_with(Checksum::None)
}

fn superblock_with(checksum: Checksum) -> Box<[u8; ATTACHMENT_BYTES]> {
    let features = Features { compat: 0, incompat: Features::REVOKE, ro_compat: 0 };
    let builder = SuperblockBuilder { block_size: BLOCK, maxlen: 64, features, ..SuperblockBuilder::default() };
    Box::new(*builder.checksum(checksum).build().first_chunk().expect("a superblock is that long"))
}

fn tail(position: u32, sequence: u32) -> Tail {
    Tail { position, sequence }
}

fn begun() -> Note {
    Note::Begun { superblock: superblock(), tail: tail(1, 5), cursor: tail(1, 5), committed_at: (0, 0) }
}

fn committed(sequence: u32, next: u32, puts: &[u64], appends: &[u64], revokes: &[u64]) -> Note {
    Note::Committed(Committed {
        sequence,
        next,
        committed_at: (9, 8),
        puts: puts.to_vec(),
        appends: appends.to_vec(),
        revokes: revokes.to_vec(),
    })
}

fn log_block(position: u32) -> Note {
    Note::LogBlock(position, Arc::from(vec![position as u8; BLOCK as usize]))
}

fn all() -> Vec<Note> {
    vec![
        begun(),
        log_block(1),
        log_block(2),
        log_block(3),
        committed(5, 4, &[100, 101], &[200], &[]),
        Note::Homes(vec![(100, 5, HomeState::Same), (101, 5, HomeState::Other)]),
        log_block(4),
        log_block(5),
        committed(6, 6, &[102], &[], &[101, 300]),
        Note::Read(Some(vec![102])),
        Note::Unread,
        Note::AtHome(vec![(100, 5)]),
        Note::Restored(200, 5),
        Note::NotAtHome(7..9),
        Note::Tail(tail(4, 6)),
        log_block(6),
        Note::Read(None),
        Note::FlushFailed,
    ]
}

fn found(notes: Vec<Note>) -> FoundNotes {
    let identity = Identity { journal: [1; 16], home_start: 2, number: [3; 16] };
    FoundNotes { name: String::new(), identity, notes }
}

fn settled(notes: Vec<Note>, sequence: u32, in_region: &[u64]) -> Result<(Noted, Rest), String> {
    Noted::settle(found(notes), sequence, &|block| in_region.contains(&block))
}

#[test]
fn notes_are_read_as_they_were_written() {
    let base = tempfile::tempdir_in("/dev/shm").expect("tmpfs");
    let path = base.path().join("vm");
    let directory = || Arc::new(OwnDirectory::open_or_make(&path).expect("made"));
    let identity = found(Vec::new()).identity;
    let mut every = all();
    every.extend([
        Note::Live(tail(3, 4)),
        Note::Last(vec![(1, 2), (3, u64::MAX)]),
        Note::Anew(superblock(), tail(9, 9)),
    ]);
    every.push(Note::Failed);
    let mut notes = Notes::begin(Some(directory()), identity, &every[..2]);
    every[2..].iter().for_each(|note| notes.note(note));
    let read = || FoundNotes::find(&directory(), |other| *other == identity).expect("read");
    assert_eq!(read()[0].notes, every);
    assert!(FoundNotes::find(&directory(), |other| *other != identity).expect("read").is_empty());
    // Others have names of their own, and those that take their place have theirs.
    let mut others = Notes::begin(Some(directory()), identity, &every[..1]);
    assert_eq!(read().len(), 2);
    others.remove();
    notes.renew(&every[..3]);
    notes.note(&every[5]);
    let name = notes.name().to_owned();
    assert_eq!(read()[0].notes, [&every[..3], &every[5..6]].concat());
    // Killed at any byte of a note: it is not there, whatever the rest of the file is.
    let whole = std::fs::read(path.join(&name)).expect("read");
    let len = every[5].bytes().len();
    for cut in whole.len() - len..whole.len() {
        for filler in [&[][..], &[0; 64]] {
            std::fs::write(path.join(&name), [&whole[..cut], filler].concat()).expect("written");
            assert_eq!(read()[0].notes, every[..3], "cut at {cut}");
        }
    }
    let mut notes = Notes::go_on(directory(), (name, identity), &every).expect("written");
    assert_eq!(read()[0].notes, every);
    forget_all_but(&directory(), &[notes.name().to_owned()]);
    assert_eq!(read().len(), 1);
    assert!(notes.are_there());
    notes.give_up("this is a test");
    assert!(!notes.are_there());
    notes.note(&every[1]);
    assert!(read().is_empty(), "nobody is to believe them");
}

/// Of whatever a guest does so often that nobody looks at their length in between.
#[test]
fn a_guest_does_not_fill_the_hosts_memory_with_them() {
    let base = tempfile::tempdir_in("/dev/shm").expect("tmpfs");
    let path = base.path().join("vm");
    let directory = Arc::new(OwnDirectory::open_or_make(&path).expect("made"));
    let mut notes = Notes::begin(Some(directory), found(Vec::new()).identity, &all()[..2]);
    let len = |notes: &Notes| std::fs::metadata(path.join(notes.name())).map_or(0, |file| file.len());
    let before = len(&notes);
    assert!(before > 0);
    let block: Arc<[u8]> = vec![1; 1 << 20].into();
    for count in 0..200 {
        notes.note(&Note::LogBlock(count, Arc::clone(&block)));
        assert!(len(&notes) <= before + ADDED_MAX, "after {count}: {}", len(&notes));
    }
    assert_eq!(len(&notes), 0, "nobody is to believe a part of them");
}

/// What is there stays, and is added to, where it cannot be written anew; and a worker that cannot do so does not go on.
#[test]
fn notes_that_cannot_be_written_anew_stay() {
    let base = tempfile::tempdir_in("/dev/shm").expect("tmpfs");
    let path = base.path().join("vm");
    let directory = || Arc::new(OwnDirectory::open_or_make(&path).expect("made"));
    let (identity, every) = (found(Vec::new()).identity, all());
    let mut notes = Notes::begin(Some(directory()), identity, &every[..2]);
    let read = || FoundNotes::find(&directory(), |other| *other == identity).expect("read")[0].notes.clone();
    // In the way of the file that would take its place.
    let in_the_way = path.join(format!("{}.new", notes.name()));
    std::fs::create_dir(&in_the_way).expect("made");
    notes.renew(&every[..3]);
    notes.note(&every[3]);
    assert_eq!(read(), [&every[..2], &every[3..4]].concat());
    let name = notes.name().to_owned();
    Notes::go_on(directory(), (name, identity), &every).expect_err("they cannot be written");
    assert_eq!(read(), [&every[..2], &every[3..4]].concat(), "for another worker");
    std::fs::remove_dir(&in_the_way).expect("removed");
    notes.renew(&every[..3]);
    assert_eq!(read(), every[..3]);
}

#[test]
fn what_was_noted_is_the_log() {
    let (noted, rest) = settled(all(), 6, &[102, 200]).expect("they agree");
    assert_eq!(rest, Rest::Nothing);
    assert_eq!((noted.tail, noted.cursor, noted.committed_at), (tail(4, 6), tail(6, 7), (9, 8)));
    assert_eq!(noted.live, [tail(4, 6)]);
    assert_eq!(noted.copies.keys().copied().collect::<Vec<_>>(), [6]);
    let mut last: Vec<u32> = noted.last.keys().copied().collect();
    last.sort_unstable();
    assert_eq!(last, [4, 5], "those of the transaction before are not sent again");
    assert_eq!(noted.last[&5], digest_of(&[5; BLOCK as usize]));
    // 100 has left the region, and its transaction the guest's log; 101 was revoked.
    assert_eq!(noted.homes, HashMap::from([(102, (6, HomeState::Behind)), (200, (5, HomeState::Other))]));
    assert_eq!(noted.at_home, HashMap::new());
    assert!(noted.has_flush_failed && !noted.has_failed && noted.read == Some(None));
    assert!(noted.unknown([102, 200].into_iter()).is_empty());
    assert_eq!(noted.unknown([102, 101].into_iter()), HashSet::from([101]));
}

#[test]
fn the_region_says_whether_the_last_note_has_come_to_pass() {
    let notes = || vec![begun(), log_block(1), committed(5, 3, &[100], &[200], &[])];
    let (noted, _) = settled(notes(), 4, &[]).expect("not published");
    assert_eq!((noted.cursor, noted.copies.len(), noted.homes.len(), noted.at_home.len()), (tail(1, 5), 1, 0, 0));
    let (noted, _) = settled(notes(), 5, &[100]).expect("published");
    assert_eq!((noted.cursor, noted.copies.len(), noted.homes.len(), noted.at_home.len()), (tail(3, 6), 0, 1, 1));
    for sequence in [3, 6] {
        assert!(settled(notes(), sequence, &[100]).is_err(), "of another moment");
    }
    assert!(settled([notes(), vec![Note::Unread]].concat(), 4, &[]).is_err(), "it went on, so it was published");
    // Held again: not yet; with the next number for a moment; and done.
    let again = || [notes(), vec![Note::Restored(200, 5)]].concat();
    let (noted, rest) = settled(again(), 5, &[100]).expect("not held again");
    assert_eq!((noted.at_home.len(), noted.homes.len(), rest), (1, 1, Rest::Nothing));
    let (noted, rest) = settled(again(), 6, &[100, 200]).expect("held again");
    assert_eq!((noted.at_home.len(), noted.homes.len(), rest), (0, 2, Rest::Sequence(5)));
    let (noted, rest) = settled(again(), 5, &[100, 200]).expect("held again");
    assert_eq!((noted.at_home.len(), noted.homes.len(), rest), (0, 2, Rest::Nothing));
    assert!(settled(again(), 7, &[100, 200]).is_err());
    // Begun anew: not yet, and done.
    let anew = || [notes(), vec![log_block(3), Note::Anew(superblock(), tail(9, 40))]].concat();
    let (noted, _) = settled(anew(), 5, &[100]).expect("not yet");
    assert_eq!((noted.tail, noted.copies.len()), (tail(1, 5), 1));
    let (noted, _) = settled(anew(), 39, &[]).expect("begun anew");
    assert_eq!((noted.tail, noted.cursor, noted.copies.len()), (tail(9, 40), tail(9, 40), 0));
    assert!(noted.live.is_empty() && noted.homes.is_empty() && noted.at_home.is_empty());
    assert!(settled(anew(), 38, &[]).is_err());
}

/// Its guest may have been answered, and writes its transactions with the features that it has said.
#[test]
fn a_log_that_begins_anew_where_it_stood_has_the_features_that_it_begins_with() {
    let anew = |tail| Note::Anew(superblock_with(Checksum::V3), tail);
    let notes = |rest: Vec<Note>| [vec![begun(), log_block(1)], rest].concat();
    let (noted, rest) = settled(notes(vec![anew(tail(1, 5))]), 4, &[]).expect("they agree");
    assert_eq!((noted.format.checksum, noted.copies.len(), rest), (Checksum::V3, 0, Rest::Nothing));
    assert_eq!((noted.tail, noted.cursor), (tail(1, 5), tail(1, 5)));
    // It went on, so that was done.
    let (noted, _) = settled(notes(vec![anew(tail(1, 5)), log_block(1)]), 4, &[]).expect("they agree");
    assert_eq!((noted.format.checksum, noted.copies.len()), (Checksum::V3, 1));
    // Elsewhere the number tells that it was not.
    let (noted, _) = settled(notes(vec![anew(tail(9, 40))]), 4, &[]).expect("they agree");
    assert_eq!((noted.format.checksum, noted.copies.len()), (Checksum::None, 1));
}

#[test]
fn what_is_in_the_region_is_not_at_home_and_the_other_way_round() {
    let notes = vec![begun(), committed(5, 3, &[100, 101], &[200], &[]), Note::AtHome(vec![(100, 5), (101, 5)])];
    // 100 has left, 101 is about to, 200 was never there.
    let (noted, _) = settled(notes, 5, &[101]).expect("they agree");
    assert_eq!(noted.homes.keys().copied().collect::<Vec<_>>(), [101]);
    assert_eq!(noted.at_home, HashMap::from([(100, 5), (200, 5)]));
}

#[test]
fn notes_that_are_not_those_of_a_log_are_refused() {
    let wrong = [
        vec![],
        vec![log_block(1)],
        vec![begun(), begun()],
        vec![begun(), committed(6, 3, &[], &[], &[]), Note::Unread],
        vec![begun(), committed(5, 64, &[], &[], &[]), Note::Unread],
        vec![begun(), committed(5, 0, &[], &[], &[]), Note::Unread],
        vec![begun(), Note::Tail(tail(2, 5))],
    ];
    for notes in wrong {
        assert!(settled(notes.clone(), 4, &[]).is_err() && settled(notes.clone(), 5, &[]).is_err(), "{notes:?}");
    }
}
