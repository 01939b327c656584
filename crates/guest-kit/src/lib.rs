//! Real guests for tests, the demo and experiments: a kernel under unmodified QEMU ([`platform`]), on
//! images made without privileges, driven by a shell script and judged from outside.
//!
//! This crate knows nothing of how amberlog works: it runs guests with QEMU's own drives or below
//! a wrapper command, and judges images with e2fsprogs. It must never need root, mount anything on
//! the host, or leave a process behind. Its program `packaged` alone needs root, and mounts in namespaces of its own; `crash-rounds
//! --memory-stress` changes the host's memory management where it may, and mounts a tmpfs, until it ends.
//!
//! Failure story: every wait is bounded, every failure is a sentence with the end of the guest's
//! console. See `crates/guest-kit/tests/` for examples of use.

#![forbid(unsafe_code)]

pub mod accelerator;
pub mod aged;
pub mod assets;
mod cloud_hypervisor;
mod cpio;
pub mod error;
pub mod evidence;
pub mod guest;
pub mod image;
pub mod interrupt;
pub mod journal_server;
pub mod judge;
pub mod kernel;
mod modules;
mod native;
pub mod platform;
pub mod program;
mod programs;
mod qemu;
pub mod qmp;
pub mod report;
pub mod scratch;
pub mod spec;
pub mod toolchain;
pub mod tree;
mod workers;
pub mod workload;

pub use accelerator::Accelerator;
pub use error::{Error, Result};
pub use guest::Guest;
pub use kernel::Kernel;
pub use platform::Platform;
pub use programs::Programs;
pub use report::{Acknowledged, Reported};
pub use spec::{AtEnd, Cache, Disks, Drive, GuestSpec};
pub use workers::worker_of;

pub use rustix::process::Signal;
