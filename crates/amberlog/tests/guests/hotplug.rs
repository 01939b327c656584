//! Memory that is plugged in while a guest runs, and that the VMM cannot hand over.

use crate::support::*;
use guest_kit::image::ExtRecipe;
use guest_kit::{Guest, Kernel};
use serde_json::json;

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
