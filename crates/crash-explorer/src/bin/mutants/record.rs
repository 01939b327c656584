//! What was caught in earlier calls, so that a list of hours can be run in parts.

use crate::list::Mutant;
use crate::sources::Sources;
use std::collections::BTreeSet;
use std::fs::File;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::Write;
use std::path::Path;

/// A file with a line for each fault that was caught, and each test that passed without one: a number that stands for it and for the sources, and
/// its name.
pub struct Record {
    sources: Sources,
    caught: BTreeSet<String>,
    file: File,
}

impl Record {
    /// Goes on with a file, or begins it.
    ///
    /// # Errors
    /// When it cannot be read or written.
    pub fn open(path: &Path, sources: Sources) -> Result<Self, String> {
        let failed = |error: std::io::Error| format!("the record {}: {error}", path.display());
        let text = match std::fs::read_to_string(path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
            read => read.map_err(failed)?,
        };
        let caught = text.lines().filter_map(|line| Some(line.split_once(' ')?.0.to_owned())).collect();
        let file = File::options().create(true).append(true).open(path).map_err(failed)?;
        Ok(Record { sources, caught, file })
    }

    fn key(&self, mutant: &Mutant) -> String {
        let mut hasher = DefaultHasher::new();
        (self.sources.of_tests(&mutant.tests), mutant).hash(&mut hasher);
        format!("{:016x}", hasher.finish())
    }

    /// Whether it was caught in these sources.
    pub fn has(&self, mutant: &Mutant) -> bool {
        self.caught.contains(&self.key(mutant))
    }

    /// Whether a test passed in these sources without any fault.
    pub fn passed(&self, test: &str) -> bool {
        self.caught.contains(&self.key_of_pass(test))
    }

    /// It did.
    ///
    /// # Errors
    /// When that cannot be written.
    pub fn note_pass(&mut self, test: &str) -> Result<(), String> {
        let key = self.key_of_pass(test);
        writeln!(self.file, "{key} passes {test}").map_err(|error| format!("the record: {error}"))
    }

    fn key_of_pass(&self, test: &str) -> String {
        let mut hasher = DefaultHasher::new();
        (self.sources.of_tests(&[test.to_owned()]), "passes", test).hash(&mut hasher);
        format!("{:016x}", hasher.finish())
    }

    /// It was.
    ///
    /// # Errors
    /// When that cannot be written.
    pub fn note(&mut self, mutant: &Mutant) -> Result<(), String> {
        let key = self.key(mutant);
        writeln!(self.file, "{key} {}", mutant.name).map_err(|error| format!("the record: {error}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_caught_is_known_as_long_as_fault_and_sources_are_the_same() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("record");
        let [mut one, other] = ["one", "other"].map(|name| {
            let mut mutant = Mutant::default();
            name.clone_into(&mut mutant.name);
            mutant.tests.push("-p extfs".to_owned());
            mutant
        });
        let mut record = Record::open(&path, Sources::alike(1)).expect("begun");
        record.note(&one).expect("written");
        record.note_pass("-p jbd2").expect("written");
        assert!(!record.has(&one), "this call has done it anyway");
        for (sources, is_known) in [(1, true), (2, false)] {
            let record = Record::open(&path, Sources::alike(sources)).expect("goes on");
            assert_eq!((record.has(&one), record.has(&other)), (is_known, false));
            assert_eq!((record.passed("-p jbd2"), record.passed("-p extfs")), (is_known, false));
        }
        one.tests.push("-p jbd2".to_owned());
        assert!(!Record::open(&path, Sources::alike(1)).expect("goes on").has(&one), "another test");
    }
}
