//! What is measured without guests: the time to protect pages, and sizes of what we built, as the paper's Table IV gives the sizes of its kernel and VMM changes: code and data of the
//! programs, from the linker's sections, and lines of the crates that hold a journal.

use crate::error::{Error, FileContext, Result};
use guest_kit::program;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Crates that do what the paper's changes to Xen, ext3 and domain 0 do.
const CRATES: [&str; 5] = ["jbd2", "guest-memory", "journal-area", "placement", "recovery"];

/// Protection of a batch of written pages in one call, in µs a page; of this process's own memory, as a VMM's.
///
/// # Errors
/// When userfaultfd is not permitted, or there is no checkout to build the measurement from.
pub fn protect(mib: u64) -> Result<BTreeMap<String, f64>> {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(["run", "--release", "--quiet", "-p", "journal-area", "--example", "commit-cost", "--"]);
    let output = program::run(command.arg(mib.to_string()).current_dir(program::workspace()), &[0])?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let value = text
        .split_once("protection alone")
        .and_then(|(_, rest)| rest.split_whitespace().next()?.parse::<f64>().ok())
        .ok_or_else(|| Error::Told(format!("commit-cost printed something else than its figure: {text}")))?;
    Ok(BTreeMap::from([("protect_us".to_owned(), value)]))
}

/// Code and data in KB of the command and the library in the VMM, and lines of code without tests.
///
/// # Errors
/// When a program is not built, or binutils are not installed.
pub fn measure() -> Result<BTreeMap<String, f64>> {
    let mut fields = BTreeMap::new();
    let shim = program::workspace_binary("libamberlog_vmm_shim.so");
    for (name, path) in [("amberlog", program::workspace_binary("amberlog")), ("vmm_shim", shim)] {
        let output = program::run(program::command("size")?.arg(path?), &[0])?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let numbers: Vec<f64> =
            text.lines().nth(1).unwrap_or_default().split_whitespace().filter_map(|word| word.parse().ok()).collect();
        if let [text_bytes, data_bytes, ..] = numbers[..] {
            fields.insert(format!("{name}_code_kb"), text_bytes / 1024.0);
            fields.insert(format!("{name}_data_kb"), data_bytes / 1024.0);
        }
    }
    let mut all = 0.0;
    for name in CRATES {
        let lines = lines_below(&program::workspace().join("crates").join(name).join("src"), &mut BTreeSet::new())?;
        fields.insert(format!("lines_{}", name.replace('-', "_")), lines);
        all += lines;
    }
    fields.insert("lines".to_owned(), all);
    Ok(fields)
}

/// Lines that are neither blank, comment, nor there for tests alone. `for_tests` are the modules that are, by path without extension.
fn lines_below(directory: &Path, for_tests: &mut BTreeSet<PathBuf>) -> Result<f64> {
    let (mut files, mut directories) = (Vec::new(), Vec::new());
    for entry in std::fs::read_dir(directory).at("read", directory)? {
        let path = entry.at("read", directory)?.path();
        if path.is_dir() {
            directories.push(path);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = std::fs::read_to_string(&path).at("read", &path)?;
            let (lines, modules) = code_lines(&text);
            // Modules of `name.rs` lie in `name`, those of a directory's own file beside it.
            let stem = path.file_stem().and_then(OsStr::to_str).unwrap_or_default();
            let inside = if matches!(stem, "mod" | "lib" | "main") { directory } else { &path.with_extension("") };
            for_tests.extend(modules.iter().map(|name| inside.join(name)));
            files.push((path, lines));
        }
    }
    let counted = files.iter().filter(|(path, _)| !for_tests.contains(&path.with_extension("")));
    let mut count = counted.map(|(_, lines)| *lines as f64).sum();
    for path in directories {
        if !for_tests.contains(&path) {
            count += lines_below(&path, for_tests)?;
        }
    }
    Ok(count)
}

/// Lines of code in a file as rustfmt has it, without items that are compiled for tests alone, and the modules among these that have a
/// file of their own.
fn code_lines(text: &str) -> (usize, Vec<String>) {
    let (mut count, mut modules) = (0, Vec::new());
    let mut lines = text.lines().filter(|line| !line.trim().is_empty() && !line.trim_start().starts_with("//"));
    while let Some(line) = lines.next() {
        let trimmed = line.trim_start();
        if !trimmed.starts_with("#[cfg(test)]") && !trimmed.starts_with("#[cfg(any(test") {
            count += 1;
            continue;
        }
        let indent = line.len() - trimmed.len();
        let is_at = |line: &str| line.len() - line.trim_start().len() == indent;
        // Further attributes, the item's head, and what is in its braces, to the line that closes them.
        let Some(head) = lines.by_ref().find(|line| !line.trim_start().starts_with("#[")) else { break };
        if let Some(name) = head.trim().trim_start_matches("pub(crate) ").strip_prefix("mod ") {
            modules.extend(name.strip_suffix(';').map(str::to_owned));
        }
        if !head.ends_with([';', ',', '}']) {
            // A head of several lines ends with `) -> T {`.
            let closes = |line: &str| line.trim_start().starts_with(['}', ')', ']']) && !line.ends_with('{');
            let _ = lines.by_ref().find(|line| is_at(line) && closes(line));
        }
    }
    (count, modules)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_for_tests_is_not_counted() {
        let text = "\
//! A module.
use std::io;

#[cfg(test)]
mod model;
#[cfg(any(test, feature = \"simulate\"))]
pub(crate) mod simulated;

struct A {
    one: u8,
    #[cfg(test)]
    two: u8,
}

impl A {
    #[cfg(test)]
    #[track_caller]
    fn three(
        &self,
    ) -> u8 {
        if true {
            1
        }
    }

    fn four(&self) {}
}

#[cfg(test)]
mod tests {
    fn five() {}
}
const SIX: u8 = 6;
";
        // use, struct, one, }, impl, four, }, SIX.
        assert_eq!(code_lines(text), (8, vec!["model".to_owned(), "simulated".to_owned()]));
    }
}
