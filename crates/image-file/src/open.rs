//! Opens what a user calls an image, and nothing else: a pipe would wait for its other end, and a device may do anything.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

/// Opens a regular file or a block device, to be read and, if `is_writable`, written.
///
/// # Errors
/// When it cannot be opened, or is neither.
pub fn open(path: &Path, is_writable: bool) -> io::Result<File> {
    let refuse_others = |metadata: std::fs::Metadata| {
        let kind = metadata.file_type();
        if kind.is_file() || kind.is_block_device() {
            return Ok(());
        }
        let sentence = format!("{} is neither a regular file nor a block device", path.display());
        Err(io::Error::new(io::ErrorKind::InvalidInput, sentence))
    };
    refuse_others(std::fs::metadata(path)?)?;
    // Whoever may exchange it can do so between the two looks: the second one is at what was opened, without waiting for it.
    let flags = libc::O_NONBLOCK | libc::O_NOCTTY | libc::O_CLOEXEC;
    let file = OpenOptions::new().read(true).write(is_writable).custom_flags(flags).open(path)?;
    refuse_others(file.metadata()?)?;
    rustix::fs::fcntl_setfl(&file, rustix::fs::fcntl_getfl(&file)? & !rustix::fs::OFlags::NONBLOCK)?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_files_and_block_devices_are_opened_and_nothing_is_waited_for() {
        let directory = tempfile::tempdir().expect("a directory");
        let image = directory.path().join("image");
        std::fs::write(&image, [1; 512]).expect("written");
        let file = open(&image, true).expect("a file");
        let flags = rustix::fs::fcntl_getfl(&file).expect("its flags");
        assert!(!flags.contains(rustix::fs::OFlags::NONBLOCK), "requests are never told to come again");
        let pipe = directory.path().join("pipe");
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, 0o600.into(), 0).expect("a pipe");
        for other in [pipe.as_path(), directory.path(), Path::new("/dev/null")] {
            let error = open(other, false).expect_err("no image");
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{error}");
        }
        assert_eq!(open(&directory.path().join("none"), false).expect_err("nothing").kind(), io::ErrorKind::NotFound);
    }
}
