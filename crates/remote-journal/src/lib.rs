//! The remote journal: a guest's journal shipped to a server, as in "remote journaling" (2005).
//!
//! * [`message`]: the wire protocol. [`security`]: TLS, secrets, certificates.
//! * [`store`]: batches in append-only segments, durable group by group; with the feature `jetstream` also in a stream of
//!   NATS JetStream.
//! * [`server`]: the server. [`client`]: the other end of the wire.
//!
//! What must always hold: a batch is acknowledged only when it is durable; only who has a journal's highest epoch adds to
//! it; what is fetched is complete and whole, or refused. What comes from the network never makes this panic, use unbounded
//! memory, or reach another client's journals.
//!
//! Failure story: whatever goes wrong ends the connection with a reason; the client falls back to storage (crate
//! `placement`), and what the server keeps stays fetchable.

#![forbid(unsafe_code)]

mod bytes;
pub mod client;
#[cfg(feature = "jetstream")]
pub mod jetstream;
mod link;
pub mod message;
pub mod security;
pub mod server;
#[cfg(test)]
#[path = "../tests/standstill/mod.rs"]
mod standstill;
pub mod store;

pub use client::{BlockingClient, Client, ClientError, ClientOptions, FetchedLog};
pub use link::LinkError;
pub use security::{ClientSecurity, Secrets, random};
pub use server::{SIGN_WITHIN, Server, ServerOptions};
