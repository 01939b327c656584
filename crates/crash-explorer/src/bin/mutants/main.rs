//! Seeded faults: each is put into a scratch copy of the tree, then the tests that should catch it are run there.
//!
//! `mutants [--only TEXT] [--in TEXT] [--record FILE] [--jobs N] [--alone] [--check] [--list FILE]`: prints caught or missed for each fault of
//! `mutants.list`, or for those with TEXT in their name (`--only`), or in the name of their source or test (`--in`). With `--check` it only says
//! whether every fault still matches its source exactly once. Exit code 1 when one is missed, does not match any more, or does not compile.
//!
//! The whole list takes hours. With `--record` what was caught is noted in FILE, and a later call with the same FILE goes on with the rest: with
//! the faults whose tests, or what these depend on, have changed since, and with those that are new.
//!
//! Most of the time would go into builds. So most faults are built together, each beside what it replaces, and one is switched on for a run of its tests (`together`).
//! The rest has a scratch tree and a target directory for all, without debug information, so that each costs the crates that it touches.
//! With `--jobs` there are N of these, and as many tests side by side; with `--alone` every fault has a build of its own. First
//! the tests pass without any fault: one that fails anyway would catch everything. One that passed in an earlier call passes once more before what it has
//! caught counts.

#![forbid(unsafe_code)]

mod list;
mod record;
mod sources;
mod together;
mod weave;

use guest_tools::options::Options;
use list::Mutant;
use record::Record;
use sources::Sources;
use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// What is built, or run without a fault for the first time, takes no longer.
const LIMIT_SECONDS: u64 = 900;
/// A test that takes longer than this, and ten times as long as without a fault, has caught it: it hangs.
const HANG_SECONDS: u64 = 120;

enum Verdict {
    Caught(String),
    Missed,
    Broken(String),
}

fn main() -> ExitCode {
    match run() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("mutants: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<bool, String> {
    let mut options = Options::parse(std::env::args().skip(1))?;
    let only = options.text("only");
    let within = options.text("in");
    let record = options.text("record");
    let jobs = options.number("jobs", 1, 1..=64)?;
    let alone = options.flag("alone");
    let check_only = options.flag("check");
    let own = concat!(env!("CARGO_MANIFEST_DIR"), "/mutants.list");
    let list = options.text("list").unwrap_or_else(|| own.to_owned());
    options.finish()?;
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let text = std::fs::read_to_string(&list).map_err(|e| format!("reading {list}: {e}"))?;
    let mutants = list::parse(&text)?;
    for mutant in &mutants {
        mutant.apply(&root)?;
    }
    if check_only {
        println!("{} faults, each matches its source once", mutants.len());
        return Ok(true);
    }
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from);
    let scratches: Vec<PathBuf> = (0..jobs).map(|job| target.join(scratch_name(job))).collect();
    let mut files = Vec::new();
    for scratch in &scratches {
        files = copy_tree(&root, scratch, &|_| false)?;
    }
    let open = |file: String| Record::open(Path::new(&file), Sources::of(&root, &files)?);
    let record = record.map(open).transpose()?;
    let is_wanted = |mutant: &&Mutant| {
        let places = [&mutant.file].into_iter().chain(&mutant.tests);
        only.as_ref().is_none_or(|only| mutant.name.contains(only))
            && within.as_ref().is_none_or(|within| places.into_iter().any(|place| place.contains(within)))
    };
    let wanted: Vec<&Mutant> = mutants.iter().filter(is_wanted).collect();
    let is_new = |mutant: &&Mutant| record.as_ref().is_none_or(|record| !record.has(mutant));
    let mut chosen: Vec<&Mutant> = wanted.iter().copied().filter(is_new).collect();
    if chosen.len() < wanted.len() {
        println!("{} were caught before", wanted.len() - chosen.len());
    }
    // Neighbours with the same test and source have the least to build. Tests with guests take a hundred times as long as others, and come last: a run
    // that is cut off has judged most.
    let has_guests = |mutant: &Mutant| mutant.tests.iter().any(|test| test.contains("--test guests"));
    chosen.sort_by_key(|mutant| (has_guests(mutant), &mutant.tests, &mutant.file));
    let mut alone_later: Vec<&Mutant> = Vec::new();
    let guests = |mutants: &[&Mutant]| mutants.iter().any(|mutant| has_guests(mutant));
    let mut calls = Calls { record: Mutex::new(record), ..Calls::default() };
    if !alone {
        let tree = target.join("mutants-together");
        while chosen.len() >= together::WORTHWHILE {
            let numbered: Vec<(usize, &Mutant)> = chosen.iter().copied().enumerate().collect();
            let woven = together::build(&root, &tree, &numbered)?;
            println!("{} of {} faults are in one build", woven.len(), chosen.len());
            if woven.len() < together::WORTHWHILE {
                break;
            }
            let within: Vec<(usize, &Mutant)> =
                numbered.iter().copied().filter(|(number, _)| woven.contains(number)).collect();
            if guests(&within.iter().map(|(_, mutant)| *mutant).collect::<Vec<_>>()) {
                build_for_guests(&tree)?;
            }
            let places: Vec<PathBuf> = (0..jobs).map(|_| tree.clone()).collect();
            calls.passing = Mutex::default();
            let unseen = Mutex::new(Vec::new());
            side_by_side(&places, within, |tree, (number, mutant)| {
                if !calls.is_caught_together(tree, number, mutant)? {
                    unseen.lock().unwrap_or_else(PoisonError::into_inner).push(mutant);
                }
                Ok(())
            })?;
            alone_later.extend(unseen.into_inner().unwrap_or_else(PoisonError::into_inner));
            chosen =
                numbered.into_iter().filter(|(number, _)| !woven.contains(number)).map(|(_, mutant)| mutant).collect();
        }
        calls.passing = Mutex::default();
    }
    chosen.extend(alone_later);
    chosen.sort_by_key(|mutant| (has_guests(mutant), &mutant.tests, &mutant.file));
    let mut tests: Vec<&String> = chosen.iter().flat_map(|mutant| &mutant.tests).collect();
    tests.sort_unstable();
    tests.dedup();
    tests.retain(|test| !calls.passed_before(test));
    if guests(&chosen) {
        for scratch in &scratches {
            build_for_guests(scratch)?;
        }
    }
    side_by_side(&scratches, tests, |scratch, test| {
        let Some(seconds) = calls.passes(scratch, test)? else {
            return Err(format!("cargo test {test} fails without any fault; mend that first"));
        };
        println!("passes  {test} ({seconds} s)");
        calls.note(&|record| record.note_pass(test))
    })?;
    side_by_side(&scratches, chosen, |scratch, mutant| calls.judge_alone(scratch, mutant))?;
    let (caught, missed, broken) = calls.counts.into_inner().unwrap_or_else(PoisonError::into_inner);
    println!("{caught} caught, {missed} missed, {broken} that do not compile");
    Ok(missed + broken == 0)
}

/// The tests with guests look for these beside the program, and no package of theirs has cargo build them.
fn build_for_guests(tree: &Path) -> Result<(), String> {
    let built = cargo(&["build", "--quiet", "-p", "vmm-shim", "-p", "journal-server"], tree, LIMIT_SECONDS).output();
    if built.map_err(|e| format!("running cargo: {e}"))?.status.success() {
        return Ok(());
    }
    Err("vmm-shim and journal-server cannot be built without any fault; mend that first".to_owned())
}

/// What is known in this call.
#[derive(Default)]
struct Calls {
    record: Mutex<Option<Record>>,
    /// Of tests that ran in this call without any fault: how long they took, seconds, if they passed. What failed for want of room, or of a program,
    /// caught nothing.
    passing: Mutex<BTreeMap<String, Option<u64>>>,
    /// Caught, missed, and those that do not compile.
    counts: Mutex<(usize, usize, usize)>,
}

impl Calls {
    fn note(&self, note: &dyn Fn(&mut Record) -> Result<(), String>) -> Result<(), String> {
        self.record.lock().unwrap_or_else(PoisonError::into_inner).as_mut().map_or(Ok(()), note)
    }

    fn passed_before(&self, test: &str) -> bool {
        self.record.lock().unwrap_or_else(PoisonError::into_inner).as_ref().is_some_and(|record| record.passed(test))
    }

    /// How long a test takes that passes without any fault, seconds.
    fn passes(&self, tree: &Path, test: &str) -> Result<Option<u64>, String> {
        if let Some(seconds) = self.passing.lock().unwrap_or_else(PoisonError::into_inner).get(test) {
            return Ok(*seconds);
        }
        let failed = |error: std::io::Error| format!("running cargo: {error}");
        let built = cargo_test(test, tree, &["--no-run"], LIMIT_SECONDS).output().map_err(failed)?;
        let started = Instant::now();
        let output = cargo_test(test, tree, &[], LIMIT_SECONDS).output().map_err(failed)?;
        let seconds = started.elapsed().as_secs();
        let passed = (built.status.success() && output.status.success()).then_some(seconds);
        if passed.is_none() {
            let said = String::from_utf8_lossy(&output.stdout);
            for line in said.lines().filter(|line| line.contains("panicked at") || line.contains("FAILED")).take(4) {
                println!("        {}", line.chars().take(200).collect::<String>());
            }
        }
        self.passing.lock().unwrap_or_else(PoisonError::into_inner).insert(test.to_owned(), passed);
        Ok(passed)
    }

    fn limit_of(&self, test: &str) -> u64 {
        let seconds = self.passing.lock().unwrap_or_else(PoisonError::into_inner).get(test).copied();
        seconds.flatten().map_or(LIMIT_SECONDS, |seconds| (10 * seconds).max(HANG_SECONDS))
    }

    /// Switches a fault on that is in `tree` with others: whether one of its tests fails, which passes without. What a test with none on fails in says nothing.
    fn is_caught_together(&self, tree: &Path, number: usize, mutant: &Mutant) -> Result<bool, String> {
        let started = Instant::now();
        for test in &mutant.tests {
            if self.passes(tree, test)?.is_none() {
                println!("fails   {test} where faults are built together and none is on");
                continue;
            }
            let mut command = cargo_test(test, tree, &[], self.limit_of(test));
            let output = command.env(weave::SWITCH, number.to_string()).output();
            if output.map_err(|e| format!("running cargo: {e}"))?.status.success() {
                continue;
            }
            self.counts.lock().unwrap_or_else(PoisonError::into_inner).0 += 1;
            self.note(&|record| record.note(mutant))?;
            println!("caught  {:<40} by {test} ({} s)", mutant.name, started.elapsed().as_secs());
            return Ok(true);
        }
        Ok(false)
    }

    /// Puts a fault into `scratch`, which is built and tested with it alone.
    fn judge_alone(&self, scratch: &Path, mutant: &Mutant) -> Result<(), String> {
        let started = Instant::now();
        let original = scratch.join(&mutant.file);
        let before = std::fs::read_to_string(&original).map_err(|e| format!("reading {}: {e}", mutant.file))?;
        write(&original, &mutant.apply(scratch)?)?;
        let verdict = judge(mutant, scratch, |test| self.limit_of(test));
        write(&original, &before)?;
        if let Verdict::Caught(by) = &verdict
            && self.passes(scratch, by)?.is_none()
        {
            return Err(format!("cargo test {by} fails without any fault now; mend that first"));
        }
        let seconds = started.elapsed().as_secs();
        let (caught, missed, broken) = &mut *self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        match verdict {
            Verdict::Caught(by) => {
                *caught += 1;
                self.note(&|record| record.note(mutant))?;
                println!("caught  {:<40} by {by} ({seconds} s)", mutant.name);
            }
            Verdict::Missed => {
                *missed += 1;
                println!("MISSED  {:<40} by {} ({seconds} s)", mutant.name, mutant.tests.join("; "));
            }
            Verdict::Broken(reason) => {
                *broken += 1;
                println!("BROKEN  {:<40} {reason}", mutant.name);
            }
        }
        Ok(())
    }
}

fn scratch_name(job: u64) -> String {
    match job {
        0 => "mutants".to_owned(),
        job => format!("mutants-{job}"),
    }
}

/// Does something with each of `items`, in their order, in as many places at once as there are.
///
/// # Errors
/// The first error; what comes after it is left.
fn side_by_side<T: Send>(
    scratches: &[PathBuf],
    items: Vec<T>,
    each: impl Fn(&Path, T) -> Result<(), String> + Sync,
) -> Result<(), String> {
    let items = Mutex::new(items.into_iter());
    let next = || items.lock().unwrap_or_else(PoisonError::into_inner).next();
    let outcome = Mutex::new(Ok(()));
    std::thread::scope(|scope| {
        for scratch in scratches {
            scope.spawn(|| {
                while let Some(item) = next() {
                    if let Err(error) = each(scratch, item) {
                        *outcome.lock().unwrap_or_else(PoisonError::into_inner) = Err(error);
                        while next().is_some() {}
                    }
                }
            });
        }
    });
    outcome.into_inner().unwrap_or_else(PoisonError::into_inner)
}

fn write(path: &Path, text: &str) -> Result<(), String> {
    std::fs::write(path, text).map_err(|e| format!("writing {}: {e}", path.display()))
}

/// A copy of what is tracked, as it is in the working tree. Files that did not change keep their time, so that only what
/// a fault touches is compiled anew; so do those that are left to the caller. Gives the files, and a number for what is in each.
fn copy_tree(root: &Path, scratch: &Path, is_left: &dyn Fn(&str) -> bool) -> Result<Vec<(String, u64)>, String> {
    let mut files = Vec::new();
    let output = Command::new("git").args(["ls-files", "-z"]).current_dir(root).output();
    let output = output.map_err(|e| format!("running git ls-files: {e}"))?;
    for name in String::from_utf8_lossy(&output.stdout).split('\0').filter(|name| !name.is_empty()) {
        let (from, to) = (root.join(name), scratch.join(name));
        let Ok(content) = std::fs::read(&from) else { continue };
        let mut hasher = DefaultHasher::new();
        content.hash(&mut hasher);
        files.push((name.to_owned(), hasher.finish()));
        if is_left(name) || std::fs::read(&to).is_ok_and(|known| known == content) {
            continue;
        }
        let parent = to.parent().unwrap_or(scratch);
        std::fs::create_dir_all(parent).map_err(|e| format!("making {}: {e}", parent.display()))?;
        std::fs::copy(&from, &to).map_err(|e| format!("copying {name}: {e}"))?;
    }
    Ok(files)
}

/// What is in `more` is for cargo: a test may have words for its own program behind `--`.
fn cargo_test(test: &str, scratch: &Path, more: &[&str], limit_seconds: u64) -> Command {
    let words: Vec<&str> = ["test", "--quiet"].into_iter().chain(more.iter().copied()).chain(test.split(' ')).collect();
    cargo(&words, scratch, limit_seconds)
}

fn cargo(words: &[&str], scratch: &Path, limit_seconds: u64) -> Command {
    let mut command = Command::new("timeout");
    command.args([&limit_seconds.to_string(), "cargo"]).args(words);
    command.current_dir(scratch).env("CARGO_TARGET_DIR", scratch.join("target"));
    command.envs(["CARGO_PROFILE_DEV_DEBUG", "CARGO_PROFILE_TEST_DEBUG"].map(|name| (name, "0")));
    command.stdin(Stdio::null());
    command
}

fn judge(mutant: &Mutant, scratch: &Path, limit_of: impl Fn(&str) -> u64) -> Verdict {
    for test in &mutant.tests {
        match cargo_test(test, scratch, &["--no-run"], LIMIT_SECONDS).output() {
            Ok(output) if output.status.success() => {}
            Ok(output) => {
                let text = String::from_utf8_lossy(&output.stderr).into_owned();
                let line = text.lines().find(|line| line.contains("error")).unwrap_or("it does not compile");
                return Verdict::Broken(line.to_owned());
            }
            Err(error) => return Verdict::Broken(format!("running cargo: {error}")),
        }
        match cargo_test(test, scratch, &[], limit_of(test)).output() {
            Ok(output) if output.status.success() => {}
            Ok(_) => return Verdict::Caught(test.clone()),
            Err(error) => return Verdict::Broken(format!("running cargo: {error}")),
        }
    }
    Verdict::Missed
}
