//! `amberlog recover --area DIR`: finish what a killed amberlog left in its tmpfs files.
//!
//! DIR is one VM's directory, or the one in which `amberlog run` makes them: then all in it. A directory whose amberlog
//! or VM still lives is never touched. A directory is removed only when everything in it is finished; whatever fails
//! stays, can be tried again, and keeps its image from being served (the next `run` finds it too).

use crate::takeover::{PATIENCE, take_over};
use placement::{DirectoryError, Finish, FinishError, FinishedLog, finish_directory, registry};
use recovery::{Report, Status};
use serde_json::{Value, json};
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

/// What every directory of a VM holds (crate `placement`).
const LOCK: &str = "lock";

/// A directory and what came of it.
struct Attempt {
    path: PathBuf,
    result: Result<Finish, FinishError>,
}

/// Runs the command.
pub fn run(area: &Path, json: bool) -> ExitCode {
    let directories = match directories(area) {
        Ok(directories) => directories,
        Err(error) => {
            let sentence = format!("{}: {error}", area.display());
            eprintln!("amberlog recover: {sentence}");
            if json {
                println!("{}", object(&[], &[sentence]));
            }
            return ExitCode::FAILURE;
        }
    };
    let is_one = matches!(directories.as_slice(), [only] if only == area);
    let mut attempts = Vec::new();
    // One deadline for all: where many VMs live, they are not waited for one by one.
    let deadline = Instant::now() + PATIENCE;
    for path in directories {
        let result = finish(&path, deadline);
        if let (false, Err(FinishError::Directory(error @ DirectoryError::InUse { .. }))) = (is_one, &result) {
            // Asked for all that is left over: what lives is not.
            eprintln!("amberlog recover: {error} (left alone)");
            continue;
        }
        attempts.push(Attempt { path, result });
    }
    show(area, &attempts, json)
}

/// The directories of VMs that `area` means, in order of their names.
fn directories(area: &Path) -> io::Result<Vec<PathBuf>> {
    if area.join(LOCK).is_file() {
        return Ok(vec![area.to_owned()]);
    }
    let mut found = Vec::new();
    for entry in std::fs::read_dir(area)? {
        let path = entry?.path();
        if path.join(LOCK).is_file() {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

fn finish(path: &Path, deadline: Instant) -> Result<Finish, FinishError> {
    let directory = take_over(path, &registry(), deadline)?;
    let outcome = finish_directory(&directory, &[])?;
    if outcome.failed.is_empty() {
        directory.remove();
    }
    Ok(outcome)
}

fn show(area: &Path, attempts: &[Attempt], json: bool) -> ExitCode {
    let mut finished = Vec::new();
    let mut errors = Vec::new();
    let mut is_only_refused = true;
    for attempt in attempts {
        let failed: Vec<&FinishError> = match &attempt.result {
            Ok(outcome) => {
                finished.extend(&outcome.finished);
                outcome.failed.iter().map(|failed| &failed.error).collect()
            }
            Err(error) => vec![error],
        };
        for error in failed {
            is_only_refused &= matches!(error, FinishError::Refused(_));
            let sentence = format!("{}: {error}", attempt.path.display());
            eprintln!("amberlog recover: {sentence}");
            errors.push(sentence);
        }
    }
    for log in &finished {
        for note in &log.recovery.notes {
            eprintln!("amberlog recover: {}: {note}", name(log));
        }
    }
    if json {
        println!("{}", object(&finished, &errors));
    } else {
        for log in &finished {
            println!("{}: {}", name(log), super::sentence(&log.recovery, false));
        }
        if finished.is_empty() && errors.is_empty() {
            println!("{}: nothing was left to finish", area.display());
        }
    }
    let is_damaged = finished.iter().any(|log| log.recovery.status == Status::Damaged);
    match (errors.is_empty(), is_only_refused && finished.is_empty()) {
        (true, _) if !is_damaged => ExitCode::SUCCESS,
        (false, true) => ExitCode::from(crate::exit::REFUSED),
        _ => ExitCode::FAILURE,
    }
}

fn name(log: &FinishedLog) -> String {
    match log.offset {
        0 => log.image.display().to_string(),
        offset => format!("{}, file system at byte {offset}", log.image.display()),
    }
}

/// All logs together, and each.
fn object(finished: &[&FinishedLog], errors: &[String]) -> Value {
    let mut total = Report::default();
    for log in finished {
        total.add(&log.recovery);
    }
    if !errors.is_empty() {
        total.status = Status::Damaged;
    }
    let mut object = super::value(&total);
    object["schema"] = json!(1);
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
    }
    object
}
