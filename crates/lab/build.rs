//! The commit that the lab is built of, which its results name wherever the program runs: what a checkout comes to while a run goes on is
//! another program's. Built of a source tarball, or where there is no git, it knows its version only.

use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let version = env!("CARGO_PKG_VERSION");
    let Some(commit) = commit(Path::new("../..")) else {
        println!("cargo::rustc-env=AMBERLOG_LAB_VERSION={version}");
        return;
    };
    if let Some(log) = git(Path::new("."), ["rev-parse", "--git-path", "logs/HEAD"]) {
        println!("cargo::rerun-if-changed={log}");
    }
    // What is measured with is built for release: that is what has to know whether something was changed after its commit.
    if std::env::var("PROFILE").is_ok_and(|profile| profile == "release") {
        println!("cargo::rerun-if-changed=..");
    }
    println!("cargo::rustc-env=AMBERLOG_LAB_COMMIT={commit}");
    println!("cargo::rustc-env=AMBERLOG_LAB_VERSION={version} ({commit})");
}

/// The commit of a checkout, with `-dirty` where something was changed since; `None` where `root` is none. A directory that was unpacked in
/// another checkout has a commit above it that is not its own.
pub fn commit(root: &Path) -> Option<String> {
    let top = git(root, ["rev-parse", "--show-toplevel"])?;
    let is_own = Path::new(&top).canonicalize().ok()? == root.canonicalize().ok()?;
    is_own.then(|| git(root, ["describe", "--always", "--dirty", "--abbrev=12"]))?
}

fn git<const N: usize>(directory: &Path, words: [&str; N]) -> Option<String> {
    let output = Command::new("git").current_dir(directory).args(words.map(OsStr::new)).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?.trim().to_owned();
    (output.status.success() && !text.is_empty()).then_some(text)
}
