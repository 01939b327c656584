//! One thread for several devices: their workers take turns, and it sleeps for all of them at once.
//!
//! Each worker is as it is in a thread of its own, with an io_uring of its own, and knows nothing of the others; the thread sleeps at an event
//! descriptor that all the io_urings signal. A turn is bounded, and whatever a worker waits for beyond it (storage, its throttle, a gate, what
//! another disk has under way as its route starts) it waits for between turns. Must never: sleep while a worker has something to do, or
//! keep from the kernel what one has for it because another is busy. Failure story: a worker that ends does so alone; one whose route blocks
//! in a call has all disks of its thread wait for that call.

use crate::counters::Counters;
use crate::engine::Engine;
use crate::error::Error;
use crate::event::event_descriptor;
use crate::worker::{MailboxReceiver, Worker, WorkerParts};
use block_route::Route;
use log_context::{Context, Entered};
use rustix::event::{PollFd, PollFlags, Timespec};
use sandbox::{Role, Sandbox};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::time::{Duration, Instant};

/// What one of the thread's devices is made of, and who is to be told of it.
pub(crate) struct Served<R: Route + ?Sized> {
    pub(crate) parts: WorkerParts<R>,
    pub(crate) model: Option<Arc<disk_model_client::Client>>,
    pub(crate) under_way: Option<Arc<OwnedFd>>,
    pub(crate) mailbox: MailboxReceiver<R>,
    /// Whether the kernel gives it what it needs.
    pub(crate) ready: SyncSender<Result<(), Error>>,
    /// Its route, and how many operations storage has not answered.
    pub(crate) has_ended: SyncSender<(Box<R>, usize)>,
}

/// Serves devices in the calling thread until all of them have been told to quit.
pub(crate) fn serve<R: Route + ?Sized>(served: Vec<Served<R>>, sandbox: Option<Sandbox>) {
    // Engines belong to the thread that makes them.
    let Some((mut members, event)) = members(served, sandbox) else { return };
    let Some(event) = event else {
        for Member { worker, has_ended, .. } in members {
            let _ = has_ended.send(worker.run());
        }
        return;
    };
    members.iter_mut().for_each(|member| member.worker.begin());
    loop {
        let (mut has_more, mut behind_last) = (false, 0);
        for (index, member) in members.iter_mut().enumerate() {
            let _entered = member.enter();
            has_more |= member.worker.turn();
            // Nobody else hands it over, where another worker is never at rest.
            member.worker.engine().enter(false, None);
            behind_last = if member.worker.has_taken() { index + 1 } else { behind_last };
        }
        // Those that share a throttle take of it by turns: who took last is the last to be looked at.
        members.rotate_left(behind_last);
        for Member { worker, context, has_ended } in members.extract_if(.., |member| member.worker.ended()) {
            let _entered = log_context::enter(context);
            let _ = has_ended.send(worker.end());
        }
        if members.is_empty() {
            return;
        }
        if !has_more {
            rest(&mut members, &event);
        }
    }
}

/// A worker of a thread that has several.
struct Member<R: Route + ?Sized> {
    worker: Worker<R>,
    /// Which disk the lines are about that it logs.
    context: Context,
    has_ended: SyncSender<(Box<R>, usize)>,
}

impl<R: Route + ?Sized> Member<R> {
    fn enter(&self) -> Entered {
        log_context::enter(self.context.clone())
    }

    fn has_more(&mut self) -> bool {
        let _entered = self.enter();
        self.worker.more_to_do()
    }
}

/// The workers of this thread, and, where they are several, what is signalled when one has something to do. Nothing where one cannot be: all
/// have been told.
fn members<R: Route + ?Sized>(
    served: Vec<Served<R>>,
    sandbox: Option<Sandbox>,
) -> Option<(Vec<Member<R>>, Option<OwnedFd>)> {
    let engine = |served: &Served<R>, event: Option<&OwnedFd>| {
        let Served { parts, model, under_way, .. } = served;
        let counters: Arc<Counters> = Arc::clone(&parts.counters);
        let signal = event.map(|event| event.as_fd());
        Engine::new(Arc::clone(&parts.image), counters, model.clone(), under_way.as_deref(), signal)
    };
    let event = (served.len() > 1).then(event_descriptor).transpose();
    let made = event.and_then(|event| {
        let engines: Result<Vec<Engine>, Error> = served.iter().map(|served| engine(served, event.as_ref())).collect();
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
    let members = served.into_iter().zip(engines).map(|(served, engine)| {
        let Served { parts, mailbox, ready, has_ended, .. } = served;
        let context = Context::current().with_disk(&parts.name);
        let _ = ready.send(Ok(()));
        Member { worker: Worker::new(parts, engine, mailbox), context, has_ended }
    });
    Some((members.collect(), event))
}

/// Nobody has anything to do: polls for a moment if that has paid lately for one of them, then sleeps.
fn rest<R: Route + ?Sized>(members: &mut [Member<R>], event: &OwnedFd) {
    let idle_since = Instant::now();
    // As a worker that is alone: only guests are polled for.
    let times: Option<Vec<Duration>> = members.iter().map(|member| member.worker.polls_for(idle_since)).collect();
    let polled = times.as_ref().and_then(|times| times.iter().max().copied()).unwrap_or_default();
    while !polled.is_zero() && idle_since.elapsed() <= polled {
        if members.iter_mut().any(Member::has_more) {
            return;
        }
        std::hint::spin_loop();
    }
    let mut timeout: Option<Duration> = None;
    for member in &mut *members {
        let _entered = member.enter();
        let Some(own) = member.worker.may_sleep(idle_since) else { return };
        timeout = [timeout, own].into_iter().flatten().min();
    }
    // What is signalled from here on is seen below; what was before is looked for after this.
    let _ = rustix::io::read(event, &mut [0u8; 8]);
    if members.iter_mut().any(|member| member.worker.engine().has_completions()) {
        return;
    }
    sleep(event, timeout);
    if times.is_some() {
        let time = idle_since.elapsed();
        members.iter_mut().for_each(|member| member.worker.has_waited(time));
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
