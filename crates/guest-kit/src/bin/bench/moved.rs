//! What a guest sees while a journal of its goes to storage: requests to the disk that has it, and to other disks of the same VM (`beside.rs`
//! says which they are, and how they are timed).
//!
//! `amberlog placement` hands a journal over that owes some tens of MiB, while its guest goes on: nothing of that may stop another disk, and the
//! disk's own requests wait for what has to be in one place before it can be in the other. A journal comes back with the guest's next mount
//! alone, so the guest mounts anew for each hand-over. In turns with it the daemon is asked for something that changes nothing: so much
//! a program that is started and a question cost by themselves.

use crate::Outcome;
use crate::beside::{DISK, HELD, OWN, PLAIN, Rig, spread};
use crate::figure::{Figure, median};
use crate::machine::Machine;
use crate::options::Options;
use serde_json::{Value, json};
use std::path::Path;

const HAND_OVER: &str = "hand-over";
const QUESTION: &str = "question";
/// What a daemon says of a journal that it has handed over.
const SAID: &str = "disk disk0: the journal of the file system at byte 0 is on storage from now on";

/// Hands a guest's journal over again and again, and says how long its requests took.
pub fn measure(options: &Options, machine: &Machine, directory: &Path) -> Outcome<(Vec<Figure>, Value)> {
    let rounds = if options.quick { 3 } else { 30 };
    let mut rig = Rig::start("moved", options, machine, directory)?;
    let streams = [OWN, HELD, PLAIN];
    let (mut took_ms, mut home_mib) = (Vec::new(), Vec::new());
    for round in 1..=rounds {
        rig.does("up && fill && own")?;
        rig.await_ready(OWN, round)?;
        rig.quiet(&streams)?;
        rig.window(QUESTION, &streams, |rig| rig.ask("status", &["--json"]).map(drop))?;
        let before = rig.home_bytes()?;
        let hand_over = |rig: &mut Rig| rig.ask("placement", &[DISK, "storage"]).map(drop);
        took_ms.push(rig.window(HAND_OVER, &streams, hand_over)?);
        home_mib.push(rig.home_bytes()?.saturating_sub(before) as f64 / f64::from(1 << 20));
        // With the next mount.
        rig.ask("placement", &[DISK, "retain"])?;
        rig.does("stop")?;
    }
    let said = rig.said(SAID)?.len();
    if said != rounds {
        return Err(format!("of {rounds} hand-overs the daemon tells of {said}: the others were none"));
    }
    println!(
        "\n{rounds} journals handed over, each of which owed {} MiB and more; {:.0} MiB (median) went home meanwhile; \
         with the program that asks for it {}",
        rig.owed_mib,
        median(&home_mib),
        spread(&took_ms)
    );
    let figures = rig.tell(HAND_OVER, "a hand-over", &streams, machine);
    rig.tell(QUESTION, "a question instead", &streams, machine);
    let mut detail = rig.detail();
    detail["hand_overs_ms"] = json!(took_ms);
    detail["home_mib"] = json!(home_mib);
    rig.end()?;
    Ok((figures, detail))
}
