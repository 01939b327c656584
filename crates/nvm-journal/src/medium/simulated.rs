//! A medium that crashes: of what no fence covers, any subset of words may be durable.
//!
//! Harsher than hardware, on purpose. Each aligned word that was stored since it last became durable may, after a crash,
//! hold its durable value or any value that was stored since, whatever became of its neighbours, of the same line or
//! not. Writing back without a fence promises nothing; a fence makes durable what a word held when its writing back was
//! last begun, and nothing that was stored without writing back.

use super::{Durability, Medium, word_of};
use std::collections::BTreeMap;
use std::io;

/// Who is shown the medium after every store, writing back and fence.
pub type StepObserver = Box<dyn FnMut(&CrashImages<'_>) + Send>;

/// Values that a word may have beside its durable one.
#[derive(Clone, Debug, Default)]
struct Unsettled {
    values: Vec<u64>,
    /// How many of them were there when its writing back was last begun.
    written_back: usize,
}

/// What the medium may hold if it crashed now.
#[derive(Debug)]
pub struct CrashImages<'a> {
    durable: &'a [u8],
    unsettled: &'a BTreeMap<u64, Unsettled>,
    /// What the processor sees.
    pub current: &'a [u8],
}

impl CrashImages<'_> {
    /// One of the possible images: for each word with a choice of `count` values, oldest first, `choose(count)` says which.
    pub fn image(&self, choose: &mut dyn FnMut(usize) -> usize) -> Vec<u8> {
        let mut image = self.durable.to_vec();
        for (offset, word) in self.unsettled {
            let choice = choose(word.values.len() + 1) % (word.values.len() + 1);
            if choice > 0 {
                let at = *offset as usize;
                image[at..at + 8].copy_from_slice(&word.values[choice - 1].to_le_bytes());
            }
        }
        image
    }

    /// The medium as the next process has it when this one is killed now: it sees every store, and nothing is known to be on its way
    /// to where it outlives a loss of power.
    pub fn after_a_kill(&self) -> SimulatedMedium {
        let unsettled = self.unsettled.iter();
        let unsettled =
            unsettled.map(|(offset, word)| (*offset, Unsettled { written_back: 0, ..word.clone() })).collect();
        SimulatedMedium {
            unsettled,
            durable: self.durable.to_vec(),
            ..SimulatedMedium::from_image(self.current.to_vec())
        }
    }

    /// Words that have a choice.
    pub fn unsettled_words(&self) -> usize {
        self.unsettled.len()
    }
}

/// See the module.
pub struct SimulatedMedium {
    current: Vec<u8>,
    durable: Vec<u8>,
    unsettled: BTreeMap<u64, Unsettled>,
    observer: Option<StepObserver>,
    fails_fences: bool,
    has_failed: bool,
}

impl std::fmt::Debug for SimulatedMedium {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SimulatedMedium").field("len", &self.current.len()).finish_non_exhaustive()
    }
}

impl SimulatedMedium {
    /// A medium of zeros.
    pub fn new(len: usize) -> Self {
        Self::from_image(vec![0; len])
    }

    /// A medium as a crash left it.
    pub fn from_image(image: Vec<u8>) -> Self {
        SimulatedMedium {
            durable: image.clone(),
            current: image,
            unsettled: BTreeMap::new(),
            observer: None,
            fails_fences: false,
            has_failed: false,
        }
    }

    /// Shows every step from here on to `observer`.
    pub fn observe(&mut self, observer: Option<StepObserver>) {
        self.observer = observer;
    }

    /// Whether the next fence and all after it fail.
    pub fn fail_fences(&mut self, fail: bool) {
        self.fails_fences = fail;
    }

    /// What it may hold if it crashed now.
    pub fn crash_images(&self) -> CrashImages<'_> {
        CrashImages { durable: &self.durable, unsettled: &self.unsettled, current: &self.current }
    }

    fn step(&mut self) {
        if let Some(mut observer) = self.observer.take() {
            observer(&self.crash_images());
            self.observer = Some(observer);
        }
    }

    fn put(&mut self, offset: u64, value: u64) {
        let at = offset as usize;
        self.current[at..at + 8].copy_from_slice(&value.to_le_bytes());
        self.unsettled.entry(offset).or_default().values.push(value);
    }

    fn begin(&mut self, first: u64, end: u64) {
        for (_, word) in self.unsettled.range_mut(first..end) {
            word.written_back = word.values.len();
        }
    }
}

impl Medium for SimulatedMedium {
    fn bytes(&self) -> &[u8] {
        &self.current
    }

    fn store_word(&mut self, offset: u64, value: u64) {
        assert!(offset.is_multiple_of(8));
        self.put(offset, value);
        self.step();
    }

    fn write_back(&mut self, offset: u64, len: u64) {
        self.begin(offset / 64 * 64, (offset + len).next_multiple_of(64));
        self.step();
    }

    fn stream(&mut self, offset: u64, bytes: &[u8]) {
        assert!(offset.is_multiple_of(64) && bytes.len().is_multiple_of(64));
        for (index, line) in bytes.chunks(64).enumerate() {
            let first = offset + index as u64 * 64;
            for word in 0..8 {
                self.put(first + word * 8, word_of(line, word * 8));
            }
            self.begin(first, first + 64);
        }
        self.step();
    }

    fn fence(&mut self) -> io::Result<()> {
        self.has_failed |= self.fails_fences;
        if self.has_failed {
            return Err(io::Error::other("the simulated medium fails"));
        }
        let durable = &mut self.durable;
        self.unsettled.retain(|offset, word| {
            if word.written_back > 0 {
                let at = *offset as usize;
                durable[at..at + 8].copy_from_slice(&word.values[word.written_back - 1].to_le_bytes());
                word.values.drain(..word.written_back);
                word.written_back = 0;
            }
            !word.values.is_empty()
        });
        self.step();
        Ok(())
    }

    fn durability(&self) -> Durability {
        Durability::Emulated
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn possible(medium: &SimulatedMedium, offset: u64) -> Vec<u64> {
        let images = medium.crash_images();
        let mut values: Vec<u64> =
            (0..8).map(|choice| word_of(&images.image(&mut |count| choice.min(count - 1)), offset)).collect();
        values.dedup();
        values
    }

    #[test]
    fn a_word_is_durable_after_store_write_back_and_fence_and_not_before() {
        let mut medium = SimulatedMedium::new(256);
        medium.store_word(8, 1);
        assert_eq!(possible(&medium, 8), [0, 1]);
        medium.fence().expect("a fence");
        assert_eq!(possible(&medium, 8), [0, 1], "not written back");
        medium.write_back(8, 8);
        medium.store_word(8, 2);
        assert_eq!(possible(&medium, 8), [0, 1, 2]);
        medium.fence().expect("a fence");
        assert_eq!(possible(&medium, 8), [1, 2], "stored again after its writing back was begun");
        medium.write_back(0, 64);
        medium.fence().expect("a fence");
        assert_eq!(possible(&medium, 8), [2]);
        medium.stream(64, &[9; 64]);
        assert_eq!(possible(&medium, 64).len(), 2);
        medium.fence().expect("a fence");
        assert_eq!(possible(&medium, 64), [0x0909_0909_0909_0909]);
        assert_eq!(medium.word(120), 0x0909_0909_0909_0909);
    }

    #[test]
    fn a_failed_fence_is_for_good() {
        let mut medium = SimulatedMedium::new(64);
        medium.fail_fences(true);
        medium.store_word(0, 1);
        medium.write_back(0, 8);
        assert!(medium.fence().is_err());
        medium.fail_fences(false);
        assert!(medium.fence().is_err());
        assert_eq!(possible(&medium, 0), [0, 1]);
    }
}
