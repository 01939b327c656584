//! `amberlog recover --area DIR --give-up IMAGE`: what is held for an image that nobody can have any more goes.
//!
//! Whoever asks is told first what is lost, and says the image's exact name. Must never: give up what could be brought home, or what
//! somebody is about to use. Failure story: without the right name nothing is given up, and everything can be tried again.

use placement::{AreaDirectory, FailedLog, Finish, FinishError, GivenUp, Loss};
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

    /// Gives up what could not be finished of the image, if the person says so, and takes it out of what failed. `images` are what the caller
    /// has named. While somebody thinks about it an image may come back: all is tried once more after the answer, and only what fails as it
    /// did when he was asked goes.
    pub fn of_directory(&mut self, directory: &AreaDirectory, images: &[PathBuf], outcome: &mut Finish) -> GivenUp {
        let asked = self.take_meant(outcome);
        if asked.is_empty() {
            return GivenUp::default();
        }
        self.is_found = true;
        let losses = match losses(directory, &asked) {
            Ok(losses) => losses,
            Err(error) => {
                outcome.failed.extend(asked);
                return GivenUp { losses: Vec::new(), unfinished: Some(error) };
            }
        };
        if let Some(sentence) = needed(directory, &asked).or_else(|| self.ask(&asked, &losses)) {
            outcome.failed.extend(followed(asked, &sentence));
            return GivenUp::default();
        }
        match placement::finish_directory_into(directory, images) {
            Ok(again) => {
                outcome.finished.extend(again.finished);
                outcome.failed = again.failed;
            }
            Err(error) => {
                outcome.failed.extend(asked);
                return GivenUp { losses: Vec::new(), unfinished: Some(error) };
            }
        }
        let now = self.take_meant(outcome);
        if now.is_empty() {
            return GivenUp::default();
        }
        let is_as_asked = now.iter().all(|failed| asked.iter().any(|asked| is_same(failed, asked)));
        let has_changed = || {
            let is_less = self::losses(directory, &now).is_ok_and(|now| now.iter().all(|loss| losses.contains(loss)));
            (!is_as_asked || !is_less).then(|| {
                "nothing was given up, as it is not as it was when you were asked: run the same again".to_owned()
            })
        };
        if let Some(sentence) = needed(directory, &now).or_else(has_changed) {
            outcome.failed.extend(followed(now, &sentence));
            return GivenUp::default();
        }
        placement::give_up(directory, &now.iter().collect::<Vec<_>>()).unwrap_or_else(|error| {
            outcome.failed.extend(now);
            GivenUp { losses: Vec::new(), unfinished: Some(error) }
        })
    }

    /// Takes what is meant out of what failed.
    fn take_meant(&self, outcome: &mut Finish) -> Vec<FailedLog> {
        let (meant, others) =
            std::mem::take(&mut outcome.failed).into_iter().partition(|failed| failed.is_of(&self.image));
        outcome.failed = others;
        meant
    }

    /// Why nothing is given up, unless somebody says the name.
    fn ask(&self, meant: &[FailedLog], losses: &[Loss]) -> Option<String> {
        (!self.is_confirmed(meant, losses)).then(|| {
            format!(
                "nothing was given up: that is not the image's exact name, which is {} (standard input is read for it)",
                self.image.display()
            )
        })
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

fn losses(directory: &AreaDirectory, failed: &[FailedLog]) -> Result<Vec<Loss>, FinishError> {
    placement::losses(directory, &failed.iter().collect::<Vec<_>>())
}

fn is_same(one: &FailedLog, other: &FailedLog) -> bool {
    (&one.image, &one.journal, one.offset) == (&other.image, &other.journal, other.offset)
        && one.error.to_string() == other.error.to_string()
}

/// Why nothing of these may be given up, whatever somebody says.
fn needed(directory: &AreaDirectory, meant: &[FailedLog]) -> Option<String> {
    if meant.iter().any(|failed| matches!(failed.error, FinishError::InUse(_))) {
        return Some("nothing was given up, as whoever uses the image may need it".to_owned());
    }
    let fits = meant.iter().find_map(FailedLog::fits)?.display();
    let at = directory.path().display();
    Some(format!(
        "nothing was given up: {fits} carries the mark of what is held, and 'amberlog recover --area {at} --image {fits}' brings it home; \
         with --give-up beside that --image, what cannot be brought home is given up"
    ))
}

fn followed(failed: Vec<FailedLog>, sentence: &str) -> impl Iterator<Item = FailedLog> + use<'_> {
    failed.into_iter().map(move |mut failed| {
        failed.error = failed.error.followed_by(sentence);
        failed
    })
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
    match (loss.transactions, loss.blocks) {
        (Some(1), Some(blocks)) => format!("1 transaction with {blocks} blocks of {place}"),
        (Some(transactions), Some(blocks)) => format!("{transactions} transactions with {blocks} blocks of {place}"),
        (_, Some(blocks)) => {
            format!("{blocks} blocks of the journal of {place} (how many transactions cannot be told without it)")
        }
        (_, None) => format!("what is held of the journal of {place} (how much cannot be told: its files are damaged)"),
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
