//! Measurements without a guest, made by programs of other crates: what a commit costs, and the
//! plain data path against qemu-storage-daemon. Their output is shown as it is and read for figures.

use crate::figure::{Basis, Figure, Limit};
use crate::options::Options;
use crate::{Outcome, sentence};
use guest_kit::program;
use serde_json::{Value, json};
use std::path::Path;
use std::process::Command;

fn cargo(words: &[&str]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(words).current_dir(program::workspace());
    command
}

/// Protection alone, and a commit by protecting against a commit by copying.
pub fn commit_cost() -> Outcome<(Vec<Figure>, Value)> {
    eprintln!("32 MiB commits, without a guest");
    let mut command = cargo(&["run", "--release", "--quiet", "-p", "journal-area", "--example", "commit-cost"]);
    let output = match program::run(&mut command, &[0]) {
        Ok(output) => output,
        Err(error) => {
            let text = error.to_string();
            eprintln!("{text}");
            let why = if text.contains("userfaultfd") { "userfaultfd is not permitted" } else { "commit-cost failed" };
            let missing = |name: &str, unit, limit| Figure::missing(name, unit, Limit::AtMost(limit), why);
            let figures = vec![
                missing("commit: protection", "µs a page", 0.5),
                missing("commit: CPU time, retain / copy", "", 1.0),
            ];
            return Ok((figures, json!({ "error": text })));
        }
    };
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    print!("\n{text}");
    let mut figures = Vec::new();
    for line in text.lines() {
        if let Some(rest) = line.trim().strip_prefix("protection alone") {
            let value = first_number(rest).ok_or("commit-cost: a protection without a number")?;
            figures.push(Figure::new("commit: protection", value, "µs a page", Limit::AtMost(0.5), Basis::Time));
        }
        if let Some((kind, rest)) = line.trim().strip_prefix("commit, checksum ").and_then(|rest| rest.split_once(':'))
        {
            let value = rest.split_once("ratio").and_then(|(_, rest)| first_number(rest));
            let value = value.ok_or("commit-cost: a commit without a ratio")?;
            let name = format!("commit: CPU time, retain / copy, checksum {kind}");
            figures.push(Figure::new(name, value, "", Limit::AtMost(1.0), Basis::Time));
        }
    }
    if figures.len() < 2 {
        return Err(format!("commit-cost printed something else than its figures:\n{text}"));
    }
    Ok((figures, Value::String(text)))
}

/// A commit on emulated persistent memory against a copy past the cache, on the same memory (example `nvm-commit-cost`).
pub fn nvm_commit_cost() -> Outcome<(Vec<Figure>, Value)> {
    eprintln!("commits to persistent memory, without a guest");
    let mut command = cargo(&["run", "--release", "--quiet", "-p", "nvm-journal", "--example", "nvm-commit-cost"]);
    let output = program::run(&mut command, &[0]).map_err(sentence)?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    print!("\n{text}");
    let mut figures = Vec::new();
    for line in text.lines().filter(|line| line.contains(" yes ")) {
        // Name of the medium, yes, blocks, bytes changed, a time, a time, the ratio.
        let Some((medium, rest)) = line.split_once(" yes ") else { continue };
        let words: Vec<&str> = rest.split_whitespace().collect();
        let (Some(blocks), Some(changed)) = (words.first(), words.get(1)) else { continue };
        let ratio = words.last().and_then(|word| word.parse().ok());
        let ratio = ratio.ok_or("nvm-commit-cost: a line without a ratio")?;
        let limit = if *changed == "64" { 0.2 } else { 1.3 };
        let name = format!("nvm commit: {changed} bytes changed, {blocks} blocks, memory {}", medium.trim());
        figures.push(Figure::new(name, ratio, "of a copy", Limit::AtMost(limit), Basis::Time));
    }
    if figures.is_empty() {
        return Err(format!("nvm-commit-cost printed something else than its figures:\n{text}"));
    }
    Ok((figures, Value::String(text)))
}

fn first_number(text: &str) -> Option<f64> {
    text.split_whitespace().find_map(|word| word.parse().ok())
}

/// The plain data path: requests per second against qemu-storage-daemon's.
pub fn data_path(options: &Options, directory: &Path) -> Outcome<(Vec<Figure>, Value)> {
    let limit = Limit::AtLeast(1.0);
    if program::find_program("qemu-storage-daemon").is_err() {
        let why = "qemu-storage-daemon is not installed";
        return Ok((vec![Figure::missing("data path, ours / qemu-storage-daemon", "", limit, why)], Value::Null));
    }
    let (seconds, rounds, size) = if options.quick { ("0.3", 1, "64") } else { ("2", options.rounds.max(3), "512") };
    eprintln!("the plain data path against qemu-storage-daemon");
    let mut command = cargo(&["bench", "--quiet", "-p", "block-device", "--bench", "data-path", "--"]);
    command.arg("--dir").arg(directory).args(["--seconds", seconds, "--size-mib", size]);
    command.args(["--rounds", &rounds.to_string()]);
    let output = program::run(&mut command, &[0]).map_err(sentence)?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    print!("\n{text}");
    let figures: Vec<Figure> = text
        .lines()
        .filter_map(rate_line)
        .map(|(name, ours, rival, ratio)| {
            Figure::new(format!("data path: {name}, ours / qemu-storage-daemon"), ratio, "", limit, Basis::Time)
                .note(format!("{ours} / {rival} requests a second"))
        })
        .collect();
    if figures.is_empty() {
        return Err(format!("the data-path bench printed no figures:\n{text}"));
    }
    Ok((figures, Value::String(text)))
}

/// A line of the data-path bench: a name of words, then ours, the rival's, their ratio, and more.
fn rate_line(line: &str) -> Option<(String, String, String, f64)> {
    let line = line.strip_prefix("random").map(|_| line).or_else(|| line.strip_prefix("sequential").map(|_| line))?;
    let mut words: Vec<&str> = line.split_whitespace().collect();
    // The name ends with the depth; everything behind it is a number.
    let depth = words.iter().position(|word| *word == "depth")?;
    let numbers = words.split_off((depth + 2).min(words.len()));
    let ratio = numbers.get(2)?.parse().ok()?;
    Some((words.join(" "), (*numbers.first()?).to_owned(), (*numbers.get(1)?).to_owned(), ratio))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_the_data_path_are_read() {
        let line = "random read 4K depth 32            100000        80000   1.25      10.0      11.0";
        let (name, ours, rival, ratio) = rate_line(line).unwrap();
        assert_eq!((name.as_str(), ours.as_str(), rival.as_str()), ("random read 4K depth 32", "100000", "80000"));
        assert!((ratio - 1.25).abs() < 1e-9);
        assert!(rate_line("image in /tmp, cache direct").is_none());
        assert!(rate_line("random").is_none());
    }
}
