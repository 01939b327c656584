//! A quick run with real guests: structure and counters, never times. Then the same again, which finds everything done.

use lab::catalogue::{self, Extent};
use lab::cell::Mode;
use lab::results::{self, Parameters, Results};
use lab::run::{RunOptions, run};

#[test]
fn a_quick_run_keeps_its_results_goes_on_and_counts_what_the_paper_says() {
    let directory = tempfile::tempdir().unwrap();
    let mut experiments = catalogue::select(&["spe2012-fig06".to_owned()]).unwrap();
    experiments[0].modes = vec![Mode::Journal, Mode::Vma];
    let options = RunOptions {
        out: directory.path().to_owned(),
        images: None,
        extent: Extent { quick: true, iterations: 1, guests_max: 1, scale: 0.02 },
        parameters: Parameters {
            quick: true,
            scale: 0.02,
            time_scale: 0.1,
            guest_mib: 192,
            file_system: "ext3".into(),
            seed: 1,
        },
        command: "--quick".into(),
    };
    assert_eq!(run(&experiments, &options).unwrap(), 0, "no cell fails");
    let path = directory.path().join("spe2012-fig06/results.json");
    let first: Results = results::read(&path).unwrap().unwrap();
    assert_eq!(first.rows.len(), 2);
    let of = |mode: Mode, field: &str| first.rows.iter().find(|row| row.group.mode == mode).unwrap().fields[field].mean;
    let written = 12.0 * f64::from(1 << 20);
    for mode in [Mode::Journal, Mode::Vma] {
        assert!(of(mode, "journal_bytes_received") > written, "{mode}: all data goes through the journal");
        assert!(of(mode, "home_bytes_to_storage") > written, "{mode}: and reaches its home");
    }
    assert!(
        of(Mode::Journal, "bytes_to_storage") > 1.8 * of(Mode::Vma, "bytes_to_storage"),
        "the journal is not written"
    );
    assert!(of(Mode::Vma, "pages_protected") > 1000.0);
    assert!(
        of(Mode::Journal, "flushes_to_storage") > 3.0 * of(Mode::Vma, "flushes_to_storage"),
        "a commit that is held needs no flush"
    );
    assert!(first.verdicts.iter().any(|verdict| verdict.ours.is_some()));

    // Raw results are there and are used again: a second run measures nothing.
    let raw = |name: &str| directory.path().join("spe2012-fig06/raw").join(name);
    let kept = raw("seq_write-vma-1-st336753lw-0-0.json");
    let before = std::fs::metadata(&kept).unwrap().modified().unwrap();
    assert_eq!(run(&experiments, &options).unwrap(), 0);
    assert_eq!(std::fs::metadata(&kept).unwrap().modified().unwrap(), before);
}
