//! Who besides the daemon may reach what a VMM needs: its sockets, the file of its guest's memory, and the way there.
//!
//! A VMM that is another user than the daemon gets no more than that: it can pass through the directories, and cannot list
//! them, and everything else in them is the daemon's alone.

use anyhow::Context;
use rustix::fs::{Gid, Mode, OFlags, Uid};
use serde::Deserialize;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

/// As it is written in the configuration: `[sockets]`, or `[vm.sockets]` for one VM.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AccessEntry {
    owner: Option<String>,
    group: Option<String>,
    mode: Option<String>,
}

/// The same, looked up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    owner: Option<Uid>,
    group: Option<Gid>,
    mode: u32,
}

/// Sockets and files that are the daemon's own.
const OWN: u32 = 0o600;
/// A directory that is the daemon's own.
const OWN_DIRECTORY: u32 = 0o700;

impl AccessEntry {
    /// Looks users and groups up.
    ///
    /// # Errors
    /// A sentence about what is unknown or would open the sockets to everybody.
    pub fn check(&self) -> anyhow::Result<Access> {
        let owner = self.owner.as_deref().map(user).transpose()?;
        let group = self.group.as_deref().map(self::group).transpose()?;
        let mode = match &self.mode {
            None if group.is_some() => 0o660,
            None => OWN,
            Some(text) => u32::from_str_radix(text, 8)
                .ok()
                .filter(|mode| mode & 0o600 == 0o600 && mode & !0o770 == 0)
                .with_context(|| {
                    format!(
                        "sockets: mode = \"{text}\" cannot be: it is octal, \"0600\" or, with a group, \"0660\"; who is \
                         neither owner nor in the group has no business at a disk"
                    )
                })?,
        };
        Ok(Access { owner, group, mode })
    }
}

fn user(name: &str) -> anyhow::Result<Uid> {
    if let Ok(number) = name.parse() {
        return Ok(Uid::from_raw(number));
    }
    let user = nix::unistd::User::from_name(name).with_context(|| format!("sockets: looking up the user {name}"))?;
    let user = user.with_context(|| format!("sockets: there is no user {name} on this machine"))?;
    Ok(Uid::from_raw(user.uid.as_raw()))
}

fn group(name: &str) -> anyhow::Result<Gid> {
    if let Ok(number) = name.parse() {
        return Ok(Gid::from_raw(number));
    }
    let group = nix::unistd::Group::from_name(name).with_context(|| format!("sockets: looking up the group {name}"))?;
    let group = group.with_context(|| format!("sockets: there is no group {name} on this machine"))?;
    Ok(Gid::from_raw(group.gid.as_raw()))
}

impl Access {
    /// Whether somebody besides the daemon's user may come.
    pub fn is_shared(&self) -> bool {
        self.owner.is_some() || self.group.is_some()
    }

    /// The bits of a directory's mode, beside its owner's, with which it can be passed through: of the VM's own directories, and
    /// with `above` of those that all VMs share, where others may come from other groups.
    pub fn way(&self, above: bool) -> u32 {
        match (self.owner, self.group, above) {
            (None, None, _) => 0,
            (None, Some(_), false) => 0o010,
            _ => 0o011,
        }
    }

    /// Gives a socket to those who may connect.
    ///
    /// # Errors
    /// When this process may not: only root may give things to another user, or to a group it is not in.
    pub fn open_socket(&self, path: &Path) -> anyhow::Result<()> {
        self.give(path, self.mode)
    }

    /// Lets them pass through a directory of one VM.
    ///
    /// # Errors
    /// As [`Access::open_socket`].
    pub fn open_directory(&self, path: &Path) -> anyhow::Result<()> {
        if let Some(group) = self.group {
            rustix::fs::chown(path, None, Some(group)).with_context(|| self.of(path))?;
        }
        set_mode(path, OWN_DIRECTORY | self.way(false))
    }

    /// Makes the file of the guest's memory, for who may start the VMM.
    ///
    /// # Errors
    /// As [`Access::open_socket`].
    pub fn make_memory(&self, path: &Path) -> anyhow::Result<()> {
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        rustix::fs::open(path, flags, Mode::from_raw_mode(OWN))
            .with_context(|| format!("making the file of the guest's memory, {}", path.display()))?;
        self.give(path, self.mode)
    }

    fn give(&self, path: &Path, mode: u32) -> anyhow::Result<()> {
        if self.is_shared() {
            rustix::fs::chown(path, self.owner, self.group).with_context(|| self.of(path))?;
        }
        set_mode(path, mode)
    }

    fn of(&self, path: &Path) -> String {
        let owner = self.owner.map_or_else(|| "its owner".to_owned(), |owner| format!("user {}", owner.as_raw()));
        let group = self.group.map_or_else(|| "its group".to_owned(), |group| format!("group {}", group.as_raw()));
        format!(
            "giving {} to {owner} and {group} (sockets, in the configuration): only root may give to another user, and others \
             only to a group that they are in",
            path.display()
        )
    }
}

/// Lets those through a directory that VMs of several users and groups share; what is in it has modes of its own. It may be
/// anybody's, as /dev/shm is: nothing is taken away.
///
/// # Errors
/// When it does not let them through, and is not ours.
pub fn open_above(path: &Path, way: u32) -> anyhow::Result<()> {
    let metadata = std::fs::metadata(path).with_context(|| format!("examining {}", path.display()))?;
    let mode = metadata.permissions().mode() & 0o7777;
    if mode & way == way { Ok(()) } else { set_mode(path, mode | way) }
}

fn set_mode(path: &Path, mode: u32) -> anyhow::Result<()> {
    let set = |error: io::Error| anyhow::Error::new(error).context(format!("setting the mode of {}", path.display()));
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).map_err(set)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(owner: Option<&str>, group: Option<&str>, mode: Option<&str>) -> AccessEntry {
        let text = |text: Option<&str>| text.map(str::to_owned);
        AccessEntry { owner: text(owner), group: text(group), mode: text(mode) }
    }

    #[test]
    fn the_default_is_the_daemons_own() {
        let access = entry(None, None, None).check().expect("good");
        assert_eq!((access.mode, access.is_shared(), access.way(false), access.way(true)), (0o600, false, 0, 0));
    }

    #[test]
    fn names_and_numbers_are_looked_up() {
        let access = entry(Some("root"), Some("0"), None).check().expect("good");
        assert_eq!((access.owner, access.group, access.mode), (Some(Uid::ROOT), Some(Gid::ROOT), 0o660));
        assert_eq!(access.way(false), 0o011, "the owner of the sockets is not in the group of the directories");
        let access = entry(None, Some("root"), Some("0600")).check().expect("good");
        assert_eq!((access.mode, access.way(false), access.way(true)), (0o600, 0o010, 0o011));
        for (entry, expected) in [
            (entry(Some("nobody-of-this-name"), None, None), "no user nobody-of-this-name"),
            (entry(None, Some("nobody-of-this-name"), None), "no group nobody-of-this-name"),
            (entry(None, None, Some("0666")), "has no business at a disk"),
            (entry(None, None, Some("0060")), "cannot be"),
            (entry(None, None, Some("rw")), "cannot be"),
        ] {
            let error = format!("{:#}", entry.check().expect_err(expected));
            assert!(error.contains(expected), "{error}");
        }
    }
}
