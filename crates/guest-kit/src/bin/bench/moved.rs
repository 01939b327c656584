//! What a guest sees while its journals go to storage and back to memory: the longest gap between completions of a stream of durable
//! writes on the disk whose journals move, and of a stream of 4 KB writes on another disk of the same VM.
//!
//! The daemon is a real one (`amberlog serve`), and `amberlog placement` moves the journals. A move is beside its guest: nothing of it may
//! stop the other disk, and its own waits for what has to be in one place before it can be in the other.

use crate::figure::{Basis, Figure, Limit};
use crate::machine::Machine;
use crate::options::Options;
use crate::pause::{LIMIT, gaps, wait};
use crate::{Outcome, sentence};
use guest_kit::image::ExtRecipe;
use guest_kit::{AtEnd, Guest, GuestSpec, program};
use serde_json::{Value, json};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

const VM: &str = "moved";
/// Of the disk whose journals move, and of the other one.
const MARKS: [&str; 2] = ["commit-gap", "gap"];

struct Daemon {
    process: Child,
    run: PathBuf,
}

impl Daemon {
    fn start(directory: &Path, area: &Path, images: [&Path; 2]) -> Outcome<Self> {
        let (config, run) = (directory.join("moved.toml"), directory.join("run"));
        let text = format!(
            "shm = {area:?}\nrun = {run:?}\nreports = {directory:?}\n[[vm]]\nname = {VM:?}\ndisks = [{:?}, {:?}]\n",
            images[0], images[1],
        );
        std::fs::write(&config, text).map_err(sentence)?;
        let log = std::fs::File::create(directory.join("moved.log")).map_err(sentence)?;
        let program = program::workspace_binary("amberlog").map_err(sentence)?;
        let process = std::process::Command::new(program)
            .args(["serve".as_ref(), "--config".as_ref(), config.as_os_str()])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .map_err(sentence)?;
        Ok(Self { process, run })
    }

    fn ask(&self, words: &[&str]) -> Outcome<Vec<u8>> {
        let program = program::workspace_binary("amberlog").map_err(sentence)?;
        let output =
            std::process::Command::new(program).args(words).arg("--run").arg(&self.run).output().map_err(sentence)?;
        match output.status.success() {
            true => Ok(output.stdout),
            false => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
        }
    }

    fn spec(&self, script: String, memory_mib: u32) -> Outcome<GuestSpec> {
        let deadline = Instant::now() + LIMIT;
        let memory = memory_mib.to_string();
        let needed = loop {
            match self.ask(&["arguments", VM, "--memory", &memory, "--json"]) {
                Ok(said) => break serde_json::from_slice::<Value>(&said).map_err(sentence)?,
                Err(error) if Instant::now() > deadline => return Err(error),
                Err(_) => std::thread::sleep(Duration::from_millis(50)),
            }
        };
        let word = |value: &Value| value.as_str().map(OsString::from);
        let mut spec = GuestSpec::new(VM, script);
        spec.qemu_arguments = needed["arguments"].as_array().into_iter().flatten().filter_map(word).collect();
        let environment = needed["environment"].as_object().into_iter().flatten();
        spec.environment = environment.filter_map(|(name, value)| Some((name.into(), word(value)?))).collect();
        spec.at_end = AtEnd::Stay;
        Ok(spec)
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Moves a guest's journals again and again, and says how long it waited.
pub fn measure(options: &Options, machine: &Machine, directory: &Path) -> Outcome<(Vec<Figure>, Value)> {
    let (moves, journal_mib) = if options.quick { (3, 8) } else { (60, 128) };
    let (image, stream) = (directory.join("moved.img"), directory.join("beside.img"));
    ExtRecipe::ext4(if options.quick { 128 } else { 768 }, journal_mib).make(&image).map_err(sentence)?;
    std::fs::File::create(&stream).and_then(|file| file.set_len(32 << 20)).map_err(sentence)?;
    let area = tempfile::Builder::new().prefix("bench-").tempdir_in("/dev/shm").map_err(sentence)?;
    let daemon = Daemon::start(directory, area.path(), [&image, &stream])?;
    let script = format!(
        "mount -t ext4 -o data=journal /dev/vda /mnt || fail mount
        guest-tools randwrite --file /mnt/load --file-mib {} --mib 1000000 --fsync-every 32 &
        guest-tools gaps --file /mnt/stream --file-mib 1 --durable --mark {} &
        guest-tools gaps --file /dev/vdb --mark {}",
        if options.quick { 8 } else { 48 },
        MARKS[0],
        MARKS[1],
    );
    let mut guest = Guest::start(daemon.spec(script, 768)?).map_err(sentence)?;
    for mark in MARKS {
        wait(&mut guest, mark, 20)?;
    }
    let usual = MARKS.map(|mark| gaps(&guest, mark).into_iter().skip(4).max().unwrap_or(0));
    let mut pauses: Vec<(&str, &str, Vec<u64>)> = Vec::new();
    let mut took_ms: Vec<(&str, f64)> = Vec::new();
    for _ in 0..moves {
        for to in ["storage", "retain"] {
            std::thread::sleep(Duration::from_millis(700));
            let before = MARKS.map(|mark| gaps(&guest, mark).len());
            let begun = Instant::now();
            daemon.ask(&["placement", VM, "disk0", to])?;
            took_ms.push((to, begun.elapsed().as_secs_f64() * 1e3));
            for (mark, before) in MARKS.into_iter().zip(before) {
                let told = gaps(&guest, mark).len();
                wait(&mut guest, mark, told + 2)?;
                let longest = gaps(&guest, mark).into_iter().skip(before).max().unwrap_or(0);
                match pauses.iter_mut().find(|(of, at, _)| (*of, *at) == (to, mark)) {
                    Some((_, _, longests)) => longests.push(longest),
                    None => pauses.push((to, mark, vec![longest])),
                }
            }
        }
    }
    guest.kill_qemu().map_err(sentence)?;
    guest.wait_end(LIMIT).map_err(sentence)?;
    println!(
        "\njournals moved {moves} times each way; with no move the longest gap was {:.1} ms of durable writes, {:.1} on the other disk",
        ms(usual[0]),
        ms(usual[1])
    );
    let mut figures = Vec::new();
    for (to, mark, longests) in &mut pauses {
        longests.sort_unstable();
        let at = |share: f64| ms(longests[((longests.len() - 1) as f64 * share).round() as usize]);
        let what = if *mark == MARKS[0] { "durable writes on it" } else { "writes of 4 KB on another disk" };
        println!("    p50 {:6.1} ms, p99 {:6.1} ms, n = {}: to {to}, {what}", at(0.5), at(0.99), longests.len());
        let note = format!("n = {}, p50 {:.1} ms; {}", longests.len(), at(0.5), machine.guests_run_on());
        let name = format!("journals move to {to}: longest gap of {what}, p99");
        figures.push(Figure::new(name, at(0.99), "ms", Limit::AtMost(200.0), Basis::Time).note(note));
    }
    let detail = json!({"pauses_us": pauses, "usual_us": usual, "moves_ms": took_ms, "journal_mib": journal_mib});
    Ok((figures, detail))
}

fn ms(us: u64) -> f64 {
    us as f64 / 1e3
}
