//! Guests under Cloud Hypervisor instead of QEMU: its words, and its console device as the report channel.
//!
//! It has no second serial port: init takes the virtio console for one, and Cloud Hypervisor writes that to a file, which is read here as
//! it grows. Nothing can be told to such a guest, and it has no machine protocol. Failure story: what was written before a kill is in the
//! file, and is still read.

use crate::platform::Platform;
use crate::spec::GuestSpec;
use std::ffi::OsString;
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// The program's name.
pub(crate) const PROGRAM: &str = "cloud-hypervisor";
/// What the virtio console is written to, in the run's directory.
const REPORT: &str = "report.log";

impl GuestSpec {
    /// The arguments (without the program's name) of a guest whose disks and memory are in `words`.
    pub(crate) fn cloud_hypervisor_arguments(
        &self,
        platform: &Platform,
        directory: &Path,
        words: &[OsString],
    ) -> Vec<OsString> {
        let file = |name: &str| directory.join(name).to_string_lossy().into_owned();
        // As QEMU's guests have them.
        let common = "console=ttyS0 loglevel=4 panic=-1 mitigations=off cryptomgr.notests=1";
        let kernel_words = [common, platform.kernel_arguments, &self.kernel_arguments];
        let pairs = [
            ("--kernel", platform.kernel.image.to_string_lossy().into_owned()),
            ("--initramfs", file("initramfs")),
            ("--cmdline", kernel_words.join(" ")),
            ("--cpus", format!("boot={}", self.cpus)),
            ("--serial", format!("file={}", file("console.log"))),
            ("--console", format!("file={}", file(REPORT))),
        ];
        let own = pairs.into_iter().flat_map(|(name, value)| [OsString::from(name), OsString::from(value)]);
        own.chain(words.iter().cloned()).collect()
    }
}

/// Reads the console of process `pid` as it grows, into the report channel, until that process has ended and all is read.
pub(crate) fn report(directory: &Path, channel: &Path, pid: u32) -> std::io::Result<()> {
    let mut to = UnixStream::connect(channel)?;
    let path = directory.join(REPORT);
    std::thread::Builder::new().name("guest-console".to_owned()).spawn(move || {
        // A process that has ended and was not waited for has no program any more.
        let lives = || std::fs::read_link(format!("/proc/{pid}/exe")).is_ok();
        let mut from = None;
        let mut bytes = vec![0; 64 << 10];
        loop {
            let has_ended = !lives();
            from = from.or_else(|| File::open(&path).ok());
            let count = from.as_mut().and_then(|file: &mut File| file.read(&mut bytes).ok()).unwrap_or_default();
            match count {
                0 if has_ended => return,
                0 => std::thread::sleep(Duration::from_millis(5)),
                count if to.write_all(&bytes[..count]).is_err() => return,
                _ => {}
            }
        }
    })?;
    Ok(())
}
