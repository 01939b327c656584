//! Durability by age, as a state machine: what a guest committed is at most so old when it is durable on an ordinary disk, and
//! storage alone is, at every instant, a file system that any kernel or e2fsck recovers.
//!
//! The guest's log is held elsewhere and never reaches storage as it is. Every so often the transactions that are not durable yet
//! become one *compound transaction* in the journal's own place: of each home block the newest committed version, and what was
//! revoked and not journaled again. Appends (blocks that the durable bitmap calls free) go home first and are not in it.
//!
//! Four rules make it true, each the host's version of one that jbd2 keeps inside the guest:
//!
//! * (a) *write ahead*: no home write of a version before the compound that holds it is durable ([`Durability::write_begins`]);
//! * (b) *reuse*: no write and no discard to a block that a transaction freed or revoked before that one is durable (the same);
//! * (c) *ordered data*: what the guest was told is written before a commit is flushed before the commit block of the compound
//!   that holds it (`flush_body`, asserted in `write_commit`);
//! * (d) *tail*: the log's tail on storage moves only over copies that are durable at home, superseded or revoked by what is behind
//!   it, and the space is used again only when that superblock is durable (`droppable`, asserted in `drop_compounds`).
//!
//! And one more, because the guest's log and ours do not end at the same block:
//!
//! * (e) what the guest's own log would not bring back any more, ours does not either: a write to a block with such a copy waits
//!   until the log is empty.
//!
//! The same for what the guest has written already, past its journal, as ext4 does with its superblock:
//!
//! * (g) *past the journal*: what the guest has at home instead of a copy is replayed over for as long as its own log would do so, and no
//!   longer: a tail that passes the copy is answered when a compound has revoked it, whose flush covers what was written
//!   ([`Durability::write_carries`], `pass_over`). Nor do we write the copy over it. Who goes on after another machine is told of what was
//!   written so, or asked for, before ([`Past`]), which somebody has to keep ([`Durability::goes_over`]). With one exception: what was asked
//!   of the earlier machine when it died, and is not known so (of what is at home, nothing is), may be older than what this one found, and where the log
//!   has to be emptied before the guest's tail passes the copy, that goes home over it.
//!
//! A write of the guest may land long after it was asked for, when there is a newer version (a kernel's own superblock writes do; writes of
//! blocks that it commits meanwhile are against the rules of any kernel, and do no harm all the same):
//!
//! * (h) *land late*: a write that was asked for before a version that is durable, and that the guest's log has still, lands only where
//!   ours has a copy of that. Where it has none any more, a compound brings it once more before the write goes (`left_behind`). The copy
//!   stays owed: only what was asked for when there was that version brings it home, and only if nothing else was on its way to the
//!   same block at any time between, since of two either may land last (`depart`, [`Durability::write_ended`]). With one exception: of two
//!   writes to one block that both were not answered when the process died, who follows does not know which was asked for first.
//!
//! And one that spares a flush: with no age the guest's flush has to find durable what it has written home.
//!
//! * (f) *spared flushes*: a write to homes of which the durable log has copies, of each, need not be covered. A power cut with it or
//!   without it comes to the same, since a replay writes over it; by (d) the copies stay until a flush has covered the write, and by (e)
//!   the guest's own log would have written over it, too ([`Durability::write_ended`]).
//!
//! Pure: no I/O, no threads, no clock. Whoever runs it carries out [`Step`]s and says when they are done; operations of one list run
//! in any order. Within one sequence number a block is tagged or revoked, never both (`jbd2::Compound` refuses it).
//!
//! Failure story: when an operation fails, or something cannot be ([`Step::Failed`]), the machine holds nothing back any more and
//! promises nothing any more; who waits for durability is told that there is none. Whoever runs it has to say so on storage (the
//! error mark) before he lets anything go.

#![forbid(unsafe_code)]

mod blocks;
mod compound;
mod contract;
mod live;
mod machine;
mod window;

pub use blocks::BlockSet;
pub use contract::{
    Age, AnswerId, Committed, FoundCopy, FoundLog, FoundSaid, Freed, Kind, OperationId, Past, Place, Status, Step,
    Transaction, Version, View, WhenAsked, WriteId,
};
pub use machine::Durability;
