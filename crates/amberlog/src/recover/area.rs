//! `amberlog recover --area DIR`: finish what a killed amberlog left in its tmpfs files.
//!
//! DIR is one VM's directory, or the one in which `amberlog run` makes them: then all in it. A directory whose amberlog
//! or VM still lives is never touched, nor is one that is not this user's alone (exit code 2). A directory is removed only when everything in it is finished; whatever fails
//! stays, can be tried again, and keeps its image from being served (the next `run` finds it too). What was done is reported whatever fails
//! after it, and exit code 3 is for nothing that was changed at all.

use super::give_up::{self, GivingUp};
use crate::takeover::Patience;
use command_line::print_line;
use own_files::OwnDirectory;
use placement::{
    AreaDirectory, DirectoryError, FailedLog, Finish, FinishError, FinishedLog, GivenUp, Loss, finish_copies,
    finish_directory_into, own_place, own_places,
};
use recovery::{Report, Status, Unfinished};
use rustix::fs::FileType;
use serde_json::{Value, json};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// What every directory of a VM holds (crate `placement`).
const LOCK: &str = "lock";

/// A directory and what came of it.
struct Attempt {
    path: PathBuf,
    outcome: Finish,
    /// What went wrong with the directory as a whole, perhaps after some of that.
    errors: Vec<FinishError>,
    /// What of it was given up.
    given_up: Vec<Loss>,
    /// What its images say of journals that are neither in it nor on them, and of which image.
    elsewhere: Vec<(PathBuf, String)>,
}

/// What is wished beside the directory.
pub struct Wishes<'a> {
    /// What the caller says may be owed something.
    pub images: &'a [PathBuf],
    /// An image of which what is held is given up.
    pub give_up: Option<&'a Path>,
    /// Journals of servers go home from their copies.
    pub from_copy: bool,
    /// The outcome is printed as JSON.
    pub json: bool,
}

/// Runs the command.
pub fn run(area: &Path, wishes: &Wishes<'_>) -> ExitCode {
    let json = wishes.json;
    own_files::keep_files_private();
    let mut giving_up = wishes.give_up.map(GivingUp::of);
    let (directories, is_one) = match directories(area) {
        Ok(found) => found,
        Err(error) => {
            let is_not_ours = matches!(error, own_files::Error::NotOurs { .. });
            crate::exit::say("amberlog recover", format_args!("{error}"));
            if json {
                let outcome = if is_not_ours { Unfinished::Refused } else { Unfinished::Failed };
                let entry = json!({"directory": area, "outcome": outcome, "error": error.to_string()});
                print_line!("{}", object(&[], &[error.to_string()], vec![(outcome, entry)]));
            }
            return ExitCode::from(if is_not_ours { crate::exit::USAGE } else { crate::exit::FAILED });
        }
    };
    let mut attempts = Vec::new();
    // Once for all: where many VMs live, they are not waited for one by one.
    let mut patience = Patience::default();
    let mut left_alone = 0;
    for (path, opened) in directories {
        if let Err(error) = opened {
            attempts.push(Attempt::of(path, vec![DirectoryError::from(error).into()]));
            continue;
        }
        let mut attempt = Attempt::of(path.clone(), Vec::new());
        match opened_again(&path, &mut patience) {
            Ok(directory) => finish(&directory, wishes, giving_up.as_mut(), &mut attempt),
            Err(FinishError::Directory(error @ DirectoryError::InUse { .. })) if !is_one => {
                // Asked for all that is left over: what lives is not.
                crate::exit::say("amberlog recover", format_args!("{error} (left alone)"));
                left_alone += 1;
                continue;
            }
            Err(error) => attempt.errors.push(error),
        }
        attempts.push(attempt);
    }
    let finished = || attempts.iter().flat_map(|attempt| &attempt.outcome.finished);
    let unmet = giving_up.and_then(|giving_up| giving_up.unmet(area, finished().map(|log| log.image.as_path())));
    show(area, &attempts, unmet.as_ref(), left_alone, json)
}

impl Attempt {
    fn of(path: PathBuf, errors: Vec<FinishError>) -> Self {
        Attempt { path, outcome: Finish::default(), errors, given_up: Vec::new(), elsewhere: Vec::new() }
    }

    fn take(&mut self, result: Result<Finish, FinishError>) {
        match result {
            Ok(Finish { finished, failed }) => {
                self.outcome.finished.extend(finished);
                self.outcome.failed.extend(failed);
            }
            Err(error) => self.errors.push(error),
        }
    }
}

/// A directory of a VM, or why it is not looked into.
type Found = (PathBuf, Result<(), own_files::Error>);

/// The directories of VMs that `area` means, in order of their names, and whether it is one itself.
fn directories(area: &Path) -> Result<(Vec<Found>, bool), own_files::Error> {
    let base = OwnDirectory::open_place(area)?;
    if base.kind(LOCK).is_some() {
        return Ok((vec![(base.path().to_owned(), Ok(()))], true));
    }
    let mut found = Vec::new();
    for name in base.names()? {
        if !matches!(base.kind(&name), Some(FileType::Directory | FileType::Symlink)) {
            continue;
        }
        // A VMM of another user may be let through.
        match base.directory_allowing(&name, placement::PASSED_THROUGH) {
            Ok(directory) if directory.kind(LOCK).is_some() => found.push((base.path().join(&name), Ok(()))),
            Ok(_) => {}
            // Ours, and others can have changed it: something may be owed in it.
            Err(error) if is_own_directory(&base.path().join(&name)) => {
                found.push((base.path().join(&name), Err(error)));
            }
            // Something of somebody else's, or a link, under a name as VMs have it.
            Err(error) if name.as_encoded_bytes().starts_with(b"vm-") => {
                crate::exit::say("amberlog recover", format_args!("{error} (left alone)"));
            }
            Err(_) => {}
        }
    }
    Ok((found, false))
}

fn is_own_directory(path: &Path) -> bool {
    let us = rustix::process::geteuid().as_raw();
    let is_vms = path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"vm-"));
    is_vms && path.symlink_metadata().is_ok_and(|metadata| metadata.is_dir() && metadata.uid() == us)
}

/// Opens and locks a directory that was found.
fn opened_again(path: &Path, patience: &mut Patience) -> Result<AreaDirectory, FinishError> {
    // The one that knows of it, if there are several.
    let knows = |registry: &PathBuf| placement::is_registered_in(registry, path);
    let registry = own_places()?.into_iter().find(knows).unwrap_or_else(own_place);
    Ok(patience.take_over(path, &registry)?)
}

fn finish(directory: &AreaDirectory, wishes: &Wishes<'_>, giving_up: Option<&mut GivingUp>, attempt: &mut Attempt) {
    attempt.take(finish_directory_into(directory, wishes.images));
    if wishes.from_copy {
        attempt.take(finish_copies(directory, wishes.images));
    }
    // As it is now: what a copy brought home of an image is one file system's, and another's may be elsewhere still.
    // And before anything is given up: the directory is about that image no more then.
    match placement::elsewhere(directory) {
        Ok(found) => attempt.elsewhere = found,
        Err(error) => crate::exit::say("amberlog recover", format_args!("{error}")),
    }
    if let (Some(giving_up), true) = (giving_up, attempt.errors.is_empty()) {
        let GivenUp { losses, unfinished } = giving_up.of_directory(directory, wishes.images, &mut attempt.outcome);
        attempt.given_up = losses;
        attempt.errors.extend(unfinished);
    }
    if attempt.outcome.failed.is_empty() && attempt.errors.is_empty() {
        placement::remove_finished(directory);
    }
}

fn show(area: &Path, attempts: &[Attempt], unmet: Option<&FinishError>, left_alone: usize, json: bool) -> ExitCode {
    let mut finished = Vec::new();
    let mut errors = Vec::new();
    let mut unfinished = Vec::new();
    let elsewhere: Vec<&(PathBuf, String)> = attempts.iter().flat_map(|attempt| &attempt.elsewhere).collect();
    let mut is_only_refused = true;
    let mut is_not_ours = false;
    let given_up: Vec<&Loss> = attempts.iter().flat_map(|attempt| &attempt.given_up).collect();
    if let Some(error) = unmet {
        crate::exit::say("amberlog recover", format_args!("{error}"));
        errors.push(error.to_string());
        unfinished.push((
            error.outcome(),
            json!({"directory": area, "outcome": error.outcome(), "error": error.to_string()}),
        ));
    }
    for attempt in attempts {
        finished.extend(&attempt.outcome.finished);
        let of_logs = attempt.outcome.failed.iter().map(|failed| (&failed.error, Some(failed)));
        for (error, log) in of_logs.chain(attempt.errors.iter().map(|error| (error, None::<&FailedLog>))) {
            is_not_ours |= matches!(error, FinishError::Directory(directory) if directory.is_not_ours());
            is_only_refused &= error.is_refusal();
            // Some sentences begin with where it is.
            let at = attempt.path.display().to_string();
            let sentence = error.to_string();
            let sentence = if sentence.starts_with(&at) { sentence } else { format!("{at}: {sentence}") };
            crate::exit::say("amberlog recover", format_args!("{sentence}"));
            let mut entry = json!({"directory": attempt.path, "outcome": error.outcome(), "error": sentence});
            if let Some(log) = log {
                (entry["image"], entry["offset"]) = (json!(log.image), json!(log.offset));
            }
            unfinished.push((error.outcome(), entry));
            errors.push(sentence);
        }
    }
    for log in &finished {
        for note in &log.recovery.notes {
            crate::exit::say("amberlog recover", format_args!("{}: {note}", name(log)));
        }
    }
    for (image, sentence) in &elsewhere {
        crate::exit::say("amberlog recover", format_args!("{}: {sentence}", image.display()));
    }
    if json {
        let mut object = object(&finished, &errors, unfinished);
        if !elsewhere.is_empty() {
            object["elsewhere"] =
                elsewhere.iter().map(|(image, sentence)| json!({"image": image, "sentence": sentence})).collect();
        }
        if !given_up.is_empty() {
            object["given_up"] = json!(given_up);
        }
        print_line!("{object}");
    } else {
        for loss in &given_up {
            print_line!("{}", give_up::done(loss));
        }
        for log in &finished {
            print_line!("{}: {}", name(log), super::sentence(&log.recovery, false));
        }
        if finished.is_empty() && given_up.is_empty() && errors.is_empty() && elsewhere.is_empty() {
            let others = match left_alone {
                0 => String::new(),
                1 => "; one VM's directory is in use, and was left alone".to_owned(),
                count => format!("; {count} VMs' directories are in use, and were left alone"),
            };
            print_line!("{}: nothing was left to finish{others}", area.display());
        }
    }
    let is_damaged = finished.iter().any(|log| log.recovery.status == Status::Damaged);
    match (errors.is_empty(), is_only_refused && finished.is_empty() && given_up.is_empty()) {
        (true, _) if !is_damaged => ExitCode::SUCCESS,
        (false, true) => ExitCode::from(crate::exit::REFUSED),
        (false, false) if is_not_ours && finished.is_empty() && given_up.is_empty() => {
            ExitCode::from(crate::exit::USAGE)
        }
        _ => ExitCode::FAILURE,
    }
}

fn name(log: &FinishedLog) -> String {
    match log.offset {
        0 => log.image.display().to_string(),
        offset => format!("{}, file system at byte {offset}", log.image.display()),
    }
}

/// All logs together, and each; and what was not finished, with how that ended.
fn object(finished: &[&FinishedLog], errors: &[String], unfinished: Vec<(Unfinished, Value)>) -> Value {
    let mut total = Report::default();
    for log in finished {
        total.add(&log.recovery);
    }
    let mut object = super::value(&total);
    object["schema"] = json!(1);
    super::say_unfinished(&mut object, &total, unfinished.iter().map(|(outcome, _)| *outcome));
    object["logs"] = finished
        .iter()
        .map(|log| {
            let mut entry = super::value(&log.recovery);
            entry["image"] = json!(log.image);
            entry["offset"] = json!(log.offset);
            entry
        })
        .collect();
    if !errors.is_empty() {
        object["errors"] = json!(errors);
        object["unfinished"] = unfinished.into_iter().map(|(_, entry)| entry).collect();
    }
    object
}
