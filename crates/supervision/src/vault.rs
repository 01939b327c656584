//! What a supervisor keeps, put where it outlives the supervisor itself: a store of descriptors that somebody else has (a service
//! manager). Words go there as descriptors do, in envelopes: a socket with one message in it, which nobody takes out.
//!
//! What it must never do: have two moments in the store that cannot be told apart. An item is put in anew before the old one is taken
//! out; of two with one name the later one counts. Failure story: what cannot be put in is taken out, so that what is found is missing
//! rather than old.

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
};
use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of an item with its name, at most: what a socket takes for one message without being asked.
const BYTES_MAX: usize = 100 << 10;
/// Descriptors of one item: Linux's own bound (`SCM_MAX_FD`).
const DESCRIPTORS_MAX: usize = 253;
/// How the names begin that are given to the store.
const NAME: &str = "amberlog-";

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

/// An item as it was left.
#[derive(Debug)]
pub struct Found {
    /// What was said of it.
    pub words: Vec<u8>,
    /// What belongs to it.
    pub descriptors: Vec<OwnedFd>,
}

/// Items whose names begin alike. Without a store nothing is kept.
#[derive(Default)]
pub struct Shelf {
    vault: Option<Arc<Vault>>,
    beginning: String,
    /// What each item is called in the store.
    names: BTreeMap<String, String>,
    found: BTreeMap<String, Found>,
}

impl Shelf {
    /// All that there is: what an earlier process has left in the store, with the names it has there. What is not understood is
    /// thrown away.
    pub fn open(store: Box<dyn Store>, left: Vec<(String, OwnedFd)>) -> Self {
        let mut newest: BTreeMap<String, (u64, Found)> = BTreeMap::new();
        let mut next = 0;
        for (name, envelope) in left {
            let Some(number) = name.strip_prefix(NAME).and_then(|number| number.parse::<u64>().ok()) else { continue };
            next = next.max(number + 1);
            let outdated = match read(&envelope) {
                Err(error) => {
                    log::warn!("what an earlier process left under {name} is not understood: {error}");
                    Some(number)
                }
                Ok((item, found)) => match newest.get(&item) {
                    Some((other, _)) if *other > number => Some(number),
                    _ => newest.insert(item, (number, found)).map(|(other, _)| other),
                },
            };
            if let Some(number) = outdated {
                store.remove(&format!("{NAME}{number}"));
            }
        }
        let mut shelf = Shelf {
            vault: Some(Arc::new(Vault { store, next: AtomicU64::new(next) })),
            beginning: String::new(),
            names: BTreeMap::new(),
            found: BTreeMap::new(),
        };
        for (item, (number, found)) in newest {
            shelf.names.insert(item.clone(), format!("{NAME}{number}"));
            shelf.found.insert(item, found);
        }
        shelf
    }

    /// Whether anybody keeps it.
    pub fn is_kept(&self) -> bool {
        self.vault.is_some()
    }

    /// The part of it whose names begin with `beginning` and a slash, with what was found there.
    pub fn split(&mut self, beginning: &str) -> Shelf {
        let beginning = format!("{beginning}/");
        let inside = |item: &String| item.strip_prefix(beginning.as_str()).map(str::to_owned);
        let items: Vec<String> = self.names.keys().filter(|item| item.starts_with(&beginning)).cloned().collect();
        let mut part = Shelf {
            vault: self.vault.clone(),
            beginning: format!("{}{beginning}", self.beginning),
            ..Shelf::default()
        };
        for item in items {
            let Some(short) = inside(&item) else { continue };
            part.names.extend(self.names.remove(&item).map(|name| (short.clone(), name)));
            part.found.extend(self.found.remove(&item).map(|found| (short, found)));
        }
        part
    }

    /// The first words, up to a slash, of the names of what was found.
    pub fn parts(&self) -> BTreeSet<String> {
        self.found.keys().filter_map(|item| Some(item.split_once('/')?.0.to_owned())).collect()
    }

    /// Takes what was found, in the order of its names; it stays in the store.
    pub fn take_found(&mut self) -> BTreeMap<String, Found> {
        std::mem::take(&mut self.found)
    }

    /// Keeps an item, in the place of what has its name.
    pub fn put(&mut self, item: &str, words: &[u8], descriptors: &[BorrowedFd<'_>]) {
        let Some(vault) = &self.vault else { return };
        let name = format!("{NAME}{}", vault.next.fetch_add(1, Ordering::Relaxed));
        let whole = format!("{}{item}", self.beginning);
        let put = envelope(&whole, words, descriptors).and_then(|envelope| vault.store.put(&name, envelope.as_fd()));
        let old = match put {
            Ok(()) => self.names.insert(item.to_owned(), name),
            Err(error) => {
                log::warn!("{whole} cannot be kept over the death of this process: {error}");
                self.names.remove(item)
            }
        };
        if let Some(old) = old {
            vault.store.remove(&old);
        }
    }

    /// Lets go of an item.
    pub fn remove(&mut self, item: &str) {
        if let (Some(name), Some(vault)) = (self.names.remove(item), &self.vault) {
            vault.store.remove(&name);
        }
        self.found.remove(item);
    }

    /// Lets go of all.
    pub fn clear(&mut self) {
        if let Some(vault) = &self.vault {
            self.names.values().for_each(|name| vault.store.remove(name));
        }
        self.names.clear();
        self.found.clear();
    }
}

fn envelope(item: &str, words: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<OwnedFd> {
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

/// What is in an envelope, which stays there.
fn read(envelope: &OwnedFd) -> io::Result<(String, Found)> {
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
        return Err(io::Error::other("it is not whole"));
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
mod tests {
    use super::*;
    use std::fs::File;
    use std::io::{Read, Seek, Write};
    use std::sync::Mutex;

    /// A stand-in of a service manager's store.
    #[derive(Clone, Default)]
    struct StandIn(Arc<Mutex<BTreeMap<String, OwnedFd>>>);

    impl Store for StandIn {
        fn put(&self, name: &str, descriptor: BorrowedFd<'_>) -> io::Result<()> {
            self.0.lock().expect("no panic").insert(name.to_owned(), descriptor.try_clone_to_owned()?);
            Ok(())
        }

        fn remove(&self, name: &str) {
            self.0.lock().expect("no panic").remove(name);
        }
    }

    impl StandIn {
        fn open(&self) -> Shelf {
            let stored = self.0.lock().expect("no panic");
            let left = stored.iter().map(|(name, it)| (name.clone(), it.try_clone().expect("a descriptor"))).collect();
            drop(stored);
            Shelf::open(Box::new(self.clone()), left)
        }

        fn len(&self) -> usize {
            self.0.lock().expect("no panic").len()
        }
    }

    fn file(content: &str) -> File {
        let file = rustix::fs::memfd_create("vault", rustix::fs::MemfdFlags::CLOEXEC).expect("a file");
        let mut file = File::from(file);
        file.write_all(content.as_bytes()).expect("written");
        file
    }

    fn content(found: &Found) -> String {
        let mut file = File::from(found.descriptors[0].try_clone().expect("a descriptor"));
        file.rewind().expect("a file");
        let mut text = String::new();
        file.read_to_string(&mut text).expect("read");
        text
    }

    #[test]
    fn what_was_put_last_is_found_by_one_process_after_the_other() {
        let store = StandIn::default();
        let mut root = store.open();
        let mut vm = root.split("db");
        vm.put("a", b"1", &[file("first").as_fd()]);
        vm.put("a", b"2", &[file("second").as_fd()]);
        vm.split("door").put("0", b"", &[]);
        vm.put("gone", b"", &[]);
        vm.remove("gone");
        drop((root, vm));
        for _ in 0..3 {
            let mut root = store.open();
            assert_eq!(root.parts().into_iter().collect::<Vec<_>>(), ["db"]);
            let mut vm = root.split("db");
            assert!(root.parts().is_empty());
            assert_eq!(vm.split("door").take_found().into_keys().collect::<Vec<_>>(), ["0"]);
            let found = vm.take_found();
            assert_eq!(found.keys().collect::<Vec<_>>(), ["a"]);
            assert_eq!((found["a"].words.as_slice(), content(&found["a"]).as_str()), (b"2".as_slice(), "second"));
        }
        let mut vm = store.open().split("db");
        let door = vm.split("door");
        vm.put("a", b"3", &[]);
        assert_eq!(store.open().split("db").take_found()["a"].words, b"3");
        vm.clear();
        assert_eq!(store.open().split("db").take_found().len(), 1, "a shelf that was split off is another one's");
        drop(door);
    }

    /// Killed between putting one in and taking the other out.
    #[test]
    fn of_two_with_one_name_the_later_counts() {
        let store = StandIn::default();
        for (number, words) in [(9, "old"), (10, "new")] {
            let descriptor = envelope("db/a", words.as_bytes(), &[]).expect("an envelope");
            store.put(&format!("{NAME}{number}"), descriptor.as_fd()).expect("put");
        }
        store.put("amberlog-11", file("no envelope").as_fd()).expect("put");
        store.put("another", file("nobody's").as_fd()).expect("put");
        let mut root = store.open();
        assert_eq!(root.split("db").take_found()["a"].words, b"new");
        assert_eq!(store.len(), 2, "what counts no more is taken out, and what is another's stays");
        root.put("b", b"", &[]);
        assert!(store.0.lock().expect("no panic").contains_key("amberlog-12"), "no number is used twice");
    }

    #[test]
    fn what_cannot_be_kept_is_not_there_as_it_was() {
        let store = StandIn::default();
        let mut root = store.open();
        root.put("a", b"1", &[]);
        root.put("a", &vec![0; BYTES_MAX], &[]);
        assert_eq!(store.len(), 0);
        let mut none = Shelf::default();
        none.put("a", b"1", &[]);
        none.clear();
        assert!(!none.is_kept() && none.parts().is_empty());
    }
}
