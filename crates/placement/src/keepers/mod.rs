//! The places where a log can live, one keeper each.

mod dropped;
mod held;
mod region;
mod shipped;
mod stored;

pub(crate) use held::Held;
pub(crate) use shipped::Shipped;

use crate::disk::PlacementKind;
use crate::keeper::Keeper;
use dropped::Dropped;
use journal_area::{JournalArea, LogId};
use region::Region;
use std::sync::Arc;
use stored::Stored;

/// The keeper of a log that lives there. One that is shipped to a server has one of its own ([`Shipped`]); where that cannot be, it is
/// in its own place on storage.
pub(crate) fn keeper_of(area: &Arc<JournalArea>, id: LogId, placement: PlacementKind) -> Arc<dyn Keeper> {
    match placement {
        PlacementKind::Retain | PlacementKind::Copy => Arc::new(Held::new(Arc::clone(area), id)),
        PlacementKind::Storage | PlacementKind::Remote => Arc::new(Stored),
        PlacementKind::Discard => Arc::new(Dropped::new(Arc::clone(area))),
        PlacementKind::Nvm => Arc::new(Region),
    }
}
