//! `amberlog recover --disk IMAGE --nvm PATH`: bring home what a region of NVM holds for an image.

use super::{code_of, refusal_json, sentence, value};
use nvm_journal::medium::{OpenOptions, RegionChoice};
use placement::recover_image;
use recovery::{Access, Disk, Error, Report, Status};
use serde_json::json;
use std::path::Path;
use std::process::ExitCode;

/// Runs the command.
pub fn run(disk: &Path, nvm: &Path, region: RegionChoice, dry_run: bool, as_json: bool) -> ExitCode {
    match recover(disk, nvm, region, dry_run) {
        Ok(report) => {
            for note in &report.notes {
                eprintln!("amberlog recover: {}: {note}", disk.display());
            }
            if as_json {
                let mut object = value(&report);
                object["schema"] = json!(1);
                if dry_run {
                    object["dry_run"] = json!(true);
                }
                println!("{object}");
            } else if report.status == Status::None {
                println!("{}: the region holds nothing", disk.display());
            } else {
                println!("{}: {}", disk.display(), sentence(&report, dry_run));
            }
            if report.status == Status::Damaged { ExitCode::FAILURE } else { ExitCode::SUCCESS }
        }
        Err(error) => {
            eprintln!("amberlog recover: {}: {error}", disk.display());
            if as_json {
                println!("{}", refusal_json(&error));
            }
            ExitCode::from(code_of(&error))
        }
    }
}

fn recover(disk: &Path, nvm: &Path, region: RegionChoice, dry_run: bool) -> Result<Report, Error> {
    let access = if dry_run { Access::Read } else { Access::Write };
    let image = Disk::open(disk, access)?;
    let options = OpenOptions { region, ..OpenOptions::new(nvm) };
    Ok(recover_image(&image, options, access)?.map(|finished| finished.recovery).unwrap_or_default())
}
