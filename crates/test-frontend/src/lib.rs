//! A small vhost-user-blk front-end for tests and benchmarks: it plays the VMM and the guest's driver.
//!
//! It talks to any vhost-user-blk socket. Tests choose every guest address, write anything into rings and memory, cut
//! the connection and come back; benchmarks run a closed loop with a latency histogram. It checks nothing that a real
//! guest would not check: what it is for is to be wrong on purpose.
//!
//! * [`GuestRam`]: guest memory in memory files, shared with the device.
//! * [`DriverQueue`]: the driver's side of a split ring, honest or not.
//! * [`FrontEnd`]: the connection: handshake, start, stop, reconnect.
//! * [`TestDisk`]: reads, writes and the like, for tests that want an ordinary disk.
//! * [`run_load`]: a closed loop.
//!
//! Failure story: it is a test tool. What a device must not do to it (no answer in time, a protocol error) is an error
//! with a sentence; [`ANSWER_TIMEOUT`] bounds every wait.

mod disk;
mod front_end;
mod histogram;
mod load;
mod queue;
mod ram;

pub use disk::{Answer, STATUS_IO_ERROR, STATUS_OK, STATUS_UNANSWERED, STATUS_UNSUPPORTED, TestDisk, Transfer};
pub use front_end::{ANSWER_TIMEOUT, FrontEnd, FrontEndOptions, Inflight, PageLog};
pub use histogram::Histogram;
pub use load::{LoadOptions, LoadResult, Pattern, run_load};
pub use queue::{Descriptor, DriverQueue, QueueLayout, QueueOptions, descriptor_flags};
pub use ram::GuestRam;

/// Errors of the front-end: sentences.
pub type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;
