//! What is plugged in while a guest runs and changes its memory: memory that the VMM cannot hand over, and a balloon.

use crate::support::*;
use guest_kit::image::ExtRecipe;
use guest_kit::{Guest, Kernel};
use serde_json::json;
use std::time::{Duration, Instant};

#[test]
fn memory_that_cannot_be_handed_over_is_an_error_and_never_silent() {
    let bench = Bench::new();
    let file_system = ExtRecipe::ext4(64, 8).make(&bench.path("image")).unwrap();
    // The kernel takes what can be moved, page cache above all, from the new memory first.
    let script = "echo 7 >/proc/sys/kernel/printk
         mount -t ext4 -o data=journal,commit=300 /dev/vda /mnt || fail mount
         for n in $(seq 20); do dd if=/dev/urandom of=/mnt/old-$n bs=64k count=4 2>/dev/null; done
         mkdir /tmp/copy
         cp /mnt/old-* /tmp/copy || fail copy
         sync
         mark ready
         tries=0
         until grep -q offline /sys/devices/system/memory/memory*/state; do
             tries=$((tries + 1)); [ $tries -lt 300 ] || fail 'the memory did not come'
             sleep 0.1
         done
         for state in /sys/devices/system/memory/memory*/state; do
             grep -q offline $state && echo online_movable >$state
         done
         echo 3 >/proc/sys/vm/drop_caches
         errors=0
         for n in $(seq 20); do
             if cat /mnt/old-$n >/tmp/now 2>/dev/null; then
                 cmp /tmp/now /tmp/copy/old-$n || fail \"old-$n was read as something else\"
             else
                 errors=$((errors + 1))
             fi
         done
         [ $errors -gt 0 ] || fail 'the new memory was not used'
         echo more >/mnt/new && sync /mnt/new && echo 'the file system still takes writes'
         mark done";
    let mut spec = bench.spec("hotplug", script, disk(&bench.path("image")));
    spec.kernel = Some(Kernel::stock().unwrap().clone());
    spec.qemu_arguments.extend(["-m", "256M,slots=4,maxmem=2G"].map(Into::into));
    let mut guest = Guest::start(spec).unwrap();
    guest.wait_mark("ready", LIMIT).unwrap();
    // New versions of QEMU keep shared memory in a file that can be handed over, wherever it comes from.
    let backend = json!({"qom-type": "memory-backend-ram", "id": "plugged", "size": 128 << 20});
    guest.qmp().unwrap().execute("object-add", backend).unwrap();
    let dimm = json!({"driver": "pc-dimm", "id": "dimm", "memdev": "plugged"});
    guest.qmp().unwrap().execute("device_add", dimm).unwrap();
    guest.wait_mark("done", LIMIT).unwrap();
    guest.kill_qemu().unwrap();
    assert_eq!(guest.wait_end(LIMIT).unwrap().code(), Some(KILLED));
    let said = guest.stderr();
    assert_eq!(said.matches("that the VMM has not handed over, and its requests").count(), 1, "{said}");
    let report = bench.report();
    let fault = report.disk(0)["fault"].as_str().expect("a fault is reported").to_owned();
    assert!(fault.contains("memory-backend-memfd with share=on"), "{fault}");
    // The journal may have been aborted: what was committed before is there all the same.
    assert_consistent(&file_system);
    for n in 1..=20 {
        let content = guest_kit::judge::read_file(&file_system, &format!("/old-{n}")).unwrap().expect("it was synced");
        assert_eq!(content.len(), 4 * 65536, "old-{n}");
    }
}

/// QEMU has the second one where it had the first one: a page fault there is the second one's.
#[test]
fn memory_that_takes_the_place_of_other_memory_is_retained_as_ever() {
    let bench = Bench::new();
    let file_system = ExtRecipe::ext4(128, 32).make(&bench.path("image")).unwrap();
    let mut random = guest_tools::random::Random::of(seed(), 42);
    // Blocks that end in zeros would not be retained.
    let content: Vec<u8> = (0..6 << 20).map(|_| random.below(255) as u8 + 1).collect();
    // The kernel takes what can be moved, page cache above all, from the new memory first.
    let script = "cd /sys/devices/system/memory
         wait_until() { tries=0; until eval \"$1\"; do tries=$((tries + 1)); [ $tries -lt 1200 ] || { dmesg | tail -n 20; fail \"$2\"; }; sleep 0.1; done; }
         plug() {
             wait_until 'grep -q offline memory*/state' 'the memory did not come'
             for state in memory*/state; do grep -q offline $state && echo online_movable >$state; done
         }
         count=$(ls -d memory* | wc -l)
         mark counted
         echo 0 >/proc/sys/vm/dirty_writeback_centisecs
         mount -t ext4 -o data=journal,commit=300 /dev/vda /mnt || fail mount
         plug
         mark plugged
         wait_until '[ $(ls -d memory* | wc -l) = $count ]' 'the memory did not go'
         mark unplugged
         plug
         cp /run/host/content /mnt/content && sync /mnt/content || fail content
         tr '\\001-\\376' '\\002-\\377' </run/host/content | dd of=/mnt/content conv=notrunc bs=64k 2>/dev/null || fail over
         mark done";
    let mut spec = bench.spec("dimms", script, disk(&bench.path("image")));
    spec.kernel = Some(Kernel::stock().unwrap().clone());
    spec.files = vec![("content".to_owned(), content.clone())];
    spec.qemu_arguments.extend(["-m", "256M,slots=4,maxmem=2G"].map(Into::into));
    let mut guest = Guest::start(spec).unwrap();
    guest.wait_mark("counted", LIMIT).unwrap();
    // Memory is retained in the VM's own directory only.
    let directory = std::fs::read_dir(bench.area()).unwrap().next().expect("a directory").unwrap().path();
    let mut places = Vec::new();
    for name in ["first", "second"] {
        let path = directory.join(name);
        let place = |guest: &mut Guest| {
            let maps = std::fs::read_to_string(format!("/proc/{}/maps", guest.qemu_pid().unwrap())).unwrap();
            let line = maps.lines().find(|line| line.ends_with(path.to_str().unwrap()))?;
            Some(line.split('-').next().unwrap().to_owned())
        };
        let backend =
            json!({"qom-type": "memory-backend-file", "id": name, "size": 128 << 20, "share": true, "mem-path": path});
        guest.qmp().unwrap().execute("object-add", backend).unwrap();
        let dimm = json!({"driver": "pc-dimm", "id": "dimm", "memdev": name});
        guest.qmp().unwrap().execute("device_add", dimm).unwrap();
        places.push(place(&mut guest).expect("it is mapped"));
        if name == "second" {
            break;
        }
        guest.wait_mark("plugged", LIMIT).unwrap();
        // A guest that cannot let go of a page in this moment refuses, and may be asked again.
        let deadline = Instant::now() + LIMIT;
        while guest.qmp().unwrap().execute("object-del", json!({"id": name})).is_err() {
            assert!(Instant::now() < deadline, "{}", guest.console());
            let _ = guest.qmp().unwrap().execute("device_del", json!({"id": "dimm"}));
            std::thread::sleep(Duration::from_millis(500));
        }
        guest.wait_mark("unplugged", LIMIT).unwrap();
        // QEMU unmaps it a moment later.
        while place(&mut guest).is_some() {
            assert!(Instant::now() < deadline, "it stays mapped");
            std::thread::sleep(Duration::from_millis(50));
        }
        std::fs::remove_file(path).unwrap();
    }
    println!("the two were at {places:?}");
    guest.wait_mark("done", LIMIT).unwrap();
    let said = guest.stderr();
    guest.kill_all().unwrap();
    let recovered = bench.recover_area();
    assert_eq!(recovered["status"], "recovered", "{recovered}\n{said}");
    assert_consistent(&file_system);
    let found = guest_kit::judge::read_file(&file_system, "/content").unwrap().expect("it was synced");
    let wrong = found.chunks(4096).zip(content.chunks(4096)).filter(|(found, written)| found != written).count();
    assert_eq!((found.len(), wrong), (content.len(), 0), "blocks are not what was synced");
    assert!(!said.contains("WARN") && !said.contains("ERROR"), "{said}");
}

/// Data that looks like a block of a journal is written to the log from a copy, whose page the guest's kernel has no use for as soon as it is
/// committed: it gives that to the balloon, and QEMU takes it out of the file of its memory.
#[test]
fn a_balloon_that_comes_later_takes_nothing_that_is_retained() {
    const MEMORY_MIB: u64 = 256;
    const LEFT_MIB: u64 = 72;
    const BLOCKS: u64 = 1024;
    /// In a row, a tenth of a second apart, in which the balloon has not grown.
    const LOOKS: u32 = 30;
    let bench = Bench::new();
    let file_system = ExtRecipe::ext4(128, 32).make(&bench.path("image")).unwrap();
    let mut random = guest_tools::random::Random::of(seed(), 41);
    let mut content = Vec::new();
    for _ in 0..BLOCKS {
        content.extend(0xc03b_3998u32.to_be_bytes());
        // A block that ends in zeros would not be retained.
        content.extend((4..4096).map(|_| random.below(255) as u8 + 1));
    }
    let script = "echo 0 >/proc/sys/vm/dirty_writeback_centisecs
         mount -t ext4 -o data=journal,commit=300 /dev/vda /mnt || fail mount
         cp /run/host/content /mnt/content && sync /mnt/content || fail content
         for slab in /sys/kernel/slab/jbd2_*; do echo 1 >$slab/shrink; done
         mark ready";
    let mut spec = bench.spec("balloon", script, disk(&bench.path("image")));
    spec.kernel = Some(Kernel::stock().unwrap().clone());
    spec.modules = vec!["virtio_balloon".to_owned()];
    spec.files = vec![("content".to_owned(), content.clone())];
    // Here a device can be plugged in where there is no port for it.
    spec.machine = "pc".to_owned();
    // Debian's kernel clears a page before it gives it to anybody, the balloon too, and that is a fault. Others do not.
    spec.kernel_arguments.push_str(" init_on_alloc=0");
    spec.memory_mib = MEMORY_MIB as u32;
    let mut guest = Guest::start(spec).unwrap();
    guest.wait_mark("ready", LIMIT).unwrap();

    let before = held_in_files(&bench);
    guest.qmp().unwrap().execute("device_add", json!({"driver": "virtio-balloon-pci", "id": "balloon"})).unwrap();
    guest.qmp().unwrap().execute("balloon", json!({"value": LEFT_MIB << 20})).unwrap();
    // All that the guest can spare: it has no more when the balloon has not grown for a while.
    let deadline = Instant::now() + LIMIT;
    let (mut actual, mut looks) = (MEMORY_MIB << 20, 0);
    let has_taken = || held_in_files(&bench) + (8 << 20) < before;
    while actual == MEMORY_MIB << 20 || actual > LEFT_MIB << 20 && (looks < LOOKS || !has_taken()) {
        assert!(Instant::now() < deadline, "the balloon has left {actual} bytes\n{}", guest.console());
        std::thread::sleep(Duration::from_millis(100));
        // Until the guest's driver has come it has no size.
        let size = guest.qmp().unwrap().execute("query-balloon", json!({}));
        if let Some(now) = size.ok().and_then(|size| size["actual"].as_u64()).filter(|now| *now < actual) {
            (actual, looks) = (now, 0);
        } else {
            looks += 1;
        }
    }
    let after = held_in_files(&bench);
    assert!(after + (8 << 20) < before, "the balloon took nothing from the file: {before} bytes, then {after}");
    guest.kill_all().unwrap();
    let recovered = bench.recover_area();
    assert_eq!(recovered["status"], "recovered", "{recovered}");
    assert_consistent(&file_system);
    let found = guest_kit::judge::read_file(&file_system, "/content").unwrap().expect("it was synced");
    let wrong = found.chunks(4096).zip(content.chunks(4096)).filter(|(found, written)| found != written).count();
    assert_eq!((found.len(), wrong), (content.len(), 0), "blocks are not what was written");
}

/// Bytes that the files of a VM in its area take.
fn held_in_files(bench: &Bench) -> u64 {
    use std::os::unix::fs::MetadataExt;
    let mut bytes = 0;
    let mut directories = vec![bench.area().to_owned()];
    while let Some(directory) = directories.pop() {
        for entry in std::fs::read_dir(directory).unwrap().flatten() {
            let metadata = entry.metadata().unwrap();
            if metadata.is_dir() {
                directories.push(entry.path());
            } else {
                bytes += metadata.blocks() * 512;
            }
        }
    }
    bytes
}
