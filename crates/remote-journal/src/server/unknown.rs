//! Connections whose peers have not proven who they are, or nobody asks to, as where metrics are. Anybody can make them, so there are few;
//! and so that nobody keeps others out with them, the oldest goes when there is no room for the next: one of the address that has the most.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

/// How many there may be at a time where journals are served.
pub(super) const UNKNOWN_MAX: usize = 128;
/// An honest peer proves who it is within this time.
const GRACE: Duration = Duration::from_millis(500);
/// Between two looks whether there is room.
pub(super) const PAUSE: Duration = Duration::from_millis(20);

struct Peer {
    address: IpAddr,
    since: Instant,
    evict: oneshot::Sender<()>,
}

/// All of them, by number, which is by age.
pub(super) struct Unknown {
    max: usize,
    peers: Mutex<(u64, BTreeMap<u64, Peer>)>,
}

/// One of them; it is none any more when this is dropped.
pub(super) struct Entry(Arc<Unknown>, u64);

impl Unknown {
    /// Nobody yet, and room for so many.
    pub fn with_room_for(max: usize) -> Arc<Self> {
        Arc::new(Unknown { max, peers: Mutex::default() })
    }

    fn lock(&self) -> MutexGuard<'_, (u64, BTreeMap<u64, Peer>)> {
        self.peers.lock().expect("no panic under this lock")
    }

    /// Adds a connection; the other half hears when it has to go.
    pub fn add(this: &Arc<Self>, address: IpAddr) -> (Entry, oneshot::Receiver<()>) {
        let (evict, evicted) = oneshot::channel();
        let mut peers = this.lock();
        peers.0 += 1;
        let number = peers.0;
        peers.1.insert(number, Peer { address, since: Instant::now(), evict });
        (Entry(Arc::clone(this), number), evicted)
    }

    /// Whether there is room for another one, which is made where somebody has had his time.
    pub fn has_room(&self) -> bool {
        let peers = &mut self.lock().1;
        if peers.len() < self.max {
            return true;
        }
        let Some(number) = victim(peers.iter().map(|(number, peer)| (*number, peer.address))) else { return true };
        if peers[&number].since.elapsed() < GRACE {
            return false;
        }
        if let Some(peer) = peers.remove(&number) {
            let _ = peer.evict.send(());
        }
        true
    }
}

/// The oldest of the address that has the most.
fn victim(peers: impl Iterator<Item = (u64, IpAddr)> + Clone) -> Option<u64> {
    let mut of_address: HashMap<IpAddr, usize> = HashMap::new();
    peers.clone().for_each(|(_, address)| *of_address.entry(address).or_default() += 1);
    let most = of_address.values().copied().max()?;
    peers.into_iter().find(|(_, address)| of_address[address] == most).map(|(number, _)| number)
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.0.lock().1.remove(&self.1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_has_the_most_goes_first_and_of_those_the_oldest() {
        let address = |last| IpAddr::from([192, 0, 2, last]);
        let peers =
            [(3, address(1)), (5, address(2)), (7, address(3)), (8, address(2)), (9, address(1)), (11, address(2))];
        assert_eq!(victim(peers.into_iter()), Some(5));
        assert_eq!(victim(peers[..1].iter().copied()), Some(3));
        assert_eq!(victim(std::iter::empty()), None);
    }
}
