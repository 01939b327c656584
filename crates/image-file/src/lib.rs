//! What is asked of an image before anything is read from it as a disk: whether it is a file or a block device ([`open()`]), whether
//! its bytes are a disk at all ([`probe`]), whether QEMU has it open ([`QemuLock`]), and whether anything is under way on
//! it that a process asked for which has died ([`await_idle`]); and, for people, what is on it ([`content`]).
//!
//! Must never: write to an image, or say of a disk that a guest can make with its usual programs (partitions, file systems, swap,
//! LVM, zeros) that it is something else. Failure story: what cannot be read is an error, never "raw".

mod content;
mod format;
mod lock;
mod open;
mod seal;
mod stamp;

pub use content::content;
pub use format::{Format, OtherFormat, probe};
pub use lock::{QemuLock, await_idle, flock_locks_bytes, mark_under_way};
pub use open::open;
pub use seal::Seal;
pub use stamp::{Stamp, sum};
