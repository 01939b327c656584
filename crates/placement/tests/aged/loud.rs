//! How loudly it is said that a promise has ended.

use super::*;
use log::{Level, LevelFilter, Metadata, Record};
use std::cell::RefCell;

thread_local! {
    /// What this test's thread has said.
    static SAID: RefCell<Vec<(Level, String)>> = const { RefCell::new(Vec::new()) };
}

struct Lines;

impl log::Log for Lines {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &Record<'_>) {
        SAID.with_borrow_mut(|said| said.push((record.level(), record.args().to_string())));
    }

    fn flush(&self) {}
}

/// With no age every commit was told of as durable: that this is over is more than a warning.
#[test]
fn that_commits_are_not_durable_any_more_for_want_of_memory_is_an_error_with_no_age() {
    log::set_logger(&Lines).expect("the only one");
    log::set_max_level(LevelFilter::Warn);
    for (within, level) in [(AGE, Level::Warn), (Duration::ZERO, Level::Error)] {
        let mut rig = Rig::new(Some(within));
        rig.open();
        rig.commit();
        rig.settle();
        rig.pass(1500);
        assert!(is_aged(&rig), "it is in force");
        SAID.take();
        rig.commit_with(|_| false);
        rig.settle();
        let said = SAID.take();
        let ends: Vec<_> = said.iter().filter(|(_, line)| line.contains("s for now, and only held: ")).collect();
        assert_eq!(ends.iter().map(|(level, _)| *level).collect::<Vec<_>>(), [level], "{within:?}: {said:?}");
    }
}
