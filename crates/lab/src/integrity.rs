//! Record updates cut short, and what became of the records: the 2012 paper's section 5.5, 120 times for each mode and size.
//!
//! A boot serves many crashes. The guest updates records until 4 MB have been sent to its disk; then the host stops QEMU in
//! its midst (`SIGSTOP`), lets amberlog end what it was asked for, stops it too, and copies the disk, and for a held journal the guest's
//! memory and amberlog's tables: what a `kill -9` of both would leave. The copy is recovered and judged; the guest goes on,
//! synchronises, and the next crash begins. The last one of each boot is a real crash of the guest's kernel (sysrq).
//!
//! Failure story: a guest that does not come so far fails its cell and is booted anew for the next; its console is kept. Only what the harness did
//! not bring about is a failure, and is measured again ([`crate::results::set_aside`]): a recovery that refuses, a file system that e2fsck finds fault
//! with, records that are gone are what was looked for, and are its result.

use crate::cell::Cell;
use crate::crash::{recover_area, recover_disk};
use crate::error::{Error, FileContext, Result};
use crate::measured::{CellResult, Parameters};
use crate::records::{CRASH_KIB, CRASHES_A_BOOT, IMAGE_MIB, JOURNAL_MIB, RECORDS_BY_PAGE, RECORDS_MIB};
use crate::rig::{Plan, Rig, Session, first_line, guest_seed, workload_of};
use guest_kit::image::{FileSystem, copy_image};
use guest_kit::{Signal, judge, program};
use guest_tools::record::RecordLayout;
use guest_tools::updates;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Numbers of updates that one crash can use up.
const UPDATES_A_CRASH: u64 = 10_000_000;
/// amberlog has ended what it was asked for when the modelled disk did nothing for so long.
const QUIET: Duration = Duration::from_millis(150);
const QUIET_LIMIT: Duration = Duration::from_secs(30);

impl Rig {
    /// Crashes a guest in the midst of record updates, recovers, and looks at every record.
    ///
    /// # Errors
    /// When the guest cannot be started. What fails later fails the cell's result.
    pub fn integrity(&mut self, cell: &Cell, parameters: &Parameters, parameter: Option<&str>) -> Result<CellResult> {
        let started = Instant::now();
        let mut session = match self.session.take().filter(|session| session.group == cell.group) {
            Some(session) => session,
            None => self.begin_session(cell, parameters, parameter)?,
        };
        let mut result = CellResult::empty(cell, parameters);
        let is_last = parameters.quick || cell.iteration % CRASHES_A_BOOT == CRASHES_A_BOOT - 1;
        let limit = self.time_limit(workload_of(cell)?, cell, parameters);
        let outcome = if is_last { session.kernel_crash(cell, limit) } else { session.power_cut(cell, limit) };
        match outcome.and_then(|left| session.judge(left)) {
            Ok((fields, found)) => {
                result.guests.push(fields);
                result.found = found;
                self.session = (!is_last).then_some(session);
            }
            Err(error) => {
                let console = self.keep_console(&mut session.running.guests[0], cell, 0);
                result.failure = Some(format!("{}{console}", first_line(&error.to_string())));
            }
        }
        result.wall_seconds = started.elapsed().as_secs_f64();
        result.load = crate::machine::load();
        Ok(result)
    }

    fn begin_session(&mut self, cell: &Cell, parameters: &Parameters, parameter: Option<&str>) -> Result<Session> {
        let record_kib = cell.group.parameter.max(1);
        let requests = match parameter {
            // As the kernels of 2005 wrote: each page a request of its own, which wait for the drive one by one.
            Some(RECORDS_BY_PAGE) => "echo 4 >/sys/block/vda/queue/max_sectors_kb || fail 'max_sectors_kb'",
            _ => "",
        };
        let seed = guest_seed(parameters, cell, 0);
        let words = format!("--file /mnt/records --record-kib {record_kib} --file-mib {RECORDS_MIB} --seed {seed}");
        let plan = Plan { image_mib: IMAGE_MIB, journal_mib: JOURNAL_MIB, ..Plan::new(cell, parameters, None) };
        let running = self.start(&plan, |_| {
            format!(
                "{requests}
                 {mount}
                 guest-tools updates {words} --phase create || fail create
                 sync
                 echo 3 >/proc/sys/vm/drop_caches
                 echo 1048576 >/proc/sys/vm/dirty_background_bytes
                 exec 5</dev/ttyS1
                 mark ready
                 while read -r how first <&5; do
                     if [ $how = crash ]; then
                         guest-tools updates {words} --phase run --crash-kib {CRASH_KIB} --first $first
                         fail 'the crash did not come'
                     fi
                     guest-tools updates {words} --phase run --crash-kib {CRASH_KIB} --first $first --tell --until /tmp/enough &
                     read -r next <&5
                     touch /tmp/enough
                     wait $! || fail updates
                     rm /tmp/enough
                     sync
                     mark again $first
                 done",
                mount = plan.mount(),
            )
        })?;
        running.set_pace();
        Ok(Session { running, group: cell.group.clone(), seed, record_kib, awaited: None })
    }
}

/// What a crash left, after its recovery.
struct Left {
    image: PathBuf,
    /// What recovery told; if it refused, or failed, that.
    recovered: Recovered,
}

/// What recovery told, or why it did not.
type Recovered = std::result::Result<BTreeMap<String, f64>, String>;

/// A recovery that ran and did not do its work is an outcome; one that could not be tried is a fault of the harness.
fn recovered(outcome: Result<BTreeMap<String, f64>>) -> Result<Recovered> {
    match outcome {
        Ok(fields) => Ok(Ok(fields)),
        Err(Error::Guest(error)) => ran(error).map(Err).map_err(Error::Guest),
        Err(error) => Err(error),
    }
}

/// What a program of the host that ran to its end said, where its end was not a good one.
fn ran(error: guest_kit::Error) -> std::result::Result<String, guest_kit::Error> {
    match error {
        guest_kit::Error::Program { ref status, .. } if status == "no start" => Err(error),
        guest_kit::Error::Program { command, status, output } => {
            let program = command.split_whitespace().next().unwrap_or_default().rsplit('/').next().unwrap_or_default();
            Ok(format!("{program} ended with {status}: {}", first_line(&output)))
        }
        other => Err(other),
    }
}

impl Session {
    /// What is left when host or VM stop at some instant: a copy, recovered.
    fn power_cut(&mut self, cell: &Cell, limit: Duration) -> Result<Left> {
        let first = self.begin(cell, limit)?;
        self.running.guests[0].tell(&format!("cut {first}"))?;
        self.running.guests[0].await_report("4 MB were not sent", limit, |reported| {
            let last = reported.acknowledged.get("limit")?.last?;
            (last == first).then_some(())
        })?;
        self.running.guests[0].freeze()?;
        self.wait_until_quiet()?;
        // amberlog too: a block that it lets go between the copies would be in neither.
        self.running.guests[0].signal(Signal::STOP)?;
        let left = self.copy_what_is_left();
        self.running.guests[0].signal(Signal::CONT)?;
        self.running.guests[0].thaw()?;
        self.running.guests[0].tell("next")?;
        // It synchronises while the copy is judged.
        self.awaited = Some(format!("again {first}"));
        let (image, area) = left?;
        let recovered = recovered(match &area {
            Some(area) => recover_area(area.path(), &image),
            None => recover_disk(&image),
        })?;
        Ok(Left { image, recovered })
    }

    /// Waits until the guest is ready for the next crash; gives the number of its first update.
    fn begin(&mut self, cell: &Cell, limit: Duration) -> Result<u64> {
        if let Some(mark) = self.awaited.take() {
            self.running.guests[0].wait_mark(&mark, limit)?;
        }
        Ok(u64::from(cell.iteration) * UPDATES_A_CRASH)
    }

    /// A crash of the guest's kernel, which ends QEMU; amberlog recovers a journal that it holds by itself.
    fn kernel_crash(&mut self, cell: &Cell, limit: Duration) -> Result<Left> {
        let first = self.begin(cell, limit)?;
        let guest = &mut self.running.guests[0];
        guest.tell(&format!("crash {first}"))?;
        guest.wait_end(limit)?;
        if guest.final_report().exit_code.is_some() {
            return Err(guest.failure("it ended without a crash").into());
        }
        let mut fields = crate::load::counters(self.group.mode, &self.running.reports[0], &BTreeMap::new())?;
        let image = self.running.images[0].clone();
        fields.insert("kernel_crashes".to_owned(), 1.0);
        if self.group.mode.is_retained() {
            return Ok(Left { image, recovered: Ok(fields) });
        }
        let recovered = recovered(recover_disk(&image))?.map(|told| {
            fields.extend(told);
            fields
        });
        Ok(Left { image, recovered })
    }

    fn wait_until_quiet(&self) -> Result<()> {
        let deadline = Instant::now() + QUIET_LIMIT;
        let mut before = self.running.server.totals();
        loop {
            std::thread::sleep(QUIET);
            let now = self.running.server.totals();
            if now == before {
                return Ok(());
            }
            if Instant::now() > deadline {
                return Err(Error::Told("the modelled disk did not come to rest with the guest stopped".to_owned()));
            }
            before = now;
        }
    }

    /// Copies the memory and tables of a held journal, and then the disk: a write that still comes to its end in between is
    /// one that the tables name as not home yet.
    fn copy_what_is_left(&self) -> Result<(PathBuf, Option<TempDir>)> {
        let image = &self.running.images[0];
        let copy = image.with_extension("crash");
        if !self.group.mode.is_retained() {
            copy_image(image, &copy)?;
            return Ok((copy, None));
        }
        let area = &self.running.areas[0];
        let target = TempDir::new_in(self.running.tmpfs.path()).at("write in", self.running.tmpfs.path())?;
        let mut command = program::command("cp")?;
        command.args(["--recursive", "--sparse=always", "--"]).arg(area.join(".")).arg(target.path());
        program::run(&mut command, &[0])?;
        for entry in std::fs::read_dir(target.path()).at("read", target.path())? {
            let path = entry.at("read", target.path())?.path().join("area.json");
            if path.is_file() {
                redirect(&path, &[(area.as_path(), target.path()), (image.as_path(), copy.as_path())])?;
            }
        }
        copy_image(image, &copy)?;
        Ok((copy, Some(target)))
    }

    /// What became of the records.
    fn judge(&self, left: Left) -> Result<(BTreeMap<String, f64>, Vec<String>)> {
        let layout = updates::layout(self.record_kib, RECORDS_MIB, self.seed);
        judged(&FileSystem::whole(&left.image), &layout, left.recovered)
    }
}

/// What a crash and its recovery came to, as fields, and what was found to be broken, in words. A file system that is not consistent, or that
/// recovery gave up, counts as a run with corrupted records, whatever can still be read of them.
fn judged(
    file_system: &FileSystem,
    layout: &RecordLayout,
    recovered: Recovered,
) -> Result<(BTreeMap<String, f64>, Vec<String>)> {
    let mut found = Vec::new();
    let mut fields = recovered.unwrap_or_else(|refused| {
        found.push(refused);
        BTreeMap::new()
    });
    match judge::check(file_system) {
        Ok(verdict) => {
            found.extend(verdict.needs_recovery.then(|| "its journal is to be replayed yet".to_owned()));
            found.extend(verdict.problems);
        }
        // One that e2fsck can do nothing with is not a good one.
        Err(error) => found.push(ran(error)?),
    }
    let is_inconsistent = !found.is_empty();
    let content = match judge::read_file(file_system, "/records") {
        Ok(content) => content,
        Err(error @ guest_kit::Error::Image { .. }) => {
            found.push(first_line(&error.to_string()).to_owned());
            None
        }
        Err(error) => {
            found.push(ran(error)?);
            None
        }
    };
    if content.is_none() {
        found.push("the file of records is gone".to_owned());
    }
    let content = content.unwrap_or_default();
    let updates::Verdict { records, updated, corrupted, cut_by_commit } = updates::judge(layout, &content);
    // Records that are not in the file any more are lost.
    let lost = ((RECORDS_MIB << 20) / layout.record_bytes).saturating_sub(records);
    if lost > 0 && !content.is_empty() {
        found.push(format!("{lost} records are gone from their file"));
    }
    let is_damaged = is_inconsistent || lost > 0;
    let share = |happened: bool| f64::from(u8::from(happened));
    fields.extend([
        ("corrupted_records".to_owned(), (corrupted + lost) as f64),
        ("records".to_owned(), records as f64),
        ("updated_records".to_owned(), updated as f64),
        ("inconsistent_runs".to_owned(), share(is_inconsistent)),
        ("corrupted_runs".to_owned(), share(is_damaged || corrupted > 0)),
        ("corrupted_runs_not_by_commit".to_owned(), share(is_damaged || corrupted > cut_by_commit)),
    ]);
    Ok((fields, found))
}

/// Makes a copied area name the copies instead of what they are copies of. Its own keys of the images would tell them apart.
fn redirect(description: &Path, paths: &[(&Path, &Path)]) -> Result<()> {
    let damaged = |reason: String| Error::Damaged { path: description.to_owned(), reason };
    let text = std::fs::read(description).at("read", description)?;
    let mut value: serde_json::Value = serde_json::from_slice(&text).map_err(|error| damaged(error.to_string()))?;
    let moved = |old: &mut serde_json::Value| {
        let Some(path) = old.as_str().map(PathBuf::from) else { return };
        for (from, to) in paths {
            if let Ok(rest) = path.strip_prefix(from) {
                let new = if rest.as_os_str().is_empty() { (*to).to_owned() } else { to.join(rest) };
                *old = new.to_string_lossy().into_owned().into();
                return;
            }
        }
    };
    for ram in value["ram"].as_array_mut().into_iter().flatten() {
        moved(&mut ram["path"]);
    }
    for log in value["logs"].as_array_mut().into_iter().flatten() {
        for name in ["home", "journal"] {
            moved(&mut log[format!("{name}_image")]);
            log[format!("{name}_key")] = serde_json::Value::Null;
        }
    }
    std::fs::write(description, value.to_string()).at("write", description)
}

#[cfg(test)]
mod tests {
    use super::*;
    use guest_kit::image::ExtRecipe;

    /// A file system with a file of records, none of them updated, of which `harm` is a request to debugfs.
    fn judged_after(harm: Option<&str>, recovered: Recovered) -> (BTreeMap<String, f64>, Vec<String>) {
        let directory = tempfile::tempdir().unwrap();
        let layout = updates::layout(64, RECORDS_MIB, 1);
        let content = directory.path().join("content");
        std::fs::create_dir(&content).unwrap();
        let records = content.join("records");
        let words =
            format!("--file {} --record-kib 64 --file-mib {RECORDS_MIB} --seed 1 --phase create", records.display());
        updates::run(guest_tools::options::Options::parse(words.split(' ').map(str::to_owned)).unwrap()).unwrap();
        let image = directory.path().join("image");
        let file_system = ExtRecipe { content: Some(content), ..ExtRecipe::ext3(64, 8) }.make(&image).unwrap();
        if let Some(request) = harm {
            let mut tool = program::command("debugfs").unwrap();
            program::run(tool.args(["-w", "-R", request]).arg(&image), &[0]).unwrap();
        }
        judged(&file_system, &layout, recovered).unwrap()
    }

    #[test]
    fn damage_is_an_outcome_and_no_failure() {
        let told = BTreeMap::from([("recovery_transactions".to_owned(), 3.0)]);
        let (fields, found) = judged_after(None, Ok(told.clone()));
        assert_eq!(
            (fields["corrupted_runs"], fields["inconsistent_runs"], fields["records"]),
            (0.0, 0.0, 512.0),
            "{found:?}"
        );
        assert!(found.is_empty() && fields["recovery_transactions"] == 3.0);

        let (fields, found) = judged_after(Some("rm /records"), Ok(told.clone()));
        assert_eq!((fields["corrupted_runs"], fields["corrupted_runs_not_by_commit"]), (1.0, 1.0));
        assert_eq!(
            (fields["inconsistent_runs"], fields["corrupted_records"]),
            (0.0, 512.0),
            "whole, and the file gone"
        );
        assert_eq!(found, ["the file of records is gone"]);

        let (fields, found) = judged_after(Some("sif / links_count 9"), Ok(told));
        assert_eq!((fields["corrupted_runs"], fields["inconsistent_runs"]), (1.0, 1.0), "whatever its records are");
        assert!(fields["corrupted_records"] == 0.0 && !found.is_empty(), "{found:?}");

        let (fields, found) = judged_after(None, Err("amberlog ended with exit status: 3: refused".to_owned()));
        assert_eq!((fields["corrupted_runs"], fields["inconsistent_runs"]), (1.0, 1.0), "nobody recovered it");
        assert_eq!(found.len(), 1);
    }

    #[test]
    fn what_could_not_be_tried_is_the_harness_s_fault() {
        let program = |status: &str| guest_kit::Error::Program {
            command: "/somewhere/amberlog recover".into(),
            status: status.into(),
            output: "it is damaged\nand more".into(),
        };
        let refused = recovered(Err(Error::Guest(program("exit status: 3")))).unwrap().unwrap_err();
        assert_eq!(refused, "amberlog ended with exit status: 3: it is damaged");
        assert!(recovered(Err(Error::Guest(program("no start")))).is_err());
        assert!(recovered(Err(Error::Told("no JSON".into()))).is_err());
    }
}
