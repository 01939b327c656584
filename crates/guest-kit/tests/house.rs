//! Lists that the documents make of the workspace, held against it: the order of the crates (ARCHITECTURE.md), where `unsafe`
//! is (docs/threat-model.md), the crates that `cargo doc` shows first (crates/amberlog/src/main.rs), and that the rules which
//! the sources cite are written down. And that random numbers come from one crate.

use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

fn page(name: &str) -> String {
    std::fs::read_to_string(root().join(name)).unwrap()
}

/// The part of a page below a heading, up to the next one of its level.
fn section<'t>(text: &'t str, heading: &str) -> &'t str {
    let start = text.find(&format!("\n{heading}\n")).unwrap_or_else(|| panic!("there is no '{heading}'"));
    let rest = &text[start + heading.len() + 2..];
    rest.find("\n## ").map_or(rest, |end| &rest[..end])
}

/// The names in the first column of a section's table.
fn first_column(section: &str) -> Vec<String> {
    let rows = section.lines().filter_map(|line| line.strip_prefix("| `"));
    rows.flat_map(|row| {
        let cell = row.split(" |").next().unwrap();
        cell.split(", ").map(|name| name.trim_matches('`').to_owned()).collect::<Vec<_>>()
    })
    .collect()
}

/// A crate of the workspace.
struct Member {
    directory: PathBuf,
    /// Of the workspace, and not only for its tests.
    needs: BTreeSet<String>,
    /// The first source of its library and its programs.
    roots: Vec<PathBuf>,
    /// The directory of its page below target/doc: that of its library, or else of its program.
    page: String,
}

fn members() -> BTreeMap<String, Member> {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--no-deps", "--offline", "--format-version", "1"])
        .current_dir(root())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout).unwrap();
    let list = |value: &Value| value.as_array().unwrap().clone();
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let member = |package: &Value| {
        let needs = list(&package["dependencies"])
            .iter()
            .filter(|dependency| dependency["path"].is_string() && dependency["kind"] != "dev")
            .map(|dependency| text(&dependency["name"]))
            .collect();
        let mut targets = list(&package["targets"]);
        targets.retain(|target| {
            list(&target["kind"]).iter().any(|kind| ["lib", "bin", "cdylib"].contains(&kind.as_str().unwrap()))
        });
        let roots = targets.iter().map(|target| PathBuf::from(text(&target["src_path"]))).collect();
        let of_page = targets.iter().find(|target| target["kind"][0] != "bin").unwrap_or(&targets[0]);
        let page = text(&of_page["name"]).replace('-', "_");
        let directory = Path::new(&text(&package["manifest_path"])).parent().unwrap().to_owned();
        (text(&package["name"]), Member { directory, needs, roots, page })
    };
    list(&metadata["packages"]).iter().map(member).collect()
}

fn sources(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|ending| ending == "rs") {
            found.push(path);
        }
    }
}

/// Whether a line of code, not of text, has the word.
fn has_unsafe(line: &str) -> bool {
    let code = line.split("//").next().unwrap();
    let is_part = |byte: Option<&u8>| byte.is_some_and(|byte| byte.is_ascii_alphanumeric() || *byte == b'_');
    code.match_indices("unsafe").any(|(at, word)| {
        let bytes = code.as_bytes();
        let is_quoted = code[..at].matches('"').count() % 2 == 1;
        let before = at.checked_sub(1).and_then(|before| bytes.get(before));
        !is_quoted && !is_part(bytes.get(at + word.len())) && !is_part(before)
    })
}

#[test]
fn a_crate_depends_only_on_those_above_it() {
    let order = first_column(section(&page("ARCHITECTURE.md"), "## The rooms"));
    let place: BTreeMap<&str, usize> = order.iter().enumerate().map(|(at, name)| (name.as_str(), at)).collect();
    assert_eq!(place.len(), order.len(), "a crate is in the table twice: {order:?}");
    let members = members();
    let listed: BTreeSet<&str> = place.keys().copied().collect();
    let there: BTreeSet<&str> = members.keys().map(String::as_str).collect();
    assert_eq!(listed, there, "the table of ARCHITECTURE.md (left) against the workspace");
    for (name, member) in &members {
        for needed in &member.needs {
            assert!(
                place[needed.as_str()] < place[name.as_str()],
                "{name} needs {needed}, which is below it in the table"
            );
        }
    }
}

#[test]
fn unsafe_is_where_the_threat_model_says() {
    let listed: BTreeSet<String> =
        first_column(section(&page("docs/threat-model.md"), "## `unsafe`")).into_iter().collect();
    let mut found = BTreeSet::new();
    for (name, member) in members() {
        let mut files = Vec::new();
        sources(&member.directory.join("src"), &mut files);
        assert!(!files.is_empty());
        let has = files.iter().any(|file| std::fs::read_to_string(file).unwrap().lines().any(has_unsafe));
        if has {
            found.insert(name.clone());
        }
        if !listed.contains(&name) {
            for root in &member.roots {
                let forbids = std::fs::read_to_string(root).unwrap().contains("#![forbid(unsafe_code)]");
                assert!(forbids, "{} does not forbid unsafe code, and {name} is not on the list", root.display());
            }
        }
    }
    assert_eq!(listed, found, "the list of docs/threat-model.md (left) against the sources");
}

#[test]
fn the_word_in_a_comment_or_a_text_is_not_counted() {
    assert!(
        has_unsafe("let x = unsafe { f() };") && has_unsafe("unsafe fn f() {") && has_unsafe("#[unsafe(no_mangle)]")
    );
    assert!(!has_unsafe("#![forbid(unsafe_code)]") && !has_unsafe("// unsafe { }") && !has_unsafe("f(\"unsafe { }\")"));
}

/// "rule 3 of ARCHITECTURE.md" means something, and no rule is cited of a design that nobody has.
#[test]
fn every_rule_that_is_cited_is_written_down() {
    let architecture = page("ARCHITECTURE.md");
    let rules: BTreeSet<u32> = section(&architecture, "## Rules that must always hold")
        .lines()
        .filter_map(|line| line.split_once(". ")?.0.parse().ok())
        .collect();
    assert_eq!(rules, (1..=7).collect());
    let mut files = Vec::new();
    sources(&root().join("crates"), &mut files);
    let mut cited = 0;
    for file in files {
        if file.file_name().is_some_and(|name| name == "house.rs") {
            continue;
        }
        let text = std::fs::read_to_string(&file).unwrap().replace("/// ", "").replace("//! ", "").replace("// ", "");
        let words: Vec<&str> = text.split_whitespace().collect();
        for window in words.windows(4) {
            if !window[0].trim_start_matches('(').eq_ignore_ascii_case("rule") {
                continue;
            }
            let Ok(number) = window[1].trim_end_matches([')', '.', ',', ':']).parse::<u32>() else { continue };
            assert!(
                rules.contains(&number) && window[2] == "of" && window[3].starts_with("ARCHITECTURE.md"),
                "{}: '{}': say which rule of ARCHITECTURE.md it is",
                file.display(),
                window.join(" ")
            );
            cited += 1;
        }
    }
    assert!(cited >= 14, "{cited}");
}

/// `cargo doc` begins at crate `amberlog`: from there a reader finds every crate.
#[test]
fn the_first_page_of_the_crates_leads_to_each() {
    let text = page("crates/amberlog/src/main.rs");
    let header: String = text.lines().take_while(|line| line.starts_with("//!")).collect();
    let linked: BTreeSet<&str> =
        header.split("](../").skip(1).map(|rest| rest.split("/index.html)").next().unwrap()).collect();
    let members = members();
    let there: BTreeSet<&str> =
        members.values().map(|member| member.page.as_str()).filter(|page| *page != "amberlog").collect();
    assert_eq!(linked, there, "the links of crates/amberlog/src/main.rs (left) against the workspace");
}

/// Those that have a generator of their own, and say why.
const OWN_GENERATORS: [&str; 3] = [
    "crates/placement/src/remote/tests.rs",
    "crates/placement/tests/nvm_model/guest.rs",
    "crates/placement/tests/remount_model/guest.rs",
];

/// Whether a line is a step of a generator as people write them down: Marsaglia's xorshift, or Knuth's multiplier.
fn is_step_of_a_generator(line: &str) -> bool {
    let code = line.split("//").next().unwrap().replace('_', "");
    code.contains("6364136223846793005") || code.contains("^=") && code.contains("<< 13")
}

/// A seed means the same everywhere, and nobody has to ask whether a generator is a good one.
#[test]
fn random_numbers_come_from_one_crate() {
    let mut files = Vec::new();
    sources(&root().join("crates"), &mut files);
    sources(&root().join("guest/tools"), &mut files);
    let own: BTreeSet<String> = files
        .iter()
        .filter(|file| file.file_name().is_some_and(|name| name != "house.rs"))
        .filter(|file| std::fs::read_to_string(file).unwrap().lines().any(is_step_of_a_generator))
        .map(|file| file.strip_prefix(root()).unwrap().to_str().unwrap().to_owned())
        .collect();
    let listed = BTreeSet::from(OWN_GENERATORS.map(str::to_owned));
    assert_eq!(listed, own, "OWN_GENERATORS (left) against the sources: a new test takes seeded_random::Random");
}
