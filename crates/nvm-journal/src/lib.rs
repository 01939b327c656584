//! NJS: a journal of committed blocks on byte-addressable persistent memory (Zhang, Feng, Hua and Chen, "A Cost-efficient
//! NVM-based Journaling Scheme for File Systems", DATE 2018).
//!
//! * [`medium`] is the memory: a DAX file or devdax device, an ordinary file, tmpfs with the paper's delays, and, for
//!   tests, one that loses at a crash whatever it may.
//! * [`Journal`] commits transactions, updates old versions in place by what differs, collects garbage, and lets blocks go.
//! * [`Found`] reads a region as a crash left it.
//!
//! What is a home block's number, and when its content reaches its home, is the business of whoever uses this.
//!
//! It must never: let go of the latest committed version of a block unasked; count a transaction before all of it is
//! durable; claim more durability than was found; panic on what a region says.
//!
//! Failure story: a region that is damaged, somebody else's or too small is refused with a sentence and left as it is. A
//! medium that fails, fails for good; what was committed before is what the next reader finds.

mod difference;
mod error;
mod found;
mod journal;
mod layout;
pub mod medium;
mod owner;

pub use error::Error;
pub use found::{Found, Prepared};
pub use journal::{Journal, JournalCounters, JournalOptions, capacity, count_prepared, forget, withdraw_prepared};
pub use layout::{
    BLOCKS_MIN, Geometry, HEADER_BYTES, Header, HeaderKind, HeaderState, PAGE_BYTES, Pointer, RESERVED_HEADERS,
};
pub use owner::{ATTACHMENT_BYTES, Owner};
