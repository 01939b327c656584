//! `amberlog recover --disk IMAGE --nvm PATH`: bring home what a region of NVM holds for an image.

use super::{RecoverArgs, code_of, refusal_json, sentence, value};
use command_line::print_line;
use nvm_journal::medium::OpenOptions;
use placement::recover_image;
use recovery::{Access, Error, Report, Status};
use serde_json::json;
use std::path::Path;
use std::process::ExitCode;

/// Runs the command.
pub fn run(args: &RecoverArgs, disk: &Path, nvm: &Path) -> ExitCode {
    let (dry_run, as_json) = (args.dry_run, args.json);
    match recover(args, disk, nvm) {
        Ok(report) => {
            if !dry_run {
                placement::sweep_after(disk);
            }
            for note in &report.notes {
                crate::exit::say("amberlog recover", format_args!("{}: {note}", disk.display()));
            }
            if as_json {
                let mut object = value(&report);
                object["schema"] = json!(1);
                if dry_run {
                    object["dry_run"] = json!(true);
                }
                print_line!("{object}");
            } else if report.status == Status::None {
                print_line!("{}: the region holds nothing", disk.display());
            } else {
                print_line!("{}: {}", disk.display(), sentence(&report, dry_run));
            }
            if report.status == Status::Damaged { ExitCode::FAILURE } else { ExitCode::SUCCESS }
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

fn recover(args: &RecoverArgs, disk: &Path, nvm: &Path) -> Result<Report, Error> {
    let access = if args.dry_run { Access::Read } else { Access::Write };
    let image = args.format.open(disk, access)?;
    super::refuse_owed(disk, None, super::Named::Region)?;
    let options = OpenOptions { region: args.nvm_region, ..OpenOptions::new(nvm) };
    Ok(recover_image(&image, options, access)?.map(|finished| finished.recovery).unwrap_or_default())
}
