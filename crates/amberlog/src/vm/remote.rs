//! Journal servers of a VM's disks.

use super::disk_option::DiskOption;
use command_line::remote_options::RemoteTrust;
use placement::RemoteOptions;

/// Says where a disk's journals go.
pub fn options(option: &DiskOption, name: &str, trust: &RemoteTrust) -> Option<RemoteOptions> {
    let remote = option.remote.as_ref()?;
    let name = remote.name.clone().unwrap_or_else(|| name.to_owned());
    Some(RemoteOptions { client: trust.client(&remote.address), name })
}
