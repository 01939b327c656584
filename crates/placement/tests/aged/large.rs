//! A log that owes more than is read into memory at a time.

use super::*;
use std::ops::Range;

const LONG: Duration = Duration::from_secs(3600);
const LOG_MIB: u64 = 64;
/// 32 MiB and some more, at the end of the file system.
const MANY: Range<u64> = BLOCKS + (LOG_MIB - 4) * 512 - 9100..BLOCKS + (LOG_MIB - 4) * 512 - 100;

/// It becomes durable in parts, of which none has a number that a kernel would give after a loss of power before all of them count; and the recovery that
/// makes all of it one transaction brings all of it home.
#[test]
fn what_is_more_than_is_read_at_once_becomes_durable() {
    let mut rig = Rig::with_log(0, None, LOG_MIB);
    assert!(!rig.log_at.iter().any(|at| MANY.contains(&(at / BLOCK))));
    rig.gives_up();
    rig.open();
    let log = rig.transaction_with(MANY);
    rig.request_log(&log);
    rig.settle();
    rig.journals.set_durable_within(0, Some(LONG)).expect("possible");
    rig.wake(0);
    let mut looked = 0;
    while !rig.waiting.is_empty() {
        if rig.waiting[0].operation == Operation::Flush && !is_aged(&rig) {
            let from = said(&rig).sequence;
            assert_eq!(numbers_from(&rig, from), [0; 0]);
            looked += 1;
        }
        rig.settle_one();
    }
    assert!(is_aged(&rig) && looked >= 4, "{looked} flushes");
    assert_eq!((rig.compounds(), rig.within_s()), (2, Some(LONG.as_secs())));
    expect_recovered(&rig);
    let version = content(rig.committed);
    let mut stored = vec![0; BLOCK as usize];
    for block in MANY {
        rig.file.read_exact_at(&mut stored, block * BLOCK).expect("read");
        assert!(stored == version, "block {block}");
    }
}
