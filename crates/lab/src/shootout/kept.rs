//! What a shoot-out has kept of earlier runs: whether it can be used again, what speaks against that, and what became of attempts that failed.
//!
//! It must never write over a figure that was measured otherwise: such a cell is refused before anything is run. A failed attempt has no figure;
//! it is set aside and counted.

use super::{Cell, Conditions};
use crate::error::{Error, FileContext, Result};
use crate::measured::Source;
use crate::results;
use std::path::{Path, PathBuf};

/// Where failed attempts are kept, beside the raw results.
const FAILED: &str = "failed";

/// Cells that would have to be measured again, each over a result that is otherwise.
#[derive(Default)]
pub(super) struct Others {
    count: usize,
    /// The first of them, and what differs.
    first: Option<(String, String)>,
    /// Whether one of them was measured in another way, and not only by another program or machine.
    has_other_conditions: bool,
}

impl Others {
    /// Looks at a kept cell which a run comes to; `any_source` is whether it takes those of other programs and machines.
    pub(super) fn look_at(&mut self, name: &str, kept: &Cell, here: &Conditions, source: &Source, any_source: bool) {
        // An attempt that failed has no figure that could be lost.
        if kept.failure.is_some() {
            return;
        }
        let mut words = differences(&kept.conditions, here);
        self.has_other_conditions |= !words.is_empty();
        if !any_source {
            words.extend(differences_of_sources(&kept.source(), source));
        }
        if !words.is_empty() {
            self.count += 1;
            self.first.get_or_insert_with(|| (name.to_owned(), words.join("; ")));
        }
    }

    /// An error where there are any.
    pub(super) fn refuse(self, raw: &Path) -> Result<()> {
        let Some((cell, differences)) = self.first else { return Ok(()) };
        Err(Error::OtherConditions {
            path: raw.to_owned(),
            count: self.count,
            cell,
            differences,
            or_any_source: if self.has_other_conditions {
                ""
            } else {
                ", or say --any-source to take what another program or machine measured as it is"
            },
        })
    }
}

/// In which way a cell was measured otherwise, in words.
fn differences(kept: &Conditions, here: &Conditions) -> Vec<String> {
    let size = |quick: bool| if quick { "quick" } else { "of full size" }.to_owned();
    let begin =
        |clean: bool| if clean { "all home before the clock" } else { "not all home before the clock" }.to_owned();
    let place =
        |images: &str| format!("images in {}", if images.is_empty() { "a place that is not said" } else { images });
    let pairs = [
        [kept.quick, here.quick].map(size),
        [kept.flush_us, here.flush_us].map(|us| format!("a flush of {us} µs")),
        [&kept.platform, &here.platform].map(|platform| format!("guests of {platform}")),
        [kept.begins_clean, here.begins_clean].map(begin),
        [kept.rounds, here.rounds].map(|rounds| format!("rounds: {rounds}")),
        [&kept.images, &here.images].map(|images| place(images)),
    ];
    pairs.iter().filter(|[there, now]| there != now).map(|[there, now]| format!("{there}, and here {now}")).collect()
}

fn differences_of_sources(kept: &Source, here: &Source) -> Option<String> {
    (kept != here).then(|| format!("{kept}, and here {here}"))
}

/// Keeps a failed attempt, before another result is written to its path, in `failed` of the run's directory; gives how often the cell was tried so far.
pub(super) fn set_aside(out: &Path, path: &Path) -> Result<u32> {
    let Some(earlier) = results::read::<Cell>(path)?.filter(|earlier| earlier.failure.is_some()) else { return Ok(0) };
    let failed = out.join(FAILED);
    std::fs::create_dir_all(&failed).at("make", &failed)?;
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    let to = failed.join(format!("{stem}-{}.json", earlier.attempts));
    std::fs::rename(path, &to).at("move to", &to)?;
    Ok(earlier.attempts)
}

/// All failed attempts that were set aside.
pub(super) fn failed(out: &Path) -> Result<Vec<Cell>> {
    let failed = out.join(FAILED);
    if !failed.is_dir() {
        return Ok(Vec::new());
    }
    let entries = std::fs::read_dir(&failed).at("list", &failed)?;
    let mut paths: Vec<PathBuf> = entries.filter_map(|entry| entry.ok().map(|entry| entry.path())).collect();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "json"));
    paths.sort();
    paths.iter().filter_map(|path| results::read(path).transpose()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shootout::cell_for_tests;

    #[test]
    fn a_failed_attempt_is_set_aside_and_counted() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("retain-fsync-0.json");
        assert_eq!(set_aside(directory.path(), &path).unwrap(), 0, "there is none");
        results::write(&path, &cell_for_tests("retain", "fsync", None)).unwrap();
        assert_eq!(set_aside(directory.path(), &path).unwrap(), 0, "it has a figure");
        for attempt in 1..=2 {
            let cell = Cell { attempts: attempt, ..cell_for_tests("retain", "fsync", Some("it hung")) };
            results::write(&path, &cell).unwrap();
            assert_eq!(set_aside(directory.path(), &path).unwrap(), attempt);
            assert!(!path.exists());
        }
        let kept: Vec<u32> = failed(directory.path()).unwrap().iter().map(|cell| cell.attempts).collect();
        assert_eq!(kept, [1, 2]);
    }

    /// A run of another flush, into the same directory, wrote over what was there.
    #[test]
    fn what_was_measured_otherwise_is_refused_with_what_differs() {
        let cell = cell_for_tests("retain", "fsync", None);
        let refused = |here: &Conditions, source: &Source, cell: &Cell, any_source: bool| {
            let mut others = Others::default();
            others.look_at("retain-fsync-0.json", cell, here, source, any_source);
            others.refuse(Path::new("out/raw")).err().map(|error| error.to_string())
        };
        let (here, source) = (cell.conditions.clone(), cell.source());
        assert_eq!(refused(&here, &source, &cell, false), None);
        let flush = Conditions { flush_us: 0, images: "/srv (ext4)".to_owned(), ..here.clone() };
        for any_source in [false, true] {
            let told = refused(&flush, &source, &cell, any_source).unwrap();
            for part in [
                "out/raw has 1 cells",
                "retain-fsync-0.json: a flush of 2000 µs, and here a flush of 0 µs; images in /dev/shm (tmpfs), and here images in /srv (ext4)",
                "--out",
            ] {
                assert!(told.contains(part), "{part}: {told}");
            }
            assert!(!told.contains("--any-source"), "it would not help: {told}");
        }
        let other = Source { commit: "b".to_owned(), ..source.clone() };
        let told = refused(&here, &other, &cell, false).unwrap();
        assert!(
            told.contains("program a on 2 × a processor with programs 0123, and here program b")
                && told.contains("--any-source"),
            "{told}"
        );
        let edited = Source { programs: "4567".to_owned(), ..source.clone() };
        let told = refused(&here, &edited, &cell, false).unwrap();
        assert!(told.contains("with programs 4567"), "the same commit, and other tools in its guests: {told}");
        assert_eq!(refused(&here, &other, &cell, true), None);
        let failed = cell_for_tests("retain", "fsync", Some("it hung"));
        assert_eq!(refused(&flush, &other, &failed, false), None, "it has no figure");
    }
}
