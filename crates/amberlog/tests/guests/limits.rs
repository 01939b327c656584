//! Little room: a small memory budget, many VMs at once, storage that is full or fails, a tmpfs that is too small.

use crate::support::*;
use crate::worker::kill_nine;
use guest_kit::image::{ExtRecipe, FileSystem, MIB, create_sparse};
use guest_kit::{AtEnd, Guest, worker_of};
use std::ffi::OsString;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use test_storage::TestStorage;

/// A tmpfs of a given size, for as long as this lives.
struct SmallMount(PathBuf);

impl SmallMount {
    /// Nothing when mounting is not allowed here; says so.
    fn new(at: PathBuf, size_mib: u64) -> Option<Self> {
        std::fs::create_dir_all(&at).unwrap();
        let options = format!("size={size_mib}m");
        let output = Command::new("mount").args(["-t", "tmpfs", "-o", &options, "tmpfs"]).arg(&at).output();
        match output {
            Ok(output) if output.status.success() => Some(Self(at)),
            Ok(output) => {
                println!("skipped, a tmpfs cannot be mounted: {}", text(&output.stderr).trim());
                None
            }
            Err(error) => {
                println!("skipped, a tmpfs cannot be mounted: {error}");
                None
            }
        }
    }
}

impl Drop for SmallMount {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(&self.0).status();
    }
}

/// 30 MB of file data in the journal, a budget of 1 MiB, and blocks of 1 KB too, which are all copied.
#[test]
fn a_small_budget_has_the_host_write_blocks_home_and_loses_nothing() {
    let bench = Bench::new();
    let (pages, copies) = (bench.path("pages"), bench.path("copies"));
    let of_pages = ExtRecipe::ext4(160, 64).make(&pages).unwrap();
    let of_copies = ExtRecipe { block_bytes: 1024, ..ExtRecipe::ext4(160, 64) }.make(&copies).unwrap();
    let script = format!(
        "echo 0 >/proc/sys/vm/dirty_writeback_centisecs
         mkdir -p /mnt/pages /mnt/copies
         mount -t ext4 -o data=journal,commit=600 /dev/vda /mnt/pages || fail pages
         mount -t ext4 -o data=journal,commit=600 /dev/vdb /mnt/copies || fail copies
         for n in 1 2 3 4 5; do
             for d in pages copies; do
                 dd if=/dev/urandom of=/tmp/random bs=1M count=3 2>/dev/null
                 cp /tmp/random /mnt/$d/file-$n; sync -f /mnt/$d; md5sum </tmp/random >/mnt/$d/sum-$n; sync -f /mnt/$d
             done
         done
         mark written
         {} &
         {}",
        record_writer("/mnt/pages/records", "pages", &overwritten(1), "--forever"),
        record_writer("/mnt/copies/records", "copies", &overwritten(2), "--forever"),
    );
    let words = [&disk(&pages)[..], &disk(&copies)[..], &["--memory-budget".into(), "1".into()][..]].concat();
    let mut guest = Guest::start(bench.spec("budget", script, words)).unwrap();
    guest.wait_mark("written", LIMIT).unwrap();
    for stream in ["pages", "copies"] {
        guest.wait_acknowledged(stream, 50, LIMIT).unwrap();
    }
    let reported = kill(&mut guest);
    for (stream, file_system, seed) in [("pages", &of_pages, 1), ("copies", &of_copies, 2)] {
        assert_consistent(file_system);
        assert_records(file_system, "/records", stream, &overwritten(seed), &reported);
        for n in 1..=5 {
            let file = guest_kit::judge::read_file(file_system, &format!("/file-{n}")).unwrap().unwrap();
            assert_eq!(file.len(), 3 << 20);
            let sum = guest_kit::judge::read_file(file_system, &format!("/sum-{n}")).unwrap().unwrap();
            std::fs::write(bench.path("file"), file).unwrap();
            let output =
                Command::new("md5sum").stdin(std::fs::File::open(bench.path("file")).unwrap()).output().unwrap();
            assert_eq!(text(&output.stdout), text(&sum), "{stream}: file {n}");
        }
    }
    let report = bench.report();
    assert!(report.counter(1, "written_home_by_host") > 1000, "{}", report.0);
    let bytes = |disk| report.counter(disk, "area_bytes_max") + report.counter(disk, "pool_bytes_max");
    // A transaction is held whole until its commit block has come: 3 MB here. 15 MB go through each log.
    assert!(bytes(0).max(bytes(1)) <= 5 << 20, "{} and {} bytes", bytes(0), bytes(1));
    assert_eq!(report.status(0), "recovered");
    bench.assert_area_is_empty();
}

#[test]
fn eight_guests_killed_at_once_are_all_recovered() {
    const GUESTS: usize = 8;
    let benches: Vec<Bench> = (0..GUESTS).map(|_| Bench::new()).collect();
    let mut file_systems = Vec::new();
    let mut guests = Vec::new();
    for (number, bench) in benches.iter().enumerate() {
        let image = bench.path("image");
        file_systems.push(ExtRecipe::ext4(32, 4).make(&image).unwrap());
        let script = format!(
            "mount -t ext4 -o data=journal /dev/vda /mnt || fail mount
             {}",
            record_writer("/mnt/records", "records", &overwritten(number as u64), "--forever")
        );
        let mut spec = bench.spec(&format!("guest-{number}"), script, protected_disk(&image));
        spec.memory_mib = 128;
        guests.push(Guest::launch(spec).unwrap());
    }
    for guest in &mut guests {
        guest.wait_acknowledged("records", 20, LIMIT).unwrap();
    }
    for guest in &mut guests {
        guest.kill_qemu().unwrap();
    }
    for (number, guest) in guests.iter_mut().enumerate() {
        let status = guest.wait_end(LIMIT).unwrap();
        assert_ends_with(guest, status, KILLED);
        assert_consistent(&file_systems[number]);
        let layout = overwritten(number as u64);
        assert_records(&file_systems[number], "/records", "records", &layout, &guest.final_report());
        let report = benches[number].report();
        assert_eq!(report.status(0), "recovered");
        assert!(report.counter(0, "pages_protected") > 0);
        benches[number].assert_area_is_empty();
    }
}

/// A sparse image on storage that is full, and one that is cut off under the guest: I/O errors there, work as usual on
/// the disk beside them.
#[test]
fn storage_that_fails_is_an_io_error_and_does_not_touch_other_disks() {
    let bench = Bench::new();
    let Some(full) = SmallMount::new(bench.path("full"), 24) else { return };
    let (sparse, cut, good) = (full.0.join("sparse"), bench.path("cut"), bench.path("good"));
    create_sparse(&sparse, 64 * MIB).unwrap();
    create_sparse(&cut, 64 * MIB).unwrap();
    let file_system = ExtRecipe::ext4(64, 8).make(&good).unwrap();
    let script = format!(
        "mount -t ext4 -o data=journal /dev/vdc /mnt || fail mount
         {} &
         dd if=/dev/urandom of=/dev/vda bs=1M count=40 oflag=direct && fail 'a full disk took 40 MB'
         mark full
         dd if=/dev/vda of=/dev/null bs=1M count=8 iflag=direct || fail 'what was written before cannot be read'
         dd if=/dev/vdb of=/dev/null bs=1M count=4 || fail 'the other disk cannot be read'
         mark cut me
         sleep 3
         dd if=/dev/vdb of=/dev/null bs=1M count=1 skip=32 iflag=direct && fail 'what is cut off can be read'
         dd if=/dev/vdb of=/dev/null bs=1M count=1 iflag=direct || fail 'what is left cannot be read'
         mark cut
         wait",
        record_writer("/mnt/records", "records", &overwritten(1), "--forever")
    );
    let words = [disk(&sparse), disk(&cut), disk(&good)].concat();
    let mut guest = Guest::start(bench.spec("fails", script, words)).unwrap();
    guest.wait_mark("full", LIMIT).unwrap();
    guest.wait_mark("cut me", LIMIT).unwrap();
    std::fs::File::options().write(true).open(&cut).unwrap().set_len(16 * MIB).unwrap();
    guest.wait_mark("cut", LIMIT).unwrap();
    let so_far = guest.acknowledged("records").last.unwrap_or(0);
    guest.wait_acknowledged("records", so_far + 20, LIMIT).unwrap();
    let stderr = guest.stderr();
    assert!(stderr.contains("disk0") && stderr.contains("No space left"), "the operator is told: {stderr}");
    guest.kill_qemu().unwrap();
    let status = guest.wait_end(LIMIT).unwrap();
    assert_eq!(status.code(), Some(KILLED), "{}", guest.stderr());
    assert_consistent(&file_system);
    assert_records(&file_system, "/records", "records", &overwritten(1), &guest.final_report());
    assert_eq!(bench.report().status(2), "recovered");
}

/// Home writes of a held journal fail because storage is full: the blocks stay owed, and when there is room they are
/// written, by the next one who tries.
#[test]
fn a_recovery_without_room_keeps_what_it_owes_until_there_is_some() {
    let bench = Bench::new();
    let Some(full) = SmallMount::new(bench.path("full"), 24) else { return };
    let image = full.0.join("image");
    create_sparse(&image, 64 * MIB).unwrap();
    let file_system = ExtRecipe::ext4(64, 8).make_at(&image, 0).unwrap();
    let script = format!(
        "echo 0 >/proc/sys/vm/dirty_writeback_centisecs
         mount -t ext4 -o data=journal,commit=600 /dev/vda /mnt || fail mount
         {}
         dd if=/dev/urandom of=/mnt/file bs=64k count=32 conv=fsync
         mark committed
         sleep 1000",
        record_writer("/mnt/records", "records", &overwritten(1), "--count 60")
    );
    let mut guest = Guest::start(bench.spec("no-room", script, disk(&image))).unwrap();
    guest.wait_mark("committed", LIMIT).unwrap();
    let filler = full.0.join("filler");
    let _ = Command::new("dd").args(["if=/dev/zero", "bs=64k"]).arg(format!("of={}", filler.display())).output();
    guest.kill_qemu().unwrap();
    let status = guest.wait_end(LIMIT).unwrap();
    assert_eq!(status.code(), Some(1), "{}", guest.stderr());
    assert!(guest.stderr().contains("No space left"), "{}", guest.stderr());
    let reported = guest.final_report();
    assert_eq!(journal_superblock(&image).errno, -5, "what is owed is not forgotten on storage");

    // Served again before that is finished: refused. With room: finished.
    let again = || {
        let run: [OsString; 3] = ["run".into(), "--disk".into(), image.clone().into()];
        let rest: [OsString; 4] = ["--shm".into(), bench.area().into(), "--".into(), "true".into()];
        amberlog_with(run.into_iter().chain(rest))
    };
    let refused = again();
    assert_eq!(refused.status.code(), Some(1), "{}", text(&refused.stderr));
    assert!(text(&refused.stderr).contains("No space left"), "{}", text(&refused.stderr));
    std::fs::remove_file(&filler).unwrap();
    let recovery = bench.recover_area();
    assert_eq!(recovery["status"], "recovered");
    assert_consistent(&file_system);
    assert_records(&file_system, "/records", "records", &overwritten(1), &reported);
    bench.assert_area_is_empty();
}

/// QEMU cannot get the guest's memory: a sentence, before the guest runs.
#[test]
fn a_tmpfs_too_small_for_the_guest_is_a_sentence() {
    let bench = Bench::new();
    let Some(small) = SmallMount::new(bench.path("small"), 16) else { return };
    let image = bench.path("image");
    let file_system: FileSystem = ExtRecipe::ext4(32, 4).make(&image).unwrap();
    let mut spec = bench.spec("too-small", "true", disk(&image));
    let words: Vec<OsString> = vec!["--shm".into(), small.0.clone().into()];
    if let guest_kit::Disks::Wrapper(all) = &mut spec.disks {
        let at = all.iter().position(|word| word == "--shm").expect("the bench gives it");
        all.splice(at..at + 2, words);
    }
    spec.at_end = AtEnd::PowerOff;
    let mut guest = Guest::launch(spec).unwrap();
    let status = guest.wait_end(LIMIT).unwrap();
    let stderr = guest.stderr();
    assert_eq!(status.code(), Some(1), "{stderr}");
    assert!(stderr.contains(&*small.0.to_string_lossy()) && stderr.contains("MiB"), "{stderr}");
    assert_clean(&file_system);
    assert!(Path::new(&small.0).read_dir().unwrap().next().is_none(), "nothing is left there");
}

/// Takes every byte of a tmpfs, and every one that is given back, until it is dropped.
struct Filler(Arc<AtomicBool>, Option<std::thread::JoinHandle<()>>);

impl Filler {
    fn new(at: &Path) -> Self {
        let is_over = Arc::new(AtomicBool::new(false));
        let mut file = std::fs::File::create(at.join("filler")).unwrap();
        let asked = Arc::clone(&is_over);
        let mut fill = move || while file.write_all(&[1; 4096]).is_ok() {};
        fill();
        let thread = std::thread::spawn(move || {
            while !asked.load(Ordering::Relaxed) {
                fill();
                std::thread::sleep(Duration::from_millis(2));
            }
        });
        Filler(is_over, Some(thread))
    }
}

impl Drop for Filler {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
        self.1.take().map(std::thread::JoinHandle::join);
    }
}

/// Gives the guest's memory, the largest file there, all of its room: what a guest has not touched yet it could not touch any more.
fn allocate_memory(area: &Path) {
    let directories = std::fs::read_dir(area).unwrap().flatten().filter(|entry| entry.path().is_dir());
    let files = directories.flat_map(|entry| std::fs::read_dir(entry.path()).unwrap().flatten());
    let (bytes, path) =
        files.map(|file| (file.metadata().unwrap().len(), file.path())).max().expect("a guest's memory");
    let file = std::fs::File::options().read(true).write(true).open(path).unwrap();
    rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::KEEP_SIZE, 0, bytes).unwrap();
}

/// Somebody else fills the tmpfs under a running guest, and takes whatever is given back. The guest's log goes round several times, its
/// worker dies and is followed, and its VMM is killed: it has seen no error, and what it was told is there.
fn goes_on_in_a_full_tmpfs(name: &str, options: &str, mode: &str) {
    let bench = Bench::new();
    let Some(_small) = SmallMount::new(bench.area().to_path_buf(), 160) else { return };
    let image = bench.path("image");
    let file_system = ExtRecipe::ext4(96, 8).make(&image).unwrap();
    let records = [("a", appended(3)), ("b", overwritten(4)), ("c", overwritten(5))];
    let [a, b, c] = records.each_ref().map(|(stream, layout)| (stream, layout));
    let script = format!(
        "mount -t ext4 -o data={mode} /dev/vda /mnt || fail mount
         mkdir /mnt/a /mnt/b /mnt/c
         {} &
         {} &
         mark written
         while :; do
             dd if=/dev/urandom of=/mnt/more bs=64k count=16 conv=fsync 2>/dev/null || fail more
             rm /mnt/more
         done &
         {}",
        record_writer("/mnt/a", a.0, a.1, "--forever"),
        record_writer("/mnt/b", b.0, b.1, "--forever"),
        record_writer("/mnt/c", c.0, c.1, "--forever"),
    );
    let mut spec = bench.spec(name, script, disk_with(&image, options));
    spec.memory_mib = 128;
    let mut guest = Guest::start(spec).unwrap();
    guest.wait_mark("written", LIMIT).unwrap();
    let go_on = |guest: &mut Guest, count: u64| {
        for (stream, _) in &records {
            let before = guest.acknowledged(stream).last.unwrap_or(0);
            if let Err(error) = guest.wait_acknowledged(stream, before + count, LIMIT) {
                panic!("{name}: {error}\n--- console\n{}--- amberlog's log\n{}", guest.console(), guest.stderr());
            }
        }
    };
    go_on(&mut guest, 10);
    allocate_memory(bench.area());
    let filler = Filler::new(bench.area());
    go_on(&mut guest, 300);
    kill_nine(worker_of(guest.process_id()).expect("a worker"));
    go_on(&mut guest, 100);
    let console = guest.console();
    assert!(!console.contains("I/O error") && !console.contains("Aborting journal"), "{name}: {console}");
    guest.kill_qemu().unwrap();
    let status = guest.wait_end(LIMIT).unwrap();
    let stderr = guest.stderr();
    println!("{name}:\n{stderr}");
    assert_eq!(status.code(), Some(KILLED), "{stderr}");
    // A page's writer may have had to wait for memory.
    let mut errors = stderr.lines().filter(|line| line.contains("ERROR") && !line.contains("its writer waits"));
    assert_eq!(errors.next(), None, "{stderr}");
    drop(filler);
    let reported = guest.final_report();
    if journal_superblock(&image).start != 0 {
        replay_left(&image);
    }
    assert_consistent(&file_system);
    for (stream, layout) in &records {
        assert_records(&file_system, &format!("/{stream}"), stream, layout, &reported);
    }
}

#[test]
fn a_guest_goes_on_while_somebody_fills_the_tmpfs() {
    goes_on_in_a_full_tmpfs("full-retain", "", "journal");
    goes_on_in_a_full_tmpfs("full-copy", ",placement=copy", "ordered");
}

#[test]
fn and_one_whose_journal_is_durable_by_age() {
    goes_on_in_a_full_tmpfs("full-durable", ",placement=retain,durable-within=1", "journal");
}

/// Storage whose flushes and writes fail with EIO: the guest is told at once, a recovery that fails keeps everything and
/// says so, and when the storage is well again nothing is missing. Since a flush has failed, nobody is told that nothing is.
#[test]
fn failing_storage_is_told_to_the_guest_and_a_failed_recovery_keeps_all_that_is_owed() {
    let _alone = alone_behind_fuse();
    let bench = Bench::new();
    let (held, plain) = (bench.path("held"), bench.path("plain"));
    let file_system = ExtRecipe::ext4(64, 8).make(&held).unwrap();
    create_sparse(&plain, 16 * MIB).unwrap();
    let storages = TestStorage::new(&held).and_then(|held| Ok((held, TestStorage::new(&plain)?)));
    let (held, plain) = match storages {
        Ok(storages) => storages,
        Err(error) => return eprintln!("left out: {error}"),
    };
    let write = "dd if=/dev/urandom of=/dev/vdb bs=4k count=4 oflag=direct conv=fsync,notrunc 2>/dev/null";
    let script = format!(
        "mount -t ext4 -o data=journal /dev/vda /mnt || fail mount
         {} &
         {write} || fail 'sound storage'
         mark sound
         while {write}; do sleep 0.1; done
         mark flush failed
         until {write}; do sleep 0.1; done
         mark well
         while {write}; do sleep 0.1; done
         mark write failed
         wait",
        record_writer("/mnt/records", "records", &overwritten(1), "--forever")
    );
    let words = [disk(&held.image()), disk(&plain.image())].concat();
    let mut guest = Guest::start(bench.spec("eio", script, words)).unwrap();
    guest.wait_mark("sound", LIMIT).unwrap();
    plain.set_fail_flushes(true);
    guest.wait_mark("flush failed", LIMIT).unwrap();
    plain.set_fail_flushes(false);
    guest.wait_mark("well", LIMIT).unwrap();
    plain.set_fail_writes(true);
    guest.wait_mark("write failed", LIMIT).unwrap();
    guest.wait_acknowledged("records", 30, LIMIT).unwrap();

    held.set_fail_writes(true);
    guest.kill_qemu().unwrap();
    let status = guest.wait_end(LIMIT).unwrap();
    assert_eq!(status.code(), Some(1), "a recovery that failed: {}", guest.stderr());
    assert!(guest.stderr().contains("what is still owed stays in"), "{}", guest.stderr());
    let recover =
        || amberlog_with(["recover".as_ref(), "--json".as_ref(), "--area".as_ref(), bench.area().as_os_str()]);
    let before = held.failures();
    let output = recover();
    assert_eq!(output.status.code(), Some(1), "{}{}", text(&output.stdout), text(&output.stderr));
    assert!(held.failures() > before, "it tried");

    held.set_fail_writes(false);
    held.set_fail_flushes(true);
    let output = recover();
    assert_eq!(output.status.code(), Some(1), "what could not be flushed is not done: {}", text(&output.stdout));
    held.set_fail_flushes(false);
    let output = recover();
    assert_eq!(output.status.code(), Some(1), "a flush has failed: {}", text(&output.stdout));
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).expect("it prints JSON");
    assert_eq!(report["status"], "damaged");
    assert!(report["notes"].to_string().contains("run e2fsck -f"), "{report}");
    bench.assert_area_is_empty();
    drop(held);
    assert_consistent(&file_system);
    assert_records(&file_system, "/records", "records", &overwritten(1), &guest.final_report());
}
