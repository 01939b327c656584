//! What a transaction counts on that was acknowledged before the flush of its appends: that they are at home.
//!
//! The region has it beside the transaction ([`nvm_journal::Journal::prepare`]): where the appends are, and one digest of all of them, under
//! a key of its own, that whoever recovers compares with what is there. The digest is a tree of NH ([`super::digest`]): two contents that differ, chosen
//! without knowledge of the key, are the same to it with a probability that nobody will ever see.
//!
//! It must never: be true where a sector of an append is not what was committed.
//!
//! Failure story: bytes that are no condition refuse the region, as a damaged header does: the checksums of the blocks that they are in were right.
//! A block that cannot be read, twice, makes it untrue: it would be so for ever, and with it everything that the region has. Any other failure
//! of storage is one of the recovery, which is run again.

use super::digest::Digests;
use rustix::io::Errno;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use write_log::LoggedFile;

/// Of a condition: the key, the digest and the size of blocks.
const HEAD_BYTES: usize = 16 + 32 + 4;
/// Of each run of blocks.
const RUN_BYTES: usize = 12;

/// Reads a block of the file system from its home.
pub type ReadHome<'a> = dyn FnMut(u64, &mut [u8]) -> io::Result<()> + 'a;

/// Whether a condition is true.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// It is.
    True,
    /// Something else is there.
    Untrue,
    /// This block of the file system cannot be read.
    Unreadable(u64),
}

/// Whether it is the medium that has not, or not whole, what was to be read: that is no better the next time.
fn is_of_medium(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::IO | Errno::ILSEQ | Errno::NODATA))
}

/// See the module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Condition {
    key: [u64; 2],
    digest: [u8; 32],
    block_bytes: u32,
    /// Blocks of the file system, ascending.
    runs: Vec<Range<u64>>,
}

impl Condition {
    /// That these blocks, ascending, hold this.
    pub(super) fn of<'a>(
        digests: &Digests,
        block_bytes: u64,
        appends: impl Iterator<Item = (&'a u64, &'a Arc<[u8]>)>,
    ) -> Self {
        let mut runs: Vec<Range<u64>> = Vec::new();
        let mut tree = digests.tree();
        for (block, content) in appends {
            match runs.last_mut() {
                Some(run) if run.end == *block && run.end - run.start < u64::from(u32::MAX) => run.end += 1,
                _ => runs.push(*block..*block + 1),
            }
            tree.add(content);
        }
        Condition { key: digests.key(), digest: tree.end(), block_bytes: block_bytes as u32, runs }
    }

    /// Its bytes.
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEAD_BYTES + self.runs.len() * RUN_BYTES);
        self.key.iter().for_each(|word| bytes.extend_from_slice(&word.to_le_bytes()));
        bytes.extend_from_slice(&self.digest);
        bytes.extend_from_slice(&self.block_bytes.to_le_bytes());
        for run in &self.runs {
            bytes.extend_from_slice(&run.start.to_le_bytes());
            bytes.extend_from_slice(&((run.end - run.start) as u32).to_le_bytes());
        }
        bytes
    }

    /// Reads them; nothing where they are none.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let (head, rest) = bytes.split_at_checked(HEAD_BYTES)?;
        let word = |at: usize| -> Option<u64> { Some(u64::from_le_bytes(*head[at..].first_chunk()?)) };
        let block_bytes = u32::from_le_bytes(*head[48..].first_chunk()?);
        if !rest.len().is_multiple_of(RUN_BYTES) || !(512..=65536).contains(&block_bytes) {
            return None;
        }
        let run = |bytes: &[u8]| -> Option<Range<u64>> {
            let first = u64::from_le_bytes(*bytes.first_chunk()?);
            let count = u32::from_le_bytes(*bytes[8..].first_chunk()?);
            Some(first..first.checked_add(u64::from(count))?)
        };
        let runs = rest.chunks_exact(RUN_BYTES).map(run).collect::<Option<_>>()?;
        Some(Condition { key: [word(0)?, word(8)?], digest: *head[16..].first_chunk()?, block_bytes, runs })
    }

    /// Whether it is about blocks of this size.
    pub(super) fn is_of(&self, block_bytes: u32) -> bool {
        self.block_bytes == block_bytes
    }

    /// The blocks that it is about.
    pub fn blocks(&self) -> impl Iterator<Item = u64> + '_ {
        self.runs.iter().cloned().flatten()
    }

    /// Whether it is true of what `read` finds at the blocks' homes.
    ///
    /// # Errors
    /// When reading fails.
    pub fn holds(&self, read: &mut ReadHome<'_>) -> io::Result<bool> {
        let digests = Digests::keyed(self.key);
        let mut tree = digests.tree();
        let mut content = vec![0; self.block_bytes as usize];
        for block in self.blocks() {
            read(block, &mut content)?;
            tree.add(&content);
        }
        Ok(tree.end() == self.digest)
    }

    /// The same for whoever decides for good.
    ///
    /// # Errors
    /// When reading fails, but not for what the medium has.
    pub(super) fn outcome(&self, read: &mut ReadHome<'_>) -> io::Result<Outcome> {
        let mut unreadable = None;
        let holds = self.holds(&mut |block, content| {
            unreadable = Some(block);
            // The way to the medium may be the reason, once.
            let first = read(block, content);
            if first.as_ref().is_err_and(is_of_medium) { read(block, content) } else { first }
        });
        match (holds, unreadable) {
            (Ok(true), _) => Ok(Outcome::True),
            (Ok(false), _) => Ok(Outcome::Untrue),
            (Err(error), Some(block)) if is_of_medium(&error) => Ok(Outcome::Unreadable(block)),
            (Err(error), _) => Err(error),
        }
    }

    /// Whether it is true of a file system that begins at `start` of a disk: durably so on return. What is there is written once more, because a flush
    /// that has failed may have lost it, and a later one would not say so. What is written is read a second time, and the kernel may have dropped what
    /// it could not write meanwhile: so it is compared a second time, too.
    ///
    /// # Errors
    /// When storage fails.
    pub(super) fn holds_for_good(&self, disk: &LoggedFile, start: u64) -> io::Result<bool> {
        let at = |block: u64| start + block * u64::from(self.block_bytes);
        if !self.holds(&mut |block, content| disk.read_exact_at(content, at(block)))? {
            return Ok(false);
        }
        let failed_flushes = disk.failed_flushes();
        let is_written = self.holds(&mut |block, content| {
            disk.read_exact_at(content, at(block))?;
            disk.write_all_at(content, at(block))
        })?;
        if is_written {
            disk.sync_since(failed_flushes)?;
        }
        Ok(is_written)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;
    use std::os::unix::fs::FileExt;
    use write_log::{EntryKind, WriteLog, entries};

    #[test]
    fn it_is_true_of_just_what_was_committed_at_just_these_places() {
        for block_bytes in [1024usize, 4096, 16384] {
            let block = |byte: u8| -> Arc<[u8]> { (0..block_bytes).map(|at| (at % 251) as u8 ^ byte).collect() };
            let appends: BTreeMap<u64, Arc<[u8]>> =
                (10..150u64).chain([200, 1 << 40]).map(|at| (at, block(at as u8))).collect();
            let condition = Condition::of(&Digests::new(), block_bytes as u64, appends.iter());
            assert_eq!(Condition::decode(&condition.encode()), Some(condition.clone()));
            assert!(condition.blocks().eq(appends.keys().copied()));
            let holds = |homes: &BTreeMap<u64, Arc<[u8]>>| {
                condition.holds(&mut |at, content| {
                    content.copy_from_slice(&homes[&at]);
                    Ok(())
                })
            };
            assert!(holds(&appends).expect("read"));
            for at in [10, 149, 200, 1 << 40] {
                // A sector that did not arrive.
                for sector in 0..block_bytes / 512 {
                    let mut torn = appends.clone();
                    let mut content = torn[&at].to_vec();
                    content[sector * 512..][..512].fill(0);
                    torn.insert(at, Arc::from(content));
                    assert!(!holds(&torn).expect("read"), "sector {sector} of block {at}");
                }
            }
            let mut swapped = appends.clone();
            swapped.insert(10, Arc::clone(&appends[&11]));
            swapped.insert(11, Arc::clone(&appends[&10]));
            assert!(!holds(&swapped).expect("read"), "two blocks have changed places");
            assert!(condition.holds(&mut |_, _| Err(io::Error::other("the disk is broken"))).is_err());
        }
        assert_eq!(Condition::decode(&[0; 20]), None);
    }

    #[test]
    fn a_block_that_cannot_be_read_makes_it_untrue_and_nothing_else_does() {
        let appends: BTreeMap<u64, Arc<[u8]>> = (2..5u8).map(|at| (u64::from(at), Arc::from([at; 1024]))).collect();
        let condition = Condition::of(&Digests::new(), 1024, appends.iter());
        // How often block 3 fails, and how.
        let outcome = |times: u32, errno: Errno| {
            let mut left = times;
            condition.outcome(&mut |block, content| {
                if block == 3 && left > 0 {
                    left -= 1;
                    return Err(errno.into());
                }
                content.copy_from_slice(&appends[&block]);
                Ok(())
            })
        };
        for errno in [Errno::IO, Errno::ILSEQ, Errno::NODATA] {
            assert_eq!(outcome(0, errno).expect("read"), Outcome::True);
            assert_eq!(outcome(2, errno).expect("it is of the medium"), Outcome::Unreadable(3));
        }
        assert!(outcome(2, Errno::ACCESS).is_err(), "the recovery is run again");
        let other = condition.outcome(&mut |_, content| {
            content.fill(7);
            Ok(())
        });
        assert_eq!(other.expect("read"), Outcome::Untrue);
    }

    #[test]
    fn a_read_that_fails_once_is_tried_again() {
        let content = Arc::from([7; 1024]);
        let condition = Condition::of(&Digests::new(), 1024, [(&9, &content)].into_iter());
        let mut is_first = true;
        let outcome = condition.outcome(&mut |_, read| {
            if std::mem::take(&mut is_first) {
                return Err(Errno::IO.into());
            }
            read.copy_from_slice(&content);
            Ok(())
        });
        assert_eq!(outcome.expect("read"), Outcome::True);
    }

    /// A flush that has failed may have lost what is in the cache, and no later one says so.
    #[test]
    fn what_counts_for_good_was_written_once_more_and_flushed() {
        let appends: BTreeMap<u64, Arc<[u8]>> = (2..5u8).map(|at| (u64::from(at), Arc::from([at; 1024]))).collect();
        let condition = Condition::of(&Digests::new(), 1024, appends.iter());
        let (file, path) = (tempfile::tempfile().expect("a file"), tempfile::NamedTempFile::new().expect("a file"));
        for (block, content) in &appends {
            file.write_all_at(content, 512 + block * 1024).expect("written");
        }
        let log = Arc::new(WriteLog::create(&path.path().with_extension("log")).expect("a log"));
        let disk = LoggedFile::new(file, Some(log));
        assert!(condition.holds_for_good(&disk, 512).expect("it works"));
        let log = std::fs::File::open(path.path().with_extension("log")).expect("the log");
        let entries: Vec<_> = entries(&log).map(|entry| entry.expect("read")).collect();
        let written = entries.iter().filter(|entry| matches!(entry.kind, EntryKind::Write(_)));
        assert!(written.map(|entry| entry.offset).eq(appends.keys().map(|block| 512 + block * 1024)));
        assert!(matches!(entries.last().expect("a flush").kind, EntryKind::Flush));
        std::fs::remove_file(path.path().with_extension("log")).expect("removed");
    }

    /// The kernel may have thrown away what it could not write, between the two times that it is read.
    #[test]
    fn what_is_written_once_more_is_compared_once_more() {
        let appends: BTreeMap<u64, Arc<[u8]>> = (2..5u8).map(|at| (u64::from(at), Arc::from([at; 1024]))).collect();
        let condition = Condition::of(&Digests::new(), 1024, appends.iter());
        for is_dropped in [false, true] {
            let file = tempfile::tempfile().expect("a file");
            for (block, content) in &appends {
                file.write_all_at(content, 512 + block * 1024).expect("written");
            }
            let (disk, beside) = (LoggedFile::unlogged(&file).expect("opened"), file.try_clone().expect("opened"));
            disk.simulate_writes(move || {
                if is_dropped {
                    beside.write_all_at(&[0; 1024], 512 + 4 * 1024).expect("written");
                }
                true
            });
            assert_eq!(condition.holds_for_good(&disk, 512).expect("it works"), !is_dropped);
        }
    }
}
