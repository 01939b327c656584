//! A guest that waits to write to a page that is held, and there is no memory to copy it to: it goes to its own place.

use super::*;

#[test]
fn a_page_that_cannot_be_copied_goes_to_its_own_place_where_it_cannot_go_home() {
    let mut rig = Rig::new();
    rig.open();
    let transaction = Transaction { blocks: vec![(301, content(2)), (302, content(3))], ..Transaction::default() };
    let mut log = Vec::new();
    rig.builder.transaction(&transaction, &mut |position, block| log.push((position, block.to_vec())));
    // It is not committed, so that the host can write nothing of it home.
    let commit = log.pop().expect("a commit block");
    let pages: Vec<PageId> = log
        .iter()
        .map(|(position, block)| {
            let page = PageId(rig.next_page);
            let operations = rig.write(rig.log_at[*position as usize], block);
            assert!(operations.is_empty(), "the log is held");
            page
        })
        .collect();
    simulated_room::set_full(true);
    for page in &pages[1..] {
        assert!(!rig.memory.simulated_guest_tries(*page, 0, &[9; 8]), "there is no memory to copy it to");
    }
    let operations = rig.woken();
    assert!(operations.is_empty(), "nothing of it goes home: {operations:?}");
    for ((position, block), page) in log.iter().zip(&pages) {
        let mut stored = vec![0; BLOCK as usize];
        rig.file.read_exact_at(&mut stored, rig.log_at[*position as usize]).expect("read");
        // A control block, of which there is a copy from the first, would count there beside the mark.
        assert_eq!(stored == *block, jbd2::peek(block).is_none(), "log block {position}");
        assert!(rig.memory.simulated_guest_tries(*page, 0, &[9; 8]), "its writer goes on");
    }
    simulated_room::set_full(false);
    let operations = rig.write(rig.log_at[commit.0 as usize], &commit.1);
    assert!(operations.is_empty(), "the log is held");
    let (image, _) = rig.die_and_finish();
    assert_eq!([301, 302].map(|block| block_of(&image, block)), [content(2), content(3)]);
}
