//! `amberlog recover` and `amberlog inspect` as commands: what they print and how they exit.

use serde_json::Value;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

fn amberlog(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_amberlog")).args(arguments).output().expect("amberlog starts")
}

fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"))
}

/// An image with a live journal of two transactions, the second of which revokes a block, written by debugfs.
fn crashed(directory: &Path) -> PathBuf {
    let path = directory.join("image");
    let mut mke2fs = Command::new("mke2fs");
    mke2fs.args(["-q", "-F", "-t", "ext4", "-b", "4096", "-J", "size=4"]).arg(&path).arg("32M");
    assert!(mke2fs.status().expect("mke2fs is needed").success());
    let data = directory.join("data");
    std::fs::write(&data, vec![0x5a; 3 * 4096]).expect("room");
    let mut debugfs = Command::new("debugfs")
        .arg("-w")
        .arg(&path)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("debugfs is needed");
    let commands = format!("jo -c\njw -b 8000,8001,8002 {}\njw -r 8001\njc\n", data.display());
    debugfs.stdin.take().expect("a pipe").write_all(commands.as_bytes()).expect("debugfs reads");
    assert!(debugfs.wait().expect("debugfs ends").success());
    path
}

#[test]
fn recover_reports_what_it_did() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let path = crashed(directory.path());
    let image = path.to_str().expect("a plain name");
    let before = std::fs::read(&path).expect("the image");
    let dry = amberlog(&["recover", "--disk", image, "--dry-run", "--json"]);
    assert_eq!(dry.status.code(), Some(0), "{dry:?}");
    assert_eq!(json(&dry)["dry_run"], true);
    assert_eq!(std::fs::read(&path).expect("the image"), before, "a dry run writes nothing");
    let output = amberlog(&["recover", "--disk", image, "--json"]);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let report = json(&output);
    assert_eq!(report["schema"], 1);
    assert_eq!(report["status"], "recovered");
    for (field, value) in [("transactions", 2), ("blocks_written", 2), ("bytes_written", 8192), ("revoked", 1)] {
        assert_eq!(report[field], value, "{field}: {report}");
    }
    let (first, last) = (report["first_sequence"].as_u64(), report["last_sequence"].as_u64());
    assert_eq!(last, first.map(|first| first + 1));
    assert!(report["seconds"].is_f64());
    let after = std::fs::read(&path).expect("the image");
    assert_eq!(after[8000 * 4096..8001 * 4096], [0x5a; 4096]);
    assert_eq!(after[8001 * 4096..8002 * 4096], [0; 4096]);
    let again = amberlog(&["recover", "--disk", image]);
    assert_eq!(again.status.code(), Some(0));
    assert!(String::from_utf8_lossy(&again.stdout).contains("clean"), "{again:?}");
    assert_eq!(std::fs::read(&path).expect("the image"), after);
}

/// What is named is not asked where the image says that its journal is somewhere else.
#[test]
fn a_region_is_not_asked_for_a_journal_that_is_on_a_server() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let path = crashed(directory.path());
    let mut bytes = std::fs::read(&path).expect("the image");
    let found = extfs::discover(&bytes).expect("readable").remove(0);
    let journal = found.journal.extents(&found.superblock)[0].physical as usize * 4096;
    let block = &mut bytes[journal..journal + 1024];
    let sequence = jbd2::Superblock::decode(block).expect("a journal").sequence;
    let mut mark = [b"AMBREMO1", &7u64.to_le_bytes()[..], &[3; 16], &sequence.to_le_bytes()].concat();
    mark.extend(jbd2::crc32c(!0, &mark).to_le_bytes());
    block[0xc0..0xc0 + mark.len()].copy_from_slice(&mark);
    jbd2::SuperblockEdit::new(block).expect("a journal").start(0).errno(-5).seal();
    std::fs::write(&path, &bytes).expect("written");
    let region = directory.path().join("region");
    std::fs::write(&region, vec![0; 1 << 20]).expect("written");
    let (image, region) = (path.to_str().expect("a plain name"), region.to_str().expect("a plain name"));
    for more in [&[][..], &["--nvm", region], &["--nvm", region, "--dry-run"]] {
        let output = amberlog(&[&["recover", "--disk", image][..], more].concat());
        assert_eq!(output.status.code(), Some(3), "{output:?}");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(said.contains("on a journal server (epoch 7)") && said.contains("nothing was changed"), "{said}");
    }
    assert!(std::fs::read(&path).expect("the image") == bytes, "something was changed");
}

#[test]
fn a_reader_that_has_had_enough_changes_nothing() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let image = crashed(directory.path());
    let other = directory.path().join("other");
    std::fs::copy(&image, &other).expect("copied");
    let no_disk = directory.path().join("none");
    std::fs::write(&no_disk, vec![0; 1 << 20]).expect("written");
    let nowhere = directory.path().join("nowhere");
    let [image, other, no_disk, nowhere] =
        [&image, &other, &no_disk, &nowhere].map(|path| path.to_str().expect("a plain name"));
    let commands: [(&[&str], i32); 13] = [
        (&["inspect", "--disk", image], 0),
        (&["inspect", "--verbose", "--disk", image], 0),
        (&["inspect", "--json", "--disk", image], 0),
        (&["inspect", "--disk", no_disk], 3),
        (&["recover", "--dry-run", "--disk", image], 0),
        (&["recover", "--disk", image], 0),
        (&["recover", "--json", "--disk", other], 0),
        (&["recover", "--json", "--disk", no_disk], 3),
        (&["recover", "--disk", nowhere], 1),
        (&["health", "--run", nowhere], 1),
        (&["health", "--json", "--run", nowhere], 1),
        (&["status", "--run", nowhere], 1),
        (&["--help"], 0),
    ];
    for (words, code) in commands {
        // The pipe has no reader before anything is printed.
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        let output =
            Command::new(env!("CARGO_BIN_EXE_amberlog")).args(words).stdout(writer).output().expect("amberlog runs");
        assert_eq!(output.status.code(), Some(code), "{words:?}: {output:?}");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!said.contains("panicked") && !said.contains("pipe"), "{words:?}: {said}");
    }
    let clean = amberlog(&["recover", "--disk", other]);
    assert!(String::from_utf8_lossy(&clean.stdout).contains("clean"), "{clean:?}");
    // What cannot be printed for another reason is no success.
    let full = std::fs::File::options().write(true).open("/dev/full").expect("opened");
    let output = Command::new(env!("CARGO_BIN_EXE_amberlog"))
        .args(["inspect", "--disk", other])
        .stdout(full)
        .output()
        .expect("amberlog runs");
    assert_eq!(output.status.code(), Some(1), "{output:?}");
}

#[test]
fn exit_codes() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let none = directory.path().join("none");
    let code = |arguments: &[&str]| amberlog(arguments).status.code();
    assert_eq!(code(&["recover"]), Some(2), "usage");
    assert_eq!(code(&["recover", "--disk", none.to_str().expect("a plain name")]), Some(1), "no such image");
    std::fs::write(&none, vec![0; 1 << 20]).expect("room");
    let refused = amberlog(&["recover", "--json", "--disk", none.to_str().expect("a plain name")]);
    assert_eq!(refused.status.code(), Some(3), "no file system: {refused:?}");
    assert_eq!(json(&refused)["status"], "damaged");
    let text = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(text.contains("holds no ext2, ext3 or ext4 file system") && text.lines().count() == 1, "{text}");
    assert_eq!(code(&["inspect", "--disk", none.to_str().expect("a plain name")]), Some(3));
}

/// Whoever takes "damaged" for a reason to repair a file system would give up a good journal.
#[test]
fn only_what_is_damaged_is_called_so() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let path = crashed(directory.path());
    let image = path.to_str().expect("a plain name");
    let outcome = |words: &[&str]| {
        let output = amberlog(&[&["recover", "--json"][..], words].concat());
        (output.status.code(), json(&output)["status"].as_str().map(str::to_owned))
    };
    let is = |code, word: &str| (Some(code), Some(word.to_owned()));
    assert_eq!(outcome(&["--disk", image, "--journal", image]), is(3, "refused"), "it was given twice");
    let other = directory.path().join("other");
    std::fs::write(&other, [&b"QFI\xfb\0\0\0\x03"[..], &[0; 1 << 20]].concat()).expect("written");
    assert_eq!(outcome(&["--disk", other.to_str().expect("a plain name")]), is(3, "refused"), "it is no raw disk");
    assert_eq!(outcome(&["--disk", "/nonexistent/image"]), is(1, "failed"));
    assert_eq!(outcome(&["--area", "/nonexistent/area"]), is(1, "failed"));
    let lock = std::fs::File::open(&path).expect("the image");
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive).expect("locked");
    assert_eq!(outcome(&["--disk", image]), is(1, "failed"), "it is in use");
    drop(lock);
    let mut bytes = std::fs::read(&path).expect("the image");
    let found = extfs::discover(&bytes).expect("readable").remove(0);
    let journal = found.journal.extents(&found.superblock)[0].physical as usize * 4096;
    // Its own checksum does not fit any more.
    bytes[journal + 0x30] ^= 1;
    std::fs::write(&path, &bytes).expect("written");
    assert_eq!(outcome(&["--disk", image]), is(3, "damaged"));
    // A feature that nobody knows is no damage.
    bytes[journal + 0x30] ^= 1;
    bytes[journal + 0x28] |= 0x80;
    std::fs::write(&path, &bytes).expect("written");
    assert_eq!(outcome(&["--disk", image]), is(3, "refused"));
}

#[test]
fn inspect_shows_the_journal() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let path = crashed(directory.path());
    let image = path.to_str().expect("a plain name");
    let output = amberlog(&["inspect", "--disk", image, "--json", "--verbose"]);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let shown = json(&output);
    assert_eq!(shown["schema"], 1);
    let journal = &shown["journals"][0];
    assert_eq!(journal["journal"]["kind"], "internal");
    assert_eq!(journal["superblock"]["checksum_ok"], true);
    assert_eq!(journal["superblock"]["blocks"], 1024);
    assert_eq!(journal["transactions"].as_array().map(Vec::len), Some(2));
    let first = &journal["transactions"][0];
    assert_eq!((&first["tags"], &first["data_damaged"]), (&Value::from(3), &Value::from(0)));
    let blocks: Vec<_> = first["tag_list"].as_array().expect("tags").iter().map(|tag| tag["block"].as_u64()).collect();
    assert_eq!(blocks, [Some(8000), Some(8001), Some(8002)]);
    assert_eq!(journal["transactions"][1]["revoke_list"], serde_json::json!([8001]));
    assert_eq!(journal["end"]["committed"], 2);
    let table = amberlog(&["inspect", "--disk", image, "--verbose"]);
    let text = String::from_utf8_lossy(&table.stdout).into_owned();
    for expected in ["csum_v3", "block 8001 revoked", "2 transactions committed", "checksum"] {
        assert!(text.contains(expected), "{expected} in {text}");
    }
}
