//! A medium for tests: it loses power after any operation, and with it any part of what was not made durable.

use super::medium::{Medium, SegmentFile};
use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex};

/// Disks write sectors whole, or not at all.
const SECTOR_BYTES: usize = 512;

#[derive(Clone, Debug, Default)]
struct Content {
    durable: Vec<u8>,
    /// How far it was written and made durable.
    end: u64,
    /// Written and not durable, in order.
    loose: Vec<(u64, Vec<u8>)>,
}

impl Content {
    fn now(&self) -> Vec<u8> {
        let mut bytes = self.durable.clone();
        self.loose.iter().for_each(|(offset, data)| put(&mut bytes, *offset, data));
        bytes
    }
}

fn put(bytes: &mut Vec<u8>, offset: u64, data: &[u8]) {
    let offset = offset as usize;
    if bytes.len() < offset + data.len() {
        bytes.resize(offset + data.len(), 0);
    }
    bytes[offset..offset + data.len()].copy_from_slice(data);
}

#[derive(Debug, Default)]
struct State {
    files: BTreeMap<u64, Content>,
    operations: u64,
    dies_at: Option<u64>,
    capacity_bytes: Option<u64>,
}

impl State {
    /// Counts an operation; from the one at which power is lost on, none does anything.
    fn step(&mut self) -> io::Result<()> {
        self.operations += 1;
        match self.dies_at {
            Some(at) if self.operations > at => Err(io::Error::other("power was lost")),
            _ => Ok(()),
        }
    }
}

/// The medium; clones are the same one.
#[derive(Clone, Debug, Default)]
pub struct Simulated(Arc<Mutex<State>>);

/// One of its segments.
#[derive(Debug)]
pub struct SimulatedFile(Arc<Mutex<State>>, u64);

impl Simulated {
    fn with<T>(&self, with: impl FnOnce(&mut State) -> T) -> T {
        with(&mut self.0.lock().expect("no panic under this lock"))
    }

    /// Power is lost after this many operations from the beginning.
    pub fn die_at(&self, operations: u64) {
        self.with(|state| state.dies_at = Some(operations));
    }

    /// Segments may take this many bytes together.
    pub fn set_capacity(&self, bytes: u64) {
        self.with(|state| state.capacity_bytes = Some(bytes));
    }

    /// Operations so far.
    pub fn operations(&self) -> u64 {
        self.with(|state| state.operations)
    }

    /// What is there after a loss of power: everything durable, and of every sector not durable what `survives` decides.
    pub fn after_power_loss(&self, mut survives: impl FnMut() -> bool) -> Self {
        let files = self.with(|state| state.files.clone());
        let files = files
            .into_iter()
            .map(|(number, content)| {
                let mut bytes = content.durable;
                for (offset, data) in &content.loose {
                    let mut at = 0;
                    while at < data.len() {
                        let into_sector = (*offset as usize + at) % SECTOR_BYTES;
                        let len = (SECTOR_BYTES - into_sector).min(data.len() - at);
                        if survives() {
                            put(&mut bytes, offset + at as u64, &data[at..at + len]);
                        }
                        at += len;
                    }
                }
                (number, Content { durable: bytes, end: content.end, loose: Vec::new() })
            })
            .collect();
        Simulated(Arc::new(Mutex::new(State { files, ..State::default() })))
    }

    /// Flips a bit that is durable.
    pub fn flip(&self, segment: u64, offset: u64) {
        self.with(|state| {
            if let Some(byte) = state.files.get_mut(&segment).and_then(|file| file.durable.get_mut(offset as usize)) {
                *byte ^= 0x10;
            }
        });
    }

    /// The segments, and how far each was ever made durable.
    pub fn used(&self) -> Vec<(u64, u64)> {
        let used = |file: &Content| file.durable.iter().rposition(|byte| *byte != 0).map_or(0, |last| last as u64 + 1);
        self.with(|state| state.files.iter().map(|(number, file)| (*number, used(file))).collect())
    }

    /// Makes nothing of bytes that are durable.
    pub fn wipe(&self, segment: u64, offset: u64, bytes: u64) {
        self.with(|state| {
            if let Some(file) = state.files.get_mut(&segment) {
                let end = ((offset + bytes) as usize).min(file.durable.len());
                let start = (offset as usize).min(end);
                file.durable[start..end].fill(0x5a);
            }
        });
    }

    /// Bytes reserved by all segments.
    pub fn bytes(&self) -> u64 {
        self.with(|state| state.files.values().map(|file| file.durable.len() as u64).sum())
    }
}

impl Medium for Simulated {
    type File = SimulatedFile;

    fn block_bytes(&self) -> usize {
        SECTOR_BYTES
    }

    fn list(&self) -> io::Result<Vec<u64>> {
        Ok(self.with(|state| state.files.keys().copied().collect()))
    }

    fn create(&mut self, number: u64, bytes: u64) -> io::Result<SimulatedFile> {
        self.with(|state| {
            state.step()?;
            let used: u64 = state.files.values().map(|file| file.durable.len() as u64).sum();
            if state.capacity_bytes.is_some_and(|capacity| used + bytes > capacity) {
                return Err(io::Error::from(io::ErrorKind::StorageFull));
            }
            state.files.insert(number, Content { durable: vec![0; bytes as usize], ..Content::default() });
            Ok(())
        })?;
        Ok(SimulatedFile(Arc::clone(&self.0), number))
    }

    fn open(&self, number: u64) -> io::Result<SimulatedFile> {
        Ok(SimulatedFile(Arc::clone(&self.0), number))
    }

    fn delete(&mut self, number: u64) -> io::Result<()> {
        self.with(|state| {
            state.step()?;
            state.files.remove(&number);
            Ok(())
        })
    }
}

impl SimulatedFile {
    fn with<T>(&self, with: impl FnOnce(&mut State, u64) -> io::Result<T>) -> io::Result<T> {
        with(&mut self.0.lock().expect("no panic under this lock"), self.1)
    }
}

fn file(state: &mut State, number: u64) -> io::Result<&mut Content> {
    state.files.get_mut(&number).ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))
}

impl SegmentFile for SimulatedFile {
    fn write_at(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.with(|state, number| {
            let died = state.step();
            // The write in which power is lost may have arrived in part.
            if died.is_ok() || state.dies_at.is_some_and(|at| state.operations == at + 1) {
                let content = file(state, number)?;
                let durable = content.end.next_multiple_of(SECTOR_BYTES as u64);
                assert!(
                    offset >= durable,
                    "bytes {offset} on are written over sectors that are durable up to {durable}"
                );
                content.loose.push((offset, bytes.to_vec()));
            }
            died
        })
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.with(|state, number| {
            let now = file(state, number)?.now();
            let offset = offset as usize;
            let bytes = now.get(offset..offset + buffer.len()).ok_or(io::ErrorKind::UnexpectedEof)?;
            buffer.copy_from_slice(bytes);
            Ok(())
        })
    }

    fn sync(&mut self) -> io::Result<()> {
        self.with(|state, number| {
            state.step()?;
            let content = file(state, number)?;
            content.durable = content.now();
            let end = content.loose.iter().map(|(offset, bytes)| offset + bytes.len() as u64).max();
            content.end = content.end.max(end.unwrap_or(0));
            content.loose.clear();
            Ok(())
        })
    }

    fn truncate(&mut self, bytes: u64) -> io::Result<()> {
        self.with(|state, number| {
            state.step()?;
            let content = file(state, number)?;
            content.durable = content.now();
            content.loose.clear();
            content.durable.truncate(bytes as usize);
            Ok(())
        })
    }

    fn len(&self) -> io::Result<u64> {
        self.with(|state, number| Ok(file(state, number)?.now().len() as u64))
    }
}
