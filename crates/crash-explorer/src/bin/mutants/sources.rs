//! What a test is made of: the sources of its package and of all that this depends on. A fault that was caught is caught as long as these are the same.

use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::Path;
use std::process::Command;

/// Packages whose tests start programs of the workspace, which none of them is linked with.
const STARTS_PROGRAMS: [&str; 3] = ["amberlog", "guest-kit", "lab"];
/// What no test looks into: pages, but for those that `READ` has, and the list itself. What the lock file says is each package's version.
const NOT_LOOKED_INTO: [&str; 5] =
    ["docs/", "README.md", "CHANGELOG.md", "Cargo.lock", "crates/crash-explorer/mutants.list"];
/// Pages that tests of other packages than those that start programs read.
const READ: [&str; 1] = ["docs/reports.md"];

/// What tests look into that start programs or guests, and no others: how these are built, packaged and begun.
const OF_PROGRAMS: [&str; 6] = ["guest/", "packaging/", "scripts/", ".ci/", "Makefile", "ARCHITECTURE.md"];
/// Whoever needs this package may start a guest.
const STARTS_GUESTS: &str = "guest-kit";

/// The sources of the workspace.
pub struct Sources {
    /// A number for all of them.
    all: u64,
    /// A number for what a package is made of.
    of: BTreeMap<String, u64>,
}

impl Sources {
    /// Of the workspace at `root`, with these files: their names, and a number for what is in each.
    ///
    /// # Errors
    /// When cargo does not tell what depends on what.
    pub fn of(root: &Path, files: &[(String, u64)]) -> Result<Self, String> {
        let output = Command::new("cargo")
            .args(["metadata", "--format-version", "1", "--locked"])
            .current_dir(root)
            .output()
            .map_err(|error| format!("running cargo metadata: {error}"))?;
        if !output.status.success() {
            return Err(format!("cargo metadata: {}", String::from_utf8_lossy(&output.stderr).trim_end()));
        }
        let metadata: Value =
            serde_json::from_slice(&output.stdout).map_err(|error| format!("cargo metadata: {error}"))?;
        Self::of_metadata(&metadata, files).ok_or_else(|| "cargo metadata tells no packages".to_owned())
    }

    /// Of a workspace that is all of one piece.
    #[cfg(test)]
    pub fn alike(all: u64) -> Self {
        Sources { all, of: BTreeMap::new() }
    }

    fn of_metadata(metadata: &Value, files: &[(String, u64)]) -> Option<Self> {
        let root = metadata["workspace_root"].as_str()?;
        let is_page = |name: &str| NOT_LOOKED_INTO.iter().any(|part| name.starts_with(part)) && !READ.contains(&name);
        let files: Vec<_> = files.iter().filter(|(name, _)| !is_page(name)).collect();
        let mut directories = Vec::new();
        for package in metadata["packages"].as_array()?.iter().filter(|package| package["source"].is_null()) {
            directories.push(Path::new(package["manifest_path"].as_str()?).parent()?.strip_prefix(root).ok()?);
        }
        // What is no package's own may be anybody's: flags, fuzzers, what guests boot from.
        let is_common = |name: &str| !directories.iter().any(|directory| Path::new(name).starts_with(directory));
        let common: Vec<_> = files.iter().filter(|(name, _)| is_common(name)).collect();
        let is_of_programs = |name: &str| OF_PROGRAMS.iter().any(|part| name.starts_with(part));
        let common_to_all: Vec<_> = common.iter().filter(|(name, _)| !is_of_programs(name)).collect();
        let mut packages = BTreeMap::new();
        for package in metadata["packages"].as_array()? {
            let mut hasher = DefaultHasher::new();
            (package["name"].as_str()?, package["version"].as_str()?).hash(&mut hasher);
            if package["source"].is_null() {
                let directory = Path::new(package["manifest_path"].as_str()?).parent()?.strip_prefix(root).ok()?;
                files
                    .iter()
                    .filter(|(name, _)| Path::new(name).starts_with(directory))
                    .for_each(|file| file.hash(&mut hasher));
            }
            packages.insert(package["id"].as_str()?, (package["name"].as_str()?, hasher.finish()));
        }
        let mut needs = BTreeMap::new();
        for node in metadata["resolve"]["nodes"].as_array()? {
            let of = |node: &Value| Some(node["pkg"].as_str()?.to_owned());
            needs.insert(node["id"].as_str()?, node["deps"].as_array()?.iter().filter_map(of).collect::<Vec<_>>());
        }
        let mut of = BTreeMap::new();
        for member in metadata["workspace_members"].as_array()? {
            let member = member.as_str()?;
            let (mut closure, mut next) = (BTreeSet::new(), vec![member.to_owned()]);
            while let Some(id) = next.pop() {
                if closure.insert(id.clone()) {
                    next.extend(needs.get(id.as_str())?.iter().cloned());
                }
            }
            let closure: Vec<_> = closure.iter().filter_map(|id| packages.get(id.as_str())).collect();
            let mut hasher = DefaultHasher::new();
            if closure.iter().any(|(name, _)| *name == STARTS_GUESTS) {
                common.hash(&mut hasher);
            } else {
                common_to_all.hash(&mut hasher);
            }
            closure.hash(&mut hasher);
            of.insert(packages.get(member)?.0.to_owned(), hasher.finish());
        }
        let mut hasher = DefaultHasher::new();
        (&files, &packages).hash(&mut hasher);
        Some(Sources { all: hasher.finish(), of })
    }

    /// A number for what `tests` are made of, the words of `cargo test` each.
    pub fn of_tests(&self, tests: &[String]) -> u64 {
        let of = |test: &String| {
            let package = test.split(' ').skip_while(|word| *word != "-p").nth(1).unwrap_or_default();
            let own = self.of.get(package).filter(|_| !STARTS_PROGRAMS.contains(&package));
            *own.unwrap_or(&self.all)
        };
        let mut hasher = DefaultHasher::new();
        tests.iter().map(of).collect::<Vec<_>>().hash(&mut hasher);
        hasher.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_a_test_is_made_of_is_what_its_package_depends_on() {
        let package = |name: &str, source: Value, version: &str| json!({"id": name, "name": name, "version": version, "source": source, "manifest_path": format!("/w/crates/{name}/Cargo.toml")});
        let node = |name: &str, deps: &[&str]| {
            let deps: Vec<Value> = deps.iter().map(|dep| json!({"pkg": dep})).collect();
            json!({"id": name, "deps": deps})
        };
        let of = |changed: &str, version: &str| {
            let metadata = json!({
                "workspace_root": "/w",
                "workspace_members": ["base", "above", "beside", "amberlog", "guest-kit"],
                "packages": [package("base", Value::Null, "1"), package("above", Value::Null, "1"), package("beside", Value::Null, "1"),
                    package("amberlog", Value::Null, "1"), package("guest-kit", Value::Null, "1"), package("serde", json!("registry"), version)],
                "resolve": {"nodes": [node("base", &["serde"]), node("above", &["base", "guest-kit"]), node("beside", &[]),
                    node("amberlog", &["base"]), node("guest-kit", &[]), node("serde", &[])]},
            });
            let names = [
                "crates/base/a.rs",
                "crates/above/a.rs",
                "crates/beside/a.rs",
                "crates/crash-explorer/mutants.list",
                "docs/a.md",
                "docs/reports.md",
                "fuzz/src/one.rs",
                "scripts/one",
            ];
            let files: Vec<_> = names.map(|name| (name.to_owned(), u64::from(name.contains(changed)))).to_vec();
            let sources = Sources::of_metadata(&metadata, &files).expect("understood");
            ["-p base", "-p above --lib one", "-p beside", "-p amberlog --test guests x"]
                .map(|test| sources.of_tests(&[test.to_owned()]))
        };
        let same = |changed: &str, version: &str| {
            let (before, after) = (of("none", "1"), of(changed, version));
            [0, 1, 2, 3].map(|test| before[test] == after[test])
        };
        assert_eq!(same("none", "1"), [true; 4]);
        assert_eq!(same("base", "1"), [false, false, true, false]);
        assert_eq!(same("above", "1"), [true, false, true, false], "its programs may be any of the workspace");
        assert_eq!(same("none", "2"), [false, false, true, false]);
        assert_eq!(same(".list", "1"), [true; 4]);
        assert_eq!(same("docs/a", "1"), [true; 4]);
        assert_eq!(same("reports", "1"), [false; 4]);
        assert_eq!(same("fuzz", "1"), [false; 4], "what is no package's own");
        assert_eq!(same("scripts", "1"), [true, false, true, false], "it is for guests and programs");
    }
}
