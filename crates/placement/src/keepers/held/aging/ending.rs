//! How durability by age ends: at a wish, with a fault, for want of memory, with its log or its file system. The error mark goes to storage
//! before anything goes on; who waits is answered.

use super::super::holder::Held;
use super::machine::host_write;
use super::report::sum;
use super::state::{Aging, Asked, Cause, State, Unheld, retried_at};
use crate::keeper::{Side, Step, Steps};
use crate::log::Log;
use crate::opening::mark_again;
use block_route::{RequestId, Status};
use durability::{AnswerId, WriteId};
use journal_area::{HostWrite, Opening};
use std::collections::HashMap;
use std::io;

/// Who waits for durability by age where there is none any more: every request of the guest that is held for it is among these.
#[derive(Debug, Default)]
pub(in crate::keepers::held) struct Waited {
    /// Commits that an age promises no more than that they are held.
    held: Vec<RequestId>,
    /// Commits that were to be durable, and log blocks without memory.
    refused: Vec<RequestId>,
    /// Superblocks, each with what it says.
    superblocks: Vec<(RequestId, Vec<u8>)>,
}

impl Waited {
    /// The log has gone from its disk. Commits that are held are in the log's place if `is_there`; superblocks go there as they are.
    pub fn go(self, is_there: bool, steps: &mut Steps) {
        let held = if is_there { Status::Ok } else { Status::IoError };
        let commits = self.held.into_iter().map(|request| (request, held));
        for (request, status) in commits.chain(self.refused.into_iter().map(|request| (request, Status::IoError))) {
            steps.push(Side::Journal, Step::Release(request, status));
        }
        for (request, content) in self.superblocks {
            steps.push(Side::Journal, Step::Superblock(request, content));
        }
    }

    /// Its guest has closed the log: no kernel waits for anything of it then.
    pub(super) fn fail(self, steps: &mut Steps) {
        let superblocks = self.superblocks.into_iter().map(|(request, _)| request);
        for request in self.held.into_iter().chain(self.refused).chain(superblocks) {
            steps.push(Side::Journal, Step::Release(request, Status::IoError));
        }
    }
}

impl Aging {
    /// There is no durability any more, nor an end of it that anybody could wait for. Gives everybody who waits, for the machine or for that end.
    pub(super) fn take_waiting(&mut self) -> Waited {
        let (is_held, is_held_again) = (self.promises_held(false), self.promises_held(true));
        let mut waited = Waited { held: std::mem::take(&mut self.told_later), ..Waited::default() };
        let mut said = Vec::new();
        self.machine.give_up(&mut said);
        let is_good = |answer| said.contains(&durability::Step::Answer { answer, is_good: true });
        let mut asked: Vec<(AnswerId, Asked)> = self.answers.drain().collect();
        asked.sort_unstable_by_key(|(answer, _)| *answer);
        for (answer, asked) in asked {
            match asked {
                Asked::Commit(requests) if is_held || is_good(answer) => waited.held.extend(requests),
                Asked::CommitAgain(requests) if is_held_again || is_good(answer) => waited.held.extend(requests),
                Asked::Commit(requests) | Asked::CommitAgain(requests) => waited.refused.extend(requests),
                Asked::Superblock { request, content, .. } => waited.superblocks.push((request, content)),
                Asked::Nobody => {}
            }
        }
        waited.superblocks.append(&mut self.later);
        waited.refused.extend(self.unheld.drain(..).map(|(_, request, _)| request));
        waited
    }
}

impl Held {
    pub(super) fn give_up(&self, log: &Log, aging: &mut Aging, steps: &mut Steps) {
        let mut said = Vec::new();
        aging.machine.give_up(&mut said);
        aging.carry_out(self, log, said, steps);
    }

    pub(super) fn end_if_drained(&self, log: &Log, state: &mut State, steps: &mut Steps) {
        let is_drained = state.aging.as_ref().is_some_and(|aging| {
            // One that closes is over when its superblock is taken.
            aging.ending.is_some() && aging.is_quiet(log) && aging.ready.is_none() && !aging.is_closed
        });
        if is_drained && let Err(error) = self.end(log, state, steps) {
            log::error!("disk {}: {error}", log.home.options.name);
            // Who waits for that would wait for ever.
            if let Some(aging) = &mut state.aging {
                fail_waiting(std::mem::take(&mut aging.unheld), std::mem::take(&mut aging.later), steps);
                fail_told(std::mem::take(&mut aging.told_later), steps);
            }
            self.fail_absorbing(steps);
            // So would a home write that waits: it is asked for again, tries to end this once more, and fails if that does.
            steps.push(Side::Home, Step::Retry);
        }
    }

    /// Storage gets the error mark; what waited goes on as without durability.
    pub(super) fn end(&self, log: &Log, state: &mut State, steps: &mut Steps) -> io::Result<()> {
        let Some(aging) = &mut state.aging else { return Ok(()) };
        let Some(ending) = &aging.ending else { return Ok(()) };
        // Whoever repeats a commit that waited was not answered. What was owed before is not owed any more where all became durable since.
        let owed_before = aging.owes_errors && aging.within.is_zero();
        let owes_errors =
            ending.cause != Cause::Wish && (owed_before || aging.answers_late() && aging.machine.falls_short());
        // Before the mark: who goes on without this process finds a commit that is held, as any other, from then on.
        self.area.note_doubt(self.id, |doubt| (doubt.owes_errors, doubt.is_held_only) = (owes_errors, true));
        let next = Opening { count: aging.opening.count + 1, ..aging.opening };
        // What kernels write once the held log is lost is to have numbers that no compound has.
        let number = aging.next_number();
        mark_again(log, &self.area, (&aging.superblock, number), next).map_err(|error| {
            let sentence = format!(
                "the journal is not made durable any more ({}), and marking it failed: {error}; nothing is written to its file \
                 system before that is done",
                ending.why
            );
            log.home.note_fault(&sentence);
            io::Error::new(error.kind(), sentence)
        })?;
        match ending.cause {
            Cause::Numbers => {
                let sentence = format!("its journal is only held for now: {}", ending.why);
                log::info!("disk {}: {sentence}", log.home.options.name);
                // Not again before it is closed.
                state.why_not = Some(sentence);
                state.lacks_memory_until = Some(retried_at(log));
            }
            Cause::Wish => {
                log::info!("disk {}: its journal is only held from now on, as wished", log.home.options.name)
            }
            Cause::Memory => {
                let sentence = format!(
                    "its journal is not made durable within {} s for now, and only held: {}",
                    aging.within.as_secs(),
                    ending.why
                );
                // With no age each commit was told of as durable, and the next ones are not.
                let level = if aging.within.is_zero() { log::Level::Error } else { log::Level::Warn };
                log::log!(level, "disk {}: {sentence}", log.home.options.name);
                state.why_not = Some(sentence);
                state.lacks_memory_until = Some(retried_at(log));
            }
            Cause::Fault => {
                let sentence = format!(
                    "its journal is not made durable within {} s any more, and only held: {}",
                    aging.within.as_secs(),
                    ending.why
                );
                log::error!("disk {}: {sentence}", log.home.options.name);
                log.home.note_fault(&sentence);
                state.why_not = Some(sentence);
            }
        }
        // One that was to be closed is not, or not so.
        self.area.note_closing(self.id, false);
        state.owes_errors = owes_errors;
        let Some(mut aging) = self.over(state) else { return Ok(()) };
        self.send_hosts(log, std::mem::take(&mut aging.hosts), steps);
        for request in aging.told_later {
            steps.push(Side::Journal, Step::Release(request, Status::Ok));
        }
        for (request, content) in aging.later {
            steps.push(Side::Journal, Step::Superblock(request, content));
        }
        for (position, request, buffer) in aging.unheld {
            self.store(log, position, request, buffer, steps);
            steps.push(Side::Journal, Step::Release(request, Status::Ok));
        }
        steps.push(Side::Home, Step::Retry);
        // Flushes waited for that, too.
        log.home.wake.wake();
        Ok(())
    }

    /// Writes of the host that waited go, but for those to where home is only by books that have been proven wrong meanwhile. Where the guest
    /// was told that they are home, it has said itself where that is.
    pub(super) fn send_hosts(&self, log: &Log, hosts: HashMap<WriteId, (usize, HostWrite)>, steps: &mut Steps) {
        let is_in_doubt = self.area.contradiction(self.id).is_some();
        let may_go = |block: u64| !is_in_doubt || self.area.has_absorbed(self.id, &(block..block + 1));
        let (sent, unsent): (HashMap<_, _>, HashMap<_, _>) =
            hosts.into_iter().partition(|(_, (_, write))| may_go(write.block));
        for (operation, write) in sent.into_values() {
            host_write(log, operation, write, steps);
        }
        self.end_unsent(unsent.into_values());
    }

    /// Writes of the host that waited are not sent any more: nobody waits for them to end, a recovery least of all. What they were to bring
    /// home stays owed.
    pub(super) fn end_unsent(&self, hosts: impl IntoIterator<Item = (usize, HostWrite)>) {
        for (operation, _) in hosts {
            self.inner().host_in_flight -= 1;
            self.area.home_write_ended(self.id, operation, false);
        }
    }

    /// It is over. Whoever calls this sees to the writes of the host that waited.
    pub(super) fn over(&self, state: &mut State) -> Option<Aging> {
        let aging = state.aging.take()?;
        self.area.tell_accepted(self.id, false);
        state.next_number = Some(aging.next_number());
        state.counted = sum(&state.counted, &aging.machine.status());
        Some(aging)
    }

    /// Somebody hands the log over to storage, and asks until no home write of the guest's is under way. From the first time on none begins, since a
    /// guest that writes without a pause would leave no such moment; nor does the host write anything home for want of memory. Durability by age
    /// goes on: it ends when the log can be taken soon, and has not ended where somebody gives up before that.
    ///
    /// Nothing that a hand-over waits for waits for a write that is held back so: what is on its way ends by itself, what is absorbed the host writes home,
    /// and the machine of durability by age waits for no write but those that it was told of, which go ([`Held::rests`]). Commits may wait until the guest
    /// has written home what makes room for them, and a hand-over does not wait for commits.
    pub(in crate::keepers::held) fn aged_comes_to_rest(&self, log: &Log) -> bool {
        self.state().is_coming_to_rest = true;
        if self.area.has_guest_writes_in_flight(self.id) {
            return false;
        }
        if self.has_overtaken() {
            // They are asked about once more, and go.
            log.home.wake.wake();
            return false;
        }
        true
    }

    pub(in crate::keepers::held) fn is_coming_to_rest(&self) -> bool {
        self.state().is_coming_to_rest
    }

    /// Somebody is about to take the log elsewhere.
    pub(in crate::keepers::held) fn aged_may_be_taken(&self, log: &Log) -> bool {
        let mut state = self.state();
        state.is_leaving = true;
        if state.aging.is_some() || state.is_unmarked {
            log.home.wake.wake();
            return false;
        }
        // Superblocks that wait are taken when the last home write has ended: nobody else would answer them.
        !state.is_engaging && state.closing.is_empty()
    }

    /// It stays here after all.
    pub(in crate::keepers::held) fn aged_stays(&self, log: &Log) {
        {
            let mut state = self.state();
            (state.is_leaving, state.is_coming_to_rest) = (false, false);
        }
        log.home.wake.wake();
    }

    /// The log is gone, or its guest: nothing of ours is under way any more.
    pub(in crate::keepers::held) fn forget_aging(&self) {
        self.forget_aging_as(false);
    }

    /// The log is about to be somebody else's: nothing of ours is under way any more, and nothing begins.
    pub(in crate::keepers::held) fn leave_aging(&self) {
        self.forget_aging_as(true);
    }

    pub(super) fn forget_aging_as(&self, is_leaving: bool) {
        self.forget_absorbing();
        let mut state = self.state();
        if let Some(aging) = self.over(&mut state) {
            self.end_unsent(aging.hosts.into_values());
        }
        let (stints, counted) = (state.stints, state.counted);
        *state = State { stints, counted, is_leaving, ..State::default() };
    }

    /// The same before a recovery, which may fail: until one has not, nothing goes home beside the compounds on storage, which would be
    /// replayed over it.
    pub(in crate::keepers::held) fn forget_aging_for_recovery(&self) {
        let is_aged = {
            let state = self.state();
            state.aging.is_some() || state.following.is_some() || state.is_unmarked
        };
        self.forget_aging();
        self.state().is_unmarked = is_aged;
    }

    /// Its file system has gone from the disk: nothing of ours begins any more. Gives who waits for durability, which does not come: nobody else
    /// knows of them. Nothing where something is on its way, and nothing has happened then. Both under one lock: the thread of its disk may begin
    /// something at any moment. (The area is asked before, since whoever takes the log elsewhere has its lock first: what the host begins there
    /// meanwhile is not sent.)
    pub(in crate::keepers::held) fn aged_is_gone(&self) -> Option<Waited> {
        let is_host_writing = self.area.has_host_writes_in_flight(self.id);
        let mut state = self.state();
        let has_operations = state.aging.as_ref().is_some_and(|aging| !aging.operations.is_empty());
        let has_host_writes = self.inner().host_in_flight > 0 || is_host_writing;
        if has_operations || has_host_writes {
            return None;
        }
        let mut waited = self.over(&mut state).map(|mut aging| aging.take_waiting()).unwrap_or_default();
        waited.superblocks.append(&mut state.closing);
        *state = State { stints: state.stints, counted: state.counted, is_gone: true, ..State::default() };
        Some(waited)
    }

    /// Whether its file system has gone from the disk.
    pub(in crate::keepers::held) fn is_gone(&self) -> bool {
        self.state().is_gone
    }
}

/// Commits that waited to be told that they are held fail.
pub(super) fn fail_told(told_later: Vec<RequestId>, steps: &mut Steps) {
    told_later.into_iter().for_each(|request| steps.push(Side::Journal, Step::Release(request, Status::IoError)));
}

/// What waited for the end fails.
pub(super) fn fail_waiting(unheld: Vec<Unheld>, later: Vec<(RequestId, Vec<u8>)>, steps: &mut Steps) {
    let requests = unheld.into_iter().map(|(_, request, _)| request);
    for request in requests.chain(later.into_iter().map(|(request, _)| request)) {
        steps.push(Side::Journal, Step::Release(request, Status::IoError));
    }
}

#[cfg(test)]
mod tests {
    use super::super::machine::Shown;
    use super::*;
    use crate::attached::DiskOptions;
    use crate::description::AreaDirectory;
    use crate::disk::PlacementKind;
    use crate::journals::{Journals, JournalsOptions};
    use crate::kept_log::KeptLog;
    use durability::{Durability, Freed, Transaction};
    use guest_memory::VmMemory;
    use std::path::Path;
    use std::sync::Arc;
    use std::time::Duration;

    /// A log that is durable within that time, its keeper, and its superblock.
    fn opened(directory: &Path, within: Duration) -> (Arc<Journals>, Arc<KeptLog>, Held, Vec<u8>) {
        let image = directory.join("image");
        std::fs::File::create(&image).and_then(|file| file.set_len(16 << 20)).expect("an image");
        let make = |mut command: std::process::Command| command.arg(&image).status().expect("e2fsprogs");
        let mut mke2fs = std::process::Command::new("mke2fs");
        mke2fs.args(["-q", "-F", "-t", "ext4", "-b", "4096", "-J", "size=4"]);
        assert!(make(mke2fs).success());
        let disk = DiskOptions {
            name: "disk".to_owned(),
            path: image,
            placement: PlacementKind::Copy,
            honour_flush: false,
            read_only: false,
            nvm: None,
            remote: None,
            durable_within: Some(within),
            write_log: None,
        };
        let options = JournalsOptions { disks: vec![disk], budget_bytes: 64 << 20, tracer: None };
        let area = AreaDirectory::create(&directory.join("vms"), &directory.join("registry"));
        let journals = Journals::new(&VmMemory::new(), area.expect("a directory"), options).expect("journals");
        let log = journals.logs().remove(0);
        let held = Held::new(Arc::clone(&journals.area), log.id);
        let mut block = vec![0; log.place.block_bytes as usize];
        log.read_stored(0, &mut block).expect("read");
        assert!(held.begin_aging(&log, &block).expect("it begins"));
        (journals, log, held, block)
    }

    /// Commits wait for the machine, with nothing under way, as they do where the log is full, and the guest writes home what would make
    /// room. With no age they were to be durable, and with one they were slowed down.
    #[test]
    fn a_commit_that_waits_for_room_is_answered_as_its_log_goes() {
        for (within, is_held) in [(Duration::ZERO, false), (Duration::from_secs(3600), true)] {
            let directory = tempfile::tempdir_in("/dev/shm").expect("tmpfs");
            let (_journals, log, held, block) = opened(directory.path(), within);
            let mut steps = Steps::default();
            {
                let mut state = held.state();
                let aging = state.aging.as_mut().expect("it is in force");
                let machine = Durability::opened(&block, within).expect("a log").on_storage();
                aging.machine = machine;
                let first = aging.machine.last().wrapping_add(1);
                // The second one waits for what is made of the first.
                for sequence in [first, first.wrapping_add(1)] {
                    let blocks = Vec::new();
                    let transaction =
                        Transaction { sequence, blocks, revokes: Vec::new(), freed: Freed::Blocks(vec![]) };
                    let answer = aging.ask(Asked::Commit(vec![RequestId(sequence)]));
                    let mut said = Vec::new();
                    let mut view = Shown { log: &log, area: &held.area, id: held.id, watched: &mut aging.watched };
                    aging.machine.committed(Duration::ZERO, &transaction, answer, &mut view, &mut said);
                }
                assert_eq!(aging.answers.len(), 2);
                assert!(aging.operations.is_empty(), "nothing of it is sent");
            }
            held.aged_is_gone().expect("nothing is on its way").go(true, &mut steps);
            let status = if is_held { Status::Ok } else { Status::IoError };
            let answered = |step: &(Side, Step)| matches!(step.1, Step::Release(_, told) if told == status);
            assert_eq!(steps.0.iter().filter(|step| answered(step)).count(), 2, "{within:?}: {:?}", steps.0);
        }
    }

    /// Changes of homes that wait for the machine are asked about once more when there is neither a machine nor a log.
    #[test]
    fn what_waits_for_a_machine_is_asked_about_when_its_log_has_gone() {
        let directory = tempfile::tempdir_in("/dev/shm").expect("tmpfs");
        let (_journals, log, held, _) = opened(directory.path(), Duration::from_secs(5));
        let mut steps = Steps::default();
        held.aged_has_no_log(&log, &mut steps);
        assert!(held.state().aging.is_none());
        let is_retry = |step: &(Side, Step)| step.0 == Side::Home && matches!(step.1, Step::Retry);
        assert!(steps.0.iter().any(is_retry), "{:?}", steps.0);
    }
}
