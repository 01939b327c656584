//! NVM as it is meant to be: a DAX file and a devdax device, mapped with `MAP_SYNC`, lines written back with `clwb`. This machine
//! has neither, so a guest gets both, as QEMU's NVDIMMs, and the journal's crate works inside it. QEMU is killed; another guest
//! on the same NVDIMMs looks at what they hold.
//!
//! The NVDIMMs are files of the host: whatever the guest stored is in them, written back or not. What is lost when a processor's
//! caches are is `nvm-journal`'s own crash test.

use crate::support::*;
use guest_kit::{Accelerator, Guest, GuestSpec, Platform, Reported};
use std::path::Path;

/// Bytes of an NVDIMM: small, but with whole huge pages behind what a devdax device keeps for itself.
const NVDIMM_MIB: u32 = 64;

/// A guest with these NVDIMMs.
fn spec(name: &str, nvdimms: &[&Path], script: &str) -> GuestSpec {
    let mut spec = GuestSpec::new(name, format!("set -e\n{script}"));
    spec.modules = ["nfit", "nd_pmem", "dax_pmem", "device_dax"].map(str::to_owned).into();
    let accelerator = Platform::for_guest(&spec).unwrap().accelerator;
    let mut add = |words: &[&str]| spec.qemu_arguments.extend(words.iter().map(Into::into));
    add(&["-machine", "nvdimm=on", "-m", "slots=4,maxmem=2G"]);
    if accelerator == Accelerator::Tcg {
        add(&["-cpu", "qemu64,+rdrand,+ssse3,+sse4.2,+clflushopt,+clwb"]);
    }
    for (index, path) in nvdimms.iter().enumerate() {
        let path = path.to_str().unwrap().replace(',', ",,");
        let size = format!("size={NVDIMM_MIB}M");
        add(&["-object", &format!("memory-backend-file,id=memory{index},share=on,mem-path={path},{size}")]);
        add(&["-device", &format!("nvdimm,id=nvdimm{index},memdev=memory{index}")]);
    }
    spec
}

/// The highest number in marks `PREFIX N`.
fn highest(reported: &Reported, prefix: &str) -> u32 {
    let numbers = reported.marks.iter().filter_map(|mark| mark.strip_prefix(prefix)?.trim().parse().ok());
    numbers.max().unwrap_or_else(|| panic!("the guest told no '{prefix}': {:?}", reported.marks))
}

#[test]
fn a_dax_file_and_a_devdax_device_are_persistent_and_keep_what_was_committed() {
    let bench = Bench::new();
    let (file, device) = (bench.area().join("file"), bench.area().join("device"));
    // What `ndctl create-namespace --mode fsdax` and `--mode devdax` do.
    let script = "
        bus=/sys/bus/nd
        claim() {
            echo $1 >$bus/drivers/nd_pmem/unbind
            echo pmem >$bus/devices/$2/mode
            echo 2097152 >$bus/devices/$2/align
            cat /proc/sys/kernel/random/uuid >$bus/devices/$2/uuid
            echo $1 >$bus/devices/$2/namespace
            echo $2 >$bus/drivers/$3/bind
        }
        claim namespace0.0 $(cat $bus/devices/region0/pfn_seed) nd_pmem
        claim namespace1.0 $(cat $bus/devices/region1/dax_seed) dax_pmem
        mkfs.ext4 -q -b 4096 /dev/pmem0
        mount -t ext4 -o dax /dev/pmem0 /mnt
        guest-tools nvm --region /mnt/region --create 16 --name file --mark /dev/ttyS1 &
        guest-tools nvm --region /dev/dax1.0 --name device --mark /dev/ttyS1 &
        wait
        fail 'the writers have ended'
    ";
    let mut guest = Guest::start(spec("dax", &[&file, &device], script)).unwrap();
    for name in ["file", "device"] {
        guest.wait_mark(&format!("{name} is persistent, stores by clwb"), LIMIT).unwrap();
        // Long enough for differences, and for garbage to be collected.
        guest.wait_mark(&format!("{name} 3000"), LIMIT).unwrap();
    }
    guest.signal(guest_kit::Signal::KILL).unwrap();
    guest.wait_end(LIMIT).unwrap();
    let told = guest.final_report();

    let script = "
        mount -t ext4 -o dax /dev/pmem0 /mnt
        guest-tools nvm --region /mnt/region --name file --mark /dev/ttyS1 --verify
        guest-tools nvm --region /dev/dax1.0 --name device --mark /dev/ttyS1 --verify
    ";
    let found = Guest::run(spec("dax again", &[&file, &device], script), LIMIT).unwrap();
    assert_eq!(found.exit_code, Some(0));
    for name in ["file", "device"] {
        let (told, held) = (highest(&told, &format!("{name} ")), highest(&found, &format!("{name} holds ")));
        // One more may have become durable than was told, and what was told may not have left the guest's serial line (a page of text).
        let untold = 1 + 4096 / (u32::try_from(name.len()).expect("short") + 6);
        assert!((told..=told + untold).contains(&held), "{name}: {held} transactions are there, and {told} were told");
    }
}
