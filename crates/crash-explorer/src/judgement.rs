//! A sample of crash points, judged by others: amberlog's own files of a dead process are finished by the code behind
//! `amberlog recover --area`, e2fsck replays the complete journal and checks what we recovered, and everything that was
//! acknowledged is looked for.
//!
//! Known differences between the two disks, all of which are looked over and nothing else:
//! * the journal's own blocks: amberlog does not write the log to its place;
//! * files that were open and unlinked, or being truncated: e2fsck ends them when it has replayed a journal, we leave
//!   them to the next mount, so e2fsck is run over our disk too where there are any;
//! * of the file system's superblock, what e2fsck stamps when it has replayed a journal: the time of the last write
//!   (0x30), how much was ever written (0x178, of which it counts its own), and the checksum that follows from both (0x3FC).

use crate::check::open_found;
use crate::complete::{HeldReader, JudgedLog};
use crate::error::{During, Error, Result};
use crate::finding::{Step, finding};
use crate::overlay::Change;
use crate::scenario::Scenario;
use crate::scratch::scratch;
use crate::simulation::Simulation;
use guest_kit::image::copy_image;
use guest_kit::{Reported, judge};
use guest_tools::random::Random;
use placement::{AreaDirectory, Finish, LogDescription, finish_directory};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Bytes of the file system's superblock that e2fsck stamps: offset and length.
const STAMPED: &[(usize, usize)] = &[(0x30, 4), (0x178, 8), (0x3FC, 4)];
const SUPERBLOCK_AT: usize = 1024;

/// Writes that had landed when the crash came: disk, offset, bytes.
type Landed = Vec<(usize, u64, Vec<u8>)>;

/// Judges this very moment, with a choice of what had landed that follows from `random`.
///
/// # Errors
/// The first promise that is broken.
pub fn judge(simulation: &Simulation<'_>, scenario: &Scenario, random: &mut Random) -> Step {
    let landed = land(simulation, random);
    let scratch = scratch()?;
    let ours = crashed(simulation, &landed, &scratch.path().join("ours"))?;
    let area = copy_area(simulation, &ours, &scratch.path().join("area"))?;
    if let Err(error) = finish_directory(&area, &ours).and_then(Finish::into_result) {
        return finding(format!("finishing what a dead process left fails: {error}"));
    }
    for judged in &simulation.logs {
        if judged.is_open() && !simulation.is_stored(judged) {
            compare_with_e2fsck(simulation, judged, &landed, &ours, scratch.path())?;
            crash_in_recovery(simulation, judged, &landed, &ours, scratch.path(), random)?;
        } else {
            // Mounted, but nothing committed: the file system is marked as in need of a recovery that finds nothing. Or handed
            // over to storage, where the guest's kernel finds it.
            judge::replay_with_e2fsck(&judged.file_system(&ours)).map_err(Error::from)?;
        }
    }
    let file_system = simulation.logs[0].file_system(&ours);
    let verdict = judge::check(&file_system).map_err(Error::from)?;
    if let Some(problem) = verdict.problems.first() {
        return finding(format!("e2fsck -fn on what was recovered: {problem}"));
    }
    if verdict.needs_recovery {
        return finding("after recovery the journal still has to be replayed");
    }
    let reported = Reported { acknowledged: simulation.acknowledged.clone(), ..Reported::default() };
    match scenario.check(&file_system, &reported)?.first() {
        Some(fault) => finding(format!("acknowledged work is lost: {fault}")),
        None => Ok(()),
    }
}

/// Some of the writes in flight, whole or in part: a file system block is written or not.
fn land(simulation: &Simulation<'_>, random: &mut Random) -> Landed {
    let block_bytes = simulation.logs[0].block_bytes() as usize;
    let how = random.below(4);
    let mut landed = Landed::new();
    for pending in simulation.in_flight_writes() {
        let Some(bytes) = pending.bytes() else { continue };
        let offset = pending.operation.offset;
        match how {
            0 => {}
            1 => landed.push((pending.disk, offset, bytes)),
            _ => {
                for (index, block) in bytes.chunks(block_bytes).enumerate() {
                    if random.below(2) == 0 {
                        landed.push((pending.disk, offset + (index * block_bytes) as u64, block.to_vec()));
                    }
                }
            }
        }
    }
    landed
}

/// Copies of the disks as the crash left them.
fn crashed(simulation: &Simulation<'_>, landed: &Landed, to: &Path) -> Result<Vec<PathBuf>> {
    std::fs::create_dir_all(to).during("making a directory")?;
    let mut paths = Vec::new();
    for disk in 0..simulation.images.len() {
        let path = to.join(format!("disk{disk}"));
        copy_image(&simulation.directory.path().join(format!("disk{disk}")), &path)?;
        let file = File::options().write(true).open(&path).during("opening an image")?;
        for (_, offset, bytes) in landed.iter().filter(|(of, ..)| *of == disk) {
            file.write_all_at(bytes, *offset).during("writing an image")?;
        }
        paths.push(path);
    }
    Ok(paths)
}

/// A copy of the area's files, which says that the disks are these.
fn copy_area(simulation: &Simulation<'_>, images: &[PathBuf], to: &Path) -> Result<AreaDirectory> {
    let from = simulation.journals.directory();
    let other = |e: placement::DirectoryError| Error::Other(e.to_string());
    let area = AreaDirectory::create(to, &to.join("registry")).map_err(other)?;
    let ram_path = area.path().join("ram");
    let ram = File::create(&ram_path).during("making guest memory")?;
    let pages = u64::from(simulation.recording.memory_pages);
    ram.set_len(pages * crate::recording::PAGE_BYTES as u64).during("making guest memory")?;
    let mut logs = Vec::new();
    for judged in &simulation.logs {
        let name = &judged.description.name;
        for ending in ["table", "pool"] {
            let file = format!("{name}.{ending}");
            copy_image(&from.path().join(&file), &area.path().join(&file))?;
        }
        // The guest's other pages are gone: recovery must not need them.
        for page in open_found(simulation, judged)?.pages() {
            let mut content = [0; crate::recording::PAGE_BYTES];
            let Some(slice) = simulation.memory.page(page) else { continue };
            slice.copy_out(0, &mut content);
            ram.write_all_at(&content, u64::from(page.0) * content.len() as u64).during("writing guest memory")?;
        }
        let place = judged.description.place.clone();
        let (home, journal) = (images[place.home_disk].clone(), images[place.journal_disk].clone());
        logs.push(LogDescription::new(name.clone(), home, journal, place));
    }
    area.describe(&[(ram_path, 0)], logs, Vec::new()).during("describing the area")?;
    Ok(area)
}

/// Rule 2 of ARCHITECTURE.md, with e2fsck itself: the same crash, the complete journal at its place.
fn compare_with_e2fsck(
    simulation: &Simulation<'_>,
    judged: &JudgedLog,
    landed: &Landed,
    ours: &[PathBuf],
    scratch: &Path,
) -> Step {
    let theirs = crashed(simulation, landed, &scratch.join("theirs"))?;
    let place = &judged.description.place;
    let file = File::options().write(true).open(&theirs[place.journal_disk]).during("opening an image")?;
    for (position, block) in judged.written() {
        let Some(offset) = judged.offset_of(position) else { continue };
        file.write_all_at(block, offset).during("writing the complete journal")?;
    }
    drop(file);
    judge::replay_with_e2fsck(&judged.file_system(&theirs)).map_err(Error::from)?;
    let mut ours = ours.to_vec();
    if has_orphans(judged, &ours[place.home_disk])? {
        for path in &mut ours {
            let copy = path.with_extension("orphans");
            copy_image(path, &copy).map_err(Error::from)?;
            *path = copy;
        }
        judge::replay_with_e2fsck(&judged.file_system(&ours)).map_err(Error::from)?;
    }
    match difference(judged, &ours[place.home_disk], &theirs[place.home_disk])? {
        Some(text) => finding(format!("e2fsck makes another disk of the complete journal: {text}")),
        None => Ok(()),
    }
}

/// Whether the superblock heads a list of orphans (`s_last_orphan`).
fn has_orphans(judged: &JudgedLog, image: &Path) -> Result<bool> {
    let file = File::open(image).during("opening an image")?;
    let mut field = [0; 4];
    let offset = judged.description.place.home_start + SUPERBLOCK_AT as u64 + 0xE8;
    file.read_exact_at(&mut field, offset).during("reading an image")?;
    Ok(field != [0; 4])
}

/// The first block in which two homes differ, known differences aside.
fn difference(judged: &JudgedLog, ours: &Path, theirs: &Path) -> Result<Option<String>> {
    let place = &judged.description.place;
    let block_bytes = judged.block_bytes();
    let first = place.home_start / block_bytes;
    for range in judge::differing_blocks(ours, theirs, block_bytes)? {
        for number in range {
            let block = number.wrapping_sub(first);
            if place.own_blocks.iter().any(|own| own.contains(&block)) || judged.discarded.contains(&block) {
                continue;
            }
            let read = |path: &Path| -> Result<Vec<u8>> {
                let mut content = vec![0; block_bytes as usize];
                let file = File::open(path).during("opening an image")?;
                file.read_exact_at(&mut content, number * block_bytes).during("reading an image")?;
                Ok(content)
            };
            let (mut left, mut right) = (read(ours)?, read(theirs)?);
            if block == judged.superblock_block() {
                let into = SUPERBLOCK_AT % block_bytes as usize;
                for (offset, len) in STAMPED {
                    left[into + offset..into + offset + len].fill(0);
                    right[into + offset..into + offset + len].fill(0);
                }
            }
            if left != right {
                let at = left.iter().zip(&right).position(|(a, b)| a != b).unwrap_or(0);
                let end = (at + 8).min(left.len());
                return Ok(Some(format!(
                    "block {block} differs from byte {at:#x} on: ours {:02x?}, theirs {:02x?}",
                    &left[at..end],
                    &right[at..end]
                )));
            }
        }
    }
    Ok(None)
}

/// A recovery that is cut off anywhere and begun again comes to the same.
fn crash_in_recovery(
    simulation: &Simulation<'_>,
    judged: &JudgedLog,
    landed: &Landed,
    ours: &[PathBuf],
    scratch: &Path,
    random: &mut Random,
) -> Step {
    let place = &judged.description.place;
    let found = open_found(simulation, judged)?;
    let held = found.log();
    let journal = &simulation.images[place.journal_disk];
    let recovered = judged.replay(&mut HeldReader { held: &held, judged, journal }, &simulation.images, landed)?;
    let changes = recovered.home.changes();
    let cut = random.below(changes.len() as u64 + 1) as usize;
    let flushed = changes[..cut].iter().rposition(|change| *change == Change::Flush).unwrap_or(0);
    let again = crashed(simulation, landed, &scratch.join("again"))?;
    let file = File::options().write(true).open(&again[place.home_disk]).during("opening an image")?;
    for (index, change) in changes[..cut].iter().enumerate() {
        // What was not flushed may be there or not.
        if let Change::Write(offset, data) = change
            && (index < flushed || random.below(2) == 0)
        {
            file.write_all_at(data, place.home_start + offset).during("writing an image")?;
        }
    }
    drop(file);
    let area = copy_area(simulation, &again, &scratch.join("area-again"))?;
    if let Err(error) = finish_directory(&area, &again).and_then(Finish::into_result) {
        return finding(format!(
            "a recovery cut off after {cut} of {} steps cannot be begun again: {error}",
            changes.len()
        ));
    }
    let differ = judge::differing_blocks(&ours[place.home_disk], &again[place.home_disk], judged.block_bytes());
    // What is made durable by age lies in the journal's own place, with the times at which it was made.
    let first = place.home_start / judged.block_bytes();
    let is_own = |block: u64| place.own_blocks.iter().any(|own| own.contains(&block.wrapping_sub(first)));
    let differ = differ.map_err(Error::from)?;
    match differ.iter().find(|range| !(*range).clone().all(is_own)) {
        Some(range) => finding(format!(
            "a recovery cut off after {cut} of {} steps and begun again leaves another block {}",
            changes.len(),
            range.start
        )),
        None => Ok(()),
    }
}
