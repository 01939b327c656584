//! What a daemon asks of its workers, a line of JSON each.

use crate::vm::Bounds;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::{Deserialize, Serialize};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

/// What is asked of a worker.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "kebab-case")]
pub enum Asked {
    /// What is wanted of the VM from now on.
    Want {
        /// serve, gone, stop or leave.
        wanted: WantedName,
        /// With `serve`: the whole configuration. Without one it is served as it was.
        config: Option<String>,
    },
    /// Whether it answers: that waits for nothing.
    Alive,
    /// Its entry in `status`.
    Status,
    /// See `Slot::set_room`.
    Room {
        /// What the host leaves this VM; nothing: as much as its own budget.
        room_bytes: Option<u64>,
    },
    /// See `Slot::flush`.
    Flush {
        /// Seconds.
        patience_seconds: u64,
    },
    /// See `Slot::change_placement`.
    Placement {
        /// Which disk.
        disk: String,
        /// Where to.
        placement: String,
        /// How old what is committed may be, if that is said anew.
        #[serde(default)]
        durable_within: Option<String>,
        /// Seconds.
        patience_seconds: u64,
    },
    /// Whether a VMM finds its disks.
    IsServed,
    /// See `Slot::freeze`.
    Freeze {
        /// Seconds.
        seconds: u64,
    },
    /// See `Slot::thaw`.
    Thaw,
    /// See `Slot::snapshot`.
    Snapshot {
        /// Of which disk.
        disk: String,
        /// Where to.
        out: PathBuf,
        /// Seconds.
        patience_seconds: u64,
        /// Whether the guest may be made to wait.
        may_wait: bool,
        /// The snapshot that has the rest.
        #[serde(default)]
        since: Option<String>,
    },
    /// See `Slot::follow_power`.
    FollowPower {
        /// Or on mains.
        on_battery: bool,
        /// Seconds.
        patience_seconds: u64,
    },
    /// See `Slot::change_disks`.
    ChangeDisks {
        /// Which.
        change: DiskChange,
    },
    /// See `Slot::resize`.
    Resize {
        /// Which disk.
        disk: String,
        /// How large.
        size_bytes: u64,
    },
    /// See `Slot::throttle`.
    Throttle {
        /// Which disk.
        disk: String,
        /// How much.
        bounds: Bounds,
    },
    /// See `Slot::check_can_be_left`.
    CheckLeft {
        /// Whether it may be paused.
        with_paused: bool,
    },
    /// See `Slot::hand_over`.
    HandOver {
        /// Seconds.
        patience_seconds: u64,
    },
}

/// How disks are to come or go.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DiskChange {
    /// As this configuration says.
    Config(String),
    /// One more, written as in the configuration.
    Add(String),
    /// One less, by name.
    Remove(String),
}

/// A `Wanted` without what belongs to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WantedName {
    /// `Wanted::Serve`.
    Serve,
    /// `Wanted::Gone`.
    Gone,
    /// `Wanted::Stop`.
    Stop,
    /// `Wanted::Leave`.
    Leave,
}

/// Whether whoever asked has gone, and nobody waits for the answer. Who has shut the half of the stream on which he asked is there still.
pub fn has_gone(asker: &UnixStream) -> bool {
    let mut list = [PollFd::new(asker, PollFlags::empty())];
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut list, Some(&at_once)).is_ok() && list[0].revents().contains(PollFlags::HUP)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_has_asked_and_waits_has_not_gone() {
        let (ours, asker) = UnixStream::pair().expect("a pair");
        assert!(!has_gone(&ours));
        asker.shutdown(std::net::Shutdown::Write).expect("shut");
        assert!(!has_gone(&ours), "it reads the answer");
        drop(asker);
        assert!(has_gone(&ours));
    }
}
