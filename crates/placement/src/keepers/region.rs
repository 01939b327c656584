//! A log in a region of persistent memory, as the rest of the VM sees it. While its guest runs, the disk's own route keeps it
//! (`crate::nvm`); what is here is what others ask: what it owes, and what has to be done when its guest is gone.

use super::stored::{finish_on_storage, replay, stored_superblock};
use crate::keeper::{Finished, Keeper, LogBlock, LogVerdict, OddVerdict, Steps, SuperblockBlock, SuperblockWritten};
use crate::log::Log;
use crate::stored::{self, Says};
use block_route::RequestKind;
use guest_memory::MemorySlice;
use std::io;

#[derive(Debug)]
pub(crate) struct Region;

impl Keeper for Region {
    fn superblock(
        &self,
        log: &Log,
        block: SuperblockBlock<'_>,
        _steps: &mut Steps,
    ) -> io::Result<(SuperblockWritten, bool)> {
        Ok(stored_superblock(log, block.content))
    }

    fn log_write(&self, _log: &Log, _block: LogBlock<'_>) -> LogVerdict {
        LogVerdict::Store
    }

    fn odd_log_write(&self, _log: &Log, _kind: RequestKind, _slices: &[MemorySlice]) -> OddVerdict {
        OddVerdict::Store
    }

    fn blocks_owed(&self, log: &Log) -> Option<u64> {
        log.home.options.nvm.as_ref()?.blocks_of(log.index)
    }

    fn finish(&self, log: &Log, is_vm_gone: bool) -> io::Result<Finished> {
        let recovered = match &log.home.options.nvm {
            Some(nvm) => nvm.recover(log.index, &log.home.file).map_err(io::Error::other)?,
            None => None,
        };
        let Some(report) = recovered else { return finish_on_storage(log, is_vm_gone) };
        log.set_closed();
        let mut reports = vec![report];
        if is_vm_gone && matches!(stored::of(log)?.says, Says::Live(_) | Says::LeftToGuest(_)) {
            // It was about to leave the region, which owed nothing any more.
            if let Finished::Recovered(more) = replay(log)? {
                reports.extend(more);
            }
        }
        Ok(Finished::Recovered(reports))
    }
}
