//! The thread of a door: who comes, who is let in, what is passed on.

use crate::callers::{Callers, process_of};
use crate::message::{Closing, GOODBYE, Message, Wait};
use crate::notes::{FoundDoor, FoundGuest, Notes, is_disk_name};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;
use supervision::Shelf;

/// The way to a worker.
pub trait Admission: Send {
    /// Gives it its end of a connection, and the number of the VMM's process.
    ///
    /// # Errors
    /// When it is gone, or does not listen.
    fn admit(&self, connection: OwnedFd, pid: i32) -> io::Result<()>;

    /// It lives, perhaps, and cannot be told what a VMM has said: it is to be ended, so that another one is told.
    fn give_up(&self);

    /// Tells it what became of a door that was to be shut.
    fn shut(&self, is_shut: bool);
}

type Admit = Box<dyn Admission>;

/// How long a worker may take to answer what it is told again, each message of it, and to take what it is told.
const PATIENCE: Duration = Duration::from_secs(60);

/// How long it is listened to a worker that has dropped a connection.
const GOODBYE_PATIENCE: Duration = Duration::from_secs(1);
/// How often it is looked whether a VMM may be let in again, where they came and went too fast.
const CLOSED: Duration = Duration::from_secs(1);
/// How long a VMM may take for the rest of a message, all of it, and to take an answer. A front-end says a message with one call, and takes
/// what it is told: one that does not must not keep the door's thread.
const VMM_PATIENCE: Duration = Duration::from_secs(10);

enum Event {
    /// A worker takes connections from now on.
    Worker(Admit),
    /// It has died.
    WorkerGone,
    /// Whoever comes from now on comes there.
    Listener(UnixListener),
    /// It is to be shut, if nobody is inside.
    Shut,
    /// The door is closed.
    Close,
}

/// See the crate. Closed when it is dropped.
pub struct Door {
    events: Mutex<Sender<Event>>,
    closing: Arc<Closing>,
    thread: Option<JoinHandle<()>>,
    shutting: Arc<AtomicU8>,
    notes: Arc<Notes>,
    name: String,
}

/// Nobody wants it shut, or who did is gone.
const OPEN: u8 = 0;
/// It is to be shut, if nobody is inside.
const TO_BE_SHUT: u8 = 1;
/// It is, or will be in a moment, whoever asks.
const SHUT: u8 = 2;

impl Door {
    /// Opens it: `listener` is where the VMM of disk `name` connects. What is to outlive this process is put on `shelf`.
    ///
    /// # Errors
    /// When the name is none, or the kernel has no thread or descriptor for it.
    pub fn open(listener: UnixListener, name: &str, shelf: Shelf) -> io::Result<Self> {
        if !is_disk_name(name) {
            return Err(io::Error::other("no disk is called so"));
        }
        let notes = Notes::new(shelf, name, &listener);
        Self::start(FoundDoor { name: name.to_owned(), listener, guest: None, notes })
    }

    /// Goes on with one that an earlier process left on `shelf`. Nothing if it had got nowhere, or its disk is not the `expected` one.
    ///
    /// # Errors
    /// When the kernel has no thread or descriptor for it.
    pub fn found(shelf: Shelf, expected: impl Fn(&str) -> bool) -> io::Result<Option<Self>> {
        Notes::found(shelf, expected).map(Self::start).transpose()
    }

    fn start(door: FoundDoor) -> io::Result<Self> {
        let FoundDoor { name, listener, guest, notes } = door;
        let notes = Arc::new(notes);
        listener.set_nonblocking(true)?;
        let signal = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let closing = Arc::new(Closing { signal, is_closing: AtomicBool::new(false) });
        let guest = guest.map(|FoundGuest { connection, pid, unanswered }| {
            let (notes, closing) = (Arc::clone(&notes), Arc::clone(&closing));
            Guest { connection, pid, notes, closing, unanswered, worker: None }
        });
        let (events, received) = channel();
        let mut inside = Inside {
            name: name.clone(),
            listener,
            closing: Arc::clone(&closing),
            shutting: Arc::default(),
            events: received,
            admit: None,
            guest,
            notes: Arc::clone(&notes),
        };
        let shutting = Arc::clone(&inside.shutting);
        let thread = std::thread::Builder::new().name(format!("door {name}"));
        let thread = log_context::spawn(thread, move || inside.run())?;
        Ok(Door { events: Mutex::new(events), closing, thread: Some(thread), shutting, notes, name })
    }

    /// Whoever comes from now on comes to `listener`: the place where it listened has no name any more. The VMM that is inside stays. On return
    /// that is noted: another process that finds the door listens there.
    ///
    /// # Errors
    /// When it cannot be listened there.
    pub fn listen_at(&self, listener: UnixListener) -> io::Result<()> {
        listener.set_nonblocking(true)?;
        self.notes.listens_at(&self.name, &listener);
        self.tell(Event::Listener(listener));
        Ok(())
    }

    /// A worker takes connections from now on: it is given those that come and the one that is there.
    pub fn worker(&self, admission: impl Admission + 'static) {
        self.tell(Event::Worker(Box::new(admission)));
    }

    /// The worker has died. Its wish that the door be shut has died with it, unless that is done: what [`Door::is_shut`] says from now on
    /// stays so.
    pub fn worker_gone(&self) {
        let _ = self.shutting.compare_exchange(TO_BE_SHUT, OPEN, Ordering::AcqRel, Ordering::Acquire);
        self.tell(Event::WorkerGone);
    }

    /// Of which disk it is.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The worker has let the driver in. On return that is noted.
    pub fn began(&self) {
        self.notes.began();
        // It may not be where it outlives this process yet.
        let _ = rustix::io::write(&self.closing.signal, &1u64.to_ne_bytes());
    }

    /// It is shut if nobody is inside; the worker is told.
    pub fn shut(&self) {
        let _ = self.shutting.compare_exchange(OPEN, TO_BE_SHUT, Ordering::AcqRel, Ordering::Acquire);
        self.tell(Event::Shut);
    }

    /// Whether it was shut: nobody listens any more.
    pub fn is_shut(&self) -> bool {
        self.shutting.load(Ordering::Acquire) == SHUT
    }

    /// Whether somebody can come: it was not shut, and its thread has not failed.
    pub fn is_open(&self) -> bool {
        !self.is_shut() && self.thread.as_ref().is_some_and(|thread| !thread.is_finished())
    }

    fn tell(&self, event: Event) {
        // The thread may have ended.
        let _ = self.events.lock().expect("no panic under this lock").send(event);
        let _ = rustix::io::write(&self.closing.signal, &1u64.to_ne_bytes());
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        // It may be in the midst of a message.
        self.closing.is_closing.store(true, Ordering::Release);
        self.tell(Event::Close);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        self.notes.close();
    }
}

/// The VMM that is inside.
struct Guest {
    connection: UnixStream,
    pid: i32,
    notes: Arc<Notes>,
    closing: Arc<Closing>,
    /// What has no answer yet.
    unanswered: Option<Arc<Message>>,
    /// The way to the worker, if one has taken it.
    worker: Option<UnixStream>,
}

struct Inside {
    name: String,
    listener: UnixListener,
    closing: Arc<Closing>,
    shutting: Arc<AtomicU8>,
    events: Receiver<Event>,
    admit: Option<Admit>,
    guest: Option<Guest>,
    notes: Arc<Notes>,
}

impl Inside {
    fn let_out(&mut self) {
        // First it is forgotten, then its connection ends.
        self.notes.let_out();
        self.guest = None;
    }

    fn run(&mut self) {
        let mut callers = Callers::new(&self.name);
        loop {
            if !self.take_events() {
                return;
            }
            self.notes.catch_up();
            let is_open = self.guest.is_none() && self.notes.may_let_in();
            if is_open && let Some(connection) = callers.hear() {
                self.let_in(connection, &mut callers);
            }
            let (mut vmm_speaks, mut worker_speaks, mut somebody_comes) = (PollFlags::empty(), false, false);
            {
                let mut list =
                    vec![PollFd::new(&self.closing.signal, PollFlags::IN), PollFd::new(&self.listener, PollFlags::IN)];
                if let Some(guest) = &self.guest {
                    // While something is unanswered, or nobody is there to hear it, it waits. Its end is seen all the same.
                    let listens = guest.worker.is_some() && guest.unanswered.is_none();
                    let wanted = if listens { PollFlags::IN } else { PollFlags::empty() };
                    list.push(PollFd::new(&guest.connection, wanted));
                    list.extend(guest.worker.as_ref().map(|worker| PollFd::new(worker, PollFlags::IN)));
                } else if is_open {
                    list.extend(callers.descriptors().map(|caller| PollFd::from_borrowed_fd(caller, PollFlags::IN)));
                }
                let closed = (self.guest.is_none() && !is_open).then_some(CLOSED);
                let patience = [callers.patience().filter(|_| is_open), closed, self.notes.patience()];
                let patience = patience.into_iter().flatten().min();
                let patience = patience.and_then(|patience| Timespec::try_from(patience).ok());
                match poll(&mut list, patience.as_ref()) {
                    Ok(_) => {}
                    Err(rustix::io::Errno::INTR) => continue,
                    Err(error) => {
                        log::error!("disk {}: waiting at its door failed: {error}", self.name);
                        return;
                    }
                }
                let speaks = |index: usize| list.get(index).is_some_and(|entry| !entry.revents().is_empty());
                if speaks(0) {
                    let _ = rustix::io::read(&self.closing.signal, &mut [0u8; 8]);
                }
                somebody_comes |= speaks(1);
                if self.guest.is_some() {
                    vmm_speaks = list[2].revents();
                    worker_speaks |= speaks(3);
                }
            }
            // First what the worker has said: an answer may be the last thing that it said.
            if worker_speaks {
                self.worker_speaks();
            }
            if !vmm_speaks.is_empty() {
                self.vmm_speaks(vmm_speaks.intersects(PollFlags::HUP | PollFlags::ERR));
            }
            if somebody_comes {
                self.somebody_comes(&mut callers);
            }
        }
    }

    /// False when the door is closed.
    fn take_events(&mut self) -> bool {
        while let Ok(event) = self.events.try_recv() {
            match event {
                Event::Worker(admit) => {
                    self.admit = Some(admit);
                    self.go_on();
                }
                Event::WorkerGone => {
                    self.admit = None;
                    if let Some(guest) = &mut self.guest {
                        guest.worker = None;
                    }
                }
                Event::Listener(listener) => self.listener = listener,
                Event::Shut => {
                    let next = if self.guest.is_none() { SHUT } else { OPEN };
                    // Who wanted it may be gone: then the next worker has this door.
                    let shut = self.shutting.compare_exchange(TO_BE_SHUT, next, Ordering::AcqRel, Ordering::Acquire);
                    let is_shut = shut.is_ok() && next == SHUT;
                    if is_shut {
                        // Before anybody relies on it: a supervisor that comes must not open it again.
                        self.notes.close();
                    }
                    if let Some(admit) = &self.admit {
                        admit.shut(is_shut);
                    }
                    if is_shut {
                        return false;
                    }
                }
                Event::Close => return false,
            }
        }
        true
    }

    fn somebody_comes(&mut self, callers: &mut Callers) {
        match self.listener.accept() {
            Ok((connection, _)) => match &self.guest {
                Some(guest) => {
                    let other = process_of(&connection);
                    log::warn!(
                        "disk {}: process {other} is turned away: process {} has this disk",
                        self.name,
                        guest.pid
                    );
                }
                None => callers.add(connection),
            },
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => {
                log::error!("disk {}: accepting a connection failed: {error}", self.name);
                // Out of descriptors, perhaps: not to be tried without a pause.
                std::thread::sleep(Duration::from_millis(100));
            }
        }
    }

    fn let_in(&mut self, connection: UnixStream, callers: &mut Callers) {
        let pid = process_of(&connection);
        callers.turn_away(pid);
        self.notes.let_in(pid, &connection);
        let (notes, closing) = (Arc::clone(&self.notes), Arc::clone(&self.closing));
        self.guest = Some(Guest { connection, pid, notes, closing, unanswered: None, worker: None });
        self.go_on();
    }

    /// Connects the VMM that is there with the worker that is there.
    fn go_on(&mut self) {
        let (Some(guest), Some(admit)) = (&mut self.guest, &self.admit) else { return };
        match guest.go_on(admit.as_ref()) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                log::warn!("disk {}: the connection of process {} is dropped: {error}", self.name, guest.pid);
                self.let_out();
            }
            // The door is closed: this says nothing of the worker.
            Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
            // It has died again, or does not answer.
            Err(error) => {
                log::warn!("disk {}: the worker could not be told what the VMM had said: {error}", self.name);
                admit.give_up();
            }
        }
    }

    fn vmm_speaks(&mut self, is_gone: bool) {
        let Some(guest) = &mut self.guest else { return };
        if guest.worker.is_none() || guest.unanswered.is_some() {
            // The worker has died since this was asked, or said nothing yet: the message stays where it is until somebody hears it.
            if is_gone {
                self.let_out();
            }
            return;
        }
        // Its end is no word: who is killed here has not been in the midst of one.
        if Message::is_over(&guest.connection) {
            self.let_out();
            return;
        }
        self.notes.begin();
        let heard = Message::read(&guest.connection, &guest.wait(VMM_PATIENCE));
        match heard {
            Ok(Some(message)) if message.is_modest() => {
                guest.pass_on(Arc::new(message));
                self.notes.end();
            }
            Ok(Some(message)) => {
                // They are kept, and there is a bound on what this process can keep for all.
                log::warn!(
                    "disk {}: the connection of process {} is dropped: {} descriptors came with its message {}",
                    self.name,
                    guest.pid,
                    message.descriptors.len(),
                    message.code
                );
                self.let_out();
            }
            Ok(None) => self.let_out(),
            Err(error) => {
                if !matches!(error.kind(), io::ErrorKind::ConnectionReset | io::ErrorKind::ConnectionAborted) {
                    log::warn!("disk {}: the connection of process {} is dropped: {error}", self.name, guest.pid);
                }
                self.let_out();
            }
        }
    }

    fn worker_speaks(&mut self) {
        let Some(guest) = &mut self.guest else { return };
        let Some(worker) = &guest.worker else { return };
        // Without a goodbye: it has died, and the next one is told. That takes nothing off a connection: whoever ends a worker may end
        // this process with it, and the VMM must not be let go for that.
        if Message::is_over(worker) {
            guest.worker = None;
            return;
        }
        self.notes.begin();
        match Message::read(worker, &guest.wait(PATIENCE)) {
            Ok(Some(message)) if message.code == GOODBYE => self.let_out(),
            Ok(Some(answer)) => {
                if let Some(asked) = guest.unanswered.take() {
                    self.notes.note(&asked, Some(&answer));
                    self.notes.set_unanswered(None);
                }
                if answer.write(&guest.connection, false, &guest.wait(VMM_PATIENCE)).is_err() {
                    self.let_out();
                } else {
                    self.notes.end();
                }
            }
            // It has died in the midst of a word, or spoke none: the next one is told.
            Ok(None) | Err(_) => {
                guest.worker = None;
                self.notes.end();
            }
        }
    }
}

impl Guest {
    fn wait(&self, patience: Duration) -> Wait<'_> {
        Wait::new(patience, Some(&self.closing))
    }

    fn pass_on(&mut self, message: Arc<Message>) {
        let Some(worker) = &self.worker else { return };
        // One that does not read is hung, which somebody else looks for, or waits for its storage.
        if message.write(worker, false, &Wait::without_end(&self.closing)).is_err() {
            // It is not lost: the next one is told.
            self.worker = None;
        }
        if message.is_answered() {
            self.notes.set_unanswered(Some(&message));
            self.unanswered = Some(message);
        } else {
            self.notes.note(&message, None);
        }
    }

    fn go_on(&mut self, admit: &dyn Admission) -> io::Result<()> {
        if self.notes.record().is_positionless() {
            let refusal = "it has no in-flight region, so no other worker knows where its rings are";
            return Err(io::Error::new(io::ErrorKind::ConnectionRefused, refusal));
        }
        let (ours, theirs) = UnixStream::pair()?;
        // Whatever the kernel calls it, it says nothing of the VMM.
        admit.admit(theirs.into(), self.pid).map_err(io::Error::other)?;
        match self.tell_again(&ours) {
            Ok(()) => {
                self.worker = Some(ours);
                Ok(())
            }
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused || !self.has_said_goodbye(&ours) => {
                Err(error)
            }
            Err(_) => Err(refusal()),
        }
    }

    fn tell_again(&self, ours: &UnixStream) -> io::Result<()> {
        for message in self.notes.record().told_again() {
            message.write(ours, true, &self.wait(PATIENCE))?;
            if !message.is_question() {
                continue;
            }
            match Message::read(ours, &self.wait(PATIENCE))? {
                Some(answer) if answer.code == GOODBYE => return Err(refusal()),
                Some(_) => {}
                None => return Err(io::ErrorKind::UnexpectedEof.into()),
            }
        }
        if let Some(message) = &self.unanswered {
            message.write(ours, false, &self.wait(PATIENCE))?;
        }
        Ok(())
    }

    /// Whether a worker that does not listen any more has dropped the connection of its own will.
    fn has_said_goodbye(&self, ours: &UnixStream) -> bool {
        let wait = self.wait(GOODBYE_PATIENCE);
        while let Ok(Some(message)) = Message::read(ours, &wait) {
            if message.code == GOODBYE {
                return true;
            }
        }
        false
    }
}

fn refusal() -> io::Error {
    io::Error::new(io::ErrorKind::ConnectionRefused, "the worker does not go on with what the VMM had said")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use supervision::stand_in::StandIn;

    struct Given {
        connections: Mutex<Sender<(UnixStream, i32)>>,
        given_up: Sender<()>,
        shut: Sender<bool>,
    }

    impl Admission for Given {
        fn admit(&self, connection: OwnedFd, pid: i32) -> io::Result<()> {
            let sender = self.connections.lock().expect("no panic under this lock");
            sender.send((UnixStream::from(connection), pid)).map_err(io::Error::other)
        }

        fn give_up(&self) {
            let _ = self.given_up.send(());
        }

        fn shut(&self, is_shut: bool) {
            let _ = self.shut.send(is_shut);
        }
    }

    fn admission() -> (Given, Receiver<(UnixStream, i32)>) {
        let (admission, receiver, _) = worker_that_may_be_given_up();
        (admission, receiver)
    }

    fn worker_that_may_be_given_up() -> (Given, Receiver<(UnixStream, i32)>, Receiver<()>) {
        let (sender, receiver) = channel();
        let (given_up, is_given_up) = channel();
        (Given { connections: Mutex::new(sender), given_up, shut: channel().0 }, receiver, is_given_up)
    }

    /// Of a connection whose other end has just gone older kernels say that it was refused.
    #[test]
    fn a_worker_that_cannot_be_given_the_vmm_is_given_up_and_the_vmm_stays() {
        struct Gone(Sender<()>);
        impl Admission for Gone {
            fn admit(&self, _connection: OwnedFd, _pid: i32) -> io::Result<()> {
                Err(io::ErrorKind::ConnectionRefused.into())
            }

            fn give_up(&self) {
                let _ = self.0.send(());
            }

            fn shut(&self, _is_shut: bool) {}
        }
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("disk.sock");
        let door = Door::open(UnixListener::bind(&path).expect("bound"), "d", Shelf::default()).expect("opened");
        let (given_up, is_given_up) = channel();
        door.worker(Gone(given_up));
        let vmm = UnixStream::connect(&path).expect("connected");
        say(&vmm, 3, &[]);
        comes(&is_given_up);
        door.worker_gone();
        let (admit, workers) = admission();
        door.worker(admit);
        hear(&comes(&workers).0, 3);
    }

    #[test]
    fn a_worker_that_does_not_take_what_was_said_is_given_up_or_drops_the_vmm() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("disk.sock");
        let door = Door::open(UnixListener::bind(&path).expect("bound"), "d", Shelf::default()).expect("opened");
        let vmm = UnixStream::connect(&path).expect("connected");
        // What is told again begins with questions then.
        say(&vmm, 3, &[]);
        say(&vmm, 16, &[0; 8]);
        let (admit, workers) = admission();
        door.worker(admit);
        let (first, _) = comes(&workers);
        hear(&first, 3);
        hear(&first, 16);
        drop(first);
        door.worker_gone();
        // It hears nothing, and is gone.
        let (admit, workers, is_given_up) = worker_that_may_be_given_up();
        door.worker(admit);
        drop(comes(&workers));
        comes(&is_given_up);
        // It drops the connection of its own will.
        let (admit, workers) = admission();
        door.worker(admit);
        let (third, _) = comes(&workers);
        say(&third, GOODBYE, &[]);
        drop(third);
        assert!(ends(&vmm));
    }

    /// A test that waits longer than this has failed.
    const LIMIT: Duration = Duration::from_secs(20);

    fn comes<T>(from: &Receiver<T>) -> T {
        from.recv_timeout(LIMIT).expect("it comes in time")
    }

    fn ends(connection: &UnixStream) -> bool {
        match Message::read(connection, &Wait::new(LIMIT, None)) {
            // Something that it had said was not read any more.
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => true,
            read => read.expect("the end in time").is_none(),
        }
    }

    fn hear(connection: &UnixStream, code: u32) -> Message {
        let message = Message::read(connection, &Wait::new(LIMIT, None)).expect("read").expect("not the end");
        assert_eq!(message.code, code);
        message
    }

    fn say(connection: &UnixStream, code: u32, payload: &[u8]) {
        Message::new(code, payload.to_vec()).write(connection, false, &Wait::new(LIMIT, None)).expect("written");
    }

    /// A VMM asks, a worker dies with the question, the next one is told what was said, and answers.
    #[test]
    fn a_vmm_does_not_notice_that_its_worker_dies() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("disk.sock");
        let door = Door::open(UnixListener::bind(&path).expect("bound"), "d", Shelf::default()).expect("opened");
        let vmm = UnixStream::connect(&path).expect("connected");
        say(&vmm, 1, &[]);
        let (admit, workers) = admission();
        door.worker(admit);
        let (first, pid) = comes(&workers);
        assert_eq!(pid, std::process::id() as i32);
        hear(&first, 1);
        say(&first, 1, &[1; 8]);
        assert_eq!(hear(&vmm, 1).payload, [1; 8]);
        // Has no answer, and is noted.
        say(&vmm, 2, &[2; 8]);
        hear(&first, 2);
        say(&vmm, 17, &[]);
        hear(&first, 17);
        drop(first);
        door.worker_gone();
        let (admit, workers) = admission();
        door.worker(admit);
        let (second, _) = comes(&workers);
        hear(&second, 1);
        say(&second, 1, &[1; 8]);
        assert_eq!(hear(&second, 2).payload, [2; 8]);
        hear(&second, 17);
        say(&second, 17, &[3; 8]);
        assert_eq!(hear(&vmm, 17).payload, [3; 8], "one answer, and only to what was not answered");
        // A second VMM is turned away; the first one keeps its place.
        let mut other = UnixStream::connect(&path).expect("connected");
        assert_eq!(other.read(&mut [0; 1]).expect("the end"), 0);
        say(&vmm, 3, &[]);
        hear(&second, 3);
        // What the worker drops of its own will is dropped.
        say(&second, GOODBYE, &[]);
        assert!(ends(&vmm));
    }

    /// The worker's end is seen in the same moment as what the VMM says next, again and again.
    #[test]
    fn nothing_is_lost_that_is_said_while_a_worker_dies() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("disk.sock");
        let door = Door::open(UnixListener::bind(&path).expect("bound"), "d", Shelf::default()).expect("opened");
        let vmm = UnixStream::connect(&path).expect("connected");
        say(&vmm, 3, &[]);
        for round in 0..200u32 {
            let (admit, workers) = admission();
            door.worker(admit);
            let (worker, _) = comes(&workers);
            hear(&worker, 3);
            // What was noted of an earlier round comes first, if the VMM was not heard meanwhile.
            while round > 0 && hear(&worker, 13).word(4) != round - 1 {}
            drop(worker);
            say(&vmm, 13, &[[0; 4], round.to_ne_bytes()].concat());
            door.worker_gone();
        }
    }

    fn shelf(store: &StandIn) -> Shelf {
        store.open().split("disk")
    }

    fn door_of(store: &StandIn) -> Door {
        Door::found(shelf(store), |name| name == "d").expect("opened").expect("found")
    }

    /// Waits until the door is done with what it was about, and has stored this.
    fn wait_for(store: &StandIn, item: &str) {
        let deadline = std::time::Instant::now() + LIMIT;
        loop {
            let mut shelf = shelf(&store.copy());
            let is_done = shelf.is_whole() && !shelf.is_begun();
            let found = shelf.take_found();
            if is_done && found.contains_key(item) {
                return;
            }
            assert!(std::time::Instant::now() < deadline, "{item} is not stored: {:?}", found.keys());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// The process of the door dies with a question, and once more before anybody has answered: the VMM hears one answer.
    #[test]
    fn a_vmm_does_not_notice_that_the_process_of_its_door_dies() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("disk.sock");
        let store = StandIn::default();
        let door = Door::open(UnixListener::bind(&path).expect("bound"), "d", shelf(&store)).expect("opened");
        let vmm = UnixStream::connect(&path).expect("connected");
        say(&vmm, 31, &[7; 24]);
        let (admit, workers) = admission();
        door.worker(admit);
        let (first, _) = comes(&workers);
        hear(&first, 31);
        say(&first, 31, &[7; 24]);
        hear(&vmm, 31);
        for code in [32, 2, 8] {
            say(&vmm, code, &[0; 24]);
            hear(&first, code);
        }
        say(&vmm, 17, &[]);
        hear(&first, 17);
        wait_for(&store, "unanswered");
        let mut store = store.of_a_dead_process();
        drop((door, first));
        let mut fresh = vec![31];
        for has_begun in [false, true] {
            let door = door_of(&store);
            let (admit, workers) = admission();
            door.worker(admit);
            let (worker, pid) = comes(&workers);
            assert_eq!(pid, std::process::id() as i32);
            for code in [&[1, 2][..], &fresh, &[32, 8, 17]].concat() {
                hear(&worker, code);
                if [1, 31].contains(&code) {
                    say(&worker, code, &[0; 24]);
                }
            }
            if has_begun {
                say(&worker, 17, &[3; 8]);
                assert_eq!(hear(&vmm, 17).payload, [3; 8]);
                say(&vmm, 3, &[]);
                hear(&worker, 3);
                wait_for(&store, "said device 3");
            }
            door.began();
            fresh.clear();
            let next = store.of_a_dead_process();
            drop((door, worker));
            store = next;
        }
        let door = door_of(&store);
        let (admit, workers) = admission();
        door.worker(admit);
        let (worker, _) = comes(&workers);
        for code in [3, 1, 2, 32, 8] {
            hear(&worker, code);
            if code == 1 {
                say(&worker, code, &[0; 24]);
            }
        }
        // What was answered is not asked again: the next that it hears is said after that.
        say(&vmm, 18, &[0; 8]);
        hear(&worker, 18);
        vmm.set_read_timeout(Some(Duration::from_millis(50))).expect("a bound");
        assert!((&vmm).read(&mut [0; 1]).map_or(true, |bytes| bytes == 0), "one answer");
    }

    /// Whoever ends a worker may end the process of the door in the same moment: nothing is begun for that, so that the VMM is not let go.
    #[test]
    fn the_end_of_a_worker_is_no_word() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("disk.sock");
        let store = StandIn::default();
        let door = Door::open(UnixListener::bind(&path).expect("bound"), "d", shelf(&store)).expect("opened");
        let vmm = UnixStream::connect(&path).expect("connected");
        say(&vmm, 3, &[]);
        let (admit, workers) = admission();
        door.worker(admit);
        let (first, _) = comes(&workers);
        hear(&first, 3);
        wait_for(&store, "said device 3");
        let sealed = store.sealed();
        assert_eq!(sealed.len(), 1);
        // Files know their times to a tick of the clock.
        std::thread::sleep(Duration::from_millis(50));
        drop(first);
        // Until it has been seen.
        std::thread::sleep(Duration::from_millis(50));
        door.worker_gone();
        let (admit, workers) = admission();
        door.worker(admit);
        let (second, _) = comes(&workers);
        hear(&second, 3);
        assert_eq!(store.sealed(), sealed, "something was begun");
        // A word is another matter.
        say(&vmm, 18, &[0; 8]);
        hear(&second, 18);
        wait_for(&store, "said ring 0 18");
        assert_ne!(store.sealed(), sealed);
    }

    /// Nobody knows what a VMM has said, or heard, whose door died in the midst of a word.
    #[test]
    fn a_vmm_is_let_go_whose_door_died_in_the_midst_of_a_word() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("disk.sock");
        let store = StandIn::default();
        let door = Door::open(UnixListener::bind(&path).expect("bound"), "d", shelf(&store)).expect("opened");
        let mut vmm = UnixStream::connect(&path).expect("connected");
        say(&vmm, 3, &[]);
        let (admit, workers) = admission();
        door.worker(admit);
        let (first, _) = comes(&workers);
        hear(&first, 3);
        wait_for(&store, "guest");
        let mut found = shelf(&store).take_found();
        let first_half = found.remove("guest").and_then(|mut guest| guest.descriptors.pop()).expect("its connection");
        // Half of one.
        wait_for(&store, "said device 3");
        std::io::Write::write_all(&mut vmm, &[1, 0, 0]).expect("written");
        // Until it has begun to read.
        let mut unread = 3;
        while unread > 0 {
            unread = rustix::io::ioctl_fionread(&first_half).expect("a socket");
            std::thread::sleep(Duration::from_millis(5));
        }
        let store = store.of_a_dead_process();
        let next = door_of(&store);
        // The first one is there still, being no process of its own.
        std::io::Write::write_all(&mut vmm, &[0; 9]).expect("written");
        drop((door, first, first_half));
        let door = next;
        assert!(ends(&vmm));
        // The next one is let in.
        let next = UnixStream::connect(&path).expect("connected");
        say(&next, 3, &[]);
        let (admit, workers) = admission();
        door.worker(admit);
        hear(&comes(&workers).0, 3);
    }

    /// Whoever closes a door waits for its thread.
    fn is_closed_in_time(door: Door) {
        let (closed, is_closed) = channel();
        std::thread::spawn(move || {
            drop(door);
            let _ = closed.send(());
        });
        comes(&is_closed);
    }

    /// It would be waited for more than a minute for each message.
    #[test]
    fn a_vmm_that_says_a_message_byte_by_byte_keeps_nobody_from_closing_its_door() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("disk.sock");
        let store = StandIn::default();
        let door = Door::open(UnixListener::bind(&path).expect("bound"), "d", shelf(&store)).expect("opened");
        let mut vmm = UnixStream::connect(&path).expect("connected");
        say(&vmm, 3, &[]);
        let (admit, workers) = admission();
        door.worker(admit);
        let (worker, _) = comes(&workers);
        hear(&worker, 3);
        wait_for(&store, "guest");
        let mut found = shelf(&store).take_found();
        let other_half = found.remove("guest").and_then(|mut guest| guest.descriptors.pop()).expect("its connection");
        let header: Vec<u8> = [2u32, 1, 4096].iter().flat_map(|word| word.to_ne_bytes()).collect();
        std::io::Write::write_all(&mut vmm, &header).expect("written");
        // Until it has begun to read.
        while rustix::io::ioctl_fionread(&other_half).expect("a socket") > 0 {
            std::thread::sleep(Duration::from_millis(5));
        }
        let (over, is_over) = channel();
        let trickle = std::thread::spawn(move || {
            while is_over.recv_timeout(Duration::from_millis(50)).is_err()
                && std::io::Write::write_all(&mut vmm, &[0]).is_ok()
            {}
        });
        is_closed_in_time(door);
        let _ = over.send(());
        trickle.join().expect("no panic");
    }

    /// A worker is not ended because the door is closed while it is told what the VMM had said.
    #[test]
    fn a_worker_that_says_nothing_keeps_nobody_from_closing_a_door() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("disk.sock");
        let door = Door::open(UnixListener::bind(&path).expect("bound"), "d", Shelf::default()).expect("opened");
        let vmm = UnixStream::connect(&path).expect("connected");
        say(&vmm, 3, &[]);
        say(&vmm, 16, &[0; 8]);
        let (admit, workers) = admission();
        door.worker(admit);
        let (first, _) = comes(&workers);
        hear(&first, 3);
        hear(&first, 16);
        drop(first);
        door.worker_gone();
        let (admit, workers, is_given_up) = worker_that_may_be_given_up();
        door.worker(admit);
        let (second, _) = comes(&workers);
        hear(&second, 3);
        is_closed_in_time(door);
        assert!(is_given_up.try_recv().is_err(), "the worker is ended");
    }

    #[test]
    fn a_vmm_without_an_in_flight_region_is_not_gone_on_with() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("disk.sock");
        let door = Door::open(UnixListener::bind(&path).expect("bound"), "d", Shelf::default()).expect("opened");
        let vmm = UnixStream::connect(&path).expect("connected");
        say(&vmm, 12, &[0; 8]);
        let (admit, workers) = admission();
        door.worker(admit);
        let (first, _) = comes(&workers);
        hear(&first, 12);
        drop(first);
        door.worker_gone();
        door.worker(admission().0);
        assert!(ends(&vmm));
    }

    #[test]
    fn a_door_is_shut_only_behind_the_last() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("disk.sock");
        let door = Door::open(UnixListener::bind(&path).expect("bound"), "d", Shelf::default()).expect("opened");
        let (mut admit, workers) = admission();
        let (shut, is_shut) = channel();
        admit.shut = shut;
        door.worker(admit);
        let vmm = UnixStream::connect(&path).expect("connected");
        say(&vmm, 3, &[]);
        let (worker, _) = workers.recv().expect("a connection");
        hear(&worker, 3);
        door.shut();
        assert!(!is_shut.recv().expect("an answer") && !door.is_shut());
        say(&vmm, 3, &[]);
        hear(&worker, 3);
        drop(vmm);
        assert!(ends(&worker));
        door.shut();
        assert!(is_shut.recv().expect("an answer") && door.is_shut());
        // Its thread lets go of the socket a moment later.
        while UnixStream::connect(&path).is_ok() {}
    }

    /// The worker that wanted it shut has died, and the door's thread hears of both at once: the next worker has the door.
    #[test]
    fn a_wish_to_shut_dies_with_its_worker() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("disk.sock");
        for _ in 0..50 {
            let _ = std::fs::remove_file(&path);
            let door = Door::open(UnixListener::bind(&path).expect("bound"), "d", Shelf::default()).expect("opened");
            door.worker(admission().0);
            door.shut();
            door.worker_gone();
            if door.is_shut() {
                // It was quicker.
                while UnixStream::connect(&path).is_ok() {}
                continue;
            }
            let (admit, workers) = admission();
            door.worker(admit);
            let vmm = UnixStream::connect(&path).expect("connected");
            say(&vmm, 3, &[]);
            hear(&comes(&workers).0, 3);
        }
    }

    #[test]
    fn the_next_vmm_begins_anew() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("disk.sock");
        let door = Door::open(UnixListener::bind(&path).expect("bound"), "d", Shelf::default()).expect("opened");
        let (admit, workers) = admission();
        door.worker(admit);
        for _ in 0..2 {
            let vmm = UnixStream::connect(&path).expect("connected");
            say(&vmm, 3, &[]);
            let (worker, _) = comes(&workers);
            hear(&worker, 3);
            drop(vmm);
            assert!(ends(&worker));
        }
        drop(door);
        let mut late = UnixStream::connect(&path).map_or_else(|_| Vec::new(), |late| vec![late]);
        assert!(late.iter_mut().all(|late| late.read(&mut [0; 1]).is_ok_and(|bytes| bytes == 0)));
    }
}
