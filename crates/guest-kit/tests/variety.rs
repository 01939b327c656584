//! A few cases of `make variety`: kinds of file systems, journals and partitions, and a file system that grows while it works.

use std::process::Command;

#[test]
fn a_variety_of_guests_keeps_what_was_acknowledged() {
    let variety = Command::new(env!("CARGO_BIN_EXE_variety"))
        .args(["--quick", "--rounds", "1", "--seed", "7"])
        .output()
        .expect("variety starts");
    let printed = String::from_utf8_lossy(&variety.stdout);
    let said = String::from_utf8_lossy(&variety.stderr);
    assert!(variety.status.success(), "{printed}\n{said}");
    let summary = printed.lines().find(|line| line.contains(" runs: ")).unwrap_or_default();
    assert!(summary.starts_with("6 runs: 6 ok,"), "{printed}");
    assert!(!summary.ends_with(" 0 acknowledged groups"), "the guests did nothing: {summary}");
}

/// Also where the VMM ends while the process that serves it has just died.
#[test]
fn so_it_does_while_those_who_serve_it_are_killed() {
    let variety = Command::new(env!("CARGO_BIN_EXE_variety"))
        .args(["--cases", "online/resize2fs,online/fstrim", "--seed", "100", "--placement", "durable", "--end", "qemu"])
        .args(["--worker-kills", "30", "--control", "failed"])
        .output()
        .expect("variety starts");
    let printed = String::from_utf8_lossy(&variety.stdout);
    assert!(variety.status.success(), "{printed}\n{}", String::from_utf8_lossy(&variety.stderr));
    assert!(printed.contains("2 runs: 2 ok,") && printed.contains("workers killed under their guests: "), "{printed}");
}

#[test]
fn what_is_asked_for_wrongly_is_a_sentence() {
    let variety = |words: &[&str]| Command::new(env!("CARGO_BIN_EXE_variety")).args(words).output().expect("it starts");
    let list = variety(&["--list"]);
    let names = String::from_utf8_lossy(&list.stdout).into_owned();
    assert!(list.status.success() && names.contains("again/abort\n") && names.contains("random/*\n"), "{names}");
    for (words, expected) in [
        (&["--cases", "nothing-of-the-kind"][..], "--list names them"),
        (&["--placement", "moon"], "it must be one of retain, copy, storage, nvm, durable, durable-0"),
        (&["--round", "3"], "--round is not an option"),
    ] {
        let output = variety(words);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(2) && said.contains(expected), "{words:?}: {said}");
    }
}
