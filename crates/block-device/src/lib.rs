//! virtio-blk over vhost-user: rings, requests, routing, the io_uring disk engine.
//!
//! One [`Device`] is one Unix socket on which an unmodified VMM finds one disk. Two threads belong to it: the *control*
//! thread accepts connections and answers vhost-user messages; the *worker* thread owns everything that moves data: the
//! rings, the [`Route`](block_route::Route) that decides where each request goes, and the disk engine. The control thread
//! tells the worker what the VMM said and waits for it, so nothing here takes a lock on the data path; what a route takes
//! there is its own affair.
//!
//! * [`Image`]: the file or block device behind the disk: opened, locked, measured.
//! * [`Device`], [`DeviceHandle`]: start, ask, stop.
//! * [`Observer`]: what the owner of a device wants to be told.
//! * [`Gate`]: whether a guest may use the disk, where it can be moved to another host.
//!
//! What it must never do: trust anything that a guest wrote (rings, descriptors, headers), write to guest memory without
//! [`MemoryTable::prepare_write`](guest_memory::MemoryTable::prepare_write), acknowledge what storage has refused, or
//! touch a byte of the image outside the disk's size.
//!
//! Failure story: a bad request fails alone; a bad ring stops alone and the log says so; a connection that breaks the
//! protocol is dropped and the next one is awaited; an error of storage becomes an I/O error in the guest. When this
//! process dies, the in-flight region (shared memory kept by the VMM) says which requests have to be done again.

// The fuzz target names this crate from outside, and is a unit test as well.
#[cfg(test)]
extern crate self as block_device;

mod chain;
mod config;
mod config_space;
mod control;
mod counters;
mod device;
mod engine;
mod entrance;
mod error;
mod event;
#[cfg(any(test, feature = "fuzzing"))]
#[doc(hidden)]
pub mod fuzzing;
mod gate;
mod image;
mod inflight;
mod log_limit;
mod request;
mod ring;
mod session;
mod together;
mod tracker;
mod worker;

pub use config::{DeviceConfig, Observer, Peer};
pub use config_space::{QUEUE_SIZE_MAX, QUEUES_MAX, REQUEST_BYTES_MAX, SEGMENTS_MAX};
pub use control::listen;
pub use counters::{Counters, CountersSnapshot};
pub use device::{Device, DeviceHandle, DeviceParts, Starting};
pub use entrance::Entrance;
pub use error::Error;
pub use gate::{Begin, Gate};
pub use image::{CacheMode, DirectAlignment, Image, ImageKind, ImageOptions, SECTOR_BYTES, unlock as unlock_image};
pub use image_file::await_idle;
