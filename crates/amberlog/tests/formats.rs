//! Images that are no raw disks: refused by every command with a sentence and exit code 3, and not changed; unless
//! `format=raw` is said. And who else may have an image that is served.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn amberlog(words: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_amberlog")).args(words).output().expect("amberlog starts")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// `amberlog run` with a VMM that ends at once.
fn run(shm: &Path, disk: &str) -> Output {
    amberlog(&["run", "--shm", shm.to_str().expect("a plain name"), "--disk", disk, "--", "true"])
}

#[track_caller]
fn assert_refused(output: &Output, image: &Path, format: &str) {
    let stderr = text(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{stderr}");
    for word in [image.to_str().expect("a plain name"), format, "format=raw"] {
        assert!(stderr.contains(word), "'{word}' is not in: {stderr}");
    }
}

fn qemu_img(words: &[&str]) {
    let output = Command::new("qemu-img").args(words).output().expect("qemu-img is needed");
    assert!(output.status.success(), "{words:?}: {}", text(&output.stderr));
}

fn ext4(path: &Path) {
    let mut mke2fs = Command::new("mke2fs");
    mke2fs.args(["-q", "-F", "-t", "ext4", "-b", "4096", "-J", "size=4"]).arg(path).arg("32M");
    assert!(mke2fs.status().expect("mke2fs is needed").success());
}

/// An image of each format, made from a disk with a file system where `qemu-img` can.
fn images(directory: &Path) -> Vec<(PathBuf, &'static str)> {
    let raw = directory.join("raw");
    ext4(&raw);
    let raw = raw.to_str().expect("a plain name");
    let mut images = Vec::new();
    for (format, options) in [
        ("qcow", ""),
        ("qcow2", "compat=0.10"),
        ("qcow2", "compat=1.1"),
        ("qed", ""),
        ("parallels", ""),
        ("vdi", "static=on"),
        ("vhdx", "subformat=fixed"),
        ("vmdk", "subformat=monolithicSparse"),
        ("vmdk", "subformat=twoGbMaxExtentFlat"),
        ("vmdk", "subformat=streamOptimized"),
        ("vpc", "subformat=dynamic"),
        ("vpc", "subformat=fixed,force_size=on"),
    ] {
        let path = directory.join(format!("image-{}.{format}", images.len()));
        let shown = path.to_str().expect("a plain name");
        let options: &[&str] = if options.is_empty() { &[] } else { &["-o", options] };
        qemu_img(&[&["convert", "-f", "raw", "-O", format], options, &[raw, shown]].concat());
        images.push((path, format));
    }
    for (mark, name) in [
        (&b"LUKS\xba\xbe\0\x01"[..], "LUKS"),
        (b"LUKS\xba\xbe\0\x02", "LUKS"),
        (b"Bochs Virtual HD Image", "bochs"),
        (b"#!/bin/sh\n#V2.0 Format\nmodprobe cloop", "cloop"),
        (b"COWD\x01\0\0\0", "vmdk"),
        (b"\x1f\x8b\x08\0\0\0\0\0", "gzip"),
        (b"\xfd7zXZ\0", "xz"),
        (b"\x28\xb5\x2f\xfd", "zstd"),
        (b"PK\x03\x04", "zip"),
    ] {
        let path = directory.join(format!("image-{}.{name}", images.len()));
        let mut bytes = vec![0; 1 << 20];
        bytes[..mark.len()].copy_from_slice(mark);
        std::fs::write(&path, bytes).expect("room");
        images.push((path, name));
    }
    let dmg = directory.join("image.dmg");
    let mut bytes = vec![0; 1 << 20];
    let footer = bytes.len() - 512;
    bytes[footer..footer + 12].copy_from_slice(b"koly\0\0\0\x04\0\0\x02\0");
    std::fs::write(&dmg, bytes).expect("room");
    images.push((dmg, "dmg"));
    images
}

#[test]
fn another_format_is_refused_by_every_command_and_not_changed() {
    let directory = tempfile::tempdir().expect("a directory");
    let shm = tempfile::tempdir_in("/dev/shm").expect("a directory");
    for (image, format) in images(directory.path()) {
        let shown = image.to_str().expect("a plain name");
        let before = std::fs::read(&image).expect("the image");
        assert_refused(&run(shm.path(), shown), &image, format);
        assert_refused(&run(shm.path(), &format!("{shown},readonly")), &image, format);
        let good = directory.path().join("raw");
        let area = shm.path().to_str().expect("a plain name");
        let good = good.to_str().expect("a plain name");
        let words = ["run", "--shm", area, "--disk", good, "--journal-disk", shown, "--", "true"];
        assert_refused(&amberlog(&words), &image, format);
        assert_refused(&amberlog(&["recover", "--disk", shown]), &image, format);
        assert_refused(&amberlog(&["recover", "--dry-run", "--disk", shown]), &image, format);
        assert_refused(&amberlog(&["inspect", "--disk", shown]), &image, format);
        assert_refused(&amberlog(&["inspect", "--disk", good, "--journal", shown]), &image, format);
        assert_eq!(std::fs::read(&image).expect("the image"), before, "{shown} was changed");
        let output = run(shm.path(), &format!("{shown},format=raw"));
        assert_eq!(output.status.code(), Some(0), "{shown}: {}", text(&output.stderr));
    }
    assert_eq!(std::fs::read_dir(shm.path()).expect("it is there").count(), 0, "something is left in tmpfs");
}

/// A guest has written a qcow2 magic in front of its own file system: refused until somebody says that it is raw.
#[test]
fn a_guest_that_writes_a_magic_denies_only_itself() {
    use std::os::unix::fs::FileExt;
    let directory = tempfile::tempdir().expect("a directory");
    let shm = tempfile::tempdir_in("/dev/shm").expect("a directory");
    let image = directory.path().join("image");
    ext4(&image);
    let shown = image.to_str().expect("a plain name");
    assert_eq!(run(shm.path(), shown).status.code(), Some(0));
    let file = std::fs::File::options().write(true).open(&image).expect("opens");
    file.write_all_at(b"QFI\xfb\0\0\0\x03", 0).expect("written");
    assert_refused(&run(shm.path(), shown), &image, "qcow2");
    assert_eq!(run(shm.path(), &format!("{shown},format=raw")).status.code(), Some(0));
    for command in ["recover", "inspect"] {
        assert_refused(&amberlog(&[command, "--disk", shown]), &image, "qcow2");
        let output = amberlog(&[command, "--disk", shown, "--format", "raw"]);
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        assert_eq!(amberlog(&[command, "--disk", shown, "--format", "qcow2"]).status.code(), Some(2));
    }
}

/// Backup and inventory programs look at an image that is served; nobody else writes it.
#[test]
fn a_served_image_can_be_looked_at_and_not_be_written() {
    let directory = tempfile::tempdir().expect("a directory");
    let shm = tempfile::tempdir_in("/dev/shm").expect("a directory");
    let image = directory.path().join("image");
    ext4(&image);
    let (shown, copy) = (image.to_str().expect("a plain name"), directory.path().join("copy"));
    let copy = copy.to_str().expect("a plain name");
    let qemu =
        |program: &str, words: &[&str]| Command::new(program).args(words).output().expect("QEMU's tools are needed");
    let ready = directory.path().join("ready");
    // The VMM waits until it is told to end.
    let script = format!("touch {}; read _", ready.display());
    let mut served = Command::new(env!("CARGO_BIN_EXE_amberlog"))
        .args(["run", "--shm", shm.path().to_str().expect("a plain name"), "--disk", shown, "--", "sh", "-c", &script])
        .stdin(std::process::Stdio::piped())
        .spawn()
        .expect("amberlog starts");
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while !ready.exists() {
        assert!(std::time::Instant::now() < deadline, "the VMM was not started");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    for words in [
        &["info", "-U", shown][..],
        &["convert", "-U", "-f", "raw", "-O", "qcow2", shown, copy],
        &["map", "-U", shown],
        &["measure", "-U", "-O", "qcow2", shown],
    ] {
        let output = qemu("qemu-img", words);
        assert!(output.status.success(), "{words:?}: {}", text(&output.stderr));
    }
    for (program, words) in [
        ("qemu-img", &["resize", "-f", "raw", shown, "64M"][..]),
        ("qemu-io", &["-f", "raw", "-c", "write 0 512", shown]),
    ] {
        let output = qemu(program, words);
        let stderr = text(&output.stderr);
        assert!(!output.status.success() && stderr.contains("lock"), "{program} {words:?}: {stderr}");
    }
    let second = run(shm.path(), shown);
    assert_eq!(second.status.code(), Some(1), "{second:?}");
    assert!(text(&second.stderr).contains("in use"), "{second:?}");
    drop(served.stdin.take());
    let status = served.wait().expect("it ends");
    assert!(status.code().is_some_and(|code| code <= 1), "{status}");
    // And the other way round: while a QEMU has it, it is not served; one that only looks is in nobody's way.
    let mut other = Command::new("qemu-storage-daemon")
        .args(["--blockdev", &format!("driver=file,node-name=f,filename={shown}")])
        .arg("--nbd-server")
        .arg(format!("addr.type=unix,addr.path={}", directory.path().join("nbd").display()))
        .args(["--export", "type=nbd,id=e,node-name=f,writable=on", "--pidfile"])
        .arg(directory.path().join("pid"))
        .spawn()
        .expect("qemu-storage-daemon is needed");
    // Written when all of that is set up, the export's lock too.
    while !std::fs::read(directory.path().join("pid")).is_ok_and(|pid| pid.ends_with(b"\n")) {
        assert!(std::time::Instant::now() < deadline + std::time::Duration::from_secs(60), "no storage daemon");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    let (refused, recovered) = (run(shm.path(), shown), amberlog(&["recover", "--disk", shown]));
    other.kill().expect("killed");
    other.wait().expect("gone");
    assert_eq!(refused.status.code(), Some(1), "{refused:?}");
    assert_eq!(recovered.status.code(), Some(1), "{recovered:?}");
    for output in [refused, recovered] {
        assert!(text(&output.stderr).contains("in use"), "{output:?}");
    }
}
