//! What the command lines of amberlog's programs share: exit codes, logging, the options that say how a journal server is
//! reached, how one program becomes another, and the manual pages and completions of each.
//!
//! What it must never do: know a command. Failure story: none; every error is the caller's to report.

#![forbid(unsafe_code)]

pub mod documents;
pub mod exit;
mod journal;
mod log_limit;
pub mod logging;
mod message;
pub mod output;
mod priority;
pub mod programs;
pub mod remote_options;
