//! How long a disk takes: the drive of the 2012 paper, a SATA SSD, an NVMe drive, or none, so that what an experiment
//! shows does not depend on the disk under the host that it happens to run on.
//!
//! [`Model`] is arithmetic: requests and times go in, completions and times come out; it never looks at a clock, and
//! the same seed and the same requests give the same answer. [`Server`] runs one on the real clock for any number of
//! virtual disks, in this process or in others, which then share its arm, queue and cache; [`Client`] is what a virtual disk
//! holds of it.
//!
//! It must never touch data: bytes are stored elsewhere, and only their completion is delayed. Failure story: a server
//! that is gone is an error of the client's next call, and the virtual disk goes on without a model; a client that
//! breaks the protocol is dropped.

#![forbid(unsafe_code)]

mod client;
mod error;
mod flash;
mod model;
mod profile;
mod protocol;
mod request;
mod server;
mod spinning;
mod surface;
pub mod validate;

pub use client::{Client, Inbox};
pub use error::Error;
pub use model::Model;
pub use profile::{FlashDrive, Profile, SpinningDrive};
pub use request::{Completion, Kind, Request, Totals};
pub use server::{Server, ServerOptions};

/// A factor of time, as an argument or an option has it: 0.0001 to 10000.
///
/// # Errors
/// A sentence when the text is no such number.
pub fn time_scale(text: &str) -> Result<f64, String> {
    let factor: f64 = text.parse().map_err(|_| format!("'{text}' is no number"))?;
    if (0.0001..=10_000.0).contains(&factor) {
        Ok(factor)
    } else {
        Err(format!("{factor} is not between 0.0001 and 10000"))
    }
}
