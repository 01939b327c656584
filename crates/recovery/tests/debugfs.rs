//! Journals that the real debugfs wrote (`jo`, `jw`, `jc`), recovered by us and by e2fsck, compared block for block.

mod common;

use common::{Copy, Image, Shape, differing_blocks, e2fsck, output, scratch};
use recovery::Status;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

/// Runs debugfs commands in one session: an open journal lives no longer.
fn session(image: &Path, commands: &str) {
    let mut child = Command::new("debugfs")
        .arg("-w")
        .arg(image)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("debugfs starts");
    child.stdin.take().expect("a pipe").write_all(commands.as_bytes()).expect("debugfs reads");
    let said = child.wait_with_output().expect("debugfs ends");
    let text = String::from_utf8_lossy(&said.stderr).into_owned();
    assert!(said.status.success(), "{text}");
    let complaints: Vec<&str> = text.lines().filter(|line| !line.starts_with("debugfs 1.")).collect();
    assert!(complaints.is_empty(), "{complaints:?}");
}

fn list(blocks: &[u64]) -> String {
    blocks.iter().map(u64::to_string).collect::<Vec<_>>().join(",")
}

fn duplicate(from: &Copy, directory: &Path) -> Copy {
    let path = directory.join("ours");
    std::fs::copy(&from.path, &path).expect("room");
    let journal_path = from.journal_path.as_ref().map(|journal| {
        let to = directory.join("ours.journal");
        std::fs::copy(journal, &to).expect("room");
        to
    });
    Copy { path, journal_path }
}

fn check(image: &Image, directory: &Path, open: &str) {
    let what = format!("{:?} {open}", image.shape);
    let theirs = image.copy_to(directory, "theirs");
    let size = image.shape.block_size as usize;
    let homes = &image.homes;
    let file = |name: &str, count: usize, seed: u8| {
        let mut data: Vec<u8> = (0..count * size).map(|n| (n as u8).wrapping_mul(31).wrapping_add(seed)).collect();
        // The second block must be escaped.
        if count > 1 {
            data[size..size + 4].copy_from_slice(&jbd2::MAGIC.to_be_bytes());
        }
        let path = directory.join(name);
        std::fs::write(&path, data).expect("room");
        path.display().to_string()
    };
    let (first, second, third) = (file("first", 40, 1), file("second", 20, 2), file("third", 3, 3));
    let external = theirs.journal_path.as_ref().map_or(String::new(), |path| format!(" -f {}", path.display()));
    let commands = format!(
        "jo{open}{external}\njw -b {} {first}\njw -r {}\njw -b {} {second}\njw -b {} -c {third}\njc\n",
        list(&homes[0..40]),
        list(&homes[10..25]),
        list(&homes[20..40]),
        list(&homes[0..3]),
    );
    session(&theirs.path, &commands);
    let ours = duplicate(&theirs, directory);
    let before = ours.bytes();
    let (code, said) = e2fsck(&theirs.path, theirs.journal_path.as_deref());
    assert!(matches!(code, Some(0 | 1)), "{what}: {code:?}, {said}");
    let report = ours.recover(false).expect("a recovery");
    assert_eq!(report.status, Status::Recovered, "{what}");
    assert_eq!((report.transactions, report.revoked), (3, 15), "{what}");
    let (after, judged) = (ours.bytes(), theirs.bytes());
    let excluded = image.journal_blocks();
    let differ: Vec<u64> = differing_blocks(&judged, &after, image.shape.block_size, 4096)
        .into_iter()
        .filter(|block| !excluded.contains(block) && *block != u64::from(1024 / image.shape.block_size))
        .collect();
    assert!(differ.is_empty(), "{what}: {differ:?}");
    let changed = differing_blocks(&before, &after, image.shape.block_size, 4096);
    assert!(homes[0..10].iter().chain(&homes[20..40]).all(|block| changed.contains(block)), "{what}");
    assert!(homes[10..20].iter().all(|block| !changed.contains(block)), "{what}: a revoked block was written");
    // Nothing left to do for the judge either.
    let (code, said) = e2fsck(&ours.path, ours.journal_path.as_deref());
    assert_eq!(code, Some(0), "{what}: {said}");
    let mut check = Command::new("e2fsck");
    check.args(["-f", "-n"]);
    if let Some(journal) = &ours.journal_path {
        check.arg("-j").arg(journal);
    }
    let said = output(check.arg(&ours.path));
    assert!(said.status.success(), "{what}: {}", String::from_utf8_lossy(&said.stdout));
}

fn check_shapes(shapes: &[Shape]) {
    let directory = scratch();
    for shape in shapes {
        let image = Image::make(directory.path(), *shape);
        // debugfs picks checksums of kind 3 only when the file system has metadata_csum.
        for open in ["", " -c -v 2", " -c -v 3"] {
            check(&image, directory.path(), open);
        }
    }
}

fn shape(block_size: u32, external: bool, ext3: bool, wide: bool) -> Shape {
    Shape { block_size, external, ext3, wide }
}

#[test]
fn small_blocks() {
    check_shapes(&[
        shape(1024, false, false, false),
        shape(1024, true, false, true),
        shape(1024, false, true, false),
        shape(2048, false, false, true),
        shape(2048, true, true, false),
    ]);
}

#[test]
fn pages() {
    check_shapes(&[shape(4096, false, false, true), shape(4096, false, true, false), shape(4096, true, false, true)]);
}

#[test]
fn large_blocks() {
    // Larger than a page: this kernel cannot mount it, others can.
    let directory = scratch();
    let image = Image::make(directory.path(), shape(65536, false, false, true));
    check(&image, directory.path(), " -c -v 3");
}
