//! The note of a VM that a daemon has left running: which process is to come back to its sockets, how it was served, on which images,
//! and what these looked like then.
//!
//! It is in the directory of the VM's sockets, which a new start of the host empties. A process is known by its number and
//! by when it was started, so that no other one is taken for it. Its guest gets the disks that it had, whatever the configuration says by
//! then: under another image it would write one file system over another. And it gets them only as it left them: between the two
//! daemons nobody has the images locked, and a guest whose image was restored from a backup, recovered or checked meanwhile
//! goes on from what it has in memory, over a file system that is another one by now.
//!
//! Must never: say that an image is as it was left where it was written to. Failure story: such a guest is not served, by any daemon, until
//! its VMM has ended; then the image is served as it is. A note of an earlier amberlog does not say what the images looked like: that
//! it cannot be told is said, and the guest goes on.

use super::config::{Config, VmConfig};
use crate::vm::as_left::{AsLeft, LeftImage, LeftImages};
use crate::vm::watched::Watched;
use anyhow::Context;
use own_files::OwnDirectory;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::path::{Path, PathBuf};

const NOTE: &str = "left";
/// A configuration is the most of it.
const BYTES_MAX: u64 = 1 << 20;

#[derive(Debug, Serialize, Deserialize)]
struct Note {
    pid: i32,
    /// In ticks since the host was; 0 where nobody could see it.
    started: u64,
    /// The configuration that it was served with.
    configuration: String,
    images: Vec<LeftImage>,
}

fn open(sockets: &Path) -> Result<OwnDirectory, own_files::Error> {
    OwnDirectory::open_allowing(sockets, super::SOCKETS_OTHERS)
}

/// Notes that the next daemon finds process `pid` waiting for its disks, which were served so, on these images, in order.
///
/// # Errors
/// When it cannot be written, or the process has ended.
pub fn write<'a>(
    config: &VmConfig,
    pid: i32,
    images: impl IntoIterator<Item = (&'a Path, &'a File, AsLeft)>,
) -> anyhow::Result<()> {
    let started = placement::process_started_at(pid).unwrap_or_default();
    anyhow::ensure!(placement::process_lives(pid, started), "process {pid} has ended");
    let images = images.into_iter().map(|(path, file, as_left)| LeftImage::of(path, file, Some(as_left)));
    let images = images.collect::<anyhow::Result<_>>()?;
    let note = Note { pid, started, configuration: config.source.to_string(), images };
    Ok(open(&config.sockets)?.write(NOTE, &serde_json::to_vec(&note)?)?)
}

/// How a guest was served that was left.
#[derive(Debug)]
pub struct Before {
    /// The configuration.
    pub config: VmConfig,
    /// Its images, as they were left.
    pub images: LeftImages,
}

/// Who was left.
#[derive(Debug)]
pub enum Left {
    /// Nobody.
    Nobody,
    /// A process that has ended since: nobody has replayed its logs.
    Gone,
    /// A process that waits for its disks, and how they were served, where the daemon before has said so.
    Waits(i32, Watched, Option<Box<Before>>),
}

fn read(sockets: &Path) -> anyhow::Result<Option<Note>> {
    let note = match open(sockets).and_then(|sockets| sockets.read(NOTE, BYTES_MAX)) {
        Err(error) if error.is_missing() => None,
        other => other?,
    };
    let Some(note) = note else { return Ok(None) };
    let text = String::from_utf8_lossy(&note).into_owned();
    // As 0.1 wrote it: without the rest.
    let before = || {
        let (pid, started) = text.trim_end().split_once(' ')?;
        let (pid, started) = (pid.parse().ok()?, started.parse().ok()?);
        Some(Note { pid, started, configuration: String::new(), images: Vec::new() })
    };
    // Who is there and not understood is not nobody: a guest may wait for these very disks.
    serde_json::from_slice::<Note>(&note).ok().or_else(before).map(Some).with_context(|| {
        let path = sockets.join(NOTE);
        format!(
            "{} says which VMM a daemon has left running, and is not understood (a newer amberlog wrote it, or it is damaged): start that \
             one, or end the VMM and remove the file",
            path.display()
        )
    })
}

/// Who was left of this VM.
///
/// # Errors
/// When somebody else can have written that, or an image is another file than the one that the guest had, or was written to since.
pub fn find(config: &VmConfig) -> anyhow::Result<Left> {
    let Some(note) = read(&config.sockets)? else { return Ok(Left::Nobody) };
    // Watched first: from here on the number means this process.
    let watched = match Watched::new(note.pid) {
        Some(watched) if placement::process_lives(note.pid, note.started) => watched,
        _ => return Ok(Left::Gone),
    };
    if note.configuration.is_empty() {
        return Ok(Left::Waits(note.pid, watched, None));
    }
    note.images.iter().try_for_each(|image| image.check(note.pid))?;
    let name = &config.options.name;
    let served = Config::parse(&note.configuration)
        .and_then(|mut served| served.vms.remove(name).context("the VM is not in it"))
        .with_context(|| format!("the configuration with which process {} was served", note.pid))?;
    let images = LeftImages { pid: note.pid, images: note.images };
    Ok(Left::Waits(note.pid, watched, Some(Box::new(Before { config: served, images }))))
}

/// The process that was left, if it lives, whatever became of its images.
pub fn waiting(config: &VmConfig) -> Option<i32> {
    let note = read(&config.sockets).ok()??;
    placement::process_lives(note.pid, note.started).then_some(note.pid)
}

/// What the guest of this process is still to be told, if it was noted as left: of which image, by its place in the order, and what. A worker
/// that was killed as it left it, or as it took it, has told nobody, and nothing else says it.
pub fn untold_to(config: &VmConfig, vmm: (i32, u64)) -> Vec<(usize, String)> {
    let Ok(Some(note)) = read(&config.sockets) else { return Vec::new() };
    let images = (note.pid, note.started) == vmm;
    let images = note.images.iter().enumerate().filter(|_| images);
    images.filter_map(|(index, image)| Some((index, image.untold()?.to_owned()))).collect()
}

/// What the guests that were left are still to be told, a sentence for each image: what the daemon whose sockets are in `run` could not tell
/// them any more.
pub fn untold(run: &Path) -> Vec<String> {
    let mut sentences = Vec::new();
    let mut entries: Vec<PathBuf> =
        std::fs::read_dir(run).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    entries.sort();
    for sockets in entries.into_iter().filter(|path| path.is_dir()) {
        let Ok(Some(note)) = read(&sockets) else { continue };
        let vm = sockets.file_name().unwrap_or_default().to_string_lossy().into_owned();
        sentences.extend(note.images.iter().filter_map(|image| Some(format!("vm {vm}, {}", image.untold()?))));
    }
    sentences
}

/// Nobody is to come back any more.
///
/// # Errors
/// When the note is there and cannot be removed.
pub fn forget(sockets: &Path) -> anyhow::Result<()> {
    match open(sockets).and_then(|sockets| sockets.remove(NOTE)) {
        Err(error) if !error.is_missing() => Err(error.into()),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::fs::{FileExt, MetadataExt};

    /// A VM with these images, and sockets in `directory`.
    fn config(directory: &Path, images: &[&Path]) -> VmConfig {
        let disks: Vec<String> = images.iter().map(|image| image.display().to_string()).collect();
        let text = format!(
            "shm = {directory:?}\nrun = {directory:?}\nreports = {directory:?}\n[[vm]]\nname = \"one\"\ndisks = {disks:?}\n"
        );
        Config::parse(&text).expect("a configuration").vms.remove("one").expect("the VM")
    }

    fn left_at(config: &VmConfig, pid: i32, untold: Option<&str>) -> anyhow::Result<()> {
        let opened: Vec<(&Path, File)> =
            config.options.images().map(|(path, _)| (path, File::open(path).expect("opened"))).collect();
        let look = |file| AsLeft::look(file, &[1024], untold.map(str::to_owned)).expect("looked");
        write(config, pid, opened.iter().map(|(path, file)| (*path, file, look(file))))
    }

    struct Process(std::process::Child);

    impl Process {
        fn new() -> Self {
            Process(std::process::Command::new("sleep").arg("60").spawn().expect("started"))
        }

        fn pid(&self) -> i32 {
            self.0.id() as i32
        }
    }

    impl Drop for Process {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    fn make_sockets(config: &VmConfig) {
        std::fs::create_dir(&config.sockets).expect("a directory");
        std::fs::set_permissions(&config.sockets, std::fs::Permissions::from_mode(0o700)).expect("its mode");
    }

    /// A worker that goes on with the guest finds it, and no other guest's does.
    #[test]
    fn what_a_guest_is_to_be_told_is_found_by_who_goes_on_with_it() {
        let directory = tempfile::tempdir().expect("a directory");
        let image = directory.path().join("image");
        std::fs::write(&image, [0; 4096]).expect("written");
        let config = config(directory.path(), &[&image]);
        let process = Process::new();
        let pid = process.0.id() as i32;
        std::fs::create_dir_all(&config.sockets).expect("made");
        std::fs::set_permissions(&config.sockets, std::fs::Permissions::from_mode(0o700)).expect("set");
        left_at(&config, pid, Some("a flush has failed")).expect("noted");
        let started = placement::process_started_at(pid).unwrap_or_default();
        assert_eq!(untold_to(&config, (pid, started)), [(0, "a flush has failed".to_owned())]);
        assert_eq!(untold_to(&config, (pid, started + 1)), []);
        forget(&config.sockets).expect("forgotten");
        assert_eq!(untold_to(&config, (pid, started)), []);
    }

    #[test]
    fn only_the_process_that_was_left_is_found_and_gets_what_it_had() {
        let directory = tempfile::tempdir().expect("a directory");
        let [first, second] = ["first", "second"].map(|name| directory.path().join(name));
        [&first, &second].into_iter().for_each(|image| std::fs::write(image, "an image").expect("written"));
        let before = config(directory.path(), &[&first, &second]);
        make_sockets(&before);
        // As somebody has changed it since.
        let now = config(directory.path(), &[&second]);
        let find = || find(&now).expect("ours");
        assert!(matches!(find(), Left::Nobody));
        let process = Process::new();
        let pid = process.pid();
        left_at(&before, pid, None).expect("it lives");
        let Left::Waits(found, _, Some(served)) = find() else { panic!("it waits") };
        assert_eq!((found, &served.config), (pid, &before));
        assert_eq!((served.images.untold().count(), untold(directory.path())), (0, vec![]));
        // Another file is none of its disks.
        std::fs::rename(&first, directory.path().join("kept")).expect("renamed");
        std::fs::write(&first, "another image").expect("written");
        let why = super::find(&now).expect_err("refused").to_string();
        assert!(why.contains("is another file than the one that the guest of process"), "{why}");
        std::fs::rename(directory.path().join("kept"), &first).expect("renamed");
        assert!(matches!(find(), Left::Waits(..)));
        // Its number alone is not enough. As 0.1 wrote it.
        let note = before.sockets.join(NOTE);
        std::fs::write(&note, format!("{pid} 1\n")).expect("written");
        assert!(matches!(find(), Left::Gone));
        let started = placement::process_started_at(pid).expect("it lives");
        std::fs::write(&note, format!("{pid} {started}\n")).expect("written");
        assert!(matches!(find(), Left::Waits(_, _, None)));
        left_at(&before, pid, None).expect("it lives");
        drop(process);
        assert!(matches!(find(), Left::Gone));
        assert!(left_at(&before, pid, None).is_err());
        forget(&before.sockets).expect("removed");
        forget(&before.sockets).expect("removed before");
    }

    /// The same file, and another disk.
    #[test]
    fn an_image_that_was_written_to_meanwhile_is_not_the_guests_any_more() {
        let directory = tempfile::tempdir().expect("a directory");
        let image = directory.path().join("image");
        std::fs::write(&image, vec![1; 8192]).expect("written");
        let served = config(directory.path(), &[&image]);
        make_sockets(&served);
        let process = Process::new();
        left_at(&served, process.pid(), None).expect("it lives");
        let Left::Waits(_, _, Some(before)) = find(&served).expect("as it was") else { panic!("it waits") };
        let opened = File::options().read(true).write(true).open(&image).expect("opened");
        before.images.check([&opened].into_iter()).expect("as it was");
        let changed = opened.metadata().and_then(|metadata| metadata.modified()).expect("its time");
        // A restored backup, of the same size.
        std::fs::copy(&image, directory.path().join("backup")).expect("copied");
        std::fs::copy(directory.path().join("backup"), &image).expect("copied");
        assert_eq!(waiting(&served), Some(process.pid()), "whoever looks for it");
        let why = find(&served).expect_err("refused").to_string();
        for part in
            ["image was written to since by somebody else", "end that process, and the image is served as it is"]
        {
            assert!(why.contains(part), "{why}");
        }
        assert!(before.images.check([&opened].into_iter()).is_err(), "seen when it is locked, too");
        // Whoever sets the time back (rsync -t) is seen by what he wrote.
        opened.set_modified(changed).expect("set");
        before.images.check([&opened].into_iter()).expect("by its time it is as it was");
        assert!(matches!(find(&served), Ok(Left::Waits(..))), "and by its bytes");
        opened.write_all_at(&[2], 1024 + 1000).expect("written");
        opened.set_modified(changed).expect("set");
        let why = find(&served).expect_err("refused").to_string();
        assert!(why.contains("has another superblock at byte 1024 now"), "{why}");
        drop(process);
        assert!(matches!(find(&served), Ok(Left::Gone)), "then it is served as it is");
    }

    /// Another guest would write one file system over that of the one that waits.
    #[test]
    fn a_note_that_is_not_understood_is_not_nobody() {
        let directory = tempfile::tempdir().expect("a directory");
        let image = directory.path().join("image");
        std::fs::write(&image, "an image").expect("written");
        let served = config(directory.path(), &[&image]);
        make_sockets(&served);
        let process = Process::new();
        left_at(&served, process.pid(), None).expect("it lives");
        let note = served.sockets.join(NOTE);
        let text = std::fs::read(&note).expect("written");
        for damaged in [&text[..text.len() / 2], b"", b"{\"format\":7}", b"17", b"one two"] {
            std::fs::write(&note, damaged).expect("written");
            let why = find(&served).expect_err("refused").to_string();
            assert!(why.contains("end the VMM and remove the file"), "{why}");
            assert_eq!((waiting(&served), untold(directory.path())), (None, vec![]));
        }
        forget(&served.sockets).expect("removed");
        assert!(matches!(find(&served), Ok(Left::Nobody)));
    }

    #[test]
    fn what_a_guest_was_not_told_is_noted_for_the_next_daemon() {
        let directory = tempfile::tempdir().expect("a directory");
        let images = ["first", "second"].map(|name| directory.path().join(name));
        images.iter().for_each(|image| std::fs::write(image, "an image").expect("written"));
        let served = config(directory.path(), &[&images[0], &images[1]]);
        make_sockets(&served);
        let process = Process::new();
        left_at(&served, process.pid(), Some("flushing failed")).expect("it lives");
        let Ok(Left::Waits(_, _, Some(before))) = find(&served) else { panic!("it waits") };
        assert_eq!(before.images.untold().collect::<Vec<_>>(), [(0, "flushing failed"), (1, "flushing failed")]);
        assert_eq!(untold(directory.path()), ["vm one, flushing failed", "vm one, flushing failed"]);
    }

    /// Nobody would ever stop a disk that the guest does not have, and a guest is given up when all of its disks are stopped.
    #[test]
    fn a_disk_that_no_driver_has_used_is_noted_as_such() {
        let directory = tempfile::tempdir().expect("a directory");
        let images = ["first", "second"].map(|name| directory.path().join(name));
        images.iter().for_each(|image| std::fs::write(image, "an image").expect("written"));
        let served = config(directory.path(), &[&images[0], &images[1]]);
        make_sockets(&served);
        let process = Process::new();
        let opened = images.each_ref().map(|image| File::open(image).expect("opened"));
        let look = |index: usize| AsLeft::look(&opened[index], &[], None).expect("looked").unused(index == 1);
        let left = (0..2).map(|index| (images[index].as_path(), &opened[index], look(index)));
        write(&served, process.pid(), left).expect("it lives");
        let Ok(Left::Waits(_, _, Some(before))) = find(&served) else { panic!("it waits") };
        assert_eq!(before.images.used(), [true, false]);
    }

    /// A note of 0.2 before it said what images looked like: which file each is still counts.
    #[test]
    fn a_note_of_an_earlier_amberlog_is_understood() {
        let directory = tempfile::tempdir().expect("a directory");
        let image = directory.path().join("image");
        std::fs::write(&image, "an image").expect("written");
        let served = config(directory.path(), &[&image]);
        make_sockets(&served);
        let process = Process::new();
        let pid = process.pid();
        let started = placement::process_started_at(pid).expect("it lives");
        let is = image.metadata().expect("the image");
        let note = |inode: u64| {
            let note = serde_json::json!({
                "pid": pid, "started": started, "configuration": &*served.source,
                "images": [{"path": image, "device": is.dev(), "inode": inode, "block_device": 0}],
            });
            std::fs::write(served.sockets.join(NOTE), note.to_string()).expect("written");
        };
        note(is.ino());
        let Ok(Left::Waits(_, _, Some(before))) = find(&served) else { panic!("it waits") };
        assert_eq!(before.images.used(), [true], "for all that is known");
        note(is.ino() + 1);
        assert!(find(&served).expect_err("refused").to_string().contains("is another file"));
    }
}
