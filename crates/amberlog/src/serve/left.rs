//! The note of a VM that a daemon has left running: which process is to come back to its sockets, how it was served, and on which images.
//!
//! It is in the directory of the VM's sockets, which a new start of the host empties. A process is known by its number and
//! by when it was started, so that no other one is taken for it. Its guest gets the disks that it had, whatever the configuration says by
//! then: under another image it would write one file system over another.

use super::config::{Config, VmConfig};
use crate::vm::watched::Watched;
use anyhow::Context;
use own_files::OwnDirectory;
use serde::{Deserialize, Serialize};
use std::os::unix::fs::MetadataExt;
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
    images: Vec<Image>,
}

/// An image, and which file it was.
#[derive(Debug, Serialize, Deserialize, PartialEq)]
struct Image {
    path: PathBuf,
    device: u64,
    inode: u64,
    block_device: u64,
}

impl Image {
    fn at(path: &Path) -> anyhow::Result<Self> {
        let is = std::fs::metadata(path).with_context(|| format!("looking for {}", path.display()))?;
        Ok(Image { path: path.to_owned(), device: is.dev(), inode: is.ino(), block_device: is.rdev() })
    }
}

fn open(sockets: &Path) -> Result<OwnDirectory, own_files::Error> {
    OwnDirectory::open_allowing(sockets, super::SOCKETS_OTHERS)
}

/// Notes that the next daemon finds process `pid` waiting for its disks, which were served so.
///
/// # Errors
/// When it cannot be written, or the process has ended.
pub fn write(config: &VmConfig, pid: i32) -> anyhow::Result<()> {
    let started = placement::process_started_at(pid).unwrap_or_default();
    anyhow::ensure!(placement::process_lives(pid, started), "process {pid} has ended");
    let images = config.options.images().map(|(path, _)| Image::at(path)).collect::<anyhow::Result<_>>()?;
    let note = Note { pid, started, configuration: config.source.to_string(), images };
    Ok(open(&config.sockets)?.write(NOTE, &serde_json::to_vec(&note)?)?)
}

/// Who was left.
#[derive(Debug)]
pub enum Left {
    /// Nobody.
    Nobody,
    /// A process that has ended since: nobody has replayed its logs.
    Gone,
    /// A process that waits for its disks, and how they were served, where the daemon before has said so.
    Waits(i32, Watched, Option<Box<VmConfig>>),
}

/// Who was left of this VM.
///
/// # Errors
/// When somebody else can have written that, or an image is another file than the one that the guest had.
pub fn find(config: &VmConfig) -> anyhow::Result<Left> {
    let note = match open(&config.sockets).and_then(|sockets| sockets.read(NOTE, BYTES_MAX)) {
        Err(error) if error.is_missing() => None,
        other => other?,
    };
    let Some(note) = note else { return Ok(Left::Nobody) };
    let text = String::from_utf8_lossy(&note).into_owned();
    // As 0.1 wrote it: without the rest.
    let before = || {
        let (pid, started) = text.trim_end().split_once(' ')?;
        let (pid, started) = (pid.parse().ok()?, started.parse().ok()?);
        Some(Note { pid, started, configuration: String::new(), images: Vec::new() })
    };
    let Some(note) = serde_json::from_slice::<Note>(&note).ok().or_else(before) else { return Ok(Left::Nobody) };
    // Watched first: from here on the number means this process.
    let watched = match Watched::new(note.pid) {
        Some(watched) if placement::process_lives(note.pid, note.started) => watched,
        _ => return Ok(Left::Gone),
    };
    if note.configuration.is_empty() {
        return Ok(Left::Waits(note.pid, watched, None));
    }
    let name = &config.options.name;
    for image in &note.images {
        anyhow::ensure!(
            Image::at(&image.path)? == *image,
            "{} is another file than the one that the guest of process {} has: put that one back in its place, or end that process",
            image.path.display(),
            note.pid
        );
    }
    let served = Config::parse(&note.configuration)
        .and_then(|mut served| served.vms.remove(name).context("the VM is not in it"))
        .with_context(|| format!("the configuration with which process {} was served", note.pid))?;
    Ok(Left::Waits(note.pid, watched, Some(Box::new(served))))
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

    /// A VM with these images, and sockets in `directory`.
    fn config(directory: &Path, images: &[&Path]) -> VmConfig {
        let disks: Vec<String> = images.iter().map(|image| image.display().to_string()).collect();
        let text = format!(
            "shm = {directory:?}\nrun = {directory:?}\nreports = {directory:?}\n[[vm]]\nname = \"one\"\ndisks = {disks:?}\n"
        );
        Config::parse(&text).expect("a configuration").vms.remove("one").expect("the VM")
    }

    #[test]
    fn only_the_process_that_was_left_is_found_and_gets_what_it_had() {
        let directory = tempfile::tempdir().expect("a directory");
        let [first, second] = ["first", "second"].map(|name| directory.path().join(name));
        [&first, &second].into_iter().for_each(|image| std::fs::write(image, "an image").expect("written"));
        let before = config(directory.path(), &[&first, &second]);
        std::fs::create_dir(&before.sockets).expect("a directory");
        std::fs::set_permissions(&before.sockets, std::fs::Permissions::from_mode(0o700)).expect("its mode");
        // As somebody has changed it since.
        let now = config(directory.path(), &[&second]);
        let find = || find(&now).expect("ours");
        assert!(matches!(find(), Left::Nobody));
        let mut process = std::process::Command::new("sleep").arg("60").spawn().expect("started");
        let pid = process.id() as i32;
        write(&before, pid).expect("it lives");
        let Left::Waits(found, _, Some(served)) = find() else { panic!("it waits") };
        assert_eq!((found, &*served), (pid, &before));
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
        write(&before, pid).expect("it lives");
        process.kill().expect("killed");
        process.wait().expect("gone");
        assert!(matches!(find(), Left::Gone));
        assert!(write(&before, pid).is_err());
        forget(&before.sockets).expect("removed");
        forget(&before.sockets).expect("removed before");
    }
}
