//! The QEMU command line that follows from what a guest shall be.

use crate::accelerator::Accelerator;
use crate::platform::Platform;
use crate::spec::{Cache, Disks, GuestSpec};
use std::ffi::OsString;
use std::path::Path;

impl GuestSpec {
    /// QEMU's arguments (without the program's name), for a run whose sockets, console and pid
    /// file are in `directory`.
    pub(crate) fn arguments(&self, platform: &Platform, directory: &Path) -> Vec<OsString> {
        let mut arguments: Vec<OsString> = Vec::new();
        let mut add = |words: &[&str]| arguments.extend(words.iter().map(OsString::from));
        let file = |name: &str| directory.join(name).to_string_lossy().replace(',', ",,");
        add(&["-M", &self.machine, "-m", &format!("{}M", self.memory_mib)]);
        add(&["-smp", &self.cpus.to_string(), "-nodefaults", "-display", "none"]);
        add(&["-accel", platform.accelerator.name(), "-cpu", &platform.cpu]);
        if let Some(bios) = &platform.bios {
            add(&["-bios", bios]);
        }
        if !self.reboots {
            add(&["-no-reboot"]);
        } else if platform.accelerator == Accelerator::Kvm {
            // A processor that is halted by KVM until a page comes stays so for good if QEMU resets it meanwhile (docs/guarantees.md,
            // "Limits"): a fault of KVM's, which is not what these guests are about.
            add(&["-overcommit", "cpu-pm=on"]);
        }
        add(&["-chardev", &format!("file,id=console,path={},append=on", file("console.log"))]);
        add(&["-serial", "chardev:console"]);
        add(&["-chardev", &format!("socket,id=report,path={}", file("report"))]);
        if self.machine.starts_with("microvm") {
            // It has one serial port; init makes /dev/ttyS1 of this.
            add(&["-device", "virtio-serial-pci", "-device", "virtconsole,chardev=report"]);
        } else {
            add(&["-serial", "chardev:report"]);
        }
        add(&["-chardev", &format!("socket,id=qmp,path={}", file("qmp"))]);
        add(&["-mon", "chardev=qmp,mode=control"]);
        add(&["-pidfile", &file("qemu.pid")]);
        add(&["-kernel", &platform.kernel.image.to_string_lossy()]);
        add(&["-initrd", &directory.join("initramfs").to_string_lossy()]);
        // Kernels from 6.8 on may refuse tools that write beside a mounted file system: resize2fs, tune2fs, a wild write.
        // The kernel's tests of its own ciphers are none of ours, and an emulated processor on a busy host was stuck in one for minutes.
        let common = "console=ttyS0 loglevel=4 panic=-1 mitigations=off cryptomgr.notests=1 bdev_allow_write_mounted=1";
        let words = [common, platform.kernel_arguments, &self.kernel_arguments];
        add(&["-append", &words.join(" ")]);
        if let Disks::Plain(drives) = &self.disks {
            for (index, drive) in drives.iter().enumerate() {
                let mut node = serde_json::json!({
                    "driver": "raw",
                    "node-name": format!("disk{index}"),
                    "read-only": drive.read_only,
                    "discard": "unmap",
                    "cache": {
                        "direct": drive.cache == Cache::None,
                        "no-flush": drive.cache == Cache::Unsafe,
                    },
                    "file": { "driver": "file", "filename": drive.image.to_string_lossy() },
                });
                let mut device = format!("virtio-blk-pci,drive=disk{index}");
                if drive.has_iothread {
                    node["file"]["aio"] = "io_uring".into();
                    add(&["-object", &format!("iothread,id=thread{index}")]);
                    device += &format!(",iothread=thread{index}");
                }
                add(&["-blockdev", &node.to_string()]);
                add(&["-device", &device]);
            }
        }
        arguments.extend(self.qemu_arguments.iter().cloned());
        arguments
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::Drive;

    #[test]
    fn drives_come_in_order_and_a_wrapper_has_none() {
        let mut spec = GuestSpec::new("test", "true")
            .drives(vec![Drive::new("/a,b.img", Cache::None), Drive::new("/c.img", Cache::Unsafe)]);
        let platform = Platform::emulated().unwrap();
        let text = |spec: &GuestSpec| {
            spec.arguments(&platform, Path::new("/run,dir"))
                .iter()
                .map(|word| word.to_string_lossy().into_owned())
                .collect::<Vec<_>>()
        };
        let words = text(&spec);
        assert!(words.iter().any(|word| word.contains(r#""filename":"/a,b.img""#)));
        assert!(words.iter().any(|word| word.contains("path=/run,,dir/report")));
        let first = words.iter().position(|word| word.ends_with("drive=disk0")).unwrap();
        let second = words.iter().position(|word| word.ends_with("drive=disk1")).unwrap();
        assert!(first < second);
        assert!(!words.iter().any(|word| word.contains("iothread") || word.contains("aio")), "{words:?}");
        let mut drive = Drive::new("/a.img", Cache::None);
        drive.has_iothread = true;
        let words = text(&GuestSpec::new("test", "true").drives(vec![drive]));
        assert!(words.iter().any(|word| word == "iothread,id=thread0"));
        assert!(words.iter().any(|word| word == "virtio-blk-pci,drive=disk0,iothread=thread0"));
        assert!(words.iter().any(|word| word.contains(r#""aio":"io_uring""#)));
        spec = spec.wrapper(["amberlog", "run"]);
        assert!(!text(&spec).iter().any(|word| word.starts_with("virtio-blk")));
    }
}
