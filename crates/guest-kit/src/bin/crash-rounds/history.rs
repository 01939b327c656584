//! What rounds came to. With a file, a line of JSON for each round, which is only appended to: rounds that are interrupted, or killed, go on where they
//! were.
//!
//! Must never: count a round that did not end, or one of other options.
//!
//! Failure story: the beginning of a line, which a run left that was killed, is cut off; any other line that is no round's is an error, as is a file that another run
//! has.

use rustix::fs::{FlockOperation, flock};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;

/// Rounds, of this run and of earlier ones.
#[derive(Debug, Default)]
pub struct History {
    file: Option<File>,
    first_seed: Option<u64>,
    /// How many, and how many of them found nothing.
    pub rounds: u64,
    pub good: u64,
    /// How long they took together.
    pub seconds: f64,
    sums: BTreeMap<String, u64>,
    by_victim: BTreeMap<String, u64>,
    by_stress: BTreeMap<String, u64>,
    failed: Vec<String>,
}

impl History {
    /// Goes on with a file, or begins it. Its rounds must have been of `options`.
    ///
    /// # Errors
    /// A sentence when they were not, or when it cannot be used.
    pub fn open(path: &Path, options: &str) -> Result<Self, String> {
        let told = |error: std::io::Error| format!("{} cannot be used: {error}", path.display());
        let mut file = File::options().read(true).append(true).create(true).open(path).map_err(told)?;
        flock(&file, FlockOperation::NonBlockingLockExclusive)
            .map_err(|_| format!("{} is another run's, which goes on", path.display()))?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map_err(told)?;
        let whole = bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
        file.set_len(whole as u64).map_err(told)?;
        let mut history = Self::default();
        for (index, line) in bytes[..whole].split_inclusive(|byte| *byte == b'\n').enumerate() {
            let at = || format!("line {} of {}", index + 1, path.display());
            let line: Value = serde_json::from_slice(line).map_err(|error| format!("{} is no round: {error}", at()))?;
            if line["options"] != options {
                let others = &line["options"];
                return Err(format!("{} is a round of {others}, and not of {options}: name another file", at()));
            }
            history.count(&line);
        }
        history.file = Some(file);
        Ok(history)
    }

    /// The seed of the next round: they follow one another from the first, which may have been given again.
    ///
    /// # Errors
    /// When another one was given than that of the first round.
    pub fn next_seed(&self, given: Option<u64>, unsaid: u64) -> Result<u64, String> {
        match (self.first_seed, given) {
            (Some(first), Some(given)) if first != given => {
                Err(format!("--seed is {given}, and the first round of the file was of {first}: name another file"))
            }
            (first, given) => Ok(first.or(given).unwrap_or(unsaid).wrapping_add(self.rounds)),
        }
    }

    /// Whether there are to be more, of so many rounds, within so many hours of them.
    pub fn goes_on(&self, rounds: u64, hours: Option<u64>) -> bool {
        self.rounds < rounds && hours.is_none_or(|hours| self.seconds < (hours * 3600) as f64)
    }

    /// Notes a round that has ended.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn add(&mut self, line: &Value) -> Result<(), String> {
        if let Some(file) = &mut self.file {
            let noted = file.write_all(format!("{line}\n").as_bytes()).and_then(|()| file.sync_data());
            noted.map_err(|error| format!("a round cannot be noted: {error}"))?;
        }
        self.count(line);
        Ok(())
    }

    fn count(&mut self, line: &Value) {
        let number = |name: &str| line[name].as_u64().unwrap_or(0);
        let faults = line["faults"].as_array().map_or(0, Vec::len);
        self.first_seed.get_or_insert(number("seed"));
        self.rounds += 1;
        self.good += u64::from(faults == 0);
        self.seconds += line["seconds"].as_f64().unwrap_or(0.0);
        for name in SUMS {
            *self.sums.entry(name.to_owned()).or_default() += number(name);
        }
        let victim = line["victim"].as_str().unwrap_or("?").to_owned();
        *self.by_victim.entry(victim).or_default() += 1;
        for (kind, count) in line["stress"].as_object().into_iter().flatten() {
            *self.by_stress.entry(kind.clone()).or_default() += count.as_u64().unwrap_or(0);
        }
        if faults > 0 {
            self.failed.push(line["again"].as_str().unwrap_or("?").to_owned());
        }
    }

    /// All of it in lines.
    pub fn summary(&self) -> Vec<String> {
        let sum = |name: &str| self.sums.get(name).copied().unwrap_or(0);
        let list = |counts: &BTreeMap<String, u64>| {
            counts.iter().map(|(name, count)| format!("{name} {count}")).collect::<Vec<_>>().join(", ")
        };
        let mut lines = vec![
            format!("killed: {}", list(&self.by_victim)),
            format!(
                "{} acknowledged; {} rounds finished by another process, {} of whose recoveries were cut off",
                sum("acknowledged"),
                sum("finished_by_another"),
                sum("recoveries_cut_off")
            ),
            format!("{} records read back while guests ran", sum("read_back")),
        ];
        if sum("worker_kills") > 0 {
            lines.push(format!("workers killed under their guests: {}", sum("worker_kills")));
        }
        if !self.by_stress.is_empty() {
            lines.push(format!("against guests' memory: {}", list(&self.by_stress)));
        }
        lines.push(format!("{} rounds good, {} failed", self.good, self.rounds - self.good));
        lines.extend(self.failed.iter().map(|again| format!("again: crash-rounds --rounds 1 {again}")));
        lines
    }
}

/// Of the numbers of a line, those that are summed up.
const SUMS: [&str; 5] = ["acknowledged", "read_back", "finished_by_another", "recoveries_cut_off", "worker_kills"];

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn line(seed: u64, faults: &[&str]) -> Value {
        json!({
            "options": "--under retain", "seed": seed, "victim": "qemu", "again": format!("--seed {seed}"),
            "seconds": 1800.0, "acknowledged": 10, "read_back": 3, "finished_by_another": 1,
            "stress": {"caches": 4}, "faults": faults,
        })
    }

    #[test]
    fn rounds_go_on_where_they_were() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("log");
        let open = || History::open(&path, "--under retain");
        let mut first = open().unwrap();
        assert_eq!((first.next_seed(None, 5), first.next_seed(Some(7), 5)), (Ok(5), Ok(7)));
        first.add(&line(7, &[])).unwrap();
        first.add(&line(8, &["lost"])).unwrap();
        assert!(open().is_err_and(|error| error.contains("another run's")));
        drop(first);
        // It was killed while it wrote the third.
        let mut text = std::fs::read_to_string(&path).unwrap();
        text.push_str("{\"options\": \"--un");
        std::fs::write(&path, &text).unwrap();
        let mut second = open().unwrap();
        assert_eq!((second.rounds, second.good), (2, 1));
        assert_eq!((second.next_seed(None, 5), second.next_seed(Some(7), 5)), (Ok(9), Ok(9)));
        assert!(second.next_seed(Some(9), 5).is_err());
        second.add(&line(9, &[])).unwrap();
        let summary = second.summary();
        drop(second);
        assert_eq!(open().unwrap().summary(), summary);
        let last =
            ["against guests' memory: caches 12", "2 rounds good, 1 failed", "again: crash-rounds --rounds 1 --seed 8"];
        assert!(summary.ends_with(&last.map(str::to_owned)), "{summary:?}");
        assert!(summary.contains(&"9 records read back while guests ran".to_owned()), "{summary:?}");
    }

    #[test]
    fn rounds_of_other_options_and_damaged_files_are_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("log");
        History::open(&path, "--under retain").unwrap().add(&line(7, &[])).unwrap();
        assert!(History::open(&path, "--under copy").is_err_and(|error| error.contains("name another file")));
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, format!("{{\n{text}")).unwrap();
        assert!(History::open(&path, "--under retain").is_err_and(|error| error.contains("line 1")));
    }

    #[test]
    fn there_are_as_many_as_were_asked_for_and_no_more() {
        let mut history = History::default();
        assert!(history.goes_on(2, None) && history.goes_on(2, Some(1)));
        history.add(&line(1, &[])).unwrap();
        assert!(history.goes_on(2, Some(1)) && !history.goes_on(1, Some(1)));
        history.add(&line(2, &[])).unwrap();
        assert!(!history.goes_on(u64::MAX, Some(1)) && history.goes_on(u64::MAX, Some(2)));
        assert!(!history.goes_on(2, None));
    }
}
