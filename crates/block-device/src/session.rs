//! One connection of a VMM: its vhost-user messages, passed on to the worker.

use crate::config::DeviceConfig;
use crate::config_space::{self, LOG_ALL, PROTOCOL_FEATURES};
use crate::inflight::{InflightRegion, Shape};
use crate::ring::{Patience, RingAddresses};
use crate::worker::{Mailbox, Worker};
use block_route::Route;
use guest_memory::{DirtyLog, RegionDescriptor, Told, VmMemory};
use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};
use vhost::VhostUserMemoryRegionBase;
use vhost::vhost_user::message::{
    VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags, VhostUserInflight, VhostUserLog,
    VhostUserMemoryRegion, VhostUserProtocolFeatures, VhostUserShMemConfig, VhostUserSharedMsg,
    VhostUserSingleMemoryRegion, VhostUserVringAddrFlags, VhostUserVringState,
};
use vhost::vhost_user::{Error, GpuBackend, Result, VhostUserBackendReqHandlerMut};

/// The most memory regions a VMM can name.
const MEMORY_SLOTS_MAX: usize = 128;
/// A worker that has not answered by then, beyond the drain timeout, is not waited for when a connection ends.
const STOP_MARGIN: Duration = Duration::from_secs(1);
/// While a VMM waits for its rings, it is looked whether it is still there this often.
const PRESENCE_CHECK: Duration = Duration::from_millis(50);

/// The socket for messages from the device to the VMM.
#[derive(Debug)]
pub(crate) struct BackendChannel {
    socket: File,
}

impl BackendChannel {
    pub(crate) fn new(socket: File) -> Self {
        BackendChannel { socket }
    }

    /// Sends CONFIG_CHANGE: the VMM then reads the configuration space again.
    ///
    /// # Errors
    /// When the socket is full or closed.
    pub(crate) fn config_changed(&self) -> io::Result<()> {
        // struct: request 2 (VHOST_USER_BACKEND_CONFIG_CHANGE_MSG), flags version 1 and no reply, no payload.
        let mut message = [0u8; 12];
        message[0..4].copy_from_slice(&2u32.to_le_bytes());
        message[4..8].copy_from_slice(&1u32.to_le_bytes());
        let flags = rustix::net::SendFlags::DONTWAIT | rustix::net::SendFlags::NOSIGNAL;
        let sent = rustix::net::send(&self.socket, &message, flags)?;
        if sent == message.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
    }
}

/// A memory region as the VMM described it.
#[derive(Debug)]
struct MemoryRegion {
    gpa: u64,
    size: u64,
    user_addr: u64,
    file_offset: u64,
    file: File,
}

/// Whether nobody is to be waited for any more: the VMM has gone, or this device ends.
pub(crate) type IsOver = Box<dyn Fn() -> bool + Send>;

/// See the module.
pub(crate) struct Session<R: Route + ?Sized> {
    config: DeviceConfig,
    mailbox: Mailbox<R>,
    is_over: IsOver,
    memory: Arc<VmMemory>,
    protocol_features: VhostUserProtocolFeatures,
    regions: Vec<MemoryRegion>,
    told: Told,
}

fn refused(what: impl Into<String>) -> Error {
    Error::ReqHandlerError(io::Error::other(what.into()))
}

/// Stops all rings, within this time: the VMM is not there any more, or soon will not be.
pub(crate) fn stop_rings<R: Route + ?Sized>(mailbox: &Mailbox<R>, time: Duration) {
    let end = Instant::now() + time;
    let Some(rings) = mailbox.ask(|worker| worker.running_rings()) else { return };
    let mut answers = Vec::with_capacity(rings.len());
    for index in rings {
        let (reply, answer) = sync_channel(1);
        mailbox.ask(move |worker| worker.stop_ring(u32::from(index), reply, Patience::Until(end)));
        answers.push(answer);
    }
    for answer in answers {
        let _ = answer.recv_timeout(time + STOP_MARGIN);
    }
}

/// Waits until nothing has the guest's memory any more, or it is over: before the connection of a VMM is dropped that lives, and whose
/// guest would go on without anybody being asked.
pub(crate) fn await_memory<R: Route + ?Sized>(mailbox: &Mailbox<R>, is_over: impl Fn() -> bool) {
    while !is_over() && mailbox.ask(|worker| worker.has_guest_memory()) == Some(true) {
        std::thread::sleep(PRESENCE_CHECK);
    }
}

impl<R: Route + ?Sized> Session<R> {
    pub(crate) fn new(config: DeviceConfig, mailbox: Mailbox<R>, memory: Arc<VmMemory>, is_over: IsOver) -> Self {
        let told = Told::of(&memory);
        Session {
            config,
            mailbox,
            is_over,
            memory,
            protocol_features: VhostUserProtocolFeatures::empty(),
            regions: Vec::new(),
            told,
        }
    }

    /// Waits for a ring that is being stopped, however long that takes.
    fn stopped(&self, answer: &Receiver<VhostUserVringState>) -> Result<VhostUserVringState> {
        loop {
            match answer.recv_timeout(PRESENCE_CHECK) {
                Ok(state) => return Ok(state),
                Err(RecvTimeoutError::Disconnected) => return Err(refused("the device is being stopped")),
                Err(RecvTimeoutError::Timeout) if (self.is_over)() => {
                    return Err(refused("the VMM has gone, or the device ends, before its requests have"));
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }

    /// Has the worker do what a message asks for.
    fn tell<T: Send + 'static>(
        &self,
        job: impl FnOnce(&mut Worker<R>) -> std::result::Result<T, String> + Send + 'static,
    ) -> Result<T> {
        match self.mailbox.ask(job) {
            Some(Ok(value)) => Ok(value),
            Some(Err(reason)) => Err(refused(reason)),
            None => Err(refused("the device is being stopped")),
        }
    }

    fn map_regions(&mut self) -> Result<()> {
        let descriptors = self
            .regions
            .iter()
            .map(|region| {
                Ok(RegionDescriptor {
                    gpa: region.gpa,
                    size: region.size,
                    user_addr: region.user_addr,
                    file: region.file.try_clone()?,
                    file_offset: region.file_offset,
                })
            })
            .collect::<io::Result<Vec<_>>>()
            .map_err(Error::ReqHandlerError)?;
        let table = self.memory.map(descriptors).map_err(|e| refused(e.to_string()))?;
        let table = Arc::new(table);
        let next = Arc::clone(&table);
        self.tell(move |worker| {
            worker.set_table(next);
            Ok(())
        })?;
        self.told.goes_by(&table);
        Ok(())
    }

    fn supported_protocol_features(&self) -> VhostUserProtocolFeatures {
        let log = if self.config.gate.is_some() {
            VhostUserProtocolFeatures::LOG_SHMFD
        } else {
            VhostUserProtocolFeatures::empty()
        };
        // Never STATUS: vhost 0.18 does not answer its messages and QEMU 7.2 then reconnects for ever.
        VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::INFLIGHT_SHMFD
            | VhostUserProtocolFeatures::BACKEND_REQ
            | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS
            | VhostUserProtocolFeatures::RESET_DEVICE
            | VhostUserProtocolFeatures::REPLY_ACK
            | log
    }
}

impl<R: Route + ?Sized> VhostUserBackendReqHandlerMut for Session<R> {
    fn set_owner(&mut self) -> Result<()> {
        Ok(())
    }

    fn reset_owner(&mut self) -> Result<()> {
        // Deprecated; QEMU sent it in place of RESET_DEVICE.
        self.reset_device()
    }

    fn reset_device(&mut self) -> Result<()> {
        let mut answers = Vec::new();
        for index in self.tell(|worker| Ok(worker.rings_in_use()))? {
            let (reply, answer) = sync_channel(1);
            self.tell(move |worker| worker.stop_ring(u32::from(index), reply, Patience::Begun))?;
            answers.push(answer);
        }
        for answer in answers {
            self.stopped(&answer)?;
        }
        self.tell(|worker| {
            worker.reset();
            Ok(())
        })
    }

    fn get_features(&mut self) -> Result<u64> {
        let log = if self.config.gate.is_some() { LOG_ALL } else { 0 };
        Ok(config_space::features(&self.config.image, self.config.write_cache) | log)
    }

    fn set_features(&mut self, features: u64) -> Result<()> {
        debug_assert_ne!(config_space::features(&self.config.image, self.config.write_cache) & PROTOCOL_FEATURES, 0);
        self.tell(move |worker| worker.set_features(features))
    }

    fn set_mem_table(
        &mut self,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _postcopy_listening: Option<bool>,
    ) -> Result<Option<Vec<VhostUserMemoryRegionBase>>> {
        self.regions = regions
            .iter()
            .zip(files)
            .map(|(region, file)| MemoryRegion {
                gpa: region.guest_phys_addr,
                size: region.memory_size,
                user_addr: region.user_addr,
                file_offset: region.mmap_offset,
                file,
            })
            .collect();
        self.map_regions()?;
        Ok(None)
    }

    fn set_vring_num(&mut self, index: u32, num: u32) -> Result<()> {
        self.tell(move |worker| worker.set_ring_size(index, num))
    }

    fn set_vring_addr(
        &mut self,
        index: u32,
        flags: VhostUserVringAddrFlags,
        descriptors: u64,
        used: u64,
        available: u64,
        log: u64,
    ) -> Result<()> {
        let used_log = flags.contains(VhostUserVringAddrFlags::VHOST_VRING_F_LOG).then_some(log);
        let addresses = RingAddresses { descriptors, available, used, used_log };
        self.tell(move |worker| worker.set_ring_addresses(index, addresses))
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> Result<()> {
        self.tell(move |worker| worker.set_ring_base(index, base))
    }

    fn get_vring_base(&mut self, index: u32) -> Result<VhostUserVringState> {
        let (reply, answer) = sync_channel(1);
        // Where the guest goes on elsewhere, nobody there does again what is in flight here.
        let gate = self.config.gate.clone();
        let patience = if gate.is_some() { Patience::All } else { Patience::Begun };
        self.tell(move |worker| worker.stop_ring(index, reply, patience))?;
        let state = self.stopped(&answer)?;
        if let (Some(gate), Ok(ring), Ok(position)) = (&gate, u16::try_from(index), u16::try_from(state.num)) {
            gate.ring_stopped(ring, position);
        }
        if let Some(gate) = gate
            && let Some(positions) = self.tell(|worker| Ok(worker.take_stopped_positions()))?
        {
            gate.stopped(&positions);
        }
        Ok(state)
    }

    fn set_vring_kick(&mut self, index: u8, file: Option<File>) -> Result<()> {
        self.tell(move |worker| worker.set_ring_kick(u32::from(index), file))
    }

    fn set_vring_call(&mut self, index: u8, file: Option<File>) -> Result<()> {
        self.tell(move |worker| worker.set_ring_call(u32::from(index), file))
    }

    fn set_vring_err(&mut self, index: u8, file: Option<File>) -> Result<()> {
        self.tell(move |worker| worker.set_ring_err(u32::from(index), file))
    }

    fn get_protocol_features(&mut self) -> Result<VhostUserProtocolFeatures> {
        Ok(self.supported_protocol_features())
    }

    fn set_protocol_features(&mut self, features: u64) -> Result<()> {
        let features = VhostUserProtocolFeatures::from_bits_retain(features);
        if !self.supported_protocol_features().contains(features) {
            return Err(refused(format!("the protocol features {:#x} were not offered", features.bits())));
        }
        self.protocol_features = features;
        Ok(())
    }

    fn get_queue_num(&mut self) -> Result<u64> {
        Ok(u64::from(self.config.queues))
    }

    fn set_vring_enable(&mut self, index: u32, enable: bool) -> Result<()> {
        self.tell(move |worker| worker.set_ring_enabled(index, enable))
    }

    fn get_config(&mut self, offset: u32, size: u32, _flags: VhostUserConfigFlags) -> Result<Vec<u8>> {
        let config = config_space::config_space(&self.config.image, self.config.segments_max, self.config.queues);
        Ok(config_space::config_part(&config, offset, size))
    }

    fn set_config(&mut self, _offset: u32, _bytes: &[u8], _flags: VhostUserConfigFlags) -> Result<()> {
        // The one field a driver may write, `writeback`, belongs to CONFIG_WCE, which is not offered.
        log::debug!("disk {}: a write to the configuration space is ignored", self.config.name);
        Ok(())
    }

    fn set_gpu_socket(&mut self, _gpu_backend: GpuBackend) -> Result<()> {
        Err(refused("a disk has no GPU"))
    }

    fn get_shared_object(&mut self, _uuid: VhostUserSharedMsg) -> Result<File> {
        Err(refused("a disk has no shared objects"))
    }

    fn get_inflight_fd(&mut self, inflight: &VhostUserInflight) -> Result<(VhostUserInflight, File)> {
        let (queues, queue_size) = (inflight.num_queues, inflight.queue_size);
        if queues > self.config.queues {
            return Err(refused(format!("an in-flight region for {queues} queues, of {}", self.config.queues)));
        }
        let (file, size) = InflightRegion::create(queues, queue_size).map_err(Error::ReqHandlerError)?;
        self.tell(|worker| {
            worker.region_requested();
            Ok(())
        })?;
        Ok((VhostUserInflight::new(size, 0, queues, queue_size), file))
    }

    fn set_inflight_fd(&mut self, inflight: &VhostUserInflight, file: File) -> Result<()> {
        let shape = Shape {
            mmap_size: inflight.mmap_size,
            mmap_offset: inflight.mmap_offset,
            queues: inflight.num_queues,
            queue_size: inflight.queue_size,
        };
        let region = InflightRegion::open(file, shape).map_err(Error::ReqHandlerError)?;
        self.tell(move |worker| {
            worker.set_region(region);
            Ok(())
        })
    }

    fn get_max_mem_slots(&mut self) -> Result<u64> {
        Ok(MEMORY_SLOTS_MAX as u64)
    }

    fn add_mem_region(
        &mut self,
        region: &VhostUserSingleMemoryRegion,
        file: File,
        _postcopy_listening: Option<bool>,
    ) -> Result<Option<VhostUserMemoryRegionBase>> {
        if self.regions.len() >= MEMORY_SLOTS_MAX {
            return Err(refused(format!("more than {MEMORY_SLOTS_MAX} memory regions")));
        }
        self.regions.push(MemoryRegion {
            gpa: region.guest_phys_addr,
            size: region.memory_size,
            user_addr: region.user_addr,
            file_offset: region.mmap_offset,
            file,
        });
        if let Err(error) = self.map_regions() {
            self.regions.pop();
            return Err(error);
        }
        Ok(None)
    }

    fn remove_mem_region(&mut self, region: &VhostUserSingleMemoryRegion) -> Result<()> {
        let (gpa, size, user_addr) = (region.guest_phys_addr, region.memory_size, region.user_addr);
        let position =
            self.regions.iter().position(|known| (known.gpa, known.size, known.user_addr) == (gpa, size, user_addr));
        let Some(position) = position else {
            return Err(refused(format!("no memory region at {gpa:#x} with {size:#x} bytes is known")));
        };
        self.regions.remove(position);
        self.map_regions()
    }

    fn set_device_state_fd(
        &mut self,
        _direction: VhostTransferStateDirection,
        _phase: VhostTransferStatePhase,
        _file: File,
    ) -> Result<Option<File>> {
        Err(refused("a disk has no state to migrate"))
    }

    fn check_device_state(&mut self) -> Result<()> {
        Err(refused("a disk has no state to migrate"))
    }

    fn get_shmem_config(&mut self) -> Result<VhostUserShMemConfig> {
        Err(refused("a disk has no shared memory regions"))
    }

    fn set_log_base(&mut self, log: &VhostUserLog, file: File) -> Result<()> {
        if self.config.gate.is_none() {
            return Err(refused("dirty logging is not offered"));
        }
        let log = DirtyLog::open(file, log.mmap_size, log.mmap_offset).map_err(Error::ReqHandlerError)?;
        self.tell(move |worker| {
            worker.set_log(log);
            Ok(())
        })
    }
}
