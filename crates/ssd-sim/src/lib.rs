//! Flash translation layers and what they cost.
//!
//! A [`device::Device`] serves a block trace's requests through one of four FTLs on a simulated flash memory and
//! counts every operation: erases, copies, merges, mapping traffic, and the time they take. The model is that of
//! "Extending Lifetime and Reducing Garbage Collection Overhead of Solid State Disks with Virtual Machine Aware
//! Journaling" (2010): one chip's operations, one after another, with the times of its Table II.
//!
//! What this crate must never do: keep the trace, let an FTL break the flash's rules, or let an option be accepted
//! and ignored. Memory is bounded by the geometry: at most 12 bytes per flash page.
//!
//! Failure story: a broken rule, a full device or a worn-out one is a [`flash::Halt`], an impossible option is a
//! sentence from `check`; nothing panics on a trace's content.
#![deny(unsafe_code)]

pub mod blocks;
pub mod cache;
pub mod device;
pub mod flash;
pub mod ftl;
pub mod geometry;
pub mod histogram;
mod large_pages;
pub mod random;
pub mod report;
pub mod run;
pub mod workload;
