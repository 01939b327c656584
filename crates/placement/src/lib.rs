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
mod attached;
mod copies;
mod description;
mod directory_error;
mod disk;
mod disk_route;
mod distrust;
mod durability_report;
mod earlier;
mod finish;
mod finished;
mod flush;
mod followed;
mod foreign;
mod found;
mod given_up;
mod going_on;
mod hand_over;
mod held_mark;
mod its_home;
mod journals;
mod keeper;
mod keepers;
mod kept_log;
mod layout;
mod left;
mod left_copy;
mod left_to_guest;
mod log;
mod mark;
mod numbers;
mod nvm;
mod opening;
mod owed;
mod processes;
mod registry;
mod remote;
mod report;
mod resume;
mod scan;
mod shared_disk;
mod stored;
mod unannounced;
mod watch;

pub use attached::DiskOptions;
pub use copies::finish_copies;
pub use description::{
    AreaDirectory, Description, DirectoryIdentity, ImageDescription, LogDescription, MEMORY, living_vmms,
};
pub use directory_error::{DirectoryError, THROUGH as PASSED_THROUGH};
pub use disk::{Disk, DiskCounters, DiskSettings, PlacementKind};
pub use disk_route::DiskRoute;
pub use durability_report::DurabilityReport;
pub use earlier::{Brought, finish_earlier};
pub use finished::{FailedLog, Finish, FinishError, FinishedLog};
pub use found::{finish_directory, finish_directory_into, remove_finished, sweep, sweep_after};
pub use given_up::{GivenUp, Loss, give_up, losses};
pub use hand_over::Change;
pub use held_mark::HeldMark;
pub use journal_area::{AreaMemory, HotPages};
pub use journals::{Journals, JournalsOptions, TraceKind, Tracer};
pub use kept_log::KeptLog;
pub use log::Log;
pub use mark::MarkKind;
pub use nvm::{
    Condition as NvmCondition, ManyAppends, NvmDisk, NvmFinished, NvmOptions, NvmReport, is_mark, recover_image,
};
pub use owed::{
    LostLog, Owed, area_of_marked, elsewhere, forget_left_guest, held_by_another, left_guest, marked_elsewhere,
    marked_for, note_left_guest, owed,
};
pub use processes::{process_lives, process_started_at};
pub use registry::{LeftGuest, is_registered_in, own_place, own_places};
pub use remote::{
    MarkFound, RemoteMark, RemoteOptions, RemoteRecovered, RemoteReport, recover_remote_image, remote_epoch_of_image,
};
pub use report::{CountersReport, DiskReport, ProtectionReport, VmReport};
pub use stored::{Elsewhere, Says, Stored};
