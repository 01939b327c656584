//! What test guests run, and the formats by which the host checks their work afterwards: the same
//! code writes in the guest and verifies on the host, from the same seed.
//!
//! Must never decide whether a recovery is right by trusting anything that the image says about
//! itself: every stamp is recomputed from the seed. Failure story: inside the guest any failed
//! system call ends the tool with a sentence on the console; on the host, any content is input.

#![forbid(unsafe_code)]

pub mod build;
pub mod compile;
pub mod database;
pub mod filebench;
pub mod gaps;
pub mod iozone;
pub mod latency;
pub mod load;
pub mod memory;
pub mod mix;
pub mod namespace;
pub mod nvm;
pub mod options;
pub mod postgresql;
pub mod record;
pub mod records;
pub mod report;
pub mod reuse;
pub mod rocksdb;
pub mod scribble;
pub mod sources;
pub mod sqlite;
pub mod steady;
pub mod table;
pub mod tree;
pub mod updates;

pub use seeded_random as random;

/// What tools return: an error is a sentence.
pub type Result<T> = std::result::Result<T, String>;

/// Turns an I/O error into a sentence that names the file.
pub(crate) fn at(action: &'static str, path: impl AsRef<std::path::Path>) -> impl FnOnce(std::io::Error) -> String {
    move |error| format!("cannot {action} {}: {error}", path.as_ref().display())
}
