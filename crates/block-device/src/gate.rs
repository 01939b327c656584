//! Whether a guest may use its disk at all: where it can be moved to another host while it runs, the image is another's before it
//! comes, and after it has gone.

use block_route::Start;
use std::fmt::Debug;

/// What becomes of a driver that starts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Begin {
    /// It uses the disk, and this is how its start is to be understood.
    Yes(Start),
    /// Nothing is taken from its rings yet; asked again soon.
    Wait,
    /// Every request of it fails, for this reason.
    No(String),
}

/// Who knows ([`crate::DeviceConfig::gate`]). Rings are named by number, with how far they had got.
pub trait Gate: Debug + Send + Sync {
    /// A driver has started these rings at these positions. Called by the disk's thread before it takes anything; must not wait.
    fn begins(&self, positions: &[(u16, u16)], start: Start) -> Begin;

    /// The VMM has stopped a ring there, with nothing of it in flight, and waits for its answer until this returns. Not called by the disk's
    /// thread.
    fn ring_stopped(&self, ring: u16, position: u16);

    /// The VMM has stopped the last ring. Nothing is in flight, and the VMM waits for its answer until this returns: not called by the
    /// disk's thread, which answers meanwhile.
    fn stopped(&self, positions: &[(u16, u16)]);

    /// The VMM has dropped its connection, or lost it: no ring is running, and nothing was stopped in order.
    fn gone(&self);

    /// The VMM wants the pages marked that are written, or no longer: its guest is being moved.
    fn logging(&self, is_logging: bool);
}
