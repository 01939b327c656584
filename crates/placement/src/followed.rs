//! The log of compounds (crate `durability`) that an earlier process has left on storage beside a log that is held and goes on: what a replay
//! would bring home now, and what the held log says of each of its blocks.
//!
//! Whoever goes on builds on it, so nothing may be taken for durable that is not, nor for home. What a replay finds is what the host sees;
//! that it may be lost still is the machine's to see to, which flushes before all else. A copy is the newest version of its block only if its
//! bytes are; everything else that is owed is taken for not durable.
//!
//! Failure story: where anything does not fit (a damaged log, numbers that the table does not know), nothing is followed, and why is said.

use crate::finish::StoredLog;
use crate::log::Log;
use durability::{FoundCopy, FoundLog, FoundSaid};
use jbd2::{Commit, Format, LogRead, Place, Plan, ReplayError, Superblock, Verdict, Visitor, walk};
use journal_area::JournalArea;
use std::collections::HashMap;
use std::sync::Arc;

/// The order of each commit block that ends a transaction, and when it was made.
struct Commits(Vec<(u64, (u64, u32))>);

impl<L: LogRead> Visitor<L> for Commits {
    fn commit(
        &mut self,
        _log: &mut L,
        place: Place,
        commit: &Commit<'_>,
        _verdict: Verdict,
        own_transaction_ends: bool,
    ) -> Result<(), ReplayError<L::Error>> {
        if own_transaction_ends {
            self.0.push((place.order, (commit.seconds(), commit.nanoseconds())));
        }
        Ok(())
    }
}

/// The newest version of a home block that is committed and not at home, if there is one: its transaction and its content.
type Owed<'a> = &'a dyn Fn(u64) -> Option<(u32, Arc<[u8]>)>;

/// Reads what is in the log's own place, whose superblock on storage is `raw` and whose layout for its guest is `format`. `numbered` is the
/// first number that no compound has, as the table says it.
pub(crate) fn found(
    log: &Log,
    area: &JournalArea,
    raw: &[u8],
    format: &Format,
    owed: Owed<'_>,
    numbered: Option<u32>,
) -> Result<FoundLog, String> {
    let mut stored = StoredLog { place: &log.place, journal: &log.journal.file };
    let (said, on_storage) = Superblock::parse(raw).map_err(|error| error.to_string())?;
    if on_storage != *format {
        return Err("its superblock on storage has another format than its guest's".to_owned());
    }
    let mut commits = Commits(Vec::new());
    let walked =
        walk(&mut stored, format, said.start, said.sequence, &mut commits).map_err(|error| error.to_string())?;
    // The last one that was begun may have been made, or half made: that one's number and place are used again.
    let next = walked.end_sequence;
    let is_known = numbered.map_or(walked.transactions() == 0, |numbered| numbered.wrapping_sub(next) <= 1);
    if !is_known {
        return Err(format!("its compounds on storage end before number {next}, which is not what the held log says"));
    }
    let mut begin = 0;
    commits.0.truncate(walked.transactions() as usize);
    let last_clock = commits.0.last().map_or((0, 0), |(_, clock)| *clock);
    let ends = commits.0.iter().map(|(order, _)| *order as u32 + 1);
    let lengths: Vec<u32> = ends.map(|end| end - std::mem::replace(&mut begin, end)).collect();
    if lengths.len() != walked.transactions() as usize {
        return Err("its compounds on storage are not what they should be".to_owned());
    }
    let plan = Plan::new(&mut stored, &said, format, &|_| true).map_err(|error| error.to_string())?;
    if plan.summary().is_damaged() || plan.summary().fast_commits {
        return Err("its log on storage is damaged".to_owned());
    }
    let at_home: HashMap<u64, u32> =
        area.versions_at_home(log.id).into_iter().map(|(sequence, block, _)| (block, sequence)).collect();
    let tail = area.tail(log.id).ok_or("it has no tail")?;
    // The file system's.
    let superblock = u64::from(log.place.block_bytes == 1024);
    let mut content = vec![0; log.place.block_bytes as usize];
    let mut copies = Vec::new();
    for block in plan.blocks() {
        let copy = block.newest();
        let said = if let Some((sequence, version)) = owed(block.home()) {
            stored.read(copy.position, &mut content).map_err(|error| error.to_string())?;
            if !copy.restore(format, &mut content) {
                return Err(format!("its copy of block {} on storage is damaged", block.home()));
            }
            if content[..] == version[..] { FoundSaid::Same(sequence) } else { FoundSaid::Newer }
        } else {
            match at_home.get(&block.home()) {
                Some(sequence) => FoundSaid::AtHome(*sequence),
                // It is never freed, so the guest has written it home, and perhaps past its journal since.
                None if block.home() == superblock => FoundSaid::AtHome(tail.sequence.wrapping_sub(1)),
                None => FoundSaid::Nothing,
            }
        };
        let (compound, position, escaped) = (copy.sequence, copy.position, copy.escaped);
        copies.push(FoundCopy { block: block.home(), compound, position, escaped, said });
    }
    Ok(FoundLog { tail: (said.start, said.sequence), lengths, copies, last_clock })
}
