//! The door at which a VMM finds a disk: the vhost-user connection, kept open while the workers behind it come and go.
//!
//! A [`Door`] passes messages on between VMM and worker, whole and one at a time, and notes what the VMM has said of its device:
//! memory, rings, kick and call descriptors, the in-flight region ([`Record`]). When the worker dies the connection stays. The next
//! worker is told what was noted, as a VMM that connects again would tell it, and then what was not answered yet. The VMM sees that
//! an answer takes longer, and nothing else.
//!
//! What is noted is put on a shelf that may outlive this process ([`supervision::Shelf`]); then another one opens the door again, with the
//! VMM inside.
//!
//! What it must never do: look at a guest's memory or rings, say anything to a VMM that no worker has said. Failure story: a
//! VMM that says nonsense loses its connection, as with a worker alone.

#![forbid(unsafe_code)]

mod callers;
mod door;
mod message;
mod notes;
mod record;

pub use callers::{Callers, HEADER_BYTES, process_of};
pub use door::{Admission, Door};
pub use message::{Message, say_goodbye};
pub use notes::is_disk_name;
pub use record::Record;
