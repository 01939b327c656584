//! What a device is made from, who connects to it, and who is told.

use crate::config_space::{QUEUES_MAX, SEGMENTS_MAX, segment_bytes_max};
use crate::entrance::Entrance;
use crate::error::Error;
use crate::gate::Gate;
use crate::image::Image;
use crate::request::ID_BYTES;
use block_route::Identity;
use guest_memory::PageId;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What a device is made from.
#[derive(Clone, Debug)]
pub struct DeviceConfig {
    /// What log lines call it.
    pub name: String,
    /// The Unix socket at which the VMM finds it. Made by [`crate::Device::start`], removed by [`crate::Device::stop`], unless there is an
    /// `entrance`.
    pub socket: PathBuf,
    /// Where connections come from, if somebody else listens at the socket and keeps them.
    pub entrance: Option<Arc<Entrance>>,
    /// Kept open by the disk engine for as long as an operation of it may be under way in the kernel, also after the death of
    /// this process: whoever has the other end of this pipe then sees its end. Where the image says that by itself
    /// ([`Image::tells_its_end`]) it is not given to the kernel, and its end is that of this process.
    pub under_way: Option<Arc<OwnedFd>>,
    /// The image, open and locked.
    pub image: Arc<Image>,
    /// Serial number, at most 20 bytes, and whether writes are refused (the image must then be open read-only).
    pub identity: Identity,
    /// The most queues a VMM can use, up to [`QUEUES_MAX`]. More than it uses cost nothing.
    pub queues: u16,
    /// Data segments of one request, up to [`SEGMENTS_MAX`]; at most the VMM's queue size less two.
    pub segments_max: u32,
    /// Whether the guest is told of a write cache, and so flushes. Where it is not, every change is flushed for it before it
    /// is answered ([`block_route::Route::flush_after`]), which costs nothing where nothing has to be.
    pub write_cache: bool,
    /// Where a VMM is told that it can have its guest moved elsewhere while it runs, who knows whether a guest may use the disk. What is
    /// written to guest memory is then marked in the VMM's log, and a ring is never given back with requests in flight.
    pub gate: Option<Arc<dyn Gate>>,
    /// How long stopping waits for requests that storage does not answer. A VMM that wants its rings back waits until it has, and after
    /// this time that is said ([`Observer::stands_still`]).
    pub drain_timeout: Duration,
    /// How much longer stopping waits for the device's own threads, which no storage holds up.
    pub stop_margin: Duration,
    /// Up to how long the worker polls before it sleeps, while that pays; zero: never.
    pub polling_max: Duration,
    /// What the device's threads may still ask the kernel for, once they are made; `None`: anything.
    pub sandbox: Option<sandbox::Sandbox>,
    /// Bounds on what the guest may ask for, perhaps shared with other disks.
    pub throttle: Option<throttle::Throttle>,
    /// A modelled disk whose time this one takes; flushes then go to it, not to the image's storage: for experiments.
    pub model: Option<Arc<disk_model_client::Client>>,
}

impl DeviceConfig {
    /// The usual: as many queues as can be, segments for QEMU's default queue size of 128.
    pub fn new(name: impl Into<String>, socket: impl Into<PathBuf>, image: Arc<Image>) -> Self {
        let name = name.into();
        let serial = name.chars().filter(char::is_ascii_graphic).take(ID_BYTES).collect();
        let read_only = image.read_only();
        DeviceConfig {
            name,
            socket: socket.into(),
            entrance: None,
            under_way: None,
            image,
            identity: Identity { serial, read_only },
            queues: QUEUES_MAX,
            segments_max: 126,
            write_cache: true,
            gate: None,
            drain_timeout: Duration::from_secs(30),
            stop_margin: Duration::from_secs(2),
            polling_max: Duration::from_micros(32),
            sandbox: None,
            throttle: None,
            model: None,
        }
    }

    pub(crate) fn check(&self) -> Result<(), Error> {
        let refuse = |reason: String| Err(Error::Config { name: self.name.clone(), reason });
        if self.queues == 0 || self.queues > QUEUES_MAX {
            return refuse(format!("it can have 1 to {QUEUES_MAX} queues, not {}", self.queues));
        }
        if self.segments_max == 0 || self.segments_max > SEGMENTS_MAX || segment_bytes_max(self.segments_max) == 0 {
            return refuse(format!("it can have 1 to {SEGMENTS_MAX} segments, not {}", self.segments_max));
        }
        if self.identity.serial.len() > ID_BYTES {
            return refuse(format!(
                "its serial number {:?} is longer than {ID_BYTES} bytes; shorten it",
                self.identity.serial
            ));
        }
        if self.identity.read_only != self.image.read_only() {
            return refuse("a read-only disk needs an image opened read-only, and the other way round".to_owned());
        }
        Ok(())
    }
}

/// Who is connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Process id of the VMM, from the socket (SO_PEERCRED): cannot be forged. 0 when it is in another pid namespace.
    pub pid: i32,
}

/// What the owner of a device wants to be told. Calls come from the device's threads and must not wait for the device
/// ([`crate::DeviceHandle::with_route`] in one of them would wait for ever).
pub trait Observer: Send + Sync {
    /// A VMM has connected, and has said its first word; none of its messages has been looked at. Memory it names comes after
    /// this returns.
    ///
    /// # Errors
    /// Why it is turned away: the connection is dropped, and nothing else of it is told.
    fn connected(&self, _peer: Peer) -> Result<(), String> {
        Ok(())
    }

    /// The guest pages of all rings that are started now, sorted, each once: they must never be protected, because they
    /// are written here without asking. Told before a ring is written to for the first time.
    fn ring_pages(&self, _pages: &[PageId]) {}

    /// Whether another process could go on with the rings that are started now, were this one to die.
    fn can_be_followed(&self, _can: bool) {}

    /// The route has let the driver in ([`block_route::Route::started`]): what began the device anew is done with.
    fn began(&self) {}

    /// The VMM stands still since then: it wants its rings back, and storage has not answered what has its guest's memory. With nothing: it
    /// goes on.
    fn stands_still(&self, _since: Option<Instant>) {}

    /// Something of the guest's is wrong, as a sentence: worth to be kept beside the log. May be told again and again.
    fn fault(&self, _sentence: &str) {}

    /// The connection has ended; no request is in flight any more, and the route has been told ([`block_route::Route::stopped`]).
    fn disconnected(&self, _peer: Peer) {}
}

/// Nobody wants to be told.
impl Observer for () {}
