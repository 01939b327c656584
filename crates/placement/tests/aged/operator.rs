//! `amberlog flush` while durability by age is in force: it waits for no age.

use super::*;

/// Nothing becomes due by itself.
const LONG: Duration = Duration::from_secs(3600);
/// Of who asks for a flush; an age is longer.
const PATIENCE: Duration = Duration::from_secs(10);

impl Rig {
    /// The disk goes on while its operator waits for a flush. Gives how many blocks were owed.
    fn flush_by_operator(&mut self) -> u64 {
        let journals = Arc::clone(&self.journals);
        let asked = std::thread::spawn(move || journals.write_all_home(PATIENCE));
        while !asked.is_finished() {
            self.pass(0);
        }
        asked.join().expect("no panic").expect("all is home")
    }

    /// The image, but for the superblock of its journal, where a mark counts on.
    fn image_but_for_the_mark(&self) -> Vec<u8> {
        let mut image = std::fs::read(&self.image).expect("the image");
        image[self.log_at[0] as usize..][..BLOCK as usize].fill(0);
        image
    }
}

/// What is committed is durable when the flush is answered, however long the age, and all of it is home: what was in use, what was free, and
/// what the guest was told is home. From then on the image stands still until the guest writes again, so that it can be copied.
#[test]
fn what_is_flushed_is_durable_and_home_whatever_the_age() {
    for (within, is_absorbed) in [(LONG, false), (LONG, true), (Duration::ZERO, false)] {
        let case = format!("within {within:?}, absorbed: {is_absorbed}");
        let mut rig = Rig::new(Some(within));
        let image = std::fs::read(&rig.image).expect("the image");
        let mut allocation = extfs::Allocation::default();
        let free = (0..BLOCKS).rev().find(|block| allocation.is_free(&image, *block).expect("bitmaps")).expect("one");
        rig.open();
        rig.commit();
        rig.settle();
        let log = rig.transaction_with([free]);
        rig.write_log(&log, |_| true);
        rig.settle();
        let last = rig.committed;
        if is_absorbed {
            rig.write_homes();
            assert_eq!((rig.held, rig.waiting.len()), (0, 0), "{case}: they are answered at once");
        }
        let compounds = rig.compounds();
        assert_eq!(compounds > 0, within.is_zero(), "{case}: the age has not come");
        // While the disk does nothing, nothing is home, and nobody says so.
        let asked = rig.journals.write_all_home(Duration::from_millis(10));
        let error = asked.expect_err("nothing is home").to_string();
        assert!(error.contains("blocks are still owed"), "{case}: {error}");
        assert_eq!(rig.flush_by_operator(), 4, "{case}");
        rig.promise(last);
        assert_eq!(rig.compounds(), compounds.max(1), "{case}");
        for block in rig.homes.into_iter().chain([free]) {
            let mut stored = vec![0; BLOCK as usize];
            rig.file.read_exact_at(&mut stored, block * BLOCK).expect("read");
            assert!(stored == content(last), "{case}: block {block} is not home");
        }
        let flushed = rig.image_but_for_the_mark();
        (0..3).for_each(|_| rig.pass(1500));
        assert!(rig.image_but_for_the_mark() == flushed, "{case}: something is written behind it");
        assert!(rig.judge() > 40, "{case}");
    }
}
