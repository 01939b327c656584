//! Taking versions away: their content is at home, or the guest let it go.

use super::Journal;
use crate::error::Error;
use crate::medium::Medium;

impl<M: Medium> Journal<M> {
    /// Takes every committed version of these home blocks away: durably so on return. Recovery then leaves what is at their
    /// homes, so whatever has to be there must be durable before.
    ///
    /// # Errors
    /// When the medium fails.
    pub fn release(&mut self, homes: impl IntoIterator<Item = u64>) -> Result<(), Error> {
        self.check_works()?;
        let mut latest = Vec::new();
        for home in homes {
            if let Some(versions) = self.versions.remove(&home) {
                latest.push(versions.latest);
                if let Some(old) = versions.old {
                    self.invalidate(old);
                }
            }
        }
        if latest.is_empty() {
            return Ok(());
        }
        // An old version that outlived the latest one would be taken for it.
        self.fence()?;
        self.counters.versions_released += latest.len() as u64;
        for index in latest {
            self.invalidate(index);
        }
        self.fence()
    }

    /// Makes `content` the committed version of a home block that has none, outside any transaction of the guest's:
    /// durable on return. For a block whose home is about to be overwritten while the guest's log still holds it.
    ///
    /// # Errors
    /// When there is no room, a transaction is begun, or the medium fails.
    pub fn restore(&mut self, home: u64, content: &[u8]) -> Result<(), Error> {
        self.check_works()?;
        if self.has_pending() || self.contains(home) || self.room() == 0 {
            return Err(Error::Failed {
                what: format!("holding block {home} in the NVM region again"),
                source: std::io::Error::from(std::io::ErrorKind::ResourceBusy),
            });
        }
        // First the base, so that a crash in between can only leave a sequence number that is too high, never one that
        // was used before.
        let sequence = self.sequence();
        self.put(home, content)?;
        self.publish()?;
        self.set_sequence(sequence)
    }
}
