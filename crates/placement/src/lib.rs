//! The places a journal can live: which logs a VM's disks carry, and the routes that send each request to its place.
//!
//! A route ([`block_route::Route`]) belongs to one disk. [`DiskRoute`] gives what concerns a log to that log's keeper (module
//! `keeper`: the contract, with its hooks; `keepers`: held, stored, dropped, shipped; `nvm`: in a region of persistent memory).
//! [`Journals`] knows all logs of a VM: it finds them, opens and closes them, moves them from one place to
//! another, and finishes them after a death. What storage says of a log is read in one table ([`Stored`]).
//!
//! What this crate must never do: leave a lost journal unmarked on storage, or let an older version of a block land on a
//! newer one.
//!
//! Failure story: what a killed process held is in the VM's directory in tmpfs ([`AreaDirectory`]), in a region, or on a
//! server, and [`finish_directory`], [`recover_image`] and [`recover_remote_image`] bring it home; when storage fails,
//! what is owed stays owed.

#![forbid(unsafe_code)]

mod adopt;
mod aged;
mod copies;
mod description;
mod disk;
mod disk_route;
mod distrust;
mod earlier;
mod finish;
mod flush;
mod followed;
mod foreign;
mod found;
mod given_up;
mod hand_over;
mod journals;
mod keeper;
mod keepers;
mod layout;
mod log;
mod mark;
mod numbers;
mod nvm;
mod opening;
mod owed;
mod registry;
mod remote;
mod report;
mod resume;
mod scan;
mod stored;
mod unannounced;
mod watch;

pub use copies::finish_copies;
pub use description::{
    AreaDirectory, Description, DirectoryError, DirectoryIdentity, ImageDescription, LogDescription, MEMORY,
    THROUGH as PASSED_THROUGH, living_vmms, process_lives, process_started_at,
};
pub use disk::{Disk, DiskCounters, DiskOptions, PlacementKind};
pub use disk_route::DiskRoute;
pub use earlier::{Brought, finish_earlier};
pub use found::{
    FailedLog, Finish, FinishError, FinishedLog, finish_directory, finish_directory_into, remove_finished, sweep,
    sweep_after,
};
pub use given_up::{GivenUp, Loss, give_up, losses};
pub use hand_over::Change;
pub use journal_area::{AreaMemory, HotPages};
pub use journals::{Journals, JournalsOptions, TraceKind, Tracer};
pub use log::Log;
pub use mark::{HeldMark, MarkKind};
pub use nvm::{ManyAppends, NvmDisk, NvmFinished, NvmOptions, NvmReport, is_mark, recover_image};
pub use owed::{
    LostLog, Owed, area_of_marked, elsewhere, forget_left_guest, held_by_another, left_guest, note_left_guest, owed,
};
pub use registry::{LeftGuest, is_registered_in, own_place, own_places};
pub use remote::{
    MarkFound, RemoteMark, RemoteOptions, RemoteRecovered, RemoteReport, recover_remote_image, remote_epoch_of_image,
};
pub use report::{CountersReport, DiskReport, DurabilityReport, ProtectionReport, VmReport};
pub use stored::{Elsewhere, Says, Stored};
