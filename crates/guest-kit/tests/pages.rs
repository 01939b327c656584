//! What the pages say of the sources, held against them: links lead somewhere, sentences that docs/troubleshooting.md explains are
//! still said, and every variable of the environment is on docs/command-line.md. And lines of prose end where sentences do.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Files below a directory that end so, but not in what builds leave behind.
fn files(directory: &Path, endings: &[&str], found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        if path.is_dir() {
            if !name.starts_with('.') && !["target", "build", "shared", "traces", "corpus"].contains(&name) {
                files(&path, endings, found);
            }
        } else if endings.iter().any(|ending| name.ends_with(ending)) {
            found.push(path);
        }
    }
}

fn pages() -> Vec<PathBuf> {
    let mut found = Vec::new();
    files(&root(), &[".md"], &mut found);
    assert!(found.len() > 15, "{found:?}");
    found
}

/// A page's lines outside fenced and indented code, with what stands in `code` kept.
fn prose(text: &str) -> Vec<&str> {
    let mut is_fenced = false;
    text.lines()
        .filter(|line| {
            let is_fence = line.trim_start().starts_with("```");
            is_fenced ^= is_fence;
            !is_fenced && !is_fence && !line.starts_with("    ")
        })
        .collect()
}

/// The anchors of a page's headings, as forges make them.
fn anchors(text: &str) -> BTreeSet<String> {
    let headings = prose(text).into_iter().filter_map(|line| {
        let title = line.trim_start_matches('#');
        (title.len() < line.len() && title.starts_with(' ')).then(|| title.trim())
    });
    let mut seen = BTreeMap::new();
    headings
        .map(|title| {
            let kept = title.to_lowercase();
            let kept = kept.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
            let anchor: String = kept.map(|c| if c == ' ' { '-' } else { c }).collect();
            let times: &mut u32 = seen.entry(anchor.clone()).or_default();
            *times += 1;
            if *times == 1 { anchor } else { format!("{anchor}-{}", *times - 1) }
        })
        .collect()
}

/// The targets of a line's links, those within `code` left out.
fn links(line: &str) -> Vec<String> {
    let outside: String =
        line.split('`').enumerate().map(|(at, part)| if at % 2 == 0 { part } else { "code" }).collect();
    let parts: Vec<&str> = outside.split("](").skip(1).collect();
    parts.iter().map(|part| part.split(')').next().unwrap().to_owned()).collect()
}

/// What is wrong with a link of a page, if anything.
fn dead(page: &Path, target: &str) -> Option<String> {
    if target.starts_with("https://") || target.starts_with("http://") {
        return None;
    }
    let (path, anchor) = target.split_once('#').map_or((target, None), |(path, anchor)| (path, Some(anchor)));
    let file = if path.is_empty() { page.to_owned() } else { page.parent().unwrap().join(path) };
    if !file.exists() {
        return Some("there is no such file".to_owned());
    }
    let anchor = anchor?;
    let is_there = anchors(&read(&file)).contains(anchor);
    (!is_there).then(|| format!("there is no heading '{anchor}' in it"))
}

#[test]
fn links_lead_somewhere() {
    let mut wrong = Vec::new();
    let mut count = 0;
    for page in pages() {
        let text = read(&page);
        for line in prose(&text) {
            for target in links(line) {
                count += 1;
                if let Some(why) = dead(&page, &target) {
                    wrong.push(format!("{}: ({target}): {why}", page.display()));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(count > 50, "{count} links");
}

#[test]
fn a_dead_link_and_a_dead_anchor_are_seen() {
    let page = root().join("docs/guarantees.md");
    assert!(dead(&page, "no-such-page.md").is_some());
    assert!(dead(&page, "guarantees.md#no-such-heading").is_some());
    assert!(dead(&page, "#flushes").is_none() && dead(&page, "../README.md").is_none());
    assert_eq!(links("see [a](b.md#c) and `[x](y)`, [d](e)"), ["b.md#c", "e"]);
    let text = "# A `b` c: d\n## What a thread may still do\n## Twice\n## Twice\n    # no heading\n";
    let expected = ["a-b-c-d", "twice", "twice-1", "what-a-thread-may-still-do"];
    assert_eq!(anchors(text).into_iter().collect::<Vec<_>>(), expected);
}

/// Whether a line begins an item of a list.
fn is_item(line: &str) -> bool {
    let line = line.trim_start();
    let number = line.trim_start_matches(|c: char| c.is_ascii_digit());
    let is_numbered = number.len() < line.len() && (number.starts_with(". ") || number.starts_with(") "));
    is_numbered || ["* ", "- ", "+ "].iter().any(|mark| line.starts_with(mark))
}

/// Whether a line ends where a sentence does, or a colon stands.
fn ends_a_sentence(line: &str) -> bool {
    let line = line.trim_end().trim_end_matches(['"', '\'', ')', ']', '*', '_', '`']);
    line.ends_with(['.', '?', '!', ':'])
}

/// The lines of a page, counted from 1, that end within a sentence which goes on in the next line: not in code, tables, headings, comments
/// and definitions of links.
fn ends_within_sentences(text: &str) -> Vec<usize> {
    let (mut is_fenced, mut is_comment) = (false, false);
    let mut before: Option<&str> = None;
    let mut found = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let words = line.trim_start();
        if is_comment || words.starts_with("<!--") {
            is_comment = !line.contains("-->");
            before = None;
            continue;
        }
        if words.starts_with("```") {
            is_fenced = !is_fenced;
            before = None;
            continue;
        }
        let is_definition = words.starts_with('[') && words.contains("]: ");
        let is_prose = !is_fenced && !words.is_empty() && !words.starts_with(['#', '|', '<']) && !is_definition;
        // Code is indented behind an empty line, and nowhere else.
        let is_code = before.is_none() && line.starts_with("    ");
        if !is_prose || is_code {
            before = None;
            continue;
        }
        if !is_item(line) && before.is_some_and(|before| !ends_a_sentence(before)) {
            found.push(index);
        }
        before = Some(line);
    }
    found
}

#[test]
fn lines_of_prose_end_where_sentences_do() {
    let mut wrong = Vec::new();
    let mut count = 0;
    // The descriptions of experiments have a format of their own.
    for page in
        pages().into_iter().filter(|page| !page.starts_with(root().join("crates")) && !page.ends_with("experiment.md"))
    {
        count += 1;
        wrong.extend(ends_within_sentences(&read(&page)).iter().map(|line| format!("{}:{line}", page.display())));
    }
    assert!(wrong.is_empty(), "these lines end within a sentence: {}", wrong.join("\n"));
    assert!(count > 30, "{count} pages");
}

#[test]
fn a_line_that_ends_within_a_sentence_is_seen() {
    let text = "# A title\nOne (two\nthree).\n\n    code goes\n    on\n\n* an item\n* that goes\n  on: \"so.\"\n  And on\n\n| a |\n\
                ```\nmore\ncode\n```\n<!-- a\ncomment -->\n1. is\n2. it?\n[a]: b\n";
    assert_eq!(ends_within_sentences(text), [2, 9]);
}

/// The texts of a source, with `…` for what is filled in.
fn texts(source: &str) -> Vec<String> {
    let code: Vec<&str> =
        source.lines().map(|line| if line.trim_start().starts_with("//") { "" } else { line }).collect();
    let code = code.join("\n");
    let mut found = Vec::new();
    let mut rest = code.as_str();
    while let Some(start) = rest.find('"') {
        let body = &rest[start + 1..];
        let mut text = String::new();
        let mut is_filled = false;
        let mut characters = body.char_indices();
        let mut end = body.len();
        while let Some((at, character)) = characters.next() {
            match character {
                '"' => {
                    end = at + 1;
                    break;
                }
                '\\' => match characters.next().map(|(_, next)| next) {
                    Some('\n') => {
                        let indent = characters.as_str();
                        let skip = indent.len() - indent.trim_start().len();
                        for _ in 0..indent[..skip].chars().count() {
                            characters.next();
                        }
                    }
                    Some('n') | None => {}
                    Some(other) if !is_filled => text.push(other),
                    Some(_) => {}
                },
                '{' => {
                    is_filled = true;
                    text.push('…');
                }
                '}' => is_filled = false,
                other if !is_filled => text.push(other),
                _ => {}
            }
        }
        found.push(text);
        rest = &body[end..];
    }
    found
}

#[test]
fn texts_are_read_as_the_compiler_reads_them() {
    let source = "f(\"a \\\n    {b:#x}, \\\"c\\\"\", \"d\"); // \"\n    // \"not this\"\n";
    assert_eq!(texts(source)[..2], ["a …, \"c\"".to_owned(), "d".to_owned()]);
}

/// What stands in `code` in the first column of a page's tables.
fn quoted(page: &str) -> Vec<&str> {
    let rows = page.lines().filter_map(|line| line.strip_prefix("| "));
    rows.filter(|row| row.starts_with('`'))
        .flat_map(|row| row.split(" | ").next().unwrap().split('`').skip(1).step_by(2))
        .collect()
}

#[test]
fn sentences_that_are_explained_are_still_said() {
    let mut sources = Vec::new();
    files(&root().join("crates"), &[".rs"], &mut sources);
    let said: Vec<String> = sources
        .iter()
        .filter(|path| path.components().any(|part| part.as_os_str() == "src"))
        .flat_map(|path| texts(&read(path)))
        .collect();
    let said = said.join("\0");
    let page = read(&root().join("docs/troubleshooting.md"));
    let sentences = quoted(&page);
    let missing: Vec<&&str> = sentences.iter().filter(|sentence| !said.contains(**sentence)).collect();
    assert!(missing.is_empty(), "docs/troubleshooting.md explains what nothing says any more: {missing:#?}");
    assert!(sentences.len() > 500, "{}", sentences.len());
}

/// Crates whose words no operator reads: experiments, simulators, and what tests are made of.
const NOBODY_READS: [&str; 9] = [
    "lab",
    "guest-kit",
    "ssd-sim",
    "io-trace",
    "charts",
    "crash-explorer",
    "test-frontend",
    "test-storage",
    "journal-server",
];

/// What says in a sentence that a person is to do something.
const ASKS: [&str; 23] = [
    "mend ",
    "end its VMM",
    "end the VM",
    "end that VM",
    "end it,",
    "end that process",
    "run 'amberlog",
    "ask again",
    "try again",
    "remove it",
    "stop it",
    "shut it down",
    "; install",
    "put it back",
    "report it",
    "; name ",
    "another path",
    "run e2fsck",
    " or say ",
    "start it",
    "check again",
    "wait for that",
    "give the disk ",
];

/// The part of a source that is not its tests.
fn product(source: &str) -> &str {
    source.split("#[cfg(test)]\nmod tests").next().unwrap()
}

/// Whether enough of a text stays the same to be looked for: four words besides the names that log lines begin with. What goes on with
/// another sentence is found by that one.
fn can_be_looked_for(text: &str) -> bool {
    let words = text
        .trim_start_matches("vm …: ")
        .trim_start_matches("disk …: ")
        .split(|c: char| !c.is_alphabetic() && c != '\'');
    !text.starts_with([',', ';']) && words.filter(|word| word.len() > 1).count() >= 4
}

/// The sentences of a source that a person has to find on docs/troubleshooting.md: what it logs as a warning or an error, and what asks
/// for something to be done.
fn for_people(source: &str) -> BTreeSet<String> {
    let source = product(source);
    let logged = ["log::error!(", "log::warn!("].into_iter().flat_map(|call| {
        source.split(call).skip(1).filter_map(|rest| {
            let statement = rest.split(";\n").next().unwrap();
            texts(statement).into_iter().next()
        })
    });
    let asks = |text: &String| ASKS.iter().any(|ask| text.contains(ask));
    let all = logged.chain(texts(source).into_iter().filter(asks));
    all.filter(|text| can_be_looked_for(text)).collect()
}

#[test]
fn what_a_source_says_to_people_is_seen() {
    let source = "log::warn!(\n    \"disk {}: nobody has it any more\",\n    x\n);\nbail!(\"{y} is full: mend that, and reload\");\n\
                  log::error!(\"vm {}: {error}\");\nlog::info!(\"all of this is as ever\");\n\
                  #[cfg(test)]\nmod tests {\n    log::warn!(\"only a test says this here\");\n}\n";
    let said: Vec<_> = for_people(source).into_iter().collect();
    assert_eq!(said, ["disk …: nobody has it any more", "… is full: mend that, and reload"]);
}

/// The other way round: what asks for a person is explained.
#[test]
fn sentences_for_people_are_explained() {
    let page = read(&root().join("docs/troubleshooting.md"));
    let sentences = quoted(&page);
    let mut sources = Vec::new();
    files(&root().join("crates"), &[".rs"], &mut sources);
    let (mut missing, mut count) = (Vec::new(), 0);
    for path in &sources {
        let parts: Vec<_> = path.components().map(|part| part.as_os_str().to_str().unwrap()).collect();
        let at = parts.iter().rposition(|part| *part == "crates").unwrap();
        let is_product = parts[at + 2] == "src" && !parts.contains(&"tests") && !path.ends_with("tests.rs");
        if !is_product || NOBODY_READS.contains(&parts[at + 1]) {
            continue;
        }
        for said in for_people(&read(path)) {
            count += 1;
            if !sentences.iter().any(|sentence| said.contains(sentence)) {
                missing.push(format!("{}: {said}", parts[at + 1..].join("/")));
            }
        }
    }
    assert!(missing.is_empty(), "docs/troubleshooting.md has no row for {missing:#?}");
    assert!(count > 150, "{count}");
}

/// The variables that a source reads: ours wherever they are named, others where they are asked for.
fn variables(source: &str) -> BTreeSet<String> {
    let is_part = |c: &char| c.is_ascii_uppercase() || c.is_ascii_digit() || *c == '_';
    let name_at = |text: &str| text.chars().take_while(is_part).collect::<String>();
    let ours = source.match_indices("AMBERLOG_").map(|(at, _)| name_at(&source[at..]));
    let asked = ["env::var(\"", "env::var_os(\"", "var_os(\"", "named(\""].into_iter();
    let asked = asked.flat_map(|call| source.split(call).skip(1).map(name_at).collect::<Vec<_>>());
    ours.chain(asked).filter(|name| name.len() > 1 && !name.ends_with('_')).collect()
}

#[test]
fn every_variable_of_the_environment_is_described() {
    let mut sources = Vec::new();
    for directory in ["crates", "guest", "fuzz", "scripts"] {
        files(&root().join(directory), &[".rs", ".sh"], &mut sources);
    }
    sources.push(root().join("Makefile"));
    sources.retain(|path| !path.ends_with("guest-kit/tests/pages.rs"));
    let mut read_by = BTreeMap::new();
    for path in &sources {
        for name in variables(&read(path)) {
            read_by.entry(name).or_insert_with(|| path.display().to_string());
        }
    }
    // Cargo's own say where a program's sources and its tools are, and how it is built; the shell's are its own.
    read_by.retain(|name, _| !["CARGO", "IMAGE", "PROFILE", "SOCKET", "TRY"].contains(&name.as_str()));
    let page = read(&root().join("docs/command-line.md"));
    let described: BTreeSet<&str> = quoted(&page).into_iter().collect();
    let missing: Vec<_> = read_by.iter().filter(|(name, _)| !described.contains(name.as_str())).collect();
    assert!(missing.is_empty(), "docs/command-line.md does not describe {missing:#?}");
    let all: String = sources.iter().map(|path| read(path)).collect();
    for name in described.iter().filter(|name| name.chars().all(|c| c.is_ascii_uppercase() || c == '_')) {
        assert!(all.contains(name), "docs/command-line.md describes {name}, which nothing reads");
    }
    assert!(read_by.len() > 20, "{read_by:?}");
}

/// Every file, message and mark of ours begins with letters that can be looked for; docs/inside/formats.md has them all.
#[test]
fn every_magic_string_is_on_the_page_of_formats() {
    let page = read(&root().join("docs/inside/formats.md"));
    let mut sources = Vec::new();
    files(&root().join("crates"), &[".rs"], &mut sources);
    let mut found = BTreeSet::new();
    for path in sources.iter().filter(|path| path.components().any(|part| part.as_os_str() == "src")) {
        let text = read(path);
        for after in text.split("b\"AMB").skip(1) {
            let name = after.split('"').next().unwrap();
            if name.chars().all(|c| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '-') {
                found.insert(format!("AMB{name}"));
            }
        }
    }
    let missing: Vec<_> = found.iter().filter(|magic| !page.contains(&format!("`{magic}`"))).collect();
    assert!(missing.is_empty(), "docs/inside/formats.md does not describe {missing:?}");
    assert!(found.len() >= 9, "{found:?}");
}

/// The rows of a table that begins with these cells, each as its cells.
fn table<'a>(lines: impl Iterator<Item = &'a str>, first: &str) -> Vec<Vec<&'a str>> {
    lines
        .map(str::trim)
        .skip_while(|line| !line.starts_with(first))
        .skip(2)
        .take_while(|line| line.starts_with('|'))
        .map(|line| line.trim_matches('|').split('|').map(str::trim).collect())
        .collect()
}

/// What ARCHITECTURE.md says that storage says of a log is the table of the module that reads it.
#[test]
fn what_storage_says_is_on_both_pages_the_same() {
    const FIRST: &str = "| row | superblock | `s_start` |";
    let said = [
        ("Damaged", "damaged"),
        ("NoJournal", "no journal"),
        ("Aged", "live and good by itself"),
        ("LeftToGuest", "live, and left to its guest"),
        ("Live", "live, in its own place"),
        ("Held", "held in memory, dropped (`discard`), or in a region of NVM"),
        ("Stale", "stale"),
        ("Remote", "on a journal server"),
        ("Empty", "empty"),
        ("Error", "an error"),
    ];
    let page = read(&root().join("ARCHITECTURE.md"));
    let source = read(&root().join("crates/placement/src/stored.rs"));
    let on_page = table(page.lines(), FIRST);
    let in_source = table(source.lines().map(|line| line.trim_start_matches("//!")), FIRST);
    assert!(in_source.len() > 10 && on_page.len() == in_source.len(), "{on_page:#?} {in_source:#?}");
    for (page, source) in on_page.iter().zip(&in_source) {
        let ([.., words], [.., name]) = (&page[..], &source[..]) else { panic!("a row has cells") };
        assert_eq!(page[..page.len() - 1], source[..source.len() - 1], "ARCHITECTURE.md and stored.rs");
        let name = name.strip_prefix("[`Says::").and_then(|rest| rest.split('`').next()).expect("what a row says");
        let means = said.iter().find(|(of, _)| *of == name).unwrap_or_else(|| panic!("no words for {name}")).1;
        assert!(words.starts_with(means), "ARCHITECTURE.md says '{words}' and stored.rs {name}");
    }
}

/// docs/inside/proof.md says of each rule where production asserts it, and that is there: not in a comment, nor in what only tests build.
#[test]
fn rules_are_asserted_where_the_page_says() {
    let page = read(&root().join("docs/inside/proof.md"));
    let rows = table(page.lines(), "| rule | what is asserted |");
    for row in &rows {
        let [rule, _, place, said, _] = row[..] else { panic!("{row:?}") };
        let unquoted = |cell: &str| cell.trim_matches('`').to_owned();
        let source = read(&root().join("crates").join(unquoted(place)));
        let built = source.split("mod tests").next().unwrap();
        let code: Vec<&str> = built.lines().filter(|line| !line.trim_start().starts_with("//")).collect();
        // A text may go on in the next line.
        let code: String = code.iter().map(|line| line.trim_start().trim_end_matches('\\')).collect();
        let at = code.find(&unquoted(said)).unwrap_or_else(|| panic!("{place} does not say {said}"));
        let is_debug = code[..at].rfind("debug_assert").is_some_and(|debug| !code[debug..at].contains(';'));
        assert!(!is_debug, "{place} asserts rule {rule} in some builds only: {said}");
    }
    let said_of: BTreeSet<&str> = rows.iter().map(|row| row[0]).collect();
    let excused = page.lines().find(|line| line.starts_with("Rules (a), (b)")).expect("which are not asserted");
    for rule in ["1", "2", "3", "4", "5", "6", "7", "(a)", "(b)", "(c)", "(d)", "(e)", "(f)", "(g)", "(h)"] {
        assert!(said_of.contains(rule) != excused.contains(rule), "where rule {rule} is asserted is not said");
    }
}
