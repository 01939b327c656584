//! `amberlog inspect`: show a journal as it is. Reads only, and takes no lock, so that a disk in use can be looked at (what
//! is shown of one is not of a single moment).

mod nvm;

use crate::raw::FormatOption;
use clap::Args;
use command_line::print_line;
use extfs::{FileSystem, Journal};
use jbd2::inspect::{InspectedTransaction, inspect};
use jbd2::{Features, LogRead, Superblock, Verdict, Walk};
use nvm_journal::medium::RegionChoice;
use recovery::{Access, Disk, Error, FileLog, Located, LogBounds, LogPlace, locate, uuid_text};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Show a journal: superblock, transactions, tags, revokes, and where the log ends and why.
#[derive(Debug, Args)]
pub struct InspectArgs {
    /// Image or block device with the file system (or an external journal by itself).
    #[arg(long, value_name = "IMAGE", required_unless_present = "nvm")]
    disk: Option<PathBuf>,
    /// Image or block device with the external journal.
    #[arg(long, value_name = "IMAGE")]
    journal: Option<PathBuf>,
    /// A region of NVM instead: its areas, versions and headers.
    #[arg(long, value_name = "PATH", conflicts_with_all = ["disk", "journal"])]
    nvm: Option<PathBuf>,
    /// Which part of the file or devdax device, as 0/2.
    #[arg(long, value_name = "INDEX/COUNT", requires = "nvm", default_value = "0/1")]
    nvm_region: RegionChoice,
    #[command(flatten)]
    format: FormatOption,
    /// Show every tag and every revoked block.
    #[arg(long, short)]
    verbose: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Runs `amberlog inspect`.
pub fn run(args: InspectArgs) -> ExitCode {
    if let Some(nvm) = &args.nvm {
        return nvm::run(nvm, args.nvm_region, args.verbose, args.json);
    }
    let Some(disk) = &args.disk else { unreachable!("one of the two is required") };
    match inspect_disk(&args, disk) {
        Ok(journals) => {
            if args.json {
                print_line!(
                    "{}",
                    json!({"schema": 1, "journals": journals.iter().map(|one| &one.json).collect::<Vec<_>>()})
                );
            }
            for error in journals.iter().filter_map(|one| one.error.as_ref()) {
                crate::exit::say("amberlog inspect", format_args!("{}: {error}", disk.display()));
            }
            let mut is_left = false;
            let owed = match placement::owed(disk, args.journal.as_deref()) {
                Ok(owed) => {
                    // All of it is there.
                    is_left = matches!(owed, placement::Owed::Left(_));
                    owed.sentence(disk)
                }
                // Of what cannot be looked at nobody can say that it is nothing; that nothing is found is said above.
                Err(placement::FinishError::Failed(_)) if journals.is_empty() => None,
                Err(error) => Some(format!("whether it is owed something cannot be told: {error}")),
            };
            if let Some(sentence) = &owed {
                crate::exit::say("amberlog inspect", format_args!("{}: {sentence}", disk.display()));
            }
            let is_whole = (owed.is_none() || is_left) && journals.iter().all(|one| one.error.is_none());
            if is_whole { ExitCode::SUCCESS } else { ExitCode::from(3) }
        }
        Err(error) => {
            crate::exit::say("amberlog inspect", format_args!("{}: {error}", disk.display()));
            ExitCode::from(if error.is_refusal() { 3 } else { 1 })
        }
    }
}

/// What was found of one journal.
struct Shown {
    json: Value,
    /// Why it, or the rest of it, cannot be shown.
    error: Option<String>,
}

fn inspect_disk(args: &InspectArgs, path: &Path) -> Result<Vec<Shown>, Error> {
    let disk = args.format.open(path, Access::Look)?;
    let journal = args.journal.as_deref().map(|path| args.format.open(path, Access::Look)).transpose()?;
    let mut shown = Vec::new();
    for located in locate(&disk, journal.as_ref())? {
        shown.push(one(args, &disk, journal.as_ref(), &located));
    }
    Ok(shown)
}

fn one(args: &InspectArgs, disk: &Disk, journal: Option<&Disk>, located: &Located) -> Shown {
    let file_system = &located.file_system;
    let mut object = json!({
        "partition": file_system.partition,
        "file_system": {
            "uuid": uuid_text(&file_system.superblock.uuid),
            "block_size": file_system.superblock.block_size,
            "blocks": file_system.superblock.blocks_count,
            "needs_recovery": file_system.superblock.needs_recovery(),
            "is_journal_device": file_system.superblock.is_journal_device(),
        },
        "journal": place_json(located),
    });
    if !args.json {
        print_place(disk.path(), located);
    }
    let (log_disk, holder): (&Disk, &FileSystem) = match (&located.log, &file_system.journal, journal) {
        (LogPlace::Internal, ..) | (_, Journal::JournalDevice { .. }, _) => (disk, file_system),
        (LogPlace::Device(device), _, Some(journal)) => (journal, device),
        (LogPlace::NotUnderstood { reason }, ..) => return Shown { json: object, error: Some(reason.clone()) },
        _ => return Shown { json: object, error: None },
    };
    let error = log(args, log_disk, holder, &mut object).err();
    if let Some(error) = &error {
        object["error"] = json!(error);
    }
    Shown { json: object, error }
}

fn place_json(located: &Located) -> Value {
    match (&located.log, &located.file_system.journal) {
        (_, Journal::Internal { inode, blocks, extents, map_blocks }) => json!({
            "kind": "internal", "inode": inode, "blocks": blocks, "map_blocks": map_blocks,
            "extents": extents.iter().map(|e| json!({"log": e.log, "physical": e.physical, "count": e.count})).collect::<Vec<_>>(),
        }),
        (_, Journal::External { uuid }) => json!({"kind": "external", "uuid": uuid_text(uuid)}),
        (_, Journal::JournalDevice { .. }) => json!({"kind": "device"}),
        (_, Journal::None) => json!({"kind": "none"}),
        (_, Journal::NotUnderstood { reason, .. }) => json!({"kind": "not understood", "reason": reason}),
    }
}

fn print_place(path: &Path, located: &Located) {
    let file_system = &located.file_system;
    let superblock = &file_system.superblock;
    let partition = file_system.partition.map_or(String::new(), |number| format!(", partition {number}"));
    print_line!("{}{partition}", path.display());
    print_line!(
        "  file system      {}, {} blocks of {} bytes{}",
        uuid_text(&superblock.uuid),
        superblock.blocks_count,
        superblock.block_size,
        if superblock.needs_recovery() { ", needs recovery" } else { "" }
    );
    match &file_system.journal {
        Journal::None => print_line!("  journal          none"),
        Journal::Internal { inode, blocks, extents, .. } => {
            print_line!("  journal          inode {inode}, {blocks} blocks in {} extents", extents.len());
        }
        Journal::External { uuid } => {
            let missing = if matches!(located.log, LogPlace::Missing { .. }) { "; give it with --journal" } else { "" };
            print_line!("  journal          external, UUID {}{missing}", uuid_text(uuid));
        }
        Journal::JournalDevice { .. } => print_line!("  journal          this is an external journal"),
        Journal::NotUnderstood { reason, .. } => print_line!("  journal          not understood: {reason}"),
    }
}

/// Shows a log. The error is a sentence.
fn log(args: &InspectArgs, disk: &Disk, holder: &FileSystem, object: &mut Value) -> Result<(), String> {
    let mut log = FileLog::new(disk, holder);
    let bounds = LogBounds::new(holder);
    let mut raw = vec![0; holder.superblock.block_size as usize];
    let position = bounds.superblock_position;
    log.read(position, &mut raw).map_err(|error| format!("log block {position} cannot be read: {error}"))?;
    let superblock = Superblock::decode(&raw).map_err(|error| error.to_string())?;
    object["superblock"] = superblock_json(&superblock);
    if !args.json {
        print_superblock(&superblock);
    }
    let format = superblock.format().map_err(|error| error.to_string())?;
    if format.block_size != holder.superblock.block_size || format.length > bounds.blocks {
        return Err(format!(
            "the journal superblock says {} blocks of {} bytes, but there are {} of {}",
            format.length, format.block_size, bounds.blocks, holder.superblock.block_size
        ));
    }
    let mut transactions = Vec::new();
    if !args.json && !superblock.is_empty() {
        print_line!("  sequence    block  descriptors    tags  escaped  revokes  commit");
    }
    let walk = inspect(&mut log, &superblock, &format, true, &mut |transaction| {
        if args.json {
            transactions.push(transaction_json(transaction, args.verbose));
        } else {
            print_transaction(transaction, args.verbose);
        }
    });
    object["transactions"] = Value::Array(transactions);
    let walk = walk.map_err(|error| format!("{error}; it cannot be replayed"))?;
    object["end"] = json!({
        "position": walk.end_position,
        "sequence": walk.end_sequence,
        "committed": walk.transactions(),
        "reason": walk.end.to_string(),
        "failed_commit": walk.failed_commit,
    });
    if !args.json {
        print_end(&walk);
    }
    Ok(())
}

fn superblock_json(superblock: &Superblock) -> Value {
    json!({
        "version": superblock.version,
        "block_size": superblock.block_size,
        "blocks": superblock.maxlen,
        "first": superblock.first,
        "sequence": superblock.sequence,
        "start": superblock.start,
        "errno": superblock.errno,
        "compat": superblock.features.compat,
        "incompat": superblock.features.incompat,
        "ro_compat": superblock.features.ro_compat,
        "features": feature_names(superblock),
        "uuid": uuid_text(&superblock.uuid),
        "users": superblock.nr_users,
        "fast_commit_blocks": superblock.num_fc_blocks,
        "head": superblock.head,
        "checksum": superblock.checksum,
        "checksum_ok": has_checksum(superblock).then_some(superblock.checksum == superblock.checksum_computed),
    })
}

fn has_checksum(superblock: &Superblock) -> bool {
    superblock.features.has(Features::CSUM_V2 | Features::CSUM_V3)
}

fn feature_names(superblock: &Superblock) -> Vec<String> {
    const NAMES: [(u32, &str); 6] = [
        (Features::REVOKE, "revoke"),
        (Features::WIDE, "64bit"),
        (Features::ASYNC_COMMIT, "async_commit"),
        (Features::CSUM_V2, "csum_v2"),
        (Features::CSUM_V3, "csum_v3"),
        (Features::FAST_COMMIT, "fast_commit"),
    ];
    let features = superblock.features;
    let mut names = Vec::new();
    if features.compat & Features::COMPAT_CHECKSUM != 0 {
        names.push("csum_v1".to_owned());
    }
    names.extend(NAMES.iter().filter(|(bit, _)| features.has(*bit)).map(|(_, name)| (*name).to_owned()));
    let unknown = features.incompat & !Features::KNOWN_INCOMPAT;
    if unknown != 0 || features.ro_compat != 0 {
        names.push(format!("unknown (incompat {unknown:#x}, ro_compat {:#x})", features.ro_compat));
    }
    names
}

fn print_superblock(superblock: &Superblock) {
    let checksum = match (has_checksum(superblock), superblock.checksum == superblock.checksum_computed) {
        (false, _) => String::new(),
        (true, true) => format!(", checksum {:#010x} matches", superblock.checksum),
        (true, false) => format!(", checksum {:#010x} DOES NOT MATCH", superblock.checksum),
    };
    print_line!(
        "  superblock       version {}, {} blocks of {} bytes, log from block {}{checksum}",
        superblock.version,
        superblock.maxlen,
        superblock.block_size,
        superblock.first
    );
    print_line!("  features         {}", feature_names(superblock).join(" "));
    print_line!("  UUID             {}, {} users", uuid_text(&superblock.uuid), superblock.nr_users);
    let start =
        if superblock.is_empty() { "empty".to_owned() } else { format!("starts at block {}", superblock.start) };
    print_line!(
        "  log              {start}, sequence {}, head {}, errno {}",
        superblock.sequence,
        superblock.head,
        superblock.errno
    );
}

fn verdict_text(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Committed => "committed",
        Verdict::Stale => "stale",
        Verdict::Damaged => "damaged",
        Verdict::AfterDamage => "after damage",
    }
}

fn transaction_json(transaction: &InspectedTransaction, verbose: bool) -> Value {
    let data_damaged = transaction.tags.iter().filter(|tag| tag.checksum_ok == Some(false)).count();
    let mut object = json!({
        "sequence": transaction.sequence,
        "position": transaction.position,
        "descriptors": transaction.descriptors,
        "descriptors_damaged": transaction.descriptors_damaged,
        "tags": transaction.tags.len(),
        "tags_escaped": transaction.tags.iter().filter(|tag| tag.tag.escaped).count(),
        "data_damaged": data_damaged,
        "revoke_blocks": transaction.revoke_blocks,
        "revoke_blocks_damaged": transaction.revoke_blocks_damaged,
        "revokes": transaction.revoke_records,
        "commit": transaction.commit.map(|commit| json!({
            "position": commit.position, "seconds": commit.seconds, "nanoseconds": commit.nanoseconds,
            "verdict": verdict_text(commit.verdict),
        })),
    });
    if verbose {
        object["tag_list"] = transaction
            .tags
            .iter()
            .map(|tag| {
                json!({
                    "position": tag.position, "block": tag.tag.block, "escaped": tag.tag.escaped,
                    "deleted": tag.tag.deleted, "checksum": tag.tag.checksum, "checksum_ok": tag.checksum_ok,
                })
            })
            .collect();
        object["revoke_list"] = json!(transaction.revokes);
    }
    object
}

fn print_transaction(transaction: &InspectedTransaction, verbose: bool) {
    let commit = match transaction.commit {
        None => "not committed".to_owned(),
        Some(commit) => format!(
            "block {}, {}, {}",
            commit.position,
            date(commit.seconds, commit.nanoseconds),
            verdict_text(commit.verdict)
        ),
    };
    let data_damaged = transaction.tags.iter().filter(|tag| tag.checksum_ok == Some(false)).count();
    let mut damage = String::new();
    for (count, what) in [
        (transaction.descriptors_damaged as usize, "descriptors"),
        (transaction.revoke_blocks_damaged as usize, "revoke blocks"),
        (data_damaged, "data blocks"),
    ] {
        if count > 0 {
            damage += &format!(", {count} {what} DAMAGED");
        }
    }
    print_line!(
        "{:>10} {:>8} {:>12} {:>7} {:>8} {:>8}  {commit}{damage}",
        transaction.sequence,
        transaction.position,
        transaction.descriptors,
        transaction.tags.len(),
        transaction.tags.iter().filter(|tag| tag.tag.escaped).count(),
        transaction.revoke_records,
    );
    if verbose {
        for tag in &transaction.tags {
            let escaped = if tag.tag.escaped { ", escaped" } else { "" };
            let deleted = if tag.tag.deleted { ", deleted" } else { "" };
            let checksum = match tag.checksum_ok {
                None => String::new(),
                Some(true) => format!(", checksum {:#x} matches", tag.tag.checksum),
                Some(false) => format!(", checksum {:#x} DOES NOT MATCH", tag.tag.checksum),
            };
            print_line!(
                "             block {} in log block {}{escaped}{deleted}{checksum}",
                tag.tag.block,
                tag.position
            );
        }
        for block in &transaction.revokes {
            print_line!("             block {block} revoked");
        }
        let hidden = transaction.revoke_records.saturating_sub(transaction.revokes.len() as u64);
        if hidden > 0 {
            print_line!("             {hidden} more revoked");
        }
    }
}

fn print_end(walk: &Walk) {
    print_line!(
        "  end              at block {}, before transaction {}: {} ({} transactions committed)",
        walk.end_position,
        walk.end_sequence,
        walk.end,
        walk.transactions()
    );
    if let Some(sequence) = walk.failed_commit {
        print_line!("  damage           the commit of transaction {sequence} has a bad checksum");
    }
}

/// Seconds since 1970 as a date in UTC (the civil-from-days algorithm of H. Hinnant).
fn date(seconds: u64, nanoseconds: u32) -> String {
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    if days > 4_000_000 {
        return format!("{seconds} s");
    }
    let days = days as i64 + 719_468;
    let era = days / 146_097;
    let day_of_era = days % 146_097;
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_index = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_index + 2) / 5 + 1;
    let month = if month_index < 10 { month_index + 3 } else { month_index - 9 };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02}.{nanoseconds:09}")
}

#[cfg(test)]
mod tests {
    use super::date;

    #[test]
    fn dates() {
        assert_eq!(date(0, 0), "1970-01-01 00:00:00.000000000");
        assert_eq!(date(951_782_400, 5), "2000-02-29 00:00:00.000000005");
        assert_eq!(date(1_800_000_000, 0), "2027-01-15 08:00:00.000000000");
        assert_eq!(date(u64::MAX, 0), format!("{} s", u64::MAX));
    }
}
