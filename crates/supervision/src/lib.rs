//! A supervisor and its workers. A *worker* is a process that serves one VM and takes in what its guest says; it may die at any
//! instant. The *supervisor* starts it, watches it, and keeps what must not be closed when it does: descriptors, each with a name
//! and a few words that only workers understand.
//!
//! What it must never do: look at anything of a guest's. Failure story: a worker that is gone is an end of file here; what it had
//! said before is kept as it was said, message by message, and given to the next one in full.

#![forbid(unsafe_code)]

mod channel;
mod deaths;
pub mod depot;
mod host_budget;
mod kept;
pub mod stand_in;
mod vault;

pub use channel::{Channel, DESCRIPTORS_MAX};
pub use deaths::{DEATHS_MAX, Deaths, Next, OnCrash};
pub use host_budget::{AreaSize, HostBudget, Saying};
pub use kept::Kept;
pub use vault::{Found, Opened, Shelf, Store};

use serde::{Deserialize, Serialize};

/// The keys of doors, without the disk's name: their numbers belong to them.
pub const DOOR: &str = "door ";

/// What a supervisor says to a worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "order", rename_all = "kebab-case")]
pub enum Order {
    /// Somebody asks something over the stream that comes along: a line of JSON each way.
    Ask,
    /// What a worker before had kept under this key, with its descriptors.
    Kept {
        /// Its name.
        key: String,
        /// What belongs to it.
        data: String,
    },
    /// That was all: begin.
    Begin,
    /// A connection of a VMM to a disk comes along.
    Connection {
        /// Which disk.
        disk: usize,
        /// The VMM's process.
        pid: i32,
    },
    /// What became of a door that was to be shut.
    Shut {
        /// Of which disk.
        disk: usize,
        /// Nobody comes any more. Otherwise somebody is there, and it is open.
        is_shut: bool,
    },
    /// The VMM has ended: finish.
    Ended,
}

/// What a worker says to its supervisor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "said", rename_all = "kebab-case")]
pub enum Said {
    /// The disks are served; what the VMM needs comes along.
    Ready,
    /// Keep the descriptors that come along under this key, in the place of what was there.
    Keep {
        /// Its name.
        key: String,
        /// What belongs to them.
        data: String,
    },
    /// Listen at the socket that comes along, keep whoever connects, and give the connections in. The next worker is told of the door
    /// ([`DOOR`]). A door of that disk that is open listens there from now on, and whoever is inside stays.
    Door {
        /// Of which disk.
        disk: usize,
        /// What log lines call it.
        name: String,
    },
    /// Let go of what is kept under this key.
    Forget {
        /// Its name.
        key: String,
    },
    /// Close a door, unless somebody is inside: then nobody finds this disk any more. Is answered.
    Shut {
        /// Which disk.
        disk: usize,
    },
    /// Give in the connections of a door that an earlier worker has named.
    Open {
        /// Of which disk.
        disk: usize,
    },
    /// The driver of a disk has been let in.
    Began {
        /// Which disk.
        disk: usize,
    },
    /// Say, with a byte into the socket that comes along, when all of this was done that was said before: what is kept then is kept
    /// also over the supervisor's own death.
    Settle,
    /// Let go of all that is kept, and close the doors: the VMM has ended, and what it was owed is home.
    Clear,
}
