//! The driver's side of a split ring (virtio 1.2, section 2.7), honest or not.

use crate::Result;
use crate::ram::GuestRam;
use std::os::fd::AsRawFd;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::eventfd::EventFd;

/// Flags of descriptors.
pub mod descriptor_flags {
    /// The chain goes on.
    pub const NEXT: u16 = 1;
    /// The device writes.
    pub const WRITE: u16 = 2;
    /// A table of descriptors.
    pub const INDIRECT: u16 = 4;
}

/// One descriptor, as it lies in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Descriptor {
    /// Guest address of the buffer.
    pub address: u64,
    /// Its length in bytes.
    pub len: u32,
    /// See [`descriptor_flags`].
    pub flags: u16,
    /// Index of the next one.
    pub next: u16,
}

impl Descriptor {
    /// A buffer that the device reads.
    pub fn readable(address: u64, len: u32) -> Self {
        Descriptor { address, len, flags: 0, next: 0 }
    }

    /// A buffer that the device writes.
    pub fn writable(address: u64, len: u32) -> Self {
        Descriptor { address, len, flags: descriptor_flags::WRITE, next: 0 }
    }

    fn bytes(self) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[0..8].copy_from_slice(&self.address.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.len.to_le_bytes());
        bytes[12..14].copy_from_slice(&self.flags.to_le_bytes());
        bytes[14..16].copy_from_slice(&self.next.to_le_bytes());
        bytes
    }
}

/// How a ring is made.
#[derive(Clone, Copy, Debug)]
pub struct QueueOptions {
    /// Descriptors; a power of two.
    pub size: u16,
    /// VIRTIO_F_EVENT_IDX has been negotiated.
    pub event_index: bool,
}

/// Where the parts of a ring lie, as guest addresses.
#[derive(Clone, Copy, Debug)]
pub struct QueueLayout {
    /// The descriptor table.
    pub descriptors: u64,
    /// The available ring.
    pub available: u64,
    /// The used ring.
    pub used: u64,
}

/// The driver's side of one ring.
#[derive(Debug)]
pub struct DriverQueue {
    ram: GuestRam,
    options: QueueOptions,
    layout: QueueLayout,
    /// Written by the driver to have the device look.
    pub kick: EventFd,
    /// Written by the device to have the driver look.
    pub call: EventFd,
    free: Vec<u16>,
    /// The descriptors that belong to each head in flight.
    chains: Vec<Vec<u16>>,
    next_available: u16,
    published: u16,
    next_used: u16,
}

impl DriverQueue {
    /// A ring in memory taken from `ram`.
    ///
    /// # Errors
    /// When there is no descriptor left for its events.
    pub fn new(ram: &GuestRam, options: QueueOptions) -> Result<Self> {
        let size = u64::from(options.size);
        let layout = QueueLayout {
            descriptors: ram.take(16 * size, 4096),
            available: ram.take(6 + 2 * size, 4096),
            used: ram.take(6 + 8 * size, 4096),
        };
        Ok(DriverQueue {
            ram: ram.clone(),
            options,
            layout,
            kick: EventFd::new(libc::EFD_CLOEXEC | libc::EFD_NONBLOCK)?,
            call: EventFd::new(libc::EFD_CLOEXEC | libc::EFD_NONBLOCK)?,
            free: (0..options.size).rev().collect(),
            chains: vec![Vec::new(); usize::from(options.size)],
            next_available: 0,
            published: 0,
            next_used: 0,
        })
    }

    /// Where its parts lie.
    pub fn layout(&self) -> QueueLayout {
        self.layout
    }

    /// How it was made.
    pub fn options(&self) -> QueueOptions {
        self.options
    }

    /// Descriptors that are free.
    pub fn free_descriptors(&self) -> usize {
        self.free.len()
    }

    /// Writes one descriptor of the table, whatever it says.
    pub fn put_descriptor(&self, index: u16, descriptor: Descriptor) {
        self.ram.write(self.layout.descriptors + 16 * u64::from(index), &descriptor.bytes());
    }

    /// Writes a table of descriptors anywhere, linked in order.
    pub fn put_table(&self, address: u64, descriptors: &[Descriptor]) {
        for (position, descriptor) in descriptors.iter().enumerate() {
            let mut descriptor = *descriptor;
            if position + 1 < descriptors.len() {
                descriptor.flags |= descriptor_flags::NEXT;
                descriptor.next = position as u16 + 1;
            }
            self.ram.write(address + 16 * position as u64, &descriptor.bytes());
        }
    }

    /// Puts a chain into the table and makes it available (not yet published). Returns its head; none when the table is
    /// full.
    pub fn add(&mut self, descriptors: &[Descriptor]) -> Option<u16> {
        let indices = self.reserve(descriptors.len())?;
        for (position, descriptor) in descriptors.iter().enumerate() {
            let mut descriptor = *descriptor;
            if let Some(next) = indices.get(position + 1) {
                descriptor.flags |= descriptor_flags::NEXT;
                descriptor.next = *next;
            }
            self.put_descriptor(indices[position], descriptor);
        }
        let head = indices[0];
        self.chains[usize::from(head)] = indices;
        self.make_available(head);
        Some(head)
    }

    /// Like [`DriverQueue::add`], through an indirect table at `table`.
    pub fn add_indirect(&mut self, table: u64, descriptors: &[Descriptor]) -> Option<u16> {
        self.put_table(table, descriptors);
        self.add(&[Descriptor {
            address: table,
            len: 16 * descriptors.len() as u32,
            flags: descriptor_flags::INDIRECT,
            next: 0,
        }])
    }

    /// Takes descriptors off the free list without using them; the caller writes and offers them. They come back when
    /// the first is used.
    pub fn reserve(&mut self, count: usize) -> Option<Vec<u16>> {
        (count > 0 && self.free.len() >= count).then(|| (0..count).filter_map(|_| self.free.pop()).collect())
    }

    /// Names the descriptors that come back to the free list when `head` is used.
    pub fn belongs_to(&mut self, head: u16, indices: Vec<u16>) {
        self.chains[usize::from(head)] = indices;
    }

    /// Puts a head into the available ring, legal or not; [`DriverQueue::publish`] shows it to the device.
    pub fn make_available(&mut self, head: u16) {
        let slot = u64::from(self.next_available % self.options.size);
        self.ram.put(self.layout.available + 4 + 2 * slot, head.to_le());
        self.next_available = self.next_available.wrapping_add(1);
    }

    /// Shows the device everything that was made available.
    pub fn publish(&mut self) {
        self.set_available_index(self.next_available);
    }

    /// Writes the available index, legal or not.
    pub fn set_available_index(&mut self, index: u16) {
        let address = GuestAddress(self.layout.available + 2);
        self.ram.memory().store(index.to_le(), address, Ordering::Release).expect("the ring is in memory");
    }

    /// Kicks the device if it wants to be. Returns whether it was.
    ///
    /// # Errors
    /// When the event descriptor cannot be written.
    pub fn kick(&mut self) -> Result<bool> {
        fence(Ordering::SeqCst);
        let (old, new) = (self.published, self.next_available);
        self.published = new;
        let wanted = if self.options.event_index {
            let event = u16::from_le(self.ram.get::<u16>(self.available_event_address()));
            new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
        } else {
            let flags = u16::from_le(self.ram.get::<u16>(self.layout.used));
            flags & 1 == 0 && new != old
        };
        if wanted {
            self.kick.write(1)?;
        }
        Ok(wanted)
    }

    fn available_event_address(&self) -> u64 {
        self.layout.used + 4 + 8 * u64::from(self.options.size)
    }

    fn used_event_address(&self) -> u64 {
        self.layout.available + 4 + 2 * u64::from(self.options.size)
    }

    /// The device's used index.
    pub fn used_index(&self) -> u16 {
        let address = GuestAddress(self.layout.used + 2);
        let index: u16 = self.ram.memory().load(address, Ordering::Acquire).expect("the ring is in memory");
        u16::from_le(index)
    }

    /// The driver's available index, as it would be published.
    pub fn available_index(&self) -> u16 {
        self.next_available
    }

    /// How many answers the driver has taken.
    pub fn taken_index(&self) -> u16 {
        self.next_used
    }

    /// Takes one answer: the head, and the bytes the device says it wrote. Its descriptors are free again.
    pub fn take_used(&mut self) -> Option<(u16, u32)> {
        let (head, written) = self.take_used_keep()?;
        if let Some(indices) = self.chains.get_mut(usize::from(head)) {
            self.free.append(indices);
        }
        Some((head, written))
    }

    /// Like [`DriverQueue::take_used`], but the descriptors stay as they are.
    pub fn take_used_keep(&mut self) -> Option<(u16, u32)> {
        if self.used_index() == self.next_used {
            return None;
        }
        let slot = u64::from(self.next_used % self.options.size);
        let address = self.layout.used + 4 + 8 * slot;
        let (head, written) =
            (u32::from_le(self.ram.get::<u32>(address)), u32::from_le(self.ram.get::<u32>(address + 4)));
        self.next_used = self.next_used.wrapping_add(1);
        Some((head as u16, written))
    }

    /// Asks to be interrupted for the next answer. Returns whether one is there already.
    pub fn enable_interrupts(&mut self) -> bool {
        if self.options.event_index {
            self.ram.put(self.used_event_address(), self.next_used.to_le());
        } else {
            self.ram.put(self.layout.available, 0u16);
        }
        fence(Ordering::SeqCst);
        self.used_index() != self.next_used
    }

    /// Asks not to be interrupted.
    pub fn disable_interrupts(&mut self) {
        if self.options.event_index {
            // Behind what can come next.
            self.ram.put(self.used_event_address(), self.next_used.wrapping_sub(1).to_le());
        } else {
            self.ram.put(self.layout.available, 1u16.to_le());
        }
    }

    /// Sleeps until the device interrupts or the time is over. Returns whether it did.
    ///
    /// # Errors
    /// When waiting fails.
    pub fn wait(&self, timeout: Duration) -> Result<bool> {
        let deadline = Instant::now() + timeout;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let mut list = [libc::pollfd { fd: self.call.as_raw_fd(), events: libc::POLLIN, revents: 0 }];
            let milliseconds = i32::try_from(left.as_millis()).unwrap_or(i32::MAX);
            // SAFETY: the list is one valid pollfd.
            let ready = unsafe { libc::poll(list.as_mut_ptr(), 1, milliseconds) };
            if ready > 0 {
                let _ = self.call.read();
                return Ok(true);
            }
            if ready < 0 && std::io::Error::last_os_error().kind() != std::io::ErrorKind::Interrupted {
                return Err("waiting for an interrupt failed".into());
            }
            if left.is_zero() {
                return Ok(false);
            }
        }
    }
}
