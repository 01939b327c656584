//! Blocks of the sizes that file systems have, changed anywhere: what is in the region is what was put, and so is its
//! checksum. (The other tests take the smallest blocks, for the sake of many steps.)

use nvm_journal::medium::{Medium, SimulatedMedium};
use nvm_journal::{ATTACHMENT_BYTES, Found, Journal, JournalOptions, Owner};
use proptest::prelude::*;

/// Versions put, one transaction each.
const VERSIONS: usize = 6;

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn versions_that_differ_anywhere_keep_their_checksums(
        block_bytes in prop::sample::select(vec![1024usize, 4096, 65536]),
        changes in prop::collection::vec(
            prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 1usize..200), 0..10),
            VERSIONS,
        ),
    ) {
        let owner = Owner {
            file_system: [1; 16],
            journal: [2; 16],
            home_start: 0,
            home_blocks: 100,
            mark_checksum: 5,
            is_left: false,
            attachment: [9; ATTACHMENT_BYTES],
        };
        let medium = SimulatedMedium::new(32 * 1024 + 16 * (block_bytes + 64));
        let mut journal =
            Journal::claim(medium, 0, block_bytes as u32, &owner, 0, JournalOptions::default()).expect("a free region");
        let mut content: Vec<u8> = (0..block_bytes).map(|at| (at / 7) as u8).collect();
        for changes in changes {
            for (at, value, length) in changes {
                let at = at.index(block_bytes);
                let end = block_bytes.min(at + length);
                content[at..end].fill(value);
            }
            journal.put(9, &content).expect("room");
            journal.publish().expect("the medium works");
            let region = journal.medium().bytes();
            let found = Found::read(region).expect("whole").expect("a region");
            found.verify(region).expect("checksums are those of what is there");
            prop_assert_eq!(found.content(region, &found.latest[&9]), &content[..]);
        }
        prop_assert!(journal.counters().blocks_updated > 0);
    }
}
