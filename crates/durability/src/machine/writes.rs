//! The guest's and the host's writes to homes: which wait and for what, over which version each goes, and what is known when one has ended.
//! Rules (a) to (h) of the crate about home writes are kept here.

use super::{Durability, Phase, Waiting};
use crate::blocks::BlockSet;
use crate::compound::Making;
use crate::contract::{Committed, Kind, Step, Version, View, WhenAsked, WriteId};
use crate::live::Copy;
use crate::window::Window;
use jbd2::sequence;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::time::Duration;

/// Why a write waits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Wait {
    /// For what is being made durable.
    Making,
    /// For a compound that has not begun.
    Open,
    /// For the log to be empty.
    Empty,
    /// For one before it, or one of ours.
    Before,
    /// For these, which are newer than what it carries, to be in the log on storage: rule (h).
    Newer(Vec<Committed>),
}

#[derive(Clone, Debug)]
pub(super) struct Asked {
    id: WriteId,
    /// Blocks that it touches, and those that it covers whole.
    touched: Range<u64>,
    whole: Range<u64>,
    kind: Kind,
    /// The last transaction that was committed when it came: what it carries is no newer.
    as_of: u32,
    /// It was asked of an earlier machine, when this was the last transaction at the latest.
    again: Option<u32>,
}

/// Over which version a write of the guest goes: most are its home write.
#[derive(Clone, Copy, Debug)]
pub(super) enum Mark {
    /// The copy of this compound, and of this transaction.
    Live(u32, u32),
    /// One of this transaction, which is not durable.
    Open(Version, u32),
}

impl Mark {
    pub(super) fn transaction(&self) -> u32 {
        match self {
            Mark::Live(_, transaction) | Mark::Open(_, transaction) => *transaction,
        }
    }
}

#[derive(Debug)]
pub(super) struct Flight {
    asked: Asked,
    marks: BTreeMap<u64, Mark>,
    /// Blocks that another write, which goes over another version, was on its way to at the same time: either may land last.
    doubted: BTreeSet<u64>,
    /// Blocks to which it is known to carry the newest committed version. Everything else goes past the guest's journal.
    carried: BTreeSet<u64>,
    /// What was settled of its blocks when it began, for as long as no other write to them has begun.
    was_settled: Vec<(u64, Version)>,
}

impl Durability {
    /// The guest writes, discards or zeroes `touched` blocks, of which it covers `whole` ones wholly. True when that may go to
    /// storage now; otherwise [`Step::Go`] says so later. Not for blocks of the log.
    #[expect(clippy::too_many_arguments, reason = "a request has so many parts")]
    pub fn write_begins(
        &mut self,
        now: Duration,
        id: WriteId,
        kind: Kind,
        touched: Range<u64>,
        whole: Range<u64>,
        when: WhenAsked,
        view: &mut dyn View,
        steps: &mut Vec<Step>,
    ) -> bool {
        let last = self.last();
        let as_of = when.first.filter(|first| sequence::is_after(last, *first)).unwrap_or(last);
        let again = when.is_repeated.then_some(as_of);
        let as_of = if when.is_repeated { self.passed_at_first } else { as_of };
        let asked = Asked { id, touched, whole, kind, as_of, again };
        if let Some(wait) = self.wait_of(&asked, self.held.len(), view) {
            self.wish(wait, now);
            *(if kind == Kind::Discard { &mut self.status.discards_held } else { &mut self.status.writes_held }) += 1;
            self.held.push_back(asked);
            self.drive(now, view, steps);
            return false;
        }
        self.depart(asked);
        true
    }

    /// Whether a write of whole blocks, not begun, would have to wait for a compound and for nothing else. Whoever holds the very same
    /// content may answer it instead of beginning it, and write it home himself later.
    pub fn waits_for_compound(&self, blocks: Range<u64>, view: &mut dyn View) -> bool {
        if self.within.is_zero() || self.is_under_way(&blocks) {
            return false;
        }
        let (touched, whole, kind, as_of) = (blocks.clone(), blocks, Kind::Write, self.last());
        let asked = Asked { id: WriteId(0), touched, whole, kind, as_of, again: None };
        matches!(self.wait_of(&asked, self.held.len(), view), Some(Wait::Open | Wait::Making))
    }

    /// Blocks to which a write may go and has not ended, or waits to. The host begins to write nothing there: its write would wait for a
    /// compound, which may wait for room in the log, and that for this write; which, if it has not been sent yet, would wait for the host's. Of two
    /// that overlap and wait, the first may go while the host's, behind both, waits for the second.
    pub fn closed_to_host(&self) -> BlockSet {
        let mut blocks = self.under_way_to();
        self.held.iter().for_each(|asked| blocks.insert(asked.touched.clone()));
        blocks
    }

    /// Blocks to which a write may go and has not ended.
    pub(super) fn under_way_to(&self) -> BlockSet {
        let mut blocks = BlockSet::default();
        self.flights.values().for_each(|flight| blocks.insert(flight.asked.touched.clone()));
        blocks
    }

    pub(super) fn is_under_way(&self, blocks: &Range<u64>) -> bool {
        self.flights.values().any(|flight| {
            let touched = &flight.asked.touched;
            touched.start < blocks.end && blocks.start < touched.end
        })
    }

    /// The version that is at home, durably, and the newest of all that this machine knows of: who writes just that there once more need
    /// not be sent to storage. Nothing where that is not certain, or something is under way there.
    pub fn settled(&self, block: u64) -> Option<Version> {
        let is_there = |asked: &Asked| asked.touched.contains(&block);
        let version = self.settled.get(&block).copied()?;
        let is_newer = |window: &Window| window.blocks.contains_key(&block) || window.frees(&(block..block + 1));
        let is_busy = self.phase == Phase::Failed
            || self.flights.values().any(|flight| is_there(&flight.asked))
            || self.held.iter().any(is_there)
            || is_newer(&self.open)
            || self.making.as_ref().is_some_and(|making| is_newer(&making.window))
            || self.live.get(block).is_some();
        (!is_busy).then_some(version)
    }

    /// What [`Durability::settled`] would say of each block of a write, if it were not for this write, which may go and has not been sent
    /// yet: one that waited for its compound may carry just what that compound's appends have brought home. Nothing where that is not
    /// certain of all of them.
    pub fn settled_but_for(&self, id: WriteId) -> Option<Vec<Version>> {
        let flight = self.flights.get(&id)?;
        let Asked { touched, whole, kind, .. } = &flight.asked;
        let overlaps = |asked: &Asked| asked.touched.start < touched.end && touched.start < asked.touched.end;
        let is_newer = |window: &Window| window.holds(touched) || window.frees(touched);
        let is_busy = self.phase == Phase::Failed
            || self.flights.iter().any(|(other, flight)| *other != id && overlaps(&flight.asked))
            || self.held.iter().any(overlaps)
            || is_newer(&self.open)
            || self.making.as_ref().is_some_and(|making| is_newer(&making.window))
            || self.live.within(touched.clone()).next().is_some();
        let is_all = *kind == Kind::Write
            && touched == whole
            && touched.clone().eq(flight.was_settled.iter().map(|(block, _)| *block));
        (is_all && !is_busy).then(|| flight.was_settled.iter().map(|(_, version)| *version).collect())
    }

    /// The blocks of a write over whose newest committed version it goes, or will when it has waited: it was asked when there was that
    /// version already. What of them it does not carry is newer.
    #[must_use]
    pub fn goes_over(&self, id: WriteId, view: &mut dyn View) -> Vec<u64> {
        let held = || self.held.iter().find(|asked| asked.id == id);
        let Some(asked) = self.flights.get(&id).map(|flight| &flight.asked).or_else(held) else { return Vec::new() };
        let making = self.making.as_ref().map(|making| &making.window);
        let windows = [Some(&self.open), making].into_iter().flatten();
        let held = windows.flat_map(|window| window.blocks.range(asked.whole.clone()));
        let held = held.map(|(block, held)| (*block, held.sequence));
        let live = self.live.within(asked.whole.clone()).map(|(block, copy)| (block, copy.transaction));
        // What our log has no copy of any more, the guest's may have.
        let given_up = view.committed_after(asked.whole.clone(), self.guest_tail.wrapping_sub(1));
        let given_up = given_up.into_iter().map(|newest| (newest.block, newest.transaction));
        let mut newest: BTreeMap<u64, u32> = BTreeMap::new();
        for (block, transaction) in held.chain(live).chain(given_up) {
            let known = newest.entry(block).or_insert(transaction);
            *known = sequence::latest(*known, transaction);
        }
        newest.retain(|block, transaction| self.is_over(asked, *block, *transaction));
        newest.into_keys().collect()
    }

    /// Whether a write was asked when there was this version of the block, or after that.
    pub(super) fn is_over(&self, asked: &Asked, block: u64, transaction: u32) -> bool {
        let is_known = asked.again.is_some() && self.gone_over.get(&block) == Some(&transaction);
        is_known || !sequence::is_after(transaction, asked.as_of)
    }

    /// A write that is about to end may have brought something else to these blocks than what it was to bring: what it came from was let go
    /// while it waited or was under way. What is at home of them is not known.
    pub fn write_is_unsure(&mut self, id: WriteId, blocks: &[u64]) {
        if let Some(flight) = self.flights.get_mut(&id) {
            flight.marks.retain(|block, _| !blocks.contains(block));
        }
    }

    /// A write that may go sets out, and these blocks of it are seen to carry just the newest committed version: rule (g). For the rest of
    /// them, and where nobody says so, the guest writes past its journal.
    pub fn write_carries(&mut self, id: WriteId, blocks: impl IntoIterator<Item = u64>) {
        if let Some(flight) = self.flights.get_mut(&id)
            && !flight.marks.is_empty()
        {
            flight.carried.extend(blocks);
        }
    }

    /// It was not sent: of each block its home has, durably, just what it carries ([`Durability::settled_but_for`]).
    pub fn write_unneeded(&mut self, now: Duration, id: WriteId, view: &mut dyn View, steps: &mut Vec<Step>) {
        if let Some(flight) = self.flights.remove(&id) {
            self.settled.extend(flight.was_settled);
        }
        self.drive(now, view, steps);
    }

    /// It has ended. Gives whether the guest's next flush has to cover it: rule (f).
    pub fn write_ended(
        &mut self,
        now: Duration,
        id: WriteId,
        is_good: bool,
        view: &mut dyn View,
        steps: &mut Vec<Step>,
    ) -> bool {
        self.ended += 1;
        let Some(flight) = self.flights.remove(&id) else {
            self.to_cover = self.ended;
            return true;
        };
        let touched = flight.asked.touched.clone();
        // Whatever of it is at home, a replay writes over it for as long as the copies are in the log: until a flush has covered it, by
        // rule (d). What the guest's own log would not write over has waited for an empty log, by rule (e).
        // What a compound on its way revokes stays only until then.
        let is_leaving = |window: &Window| window.revoked.range(touched.clone()).next().is_some();
        let is_replayed = is_good
            && self.phase != Phase::Failed
            && !touched.is_empty()
            && !is_leaving(&self.open)
            && !self.making.as_ref().is_some_and(|making| is_leaving(&making.window))
            && self.live.within(touched.clone()).count() as u64 == touched.end - touched.start;
        if !is_replayed {
            self.to_cover = self.ended;
        }
        // Rule (g), of one that may carry less than the copy, too.
        let others: Vec<u64> =
            self.live.within(touched).map(|(block, _)| block).filter(|block| !flight.carried.contains(block)).collect();
        others.into_iter().for_each(|block| self.live.past(block));
        // What is at home is known when nothing else is on its way there: that one, or this, may land last.
        let is_known = |block: &u64| {
            let is_there = |other: &Flight| other.asked.touched.contains(block);
            is_good && !flight.doubted.contains(block) && !self.flights.values().any(is_there)
        };
        let known: Vec<(u64, Mark)> = flight.marks.into_iter().filter(|(block, _)| is_known(block)).collect();
        for (block, mark) in known {
            self.mark_written(block, mark, !flight.carried.contains(&block));
        }
        self.drive(now, view, steps);
        !is_replayed
    }

    /// A write over this version has ended.
    pub(super) fn mark_written(&mut self, block: u64, mark: Mark, is_past: bool) {
        match mark {
            Mark::Live(compound, _) if self.live.get(block).is_some_and(|copy| copy.compound == compound) => {
                self.live.written(block, compound, self.ended);
            }
            Mark::Live(..) => {}
            Mark::Open(version, transaction) => {
                let making = self.making.as_mut().map(|making| &mut making.window);
                let windows = [Some(&mut self.open), making].into_iter().flatten();
                let found =
                    windows.filter_map(|window| window.blocks.get_mut(&block)).find(|held| held.version == version);
                if let Some(held) = found {
                    held.home = Some(self.ended);
                    held.is_past |= is_past;
                } else if is_past && self.live.get(block).is_some_and(|copy| copy.transaction == transaction) {
                    // Durable meanwhile. What was written is not to be written over by us.
                    let compound = self.live.get(block).map_or(0, |copy| copy.compound);
                    self.live.written(block, compound, self.ended);
                    self.live.past(block);
                }
            }
        }
    }

    /// Rule (g): what the guest has written past its journal, or may have, is not replayed over once its tail has passed the copy. Gives
    /// whether there is such a copy, which a compound is to revoke, or to supersede, before anybody is told of the tail.
    pub(super) fn pass_over(&mut self, now: Duration, tail: u32) -> bool {
        let flights = &self.flights;
        let is_under_way = |block: u64| flights.values().any(|flight| flight.asked.touched.contains(&block));
        let passed = self.live.passed(tail, |block, copy| copy.is_past || is_under_way(block));
        let holds = |window: &Window, block: &u64| window.blocks.contains_key(block) || window.revoked.contains(block);
        let making = self.making.as_ref().map(|making| &making.window);
        let is_left = |block: &u64| !holds(&self.open, block) && !making.is_some_and(|making| holds(making, block));
        let revoked: Vec<u64> = passed.iter().copied().filter(is_left).collect();
        if !revoked.is_empty() {
            let (last, ended) = (self.last(), self.ended);
            self.open.revoke(&revoked, last, now, ended);
        }
        self.is_urgent |= !passed.is_empty() && !self.open.is_empty();
        !passed.is_empty()
    }

    /// Why a write has to wait; `before` held ones came before it.
    pub(super) fn wait_of(&self, asked: &Asked, before: usize, view: &mut dyn View) -> Option<Wait> {
        let Asked { touched, whole, kind, .. } = asked;
        if self.phase == Phase::Failed {
            return None;
        }
        let overlaps = |other: &Asked| other.touched.start < touched.end && touched.start < other.touched.end;
        if self.bringing_blocks.touches(touched) || self.held.iter().take(before).any(overlaps) {
            return Some(Wait::Before);
        }
        // What of one range goes over which copies is known once, however often the guest discards it at a time.
        if *kind != Kind::Write && self.is_under_way(touched) {
            return Some(Wait::Before);
        }
        // What is about to be only at home must not be torn there.
        let is_dropping = |compound: u32| compound.wrapping_sub(self.live.tail.1) < self.dropping as u32;
        if self.dropping > 0 && self.live.within(touched.clone()).any(|(_, copy)| is_dropping(copy.compound)) {
            return Some(Wait::Before);
        }
        // Rules (a) and (b), for what is being made durable and for what is not yet.
        if let Some(Making { window, .. }) = &self.making
            && (window.holds(touched) || window.frees(touched))
        {
            return Some(Wait::Making);
        }
        // And for what nobody replays yet, and may have to be put together anew.
        if self.open.frees(touched) || self.in_parts.range(touched.clone()).next().is_some() {
            return Some(Wait::Open);
        }
        for block in self.open.blocks.range(touched.clone()).map(|(block, _)| *block) {
            // What no durable transaction knows of may be written: nobody would find it.
            let is_append = *kind == Kind::Write
                && whole.contains(&block)
                && self.is_proven
                && self.live.get(block).is_none()
                && view.is_free(block);
            if !is_append {
                return Some(Wait::Open);
            }
        }
        if *kind != Kind::Discard {
            // Rule (e), and a part of a block of which the rest is only in the log.
            let is_lost =
                |(block, transaction)| sequence::is_after(self.guest_tail, transaction) || !whole.contains(&block);
            if self.live.within(touched.clone()).any(|(block, copy)| is_lost((block, copy.transaction))) {
                return Some(Wait::Empty);
            }
        }
        let newer = self.left_behind(asked, view);
        (!newer.is_empty()).then_some(Wait::Newer(newer))
    }

    /// Rule (h): newer versions than what a write carries that the guest's log would bring back after it, and ours would not.
    pub(super) fn left_behind(&self, asked: &Asked, view: &mut dyn View) -> Vec<Committed> {
        if !sequence::is_after(self.last(), asked.as_of) {
            return Vec::new();
        }
        let after = sequence::latest(asked.as_of, self.guest_tail.wrapping_sub(1));
        let mut newer = view.committed_after(asked.touched.clone(), after);
        newer.retain(|Committed { block, transaction, is_gone_over, .. }| {
            // It was asked of an earlier machine, when there was that version.
            let is_known = *is_gone_over && asked.again.is_some_and(|last| !sequence::is_after(*transaction, last));
            let is_left = self.live.get(*block).is_none() && !self.open.blocks.contains_key(block);
            is_left && !is_known && !self.is_over(asked, *block, *transaction)
        });
        newer
    }

    pub(super) fn wish(&mut self, wait: Wait, now: Duration) {
        match wait {
            Wait::Open => self.is_urgent = true,
            Wait::Empty => self.is_emptying = true,
            Wait::Making | Wait::Before => {}
            Wait::Newer(mut newer) => {
                // What this machine has not been told of yet comes by itself.
                let last = self.last();
                newer.retain(|newest| !sequence::is_after(newest.transaction, last));
                if !newer.is_empty() {
                    self.open.log_again(&newer, last, now);
                    self.is_urgent = true;
                }
            }
        }
    }

    /// A write goes to storage.
    pub(super) fn depart(&mut self, asked: Asked) {
        for flight in self.flights.values_mut() {
            flight.was_settled.retain(|(block, _)| !asked.touched.contains(block));
        }
        let was_settled: Vec<_> =
            self.settled.range(asked.touched.clone()).map(|(block, version)| (*block, *version)).collect();
        for (block, _) in &was_settled {
            self.settled.remove(block);
        }
        let mut marks = BTreeMap::new();
        if self.phase != Phase::Failed {
            // One that had to wait may carry less than what is durable now: then the newest version is in the log only.
            let live: Vec<(u64, Copy)> = self.live.depart(asked.touched.clone()).collect();
            let live = live.into_iter().filter(|(block, _)| asked.whole.contains(block));
            let live = live.filter(|(block, copy)| self.is_over(&asked, *block, copy.transaction));
            marks.extend(live.map(|(block, copy)| (block, Mark::Live(copy.compound, copy.transaction))));
            let open = self.open.blocks.range(asked.whole.clone());
            let open = open.filter(|(block, held)| self.is_over(&asked, **block, held.sequence));
            marks.extend(open.map(|(block, held)| (*block, Mark::Open(held.version, held.sequence))));
            // Whatever was there of them is written over.
            self.open.blocks.range_mut(asked.touched.clone()).for_each(|(_, held)| held.home = None);
        }
        let mut doubted = BTreeSet::new();
        for flight in self.flights.values_mut() {
            let is_other = |block: &u64, one: &Mark, marks: &BTreeMap<u64, Mark>| {
                marks.get(block).map(Mark::transaction) != Some(one.transaction())
            };
            let ours = marks.iter().filter(|(block, _)| flight.asked.touched.contains(block));
            doubted.extend(ours.filter(|(block, one)| is_other(block, one, &flight.marks)).map(|(block, _)| *block));
            let theirs = flight.marks.range(asked.touched.clone());
            let theirs = theirs.filter(|(block, one)| is_other(block, one, &marks)).map(|(block, _)| *block);
            flight.doubted.extend(theirs);
        }
        self.flights.insert(asked.id, Flight { asked, marks, doubted, carried: BTreeSet::new(), was_settled });
    }

    /// Lets go of what need not wait any more.
    pub(super) fn release(&mut self, now: Duration, view: &mut dyn View, steps: &mut Vec<Step>) {
        let mut index = 0;
        while let Some(asked) = self.held.get(index) {
            match self.wait_of(asked, index, view) {
                Some(wait) => {
                    self.wish(wait, now);
                    index += 1;
                }
                None => {
                    if let Some(asked) = self.held.remove(index) {
                        steps.push(Step::Go(asked.id));
                        self.depart(asked);
                    }
                }
            }
        }
    }

    pub(super) fn let_go(&mut self, steps: &mut Vec<Step>) {
        // A tail that moves, and who is only slowed down, is told that all is well.
        let is_promised = |waiting: &Waiting| waiting.tail.is_none() && !waiting.is_slowed;
        // Nobody may have asked again yet.
        let may_be_promised = self.is_following && sequence::is_after(self.last(), self.durable);
        self.falls_short |= self.is_proven && (may_be_promised || self.waiting.iter().any(is_promised));
        for asked in std::mem::take(&mut self.held) {
            steps.push(Step::Go(asked.id));
            self.depart(asked);
        }
        for waiting in std::mem::take(&mut self.waiting) {
            // A tail that moves claims nothing that is on storage: there is the error mark.
            let is_good = waiting.tail.is_some() || waiting.is_slowed;
            steps.push(Step::Answer { answer: waiting.answer, is_good });
        }
        for (answer, _) in std::mem::take(&mut self.awaiting_superblock) {
            steps.push(Step::Answer { answer, is_good: true });
        }
        for answer in std::mem::take(&mut self.flush_answers) {
            steps.push(Step::Answer { answer, is_good: false });
        }
        if let Some((_, answer)) = self.closing.take() {
            steps.push(Step::Answer { answer, is_good: false });
        }
        self.has_given_up |= self.making.take().is_some();
        self.open = Window::default();
        (self.in_parts, self.again) = (BTreeMap::new(), BTreeMap::new());
        self.flush_wanted = None;
    }
}
