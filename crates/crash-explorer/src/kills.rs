//! Kills in the middle of a step: between two stores into the files that outlive the process.
//!
//! [`check`](crate::check) looks at what a process would leave that is killed between two steps. Within a step amberlog
//! changes one word of its tables after the other, and is killed between any two of them just as well. So before some of
//! these stores, which follow from the seed, the files are read as the next process would find them. After the step each
//! of these looks is held against what the guest had sent: a transaction whose commit block was under way in this step
//! may be there or not; all else must be as a complete journal makes it.

use crate::compare::compare_blocks;
use crate::complete::{CompleteLog, JudgedLog};
use crate::finding::{Step, Stop, finding};
use crate::recording::{Issue, Kind};
use crate::simulation::Simulation;
use guest_memory::{HostFile, VmMemory, simulated_kill};
use guest_tools::random::Random;
use jbd2::{Content, LogRead};
use journal_area::{FoundLog, Location};
use std::cell::RefCell;
use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;

/// Looks taken in one step, at most.
const LOOKS_MAX: usize = 6;
/// Of the first stores of a step one in so many is looked at, of the later ones one in many more.
const EARLY_STORES: u64 = 8;
const EARLY_EACH: u64 = 3;
const LATE_EACH: u64 = 40;

/// A log block as it was found.
enum Found {
    Present(Vec<u8>),
    AtHome,
    /// At its own place on storage.
    Stored,
}

/// One log as it was found.
pub struct FoundBlocks(HashMap<u32, Found>);

/// What the next process would find: one entry a log, nothing for one that is closed; or why it would refuse.
pub type Look = Vec<Result<Option<FoundBlocks>, String>>;

/// The looks that are taken while one step is made.
pub struct Looks(Rc<RefCell<Vec<Look>>>);

impl Looks {
    /// Looks from now on at the stores of this thread, until [`Looks::end`].
    pub fn begin(simulation: &Simulation<'_>, seed: u64) -> Self {
        let taken = Rc::new(RefCell::new(Vec::new()));
        let sink = Rc::clone(&taken);
        let directory = simulation.journals.directory().path().to_owned();
        let names: Vec<String> = simulation.logs.iter().map(|judged| judged.description.name.clone()).collect();
        let memory = Arc::clone(&simulation.memory);
        let mut random = Random::new(seed);
        let mut stores = 0;
        simulated_kill::set_look(Some(Box::new(move || {
            let each = if stores < EARLY_STORES { EARLY_EACH } else { LATE_EACH };
            stores += 1;
            if sink.borrow().len() < LOOKS_MAX && random.below(each) == 0 {
                let look = names.iter().map(|name| look_at(&directory, name, &memory)).collect();
                sink.borrow_mut().push(look);
            }
        })));
        Looks(taken)
    }

    /// Looks no longer. Gives what was seen.
    pub fn end(self) -> Vec<Look> {
        simulated_kill::set_look(None);
        self.0.take()
    }
}

fn look_at(directory: &Path, name: &str, memory: &VmMemory) -> Result<Option<FoundBlocks>, String> {
    let path = |ending: &str| -> PathBuf { directory.join(format!("{name}.{ending}")) };
    let ram = HostFile::open(&directory.join("ram")).map_err(|error| error.to_string())?;
    let found = FoundLog::open(&path("table"), &path("pool"), vec![(0, ram)]).map_err(|error| error.to_string())?;
    if !found.is_open() {
        return Ok(None);
    }
    if let Some(page) = found.pages().find(|page| !memory.simulated_is_protected(*page)) {
        return Err(format!("the table names guest page {page:?}, which the guest can write to"));
    }
    let log = found.log();
    let mut blocks = HashMap::new();
    let mut block = vec![0; log.block_bytes() as usize];
    for position in 0..log.log_blocks() {
        let found = match log.location(position) {
            Location::None => continue,
            Location::Storage => Found::Stored,
            _ => match log.read_block(position, &mut block).map_err(|error| error.to_string())? {
                Content::Present => Found::Present(block.clone()),
                Content::AtHome => Found::AtHome,
            },
        };
        blocks.insert(position, found);
    }
    Ok(Some(FoundBlocks(blocks)))
}

/// Reads a log as it was found.
struct FoundReader<'l> {
    found: &'l FoundBlocks,
    judged: &'l JudgedLog,
    journal: &'l File,
}

impl LogRead for FoundReader<'_> {
    type Error = io::Error;

    fn read(&mut self, position: u32, buffer: &mut [u8]) -> io::Result<Content> {
        match self.found.0.get(&position) {
            Some(Found::Present(block)) => buffer.copy_from_slice(block),
            Some(Found::AtHome) => return Ok(Content::AtHome),
            Some(Found::Stored) => {
                let offset = self.judged.offset_of(position).ok_or_else(|| io::Error::other("no place"))?;
                self.journal.read_exact_at(buffer, offset)?;
            }
            None => buffer.fill(0),
        }
        Ok(Content::Present)
    }
}

/// Checks what was seen in a step, in which the guest sent `issue`, if any. To be called before the judge is told that
/// the step is over.
///
/// # Errors
/// The first look from which something else would be recovered.
pub fn check(simulation: &Simulation<'_>, looks: &[Look], issue: Option<&Issue>) -> Step {
    if looks.is_empty() {
        return Ok(());
    }
    for (index, judged) in simulation.logs.iter().enumerate() {
        if simulation.is_stored(judged) {
            continue;
        }
        let outcomes = judged.outcomes(simulation.recording, issue);
        // What the guest lets go is nobody's business from when it says so.
        let mut letting_go = None;
        let judged = match issue.filter(|issue| issue.kind == Kind::Discard) {
            None => judged,
            Some(issue) => {
                let state: &mut JudgedLog = letting_go.insert(judged.clone());
                state.issued(simulation.recording, issue);
                state
            }
        };
        for look in looks {
            let found = match &look[index] {
                Err(error) => return finding(format!("killed between two stores, the files are refused: {error}")),
                Ok(found) => found,
            };
            check_look(simulation, judged, found.as_ref(), &outcomes)?;
        }
    }
    Ok(())
}

fn check_look(
    simulation: &Simulation<'_>,
    judged: &JudgedLog,
    found: Option<&FoundBlocks>,
    outcomes: &[HashMap<u32, Arc<[u8]>>],
) -> Step {
    let Some(found) = found else {
        if outcomes.iter().any(|outcome| !JudgedLog::is_open_in(outcome)) {
            return Ok(());
        }
        return finding("killed between two stores, an open log is found closed");
    };
    let images = &simulation.images;
    let journal = &images[judged.description.place.journal_disk];
    let mut reader = FoundReader { found, judged, journal };
    let ours = match judged.replay(&mut reader, images, &[]) {
        Ok(ours) => ours,
        Err(error) => return finding(format!("killed between two stores, the files cannot be recovered: {error}")),
    };
    let mut first = None;
    for outcome in outcomes.iter().filter(|outcome| JudgedLog::is_open_in(outcome)) {
        let theirs = judged.replay(&mut CompleteLog::new(outcome), images, &[])?;
        match compare_blocks(simulation, judged, &ours, &theirs) {
            Ok(()) => return Ok(()),
            Err(Stop::Finding(text)) => first = first.or(Some(text)),
            Err(error) => return Err(error),
        }
    }
    match first {
        Some(text) => finding(format!("killed between two stores: {text}")),
        // The guest's last word is that the log is closed: all of it was home before that.
        None => Ok(()),
    }
}
