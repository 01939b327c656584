//! Where areas are looked up by image, whatever directory they lie in: one place for each user of the host.
//!
//! The place is a directory in /dev/shm. Everybody can write there, so its name says nothing: it is this user's because it
//! belongs to this user, and nobody else can make such a directory. If the usual name is taken by somebody else, another one
//! that cannot be guessed is used, and found again by whose it is.
//!
//! An entry is a file called after the image's key, which names the area. An entry is a hint: the area is opened and judged
//! like any other, and has to say itself that it is about that image.
//!
//! Whoever begins with an image names his own area there. The one that was named before may hold something still (the copy of a log that
//! is on a server), so it stays named behind the new one for as long as it is there, and comes to the front again when the new one is gone:
//! a start that is refused, or killed, costs nobody what he is owed.
//!
//! Beside these, images of which nothing is held are noted while their guest waits for another daemon (`amberlog detach`): nobody has them
//! locked then, and that guest does not survive that somebody else writes to them. Such an entry counts for as long as the process lives.

use crate::directory_error::{DirectoryError, THROUGH};
use crate::processes::process_lives;
use own_files::{How, OwnDirectory};
use rustix::fs::{FileType, OFlags};
use serde::{Deserialize, Serialize};
use std::hash::{BuildHasher, Hasher};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

const SHARED: &str = "/dev/shm";
const BY_IMAGE: &str = "by-image";
/// Images whose guests wait for a daemon.
const LEFT: &str = "left-by-image";
const ENTRY_BYTES_MAX: u64 = 64 << 10;
/// No more names of another user's directory are looked at.
const NAMES_MAX: usize = 10_000;

/// So many areas are named behind one: each start that is killed before it has got anywhere leaves one at most, until the next looks.
const BEFORE_MAX: usize = 16;

#[derive(Serialize, Deserialize)]
struct Entry {
    schema: u32,
    area: PathBuf,
    /// Those that were named before, the last one first, and that were there then.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    before: Vec<PathBuf>,
}

impl Entry {
    fn of(mut areas: Vec<PathBuf>) -> Option<Self> {
        areas.truncate(BEFORE_MAX + 1);
        let mut areas = areas.into_iter();
        Some(Entry { schema: 1, area: areas.next()?, before: areas.collect() })
    }

    fn areas(self) -> Vec<PathBuf> {
        std::iter::once(self.area).chain(self.before).collect()
    }
}

/// A guest that a daemon has left alone, and that waits for the next one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeftGuest {
    /// The VM, as its daemon called it.
    pub vm: String,
    /// The VMM.
    pub pid: i32,
    /// When that was started ([`process_started_at`](crate::process_started_at)); 0 where nobody can see it.
    pub started: u64,
}

#[derive(Serialize, Deserialize)]
struct LeftEntry {
    schema: u32,
    #[serde(flatten)]
    guest: LeftGuest,
}

/// This user's places that there are: mostly one.
///
/// # Errors
/// When one of them is this user's and others can have changed it, or what an image is owed is perhaps in one that cannot be
/// opened: passing over it would be to say that nothing is owed.
pub fn own_places() -> Result<Vec<PathBuf>, DirectoryError> {
    own_places_in(Path::new(SHARED))
}

fn usual_name() -> String {
    format!("amberlog-{}", rustix::process::geteuid().as_raw())
}

fn own_places_in(shared: &Path) -> Result<Vec<PathBuf>, DirectoryError> {
    let usual = usual_name();
    let us = rustix::process::geteuid().as_raw();
    let mut places = std::fs::read_dir(shared)
        .into_iter()
        .flatten()
        .flatten()
        .filter(|entry| {
            let name = entry.file_name();
            let rest = name.to_str().and_then(|name| name.strip_prefix(&usual));
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        })
        // What is another user's, or a link, is not this user's place, whatever it is called.
        .filter(|entry| entry.path().symlink_metadata().is_ok_and(|metadata| metadata.is_dir() && metadata.uid() == us))
        .map(|entry| Ok(OwnDirectory::open_allowing(&entry.path(), THROUGH)?.path().to_owned()))
        .collect::<Result<Vec<PathBuf>, DirectoryError>>()?;
    places.sort();
    Ok(places)
}

/// This user's place, be it there or not: where VMs' directories are made and images are looked up unless somebody says
/// otherwise.
pub fn own_place() -> PathBuf {
    own_place_in(Path::new(SHARED))
}

fn own_place_in(shared: &Path) -> PathBuf {
    let usual = shared.join(usual_name());
    match own_places_in(shared).map(|places| places.into_iter().next()) {
        Ok(Some(place)) => return place,
        Ok(None) if usual.symlink_metadata().is_ok() => {}
        // Whoever uses a place that cannot be trusted is told so.
        Ok(None) | Err(_) => return usual,
    }
    // Its keys are the system's random numbers, drawn anew in each process.
    let random = std::collections::hash_map::RandomState::new().build_hasher().finish();
    shared.join(format!("{}.{random:016x}", usual_name()))
}

fn open(registry: &Path) -> Result<Option<OwnDirectory>, DirectoryError> {
    open_list(registry, BY_IMAGE)
}

fn open_list(registry: &Path, list: &str) -> Result<Option<OwnDirectory>, DirectoryError> {
    match OwnDirectory::open_allowing(registry, THROUGH).and_then(|registry| registry.directory(list)) {
        Ok(by_image) => Ok(Some(by_image)),
        Err(error) if error.is_missing() => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Notes that the image with this key is one that a guest goes on with under the next daemon.
pub(crate) fn note_left(registry: &Path, key: &str, guest: &LeftGuest) -> Result<(), DirectoryError> {
    let list = OwnDirectory::open_or_make_allowing(registry, THROUGH)?.directory_or_make(LEFT, 0)?;
    let entry = LeftEntry { schema: 1, guest: guest.clone() };
    let text =
        serde_json::to_vec(&entry).map_err(|error| DirectoryError::system("describing", registry, error.into()))?;
    Ok(list.write(key, &text)?)
}

/// The guest that waits to go on with the image with this key, if it lives. An entry of one that has ended is taken out.
pub(crate) fn find_left(registry: &Path, key: &str) -> Result<Option<LeftGuest>, DirectoryError> {
    let Some(list) = open_list(registry, LEFT)? else { return Ok(None) };
    let Some(text) = text_of(&list, key.as_ref()) else { return Ok(None) };
    // What a newer amberlog may have noted, and this one does not understand, stays for that one.
    let Ok(LeftEntry { guest, .. }) = serde_json::from_str(&text) else { return Ok(None) };
    let is_there = process_lives(guest.pid, guest.started);
    if !is_there {
        let _ = list.remove(key);
    }
    Ok(is_there.then_some(guest))
}

/// Its guest is served again.
pub(crate) fn forget_left(registry: &Path, key: &str) {
    if let Ok(Some(list)) = open_list(registry, LEFT) {
        let _ = list.remove(key);
    }
}

/// Makes the registry.
pub(crate) fn make(registry: &Path) -> Result<(), DirectoryError> {
    OwnDirectory::open_or_make_allowing(registry, THROUGH)?.directory_or_make(BY_IMAGE, 0)?;
    Ok(())
}

/// Notes that `area` may hold what the image with this key is owed. What was noted before stays behind it for as long as it is there.
pub(crate) fn note(registry: &Path, key: &str, area: &Path) -> Result<(), DirectoryError> {
    let by_image = OwnDirectory::open_or_make_allowing(registry, THROUGH)?.directory_or_make(BY_IMAGE, 0)?;
    let before = areas_of(&by_image, key.as_ref()).into_iter().filter(|before| before != area && is_there(before));
    write(&by_image, key.as_ref(), std::iter::once(area.to_owned()).chain(before).collect())
}

/// Whether there is something in which something may be owed: whose it is, is judged by who opens it.
fn is_there(area: &Path) -> bool {
    area.symlink_metadata().is_ok_and(|metadata| metadata.is_dir())
}

/// Has an entry name these areas; none of them, and it goes.
fn write(by_image: &OwnDirectory, name: &std::ffi::OsStr, areas: Vec<PathBuf>) -> Result<(), DirectoryError> {
    let Some(entry) = Entry::of(areas) else { return Ok(by_image.remove(name)?) };
    let text =
        serde_json::to_vec(&entry).map_err(|error| DirectoryError::system("describing", &entry.area, error.into()))?;
    Ok(by_image.write(name, &text)?)
}

/// The areas that an entry names, the newest first. Links are what an earlier amberlog made; in a directory that is ours alone, they are ours.
fn areas_of(by_image: &OwnDirectory, name: &std::ffi::OsStr) -> Vec<PathBuf> {
    if by_image.kind(name) == Some(FileType::Symlink) {
        return by_image.link(name).into_iter().collect();
    }
    let entry = text_of(by_image, name).and_then(|text| serde_json::from_str(&text).ok());
    entry.filter(|entry: &Entry| entry.schema == 1).map(Entry::areas).unwrap_or_default()
}

fn text_of(list: &OwnDirectory, name: &std::ffi::OsStr) -> Option<String> {
    let mut file = list.file(name, How::Read).ok()?;
    let mut text = String::new();
    std::io::Read::read_to_string(&mut std::io::Read::take(&mut file, ENTRY_BYTES_MAX), &mut text).ok()?;
    Some(text)
}

/// The areas noted for the image with this key, the newest first.
pub(crate) fn find(registry: &Path, key: &str) -> Result<Vec<PathBuf>, DirectoryError> {
    Ok(open(registry)?.map(|by_image| areas_of(&by_image, key.as_ref())).unwrap_or_default())
}

/// Takes what the entry for an image says of one area out. What it names behind that counts again.
pub(crate) fn forget_image(registry: &Path, key: &str, area: &Path) {
    if let Ok(Some(by_image)) = open(registry) {
        forget(&by_image, key.as_ref(), area);
    }
}

/// Takes an area out of every entry that names it.
pub(crate) fn forget_area(registry: &Path, area: &Path) {
    let Ok(Some(by_image)) = open(registry) else { return };
    for name in by_image.names().unwrap_or_default() {
        forget(&by_image, &name, area);
    }
}

fn forget(by_image: &OwnDirectory, name: &std::ffi::OsStr, area: &Path) {
    let noted = areas_of(by_image, name);
    if noted.iter().any(|noted| noted == area) {
        let stay = noted.into_iter().filter(|noted| noted != area && is_there(noted));
        // It names an area that is judged by whoever opens it, and is taken out by him.
        let _ = write(by_image, name, stay.collect());
    }
}

/// Places of other users that have an entry for the image with this key, whose they are, and the area that the entry names, if it
/// can be read. Anybody can make such an entry: nothing of it is believed.
pub(crate) fn foreign_entries(key: &str) -> Vec<(PathBuf, u32, Option<PathBuf>)> {
    let us = rustix::process::geteuid().as_raw();
    let entries = std::fs::read_dir(SHARED).into_iter().flatten().flatten();
    let places = entries.filter(|entry| entry.file_name().to_str().is_some_and(|name| name.starts_with("amberlog-")));
    let mut found: Vec<_> = places
        .filter_map(|entry| {
            let metadata = entry.path().symlink_metadata().ok().filter(|metadata| metadata.is_dir())?;
            let path = entry.path().join(BY_IMAGE).join(key);
            let has_entry = path.symlink_metadata().is_ok();
            (metadata.uid() != us && has_entry).then(|| (entry.path(), metadata.uid(), area_of_another(&path)))
        })
        .collect();
    found.sort();
    found
}

fn area_of_another(path: &Path) -> Option<PathBuf> {
    let mut text = String::new();
    let file = open_of_another(path)?;
    std::io::Read::read_to_string(&mut std::io::Read::take(file, ENTRY_BYTES_MAX), &mut text).ok()?;
    serde_json::from_str(&text).ok().filter(|entry: &Entry| entry.schema == 1).map(|entry| entry.area)
}

/// A file that another user may have put there: read, if it is one, and never waited for.
fn open_of_another(path: &Path) -> Option<std::fs::File> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let file = std::fs::File::from(rustix::fs::open(path, flags, rustix::fs::Mode::empty()).ok()?);
    file.metadata().is_ok_and(|metadata| metadata.is_file()).then_some(file)
}

/// Whether another user's area has a log that was opened under this number.
pub(crate) fn has_opening(area: &Path, user: u32, number: &[u8; 16]) -> bool {
    let is_theirs = area.symlink_metadata().is_ok_and(|metadata| metadata.is_dir() && metadata.uid() == user);
    let mut names = std::fs::read_dir(area).into_iter().flatten().flatten().take(NAMES_MAX);
    is_theirs
        && names.any(|entry| {
            let is_table = entry.path().extension().is_some_and(|ending| ending == "table");
            let table = is_table.then(|| open_of_another(&entry.path())).flatten();
            table.and_then(|table| journal_area::opening_number_of(&table)).as_ref() == Some(number)
        })
}

/// Whether anything in a registry names this area.
pub fn is_registered_in(registry: &Path, area: &Path) -> bool {
    areas(registry).iter().any(|noted| noted == area)
}

/// All areas that are noted.
pub(crate) fn areas(registry: &Path) -> Vec<PathBuf> {
    let Ok(Some(by_image)) = open(registry) else { return Vec::new() };
    let names = by_image.names().unwrap_or_default();
    let mut areas: Vec<PathBuf> = names.iter().flat_map(|name| areas_of(&by_image, name)).collect();
    areas.sort();
    areas.dedup();
    areas
}

/// All areas that are noted, and those in the place itself of which no entry tells (any more).
pub(crate) fn all_areas(registry: &Path) -> Vec<PathBuf> {
    let mut all = areas(registry);
    if let Ok(place) = OwnDirectory::open_allowing(registry, THROUGH) {
        let names = place.names().unwrap_or_default();
        let of_vms = names.iter().filter(|name| name.as_encoded_bytes().starts_with(b"vm-"));
        all.extend(of_vms.map(|name| place.path().join(name)));
    }
    all.sort();
    all.dedup();
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::process::CommandExt;

    #[test]
    fn a_place_is_found_by_whose_it_is() {
        let shared = tempfile::tempdir().expect("a directory");
        std::fs::set_permissions(shared.path(), std::fs::Permissions::from_mode(0o1777)).expect("its mode");
        let usual = shared.path().join(usual_name());
        assert_eq!(own_place_in(shared.path()), usual);
        assert!(own_places_in(shared.path()).expect("none").is_empty(), "asking makes nothing");
        make(&usual).expect("made");
        assert_eq!(own_places_in(shared.path()).expect("one"), vec![usual.clone()]);
        // Others may enter it, so others may have changed it; and what it holds is still owed.
        for mode in [0o777, 0o755] {
            std::fs::set_permissions(&usual, std::fs::Permissions::from_mode(mode)).expect("its mode");
            assert!(own_places_in(shared.path()).expect_err("it is not believed").is_not_ours());
            assert_eq!(own_place_in(shared.path()), usual, "nor passed over");
        }
        std::fs::set_permissions(&usual, std::fs::Permissions::from_mode(0o711)).expect("its mode");
        assert_eq!(own_places_in(shared.path()).expect("the way to a VM of another user"), vec![usual]);
    }

    #[test]
    fn a_place_that_somebody_else_took_before_is_left_to_him() {
        if !rustix::process::geteuid().is_root() {
            println!("skipped: a second user can only be played by root");
            return;
        }
        for script in ["mkdir NAME", "ln -s /etc NAME", "mkdir NAME NAME/by-image; chmod 777 NAME", "touch NAME"] {
            let shared = tempfile::tempdir().expect("a directory");
            std::fs::set_permissions(shared.path(), std::fs::Permissions::from_mode(0o1777)).expect("its mode");
            let script = script.replace("NAME", &usual_name());
            let mut shell = std::process::Command::new("/bin/sh");
            shell.args(["-c", &script]).current_dir(shared.path()).uid(65534).gid(65534);
            assert!(shell.status().expect("a shell").success());
            let place = own_place_in(shared.path());
            assert!(place.starts_with(shared.path()) && place != shared.path().join(usual_name()), "{script}");
            make(&place).expect("made");
            assert_ne!(place, own_place_in(Path::new("/nonexistent")), "{script}");
            assert_eq!(own_places_in(shared.path()).expect("ours"), std::slice::from_ref(&place), "{script}");
            assert_eq!(own_place_in(shared.path()), place, "{script}: and is found again");
        }
    }

    #[test]
    fn entries_are_noted_found_and_forgotten() {
        let directory = tempfile::tempdir().expect("a directory");
        let registry = directory.path().join("registry");
        let find = |key: &str| find(&registry, key).expect("looked");
        assert!(find("file-1").is_empty());
        note(&registry, "file-1", Path::new("/a")).expect("noted");
        note(&registry, "file-2", Path::new("/a")).expect("noted");
        note(&registry, "file-3", Path::new("/b")).expect("noted");
        // As an earlier amberlog did.
        std::os::unix::fs::symlink("/c", registry.join("by-image/file-4")).expect("a link");
        std::fs::write(registry.join("by-image/file-5"), "noise").expect("a file");
        assert_eq!(find("file-1"), [PathBuf::from("/a")]);
        assert_eq!(find("file-4"), [PathBuf::from("/c")]);
        assert!(find("file-5").is_empty());
        assert_eq!(areas(&registry), [PathBuf::from("/a"), "/b".into(), "/c".into()]);
        forget_area(&registry, Path::new("/a"));
        assert_eq!(areas(&registry), [PathBuf::from("/b"), "/c".into()]);
        note(&registry, "file-4", Path::new("/d")).expect("noted in the place of the link");
        assert_eq!(find("file-4"), [PathBuf::from("/d")]);
        std::fs::set_permissions(registry.join("by-image"), std::fs::Permissions::from_mode(0o777)).expect("its mode");
        assert!(super::find(&registry, "file-3").is_err(), "others may have written that");
    }

    /// Something may be owed in each that is there.
    #[test]
    fn what_was_noted_before_counts_again_when_what_came_after_is_gone() {
        let directory = tempfile::tempdir().expect("a directory");
        let registry = directory.path().join("registry");
        let area = |name: &str| {
            let path = directory.path().join(name);
            std::fs::create_dir_all(&path).expect("made");
            path
        };
        let find = |key: &str| find(&registry, key).expect("looked");
        let (old, gone, new) = (area("old"), area("gone"), area("new"));
        for next in [&old, &gone, &new, &new] {
            note(&registry, "file-1", next).expect("noted");
        }
        assert_eq!(find("file-1"), [new.clone(), gone.clone(), old.clone()]);
        assert!([&old, &new].iter().all(|area| is_registered_in(&registry, area)));
        std::fs::remove_dir(&gone).expect("removed");
        forget_image(&registry, "file-1", &new);
        assert_eq!(find("file-1"), std::slice::from_ref(&old), "what is not there is nobody's");
        note(&registry, "file-1", &new).expect("noted");
        forget_area(&registry, &old);
        assert_eq!(find("file-1"), std::slice::from_ref(&new));
        forget_area(&registry, &new);
        assert!(find("file-1").is_empty() && areas(&registry).is_empty());
        // As an amberlog before 0.2 reads it: the first is the one.
        note(&registry, "file-1", &old).expect("noted");
        note(&registry, "file-1", &new).expect("noted");
        let text = std::fs::read_to_string(registry.join("by-image/file-1")).expect("an entry");
        let read: serde_json::Value = serde_json::from_str(&text).expect("an object");
        assert_eq!((&read["schema"], &read["area"]), (&serde_json::json!(1), &serde_json::json!(new)));
        // However often a start is killed.
        for number in 0..100 {
            note(&registry, "file-2", &area(&number.to_string())).expect("noted");
        }
        assert_eq!(find("file-2").len(), BEFORE_MAX + 1);
    }

    #[test]
    fn a_guest_that_waits_is_found_while_it_lives() {
        let directory = tempfile::tempdir().expect("a directory");
        let registry = directory.path().join("registry");
        assert_eq!(find_left(&registry, "file-1").expect("looked"), None);
        let mut process = std::process::Command::new("sleep").arg("60").spawn().expect("started");
        let pid = process.id() as i32;
        let started = crate::process_started_at(pid).expect("it lives");
        let guest = LeftGuest { vm: "one".to_owned(), pid, started };
        ["file-1", "file-2"].into_iter().for_each(|key| note_left(&registry, key, &guest).expect("noted"));
        // A number that another process has by now.
        note_left(&registry, "file-3", &LeftGuest { started: started + 1, ..guest.clone() }).expect("noted");
        assert_eq!(find_left(&registry, "file-1").expect("looked"), Some(guest.clone()));
        assert_eq!(find_left(&registry, "file-3").expect("looked"), None);
        assert!(find(&registry, "file-1").expect("looked").is_empty(), "nothing is held");
        // By a newer amberlog, which says more.
        let list = registry.join("left-by-image");
        let newer = format!("{{\"schema\":2,\"vm\":\"one\",\"pid\":{pid},\"started\":{started},\"more\":1}}");
        std::fs::write(list.join("file-4"), newer).expect("written");
        assert_eq!(find_left(&registry, "file-4").expect("looked"), Some(guest.clone()));
        std::fs::write(list.join("file-5"), "{\"schema\":3,\"guest\":7}").expect("written");
        assert_eq!(find_left(&registry, "file-5").expect("looked"), None);
        assert!(list.join("file-5").exists(), "it is not this one's to remove");
        forget_left(&registry, "file-1");
        assert_eq!(find_left(&registry, "file-1").expect("looked"), None);
        process.kill().and_then(|()| process.wait()).expect("ended");
        assert!(registry.join("left-by-image/file-2").exists());
        assert_eq!(find_left(&registry, "file-2").expect("looked"), None);
        assert!(!registry.join("left-by-image/file-2").exists(), "and is noted no more");
    }
}
