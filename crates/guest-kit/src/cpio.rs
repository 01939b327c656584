//! Writes "newc" cpio archives, the format of a Linux initramfs (kernel documentation,
//! `driver-api/early-userspace/buffer-format`). Archives may be concatenated.
//!
//! Needs no privileges: device nodes are only described. Never reads an archive.
//! Failure story: contents are held in memory, so only a name or a file too long for the format
//! can go wrong, and those are asserted (they come from our own code, never from a guest).

/// An archive under construction, in memory.
pub struct Archive {
    bytes: Vec<u8>,
    next_inode: u32,
}

const DIRECTORY: u32 = 0o040_000;
const REGULAR: u32 = 0o100_000;
const SYMLINK: u32 = 0o120_000;
const CHARACTER_DEVICE: u32 = 0o020_000;

impl Archive {
    /// An empty archive.
    pub fn new() -> Self {
        Self { bytes: Vec::new(), next_inode: 1 }
    }

    /// Adds a directory; its parent must have been added before.
    pub fn directory(&mut self, name: &str) {
        self.entry(name, DIRECTORY | 0o755, 2, (0, 0), &[]);
    }

    /// Adds a regular file with permission bits `mode`.
    pub fn file(&mut self, name: &str, mode: u32, content: &[u8]) {
        self.entry(name, REGULAR | mode, 1, (0, 0), content);
    }

    /// Adds a symbolic link to `target`.
    pub fn symlink(&mut self, name: &str, target: &str) {
        self.entry(name, SYMLINK | 0o777, 1, (0, 0), target.as_bytes());
    }

    /// Adds a character device node.
    pub fn character_device(&mut self, name: &str, major: u32, minor: u32) {
        self.entry(name, CHARACTER_DEVICE | 0o600, 1, (major, minor), &[]);
    }

    /// Ends the archive, padded to 512 bytes so that another one can follow.
    pub fn finish(mut self) -> Vec<u8> {
        self.next_inode = 0;
        self.entry("TRAILER!!!", 0, 1, (0, 0), &[]);
        self.bytes.resize(self.bytes.len().next_multiple_of(512), 0);
        self.bytes
    }

    fn entry(&mut self, name: &str, mode: u32, links: u32, device: (u32, u32), content: &[u8]) {
        let size = u32::try_from(content.len()).expect("a file of an initramfs is under 4 GiB");
        let name_size = u32::try_from(name.len() + 1).expect("a file name is short");
        let fields = [
            self.next_inode,
            mode,
            0, // uid
            0, // gid
            links,
            0, // modification time: fixed, so that equal contents give equal archives
            size,
            0, // major and minor of the device that holds the file
            0,
            device.0,
            device.1,
            name_size,
            0, // checksum: unused by this variant
        ];
        self.next_inode += 1;
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            self.bytes.extend_from_slice(format!("{field:08X}").as_bytes());
        }
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(content);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

impl Default for Archive {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::process::{Command, Stdio};

    #[test]
    fn busybox_reads_what_we_write() {
        let mut archive = Archive::new();
        archive.directory("etc");
        archive.file("etc/greeting", 0o644, b"hello\n");
        archive.symlink("etc/other", "greeting");
        let bytes = archive.finish();
        assert_eq!(bytes.len() % 512, 0);

        let directory = tempfile::tempdir().unwrap();
        let mut child = Command::new("busybox")
            .args(["cpio", "-i", "--quiet"])
            .current_dir(directory.path())
            .stdin(Stdio::piped())
            .spawn()
            .expect("busybox is installed (scripts/install-packages.sh)");
        child.stdin.take().unwrap().write_all(&bytes).unwrap();
        assert!(child.wait().unwrap().success());
        let read = std::fs::read_to_string(directory.path().join("etc/other")).unwrap();
        assert_eq!(read, "hello\n");
    }
}
