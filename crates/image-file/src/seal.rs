//! A seal on an image: whether anybody has written to it since, and whose guest left it so.
//!
//! A guest that is moved to another host leaves its image to whoever comes next, and may come back if nobody came. Locks say who has an
//! image now, not who had it meanwhile. So who leaves one sets the time of its last change to one that no clock would give: the seconds
//! of that moment, and as nanoseconds a number made of these and of how far the guest's rings had got, which only the same guest names.
//! Every write of anybody, amberlog or not, on whatever host, sets that time anew, and breaks the seal.
//!
//! Must never: call a seal whole that a write has broken. One in 10^9 writes could hit the same nanosecond of the same second by chance;
//! a file system without nanoseconds keeps no seal, which is seen when it is put on. Failure story: a broken seal is no damage: whoever
//! finds one does not go on with what it knew of the image.

use std::fs::File;
use std::io;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// See the module.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Seal {
    /// Since 1970.
    pub seconds: u64,
    /// What the guest's rings say.
    pub nanoseconds: u32,
}

/// Of 64 bits, each of which depends on all that were given.
fn mixed(number: u64) -> u64 {
    let number = (number ^ (number >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    let number = (number ^ (number >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    number ^ (number >> 33)
}

impl Seal {
    /// That of a guest whose rings, by number, have got so far, put on in this second.
    pub fn of(seconds: u64, positions: &[(u16, u16)]) -> Self {
        // "amberlog" and a version: two hosts have to make the same of the same.
        let first = mixed(seconds ^ 0x616d_6265_726c_6f67 ^ 1);
        let all = positions.iter().fold(first, |so_far, (ring, position)| {
            mixed(so_far ^ (u64::from(*ring) << 16) ^ u64::from(*position) ^ (1 << 40))
        });
        Seal { seconds, nanoseconds: (all % 1_000_000_000) as u32 }
    }

    /// Whether it is the one of a guest whose rings have got so far.
    pub fn is_of(self, positions: &[(u16, u16)]) -> bool {
        self == Seal::of(self.seconds, positions)
    }

    /// What stands on an image now.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn on(image: &File) -> io::Result<Self> {
        let since = image.metadata()?.modified()?.duration_since(UNIX_EPOCH).unwrap_or_default();
        Ok(Seal { seconds: since.as_secs(), nanoseconds: since.subsec_nanos() })
    }

    /// Puts one on: all that was written is durable before, and so is the seal on return.
    ///
    /// # Errors
    /// When storage fails, or the file system does not keep it.
    pub fn put_on(image: &File, positions: &[(u16, u16)]) -> io::Result<Self> {
        image.sync_all()?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let seal = Seal::of(now.as_secs(), positions);
        image.set_modified(UNIX_EPOCH + Duration::new(seal.seconds, seal.nanoseconds))?;
        image.sync_all()?;
        if Seal::on(image)? != seal {
            return Err(io::Error::other("its file system does not keep the time of a change to the nanosecond"));
        }
        Ok(seal)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn a_seal_is_its_guests_and_breaks_with_any_write() {
        let mut file = tempfile::tempfile().expect("a file");
        file.write_all(b"a disk").expect("written");
        let left = [(0, 17), (1, 65535)];
        let seal = Seal::put_on(&file, &left).expect("sealed");
        assert_eq!(Seal::on(&file).expect("read"), seal);
        assert!(seal.is_of(&left));
        for other in [&[][..], &[(0, 17)], &[(0, 18), (1, 65535)], &[(1, 17), (0, 65535)], &[(0, 17), (2, 65535)]] {
            assert!(!seal.is_of(other), "{other:?}");
        }
        assert!(!Seal { seconds: seal.seconds + 1, ..seal }.is_of(&left));
        file.write_all(b".").expect("written");
        assert_ne!(Seal::on(&file).expect("read"), seal);
        assert!(!Seal::on(&file).expect("read").is_of(&left));
    }

    /// Two hosts, and two versions, make the same of the same.
    #[test]
    fn what_a_seal_says_stays_so() {
        let known = |seal: Seal| (seal.seconds, seal.nanoseconds);
        assert_eq!(known(Seal::of(1_800_000_000, &[])).0, 1_800_000_000);
        let all: std::collections::BTreeSet<u32> =
            (0..1000).map(|position| Seal::of(1_800_000_000, &[(0, position)]).nanoseconds).collect();
        assert_eq!(all.len(), 1000);
    }
}
