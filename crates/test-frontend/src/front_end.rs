//! The connection: what a VMM says to a vhost-user device.

use crate::Result;
use crate::queue::{DriverQueue, QueueOptions};
use crate::ram::GuestRam;
use rustix::fs::{MemfdFlags, SealFlags};
use std::fs::File;
use std::io::Read;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use vhost::vhost_user::message::{
    VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserInflight, VhostUserProtocolFeatures,
};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserDirtyLogRegion, VringConfigData};
use vm_memory::{FileOffset, MmapRegion, VolatileMemory};

/// Nothing takes longer than this, or the test has failed.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(20);

/// VHOST_F_LOG_ALL.
const LOG_ALL: u64 = 1 << 26;
/// VHOST_VRING_F_LOG.
const RING_LOG: u32 = 1;
/// Descriptors of each queue that an in-flight region is asked for.
const INFLIGHT_QUEUE_SIZE: u16 = 128;
const EVENT_INDEX: u64 = 1 << 29;
const PROTOCOL_FEATURES: u64 = 1 << 30;

/// What to ask for.
#[derive(Clone, Debug)]
pub struct FrontEndOptions {
    /// Number of queues.
    pub queues: u16,
    /// Descriptors of each.
    pub queue_size: u16,
    /// Feature bits not to acknowledge though they are offered.
    pub features_refused: u64,
    /// Use the in-flight region, if it is offered.
    pub inflight: bool,
    /// The in-flight region has no more than it was asked for, as one of amberlog 0.1.
    pub narrow_inflight: bool,
    /// Add memory region by region instead of as a table.
    pub memory_slots: bool,
    /// Ask for an answer to each message, as soon as that may be asked for: QEMU does for most of them.
    pub need_reply: bool,
}

impl Default for FrontEndOptions {
    fn default() -> Self {
        FrontEndOptions {
            queues: 1,
            queue_size: 128,
            features_refused: 0,
            inflight: true,
            narrow_inflight: false,
            memory_slots: false,
            need_reply: false,
        }
    }
}

/// An in-flight region as the VMM keeps it.
pub struct Inflight {
    /// What the device said of it.
    pub description: VhostUserInflight,
    /// The memory file.
    pub file: File,
}

/// Where the device marks the pages that it writes, as a VMM has it that moves its guest.
#[derive(Debug)]
pub struct PageLog {
    file: File,
    memory: MmapRegion,
    bytes: usize,
}

impl PageLog {
    fn new(pages: u64) -> Result<Arc<Self>> {
        let bytes = pages.div_ceil(64).max(1) * 8;
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = File::from(rustix::fs::memfd_create("page-log", flags)?);
        file.set_len(bytes)?;
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW)?;
        let bytes = usize::try_from(bytes)?;
        let memory = MmapRegion::from_file(FileOffset::new(file.try_clone()?, 0), bytes)?;
        Ok(Arc::new(PageLog { file, memory, bytes }))
    }

    /// Takes the marks off: the numbers of the pages that had one.
    ///
    /// # Panics
    /// Never: the log has as many bytes as it says.
    pub fn take(&self) -> Vec<u64> {
        let mut pages = Vec::new();
        for at in 0..self.bytes / 8 {
            let word: &AtomicU64 = self.memory.get_atomic_ref(at * 8).expect("inside the log");
            let mut marks = if word.load(Ordering::Relaxed) == 0 { 0 } else { word.swap(0, Ordering::SeqCst) };
            while marks != 0 {
                pages.push(at as u64 * 64 + u64::from(marks.trailing_zeros()));
                marks &= marks - 1;
            }
        }
        pages
    }
}

/// A connection to a device, with the rings of the guest.
pub struct FrontEnd {
    /// For messages that have no method here.
    pub messages: Frontend,
    path: PathBuf,
    options: FrontEndOptions,
    /// Guest memory.
    pub ram: GuestRam,
    /// The rings.
    pub queues: Vec<DriverQueue>,
    /// The features in use.
    pub features: u64,
    inflight: Option<Inflight>,
    /// The used indices when the loss of the connection was noticed.
    used_at_loss: Option<Vec<u16>>,
    channel: Option<UnixStream>,
    log: Option<Arc<PageLog>>,
    /// The device on this connection knows the regions of memory.
    has_said_regions: bool,
}

fn connect(path: &Path, queues: u16) -> Result<Frontend> {
    let deadline = Instant::now() + ANSWER_TIMEOUT;
    loop {
        match UnixStream::connect(path) {
            Ok(stream) => return Ok(Frontend::from_stream(stream, u64::from(queues))),
            Err(error) if Instant::now() > deadline => {
                return Err(format!("connecting to {} failed: {error}", path.display()).into());
            }
            Err(_) => std::thread::sleep(Duration::from_millis(10)),
        }
    }
}

impl FrontEnd {
    /// Whether each message is answered, where the device can do that.
    pub fn asks_for_answers(&self) -> bool {
        self.options.need_reply
    }

    /// Connects and agrees on features; nothing runs yet.
    ///
    /// # Errors
    /// When the device cannot be reached or breaks the protocol.
    pub fn connect(path: &Path, ram: GuestRam, options: FrontEndOptions) -> Result<Self> {
        let messages = connect(path, options.queues)?;
        let mut front_end = FrontEnd {
            messages,
            path: path.to_owned(),
            options,
            ram,
            queues: Vec::new(),
            features: 0,
            inflight: None,
            used_at_loss: None,
            channel: None,
            log: None,
            has_said_regions: false,
        };
        front_end.handshake()?;
        let queue =
            QueueOptions { size: front_end.options.queue_size, event_index: front_end.features & EVENT_INDEX != 0 };
        for _ in 0..front_end.options.queues {
            front_end.queues.push(DriverQueue::new(&front_end.ram, queue)?);
        }
        Ok(front_end)
    }

    fn handshake(&mut self) -> Result<()> {
        self.has_said_regions = false;
        let offered = self.messages.get_features()?;
        self.features = offered & !self.options.features_refused & !LOG_ALL;
        if offered & PROTOCOL_FEATURES != 0 {
            let offered = self.messages.get_protocol_features()?;
            let wanted = VhostUserProtocolFeatures::CONFIG
                | VhostUserProtocolFeatures::MQ
                | VhostUserProtocolFeatures::INFLIGHT_SHMFD
                | VhostUserProtocolFeatures::BACKEND_REQ
                | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS
                | VhostUserProtocolFeatures::RESET_DEVICE
                | VhostUserProtocolFeatures::REPLY_ACK
                | VhostUserProtocolFeatures::LOG_SHMFD;
            let wanted =
                if self.options.inflight { wanted } else { wanted - VhostUserProtocolFeatures::INFLIGHT_SHMFD };
            let agreed = offered & wanted;
            self.messages.set_protocol_features(agreed)?;
            if self.options.need_reply && agreed.contains(VhostUserProtocolFeatures::REPLY_ACK) {
                self.messages.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
            }
            if agreed.contains(VhostUserProtocolFeatures::BACKEND_REQ) {
                let (ours, theirs) = UnixStream::pair()?;
                ours.set_read_timeout(Some(ANSWER_TIMEOUT))?;
                self.messages.set_backend_request_fd(&theirs)?;
                self.channel = Some(ours);
            }
            if agreed.contains(VhostUserProtocolFeatures::MQ) {
                let most = self.messages.get_queue_num()?;
                if u64::from(self.options.queues) > most {
                    return Err(format!("the device has {most} queues").into());
                }
            }
            self.options.inflight &= agreed.contains(VhostUserProtocolFeatures::INFLIGHT_SHMFD);
        } else {
            self.options.inflight = false;
        }
        self.messages.set_owner()?;
        Ok(())
    }

    /// Starts the device as a VMM does at the driver's first start and after a reset: with a new in-flight region.
    ///
    /// # Errors
    /// When the device refuses something.
    pub fn start(&mut self) -> Result<()> {
        self.messages.set_features(self.features)?;
        if self.options.inflight {
            // As QEMU, which asks for its `queue-size=` whatever size the rings of its guest have by then.
            let wanted = VhostUserInflight::new(0, 0, self.options.queues, INFLIGHT_QUEUE_SIZE);
            let (mut description, file) = self.messages.get_inflight_fd(&wanted)?;
            if self.options.narrow_inflight {
                let of_queue = (16 + 16 * u64::from(INFLIGHT_QUEUE_SIZE)).next_multiple_of(64);
                description.mmap_size = of_queue * u64::from(self.options.queues);
            }
            self.inflight = Some(Inflight { description, file });
        }
        self.start_with_bases(&vec![0; self.queues.len()])
    }

    /// Starts the device with the in-flight region there is, at the given positions in the available rings.
    ///
    /// # Errors
    /// When the device refuses something.
    pub fn start_with_bases(&mut self, bases: &[u16]) -> Result<()> {
        if let Some(inflight) = &self.inflight {
            self.messages.set_inflight_fd(&inflight.description, inflight.file.as_raw_fd())?;
        }
        self.say_log()?;
        self.messages.set_features(self.features | if self.log.is_some() { LOG_ALL } else { 0 })?;
        let regions = self.ram.regions()?;
        if self.options.memory_slots {
            // Each is said once: QEMU remembers what a device knows.
            for region in regions.iter().take(if self.has_said_regions { 0 } else { regions.len() }) {
                self.messages.add_mem_region(region)?;
            }
            self.has_said_regions = true;
        } else {
            self.messages.set_mem_table(&regions)?;
        }
        for (index, base) in bases.iter().enumerate() {
            self.start_queue(index, *base)?;
        }
        for index in 0..bases.len() {
            self.messages.set_vring_enable(index, true)?;
        }
        Ok(())
    }

    fn start_queue(&mut self, index: usize, base: u16) -> Result<()> {
        let queue = &self.queues[index];
        self.messages.set_vring_num(index, queue.options().size)?;
        self.messages.set_vring_base(index, base)?;
        self.say_addresses(index)?;
        let queue = &self.queues[index];
        self.messages.set_vring_call(index, &queue.call)?;
        self.messages.set_vring_kick(index, &queue.kick)?;
        Ok(())
    }

    /// Has the guest told of answers at another descriptor from now on, while its ring runs, as QEMU does. What was told at the one before is
    /// lost.
    ///
    /// # Errors
    /// When the device refuses.
    pub fn change_call(&mut self, index: usize) -> Result<()> {
        self.queues[index].call = vmm_sys_util::eventfd::EventFd::new(libc::EFD_CLOEXEC | libc::EFD_NONBLOCK)?;
        Ok(self.messages.set_vring_call(index, &self.queues[index].call)?)
    }

    fn say_addresses(&mut self, index: usize) -> Result<()> {
        let queue = &self.queues[index];
        let layout = queue.layout();
        let config = VringConfigData {
            queue_max_size: queue.options().size,
            queue_size: queue.options().size,
            flags: if self.log.is_some() { RING_LOG } else { 0 },
            desc_table_addr: self.ram.user_address(layout.descriptors),
            used_ring_addr: self.ram.user_address(layout.used),
            avail_ring_addr: self.ram.user_address(layout.available),
            log_addr: self.log.is_some().then_some(layout.used),
        };
        Ok(self.messages.set_vring_addr(index, &config)?)
    }

    fn say_log(&mut self) -> Result<()> {
        if let Some(log) = &self.log {
            let region = VhostUserDirtyLogRegion {
                mmap_size: log.bytes as u64,
                mmap_offset: 0,
                mmap_handle: log.file.as_raw_fd(),
            };
            self.messages.set_log_base(0, Some(region))?;
        }
        Ok(())
    }

    /// Has a running device mark the pages that it writes, as a VMM does that begins to move its guest; over a reconnection, too.
    ///
    /// # Errors
    /// When the device refuses.
    pub fn start_logging(&mut self) -> Result<Arc<PageLog>> {
        let end = self.ram.regions()?.iter().map(|region| region.guest_phys_addr + region.memory_size).max();
        let log = PageLog::new(end.unwrap_or_default().div_ceil(4096))?;
        self.log = Some(Arc::clone(&log));
        self.say_log()?;
        self.messages.set_features(self.features | LOG_ALL)?;
        (0..self.queues.len()).try_for_each(|index| self.say_addresses(index))?;
        Ok(log)
    }

    /// The end of that.
    ///
    /// # Errors
    /// When the device refuses.
    pub fn stop_logging(&mut self) -> Result<()> {
        self.log = None;
        self.messages.set_features(self.features)?;
        (0..self.queues.len()).try_for_each(|index| self.say_addresses(index))
    }

    /// Stops the device as a VMM does for a pause or a reset. Returns the positions in the available rings.
    ///
    /// # Errors
    /// When the device does not answer.
    pub fn stop(&mut self) -> Result<Vec<u16>> {
        for index in 0..self.queues.len() {
            self.messages.set_vring_enable(index, false)?;
        }
        (0..self.queues.len()).map(|index| Ok(u16::try_from(self.messages.get_vring_base(index)?)?)).collect()
    }

    /// Connects again after the connection (or the device) was lost, and goes on where the used rings were when it was lost, or
    /// are, if nobody looked then: what QEMU does with `reconnect=`. The memory, the rings and the in-flight region are those
    /// of before.
    ///
    /// # Errors
    /// When the device cannot be reached or refuses something.
    pub fn reconnect(&mut self) -> Result<()> {
        self.messages = connect(&self.path, self.options.queues)?;
        self.handshake()?;
        let bases = self.used_at_loss.take().unwrap_or_else(|| self.used_indices());
        self.start_with_bases(&bases)
    }

    fn used_indices(&self) -> Vec<u16> {
        self.queues.iter().map(DriverQueue::used_index).collect()
    }

    /// Notices now that the connection is lost, as QEMU does before a device that ends has answered everything: what is
    /// answered after this moment is not in the bases that [`FrontEnd::reconnect`] names.
    pub fn notice_loss(&mut self) {
        self.used_at_loss = Some(self.used_indices());
    }

    /// Drops the connection without a word, as a VMM that was killed. Memory, rings and in-flight region stay.
    ///
    /// # Errors
    /// When there is no descriptor left.
    pub fn disconnect(&mut self) -> Result<()> {
        self.notice_loss();
        let (other, _) = UnixStream::pair()?;
        self.messages = Frontend::from_stream(other, u64::from(self.options.queues));
        self.channel = None;
        Ok(())
    }

    /// Reads the device's configuration space.
    ///
    /// # Errors
    /// When the device does not answer with exactly what was asked for.
    pub fn config(&mut self, offset: u32, size: u32) -> Result<Vec<u8>> {
        let empty = vec![0; size as usize];
        let (_, config) = self.messages.get_config(offset, size, VhostUserConfigFlags::empty(), &empty)?;
        Ok(config)
    }

    /// The size of the disk in bytes.
    ///
    /// # Errors
    /// When the device does not answer.
    pub fn size_bytes(&mut self) -> Result<u64> {
        let sectors = self.config(0, 8)?;
        Ok(u64::from_le_bytes(sectors[..8].try_into()?) * 512)
    }

    /// Waits for a message of the device to the VMM. Returns its request code.
    ///
    /// # Errors
    /// When none comes in time.
    pub fn wait_for_message(&mut self) -> Result<u32> {
        let channel = self.channel.as_mut().ok_or("there is no channel for messages of the device")?;
        let mut header = [0u8; 12];
        channel.read_exact(&mut header)?;
        Ok(u32::from_le_bytes(header[0..4].try_into()?))
    }

    /// The in-flight region, if there is one.
    pub fn inflight(&self) -> Option<&Inflight> {
        self.inflight.as_ref()
    }
}
