//! How long a disk takes: the drive of the 2012 paper, a SATA SSD, an NVMe drive, or none, so that what an experiment
//! shows does not depend on the disk under the host that it happens to run on.
//!
//! [`Model`] is arithmetic: requests and times go in, completions and times come out; it never looks at a clock, and
//! the same seed and the same requests give the same answer. [`Server`] runs one on the real clock for any number of
//! virtual disks, in this process or in others, which then share its arm, queue and cache; [`Client`] is what a virtual disk
//! holds of it. That, and the drives' names, are `disk-model-client`'s, which is all that a program that serves VMs needs.
//!
//! It must never touch data: bytes are stored elsewhere, and only their completion is delayed. Failure story: a server
//! that is gone is an error of the client's next call, and the virtual disk goes on without a model; a client that
//! breaks the protocol is dropped.

#![forbid(unsafe_code)]

mod completion;
mod drives;
mod flash;
mod model;
mod server;
mod spinning;
mod surface;
pub mod validate;

pub use completion::{Completion, Totals};
pub use disk_model_client::{Client, Error, Inbox, Kind, Profile, Request, time_scale};
pub use drives::{FlashDrive, SpinningDrive};
pub use model::Model;
pub use server::{Server, ServerOptions};
