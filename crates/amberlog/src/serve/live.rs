//! What there is of a VM while it is served.

use super::promise::Shortfalls;
use crate::vm::VmObserver;
use crate::vm::change::Doors;
use crate::vm::migration::Migration;
use crate::vm::moments::Moments;
use block_device::DeviceHandle;
use block_route::Route;
use placement::Journals;
use std::sync::Arc;

/// What there is of it while it is served.
#[derive(Clone)]
pub(super) struct Live {
    pub(super) journals: Arc<Journals>,
    pub(super) handles: Vec<DeviceHandle<dyn Route>>,
    pub(super) moments: Arc<Moments>,
    pub(super) attachments: Vec<crate::vm::qemu::Attachment>,
    pub(super) observer: Arc<VmObserver>,
    pub(super) doors: Doors,
    pub(super) migration: Option<Arc<Migration>>,
    /// Where less is promised than `durable-within` asks for.
    pub(super) shortfalls: Arc<Shortfalls>,
}
