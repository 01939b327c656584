//! Pages of the guest's that hold what is made durable by age.

use super::*;

/// Nothing becomes due by itself.
const LONG: Duration = Duration::from_secs(3600);
/// So many transactions fill the log of 4 MiB more than once.
const FILLING: u8 = 14;

/// A write of the host waits until what it is to bring home is durable. It takes that from the page that holds it, which is the guest's
/// to change as soon as somebody has copied it: then the write brings something else, and the copy in the log on storage is all there is.
#[test]
fn a_page_that_changes_under_a_write_of_the_hosts_is_not_at_home() {
    for is_under_way in [false, true] {
        let mut rig = Rig::with_placement(0, Some(LONG), 4, PlacementKind::Retain);
        rig.journals.area.set_hot_pages(HotPages::Never);
        let others = blocks_in_use(&std::fs::read(&rig.image).expect("the image"), &rig.log_at);
        let others: Vec<u64> = others.into_iter().filter(|block| !rig.homes.contains(block)).take(100).collect();
        rig.open();
        let mut pages = Vec::new();
        for (position, block) in rig.transaction() {
            // As a request of one page takes it.
            let page = PageId((rig.next + 1) % PAGES);
            if block == content(1) {
                assert!(!rig.memory.simulated_is_protected(page));
                pages.push(page);
            }
            rig.request_log(&[(position, block)]);
        }
        assert!(
            pages.len() == 3 && pages.iter().all(|page| rig.memory.simulated_is_protected(*page)),
            "they are retained"
        );
        // Who asks for it loses patience while it waits.
        let journals = Arc::clone(&rig.journals);
        let asked = std::thread::spawn(move || journals.write_home(Duration::from_millis(100)));
        while rig.waiting.is_empty() {
            rig.wake(0);
        }
        asked.join().expect("no panic").expect_err("nothing is home yet");
        let is_home = |operation: &DiskOperation, homes: &Homes| {
            operation.operation == Operation::Write && homes.contains(&(operation.offset / BLOCK))
        };
        if is_under_way {
            while !rig.waiting.iter().any(|operation| is_home(operation, &rig.homes)) {
                rig.settle_one();
            }
        }
        for (version, page) in (200..).zip(&pages) {
            rig.memory.simulated_guest_write(*page, 0, &content(version));
        }
        rig.settle();
        assert_eq!(rig.compounds(), 1);
        rig.promise(1);
        for version in 0..FILLING {
            rig.commit_of(&others.iter().map(|block| (*block, content(100 + version))).collect::<Vec<_>>());
            rig.pass(LONG.as_millis() as u64);
        }
        assert!(rig.compounds() > 3, "the log on storage was filled: {}", rig.compounds());
        assert!(rig.judge() > 20);
    }
}
