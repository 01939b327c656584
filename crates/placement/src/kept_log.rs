//! A log and who keeps it, which is what a VM's journals and its routes have of each.
//!
//! A keeper is told of its log with every call, and knows nothing of what is here: so a log can be given to another keeper, and
//! whoever has a [`KeptLog`] for the time of an operation sees one place and one keeper all along.

use crate::disk::PlacementKind;
use crate::keeper::Keeper;
use crate::log::Log;
use std::io;
use std::ops::Deref;
use std::sync::Arc;

/// One log and who keeps it.
#[derive(Clone, Debug)]
pub struct KeptLog {
    pub(crate) log: Log,
    /// Who is told of what concerns it.
    pub(crate) keeper: Arc<dyn Keeper>,
}

impl Deref for KeptLog {
    type Target = Log;

    fn deref(&self) -> &Log {
        &self.log
    }
}

impl KeptLog {
    /// Whether storage has the whole log, and will until somebody wishes it elsewhere: it is there by its placement, or because it cannot be
    /// where that says; or it goes to a server otherwise and that was paused.
    ///
    /// # Errors
    /// When that was wished and cannot come to be.
    pub fn is_on_storage(&self) -> io::Result<bool> {
        let is_stored = self.log.placement == PlacementKind::Storage || self.keeper.leaves_nothing_here();
        Ok(is_stored || self.keeper.is_paused()?)
    }
}
