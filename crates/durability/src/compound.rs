//! A compound on its way: what goes where, worked out at once, so that nothing that changes meanwhile can change it. What it holds is read at once,
//! too, but where versions stay: then it is read in parts, and has to be what it was.

use crate::contract::{Version, View};
use crate::live::Live;
use crate::window::Window;
use jbd2::build::escape;
use jbd2::{Compound, CompoundBlock, Format, Part, tag_checksum};
use std::collections::BTreeSet;
use std::sync::Arc;

/// Writes are no longer than this, in bytes.
const WRITE_BYTES_MAX: usize = 1 << 20;

/// What becomes of a window's blocks.
#[derive(Debug, Default)]
pub(crate) struct Sorted {
    /// Into the log.
    pub tags: Vec<(u64, Version, u32)>,
    /// Straight home.
    pub appends: Vec<(u64, Version)>,
    /// Home already, by the guest.
    pub at_home: Vec<(u64, Version)>,
    /// Revoked, where the log on storage has a copy.
    pub revokes: Vec<u64>,
}

impl Sorted {
    /// Sorts a window. In doubt a block goes into the log: `is_busy` says that a write to it is under way.
    pub fn new(window: &Window, live: &Live, is_busy: &dyn Fn(u64) -> bool, view: &mut dyn View) -> Self {
        let mut sorted = Sorted::default();
        for (&block, held) in &window.blocks {
            // A copy in the log would be replayed over an append; and what the guest wrote past its journal is not to be written over.
            let is_append = live.get(block).is_none() && !held.is_past && !is_busy(block) && view.is_free(block);
            match held.home {
                Some(_) if is_append => sorted.at_home.push((block, held.version)),
                None if is_append => sorted.appends.push((block, held.version)),
                _ => sorted.tags.push((block, held.version, held.sequence)),
            }
        }
        sorted.revokes = window.revoked.iter().copied().filter(|block| live.get(*block).is_some()).collect();
        sorted
    }

    /// Whether there is nothing to be said.
    pub fn is_empty(&self) -> bool {
        self.tags.is_empty() && self.appends.is_empty() && self.at_home.is_empty() && self.revokes.is_empty()
    }

    /// Log blocks that it takes.
    pub fn length(&self, format: &Format) -> u64 {
        Compound::length(format, self.tags.len(), self.revokes.len())
    }
}

/// A compound that is being made durable.
#[derive(Debug)]
pub(crate) struct Making {
    /// What it holds, with its last transaction; rules (a) and (b) ask it until it is durable.
    pub window: Window,
    pub sorted: Sorted,
    /// Number, position and whether escaped of each tag.
    pub tags: Vec<(u64, u32, bool, u32)>,
    pub length: u32,
    pub commit_at: u32,
    pub commit: Arc<[u8]>,
    compound: Compound,
    /// Of each tag its content, as it is in the log: until it is written, and nothing where it is read again for that.
    contents: Vec<Vec<u8>>,
    /// How many of its log blocks were given to be written.
    given: u32,
}

/// Runs of log blocks: where each begins, and its bytes.
pub(crate) type Runs = Vec<(u32, Arc<[u8]>)>;

/// A compound with the writes that make it.
#[derive(Debug)]
pub(crate) struct Made {
    pub making: Making,
    /// Log positions and bytes, all but the commit block; or the first of them.
    pub body: Runs,
    /// Home blocks and bytes.
    pub appends: Vec<(u64, Arc<[u8]>)>,
}

/// Reads a committed version of a block.
fn read(format: &Format, view: &mut dyn View, block: u64, version: Version) -> Result<Vec<u8>, String> {
    let mut content = vec![0; format.block_size as usize];
    view.content(version, &mut content)
        .map_err(|error| format!("the committed version of block {block} cannot be read: {error}"))?;
    Ok(content)
}

impl Making {
    /// Works out a compound at the log's head, with the writes of its body and of its appends. The place of the commit block is zeroed with the
    /// body: a commit block that is torn is none then. Where more log blocks than `at_once` are to be written, the rest of them is read again when it
    /// is ([`Making::next_part`]).
    pub fn begin(
        format: &Format,
        live: &Live,
        window: Window,
        sorted: Sorted,
        at_once: u64,
        view: &mut dyn View,
    ) -> Result<Made, String> {
        let block_bytes = format.block_size as usize;
        let (head, sequence) = live.head;
        let is_kept = sorted.length(format) <= at_once;
        let mut contents = Vec::with_capacity(if is_kept { sorted.tags.len() } else { 0 });
        let mut blocks = Vec::with_capacity(sorted.tags.len());
        for (block, version, _) in &sorted.tags {
            let (escaped, content) = escape(&read(format, view, *block, *version)?);
            let checksum = tag_checksum(format, sequence, &content);
            blocks.push(CompoundBlock { home: *block, escaped, checksum });
            if is_kept {
                contents.push(content);
            }
        }
        let length = u32::try_from(sorted.length(format)).map_err(|_| "a compound is longer than a log".to_owned())?;
        let tagged: BTreeSet<u64> = sorted.tags.iter().map(|tag| tag.0).collect();
        assert!(sorted.revokes.iter().all(|block| !tagged.contains(block)), "tagged and revoked in one transaction");
        let room = live.room(format);
        if length > room {
            return Err(format!("a compound of {length} log blocks does not fit into {room}"));
        }
        let end = format.advance(head, length);
        let compound =
            Compound::ending_at(*format, (end, room), sequence, blocks, sorted.revokes.clone(), view.wall_clock())
                .map_err(|error| error.to_string())?;
        let tags = Vec::with_capacity(sorted.tags.len());
        let commit_at = format.advance(head, length - 1);
        let commit = match compound.part(commit_at) {
            Some(Part::Control(block)) => Arc::from(block),
            _ => return Err(format!("a compound has no commit block at log block {commit_at}")),
        };
        let mut appends: Vec<(u64, Vec<u8>)> = Vec::new();
        for (block, version) in &sorted.appends {
            let content = read(format, view, *block, *version)?;
            match appends.last_mut() {
                Some((first, run))
                    if *first + (run.len() / block_bytes) as u64 == *block && run.len() < WRITE_BYTES_MAX =>
                {
                    run.extend_from_slice(&content);
                }
                _ => appends.push((*block, content)),
            }
        }
        let appends = appends.into_iter().map(|(at, run)| (at, Arc::from(run))).collect();
        let mut making = Making { window, sorted, tags, length, commit_at, commit, compound, contents, given: 0 };
        let body = making.next_part(format, at_once, view)?;
        Ok(Made { making, body, appends })
    }

    /// Whether all of the body was given to be written.
    pub fn is_given(&self) -> bool {
        self.given == self.length
    }

    /// The next so many log blocks of the body.
    pub fn next_part(&mut self, format: &Format, at_once: u64, view: &mut dyn View) -> Result<Runs, String> {
        let block_bytes = format.block_size as usize;
        let mut body: Vec<(u32, Vec<u8>)> = Vec::new();
        for _ in 0..at_once.min(u64::from(self.length - self.given)) {
            let position = format.advance(self.compound.start(), self.given);
            let block = match self.compound.part(position) {
                Some(Part::Control(_)) if position == self.commit_at => vec![0; block_bytes],
                Some(Part::Control(block)) => block,
                Some(Part::Data(index)) => {
                    let (home, version, transaction) = self.sorted.tags[index];
                    let tag = self.compound.blocks()[index];
                    self.tags.push((home, position, tag.escaped, transaction));
                    match self.contents.get_mut(index) {
                        Some(content) => std::mem::take(content),
                        None => {
                            let (escaped, content) = escape(&read(format, view, home, version)?);
                            let checksum = tag_checksum(format, self.compound.sequence(), &content);
                            if (escaped, checksum) != (tag.escaped, tag.checksum) {
                                return Err(format!(
                                    "the committed version of block {home} is another one than it was"
                                ));
                            }
                            content
                        }
                    }
                }
                None => return Err(format!("a compound has nothing at log block {position}")),
            };
            match body.last_mut() {
                Some((first, run))
                    if *first as usize + run.len() / block_bytes == position as usize
                        && run.len() < WRITE_BYTES_MAX =>
                {
                    run.extend_from_slice(&block);
                }
                _ => body.push((position, block)),
            }
            self.given += 1;
        }
        Ok(body.into_iter().map(|(at, run)| (at, Arc::from(run))).collect())
    }
}
