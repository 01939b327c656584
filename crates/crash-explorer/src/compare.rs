//! The home blocks that two recoveries leave, compared for every choice of what had landed (see `check`).

use crate::complete::{JudgedLog, Recovered};
use crate::finding::{Step, Stop, finding};
use crate::simulation::Simulation;
use std::collections::BTreeSet;
use std::os::unix::fs::FileExt;

/// Compares the home blocks that two recoveries leave, but the file system's superblock, for every choice of what had
/// landed.
///
/// # Errors
/// The first block that differs.
pub fn compare_blocks(
    simulation: &Simulation<'_>,
    judged: &JudgedLog,
    held: &Recovered<'_>,
    complete: &Recovered<'_>,
) -> Step {
    let superblock_block = judged.superblock_block();
    let blocks: BTreeSet<u64> = held.home.blocks().keys().chain(complete.home.blocks().keys()).copied().collect();
    for block in blocks {
        // The journal's own blocks differ as they must: amberlog never writes the log to its place.
        if !judged.bounds.contains(block) || block == superblock_block {
            continue;
        }
        let (ours, theirs) = (held.home.blocks().get(&block), complete.home.blocks().get(&block));
        let one = match (ours, theirs) {
            (Some(ours), Some(theirs)) if ours == theirs => continue,
            (Some(_), Some(_)) => return finding(describe(judged, block, "get another version from the held log")),
            (Some(one), None) | (None, Some(one)) => one,
            (None, None) => continue,
        };
        if judged.discarded.contains(&block) {
            continue;
        }
        let who = if ours.is_none() { "is not held, and" } else { "is held though the guest let it go, and" };
        for possible in possible(simulation, judged, block)? {
            if possible != *one {
                return finding(describe(judged, block, &format!("{who} may be older at home")));
            }
        }
    }
    Ok(())
}

fn describe(judged: &JudgedLog, block: u64, what: &str) -> String {
    format!("block {block} of {} {what}", judged.description.home_image.display())
}

/// All that a home block can hold at this moment.
fn possible(simulation: &Simulation<'_>, judged: &JudgedLog, block: u64) -> std::result::Result<Vec<Vec<u8>>, Stop> {
    let block_bytes = judged.block_bytes();
    let start = judged.log.home_offset(block);
    let end = start + block_bytes;
    let mut now = vec![0; block_bytes as usize];
    if simulation.images[judged.description.place.home_disk].read_exact_at(&mut now, start).is_err() {
        return finding(format!("block {block} cannot be read"));
    }
    let mut all = vec![now.clone()];
    for pending in simulation.in_flight_writes() {
        let (from, to) = (pending.operation.offset, pending.operation.offset + pending.operation.len);
        if pending.disk != judged.description.place.home_disk || from >= end || to <= start {
            continue;
        }
        let Some(bytes) = pending.bytes() else { continue };
        let mut landed = now.clone();
        let (first, last) = (from.max(start), to.min(end));
        landed[(first - start) as usize..(last - start) as usize]
            .copy_from_slice(&bytes[(first - from) as usize..(last - from) as usize]);
        all.push(landed);
    }
    Ok(all)
}
