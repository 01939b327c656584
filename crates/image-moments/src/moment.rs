//! A copy of an image as it was at one moment, made while it is written on.

use crate::overlay::Overlay;
use crate::{BLOCK_BYTES, BlockSet, Source, blocks};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard};

/// Where a copy goes.
#[derive(Debug)]
pub enum Target {
    /// A file of zeros, as long as the image.
    Whole(File),
    /// A file that has what changed.
    Overlay(Overlay),
}

impl Target {
    fn put(&mut self, block: u64, content: &[u8]) -> io::Result<()> {
        let is_zero = content.iter().all(|byte| *byte == 0);
        match self {
            // It is a hole there, too.
            Target::Whole(_) if is_zero => Ok(()),
            Target::Whole(file) => file.write_all_at(content, block * BLOCK_BYTES),
            Target::Overlay(overlay) => overlay.put(block, (!is_zero).then_some(content)),
        }
    }
}

#[derive(Debug)]
struct State {
    target: Target,
    /// What the copy has, or need not have.
    done: BlockSet,
    /// Why there will be no copy.
    failure: Option<io::Error>,
    is_over: bool,
    content: Vec<u8>,
}

/// See the module.
#[derive(Debug)]
pub struct Moment {
    source: Source,
    size_bytes: u64,
    wanted: Option<BlockSet>,
    state: Mutex<State>,
    /// Writers that wait for the copy to let them pass.
    waiting: AtomicU32,
    is_stopped: AtomicBool,
}

impl Moment {
    /// Of an image of `size_bytes`, read from `source`. Of an image with a set, what is in the set.
    pub fn new(source: impl Into<Source>, size_bytes: u64, wanted: Option<BlockSet>, target: Target) -> Self {
        let done = BlockSet::new(size_bytes.div_ceil(BLOCK_BYTES));
        let state = State { target, done, failure: None, is_over: false, content: vec![0; BLOCK_BYTES as usize] };
        Moment {
            source: source.into(),
            size_bytes,
            wanted,
            state: Mutex::new(state),
            waiting: AtomicU32::new(0),
            is_stopped: AtomicBool::new(false),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic under this lock")
    }

    fn is_wanted(&self, block: u64) -> bool {
        block * BLOCK_BYTES < self.size_bytes && self.wanted.as_ref().is_none_or(|wanted| wanted.contains(block))
    }

    /// Puts a block into the copy, if it is not there.
    fn put(&self, state: &mut State, block: u64) -> io::Result<()> {
        if state.done.contains(block) {
            return Ok(());
        }
        let at = block * BLOCK_BYTES;
        let len = BLOCK_BYTES.min(self.size_bytes - at) as usize;
        self.source.read_exact_at(&mut state.content[..len], at)?;
        let State { target, content, .. } = state;
        target.put(block, &content[..len])?;
        state.done.insert(block);
        Ok(())
    }

    /// Has the copy fail soon: it is not wanted any more.
    pub fn stop(&self) {
        self.is_stopped.store(true, Ordering::Relaxed);
    }

    /// A range is about to be written over.
    pub(crate) fn keep(&self, offset: u64, len: u64) {
        let mut range = blocks(offset, len).filter(|block| self.is_wanted(*block)).peekable();
        if range.peek().is_none() {
            return;
        }
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let mut state = self.lock();
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        for block in range {
            if state.is_over || state.failure.is_some() {
                return;
            }
            if let Err(error) = self.put(&mut state, block) {
                // The guest goes on.
                state.failure = Some(error);
            }
        }
    }

    /// Copies all of it, while writers are let pass between two blocks.
    ///
    /// # Errors
    /// When something of it cannot be read or written, here or by a writer: it is of no use then.
    pub fn copy(&self) -> io::Result<()> {
        let count = self.size_bytes.div_ceil(BLOCK_BYTES);
        let mut block = 0;
        while block < count {
            if self.wanted.is_none() {
                // A hole in the image is one in the copy; who fills it has kept that.
                match rustix::fs::seek(self.source.file(), rustix::fs::SeekFrom::Data(block * BLOCK_BYTES)) {
                    Ok(data) => block = block.max(data / BLOCK_BYTES),
                    Err(rustix::io::Errno::NXIO) => break,
                    Err(_) => {}
                }
            }
            if block < count && self.is_wanted(block) {
                while self.waiting.load(Ordering::Relaxed) > 0 {
                    std::thread::yield_now();
                }
                let mut state = self.lock();
                if state.failure.is_some() {
                    break;
                }
                if self.is_stopped.load(Ordering::Relaxed) {
                    state.failure = Some(io::Error::other("its VM has ended before the copy was whole"));
                    break;
                }
                self.put(&mut state, block)?;
            }
            block += 1;
        }
        let mut state = self.lock();
        state.is_over = true;
        state.failure.take().map_or(Ok(()), Err)
    }

    /// What was made.
    pub fn into_target(self) -> Target {
        self.state.into_inner().expect("no panic under this lock").target
    }
}
