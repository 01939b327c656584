//! What survives: a guest acknowledges records one by one, something dies, and whoever comes next looks for every record that was acknowledged.

use super::contender::{Contender, FileSystem, Promise, Served, promise};
use super::guest::{Stand, limit};
use super::kinds::Death;
use super::{Measured, PROMISE_KEPT, ShootOut};
use crate::error::{Error, FileContext, Result};
use crate::samples::counted_so_far;
use guest_kit::image::{self, FileSystem as Ext};
use guest_kit::{AtEnd, Guest, judge, program};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use test_storage::TestStorage;

/// Records that are acknowledged before anything dies.
const ENOUGH: u64 = 200;
const ENOUGH_QUICK: u64 = 40;
const JOURNAL_MIB: u32 = 64;
const STREAM: &str = "records";
const END_LIMIT: Duration = Duration::from_secs(120);

/// How long records are acknowledged at least before anything dies: who promises something for what is older than five seconds is to have something
/// that is.
const OLD: Duration = Duration::from_secs(8);
/// Of who acknowledges a transaction before the flush of its appends: a record's are few, and few go to the region, where nothing is flushed.
const ALL_APPENDS_HOME: &str = ",nvm-append-home=0";
/// What is durable by age is so within the age and one write-out.
const SLACK: Duration = Duration::from_secs(1);

/// Kills, restarts and judges.
pub(super) fn kill(options: &ShootOut, contender: &Contender, death: Death) -> Result<Measured> {
    let mut stand = Stand::new(options, contender)?;
    stand.storage.iter().for_each(TestStorage::remember_unflushed);
    if contender.served.is_pipelined() {
        stand.more = ALL_APPENDS_HOME;
    }
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
    let told = acknowledged_for_long(&mut guest, if options.quick { ENOUGH_QUICK } else { ENOUGH }, limit(contender))?;
    stand.is_in_force_now(contender)?;
    if contender.served.is_pipelined() {
        went_before_their_flush(&counted_so_far(&stand.samples(), &contender.name)?)?;
    }
    let dies = Instant::now();
    if death == Death::Guest {
        guest.tell("die")?;
        let status = guest.wait_end(END_LIMIT)?;
        if !status.success() {
            return Err(guest.failure(&format!("QEMU or amberlog ended with {status}")).into());
        }
    } else {
        if death == Death::Host {
            stand.storage.iter().for_each(TestStorage::cut_power);
        }
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
    let promise = promise(contender.file_system, contender.mount, contender.served, death);
    let promised = match promise {
        Promise::Everything => Some(acknowledged),
        Promise::Older(age) => {
            let old = older_than(&told, dies, Duration::from_secs(age) + SLACK);
            Some(old.ok_or_else(|| Error::Told(format!("nothing was acknowledged {age} s before the death")))?)
        }
        Promise::AllButLast => {
            // Each record is made durable before the next one is begun: no two of them are of one transaction.
            let before = acknowledged.checked_sub(1);
            Some(before.ok_or_else(|| Error::Told("only one record was acknowledged".to_owned()))?)
        }
        Promise::Nothing => None,
    };
    let found = look_for(&stand, contender, acknowledged, promised)?;
    let damage =
        if matches!(contender.file_system, FileSystem::Other(_)) { Vec::new() } else { damage(&mut stand, contender)? };
    words.insert(0, found.verdict(promise, &damage));
    let mut measured = Measured { words: words.join("; "), ..Measured::default() };
    measured.fields.extend([
        ("acknowledged".to_owned(), found.expected as f64),
        ("lost".to_owned(), found.lost as f64),
        ("damages".to_owned(), damage.len() as f64),
    ]);
    measured.fields.extend(found.lowest_lost.map(|record| ("lowest_lost".to_owned(), record as f64)));
    measured.fields.extend(found.lowest_lost.map(|_| ("kept_behind_lost".to_owned(), found.kept_behind_lost as f64)));
    if let Some((record, lost)) = promised.zip(found.lost_of_promised) {
        let is_kept = found.breach(promise).is_none() && damage.is_empty();
        measured.fields.extend([
            ("promised_through".to_owned(), record as f64),
            ("lost_of_promised".to_owned(), lost as f64),
            (PROMISE_KEPT.to_owned(), f64::from(u8::from(is_kept))),
        ]);
    }
    Ok(measured)
}

/// An error where no transaction was acknowledged before the flush of its appends: a death would show nothing of those that are.
fn went_before_their_flush(counted: &BTreeMap<String, f64>) -> Result<()> {
    match counted.get("nvm_commits_before_flush") {
        Some(count) if *count > 0.0 => Ok(()),
        _ => Err(Error::Told("no transaction was acknowledged before the flush of its appends".to_owned())),
    }
}

/// Waits until enough records are acknowledged, and for long enough; gives when the host was told of which.
fn acknowledged_for_long(guest: &mut Guest, enough: u64, limit: Duration) -> Result<Vec<(Instant, u64)>> {
    let mut told: Vec<(Instant, u64)> = Vec::new();
    let problem = format!("{enough} were not acknowledged");
    let came = guest.await_report(&problem, limit, |reported| {
        if reported.exit_code.is_some() {
            // Nothing comes any more of a script that has ended.
            return Some(false);
        }
        let last = reported.acknowledged.get(STREAM)?.last?;
        if told.last().is_none_or(|(_, known)| *known < last) {
            told.push((Instant::now(), last));
        }
        (last >= enough && told.first().is_some_and(|(first, _)| first.elapsed() >= OLD)).then_some(true)
    })?;
    if came { Ok(told) } else { Err(guest.failure(&format!("{problem}: the script has ended")).into()) }
}

/// The last record that had been acknowledged for so long at a moment.
fn older_than(told: &[(Instant, u64)], at: Instant, age: Duration) -> Option<u64> {
    told.iter().rev().find(|(when, _)| at.saturating_duration_since(*when) >= age).map(|(_, record)| *record)
}

/// What whoever came next found of the acknowledged records.
#[derive(Debug, Default)]
struct Found {
    expected: u64,
    lost: u64,
    /// The first of them.
    lowest_lost: Option<u64>,
    /// Of what came behind that one, and the one that was being written with it: so many are there.
    kept_behind_lost: u64,
    /// Of those that the contender promises to keep; nothing where it promises none.
    lost_of_promised: Option<u64>,
}

impl Found {
    /// In which way what is promised was not kept, in words that go before the count of what is lost.
    fn breach(&self, promise: Promise) -> Option<String> {
        let lost = self.lost_of_promised.unwrap_or(0);
        match promise {
            Promise::Everything if lost > 0 => Some(String::new()),
            Promise::Older(age) if lost > 0 => Some(format!("{lost} lost that were older than {age} s; ")),
            Promise::AllButLast if lost > 0 => Some(format!("{lost} lost that were before the last one; ")),
            Promise::AllButLast if self.kept_behind_lost > 0 => {
                Some(format!("{} that came after a lost one are there; ", self.kept_behind_lost))
            }
            _ => None,
        }
    }

    fn verdict(&self, promise: Promise, damage: &[String]) -> String {
        let Found { expected, lost, lowest_lost, .. } = self;
        let mut words = if *lost == 0 { "everything".to_owned() } else { format!("{lost} of {expected} lost") };
        if let Some(record) = lowest_lost {
            words += &format!(", the first is record {record}");
        }
        match (self.breach(promise), promise) {
            (Some(breach), _) => words = format!("PROMISE BROKEN: {breach}{words}"),
            (None, Promise::Older(age)) if *lost > 0 => words += &format!(", none is older than {age} s"),
            (None, Promise::AllButLast) if *lost > 0 => words += ", which was the last one",
            (None, _) => {}
        }
        if !damage.is_empty() {
            words += &format!(", file system damaged: {}", damage.join("; "));
        }
        words
    }
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
    if contender.served.has_journal_elsewhere() {
        // Its journal is elsewhere: amberlog brings it home when it serves the disk again, before anybody mounts it.
        return Ok(words);
    }
    if contender.file_system == FileSystem::Ext4Writecache {
        // Without its cache it is no file system: the guest looks after it, once it has both. A cache that was lost begins anew.
        if death == Death::Host {
            stand.make_cache()?;
            words.push("its cache was lost".to_owned());
        }
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

/// Another guest on the same disk looks for every record that was acknowledged, for the first one that is not there, and for those that are `promised`.
fn look_for(stand: &Stand, contender: &Contender, acknowledged: u64, promised: Option<u64>) -> Result<Found> {
    let script = format!(
        "set -e
         look() {{
             guest-tools records --directory /mnt/records --verify $1 >/tmp/result || fail verify
             read -r line </tmp/result
             lost=${{line##*faults=}}
         }}
         {mount}
         look {acknowledged}
         result=$line first=none older=none behind=0
         if [ $lost -gt 0 ]; then
             low=0 high={acknowledged}
             while [ $low -lt $high ]; do
                 middle=$(((low + high) / 2))
                 look $middle
                 if [ $lost -gt 0 ]; then high=$middle; else low=$((middle + 1)); fi
             done
             first=$low
             look {next}
             behind=$(({next} + 1 - first - lost))
         fi
         if [ -n '{promised}' ]; then
             look {promised}
             older=$lost
         fi
         {unmount}
         mark result $result first=$first older=$older behind=$behind",
        next = acknowledged + 1,
        mount = Stand::mount_as_a_boot_does(contender),
        unmount = Stand::unmount(contender),
        promised = promised.map_or_else(String::new, |record| record.to_string()),
    );
    let reported = Guest::run(stand.spec(contender, "afterwards", script)?, limit(contender))?;
    let result = reported.marks.iter().find_map(|mark| mark.strip_prefix("result "));
    let result = result.ok_or_else(|| Error::Told("the guest that looked for records told nothing".to_owned()))?;
    let number = |name: &str| {
        let word = result.split_whitespace().find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
        word.and_then(|word| word.parse::<u64>().ok())
    };
    match (number("expected"), number("faults"), number("behind"), number("older")) {
        (Some(expected), Some(lost), Some(kept_behind_lost), older) if older.is_some() == promised.is_some() => {
            Ok(Found { expected, lost, lowest_lost: number("first"), kept_behind_lost, lost_of_promised: older })
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_older_than_an_age_is_what_was_told_before_it() {
        let begun = Instant::now();
        let at = |ms: u64| begun + Duration::from_millis(ms);
        let told = [(at(0), 3), (at(1900), 70), (at(2000), 80), (at(2100), 90)];
        assert_eq!(older_than(&told, at(8000), Duration::from_secs(6)), Some(80));
        assert_eq!(older_than(&told, at(5000), Duration::from_secs(6)), None);
    }

    #[test]
    fn a_verdict_is_of_the_promise() {
        let found = |lost: u64, older: Option<u64>| Found {
            expected: 400,
            lost,
            lowest_lost: (lost > 0).then(|| 400 - lost),
            kept_behind_lost: 0,
            lost_of_promised: older,
        };
        let say = |lost, older, promise| found(lost, older).verdict(promise, &[]);
        assert_eq!(say(0, Some(0), Promise::Everything), "everything");
        assert_eq!(say(3, None, Promise::Nothing), "3 of 400 lost, the first is record 397");
        assert_eq!(
            say(3, Some(0), Promise::Older(5)),
            "3 of 400 lost, the first is record 397, none is older than 5 s"
        );
        assert!(
            say(300, Some(2), Promise::Older(5)).starts_with("PROMISE BROKEN: 2 lost that were older than 5 s; 300 of")
        );
        assert!(say(1, Some(1), Promise::Everything).starts_with("PROMISE BROKEN: 1 of 400 lost"));
    }

    /// The last transaction may be gone, no other one, and nothing may be there of what came after it.
    #[test]
    fn all_but_the_last_is_a_prefix_without_a_gap() {
        let say = |lost: u64, older: u64, behind: u64| {
            let found = Found {
                expected: 400,
                lost,
                lowest_lost: (lost > 0).then_some(399),
                kept_behind_lost: behind,
                lost_of_promised: Some(older),
            };
            (found.breach(Promise::AllButLast).is_some(), found.verdict(Promise::AllButLast, &[]))
        };
        assert_eq!(say(0, 0, 0), (false, "everything".to_owned()));
        let last = "1 of 400 lost, the first is record 399";
        assert_eq!(say(1, 0, 0), (false, format!("{last}, which was the last one")));
        assert_eq!(
            say(2, 1, 0).1,
            "PROMISE BROKEN: 1 lost that were before the last one; 2 of 400 lost, the first is record 399"
        );
        assert_eq!(say(1, 0, 1), (true, format!("PROMISE BROKEN: 1 that came after a lost one are there; {last}")));
    }

    #[test]
    fn a_death_that_would_show_nothing_of_the_last_transaction_is_an_error() {
        let counted = |count: f64| BTreeMap::from([("nvm_commits_before_flush".to_owned(), count)]);
        assert!(went_before_their_flush(&counted(3.0)).is_ok());
        assert!(went_before_their_flush(&counted(0.0)).is_err() && went_before_their_flush(&BTreeMap::new()).is_err());
    }
}
