//! Which commit a program is of: a result names it wherever the program was copied to.

#[allow(dead_code)]
#[path = "../../build.rs"]
mod script;

use std::path::Path;
use std::process::Command;

fn git(directory: &Path, words: &[&str]) {
    let who = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"];
    let output = Command::new("git").current_dir(directory).args(who).args(words).output().unwrap();
    assert!(output.status.success(), "git {words:?}: {}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn a_checkout_has_a_commit_and_a_tarball_in_somebody_elses_checkout_has_none() {
    if guest_kit::program::find_program("git").is_err() {
        eprintln!("not tried: there is no git");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let (own, unpacked) = (directory.path(), directory.path().join("amberlog-0.2.0"));
    assert_eq!(script::commit(own), None);
    git(own, &["init", "-q"]);
    std::fs::write(own.join("source"), "one").unwrap();
    git(own, &["add", "source"]);
    git(own, &["commit", "-q", "-m", "first"]);
    std::fs::create_dir(&unpacked).unwrap();
    let first = script::commit(own).expect("a checkout");
    assert!(first.len() == 12 && first.bytes().all(|byte| byte.is_ascii_hexdigit()), "{first}");
    assert_eq!(script::commit(&unpacked), None, "the checkout around it is another program's");
    std::fs::write(own.join("source"), "two").unwrap();
    assert_eq!(script::commit(own).as_deref(), Some(format!("{first}-dirty").as_str()));
}

/// A frozen copy, where there is neither a checkout nor git.
#[test]
fn a_copy_of_the_program_knows_the_commit_that_it_was_built_of() {
    let directory = tempfile::tempdir().unwrap();
    let copy = directory.path().join("frozen");
    std::fs::copy(env!("CARGO_BIN_EXE_amberlog-lab"), &copy).unwrap();
    let output = Command::new(&copy).arg("--version").current_dir(directory.path()).env_clear().output().unwrap();
    let told = String::from_utf8(output.stdout).unwrap();
    let version = env!("CARGO_PKG_VERSION");
    let expected = match script::commit(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")) {
        Some(_) => format!("amberlog-lab {version} ({})\n", lab::machine::commit()),
        None => format!("amberlog-lab {version}\n"),
    };
    assert_eq!(told, expected);
    assert_eq!(lab::machine::commit().starts_with("version "), !told.contains('('));
}
