//! An image as whoever copies it reads it.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// What direct reads begin and end at multiples of: whatever storage has.
const ALIGNMENT: usize = 4096;

/// See the module.
///
/// A block device is written past the page cache while it is copied, and the kernel leaves in the cache what a read-ahead has brought
/// there beside a write that is under way (the end of an asynchronous direct write drops no pages; a file's does). So a device is read
/// past the cache as well.
#[derive(Debug)]
pub struct Source {
    file: File,
    is_past_cache: bool,
}

impl From<File> for Source {
    /// Through the cache.
    fn from(file: File) -> Self {
        Source { file, is_past_cache: false }
    }
}

impl Source {
    /// Of a file that was opened with `O_DIRECT`.
    pub fn past_cache(file: File) -> Self {
        Source { file, is_past_cache: true }
    }

    /// The file, to be asked where its data lies.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Reads all of a buffer.
    ///
    /// # Errors
    /// As [`FileExt::read_exact_at`].
    pub fn read_exact_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<()> {
        if self.is_past_cache {
            read_past_cache(&self.file, bytes, offset)
        } else {
            self.file.read_exact_at(bytes, offset)
        }
    }
}

/// Reads all of a buffer from a file that was opened with `O_DIRECT`, whatever its alignment.
///
/// # Errors
/// As [`FileExt::read_exact_at`].
pub fn read_past_cache(file: &File, bytes: &mut [u8], offset: u64) -> io::Result<()> {
    let into = (offset % ALIGNMENT as u64) as usize;
    let needed = into + bytes.len();
    let mut buffer = vec![0; needed.next_multiple_of(ALIGNMENT) + ALIGNMENT];
    let skip = buffer.as_ptr().align_offset(ALIGNMENT);
    let window = &mut buffer[skip..][..needed.next_multiple_of(ALIGNMENT)];
    let mut got = 0;
    while got < needed {
        match file.read_at(&mut window[got..], offset - into as u64 + got as u64) {
            // The end of the image lies in the last unit.
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(more) => got += more,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    bytes.copy_from_slice(&window[into..needed]);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{Advice, Mode, OFlags};
    use std::process::Command;
    use std::time::{Duration, Instant};

    #[test]
    fn a_source_past_the_cache_reads_the_same_and_leaves_nothing_there() -> io::Result<()> {
        let directory = tempfile::tempdir()?;
        let path = directory.path().join("image");
        let content: Vec<u8> = (0..300_000 + 512u32).map(|at| (at / 7) as u8).collect();
        std::fs::write(&path, &content)?;
        let cached = File::open(&path)?;
        cached.sync_all()?;
        let Ok(direct) = rustix::fs::open(&path, OFlags::RDONLY | OFlags::DIRECT | OFlags::CLOEXEC, Mode::empty())
        else {
            return Ok(());
        };
        if rustix::fs::fstatfs(&cached)?.f_type == 0x0102_1994 {
            // tmpfs, which is a cache and has no storage.
            return Ok(());
        }
        // Asked without reading: a read that may not wait begins to read ahead all the same, into the cache.
        let cached_pages = || -> io::Result<u64> {
            let found = Command::new("fincore").args(["-b", "-n", "-o", "PAGES"]).arg(&path).output()?;
            let pages = String::from_utf8_lossy(&found.stdout);
            pages.trim().parse().map_err(|_| io::Error::other(format!("what fincore says is no number: {found:?}")))
        };
        // A page that another processor has just written is not let go of at once.
        let deadline = Instant::now() + Duration::from_secs(30);
        while cached_pages()? > 0 {
            assert!(Instant::now() < deadline, "it stays in the cache");
            rustix::fs::fadvise(&cached, 0, None, Advice::DontNeed)?;
        }
        let source = Source::past_cache(direct.into());
        for (at, len) in [(0, 65_536), (65_536, 100), (70_001, 9000), (262_144, content.len() - 262_144)] {
            let mut bytes = vec![0; len];
            source.read_exact_at(&mut bytes, at as u64)?;
            assert!(bytes == content[at..at + len], "{len} bytes at {at}");
            assert_eq!(cached_pages()?, 0, "pages in the cache after {len} bytes at {at}");
        }
        assert!(source.read_exact_at(&mut [0; 4096], 300_000).is_err(), "beyond the end");
        Ok(())
    }
}
