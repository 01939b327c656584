//! A disk that two hosts reach: two loop devices of one file, each with a page cache of its own, as two hosts have it of one
//! LUN, and no lock of one that the other sees. And a copy of an image, put back.
//!
//! Where there are no loop devices (no root), what needs them says so and is left out.

use super::{
    JournalServer, Proxy, TO_SERVER, assert_work_is_there, more_is_acknowledged, recover, recovered, remote_disk,
    wait_for_log,
};
use crate::support::*;
use guest_kit::Guest;
use guest_kit::image::{ExtRecipe, copy_image};
use guest_kit::workload::Workload;
use std::ffi::OsString;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::Ordering;

struct Loop(PathBuf);

impl Loop {
    fn of(image: &Path) -> Result<Self, String> {
        let output = Command::new("losetup")
            .args(["--find", "--show"])
            .arg(image)
            .output()
            .map_err(|error| error.to_string())?;
        if !output.status.success() {
            return Err(text(&output.stderr));
        }
        Ok(Loop(text(&output.stdout).trim().into()))
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("--detach").arg(&self.0).status();
    }
}

fn patient(disk: &Path, address: &str) -> Vec<OsString> {
    let mut words = remote_disk(disk, address);
    // So that the one that is cut off notices when the other has long begun: a start takes who is silent for 15 s for gone.
    words[2] = "40000".into();
    words
}

/// The first host is idle, and a person takes its journal from it; or it is cut off and does not know it. The second runs the disk. What either was told is committed is
/// there when both are dead, in whatever order that happens, and the second is not disturbed by the first.
#[test]
fn a_second_host_that_runs_the_disk_has_it_for_good() {
    for is_cut in [false, true] {
        let bench = Bench::new();
        let server = JournalServer::start(&bench.path("store"), "127.0.0.1:0", &[]);
        let proxy = Proxy::start(&server.address);
        let image = bench.path("image");
        let file_system = ExtRecipe::ext4(96, 8).make(&image).unwrap();
        let [near, far] = match [Loop::of(&image), Loop::of(&image)] {
            [Ok(near), Ok(far)] => [near, far],
            [Err(error), _] | [_, Err(error)] => return eprintln!("left out: {error}"),
        };
        let layout = appended(7);
        let script = |stream: &str, more: &str| {
            format!(
                "mount -t ext4 -o data=journal /dev/vda /mnt || fail mount
                 {}
                 sync; sync
                 mark written
                 sleep 1000",
                record_writer(&format!("/mnt/{stream}"), stream, &layout, more)
            )
        };
        let mut first =
            Guest::start(bench.spec("first", script("first", "--count 30"), patient(&near.0, &proxy.address))).unwrap();
        wait_for_log(&first, TO_SERVER, 1);
        let is_written = |guest: &mut Guest| {
            let seen = guest.await_report("nothing is written", LIMIT, |reported| {
                reported.marks.contains(&"written".to_owned()).then_some(())
            });
            seen.unwrap();
        };
        is_written(&mut first);

        proxy.is_cut.store(is_cut, Ordering::Relaxed);
        if !is_cut {
            // It is there: nobody takes its journal who does not know better.
            let words =
                [vec!["run".into()], patient(&far.0, &server.address), vec!["--".into(), "true".into()]].concat();
            let refused = amberlog_with(words);
            assert_eq!(refused.status.code(), Some(1), "{}", text(&refused.stderr));
            assert!(
                text(&refused.stderr).contains("is written by a client that is connected"),
                "{}",
                text(&refused.stderr)
            );
            assert!(!first.stderr().contains("somebody else"), "{}", first.stderr());
            let done = recovered(&far.0, &server.address, &[]);
            assert_eq!(done["status"], "recovered", "{done}");
        }
        let mut tries = 0..5;
        let mut second = loop {
            let spec = bench.spec("second", script("second", "--forever"), patient(&far.0, &server.address));
            match Guest::start(spec) {
                Ok(second) => break second,
                // The first one may be just saying on the disk that it has lost its server.
                Err(error) => assert!(error.to_string().contains("try again") && tries.next().is_some(), "{error}"),
            }
        };
        wait_for_log(&second, TO_SERVER, 1);
        second.wait_acknowledged("second", 20, LIMIT).unwrap();
        wait_for_log(&first, "somebody else", 1);
        proxy.is_cut.store(false, Ordering::Relaxed);
        first.kill_qemu().unwrap();
        first.wait_end(LIMIT).unwrap();
        assert!(!first.stderr().contains("is complete in its own place"), "{}", first.stderr());
        let last = second.acknowledged("second").last.unwrap_or(0);
        second.wait_acknowledged("second", last + 20, LIMIT).unwrap();
        let (of_first, said) = (first.final_report(), second.stderr());
        assert_eq!(super::SignalNumber::signal_number(&second.kill_all().unwrap()), Some(9));
        assert!(!said.contains("somebody else"), "the second was fenced off: {said}");
        let of_second = second.final_report();
        drop((first, second));

        let done = recovered(&far.0, &server.address, &[]);
        assert_eq!(done["status"], "recovered", "{done}");
        drop((near, far));
        assert_consistent(&file_system);
        assert_records(&file_system, "/first", "first", &layout, &of_first);
        assert_records(&file_system, "/second", "second", &layout, &of_second);
    }
}

/// Passes on so many bytes of what the server says, and then closes the connection.
fn short_proxy(to: &str, bytes_max: usize) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("bound").to_string();
    let to = to.to_owned();
    std::thread::spawn(move || {
        for mut near in listener.incoming().flatten() {
            let Ok(mut far) = TcpStream::connect(&to) else { continue };
            let (mut from, mut into) = (near.try_clone().expect("cloned"), far.try_clone().expect("cloned"));
            std::thread::spawn(move || std::io::copy(&mut from, &mut into));
            let mut left = bytes_max;
            let mut bytes = [0; 4096];
            while let Ok(got @ 1..) = far.read(&mut bytes) {
                let passed = got.min(left);
                left -= passed;
                if near.write_all(&bytes[..passed]).is_err() || left == 0 {
                    break;
                }
            }
            let _ = (near.shutdown(Shutdown::Both), far.shutdown(Shutdown::Both));
        }
    });
    address
}

/// An image is copied under a running guest, and the host is lost: the copy is not brought "home" over a disk that has gone on,
/// neither by hand nor by running it, and the disk itself still is. A network that fails meanwhile changes nothing.
#[test]
fn a_copy_of_a_running_disk_is_not_recovered_into_ruin() {
    let bench = Bench::new();
    let server = JournalServer::start(&bench.path("store"), "127.0.0.1:0", &[]);
    let (image, copy) = (bench.path("image"), bench.path("copy"));
    // A small journal: its tail moves while this lasts.
    let file_system = ExtRecipe::ext4(96, 4).make(&image).unwrap();
    let load = Workload::new(81).without_postmark();
    let mut guest = Guest::start(bench.spec("copied", load.script(), remote_disk(&image, &server.address))).unwrap();
    wait_for_log(&guest, TO_SERVER, 1);
    more_is_acknowledged(&mut guest, 5);
    copy_image(&image, &copy).unwrap();
    let marked = journal_superblock(&copy).sequence;
    more_is_acknowledged(&mut guest, 20);
    let deadline = std::time::Instant::now() + LIMIT;
    while journal_superblock(&image).sequence == marked {
        assert!(std::time::Instant::now() < deadline, "the log's tail does not move");
        more_is_acknowledged(&mut guest, 5);
    }
    more_is_acknowledged(&mut guest, 2);
    assert_eq!(super::SignalNumber::signal_number(&guest.kill_all().unwrap()), Some(9));
    let reported = guest.final_report();
    let [of_image, of_copy] = [&image, &copy].map(|path| std::fs::read(path).unwrap());

    let refused = recover(&copy, &server.address, &[]);
    assert_eq!(refused.status.code(), Some(3), "{}{}", text(&refused.stdout), text(&refused.stderr));
    assert!(text(&refused.stderr).contains("an older copy"), "{}", text(&refused.stderr));
    let run =
        [["run".into()].into(), remote_disk(&copy, &server.address), ["--".into(), "true".into()].into()].concat();
    let refused = amberlog_with(run);
    assert_eq!(refused.status.code(), Some(3), "{}", text(&refused.stderr));
    assert!(std::fs::read(&copy).unwrap() == of_copy, "the copy was changed");

    // Cut in the handshake, and in the midst of the log.
    for bytes in [100, 60_000] {
        let failed = recover(&image, &short_proxy(&server.address, bytes), &[]);
        assert_eq!(failed.status.code(), Some(1), "{}{}", text(&failed.stdout), text(&failed.stderr));
        assert!(text(&failed.stderr).contains("try again"), "{}", text(&failed.stderr));
        let said: serde_json::Value = serde_json::from_slice(&failed.stdout).unwrap();
        assert_eq!(said["status"], "failed", "{said}");
        assert!(std::fs::read(&image).unwrap() == of_image, "the image was changed");
    }
    let done = recovered(&image, &server.address, &[]);
    assert_eq!(done["status"], "recovered", "{done}");
    assert_work_is_there(&load, &file_system, &reported);
    // What was recovered is kept until the next log begins: had it been the wrong disk, the true one could still be.
    std::fs::write(&image, &of_image).unwrap();
    let again = recovered(&image, &server.address, &[]);
    assert_eq!(again["transactions"], done["transactions"], "{again}");
    assert_work_is_there(&load, &file_system, &reported);
}
