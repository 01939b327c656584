//! The judge's view: each log as the guest wrote it, complete.

use crate::error::{Error, Result};
use crate::overlay::Overlay;
use crate::recording::{Issue, Kind, Recording};
use extfs::{SUPERBLOCK_OFFSET, Superblock as FileSystemSuperblock};
use guest_kit::image::FileSystem;
use jbd2::{Content, LogRead};
use journal_area::Location;
use placement::{KeptLog, LogDescription};
use recovery::{HomeBounds, JournalPlace, LogBounds, Report};
use std::collections::{HashMap, HashSet};
use std::convert::Infallible;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;

/// One log and all that the judge knows of it.
#[derive(Clone)]
pub struct JudgedLog {
    /// The log in amberlog.
    pub log: Arc<KeptLog>,
    /// Where it is.
    pub description: LogDescription,
    /// Which blocks replay may write.
    pub bounds: HomeBounds,
    blocks: HashMap<u32, Arc<[u8]>>,
    /// Log writes of the pass that has not ended.
    in_pass: Vec<(u32, Arc<[u8]>)>,
    /// Superblocks of an open log that is made durable by age, with their requests: they count when the guest hears so.
    waiting: Vec<(u32, Arc<[u8]>)>,
    is_aged: bool,
    /// Home blocks that the guest discarded and has not written since: their content is nobody's business.
    pub discarded: HashSet<u64>,
}

/// A disk after a replay: the file system's part of its disk, the journal's superblock, and the report.
pub struct Recovered<'a> {
    /// The home.
    pub home: Overlay<'a>,
    /// The journal device, if it is one.
    pub journal: Option<Overlay<'a>>,
    /// What recovery says it did.
    pub report: Report,
}

impl JudgedLog {
    /// A log of which nothing has been written yet.
    pub fn new(log: Arc<KeptLog>, description: LogDescription) -> Self {
        let place = &description.place;
        let excluded = place.own_blocks.iter().map(|range| (range.start, range.end)).collect();
        let bounds = HomeBounds::from_parts(place.home_blocks, place.block_bytes, excluded);
        JudgedLog {
            log,
            description,
            bounds,
            blocks: HashMap::new(),
            in_pass: Vec::new(),
            waiting: Vec::new(),
            is_aged: false,
            discarded: HashSet::new(),
        }
    }

    /// Another process goes on with it, and the guest's pass that has not ended is sent once more.
    pub(crate) fn is_now(&mut self, log: Arc<KeptLog>, name: String) {
        // One that was not held has files of another name.
        (self.log, self.description.name) = (log, name);
        self.in_pass.clear();
        self.waiting.clear();
    }

    /// The log is made durable by age, where superblocks wait.
    pub fn set_aged(&mut self) {
        self.is_aged = true;
    }

    /// The guest hears that a request is done.
    pub fn request_done(&mut self, id: u32) {
        if let Some(index) = self.waiting.iter().position(|(of, _)| *of == id) {
            self.blocks.insert(0, self.waiting.remove(index).1);
        }
    }

    /// Its file system, on these images.
    pub(crate) fn file_system(&self, images: &[PathBuf]) -> FileSystem {
        let place = &self.description.place;
        FileSystem {
            image: images[place.home_disk].clone(),
            offset: place.home_start,
            external_journal: place.is_external.then(|| images[place.journal_disk].clone()),
        }
    }

    /// Bytes in a block.
    pub fn block_bytes(&self) -> u64 {
        u64::from(self.description.place.block_bytes)
    }

    /// Whether the guest has it open: its superblock says that there is something to replay.
    pub fn is_open(&self) -> bool {
        Self::is_open_in(&self.blocks)
    }

    /// The same of a log that has these blocks.
    pub fn is_open_in(blocks: &HashMap<u32, Arc<[u8]>>) -> bool {
        blocks.get(&0).is_some_and(|block| jbd2::Superblock::decode(block).is_ok_and(|sb| !sb.is_empty()))
    }

    /// The logs that a process may leave that is killed in a step, in which the guest sends `issue`: as it was before,
    /// and after each commit block of what was sent and does not count yet.
    pub fn outcomes(&self, recording: &Recording, issue: Option<&Issue>) -> Vec<HashMap<u32, Arc<[u8]>>> {
        let mut state = self.clone();
        let mut outcomes = vec![state.blocks.clone()];
        let mut add_pass = |state: &JudgedLog| {
            let mut blocks = state.blocks.clone();
            for (position, block) in &state.in_pass {
                blocks.insert(*position, Arc::clone(block));
                if jbd2::peek(block).is_some_and(|header| header.kind == jbd2::Kind::Commit) {
                    outcomes.push(blocks.clone());
                }
            }
            outcomes.push(blocks);
        };
        add_pass(&state);
        if let Some(issue) = issue {
            state.issued(recording, issue);
            add_pass(&state);
        }
        // What waits may be taken in this step.
        for (_, superblock) in &state.waiting {
            for mut blocks in outcomes.clone() {
                blocks.insert(0, Arc::clone(superblock));
                outcomes.push(blocks);
            }
        }
        outcomes
    }

    /// Where on its disk a log block is, in bytes.
    pub fn offset_of(&self, position: u32) -> Option<u64> {
        self.log.offset_of(position)
    }

    /// The log blocks that were ever written: position and content.
    pub fn written(&self) -> impl Iterator<Item = (u32, &Arc<[u8]>)> {
        self.blocks.iter().map(|(position, block)| (*position, block))
    }

    /// The home block that holds the file system's superblock.
    pub fn superblock_block(&self) -> u64 {
        SUPERBLOCK_OFFSET / self.block_bytes()
    }

    /// The guest sends a request.
    pub fn issued(&mut self, recording: &Recording, issue: &Issue) {
        let place = self.description.place.clone();
        let block_bytes = u64::from(place.block_bytes);
        let (start, end) = (issue.offset, issue.offset + issue.len);
        if usize::from(issue.disk) == place.home_disk && start >= place.home_start {
            let first = (start - place.home_start).div_ceil(block_bytes);
            let last = (end - place.home_start) / block_bytes;
            if issue.kind == Kind::Discard {
                self.discarded.extend(first..last);
            } else if issue.kind != Kind::Read {
                for block in (start - place.home_start) / block_bytes..(end - place.home_start).div_ceil(block_bytes) {
                    self.discarded.remove(&block);
                }
            }
        }
        if usize::from(issue.disk) != place.journal_disk || issue.kind != Kind::Write {
            return;
        }
        let mut bytes = None;
        for run in &place.runs {
            let run_end = run.offset + u64::from(run.count) * block_bytes;
            let (from, to) = (start.max(run.offset), end.min(run_end));
            let mut at = from;
            while at + block_bytes <= to {
                let bytes = bytes.get_or_insert_with(|| recording.bytes_of(issue));
                let position = run.first_position + ((at - run.offset) / block_bytes) as u32;
                let into = (at - start) as usize;
                let block: Arc<[u8]> = Arc::from(&bytes[into..into + block_bytes as usize]);
                if position == 0 {
                    self.end_of_pass();
                    if self.is_aged && self.is_open() {
                        self.waiting.push((issue.id, block));
                    } else {
                        self.blocks.insert(0, block);
                    }
                } else {
                    self.in_pass.push((position, block));
                }
                at += block_bytes;
            }
        }
    }

    /// What was sent counts from here on.
    pub fn end_of_pass(&mut self) {
        for (position, block) in self.in_pass.drain(..) {
            self.blocks.insert(position, block);
        }
    }

    /// Replays the complete log, or one that amberlog holds, onto the disks as they are.
    ///
    /// # Errors
    /// When the replay refuses or fails.
    pub fn replay<'a, L: LogRead + Send>(
        &self,
        log: &mut L,
        images: &'a [File],
        land: &[(usize, u64, Vec<u8>)],
    ) -> Result<Recovered<'a>> {
        let place = &self.description.place;
        let len = place.home_blocks * u64::from(place.block_bytes);
        let mut home = Overlay::new(&images[place.home_disk], place.home_start, len, place.block_bytes);
        for (disk, offset, data) in land {
            if *disk == place.home_disk && *offset >= place.home_start {
                home.land(offset - place.home_start, data).map_err(|e| Error::Other(e.to_string()))?;
            }
        }
        let offset = self.offset_of(0).ok_or_else(|| Error::Other("a log without a superblock".to_owned()))?;
        let bounds = LogBounds { superblock_position: 0, blocks: place.log_blocks };
        let refuse = |e: recovery::Error| Error::Other(e.to_string());
        let (journal, report) = if place.is_external {
            let mut journal = Overlay::new(&images[place.journal_disk], 0, u64::MAX, place.block_bytes);
            let other = JournalPlace::Other { disk: &mut journal, offset };
            let report = recovery::replay(log, bounds, &self.bounds, &mut home, other).map_err(refuse)?;
            (Some(journal), report)
        } else {
            let inside = JournalPlace::Home { offset: offset - place.home_start };
            (None, recovery::replay(log, bounds, &self.bounds, &mut home, inside).map_err(refuse)?)
        };
        Ok(Recovered { home, journal, report })
    }

    /// The journal's superblock that a replay left.
    ///
    /// # Errors
    /// When it left none.
    pub fn superblock_left(&self, recovered: &Recovered<'_>) -> Result<jbd2::Superblock> {
        let place = &self.description.place;
        let offset = self.offset_of(0).unwrap_or(0);
        let block = match &recovered.journal {
            Some(journal) => journal.block(offset / self.block_bytes()),
            None => recovered.home.block((offset - place.home_start) / self.block_bytes()),
        };
        let block = block.map_err(|e| Error::Other(e.to_string()))?;
        jbd2::Superblock::decode(&block).map_err(|e| Error::Other(e.to_string()))
    }

    /// The complete log, for a replay.
    pub fn complete(&self) -> CompleteLog<'_> {
        CompleteLog(&self.blocks)
    }
}

/// A log as a disk would have it.
pub struct CompleteLog<'a>(&'a HashMap<u32, Arc<[u8]>>);

impl<'a> CompleteLog<'a> {
    /// One that has these blocks.
    pub fn new(blocks: &'a HashMap<u32, Arc<[u8]>>) -> Self {
        CompleteLog(blocks)
    }
}

impl LogRead for CompleteLog<'_> {
    type Error = Infallible;

    fn read(&mut self, position: u32, buffer: &mut [u8]) -> std::result::Result<Content, Infallible> {
        match self.0.get(&position) {
            Some(block) => buffer.copy_from_slice(block),
            None => buffer.fill(0),
        }
        Ok(Content::Present)
    }
}

/// A log that amberlog holds, with the blocks that are at their own place on storage.
pub struct HeldReader<'l, 'a> {
    /// The held log.
    pub held: &'l journal_area::HeldLog<'a>,
    /// Where it is.
    pub judged: &'l JudgedLog,
    /// The disk with the log.
    pub journal: &'l File,
}

impl LogRead for HeldReader<'_, '_> {
    type Error = std::io::Error;

    fn read(&mut self, position: u32, buffer: &mut [u8]) -> std::io::Result<Content> {
        if self.held.location(position) != Location::Storage {
            return self.held.read_block(position, buffer);
        }
        let offset = self.judged.offset_of(position).ok_or_else(|| std::io::Error::other("no place"))?;
        self.journal.read_exact_at(buffer, offset)?;
        Ok(Content::Present)
    }
}

/// Whether `raw` is a file system's superblock; for the masks of comparisons.
pub fn is_superblock(raw: &[u8]) -> bool {
    FileSystemSuperblock::parse(raw).is_ok()
}
