//! Sizes and clocks of the cells of Figure 19, which are the paper's whatever the scale of the run.

/// The size of the file of records, in MiB (not scaled: what counts is what is written until the crash).
pub(crate) const RECORDS_MIB: u64 = 32;

/// What a guest has sent to its disk when it crashes, as in the paper, in KiB.
pub(crate) const CRASH_KIB: u64 = 4096;

/// The disk and its journal, in MiB: room for the records and for all that is sent until a crash.
pub(crate) const IMAGE_MIB: u32 = 256;

pub(crate) const JOURNAL_MIB: u64 = 32;

/// Seconds for a second of the modelled disk, at most: bytes decide when the crash comes, and no time is measured. (At the pace of the
/// other experiments the damage is no more: none in 48 runs of ordered and writeback, with records of 8 and 64 KiB.)
pub(crate) const TIME_SCALE_MAX: f64 = 0.25;

/// Crashes of one boot; the last one is the kernel's.
pub(crate) const CRASHES_A_BOOT: u32 = 20;

/// The parameter of an experiment in which requests are pages; its value is the size of a record in KiB.
pub(crate) const RECORDS_BY_PAGE: &str = "record_kib_by_page";

/// Seconds for a second of the modelled disk in a run that has so many of its own: what the parameters of these cells say.
pub(crate) fn time_scale(of_run: f64, parameter: Option<&str>) -> f64 {
    if parameter == Some(RECORDS_BY_PAGE) { of_run } else { of_run.min(TIME_SCALE_MAX) }
}

/// What these cells have of the paper and of their own, whatever the scale of the run, in words.
pub(crate) fn sizes_in_words() -> String {
    format!(
        "the paper's records and {} MiB sent until each crash, in a file of {RECORDS_MIB} MiB on a disk of {IMAGE_MIB} MiB with a journal of {JOURNAL_MIB} MiB; \
         clocks as they were",
        CRASH_KIB / 1024
    )
}
