//! The contract between moving bytes and deciding where they go.
//!
//! A device (crate `block-device`) takes requests from its rings and asks its [`Route`] where each byte goes; the route
//! answers by writing into a [`Plan`]: operations for the disk engine, requests to hold back, requests that are done. So
//! a device can be tested without journals, and a route without a device.
//!
//! What this crate must never do: I/O, or know what a journal is ([`LogIndex`] is a number that is passed on).
//!
//! Failure story: none of its own. A plan is carried out whole or the device stops; an operation's error reaches the
//! route with its ticket and the request with its hold.

#![forbid(unsafe_code)]

mod contract;
mod plain;
pub mod segments;

pub use contract::{
    Buffer, DiskOperation, Identity, LogIndex, Operation, Plan, PlanAction, Request, RequestId, RequestKind, Route,
    Start, Status, Ticket,
};
pub use plain::{PlainRoute, whole};
