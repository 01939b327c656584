//! How durability by age begins: with its log, under a running guest, or where an earlier process has left off.

use super::super::holder::Held;
use super::super::watched::{self, Watched};
use super::machine::copied;
use super::state::{Aging, State, retried_at};
use crate::followed;
use crate::keeper::{Side, Step, Steps};
use crate::log::Log;
use crate::mark;
use crate::opening::{mark_behind, write_aged, written_home};
use durability::{Durability, FoundSaid, Freed, Past, Transaction, Version};
use jbd2::{Superblock, sequence};
use journal_area::{Doubt, Location, Opening};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::io;
use std::time::Duration;

/// Why the log of this superblock cannot be made durable by age.
pub(super) fn hindrance(log: &Log, superblock: &[u8]) -> Option<String> {
    if log.place.is_external {
        return Some("its journal is on a device of its own".to_owned());
    }
    Durability::opened(superblock, Duration::ZERO).err()
}

impl Held {
    /// A guest opens the log, and it is to be durable by age: storage says so when this returns. False where it is to be held without.
    pub(in crate::keepers::held) fn begin_aging(&self, log: &Log, block: &[u8]) -> io::Result<bool> {
        self.forget_absorbing();
        let mut state = self.state();
        let (stints, counted) = (state.stints + 1, state.counted);
        *state = State { stints, counted, failed_flushes: log.home.failed_flushes(), ..State::default() };
        self.area.tell_accepted(self.id, false);
        self.area.note_numbered(self.id, None);
        self.area.note_doubt(self.id, |doubt| *doubt = Doubt { is_untold: doubt.is_untold, ..Doubt::default() });
        let Some(within) = log.home.durable_within() else { return Ok(false) };
        if let Some(why) = hindrance(log, block) {
            say_why_not(log, &mut state, why);
            return Ok(false);
        }
        let (said, format) = Superblock::parse(block).map_err(io::Error::other)?;
        let machine = Durability::opened(block, within).map_err(io::Error::other)?.on_storage();
        let opening = write_aged(log, &self.area, block, (format.first, said.sequence))?;
        let mut aging = Aging::new(log, machine, within, (format, opening), block);
        (aging.stint, aging.counted_home) = (stints, written_home(log));
        state.aging = Some(aging);
        self.area.tell_accepted(self.id, true);
        Ok(true)
    }

    /// Begins under a running guest, if that is wished and no home write is under way.
    pub(in crate::keepers::held) fn try_engage(&self, log: &Log, steps: &mut Steps) {
        let is_busy = {
            let inner = self.inner();
            inner.stored_in_flight > 0 || inner.host_in_flight > 0
        };
        let mut state = self.state();
        if state.lacks_memory_until.is_some_and(|until| log.home.now() >= until) && log.is_open() {
            // Nothing is tried beside blocks in their own places, for which changes of homes would wait.
            if self.has_stored_blocks() {
                state.lacks_memory_until = Some(retried_at(log));
            } else {
                (state.lacks_memory_until, state.why_not) = (None, None);
            }
        }
        let wished = log.home.durable_within().filter(|_| {
            log.is_open()
                && state.aging.is_none()
                && !state.is_leaving
                && !state.is_coming_to_rest
                && !state.is_gone
                && !state.is_unmarked
                && state.why_not.is_none()
                && !log.is_distrusted()
        });
        let Some(within) = wished else {
            if std::mem::take(&mut state.is_engaging) {
                steps.push(Side::Home, Step::Retry);
            }
            return;
        };
        if state.is_doubted || log.home.failed_flushes() != state.failed_flushes {
            // Homes that the log let go of may be lost: storage is no truth, and is not said to be one.
            say_why_not(log, &mut state, "storage has failed since it was mounted".to_owned());
            state.is_engaging = false;
            steps.push(Side::Home, Step::Retry);
            return;
        }
        if is_busy || self.area.has_home_writes_in_flight(self.id) {
            state.is_engaging = true;
            return;
        }
        if self.has_stored_blocks() {
            let why = "blocks of it are in their own places for want of memory";
            state.why_not = Some(format!("its journal is only held for now, and not made durable by age: {why}"));
            state.lacks_memory_until = Some(retried_at(log));
        } else if let Err(why) = self.engage(log, within, &mut state) {
            say_why_not(log, &mut state, why);
        }
        state.is_engaging = false;
        if let Some(aging) = &mut state.aging {
            aging.call(self, log, steps, |machine, now, view, said| machine.timer(now, view, said));
        }
        steps.push(Side::Home, Step::Retry);
    }

    /// Whether blocks of the guest's log are in their own places on storage, of transactions that are not committed yet, too.
    pub(super) fn has_stored_blocks(&self) -> bool {
        let is_any = |held: &mut journal_area::HeldLog<'_>| {
            (1..held.log_blocks()).any(|at| held.location(at) == Location::Storage)
        };
        self.area.look(self.id, is_any).unwrap_or(false)
    }

    pub(super) fn engage(&self, log: &Log, within: Duration, state: &mut State) -> Result<(), String> {
        let mut superblock = vec![0; log.place.block_bytes as usize];
        if !self.area.look(self.id, |held| held.read_held(0, &mut superblock)).unwrap_or(false) {
            return Err("its superblock is not held".to_owned());
        }
        if let Some(why) = hindrance(log, &superblock) {
            return Err(why);
        }
        let (_, format) = Superblock::parse(&superblock).map_err(|error| error.to_string())?;
        // Such books name no version, as if all were home.
        if let Some(why) = self.area.contradiction(self.id) {
            return Err(format!("its books are wrong: {why}"));
        }
        let tail = self.area.tail(self.id).ok_or("it has no tail")?;
        // Compounds of this opening may have numbers beyond those of the guest's transactions, where it began more than once.
        let next = self.area.next_sequence(self.id).ok_or("it is not open")?;
        let owed = self.all_owed();
        let watched = self.watched_owing(log, &versions_of(&owed))?;
        let last = next.wrapping_sub(1);
        let past = self.written_past();
        let machine = Durability::engaged(&superblock, within, (&owed, tail.sequence, last), &past, Duration::ZERO)?
            .numbered_from(sequence::latest(next, state.next_number.unwrap_or(next)))
            .begins_in_parts();
        // The first compounds lie beside the error mark until all of them are durable.
        let number = machine.begins_before();
        let marked =
            mark_behind(log, &self.area, number).map_err(|error| format!("marking it anew failed: {error}"))?;
        let opening = marked.ok_or("its mark on storage is not known")?;
        let mut aging = Aging::new(log, machine, within, (format, opening), &superblock);
        state.stints += 1;
        (aging.stint, aging.watched, aging.owes_errors) = (state.stints, watched, state.owes_errors);
        state.aging = Some(aging);
        self.area.tell_accepted(self.id, true);
        log::info!(
            "disk {}: its journal is made durable within {} s from now on",
            log.home.options.name,
            within.as_secs()
        );
        Ok(())
    }

    /// Of what is committed and not at home, what the guest has written past its journal, or may have.
    pub(super) fn written_past(&self) -> BTreeMap<u64, Past> {
        let known = |past| match past {
            Some(journal_area::Past::Written) => Past::Written,
            Some(journal_area::Past::Begun) => Past::Begun,
            None => Past::Perhaps,
        };
        self.area.written_past(self.id).into_iter().map(|(block, past)| (block, known(past))).collect()
    }

    /// What is committed and not at home, by transaction.
    pub(super) fn all_owed(&self) -> Vec<Transaction> {
        let mut owed: Vec<Transaction> = Vec::new();
        for (sequence, block, position) in self.area.versions_owed(self.id) {
            let version = watched::version(sequence, position);
            match owed.last_mut() {
                Some(last) if last.sequence == sequence => last.blocks.push((block, version)),
                _ => owed.push(Transaction {
                    sequence,
                    blocks: vec![(block, version)],
                    revokes: Vec::new(),
                    freed: Freed::Unknown,
                }),
            }
        }
        owed
    }

    pub(super) fn watched_owing(&self, log: &Log, owed: &HashMap<u64, Version>) -> Result<Watched, String> {
        let content = |version| copied(log, &self.area, self.id, version);
        Watched::owing(log, owed, &content).map_err(|error| error.to_string())
    }

    /// An earlier process has left the log open and made durable by age, and it stays so: what was durable stays durable at every
    /// instant, and what was not becomes so first of all. Nothing is changed on storage. False where it is not wished any more.
    pub(in crate::keepers::held) fn aged_follows(
        &self,
        log: &Log,
        opening: Opening,
        raw: &[u8],
        numbered: Option<u32>,
    ) -> Result<bool, String> {
        let Some(within) = log.home.durable_within() else { return Ok(false) };
        let mut state = self.state();
        if log.home.failed_flushes() != state.failed_flushes || state.is_doubted {
            return Err("storage has failed since it was mounted".to_owned());
        }
        if self.has_stored_blocks() {
            return Err("blocks of it are in their own places for want of memory".to_owned());
        }
        // Such books name no version, as if all were home.
        if let Some(why) = self.area.contradiction(self.id) {
            return Err(format!("its books are wrong: {why}"));
        }
        let mut superblock = vec![0; log.place.block_bytes as usize];
        if !self.area.look(self.id, |held| held.read_held(0, &mut superblock)).unwrap_or(false) {
            return Err("its superblock is not held".to_owned());
        }
        if let Some(why) = hindrance(log, &superblock) {
            return Err(why);
        }
        let (_, format) = Superblock::parse(&superblock).map_err(|error| error.to_string())?;
        let tail = self.area.tail(self.id).ok_or("it has no tail")?;
        let last = self.area.next_sequence(self.id).ok_or("it is not open")?.wrapping_sub(1);
        let owed = self.all_owed();
        let versions = versions_of(&owed);
        // All of them can be read.
        let mut watched = self.watched_owing(log, &versions)?;
        let by_block = |block: u64| {
            let version = *versions.get(&block)?;
            Some((watched::parts(version).0, copied(log, &self.area, self.id, version)?))
        };
        let found = followed::found(log, &self.area, raw, &format, &by_block, numbered)?;
        let same: HashSet<u64> =
            found.copies.iter().filter(|copy| matches!(copy.said, FoundSaid::Same(_))).map(|copy| copy.block).collect();
        let durable: Vec<(u64, Version)> = versions.into_iter().filter(|(block, _)| same.contains(block)).collect();
        let (past, owed) = (self.written_past(), (&owed[..], tail.sequence, last));
        let on_storage = Superblock::decode(raw).map_err(|error| error.to_string())?;
        let told = mark::aged(&superblock, &opening, (on_storage.start, on_storage.sequence));
        // What its guest said last, an error of its own, say, may have been answered and not written.
        let is_told = told.is_ok_and(|told| told[..] == raw[..]);
        let machine =
            Durability::followed(&superblock, within, &found, owed, &past, Duration::ZERO)?.says_anew(!is_told);
        watched.made_durable(log, tail.sequence.wrapping_sub(1), &durable);
        let mut aging = Aging::new(log, machine, within, (format, opening), &superblock);
        state.stints += 1;
        (aging.stint, aging.watched, aging.numbered_before) = (state.stints, watched, numbered);
        if within.is_zero() && sequence::is_after(last, aging.machine.durable()) {
            // An age may have allowed it: who asks for a flush again was not answered for its sake.
            aging.owed = Some((last, None));
        }
        (state.following, state.is_unmarked) = (Some(Box::new(aging)), true);
        Ok(true)
    }

    /// This process serves the guest from now on.
    pub(in crate::keepers::held) fn aged_go_on(&self, log: &Log) {
        let mut state = self.state();
        let Some(mut aging) = state.following.take() else { return };
        (aging.since, aging.counted_at) = (log.home.now(), log.home.now());
        log::info!(
            "disk {}: its journal is made durable within {} s as before, beginning with what was not durable yet",
            log.home.options.name,
            aging.within.as_secs()
        );
        // Before anybody is promised anything: that process may have written down what was to be when it had ended, or has not seen that it is in
        // force. It is from here on, and what it owed is durable with the first compound, or fails as what this one was asked for.
        state.owes_errors = false;
        self.area.note_doubt(self.id, |doubt| (doubt.owes_errors, doubt.is_held_only) = (false, false));
        (state.aging, state.is_unmarked) = (Some(*aging), false);
        self.area.tell_accepted(self.id, true);
        log.home.wake.wake();
    }

    /// An earlier process has used the numbers below this one.
    pub(in crate::keepers::held) fn aged_numbers_from(&self, sequence: u32) {
        self.state().next_number = Some(sequence);
    }

    /// Storage does not say yet, or does say, what it is to say of the log under this process.
    pub(in crate::keepers::held) fn aged_awaits_mark(&self, is_unmarked: bool) {
        let mut state = self.state();
        if std::mem::replace(&mut state.is_unmarked, is_unmarked) && !is_unmarked {
            drop(state);
            self.aged_is_held_only();
        }
    }

    /// A log was opened, and is held without durability by age; or it was, and storage says so, by an earlier process, which may not have come to
    /// write it down.
    pub(in crate::keepers::held) fn aged_is_held_only(&self) {
        let owes_errors = self.state().owes_errors;
        self.area.note_doubt(self.id, |doubt| (doubt.owes_errors, doubt.is_held_only) = (owes_errors, true));
    }

    /// An earlier process has left it open.
    pub(in crate::keepers::held) fn aged_goes_on_doubted(&self, log: &Log, doubt: Doubt) {
        let mut state = self.state();
        (state.is_doubted, state.failed_flushes) = (doubt.is_doubted, log.home.failed_flushes());
        // A commit that waited when storage failed is not durable, and was to be told so, if that process had not come to say which do.
        // So was one that waited when durability ended for another reason: it is held, and nothing else tells it from one that was answered.
        state.owes_errors = doubt.owes_errors || doubt.is_doubted && !doubt.is_held_only;
        // Where nobody wants that any more, a commit that is held is good.
        self.owes_errors(log, &mut state);
    }

    /// Whether a commit that is repeated is to be told of an error. Where no age is not wished any more, a commit that is held is good, and stays so
    /// whatever is wished later.
    pub(super) fn owes_errors(&self, log: &Log, state: &mut State) -> bool {
        if !log.is_durable_at_once() {
            let aging_owes = state.aging.as_mut().is_some_and(|aging| std::mem::take(&mut aging.owes_errors));
            if std::mem::take(&mut state.owes_errors) || aging_owes {
                self.area.note_doubt(self.id, |doubt| doubt.owes_errors = false);
            }
        }
        state.owes_errors
    }
}

fn say_why_not(log: &Log, state: &mut State, why: String) {
    let sentence = format!("its journal is only held, and not made durable by age: {why}");
    log::warn!("disk {}: {sentence}", log.home.options.name);
    log.home.note_fault(&sentence);
    state.why_not = Some(sentence);
}

/// Each block of these with its newest version.
pub(super) fn versions_of(owed: &[Transaction]) -> HashMap<u64, Version> {
    owed.iter().flat_map(|transaction| transaction.blocks.iter().copied()).collect()
}
