//! What the machine is told and what it says: names of what is under way, places, steps, and what it has to see while it is called.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// How old a committed transaction may be before it is durable. At no age, a commit is answered when it is durable.
pub type Age = Duration;

/// Names an operation of ours until it is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OperationId(pub u64);

/// Names a write, discard or zeroing of the guest until it has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WriteId(pub u64);

/// Names something that somebody waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AnswerId(pub u64);

/// Names a committed content; whoever runs the machine knows where it is, and keeps it until [`View::made_durable`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Version(pub u64);

/// What a transaction freed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Freed {
    /// These blocks, as the bitmaps tell: bits that were set before it and are not after it. More than were freed do no harm.
    Blocks(Vec<Range<u64>>),
    /// It cannot be told: the guest is not told of this commit before it is durable.
    Unknown,
}

/// A committed transaction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transaction {
    /// Its number in the guest's log.
    pub sequence: u32,
    /// Home blocks and their contents; the last one of a block counts.
    pub blocks: Vec<(u64, Version)>,
    /// Blocks whose older copies must not be replayed. A revoke wins over a tag beside it, as in jbd2.
    pub revokes: Vec<u64>,
    /// Blocks that it freed.
    pub freed: Freed,
}

/// What the guest does to blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Writes them.
    Write,
    /// Zeroes them.
    Zeroes,
    /// Has no use for them.
    Discard,
}

/// When a write was asked for: just now, unless this says something else.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WhenAsked {
    /// Somebody else had it wait before. The last transaction that was committed when it came: what it carries is no newer than that.
    pub first: Option<u32>,
    /// It was asked of an earlier machine, which is gone, and not answered: what it carries may be older than all that this one found.
    pub is_repeated: bool,
}

/// Where an operation of ours goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// This home block, and those after it.
    Home(u64),
    /// This log block, and those after it; never past the log's end.
    Log(u32),
    /// The journal superblock.
    Superblock,
}

/// What is to be done. Operations of one list run in any order, and beside those of earlier ones.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Write this.
    Write {
        /// Its name.
        operation: OperationId,
        /// Where to.
        place: Place,
        /// What.
        bytes: Arc<[u8]>,
    },
    /// Make durable what has ended.
    Flush {
        /// Its name.
        operation: OperationId,
    },
    /// A held write of the guest goes to storage now.
    Go(WriteId),
    /// Whoever waits hears: good, or that there is no durability.
    Answer {
        /// Who.
        answer: AnswerId,
        /// Whether it is good.
        is_good: bool,
    },
    /// There is no durability any more, and why.
    Failed(String),
}

/// What the machine has to know of the rest, while it is called.
pub trait View {
    /// Transactions up to `through` are durable, and these are the newest versions that they brought: from now on what is told of
    /// free blocks is as of them, and the versions are not asked for any more. A call and no step, because what is decided next
    /// depends on it.
    fn made_durable(&mut self, through: u32, blocks: &[(u64, Version)]);

    /// The newest durable versions of these blocks are at home, durably, and nothing else is: what home has tells what is durable. Until
    /// [`View::made_durable`] brings a version again, which may be this one once more: it is at home still then.
    fn at_home(&mut self, blocks: &[u64]);

    /// Whether the block bitmap, as of what is durable, calls this block free. False where that is not certain.
    fn is_free(&mut self, block: u64) -> bool;

    /// A committed version.
    ///
    /// # Errors
    /// When it cannot be read.
    fn content(&mut self, version: Version, into: &mut [u8]) -> io::Result<()>;

    /// What is at a log block on storage.
    ///
    /// # Errors
    /// When it cannot be read.
    fn logged(&mut self, position: u32, into: &mut [u8]) -> io::Result<()>;

    /// Seconds and nanoseconds for a commit block.
    fn wall_clock(&self) -> (u64, u32);

    /// Of these blocks the newest versions that were committed after transaction `after`, and that the guest's log has still. Their
    /// contents can be asked for, whether they have been made durable or not.
    fn committed_after(&mut self, blocks: Range<u64>, after: u32) -> Vec<Committed>;
}

/// The newest committed version of a block, as the guest's log has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Committed {
    /// The home block.
    pub block: u64,
    /// Its content.
    pub version: Version,
    /// The transaction.
    pub transaction: u32,
    /// It is written down that the guest has asked to write over it.
    pub is_gone_over: bool,
}

/// The newest copy of a block that an earlier machine has left in the log on storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FoundCopy {
    /// The home block.
    pub block: u64,
    /// The number of its compound.
    pub compound: u32,
    /// The log block.
    pub position: u32,
    /// Its first four bytes were replaced by zeros.
    pub escaped: bool,
    /// What the guest's own log says of the block.
    pub said: FoundSaid,
}

/// What the guest's own log says of a block that has a copy on storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FoundSaid {
    /// Its newest version is of this transaction, and is this very copy.
    Same(u32),
    /// Its newest version is of this transaction, and is at home: nothing newer than the copy.
    AtHome(u32),
    /// Its newest version is another one, which is not durable.
    Newer,
    /// It has none. All of it may have gone home; or the guest has freed the block, in a transaction that is not durable, and what is
    /// durable needs the copy.
    Nothing,
}

/// The log of compounds that an earlier machine has left on storage, as a replay finds it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FoundLog {
    /// The log block that it begins with, and the number of its first compound.
    pub tail: (u32, u32),
    /// Log blocks of each of its compounds, in its order.
    pub lengths: Vec<u32>,
    /// Of each block the copy that a replay would bring home.
    pub copies: Vec<FoundCopy>,
    /// Seconds and nanoseconds in its last commit block.
    pub last_clock: (u64, u32),
}

/// Figures for reports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Status {
    /// When the oldest transaction was committed that is not durable.
    pub oldest: Option<Duration>,
    /// Compounds that are durable.
    pub compounds: u64,
    /// Blocks that went into them.
    pub compound_blocks: u64,
    /// Appends that we wrote home.
    pub append_blocks: u64,
    /// Copies that we brought home to make room.
    pub blocks_brought_home: u64,
    /// Writes of the guest that had to wait.
    pub writes_held: u64,
    /// Discards of the guest that had to wait.
    pub discards_held: u64,
}

/// What the guest has at home of a block that has a committed version which is not seen there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Past {
    /// Something newer that it wrote past its journal.
    Written,
    /// That, or what the block had before, or a part of both. It had asked to write something newer, past its journal, or this very
    /// version; and who was not answered asks again.
    Begun,
    /// That, or what the block had before: nobody knows.
    Perhaps,
}
