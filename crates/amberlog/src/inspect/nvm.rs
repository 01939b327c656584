//! `amberlog inspect --nvm PATH`: a region of NVM as it is: areas, versions, headers. Reads only and takes no lock.

use command_line::print_line;
use nvm_journal::medium::{MediumFile, OpenOptions, RegionChoice};
use nvm_journal::{Found, Header, HeaderKind, HeaderState, RESERVED_HEADERS};
use recovery::uuid_text;
use serde_json::{Value, json};
use std::path::Path;
use std::process::ExitCode;

/// Runs the command.
pub fn run(path: &Path, region: RegionChoice, verbose: bool, as_json: bool) -> ExitCode {
    match inspect(path, region, verbose, as_json) {
        Ok(None) => ExitCode::SUCCESS,
        Ok(Some(problem)) => {
            crate::exit::say("amberlog inspect", format_args!("{}: {problem}", path.display()));
            ExitCode::from(crate::exit::REFUSED)
        }
        Err(error) => {
            crate::exit::say("amberlog inspect", format_args!("{error}"));
            ExitCode::from(if error.is_refusal() { crate::exit::REFUSED } else { crate::exit::FAILED })
        }
    }
}

/// Shows the region. Gives a sentence when its contents do not match their checksums.
fn inspect(
    path: &Path,
    region: RegionChoice,
    verbose: bool,
    as_json: bool,
) -> Result<Option<String>, nvm_journal::Error> {
    let view = MediumFile::look(OpenOptions { region, ..OpenOptions::new(path) })?.map_for_reading()?;
    let bytes = view.bytes();
    let Some(found) = Found::read(bytes)? else {
        return Err(nvm_journal::Error::Refused(format!("{}: there is no NVM region of amberlog's", path.display())));
    };
    let damage = found.verify(bytes).err().map(|error| error.to_string());
    let mut object = json!({
        "schema": 1,
        "region": region.to_string(),
        "durability": view.durability().name(),
        "bytes": bytes.len(),
        "block_size": found.geometry.block_bytes,
        "blocks": found.geometry.blocks,
        "epoch": found.epoch,
        "owner": found.owner.as_ref().map(|owner| json!({
            "file_system": uuid_text(&owner.file_system),
            "journal": uuid_text(&owner.journal),
            "offset": owner.home_start,
        })),
        "damage": damage,
    });
    if found.owner.is_some() {
        add_areas(&mut object, &found);
    }
    if as_json {
        if verbose {
            object["headers"] = headers(bytes, &found);
        }
        print_line!("{object}");
    } else {
        print(path, &object, &found, bytes, verbose);
    }
    Ok(damage)
}

/// Headers of the commit area: of a transaction that is not committed, and will not be.
fn commit_headers(found: &Found) -> u32 {
    if found.commit.transaction == found.checkpoint.transaction {
        0
    } else {
        found.commit.end.saturating_sub(found.checkpoint.end)
    }
}

fn add_areas(object: &mut Value, found: &Found) {
    let commit = commit_headers(found);
    object["transactions"] = json!(found.checkpoint.transaction);
    object["last_sequence"] = json!(found.sequence);
    object["prepared"] = json!(found.prepared.is_some());
    object["areas"] = json!({
        "checkpoint": found.checkpoint.end,
        "commit": commit,
        "free": found.geometry.blocks.saturating_sub(found.checkpoint.end + commit),
    });
    object["versions"] = json!({
        "latest": found.latest.len(),
        "old": found.old,
        "revokes": found.revokes,
        "invalid": found.invalid,
        "reserved": found.reserved,
    });
}

/// Every valid header of the checkpoint area and of the reserve.
fn each_header<'a>(bytes: &'a [u8], found: &'a Found) -> impl Iterator<Item = (&'static str, u32, Header)> + 'a {
    let geometry = &found.geometry;
    let own = (0..found.checkpoint.end).map(|index| ("header", index, geometry.header(index)));
    let reserved = (0..RESERVED_HEADERS).map(|index| ("reserved", index, geometry.reserved(index)));
    own.chain(reserved).filter_map(|(what, index, at)| match Header::read(bytes, at, geometry) {
        HeaderState::Valid(header) => Some((what, index, header)),
        HeaderState::Invalid | HeaderState::Damaged => None,
    })
}

fn state(found: &Found, header: &Header) -> &'static str {
    match header.kind {
        HeaderKind::Revoke => "revoke",
        HeaderKind::Version if found.latest.get(&header.home) == Some(header) => "latest",
        HeaderKind::Version => "old",
    }
}

fn headers(bytes: &[u8], found: &Found) -> Value {
    each_header(bytes, found)
        .map(|(what, index, header)| {
            json!({"where": what, "index": index, "state": state(found, &header), "home": header.home,
                "transaction": header.transaction, "block": header.block})
        })
        .collect()
}

fn print(path: &Path, object: &Value, found: &Found, bytes: &[u8], verbose: bool) {
    let geometry = &found.geometry;
    print_line!("{}, region {}", path.display(), object["region"].as_str().unwrap_or_default());
    print_line!("  durability       {}", object["durability"].as_str().unwrap_or_default());
    print_line!(
        "  size             {} blocks of {} bytes, epoch {}",
        geometry.blocks,
        geometry.block_bytes,
        found.epoch
    );
    let Some(owner) = &found.owner else {
        print_line!("  owner            nobody: the region is free");
        return;
    };
    print_line!("  owner            file system {} at byte {}", uuid_text(&owner.file_system), owner.home_start);
    print_line!("                   journal {}", uuid_text(&owner.journal));
    print_line!("  committed        {} transactions, the last is {}", found.checkpoint.transaction, found.sequence);
    if found.prepared.is_some() {
        print_line!("                   and one more, if its appends are at home (nvm-pipelined)");
    }
    print_line!(
        "  areas            checkpoint {} headers, commit {}, free {}",
        found.checkpoint.end,
        commit_headers(found),
        object["areas"]["free"]
    );
    print_line!(
        "  headers          {} latest, {} old, {} revokes, {} invalid, {} in the reserve",
        found.latest.len(),
        found.old,
        found.revokes,
        found.invalid,
        found.reserved
    );
    if verbose {
        for (what, index, header) in each_header(bytes, found) {
            print_line!(
                "    {what} {index}: {} of block {}, transaction {}, journal block {}",
                state(found, &header),
                header.home,
                header.transaction,
                header.block
            );
        }
    }
}
