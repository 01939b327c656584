//! Disk models of a VM: `model=NAME` is one modelled disk for all disks of a run that name it, which `amberlog run` has started;
//! `model=SOCKET` one that `amberlog disk-model` serves to several runs, which then share its arm, queue and cache.
//!
//! Either is a process of `amberlog-lab`: what serves VMs carries no simulators, and only asks.

use anyhow::Context;
use disk_model_client::{Client, Profile};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

/// The value of `model=`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ModelChoice {
    /// A drive by name, of this run alone.
    Own(Profile),
    /// The socket of a shared one.
    Shared(PathBuf),
}

impl FromStr for ModelChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.contains('/') {
            Ok(ModelChoice::Shared(PathBuf::from(text)))
        } else {
            text.parse().map(ModelChoice::Own)
        }
    }
}

/// Where a drive of a run answers whose sockets have names that begin so.
pub fn socket_of(sockets: &Path, drive: Profile) -> PathBuf {
    let mut socket = sockets.as_os_str().to_owned();
    socket.push("-");
    socket.push(drive.name());
    socket.into()
}

/// Room on the chosen modelled disk for one of `size_bytes`; a drive of the run's own answers below `sockets`.
pub fn connect(
    choice: Option<&ModelChoice>,
    sockets: Option<&Path>,
    size_bytes: u64,
) -> anyhow::Result<Option<Arc<Client>>> {
    let client = match choice {
        None => return Ok(None),
        Some(ModelChoice::Shared(socket)) => Client::connect(socket, size_bytes)?,
        Some(ModelChoice::Own(drive)) => {
            let sockets = sockets.with_context(|| format!("model={drive}: nobody has started that drive"))?;
            Client::connect(&socket_of(sockets, *drive), size_bytes).with_context(|| format!("model={drive}"))?
        }
    };
    Ok(Some(Arc::new(client)))
}
