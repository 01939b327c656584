//! The places a journal can live, behind one trait.
//!
//! A device (crate `block-device`) takes requests from its rings and asks its [`Route`] where each byte goes; the route
//! answers by writing into a [`Plan`]: operations for the disk engine, requests to hold back, requests that are done.

#![forbid(unsafe_code)]

mod adopt;
mod description;
mod disk;
mod finish;
mod flush;
mod found;
mod hand_over;
mod journal_route;
mod journals;
mod layout;
mod nvm;
mod plain;
mod remote;
mod report;
mod route;
mod scan;
mod segments;

pub use description::{AreaDirectory, Description, DirectoryError, LogDescription, process_started_at, registry};
pub use disk::{Disk, DiskCounters, DiskOptions, PlacementKind};
pub use found::{FailedLog, Finish, FinishError, FinishedLog, finish_directory};
pub use hand_over::Change;
pub use journal_route::JournalRoute;
pub use journals::{Journals, JournalsOptions, Log, TraceKind, Tracer};
pub use layout::LogIndex;
pub use nvm::{NvmDisk, NvmFinished, NvmOptions, NvmReport, NvmRoute, recover_image};
pub use plain::PlainRoute;
pub use remote::{
    MarkFound, RemoteMark, RemoteOptions, RemoteRecovered, RemoteReport, recover_remote_image, remote_epoch_of_image,
};
pub use report::{CountersReport, DiskReport, VmReport};
pub use route::{
    Buffer, DiskOperation, Identity, Operation, Plan, PlanAction, Request, RequestId, RequestKind, Route, Start,
    Status, Ticket,
};
