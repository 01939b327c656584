//! The list of faults: for each, a name, a file, tests, and what is replaced by what.

use std::path::Path;

/// One fault.
#[derive(Clone, Debug, Default, Hash)]
pub struct Mutant {
    /// Its name, in words.
    pub name: String,
    /// The source, from the workspace's root.
    pub file: String,
    /// Arguments of `cargo test`, cheapest first: each is run until one fails.
    pub tests: Vec<String>,
    pub old: String,
    pub new: String,
}

impl Mutant {
    /// The source with the fault in it.
    ///
    /// # Errors
    /// When the source does not hold what is to be replaced exactly once.
    pub fn apply(&self, root: &Path) -> Result<String, String> {
        let text = std::fs::read_to_string(root.join(&self.file)).map_err(|e| format!("reading {}: {e}", self.file))?;
        match text.matches(&self.old).count() {
            1 => Ok(text.replacen(&self.old, &self.new, 1)),
            count => Err(format!(
                "fault '{}': {} holds what it replaces {count} times, not once; write the fault anew in mutants.list",
                self.name, self.file
            )),
        }
    }
}

/// Reads a list.
///
/// # Errors
/// A line that is not understood.
pub fn parse(text: &str) -> Result<Vec<Mutant>, String> {
    enum Part {
        Head,
        Old,
        New,
    }
    let mut mutants = Vec::new();
    let mut current = Mutant::default();
    let mut part = Part::Head;
    for (number, line) in text.lines().enumerate() {
        match (&part, line) {
            (Part::Head, "<<<<") => part = Part::Old,
            (Part::Old, "====") => part = Part::New,
            (Part::New, ">>>>") => {
                let mutant = std::mem::take(&mut current);
                if mutant.name.is_empty() || mutant.file.is_empty() || mutant.tests.is_empty() || mutant.old.is_empty()
                {
                    return Err(format!("line {}: a fault without name, file, test or source", number + 1));
                }
                mutants.push(mutant);
                part = Part::Head;
            }
            (Part::Old | Part::New, "<<<<") => {
                return Err(format!("line {}: the fault before '{}' does not end", number + 1, current.name));
            }
            (Part::Old, line) => push(&mut current.old, line),
            (Part::New, line) => push(&mut current.new, line),
            (Part::Head, line) => match line.split_once(": ") {
                Some(("fault", name)) => current.name = name.to_owned(),
                Some(("file", file)) => current.file = file.to_owned(),
                Some(("test", test)) => current.tests.push(test.to_owned()),
                _ if line.is_empty() || line.starts_with('#') => {}
                _ => return Err(format!("line {}: '{line}' is not understood", number + 1)),
            },
        }
    }
    Ok(mutants)
}

fn push(text: &mut String, line: &str) {
    text.push_str(line);
    text.push('\n');
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A fault that matches nothing any more guards nothing: who changes its source writes it anew.
    #[test]
    fn every_fault_matches_its_source_exactly_once() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let mutants = parse(include_str!("../../../mutants.list")).expect("the list is well formed");
        let stale: Vec<String> = mutants.iter().filter_map(|mutant| mutant.apply(&root).err()).collect();
        assert!(stale.is_empty(), "{}", stale.join("\n"));
    }
}
