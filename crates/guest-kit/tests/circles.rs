//! Files of a crate that import each other in a circle can only be understood together: there is none, and none comes
//! unless somebody adds to the list below on purpose.
//!
//! What a file imports is read from its text: paths that begin with `crate`, `super` or `self`, in `use` and elsewhere. Tests are left
//! out, and so is what a macro makes, and the bare names by which a module's own file calls those in its directory.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Of crates that have circles, the most files of each: there is none.
const CIRCLES: &[(&str, &[usize])] = &[];

type Module = Vec<String>;

fn sources(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()) {
        if entry.is_dir() {
            sources(&entry, found);
        } else if entry.extension().is_some_and(|ending| ending == "rs") {
            found.push(entry);
        }
    }
}

/// Which module a file below `src` is.
fn module_of(file: &Path) -> Module {
    let mut parts: Module =
        file.with_extension("").iter().map(|part| part.to_str().expect("a name").to_owned()).collect();
    if parts.last().is_some_and(|last| ["mod", "lib", "main"].contains(&last.as_str())) {
        parts.pop();
    }
    parts
}

/// A file's code, without comments and its own tests.
fn code(text: &str) -> String {
    let own = text.split("#[cfg(test)]\nmod tests").next().unwrap();
    own.lines().map(|line| line.split("//").next().unwrap()).collect::<Vec<_>>().join("\n")
}

/// The paths of a `use` tree: `a::{b, c::d}` is `a::b` and `a::c::d`.
fn paths(tree: &str) -> Vec<String> {
    let Some((before, inside)) = tree.split_once('{') else { return vec![tree.trim().to_owned()] };
    let inside = inside.rsplit_once('}').map_or(inside, |(inside, _)| inside);
    let (mut found, mut depth, mut one) = (Vec::new(), 0, String::new());
    for character in inside.chars().chain([',']) {
        match character {
            ',' if depth == 0 => {
                let ended = std::mem::take(&mut one);
                found.extend(paths(&ended).into_iter().map(|rest| format!("{}{rest}", before.trim())));
                continue;
            }
            '{' => depth += 1,
            '}' => depth -= 1,
            _ => {}
        }
        one.push(character);
    }
    found
}

/// The paths of a file's code that begin in its own crate.
fn own_paths(code: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut rest = code;
    while let Some(at) = ["crate::", "super::", "self::"].iter().filter_map(|word| rest.find(word)).min() {
        let is_whole = !rest[..at].ends_with(|before: char| before.is_alphanumeric() || "_:$".contains(before));
        let is_use = rest[..at].trim_end().ends_with("use") && rest[..at].ends_with(' ');
        let here = &rest[at..];
        let len = if is_use {
            here.find(';').unwrap_or(here.len())
        } else {
            here.find(|character: char| !character.is_alphanumeric() && !"_:".contains(character)).unwrap_or(here.len())
        };
        if is_whole {
            found.extend(paths(&here[..len]));
        }
        rest = &here[len.max(1)..];
    }
    found
}

/// The file that a path leads to, from this one.
fn target(path: &str, from: &Module, modules: &BTreeSet<Module>) -> Option<Module> {
    let mut parts = path.split("::").map(str::trim).peekable();
    let mut at = match parts.next()? {
        "crate" => Module::new(),
        "self" => from.clone(),
        "super" => from[..from.len().checked_sub(1)?].to_vec(),
        _ => return None,
    };
    while parts.next_if_eq(&"super").is_some() {
        at.pop();
    }
    for part in parts {
        at.push(part.to_owned());
        if !modules.contains(&at) {
            at.pop();
            break;
        }
    }
    (!at.is_empty() && at != *from).then_some(at)
}

type Needs = BTreeMap<Module, BTreeSet<Module>>;

fn reachable(from: &Module, needs: &Needs) -> BTreeSet<Module> {
    let (mut found, mut next) = (BTreeSet::new(), vec![from.clone()]);
    while let Some(module) = next.pop() {
        for needed in needs.get(&module).into_iter().flatten() {
            if found.insert(needed.clone()) {
                next.push(needed.clone());
            }
        }
    }
    found
}

/// Files that need each other, largest circle first.
fn circles(needs: &Needs) -> Vec<BTreeSet<Module>> {
    let reached: BTreeMap<&Module, BTreeSet<Module>> =
        needs.keys().map(|module| (module, reachable(module, needs))).collect();
    let with = |module: &Module| {
        let is_mutual = |other: &&Module| reached.get(*other).is_some_and(|reached| reached.contains(module));
        reached[module].iter().filter(is_mutual).cloned().collect::<BTreeSet<_>>()
    };
    let all: BTreeSet<BTreeSet<Module>> =
        needs.keys().map(with).filter(|circle: &BTreeSet<Module>| circle.len() > 1).collect();
    let mut all: Vec<_> = all.into_iter().collect();
    all.sort_by_key(|circle| std::cmp::Reverse(circle.len()));
    all
}

fn needs_of(src: &Path) -> Needs {
    let mut files = Vec::new();
    sources(src, &mut files);
    let files: BTreeMap<Module, PathBuf> = files
        .into_iter()
        .map(|file| (module_of(file.strip_prefix(src).unwrap()), file))
        .filter(|(module, _)| !module.iter().any(|part| part == "tests" || part == "bin"))
        .collect();
    let modules: BTreeSet<Module> = files.keys().cloned().collect();
    let of = |(module, file): (&Module, &PathBuf)| {
        let text = code(&std::fs::read_to_string(file).unwrap());
        let needed = own_paths(&text).iter().filter_map(|path| target(path, module, &modules)).collect();
        (module.clone(), needed)
    };
    files.iter().map(of).collect()
}

#[test]
fn files_that_need_each_other_are_no_more_than_they_were() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut wrong = Vec::new();
    for entry in std::fs::read_dir(crates).unwrap().map(|entry| entry.unwrap().path()) {
        let name = entry.file_name().unwrap().to_str().unwrap().to_owned();
        let src = entry.join("src");
        if !src.is_dir() {
            continue;
        }
        let allowed = CIRCLES.iter().find(|(known, _)| *known == name).map_or(&[][..], |(_, sizes)| sizes);
        let found = circles(&needs_of(&src));
        let is_within = found.len() <= allowed.len() && found.iter().zip(allowed).all(|(one, most)| one.len() <= *most);
        if !is_within {
            let names = |circle: &BTreeSet<Module>| circle.iter().map(|module| module.join("/")).collect::<Vec<_>>();
            wrong.push(format!("{name}: {:?}, at most {allowed:?}", found.iter().map(names).collect::<Vec<_>>()));
        }
    }
    assert!(wrong.is_empty(), "files import each other in circles:\n{}", wrong.join("\n"));
}

#[test]
fn a_circle_is_seen_whatever_it_is_written_like() {
    let modules: BTreeSet<Module> = ["a", "b", "c"].iter().map(|name| vec![(*name).to_owned()]).collect();
    let text =
        code("use crate::{b::{X, Y}, c};\n// use crate::a;\nfn f() { super::a::g() }\n#[cfg(test)]\nmod tests {}");
    let from = vec!["b".to_owned()];
    let found: Vec<_> = own_paths(&text).iter().filter_map(|path| target(path, &from, &modules)).collect();
    assert_eq!(found, [["c"], ["a"]], "its own is none");
    let needs: Needs = [("a", "b"), ("b", "c"), ("c", "a")]
        .map(|(module, needed)| (vec![module.to_owned()], BTreeSet::from([vec![needed.to_owned()]])))
        .into();
    assert_eq!(circles(&needs).iter().map(BTreeSet::len).collect::<Vec<_>>(), [3]);
}
