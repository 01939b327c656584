//! An unmodified QEMU with an unmodified guest on a plain device.

mod common;

use block_device::CacheMode;
use block_route::Start;
use common::{MIB, Place, open, start};
use guest_kit::{AtEnd, Guest, GuestSpec};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(180);

fn spec(name: &str, script: &str, sockets: &[&Path]) -> GuestSpec {
    let mut spec = GuestSpec::new(name, script);
    spec.cpus = 2;
    spec.memory_mib = 320;
    let mut add = |words: &[&str]| spec.qemu_arguments.extend(words.iter().map(std::ffi::OsString::from));
    add(&["-object", "memory-backend-memfd,id=ram,size=320M,share=on", "-machine", "memory-backend=ram"]);
    let reconnect = guest_kit::program::reconnect_property().expect("QEMU is installed");
    for (index, socket) in sockets.iter().enumerate() {
        add(&["-chardev", &format!("socket,id=disk{index},path={},{reconnect}", socket.display())]);
        add(&["-device", &format!("vhost-user-blk-pci,chardev=disk{index},num-queues=2")]);
    }
    spec
}

#[test]
fn a_guest_uses_the_disk_as_any_other() {
    let place = Place::new(96 * MIB);
    let (device, journal) = start(&place, open(&place.image(), CacheMode::Auto), |config, _| {
        config.identity.serial = "amber-serial-01".to_owned();
    });
    let script = "
        set -e
        cd /sys/block/vda
        [ $(cat serial) = amber-serial-01 ]
        [ $(cat size) = 196608 ]
        [ $(ls mq | wc -l) = 2 ]
        [ $(cat queue/discard_max_bytes) -gt 0 ]
        [ $(cat queue/write_zeroes_max_bytes) -gt 0 ]
        grep -q 'write back' queue/write_cache
        cd /
        mkfs.ext4 -q /dev/vda
        mkdir -p /mnt/a
        mount -o discard /dev/vda /mnt/a
        dd if=/dev/urandom of=/mnt/a/data bs=64k count=300 2>/dev/null
        md5sum /mnt/a/data >/mnt/a/sum
        umount /mnt/a
        echo 3 >/proc/sys/vm/drop_caches
        mount -o discard /dev/vda /mnt/a
        md5sum -c /mnt/a/sum
        mark before the pause
        dd if=/dev/urandom of=/mnt/a/more bs=64k count=300 2>/dev/null
        sync
        echo precious >/mnt/a/word
        rm /mnt/a/data /mnt/a/more
        sync
        umount /mnt/a
        mark waiting for the resize
        while [ $(cat /sys/block/vda/size) = 196608 ]; do sleep 0.1; done
        [ $(cat /sys/block/vda/size) = 262144 ]
        dd if=/dev/zero of=/dev/vda bs=1M seek=100 count=10 oflag=direct 2>/dev/null || dd if=/dev/zero of=/dev/vda bs=1M seek=100 count=10
        sync
        blkdiscard -o 104857600 -l 10485760 /dev/vda";
    let mut guest = Guest::start(spec("plain-device", script, &[&place.socket()])).unwrap();
    guest.wait_mark("before the pause", LIMIT).unwrap();
    guest.qmp().unwrap().stop().unwrap();
    guest.qmp().unwrap().cont().unwrap();
    guest.wait_mark("waiting for the resize", LIMIT).unwrap();
    std::fs::OpenOptions::new().write(true).open(place.image()).unwrap().set_len(128 * MIB).unwrap();
    assert_eq!(device.handle().resize().unwrap(), 128 * MIB);
    assert_eq!(guest.wait_exit_code(LIMIT).unwrap(), 0);
    assert!(guest.wait_end(LIMIT).unwrap().success());
    let counters = device.handle().counters();
    assert!(counters.read_requests > 0 && counters.write_requests > 0 && counters.flush_requests > 0);
    assert!(counters.discard_requests > 0, "{counters:?}");
    assert_eq!(counters.failed_requests + counters.malformed_chains + counters.unsupported_requests, 0, "{counters:?}");
    device.stop().unwrap();
    // The firmware may have looked at the disk before the kernel did.
    let starts = journal.starts();
    assert_eq!(starts[0], Start::Fresh);
    assert!(starts.contains(&Start::Resumed), "the pause: {starts:?}");
    let file_system = guest_kit::image::FileSystem::whole(place.image());
    assert!(guest_kit::judge::check(&file_system).unwrap().is_clean());
    let word = guest_kit::judge::read_file(&file_system, "/word").unwrap();
    assert_eq!(word.as_deref(), Some(&b"precious\n"[..]));
}

#[test]
fn a_reset_starts_the_device_afresh() {
    let place = Place::new(16 * MIB);
    let (device, journal) = start(&place, open(&place.image(), CacheMode::Auto), |_, _| {});
    let script = "
        set -e
        if [ \"$(dd if=/dev/vda bs=512 count=1 2>/dev/null | head -c 5)\" = first ]; then exit 0; fi
        echo first | dd of=/dev/vda conv=sync 2>/dev/null
        sync
        mark written
        sleep 1000";
    let mut spec = spec("reset", script, &[&place.socket()]);
    spec.reboots = true;
    let mut guest = Guest::start(spec).unwrap();
    guest.wait_mark("written", LIMIT).unwrap();
    let before = journal.starts().len();
    guest.qmp().unwrap().system_reset().unwrap();
    guest.wait_boots(2, LIMIT).unwrap();
    assert_eq!(guest.wait_exit_code(LIMIT).unwrap(), 0);
    assert!(guest.wait_end(LIMIT).unwrap().success());
    let starts = journal.starts();
    assert!(starts.len() > before && starts.iter().all(|start| *start == Start::Fresh), "{starts:?}");
    device.stop().unwrap();
}

#[test]
fn a_guest_goes_on_when_the_device_dies_and_comes_back() {
    let place = Place::new(64 * MIB);
    let image = open(&place.image(), CacheMode::Auto);
    let (mut device, _) = start(&place, Arc::clone(&image), |config, _| {
        config.drain_timeout = Duration::from_millis(300);
    });
    // Every block says where it belongs; written in order, so that a lost one shows.
    let script = "
        set -e
        mark begins
        i=0
        while [ $i -lt 150 ]; do
            yes block-$i- | head -c 65536 | dd of=/dev/vda bs=65536 seek=$i conv=fsync 2>/dev/null
            i=$((i + 1))
        done
        mark ended";
    let mut spec = spec("reconnect", script, &[&place.socket()]);
    spec.at_end = AtEnd::PowerOff;
    let mut guest = Guest::start(spec).unwrap();
    guest.wait_mark("begins", LIMIT).unwrap();
    let mut resumed = 0;
    for _ in 0..4 {
        std::thread::sleep(Duration::from_millis(100));
        // With writes held back, it dies with one in flight, unless the guest has none to send any more.
        device.handle().with_route(|route, _| route.hold_writes = true).unwrap();
        let writes_before = device.handle().counters().write_requests;
        let patience = std::time::Instant::now() + Duration::from_secs(10);
        while device.handle().counters().write_requests == writes_before && std::time::Instant::now() < patience {
            std::thread::sleep(Duration::from_millis(5));
        }
        device.stop().unwrap();
        let (next, journal) = start(&place, Arc::clone(&image), |config, _| {
            config.drain_timeout = Duration::from_millis(300);
        });
        device = next;
        let deadline = std::time::Instant::now() + LIMIT;
        while journal.starts().is_empty() {
            assert!(std::time::Instant::now() < deadline, "QEMU did not come back");
            std::thread::sleep(Duration::from_millis(20));
        }
        assert_eq!(journal.starts(), [Start::Resumed]);
        resumed += device.handle().counters().resubmitted_requests;
    }
    guest.wait_mark("ended", LIMIT).unwrap();
    assert_eq!(guest.wait_exit_code(LIMIT).unwrap(), 0);
    assert!(guest.wait_end(LIMIT).unwrap().success());
    assert!(resumed > 0, "no request was in flight at any of the deaths");
    device.stop().unwrap();
    let file = std::fs::File::open(place.image()).unwrap();
    for index in 0..150u64 {
        let mut block = vec![0; 65536];
        file.read_exact_at(&mut block, index * 65536).unwrap();
        let expected: Vec<u8> = format!("block-{index}-\n").bytes().cycle().take(65536).collect();
        assert!(block == expected, "block {index}");
    }
}
