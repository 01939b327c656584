//! Settings of the host that are other ones for a while: what each was is noted before it is changed, and written back in the end, the last one first.
//!
//! Failure story: one that cannot be written back is told on stderr, with what it was.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Writes a value into a file of the kernel's, which is there.
///
/// # Errors
/// What the kernel says of it.
pub fn write(path: &Path, value: &str) -> io::Result<()> {
    OpenOptions::new().write(true).truncate(true).open(path)?.write_all(value.as_bytes())
}

/// The value of a file of the kernel's; of a choice like `always [madvise] never` the one that is chosen.
///
/// # Errors
/// When it cannot be read.
pub fn read(path: &Path) -> io::Result<String> {
    let text = std::fs::read_to_string(path)?;
    let chosen = text.split_once('[').and_then(|(_, rest)| Some(rest.split_once(']')?.0));
    Ok(chosen.unwrap_or(text.trim()).to_owned())
}

/// Those that were changed. When it is dropped they are as they were.
#[derive(Debug, Default)]
pub struct Settings {
    former: Vec<(PathBuf, String)>,
}

impl Settings {
    /// Changes one.
    ///
    /// # Errors
    /// When it cannot be read or written; then it is as it was.
    pub fn set(&mut self, path: &Path, value: &str) -> io::Result<()> {
        let former = read(path)?;
        write(path, value)?;
        if !self.former.iter().any(|(known, _)| known == path) {
            self.former.push((path.to_owned(), former));
        }
        Ok(())
    }

    /// What each was that was changed, for whoever has to write it back by hand.
    pub fn former(&self) -> impl Iterator<Item = String> + '_ {
        self.former.iter().map(|(path, value)| format!("{} was {value}", path.display()))
    }
}

impl Drop for Settings {
    fn drop(&mut self) {
        for (path, value) in self.former.drain(..).rev() {
            if let Err(error) = write(&path, &value) {
                eprintln!("{} was {value}, and that cannot be written back: {error}", path.display());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_changed_is_as_it_was_afterwards() {
        let directory = tempfile::tempdir().unwrap();
        let (choice, number) = (directory.path().join("enabled"), directory.path().join("scan"));
        std::fs::write(&choice, "always [madvise] never\n").unwrap();
        std::fs::write(&number, "10000\n").unwrap();
        let mut settings = Settings::default();
        settings.set(&choice, "always").unwrap();
        settings.set(&number, "10").unwrap();
        settings.set(&number, "20").unwrap();
        assert!(settings.set(&directory.path().join("absent"), "1").is_err());
        assert!(!directory.path().join("absent").exists(), "no file is made");
        assert_eq!((read(&choice).unwrap(), read(&number).unwrap()), ("always".to_owned(), "20".to_owned()));
        assert_eq!(settings.former().count(), 2);
        drop(settings);
        assert_eq!((read(&choice).unwrap(), read(&number).unwrap()), ("madvise".to_owned(), "10000".to_owned()));
    }
}
