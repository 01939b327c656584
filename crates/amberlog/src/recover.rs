//! `amberlog recover`: bring a disk to its last committed state.
//!
//! Exit code 3 promises that nothing was changed anywhere; a disk on which one file system was recovered and another was
//! refused gives 1. What was left in an area, a region or on a server is brought home by what does so at a start, too: here is what a
//! person may ask for beside that, and what he is told (ARCHITECTURE.md, "One way to finish after a death").

mod area;
mod give_up;
mod nvm;
mod remote;

use crate::raw::FormatOption;
use clap::Args;
use command_line::print_line;
use command_line::remote_options::{RemoteName, RemoteTrust};
use nvm_journal::medium::RegionChoice;
use recovery::{Access, Disk, Error, FileSystemReport, Options, Report, Status, Unfinished};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Replay a jbd2 journal (internal or external) onto an image or block device.
#[derive(Debug, Args)]
pub struct RecoverArgs {
    /// Image or block device to recover: a whole-disk file system, or a disk with partitions.
    #[arg(long, value_name = "IMAGE", required_unless_present = "area")]
    disk: Option<PathBuf>,
    /// Image or block device with the external journal.
    #[arg(long, value_name = "IMAGE")]
    journal: Option<PathBuf>,
    /// File or devdax device with a region of NVM: bring home what it holds for the disk.
    #[arg(long, value_name = "PATH", conflicts_with_all = ["journal", "area"])]
    nvm: Option<PathBuf>,
    /// Which part of it, as 0/2.
    #[arg(long, value_name = "INDEX/COUNT", requires = "nvm", default_value = "0/1")]
    nvm_region: RegionChoice,
    /// Fetch the live log from a journal server first.
    #[arg(long, value_name = "HOST:PORT/NAME", conflicts_with_all = ["area", "nvm"])]
    remote: Option<RemoteName>,
    #[command(flatten)]
    trust: RemoteTrust,
    #[command(flatten)]
    format: FormatOption,
    /// Judge and verify everything, write nothing.
    #[arg(long)]
    dry_run: bool,
    /// Finish what a killed amberlog left instead: its VM's directory in tmpfs, or the one with all of them.
    #[arg(long, value_name = "DIR", conflicts_with_all = ["disk", "journal", "dry_run"])]
    area: Option<PathBuf>,
    /// With --area: an image that is owed something and is another file than it was, or that amberlog's own list does not
    /// have.
    #[arg(long = "image", value_name = "IMAGE", requires = "area")]
    images: Vec<PathBuf>,
    /// With --area: give up what is held for an image that is lost, or that it does not fit any more. What can be brought home is; what
    /// cannot is said, and the image's exact name is asked for on the standard input.
    #[arg(long, value_name = "IMAGE", requires = "area")]
    give_up: Option<PathBuf>,
    /// With --area: bring journals that were on a server home from the copies that lie there, without the server: it is lost. Where it is not,
    /// --remote is the way.
    #[arg(long, requires = "area", conflicts_with = "give_up")]
    from_copy: bool,
    /// Print the outcome as JSON.
    #[arg(long)]
    json: bool,
}

/// Runs `amberlog recover`.
pub fn run(args: RecoverArgs) -> ExitCode {
    let disk = match (&args.disk, &args.area) {
        (_, Some(area)) => {
            let wishes = area::Wishes {
                images: &args.images,
                give_up: args.give_up.as_deref(),
                from_copy: args.from_copy,
                json: args.json,
            };
            return area::run(area, &wishes);
        }
        (Some(disk), _) => disk,
        (None, None) => unreachable!("one of the two is required"),
    };
    if let Some(nvm) = &args.nvm {
        return nvm::run(&args, disk, nvm);
    }
    if let Some(remote) = &args.remote {
        return remote::run(&args, disk, remote);
    }
    match recover(&args, disk) {
        Ok(reports) => show(&args, disk, &reports),
        Err(error) => {
            crate::exit::say("amberlog recover", format_args!("{}: {error}", disk.display()));
            if args.json {
                print_line!("{}", refusal_json(&error));
            }
            ExitCode::from(code_of(&error))
        }
    }
}

/// Where the caller has named a place that a journal may be in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Named {
    Nowhere,
    Server,
    Region,
}

/// Refuses an image of which somebody holds what was committed, wherever else a journal of it may be. With a journal server an error number
/// that has no mark of a held log beside it is judged by what the server says, and with a region of NVM the mark of a region, too, by
/// what the region says.
fn refuse_owed(disk: &Path, journal: Option<&Path>, named: Named) -> Result<(), Error> {
    use placement::{HeldMark, MarkKind, Owed};
    let is_of_region = |mark: HeldMark| matches!(mark, HeldMark::Ours(MarkKind::Nvm, _));
    let is_judged_later = |log: &placement::LostLog| match (named, log.mark) {
        (Named::Nowhere, _) => false,
        (Named::Server, mark) => !matches!(mark, HeldMark::Ours(..)),
        (Named::Region, mark) => !matches!(mark, HeldMark::Ours(..)) || is_of_region(mark),
    };
    let owed = placement::owed(disk, journal);
    let has_region = matches!(&owed, Ok(Owed::Lost(lost)) if lost.iter().any(|log| is_of_region(log.mark)));
    // An image that says of no journal that it is in a region has nothing to get from one.
    if named != Named::Server && !(named == Named::Region && has_region) {
        refuse_on_server(disk, journal)?;
    }
    let owed = owed.map(|owed| match owed {
        Owed::Lost(lost) => {
            let lost: Vec<_> = lost.into_iter().filter(|log| !is_judged_later(log)).collect();
            if lost.is_empty() { Owed::Nothing } else { Owed::Lost(lost) }
        }
        owed => owed,
    });
    match owed.map(|owed| owed.sentence(disk)) {
        Ok(None) => {}
        Ok(Some(sentence)) => return Err(Error::Refused(sentence)),
        // An image on which nothing is found is judged later.
        Err(error @ (placement::FinishError::Refused(_) | placement::FinishError::Directory(_))) => {
            return Err(Error::Refused(error.to_string()));
        }
        Err(placement::FinishError::Damaged(sentence)) => return Err(Error::Damaged(sentence)),
        Err(placement::FinishError::Failed(_) | placement::FinishError::InUse(_)) => {}
    }
    if let Ok(Some(sentence)) = placement::held_by_another(disk) {
        return Err(Error::Refused(sentence));
    }
    Ok(())
}

/// Refuses an image whose journal is on a server.
fn refuse_on_server(disk: &Path, journal: Option<&Path>) -> Result<(), Error> {
    // What cannot be looked at is judged later.
    let Ok(Some(epoch)) = placement::remote_epoch_of_image(disk, journal) else { return Ok(()) };
    let epoch = epoch.map_or("its mark is damaged".to_owned(), |epoch| format!("epoch {epoch}"));
    Err(Error::Refused(format!(
        "the live journal is on a journal server ({epoch}), not on storage; nothing was changed: give --remote \
         HOST:PORT/NAME"
    )))
}

fn recover(args: &RecoverArgs, disk: &Path) -> Result<Vec<FileSystemReport>, Error> {
    let access = if args.dry_run { Access::Read } else { Access::Write };
    let path = disk;
    let disk = args.format.open(disk, access)?;
    refuse_owed(path, args.journal.as_deref(), Named::Nowhere)?;
    let journal = args.journal.as_deref().map(|path| open_journal(args.format, path, &disk, access)).transpose()?;
    recovery::recover_disk(&disk, journal.as_ref(), Options { dry_run: args.dry_run })
}

/// Opening the same image twice would look like somebody else using it.
fn open_journal(format: FormatOption, path: &Path, disk: &Disk, access: Access) -> Result<Disk, Error> {
    let peek = Disk::open(path, Access::Look)?;
    if peek.is_same(disk) {
        return Err(Error::Refused(format!("{} was given both as the disk and as its journal", path.display())));
    }
    format.open(path, access)
}

fn code_of(error: &Error) -> u8 {
    if error.is_refusal() { 3 } else { 1 }
}

fn show(args: &RecoverArgs, disk: &Path, reports: &[FileSystemReport]) -> ExitCode {
    let mut total = Report::default();
    for one in reports {
        let name = name(disk, one);
        match &one.result {
            Ok(report) => {
                total.add(report);
                for note in &report.notes {
                    crate::exit::say("amberlog recover", format_args!("{name}: {note}"));
                }
            }
            Err(error) => {
                crate::exit::say("amberlog recover", format_args!("{name}: {error}"));
            }
        }
    }
    if args.json {
        print_line!("{}", json_of(args, reports, &total));
    } else {
        for one in reports {
            if let Ok(report) = &one.result {
                print_line!("{}: {}", name(disk, one), sentence(report, args.dry_run));
            }
        }
    }
    exit_code(reports)
}

/// 0 when all is well; 3 when something was refused and nothing at all was changed; 1 otherwise.
fn exit_code(reports: &[FileSystemReport]) -> ExitCode {
    let is_changed =
        |report: &Report| matches!(report.status, Status::Recovered | Status::Damaged | Status::Materialised);
    let any_changed = reports.iter().filter_map(|one| one.result.as_ref().ok()).any(is_changed);
    let any_failed = reports.iter().any(|one| one.result.as_ref().is_err_and(|error| !error.is_refusal()));
    let any_refused = reports.iter().any(|one| one.result.is_err());
    let any_damaged =
        reports.iter().any(|one| one.result.as_ref().is_ok_and(|report| report.status == Status::Damaged));
    match (any_failed || any_damaged, any_refused, any_changed) {
        (false, false, _) => ExitCode::SUCCESS,
        (false, true, false) => ExitCode::from(3),
        _ => ExitCode::FAILURE,
    }
}

fn name(disk: &Path, one: &FileSystemReport) -> String {
    match one.partition {
        Some(number) => format!("{}, partition {number}", disk.display()),
        None => disk.display().to_string(),
    }
}

fn sentence(report: &Report, dry_run: bool) -> String {
    match report.status {
        Status::None => "no journal".to_owned(),
        Status::Clean => "clean, nothing to recover".to_owned(),
        Status::Materialised => "the log is in the journal's own place, for the guest to replay".to_owned(),
        Status::Recovered | Status::Damaged => {
            let would = if dry_run { "would be " } else { "" };
            let mut text = format!(
                "{} transactions: {} blocks ({} bytes) {would}written, {} revoked, in {:.3} s",
                report.transactions, report.blocks_written, report.bytes_written, report.revoked, report.seconds
            );
            if let (Some(first), Some(last)) = (report.first_sequence, report.last_sequence) {
                text += &format!(", sequence {first} to {last}");
            }
            text
        }
    }
}

fn json_of(args: &RecoverArgs, reports: &[FileSystemReport], total: &Report) -> Value {
    let mut object = value(total);
    object["schema"] = json!(1);
    say_unfinished(&mut object, total, reports.iter().filter_map(|one| Some(one.result.as_ref().err()?.outcome())));
    if args.dry_run {
        object["dry_run"] = json!(true);
    }
    let errors: Vec<String> = reports.iter().filter_map(|one| Some(one.result.as_ref().err()?.to_string())).collect();
    if !errors.is_empty() {
        object["errors"] = json!(errors);
    }
    if reports.len() > 1 {
        object["file_systems"] = reports
            .iter()
            .map(|one| {
                let mut entry = match &one.result {
                    Ok(report) => value(report),
                    Err(error) => json!({"status": error.outcome(), "error": error.to_string()}),
                };
                entry["partition"] = json!(one.partition);
                entry["uuid"] = json!(recovery::uuid_text(&one.uuid));
                entry
            })
            .collect();
    }
    object
}

fn refusal_json(error: &Error) -> Value {
    let mut object = value(&Report::default());
    object["schema"] = json!(1);
    object["errors"] = json!([error.to_string()]);
    object["status"] = json!(error.outcome());
    object
}

/// Has an outcome say how that ended which did not happen, the worst of it. "damaged" is only what is: whoever takes it for a reason to
/// repair a file system would give up a good log.
fn say_unfinished(object: &mut Value, total: &Report, unfinished: impl Iterator<Item = Unfinished>) {
    if let Some(worst) = unfinished.max().filter(|_| total.status != Status::Damaged) {
        object["status"] = json!(worst);
    }
}

fn value(report: &Report) -> Value {
    serde_json::to_value(report).expect("a report is plain numbers and text")
}
