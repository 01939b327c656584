//! Journal servers of a VM's disks: what an earlier run left on one is brought home before anything is served.

use super::disk_option::DiskOption;
use command_line::remote_options::RemoteTrust;
use placement::{DiskOptions, RemoteOptions, recover_remote_image};
use recovery::{Access, Disk};
use std::path::Path;
use std::time::Duration;

/// How long whoever had the image may take to end.
const DYING: Duration = Duration::from_secs(10);

/// Says where a disk's journals go.
pub fn options(option: &DiskOption, name: &str, trust: &RemoteTrust) -> Option<RemoteOptions> {
    let remote = option.remote.as_ref()?;
    let name = remote.name.clone().unwrap_or_else(|| name.to_owned());
    Some(RemoteOptions { client: trust.client(&remote.address), name })
}

/// Brings home what an earlier run left on a disk's server.
///
/// # Errors
/// When storage says that the live log is on the server and it cannot be had, or is not whole.
pub fn finish_earlier(disk: &DiskOptions, journals: &[&Path]) -> anyhow::Result<()> {
    let Some(options) = &disk.remote else { return Ok(()) };
    let _image = Disk::open_within(&disk.path, Access::Write, DYING)?;
    // An external journal is one of the VM's journal disks; which, its file system says.
    let candidates = std::iter::once(None).chain(journals.iter().map(|path| Some(*path)));
    for journal in candidates {
        for one in recover_remote_image(&disk.path, journal, options, false, true)? {
            log::info!(
                "{}: brought home what an earlier run left on the journal server as {}: {} transactions, {} blocks",
                disk.path.display(),
                one.name,
                one.report.transactions,
                one.report.blocks_written
            );
        }
    }
    Ok(())
}
