//! A virtual disk's end of a modelled one: the names of drives, what is said over the socket, and who speaks there.
//!
//! The models are `disk-model`'s, in another program: what serves VMs carries no simulators, and asks one that runs elsewhere
//! how long its requests take.
//!
//! It must never touch data, or know how long anything takes: bytes are stored elsewhere, and only their completion is delayed.
//! Failure story: a model that is gone is an error of the client's next call, and the virtual disk goes on without one.

#![forbid(unsafe_code)]

mod client;
mod error;
mod profile;
pub mod protocol;
mod request;

pub use client::{Client, Inbox};
pub use error::Error;
pub use profile::Profile;
pub use request::{Kind, Request};

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
