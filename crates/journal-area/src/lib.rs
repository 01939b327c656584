//! The in-VMM journal area of "VM aware journaling" (Huang and Chang, SPE 2012, sections 3 and 4): control blocks,
//! tuples, the five operations.
//!
//! For every log there is a [`VmJcb`], the paper's control block: which log block is where ([`Location`], 4 bytes in a
//! tmpfs file that outlives the process), and two tables in which it is found by its page and by the home block that it is the newest version of
//! (three bytes each, or a little more). All are in pieces that come and go with the live part of the log. The paper's operations are called after what they do: [`JournalArea::make_log`] (`LOG_OP_INIT`),
//! [`JournalArea::forget_log`] (`LOG_OP_CLEANUP`), [`JournalArea::hold`] (`LOG_OP_MPROTECT`), [`JournalArea::owed`]
//! (`LOG_OP_QUERY`), [`JournalArea::take_for_recovery`] (`LOG_OP_RECOVER`). What the paper's patched file system told its VMM in hypercalls
//! is read here from the guest's ordinary log writes.
//!
//! What it must never do: let the content of a committed, newest version change or go before the same content is at
//! home, or something newer is committed; say that a batch is held before its pages are protected; do I/O of its own.
//!
//! Each log has a lock of its own; what is common to all of a VM's (its pages, its memory) is synchronised by itself. `logs` has the order, `pages` the
//! argument.
//!
//! Failure story: the process may be killed between any two stores. The tables are changed one word at a time and in an
//! order in which every prefix is right; [`FoundLog`] opens what is left. When memory runs out, data blocks go to their
//! own place on storage, pages that cannot be copied keep their writers waiting, and the area asks for blocks to be
//! written home; nothing is dropped.

#![forbid(unsafe_code)]

mod absorbed;
mod area;
mod batch;
mod budget;
mod commit;
mod contradiction;
mod error;
mod faults;
mod home;
mod index;
mod inflight;
mod jcb;
mod lifetime;
mod listed;
mod location;
mod log;
mod logs;
mod lone;
mod notes;
mod operations;
mod pages;
mod pool;
mod positions;
mod pressure;
mod questions;
mod rebuild;
mod shown;
mod strays;
mod table;
mod tail;
mod taking;

pub use area::{Adopted, AreaMemory, CommittedVersion, JournalArea, NotHome, Owed, Pressure, Waker};
pub use batch::{Accepted, Content, LogWrite, Outcome};
pub use error::Error;
pub use home::{HomeWrite, HostWrite, Over, Source};
pub use jcb::{Counters, Holding, LogShape, VmJcb};
pub use location::{Location, Past};
pub use log::{FoundLog, HeldLog};
pub use logs::LogId;
pub use pages::HotPages;
pub use shown::Outside;
pub use strays::{Mark, Strays};
pub use table::{Doubt, LOG_BLOCKS_MAX, Opening, Tail, is_open_in, opening_number_of};
pub use tail::SuperblockEffect;
pub use taking::Taking;
