//! Changes of homes, the guest's and the host's: each asks the machine first, then the area, and both hear when it has ended.

use super::super::holder::Held;
use super::super::watched;
use super::machine::host_write;
use super::state::{Aging, Asked, Cause, Ending, State};
use crate::keeper::{HomeChange, HomeVerdict, Side, Step, Steps};
use crate::log::Log;
use block_route::{RequestId, RequestKind};
use durability::{BlockSet, Kind, WhenAsked, WriteId};
use journal_area::{HomeWrite, HostWrite, Over};
use std::io;
use std::ops::Range;

impl Held {
    /// Whether a write of whole blocks would have to wait for a compound, and for nothing else.
    pub(in crate::keepers::held) fn aged_waits_for_compound(
        &self,
        log: &Log,
        blocks: &Range<u64>,
        steps: &mut Steps,
    ) -> bool {
        let mut state = self.state();
        if state.is_engaging || state.is_leaving || state.is_coming_to_rest {
            return false;
        }
        let Some(aging) = state.aging.as_mut().filter(|aging| aging.ending.is_none()) else { return false };
        aging.call(self, log, steps, |machine, _, view, _| machine.waits_for_compound(blocks.clone(), view))
    }

    /// Of each of these blocks the transaction and the log block of the version that its home has, durably; nothing where that is not known
    /// of all.
    pub(in crate::keepers::held) fn aged_settled(&self, blocks: &Range<u64>) -> Option<Vec<(u32, u32)>> {
        let state = self.state();
        if state.is_engaging || state.is_leaving {
            return None;
        }
        let aging = state.aging.as_ref().filter(|aging| aging.ending.is_none())?;
        blocks.clone().map(|block| aging.machine.settled(block).map(watched::parts)).collect()
    }

    /// Which of these versions, by home block, transaction and log block, their homes have, durably.
    pub(in crate::keepers::held) fn aged_settled_of(&self, mut versions: Vec<(u64, u32, u32)>) -> Vec<(u64, u32, u32)> {
        let state = self.state();
        let aging = state.aging.as_ref().filter(|aging| aging.ending.is_none());
        let Some(aging) = aging.filter(|_| !state.is_engaging && !state.is_leaving) else { return Vec::new() };
        versions.retain(|(block, sequence, position)| {
            aging.machine.settled(*block).map(watched::parts) == Some((*sequence, *position))
        });
        versions
    }

    /// Where a write of whole blocks, not asked about yet, is cut: the blocks before have what they get at home, or all have not.
    pub(in crate::keepers::held) fn aged_cut(&self, key: (RequestId, u64), blocks: &Range<u64>) -> u64 {
        let state = self.state();
        let aging = state.aging.as_ref().filter(|aging| aging.ending.is_none() && !aging.guests.contains_key(&key));
        let Some(aging) = aging.filter(|_| !state.is_engaging && !state.is_leaving) else { return blocks.end };
        let mut kinds = blocks.clone().map(|block| aging.machine.settled(block).is_some());
        let first = kinds.next();
        let run = kinds.take_while(|kind| Some(*kind) == first).count() as u64;
        (blocks.start + 1 + run).min(blocks.end)
    }

    /// The guest is about to change homes.
    pub(in crate::keepers::held) fn aged_home_begins(
        &self,
        log: &Log,
        change: &HomeChange<'_>,
        steps: &mut Steps,
    ) -> io::Result<HomeVerdict> {
        let mut state = self.state();
        if state.keeps_homes() && log.is_open() {
            return Ok(HomeVerdict::Wait);
        }
        if state.is_coming_to_rest && log.is_open() && self.rests(&state, change) {
            // Before the lock is given back: whoever hands the log over knows of all that waits.
            self.note_asked(change, true);
            return Ok(HomeVerdict::Wait);
        }
        if let Some(aging) = &mut state.aging
            && aging.ending.is_some()
        {
            if !aging.is_quiet(log) {
                return Ok(HomeVerdict::Wait);
            }
            self.end(log, &mut state, steps)?;
        }
        if state.aging.is_none() {
            // Whoever hands the log over on another thread has the area first, and then this.
            drop(state);
            return self.home_begins_unaged(log, change);
        }
        let Some(aging) = &mut state.aging else { return Ok(HomeVerdict::Wait) };
        let key = (change.request, change.range.start);
        let first_asked = self.first_asked(key);
        let when = WhenAsked { first: first_asked, is_repeated: change.is_again };
        let id = match aging.guests.get(&key) {
            Some((_, false)) => return Ok(HomeVerdict::Wait),
            Some((id, true)) => {
                let id = *id;
                // What it carries may have gone home as an append while it waited for just that compound.
                if !change.is_watched
                    && let Some(at_home) = aging.machine.settled_but_for(id)
                    && let at_home = at_home.into_iter().map(watched::parts).collect::<Vec<_>>()
                    && self.area.is_home_already(self.id, &change.blocks, change.payload, &at_home)
                {
                    aging.guests.remove(&key);
                    aging.call(self, log, steps, |machine, now, view, said| {
                        machine.write_unneeded(now, id, view, said);
                    });
                    self.end_if_drained(log, &mut state, steps);
                    return Ok(HomeVerdict::Parts(Vec::new()));
                }
                id
            }
            None => {
                let id = WriteId(aging.id());
                let kind = match change.kind {
                    RequestKind::Discard => Kind::Discard,
                    RequestKind::WriteZeroes { .. } => Kind::Zeroes,
                    _ => Kind::Write,
                };
                let whole = change.whole.start..change.whole.end.max(change.whole.start);
                aging.guests.insert(key, (id, false));
                let may_go = aging.call(self, log, steps, |machine, now, view, said| {
                    machine.write_begins(now, id, kind, change.blocks.clone(), whole, when, view, said)
                });
                if !may_go {
                    self.end_if_drained(log, &mut state, steps);
                    return Ok(HomeVerdict::Wait);
                }
                aging.guests.insert(key, (id, true));
                id
            }
        };
        let over = aging.call(self, log, steps, |machine, _, view, _| machine.goes_over(id, view));
        let durable = Some(aging.machine.durable());
        let over = Over::Blocks { blocks: &over, durable, has_waited: change.is_again || first_asked.is_some() };
        let verdict = match self.home_begins_in_area(log, change, &over, false) {
            Ok(None) => {
                // Its place is not its own while compounds are there.
                aging.guests.remove(&key);
                aging.call(self, log, steps, |machine, now, view, said| {
                    machine.write_ended(now, id, false, view, said);
                });
                self.lacks_memory(log, aging, steps);
                self.end_if_drained(log, &mut state, steps);
                return if state.aging.is_none() {
                    self.home_begins_unaged(log, change)
                } else {
                    Ok(HomeVerdict::Wait)
                };
            }
            Ok(Some((verdict, carried))) => {
                aging.machine.write_carries(id, carried);
                Ok(verdict)
            }
            Err(error) => Err(error),
        };
        match &verdict {
            Ok(HomeVerdict::Go { operation, .. }) => {
                aging.guests.remove(&key);
                aging.flights.insert(*operation, id);
            }
            // The area has it ask again, for its own reasons; it never cuts a change into parts.
            Ok(HomeVerdict::Wait | HomeVerdict::Parts(_)) => {}
            Err(_) => {
                aging.guests.remove(&key);
                aging.call(self, log, steps, |machine, now, view, said| {
                    machine.write_ended(now, id, false, view, said);
                });
            }
        }
        self.end_if_drained(log, &mut state, steps);
        verdict
    }

    /// Whether a change of homes waits until the log was handed over. One that durability by age was told of goes when that lets it. So does one
    /// that was asked for before a version of its blocks was committed: the hand-over brings that home, and it must not land on it.
    pub(super) fn rests(&self, state: &State, change: &HomeChange<'_>) -> bool {
        let key = (change.request, change.range.start);
        let is_told = |aging: &Aging| aging.ending.is_none() && aging.guests.contains_key(&key);
        let is_overtaken = || self.first_asked(key).is_some_and(|first| self.is_overtaken(&change.blocks, first));
        !(state.aging.as_ref().is_some_and(is_told) || change.is_again || is_overtaken())
    }

    pub(super) fn home_begins_unaged(&self, log: &Log, change: &HomeChange<'_>) -> io::Result<HomeVerdict> {
        let first_asked = self.first_asked((change.request, change.range.start));
        let has_waited = first_asked.is_some();
        let asked = Over::AsOf { whole: change.whole.clone(), first_asked, has_waited };
        let over = if change.is_again { Over::Unknown } else { asked };
        Ok(self.home_begins_in_area(log, change, &over, true)?.map_or(HomeVerdict::Wait, |(verdict, _)| verdict))
    }

    /// With the blocks to which it is seen to bring the newest committed version. Nothing where there is no memory to hold what is about to
    /// be overwritten, and its own place in the log is not its own.
    pub(super) fn home_begins_in_area(
        &self,
        log: &Log,
        change: &HomeChange<'_>,
        over: &Over<'_>,
        may_store: bool,
    ) -> io::Result<Option<(HomeVerdict, Vec<u64>)>> {
        if change.kind == RequestKind::Discard && change.whole.start < change.whole.end {
            self.area.discarded(self.id, change.whole.clone());
        }
        loop {
            match self.area.home_write_begins(self.id, change.blocks.clone(), change.payload, over) {
                HomeWrite::Go { operation, replaced, carried } => {
                    return Ok(Some((HomeVerdict::Go { operation, replaced }, carried)));
                }
                HomeWrite::Wait => return Ok(Some((HomeVerdict::Wait, Vec::new()))),
                // About to be overwritten: read, and given back to the area.
                HomeWrite::Restore(blocks) => {
                    let mut content = vec![0; log.place.block_bytes as usize];
                    for block in blocks {
                        log.read_home(block, &mut content)?;
                        if self.area.restore(self.id, block, &content).is_ok() {
                            continue;
                        }
                        if !may_store {
                            return Ok(None);
                        }
                        self.restore_in_place(log, block, &mut content)?;
                    }
                }
            }
        }
    }

    /// What is about to be overwritten at home goes to its own place in the log, since there is no memory to hold it.
    pub(super) fn restore_in_place(&self, log: &Log, block: u64, content: &mut [u8]) -> io::Result<()> {
        let Some(place) = self.area.place_of_version(self.id, block, content) else { return Ok(()) };
        self.store_now(log, place.0, content)?;
        self.area.restored_in_place(self.id, block, place);
        Ok(())
    }

    /// Somebody waits to write to a page of the guest's that is held, there is no memory to copy it to, and the host cannot write it home: it
    /// is of a transaction that is not read to its end, say, as blocks of it are in their own places. So it goes to its own place, too.
    pub(in crate::keepers::held) fn store_starved(&self, log: &Log, steps: &mut Steps) {
        let mut state = self.state();
        if let Some(aging) = &mut state.aging {
            self.lacks_memory(log, aging, steps);
            self.end_if_drained(log, &mut state, steps);
        }
        if state.aging.is_some() || state.is_engaging || state.is_leaving {
            return;
        }
        while let Some(starved) = self.area.starved(self.id) {
            if let Err(error) = self.store_now(log, starved.0, &starved.2) {
                log::error!("disk {}: writing a journal block to its own place failed: {error}", log.home.options.name);
                return;
            }
            if !self.area.starved_is_stored(self.id, &starved) {
                return;
            }
        }
    }

    /// There is no memory for what is to be held, so that it has to go where compounds are: they end.
    pub(super) fn lacks_memory(&self, log: &Log, aging: &mut Aging, steps: &mut Steps) {
        if aging.ending.is_none() {
            let why = "there is no memory for its blocks".to_owned();
            aging.ending = Some(Ending { why, cause: Cause::Memory });
            self.give_up(log, aging, steps);
        }
    }

    /// A home write, the guest's or the host's, has ended, and what it has brought to some blocks is not known. Says whether no flush of the
    /// guest's has to cover it.
    pub(in crate::keepers::held) fn aged_home_ended(
        &self,
        log: &Log,
        operation: usize,
        (is_ok, changed): (bool, &[u64]),
        steps: &mut Steps,
    ) -> bool {
        let mut state = self.state();
        let mut is_covered = true;
        if let Some(aging) = &mut state.aging {
            let is_spared = aging.flights.remove(&operation).is_some_and(|id| {
                aging.machine.write_is_unsure(id, changed);
                !aging
                    .call(self, log, steps, |machine, now, view, said| machine.write_ended(now, id, is_ok, view, said))
            });
            // With no age the guest is told when it is durable, and that is the route's to see to, but for what a replay brings back.
            let is_aged = !aging.answers_late();
            is_covered = is_aged || (is_spared && aging.ending.is_none());
            if is_aged {
                let answer = aging.ask(Asked::Nobody);
                aging.call(self, log, steps, |machine, now, view, said| machine.flush_asked(now, answer, view, said));
            }
        }
        if !state.closing.is_empty() && !self.area.has_home_writes_in_flight(self.id) {
            let closing = std::mem::take(&mut state.closing);
            closing
                .into_iter()
                .for_each(|(request, block)| steps.push(Side::Journal, Step::Superblock(request, block)));
            steps.push(Side::Home, Step::Retry);
        }
        self.end_if_drained(log, &mut state, steps);
        drop(state);
        self.try_engage(log, steps);
        is_covered
    }

    /// Blocks to which the guest may write just now, by what the machine says, or waits to, whether or not it does yet: the host does not begin to
    /// ([`Durability::closed_to_host`]).
    pub(in crate::keepers::held) fn aged_under_way(&self) -> BlockSet {
        self.state().aging.as_ref().map_or_else(BlockSet::default, |aging| aging.machine.closed_to_host())
    }

    /// The host is about to write these home.
    pub(in crate::keepers::held) fn aged_host_writes(
        &self,
        log: &Log,
        writes: Vec<(usize, HostWrite)>,
        steps: &mut Steps,
    ) {
        let mut state = self.state();
        if state.is_gone {
            return self.end_unsent(writes);
        }
        // Whoever chose these has asked the same; of a log on another disk than its homes the guest may have written since. Seen to once for all of
        // them: what begins below is the host's, each to a block of its own.
        let closed = state.aging.as_ref().map_or_else(BlockSet::default, |aging| aging.machine.closed_to_host());
        for (operation, write) in writes {
            let Some(aging) = &mut state.aging else {
                host_write(log, operation, write, steps);
                continue;
            };
            let (id, blocks) = (WriteId(aging.id()), write.block..write.block + 1);
            if closed.touches(&blocks) {
                // It is owed still, and chosen again when what is in its way has ended.
                self.end_unsent([(operation, write)]);
                self.inner().is_host_barred = true;
                continue;
            }
            // The machine may let it go at once.
            aging.hosts.insert(id, (operation, write));
            let may_go = aging.call(self, log, steps, |machine, now, view, said| {
                machine.write_begins(now, id, Kind::Write, blocks.clone(), blocks, WhenAsked::default(), view, said)
            });
            if may_go {
                aging.go(log, id, steps);
            }
        }
        self.end_if_drained(log, &mut state, steps);
    }

    /// Whether the host may write anything home now.
    pub(in crate::keepers::held) fn may_write_home(&self) -> bool {
        let state = self.state();
        !state.keeps_homes() && state.aging.as_ref().is_none_or(|aging| aging.ending.is_none())
    }
}
