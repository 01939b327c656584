//! Directories and files that nobody but this process's user, and root, can have made or can change.
//!
//! amberlog keeps what a guest is owed in files that the next process believes. They lie in tmpfs, often below a directory
//! that every user of the host can write to. So a directory is opened once, judged by what was opened and not by its name,
//! and everything in it is reached from there.
//!
//! It must never follow a link that somebody else can have made, wait for what somebody else has put in the place of a file,
//! or remove anything because of its name alone. Failure story: what cannot be trusted is refused with a sentence that says
//! whose it is and what to do, and stays as it was.
#![forbid(unsafe_code)]

mod directory;
mod error;
mod file;
mod output;

pub use directory::{OwnDirectory, is_in_shared_place, is_name};
pub use error::Error;
pub use file::{How, check_opened};
pub use output::{create_output, keep_files_private, keep_files_private_for, open_output};
