//! What a supervisor keeps, put where it outlives the supervisor itself: a store of descriptors that somebody else has (a service
//! manager). Words go there as descriptors do, in envelopes: a socket with one message in it, which nobody takes out.
//!
//! What it must never do: have a part, or what is old, be taken for all. A store may refuse without a word, and miss what it was told to
//! let go of: nothing that it does is relied on. Beside the items of a shelf lies its *seal*, a few words in a file that needs nobody
//! to be written: which items there are, by their numbers. An item is put in anew before the old one is taken out, of two with one name
//! the later one counts, and while one comes or goes the seal has both. Failure story: what is found is what there was, at the last moment
//! or just before; or the seal does not fit, and whoever opens the shelf is told so.

use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of an item with its name, at most: what a socket takes for one message without being asked.
pub(crate) const BYTES_MAX: usize = 100 << 10;
/// Descriptors of one item: Linux's own bound (`SCM_MAX_FD`).
const DESCRIPTORS_MAX: usize = 253;
/// How the names begin that are given to the store.
pub(crate) const NAME: &str = "amberlog-";
/// The item that says in which way all of it is kept.
const FORMAT: &str = "format";
/// The item that seals a shelf.
pub(crate) const SEAL: &str = "seal";

/// States of a seal.
const CLOSED: u64 = 0;
const BEGUN: u64 = 1;
const GONE: u64 = 2;

/// Who keeps descriptors over the end of this process.
pub trait Store: Send + Sync {
    /// Takes a descriptor under a name that no other one has.
    ///
    /// # Errors
    /// When it does not.
    fn put(&self, name: &str, descriptor: BorrowedFd<'_>) -> io::Result<()>;

    /// Lets go of it.
    fn remove(&self, name: &str);
}

struct Vault {
    store: Box<dyn Store>,
    next: AtomicU64,
}

impl Vault {
    fn number(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    fn put(&self, number: u64, item: &str, words: &[u8], descriptors: &[BorrowedFd<'_>]) {
        let put = envelope(item, words, descriptors)
            .and_then(|envelope| self.store.put(&format!("{NAME}{number}"), envelope.as_fd()));
        if let Err(error) = put {
            log::warn!("{item} cannot be kept over the death of this process: {error}");
        }
    }

    fn remove(&self, number: u64) {
        self.store.remove(&format!("{NAME}{number}"));
    }
}

/// An item as it was left.
#[derive(Debug)]
pub struct Found {
    /// What was said of it.
    pub words: Vec<u8>,
    /// What belongs to it.
    pub descriptors: Vec<OwnedFd>,
}

/// Items whose names begin alike: of one that has items no part is split off. Without a store nothing is kept.
#[derive(Default)]
pub struct Shelf {
    vault: Option<Arc<Vault>>,
    beginning: String,
    /// What number each item has in the store, or would have if the store had taken it.
    numbers: BTreeMap<String, u64>,
    found: BTreeMap<String, Found>,
    /// Of all items.
    sum: Sum,
    seal: Option<Seal>,
}

/// What was found in a store.
pub enum Opened {
    /// This program's, or nothing.
    Ours(Shelf),
    /// Of a program that keeps it in another way. Nothing of it was touched.
    Foreign {
        /// That way.
        format: String,
        /// The parts that it has.
        parts: BTreeSet<String>,
    },
}

impl Shelf {
    /// All that there is: what an earlier process has left in the store, with the names it has there. What is not understood is
    /// thrown away. The first word of `format` is the way in which it is kept; what is kept in one of the ways `before` is taken up,
    /// and kept in this one from then on.
    pub fn open(store: Box<dyn Store>, left: Vec<(String, OwnedFd)>, format: &str, before: &[&str]) -> Opened {
        let mut items = Vec::new();
        let (mut strange, mut unread) = (Vec::new(), Vec::new());
        for (name, envelope) in left {
            match read(&envelope) {
                Ok((item, found)) => items.push((name, item, found)),
                Err(error) => {
                    log::warn!("what an earlier process left under {name} is not understood: {error}");
                    // What could not be taken in now (no descriptor is left, say) stays.
                    if is_passing(&error) { &mut unread } else { &mut strange }.push(name);
                }
            }
        }
        Self::open_items(store, items, (strange, unread), format, before)
    }

    /// Whether items of a VM are among what an earlier process has left in a store.
    pub fn has_parts(left: &[(String, OwnedFd)]) -> bool {
        left.iter().any(|(_, envelope)| match read(envelope) {
            Ok((item, _)) => item.contains('/'),
            Err(error) => is_passing(&error),
        })
    }

    /// The same of items that were taken out of their envelopes: each its name in the store, its own, and what was found. Beside these, what is strange
    /// goes, and what could not be read now stays.
    pub(crate) fn open_items(
        store: Box<dyn Store>,
        left: Vec<(String, String, Found)>,
        (strange, unread): (Vec<String>, Vec<String>),
        format: &str,
        before: &[&str],
    ) -> Opened {
        let mut newest: BTreeMap<String, (u64, Found)> = BTreeMap::new();
        let mut next = 0;
        let mut number = |name: &str| {
            let number = name.strip_prefix(NAME).and_then(|number| number.parse::<u64>().ok())?;
            next = next.max(number + 1);
            Some(number)
        };
        let mut outdated: Vec<u64> = strange.iter().filter_map(|name| number(name)).collect();
        // No number is used twice.
        for name in &unread {
            number(name);
        }
        for (name, item, found) in left {
            let Some(number) = number(&name) else { continue };
            match newest.get(&item) {
                Some((other, _)) if *other > number => outdated.push(number),
                _ => outdated.extend(newest.insert(item, (number, found)).map(|(other, _)| other)),
            }
        }
        let mut shelf =
            Shelf { vault: Some(Arc::new(Vault { store, next: AtomicU64::new(next) })), ..Shelf::default() };
        for (item, (number, found)) in newest {
            shelf.numbers.insert(item.clone(), number);
            shelf.found.insert(item, found);
        }
        let was = shelf.found.remove(FORMAT).map(|found| String::from_utf8_lossy(&found.words).into_owned());
        let first = |words: &str| words.split(' ').next().unwrap_or_default().to_owned();
        match was {
            Some(was) if first(&was) == first(format) => {}
            // Before anything else is said there: an earlier program must not take that for its own.
            Some(was) if before.contains(&first(&was).as_str()) => shelf.put(FORMAT, format.as_bytes(), &[]),
            None if shelf.found.is_empty() => shelf.put(FORMAT, format.as_bytes(), &[]),
            was => return Opened::Foreign { format: was.unwrap_or_default(), parts: shelf.parts() },
        }
        if let Some(vault) = &shelf.vault {
            outdated.into_iter().for_each(|number| vault.remove(number));
        }
        Opened::Ours(shelf)
    }

    /// Whether anybody keeps it.
    pub fn is_kept(&self) -> bool {
        self.vault.is_some()
    }

    /// The part of it whose names begin with `beginning` and a slash, with what was found there.
    pub fn split(&mut self, beginning: &str) -> Shelf {
        let beginning = format!("{beginning}/");
        let inside = |item: &String| item.strip_prefix(beginning.as_str()).map(str::to_owned);
        let items: Vec<String> = self.numbers.keys().filter(|item| item.starts_with(&beginning)).cloned().collect();
        let mut part = Shelf {
            vault: self.vault.clone(),
            beginning: format!("{}{beginning}", self.beginning),
            ..Shelf::default()
        };
        for item in items {
            let Some(short) = inside(&item) else { continue };
            part.numbers.extend(self.numbers.remove(&item).map(|number| (short.clone(), number)));
            part.found.extend(self.found.remove(&item).map(|found| (short, found)));
        }
        part.take_seal();
        part
    }

    fn take_seal(&mut self) {
        let (Some(number), Some(found)) = (self.numbers.remove(SEAL), self.found.remove(SEAL)) else { return };
        self.sum = Sum::of(&self.numbers);
        self.seal = found.descriptors.into_iter().next().map(|file| Seal { number, file: file.into() });
        if self.seal.as_ref().and_then(Seal::words).is_some_and(|words| words[0] == GONE) {
            // Whoever let go of it did not get to the end.
            self.clear();
        }
    }

    /// Whether it is all that an earlier process had put here, and nothing else, as far as that is known: until something is put
    /// or removed.
    pub fn is_whole(&self) -> bool {
        match &self.seal {
            None => self.numbers.is_empty(),
            Some(seal) => seal.words().is_some_and(|words| {
                let sum = Sum::of(&self.numbers);
                [Sum { count: words[1], marks: words[2] }, Sum { count: words[3], marks: words[4] }].contains(&sum)
            }),
        }
    }

    /// Whether an earlier process ended between [`Shelf::begin`] and [`Shelf::end`].
    pub fn is_begun(&self) -> bool {
        self.seal.as_ref().and_then(Seal::words).is_some_and(|words| words[0] == BEGUN)
    }

    /// What is here belongs together with something that is done now: whoever finds it before the end is told so.
    pub fn begin(&mut self) {
        self.make_seal();
        self.write_seal(BEGUN, self.sum);
    }

    /// That was done.
    pub fn end(&mut self) {
        self.make_seal();
        self.write_seal(CLOSED, self.sum);
    }

    fn make_seal(&mut self) {
        let Some(vault) = self.vault.as_ref().filter(|_| self.seal.is_none() && !self.beginning.is_empty()) else {
            return;
        };
        let file = match memfd_create("seal", MemfdFlags::CLOEXEC) {
            Ok(file) => File::from(file),
            Err(error) => {
                log::warn!("{} cannot be kept over the death of this process: {error}", self.beginning);
                return;
            }
        };
        let seal = Seal { number: vault.number(), file };
        // Before anybody has it: whoever finds it finds it written.
        seal.write(CLOSED, [Sum::default(), self.sum]);
        vault.put(seal.number, &format!("{}{SEAL}", self.beginning), &[], &[seal.file.as_fd()]);
        self.seal = Some(seal);
    }

    fn write_seal(&self, state: u64, before: Sum) {
        if let Some(seal) = &self.seal {
            seal.write(state, [before, self.sum]);
        }
    }

    /// The first words, up to a slash, of the names of what was found.
    pub fn parts(&self) -> BTreeSet<String> {
        self.found.keys().filter_map(|item| Some(item.split_once('/')?.0.to_owned())).collect()
    }

    /// The words of an item that was found.
    pub fn words(&self, item: &str) -> Option<&[u8]> {
        self.found.get(item).map(|found| found.words.as_slice())
    }

    /// Takes what was found, in the order of its names; it stays in the store.
    pub fn take_found(&mut self) -> BTreeMap<String, Found> {
        std::mem::take(&mut self.found)
    }

    /// Keeps an item, in the place of what has its name.
    pub fn put(&mut self, item: &str, words: &[u8], descriptors: &[BorrowedFd<'_>]) {
        let Some(vault) = self.vault.clone() else { return };
        if item == SEAL {
            log::error!("{}{item} cannot be kept under this name", self.beginning);
            return;
        }
        self.make_seal();
        let state = self.state();
        let number = vault.number();
        let old = self.numbers.insert(item.to_owned(), number);
        let before = self.sum;
        self.sum = old.map_or(before, |old| before.without(item, old)).with(item, number);
        self.write_seal(state, before);
        vault.put(number, &format!("{}{item}", self.beginning), words, descriptors);
        if let Some(old) = old {
            vault.remove(old);
        }
        self.write_seal(state, self.sum);
    }

    /// Lets go of an item.
    pub fn remove(&mut self, item: &str) {
        if let (Some(number), Some(vault)) = (self.numbers.remove(item), self.vault.clone()) {
            let (state, before) = (self.state(), self.sum);
            self.sum = before.without(item, number);
            self.write_seal(state, before);
            vault.remove(number);
            self.write_seal(state, self.sum);
        }
        self.found.remove(item);
    }

    fn state(&self) -> u64 {
        if self.is_begun() { BEGUN } else { CLOSED }
    }

    /// Lets go of all.
    pub fn clear(&mut self) {
        self.sum = Sum::default();
        // In one step, whatever of it is let go of in fact.
        self.write_seal(GONE, self.sum);
        if let Some(vault) = &self.vault {
            self.numbers.values().for_each(|number| vault.remove(*number));
            if let Some(seal) = self.seal.take() {
                vault.remove(seal.number);
            }
        }
        self.numbers.clear();
        self.found.clear();
    }
}

/// What a set of items is known by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Sum {
    count: u64,
    marks: u64,
}

impl Sum {
    fn of(numbers: &BTreeMap<String, u64>) -> Self {
        numbers.iter().fold(Sum::default(), |sum, (item, number)| sum.with(item, *number))
    }

    fn with(self, item: &str, number: u64) -> Self {
        Sum { count: self.count + 1, marks: self.marks.wrapping_add(mark(item, number)) }
    }

    fn without(self, item: &str, number: u64) -> Self {
        Sum { count: self.count.saturating_sub(1), marks: self.marks.wrapping_sub(mark(item, number)) }
    }
}

/// An item's number and name in one word, the same for every build: FNV-1a, stirred as SplitMix64 does it.
fn mark(item: &str, number: u64) -> u64 {
    let bytes = number.to_le_bytes().into_iter().chain(item.bytes());
    let word =
        bytes.fold(0xcbf2_9ce4_8422_2325_u64, |word, byte| (word ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3));
    let word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

/// What is on a shelf, where it can be written down in one step and without the store: its state; the sum of its items before what is
/// being done and after, each as count and marks.
struct Seal {
    number: u64,
    file: File,
}

impl Seal {
    fn words(&self) -> Option<[u64; 5]> {
        let mut bytes = [0; 40];
        self.file.read_exact_at(&mut bytes, 0).ok()?;
        let mut words = [0; 5];
        for (word, bytes) in words.iter_mut().zip(bytes.as_chunks::<8>().0) {
            *word = u64::from_le_bytes(*bytes);
        }
        Some(words)
    }

    fn write(&self, state: u64, [before, after]: [Sum; 2]) {
        let words = [state, before.count, before.marks, after.count, after.marks].map(u64::to_le_bytes).concat();
        if let Err(error) = self.file.write_all_at(&words, 0) {
            log::warn!("what is kept over the death of this process cannot be sealed: {error}");
        }
    }
}

pub(crate) fn envelope(item: &str, words: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<OwnedFd> {
    if item.len() + words.len() + 4 > BYTES_MAX || descriptors.len() > DESCRIPTORS_MAX {
        return Err(io::Error::other(format!("{} bytes are too much for one item", words.len())));
    }
    // Of datagrams: the end of one does not make the other one end.
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (kept, mouth) = rustix::net::socketpair(AddressFamily::UNIX, SocketType::DGRAM, flags, None)?;
    let length = (item.len() as u32).to_le_bytes();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(io::Error::other("there is no room for the descriptors"));
    }
    let parts = [IoSlice::new(&length), IoSlice::new(item.as_bytes()), IoSlice::new(words)];
    loop {
        match rustix::net::sendmsg(&mouth, &parts, &mut control, SendFlags::NOSIGNAL) {
            Err(Errno::INTR) => {}
            other => return other.map(|_| kept).map_err(Into::into),
        }
    }
}

/// Whether what could not be read is ours all the same: no descriptor or memory is left.
fn is_passing(error: &io::Error) -> bool {
    let of_kernel = [Errno::MFILE, Errno::NFILE, Errno::NOMEM].map(|errno| Some(errno.raw_os_error()));
    error.kind() == io::ErrorKind::ResourceBusy || of_kernel.contains(&error.raw_os_error())
}

/// What is in an envelope, which stays there.
pub(crate) fn read(envelope: &OwnedFd) -> io::Result<(String, Found)> {
    let mut bytes = vec![0; BYTES_MAX];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::PEEK | RecvFlags::DONTWAIT;
    let received = loop {
        match rustix::net::recvmsg(envelope, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags) {
            Err(Errno::INTR) => {}
            other => break other?,
        }
    };
    let descriptors: Vec<OwnedFd> = control
        .drain()
        .filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
            _ => None,
        })
        .flatten()
        .collect();
    if received.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
        return Err(io::Error::new(io::ErrorKind::ResourceBusy, "it is not whole (too many open files?)"));
    }
    bytes.truncate(received.bytes);
    let (length, rest) = bytes.split_first_chunk::<4>().ok_or_else(|| io::Error::other("it is too short"))?;
    let (item, words) = rest
        .split_at_checked(u32::from_le_bytes(*length) as usize)
        .ok_or_else(|| io::Error::other("its name is too long"))?;
    let item = String::from_utf8(item.to_vec()).map_err(io::Error::other)?;
    Ok((item, Found { words: words.to_vec(), descriptors }))
}

#[cfg(test)]
mod tests;
