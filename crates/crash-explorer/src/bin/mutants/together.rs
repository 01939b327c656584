//! Faults that can be built together: one build for many, and a run of their tests for each.
//!
//! What the compiler does not take is woven out again, so that what is left compiles; the tests pass with none switched on before one counts as caught.
//! A fault that is not caught so is not missed yet: what runs without the environment does not see it. It gets a build of its own.

use crate::list::Mutant;
use crate::weave::{Cloth, Place};
use crate::{cargo, copy_tree, write};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Fewer are not worth a build of the whole workspace.
pub const WORTHWHILE: usize = 16;
/// The whole workspace, from nothing.
const CHECK_SECONDS: u64 = 1800;
/// The compiler has some phases, each of which finds what those before it could not.
const ATTEMPTS_MAX: usize = 20;

/// Weaves as many of `faults` into a copy of `root` at `tree` as can be there at once, none of them on: gives their numbers.
///
/// # Errors
/// What keeps the copy from being made.
pub fn build(root: &Path, tree: &Path, faults: &[(usize, &Mutant)]) -> Result<BTreeSet<usize>, String> {
    let mut by_file: BTreeMap<&str, Vec<(usize, &Mutant)>> = BTreeMap::new();
    for (number, mutant) in faults.iter().filter(|(_, mutant)| mutant.file.ends_with(".rs")) {
        by_file.entry(&mutant.file).or_default().push((*number, mutant));
    }
    let mut original = BTreeMap::new();
    for file in by_file.keys() {
        let text = std::fs::read_to_string(root.join(file)).map_err(|e| format!("reading {file}: {e}"))?;
        original.insert(*file, text);
    }
    copy_tree(root, tree, &|file| original.contains_key(file) && tree.join(file).exists())?;
    let mut cloths: BTreeMap<&str, Cloth> =
        original.iter().map(|(file, text)| (*file, Cloth::of(text, &by_file[file]))).collect();
    for _ in 0..ATTEMPTS_MAX {
        let mut places: BTreeMap<&str, Vec<Place>> = BTreeMap::new();
        for (file, cloth) in &cloths {
            let (text, woven) = cloth.weave();
            places.insert(file, woven);
            let path = tree.join(file);
            if std::fs::read_to_string(&path).is_ok_and(|known| known == text) {
                continue;
            }
            write(&path, &text)?;
        }
        let Some(errors) = errors(tree)? else {
            return Ok(places.into_values().flatten().map(|place| place.fault).collect());
        };
        let refused: BTreeSet<usize> = errors.iter().flat_map(|error| to_blame(error, &places)).collect();
        if refused.is_empty() {
            let first = errors.first().map_or("", |error| &error.message);
            return Err(format!("the faults do not compile together, and none is to blame: {first}"));
        }
        for cloth in cloths.values_mut() {
            for fault in &refused {
                cloth.try_next(*fault);
            }
        }
    }
    Err(format!("the faults do not compile together after {ATTEMPTS_MAX} attempts"))
}

/// What the compiler says, and of which lines.
struct Complaint {
    message: String,
    lines: Vec<(String, usize, usize)>,
}

/// The faults that a complaint is about: those that have one of its lines for their own; else all that it reaches; else all of the file.
fn to_blame(complaint: &Complaint, places: &BTreeMap<&str, Vec<Place>>) -> BTreeSet<usize> {
    let all = |is_meant: &dyn Fn(&Place, usize, usize) -> bool| {
        let mut found = BTreeSet::new();
        for (file, first, last) in &complaint.lines {
            let of_file = places.get(file.as_str()).into_iter().flatten();
            found.extend(of_file.filter(|place| is_meant(place, *first, *last)).map(|place| place.fault));
        }
        found
    };
    let own = all(&|place, first, last| place.lines.start <= first && last < place.lines.end);
    if !own.is_empty() {
        return own;
    }
    let reached = all(&|place, first, last| place.lines.start <= last && first < place.lines.end);
    if !reached.is_empty() { reached } else { all(&|_, _, _| true) }
}

/// What keeps the tree from being compiled, if anything does.
fn errors(tree: &Path) -> Result<Option<Vec<Complaint>>, String> {
    let words = ["check", "--quiet", "--workspace", "--all-targets", "--keep-going", "--message-format=json"];
    let output = cargo(&words, tree, CHECK_SECONDS).output().map_err(|e| format!("running cargo: {e}"))?;
    if output.status.success() {
        return Ok(None);
    }
    let mut found = Vec::new();
    for line in String::from_utf8_lossy(&output.stdout).lines() {
        let Ok(said) = serde_json::from_str::<serde_json::Value>(line) else { continue };
        let message = &said["message"];
        if said["reason"] != "compiler-message" || message["level"] != "error" {
            continue;
        }
        let mut complaint =
            Complaint { message: message["message"].as_str().unwrap_or("").to_owned(), lines: Vec::new() };
        let children = message["children"].as_array().into_iter().flatten();
        for part in [message].into_iter().chain(children) {
            for span in part["spans"].as_array().into_iter().flatten() {
                let line = |name: &str| span[name].as_u64().and_then(|line| usize::try_from(line).ok()).unwrap_or(0);
                let file = span["file_name"].as_str().unwrap_or("").to_owned();
                complaint.lines.push((file, line("line_start"), line("line_end")));
            }
        }
        found.push(complaint);
    }
    if found.is_empty() {
        return Err(format!("cargo check: {}", String::from_utf8_lossy(&output.stderr)));
    }
    Ok(Some(found))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_has_the_line_is_to_blame_before_who_is_near() {
        let place = |fault, lines| Place { fault, lines };
        let places = BTreeMap::from([("a.rs", vec![place(1, 3..6), place(2, 10..12)]), ("b.rs", vec![place(3, 1..2)])]);
        let blame = |lines: &[(&str, usize, usize)]| {
            let lines = lines.iter().map(|(file, first, last)| ((*file).to_owned(), *first, *last)).collect();
            to_blame(&Complaint { message: String::new(), lines }, &places).into_iter().collect::<Vec<_>>()
        };
        assert_eq!(blame(&[("a.rs", 4, 5), ("a.rs", 1, 20)]), [1]);
        assert_eq!(blame(&[("a.rs", 1, 20)]), [1, 2], "nobody has it for his own");
        assert_eq!(blame(&[("b.rs", 9, 9)]), [3], "nobody is near");
        assert_eq!(blame(&[("c.rs", 1, 1)]), [0; 0]);
    }
}
