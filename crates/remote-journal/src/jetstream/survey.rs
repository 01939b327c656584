//! Opening a stream: whoever wrote before is fenced off, and all of it is read and checked.
//!
//! One replica may have lost what two others have, and may lead: so what is missing or damaged under one leader is asked
//! of the next, and an end is believed only when two leaders agree. Which numbers may be missing says the newest control
//! message; every other number up to the last has to be there and whole, or the stream is refused.

use super::message::{Absent, HEAD_BYTES, Head, Kind};
use super::stream::{Fenced, Link, Read, failed};
use super::{Content, Piece};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::time::Instant;

/// How often leaders are asked, at most.
const LEADERS_ASKED_MAX: usize = 6;

/// What was found out, under all leaders that were asked.
#[derive(Default)]
struct Survey {
    /// Messages that were whole under some leader, and the bytes of their contents.
    found: BTreeMap<u64, (Head, u64)>,
    /// Why others could not be read.
    faults: BTreeMap<u64, String>,
    /// Number and content of the newest control message.
    control: u64,
    absent: Absent,
    last: u64,
    /// Who was asked, and up to which number he had messages.
    asked: BTreeMap<String, u64>,
}

impl Survey {
    /// Adds what the leader has of what is not there yet. Gives who that is and who could be asked as well.
    fn ask_leader(&mut self, link: &Link) -> io::Result<(String, Vec<String>)> {
        let standing = link.standing()?;
        let control = link.newest_control()?;
        if control > self.control {
            link.read(std::iter::once(control), |_, read| self.take_control(control, read))?;
        }
        self.last = self.last.max(standing.last);
        if self.control == 0 && standing.last > 0 {
            // Without it nobody knows which numbers have to be there; they may be millions.
            self.asked.insert(standing.leader.clone(), standing.last);
            return Ok((standing.leader, standing.followers));
        }
        let found = &self.found;
        let wanted: Vec<u64> = self.absent.others(standing.last).filter(|number| !found.contains_key(number)).collect();
        link.read(wanted.into_iter(), |number, read| {
            match read {
                Read::Whole(head, message) => {
                    self.found.insert(number, (head, (message.len() - HEAD_BYTES) as u64));
                    self.faults.remove(&number);
                }
                Read::Missing => {
                    self.faults.insert(number, format!("{} does not have it", standing.leader));
                }
                Read::Damaged(why) => {
                    log::warn!("stream {}: message {number} on {}: {why}", link.name(), standing.leader);
                    self.faults.insert(number, format!("on {}, {why}", standing.leader));
                }
            }
            Ok(())
        })?;
        self.asked.insert(standing.leader.clone(), standing.last);
        Ok((standing.leader, standing.followers))
    }

    fn take_control(&mut self, number: u64, read: Read) -> io::Result<()> {
        if let Read::Whole(head, message) = read
            && head.kind == Kind::Control
            && let Some(absent) = Absent::read(&message[HEAD_BYTES..])
        {
            (self.control, self.absent) = (number, absent);
        }
        Ok(())
    }

    /// Whether no leader had a control message, which every stream of ours has.
    fn is_unknown(&self) -> bool {
        self.control == 0 && self.last > 0
    }

    /// Numbers that have to be there and are not.
    fn missing(&self) -> impl Iterator<Item = u64> {
        self.absent.others(self.last).filter(|number| !self.found.contains_key(number))
    }

    /// All of it, under one leader after the other. Gives whether nobody removed anything meanwhile: then it has to be read
    /// again.
    fn complete(&mut self, link: &Link) -> io::Result<bool> {
        for _ in 0..LEADERS_ASKED_MAX {
            let (leader, followers) = self.ask_leader(link)?;
            let is_whole = !self.is_unknown() && self.missing().next().is_none();
            let enough = (1 + followers.len()).min(2);
            let is_behind = self.asked[&leader] < self.last;
            if is_whole && self.asked.len() >= enough && !is_behind {
                return Ok(true);
            }
            if !is_whole && link.newest_control()? > self.control {
                return Ok(false);
            }
            // Whoever was not asked, then who had the most.
            let best = self.asked.iter().filter(|(name, _)| **name != leader).max_by_key(|(_, last)| **last);
            let others = followers.iter().filter(|name| !self.asked.contains_key(*name));
            let next = others.chain(best.map(|(name, _)| name).filter(|name| followers.contains(name)));
            let moved = next.into_iter().any(|next| {
                log::info!("stream {}: {next} is asked beside {leader}", link.name());
                link.move_leader(Some(next)).inspect_err(|error| log::warn!("{error}")).is_ok()
            });
            if !moved {
                break;
            }
        }
        let asked = self.asked.keys().cloned().collect::<Vec<_>>().join(", ");
        if self.is_unknown() {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!(
                    "the stream {} holds messages, but no control message of amberlog on any of {asked}: another program's, \
                     or damaged; name another stream, or delete it",
                    link.name()
                ),
            ));
        }
        match self.missing().next() {
            None => Err(failed(format!(
                "the stream {}: of its servers {asked} answered for it, and two have to, the last one with all {} messages; \
                 start the servers that are down",
                link.name(),
                self.last
            ))),
            Some(first) => Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!(
                    "the stream {} has a gap: message {first} of {} ({} in all) cannot be read from any of {asked} ({}); \
                     nothing past it is used. Start the servers that are down; if none has it, delete the stream and begin anew",
                    link.name(),
                    self.last,
                    self.missing().count(),
                    self.faults.get(&first).map_or("no leader named it", String::as_str)
                ),
            )),
        }
    }

    /// Who was fenced off must not have written after who fenced it off.
    fn check_generations(&self, link: &Link) -> io::Result<()> {
        let mut highest = 0;
        for (number, (head, _)) in &self.found {
            // A fence counts openings as its writer had last read them.
            if head.kind == Kind::Fence {
                continue;
            }
            if head.generation < highest {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    format!(
                        "message {number} of the stream {} was written by the journal server of opening {}, after that of \
                         opening {highest} had fenced it off: the stream did not keep its condition, and is not used",
                        link.name(),
                        head.generation
                    ),
                ));
            }
            highest = head.generation;
        }
        Ok(())
    }

    /// Pieces of every segment, in order.
    fn segments(&self) -> BTreeMap<u64, Content> {
        let mut segments: BTreeMap<u64, Content> = BTreeMap::new();
        for (number, (head, content_bytes)) in &self.found {
            if self.absent.contains(*number) {
                continue;
            }
            match head.kind {
                Kind::Control | Kind::Fence => {}
                Kind::Ends => segments.entry(head.segment).or_default().cut(head.offset, *number),
                Kind::Piece => segments.entry(head.segment).or_default().add(Piece {
                    offset: head.offset,
                    len: *content_bytes,
                    number: *number,
                }),
            }
        }
        segments
    }
}

/// Fences off whoever has a stream, reads all of it and checks it; gives its segments.
pub(super) fn open(link: &mut Link) -> io::Result<BTreeMap<u64, Content>> {
    let mut survey = Survey::default();
    let deadline = Instant::now() + link.patience();
    // Not where no journal server has been: that stream may be another program's.
    if link.newest_control()? > 0 {
        link.fence()?;
    }
    loop {
        if !survey.complete(link)? {
            let what = format!("stream {}: another journal server removed what was being read", link.name());
            if Instant::now() >= deadline {
                return Err(failed(format!("{what}, again and again; only one may run")));
            }
            log::info!("{what}; it is being fenced off");
            link.fence()?;
            continue;
        }
        survey.check_generations(link)?;
        link.last = survey.last;
        link.absent = survey.absent.clone();
        link.control = survey.control;
        link.generation = survey.found.values().map(|(head, _)| head.generation).max().unwrap_or(0) + 1;
        // Older control messages, and fences, are of no use any more, and were or will be removed.
        for (number, (head, _)) in &survey.found {
            if matches!(head.kind, Kind::Control | Kind::Fence) {
                link.absent.insert(*number);
            }
        }
        match publish_control(link) {
            Ok(()) => break,
            Err(error) => match error.get_ref().and_then(|inner| inner.downcast_ref::<Fenced>()) {
                Some(fenced) if Instant::now() < deadline => {
                    log::info!("{error}: it is being fenced off");
                    // Two that open it at once do not keep each other from it for ever: one of them is done first.
                    if fenced.by_opening { link.may_try_again() } else { link.fence()? }
                }
                _ => return Err(error),
            },
        }
    }
    let segments = survey.segments();
    remove_leftovers(link, &segments)?;
    log::info!(
        "stream {}: {} messages up to {} in {} segments, opening {}",
        link.name(),
        survey.found.len(),
        link.last,
        segments.len(),
        link.generation
    );
    Ok(segments)
}

/// Writes down which numbers may be missing, and removes the control message before.
pub(super) fn publish_control(link: &mut Link) -> io::Result<()> {
    let before = link.control;
    if before > 0 {
        link.absent.insert(before);
    }
    let content = link.absent.write();
    let number = link.publish(Kind::Control, 0, 0, &content)?;
    link.control = number;
    if before > 0
        && let Err(error) = link.purge(&link.control_subject(), number - 1)
    {
        log::warn!("{error}");
    }
    Ok(())
}

/// Removes what was to be removed when a journal server before this one ended.
fn remove_leftovers(link: &Link, segments: &BTreeMap<u64, Content>) -> io::Result<()> {
    link.purge(&link.fence_subject(), link.last)?;
    let there: BTreeSet<u64> = link.segments()?.into_iter().collect();
    for segment in there.iter().filter(|segment| !segments.contains_key(segment)) {
        link.purge(&link.segment_subject(*segment), link.last)?;
    }
    Ok(())
}
