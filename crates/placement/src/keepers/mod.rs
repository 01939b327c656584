//! The places where a log can live, one keeper each.

mod dropped;
mod held;
mod shipped;
mod stored;

pub(crate) use held::Held;
pub(crate) use shipped::Shipped;
pub(crate) use stored::{finish_on_storage, leave};

use crate::disk::{Disk, PlacementKind};
use crate::keeper::Keeper;
use crate::nvm::{InRegion, NvmDisk};
use dropped::Dropped;
use journal_area::{JournalArea, LogId};
use std::sync::Arc;
use stored::Stored;

/// The keeper of a log that lives there, with its homes on disk `home`. One that is shipped to a server has one of its own ([`Shipped`]);
/// where that cannot be, or there is no region for it, it is in its own place on storage.
pub(crate) fn keeper_of(
    area: &Arc<JournalArea>,
    id: LogId,
    placement: PlacementKind,
    home: &Arc<Disk>,
    region: Option<&Arc<NvmDisk>>,
) -> Arc<dyn Keeper> {
    match placement {
        PlacementKind::Retain | PlacementKind::Copy => Arc::new(Held::new(Arc::clone(area), id)),
        PlacementKind::Storage | PlacementKind::Remote => Arc::new(Stored),
        PlacementKind::Discard => Arc::new(Dropped::new(Arc::clone(area))),
        PlacementKind::Nvm => match region {
            Some(nvm) => Arc::new(InRegion::new(home, area, nvm)),
            None => Arc::new(Stored),
        },
    }
}
