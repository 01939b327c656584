//! A medium for tests: it loses power after any operation, and with it any part of what was not made durable.

use super::medium::{Medium, SegmentFile};
use std::collections::{BTreeMap, BTreeSet};
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
    /// Whether it has its name.
    is_named: bool,
    /// Sectors that give an error.
    bad: BTreeSet<u64>,
}

/// An end mark: what is durable, and what was written since.
#[derive(Clone, Debug, Default)]
struct Mark {
    durable: Option<Vec<u8>>,
    loose: Vec<Vec<u8>>,
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
    reserves: Vec<u64>,
    reserve_bytes: u64,
    marks: [Mark; 2],
}

impl State {
    /// Whether there is room for so many bytes more.
    fn has_room_for(&self, bytes: u64) -> bool {
        let used: u64 =
            self.files.values().map(|file| file.durable.len() as u64).chain(self.reserves.iter().copied()).sum();
        self.capacity_bytes.is_none_or(|capacity| used + bytes <= capacity)
    }

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
        let (files, marks, reserves) =
            self.with(|state| (state.files.clone(), state.marks.clone(), state.reserves.clone()));
        let files = files
            .into_iter()
            .filter(|(_, content)| content.is_named)
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
                (number, Content { durable: bytes, end: content.end, is_named: true, ..Content::default() })
            })
            .collect();
        // Any of the later ones may have arrived.
        let marks = marks.map(|mark| {
            let arrived = mark.loose.into_iter().filter(|_| survives()).last();
            Mark { durable: arrived.or(mark.durable), loose: Vec::new() }
        });
        Simulated(Arc::new(Mutex::new(State { files, marks, reserves, ..State::default() })))
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

    /// Has the sector with this byte give an error.
    pub fn break_sector(&self, segment: u64, offset: u64) {
        self.with(|state| {
            if let Some(file) = state.files.get_mut(&segment) {
                file.bad.insert(offset / SECTOR_BYTES as u64);
            }
        });
    }

    /// Removes a segment, or cuts it, as somebody might who is not the store.
    pub fn cut(&self, segment: u64, end: Option<u64>) {
        self.with(|state| match end {
            None => drop(state.files.remove(&segment)),
            Some(end) => {
                if let Some(file) = state.files.get_mut(&segment) {
                    file.durable.truncate(end as usize);
                }
            }
        });
    }

    /// Removes an end mark.
    pub fn remove_end_mark(&self, index: usize) {
        self.with(|state| state.marks[index] = Mark::default());
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
        Ok(self.with(|state| state.files.iter().filter(|(_, file)| file.is_named).map(|(number, _)| *number).collect()))
    }

    fn create(&mut self, number: u64, bytes: u64) -> io::Result<SimulatedFile> {
        self.with(|state| {
            state.step()?;
            state.files.retain(|other, file| file.is_named || *other != number);
            if !state.has_room_for(bytes) {
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

    fn publish(&mut self, number: u64) -> io::Result<()> {
        self.with(|state| {
            let died = state.step();
            // The moment in which power is lost may come before or after.
            if died.is_ok() || (state.dies_at == Some(state.operations - 1) && state.operations % 2 == 0) {
                file(state, number)?.is_named = true;
            }
            died
        })
    }

    fn delete(&mut self, number: u64) -> io::Result<()> {
        self.with(|state| {
            state.step()?;
            let removed = state.files.remove(&number);
            let bytes = state.reserve_bytes;
            let is_long_enough = removed.is_some_and(|file| file.durable.len() as u64 >= bytes);
            if bytes > 0 && is_long_enough && state.reserves.len() < 2 {
                state.reserves.push(bytes);
            }
            Ok(())
        })
    }

    fn reserve(&mut self, bytes: u64) -> io::Result<()> {
        self.with(|state| {
            state.step()?;
            state.reserve_bytes = bytes;
            state.reserves.resize(2, 0);
            for index in 0..2 {
                let more = bytes.saturating_sub(state.reserves[index]);
                if !state.has_room_for(more) {
                    state.reserves.retain(|reserve| *reserve > 0);
                    return Err(io::Error::from(io::ErrorKind::StorageFull));
                }
                state.reserves[index] += more;
            }
            Ok(())
        })
    }

    fn reserved_bytes(&self) -> u64 {
        self.with(|state| state.reserves.iter().sum())
    }

    fn create_from_reserve(&mut self, number: u64, least: u64) -> io::Result<(SimulatedFile, u64)> {
        let bytes = self.with(|state| {
            state.step()?;
            let found = state.reserves.iter().position(|reserve| *reserve >= least);
            let bytes = state.reserves.remove(found.ok_or(io::ErrorKind::StorageFull)?);
            state.files.insert(number, Content { durable: vec![0; bytes as usize], ..Content::default() });
            Ok::<u64, io::Error>(bytes)
        })?;
        Ok((SimulatedFile(Arc::clone(&self.0), number), bytes))
    }

    fn read_end_marks(&self) -> io::Result<[Option<Vec<u8>>; 2]> {
        Ok(self.with(|state| state.marks.clone().map(|mark| mark.loose.last().cloned().or(mark.durable))))
    }

    fn write_end_mark(&mut self, mark: &[u8]) -> io::Result<()> {
        self.with(|state| {
            state.step()?;
            state.marks.iter_mut().for_each(|at| at.loose.push(mark.to_vec()));
            Ok(())
        })
    }

    fn sync_end_mark(&mut self) -> io::Result<()> {
        self.with(|state| {
            state.step()?;
            for mark in &mut state.marks {
                mark.durable = mark.loose.pop().or(mark.durable.take());
                mark.loose.clear();
            }
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
            let file = file(state, number)?;
            let mut sectors =
                offset / SECTOR_BYTES as u64..(offset + buffer.len() as u64).div_ceil(SECTOR_BYTES as u64);
            if sectors.any(|sector| file.bad.contains(&sector)) {
                return Err(rustix::io::Errno::IO.into());
            }
            let now = file.now();
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
