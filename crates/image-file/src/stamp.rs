//! What an image looked like when it was looked at last, so that whoever comes back to it sees whether it is still that.
//!
//! Device and inode say which file it is, not what is in it: a backup that is copied over it leaves both. A file says when it was
//! written last, in its own time; of a block device the kernel counts what is written to it, and which medium it has had. A lock says
//! nothing, for `cp`, `dd` and `e2fsck` take none.
//!
//! Must never: call an image changed that was only read, or of which only the owner, the mode or the name was changed. Failure story:
//! a change that leaves the time alone (a block device whose kernel does not count, a disk that another host writes to) is not seen here;
//! whoever has to be sure compares bytes that every writer of a file system changes, too ([`sum`]).

use rustix::fs::{AtFlags, FileType, StatxFlags};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, UNIX_EPOCH};

/// See the module.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stamp {
    /// How large it is.
    size_bytes: u64,
    /// Of a file: when it was written to last, in seconds and nanoseconds since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    changed: Option<(i64, i64)>,
    /// Of a block device: what the kernel has counted ([`counted`]).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    counted: Option<String>,
}

/// The number of a device's medium, and how many sectors were written and given back since the host has the device.
fn counted(device: u64) -> Option<String> {
    let directory = format!("/sys/dev/block/{}:{}", rustix::fs::major(device), rustix::fs::minor(device));
    let stat = std::fs::read_to_string(format!("{directory}/stat")).ok()?;
    let fields: Vec<&str> = stat.split_ascii_whitespace().collect();
    let medium = std::fs::read_to_string(format!("{directory}/diskseq")).unwrap_or_default();
    let discarded = fields.get(13).unwrap_or(&"0");
    Some(format!("{} {} {discarded}", medium.trim(), fields.get(6)?))
}

impl Stamp {
    /// What an open image looks like now.
    ///
    /// # Errors
    /// When that cannot be asked.
    pub fn of(image: &File) -> io::Result<Self> {
        let metadata = image.metadata()?;
        if FileType::from_raw_mode(metadata.mode()) == FileType::BlockDevice {
            // What lies in the page cache is counted when it is written.
            image.sync_data()?;
            let size_bytes = rustix::fs::seek(image, rustix::fs::SeekFrom::End(0))?;
            return Ok(Stamp { size_bytes, changed: None, counted: counted(metadata.rdev()) });
        }
        // Of whoever serves the file, if that is another host or process, not of what is remembered here.
        let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_FORCE_SYNC;
        let is = rustix::fs::statx(image, c"", flags, StatxFlags::SIZE | StatxFlags::MTIME)?;
        Ok(Stamp {
            size_bytes: is.stx_size,
            changed: Some((is.stx_mtime.tv_sec, is.stx_mtime.tv_nsec.into())),
            counted: None,
        })
    }

    /// What has become of the image since, if anything: the rest of a sentence that begins with its name.
    pub fn became(&self, now: &Stamp) -> Option<String> {
        if self == now {
            return None;
        }
        if self.size_bytes != now.size_bytes {
            return Some(format!("had {} bytes and has {} now", self.size_bytes, now.size_bytes));
        }
        Some(match now.changed.and_then(|(seconds, _)| u64::try_from(seconds).ok()) {
            Some(seconds) => {
                let ago = (UNIX_EPOCH + Duration::from_secs(seconds)).elapsed().unwrap_or_default().as_secs();
                format!("was written to since by somebody else (last {ago} s ago)")
            }
            None => "was written to since by somebody else, or has another medium".to_owned(),
        })
    }
}

/// A sum of bytes, by which they are known again: FNV-1a with 64 bits. (A CRC would not do for a block that ends with its own.)
pub fn sum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |sum, byte| (sum ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Seal;
    use std::io::Read;
    use std::os::unix::fs::{FileExt, PermissionsExt};

    #[test]
    fn an_image_that_was_written_to_is_not_what_it_was_and_one_that_was_read_is() {
        let image = tempfile::NamedTempFile::new().expect("a file");
        image.as_file().write_all_at(&[7; 4096], 0).expect("written");
        // A time that no clock gives: a write in the same moment is seen, too.
        Seal::put_on(image.as_file(), &[]).expect("sealed");
        let before = Stamp::of(image.as_file()).expect("looked");
        let mut read = Vec::new();
        File::open(image.path()).expect("opened").read_to_end(&mut read).expect("read");
        image.as_file().set_permissions(std::fs::Permissions::from_mode(0o640)).expect("its mode");
        std::fs::hard_link(image.path(), image.path().with_extension("link")).expect("a link");
        std::fs::remove_file(image.path().with_extension("link")).expect("removed");
        let same = Stamp::of(&File::open(image.path()).expect("opened")).expect("looked");
        assert_eq!((&same, before.became(&same)), (&before, None));
        // The same bytes again, as a backup would.
        image.as_file().write_all_at(&read[..512], 512).expect("written");
        let after = Stamp::of(image.as_file()).expect("looked");
        assert!(before.became(&after).expect("changed").contains("was written to since by somebody else"));
        image.as_file().set_len(8192).expect("larger");
        let after = Stamp::of(image.as_file()).expect("looked");
        assert_eq!(before.became(&after).expect("changed"), "had 4096 bytes and has 8192 now");
    }

    /// It is written down for the next program.
    #[test]
    fn a_stamp_stays_what_it_is_in_a_file() {
        let text = r#"{"size_bytes":4096,"changed":[1800000000,17]}"#;
        let stamp: Stamp = serde_json::from_str(text).expect("understood");
        assert_eq!(serde_json::to_string(&stamp).expect("written"), text);
        let device = r#"{"size_bytes":4096,"counted":"3 100 0"}"#;
        let device: Stamp = serde_json::from_str(device).expect("understood");
        assert!(stamp.became(&device).is_some());
        assert_eq!(sum(b""), 0xcbf2_9ce4_8422_2325);
        assert_eq!(sum(b"foobar"), 0x85944171f73967e8);
    }

    #[test]
    fn what_is_written_to_a_block_device_is_counted() {
        let image = tempfile::NamedTempFile::new().expect("a file");
        image.as_file().set_len(1 << 20).expect("its length");
        let made = std::process::Command::new("losetup").args(["--find", "--show"]).arg(image.path()).output();
        let Some(device) = made.ok().filter(|made| made.status.success()) else {
            println!("skipped: no loop device can be made here");
            return;
        };
        let device = String::from_utf8(device.stdout).expect("a name").trim().to_owned();
        let look = || Stamp::of(&File::open(&device).expect("opened")).expect("looked");
        let before = look();
        let mut read = [0; 4096];
        File::open(&device).expect("opened").read_exact(&mut read).expect("read");
        assert_eq!(before.became(&look()), None);
        let writer = std::fs::OpenOptions::new().write(true).open(&device).expect("opened");
        // In the page cache only.
        writer.write_all_at(&read, 4096).expect("written");
        let after = look();
        drop(writer);
        let detached = std::process::Command::new("losetup").args(["-d", &device]).status();
        assert!(detached.expect("losetup").success());
        assert!(before.counted.is_some() && before.became(&after).is_some(), "{before:?} {after:?}");
    }
}
