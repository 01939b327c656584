//! The tables, row by row: every combination of what decides is made, and each has to fall into the row that the table names.

use super::*;
use crate::mark::{MarkKind, distrusted, marked};
use crate::nvm::books::{RegionBooks, RegionVerdict, RegionWhy};
use jbd2::SuperblockEdit;

const SEQUENCE: u32 = 77;
const OPENING: Opening = Opening { number: *b"sixteen numbers.", count: 5 };
const SERVER: RemoteMark = RemoteMark { epoch: 9, nonce: [3; 16] };
const CHECKSUM_AT: usize = 0xfc;
const SERVERS_MARK: std::ops::Range<usize> = 0xc0..0xe8;
const MEMORYS_MARK: std::ops::Range<usize> = 0x80..0xac;

/// A journal superblock of an empty log, with checksums of its own or without.
fn superblock(has_checksum: bool) -> Vec<u8> {
    let mut block = vec![0u8; 4096];
    for (at, value) in [(0, 0xc03b_3998u32), (4, 4), (0xc, 4096), (0x10, 1024), (0x14, 1), (0x18, SEQUENCE)] {
        block[at..at + 4].copy_from_slice(&value.to_be_bytes());
    }
    block[0x30..0x40].copy_from_slice(&[7; 16]);
    if has_checksum {
        block[0x28..0x2c].copy_from_slice(&Features::CSUM_V3.to_be_bytes());
        block[0x50] = 4;
    }
    SuperblockEdit::new(&mut block).expect("a superblock").seal();
    block
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Servers {
    Zeros,
    Torn,
    OtherSequence,
    Whole,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Memorys {
    None,
    Torn,
    OtherSequence,
    Held,
    Dropped,
    Nvm,
    Distrust,
    Aged,
    AgedOtherSequence,
    /// Nobody writes the two together.
    AgedAndDistrust,
}

const MEMORYS: [Memorys; 10] = [
    Memorys::None,
    Memorys::Torn,
    Memorys::OtherSequence,
    Memorys::Held,
    Memorys::Dropped,
    Memorys::Nvm,
    Memorys::Distrust,
    Memorys::Aged,
    Memorys::AgedOtherSequence,
    Memorys::AgedAndDistrust,
];

#[derive(Clone, Copy, Debug)]
struct Case {
    is_superblock: bool,
    has_checksum: bool,
    is_checksum_right: bool,
    start: u32,
    errno: i32,
    servers: Servers,
    memorys: Memorys,
}

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for bits in 0..8 {
        for start in [0, 1, 500] {
            for errno in [0, jbd2::ERRNO_EIO, -30] {
                for servers in [Servers::Zeros, Servers::Torn, Servers::OtherSequence, Servers::Whole] {
                    for memorys in MEMORYS {
                        cases.push(Case {
                            is_superblock: bits & 1 == 0,
                            has_checksum: bits & 2 != 0,
                            is_checksum_right: bits & 4 == 0,
                            start,
                            errno,
                            servers,
                            memorys,
                        });
                    }
                }
            }
        }
    }
    cases
}

/// The mark of memory, and of a server, as they lie in a superblock of this sequence.
fn marks(sequence: u32, kind: MarkKind) -> (Vec<u8>, Vec<u8>) {
    let mut block = superblock(false);
    SuperblockEdit::new(&mut block).expect("a superblock").sequence(sequence).seal();
    let memorys = marked(&block, kind, &OPENING).expect("a superblock")[MEMORYS_MARK].to_vec();
    let servers = SERVER.write_into(&block).expect("a superblock")[SERVERS_MARK].to_vec();
    (memorys, servers)
}

impl Case {
    fn raw(&self) -> Vec<u8> {
        let mut block = superblock(self.has_checksum);
        let sequence = |is_other: bool| if is_other { SEQUENCE - 1 } else { SEQUENCE };
        if self.servers != Servers::Zeros {
            let (_, mark) = marks(sequence(self.servers == Servers::OtherSequence), MarkKind::Held);
            block[SERVERS_MARK].copy_from_slice(&mark);
            if self.servers == Servers::Torn {
                block[SERVERS_MARK.start + 20] ^= 0xff;
            }
        }
        if self.memorys != Memorys::None {
            let kind = match self.memorys {
                Memorys::Dropped => MarkKind::Dropped,
                Memorys::Nvm => MarkKind::Nvm,
                Memorys::Aged | Memorys::AgedOtherSequence | Memorys::AgedAndDistrust => MarkKind::Aged,
                _ => MarkKind::Held,
            };
            let is_other = matches!(self.memorys, Memorys::OtherSequence | Memorys::AgedOtherSequence);
            let (mark, _) = marks(sequence(is_other), kind);
            block[MEMORYS_MARK].copy_from_slice(&mark);
            if self.is_distrusted() {
                // It takes the place of a held mark, and lies elsewhere.
                block = distrusted(&block).expect("a superblock");
            }
            if self.memorys == Memorys::AgedAndDistrust {
                block[MEMORYS_MARK].copy_from_slice(&mark);
            }
            if self.memorys == Memorys::Torn {
                block[MEMORYS_MARK.start + 20] ^= 0xff;
            }
        }
        SuperblockEdit::new(&mut block).expect("a superblock").start(self.start).errno(self.errno).seal();
        if !self.is_checksum_right {
            block[CHECKSUM_AT] ^= 0xff;
        }
        if !self.is_superblock {
            block[0] ^= 0xff;
        }
        block
    }

    fn is_distrusted(&self) -> bool {
        matches!(self.memorys, Memorys::Distrust | Memorys::AgedAndDistrust)
    }

    /// The table, written down a second time.
    fn row(&self) -> (&'static str, Says) {
        let is_checksum_wrong = self.has_checksum && !self.is_checksum_right;
        let has_servers = self.servers != Servers::Zeros;
        let tail = Tail { position: self.start, sequence: SEQUENCE };
        match (self.is_superblock, self.start, self.errno, self.memorys) {
            (false, ..) if has_servers => ("1", Says::Damaged),
            (false, ..) => ("2", Says::NoJournal(SuperblockError::Magic)),
            (true, 1.., _, Memorys::Aged | Memorys::AgedAndDistrust) => ("3b", Says::Aged(OPENING, tail)),
            (true, 1.., _, Memorys::Distrust) => ("3a", Says::LeftToGuest(tail)),
            (true, 1.., ..) => ("3", Says::Live(tail)),
            (true, 0, errno, Memorys::Held) if errno != 0 => ("4", Says::Held(OPENING)),
            (true, 0, errno, Memorys::Dropped) if errno != 0 => ("4", Says::Dropped(OPENING)),
            (true, 0, errno, Memorys::Nvm) if errno != 0 => ("4", Says::Nvm(OPENING)),
            _ if has_servers && is_checksum_wrong => ("5", Says::Damaged),
            (true, 0, 0, _) if has_servers => ("6", Says::Stale),
            _ if self.servers == Servers::Torn => ("7", Says::Damaged),
            _ if self.servers == Servers::OtherSequence => ("8", Says::Stale),
            _ if has_servers => ("9", Says::Remote(SERVER)),
            (true, 0, 0, _) => ("10", Says::Empty),
            _ => ("11", Says::Error),
        }
    }
}

/// The rows of the table at the head of this module.
fn rows_of_the_table() -> std::collections::BTreeSet<&'static str> {
    let head = include_str!("../stored.rs").lines().take_while(|line| line.starts_with("//!"));
    let rows = head.filter_map(|line| line.strip_prefix("//! | ")?.split(" |").next());
    rows.filter(|row| row.starts_with(|first: char| first.is_ascii_digit())).collect()
}

#[test]
fn every_combination_falls_into_its_row() {
    let mut rows = std::collections::BTreeSet::new();
    for case in cases() {
        let stored = Stored::read(&case.raw());
        let (row, says) = case.row();
        assert_eq!(stored.says, says, "row {row}: {case:?}");
        assert_eq!(stored.superblock.is_some(), case.is_superblock, "{case:?}");
        assert_eq!(stored.is_distrusted, case.is_superblock && case.is_distrusted(), "{case:?}");
        // What follows from it: somebody who has nothing of the log may take it as it is there only where nothing else may.
        let may_go_on = stored.live_from();
        match row {
            "3" | "3a" | "3b" => assert!(matches!(may_go_on, Ok(Some(_))), "{case:?}"),
            "6" | "10" => assert_eq!(may_go_on, Ok(None), "{case:?}"),
            _ => assert_eq!(may_go_on, Err(Elsewhere), "{case:?}"),
        }
        rows.insert(row);
    }
    assert_eq!(rows, rows_of_the_table(), "each row has a case, and each case a row");
}

#[test]
fn what_is_cut_short_is_no_journal() {
    let block = superblock(true);
    for len in [0, 12, 0x80, 0xc0, 0xe7, 1023] {
        assert!(matches!(Stored::read(&block[..len]).says, Says::NoJournal(SuperblockError::Short(_))), "{len} bytes");
    }
}

/// A file system was on a server, was repaired (which clears the error and keeps sequence and padding), and is held in memory then.
#[test]
fn a_mark_that_a_server_left_does_not_come_back_with_ours() {
    let served = SERVER.write_into(&superblock(true)).expect("a superblock");
    let mut repaired = served.clone();
    SuperblockEdit::new(&mut repaired).expect("a superblock").errno(0).seal();
    assert_eq!(Stored::read(&repaired).says, Says::Stale);
    let held = marked(&repaired, MarkKind::Held, &OPENING).expect("a superblock");
    assert_eq!(Stored::read(&held).says, Says::Held(OPENING));
    assert_eq!(
        RemoteMark::read(&held),
        crate::remote::MarkFound::None,
        "what the server has is older than the file system"
    );
    // A kernel and e2fsck keep the padding: not even without the mark of memory does the server's count again.
    let mut damaged = held.clone();
    damaged[MEMORYS_MARK.start] ^= 1;
    SuperblockEdit::new(&mut damaged).expect("a superblock").seal();
    assert_eq!(Stored::read(&damaged).says, Says::Error);
    let in_region = marked(&repaired, MarkKind::Nvm, &OPENING).expect("a superblock");
    assert_eq!(Stored::read(&in_region).says, Says::Nvm(OPENING));
}

fn books(raw: &[u8]) -> HeldBooks<'_> {
    HeldBooks {
        superblock: Superblock::decode(raw).expect("a superblock"),
        raw,
        openings: Some([OPENING, Opening { count: OPENING.count - 1, ..OPENING }]),
        handed_over: None,
        is_materialise: false,
        emptied: None,
        closing_from: None,
        log_blocks: 1024,
    }
}

fn edited(raw: &[u8], edit: impl FnOnce(&mut SuperblockEdit<'_>)) -> Vec<u8> {
    let mut block = raw.to_vec();
    edit(&mut SuperblockEdit::new(&mut block).expect("a superblock"));
    SuperblockEdit::new(&mut block).expect("a superblock").seal();
    block
}

#[test]
fn storage_is_judged_by_what_is_held() {
    let before = superblock(true);
    let guests = edited(&before, |edit| {
        edit.start(1);
    });
    let books = books(&guests);
    let with_mark = |opening: Opening| marked(&before, MarkKind::Held, &opening).expect("a superblock");
    let plain = edited(&before, |edit| {
        edit.errno(jbd2::ERRNO_EIO);
    });
    let open = |sequence: u32| {
        edited(&before, |edit| {
            edit.sequence(sequence);
        })
    };
    // Row 1 and 2.
    let mut none = before.clone();
    none[0] = 0;
    assert_eq!(books.judge(&none), Err(Why::NoJournal(SuperblockError::Magic)));
    let mut other = before.clone();
    other[0x30] = 8;
    assert_eq!(books.judge(&other), Err(Why::OtherJournal));
    // Row 3: which opening it is.
    for (opening, verdict) in [
        (OPENING, Ok(Verdict::Marked)),
        (Opening { count: OPENING.count - 1, ..OPENING }, Ok(Verdict::Marked)),
        (Opening { count: OPENING.count - 2, ..OPENING }, Err(Why::OlderCopy)),
        (Opening { count: OPENING.count + 1, ..OPENING }, Err(Why::OlderCopy)),
        (Opening { number: [1; 16], ..OPENING }, Err(Why::OtherOpening)),
    ] {
        assert_eq!(books.judge(&with_mark(opening)), verdict, "{opening:?}");
        // Tables of an earlier amberlog do not know.
        assert_eq!(
            HeldBooks { openings: None, ..books }.judge(&with_mark(opening)),
            Ok(Verdict::Marked),
            "{opening:?}"
        );
    }
    let dropped = marked(&before, MarkKind::Dropped, &OPENING).expect("a superblock");
    assert_eq!(books.judge(&dropped), Err(Why::OtherOpening));
    // Row 3a: live beside the held log, and which opening of that.
    let from = Tail { position: 40, sequence: SEQUENCE + 9 };
    let aged =
        |opening: Opening| crate::mark::aged(&before, &opening, (from.position, from.sequence)).expect("a superblock");
    let earlier = Opening { count: OPENING.count - 1, ..OPENING };
    for (opening, verdict) in [
        (OPENING, Ok(Verdict::Aged(OPENING, from))),
        (earlier, Ok(Verdict::Aged(earlier, from))),
        (Opening { count: OPENING.count - 2, ..OPENING }, Err(Why::OlderCopy)),
        (Opening { count: OPENING.count + 1, ..OPENING }, Err(Why::OlderCopy)),
        (Opening { number: [1; 16], ..OPENING }, Err(Why::OtherOpening)),
    ] {
        assert_eq!(books.judge(&aged(opening)), verdict, "{opening:?}");
        // Where the books know of no opening, it is a live log that somebody else began.
        let unknown = HeldBooks { openings: None, ..books };
        assert_eq!(unknown.judge(&aged(opening)), Err(Why::UsedSince), "{opening:?}");
    }
    // The mark of another log than the one that begins there says nothing of it, nor one in a log that is empty.
    let of_another = edited(&aged(OPENING), |edit| {
        edit.sequence(from.sequence + 1);
    });
    assert_eq!(books.judge(&of_another), Err(Why::UsedSince));
    let no_more = edited(&aged(OPENING), |edit| {
        edit.start(0);
    });
    assert_eq!(books.judge(&no_more), Err(Why::UsedSince));
    let failed = edited(&no_more, |edit| {
        edit.errno(jbd2::ERRNO_EIO);
    });
    assert_eq!(books.judge(&failed), Err(Why::OtherOpening));
    // Row 4 and 5: an error without a mark is the guest's own, or it is none of ours.
    assert_eq!(books.judge(&plain), Err(Why::OtherOpening));
    assert_eq!(HeldBooks { openings: None, ..books }.judge(&plain), Ok(Verdict::Marked));
    let with_error = edited(&guests, |edit| {
        edit.errno(-30);
    });
    let its_own = HeldBooks { superblock: Superblock::decode(&with_error).expect("a superblock"), ..books };
    let on_storage = edited(&before, |edit| {
        edit.errno(-30);
    });
    assert_eq!(its_own.judge(&on_storage), Ok(Verdict::Marked));
    assert_eq!(its_own.judge(&plain), Err(Why::OtherOpening));
    // On a server since: never ours, whatever is known of openings.
    let served = SERVER.write_into(&before).expect("a superblock");
    assert_eq!(books.judge(&served), Err(Why::OtherOpening));
    assert_eq!(HeldBooks { openings: None, ..books }.judge(&served), Err(Why::UsedSince));
    // Row 6.
    let at_last_step = HeldBooks { is_materialise: true, ..books };
    assert_eq!(at_last_step.judge(&guests), Ok(Verdict::Marked));
    assert_eq!(books.judge(&guests), Err(Why::UsedSince));
    // Row 7: what a recovery leaves, and nothing that somebody else has emptied, who keeps the mark in the padding.
    let tail = SEQUENCE + 20;
    let emptied = |block: &[u8]| {
        edited(block, |edit| {
            edit.start(0).sequence(tail).errno(0);
        })
    };
    let ours = emptied(&guests);
    let after_recovery = HeldBooks { emptied: Some(&ours), ..books };
    for (raw, verdict) in [
        (&ours, Ok(Verdict::Emptied)),
        (&distrusted(&ours).expect("a superblock"), Ok(Verdict::Emptied)),
        (&emptied(&with_mark(OPENING)), Err(Why::UsedSince)),
        (&emptied(&with_mark(Opening { number: [1; 16], ..OPENING })), Err(Why::UsedSince)),
        (&open(tail + 1), Err(Why::UsedSince)),
    ] {
        let raw = &raw[..jbd2::SUPERBLOCK_BYTES];
        assert_eq!(after_recovery.judge(raw), verdict);
        assert_eq!(books.judge(raw), Err(Why::UsedSince), "what a recovery leaves is not known");
    }
    // Row 7a: what the guest leaves that was closing it, and not what others leave.
    let closing = HeldBooks { closing_from: Some(tail), ..books };
    for (raw, verdict) in [
        (&open(tail), Ok(Verdict::Emptied)),
        (&open(tail + 1024), Ok(Verdict::Emptied)),
        (&open(tail - 1), Err(Why::UsedSince)),
        (&open(tail + 1025), Err(Why::UsedSince)),
        (&emptied(&with_mark(OPENING)), Err(Why::UsedSince)),
    ] {
        assert_eq!(closing.judge(raw), verdict);
        assert_eq!(books.judge(raw), Err(Why::UsedSince), "nobody was closing it");
    }
    // Row 8 and 9.
    let live = edited(&before, |edit| {
        edit.start(40).sequence(tail + 3);
    });
    assert_eq!(books.judge(&live), Err(Why::UsedSince));
    for (cursor, verdict) in [
        (Tail { position: 40, sequence: tail + 3 }, Ok(Verdict::HandedOver)),
        (Tail { position: 41, sequence: tail + 3 }, Err(Why::UsedSince)),
        (Tail { position: 40, sequence: tail + 2 }, Err(Why::UsedSince)),
    ] {
        assert_eq!(HeldBooks { handed_over: Some(cursor), ..books }.judge(&live), verdict, "{cursor:?}");
    }
}

#[test]
fn storage_is_judged_by_what_a_region_has() {
    let before = superblock(true);
    let with_mark = |opening: Opening| marked(&before, MarkKind::Nvm, &opening).expect("a superblock");
    let count = |count: u64| with_mark(Opening { count, ..OPENING });
    let mark = with_mark(OPENING);
    let mark_checksum = crate::nvm::mark_checksum(mark.first_chunk().expect("a block"));
    let books =
        RegionBooks { journal: [7; 16], mark_checksum, owes: true, sequence: 90, is_left: false, is_home: true };
    let nothing = RegionBooks { owes: false, ..books };
    let judge = |books: &RegionBooks, raw: &[u8]| {
        let raw = &raw[..jbd2::SUPERBLOCK_BYTES];
        books.judge(raw, &Superblock::decode(raw).expect("a superblock"))
    };
    let emptied = |sequence: u32, errno: i32| {
        edited(&before, |edit| {
            edit.sequence(sequence).errno(errno);
        })
    };
    let mut other = before.clone();
    other[0x30] = 8;
    // Rows 1 to 4, whether anything is owed or not: storage says that the log is in a region.
    for books in [&books, &nothing] {
        for (raw, verdict) in [
            (&mark, Ok(RegionVerdict::Marked)),
            (&count(OPENING.count + 1), Ok(RegionVerdict::Marked)),
            (&count(OPENING.count - 1), Ok(RegionVerdict::Marked)),
            (&count(OPENING.count - 2), Err(RegionWhy::OlderImage)),
            (&count(0), Err(RegionWhy::OlderImage)),
            (&count(OPENING.count + 2), Err(RegionWhy::OlderRegion)),
            (&count(OPENING.count + 1000), Err(RegionWhy::OlderRegion)),
            (&count(1 << 40), Err(RegionWhy::OtherRegion)),
            (&with_mark(Opening { number: [1; 16], ..OPENING }), Err(RegionWhy::OtherRegion)),
            (&marked(&other, MarkKind::Nvm, &OPENING).expect("a superblock"), Err(RegionWhy::OtherRegion)),
        ] {
            assert_eq!(judge(books, raw), verdict);
        }
    }
    // Row 5.
    let dropped = marked(&before, MarkKind::Dropped, &OPENING).expect("a superblock");
    for raw in [&before, &other, &emptied(92, 0), &emptied(92, -5), &dropped] {
        assert_eq!(judge(&nothing, raw), Ok(RegionVerdict::OwesNothing));
    }
    // Row 6 to 8.
    assert_eq!(judge(&books, &other), Err(RegionWhy::OtherJournal));
    assert_eq!(judge(&books, &emptied(92, 0)), Ok(RegionVerdict::Emptied));
    let is_not_home = RegionBooks { is_home: false, ..books };
    assert_eq!(judge(&is_not_home, &emptied(92, 0)), Err(RegionWhy::OtherEpoch));
    for raw in [&emptied(91, 0), &emptied(93, 0), &emptied(92, -5), &before, &dropped] {
        assert_eq!(judge(&books, raw), Err(RegionWhy::OtherEpoch));
    }
    let live = edited(&before, |edit| {
        edit.start(1).sequence(92);
    });
    assert_eq!(judge(&books, &live), Err(RegionWhy::OtherEpoch));
    // Row 1 and 4a: it was left in its own place, and storage says so, or not yet.
    let left = RegionBooks { is_left: true, ..books };
    let distrust = |raw: &[u8]| crate::mark::distrusted(raw).expect("a superblock");
    assert_eq!(judge(&left, &mark), Ok(RegionVerdict::Left));
    assert_eq!(judge(&left, &count(OPENING.count - 1)), Ok(RegionVerdict::Left));
    for raw in [&distrust(&live), &distrust(&before), &distrust(&emptied(95, -5))] {
        assert_eq!(judge(&left, raw), Ok(RegionVerdict::OwesNothing));
        assert_eq!(judge(&books, raw), Err(RegionWhy::OtherEpoch), "the region does not know of it");
    }
    for (raw, why) in [
        (&count(OPENING.count - 2), RegionWhy::OlderImage),
        (&count(OPENING.count + 2), RegionWhy::OlderRegion),
        (&with_mark(Opening { number: [1; 16], ..OPENING }), RegionWhy::OtherRegion),
        (&distrust(&other), RegionWhy::OtherJournal),
        (&live, RegionWhy::OtherEpoch),
        (&before, RegionWhy::OtherEpoch),
    ] {
        assert_eq!(judge(&left, raw), Err(why));
    }
    // One that holds nothing gives way to another, unless storage means this one.
    for verdict in [Ok(RegionVerdict::OwesNothing), Err(RegionWhy::OtherRegion)] {
        assert!(nothing.yields(verdict) && !books.yields(verdict) && !left.yields(verdict), "{verdict:?}");
    }
    for verdict in [
        Ok(RegionVerdict::Marked),
        Ok(RegionVerdict::Left),
        Err(RegionWhy::OlderImage),
        Err(RegionWhy::OlderRegion),
        Err(RegionWhy::OtherEpoch),
    ] {
        assert!(!nothing.yields(verdict), "{verdict:?}");
    }
    // A region of an earlier amberlog, whose mark has no number.
    let plain = edited(&before, |edit| {
        edit.errno(jbd2::ERRNO_EIO);
    });
    let earlier = RegionBooks { mark_checksum: crc32c::crc32c(&plain[..jbd2::SUPERBLOCK_BYTES]), ..books };
    assert_eq!(judge(&earlier, &plain), Ok(RegionVerdict::Marked));
    assert_eq!(judge(&books, &plain), Err(RegionWhy::OtherEpoch));
}
