//! Whether a replay has been carried out at home already, but for its last step: the journal that says that it is empty.

use crate::batch;
use crate::error::Error;
use crate::home::HomeWriter;
use crate::superblock::SuperblockHome;
use extfs::ReadAt;
use jbd2::{LogRead, Plan};
use std::io;

/// Whether everything that `plan` would write is at `home` already, and its superblock as such a replay leaves it.
pub(crate) fn is_home<L: LogRead + Send, H: ReadAt>(plan: &Plan, log: &mut L, home: &H) -> Result<bool, Error> {
    let mut compared = Compared { home, differs: false };
    let superblock = SuperblockHome::read(&compared, plan.format().block_size)?;
    let mut rest = superblock.rest_of(&mut compared);
    let written = batch::write(plan, log, Some(&mut rest));
    let replayed = rest.kept.take();
    if compared.differs {
        return Ok(false);
    }
    written?;
    Ok(superblock.is_finished(replayed, plan.format().has_block_checksums()))
}

/// A home that is written nothing: what would be is compared with what is there.
struct Compared<'h, H> {
    home: &'h H,
    differs: bool,
}

impl<H: ReadAt> ReadAt for Compared<'_, H> {
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.home.read_at(offset, buffer)
    }

    fn size(&self) -> u64 {
        self.home.size()
    }
}

impl<H: ReadAt> HomeWriter for Compared<'_, H> {
    fn write_at(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        let mut there = vec![0; data.len()];
        self.home.read_at(offset, &mut there)?;
        if there == data {
            return Ok(());
        }
        // There is nothing more to find out.
        self.differs = true;
        Err(io::Error::other("something else is there"))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
