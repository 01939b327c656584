//! A log that owes more than is read into memory at a time.

use super::*;
use std::ops::Range;

const LONG: Duration = Duration::from_secs(3600);
const LOG_MIB: u64 = 64;
/// 32 MiB and some more, at the end of the file system.
const MANY: Range<u64> = BLOCKS + (LOG_MIB - 4) * 512 - 9100..BLOCKS + (LOG_MIB - 4) * 512 - 100;

/// Its guest has committed more than is read at once, and durability is to begin.
fn begins(within: Duration) -> Rig {
    let mut rig = Rig::with_log(0, None, LOG_MIB);
    assert!(!rig.log_at.iter().any(|at| MANY.contains(&(at / BLOCK))));
    rig.gives_up();
    rig.open();
    let log = rig.transaction_with(MANY);
    rig.request_log(&log);
    rig.settle();
    rig.journals.set_durable_within(0, Some(within)).expect("possible");
    rig.wake(0);
    rig
}

fn expect_many(file: &File, version: u8) {
    let (version, mut stored) = (content(version), vec![0; BLOCK as usize]);
    for block in MANY {
        file.read_exact_at(&mut stored, block * BLOCK).expect("read");
        assert!(stored == version, "block {block}");
    }
}

/// It becomes durable in parts, of which none has a number that a kernel would give after a loss of power before all of them count; and the recovery that
/// makes all of it one transaction brings all of it home. Who commits meanwhile is answered as the age says, without waiting for all of them; with no age
/// when it is durable.
#[test]
fn what_is_more_than_is_read_at_once_becomes_durable() {
    for within in [LONG, Duration::ZERO] {
        let mut rig = begins(within);
        let (mut looked, mut first) = (0, 0);
        while !rig.waiting.is_empty() {
            if rig.waiting[0].operation == Operation::Flush && !is_aged(&rig) {
                let from = said(&rig).sequence;
                assert_eq!(numbers_from(&rig, from), [0; 0]);
                looked += 1;
                if looked == 1 {
                    first = rig.told.len();
                    rig.commit();
                    assert_eq!(rig.told.len() > first, !within.is_zero(), "{within:?}");
                }
            }
            assert!(!within.is_zero() || rig.told.len() == first || rig.within_s() == Some(0), "it is told too early");
            rig.settle_one();
        }
        assert!(is_aged(&rig) && looked >= 4, "{looked} flushes");
        assert!(rig.told.len() > first && rig.told.iter().all(|(_, status)| *status == Status::Ok));
        assert_eq!((rig.compounds(), rig.within_s()), (2, Some(within.as_secs())));
        expect_recovered(&rig);
        expect_many(&rig.file, rig.committed - 1);
    }
}

/// Whoever serves its guest dies while the parts are made, at any moment. Their numbers are ahead of the guest's, and none of them counts: storage has the
/// error mark still. So a recovery goes by what is held, and leaves none of them that a kernel would take for its guest's next transaction; and a worker that
/// goes on begins anew, behind their numbers.
#[test]
fn parts_count_for_nothing_before_all_of_them_are_durable() {
    for is_followed in [false, true] {
        for flushes in 0.. {
            let mut rig = begins(LONG);
            let mut seen = 0;
            while seen < flushes && !is_aged(&rig) {
                seen += u32::from(rig.waiting[0].operation == Operation::Flush);
                rig.settle_one();
            }
            if is_aged(&rig) {
                assert!(flushes > 3, "{flushes}");
                break;
            }
            let next = rig.builder.sequence;
            assert!(said(&rig).errno != 0);
            if flushes > 2 {
                assert!(!numbers_from(&rig, next + 1).is_empty(), "they are ahead of its guest");
            }
            // With what it had sent, or without.
            if flushes % 2 == 0 {
                rig.waiting.retain(|operation| operation.operation == Operation::Write);
                for operation in std::mem::take(&mut rig.waiting) {
                    rig.write_down(&operation);
                }
            }
            (rig.waiting, rig.held) = (Vec::new(), 0);
            if is_aged(&rig) {
                // That was the last step.
                continue;
            }
            if is_followed {
                rig.follow(Some(LONG)).expect("another one goes on");
                rig.wake(0);
                assert_eq!((rig.within_s(), said(&rig).errno != 0), (None, true), "it begins anew");
                rig.settle();
                assert!(is_aged(&rig) && rig.within_s().is_some());
                expect_recovered(&rig);
                assert_eq!(numbers_from(&rig, next + 1), [0; 0], "after {flushes} flushes");
                expect_many(&rig.file, rig.committed);
                continue;
            }
            let area = rig.journals.directory().path().to_owned();
            let Rig { directory, image, file, journals, route, log_at, homes, committed, .. } = rig;
            drop((route, journals));
            let found = AreaDirectory::take_over(&area, &directory.path().join("registry")).expect("nobody has it");
            let finished = placement::finish_directory(&found, std::slice::from_ref(&image))
                .and_then(placement::Finish::into_result)
                .expect("finished");
            assert_eq!(finished.len(), 1);
            // Kernels that mount it begin behind the next number, and one that was suspended has that already.
            assert_eq!(numbers_in((&file, &log_at), next + 1), [0; 0], "after {flushes} flushes");
            let bytes = std::fs::read(&image).expect("the image");
            assert_eq!(state(&Image::of(&bytes), (&log_at, &homes), committed, false), Ok(committed));
            expect_many(&file, committed);
        }
    }
}
