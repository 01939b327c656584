//! `amberlog recover --area DIR --give-up IMAGE`: what is held for an image that nobody can have any more goes.
//!
//! Whoever asks is told first what is lost, and says the image's exact name. Must never: give up what could be brought home, or what
//! somebody is about to use. Failure story: without the right name nothing is given up, and everything can be tried again.

use placement::{AreaDirectory, FailedLog, Finish, FinishError, Loss};
use std::ffi::OsStr;
use std::io::{BufRead, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// No image has a longer name (PATH_MAX).
const NAME_BYTES_MAX: u64 = 4096;

/// What a person wishes to give up.
pub struct GivingUp {
    image: PathBuf,
    /// Something that is held for it was found, whatever came of it.
    is_found: bool,
}

impl GivingUp {
    /// An image, by the name that it had.
    pub fn of(image: &Path) -> Self {
        GivingUp { image: std::path::absolute(image).unwrap_or_else(|_| image.to_owned()), is_found: false }
    }

    /// Gives up what could not be finished of the image, if the person says so, and takes it out of what failed.
    ///
    /// # Errors
    /// When it could not be taken out of the directory.
    pub fn of_directory(&mut self, directory: &AreaDirectory, outcome: &mut Finish) -> Result<Vec<Loss>, FinishError> {
        let (meant, others): (Vec<_>, Vec<_>) =
            std::mem::take(&mut outcome.failed).into_iter().partition(|failed| failed.is_of(&self.image));
        outcome.failed = others;
        if meant.is_empty() {
            return Ok(Vec::new());
        }
        self.is_found = true;
        let losses = placement::losses(directory, &meant.iter().collect::<Vec<_>>())?;
        let refused = match meant.iter().find(|failed| matches!(failed.error, FinishError::InUse(_))) {
            Some(_) => Some("nothing was given up, as whoever uses the image may need it".to_owned()),
            None => (!self.is_confirmed(&meant, &losses)).then(|| {
                format!(
                    "nothing was given up: that is not the image's exact name, which is {} (standard input is read for it)",
                    self.image.display()
                )
            }),
        };
        if let Some(sentence) = refused {
            outcome.failed.extend(meant.into_iter().map(|mut failed| {
                failed.error = failed.error.followed_by(&sentence);
                failed
            }));
            return Ok(Vec::new());
        }
        placement::give_up(directory, &meant.iter().collect::<Vec<_>>())?;
        Ok(losses)
    }

    /// Says what is lost, and asks for the name.
    fn is_confirmed(&self, meant: &[FailedLog], losses: &[Loss]) -> bool {
        let errors = meant.iter().map(|failed| failed.error.to_string());
        for sentence in errors.chain(losses.iter().map(would_be)) {
            crate::exit::say("amberlog recover", format_args!("{sentence}"));
        }
        crate::exit::say("amberlog recover", format_args!("to give that up, type the image's exact name:"));
        let _ = std::io::stderr().flush();
        let mut typed = Vec::new();
        let read = std::io::Read::take(std::io::stdin().lock(), NAME_BYTES_MAX).read_until(b'\n', &mut typed);
        read.is_ok() && is_name(&typed, &self.image)
    }

    /// Why there was nothing to give up, where there was nothing.
    pub fn unmet<'f>(self, area: &Path, mut finished: impl Iterator<Item = &'f Path>) -> Option<FinishError> {
        let mut is_home = || finished.any(|image| *image == self.image);
        if self.is_found || is_home() {
            return None;
        }
        Some(FinishError::Refused(format!(
            "{} has nothing that is held for {} and cannot be brought home: nothing was given up",
            area.display(),
            self.image.display()
        )))
    }
}

/// Whether somebody has typed an image's name, and nothing else.
fn is_name(typed: &[u8], image: &Path) -> bool {
    OsStr::from_bytes(typed.strip_suffix(b"\n").unwrap_or(typed)) == image.as_os_str()
}

/// What a log has.
fn what(loss: &Loss) -> String {
    let place = match (&loss.journal, loss.offset) {
        (Some(journal), _) => format!("{}, whose journal is on {}", loss.image.display(), journal.display()),
        (None, 0) => loss.image.display().to_string(),
        (None, offset) => format!("{}, file system at byte {offset}", loss.image.display()),
    };
    match loss.transactions {
        Some(1) => format!("1 transaction with {} blocks of {place}", loss.blocks),
        Some(transactions) => format!("{transactions} transactions with {} blocks of {place}", loss.blocks),
        None => format!(
            "{} blocks of the journal of {place} (how many transactions cannot be told without it)",
            loss.blocks
        ),
    }
}

fn would_be(loss: &Loss) -> String {
    format!(
        "lost for good would be {}; a file system that comes back without them needs 'e2fsck -f' before anybody uses it",
        what(loss)
    )
}

/// What is said when it is done.
pub fn done(loss: &Loss) -> String {
    format!("given up: {}", what(loss))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_exact_name_counts() {
        let image = Path::new("/srv/a b.img");
        assert!(is_name(b"/srv/a b.img\n", image) && is_name(b"/srv/a b.img", image));
        for typed in [
            &b""[..],
            b"\n",
            b"y\n",
            b"a b.img\n",
            b"/srv/a b.img \n",
            b" /srv/a b.img\n",
            b"/srv//a b.img\n",
            b"/srv/A b.img\n",
        ] {
            assert!(!is_name(typed, image), "{typed:?}");
        }
    }
}
