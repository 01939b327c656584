//! The worker is killed at some moment of a recording, and another one goes on with what it left: its files, which guest pages are
//! protected, and what the guest was not answered.
//!
//! A kill comes between two steps, or before one of the stores of a step: then files and images are put back as they were before that
//! store. Of what had been handed to the kernel anything may have been carried out, in any order, and the next worker begins when that is
//! over. What the guest was not answered it has sent still: the next worker takes it from the in-flight region, in the order in which it
//! was sent (`run`). From then on everything is compared with the complete journal as before.
//!
//! Must never: give the next worker anything that only lived in the one that died. Failure story: what the next one refuses is a finding.

use crate::error::{During, Error};
use crate::finding::{Step, Stop};
use crate::recording::PAGE_BYTES;
use crate::scratch::scratch;
use crate::simulation::Simulation;
use block_route::{Route, Start};
use guest_kit::image::copy_image;
use guest_memory::{PageId, RegionDescriptor, VmMemory, simulated_kill};
use placement::{AreaDirectory, DiskRoute, Journals};
use std::cell::RefCell;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;

/// Half of them come before one of so many stores, counted over the steps that follow.
const STORES_MAX: u64 = 60;

/// What outlives a process that is killed before a store.
#[derive(Debug)]
struct Left {
    copies: tempfile::TempDir,
    protected: Vec<PageId>,
}

/// Files of the directory that a worker writes to; the guest's memory is the guest's.
fn files(directory: &Path) -> std::io::Result<Vec<PathBuf>> {
    let is_written = |path: &PathBuf| {
        path.extension().is_some_and(|ending| ending == "table" || ending == "pool" || ending == "json")
    };
    Ok(std::fs::read_dir(directory)?.flatten().map(|entry| entry.path()).filter(is_written).collect())
}

impl Left {
    fn take(directory: &Path, images: &[PathBuf], memory: &VmMemory, pages: u32) -> crate::Result<Self> {
        let copies = scratch()?;
        for path in files(directory).during("looking at the area")?.iter().chain(images) {
            let name = path.file_name().unwrap_or_default();
            copy_image(path, &copies.path().join(name)).map_err(|error| Error::Other(error.to_string()))?;
        }
        Ok(Left { copies, protected: protected(memory, pages) })
    }

    fn put_back(&self, directory: &Path, images: &[PathBuf]) -> crate::Result<()> {
        for path in files(directory).during("looking at the area")? {
            // The dead one still has them open.
            std::fs::remove_file(&path).during("removing what is put back")?;
        }
        for entry in std::fs::read_dir(self.copies.path()).during("looking at copies")?.flatten() {
            let name = entry.file_name();
            let to = images.iter().find(|image| image.file_name() == Some(&name)).cloned();
            let to = to.unwrap_or_else(|| directory.join(&name));
            // An image stays the file that it is.
            copy_image(&entry.path(), &to).map_err(|error| Error::Other(error.to_string()))?;
        }
        Ok(())
    }
}

fn protected(memory: &VmMemory, pages: u32) -> Vec<PageId> {
    (0..pages).map(PageId).filter(|page| memory.simulated_is_protected(*page)).collect()
}

/// A step in which the worker may die.
pub(crate) struct Dying(Rc<RefCell<(u64, Option<crate::Result<Left>>)>>);

impl Simulation<'_> {
    /// The worker dies between two steps, if it is time. Says whether it did, and another one goes on.
    pub(crate) fn dies_if_due(&mut self) -> std::result::Result<bool, Stop> {
        let clock = self.clock();
        if self.deaths.stores.is_some() || self.deaths.at.last().is_none_or(|at| clock < *at) {
            return Ok(false);
        }
        self.deaths.at.pop();
        if self.random_below(2) == 0 {
            self.follow(None)?;
            return Ok(true);
        }
        self.deaths.stores = Some(self.random_below(STORES_MAX));
        Ok(false)
    }

    /// The worker may die in the step that begins.
    pub(crate) fn begin_dying(&self) -> Option<Dying> {
        let stores = self.deaths.stores?;
        let state = Rc::new(RefCell::new((stores, None)));
        let dead = Rc::clone(&state);
        let directory = self.journals.directory().path().to_owned();
        let (images, memory, pages) = (self.image_paths(), Arc::clone(&self.memory), self.recording.memory_pages);
        simulated_kill::set_look(Some(Box::new(move || {
            let mut state = dead.borrow_mut();
            match (state.0, &state.1) {
                (0, None) => state.1 = Some(Left::take(&directory, &images, &memory, pages)),
                (0, Some(_)) => {}
                _ => state.0 -= 1,
            }
        })));
        Some(Dying(state))
    }

    /// The step is over. Says whether the worker died in it: another one goes on then, and nothing of the step counts but what
    /// outlived it.
    pub(crate) fn end_dying(&mut self, dying: Option<Dying>) -> std::result::Result<bool, Stop> {
        let Some(Dying(state)) = dying else { return Ok(false) };
        simulated_kill::set_look(None);
        let (stores, left) = state.take();
        let Some(left) = left else {
            self.deaths.stores = Some(stores);
            return Ok(false);
        };
        self.deaths.stores = None;
        self.follow(Some(left?))?;
        Ok(true)
    }

    /// Another worker goes on with what was left, now or before a store of the step that was just made.
    fn follow(&mut self, left: Option<Left>) -> Step {
        self.has_moved = true;
        self.deaths.followed += 1;
        let (path, registry) = (self.journals.directory().path().to_owned(), self.directory.path().join("registry"));
        let lock = self.journals.directory().lock_file().try_clone().during("duplicating a descriptor")?;
        let protected = match left {
            Some(left) => {
                left.put_back(&path, &self.image_paths())?;
                left.protected
            }
            None => protected(&self.memory, self.recording.memory_pages),
        };
        // What the kernel had been given ends first, unseen; what it had not been given is gone.
        while !self.pending.is_empty() {
            let index = self.random_below(self.pending.len() as u64) as usize;
            if !self.pending[index].is_executed && self.random_below(3) != 0 {
                self.execute(index)?;
            }
            self.pending.swap_remove(index);
        }
        let memory = VmMemory::new();
        memory.simulate_protection();
        memory.protect(&protected).during("protecting what was protected")?;
        let refused = |what: &str, error: String| Stop::Finding(format!("the next worker {what}: {error}"));
        let (directory, description) = AreaDirectory::adopt(&path, &registry, lock)
            .map_err(|error| refused("does not find the directory as it was", error.to_string()))?;
        let options = self.journals_options();
        let journals = Journals::resume(&memory, directory, &description, options)
            .map_err(|error| refused("cannot go on", error.to_string()))?;
        let ram = File::options().read(true).write(true).open(path.join("ram")).during("opening the guest's memory")?;
        let size = u64::from(self.recording.memory_pages) * PAGE_BYTES as u64;
        let region = RegionDescriptor { gpa: 0, size, user_addr: 1 << 40, file: ram, file_offset: 0 };
        let table = Arc::new(memory.map(vec![region]).map_err(|error| Error::Other(error.to_string()))?);
        self.set_up_journals(&journals);
        journals.go_on().map_err(|error| refused("cannot begin", error.to_string()))?;
        let mut routes: Vec<DiskRoute> =
            (0..self.images.len()).map(|disk| DiskRoute::new(Arc::clone(&journals), disk)).collect();
        for route in &mut routes {
            route.started(Start::Resumed, &table).map_err(|error| refused("cannot start", error.to_string()))?;
        }
        self.take_over(memory, table, journals, routes)
    }
}
