//! Replay of one journal: judge, write, finish.
//!
//! [`Replay::prepare`] reads and judges, [`Replay::run`] writes. Between them nothing is held but the plan, so several file
//! systems can be judged before the first is written.

use crate::batch;
use crate::checked::CheckedHome;
use crate::compare;
use crate::error::Error;
use crate::home::{HomeBounds, HomeWriter, JournalPlace};
use crate::report::{Report, Status};
use crate::superblock::{Findings, SuperblockHome};
use extfs::{FileSystem, ReadAt};
use jbd2::{Content, End, LogRead, Plan, SuperblockError};
use std::io;
use std::time::Instant;

/// What the place of a journal says of it: the journal's own superblock must agree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogBounds {
    /// Log block of the journal superblock: 0 in an internal journal, 1 or 2 on a journal device.
    pub superblock_position: u32,
    /// Blocks that there are for the journal.
    pub blocks: u32,
}

impl LogBounds {
    /// Those of an internal journal, or of a journal device.
    pub fn new(file_system: &FileSystem) -> Self {
        let extents = file_system.journal.extents(&file_system.superblock);
        LogBounds {
            superblock_position: file_system.journal.superblock_position(),
            blocks: extents.last().map_or(0, |last| last.log + last.count),
        }
    }
}

/// A replay that has been worked out and can be carried out.
#[derive(Debug)]
pub struct Replay {
    plan: Plan,
    /// The journal superblock's whole block, as the log has it.
    raw: Vec<u8>,
    journal: jbd2::Superblock,
    /// Where it may write.
    bounds: HomeBounds,
    started: Instant,
}

/// Prepares and carries out the replay of `log` onto `home`.
///
/// # Errors
/// [`Error::Refused`] or [`Error::Damaged`] when nothing was changed; [`Error::Failed`] when reading or writing failed (the log is then as it was).
///
/// # Examples
/// A journal of one transaction, in memory, onto a file system in memory:
/// ```
/// use extfs::ReadAt;
/// use jbd2::build::{LogBuilder, SuperblockBuilder, Transaction};
/// use jbd2::{Checksum, Content, LogRead};
/// use recovery::{HomeBounds, HomeWriter, JournalPlace, LogBounds, Status, replay};
/// use std::io;
///
/// struct Log(Vec<Vec<u8>>);
///
/// impl LogRead for Log {
///     type Error = std::convert::Infallible;
///
///     fn read(&mut self, position: u32, buffer: &mut [u8]) -> Result<Content, Self::Error> {
///         buffer.copy_from_slice(&self.0[position as usize]);
///         Ok(Content::Present)
///     }
/// }
///
/// struct Home(Vec<u8>);
///
/// impl ReadAt for Home {
///     fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
///         self.0.read_at(offset, buffer)
///     }
///
///     fn size(&self) -> u64 {
///         self.0.size()
///     }
/// }
///
/// impl HomeWriter for Home {
///     fn write_at(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
///         self.0[offset as usize..][..data.len()].copy_from_slice(data);
///         Ok(())
///     }
///
///     fn flush(&mut self) -> io::Result<()> {
///         Ok(())
///     }
/// }
///
/// // A journal of 32 blocks of 1 KiB: transaction 7 begins at block 1, and writes block 60 of the file system.
/// let superblock = SuperblockBuilder { block_size: 1024, maxlen: 32, start: 1, sequence: 7, ..Default::default() };
/// let mut log = Log(vec![vec![0; 1024]; 32]);
/// log.0[0] = superblock.checksum(Checksum::V3).build();
/// let (_, format) = jbd2::Superblock::parse(&log.0[0])?;
/// let transaction = Transaction { blocks: vec![(60, vec![1; 1024])], ..Default::default() };
/// let mut builder = LogBuilder::new(format, 1, 7);
/// builder.transaction(&transaction, &mut |position, block| log.0[position as usize].copy_from_slice(block));
///
/// // Of the file system's 64 blocks, 20 to 51 are the journal's; of its superblock there is just enough.
/// let mut home = Home(vec![0; 64 * 1024]);
/// home.0[1024 + 0x04] = 64;
/// home.0[1024 + 0x38..1024 + 0x3a].copy_from_slice(&0xef53u16.to_le_bytes());
/// let journal = LogBounds { superblock_position: 0, blocks: 32 };
/// let bounds = HomeBounds::from_parts(64, 1024, vec![(20, 52)]);
/// let place = JournalPlace::Home { offset: 20 * 1024 };
///
/// let report = replay(&mut log, journal, &bounds, &mut home, place)?;
/// assert_eq!((report.status, report.transactions, report.blocks_written), (Status::Recovered, 1, 1));
/// assert!(home.0[60 * 1024..61 * 1024].iter().all(|byte| *byte == 1));
/// assert!(jbd2::Superblock::decode(&home.0[20 * 1024..])?.is_empty());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn replay<L: LogRead + Send, H: HomeWriter>(
    log: &mut L,
    journal: LogBounds,
    bounds: &HomeBounds,
    home: &mut H,
    place: JournalPlace<'_>,
) -> Result<Report, Error> {
    Replay::prepare(log, journal, bounds)?.run(log, home, place)
}

impl Replay {
    /// Reads the journal superblock and the log, and works out what to do. Nothing is
    /// written.
    ///
    /// # Errors
    /// A refusal when the journal is damaged so that jbd2 would not replay it, or not understood; fast commits that would
    /// have to be replayed after the log are not.
    pub fn prepare<L: LogRead>(log: &mut L, journal: LogBounds, bounds: &HomeBounds) -> Result<Replay, Error> {
        let started = Instant::now();
        let LogBounds { superblock_position, blocks } = journal;
        let mut raw = vec![0; bounds.block_size() as usize];
        let content = log
            .read(superblock_position, &mut raw)
            .map_err(|source| Error::from_log(jbd2::ReplayError::Read { position: superblock_position, source }))?;
        if content == Content::AtHome {
            return Err(Error::refused("the journal superblock is not held by whoever holds the log"));
        }
        let (journal, format) = jbd2::Superblock::parse(&raw).map_err(|error| {
            let sentence = format!("{error} (log block {superblock_position}); nothing was changed");
            let is_unknown = matches!(error, SuperblockError::UnknownFeatures { .. });
            if is_unknown { Error::refused(sentence) } else { Error::damaged(sentence) }
        })?;
        if format.block_size != bounds.block_size() {
            return Err(Error::damaged(format!(
                "the journal has blocks of {} bytes but the file system of {}; nothing was changed",
                format.block_size,
                bounds.block_size()
            )));
        }
        if format.length > blocks {
            return Err(Error::damaged(format!(
                "the journal superblock says {} blocks, but there is room for {blocks} only; nothing was changed",
                format.length
            )));
        }
        let plan = Plan::new(log, &journal, &format, &|block| bounds.contains(block)).map_err(Error::from_log)?;
        if plan.summary().fast_commits {
            return Err(Error::refused(
                "the journal holds fast commits, which only the guest's own kernel can replay; nothing was changed: mount \
                 the file system once",
            ));
        }
        Ok(Replay { plan, raw, journal, bounds: bounds.clone(), started })
    }

    /// What would be done.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The journal superblock.
    pub fn journal(&self) -> &jbd2::Superblock {
        &self.journal
    }

    /// Reads and verifies everything that [`Replay::run`] would write, and reports as if it had been written.
    ///
    /// # Errors
    /// When the log cannot be read.
    pub fn dry_run<L: LogRead + Send>(&self, log: &mut L) -> Result<Report, Error> {
        let written = batch::write::<L, NoHome>(&self.plan, log, None)?;
        Ok(self.report(&written))
    }

    /// Whether all that [`Replay::run`] would write to `home` is there already: one that was cut off had only the journal left to empty. What a
    /// superblock says of a check that is needed does not matter, since each attempt may have found another reason for one.
    ///
    /// # Errors
    /// When log or home cannot be read.
    pub fn is_home<L: LogRead + Send, H: ReadAt>(&self, log: &mut L, home: &H) -> Result<bool, Error> {
        compare::is_home(&self.plan, log, home)
    }

    /// Writes the home blocks, flushes, writes the file system's superblock (the log's copy, if it has one, marked as
    /// recovered), flushes, marks the journal empty, and flushes. Cut off anywhere and run again, the outcome is the same.
    ///
    /// As e2fsck does, the journal's `s_errno` becomes the error bit in the file system's `s_state` and is cleared; a
    /// damaged commit counts as such an error. Where blocks were damaged, `s_state` also loses its valid bit, so that
    /// e2fsck runs in full. As the kernel does, the file system's own record of errors is not replaced by an older one
    /// from the log. `s_head` and whatever else is in the journal superblock stays as it is: an empty log may begin
    /// anywhere.
    ///
    /// # Errors
    /// When reading or writing fails. The journal is marked empty only after everything is on storage.
    pub fn run<L: LogRead + Send, H: HomeWriter>(
        self,
        log: &mut L,
        home: &mut H,
        place: JournalPlace<'_>,
    ) -> Result<Report, Error> {
        self.run_before_emptying(log, home, place, || None, || Ok(()))
    }

    /// The same. When everything but the empty journal is on storage, `before` is called: whoever finds the journal empty knows that it was.
    ///
    /// `why_check` is called when the log's blocks are on storage. What it says keeps nothing from being written, and means that other blocks may
    /// have been lost: the file system's superblock says so as where blocks of the log were damaged, and the report as well.
    ///
    /// # Errors
    /// As [`Replay::run`], and `before`'s.
    pub fn run_before_emptying<L: LogRead + Send, H: HomeWriter>(
        self,
        log: &mut L,
        home: &mut H,
        place: JournalPlace<'_>,
        why_check: impl FnOnce() -> Option<String>,
        before: impl FnOnce() -> io::Result<()>,
    ) -> Result<Report, Error> {
        let home = &mut CheckedHome::new(home, &self.bounds);
        let superblock = SuperblockHome::read(home, self.plan.format().block_size)?;
        let mut rest = superblock.rest_of(home);
        let written = batch::write(&self.plan, log, Some(&mut rest))?;
        let replayed = rest.kept.take();
        home.flush().map_err(Error::failed("flushing the recovered blocks"))?;
        let mut report = self.report(&written);
        let summary = self.plan.summary();
        let why_check = why_check();
        let lost_blocks = written.damaged > 0 || summary.out_of_bounds > 0 || why_check.is_some();
        let findings = Findings {
            is_error: self.journal.errno != 0 || summary.walk.failed_commit.is_some() || lost_blocks,
            lost_blocks,
            is_checked: self.plan.format().has_block_checksums(),
        };
        if let Some(why) = why_check {
            report.status = Status::Damaged;
            report.notes.push(why);
        }
        home.expect_flushed("the file system's superblock");
        if let Err(note) = superblock.finish(home, replayed, findings)? {
            report.status = Status::Damaged;
            report.notes.push(note);
        }
        // The error bit has to be on storage before the journal that tells of it is emptied.
        home.flush().map_err(Error::failed("flushing the file system's superblock"))?;
        before().map_err(Error::failed("clearing the journal's place"))?;
        // Last: whoever finds the journal empty after a recovery that was cut off knows that all the rest was done.
        self.empty_journal(home, place)?;
        home.flush().map_err(Error::failed("flushing the journal superblock"))?;
        report.seconds = self.started.elapsed().as_secs_f64();
        Ok(report)
    }

    /// Writes the home blocks, the file system's superblock as the log has it among them, and flushes: for a log whose guest
    /// goes on. Journal and marks of recovery stay as they are. All of it is read and verified before the first is written.
    ///
    /// # Errors
    /// When reading or writing fails, or a block in the log is damaged: then nothing was changed.
    pub fn write_blocks<L: LogRead + Send, H: HomeWriter>(&self, log: &mut L, home: &mut H) -> Result<Report, Error> {
        let damaged = |count: u64| format!("{count} blocks in the log are damaged");
        let judged = batch::write::<L, NoHome>(&self.plan, log, None)?;
        if judged.damaged > 0 {
            return Err(Error::damaged(format!("{}; nothing was changed", damaged(judged.damaged))));
        }
        let home = &mut CheckedHome::new(home, &self.bounds);
        let written = batch::write(&self.plan, log, Some(&mut *home))?;
        home.flush().map_err(Error::failed("flushing the blocks"))?;
        if written.damaged > 0 {
            // They were not a moment ago.
            return Err(Error::failed("writing the blocks of a log home")(io::Error::other(damaged(written.damaged))));
        }
        Ok(self.report(&written))
    }

    /// The journal superblock as [`Replay::run`] leaves it, with the rest of its block.
    ///
    /// # Errors
    /// When it cannot be edited.
    pub fn emptied(&self) -> Result<Vec<u8>, Error> {
        let mut raw = self.raw.clone();
        jbd2::SuperblockEdit::new(&mut raw)
            .map_err(|error| Error::refused(error.to_string()))?
            .start(0)
            .sequence(self.plan.summary().walk.next_sequence())
            .errno(0)
            .seal();
        Ok(raw)
    }

    fn empty_journal<H: HomeWriter>(
        &self,
        home: &mut CheckedHome<'_, H>,
        place: JournalPlace<'_>,
    ) -> Result<(), Error> {
        let raw = self.emptied()?;
        home.expect_flushed("the journal's superblock");
        let failed = || Error::failed("marking the journal empty");
        match place {
            JournalPlace::Home { offset } => home.write_journal(offset, &raw).map_err(failed()),
            JournalPlace::Other { disk, offset } => {
                disk.write_at(offset, &raw).map_err(failed())?;
                disk.flush().map_err(failed())
            }
        }
    }

    fn report(&self, written: &batch::Written) -> Report {
        let summary = self.plan.summary();
        let walk = &summary.walk;
        let mut notes = Vec::new();
        if let Some(sequence) = walk.failed_commit {
            notes.push(format!(
                "transaction {sequence} has a damaged commit block: it and what follows were not replayed; run e2fsck -f"
            ));
        }
        if written.damaged > 0 {
            notes.push(format!(
                "{} blocks in the log have a bad checksum and were not written; run e2fsck -f",
                written.damaged
            ));
        }
        if summary.out_of_bounds > 0 {
            notes.push(format!(
                "{} blocks in the log belong outside the file system or into its journal and were not written; run \
                 e2fsck -f",
                summary.out_of_bounds
            ));
        }
        let is_damaged = summary.is_damaged() || written.damaged > 0;
        let is_empty = walk.end == End::Empty;
        let any = summary.transactions > 0;
        Report {
            status: match (is_damaged, is_empty) {
                (true, _) => Status::Damaged,
                (false, true) => Status::Clean,
                (false, false) => Status::Recovered,
            },
            transactions: summary.transactions.into(),
            blocks_written: written.blocks,
            bytes_written: written.bytes,
            revoked: summary.revoked,
            seconds: self.started.elapsed().as_secs_f64(),
            first_sequence: any.then_some(walk.first_sequence),
            last_sequence: any.then_some(walk.end_sequence.wrapping_sub(1)),
            notes,
        }
    }
}

/// Stands for no disk in a dry run; there is none of it.
enum NoHome {}

impl extfs::ReadAt for NoHome {
    fn read_at(&self, _offset: u64, _buffer: &mut [u8]) -> std::io::Result<()> {
        match *self {}
    }

    fn size(&self) -> u64 {
        match *self {}
    }
}

impl HomeWriter for NoHome {
    fn write_at(&mut self, _offset: u64, _data: &[u8]) -> std::io::Result<()> {
        match *self {}
    }

    fn flush(&mut self) -> std::io::Result<()> {
        match *self {}
    }
}
