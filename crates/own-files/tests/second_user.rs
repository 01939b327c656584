//! Tries of another user of the host, a real one: needs root, and says so where it is not.

use own_files::{Error, How, OwnDirectory, create_output};
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

const NOBODY: u32 = 65534;

fn is_root() -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        println!("skipped: a second user can only be played by root");
    }
    is_root
}

fn nobody(directory: &Path, script: &str) -> Command {
    let mut command = Command::new("/bin/sh");
    command.arg("-c").arg(script).current_dir(directory).uid(NOBODY).gid(NOBODY).stderr(Stdio::null());
    command
}

fn as_nobody(directory: &Path, script: &str) {
    let status = nobody(directory, script).status().expect("a shell");
    assert!(status.success(), "'{script}' as user {NOBODY}: {status}");
}

fn set_mode(path: &Path, mode: u32) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).expect("its mode");
}

/// A directory like /dev/shm: anybody may make something in it, and remove only what is his.
fn shared() -> tempfile::TempDir {
    let directory = tempfile::tempdir().expect("a directory");
    set_mode(directory.path(), 0o1777);
    directory
}

/// Something of root's that nobody else may touch.
fn victim(shared: &Path) -> PathBuf {
    let victim = shared.join("victim");
    std::fs::create_dir(&victim).expect("a directory");
    set_mode(&victim, 0o700);
    std::fs::write(victim.join("file"), "dear").expect("a file");
    victim
}

fn refused<T: std::fmt::Debug>(outcome: Result<T, Error>, expected: &str) {
    match outcome {
        Err(error @ Error::NotOurs { .. }) if error.to_string().contains(expected) => {}
        other => panic!("refused with '{expected}' was expected, not {other:?}"),
    }
}

#[test]
fn a_directory_of_somebody_else_is_not_used() {
    if !is_root() {
        return;
    }
    let shared = shared();
    let at = |name: &str| shared.path().join(name);
    let victim = victim(shared.path());
    as_nobody(shared.path(), "mkdir -m 700 theirs; mkdir -m 777 open; ln -s victim link; ln -s nowhere dangling");
    for open in [OwnDirectory::open, OwnDirectory::open_or_make] {
        refused(open(&at("theirs")), "belongs to user 65534");
        refused(open(&at("open")), "belongs to user 65534");
        refused(open(&at("link")), "it is a link");
        refused(open(&at("dangling")), "it is a link");
        refused(open(&at("theirs/below")), "who can exchange what lies in it");
    }
    refused(OwnDirectory::open_or_make(&at("theirs/below/that")), "who can exchange what lies in it");
    assert!(!at("theirs/below").exists() && !at("nowhere").exists(), "nothing was made in a place of theirs");
    // Ours, but in the reach of others.
    for mode in [0o777, 0o1777, 0o770, 0o750, 0o701] {
        set_mode(&victim, mode);
        refused(OwnDirectory::open(&victim), "others can enter it");
    }
    set_mode(&victim, 0o750);
    OwnDirectory::open_allowing(&victim, 0o050).expect("the group may look, if that is wanted");
    set_mode(&victim, 0o770);
    refused(OwnDirectory::open_allowing(&victim, 0o070), "others can enter it");
    // Ours and closed, in a directory in which others may exchange it.
    set_mode(&victim, 0o700);
    OwnDirectory::open(&victim).expect("ours");
    // As a place for directories of ours, a shared one will do in which nobody can exchange them.
    let place = OwnDirectory::open_place(shared.path()).expect("sticky");
    assert!(place.directory("victim").is_ok());
    refused(place.directory("theirs"), "belongs to user 65534");
    refused(OwnDirectory::open_place(&at("theirs")), "belongs to user 65534");
    refused(OwnDirectory::open_place(&at("link")), "it is a link");
    set_mode(shared.path(), 0o777);
    refused(OwnDirectory::open_place(shared.path()), "others can write to it");
    refused(OwnDirectory::open(&victim), "others can write to it");
}

#[test]
fn what_is_missing_is_made_for_us_alone() {
    let base = tempfile::tempdir().expect("a directory");
    let path = base.path().join("a/b/c");
    let directory = OwnDirectory::open_or_make(&path).expect("made");
    assert_eq!(directory.path(), path.canonicalize().expect("there"));
    for path in [base.path().join("a"), base.path().join("a/b"), path.clone()] {
        assert_eq!(path.metadata().expect("there").mode() & 0o7777, 0o700);
    }
    assert!(OwnDirectory::open_or_make(&path).is_ok(), "and is there the next time");
    assert!(OwnDirectory::open(&base.path().join("none")).is_err_and(|error| error.is_missing()));
    assert!(directory.make_new("new").expect("made").is_some());
    assert!(directory.make_new("new").expect("looked at").is_none(), "once");
}

#[test]
fn a_file_that_others_can_have_put_there_is_not_opened() {
    let base = tempfile::tempdir().expect("a directory");
    set_mode(base.path(), 0o700);
    let directory = OwnDirectory::open(base.path()).expect("ours");
    let at = |name: &str| base.path().join(name);
    std::fs::write(at("dear"), "dear").expect("a file");
    std::os::unix::fs::symlink("dear", at("link")).expect("a link");
    std::os::unix::fs::symlink("nowhere", at("dangling")).expect("a link");
    std::fs::write(at("linked"), "linked").expect("a file");
    std::fs::hard_link(at("linked"), at("hard")).expect("a second name");
    let fifo = Command::new("mkfifo").arg(at("pipe")).status().expect("mkfifo");
    assert!(fifo.success());
    let _socket = std::os::unix::net::UnixListener::bind(at("socket")).expect("a socket");
    std::fs::create_dir(at("directory")).expect("a directory");
    for how in [How::Read, How::Write, How::WriteOrMake] {
        for name in ["link", "dangling"] {
            refused(directory.file(name, how), "it is a link");
        }
        refused(directory.file("hard", how), "2 names");
        // None of these is waited for.
        refused(directory.file("pipe", how), "no plain file");
        refused(directory.file("socket", how), "no plain file");
        assert!(directory.file("directory", how).is_err());
        for name in ["../dear", "/etc/passwd", "..", ".", "", "a/b"] {
            refused(directory.file(name, how), "is no name of a file in it");
        }
    }
    for name in ["dear", "link", "dangling", "hard", "pipe"] {
        assert!(directory.file(name, How::MakeNew).is_err(), "{name} is taken");
    }
    assert!(!at("nowhere").exists());
    if is_root() {
        std::os::unix::fs::chown(at("dear"), Some(NOBODY), Some(NOBODY)).expect("given away");
        refused(directory.file("dear", How::Read), "belongs to user 65534");
        let device = rustix::fs::makedev(1, 3);
        let mode = rustix::fs::Mode::from_raw_mode(0o600);
        let kind = rustix::fs::FileType::CharacterDevice;
        match rustix::fs::mknodat(rustix::fs::CWD, at("null"), kind, mode, device) {
            Ok(()) => refused(directory.file("null", How::Read), "no plain file"),
            Err(error) => println!("no device can be made here: {error}"),
        }
    }
    // What is written takes the place of a link, and leaves alone what that leads to.
    std::os::unix::fs::symlink("linked", at("new.new")).expect("a link");
    std::os::unix::fs::symlink("linked", at("new")).expect("a link");
    directory.write("new", b"new").expect("written");
    assert_eq!(std::fs::read_to_string(at("linked")).expect("there"), "linked");
    assert_eq!(directory.read("new", 3).expect("read").as_deref(), Some(&b"new"[..]));
    assert_eq!(at("new").metadata().expect("there").mode() & 0o777, 0o600);
    refused(directory.read("new", 2), "more than the 2 bytes");
    assert!(directory.read("none", 9).expect("looked at").is_none());
    directory.remove("link").expect("removed");
    assert!(at("dear").exists() && !at("link").exists(), "the link goes, and nothing else");
    assert!(directory.remove("directory").is_err());
}

/// Ends with the test.
struct Attack(Child);

impl Drop for Attack {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_race_for_the_name_is_never_won() {
    if !is_root() {
        return;
    }
    let shared = shared();
    victim(shared.path());
    let script = "while :; do ln -sn victim name; rm -f name; mkdir -m 777 name; rmdir name; done";
    let _attack = Attack(nobody(shared.path(), script).stdout(Stdio::null()).spawn().expect("a shell"));
    let (mut ours, mut refusals) = (0, 0);
    for _ in 0..3000 {
        match OwnDirectory::open_or_make(&shared.path().join("name")) {
            Ok(directory) => {
                // Whatever the name means by now, this is ours and empty.
                assert!(directory.names().expect("readable").is_empty(), "somebody else's directory was opened");
                directory.file("mark", How::MakeNew).expect("made");
                directory.remove("mark").expect("removed");
                directory.remove_self().expect("nobody else can have exchanged it");
                ours += 1;
            }
            Err(_) => refusals += 1,
        }
    }
    println!("{ours} times ours, {refusals} times refused");
    assert!(ours > 0, "the name was never free");
    assert_eq!(std::fs::read_to_string(shared.path().join("victim/file")).expect("there"), "dear");
}

#[test]
fn an_output_is_not_written_through_somebody_elses_name() {
    let shared = shared();
    let at = |name: &str| shared.path().join(name);
    let own = tempfile::tempdir().expect("a directory");
    let dear = own.path().join("dear");
    std::fs::write(&dear, "dear").expect("a file");
    let is_dear = || std::fs::read_to_string(&dear).expect("there") == "dear";
    std::os::unix::fs::symlink(&dear, at("link")).expect("a link");
    refused(create_output(&at("link")), "it is a link");
    std::os::unix::fs::symlink(own.path().join("nowhere"), at("dangling")).expect("a link");
    refused(create_output(&at("dangling")), "it is a link");
    std::fs::write(at("linked"), "linked").expect("a file");
    std::fs::hard_link(at("linked"), at("hard")).expect("a second name");
    refused(create_output(&at("hard")), "2 names");
    let fifo = Command::new("mkfifo").arg(at("pipe")).status().expect("mkfifo");
    assert!(fifo.success());
    refused(create_output(&at("pipe")), "no plain file");
    if is_root() {
        as_nobody(shared.path(), "umask 0; echo theirs > theirs");
        let error = create_output(&at("theirs")).expect_err("refused").to_string();
        // The kernel may be before us (fs.protected_regular).
        assert!(error.contains("belongs to user 65534") || error.contains("ermission denied"), "{error}");
        assert_eq!(std::fs::read_to_string(at("theirs")).expect("there"), "theirs\n");
    }
    assert!(is_dear() && !own.path().join("nowhere").exists());
    for _ in 0..2 {
        create_output(&at("new")).expect("made, and made anew").write_all(b"new").expect("written");
    }
    assert_eq!(std::fs::read_to_string(at("new")).expect("there"), "new");
    // In a directory of one's own, a link is one's own.
    std::os::unix::fs::symlink(&dear, own.path().join("link")).expect("a link");
    create_output(&own.path().join("link")).expect("followed").write_all(b"new").expect("written");
    assert!(!is_dear());
}
