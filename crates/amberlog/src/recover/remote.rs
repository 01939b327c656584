//! `amberlog recover --disk IMAGE --remote HOST:PORT/NAME`: fetch the live log from a journal server and replay it.

use super::{RecoverArgs, code_of, refusal_json, sentence, value};
use command_line::print_line;
use command_line::remote_options::RemoteName;
use placement::{RemoteOptions, RemoteRecovered, recover_remote_image};
use recovery::{Access, Error, Report, Status};
use serde_json::json;
use std::path::Path;
use std::process::ExitCode;

/// Runs the command.
pub fn run(args: &RecoverArgs, disk: &Path, remote: &RemoteName) -> ExitCode {
    let (dry_run, as_json) = (args.dry_run, args.json);
    let Some(name) = &remote.name else {
        crate::exit::say(
            "amberlog recover",
            format_args!("which journal? --remote HOST:PORT/NAME; nothing was changed"),
        );
        return ExitCode::from(crate::exit::USAGE);
    };
    match recover(args, disk, (&remote.address, name)) {
        Ok(recovered) => {
            if !dry_run {
                placement::sweep_after(disk);
            }
            let mut total = Report::default();
            for one in &recovered {
                total.add(&one.report);
                for note in &one.report.notes {
                    crate::exit::say("amberlog recover", format_args!("{}: {note}", disk.display()));
                }
                if !as_json {
                    let from = one.epoch.map_or("from storage".to_owned(), |epoch| format!("epoch {epoch}"));
                    print_line!("{}, journal {}, {from}: {}", disk.display(), one.name, sentence(&one.report, dry_run));
                }
            }
            if as_json {
                let mut object = value(&total);
                object["schema"] = json!(1);
                object["epochs"] = json!(recovered.iter().map(|one| one.epoch).collect::<Vec<_>>());
                if dry_run {
                    object["dry_run"] = json!(true);
                }
                print_line!("{object}");
            } else if recovered.is_empty() {
                print_line!("{}: no journal", disk.display());
            }
            if total.status == Status::Damaged { ExitCode::FAILURE } else { ExitCode::SUCCESS }
        }
        Err(error) => {
            crate::exit::say("amberlog recover", format_args!("{}: {error}", disk.display()));
            if as_json {
                print_line!("{}", refusal_json(&error));
            }
            ExitCode::from(code_of(&error))
        }
    }
}

fn recover(args: &RecoverArgs, disk: &Path, (address, name): (&str, &str)) -> Result<Vec<RemoteRecovered>, Error> {
    let (journal, dry_run) = (args.journal.as_deref(), args.dry_run);
    let access = if dry_run { Access::Read } else { Access::Write };
    let image = args.format.open(disk, access)?;
    super::refuse_owed(disk, journal, super::Named::Server)?;
    let journal = journal.map(|path| super::open_journal(args.format, path, &image, access)).transpose()?;
    let options = RemoteOptions { client: args.trust.client(address), name: name.to_owned() };
    recover_remote_image(&image, journal.as_ref(), &options, dry_run, false)
}
