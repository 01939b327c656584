//! A recording is run through a simulation, step by step: the guest sends, the disk does what is due, routes are woken, passes end; and in
//! between logs are handed over, and the worker is killed (`hand_over`, `kills`, `follow`).

use crate::complete::JudgedLog;
use crate::error::{During, Error};
use crate::finding::{Step, Stop, finding};
use crate::follow::Dying;
use crate::hand_over;
use crate::kills::{self, Looks};
use crate::recording::{Event, Issue, Kind, PAGE_BYTES, Piece};
use crate::simulation::{Mutation, Pending, Simulation, watch};
use crate::switches::Switches;
use block_route::{Buffer, Operation, Plan, PlanAction, Request, RequestId, RequestKind, Route, Status};
use guest_memory::{MemorySlice, PageId, simulated_room};
use guest_tools::random::Random;
use placement::PlacementKind;
use std::os::fd::RawFd;
use std::sync::atomic::Ordering;

/// How long a host's own write may take, in recorded events.
const HOST_WRITE_EVENTS_MAX: u64 = 30;
/// What cannot be done in this many steps is never done.
const PATIENCE_STEPS: u32 = 20_000;

impl Simulation<'_> {
    /// Runs to the end. `look` is called after every step in which something moved.
    ///
    /// # Errors
    /// What `look` finds, or what breaks on the way.
    pub fn run(&mut self, look: &mut dyn FnMut(&mut Self) -> Step) -> Step {
        let recording = self.recording;
        for (index, event) in recording.events.iter().enumerate() {
            self.clock = index;
            self.milliseconds.store(index as u64, Ordering::Release);
            (0..self.journals.disks().len()).for_each(|disk| self.journals.wake_due(disk));
            for mutation in self.mutations.remove(&index).unwrap_or_default() {
                self.mutate(&mutation)?;
            }
            self.due(look)?;
            self.wake(false)?;
            self.looked(look)?;
            if self.is_reset_due() {
                self.resets += 1;
                return hand_over::reset(self);
            }
            self.hand_over(look)?;
            if self.dies_if_due()? {
                self.ask_again()?;
            }
            self.looked(look)?;
            match event {
                Event::Issue(issue) => {
                    self.issue(issue)?;
                    self.looked(look)?;
                    if self.switches.has(Switches::PASSES) && self.random.below(4) == 0 {
                        self.end_pass(usize::from(issue.disk))?;
                    }
                }
                Event::EndOfPass(disk) => {
                    let goes_on = matches!(recording.events.get(index + 1),
                        Some(Event::Issue(next)) if next.disk == *disk);
                    let merge = goes_on && self.switches.has(Switches::PASSES) && self.random.below(3) == 0;
                    if !merge {
                        self.end_pass(usize::from(*disk))?;
                    }
                }
                Event::Done(id) => self.force(*id, look)?,
                Event::Acknowledged(stream, number) => {
                    let entry = self.acknowledged.entry(recording.streams[usize::from(*stream)].clone()).or_default();
                    entry.count += 1;
                    entry.last = Some(*number);
                }
            }
            self.looked(look)?;
        }
        Ok(())
    }

    fn looked(&mut self, look: &mut dyn FnMut(&mut Self) -> Step) -> Step {
        if std::mem::take(&mut self.has_moved) { look(self) } else { Ok(()) }
    }

    fn mutate(&mut self, mutation: &Mutation) -> Step {
        self.has_moved = true;
        let looks = self.begin_looks();
        match mutation {
            Mutation::Content(piece) => self.put(piece),
            Mutation::Garbage(page, seed) => {
                let mut bytes = [0; PAGE_BYTES];
                Random::new(*seed).fill(&mut bytes);
                self.memory.simulated_guest_write(PageId(*page), 0, &bytes);
            }
        }
        self.end_looks(looks, None)
    }

    /// Looks at the stores of the step that begins now, if kills are among the adversary's liberties.
    fn begin_looks(&mut self) -> Option<Looks> {
        if !self.switches.has(Switches::KILLS) {
            return None;
        }
        self.steps += 1;
        Some(Looks::begin(self, self.seed ^ self.steps.rotate_left(20)))
    }

    fn end_looks(&mut self, looks: Option<Looks>, issue: Option<&Issue>) -> Step {
        let Some(looks) = looks.map(Looks::end) else { return Ok(()) };
        self.looks += looks.len() as u64;
        kills::check(self, &looks, issue)
    }

    /// The same, of a step in which only amberlog does something: it may die in it.
    fn begin_step(&mut self) -> (Option<Dying>, Option<Looks>) {
        let dying = self.begin_dying();
        let looks = if dying.is_none() { self.begin_looks() } else { None };
        (dying, looks)
    }

    /// Says whether it died: another process has gone on, and what the step made is nothing any more.
    fn end_step(
        &mut self,
        (dying, looks): (Option<Dying>, Option<Looks>),
        issue: Option<&Issue>,
    ) -> std::result::Result<bool, Stop> {
        self.end_looks(looks, issue)?;
        let has_died = self.end_dying(dying)?;
        if has_died {
            self.ask_again()?;
        }
        Ok(has_died)
    }

    /// The guest puts into its page what the recording says, if it is not there.
    fn put(&self, piece: &Piece) {
        let Some(content) = piece.content.map(|id| self.recording.content(id)) else { return };
        let Some(page) = self.memory.page(PageId(piece.page)) else { return };
        let mut now = vec![0; content.len()];
        page.copy_out(usize::from(piece.offset), &mut now);
        if now[..] != content[..] {
            self.memory.simulated_guest_write(PageId(piece.page), usize::from(piece.offset), content);
        }
    }

    fn issue(&mut self, issue: &Issue) -> Step {
        let looks = self.begin_looks();
        for piece in issue.segments.iter().flatten() {
            self.put(piece);
        }
        self.end_looks(looks, None)?;
        self.ask(issue, false)
    }

    /// The same of a request that is in the guest's memory.
    fn issue_again(&mut self, issue: &Issue) -> Step {
        self.ask(issue, true)
    }

    fn ask(&mut self, issue: &Issue, is_again: bool) -> Step {
        let mut slices: Vec<MemorySlice> = Vec::new();
        for segment in &issue.segments {
            let Some(first) = segment.first() else { continue };
            let gpa = u64::from(first.page) * PAGE_BYTES as u64 + u64::from(first.offset);
            let len: usize = segment.iter().map(|piece| usize::from(piece.len)).sum();
            self.table.slices(gpa, len, &mut slices).map_err(|e| Error::Other(e.to_string()))?;
        }
        let kind = match issue.kind {
            Kind::Read => RequestKind::Read,
            Kind::Write => RequestKind::Write,
            Kind::Flush => RequestKind::Flush,
            Kind::Discard => RequestKind::Discard,
            Kind::WriteZeroes(unmap) => RequestKind::WriteZeroes { unmap },
        };
        let request =
            Request { id: RequestId(issue.id), kind, offset: issue.offset, len: issue.len, segments: &slices };
        let disk = usize::from(issue.disk);
        self.plans[disk].1.push(issue.id);
        self.requests[issue.id as usize].is_issued = true;
        if let Some(watcher) = &self.watcher {
            watch(watcher).issued(self.recording, issue);
        }
        let looks = self.begin_step();
        let (plan, _) = &mut self.plans[disk];
        if is_again {
            self.routes[disk].route_again(&request, plan);
        } else {
            self.routes[disk].route(&request, plan);
        }
        if self.end_step(looks, Some(issue))? {
            return Ok(());
        }
        for log in &mut self.logs {
            log.issued(self.recording, issue);
        }
        self.has_moved = true;
        Ok(())
    }

    fn end_pass(&mut self, disk: usize) -> Step {
        let (mut plan, requests) = std::mem::take(&mut self.plans[disk]);
        if requests.is_empty() {
            return Ok(());
        }
        let looks = self.begin_step();
        simulated_room::set_full(self.watcher.as_ref().is_some_and(|watcher| !watch(watcher).has_memory()));
        self.routes[disk].end_of_pass(&mut plan);
        simulated_room::set_full(false);
        if self.end_step(looks, None)? {
            return Ok(());
        }
        for log in &mut self.logs {
            if log.description.place.journal_disk == disk {
                log.end_of_pass();
            }
        }
        self.carry_out(disk, plan)?;
        for id in requests {
            if self.requests[id as usize].holds == 0 && !self.requests[id as usize].is_completed {
                self.request_done(id);
            }
        }
        self.has_moved = true;
        Ok(())
    }

    fn request_done(&mut self, id: u32) {
        self.requests[id as usize].is_completed = true;
        self.logs.iter_mut().for_each(|log| log.request_done(id));
        if let Some(watcher) = &self.watcher {
            watch(watcher).request_done(id);
        }
    }

    fn carry_out(&mut self, disk: usize, plan: Plan) -> Step {
        for action in plan.actions {
            match action {
                PlanAction::Disk(operation) => {
                    if let Some(request) = operation.request {
                        self.requests[request.0 as usize].holds += 1;
                    }
                    if operation.operation == Operation::Read {
                        let looks = self.begin_looks();
                        for buffer in &operation.buffers {
                            if let Buffer::Slice(slice) = buffer {
                                self.table.prepare_write(slice).expect("there is room for copies");
                            }
                        }
                        self.end_looks(looks, None)?;
                    }
                    let latest = match operation.request {
                        Some(request) => self.done_at[request.0 as usize],
                        None => self.clock + 1 + self.random.below(HOST_WRITE_EVENTS_MAX) as usize,
                    };
                    let (mut execute_at, mut complete_at) = (self.clock, self.clock);
                    if self.switches.has(Switches::DELAY) {
                        let left = latest.saturating_sub(self.clock) as u64 + 1;
                        execute_at += self.random.below(left) as usize;
                        complete_at = execute_at + self.random.below(left) as usize;
                    }
                    let number = self.operations;
                    self.operations += 1;
                    if let Some(watcher) = &self.watcher {
                        watch(watcher).submitted(number, &operation);
                    }
                    self.pending.push(Pending { number, disk, operation, is_executed: false, execute_at, complete_at });
                }
                PlanAction::Hold(request) => self.requests[request.0 as usize].holds += 1,
                PlanAction::Release(request, status) => self.release(request, status)?,
            }
        }
        Ok(())
    }

    fn release(&mut self, request: RequestId, status: Status) -> Step {
        let state = &mut self.requests[request.0 as usize];
        if status != Status::Ok {
            return finding(format!("request {} of the guest failed: {status:?}", request.0));
        }
        if state.holds == 0 {
            return finding(format!("request {} is released more often than it was held", request.0));
        }
        state.holds -= 1;
        if state.holds == 0 {
            self.request_done(request.0);
        }
        Ok(())
    }

    /// Does what is due by now, in any order.
    fn due(&mut self, look: &mut dyn FnMut(&mut Self) -> Step) -> Step {
        loop {
            let due: Vec<usize> = (0..self.pending.len())
                .filter(|index| {
                    let pending = &self.pending[*index];
                    // A device's thread hears of no completion in the middle of a pass.
                    let in_pass = !self.plans[pending.disk].1.is_empty();
                    let at = if pending.is_executed { pending.complete_at } else { pending.execute_at };
                    at <= self.clock && !(pending.is_executed && in_pass)
                })
                .collect();
            if due.is_empty() {
                return Ok(());
            }
            let index = due[self.random.below(due.len() as u64) as usize];
            self.advance(index, look)?;
        }
    }

    /// Takes one operation one step on.
    fn advance(&mut self, index: usize, look: &mut dyn FnMut(&mut Self) -> Step) -> Step {
        if self.pending[index].is_executed {
            let pending = self.pending.swap_remove(index);
            if let Some(watcher) = &self.watcher {
                watch(watcher).completed(pending.number, &pending.operation);
            }
            let mut plan = Plan::default();
            let looks = self.begin_step();
            if let Some(ticket) = pending.operation.ticket {
                self.routes[pending.disk].disk_done(ticket, Ok(()), &mut plan);
            }
            if self.end_step(looks, None)? {
                return self.looked(look);
            }
            self.carry_out(pending.disk, plan)?;
            if let Some(request) = pending.operation.request {
                self.release(request, Status::Ok)?;
            }
        } else {
            self.execute(index)?;
        }
        self.has_moved = true;
        self.looked(look)
    }

    /// Lets routes that were woken do their work; sometimes a little later.
    fn wake(&mut self, now: bool) -> Step {
        for disk in 0..self.routes.len() {
            let is_late = !now && self.switches.has(Switches::DELAY) && self.random.below(3) != 0;
            if is_late || !self.plans[disk].1.is_empty() {
                continue;
            }
            let Some(descriptor) = self.routes[disk].wake_descriptor() else { continue };
            // How often it was written to: it is never read empty here, so more than before means a new wake.
            let count = event_count(descriptor);
            if count > self.wakes[disk] {
                self.wakes[disk] = count;
                let mut plan = Plan::default();
                let looks = self.begin_step();
                self.routes[disk].woken(&mut plan);
                if self.end_step(looks, None)? {
                    return Ok(());
                }
                self.carry_out(disk, plan)?;
                self.has_moved = true;
            }
        }
        Ok(())
    }

    /// The guest has seen that a request is done, so it has to be.
    fn force(&mut self, id: u32, look: &mut dyn FnMut(&mut Self) -> Step) -> Step {
        for disk in 0..self.plans.len() {
            self.end_pass(disk)?;
        }
        let mut steps = 0;
        while !self.requests[id as usize].is_completed {
            steps += 1;
            if steps > PATIENCE_STEPS || !self.requests[id as usize].is_issued {
                return finding(format!("request {id} of the guest is never completed"));
            }
            let own = self.pending.iter().position(|pending| pending.operation.request == Some(RequestId(id)));
            match own {
                Some(index) => self.advance(index, look)?,
                None => {
                    self.wake(true)?;
                    if self.hand_over_at.is_some_and(|at| self.clock >= at) {
                        // Whoever has a log handed over asks until it is done, and what waits for that goes then.
                        self.has_moved |= hand_over::attempt(self)?;
                    }
                    self.looked(look)?;
                    let host = self.pending.iter().position(|pending| pending.operation.request.is_none());
                    if let Some(index) = host.or_else(|| (!self.pending.is_empty()).then_some(0)) {
                        self.advance(index, look)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Everything on its way arrives, as when a device is stopped.
    ///
    /// # Errors
    /// When something is never done.
    pub fn drain(&mut self) -> Step {
        let mut steps = 0;
        for disk in 0..self.plans.len() {
            self.end_pass(disk)?;
        }
        while !self.pending.is_empty() {
            steps += 1;
            if steps > PATIENCE_STEPS {
                return finding("the disk is never idle");
            }
            let index = self.random.below(self.pending.len() as u64) as usize;
            self.advance(index, &mut |_| Ok(()))?;
        }
        Ok(())
    }

    /// Whether its guest is reset now, as a log is to be handed over.
    fn is_reset_due(&self) -> bool {
        let is_held = |judged: &JudgedLog| self.journals.log(judged.log.index()).is_some_and(|log| log.is_held_open());
        self.switches.has(Switches::RESET)
            && self.hand_over_at.is_some_and(|at| self.clock >= at)
            && self.logs.iter().any(is_held)
    }

    /// Hands the logs over from a moment on that follows from the seed.
    fn hand_over(&mut self, look: &mut dyn FnMut(&mut Self) -> Step) -> Step {
        if self.hand_over_at.is_none_or(|at| self.clock < at) {
            return Ok(());
        }
        self.has_moved |= hand_over::attempt(self)?;
        self.leave_region()?;
        self.looked(look)
    }

    /// Has a log that is on NVM leave it, a step further.
    fn leave_region(&mut self) -> Step {
        for index in 0..self.logs.len() {
            let number = self.logs[index].log.index();
            let Some(log) = self.journals.log(number) else { continue };
            let disk = log.journal_disk();
            if log.placement != PlacementKind::Nvm || !log.is_open() || self.is_in_pass(disk) {
                continue;
            }
            self.journals.change_placement(number, PlacementKind::Storage).during("asking for a hand-over")?;
            if let Some(watcher) = &self.watcher {
                watch(watcher).leaves();
            }
            let mut plan = Plan::default();
            let left = self.routes[disk].hand_over(number, &mut plan);
            self.carry_out(disk, plan)?;
            self.has_moved = true;
            match left {
                Ok(true) => hand_over::check_is_there(self, number)?,
                Ok(false) => {}
                Err(error) => return finding(format!("a log cannot leave its region: {error}")),
            }
        }
        Ok(())
    }

    fn is_unanswered(&self, id: u32) -> bool {
        let state = self.requests[id as usize];
        state.is_issued && !state.is_completed
    }

    /// What another process held a request for is over.
    fn forget_holds(&mut self, id: u32) {
        self.requests[id as usize].holds = 0;
    }

    /// The guest's requests that were not answered, in the order in which they were sent.
    fn ask_again(&mut self) -> Step {
        let recording = self.recording;
        let clock = self.clock();
        for plan in &mut self.plans {
            *plan = (Plan::default(), Vec::new());
        }
        for event in recording.events.iter().take(clock + 1) {
            let Event::Issue(issue) = event else { continue };
            if self.is_unanswered(issue.id) {
                self.forget_holds(issue.id);
                self.issue_again(issue)?;
            }
        }
        for disk in 0..self.images.len() {
            self.end_pass(disk)?;
        }
        if self.logs.is_empty() { finding("the next worker has found no log") } else { Ok(()) }
    }
}

/// The counter of an eventfd, as the kernel shows it.
fn event_count(descriptor: RawFd) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/self/fdinfo/{descriptor}")).unwrap_or_default();
    let count = text.lines().find_map(|line| line.strip_prefix("eventfd-count:"));
    count.and_then(|count| u64::from_str_radix(count.trim(), 16).ok()).unwrap_or(0)
}
