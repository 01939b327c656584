//! One thread for several devices: their workers take turns, and it sleeps for all of them at once.
//!
//! Each worker is as it is in a thread of its own, with an io_uring of its own. Two things are different. The thread sleeps at an event
//! descriptor that all the io_urings signal. And where a route is about to hear of a start, which may wait for what the other disks have
//! under way (a journal's home writes, if the journal is another disk), the others take nothing new until nothing of theirs is under way any
//! more: nobody else would bring it to its end. Must never: sleep while a worker has something to do. Failure story: a worker that ends does so
//! alone; one whose route hangs has all disks of its thread hang.

use crate::counters::Counters;
use crate::device::event_descriptor;
use crate::engine::Engine;
use crate::error::Error;
use crate::worker::{MailboxReceiver, Worker, WorkerParts};
use block_route::Route;
use rustix::event::{PollFd, PollFlags, Timespec};
use sandbox::{Role, Sandbox};
use std::cell::RefCell;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::time::{Duration, Instant};

/// What one of the thread's devices is made of, and who is to be told of it.
pub(crate) struct Served<R: Route + ?Sized> {
    pub(crate) parts: WorkerParts<R>,
    pub(crate) model: Option<Arc<disk_model::Client>>,
    pub(crate) under_way: Option<Arc<OwnedFd>>,
    pub(crate) mailbox: MailboxReceiver<R>,
    /// Whether the kernel gives it what it needs.
    pub(crate) ready: SyncSender<Result<(), Error>>,
    /// Its route, and how many operations storage has not answered.
    pub(crate) has_ended: SyncSender<(Box<R>, usize)>,
}

/// What the workers of a thread know of each other. One that is alone has nobody to wait for.
#[derive(Clone, Debug, Default)]
pub(crate) struct Company {
    all: Rc<RefCell<Vec<Member>>>,
    own: usize,
}

#[derive(Debug, Default)]
struct Member {
    /// Operations under way after its last turn.
    under_way: usize,
    /// It would begin if nothing of the others was under way.
    is_to_begin: bool,
}

impl Company {
    /// For so many workers, one each.
    fn of(count: usize) -> Vec<Self> {
        let all = Rc::new(RefCell::new((0..count).map(|_| Member::default()).collect::<Vec<_>>()));
        (0..count).map(|own| Company { all: Rc::clone(&all), own }).collect()
    }

    fn set(&self, change: impl FnOnce(&mut Member)) {
        if let Some(member) = self.all.borrow_mut().get_mut(self.own) {
            change(member);
        }
    }

    fn others(&self, is: impl Fn(&Member) -> bool) -> bool {
        self.all.borrow().iter().enumerate().any(|(index, member)| index != self.own && is(member))
    }

    pub(crate) fn begin_turn(&self) {
        self.set(|own| own.is_to_begin = false);
    }

    pub(crate) fn end_turn(&self, under_way: usize) {
        self.set(|own| own.under_way = under_way);
    }

    /// It waits for nobody any more, and nobody for it.
    pub(crate) fn leave(&self) {
        self.set(|own| *own = Member::default());
    }

    /// Whether this one may begin now. If not, the others hear that it is to.
    pub(crate) fn lets_begin(&self) -> bool {
        let lets = !self.others(|other| other.under_way > 0);
        self.set(|own| own.is_to_begin = !lets);
        lets
    }

    /// It does not begin yet, whatever the others do.
    pub(crate) fn begins_later(&self) {
        self.set(|own| own.is_to_begin = false);
    }

    /// Whether another one is to begin, so that this one takes nothing new.
    pub(crate) fn somebody_begins(&self) -> bool {
        self.others(|other| other.is_to_begin)
    }

    /// Whether a turn of somebody would bring on what nobody is woken for: one may begin by now, or nobody is waited for any more.
    fn changes(&self, was_awaited: bool) -> bool {
        let all = self.all.borrow();
        let is_awaited = all.iter().any(|member| member.is_to_begin);
        let may_begin = all.iter().enumerate().any(|(index, member)| {
            let mut others = all.iter().enumerate().filter(|(other, _)| *other != index);
            member.is_to_begin && others.all(|(_, other)| other.under_way == 0)
        });
        may_begin || was_awaited && !is_awaited
    }

    fn is_awaited(&self) -> bool {
        self.all.borrow().iter().any(|member| member.is_to_begin)
    }
}

/// Serves devices in the calling thread until all of them have been told to quit.
pub(crate) fn serve<R: Route + ?Sized>(served: Vec<Served<R>>, sandbox: Option<Sandbox>) {
    // Engines belong to the thread that makes them.
    let Some((mut workers, company, event)) = workers(served, sandbox) else { return };
    if let [_] = workers[..] {
        let (worker, has_ended) = workers.pop().expect("there is one");
        let _ = has_ended.send(worker.run());
        return;
    }
    let context = log_context::Context::current();
    for (worker, _) in &mut workers {
        worker.begin();
    }
    while !workers.is_empty() {
        let was_awaited = company.is_awaited();
        let mut has_more = false;
        for (worker, _) in &mut workers {
            let _entered = log_context::enter(context.clone().with_disk(&worker.name));
            has_more |= worker.turn();
        }
        let ended: Vec<_> = workers.extract_if(.., |(worker, _)| worker.ended()).collect();
        for (worker, has_ended) in ended {
            let _ = has_ended.send(worker.end());
        }
        if !has_more && !company.changes(was_awaited) {
            rest(&mut workers, &event);
        }
    }
}

type Workers<R> = Vec<(Worker<R>, SyncSender<(Box<R>, usize)>)>;

/// The workers of this thread, and what is signalled when one has something to do. Nothing where one cannot be: all have been told.
fn workers<R: Route + ?Sized>(
    served: Vec<Served<R>>,
    sandbox: Option<Sandbox>,
) -> Option<(Workers<R>, Company, OwnedFd)> {
    let are_several = served.len() > 1;
    let engine = |served: &Served<R>, event: &OwnedFd| {
        let Served { parts, model, under_way, .. } = served;
        let counters: Arc<Counters> = Arc::clone(&parts.counters);
        let signal = are_several.then(|| event.as_fd());
        Engine::new(Arc::clone(&parts.image), counters, model.clone(), under_way.as_deref(), signal)
    };
    let made = event_descriptor().and_then(|event| {
        let engines: Result<Vec<Engine>, Error> = served.iter().map(|served| engine(served, &event)).collect();
        Ok((engines?, event))
    });
    let (engines, event) = match made {
        Ok(made) => made,
        Err(error) => {
            // The first one has the sentence. The others' senders are dropped, which says that they have ended.
            if let Some(first) = served.first() {
                let _ = first.ready.send(Err(error));
            }
            return None;
        }
    };
    // Not before: the engines' io_urings are the last ones that this thread gets.
    if let Some(sandbox) = sandbox {
        sandbox.enter(Role::Disk);
    }
    let companies = Company::of(served.len());
    let company = companies.first().cloned().unwrap_or_default();
    let workers = served.into_iter().zip(engines).zip(companies).map(|((served, engine), company)| {
        let Served { parts, mailbox, ready, has_ended, .. } = served;
        let _ = ready.send(Ok(()));
        (Worker::new(parts, engine, mailbox, company), has_ended)
    });
    Some((workers.collect(), company, event))
}

/// Nobody has anything to do: polls for a moment if that has paid lately for one of them, then sleeps.
fn rest<R: Route + ?Sized>(workers: &mut Workers<R>, event: &OwnedFd) {
    let idle_since = Instant::now();
    // As a worker that is alone: only guests are polled for.
    let times: Option<Vec<Duration>> = workers.iter().map(|(worker, _)| worker.polls_for(idle_since)).collect();
    let polled = times.as_ref().and_then(|times| times.iter().max().copied()).unwrap_or_default();
    if !polled.is_zero() {
        for (worker, _) in workers.iter_mut() {
            worker.engine().enter(false, None);
        }
        while idle_since.elapsed() <= polled {
            if workers.iter_mut().any(|(worker, _)| worker.more_to_do()) {
                for (worker, _) in workers.iter_mut() {
                    // Completions that the kernel hands out only when entered.
                    worker.engine().enter(false, None);
                }
                return;
            }
            std::hint::spin_loop();
        }
    }
    let mut timeout: Option<Duration> = None;
    for (worker, _) in workers.iter_mut() {
        let Some(own) = worker.may_sleep(idle_since) else { return };
        timeout = [timeout, own].into_iter().flatten().min();
        worker.engine().enter(false, None);
    }
    // What is signalled from here on is seen below; what was before is looked for after this.
    let _ = rustix::io::read(event, &mut [0u8; 8]);
    if workers.iter_mut().any(|(worker, _)| worker.engine().has_completions()) {
        return;
    }
    sleep(event, timeout);
    if times.is_some() {
        let time = idle_since.elapsed();
        workers.iter_mut().for_each(|(worker, _)| worker.has_waited(time));
    }
}

fn sleep(event: &OwnedFd, timeout: Option<Duration>) {
    let mut list = [PollFd::new(event, PollFlags::IN)];
    let timeout = timeout.map(|time| Timespec {
        tv_sec: time.as_secs().try_into().unwrap_or(i64::MAX),
        tv_nsec: time.subsec_nanos().into(),
    });
    // Interrupted, or in vain: a turn more than needed.
    let _ = rustix::event::poll(&mut list, timeout.as_ref());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_that_is_alone_waits_for_nobody() {
        let alone = Company::default();
        alone.end_turn(5);
        assert!(alone.lets_begin() && !alone.somebody_begins() && !alone.is_awaited());
    }

    #[test]
    fn who_is_to_begin_keeps_the_others_from_taking_more_until_they_are_done() {
        let [first, second, third] = &Company::of(3)[..] else { unreachable!("three were asked for") };
        assert!(first.lets_begin());
        second.end_turn(2);
        third.end_turn(0);
        assert!(!first.lets_begin());
        assert!(second.somebody_begins() && third.somebody_begins() && !first.somebody_begins());
        // A second one that is to begin waits for the same.
        assert!(!third.lets_begin() && first.somebody_begins());
        assert!(!first.changes(true), "nothing can go on before an operation has ended");
        second.end_turn(0);
        assert!(first.changes(true), "the first may begin");
        assert!(first.lets_begin() && third.lets_begin());
        assert!(!second.somebody_begins());
        assert!(second.changes(true), "the others may take more now, and nobody else wakes them");
        assert!(!second.changes(false));
    }

    #[test]
    fn who_begins_later_or_has_left_keeps_nobody() {
        let [first, second] = &Company::of(2)[..] else { unreachable!("two were asked for") };
        second.end_turn(1);
        assert!(!first.lets_begin() && second.somebody_begins());
        first.begins_later();
        assert!(!second.somebody_begins());
        assert!(!first.lets_begin() && second.somebody_begins());
        // Its next turn says it once more, or not.
        first.begin_turn();
        assert!(!second.somebody_begins());
        // What was left behind under way nobody brings to its end.
        second.leave();
        assert!(first.lets_begin());
    }
}
