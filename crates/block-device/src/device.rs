//! A disk behind a Unix socket, as its owner sees it: start, ask, stop.

use crate::config::{DeviceConfig, Observer};
use crate::control::Control;
use crate::counters::{Counters, CountersSnapshot};
use crate::error::Error;
use crate::image::Image;
use crate::request::ID_BYTES;
use crate::session::BackendChannel;
use crate::together::{self, Served};
use crate::worker::{Mailbox, Worker, WorkerParts, mailbox};
use block_route::{Plan, Route};
use guest_memory::VmMemory;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A running device. Dropping it stops it.
pub struct Device<R: Route + ?Sized + 'static> {
    handle: DeviceHandle<R>,
    /// How long stopping waits for each of its threads.
    stop_patience: Duration,
    threads: Option<Threads<R>>,
}

/// A device of which it is not known yet whether the kernel gives it what it needs. Dropping it ends it.
pub struct Starting<R: Route + ?Sized + 'static> {
    /// Before the device, which ends when nobody can open it any more.
    open: SyncSender<()>,
    is_ready: Receiver<Result<(), Error>>,
    device: Device<R>,
}

impl<R: Route + ?Sized + 'static> Starting<R> {
    /// Waits until it has what it needs, and lets its VMM in.
    ///
    /// # Errors
    /// An io_uring that the kernel refuses.
    pub fn finish(self) -> Result<Device<R>, Error> {
        let Starting { open, is_ready, mut device } = self;
        let outcome = is_ready.recv().unwrap_or_else(|_| Err(Error::Stopped { name: device.handle.name.to_string() }));
        if let Err(error) = outcome {
            drop(open);
            // There is no worker that could be told to end: both threads do.
            if let Some(threads) = device.threads.take() {
                let _ = threads.control_thread.join();
                join_last(threads.worker_thread);
            }
            return Err(error);
        }
        let _ = open.send(());
        Ok(device)
    }
}

struct Threads<R: ?Sized> {
    control: Arc<Control>,
    control_thread: JoinHandle<()>,
    control_ended: Receiver<()>,
    /// That of other devices, too, where they are [together](Device::begin_together).
    worker_thread: Arc<JoinHandle<()>>,
    ended: Receiver<(Box<R>, usize)>,
}

/// Waits for the end of a thread, if nobody else has anything to do with it.
fn join_last(thread: Arc<JoinHandle<()>>) {
    if let Some(thread) = Arc::into_inner(thread) {
        let _ = thread.join();
    }
}

/// What a device begins with, beside its guest's memory ([`Device::begin_together`]).
pub struct DeviceParts<R: Route + ?Sized + 'static> {
    /// What it is made from.
    pub config: DeviceConfig,
    /// Where its requests go.
    pub route: Box<R>,
    /// Who is told.
    pub observer: Arc<dyn Observer>,
}

/// Asks a device things, from any thread.
pub struct DeviceHandle<R: Route + ?Sized + 'static> {
    name: Arc<str>,
    mailbox: Mailbox<R>,
    image: Arc<Image>,
    counters: Arc<Counters>,
    channel: Arc<Mutex<Option<BackendChannel>>>,
}

impl<R: Route + ?Sized + 'static> Clone for DeviceHandle<R> {
    fn clone(&self) -> Self {
        DeviceHandle {
            name: Arc::clone(&self.name),
            mailbox: self.mailbox.clone(),
            image: Arc::clone(&self.image),
            counters: Arc::clone(&self.counters),
            channel: Arc::clone(&self.channel),
        }
    }
}

impl<R: Route + ?Sized + 'static> DeviceHandle<R> {
    /// Runs `job` on the route, in the worker thread between two passes, and returns what it returns. What it plans is
    /// carried out.
    ///
    /// # Errors
    /// [`Error::Stopped`] when the device has been stopped.
    pub fn with_route<T: Send + 'static>(
        &self,
        job: impl FnOnce(&mut R, &mut Plan) -> T + Send + 'static,
    ) -> Result<T, Error> {
        self.mailbox
            .ask(|worker| job(&mut worker.route, &mut worker.plan))
            .ok_or_else(|| Error::Stopped { name: self.name.to_string() })
    }

    /// Like [`DeviceHandle::with_route`], without waiting. Returns whether the device still runs.
    pub fn post_to_route(&self, job: impl FnOnce(&mut R, &mut Plan) + Send + 'static) -> bool {
        self.mailbox.post(Box::new(|worker| job(&mut worker.route, &mut worker.plan)))
    }

    /// Reads the image's size again and tells the guest. Returns the size in bytes.
    ///
    /// # Errors
    /// When the size cannot be read. A VMM that cannot be told (or is not there) learns it when it next asks.
    pub fn resize(&self) -> Result<u64, Error> {
        let size_bytes = self.image.measure()?;
        let channel = self.channel.lock().expect("no panic under this lock");
        if let Some(channel) = channel.as_ref()
            && let Err(error) = channel.config_changed()
        {
            log::warn!("disk {}: telling the VMM of the new size failed: {error}", self.name);
        }
        Ok(size_bytes)
    }

    /// Bounds what the guest may ask for from now on; nothing with none.
    ///
    /// # Errors
    /// [`Error::Stopped`] when the device has been stopped.
    pub fn set_throttle(&self, throttle: Option<throttle::Throttle>) -> Result<(), Error> {
        let set = self.mailbox.ask(|worker| worker.set_throttle(throttle));
        set.ok_or_else(|| Error::Stopped { name: self.name.to_string() })
    }

    /// Takes nothing from the rings until then, or again from now on: the guest waits. What was taken goes on. Says whether nothing
    /// was taken until now because of this.
    ///
    /// # Errors
    /// [`Error::Stopped`] when the device has been stopped.
    pub fn hold(&self, until: Option<Instant>) -> Result<bool, Error> {
        self.mailbox.ask(move |worker| worker.hold(until)).ok_or_else(|| Error::Stopped { name: self.name.to_string() })
    }

    /// Whether nothing is taken from the rings at this moment ([`Self::hold`]).
    ///
    /// # Errors
    /// [`Error::Stopped`] when the device has been stopped.
    pub fn is_held(&self) -> Result<bool, Error> {
        self.mailbox.ask(|worker| worker.is_held()).ok_or_else(|| Error::Stopped { name: self.name.to_string() })
    }

    /// Whether all that was taken from the rings is answered, and nothing is under way on storage.
    ///
    /// # Errors
    /// [`Error::Stopped`] when the device has been stopped.
    pub fn is_idle(&self) -> Result<bool, Error> {
        self.mailbox.ask(|worker| worker.is_idle()).ok_or_else(|| Error::Stopped { name: self.name.to_string() })
    }

    /// What it has counted.
    pub fn counters(&self) -> CountersSnapshot {
        self.counters.snapshot()
    }

    /// How long things took: the guest's requests (`read`, `write`, `flush`, `discard`, and of the writes those that `commit`) from the
    /// ring to the answer, and the disk engine's (`storage_read`, `storage_write`, `storage_flush`) in the kernel.
    pub fn latencies(&self) -> Vec<(&'static str, latency::Snapshot)> {
        self.counters.latencies.snapshot()
    }

    /// The image behind it.
    pub fn image(&self) -> &Arc<Image> {
        &self.image
    }
}

impl<R: Route + ?Sized + 'static> Device<R> {
    /// Makes the socket and waits, in threads of its own, for a VMM. `memory` is that of the VM which will connect.
    ///
    /// # Errors
    /// A configuration that cannot be, a socket that is in use, an io_uring that the kernel refuses.
    pub fn start(
        config: DeviceConfig,
        route: Box<R>,
        memory: Arc<VmMemory>,
        observer: Arc<dyn Observer>,
    ) -> Result<Self, Error> {
        Self::begin(config, route, memory, observer)?.finish()
    }

    /// The first half of [`Device::start`]: its threads are started, and nobody is let in. Who has several devices has all of them begin
    /// before the first one is waited for.
    ///
    /// # Errors
    /// A configuration that cannot be, a socket that is in use, a thread that the kernel refuses.
    pub fn begin(
        config: DeviceConfig,
        route: Box<R>,
        memory: Arc<VmMemory>,
        observer: Arc<dyn Observer>,
    ) -> Result<Starting<R>, Error> {
        let mut begun = Self::begin_together(vec![DeviceParts { config, route, observer }], memory)?;
        Ok(begun.pop().expect("one was asked for"))
    }

    /// As [`Device::begin`], for devices of one VM that one thread is to serve together: one that uses several of them wakes up one thread,
    /// and no two of them are worked for at once. What a route waits for in a call, all of them wait for: in [`Route::started`] it must not be
    /// what another of them has under way ([`Route::waits_for_others`]).
    ///
    /// # Errors
    /// As [`Device::begin`]. If the kernel refuses one of them what it needs, none can be finished.
    pub fn begin_together(beginnings: Vec<DeviceParts<R>>, memory: Arc<VmMemory>) -> Result<Vec<Starting<R>>, Error> {
        let mut served = Vec::new();
        let mut others = Vec::new();
        for DeviceParts { config, route, observer } in beginnings {
            config.check()?;
            let counters = Arc::new(Counters::default());
            let (mailbox, receiver) = mailbox()?;
            let control = Arc::new(Control::new(&config.socket, config.entrance.as_ref())?);
            let mut identity = [0; ID_BYTES];
            identity[..config.identity.serial.len()].copy_from_slice(config.identity.serial.as_bytes());
            let parts = WorkerParts {
                name: config.name.clone(),
                image: Arc::clone(&config.image),
                route,
                observer: Arc::clone(&observer),
                counters: Arc::clone(&counters),
                identity,
                queues: config.queues,
                drain_timeout: config.drain_timeout,
                polling_max: config.polling_max,
                write_cache: config.write_cache,
                gate: config.gate.clone(),
                throttle: config.throttle.clone(),
            };
            let (ready, is_ready) = sync_channel(1);
            let (has_ended, ended) = sync_channel(1);
            let (model, under_way) = (config.model.clone(), config.under_way.clone());
            served.push(Served { parts, model, under_way, mailbox: receiver, ready, has_ended });
            others.push((config, observer, counters, mailbox, control, is_ready, ended));
        }
        // What a thread may ask for is the same for all disks of a VM.
        let sandbox = others.first().and_then(|(config, ..)| config.sandbox.clone());
        let spawn_failed = |name: &str, e| Error::system(format!("starting a thread for disk {name}"), e);
        let worker_thread = match &others[..] {
            [(config, ..)] => {
                let context = log_context::Context::current().with_disk(&config.name);
                let _entered = log_context::enter(context);
                let thread = std::thread::Builder::new().name(format!("disk {}", config.name));
                log_context::spawn(thread, move || together::serve(served, sandbox))
            }
            // Each of its lines says of itself which disk it is about.
            _ => log_context::spawn(std::thread::Builder::new().name("disks".to_owned()), move || {
                together::serve(served, sandbox);
            }),
        };
        let name = others.first().map(|(config, ..)| config.name.clone()).unwrap_or_default();
        let worker_thread = Arc::new(worker_thread.map_err(|error| spawn_failed(&name, error))?);

        let mut begun = Vec::new();
        let mailboxes: Vec<_> = others.iter().map(|(_, _, _, mailbox, ..)| mailbox.clone()).collect();
        for (config, observer, counters, mailbox, control, is_ready, worker_ended) in others {
            let DeviceConfig { name, image, drain_timeout, stop_margin, .. } = config.clone();
            let stop_patience = drain_timeout + stop_margin;
            let channel = Arc::new(Mutex::new(None));
            let _entered = log_context::enter(log_context::Context::current().with_disk(&name));
            let (ended, control_ended) = sync_channel(1);
            let (open, is_open) = sync_channel(1);
            let control_thread = {
                let (control, mailbox, channel) = (Arc::clone(&control), mailbox.clone(), Arc::clone(&channel));
                let memory = Arc::clone(&memory);
                log_context::spawn(std::thread::Builder::new().name(format!("vhost {name}")), move || {
                    if let Some(sandbox) = &config.sandbox {
                        sandbox.enter(sandbox::Role::Vmm);
                    }
                    if is_open.recv().is_ok() {
                        control.run(&config, &mailbox, &memory, &observer, &channel);
                    }
                    let _ = ended.send(());
                })
            };
            let control_thread = match control_thread {
                Ok(thread) => thread,
                Err(error) => {
                    // Those that are made already end when they are dropped here.
                    for mailbox in &mailboxes {
                        mailbox.post(Box::new(Worker::quit));
                    }
                    return Err(spawn_failed(&name, error));
                }
            };
            let handle = DeviceHandle { name: name.into(), mailbox, image, counters, channel };
            let worker_thread = Arc::clone(&worker_thread);
            let threads = Threads { control, control_thread, control_ended, worker_thread, ended: worker_ended };
            begun.push(Starting { device: Device { handle, stop_patience, threads: Some(threads) }, is_ready, open });
        }
        Ok(begun)
    }

    /// For asking it things from elsewhere.
    pub fn handle(&self) -> DeviceHandle<R> {
        self.handle.clone()
    }

    /// Lets what is in flight end, drops the connection, and gives the route back. [`Route::stopped`] has been called
    /// if [`Route::started`] was. Takes at most twice [`DeviceConfig::drain_timeout`] with [`DeviceConfig::stop_margin`].
    ///
    /// # Errors
    /// [`Error::StopTimedOut`] when the route or the observer hangs in a call; the threads are then left behind, and end when that
    /// returns. [`Error::Unanswered`] when storage has not answered. After either, operations may be under way, or be begun, that
    /// were asked for before: nothing may be written to the image, nor guest memory be used for anything else, while this
    /// process lives.
    pub fn stop(mut self) -> Result<Box<R>, Error> {
        self.shut_down()
    }

    fn shut_down(&mut self) -> Result<Box<R>, Error> {
        let name = self.handle.name.to_string();
        let Some(threads) = self.threads.take() else { return Err(Error::Stopped { name }) };
        let begun = Instant::now();
        let patience = self.stop_patience;
        let timed_out = |_: RecvTimeoutError| Error::StopTimedOut { name: name.clone(), waited: begun.elapsed() };
        threads.control.stop();
        let control_ended = threads.control_ended.recv_timeout(patience);
        // Whatever it hangs in, it does not go on after that.
        self.handle.mailbox.post(Box::new(Worker::quit));
        control_ended.map_err(timed_out)?;
        let (route, operations) = threads.ended.recv_timeout(patience).map_err(timed_out)?;
        let _ = threads.control_thread.join();
        if operations > 0 {
            // Its thread is not waited for: where one of the kernel's asks storage in its stead, it does not end before that has the answer.
            return Err(Error::Unanswered { name, operations, waited: begun.elapsed() });
        }
        join_last(threads.worker_thread);
        Ok(route)
    }
}

impl<R: Route + ?Sized + 'static> Drop for Device<R> {
    fn drop(&mut self) {
        if self.threads.is_some()
            && let Err(error) = self.shut_down()
        {
            log::error!("{error}");
        }
    }
}
