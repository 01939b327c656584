//! The clocks and constants of a run that is smaller than the papers', as a part of what they are.
//!
//! A load of a tenth of the size, on a drive that takes its time, is over in a tenth of the time; a commit interval of five seconds, or dirty
//! pages that expire after thirty, are then ten times as long as they were. In a run with a *declared* scale all of them are
//! scaled with the load: commit interval, the kernel's flusher, what may be dirty, the page cache, the drive's cache and its
//! patience, journal and region. What cannot be scaled further is refused, not left as it is: jbd2's interval is whole seconds.

use crate::error::{Error, Result};
use crate::fields::grouped;
use crate::measured::Parameters;

/// ext3's commit interval, in seconds.
const COMMIT_SECONDS: f64 = 5.0;
/// The kernel's flusher, in hundredths of a second: when a page is old, and how often it looks.
const DIRTY_EXPIRE_CS: f64 = 3000.0;
const DIRTY_WRITEBACK_CS: f64 = 500.0;
/// The papers' guests: their memory, in MiB, where an experiment says nothing else, and the parts of it that may be dirty, in per cent,
/// as kernels have them since 2.6.30, where it says nothing else.
const PAPERS_GUEST_MIB: f64 = 128.0;
const DIRTY_PERCENT: (u32, u32) = (10, 20);
/// Below this a guest's kernel has no room for its page cache, and reads its programs again and again.
const AVAILABLE_MIB_MIN: f64 = 48.0;

/// A commit interval of a run with these clocks, in whole seconds.
pub fn commit_seconds(full: u64, clocks: f64) -> u64 {
    ((full as f64 * clocks).round() as u64).max(1)
}

/// The part of their clocks that loads of this scale have on a drive so many times slower: what their length is of the full one's.
///
/// # Errors
/// When the kernel's commit interval cannot be as short.
pub fn declared(scale: f64, time_scale: f64) -> Result<f64> {
    let clocks = (scale * time_scale).min(1.0);
    if COMMIT_SECONDS * clocks < 1.0 - 1e-9 {
        return Err(Error::Told(format!(
            "at scale {scale} on a drive {time_scale} times slower the commit interval would be {:.1} s, and a kernel has whole \
             seconds; take --time-scale {:.0} or more, a larger --scale, or --clocks 1, with which times mean little",
            COMMIT_SECONDS * clocks,
            (1.0 / (COMMIT_SECONDS * scale)).ceil()
        )));
    }
    // To what whole seconds allow, so that every clock has the same part.
    Ok((COMMIT_SECONDS * clocks).round() / COMMIT_SECONDS)
}

/// The drive's slowness that a scale needs at least for its clocks.
pub fn time_scale_for(scale: f64) -> f64 {
    if scale >= 1.0 { 1.0 } else { (1.0 / (COMMIT_SECONDS * scale)).max(1.0) }
}

impl Parameters {
    /// These with constants (caches, memory, what may be dirty) that are a part of what they are. It is said only where clocks do not say it already.
    #[must_use]
    pub fn with_constants(mut self, part: f64) -> Self {
        self.constants = None;
        self.constants = (self.constants() != part).then_some(part);
        self
    }

    /// The part of what they are that constants have.
    pub fn constants(&self) -> f64 {
        let as_clocks = if self.scale < 1.0 && self.clocks != 1.0 { self.scale } else { 1.0 };
        self.constants.unwrap_or(as_clocks)
    }

    /// Whether constants are scaled with the sizes.
    pub fn has_scaled_constants(&self) -> bool {
        self.constants() < 1.0
    }

    /// Whether sizes, clocks and constants are the papers' own.
    pub fn is_full(&self) -> bool {
        self.scale == 1.0 && self.clocks == 1.0 && self.constants() == 1.0
    }

    /// Whether all clocks and constants are scaled with the sizes, as they have to be on this drive. That clocks are another part than
    /// one does not say so, nor that they are one that they are not: a load of half the size on a drive twice as slow lasts as long.
    pub fn is_declared(&self) -> bool {
        let has_its_clocks =
            || declared(self.scale, self.time_scale).is_ok_and(|part| (part - self.clocks).abs() < 1e-9);
        self.scale < 1.0 && self.constants() == self.scale && has_its_clocks()
    }

    /// The part of its own clocks that the modelled drive has. The model's time is slowed as a whole already, and what is to be a
    /// part of the run's length as it was must not be slowed twice.
    pub fn drive_clocks(&self) -> f64 {
        if self.has_scaled_constants() { (self.clocks / self.time_scale).min(1.0) } else { 1.0 }
    }

    /// In words: how fast the modelled drive is.
    pub fn drive_in_words(&self) -> String {
        match self.time_scale {
            1.0 => "a drive as fast as it was".to_owned(),
            scale if scale < 1.0 => format!("a drive {} times faster", grouped(1.0 / scale)),
            scale => format!("a drive {scale} times slower"),
        }
    }

    /// In words: what is scaled, and what is not.
    pub fn scale_in_words(&self) -> String {
        let drive = self.drive_in_words();
        if self.is_full() {
            return format!("the papers' sizes, clocks and constants; {drive}");
        }
        let word = if self.is_declared() { "a declared scale" } else { "no declared scale" };
        let clocks = match self.clocks {
            1.0 if self.is_declared() => "clocks as they were, since a run lasts as long".to_owned(),
            1.0 => "clocks not scaled".to_owned(),
            clocks => format!("{clocks} of their clocks"),
        };
        let constants = if self.has_scaled_constants() {
            format!(
                "{} of caches, memory and journals (memory for the page cache not below {AVAILABLE_MIB_MIN} MiB, journals not below 8 MiB)",
                self.constants()
            )
        } else {
            "caches and memory as they were".to_owned()
        };
        format!("{} of the papers' sizes, {clocks}, {constants}: {word}; {drive}", self.scale)
    }
}

/// Shell lines for a guest: its flusher, what may be dirty, and what is left for its page cache.
pub fn guest_lines(parameters: &Parameters) -> String {
    let dirty_percent = parameters.dirty_percent.unwrap_or(DIRTY_PERCENT);
    if !parameters.has_scaled_constants() {
        if dirty_percent == DIRTY_PERCENT {
            return String::new();
        }
        let (background, dirty) = dirty_percent;
        return format!(
            "echo {background} >/proc/sys/vm/dirty_background_ratio\necho {dirty} >/proc/sys/vm/dirty_ratio"
        );
    }
    let papers_mib = parameters.memory_mib.map_or(PAPERS_GUEST_MIB, f64::from);
    let bytes = |percent: u32| (papers_mib * parameters.scale * f64::from(percent) / 100.0 * 1_048_576.0) as u64;
    let cs = |full: f64| (full * parameters.clocks).round().max(1.0) as u64;
    let available = (papers_mib * parameters.scale).max(AVAILABLE_MIB_MIN) as u64;
    // What the guest has more than it should is taken by a file in its memory, which no pressure moves (and no tmpfs bounds).
    format!(
        "echo {expire} >/proc/sys/vm/dirty_expire_centisecs
             echo {writeback} >/proc/sys/vm/dirty_writeback_centisecs
             echo {background} >/proc/sys/vm/dirty_background_bytes
             echo {dirty} >/proc/sys/vm/dirty_bytes
             mkdir -p /tmp/ballast
             mount -t ramfs ballast /tmp/ballast || fail ramfs
             while read -r name kib rest; do
                 if [ \"$name\" = MemAvailable: ] && [ $((kib / 1024)) -gt {available} ]; then
                     dd if=/dev/zero of=/tmp/ballast/file bs=1M count=$((kib / 1024 - {available})) 2>/dev/null || fail ballast
                 fi
             done </proc/meminfo",
        expire = cs(DIRTY_EXPIRE_CS),
        writeback = cs(DIRTY_WRITEBACK_CS),
        background = bytes(dirty_percent.0).max(65_536),
        dirty = bytes(dirty_percent.1).max(131_072),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clocks_follow_the_length_of_a_run_and_what_cannot_is_refused() {
        assert_eq!(declared(1.0, 1.0).unwrap(), 1.0);
        assert_eq!(declared(0.1, 2.0).unwrap(), 0.2);
        assert_eq!(declared(0.1, 6.0).unwrap(), 0.6);
        assert_eq!(declared(0.5, 5.0).unwrap(), 1.0, "never slower than they were");
        let refused = declared(0.1, 1.0).unwrap_err().to_string();
        assert!(refused.contains("--time-scale 2"), "{refused}");
        assert_eq!((time_scale_for(1.0), time_scale_for(0.1), time_scale_for(0.5)), (1.0, 2.0, 1.0));
        assert_eq!((commit_seconds(5, 0.2), commit_seconds(30, 0.2), commit_seconds(1, 0.2)), (1, 6, 1));
    }

    #[test]
    fn a_guest_of_a_full_run_is_left_as_it_is_and_a_small_one_says_what_it_is() {
        assert_eq!(guest_lines(&Parameters::for_tests()), "");
        let earlier = Parameters { dirty_percent: Some((10, 40)), ..Parameters::for_tests() };
        assert!(
            guest_lines(&earlier).contains("echo 40 >/proc/sys/vm/dirty_ratio"),
            "a kernel of 2005 let writers go on"
        );
        let tenth = Parameters { scale: 0.1, time_scale: 2.0, clocks: 0.2, ..Parameters::for_tests() };
        let lines = guest_lines(&tenth);
        assert!(lines.contains("echo 600 >/proc/sys/vm/dirty_expire_centisecs") && lines.contains("count="), "{lines}");
        assert!(tenth.scale_in_words().contains("0.2 of their clocks"));
        // A machine of 8 GB, as NJS's: a tenth of it.
        let large = guest_lines(&Parameters { memory_mib: Some(8192), ..tenth.clone() });
        assert!(large.contains("-gt 819 ") && large.contains("echo 171798691 >/proc/sys/vm/dirty_bytes"), "{large}");
        assert_eq!((tenth.drive_clocks(), Parameters::for_tests().drive_clocks()), (0.1, 1.0));
        assert!(Parameters { clocks: 1.0, ..tenth }.scale_in_words().contains("clocks not scaled"));
    }

    /// A referee found that clocks alone were taken for a declaration.
    #[test]
    fn a_scale_is_declared_by_sizes_clocks_and_constants_together() {
        let of = |scale, time_scale, clocks| Parameters { scale, time_scale, clocks, ..Parameters::for_tests() };
        assert!(of(0.1, 2.0, 0.2).is_declared() && of(0.1, 2.0, 0.2).has_scaled_constants());
        assert!(!of(0.1, 2.0, 0.4).is_declared(), "other clocks than a run of this length has");
        // A half on a drive twice as slow lasts as long as it did.
        let half = of(0.5, 2.0, 1.0);
        assert!(
            !half.is_declared() && half.scale_in_words().contains(": no declared scale;"),
            "results of earlier versions"
        );
        let half = half.with_constants(0.5);
        assert!(half.is_declared() && half.has_scaled_constants() && half.drive_clocks() == 0.5);
        assert!(half.scale_in_words().contains(": a declared scale;") && guest_lines(&half).contains("dirty_bytes"));
        assert_eq!(of(0.1, 2.0, 0.2).with_constants(0.1), of(0.1, 2.0, 0.2), "the same as results of earlier versions");
        assert!(of(1.0, 5.0, 1.0).is_full() && !of(1.0, 1.0, 0.5).is_full() && !of(1.0, 1.0, 0.5).is_declared());
    }
}
