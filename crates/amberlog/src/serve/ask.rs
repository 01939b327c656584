//! `amberlog status`, `top`, `flush`, `placement`, `detach`, `health`, `upgrade` and `arguments`: what is asked of a running daemon.

use crate::client::{Daemon, PATIENCE, text};
use crate::exit;
use crate::vm::qemu;
use crate::vm::watched::Watched;
use clap::Args;
use command_line::output::{in_a_line, text as print};
use serde_json::{Value, json};
use std::ffi::OsString;
use std::io::IsTerminal;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Arguments of `amberlog status`.
#[derive(Args, Debug)]
pub struct StatusArgs {
    /// Only this VM.
    vm: Option<String>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    daemon: Daemon,
}

/// Arguments of `amberlog top`.
#[derive(Args, Debug)]
pub struct TopArgs {
    /// Seconds between looks.
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0, value_parser = interval)]
    interval: f64,
    /// Look so many times, then end.
    #[arg(long, value_name = "N")]
    count: Option<u32>,
    #[command(flatten)]
    daemon: Daemon,
}

/// Arguments of `amberlog flush`.
#[derive(Args, Debug)]
pub struct FlushArgs {
    /// The VM.
    vm: String,
    /// Seconds after which it is given up.
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    patience: u64,
    #[command(flatten)]
    daemon: Daemon,
}

/// Arguments of `amberlog placement`.
#[derive(Args, Debug)]
pub struct PlacementArgs {
    /// The VM.
    vm: String,
    /// Its disk, by the name that `amberlog status` shows.
    disk: String,
    /// Where the journals of its file systems shall live: retain, copy or storage; on a disk with placement=remote, storage or
    /// remote; with placement=nvm, storage, nvm, retain or copy. Behind it may stand ',durable-within=SECONDS|never', as in the option of a disk.
    #[arg(value_name = "PLACEMENT", value_parser = wished)]
    placement: Wished,
    /// EXPERIMENTAL, for retain and copy: what the guest has committed is durable on storage within so many seconds (0 to 3600) from
    /// now on; or never, as without this option. The command returns when that is in force; what is not in time stays wished.
    #[arg(long, value_name = "SECONDS|never", value_parser = seconds_or_never)]
    durable_within: Option<String>,
    /// Seconds after which it is given up.
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    patience: u64,
    #[command(flatten)]
    daemon: Daemon,
}

/// What `amberlog placement` is told: a placement, and what stands behind it.
#[derive(Clone, Debug)]
struct Wished {
    placement: String,
    durable_within: Option<String>,
}

fn wished(argument: &str) -> Result<Wished, String> {
    let (placement, options) = argument.split_once(',').map_or((argument, None), |(name, rest)| (name, Some(rest)));
    if !matches!(placement, "nvm" | "remote") {
        if let Some((kind @ ("nvm" | "remote"), _)) = placement.split_once('=') {
            return Err(format!(
                "where placement {kind} keeps its journals stands in the option of the disk and stays as it is while the guest runs: \
                 say '{kind}' alone"
            ));
        }
        placement.parse::<placement::PlacementKind>()?;
    }
    let mut durable_within = None;
    for option in options.into_iter().flat_map(|options| options.split(',')) {
        let seconds = option.strip_prefix("durable-within=").ok_or_else(|| {
            format!("'{option}' does not change while a guest runs; behind the placement can stand durable-within=SECONDS|never")
        })?;
        if durable_within.replace(seconds_or_never(seconds)?).is_some() {
            return Err("durable-within is given twice".to_owned());
        }
    }
    Ok(Wished { placement: placement.to_owned(), durable_within })
}

fn seconds_or_never(text: &str) -> Result<String, String> {
    crate::vm::durable_within(text).map(|_| text.to_owned())
}

/// Arguments of `amberlog detach`.
#[derive(Args, Debug)]
pub struct DetachArgs {
    /// Seconds after which it is given up.
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    patience: u64,
    /// Leave VMs that are paused, too: they must not go on (cont) before the next daemon serves them.
    #[arg(long)]
    with_paused: bool,
    #[command(flatten)]
    daemon: Daemon,
}

/// Arguments of `amberlog health`.
#[derive(Args, Debug)]
pub struct HealthArgs {
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    daemon: Daemon,
}

/// Arguments of `amberlog upgrade`.
#[derive(Args, Debug)]
pub struct UpgradeArgs {
    /// Only this VM.
    vm: Option<String>,
    /// Also where a snapshot is being copied, which ends, or a VM is frozen, which goes on.
    #[arg(long)]
    anyway: bool,
    #[command(flatten)]
    daemon: Daemon,
}

/// Arguments of `amberlog arguments`.
#[derive(Args, Debug)]
pub struct ArgumentsArgs {
    /// The VM.
    vm: String,
    /// The guest's memory, in MiB.
    #[arg(long, value_name = "MIB", default_value_t = 1024, value_parser = clap::value_parser!(u64).range(1..))]
    memory: u64,
    /// Print JSON: "environment", "arguments" and "disks".
    #[arg(long)]
    json: bool,
    /// Have QEMU connect again when a daemon has left it to the next one (amberlog detach).
    #[arg(long)]
    reconnect: bool,
    /// The QEMU that they are for: asked for its version, since not every one understands the same words.
    #[arg(long, value_name = "PROGRAM", default_value = "qemu-system-x86_64")]
    qemu: OsString,
    #[command(flatten)]
    daemon: Daemon,
}

fn interval(text: &str) -> Result<f64, String> {
    let seconds: f64 = text.parse().map_err(|_| format!("'{text}' is no number of seconds"))?;
    if (0.05..=86_400.0).contains(&seconds) { Ok(seconds) } else { Err("from 0.05 to 86400 seconds".to_owned()) }
}

fn end(result: anyhow::Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => exit::report(&error),
    }
}

/// `amberlog status`.
pub fn status(args: &StatusArgs) -> ExitCode {
    end((|| {
        let answer = args.daemon.ask(&json!({"command": "status", "vm": args.vm}), PATIENCE)?;
        if !args.json {
            return Ok(print(&format!("{}{}", table(&answer["vms"]), memory_line(&answer["memory"])))?);
        }
        let shown = if args.vm.is_some() { &answer["vms"][0] } else { &answer };
        Ok(print(&format!("{}\n", serde_json::to_string_pretty(shown)?))?)
    })())
}

/// `amberlog top`.
pub fn top(args: &TopArgs) -> ExitCode {
    end((|| {
        let is_terminal = std::io::stdout().is_terminal();
        let mut seen = 0;
        let mut earlier: Option<(Value, Instant)> = None;
        loop {
            let answer = args.daemon.ask(&json!({"command": "status", "vm": null}), PATIENCE)?;
            // Home, and clear what is below.
            let clear = if is_terminal { "\x1b[H\x1b[2J" } else { "" };
            let now = Instant::now();
            let since = earlier.as_ref().map(|(vms, at)| (vms, now.duration_since(*at).as_secs_f64()));
            let times = crate::metrics::top::table(since, &answer["vms"]);
            let shown = format!("{clear}{}{}\n{times}", table(&answer["vms"]), memory_line(&answer["memory"]));
            if !command_line::output::is_read(&shown)? {
                return Ok(());
            }
            earlier = Some((answer["vms"].clone(), now));
            seen += 1;
            if args.count.is_some_and(|count| seen >= count) {
                return Ok(());
            }
            std::thread::sleep(Duration::from_secs_f64(args.interval));
        }
    })())
}

/// `amberlog flush`.
pub fn flush(args: &FlushArgs) -> ExitCode {
    end((|| {
        let question = json!({"command": "flush", "vm": args.vm, "patience_seconds": args.patience});
        let answer = args.daemon.ask(&question, Duration::from_secs(args.patience) + PATIENCE)?;
        Ok(print(&format!(
            "{}: {} blocks were owed and are home\n",
            args.vm,
            answer["blocks"].as_u64().unwrap_or_default()
        ))?)
    })())
}

/// `amberlog placement`.
pub fn placement(args: &PlacementArgs) -> ExitCode {
    end((|| {
        let Wished { placement, durable_within } = &args.placement;
        if durable_within.is_some() && args.durable_within.is_some() {
            return Err(exit::usage("durable-within is given twice"));
        }
        let question = json!({
            "command": "placement", "vm": args.vm, "disk": args.disk, "placement": placement,
            "durable_within": durable_within.as_ref().or(args.durable_within.as_ref()),
            "patience_seconds": args.patience,
        });
        let answer = args.daemon.ask(&question, Duration::from_secs(args.patience) + PATIENCE)?;
        let when = text(&answer["when"]);
        Ok(print(&format!("{}, {}: {placement} ({when})\n", args.vm, args.disk))?)
    })())
}

/// `amberlog detach`: returns when the daemon has ended.
pub fn detach(args: &DetachArgs) -> ExitCode {
    end((|| {
        let question = json!({"command": "detach", "patience_seconds": args.patience, "with_paused": args.with_paused});
        let answer = args.daemon.ask(&question, Duration::from_secs(args.patience) + PATIENCE)?;
        let pid = answer["pid"].as_i64().and_then(|pid| i32::try_from(pid).ok());
        // It may have ended already.
        if let Some(daemon) = pid.and_then(Watched::new)
            && !daemon.wait(Duration::from_secs(args.patience) + PATIENCE)
        {
            anyhow::bail!("the daemon has not ended; its log says why");
        }
        let untold = super::left::untold(&args.daemon.run);
        anyhow::ensure!(
            untold.is_empty(),
            "the daemon has ended, and its VMs wait for the next one, which has the next flush of these disks fail: {}",
            untold.join("; ")
        );
        Ok(print("the daemon has ended; its VMs wait for the next one\n")?)
    })())
}

/// A VM that is prepared or recovered for longer than this waits for something that does not come, in seconds.
const PREPARES_WITHIN_S: u64 = 60;

/// A worker that dies more often than that in an hour does so for a reason, though another one goes on each time.
const DEATHS_AN_HOUR: u64 = 3;

/// `durable-within` that is not in force for longer than this does not come into force by itself in a moment, in seconds.
const IN_FORCE_WITHIN_S: u64 = 60;

/// How often the age that is in force passes before what is not durable is late, and what that is given on top, in seconds: of 0, too, what
/// waits for storage may take a while.
const LATE_AFTER: (u64, u64) = (3, 10);

/// What is not well with `durable-within` on a disk.
fn undurable(disk: &Value) -> Option<String> {
    let within_s = disk["durability"]["within_s"].as_u64();
    if let Some(seconds) = disk["durable_within_unmet_for_s"].as_u64().filter(|seconds| *seconds > IN_FORCE_WITHIN_S) {
        let wished_s = disk["durable_within_wished_s"].as_u64();
        if within_s.zip(wished_s).is_some_and(|(within_s, wished_s)| within_s <= wished_s) {
            return Some(format!(
                "durable-within={} is in force, and has not been for a minute without a break for {seconds} s: a loss of the host's power \
                 costs more than was asked for whenever it is not",
                disk["durable_within_wished_s"]
            ));
        }
        let in_force = within_s.map_or_else(|| "nothing is".to_owned(), |within_s| format!("{within_s} s are"));
        let why = disk["durability"]["reason"].as_str().map_or_else(String::new, |reason| format!(" ({reason})"));
        return Some(format!(
            "durable-within={} has not been in force for {seconds} s, {in_force}{why}: a loss of the host's power costs more than was asked for",
            disk["durable_within_wished_s"]
        ));
    }
    let (within_s, age_s) = (within_s?, disk["durability"]["oldest_undurable_s"].as_f64()?);
    let (times, more) = LATE_AFTER;
    (age_s > within_s.saturating_mul(times).saturating_add(more) as f64).then(|| {
        format!(
            "with durable-within={within_s} the oldest transaction that is not durable is {age_s:.0} s old: storage does not answer, or is too \
             slow for what the guest commits"
        )
    })
}

/// What is not well with the VMs, a sentence each. On battery no journal is to be held.
fn problems(vms: &Value, on_battery: bool) -> Vec<String> {
    let mut problems = Vec::new();
    for vm in vms.as_array().into_iter().flatten() {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let name = text(&vm["vm"]);
        if !matches!(vm["state"].as_str(), Some("preparing" | "waiting" | "running" | "recovering")) {
            problems.push(format!("vm {name}: {}", text(&vm["state_text"])));
        }
        // What takes a moment, unless a server or storage does not answer.
        let is_on_its_way = matches!(vm["state"].as_str(), Some("preparing" | "recovering"));
        if let Some(seconds) =
            vm["state_for_s"].as_u64().filter(|seconds| is_on_its_way && *seconds >= PREPARES_WITHIN_S)
        {
            problems.push(format!(
                "vm {name}: has been {} for {seconds} s; the log says what it waits for",
                text(&vm["state_text"])
            ));
        }
        if let Some(deaths) = vm["deaths_last_hour"].as_u64().filter(|deaths| *deaths > DEATHS_AN_HOUR) {
            problems.push(format!(
                "vm {name}: its worker has died {deaths} times in the last hour, and another one went on each time; the last one {}. The log says \
                 more; a reload (SIGHUP) says that you have seen it",
                text(&vm["last_death"])
            ));
        }
        if vm["directory_is_in_place"] == false {
            problems.push(crate::supervisor::place::sentence(&name, &text(&vm["directory"])));
        }
        if let Some(trouble) = vm["migration"]["trouble"].as_str() {
            problems.push(format!("vm {name}: {trouble}"));
        }
        for disk in vm["disks"].as_array().into_iter().flatten() {
            if let Some(fault) = disk["fault"].as_str() {
                problems.push(format!("vm {name}, disk {}: {fault}", text(&disk["name"])));
            }
            if let Some(problem) = undurable(disk) {
                problems.push(format!("vm {name}, disk {}: {problem}", text(&disk["name"])));
            }
            if on_battery && matches!(disk["placement_effective"].as_str(), Some("retain" | "copy")) {
                problems.push(format!(
                    "vm {name}, disk {}: the host runs on battery, and a journal of it is held in memory; the log says why, or its guest has \
                     made a file system since: 'amberlog on-battery' tries again",
                    text(&disk["name"])
                ));
            }
            let is_in_region = disk["placement_effective"] == "nvm" && disk["nvm"]["durability"] == "emulated";
            if on_battery && is_in_region {
                problems.push(format!(
                    "vm {name}, disk {}: the host runs on battery, and a journal of it is in a region of NVM that is memory of the host \
                     ({}): 'amberlog on-battery' brings it to storage",
                    text(&disk["name"]),
                    text(&disk["nvm"]["path"])
                ));
            }
            if let Some(seconds) = disk["waits_for_storage_s"].as_u64() {
                problems.push(format!(
                    "vm {name}, disk {}: its VMM stands still: it wants the disk's queues back, and storage has not answered for {seconds} s",
                    text(&disk["name"])
                ));
            }
        }
    }
    problems
}

/// `amberlog health`: 0 if all is well, 1 and a sentence for each thing that is not.
pub fn health(args: &HealthArgs) -> ExitCode {
    let problems = match args.daemon.ask(&json!({"command": "status", "vm": null}), PATIENCE) {
        Ok(answer) => problems(&answer["vms"], super::power::is_on_battery(&args.daemon.run)),
        Err(error) => vec![format!("{error:#}")],
    };
    let is_healthy = problems.is_empty();
    let text = if args.json {
        format!("{}\n", json!({"schema": 1, "healthy": is_healthy, "problems": problems}))
    } else if is_healthy {
        "all is well\n".to_owned()
    } else {
        problems.iter().map(|problem| format!("{}\n", in_a_line(problem))).collect()
    };
    match print(&text) {
        Ok(()) if is_healthy => ExitCode::SUCCESS,
        _ => ExitCode::from(exit::FAILED),
    }
}

/// `amberlog upgrade`: returns when the new workers serve.
pub fn upgrade(args: &UpgradeArgs) -> ExitCode {
    end((|| {
        let answer = args
            .daemon
            .ask(&json!({"command": "upgrade", "vm": args.vm, "anyway": args.anyway}), Duration::from_secs(600))?;
        let vms = answer["vms"].as_array().cloned().unwrap_or_default();
        let error = |vm: &Value| vm["error"].as_str().map(str::to_owned);
        if args.vm.is_some()
            && let Some(error) = vms.first().and_then(error)
        {
            anyhow::bail!("{error}");
        }
        for vm in &vms {
            let outcome = error(vm).map_or_else(|| text(&vm["version"]), |error| format!("NOT: {}", in_a_line(&error)));
            print(&format!("{}: {outcome}\n", text(&vm["vm"])))?;
        }
        let failed = vms.iter().filter_map(error).count();
        anyhow::ensure!(failed == 0, "{failed} VMs have not been upgraded; each line says why");
        Ok(())
    })())
}

/// `amberlog arguments`.
pub fn arguments(args: &ArgumentsArgs) -> ExitCode {
    end((|| {
        let question = json!({
            "command": "arguments", "vm": args.vm, "memory_mib": args.memory, "reconnect": args.reconnect,
        });
        let mut answer = args.daemon.ask(&question, PATIENCE)?;
        let version = args.reconnect.then(|| qemu::Version::of(&args.qemu)).flatten();
        if args.reconnect && version.is_none() {
            log::warn!(
                "{} does not say its version: 'reconnect=1' is printed, which new versions of QEMU refuse; name yours with --qemu",
                args.qemu.display()
            );
        }
        for word in answer["arguments"].as_array_mut().into_iter().flatten() {
            *word = Value::from(qemu::in_words_of(version, word.as_str().unwrap_or_default()));
        }
        if args.json {
            return Ok(print(&format!("{answer}\n"))?);
        }
        let mut words = Vec::new();
        for (name, value) in answer["environment"].as_object().into_iter().flatten() {
            words.push(format!("{name}={}", shell_word(value.as_str().unwrap_or_default())));
        }
        words.push(shell_word(&args.qemu.to_string_lossy()));
        for word in answer["arguments"].as_array().into_iter().flatten() {
            words.push(shell_word(word.as_str().unwrap_or_default()));
        }
        Ok(print(&format!("{}\n", words.join(" ")))?)
    })())
}

fn shell_word(text: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./,=:+".contains(c);
    if !text.is_empty() && text.chars().all(is_plain) {
        return text.to_owned();
    }
    format!("'{}'", text.replace('\'', r"'\''"))
}

/// Where the journals of a disk live, and where they do at this moment if that is another place.
fn shown_placement(disk: &Value) -> String {
    let (wanted, effective) = (text(&disk["placement"]), text(&disk["placement_effective"]));
    if effective.is_empty() || effective == wanted { wanted } else { format!("{wanted}>{effective}") }
}

/// What `durable-within` was asked for, and how old the oldest transaction is that is not durable; or what is in force in its place.
fn shown_durability(disk: &Value) -> String {
    let durability = &disk["durability"];
    let within_s = durability["within_s"].as_u64();
    let asked_s = disk["durable_within_wished_s"].as_u64();
    let asked = asked_s.map_or_else(|| "never".to_owned(), |seconds| format!("{seconds} s"));
    // A worker of an earlier program does not say whether a journal is held.
    let is_in_use = disk.get("durable_within_unmet_for_s").is_none_or(Value::is_u64);
    match (asked_s, within_s) {
        (None, None) => "-".to_owned(),
        (Some(_), None) if !is_in_use => format!("{asked}: not in use"),
        (Some(_), None) => format!("{asked}: not in force"),
        (asked_s, Some(within_s)) if asked_s != Some(within_s) => format!("{asked}: {within_s} s now"),
        (_, Some(_)) => match durability["oldest_undurable_s"].as_f64() {
            Some(age_s) => format!("{asked}, {age_s:.1} s"),
            None => asked,
        },
    }
}

/// A line for each disk.
fn table(vms: &Value) -> String {
    let mut lines = vec![format!(
        "{:<16} {:<12} {:<14} {:<20} {:>9} {:>9} {:>9} {:>12} {:>12}  {}",
        "VM", "DISK", "PLACEMENT", "DURABLE WITHIN", "HELD", "COPIED", "COMMITS", "JOURNAL MB", "HOME MB", "STATE"
    )];
    for vm in vms.as_array().into_iter().flatten() {
        let pending = vm["pending"]
            .as_str()
            .map_or(String::new(), |pending| format!(" ({}, when its VMM has ended)", in_a_line(pending)));
        let (name, state) = (text(&vm["vm"]), text(&vm["state_text"]) + &pending);
        let disks = vm["disks"].as_array().cloned().unwrap_or_default();
        if disks.is_empty() {
            lines.push(format!(
                "{name:<16} {:<12} {:<14} {:<20} {:>9} {:>9} {:>9} {:>12} {:>12}  {state}",
                "-", "-", "-", "", "", "", "", ""
            ));
        }
        for disk in &disks {
            let counter = |name: &str| disk["counters"][name].as_u64().unwrap_or_default();
            let megabytes = |name: &str| format!("{:.1}", counter(name) as f64 / 1e6);
            lines.push(format!(
                "{name:<16} {:<12} {:<14} {:<20} {:>9} {:>9} {:>9} {:>12} {:>12}  {state}",
                text(&disk["name"]),
                shown_placement(disk),
                shown_durability(disk),
                counter("blocks_retained_now"),
                format!("{:.1}M", counter("pool_bytes_now") as f64 / 1e6),
                counter("transactions"),
                megabytes("journal_bytes_received"),
                megabytes("home_bytes_to_storage"),
            ));
            if let Some(fault) = disk["fault"].as_str() {
                lines.push(format!("  {name} {}: {}", text(&disk["name"]), in_a_line(fault)));
            }
            // A fault that has ended it is its reason, and stands there already.
            let is_news = |reason: &&str| !disk["fault"].as_str().is_some_and(|fault| fault.contains(*reason));
            if disk["durable_within_wished_s"].is_u64()
                && let Some(reason) = disk["durability"]["reason"].as_str().filter(is_news)
            {
                lines.push(format!("  {name} {}: durable-within: {}", text(&disk["name"]), in_a_line(reason)));
            }
        }
    }
    lines.push(String::new());
    lines.join("\n")
}

/// What all VMs hold together, where there is a budget for that.
fn memory_line(memory: &Value) -> String {
    let megabytes = |key: &str| memory[key].as_u64().map(|bytes| format!("{:.1} MB", bytes as f64 / 1e6));
    let Some(budget) = megabytes("budget_bytes") else { return String::new() };
    let level =
        megabytes("level_bytes").map_or_else(String::new, |level| format!("; no VM is to hold more than {level}"));
    let stuck = if memory["is_stuck"] == true { "; it stays passed, nobody has more to give back" } else { "" };
    format!("memory: {} of {budget}{level}{stuck}\n", megabytes("held_bytes").unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of a worker that somebody else has in his hands.
    #[test]
    fn what_a_worker_says_does_not_steer_a_terminal() {
        let evil = "\x1b]0;x\x07\u{9b}2J\nvm b is held";
        let io = json!({"read_requests": 1});
        let mut disk = json!({"name": evil, "placement": evil, "placement_effective": evil, "fault": evil, "io": io});
        disk["durable_within_wished_s"] = json!(5);
        disk["durability"] = json!({"reason": format!("{evil}, and more")});
        let vm = |disks: Value| json!({"vm": "a", "state_text": evil, "pending": evil, "disks": disks});
        let vms = json!([vm(json!([disk])), vm(json!([]))]);
        let shown = table(&vms) + &crate::metrics::top::table(None, &vms);
        assert!(shown.chars().all(|character| character == '\n' || !character.is_control()), "{shown:?}");
        assert_eq!(shown.lines().count(), 7, "{shown}");
    }

    #[test]
    fn the_memory_of_all_vms_is_one_line_where_it_is_bounded() {
        assert_eq!(memory_line(&Value::Null), "");
        let memory = |level: Value, is_stuck: bool| json!({"budget_bytes": 512 << 20, "held_bytes": 3_000_000, "level_bytes": level, "is_stuck": is_stuck});
        assert_eq!(memory_line(&memory(Value::Null, false)), "memory: 3.0 MB of 536.9 MB\n");
        let said = memory_line(&memory(json!(1_000_000), true));
        assert!(said.contains("more than 1.0 MB; it stays passed"), "{said}");
    }

    #[test]
    fn a_worker_that_dies_now_and_then_all_day_is_not_well() {
        let vm = |deaths: u64| {
            json!([{"vm": "db", "state": "running", "state_text": "running", "disks": [],
                "deaths_last_hour": deaths, "last_death": "was ended by signal 11"}])
        };
        assert_eq!(problems(&vm(3), false), [""; 0]);
        let [said] = &problems(&vm(4), false)[..] else { panic!("one problem") };
        assert!(said.contains("died 4 times") && said.contains("the last one was ended by signal 11"), "{said}");
    }

    #[test]
    fn columns_stand_below_their_heads() {
        let disk = json!({"name": "disk0", "placement": "retain", "placement_effective": "storage",
            "counters": {"blocks_retained_now": 7, "transactions": 9}});
        let vms = json!([{"vm": "db", "state_text": "running", "disks": [disk]}, {"vm": "new", "state_text": "held", "disks": []}]);
        let table = table(&vms);
        let [head, one, other] = table.lines().collect::<Vec<_>>()[..] else { panic!("{table}") };
        let state = head.find("STATE").expect("a head");
        assert_eq!((&one[state..], &other[state..]), ("running", "held"), "{table}");
        for (name, cell) in [("HELD", "7"), ("COMMITS", "9")] {
            let end = head.find(name).expect("a head") + name.len();
            assert!(one[..end].ends_with(&format!(" {cell}")), "{name}\n{table}");
        }
        assert_eq!(one[head.find("PLACEMENT").expect("a head")..].split(' ').next(), Some("retain>storage"), "{table}");
    }

    /// A disk for which that was asked, in seconds; what is in force, and the age of the oldest transaction; and for how long that is too little.
    fn aged(asked: Value, (within, oldest): (Value, Value), unmet_for: Value, reason: Value) -> Value {
        json!({"name": "d", "placement": "retain", "placement_effective": "retain", "durable_within_wished_s": asked,
            "durable_within_unmet_for_s": unmet_for, "durability": {"within_s": within, "oldest_undurable_s": oldest, "reason": reason}})
    }

    #[test]
    fn whether_what_is_asked_for_is_in_force_is_shown() {
        let none = || Value::Null;
        // Of a worker that does not count for how long.
        let earlier = |asked: Value, within: Value| {
            let mut disk = aged(asked, (within, none()), none(), none());
            disk.as_object_mut().expect("an object").remove("durable_within_unmet_for_s");
            disk
        };
        for (disk, shown) in [
            (aged(json!(5), (json!(5), json!(3.21)), none(), none()), "5 s, 3.2 s"),
            (aged(json!(0), (json!(0), none()), none(), none()), "0 s"),
            (aged(json!(3600), (none(), none()), json!(0), json!("not yet")), "3600 s: not in force"),
            (aged(json!(5), (none(), none()), none(), none()), "5 s: not in use"),
            (aged(json!(0), (json!(5), json!(1.0)), json!(2), none()), "0 s: 5 s now"),
            (aged(none(), (json!(5), none()), none(), none()), "never: 5 s now"),
            (aged(none(), (none(), none()), none(), none()), "-"),
            (json!({"name": "d"}), "-"),
            (earlier(json!(5), none()), "5 s: not in force"),
            (earlier(json!(5), json!(5)), "5 s"),
            (earlier(json!(0), json!(5)), "0 s: 5 s now"),
        ] {
            let table = table(&json!([{"vm": "db", "state_text": "running", "disks": [disk]}]));
            let (head, line) = table.split_once('\n').expect("a head");
            let at = head.find("DURABLE WITHIN").expect("a column");
            assert_eq!(line[at..at + 20].trim_end(), shown, "{table}");
            assert!(line[at + 20..].starts_with("         0 "), "the columns behind it stay in place\n{table}");
        }
        let mut disk = aged(json!(5), (none(), none()), json!(1), json!("tmpfs is full"));
        let shown = |disk: &Value| table(&json!([{"vm": "db", "state_text": "running", "disks": [disk]}]));
        assert!(shown(&disk).contains("\n  db d: durable-within: tmpfs is full\n"), "{}", shown(&disk));
        disk["fault"] = json!("its journal is only held: tmpfs is full");
        assert_eq!(shown(&disk).matches("tmpfs is full").count(), 1, "{}", shown(&disk));
        let never = aged(none(), (none(), none()), none(), json!("tmpfs is full"));
        assert!(!shown(&never).contains("tmpfs"), "it is as asked");
    }

    #[test]
    fn a_promise_that_is_not_in_force_is_not_well() {
        let none = || Value::Null;
        let said = |disk: Value| problems(&json!([{"vm": "db", "state": "running", "disks": [disk]}]), false);
        for well in [
            aged(json!(5), (json!(5), json!(24.9)), none(), none()),
            aged(json!(0), (json!(0), json!(9.9)), none(), none()),
            aged(json!(5), (none(), none()), json!(60), json!("not yet")),
            aged(json!(5), (none(), none()), none(), none()),
            aged(none(), (none(), json!(900.0)), none(), json!("storage has failed")),
        ] {
            assert_eq!(said(well.clone()), [""; 0], "{well}");
        }
        assert_eq!(
            said(aged(json!(5), (none(), none()), json!(61), json!("tmpfs is full"))),
            [
                "vm db, disk d: durable-within=5 has not been in force for 61 s, nothing is (tmpfs is full): a loss of the host's power costs more \
              than was asked for"
            ]
        );
        let said_of = |disk: Value| said(disk).pop().expect("a problem");
        let slow = said_of(aged(json!(0), (json!(5), json!(90.0)), json!(61), none()));
        assert!(slow.contains("durable-within=0 has not been in force for 61 s, 5 s are: a loss"), "{slow}");
        let again = said_of(aged(json!(5), (json!(5), json!(1.0)), json!(300), none()));
        assert!(
            again.contains("durable-within=5 is in force, and has not been for a minute without a break for 300 s"),
            "{again}"
        );
        for (within, age) in [(5, 25.1), (0, 10.1), (100, 310.5)] {
            let late = said_of(aged(json!(within), (json!(within), json!(age)), none(), none()));
            assert!(
                late.contains(&format!(
                    "with durable-within={within} the oldest transaction that is not durable is {age:.0} s old"
                )),
                "{late}"
            );
        }
    }

    #[test]
    fn words_survive_the_shell() {
        assert_eq!(shell_word("socket,id=a,path=/run/x.sock"), "socket,id=a,path=/run/x.sock");
        assert_eq!(shell_word("/a b/it's"), r"'/a b/it'\''s'");
    }

    #[test]
    fn a_placement_is_told_as_in_the_option_of_a_disk() {
        let told = |argument: &str| {
            wished(argument).map(|Wished { placement, durable_within }| format!("{placement} {durable_within:?}"))
        };
        assert_eq!(told("retain").as_deref(), Ok("retain None"));
        assert_eq!(told("nvm").as_deref(), Ok("nvm None"));
        assert_eq!(told("copy,durable-within=never").as_deref(), Ok("copy Some(\"never\")"));
        assert_eq!(told("retain,durable-within=5").as_deref(), Ok("retain Some(\"5\")"));
        for (argument, sentence) in [
            ("moon", "there is no placement 'moon'"),
            ("", "there is no placement ''"),
            ("nvm=/dev/dax0.0", "say 'nvm' alone"),
            ("remote=a:1/b", "say 'remote' alone"),
            ("retain,durable-within=3601", "durable-within is never, or a number of seconds"),
            ("retain,durable-within=5,durable-within=6", "given twice"),
            ("retain,queues=2", "'queues=2' does not change while a guest runs"),
            ("retain,", "'' does not change"),
        ] {
            let refused = told(argument);
            assert!(refused.as_ref().is_err_and(|said| said.contains(sentence)), "{argument}: {refused:?}");
        }
    }

    #[test]
    fn what_is_not_well_is_said() {
        let well = json!([{"vm": "a", "state": "running", "disks": [{"name": "d"}]}, {"vm": "b", "state": "waiting", "disks": []}]);
        assert!(problems(&well, true).is_empty());
        let ill = json!([
            {"vm": "a", "state": "held", "state_text": "vm a is held", "disks": []},
            {"vm": "b", "state": "running", "disks": [{"name": "d", "fault": "queue 0 is stopped"}], "state_for_s": 9000},
            {"vm": "c", "state": "preparing", "state_text": "preparing", "disks": [], "state_for_s": 90},
            {"vm": "d", "state": "recovering", "state_text": "recovering", "disks": [], "state_for_s": 9},
        ]);
        let held = |placement: &str| json!([{"vm": "a", "state": "running", "disks": [{"name": "d", "placement_effective": placement}]}]);
        assert!(problems(&held("retain"), false).is_empty() && problems(&held("storage"), true).is_empty());
        let [said] = &problems(&held("copy"), true)[..] else { panic!("one problem") };
        assert!(said.starts_with("vm a, disk d: the host runs on battery"), "{said}");
        let region = |class: &str| json!([{"vm": "a", "state": "running", "disks": [{"name": "d", "placement_effective": "nvm", "nvm": {"path": "/dev/shm/r", "durability": class}}]}]);
        assert!(problems(&region("emulated"), false).is_empty() && problems(&region("synced"), true).is_empty());
        let [said] = &problems(&region("emulated"), true)[..] else { panic!("one problem") };
        assert!(said.contains("is in a region of NVM that is memory of the host (/dev/shm/r)"), "{said}");
        let waits = "vm c: has been preparing for 90 s; the log says what it waits for";
        assert_eq!(problems(&ill, false), ["vm a: vm a is held", "vm b, disk d: queue 0 is stopped", waits]);
    }

    #[test]
    fn a_vm_without_disks_has_a_line_too() {
        let vms = json!([
            {"vm": "db", "state_text": "running", "disks": [{"name": "disk0", "placement": "retain", "placement_effective": "copy", "counters": {"blocks_retained_now": 7}}]},
            {"vm": "web", "state_text": "failed: the image is gone", "disks": []},
        ]);
        let table = table(&vms);
        assert_eq!(table.lines().count(), 3, "{table}");
        assert!(
            table.contains("retain>copy") && table.contains("failed: the image is gone") && table.contains(" 7 "),
            "{table}"
        );
    }
}
