//! What is measured without guests: the time to protect pages, and sizes of what we built, as the paper's Table IV gives the sizes of its kernel and VMM changes: code and data of the
//! programs, from the linker's sections, and lines of the crates that hold a journal.

use crate::error::{Error, FileContext, Result};
use guest_kit::program;
use std::collections::BTreeMap;
use std::path::Path;
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
        let lines = lines_below(&program::workspace().join("crates").join(name).join("src"))?;
        fields.insert(format!("lines_{}", name.replace('-', "_")), lines);
        all += lines;
    }
    fields.insert("lines".to_owned(), all);
    Ok(fields)
}

/// Lines that are neither blank, comment, nor in a module of tests.
fn lines_below(directory: &Path) -> Result<f64> {
    let mut count = 0.0;
    for entry in std::fs::read_dir(directory).at("read", directory)? {
        let path = entry.at("read", directory)?.path();
        if path.is_dir() {
            count += lines_below(&path)?;
        } else if path.extension().is_some_and(|extension| extension == "rs")
            && path.file_stem().is_none_or(|stem| stem != "tests")
        {
            let text = std::fs::read_to_string(&path).at("read", &path)?;
            let code = text.split("#[cfg(test)]").next().unwrap_or_default();
            let lines = code.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with("//"));
            count += lines.map(|_| 1.0).sum::<f64>();
        }
    }
    Ok(count)
}
