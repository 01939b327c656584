//! What an earlier amberlog left when it and its guest were killed is finished by this one: commit 0e81c47 of this repository, version 0.1,
//! served real guests (Linux 6.1 under QEMU 7.2) in each placement, and all of it was killed with SIGKILL while a guest wrote records.
//! In `left`, an archive each: the image; `vm`, its directory in tmpfs, of whose guest memory the pages are kept that the journal's table
//! names; how many records the guest had been told are there; and `recovered`, the image as 0e81c47's own recovery made it. Beside those are the
//! `region` of NVM, or the `store` of the journal server, that a journal was in (`scripts/left-by-0.1.sh` makes these two archives).
//!
//! A format that changes gets a new archive beside these; none of them is ever made anew.

use guest_kit::evidence::{self, Order, RecordLayout};
use guest_kit::image::FileSystem;
use guest_kit::{Acknowledged, judge};
use placement::{DiskOptions, NvmDisk, NvmOptions, PlacementKind, RemoteOptions};
use remote_journal::{ClientOptions, ClientSecurity, Server, ServerOptions};
use serde_json::Value;
use std::io::{BufRead, Read, Write};
use std::os::linux::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::time::Duration;

struct Left {
    images: tempfile::TempDir,
    area: tempfile::TempDir,
}

impl Left {
    fn new(name: &str) -> Self {
        let archive = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/left/{name}.tar.zst"));
        let images = tempfile::tempdir().expect("a directory");
        let area = tempfile::tempdir_in("/dev/shm").expect("tmpfs");
        let tar = Command::new("tar").arg("--zstd").arg("-xf").arg(&archive).arg("-C").arg(images.path()).status();
        assert!(tar.expect("tar and zstd are installed").success());
        let left = Self { images, area };
        let vm = left.area.path().join("vm-1-0");
        let copied = Command::new("cp").args(["-r", "--sparse=always"]).arg(left.path("vm")).arg(&vm).status();
        assert!(copied.expect("cp is installed").success());
        left.describe(&vm);
        left
    }

    fn path(&self, name: &str) -> PathBuf {
        self.images.path().join(name)
    }

    /// Names the image and the memory by the paths and numbers that they have here.
    fn describe(&self, vm: &Path) {
        let text = std::fs::read(vm.join("area.json")).expect("a description");
        let mut description: Value = serde_json::from_slice(&text).expect("JSON");
        let image = self.path("image");
        let metadata = image.metadata().expect("the image");
        let key = format!("file-{:x}-{:x}", metadata.st_dev(), metadata.st_ino());
        for ram in description["ram"].as_array_mut().expect("memory") {
            ram["path"] = vm.join("ram").to_str().into();
        }
        for log in description["logs"].as_array_mut().expect("logs") {
            for (path_of, key_of) in [("home_image", "home_key"), ("journal_image", "journal_key")] {
                log[path_of] = image.to_str().into();
                log[key_of] = key.as_str().into();
            }
        }
        std::fs::write(vm.join("area.json"), description.to_string()).expect("written");
    }

    fn recover(&self) -> Value {
        let output = Command::new(env!("CARGO_BIN_EXE_amberlog"))
            .args(["recover", "--json", "--area"])
            .arg(self.area.path())
            .arg("--image")
            .arg(self.path("image"))
            .output()
            .expect("amberlog starts");
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "{stderr}");
        assert_eq!(self.area.path().read_dir().expect("it is there").count(), 0, "{stderr}");
        serde_json::from_slice(&output.stdout).expect("it prints JSON")
    }

    /// Whether the image is what 0e81c47 made of it, byte for byte, its file system whole, and all records there.
    fn assert_is_recovered(&self, name: &str) {
        let [image, expected] = ["image", "recovered"].map(|file| std::fs::read(self.path(file)).expect("an image"));
        let differing = image.chunks(512).zip(expected.chunks(512)).position(|(found, expected)| found != expected);
        assert_eq!((differing, image.len()), (None, expected.len()), "{name}: the first sector that differs");
    }

    /// The same, but for the padding of the journal's superblock, in which this amberlog keeps what 0e81c47 did not have.
    fn assert_is_recovered_but_for_padding(&self, name: &str) {
        let [mut image, mut expected] =
            ["image", "recovered"].map(|file| std::fs::read(self.path(file)).expect("an image"));
        let found = extfs::discover(&expected).expect("readable").remove(0);
        let at = found.journal.extents(&found.superblock)[0].physical as usize * 4096;
        let [found, wished] = [&mut image, &mut expected].map(|bytes| {
            let raw = &mut bytes[at..at + jbd2::SUPERBLOCK_BYTES];
            let superblock = jbd2::Superblock::decode(raw).expect("a journal");
            raw.fill(0);
            (superblock.start, superblock.sequence, superblock.errno, superblock.uuid)
        });
        assert_eq!(found, wished, "{name}");
        let differing = image.chunks(512).zip(expected.chunks(512)).position(|(found, expected)| found != expected);
        assert_eq!((differing, image.len()), (None, expected.len()), "{name}: the first sector that differs");
    }

    fn assert_records(&self, name: &str, may_lack: bool) {
        let file_system = FileSystem::whole(self.path("image"));
        let layout =
            RecordLayout { seed: 3, order: Order::Overwrite { slots: 30 }, files: 2, ..RecordLayout::default() };
        let count = std::fs::read_to_string(self.path("acknowledged")).expect("a number");
        let count: u64 = count.trim().parse().expect("a number");
        let acknowledged = Acknowledged { count, last: Some(count - 1), out_of_order: 0 };
        let verdict = evidence::records(&file_system, "/a", &layout, acknowledged);
        assert_eq!(verdict.is_ok_and(|verdict| verdict.is_good()), !may_lack, "{name}");
    }
}

/// What is held goes home from there, and nothing else does.
#[track_caller]
fn held(name: &str) {
    let left = Left::new(name);
    left.assert_records(name, true);
    let said = left.recover();
    assert_eq!(said["status"], "recovered", "{said}");
    left.assert_is_recovered(name);
    left.assert_records(name, false);
    let file_system = FileSystem::whole(left.path("image"));
    assert!(judge::check(&file_system).expect("e2fsck runs").is_consistent(), "{name}");
    assert_eq!(left.recover()["status"], "none", "{name}");
}

#[test]
fn a_retained_journal_is_finished() {
    held("retain-journal-4096");
    held("retain-ordered-4096");
}

#[test]
fn one_with_blocks_smaller_than_pages_is_finished() {
    held("retain-journal-1024");
}

#[test]
fn a_copied_journal_is_finished() {
    held("copy-journal-4096");
}

/// It is all on storage, for its guest's kernel to replay.
#[test]
fn a_journal_on_storage_is_left_there() {
    let name = "storage-journal-4096";
    let left = Left::new(name);
    assert_eq!(left.recover()["status"], "none");
    left.assert_is_recovered(name);
    let file_system = FileSystem::whole(left.path("image"));
    assert!(judge::needs_recovery(&file_system).expect("dumpe2fs runs"));
    judge::replay_with_e2fsck(&file_system).expect("e2fsck runs");
    left.assert_records(name, false);
}

/// Nothing of it was kept, and nothing is claimed: the directory goes, and the image stays as it is.
#[test]
fn of_a_journal_that_was_dropped_nothing_is_made_up() {
    let name = "discard-journal-4096";
    let left = Left::new(name);
    assert_eq!(left.recover()["status"], "none");
    left.assert_is_recovered(name);
}

/// What brings home what is in no directory: a command, with the words that name where it is, or a start.
enum Asked<'a> {
    Recover(&'a [&'a str]),
    Start(&'a DiskOptions),
}

/// What is elsewhere than in its directory goes home from there, and once is enough.
#[track_caller]
fn elsewhere(name: &str, left: &Left, asked: &Asked<'_>) {
    left.assert_records(name, true);
    assert_eq!(left.recover()["status"], "none", "{name}: its directory has nothing of it, and goes");
    for is_owed in [true, false] {
        match asked {
            Asked::Recover(words) => {
                let output = Command::new(env!("CARGO_BIN_EXE_amberlog"))
                    .args(["recover", "--json", "--disk"])
                    .arg(left.path("image"))
                    .args(*words)
                    .output()
                    .expect("amberlog starts");
                assert_eq!(output.status.code(), Some(0), "{name}: {}", String::from_utf8_lossy(&output.stderr));
                let said: Value = serde_json::from_slice(&output.stdout).expect("it prints JSON");
                assert_eq!(said["status"] == "recovered", is_owed, "{name}: {said}");
            }
            Asked::Start(options) => {
                let mut brought = Vec::new();
                placement::finish_earlier(options, &[], &mut brought).expect("it belongs to that image");
                assert_eq!(brought.len(), usize::from(is_owed), "{name}");
            }
        }
        left.assert_is_recovered_but_for_padding(name);
    }
    left.assert_records(name, false);
    let file_system = FileSystem::whole(left.path("image"));
    assert!(judge::check(&file_system).expect("e2fsck runs").is_consistent(), "{name}");
}

fn disk_options(left: &Left, nvm: Option<NvmDisk>, remote: Option<RemoteOptions>) -> DiskOptions {
    DiskOptions {
        name: "disk".to_owned(),
        path: left.path("image"),
        placement: if nvm.is_some() { PlacementKind::Nvm } else { PlacementKind::Remote },
        honour_flush: true,
        read_only: false,
        nvm: nvm.map(Arc::new),
        remote,
        durable_within: None,
        write_log: None,
    }
}

#[test]
fn a_journal_in_a_region_of_nvm_is_brought_home() {
    let name = "nvm-journal-4096";
    let left = Left::new(name);
    let region = left.path("region");
    elsewhere(name, &left, &Asked::Recover(&["--nvm", region.to_str().expect("a plain name")]));
    let left = Left::new(name);
    let nvm = NvmDisk::open(NvmOptions::new(left.path("region"))).expect("a region of ours");
    elsewhere(name, &left, &Asked::Start(&disk_options(&left, Some(nvm), None)));
}

#[test]
fn a_journal_on_a_server_is_brought_home() {
    let name = "remote-journal-4096";
    let served = |left: &Left| {
        let mut options = ServerOptions::new("127.0.0.1:0", left.path("store"));
        options.insecure = true;
        Server::start(options).expect("its store is understood")
    };
    let left = Left::new(name);
    let server = served(&left);
    let at = format!("{}/db", server.address());
    elsewhere(name, &left, &Asked::Recover(&["--remote-insecure", "--remote", &at]));
    let left = Left::new(name);
    let server = served(&left);
    let client = ClientOptions {
        address: server.address().to_string(),
        security: ClientSecurity { insecure: true, ..ClientSecurity::default() },
        timeout: Duration::from_secs(5),
    };
    let remote = RemoteOptions { client, name: "db".to_owned() };
    elsewhere(name, &left, &Asked::Start(&disk_options(&left, None, Some(remote))));
}

/// Two images in one directory, as of a VM with two disks: the journal of the second is copied.
fn with_a_second_disk() -> (Left, Left) {
    let (one, two) = (Left::new("retain-journal-4096"), Left::new("copy-journal-4096"));
    let (vm, its) = (one.area.path().join("vm-1-0"), two.area.path().join("vm-1-0"));
    for ending in ["table", "pool"] {
        std::fs::rename(its.join(format!("log-0.{ending}")), vm.join(format!("log-1.{ending}"))).expect("moved");
    }
    let read = |vm: &Path| -> Value {
        serde_json::from_slice(&std::fs::read(vm.join("area.json")).expect("a description")).expect("JSON")
    };
    let (mut description, mut log) = (read(&vm), read(&its)["logs"][0].take());
    log["name"] = "log-1".into();
    description["logs"].as_array_mut().expect("logs").push(log);
    std::fs::write(vm.join("area.json"), description.to_string()).expect("written");
    std::fs::remove_dir_all(&its).expect("removed");
    (one, two)
}

/// `recover --area AREA --image IMAGE --give-up GIVE_UP`, where somebody types these words.
fn give_up(left: &Left, give_up: &Path, typed: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_amberlog"))
        .args(["recover", "--json", "--area"])
        .arg(left.area.path())
        .arg("--image")
        .arg(left.path("image"))
        .arg("--give-up")
        .arg(give_up)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("amberlog starts");
    // It may not ask.
    let _ = command.stdin.take().expect("a pipe").write_all(typed.as_bytes());
    command.wait_with_output().expect("it ends")
}

#[test]
fn what_is_held_for_an_image_that_is_lost_is_given_up_by_its_exact_name() {
    let (one, two) = with_a_second_disk();
    let lost = two.path("image");
    std::fs::remove_file(&lost).expect("removed");
    let name = lost.to_str().expect("a plain name");
    let json = |output: &Output| -> Value { serde_json::from_slice(&output.stdout).expect("it prints JSON") };
    // The other disk is brought home whatever is typed; another name gives nothing up.
    for typed in ["", "y\n", "image\n"] {
        let output = give_up(&one, &lost, typed);
        let (said, stderr) = (json(&output), String::from_utf8_lossy(&output.stderr).into_owned());
        assert!(!output.status.success() && said.get("given_up").is_none(), "{said}");
        assert!(stderr.contains("lost for good would be ") && stderr.contains(name), "{stderr}");
        assert!(said["errors"][0].as_str().expect("a reason").contains("nothing was given up"), "{said}");
        one.assert_is_recovered(typed);
    }
    // Nor is anything given up that is at home, or that nobody has heard of.
    for image in [one.path("image"), one.path("nothing")] {
        let output = give_up(&one, &image, &format!("{}\n", image.display()));
        assert!(String::from_utf8_lossy(&output.stderr).contains("nothing was given up"), "{output:?}");
        assert_eq!(output.status.code(), Some(1), "{output:?}");
    }
    assert!(one.area.path().join("vm-1-0/log-1.table").is_file());
    let output = give_up(&one, &lost, &format!("{name}\n"));
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let said = json(&output);
    let loss = &said["given_up"][0];
    assert_eq!((loss["image"].as_str(), said["given_up"].as_array().map(Vec::len)), (Some(name), Some(1)), "{said}");
    assert!(loss["transactions"].as_u64() > Some(0) && loss["blocks"].as_u64() > Some(0), "{said}");
    assert_eq!(one.area.path().read_dir().expect("it is there").count(), 0, "nothing else was owed");
    one.assert_is_recovered("after all");
}

/// `recover --json --area` of all that there is, with these words.
fn recover_with(left: &Left, words: &[&str]) -> (Option<i32>, Value, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_amberlog"))
        .args(["recover", "--json", "--area"])
        .arg(left.area.path())
        .args(words)
        .stdin(Stdio::null())
        .output()
        .expect("amberlog starts");
    let said = serde_json::from_slice(&output.stdout).expect("it prints JSON");
    (output.status.code(), said, String::from_utf8_lossy(&output.stderr).into_owned())
}

/// A journal whose files are damaged or gone keeps no other one from going home, and is given up by name as any other.
#[test]
fn a_damaged_journal_keeps_no_other_from_going_home() {
    let cut = |path: &Path, bytes: u64| {
        std::fs::File::options().write(true).open(path).expect("opened").set_len(bytes).expect("cut off");
    };
    type Damage<'d> = (&'d str, &'d dyn Fn(&Path));
    let damages: [Damage<'_>; 5] = [
        ("no table", &|vm| std::fs::remove_file(vm.join("log-1.table")).expect("removed")),
        ("no pool", &|vm| std::fs::remove_file(vm.join("log-1.pool")).expect("removed")),
        ("a table that ends early", &|vm| cut(&vm.join("log-1.table"), 100)),
        ("a pool that ends early", &|vm| cut(&vm.join("log-1.pool"), 100)),
        ("a place that cannot be", &|vm| {
            let path = vm.join("area.json");
            let mut description: Value =
                serde_json::from_slice(&std::fs::read(&path).expect("a description")).expect("JSON");
            description["logs"][1]["place"]["runs"][0]["offset"] = u64::MAX.into();
            std::fs::write(&path, description.to_string()).expect("written");
        }),
    ];
    for (name, damage) in damages {
        let (one, two) = with_a_second_disk();
        let vm = one.area.path().join("vm-1-0");
        damage(&vm);
        let before = std::fs::read(two.path("image")).expect("the image");
        let [first, second] = [&one, &two].map(|left| left.path("image").to_str().expect("a plain name").to_owned());
        let words = ["--image", &first, "--image", &second];
        let (code, said, stderr) = recover_with(&one, &words);
        assert_eq!((code, said["logs"].as_array().map(Vec::len)), (Some(1), Some(1)), "{name}: {stderr}");
        assert_eq!(said["unfinished"][0]["image"].as_str(), Some(&second[..]), "{name}: {said}");
        one.assert_is_recovered(name);
        let (code, said, stderr) = recover_with(&one, &words);
        assert_eq!((code, said["logs"].as_array().map(Vec::len)), (Some(3), Some(0)), "{name}: {stderr}");
        assert_eq!(std::fs::read(two.path("image")).expect("the image"), before, "{name}: what is damaged is left");
        let output = give_up(&one, &two.path("image"), &format!("{second}\n"));
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "{name}: {stderr}");
        let said: Value = serde_json::from_slice(&output.stdout).expect("it prints JSON");
        assert_eq!(said["given_up"][0]["image"].as_str(), Some(&second[..]), "{name}: {said}");
        assert!(said["given_up"][0]["blocks"].is_null(), "{name}: {said}");
        assert_eq!(one.area.path().read_dir().expect("it is there").count(), 0, "{name}: nothing else was owed");
    }
}

/// Somebody puts the image back while he is asked what to do.
#[test]
fn what_comes_back_while_somebody_thinks_is_brought_home() {
    let (one, two) = with_a_second_disk();
    let image = two.path("image");
    let name = image.to_str().expect("a plain name");
    std::fs::rename(&image, two.path("away")).expect("renamed");
    let mut command = Command::new(env!("CARGO_BIN_EXE_amberlog"))
        .args(["recover", "--json", "--image", name, "--give-up", name, "--image"])
        .arg(one.path("image"))
        .arg("--area")
        .arg(one.area.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("amberlog starts");
    let mut said = String::new();
    let mut stderr = std::io::BufReader::new(command.stderr.take().expect("a pipe"));
    while !said.contains("type the image's exact name:") {
        assert!(stderr.read_line(&mut said).expect("it speaks") > 0, "it does not ask: {said}");
    }
    std::fs::rename(two.path("away"), &image).expect("renamed");
    command.stdin.take().expect("a pipe").write_all(format!("{name}\n").as_bytes()).expect("it reads");
    let output = command.wait_with_output().expect("it ends");
    stderr.read_to_string(&mut said).expect("its last words");
    assert_eq!(output.status.code(), Some(0), "{said}");
    let json: Value = serde_json::from_slice(&output.stdout).expect("it prints JSON");
    assert!(json.get("given_up").is_none() && json["logs"].as_array().map(Vec::len) == Some(2), "{json}");
    two.assert_is_recovered("it is home");
    assert_eq!(one.area.path().read_dir().expect("it is there").count(), 0);
}

/// Exit code 3 says that nothing was changed.
#[test]
fn a_start_that_is_refused_after_something_went_home_has_failed() {
    let left = Left::new("copy-journal-4096");
    let (image, vm, shm) = (left.path("image"), left.area.path().join("vm-1-0"), left.path("shm"));
    let registry = placement::own_place();
    let path = vm.join("area.json");
    let mut description: Value = serde_json::from_slice(&std::fs::read(&path).expect("a description")).expect("JSON");
    let key = description["logs"][0]["home_key"].clone();
    description["images"] = serde_json::json!([{"path": image, "key": key}]);
    std::fs::write(&path, description.to_string()).expect("written");
    // For the start to find it.
    let directory = placement::AreaDirectory::take_over(&vm, &registry).expect("nobody has it");
    directory.register(&image).expect("registered");
    drop(directory);
    let other = left.path("other.qcow2");
    std::fs::write(&other, [&b"QFI\xfb\0\0\0\x03"[..], &[0; 1 << 16]].concat()).expect("written");
    let run = || {
        let output = Command::new(env!("CARGO_BIN_EXE_amberlog"))
            .args(["run", "--shm"])
            .arg(&shm)
            .arg("--disk")
            .arg(&image)
            .arg("--disk")
            .arg(&other)
            .args(["--", "true"])
            .output()
            .expect("amberlog starts");
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (code, stderr) = run();
    assert_eq!(code, Some(1), "{stderr}");
    assert!(stderr.contains("qcow2") && stderr.contains("was brought home to"), "{stderr}");
    assert!(stderr.contains("blocks written home; finished from "), "what is noted of it is said: {stderr}");
    left.assert_is_recovered("it is home");
    let (code, stderr) = run();
    assert_eq!(code, Some(3), "{stderr}");
}
