//! What `durable-within` was asked for, held against what is in force: for `status`, and for `amberlog placement`, which waits until it is so.
//!
//! Must never: call in force what promises less than was asked for. Failure story: what is not seen to be in force is said not to be, with the
//! reason that the journal's keeper gives.

use placement::{DiskReport, Journals, VmReport};
use std::io;
use std::sync::Mutex;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

/// It is as it was asked for.
pub const DONE: &str = "done";
/// It is when its file system is mounted again.
pub const AT_NEXT_MOUNT: &str = "from the next mount on";

/// What was in force for so long without a break has come into force.
const CALM: Duration = Duration::from_secs(60);

/// How often it is looked at while somebody waits, perhaps for hours.
const PAUSE: Duration = Duration::from_millis(100);

/// What is in force on a disk.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct InForce {
    /// How old what is committed may be before it is durable, in seconds.
    within_s: Option<u64>,
    /// Something has begun, and not ended.
    has_begun: bool,
    /// Why it is not as asked.
    reason: Option<String>,
    /// A journal is held. One that is on storage its guest itself makes durable.
    is_held: bool,
}

impl From<&DiskReport> for InForce {
    fn from(disk: &DiskReport) -> Self {
        let Some(durability) = &disk.durability else { return InForce::default() };
        InForce {
            within_s: durability.within_s,
            has_begun: durability.has_begun,
            reason: durability.reason.clone(),
            is_held: durability.is_held,
        }
    }
}

/// How it stands to what was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stand {
    /// It is so, or better.
    AsAsked,
    /// No journal is held at this moment: there is nothing to promise.
    NotInUse,
    /// It is another one, or none; less is promised where that `falls_short`.
    Other { falls_short: bool },
}

impl InForce {
    fn stand(&self, asked: Option<Duration>) -> Stand {
        match (asked.map(|asked| asked.as_secs()), self.within_s) {
            (None, None) if !self.has_begun => Stand::AsAsked,
            (None, _) => Stand::Other { falls_short: false },
            (Some(asked), Some(within)) if within == asked => Stand::AsAsked,
            // Its bitmaps are not understood, and every commit is durable at once.
            (Some(asked), Some(within)) if within < asked && self.reason.is_some() => Stand::AsAsked,
            (Some(asked), Some(within)) => Stand::Other { falls_short: within > asked },
            (Some(_), None) if !self.is_held => Stand::NotInUse,
            // Whether or not somebody knows why.
            (Some(_), None) => Stand::Other { falls_short: true },
        }
    }

    /// Why it is another one than was asked for.
    fn why(&self) -> String {
        match (&self.reason, self.within_s) {
            (Some(reason), _) => reason.clone(),
            (None, Some(within)) => format!("{within} s are in force, until all that they allowed is durable"),
            (None, None) => "what was in force has not ended yet".to_owned(),
        }
    }
}

/// Waits until what was asked for is in force. Gives a sentence about when that is so. `patience` ends at `deadline`.
///
/// # Errors
/// When that takes longer; and what `look` gives as an error.
pub(super) fn wait(
    disk: &str,
    asked: Option<Duration>,
    (patience, deadline): (Duration, Instant),
    mut look: impl FnMut() -> anyhow::Result<InForce>,
) -> anyhow::Result<&'static str> {
    loop {
        let is_last = Instant::now() >= deadline;
        let in_force = look()?;
        match in_force.stand(asked) {
            Stand::AsAsked => return Ok(DONE),
            Stand::NotInUse => return Ok(AT_NEXT_MOUNT),
            Stand::Other { .. } => {}
        }
        anyhow::ensure!(
            !is_last,
            "disk {disk}: durable-within={} is wished from now on, and is not in force in {} s: {}; it will be as soon as that is over \
             (durability in status)",
            asked.map_or_else(|| "never".to_owned(), |asked| asked.as_secs().to_string()),
            patience.as_secs(),
            in_force.why()
        );
        std::thread::sleep(PAUSE);
    }
}

/// Where less is promised than was asked for, disk by disk.
#[derive(Debug, Default)]
pub(super) struct Shortfalls(Mutex<Vec<Option<Shortfall>>>);

/// Less is promised than was asked for, or was so a moment ago: what comes and goes is one shortfall, and not many that are short.
#[derive(Clone, Copy, Debug)]
struct Shortfall {
    since: Instant,
    /// When it was seen last.
    last: Instant,
    is_now: bool,
}

impl Shortfall {
    /// What becomes of it, where it is seen now that less is promised, or not; nothing where there is nothing to promise.
    fn after(before: Option<Self>, falls_short: Option<bool>, now: Instant) -> Option<Self> {
        if falls_short? {
            let since = before.map_or(now, |before| before.since);
            return Some(Shortfall { since, last: now, is_now: true });
        }
        let before = before.filter(|before| now.saturating_duration_since(before.last) < CALM)?;
        Some(Shortfall { is_now: false, ..before })
    }

    /// For how long. One that was short is over as soon as it is in force.
    fn lasts(&self, now: Instant) -> Option<Duration> {
        let was_long = self.last.saturating_duration_since(self.since) >= CALM;
        (self.is_now || was_long).then(|| now.saturating_duration_since(self.since))
    }
}

impl Shortfalls {
    /// Looks at the disks of a VM. Gives for how long each has fallen short, where it does.
    pub(super) fn look(&self, journals: &Journals, report: &VmReport) -> Vec<Option<Duration>> {
        let falls_short = report.disks.iter().enumerate().map(|(index, disk)| {
            let asked = journals.disk(index).durable_within()?;
            match InForce::from(disk).stand(Some(asked)) {
                Stand::NotInUse => None,
                stand => Some(stand == Stand::Other { falls_short: true }),
            }
        });
        self.note(falls_short, Instant::now())
    }

    fn note(&self, falls_short: impl Iterator<Item = Option<bool>>, now: Instant) -> Vec<Option<Duration>> {
        let mut all = self.0.lock().expect("no panic under this lock");
        let before = all.clone().into_iter().chain(std::iter::repeat(None));
        *all =
            falls_short.zip(before).map(|(falls_short, before)| Shortfall::after(before, falls_short, now)).collect();
        all.iter().map(|shortfall| shortfall.and_then(|shortfall| shortfall.lasts(now))).collect()
    }
}

/// Looks now and then, on a thread of its own, until it is dropped. A look waits for whoever writes to storage with a journal's lock in hand, for
/// hours where storage hangs; who waits for a VMM to end does not wait for that, and drops this without waiting either.
pub(super) struct Watch {
    _until_dropped: Sender<()>,
}

impl Watch {
    /// # Errors
    /// When there can be no thread.
    pub(super) fn begin(every: Duration, mut look: impl FnMut() + Send + 'static) -> io::Result<Self> {
        let (sender, dropped) = channel();
        log_context::spawn(std::thread::Builder::new().name("promises".to_owned()), move || {
            while dropped.recv_timeout(every) == Err(RecvTimeoutError::Timeout) {
                look();
            }
        })?;
        Ok(Watch { _until_dropped: sender })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn in_force(within_s: Option<u64>, reason: Option<&str>) -> InForce {
        InForce { within_s, reason: reason.map(str::to_owned), is_held: true, ..InForce::default() }
    }

    fn seconds(seconds: u64) -> Option<Duration> {
        Some(Duration::from_secs(seconds))
    }

    #[test]
    fn what_promises_less_than_was_asked_for_falls_short() {
        let other = |falls_short| Stand::Other { falls_short };
        let on_storage = InForce { is_held: false, ..in_force(None, Some("it was brought")) };
        let unmounted = InForce { is_held: false, ..in_force(None, None) };
        let ends = InForce { has_begun: true, ..in_force(None, None) };
        let age = InForce { has_begun: true, ..in_force(Some(5), None) };
        for (asked, in_force, stand) in [
            (None, in_force(None, None), Stand::AsAsked),
            (None, unmounted.clone(), Stand::AsAsked),
            (None, in_force(None, Some("storage has failed")), Stand::AsAsked),
            (None, age, other(false)),
            (None, ends.clone(), other(false)),
            (seconds(5), in_force(Some(5), None), Stand::AsAsked),
            (seconds(5), in_force(Some(0), Some("its bitmaps are not understood")), Stand::AsAsked),
            (seconds(5), in_force(Some(0), None), other(false)),
            (seconds(0), in_force(Some(5), None), other(true)),
            (seconds(5), in_force(None, Some("not yet")), other(true)),
            (seconds(0), ends, other(true)),
            (seconds(5), in_force(None, None), other(true)),
            (seconds(5), unmounted, Stand::NotInUse),
            (seconds(5), on_storage, Stand::NotInUse),
        ] {
            assert_eq!(in_force.stand(asked), stand, "{asked:?}: {in_force:?}");
        }
    }

    /// Asks for 0 while another age is in force, as long as `looks` looks see it.
    fn waited(looks: u32, patience: Duration, then: InForce) -> anyhow::Result<&'static str> {
        let mut seen = 0;
        wait("disk0", seconds(0), (patience, Instant::now() + patience), || {
            seen += 1;
            Ok(if seen > looks { then.clone() } else { in_force(Some(5), None) })
        })
    }

    #[test]
    fn a_change_is_done_when_it_is_in_force() {
        let long = Duration::from_secs(600);
        assert_eq!(waited(3, long, in_force(Some(0), None)).expect("it comes"), "done");
        assert_eq!(waited(3, long, InForce::default()).expect("it was unmounted"), "from the next mount on");
        let late = |then: InForce| format!("{:#}", waited(0, Duration::ZERO, then).expect_err("it does not come"));
        let said = late(in_force(Some(5), None));
        assert!(
            said.contains("durable-within=0 is wished from now on, and is not in force in 0 s: 5 s are in force"),
            "{said}"
        );
        let said = late(in_force(None, Some("tmpfs is full")));
        assert!(said.contains("in 0 s: tmpfs is full; it will be"), "{said}");
        // Who has no patience is told what is so all the same.
        assert_eq!(waited(0, Duration::ZERO, in_force(Some(0), None)).expect("it is so"), "done");
    }

    /// Looks at two disks, the second of which falls short after so many seconds, or does not, or has nothing to promise. Gives for how long it has.
    fn looks(of: &[(u64, Option<bool>)]) -> Vec<Option<u64>> {
        let (shortfalls, begun) = (Shortfalls::default(), Instant::now());
        let look = |(after_s, falls_short): &(u64, Option<bool>)| {
            let disks = [Some(false), *falls_short].into_iter();
            let looks = shortfalls.note(disks, begun + Duration::from_secs(*after_s));
            assert_eq!((looks.len(), looks[0]), (2, None));
            looks[1].map(|time| time.as_secs())
        };
        of.iter().map(look).collect()
    }

    #[test]
    fn how_long_it_has_fallen_short_is_counted_from_the_first_look() {
        let (short, well) = (Some(true), Some(false));
        assert_eq!(looks(&[(0, well), (9, short), (79, short)]), [None, Some(0), Some(70)]);
        // A change that takes a moment is over with it.
        let change = [(0, short), (3, short), (4, well), (63, well), (70, short)];
        assert_eq!(looks(&change), [Some(0), Some(3), None, None, Some(0)]);
        // It is wished away, or unmounted.
        assert_eq!(looks(&[(0, short), (80, short), (81, None), (82, short)]), [Some(0), Some(80), None, Some(0)]);
    }

    #[test]
    fn what_comes_and_goes_is_one_shortfall_until_it_is_in_force_for_a_minute() {
        let (short, well) = (Some(true), Some(false));
        let flaps =
            [(0, short), (40, well), (50, short), (80, well), (90, short), (149, well), (150, well), (151, short)];
        let counted = [Some(0), None, Some(50), None, Some(90), Some(149), None, Some(0)];
        assert_eq!(looks(&flaps), counted);
    }

    /// As where storage hangs.
    #[test]
    fn nobody_waits_for_a_look_at_promises() {
        let long = Duration::from_secs(20);
        let (looks, looked) = channel();
        let (storage, answers) = channel::<()>();
        let watch = Watch::begin(PAUSE, move || {
            let _ = looks.send(());
            let _ = answers.recv();
        });
        let watch = watch.expect("a thread");
        looked.recv_timeout(long).expect("it looks");
        let (ends, ended) = channel();
        std::thread::spawn(move || {
            drop(watch);
            ends.send(()).expect("somebody listens");
        });
        ended.recv_timeout(long).expect("it is dropped while a look hangs");
        drop(storage);
        assert_eq!(looked.recv_timeout(long), Err(RecvTimeoutError::Disconnected), "it was the last look");
    }
}
