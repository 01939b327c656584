//! What a guest sees of a worker's death: the longest gap between completions of a stream of 4 KB writes, and what took how long
//! on our side.
//!
//! The stream goes to a disk of its own, past the guest's cache. Beside it a program keeps committing to a journal of 128 MiB on the first
//! disk (data=journal), which the next worker has to take up before it serves either.

use crate::figure::{Basis, Figure, Limit};
use crate::machine::Machine;
use crate::options::Options;
use crate::{Outcome, sentence};
use guest_kit::image::ExtRecipe;
use guest_kit::{AtEnd, Guest, GuestSpec, Reported, Signal, program};
use guest_tools::random::Random;
use rustix::process::{Pid, kill_process};
use serde_json::{Value, json};
use std::ffi::OsString;
use std::path::Path;
use std::time::Duration;

pub(super) const LIMIT: Duration = Duration::from_secs(180);
/// What a worker says when it serves a guest that was there before.
const SAID: &str = "the guest of a dead worker goes on: ";

/// Kills a worker again and again, and says how long its guest waited.
pub fn measure(options: &Options, machine: &Machine, directory: &Path) -> Outcome<(Vec<Figure>, Value)> {
    let (kills, journal_mib) = if options.quick { (3, 8) } else { (60, 128) };
    let image = directory.join("pause.img");
    ExtRecipe::ext4(if options.quick { 128 } else { 768 }, journal_mib).make(&image).map_err(sentence)?;
    let area = tempfile::Builder::new().prefix("bench-").tempdir_in("/dev/shm").map_err(sentence)?;
    let stream = directory.join("stream.img");
    std::fs::File::create(&stream).and_then(|file| file.set_len(32 << 20)).map_err(sentence)?;
    let mut disk = OsString::from(&image);
    disk.push(",placement=retain");
    let mut words: Vec<OsString> = vec![program::workspace_binary("amberlog").map_err(sentence)?.into(), "run".into()];
    words.extend([
        "--disk".into(),
        disk,
        "--disk".into(),
        stream.into(),
        "--shm".into(),
        area.path().into(),
        "--deaths-max".into(),
        "1000000".into(),
    ]);
    let script = format!(
        "mount -t ext4 -o data=journal /dev/vda /mnt || fail mount
        guest-tools randwrite --file /mnt/load --file-mib {} --mib 1000000 --fsync-every 32 &
        guest-tools gaps --file /dev/vdb",
        if options.quick { 8 } else { 48 }
    );
    let mut spec = GuestSpec::new("pause", script).wrapper(words);
    spec.at_end = AtEnd::Stay;
    spec.memory_mib = 768;
    let mut guest = Guest::start(spec).map_err(sentence)?;
    wait(&mut guest, "gap", 20)?;
    let usual = gaps(&guest, "gap").into_iter().skip(4).max().unwrap_or(0);
    let mut random = Random::of(7, 1);
    let mut pauses = Vec::new();
    for _ in 0..kills {
        std::thread::sleep(Duration::from_millis(500 + random.below(500)));
        let worker = guest_kit::worker_of(guest.process_id()).ok_or("there is no worker")?;
        let before = gaps(&guest, "gap").len();
        let pid = i32::try_from(worker).ok().and_then(Pid::from_raw).ok_or("a process has a number")?;
        kill_process(pid, Signal::KILL).map_err(sentence)?;
        wait(&mut guest, "gap", before + 3)?;
        pauses.push(gaps(&guest, "gap").into_iter().skip(before).take(3).max().unwrap_or(0));
    }
    let said: Vec<String> =
        guest.stderr().lines().filter_map(|line| Some(line.split_once(SAID)?.1.to_owned())).collect();
    guest.kill_qemu().map_err(sentence)?;
    guest.wait_end(LIMIT).map_err(sentence)?;
    println!("\na worker killed {} times; without a kill the longest gap was {:.1} ms", pauses.len(), ms(usual));
    for (what, mut times) in steps(&said, &pauses) {
        times.sort_by(f64::total_cmp);
        let at = |share: f64| times[((times.len() - 1) as f64 * share).round() as usize];
        println!("    p50 {:6.1} ms, p99 {:6.1} ms, n = {}: {what}", at(0.5), at(0.99), times.len());
    }
    let mut sorted = pauses.clone();
    sorted.sort_unstable();
    let at = |share: f64| ms(sorted[((sorted.len() - 1) as f64 * share).round() as usize]);
    let note = format!("n = {}, at most {:.1} ms; {}", sorted.len(), at(1.0), machine.guests_run_on());
    let figure = |name: &str, share, limit| {
        Figure::new(name, at(share), "ms", Limit::AtMost(limit), Basis::Time).note(note.clone())
    };
    let figures = vec![
        figure("a worker's death: longest gap of 4 KB writes, p50", 0.5, 20.0),
        figure("a worker's death: longest gap of 4 KB writes, p99", 0.99, 200.0),
    ];
    Ok((figures, json!({"pauses_us": pauses, "usual_us": usual, "journal_mib": journal_mib, "steps": said})))
}

/// The gaps that a guest has told of by this word, in microseconds.
fn gaps(guest: &Guest, mark: &str) -> Vec<u64> {
    let marks = guest.reported().marks;
    marks.iter().filter_map(|said| said.strip_prefix(mark)?.strip_prefix(' ')?.parse().ok()).collect()
}

/// Waits until it has told of so many.
fn wait(guest: &mut Guest, mark: &str, count: usize) -> Outcome<()> {
    let is_of = |said: &&String| said.strip_prefix(mark).is_some_and(|rest| rest.starts_with(' '));
    let is_enough = |reported: &Reported| (reported.marks.iter().filter(is_of).count() >= count).then_some(());
    guest.await_report("more gaps", LIMIT, is_enough).map_err(sentence)
}

/// A time in ms at the beginning of a text, and what comes after it.
fn time_of(text: &str) -> Option<(f64, &str)> {
    let (time, what) = text.split_once(" ms")?;
    Some((time.parse().ok()?, what.trim()))
}

/// What took how long, in ms: as the workers say it, and what is left of each pause.
fn steps(said: &[String], pauses_us: &[u64]) -> Vec<(String, Vec<f64>)> {
    let mut steps: Vec<(String, Vec<f64>)> = Vec::new();
    let mut add = |what: &str, time: f64| match steps.iter_mut().find(|(name, _)| name == what) {
        Some((_, times)) => times.push(time),
        None => steps.push((what.to_owned(), vec![time])),
    };
    for line in said {
        let parts = line.split_once('(').map_or("", |(_, parts)| parts.trim_end_matches(')'));
        parts.split(", ").filter_map(time_of).for_each(|(time, what)| add(what, time));
    }
    // One that dies before it serves says nothing: then nobody knows which line is whose.
    if said.len() == pauses_us.len() {
        for (line, pause) in said.iter().zip(pauses_us) {
            let all = time_of(line).map_or(0.0, |(time, _)| time);
            add("to die, to be followed by a process, and to serve when that has the disks", ms(*pause) - all);
        }
    }
    steps
}

fn ms(us: u64) -> f64 {
    us as f64 / 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_workers_say_is_taken_apart() {
        let said = [
            "10.5 ms (0.5 ms to hear, 10.0 ms for tables and logs)",
            "4.0 ms (1.0 ms to hear, 3.0 ms for tables and logs)",
        ];
        let said = said.map(str::to_owned).to_vec();
        let found = steps(&said, &[20_500, 10_000]);
        let rest = "to die, to be followed by a process, and to serve when that has the disks".to_owned();
        let expected = vec![
            ("to hear".to_owned(), vec![0.5, 1.0]),
            ("for tables and logs".to_owned(), vec![10.0, 3.0]),
            (rest, vec![10.0, 6.0]),
        ];
        assert_eq!(found, expected);
        assert_eq!(steps(&said[..1], &[20_500, 10_000]).len(), 2);
    }
}
