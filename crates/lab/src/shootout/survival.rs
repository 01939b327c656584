//! What survives: a guest acknowledges records one by one, something dies, and whoever comes next looks for every record that was acknowledged.

use super::contender::{Contender, FileSystem, Served};
use super::guest::{LIMIT, Stand};
use super::kinds::Death;
use super::{Conditions, Measured, ShootOut};
use crate::error::{Error, FileContext, Result};
use guest_kit::image::{self, FileSystem as Ext};
use guest_kit::{AtEnd, Guest, judge, program};
use std::time::{Duration, Instant};

/// Records that are acknowledged before anything dies.
const ENOUGH: u64 = 200;
const ENOUGH_QUICK: u64 = 40;
const JOURNAL_MIB: u32 = 64;
const STREAM: &str = "records";
const END_LIMIT: Duration = Duration::from_secs(120);

/// How long records are acknowledged at least before anything dies.
const OLD: Duration = Duration::from_secs(8);

/// Kills, restarts and judges.
pub(super) fn kill(options: &ShootOut, contender: &Contender, death: Death, _: &Conditions) -> Result<Measured> {
    let mut stand = Stand::new(options, contender)?;
    stand.storage.iter().for_each(test_storage::TestStorage::remember_unflushed);
    let script = format!(
        "set -e
         {mount}
         exec 5</dev/ttyS1
         guest-tools records --directory /mnt/records --stream {STREAM} --forever &
         read -r die <&5
         echo b >/proc/sysrq-trigger",
        mount = Stand::mount(contender),
    );
    let mut spec = stand.spec(contender, death.name(), script)?;
    spec.at_end = AtEnd::Stay;
    let mut guest = Guest::start(spec)?;
    let began = Instant::now();
    guest.wait_acknowledged(STREAM, if options.quick { ENOUGH_QUICK } else { ENOUGH }, LIMIT)?;
    // Who promises something for what is older than five seconds is to have something that is.
    std::thread::sleep(OLD.saturating_sub(began.elapsed()));
    if death == Death::Guest {
        guest.tell("die")?;
        guest.wait_end(END_LIMIT)?;
    } else {
        guest.kill_all()?;
    }
    let acknowledged = guest.final_report().acknowledged.get(STREAM).and_then(|stream| stream.last);
    guest.forgive();
    drop(guest);
    let acknowledged = acknowledged.ok_or_else(|| Error::Told("nothing was acknowledged".to_owned()))?;
    let mut words = Vec::new();
    if death == Death::Host {
        lose_the_host(&mut stand)?;
    }
    if !matches!(contender.file_system, FileSystem::Other(_)) {
        words.extend(look_after_it_as_a_boot_does(&mut stand, contender, death)?);
    }
    let found = look_for(&stand, contender, acknowledged)?;
    words.extend(found.1);
    let (expected, lost) = found.0;
    let damage =
        if matches!(contender.file_system, FileSystem::Other(_)) { Vec::new() } else { damage(&mut stand, contender)? };
    let verdict = match (lost, damage.is_empty()) {
        (0, true) => "everything".to_owned(),
        (lost, true) => format!("{lost} of {expected} lost"),
        (lost, false) => format!("{lost} of {expected} lost, file system damaged: {}", damage.join("; ")),
    };
    words.insert(0, verdict);
    let mut measured = Measured { words: words.join("; "), ..Measured::default() };
    measured.fields.extend([
        ("acknowledged".to_owned(), expected as f64),
        ("lost".to_owned(), lost as f64),
        ("damages".to_owned(), damage.len() as f64),
    ]);
    Ok(measured)
}

/// What the medium had not flushed is gone, and so is everything in the host's memory. Persistent memory and other hosts stay.
fn lose_the_host(stand: &mut Stand) -> Result<()> {
    let backing = stand.backing();
    if let Some(storage) = stand.storage.take() {
        storage.lose_power().at("take back what was not flushed of", &backing)?;
    }
    let memory = stand.memory.path().to_owned();
    for entry in std::fs::read_dir(&memory).at("list", &memory)? {
        let path = entry.at("list", &memory)?.path();
        let removed = if path.is_dir() { std::fs::remove_dir_all(&path) } else { std::fs::remove_file(&path) };
        removed.at("remove", &path)?;
    }
    stand.mount_medium()
}

/// What a distribution's boot does with ext4 before it mounts it; gives words on what it found. amberlog finishes its own work first.
fn look_after_it_as_a_boot_does(stand: &mut Stand, contender: &Contender, death: Death) -> Result<Vec<String>> {
    let mut words = Vec::new();
    if let Served::Amberlog(placement) = contender.served
        && (placement.starts_with("retain") || placement == "copy")
        && death == Death::Vmm
    {
        let area = stand.memory.path().to_owned();
        let mut recover = std::process::Command::new(program::workspace_binary("amberlog")?);
        program::run(recover.args(["recover", "--json", "--area"]).arg(&area), &[0])?;
        words.push("amberlog recover".to_owned());
    }
    if matches!(contender.served, Served::Amberlog("nvm" | "remote")) {
        // Its journal is elsewhere: amberlog brings it home when it serves the disk again, before anybody mounts it.
        return Ok(words);
    }
    let backing = stand.backing();
    stand.storage = None;
    if contender.file_system == FileSystem::Ext4TmpfsJournal && death == Death::Host {
        // Neither tune2fs nor e2fsck gives up a journal that is to be replayed and is not there.
        program::run(program::command("debugfs")?.args(["-w", "-R", "feature -needs_recovery"]).arg(&backing), &[0])?;
        program::run(program::command("tune2fs")?.args(["-f", "-O", "^has_journal"]).arg(&backing), &[0])?;
        words.push("its journal was lost".to_owned());
    }
    let check = |allowed: &[i32]| {
        let mut check = program::command("e2fsck")?;
        check.arg("-fy");
        if contender.file_system == FileSystem::Ext4TmpfsJournal && death != Death::Host {
            check.arg("-j").arg(stand.journal());
        }
        program::run(check.arg(&backing), allowed)
    };
    let mut output = check(&[0, 1, 2, 4, 8, 12])?;
    if output.status.code().is_some_and(|code| code >= 4) {
        // As e2fsck 1.47.0 does after every replay of a fast commit: a boot stops here, and somebody runs it again.
        words.push("e2fsck fails and has to be run again by hand".to_owned());
        output = check(&[0, 1, 2])?;
    }
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let repairs = text.lines().filter(|line| line.contains("? yes") || line.trim_end().ends_with("yes")).count();
    if repairs > 0 {
        words.push(format!("e2fsck repaired {repairs} things"));
    }
    if contender.file_system == FileSystem::Ext4TmpfsJournal && death == Death::Host {
        image::journal_device(&stand.journal(), JOURNAL_MIB, 4096)?;
        image::attach_journal(&Ext::whole(&backing), &stand.journal())?;
    }
    stand.mount_medium()?;
    Ok(words)
}

/// Another guest on the same disk looks for every record: how many there should be, how many are not; and words.
fn look_for(stand: &Stand, contender: &Contender, acknowledged: u64) -> Result<((u64, u64), Option<String>)> {
    let script = format!(
        "set -e
         {mount}
         guest-tools records --directory /mnt/records --verify {acknowledged} >/tmp/result || fail verify
         umount /mnt
         sed 's/^/mark result /' /tmp/result >/dev/ttyS1",
        mount = Stand::mount(contender),
    );
    let reported = Guest::run(stand.spec(contender, "afterwards", script)?, LIMIT)?;
    let result = reported.marks.iter().find_map(|mark| mark.strip_prefix("result "));
    let result = result.ok_or_else(|| Error::Told("the guest that looked for records told nothing".to_owned()))?;
    let number = |name: &str| {
        let word = result.split_whitespace().find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
        word.and_then(|word| word.parse::<u64>().ok())
    };
    match (number("expected"), number("faults")) {
        (Some(expected), Some(faults)) => Ok(((expected, faults), None)),
        _ => Err(Error::Told(format!("the guest that looked for records told '{result}'"))),
    }
}

/// What e2fsck finds of an ext4 that was mounted and unmounted since.
fn damage(stand: &mut Stand, contender: &Contender) -> Result<Vec<String>> {
    stand.storage = None;
    let mut file_system = Ext::whole(stand.backing());
    if contender.file_system == FileSystem::Ext4TmpfsJournal {
        file_system.external_journal = Some(stand.journal());
    }
    let verdict = judge::check(&file_system)?;
    Ok(verdict.problems.into_iter().take(3).collect())
}
