//! A bound on how many log lines a process says, for one whose guest can have it say them: each place of the program has its own, so that
//! one that is driven leaves room for all others, and for the other VMs' lines in the same journal.
//!
//! A place is a line of the source, for one disk. It says so many lines at once and then one now and then; what is left out is counted,
//! and said with the next line. Lines for whoever looks for a fault (debug, trace) are asked for, and not counted. Must never: keep a
//! line of another place from being said. Failure story: after the last line of a place that was driven, the number left out is said only
//! when the process says something again.

use log::{Level, Log, Metadata, Record};
use std::collections::HashMap;
use std::collections::hash_map::{DefaultHasher, Entry};
use std::fmt::Arguments;
use std::hash::{Hash, Hasher};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Lines of a place at once.
const AT_ONCE: u32 = 20;
/// Then one in this time.
const EVERY: Duration = Duration::from_secs(10);
/// Bytes of a line that is told as an example of those that were left out.
const EXAMPLE_BYTES_MAX: usize = 200;
/// Places that are looked after: a program has some hundred, and a VM some disks.
const PLACES_MAX: usize = 4096;

/// Passes on to another log what is not too much.
pub(crate) struct Limited<L> {
    lines: L,
    places: Mutex<Places>,
}

/// What is known of all places.
#[derive(Default)]
struct Places(HashMap<u64, Place>);

struct Place {
    /// Lines that it may say now.
    room: u32,
    /// When it got the last of them.
    since: Instant,
    left_out: Option<LeftOut>,
}

/// Lines that were not said.
struct LeftOut {
    count: u64,
    level: Level,
    target: String,
    example: String,
}

impl LeftOut {
    fn say(&self, lines: &dyn Log) {
        let LeftOut { count, level, target, example } = self;
        say(lines, *level, target, format_args!("{count} more lines like this were left out: {example}"));
    }
}

fn say(lines: &dyn Log, level: Level, target: &str, words: Arguments<'_>) {
    lines.log(&Record::builder().level(level).target(target).args(words).build());
}

impl Place {
    fn new(now: Instant) -> Self {
        Place { room: AT_ONCE, since: now, left_out: None }
    }

    fn gain(&mut self, now: Instant) {
        let gained = now.saturating_duration_since(self.since).as_secs() / EVERY.as_secs();
        if gained > 0 {
            self.since = now;
            self.room = self.room.saturating_add(u32::try_from(gained).unwrap_or(AT_ONCE)).min(AT_ONCE);
        }
    }

    fn is_idle(&self) -> bool {
        self.room == AT_ONCE && self.left_out.is_none()
    }
}

impl Places {
    /// Whether a line of this place is said; and what was left out and may be told by now, of whichever place.
    fn hear(&mut self, record: &Record<'_>, now: Instant) -> (bool, Vec<LeftOut>) {
        let number = number_of(record);
        let mut told = Vec::new();
        for place in self.0.values_mut() {
            place.gain(now);
            // It counts as a line of its place.
            if place.room > 0
                && let Some(left_out) = place.left_out.take()
            {
                place.room -= 1;
                told.push(left_out);
            }
        }
        if self.0.len() >= PLACES_MAX {
            self.0.retain(|_, place| !place.is_idle());
        }
        let is_full = self.0.len() >= PLACES_MAX;
        let place = match self.0.entry(number) {
            Entry::Occupied(place) => place.into_mut(),
            // Never so many: but it is said rather than not.
            Entry::Vacant(_) if is_full => return (true, told),
            Entry::Vacant(place) => place.insert(Place::new(now)),
        };
        if place.room > 0 {
            place.room -= 1;
            return (true, told);
        }
        match &mut place.left_out {
            Some(left_out) => left_out.count += 1,
            None => place.left_out = Some(left_out(record)),
        }
        (false, told)
    }
}

/// The place that a line is of.
fn number_of(record: &Record<'_>) -> u64 {
    let mut hasher = DefaultHasher::new();
    (record.level(), record.target(), record.file(), record.line()).hash(&mut hasher);
    log_context::Context::current().names().hash(&mut hasher);
    hasher.finish()
}

fn left_out(record: &Record<'_>) -> LeftOut {
    let mut example = record.args().to_string();
    if example.len() > EXAMPLE_BYTES_MAX {
        let end = (0..=EXAMPLE_BYTES_MAX).rev().find(|at| example.is_char_boundary(*at));
        example.truncate(end.unwrap_or_default());
        example.push('…');
    }
    LeftOut { count: 1, level: record.level(), target: record.target().to_owned(), example }
}

impl<L: Log> Limited<L> {
    pub(crate) fn new(lines: L) -> Self {
        Limited { lines, places: Mutex::default() }
    }

    fn log_at(&self, record: &Record<'_>, now: Instant) {
        if record.level() > Level::Info {
            return self.lines.log(record);
        }
        // A thread that has panicked has left nothing half done there.
        let heard = self.places.lock().unwrap_or_else(std::sync::PoisonError::into_inner).hear(record, now);
        let (is_said, told) = heard;
        told.iter().for_each(|left_out| left_out.say(&self.lines));
        if is_said {
            self.lines.log(record);
        }
    }
}

impl<L: Log> Log for Limited<L> {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        self.lines.enabled(metadata)
    }

    fn log(&self, record: &Record<'_>) {
        // What nobody wants to see is not counted.
        if self.enabled(record.metadata()) {
            self.log_at(record, Instant::now());
        }
    }

    fn flush(&self) {
        self.lines.flush();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Default)]
    struct Sink(Mutex<Vec<String>>);

    impl Log for Sink {
        fn enabled(&self, _: &Metadata<'_>) -> bool {
            true
        }

        fn log(&self, record: &Record<'_>) {
            self.0.lock().expect("no panic under this lock").push(format!("{} {}", record.level(), record.args()));
        }

        fn flush(&self) {}
    }

    fn line(limited: &Limited<Sink>, level: Level, number: u32, words: Arguments<'_>, now: Instant) {
        let record =
            Record::builder().level(level).target("x").file(Some("x.rs")).line(Some(number)).args(words).build();
        limited.log_at(&record, now);
    }

    fn said(limited: &Limited<Sink>) -> Vec<String> {
        std::mem::take(&mut limited.lines.0.lock().expect("no panic under this lock"))
    }

    /// A guest writes its superblock as fast as it can, for 100 seconds.
    #[test]
    fn a_place_that_is_driven_says_little_and_keeps_no_other_one_from_it() {
        let limited = Limited::new(Sink::default());
        let start = Instant::now();
        for number in 0..10_000u32 {
            let now = start + Duration::from_millis(10) * number;
            line(&limited, Level::Info, 1, format_args!("file system {number} is left alone"), now);
        }
        let driven = said(&limited);
        assert!((20..=50).contains(&driven.len()), "{} lines", driven.len());
        // Another place says its lines, and what was left out at last.
        let later = start + Duration::from_secs(200);
        line(&limited, Level::Error, 2, format_args!("storage is broken"), later);
        let after = said(&limited);
        assert_eq!(after.len(), 2, "{after:?}");
        assert_eq!(after[1], "ERROR storage is broken");
        let left_out = |text: &String| {
            let (count, example) = text.strip_prefix("INFO ")?.split_once(" more lines like this were left out: ")?;
            assert!(example.contains("is left alone"), "{text}");
            count.parse::<usize>().ok()
        };
        let all = driven.iter().chain(&after);
        let lines = all.clone().filter(|text| text.contains("is left alone") && left_out(text).is_none()).count();
        assert_eq!(lines + all.filter_map(left_out).sum::<usize>(), 10_000, "each is said or counted");
    }

    #[test]
    fn another_place_another_disk_and_a_line_for_who_looks_for_a_fault_are_said() {
        let limited = Limited::new(Sink::default());
        let now = Instant::now();
        for _ in 0..1000 {
            line(&limited, Level::Warn, 1, format_args!("a ring is broken"), now);
        }
        assert_eq!(said(&limited).len(), AT_ONCE as usize);
        line(&limited, Level::Warn, 2, format_args!("another"), now);
        {
            let _entered = log_context::enter(log_context::Context::vm("db").with_disk("root"));
            line(&limited, Level::Warn, 1, format_args!("a ring is broken"), now);
        }
        line(&limited, Level::Debug, 1, format_args!("what was in it"), now);
        assert_eq!(said(&limited), ["WARN another", "WARN a ring is broken", "DEBUG what was in it"]);
    }

    #[test]
    fn a_long_line_is_told_in_part() {
        let limited = Limited::new(Sink::default());
        let start = Instant::now();
        let long = "\u{fc}".repeat(10_000);
        for _ in 0..=AT_ONCE {
            line(&limited, Level::Info, 1, format_args!("x{long}"), start);
        }
        said(&limited);
        line(&limited, Level::Info, 2, format_args!("y"), start + EVERY);
        assert!(said(&limited)[0].len() < 300);
    }
}
