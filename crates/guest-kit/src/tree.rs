//! A set of files for a guest, held in memory: written out as an initramfs archive or as a
//! directory from which `mke2fs -d` makes a root file system.
//!
//! Failure story: a missing input file is an error that names it; nothing is written half.

use crate::cpio::Archive;
use crate::error::{Error, FileContext, Result};
use crate::program;
use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

#[derive(Clone)]
enum Node {
    Directory,
    File { mode: u32, content: Vec<u8> },
    Symlink(String),
    CharacterDevice(u32, u32),
}

/// Files, directories and links by their path in the guest, without the leading slash.
#[derive(Clone, Default)]
pub struct FileTree {
    // Sorted, so a directory always comes before what it holds.
    nodes: BTreeMap<String, Node>,
}

impl FileTree {
    /// No files at all.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a directory and its parents.
    pub fn directory(&mut self, path: &str) {
        let path = path.trim_matches('/');
        for (at, _) in path.match_indices('/') {
            self.nodes.entry(path[..at].to_owned()).or_insert(Node::Directory);
        }
        if !path.is_empty() {
            self.nodes.entry(path.to_owned()).or_insert(Node::Directory);
        }
    }

    /// Adds a file with permission bits `mode`, and its parent directories.
    pub fn file(&mut self, path: &str, mode: u32, content: impl Into<Vec<u8>>) {
        self.insert(path, Node::File { mode, content: content.into() });
    }

    /// Adds a symbolic link, and its parent directories.
    pub fn symlink(&mut self, path: &str, target: &str) {
        self.insert(path, Node::Symlink(target.to_owned()));
    }

    /// Adds a character device node (left out when written as a directory).
    pub fn character_device(&mut self, path: &str, major: u32, minor: u32) {
        self.insert(path, Node::CharacterDevice(major, minor));
    }

    /// Copies a program of the host to `path`, and the shared libraries that it needs to where
    /// they are on the host.
    pub fn program(&mut self, source: &Path, path: &str) -> Result<()> {
        self.file(path, 0o755, std::fs::read(source).at("read", source)?);
        for library in shared_libraries(source)? {
            let target = library.to_string_lossy().into_owned();
            self.file(&target, 0o755, std::fs::read(&library).at("read", &library)?);
        }
        Ok(())
    }

    /// Copies the files of a directory of the host, and of those below it, to where they are there.
    pub fn copy(&mut self, directory: &Path) -> Result<()> {
        for entry in std::fs::read_dir(directory).at("list", directory)? {
            let path = entry.at("list", directory)?.path();
            if path.is_dir() {
                self.copy(&path)?;
            } else {
                self.file(&path.to_string_lossy(), 0o644, std::fs::read(&path).at("read", &path)?);
            }
        }
        Ok(())
    }

    fn insert(&mut self, path: &str, node: Node) {
        let path = path.trim_matches('/');
        if let Some(at) = path.rfind('/') {
            self.directory(&path[..at]);
        }
        self.nodes.insert(path.to_owned(), node);
    }

    /// The whole tree as a cpio archive.
    pub fn archive(&self) -> Vec<u8> {
        let mut archive = Archive::new();
        for (path, node) in &self.nodes {
            match node {
                Node::Directory => archive.directory(path),
                Node::File { mode, content } => archive.file(path, *mode, content),
                Node::Symlink(target) => archive.symlink(path, target),
                Node::CharacterDevice(major, minor) => {
                    archive.character_device(path, *major, *minor);
                }
            }
        }
        archive.finish()
    }

    /// Writes the whole tree under an existing directory.
    pub fn write_to(&self, directory: &Path) -> Result<()> {
        for (path, node) in &self.nodes {
            let target = directory.join(path);
            match node {
                Node::Directory => {
                    std::fs::create_dir_all(&target).at("create the directory", &target)?;
                }
                Node::File { mode, content } => {
                    std::fs::write(&target, content).at("write", &target)?;
                    std::fs::set_permissions(&target, std::fs::Permissions::from_mode(*mode))
                        .at("set the permissions of", &target)?;
                }
                Node::Symlink(link) => {
                    std::os::unix::fs::symlink(link, &target).at("create the link", &target)?;
                }
                Node::CharacterDevice(..) => {}
            }
        }
        Ok(())
    }
}

/// The shared libraries of a program, its loader included, as `ldd` finds them.
fn shared_libraries(program: &Path) -> Result<Vec<PathBuf>> {
    // A static program makes ldd exit with 1, "not a dynamic executable".
    let output = program::run(program::command("ldd")?.arg(program), &[0, 1])?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let mut libraries = Vec::new();
    for line in text.lines() {
        let line = line.trim();
        if line.contains("not found") {
            return Err(Error::Assets(format!("{} lacks a library: {line}", program.display())));
        }
        let word = line.split_once("=> ").map_or(line, |(_, right)| right);
        let path = word.split_whitespace().next().unwrap_or_default();
        if path.starts_with('/') {
            libraries.push(PathBuf::from(path));
        }
    }
    Ok(libraries)
}
