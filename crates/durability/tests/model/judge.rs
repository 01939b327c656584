//! What a power cut leaves, replayed and judged.

use crate::guest::{BLOCK, COUNTER, DATA, DIRECT, HOME_BLOCKS, State, Use, pattern, told};
use durability::{FoundCopy, FoundLog, FoundSaid};
use jbd2::{Commit, Content, LogRead, Plan, ReplayError, Superblock, Verdict, Visitor, walk};
use std::convert::Infallible;

/// Where the journal superblock is.
pub const JOURNAL: usize = HOME_BLOCKS as usize * BLOCK;

struct Log<'a>(&'a [u8]);

impl LogRead for Log<'_> {
    type Error = Infallible;

    fn read(&mut self, position: u32, buffer: &mut [u8]) -> Result<Content, Infallible> {
        let at = JOURNAL + position as usize * BLOCK;
        buffer.copy_from_slice(&self.0[at..at + BLOCK]);
        Ok(Content::Present)
    }
}

/// What the next process finds in the log: nothing where it is closed; and the content of each copy.
pub fn found(image: &[u8]) -> Option<(FoundLog, Vec<Vec<u8>>)> {
    let (superblock, format) =
        Superblock::parse(&image[JOURNAL..JOURNAL + BLOCK]).expect("a host that lives loses nothing");
    if superblock.is_empty() {
        return None;
    }
    let mut log = Log(image);
    let (mut commits, start) = (Commits(Vec::new()), (superblock.start, superblock.sequence));
    let walked = walk(&mut log, &format, start.0, start.1, &mut commits).expect("a log");
    commits.0.truncate(walked.transactions() as usize);
    let last_clock = commits.0.last().map_or((0, 0), |(_, clock)| *clock);
    let ends = commits.0.iter().map(|(order, _)| *order as u32 + 1);
    let mut begin = 0;
    let lengths = ends.map(|end| end - std::mem::replace(&mut begin, end)).collect();
    let plan = Plan::new(&mut log, &superblock, &format, &|block| block < HOME_BLOCKS).expect("a log");
    let (mut copies, mut contents) = (Vec::new(), Vec::new());
    for block in plan.blocks() {
        let (copy, mut content) = (block.newest(), vec![0; BLOCK]);
        let Ok(_) = log.read(copy.position, &mut content);
        assert!(copy.restore(&format, &mut content), "a host that lives loses nothing");
        let (compound, position, escaped) = (copy.sequence, copy.position, copy.escaped);
        copies.push(FoundCopy { block: block.home(), compound, position, escaped, said: FoundSaid::Nothing });
        contents.push(content);
    }
    Some((FoundLog { tail: start, lengths, copies, last_clock }, contents))
}

struct Commits(Vec<(u64, (u64, u32))>);

impl<L: LogRead> Visitor<L> for Commits {
    fn commit(
        &mut self,
        _log: &mut L,
        place: jbd2::Place,
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

/// Replays as a kernel does.
pub fn replay(image: &mut [u8]) -> Result<(), String> {
    let (superblock, format) = Superblock::parse(&image[JOURNAL..JOURNAL + BLOCK])
        .map_err(|error| format!("the journal superblock is damaged: {error}"))?;
    if superblock.is_empty() {
        return Ok(());
    }
    let mut homes = Vec::new();
    {
        let mut log = Log(image);
        let plan = Plan::new(&mut log, &superblock, &format, &|block| block < HOME_BLOCKS)
            .map_err(|error| format!("the log cannot be replayed: {error}"))?;
        if plan.summary().is_damaged() {
            return Err(format!("the log is damaged: {:?}", plan.summary()));
        }
        for block in plan.blocks() {
            let mut content = vec![0; BLOCK];
            let Ok(_) = log.read(block.newest().position, &mut content);
            if !block.newest().restore(&format, &mut content) {
                return Err(format!("the copy of block {} is damaged", block.home()));
            }
            homes.push((block.home() as usize, content));
        }
    }
    for (home, content) in homes {
        image[home * BLOCK..(home + 1) * BLOCK].copy_from_slice(&content);
    }
    Ok(())
}

pub fn block(image: &[u8], block: u64) -> &[u8] {
    &image[block as usize * BLOCK..(block as usize + 1) * BLOCK]
}

/// The transaction that the replayed image is the state of.
pub fn state_of(image: &[u8]) -> Result<u32, String> {
    let found = block(image, COUNTER);
    let (stamp, at, _) = told(found);
    if at != COUNTER || found != pattern(COUNTER, stamp, 0) {
        return Err("the counter is torn".to_owned());
    }
    Ok(stamp)
}

/// Compares the image with the state of transaction `sequence`. `written_directly` says whether something may be in the block that
/// is also written directly.
pub fn compare(
    image: &[u8],
    state: &State,
    sequence: u32,
    written_directly: &dyn Fn(u32) -> bool,
) -> Result<(), String> {
    for journaled in [1, 2] {
        if block(image, journaled) != state.content(journaled, sequence) {
            return Err(format!("block {journaled} is not as of transaction {sequence}"));
        }
    }
    for part in block(image, DIRECT).chunks(512) {
        let (stamp, at, _) = told(part);
        if at != DIRECT || !(stamp == state.direct || written_directly(stamp)) {
            return Err(format!("the block that is also written directly has stamp {stamp}, and not {}", state.direct));
        }
    }
    for (index, what) in state.uses.iter().enumerate() {
        let number = DATA + index as u64;
        let found = block(image, number);
        match what {
            Use::Free => {}
            Use::Journaled(stamp) => {
                if found != pattern(number, *stamp, 0) {
                    return Err(format!(
                        "block {number} has {:?}, and not {stamp} as of {sequence}",
                        found.chunks(512).map(told).collect::<Vec<_>>()
                    ));
                }
            }
            Use::InPlace(owner, at_least) => {
                for part in found.chunks(512) {
                    let (stamp, at, whose) = told(part);
                    if (at, whose) != (number, *owner) {
                        return Err(format!(
                            "block {number} of {owner} has data of {whose} (block {at}) as of {sequence}"
                        ));
                    }
                    if stamp < *at_least {
                        return Err(format!(
                            "block {number} of {owner} has {stamp}, older than {at_least}, as of {sequence}"
                        ));
                    }
                }
            }
        }
    }
    Ok(())
}
