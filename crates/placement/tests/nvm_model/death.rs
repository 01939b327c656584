//! The worker is killed between any two of its stores, and another one goes on while the guest runs: with the region, the files of
//! the VM's directory and storage as they were at that moment. What was on its way in the kernel arrives; what was not answered is asked
//! again.

use super::{BLOCK, Guest, REGION_BYTES, Random};
use block_route::{Operation, Plan, Request, RequestId, RequestKind, Route, Start};
use guest_memory::{MemorySlice, VmMemory};
use nvm_journal::Found;
use nvm_journal::medium::{Medium, SimulatedMedium};
use placement::{AreaDirectory, DiskOptions, DiskRoute, Journals, JournalsOptions, NvmDisk, NvmOptions, PlacementKind};
use std::ffi::OsString;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use write_log::WriteLog;

/// A request that is not answered.
pub(super) struct Sent {
    pub kind: RequestKind,
    pub offset: u64,
    pub segments: Vec<MemorySlice>,
}

/// What a worker has left.
struct Left {
    medium: SimulatedMedium,
    image: Vec<u8>,
    files: Vec<(OsString, Vec<u8>)>,
}

/// When the worker dies.
#[derive(Default)]
pub(super) struct Death {
    /// After so many more steps of the region.
    after: Option<u64>,
    /// Between what it has done and what storage is told of it.
    is_next: bool,
    left: Option<Left>,
    image: PathBuf,
    directory: PathBuf,
}

impl Death {
    pub fn knows(&mut self, image: &Path, directory: &Path) {
        (self.image, self.directory) = (image.to_owned(), directory.to_owned());
    }

    fn leave(&mut self, medium: SimulatedMedium) {
        let entries = std::fs::read_dir(&self.directory).expect("the VM's directory").flatten();
        let files = entries
            .filter(|entry| entry.file_name() != "lock")
            .map(|entry| (entry.file_name(), std::fs::read(entry.path()).expect("read")));
        let (files, image) = (files.collect(), std::fs::read(&self.image).expect("read"));
        self.left = Some(Left { medium, image, files });
        (self.after, self.is_next) = (None, false);
    }
}

/// A region that is seen: by who crashes it, and by who kills its process.
pub(super) fn observed(
    mut medium: SimulatedMedium,
    seed: u64,
    images: &Arc<Mutex<Vec<Vec<u8>>>>,
    death: &Arc<Mutex<Death>>,
) -> SimulatedMedium {
    let (seen, death, mut choice) = (Arc::clone(images), Arc::clone(death), Random::new(seed ^ 0x6c6f));
    medium.observe(Some(Box::new(move |crash| {
        let mut seen = seen.lock().expect("no panic under this lock");
        if seen.len() < 3 && choice.below(20) == 0 {
            let how = choice.below(3);
            seen.push(crash.image(&mut |count| match how {
                0 => 0,
                1 => count - 1,
                _ => choice.below(count as u64) as usize,
            }));
        }
        let mut death = death.lock().expect("no panic under this lock");
        match death.after {
            Some(0) => death.leave(crash.after_a_kill()),
            Some(after) => death.after = Some(after - 1),
            None => {}
        }
    })));
    medium
}

pub(super) fn journals_options(image: PathBuf, nvm: &Arc<NvmDisk>, log: &Arc<WriteLog>) -> JournalsOptions {
    let disk = DiskOptions {
        name: "disk".to_owned(),
        path: image,
        placement: PlacementKind::Nvm,
        honour_flush: false,
        read_only: false,
        nvm: Some(Arc::clone(nvm)),
        remote: None,
        durable_within: None,
        write_log: Some(Arc::clone(log)),
    };
    JournalsOptions { disks: vec![disk], budget_bytes: 64 << 20, tracer: None }
}

impl Guest {
    /// The worker dies soon: in the midst of what it does to the region, or before storage is told of what it has done.
    pub fn die_soon(&mut self) {
        let steps = [3, 30, 300][self.random.below(3) as usize];
        let mut death = self.death.lock().expect("no panic under this lock");
        match self.random.below(3) {
            0 => death.is_next = true,
            _ => death.after = Some(self.random.below(steps)),
        }
    }

    /// The worker dies before storage is told of what it does next.
    pub fn die_next(&mut self) {
        self.death.lock().expect("no panic under this lock").is_next = true;
    }

    /// How often that has come to pass.
    pub fn deaths(&self) -> u64 {
        self.deaths
    }

    /// Whether the worker has died. Nobody hears what it wanted.
    pub(super) fn has_died(&mut self) -> bool {
        let left = {
            let mut death = self.death.lock().expect("no panic under this lock");
            if death.is_next {
                let region = self.nvm.look_at_region(|medium| medium.bytes().to_vec());
                death.leave(SimulatedMedium::from_image(region.unwrap_or_else(|| vec![0; REGION_BYTES])));
            }
            death.left.take()
        };
        let Some(left) = left else { return false };
        self.deaths += 1;
        self.follow(left);
        true
    }

    /// Another worker goes on.
    fn follow(&mut self, left: Left) {
        self.tell(|| {
            let found = Found::read(left.medium.bytes()).expect("a region");
            let owner = found.and_then(|found| Some((found.sequence, found.latest.len(), found.owner?)));
            format!("the worker dies, and leaves {owner:?}")
        });
        self.images.lock().expect("no panic under this lock").clear();
        let area = self.journals.directory();
        let (path, lock) = (area.path().to_owned(), area.lock_file().try_clone().expect("a descriptor"));
        for entry in std::fs::read_dir(&path).expect("the VM's directory").flatten() {
            if entry.file_name() != "lock" {
                std::fs::remove_file(entry.path()).expect("removed");
            }
        }
        for (name, content) in &left.files {
            std::fs::write(path.join(name), content).expect("written");
        }
        self.file.write_all_at(&left.image, 0).expect("written");
        // What the kernel has of it arrives, in whatever order.
        while !self.pending.is_empty() {
            let index = self.random.below(self.pending.len() as u64) as usize;
            let pending = self.pending.swap_remove(index);
            match pending.operation.operation {
                Operation::Write => {
                    self.file.write_all_at(&pending.bytes, pending.operation.offset).expect("written");
                    self.ours.ended(pending.number);
                }
                Operation::Flush if self.random.below(2) == 0 => self.ours.flushed(pending.covered),
                _ => {}
            }
        }
        let seed = self.next_content;
        let medium = observed(left.medium, seed, &self.images, &self.death);
        let options: NvmOptions = self.nvm.options.clone();
        self.nvm = Arc::new(NvmDisk::with_medium(options, 0, Box::new(medium)).expect("a good region"));
        let registry = self.directory.path().join("registry");
        let (area, description) = AreaDirectory::adopt(&path, &registry, lock).expect("it is there");
        let options = journals_options(self.directory.path().join("image"), &self.nvm, &self.write_log);
        let journals = Journals::resume(&VmMemory::new(), area, &description, options);
        self.journals = journals.unwrap_or_else(|error| panic!("nobody can go on: {error}"));
        self.check();
        let has_owner = |guest: &Self| {
            let found = guest.nvm.look_at_region(|medium| Found::read(medium.bytes()).expect("a region"));
            found.flatten().is_some_and(|found| found.owner.is_some())
        };
        let had_owner = has_owner(self);
        self.journals.go_on().expect("storage works");
        if had_owner && !has_owner(self) {
            // That is said of what storage has durably.
            let now = self.ours.now();
            self.ours.flushed(now);
        }
        self.check();
        self.route = DiskRoute::new(Arc::clone(&self.journals), 0);
        let table = self.table.as_ref().expect("it has memory");
        self.route.started(Start::Resumed, table).expect("started");
        if self.random.below(2) == 0 {
            // Its device may be woken before it has looked at the rings.
            let unanswered: Vec<u32> = self.sent.keys().copied().collect();
            self.holds.extend(unanswered.into_iter().map(|request| (request, 1)));
            let mut plan = Plan::default();
            self.route.woken(&mut plan);
            self.carry_out(plan);
        }
        let mut plan = Plan::default();
        let mut again: Vec<u32> = self.sent.keys().copied().collect();
        again.sort_unstable();
        for request in again {
            self.holds.insert(request, 0);
            let Sent { kind, offset, segments } = &self.sent[&request];
            let len = segments.iter().map(|slice| slice.len() as u64).sum();
            let request = Request { id: RequestId(request), kind: *kind, offset: *offset, len, segments };
            self.tell(|| format!("guest: {} {kind:?} of block {} again", request.id.0, offset / BLOCK as u64));
            self.route.route_again(&request, &mut plan);
            if self.random.below(2) == 0 {
                self.route.end_of_pass(&mut plan);
            }
        }
        self.route.end_of_pass(&mut plan);
        self.carry_out(plan);
        self.check();
    }
}
