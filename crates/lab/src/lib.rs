//! The papers' experiments on real guests: which there are, how each is run, what is kept of it, and a page that holds our
//! figures against the papers' numbers.
//!
//! An experiment is a short text in `experiments/` (what the paper did, what is done here, what differs, what the paper
//! found) with a few keys that say how to run it. A run is a number of *cells*: one mode, number of guests, disk and
//! parameter, one iteration. Each cell's raw result is kept as a file of its own, which is also how a run that was
//! interrupted goes on.
//!
//! It must never print a number that was not measured, nor average over what failed. Failure story: a guest that hangs
//! is killed at its time limit, its console is kept beside the results, and the cell is marked as failed; the others go
//! on.

#![forbid(unsafe_code)]

mod aged;
pub mod binding;
pub mod catalogue;
pub mod cell;
pub mod claim;
pub mod clocks;
mod counters;
pub mod crash;
pub mod error;
pub mod fields;
pub mod flash;
pub mod headline;
mod integrity;
mod journal_server;
pub mod load;
pub mod machine;
pub mod measured;
pub mod merge;
pub mod only;
pub mod paper;
mod processors;
mod records;
pub mod report;
pub mod results;
pub mod rig;
pub mod run;
mod samples;
pub mod shootout;
pub mod sight;
pub mod sizes;
pub mod statistics;
pub mod verdict;
pub mod workload;

pub use error::{Error, Result};
