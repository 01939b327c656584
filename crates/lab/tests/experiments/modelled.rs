//! A disk of `amberlog run` that names a drive: the run starts this program for it.

use guest_kit::program::workspace_binary;
use std::fs::File;
use std::process::{Command, Output};

/// A run without a guest whose disks, of so many bytes each, name one drive.
fn run(sizes: &[u64]) -> Output {
    let directory = tempfile::tempdir().unwrap();
    let shm = tempfile::tempdir_in("/dev/shm").unwrap();
    let mut command = Command::new(workspace_binary("amberlog").unwrap());
    command.args(["run", "--time-scale", "0.001", "--shm"]).arg(shm.path());
    for (index, bytes) in sizes.iter().enumerate() {
        let image = directory.path().join(format!("{index}.img"));
        File::create(&image).and_then(|file| file.set_len(*bytes)).unwrap();
        command.arg("--disk").arg(format!("{},model=st336753lw", image.display()));
    }
    command.args(["--", "true"]).output().unwrap()
}

/// What is refused is told by the drive itself: 36.7 GB hold one of these disks.
#[test]
fn a_run_has_the_drive_that_its_disks_name() {
    let output = run(&[20_000_000_512]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let output = run(&[20_000_000_512, 20_000_000_512]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("the modelled disk has no room left"), "{said}");
}
