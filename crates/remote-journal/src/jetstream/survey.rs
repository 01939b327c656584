//! Opening a stream: whoever wrote before is fenced off, and all of it is read and checked.
//!
//! One replica may have lost what two others have, and may lead: so what is missing or damaged under one leader is asked
//! of the next, and an end is believed only when two leaders agree. Which numbers may be missing says the newest control
//! message; every other number up to the last has to be there and whole, or the stream is refused. Where that takes several messages
//! and the last of them is not there, the one before counts: nothing was removed yet that only they say.

use super::message::{Absent, HEAD_BYTES, Head, Kind, Part};
use super::stream::{Fenced, Link, Read, failed};
use super::{Content, Piece};
use bytes::Bytes;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::ops::RangeInclusive;
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
    /// Numbers (the first and the last) and content of the newest control message that is whole.
    control: (u64, u64),
    absent: Absent,
    /// The newest that was looked at, whole or not.
    control_seen: u64,
    last: u64,
    /// Who was asked, and up to which number he had messages.
    asked: BTreeMap<String, u64>,
}

impl Survey {
    /// Adds what the leader has of what is not there yet. Gives who that is and who could be asked as well.
    fn ask_leader(&mut self, link: &Link) -> io::Result<(String, Vec<String>)> {
        let standing = link.standing()?;
        let newest = link.newest_control()?;
        if newest > self.control.1 {
            self.control_seen = self.control_seen.max(newest);
            let read = |numbers: RangeInclusive<u64>| {
                let mut messages = Vec::new();
                link.read(numbers, |_, read| {
                    messages.push(match read {
                        Read::Whole(head, message) => Some((head, message)),
                        Read::Missing | Read::Damaged(_) => None,
                    });
                    Ok(())
                })?;
                Ok(messages.into_iter().collect())
            };
            if let Some((control, absent)) = whole_control(newest, read)?.filter(|(found, _)| found.1 > self.control.1)
            {
                (self.control, self.absent) = (control, absent);
            }
        }
        self.last = self.last.max(standing.last);
        if self.control.1 == 0 && standing.last > 0 {
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

    /// Whether no leader had a control message, which every stream of ours has.
    fn is_unknown(&self) -> bool {
        self.control.1 == 0 && self.last > 0
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
            if !is_whole && link.newest_control()? > self.control_seen {
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
                Kind::Control | Kind::ControlPart | Kind::Fence => {}
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
            if matches!(head.kind, Kind::Control | Kind::ControlPart | Kind::Fence) {
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

/// A message, and its head.
type Message = (Head, Bytes);

/// The newest control message that is whole, with its numbers: the one that ends with this number, or, where that is a part of one that
/// was cut off, the one before. `read` gives messages one after the other, or nothing where one cannot be read.
fn whole_control(
    newest: u64,
    mut read: impl FnMut(RangeInclusive<u64>) -> io::Result<Option<Vec<Message>>>,
) -> io::Result<Option<((u64, u64), Absent)>> {
    let mut number = newest;
    // Whoever was cut off has named the one before, which is whole.
    for _ in 0..2 {
        if number == 0 {
            return Ok(None);
        }
        let Some(message) = read(number..=number)?.and_then(|mut messages| messages.pop()) else { return Ok(None) };
        let (head, content) = (message.0, &message.1[HEAD_BYTES..]);
        match head.kind {
            Kind::Control => return Ok(Absent::read(content).map(|absent| ((number, number), absent))),
            Kind::ControlPart => {}
            Kind::Piece | Kind::Ends | Kind::Fence => return Ok(None),
        }
        let Some((part, _)) = Part::read(content) else { return Ok(None) };
        if part.index + 1 < part.of {
            number = part.before.min(number - 1);
            continue;
        }
        let Some(first) = number.checked_sub(part.index.into()).filter(|first| *first > 0) else { return Ok(None) };
        let Some(messages) = read(first..=number)? else { return Ok(None) };
        let mut absent = Absent::default();
        for (index, (of_message, message)) in (0..).zip(&messages) {
            let read = Part::read(&message[HEAD_BYTES..]);
            let is_next = of_message.kind == Kind::ControlPart
                && (of_message.generation, of_message.run) == (head.generation, head.run)
                && read.is_some_and(|(found, ranges)| found == Part { index, ..part } && absent.read_more(ranges));
            if !is_next {
                return Ok(None);
            }
        }
        return Ok(Some(((first, number), absent)));
    }
    Ok(None)
}

/// Writes down which numbers may be missing, and removes the control message before.
pub(super) fn publish_control(link: &mut Link) -> io::Result<()> {
    let (first_before, last_before) = link.control;
    if last_before > 0 {
        (first_before..=last_before).for_each(|number| link.absent.insert(number));
    }
    let messages = link.absent.write(last_before).map_err(|why| failed(format!("stream {}: {why}", link.name())))?;
    let first = link.last + 1;
    for (kind, content) in messages {
        link.publish(kind, 0, 0, &content)?;
    }
    link.control = (first, link.last);
    if last_before > 0
        && let Err(error) = link.purge(&link.control_subject(), first - 1)
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

#[cfg(test)]
mod tests {
    use super::*;

    /// A stream of control messages: by number.
    type Stream = BTreeMap<u64, Vec<u8>>;

    fn read_from(stream: &Stream) -> impl FnMut(RangeInclusive<u64>) -> io::Result<Option<Vec<Message>>> {
        |numbers| {
            let of = |number| {
                let bytes: &Vec<u8> = stream.get(&number)?;
                let (head, _) = Head::read(bytes).ok()?;
                Some((head, Bytes::from(bytes.clone())))
            };
            Ok(numbers.map(of).collect())
        }
    }

    fn gaps(count: u64) -> Absent {
        let mut absent = Absent::default();
        (1..=count).for_each(|number| absent.insert(number * 2));
        absent
    }

    /// Whatever number of gaps, and wherever whoever writes them down is cut off: the newest that is whole counts.
    #[test]
    fn gaps_of_any_number_are_read_again() {
        for count in [0, 3, 32 << 10, (32 << 10) + 1, 200_000] {
            let mut stream = Stream::new();
            let mut number = 1_000_000;
            let mut add = |stream: &mut Stream, absent: &Absent, before: u64, cut: usize| {
                let messages = absent.write(before).expect("not too many");
                let (first, all) = (number + 1, messages.len());
                for (kind, content) in messages.into_iter().take(all.min(cut)) {
                    number += 1;
                    let head = Head { kind, number, generation: 1, run: 2, segment: 0, offset: 0 };
                    stream.insert(number, head.write(&content));
                }
                ((first, number), all)
            };
            let (of_before, before) = (gaps(count), add(&mut stream, &gaps(count), 0, usize::MAX).0);
            assert_eq!(whole_control(before.1, read_from(&stream)).expect("read"), Some((before, of_before.clone())));
            for cut in 1.. {
                let mut stream = stream.clone();
                let (now, all) = add(&mut stream, &gaps(count + 70_000), before.1, cut);
                let found = whole_control(now.1, read_from(&stream)).expect("read");
                let expected = if cut < all { (before, of_before.clone()) } else { (now, gaps(count + 70_000)) };
                assert_eq!(found, Some(expected), "{cut} of {all} messages");
                // One that is lost is no gap that nobody sees.
                for lost in now.0..now.1 {
                    let mut stream = stream.clone();
                    stream.remove(&lost);
                    let found = whole_control(now.1, read_from(&stream)).expect("read");
                    assert!(cut < all || found.is_none(), "message {lost} of {now:?} is lost");
                }
                if cut >= all {
                    break;
                }
            }
        }
    }
}
